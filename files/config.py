"""Read a checkpoint's `config.json` as a `ModelConfig`, and find the draft of a target.

A checkpoint is a Hugging Face directory or a GGUF file; `open_source` and `read_raw` take both.
The dataclasses here declare each key that is read, with its type, range and default
(`read_fields`). An unknown architecture, activation or RoPE type is an error, not a guess.
Not here: how the files hold quantized weights (quantize.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.library import has_cpu_operators
from files import registry
from files.checkpoint import (
    TensorSource,
    WeightFiles,
    foreign_quantization,
    read_model_config,
    saved_quantization,
    scale_name,
)
from files.fields import NAMES, TEXT, TOKEN_IDS, key, naming, read_fields
from files.gguf_blocks import keeps_blocks
from files.gguf_header import read_header
from files.head_kinds import gguf_head_kind, head_kind
from files.io import bundled_head, is_gguf, read_json
from files.keys import HFLayerTypes, all_ids, check_layer_types
from files.known_heads import own_head
from files.stacks import StackedFiles, has_stacks, plain_config
from model import ModelConfig
from options import log_note
from quantize import BLOCKS
from run.methods import MTP, head_kinds
from run.options import OF_DRAWS, GenerateConfig, Sampling

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class HFArchitecture:
    """The keys of config.json that name the kind of model."""

    architectures: list | None = key(NAMES, None)
    model_type: str = key(TEXT, "unknown")


@dataclass(frozen=True)
class HFGenerationConfig:
    """The keys of generation_config.json that are read."""

    eos_token_id: int | list | None = key(TOKEN_IDS, None)


def open_source(path: Path) -> TensorSource:
    """Open a checkpoint's tensors and config.

    Raises: ValueError when the checkpoint is missing, broken or not supported.
    """
    if is_gguf(path):
        if gguf_head_kind(path) not in ("", MTP):  # which has a model's names
            from files.gguf_heads import GgufHead

            return GgufHead(path)
        from files.gguf import GgufFile

        return GgufFile(path)
    files = open_files(path)
    if has_stacks(files):
        return StackedFiles(files)
    if foreign_quantization(files.config) is None:
        return files
    from files.gptq_awq import QuantizedFiles

    return QuantizedFiles(files)


def open_files(path: Path) -> WeightFiles:
    """Open the files of a model's directory, by the names that a whole model has.

    The layers saved alone have no prefix. A tied model may hold its one matrix as the LM head
    only; two that differ are both used, as in transformers 5.
    """
    files = WeightFiles(path)
    readers = files.readers
    row = registry.row_of(None, files.config.get("model_type"))
    rename = getattr(row.load(), "rename", None) if row else None
    if rename:
        with naming(path / "config.json"):
            readers = rename(readers, files.config)
    is_head = "fc.weight" in readers  # a draft head's names have no prefix
    if EMBEDDING.removeprefix("model.") in readers and not is_head:
        readers = {
            name if name.startswith("lm_head.") else f"model.{name}": read
            for name, read in readers.items()
        }
    if files.config.get("tie_word_embeddings") and LM_HEAD in readers:
        if EMBEDDING not in readers:
            readers[EMBEDDING] = readers.pop(LM_HEAD)
        elif scale_name(LM_HEAD) not in readers and not _same(
            readers[EMBEDDING](), readers[LM_HEAD]()
        ):
            differ = "tie_word_embeddings is true, and lm_head.weight is not the embedding"
            log_note(f"{path}: {differ}: both are used")
            files.config["tie_word_embeddings"] = False
    files.readers = readers
    return files


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def read_raw(path: Path) -> dict:
    """Read the content of a checkpoint's config.json, as the `config` of `open_source`.

    Raises: as `open_source`.
    """
    if is_gguf(path):
        return open_source(path).config
    raw = plain_config(read_model_config(path))
    if foreign_quantization(raw) is None:
        return raw
    from files.quant_config import as_ours

    return as_ours(raw, path)


def read_config(path: Path, raw: dict | None = None) -> ModelConfig:
    """Read a checkpoint's config.json, and further EOS ids from `generation_config.json`.

    raw: the content of config.json, where it was read or made already
    Raises: ValueError for a missing directory, broken JSON, an unknown architecture or RoPE type,
    a bad value.
    """
    raw = raw or read_raw(path)
    generation_file = path / "generation_config.json"
    extra_eos = None
    if generation_file.exists():
        generation = read_json(generation_file)
        with naming(generation_file):
            extra_eos = read_fields(generation, HFGenerationConfig).eos_token_id
    file = path
    if not is_gguf(path):
        file = path / "config.json"
    with naming(file):
        kind = read_fields(raw, HFArchitecture)
        row = registry.row_of(kind.architectures, kind.model_type)
        if row is not None:
            config = config_from(raw, row.name, extra_eos)
            check_kinds(raw, config)
            return config
    name = (kind.architectures or [kind.model_type])[0]
    raise ValueError(f"{path}: {registry.refusal(name)}")


def check_kinds(raw: dict, config: ModelConfig) -> None:
    """Check that a model whose layers are all alike names no layer of another kind.

    raw: config.json. Raises: ValueError.
    """
    if not config.windows and config.state_shapes is None:
        check_layer_types(read_fields(raw, HFLayerTypes).layer_types, config.n_layers)


# of `Sampling`: what llama.cpp's keys call otherwise
GGUF_SAMPLING = {
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
}


def recommended_sampling(path: Path) -> dict[str, Any]:
    """Return the sampling that a model names, by the fields of `options.Sampling`.

    A directory names it in generation_config.json, a GGUF file in its metadata. As in transformers,
    a model that is sampled has a temperature of 1 where none is named, and one that asks for no
    draw, or has `do_sample` false, is decoded greedily: its penalties alone are returned.
    Raises: ValueError for a broken file.
    """
    samples = None
    if is_gguf(path):
        metadata = read_header(path).metadata
        found = {name: metadata.get(f"general.sampling.{name}") for name in Sampling._fields}
        for name, theirs in GGUF_SAMPLING.items():
            found[name] = metadata.get(f"general.sampling.{theirs}")
    else:
        file = path / "generation_config.json"
        generation = read_json(file) if file.exists() else {}
        found = {name: generation.get(name) for name in Sampling._fields}
        samples = generation.get("do_sample")
    found = {name: value for name, value in found.items() if value is not None}
    if samples is None:
        samples = any(name in found for name in OF_DRAWS)
    if samples:
        return {"temperature": 1.0} | found
    return {name: value for name, value in found.items() if name not in OF_DRAWS}


def config_from(
    raw: dict, architecture: str, extra_eos: int | list[int] | None = None
) -> ModelConfig:
    """Translate Hugging Face's keys into ours. extra_eos: further ids that end a sequence

    Raises: ValueError for a missing key or a bad value.
    """
    config = registry.row_named(architecture).load().read_config(raw, architecture)
    return replace(config, eos_ids=all_ids([*config.eos_ids], extra_eos))


# ------------------------------------------------------------------------------ beside a target


def resolve_draft(
    config: GenerateConfig, path: Path, dtype: str = "", without_head: str = "none"
) -> GenerateConfig:
    """Fill in the draft (a head next to the target is the default), its format, and `dtype`.

    config: `dtype` as the user gave it, `quant` as the target was loaded
    dtype: of the target as it was loaded; default: as `config` has it
    without_head: the draft where none is asked for, and there is no head
    """
    head = _head_of(config, path)
    draft = config.draft
    if not draft:
        draft = head_kind(Path(head)) if head else without_head
        if not head:
            replace(config, draft=draft).check_needs()
    if draft == MTP and not head:
        head = str(path)  # which holds it
    config = replace(config, draft=draft, head=head)
    draft_path = Path(head or config.draft_checkpoint)
    resolved = replace(config, dtype=dtype or config.dtype, quant_draft="none")
    if not (head or config.draft_checkpoint):
        return resolved
    asked = replace(resolved, quant_draft=config.quant_draft)
    in_blocks = keeps_blocks(config, draft_path) and open_source(draft_path).block_types != ""
    if head and config.device.startswith("cuda"):
        in_blocks = False  # a head is rounded as one of a directory
    form = _draft_format(asked, draft_path, in_blocks)
    return replace(resolved, quant_draft=BLOCKS if form == "none" and in_blocks else form)


def _head_of(config: GenerateConfig, path: Path) -> str:
    """Return the files of the head that drafts: as given, or the checkpoint's own; "": none.

    Raises: ValueError for a kind of draft whose head is missing, or of another kind.
    """
    kind = config.draft.removesuffix("+ngram") or "eagle"
    if kind not in head_kinds():
        return ""
    head = config.head or own_head(path, config.draft and kind)
    if not config.draft or (kind == MTP and not head):
        return head
    if not head:
        raise ValueError(
            f"--draft {config.draft} needs a head; name its directory with --head "
            f"(there is no {bundled_head(path, kind)})"
        )
    own_kind = head_kind(Path(head))
    if own_kind != kind:
        raise ValueError(
            f"--draft {config.draft} needs a head of its own kind, and {head} holds one of the "
            f"kind {own_kind}; name another --head, or drop --draft"
        )
    return head


def _draft_format(config: GenerateConfig, path: Path, in_blocks: bool) -> str:
    """Return the draft's number format: of its files, or of `quant_draft`, or the target's.

    in_blocks: its file is a GGUF file whose blocks can stay
    """
    raw = read_raw(path)
    saved = saved_quantization(raw)
    asked = config.quant_draft
    if saved is not None:
        if asked not in ("", saved.format) and not config.draft.startswith("eagle"):
            raise ValueError(f"{path} is quantized already ({saved.format}); drop quant_draft")
        return asked or saved.format
    if asked:
        return asked
    if config.head and in_blocks:
        return "none"
    if config.quant not in ("none", BLOCKS):
        return config.quant
    # a draft model in a GGUF file keeps the file's bits; on CUDA none was measured in int4
    small = config.head or not (is_gguf(path) or config.device.startswith("cuda"))
    return _small_format(config, raw) if small else "none"


def _small_format(config: GenerateConfig, raw: dict) -> str:
    """Return the format of a head or draft model whose target is not quantized.

    The draft's format changes no output, and reading the draft is most of its time.
    """
    if "float32" in str(config.dtype or raw.get("torch_dtype") or raw.get("dtype")):
        return "none"
    if not config.device.startswith("cuda"):
        if has_cpu_operators("products"):
            return "int8"
        return "none"  # int8 is slow in Python
    layer = raw.get("transformer_layer_config")  # speculators' layout of a head
    if not isinstance(layer, dict):
        layer = raw
    sizes = [layer.get(name) for name in ("hidden_size", "intermediate_size")]
    if all(isinstance(size, int) and size % 32 == 0 for size in sizes):
        return "int4"
    return "none"
