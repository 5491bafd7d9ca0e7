"""Write GGUF files with random weights in the shapes of published models, for rates alone.

    random_file.write(random_file.SHAPES["qwen3.5-0.8b"](), file)  # passes.py does it

1. `SHAPES` has the metadata and the tensors of a model by llama.cpp's names. Large ones have fewer
   layers, and a vocabulary that is smaller by as much, so that the LM head keeps its share.
2. Blocks are random bytes with scales that keep a layer's rows at their size. So a file is written
   as fast as its bytes, and no weight is rounded.

The time of a pass depends on shapes and formats, not on the numbers. There is no vocabulary: ids go
in and out. Types: those that llama.cpp's Q4_K_M gives a matrix, but Q8_0 and MXFP4 in gpt-oss.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts import gguf_file

# ggml's type of a tensor, its name and its size; the size of a norm, conv or bias has no type
Tensor = tuple[str, str, tuple[int, ...]]
CODES = {"Q4_K": 144, "Q6_K": 210, "Q8_0": 34, "MXFP4": 17}  # bytes of a block
NUMBERS = {"Q4_K": 256, "Q6_K": 256, "Q8_0": 32, "MXFP4": 32}  # weights of a block


class Shape(NamedTuple):
    """A model: llama.cpp's name of its architecture, its metadata, and its tensors."""

    architecture: str
    keys: dict[str, Any]
    tensors: list[Tensor]


def common(layers: int, dim: int, heads: int, kv_heads: Any, head_dim: int, ffn: int) -> dict:
    """Return the metadata that every architecture has."""
    return {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": dim,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.dimension_count": head_dim,
    }


def attention(dim: int, queries: int, keys: int, out: int = 0) -> list[Tensor]:
    """Return the matrices of attention. out: inputs of the last one, if not `queries`"""
    return [
        ("Q4_K", "attn_q.weight", (queries, dim)),
        ("Q4_K", "attn_k.weight", (keys, dim)),
        ("Q6_K", "attn_v.weight", (keys, dim)),
        ("Q4_K", "attn_output.weight", (dim, out or queries)),
    ]


def feed_forward(dim: int, width: int, i: int) -> list[Tensor]:
    """Return the matrices of a feed-forward. Q4_K_M keeps half of `ffn_down` in 6 bits."""
    return [
        ("Q4_K", "ffn_gate.weight", (width, dim)),
        ("Q4_K", "ffn_up.weight", (width, dim)),
        ("Q6_K" if i % 2 else "Q4_K", "ffn_down.weight", (dim, width)),
    ]


def ones(*names_and_sizes: Any) -> list[Tensor]:
    """Return norms: name, size, name, size ..."""
    pairs = zip(names_and_sizes[::2], names_and_sizes[1::2])
    return [("F32", f"{name}.weight", (size,)) for name, size in pairs]


