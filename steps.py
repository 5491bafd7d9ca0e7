"""The steps that a layer is made of, each with its weights and five lines of PyTorch.

    for step in (Norm(...), Project("wqkv", ...), Rotate(...), Attend(), Project("wo", ...), Add()):
        rows = step.run(layer, rows)

1. A layer is a list of steps, which its architecture makes once (model.py, models/). Draft heads
   are lists, too. A step is a record: it names its weights and holds sizes, and no tensor.
2. A step reads a register of `Rows` and writes another. Most read and write `h`, the result of the
   step before; `stream` is the residual stream.
3. `run` is the reference, and what runs where nothing faster does. `for_cpp` describes the step to
   the C++ pass over all layers (backends/cpp/layers.cpp). backends/fusions.py merges neighbours for
   CUDA; run/tp.py puts a sum over the ranks behind row-parallel projections.

A new kind of arithmetic is a class here and a case in layers.cpp; a step without `for_cpp` leaves
its model to PyTorch. Not here: the lists, the weights' names in files (models/).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.attention import with_sinks
from backends.cpp.layers import REGISTERS, CppStep, embedding_operands
from kv_cache import TAPS, LayerState, StateShape, Window, causal_window
from models.recurrent import DeltaWeights
from quantize import Linear
from reference import TORCH, Backend
from runtime import replace_fields

# parameters that are always in fp32, by the ends of their names
IN_FP32 = ("A_log", "dt_bias", "e_score_correction_bias")


class Rows(NamedTuple):
    """The numbers of T tokens on their way through a list of steps, and what all layers share."""

    stream: Tensor | None = None  # [B, T, F], the residual stream
    h: Any = None  # the result of the step before
    embedded: Tensor | None = None  # [B, T, F], embeddings that a draft head reads
    features: Tensor | None = None  # [B, T, F], features that it reads
    normed: Tensor | None = None  # [B, T, F], those after a norm
    gate: Tensor | None = None  # [B, T, H E], of an attention's output; [B, T, 1], of an expert's
    shared: Tensor | None = None  # [B, T, F], a result that waits, as the shared expert's
    per_layer: Tensor | None = None  # [B, T, L P], inputs of this layer and of those behind it
    # by `Rotate.rope`: cosines and sines, [B, T, 1, E] fp32 each
    ropes: tuple[tuple[Tensor, Tensor], ...] = ()
    # this layer's buffers, [B, Hkv, S, E] each, or its `LayerState`; without a cache the keys and
    # values of these tokens
    kv: tuple[Tensor, ...] | None = None
    # without a cache, by `Attend.window`: `kv` of the last layer, which later layers may read
    last_kv: dict[int, tuple[Tensor, ...]] | None = None
    tokens: Tensor | None = None  # [B, T] int64, for the steps before the first layer
    # by `Attend.window`: the slots that are written and seen; None: no cache, attention is causal
    windows: dict[int, Window] | None = None
    routing: Tensor | None = None  # of a mixture, from `Backend.route`
    share: Tensor | None = None  # [B, T, J] fp32, routing weights of each token's experts
    kernel: Tensor | None = None  # [B, T, K], dynamic weights of a convolution

    def put(self, register: str, value: Any) -> Rows:
        """Return these rows with another value in a register."""
        return replace_fields(self, **{register: value})


class Step:
    """One operation of a layer. Subclasses are frozen dataclasses: equal lists are equal."""

    def modules(self) -> dict[str, nn.Module]:
        """Make the modules that hold the step's weights, by their names in the layer."""
        return {}

    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters in `modules`."""
        return ()

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        """Run the step with PyTorch. Writes: at most the cache.

        layer: holds the weights, and a backend
        """
        raise NotImplementedError

    def for_cpp(self, layer: nn.Module) -> CppStep | None:
        """Describe the step to C++; None where PyTorch has to run it."""
        return None


def add_modules(owner: nn.Module, steps: Iterable[Step]) -> None:
    """Give a module the weights of steps, under their names. Writes: its submodules."""
    for step in steps:
        for name, module in step.modules().items():
            owner.add_module(name, module)


def run_steps(steps: Iterable[Step], layer: nn.Module, rows: Rows) -> Rows:
    """Run steps, one after the other. layer: holds their weights. Writes: at most the cache."""
    for step in steps:
        rows = step.run(layer, rows)
    return rows


# -------------------------------------------------------------------------------------------- norms


class RMSNorm(nn.Module):
    """The weight of a root-mean-square norm."""

    backend: Backend = TORCH

    def __init__(self, dim: int, eps: float, plus_one: bool = False):
        """plus_one: the weight counts from one, as Gemma's files have it."""
        super().__init__()
        self.eps = eps
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))

    @property
    def gain(self) -> Tensor:
        """The factors of a normed row, [F]; those that count from one are exact in fp32."""
        return 1 + self.weight.float() if self.plus_one else self.weight

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., F]
        return self.backend.rms_norm(x, self.gain, self.eps)


