"""Read a checkpoint's `config.json` as a `ModelConfig`, and find the draft of a target.

A checkpoint is a Hugging Face directory or a GGUF file; `open_source` and `read_raw` take both.
The dataclasses here declare each key that is read, with its type, range and default
(`read_fields`). An unknown architecture, activation or RoPE type is an error, not a guess.
Not here: how the files hold quantized weights (quantize.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cli.io import bundled_head, is_gguf, log_note, read_json
from cli.methods import HEAD_KINDS
from hf.checkpoint import (
    BLOCKS,
    TensorSource,
    WeightFiles,
    foreign_quantization,
    read_model_config,
    saved_quantization,
    scale_name,
)
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
from hf.gguf_blocks import keeps_blocks
from hf.head_kinds import gguf_head_kind, head_kind
from model import ModelConfig
from ops.library import has_cpu_operators
from options import GenerateConfig

# architecture -> (bias of q, k and v; bias of o); None: as the key `attention_bias` has it
ARCHITECTURES = {
    "LlamaForCausalLM": (None, None),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (None, None),
    "Qwen3MoeForCausalLM": (None, None),
    "MixtralForCausalLM": (False, False),
}
# `model_type` -> the architecture, where config.json names none, or that of the layers alone
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
ROPE_TYPES = {  # type of RoPE scaling -> the keys that it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),  # `_yarn` fills in the others
}
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LONGEST_CONTEXT = 2**31 - 1

WIDTH = integer(1, 2**20)
POSITIONS = integer(1, LONGEST_CONTEXT)
EXPERTS = integer(1, 2**12)
LAYERS = Rule(
    "a list of layers, whole numbers from 0 on",
    lambda v: type(v) is list and all(map(integer(0, 2**20).holds, v)),
)


@dataclass(frozen=True)
class HFArchitecture:
    """The keys of config.json that name the kind of model."""

    architectures: list | None = key(NAMES, None)
    model_type: str = key(TEXT, "unknown")


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
    hidden_act: str = key(only("silu", "swish"), "silu")  # one function
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
    stand_in: str = key(TEXT, "")


@dataclass(frozen=True)
class HFGenerationConfig:
    """The keys of generation_config.json that are read."""

    eos_token_id: int | list | None = key(TOKEN_IDS, None)


@dataclass(frozen=True)
class HFMixtralExperts:
    """The further keys of a Mixtral's config.json."""

    num_local_experts: int = key(EXPERTS)
    num_experts_per_tok: int = key(EXPERTS)


@dataclass(frozen=True)
class HFQwenExperts:
    """The further keys of a Qwen3-MoE's config.json."""

    moe_intermediate_size: int = key(WIDTH)
    num_experts_per_tok: int = key(EXPERTS)
    num_experts: int | None = key(EXPERTS, None)
    num_local_experts: int | None = key(EXPERTS, None)  # the same as transformers 5 writes it
    norm_topk_prob: bool = key(FLAG, False)
    decoder_sparse_step: int = key(WIDTH, 1)  # every so many layers one has experts
    mlp_only_layers: list | None = key(LAYERS, None)  # layers without experts besides


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


def open_source(path: Path) -> TensorSource:
    """Open a checkpoint's tensors and config.

    Raises: ValueError when the checkpoint is missing, broken or not supported.
    """
    if is_gguf(path):
        if gguf_head_kind(path):
            from hf.gguf_heads import GgufHead

            return GgufHead(path)
        from hf.gguf import GgufFile

        return GgufFile(path)
    files = open_files(path)
    if foreign_quantization(files.config) is None:
        return files
    from hf.gptq_awq import QuantizedFiles

    return QuantizedFiles(files)


def open_files(path: Path) -> WeightFiles:
    """Open the files of a model's directory, by the names that a whole model has.

    The layers saved alone have no prefix. A tied model may hold its one matrix as the LM head
    only; two that differ are both used, as in transformers 5.
    """
    files = WeightFiles(path)
    readers = files.readers
    is_head = "fc.weight" in readers  # a draft head's names have no prefix
    if EMBEDDING.removeprefix("model.") in readers and not is_head:
        readers = {
            name if name.startswith("lm_head.") else f"model.{name}": read
            for name, read in readers.items()
        }
    if files.config.get("tie_word_embeddings") and LM_HEAD in readers:
        if EMBEDDING not in readers:
            readers[EMBEDDING] = readers.pop(LM_HEAD)
        elif scale_name(LM_HEAD) not in readers and not _same(
            readers[EMBEDDING](), readers[LM_HEAD]()
        ):
            differ = "tie_word_embeddings is true, and lm_head.weight is not the embedding"
            log_note(f"{path}: {differ}: both are used")
            files.config["tie_word_embeddings"] = False
    files.readers = readers
    return files


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def read_raw(path: Path) -> dict:
    """Read the content of a checkpoint's config.json, as the `config` of `open_source`.

    Raises: as `open_source`.
    """
    if is_gguf(path):
        return open_source(path).config
    raw = read_model_config(path)
    if foreign_quantization(raw) is None:
        return raw
    from hf.quant_config import as_ours

    return as_ours(raw, path)


