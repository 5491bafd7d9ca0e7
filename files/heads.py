"""Read the files of a draft head: EAGLE-1, 2 and 3, in the layouts in use.

1. `HeadFiles` gives a head's tensors the names of the official layout, and finds their version.
2. `read_head` makes an `EagleConfig` of config.json and of these names, and checks that the head
   fits the target; the keys of version 3 are in eagle3_heads.py.
3. `draft_vocab` returns the tokens that a head drafts, and `load_head` fills the modules of
   eagle_variants.py.

Layouts of version 3: SafeAILab, SpecForge and SGLang (`midlayer.`), vLLM and DeepSpec
(`layers.0.`), speculators (the same, and a config of the layer inside the config), NeMo
(`model.layers.0.`); of versions 1 and 2: the official one, and speculators' (`transformer.`). A
norm, a bias, an embedding or an LM head in the weights is used, even against config.json, as is
their number of layers. With `mask_hidden` it is P-EAGLE's (speculators' `peagle`, SpecForge's).
Sources: the official code of EAGLE; the loaders of SGLang, vLLM and speculators (P-EAGLE: the
package speculators 0.9.0, models/peagle).
Not here: modules (eagle_variants.py, eagle_draft.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import eagle_draft
from drafters import DraftVocab
from eagle_draft import EagleConfig, EagleHead, fill
from files.checkpoint import TensorSource, WeightFiles, from_file, saved_quantization, scale_name
from files.config import HFArchitecture, config_from, open_source
from files.fields import (
    FLAG,
    TEXT,
    key,
    naming,
    positive,
    read_fields,
)
from files.io import is_gguf, read_json
from files.keys import HFConfig, HFSwiGLU
from files.untrusted import load_pickle, read_untrusted
from model import ModelConfig, Transformer
from options import load_part, log_note, require
from quantize import BLOCKS, Quantization, decode

MASK = "mask_hidden"  # P-EAGLE's tensor: what stands for the target's hidden states
# beginnings of tensors' names in speculators' layout of EAGLE-1 -> the official ones
OF_SPECULATORS = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
LAYOUTS = (
    "EAGLE-1 to 3, P-EAGLE, DFlash, DFlash2, JetSpec, DSpark, DSpine, LiLiCorr, Medusa and Hydra"
)
# the draft's inputs at a position, in the words of EAGLE-1 figure 8; key `draft_inputs` (ours)
DRAFT_INPUTS = "feature&shifted"


@dataclass(frozen=True)
class HFHead:
    """The keys of config.json that every head may have (ours)."""

    draft_inputs: str = key(TEXT, DRAFT_INPUTS)
    draft_sharpness: float = key(positive(1e6), 1.0)  # c in log softmax(c z), see drafters.py


@dataclass(frozen=True)
class HFEagle2Head(HFHead):
    """The further keys of a head of version 1 or 2."""

    bias: bool = key(FLAG, True)  # of its fc
    qkv_bias: bool = key(FLAG, False)


# keys without a meaning for the function; a note names the keys that are neither here nor read
NEUTRAL = {
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "dtype",  # a head has its target's
    "embed_requires_grad",
    "initializer_range",
    "max_window_layers",
    "num_target_layers",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_model_type",
    "torch_dtype",  # a head has its target's
    "transformers_version",
    "use_cache",
    "use_qk_norm",  # the tensors say it
}
OFF = {  # keys that change nothing with this value
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
BIASES = {"qkv_bias": "self_attn.q_proj", "o_bias": "self_attn.o_proj", "mlp_bias": "mlp.down_proj"}


def read_eagle2(path: Path, raw: dict | None = None) -> EagleConfig:
    """Read `path/config.json` of version 1 or 2, or take `raw` for its content.

    Raises: ValueError for a missing or broken file or key.
    """
    raw = raw or read_json(path / "config.json")
    model = layer_config(path, raw)
    with naming(path / "config.json"):
        hf = read_fields(raw, HFEagle2Head)
    check_inputs(path, hf)
    model = replace(model, qkv_bias=hf.qkv_bias, o_bias=False, mlp_bias=False)
    return EagleConfig(model, fc_bias=hf.bias, sharpness=hf.draft_sharpness)


def layer_config(path: Path, raw: dict) -> ModelConfig:
    """Read the shape of a head's layers. Raises: ValueError for a missing or broken key."""
    with naming(path / "config.json"):
        # heads name the target's architecture; the head's own layer is always a LLaMA layer
        return config_from(raw, "LlamaForCausalLM")


