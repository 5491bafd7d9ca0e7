"""The static key-value cache, and the window of it that a step writes and sees.

The cache is a plain tuple of tensors that the caller owns. A step writes its keys and values to the
slots that it is given. It sees the prefix below `start`, and behind it the slots that `mask`
allows. This is one rule for prefill (causal), decoding (one token), tree verification (ancestors)
and the levels of a draft head. A layer with a sliding window sees the last of them (`first`).
A layer that is recurrent has a state and no slots (models/states.py).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_tree import MAX_NODES
from reference import TORCH, Backend, row_width


class KVCache(NamedTuple):
    """Static key and value buffers, one pair per layer. A step writes them in place."""

    # n_layers x [B, Hkv, S, row_width]; S is 0 for layers that are recurrent or read another's
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    addresses: Tensor  # int64, of the buffers with slots, in the order of `by_shape`, for kernels
    sources: tuple[int, ...]  # by layer, the one whose buffers it reads: itself, or one before it
    states: Any = None  # of recurrent layers, by `ModelConfig.state_shapes`; None: none is

    @staticmethod
    def empty(
        config: Any,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: str,
        nodes: int = MAX_NODES,
    ) -> KVCache:
        """Allocate zeroed buffers of `slots` slots for each of `batch` sequences.

        dtype: int8 keeps keys and values in 8 bits
        nodes: the most nodes of a tree, for recurrent layers
        On a CPU, memory is taken as slots are used.
        """
        on_cpu = torch.device(device).type == "cpu"
        zeros = _zeros_on_demand if on_cpu else partial(torch.zeros, device=device)
        sources = tuple(map(config.kv_source, range(config.n_layers)))
        shapes = []
        for i, source in enumerate(sources):
            heads, width = config.kv_shape(i)  # no heads: it is recurrent
            own = slots if heads and source == i else 0
            shapes.append(torch.Size((batch, heads, own, row_width(width, dtype))))
        k = tuple(zeros(shape, dtype=dtype) for shape in shapes)
        v = tuple(zeros(shape, dtype=dtype) for shape in shapes)
        in_order = [x.data_ptr() for alike in by_shape(k, v) for x in alike]
        addresses = torch.tensor(in_order, device=device)
        states = config.state_shapes and config.state_shapes.empty(batch, nodes, device)
        return KVCache(k, v, addresses, sources, states)

    def layer(self, i: int) -> tuple[Tensor, ...]:
        """Return the buffers of a layer: its keys and values, or its state."""
        state = self.states.now[i] if self.states else None
        return state or (self.k[self.sources[i]], self.v[self.sources[i]])

    def for_cpp(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the operands of a pass in C++, by layer: keys, values, and lengths of states."""
        k = [self.k[source] for source in self.sources]
        v = [self.v[source] for source in self.sources]
        return k, v, self.states.for_cpp(k, v) if self.states else []

    def sequences(self, rows: range) -> KVCache:
        """Return the caches of some sequences, as views.

        No kernel of CUDA knows their addresses: there they cannot be compacted.
        """
        k = tuple(buffer[rows.start : rows.stop] for buffer in self.k)
        v = tuple(buffer[rows.start : rows.stop] for buffer in self.v)
        states = self.states and self.states.sequences(rows)
        return KVCache(k, v, self.addresses[:0], self.sources, states)

    def compact(self, start: Tensor, path: Tensor, backend: Backend = TORCH) -> None:
        """Move the accepted slots of a verified tree next to the prefix.

        start: [B] int64, slot of node 0
        path: [B, D+1] int64, offset of the slot to take for each depth; an offset that equals its
            depth moves nothing
        Writes: slots start .. start+D of every buffer.
        """
        first = 0
        groups = by_shape(self.k, self.v)
        for alike in groups:
            last = first + len(alike)
            addresses = self.addresses if len(groups) == 1 else self.addresses[first:last]
            backend.compact(alike, addresses, start, path)
            first = last
        if self.states:
            self.states.compact(start, path)


def by_shape(k: Sequence[Tensor], v: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the buffers that have slots, keys and values, in groups of one shape for kernels."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for buffer in (*k, *v):
        if buffer.shape[2]:
            groups.setdefault(buffer.shape, []).append(buffer)
    return list(groups.values())


def _zeros_on_demand(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Map zeroed pages, which the system provides when they are written.

    `torch.zeros` would write them all: 100 MB take 0.2 s. numpy asks for huge pages, so that the
    first slot of a head of a sequence would write 2 MB.
    """
    if not shape.numel():  # which a map has no view of
        return torch.zeros(shape, dtype=dtype)
    size = shape.numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # by numpy, so that a trace with fake tensors takes it
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


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
    # [B] int64, the first tokens, each behind the one before, that are kept whatever is decided;
    # None: none. For recurrent layers
    kept: Tensor | None = None


def causal_window(start: Tensor, rows: int, back: int = 0, backend: Backend = TORCH) -> Window:
    """Return the window of `rows` consecutive tokens from slot `start` on, under a causal mask.

    start: [B] int64
    back: begin so many slots earlier, but not before slot 0
    """
    return Window(*backend.causal(start, rows, back))
