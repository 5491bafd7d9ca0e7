"""Medusa's and Hydra's heads: one head per level of a tree, over the target's last feature.

1. Medusa: head i predicts the token i + 2 places behind the feature, whatever lies between. It is
   residual blocks x + SiLU(W x + b). All levels follow at once (`LevelDrafter`), so nothing runs
   while the tree grows; the first blocks of all heads are one matmul.
2. Hydra: head i sees the feature and the embeddings of the i + 1 tokens behind it, side by side.
   Its first block maps them to the width of a feature by R x + SiLU(W x). The output of a node is
   the input of its children's head, so its width gives the level; a node only concatenates.
3. Hydra++ adds a layer of causal attention over the text's features (prefix attention). The heads
   then take its last output in place of the feature, and `extend` fills its cache.
4. LM heads are the heads' own, or the target's.

Sources: Medusa (arXiv 2401.10774), sections 2.1 and 2.3; Hydra (arXiv 2402.05109), 3 and 4.
Not here: typical acceptance, which changes the output; Hydra's heads with attention among drafted
tokens (the official `cross-attn` and `eagle-attn`); the files (files/token_heads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_tree import DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, TreeDrafter
from drafts.level_draft import LevelDrafter, head_options, last_of, tree_of
from eagle_draft import EagleState, fill
from files.checkpoint import WeightFiles, saved_quantization
from files.head_kinds import head_kind
from files.token_heads import TokenHeads, is_unused, read_token_heads
from kv_cache import KVCache, Window, causal_window
from model import Layer, Transformer, run_layers, windows_of
from quantize import Linear, Quantization
from reference import TORCH, Backend
from run.heads import draft_lm_head
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig
from runtime import replace_fields
from steps import Rows, add_modules, run_steps


class Heads(nn.Module):
    """The blocks behind the first one of all heads, and their LM heads."""

    vocab = None  # all tokens are drafted

    def __init__(self, config: TokenHeads):
        super().__init__()
        self.config = config
        self.prefix: nn.ModuleList | None = None
        dim = config.model.dim
        every = range(config.heads)
        self.deeper = nn.ModuleList(
            nn.ModuleList(Linear(dim, dim) for _ in range(config.layers - 1)) for _ in every
        )
        bias = config.kind == "hydra"
        lm_heads = every if config.own_lm_heads else ()
        self.lm_heads = nn.ModuleList(
            Linear(dim, config.model.vocab_size, bias, fp32_out=True) for _ in lm_heads
        )

    def finish(self, x: Tensor, head: int) -> Tensor:
        """Run the blocks of a head behind its first one: [..., F] -> [..., F]."""
        for block in self.deeper[head]:
            x = x + F.silu(block(x))
        return x


class MedusaHeads(Heads):
    """Medusa's heads."""

    def __init__(self, config: TokenHeads):
        super().__init__(config)
        self.first = Linear(config.model.dim, config.heads * config.model.dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return the input of every LM head: [..., F] -> [..., D, F]."""
        x = self.first(features).unflatten(-1, (self.config.heads, -1))  # [..., D, F]
        x = features[..., None, :] + F.silu(x)
        return torch.stack([self.finish(one, i) for i, one in enumerate(x.unbind(-2))], -2)


class HydraHeads(Heads):
    """Hydra's heads, and the prefix layer of Hydra++."""

    backend: Backend = TORCH  # as the target's

    def __init__(self, config: TokenHeads):
        super().__init__(config)
        dim = config.model.dim
        self.first = nn.ModuleList(  # W above R
            Linear((i + 2) * dim, 2 * dim) for i in range(config.heads)
        )
        if config.prefix:
            self.prefix = nn.ModuleList([Layer(config.model.layer(0))])
            self.last = config.model.last()
            add_modules(self, self.last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of a level's LM head: [..., (i + 2) F] -> [..., F], level i."""
        level = self.level(x)
        y, residual = self.first[level](x).chunk(2, -1)
        return self.finish(residual + F.silu(y), level)

    def level(self, x: Tensor) -> int:
        """Return the level of a node's children by the width of its output."""
        return x.shape[-1] // self.config.model.dim - 2

    def attend(self, features: Tensor, positions: Tensor, cache: Any, window: Any) -> Tensor:
        """Run the prefix layer. Writes: the cache at `window.slots`.

        features: [B, T, F]; positions: [B, T] int64
        Returns: [B, T, F].
        """
        windows = windows_of((), window, self.backend)
        rows = Rows(features, ropes=self.ropes(positions), windows=windows)
        rows, _ = run_layers(self.prefix, rows, cache)
        return run_steps(self.last, self, rows).h


class FeatureState(NamedTuple):
    """The last confirmed token's feature."""

    length: Tensor  # [B] int64, confirmed tokens
    hidden: Tensor  # [B, 1, F]


class TokenDrafter(TreeDrafter):
    """Drafts static or dynamic trees with `Heads`."""

    def __init__(
        self,
        heads: Heads,
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

    def init(self, batch: int, slots: int) -> FeatureState:
        """Make the state before any token."""
        weight = self.target.norm.weight
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        return FeatureState(length, weight.new_zeros(batch, 1, len(weight)))

    def extend(self, state: FeatureState, update: DrafterUpdate) -> FeatureState:
        hidden = last_of(update.features, update.count, state.hidden)
        return FeatureState(state.length + update.count, hidden)

    def rewind(self, state: Any, length: Tensor) -> Any:
        """Forget all but the first `length` tokens."""
        return replace_fields(state, length=length)


class MedusaDrafter(TokenDrafter, LevelDrafter):
    """Drafts with `MedusaHeads`."""

    def level_scores(self, state: FeatureState, inputs: DraftInputs) -> Tensor:
        x = self.heads(state.hidden).squeeze(1)[:, : self.tree.depth]  # [B, D, F]
        if not self.heads.config.own_lm_heads:
            return self.lm_head(x)
        return torch.cat([head(row) for head, row in zip(self.heads.lm_heads, x.split(1, 1))], 1)


class HydraDrafter(TokenDrafter):
    """Drafts with `HydraHeads`. With a prefix layer its state is an `EagleState`."""

    def init(self, batch: int, slots: int) -> FeatureState | EagleState:
        """Make an empty state: the last feature, or the prefix layer's cache and last output."""
        state = super().init(batch, slots)
        if not self.heads.prefix:
            return state
        hidden = state.hidden
        config = self.heads.config.model
        cache = KVCache.empty(config, batch, slots, hidden.dtype, str(hidden.device))
        return EagleState(cache, state.length, hidden)

    def extend(
        self, state: FeatureState | EagleState, update: DrafterUpdate
    ) -> FeatureState | EagleState:
        """Read the confirmed tokens. Writes: slots length .. length + R - 1 of the prefix layer."""
        if not self.heads.prefix:
            return super().extend(state, update)
        window = causal_window(state.length, update.features.shape[1], backend=self.backend)
        out = self.heads.attend(update.features, window.slots, state.cache, window)
        hidden = last_of(out, update.count, state.hidden)
        return replace_fields(state, length=state.length + update.count, hidden=hidden)

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

    def logits(self, out: Tensor, level: int) -> Tensor:
        x = self.heads(out)  # [B, R, F]
        if not self.heads.config.own_lm_heads:
            return self.lm_head(x)
        return self.heads.lm_heads[self.heads.level(out)](x)


def make_heads(config: TokenHeads) -> Heads:
    """Make heads of either kind."""
    return MedusaHeads(config) if config.kind == "medusa" else HydraHeads(config)


def load_heads(path: Path, target: Transformer, quant: Quantization | None = None) -> Heads:
    """Load heads of either kind for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError for heads of another target, or broken files.
    """
    files = WeightFiles(path)
    config = read_token_heads(files, head_kind(path), target.config)
    with torch.device("meta"):
        heads = make_heads(config)
    quant = saved_quantization(files.config) or quant
    fill(heads, target, files, config.names(), quant, is_unused)
    return heads


def drafter_of(
    heads: Heads, target: Transformer, tree: DynamicTree | StaticTree, *more: Any, **options: Any
) -> TokenDrafter:
    """Make the drafter of heads. Operands are those of `TokenDrafter`."""
    kind = MedusaDrafter if isinstance(heads, MedusaHeads) else HydraDrafter
    return kind(heads, target, tree, *more, **options)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft medusa` or hydra. Raises: ValueError for heads or a tree that do not fit."""
    path = Path(config.head)
    quant, options = head_options(target, config)
    heads = load_heads(path, target, quant)
    tree = tree_of(config, heads.config.heads, path)
    lm_head = None if heads.config.own_lm_heads else draft_lm_head(target, quant)
    return method_of(drafter_of(heads, target, tree, lm_head, **options))
