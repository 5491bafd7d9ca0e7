"""Write GGUF files: names, keys, the order of rows, blocks.

export_head.py writes heads, bench/llama_peer.py models.
Package: gguf. Not here: reading such a file (files/gguf.py, files/gguf_heads.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from files.gguf import NAMES, row_order
from files.gguf_names import LAYER
from model import ModelConfig

# names of Hugging Face's layout, and of an EAGLE-3 head's -> of GGUF
STEMS = {official.removeprefix("model."): stem for stem, official in NAMES.items()}
STEMS |= {"fc": "fc", "input_norm": "enc.output_norm"}
LAYER_STEMS = {official: stem for stem, official in LAYER.items()} | {"hidden_norm": "attn_norm_2"}


def gguf_name(official: str) -> str:
    """Translate `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`; a midlayer is 0."""
    stem = official.removesuffix(".weight").removeprefix("model.")
    layer = re.match(r"midlayer\.|layers\.(\d+)\.", stem)
    if layer:
        return f"blk.{layer[1] or 0}.{LAYER_STEMS[stem[layer.end() :]]}.weight"
    return f"{STEMS[stem]}.weight"


def keys_of(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that every architecture has, without its name before them."""
    return {
        "vocab_size": model.vocab_size,
        "context_length": model.max_context,
        "embedding_length": model.dim,
        "block_count": model.n_layers,
        "feed_forward_length": model.ffn_dim,
        "attention.head_count": model.n_heads,
        "attention.head_count_kv": model.n_kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": model.norm_eps,
        "rope.dimension_count": model.head_dim,
        "rope.freq_base": float(model.rope_theta),
    }


def rotated_as_in_llama_cpp(weight: Tensor, name: str, model: ModelConfig) -> Tensor:
    """Reorder the rows of queries and keys: llama.cpp rotates neighbours, Hugging Face halves.

    weight: [N, K]; name: of GGUF
    """
    heads = {"attn_q": model.n_heads, "attn_k": model.n_kv_heads}
    order = row_order(len(weight), heads.get(name.split(".")[-2], 0))
    return weight if order is None else torch.empty_like(weight).index_copy_(0, order, weight)


def stored(weight: Tensor, kind: str) -> tuple[np.ndarray, str]:
    """Return a matrix in a type of GGUF; F16 for rows that its blocks do not divide.

    weight: [N, K] fp32
    Returns: bytes; their type.
    """
    import gguf

    kind = kind.upper()
    if weight.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = "F16"
    return gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]), kind


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: Iterable[tuple[str, np.ndarray, str | None]],
) -> None:
    """Write a file.

    tensors: a name; numbers, or the bytes of blocks; the type of the blocks, None: of the numbers
    Writes: `path`.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    kinds = gguf.GGUFValueType
    for key, value in metadata.items():
        kind = kinds.get_type(value)
        if type(value) is int:  # llama.cpp reads its numbers as unsigned ones
            small = 0 <= value < 2**32
            kind = kinds.UINT32 if small else kinds.INT64
        writer.add_key_value(key, value, kind)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind and gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
