"""Operators of a draft tree: the next level, the nodes, and where the rows of a step lie in the cache.

`next_level` scores the children of a frontier and picks the next frontier. `rerank` picks the nodes of the tree.
`place_rows` says where the rows of a step lie in the cache. On a CPU each is one C++ call (cpu/tree.cpp). Elsewhere they
are made of smaller operators: on CUDA `grow_level`, `best_nodes` and `relate` in Triton (cuda/topk.py, cuda/tree.py),
and plain ones, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.library import has_triton, lib, on_cpp_device, uses_cpp
from ops.topk import topk_logsumexp

lib.define(
    "grow_level(Tensor logits, float sharpness, Tensor? ids, Tensor values, Tensor seen, Tensor? places, int k, "
    "int count, int slot, bool by_value) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
lib.define("best_nodes(Tensor values, int count) -> Tensor")
lib.define("relate(Tensor chosen, Tensor parents, int depth) -> (Tensor, Tensor, Tensor, Tensor)")


class Children(NamedTuple):
    """The best children of R nodes, best first."""

    tokens: Tensor  # [B, R, k] int64
    scores: Tensor  # [B, R, k] fp32, log-probabilities
    q: Tensor | None = None  # [B, R, V] fp32, what they were sampled from, if they were


class Scores(NamedTuple):
    """What R nodes say of all their children, of which the k best are wanted. They add log softmax(c z) to a path."""

    logits: Tensor  # [B, R, V] fp32, z
    sharpness: float  # c
    ids: Tensor | None  # [V] int64, the token of each column; None: its number
    q: Tensor | None = None  # None: nothing was sampled

    def best(self, k: int) -> Children:
        """The k best."""
        best, columns, total = topk_logsumexp(
            self.sharpness * self.logits, k
        )  # [B, R, k] twice, [B, R, 1]
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return Children(
            columns if self.ids is None else self.ids[columns], (best - total).clamp(max=0)
        )


class Frontier(NamedTuple):
    """The nodes of a level that have children."""

    values: Tensor  # [B, R] fp32, sum of the scores along the path
    seen: Tensor  # [B, R, W] bool, which scratch slots each one sees: its ancestors' and its own


class Expansion(NamedTuple):
    """Which candidates of a level have children: the first `count` by value, or by their own score, or by place."""

    k: int  # children per node of the frontier
    count: int  # R'; 0: none
    slot: int  # scratch slot of the first; the others follow
    places: Tensor | None = None  # [1, R'] int64, into the level's candidates; None: the best
    by_value: bool = True


class Grown(NamedTuple):
    """A level: X = R k candidates, by their parents' order, then by rank; of them the next frontier."""

    tokens: Tensor  # [B, X] int64
    values: Tensor  # [B, X] fp32
    order: Tensor | None = (
        None  # [B, R'] int64, which candidates the frontier is; None or empty where there is none
    )
    front: Frontier | None = None


def grow_level(found: Children | Scores, front: Frontier, step: Expansion) -> Grown:
    """Value the children of a frontier, and choose the next one. Of equal candidates the first is chosen."""
    if isinstance(found, Children):
        return grow_level_reference(found, front, step)
    if not found.logits.is_cuda:
        return grow_level_reference(found.best(step.k), front, step)
    tokens, values, order, best, seen = torch.ops.gpt_eagle.grow_level(
        found.logits,
        found.sharpness,
        found.ids,
        *front,
        step.places,
        step.k,
        step.count,
        step.slot,
        step.by_value,
    )
    return Grown(tokens, values, order, Frontier(best, seen))


