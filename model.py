"""LLaMA and Mixtral with a static key-value cache: config, names of weights, forward pass.

1. A layer is a list of steps (`ModelConfig.layer`; steps.py). Other architectures are files in
   models/, which override that list and the hooks beside it.
2. `Transformer.forward` turns tokens into features (the hidden state after the final norm).
   `Transformer.logits` applies the LM head to the features that need it.
3. The steps' PyTorch is what runs with --plain. Else a backend may have a program for passes over a
   cache (`Backend.model_program`): one call of C++ on a CPU, merged steps on CUDA.
4. RoPE uses the Hugging Face half-rotation, so weights load without a permutation. Its angles are
   computed per call, once for all layers, so that positions are unlimited.

Not here: reading weights, number formats (quantize.py), operators, drafting, sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kv_cache import KVCache, Window
from options import load_part, require
from quantize import Linear
from reference import TORCH, Backend
from runtime import replace_fields
from steps import (
    Add,
    Attend,
    Gate,
    Merge,
    Norm,
    Project,
    Rotate,
    Route,
    Rows,
    Step,
    add_modules,
    parameters_of,
    run_steps,
    to_stream_dtype,
)

# the modules of a layer -> Hugging Face's, of which a module's rows are made, in their order; those
# of experts are Mixtral's, and {} is the number of an expert
NAMES = {
    "attention_norm": ("input_layernorm",),
    "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "wo": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "w13": ("mlp.gate_proj", "mlp.up_proj"),
    "w2": ("mlp.down_proj",),
    "router": ("block_sparse_moe.gate",),
    "experts.w13": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "experts.w2": ("block_sparse_moe.experts.{}.w2",),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """The settings in `config.json`, under our names. Field comments give the Hugging Face key.

    Architectures with more settings are subclasses (models/), and so are hooks without a field.
    """

    dim: int  # hidden_size
    n_layers: int  # num_hidden_layers
    n_heads: int  # num_attention_heads
    n_kv_heads: int  # num_key_value_heads
    head_dim: int  # head_dim, default hidden_size / num_attention_heads
    ffn_dim: int  # intermediate_size
    vocab_size: int
    norm_eps: float = 1e-5  # rms_norm_eps
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # {"rope_type": a key of `SCALINGS`, ...}
    max_context: int = 2048  # max_position_embeddings, at most the sliding window
    qkv_bias: bool = False  # attention_bias
    o_bias: bool = False  # the same
    mlp_bias: bool = False
    n_experts: int = 0  # num_local_experts; 0: a dense model
    experts_per_token: int = 0  # num_experts_per_tok
    tie_embeddings: bool = False  # tie_word_embeddings
    eos_ids: tuple[int, ...] = ()  # one or several ids end a sequence
    dtype: str = "float32"  # torch_dtype: the dtype that the weights are stored in

    names = NAMES  # of a layer's modules in files
    windows = ()  # the sliding windows of layers (tokens), besides 0, which is none
    embedding_scale = 1.0  # the factor of embeddings
    logit_cap = 0.0  # the bound of logits, which they approach as a tanh does; 0: none
    state_shapes = None  # of recurrent layers (models/states.py)
    mtp = None  # the MTP layer that checkpoints of this kind may hold (files/mtp.py)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of the layers; `Rotate.rope` counts them."""
        return (Rope(self.head_dim, self.rope_theta, self.rope_scaling),)

    def ignores(self, name: str) -> bool:
        """Return whether files hold a tensor that no layer reads."""
        return False

    def kv_shape(self, i: int) -> tuple[int, int]:
        """Return the heads of keys and values of layer i, none if it is recurrent; their width."""
        return self.n_kv_heads, self.head_dim

    def kv_source(self, i: int) -> int:
        """Return the layer whose keys and values layer i reads."""
        return i

    def has_experts(self, i: int) -> bool:
        """Return whether the feed-forward of layer i is a mixture of experts."""
        return self.n_experts > 0

    def first(self) -> tuple[Step, ...]:
        """Return the steps before the layers, which leave `stream` as it is."""
        return ()

    def layer(self, i: int) -> tuple[Step, ...]:
        """Return the steps of layer i: a pre-norm block with grouped-query attention."""
        return (
            Norm("attention_norm", self.dim, self.norm_eps),
            *self.attention(),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            *(self.mixture() if self.has_experts(i) else self.feed_forward()),
            Add(),
        )

    def attention(self) -> tuple[Step, ...]:
        """Return the steps of attention, over fused projections of queries, keys and values."""
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        return (
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            Rotate(self.n_heads, self.n_kv_heads, self.head_dim),
            Attend(),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
        )

    def feed_forward(self) -> tuple[Step, ...]:
        """Return the steps of SwiGLU, with gate above up in one weight."""
        return (
            Project("w13", self.dim, 2 * self.ffn_dim, self.mlp_bias),
            Gate(),
            Project("w2", self.ffn_dim, self.dim, self.mlp_bias, row_parallel=True),
        )

    def mixture(self) -> tuple[Step, ...]:
        """Return the steps of SwiGLU by the best experts of each token."""
        count = self.n_experts
        return (
            Route(self.dim, count, self.experts_per_token),
            Project("w13", self.dim, 2 * self.ffn_dim, experts=count),
            Gate(),
            Project("w2", self.ffn_dim, self.dim, experts=count, row_parallel=True),
            Merge(),
        )

    def last(self) -> tuple[Step, ...]:
        """Return the steps behind the layers."""
        return (Norm("norm", self.dim, self.norm_eps),)


