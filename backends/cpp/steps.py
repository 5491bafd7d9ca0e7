"""The steps that C++ runs (layers.cpp), described as it takes them.

A description is found by the name of a step's class, or of one that it extends: the families in
models/ may be missing. A further step needs a row of `DESCRIBED` and one of OPS in layers.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backends.weight import operands_of
from runtime import replace_fields


class CppStep(NamedTuple):
    """A step as C++ takes it; what is left out is 0 or None there."""

    op: str
    source: str = "h"  # a register by its name
    to: str = "h"
    weights: tuple[Tensor | None, ...] = ()  # at most 3
    counts: tuple[int, ...] = ()  # at most 4, with `second`
    numbers: tuple[float, ...] = ()  # at most 2
    second: str = ""  # another register that is read


def describe(step: Any, layer: nn.Module) -> CppStep | None:
    """Describe a step to C++; None where PyTorch has to run it. layer: holds its weights"""
    for kind in type(step).__mro__:
        if kind.__name__ in DESCRIBED:
            return DESCRIBED[kind.__name__](step, layer)
    return None


def embedding_operands(embedding: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return an embedding's weight, [V, F], or its packed blocks; the blocks' table, or None."""
    table = getattr(embedding, "table", None)
    return embedding.weight.detach() if table is None else embedding.data, table


def _norm(step: Any, layer: nn.Module) -> CppStep:
    gain = getattr(layer, step.name).gain
    return CppStep("norm", step.source, step.to, (gain,), numbers=(step.eps,))


def _part_norm(step: Any, layer: nn.Module) -> CppStep:
    counts = (step.part, step.parts)
    return replace_fields(_norm(step, layer), op="part_norm", counts=counts)


def _head_norm(step: Any, layer: nn.Module) -> CppStep:
    of_q = layer.q_norm.gain
    gains = [of_q, layer.k_norm.gain if step.kv_heads else of_q]
    if step.values:
        gains.append(torch.ones_like(of_q))
    counts = (step.heads, step.kv_heads, step.head_dim)
    return CppStep("head_norm", weights=tuple(gains), counts=counts, numbers=(step.eps,))


def _row_norm(step: Any, layer: nn.Module) -> CppStep | None:
    if step.heads != step.kv_heads:  # C++ norms parts of one width
        return None
    counts = (1, 1, step.heads * step.head_dim)
    gains = (layer.q_norm.gain, layer.k_norm.gain)
    return CppStep("head_norm", weights=gains, counts=counts, numbers=(step.eps,))


def _project(step: Any, layer: nn.Module) -> CppStep | None:
    linear_layer = getattr(layer, step.name)
    if linear_layer.packed and not linear_layer.record.in_cpp:
        return None
    counts = (step.outputs, step.experts)
    return CppStep("project", step.source, step.to, operands_of(linear_layer), counts)


def _rotate(step: Any, layer: nn.Module) -> CppStep | None:
    if step.head_dim % 16:
        return None
    return CppStep("rotate", counts=(step.heads, step.kv_heads, step.head_dim, step.rope))


def _split_pairs(step: Any, layer: nn.Module) -> CppStep:
    return CppStep("split_pairs", counts=(step.heads, step.kv_heads, step.head_dim, step.turned))


def _window_attend(step: Any, layer: nn.Module) -> CppStep:
    weights = (layer.sinks.weight,) if step.sinks else ()
    return CppStep("attend", weights=weights, counts=(step.window,), numbers=(step.scale,))


def _delta_rule(step: Any, layer: nn.Module) -> CppStep:
    conv, gates, gain, eps, tiled = step.weights(layer)
    weights = (conv.float().T.contiguous(), gates, gain.float())
    return CppStep("delta_rule", weights=weights, counts=(int(tiled),), numbers=(eps,))


def _short_conv(step: Any, layer: nn.Module) -> CppStep:
    return CppStep("short_conv", weights=(step.weight(layer).float().T.contiguous(),))


def _scale(step: Any, layer: nn.Module) -> CppStep:
    return CppStep("scale", "stream", "stream", (getattr(layer, step.name).weight.float(),))


def _route(step: Any, layer: nn.Module) -> CppStep:
    weights = (getattr(layer, step.name).weight,)
    # the chosen experts' shares add up to 1, and scores are as they are
    return CppStep("route", step.source, "h", weights, (step.chosen, 1), (1.0,))


def _scored_route(step: Any, layer: nn.Module) -> CppStep:
    router = getattr(layer, step.name)
    weights = (router.weight, router.bias, router.expert_scale)
    counts = (step.chosen, int(step.norm_topk))
    return CppStep("route", step.source, "h", weights, counts, (step.score_scale,))


def _sigmoid_route(step: Any, layer: nn.Module) -> CppStep:
    router = getattr(layer, step.name)
    weights = (router.weight, router.e_score_correction_bias.float())
    counts = (step.chosen, int(step.norm_topk), 1)
    numbers = (step.share_scale, step.share_eps)
    return CppStep("route", step.source, "h", weights, counts, numbers)


def _look_up(step: Any, layer: nn.Module) -> CppStep:
    operands = embedding_operands(getattr(layer, step.name))
    return CppStep("look_up", to=step.to, weights=operands, numbers=(step.scale,))


# the name of a class of steps -> (a step, the layer with its weights) -> its description
DESCRIBED: dict[str, Callable[[Any, nn.Module], CppStep | None]] = {
    "Norm": _norm,
    "PartNorm": _part_norm,
    "HeadNorm": _head_norm,
    "RowNorm": _row_norm,
    "Project": _project,
    "Rotate": _rotate,
    "KeysAsValues": lambda s, _: CppStep("keys_as_values", counts=(s.heads * s.head_dim,)),
    "SplitPairs": _split_pairs,
    "SplitGate": lambda s, _: CppStep("split_gate", counts=(s.heads, s.head_dim)),
    "GateOutput": lambda s, _: CppStep("gate_output"),
    "Attend": lambda s, _: CppStep("attend"),
    "WindowAttend": _window_attend,
    "DeltaRule": _delta_rule,
    "ShortConv": _short_conv,
    "Scale": _scale,
    "Add": lambda s, _: CppStep("add", to="stream", second="stream"),
    "AddShared": lambda s, _: CppStep("add", second="shared"),
    "Gate": lambda s, _: CppStep("silu"),
    "GeluGate": lambda s, _: CppStep("gelu_tanh"),
    "ClampedGate": lambda s, _: CppStep("clamped_swiglu", numbers=(s.alpha, s.limit)),
    "GatePerLayer": lambda s, _: CppStep("gate_per_layer", counts=(s.width,)),
    "Route": _route,
    "ScoredRoute": _scored_route,
    "SigmoidRoute": _sigmoid_route,
    "Merge": lambda s, _: CppStep("merge"),
    "LookUp": _look_up,
    "Copy": lambda s, _: CppStep("copy", s.source, s.to),
    "Columns": lambda s, _: CppStep("columns", "features", counts=(s.first,)),
    "Beside": lambda s, _: CppStep("beside", s.left, second=s.right),
}
