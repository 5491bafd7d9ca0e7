"""A minimal LLaMA, Qwen or Mixtral with a static key-value cache (kv_cache.py).

1. `Transformer.forward` turns tokens into features (the hidden state after the final norm).
   `Transformer.logits` applies the LM head to the features that need it.
2. These modules are the code that runs, with one exception: with --compile on a CPU,
   `Transformer.fused` runs a pass over a cache in one C++ call (ops/cpu/layers.cpp), with weights
   in bf16, int8, int4 or GGUF blocks.
3. RoPE uses the Hugging Face half-rotation, so weights load without a permutation. Its angles are
   computed per call, once for all layers. That keeps positions unlimited and costs less than 1 % of
   a step.

Not here: config.json and weights (hf/), number formats (quantize.py), operators (ops/), drafting,
sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache import KVCache, Window
from ops.attention import tree_attention
from ops.epilogues import Pending, Unscaled, add, add_norm, rotary_cache, swiglu
from ops.experts import route
from ops.linear import has_cuda_product, has_linear_kernel, linear
from ops.linear_layer import Linear
from ops.norm import rms_norm
from ops.rotary import HeadNorms, rope_angles, rotary

if TYPE_CHECKING:
    from ops.cpu.layers import FusedModel

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
    # {"rope_type": "linear" | "llama3" | "yarn", ...}, every key with its value
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
    norm_topk: bool = True  # norm_topk_prob: the chosen experts' routing weights add up to 1
    # mlp_only_layers, decoder_sparse_step: layers without experts
    dense_layers: tuple[int, ...] = ()
    # (ours) names of the experts' weights in files: a key of hf/weights.py's EXPERTS
    expert_names: str = "mixtral"
    tie_embeddings: bool = False  # tie_word_embeddings
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # one or several ids end a sequence
    dtype: str = "float32"  # torch_dtype: the dtype that the weights are stored in
    # (ours) the model that an inflated one stands for; it is printed with every result
    stand_in: str = ""

    @property
    def rope_factor(self) -> float:
        """The factor of RoPE's cosines and sines."""
        return (self.rope_scaling or {}).get("attention_factor", 1.0)

    def at(self, layer: int) -> ModelConfig:
        """Return the config of one layer: without experts, where the layer is dense."""
        if layer in self.dense_layers:
            return replace(self, n_experts=0)
        return self


# ----------------------------------------------------------------------------------------- modules


def rope_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return inverse wavelengths, [E/2] fp32 (radians per position), scaled as the config says.

    Source: RoFormer (arXiv 2104.09864); `llama3` scaling as in the Llama 3.1 reference code;
    `yarn`: arXiv 2309.00071, 3.2, with transformers' rounding of the bounds.
    """
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    freq = 1.0 / config.rope_theta**exponent  # [E/2]
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        low, high = _yarn_bounds(config, scaling)
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


def _yarn_bounds(config: ModelConfig, scaling: dict) -> tuple[float, float]:
    """Return where waves make `beta_fast` and `beta_slow` turns within the original context."""
    original = scaling["original_max_position_embeddings"]
    base = 2 * math.log(config.rope_theta)
    low = config.head_dim * math.log(original / (2 * math.pi * scaling["beta_fast"])) / base
    high = config.head_dim * math.log(original / (2 * math.pi * scaling["beta_slow"])) / base
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    return max(float(low), 0.0), min(float(high), config.head_dim - 1.0)


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., F]
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: Tensor, delta: Tensor | Pending | None, reader: nn.Module | None = None
    ) -> tuple[Tensor, Tensor | Unscaled]:
        """Add a layer's output to the residual stream.

        x: [..., F]; delta: [..., F], its partial sums, [S, ..., F] fp32, a product, or None
        Returns: the stream and its norm, as the linear layer `reader` takes it, [..., F] each.
        """
        return add_norm(x, delta, self.weight, self.eps, reader)


class NoNorm(nn.Module):
    """The identity, in the place of a norm."""

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., F]
        return x

    def add(
        self, x: Tensor, delta: Tensor | Pending | None, reader: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:  # see RMSNorm.add
        x = add(x, delta)
        return x, x


class Attention(nn.Module):
    """Grouped-query attention with fused projections."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.n_heads
        self.kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.wqkv = Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = Linear(config.n_heads * config.head_dim, config.dim, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(
        self,
        x: Tensor | Unscaled,  # [B, T, F]; without a cache a tensor
        rope: tuple[Tensor, Tensor],
        kv: tuple[Tensor, Tensor] | None = None,  # this layer's buffers, [B, Hkv, S, E] each
        window: Window | None = None,
    ) -> Tensor | Pending:
        """Attend to the cache through `window`; without a cache, causally among the T tokens.

        Writes: k and v at `window.slots`.
        Returns: [B, T, F] or a product, as `RMSNorm.add` takes them.
        """
        if kv is None:
            qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
            # [B, T, H, E], [B, T, Hkv, E]
            q, k = rotary(qkv, rope, self.heads, self.kv_heads, self.head_norms)
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                qkv[:, :, -self.kv_heads :].transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            )  # [B, H, T, E]
            return self.wo(y.transpose(1, 2).flatten(2))
        qkv = self.wqkv.defer(x)  # [B, T, (H + 2 Hkv) E]
        q = rotary_cache(qkv, rope, *kv, window.slots, self.head_norms)  # [B, T, H, E]
        return self.wo.defer(tree_attention(q, *kv, window.start, window.mask))

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of each query and key before their rotation, as `rotary` takes them."""
        if not self.qk_norm:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class FeedForward(nn.Module):
    """SwiGLU with gate and up projections fused."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w13 = Linear(config.dim, 2 * config.ffn_dim, bias=config.mlp_bias)  # gate above up
        self.w2 = Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor | Unscaled) -> Tensor | Pending:  # as `Attention.forward`
        return self.w2.defer(swiglu(self.w13.defer(x)))


