"""Deferral: while no tree is wanted, a drafter postpones reading, which costs next to nothing.

A draft head that reads every decided token costs vanilla decoding 4 to 7 %. So the preset without a
tree, `RestingDrafter`, only keeps the target's features of the last tokens, beside the drafter's
own state. `read_skipped` reads them before the next tree. Presets that propose what a lookup finds
rest, too.
- An EAGLE head may skip older tokens, prompts that come meanwhile, and on a CPU the last tokens of
  an answer that is over: its cache then has a gap, and it attends to the text around it. (With
  captured prompts, on CUDA, it reads them.)
- A draft model needs no features and has no gaps: it catches up before a prompt, and when the kept
  tokens are as many as fit.

Trade-off: after a gap a head drafts worse until the text has moved on. Behind a prompt that it
skipped, its trees yield up to 10 % fewer tokens (SmolLM2); the tree policy sees only these until
the head has read a prompt. Not here: the choice of the preset (autosize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode import DecodeState
from draft_tree import DecodedTokens, DraftTree
from drafters import Drafter, DrafterUpdate, DraftInputs, RootOnly, TreeDrafter
from drafts.presets import PresetDrafter
from model import Transformer
from reference import Backend
from run.observer import View
from run.resolved import tree_options
from runtime import copy_into, replace_fields, sequences_of

MAX_KEPT = 16  # tokens whose features are kept


class LazyState(NamedTuple):
    """A drafter's state, and the features of the tokens that it has not read."""

    own: Any  # with its `length`, [B] int64, tokens that it has read
    # [B, MAX_KEPT + 1, F], as in `DrafterUpdate`; token i is in place i % MAX_KEPT; one is spare
    features: Tensor
    count: Tensor  # [B] int64, deferred tokens; the last MAX_KEPT of them are kept
    passed: Tensor  # [B] int64, grows with every step; 0: no token has passed
    lookup_state: Any = ()  # state of the lookup, where there is one


class LazyDrafter(PresetDrafter):
    """A drafter that may defer. Its trees start from a state that has caught up."""

    max_deferred: int = 0  # cycles whose tokens `extend` may leave unread until `read_skipped`
    may_skip: bool = False  # it may defer for longer; the oldest tokens are then never read

    def __init__(
        self,
        drafter: TreeDrafter,
        target: Transformer,
        smaller: Sequence[Drafter] = (),
        grower: Drafter | None = None,
        lookup: Drafter | None = None,
    ):
        """Wrap a drafter.

        smaller: presets over the same state, smallest tree first
        grower: proposes the tree, by default the drafter itself
        lookup: an `NgramDrafter` whose state goes along; default: a drafter without a state
        """
        self.drafter = drafter
        self.grower = grower or drafter
        self.lookup = lookup or RootOnly()
        self.weight = target.norm.weight
        self.smaller = (*smaller,)
        self.depth = self.grower.depth
        self.size = self.grower.size
        self.width = self.grower.width
        self.keeps_nodes = drafter.keeps_nodes
        self.layers = drafter.layers
        self.aux_layers = drafter.aux_layers

    @property
    def name(self) -> str:
        return self.grower.name if isinstance(self.grower, TreeDrafter) else super().name

    def use(self, backend: Backend) -> None:
        super().use(backend)
        for inner in (self.drafter, self.grower, self.lookup):
            inner.use(backend)

    def fuse(self, enable: bool) -> None:
        self.drafter.fuse(enable)

    def resolved_options(self) -> dict[str, Any]:
        names = [preset.name for preset in self.presets]
        return tree_options(self.drafter) | {"tree": "auto", "trees": names}

    def init(self, batch: int, slots: int) -> LazyState:
        width = (1 + len(self.aux_layers)) * self.weight.shape[-1]
        features = self.weight.new_zeros(batch, MAX_KEPT + 1, width)
        count = torch.zeros(batch, dtype=torch.long, device=self.weight.device)
        own = self.drafter.init(batch, slots)
        lookup_state = self.lookup.init(batch, slots)
        return LazyState(own, features, count, count.clone(), lookup_state)

    def extend(self, state: LazyState, update: DrafterUpdate) -> LazyState:
        own = self.drafter.extend(state.own, update)
        lookup_state = self.lookup.extend(state.lookup_state, update)
        return replace_fields(
            state, own=own, passed=state.passed + update.count, lookup_state=lookup_state
        )

    def rewind(self, state: LazyState, length: Tensor) -> LazyState:
        """Forget all but the first `length` tokens, and all deferred ones.

        Behind a gap the drafter may keep some tokens that the text no longer has. Before any token
        has passed, it counts as having read `length`, as other drafters do.
        """
        kept = length
        if not self.drafter.keeps_nodes:  # a gap: fewer tokens than the text
            shorter = torch.minimum(length, state.own.length)
            kept = torch.where(state.passed > 0, shorter, length)
        own = self.drafter.rewind(state.own, kept)
        count = torch.zeros_like(state.count)
        lookup_state = self.lookup.rewind(state.lookup_state, length)
        return replace_fields(state, own=own, count=count, passed=length, lookup_state=lookup_state)

    def propose(self, state: LazyState, inputs: DraftInputs) -> DraftTree:
        return self.grower.propose(state.own, inputs)

    def read_skipped(self, state: LazyState, text: DecodedTokens) -> LazyState:
        """Read the kept tokens. Writes: the drafter's own cache.

        A drafter that keeps its nodes also reads the token before: it may not have run it.
        """
        has_run = (state.own.length > 0) & (state.count > 0)
        again = has_run.long() * self.drafter.keeps_nodes
        kept = state.count.clamp(max=MAX_KEPT)
        width = MAX_KEPT
        if kept.device.type == "cpu":  # nothing is captured: only as many as the longest row has
            width = max(int((kept + again).max()), 1)
        steps = torch.arange(width + 1, device=again.device)
        at = (text.pos - kept - again)[:, None] + steps  # [B, width + 1], indices in the text
        tokens = text.tokens.gather(1, at.clamp(0, text.tokens.shape[1] - 1))
        places = ((state.count - kept)[:, None] + steps[:width]) % MAX_KEPT
        index = places[:, :, None].expand(-1, -1, state.features.shape[2])
        # with `again`, features lag a place behind tokens: such drafters read none
        features = state.features.gather(1, index)
        own = self.drafter.rewind(state.own, state.own.length - again)
        own = self.drafter.extend(own, DrafterUpdate(tokens, features, kept + again))
        return replace_fields(state, own=own, count=torch.zeros_like(state.count))


