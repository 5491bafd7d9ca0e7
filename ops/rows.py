"""Operators on rows: the norm of features; of scores the best, and the best few with the row's normalizer; and those
that a draft tree is made with: a level of the best children, the best candidates of all, and how they are related.

C++ on a CPU (cpu/layers.cpp, cpu/choice.cpp, cpu/rows.cpp), Triton on CUDA (cuda/rows.py, cuda/topk.py, cuda/tree.py);
elsewhere plain operations, which the compiler fuses with what surrounds them. In operators a row gets the same bits in
eager and in compiled steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_triton, lib, triton_products, uses_cpp

lib.define("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)")
lib.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")
lib.define("topk_logsumexp(Tensor scores, int k) -> (Tensor, Tensor, Tensor)")
lib.define(
    "grow_level(Tensor logits, float sharpness, Tensor? ids, Tensor values, Tensor seen, Tensor? places, int k, "
    "int count, int slot, bool by_value) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
lib.define("best_nodes(Tensor values, int count) -> Tensor")
lib.define("relate(Tensor chosen, Tensor parents, int depth) -> (Tensor, Tensor, Tensor, Tensor)")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, with fp32 statistics. Source: arXiv 1910.07467.

    x: [..., F]; weight: [F]
    Returns: [..., F].
    """
    if x.dtype == weight.dtype == torch.bfloat16 and not _trained(x, weight) and uses_cpp(x):
        return torch.ops.gpt_eagle.rms_norm(x, weight, eps)
    if x.is_cuda and x.dtype == weight.dtype and not _trained(x, weight):
        return torch.ops.gpt_eagle.norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def _trained(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)  # the operators have no gradients


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch's own operators."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add(x: Tensor, delta: Tensor) -> Tensor:
    """Add a layer's output to the stream. x: [..., F]; delta: [..., F], or its partial sums, [S, ..., F] fp32."""
    return (x + delta.sum(0)).to(x.dtype) if delta.dim() > x.dim() else x + delta


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add`, and the `rms_norm` of that; weight: [F]. Returns both, [..., F] each."""
    if x.is_cuda and x.dtype == weight.dtype and not _trained(x, delta, weight):
        return torch.ops.gpt_eagle.add_norm(x, delta, weight, eps)
    x = add(x, delta)
    return x, rms_norm(x, weight, eps)


def add_norm_reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same by torch's own operators."""
    x = add(x, delta)
    return x, rms_norm_reference(x, weight, eps)


def swiglu(y: Tensor) -> Tensor:
    """SiLU of the first half of every row, times the second. y: [..., 2 F]. Source: arXiv 2002.05202."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def best(scores: Tensor, noise: Tensor | None = None, row: Tensor | None = None) -> Tensor:
    """Find the best token of every row of scores; of equal ones the lowest.

    scores: [B, N, V] fp32
    noise: [B, R, V] fp32, of which row [B, N] int64 is added to each node's scores; None: nothing is
    Returns: [B, N] int64.
    """
    if uses_cpp(scores):
        return torch.ops.gpt_eagle.best(scores, noise, row)
    return best_reference(scores, noise, row)


def best_reference(scores: Tensor, noise: Tensor | None = None, row: Tensor | None = None) -> Tensor:
    """The same by torch's own operators."""
    if noise is not None:
        scores = scores + noise.gather(1, row[:, :, None].expand(-1, -1, noise.shape[2]))  # [B, N, V]
    return scores.argmax(-1)


def topk_logsumexp(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best of every row of scores, best first, and the logarithm of the row's sum of exponentials.

    scores: [..., V] float32
    Returns: their values and indices, both [..., k]; the logsumexp, [..., 1]. Equal values come in the order of
    their indices, except where torch.topk serves, which has no such rule.
    Raises: ValueError for scores of another dtype.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"topk_logsumexp takes float32 scores; these are {scores.dtype}: convert them")
    if scores.is_cuda:
        return torch.ops.gpt_eagle.topk_logsumexp(scores, k)
    if uses_cpp(scores):
        return torch.ops.gpt_eagle.topk(scores, k)
    return topk_logsumexp_reference(scores, k)  # plain operations: the compiler fuses them with what made the scores


def topk_logsumexp_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's own operators."""
    return *scores.topk(k, dim=-1), scores.logsumexp(-1, keepdim=True)


def _topk_logsumexp_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if has_triton():
        import ops.cuda.topk

        if k <= ops.cuda.topk.MOST:
            with torch.cuda.device(scores.device):
                return ops.cuda.topk.topk_logsumexp(scores, k)
    return topk_logsumexp_reference(scores, k)


def _add_norm_cuda(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not has_triton():
        return add_norm_reference(x, delta, weight, eps)
    import ops.cuda.rows

    with torch.cuda.device(x.device):
        return ops.cuda.rows.add_norm(x, delta, weight, eps, triton_products().device_of(x.device.index))


def _norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not has_triton():
        return rms_norm_reference(x, weight, eps)
    import ops.cuda.rows

    with torch.cuda.device(x.device):
        return ops.cuda.rows.add_norm(x, None, weight, eps, triton_products().device_of(x.device.index))[1]


@torch.library.register_fake("gpt_eagle::norm", lib=lib)
def _(x, weight, eps):
    return torch.empty_like(x)


@torch.library.register_fake("gpt_eagle::add_norm", lib=lib)
def _(x, delta, weight, eps):
    return torch.empty_like(x), torch.empty_like(x)


lib.impl("norm", _norm_cuda, "CUDA")
lib.impl("add_norm", _add_norm_cuda, "CUDA")
lib.impl("topk_logsumexp", topk_logsumexp_reference, "CPU")
lib.impl("topk_logsumexp", _topk_logsumexp_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::topk_logsumexp", lib=lib)
def _(scores, k):
    shape = scores.shape[:-1]
    return scores.new_empty(*shape, k), scores.new_empty(*shape, k, dtype=torch.int64), scores.new_empty(*shape, 1)


# ------------------------------------------------------------------------------------- levels of a draft tree


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
        best, columns, total = topk_logsumexp(self.sharpness * self.logits, k)  # [B, R, k] twice, [B, R, 1]
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return Children(columns if self.ids is None else self.ids[columns], (best - total).clamp(max=0))


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
    order: Tensor | None = None  # [B, R'] int64, which candidates the frontier is; None or empty where there is none
    front: Frontier | None = None


def grow_level(found: Children | Scores, front: Frontier, step: Expansion) -> Grown:
    """Value the children of a frontier, and choose the next one. Of equal candidates the first is chosen."""
    if isinstance(found, Children):
        return grow_level_reference(found, front, step)
    if not found.logits.is_cuda:
        return grow_level_reference(found.best(step.k), front, step)
    tokens, values, order, best, seen = torch.ops.gpt_eagle.grow_level(
        found.logits, found.sharpness, found.ids, *front, step.places, step.k, step.count, step.slot, step.by_value
    )
    return Grown(tokens, values, order, Frontier(best, seen))


def grow_level_reference(found: Children, front: Frontier, step: Expansion) -> Grown:
    """The same by torch's own operators."""
    tokens, values = found.tokens.flatten(1), (front.values[:, :, None] + found.scores).flatten(1)  # [B, X]
    if not step.count:
        return Grown(tokens, values)
    if step.places is None:
        order = best_first(values if step.by_value else found.scores.flatten(1))[:, : step.count]
    else:
        order = step.places.expand(len(values), -1)  # [B, R']
    parent = (order // step.k)[:, :, None]  # [B, R', 1]
    rows, slots = (torch.arange(n, device=order.device) for n in (step.count, front.seen.shape[2]))
    own = slots == step.slot + rows[:, None]  # [R', W]
    seen = front.seen.gather(1, parent.expand(-1, -1, len(slots))) | own  # a node sees its ancestors and itself
    return Grown(tokens, values, order, Frontier(values.gather(1, order), seen))


def _grow_level_plain(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    step = Expansion(k, count, slot, places, by_value)
    grown = grow_level_reference(Scores(logits, sharpness, ids).best(k), Frontier(values, seen), step)
    if not count:
        nothing = values.new_empty(len(values), 0)
        return grown.tokens, grown.values, nothing.long(), nothing, seen.new_empty(len(values), 0, seen.shape[2])
    return grown.tokens, grown.values, grown.order.clone(memory_format=torch.contiguous_format), *grown.front


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
    number = torch.zeros(B, parents.shape[1] + 1, dtype=torch.long, device=chosen.device)  # [B, P+1]
    number = number.scatter(1, chosen + 1, torch.arange(1, size, device=chosen.device).expand_as(chosen))
    above = number.gather(1, parents.gather(1, chosen) + 1)  # [B, N-1]
    above = torch.cat((torch.zeros_like(number[:, :1]), above), 1)
    return Nodes(number, above, *ancestors(above, depth))


def ancestors(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The depths and the mask of `Nodes`. parents: [B, N], which precede their children; depth: as in `relate`."""
    N = parents.shape[1]
    eye = torch.eye(N, dtype=torch.bool, device=parents.device)
    reach = eye | (parents[:, :, None] == torch.arange(N, device=parents.device))  # [B, N, N]: self and parent
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
    return chosen.new_empty(B, P + 1), above, depths, chosen.new_empty(B, N + 1, N + 1, dtype=torch.bool)
