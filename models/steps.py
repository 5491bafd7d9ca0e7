"""The steps of architectures beside LLaMA and Mixtral (steps.py has those).

Norms that count from one and norms of heads, gates of attention, windows and sinks, recurrences,
routers of other kinds, and inputs of every layer. A class here, described in backends/cpp/steps.py,
with its case in layers.cpp is all that a new kind of arithmetic needs.

Registers beside those of `Rows`, by the steps that write them: `gate` [B, T, H E] of an attention's
output or [B, T, 1] of an expert's, `shared` [B, T, F] a result that waits, `per_layer` [B, T, L P]
inputs of this layer and of those behind it, `last_kv` of `WindowAttend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache import causal_window
from models.recurrent import DeltaWeights
from models.states import TAPS, LayerState, StateShape
from steps import (
    Attend,
    Norm,
    RMSNorm,
    Rotate,
    Route,
    Router,
    Rows,
    Step,
    to_stream_dtype,
)

# -------------------------------------------------------------------------------------------- norms


class OffsetRMSNorm(RMSNorm):
    """A norm whose weight counts from one, as Gemma's files have it."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.zeros(dim))

    @property
    def gain(self) -> Tensor:
        """The factors of a normed row, [F], exact in fp32."""
        return 1 + self.weight.float()


@dataclass(frozen=True)
class OffsetNorm(Norm):
    """Do as `Norm`, with a weight that counts from one."""

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: OffsetRMSNorm(self.dim, self.eps)}


class DividedRMSNorm(RMSNorm):
    """A norm whose rows are divided by a number."""

    divisor: float = 1.0

    @property
    def gain(self) -> Tensor:
        """The factors of a normed row, [F], exact in fp32."""
        return self.weight.float() / self.divisor


@dataclass(frozen=True)
class DividedNorm(Norm):
    """Do as `Norm`, and divide the rows."""

    divisor: float = 1.0

    def modules(self) -> dict[str, nn.Module]:
        norm = DividedRMSNorm(self.dim, self.eps)
        norm.divisor = self.divisor
        return {self.name: norm}


@dataclass(frozen=True)
class EachPartNorm(Norm):
    """Norm the parts of every row one by one, side by side, by the same weight. dim: of a part"""

    parts: int = 1

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        x = rows.get(self.source).unflatten(-1, (self.parts, -1))
        return rows.put(self.to, getattr(layer, self.name)(x).flatten(-2))


@dataclass(frozen=True)
class HeadNorm(Step):
    """Norm every query and every key in `h`, head by head. Source: Qwen3 (arXiv 2505.09388)."""

    heads: int
    kv_heads: int  # 0: there are queries alone
    head_dim: int
    eps: float
    plus_one: bool = False  # the weights count from one
    values: bool = False  # values are normed, too, without a weight

    @property
    def norms_heads(self) -> bool:
        """Return whether a rotation may norm in its place: queries and keys, and no values."""
        return not self.values

    def modules(self) -> dict[str, nn.Module]:
        kind = OffsetRMSNorm if self.plus_one else RMSNorm
        names = ("q_norm", "k_norm") if self.kv_heads else ("q_norm",)
        return {name: kind(self.head_dim, self.eps) for name in names}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        qkv = rows.h.unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
        if not self.kv_heads:
            return rows.put("h", layer.q_norm(qkv).flatten(2))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.values:
            v = layer.backend.rms_norm(v, torch.ones_like(layer.q_norm.weight), self.eps)
        heads = torch.cat((layer.q_norm(q), layer.k_norm(k), v), dim=2)
        return rows.put("h", heads.flatten(2))


@dataclass(frozen=True)
class RowNorm(Step):
    """Norm all queries of a token in `h` as one row, and all its keys. Source: OLMo-2."""

    of_whole_rows = True  # so that ranks cannot have parts of them
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    def modules(self) -> dict[str, nn.Module]:
        counts = {"q_norm": self.heads, "k_norm": self.kv_heads}
        return {name: RMSNorm(n * self.head_dim, self.eps) for name, n in counts.items()}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        keys = self.kv_heads * self.head_dim
        q, k, v = rows.h.split((self.heads * self.head_dim, keys, keys), -1)
        return rows.put("h", torch.cat((layer.q_norm(q), layer.k_norm(k), v), -1))


