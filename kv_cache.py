"""The static key-value cache, and the window of it that a step writes and sees.

The cache is a plain tuple of tensors that the caller owns. A step writes its keys and values to the
slots that it is given. It sees the prefix below `start`, and behind it the slots that `mask`
allows. This is one rule for prefill (causal), decoding (one token), tree verification (ancestors)
and the levels of a draft head. A layer with a sliding window sees the last of them (`sliding`).
A cache in 8 bits has dtype int8; reference.py says what its rows hold.

A recurrent layer has no slots. It keeps a state behind tokens that are sure to stay, and the inputs
of the nodes behind them (`LayerState`): the next pass replays those that were accepted. So a node's
state is a function of its path alone, and no state but one outlives its pass.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference import TORCH, Backend, row_width

TAPS = 4  # tokens that the convolution of a recurrent layer reads, the token's own included
MOST_NODES = 64  # of a tree, where the cache's owner knows no better


class StateShape(NamedTuple):
    """The sizes of a recurrent layer's state."""

    heads: int  # H
    key_dim: int  # Dk
    value_dim: int  # Dv
    channels: int  # C, inputs of a token that states depend on

    def bytes(self, nodes: int) -> int:
        """Return the bytes of a `LayerState` of one sequence. nodes: R"""
        numbers = self.heads * self.key_dim * self.value_dim + (TAPS - 1 + nodes) * self.channels
        return numbers * torch.float32.itemsize