def qwen35(layers: int, dim: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Shape:
    """Qwen3.5: three layers of four are GatedDeltaNet, with 16 heads of 128."""
    head_dim, values, width = 256, 16, 128
    inner = values * width
    keys = common(layers, dim, heads, kv_heads, head_dim, ffn) | {
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": width,
        "ssm.time_step_rank": values, "ssm.group_count": values, "full_attention_interval": 4,
    }  # fmt: skip
    tensors: list[Tensor] = [("Q6_K", "token_embd.weight", (vocab, dim))]
    for i in range(layers):
        own = ones("attn_norm", dim, "post_attention_norm", dim) + feed_forward(dim, ffn, i)
        if i % 4 == 3:
            out = heads * head_dim
            own += attention(dim, 2 * out, kv_heads * head_dim, out)
            own += ones("attn_q_norm", head_dim, "attn_k_norm", head_dim)
        else:
            own += [
                ("Q4_K", "attn_qkv.weight", (3 * inner, dim)),
                ("Q4_K", "attn_gate.weight", (inner, dim)),
                ("Q4_K", "ssm_beta.weight", (values, dim)),
                ("Q4_K", "ssm_alpha.weight", (values, dim)),
                ("Q4_K", "ssm_out.weight", (dim, inner)),
                ("F32", "ssm_conv1d.weight", (3 * inner, 4)),
                ("F32", "ssm_a", (values,)),
                ("F32", "ssm_dt.bias", (values,)),
            ] + ones("ssm_norm", width)
        tensors += [(kind, f"blk.{i}.{name}", size) for kind, name, size in own]
    return Shape("qwen35", keys, tensors + ones("output_norm", dim))


def lfm2(layers: int, full: tuple[int, ...], dim: int, heads: int, kv: int, ffn: int) -> Shape:
    """LFM2: gated convolutions over three tokens. full: layers of attention"""
    vocab, head_dim = 65536, dim // heads
    counts = [kv * (i in full) for i in range(layers)]
    keys = common(layers, dim, heads, counts, head_dim, ffn) | {"shortconv.l_cache": 3}
    tensors: list[Tensor] = [("Q6_K", "token_embd.weight", (vocab, dim))]
    for i in range(layers):
        own = ones("attn_norm", dim, "ffn_norm", dim) + feed_forward(dim, ffn, i)
        if i in full:
            own += attention(dim, dim, kv * head_dim)
            own += ones("attn_q_norm", head_dim, "attn_k_norm", head_dim)
        else:
            own += [
                ("Q4_K", "shortconv.in_proj.weight", (3 * dim, dim)),
                ("Q4_K", "shortconv.out_proj.weight", (dim, dim)),
                ("F32", "shortconv.conv.weight", (dim, 3)),
            ]
        tensors += [(kind, f"blk.{i}.{name}", size) for kind, name, size in own]
    return Shape("lfm2", keys, tensors + ones("token_embd_norm", dim))


def gemma4(layers: int, shared: int, full: tuple[int, ...], vocab: int) -> Shape:
    """Gemma 4 E2B. shared: the last layers, which read others' caches; full: those that see all"""
    dim, heads, ffn, inputs = 1536, 8, 6144, 256
    widths = [ffn * (1 + (i >= layers - shared)) for i in range(layers)]
    keys = common(layers, dim, heads, [1] * layers, 512, widths) | {
        "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "rope.dimension_count_swa": 256, "rope.freq_base_swa": 10000.0,
        "attention.sliding_window": 512, "final_logit_softcapping": 30.0,
        "attention.sliding_window_pattern": [i not in full for i in range(layers)],
        "attention.shared_kv_layers": shared, "embedding_length_per_layer_input": inputs,
    }  # fmt: skip
    tensors: list[Tensor] = [
        ("Q6_K", "token_embd.weight", (vocab, dim)),
        ("Q6_K", "per_layer_token_embd.weight", (vocab, layers * inputs)),
        ("Q4_K", "per_layer_model_proj.weight", (layers * inputs, dim)),
        ("ROPE", "rope_freqs.weight", (256,)),
    ]
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    for i in range(layers):
        head_dim = 512 if i in full else 256
        own = ones(*(part for name in norms for part in (name, dim)))
        own += ones("attn_q_norm", head_dim, "layer_output_scale", 1)
        own += feed_forward(dim, widths[i], i) + [
            ("Q4_K", "inp_gate.weight", (inputs, dim)),
            ("Q4_K", "proj.weight", (dim, inputs)),
        ]
        matrices = attention(dim, heads * head_dim, head_dim)
        if i >= layers - shared:
            matrices = [matrices[0], matrices[3]]
        else:
            own += ones("attn_k_norm", head_dim)
        tensors += [(kind, f"blk.{i}.{name}", size) for kind, name, size in own + matrices]
    return Shape("gemma4", keys, tensors + ones("output_norm", dim, "per_layer_proj_norm", inputs))


def gpt_oss(layers: int, vocab: int) -> Shape:
    """gpt-oss-20b: 32 experts in MXFP4, of which a token has four."""
    dim, heads, kv_heads, head_dim, experts = 2880, 64, 8, 64, 32
    keys = common(layers, dim, heads, kv_heads, head_dim, dim) | {
        "expert_count": experts, "expert_used_count": 4, "expert_feed_forward_length": dim,
        "attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    tensors: list[Tensor] = [
        ("Q8_0", "token_embd.weight", (vocab, dim)),
        ("Q8_0", "output.weight", (vocab, dim)),
    ]
    for i in range(layers):
        own = ones("attn_norm", dim, "post_attention_norm", dim)
        queries, keys_width = heads * head_dim, kv_heads * head_dim
        for _, name, size in attention(dim, queries, keys_width):
            own += [("Q8_0", name, size), ("F32", name.replace("weight", "bias"), size[:1])]
        own += [
            ("F32", "attn_sinks.weight", (heads,)),
            ("F32", "ffn_gate_inp.weight", (experts, dim)),
            ("F32", "ffn_gate_inp.bias", (experts,)),
        ]
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            own += [
                ("MXFP4", f"{name}.weight", (experts, dim, dim)),
                ("F32", f"{name}.bias", (experts, dim)),
            ]
        tensors += [(kind, f"blk.{i}.{name}", size) for kind, name, size in own]
    return Shape("gpt-oss", keys, tensors + ones("output_norm", dim))


SHAPES = {
    "qwen3.5-0.8b": lambda: qwen35(24, 1024, 8, 2, 3584, 248320),
    "lfm2-350m": lambda: lfm2(16, (2, 5, 8, 10, 12, 14), 1024, 16, 8, 4608),
    "lfm2-1.2b": lambda: lfm2(16, (2, 5, 8, 10, 12, 14), 2048, 32, 8, 8192),
    "gemma4-e2b": lambda: gemma4(10, 5, (4, 9), 75008),  # of 35 layers and 262,144 tokens
    "gpt-oss-20b": lambda: gpt_oss(4, 33536),  # of 24 layers and 201,088 tokens
}


# ------------------------------------------------------------------------------------------- files


def random_bytes(kind: str, size: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Return a matrix in blocks of a type: [..., bytes of a row] uint8."""
    count = math.prod(size) // NUMBERS[kind]
    blocks = draw.integers(0, 256, (count, CODES[kind]), np.uint8)
    deviation = size[-1] ** -0.5
    if kind == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(deviation / 2.9))
    else:
        # of codes times the scales of sub-blocks: 27 to 45 is enough for rates
        spread = {"Q4_K": 170, "Q6_K": 1370, "Q8_0": 74}[kind]
        scale = np.array([deviation / spread], np.float16).view(np.uint8)
        at = {"Q4_K": 0, "Q6_K": 208, "Q8_0": 0}[kind]
        blocks[:, at : at + 2] = scale
        if kind == "Q4_K":  # the mean is zero: 7.5 is that of the codes
            blocks[:, 2:4] = np.array([7.5 * deviation / spread], np.float16).view(np.uint8)
    return blocks.reshape(*size[:-1], -1)


def numbers_of(name: str, size: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
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
    metadata = {f"{shape.architecture}.{key}": value for key, value in shape.keys.items()}
    metadata |= {
        f"{shape.architecture}.vocab_size": shape.tensors[0][2][0],
        "tokenizer.ggml.model": "no_vocab",
    }
    tensors = (
        (name, random_bytes(kind, size, draw), kind)
        if kind in CODES
        else (name, numbers_of(name, size, draw), None)
        for kind, name, size in shape.tensors
    )
    gguf_file.write(file, shape.architecture, metadata, tensors)
