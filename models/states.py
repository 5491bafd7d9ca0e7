"""The states of recurrent layers, beside the slots of attention (kv_cache.py).

A recurrent layer has no slots. It keeps a state behind tokens that are sure to stay, and the inputs
of the nodes behind them (`LayerState`): the next pass replays those that were accepted. So a node's
state is a function of its path alone, and no state but one outlives its pass. A conversation may go
on from its end, or from a snapshot (`States`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

TAPS = 4  # tokens that the convolution of a recurrent layer reads, the token's own included


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


class StateShapes(NamedTuple):
    """The sizes of the states of a model: `ModelConfig.state_shapes`."""

    by_layer: tuple[StateShape | None, ...]  # None: of attention

    @staticmethod
    def of(by_layer: Iterable[StateShape | None]) -> StateShapes | None:
        """Return the sizes; None where no layer is recurrent."""
        sizes = tuple(by_layer)
        return StateShapes(sizes) if any(sizes) else None

    def bytes(self, nodes: int) -> int:
        """Return the bytes of the states of one sequence, with their snapshots. nodes: R"""
        return sum(2 * shape.bytes(nodes) for shape in self.by_layer if shape)

    def empty(self, batch: int, nodes: int, device: torch.device | str) -> States:
        """Allocate zeros. nodes: as for `LayerState.empty`"""

        def zeros() -> tuple[LayerState | None, ...]:
            return tuple(x and LayerState.empty(x, batch, nodes, device) for x in self.by_layer)

        return States(zeros(), zeros())


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


class States(NamedTuple):
    """The states of all layers, for a `KVCache`."""

    now: tuple[LayerState | None, ...]  # by layer, None for attention
    snapshots: tuple[LayerState | None, ...]  # copies, by `keep`

    def recurrent(self) -> list[tuple[LayerState, LayerState]]:
        """Return the states that there are, each with its snapshot."""
        return [pair for pair in zip(*self) if pair[0] is not None]

    def buffers(self) -> list[Tensor]:
        """Return all tensors, [B, ...] each."""
        return [buffer for pair in self.recurrent() for state in pair for buffer in state]

    def sequences(self, rows: range) -> States:
        """Return the states of some sequences, as views."""
        return States(*(tuple(x and x.sequences(rows) for x in every) for every in self))

    def keep(self, seq: int) -> None:
        """Take a snapshot of a sequence's states, to which `resume` may return."""
        for state, snapshot in self.recurrent():
            for buffer, copy in zip(state, snapshot):
                copy[seq] = buffer[seq]

    def resume(self, seq: int, begin: int) -> int:
        """Do as `KVCache.resume`.

        A state cannot be cut. One that is behind later tokens gives way to the snapshot; where that
        is, too, the sequence begins at 0, where a pass makes states zero.

        Writes: states; the length of a snapshot of tokens that will be others.
        """
        for state, snapshot in self.recurrent():
            if snapshot.length[seq] > begin:
                snapshot.length[seq] = 0
            if state.length[seq] > begin:
                for buffer, copy in zip(state, snapshot):
                    buffer[seq] = copy[seq]
                begin = int(snapshot.length[seq])
        return begin

    def compact(self, start: Tensor, path: Tensor) -> None:
        """Do as `KVCache.compact`."""
        for state, _ in self.recurrent():
            state.compact(start, path)

    def for_cpp(self, k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        """Put inputs and states in the place of the slots that recurrent layers lack.

        k, v: by layer. Returns: the lengths, by layer; of attention an empty tensor. Writes: k, v.
        """
        lengths = []
        for i, state in enumerate(self.now):
            if state is None:
                lengths.append(torch.empty(0, dtype=torch.long))
                continue
            k[i] = state.inputs
            v[i] = state.state
            lengths.append(state.length)
        return lengths
