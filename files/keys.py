"""The keys of config.json that most architectures share, as fields of `ModelConfig`.

An architecture's file declares its further keys in the same way (files/fields.py): each with its
type, range and default. An unknown activation or RoPE type is an error, not a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from files.fields import (
    FLAG,
    OBJECT,
    TEXT,
    TOKEN_IDS,
    NotSupported,
    Rule,
    integer,
    key,
    only,
    positive,
    read_fields,
)

ROPE_TYPES = {  # type of RoPE scaling -> the keys that it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),  # `_yarn` fills in the others
}
LONGEST_CONTEXT = 2**31 - 1
SLIDING = "sliding_attention"  # in layer_types: a layer with a window
FULL = "full_attention"

WIDTH = integer(1, 2**20)
POSITIONS = integer(1, LONGEST_CONTEXT)
EXPERTS = integer(1, 2**12)
LAYERS = Rule(
    "a list of layers, whole numbers from 0 on",
    lambda v: type(v) is list and all(map(integer(0, 2**20).holds, v)),
)


def rule_of_kinds(*kinds: str) -> Rule:
    """Return the rule of `layer_types` of a model whose layers are of these kinds."""
    return Rule(
        f"a list of {' and '.join(kinds)}",
        lambda v: type(v) is list and all(kind in kinds for kind in v),
    )


KINDS = rule_of_kinds(SLIDING, FULL)
SHARE = Rule("a number above 0, at most 1", lambda v: type(v) in (int, float) and 0 < v <= 1)


@dataclass(frozen=True)
class HFConfig:
    """The keys of config.json that are read, with the values that they may have."""

    hidden_size: int = key(WIDTH)
    intermediate_size: int = key(WIDTH)
    num_hidden_layers: int = key(WIDTH)
    num_attention_heads: int = key(WIDTH)
    vocab_size: int = key(integer(1, 2**24))
    num_key_value_heads: int | None = key(WIDTH, None)  # as many as heads
    head_dim: int | None = key(integer(1, 2**16), None)  # hidden_size / num_attention_heads
    rms_norm_eps: float = key(positive(1), 1e-6)
    max_position_embeddings: int = key(POSITIONS, 2048)
    sliding_window: int | None = key(integer(0, 2**31 - 1), None)  # 0: none
    # missing: false for Qwen, as in transformers; else true
    use_sliding_window: bool | None = key(FLAG, None)
    attention_bias: bool = key(FLAG, False)
    mlp_bias: bool = key(FLAG, False)
    tie_word_embeddings: bool = key(FLAG, False)
    rope_parameters: dict | None = key(OBJECT, None)
    rope_scaling: dict | None = key(OBJECT, None)  # the same in older files
    rope_theta: float | None = key(positive(1e30), None)
    bos_token_id: int | None = key(integer(-1, 2**32 - 1), None)  # -1: none
    eos_token_id: int | list | None = key(TOKEN_IDS, None)
    torch_dtype: str | None = key(TEXT, None)
    dtype: str = key(TEXT, "float32")  # the same in newer files


@dataclass(frozen=True)
class HFSwiGLU:
    """The key of a feed-forward that is SwiGLU."""

    hidden_act: str = key(only("silu", "swish"), "silu")  # one function


@dataclass(frozen=True)
class HFLayerTypes:
    """The key that names the kind of every layer, of a model whose layers are all alike."""

    layer_types: list | None = key(KINDS, None)


@dataclass(frozen=True)
class HFPartialRope:
    """The key that says how much of a head is turned: in `rope_parameters`, or beside them."""

    partial_rotary_factor: float | None = key(SHARE, None)


@dataclass(frozen=True)
class HFRope:
    """The keys of a RoPE block; `ROPE_TYPES` lists those that a type needs."""

    rope_type: str | None = key(TEXT, None)
    type: str = key(TEXT, "default")  # the same in older files
    rope_theta: float | None = key(positive(1e30), None)
    factor: float | None = key(positive(1e6), None)
    low_freq_factor: float | None = key(positive(1e6), None)
    high_freq_factor: float | None = key(positive(1e6), None)
    original_max_position_embeddings: int | None = key(POSITIONS, None)
    attention_factor: float | None = key(positive(1e6), None)
    mscale: float | None = key(positive(1e6), None)
    mscale_all_dim: float | None = key(positive(1e6), None)
    beta_fast: float | None = key(positive(1e6), None)
    beta_slow: float | None = key(positive(1e6), None)
    truncate: bool = key(FLAG, True)


def read_swiglu_keys(raw: dict) -> HFConfig:
    """Read the shared keys of a model whose feed-forward is SwiGLU. Raises: ValueError."""
    read_fields(raw, HFSwiGLU)
    return read_fields(raw, HFConfig)


def layers_of(kind: str, kinds: list, layers: int) -> tuple[int, ...]:
    """Return the layers of a kind. Raises: ValueError where a list does not name every layer."""
    check_layer_types(kinds, layers)
    return tuple(i for i, each in enumerate(kinds) if each == kind)


def check_layer_types(kinds: list | None, layers: int, key: str = "layer_types") -> None:
    """Check that a list of kinds, if there is one, names every layer. Raises: ValueError."""
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"{key} must name all {layers} layers; it names {len(kinds)}")


def common_fields(hf: HFConfig) -> dict[str, Any]:
    """Translate the keys that most architectures share.

    Returns: fields of `ModelConfig`.
    Raises: ValueError for a bad value.
    """
    theta, scaling = rope_parameters(hf)
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    return {
        "dim": hf.hidden_size,
        "n_layers": hf.num_hidden_layers,
        "n_heads": hf.num_attention_heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim_of(hf, kv_heads),
        "ffn_dim": hf.intermediate_size,
        "vocab_size": hf.vocab_size,
        "norm_eps": hf.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_context": longest_context(hf, scaling),
        "mlp_bias": hf.mlp_bias,
        "tie_embeddings": hf.tie_word_embeddings,
        "eos_ids": all_ids(hf.eos_token_id),
        "dtype": (hf.torch_dtype or hf.dtype).removeprefix("torch."),
    }


def head_dim_of(hf: HFConfig, kv_heads: int) -> int:
    """Return the width of a head. Raises: ValueError for widths or counts that do not fit."""
    heads = hf.num_attention_heads
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
        )
    if hf.head_dim is None and hf.hidden_size % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, {heads}, "
            f"where there is no head_dim; it is {hf.hidden_size}"
        )
    head_dim = hf.head_dim or hf.hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, since RoPE turns pairs; it is {head_dim}")
    return head_dim


def longest_context(hf: HFConfig, scaling: dict | None) -> int:
    """Return the longest context, by the positions and YaRN's factor."""
    longest = hf.max_position_embeddings
    if scaling and scaling["rope_type"] == "yarn":
        # YaRN is set on models whose other keys still hold the original context
        extended = int(scaling["factor"] * scaling["original_max_position_embeddings"])
        longest = min(max(longest, extended), LONGEST_CONTEXT)
    return longest


