"""--draft eagle: a head, its drafter, and an LM head in the draft's format.

Not here: the head (eagle_draft.py), its files (files/heads.py), looked-up tokens in its trees
(drafts/ngram_draft.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from draft_tree import DynamicTree, StaticTree
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


def load_drafter(
    target: Transformer,
    path: str | Path,
    tree: DynamicTree | StaticTree,
    form: str = "none",
    group_size: int = 0,
    **options: Any,
) -> EagleDrafter:
    """Load a head and its drafter. Raises: ValueError for a head or a tree that does not fit.

    form, group_size: the number format, and the inputs that share a scale
    options: as for `TreeDrafter`
    """
    quant = Quantization.of(form, group_size)
    head = load_head(Path(path), target, quant, form=form)
    if head.lm_head:  # it has no rows for other tokens
        lm_head = draft_lm_head(head, head.quant)
    else:
        lm_head = draft_lm_head(target, head.quant, head.vocab.ids if head.vocab else None)
    kind = EagleDrafter
    if head.config.eagle3 and head.config.eagle3.mask_token is not None:
        kind = load_part("extension", "parallel eagle")
    return kind(head, target, tree, lm_head, **options)


def load_method(target: Transformer, config: Any, tokenizer: Any) -> DraftMethod:
    """Load `--draft eagle`, as `load_drafter`. config: the options. Raises: ValueError."""
    form = (config.quant_draft, config.group_size)
    options = {"children": config.child_rule}
    drafter = load_drafter(target, config.head, config.draft_tree, *form, **options)
    return method_of(drafter)
