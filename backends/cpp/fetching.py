"""The gain of instructions that fetch the weights of few rows (dot.h), which build.py keeps.

Products of 1 to 3 rows wait for memory. Some processors see the stream of weights and fetch ahead;
others read 1.3 times as fast if instructions do. No list of processors tells which, so a matmul of
one row is timed both ways. No result depends on the choice.
"""

from __future__ import annotations

import time

import torch

from backends.cpp.tiles import INT4, table

ROUNDS = 7  # of both ways in turn; the least time of each counts
OUTPUTS, INPUTS, GROUP = 65536, 2048, 128  # 68 MB of int4, which no cache of a core holds
BYTE = 0x3D  # in the weights: codes and scales (0x3d3d, bfloat16's 0.046) that are normal numbers


def gain_of_fetching() -> float:
    """Return how many times as fast a matmul of one row is if instructions fetch; takes 0.2 s."""
    operators = torch.ops.gpt_eagle
    size = operators.weight_bytes(INT4, n=OUTPUTS, k=INPUTS, group=GROUP)
    # explicit, since a caller may have other defaults: "meta" while it builds a model
    weight = torch.full((size,), BYTE, dtype=torch.uint8, device="cpu")
    operands = (weight, table(weight, OUTPUTS, INPUTS, INT4, GROUP), None, OUTPUTS, False)
    x = torch.ones(1, INPUTS, dtype=torch.bfloat16, device="cpu")
    least = {False: float("inf"), True: float("inf")}
    for _ in range(ROUNDS):
        for fetches in least:
            operators.fetch_for_few(fetches)
            began = time.perf_counter()
            operators.matmul(x, *operands)
            least[fetches] = min(least[fetches], time.perf_counter() - began)
    return least[False] / least[True]
