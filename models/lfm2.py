"""LFM2 and LFM2.5, dense: most layers are gated convolutions over the last three tokens.

The state of such a layer is the inputs of a few tokens (kv_cache.py). The others are attention with
norms of queries and keys.

Source: arXiv 2511.23404. Not here: those with experts, pictures, sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from base.fields import FLAG, Rule, integer, key, positive, read_fields
from kv_cache import TAPS, StateShape
from model import ModelConfig
from models.gguf_names import LAYER, GgufLayout
from models.keys import FULL, LAYERS, WIDTH, common_fields, read_swiglu_keys
from steps import Add, Norm, Project, ShortConv, Step

CONV = "conv"


@dataclass(frozen=True)
class Lfm2(ModelConfig):
    """The settings of LFM2 beside Qwen3's."""

    conv_layers: tuple[int, ...] = ()  # layer_types, full_attn_idxs
    taps: int = 3  # conv_L_cache: tokens that a convolution reads

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
        }

    def state_shape(self, i: int) -> StateShape | None:
        return StateShape(0, 0, 0, self.dim) if i in self.conv_layers else None

    def layer(self, i: int) -> tuple[Step, ...]:
        return (
            Norm("attention_norm", self.dim, self.norm_eps),
            *(self.convolution(i) if i in self.conv_layers else self.attention()),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            *self.feed_forward(),
            Add(),
        )

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
OLDER = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
KINDS = Rule(
    f"a list of {CONV} and {FULL}",
    lambda v: type(v) is list and all(kind in (CONV, FULL) for kind in v),
)
NO = Rule("false", lambda v: v is False)


@dataclass(frozen=True)
class HFLfm2:
    """The further keys of config.json."""

    norm_eps: float = key(positive(1), 1e-5)
    conv_L_cache: int = key(integer(2, TAPS), 3)  # noqa: N815  (their name)
    conv_bias: bool = key(NO, False)
    layer_types: list | None = key(KINDS, None)
    full_attn_idxs: list | None = key(LAYERS, None)
    block_auto_adjust_ff_dim: bool = key(FLAG, True)
    block_ffn_dim_multiplier: float | None = key(positive(1e3), 1.0)
    block_multiple_of: int = key(WIDTH, 256)


def read_config(raw: dict, architecture: str) -> Lfm2:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    given = {name: value for name, value in raw.items() if value is not None}
    raw = DEFAULTS | {OLDER.get(name, name): value for name, value in given.items()}
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
        taps=own.conv_L_cache,
    )


def conv_layers(own: HFLfm2, layers: int) -> tuple[int, ...]:
    """Return the layers that are convolutions.

    Raises: ValueError where the two keys contradict each other, or no layer is attention.
    """
    places = own.full_attn_idxs
    kinds = own.layer_types
    if kinds is None:
        places = list(range(layers)) if places is None else places
        kinds = [FULL if i in places else CONV for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types must name all {layers} layers; it names {len(kinds)}")
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    if not full:
        raise ValueError(f"layer_types must name {FULL} at least once; it names {CONV} alone")
    if places is not None and sorted(places) != full:
        raise ValueError(
            f"full_attn_idxs must be the {FULL} layers of layer_types, {full}; it is {places}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == CONV)


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
    return {
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
    beside={"token_embd_norm": "model.norm"},
    changed={"shortconv.conv.weight": ("conv.conv.weight", lambda x: x[:, None])},
    by_layer=True,
    keys=gguf_keys,
)
