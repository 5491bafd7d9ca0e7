"""Observers: objects on the host that watch decoding; and a way to draft, which has one.

    next_preset, before_step --> cycle --> host_tensors --> after_cycle ... finished

1. Before a cycle the engine's own observer, its policy, picks the preset that runs. Every observer
   may prepare it.
2. Behind a cycle an observer names tensors that the host shall read; later, on CUDA a cycle later,
   it gets them with the report.
3. When a turn ends it gets the text.

An observer changes the speed, or notes something; it never changes a token. It reads a `View`, not
the session. Masks of tokens are the guides' (drafts/grammar.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from decode import Buffers, CycleResult, DecodeState
from draft_tree import DrafterUpdate
from drafters import Drafter, RootOnly
from model import Transformer


@dataclass(frozen=True, eq=False)
class View:
    """The part of a session that observers may read, and the steps that they may run.

    It holds no session: its steps are kept by the buffers, which outlive one.
    """

    engine: Any  # `run.engine.Engine`
    buffers: Buffers
    history: list[list[int]]  # every token of each sequence; during prefill, the cached part
    live: list[bool]  # whether each sequence decodes
    draft_limits: list[float]  # drafted tokens that a cycle of each may have

    def run_step(self, key: Hashable, body: Callable[[DecodeState], Any]) -> Any:
        """Run a function of the state, which it may write in place. key: tells steps apart"""
        buffers = self.buffers
        return self.engine.run_step(buffers, key, lambda: body(buffers.state))

    @property
    def presets(self) -> tuple[Drafter, ...]:
        """The presets of the engine, the smallest tree first."""
        return self.engine.presets

    @property
    def drafter_state(self) -> Any:
        """The state that the drafters share, after all cycles that were launched."""
        return self.buffers.state.drafter_state

    @property
    def has_parts(self) -> bool:
        """Return whether a cycle may run a part of the sequences."""
        return self.engine.has_parts

    @property
    def rows(self) -> range:
        """The sequences that the next cycle runs."""
        return self.engine.rows(self.live)

    @property
    def limit(self) -> int:
        """The largest preset that a cycle may run."""
        limits = [limit for limit, live in zip(self.draft_limits, self.live) if live]
        most = max(limits, default=0)
        fits = [number for number, preset in enumerate(self.presets) if preset.size - 1 <= most]
        return max(fits, default=0)


class Observer:
    """Watches decoding. This one keeps nothing, and picks the largest preset.

    An engine has one, its policy, and a session the observer that `for_session` returns. A session
    may have further ones, which pick nothing.
    """

    def on_engine_ready(self, engine: Any, time_cycle: Callable) -> Observer:
        """Return the observer of a warm engine.

        engine: `run.engine.Engine`; time_cycle: `run.warm_up.time_cycle` of this engine
        """
        return self

    def for_session(self) -> Observer:
        """Return the observer of a new session."""
        return self

    def next_preset(self, view: View, reads_prompt: bool) -> int:
        """Pick the preset of the next cycle, or of the next chunk of a prompt."""
        return len(view.presets) - 1 if reads_prompt else view.limit

    def before_step(self, view: View, preset: int) -> None:
        """Run what a preset needs before a step."""

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        """Return tensors that the host shall read after the cycle that was just launched.

        Those of the update have a row for each of `view.rows`.
        """
        return ()

    def after_prompt(self, seq: int, features: Tensor, root: int) -> None:
        """Take the root of a prompt. features: [1, 1, F], that it was chosen from"""

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        """Learn from a cycle. copied: the tensors of `host_tensors`, as lists"""

    def finished(self, text: list[int], begin: int) -> None:
        """Take the text of a turn that is over. begin: index of the answer's first token"""

    def table(self, ran: list[tuple[int, float]]) -> list[dict[str, Any]]:
        """Summarize the presets, for the record; empty without a choice. ran: `Stats.presets`."""
        return []


# ---------------------------------------------------------------------- ways to draft


@dataclass(frozen=True)
class DraftMethod:
    """A way to draft, as its module's `load_method` returns it."""

    presets: tuple[Drafter, ...]  # which share a state, smallest tree first
    # the options that were used, under their names, for the record
    resolved: dict[str, Any] = field(default_factory=dict)
    policy: Observer = Observer()  # picks the preset of every step


def method_of(drafter: Drafter) -> DraftMethod:
    """Return the way to draft with a drafter: its own (`method`), or the drafter alone."""
    own = getattr(drafter, "method", None)
    return own() if own else DraftMethod((drafter,))


def load_method(target: Transformer, config: Any, tokenizer: Any) -> DraftMethod:
    """Return `--draft none`."""
    return DraftMethod((RootOnly(),))
