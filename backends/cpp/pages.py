"""Weights in huge pages: 2 MB instead of 4 KB, so the CPU translates fewer addresses.

Where /sys/kernel/mm/transparent_hugepage/enabled is `madvise`, Linux gives huge pages to programs
that request them, and neither glibc nor PyTorch does. Vanilla decoding of SmolLM2 gains 1 to 9 %
in int4, up to 4 % in int8, and in 16 bits 2 % on a Zen 3, 10 % on a Zen 4
(benchmarks/RESULTS.md, smaller questions).

Trade-off: the system takes .3 to .9 s longer to find 1 GB of them. Weights that share a region are
freed together. Not here: models below 64 MB, experts, copies of LM heads, caches.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor, nn

HUGE_PAGE = 2 << 20  # bytes
REGION = 64 << 20  # bytes that smaller tensors share; pages that are not written take no memory
ALIGNMENT = 64  # bytes, a cache line


class HugePages:
    """Regions of huge pages, filled one after the other."""

    def __init__(self):
        # the free end of the region that smaller tensors share
        self.rest = torch.empty(0, dtype=torch.uint8)

    def move(self, layer: nn.Module) -> nn.Module:
        """Move a layer's parameters and buffers that are on a CPU.

        Writes: their `data`.
        Returns: the layer.
        """
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                tensor.data = self.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())
        return layer

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor on the CPU, in normal pages where there are no huge ones."""
        used = shape.numel() * dtype.itemsize
        size = -(-used // ALIGNMENT) * ALIGNMENT
        try:
            if size >= REGION:
                place = _region(size)
            else:
                if size > len(self.rest):
                    self.rest = _region(REGION)
                place = self.rest[:size]
                self.rest = self.rest[size:]
        except OSError:  # a memory limit, or another system
            return torch.empty(shape, dtype=dtype)
        return place[:used].view(dtype).view(shape)


def _region(size: int) -> Tensor:
    """Return `size` bytes that begin at a huge page. Raises: OSError where there are none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raise OSError("huge pages are asked for on Linux only")
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
    begin = -mapped.data_ptr() % HUGE_PAGE
    return mapped[begin:][:size]