class RestingDrafter(LazyDrafter):
    """Proposes what a lookup finds, or nothing, and defers what is confirmed."""

    def __init__(
        self,
        drafter: TreeDrafter,
        target: Transformer,
        lookup: Drafter | None = None,
        size: int = 0,
    ):
        """lookup: as for `LazyDrafter`; size: number of its preset that proposes, 0 for nothing"""
        grower = lookup.presets[size] if lookup else RootOnly()
        super().__init__(drafter, target, grower=grower, lookup=lookup)
        self.may_skip = not drafter.keeps_nodes
        self.max_deferred = MAX_KEPT - 1  # with the token before, as many as are kept

    def propose(self, state: LazyState, inputs: DraftInputs) -> DraftTree:
        return self.grower.propose(state.lookup_state, inputs)

    def extend(self, state: LazyState, update: DrafterUpdate) -> LazyState:
        """Keep the features of the last tokens. Writes: the kept features; on a CPU, the state."""
        lookup_state = self.lookup.extend(state.lookup_state, update)
        rows = update.count
        if update.at_root is not None:  # of a prompt only the chunk that completes it waits
            rows = rows * update.at_root
        keep_rows = self.backend.keep_rows
        if keep_rows is not None:
            kept = (state.features, state.count, state.passed)
            keep_rows(*kept, update.features, rows)
            return state  # the lookup has written its own in place, too
        step = torch.arange(update.features.shape[1], device=state.count.device)
        count = rows[:, None]  # [B, 1]
        number = state.count[:, None] + step  # [B, R]
        kept = (step < count) & (step >= count - MAX_KEPT)
        place = torch.where(kept, number % MAX_KEPT, MAX_KEPT)
        sequences = torch.arange(len(place), device=place.device)[:, None]
        state.features[sequences, place] = update.features
        count = state.count + rows
        passed = state.passed + len(step)
        return replace_fields(state, count=count, passed=passed, lookup_state=lookup_state)


def read_skipped(view: View, preset: int, waiting: int) -> int:
    """Before a step: let the drafter read what it has skipped, if the preset may defer no more.

    waiting: cycles since it last did. Writes: the drafter's state. Returns: cycles that wait then.
    """
    drafter = view.presets[preset]
    if not isinstance(drafter, LazyDrafter):
        return 0
    due = waiting >= drafter.max_deferred and not drafter.may_skip
    if waiting and due:
        largest = view.presets[-1]

        def body(state: DecodeState) -> None:
            if view.has_parts:
                waits = state.drafter_state.count.nonzero().flatten().tolist()
                if not largest.keeps_nodes:  # finished sequences keep a gap
                    waits = [seq for seq in waits if view.live[seq]]
                waits = waits or [0]
                state = sequences_of(state, range(waits[0], waits[-1] + 1))
            text = DecodedTokens(state.tokens, state.pos)
            copy_into(state.drafter_state, largest.read_skipped(state.drafter_state, text))

        view.run_step("read skipped", body)
        waiting = 0
    return waiting + (drafter.max_deferred > 0)
