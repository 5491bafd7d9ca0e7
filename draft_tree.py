"""Draft trees: the text that they continue, and the shapes that they grow in.

A tree has N nodes, node 0 the root (the token decided last, not cached yet). Parents precede
children. Ancestors and depths follow from `parents`, and the accepted path from these, by tensor
operators of fixed shape: there is no list of leaves, and the host waits for nothing.

A shape, `DynamicTree` or `StaticTree`, is plain data. `to` moves it to a device and gives it a
plan, by which `TreeDrafter.propose` (drafters.py) grows a tree level by level.

Padding is where `valid` is False; no token id stands for it. All scores are fp32.
Not here: scoring tokens (drafters.py), the functions of growth and acceptance
(backends/backends.py), deciding tokens (sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.library import tiles_in_use
from backends.tree import DraftTree, Level
from reference import ancestors
from run.tree_paths import chain_paths, check_candidates


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
    extra: Any = None  # of a verified cycle: the second result of `Engine.pick_tokens`

    @property
    def accepted_ran_index(self) -> Tensor:
        """Indices of the accepted nodes among those that the drafter ran, [B, R] int64."""
        return self.tree.ran_index.gather(1, self.path)


def build_tree(tokens: Tensor, parents: Tensor, valid: Tensor, depth: int) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    return DraftTree(tokens, parents, *ancestors(parents, depth), valid)


# ------------------------------------------------------------------------------------------ shapes


def plan_levels(
    children: Sequence[int],
    widths: Sequence[int],
    fixed_children: Sequence[Any] = (),
) -> tuple[Level, ...]:
    """Plan the levels of a tree.

    children: of a node of each level, the root's first
    widths: nodes with children of each level below the root; the last level has none
    fixed_children: per level, [1, R'] int64, into its candidates; empty: the best ones
    """
    plan = []
    first_candidate = 0  # flat index of a level's first candidate
    first_slot = 0  # scratch slot of a level's first node that has children
    parents = 1
    for level, (k, count) in enumerate(zip(children, (*widths, 0))):
        fixed = fixed_children[level] if level < len(fixed_children) else None
        plan.append(Level(k, count, first_candidate, first_slot, sum(widths), fixed))
        first_candidate += parents * k
        first_slot += count
        parents = count
    return tuple(plan)


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the drafter is confident, then re-ranked."""

    depth: int = 6  # D, drafted levels; the defaults are the papers'
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    plan: tuple[Level, ...] = field(default=(), compare=False, repr=False)  # made by `to`

    def __post_init__(self):
        check_candidates(self.depth, self.topk, self.size)

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

    def to(self, device: torch.device) -> DynamicTree:
        """Return the shape with its plan, which is the same on every device."""
        return replace(self, plan=plan_levels([self.topk] * self.depth, self.widths))

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
    # made by `to`: the plan, and the candidates that become nodes, [1, N-1] int64, ascending
    plan: tuple[Level, ...] = field(default=(), compare=False, repr=False)
    nodes: Tensor | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def chain(depth: int) -> StaticTree:
        """Return a chain of `depth` drafted tokens."""
        return StaticTree(chain_paths(depth))

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

    def to(self, device: torch.device) -> StaticTree:
        """Return the shape with its plan, and with its tensors on a device."""
        fixed_children = []
        for level in self.inner[1:]:
            fixed_children.append(
                torch.tensor([[self._place(path) for path in level]], device=device)
            )
        nodes = []
        first_candidate = 0  # of a level's candidates among those of all levels
        for depth, level in enumerate(self.levels[1:]):
            nodes += [first_candidate + self._place(path) for path in level]
            first_candidate += len(self.inner[depth]) * self.ranks(depth)
        children = [self.ranks(level) for level in range(self.depth)]
        plan = plan_levels(children, self.widths, fixed_children)
        return replace(self, plan=plan, nodes=torch.tensor([nodes], device=device))

    def _place(self, path: tuple[int, ...]) -> int:
        """Return the index of a path's candidate among those of its level."""
        level = len(path) - 1
        return self.inner[level].index(path[:-1]) * self.ranks(level) + path[-1]

    def ranks(self, level: int) -> int:
        """Return the number of children that are drafted for a node of a level."""
        return 1 + max(path[-1] for path in self.levels[level + 1])


def usual_topk_and_size(on_cuda: bool, quant: str, dtype: str) -> tuple[int, int]:
    """Return the top-k and the nodes that a dynamic tree has where no others are asked for.

    quant, dtype: the options (run/options.py)
    """
    if not on_cuda:
        if quant == "none" and dtype == "bfloat16" and tiles_in_use() != "none":
            # 32 rows take 1.4 times as long as one, measured for a matmul of 4096x4096
            return 8, 32
        # matmuls are bound by arithmetic at 16 rows in every format (benchmarks/RESULTS.md)
        return 4, 16
    # an estimate: from 33 rows on, unpacking takes longer than reading int4 weights, or GGUF blocks
    size = 32 if quant in ("int4", "blocks") else 60
    return 10, size
