"""LFM2 and LFM2.5, dense or with experts: most layers are gated convolutions over three tokens.

The state of such a layer is the inputs of a few tokens (kv_cache.py). The others are attention with
norms of queries and keys. Experts are chosen by sigmoids with a correction (`SigmoidRouter`).

Source: arXiv 2511.23404. Not here: pictures, sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.fields import FLAG, NO, YES, given, integer, key, positive, read_fields, translated
from files.gguf_names import LAYER, GgufLayout, same
from files.keys import (
    EXPERTS,
    FULL,
    LAYERS,
    WIDTH,
    common_fields,
    layers_of,
    read_swiglu_keys,
    rule_of_kinds,
)
from files.mixtral import counts
from files.renames import Readers, rename_ends, split_experts
from models.mixtures import Qwen
from models.states import TAPS, StateShape, StateShapes
from models.steps import ShortConv, SigmoidRoute
from steps import Add, Norm, Project, Route, Step

CONV = "conv"
WITH_EXPERTS = "Lfm2MoeForCausalLM"


@dataclass(frozen=True)
class Lfm2(Qwen):
    """The settings of LFM2 beside Qwen3's."""

    conv_layers: tuple[int, ...] = ()  # layer_types, full_attn_idxs
    taps: int = 3  # conv_L_cache: tokens that a convolution reads
    share_scale: float = 1.0  # routed_scaling_factor

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return super().names | {
            "attention_norm": ("operator_norm",),
            "q_norm": ("self_attn.q_layernorm",),
            "k_norm": ("self_attn.k_layernorm",),
            "wo": ("self_attn.out_proj",),
            "w_in": ("conv.in_proj",),
            "conv": ("conv.conv",),
            "w_out": ("conv.out_proj",),
            "ffn_norm": ("ffn_norm",),
            "w13": ("feed_forward.w1", "feed_forward.w3"),
            "w2": ("feed_forward.w2",),
            "router": ("feed_forward.gate",),
            "experts.w13": ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
            "experts.w2": ("feed_forward.experts.{}.w2",),
        }

    @property
    def state_shapes(self) -> StateShapes | None:
        return StateShapes.of(self.state_shape(i) for i in range(self.n_layers))

    def state_shape(self, i: int) -> StateShape | None:
        """Return the sizes of the state of layer i, if that is a convolution."""
        return StateShape(0, 0, 0, self.dim) if i in self.conv_layers else None

    def kv_shape(self, i: int) -> tuple[int, int]:
        return (0 if i in self.conv_layers else self.n_kv_heads), self.head_dim

    def layer(self, i: int) -> tuple[Step, ...]:
        return (
            Norm("attention_norm", self.dim, self.norm_eps),
            *(self.convolution(i) if i in self.conv_layers else self.attention()),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            *(self.mixture() if self.has_experts(i) else self.feed_forward()),
            Add(),
        )

    def route(self) -> Route:
        sizes = (self.dim, self.n_experts, self.experts_per_token)
        rule = {"norm_topk": self.norm_topk, "share_scale": self.share_scale}
        return SigmoidRoute(*sizes, **rule, share_eps=1e-6)

    def convolution(self, i: int) -> tuple[Step, ...]:
        """Return the steps of a gated convolution."""
        return (
            Project("w_in", self.dim, 3 * self.dim),
            ShortConv(self.state_shape(i), self.taps),
            Project("w_out", self.dim, self.dim, row_parallel=True),
        )


# ------------------------------------------------------------------------------------- config.json

# what transformers takes where config.json leaves out a key
DEFAULTS = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# the same of one with experts, where it differs
DEFAULTS_WITH_EXPERTS = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "block_auto_adjust_ff_dim": False,
}
# names that are not as in other models -> such as others have
BARE = {
    ".embedding_norm.weight": ".norm.weight",
    ".expert_bias": ".gate.e_score_correction_bias",
}
OLDER = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}


@dataclass(frozen=True)
class HFLfm2:
    """The further keys of config.json."""

    norm_eps: float = key(positive(1), 1e-5)
    taps: int = key(integer(2, TAPS), 3, "conv_L_cache")  # noqa: N815  (their name)
    conv_bias: bool = key(NO, False)
    layer_types: list | None = key(rule_of_kinds(CONV, FULL), None)
    full_attn_idxs: list | None = key(LAYERS, None)
    block_auto_adjust_ff_dim: bool = key(FLAG, True)
    block_ffn_dim_multiplier: float | None = key(positive(1e3), 1.0)
    block_multiple_of: int = key(WIDTH, 256)


