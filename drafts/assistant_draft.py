"""Gemma 4's assistant models: layers without keys of their own, which read the target's cache.

1. The root's embedding and the target's feature before it, side by side, are projected to the
   assistant's width. Its layers attend to the confirmed tokens in the cache of the target's last
   layer of their kind.
2. An LM head scores the output, and a projection turns it into the next feature. So a chain or a
   tree grows, all of whose nodes have the root's position and see the same tokens.
3. Those of E2B and E4B score the tokens of the best clusters alone, which centroids name: they read
   the rows of these tokens, one in 64, and no more of the LM head.

Source: transformers 5.24, models/gemma4_assistant and its loop of drafts,
`SinglePositionMultiTokenCandidateGenerator`. After a rejection that one also shows the rejected
token's entry at the root's place; here nodes see confirmed tokens alone.
Trade-off: with centroids the LM head stays in the target's dtype, whatever --quant says, as few
of its rows are read. Not here: GGUF files; the assistant of 12B, whose target is not served.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draft_tree import DraftTree
from drafters import DrafterUpdate, DraftInputs, DraftState
from drafts.level_draft import last_of
from eagle_draft import EagleConfig, EagleDrafter, EagleHead, fill
from files.config import EMBEDDING, LM_HEAD, open_source
from files.fields import FLAG, integer, key, naming, read_fields, text_part
from files.heads import check_sizes
from files.io import read_json
from files.keys import WIDTH
from files.weights import check_layers
from kv_cache import KVCache, Window, causal_window
from model import Transformer, layer_names, run_layers, windows_of
from options import load_part, require
from quantize import Linear, Quantization
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig
from runtime import replace_fields
from steps import Beside, Project, Step, run_steps, to_stream_dtype

gemma4 = load_part("architecture", "Gemma4ForCausalLM")
Gemma4 = gemma4.Gemma4
ORDER = "masked_embedding.token_ordering"  # tokens, cluster by cluster
NAMES = {
    "pre_projection.weight": ("pre_projection.weight",),
    "post_projection.weight": ("post_projection.weight",),
    "norm.weight": ("model.norm.weight",),
    "centroids.weight": ("masked_embedding.centroids.weight",),
}


@dataclass(frozen=True)
class HFAssistant:
    """The keys of config.json beside those of the layers, with the defaults of transformers."""

    backbone_hidden_size: int = key(WIDTH, 1536)
    use_ordered_embeddings: bool = key(FLAG, False)
    num_centroids: int = key(integer(1, 2**24), 2048)
    centroid_intermediate_top_k: int = key(integer(1, 2**24), 32)


@dataclass(frozen=True)
class Assistant(Gemma4):
    """The settings of an assistant beside those of a Gemma 4."""

    target_dim: int = 0  # backbone_hidden_size: of the target's features and embeddings
    centroids: int = 0  # num_centroids; 0: all tokens are scored
    clusters: int = 0  # centroid_intermediate_top_k: those whose tokens are scored

    def kv_source(self, i: int) -> int:
        return -1  # of the target (`sources_of`)


def read_assistant(path: Path) -> Assistant:
    """Read config.json of an assistant. Raises: ValueError for a missing key or a bad value."""
    file = path / "config.json"
    raw = read_json(file)
    # all layers share, and there are no inputs of each layer
    text = text_part(raw) | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": None}
    with naming(file):
        own = read_fields(raw, HFAssistant)
        layers = gemma4.read_config(text, "Gemma4ForCausalLM")
    count = own.num_centroids
    fault = f"{file}: num_centroids ({count}) must divide vocab_size ({layers.vocab_size})"
    fault += ", and be no less than centroid_intermediate_top_k"
    fits = layers.vocab_size % count == 0 and own.centroid_intermediate_top_k <= count
    require(fits or not own.use_ordered_embeddings, f"{fault}; use its own config.json")
    return Assistant(
        **{part.name: getattr(layers, part.name) for part in fields(layers)},
        target_dim=own.backbone_hidden_size,
        centroids=count if own.use_ordered_embeddings else 0,
        clusters=own.centroid_intermediate_top_k,
    )


def sources_of(path: Path, model: Assistant, target: Any) -> tuple[int, ...]:
    """Return the layers of the target whose cache the layers of an assistant read.

    target: its config. Raises: ValueError for another target than the assistant's.
    """
    remedy = "use the assistant made for this target"
    require(isinstance(target, Gemma4), f"{path} is an assistant of Gemma 4, of no other; {remedy}")
    check_sizes(path, model.target_dim, model.vocab_size, target, "backbone_hidden_size")
    own = [j for j in range(target.n_layers) if target.kv_source(j) == j]
    last = {j in target.sliding_layers: j for j in own}  # by whether they have a window
    sources = []
    for i in range(model.n_layers):
        source = last.get(i in model.sliding_layers)
        ours = model.kv_shape(i)
        theirs = "none" if source is None else target.kv_shape(source)
        fault = f"{path}: layer {i} reads heads of keys (number, width) {ours}, and the target's "
        require(ours == theirs, f"{fault}layers of its kind have {theirs}; {remedy}")
        sources.append(source)
    return tuple(sources)


class AssistantHead(EagleHead):
    """An assistant as a head. Outputs hold the LM head's input, and behind it the next feature."""

    def __init__(self, model: Assistant, target: Gemma4, sources: tuple[int, ...]):
        """target: its config; sources: its layers whose cache the assistant's layers read"""
        super().__init__(EagleConfig(model, fc_bias=False))
        self.embedding_scale = target.embedding_scale
        self.sources = sources
        if model.centroids:
            self.centroids = Linear(model.dim, model.centroids, bias=False, fp32_out=True)
            # rows of the LM head; once loaded, cluster by cluster: [C, V / C, dim]
            self.token_weight = nn.Parameter(torch.empty(model.vocab_size, model.dim))
            self.tokens: Tensor | None = None  # [C, V / C] int64, of each cluster
        else:
            self.lm_head = Linear(model.dim, model.vocab_size, bias=False, fp32_out=True)

    def make_steps(self) -> None:
        """Make the lists. Writes: first, last."""
        model = self.config.model
        into = Project("pre_projection", 2 * model.target_dim, model.dim, to="stream")
        out = Project("post_projection", model.dim, model.target_dim, to="features")
        self.first = (Beside("embedded", "features"), into)
        self.last = (*model.last(), out, Beside("h", "features"))

    def first_layer(self, steps: list[Step]) -> list[Step]:
        """Return the steps of the first layer: it is as the others."""
        return steps

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, cache: KVCache, window: Window
    ) -> Tensor:
        """Run over nodes, all of which stand at the root's place, and see the tokens before it.

        features: the target's, or outputs; cache: the target's; window: begins at the root
        Returns: [B, T, dim + F] in the weights' dtype.
        """
        model = self.config.model
        places = window.start[:, None].expand_as(positions)
        # the last token before the root is in the mask, where attention wants one at least
        start = (window.start - 1).clamp(min=0)  # only an idle sequence has a root at 0
        seen = torch.ones(*places.shape, 1, dtype=torch.bool, device=places.device)  # [B, T, 1]
        windows = windows_of((), Window(places, start, seen), self.backend)
        # the official mask shows one token more than the target's window
        windows[model.window] = self.backend.sliding(windows[0], model.window + 1)
        embedded = to_stream_dtype(embedded) * self.embedding_scale
        rows = self.start(embedded, features[..., -model.target_dim :], places)
        rows = rows.put("windows", windows)
        rows, _ = run_layers(self.layers, rows, replace_fields(cache, sources=self.sources))
        return run_steps(self.last, self, rows).h.to(self.dtype)

    def score(self, out: Tensor) -> Tensor:
        """Score the tokens after outputs: [B, T, dim + F] -> [B, T, V] fp32, -inf if not scored."""
        model = self.config.model
        x = out[..., : model.dim]
        if not model.centroids:
            return self.lm_head(x)
        best = self.centroids(x).topk(model.clusters).indices  # [B, T, clusters]
        rows = self.token_weight[best].flatten(2, 3)  # [B, T, clusters V / C, dim]
        found = (rows @ x[..., None])[..., 0].float()  # [B, T, clusters V / C]
        scores = found.new_full((*x.shape[:2], model.vocab_size), -torch.inf)
        return scores.scatter(2, self.tokens[best].flatten(2), found)


