"""What checkpoints say: `config.json` as a `ModelConfig`, and which draft goes with a target.

A checkpoint is a Hugging Face directory or a GGUF file; `open_source` and `read_raw` take both.
The dataclasses here declare each key that is read once, with its type, range and default (`read_fields`).
An unknown architecture, activation or RoPE type is an error, not a guess.
Not here: how the files hold quantized weights (quantize.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint import TensorSource, WeightFiles, foreign_quantization, saved_quantization
from files import is_gguf, read_json
from hf.fields import (
    FLAG,
    NAMES,
    OBJECT,
    TEXT,
    TOKEN_IDS,
    NotSupported,
    Rule,
    integer,
    key,
    naming,
    only,
    positive,
    read_fields,
)
from model import ModelConfig
from ops.library import has_cpu_operators
from options import GenerateConfig

# architecture -> whether q, k and v have a bias, and whether o has one; None: as the key `attention_bias` says
ARCHITECTURES = {
    "LlamaForCausalLM": (None, None),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (None, None),
    "Qwen3MoeForCausalLM": (None, None),
    "MixtralForCausalLM": (False, False),
}
ROPE_TYPES = {  # type of RoPE scaling -> the keys that it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),  # `_yarn` fills in the others
}


WIDTH, POSITIONS, EXPERTS = integer(1, 2**20), integer(1, 2**31 - 1), integer(1, 2**12)
LAYERS = Rule(
    "a list of layers, whole numbers from 0 on",
    lambda v: type(v) is list and all(map(integer(0, 2**20).holds, v)),
)


@dataclass(frozen=True)
class Named:
    """The keys of config.json that say what a model is."""

    architectures: list | None = key(NAMES, None)
    model_type: str = key(TEXT, "unknown")


@dataclass(frozen=True)
class Said:
    """The keys of config.json that are read, with the values that they may have."""

    hidden_size: int = key(WIDTH)
    intermediate_size: int = key(WIDTH)
    num_hidden_layers: int = key(WIDTH)
    num_attention_heads: int = key(WIDTH)
    vocab_size: int = key(integer(1, 2**24))
    num_key_value_heads: int | None = key(WIDTH, None)  # as many as heads
    head_dim: int | None = key(integer(1, 2**16), None)  # hidden_size / num_attention_heads
    hidden_act: str = key(only("silu"), "silu")
    rms_norm_eps: float = key(positive(1), 1e-6)
    max_position_embeddings: int = key(POSITIONS, 2048)
    sliding_window: int | None = key(integer(0, 2**31 - 1), None)  # 0: none
    use_sliding_window: bool | None = key(
        FLAG, None
    )  # false for Qwen, as in transformers; else true
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
    stand_in: str = key(TEXT, "")


@dataclass(frozen=True)
class Generation:
    """The keys of generation_config.json that are read."""

    eos_token_id: int | list | None = key(TOKEN_IDS, None)


@dataclass(frozen=True)
class Experts:
    """The keys of a Mixtral's config.json besides."""

    num_local_experts: int = key(EXPERTS)
    num_experts_per_tok: int = key(EXPERTS)


@dataclass(frozen=True)
class QwenExperts:
    """The keys of a Qwen3-MoE's config.json besides."""

    moe_intermediate_size: int = key(WIDTH)
    num_experts_per_tok: int = key(EXPERTS)
    num_experts: int | None = key(EXPERTS, None)
    num_local_experts: int | None = key(EXPERTS, None)  # the same as transformers 5 writes it
    norm_topk_prob: bool = key(FLAG, False)
    decoder_sparse_step: int = key(WIDTH, 1)  # every so many layers one has experts
    mlp_only_layers: list | None = key(LAYERS, None)  # and these have none


@dataclass(frozen=True)
class Rope:
    """The keys of a RoPE block; `ROPE_TYPES` says which of them a type needs."""

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


def open_source(path: Path) -> TensorSource:
    """Open a checkpoint's tensors and config. Raises: ValueError when it is missing, broken or not supported."""
    if is_gguf(path):
        from hf.gguf import GgufFile

        return GgufFile(path)
    files = WeightFiles(path)
    if foreign_quantization(files.config) is None:
        return files
    from hf.quantized import QuantizedFiles

    return QuantizedFiles(files)


def read_raw(path: Path) -> dict:
    """The content of a checkpoint's config.json, as the `config` of `open_source`. Raises: as that."""
    if is_gguf(path):
        return open_source(path).config
    raw = read_json(path / "config.json")
    if foreign_quantization(raw) is None:
        return raw
    from hf.quantized import as_ours

    return as_ours(raw, path)


