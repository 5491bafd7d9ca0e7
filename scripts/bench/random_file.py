"""Write GGUF files with random weights in the shapes of published models, for rates alone.

    random_file.write(random_file.SHAPES["qwen3.5-0.8b"], file)  # passes.py does it

1. `SHAPES` has the metadata of such files. A file has the tensors of the model that our reader
   makes of it, by the names of the package gguf. Large models have fewer layers, and a vocabulary
   that is smaller by as much, so that the LM head keeps its share.
2. Blocks are random bytes with scales that keep a layer's rows at their size. So a file is written
   as fast as its bytes, and no weight is rounded.

The time of a pass depends on shapes and formats, not on the numbers. There is no vocabulary: ids go
in and out. Types: those that llama.cpp's Q4_K_M gives a matrix, but Q8_0 and MXFP4 in gpt-oss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from drafts.random_model import tensor_sizes
from files.config import read_config
from files.gguf import TYPES, config_of
from files.gguf_header import Header, Info, Metadata
from model import Transformer, weight_names
from scripts import gguf_file

Size = tuple[int, ...]
BLOCKS = {kind.name: kind for kind in TYPES.values()}
# the place of a block's scale, and the weights' deviation in scales: 27 to 45 as the scale of a
# sub-block is enough for rates
SCALES = {"Q4_K": (0, 170), "Q6_K": (208, 1370), "Q8_0": (0, 74)}
# names that the package gguf has otherwise
RENAMED = {"linear_attn.dt_bias": "linear_attn.dt_proj.bias", "model.norm": "model.embedding_norm"}


class Shape(NamedTuple):
    """A model: llama.cpp's name of its architecture, its tokens, and its metadata."""

    architecture: str
    vocab: int
    keys: dict[str, Any]
    # sizes of tensors that no parameter tells, and of those that say which model it is
    sizes: dict[str, Size] = {}

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a file."""
        named = {f"{self.architecture}.{key}": value for key, value in self.keys.items()}
        of_tokens = {"vocab_size": self.vocab, "context_length": 8192, "rope.freq_base": 1e6}
        return named | {f"{self.architecture}.{key}": value for key, value in of_tokens.items()}


def sizes(layers: int, dim: int, heads: int, kv_heads: Any, head_dim: int, ffn: Any) -> dict:
    """Return the metadata of the sizes that every architecture has."""
    return {
        "block_count": layers,
        "embedding_length": dim,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": head_dim,
    }


def qwen35(layers: int, dim: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Shape:
    """Qwen3.5: three layers of four are GatedDeltaNet, with 16 heads of 128."""
    keys = sizes(layers, dim, heads, kv_heads, 256, ffn) | {
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": 4, "ssm.inner_size": 2048, "ssm.state_size": 128,
        "ssm.time_step_rank": 16, "ssm.group_count": 16, "full_attention_interval": 4,
    }  # fmt: skip
    rows = {"attn_qkv": 6144, "attn_gate": 2048, "ssm_beta": 16, "ssm_alpha": 16}
    return Shape("qwen35", vocab, keys, {name: (count, dim) for name, count in rows.items()})


def lfm2(layers: int, full: tuple[int, ...], dim: int, heads: int, kv: int, ffn: int) -> Shape:
    """LFM2: gated convolutions over three tokens. full: layers of attention"""
    counts = [kv * (i in full) for i in range(layers)]
    keys = sizes(layers, dim, heads, counts, dim // heads, ffn) | {"shortconv.l_cache": 3}
    return Shape("lfm2", 65536, keys)


def gemma4(layers: int, shared: int, full: tuple[int, ...], vocab: int) -> Shape:
    """Gemma 4 E2B. shared: the last layers, which read others' caches; full: those that see all"""
    widths = [6144 * (1 + (i >= layers - shared)) for i in range(layers)]
    keys = sizes(layers, 1536, 8, [1] * layers, 512, widths) | {
        "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "rope.dimension_count_swa": 256, "rope.freq_base_swa": 10000.0,
        "attention.sliding_window": 512, "final_logit_softcapping": 30.0,
        "attention.sliding_window_pattern": [i not in full for i in range(layers)],
        "attention.shared_kv_layers": shared, "embedding_length_per_layer_input": 256,
    }  # fmt: skip
    return Shape("gemma4", vocab, keys, {"rope_freqs.weight": (256,)})


