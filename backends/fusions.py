"""Merge neighbours in a list of steps that CUDA runs in one launch (backends/epilogues.py).

1. A projection and the work behind it are one kernel: rotation and cache, gate, residual sum and
   norm. `fuse` finds them in a list; what it leaves runs as it was.
2. The norm that a layer begins with follows the sum that the layer before ends with. So lists are
   cut behind that norm: a `Segment` is a layer without its first norm, and with the next one's.
3. An RMSNorm may leave its division to the projection that reads it: backends/epilogues.py says
   when.

On other devices the merged steps compute what their parts do, and gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from backends import epilogues
from backends.epilogues import LazyMatmul, UnnormalizedRows, lazy_of, run_lazily
from eagle_draft import EagleHead, HeadPasses
from kv_cache import KVCache, Window
from model import Transformer, run_layers
from runtime import replace_fields
from steps import Add, Gate, Norm, Project, Rotate, Rows, Step, run_steps

# the names of the next layer's norm and of the projection that reads it, in a segment
NEXT_NORM = "next_norm"
NEXT_READER = "next_reader"


@dataclass(frozen=True)
class ProjectRotate(Step):
    """A projection to queries, keys and values, their norms if there are any, and `Rotate`."""

    project: Project
    head_norm: Step | None  # that `norms_heads`
    rotate: Rotate

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        if rows.windows is None or not layer.backend.merges_steps:
            parts = [self.project, self.head_norm, self.rotate]
            return run_steps(filter(None, parts), layer, rows)
        qkv = run_lazily(getattr(layer, self.project.name), rows.get(self.project.source))
        if isinstance(qkv, Tensor):
            qkv = qkv.unflatten(-1, (-1, self.rotate.head_dim))  # [B, T, H + 2 Hkv, E]
        norms = None
        if self.head_norm:
            norms = (layer.q_norm.gain, layer.k_norm.gain, self.head_norm.eps)
        places = (*rows.kv, rows.windows[0].slots)
        q = layer.backend.rotary_cache(qkv, rows.ropes[self.rotate.rope], *places, norms)
        return rows.put("h", q)


@dataclass(frozen=True)
class ProjectGate(Step):
    """A projection and SwiGLU."""

    project: Project

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        both = run_lazily(getattr(layer, self.project.name), rows.h)
        return rows.put("h", layer.backend.swiglu(both))


@dataclass(frozen=True)
class AddNorm(Step):
    """The residual sum, of a projection if there is one, and the norm of its result."""

    project: Project | None
    norm: Norm
    reader: str  # the projection that reads the norm; "": another step does

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        delta = rows.h
        if self.project:
            delta = run_lazily(getattr(layer, self.project.name), delta)
        return add_norm(layer, rows, delta, self.norm, self.reader)


@dataclass(frozen=True)
class ProjectAdd(Step):
    """A projection and the residual sum."""

    project: Project

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        delta = run_lazily(getattr(layer, self.project.name), rows.h)
        return rows.put("stream", epilogues.add(rows.stream, delta))


@dataclass(frozen=True)
class FirstNorm(Step):
    """The norm of the residual stream, before the first sum."""

    norm: Norm
    reader: str

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return add_norm(layer, rows, None, self.norm, self.reader)


def add_norm(
    layer: nn.Module, rows: Rows, delta: Tensor | LazyMatmul | None, norm: Norm, reader: str
) -> Rows:
    """Add to the residual stream, and norm the sum, as the projection `reader` takes it."""
    x = rows.stream
    backend = layer.backend
    operands = (getattr(layer, norm.name).gain, norm.eps)
    # in fp16, x w may overflow
    if reader and x.dtype != torch.float16 and lazy_of(getattr(layer, reader), x):
        stream, h = epilogues.add_norm(x, delta, *operands)
    elif isinstance(delta, Tensor) and backend.merges_steps:
        stream, h = backend.add_norm(x, delta, *operands)
    else:
        stream = epilogues.add(x, delta)
        h = backend.rms_norm(stream, *operands)
    return replace_fields(rows, stream=stream, h=h)


def _is_dense(step: Step | None) -> bool:
    """Return whether a step is a projection by one weight, of `h`."""
    return isinstance(step, Project) and not step.experts and step.source == step.to == "h"


def _stores(step: Step | None) -> bool:
    """Return whether a step rotates queries and keys, and keeps keys and values."""
    return isinstance(step, Rotate) and step.kv_heads > 0


def _norms_two(step: Step | None) -> bool:
    """Return whether a step norms queries and keys, and no values."""
    return step is not None and step.norms_heads


def _reader(steps: Sequence[Step]) -> str:
    """Return the name of the projection that the steps begin with, if it can divide by a norm.

    That is one in a launch with what follows it: a rotation, or a gate.
    """
    first, second, third = (*steps[:3], None, None, None)[:3]
    merges = _stores(third) if _norms_two(second) else _stores(second)
    return first.name if _is_dense(first) and (merges or second == Gate()) else ""


def _reads_stream(step: Step | None) -> bool:
    return isinstance(step, Norm) and step.source == "stream" and step.to == "h"


def fuse(steps: Sequence[Step], behind: str) -> tuple[Step, ...]:
    """Merge the neighbours in a segment that one launch runs.

    behind: the projection that reads a norm at the end of the segment; "": another step does
    """
    fused: list[Step] = []
    rest = list(steps)

    def reader(index: int) -> str:
        """Return the name of the projection that reads a norm: the step at this index."""
        return behind if index == len(rest) else _reader(rest[index:])

    while rest:
        step, second, third = (*rest[:3], None, None)[:3]
        merged: tuple[Step, int] = (step, 1)
        if _is_dense(step) and _stores(second):
            merged = (ProjectRotate(step, None, second), 2)
        elif _is_dense(step) and _norms_two(second) and _stores(third):
            merged = (ProjectRotate(step, second, third), 3)
        elif _is_dense(step) and second == Gate():
            merged = (ProjectGate(step), 2)
        elif _is_dense(step) and isinstance(second, Add) and _reads_stream(third):
            merged = (AddNorm(step, third, reader(3)), 3)
        elif _is_dense(step) and isinstance(second, Add):
            merged = (ProjectAdd(step), 2)
        elif isinstance(step, Add) and _reads_stream(second):
            merged = (AddNorm(None, second, reader(2)), 2)
        fused.append(merged[0])
        del rest[: merged[1]]
    return tuple(fused)


class Segment(nn.Module):
    """A layer without its first norm, and with the norm behind it, in merged steps.

    It shares the modules of layer and norm. Segments of one kind have equal steps, so that a
    compiled call serves all of them.
    """

    def __init__(self, layer: nn.Module, next_step: Step, owner: nn.Module, next_layer: nn.Module):
        """Merge the steps of a layer.

        next_step: the first behind the layer; owner: holds its weight; next_layer: the last layer
        has itself
        """
        super().__init__()
        self.backend = layer.backend
        for name, module in layer.named_children():
            self.add_module(name, module)
        steps = list(layer.steps)
        if _reads_stream(steps[0]):
            del steps[0]
        if _reads_stream(next_step):
            self.add_module(NEXT_NORM, getattr(owner, next_step.name))
            steps.append(replace(next_step, name=NEXT_NORM))
        reader = _reader(next_layer.steps[1 if _reads_stream(next_layer.steps[0]) else 0 :])
        behind = NEXT_READER if reader else ""
        if behind:
            self.add_module(behind, getattr(next_layer, reader))
        self.steps = fuse(steps, behind)

    def forward(self, rows: Rows) -> Rows:
        return run_steps(self.steps, self, rows)


class MergedLayers:
    """The layers of a model in segments, with the norms before the first and behind the last."""

    def __init__(self, layers: Sequence[nn.Module], last: Sequence[Step], owner: nn.Module):
        """last: the steps behind all layers; owner: holds their weights"""
        self.layers = layers
        self.last = last
        self.owner = owner
        first, *rest = layers[0].steps
        self.first: Step | None = None  # a draft head's first layer may begin without a norm
        if _reads_stream(first):
            self.first = FirstNorm(first, _reader(rest)) if _reader(rest) else first
        behind = [*((layer.steps[0], layer) for layer in layers[1:]), (last[0], owner)]
        following = [*layers[1:], layers[-1]]
        each = zip(layers, behind, following)
        self.segments = [Segment(layer, *step, next_layer) for layer, step, next_layer in each]

    def begin(self, rows: Rows) -> Rows:
        """Run the norm before the first segment."""
        return self.first.run(self.layers[0], rows) if self.first else rows

    def end(self, rows: Rows) -> Rows:
        """Run what is left of the steps behind the last segment."""
        if isinstance(rows.h, UnnormalizedRows) or not _reads_stream(self.last[0]):
            return run_steps(self.last, self.owner, rows)
        return run_steps(self.last[1:], self.owner, rows)


class MergedModel(MergedLayers):
    """The passes of a `Transformer` over a cache, in place of its layers."""

    in_cpp = False

    def __init__(self, model: Transformer):
        super().__init__(model.layers, model.last, model)
        self.model = model

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        window: Window,
        run_part: Callable,
        aux_layers: tuple[int, ...],
    ) -> Tensor:
        """Do as `Transformer.forward`."""
        rows = self.begin(run_part(self.model.embed, tokens, positions, window))
        rows, aux = run_layers(self.segments, rows, cache, run_part, aux_layers)
        return self.model.features(self.end(rows), aux)


class MergedHead(HeadPasses):
    """The passes of an `EagleHead` over a cache."""

    def __init__(self, head: EagleHead, embedding: nn.Module):
        super().__init__(head, embedding)
        self.merged = MergedLayers(head.layers, head.last, head)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        cache: KVCache,
        window: Window,
    ) -> Tensor:
        """Do as `EagleHead.forward`."""
        rows = self.merged.begin(self.head.start(embedded, features, positions, window))
        rows, _ = run_layers(self.merged.segments, rows, cache)
        return self.merged.end(rows).h.to(self.head.dtype)