def within_window(hf: HFConfig, longest: int, by_default: bool) -> int:
    """Return the longest context of a model whose layers all have one sliding window.

    by_default: whether the window counts where `use_sliding_window` is missing
    """
    uses_window = by_default if hf.use_sliding_window is None else hf.use_sliding_window
    if uses_window and hf.sliding_window:
        return min(longest, hf.sliding_window)
    return longest


def all_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Return all ids in the values, each once."""
    ids = []
    for value in values:
        if isinstance(value, list):
            ids += value
        elif value is not None:
            ids.append(value)
    return tuple(dict.fromkeys(i for i in ids if i != -1))


def rope_parameters(hf: HFConfig) -> tuple[float, dict | None]:
    """Read RoPE's base and scaling: `rope_parameters`, or the two keys of older files.

    Those are `rope_theta` and `rope_scaling`.

    Returns: (theta, the scaling's keys with a checked `rope_type`, or None without scaling).
    Raises: ValueError for an unknown type, a key that the type needs, or a bad value.
    """
    rope = read_fields(hf.rope_parameters or hf.rope_scaling or {}, HFRope)
    kind = rope.rope_type or rope.type
    if kind not in ROPE_TYPES:
        raise NotSupported(f"RoPE scaling must be one of {', '.join(ROPE_TYPES)}; it is {kind}")
    scaling = {name: getattr(rope, name) for name in ROPE_TYPES[kind]}
    missing = next((name for name, value in scaling.items() if value is None), None)
    if missing:
        raise ValueError(f"RoPE scaling of the type {kind} needs the key {missing!r}")
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        factors = [rope.low_freq_factor, rope.high_freq_factor]
        raise ValueError(f"low_freq_factor must be below high_freq_factor; they are {factors}")
    theta = float(rope.rope_theta or hf.rope_theta or 10000.0)
    if kind == "yarn":
        scaling |= _yarn(rope, theta, hf.max_position_embeddings)
    if not scaling:
        return theta, None
    return theta, {"rope_type": kind, **scaling}


def rotary_dim(raw: dict, head_dim: int, default: float) -> int:
    """Return the number of elements of a head that RoPE turns.

    raw: config.json; default: the share of a head that they are, where it is not named
    Raises: ValueError for a share that is none, or leaves an odd number.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    factors = [read_fields(keys, HFPartialRope).partial_rotary_factor for keys in (rope, raw)]
    turned = int(head_dim * (factors[0] or factors[1] or default))
    if turned < 2 or turned % 2:
        raise ValueError(
            f"partial_rotary_factor must leave an even number of a head's elements to RoPE; of "
            f"head_dim {head_dim} it leaves {turned}"
        )
    return turned


def _yarn(rope: HFRope, theta: float, longest: int) -> dict:
    """Return the further keys of YaRN, with transformers' defaults.

    longest: max_position_embeddings
    Raises: ValueError for values that contradict each other.
    Source: YaRN (arXiv 2309.00071), 3.2 and 3.4.
    """
    fast = rope.beta_fast or 32.0
    slow = rope.beta_slow or 1.0
    if theta <= 1:
        raise ValueError(
            f"rope_theta must be above 1 for RoPE scaling of the type yarn; it is {theta}"
        )
    if not 1e-6 <= slow <= fast:
        raise ValueError(f"beta_slow must be 1e-6 to beta_fast ({fast}); it is {slow}")

    def log_scale(mscale: float) -> float:  # grows with the logarithm of the context
        if rope.factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(rope.factor) + 1

    if rope.mscale and rope.mscale_all_dim:
        derived = log_scale(rope.mscale) / log_scale(rope.mscale_all_dim)
    else:
        derived = log_scale(1)
    return {
        "original_max_position_embeddings": rope.original_max_position_embeddings or longest,
        "attention_factor": float(rope.attention_factor or derived),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": rope.truncate,
    }