def read_config(path: Path, raw: dict | None = None) -> ModelConfig:
    """Read a checkpoint's config.json, and further EOS ids from `generation_config.json`.

    raw: the content of config.json, where it was read or made already
    Raises: ValueError for a missing directory, broken JSON, an unknown architecture or RoPE type,
    a bad value.
    """
    raw = raw or read_raw(path)
    generation_file = path / "generation_config.json"
    extra_eos = None
    if generation_file.exists():
        generation = read_json(generation_file)
        with naming(generation_file):
            extra_eos = read_fields(generation, HFGenerationConfig).eos_token_id
    file = path
    if not is_gguf(path):
        file = path / "config.json"
    with naming(file):
        kind = read_fields(raw, HFArchitecture)
        own = MODEL_TYPES.get(kind.model_type, kind.model_type)
        name = (kind.architectures or [own])[0]
        if name == own.replace("ForCausalLM", "Model"):
            name = own
        if name in ARCHITECTURES:
            return config_from(raw, name, extra_eos)
    raise ValueError(
        f"{path}: architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def config_from(
    raw: dict, architecture: str, extra_eos: int | list[int] | None = None
) -> ModelConfig:
    """Translate Hugging Face's keys into ours.

    Raises: ValueError for a missing key or a bad value.
    """
    hf = read_fields(raw, HFConfig)
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = _head_dim(hf, kv_heads)
    theta, scaling = rope_parameters(hf)
    qkv_bias, o_bias = ARCHITECTURES[architecture]
    if qkv_bias is None:
        qkv_bias = hf.attention_bias
    if o_bias is None:
        o_bias = hf.attention_bias
    return ModelConfig(
        dim=hf.hidden_size,
        n_layers=hf.num_hidden_layers,
        n_heads=hf.num_attention_heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        norm_eps=hf.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        max_context=_max_context(hf, scaling, qwen=architecture.startswith("Qwen")),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=hf.mlp_bias,
        qk_norm=architecture.startswith("Qwen3"),
        tie_embeddings=hf.tie_word_embeddings,
        bos_id=None if hf.bos_token_id == -1 else hf.bos_token_id,
        eos_ids=_ids(hf.eos_token_id, extra_eos),
        dtype=(hf.torch_dtype or hf.dtype).removeprefix("torch."),
        stand_in=hf.stand_in,
        **mixture_of(raw, architecture),
    )


def _head_dim(hf: HFConfig, kv_heads: int) -> int:
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


