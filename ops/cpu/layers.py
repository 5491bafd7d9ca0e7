"""All layers of a transformer in one C++ call on a CPU (layers.cpp).

It computes what the loop over model.py's blocks computes, in bfloat16 with float, int8 or int4 weights, and rounds
where they round. Any of the layers may be mixtures of experts. Hundreds of small operators become one.
Not served, and left to the loop: other dtypes, gradients, other devices, machines without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ops.library import has_cpu_operators


class FusedLayers:
    """Layers whose weights were handed to the operator, so that no step hands them over one by one.

    Weights may change in place afterwards; of one that is replaced by another tensor the old one stays in use.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        """layers: model.py's blocks, for which `fits` holds"""
        first, weights = layers[0], [tensor for layer in layers for tensor in _weights_of(layer)]
        inner, heads = [layer.ffn.w2.in_features for layer in layers], first.attention.heads
        router = next((layer.ffn.router for layer in layers if hasattr(layer.ffn, "router")), None)
        shares = (router.chosen, router.norm_topk) if router else (0, True)
        self.prepared = torch.ops.gpt_eagle.prepare_layers(weights, heads, inner, *shares, first.ffn_norm.eps)

    @staticmethod
    def fits(layers: Sequence[nn.Module]) -> bool:
        """Whether these layers can be served."""
        weight, head_dim = layers[0].ffn_norm.weight, layers[0].attention.head_dim
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        known = all(getattr(layer.attention.wo, "format", "none") in ("none", "int8", "int4") for layer in layers)
        return on_cpu and known and head_dim % 16 == 0 and has_cpu_operators()

    def takes(self, x: Tensor) -> bool:
        """Whether these rows can be served. x: [B, T, F]."""
        return (
            x.device.type == "cpu" and x.dtype == torch.bfloat16 and not (torch.is_grad_enabled() and x.requires_grad)
        )

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any, window: Any, taps: tuple[int, ...], h: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over T rows: x [B, T, F]; the others as for model.py's `Layers`.

        Writes: the cache at `window.slots`. Returns: [B, T, F]; the inputs of the layers in taps, [B, T, taps F].
        """
        operands = (*rope, window.slots, window.start, window.mask, taps, h)
        return torch.ops.gpt_eagle.layers(x, self.prepared, cache.k, cache.v, *operands)


def _weights_of(layer: nn.Module) -> list[Tensor | None]:
    """In the order of `layer_of` in layers.cpp."""
    attention, ffn = layer.attention, layer.ffn
    norm = getattr(layer.attention_norm, "weight", None)  # the first layer of a draft head has none
    *heads, _ = attention.head_norms or (None, None, 0.0)
    router = ffn.router.weight if hasattr(ffn, "router") else None
    return [
        norm, *attention.wqkv.operands(), *heads, *attention.wo.operands(),
        layer.ffn_norm.weight, router, *ffn.w13.operands(), *ffn.w2.operands(),
    ]  # fmt: skip
