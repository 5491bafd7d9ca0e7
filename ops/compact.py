"""Moves of cache slots within all buffers: one launch on CUDA, one C++ call on a CPU.

The implementations are in cuda/compact.py and cpu/compact.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import has_cpu_operators, has_triton, lib

lib.define("compact(Tensor(a!)[] buffers, Tensor addresses, Tensor start, Tensor path) -> ()")


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    """Move slots of all buffers next to each other; all sources are read before any is overwritten.

    buffers: each [B, Hkv, S, E], contiguous; they share no memory and have one shape and dtype
    addresses: [buffers] int64, the buffers' addresses in memory
    start: [B] int64, the first slot to write
    path: [B, D+1] int64, the slots to read, as offsets from `start`
    Writes: slots start .. start + D of every buffer.
    """
    if start.is_cuda:
        torch.ops.gpt_eagle.compact(buffers, addresses, start, path)
    elif has_cpu_operators("compact"):
        torch.ops.gpt_eagle.move_rows(buffers, start, path)
    else:
        # plain operations: the compiler makes one loop nest of all moves
        compact_reference(buffers, start, path)


def compact_reference(buffers: list[Tensor], start: Tensor, path: Tensor) -> None:
    """Compute `compact` with torch's own operators."""
    batch = torch.arange(path.shape[0], device=path.device)[:, None]  # [B, 1]
    target = start[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, D+1]
    source = start[:, None] + path
    for buffer in buffers:
        buffer[batch, :, target] = buffer[batch, :, source]  # [B, D+1, Hkv, E]


def _compact_cpu(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    compact_reference(buffers, start, path)


def _compact_cuda(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    if not has_triton("compact"):
        return compact_reference(buffers, start, path)
    import ops.cuda.compact

    with torch.cuda.device(start.device):
        ops.cuda.compact.compact(buffers, addresses, start, path)


lib.impl("compact", _compact_cpu, "CPU")
lib.impl("compact", _compact_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::compact", lib=lib)
def _(buffers, addresses, start, path):
    return None
