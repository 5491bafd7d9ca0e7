"""Tiny random models of transformers as directories and as GGUF files, and the logits of both libraries.

A test of an architecture gives its sizes, and where llama.cpp's converter changes tensors, a function of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import helpers
from files.config import read_config
from kv_cache import KVCache, causal_window
from model import Transformer
from run import generate
from scripts import gguf_file

Kind = gguf.GGMLQuantizationType
IDS = torch.randint(3, 96, (29,), generator=torch.Generator().manual_seed(1))
SIZES = {  # of every architecture
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}  # of transformers
NAMES = {  # Hugging Face's -> llama.cpp's; a whole name, or one without its ending
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


# -------------------------------------------------------------------------------------- directories


def of_norms(name: str) -> tuple[float, float]:
    """The mean and the deviation of a parameter where norms multiply by their weights."""
    return (1.0 if "norm" in name else 0.0), 0.15


def random_model(
    kind: str, options: dict, spread: Callable[[str], tuple[float, float]] = of_norms
) -> transformers.PreTrainedModel:
    """A model of transformers with random weights in fp32.

    kind: as in the names of its classes
    spread: the mean and the deviation of a parameter
    """
    torch.manual_seed(0)
    of_text = getattr(transformers, f"{kind}TextConfig", None)
    config = (of_text or getattr(transformers, f"{kind}Config"))(**options)
    of_kind = getattr(transformers, f"{kind}ForCausalLM")
    model = of_kind._from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(*spread(name))
    return model.eval()


def saved(
    model,
    path: Path,
    config: dict | Callable[[dict], dict] | None = None,
    tensors: Callable[[dict], dict] | None = None,
) -> Path:
    """Save a model.

    config: changes of its keys, ... removes one; or a function of them
    tensors: a function of its tensors
    """
    model.save_pretrained(path)
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw = config(raw) if callable(config) else raw | (config or {})
    file.write_text(json.dumps({name: v for name, v in raw.items() if v is not ...}))
    if tensors:
        held = load_file(path / "model.safetensors")
        changed = {name: v.contiguous() for name, v in tensors(held).items()}
        save_file(changed, path / "model.safetensors", {"format": "pt"})
    return path


# --------------------------------------------------------------------------------------- GGUF files


def gguf_name(name: str, names: dict[str, str] = NAMES) -> str:
    """llama.cpp's name of a weight of Hugging Face's."""
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    own = layer[2] if layer else name
    stem, _, ending = own.rpartition(".")
    theirs = names.get(own) or f"{names[stem]}.{ending}"
    return f"blk.{layer[1]}.{theirs}" if layer else theirs


def gguf_tensors(
    model,
    names: dict[str, str] = NAMES,
    convert: Callable[[str, Tensor], dict[str, Tensor]] = lambda name, value: {name: value},
) -> dict[str, np.ndarray]:
    """The tensors of a file. convert: what the converter makes of one, by Hugging Face's names."""
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for part, tensor in convert(name, value).items():
            tensors[gguf_name(part, names)] = tensor.contiguous().numpy()
    return tensors


def of_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    """What the converter makes of a Qwen's experts: two stacks of gates and ups."""
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("gate_proj", "up_proj"), value.chunk(2, 1))
        return {name.replace("gate_up_proj", f"{half}.weight"): part for half, part in halves}
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: value}


def expert_keys(c) -> dict:
    """The metadata of a Qwen's experts. c: transformers' config"""
    return {
        "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    }  # fmt: skip


def names_in_files(architecture: str) -> set[str]:
    """The names of tensors that the package gguf lists for an architecture, {bid} for a layer's number."""
    of_arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[of_arch]}


def assert_names_of_package(metadata: dict, tensors: dict) -> None:
    """Compare the names of a file's keys and tensors with those that the package gguf lists."""
    architecture = metadata["general.architecture"]
    kinds = [kind for kind in vars(gguf.Keys).values() if isinstance(kind, type)]
    keys = {
        str(key).replace("{arch}", architecture) for kind in kinds for key in vars(kind).values()
    }
    assert metadata.keys() <= keys, metadata.keys() - keys
    names = names_in_files(architecture)
    for name in tensors:
        assert re.sub(r"\.\d+\.", ".{bid}.", without_leaf(name)) in names, name