# ------------------------------------------------------------------------------------- config.json

PLAIN = ("LlamaForCausalLM", "MixtralForCausalLM")
# keys -> fields of `ModelConfig`
KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_context",
    "mlp_bias": "mlp_bias",
    "num_local_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "tie_word_embeddings": "tie_embeddings",
}
REQUIRED = list(KEYS)[:5]
ROPE_KEYS = {  # a type of RoPE scaling -> the keys that it needs
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(raw: dict) -> ModelConfig:
    """Translate the config.json of a LLaMA or Mixtral.

    Raises: ValueError for another architecture, a missing key, or another activation or RoPE.
    """
    name = (raw.get("architectures") or PLAIN)[0]
    remedy = "use a LLaMA or Mixtral, or restore the folders models/ and files/"
    require(name in PLAIN, f"the architecture must be one of {PLAIN}; it is {name}: {remedy}")
    act = raw.get("hidden_act", "silu")
    require(act == "silu", f"hidden_act must be silu; it is {act}: use another checkpoint")
    missing = [key for key in REQUIRED if raw.get(key) is None]
    require(not missing, f"config.json lacks the keys {', '.join(missing)}; add them")
    fields = {"norm_eps": 1e-6, "n_kv_heads": raw["num_attention_heads"]}
    fields["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    fields |= {ours: raw[key] for key, ours in KEYS.items() if raw.get(key) is not None}
    if raw.get("sliding_window"):
        longest = fields.get("max_context", ModelConfig.max_context)
        fields["max_context"] = min(longest, raw["sliding_window"])
    eos = raw.get("eos_token_id")
    theta, scaling = read_rope(raw)
    return ModelConfig(
        **fields,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=raw.get("attention_bias", False),
        o_bias=raw.get("attention_bias", False),
        eos_ids=tuple(eos) if isinstance(eos, list) else (eos,) * (eos is not None),
        dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "float32").removeprefix("torch."),
    )


def read_rope(raw: dict) -> tuple[float, dict | None]:
    """Read RoPE's base and scaling. Raises: ValueError for a type that is none of `SCALINGS`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    known = f"one of default, {', '.join(ROPE_KEYS)}"
    remedy = "use another checkpoint, or restore the folder files/"
    require(kind in ROPE_KEYS, f"the RoPE type must be {known}; it is {kind}: {remedy}")
    missing = [name for name in ROPE_KEYS[kind] if rope.get(name) is None]
    require(not missing, f"RoPE scaling {kind} needs the keys {', '.join(missing)}; add them")
    return theta, {"rope_type": kind} | {name: rope[name] for name in ROPE_KEYS[kind]}


def weight_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return our parameter's name -> the Hugging Face tensors of its rows, in their order."""
    names = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    } | layer_names("", "model.", config.first(), config.names)
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.n_layers):
        names |= layer_names(f"layers.{i}.", f"model.layers.{i}.", config.layer(i), config.names)
    return names


