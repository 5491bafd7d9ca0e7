"""Medusa's heads: head i predicts the token i + 2 places behind a feature, whatever lies between.

1. A head is residual blocks x + SiLU(W x + b) over the target's last feature, and an LM head: its
   own, or the target's. Here the first blocks of all heads are one product.
2. All levels of a tree follow from the feature of the last accepted token (`LevelDrafter`), so
   nothing runs while the tree grows, and there is no cache.

Source: Medusa (arXiv 2401.10774), sections 2.1 and 2.3.
Not here: typical acceptance, which changes the output; the files (files/token_heads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_tree import DynamicTree, StaticTree
from drafters import DrafterUpdate, DraftInputs
from drafts.level_draft import LevelDrafter, head_options, last_of, score_with, tree_of
from files.checkpoint import WeightFiles, saved_quantization
from files.token_heads import TokenHeads, is_unused, medusa_names, read_medusa
from model import Transformer
from quantize import Linear, Quantization, Storage, load_weights
from reference import use_backend
from run.draft_method import DraftMethod, method_of
from run.options import GenerateConfig
from runtime import replace_fields


class MedusaHeads(nn.Module):
    """The residual blocks of all heads, and their LM heads."""

    def __init__(self, config: TokenHeads):
        super().__init__()
        self.config = config
        dim = config.dim
        every = range(config.heads)
        self.first = Linear(dim, config.heads * dim)
        self.deeper = nn.ModuleList(
            nn.ModuleList(Linear(dim, dim) for _ in every) for _ in range(config.layers - 1)
        )
        lm_heads = every if config.own_lm_heads else ()
        self.lm_heads = nn.ModuleList(
            Linear(dim, config.vocab_size, bias=False, fp32_out=True) for _ in lm_heads
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the input of every LM head: [..., F] -> [..., D, F]."""
        x = self.first(features).unflatten(-1, (self.config.heads, -1))  # [..., D, F]
        x = features[..., None, :] + F.silu(x)
        for blocks in self.deeper:
            heads = [one + F.silu(block(one)) for one, block in zip(x.unbind(-2), blocks)]
            x = torch.stack(heads, -2)
        return x


class FeatureState(NamedTuple):
    """The last confirmed token's feature."""

    length: Tensor  # [B] int64, confirmed tokens
    hidden: Tensor  # [B, 1, F]


def empty_feature(target: Transformer, batch: int) -> FeatureState:
    """Return the state before any token."""
    weight = target.norm.weight
    length = torch.zeros(batch, dtype=torch.long, device=weight.device)
    return FeatureState(length, weight.new_zeros(batch, 1, len(weight)))


class MedusaDrafter(LevelDrafter):
    """Drafts static or dynamic trees with `MedusaHeads`."""

    def __init__(
        self,
        heads: MedusaHeads,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        lm_head: nn.Module | None = None,
        **options: Any,
    ):
        """Attach heads to a target.

        lm_head: of heads without their own; default: the target's
        options: children and sharpness, as for `TreeDrafter`
        """
        super().__init__(target, tree, **{"sharpness": heads.config.sharpness} | options)
        self.heads = heads
        self.levels = heads.config.heads
        self.target = target
        self.lm_head = lm_head or target.lm_head

    def init(self, batch: int, slots: int) -> FeatureState:
        return empty_feature(self.target, batch)

    def extend(self, state: FeatureState, update: DrafterUpdate) -> FeatureState:
        hidden = last_of(update.features, update.count, state.hidden)
        return FeatureState(state.length + update.count, hidden)

    def rewind(self, state: FeatureState, length: Tensor) -> FeatureState:
        """Forget all but the first `length` tokens."""
        return replace_fields(state, length=length)

    def level_scores(self, state: FeatureState, inputs: DraftInputs) -> Tensor:
        x = self.heads(state.hidden).squeeze(1)[:, : self.tree.depth]  # [B, D, F]
        if not self.heads.config.own_lm_heads:
            return self.lm_head(x)
        return torch.cat([head(row) for head, row in zip(self.heads.lm_heads, x.split(1, 1))], 1)


def load_heads(path: Path, target: Transformer, quant: Quantization | None = None) -> MedusaHeads:
    """Load Medusa's heads for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError for heads of another target, or broken files.
    """
    weight = target.norm.weight
    files = WeightFiles(path)
    config = read_medusa(files, target.config)
    with torch.device("meta"):
        heads = MedusaHeads(config)
    storage = Storage(weight.dtype, str(weight.device), saved_quantization(files.config) or quant)
    load_weights(heads, files, medusa_names(config), storage, is_unused)
    use_backend(heads, target.backend)
    return heads.eval()


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft medusa`. Raises: ValueError for heads or a tree that do not fit."""
    path = Path(config.head)
    quant, options = head_options(target, config)
    heads = load_heads(path, target, quant)
    tree = tree_of(config, heads.config.heads, path)
    lm_head = score_with(heads, target, quant)
    return method_of(MedusaDrafter(heads, target, tree, lm_head, **options))
