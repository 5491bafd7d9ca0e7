"""Operators of a draft tree: the next level, the nodes, and the cache slots of a step's tokens.

`next_level` scores the children of a frontier and picks the next frontier. `rerank` picks the nodes
of the tree. `place_tokens` computes the cache slots and positions of a step's tokens. On a CPU each
is one C++ call (cpu/tree.cpp). Elsewhere they consist of smaller operators: on CUDA `grow_level`,
`best_nodes` and `relate` in Triton (cuda/topk.py, cuda/tree.py), and plain ones, which the compiler
fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.library import has_triton, lib, on_cpp_device, uses_cpp
from ops.topk import topk_logsumexp

lib.define(
    "grow_level(Tensor logits, float sharpness, Tensor? ids, Tensor values, Tensor seen, "
    "Tensor? places, int k, int count, int slot, bool by_value) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
lib.define("best_nodes(Tensor values, int count) -> Tensor")
lib.define("relate(Tensor chosen, Tensor parents, int depth) -> (Tensor, Tensor, Tensor, Tensor)")


class Children(NamedTuple):
    """The best children of R nodes, best first. All R share them where R is 1."""

    tokens: Tensor  # [B, R, k] int64
    scores: Tensor  # [B, R, k] fp32, log-probabilities
    q: Tensor | None = None  # [B, R, V] fp32, the proposal distributions, if they were sampled


class Scores(NamedTuple):
    """The scores of all children of R nodes; a child adds log softmax(c z) to its path's value."""

    # [B, R, V] fp32, z; or [B, 1, V], which all R nodes share
    logits: Tensor
    sharpness: float  # c
    ids: Tensor | None  # [V] int64, the token of each column; None: its number
    q: Tensor | None = None  # None: nothing was sampled

    def best(self, k: int) -> Children:
        """Return the k best children of every node."""
        # [B, R, k] twice, [B, R, 1]
        best, columns, total = topk_logsumexp(self.sharpness * self.logits, k)
        tokens = columns
        if self.ids is not None:
            tokens = self.ids[columns]
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return Children(tokens, (best - total).clamp(max=0))


class Paths(NamedTuple):
    """The value and the visible slots of each node of a frontier."""

    values: Tensor  # [B, R] fp32, sum of the scores along the path
    seen: Tensor  # [B, R, W] bool, the scratch slots that each sees: its ancestors' and its own


class Expansion(NamedTuple):
    """The choice of the candidates of a level that have children.

    They are the best `count` by value or by their own score, or those at given places.
    """

    k: int  # children per node of the frontier
    count: int  # R'; 0: none
    slot: int  # scratch slot of the first; the others follow
    places: Tensor | None = None  # [1, R'] int64, into the level's candidates; None: the best
    by_value: bool = True


