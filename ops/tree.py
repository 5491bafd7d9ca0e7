"""Operators of a draft tree: the next level, and the nodes.

A frontier is the nodes of a level that get children. `expand_frontier` scores its children and
picks the next one. `select_nodes` picks the nodes of the tree. On a CPU each is one C++ call
(ops/cpu/tree.cpp). Elsewhere they consist of smaller operators: on CUDA `grow_level`, `best_nodes`
and `link_nodes` in Triton (ops/cuda/growth.py), and plain ones, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.library import on_cpp_device, uses_cpp
from ops.topk import topk_logsumexp


class Level(NamedTuple):
    """The plan of one level of a tree, which its shape makes once (draft_tree.py)."""

    k: int  # children per node of the frontier
    count: int  # R', the level's candidates that have children themselves; 0 on the last level
    begin: int = 0  # flat index of the level's first candidate
    slot: int = 0  # scratch slot of the first node that has children; the others follow
    slots: int = 0  # W, scratch slots of the whole tree
    places: Tensor | None = None  # [1, R'] int64, into the level's candidates; None: the best ones
    by_value: bool = True  # the best paths have children; False: the best single steps

    def for_cpp(self) -> tuple[Any, ...]:
        """Return the operands of `expand_frontier` in C++: all fields, in order."""
        return tuple(self)


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

    def for_cpp(self) -> tuple[Any, ...]:
        """Return the operands of `expand_frontier` in C++: all fields, in order."""
        return tuple(self)

    def with_noise(self) -> Tensor:
        """Return z, or z + T G: [B, R, V]."""
        if self.noise is None:
            return self.logits
        noise = self.noise[:, self.level, None]  # [B, 1, all tokens]
        if self.ids is not None:
            noise = noise.index_select(-1, self.ids)
        return self.temperature[:, None, None] * (self.logits + noise)

    def best(self, k: int) -> Children:
        """Return the k best children of every node."""
        # [B, R, k] twice, [B, R, 1]
        best, columns, total = topk_logsumexp(self.sharpness * self.with_noise(), k)
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

    @staticmethod
    def join(levels: Sequence[Candidates]) -> Candidates:
        """Concatenate the candidates of several levels."""
        return Candidates(
            torch.cat([level.tokens for level in levels], 1),
            torch.cat([level.values for level in levels], 1),
            torch.cat([level.parents for level in levels], 1),
        )


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
    # [B, N] int64, each node's place among the root and the nodes that the drafter ran;
    # 0: the root, or a node that did not run
    places: Tensor | None = None
    allowed: Tensor | None = None  # [B, N, V] bool, tokens that may follow each node; None: all
    extra: Any = None  # of the drafter, for an acceptance rule of its own

    def for_cpp(self) -> tuple[Tensor, ...]:
        """Return the operands of `accept` in C++."""
        return self.tokens, self.parents, self.depths, self.valid


# ----------------------------------------------------------------------------------- the next level


def expand_frontier(
    scores: Scores | Children, front: Frontier | None, level: Level
) -> tuple[Candidates, Frontier | None]:
    """Value the children of a frontier and choose the next one; of equal candidates, the first.

    front: the frontier; None: the root
    Returns: the level's R k candidates; the next frontier, empty or None after the last level.
    """
    if isinstance(scores, Scores) and uses_cpp(scores.logits, "topk", "tree"):
        above = (None, None, None)
        if front:
            above = front.for_cpp()
        tokens, values, parents, *chosen = torch.ops.gpt_eagle.expand_frontier(
            *scores.for_cpp(), *above, *level.for_cpp()
        )
        return Candidates(tokens, values, parents), Frontier(*chosen)
    return expand_frontier_reference(scores, front, level)


def expand_frontier_reference(
    scores: Scores | Children, front: Frontier | None, level: Level
) -> tuple[Candidates, Frontier | None]:
    """Compute `expand_frontier` by smaller operators."""
    if front is None:
        of_root = scores.tokens if isinstance(scores, Children) else scores.logits
        values = torch.zeros(of_root.shape[:2], device=of_root.device)  # [B, 1]
        seen = torch.zeros(*of_root.shape[:2], level.slots, dtype=torch.bool, device=values.device)
        index = torch.full_like(values, -1, dtype=torch.long)
        front = Frontier(index, index, index, values, seen)  # its tokens and parents are unread
    if isinstance(scores, Children):
        found = expand(scores, front.values, front.seen, level)
    elif scores.logits.is_cuda and scores.logits.shape[1] == front.index.shape[1]:
        of_scores = (scores.with_noise(), scores.sharpness, scores.ids)
        of_level = (level.places, level.k, level.count, level.slot, level.by_value)
        found = torch.ops.gpt_eagle.grow_level(*of_scores, front.values, front.seen, *of_level)
    else:
        found = expand(scores.best(level.k), front.values, front.seen, level)
    tokens, values, order, best, seen = found
    candidates = Candidates(tokens, values, front.index.repeat_interleave(level.k, dim=1))
    if not level.count:
        return candidates, None
    chosen = tokens.gather(1, order)
    return candidates, Frontier(level.begin + order, chosen, order // level.k, best, seen)


def expand(children: Children, values: Tensor, seen: Tensor, level: Level) -> tuple[Tensor, ...]:
    """Value the children of R nodes and choose those that have children themselves.

    values: [B, R] fp32, of the nodes; seen: [B, R, W] bool, their visible scratch slots
    Returns: tokens and values of the candidates, [B, X = R k]; places among them, values and
        visible slots of the chosen ones, [B, R'], [B, R'], [B, R', W].
    """
    every = (-1, values.shape[1], -1)  # [B, R, k]
    tokens = children.tokens.expand(every).flatten(1)  # [B, X]
    scores = children.scores.expand(every)
    total = (values[:, :, None] + scores).flatten(1)  # [B, X]
    if level.places is not None:
        order = level.places[:, : level.count].repeat(len(total), 1)  # [B, R']
    elif level.by_value:
        order = best_first(total)[:, : level.count]
    else:
        order = best_first(scores.flatten(1))[:, : level.count]
    parent = (order // level.k)[:, :, None]  # [B, R', 1]
    nodes = torch.arange(level.count, device=order.device)
    slots = torch.arange(seen.shape[2], device=order.device)
    own = slots == level.slot + nodes[:, None]  # [R', W]
    # a node sees its ancestors and itself
    visible = seen.gather(1, parent.expand(-1, -1, len(slots))) | own
    return tokens, total, order.contiguous(), total.gather(1, order), visible


# ------------------------------------------------------------------------------------------- nodes


def best_first(values: Tensor) -> Tensor:
    """Return the indices by descending value: [B, P].

    Equal values keep their order, so a parent stays before its child.
    """
    return values.sort(dim=1, descending=True, stable=True).indices


def best_nodes(values: Tensor, count: int) -> Tensor:
    """Choose the best of all candidates.

    A value never exceeds its parent's, and ties keep the parent first: the parent of every chosen
    node is chosen.

    values: [B, P] fp32
    Returns: [B, count] flat indices, ascending.
    """
    if values.is_cuda:
        return torch.ops.gpt_eagle.best_nodes(values, count)
    return best_nodes_reference(values, count)


def best_nodes_reference(values: Tensor, count: int) -> Tensor:
    """Compute `best_nodes` with torch's own operators."""
    return best_first(values)[:, :count].sort(dim=1).values


def link_nodes(
    chosen: Tensor, parents: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number the chosen candidates and find their ancestors.

    chosen: [B, N-1] int64 flat indices, ascending; parents: [B, P] int64 flat indices, -1: the root
    depth: a bound on the depth of any node
    Returns: the node of the root and of each candidate, [B, P+1] int64, 0: none; and the nodes'
        parents, depths and mask, as in `DraftTree`.
    """
    if chosen.is_cuda:
        return torch.ops.gpt_eagle.link_nodes(chosen, parents, depth)
    return link_nodes_reference(chosen, parents, depth)


def link_nodes_reference(
    chosen: Tensor, parents: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `link_nodes` with torch's own operators."""
    B, drafted = chosen.shape
    P = parents.shape[1]
    nodes = torch.arange(1, drafted + 1, device=chosen.device).expand_as(chosen)
    number = torch.zeros(B, P + 1, dtype=torch.long, device=chosen.device)  # [B, P+1]
    number = number.scatter(1, chosen + 1, nodes)
    above = number.gather(1, parents.gather(1, chosen) + 1)  # [B, N-1]
    above = torch.cat((torch.zeros_like(number[:, :1]), above), 1)
    return number, above, *ancestors(above, depth)


def ancestors(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the depths and the mask of `DraftTree`.

    parents: [B, N]; parents precede their children
    depth: a bound on the depth of any node
    """
    N = parents.shape[1]
    eye = torch.eye(N, dtype=torch.bool, device=parents.device)
    nodes = torch.arange(N, device=parents.device)
    reach = eye | (parents[:, :, None] == nodes)  # [B, N, N]: self and parent
    hops = 1
    while hops < depth:  # squaring doubles the reach
        reach = torch.bmm(reach.float(), reach.float()) > 0
        hops *= 2
    return reach.sum(-1) - 1, reach  # the root counts itself once


def select_nodes(
    levels: Sequence[Candidates],
    ran: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> DraftTree:
    """Choose the nodes of a tree among the candidates of all levels.

    ran: per level, the flat indices of the candidates that the drafter ran, [B, R]
    nodes: [1 or B, N-1] flat indices, ascending; a number: so many best, of equals the first
    depth: a bound on the depth of any node
    text: tokens [B, S+1], and the index of the root in them, [B]
    Source: EAGLE-2 (arXiv 2406.16858) 4.2.
    """
    if on_cpp_device(text[1], "tree"):
        fixed, count = None, nodes
        if isinstance(nodes, Tensor):
            fixed, count = nodes, nodes.shape[1]
        tokens = [level.tokens for level in levels]
        values = [level.values for level in levels]
        parents = [level.parents for level in levels]
        of_levels = (tokens, values, parents, list(ran))
        chosen = torch.ops.gpt_eagle.select_nodes(*of_levels, fixed, count, *text)
        return DraftTree(*chosen)
    return select_nodes_reference(levels, ran, nodes, depth, text)


def select_nodes_reference(
    levels: Sequence[Candidates],
    ran: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> DraftTree:
    """Compute `select_nodes` by smaller operators."""
    every = Candidates.join(levels)
    root = text[0].gather(1, text[1][:, None])  # [B, 1]
    if isinstance(nodes, int):
        chosen = best_nodes(every.values, nodes)
    else:
        chosen = nodes.expand(len(root), -1)
    number, *related = link_nodes(chosen, every.parents, depth)
    tokens = torch.cat((root, every.tokens.gather(1, chosen)), 1)
    root_value = every.values.new_zeros(len(root), 1)
    values = torch.cat((root_value, every.values.gather(1, chosen)), 1)  # [B, N]
    # [B, 1 + sum R]: the root, then the frontiers
    frontiers = torch.cat((torch.full_like(root, -1), *ran), 1)
    order = torch.arange(frontiers.shape[1], device=root.device).expand_as(frontiers)
    places = torch.zeros_like(number).scatter(1, frontiers + 1, order)  # [B, P+1]
    places = torch.cat((places[:, :1], places.gather(1, chosen + 1)), 1)
    return DraftTree(tokens, *related, values > float("-inf"), values, places)