@dataclass(frozen=True)
class Norm(Step):
    """Norm a register: by default the residual stream, for the steps that follow."""

    name: str
    dim: int
    eps: float
    plus_one: bool = False
    source: str = "stream"
    to: str = "h"
    parts: int = 1  # of a row, side by side, which are normed one by one by the same weight

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: RMSNorm(self.dim, self.eps, self.plus_one)}

    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        norm = getattr(layer, self.name)
        x = getattr(rows, self.source)
        if self.parts > 1:
            return rows.put(self.to, norm(x.unflatten(-1, (self.parts, -1))).flatten(-2))
        return rows.put(self.to, norm(x))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        gain = getattr(layer, self.name).gain
        return CppStep("norm", self.source, self.to, (gain,), numbers=(self.eps,))


@dataclass(frozen=True)
class PartNorm(Step):
    """Norm one of several equal parts of every row of `h`, side by side."""

    name: str
    dim: int  # of a part
    eps: float
    part: int
    parts: int

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: RMSNorm(self.dim, self.eps)}

    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        parts = list(rows.h.chunk(self.parts, -1))
        parts[self.part] = getattr(layer, self.name)(parts[self.part])
        return rows.put("h", torch.cat(parts, -1))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        gain = getattr(layer, self.name).gain
        counts = (self.part, self.parts)
        return CppStep("part_norm", weights=(gain,), counts=counts, numbers=(self.eps,))


# -------------------------------------------------------------------------------------- projections


