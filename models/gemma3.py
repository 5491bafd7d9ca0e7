"""Gemma 3: norms on both sides of attention and feed-forward, and windows on most layers.

Five layers of six see the last 512 or 1,024 tokens, and have a RoPE of their own. Weights of norms
count from one, embeddings are scaled, and the feed-forward is GeGLU.

Source: arXiv 2503.19786. Not here: images, soft caps, which only Gemma 2 has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf.fields import Rule, integer, key, only, positive, read_fields
from model import NAMES as LLAMA_NAMES
from model import ModelConfig, Rope
from models.gguf_names import LAYER, GgufLayout
from models.keys import HFConfig, common_fields
from steps import Add, Attend, Gate, HeadNorm, Norm, Project, Rotate, Step

SLIDING = "sliding_attention"
FULL = "full_attention"
# what transformers takes where config.json leaves out a key
DEFAULTS = {"head_dim": 256, "max_position_embeddings": 131072, "tie_word_embeddings": True}
LAYERS_OF_27B = 62  # whose scores have a scale of their own, which GGUF files do not hold


@dataclass(frozen=True)
class Gemma3(ModelConfig):
    """The settings of Gemma 3 beside LLaMA's."""

    query_scale: float = 0.0625  # query_pre_attn_scalar ** -0.5
    window: int = 512  # sliding_window (tokens)
    local_theta: float = 10000.0  # rope_local_base_freq, of the layers with a window
    sliding_layers: tuple[int, ...] = ()  # layer_types, sliding_window_pattern

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return LLAMA_NAMES | {
            "post_attention_norm": ("post_attention_layernorm",),
            "ffn_norm": ("pre_feedforward_layernorm",),
            "post_ffn_norm": ("post_feedforward_layernorm",),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (*super().ropes, Rope(self.head_dim, self.local_theta))

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.window,)

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim)

    def layer(self, i: int) -> tuple[Step, ...]:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        slides = i in self.sliding_layers

        def norm(name: str, source: str = "stream") -> Norm:
            return Norm(name, self.dim, self.norm_eps, plus_one=True, source=source)

        return (
            norm("attention_norm"),
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            HeadNorm(*heads, self.norm_eps, plus_one=True),
            Rotate(*heads, rope=1 if slides else 0),
            Attend(self.query_scale, self.window if slides else 0),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
            norm("post_attention_norm", "h"),
            Add(),
            norm("ffn_norm"),
            Project("w13", self.dim, 2 * self.ffn_dim),
            Gate("gelu_tanh"),
            Project("w2", self.ffn_dim, self.dim, row_parallel=True),
            norm("post_ffn_norm", "h"),
            Add(),
        )

    def last(self) -> tuple[Step, ...]:
        return (Norm("norm", self.dim, self.norm_eps, plus_one=True),)


# ------------------------------------------------------------------------------------- config.json

KINDS = Rule(
    f"a list of {SLIDING} and {FULL}", lambda v: type(v) is list and set(v) <= {SLIDING, FULL}
)
NONE = Rule("null", lambda v: v is None)
NO = Rule("false", lambda v: v is False)


@dataclass(frozen=True)
class HFGemma3:
    """The further keys of config.json."""

    hidden_activation: str = key(only("gelu_pytorch_tanh"), "gelu_pytorch_tanh")
    query_pre_attn_scalar: float = key(positive(1e6), 256.0)
    sliding_window: int = key(integer(1, 2**31 - 1), 4096)
    rope_local_base_freq: float = key(positive(1e30), 10000.0)
    layer_types: list | None = key(KINDS, None)
    sliding_window_pattern: int = key(integer(1, 2**20), 6)  # every so many layers one sees all
    attn_logit_softcapping: float | None = key(NONE, None)
    final_logit_softcapping: float | None = key(NONE, None)
    use_bidirectional_attention: bool = key(NO, False)


def read_config(raw: dict, architecture: str) -> Gemma3:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    raw = DEFAULTS | raw
    by_kind = raw.get("rope_parameters") or {}
    if FULL in by_kind:  # transformers 5 has a RoPE for each kind of layer
        local = by_kind.get(SLIDING) or {}
        raw = raw | {"rope_parameters": by_kind[FULL]}
        raw |= {"rope_local_base_freq": local.get("rope_theta", 10000.0)}
    elif not by_kind:
        raw = {"rope_theta": 1e6} | raw
    hf = read_fields(raw, HFConfig)
    own = read_fields(raw, HFGemma3)
    fields = common_fields(hf)
    kinds = own.layer_types
    if kinds is None:
        every = own.sliding_window_pattern
        kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(hf.num_hidden_layers)]
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(
            f"layer_types must name all {hf.num_hidden_layers} layers; it names {len(kinds)}"
        )
    if own.sliding_window > hf.max_position_embeddings:
        raise ValueError(
            f"sliding_window must be at most max_position_embeddings "
            f"({hf.max_position_embeddings}); it is {own.sliding_window}"
        )
    return Gemma3(
        **fields,
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        qk_norm=True,
        query_scale=own.query_pre_attn_scalar**-0.5,
        window=own.sliding_window,
        local_theta=own.rope_local_base_freq,
        sliding_layers=tuple(i for i, kind in enumerate(kinds) if kind == SLIDING),
    )


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
        "final_logit_softcapping": metadata.get(name("final_logit_softcapping")) or None,
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
