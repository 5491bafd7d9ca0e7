"""A minimal LLaMA, Qwen or Mixtral with a static key-value cache (kv_cache.py).

1. A layer is a list of steps (`ModelConfig.layer`; steps.py). Other architectures are files in
   models/, which override that list.
2. `Transformer.forward` turns tokens into features (the hidden state after the final norm).
   `Transformer.logits` applies the LM head to the features that need it.
3. The steps' PyTorch is the code that runs with --plain. Else C++ on a CPU runs the list over a
   cache in one call (`Transformer.fused`, backends/cpp/layers.cpp), and on CUDA neighbours in the
   list are one launch (backends/fusions.py).
4. RoPE uses the Hugging Face half-rotation, so weights load without a permutation. Its angles are
   computed per call, once for all layers. That keeps positions unlimited and costs less than 1 % of
   a step.

Not here: config.json and weights (files/), number formats (quantize.py), operators (backends/),
drafting, sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backends.cpp.layers import FusedModel, fits, steps_of
from backends.fusions import FusedLayers
from kv_cache import KVCache, StateShape, Window, sliding
from quantize import Linear
from reference import TORCH, Backend, row_width
from runtime import replace_fields
from steps import (
    Add,
    AddShared,
    Attend,
    Copy,
    Gate,
    GateOutput,
    HeadNorm,
    Merge,
    Norm,
    Project,
    Rotate,
    Route,
    Rows,
    Step,
    add_modules,
    run_steps,
    to_stream_dtype,
)

# the modules of a layer -> Hugging Face's, of which a module's rows are made, in their order
NAMES = {
    "attention_norm": ("input_layernorm",),
    "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "wo": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "w13": ("mlp.gate_proj", "mlp.up_proj"),
    "w2": ("mlp.down_proj",),
}
# the same of a mixture; {}: the number of an expert
MIXTURES = {
    "mixtral": {
        "router": ("block_sparse_moe.gate",),
        "experts.w13": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "experts.w2": ("block_sparse_moe.experts.{}.w2",),
    },
    "qwen": {
        "router": ("mlp.gate",),
        "shared_w13": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_w2": ("mlp.shared_expert.down_proj",),
        "shared_gate": ("mlp.shared_expert_gate",),
        "experts.w13": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "experts.w2": ("mlp.experts.{}.down_proj",),
    },
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """The settings in `config.json`, under our names. Field comments give the Hugging Face key."""

    dim: int  # hidden_size
    n_layers: int  # num_hidden_layers
    n_heads: int  # num_attention_heads
    n_kv_heads: int  # num_key_value_heads
    head_dim: int  # head_dim, default hidden_size / num_attention_heads
    ffn_dim: int  # intermediate_size
    vocab_size: int
    norm_eps: float = 1e-5  # rms_norm_eps
    rope_theta: float = 10000.0
    # {"rope_type": "linear" | "llama3" | "yarn" | "proportional", ...}, every key with its value
    rope_scaling: dict | None = None
    # max_position_embeddings, or the length that YaRN extends it to; at most the sliding window
    max_context: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # (no key: Qwen3, and heads whose weights show it) a norm on each query and key
    qk_norm: bool = False
    n_experts: int = 0  # num_local_experts or num_experts; 0: a dense model
    experts_per_token: int = 0  # num_experts_per_tok
    expert_dim: int = 0  # moe_intermediate_size; 0: ffn_dim
    # shared_expert_intermediate_size, of an expert that all tokens share; 0: there is none
    shared_dim: int = 0
    norm_topk: bool = True  # norm_topk_prob: the chosen experts' routing weights add up to 1
    # mlp_only_layers, decoder_sparse_step: layers without experts
    dense_layers: tuple[int, ...] = ()
    # (ours) names of the experts' weights in files: a key of MIXTURES
    expert_names: str = "mixtral"
    tie_embeddings: bool = False  # tie_word_embeddings
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # one or several ids end a sequence
    dtype: str = "float32"  # torch_dtype: the dtype that the weights are stored in
    # (ours) the model that an inflated one stands for; it is printed with every result
    stand_in: str = ""

    gates_shared = True  # of an architecture: the shared expert's result has a gate

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of the layers; `Rotate.rope` counts them."""
        return (Rope(self.head_dim, self.rope_theta, self.rope_scaling),)

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows of the layers (tokens), besides 0, which is none."""
        return ()

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of a layer's modules in files, as `NAMES`."""
        return NAMES | MIXTURES[self.expert_names]

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        return 1.0

    @property
    def logit_cap(self) -> float:
        """The bound of logits, which they approach as a hyperbolic tangent does; 0: none."""
        return 0.0

    @property
    def unused(self) -> tuple[str, ...]:
        """The beginnings of names of tensors that files hold and no layer reads."""
        return ()

    def kv_shape(self, i: int) -> tuple[int, int]:
        """Return the heads of keys and values of layer i, and their width."""
        return self.n_kv_heads, self.head_dim

    def kv_source(self, i: int) -> int:
        """Return the layer whose keys and values layer i reads."""
        return i

    def state_shape(self, i: int) -> StateShape | None:
        """Return the sizes of the state of layer i, if that is recurrent."""
        return None

    @property
    def mtp(self) -> Mtp | None:
        """The MTP layer that checkpoints of this kind may hold."""
        return None

    def has_experts(self, layer: int) -> bool:
        """Return whether the feed-forward of a layer is a mixture of experts."""
        return self.n_experts > 0 and layer not in self.dense_layers

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
        heads = (self.n_heads, self.n_kv_heads, self.head_dim)
        width = self.n_heads * self.head_dim
        both = 2 * self.n_kv_heads * self.head_dim
        head_norm = (HeadNorm(*heads, self.norm_eps),) if self.qk_norm else ()
        return (
            Project("wqkv", self.dim, width + both, self.qkv_bias),
            *head_norm,
            Rotate(*heads),
            Attend(),
            Project("wo", width, self.dim, self.o_bias, row_parallel=True),
        )

    def feed_forward(self) -> tuple[Step, ...]:
        """Return the steps of SwiGLU, with gate above up in one weight."""
        return (
            Project("w13", self.dim, 2 * self.ffn_dim, self.mlp_bias),
            Gate("silu"),
            Project("w2", self.ffn_dim, self.dim, self.mlp_bias, row_parallel=True),
        )

    def mixture(self) -> tuple[Step, ...]:
        """Return the steps of SwiGLU by the best experts of each token, and by the shared one."""
        width = self.expert_dim or self.ffn_dim
        count = self.n_experts
        before: tuple[Step, ...] = ()
        behind: tuple[Step, ...] = ()
        if self.shared_dim:
            before = self.shared_expert()
            behind = (AddShared(),)
        return (
            *before,
            self.route(),
            Project("w13", self.dim, 2 * width, experts=count),
            Gate("silu"),
            Project("w2", width, self.dim, experts=count, row_parallel=True),
            Merge(),
            *behind,
        )

    def route(self) -> Route:
        """Return the step that chooses each token's experts."""
        return Route(self.dim, self.n_experts, self.experts_per_token, self.norm_topk)

    def shared_expert(self) -> tuple[Step, ...]:
        """Return the steps of the expert that all tokens share; its result waits for the others."""
        gate: tuple[Step, ...] = ()
        if self.gates_shared:
            gate = (Project("shared_gate", self.dim, 1, source="normed", to="gate"), GateOutput())
        return (
            Copy("h", "normed"),
            Project("shared_w13", self.dim, 2 * self.shared_dim),
            Gate("silu"),
            Project("shared_w2", self.shared_dim, self.dim, row_parallel=True),
            *gate,
            Copy("h", "shared"),
            Copy("normed", "h"),
        )

    def last(self) -> tuple[Step, ...]:
        """Return the steps behind the layers."""
        return (Norm("norm", self.dim, self.norm_eps),)