def read_config(path: Path, raw: dict | None = None) -> ModelConfig:
    """Read a checkpoint's config.json, and from `generation_config.json` further end-of-sequence ids.

    raw: the content of config.json, where it was read or made already
    Raises: ValueError for a missing directory, broken JSON, an unknown architecture or RoPE type, a bad value.
    """
    raw, generation = raw or read_raw(path), path / "generation_config.json"
    extra_eos = None
    if generation.exists():
        ends = read_json(generation)
        with naming(generation):
            extra_eos = read_fields(ends, Generation).eos_token_id
    with naming(path if is_gguf(path) else path / "config.json"):
        named = read_fields(raw, Named)
        name = (named.architectures or [named.model_type])[0]
        if name in ARCHITECTURES:
            return config_from(raw, name, extra_eos)
    raise ValueError(
        f"{path}: architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def config_from(
    raw: dict, architecture: str, extra_eos: int | list[int] | None = None
) -> ModelConfig:
    """Translate Hugging Face's keys into ours. Raises: ValueError for a missing key or a bad value."""
    said = read_fields(raw, Said)
    heads, kv_heads = said.num_attention_heads, said.num_key_value_heads or said.num_attention_heads
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
        )
    if said.head_dim is None and said.hidden_size % heads:
        rule = f"hidden_size must be a multiple of num_attention_heads, {heads}, where there is no head_dim"
        raise ValueError(f"{rule}; it is {said.hidden_size}")
    head_dim = said.head_dim or said.hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, since RoPE turns pairs; it is {head_dim}")
    qkv_bias, o_bias = ARCHITECTURES[architecture]
    theta, scaling = rope_parameters(said)
    qwen = architecture.startswith("Qwen")
    window = (
        said.sliding_window
        if (not qwen if said.use_sliding_window is None else said.use_sliding_window)
        else None
    )
    longest = said.max_position_embeddings
    if (
        scaling and scaling["rope_type"] == "yarn"
    ):  # it is set on models whose other keys still say the original
        longest = min(
            max(longest, int(scaling["factor"] * scaling["original_max_position_embeddings"])),
            2**31 - 1,
        )
    return ModelConfig(
        dim=said.hidden_size,
        n_layers=said.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=said.intermediate_size,
        vocab_size=said.vocab_size,
        norm_eps=said.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        max_context=min(longest, window or longest),
        qkv_bias=said.attention_bias if qkv_bias is None else qkv_bias,
        o_bias=said.attention_bias if o_bias is None else o_bias,
        mlp_bias=said.mlp_bias,
        qk_norm=architecture.startswith("Qwen3"),
        tie_embeddings=said.tie_word_embeddings,
        bos_id=None if said.bos_token_id == -1 else said.bos_token_id,
        eos_ids=_ids(said.eos_token_id, extra_eos),
        dtype=(said.torch_dtype or said.dtype).removeprefix("torch."),
        stand_in=said.stand_in,
        **mixture_of(raw, architecture),
    )


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids = [i for v in values if v is not None for i in (v if isinstance(v, list) else [v])]
    return tuple(dict.fromkeys(ids))


def mixture_of(raw: dict, architecture: str) -> dict:
    """Read the keys of a mixture of experts, as fields of `ModelConfig`; none where no layer has experts.

    hf/weights.py checks the number of experts against the weights. The weights do not show how many process a token.
    Raises: ValueError for impossible numbers or a missing key.
    """
    if architecture == "MixtralForCausalLM":
        said = read_fields(raw, Experts)
        return _counts("num_local_experts", said.num_local_experts, said.num_experts_per_tok)
    if architecture != "Qwen3MoeForCausalLM":
        return {}
    said, layers, name = read_fields(raw, QwenExperts), raw["num_hidden_layers"], "num_experts"
    if said.num_experts is None:
        name = "num_local_experts"
    if getattr(said, name) is None:
        raise ValueError("the key 'num_experts' is missing")
    without = set(said.mlp_only_layers or ())
    if max(without, default=0) >= layers:
        raise ValueError(
            f"mlp_only_layers must be below num_hidden_layers ({layers}); one is {max(without)}"
        )
    dense = tuple(i for i in range(layers) if i in without or (i + 1) % said.decoder_sparse_step)
    mixture = _counts(name, getattr(said, name), said.num_experts_per_tok) | {
        "expert_dim": said.moe_intermediate_size,
        "norm_topk": said.norm_topk_prob,
        "dense_layers": dense,
        "expert_names": "qwen",
    }
    return mixture if len(dense) < layers else {}


def _counts(name: str, experts: int, chosen: int) -> dict:
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok must be 1 to {name} ({experts}); it is {chosen}")
    return {"n_experts": experts, "experts_per_token": chosen}


