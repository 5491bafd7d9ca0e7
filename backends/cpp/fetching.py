"""Whether instructions fetch the weights of few rows (dot.h), measured once and kept.

Products of 1 to 3 rows wait for memory. Some processors see the stream of weights and fetch ahead;
others read 1.3 times as fast if instructions do. No list of processors tells which. At the first
start with a library a matmul of one row is timed both ways (0.2 s), and the ratio is kept with it.
No result depends on the choice.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from backends.cpp.tiles import INT4, table

ROUNDS = 7  # of both ways in turn; the least time of each counts
PAYS = 1.03  # a smaller ratio is noise
OUTPUTS, INPUTS, GROUP = 65536, 2048, 128  # 68 MB of int4, which no cache of a core holds
BYTE = 0x3D  # in the weights: codes and scales (0x3d3d, bfloat16's 0.046) that are normal numbers


def choose(kept: Path) -> None:
    """Fetch as the file `kept` says, which is written where it is missing or damaged."""
    try:
        ratio = float(kept.read_text())
    except (OSError, ValueError):
        ratio = measured()
        _keep(kept, ratio)
    torch.ops.gpt_eagle.fetch_for_few(ratio >= PAYS)


def measured() -> float:
    """Measure how many times as fast a matmul of one row is if instructions fetch its weights."""
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


def _keep(kept: Path, ratio: float) -> None:
    """Write the ratio as a whole. Where that fails, the next start measures again."""
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="build.", dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        made.write_text(f"{ratio:.3f}\n")
        os.replace(made, kept)