def check_inputs(path: Path, hf: HFHead) -> None:
    if hf.draft_inputs != DRAFT_INPUTS:
        raise ValueError(
            f"{path}: the head was trained on {hf.draft_inputs}; only {DRAFT_INPUTS} can draft here"
        )


# -------------------------------------------------------------------------------------- layouts


def head_files(path: Path, form: str) -> TensorSource:
    """Open the files of a head. Codes of another format than `form` are read as their numbers."""
    if is_gguf(path):
        files = open_source(path)
        if form == BLOCKS:
            files.keep_blocks()
        return files
    files = WeightFiles(path)
    saved = saved_quantization(files.config, path)
    if saved is None or saved.format == form:
        return files
    for name in [*files.readers]:
        scale = files.readers.pop(scale_name(name), None)
        if scale:
            files.readers[name] = partial(_numbers, saved.format, files.readers[name], scale)
    files.config = {k: v for k, v in files.config.items() if k != "quantization_config"}
    return files


def _numbers(format: str, codes: Callable[[], Tensor], scale: Callable[[], Tensor]) -> Tensor:
    return decode(from_file(format, codes()), scale())


def version_of(names: Iterable[str]) -> int:
    """Return a head's version by its tensors' names: 3, or 2 for versions 1 and 2.

    Versions 1 and 2 have the same files.
    """
    for name in names:
        if name.startswith("midlayer.") or name.endswith("layers.0.hidden_norm.weight"):
            return 3
    return 2


class HeadFiles(TensorSource):
    """The tensors of a head under the names of the official layout."""

    def __init__(self, path: Path, source: TensorSource):
        """Rename the tensors of `source`.

        Raises: ValueError for a model, or tensors of two heads, or of another version than
        config.json says.
        """
        names = [*source.readers, *source.quantized]
        self.path = path
        self.config = _without_speculators_layout(path, source.config)
        self.version = version_of(names)
        self.readers = {self._official(name): reader for name, reader in source.readers.items()}
        self.quantized = {self._official(name): read for name, read in source.quantized.items()}
        if self.config is not source.config:
            self.readers.pop("lm_head.weight", None)  # the target's
        # SafeAILab and SpecForge name the first layer so
        self.midlayer = any(name.startswith("midlayer.") for name in names)
        if MASK in self.readers:  # [1, 1, aux F]
            self.readers[MASK] = partial(_flat, self.readers[MASK])
        self._check_one_head(names)

    def _check_one_head(self, names: list[str]) -> None:
        """Check that all files are of one head. names: as the files have them"""
        path = self.path
        layers = any(name.startswith("model.layers.") for name in names)
        if self.version < 3 and layers and "fc.weight" not in names:
            raise ValueError(
                f"{path} holds a model, and no head (model.layers, no fc.weight); use --draft "
                f"model --draft_checkpoint {path}, or name the directory of a head"
            )
        if self.version < 3 and {"fc.weight", "fusion_fc.weight"}.isdisjoint(names):
            more = " and others" if len(names) > 3 else ""
            raise ValueError(
                f"{path} is in no layout that is known: its tensors are {', '.join(names[:3])}"
                f"{more}; known are {LAYOUTS} (files/HEADS.md)"
            )
        first_layer = ("layers.0.", "model.layers.0.")
        both = self.midlayer and any(name.startswith(first_layer) for name in names)
        if both or len(set(map(self._official, names))) < len(names):
            raise ValueError(
                f"{path} mixes versions: it has tensors of two layouts, as midlayer. and "
                "layers.0.; keep those of one"
            )
        other = path / "pytorch_model.bin"
        if (path / "model.safetensors").is_file() and other.is_file():
            other_names = _names_in(other)
            if other_names and version_of(other_names) != self.version:
                raise ValueError(
                    f"{path} mixes versions: model.safetensors and pytorch_model.bin hold "
                    "two heads; remove one"
                )
        kinds = f"{self.config.get('architectures')} {self.config.get('speculators_model_type')}"
        if self.version < 3 and "eagle3" in kinds.lower():
            raise ValueError(
                f"{path} mixes versions: an EAGLE-3 config, and weights of EAGLE-1 or 2; "
                "use its own files"
            )

    def _official(self, name: str) -> str:
        if self.version < 3:
            for begin, own in OF_SPECULATORS.items():
                if name.startswith(begin):
                    return own + name.removeprefix(begin)
            return name
        name = name.removeprefix("model.")
        if name.startswith("layers.0."):
            return "midlayer." + name.removeprefix("layers.0.")
        return name


