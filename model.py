"""A minimal LLaMA, Qwen or Mixtral with a static key-value cache.

1. `Transformer.forward` turns tokens into features (the hidden state after the final norm); `Transformer.logits`
   applies the LM head to the rows that need it.
2. The cache is a plain tuple of tensors that the caller owns. A step writes its rows to the slots it is given, and
   sees the prefix below `start` plus whatever `mask` allows: one rule for prefill (causal), decoding (one row), tree
   verification (ancestors) and the levels of a draft head.
3. These modules are what runs, but for one case: with --compile on a CPU in bf16, `Transformer.fused` runs a pass over
   a cache in one C++ call (ops/cpu/layers.cpp).

RoPE uses the Hugging Face half-rotation, so weights load without a permutation. Its angles are computed per call, once
for all layers, which keeps positions unlimited and costs less than 1 % of a step.
Not here: config.json and weights (hf/), number formats (quantize.py), operators (ops/), drafting, sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache import KVCache, Window
from ops.attention import tree_attention
from ops.cpu.layers import FusedModel, fits
from ops.experts import experts_linear, route
from ops.linear import has_linear_kernel, linear
from ops.norm import add, add_norm, rms_norm, swiglu
from ops.rotary import HeadNorms, rope_angles, rotary, rotary_cache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """What `config.json` says, in our names. Field comments give the Hugging Face key."""

    dim: int  # hidden_size
    n_layers: int  # num_hidden_layers
    n_heads: int  # num_attention_heads
    n_kv_heads: int  # num_key_value_heads
    head_dim: int  # head_dim, default hidden_size / num_attention_heads
    ffn_dim: int  # intermediate_size
    vocab_size: int
    norm_eps: float = 1e-5  # rms_norm_eps
    rope_theta: float = 10000.0
    rope_scaling: dict | None = (
        None  # {"rope_type": "linear" | "llama3" | "yarn", ...}, every key with its value
    )
    max_context: int = 2048  # max_position_embeddings or what YaRN makes of it; the sliding window where that is less
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = (
        False  # (no key: Qwen3, and heads whose weights show it) a norm on each query and key
    )
    n_experts: int = 0  # num_local_experts or num_experts; 0: a dense model
    experts_per_token: int = 0  # num_experts_per_tok
    expert_dim: int = 0  # moe_intermediate_size; 0: ffn_dim
    norm_topk: bool = True  # norm_topk_prob: the chosen experts' routing weights add up to 1
    dense_layers: tuple[
        int, ...
    ] = ()  # mlp_only_layers, decoder_sparse_step: layers without experts
    expert_names: str = (
        "mixtral"  # (ours) what files call the experts' weights: a key of hf/weights.py's EXPERTS
    )
    tie_embeddings: bool = False  # tie_word_embeddings
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # one or several ids end a sequence
    dtype: str = "float32"  # torch_dtype: how the weights are stored
    stand_in: str = ""  # (ours) what an inflated model stands for; it is printed with every result

    @property
    def rope_factor(self) -> float:
        """What RoPE's cosines and sines are multiplied by."""
        return (self.rope_scaling or {}).get("attention_factor", 1.0)

    def at(self, layer: int) -> ModelConfig:
        """What one layer is made by: without experts, where it is dense."""
        return replace(self, n_experts=0) if layer in self.dense_layers else self


# ---------------------------------------------------------------------------------------------- cache


# --------------------------------------------------------------------------------------------- modules


def rope_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Inverse wavelengths, [E/2] fp32 (radians per position), with the config's scaling applied.

    Source: RoFormer (arXiv 2104.09864); `llama3` scaling as in the Llama 3.1 reference code; `yarn`: arXiv 2309.00071,
    3.2, with transformers' rounding of the bounds.
    """
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    freq = 1.0 / config.rope_theta**exponent  # [E/2]
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "yarn":
        # the places of the waves that rotate so often within the original context
        base, turns = 2 * math.log(config.rope_theta), (scaling["beta_fast"], scaling["beta_slow"])
        low, high = (config.head_dim * math.log(original / (2 * math.pi * t)) / base for t in turns)
        low, high = (math.floor(low), math.ceil(high)) if scaling["truncate"] else (low, high)
        low, high = max(float(low), 0.0), min(float(high), config.head_dim - 1.0)
        blend = 1 - ((torch.arange(len(freq), device=device) - low) / (high - low or 0.001)).clamp(
            0, 1
        )
    else:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * freq / (2 * math.pi)  # rotations within the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
    # 0: long wave, slowed down; 1: short wave, kept
    return blend * freq + (1 - blend) * freq / scaling["factor"]


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., F]
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The stream x after a layer's output came in, and its norm. delta: [..., F] or its partial sums."""
        return add_norm(x, delta, self.weight, self.eps)


