"""Draft trees, and every tensor step on them: growing, acceptance.

A tree has N nodes with node 0 the root (the token decided last, not cached yet). Parents precede children,
so every relation follows from `parents` by a few rounds of boolean algebra: ancestors, depths, acceptance and
the accepted path need no list of leaves, no host and no data-dependent shape.

`grow` makes every tree that scores tokens. Level by level it asks for the children of the frontier, adds them to a pool
of candidates, and runs the next frontier. A shape says which candidates that is, and which become nodes at the end
(tree_shapes.py).

Padding is what `valid` says, never a token id. All scores are fp32.
Not here: who scores a token (drafters.py), and who decides it (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.library import on_cpp_device
from ops.tree import Candidates, Children, Expansion, Scores, Shared, ancestors, next_level, rerank
from tree_shapes import DynamicTree, StaticTree


def replace_fields(record: Any, **fields: Any) -> Any:
    """A NamedTuple with other values in some fields. (`_replace` gives an empty one when torch 2.11 compiles it.)"""
    return type(record)(*[fields.get(name, value) for name, value in zip(record._fields, record)])


class DraftTree(NamedTuple):
    """N nodes per row; node 0 is the root."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node numbers; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i
    valid: Tensor  # [B, N] bool
    q: Tensor | None = (
        None  # [B, N, V] fp32, distribution each node's children were sampled from (residual rule)
    )
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


def build_tree(
    tokens: Tensor, parents: Tensor, valid: Tensor, depth: int, q: Tensor | None = None
) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    return DraftTree(tokens, parents, *ancestors(parents, depth), valid, q)


def root_tree(text: Text) -> DraftTree:
    """The tree that is only its root: vanilla decoding."""
    if on_cpp_device(text.pos):
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
    accepted = ~(tree.mask & ~matches[:, None]).any(
        -1
    )  # [B, N]: the node and all its ancestors match
    N = accepted.shape[1]
    order = tree.depths * N + torch.arange(
        N - 1, -1, -1, device=choice.device
    )  # unique keys: no ties
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
        places = shape.places_of(level) if width else None
        step = Expansion(k, width, slot, places, shape.by_value)
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
    chosen = rerank(levels, ran, shape.nodes, depth, text)
    tree = DraftTree(*chosen[:5], values=chosen.values)
    return (with_q(tree, q, ran, chosen.number) if q else tree), chosen.places


def with_q(tree: DraftTree, q: list[Tensor], ran: list[Tensor], number: Tensor) -> DraftTree:
    """The tree with what its nodes' children were sampled from. q: per level [B, R, V]; the others as in `grow`."""
    root = torch.full_like(number[:, :1], -1)
    at = number.gather(1, torch.cat((root, *ran), 1) + 1)[:, :, None]  # [B, sum R, 1]
    every = torch.cat(q, 1)  # [B, sum R, V]; leaves have no children, hence no q
    none = every.new_zeros(*tree.tokens.shape, every.shape[2])
    return replace_fields(tree, q=none.scatter(1, at.expand_as(every), every))
