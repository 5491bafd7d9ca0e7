"""Rows that wait: while no tree is wanted, a drafter takes in its rows sixteen at a time.

1. A draft head that reads every decided token costs vanilla decoding 4 to 7 %, most of it for its weights, which one
   row needs as much as sixteen. So the smallest preset, `Idle`, only keeps the rows, beside the drafter's own state.
2. `CatchUp` decides a token in the same way and hands all rows that wait to the drafter.
3. The host, which knows what it launches, has a `CatchUp` run before a tree's first cycle, and whenever as many rows
   wait as there is room for (`InOrder`).

Trade-off: the cycle before a tree brings a single token. In a wrong order (two sessions of one engine in turn) rows may
be lost, which makes drafts worse and changes no token.
Not here: which preset is the fastest (autosize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_tree import DraftTree, changed, root_tree
from drafters import Drafter, Root, RootOnly, Rows, Text, TreeDrafter
from model import Transformer

ROOM = 16  # rows that may wait


class Waiting(NamedTuple):
    """A drafter's state, and the rows that it has not taken in."""

    own: Any
    tokens: Tensor  # [B, ROOM + 1] int64, as in `Rows`
    features: Tensor  # [B, ROOM, F], as in `Rows`
    count: Tensor  # [B] int64


class Deferred(Drafter):
    """A drafter for which rows may wait. Its own trees start from a state for which none do."""

    timed = True

    def __init__(self, drafter: TreeDrafter, target: Transformer, smaller: Sequence[Drafter] = ()):
        """smaller: presets over the same state, smallest tree first"""
        self.drafter, self.weight, self.smaller = drafter, target.embedding.weight, (*smaller,)
        self.depth, self.size, self.width = drafter.depth, drafter.size, drafter.width
        self.fresh_rows, self.layers, self.taps = drafter.fresh_rows, drafter.layers, drafter.taps

    @property
    def name(self) -> str:
        return self.drafter.name

    def prefer(self, text: Text) -> Tensor:
        return self.drafter.prefer(text)

    def facts(self) -> dict[str, Any]:
        choices = [preset.name for preset in self.presets if not isinstance(preset, CatchUp)]
        return self.drafter.facts() | {"tree": "auto", "trees": choices}

    def init(self, batch: int, slots: int) -> Waiting:
        own, new = self.drafter.init(batch, slots), torch.zeros_like
        number = torch.zeros(batch, ROOM + 1, dtype=torch.long, device=self.weight.device)
        features = self.weight.new_zeros(batch, ROOM, (1 + len(self.taps)) * self.weight.shape[1])
        return Waiting(own, number, features, new(number[:, 0]))

    def extend(self, state: Waiting, rows: Rows) -> Waiting:
        return changed(state, own=self.drafter.extend(state.own, rows), count=torch.zeros_like(state.count))

    def take_in(self, state: Waiting) -> Waiting:
        """Hand over what waits. Writes: the drafter's own cache."""
        return Deferred.extend(self, state, Rows(state.tokens, state.features, state.count))

    def rewind(self, state: Waiting, length: Tensor) -> Waiting:
        state = self.take_in(state) if state.count.any() else state
        return changed(state, own=self.drafter.rewind(state.own, length))

    def draft(self, state: Waiting, root: Root) -> DraftTree:
        return self.drafter.draft(state.own, root)


class Idle(Deferred):
    """Proposes nothing, and lets its rows wait."""

    depth, size, width, fresh_rows = 0, 1, 0, 0
    name = RootOnly.name

    def __init__(self, drafter: TreeDrafter, target: Transformer):
        self.drafter, self.weight = drafter, target.embedding.weight
        self.layers, self.taps = drafter.layers, drafter.taps

    def extend(self, state: Waiting, rows: Rows) -> Waiting:
        """Keep a row. Writes: the tokens and features that wait."""
        row, at = torch.arange(len(rows.count), device=rows.count.device), state.count.clamp(max=ROOM - 1)
        state.tokens[row, at], state.tokens[row, at + 1] = rows.tokens.unbind(1)
        state.features[row, at] = rows.features[:, 0]
        return changed(state, count=at + rows.count)

    def draft(self, state: Waiting, root: Root) -> DraftTree:
        return root_tree(root.token)


class CatchUp(Idle):
    """Proposes nothing, and hands over every row that waits."""

    name = "none, catching up"

    def extend(self, state: Waiting, rows: Rows) -> Waiting:
        return self.take_in(super().extend(state, rows))


class InOrder:
    """Chooses among `Idle`, `CatchUp` and trees as another chooser does among none and trees."""

    def __init__(self, chooser: Any):
        """chooser: `autosize.Autosizer`, which knows nothing of `CatchUp`"""
        self.chooser, self.waiting = chooser, 0  # cycles whose rows wait

    def next(self, limit: int) -> int:
        """The preset of the next cycle. limit: the largest that makes sense now."""
        preset = self.chooser.next(max(limit - 1, 0))
        idle = preset == 0 and self.waiting < ROOM - 1
        catch_up = not idle and (preset == 0 or self.waiting > 0)
        self.waiting = self.waiting + 1 if idle else 0
        return 1 if catch_up else preset + (preset > 0)

    def observe(self, preset: int, accepted: float, seconds: float) -> None:
        """Learn from a cycle. accepted: mean length over its rows, the bonus not counted."""
        if preset != 1:
            self.chooser.observe(max(preset - 1, 0), accepted, seconds)

    def rescale(self, ratios: Sequence[float]) -> None:
        """Take it that each preset's cycles now take so many times as long."""
        self.chooser.rescale([ratios[0], *ratios[2:]])

    def table(self, ran: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """As `Autosizer.table`; cycles that catch up count as none's, with all they cost."""
        return self.chooser.table([(max(preset - 1, 0), seconds) for preset, seconds in ran])
