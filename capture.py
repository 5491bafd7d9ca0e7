"""Decode cycles as CUDA graphs, and the way of their reports to the host.

1. A captured step reads and writes buffers at fixed addresses, so its body ends by storing results where it found them.
2. The first runs of a body are not captured: they compile and load what it needs, which fails inside a capture.
3. `HostCopy` starts a copy into pinned memory behind the cycle that was launched, and waits for that copy alone when it
   is read, a cycle later. The next replay may overwrite its source: the copy comes first in the stream.

On other devices a `Replay` runs its body, so that the same path is tested without a GPU.
Trade-off: one graph per preset, instead of conditional nodes inside of one: switching is which graph is launched.
Not here: what a cycle does (decode.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2  # runs before a capture


class Replay:
    """A step over fixed buffers: captured as a CUDA graph once it is warm, elsewhere run as it is."""

    def __init__(self, body: Callable[[], Any], device: torch.device):
        self.body, self.device, self.runs, self.graph, self.result = body, device, 0, None, None

    def __call__(self) -> Any:
        """Run it. Returns: what the body returns; from a graph in the same tensors every time."""
        self.runs += 1
        if self.device.type != "cuda" or self.runs <= WARM_UPS:
            return self.body()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = self.body()  # recorded, not run
        self.graph.replay()
        return self.result


def leaves(record: Any) -> list[Tensor]:
    """The tensors of nested tuples, in order; None has none."""
    if isinstance(record, Tensor):
        return [record]
    return [leaf for part in record or () for leaf in leaves(part)]


def store(buffers: Any, values: Any) -> None:
    """Copy every tensor of `values` into its buffer. Writes: those that are not the buffer itself."""
    old, new = leaves(buffers), leaves(values)
    assert len(old) == len(new), (len(old), len(new))
    for buffer, value in zip(old, new):
        if buffer is not value:
            buffer.copy_(value)


class HostCopy:
    """Small tensors on their way to the host."""

    def __init__(self, *tensors: Tensor):
        # pinned on CUDA, from a ring of blocks that the allocator reuses as soon as their copies are done
        self.host = [x.to("cpu", non_blocking=True) for x in tensors]
        self.arrived = torch.cuda.Event() if tensors[0].is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> list[list]:
        """Wait for the copies, not for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [x.tolist() for x in self.host]
