"""Draft trees, and every tensor step on them: shapes, growing, acceptance.

A tree has N nodes with node 0 the root (the token decided last, not cached yet). Parents precede children,
so every relation follows from `parents` by a few rounds of boolean algebra: ancestors, depths, acceptance and
the accepted path need no list of leaves, no host and no data-dependent shape.

`grow` makes every tree that scores tokens. Level by level it asks for the children of the frontier, adds them to a pool
of candidates, and runs the next frontier. A shape says which candidates that is, and which become nodes at the end:
`StaticTree` (EAGLE-1, arXiv 2401.15077; chains) goes by rank, `DynamicTree` (EAGLE-2, arXiv 2406.16858) by value.

Padding is what `valid` says, never a token id. All scores are fp32.
Not here: who scores a token (drafters.py), and who decides it (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.library import on_cpu_operators
from ops.rows import Children, Expansion, Scores, ancestors
from ops.tree import Candidates, Shared, next_level, rerank

MAX_NODES = 64  # ancestor bits of a node fit one int64


def changed(record: Any, **fields: Any) -> Any:
    """A NamedTuple with other values in some fields. (`_replace` gives an empty one when torch 2.11 compiles it.)"""
    return type(record)(*[fields.get(name, value) for name, value in zip(record._fields, record)])


class DraftTree(NamedTuple):
    """N nodes per row; node 0 is the root."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node numbers; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i
    valid: Tensor  # [B, N] bool
    q: Tensor | None = None  # [B, N, V] fp32, distribution each node's children were sampled from (residual rule)
    values: Tensor | None = None  # [B, N] fp32, the draft's log-probability of each path; root 0
    # [B, N] int64, slot of each node's row in the drafter's own cache, counted from the root's; 0: it has none
    slots: Tensor | None = None


class Text(NamedTuple):
    """Everything decided so far."""

    tokens: Tensor  # [B, S + 1] int64; entries past pos are padding
    pos: Tensor  # [B] int64, index of the root, the token decided last

    @property
    def root(self) -> Tensor:
        """The token decided last, [B] int64."""
        return self.tokens.gather(1, self.pos[:, None]).squeeze(1)


class Accepted(NamedTuple):
    """What a verification decided, padded to the deepest path that the tree allows."""

    path: Tensor  # [B, D+1] int64, accepted node of each depth (root first); entries past length are 0
    length: Tensor  # [B] int64, accepted nodes without the root
    emitted: Tensor  # [B, D+1] int64, length + 1 decided tokens (bonus last); entries past length are padding
    moves: Tensor  # [B, D+1] int64, from `compaction`


def build_tree(tokens: Tensor, parents: Tensor, valid: Tensor, depth: int, q: Tensor | None = None) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    return DraftTree(tokens, parents, *ancestors(parents, depth), valid, q)


def root_tree(text: Text) -> DraftTree:
    """The tree that is only its root: vanilla decoding."""
    if on_cpu_operators(text.pos):
        return DraftTree(*rerank((), (), 0, 0, text)[:5])
    tokens = text.root[:, None]
    zeros = torch.zeros_like(tokens)
    return build_tree(tokens, zeros, torch.ones_like(tokens, dtype=torch.bool), 0)


# ---------------------------------------------------------------------------------------- acceptance


def accept(tree: DraftTree, choice: Tensor, depth: int) -> Accepted:
    """Keep the deepest path on which every token is the target's own choice at its parent.

    choice: [B, N] int64, the target's token after each node
    depth: D, the deepest path the tree can hold
    Of equally deep paths the one with the lowest node numbers wins.
    """
    matches = tree.valid & (tree.tokens == choice.gather(1, tree.parents))
    matches[:, 0] = True
    accepted = ~(tree.mask & ~matches[:, None]).any(-1)  # [B, N]: the node and all its ancestors match
    N = accepted.shape[1]
    order = tree.depths * N + torch.arange(N - 1, -1, -1, device=choice.device)  # unique keys: no ties
    node = torch.where(accepted, order, -1).argmax(-1)  # [B]
    path, length = path_to(tree, node, depth)
    return Accepted(path, length, choice.gather(1, path), compaction(path, length))


def accept_fused(tree: DraftTree, choice: Tensor, depth: int) -> Accepted:
    """`accept` in one C++ call (ops/cpu/tree.cpp), on a CPU."""
    return Accepted(*torch.ops.gpt_eagle.accept(*tree[:5], choice, depth))


