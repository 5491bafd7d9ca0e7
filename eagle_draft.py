"""The EAGLE draft heads, their files and their drafter.

1. A head pairs the target's feature f_j with the token x_{j+1}, at position j. Its output predicts
   f_{j+1}; an LM head turns that into the distribution of x_{j+2}. Versions 1 and 2 are one kind
   of head, and use the target's LM head. Version 3 fuses inputs of several of the target's layers
   (aux hidden states), outputs a hidden state of its own, and scores a draft vocabulary.
2. `extend` runs the head over confirmed tokens; they alone are in the cache below `length`. The
   last output is kept: it is the root's prediction.
3. The tree grows on predicted features (`TreeDrafter`), in scratch slots above the length.
4. Files are in the official layout; files/heads.py reads all others.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draft_tree import DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftMethod, DraftVocab, TreeDrafter
from kv_cache import KVCache, Window, causal_window
from model import (
    Layer,
    ModelConfig,
    RotaryEmbeddings,
    Transformer,
    layer_names,
    read_config,
    run_layers,
    windows_of,
)
from options import has_part, load_part, require
from quantize import (
    FORMATS,
    Linear,
    Quantization,
    Storage,
    TensorSource,
    WeightFiles,
    fit_group,
    load_weights,
)
from reference import TORCH, Backend, use_backend
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

MASK = "mask_hidden"  # P-EAGLE's tensor: what stands for the target's hidden states


@dataclass(frozen=True)
class Eagle3:
    """The parts of a head of version 3 besides its layers. Source: EAGLE-3 (arXiv 2503.01840)."""

    # ascending layers of the target whose inputs `fc` fuses; none: it takes the features, no fc
    aux_layers: tuple[int, ...]
    target_dim: int  # their width
    draft_vocab: int  # Vd, tokens that it drafts
    norm_before_fc: bool = False  # a norm over all that fc fuses
    fc_norm: bool = False  # a norm over each of them
    norm_before_residual: bool = False  # the residual stream begins with the normed hidden state
    # "logits": the last norm is for the logits only; "fed": also for the hidden state that is fed
    # back; "none": there is no last norm
    last_norm: str = "logits"
    embedding: str = ""  # the tensor of its own embedding; "": the target's
    lm_head: str = "lm_head.weight"  # of its own LM head; "": the target's
    mask_token: int | None = None  # P-EAGLE: the token of the levels below the first


@dataclass(frozen=True)
class EagleConfig:
    """The config of a head by its own files; nothing is taken from the target."""

    model: ModelConfig  # dims, KV heads, eps, RoPE base of the head's layers
    fc_bias: bool = True  # key `bias`; absent means True in versions 1 and 2
    sharpness: float = 1.0  # key `draft_sharpness` (ours): c in log softmax(c z), see drafters.py
    eagle3: Eagle3 | None = None  # None: version 1 or 2


class EagleHead(nn.Module):
    """A head of any version: lists of steps around the layers of a model.

    `inputs` turns the target's features into those that `first` takes; `first` makes the residual
    stream and the first layer's input of them; `last` makes the output. Versions 1 and 2 multiply
    embedding and feature by fc, side by side.
    """

    aux_layers: tuple[int, ...] = ()  # see `Drafter`
    quant: Quantization | None = None  # the format of its weights
    program: Any = None  # its passes: `HeadPasses`, or a backend's in their place
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
        return run_steps(self.inputs, self, Rows(named={"features": features})).h

    def start(
        self, embedded: Tensor, features: Tensor, positions: Tensor, window: Window | None = None
    ) -> Rows:
        """Return the inputs of the layers; operands as for `forward`."""
        read = {"embedded": to_stream_dtype(embedded), "features": to_stream_dtype(features)}
        windows = windows_of((), window, self.backend)
        rows = Rows(ropes=self.ropes(positions), windows=windows, named=read)
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
        rows = self.start(embedded, features, positions, window)
        rows, _ = run_layers(self.layers, rows, cache)
        return run_steps(self.last, self, rows).h.to(self.dtype)

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
            each = [PartNorm(f"fc_norm_{i}", eagle3.target_dim, eps, part=i) for i in range(parts)]
            inputs += [replace(norm, parts=parts) for norm in each]
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


class HeadPasses:
    """The passes of a head over its cache, by its steps. A backend may have others in their place.

    embedding: the head's or the target's
    """

    in_cpp = False

    def __init__(self, head: EagleHead, embedding: nn.Module):
        self.head = head
        self.embedding = embedding

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, cache: KVCache, window: Window
    ) -> Tensor:
        """Run the head; operands as for `EagleHead.forward`."""
        return self.head(embedded, features, positions, cache, window)

    def extend(self, state: EagleState, update: DrafterUpdate) -> tuple[Tensor, Tensor]:
        """Run the head over confirmed tokens. Writes: slots length .. length + R - 1.

        Returns: the output of the last one, [B, 1, F]; the new length, [B].
        """
        count = update.count
        rows = update.features.shape[1]
        window = causal_window(state.length, rows, backend=self.head.backend)
        embedded = self.embedding(update.tokens[:, 1:])
        features = self.head.project(update.features)
        out = self.forward(embedded, features, window.slots, state.cache, window)
        last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        hidden = torch.where(count[:, None, None] > 0, out.gather(1, last), state.hidden)
        return hidden, state.length + count

    def step(
        self, level: Frontier, out: Tensor, positions: Tensor, cache: KVCache, window: Window
    ) -> Tensor:
        """Run the nodes of a level; operands as for `TreeDrafter.forward_nodes`."""
        index = level.parent[:, :, None].expand(-1, -1, out.shape[2])
        parents = out.gather(1, index)  # [B, R, F]
        return self.forward(self.embedding(level.tokens), parents, positions, cache, window)


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
        if head.program is None:
            head.program = HeadPasses(head, self.embedding)

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
        """Let the backend's program run the passes, if it has one. Writes: the head's program."""
        own = self.head.backend.head_program(self.head, self.embedding) if enable else None
        self.head.program = own or HeadPasses(self.head, self.embedding)

    def extend(self, state: EagleState, update: DrafterUpdate) -> EagleState:
        """Read the confirmed tokens. Writes: slots length .. length + R - 1, padding included."""
        hidden, length = self.head.program.extend(state, update)
        return replace_fields(state, length=length, hidden=hidden)

    def rewind(self, state: EagleState, length: Tensor) -> EagleState:
        """Forget all but the first `length` tokens."""
        return replace_fields(state, length=length)

    def root_output(self, state: EagleState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        return state.hidden, state.length

    def forward_nodes(
        self, state: EagleState, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return self.head.program.step(frontier, out, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(self.head.output_norm(out))


# --------------------------------------------------------------------------------------- its files


class HeadSource(NamedTuple):
    """What a reader finds in the files of a head."""

    tensors: TensorSource  # under the names of the official layout
    config: EagleConfig
    ids: Tensor | None = None  # [Vd] int64, the tokens that it drafts, ascending; None: all
    saved: Quantization | None = None  # of codes in the files


def read_official(
    path: Path, target: ModelConfig, form: str = "", source: TensorSource | None = None
) -> HeadSource:
    """Read a head in the official layout (SafeAILab), and check that it fits its target.

    form: the number format that is asked for; source: tensors that replace the files
    Raises: ValueError for another layout, or a head of another target.
    """
    files = source or WeightFiles(path)
    raw = files.config
    names = files.readers
    is_3 = "midlayer.hidden_norm.weight" in names
    known = "known are EAGLE-1, 2 and 3 as SafeAILab wrote them; restore the folder files/"
    require(is_3 or "fc.weight" in names, f"{path} is a head in no layout that is known; {known}")
    numbers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    model = replace(
        read_config(raw | {"architectures": None}),  # heads name the target's
        n_layers=max(numbers, default=0) + 1,
        qkv_bias=raw.get("qkv_bias", False),
        o_bias=False,
        mlp_bias=False,
    )
    width = (raw.get("target_hidden_size") or model.dim, model.vocab_size)
    fault = f"{path}: the sizes of features and vocabulary are {width}, and of the target "
    theirs = (target.dim, target.vocab_size)
    require(width == theirs, f"{fault}{theirs}; use the head made for this target")
    config = EagleConfig(model, raw.get("bias", True), raw.get("draft_sharpness", 1.0))
    if not is_3:
        return HeadSource(files, config)
    own = ("embed_tokens.weight", "lm_head.weight")
    embedding, lm_head = (name if name in names else "" for name in own)
    layers = target.n_layers
    count = raw.get("draft_vocab_size") or model.vocab_size
    aux_layers = (2, layers // 2, layers - 3)
    eagle3 = Eagle3(aux_layers, width[0], count, embedding=embedding, lm_head=lm_head)
    config = replace(config, fc_bias="fc.bias" in names, eagle3=eagle3)
    if count == model.vocab_size:
        return HeadSource(files, config)
    ids = torch.arange(count) + files.read("d2t").long()
    require(bool((ids.diff() > 0).all()), f"{path}: d2t must ascend; restore the folder files/")
    return HeadSource(files, config, ids)


def head_names(config: EagleConfig) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the official head's tensors."""
    eagle3 = config.eagle3
    names = {}
    if eagle3 is None or eagle3.aux_layers:
        names["fc.weight"] = ("fc.weight",)
        if config.fc_bias:
            names["fc.bias"] = ("fc.bias",)
    for i in range(config.model.n_layers):
        theirs = "midlayer." if eagle3 and i == 0 else f"layers.{i}."
        steps = config.model.layer(i)[i == 0 :]  # the first layer has no norm before its attention
        names |= layer_names(f"layers.{i}.", theirs, steps, config.model.names)
    if eagle3 is None:
        return names
    norms = {"embedding_norm": "midlayer.input_layernorm", "hidden_norm": "midlayer.hidden_norm"}
    if eagle3.last_norm != "none":
        norms["norm" if eagle3.last_norm == "fed" else "output_norm"] = "norm"
    if eagle3.norm_before_fc:
        norms["input_norm"] = "input_norm"
    if eagle3.fc_norm:
        norms |= {f"fc_norm_{i}": f"fc_norm.{i}" for i in range(len(eagle3.aux_layers))}
    names |= {f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in norms.items()}
    if eagle3.embedding:
        names["embedding.weight"] = (eagle3.embedding,)
    if eagle3.lm_head:
        names["lm_head.weight"] = (eagle3.lm_head,)
    if eagle3.mask_token is not None:
        names[MASK] = (MASK,)
    return names