class NoNorm(nn.Module):
    """No norm, in the place of one."""

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., F]
        return x

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:  # see RMSNorm.add
        x = add(x, delta)
        return x, x


class Linear(nn.Linear):
    """A linear layer by the product that serves its dtype and device."""

    fp32_out = False  # outputs in fp32

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return linear(x, self.weight, self.bias, self.fp32_out)

    def operands(self) -> tuple[Tensor, None, Tensor | None]:
        """Weight, scale and bias, as ops/cpu/layers.py takes them."""
        return self.weight, None, self.bias

    def forward_split_k(self, x: Tensor) -> Tensor:  # [..., K] -> what `RMSNorm.add` takes
        return self(x)

    def forward_swiglu(
        self, x: Tensor
    ) -> Tensor:  # [..., K] -> [..., N / 2]: SwiGLU of outputs with gate above up
        return swiglu(self(x))


class LMHead(Linear):
    """Scores of tokens, in fp32: of bf16 ones, the best two would often tie."""

    fp32_out = True


class Attention(nn.Module):
    """Grouped-query attention with fused projections."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
        )
        width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.wqkv = Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = Linear(config.n_heads * config.head_dim, config.dim, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))

    def forward(
        self,
        x: Tensor,  # [B, T, F]
        rope: tuple[Tensor, Tensor],
        kv: tuple[Tensor, Tensor] | None = None,  # this layer's buffers, [B, Hkv, S, E] each
        window: Window | None = None,
    ) -> Tensor:
        """Attend to the cache through `window`; without a cache, causally among the T rows themselves.

        Writes: k and v at `window.slots`. Returns: what `RMSNorm.add` takes, [B, T, F] or partial sums.
        """
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
        if kv is None:
            q, k = rotary(
                qkv, rope, self.heads, self.kv_heads, self.head_norms
            )  # [B, T, H, E], [B, T, Hkv, E]
            y = F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, qkv[:, :, -self.kv_heads :])),
                is_causal=True,
                enable_gqa=True,
            )  # [B, H, T, E]
            return self.wo(y.transpose(1, 2).flatten(2))
        q = rotary_cache(qkv, rope, *kv, window.slots, self.head_norms)  # [B, T, H, E]
        return self.wo.forward_split_k(tree_attention(q, *kv, window.start, window.mask))

    @property
    def head_norms(self) -> HeadNorms | None:
        """What `rotary` norms each query and key with, before it rotates them."""
        return (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.qk_norm else None


class FeedForward(nn.Module):
    """SwiGLU with gate and up projections fused."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w13 = Linear(config.dim, 2 * config.ffn_dim, bias=config.mlp_bias)  # gate above up
        self.w2 = Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, F] -> what `RMSNorm.add` takes
        return self.w2.forward_split_k(self.w13.forward_swiglu(x))


class Router(nn.Module):
    """Ranks the experts of each token. Source: Mixtral (arXiv 2401.04088), section 2.1."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.chosen, self.norm_topk = config.experts_per_token, config.norm_topk
        self.weight = nn.Parameter(torch.zeros(config.n_experts, config.dim))

    def logits(self, x: Tensor) -> Tensor:  # [..., F] -> [..., E] fp32
        if has_linear_kernel(x, self.weight):
            return linear(x, self.weight, fp32_out=True)
        return F.linear(x.float(), self.weight.float())  # rounded to 16 bits, experts would tie

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns: the best experts in order, of equal ones the first, [..., J] int64; their routing weights, [..., J] fp32."""
        score, expert = self.logits(x).sort(dim=-1, descending=True, stable=True)
        sharing = score[..., : self.chosen] if self.norm_topk else score
        return expert[..., : self.chosen], sharing.softmax(-1)[..., : self.chosen]


