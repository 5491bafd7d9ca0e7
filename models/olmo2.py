"""OLMo-2: norms behind attention and feed-forward, and of whole rows of queries and keys.

Source: arXiv 2501.00656. Not here: OLMo-3, whose layers have windows and two ropes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.gguf_names import LAYER, GgufLayout
from files.keys import common_fields, read_swiglu_keys
from model import ModelConfig
from models.steps import RowNorm
from options import require
from steps import Add, Attend, Copy, Norm, Project, Rotate, Step

BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return no further keys of config.json. name: of a key in the file

    Raises: ValueError for OLMo-3, whose files are of this architecture, too.
    """
    fault = f"{metadata.path}: OLMo-3, whose layers have windows, is not supported; use OLMo-2"
    require(not metadata.get(name("attention.sliding_window")), fault)
    return {}


GGUF = GgufLayout(layer=LAYER | BEHIND, keys=gguf_keys)


@dataclass(frozen=True)
class Olmo2(ModelConfig):
    """LLaMA's settings; the layer has its norms elsewhere."""

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "q_norm": ("self_attn.q_norm",),
            "k_norm": ("self_attn.k_norm",),
            "post_attention_norm": (BEHIND["post_attention_norm"],),
            "post_ffn_norm": (BEHIND["post_ffw_norm"],),
        }

    def layer(self, i: int) -> tuple[Step, ...]:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        return (
            Copy("stream", "h"),
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            RowNorm(*heads, self.norm_eps),
            Rotate(*heads),
            Attend(),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
            Norm("post_attention_norm", self.dim, self.norm_eps, source="h"),
            Add(),
            Copy("stream", "h"),
            *self.feed_forward(),
            Norm("post_ffn_norm", self.dim, self.norm_eps, source="h"),
            Add(),
        )


def read_config(raw: dict, architecture: str) -> Olmo2:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    return Olmo2(**common_fields(hf), qkv_bias=hf.attention_bias, o_bias=hf.attention_bias)
