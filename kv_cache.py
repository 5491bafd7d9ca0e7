"""The static key-value cache, and the window of it that a step writes and sees.

The cache is a plain tuple of tensors that the caller owns. A step writes its keys and values to the slots that it is
given. It sees the prefix below `start`, and behind it the slots that `mask` allows: one rule for prefill (causal),
decoding (one token), tree verification (ancestors) and the levels of a draft head.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.compact import compact
from ops.library import on_cpp_device


class KVCache(NamedTuple):
    """Static key and value buffers, one pair per layer. A step writes them in storage."""

    k: tuple[Tensor, ...]  # n_layers x [B, Hkv, S, E]
    v: tuple[Tensor, ...]
    addresses: Tensor  # [2 n_layers] int64, where k and v lie: what a kernel over all layers takes

    @staticmethod
    def empty(config: Any, batch: int, slots: int, dtype: torch.dtype, device: str) -> KVCache:
        """Allocate zeroed buffers for `batch` rows of `slots` slots. On a CPU, memory is taken as slots are used."""
        shape = torch.Size((batch, config.n_kv_heads, slots, config.head_dim))
        zeros = (
            _zeros_on_demand
            if torch.device(device).type == "cpu"
            else partial(torch.zeros, device=device)
        )
        k, v = (tuple(zeros(shape, dtype=dtype) for _ in range(config.n_layers)) for _ in range(2))
        return KVCache(
            k, v, torch.tensor([buffer.data_ptr() for buffer in (*k, *v)], device=device)
        )

    def row(self, row: int) -> KVCache:
        """One row, as views, whose addresses no kernel knows: it cannot be compacted."""
        k, v = (tuple(buffer[row : row + 1] for buffer in buffers) for buffers in (self.k, self.v))
        return KVCache(k, v, self.addresses[:0])

    def compact(self, start: Tensor, path: Tensor) -> None:
        """Move the accepted rows of a verified tree next to the prefix.

        start: [B] int64, slot of node 0
        path: [B, D+1] int64, slot offset to take for each depth; where it equals its own index nothing moves
        Writes: slots start .. start+D of every buffer.
        """
        compact([*self.k, *self.v], self.addresses, start, path)


def _zeros_on_demand(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """As `torch.zeros`, which would write them all: 100 MB take 0.2 s. numpy asks the system for zeroed pages."""
    return (
        torch.from_numpy(np.zeros(shape.numel() * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    )


class Window(NamedTuple):
    """Where the T rows of a step go in the cache, and what they see."""

    slots: Tensor  # [B, T] int64, slot that each row's key and value are written to
    start: Tensor  # [B] int64, prefix length: every slot below it is visible
    mask: Tensor  # [B, T, W] bool, which of the slots start .. start+W-1 each row sees besides


def causal_window(start: Tensor, rows: int, back: int = 0) -> Window:
    """Window of `rows` consecutive rows from slot `start` on, each seeing those before it.

    start: [B] int64; back: so many rows earlier, from slot 0 on
    """
    if on_cpp_device(start):
        return Window(*torch.ops.gpt_eagle.causal(start, rows, back))
    if back:
        start = (start - back).clamp(min=0)
    steps = torch.arange(rows, device=start.device)
    mask = (steps[None, :] <= steps[:, None]).expand(start.shape[0], rows, rows)  # [B, T, T]
    return Window(start[:, None] + steps, start, mask)
