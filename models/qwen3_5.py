"""Qwen3.5, 3.6 and 3.8, dense or with experts: three layers of four are GatedDeltaNet.

The state of such a layer is recurrent (kv_cache.py). The fourth is attention, whose output has a
gate, and whose RoPE turns a quarter of each head. Weights of norms count from one, but not those
of the recurrence.

Sources: arXiv 2412.06464 (Gated DeltaNet), 2505.06708 (the gate of attention).
Not here: pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from files.fields import FLAG, YES, integer, key, read_fields, translated
from files.gguf_names import GgufLayout, same
from files.keys import (
    EXPERTS,
    FULL,
    WIDTH,
    common_fields,
    layers_of,
    read_swiglu_keys,
    rotary_dim,
    rule_of_kinds,
)
from files.mixtral import counts
from files.mtp import Mtp
from files.renames import split_experts
from model import Rope
from models.mixtures import Qwen
from models.qwen import GGUF as QWEN2
from models.states import TAPS, StateShape, StateShapes
from models.steps import DeltaRule, GateOutput, HeadNorm, OffsetNorm, SplitGate
from steps import Add, Attend, Project, Rotate, Step

LINEAR = "linear_attention"
WITH_EXPERTS = "Qwen3_5MoeForCausalLM"
MTP_NAMES = {
    "fc": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}


@dataclass(frozen=True)
class Qwen35(Qwen):
    """The settings of Qwen3.5 beside Qwen3's."""

    rotary_dim: int = 64  # partial_rotary_factor head_dim: elements of a head that RoPE turns
    key_heads: int = 16  # linear_num_key_heads
    value_heads: int = 32  # linear_num_value_heads
    key_dim: int = 128  # linear_key_head_dim
    value_dim: int = 128  # linear_value_head_dim
    recurrent_layers: tuple[int, ...] = ()  # layer_types, full_attention_interval
    # (ours) head h of values reads head h mod H_k of keys, and no neighbour does: as in GGUF files
    tiled_heads: bool = False

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        # of a row what the state depends on comes first
        projections = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
        return super().names | {
            "w_in": tuple(f"linear_attn.{name}" for name in projections),
            "conv": ("linear_attn.conv1d",),
            "decay": ("linear_attn",),
            "state_norm": ("linear_attn.norm",),
            "w_out": ("linear_attn.out_proj",),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (Rope(self.rotary_dim, self.rope_theta, self.rope_scaling),)

    @property
    def state_shapes(self) -> StateShapes | None:
        return StateShapes.of(self.state_shape(i) for i in range(self.n_layers))

    def kv_shape(self, i: int) -> tuple[int, int]:
        return (0 if i in self.recurrent_layers else self.n_kv_heads), self.head_dim

    def state_shape(self, i: int) -> StateShape | None:
        """Return the sizes of the state of layer i, if that is recurrent."""
        if i not in self.recurrent_layers:
            return None
        convolved = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return StateShape(
            self.value_heads, self.key_dim, self.value_dim, convolved + 2 * self.value_heads
        )

    @property
    def mtp(self) -> Mtp:
        model = replace(self, n_layers=1, recurrent_layers=())
        return Mtp(model, "mtp.", "mtp.layers.{}.", MTP_NAMES)

    def layer(self, i: int) -> tuple[Step, ...]:
        return (
            OffsetNorm("attention_norm", self.dim, self.norm_eps),
            *(self.recurrence(i) if i in self.recurrent_layers else self.attention()),
            Add(),
            OffsetNorm("ffn_norm", self.dim, self.norm_eps),
            *(self.mixture() if self.has_experts(i) else self.feed_forward()),
            Add(),
        )

    def attention(self) -> tuple[Step, ...]:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        return (
            Project("wqkv", self.dim, 2 * width + both, self.qkv_bias),
            SplitGate(self.n_heads, self.head_dim),
            HeadNorm(*heads, self.norm_eps, plus_one=True),
            Rotate(*heads),
            Attend(),
            GateOutput(),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
        )

    def recurrence(self, i: int) -> tuple[Step, ...]:
        """Return the steps of GatedDeltaNet, over one projection of all that it reads."""
        shape = self.state_shape(i)
        values = self.value_heads * self.value_dim
        return (
            Project("w_in", self.dim, shape.channels + values),
            DeltaRule(shape, self.norm_eps, self.tiled_heads),
            Project("w_out", values, self.dim, row_parallel=True),
        )

    def last(self) -> tuple[Step, ...]:
        return (OffsetNorm("norm", self.dim, self.norm_eps),)


# ------------------------------------------------------------------------------------- config.json


@dataclass(frozen=True)
class HFQwen35:
    """The further keys of config.json."""

    head_dim: int = key(integer(1, 2**16), 256)
    key_heads: int = key(WIDTH, 16, "linear_num_key_heads")
    value_heads: int = key(WIDTH, 32, "linear_num_value_heads")
    key_dim: int = key(WIDTH, 128, "linear_key_head_dim")
    value_dim: int = key(WIDTH, 128, "linear_value_head_dim")
    linear_conv_kernel_dim: int = key(integer(TAPS, TAPS), TAPS)
    layer_types: list | None = key(rule_of_kinds(LINEAR, FULL), None)
    # every so many layers one is full; None: 4, where layer_types are missing
    full_attention_interval: int | None = key(integer(1, 2**20), None)
    attn_output_gate: bool = key(YES, True)
    qkv_bias: bool = key(FLAG, False, "attention_bias")
    tiled_heads: bool = key(FLAG, False, "tiled_heads")  # (ours) true of a GGUF file


@dataclass(frozen=True)
class HFExperts:
    """The further keys of one with experts."""

    expert_dim: int = key(WIDTH, name="moe_intermediate_size")
    shared_dim: int = key(WIDTH, name="shared_expert_intermediate_size")
    num_experts: int = key(EXPERTS)
    num_experts_per_tok: int = key(EXPERTS)


def read_config(raw: dict, architecture: str) -> Qwen35:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    experts = {}
    if architecture == WITH_EXPERTS:
        own = read_fields(raw, HFExperts)
        experts = translated(own) | counts("num_experts", own.num_experts, own.num_experts_per_tok)
        raw = {"intermediate_size": own.expert_dim} | raw
    own = read_fields(raw, HFQwen35)
    hf = replace(read_swiglu_keys(raw), head_dim=own.head_dim)
    if own.value_heads % own.key_heads:
        raise ValueError(
            f"linear_num_key_heads ({own.key_heads}) must divide "
            f"linear_num_value_heads ({own.value_heads})"
        )
    return Qwen35(
        **common_fields(hf),
        **experts,
        **translated(own),
        o_bias=own.qkv_bias,
        qk_norm=True,
        rotary_dim=rotary_dim(raw, own.head_dim, 0.25),
        recurrent_layers=recurrent_layers(own, hf.num_hidden_layers),
    )


rename = split_experts


def recurrent_layers(own: HFQwen35, layers: int) -> tuple[int, ...]:
    """Return the layers that are recurrent.

    Raises: ValueError where the list of kinds is of another length or in another order than the
    interval says, or none is attention.
    """
    every = own.full_attention_interval or 4
    regular = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    kinds = own.layer_types or regular
    recurrent = layers_of(LINEAR, kinds, layers)
    if FULL not in kinds:
        raise ValueError(f"layer_types must name {FULL} at least once; it names {LINEAR} alone")
    if own.full_attention_interval and kinds != regular:
        raise ValueError(
            f"full_attention_interval ({every}) and layer_types must name the same layers as "
            f"{FULL}; correct one of them"
        )
    return recurrent


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key.
    """
    values = metadata.size(name("ssm.time_step_rank"))
    inner = metadata.size(name("ssm.inner_size"))
    if inner % values:
        raise ValueError(f"{metadata.path}: ssm.time_step_rank must divide ssm.inner_size")
    head = metadata.size(name("attention.key_length"))
    experts = {}
    if metadata.get(name("expert_count")):
        experts = {
            "num_experts": metadata.size(name("expert_count")),
            "shared_expert_intermediate_size": metadata.size(
                name("expert_shared_feed_forward_length")
            ),
        }
    return experts | {
        "linear_num_key_heads": metadata.size(name("ssm.group_count")),
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata.size(name("ssm.state_size")),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": metadata.size(name("ssm.conv_kernel")),
        "full_attention_interval": metadata.size(name("full_attention_interval"), 4),
        "partial_rotary_factor": metadata.size(name("rope.dimension_count"), head) / head,
        "tiled_heads": True,
    }


GGUF = GgufLayout(
    layer=QWEN2.layer
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_out": "linear_attn.out_proj",
    },
    norms_plus_one=True,
    partial_rope=True,
    keys=gguf_keys,
    changed=QWEN2.changed
    | {
        "ssm_a": ("linear_attn.A_log", lambda a: (-a.double()).log().float()),  # -exp(A_log)
        "ssm_dt.bias": ("linear_attn.dt_bias", same),
        "ssm_conv1d.weight": ("linear_attn.conv1d.weight", lambda x: x[:, None]),
        "ssm_norm.weight": ("linear_attn.norm.weight", same),
    },
)