def path_to(tree: DraftTree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The nodes from the root to `node`. node: [B]. Returns: path [B, D+1], zero-padded; length [B]."""
    length = tree.depths.gather(1, node[:, None]).squeeze(1)  # [B]
    index = node[:, None, None].expand(-1, 1, tree.mask.shape[2])
    on_path = tree.mask.gather(1, index)  # [B, 1, N]: the node's ancestors and itself
    levels = torch.arange(depth + 1, device=node.device)[:, None]  # [D+1, 1]
    hit = on_path & (tree.depths[:, None] == levels)  # [B, D+1, N], at most one per depth
    return hit.int().argmax(-1), length  # 0 where a depth has none


def compaction(path: Tensor, length: Tensor) -> Tensor:
    """Slot offset that each depth's key and value come from: [B, D+1]. Rows past the path stay put."""
    steps = torch.arange(path.shape[1], device=path.device)
    return torch.where(steps <= length[:, None], path, steps)


# ----------------------------------------------------------------------------------------- growing a tree


class Level(NamedTuple):
    """The nodes of a level that run through the drafter, to have children."""

    tokens: Tensor  # [B, R] int64
    parent: Tensor  # [B, R] int64, which node of the level before is their parent
    depth: int  # 1 for children of the root
    slot: int  # scratch slot of the first; the others follow
    seen: Tensor  # [B, R, W] bool, which scratch slots each one sees: its ancestors' and its own


class Graft(NamedTuple):
    """Candidates that were found elsewhere."""

    depth: int  # of the deepest at most
    add: Callable[[Candidates], Candidates]  # the pool with them


def grow(
    shape: DynamicTree | StaticTree,
    text: Text,
    out: Tensor,
    children: Callable[[Tensor, int, int], tuple[Children | Scores, Shared | None]],
    run: Callable[[Level, Tensor], Tensor],
    graft: Graft | None = None,
) -> tuple[DraftTree, Tensor]:
    """Grow a tree level by level: score the children of the frontier, choose the next frontier, run it.

    shape: on the root's device (`on`)
    out: [B, 1, F], the drafter's output at the root
    children: of (outputs [B, R, F], level, k), the k best of each node, or their scores, and noise to add to these;
        level 0 asks for those of the root
    run: of (level, outputs of the level before), the outputs of the level's nodes, [B, R, F]
    graft: candidates that were found elsewhere
    Returns: the tree; each node's place among those that ran, counted from the root's; 0: it did not; [B, N] int64.
    """
    levels: list[Candidates] = []
    ran: list[Tensor] = []  # of every level, the flat indices of the nodes that ran
    q: list[Tensor] = []
    front = None  # the root
    begin = slot = 0
    slots = sum(shape.widths)
    for level, width in enumerate((*shape.widths, 0)):
        k = shape.ranks(level)
        found, shared = children(out, level, k)
        step = Expansion(k, width, slot, shape.places_of(level), shape.by_value)
        pool, front = next_level(found, shared, front, step, begin, slots)
        levels.append(pool)
        begin += pool.tokens.shape[1]
        if found.q is not None:
            q.append(found.q)
        if width:
            ran.append(front.index)
            out = run(Level(front.tokens, front.parent, level + 1, slot, front.front.seen), out)
            slot += width
    depth = shape.depth
    if graft:
        levels = [graft.add(Candidates.join(levels))]
        depth = max(depth, graft.depth)
    *nodes, places, number = rerank(levels, ran, shape.nodes, depth, text)
    tree = DraftTree(*nodes[:5], values=nodes[5])
    return (with_q(tree, q, ran, number) if q else tree), places


def with_q(tree: DraftTree, q: list[Tensor], ran: list[Tensor], number: Tensor) -> DraftTree:
    """The tree with what its nodes' children were sampled from. q: per level [B, R, V]; the others as in `grow`."""
    root = torch.full_like(number[:, :1], -1)
    at = number.gather(1, torch.cat((root, *ran), 1) + 1)[:, :, None]  # [B, sum R, 1]
    every = torch.cat(q, 1)  # [B, sum R, V]; leaves have no children, hence no q
    none = every.new_zeros(*tree.tokens.shape, every.shape[2])
    return changed(tree, q=none.scatter(1, at.expand_as(every), every))


# ------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the drafter is confident, then re-ranked. The papers' size is the default."""

    depth: int = 6  # D, drafted levels
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    expand_by: str = "value"  # or "confidence": single steps instead of paths (EAGLE-2 Table 3)
    rerank: bool = True  # False keeps the first levels whole (EAGLE-2 Table 3)
    whole: Tensor | None = field(default=None, compare=False, repr=False)  # the nodes then; made by `on`

    def __post_init__(self):
        pool = self.topk + (self.depth - 1) * self.topk**2
        if self.size - 1 > pool:
            raise ValueError(
                f"a tree of {self.size} nodes needs {self.size - 1} candidates; depth {self.depth} and top-k "
                f"{self.topk} give {pool} (K + (D-1) K^2); lower --tree_size or raise --tree_topk"
            )

    @property
    def width(self) -> int:
        """Children of a node at most."""
        return self.topk

    @property
    def widths(self) -> list[int]:
        """Nodes that run, of every level below the root."""
        return [self.topk] * (self.depth - 1)

    @property
    def name(self) -> str:
        """What it is called in a report."""
        return f"dynamic {self.depth}/{self.topk}/{self.size}"

    def on(self, device: torch.device) -> DynamicTree:
        """The same for tensors of a device."""
        return self if self.rerank else replace(self, whole=torch.arange(self.size - 1, device=device)[None])

    def ranks(self, level: int) -> int:
        """How many children a node of a level is asked for."""
        return self.topk

    @property
    def by_value(self) -> bool:
        """Whether the best paths are expanded, and not the best steps."""
        return self.expand_by == "value"

    def places_of(self, level: int) -> None:
        """Which candidates of a level get children, [1, R]; None: the best."""

    @property
    def nodes(self) -> Tensor | int:
        """Which candidates become nodes, [1, N-1] int64, ascending; a number: so many, the best."""
        return self.size - 1 if self.rerank else self.whole


# EAGLE-1's tree for 7B models (`mc_sim_7b_63`): 25 drafted nodes, widths 4, 8, 8, 3, 2. Source: arXiv 2401.15077.
MC_SIM_7B = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
EAGLE1_PATHS = tuple(tuple(map(int, path)) for path in MC_SIM_7B.split())


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape, as rank paths: (0, 2) is the third best child of the best child of the root.

    Nodes are numbered by (depth, path). Of every level only the nodes with children run. Members as in `DynamicTree`.
    """

    paths: tuple[tuple[int, ...], ...]
    places: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)  # made by `on`

    @staticmethod
    def chain(depth: int) -> StaticTree:
        """A chain of `depth` drafted tokens."""
        return StaticTree(tuple((0,) * d for d in range(1, depth + 1)))

    def __post_init__(self):
        """Sort the paths, root's () included: `levels`, by depth in node order; `inner`, those that have children."""
        parents, depth = {path[:-1] for path in self.paths}, max(map(len, self.paths))
        levels = [sorted(path for path in ((), *self.paths) if len(path) == d) for d in range(depth + 1)]
        inner = [[path for path in level if path in parents] for level in levels[:-1]]
        facts = {"depth": depth, "size": len(self.paths) + 1, "levels": levels, "inner": inner}
        self.__dict__.update(facts)  # the dataclass is frozen

    @property
    def width(self) -> int:
        return max(map(self.ranks, range(self.depth)))

    @property
    def widths(self) -> list[int]:
        return [len(level) for level in self.inner[1:]]

    @property
    def name(self) -> str:
        return f"chain {self.depth}" if self.width == 1 else f"static {self.size}"

    def ranks(self, level: int) -> int:
        return 1 + max(path[-1] for path in self.levels[level + 1])

    def _place(self, path: tuple[int, ...]) -> int:
        """Where a path's candidate lies among those of its level."""
        level = len(path) - 1
        return self.inner[level].index(path[:-1]) * self.ranks(level) + path[-1]

    def on(self, device: torch.device) -> StaticTree:
        """The same with index tensors on a device: the candidates to expand of every level, and last the nodes."""
        expanded = [[self._place(path) for path in level] for level in self.inner[1:]]
        begins = [0]
        for level, inner in enumerate(self.inner):
            begins.append(begins[-1] + len(inner) * self.ranks(level))
        nodes = [begins[len(path) - 1] + self._place(path) for level in self.levels[1:] for path in level]
        return replace(self, places=tuple(torch.tensor([x], device=device) for x in (*expanded, nodes)))

    by_value = True  # their order does not matter

    def places_of(self, level: int) -> Tensor:
        return self.places[level]

    @property
    def nodes(self) -> Tensor:
        return self.places[-1]
