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

from ops.rows import Children, Expansion, Frontier, Scores, ancestors, grow_level, relate
from tree_shapes import DynamicTree, StaticTree


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


class Accepted(NamedTuple):
    """What a verification decided, padded to the deepest path that the tree allows."""

    path: Tensor  # [B, D+1] int64, accepted node of each depth (root first); entries past length are 0
    length: Tensor  # [B] int64, accepted nodes without the root
    emitted: Tensor  # [B, D+1] int64, length + 1 decided tokens (bonus last); entries past length are padding


def build_tree(tokens: Tensor, parents: Tensor, valid: Tensor, depth: int, q: Tensor | None = None) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    return DraftTree(tokens, parents, *ancestors(parents, depth), valid, q)


def root_tree(root: Tensor) -> DraftTree:
    """The tree that is only its root: vanilla decoding. root: [B] int64."""
    tokens = root[:, None]
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
    return Accepted(path, length, choice.gather(1, path))


def path_to(tree: DraftTree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The nodes from the root to `node`. node: [B]. Returns: path [B, D+1], zero-padded; length [B]."""
    length = tree.depths.gather(1, node[:, None]).squeeze(1)  # [B]
    index = node[:, None, None].expand(-1, 1, tree.mask.shape[2])
    on_path = tree.mask.gather(1, index)  # [B, 1, N]: the node's ancestors and itself
    levels = torch.arange(depth + 1, device=node.device)[:, None]  # [D+1, 1]
    hit = on_path & (tree.depths[:, None] == levels)  # [B, D+1, N], at most one per depth
    return hit.int().argmax(-1), length  # 0 where a depth has none


def compaction(accepted: Accepted) -> Tensor:
    """Slot offset that each depth's key and value come from: [B, D+1]. Rows past the path stay put."""
    steps = torch.arange(accepted.path.shape[1], device=accepted.path.device)
    return torch.where(steps <= accepted.length[:, None], accepted.path, steps)


# ----------------------------------------------------------------------------------------- growing a tree


class Candidates(NamedTuple):
    """The pool of drafted tokens, level by level; a level by its parents' order, then by child's rank."""

    tokens: Tensor  # [B, P] int64
    values: Tensor  # [B, P] fp32, sum of scores along the path; -inf: no candidate
    parents: Tensor  # [B, P] int64, flat index of the parent; -1 is the root

    @staticmethod
    def none(root: Tensor) -> Candidates:
        """An empty pool. root: [B] int64."""
        empty = root.new_zeros(len(root), 0)  # [B, 0]
        return Candidates(empty, empty.float(), empty)

    def add(self, tokens: Tensor, values: Tensor, parents: Tensor) -> Candidates:
        """The pool with further candidates, all [B, X]."""
        return Candidates(*(torch.cat(pair, 1) for pair in zip(self, (tokens, values, parents))))


class Level(NamedTuple):
    """The nodes of a level that run through the drafter, to have children."""

    tokens: Tensor  # [B, R] int64
    depth: int  # 1 for children of the root
    slot: int  # scratch slot of the first; the others follow
    seen: Tensor  # [B, R, W] bool, which scratch slots each one sees: its ancestors' and its own


class Graft(NamedTuple):
    """Candidates that were found elsewhere."""

    depth: int  # of the deepest at most
    add: Callable[[Candidates], Candidates]  # the pool with them


def grow(
    shape: DynamicTree | StaticTree,
    root: Tensor,
    out: Tensor,
    children: Callable[[Tensor, int, int], Children | Scores],
    run: Callable[[Level, Tensor], Tensor],
    graft: Graft | None = None,
) -> tuple[DraftTree, Tensor]:
    """Grow a tree level by level: score the children of the frontier, choose the next frontier, run it.

    shape: on the root's device (`on`)
    root: [B] int64, its tokens; out: [B, 1, F], the drafter's output at the root
    children: of (outputs [B, R, F], level, k), the k best of each node, or what they are the best by; level 0 asks
        for those of the root
    run: of (level, outputs of the parents [B, R, F]), the outputs of its nodes, [B, R, F]
    graft: candidates that were found elsewhere
    Returns: the tree; each node's place among those that ran, counted from the root's; 0: it did not; [B, N] int64.
    """
    pool, q, ran, slot = Candidates.none(root), [], [], 0
    index, values = root.new_full((len(root), 1), -1), torch.zeros(len(root), 1, device=root.device)
    front = Frontier(values, values.new_zeros(len(root), 1, sum(shape.widths), dtype=torch.bool))
    for level, width in enumerate((*shape.widths, 0)):
        k = shape.ranks(level)
        found, step = children(out, level, k), Expansion(k, width, slot, shape.places_of(level), shape.by_value)
        tokens, values, order, front = grow_level(found, front, step)
        ran.append(index)
        q += [] if found.q is None else [found.q]
        begin, pool = pool.tokens.shape[1], pool.add(tokens, values, index.repeat_interleave(k, dim=1))
        if width:
            index = begin + order  # [B, R]
            out = out.gather(1, (order // k)[:, :, None].expand(-1, -1, out.shape[2]))  # of the parents
            out = run(Level(tokens.gather(1, order), level + 1, slot, front.seen), out)
            slot += width
    every = torch.cat(ran, 1)  # [B, sum R]: the root, then the frontiers in their order
    pool, depth = (graft.add(pool), max(shape.depth, graft.depth)) if graft else (pool, shape.depth)
    nodes = shape.chosen(pool.values)
    tree, number = tree_of(root, pool, nodes, depth)
    if q:
        at = number.gather(1, every + 1)[:, :, None]  # [B, sum R, 1]
        q = torch.cat(q, 1)  # [B, sum R, V]; leaves have no children, hence no q
        tree = changed(tree, q=q.new_zeros(*tree.tokens.shape, q.shape[2]).scatter(1, at.expand_as(q), q))
    order = torch.arange(every.shape[1], device=root.device).expand_as(every)
    places = torch.zeros_like(number).scatter(1, every + 1, order)  # [B, P+1]
    return tree, torch.cat((places[:, :1], places.gather(1, nodes + 1)), 1)


def tree_of(root: Tensor, pool: Candidates, chosen: Tensor, depth: int) -> tuple[DraftTree, Tensor]:
    """The tree of the chosen candidates.

    root: [B] int64; chosen: [B, N-1] flat indices, ascending
    Returns: the tree; the node of each candidate, 0: none, behind that of the root, [B, P+1] int64.
    """
    number, *related = relate(chosen, pool.parents, depth)
    tokens = torch.cat((root[:, None], pool.tokens.gather(1, chosen)), 1)
    values = torch.cat((pool.values.new_zeros(root.shape[0], 1), pool.values.gather(1, chosen)), 1)  # [B, N]
    return DraftTree(tokens, *related, values > float("-inf"), values=values), number