@dataclass(frozen=True)
class Project(Step):
    """Multiply by the weight of a linear layer, or each row by that of its expert."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    experts: int = 0  # 0: one weight
    row_parallel: bool = False  # ranks share the inputs, and their outputs are added
    source: str = "h"
    to: str = "h"

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: Linear(self.inputs, self.outputs, self.bias, self.experts)}

    def parameters(self) -> tuple[str, ...]:
        weight = (f"{self.name}.weight",)
        return (*weight, f"{self.name}.bias") if self.bias else weight

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        linear_layer = getattr(layer, self.name)
        x = getattr(rows, self.source)
        y = linear_layer(x, rows.routing) if self.experts else linear_layer(x)
        return rows.put(self.to, y)

    def for_cpp(self, layer: nn.Module) -> CppStep | None:
        linear_layer = getattr(layer, self.name)
        if not linear_layer.in_cpp:
            return None
        counts = (self.outputs, self.experts)
        return CppStep("project", self.source, self.to, linear_layer.operands(), counts)


# ---------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class HeadNorm(Step):
    """Norm every query and every key in `h`, head by head. Source: Qwen3 (arXiv 2505.09388)."""

    heads: int
    kv_heads: int  # 0: there are queries alone
    head_dim: int
    eps: float
    plus_one: bool = False
    values: bool = False  # values are normed, too, without a weight

    def modules(self) -> dict[str, nn.Module]:
        names = ("q_norm", "k_norm") if self.kv_heads else ("q_norm",)
        return {name: RMSNorm(self.head_dim, self.eps, self.plus_one) for name in names}

    def parameters(self) -> tuple[str, ...]:
        return tuple(f"{name}.weight" for name in self.modules())

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        qkv = rows.h.unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
        if not self.kv_heads:
            return rows.put("h", layer.q_norm(qkv).flatten(2))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.values:
            v = layer.backend.rms_norm(v, torch.ones_like(layer.q_norm.weight), self.eps)
        heads = torch.cat((layer.q_norm(q), layer.k_norm(k), v), dim=2)
        return rows.put("h", heads.flatten(2))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        of_q = layer.q_norm.gain
        gains = [of_q, layer.k_norm.gain if self.kv_heads else of_q]
        if self.values:
            gains.append(torch.ones_like(of_q))
        counts = (self.heads, self.kv_heads, self.head_dim)
        return CppStep("head_norm", weights=tuple(gains), counts=counts, numbers=(self.eps,))


@dataclass(frozen=True)
class KeysAsValues(Step):
    """Put a copy of the keys behind them: [B, T, (H + Hkv) E] -> [B, T, (H + 2 Hkv) E]."""

    heads: int
    kv_heads: int
    head_dim: int

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        keys = rows.h[..., self.heads * self.head_dim :]
        return rows.put("h", torch.cat((rows.h, keys), -1))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("keys_as_values", counts=(self.heads * self.head_dim,))


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

    def for_cpp(self, layer: nn.Module) -> CppStep:
        counts = (self.heads, self.kv_heads, self.head_dim, self.turned)
        return CppStep("split_pairs", counts=counts)


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
        return replace_fields(rows, h=h, gate=gate.flatten(-2))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("split_gate", counts=(self.heads, self.head_dim))


@dataclass(frozen=True)
class GateOutput(Step):
    """Multiply `h` by the sigmoid of `gate`: element by element, or each row by one number."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", (rows.h * rows.gate.float().sigmoid()).to(rows.h.dtype))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("gate_output")


@dataclass(frozen=True)
class Rotate(Step):
    """Apply RoPE to the queries and keys in `h`, [B, T, (H + 2 Hkv) E], and keep keys and values.

    Writes: keys and values at the slots of the cache, if there is one.
    """

    heads: int
    kv_heads: int  # 0: there are queries alone
    head_dim: int
    rope: int = 0  # which of the model's (`ModelConfig.ropes`)

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        qkv = rows.h.unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
        rope = rows.ropes[self.rope]
        if not self.kv_heads:
            return rows.put("h", layer.backend.rotary(qkv, rope, self.heads, 0)[0])
        if rows.windows is not None:
            slots = rows.windows[0].slots
            q = layer.backend.rotary_cache(qkv, rope, *rows.kv, slots)  # [B, T, H, E]
            return rows.put("h", q)
        # [B, T, H, E], [B, T, Hkv, E]
        q, k = layer.backend.rotary(qkv, rope, self.heads, self.kv_heads)
        v = qkv[:, :, -self.kv_heads :]
        return replace_fields(rows, h=q, kv=(k.transpose(1, 2), v.transpose(1, 2)))

    def for_cpp(self, layer: nn.Module) -> CppStep | None:
        if self.head_dim % 16:
            return None
        counts = (self.heads, self.kv_heads, self.head_dim, self.rope)
        return CppStep("rotate", counts=counts)