# ---------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class KeysAsValues(Step):
    """Put a copy of the keys behind them: [B, T, (H + Hkv) E] -> [B, T, (H + 2 Hkv) E]."""

    heads: int
    kv_heads: int
    head_dim: int

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        keys = rows.h[..., self.heads * self.head_dim :]
        return rows.put("h", torch.cat((rows.h, keys), -1))


@dataclass(frozen=True)
class SplitPairs(Step):
    """Put the even ones of the elements that RoPE turns before the odd ones, of each query and key.

    Some models turn neighbours; `Rotate` turns an element with the one half of them further.
    """

    heads: int
    kv_heads: int
    head_dim: int
    turned: int  # elements of a head, the first ones

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        heads = rows.h.unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
        qk, v = heads.tensor_split((self.heads + self.kv_heads,), 2)
        pairs, rest = qk.tensor_split((self.turned,), -1)
        halves = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        qk = torch.cat((halves, rest), -1)
        return rows.put("h", torch.cat((qk, v), 2).flatten(2))


@dataclass(frozen=True)
class SplitGate(Step):
    """Take the gate of the output, which stands behind each query in `h`, to `gate`."""

    heads: int
    head_dim: int

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        both = 2 * self.heads * self.head_dim
        queries, kv = rows.h.tensor_split((both,), -1)
        q, gate = queries.unflatten(-1, (self.heads, 2, -1)).unbind(-2)  # [B, T, H, E] each
        h = torch.cat((q.flatten(-2), kv), -1)  # [B, T, (H + 2 Hkv) E]
        return rows.put("h", h).put("gate", gate.flatten(-2))


@dataclass(frozen=True)
class GateOutput(Step):
    """Multiply `h` by the sigmoid of `gate`: element by element, or each row by one number."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", (rows.h * rows.get("gate").float().sigmoid()).to(rows.h.dtype))


@dataclass(frozen=True)
class RotateQueries(Rotate):
    """Apply RoPE to the queries in `h`; the keys are another layer's, and `kv_heads` is 0."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        q = rows.h.unflatten(-1, (-1, self.head_dim))  # [B, T, H, E]
        return rows.put("h", layer.backend.rotary(q, rows.ropes[self.rope], self.heads, 0)[0])


class Sinks(nn.Module):
    """A learned score of every head, which takes a share of its attention and has no value.

    Source: gpt-oss (arXiv 2508.10925).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))


@dataclass(frozen=True)
class WindowAttend(Attend):
    """Do as `Attend`, with a window, sinks, a scale, or the keys and values of a layer before it.

    Without a cache it writes `last_kv`: window -> keys and values of the last layer that has it.
    """

    scale: float = 0.0  # of the scores; 0: E ** -0.5
    window: int = 0  # tokens that each one sees, itself included; 0: all before it
    sinks: int = 0  # heads that have a sink: all of them, H, or 0
    shared: bool = False  # over keys and values of the last layer of this window that has its own

    def modules(self) -> dict[str, nn.Module]:
        return {"sinks": Sinks(self.sinks)} if self.sinks else {}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        sinks = layer.sinks.weight if self.sinks else None
        if rows.windows is not None:
            window = rows.windows[self.window]
            seen = (window.start, window.mask, window.first)
            attend = layer.backend.attention
            y = attend(rows.h, *rows.kv, *seen, self.scale, paths=window.paths, sinks=sinks)
            return rows.put("h", y)
        last_kv = rows.named.get("last_kv", {})
        kv = last_kv[self.window] if self.shared else rows.kv
        k, v, seen = self.seen(rows.h, *kv, sinks)
        y = F.scaled_dot_product_attention(
            rows.h.transpose(1, 2),
            k,
            v,
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.scale or None,
            enable_gqa=True,
        )  # [B, H, T, E]
        rows = rows.put("h", y.transpose(1, 2).flatten(2))
        return rows.put("last_kv", last_kv | {self.window: kv})

    def seen(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values without a cache, and which each token sees; None: all before it.

        Sinks are one more of each: [T, T] bool becomes [1, H, T, T + 1], scores to add.
        """
        if not self.window and sinks is None:
            return k, v, None
        T = q.shape[1]
        place = torch.arange(T, device=q.device)
        distance = place[:, None] - place  # [T, T]
        seen = (distance >= 0) & (distance < (self.window or T))
        if sinks is None:
            return k, v, seen
        # a slot more, whose score is the sink and whose value is 0
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, float("-inf"))
        of_rows = sinks.to(q.dtype)[:, None, None].expand(-1, T, 1)  # [H, T, 1]
        mask = torch.cat((mask.expand(len(sinks), T, T), of_rows), -1)
        return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), mask[None]


