"""Recurrent layers over the nodes of a tree: GatedDeltaNet, and a gated convolution.

A layer keeps a state behind tokens that are sure to stay, and the inputs of the nodes behind them.
1. The nodes that the last pass left, and that were accepted, go into the state first.
2. Each node goes on from its parent's state, so that its result depends on its path alone.
3. The state behind the nodes that are sure to be kept is kept, with the inputs of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import rms_norm


class DeltaWeights(NamedTuple):
    """The weights of a GatedDeltaNet that are no projections."""

    conv: Tensor  # [2 Hk Dk + H Dv, TAPS], the convolution of queries, keys and values
    gates: Tensor  # [2, H] fp32, A_log and dt_bias
    gain: Tensor  # [Dv], of the norm
    eps: float
    tiled: bool = False  # head h of values reads head h mod Hk of keys, and not head h Hk / H


def delta_rule(
    x: Tensor, kept: tuple[Tensor, ...], window: tuple[Tensor | None, ...], weights: DeltaWeights
) -> Tensor:
    """Run the recurrence of GatedDeltaNet over T nodes, each behind its parent's state.

    1. The nodes that the last pass left, and that were accepted, go into the kept state.
    2. Each node reads the state of its parent, and makes its own: one order along every path.
    3. The state behind the nodes that are sure to be kept is kept, with the inputs of the others.

    x: [B, T, C + H Dv]: queries, keys and values before their convolution, beta and decay before
        their gates, [B, T, C]; then the gate of the output
    kept: `kv_cache.LayerState`; window: slots, start, mask and kept of a `kv_cache.Window`
    Writes: the state, but not of sequences that are done, whose prefix is empty.
    Returns: [B, T, H Dv] in x's dtype.
    Source: Gated DeltaNet (arXiv 2412.06464).
    """
    state = kept[0]
    H, Dk, Dv = state.shape[1:]
    C = kept[1].shape[2]
    before = weights.conv.shape[1] - 1
    replay = _Replay.begin(x[..., :C].float(), kept, window, before)
    q, k, v = _convolved(replay, weights, (H, Dk, Dv))
    numbers = _Numbers(q, k, v, *_gates(replay.rows[:, before:, -2 * H :], weights.gates))
    began = torch.where(replay.fresh[:, None, None, None], 0, state)
    states, y = _node_states(began, numbers, replay.count, replay.parents)

    batch = torch.arange(len(x), device=x.device)
    live = replay.live[:, None, None, None]
    state.copy_(torch.where(live, states[batch, replay.sure], state))
    replay.save(kept, before)

    y = rms_norm(y, weights.gain, weights.eps)  # [B, T, H, Dv]
    gate = x[..., C:].unflatten(-1, (H, Dv))
    return (y * _silu(gate)).to(x.dtype).flatten(2)


def short_conv(
    x: Tensor, kept: tuple[Tensor, ...], window: tuple[Tensor | None, ...], conv: Tensor
) -> Tensor:
    """Run a gated convolution over T nodes, each behind its ancestors.

    x: [B, T, 3 F]: the gate of the inputs, the gate of the outputs, and the inputs
    kept, window: as for `delta_rule`; of the state the inputs alone are used
    conv: [F, TAPS], of each channel by itself
    Writes: the state, but not of sequences that are done.
    Returns: [B, T, F] in x's dtype.
    Source: LFM2 (arXiv 2511.23404).
    """
    before, of_outputs, inputs = x.float().chunk(3, -1)
    taps = conv.shape[1]
    replay = _Replay.begin(before * inputs, kept, window, taps - 1)
    mixed = replay.convolve(conv)[:, -x.shape[1] :]  # [B, T, F]
    replay.save(kept, taps - 1)
    return (of_outputs * mixed).to(x.dtype)


class _Replay(NamedTuple):
    """The nodes of a pass, behind those of the last one that were accepted."""

    rows: Tensor  # [B, before + R + T, C] fp32, inputs: oldest, of the last pass, of this one
    above: Tensor  # [B, before + R + T], the row before each one along its path
    parents: Tensor  # [B, T]; -1: the node follows the prefix
    count: Tensor  # [B], nodes of the last pass that were accepted
    sure: Tensor  # [B], nodes of this pass that are kept whatever is decided
    live: Tensor  # [B], whether the sequence goes on
    fresh: Tensor  # [B], whether it begins
    first: Tensor  # [B], the slot of node 0

    @staticmethod
    def begin(
        x: Tensor, kept: tuple[Tensor, ...], window: tuple[Tensor | None, ...], before: int
    ) -> _Replay:
        """Put the nodes behind those that were accepted.

        x: [B, T, C] fp32; kept, window: as for `delta_rule`
        before: rows that the convolution reads before a row
        """
        _, inputs, length = kept
        slots, start, mask, sure = window
        left = inputs.shape[1] - before  # R
        first = slots[:, 0]
        live = first == start
        fresh = first == 0
        length = torch.where(fresh, 0, length)
        count = torch.where(live, first - length, 0).clamp(0, left)
        rows = torch.cat((torch.where(fresh[:, None, None], 0, inputs), x), 1)
        parents = parents_of(mask[:, :, : x.shape[1]])
        above = _rows_above(parents, count, before, left)
        sure = torch.zeros_like(count) if sure is None else sure
        return _Replay(rows, above, parents, count, sure, live, fresh, first)

    def convolve(self, conv: Tensor) -> Tensor:
        """Convolve every channel along the paths: [B, R + T, channels]. conv: [channels, taps]"""
        channels, taps = conv.shape
        device = self.rows.device
        batch = torch.arange(len(self.rows), device=device)[:, None]
        at = torch.arange(taps - 1, self.rows.shape[1], device=device).expand(len(self.rows), -1)
        mixed = torch.zeros((), device=device)
        for tap in reversed(range(taps)):  # the row's own first
            mixed = mixed + self.rows[batch, at, :channels] * conv[:, tap].float()
            at = self.above.gather(1, at)
        return mixed

    def save(self, kept: tuple[Tensor, ...], before: int) -> None:
        """Keep the inputs of the nodes that may be dropped. Writes: inputs and length of `kept`."""
        _, inputs, length = kept
        T = self.parents.shape[1]
        batch = torch.arange(len(inputs), device=inputs.device)[:, None]
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        steps = steps + (self.count + self.sure)[:, None]
        node = steps - before - self.count[:, None]  # rows that are nodes of this pass: from 0 on
        steps = torch.where(node < 0, steps, inputs.shape[1] + node.clamp(max=T - 1))
        live = self.live[:, None, None]
        inputs.copy_(torch.where(live, self.rows[batch, steps], inputs))
        length.copy_(torch.where(self.live, self.first + self.sure, length))


class _Numbers(NamedTuple):
    """The numbers of R + T rows, all in fp32: those that the last pass left, then the nodes."""

    q: Tensor  # [B, R + T, H, Dk]
    k: Tensor
    v: Tensor  # [B, R + T, H, Dv]
    beta: Tensor  # [B, R + T, H]
    decay: Tensor

    def behind(self, old: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Return the state behind row i, [B, H, Dk, Dv], and what its query reads there."""
        keep = self.decay[:, i, :, None]  # [B, H, 1]
        key = self.k[:, i, :, :, None]  # [B, H, Dk, 1]
        query = self.q[:, i, :, :, None]
        recalled = (old * key).sum(2)  # [B, H, Dv]
        change = (self.v[:, i] - keep * recalled) * self.beta[:, i, :, None]
        new = old * keep[..., None] + key * change[:, :, None]
        # without the new state: a leaf of a tree needs none
        return new, keep * (old * query).sum(2) + change * (key * query).sum(2)


