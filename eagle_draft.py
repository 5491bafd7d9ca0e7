"""The EAGLE draft head (versions 1 and 2 share their weights) and its drafter.

How it works:
1. Row j of the head pairs the target's feature f_j with the token x_{j+1} and sits at position j. Its output
   predicts f_{j+1}; the target's LM head turns that into the distribution of x_{j+2}.
2. `extend` feeds the rows that the target has confirmed, padded to a static number; only these stay below the
   cache's length. The last output is kept: it is the root's prediction.
3. The tree grows on predicted features (grow.py), in scratch slots above the length, which are thrown away.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858); weights in the SafeAILab layout.
Trade-off: extending and drafting are separate passes, because features may come from a prefill as well.
Not here: version 3 heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import layers_cpu
from config import GenerateConfig
from draft_tree import StaticTree
from draft_vocab import DraftVocab, rows_of, vocab_from
from drafters import CATCH_UP, DRAFTERS, Drafter, Root, RootOnly, Rows, Text
from grow import DynamicTree, Grower, children_from, tree_from
from model import (
    Block,
    KVCache,
    Linear,
    ModelConfig,
    Transformer,
    Window,
    causal_window,
    read_json,
    rope_angles,
    rope_frequencies,
)
from quantize import FORMATS, Quantization, QuantLinear, check_group, draft_quantization
from sampling import Sampling
from stand_in import InflatedFiles, Shape, inflate_head
from weights import Storage, WeightFiles, layer_names, load_weights

DRAFT_INPUTS = "feature&shifted"  # what a row sees, in the words of EAGLE-1 figure 8; key `draft_inputs` (ours)


@dataclass(frozen=True)
class EagleConfig:
    """What the head's own `config.json` says; nothing is taken from the target."""

    model: ModelConfig  # dims, KV heads, eps, RoPE base of the head's layer
    fc_bias: bool = True  # key `bias`; absent means True
    sharpness: float = 1.0  # key `draft_sharpness` (ours): c above

    @staticmethod
    def from_dir(path: Path, raw: dict | None = None) -> EagleConfig:
        """Read `path/config.json`, or take `raw` for its content.

        Raises: ValueError for a missing or broken file or key.
        """
        raw = raw or read_json(path / "config.json")
        try:
            # heads name the target's architecture; whatever it is, the head's layer is a LLaMA layer
            model = ModelConfig.from_dict(raw, "LlamaForCausalLM")
        except KeyError as missing:
            raise ValueError(f"{path / 'config.json'}: the key {missing} is missing") from None
        if raw.get("draft_inputs", DRAFT_INPUTS) != DRAFT_INPUTS:
            raise ValueError(
                f"{path}: the head was trained on {raw['draft_inputs']}; only {DRAFT_INPUTS} can draft here"
            )
        qkv_bias = bool(raw.get("qkv_bias", False))
        return EagleConfig(
            replace(model, qkv_bias=qkv_bias, o_bias=False, mlp_bias=False),
            fc_bias=bool(raw.get("bias", True)),
            sharpness=float(raw.get("draft_sharpness", 1.0)),
        )


class EagleLayer(Block):
    """A transformer layer; the first of a head has no norm before its attention."""

    def __init__(self, config: ModelConfig, first: bool):
        super().__init__(config)
        if first:
            self.attention_norm = nn.Identity()


class EagleHead(nn.Module):
    """fc(embedding, feature), then the layers. The embedding and the LM head are the target's."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        dim = config.model.dim
        self.fc = Linear(2 * dim, dim, bias=config.fc_bias)
        self.layers = nn.ModuleList(EagleLayer(config.model, i == 0) for i in range(config.model.n_layers))
        self.register_buffer("rope_freq", rope_frequencies(config.model), persistent=False)  # [E/2] fp32

    def forward(
        self,
        embedded: Tensor,  # [B, T, F], embedding of x_{j+1}
        features: Tensor,  # [B, T, F], f_j, the target's or predicted
        positions: Tensor,  # [B, T] int64, j
        cache: KVCache | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Predict the next features. Writes: the cache at `window.slots`. Returns: [B, T, F]."""
        x = self.fc(torch.cat((embedded, features), dim=-1))  # embedding first
        rope = rope_angles(self.rope_freq, positions)
        if cache is not None and layers_cpu.serves(self.layers, x):
            return layers_cpu.run(self.layers, x, rope, cache, window)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, (cache.k[i], cache.v[i]) if cache is not None else None, window)
        return x