@dataclass(frozen=True)
class HFExperts:
    """The further keys of one with experts, with transformers' defaults."""

    expert_dim: int = key(WIDTH, 1792, "moe_intermediate_size")
    num_experts: int = key(EXPERTS, 32)
    num_experts_per_tok: int = key(EXPERTS, 4)
    num_dense_layers: int = key(integer(0, 2**12), 2)
    norm_topk: bool = key(FLAG, True, "norm_topk_prob")
    use_expert_bias: bool = key(YES, True)
    share_scale: float = key(positive(1e3), 1.0, "routed_scaling_factor")


def read_config(raw: dict, architecture: str) -> Lfm2:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    raw = {OLDER.get(name, name): value for name, value in given(raw, {}).items()}
    experts = {}
    if architecture == WITH_EXPERTS:
        hf = read_fields(raw, HFExperts)
        experts = translated(hf) | counts("num_experts", hf.num_experts, hf.num_experts_per_tok)
        experts["dense_layers"] = tuple(range(hf.num_dense_layers))
        raw = DEFAULTS_WITH_EXPERTS | raw
    raw = DEFAULTS | raw
    own = read_fields(raw, HFLfm2)
    fields = common_fields(read_swiglu_keys(raw))
    width = fields["ffn_dim"]
    if own.block_auto_adjust_ff_dim:
        multiple = own.block_multiple_of
        width = int(own.block_ffn_dim_multiplier * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    return Lfm2(
        **fields | {"ffn_dim": width, "norm_eps": own.norm_eps},
        qk_norm=True,
        conv_layers=conv_layers(own, fields["n_layers"]),
        **translated(own),
        **experts,
    )


def rename(readers: Readers, raw: dict) -> Readers:
    """Name the matrices of experts one by one, and what has no module as the weight of one."""
    return split_experts(rename_ends(readers, BARE), raw)


def conv_layers(own: HFLfm2, layers: int) -> tuple[int, ...]:
    """Return the layers that are convolutions.

    Raises: ValueError where the two keys contradict each other, or no layer is attention.
    """
    places = own.full_attn_idxs
    kinds = own.layer_types
    if kinds is None:
        places = list(range(layers)) if places is None else places
        kinds = [FULL if i in places else CONV for i in range(layers)]
    full = list(layers_of(FULL, kinds, layers))
    if not full:
        raise ValueError(f"layer_types must name {FULL} at least once; it names {CONV} alone")
    if places is not None and sorted(places) != full:
        raise ValueError(
            f"full_attn_idxs must be the {FULL} layers of layer_types, {full}; it is {places}"
        )
    return layers_of(CONV, kinds, layers)


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key, or a list that is none of heads.
    """
    heads = metadata.read(name("attention.head_count_kv"), list)
    counts = {count for count in heads if count}
    if len(counts) > 1 or not all(map(integer(0, 2**20).holds, heads)):
        raise ValueError(
            f"{metadata.path}: attention.head_count_kv must be 0 for convolutions, and one number "
            "for all other layers; use another file"
        )
    experts = {}
    if metadata.get(name("expert_count")):
        experts = {
            "num_experts": metadata.size(name("expert_count")),
            "num_dense_layers": metadata.read(name("leading_dense_block_count"), int, 0),
            "routed_scaling_factor": metadata.positive(name("expert_weights_scale"), 1.0),
        }
    return experts | {
        "layer_types": [FULL if count else CONV for count in heads],
        "conv_L_cache": metadata.size(name("shortconv.l_cache")),
        "norm_eps": metadata.positive(name("attention.layer_norm_rms_epsilon"), 1e-5),
        "block_auto_adjust_ff_dim": False,
    }


GGUF = GgufLayout(
    layer=LAYER
    | {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1",
        "ffn_down": "feed_forward.w2",
        "ffn_up": "feed_forward.w3",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    mixture={
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate": "feed_forward.experts.{}.w1",
        "ffn_down": "feed_forward.experts.{}.w2",
        "ffn_up": "feed_forward.experts.{}.w3",
    },
    beside={"token_embd_norm": "model.norm"},
    changed={
        "shortconv.conv.weight": ("conv.conv.weight", lambda x: x[:, None]),
        "exp_probs_b.bias": ("feed_forward.gate.e_score_correction_bias", same),
    },
    by_layer=True,
    keys=gguf_keys,
)
