"""Draft trees: their shapes, their records, and the text that they continue.

A tree has N nodes, node 0 the root (the token decided last, not cached yet). Parents precede
children. Ancestors and depths follow from `parents`, and the accepted path from these, by tensor
operators of fixed shape: there is no list of leaves, and the host waits for nothing.

A shape, `DynamicTree` or `StaticTree`, is plain data. `drafters.planned` gives it a plan, by which
`TreeDrafter.propose` (drafters.py) grows a tree level by level: a frontier is the nodes of a level
that get children; a backend's `expand_frontier` scores these and picks the next frontier,
`select_nodes` picks the nodes of the tree, and `accept` the path that the target agrees with
(reference.py).

Padding is where `valid` is False; no token id stands for it. All scores are fp32. No torch is
imported, so that options are checked before it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MAX_NODES = 64  # ancestor bits of a node fit one int64


# ---------------------------------------------------------------------- the text


class DecodedTokens(NamedTuple):
    """Everything decided so far."""

    tokens: Tensor  # [B, S + 1] int64; entries past pos are padding
    pos: Tensor  # [B] int64, index of the root, the token decided last

    @property
    def root(self) -> Tensor:
        """The token decided last, [B] int64."""
        return self.tokens.gather(1, self.pos[:, None]).squeeze(1)


class DrafterUpdate(NamedTuple):
    """Decided tokens and their features: f_j is the target's at x_j; x_{j+1} follows from it."""

    tokens: Tensor  # [B, R + 1] int64, x_j and the token after the last
    features: Tensor  # [B, R, F], f_j; with aux layers [B, R, (1 + aux) F]
    count: Tensor  # [B] int64, leading features that are real; the rest is padding
    text: DecodedTokens | None = None  # all decided tokens up to the new roots
    # of a verified cycle, None after a prompt: its tree, and [B, R] int64, the accepted nodes,
    # root first; 0 past the path
    tree: DraftTree | None = None
    path: Tensor | None = None
    # [B] bool, after a chunk of prompts: the chunk ends at the root; None: all do
    at_root: Tensor | None = None
    scores: Tensor | None = None  # [B, N, V] of a verified cycle: the target's, after every node


# ---------------------------------------------------------------------- growth, level by level


class Level(NamedTuple):
    """The plan of one level of a tree (`drafters.planned`)."""

    k: int  # children per node of the frontier
    count: int  # R', the level's candidates that have children themselves; 0 on the last level
    first_candidate: int = 0  # flat index of the level's first candidate
    first_slot: int = 0  # scratch slot of the first node that has children; the others follow
    slots: int = 0  # W, scratch slots of the whole tree
    # [1, R'] int64, into the level's candidates; None: the best ones
    fixed_children: Tensor | None = None


class Children(NamedTuple):
    """The best children of R nodes, best first; [B, 1, k]: of all nodes of the level."""

    tokens: Tensor  # [B, R, k] int64
    scores: Tensor  # [B, R, k] fp32, log-probabilities
    extra: Any = None  # of the drafter, for an acceptance rule of its own


class Scores(NamedTuple):
    """The scores of all children of R nodes; a child adds log softmax(c z) to its path's value.

    With noise, logits are z / T, and z + T G takes z's place: the target will choose by it.
    """

    logits: Tensor  # [B, R, V] fp32, z or z / T; or [B, 1, V], which all R nodes share
    sharpness: float = 1.0  # c
    ids: Tensor | None = None  # [V] int64, the token of each column; None: its number
    noise: Tensor | None = None  # [B, D+1, all tokens] fp32 Gumbel noise, G
    level: int = 0  # row of the noise
    temperature: Tensor | None = None  # [B] fp32, T

    def with_noise(self) -> Tensor:
        """Return z, or z + T G: [B, R, V]."""
        if self.noise is None:
            return self.logits
        noise = self.noise[:, self.level, None]  # [B, 1, all tokens]
        if self.ids is not None:
            noise = noise.index_select(-1, self.ids)
        return self.temperature[:, None, None] * (self.logits + noise)

    def best(self, k: int, topk: Callable) -> Children:
        """Return the k best children of every node. topk: of a backend"""
        # [B, R, k] twice, [B, R, 1]
        best, columns, total = topk(self.sharpness * self.with_noise(), k)
        tokens = columns
        if self.ids is not None:
            tokens = self.ids[columns]
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return Children(tokens, (best - total).clamp(max=0))


class Candidates(NamedTuple):
    """All scored children of a level or of a tree: by level, then by parent, the best first."""

    tokens: Tensor  # [B, P] int64
    values: Tensor  # [B, P] fp32, sum of the scores along the path; -inf: no candidate
    parents: Tensor  # [B, P] int64, flat index of the parent; -1 is the root


class Frontier(NamedTuple):
    """The nodes of a level that have children."""

    index: Tensor  # [B, R] int64, flat indices among the candidates of all levels
    tokens: Tensor  # [B, R] int64
    parent: Tensor  # [B, R] int64, their parents' places in the frontier before
    values: Tensor  # [B, R] fp32, sum of the scores along the path
    seen: Tensor  # [B, R, W] bool, the scratch slots that each sees: its ancestors' and its own

    def for_cpp(self) -> tuple[Tensor, ...]:
        """Return the operands of `expand_frontier` in C++."""
        return self.index, self.values, self.seen