def gpt_oss(layers: int, vocab: int) -> Shape:
    """gpt-oss-20b: 32 experts in MXFP4, of which a token has four."""
    keys = sizes(layers, 2880, 64, 8, 64, 2880) | {
        "expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880,
        "attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    marks = {"output.weight": (vocab, 2880), "blk.0.attn_q.bias": (4096,)}
    return Shape("gpt-oss", vocab, keys, marks)


SHAPES = {
    "qwen3.5-0.8b": qwen35(24, 1024, 8, 2, 3584, 248320),
    "lfm2-350m": lfm2(16, (2, 5, 8, 10, 12, 14), 1024, 16, 8, 4608),
    "gemma4-e2b": gemma4(10, 5, (4, 9), 75008),  # of 35 layers and 262,144 tokens
    "gpt-oss-20b": gpt_oss(4, 33536),  # of 24 layers and 201,088 tokens
}


def tensors_of(shape: Shape) -> dict[str, Size]:
    """Return the sizes of a file's tensors by llama.cpp's names."""
    import gguf

    layers = shape.keys["block_count"]
    path = Path(shape.architecture)
    metadata = Metadata(path)
    metadata |= shape.metadata() | {"general.architecture": shape.architecture}
    known = [*shape.sizes, *map(str, range(layers))]  # as many as layers, at least
    header = Header(metadata, dict.fromkeys(known, Info(0, (), 0, None)))
    embedding = (shape.vocab, shape.keys["embedding_length"])
    config = read_config(path, config_of(header, dict.fromkeys(known, "F32"), embedding))
    with torch.device("meta"):
        official = tensor_sizes(Transformer(config), weight_names(config), config)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[shape.architecture], layers)
    found = {name: size for name, size in shape.sizes.items() if name.endswith(".weight")}
    for name, size in official.items():
        in_stack, experts = re.subn(r"experts\.\d+\.", "experts.", name)
        renamed = in_stack
        for old, new in RENAMED.items():
            renamed = renamed.replace(old, new)
        ends = (".weight", ".bias")
        theirs = names.get_name(in_stack, ends) or names.get_name(renamed, ends)
        if experts:
            size = (shape.keys["expert_count"], *size)
        elif len(size) == 3:  # of a convolution by channels
            size = (size[0], size[2])
        stem = theirs.removesuffix(".weight").split(".")[-1]
        found[theirs] = shape.sizes.get(stem, size)
    return found


# ----------------------------------------------------------------------------------------- numbers


def kind_of(name: str, size: Size, architecture: str) -> str:
    """Return the type of a tensor."""
    if (
        len(size) == 1
        or name.endswith("bias")
        or re.search(r"conv\.weight|conv1d|ffn_gate_inp", name)
    ):
        return "F32"
    if architecture == "gpt-oss":
        return "MXFP4" if "_exps" in name else "Q8_0"
    in_six = "token_embd" in name or "attn_v" in name
    if "ffn_down" in name:  # of half of the layers
        in_six = int(name.split(".")[1]) % 2 == 1
    return "Q6_K" if in_six else "Q4_K"


def random_bytes(kind: str, size: Size, draw: np.random.Generator) -> np.ndarray:
    """Return a matrix in blocks of a type: [..., bytes of a row] uint8."""
    count = math.prod(size) // BLOCKS[kind].elements
    blocks = draw.integers(0, 256, (count, BLOCKS[kind].size), np.uint8)
    deviation = size[-1] ** -0.5
    if kind == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(deviation / 2.9))
    else:
        at, spread = SCALES[kind]
        scales = np.array([deviation / spread, 7.5 * deviation / spread], np.float16)
        blocks[:, at : at + 2] = scales[:1].view(np.uint8)
        if kind == "Q4_K":  # the mean is zero: 7.5 is that of the codes
            blocks[:, 2:4] = scales[1:].view(np.uint8)
    return blocks.reshape(*size[:-1], -1)


def numbers_of(name: str, size: Size, draw: np.random.Generator) -> np.ndarray:
    """Return a tensor in fp32: norms are ones, the rest is random."""
    if "norm" in name or "scale" in name:
        return np.ones(size, np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(draw.normal(size=size)).astype(np.float32)
    if name == "rope_freqs.weight":
        return np.array([1.0] * 64 + [1e30] * 192, np.float32)
    return (draw.normal(size=size) * size[-1] ** -0.5).astype(np.float32)


def write(shape: Shape, file: Path) -> None:
    """Write a file. Writes: `file`."""
    draw = np.random.default_rng(0)

    def tensors() -> Iterator[tuple[str, np.ndarray, str | None]]:
        for name, size in tensors_of(shape).items():
            kind = kind_of(name, size, shape.architecture)
            if kind == "F32":
                yield name, numbers_of(name, size, draw), None
            else:
                yield name, random_bytes(kind, size, draw), kind

    metadata = shape.metadata() | {"tokenizer.ggml.model": "no_vocab"}
    gguf_file.write(file, shape.architecture, metadata, tensors())