def _flat(read: Callable[[], Tensor]) -> Tensor:
    return read().flatten()


def _without_speculators_layout(path: Path, raw: dict) -> dict:
    """Return a config.json of an EAGLE-1 head in speculators' layout with the official keys.

    Raises: ValueError for a head with norms that the official one lacks.
    """
    layer = raw.get("transformer_layer_config")
    if raw.get("speculators_model_type") != "eagle" or not isinstance(layer, dict):
        return raw
    if raw.get("layernorms"):
        raise ValueError(
            f"{path}: a head in speculators' format with layernorms is not supported; "
            "use a head of EAGLE-1, 2 or 3 for this model"
        )
    own = {name: raw[name] for name in ("draft_inputs", "draft_sharpness") if name in raw}
    return layer | own | {"bias": raw.get("fusion_bias", False)}


def _names_in(file: Path) -> list[str]:
    """Return the tensors' names in a .bin file that is not loaded; none if it cannot be read."""
    try:
        with read_untrusted(file):
            return [*map(str, load_pickle(file, mmap=True))]
    except ValueError:
        return []


# ---------------------------------------------------------------------------- config of a head


def read_head(files: HeadFiles, target: ModelConfig) -> EagleConfig:
    """Read the config of a head and check it against its target.

    Raises: ValueError for a head of another target, or an impossible config.
    """
    path = files.path
    if files.version < 3:
        config = read_eagle2(path, files.config)
    else:
        config = load_part("reader", "eagle3").read_eagle3(files, target.n_layers)
    config = replace(config, model=replace(config.model, n_layers=layers_of(files)))
    dim = config.model.dim
    eagle3 = config.eagle3
    width = dim
    if eagle3:
        width = eagle3.target_dim
    own = "hidden_size" if width == dim else "target_hidden_size"
    check_sizes(path, width, config.model.vocab_size, target, own)
    if eagle3 and width != dim and not (eagle3.embedding and eagle3.lm_head and eagle3.aux_layers):
        raise ValueError(
            f"{path}: hidden_size is {dim}, the target's is {width}; such a head needs its own "
            "embed_tokens, fc and lm_head: download it again"
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
    if source is None:
        source = head_files(path, form) if form else WeightFiles(path)
    saved = saved_quantization(source.config, path)
    files = HeadFiles(path, source)
    config = read_head(files, target.config)
    ids = draft_vocab(files, config)
    note_keys(path, keys_without_effect(files.config, config))
    with torch.device("meta"):
        head = make_head(config)
    if ids is not None:
        head.vocab = DraftVocab(config.model.vocab_size, ids)
    unused = partial(is_unused, config=config)
    fill(head, target, files, head.weight_names(), saved or quant, unused)
    if head.embedding is not None and is_same_embedding(head.embedding, target):
        head.embedding = None  # one copy is enough
    return head


def make_head(config: EagleConfig) -> EagleHead:
    """Make a head of any version and layout."""
    return load_part("reader", "eagle3").VariantHead(config) if config.eagle3 else EagleHead(config)


def is_unused(name: str, config: EagleConfig) -> bool:
    """Return whether a head's tensor may stay unused.

    Speculators may hold the norm and the LM head of their target.
    """
    of_target = ("verifier_norm.weight", "verifier_lm_head.weight")
    return eagle_draft.is_unused(name) or (config.eagle3 and name.endswith(of_target))


def is_same_embedding(of_head: nn.Module, target: Transformer) -> bool:
    """Return whether a head's embedding repeats the target's, packed or not."""
    parts = torch.arange(target.config.vocab_size, device=target.norm.weight.device).split(4096)
    rows = ((of_head(ids), target.embedding(ids)) for ids in parts)
    return all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in rows)


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