class DraftTree(NamedTuple):
    """N nodes per sequence; node 0 is the root. Parents precede children."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node numbers; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i
    valid: Tensor  # [B, N] bool
    values: Tensor | None = None  # [B, N] fp32, the draft's log-probability of each path; root 0
    # [B, N] int64, each node's index among the root and the nodes that the drafter ran;
    # 0: the root, or a node that did not run
    ran_index: Tensor | None = None
    extra: Any = None  # of the drafter, for a cycle of its own
    noise: Tensor | None = None  # [B, R, V] fp32, of its depths' draws, if the drafter made it

    def for_cpp(self) -> tuple[Tensor, ...]:
        """Return the operands of `accept` in C++."""
        return self.tokens, self.parents, self.depths, self.valid


class Accepted(NamedTuple):
    """The accepted path, padded to the deepest one that the tree allows."""

    path: Tensor  # [B, D+1] int64, accepted node of each depth, root first; 0 past length
    length: Tensor  # [B] int64, accepted nodes without the root
    emitted: Tensor  # [B, D+1] int64, length + 1 decided tokens (bonus last), then padding
    # [B, D+1] int64, slot offset that each depth's key and value come from
    moves: Tensor


# ---------------------------------------------------------------------- shapes


def candidates(depth: int, topk: int) -> int:
    """Count the candidates of a dynamic tree, K + (D - 1) K^2."""
    return topk + (depth - 1) * topk**2


# EAGLE-1's tree for 7B models (`mc_sim_7b_63`): 25 drafted nodes, widths 4, 8, 8, 3, 2.
# Source: arXiv 2401.15077.
MC_SIM_7B = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
EAGLE1_PATHS = tuple(tuple(map(int, path)) for path in MC_SIM_7B.split())


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the drafter is confident, then re-ranked."""

    depth: int = 6  # D, drafted levels; the defaults are the papers'
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    plan: tuple[Level, ...] = field(default=(), compare=False, repr=False)  # by `planned`

    def __post_init__(self):
        """Check that there are enough candidates. Raises: ValueError."""
        count = candidates(self.depth, self.topk)
        if self.size - 1 > count:
            raise ValueError(
                f"a tree of {self.size} nodes needs {self.size - 1} candidates; "
                f"depth {self.depth} and top-k {self.topk} give {count} (K + (D-1) K^2); "
                "lower NODES of --tree or raise its CHILDREN"
            )

    @property
    def width(self) -> int:
        """The largest number of children of a node."""
        return self.topk

    @property
    def widths(self) -> list[int]:
        """The number of nodes that run, of every level below the root."""
        return [self.topk] * (self.depth - 1)

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"dynamic {self.depth}/{self.topk}/{self.size}"

    @property
    def nodes(self) -> int:
        """How many of the candidates, the best ones, become nodes; a `StaticTree` names them."""
        return self.size - 1


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape, as rank paths.

    (0, 2) is the third best child of the best child of the root. Nodes are numbered by (depth,
    path). Of every level only the nodes with children run. Members are as in `DynamicTree`.
    """

    paths: tuple[tuple[int, ...], ...]
    # by `planned`: the plan, and the candidates that become nodes, [1, N-1] int64, ascending
    plan: tuple[Level, ...] = field(default=(), compare=False, repr=False)
    nodes: Tensor | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def chain(depth: int) -> StaticTree:
        """Return a chain of `depth` drafted tokens."""
        return StaticTree(tuple((0,) * level for level in range(1, depth + 1)))

    def __post_init__(self):
        """Set `depth`, `size`, `levels` and `inner`. The root's path () is included.

        levels: the paths of every depth, in node order; inner: those of them that have children
        """
        parents = {path[:-1] for path in self.paths}
        depth = max(map(len, self.paths), default=0)
        levels: list[list[tuple[int, ...]]] = [[] for _ in range(depth + 1)]
        for path in sorted(((), *self.paths)):
            levels[len(path)].append(path)
        inner = [[path for path in level if path in parents] for level in levels[:-1]]
        # the dataclass is frozen
        self.__dict__.update(depth=depth, size=len(self.paths) + 1, levels=levels, inner=inner)

    @property
    def width(self) -> int:
        return max(map(self.ranks, range(self.depth)), default=0)

    @property
    def widths(self) -> list[int]:
        return [len(level) for level in self.inner[1:]]

    @property
    def name(self) -> str:
        if self.width == 1:
            return f"chain {self.depth}"
        return f"static {self.size}"

    def place(self, path: tuple[int, ...]) -> int:
        """Return the index of a path's candidate among those of its level."""
        level = len(path) - 1
        return self.inner[level].index(path[:-1]) * self.ranks(level) + path[-1]

    def ranks(self, level: int) -> int:
        """Return the number of children that are drafted for a node of a level."""
        return 1 + max(path[-1] for path in self.levels[level + 1])


# ---------------------------------------------------------------------- shapes as options

# shapes of --tree, and how many of the numbers LEVELS,CHILDREN,NODES each may have behind it
SHAPES = {"auto": 3, "dynamic": 3, "chain": 1, "static": 0}
NUMBERS = ("tree_depth", "tree_topk", "tree_size")


def parse_tree(text: str) -> dict[str, Any]:
    """Return the options that a value of `--tree` stands for, by name.

    A number that is left out has its default. A text that names no shape is the path of a file.

    Raises: ValueError for another form.
    """
    shape, colon, rest = text.partition(":")
    numbers = rest.split(",") if colon else []
    valid = not colon or any(numbers)
    valid = valid and all(re.fullmatch(r"([1-9][0-9]{0,8})?", number) for number in numbers)
    if valid and len(numbers) <= SHAPES.get(shape, -1):
        options = {name: int(number) for name, number in zip(NUMBERS, numbers) if number}
        return {"tree": shape} | options
    if text == "":
        return {"tree": ""}
    if shape not in SHAPES and Path(text).exists():
        return {"tree_file": text}
    raise ValueError(
        "--tree takes auto, chain, dynamic, static, numbers from 1 on behind the first three, as "
        f"chain:3 or dynamic:6,8,32 (LEVELS,CHILDREN,NODES), or a JSON file; {text} is none of them"
    )
