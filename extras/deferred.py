"""Rows that wait: what a drafter does while no tree is wanted, which is next to nothing.

A draft head that reads every decided token costs vanilla decoding 4 to 7 %. So the preset without a tree, `Idle`, only
keeps the target's features of the last rows, beside the drafter's own state, and the session hands them over before a
tree (`Drafter.catch_up`).
- Of a longer rest, and of a prompt that comes meanwhile, an EAGLE head skips all but those rows: its cache has a gap,
  and it attends to the text around it. (Where prompts are captured, on CUDA, it reads them.)
- A draft model needs no features and has no gaps: it reads its rows before a prompt and when there is no room for more.

Trade-off: after a long rest a head drafts a little worse until the text has moved on. For a prompt that it has not read
its trees bring up to 10 % fewer tokens (on SmolLM2), by which they are judged until it has read one. Not here: which
preset is the fastest (autosize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_tree import DraftTree, Text, replace_fields
from drafters import LARGEST, Confirmed, Drafter, Root, RootOnly, TreeDrafter
from model import Transformer
from ops.library import on_cpp_device

ROOM = 16  # rows that are kept


class Waiting(NamedTuple):
    """A drafter's state, and the rows that it has not taken in."""

    own: Any  # with its `length`, [B] int64, rows that it has read
    features: Tensor  # [B, ROOM + 1, F], as in `Confirmed`; number i of those that wait is in place i % ROOM; one is spare
    count: Tensor  # [B] int64, how many wait; only the last ROOM are kept
    passed: Tensor  # [B] int64, 0 until rows of the text went by, whether they were read, wait or were left out


class Deferred(Drafter):
    """A drafter for which rows may wait. Its trees start from a state for which none do."""

    timed = True

    def __init__(
        self,
        drafter: TreeDrafter,
        target: Transformer,
        smaller: Sequence[Drafter] = (),
        grower: Drafter | None = None,
    ):
        """smaller: presets over the same state, smallest tree first; grower: of the tree, if not the drafter itself"""
        grower = grower or drafter
        self.drafter, self.grower, self.weight, self.smaller = (
            drafter,
            grower,
            target.embedding.weight,
            (*smaller,),
        )
        self.depth, self.size, self.width, self.fresh_rows = (
            grower.depth,
            grower.size,
            grower.width,
            grower.fresh_rows,
        )
        self.layers, self.aux_layers = drafter.layers, drafter.aux_layers

    @property
    def name(self) -> str:
        return self.grower.name

    def fuse(self, whether: bool) -> None:
        self.drafter.fuse(whether)

    def prefer(self, text: Text) -> Tensor | None:
        """What the drafter alone says: 0 for none, or a number past the last."""
        return self.drafter.prefer(text)

    def resolved_options(self) -> dict[str, Any]:
        return self.drafter.resolved_options() | {
            "tree": "auto",
            "trees": [preset.name for preset in self.presets],
        }

    def init(self, batch: int, slots: int) -> Waiting:
        features = self.weight.new_zeros(
            batch, ROOM + 1, (1 + len(self.aux_layers)) * self.weight.shape[1]
        )
        count = torch.zeros(batch, dtype=torch.long, device=self.weight.device)
        return Waiting(self.drafter.init(batch, slots), features, count, count.clone())

    def extend(self, state: Waiting, rows: Confirmed) -> Waiting:
        return replace_fields(
            state, own=self.drafter.extend(state.own, rows), passed=state.passed + rows.count
        )

    def rewind(self, state: Waiting, length: Tensor) -> Waiting:
        """As of any drafter; no row waits any more. Behind a gap it may keep some rows that the text no longer has.

        A drafter that no row has passed takes it that it has read so many, as others do.
        """
        own = length
        if not self.drafter.keeps_rows:  # a gap: fewer rows than the text
            own = torch.where(state.passed > 0, torch.minimum(length, state.own.length), length)
        count = torch.zeros_like(state.count)
        return replace_fields(
            state, own=self.drafter.rewind(state.own, own), count=count, passed=length
        )

    def propose(self, state: Waiting, root: Root) -> DraftTree:
        return self.grower.propose(state.own, root)

    def catch_up(self, state: Waiting, text: Text) -> Waiting:
        """Hand over what is kept; to a drafter that keeps its own rows also the one before, which it may not have run.

        Writes: the drafter's own cache.
        """
        again = ((state.own.length > 0) & (state.count > 0)).long() * self.drafter.keeps_rows
        kept, steps = state.count.clamp(max=ROOM), torch.arange(ROOM + 1, device=again.device)
        at = (text.pos - kept - again)[:, None] + steps  # [B, ROOM + 1], places in the text
        tokens = text.tokens.gather(1, at.clamp(0, text.tokens.shape[1] - 1))
        places = ((state.count - kept)[:, None] + steps[:ROOM]) % ROOM
        features = state.features.gather(
            1, places[:, :, None].expand(-1, -1, state.features.shape[2])
        )
        own = self.drafter.rewind(state.own, state.own.length - again)
        own = self.drafter.extend(own, Confirmed(tokens, features, kept + again))
        return replace_fields(state, own=own, count=torch.zeros_like(state.count))


class Idle(Deferred):
    """Proposes nothing, and lets its rows wait."""

    def __init__(self, drafter: TreeDrafter, target: Transformer):
        super().__init__(drafter, target, grower=RootOnly())
        self.room = (
            ROOM - 1 if drafter.keeps_rows else LARGEST
        )  # with the row before, as many as are kept

    def extend(self, state: Waiting, rows: Confirmed) -> Waiting:
        """Keep the last rows. Writes: the features that wait."""
        if on_cpp_device(state.count):
            facts = (rows.count, state.count, state.passed)
            count, passed = torch.ops.gpt_eagle.keep_rows(state.features, rows.features, *facts)
            return replace_fields(state, count=count, passed=passed)
        step = torch.arange(rows.features.shape[1], device=state.count.device)
        count, number = rows.count[:, None], state.count[:, None] + step  # [B, 1], [B, R]
        place = torch.where((step < count) & (step >= count - ROOM), number % ROOM, ROOM)
        state.features[torch.arange(len(place), device=place.device)[:, None], place] = (
            rows.features
        )
        return replace_fields(
            state, count=state.count + rows.count, passed=state.passed + len(step)
        )
