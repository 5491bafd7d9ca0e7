"""Time attention of a few rows over a cache on a CPU: our operator against PyTorch's SDPA on the same inputs.

    python scripts/bench_attention.py --threads 4

Both sides are called in turn, round after round; medians and quartiles, ratios within a round. SDPA is called as
ops/attention.py calls it where our operator cannot serve: heads of a group folded into rows, the cache cut to its
used part.
Not here: correctness (tests/test_kernels_cpu.py), CUDA (kernel_bench.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import _path  # noqa: F401  (finds the project)
import ops.attention
import ops.cpu.build
from measure import Series, environment
from options import one_line_errors, option, parse

SHAPES = ((8, 4, 32, 200), (8, 4, 128, 300), (32, 8, 64, 1000), (32, 32, 128, 700))  # heads, kv heads, width, prefix
ROWS = (1, 5, 26, 60)


@dataclass(frozen=True)
class AttentionConfig:
    """Options."""

    rounds: int = option(21, "calls of each side")
    threads: int = option(0, "CPU threads; 0 leaves torch's default")


def seconds(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    """One call."""
    began = time.perf_counter()
    attend(*inputs)
    return time.perf_counter() - began


def bench(config: AttentionConfig) -> None:
    """Measure and print everything."""
    if config.rounds < 5:
        raise ValueError(f"--rounds must be at least 5, for a median with a spread; it is {config.rounds}")
    if config.threads:
        torch.set_num_threads(config.threads)
    missing = ops.cpu.build.load_operators()
    if missing:
        raise ValueError(f"the operators cannot be built here ({missing}); there is nothing to compare")
    print(", ".join(f"{key} {value}" for key, value in environment("cpu").items()))
    print(f"bf16, B = 1, {config.rounds} rounds; us ours : us SDPA (SDPA / ours: median, quartiles)\n")
    print("| heads / kv heads x width, prefix | " + " | ".join(f"T = {rows}" for rows in ROWS) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    for heads, kv_heads, width, prefix in SHAPES:
        k, v = (torch.randn(1, kv_heads, prefix + max(ROWS), width).bfloat16() for _ in range(2))
        cells = []
        for rows in ROWS:
            mask = (torch.rand(1, rows, rows) < 0.3).tril() | torch.eye(rows, dtype=torch.bool)
            inputs = (torch.randn(1, rows, heads, width).bfloat16(), k, v, torch.tensor([prefix]), mask)
            sides = (torch.ops.gpt_eagle.attention, ops.attention._tree_attention_torch)
            taken = [[seconds(side, inputs) for side in sides] for _ in range(config.rounds + 2)][2:]  # two warm up
            ours, theirs = (Series.quartiles([pair[i] for pair in taken]) for i in (0, 1))
            ratio = Series.quartiles([b / a for a, b in taken])
            cells.append(f"{ours.median * 1e6:.0f} : {theirs.median * 1e6:.0f} ({ratio.text(1, 1)})")
        print(f"| {heads} / {kv_heads} x {width}, {prefix} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    config = parse(AttentionConfig, "bench_attention.py", __doc__)
    with one_line_errors("bench_attention.py"):
        bench(config)


if __name__ == "__main__":
    main()
