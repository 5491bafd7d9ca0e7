"""gpt-oss: a mixture of experts with biases, sinks in attention, and windows on every other layer.

The sliding layers see the last 128 tokens. A sink is a learned score of a head, which takes a share
of its attention. The experts' SwiGLU is bounded. Files have the experts in MXFP4 (files/stacks.py).

Source: arXiv 2508.10925. Not here: the parts of an answer, which its chat template calls channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.fields import FLAG, given, integer, key, positive, read_fields, translated
from files.gguf_names import LAYER, GgufLayout
from files.keys import (
    EXPERTS,
    FULL,
    KINDS,
    SLIDING,
    common_fields,
    layers_of,
    read_swiglu_keys,
)
from files.mixtral import counts
from files.renames import Readers, rename_ends
from files.stacks import name_experts
from model import ModelConfig
from models.steps import ClampedGate, ScoredRoute, WindowAttend
from steps import Add, Merge, Norm, Project, Rotate, Step


@dataclass(frozen=True)
class GptOss(ModelConfig):
    """The settings of gpt-oss beside LLaMA's."""

    window: int = 128  # sliding_window (tokens)
    sliding_layers: tuple[int, ...] = ()  # layer_types
    alpha: float = 1.702  # swiglu_alpha
    limit: float = 7.0  # swiglu_limit

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "sinks": ("self_attn.sinks",),
            "router": ("mlp.router",),
            "experts.w13": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "experts.w2": ("mlp.experts.{}.down_proj",),
        }

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.window,)

    def layer(self, i: int) -> tuple[Step, ...]:
        if not self.has_experts(i):  # of a draft head that is trained for it
            return super().layer(i)
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        window = self.window if i in self.sliding_layers else 0
        experts = self.n_experts
        return (
            Norm("attention_norm", self.dim, self.norm_eps),
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            Rotate(*heads),
            WindowAttend(window=window, sinks=self.n_heads),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            ScoredRoute(self.dim, experts, self.experts_per_token, bias=True),
            Project("w13", self.dim, 2 * self.ffn_dim, bias=True, experts=experts),
            ClampedGate(self.alpha, self.limit),
            Project("w2", self.ffn_dim, self.dim, bias=True, experts=experts, row_parallel=True),
            Merge(),
            Add(),
        )


# ------------------------------------------------------------------------------------- config.json

# of missing keys; the files of OpenAI name no dtype
DEFAULTS = {"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}


@dataclass(frozen=True)
class HFGptOss:
    """The further keys of config.json, with transformers' defaults."""

    num_local_experts: int = key(EXPERTS)
    num_experts_per_tok: int = key(EXPERTS, 4)
    window: int = key(integer(1, 2**31 - 1), 128, "sliding_window")
    layer_types: list | None = key(KINDS, None)
    qkv_bias: bool = key(FLAG, True, "attention_bias")
    alpha: float = key(positive(1e6), 1.702, "swiglu_alpha")
    limit: float = key(positive(1e6), 7.0, "swiglu_limit")
    rope_truncate: bool = key(FLAG, True)  # (ours) false of a GGUF file


def read_config(raw: dict, architecture: str) -> GptOss:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(given(raw, DEFAULTS))
    own = read_fields(raw, HFGptOss)
    layers = hf.num_hidden_layers
    kinds = own.layer_types
    if kinds is None:
        kinds = [FULL if i % 2 else SLIDING for i in range(layers)]
    sliding_layers = layers_of(SLIDING, kinds, layers)
    fields = common_fields(hf)
    if not own.rope_truncate and fields["rope_scaling"]:
        fields["rope_scaling"] |= {"truncate": False}
    return GptOss(
        **fields,
        **translated(own),
        **counts("num_local_experts", own.num_local_experts, own.num_experts_per_tok),
        o_bias=own.qkv_bias,
        sliding_layers=sliding_layers,
    )


def rename(readers: Readers, raw: dict) -> Readers:
    """Name the matrices of experts one by one, and sinks as the weight of a module."""
    return name_experts(rename_ends(readers, {".sinks": ".sinks.weight"}))


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key.
    """
    return {
        "intermediate_size": metadata.size(name("expert_feed_forward_length")),
        "sliding_window": metadata.size(name("attention.sliding_window")),
        "rope_truncate": False,  # of YaRN, as in the original model; llama.cpp rounds the bounds
    }


GGUF = GgufLayout(
    layer={name: theirs for name, theirs in LAYER.items() if name != "ffn_norm"}
    | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
    mixture={
        "ffn_gate_inp": "mlp.router",
        "ffn_gate": "mlp.experts.{}.gate_proj",
        "ffn_down": "mlp.experts.{}.down_proj",
        "ffn_up": "mlp.experts.{}.up_proj",
    },
    keys=gguf_keys,
)
