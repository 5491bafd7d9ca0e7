"""--draft eagle: a head, its drafter, and an LM head in the draft's format.

Not here: the head (eagle_draft.py), its files (files/heads.py), looked-up tokens in its trees
(drafts/ngram_draft.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from eagle_draft import EagleDrafter, load_head
from model import Transformer
from options import load_part
from quantize import FORMATS, Linear, Quantization, fit_group
from reference import TORCH, Backend
from run.observer import DraftMethod, method_of


def linear_of(
    weight: Any, bias: Tensor | None = None, fp32_out: bool = False, backend: Backend = TORCH
) -> Linear:
    """Make a layer of a weight that is not trained: packed, or [N, K] or [E, N, K] numbers."""
    if isinstance(weight, Tensor):
        *experts, N, K = weight.shape
        layer = Linear(K, N, False, *experts or [0], fp32_out, "meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
    else:
        layer = Linear(weight.inputs, weight.outputs, False, weight.experts, fp32_out, "meta")
        layer.pack(weight)
    layer.backend = backend
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def rows_of(layer: Linear, ids: Tensor) -> Linear:
    """Return a layer with some of the outputs, in their codes where they can be. ids: [R]"""
    bias = None if layer.bias is None else layer.bias.detach()[ids]
    weight = layer.record.take(ids) if layer.packed else layer.weight.detach()[ids]
    return linear_of(weight, bias, layer.fp32_out, layer.backend)


def draft_lm_head(
    model: nn.Module, quant: Quantization | None, ids: Tensor | None = None
) -> nn.Module:
    """Return a model's LM head, or a copy in the draft's format or with some tokens' rows only.

    ids: [Vd] int64, the tokens to keep; None: all
    """
    # first, since rows are rounded one by one: their codes are the same, and fewer are computed
    own = model.lm_head
    if ids is not None:
        own = rows_of(own, ids)
    if quant is None or quant.is_blocks:  # blocks are a file's own
        return own
    if own.format == quant.format:
        fits = own.format == "int8" or own.group_size == (quant.group_size or own.group_size)
        if fits:
            return own
    quant = fit_group(quant, {"the draft's copy of lm_head": own.in_features})
    weight = FORMATS[quant.format].round(own.dequantize(), quant.group_size)
    return linear_of(weight, fp32_out=True, backend=own.backend)


def load_method(target: Transformer, config: Any, tokenizer: Any) -> DraftMethod:
    """Load `--draft eagle`. config: the options. Raises: ValueError for what does not fit."""
    quant = Quantization.of(config.quant_draft, config.group_size)
    head = load_head(Path(config.head), target, quant, form=config.quant_draft)
    if head.lm_head:  # it has no rows for other tokens
        lm_head = draft_lm_head(head, head.quant)
    else:
        lm_head = draft_lm_head(target, head.quant, head.vocab.ids if head.vocab else None)
    kind = EagleDrafter
    if head.config.eagle3 and head.config.eagle3.mask_token is not None:
        kind = load_part("extension", "parallel eagle")
    drafter = kind(head, target, config.draft_tree, lm_head, children=config.child_rule)
    return method_of(drafter)
