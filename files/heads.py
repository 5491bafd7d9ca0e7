"""Read the files of a draft head: what all layouts share, and the heads of EAGLE-1, 2 and 3.

1. `head_files` opens a directory or a GGUF file. `HeadFiles` gives the tensors the names of the
   official layout of their kind (files/head_kinds.py), and puts the keys of config.json side by
   side (`flat_keys`). Block drafters (drafts/block_heads.py) are read from it, too.
2. `read_head` makes an `EagleConfig` of keys and names, and checks that the head fits the target.
   A norm, a bias, an embedding or an LM head in the weights is used, even against config.json, as
   is their number of layers. With `mask_hidden` it is P-EAGLE's.
3. `draft_vocab` returns the tokens that a head drafts, and `load_head` fills the modules.

Sources: the official code of EAGLE; the loaders of SGLang, vLLM and speculators (P-EAGLE: the
package speculators 0.9.0, models/peagle).
Not here: modules (files/eagle_variants.py, eagle_draft.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eagle_draft
from drafters import DraftVocab
from eagle_draft import EagleConfig, EagleHead, fill
from files.checkpoint import Codes, TensorSource, WeightFiles, with_codes
from files.config import HFArchitecture, config_from, open_source
from files.fields import (
    OBJECT,
    Rule,
    integer,
    key,
    key_of,
    naming,
    only,
    positive,
    read_fields,
)
from files.head_kinds import AUX, EAGLE1_SPECULATORS, EAGLE3, layout_of
from files.io import is_gguf
from files.keys import FULL, SLIDING, HFConfig, HFSwiGLU
from model import ModelConfig, Transformer
from options import load_part, log_note, require
from quantize import BLOCKS, Quantization

MASK = "mask_hidden"  # P-EAGLE's tensor: what stands for the target's hidden states
# the draft's inputs at a position, in the words of EAGLE-1 figure 8; key `draft_inputs` (ours)
DRAFT_INPUTS = "feature&shifted"
# keys of config.json -> the same in other words
OTHER_WORDS = {
    "causal_head": "causal",  # JetSpec's
    "is_causal": "causal",  # z-lab's
    "pard_token": "mask_token_id",  # vLLM's
    "ptd_token_id": "mask_token_id",
    "fusion_bias": "bias",  # speculators' of EAGLE-1
    "rope_is_neox_style": "is_neox_style",  # SGLang's, of LFM2.5's heads
}
DSPINE = {"transfer_rank": 1024, "top_k": 16}  # defaults
# keys that change nothing: those of training, and of what the weights or the target say. A note
# names the keys that are neither here nor read
NEUTRAL = {
    "_name_or_path", "alignment_warmup_steps", "alignment_weight", "attention_dropout", "auto_map",
    "base_model_name_or_path", "bias", "candidate_mass_threshold", "ce_weight",
    "confidence_head_alpha", "confidence_head_with_markov", "dtype", "embed_requires_grad",
    "enable_confidence_head", "initializer_range", "max_anchors", "max_window_layers",
    "num_anchors", "num_target_layers", "pad_token_id", "pretraining_tp", "qkv_bias",
    "quantization_config", "replacement_end_ratio", "replacement_hold_ratio", "replacement_layers",
    "replacement_probability", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "target_model_type", "torch_dtype",
    "transformers_version", "use_cache", "use_qk_norm",
}  # fmt: skip
OFF = {  # keys that change nothing with this value
    "layernorms": False,
    "use_sliding_window": False,
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
BIASES = {"qkv_bias": "self_attn.q_proj", "o_bias": "self_attn.o_proj", "mlp_bias": "mlp.down_proj"}
LAYERS = Rule(
    "a list of whole numbers from -1 (the embedding) on",
    lambda v: type(v) is list and all(map(integer(-1, 2**20).holds, v)),
)


@dataclass(frozen=True)
class HFNested:
    """The keys of config.json with keys of their own."""

    transformer_layer_config: dict | None = key(OBJECT, None)  # speculators': of the layers
    eagle_config: dict | None = key(OBJECT, None)
    dflash_config: dict | None = key(OBJECT, None)
    dspine_config: dict | None = key(OBJECT, None)


@dataclass(frozen=True)
class HFAux:
    """The keys that list layers of the target. An empty list counts as missing."""

    aux_hidden_state_layer_ids: list | None = key(LAYERS, None)
    eagle_aux_hidden_state_layer_ids: list | None = key(LAYERS, None)
    target_layer_ids: list | None = key(LAYERS, None)


@dataclass(frozen=True)
class HFHead:
    """The keys of config.json that every head may have (ours)."""

    draft_inputs: str = key(only(DRAFT_INPUTS), DRAFT_INPUTS)
    draft_sharpness: float = key(positive(1e6), 1.0)  # c in log softmax(c z), see drafters.py


SHARED = (HFArchitecture, HFConfig, HFSwiGLU, HFNested, HFAux, HFHead)  # records of keys


# ----------------------------------------------------------------------------- files and their keys


def head_files(path: Path, form: str = "") -> TensorSource:
    """Open the files of a head. Codes of another format than `form`, if any, become numbers."""
    if is_gguf(path):
        files = open_source(path)
        if form == BLOCKS:
            files.keep_blocks()
        return files
    files = with_codes(WeightFiles(path))
    if form and files.quant and files.quant.format != form:
        files.widen()
        files.stored = None
    return files


class HeadFiles(TensorSource):
    """The tensors of a head under the names of the official layout, and its keys side by side."""

    def __init__(self, path: Path, source: TensorSource, kind: str = "eagle"):
        """Rename the tensors of `source`. kind: a value of --draft

        Raises: ValueError for a model, tensors of two layouts, or of another version than
        config.json says.
        """
        names = [*source.readers, *source.quantized]
        self.path = path
        self.stored = source.stored
        self.layout = layout_of(path, kind, names)
        self._check_one_head(names, source.config)
        with naming(self.where):
            self.config = flat_keys(source.config)
        official = self.layout.official
        self.readers = {official(name): read for name, read in source.readers.items()}
        self.quantized = {official(name): read for name, read in source.quantized.items()}
        # SafeAILab and SpecForge name the first layer so
        self.midlayer = any(name.startswith("midlayer.") for name in names)
        if MASK in self.readers:
            self.readers[MASK] = partial(_row, self.readers[MASK])
        for held in (self.readers, self.quantized):
            if self.layout is EAGLE1_SPECULATORS:
                held.pop("lm_head.weight", None)  # the target's
            for name in [name for name in held if name.startswith("injection.")]:
                read = held.pop(name)  # DSpine's, of all layers: read for each, as small
                held |= {f"layers.{i}.{name}": read for i in range(layers_of(self))}

    @property
    def where(self) -> Path:
        """The file whose keys `config` has."""
        return self.path if is_gguf(self.path) else self.path / "config.json"

    def _check_one_head(self, names: list[str], raw: dict) -> None:
        """Check that all files are of one head. names: as the files have them"""
        official = set(map(self.layout.official, names))
        first_layers = {name[: name.find("layers.0.")] for name in names if "layers.0." in name}
        both = first_layers and any(name.startswith("midlayer.") for name in names)
        if both or len(official) < len(names):
            raise ValueError(
                f"{self.path} mixes versions: it has tensors of two layouts, as midlayer. and "
                "layers.0.; keep those of one"
            )
        kinds = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
        if self.layout.kind == "eagle" and self.layout is not EAGLE3 and "eagle3" in kinds:
            raise ValueError(
                f"{self.path} mixes versions: an EAGLE-3 config, and weights of EAGLE-1 or 2; "
                "use its own files"
            )


def _row(read: Callable[[], Tensor]) -> Tensor:
    return read().flatten()


def flat_keys(raw: dict) -> dict:
    """Return all keys of config.json side by side, in the words of the official layouts.

    Raises: ValueError for a key with two values, or layers of the target that are named twice.
    """
    nested = read_fields(raw, HFNested)
    flags = (nested.eagle_config or {}) | (nested.dflash_config or {})
    keys: dict[str, Any] = {}
    for name, value in (*raw.items(), *flags.items()):
        ours = OTHER_WORDS.get(name, name)
        if value is None or name in vars(HFAux()):
            continue
        if keys.setdefault(ours, value) != value:
            raise ValueError(f"{ours} is {keys[ours]}, and {value} in another place; keep one")
    keys = (nested.transformer_layer_config or {}) | keys
    if nested.dspine_config:
        keys |= DSPINE | nested.dspine_config | {"causal": True}  # as it is trained
        keys["selector_top_k"] = keys.pop("top_k")
    aux_layers = {
        # our layers are those whose inputs are meant; the keys in an object count outputs
        tuple(i + (part is flags or name == "target_layer_ids") for i in ids)
        for part in (raw, flags)
        for name, ids in vars(read_fields(part, HFAux)).items()
        if ids
    }
    if len(aux_layers) > 1:
        twice = " and ".join(map(str, sorted(aux_layers)))
        raise ValueError(f"the target's layers are named twice, as inputs {twice}; keep one list")
    if aux_layers:
        keys[AUX] = aux_layers.pop()
    rope = keys.get("rope_parameters") or {}
    if SLIDING in rope:  # drafters have one RoPE; speculators takes this one
        keys["rope_parameters"] = rope[SLIDING]
    return keys


def layer_config(files: HeadFiles, first: str, **changes: Any) -> ModelConfig:
    """Return the shape of a head's layers. Raises: ValueError for a missing or broken key.

    first: beginning of the names of the first one's tensors; changes: to the keys
    """
    # heads name the target's architecture; the head's own layers are always LLaMA's
    model = config_from(files.config | changes, "LlamaForCausalLM")
    biases = {kind: f"{first}{name}.bias" in files.held for kind, name in BIASES.items()}
    return replace(model, n_layers=layers_of(files), **biases)


def layers_of(files: HeadFiles) -> int:
    """Count the layers in a head's files.

    The official code makes one layer, and config.json may count the target's.
    """
    found = [re.match(r"layers\.(\d+)\.", name) for name in files.held]
    return len({match[1] for match in found if match} | {"0"})  # a midlayer is layer 0


def check_sizes(
    path: Path, width: int, vocab_size: int, target: ModelConfig, key: str = "hidden_size"
) -> None:
    """Check that a head is of its target's sizes. Raises: ValueError for another model's.

    width: of the features that it reads, by `key` of config.json
    """
    for name, ours, theirs in (
        (key, width, target.dim),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        fault = f"{path}: {name} is {ours}, the target's is {theirs}"
        require(ours == theirs, f"{fault}; use the head made for this target")


def check_aux_layers(path: Path, layers: tuple[int, ...], last: int, told: str = "") -> None:
    """Check the layers of the target whose inputs a head takes.

    last: the last one that may be; told: where they come from
    Raises: ValueError for layers that the target does not have, and for a list that does not
    ascend: vLLM puts the layers in ascending order, others take them as they are listed.
    """
    ascending = list(layers) == sorted(set(layers))
    if not ascending or not 0 <= layers[0] <= layers[-1] <= last:
        listed = ", ".join(map(str, layers))
        raise ValueError(
            f"{path}: the head takes the inputs of the target's layers {listed}{told}, which "
            f"must ascend from 0 to {last}; use its own target, or name others in "
            "eagle_aux_hidden_state_layer_ids or target_layer_ids"
        )


def note_keys(path: Path, raw: dict, records: Iterable[type], expected: dict[str, Any]) -> None:
    """Print the keys of a head's config.json without effect here, if there are any.

    raw: its content; records: of the keys that are read beside `SHARED`
    expected: keys that are not, and the values with which they change nothing
    """
    every = (declared for record in (*SHARED, *records) for declared in fields(record))
    known = NEUTRAL | {key_of(declared) for declared in every}
    unknown = []
    for name, value in sorted(raw.items()):
        if value != expected[name] if name in expected else name not in known:
            unknown.append(name)
    if unknown:
        log_note(f"{path}: keys of config.json without effect here: {', '.join(unknown)}")


# ---------------------------------------------------------------------------------- heads of EAGLE


def read_head(files: HeadFiles, target: ModelConfig) -> EagleConfig:
    """Read the config of a head and check it against its target.

    Raises: ValueError for a head of another target, or an impossible config. Writes: notes.
    """
    path = files.path
    is_3 = files.layout is EAGLE3
    with naming(files.where):
        hf = read_fields(files.config, HFHead)
        model = layer_config(files, "midlayer." if is_3 else "layers.0.")
    eagle3 = load_part("reader", "eagle3").read_eagle3(files, model, target) if is_3 else None
    if "midlayer.self_attn.q_norm.weight" in files.held:
        model = load_part("architecture", "Qwen3ForCausalLM").with_head_norms(model)
    config = EagleConfig(model, "fc.bias" in files.held, hf.draft_sharpness, eagle3)
    width = eagle3.target_dim if eagle3 else model.dim
    own = "hidden_size" if width == model.dim else "target_hidden_size"
    check_sizes(path, width, model.vocab_size, target, own)
    if width != model.dim and not (eagle3.embedding and eagle3.lm_head and eagle3.aux_layers):
        raise ValueError(
            f"{path}: hidden_size is {model.dim}, the target's is {width}; such a head needs its "
            "own embed_tokens, fc and lm_head: download it again"
        )
    return config


def load_head(
    path: Path,
    target: Transformer,
    quant: Quantization | None = None,
    source: TensorSource | None = None,
    form: str = "",
) -> EagleHead:
    """Load a head in any layout, as `eagle_draft.load_head` does in one.

    source: tensors that replace the files
    form: the number format of a draft; codes of another one are read as their numbers
    Raises: ValueError for a head of another target, or broken files.
    """
    source = source or head_files(path, form)
    files = HeadFiles(path, source)
    config = read_head(files, target.config)
    eagle3 = config.eagle3
    tables = [eagle3.lm_head] if eagle3 else []
    vocab = draft_vocab(files, config.model.vocab_size, tables, eagle3.draft_vocab if eagle3 else 0)
    records = load_part("reader", "eagle3").RECORDS if eagle3 else ()
    full = {"layer_types": [FULL] * config.model.n_layers}
    note_keys(path, files.config, records, OFF | full)
    with torch.device("meta"):
        head = make_head(config)
    head.vocab = vocab
    fill(head, target, files, head.weight_names(), files.quant or quant, is_unused)
    if head.embedding is not None and is_same_embedding(head.embedding, target):
        head.embedding = None  # one copy is enough
    return head


def make_head(config: EagleConfig) -> EagleHead:
    """Make a head of any version and layout."""
    return load_part("reader", "eagle3").VariantHead(config) if config.eagle3 else EagleHead(config)


def is_unused(name: str) -> bool:
    """Return whether a head's tensor may stay unused.

    Speculators may hold the norm and the LM head of their target; DSpine's has a mark of training.
    """
    further = ("verifier_norm.weight", "verifier_lm_head.weight", "transfer_ready")
    return eagle_draft.is_unused(name) or name.endswith(further)


def is_same_embedding(of_head: nn.Module, target: Transformer) -> bool:
    """Return whether a head's embedding repeats the target's, packed or not."""
    parts = torch.arange(target.config.vocab_size, device=target.norm.weight.device).split(4096)
    rows = ((of_head(ids), target.embedding(ids)) for ids in parts)
    return all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in rows)


# ------------------------------------------------------------------------------- draft vocabularies


def draft_vocab(
    files: TensorSource, size: int, tables: Sequence[str], count: int = 0
) -> DraftVocab | None:
    """Return the tokens that a head drafts, by `d2t`; None: all `size` of the target.

    tables: the weights with a row for each of them
    count: of them, by config.json; 0: as many as `d2t` has, which in files of versions 1 and 2 is
        ours (scripts/train/losses.py)
    Raises: ValueError for a `d2t` that leaves the vocabulary or repeats a token.
    Writes: `files`, where the rows of tables then have the tokens' order: of equal scores the
    lowest token wins.
    """
    count = count or d2t_size(files, size)
    if count == size:  # the official code drops d2t then
        return None
    differences = files.read("d2t")
    whole = differences.dtype in (torch.int64, torch.int32)
    actual = f"{differences.dtype} of shape {list(differences.shape)}"
    fault = f"{files.path}: d2t must hold draft_vocab_size ({count}) whole numbers; it is {actual}"
    remedy = "correct the key, or download the head again"
    require(whole and differences.shape == (count,), f"{fault}; {remedy}")
    ids, order = (torch.arange(count) + differences.long()).sort()
    for extreme in (int(ids[0]), int(ids[-1])):
        fault = f"{files.path}: d2t reaches the token {extreme}, the target has 0..{size - 1}"
        require(0 <= extreme < size, f"{fault}; a token is its index plus d2t: correct it")
    for repeated in ids[1:][ids.diff() == 0].tolist():
        fault = f"{files.path}: d2t reaches the token {repeated} twice"
        raise ValueError(f"{fault}; download the head again")
    if (order.diff() < 0).any():
        for name in tables:
            order_rows(files, name, order)
    return DraftVocab(size, ids)


def d2t_size(files: TensorSource, vocab_size: int) -> int:
    """Return the length of d2t; without it a head drafts the whole vocabulary."""
    return (*files.shape("d2t"), vocab_size)[0]


def order_rows(files: TensorSource, name: str, order: Tensor) -> None:
    """Put the rows of a weight in another order. Writes: its reader, if there is one."""
    if name in files.readers:
        read = files.readers[name]
        files.readers[name] = lambda: read()[order]
    if name in files.quantized:
        weight = files.quantized[name]()
        if isinstance(weight, Codes):
            weight = Codes(*(None if part is None else part[order] for part in weight))
        else:  # in the blocks of a GGUF file
            weight = weight._replace(order=order)
        files.quantized[name] = lambda: weight
