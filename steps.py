"""The steps that a layer is made of, each with its weights and five lines of PyTorch.

    for step in (Norm(...), Project("wqkv", ...), Rotate(...), Attend(), Project("wo", ...), Add()):
        rows = step.run(layer, rows)

1. A layer is a list of steps, which its architecture makes once (model.py); so is a draft head. A
   step is a record: it names its weights and holds sizes, and no tensor.
2. A step reads a register of `Rows` and writes another. Most read and write `h`, the result of the
   step before; `stream` is the residual stream.
3. `run` is the reference, and what runs where nothing faster does. A backend may run whole lists
   (backends/cpp/steps.py describes them to C++).

Here are the steps of LLaMA, Mixtral and EAGLE. Those of other families are in models/steps.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache import Window
from quantize import Linear
from reference import TORCH, Backend
from runtime import replace_fields


class Rows(NamedTuple):
    """The numbers of T tokens on their way through a list of steps, and what all layers share."""

    stream: Tensor | None = None  # [B, T, F], the residual stream
    h: Any = None  # the result of the step before
    # by `Rotate.rope`: cosines and sines, [B, T, 1, E] fp32 each
    ropes: tuple[tuple[Tensor, Tensor], ...] = ()
    # this layer's buffers, [B, Hkv, S, E] each, or its state; without a cache the keys and values
    # of these tokens
    kv: tuple[Tensor, ...] | None = None
    # by `Attend.window`: the slots that are written and seen; None: no cache, attention is causal
    windows: dict[int, Window] | None = None
    named: dict[str, Any] = {}  # further registers, which the steps that use them declare

    def get(self, register: str) -> Any:
        """Return the value of a register."""
        return self.named[register] if register in self.named else getattr(self, register)

    def put(self, register: str, value: Any) -> Rows:
        """Return these rows with another value in a register."""
        if register in self._fields:
            return replace_fields(self, **{register: value})
        return replace_fields(self, named=self.named | {register: value})


class Step:
    """One operation of a layer. Subclasses are frozen dataclasses: equal lists are equal."""

    source = "h"
    to = "h"
    norms_heads = False  # it norms queries and keys, as a rotation may (`reference.HeadNorms`)

    def modules(self) -> dict[str, nn.Module]:
        """Make the modules that hold the step's weights, by their names in the layer."""
        return {}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        """Run the step with PyTorch. Writes: at most the cache.

        layer: holds the weights, and a backend
        """
        raise NotImplementedError


@cache  # the layers of a model have equal steps
def parameters_of(step: Step) -> tuple[str, ...]:
    """Return the names of the parameters in a step's modules."""
    with torch.device("meta"):
        modules = nn.ModuleDict(step.modules())
    return tuple(name for name, _ in modules.named_parameters())


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


def to_stream_dtype(x: Tensor) -> Tensor:
    """Return rows in the dtype of the residual stream: fp32 for bf16 on a CPU, else their own.

    Rows are small beside weights, so a CPU reads all of them in fp32 at no cost, and rounds only
    what it keeps: keys, values and features. On CUDA rows keep 16 bits.
    """
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


# -------------------------------------------------------------------------------------------- norms


class RMSNorm(nn.Module):
    """The weight of a root-mean-square norm."""

    backend: Backend = TORCH

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    @property
    def gain(self) -> Tensor:
        """The factors of a normed row, [F]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., F]
        return self.backend.rms_norm(x, self.gain, self.eps)


@dataclass(frozen=True)
class Norm(Step):
    """Norm a register: by default the residual stream, for the steps that follow."""

    name: str
    dim: int
    eps: float
    source: str = "stream"
    to: str = "h"

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: RMSNorm(self.dim, self.eps)}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put(self.to, getattr(layer, self.name)(rows.get(self.source)))


# ------------------------------------------------------------------------ projections and attention


@dataclass(frozen=True)
class Project(Step):
    """Multiply by the weight of a linear layer, or each row by that of its expert, by `routing`."""

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

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        linear_layer = getattr(layer, self.name)
        x = rows.get(self.source)
        y = linear_layer(x, rows.get("routing")) if self.experts else linear_layer(x)
        return rows.put(self.to, y)


@dataclass(frozen=True)
class Rotate(Step):
    """Apply RoPE to the queries and keys in `h`, [B, T, (H + 2 Hkv) E], and keep keys and values.

    Writes: keys and values at the slots of the cache, if there is one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int = 0  # which of the model's (`ModelConfig.ropes`)

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        qkv = rows.h.unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 Hkv, E]
        rope = rows.ropes[self.rope]
        if rows.windows is not None:
            slots = rows.windows[0].slots
            q = layer.backend.rotary_cache(qkv, rope, *rows.kv, slots)  # [B, T, H, E]
            return rows.put("h", q)
        # [B, T, H, E], [B, T, Hkv, E]
        q, k = layer.backend.rotary(qkv, rope, self.heads, self.kv_heads)
        v = qkv[:, :, -self.kv_heads :]
        return replace_fields(rows, h=q, kv=(k.transpose(1, 2), v.transpose(1, 2)))


