"""Draft trees, and every tensor step on them: growing, acceptance.

A tree has N nodes, node 0 the root (the token decided last, not cached yet). Parents precede
children, so every relation follows from `parents` by a few rounds of boolean algebra: ancestors,
depths, acceptance and the accepted path need no list of leaves, no host, no data-dependent shape.

`grow` makes every tree that scores tokens. Level by level it scores the children of the frontier,
adds them to the candidates and runs the next frontier. A shape (tree_shapes.py) gives the frontier
of each level and the nodes at the end.

Padding is where `valid` is False; no token id stands for it. All scores are fp32.
Not here: scoring tokens (drafters.py), deciding them (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.library import on_cpp_device
from ops.tree import (
    Candidates,
    Children,
    Expansion,
    Frontier,
    Scores,
    Shared,
    ancestors,
    next_level,
    rerank,
)
from tree_shapes import DynamicTree, StaticTree


def replace_fields(record: Any, **fields: Any) -> Any:
    """Copy a NamedTuple with other values in some fields.

    `_replace` does the same, but torch 2.11 compiles it to an empty tuple.
    """
    return type(record)(*[fields.get(name, value) for name, value in zip(record._fields, record)])


class DraftTree(NamedTuple):
    """N nodes per sequence; node 0 is the root."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node numbers; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i
    valid: Tensor  # [B, N] bool
    # [B, N, V] fp32, distribution that each node's children were sampled from (residual rule)
    q: Tensor | None = None
    values: Tensor | None = None  # [B, N] fp32, the draft's log-probability of each path; root 0
    # [B, N] int64, each node's slot in the drafter's own cache, counted from the root's; 0: none
    slots: Tensor | None = None
    # [B, N, V] bool, tokens that a grammar lets follow each node; None: all (extras/grammar.py)
    allowed: Tensor | None = None


class DecodedTokens(NamedTuple):
    """Everything decided so far."""

    tokens: Tensor  # [B, S + 1] int64; entries past pos are padding
    pos: Tensor  # [B] int64, index of the root, the token decided last

    @property
    def root(self) -> Tensor:
        """The token decided last, [B] int64."""
        return self.tokens.gather(1, self.pos[:, None]).squeeze(1)


class Accepted(NamedTuple):
    """The accepted path, padded to the deepest one that the tree allows."""

    path: Tensor  # [B, D+1] int64, accepted node of each depth, root first; 0 past length
    length: Tensor  # [B] int64, accepted nodes without the root
    emitted: Tensor  # [B, D+1] int64, length + 1 decided tokens (bonus last), then padding
    moves: Tensor  # [B, D+1] int64, from `compaction`


def build_tree(
    tokens: Tensor, parents: Tensor, valid: Tensor, depth: int, q: Tensor | None = None
) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    return DraftTree(tokens, parents, *ancestors(parents, depth), valid, q)


def root_tree(text: DecodedTokens) -> DraftTree:
    """Build the tree that is only its root: vanilla decoding."""
    if on_cpp_device(text.pos):
        return DraftTree(*rerank((), (), 0, 0, text)[:5])
    tokens = text.root[:, None]
    zeros = torch.zeros_like(tokens)
    return build_tree(tokens, zeros, torch.ones_like(tokens, dtype=torch.bool), 0)


# ------------------------------------------------------------------------------------- acceptance


def accept(tree: DraftTree, target_tokens: Tensor, depth: int) -> Accepted:
    """Accept the deepest path on which every token is the target's own at its parent.

    target_tokens: [B, N] int64, the target's token after each node
    depth: D, the deepest path the tree can hold
    Of equally deep paths the one with the lowest node numbers wins.
    """
    matches = tree.valid & (tree.tokens == target_tokens.gather(1, tree.parents))
    matches[:, 0] = True
    # [B, N]: the node and all its ancestors match
    accepted = ~(tree.mask & ~matches[:, None]).any(-1)
    N = accepted.shape[1]
    lowest_first = torch.arange(N - 1, -1, -1, device=target_tokens.device)
    order = tree.depths * N + lowest_first  # unique keys: no ties
    node = torch.where(accepted, order, -1).argmax(-1)  # [B]
    path, length = path_to(tree, node, depth)
    emitted = target_tokens.gather(1, path)
    return Accepted(path, length, emitted, compaction(path, length))