def layer_names(
    ours: str, theirs: str, steps: Iterable[Step], official: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return `weight_names` of one layer.

    ours, theirs: the prefixes of the names; steps: the layer's; official: `ModelConfig.names`
    """
    names = {}
    for step in steps:
        experts = step.experts if isinstance(step, Project) else 0
        for parameter in parameters_of(step):
            module, _, kind = parameter.rpartition(".")
            parts = official[f"experts.{module}" if experts else module]
            if experts:
                parts = tuple(part.format(e) for e in range(experts) for part in parts)
            names[ours + parameter] = tuple(f"{theirs}{part}.{kind}" for part in parts)
    return names


# -------------------------------------------------------------------------------------------- RoPE


class Rope(NamedTuple):
    """One rotary position embedding."""

    width: int  # of a head, E
    theta: float  # base of the wavelengths
    scaling: dict | None = None  # as `ModelConfig.rope_scaling`


def rope_frequencies(rope: Rope, device: torch.device | str = "cpu") -> Tensor:
    """Return inverse wavelengths, [E/2] fp32 (radians per position), scaled as the rope says.

    Source: RoFormer (arXiv 2104.09864).
    """
    exponent = torch.arange(0, rope.width, 2, device=device).float() / rope.width
    freq = 1.0 / rope.theta**exponent  # [E/2]
    if rope.scaling is None:
        return freq
    kind = rope.scaling["rope_type"]
    scale = SCALINGS[kind] if kind in SCALINGS else load_part("rope", kind)
    return scale(freq, rope)


def scale_linear(freq: Tensor, rope: Rope) -> Tensor:
    """Slow all waves down."""
    return freq / rope.scaling["factor"]


def scale_llama3(freq: Tensor, rope: Rope) -> Tensor:
    """Slow long waves down, as the Llama 3.1 reference code does."""
    scaling = rope.scaling
    low = scaling["low_freq_factor"]
    # rotations within the original context
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
    blend = ((turns - low) / (scaling["high_freq_factor"] - low)).clamp(0, 1)
    # 0: long wave, slowed down; 1: short wave, kept
    return blend * freq + (1 - blend) * freq / scaling["factor"]


SCALINGS = {"linear": scale_linear, "llama3": scale_llama3}


class RotaryEmbeddings(nn.Module):
    """The wavelengths of a model's rotary embeddings. They are computed, and in no file."""

    backend: Backend = TORCH

    def __init__(self, ropes: Sequence[Rope], device: torch.device | str = "cpu"):
        super().__init__()
        # of cosines and sines
        self.factors = [(rope.scaling or {}).get("attention_factor", 1.0) for rope in ropes]
        for i, rope in enumerate(ropes):  # [E/2] fp32
            self.register_buffer(str(i), rope_frequencies(rope, device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return cosines and sines for every embedding, [B, T, 1, E] each. positions: [B, T]"""
        angles = self.backend.rope_angles
        freqs = self.buffers()
        return tuple(angles(freq, positions, by) for freq, by in zip(freqs, self.factors))


# ---------------------------------------------------------------------------------------- the pass


class Layer(nn.Module):
    """The weights of one layer, and its steps."""

    backend: Backend = TORCH  # as the model's

    def __init__(self, steps: Sequence[Step]):
        super().__init__()
        self.steps = tuple(steps)
        add_modules(self, steps)

    def forward(self, rows: Rows) -> Rows:
        """Run the layer. Writes: the cache, `rows.kv`, at the slots of the windows."""
        return run_steps(self.steps, self, rows)


def run_eagerly(part: Callable, *inputs: Any) -> Any:
    """Call a part of a model."""
    return part(*inputs)


def run_layers(
    layers: Sequence[nn.Module],
    rows: Rows,
    cache: KVCache | None = None,
    run_part: Callable = run_eagerly,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Rows, list[Tensor]]:
    """Run layers, or segments (backends/fusions.py), one after the other.

    run_part: the call of a layer. Layers with equal steps have the same shapes, so a compiled call
        compiles once for each kind.
    aux_layers: ascending layers that give aux hidden states: their inputs, the residual stream;
        len(layers) stands for the last layer's output
    Writes: the cache at the slots of `rows.windows`.
    Returns: the rows behind the last layer; the aux hidden states, [B, T, F] each.
    """
    aux = []
    for i, layer in enumerate(layers):
        if i in aux_layers:
            aux.append(rows.stream)
        kv = cache.layer(i) if cache is not None else None
        rows = run_part(layer, replace_fields(rows, kv=kv))
    if len(layers) in aux_layers:
        aux.append(rows.stream)
    return rows, aux


class Transformer(nn.Module):
    """The target model: embedding, layers, final norm, LM head."""

    # runs passes over a cache in place of the layers; None: the steps run
    program: Any = None
    backend: Backend = TORCH  # chosen while loading

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding_scale = config.embedding_scale
        self.windows = config.windows
        self.logit_cap = config.logit_cap
        # zeros until loaded or initialized: normal_ on the meta device would import all of
        # torch.compile (1 s, 70 MB)
        zeros = torch.zeros(config.vocab_size, config.dim)
        self.embedding = nn.Embedding.from_pretrained(zeros, freeze=False)
        self.layers = nn.ModuleList(Layer(config.layer(i)) for i in range(config.n_layers))
        self.first = config.first()
        self.last = config.last()
        add_modules(self, (*self.first, *self.last))
        # scores in fp32: in bf16, the best two would often tie
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False, fp32_out=True)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.ropes = RotaryEmbeddings(config.ropes)

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        positions: Tensor,  # [B, T] int64, RoPE positions
        cache: KVCache | None = None,
        window: Window | None = None,
        run_part: Callable = run_eagerly,
        aux_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """Run the layers over T tokens. Writes: the cache at `window.slots`.

        Returns: features after the final norm, [B, T, F] in the weights' dtype; with aux_layers,
            the aux hidden states of these layers (see `run_layers`) behind them.
        """
        if self.program is not None and cache is not None:
            return self.program(tokens, positions, cache, window, run_part, aux_layers)
        rows = run_part(self.embed, tokens, positions, window)
        rows, aux = run_layers(self.layers, rows, cache, run_part, aux_layers)
        return self.features(run_steps(self.last, self, rows), aux)

    def features(self, rows: Rows, aux: list[Tensor]) -> Tensor:
        """Return the result of a pass: the last rows, and aux hidden states behind them."""
        return torch.cat((rows.h, *aux), -1).to(self.norm.weight.dtype)

    def fuse(self, enable: bool) -> None:
        """Let the backend's program run passes over a cache, if it has one. Writes: program."""
        make = self.backend.model_program
        self.program = make(self) if enable and make else None

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The layers, or a program's segments in their place, for `run_part` after `embed`."""
        return self.layers if self.program is None else self.program.segments

    def embed(self, tokens: Tensor, positions: Tensor, window: Window | None) -> Rows:
        """Return the first layer's inputs: embeddings, RoPE's angles, and what each token sees.

        tokens, positions: [B, T]
        """
        rows = run_steps(self.first, self, self.begin(tokens, positions, window))
        return replace_fields(rows, h=None).put("tokens", None)

    def begin(self, tokens: Tensor, positions: Tensor, window: Window | None) -> Rows:
        """Return the inputs of the steps before the layers. Arguments: as for `embed`."""
        x = to_stream_dtype(self.embedding(tokens))
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        windows = windows_of(self.windows, window, self.backend)
        return Rows(x, x, self.ropes(positions), windows=windows, named={"tokens": tokens})

    def logits(self, features: Tensor) -> Tensor:
        """Return scores of tokens, [..., V] fp32.

        features: [..., F], or with aux hidden states behind them
        """
        if features.shape[-1] > self.config.dim:
            features = features[..., : self.config.dim]
        scores = self.lm_head(features)
        if self.logit_cap:
            scores = self.backend.soft_cap(scores, self.logit_cap)
        return scores


def windows_of(
    sizes: Sequence[int], window: Window | None, backend: Backend
) -> dict[int, Window] | None:
    """Return `Rows.windows`: a step's own window, and those of layers that see fewer tokens."""
    if window is None:
        return None
    if backend.path_table is not None:
        window = replace_fields(window, paths=backend.path_table(window.mask))
    return {0: window} | {size: backend.sliding(window, size) for size in sizes}
