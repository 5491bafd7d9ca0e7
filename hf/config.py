"""What checkpoints say: `config.json` as a `ModelConfig`, and which draft goes with a target.

A checkpoint is a Hugging Face directory or a GGUF file; `open_source` and `read_raw` take both.
An unknown architecture, activation or RoPE type is an error, not a guess.
Not here: how the files hold quantized weights (quantize.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint import TensorSource, WeightFiles, is_gguf, read_json
from model import ModelConfig
from options import GenerateConfig
from quantize import saved_quantization

# architecture -> whether q, k and v have a bias, and whether o has one; None: as the key `attention_bias` says
ARCHITECTURES = {
    "LlamaForCausalLM": (None, None),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "MixtralForCausalLM": (False, False),
}
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
ROPE_TYPES = {  # type of RoPE scaling -> the keys that it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def open_source(path: Path) -> TensorSource:
    """Open a checkpoint's tensors and config. Raises: ValueError when it is missing, broken or not supported."""
    if not is_gguf(path):
        return WeightFiles(path)
    from hf.gguf import GgufFile

    return GgufFile(path)


def read_raw(path: Path) -> dict:
    """The content of a checkpoint's config.json. Raises: as `open_source`."""
    return open_source(path).config if is_gguf(path) else read_json(path / "config.json")


def read_config(path: Path, raw: dict | None = None) -> ModelConfig:
    """Read a checkpoint's config.json, and from `generation_config.json` further end-of-sequence ids.

    raw: the content of config.json, where it was read or made already
    Raises: ValueError for a missing directory, broken JSON, an unknown architecture or RoPE type, a bad value.
    """
    raw = raw or read_raw(path)
    names = raw.get("architectures") or [raw.get("model_type", "unknown")]
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}")
    generation = path / "generation_config.json"
    extra_eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    where, remedy = (path, "use another file") if is_gguf(path) else (path / "config.json", "correct it")
    try:
        return config_from(raw, names[0], extra_eos)
    except KeyError as missing:
        raise ValueError(f"{where}: the key {missing} is missing") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {remedy}") from None


def config_from(raw: dict, architecture: str, extra_eos: int | list[int] | None = None) -> ModelConfig:
    """Translate Hugging Face's keys into ours. Raises: KeyError for a missing key, ValueError for a bad value."""
    for key in SIZES:
        value = raw.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{key} must be a positive whole number; it is {value!r}")
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be silu (SwiGLU); it is {raw['hidden_act']}")
    qkv_bias, o_bias = ARCHITECTURES[architecture]
    bias = bool(raw.get("attention_bias", False))
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    positions = raw.get("max_position_embeddings", 2048)
    theta, scaling = rope_parameters(raw)
    experts, chosen = expert_counts(raw) if architecture == "MixtralForCausalLM" else (0, 0)
    return ModelConfig(
        dim=raw["hidden_size"],
        n_layers=raw["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_context=min(positions, window) if window else positions,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        o_bias=bias if o_bias is None else o_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        n_experts=experts,
        experts_per_token=chosen,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_id=raw.get("bos_token_id"),
        eos_ids=_ids(raw.get("eos_token_id"), extra_eos),
        dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "float32").removeprefix("torch."),
        stand_in=str(raw.get("stand_in", "")),
    )


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids = [i for v in values if v is not None for i in (v if isinstance(v, list) else [v])]
    return tuple(dict.fromkeys(ids))


def expert_counts(raw: dict) -> tuple[int, int]:
    """Read how many experts a layer has, and how many of them process a token.

    hf/weights.py checks the first number against the weights. The weights do not show the second.
    Raises: ValueError for impossible numbers, KeyError for a missing key.
    """
    experts, chosen = raw["num_local_experts"], raw["num_experts_per_tok"]
    for name, value in (("num_local_experts", experts), ("num_experts_per_tok", chosen)):
        if type(value) is not int:
            raise ValueError(f"{name} must be a whole number; it is {value!r}")
    if not 1 <= chosen <= experts:
        raise ValueError(f"num_experts_per_tok must be 1 to num_local_experts ({experts}); it is {chosen}")
    return experts, chosen


def rope_parameters(raw: dict) -> tuple[float, dict | None]:
    """Read the base and the scaling of RoPE: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Returns: (theta, the scaling's keys with a checked `rope_type`, or None without scaling).
    Raises: ValueError for an unknown type, KeyError for a key that the type needs.
    """
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(params, dict):
        raise ValueError(f"RoPE scaling must be an object with its type; it is {params!r}")
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"RoPE scaling must be one of {', '.join(ROPE_TYPES)}; it is {kind}")
    theta = float(params.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    scaling = {key: params[key] for key in ROPE_TYPES[kind]}
    return theta, {"rope_type": kind, **scaling} if scaling else None


# ---------------------------------------------------------------------------------------- beside a target


def resolve_draft(config: GenerateConfig, path: Path) -> GenerateConfig:
    """Fill in `draft` and `eagle`: a head next to the target is used unless told otherwise."""
    whole = path.resolve() if path.name in ("", "..") else path
    bundled = whole.with_name((whole.stem if is_gguf(path) else whole.name) + "-eagle")
    takes_head = config.draft in ("", "eagle", "eagle+ngram")
    eagle = config.eagle or (str(bundled) if bundled.is_dir() and takes_head else "")
    draft = config.draft or ("eagle" if eagle else "none")
    if draft.startswith("eagle") and not eagle:
        raise ValueError(f"--draft {draft} needs a head; name its directory with --eagle (there is no {bundled})")
    if draft == "none":
        replace(config, draft="none").check_needs()
    eagle = eagle if draft.startswith("eagle") else ""
    if is_gguf(Path(eagle)):
        raise ValueError(f"--eagle {eagle} is a GGUF file; a head is a directory with its config.json")
    reads = eagle or config.draft_checkpoint  # what a draft loads
    config = replace(config, draft=draft, eagle=eagle)
    return replace(config, quant_draft=_draft_format(config, Path(reads)) if reads else "none")


def _draft_format(config: GenerateConfig, path: Path) -> str:
    """What `--quant_draft` comes to: the format of the draft's files, or what is asked for, or as the target."""
    raw = read_raw(path)
    saved = saved_quantization(raw)
    if saved is None:
        # a head changes no output, and reading its weights is most of its time on a GPU
        halves = config.device.startswith("cuda") and config.dtype != "float32" and bool(config.eagle)
        fits = all(isinstance(raw.get(key), int) and raw[key] % 32 == 0 for key in ("hidden_size", "intermediate_size"))
        own = "int4" if config.quant == "none" and halves and fits else config.quant
        return config.quant_draft or own
    if config.quant_draft not in ("", saved.format):
        raise ValueError(f"{path} is quantized already ({saved.format}); drop --quant_draft")
    return saved.format