def load_head(path: Path, target: Transformer, quant: Quantization | None = None) -> AssistantHead:
    """Load an assistant for its target, in the target's dtype and on its device.

    Raises: ValueError for one of another target, or broken files.
    """
    model = read_assistant(path)
    sources = sources_of(path, model, target.config)
    files = open_source(path)
    check_layers(model, files)
    with torch.device("meta"):
        head = AssistantHead(model, target.config, sources)
    held = {name for name, _ in head.named_parameters()}
    names = {name: parts for name, parts in NAMES.items() if name in held}
    scores = "token_weight" if model.centroids else "lm_head.weight"
    names[scores] = (LM_HEAD if LM_HEAD in files.readers else EMBEDDING,)
    for i in range(model.n_layers):
        beside = f"layers.{i}."
        names |= layer_names(beside, f"model.{beside}", model.layer(i), model.names)
    quant = files.quant or quant
    fill(head, target, files, names, quant, lambda name: name in (EMBEDDING, ORDER))
    if model.centroids:
        order = files.read(ORDER).long() if ORDER in files.readers else torch.empty(0)
        whole = torch.equal(order.sort().values, torch.arange(model.vocab_size))
        require(whole, f"{path}: {ORDER} must name every token once; download it again")
        head.tokens = order.view(model.centroids, -1).to(target.norm.weight.device)
        head.token_weight.data = head.token_weight.data[head.tokens]
    return head


class AssistantDrafter(EagleDrafter):
    """Drafts with an `AssistantHead`. Its state has the target's cache while it drafts, or none."""

    def fuse(self, enable: bool) -> None:
        """Leave its passes as they are."""

    def init(self, batch: int, slots: int) -> DraftState:
        """Make an empty state."""
        width = self.head.config.model.target_dim
        like = torch.empty(width, dtype=self.head.dtype, device=self.device)
        return DraftState.empty(batch, like)

    def extend(self, state: DraftState, update: DrafterUpdate) -> DraftState:
        """Keep the target's feature of the last confirmed token."""
        hidden = last_of(update.features, update.count, state.hidden)
        return DraftState((), state.length + update.count, hidden)

    def propose(self, state: DraftState, inputs: DraftInputs) -> DraftTree:
        """Propose a tree. Writes: nothing."""
        return super().propose(replace_fields(state, cache=inputs.cache), inputs)

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        pos = inputs.text.pos
        window = causal_window(pos, 1, backend=self.backend)
        embedded = self.embedding(inputs.text.root[:, None])
        return self.head(embedded, state.hidden, window.slots, state.cache, window), pos

    def logits(self, out: Tensor, level: int) -> Tensor:
        return self.head.score(out)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft assistant`. Raises: ValueError for an assistant or a tree that does not fit."""
    quant = Quantization.of(config.quant_draft, config.group_size)
    head = load_head(Path(config.head), target, quant)
    tree = config.draft_tree
    return method_of(AssistantDrafter(head, target, tree, children=config.child_rule))
