"""GLM-4 (9B and 32B of 2025): norms on both sides of attention and feed-forward, and biases.

RoPE turns half of each head, in pairs of neighbours. Files hold gate above up in one tensor.

Source: arXiv 2406.12793. Not here: GLM-4.5 and later ones (models/glm4_moe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.fields import FLAG, key, read_fields
from files.gguf_names import LAYER, GgufLayout
from files.keys import common_fields, read_swiglu_keys, rotary_dim
from files.renames import split_gate_up
from model import ModelConfig, Rope
from models.steps import SplitPairs
from steps import Add, Attend, Norm, Project, Rotate, Step


@dataclass(frozen=True)
class Glm4(ModelConfig):
    """The settings of GLM-4 beside LLaMA's."""

    rotary_dim: int = 64  # partial_rotary_factor head_dim: elements of a head that RoPE turns

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "post_attention_norm": ("post_self_attn_layernorm",),
            "post_ffn_norm": ("post_mlp_layernorm",),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (Rope(self.rotary_dim, self.rope_theta, self.rope_scaling),)

    def layer(self, i: int) -> tuple[Step, ...]:
        return (
            Norm("attention_norm", self.dim, self.norm_eps),
            *self.attention(),
            Norm("post_attention_norm", self.dim, self.norm_eps, source="h"),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            *self.feed_forward(),
            Norm("post_ffn_norm", self.dim, self.norm_eps, source="h"),
            Add(),
        )

    def attention(self) -> tuple[Step, ...]:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        return (
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            SplitPairs(*heads, self.rotary_dim),
            Rotate(*heads),
            Attend(),
            Project("wo", width, self.dim, row_parallel=True),
        )


@dataclass(frozen=True)
class HFGlm4:
    """The further key of config.json, with transformers' default."""

    attention_bias: bool = key(FLAG, True)


def read_config(raw: dict, architecture: str) -> Glm4:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    fields = common_fields(hf)
    return Glm4(
        **fields,
        qkv_bias=read_fields(raw, HFGlm4).attention_bias,
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
    )


rename = split_gate_up


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further key of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key.
    """
    head = metadata.size(name("attention.key_length"), None) or metadata.size(
        name("embedding_length")
    ) // metadata.size(name("attention.head_count"))
    return {"partial_rotary_factor": metadata.size(name("rope.dimension_count"), head) / head}


GGUF = GgufLayout(
    layer=LAYER
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    partial_rope=True,
    gate_above_up=True,
    keys=gguf_keys,
)
