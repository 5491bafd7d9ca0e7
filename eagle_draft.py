"""The EAGLE draft head (versions 1 and 2 share their weights) and its drafter.

1. Row j of the head pairs the target's feature f_j with the token x_{j+1} and sits at position j. Its output
   predicts f_{j+1}; the target's LM head turns that into the distribution of x_{j+2}.
2. `extend` feeds the rows that the target has confirmed, padded to a static number; only these stay below the
   cache's length. The last output is kept: it is the root's prediction.
3. The tree grows on predicted features (`TreeDrafter`), in scratch slots above the length, which are thrown away.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858); weights in the SafeAILab layout.
Trade-off: extending and drafting are separate passes, because features may come from a prefill as well.
Not here: version 3 heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from checkpoint import TensorSource, WeightFiles, about, read_fields, read_json
from draft_tree import DynamicTree, StaticTree, changed
from drafters import Root, Rows, TreeDrafter
from hf.config import HeadSaid, config_from
from hf.weights import Storage, layer_names, load_weights
from model import (
    Block,
    KVCache,
    Layers,
    Linear,
    ModelConfig,
    Transformer,
    Window,
    causal_window,
    rope_angles,
    rope_frequencies,
)  # fmt: skip
from options import GenerateConfig
from quantize import FORMATS, Quantization, QuantLinear, fit_group, saved_quantization
from sampling import Sampling

DRAFT_INPUTS = "feature&shifted"  # what a row sees, in the words of EAGLE-1 figure 8; key `draft_inputs` (ours)


@dataclass(frozen=True)
class EagleConfig:
    """What the head's own `config.json` says; nothing is taken from the target."""

    model: ModelConfig  # dims, KV heads, eps, RoPE base of the head's layer
    fc_bias: bool = True  # key `bias`; absent means True
    sharpness: float = 1.0  # key `draft_sharpness` (ours): c in log softmax(c z), see drafters.py

    @staticmethod
    def from_dir(path: Path, raw: dict | None = None) -> EagleConfig:
        """Read `path/config.json`, or take `raw` for its content.

        Raises: ValueError for a missing or broken file or key.
        """
        raw = raw or read_json(path / "config.json")
        with about(path / "config.json"):
            # heads name the target's architecture; whatever it is, the head's layer is a LLaMA layer
            model, said = config_from(raw, "LlamaForCausalLM"), read_fields(raw, HeadSaid)
        if said.draft_inputs != DRAFT_INPUTS:
            raise ValueError(f"{path}: the head was trained on {said.draft_inputs}; only {DRAFT_INPUTS} can draft here")
        model = replace(model, qkv_bias=said.qkv_bias, o_bias=False, mlp_bias=False)
        return EagleConfig(model, fc_bias=said.bias, sharpness=said.draft_sharpness)


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
        self.layers = Layers(EagleLayer(config.model, i == 0) for i in range(config.model.n_layers))
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
        return self.layers(x, rope, cache, window)


