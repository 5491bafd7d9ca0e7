"""The EAGLE draft heads and their drafter.

1. A head pairs the target's feature f_j with the token x_{j+1}, at position j. Its output predicts
   f_{j+1}; an LM head turns that into the distribution of x_{j+2}. Versions 1 and 2 are one kind
   of head, and use the target's LM head. Version 3 fuses inputs of several of the target's layers
   (aux hidden states), outputs a hidden state of its own, and scores a draft vocabulary.
2. `extend` runs the head over confirmed tokens; they alone are in the cache below `length`. The
   last output is kept: it is the root's prediction.
3. The tree grows on predicted features (`TreeDrafter`), in scratch slots above the length.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
Not here: the files of a head (files/heads.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backends.cpp.layers import FusedHead, fits, steps_of_head
from backends.fusions import FusedLayers
from draft_tree import DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftMethod, TreeDrafter
from files.checkpoint import TensorSource, WeightFiles, saved_quantization
from files.heads import (
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
from kv_cache import KVCache, Window, causal_window
from model import Layer, RotaryEmbeddings, Transformer, run_layers, windows_of
from quantize import Linear, Quantization, Storage, load_weights
from reference import TORCH, Backend, use_backend
from run.options import GenerateConfig
from runtime import replace_fields
from steps import (
    Beside,
    Columns,
    Copy,
    Norm,
    PartNorm,
    Project,
    RMSNorm,
    Rows,
    Step,
    add_modules,
    run_steps,
    to_stream_dtype,
)


class EagleHead(nn.Module):
    """A head of any version: lists of steps around the layers of a model.

    `inputs` turns the target's features into those that `first` takes; `first` makes the residual
    stream and the first layer's input of them; `last` makes the output. Versions 1 and 2 multiply
    embedding and feature by fc, side by side.
    """

    aux_layers: tuple[int, ...] = ()  # see `Drafter`
    fused: FusedHead | None = None  # runs in place of `forward`, on a CPU
    fused_layers: FusedLayers | None = None  # runs in place of `layers`, on CUDA
    backend: Backend = TORCH  # as the target's, unless it is trained

    def __init__(self, config: EagleConfig):
        super().__init__()
        model = config.model
        self.config = config
        self.embedding = None  # None: the target's
        self.lm_head = None
        self.vocab = None
        self.inputs: tuple[Step, ...] = (Columns(),)
        self.first: tuple[Step, ...] = ()
        self.last: tuple[Step, ...] = (Copy("stream", "h"),)  # there is no norm
        self.output_norm = nn.Identity()  # of the LM head's input
        self.make_steps()
        steps = [list(model.layer(i)) for i in range(model.n_layers)]
        steps[0] = self.first_layer(steps[0])
        self.layers = nn.ModuleList(map(Layer, steps))
        add_modules(self, (*self.inputs, *self.first, *self.last))
        self.ropes = RotaryEmbeddings(model.ropes)

    def make_steps(self) -> None:
        """Make the lists of versions 1 and 2. Writes: inputs, first, last."""
        dim = self.config.model.dim
        self.first = (
            Beside("embedded", "features"),
            Project("fc", 2 * dim, dim, self.config.fc_bias, to="stream"),
            Copy("stream", "h"),
        )

    def first_layer(self, steps: list[Step]) -> list[Step]:
        """Return the steps of the first layer, from a model's: it begins without a norm."""
        return steps[1:]

    def project(self, features: Tensor) -> Tensor:
        """Turn the target's features into inputs of `forward`: [B, T, (1 + aux) F] -> [B, T, F]."""
        return run_steps(self.inputs, self, Rows(features=features)).h

    def start(self, embedded: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Return the inputs of the layers; operands as for `forward`."""
        rows = Rows(
            embedded=to_stream_dtype(embedded),
            features=to_stream_dtype(features),
            ropes=self.ropes(positions),
        )
        return run_steps(self.first, self, rows)

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
        rows = self.start(embedded, features, positions)
        rows = replace_fields(rows, windows=windows_of((), window, self.backend))
        if self.fused_layers is not None and cache is not None:
            rows = self.fused_layers.begin(rows)
            rows, _ = run_layers(self.fused_layers.segments, rows, cache)
            rows = self.fused_layers.end(rows)
        else:
            rows, _ = run_layers(self.layers, rows, cache)
            rows = run_steps(self.last, self, rows)
        return rows.h.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantized, of outputs and of the cache."""
        return self.layers[0].ffn_norm.weight.dtype


class Eagle3Head(EagleHead):
    """Version 3: the first attention reads the normed embedding and hidden state side by side."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        model = config.model
        eagle3 = config.eagle3
        self.aux_layers = eagle3.aux_layers
        if eagle3.last_norm == "logits":
            self.output_norm = RMSNorm(model.dim, model.norm_eps)
        if eagle3.embedding:
            zeros = torch.zeros(model.vocab_size, model.dim)
            self.embedding = nn.Embedding.from_pretrained(zeros)
        if eagle3.lm_head:
            self.lm_head = Linear(model.dim, eagle3.draft_vocab, bias=False, fp32_out=True)
        if eagle3.mask_token is not None:
            width = len(eagle3.aux_layers) or 1
            self.mask_hidden = nn.Parameter(torch.zeros(width * eagle3.target_dim))

    def make_steps(self) -> None:
        """Make the lists of version 3. Writes: inputs, first, last."""
        eagle3 = self.config.eagle3
        dim = self.config.model.dim
        eps = self.config.model.norm_eps
        parts = len(eagle3.aux_layers)
        width = parts * eagle3.target_dim
        # the features lie before the aux states, and are not read beside them
        inputs: list[Step] = [Columns(eagle3.target_dim if parts else 0)]
        if eagle3.norm_before_fc:
            inputs.append(Norm("input_norm", width, eps, source="h"))
        if eagle3.fc_norm:
            inputs += [
                PartNorm(f"fc_norm_{i}", eagle3.target_dim, eps, i, parts) for i in range(parts)
            ]
        if parts:
            inputs.append(Project("fc", width, dim, self.config.fc_bias))
        self.inputs = tuple(inputs)
        self.first = (
            Norm("hidden_norm", dim, eps, source="features", to="normed"),
            Copy("normed" if eagle3.norm_before_residual else "features", "stream"),
            Norm("embedding_norm", dim, eps, source="embedded"),
            Beside("h", "normed"),
        )
        if eagle3.last_norm == "fed":
            self.last = (Norm("norm", dim, eps),)

    def first_layer(self, steps: list[Step]) -> list[Step]:
        """Return the steps of the first layer: its projection reads two rows side by side."""
        _, project, *rest = steps
        return [replace(project, inputs=2 * self.config.model.dim), *rest]


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
    files = HeadFiles(path, source or WeightFiles(path))
    config = read_head(files, target.config)
    with torch.device("meta"):
        head = Eagle3Head(config) if config.eagle3 else EagleHead(config)
    head.vocab = draft_vocab(files, config, target.norm.weight.device)
    fill(head, target, files, head_names(config), quant, lambda name: is_unused(name, config))
    if head.embedding is not None and is_same_embedding(head.embedding, target):
        head.embedding = None  # one copy is enough
    print_notes(files, config)
    return head


def fill(
    head: EagleHead,
    target: Transformer,
    files: TensorSource,
    names: dict[str, tuple[str, ...]],
    quant: Quantization | None,
    unused: Callable[[str], bool],
) -> None:
    """Load the weights of a head on the meta device, in the target's dtype and on its device.

    names, unused: `names` and `ignored` of `load_weights`; quant: as for `load_head`
    Raises: ValueError for broken files. Writes: the head.
    """
    weight = target.norm.weight
    quant = saved_quantization(files.config, files.path) or quant
    storage = Storage(weight.dtype, str(weight.device), quant)
    load_weights(head, files, names, storage, unused)
    head.ropes = RotaryEmbeddings(head.config.model.ropes, weight.device)
    use_backend(head.eval(), target.backend)


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
        cache = KVCache.empty(config, batch, room, self.head.dtype, str(weight.device))
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        hidden = weight.new_zeros(batch, 1, config.dim)
        return EagleState(cache, length, hidden)

    def fuse(self, enable: bool) -> None:
        """Run the head's passes in one C++ call each, if it fits; on CUDA in few launches.

        enable: on a CPU. Writes: `fused` and `fused_layers` of the head.
        """
        head = self.head
        head.fused = None
        head.fused_layers = None
        if head.backend.merges_steps:
            head.fused_layers = FusedLayers(head.layers, head.last, head)
        elif enable and head.backend.runs_passes and fits(steps_of_head(head)):
            head.fused = FusedHead(head, self.embedding)

    def extend(self, state: EagleState, update: DrafterUpdate) -> EagleState:
        """Read the confirmed tokens. Writes: slots length .. length + R - 1, padding included."""
        if self.head.fused is not None:
            hidden, length = self.head.fused.extend(state, update)
            return replace_fields(state, length=length, hidden=hidden)
        count = update.count
        window = causal_window(state.length, update.features.shape[1], backend=self.backend)
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


class ParallelEagleDrafter(EagleDrafter):
    """Drafts all levels in one pass: mask tokens stand for the nodes behind the root.

    They have a feature of their own, and see the confirmed tokens and the masks before them. The
    nodes of a level share its scores.
    Source: P-EAGLE, as in the package speculators 0.9.0, models/peagle.
    """

    def __init__(self, *inputs: Any, **options: Any):
        """Attach a head, as `EagleDrafter`."""
        super().__init__(*inputs, **options)
        eagle3 = self.head.config.eagle3
        before = eagle3.target_dim if eagle3.aux_layers else 0  # see Eagle3Head.make_steps
        features = nn.functional.pad(self.head.mask_hidden.detach(), (before, 0))
        self.masked = self.head.project(features[None, None]).to(self.head.dtype)  # [1, 1, F]

    def root_output(self, state: EagleState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs of all levels, [B, D, F], and the first scratch slot.

        Writes: slots length .. length + D - 2.
        """
        if self.tree.depth == 1:
            return super().root_output(state, inputs)
        window = causal_window(state.length, self.tree.depth - 1, backend=self.backend)
        tokens = torch.full_like(window.slots, self.head.config.eagle3.mask_token)
        first = torch.zeros_like(tokens)  # the same feature for all
        masks = Frontier(first, tokens, first, first.float(), window.mask)
        masked = self.masked.expand(len(tokens), -1, -1)
        out = super().forward_nodes(state, masks, masked, window.slots, window)
        return torch.cat((state.hidden, out), 1), state.length

    def forward_nodes(
        self, state: EagleState, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return out

    def logits_of(self, out: Tensor, level: int) -> Tensor:
        return self.logits(out[:, level, None])


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
    parallel = head.config.eagle3 and head.config.eagle3.mask_token is not None
    kind = ParallelEagleDrafter if parallel else EagleDrafter
    return kind(head, target, config.draft_tree, lm_head, **options)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft eagle`, as `load_drafter`. Raises: ValueError."""
    return load_drafter(target, config).method()
