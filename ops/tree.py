"""Operators of a draft tree, each one call on a CPU (cpu/tree.cpp): the next level, the nodes, where rows lie.

`next_level` scores the children of a frontier and chooses the next frontier. `rerank` chooses the nodes of the tree.
`place_rows` says where the rows of a step lie in the cache. Elsewhere they are made of smaller operators: on CUDA of
`grow_level`, `best_nodes` and `relate` (rows.py, cuda/), and of plain ones, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.library import on_cpp_device, uses_cpp
from ops.rows import Children, Expansion, Frontier, Scores, best_nodes, grow_level, relate


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
    found: Children | Scores, shared: Shared | None, front: Next | None, step: Expansion, begin: int, slots: int
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
    found: Children | Scores, shared: Shared | None, front: Next | None, step: Expansion, begin: int, slots: int
) -> tuple[Candidates, Next | None]:
    """The same by smaller operators."""
    of = found.tokens if isinstance(found, Children) else found.logits
    if front is None:
        values = torch.zeros(of.shape[:2], device=of.device)  # [B, 1]
        seen = torch.zeros(*of.shape[:2], slots, dtype=torch.bool, device=of.device)
        front = Next(torch.full_like(values, -1, dtype=torch.long), values, values, Frontier(values, seen))
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
    levels: Sequence[Candidates], ran: Sequence[Tensor], nodes: Tensor | int, depth: int, text: tuple[Tensor, Tensor]
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
    levels: Sequence[Candidates], ran: Sequence[Tensor], nodes: Tensor | int, depth: int, text: tuple[Tensor, Tensor]
) -> Chosen:
    """The same by smaller operators."""
    pool, root = Candidates.join(levels), text[0].gather(1, text[1][:, None])  # [B, 1]
    chosen = best_nodes(pool.values, nodes) if isinstance(nodes, int) else nodes.expand(len(root), -1)
    number, *related = relate(chosen, pool.parents, depth)
    tokens = torch.cat((root, pool.tokens.gather(1, chosen)), 1)
    values = torch.cat((pool.values.new_zeros(len(root), 1), pool.values.gather(1, chosen)), 1)  # [B, N]
    every = torch.cat((torch.full_like(root, -1), *ran), 1)  # [B, 1 + sum R]: the root, then the frontiers
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
        return torch.ops.gpt_eagle.place_rows(pos, done, None if one else depths, rows, slot, depths if one else 0)
    slots = pos[:, None] + slot + torch.arange(rows, device=pos.device)  # [B, T]
    positions = (pos[:, None] + depths).expand(-1, rows)
    return slots, pos if done is None else torch.where(done, 0, pos), positions
