"""Which tokens were drafted, and by what: for a chat that shows it, and for a server's clients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from decode import CycleResult
from draft_tree import DrafterUpdate
from run.engine import Engine
from run.methods import source_of
from run.observer import Observer, View

Nodes = list[tuple[int, int, bool]]  # parent, token, whether it was accepted; the root first


@dataclass
class DraftMarks:
    """The sources of the new tokens of a sequence, and its counts."""

    sources: list[str] = field(default_factory=list)  # of each token's draft; "": the target alone
    passes: int = 0  # of the target, those of the prompt left out
    rejected: int = 0  # rows of draft trees that were verified and not accepted
    lengths: list[int] = field(default_factory=list)  # accepted tokens of cycles that drafted
    cycles: list[int] = field(default_factory=list)  # of each token, its cycle; -1: of the prompt
    trees: list[Nodes] = field(default_factory=list)  # of the cycles, where they are wanted


class Spans:
    """Tells the source of each part of a text, whose tokens come before the text is certain."""

    def __init__(self) -> None:
        self.left: deque[tuple[str, int, int]] = deque()  # source, characters, cycle

    def add(self, source: str, characters: int, cycle: int = 0) -> None:
        """Add the text of a token."""
        self.left.append((source, characters, cycle))

    def take(self, characters: int) -> list[tuple[str, int, int]]:
        """Return the spans of the next characters, equal neighbours as one."""
        spans: list[tuple[str, int, int]] = []
        while characters and self.left:
            source, count, cycle = self.left.popleft()
            if count > characters:
                self.left.appendleft((source, count - characters, cycle))
                count = characters
            characters -= count
            if spans and spans[-1][::2] == (source, cycle):
                count += spans.pop()[1]
            if count:
                spans.append((source, count, cycle))
        return spans


class Drafted(Observer):
    """Notes for every new token of a session what drafted it."""

    def __init__(self, engine: Engine):
        self.sources = [source_of(engine, preset) for preset in range(len(engine.presets))]
        batch = engine.config.batch_size
        self.marks = [DraftMarks() for _ in range(batch)]
        self.count = [0] * batch  # cycles of the answer
        self.wants_trees = [False] * batch

    def begin(self, seq: int, wants_trees: bool) -> None:
        """Begin an answer. wants_trees: `take` returns the trees of its cycles"""
        self.take(seq)
        self.count[seq] = 0
        self.wants_trees[seq] = wants_trees

    def take(self, seq: int) -> DraftMarks:
        """Return the marks since the last call."""
        marks = self.marks[seq]
        self.marks[seq] = DraftMarks()
        return marks

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        tree = update.tree
        if not any(wants and decodes for wants, decodes in zip(self.wants_trees, view.live)):
            return ()
        return (tree.tokens, tree.parents, tree.valid, update.path)

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        source = self.sources[result.preset]
        for seq, tokens in result.taken.items():
            marks = self.marks[seq]
            if copied and self.wants_trees[seq]:
                marks.trees.append(nodes_of(copied, seq, result))
            marks.cycles += [self.count[seq]] * len(tokens)
            self.count[seq] += 1
            drafted = min(result.length[seq], len(tokens)) if source else 0
            marks.sources += [source] * drafted + [""] * (len(tokens) - drafted)
            marks.passes += 1
            if source:
                marks.lengths.append(drafted)
            marks.rejected += max(result.update.tree.tokens.shape[1] - 1 - result.length[seq], 0)

    def after_prompt(self, seq: int, features: Tensor, root: int) -> None:
        self.marks[seq].sources.append("")
        self.marks[seq].cycles.append(-1)


def nodes_of(columns: list[list], seq: int, result: CycleResult) -> Nodes:
    """Return the nodes of a verified tree, and the target's own token behind the accepted ones.

    columns: of the cycle's sequences, tokens, parents, whether a node is valid, the accepted path
    """
    row = seq - result.first
    tokens, parents, valid, path = (column[row] for column in columns)
    length = result.length[seq]
    accepted = path[: length + 1]
    numbers: dict[int, int] = {}  # without the padding
    nodes = []
    for node, token in enumerate(tokens):
        if valid[node]:
            parent = numbers[parents[node]] if node else -1
            numbers[node] = len(nodes)
            nodes.append((parent, token, node in accepted))
    return [*nodes, (numbers[accepted[-1]], result.emitted[seq][length], True)]