# -------------------------------------------------------------------------------------- recurrences


class Convolution(nn.Module):
    """The weight of a convolution of each channel by itself."""

    def __init__(self, channels: int, taps: int = TAPS):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps))


class DecayGates(nn.Module):
    """The two numbers of each head that the decay of its state follows from."""

    in_fp32 = ("A_log", "dt_bias")  # parameters that are always in fp32

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))


@dataclass(frozen=True)
class DeltaRule(Step):
    """Run GatedDeltaNet's recurrence over the projections in `h`, [B, T, C + H Dv].

    Writes: the layer's state, if there is a cache.
    Source: arXiv 2412.06464, with a convolution of `TAPS` and a gated norm.
    """

    shape: StateShape
    eps: float
    tiled: bool = False  # head h of values reads head h mod Hk of keys, and not head h Hk / H

    @property
    def convolved(self) -> int:
        """The number of channels that are convolved: queries, keys and values."""
        return self.shape.channels - 2 * self.shape.heads

    def modules(self) -> dict[str, nn.Module]:
        return {
            "conv": Convolution(self.convolved),
            "decay": DecayGates(self.shape.heads),
            "state_norm": RMSNorm(self.shape.value_dim, self.eps),
        }

    def weights(self, layer: nn.Module) -> DeltaWeights:
        """Return the operands of the recurrence."""
        gates = torch.stack((layer.decay.A_log, layer.decay.dt_bias)).float()
        return DeltaWeights(
            layer.conv.weight[:, 0], gates, layer.state_norm.weight, self.eps, self.tiled
        )

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        y = layer.backend.delta_rule(rows.h, *state_of(rows, self.shape), self.weights(layer))
        return rows.put("h", y)


@dataclass(frozen=True)
class ShortConv(Step):
    """Run a gated convolution over the projections in `h`, [B, T, 3 F]: `Backend.short_conv`.

    Writes: the layer's state, if there is a cache.
    """

    shape: StateShape
    taps: int  # at most `TAPS`

    def modules(self) -> dict[str, nn.Module]:
        return {"conv": Convolution(self.shape.channels, self.taps)}

    def weight(self, layer: nn.Module) -> Tensor:
        """Return the weight with zeros for the taps that it lacks: [F, TAPS]."""
        return F.pad(layer.conv.weight[:, 0], (TAPS - self.taps, 0))

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        state = state_of(rows, self.shape)
        return rows.put("h", layer.backend.short_conv(rows.h, *state, self.weight(layer)))


def state_of(rows: Rows, shape: StateShape) -> tuple[LayerState, tuple[Tensor | None, ...]]:
    """Return a layer's state, without a cache an empty one, and the fields of its window."""
    if rows.windows is not None:
        kept = rows.kv
        window = rows.windows[0]
    else:
        B, T = rows.h.shape[:2]
        kept = LayerState.empty(shape, B, 0, rows.h.device)
        window = causal_window(torch.zeros_like(kept.length), T)
    return kept, (window.slots, window.start, window.mask, window.kept)


# ------------------------------------------------------------------------------------- feed-forward


class Factor(nn.Module):
    """One number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


@dataclass(frozen=True)
class Scale(Step):
    """Multiply the residual stream by a learned number."""

    name: str

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: Factor()}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("stream", rows.stream * getattr(layer, self.name).weight)


@dataclass(frozen=True)
class GeluGate(Step):
    """Multiply the GELU of the first half of every row of `h` by the second half."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", layer.backend.geglu(rows.h))