def accept_fused(tree: DraftTree, target_tokens: Tensor, depth: int) -> Accepted:
    """Run `accept` in one C++ call (ops/cpu/tree.cpp), on a CPU."""
    return Accepted(*torch.ops.gpt_eagle.accept(*tree[:5], target_tokens, depth))


def path_to(tree: DraftTree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """List the nodes from the root to `node`, [B].

    Returns: the path, [B, D+1], padded with 0; its length without the root, [B].
    """
    length = tree.depths.gather(1, node[:, None]).squeeze(1)  # [B]
    index = node[:, None, None].expand(-1, 1, tree.mask.shape[2])
    on_path = tree.mask.gather(1, index)  # [B, 1, N]: the node's ancestors and itself
    levels = torch.arange(depth + 1, device=node.device)[:, None]  # [D+1, 1]
    hit = on_path & (tree.depths[:, None] == levels)  # [B, D+1, N], at most one per depth
    return hit.int().argmax(-1), length  # 0 where a depth has none


def compaction(path: Tensor, length: Tensor) -> Tensor:
    """Return the slot offset that each depth's key and value come from, [B, D+1].

    Slots past the path keep their content.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    return torch.where(steps <= length[:, None], path, steps)


# --------------------------------------------------------------------------------- growing a tree


def grow(
    shape: DynamicTree | StaticTree,
    text: DecodedTokens,
    out: Tensor,
    children: Callable[[Tensor, int, int], tuple[Children | Scores, Shared | None]],
    run: Callable[[Frontier, int, int, Tensor], Tensor],
    lookup: Any = None,
) -> tuple[DraftTree, Tensor]:
    """Grow a tree level by level: score the frontier's children, pick the next frontier, run it.

    shape: on the root's device (`on`)
    out: [B, 1, F], the drafter's output at the root
    children: of (outputs [B, R, F], level, k), the k best of each node, or the scores of all
        children; and the noise to add to the scores, or None. Level 0 is the root's
    run: of (frontier, depth, first scratch slot, outputs of the level before), the outputs of the
        frontier's nodes, [B, R, F]
    lookup: `extras.ngram_draft.Ngram`, which adds its continuations to the candidates
    Returns: the tree; [B, N] int64, each node's number among the nodes that ran, 0: it did not run.
    """
    levels: list[Candidates] = []
    ran: list[Tensor] = []  # per level, the flat indices of the nodes that ran
    q: list[Tensor] = []
    frontier = None  # the root
    first = 0  # flat index of a level's first candidate
    slot = 0  # scratch slot of a level's first node
    slots = sum(shape.widths)
    for level, width in enumerate((*shape.widths, 0)):
        k = shape.ranks(level)
        found, shared = children(out, level, k)
        places = shape.places_of(level) if width else None
        step = Expansion(k, width, slot, places, shape.by_value)
        candidates, frontier = next_level(found, shared, frontier, step, first, slots)
        levels.append(candidates)
        first += candidates.tokens.shape[1]
        if found.q is not None:
            q.append(found.q)
        if width:
            ran.append(frontier.index)
            out = run(frontier, level + 1, slot, out)
            slot += width
    depth = shape.depth
    if lookup:
        levels = [lookup.add(Candidates.join(levels), text)]
        depth = max(depth, lookup.tokens)
    chosen = rerank(levels, ran, shape.nodes, depth, text)
    tree = DraftTree(*chosen[:5], values=chosen.values)
    if q:
        tree = with_q(tree, q, ran, chosen.number)
    return tree, chosen.places


def with_q(tree: DraftTree, q: list[Tensor], ran: list[Tensor], number: Tensor) -> DraftTree:
    """Add the distributions that the children of each node were sampled from.

    q: per level [B, R, V]; ran: as in `grow`; number: [B, P+1], the node of each candidate
    """
    root = torch.full_like(number[:, :1], -1)
    index = torch.cat((root, *ran), 1) + 1  # [B, sum R]; + 1: column 0 of `number` is the root
    node = number.gather(1, index)[:, :, None]  # [B, sum R, 1]
    every = torch.cat(q, 1)  # [B, sum R, V]; leaves have no children, hence no q
    zeros = every.new_zeros(*tree.tokens.shape, every.shape[2])
    return replace_fields(tree, q=zeros.scatter(1, node.expand_as(every), every))
