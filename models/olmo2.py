"""OLMo-2 and 3: norms behind attention and feed-forward, and of whole rows of queries and keys.

Three of four layers of OLMo-3 see a window, without the others' scaling of RoPE. Its GGUF files
have the architecture olmo2, and a window.

Source: arXiv 2501.00656; OLMo-3: transformers' modeling_olmo3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.fields import integer, key, read_fields
from files.gguf_names import LAYER, GgufLayout
from files.keys import FULL, KINDS, SLIDING, common_fields, layers_of, read_swiglu_keys
from model import ModelConfig, Rope
from models.gemma3 import rope_by_kind, with_rope
from models.steps import RowNorm, WindowAttend
from steps import Add, Copy, Norm, Project, Rotate, Step

BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Olmo2(ModelConfig):
    """LLaMA's settings; the layer has its norms elsewhere."""

    window: int = 0  # sliding_window (tokens); 0: no layer has one
    sliding_layers: tuple[int, ...] = ()  # layer_types
    local_theta: float = 10000.0  # of RoPE in them

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "q_norm": ("self_attn.q_norm",),
            "k_norm": ("self_attn.k_norm",),
            "post_attention_norm": (BEHIND["post_attention_norm"],),
            "post_ffn_norm": (BEHIND["post_ffw_norm"],),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        local = (Rope(self.head_dim, self.local_theta),) if self.window else ()
        return *super().ropes, *local

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.window,) if self.window else ()

    def layer(self, i: int) -> tuple[Step, ...]:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        slides = i in self.sliding_layers
        return (
            Copy("stream", "h"),
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            RowNorm(*heads, self.norm_eps),
            Rotate(*heads, rope=1 if slides else 0),
            WindowAttend(window=self.window if slides else 0),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
            Norm("post_attention_norm", self.dim, self.norm_eps, source="h"),
            Add(),
            Copy("stream", "h"),
            *self.feed_forward(),
            Norm("post_ffn_norm", self.dim, self.norm_eps, source="h"),
            Add(),
        )


@dataclass(frozen=True)
class HFOlmo3:
    """The further keys of config.json, with transformers' defaults."""

    sliding_window: int = key(integer(1, 2**31 - 1), 4096)
    layer_types: list | None = key(KINDS, None)


def read_config(raw: dict, architecture: str) -> Olmo2:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    own = read_fields(raw, HFOlmo3)
    bias = {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}
    kinds = own.layer_types
    if architecture == "Olmo3ForCausalLM" and kinds is None:
        kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(hf.num_hidden_layers)]
    if kinds is None:  # OLMo-2
        return Olmo2(**common_fields(hf), **bias)
    theta = {"rope_theta": hf.rope_theta or 500000.0}
    far, local = rope_by_kind(hf, theta | (hf.rope_scaling or {}), theta)
    return Olmo2(
        **common_fields(with_rope(hf, far)),
        **bias,
        window=own.sliding_window,
        sliding_layers=layers_of(SLIDING, kinds, hf.num_hidden_layers),
        local_theta=float(local["rope_theta"]),
    )


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file of OLMo-3 holds. name: of a key"""
    window = metadata.size(name("attention.sliding_window"), None)
    if window is None:
        return {}
    slides = metadata.read(name("attention.sliding_window_pattern"), list)
    kinds = [SLIDING if each else FULL for each in slides]
    return {"sliding_window": window, "layer_types": kinds}


GGUF = GgufLayout(layer=LAYER | BEHIND, keys=gguf_keys)