class Mtp(NamedTuple):
    """A layer beside a model's own, which predicts the token after the next one.

    A projection of two rows side by side, the embedding of the next token and the feature, each
    behind a norm of its own; one layer of the model; a norm. Embedding and LM head are the model's.
    """

    model: ModelConfig  # whose only layer it is
    prefix: str  # beginning of the names of all its tensors
    layer: str  # that of the layer's; {}: the number of the MTP layer
    names: dict[str, str]  # fc, embedding_norm, hidden_norm, norm -> their names
    feature_first: bool = False  # the feature is left of the embedding
    first: int = 0  # number of the first MTP layer


class Rope(NamedTuple):
    """One rotary position embedding."""

    width: int  # of a head, E
    theta: float  # base of the wavelengths
    scaling: dict | None = None  # as `ModelConfig.rope_scaling`

    @property
    def factor(self) -> float:
        """The factor of cosines and sines."""
        return (self.scaling or {}).get("attention_factor", 1.0)


# ----------------------------------------------------------------------------------------- modules


def rope_frequencies(rope: Rope, device: torch.device | str = "cpu") -> Tensor:
    """Return inverse wavelengths, [E/2] fp32 (radians per position), scaled as the rope says.

    Source: RoFormer (arXiv 2104.09864); `llama3` scaling as in the Llama 3.1 reference code;
    `yarn`: arXiv 2309.00071, 3.2, with transformers' rounding of the bounds.
    """
    exponent = torch.arange(0, rope.width, 2, device=device).float() / rope.width
    freq = 1.0 / rope.theta**exponent  # [E/2]
    scaling = rope.scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    if scaling["rope_type"] == "proportional":  # the first pairs alone turn
        turns = torch.arange(len(freq), device=device) < scaling["pairs"]
        return freq / scaling["factor"] * turns
    if scaling["rope_type"] == "yarn":
        low, high = _yarn_bounds(rope, scaling)
        place = torch.arange(len(freq), device=device)
        blend = 1 - ((place - low) / (high - low or 0.001)).clamp(0, 1)
    else:
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        turns = original * freq / (2 * math.pi)  # rotations within the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
    # 0: long wave, slowed down; 1: short wave, kept
    return blend * freq + (1 - blend) * freq / scaling["factor"]