def head_names(config: EagleConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter name -> the official head's tensors."""
    names = {"fc.weight": ("fc.weight",)} | ({"fc.bias": ("fc.bias",)} if config.fc_bias else {})
    for i in range(config.model.n_layers):
        names |= layer_names(f"layers.{i}.", f"layers.{i}.", config.model)
    del names["layers.0.attention_norm.weight"]  # the first layer has no norm before its attention
    return names


def load_head(
    path: Path, target: Transformer, quant: Quantization | None = None, source: TensorSource | None = None
) -> EagleHead:
    """Load an official EAGLE-1 or EAGLE-2 head for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already; source: tensors that stand for the files
    Raises: ValueError for a head of another version or another target, or broken files.
    """
    raw = source.config if source else read_json(path / "config.json")
    config, files = EagleConfig.from_dir(path, raw), source or WeightFiles(path)
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
    storage = Storage(weight.dtype, str(weight.device), saved_quantization(raw) or quant)
    load_weights(head, files, names, storage, ignored)
    head.rope_freq = rope_frequencies(config.model, weight.device)
    return head.eval()


# --------------------------------------------------------------------------------------------- drafting


class EagleState(NamedTuple):
    """What the head knows. Rows below `length` come from true features only."""

    cache: KVCache
    length: Tensor  # [B] int64, confirmed rows
    hidden: Tensor  # [B, F], output of the last confirmed row: the root's prediction


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

        options: children, sharpness (default: what the head was fitted with), vocab and lookup, as for `TreeDrafter`
        """
        super().__init__(target, tree, rule, **{"sharpness": head.config.sharpness} | options)
        self.head, self.embedding, self.lm_head = head, target.embedding, lm_head or target.lm_head
        self.layers = head.layers

    def init(self, batch: int, slots: int) -> EagleState:
        """An empty state; the cache has room for a draft behind `slots`."""
        weight, config = self.embedding.weight, self.head.config.model
        cache = KVCache.empty(config, batch, slots + self.scratch, weight.dtype, str(weight.device))
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        hidden = torch.zeros(batch, config.dim, dtype=weight.dtype, device=weight.device)
        return EagleState(cache, length, hidden)

    def extend(self, state: EagleState, rows: Rows) -> EagleState:
        """Confirm `rows.count` rows. Writes: cache slots length .. length + R - 1 (padding included)."""
        window = causal_window(state.length, rows.features.shape[1])
        out = self.step(state, rows.tokens[:, 1:], rows.features, window.slots, window)
        last = (rows.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        hidden = torch.where(rows.count[:, None] > 0, out.gather(1, last).squeeze(1), state.hidden)
        return changed(state, length=state.length + rows.count, hidden=hidden)

    def rewind(self, state: EagleState, length: Tensor) -> EagleState:
        """Forget all but the first `length` rows."""
        return changed(state, length=length)

    def begin(self, state: EagleState, root: Root) -> tuple[Tensor, Tensor]:
        return state.hidden[:, None], state.length

    def step(self, state: EagleState, tokens: Tensor, out: Tensor, positions: Tensor, window: Window) -> Tensor:
        return self.head(self.embedding(tokens), out, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(out)


def draft_lm_head(target: Transformer, quant: Quantization | None, ids: Tensor | None = None) -> nn.Module:
    """The target's LM head, or a copy of it in the draft's own format or with the rows of some tokens only.

    ids: [N] int64, the tokens to keep; None: all
    """
    # first, since rows are rounded one by one: their codes are the same, and fewer are computed
    own = target.lm_head if ids is None else rows_of(target.lm_head, ids)
    rounded = isinstance(own, QuantLinear)
    fits = rounded and quant is not None and own.group_size in (0, quant.group_size or own.group_size)
    if quant is None or (fits and own.format == quant.format):
        return own
    quant = fit_group(quant, {"the draft's copy of lm_head": own.in_features})
    weight = own.dequantize() if rounded else own.weight
    return FORMATS[quant.format].from_float(weight, None, quant.group_size, wide=True)


def rows_of(linear: nn.Linear | QuantLinear, ids: Tensor) -> nn.Linear | QuantLinear:
    """A copy of an LM head that has only the outputs `ids`: the same weights, or codes and scales. ids: [N] int64."""
    if isinstance(linear, QuantLinear):
        return linear.rows(ids)
    rows = type(linear)(linear.in_features, len(ids), bias=False, device="meta")
    rows.weight = nn.Parameter(linear.weight.detach()[ids], requires_grad=False)  # [N, F]
    return rows


def load_drafter(
    target: Transformer, config: GenerateConfig, source: TensorSource | None = None, **options: Any
) -> EagleDrafter:
    """`--draft eagle`. Raises: ValueError for a head or a tree that does not fit.

    source: tensors that stand for the head's files; options: vocab and lookup, as for `TreeDrafter`
    """
    path = Path(config.eagle)
    quant = saved_quantization(source.config if source else read_json(path / "config.json"))
    quant = quant or Quantization.of(config.quant_draft, config.group_size)
    head = load_head(path, target, quant, source)
    vocab = options.get("vocab")
    lm_head = draft_lm_head(target, quant, vocab.ids if vocab else None)
    options |= {"sharpness": config.sharpness} if config.sharpness else {}
    return EagleDrafter(
        head, target, config.draft_tree, config.sampling, lm_head, children=config.child_rule, **options
    )