class Candidates(NamedTuple):
    """Drafted tokens; those of a level by their parents' order, then by rank."""

    tokens: Tensor  # [B, P] int64
    values: Tensor  # [B, P] fp32, sum of the scores along the path; -inf: no candidate
    parents: Tensor  # [B, P] int64, flat index of the parent; -1 is the root

    @staticmethod
    def none(root: Tensor) -> Candidates:
        """Return no candidates. root: [B] int64."""
        empty = root.new_zeros(len(root), 0)  # [B, 0]
        return Candidates(empty, empty.float(), empty)

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

    index: Tensor  # [B, R] int64, flat indices
    tokens: Tensor  # [B, R] int64
    parent: Tensor  # [B, R] int64, their parents' places in the frontier before
    paths: Paths

    @staticmethod
    def of(level: Candidates, order: Tensor, paths: Paths, k: int, begin: int) -> Frontier:
        """Make the frontier of a level.

        order: [B, R] int64, the nodes' places among the level's candidates, k per parent
        begin: flat index of the level's first candidate
        """
        return Frontier(begin + order, level.tokens.gather(1, order), order // k, paths)


def grow_level(
    found: Children | Scores, front: Frontier, step: Expansion, begin: int
) -> tuple[Candidates, Frontier | None]:
    """Value the children of a frontier and choose the next one; of equal candidates, the first.

    begin: flat index of the level's first candidate
    Returns: the level's candidates, X = R k; the next frontier, None after the last level.
    """
    if isinstance(found, Children):
        return grow_level_reference(found, front, step, begin)
    shared = found.logits.shape[1] < front.index.shape[1]
    if shared or not found.logits.is_cuda:
        return grow_level_reference(found.best(step.k), front, step, begin)
    tokens, values, order, best, seen = torch.ops.gpt_eagle.grow_level(
        found.logits,
        found.sharpness,
        found.ids,
        *front.paths,
        step.places,
        step.k,
        step.count,
        step.slot,
        step.by_value,
    )
    level = Candidates(tokens, values, front.index.repeat_interleave(step.k, dim=1))
    if not step.count:
        return level, None
    return level, Frontier.of(level, order, Paths(best, seen), step.k, begin)


def grow_level_reference(
    found: Children, front: Frontier, step: Expansion, begin: int
) -> tuple[Candidates, Frontier | None]:
    """Compute `grow_level` with torch's own operators."""
    every = (-1, front.index.shape[1], -1)  # [B, R, k]
    tokens = found.tokens.expand(every).flatten(1)  # [B, X]
    scores = found.scores.expand(every)
    values = (front.paths.values[:, :, None] + scores).flatten(1)  # [B, X]
    level = Candidates(tokens, values, front.index.repeat_interleave(step.k, dim=1))
    if not step.count:
        return level, None
    if step.places is not None:
        order = step.places.expand(len(values), -1)  # [B, R']
    elif step.by_value:
        order = best_first(values)[:, : step.count]
    else:
        order = best_first(scores.flatten(1))[:, : step.count]
    parent = (order // step.k)[:, :, None]  # [B, R', 1]
    nodes = torch.arange(step.count, device=order.device)
    slots = torch.arange(front.paths.seen.shape[2], device=order.device)
    own = slots == step.slot + nodes[:, None]  # [R', W]
    # a node sees its ancestors and itself
    seen = front.paths.seen.gather(1, parent.expand(-1, -1, len(slots))) | own
    paths = Paths(values.gather(1, order), seen)
    return level, Frontier.of(level, order, paths, step.k, begin)


def _grow_level_plain(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    step = Expansion(k, count, slot, places, by_value)
    children = Scores(logits, sharpness, ids).best(k)
    unread = torch.zeros_like(values, dtype=torch.long)
    front = Frontier(unread, unread, unread, Paths(values, seen))
    level, chosen = grow_level_reference(children, front, step, begin=0)
    if chosen is None:
        nothing = values.new_empty(len(values), 0)
        nothing_seen = seen.new_empty(len(values), 0, seen.shape[2])
        return level.tokens, level.values, nothing.long(), nothing, nothing_seen
    return level.tokens, level.values, chosen.index.contiguous(), *chosen.paths


def _grow_level_cuda(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    if has_triton("topk", "tree"):
        import ops.cuda.topk

        if k <= ops.cuda.topk.MOST:
            found = Scores(logits, sharpness, ids)
            step = Expansion(k, count, slot, places, by_value)
            with torch.cuda.device(logits.device):
                return ops.cuda.topk.grow_level(found, Paths(values, seen), step)
    return _grow_level_plain(logits, sharpness, ids, values, seen, places, k, count, slot, by_value)


lib.impl("grow_level", _grow_level_plain, "CPU")
lib.impl("grow_level", _grow_level_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::grow_level", lib=lib)
def _(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    B, R, _ = logits.shape
    tokens = values.new_empty(B, R * k, dtype=torch.long)
    candidates = values.new_empty(B, R * k)
    order = values.new_empty(B, count, dtype=torch.long)
    front = values.new_empty(B, count)
    return tokens, candidates, order, front, seen.new_empty(B, count, seen.shape[2])


# ------------------------------------------------------------------------ nodes of a draft tree


class Nodes(NamedTuple):
    """The relations of N nodes; node 0 is the root, and parents precede children."""

    number: Tensor  # [B, P+1] int64, the node of the root and of each candidate; 0: none
    parents: Tensor  # [B, N] int64; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i


def best_first(values: Tensor) -> Tensor:
    """Return the indices by descending value: [B, P].

    Equal values keep their order, so a parent stays before its child.
    """
    return values.sort(dim=1, descending=True, stable=True).indices


def best_nodes(values: Tensor, count: int) -> Tensor:
    """Choose the best candidates of a pool.

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


def relate(chosen: Tensor, parents: Tensor, depth: int) -> Nodes:
    """Number the chosen candidates of a pool and find their ancestors.

    chosen: [B, N-1] int64 flat indices, ascending; parents: [B, P] int64 flat indices, -1: the root
    depth: a bound on the depth of any node
    """
    if chosen.is_cuda:
        return Nodes(*torch.ops.gpt_eagle.relate(chosen, parents, depth))
    return relate_reference(chosen, parents, depth)


def relate_reference(chosen: Tensor, parents: Tensor, depth: int) -> Nodes:
    """Compute `relate` with torch's own operators."""
    B, drafted = chosen.shape
    P = parents.shape[1]
    nodes = torch.arange(1, drafted + 1, device=chosen.device).expand_as(chosen)
    number = torch.zeros(B, P + 1, dtype=torch.long, device=chosen.device)  # [B, P+1]
    number = number.scatter(1, chosen + 1, nodes)
    above = number.gather(1, parents.gather(1, chosen) + 1)  # [B, N-1]
    above = torch.cat((torch.zeros_like(number[:, :1]), above), 1)
    return Nodes(number, above, *ancestors(above, depth))


def ancestors(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the depths and the mask of `Nodes`.

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


def _best_nodes_cuda(values: Tensor, count: int) -> Tensor:
    if has_triton("tree"):
        import ops.cuda.tree

        if values.shape[1] <= ops.cuda.tree.MOST:
            with torch.cuda.device(values.device):
                return ops.cuda.tree.best_nodes(values, count)
    return best_nodes_reference(values, count)


def _relate_cuda(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    if not has_triton("tree"):
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
    B, drafted = chosen.shape
    N = drafted + 1
    number = chosen.new_empty(B, parents.shape[1] + 1)
    above = chosen.new_empty(B, N)
    depths = chosen.new_empty(B, N)
    mask = chosen.new_empty(B, N, N, dtype=torch.bool)
    return number, above, depths, mask


# ----------------------------------------------------------------------------------- the next level


class Shared(NamedTuple):
    """The noise with which the target itself will choose among the children of a level."""

    noise: Tensor  # [B, D+1, V] fp32 Gumbel noise, of every token
    level: int  # row of the noise
    temperature: Tensor  # [B] fp32


def next_level(
    found: Children | Scores,
    shared: Shared | None,
    front: Frontier | None,
    step: Expansion,
    begin: int,
    slots: int,
) -> tuple[Candidates, Frontier | None]:
    """Value the children of a frontier and choose the next one; of equal candidates, the first.

    shared: noise to add to the scores
    front: the frontier; None: the root
    begin: flat index of the level's first candidate
    slots: W, scratch slots of the whole tree
    Returns: the level's candidates, X = R k; the next frontier, empty after the last level.
    """
    if isinstance(found, Scores) and uses_cpp(found.logits, "topk", "tree"):
        noise = shared or (None, 0, None)
        above = (None, None, None)
        if front:
            above = (front.index, *front.paths)
        place = (step.places, step.k, step.count, (begin, step.slot, slots), step.by_value)
        tokens, values, parents, *chosen, best, seen = torch.ops.gpt_eagle.next_level(
            found.logits, found.sharpness, found.ids, *noise, *above, *place
        )
        return Candidates(tokens, values, parents), Frontier(*chosen, Paths(best, seen))
    return next_level_reference(found, shared, front, step, begin, slots)


def next_level_reference(
    found: Children | Scores,
    shared: Shared | None,
    front: Frontier | None,
    step: Expansion,
    begin: int,
    slots: int,
) -> tuple[Candidates, Frontier | None]:
    """Compute `next_level` by smaller operators."""
    per_node = found.tokens if isinstance(found, Children) else found.logits
    if front is None:
        values = torch.zeros(per_node.shape[:2], device=per_node.device)  # [B, 1]
        seen = torch.zeros(*per_node.shape[:2], slots, dtype=torch.bool, device=per_node.device)
        index = torch.full_like(values, -1, dtype=torch.long)
        # the root: tokens and parents are unread
        front = Frontier(index, index, index, Paths(values, seen))
    return grow_level(with_noise(found, shared), front, step, begin)


def with_noise(found: Children | Scores, shared: Shared | None) -> Children | Scores:
    """Add the noise to the scores of all children, where there is any."""
    if shared is None:
        return found
    noise = shared.noise[:, shared.level, None]  # [B, 1, V]
    if found.ids is not None:
        noise = noise.index_select(-1, found.ids)
    temperature = shared.temperature[:, None, None]  # [B, 1, 1]
    return Scores(temperature * (found.logits + noise), found.sharpness, found.ids)


# ------------------------------------------------------------------------------------------- nodes


class Chosen(NamedTuple):
    """The nodes of a tree; the first five are the fields of `draft_tree.DraftTree`."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    depths: Tensor  # [B, N] int64
    mask: Tensor  # [B, N, N] bool
    valid: Tensor  # [B, N] bool
    values: Tensor  # [B, N] fp32
    # [B, N] int64, each node's place among the nodes that the drafter ran, counted from the root's;
    # 0: it did not run
    places: Tensor
    number: Tensor  # [B, P+1] int64, the node of the root and of each candidate; 0: none


def rerank(
    levels: Sequence[Candidates],
    ran: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> Chosen:
    """Choose the nodes of a tree among the candidates of all levels.

    ran: per level, the flat indices of the candidates that the drafter ran, [B, R]
    nodes: [1 or B, N-1] flat indices, ascending; a number: as many of the best, of equal ones the
    first
    depth: a bound on the depth of any node
    text: tokens [B, S+1], and the index of the root in them, [B]
    Source: EAGLE-2 (arXiv 2406.16858) 4.2.
    """
    if on_cpp_device(text[1], "tree"):
        if isinstance(nodes, Tensor):
            fixed = nodes
            count = nodes.shape[1]
        else:
            fixed = None
            count = nodes
        tokens = [level.tokens for level in levels]
        values = [level.values for level in levels]
        parents = [level.parents for level in levels]
        chosen = torch.ops.gpt_eagle.rerank(tokens, values, parents, list(ran), fixed, count, *text)
        return Chosen(*chosen)
    return rerank_reference(levels, ran, nodes, depth, text)


def rerank_reference(
    levels: Sequence[Candidates],
    ran: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> Chosen:
    """Compute `rerank` by smaller operators."""
    pool = Candidates.join(levels)
    root = text[0].gather(1, text[1][:, None])  # [B, 1]
    if isinstance(nodes, int):
        chosen = best_nodes(pool.values, nodes)
    else:
        chosen = nodes.expand(len(root), -1)
    number, *related = relate(chosen, pool.parents, depth)
    tokens = torch.cat((root, pool.tokens.gather(1, chosen)), 1)
    root_value = pool.values.new_zeros(len(root), 1)
    values = torch.cat((root_value, pool.values.gather(1, chosen)), 1)  # [B, N]
    # [B, 1 + sum R]: the root, then the frontiers
    every = torch.cat((torch.full_like(root, -1), *ran), 1)
    order = torch.arange(every.shape[1], device=root.device).expand_as(every)
    places = torch.zeros_like(number).scatter(1, every + 1, order)  # [B, P+1]
    places = torch.cat((places[:, :1], places.gather(1, chosen + 1)), 1)
    return Chosen(tokens, *related, values > float("-inf"), values, places, number)


# ------------------------------------------------------------------------------------------ places


def place_tokens(
    pos: Tensor, depths: Tensor | int, count: int, slot: int = 0, done: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cache slots and positions of the tokens of a step.

    pos: [B] int64, slot and position of the root
    depths: [B, T] int64, or one for all tokens, below the root
    count: T
    slot: the first token's, counted from the root's; the others follow
    done: [B] bool, sequences that attend to nothing
    Returns: slots [B, T]; the first slot of the window, [B]; RoPE positions [B, T].
    """
    if on_cpp_device(pos, "tree"):
        if isinstance(depths, int):
            return torch.ops.gpt_eagle.place_rows(pos, done, None, count, slot, depths)
        return torch.ops.gpt_eagle.place_rows(pos, done, depths, count, slot, 0)
    slots = pos[:, None] + slot + torch.arange(count, device=pos.device)  # [B, T]
    positions = (pos[:, None] + depths).expand(-1, count)
    start = pos if done is None else torch.where(done, 0, pos)
    return slots, start, positions
