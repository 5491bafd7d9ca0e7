"""The functions of a backend (reference.py) on CUDA: kernels in Triton, PyTorch around them.

Each kernel is an operator of its own, so that steps around it compile with `fullgraph=True`. On a
CPU, where steps are traced by tests, the operators are the plain versions, as they are beyond the
sizes that a kernel takes.
The kernels are in noise.py, topk.py, tree.py, ngram.py, compact.py, norm.py and rotary.py here;
the operators of linear layers in linear.py, experts.py, planes.py and epilogues.py, one folder up.
What is not here runs in plain PyTorch, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import backends.experts
import reference
from backends.epilogues import (
    HeadNorms,
    LazyMatmul,
    add,
    add_norm_plainly,
    adds_biases,
    lazy_matmul,
    rotary_cache_plainly,
)
from backends.fusions import MergedHead, MergedModel
from backends.library import lib
from backends.linear import fits_kernel, halves_product
from backends.planes import split_planes
from backends.triton.launch import SPLIT_TOKENS
from backends.weight import LAYOUTS, Weight
from draft_tree import Candidates, Children, DraftTree, Frontier, Level, Scores

lib.define(
    "gumbel_noise(Tensor seed, Tensor prompt, Tensor sample, Tensor? greedy, Tensor first, "
    "int rows, int vocab, int domain) -> Tensor"
)
lib.define("topk_logsumexp(Tensor scores, int k) -> (Tensor, Tensor, Tensor)")
lib.define(
    "grow_level(Tensor logits, float sharpness, Tensor? ids, Tensor values, Tensor seen, "
    "Tensor? fixed_children, int k, int count, int first_slot) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
lib.define("best_nodes(Tensor values, int count) -> Tensor")
lib.define(
    "link_nodes(Tensor chosen, Tensor parents, int depth) -> (Tensor, Tensor, Tensor, Tensor)"
)
lib.define("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)")
lib.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")
lib.define(
    "rotary_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor slots, "
    "Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor"
)
lib.define("compact(Tensor(a!)[] buffers, Tensor addresses, Tensor start, Tensor path) -> ()")
lib.define(
    "longest_matches(Tensor text, Tensor pos, Tensor? kept, int tokens, int branches, int least, "
    "int longest) -> (Tensor, Tensor)"
)

_ops = torch.ops.gpt_eagle

merges_steps = True
# `default` names the overload, which would be looked up in every call
gumbel = _ops.gumbel_noise.default
topk = _ops.topk_logsumexp.default
compact = _ops.compact.default
ngram_match = _ops.longest_matches.default
route = backends.experts.expert_lists
experts_linear = backends.experts.experts_linear


# ----------------------------------------------------------------------------------- the functions


def best(scores: Tensor, noise: Tensor | None, row: Tensor | None) -> Tensor:
    if noise is not None:  # the sum is fused with the reduction
        return reference.best(scores, noise, row)
    _, index, _ = topk(scores, 1)  # in many blocks a row, where a reduction has one
    return index.squeeze(-1)


def expand_frontier(
    scores: Scores | Children, front: Frontier | None, level: Level
) -> tuple[Candidates, Frontier | None]:
    return reference.expand_frontier(scores, front, level, grow)


def grow(
    scores: Scores | Children, values: Tensor, seen: Tensor, level: Level
) -> tuple[Tensor, ...]:
    if isinstance(scores, Children):
        return reference.grow_level(scores, values, seen, level)
    if scores.logits.shape[1] != values.shape[1]:  # all nodes share them
        return reference.grow_level(scores.best(level.k, topk), values, seen, level)
    of_scores = (scores.with_noise(), scores.sharpness, scores.ids)
    of_level = (level.fixed_children, level.k, level.count, level.first_slot)
    return _ops.grow_level(*of_scores, values, seen, *of_level)


def select_nodes(
    levels: Sequence[Candidates],
    expanded: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> DraftTree:
    own = (_ops.best_nodes, _ops.link_nodes)
    return reference.select_nodes(levels, expanded, nodes, depth, text, *own)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype not in (x.dtype, torch.float32):
        return reference.rms_norm(x, weight, eps)
    return _ops.norm(x, weight, eps)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if weight.dtype not in (x.dtype, torch.float32):
        return add_norm_plainly(x, delta, weight, eps)
    return _ops.add_norm(x, delta, weight, eps)


def swiglu(y: Tensor | LazyMatmul) -> Tensor:
    if isinstance(y, LazyMatmul):
        return _ops.gated_product(*y)
    return reference.swiglu(y)


def rotary_cache(
    qkv: Tensor | LazyMatmul,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    if rope[0].shape[-1] < k.shape[-1]:  # of a part of each head, which no fused step has
        assert isinstance(qkv, Tensor)
        return rotary_cache_plainly(qkv, rope, k, v, slots, norms)
    given = norms or (None, None, 0.0)
    if isinstance(qkv, LazyMatmul):
        return _ops.rotary_product(*qkv, *rope, k, v, slots, *given)
    return _ops.rotary_cache(qkv, *rope, k, v, slots, *given)


def path_table(mask: Tensor) -> Tensor | None:
    """Return `Window.paths`: what attention needs of a mask, once for all layers.

    A token alone needs nothing, and the tokens of a prompt need the mask.
    """
    _, T, W = mask.shape
    if T * W == 1 or T > SPLIT_TOKENS:
        return None
    return _ops.path_table(mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    if not fits_kernel(x, weight):
        return reference.linear(x, weight, bias, fp32_out)
    if bias is None:
        return halves_product(x, weight, "fp32" if fp32_out else "none")
    if not fp32_out and adds_biases():
        return add(bias, LazyMatmul(x, None, weight, None))
    y = halves_product(x, weight, "fp32") + bias
    return y if fp32_out else y.to(x.dtype)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if not fits_kernel(x, weight):
        return reference.router_logits(x, weight)
    return halves_product(x, weight, "fp32")


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    fp32_out: bool = False,
    routing: Tensor | None = None,
) -> Tensor:
    if bias is not None and not fp32_out and adds_biases():
        product = lazy_matmul(x, weight.data, weight.scale)
        if product:
            return add(bias, product)
    epilogue = "fp32" if fp32_out else "none"
    kernel = LAYOUTS[weight.parts[0].layout].kernel
    parts = split_planes(weight) if len(weight.parts) > 1 else [weight]
    outputs = [kernel(x, part.data, part.scale, routing, epilogue) for part in parts]
    y = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    return y if bias is None else y + bias


def experts_matmul(x: Tensor, weight: Weight, routing: Tensor) -> Tensor:
    return matmul(x, weight, routing=routing)


def experts_bias(y: Tensor, bias: Tensor, routing: Tensor) -> Tensor:
    return reference.experts_bias(y, bias, backends.experts.expert_of(routing, len(bias)))


def model_program(model: nn.Module) -> MergedModel:
    """Return the passes of a `Transformer` in fewer launches."""
    return MergedModel(model)


def head_program(head: nn.Module, embedding: nn.Module) -> MergedHead:
    """Return the passes of an `EagleHead` in fewer launches."""
    return MergedHead(head, embedding)


def device_time(device: torch.device) -> Tensor:
    import backends.triton.clock

    now = torch.empty((), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        backends.triton.clock.read(now)
    return now


# ----------------------------------------------------------------------------------- the operators


def _gumbel_cuda(seed, prompt, sample, greedy, first, rows, vocab, domain) -> Tensor:
    import backends.triton.noise

    with torch.cuda.device(first.device):
        return backends.triton.noise.gumbel(
            seed, prompt, sample, greedy, first, rows, vocab, domain
        )


def _topk_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    import backends.triton.topk

    if k > backends.triton.topk.MOST:
        return reference.topk(scores, k)
    with torch.cuda.device(scores.device):
        return backends.triton.topk.topk_logsumexp(scores, k)


def _grow_plain(logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot):
    level = Level(k, count, first_slot=first_slot, fixed_children=fixed_children)
    return reference.grow_level(Scores(logits, sharpness, ids), values, seen, level)


def _grow_cuda(logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot):
    import backends.triton.topk

    scores = Scores(logits, sharpness, ids)
    level = Level(k, count, first_slot=first_slot, fixed_children=fixed_children)
    if k > backends.triton.topk.MOST:
        return reference.grow_level(scores, values, seen, level)
    with torch.cuda.device(logits.device):
        return backends.triton.topk.grow_level(scores, values, seen, level)


def _best_nodes_cuda(values: Tensor, count: int) -> Tensor:
    import backends.triton.tree

    if values.shape[1] > backends.triton.tree.MOST:
        return reference.best_nodes(values, count)
    with torch.cuda.device(values.device):
        return backends.triton.tree.best_nodes(values, count)


def _link_nodes_cuda(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    import backends.triton.tree

    with torch.cuda.device(chosen.device):
        return backends.triton.tree.link_nodes(chosen, parents, depth)


def _compact_cuda(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    import backends.triton.compact

    with torch.cuda.device(start.device):
        backends.triton.compact.compact(buffers, addresses, start, path)


def _longest_matches_cuda(
    text: Tensor, pos: Tensor, kept: Tensor | None, *sizes: int
) -> tuple[Tensor, Tensor]:
    import backends.triton.ngram

    with torch.cuda.device(pos.device):
        return backends.triton.ngram.ngram_match(text, pos, kept, *sizes)


def _norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import backends.triton.norm

    with torch.cuda.device(x.device):
        _, y = backends.triton.norm.add_norm(x, None, weight, eps)
        return y


def _add_norm_cuda(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    import backends.triton.norm

    with torch.cuda.device(x.device):
        return backends.triton.norm.add_norm(x, delta, weight, eps)


def _rotary_cache_plain(qkv, cos, sin, k, v, slots, *norms) -> Tensor:
    given = None if norms[0] is None else norms
    return rotary_cache_plainly(qkv, (cos, sin), k, v, slots, given)


def _rotary_cache_cuda(qkv, cos, sin, k, v, slots, *norms) -> Tensor:
    import backends.triton.rotary

    with torch.cuda.device(qkv.device):
        return backends.triton.rotary.rotary_cache(qkv, (cos, sin), k, v, slots, norms)


lib.impl("gumbel_noise", reference.gumbel, "CPU")
lib.impl("gumbel_noise", _gumbel_cuda, "CUDA")
lib.impl("topk_logsumexp", reference.topk, "CPU")
lib.impl("topk_logsumexp", _topk_cuda, "CUDA")
lib.impl("grow_level", _grow_plain, "CPU")
lib.impl("grow_level", _grow_cuda, "CUDA")
lib.impl("best_nodes", reference.best_nodes, "CPU")
lib.impl("best_nodes", _best_nodes_cuda, "CUDA")
lib.impl("link_nodes", reference.link_nodes, "CPU")
lib.impl("link_nodes", _link_nodes_cuda, "CUDA")
lib.impl("compact", reference.compact, "CPU")
lib.impl("compact", _compact_cuda, "CUDA")
lib.impl("longest_matches", _longest_matches_cuda, "CUDA")
lib.impl("norm", reference.rms_norm, "CPU")
lib.impl("norm", _norm_cuda, "CUDA")
lib.impl("add_norm", add_norm_plainly, "CPU")
lib.impl("add_norm", _add_norm_cuda, "CUDA")
lib.impl("rotary_cache", _rotary_cache_plain, "CPU")
lib.impl("rotary_cache", _rotary_cache_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::gumbel_noise", lib=lib)
def _(seed, prompt, sample, greedy, first, rows, vocab, domain):
    return first.new_empty(len(first), rows, vocab, dtype=torch.float32)


@torch.library.register_fake("gpt_eagle::topk_logsumexp", lib=lib)
def _(scores, k):
    shape = scores.shape[:-1]
    return (
        scores.new_empty(*shape, k),
        scores.new_empty(*shape, k, dtype=torch.int64),
        scores.new_empty(*shape, 1),
    )


@torch.library.register_fake("gpt_eagle::grow_level", lib=lib)
def _(logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot):
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


@torch.library.register_fake("gpt_eagle::longest_matches", lib=lib)
def _(text, pos, kept, tokens, branches, least, longest):
    chains = text.new_empty(len(text), branches, tokens)
    return chains, chains.new_empty(len(text), branches)


@torch.library.register_fake("gpt_eagle::norm", lib=lib)
def _(x, weight, eps):
    return torch.empty_like(x)


@torch.library.register_fake("gpt_eagle::add_norm", lib=lib)
def _(x, delta, weight, eps):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.register_fake("gpt_eagle::rotary_cache", lib=lib)
def _(qkv, cos, sin, k, v, slots, *norms):
    B, T, heads, E = qkv.shape[-4:]
    return k.new_empty(B, T, heads - 2 * k.shape[1], E)