def is_unused(name: str, config: EagleConfig) -> bool:
    """Return whether a head's tensor may stay unused.

    Official files of versions 1 and 2 repeat the target's embedding. `t2d` lists the tokens that
    `d2t` reaches. Speculators may hold the norm and the LM head of their target.
    """
    endings = ("d2t", "t2d", "embed_tokens.weight", "rotary_emb.inv_freq")
    if config.eagle3:
        endings += ("verifier_norm.weight", "verifier_lm_head.weight")
    return name.endswith(endings)


def draft_lm_head(
    model: nn.Module, quant: Quantization | None, ids: Tensor | None = None
) -> nn.Module:
    """Return a model's LM head, or a copy in the draft's format or with some tokens' rows only.

    ids: [Vd] int64, the tokens to keep; None: all
    """
    # first, since rows are rounded one by one: their codes are the same, and fewer are computed
    own = model.lm_head
    if ids is not None:
        own = own.rows(ids)
    if quant is None or quant.is_blocks:  # blocks are a file's own
        return own
    if own.format == quant.format:
        fits = own.format == "int8" or own.group_size == (quant.group_size or own.group_size)
        if fits:
            return own
    quant = fit_group(quant, {"the draft's copy of lm_head": own.in_features})
    weight = FORMATS[quant.format].round(own.dequantize(), quant.group_size)
    return Linear.of(weight, fp32_out=True, backend=own.backend)


