"""Which tokens were drafted, and by what: for a chat that shows it, and for a server's clients."""

from __future__ import annotations

from typing import Any, NamedTuple

from cli.methods import DRAFTERS
from decode import Engine
from drafters import DrafterUpdate
from extras.deferred import Idle
from session import CycleResult, Reader


def source_of(engine: Engine, preset: int) -> str:
    """Return the name of what drafts in a preset; "" where nothing does."""
    drafter = engine.presets[preset]
    if drafter.size == 1:
        return ""
    if isinstance(drafter, Idle):
        return "lookup"
    return DRAFTERS[engine.option("draft") or "eagle"].source


def told_draft(engine: Engine) -> str:
    """Describe the ways to draft of an engine, for a person."""
    found = [source_of(engine, preset) for preset in range(len(engine.presets))]
    sources = sorted(set(found) - {""}, reverse=True)
    if not sources:
        return "no drafts"
    return f"drafts by {' and '.join(sources)}"


class Marks(NamedTuple):
    """The sources of the new tokens of a sequence, and its counts."""

    sources: list[str]  # of each token's draft; "" where the target alone decided it
    passes: int  # of the target, those of the prompt left out
    rejected: int  # rows of draft trees that were verified and not accepted


class Drafted(Reader):
    """Notes for every new token of a session what drafted it."""

    def __init__(self, engine: Engine):
        self.sources = [source_of(engine, preset) for preset in range(len(engine.presets))]
        self.sizes = [drafter.size for drafter in engine.presets]
        batch = engine.config.batch_size
        self.marks: list[list[str]] = [[] for _ in range(batch)]
        self.passes = [0] * batch
        self.rejected = [0] * batch

    def take(self, seq: int) -> Marks:
        """Return the marks since the last call."""
        found = Marks(self.marks[seq], self.passes[seq], self.rejected[seq])
        self.marks[seq] = []
        self.passes[seq] = self.rejected[seq] = 0
        return found

    def launched(self, update: DrafterUpdate, live: list[bool]) -> tuple:
        return ()

    def read(self, copies: Any, result: CycleResult, taken: dict[int, list[int]]) -> None:
        source = self.sources[result.preset]
        for seq, tokens in taken.items():
            drafted = min(result.length[seq], len(tokens)) if source else 0
            self.marks[seq] += [source] * drafted + [""] * (len(tokens) - drafted)
            self.passes[seq] += 1
            self.rejected[seq] += max(self.sizes[result.preset] - 1 - result.length[seq], 0)

    def decided_root(self, seq: int, features: Any, root: int) -> None:
        self.marks[seq].append("")
