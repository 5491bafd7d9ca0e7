"""Mixtral: LLaMA's layer with a mixture of experts in every feed-forward (arXiv 2401.04088).

Its list of steps is `ModelConfig`'s own (model.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from files.fields import key, read_fields
from files.gguf_names import GgufLayout
from files.keys import EXPERTS, common_fields, read_swiglu_keys, within_window
from model import ModelConfig

GGUF = GgufLayout(
    mixture={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
    },
    interleaved=True,
)


@dataclass(frozen=True)
class HFMixtralExperts:
    """The further keys of a Mixtral's config.json."""

    num_local_experts: int = key(EXPERTS)
    num_experts_per_tok: int = key(EXPERTS)


def read_config(raw: dict, architecture: str) -> ModelConfig:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    fields = common_fields(hf)
    experts = read_fields(raw, HFMixtralExperts)
    fields |= counts("num_local_experts", experts.num_local_experts, experts.num_experts_per_tok)
    return ModelConfig(
        **fields | {"max_context": within_window(hf, fields["max_context"], by_default=True)},
    )


def counts(name: str, experts: int, chosen: int) -> dict[str, Any]:
    """Return the numbers of experts as fields of `ModelConfig`. name: the key of `experts`

    Raises: ValueError for more chosen experts than there are.
    """
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok must be 1 to {name} ({experts}); it is {chosen}")
    return {"n_experts": experts, "experts_per_token": chosen}
