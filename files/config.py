"""Read a checkpoint's `config.json` as a `ModelConfig`, and open its tensors.

A checkpoint is a Hugging Face directory or a GGUF file; `open_source` and `read_raw` take both.
The dataclasses here declare each key that is read, with its type, range and default
(`read_fields`). An unknown architecture, activation or RoPE type is an error, not a guess.
Not here: how the files hold quantized weights (quantize.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from files import registry
from files.checkpoint import (
    TensorSource,
    WeightFiles,
    read_model_config,
    with_codes,
)
from files.fields import NAMES, TEXT, TOKEN_IDS, key, naming, read_fields
from files.head_kinds import MTP, gguf_head_kind
from files.io import is_gguf, read_json
from files.keys import HFLayerTypes, all_ids, check_layer_types
from model import ModelConfig
from options import load_part, log_note

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
            return load_part("reader", "gguf head")(path)
        return load_part("reader", "gguf")(path)
    return with_codes(open_files(path))


def open_files(path: Path) -> WeightFiles:
    """Open the files of a model's directory, by the names that a whole model has.

    The layers saved alone have no prefix. A tied model may hold its one matrix as the LM head
    only; two that differ are both used, as in transformers 5. A dtype auto is the weights' own.
    """
    files = WeightFiles(path)
    readers = files.readers
    row = registry.row_of(None, files.config.get("model_type"))
    rename = getattr(row.load(), "rename", None) if row else None
    if rename:
        with naming(path / "config.json"):
            readers = rename(readers, files.config)
    # a draft head's names have no prefix
    is_head = "fc.weight" in readers or "fusion_fc.weight" in readers
    if EMBEDDING.removeprefix("model.") in readers and not is_head:
        readers = {
            name if name.startswith("lm_head.") else f"model.{name}": read
            for name, read in readers.items()
        }
    if files.config.get("tie_word_embeddings") and LM_HEAD in readers:
        if EMBEDDING not in readers:
            readers[EMBEDDING] = readers.pop(LM_HEAD)
        elif f"{LM_HEAD}_scale" not in readers and not _same(
            readers[EMBEDDING](), readers[LM_HEAD]()
        ):
            differ = "tie_word_embeddings is true, and lm_head.weight is not the embedding"
            log_note(f"{path}: {differ}: both are used")
            files.config["tie_word_embeddings"] = False
    if "auto" in (files.config.get("torch_dtype"), files.config.get("dtype")):
        dtypes = (read().dtype for read in readers.values())
        files.config["torch_dtype"] = str(next(d for d in dtypes if d.is_floating_point))
    files.readers = readers
    files.block_types = next(filter(None, map(files.type_of, readers)), "")
    return files


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def read_raw(path: Path) -> dict:
    """Read the content of a checkpoint's config.json, as the `config` of `open_source`.

    Raises: as `open_source`.
    """
    if is_gguf(path):
        return open_source(path).config
    return read_model_config(path)


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


def config_from(
    raw: dict, architecture: str, extra_eos: int | list[int] | None = None
) -> ModelConfig:
    """Translate Hugging Face's keys into ours. extra_eos: further ids that end a sequence

    Raises: ValueError for a missing key or a bad value.
    """
    config = registry.row_named(architecture).load().read_config(raw, architecture)
    return replace(config, eos_ids=all_ids([*config.eos_ids], extra_eos))