def is_same_embedding(of_head: nn.Module, target: Transformer) -> bool:
    """Return whether a head's embedding repeats the target's, packed or not."""
    parts = torch.arange(target.config.vocab_size, device=target.norm.weight.device).split(4096)
    rows = ((of_head(ids), target.embedding(ids)) for ids in parts)
    return all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in rows)


def load_head(
    path: Path,
    target: Transformer,
    quant: Quantization | None = None,
    source: TensorSource | None = None,
    form: str = "",
) -> EagleHead:
    """Load a head for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    source: tensors that replace the files
    form: the number format of a draft; codes of another one are read as their numbers
    Raises: ValueError for a head of another target, or broken files.
    """
    read = load_part("reader", "head") if has_part("reader", "head") else read_official
    files, config, ids, saved = read(path, target.config, form, source)
    with torch.device("meta"):
        head = Eagle3Head(config) if config.eagle3 else EagleHead(config)
    if ids is not None:
        head.vocab = DraftVocab(config.model.vocab_size, ids.to(target.norm.weight.device))
    names = head_names(config)
    fill(head, target, files, names, saved or quant, lambda name: is_unused(name, config))
    if head.embedding is not None and is_same_embedding(head.embedding, target):
        head.embedding = None  # one copy is enough
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
    storage = Storage(weight.dtype, str(weight.device), quant)
    load_weights(head, files, names, storage, unused)
    head.quant = quant
    head.ropes = RotaryEmbeddings(head.config.model.ropes, weight.device)
    use_backend(head.eval(), target.backend)


def load_drafter(
    target: Transformer,
    path: str | Path,
    tree: DynamicTree | StaticTree,
    form: str = "none",
    group_size: int = 0,
    source: TensorSource | None = None,
    **options: Any,
) -> EagleDrafter:
    """Load a head and its drafter. Raises: ValueError for a head or a tree that does not fit.

    form, group_size: the number format, and the inputs that share a scale
    source: tensors that replace the head's files; options: as for `TreeDrafter`
    """
    head = load_head(Path(path), target, Quantization.of(form, group_size), source, form)
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
    return load_drafter(target, config.head, config.draft_tree, *form, **options).method()