def layers_of(files: TensorSource) -> int:
    """Count the layers in a head's files.

    The official code makes one layer, and config.json may count the target's.
    """
    found = [re.match(r"layers\.(\d+)\.", name) for name in (*files.readers, *files.quantized)]
    return len({match[1] for match in found if match} | {"0"})  # a midlayer is layer 0


def note_keys(path: Path, unknown: Iterable[str]) -> None:
    """Print the keys of a head's config.json without effect here, if there are any."""
    listed = ", ".join(sorted(unknown))
    if listed:
        log_note(f"{path}: keys of config.json without effect here: {listed}")


def keys_without_effect(raw: dict, config: EagleConfig) -> set[str]:
    """Return the keys of a head's config.json that nothing reads and that are not neutral."""
    parts: list[tuple[dict, tuple[type, ...]]]  # an object in it, and the records of its keys
    if config.eagle3:
        parts = load_part("reader", "eagle3").records_of_keys(raw)
    else:
        parts = [(raw, (HFArchitecture, HFConfig, HFSwiGLU, HFEagle2Head))]
    model = config.model
    expected = OFF | {
        "bias": config.fc_bias,
        "layer_types": ["full_attention"] * model.n_layers,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_embeddings,
    }
    unknown = set()
    for part, records in parts:
        known = NEUTRAL | {declared.name for record in records for declared in fields(record)}
        for name, value in part.items():
            if name in expected and value not in (expected[name], None):
                unknown.add(name)
            if name not in expected and name not in known:
                unknown.add(name)
    return unknown


def draft_vocab(files: TensorSource, config: EagleConfig) -> Tensor | None:
    """Return the tokens that a head drafts; None: the target's.

    In files of versions 1 and 2, `d2t` is ours (scripts/train/losses.py).

    Raises: ValueError for a `d2t` that leaves the vocabulary or repeats a token.
    Writes: `files`, whose LM head then has its rows in the order of the tokens: of equal scores
    the lowest token wins.
    """
    eagle3 = config.eagle3
    size = config.model.vocab_size
    count = files.read("d2t").numel() if "d2t" in files.readers else size
    if eagle3:
        count = eagle3.draft_vocab
    if count == size:  # the official code drops d2t then
        return None
    ids, order = drafted_ids(files, count, size)
    if eagle3:
        order_rows(files, eagle3.lm_head, order)
    return ids


def order_rows(files: TensorSource, name: str, order: Tensor) -> None:
    """Put the rows of a weight, one for each drafted token, in another order.

    Writes: the reader of the weight, if there is one.
    """
    if not (order.diff() < 0).any():
        return
    for part in {name, scale_name(name)} & set(files.readers):
        files.readers[part] = partial(_read_permuted, files.readers[part], order)
    if name in files.quantized:  # in the blocks of a GGUF file
        blocks = files.quantized[name]()._replace(order=order)
        files.quantized[name] = lambda: blocks


def drafted_ids(files: TensorSource, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Read the ids of the `count` tokens in `d2t`. size: of the target's vocabulary

    Returns: ([Vd] ids, ascending; [Vd] their places in the file), int64.
    """
    path = files.path
    differences = files.read("d2t")
    if differences.shape != (count,) or differences.dtype not in (torch.int64, torch.int32):
        actual = f"{differences.dtype} of shape {list(differences.shape)}"
        raise ValueError(
            f"{path}: d2t must hold draft_vocab_size ({count}) whole numbers; it is {actual}; "
            "correct the key, or download the head again"
        )
    ids, order = (torch.arange(count) + differences.long()).sort()
    for extreme in (int(ids[0]), int(ids[-1])):
        if not 0 <= extreme < size:
            raise ValueError(
                f"{path}: d2t reaches the token {extreme}, the target has 0..{size - 1}; "
                "a token is its index plus d2t: correct it"
            )
    repeated = ids[1:][ids.diff() == 0]
    if len(repeated):
        raise ValueError(
            f"{path}: d2t reaches the token {int(repeated[0])} twice; download the head again"
        )
    return ids, order


def _read_permuted(read: Callable[[], Tensor], order: Tensor) -> Tensor:
    return read()[order]
