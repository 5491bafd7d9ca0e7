"""GGUF files of random LLaMAs and their relatives as llama.cpp's converter writes them, as numbers or in random blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

import tiny_models
from helpers import BLOCK_KINDS, gguf_blocks
from tiny_models import Kind, write


def hf_model(family: str = "Llama", **options):
    more = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return tiny_models.random_model(family, tiny_models.SIZES | more | options)


def permuted(weight, heads: int):
    """The permutation of q and k by llama.cpp's converter."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model, older=False) -> dict[str, np.ndarray]:
    """older: of a mixture, a tensor per expert."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    llama = not config.model_type.startswith("qwen")

    def convert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        part = name.split(".")[-2]
        if part != "experts":
            return {name: permuted(value, heads[part]) if llama and part in heads else value}
        names = [name]  # [E, 2 F, D] gate and up, or [E, D, F] down
        if "down" not in name:
            names = [name.replace("gate_up", kind) for kind in ("gate", "up")]
        stacks = value.chunk(len(names), 1)
        return {f"{part}.weight": stack for part, stack in zip(names, stacks)}

    tensors = tiny_models.gguf_tensors(model, convert=convert)
    if model.config.rope_parameters["rope_type"] == "llama3":
        plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
    return by_expert(tensors) if older else tensors


def by_expert(tensors: dict) -> dict:
    """Stacks of experts as older files have them: a tensor per expert."""
    each = {}
    for name, value in tensors.items():
        if "_exps" not in name:
            each[name] = value
            continue
        kind, stack = value if isinstance(value, tuple) else (None, value)
        for e, matrix in enumerate(stack):
            each[name.replace("_exps", f".{e}")] = (kind, matrix) if kind else matrix
    return each


def metadata_of(model) -> dict:
    kind = model.config.model_type
    name = kind.replace("_", "") if kind.startswith("qwen") else "llama"
    further = {}
    if kind == "qwen3_moe":
        further["expert_feed_forward_length"] = model.config.moe_intermediate_size
    return tiny_models.metadata_of(model, name, further)


def write_model(path: Path, model, kinds="F32", extra: dict | None = None) -> Path:
    return write(path, metadata_of(model) | (extra or {}), gguf_tensors(model), kinds)


# --------------------------------------------------------------------------------------- in blocks

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_down_exps": "Q6_K", "output": "Q6_K"}
FALLBACK = {"attn_v": "Q5_0", "attn_q": "Q4_1", "ffn_up": "Q3_K", "token_embd": "Q8_0"}
IN_BLOCKS = {  # family, options, the type of most matrices, those of others by their name
    **{kind: ("Llama", {}, kind, {}) for kind in BLOCK_KINDS},
    "Q4_K_M": ("Llama", {}, "Q4_K", Q4_K_M | {"blk.1.attn_v": "Q4_K", "blk.1.ffn_down": "Q4_K"}),
    "tied": ("Llama", {"tie_word_embeddings": True}, "Q4_K", {"token_embd": "Q6_K"}),
    "biases": ("Qwen2", {}, "Q4_K", Q4_K_M),
    "many types": ("Llama", {"num_key_value_heads": 8}, "Q4_K", FALLBACK),
    "mixture": ("Mixtral", {"num_local_experts": 4}, "Q4_K", Q4_K_M),
    "int4": ("Mixtral", {"num_local_experts": 4}, "Q4_0", Q4_K_M),
    "tied floats": ("Llama", {"tie_word_embeddings": True}, "Q4_0", {"token_embd": "F16"}),
    "floats": ("Llama", {}, "Q4_0", {"token_embd": "F16", "output": "BF16", "ffn_down": "F32"}),
    "floats beside blocks": (
        "Llama",
        {},
        "Q8_0",
        {"token_embd": "F16", "attn_v": "F16", "attn_q": "BF16", "ffn_gate": "F32"},
    ),
}


def block_tensors(case: str) -> tuple[dict, dict]:
    """Metadata and tensors of a file with random blocks."""
    family, options, usual, others = IN_BLOCKS[case]
    model = hf_model(family, **WIDE | options)
    tensors = gguf_tensors(model)
    for number, (name, value) in enumerate(tensors.items()):
        kind = others.get(name.removesuffix(".weight"), others.get(name.split(".")[-2], usual))
        if value.ndim < 2 or "ffn_gate_inp" in name or kind == "F32":
            continue
        if kind in ("F16", "BF16"):
            tensors[name] = (Kind[kind], gguf.quantize(value, Kind[kind]))
            continue
        inputs = value.shape[-1]
        blocks = gguf_blocks(kind, value.size // inputs, inputs, inputs**-0.5, number)
        tensors[name] = (Kind[kind], blocks.reshape(*value.shape[:-1], -1))
    return metadata_of(model), tensors
