"""A pass of a model, or of a draft head, in one C++ call on a CPU (layers.cpp).

It computes what model.py's modules compute, in bfloat16 with float, int8 or int4 weights, and rounds where they round.
Any of the layers may be mixtures of experts. Hundreds of small operators become one.
Not served, and left to the modules: other dtypes, gradients, other devices, machines without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ops.library import has_cpu_operators


def fits(layers: Sequence[nn.Module]) -> bool:
    """Whether model.py's blocks can be served."""
    weight = layers[0].ffn_norm.weight
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    known = all(
        getattr(layer.attention.wo, "format", "none") in ("none", "int8", "int4")
        for layer in layers
    )
    return on_cpu and known and layers[0].attention.head_dim % 16 == 0 and has_cpu_operators()


def prepare(layers: Sequence[nn.Module]) -> Tensor:
    """Hand the layers' weights to the operators, so that no step hands them over one by one.

    Weights may change in place afterwards; of one that is replaced by another tensor the old one stays in use.
    Returns: a tensor that owns them.
    """
    first = layers[0]
    weights = [tensor for layer in layers for tensor in _weights_of(layer)]
    inner = [layer.ffn.w2.in_features for layer in layers]
    router = next((layer.ffn.router for layer in layers if hasattr(layer.ffn, "router")), None)
    shares = (router.chosen, router.norm_topk) if router else (0, True)
    return torch.ops.gpt_eagle.prepare_layers(
        weights, first.attention.heads, inner, *shares, first.ffn_norm.eps
    )


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


class FusedModel:
    """The passes of a `Transformer`, from tokens to features."""

    def __init__(self, model: nn.Module):
        self.prepared = prepare(model.layers)
        weights = (model.embedding.weight, model.rope_freq, model.norm.weight)
        self.parts = (*(weight.detach() for weight in weights), model.config.rope_factor)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        window: Any,
        aux_layers: tuple[int, ...],
    ) -> Tensor:
        """Run over T rows. Arguments as for `Transformer.forward`. Writes: the cache at `window.slots`.

        Returns: [B, T, (1 + aux_layers) F].
        """
        return torch.ops.gpt_eagle.model(
            tokens, positions, self.prepared, *self.parts, cache.k, cache.v, *window, aux_layers
        )


class FusedHead:
    """The passes of an `EagleHead`."""

    def __init__(self, head: nn.Module, embedding: Tensor):
        """embedding: [V, F], the head's or the target's"""
        norms = ("norm", "embedding_norm", "hidden_norm", "input_norm")
        fc = head.fc.operands() if hasattr(head.fc, "operands") else (None, None, None)
        of_taps = [norm.weight for norm in getattr(head, "fc_norm", ())]
        weights = [getattr(getattr(head, name, None), "weight", None) for name in norms]
        weights = [
            embedding,
            head.rope_freq,
            *weights,
            *fc,
            *of_taps,
        ]  # in the order of `Part` in layers.cpp
        three = head.config.eagle3
        self.prepared = prepare(head.layers)
        self.parts = [None if weight is None else weight.detach() for weight in weights]
        self.kind = (head.config.model.rope_factor, bool(three and three.norm_before_residual))
        self.inputs = head.fc.in_features if fc[0] is not None else 0

    def step(self, level: Any, out: Tensor, positions: Tensor, cache: Any, window: Any) -> Tensor:
        """Run over the nodes of a level. Arguments as for `TreeDrafter.step`. Writes: the cache at `window.slots`.

        Returns: [B, R, F].
        """
        return torch.ops.gpt_eagle.head_step(
            level.tokens,
            out,
            level.parent,
            positions,
            self.prepared,
            self.parts,
            *self.kind,
            cache.k,
            cache.v,
            *window,
        )

    def extend(self, state: Any, rows: Any) -> tuple[Tensor, Tensor]:
        """Confirm rows, as `EagleDrafter.extend` does. Writes: the cache. Returns: hidden [B, 1, F]; length [B]."""
        inputs = (rows.tokens, rows.features, rows.count, state.length, state.hidden)
        return torch.ops.gpt_eagle.head_extend(
            *inputs,
            self.prepared,
            self.parts,
            *self.kind,
            self.inputs,
            state.cache.k,
            state.cache.v,
        )
