"""All layers of a transformer in one call on a CPU (layers_cpu.cpp).

`run` computes what the loop over model.py's blocks computes, mixtures of experts included, in bfloat16 with float, int8
or int4 weights, and rounds where they round. Hundreds of small operators become one, with few operands: the weights are
kept on the operator's side beforehand, so that no step hands them over one by one.
Not served, and left to the loop: other dtypes, gradients, other devices, machines without a C++ compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import kernels
from quantize import QuantExperts, QuantLinear

if TYPE_CHECKING:
    from model import Block, KVCache, Window


def keep(layers: nn.ModuleList) -> None:
    """Prepare layers for `run`, where it can take them. An engine and a drafter do, when they are made.

    Writes: `layers.kept`. Weights may change in place afterwards; of one that is replaced by another tensor the old
    one stays in use until the layers are kept again.
    """
    first = layers[0]
    weight = first.ffn_norm.weight
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or first.attention.head_dim % 16:
        return
    if kernels.has_cpu_operators():
        weights = [tensor for layer in layers for tensor in _weights_of(layer)]
        inner, router = _matrix_inputs(first.ffn.w2), getattr(first.ffn, "router", None)
        heads, chosen = first.attention.heads, router.chosen if router else 0
        layers.kept = torch.ops.gpt_eagle.keep_layers(weights, heads, inner, chosen, first.ffn_norm.eps)


def serves(layers: nn.ModuleList, x: Tensor) -> bool:
    """Whether `run` takes these layers. x: the rows."""
    if not hasattr(layers, "kept") or x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return False
    return not (torch.is_grad_enabled() and x.requires_grad)


def run(layers: nn.ModuleList, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, window: Window) -> Tensor:
    """Run all layers over T rows.

    x: [B, T, F]; rope, cache, window: as for `Transformer.forward`
    Writes: the cache at `window.slots`. Returns: [B, T, F].
    """
    return torch.ops.gpt_eagle.layers(x, layers.kept, cache.k, cache.v, *rope, window.slots, window.start, window.mask)


def _weights_of(layer: Block) -> list[Tensor | None]:
    """In the order of `layer_of` in layers_cpu.cpp."""
    attention, ffn = layer.attention, layer.ffn
    norm = getattr(layer.attention_norm, "weight", None)  # the first layer of a draft head has none
    router = ffn.router.weight if hasattr(ffn, "router") else None
    return [
        norm, *_matrix(attention.wqkv), *_matrix(attention.wo),
        layer.ffn_norm.weight, router, *_matrix(ffn.w13), *_matrix(ffn.w2),
    ]  # fmt: skip


def _matrix(linear: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if isinstance(linear, (QuantLinear, QuantExperts)):
        return linear.packed, linear.scale, getattr(linear, "bias", None)
    return linear.weight, None, getattr(linear, "bias", None)


def _matrix_inputs(linear: nn.Module) -> int:
    return linear.in_features if isinstance(linear, (QuantLinear, QuantExperts)) else linear.weight.shape[-1]