def _yarn_bounds(rope: Rope, scaling: dict) -> tuple[float, float]:
    """Return where waves make `beta_fast` and `beta_slow` turns within the original context."""
    original = scaling["original_max_position_embeddings"]
    base = 2 * math.log(rope.theta)
    low = rope.width * math.log(original / (2 * math.pi * scaling["beta_fast"])) / base
    high = rope.width * math.log(original / (2 * math.pi * scaling["beta_slow"])) / base
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    return max(float(low), 0.0), min(float(high), rope.width - 1.0)


class RotaryEmbeddings(nn.Module):
    """The wavelengths of a model's rotary embeddings. They are computed, and in no file."""

    backend: Backend = TORCH

    def __init__(self, ropes: Sequence[Rope], device: torch.device | str = "cpu"):
        super().__init__()
        self.factors = [rope.factor for rope in ropes]
        for i, rope in enumerate(ropes):  # [E/2] fp32
            self.register_buffer(str(i), rope_frequencies(rope, device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return cosines and sines for every embedding, [B, T, 1, E] each. positions: [B, T]"""
        angles = self.backend.rope_angles
        freqs = self.buffers()
        return tuple(angles(freq, positions, by) for freq, by in zip(freqs, self.factors))


class Layer(nn.Module):
    """The weights of one layer, and its steps."""

    backend: Backend = TORCH  # as the model's

    def __init__(self, steps: Sequence[Step]):
        super().__init__()
        self.steps = tuple(steps)
        add_modules(self, steps)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot's keys and values. dtype: of the cache"""
        rotations = [step for step in self.steps if isinstance(step, Rotate)]
        numbers = sum(2 * step.kv_heads * row_width(step.head_dim, dtype) for step in rotations)
        return numbers * dtype.itemsize

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
    """The target model: embedding, layers, final norm, LM head.

    `fuse` makes passes over a cache run in one C++ call, or in fewer launches, which computes the
    same.
    """

    fused: FusedModel | None = None  # runs passes over a cache, on a CPU
    fused_layers: FusedLayers | None = None  # runs in place of `layers`, on CUDA
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
        if self.fused is not None and cache is not None:
            return self.fused(tokens, positions, cache, window, aux_layers)
        rows = run_part(self.embed, tokens, positions, window)
        if self.fused_layers is not None and cache is not None:
            rows = self.fused_layers.begin(rows)
            segments = self.fused_layers.segments
            rows, aux = run_layers(segments, rows, cache, run_part, aux_layers)
            rows = self.fused_layers.end(rows)
        else:
            rows, aux = run_layers(self.layers, rows, cache, run_part, aux_layers)
            rows = run_steps(self.last, self, rows)
        return torch.cat((rows.h, *aux), -1).to(self.norm.weight.dtype)

    def fuse(self, enable: bool) -> None:
        """Run passes over a cache in one C++ call, where that is served; on CUDA in few launches.

        enable: on a CPU
        Writes: `fused`, `fused_layers`.
        """
        self.fused = None
        self.fused_layers = None
        if self.backend.merges_steps:
            self.fused_layers = FusedLayers(self.layers, self.last, self)
        elif enable and self.backend.runs_passes and fits(steps_of(self)):
            self.fused = FusedModel(self)

    def embed(self, tokens: Tensor, positions: Tensor, window: Window | None) -> Rows:
        """Return the first layer's inputs: embeddings, RoPE's angles, and what each token sees.

        tokens, positions: [B, T]
        """
        rows = run_steps(self.first, self, self.begin(tokens, positions, window))
        return replace_fields(rows, h=None, tokens=None)

    def begin(self, tokens: Tensor, positions: Tensor, window: Window | None) -> Rows:
        """Return the inputs of the steps before the layers. Arguments: as for `embed`."""
        x = to_stream_dtype(self.embedding(tokens))
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        return Rows(
            x,
            x,
            tokens=tokens,
            ropes=self.ropes(positions),
            windows=windows_of(self.windows, window, self.backend),
        )

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
    return {0: window} | {size: sliding(window, size) for size in sizes}
