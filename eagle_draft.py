"""The EAGLE draft heads and their drafter.

1. A head pairs the target's feature f_j with the token x_{j+1}, at position j. Its output predicts
   f_{j+1}; an LM head turns that into the distribution of x_{j+2}. Versions 1 and 2 are one kind
   of head, and use the target's LM head. Version 3 fuses inputs of several of the target's layers
   (aux hidden states), outputs a hidden state of its own, and scores a draft vocabulary.
2. `extend` runs the head over confirmed tokens; they alone are in the cache below `length`. The
   last output is kept: it is the root's prediction.
3. The tree grows on predicted features (`TreeDrafter`), in scratch slots above the length.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
Not here: the files of a head (hf/heads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draft_tree import DynamicTree, StaticTree
from drafters import DrafterUpdate, DraftInputs, Method, TreeDrafter
from hf.checkpoint import Quantization, TensorSource, WeightFiles, saved_quantization
from hf.heads import (
    EagleConfig,
    HeadFiles,
    draft_lm_head,
    draft_vocab,
    head_files,
    head_names,
    is_unused,
    print_notes,
    read_head,
)
from hf.weights import Storage, load_weights
from kv_cache import KVCache, Window, causal_window
from model import (
    Block,
    Layers,
    Linear,
    NoNorm,
    RMSNorm,
    Transformer,
    rope_angles,
    rope_frequencies,
    widen,
)
from ops.cpu.layers import FusedHead, fits
from ops.tree import Frontier
from options import GenerateConfig
from runtime import replace_fields


class EagleHead(nn.Module):
    """Versions 1 and 2: fc(embedding, feature), then the layers."""

    aux_layers: tuple[int, ...] = ()  # see `Drafter`
    fused: FusedHead | None = None  # with --compile on a CPU, runs in place of `forward`

    def __init__(self, config: EagleConfig):
        super().__init__()
        model = config.model
        self.config = config
        self.embedding = None  # None: the target's
        self.lm_head = None
        self.vocab = None
        self.layers = Layers(Block(model) for _ in range(model.n_layers))
        self.layers[0].attention_norm = NoNorm()
        self.norm = NoNorm()  # of every output
        self.output_norm = NoNorm()  # of the LM head's input
        self.register_buffer("rope_freq", rope_frequencies(model), persistent=False)  # [E/2] fp32
        if config.eagle3 is None:
            self.fc = Linear(2 * model.dim, model.dim, bias=config.fc_bias)

    def project(self, features: Tensor) -> Tensor:
        """Turn the target's features into inputs of `forward`: [B, T, (1 + aux) F] -> [B, T, F]."""
        return widen(features)

    def first(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, [B, T, F], and the first attention's input if it differs."""
        return self.fc(torch.cat((embedded, features), dim=-1)), None  # embedding first

    def forward(
        self,
        embedded: Tensor,  # [B, T, F], embedding of x_{j+1}
        features: Tensor,  # [B, T, F], of position j: the target's through `project`, or an output
        positions: Tensor,  # [B, T] int64, j
        cache: KVCache | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Predict the next features. Writes: the cache at `window.slots`.

        Returns: [B, T, F] in the weights' dtype.
        """
        x, h = self.first(widen(embedded), widen(features))
        rope = rope_angles(self.rope_freq, positions, self.config.model.rope_factor)
        out = self.layers(x, rope, self.norm, cache, window, h=h)
        return out.to(self.layers[0].ffn_norm.weight.dtype)


class Eagle3Head(EagleHead):
    """Version 3: the first attention reads the normed embedding and hidden state side by side."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        model = config.model
        eagle3 = config.eagle3
        dim = model.dim
        eps = model.norm_eps
        aux_width = len(eagle3.aux_layers) * eagle3.target_dim
        self.aux_layers = eagle3.aux_layers
        attention = self.layers[0].attention
        attention.wqkv = Linear(2 * dim, attention.wqkv.out_features, bias=model.qkv_bias)
        self.embedding_norm = RMSNorm(dim, eps)
        self.hidden_norm = RMSNorm(dim, eps)
        if eagle3.last_norm == "fed":
            self.norm = RMSNorm(dim, eps)
        elif eagle3.last_norm != "none":
            self.output_norm = RMSNorm(dim, eps)
        self.input_norm = NoNorm()
        if eagle3.norm_before_fc:
            self.input_norm = RMSNorm(aux_width, eps)
        normed = eagle3.aux_layers if eagle3.fc_norm else ()
        self.fc_norm = nn.ModuleList(RMSNorm(eagle3.target_dim, eps) for _ in normed)
        self.fc = NoNorm()
        if eagle3.aux_layers:
            self.fc = Linear(aux_width, dim, bias=config.fc_bias)
        if eagle3.embedding:
            self.embedding = nn.Embedding.from_pretrained(torch.zeros(model.vocab_size, dim))
        if eagle3.lm_head:
            self.lm_head = Linear(dim, eagle3.draft_vocab, bias=False, fp32_out=True)

    def project(self, features: Tensor) -> Tensor:
        eagle3 = self.config.eagle3
        skip = eagle3.target_dim if eagle3.aux_layers else 0  # the feature, before aux states
        x = self.input_norm(widen(features[..., skip:]))  # [B, T, aux F], or [B, T, F]
        if eagle3.fc_norm:
            parts = x.chunk(len(eagle3.aux_layers), -1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
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

    quant: quantize while loading, unless the files are quantized already
    source: tensors that replace the files
    Raises: ValueError for a head of another target, or broken files.
    """
    weight = target.norm.weight
    files = HeadFiles(path, source or WeightFiles(path))
    config = read_head(files, target.config)
    with torch.device("meta"):
        head = Eagle3Head(config) if config.eagle3 else EagleHead(config)
    head.vocab = draft_vocab(files, config, weight.device)
    saved = saved_quantization(files.config, path)
    storage = Storage(weight.dtype, str(weight.device), saved or quant)
    load_weights(head, files, head_names(config), storage, lambda name: is_unused(name, config))
    head.rope_freq = rope_frequencies(config.model, weight.device)
    if head.embedding is not None and is_same_embedding(head.embedding, target):
        head.embedding = None  # one copy is enough
    print_notes(files, config)
    return head.eval()


def is_same_embedding(of_head: nn.Module, target: Transformer) -> bool:
    """Return whether a head's embedding repeats the target's, packed or not."""
    parts = torch.arange(target.config.vocab_size, device=target.norm.weight.device).split(4096)
    rows = ((of_head(ids), target.embedding(ids)) for ids in parts)
    return all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in rows)


# ---------------------------------------------------------------------------------------- drafting


class EagleState(NamedTuple):
    """The head's cache and last output. Slots below `length` come from the target's features."""

    cache: KVCache
    length: Tensor  # [B] int64, confirmed tokens
    hidden: Tensor  # [B, 1, F], output of the last confirmed token: the root's prediction


class EagleDrafter(TreeDrafter):
    """Drafts static or dynamic trees with an `EagleHead`."""

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        lm_head: nn.Module | None = None,
        **options: Any,
    ):
        """Attach a head to a target.

        lm_head: default: the head's own, else the target's
        options: those of `TreeDrafter`; sharpness and vocab are the head's own by default
        """
        defaults = {"sharpness": head.config.sharpness, "vocab": head.vocab}
        super().__init__(target, tree, **defaults | options)
        self.head = head
        self.layers = head.layers
        self.aux_layers = head.aux_layers
        self.embedding = head.embedding or target.embedding
        self.lm_head = lm_head or head.lm_head or target.lm_head

    def init(self, batch: int, slots: int) -> EagleState:
        """Make an empty state; the cache has room for a draft behind `slots`."""
        config = self.head.config.model
        weight = self.layers[0].ffn_norm.weight
        room = slots + self.scratch
        cache = KVCache.empty(config, batch, room, weight.dtype, str(weight.device))
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        hidden = weight.new_zeros(batch, 1, config.dim)
        return EagleState(cache, length, hidden)

    def fuse(self, enable: bool) -> None:
        """Run the head's passes in one C++ call each, if it fits. Writes: `fused` of the head."""
        self.head.fused = None
        if enable and fits(self.head.layers):
            self.head.fused = FusedHead(self.head, self.embedding)

    def extend(self, state: EagleState, update: DrafterUpdate) -> EagleState:
        """Read the confirmed tokens. Writes: slots length .. length + R - 1, padding included."""
        if self.head.fused is not None:
            hidden, length = self.head.fused.extend(state, update)
            return replace_fields(state, length=length, hidden=hidden)
        count = update.count
        window = causal_window(state.length, update.features.shape[1])
        embedded = self.embedding(update.tokens[:, 1:])
        features = self.head.project(update.features)
        out = self.head(embedded, features, window.slots, state.cache, window)
        last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        hidden = torch.where(count[:, None, None] > 0, out.gather(1, last), state.hidden)
        return replace_fields(state, length=state.length + count, hidden=hidden)

    def rewind(self, state: EagleState, length: Tensor) -> EagleState:
        """Forget all but the first `length` tokens."""
        return replace_fields(state, length=length)

    def root_output(self, state: EagleState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        return state.hidden, state.length

    def forward_nodes(
        self, state: EagleState, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        if self.head.fused is not None:
            return self.head.fused.step(frontier, out, positions, state.cache, window)
        index = frontier.parent[:, :, None].expand(-1, -1, out.shape[2])
        parents = out.gather(1, index)  # [B, R, F]
        return self.head(self.embedding(frontier.tokens), parents, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(self.head.output_norm(out))


def load_drafter(
    target: Transformer, config: GenerateConfig, source: TensorSource | None = None, **options: Any
) -> EagleDrafter:
    """Load `--draft eagle`. Raises: ValueError for a head or a tree that does not fit.

    source: tensors that replace the head's files
    options: graft, as for `TreeDrafter`
    """
    path = Path(config.head)
    source = source or head_files(path, config.quant_draft)
    quant = saved_quantization(source.config, path)
    quant = quant or Quantization.of(config.quant_draft, config.group_size)
    head = load_head(path, target, quant, source)
    if head.lm_head:  # it has no rows for other tokens
        lm_head = draft_lm_head(head, quant)
    else:
        lm_head = draft_lm_head(target, quant, head.vocab.ids if head.vocab else None)
    options["children"] = config.child_rule
    return EagleDrafter(head, target, config.draft_tree, lm_head, **options)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> Method:
    """Load `--draft eagle`, as `load_drafter`. Raises: ValueError."""
    return load_drafter(target, config).method()
