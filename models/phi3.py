"""Phi-3 and Phi-4: LLaMA with fused projections in its files, and RoPE over a part of each head.

Source: arXiv 2404.14219. Not here: longrope, by which the variants of 128k tokens are scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.gguf_names import LAYER, GgufLayout
from files.keys import common_fields, read_swiglu_keys, rotary_dim, within_window
from model import ModelConfig, Rope


@dataclass(frozen=True)
class Phi3(ModelConfig):
    """LLaMA's settings, and the part of a head that RoPE turns."""

    rotary_dim: int = 64  # partial_rotary_factor head_dim

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        fused = {"wqkv": ("self_attn.qkv_proj",), "w13": ("mlp.gate_up_proj",)}
        return super().names | fused

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (Rope(self.rotary_dim, self.rope_theta, self.rope_scaling),)


def read_config(raw: dict, architecture: str) -> Phi3:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    fields = common_fields(hf)
    fields["max_context"] = within_window(hf, fields["max_context"], by_default=True)
    return Phi3(**fields, rotary_dim=rotary_dim(raw, fields["head_dim"], 1.0))


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further key of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key.
    """
    head = metadata.size(name("embedding_length")) // metadata.size(name("attention.head_count"))
    return {"partial_rotary_factor": metadata.size(name("rope.dimension_count"), head) / head}


GGUF = GgufLayout(
    layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    partial_rope=True,
    keys=gguf_keys,
)