class Router(nn.Module):
    """The ranking of the experts of each token. Source: Mixtral (arXiv 2401.04088), section 2.1."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.chosen = config.experts_per_token
        self.norm_topk = config.norm_topk
        self.weight = nn.Parameter(torch.zeros(config.n_experts, config.dim))

    def logits(self, x: Tensor) -> Tensor:  # [..., F] -> [..., E] fp32
        if has_linear_kernel(x, self.weight) or has_cuda_product(x, self.weight):
            return linear(x, self.weight, fp32_out=True)
        # rounded to 16 bits, experts would tie
        return F.linear(x.float(), self.weight.float())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the best experts of each token, best first; of equal ones the first.

        Returns: the experts, [..., J] int64; their routing weights, [..., J] fp32.
        """
        scores = self.logits(x)  # [..., E]
        best, expert = scores.sort(dim=-1, descending=True, stable=True)
        expert = expert[..., : self.chosen]
        if self.norm_topk:
            return expert, best[..., : self.chosen].softmax(-1)
        return expert, scores.softmax(-1).gather(-1, expert)


class MoEFeedForward(nn.Module):
    """SwiGLU by the best experts of each token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.router = Router(config)
        width = config.expert_dim or config.ffn_dim
        # gate above up
        self.w13 = Linear(config.dim, 2 * width, bias=False, experts=config.n_experts)
        self.w2 = Linear(width, config.dim, bias=False, experts=config.n_experts)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, F] -> [B, T, F]
        expert, share = self.router(x)  # [B, T, J]
        # [P, F], P = B T J: a row per token and expert, a token's experts in order
        rows = x.flatten(0, 1).repeat_interleave(share.shape[2], 0)
        routing = route(expert.flatten(), len(self.router.weight))
        y = self.w2(swiglu(self.w13(rows, routing)), routing)  # [P, F]
        each = y.view(*share.shape, -1).float() * share[..., None]  # [B, T, J, F]
        # always summed in the router's order, whichever rows shared an expert
        return sum(each.unbind(2)).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer layer. Each of its halves ends with the norm that comes after it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = MoEFeedForward(config) if config.n_experts else FeedForward(config)

    def forward(
        self, x: Tensor, h: Tensor | Unscaled, after: nn.Module, rope, kv=None, window=None
    ) -> tuple[Tensor, Tensor | Unscaled]:
        """Run the layer. rope, kv, window: as in `Attention.forward`.

        x: [B, T, F], the residual stream
        h: [B, T, F], its norm
        after: the norm that the next layer, or the LM head, reads through
        Returns: the stream and its norm, as a layer of this kind takes them.
        """
        reader = self.ffn.w13 if isinstance(self.ffn, FeedForward) else None
        x, h = self.ffn_norm.add(x, self.attention(h, rope, kv, window), reader)
        return after.add(x, self.ffn(h), self.attention.wqkv if kv else None)


def widen(x: Tensor) -> Tensor:
    """Return rows in the dtype of the residual stream: fp32 for bf16 on a CPU, else their own.

    Rows are small beside weights, so a CPU reads all of them in fp32 at no cost, and rounds only
    what it keeps: keys, values and features. On CUDA rows keep 16 bits.
    """
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


def call_block(part: Callable, *inputs: Any) -> Any:
    """Call a part of a model."""
    return part(*inputs)


class Layers(nn.ModuleList):
    """The blocks of a target or a draft head, one after the other."""

    def forward(
        self,
        x: Tensor,  # [B, T, F]
        rope: tuple[Tensor, Tensor],
        norm: nn.Module,
        cache: KVCache | None = None,
        window: Window | None = None,
        run: Callable = call_block,
        aux_layers: tuple[int, ...] = (),
        h: Tensor | None = None,
    ) -> Tensor:
        """Run the blocks over T tokens, and the norm behind them.

        run: the call of a block. Blocks of a kind have the same shapes, so a compiled call compiles
            once for each kind.
        aux_layers: ascending layers that give aux hidden states: their inputs, the residual stream;
            len(self) stands for the last layer's output
        h: input of the first attention, where it is not the norm of x
        Returns: [B, T, F], or with aux_layers [B, T, (1 + aux_layers) F].
        Writes: the cache at `window.slots`.
        """
        if h is None:
            reader = self[0].attention.wqkv if cache is not None else None
            _, h = self[0].attention_norm.add(x, None, reader)
        aux = []
        for i, block in enumerate(self):
            if i in aux_layers:
                aux.append(x)
            after = self[i + 1].attention_norm if i + 1 < len(self) else norm
            kv = (cache.k[i], cache.v[i]) if cache is not None else None
            x, h = run(block, x, h, after, rope, kv, window)
        if isinstance(h, Unscaled):
            h = norm(x)
        if len(self) in aux_layers:
            aux.append(x)
        if aux_layers:
            h = torch.cat((h, *aux), -1)
        return h


class Transformer(nn.Module):
    """The target model: embedding, blocks, final norm, LM head.

    `fuse` makes passes over a cache run in one C++ call, which computes the same. After a change of
    a module here, change ops/cpu/layers.cpp too, or run without --compile.
    """

    fused: FusedModel | None = None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # zeros until loaded or initialized: normal_ on the meta device would import all of
        # torch.compile (1 s, 70 MB)
        zeros = torch.zeros(config.vocab_size, config.dim)
        self.embedding = nn.Embedding.from_pretrained(zeros, freeze=False)
        self.layers = Layers(Block(config.at(i)) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # scores in fp32: in bf16, the best two would often tie
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False, fp32_out=True)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.register_buffer("rope_freq", rope_frequencies(config), persistent=False)  # [E/2] fp32

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        positions: Tensor,  # [B, T] int64, RoPE positions
        cache: KVCache | None = None,
        window: Window | None = None,
        run: Callable = call_block,
        aux_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """Run the layers over T tokens. Writes: the cache at `window.slots`.

        Returns: features after the final norm, [B, T, F] in the weights' dtype; with aux_layers,
            the aux hidden states of these layers (see `Layers.forward`) behind them.
        """
        if self.fused is not None and cache is not None:
            return self.fused(tokens, positions, cache, window, aux_layers)
        x, rope = run(self.embed, tokens, positions)
        features = self.layers(x, rope, self.norm, cache, window, run, aux_layers)
        return features.to(self.norm.weight.dtype)

    def fuse(self, enable: bool) -> None:
        """Run passes over a cache in one C++ call, where that is served. Writes: `fused`."""
        self.fused = None
        if not enable:
            return
        from ops.cpu.layers import FusedModel, fits

        if fits(self.layers):
            self.fused = FusedModel(self)

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the first layer's inputs: embeddings, [B, T, F], and RoPE's angles."""
        x = widen(self.embedding(tokens))
        return x, rope_angles(self.rope_freq, positions, self.config.rope_factor)

    def logits(self, features: Tensor) -> Tensor:
        """Return scores of tokens, [..., V] fp32.

        features: [..., F], or with aux hidden states behind them
        """
        if features.shape[-1] > self.config.dim:
            features = features[..., : self.config.dim]
        return self.lm_head(features)
