"""The names of the tensors in GGUF files, and what an architecture's files have of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# llama.cpp's names in a layer -> Hugging Face's
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# the same of a mixture's router, and of the matrices of an expert, in one tensor for all of them
MIXTURE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
}
# names of an MTP layer, which follows the model's own layers -> those of Qwen3.5's directories
NEXTN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
    "shared_head_head": "lm_head",
    "embed_tokens": "embed_tokens",
}


def same(x: Tensor) -> Tensor:
    """Return a tensor that files hold as directories do: a function of `GgufLayout.changed`."""
    return x


def _no_keys(metadata: Any, key: Callable[[str], str]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufLayout:
    """The form of an architecture in GGUF files, where it differs from its Hugging Face form."""

    layer: dict[str, str] = field(default_factory=lambda: LAYER)
    mixture: dict[str, str] = field(default_factory=lambda: MIXTURE)
    beside: dict[str, str] = field(default_factory=dict)  # of tensors that are of no layer
    nextn: dict[str, str] = field(default_factory=lambda: NEXTN)
    numbers_mtp: bool = False  # an MTP layer is numbered behind the model's layers, too
    interleaved: bool = False  # rows of queries and keys are in the order of llama.cpp's rotation
    norms_plus_one: bool = False  # one was added to the weights of norms
    partial_rope: bool = False  # RoPE may turn a part of each head
    by_layer: bool = False  # widths and heads may differ between layers, which `keys` reads
    gate_above_up: bool = False  # one tensor, ffn_up, holds the rows of the gate, then those of up
    # a tensor of a layer, with its ending -> Hugging Face's, and the function that makes it; no one
    # is taken from it, whatever it is
    changed: dict[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)
    # (readers by Hugging Face's names, config.json) -> the same; what holds several is split
    split: Callable[[dict, dict], dict] | None = None
    # divisors of RoPE's frequencies in the file -> further keys of config.json; None: as LLaMA 3's
    rope_keys: Callable[[Any], dict[str, Any]] | None = None
    # (metadata, key of a name) -> further keys of config.json
    keys: Callable[[Any, Callable[[str], str]], dict[str, Any]] = _no_keys
