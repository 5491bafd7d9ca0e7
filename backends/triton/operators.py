"""The operators of `torch.ops.gpt_eagle` on CUDA: each calls its kernel on its inputs' device.

functions.py registers them, where Triton is there. Beyond the sizes that a kernel takes, an
operator is the definition in reference.py.
Not here: the operators' signatures, their plain versions and the shapes of their results, which are
in functions.py and, for attention and linear layers, one folder up.
"""

from __future__ import annotations

import torch
from torch import Tensor

import reference
from backends.epilogues import LazyMatmul
from backends.library import lib
from backends.triton import (
    attention,
    compact,
    epilogues,
    experts,
    ngram,
    noise,
    norm,
    qmatmul,
    rotary,
    topk,
    tree,
)
from draft_tree import Level, Scores

# ---------------------------------------------------------------------------- attention and layers


def _tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
    paths: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    with torch.cuda.device(q.device):
        device = qmatmul.device_of(q.device.index)
        done = attention.counters(q.device.index)
        window = (start, mask, first, paths)
        return attention.tree_attention(q, k, v, window, scale, device, done, sinks)


def _path_table(mask: Tensor) -> Tensor:
    with torch.cuda.device(mask.device):
        return attention.path_table(mask)


def _experts_linear(x: Tensor, weight: Tensor, lists: Tensor) -> Tensor:
    with torch.cuda.device(x.device):
        device = qmatmul.device_of(x.device.index)
        return experts.experts_product(x, weight, None, lists, device)


def _expert_lists(expert: Tensor, count: int) -> Tensor:
    with torch.cuda.device(expert.device):
        return experts.expert_lists(expert, count)


def _linear_halves(x: Tensor, weight: Tensor, epilogue: str) -> Tensor:
    device = qmatmul.device_of(x.device.index)
    with torch.cuda.device(x.device):
        return qmatmul.matmul(x, weight, None, device, epilogue)


def _quantized_matmul(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    device = qmatmul.device_of(x.device.index)
    with torch.cuda.device(x.device):
        if lists is None:
            return qmatmul.matmul(x, packed, scale, device, epilogue)
        return experts.experts_product(x, packed, scale, lists, device)


def _read_planes(packed: Tensor, scale: Tensor, ids: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    with torch.cuda.device(packed.device):
        return qmatmul.read_rows(packed, scale, ids, K, dtype)


# ------------------------------------------------------------------- products with the work behind


def _add_unscaled(x, delta, weight, eps):
    with torch.cuda.device(x.device):
        return epilogues.add_unscaled(x, delta, weight, eps)


def _add_product(x, packed, scale, stream, weight, eps):
    with torch.cuda.device(x.device):
        gpu = epilogues.gpu_of(x)
        product = LazyMatmul(x, None, packed, scale)
        return epilogues.add_product(product, stream, weight, eps, gpu)


def _gated_product(x, squares, packed, scale):
    with torch.cuda.device(x.device):
        device = qmatmul.device_of(x.device.index)
        return qmatmul.matmul(x, packed, scale, device, "swiglu", squares)


def _rotary_product(x, squares, packed, scale, cos, sin, k, v, slots, *norms):
    with torch.cuda.device(x.device):
        gpu = epilogues.gpu_of(x)
        product = LazyMatmul(x, squares, packed, scale)
        return epilogues.rotary_product(product, (cos, sin), k, v, slots, norms, gpu)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    with torch.cuda.device(x.device):
        _, y = norm.add_norm(x, None, weight, eps)
        return y


def _add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(x.device):
        return norm.add_norm(x, delta, weight, eps)


def _rotary_cache(qkv, cos, sin, k, v, slots, *norms) -> Tensor:
    with torch.cuda.device(qkv.device):
        return rotary.rotary_cache(qkv, (cos, sin), k, v, slots, norms)


# ----------------------------------------------------------------------------- scores and the tree


def _gumbel(seed, prompt, sample, greedy, first, rows, vocab, domain) -> Tensor:
    with torch.cuda.device(first.device):
        return noise.gumbel(seed, prompt, sample, greedy, first, rows, vocab, domain)


def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if k > topk.MOST:
        return reference.topk(scores, k)
    with torch.cuda.device(scores.device):
        return topk.topk_logsumexp(scores, k)


def _grow(logits, sharpness, ids, values, seen, fixed_children, k, count, first_slot):
    scores = Scores(logits, sharpness, ids)
    level = Level(k, count, first_slot=first_slot, fixed_children=fixed_children)
    if k > topk.MOST:
        return reference.grow_level(scores, values, seen, level)
    with torch.cuda.device(logits.device):
        return topk.grow_level(scores, values, seen, level)


def _best_nodes(values: Tensor, count: int) -> Tensor:
    if values.shape[1] > tree.MOST:
        return reference.best_nodes(values, count)
    with torch.cuda.device(values.device):
        return tree.best_nodes(values, count)


def _link_nodes(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    with torch.cuda.device(chosen.device):
        return tree.link_nodes(chosen, parents, depth)


def _compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    with torch.cuda.device(start.device):
        compact.compact(buffers, addresses, start, path)


def _longest_matches(
    text: Tensor, pos: Tensor, kept: Tensor | None, *sizes: int
) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(pos.device):
        return ngram.ngram_match(text, pos, kept, *sizes)


ON_CUDA = {
    "tree_attention": _tree_attention,
    "path_table": _path_table,
    "experts_linear": _experts_linear,
    "expert_lists": _expert_lists,
    "linear_halves": _linear_halves,
    "w4a16": _quantized_matmul,
    "w8a16": _quantized_matmul,
    "blocks_a16": _quantized_matmul,
    "read_planes": _read_planes,
    "add_unscaled": _add_unscaled,
    "add_product": _add_product,
    "gated_product": _gated_product,
    "rotary_product": _rotary_product,
    "norm": _norm,
    "add_norm": _add_norm,
    "rotary_cache": _rotary_cache,
    "gumbel_noise": _gumbel,
    "topk_logsumexp": _topk,
    "grow_level": _grow,
    "best_nodes": _best_nodes,
    "link_nodes": _link_nodes,
    "compact": _compact,
    "longest_matches": _longest_matches,
}


def register() -> None:
    """Let every operator run its kernel on CUDA. The operators are defined already. Once."""
    for name, kernel in ON_CUDA.items():
        lib.impl(name, kernel, "CUDA")
