"""Granite 3, and Granite 4 without experts and recurrences: LLaMA with four factors.

1. Embeddings have a factor m, attention's scores one of their own, logits a divisor.
2. All that a layer adds to the residual stream has a factor r. The stream is kept divided by r:
   embeddings have the factor m / r, and norms, which see no scale, an eps divided by r squared.
3. The divisor of the logits is in the factors of the last norm, whose rows heads read as features.

Source: arXiv 2408.13359 (the factors). Not here: Granite 4's hybrids and mixtures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.fields import Rule, key, only, positive, read_fields
from files.gguf_names import GgufLayout
from files.keys import WIDTH, common_fields, layers_of, read_swiglu_keys
from model import ModelConfig
from models.steps import DividedNorm, WindowAttend
from steps import Attend, Step

HYBRID = "GraniteMoeHybridForCausalLM"  # Granite 4
ATTENDS = Rule(
    "a list of attention", lambda v: type(v) is list and {*v} <= {"attention", "full_attention"}
)


@dataclass(frozen=True)
class Granite(ModelConfig):
    """LLaMA's settings, and the factors."""

    embedding_scale: float = 1.0  # embedding_multiplier / residual_multiplier
    query_scale: float = 1.0  # attention_multiplier
    logit_divisor: float = 1.0  # logits_scaling
    is_hybrid: bool = False  # (ours) the names of Granite 4's files

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        fused = {"w13": ("shared_mlp.input_linear",), "w2": ("shared_mlp.output_linear",)}
        return super().names | (fused if self.is_hybrid else {})

    def attention(self) -> tuple[Step, ...]:
        attend = WindowAttend(self.query_scale)
        return tuple(attend if isinstance(s, Attend) else s for s in super().attention())

    def last(self) -> tuple[Step, ...]:
        return (DividedNorm("norm", self.dim, self.norm_eps, divisor=self.logit_divisor),)


@dataclass(frozen=True)
class HFGranite:
    """The further keys of config.json, with transformers' defaults."""

    embedding_multiplier: float = key(positive(1e6), 1.0)
    attention_multiplier: float = key(positive(1e6), 1.0)
    residual_multiplier: float = key(positive(1e6), 1.0)
    logits_scaling: float = key(positive(1e6), 1.0)


@dataclass(frozen=True)
class HFHybrid:
    """Those of Granite 4."""

    layer_types: list = key(ATTENDS)
    num_local_experts: int = key(Rule("0", lambda v: type(v) is int and v == 0))
    position_embedding_type: str = key(only("rope"))
    shared_intermediate_size: int = key(WIDTH, 1024)


def read_config(raw: dict, architecture: str) -> Granite:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    own = read_fields(raw, HFGranite)
    fields = common_fields(hf)
    if architecture == HYBRID:
        hybrid = read_fields(raw, HFHybrid)
        layers_of("", hybrid.layer_types, hf.num_hidden_layers)
        fields["ffn_dim"] = hybrid.shared_intermediate_size
    factor = own.residual_multiplier
    return Granite(
        **fields | {"norm_eps": hf.rms_norm_eps / factor**2},
        embedding_scale=own.embedding_multiplier / factor,
        query_scale=own.attention_multiplier,
        logit_divisor=own.logits_scaling,
        is_hybrid=architecture == HYBRID,
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
    )


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file"""
    return {
        "embedding_multiplier": metadata.positive(name("embedding_scale"), 1.0),
        "attention_multiplier": metadata.positive(name("attention.scale"), 1.0),
        "residual_multiplier": metadata.positive(name("residual_scale"), 1.0),
        "logits_scaling": metadata.positive(name("logit_scale"), 1.0),
    }


GGUF = GgufLayout(interleaved=True, keys=gguf_keys)