@dataclass(frozen=True)
class ClampedGate(Step):
    """Do as `Gate`, with bounded halves: `clamped_swiglu`."""

    alpha: float
    limit: float

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", layer.backend.clamped_swiglu(rows.h, self.alpha, self.limit))


class ScoredRouter(Router):
    """A router with a bias, factors, or shares that do not add up to 1."""

    def __init__(self, step: ScoredRoute):
        super().__init__(step)
        self.norm_topk = step.norm_topk
        self.score_scale = step.score_scale
        self.bias = nn.Parameter(torch.zeros(step.experts)) if step.bias else None
        self.expert_scale = nn.Parameter(torch.ones(step.experts)) if step.expert_scale else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `Router.forward`."""
        scores = self.logits(x)  # [..., E]
        if self.bias is not None:
            scores = scores + self.bias
        if self.score_scale != 1:
            scores = scores * self.score_scale
        best, expert = scores.sort(dim=-1, descending=True, stable=True)
        expert = expert[..., : self.chosen]
        if self.norm_topk:
            share = best[..., : self.chosen].softmax(-1)
        else:
            share = scores.softmax(-1).gather(-1, expert)
        if self.expert_scale is not None:
            share = share * self.expert_scale[expert]
        return expert, share


@dataclass(frozen=True)
class ScoredRoute(Route):
    """Do as `Route`, by a `ScoredRouter`."""

    norm_topk: bool = True  # the routing weights of the chosen add up to 1
    bias: bool = False
    score_scale: float = 1.0
    expert_scale: bool = False  # each expert's share has a learned factor

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: ScoredRouter(self)}


class SigmoidRouter(Router):
    """The ranking of experts by a score of each alone. Source: DeepSeek-V3 (arXiv 2412.19437), 2.1.

    The correction decides which experts are chosen, and is no part of their routing weights.
    """

    in_fp32 = ("e_score_correction_bias",)

    def __init__(self, step: SigmoidRoute):
        super().__init__(step)
        self.norm_topk = step.norm_topk
        self.share_scale = step.share_scale
        self.share_eps = step.share_eps
        self.e_score_correction_bias = nn.Parameter(torch.zeros(step.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `Router.forward`."""
        scores = self.logits(x).sigmoid()  # [..., E]
        ranked = scores + self.e_score_correction_bias
        expert = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : self.chosen]
        share = scores.gather(-1, expert)
        if self.norm_topk:
            # always summed in the router's order
            share = share / (sum(share.unbind(-1)) + self.share_eps)[..., None]
        return expert, share * self.share_scale


@dataclass(frozen=True)
class SigmoidRoute(Route):
    """Do as `Route`, by a `SigmoidRouter`."""

    norm_topk: bool = True  # the routing weights of the chosen add up to 1
    share_scale: float = 1.0  # factor of the routing weights
    share_eps: float = 1e-20  # added to their sum before it divides them

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: SigmoidRouter(self)}


@dataclass(frozen=True)
class AddShared(Step):
    """Add the result that waits in `shared`, as that of the expert that all tokens share."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", rows.h + rows.get("shared"))


# ----------------------------------------------------------------------------- inputs of all layers


@dataclass(frozen=True)
class LookUp(Step):
    """Read the rows of an embedding for the tokens in `tokens`."""

    name: str
    vocab: int
    dim: int
    scale: float
    to: str

    def modules(self) -> dict[str, nn.Module]:
        # not `nn.Embedding` itself, as normal_ on the meta device would import all of torch.compile
        zeros = torch.zeros(self.vocab, self.dim)
        return {self.name: nn.Embedding.from_pretrained(zeros, freeze=False)}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        x = to_stream_dtype(getattr(layer, self.name)(rows.get("tokens")))
        return rows.put(self.to, x * self.scale)


@dataclass(frozen=True)
class GatePerLayer(Step):
    """Multiply the GELU of `h`, [B, T, P], by the layer's own part of `per_layer`, and take it off.

    C++ counts layers and leaves `per_layer` whole.
    """

    width: int  # P

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        own, rest = rows.get("per_layer").tensor_split((self.width,), -1)
        h = layer.backend.geglu(torch.cat((rows.h, own), -1))
        return rows.put("h", h).put("per_layer", rest)
