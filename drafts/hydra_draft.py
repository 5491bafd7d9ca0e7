"""Hydra's heads: head i sees a feature and the embeddings of the i + 1 tokens behind it.

1. A head is an MLP of residual blocks over the concatenation (feature, root, drafted tokens), and
   an LM head: its own, or the target's. Its first block maps that to the width of a feature by a
   linear residual R x + SiLU(W x).
2. A tree grows level by level (`TreeDrafter`). The output of a node is the input of its children's
   head, so its width gives the level; nothing but concatenation runs per node.
3. Hydra++ adds a layer of causal attention over the text's features (prefix attention). The heads
   then take its last output in place of the feature, and `extend` fills its cache.

Source: Hydra (arXiv 2402.05109), sections 3 and 4.
Not here: heads with attention among drafted tokens (the official `cross-attn` and `eagle-attn`);
the files (files/token_heads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_tree import DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, TreeDrafter
from drafts.level_draft import head_options, last_of, score_with, tree_of
from drafts.medusa_draft import FeatureState, empty_feature
from eagle_draft import EagleState
from files.checkpoint import WeightFiles, saved_quantization
from files.token_heads import TokenHeads, hydra_names, is_unused, read_hydra
from kv_cache import KVCache, Window, causal_window
from model import Layer, RotaryEmbeddings, Transformer, run_layers, windows_of
from quantize import Linear, Quantization, Storage, load_weights
from reference import TORCH, Backend, use_backend
from run.draft_method import DraftMethod, method_of
from run.options import GenerateConfig
from runtime import replace_fields
from steps import Rows, add_modules, run_steps


class HydraHeads(nn.Module):
    """The MLPs of all heads, their LM heads, and the prefix layer of Hydra++."""

    backend: Backend = TORCH  # as the target's

    def __init__(self, config: TokenHeads):
        super().__init__()
        self.config = config
        dim = config.dim
        deeper = config.layers - 1
        self.mlps = nn.ModuleList()
        self.lm_heads = nn.ModuleList()
        for i in range(config.heads):
            first = Linear((i + 2) * dim, 2 * dim)  # W above R
            self.mlps.append(nn.ModuleList([first, *(Linear(dim, dim) for _ in range(deeper))]))
            if config.own_lm_heads:
                self.lm_heads.append(Linear(dim, config.vocab_size, fp32_out=True))
        self.prefix = None
        if config.prefix:
            self.prefix = nn.ModuleList([Layer(config.prefix.layer(0))])
            self.last = config.prefix.last()
            add_modules(self, self.last)
            self.ropes = RotaryEmbeddings(config.prefix.ropes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of a level's LM head: [..., (i + 2) F] -> [..., F], level i."""
        first, *deeper = self.mlps[self.level(x)]
        y, residual = first(x).chunk(2, -1)
        x = residual + F.silu(y)
        for block in deeper:
            x = x + F.silu(block(x))
        return x

    def level(self, x: Tensor) -> int:
        """Return the level of a node's children by the width of its output."""
        return x.shape[-1] // self.config.dim - 2

    def attend(self, features: Tensor, positions: Tensor, cache: Any, window: Any) -> Tensor:
        """Run the prefix layer. Writes: the cache at `window.slots`.

        features: [B, T, F]; positions: [B, T] int64
        Returns: [B, T, F].
        """
        windows = windows_of((), window, self.backend)
        rows = Rows(features, ropes=self.ropes(positions), windows=windows)
        rows, _ = run_layers(self.prefix, rows, cache)
        return run_steps(self.last, self, rows).h


class HydraDrafter(TreeDrafter):
    """Drafts static or dynamic trees with `HydraHeads`."""

    def __init__(
        self,
        heads: HydraHeads,
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
        self.layers = heads.prefix
        self.target = target
        self.embedding = target.embedding
        self.lm_head = lm_head or target.lm_head

    def init(self, batch: int, slots: int) -> FeatureState | EagleState:
        """Make an empty state: the last feature, or the prefix layer's cache and last output."""
        state = empty_feature(self.target, batch)
        if not self.heads.prefix:
            return state
        hidden = state.hidden
        config = self.heads.config.prefix
        cache = KVCache.empty(config, batch, slots, hidden.dtype, str(hidden.device))
        return EagleState(cache, state.length, hidden)

    def extend(
        self, state: FeatureState | EagleState, update: DrafterUpdate
    ) -> FeatureState | EagleState:
        """Read the confirmed tokens. Writes: slots length .. length + R - 1 of the prefix layer."""
        length = state.length + update.count
        if not self.heads.prefix:
            hidden = last_of(update.features, update.count, state.hidden)
            return FeatureState(length, hidden)
        window = causal_window(state.length, update.features.shape[1], backend=self.backend)
        out = self.heads.attend(update.features, window.slots, state.cache, window)
        hidden = last_of(out, update.count, state.hidden)
        return replace_fields(state, length=length, hidden=hidden)

    def rewind(self, state: FeatureState | EagleState, length: Tensor) -> FeatureState | EagleState:
        """Forget all but the first `length` tokens."""
        return replace_fields(state, length=length)

    def root_output(
        self, state: FeatureState | EagleState, inputs: DraftInputs
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(inputs.text.root[:, None])
        rows = torch.cat((state.hidden, embedded.to(state.hidden.dtype)), -1)  # [B, 1, 2F]
        return rows, state.length

    def forward_nodes(
        self, state: Any, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        index = frontier.parent[:, :, None].expand(-1, -1, out.shape[2])
        embedded = self.embedding(frontier.tokens)
        return torch.cat((out.gather(1, index), embedded.to(out.dtype)), -1)  # [B, R, F more]

    def logits(self, out: Tensor) -> Tensor:
        x = self.heads(out)  # [B, R, F]
        if not self.heads.config.own_lm_heads:
            return self.lm_head(x)
        return self.heads.lm_heads[self.heads.level(out)](x)


def load_heads(path: Path, target: Transformer, quant: Quantization | None = None) -> HydraHeads:
    """Load Hydra's heads for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError for heads of another target, or broken files.
    """
    weight = target.norm.weight
    files = WeightFiles(path)
    config = read_hydra(files, target.config)
    with torch.device("meta"):
        heads = HydraHeads(config)
    storage = Storage(weight.dtype, str(weight.device), saved_quantization(files.config) or quant)
    load_weights(heads, files, hydra_names(config), storage, is_unused)
    if config.prefix:
        heads.ropes = RotaryEmbeddings(config.prefix.ropes, weight.device)
    use_backend(heads, target.backend)
    return heads.eval()


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft hydra`. Raises: ValueError for heads or a tree that do not fit."""
    path = Path(config.head)
    quant, options = head_options(target, config)
    heads = load_heads(path, target, quant)
    tree = tree_of(config, heads.config.heads, path)
    lm_head = score_with(heads, target, quant)
    return method_of(HydraDrafter(heads, target, tree, lm_head, **options))
