"""What a run measured: acceptance, tokens, seconds, memory; the line it ends with, and the rows of its trace.

Here too: how much memory is free, and whether a plan fits it.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Stats:
    """What happened, added up over every row and cycle."""

    accept_lengths: list[int] = field(
        default_factory=list
    )  # per cycle and live row, bonus not counted
    live_rows: list[list[int]] = field(
        default_factory=list
    )  # per cycle, the rows that these lengths belong to
    tokens: int = 0  # decoded after prefill
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # drafting and extending
    verify_s: float = 0.0
    presets: list[tuple[int, float]] = field(
        default_factory=list
    )  # per cycle, what ran and its seconds

    def add(self, other: Stats) -> None:
        """Add what another session measured."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self) -> dict[str, Any]:
        """The measured part of `--json`'s `stats`. tau: emitted tokens per verification, bonus included."""
        lengths = self.accept_lengths
        return {
            "tau": sum(lengths) / len(lengths) + 1 if lengths else 0.0,
            "accept_lengths": lengths,
            "cycles": len(lengths),
            "tokens_per_s": self.tokens / self.decode_s if self.decode_s else 0.0,
            "decode_s": self.decode_s,
            "prefill_s": self.prefill_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
        }


def summary(engine: Any, stats: Stats) -> dict[str, Any]:
    """The `stats` object of `--json`. engine: `decode.Engine`."""
    stand_in, table = engine.target.config.stand_in, engine.tree_policy.table(stats.presets)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # that torchrun has started
    return (
        ({"stand_in": stand_in} if stand_in else {})  # its numbers never go without its name
        | ({"ranks": ranks} if ranks > 1 else {})
        | ({"tree_auto": table} if table else {})
        | stats.summary()
        | {"compile_s": engine.compile_s, "load_s": engine.load_s}
        | {"peak_memory_bytes": peak_memory_bytes(engine.config.device)}
    )


def stats_line(stats: dict[str, Any]) -> str:
    """The line a run ends with."""
    tokens = round(stats["tokens_per_s"] * stats["decode_s"])
    compiled = f"compile {stats['compile_s']:.1f} s, " if stats["compile_s"] else ""  # on CUDA
    line = (
        f"{tokens} tokens in {stats['decode_s']:.2f} s: {stats['tokens_per_s']:.1f} tokens/s, tau {stats['tau']:.2f} "
        f"({stats['cycles']} cycles); prefill {stats['prefill_s']:.2f} s, {compiled}load {stats['load_s']:.1f} s, "
        f"peak memory {stats['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    if "ranks" in stats:
        line += f" on rank 0 of {stats['ranks']}"
    if "stand_in" in stats:
        line = f"stand-in, {stats['stand_in']}: {line}"
    if "tree_auto" in stats:
        most = max(stats["tree_auto"], key=lambda preset: preset["cycles"])
        times = (
            f"{most['measured_ms']:.1f} ms each, {most['predicted_ms']:.1f} predicted"
            if most["cycles"]
            else "unused"
        )
        name = "no tree, drafting does not pay here," if most["tree"] == "none" else most["tree"]
        cycles = sum(preset["cycles"] for preset in stats["tree_auto"])
        line += f"; tree auto: {name} in {most['cycles']} of {cycles} cycles ({times})"
    if "speedup" in stats:
        line += (
            f"; {stats['speedup']:.2f}x of vanilla ({stats['vanilla_tokens_per_s']:.1f} tokens/s)"
        )
        if stats["identical"] is not None:
            line += f", {100 * stats['identical']:.0f} % of sequences identical"
    return line


def trace_row(tree_trace: list[list], row: int, report: Any) -> dict[str, Any]:
    """One line of `--trace`.

    tree_trace: of all rows, the tree's tokens, parents and depths, the accepted path, and the nodes' values if there are any
    (a padded node's is null)
    report: `decode.Report` of the row
    """
    tokens, parents, depths, path, *values = (x[row] for x in tree_trace)
    line = {
        "row": row,
        "pos": report.pos,
        "root": tokens[0],
        "draft_tokens": tokens[1:],
        "parents": parents[1:],
        "depths": depths[1:],
        "accept_length": report.length,
        "path": path[1 : report.length + 1],
        "emitted": report.emitted[: report.length + 1],
    }
    for each in values:
        line["values"] = [v if v > float("-inf") else None for v in each[1:]]
    return line


def environment(device: str) -> dict[str, Any]:
    """What a measurement depends on."""
    cuda = device.startswith("cuda")
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if cuda
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def peak_memory_bytes(device: str) -> int:
    """Peak device memory on CUDA, peak resident memory of the process elsewhere."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """The memory that this process holds; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def free_bytes(device: str) -> int:
    """Memory that this process can still take: of a CUDA device; elsewhere of this machine, or its container's limit.

    Ranks that torchrun has started on one machine have equal parts of what is free, and of the limit.
    """
    if device.startswith("cuda"):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free, ranks = sys.maxsize, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with suppress(OSError, KeyError):
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kb = {row[0]: int(row[1]) for row in rows}
        free = 1024 * (kb["MemAvailable:"] + kb["SwapFree:"]) // ranks
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no container, or one without a limit
            free = min(
                free, int(Path("/sys/fs/cgroup", limit).read_text()) // ranks - resident_bytes()
            )
    return free


def check_memory(plan: dict[str, int], device: str, remedy: str, rows: int = 1) -> str:
    """Check that memory is free before it is taken.

    plan: what takes it -> how much a row takes (bytes)
    Returns: what the rows take, and how many would fit, in words. Raises: ValueError with the sum and its parts.
    """
    each, free = sum(plan.values()), free_bytes(device)
    need, fit = each * rows, free // max(each, 1)
    if need > free:
        parts = " + ".join(f"{what} {size * rows / 1e9:.1f} GB" for what, size in plan.items())
        fits = f", enough for {fit} of the {rows} rows" if rows > 1 else ""
        raise ValueError(
            f"{parts} = {need / 1e9:.1f} GB of memory are needed, {free / 1e9:.1f} GB are free{fits}; {remedy}"
        )
    return f"{rows} rows take {need / 1e9:.2f} GB of memory; {fit} would fit"


def rows_memory(engine: Any) -> str:
    """Check that memory is free for the rows of a session. engine: `decode.Engine`.

    Returns: what the rows take, and how many would fit, in words. Raises: ValueError when it is not free.
    """
    target, drafter, weight = engine.target, engine.drafter, engine.target.embedding.weight
    caches, drafts = (
        engine.slots
        * weight.itemsize
        * sum(2 * b.attention.kv_heads * b.attention.head_dim for b in layers or ())
        for layers in (target.layers, drafter.layers)
    )
    noise = (
        drafter.size + drafter.depth + 1 if engine.config.temperature else 0
    )  # rows, with those of adjusted scores
    scores = 4 * target.config.vocab_size * (max(drafter.size, drafter.width) + noise)
    plan = {
        "the caches": caches + drafts,
        "scores of a tree": scores,
        "its candidates": 20 * drafter.width**2,
    }
    plan |= {"those without a draft": caches} if engine.config.compare else {}
    remedy = "lower --batch_size, --context or --tree_topk"
    return check_memory(plan, str(weight.device), remedy, engine.config.batch_size)
