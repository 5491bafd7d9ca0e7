"""The memory that is free, and the check that a plan fits it. No torch is imported but for CUDA."""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path


def resident_bytes() -> int:
    """Return the memory that this process holds; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def free_bytes(device: str) -> int:
    """Return the memory that this process can still take.

    It is a CUDA device's memory; elsewhere this machine's, or its container's limit. Ranks that
    torchrun has started on one machine have equal parts of the free memory, and of the limit.
    """
    if device.startswith("cuda"):
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = sys.maxsize
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with suppress(OSError, KeyError):
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        kb = {line[0]: int(line[1]) for line in lines}
        free = 1024 * (kb["MemAvailable:"] + kb["SwapFree:"]) // ranks
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no container, or one without a limit
            limit = int(Path("/sys/fs/cgroup", name).read_text()) // ranks
            free = min(free, limit - resident_bytes())
    return free


def check_memory(plan: dict[str, int], device: str, remedy: str, count: int = 1) -> str:
    """Check that memory is free before it is taken.

    plan: name -> bytes per sequence; count: sequences
    Returns: the memory that the sequences take, and the number that would fit, in words.
    Raises: ValueError with the sum and its parts when it is not free.
    """
    each = sum(plan.values())
    need = each * count
    free = free_bytes(device)
    fit = free // max(each, 1)
    if need > free:
        parts = " + ".join(f"{name} {size * count / 1e9:.1f} GB" for name, size in plan.items())
        fits = ""
        if count > 1:
            fits = f", enough for {fit} of the {count} sequences"
        raise ValueError(
            f"{parts} = {need / 1e9:.1f} GB of memory are needed, "
            f"{free / 1e9:.1f} GB are free, {(need - free) / 1e9:.1f} GB are missing{fits}; "
            f"{remedy}"
        )
    return f"{count} sequences take {need / 1e9:.2f} GB of memory; {fit} would fit"