class LayerState(NamedTuple):
    """The state of a recurrent layer for B sequences. A step writes it in place."""

    state: Tensor  # [B, H, Dk, Dv] fp32, behind the first `length` tokens
    # [B, TAPS - 1 + R, C] fp32: of the last tokens before `length`, which the convolution reads;
    # then those of the last pass from `length` on
    inputs: Tensor
    length: Tensor  # [B] int64

    @staticmethod
    def empty(shape: StateShape, batch: int, nodes: int, device: torch.device | str) -> LayerState:
        """Allocate zeros. nodes: R, the most nodes that a pass may leave to the next one"""
        return LayerState(
            torch.zeros(batch, *shape[:3], device=device),
            torch.zeros(batch, TAPS - 1 + nodes, shape.channels, device=device),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    def sequences(self, rows: range) -> LayerState:
        """Return the states of some sequences, as views."""
        return LayerState(*(buffer[rows.start : rows.stop] for buffer in self))

    def compact(self, start: Tensor, path: Tensor) -> None:
        """Move the inputs of accepted nodes next to each other, as `KVCache.compact` moves slots.

        A pass leaves sequences that are done as they were; so does this.
        Writes: inputs.
        """
        steps = torch.arange(path.shape[1], device=path.device)
        path = torch.where((self.length == start)[:, None], path, steps)
        batch = torch.arange(len(path), device=path.device)[:, None]  # [B, 1]
        self.inputs[batch, TAPS - 1 + steps] = self.inputs[batch, TAPS - 1 + path]


class KVCache(NamedTuple):
    """Static key and value buffers, one pair per layer. A step writes them in place."""

    # n_layers x [B, Hkv, S, E], in 8 bits [B, Hkv, S, row_width]; S is 0 for layers that are
    # recurrent or read another's
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    addresses: Tensor  # int64, of the buffers with slots, in the order of `by_shape`, for kernels
    sources: tuple[int, ...]  # by layer, the one whose buffers it reads: itself, or one before it
    # by layer, None for attention; empty: no layer is recurrent
    states: tuple[LayerState | None, ...] = ()
    snapshots: tuple[LayerState | None, ...] = ()  # copies of states, by `keep_states`

    @staticmethod
    def empty(
        config: Any,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: str,
        nodes: int = MOST_NODES,
    ) -> KVCache:
        """Allocate zeroed buffers of `slots` slots for each of `batch` sequences.

        dtype: int8 keeps keys and values in 8 bits
        nodes: the most nodes of a tree, for recurrent layers
        On a CPU, memory is taken as slots are used.
        """
        if torch.device(device).type == "cpu":
            zeros = _zeros_on_demand
        else:
            zeros = partial(torch.zeros, device=device)
        of_layers = [config.state_shape(i) for i in range(config.n_layers)]
        sources = tuple(map(config.kv_source, range(config.n_layers)))

        def buffers() -> tuple[Tensor, ...]:
            found = []
            for i, source in enumerate(sources):
                heads, width = config.kv_shape(i)
                own = slots if source == i and of_layers[i] is None else 0
                shape = torch.Size((batch, heads, own, row_width(width, dtype)))
                found.append(zeros(shape, dtype=dtype))
            return tuple(found)

        k = buffers()
        v = buffers()
        in_order = [x.data_ptr() for alike in by_shape(with_slots(k, v)) for x in alike]
        addresses = torch.tensor(in_order, device=device)
        if not any(of_layers):
            return KVCache(k, v, addresses, sources)

        def empty_states() -> tuple[LayerState | None, ...]:
            return tuple(x and LayerState.empty(x, batch, nodes, device) for x in of_layers)

        return KVCache(k, v, addresses, sources, empty_states(), empty_states())

    def layer(self, i: int) -> tuple[Tensor, ...]:
        """Return the buffers of a layer: its keys and values, or its `LayerState`."""
        state = self.states[i] if self.states else None
        source = self.sources[i]
        return state or (self.k[source], self.v[source])

    def for_cpp(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the operands of a pass in C++, by layer: keys, values, and nothing.

        A recurrent layer has its inputs, its state and its length instead.
        """
        k = [self.k[source] for source in self.sources]
        v = [self.v[source] for source in self.sources]
        lengths = []
        for i, state in enumerate(self.states):
            lengths.append(self.addresses[:0] if state is None else state.length)
            if state is not None:
                k[i] = state.inputs
                v[i] = state.state
        return k, v, lengths

    def sequences(self, rows: range) -> KVCache:
        """Return the caches of some sequences, as views.

        No kernel of CUDA knows their addresses: there they cannot be compacted.
        """
        k = tuple(buffer[rows.start : rows.stop] for buffer in self.k)
        v = tuple(buffer[rows.start : rows.stop] for buffer in self.v)
        states, snapshots = (
            tuple(state and state.sequences(rows) for state in every)
            for every in (self.states, self.snapshots)
        )
        return KVCache(k, v, self.addresses[:0], self.sources, states, snapshots)

    def prefix(self, seq: int, length: int) -> list[Tensor]:
        """Return the first `length` slots of a sequence, and its states, as views.

        Where they are copied, `resume` knows which of the states serve.
        """
        slots = [buffer[seq, :, :length] for buffer in (*self.k, *self.v)]
        return slots + [buffer[seq] for buffer in self._buffers_of_states()]

    def clear(self, seq: int, length: int) -> None:
        """Overwrite the first `length` slots of a sequence, and its states, with zeros."""
        for buffer in (*self.k, *self.v):
            buffer[seq, :, :length] = 0
        for buffer in self._buffers_of_states():
            buffer[seq] = 0

    def keep_states(self, seq: int) -> None:
        """Take a snapshot of a sequence's states, to which `resume` may return."""
        for state, snapshot in self._recurrent():
            for buffer, copy in zip(state, snapshot):
                copy[seq] = buffer[seq]

    def resume(self, seq: int, begin: int) -> int:
        """Make a sequence go on behind the first `begin` tokens that it has read, or earlier.

        A state cannot be cut. One that is behind later tokens gives way to the snapshot; where that
        is, too, the sequence begins at 0, where a pass makes states zero.

        Writes: states; the length of a snapshot of tokens that will be others.
        Returns: the number of tokens behind which it goes on.
        """
        for state, snapshot in self._recurrent():
            if snapshot.length[seq] > begin:
                snapshot.length[seq] = 0
            if state.length[seq] > begin:
                for buffer, copy in zip(state, snapshot):
                    buffer[seq] = copy[seq]
                begin = int(snapshot.length[seq])
        return begin

    def _recurrent(self) -> list[tuple[LayerState, LayerState]]:
        pairs = zip(self.states, self.snapshots)
        return [(state, snapshot) for state, snapshot in pairs if state is not None]

    def _buffers_of_states(self) -> list[Tensor]:
        return [buffer for pair in self._recurrent() for state in pair for buffer in state]

    def compact(self, start: Tensor, path: Tensor, backend: Backend = TORCH) -> None:
        """Move the accepted slots of a verified tree next to the prefix.

        start: [B] int64, slot of node 0
        path: [B, D+1] int64, offset of the slot to take for each depth; an offset that equals its
            depth moves nothing
        Writes: slots start .. start+D of every buffer.
        """
        groups = by_shape(with_slots(self.k, self.v))
        first = 0
        for alike in groups:
            addresses = self.addresses
            if len(groups) > 1:
                addresses = addresses[first : first + len(alike)]
            backend.compact(alike, addresses, start, path)
            first += len(alike)
        for state, _ in self._recurrent():
            state.compact(start, path)


def with_slots(k: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
    """Return the buffers that have slots: keys, then values."""
    return [buffer for buffer in (*k, *v) if buffer.shape[2]]


def by_shape(buffers: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return buffers in groups of one shape, for kernels that take such."""
    shapes = list(dict.fromkeys(buffer.shape for buffer in buffers))
    return [[buffer for buffer in buffers if buffer.shape == shape] for shape in shapes]


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
