"""Drafters that come in presets, and what a policy of theirs knows.

A lookup tells before a tree is drafted how many of its tokens will be accepted (`Lookup.expected`).
Without a clock (several ranks, the residual rule) the largest preset of which anything is expected
runs; by the clock autosize.py picks. Past the positions that a drafter can read, and for as long as
its sequences stay there, no tree is drafted.
The texts of finished turns go to the lookup (kept_texts.py), once the engine is warm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from decode import CycleResult
from draft_tree import DraftTree
from drafters import Drafter, DrafterUpdate, DraftInputs
from drafts.ngram_estimates import Lookup
from reference import ancestors
from run.engine import Engine
from run.observer import Observer, View


class PresetDrafter(Drafter):
    """A drafter beside others over the same state, whose trees are smaller."""

    smaller: tuple[Drafter, ...] = ()  # smallest tree first

    @property
    def presets(self) -> tuple[Drafter, ...]:
        """All presets, smallest tree first; the last is this one."""
        return (*self.smaller, self)

    @property
    def name(self) -> str:
        """The name of its tree in a report."""
        return "none" if self.size == 1 else f"tree of {self.size}"

    def resolved_options(self) -> dict[str, Any]:
        """Return the settings by option name."""
        return {"tree_size": self.size, "tree_depth": self.depth}

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        if self.size == 1:
            return self.backend.root_tree(inputs.text)
        return self.propose_nodes(state, inputs)

    def propose_nodes(self, state: Any, inputs: DraftInputs) -> DraftTree:
        """Propose a tree of more nodes than the root."""
        raise NotImplementedError


class FixedShape:
    """The parents of a tree that has the same shape in every cycle."""

    def __init__(self, parents: list[int], depth: int, device: torch.device | str):
        """parents: node numbers, the root's 0; depth: a bound on that of any node"""
        self.parents = torch.tensor([parents], device=device)  # [1, N]
        self.depths, self.mask = ancestors(self.parents, depth)

    def tree(self, tokens: Tensor, valid: Tensor) -> DraftTree:
        """Return the tree of some tokens, [B, N] as `valid`."""
        B = len(tokens)
        related = (x.expand(B, *x.shape[1:]) for x in (self.parents, self.depths, self.mask))
        return DraftTree(tokens, *related, valid)


def with_smaller(
    make: Callable[[int], PresetDrafter], usual: Sequence[int], size: int
) -> PresetDrafter:
    """Make a drafter with presets of the usual sizes below its own, and one without a tree.

    make: of a number of nodes, root included; size: 0: the largest usual one
    """
    size = size or usual[-1]
    drafter = make(size)
    drafter.smaller = tuple(make(each) for each in (1, *usual) if each < size)
    return drafter


def lookup_of(drafter_state: Any) -> Lookup | None:
    """Return the state of the lookup in a drafter's state, if there is one."""
    state = getattr(drafter_state, "lookup_state", drafter_state)
    return state if isinstance(state, Lookup) else None


class PresetPolicy(Observer):
    """Picks the largest preset that makes sense, and keeps texts."""

    def __init__(self, kept: Any = None, reach: int | None = None):
        """Take what the drafters read.

        kept: `drafts.kept_texts.PastTexts`, which takes the text of every finished turn
        reach: positions that the drafter can read; None: all
        """
        self.kept = kept
        self.reach = reach
        self.warm = False
        self.expected: list[float] | None = None  # accepted tokens per preset, where known
        self.read_prompt = False  # since the last cycle

    def on_engine_ready(
        self, engine: Engine, time_presets: Callable[[], list[float]]
    ) -> PresetPolicy:
        policy = copy(self)
        policy.warm = True
        return policy

    def for_session(self) -> PresetPolicy:
        policy = copy(self)
        policy.expected = None
        return policy

    def next_preset(self, view: View, reads_prompt: bool) -> int:
        if reads_prompt:
            self.read_prompt = True
            return self.pick_reading(len(view.presets) - 1)
        if self.read_prompt:
            self.read_prompt = False
            lookup = lookup_of(view.drafter_state)
            if lookup is not None:
                self._expect(lookup.expected.tolist(), view)
        return self.pick(view.limit if self._within_reach(view) else 0)

    def pick_reading(self, limit: int) -> int:
        """Pick the preset of a chunk of a prompt. limit: the largest preset"""
        return limit

    def pick(self, limit: int) -> int:
        """Pick the preset of a cycle. limit: the largest that makes sense"""
        expected = self.expected
        if expected is None or len(expected) <= limit:
            return limit
        return max((preset for preset in range(limit + 1) if expected[preset] > 0), default=0)

    def _within_reach(self, view: View) -> bool:
        if self.reach is None:
            return True
        decoding = [text for text, live in zip(view.history, view.live) if live]
        return any(len(text) <= self.reach for text in decoding) or not decoding

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        lookup = lookup_of(view.drafter_state)
        return () if lookup is None else (lookup.expected,)

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        if copied:
            self._expect(copied[0], view)

    def _expect(self, expected: list[list[float]], view: View) -> None:
        """Set the tokens that the presets can expect: means over the sequences that decode."""
        rows = [row for row, decodes in zip(expected, view.live) if decodes]
        if len(rows) > 1:
            rows = [[sum(column) / len(rows) for column in zip(*rows)]]
        self.expected = rows[0] if rows else None

    def finished(self, text: list[int], begin: int) -> None:
        if self.kept is not None and self.warm:
            self.kept.add(text, begin)
