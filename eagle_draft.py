"""The EAGLE draft heads and their drafter.

1. Row j of a head pairs the target's feature f_j with the token x_{j+1} and sits at position j. Its output predicts
   f_{j+1}; an LM head turns that into the distribution of x_{j+2}. Versions 1 and 2 share their weights, and take the
   target's LM head. In version 3 the feature fuses inputs of several of the target's layers, the output is a hidden
   state of its own, and the LM head scores a draft vocabulary.
2. `extend` feeds the rows that the target has confirmed, padded to a static number; only these stay below the
   cache's length. The last output is kept: it is the root's prediction.
3. The tree grows on predicted features (`TreeDrafter`), in scratch slots above the length, which are thrown away.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
Trade-off: extending and drafting are separate passes, because features may come from a prefill as well.
Not here: what a head's files say (hf/heads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from checkpoint import Quantization, TensorSource, WeightFiles, saved_quantization
from draft_tree import DynamicTree, Level, StaticTree, replace_fields
from drafters import Confirmed, Root, TreeDrafter
from files import read_json
from hf.heads import (
    EagleConfig,
    HeadFiles,
    draft_lm_head,
    draft_vocab,
    head_names,
    is_unused,
    read_head,
    tell,
)
from hf.weights import Storage, load_weights
from kv_cache import KVCache, Window, causal_window
from model import (
    Block,
    Layers,
    Linear,
    LMHead,
    NoNorm,
    RMSNorm,
    Transformer,
    rope_angles,
    rope_frequencies,
)
from ops.cpu.layers import FusedHead, fits
from options import GenerateConfig
from sampling import Sampling


class EagleHead(nn.Module):
    """Versions 1 and 2: fc(embedding, feature), then the layers."""

    aux_layers: tuple[int, ...] = ()  # see `Drafter`
    fused: FusedHead | None = None  # with --compile on a CPU, what runs in place of `forward`

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config, model = config, config.model
        self.embedding = self.lm_head = self.vocab = None  # the target's
        self.layers = Layers(Block(model) for _ in range(model.n_layers))
        self.layers[0].attention_norm = NoNorm()
        self.norm, self.output_norm = (
            NoNorm(),
            NoNorm(),
        )  # of every output; of what the LM head gets
        self.register_buffer("rope_freq", rope_frequencies(model), persistent=False)  # [E/2] fp32
        if config.eagle3 is None:
            self.fc = Linear(2 * model.dim, model.dim, bias=config.fc_bias)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features as `forward` takes them: [B, T, (1 + aux_layers) F] -> [B, T, F]."""
        return features

    def first(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the residual stream begins, [B, T, F], and what the first attention reads besides, if not that."""
        return self.fc(torch.cat((embedded, features), dim=-1)), None  # embedding first

    def forward(
        self,
        embedded: Tensor,  # [B, T, F], embedding of x_{j+1}
        features: Tensor,  # [B, T, F], of position j: the target's by way of `fuse`, or an output
        positions: Tensor,  # [B, T] int64, j
        cache: KVCache | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Predict the next features. Writes: the cache at `window.slots`. Returns: [B, T, F]."""
        x, h = self.first(embedded, features)
        rope = rope_angles(self.rope_freq, positions, self.config.model.rope_factor)
        return self.layers(x, rope, self.norm, cache, window, h=h)


class Eagle3Head(EagleHead):
    """Version 3: the first attention reads the normed embedding and hidden state side by side."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        model, eagle3, attention = config.model, config.eagle3, self.layers[0].attention
        dim, eps, self.aux_layers = model.dim, model.norm_eps, eagle3.aux_layers
        fused = len(eagle3.aux_layers) * eagle3.target_dim
        attention.wqkv = Linear(2 * dim, attention.wqkv.out_features, bias=model.qkv_bias)
        self.embedding_norm, self.hidden_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        if eagle3.last_norm != "none":
            setattr(self, "norm" if eagle3.last_norm == "fed" else "output_norm", RMSNorm(dim, eps))
        self.input_norm = RMSNorm(fused, eps) if eagle3.norm_before_fc else NoNorm()
        self.fc_norm = nn.ModuleList(
            RMSNorm(eagle3.target_dim, eps) for _ in eagle3.aux_layers if eagle3.fc_norm
        )
        self.fc = Linear(fused, dim, bias=config.fc_bias) if eagle3.aux_layers else NoNorm()
        if eagle3.embedding:
            self.embedding = nn.Embedding.from_pretrained(torch.zeros(model.vocab_size, dim))
        self.lm_head = LMHead(dim, eagle3.draft_vocab, bias=False) if eagle3.lm_head else None

    def fuse(self, features: Tensor) -> Tensor:
        eagle3 = self.config.eagle3
        x = self.input_norm(
            features[..., eagle3.target_dim if eagle3.aux_layers else 0 :]
        )  # [B, T, aux_layers F], or [B, T, F]
        if eagle3.fc_norm:
            x = torch.cat(
                [
                    norm(part)
                    for norm, part in zip(self.fc_norm, x.chunk(len(eagle3.aux_layers), -1))
                ],
                -1,
            )
        return self.fc(x)

    def first(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        normed = self.hidden_norm(features)
        x = normed if self.config.eagle3.norm_before_residual else features
        return x, torch.cat((self.embedding_norm(embedded), normed), dim=-1)  # [B, T, 2F]


def load_head(
    path: Path,
    target: Transformer,
    quant: Quantization | None = None,
    source: TensorSource | None = None,
) -> EagleHead:
    """Load a head for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already; source: tensors that stand for the files
    Raises: ValueError for a head of another target, or broken files.
    """
    files, weight = HeadFiles(path, source or WeightFiles(path)), target.embedding.weight
    config = read_head(files, target.config)
    with torch.device("meta"):
        head = Eagle3Head(config) if config.eagle3 else EagleHead(config)
    head.vocab = draft_vocab(files, config, weight.device)
    storage = Storage(
        weight.dtype, str(weight.device), saved_quantization(files.config, path) or quant
    )
    load_weights(head, files, head_names(config), storage, lambda name: is_unused(name, config))
    head.rope_freq = rope_frequencies(config.model, weight.device)
    if head.embedding is not None and torch.equal(head.embedding.weight, weight):
        head.embedding = None  # one copy is enough
    tell(files, config)
    return head.eval()


# --------------------------------------------------------------------------------------------- drafting


class EagleState(NamedTuple):
    """What the head knows. Rows below `length` come from true features only."""

    cache: KVCache
    length: Tensor  # [B] int64, confirmed rows
    hidden: Tensor  # [B, 1, F], output of the last confirmed row: the root's prediction


class EagleDrafter(TreeDrafter):
    """Drafts static or dynamic trees with an `EagleHead`."""

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        rule: Sampling,
        lm_head: nn.Module | None = None,
        **options: Any,
    ):
        """lm_head: what turns features into drafted tokens, where it is not the target's own

        options: children, sharpness and vocab (default: the head's own), and lookup, as for `TreeDrafter`
        """
        super().__init__(
            target,
            tree,
            rule,
            **{"sharpness": head.config.sharpness, "vocab": head.vocab} | options,
        )
        self.head, self.layers, self.aux_layers = head, head.layers, head.aux_layers
        self.embedding = head.embedding or target.embedding
        self.lm_head = lm_head or head.lm_head or target.lm_head

    def init(self, batch: int, slots: int) -> EagleState:
        """An empty state; the cache has room for a draft behind `slots`."""
        weight, config = self.embedding.weight, self.head.config.model
        cache = KVCache.empty(config, batch, slots + self.scratch, weight.dtype, str(weight.device))
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        hidden = torch.zeros(batch, 1, config.dim, dtype=weight.dtype, device=weight.device)
        return EagleState(cache, length, hidden)

    def fuse(self, whether: bool) -> None:
        """Run the head's passes in one C++ call each, where that is served. Writes: `fused` of the head."""
        whether = whether and fits(self.head.layers)
        self.head.fused = FusedHead(self.head, self.embedding.weight) if whether else None

    def extend(self, state: EagleState, rows: Confirmed) -> EagleState:
        """Confirm `rows.count` rows. Writes: cache slots length .. length + R - 1 (padding included)."""
        if self.head.fused is not None:
            hidden, length = self.head.fused.extend(state, rows)
            return replace_fields(state, length=length, hidden=hidden)
        window = causal_window(state.length, rows.features.shape[1])
        embedded = self.embedding(rows.tokens[:, 1:])
        out = self.head(embedded, self.head.fuse(rows.features), window.slots, state.cache, window)
        last = (rows.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        hidden = torch.where(rows.count[:, None, None] > 0, out.gather(1, last), state.hidden)
        return replace_fields(state, length=state.length + rows.count, hidden=hidden)

    def rewind(self, state: EagleState, length: Tensor) -> EagleState:
        """Forget all but the first `length` rows."""
        return replace_fields(state, length=length)

    def root_output(self, state: EagleState, root: Root) -> tuple[Tensor, Tensor]:
        return state.hidden, state.length

    def forward_nodes(
        self, state: EagleState, level: Level, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        if self.head.fused is not None:
            return self.head.fused.step(level, out, positions, state.cache, window)
        parents = out.gather(1, level.parent[:, :, None].expand(-1, -1, out.shape[2]))  # [B, R, F]
        return self.head(self.embedding(level.tokens), parents, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(self.head.output_norm(out))


def load_drafter(
    target: Transformer, config: GenerateConfig, source: TensorSource | None = None, **options: Any
) -> EagleDrafter:
    """`--draft eagle`. Raises: ValueError for a head or a tree that does not fit.

    source: tensors that stand for the head's files; options: vocab and lookup, as for `TreeDrafter`
    """
    path = Path(config.eagle)
    quant = saved_quantization(source.config if source else read_json(path / "config.json"), path)
    quant = quant or Quantization.of(config.quant_draft, config.group_size)
    head = load_head(path, target, quant, source)
    vocab = options.get("vocab", None if head.lm_head else head.vocab)
    lm_head = draft_lm_head(head if head.lm_head else target, quant, vocab.ids if vocab else None)
    options |= {"sharpness": config.sharpness} if config.sharpness else {}
    return EagleDrafter(
        head,
        target,
        config.draft_tree,
        config.sampling,
        lm_head,
        children=config.child_rule,
        **options,
    )
