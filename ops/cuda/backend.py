"""The functions of a backend (ops/backends.py) on CUDA: kernels in Triton, PyTorch around them.

Each kernel is an operator of its own, so that steps around it compile with `fullgraph=True`. On a
CPU, where steps are traced by tests, the operators are the plain versions, as they are beyond the
sizes that a kernel takes.
The kernels are in topk.py, tree.py and compact.py beside this file. What is not here runs in plain
PyTorch, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops import torch_backend
from ops.library import lib
from ops.tree import Candidates, Children, DraftTree, Frontier, Level, Scores

lib.define("topk_logsumexp(Tensor scores, int k) -> (Tensor, Tensor, Tensor)")
lib.define(
    "grow_level(Tensor logits, float sharpness, Tensor? ids, Tensor values, Tensor seen, "
    "Tensor? fixed_children, int k, int count, int first_slot, bool by_value) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
lib.define("best_nodes(Tensor values, int count) -> Tensor")
lib.define(
    "link_nodes(Tensor chosen, Tensor parents, int depth) -> (Tensor, Tensor, Tensor, Tensor)"
)
lib.define("compact(Tensor(a!)[] buffers, Tensor addresses, Tensor start, Tensor path) -> ()")

_ops = torch.ops.gpt_eagle


# ----------------------------------------------------------------------------------- the functions


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.topk_logsumexp(scores, k)


def best(scores: Tensor, noise: Tensor | None, row: Tensor | None) -> Tensor:
    if noise is not None:  # the sum is fused with the reduction
        return torch_backend.best(scores, noise, row)
    _, index, _ = topk(scores, 1)  # in many blocks a row, where a reduction has one
    return index.squeeze(-1)


def expand_frontier(
    scores: Scores | Children, front: Frontier | None, level: Level
) -> tuple[Candidates, Frontier | None]:
    return torch_backend.expanded(scores, front, level, grow)


def grow(
    scores: Scores | Children, values: Tensor, seen: Tensor, level: Level
) -> tuple[Tensor, ...]:
    if isinstance(scores, Children):
        return torch_backend.expand(scores, values, seen, level)
    if scores.logits.shape[1] != values.shape[1]:  # all nodes share them
        return torch_backend.expand(scores.best(level.k, topk), values, seen, level)
    of_scores = (scores.with_noise(), scores.sharpness, scores.ids)
    of_level = (level.fixed_children, level.k, level.count, level.first_slot, level.by_value)
    return _ops.grow_level(*of_scores, values, seen, *of_level)


def select_nodes(
    levels: Sequence[Candidates],
    expanded: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> DraftTree:
    every = Candidates.join(levels)
    if isinstance(nodes, int):
        chosen = _ops.best_nodes(every.values, nodes)
    else:
        chosen = nodes.expand(len(every.values), -1)
    related = _ops.link_nodes(chosen, every.parents, depth)
    return torch_backend.tree_of(every, chosen, related, expanded, text)


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    _ops.compact(buffers, addresses, start, path)


# ----------------------------------------------------------------------------------- the operators


def _topk_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    import ops.cuda.topk

    if k > ops.cuda.topk.MOST:
        return torch_backend.topk(scores, k)
    with torch.cuda.device(scores.device):
        return ops.cuda.topk.topk_logsumexp(scores, k)


def _grow_plain(
    logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot, by_value
):
    level = Level(k, count, first_slot=first_slot, fixed_children=fixed_children, by_value=by_value)
    return torch_backend.grow(Scores(logits, sharpness, ids), values, seen, level)


def _grow_cuda(
    logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot, by_value
):
    import ops.cuda.topk

    scores = Scores(logits, sharpness, ids)
    level = Level(k, count, first_slot=first_slot, fixed_children=fixed_children, by_value=by_value)
    if k > ops.cuda.topk.MOST:
        return torch_backend.grow(scores, values, seen, level)
    with torch.cuda.device(logits.device):
        return ops.cuda.topk.grow_level(scores, values, seen, level)


def _best_nodes_cuda(values: Tensor, count: int) -> Tensor:
    import ops.cuda.tree

    if values.shape[1] > ops.cuda.tree.MOST:
        return torch_backend.best_nodes(values, count)
    with torch.cuda.device(values.device):
        return ops.cuda.tree.best_nodes(values, count)


def _link_nodes_cuda(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    import ops.cuda.tree

    with torch.cuda.device(chosen.device):
        return ops.cuda.tree.link_nodes(chosen, parents, depth)


def _compact_plain(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    torch_backend.compact(buffers, addresses, start, path)


def _compact_cuda(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    import ops.cuda.compact

    with torch.cuda.device(start.device):
        ops.cuda.compact.compact(buffers, addresses, start, path)


lib.impl("topk_logsumexp", torch_backend.topk, "CPU")
lib.impl("topk_logsumexp", _topk_cuda, "CUDA")
lib.impl("grow_level", _grow_plain, "CPU")
lib.impl("grow_level", _grow_cuda, "CUDA")
lib.impl("best_nodes", torch_backend.best_nodes, "CPU")
lib.impl("best_nodes", _best_nodes_cuda, "CUDA")
lib.impl("link_nodes", torch_backend.link_nodes, "CPU")
lib.impl("link_nodes", _link_nodes_cuda, "CUDA")
lib.impl("compact", _compact_plain, "CPU")
lib.impl("compact", _compact_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::topk_logsumexp", lib=lib)
def _(scores, k):
    shape = scores.shape[:-1]
    return (
        scores.new_empty(*shape, k),
        scores.new_empty(*shape, k, dtype=torch.int64),
        scores.new_empty(*shape, 1),
    )


@torch.library.register_fake("gpt_eagle::grow_level", lib=lib)
def _(logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot, by_value):
    B, R, _ = logits.shape
    tokens = values.new_empty(B, R * k, dtype=torch.long)
    candidates = values.new_empty(B, R * k)
    order = values.new_empty(B, count, dtype=torch.long)
    front = values.new_empty(B, count)
    return tokens, candidates, order, front, seen.new_empty(B, count, seen.shape[2])


@torch.library.register_fake("gpt_eagle::best_nodes", lib=lib)
def _(values, count):
    return values.new_empty(len(values), count, dtype=torch.long)


@torch.library.register_fake("gpt_eagle::link_nodes", lib=lib)
def _(chosen, parents, depth):
    B, drafted = chosen.shape
    N = drafted + 1
    number = chosen.new_empty(B, parents.shape[1] + 1)
    above = chosen.new_empty(B, N)
    depths = chosen.new_empty(B, N)
    mask = chosen.new_empty(B, N, N, dtype=torch.bool)
    return number, above, depths, mask


@torch.library.register_fake("gpt_eagle::compact", lib=lib)
def _(buffers, addresses, start, path):
    return None
