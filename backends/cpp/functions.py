"""The functions of a backend (reference.py) in C++, each one call.

Imported once the operators are loaded (build.py); the sources are tree.cpp, ngram.cpp,
sampling.cpp, topk.cpp, compact.cpp, rotary.cpp, attention.cpp, layers.cpp and matmul.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import backends.attention
import reference
from backends.cpp.layers import FusedHead, FusedModel, missing_step, steps_of, steps_of_head
from backends.weight import Weight
from draft_tree import Accepted, Candidates, Children, DraftTree, Frontier, Level, Scores
from options import log_note

_ops = torch.ops.gpt_eagle
# `default` names the overload, which would be looked up in every call
soft_cap = _ops.soft_cap.default
gumbel = _ops.gumbel.default
cut_shaped = _ops.cut.default
best = _ops.best.default
topk = _ops.topk.default
advance = _ops.advance.default
with_times = _ops.with_times.default
causal = _ops.causal.default
ngram_match = _ops.ngram_match.default
ngram_draft = _ops.ngram_draft.default
add_chains = _ops.add_chains.default
rms_norm = _ops.rms_norm.default
swiglu = _ops.swiglu.default
geglu = _ops.geglu.default
clamped_swiglu = _ops.clamped_swiglu.default
rope_angles = _ops.angles.default


def cut(
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    margin: Tensor | None,
) -> Tensor:
    return cut_shaped(scores, temperature, top_k, top_p, margin, None, None, None)


def expand_frontier(
    scores: Scores | Children, front: Frontier | None, level: Level
) -> tuple[Candidates, Frontier | None]:
    if isinstance(scores, Children):  # drawn by a sampler, not scored
        return reference.expand_frontier(scores, front, level)
    above = (None, None, None)
    if front:
        above = front.for_cpp()
    tokens, values, parents, *chosen = _ops.expand_frontier.default(*scores, *above, *level)
    return Candidates(tokens, values, parents), Frontier(*chosen)


def select_nodes(
    levels: Sequence[Candidates],
    expanded: Sequence[Tensor],
    nodes: Tensor | int,
    depth: int,
    text: tuple[Tensor, Tensor],
) -> DraftTree:
    fixed = None
    count = nodes
    if isinstance(nodes, Tensor):
        fixed = nodes
        count = nodes.shape[1]
    tokens = [level.tokens for level in levels]
    values = [level.values for level in levels]
    parents = [level.parents for level in levels]
    operands = (tokens, values, parents, list(expanded), fixed, count)
    return DraftTree(*_ops.select_nodes.default(*operands, *text))


def root_tree(text: tuple[Tensor, Tensor]) -> DraftTree:
    return select_nodes((), (), 0, 0, text)  # no levels, so the root alone


def accept(tree: DraftTree, target_tokens: Tensor, depth: int) -> Accepted:
    return Accepted(*_ops.accept.default(*tree.for_cpp(), target_tokens, depth))


def place_tokens(
    pos: Tensor, depths: Tensor | int, count: int, slot: int = 0, done: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(depths, int):
        return _ops.place_rows.default(pos, done, None, count, slot, depths)
    return _ops.place_rows.default(pos, done, depths, count, slot, 0)


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    _ops.move_rows.default(buffers, start, path)


def rotary(
    qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    return _ops.rotary.default(qkv, *rope, heads, kv_heads)


def rotary_cache(
    qkv: Tensor, rope: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots: Tensor
) -> Tensor:
    kv_heads = k.shape[1]
    queries, keys = rotary(qkv, rope, qkv.shape[2] - 2 * kv_heads, kv_heads)
    reference.write_rows(k, v, slots, keys, qkv[:, :, -kv_heads:])
    return queries


def attention(q: Tensor, *operands: Any, paths: None = None, sinks: Tensor | None = None) -> Tensor:
    if q.shape[3] % 16:  # heads that vectors do not divide
        return backends.attention.attention(q, *operands, sinks=sinks)
    return _ops.attention.default(q, *operands, sinks=sinks)


def delta_rule(
    x: Tensor,
    kept: tuple[Tensor, ...],
    window: tuple[Tensor | None, ...],
    weights: Any,
) -> Tensor:
    conv, gates, gain, eps, tiled = weights
    operands = (conv.float().T.contiguous(), gates, gain.float(), eps, tiled)
    return _ops.delta_rule.default(x, *kept, *window, *operands)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    return _ops.matmul.default(x, weight, None, bias, len(weight), fp32_out)


def experts_linear(x: Tensor, weight: Tensor, routing: Tensor) -> Tensor:
    return _ops.matmul.default(x, weight, None, None, weight.shape[1], False, routing)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight, fp32_out=True)


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    fp32_out: bool = False,
    routing: Tensor | None = None,
) -> Tensor:
    if weight.table is None:  # a layout that C++ does not know
        return reference.matmul(x, weight, bias, fp32_out, routing)
    operands = (weight.data, weight.table)
    if x.dtype != torch.float16 and (bias is None or bias.dtype == torch.bfloat16):
        return _ops.matmul.default(x, *operands, bias, weight.outputs, fp32_out, routing)
    # the operator reads rows in bf16 and fp32, and a bias in bf16
    rows = x.float() if x.dtype == torch.float16 else x
    y = _ops.matmul.default(rows, *operands, None, weight.outputs, fp32_out, routing)
    y = y if fp32_out else y.to(x.dtype)
    return y if bias is None else y + bias


def experts_matmul(x: Tensor, weight: Weight, routing: Tensor) -> Tensor:
    return matmul(x, weight, routing=routing)


def model_program(model: nn.Module) -> FusedModel | None:
    """Return the passes of a `Transformer` in one call, if C++ has all of its steps."""
    missing = missing_step(steps_of(model))
    if missing and missing != "Rotate":  # which loading tells
        log_note(
            f"the step {missing} of this model is PyTorch's: slower, and a draft may change a "
            "token where the best two are nearly equal"
        )
    return None if missing else FusedModel(model)


def head_program(head: nn.Module, embedding: nn.Module) -> FusedHead | None:
    """Return the passes of an `EagleHead` in one call each, if C++ has all of its steps."""
    return None if missing_step(steps_of_head(head)) else FusedHead(head, embedding)
