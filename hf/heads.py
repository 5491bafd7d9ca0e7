"""What a draft head's files say: EAGLE-1, 2 and 3, in the layouts that people have.

1. `HeadFiles` gives a head's tensors the names of the official layout, and says their version.
2. `read_head` makes an `EagleConfig` of config.json and of these names, and checks that the head is one for the target.
3. `head_names` says which tensors each of our parameters is made of, `draft_vocab` which tokens a head drafts, and
   `draft_lm_head` makes the LM head of a draft where it is not the target's own.

Layouts of version 3: SafeAILab, SpecForge and SGLang (`midlayer.`), vLLM and DeepSpec (`layers.0.`), speculators (the
same, and a config of the layer inside the config), NeMo (`model.layers.0.`). A norm, a bias, an embedding or an LM head
that the weights hold is used, whatever config.json says of it.
Sources: the official code of EAGLE; the loaders of SGLang, vLLM and speculators. Not here: modules (eagle_draft.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint import Quantization, TensorSource, fit_group, scale_name
from drafters import DraftVocab
from files import load_pickle, read_json, read_untrusted
from hf.config import WIDTH, Named, Said, config_from
from hf.fields import (
    FLAG,
    OBJECT,
    TEXT,
    Rule,
    integer,
    key,
    naming,
    positive,
    read_fields,
)
from hf.weights import check_layers, layer_names
from model import ModelConfig
from quantize import FORMATS, QuantLinear

DRAFT_INPUTS = "feature&shifted"  # what a row sees, in the words of EAGLE-1 figure 8; key `draft_inputs` (ours)
LAYERS = Rule(
    "a list of whole numbers", lambda v: type(v) is list and all(type(i) is int for i in v)
)


@dataclass(frozen=True)
class HeadSaid:
    """The further keys of a head's config.json (ours)."""

    draft_inputs: str = key(TEXT, DRAFT_INPUTS)
    draft_sharpness: float = key(positive(1e6), 1.0)  # c in log softmax(c z), see drafters.py


@dataclass(frozen=True)
class Eagle2Said(HeadSaid):
    """Those of versions 1 and 2."""

    bias: bool = key(FLAG, True)  # of its fc
    qkv_bias: bool = key(FLAG, False)


@dataclass(frozen=True)
class Nested:
    """The keys of a version-3 head's config.json with keys of their own."""

    transformer_layer_config: dict | None = key(
        OBJECT, None
    )  # speculators: what others have at the top
    eagle_config: dict | None = key(OBJECT, None)  # its keys are those of `Eagle3Said`


@dataclass(frozen=True)
class Eagle3Said(HeadSaid):
    """Its further keys. An empty list of layers is none."""

    target_hidden_size: int | None = key(WIDTH, None)  # as hidden_size
    draft_vocab_size: int | None = key(integer(1, 2**24), None)  # as d2t says, or all
    use_aux_hidden_state: bool = key(
        FLAG, True
    )  # False: it takes the target's last features, and has no fc
    norm_before_residual: bool = key(FLAG, False)
    norm_before_fc: bool = key(FLAG, False)
    fc_norm: bool = key(FLAG, False)
    norm_output: bool | None = key(FLAG, None)
    target_layer_ids: list | None = key(LAYERS, None)  # layers whose outputs fc takes
    eagle_aux_hidden_state_layer_ids: list | None = key(
        LAYERS, None
    )  # in `eagle_config` the same, else their inputs


