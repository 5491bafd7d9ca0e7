"""Gemma 3: norms on both sides of attention and feed-forward, and windows on most layers.

Five layers of six see the last 512 or 1,024 tokens, and have a RoPE of their own. Weights of norms
count from one, embeddings are scaled, and the feed-forward is GeGLU.

Source: arXiv 2503.19786. Not here: images, soft caps, which only Gemma 2 has.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from files.fields import (
    FLAG,
    NO,
    Rule,
    given,
    integer,
    key,
    only,
    positive,
    read_fields,
    translated,
)
from files.gguf_names import LAYER, GgufLayout
from files.keys import (
    FULL,
    KINDS,
    SLIDING,
    HFConfig,
    common_fields,
    layers_of,
    rope_parameters,
)
from model import DTYPES, ModelConfig, Rope
from models.steps import GeluGate, HeadNorm, OffsetNorm, WindowAttend
from steps import Add, Project, Rotate, Step

# what transformers takes where config.json leaves out a key; those of the 4B leave out most
DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LAYERS_OF_27B = 62  # whose scores have a scale of their own, which GGUF files do not hold


@dataclass(frozen=True)
class Gemma3(ModelConfig):
    """The settings of Gemma 3 beside LLaMA's."""

    query_scale: float = 0.0625  # query_pre_attn_scalar ** -0.5
    window: int = 512  # sliding_window (tokens)
    # rope_local_base_freq, or rope_parameters: of the layers with a window
    local_theta: float = 10000.0
    local_scaling: dict | None = None
    sliding_layers: tuple[int, ...] = ()  # layer_types, sliding_window_pattern
    rounds_scale: bool = True  # (ours) whether the embeddings' scale has the weights' dtype

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "q_norm": ("self_attn.q_norm",),
            "k_norm": ("self_attn.k_norm",),
            "post_attention_norm": ("post_attention_layernorm",),
            "ffn_norm": ("pre_feedforward_layernorm",),
            "post_ffn_norm": ("post_feedforward_layernorm",),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (*super().ropes, Rope(self.head_dim, self.local_theta, self.local_scaling))

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.window,)

    @property
    def embedding_scale(self) -> float:
        return self.rounded(math.sqrt(self.dim))

    def rounded(self, scale: float) -> float:
        """Return the factor of an embedding as transformers, or llama.cpp, takes it."""
        if self.rounds_scale:
            return torch.tensor(scale, dtype=DTYPES[self.dtype], device="cpu").item()
        return scale

    def layer(self, i: int) -> tuple[Step, ...]:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        slides = i in self.sliding_layers

        def norm(name: str, source: str = "stream") -> Step:
            return OffsetNorm(name, self.dim, self.norm_eps, source)

        return (
            norm("attention_norm"),
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            HeadNorm(*heads, self.norm_eps, plus_one=True),
            Rotate(*heads, rope=1 if slides else 0),
            WindowAttend(self.query_scale, self.window if slides else 0),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
            norm("post_attention_norm", "h"),
            Add(),
            norm("ffn_norm"),
            Project("w13", self.dim, 2 * self.ffn_dim),
            GeluGate(),
            Project("w2", self.ffn_dim, self.dim, row_parallel=True),
            norm("post_ffn_norm", "h"),
            Add(),
        )

    def last(self) -> tuple[Step, ...]:
        return (OffsetNorm("norm", self.dim, self.norm_eps),)


# ------------------------------------------------------------------------------------- config.json

NONE = Rule("null", lambda v: v is None)


@dataclass(frozen=True)
class HFGemma3:
    """The further keys of config.json."""

    hidden_activation: str = key(only("gelu_pytorch_tanh"), "gelu_pytorch_tanh")
    query_pre_attn_scalar: float = key(positive(1e6), 256.0)
    window: int = key(integer(1, 2**31 - 1), 4096, "sliding_window")
    rope_local_base_freq: float = key(positive(1e30), 10000.0)
    layer_types: list | None = key(KINDS, None)
    sliding_window_pattern: int = key(integer(1, 2**20), 6)  # every so many layers one sees all
    attn_logit_softcapping: float | None = key(NONE, None)
    final_logit_softcapping: float | None = key(NONE, None)
    use_bidirectional_attention: bool = key(NO, False)
    # (ours) false of a GGUF file, as in llama.cpp
    rounds_scale: bool = key(FLAG, True, "rounds_scale")


def read_config(raw: dict, architecture: str) -> Gemma3:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    raw = given(raw, DEFAULTS)
    hf = read_fields(raw, HFConfig)
    own = read_fields(raw, HFGemma3)
    layers = hf.num_hidden_layers
    far, local = (with_rope(hf, keys) for keys in ropes_of(hf, own))
    fields = common_fields(far)
    local_theta, local_scaling = rope_parameters(local)
    every = own.sliding_window_pattern
    kinds = own.layer_types
    if kinds is None:
        kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    sliding_layers = layers_of(SLIDING, kinds, layers)
    if own.window > hf.max_position_embeddings:
        raise ValueError(
            f"sliding_window must be at most max_position_embeddings "
            f"({hf.max_position_embeddings}); it is {own.window}"
        )
    return Gemma3(
        **fields,
        **translated(own),
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        query_scale=own.query_pre_attn_scalar**-0.5,
        local_theta=local_theta,
        local_scaling=local_scaling,
        sliding_layers=sliding_layers,
    )


def with_rope(hf: HFConfig, keys: dict) -> HFConfig:
    """Return the keys of a model whose RoPE is another."""
    return replace(hf, rope_parameters=keys, rope_scaling=None)


def ropes_of(hf: HFConfig, own: HFGemma3) -> tuple[dict, dict]:
    """Return RoPE's keys of the layers that see all, and of those with a window.

    Raises: ValueError for other kinds of layers.
    """
    far = {"rope_theta": hf.rope_theta or 1e6} | (hf.rope_scaling or {})
    return rope_by_kind(hf, far, {"rope_theta": own.rope_local_base_freq})


def rope_by_kind(hf: HFConfig, far: dict, local: dict) -> tuple[dict, dict]:
    """Return RoPE's keys of the layers that see all, and of those with a window.

    far, local: those that older files have elsewhere
    Raises: ValueError for other kinds of layers.
    """
    by_kind = hf.rope_parameters or {}  # as transformers 5 has them
    known = all(
        kind in (FULL, SLIDING) and isinstance(keys, dict) for kind, keys in by_kind.items()
    )
    if not known:
        raise ValueError(
            f"rope_parameters must hold an object {FULL} and an object {SLIDING}; "
            f"it is {reprlib.repr(by_kind)}"
        )
    return far | by_kind.get(FULL, {}), local | by_kind.get(SLIDING, {})


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key.
    """
    width = metadata.size(name("attention.key_length"))
    if metadata.size(name("block_count")) == LAYERS_OF_27B:
        width = metadata.size(name("embedding_length")) // metadata.size(
            name("attention.head_count")
        )
    return {
        "query_pre_attn_scalar": float(width),
        "rope_theta": metadata.positive(name("rope.freq_base"), 1e6),
        "rope_local_base_freq": metadata.positive(name("rope.freq_base_swa"), 10000.0),
        "sliding_window": metadata.size(name("attention.sliding_window")),
        "attn_logit_softcapping": metadata.get(name("attn_logit_softcapping")) or None,
        "final_logit_softcapping": metadata.get(name("final_logit_softcapping")) or None,
        "rounds_scale": False,
    }


GGUF = GgufLayout(
    layer=LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norms_plus_one=True,
    keys=gguf_keys,
)