def grow_level_reference(found: Children, front: Frontier, step: Expansion) -> Grown:
    """The same by torch's own operators."""
    tokens, values = (
        found.tokens.flatten(1),
        (front.values[:, :, None] + found.scores).flatten(1),
    )  # [B, X]
    if not step.count:
        return Grown(tokens, values)
    if step.places is None:
        order = best_first(values if step.by_value else found.scores.flatten(1))[:, : step.count]
    else:
        order = step.places.expand(len(values), -1)  # [B, R']
    parent = (order // step.k)[:, :, None]  # [B, R', 1]
    rows, slots = (torch.arange(n, device=order.device) for n in (step.count, front.seen.shape[2]))
    own = slots == step.slot + rows[:, None]  # [R', W]
    seen = (
        front.seen.gather(1, parent.expand(-1, -1, len(slots))) | own
    )  # a node sees its ancestors and itself
    return Grown(tokens, values, order, Frontier(values.gather(1, order), seen))


def _grow_level_plain(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    step = Expansion(k, count, slot, places, by_value)
    grown = grow_level_reference(
        Scores(logits, sharpness, ids).best(k), Frontier(values, seen), step
    )
    if not count:
        nothing = values.new_empty(len(values), 0)
        return (
            grown.tokens,
            grown.values,
            nothing.long(),
            nothing,
            seen.new_empty(len(values), 0, seen.shape[2]),
        )
    return (
        grown.tokens,
        grown.values,
        grown.order.clone(memory_format=torch.contiguous_format),
        *grown.front,
    )


def _grow_level_cuda(logits, sharpness, ids, values, seen, places, *step):
    if has_triton():
        import ops.cuda.topk

        if step[0] <= ops.cuda.topk.MOST:
            with torch.cuda.device(logits.device):
                found, step = Scores(logits, sharpness, ids), Expansion(*step[:3], places, step[3])
                return ops.cuda.topk.grow_level(found, Frontier(values, seen), step)
    return _grow_level_plain(logits, sharpness, ids, values, seen, places, *step)


lib.impl("grow_level", _grow_level_plain, "CPU")
lib.impl("grow_level", _grow_level_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::grow_level", lib=lib)
def _(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    B, R, _ = logits.shape
    candidates, front = values.new_empty(B, R * k), values.new_empty(B, count)
    tokens, order = (x.new_empty(x.shape, dtype=torch.long) for x in (candidates, front))
    return tokens, candidates, order, front, seen.new_empty(B, count, seen.shape[2])


# ------------------------------------------------------------------------------------- nodes of a draft tree


class Nodes(NamedTuple):
    """How N nodes are related; node 0 is the root, and parents precede children."""

    number: Tensor  # [B, P+1] int64, the node of the root and of each candidate; 0: none
    parents: Tensor  # [B, N] int64; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i


def best_first(values: Tensor) -> Tensor:
    """Indices by descending value; equal values keep their order, so a parent stays before its child. [B, P]."""
    return values.sort(dim=1, descending=True, stable=True).indices


def best_nodes(values: Tensor, count: int) -> Tensor:
    """The best candidates of a pool: [B, count] flat indices, ascending. values: [B, P] fp32.

    A value never exceeds its parent's and ties keep the parent first, so every chosen node's parent is chosen.
    """
    if values.is_cuda:
        return torch.ops.gpt_eagle.best_nodes(values, count)
    return best_nodes_reference(values, count)


def best_nodes_reference(values: Tensor, count: int) -> Tensor:
    """The same by torch's own operators."""
    return best_first(values)[:, :count].sort(dim=1).values


def relate(chosen: Tensor, parents: Tensor, depth: int) -> Nodes:
    """Number the chosen candidates of a pool and find their ancestors.

    chosen: [B, N-1] int64 flat indices, ascending; parents: [B, P] int64 flat indices, -1: the root
    depth: a bound on the depth of any node
    """
    if chosen.is_cuda:
        return Nodes(*torch.ops.gpt_eagle.relate(chosen, parents, depth))
    return relate_reference(chosen, parents, depth)


def relate_reference(chosen: Tensor, parents: Tensor, depth: int) -> Nodes:
    """The same by torch's own operators."""
    B, size = chosen.shape[0], chosen.shape[1] + 1
    number = torch.zeros(
        B, parents.shape[1] + 1, dtype=torch.long, device=chosen.device
    )  # [B, P+1]
    number = number.scatter(
        1, chosen + 1, torch.arange(1, size, device=chosen.device).expand_as(chosen)
    )
    above = number.gather(1, parents.gather(1, chosen) + 1)  # [B, N-1]
    above = torch.cat((torch.zeros_like(number[:, :1]), above), 1)
    return Nodes(number, above, *ancestors(above, depth))


def ancestors(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The depths and the mask of `Nodes`. parents: [B, N], which precede their children; depth: as in `relate`."""
    N = parents.shape[1]
    eye = torch.eye(N, dtype=torch.bool, device=parents.device)
    reach = eye | (
        parents[:, :, None] == torch.arange(N, device=parents.device)
    )  # [B, N, N]: self and parent
    hops = 1
    while hops < depth:  # squaring doubles the reach
        reach = torch.bmm(reach.float(), reach.float()) > 0
        hops *= 2
    return reach.sum(-1) - 1, reach  # the root counts itself once


def _best_nodes_cuda(values: Tensor, count: int) -> Tensor:
    if has_triton():
        import ops.cuda.tree

        if values.shape[1] <= ops.cuda.tree.MOST:
            with torch.cuda.device(values.device):
                return ops.cuda.tree.best_nodes(values, count)
    return best_nodes_reference(values, count)


def _relate_cuda(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    if not has_triton():
        return tuple(relate_reference(chosen, parents, depth))
    import ops.cuda.tree

    with torch.cuda.device(chosen.device):
        return ops.cuda.tree.relate(chosen, parents, depth)


lib.impl("best_nodes", best_nodes_reference, "CPU")
lib.impl("best_nodes", _best_nodes_cuda, "CUDA")
lib.impl("relate", lambda *inputs: tuple(relate_reference(*inputs)), "CPU")
lib.impl("relate", _relate_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::best_nodes", lib=lib)
def _(values, count):
    return values.new_empty(len(values), count, dtype=torch.long)


@torch.library.register_fake("gpt_eagle::relate", lib=lib)
def _(chosen, parents, depth):
    (B, N), P = chosen.shape, parents.shape[1]
    above, depths = (chosen.new_empty(B, N + 1) for _ in range(2))
    return (
        chosen.new_empty(B, P + 1),
        above,
        depths,
        chosen.new_empty(B, N + 1, N + 1, dtype=torch.bool),
    )


# ---------------------------------------------------------------------- a level and the nodes in one call


class Shared(NamedTuple):
    """The noise by which the target itself will choose among the children of a level."""

    noise: Tensor  # [B, D+1, V] fp32 Gumbel noise, of every token
    level: int  # which row of it
    temperature: float


class Candidates(NamedTuple):
    """Drafted tokens; those of a level by their parents' order, then by rank."""

    tokens: Tensor  # [B, P] int64
    values: Tensor  # [B, P] fp32, sum of the scores along the path; -inf: no candidate
    parents: Tensor  # [B, P] int64, flat index of the parent; -1 is the root

    @staticmethod
    def none(root: Tensor) -> Candidates:
        """No candidates. root: [B] int64."""
        empty = root.new_zeros(len(root), 0)  # [B, 0]
        return Candidates(empty, empty.float(), empty)

    @staticmethod
    def join(levels: Sequence[Candidates]) -> Candidates:
        """The candidates of several levels, one after the other."""
        return Candidates(*(torch.cat(parts, 1) for parts in zip(*levels)))


class Next(NamedTuple):
    """The nodes of a level that have children: the next frontier."""

    index: Tensor  # [B, R] int64, flat indices
    tokens: Tensor  # [B, R] int64
    parent: Tensor  # [B, R] int64, which node of the frontier before is their parent
    front: Frontier


def next_level(
    found: Children | Scores,
    shared: Shared | None,
    front: Next | None,
    step: Expansion,
    begin: int,
    slots: int,
) -> tuple[Candidates, Next]:
    """Value the children of a frontier and choose the next one. Of equal candidates the first is chosen.

    shared: noise to add to the scores; front: None: the root
    begin: flat index of the level's first candidate; slots: W, scratch slots of the whole tree
    Returns: the level's candidates, X = R k; the next frontier, empty after the last level.
    """
    if isinstance(found, Scores) and uses_cpp(found.logits):
        noise = (shared.noise, shared.level, shared.temperature) if shared else (None, 0, 0.0)
        above = (front.index, front.front.values, front.front.seen) if front else (None, None, None)
        place = (step.places, step.k, step.count, (begin, step.slot, slots), step.by_value)
        tokens, values, parents, *chosen, best, seen = torch.ops.gpt_eagle.next_level(
            found.logits, found.sharpness, found.ids, *noise, *above, *place
        )
        return Candidates(tokens, values, parents), Next(*chosen, Frontier(best, seen))
    return next_level_reference(found, shared, front, step, begin, slots)


def next_level_reference(
    found: Children | Scores,
    shared: Shared | None,
    front: Next | None,
    step: Expansion,
    begin: int,
    slots: int,
) -> tuple[Candidates, Next | None]:
    """The same by smaller operators."""
    of = found.tokens if isinstance(found, Children) else found.logits
    if front is None:
        values = torch.zeros(of.shape[:2], device=of.device)  # [B, 1]
        seen = torch.zeros(*of.shape[:2], slots, dtype=torch.bool, device=of.device)
        front = Next(
            torch.full_like(values, -1, dtype=torch.long), values, values, Frontier(values, seen)
        )
    if shared is not None:
        noise = shared.noise[:, shared.level, None]  # [B, 1, V]
        noise = noise if found.ids is None else noise.index_select(-1, found.ids)
        found = Scores(shared.temperature * (found.logits + noise), found.sharpness, found.ids)
    tokens, values, order, best = grow_level(found, front.front, step)
    level = Candidates(tokens, values, front.index.repeat_interleave(step.k, dim=1))
    if not step.count:
        return level, None
    return level, Next(begin + order, tokens.gather(1, order), order // step.k, best)


# ------------------------------------------------------------------------------------------------- nodes


class Chosen(NamedTuple):
    """The nodes of a tree; the first five are the fields of `draft_tree.DraftTree`."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    depths: Tensor  # [B, N] int64
    mask: Tensor  # [B, N, N] bool
    valid: Tensor  # [B, N] bool
    values: Tensor  # [B, N] fp32
    places: Tensor  # [B, N] int64, which of the nodes that ran each one is, counted from the root's; 0: it did not run
    number: Tensor  # [B, P+1] int64, the node of the root and of each candidate; 0: none


def rerank(
    levels: Sequence[Candidates],
    ran: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> Chosen:
    """Choose the nodes of a tree among the candidates of all levels. Source: EAGLE-2 (arXiv 2406.16858) 4.2.

    ran: per level, the flat indices of the candidates that ran, [B, R]
    nodes: [1 or B, N-1] flat indices, ascending; a number: so many, the best, of equal ones the first
    depth: a bound on the depth of any node; text: tokens [B, S+1], and the index of the root in them, [B]
    """
    fixed, count = (nodes, nodes.shape[1]) if isinstance(nodes, Tensor) else (None, nodes)
    if on_cpp_device(text[1]):
        columns = [list(column) for column in zip(*levels)] or [[], [], []]
        return Chosen(*torch.ops.gpt_eagle.rerank(*columns, list(ran), fixed, count, *text))
    return rerank_reference(levels, ran, nodes, depth, text)


def rerank_reference(
    levels: Sequence[Candidates],
    ran: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> Chosen:
    """The same by smaller operators."""
    pool, root = Candidates.join(levels), text[0].gather(1, text[1][:, None])  # [B, 1]
    chosen = (
        best_nodes(pool.values, nodes) if isinstance(nodes, int) else nodes.expand(len(root), -1)
    )
    number, *related = relate(chosen, pool.parents, depth)
    tokens = torch.cat((root, pool.tokens.gather(1, chosen)), 1)
    values = torch.cat(
        (pool.values.new_zeros(len(root), 1), pool.values.gather(1, chosen)), 1
    )  # [B, N]
    every = torch.cat(
        (torch.full_like(root, -1), *ran), 1
    )  # [B, 1 + sum R]: the root, then the frontiers
    order = torch.arange(every.shape[1], device=root.device).expand_as(every)
    places = torch.zeros_like(number).scatter(1, every + 1, order)  # [B, P+1]
    places = torch.cat((places[:, :1], places.gather(1, chosen + 1)), 1)
    return Chosen(tokens, *related, values > float("-inf"), values, places, number)


# ------------------------------------------------------------------------------------------------ places


def place_rows(
    pos: Tensor, depths: Tensor | int, rows: int, slot: int = 0, done: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of a step lie in the cache.

    pos: [B] int64, slot and position of the root; depths: [B, T] int64, or one for all rows, below the root
    slot: of the first row, counted from the root's; the others follow. done: [B] bool, rows that attend to nothing
    Returns: slots [B, T]; the first slot of the window, [B]; RoPE positions [B, T].
    """
    one = isinstance(depths, int)
    if on_cpp_device(pos):
        return torch.ops.gpt_eagle.place_rows(
            pos, done, None if one else depths, rows, slot, depths if one else 0
        )
    slots = pos[:, None] + slot + torch.arange(rows, device=pos.device)  # [B, T]
    positions = (pos[:, None] + depths).expand(-1, rows)
    return slots, pos if done is None else torch.where(done, 0, pos), positions
