"""A forward pass of a model, or of a draft head, in one C++ call on a CPU (layers.cpp).

It computes the same as model.py's modules, with weights in bfloat16, int8, int4 or GGUF blocks:
rows in fp32, bfloat16 in the cache and in features. Any of the layers may be mixtures of experts.
One call replaces hundreds of small operators. Other dtypes, gradients, other devices and machines
without a C++ compiler are left to the modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ops.library import has_cpu_operators

# of operators that a pass consists of
FAMILIES = ("attention", "experts", "fused", "norm", "products", "rotary")


def fits(layers: Sequence[nn.Module]) -> bool:
    """Check that the C++ operators can run these blocks of model.py."""
    weight = layers[0].ffn_norm.weight
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    formats = [getattr(layer.attention.wo, "format", "none") for layer in layers]
    known = all(name in ("none", "int8", "int4", "blocks") for name in formats)
    known = known and layers[0].attention.head_dim % 16 == 0
    return on_cpu and known and has_cpu_operators(*FAMILIES)


def prepare(layers: Sequence[nn.Module]) -> Tensor:
    """Pass the layers' weights to the operators once, so that no step passes them one by one.

    Weights may change in place afterwards. If a module replaces one by another tensor, the old one
    stays in use.
    Returns: a tensor that owns the weights.
    """
    first = layers[0]
    weights = [tensor for layer in layers for tensor in _weights_of(layer)]
    inner = [layer.ffn.w2.in_features for layer in layers]
    chosen = 0
    norm_topk = True
    router = next((layer.ffn.router for layer in layers if hasattr(layer.ffn, "router")), None)
    if router:
        chosen = router.chosen
        norm_topk = router.norm_topk
    return torch.ops.gpt_eagle.prepare_layers(
        weights, first.attention.heads, inner, chosen, norm_topk, first.ffn_norm.eps
    )


def _weights_of(layer: nn.Module) -> list[Tensor | None]:
    """Return a layer's weights in the order of `layer_of` in layers.cpp."""
    attention = layer.attention
    ffn = layer.ffn
    attention_norm = getattr(layer.attention_norm, "weight", None)  # None in a head's first layer
    q_norm, k_norm, _ = attention.head_norms or (None, None, 0.0)
    router = ffn.router.weight if hasattr(ffn, "router") else None
    return [
        attention_norm,
        *attention.wqkv.operands(),
        q_norm,
        k_norm,
        *attention.wo.operands(),
        layer.ffn_norm.weight,
        router,
        *ffn.w13.operands(),
        *ffn.w2.operands(),
    ]


def embedding_operands(embedding: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return an embedding's weight, [V, F], or its packed blocks; the blocks' table, or None."""
    table = getattr(embedding, "table", None)
    return embedding.weight.detach() if table is None else embedding.data, table


class FusedModel:
    """The forward pass of a `Transformer`, from tokens to features."""

    def __init__(self, model: nn.Module):
        self.prepared = prepare(model.layers)
        self.parts = (
            *embedding_operands(model.embedding),
            model.rope_freq,
            model.norm.weight.detach(),
            model.config.rope_factor,
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        window: Any,
        aux_layers: tuple[int, ...],
    ) -> Tensor:
        """Run T tokens; arguments as for `Transformer.forward`.

        Writes: the cache at `window.slots`.
        Returns: [B, T, (1 + aux_layers) F].
        """
        return torch.ops.gpt_eagle.model(
            tokens, positions, self.prepared, *self.parts, cache.k, cache.v, *window, aux_layers
        )


class FusedHead:
    """The forward passes of an `EagleHead`."""

    def __init__(self, head: nn.Module, embedding: nn.Module):
        """Pass the head's weights to the operators. embedding: the head's or the target's"""
        names = ("norm", "embedding_norm", "hidden_norm", "input_norm")
        norms = [getattr(getattr(head, name, None), "weight", None) for name in names]
        fc = head.fc.operands() if hasattr(head.fc, "operands") else (None, None, None)
        aux_norms = [norm.weight for norm in getattr(head, "fc_norm", ())]
        # in the order of `Part` in layers.cpp
        weights = [*embedding_operands(embedding), head.rope_freq, *norms, *fc, *aux_norms]
        eagle3 = head.config.eagle3
        self.prepared = prepare(head.layers)
        self.parts = [None if weight is None else weight.detach() for weight in weights]
        normed_residual = bool(eagle3 and eagle3.norm_before_residual)
        self.kind = (head.config.model.rope_factor, normed_residual)
        self.inputs = head.fc.in_features if fc[0] is not None else 0

    def step(self, level: Any, out: Tensor, positions: Tensor, cache: Any, window: Any) -> Tensor:
        """Run the nodes of a level; arguments as for `TreeDrafter.forward_nodes`.

        Writes: the cache at `window.slots`.
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
        """Process accepted tokens as `EagleDrafter.extend` does.

        Writes: the cache.
        Returns: hidden [B, 1, F]; length [B].
        """
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