@dataclass(frozen=True)
class Attend(Step):
    """Attend from the queries in `h`, [B, T, H, E]: grouped-query attention, [B, T, H E]."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        if rows.windows is None:
            q = rows.h.transpose(1, 2)
            y = F.scaled_dot_product_attention(q, *rows.kv, is_causal=True, enable_gqa=True)
            return rows.put("h", y.transpose(1, 2).flatten(2))  # of [B, H, T, E]
        window = rows.windows[0]
        seen = (window.start, window.mask)
        return rows.put("h", layer.backend.attention(rows.h, *rows.kv, *seen, paths=window.paths))


@dataclass(frozen=True)
class Add(Step):
    """Add the result to the residual stream."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("stream", (rows.stream + rows.h).to(rows.stream.dtype))


# ------------------------------------------------------------------------------------- feed-forward


@dataclass(frozen=True)
class Gate(Step):
    """Multiply the SiLU of the first half of every row of `h` by the second half."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", layer.backend.swiglu(rows.h))


class Router(nn.Module):
    """The ranking of the experts of each token. Source: Mixtral (arXiv 2401.04088), section 2.1."""

    backend: Backend = TORCH

    def __init__(self, step: Route):
        super().__init__()
        self.chosen = step.chosen
        self.weight = nn.Parameter(torch.zeros(step.experts, step.dim))

    def logits(self, x: Tensor) -> Tensor:  # [..., F] -> [..., E] fp32
        return self.backend.router_logits(x, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the best experts of each token, best first; of equal ones the first.

        Returns: the experts, [..., J] int64; their routing weights, [..., J] fp32.
        """
        best, expert = self.logits(x).sort(dim=-1, descending=True, stable=True)
        return expert[..., : self.chosen], best[..., : self.chosen].softmax(-1)


@dataclass(frozen=True)
class Route(Step):
    """Choose each token's experts, and repeat its row in `h` for each of them: [B, T, F] -> [P, F].

    P = B T J: a token's experts in order. It writes `routing`, from `Backend.route`, and `share`,
    [B, T, J] fp32, the routing weights.
    """

    dim: int
    experts: int
    chosen: int  # J
    source: str = "h"  # the rows that experts are chosen by
    name: str = "router"

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: Router(self)}

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        expert, share = getattr(layer, self.name)(rows.get(self.source))  # [B, T, J]
        repeated = rows.h.flatten(0, 1).repeat_interleave(self.chosen, 0)
        routing = layer.backend.route(expert.flatten().contiguous(), self.experts)
        return rows.put("h", repeated).put("routing", routing).put("share", share)


@dataclass(frozen=True)
class Merge(Step):
    """Add up the experts of each token by their `share`: [P, F] -> [B, T, F]."""

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        share = rows.get("share")
        each = rows.h.view(*share.shape, -1).float() * share[..., None]  # [B, T, J, F]
        # always summed in the router's order, whichever rows shared an expert
        return rows.put("h", sum(each.unbind(2)).to(rows.h.dtype))


# ---------------------------------------------------------------------------- inputs of draft heads


@dataclass(frozen=True)
class Copy(Step):
    """Copy a register."""

    source: str
    to: str

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put(self.to, rows.get(self.source))


@dataclass(frozen=True)
class Columns(Step):
    """Take the columns of `features` from `first` on, in the dtype of the residual stream."""

    first: int = 0

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", to_stream_dtype(rows.get("features")[..., self.first :]))


@dataclass(frozen=True)
class Beside(Step):
    """Put the rows of two registers side by side: [B, T, F] each -> [B, T, 2 F]."""

    left: str
    right: str

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", torch.cat((rows.get(self.left), rows.get(self.right)), -1))