class ExpertLinear(nn.Module):
    """A linear layer of each expert, stacked."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.in_features = nn.Parameter(torch.empty(experts, outputs, inputs)), inputs

    def forward(
        self, x: Tensor, routing: Tensor
    ) -> Tensor:  # [P, K], from ops.experts.route -> [P, N]
        return experts_linear(x, self.weight, routing)

    def operands(self) -> tuple[Tensor, None, None]:
        """Weights, scale and bias, as ops/cpu/layers.py takes them."""
        return self.weight, None, None


class MoEFeedForward(nn.Module):
    """SwiGLU by the best experts of each token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.router, width = Router(config), config.expert_dim or config.ffn_dim
        self.w13 = ExpertLinear(config.n_experts, config.dim, 2 * width)  # gate above up
        self.w2 = ExpertLinear(config.n_experts, width, config.dim)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, F] -> [B, T, F]
        expert, share = self.router(x)  # [B, T, J]
        rows = x.flatten(0, 1).repeat_interleave(
            share.shape[2], 0
        )  # [P, F], P = B T J: a token's experts in order
        routing = route(expert.flatten(), len(self.router.weight))
        y = self.w2(swiglu(self.w13(rows, routing)), routing)  # [P, F]
        # always summed in the router's order, whichever rows shared an expert
        return (y.view(*share.shape, -1).float() * share[..., None]).sum(2).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer layer. Both of its halves end with the norm that comes after them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = MoEFeedForward(config) if config.n_experts else FeedForward(config)

    def forward(
        self, x: Tensor, h: Tensor, after: nn.Module, rope, kv=None, window=None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; for the others see `Attention.forward`.

        x: [B, T, F], the residual stream; h: [B, T, F], its norm; after: the norm of what comes next
        Returns: the stream and its norm, as the next layer takes them.
        """
        x, h = self.ffn_norm.add(x, self.attention(h, rope, kv, window))
        return after.add(x, self.ffn(h))


def call(part: Callable, *inputs: Any) -> Any:
    """Call a part of a model."""
    return part(*inputs)


class Layers(nn.ModuleList):
    """Blocks, one after the other, of a target or a draft head."""

    def forward(
        self,
        x: Tensor,  # [B, T, F]
        rope: tuple[Tensor, Tensor],
        norm: nn.Module,
        cache: KVCache | None = None,
        window: Window | None = None,
        run: Callable = call,
        aux_layers: tuple[int, ...] = (),
        h: Tensor | None = None,
    ) -> Tensor:
        """Run the blocks over T rows, and the norm behind them.

        run: calls a block; those of a kind have the same shapes, so a compiled call compiles once for each kind
        aux_layers: ascending layers whose inputs, the residual stream, are wanted too; len(self): the last one's output
        h: what the first attention reads, where it is not the norm of x
        Returns: [B, T, F], or with aux_layers [B, T, (1 + aux_layers) F]. Writes: the cache at `window.slots`.
        """
        h, kept = self[0].attention_norm(x) if h is None else h, []
        for i, block in enumerate(self):
            kept += [x] if i in aux_layers else []
            after = self[i + 1].attention_norm if i + 1 < len(self) else norm
            kv = (cache.k[i], cache.v[i]) if cache is not None else None
            x, h = run(block, x, h, after, rope, kv, window)
        kept += [x] if len(self) in aux_layers else []
        return torch.cat((h, *kept), -1) if aux_layers else h


class Transformer(nn.Module):
    """The target model: embedding, blocks, final norm, LM head.

    `fuse` makes passes over a cache run in one C++ call, which computes the same. Who changes a module here must change
    ops/cpu/layers.cpp too, or run without --compile.
    """

    fused: FusedModel | None = None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # zeros until loaded or initialized: normal_ on the meta device would import all of torch.compile (1 s, 70 MB)
        self.embedding = nn.Embedding.from_pretrained(
            torch.zeros(config.vocab_size, config.dim), freeze=False
        )
        self.layers = Layers(Block(config.at(i)) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = LMHead(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.register_buffer("rope_freq", rope_frequencies(config), persistent=False)  # [E/2] fp32

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        positions: Tensor,  # [B, T] int64, RoPE positions
        cache: KVCache | None = None,
        window: Window | None = None,
        run: Callable = call,
        aux_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """Run the layers over T rows. Writes: the cache at `window.slots`.

        Returns: features after the final norm, [B, T, F]; with aux_layers, these layers' inputs behind them.
        """
        if self.fused is not None and cache is not None:
            return self.fused(tokens, positions, cache, window, aux_layers)
        x, rope = run(self.embed, tokens, positions)
        return self.layers(x, rope, self.norm, cache, window, run, aux_layers)

    def fuse(self, whether: bool) -> None:
        """Run passes over a cache in one C++ call, where that is served. Writes: `fused`."""
        self.fused = FusedModel(self) if whether and fits(self.layers) else None

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What the first layer takes: embeddings, [B, T, F], and RoPE's angles. Arguments as for `forward`."""
        return self.embedding(tokens), rope_angles(
            self.rope_freq, positions, self.config.rope_factor
        )

    def logits(
        self, features: Tensor
    ) -> Tensor:  # [..., F], or with aux_layers behind them -> [..., V] fp32
        if features.shape[-1] > self.config.dim:
            features = features[..., : self.config.dim]
        return self.lm_head(features)