class Sinks(nn.Module):
    """A learned score of every head, which takes a share of its attention and has no value.

    Source: gpt-oss (arXiv 2508.10925).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))


@dataclass(frozen=True)
class Attend(Step):
    """Attend from the queries in `h`, [B, T, H, E]: grouped-query attention, [B, T, H E]."""

    scale: float = 0.0  # of the scores; 0: E ** -0.5
    window: int = 0  # tokens that each one sees, itself included; 0: all before it
    sinks: int = 0  # heads that have a sink: all of them, H, or 0
    shared: bool = False  # over keys and values of the last layer of this window that has its own

    def modules(self) -> dict[str, nn.Module]:
        return {"sinks": Sinks(self.sinks)} if self.sinks else {}

    def parameters(self) -> tuple[str, ...]:
        return ("sinks.weight",) if self.sinks else ()

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        if rows.windows is not None:
            window = rows.windows[self.window]
            seen = (window.start, window.mask, window.first)
            sinks = layer.sinks.weight if self.sinks else None
            attend = layer.backend.attention
            y = attend(rows.h, *rows.kv, *seen, self.scale, paths=window.paths, sinks=sinks)
            return rows.put("h", y)
        kv = rows.last_kv[self.window] if self.shared else rows.kv
        T = rows.h.shape[1]
        distance = torch.arange(T, device=rows.h.device)
        distance = distance[:, None] - distance  # [T, T]
        k, v = kv
        seen = None
        if self.window or self.sinks:
            seen = (distance >= 0) & (distance < (self.window or T))
        if self.sinks:
            sinks = layer.sinks.weight.to(rows.h.dtype)
            k, v, seen = with_sinks(k, v, seen, sinks[:, None].expand(-1, T))
        y = F.scaled_dot_product_attention(
            rows.h.transpose(1, 2),
            k,
            v,
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.scale or None,
            enable_gqa=True,
        )  # [B, H, T, E]
        last_kv = (rows.last_kv or {}) | {self.window: kv}
        return replace_fields(rows, h=y.transpose(1, 2).flatten(2), last_kv=last_kv)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        weights = (layer.sinks.weight,) if self.sinks else ()
        return CppStep("attend", weights=weights, counts=(self.window,), numbers=(self.scale,))


class Convolution(nn.Module):
    """The weight of a convolution of each channel by itself."""

    def __init__(self, channels: int, taps: int = TAPS):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps))


class DecayGates(nn.Module):
    """The two numbers of each head that the decay of its state follows from."""

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

    def parameters(self) -> tuple[str, ...]:
        return ("conv.weight", "decay.A_log", "decay.dt_bias", "state_norm.weight")

    def weights(self, layer: nn.Module) -> DeltaWeights:
        """Return the operands of the recurrence."""
        gates = torch.stack((layer.decay.A_log, layer.decay.dt_bias)).float()
        return DeltaWeights(
            layer.conv.weight[:, 0], gates, layer.state_norm.weight, self.eps, self.tiled
        )

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        y = layer.backend.delta_rule(rows.h, *state_of(rows, self.shape), self.weights(layer))
        return rows.put("h", y)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        conv, gates, gain, eps, tiled = self.weights(layer)
        weights = (conv.float().T.contiguous(), gates, gain.float())
        return CppStep("delta_rule", weights=weights, counts=(int(tiled),), numbers=(eps,))


@dataclass(frozen=True)
class ShortConv(Step):
    """Run a gated convolution over the projections in `h`, [B, T, 3 F]: `Backend.short_conv`.

    Writes: the layer's state, if there is a cache.
    """

    shape: StateShape
    taps: int  # at most `TAPS`

    def modules(self) -> dict[str, nn.Module]:
        return {"conv": Convolution(self.shape.channels, self.taps)}

    def parameters(self) -> tuple[str, ...]:
        return ("conv.weight",)

    def weight(self, layer: nn.Module) -> Tensor:
        """Return the weight with zeros for the taps that it lacks: [F, TAPS]."""
        return F.pad(layer.conv.weight[:, 0], (TAPS - self.taps, 0))

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        state = state_of(rows, self.shape)
        return rows.put("h", layer.backend.short_conv(rows.h, *state, self.weight(layer)))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("short_conv", weights=(self.weight(layer).float().T.contiguous(),))


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


@dataclass(frozen=True)
class Add(Step):
    """Add the result to the residual stream."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("stream", (rows.stream + rows.h).to(rows.stream.dtype))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("add", "h", "stream", counts=(REGISTERS.index("stream"),))


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

    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("stream", rows.stream * getattr(layer, self.name).weight)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        factor = getattr(layer, self.name).weight
        return CppStep("scale", "stream", "stream", (factor.float(),))


