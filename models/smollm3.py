"""SmolLM3: LLaMA whose every fourth layer has no positions (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from files.fields import Rule, given, integer, key, read_fields
from files.gguf_names import GgufLayout
from files.keys import check_layer_types, common_fields, read_swiglu_keys, within_window
from model import ModelConfig, Rope
from steps import Rotate, Step

FLAGS = Rule("a list of 0 and 1", lambda v: type(v) is list and all(flag in (0, 1) for flag in v))
GGUF = GgufLayout(interleaved=True)


@dataclass(frozen=True)
class SmolLM3(ModelConfig):
    """LLaMA's settings, and the layers without positions."""

    unturned: tuple[int, ...] = ()  # no_rope_layers, where they are 0

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """RoPE, and one that turns nothing."""
        return *super().ropes, Rope(self.head_dim, self.rope_theta, {"rope_type": "none"})

    def layer(self, i: int) -> tuple[Step, ...]:
        steps = super().layer(i)
        if i not in self.unturned:
            return steps
        return tuple(replace(step, rope=1) if isinstance(step, Rotate) else step for step in steps)


def no_turns(freq: Tensor, rope: Rope) -> Tensor:
    """Return frequencies of which cosines are 1 and sines 0."""
    return torch.zeros_like(freq)


@dataclass(frozen=True)
class HFSmolLM3:
    """The further keys of config.json, with transformers' defaults."""

    no_rope_layers: list | None = key(FLAGS, None)
    no_rope_layer_interval: int = key(integer(1, 2**20), 4)


def read_config(raw: dict, architecture: str) -> SmolLM3:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    raw = given(raw, {"tie_word_embeddings": True})
    hf = read_swiglu_keys(raw)
    own = read_fields(raw, HFSmolLM3)
    fields = common_fields(hf)
    layers = range(hf.num_hidden_layers)
    turns = own.no_rope_layers or [(i + 1) % own.no_rope_layer_interval for i in layers]
    check_layer_types(turns, hf.num_hidden_layers, "no_rope_layers")
    fields["max_context"] = within_window(hf, fields["max_context"], by_default=False)
    bias = hf.attention_bias
    unturned = tuple(i for i in layers if not turns[i])
    return SmolLM3(**fields, qkv_bias=bias, o_bias=bias, unturned=unturned)