def _max_context(hf: HFConfig, scaling: dict | None, qwen: bool) -> int:
    """Return the longest context, by the positions, YaRN's factor and the sliding window."""
    longest = hf.max_position_embeddings
    if scaling and scaling["rope_type"] == "yarn":
        # YaRN is set on models whose other keys still hold the original context
        extended = int(scaling["factor"] * scaling["original_max_position_embeddings"])
        longest = min(max(longest, extended), LONGEST_CONTEXT)
    uses_window = hf.use_sliding_window
    if uses_window is None:
        uses_window = not qwen
    if uses_window and hf.sliding_window:
        return min(longest, hf.sliding_window)
    return longest


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Return all ids in the values, each once."""
    ids = []
    for value in values:
        if isinstance(value, list):
            ids += value
        elif value is not None:
            ids.append(value)
    return tuple(dict.fromkeys(i for i in ids if i != -1))


def mixture_of(raw: dict, architecture: str) -> dict:
    """Read the keys of a mixture of experts, as fields of `ModelConfig`.

    hf/weights.py checks the number of experts against the weights. The weights do not show how
    many experts process a token.

    Returns: no fields where no layer has experts.
    Raises: ValueError for impossible numbers or a missing key.
    """
    if architecture == "MixtralForCausalLM":
        hf = read_fields(raw, HFMixtralExperts)
        return _counts("num_local_experts", hf.num_local_experts, hf.num_experts_per_tok)
    if architecture != "Qwen3MoeForCausalLM":
        return {}
    hf = read_fields(raw, HFQwenExperts)
    layers = raw["num_hidden_layers"]
    name = "num_experts"
    if hf.num_experts is None:
        name = "num_local_experts"
    experts = getattr(hf, name)
    if experts is None:
        raise ValueError("the key 'num_experts' is missing")
    without = set(hf.mlp_only_layers or ())
    if max(without, default=0) >= layers:
        raise ValueError(
            f"mlp_only_layers must be below num_hidden_layers ({layers}); one is {max(without)}"
        )
    dense = tuple(i for i in range(layers) if i in without or (i + 1) % hf.decoder_sparse_step)
    counts = _counts(name, experts, hf.num_experts_per_tok)
    if len(dense) == layers:
        return {}
    return counts | {
        "expert_dim": hf.moe_intermediate_size,
        "norm_topk": hf.norm_topk_prob,
        "dense_layers": dense,
        "expert_names": "qwen",
    }


def _counts(name: str, experts: int, chosen: int) -> dict:
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok must be 1 to {name} ({experts}); it is {chosen}")
    return {"n_experts": experts, "experts_per_token": chosen}


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


# ------------------------------------------------------------------------------ beside a target


def resolve_draft(
    config: GenerateConfig, path: Path, dtype: str = "", without_head: str = "none"
) -> GenerateConfig:
    """Fill in the draft (a head next to the target is the default), its format, and `dtype`.

    config: `dtype` as the user gave it, `quant` as the target was loaded
    dtype: of the target as it was loaded; default: as `config` has it
    without_head: the draft where none is asked for, and there is no head
    """
    head = _head_of(config, path)
    draft = config.draft
    if not draft:
        draft = head_kind(Path(head)) if head else without_head
        if not head:
            replace(config, draft=draft).check_needs()
    config = replace(config, draft=draft, head=head)
    draft_path = Path(head or config.draft_checkpoint)
    resolved = replace(config, dtype=dtype or config.dtype, quant_draft="none")
    if not (head or config.draft_checkpoint):
        return resolved
    asked = replace(resolved, quant_draft=config.quant_draft)
    in_blocks = keeps_blocks(config, draft_path) and open_source(draft_path).block_types != ""
    if head and config.device.startswith("cuda"):
        in_blocks = False  # the products of blocks run on a CPU
    form = _draft_format(asked, draft_path, in_blocks)
    return replace(resolved, quant_draft=BLOCKS if form == "none" and in_blocks else form)


def _head_of(config: GenerateConfig, path: Path) -> str:
    """Return the files of the head that drafts: as given, or the bundled one; "": none.

    Raises: ValueError for a kind of draft whose head is missing, or of another kind.
    """
    kind = config.draft.removesuffix("+ngram") or "eagle"
    if kind not in HEAD_KINDS:
        return ""
    head = config.head
    bundled = bundled_head(path, kind)
    if not head and bundled.is_dir():
        head = str(bundled)
    if not config.draft:
        return head
    if not head:
        raise ValueError(
            f"--draft {config.draft} needs a head; name its directory with --head "
            f"(there is no {bundled})"
        )
    found = head_kind(Path(head))
    if found != kind:
        raise ValueError(
            f"--draft {config.draft} needs a head of its own kind, and {head} holds one of the "
            f"kind {found}; name another --head, or drop --draft"
        )
    return head


def _draft_format(config: GenerateConfig, path: Path, in_blocks: bool) -> str:
    """Return the draft's number format: of its files, or of `quant_draft`, or the target's.

    in_blocks: its file is a GGUF file whose blocks can stay
    """
    raw = read_raw(path)
    saved = saved_quantization(raw)
    asked = config.quant_draft
    if saved is not None:
        if asked not in ("", saved.format) and not config.draft.startswith("eagle"):
            raise ValueError(f"{path} is quantized already ({saved.format}); drop quant_draft")
        return asked or saved.format
    if asked:
        return asked
    if config.head and in_blocks:
        return "none"
    if config.quant not in ("none", BLOCKS):
        return config.quant
    # a draft model in a GGUF file keeps the file's bits; on CUDA none was measured in int4
    small = config.head or not (is_gguf(path) or config.device.startswith("cuda"))
    return _small_format(config, raw) if small else "none"


def _small_format(config: GenerateConfig, raw: dict) -> str:
    """Return the format of a head or draft model whose target is not quantized.

    The draft's format changes no output, and reading the draft is most of its time.
    """
    if "float32" in str(config.dtype or raw.get("torch_dtype") or raw.get("dtype")):
        return "none"
    if not config.device.startswith("cuda"):
        if has_cpu_operators("products"):
            return "int8"
        return "none"  # int8 is slow in Python
    layer = raw.get("transformer_layer_config")  # speculators' layout of a head
    if not isinstance(layer, dict):
        layer = raw
    sizes = [layer.get(name) for name in ("hidden_size", "intermediate_size")]
    if all(isinstance(size, int) and size % 32 == 0 for size in sizes):
        return "int4"
    return "none"
