"""The EAGLE draft heads, their files and their drafter.

1. A head pairs the target's feature f_j with the token x_{j+1}, at position j. Its output predicts
   f_{j+1}; an LM head turns that into the distribution of x_{j+2}. Versions 1 and 2 are one kind
   of head, and use the target's LM head. Version 3 fuses inputs of several of the target's layers
   (aux hidden states), outputs a hidden state of its own, and scores a draft vocabulary.
2. `extend` runs the head over confirmed tokens; they alone are in the cache below `length`. The
   last output is kept: it is the root's prediction.
3. The tree grows on predicted features (`TreeDrafter`), in scratch slots above the length.
4. Files are in the official layout. Heads of other layouts are subclasses
   (files/eagle_variants.py), which files/heads.py reads.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draft_tree import DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftState, DraftVocab, TreeDrafter
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
    Linear,
    Quantization,
    Storage,
    TensorSource,
    WeightFiles,
    load_weights,
)
from reference import TORCH, Backend, use_backend
from runtime import replace_fields
from steps import (
    Beside,
    Columns,
    Copy,
    Norm,
    Project,
    RMSNorm,
    Rows,
    Step,
    add_modules,
    run_steps,
    to_stream_dtype,
)


@dataclass(frozen=True)
class Eagle3:
    """The parts of a head of version 3 besides its layers. Source: EAGLE-3 (arXiv 2503.01840)."""

    aux_layers: tuple[int, ...]  # ascending layers of the target whose inputs `fc` fuses
    target_dim: int  # their width
    draft_vocab: int  # Vd, tokens that it drafts


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

    # its modules beside the layers -> the official ones; the official prefix of the first layer
    official: dict[str, str] = {"fc": "fc"}
    first_prefix = "layers.0."
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

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Return our parameter's name -> the official head's tensors."""
        names = {}
        for name, _ in self.named_parameters():
            module, _, kind = name.rpartition(".")
            if module in self.official:
                names[name] = (f"{self.official[module]}.{kind}",)
        for i, layer in enumerate(self.layers):
            theirs = f"layers.{i}." if i else self.first_prefix
            names |= layer_names(f"layers.{i}.", theirs, layer.steps, self.config.model.names)
        return names

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

    official = {
        "fc": "fc",
        "embedding_norm": "midlayer.input_layernorm",
        "hidden_norm": "midlayer.hidden_norm",
        "output_norm": "norm",
        "lm_head": "lm_head",
    }
    first_prefix = "midlayer."

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        model = config.model
        self.aux_layers = config.eagle3.aux_layers
        self.output_norm = RMSNorm(model.dim, model.norm_eps)
        self.lm_head = Linear(model.dim, config.eagle3.draft_vocab, bias=False, fp32_out=True)

    def make_steps(self) -> None:
        """Make the lists of version 3. Writes: inputs, first, last."""
        eagle3 = self.config.eagle3
        dim = self.config.model.dim
        eps = self.config.model.norm_eps
        width = len(eagle3.aux_layers) * eagle3.target_dim
        # the features lie before the aux states, and are not read beside them
        fc = Project("fc", width, dim, self.config.fc_bias)
        self.inputs = (Columns(eagle3.target_dim), fc)
        self.first = (
            Norm("hidden_norm", dim, eps, source="features", to="normed"),
            Copy("features", "stream"),
            Norm("embedding_norm", dim, eps, source="embedded"),
            Beside("h", "normed"),
        )

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

    def extend(self, state: DraftState, update: DrafterUpdate) -> tuple[Tensor, Tensor]:
        """Run the head over confirmed tokens. Writes: slots length .. length + R - 1.

        Returns: the output of the last one, [B, 1, F]; the new length, [B].
        """
        window = causal_window(state.length, update.features.shape[1], backend=self.head.backend)
        embedded = self.embedding(update.tokens[:, 1:])
        features = self.head.project(update.features)
        out = self.forward(embedded, features, window.slots, state.cache, window)
        last = (update.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        is_new = update.count[:, None, None] > 0
        return torch.where(is_new, out.gather(1, last), state.hidden), state.length + update.count

    def step(
        self, level: Frontier, out: Tensor, positions: Tensor, cache: KVCache, window: Window
    ) -> Tensor:
        """Run the nodes of a level; operands as for `TreeDrafter.forward_nodes`."""
        index = level.parent[:, :, None].expand(-1, -1, out.shape[2])
        parents = out.gather(1, index)  # [B, R, F]
        return self.forward(self.embedding(level.tokens), parents, positions, cache, window)


# ---------------------------------------------------------------------------------------- drafting


class EagleDrafter(TreeDrafter):
    """Drafts static or dynamic trees with an `EagleHead`. Its last output predicts the root."""

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

    def init(self, batch: int, slots: int) -> DraftState:
        """Make an empty state; the cache has room for a draft behind `slots`."""
        weight = self.layers[0].ffn_norm.weight
        return DraftState.empty(batch, weight, self.head.config.model, slots + self.scratch)

    def fuse(self, enable: bool) -> None:
        """Let the backend's program run the passes, if it has one. Writes: the head's program."""
        make = self.head.backend.head_program
        own = make(self.head, self.embedding) if enable and make else None
        self.head.program = own or HeadPasses(self.head, self.embedding)

    def extend(self, state: DraftState, update: DrafterUpdate) -> DraftState:
        """Read the confirmed tokens. Writes: slots length .. length + R - 1, padding included."""
        hidden, length = self.head.program.extend(state, update)
        return replace_fields(state, length=length, hidden=hidden)

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        return state.hidden, state.length

    def forward_nodes(
        self, state: DraftState, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return self.head.program.step(frontier, out, positions, state.cache, window)

    def logits(self, out: Tensor, level: int) -> Tensor:
        return self.lm_head(self.head.output_norm(out))


# --------------------------------------------------------------------------------------- its files


def read_official(files: WeightFiles, target: ModelConfig) -> EagleHead:
    """Make a head by files in the official layout (SafeAILab), on the meta device.

    Raises: ValueError for another layout, or a head of another target.
    """
    raw = files.config
    path = files.path
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
        with torch.device("meta"):
            return EagleHead(config)
    count = raw.get("draft_vocab_size") or model.vocab_size
    aux_layers = (2, target.n_layers // 2, target.n_layers - 3)
    eagle3 = Eagle3(aux_layers, width[0], count)
    with torch.device("meta"):
        head = Eagle3Head(replace(config, fc_bias="fc.bias" in names, eagle3=eagle3))
    if count < model.vocab_size:
        ids = torch.arange(count) + files.read("d2t").long()
        require(bool((ids.diff() > 0).all()), f"{path}: d2t must ascend; restore the folder files/")
        head.vocab = DraftVocab(model.vocab_size, ids)
    return head


def is_unused(name: str) -> bool:
    """Return whether a head's tensor may stay unused.

    Official files repeat the target's embedding. `t2d` lists the tokens that `d2t` reaches.
    """
    return name.endswith(("d2t", "t2d", "embed_tokens.weight", "rotary_emb.inv_freq"))


def load_head(
    path: Path, target: Transformer, quant: Quantization | None = None, **options: Any
) -> EagleHead:
    """Load a head for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    options: of `files.heads.load_head`, which reads all layouts, where it is there
    Raises: ValueError for a head of another target, or broken files.
    """
    if has_part("reader", "head"):
        return load_part("reader", "head")(path, target, quant, **options)
    files = WeightFiles(path)
    head = read_official(files, target.config)
    fill(head, target, files, head.weight_names(), quant, is_unused)
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
    if head.vocab:
        head.vocab = DraftVocab(head.vocab.size, head.vocab.ids.to(weight.device))
    head.quant = quant
    head.ropes = RotaryEmbeddings(head.config.model.ropes, weight.device)
    use_backend(head.eval(), target.backend)
