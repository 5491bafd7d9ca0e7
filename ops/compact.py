"""Moving rows within all buffers of a cache: one launch on CUDA (cuda/compact.py), cpu/compact.cpp on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import has_cpu_operators, has_triton, lib

lib.define("compact(Tensor(a!)[] buffers, Tensor addresses, Tensor start, Tensor path) -> ()")


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    """Move rows of all buffers to consecutive slots; every row is read before any is written.

    buffers: each [B, Hkv, S, E], contiguous; tensors of their own, of one shape and dtype
    addresses: [buffers] int64, where they lie
    start: [B] int64, slot of the first row
    path: [B, D+1] int64, offset from `start` that each row is taken from
    Writes: slots start .. start + D of every buffer.
    """
    if start.is_cuda:
        torch.ops.gpt_eagle.compact(buffers, addresses, start, path)
    elif has_cpu_operators():
        torch.ops.gpt_eagle.move_rows(buffers, start, path)
    else:
        compact_reference(
            buffers, start, path
        )  # plain operations: the compiler makes one loop nest of all moves


def compact_reference(buffers: list[Tensor], start: Tensor, path: Tensor) -> None:
    """The same by torch's own operators."""
    rows = torch.arange(path.shape[0], device=path.device)[:, None]  # [B, 1]
    target = start[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, D+1]
    source = start[:, None] + path
    for buffer in buffers:
        buffer[rows, :, target] = buffer[rows, :, source]  # [B, D+1, Hkv, E]


def _compact_cpu(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    compact_reference(buffers, start, path)


def _compact_cuda(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    if not has_triton():
        return compact_reference(buffers, start, path)
    import ops.cuda.compact

    with torch.cuda.device(start.device):
        ops.cuda.compact.compact(buffers, addresses, start, path)


lib.impl("compact", _compact_cpu, "CPU")
lib.impl("compact", _compact_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::compact", lib=lib)
def _(buffers, addresses, start, path):
    return None
