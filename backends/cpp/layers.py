"""A forward pass of a model, or of a draft head, in one C++ call on a CPU (layers.cpp).

It runs the same lists of steps as PyTorch does (steps.py), with weights in bfloat16, int8, int4
or GGUF blocks: rows in fp32, bfloat16 in the cache and in features. One call replaces hundreds of
small operators. Other dtypes, gradients, other devices, steps that C++ does not know, and machines
without a C++ compiler are left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backends.cpp.steps import CppStep, describe, embedding_operands

# the names of registers, numbered as in C++
REGISTERS = ("stream", "h", "embedded", "features", "normed", "gate", "shared", "per_layer")
EMPTY = (None, None, None)


# steps with the module that holds their weights, and the number of their layer: -1 before the first
Placed = tuple[Sequence[Any], nn.Module, int]


def missing_step(parts: Sequence[Placed]) -> str:
    """Return the kind of the first step that C++ does not run over registers it has; ""."""
    for steps, owner, _ in parts:
        for step in steps:
            described = describe(step, owner)
            if not described or not {described.source, described.to} <= {*REGISTERS}:
                return type(step).__name__
    return ""


class Program:
    """Steps with their weights, as C++ holds them.

    Weights may change in place afterwards. If a module replaces one by another tensor, the old one
    stays in use.
    """

    def __init__(
        self, parts: Sequence[Placed], embedding: nn.Module, ropes: nn.Module, scale: float = 1.0
    ):
        """Pass all steps to C++. scale: of embeddings"""
        ops: list[str] = []
        counts: list[int] = []
        numbers: list[float] = []
        weights: list[Tensor | None] = []
        for number, step in _described(parts):
            ops.append(step.op)
            registers = [REGISTERS.index(name) for name in (step.source, step.to)]
            of_step = step.counts
            if step.second:
                of_step = (REGISTERS.index(step.second), *of_step)
            counts += [*registers, number, *of_step, *[0] * (4 - len(of_step))]
            numbers += [*step.numbers, *[0.0] * (2 - len(step.numbers))]
            weights += [*step.weights, *EMPTY[len(step.weights) :]]
        held = [None if weight is None else weight.detach() for weight in weights]
        steps = (ops, counts, numbers, held)
        freqs = [*ropes.buffers()]
        self.prepared = torch.ops.gpt_eagle.prepare_steps(
            *steps, *embedding_operands(embedding), scale, freqs, ropes.factors
        )


def _described(parts: Sequence[Placed]) -> Iterator[tuple[int, CppStep]]:
    for steps, owner, number in parts:
        for step in steps:
            yield number, describe(step, owner)


def steps_of(model: nn.Module) -> list[Placed]:
    """Return the steps of a pass of a `Transformer` or an `EagleHead`."""
    layers = [(layer.steps, layer, number) for number, layer in enumerate(model.layers)]
    return [(model.first, model, -1), *layers, (model.last, model, len(layers))]


def steps_of_head(head: nn.Module) -> list[Placed]:
    """Return the steps of an `EagleHead`: those of its inputs, then those of a pass."""
    return [(head.inputs, head, -1), *steps_of(head)]


class FusedModel:
    """The forward pass of a `Transformer`, from tokens to features."""

    in_cpp = True

    def __init__(self, model: nn.Module):
        start = (model.embedding, model.ropes, model.embedding_scale)
        self.program = Program(steps_of(model), *start)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        window: Any,
        run_part: Any,
        aux_layers: tuple[int, ...],
    ) -> Tensor:
        """Run T tokens; arguments as for `Transformer.forward`; no part is called.

        Writes: the cache at `window.slots`.
        Returns: [B, T, (1 + aux_layers) F].
        """
        rows = (tokens, positions, *cache.for_cpp())
        seen = (window.slots, window.start, window.mask, window.kept)
        return torch.ops.gpt_eagle.run_model(self.program.prepared, *rows, *seen, aux_layers)


class FusedHead:
    """The forward passes of an `EagleHead`, in place of `eagle_draft.HeadPasses`."""

    in_cpp = True

    def __init__(self, head: nn.Module, embedding: nn.Module):
        """Pass the head's weights to the operators. embedding: the head's or the target's"""
        inputs, *steps = steps_of_head(head)
        self.inputs = Program([inputs], embedding, head.ropes)
        self.program = Program(steps, embedding, head.ropes)

    def step(self, level: Any, out: Tensor, positions: Tensor, cache: Any, window: Any) -> Tensor:
        """Run the nodes of a level; arguments as for `TreeDrafter.forward_nodes`.

        Writes: the cache at `window.slots`.
        Returns: [B, R, F].
        """
        rows = (level.tokens, out, level.parent, positions)
        places = (window.slots, window.start, window.mask)
        prepared = self.program.prepared
        return torch.ops.gpt_eagle.head_step(prepared, *rows, cache.k, cache.v, *places)

    def extend(self, state: Any, rows: Any) -> tuple[Tensor, Tensor]:
        """Process accepted tokens as `EagleDrafter.extend` does.

        Writes: the cache.
        Returns: hidden [B, 1, F]; length [B].
        """
        inputs = (rows.tokens, rows.features, rows.count, state.length, state.hidden)
        programs = (self.program.prepared, self.inputs.prepared)
        return torch.ops.gpt_eagle.head_extend(*programs, *inputs, state.cache.k, state.cache.v)
