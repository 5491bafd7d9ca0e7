"""The static key-value cache, and the window of it that a step writes and sees.

The cache is a plain tuple of tensors that the caller owns. A step writes its keys and values to the
slots that it is given. It sees the prefix below `start`, and behind it the slots that `mask`
allows. This is one rule for prefill (causal), decoding (one token), tree verification (ancestors)
and the levels of a draft head. A layer with a sliding window sees the last of them (`sliding`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.backends import TORCH, Backend


class KVCache(NamedTuple):
    """Static key and value buffers, one pair per layer. A step writes them in place."""

    k: tuple[Tensor, ...]  # n_layers x [B, Hkv, S, E]
    v: tuple[Tensor, ...]
    addresses: Tensor  # [2 n_layers] int64, addresses of the buffers, for a kernel over all layers

    @staticmethod
    def empty(config: Any, batch: int, slots: int, dtype: torch.dtype, device: str) -> KVCache:
        """Allocate zeroed buffers of `slots` slots for each of `batch` sequences.

        On a CPU, memory is taken as slots are used.
        """
        if torch.device(device).type == "cpu":
            zeros = _zeros_on_demand
        else:
            zeros = partial(torch.zeros, device=device)
        shape = torch.Size((batch, config.n_kv_heads, slots, config.head_dim))
        k = tuple(zeros(shape, dtype=dtype) for _ in range(config.n_layers))
        v = tuple(zeros(shape, dtype=dtype) for _ in range(config.n_layers))
        addresses = torch.tensor([buffer.data_ptr() for buffer in (*k, *v)], device=device)
        return KVCache(k, v, addresses)

    def sequence(self, seq: int) -> KVCache:
        """Return the cache of one sequence, as views.

        No kernel knows their addresses: this cache cannot be compacted.
        """
        k = tuple(buffer[seq : seq + 1] for buffer in self.k)
        v = tuple(buffer[seq : seq + 1] for buffer in self.v)
        return KVCache(k, v, self.addresses[:0])

    def copy_prefix(self, source: int, seq: int, length: int) -> None:
        """Copy the first `length` slots of one sequence to another. Writes: its buffers."""
        for buffer in (*self.k, *self.v):
            buffer[seq, :, :length] = buffer[source, :, :length]

    def compact(self, start: Tensor, path: Tensor, backend: Backend = TORCH) -> None:
        """Move the accepted slots of a verified tree next to the prefix.

        start: [B] int64, slot of node 0
        path: [B, D+1] int64, offset of the slot to take for each depth; an offset that equals its
            depth moves nothing
        Writes: slots start .. start+D of every buffer.
        """
        backend.compact([*self.k, *self.v], self.addresses, start, path)


def _zeros_on_demand(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocate zeros as numpy does, which asks the system for zeroed pages.

    `torch.zeros` would write them all: 100 MB take 0.2 s.
    """
    memory = np.zeros(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class Window(NamedTuple):
    """The slots that the T tokens of a step are written to, and the slots that they see."""

    slots: Tensor  # [B, T] int64, slot that each token's key and value are written to
    start: Tensor  # [B] int64, prefix length: every slot below it is visible
    mask: Tensor  # [B, T, W] bool, visible ones of the slots start .. start+W-1 for each token
    # [B, T] int64, the place of the first token that each one sees, counted along its path: below
    # `start` it is that token's slot, and the slots before it are hidden; None: 0
    first: Tensor | None = None
    # [B, T, 1 + W] int32, the path of each token, whether `first` hides it or not: its length in
    # the window, then its slots in order, counted from `start`; None: attention reads masks
    paths: Tensor | None = None


def sliding(window: Window, size: int) -> Window:
    """Return the window of a layer that sees the last `size` tokens of a path, its own included.

    window: of a layer that sees them all: the visible slots of a row are its ancestors and itself,
        in the order of the path
    """
    counts = window.mask.cumsum(2)  # [B, T, W], tokens of the path up to each slot
    seen = counts[:, :, -1:]  # [B, T, 1]
    mask = window.mask & (seen - counts < size)  # [B, T, W]
    first = (window.start[:, None] + seen[:, :, 0] - size).clamp(min=0)  # [B, T]
    return Window(window.slots, window.start, mask, first, window.paths)


def causal_window(start: Tensor, rows: int, back: int = 0, backend: Backend = TORCH) -> Window:
    """Return the window of `rows` consecutive tokens from slot `start` on, under a causal mask.

    start: [B] int64
    back: begin so many slots earlier, but not before slot 0
    """
    return Window(*backend.causal(start, rows, back))