def rope_parameters(said: Said) -> tuple[float, dict | None]:
    """Read the base and the scaling of RoPE: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Returns: (theta, the scaling's keys with a checked `rope_type`, or None without scaling).
    Raises: ValueError for an unknown type, a key that the type needs, or a bad value.
    """
    rope = read_fields(said.rope_parameters or said.rope_scaling or {}, Rope)
    kind = rope.rope_type or rope.type
    if kind not in ROPE_TYPES:
        raise NotSupported(f"RoPE scaling must be one of {', '.join(ROPE_TYPES)}; it is {kind}")
    scaling = {name: getattr(rope, name) for name in ROPE_TYPES[kind]}
    missing = next((name for name, value in scaling.items() if value is None), None)
    if missing:
        raise ValueError(f"RoPE scaling of the type {kind} needs the key {missing!r}")
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError(
            f"low_freq_factor must be below high_freq_factor; they are {list(scaling.values())[1:3]}"
        )
    theta = float(rope.rope_theta or said.rope_theta or 10000.0)
    if kind == "yarn":
        scaling |= _yarn(rope, theta, said.max_position_embeddings)
    return theta, {"rope_type": kind, **scaling} if scaling else None


def _yarn(rope: Rope, theta: float, longest: int) -> dict:
    """The further keys of YaRN, with transformers' defaults. longest: max_position_embeddings

    Raises: ValueError for values that contradict each other. Source: YaRN (arXiv 2309.00071), 3.2 and 3.4.
    """
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    if theta <= 1:
        raise ValueError(
            f"rope_theta must be above 1 for RoPE scaling of the type yarn; it is {theta}"
        )
    if not 1e-6 <= slow <= fast:
        raise ValueError(f"beta_slow must be 1e-6 to beta_fast ({fast}); it is {slow}")

    def grown(by: float) -> float:  # with the logarithm of the context
        return 0.1 * by * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    both = rope.mscale and rope.mscale_all_dim
    derived = grown(rope.mscale) / grown(rope.mscale_all_dim) if both else grown(1)
    return {
        "original_max_position_embeddings": rope.original_max_position_embeddings or longest,
        "attention_factor": float(rope.attention_factor or derived),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": rope.truncate,
    }


# ---------------------------------------------------------------------------------------- beside a target


def resolve_draft(config: GenerateConfig, path: Path) -> GenerateConfig:
    """Fill in `draft` and `eagle`: a head next to the target is used unless told otherwise."""
    whole = path.resolve() if path.name in ("", "..") else path
    bundled = whole.with_name((whole.stem if is_gguf(path) else whole.name) + "-eagle")
    takes_head = config.draft in ("", "eagle", "eagle+ngram")
    eagle = config.eagle or (str(bundled) if bundled.is_dir() and takes_head else "")
    draft = config.draft or ("eagle" if eagle else "none")
    if draft.startswith("eagle") and not eagle:
        raise ValueError(
            f"--draft {draft} needs a head; name its directory with --eagle (there is no {bundled})"
        )
    if draft == "none":
        replace(config, draft="none").check_needs()
    eagle = eagle if draft.startswith("eagle") else ""
    if is_gguf(Path(eagle)):
        raise ValueError(
            f"--eagle {eagle} is a GGUF file; a head is a directory with its config.json"
        )
    reads = eagle or config.draft_checkpoint  # what a draft loads
    config = replace(config, draft=draft, eagle=eagle)
    return replace(config, quant_draft=_draft_format(config, Path(reads)) if reads else "none")


def _draft_format(config: GenerateConfig, path: Path) -> str:
    """What `--quant_draft` comes to: the format of the draft's files, or what is asked for, or as the target."""
    raw = read_raw(path)
    saved = saved_quantization(raw)
    if saved is None:
        small = bool(config.eagle) and config.quant == "none"
        return config.quant_draft or (_small_format(config, raw) if small else config.quant)
    if config.quant_draft not in ("", saved.format):
        raise ValueError(f"{path} is quantized already ({saved.format}); drop --quant_draft")
    return saved.format


def _small_format(config: GenerateConfig, raw: dict) -> str:
    """The format of a head whose target is not quantized: it changes no output, and reading it is most of its time."""
    if "float32" in str(config.dtype or raw.get("torch_dtype") or raw.get("dtype")):
        return "none"
    if not config.device.startswith("cuda"):
        return "int8" if has_cpu_operators() else "none"  # which is slow in Python
    layer = raw.get("transformer_layer_config")  # speculators' layout of a head
    sizes = [
        (layer if isinstance(layer, dict) else raw).get(key)
        for key in ("hidden_size", "intermediate_size")
    ]
    return "int4" if all(isinstance(size, int) and size % 32 == 0 for size in sizes) else "none"
