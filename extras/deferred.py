"""Rows that wait: while no tree is wanted, a drafter takes in its rows sixteen at a time.

A draft head that reads every decided token costs vanilla decoding 4 to 7 %, most of it for its weights, which one row
needs as much as sixteen. So the preset without a tree, `Idle`, only keeps the target's features, beside the drafter's
own state. The session hands them over (`Drafter.take_in`) before a tree, before a prompt, and when there is no more
room.

Trade-off: a copy of each feature. Not here: which preset is the fastest (autosize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_tree import DraftTree, changed
from drafters import Drafter, Root, RootOnly, Rows, Text, TreeDrafter
from model import Transformer

ROOM = 16  # rows that a drafter takes in at once


class Waiting(NamedTuple):
    """A drafter's state, and the rows that it has not taken in."""

    own: Any  # its `length` is the position of the first of them
    features: Tensor  # [B, ROOM, F], as in `Rows`
    count: Tensor  # [B] int64


class Deferred(Drafter):
    """A drafter for which rows may wait. Its trees start from a state for which none do."""

    timed = True

    def __init__(
        self, drafter: TreeDrafter, target: Transformer, smaller: Sequence[Drafter] = (), grower: Drafter | None = None
    ):
        """smaller: presets over the same state, smallest tree first; grower: of the tree, if not the drafter itself"""
        grower = grower or drafter
        self.drafter, self.grower, self.weight, self.smaller = drafter, grower, target.embedding.weight, (*smaller,)
        self.depth, self.size, self.width, self.fresh_rows = grower.depth, grower.size, grower.width, grower.fresh_rows
        self.layers, self.taps = drafter.layers, drafter.taps

    @property
    def name(self) -> str:
        return self.grower.name

    def prefer(self, text: Text) -> Tensor:
        """What the drafter alone says: 0 for none, or a number past the last."""
        return self.drafter.prefer(text)

    def facts(self) -> dict[str, Any]:
        return self.drafter.facts() | {"tree": "auto", "trees": [preset.name for preset in self.presets]}

    def init(self, batch: int, slots: int) -> Waiting:
        features = self.weight.new_zeros(batch, ROOM, (1 + len(self.taps)) * self.weight.shape[1])
        count = torch.zeros(batch, dtype=torch.long, device=self.weight.device)
        return Waiting(self.drafter.init(batch, slots), features, count)

    def extend(self, state: Waiting, rows: Rows) -> Waiting:
        return changed(state, own=self.drafter.extend(state.own, rows))

    def rewind(self, state: Waiting, length: Tensor) -> Waiting:
        return changed(state, own=self.drafter.rewind(state.own, length), count=torch.zeros_like(state.count))

    def draft(self, state: Waiting, root: Root) -> DraftTree:
        return self.grower.draft(state.own, root)

    def take_in(self, state: Waiting, text: Text) -> Waiting:
        """Hand over what waits; to a drafter that keeps its own rows also the one before, which it may not have run.

        Writes: the drafter's own cache.
        """
        again = (state.own.length > 0).long() if self.drafter.keeps_rows else torch.zeros_like(state.count)
        own = self.drafter.rewind(state.own, state.own.length - again)
        at = own.length[:, None] + torch.arange(ROOM + 1, device=again.device)
        tokens = text.tokens.gather(1, at.clamp(max=text.tokens.shape[1] - 1))  # [B, ROOM + 1]
        own = self.drafter.extend(own, Rows(tokens, state.features, state.count + again))
        return changed(state, own=own, count=torch.zeros_like(state.count))


class Idle(Deferred):
    """Proposes nothing, and lets its rows wait."""

    room = ROOM - 1  # one is for the row before

    def __init__(self, drafter: TreeDrafter, target: Transformer):
        super().__init__(drafter, target, grower=RootOnly())

    def extend(self, state: Waiting, rows: Rows) -> Waiting:
        """Keep a row. Writes: the features that wait."""
        row = torch.arange(len(state.count), device=state.count.device)
        state.features[row, state.count.clamp(max=ROOM - 1)] = rows.features[:, 0]
        return changed(state, count=state.count + rows.count)