def head_names(config: EagleConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter name -> the official head's tensors."""
    names = {"fc.weight": ("fc.weight",)} | ({"fc.bias": ("fc.bias",)} if config.fc_bias else {})
    for i in range(config.model.n_layers):
        names |= layer_names(f"layers.{i}.", f"layers.{i}.", config.model)
    del names["layers.0.attention_norm.weight"]  # the first layer has no norm before its attention
    return names


def load_head(
    path: Path, target: Transformer, quant: Quantization | None = None, files: InflatedFiles | None = None
) -> EagleHead:
    """Load an official EAGLE-1 or EAGLE-2 head for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the head's files are quantized already; files: the stand-in to build instead
    Raises: ValueError for a head of another version or another target, or broken files.
    """
    config = EagleConfig.from_dir(path, files.config if files else None)
    files = files or WeightFiles(path)
    if "midlayer.hidden_norm.weight" in files.readers or "d2t" in files.readers:
        raise ValueError(f"{path} holds an EAGLE-3 head, which is not supported yet; use an EAGLE-1 or EAGLE-2 head")
    for what, ours, theirs in (
        ("hidden_size", config.model.dim, target.config.dim),
        ("vocab_size", config.model.vocab_size, target.config.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(f"{path}: {what} is {ours}, the target's is {theirs}; use the head made for this target")
    weight = target.embedding.weight
    with torch.device("meta"):
        head = EagleHead(config)
    # official files repeat the target's embedding
    names, ignored = head_names(config), lambda name: name.endswith(("embed_tokens.weight", "rotary_emb.inv_freq"))
    storage = Storage(weight.dtype, str(weight.device), config.model.quant or quant)
    load_weights(head, files, names, storage, ignored)
    head.rope_freq = rope_frequencies(config.model, weight.device)
    return head.eval()


# --------------------------------------------------------------------------------------------- drafting


class EagleState(NamedTuple):
    """What the head knows. Rows below `length` come from true features only."""

    cache: KVCache
    length: Tensor  # [B] int64, confirmed rows
    hidden: Tensor  # [B, F], output of the last confirmed row: the root's prediction
    held: Tensor | None = None  # [B, HOLD, F], features put off, row j at j % HOLD; where the tree's size may change
    kept: Tensor | None = None  # [B] int64, how many of them


class EagleDrafter(Grower):
    """Drafts static or dynamic trees with an `EagleHead`."""

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        rule: Sampling,
        children: str = "noise",
        sharpness: float | None = None,
        lm_head: nn.Module | None = None,
        vocab: DraftVocab | None = None,
    ):
        """sharpness: None is what the head was fitted with; lm_head: what turns features into drafted tokens, where
        it is not the target's own; the others as in `Grower`
        """
        super().__init__(target, tree, rule, children, head.config.sharpness if sharpness is None else sharpness, vocab)
        self.head, self.embedding, self.lm_head = head, target.embedding, lm_head or target.lm_head
        layers_cpu.keep(head.layers)

    def init(self, batch: int, slots: int) -> EagleState:
        """An empty state; the cache has room for a draft behind `slots`."""
        weight, config = self.embedding.weight, self.head.config.model
        cache = KVCache.empty(config, batch, slots + self.scratch, weight.dtype, str(weight.device))
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        hidden = torch.zeros(batch, config.dim, dtype=weight.dtype, device=weight.device)
        if not self.hold:
            return EagleState(cache, length, hidden)
        return EagleState(cache, length, hidden, hidden.new_zeros(batch, self.hold, config.dim), length.clone())

    def extend(self, state: EagleState, rows: Rows) -> EagleState:
        """Confirm `rows.count` rows. Writes: cache slots length .. length + R - 1 (padding included)."""
        window = causal_window(state.length, rows.features.shape[1])
        out = self.step(state, rows.tokens[:, 1:], rows.features, window.slots, window)
        last = (rows.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        hidden = torch.where(rows.count[:, None] > 0, out.gather(1, last).squeeze(1), state.hidden)
        return state._replace(length=state.length + rows.count, hidden=hidden)

    def rewind(self, state: EagleState, length: Tensor) -> EagleState:
        """Forget all but the first `length` rows, and what was put off."""
        return state._replace(length=length, kept=torch.zeros_like(length) if self.hold else None)

    def resting(self) -> Drafter:
        return Resting()

    def catch_up(self, state: EagleState, text: Text) -> EagleState:
        """Confirm rows that were put off. Writes: cache slots length .. length + CATCH_UP - 1."""
        span = state.length[:, None] + torch.arange(CATCH_UP + 1, device=state.length.device)  # [B, CATCH_UP + 1]
        tokens = text.tokens.gather(1, span.clamp(max=text.tokens.shape[1] - 1))
        places = (span[:, :-1] % self.hold)[:, :, None].expand(-1, -1, state.held.shape[2])
        count = state.kept.clamp(max=CATCH_UP)
        state = self.extend(state, Rows(tokens, state.held.gather(1, places), count))
        return state._replace(kept=state.kept - count)

    def begin(self, state: EagleState, root: Root) -> tuple[Tensor, Tensor]:
        return state.hidden[:, None], state.length

    def step(self, state: EagleState, tokens: Tensor, out: Tensor, positions: Tensor, window: Window) -> Tensor:
        return self.head(self.embedding(tokens), out, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(out)


class Resting(RootOnly):
    """Vanilla decoding beside a head: the features are kept for it, and it does not run."""

    def extend(self, state: EagleState, rows: Rows) -> EagleState:
        """Put off a row. Writes: state.held."""
        row = (state.length + state.kept) % state.held.shape[1]  # [B]
        at = row[:, None, None].expand_as(rows.features)  # [B, 1, F]
        state.held.scatter_(1, at, rows.features)
        return state._replace(kept=state.kept + rows.count)


def draft_lm_head(target: Transformer, quant: Quantization | None, ids: Tensor | None = None) -> nn.Module:
    """The target's LM head, or a copy of it in the draft's own format or with the rows of some tokens only.

    ids: [N] int64, the tokens to keep; None: all
    """
    # first, since rows are rounded one by one: their codes are the same, and fewer are computed
    own = target.lm_head if ids is None else rows_of(target.lm_head, ids)
    if quant is None or (
        isinstance(own, QuantLinear) and own.format == quant.format and own.group_size in (0, quant.group_size)
    ):
        return own
    check_group(quant, "the draft's copy of lm_head", own.in_features)
    weight = own.dequantize() if isinstance(own, QuantLinear) else own.weight
    return FORMATS[quant.format].from_float(weight, None, quant.group_size, wide=True)


def _inflated(target: Transformer, config: GenerateConfig) -> InflatedFiles:
    path, weight = Path(config.eagle), target.embedding.weight
    small, shape = EagleConfig.from_dir(path).model, Shape.parse(config.inflate)
    return inflate_head(path, small, shape, weight.dtype, str(weight.device), config.random_twin)


def make_drafter(target: Transformer, config: GenerateConfig) -> EagleDrafter:
    """`--draft eagle` and `eagle+ngram`. Raises: ValueError for a head or a tree that does not fit."""
    quant = draft_quantization(config)
    head = load_head(Path(config.eagle), target, quant, _inflated(target, config) if config.inflate else None)
    tree, vocab = tree_from(config), vocab_from(config, target.config.vocab_size, head.rope_freq.device)
    lm_head = draft_lm_head(target, head.config.model.quant or quant, vocab.ids)
    children = children_from(config, tree)
    drafter = EagleDrafter(head, target, tree, config.sampling, children, config.sharpness or None, lm_head, vocab)
    return drafter.sized_by_host() if config.tree_shape == "auto" else drafter


DRAFTERS["eagle"] = DRAFTERS["eagle+ngram"] = make_drafter