def _node_states(
    state: Tensor, numbers: _Numbers, count: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states behind the prefix and behind each node, and what the nodes read.

    state: [B, H, Dk, Dv]; count: rows before the nodes that go into it first
    Returns: [B, T + 1, H, Dk, Dv]; [B, T, H, Dv].
    """
    B, T = parents.shape
    left = numbers.beta.shape[1] - T
    for i in range(left):
        new, _ = numbers.behind(state, i)
        state = torch.where((i < count)[:, None, None, None], new, state)
    states = state.new_empty(B, T + 1, *state.shape[1:])
    states[:, 0] = state
    batch = torch.arange(B, device=state.device)
    read = []
    for i in range(T):
        states[:, i + 1], y = numbers.behind(states[batch, parents[:, i] + 1], left + i)
        read.append(y)
    return states, torch.stack(read, 1)


def parents_of(mask: Tensor) -> Tensor:
    """Return the parent of every node, [B, T]; -1: it has none. mask: [B, T, T] bool"""
    nodes = torch.arange(mask.shape[1], device=mask.device)
    ancestors = mask & (nodes < nodes[:, None])
    return torch.where(ancestors, nodes, -1).amax(-1)  # parents precede children


def _rows_above(parents: Tensor, count: Tensor, before: int, left: int) -> Tensor:
    """Return the row before each one in `delta_rule`, along its path: [B, before + R + T]."""
    in_order = torch.arange(before + left, device=parents.device).sub(1).clamp(min=0)
    last = (before - 1 + count)[:, None]  # [B, 1], the row before node 0
    of_nodes = torch.where(parents < 0, last, before + left + parents)  # [B, T]
    return torch.cat((in_order.expand(len(parents), -1), of_nodes), 1)


def _convolved(
    replay: _Replay, weights: DeltaWeights, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys of length 1 and values, [B, R + T, H, Dk or Dv]. sizes: H, Dk, Dv"""
    H, Dk, Dv = sizes
    mixed = _silu(replay.convolve(weights.conv))
    keys = (len(weights.conv) - H * Dv) // 2
    q, k, v = mixed.split((keys, keys, H * Dv), -1)
    q, k = (_unit(part.unflatten(-1, (-1, Dk))) for part in (q, k))
    shared = H * Dk // keys  # heads of values that read a head of keys
    both = (q * Dk**-0.5, k)
    if weights.tiled:
        q, k = (part.repeat(1, 1, shared, 1) for part in both)
    else:
        q, k = (part.repeat_interleave(shared, 2) for part in both)
    return q, k, v.unflatten(-1, (H, Dv))


def _unit(x: Tensor) -> Tensor:
    """Divide every row by its length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _silu(x: Tensor) -> Tensor:
    """Return the SiLU in fp32, by way of fp64.

    PyTorch's exponential of a vector and of the last elements of a tensor differ in the last bit.
    """
    return F.silu(x.double()).float()


def _gates(raw: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return beta and decay, [B, R + T, H]. raw: [B, R + T, 2 H]"""
    b, a = raw.double().chunk(2, -1)
    rate, bias = gates.double()
    return b.sigmoid().float(), torch.exp(-rate.exp() * F.softplus(a + bias)).float()