# ------------------------------------------------------------------------------------- feed-forward


@dataclass(frozen=True)
class Gate(Step):
    """Multiply the activation of the first half of every row of `h` by the second half."""

    activation: str = "silu"  # or gelu_tanh

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        backend = layer.backend
        gate = backend.swiglu if self.activation == "silu" else backend.geglu
        return rows.put("h", gate(rows.h))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep(self.activation)


@dataclass(frozen=True)
class ClampedGate(Step):
    """Do as `Gate`, with bounded halves: `clamped_swiglu` of reference.py."""

    alpha: float
    limit: float

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", layer.backend.clamped_swiglu(rows.h, self.alpha, self.limit))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("clamped_swiglu", numbers=(self.alpha, self.limit))


class Router(nn.Module):
    """The ranking of the experts of each token. Source: Mixtral (arXiv 2401.04088), section 2.1."""

    backend: Backend = TORCH

    def __init__(self, step: Route):
        super().__init__()
        self.chosen = step.chosen
        self.norm_topk = step.norm_topk
        self.score_scale = step.score_scale
        self.weight = nn.Parameter(torch.zeros(step.experts, step.dim))
        self.bias = nn.Parameter(torch.zeros(step.experts)) if step.bias else None
        self.expert_scale = nn.Parameter(torch.ones(step.experts)) if step.expert_scale else None

    def logits(self, x: Tensor) -> Tensor:  # [..., F] -> [..., E] fp32
        return self.backend.router_logits(x, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the best experts of each token, best first; of equal ones the first.

        Returns: the experts, [..., J] int64; their routing weights, [..., J] fp32.
        """
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


class SigmoidRouter(Router):
    """The ranking of experts by a score of each alone. Source: DeepSeek-V3 (arXiv 2412.19437), 2.1.

    The correction decides which experts are chosen, and is no part of their routing weights.
    """

    def __init__(self, step: Route):
        super().__init__(step)
        self.share_scale = step.share_scale
        self.share_eps = step.share_eps
        self.e_score_correction_bias = nn.Parameter(torch.zeros(step.experts))  # always in fp32

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
class Route(Step):
    """Choose each token's experts, and repeat its row in `h` for each of them: [B, T, F] -> [P, F].

    P = B T J: a token's experts in order.
    """

    dim: int
    experts: int
    chosen: int  # J
    norm_topk: bool = True  # the routing weights of the chosen add up to 1
    name: str = "router"
    bias: bool = False
    source: str = "h"  # the rows that experts are chosen by
    score_scale: float = 1.0
    expert_scale: bool = False  # each expert's share has a learned factor
    sigmoid: bool = False  # of each score, with a correction, in place of a softmax
    share_scale: float = 1.0  # factor of the routing weights by sigmoids
    share_eps: float = 1e-20  # added to their sum before it divides them

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: SigmoidRouter(self) if self.sigmoid else Router(self)}

    def parameters(self) -> tuple[str, ...]:
        has = {"weight": True, "bias": self.bias, "expert_scale": self.expert_scale}
        has |= {"e_score_correction_bias": self.sigmoid}
        return tuple(f"{self.name}.{kind}" for kind in has if has[kind])

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        expert, share = getattr(layer, self.name)(getattr(rows, self.source))  # [B, T, J]
        repeated = rows.h.flatten(0, 1).repeat_interleave(self.chosen, 0)
        routing = layer.backend.route(expert.flatten(), self.experts)
        return replace_fields(rows, h=repeated, routing=routing, share=share)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        router = getattr(layer, self.name)
        bias = router.e_score_correction_bias.float() if self.sigmoid else router.bias
        weights = (router.weight, bias, router.expert_scale)
        counts = (self.chosen, int(self.norm_topk), int(self.sigmoid))
        by_sigmoids = (self.share_scale, self.share_eps)
        numbers = by_sigmoids if self.sigmoid else (self.score_scale,)
        return CppStep("route", self.source, "h", weights, counts, numbers)


@dataclass(frozen=True)
class Merge(Step):
    """Add up the experts of each token by their routing weights: [P, F] -> [B, T, F]."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        each = rows.h.view(*rows.share.shape, -1).float() * rows.share[..., None]  # [B, T, J, F]
        # always summed in the router's order, whichever rows shared an expert
        return rows.put("h", sum(each.unbind(2)).to(rows.h.dtype))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("merge")


@dataclass(frozen=True)
class AddShared(Step):
    """Add the result that waits in `shared`, as that of the expert that all tokens share."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", rows.h + rows.shared)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("add", "h", "h", counts=(REGISTERS.index("shared"),))


# ----------------------------------------------------------------------------- inputs of all layers


@dataclass(frozen=True)
class LookUp(Step):
    """Read the tokens' rows of an embedding."""

    name: str
    vocab: int
    dim: int
    scale: float
    to: str

    def modules(self) -> dict[str, nn.Module]:
        # not `nn.Embedding` itself, as normal_ on the meta device would import all of torch.compile
        zeros = torch.zeros(self.vocab, self.dim)
        return {self.name: nn.Embedding.from_pretrained(zeros, freeze=False)}

    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        x = to_stream_dtype(getattr(layer, self.name)(rows.tokens))
        return rows.put(self.to, x * self.scale)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        operands = embedding_operands(getattr(layer, self.name))
        return CppStep("look_up", to=self.to, weights=operands, numbers=(self.scale,))


@dataclass(frozen=True)
class GatePerLayer(Step):
    """Multiply the GELU of `h`, [B, T, P], by the layer's own part of `per_layer`, and take it off.

    C++ counts layers and leaves `per_layer` whole.
    """

    width: int  # P

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        own, rest = rows.per_layer.tensor_split((self.width,), -1)
        h = layer.backend.geglu(torch.cat((rows.h, own), -1))
        return replace_fields(rows, h=h, per_layer=rest)

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("gate_per_layer", counts=(self.width,))


# ---------------------------------------------------------------------------- inputs of draft heads


@dataclass(frozen=True)
class Copy(Step):
    """Copy a register."""

    source: str
    to: str

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put(self.to, getattr(rows, self.source))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("copy", self.source, self.to)


@dataclass(frozen=True)
class Columns(Step):
    """Take the columns of `features` from `first` on, in the dtype of the residual stream."""

    first: int = 0

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", to_stream_dtype(rows.features[..., self.first :]))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("columns", "features", counts=(self.first,))


@dataclass(frozen=True)
class Beside(Step):
    """Put the rows of two registers side by side: [B, T, F] each -> [B, T, 2 F]."""

    left: str
    right: str

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", torch.cat((getattr(rows, self.left), getattr(rows, self.right)), -1))

    def for_cpp(self, layer: nn.Module) -> CppStep:
        return CppStep("beside", self.left, counts=(REGISTERS.index(self.right),))


def to_stream_dtype(x: Tensor) -> Tensor:
    """Return rows in the dtype of the residual stream: fp32 for bf16 on a CPU, else their own.

    Rows are small beside weights, so a CPU reads all of them in fp32 at no cost, and rounds only
    what it keeps: keys, values and features. On CUDA rows keep 16 bits.
    """
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x