# keys that say nothing about the function; a note names those that are neither here nor read
NEUTRAL = {
    "auto_map", "transformers_version", "initializer_range", "use_cache", "attention_dropout", "pretraining_tp",
    "pad_token_id", "max_window_layers", "num_target_layers", "target_model_type", "speculators_config",
    "speculators_model_type", "speculators_version", "embed_requires_grad", "quantization_config", "_name_or_path",
    "torch_dtype", "dtype",  # a head has its target's
}  # fmt: skip
OFF = {  # keys that change nothing with this value
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
BIASES = {"qkv_bias": "self_attn.q_proj", "o_bias": "self_attn.o_proj", "mlp_bias": "mlp.down_proj"}
FEEDS_NORMED = (
    "Eagle3LlamaForCausalLM",
    "LlamaEagle3DraftModel",
)  # vLLM's and NeMo's names, see `_last_norm`


@dataclass(frozen=True)
class Eagle3:
    """What a head of version 3 has besides its layers. Source: EAGLE-3 (arXiv 2503.01840)."""

    aux_layers: tuple[
        int, ...
    ]  # ascending layers of the target whose inputs `fc` fuses; none: it takes the features, no fc
    target_dim: int  # their width
    draft_vocab: int  # N, tokens that it drafts
    norm_before_fc: bool = False  # a norm over all that fc fuses
    fc_norm: bool = False  # a norm over each of them
    norm_before_residual: bool = False  # the residual stream begins with the normed hidden state
    last_norm: str = "logits"  # what it is for: the "logits" only, also the hidden state that is "fed" back, or "none"
    embedding: str = ""  # the tensor of its own embedding; "": the target's
    lm_head: str = "lm_head.weight"  # of its own LM head; "": the target's


@dataclass(frozen=True)
class EagleConfig:
    """What the head's own files say; nothing is taken from the target."""

    model: ModelConfig  # dims, KV heads, eps, RoPE base of the head's layers
    fc_bias: bool = True  # key `bias`; absent means True in versions 1 and 2
    sharpness: float = 1.0  # key `draft_sharpness` (ours): c in log softmax(c z), see drafters.py
    eagle3: Eagle3 | None = None  # None: version 1 or 2

    @staticmethod
    def from_dir(path: Path, raw: dict | None = None) -> EagleConfig:
        """Read `path/config.json` of version 1 or 2, or take `raw` for its content.

        Raises: ValueError for a missing or broken file or key.
        """
        raw = raw or read_json(path / "config.json")
        model = _layer_config(path, raw)
        with naming(path / "config.json"):
            said = read_fields(raw, Eagle2Said)
        _check_inputs(path, said)
        model = replace(model, qkv_bias=said.qkv_bias, o_bias=False, mlp_bias=False)
        return EagleConfig(model, fc_bias=said.bias, sharpness=said.draft_sharpness)


def _layer_config(path: Path, raw: dict) -> ModelConfig:
    with naming(path / "config.json"):
        # heads name the target's architecture; whatever it is, the head's layer is a LLaMA layer
        return config_from(raw, "LlamaForCausalLM")


def _check_inputs(path: Path, said: HeadSaid) -> None:
    if said.draft_inputs != DRAFT_INPUTS:
        raise ValueError(
            f"{path}: the head was trained on {said.draft_inputs}; only {DRAFT_INPUTS} can draft here"
        )


# --------------------------------------------------------------------------------------------- layouts


def version_of(names: Iterable[str]) -> int:
    """The version of a head by its tensors' names: 3, or 2 for versions 1 and 2, which are the same."""
    return (
        3
        if any(
            n.startswith("midlayer.") or n.endswith("layers.0.hidden_norm.weight") for n in names
        )
        else 2
    )


class HeadFiles(TensorSource):
    """The tensors of a head under the names of the official layout."""

    def __init__(self, path: Path, source: TensorSource):
        """Raises: ValueError for tensors of two heads, or of another version than config.json says."""
        names, config = list(source.readers), source.config
        self.path, self.config, self.version = path, config, version_of(names)
        self.readers = {self._official(name): reader for name, reader in source.readers.items()}
        mixes, layers = f"{path} mixes versions:", ("layers.0.", "model.layers.0.")
        self.midlayer = any(
            n.startswith("midlayer.") for n in names
        )  # as SafeAILab and SpecForge name the first layer
        if (
            self.midlayer
            and any(n.startswith(layers) for n in names)
            or len(self.readers) < len(names)
        ):
            raise ValueError(
                f"{mixes} it has tensors of two layouts, as midlayer. and layers.0.; keep those of one"
            )
        other = path / "pytorch_model.bin"
        others = (
            _names_in(other) if (path / "model.safetensors").is_file() and other.is_file() else []
        )
        if others and version_of(others) != self.version:
            raise ValueError(
                f"{mixes} model.safetensors and pytorch_model.bin hold two heads; remove one"
            )
        said = f"{config.get('architectures')} {config.get('speculators_model_type')}"
        if self.version < 3 and "eagle3" in said.lower():
            raise ValueError(
                f"{mixes} an EAGLE-3 config, and weights of EAGLE-1 or 2; use its own files"
            )

    def _official(self, name: str) -> str:
        if self.version < 3:
            return name
        name = name.removeprefix("model.")
        return (
            "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        )


def _names_in(file: Path) -> list[str]:
    """Tensors of a .bin file that is not loaded; none if it cannot be read."""
    try:
        with read_untrusted(file):
            return [*map(str, load_pickle(file, mmap=True))]
    except ValueError:
        return []


def head_names(config: EagleConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter's name -> the official head's tensors."""
    eagle3, names = config.eagle3, {}
    if eagle3 is None or eagle3.aux_layers:
        names = {"fc.weight": ("fc.weight",)} | (
            {"fc.bias": ("fc.bias",)} if config.fc_bias else {}
        )
    for i in range(config.model.n_layers):
        theirs = "midlayer." if eagle3 and i == 0 else f"layers.{i}."
        names |= layer_names(f"layers.{i}.", theirs, config.model)
    del names["layers.0.attention_norm.weight"]  # the first layer has no norm before its attention
    if eagle3 is None:
        return names
    norms = {"embedding_norm": "midlayer.input_layernorm", "hidden_norm": "midlayer.hidden_norm"}
    norms |= {"fed": {"norm": "norm"}, "logits": {"output_norm": "norm"}, "none": {}}[
        eagle3.last_norm
    ]
    norms |= {"input_norm": "input_norm"} if eagle3.norm_before_fc else {}
    norms |= (
        {f"fc_norm.{i}": f"fc_norm.{i}" for i in range(len(eagle3.aux_layers))}
        if eagle3.fc_norm
        else {}
    )
    names |= {f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in norms.items()}
    own = {"embedding.weight": eagle3.embedding, "lm_head.weight": eagle3.lm_head}
    return names | {ours: (theirs,) for ours, theirs in own.items() if theirs}


def is_unused(name: str, config: EagleConfig) -> bool:
    """Whether a head's tensor may stay unused."""
    # official files of versions 1 and 2 repeat the target's embedding; t2d says which tokens d2t reaches; speculators
    # may hold the norm and the LM head of their target
    named = ("verifier_norm.weight", "verifier_lm_head.weight") if config.eagle3 else ()
    return name.endswith((*named, "d2t", "t2d", "embed_tokens.weight", "rotary_emb.inv_freq"))


# ------------------------------------------------------------------------------------- what a head says


def read_head(files: HeadFiles, target: ModelConfig) -> EagleConfig:
    """What a head's files come to for a target.

    Raises: ValueError for a head of another target, or a config that cannot be.
    """
    path = files.path
    config = (
        EagleConfig.from_dir(path, files.config)
        if files.version < 3
        else _read_eagle3(files, target.n_layers)
    )
    check_layers(config.model, files)
    dim, eagle3 = config.model.dim, config.eagle3
    width = eagle3.target_dim if eagle3 else dim
    for what, ours, theirs in (
        ("hidden_size" if width == dim else "target_hidden_size", width, target.dim),
        ("vocab_size", config.model.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"{path}: {what} is {ours}, the target's is {theirs}; use the head made for this target"
            )
    if eagle3 and width != dim and not (eagle3.embedding and eagle3.lm_head and eagle3.aux_layers):
        own = f"hidden_size is {dim}, the target's is {width}"
        raise ValueError(
            f"{path}: {own}; such a head needs its own embed_tokens, fc and lm_head: download it again"
        )
    return config


def tell(files: HeadFiles, config: EagleConfig) -> None:
    """Print notes: which keys of config.json have no effect here, and what was made of `norm_output`."""
    raw, model = files.config, config.model
    parts: list[tuple[dict, tuple[type, ...]]] = [(raw, (Named, Said, Eagle2Said))]
    if config.eagle3:
        layer, flags = (raw.get(f.name) for f in fields(Nested))
        top = (Named, Nested, Eagle3Said) if layer else (Named, Nested, Eagle3Said, Said)
        parts = [(raw, top), (layer or {}, (Named, Said)), (flags or {}, (Eagle3Said,))]
    agrees = OFF | {
        "bias": config.fc_bias,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
    }
    agrees["tie_word_embeddings"], unknown = model.tie_embeddings, set()
    for part, tables in parts:
        known = NEUTRAL | {f.name for table in tables for f in fields(table)}
        unknown |= {
            k
            for k, v in part.items()
            if not (v in (agrees[k], None) if k in agrees else k in known)
        }
    if unknown:
        listed = ", ".join(sorted(unknown))
        print(
            f"note: {files.path}: keys of config.json without effect here: {listed}",
            file=sys.stderr,
        )
    output = (raw | flags if config.eagle3 and flags else raw).get("norm_output")
    if config.eagle3 and output is not None:
        taken = {
            "fed": "is fed back, normed",
            "logits": "is normed before the LM head only",
            "none": "is not normed",
        }
        meaning = f"here the output {taken[config.eagle3.last_norm]}"
        print(
            f"note: {files.path}: norm_output is {str(output).lower()}; {meaning}", file=sys.stderr
        )


def _read_eagle3(files: HeadFiles, layers: int) -> EagleConfig:
    """layers: how many the target has"""
    path, raw, has = files.path, files.config, files.readers
    with naming(path / "config.json"):
        inner, flags = (getattr(read_fields(raw, Nested), f.name) for f in fields(Nested))
        said = read_fields({**raw, **(flags or {})}, Eagle3Said)
        top, nested = read_fields(raw, Eagle3Said), read_fields(flags or {}, Eagle3Said)
    _check_inputs(path, said)
    model = _layer_config(path, raw if inner is None else inner)
    biases = {kind: f"midlayer.{name}.bias" in has for kind, name in BIASES.items()}
    model = replace(model, qk_norm="midlayer.self_attn.q_norm.weight" in has, **biases)
    vocab = said.draft_vocab_size or (
        files.read("d2t").numel() if "d2t" in has else model.vocab_size
    )
    every = vocab == model.vocab_size
    if vocab > model.vocab_size:
        too_many = (
            f"draft_vocab_size, or the length of d2t, is {vocab}, and vocab_size {model.vocab_size}"
        )
        raise ValueError(f"{path}: {too_many}; it must be at most that: correct config.json")
    embedding = "embed_tokens.weight" if "embed_tokens.weight" in has else ""
    tied = embedding if model.tie_embeddings and every else ""
    norms = {
        "norm_before_fc": said.norm_before_fc or "input_norm.weight" in has,
        "fc_norm": said.fc_norm or "fc_norm.0.weight" in has,
    }
    for name in norms if not said.use_aux_hidden_state else ():
        if norms[name]:
            raise ValueError(
                f"{path}: {name} norms what fc takes, and use_aux_hidden_state is false; correct one"
            )
    eagle3 = Eagle3(
        aux_layers=_aux_layers(path, top, nested, layers) if said.use_aux_hidden_state else (),
        target_dim=said.target_hidden_size or model.dim,
        draft_vocab=vocab,
        norm_before_residual=said.norm_before_residual,
        last_norm=_last_norm(files, said.norm_output, inner is not None or norms["fc_norm"]),
        embedding=embedding,
        lm_head="lm_head.weight" if "lm_head.weight" in has or not every else tied,
        **norms,
    )
    return EagleConfig(model, "fc.bias" in has, said.draft_sharpness, eagle3)


def _last_norm(files: HeadFiles, output: bool | None, newer: bool) -> str:
    """What `norm_output` means. newer: the layout is speculators', or the head has fc_norm

    True: the normed output is fed back, as in vLLM, NeMo and speculators; SpecForge norms it before the LM head only.
    False or absent: it is normed before the LM head only; SpecForge leaves out the norm where it is false.
    """
    if output is False and "norm.weight" not in files.readers:
        return "none"
    named = any(name in str(files.config.get("architectures")) for name in FEEDS_NORMED)
    return "fed" if output and (newer or named or not files.midlayer) else "logits"


def _aux_layers(path: Path, top: Eagle3Said, nested: Eagle3Said, layers: int) -> tuple[int, ...]:
    """Layers of the target whose inputs a head takes.

    Raises: ValueError for some that the target does not have, and for a list that does not ascend: vLLM puts the layers
    in ascending order, others take them as they are listed.
    """
    said = [  # the ids, and how far behind them the layer is whose input is meant
        (top.eagle_aux_hidden_state_layer_ids, 0), (nested.eagle_aux_hidden_state_layer_ids, 1),
        (top.target_layer_ids, 1), (nested.target_layer_ids, 1),
    ]  # fmt: skip
    found = {tuple(i + shift for i in ids) for ids, shift in said if ids}
    if len(found) > 1:
        twice = " and ".join(map(str, sorted(found)))
        raise ValueError(
            f"{path}: the target's layers are named twice, as inputs {twice}; keep one list"
        )
    aux_layers = found.pop() if found else (2, layers // 2, layers - 3)
    if (
        list(aux_layers) != sorted(set(aux_layers))
        or not 0 <= aux_layers[0] <= aux_layers[-1] <= layers
    ):
        which = "" if any(ids for ids, _ in said) else " (the default, since none are named)"
        raise ValueError(
            f"{path}: the head takes the inputs of the target's layers {', '.join(map(str, aux_layers))}{which}, which must "
            f"ascend from 0 to {layers} ({layers}: the last one's output); use its own target, or name others in "
            "eagle_aux_hidden_state_layer_ids"
        )
    return aux_layers


def draft_vocab(files: HeadFiles, config: EagleConfig, device: torch.device) -> DraftVocab | None:
    """The tokens that a head drafts; None: the target's. In files of versions 1 and 2, `d2t` is ours (train_eagle.py).

    Raises: ValueError for a `d2t` that leaves the vocabulary or repeats a token.
    Writes: `files`, whose LM head then has its rows in the order of the tokens: of equal scores the lowest one wins.
    """
    eagle3, size, path = config.eagle3, config.model.vocab_size, files.path
    count = (
        eagle3.draft_vocab
        if eagle3
        else files.read("d2t").numel()
        if "d2t" in files.readers
        else size
    )
    if count == size:  # the official code drops d2t then
        return None
    differences = files.read("d2t")
    if differences.shape != (count,) or differences.dtype not in (torch.int64, torch.int32):
        found = f"{differences.dtype} of shape {list(differences.shape)}"
        rule = f"d2t must hold draft_vocab_size ({count}) whole numbers; it is {found}"
        raise ValueError(f"{path}: {rule}; correct the key, or download the head again")
    ids, order = (torch.arange(count) + differences.long()).sort()
    for bad in (int(ids[0]), int(ids[-1])):
        if not 0 <= bad < size:
            rule = "a token is its index plus d2t"
            raise ValueError(
                f"{path}: d2t reaches the token {bad}, the target has 0..{size - 1}; {rule}: correct it"
            )
    repeated = ids[1:][ids.diff() == 0]
    if len(repeated):
        raise ValueError(
            f"{path}: d2t reaches the token {int(repeated[0])} twice; download the head again"
        )
    own = {eagle3.lm_head, scale_name(eagle3.lm_head)} & set(files.readers) if eagle3 else ()
    for name in own if (order.diff() < 0).any() else ():
        files.readers[name] = lambda read=files.readers[name]: read()[order]
    return DraftVocab(size, ids.to(device))


# ------------------------------------------------------------------------------------------ LM heads


def draft_lm_head(
    model: nn.Module, quant: Quantization | None, ids: Tensor | None = None
) -> nn.Module:
    """A model's LM head, or a copy of it in the draft's own format or with the rows of some tokens only.

    ids: [N] int64, the tokens to keep; None: all
    """
    # first, since rows are rounded one by one: their codes are the same, and fewer are computed
    own = model.lm_head if ids is None else rows_of(model.lm_head, ids)
    rounded = isinstance(own, QuantLinear)
    fits = (
        rounded and quant is not None and own.group_size in (0, quant.group_size or own.group_size)
    )
    if quant is None or (fits and own.format == quant.format):
        return own
    quant = fit_group(quant, {"the draft's copy of lm_head": own.in_features})
    weight = own.dequantize() if rounded else own.weight
    return FORMATS[quant.format].from_float(weight, None, quant.group_size, fp32_out=True)


def rows_of(linear: nn.Linear | QuantLinear, ids: Tensor) -> nn.Linear | QuantLinear:
    """A copy of an LM head that has only the outputs `ids`: the same weights, or codes and scales. ids: [N] int64."""
    if isinstance(linear, QuantLinear):
        return linear.rows(ids)
    rows = type(linear)(linear.in_features, len(ids), bias=False, device="meta")
    rows.weight = nn.Parameter(linear.weight.detach()[ids], requires_grad=False)  # [N, F]
    return rows