def without_leaf(name: str) -> str:
    """A tensor's name without its ending."""
    return re.sub(r"\.(weight|bias|scale)$", "", name)


def metadata_of(model, name: str, further: dict | None = None) -> dict:
    """The metadata of a file. name: llama.cpp's of the architecture; further: keys that it alone has."""
    c = model.config
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    keys = {
        "vocab_size": c.vocab_size, "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
    }  # fmt: skip
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        betas = {f"rope.scaling.yarn_{beta}": rope.get(beta) for beta in ("beta_fast", "beta_slow")}
        keys |= {key: value for key, value in betas.items() if value}
    if getattr(c, "num_local_experts", 0):
        keys |= {"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok}
    if getattr(c, "sliding_window", None):
        keys["attention.sliding_window"] = c.sliding_window
    keys = {f"{name}.{key}": value for key, value in (keys | (further or {})).items()}
    ids = {
        f"tokenizer.ggml.{end}_token_id": getattr(c, f"{end}_token_id") for end in ("bos", "eos")
    }
    return {"general.architecture": name} | keys | ids


def write(
    path: Path,
    metadata: dict,
    tensors: dict,
    kinds: str | Callable[[str], str] = "F32",
    without: tuple[str, ...] = (),
) -> Path:
    """Write a GGUF file.

    tensors: numbers, or a type and its bytes
    kinds: the type of matrices of numbers, or of the matrix of a name
    without: keys and tensors that are left out
    """

    def coded():
        for name, value in tensors.items():
            kind, data = value if isinstance(value, tuple) else (None, np.ascontiguousarray(value))
            if data.ndim > 1 and not isinstance(value, tuple):
                kind = kinds if isinstance(kinds, str) else kinds(name)
                data = gguf.quantize(data, Kind[kind])
            if name not in without:
                yield name, np.ascontiguousarray(data), getattr(kind, "name", kind)

    architecture = metadata["general.architecture"]
    left = metadata.keys() - {"general.architecture", *without}
    keys = {key: value for key, value in metadata.items() if key in left}
    gguf_file.write(path, architecture, keys, coded())
    return path


def read_by_transformers(path: Path):
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------- logits


@torch.no_grad()
def by_passes(model: Transformer, ids: Tensor, width: int) -> Tensor:
    """The logits of a text that is read in passes of `width` tokens: [T, V]."""
    cache = KVCache.empty(model.config, 1, len(ids), model.norm.weight.dtype, "cpu")
    found = []
    for start in range(0, len(ids), width):
        part = ids[start : start + width][None]
        window = causal_window(torch.tensor([start]), part.shape[1])
        found.append(model.logits(model(part, window.slots, cache, window))[0])
    return torch.cat(found)


@torch.no_grad()
def assert_same_logits(
    model: Transformer, reference, ids: Tensor = IDS, widths: tuple[int, ...] = (1, 5)
) -> None:
    """Compare every position, without a cache, and over one with passes of several widths."""
    want = reference(ids[None]).logits[0]
    assert want.std() > 0.3  # else the bound would hold for anything
    got = model.logits(model(ids[None], torch.arange(len(ids))[None]))[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    for width in (len(ids), *widths):
        torch.testing.assert_close(by_passes(model, ids, width), want, atol=2e-4, rtol=1e-4)


def assert_same_config(path: Path, reference, left_out: set[str]) -> None:
    """Compare the config read from a GGUF file with that of the model's directory, which is written beside it."""
    reference.save_pretrained(path.parent / "hf")
    ours, theirs = (vars(read_config(of)) for of in (path, path.parent / "hf"))
    for name in ours.keys() - left_out:
        assert ours[name] == theirs[name], name


# ----------------------------------------------------------------------------------------- refusals


def refused(capsys, *argv: str) -> str:
    """The line with which generate.py refuses a model."""
    return helpers.refused(
        capsys, generate.main, [*argv, "--prompt_ids", "5,17", "--device", "cpu"]
    )


def refused_keys(capsys, path: Path, model, **keys) -> str:
    """The error of a directory with other keys in its config.json."""
    saved(model, path, keys)
    capsys.readouterr()
    return refused(capsys, "--checkpoint", str(path))
