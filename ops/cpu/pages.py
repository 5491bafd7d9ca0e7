"""Weights in huge pages, of 2 MB where a CPU's usual ones have 4 KB: it looks up their addresses less often.

Linux gives huge pages to who asks (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled, which is what most
distributions set), and neither glibc nor PyTorch does. Not here: other systems, caches, and what a step computes.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import nn

HUGE_PAGE = 2 << 20  # bytes
ALIGNMENT = 64  # bytes, a cache line


def in_huge_pages(module: nn.Module) -> None:
    """Move the tensors of a module, one after the other, into one region of huge pages. Writes: their `data`.

    Small modules, those on other devices, and all where there are no such pages, stay where they are.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device.type == "cpu" and t.is_contiguous()]
    sizes = [-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors]
    if sum(sizes) < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    region = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them gives usual ones
        region.madvise(mmap.MADV_HUGEPAGE)
    left = torch.frombuffer(region, dtype=torch.uint8)  # which keeps the region
    left = left[-left.data_ptr() % HUGE_PAGE :]
    for tensor, size in zip(tensors, sizes):
        place, left = left[: tensor.nbytes].view(tensor.dtype).view(tensor.shape), left[size:]
        tensor.data = place.copy_(tensor.detach())
