"""The places of a small model's numbers in a larger one that computes the same (stand_in.py).

    recipes = recipes_of([*zip(small.layer(i), large.layer(i))])
    recipes["wo.weight"][0].make(out, numbers)  # out: full of filler

1. A tensor of the stand-in is full of random numbers (the filler), but where the small model's
   numbers have their places. Where filler would make a required zero nonzero, its column is set to
   zero. All other filler stays: no matmul is timed on zero weights.
2. The places follow from the steps that an architecture's list is made of (`recipes_of`). Only a
   new kind of step with weights needs a case there.

Not here: embedding, LM head and fc of a head, files (stand_in.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from files.eagle_variants import PartNorm
from options import part_or
from steps import Attend, Gate, Norm, Project, Rotate, Route, Step

# steps of the folder models/; (): it is not here, and no step is one of them
GeluGate, HeadNorm, OffsetNorm, SplitGate, WindowAttend = (
    part_or("step", name, ())
    for name in ("GeluGate", "HeadNorm", "OffsetNorm", "SplitGate", "WindowAttend")
)
GATES = (Gate, GeluGate)

# writes a tensor, its first argument, with that of the small model, if there is one
Writer = Callable[[Tensor, Tensor | None], None]
# a step of the small model, and the same of the large one
Pair = tuple[Step, Step]
# (index, value): numbers of a tensor that read or write the constant channel
Cells = Sequence[tuple[tuple, float]]

# How the stand-in computes the same. (d, e: width and head size of the small model; D, E: of the
# large one.)
#
# 1. The residual stream holds the small model in channels 0 .. d-1, a constant C in channel d, and
#    zeros above. There RMSNorm's mean is smaller by d/D. A norm weight times sqrt(d/D), and
#    eps' = (eps d - C^2) / D, undo that. Norms of queries and keys need eps e/E, and get eps'.
# 2. RoPE turns the pairs (j, j + E/2). Pair j of the small head becomes pair j E/e, which turns as
#    fast. Where the scale of the scores is E^-0.5, q or its norm's weight is multiplied by
#    sqrt(E/e). Values keep their order. KV heads are repeated where the large groups are smaller.
# 3. Further heads, further neurons, and the further layers between the small model's compute on
#    their actual inputs. Their values and gates are zero, whose activation is zero, so that they
#    add exactly zero. A mixture has the small model's experts.
# 4. Ids beyond the small vocabulary get logits of about -3000 (float16: -300). Their rows of the LM
#    head read channel d. The final norm amplifies that channel; in a head, which has no final norm,
#    a further neuron of the last layer does.
#
# Filler is smaller than the largest of the small model's numbers in its row. So plain symmetric
# int8 (scaled by row) and int4 (by 128 inputs) find the same codes; in o_proj, whose heads are E
# apart, those of groups of e.
#
# In bf16, where D/d and E/e are powers of four, scaling is exact, and C^2 vanishes in the fp32 sum
# of a norm. The logits are then equal bit for bit, but of models with norms of queries and keys, or
# of results, for their eps, or with norm weights that count from one. The zeros of item 2 must
# change no sum of attention. They change none where terms are added one after the other, as in
# backends/cpu. They change some in oneMKL with AVX512-BF16 or AMX, which PyTorch's attention uses
# on Intel processors; there the logits agree up to rounding.


class Outputs(NamedTuple):
    """The rows of a weight, or the numbers of a vector."""

    small: int
    large: int
    to: Tensor  # [R] int64, large places of the small model's rows
    source: Tensor  # [R] int64, the row of each place; a row may be repeated
    gain: float = 1.0  # factor of the numbers
    mute: bool = False  # a further layer has zeros here


class Inputs(NamedTuple):
    """The columns of a weight: heads, or one block of all of them."""

    small: tuple[int, int]  # blocks, and columns of each
    large: tuple[int, int]
    to: Tensor  # [K] int64, large places of the small model's columns
    # leading blocks, and leading columns of each, whose inputs are not all zero
    reached: tuple[int, int]


def leading_outputs(small: int, large: int, gain: float = 1.0, mute: bool = False) -> Outputs:
    """Return rows that keep their places."""
    places = torch.arange(small)
    return Outputs(small, large, places, places, gain, mute)


def leading_inputs(small: int, large: int, reached: int) -> Inputs:
    """Return columns that keep their places. reached: leading columns with inputs beside zero"""
    return Inputs((1, small), (1, large), torch.arange(small), (1, reached))


def channels(small: int, large: int) -> Inputs:
    """Return the columns that read the residual stream: its numbers and the constant."""
    return leading_inputs(small, large, small + 1)


class Heads(NamedTuple):
    """The places of the heads of attention."""

    small: Rotate
    large: Rotate
    gain: float  # of queries

    @staticmethod
    def of(steps: Sequence[Pair]) -> Heads:
        """Read the heads from the steps of a layer."""
        small, large = next(pair for pair in steps if isinstance(pair[0], Rotate))
        attention = next(pair for pair in steps if isinstance(pair[0], Attend))
        # the divisor of the scores, squared
        before, after = (
            attend.scale**-2 if isinstance(attend, WindowAttend) and attend.scale else rope.head_dim
            for attend, rope in zip(attention, (small, large))
        )
        return Heads(small, large, math.sqrt(after / before))

    @property
    def large_group(self) -> int:
        """Number of large heads with one KV head."""
        return self.large.heads // self.large.kv_heads

    @property
    def copies(self) -> int:
        """Number of large KV heads that repeat a small one."""
        return math.ceil(self.small.heads // self.small.kv_heads / self.large_group)

    def kv_heads(self) -> Tensor:
        """Return the small KV head of each of the first large ones: [copies Hkv] int64."""
        return torch.arange(self.small.kv_heads).repeat_interleave(self.copies)

    def q_heads(self) -> Tensor:
        """Return the large head of each small one, in the group of a copy of its own KV head.

        Returns: [H] int64.
        """
        group = self.small.heads // self.small.kv_heads
        head = torch.arange(self.small.heads)
        kv_head = head // group
        member = head % group
        copy = kv_head * self.copies + member // self.large_group
        return copy * self.large_group + member % self.large_group

    def rotary(self, gain: float = 1.0) -> Outputs:
        """Return the places of the elements of a rotated head."""
        step = self.large.head_dim // self.small.head_dim
        pairs = torch.arange(self.small.head_dim // 2) * step
        to = torch.cat((pairs, self.large.head_dim // 2 + pairs))
        source = torch.arange(self.small.head_dim)
        return Outputs(self.small.head_dim, self.large.head_dim, to, source, gain)

    def queries(self, gain: float) -> Outputs:
        """Return the rows of the projection of queries."""
        small = self.small.heads * self.small.head_dim
        large = self.large.heads * self.large.head_dim
        to = self._rows(self.q_heads(), self.rotary().to)
        return Outputs(small, large, to, torch.arange(small), gain)

    def keys(self) -> Outputs:
        """Return the rows of the projection of keys."""
        return self._of_kv_heads(self.rotary().to, mute=False)

    def values(self) -> Outputs:
        """Return the rows of the projection of values."""
        return self._of_kv_heads(torch.arange(self.small.head_dim), mute=True)

    def _of_kv_heads(self, places: Tensor, mute: bool) -> Outputs:
        e = self.small.head_dim
        heads = self.kv_heads()
        to = self._rows(torch.arange(len(heads)), places)
        source = (heads[:, None] * e + torch.arange(e)).flatten()
        large = self.large.kv_heads * self.large.head_dim
        return Outputs(self.small.kv_heads * e, large, to, source, mute=mute)

    def attended(self) -> Inputs:
        """Return the columns of the projection of the heads' results."""
        e = self.small.head_dim
        to = self._rows(self.q_heads(), torch.arange(e))
        small = (self.small.heads, e)
        large = (self.large.heads, self.large.head_dim)
        return Inputs(small, large, to, (len(self.kv_heads()) * self.large_group, e))

    def _rows(self, heads: Tensor, places: Tensor) -> Tensor:
        return (heads[:, None] * self.large.head_dim + places).flatten()


# ----------------------------------------------------------------------------------------- writers


def write_matrix(out: Tensor, small: Tensor | None, outputs: Outputs, inputs: Inputs) -> None:
    """Write a weight into filler. small: fp64, None in a further layer. Writes: out."""
    if small is None and not outputs.mute:
        return
    blocks, columns = inputs.reached
    out.unflatten(1, inputs.large)[:, :blocks, :columns] = 0
    if small is None:
        return
    rows = small[outputs.source] * outputs.gain  # [R, K]
    # of the rows' blocks: none has a smaller maximum
    largest = rows.abs().unflatten(1, inputs.small).amax(2).amin(1)  # [R]
    out[outputs.to] *= _limit(out, largest)[:, None]
    out[outputs.to[:, None], inputs.to] = rows.to(out.dtype)


def write_beside(
    out: Tensor, small: Tensor, outputs: Outputs, inputs: Inputs, gains: tuple[float, float]
) -> None:
    """Write a weight of two rows of the residual stream, side by side. Writes: out."""
    for block, numbers, gain in zip(out.chunk(2, 1), small.chunk(2, 1), gains):
        write_matrix(block, numbers * gain, outputs, inputs)


def write_norm(out: Tensor, small: Tensor | None, outputs: Outputs, one: int) -> None:
    """Write the weight of a norm into filler. one: where it counts from. Writes: out."""
    if small is not None:
        gain = outputs.gain * math.sqrt(outputs.small / outputs.large)
        weights = (one + small[outputs.source]) * gain - one
        out[outputs.to] = weights.to(out.dtype)


def write_bias(out: Tensor, small: Tensor | None, outputs: Outputs) -> None:
    """Write a bias without filler, which would enter sums. Writes: out."""
    out.zero_()
    if small is not None:
        out[outputs.to] = (small[outputs.source] * outputs.gain).to(out.dtype)


def filler_bound(size: tuple[int, ...]) -> float:
    """Return the largest number of filler: it is uniform, of variance 1 / inputs."""
    return math.sqrt(3 / size[-1])


def _limit(out: Tensor, largest: Tensor) -> Tensor:
    """Return factors that make filler smaller than `largest`, [R], to keep quantization scales."""
    # 0.98: bf16 rounds the bound, the factor and the product by up to 0.4 % each
    return (0.98 * largest / filler_bound(out.shape)).clamp(max=1).to(out.dtype)


# ----------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class TensorRecipe:
    """The computation of one tensor of the stand-in."""

    size: tuple[int, ...]
    small_size: tuple[int, ...]
    make: Writer
    source: str | None = None  # name of the small model's tensor; None in a further layer
    cells: Cells = ()


def matrix(outputs: Outputs, inputs: Inputs) -> TensorRecipe:
    """Return the recipe of a weight."""
    size = (outputs.large, math.prod(inputs.large))
    small_size = (outputs.small, math.prod(inputs.small))
    make = partial(write_matrix, outputs=outputs, inputs=inputs)
    return TensorRecipe(size, small_size, make)


def vector(write: Callable, outputs: Outputs, **options: Any) -> TensorRecipe:
    """Return the recipe of a norm's weight or of a bias."""
    make = partial(write, outputs=outputs, **options)
    return TensorRecipe((outputs.large,), (outputs.small,), make)


def recipes_of(steps: Sequence[Pair]) -> dict[str, list[TensorRecipe]]:
    """Return the recipes of a list of steps: of the tensors that each parameter is made of.

    Raises: ValueError for a step whose weights have no places.
    """
    for small, _ in steps:
        has_places = isinstance(small, (Norm, HeadNorm, Route, Project))
        has_places = has_places and not isinstance(small, PartNorm)
        if not has_places and (small.parameters() or isinstance(small, SplitGate)):
            raise ValueError(
                f"models with a step {type(small).__name__} have no stand-ins; use another model, "
                "or add the places of its weights to `recipes_of` (drafts/places.py)"
            )
    recipes = {}
    for i, (small, large) in enumerate(steps):
        if isinstance(small, Norm):
            outputs = leading_outputs(small.dim, large.dim)
            counts_from_one = isinstance(small, OffsetNorm)
            recipes[f"{small.name}.weight"] = [
                vector(write_norm, outputs, one=int(counts_from_one))
            ]
        elif isinstance(small, HeadNorm):
            heads = Heads.of(steps)
            for name, gain in (("q_norm", heads.gain), ("k_norm", 1.0)):
                outputs = heads.rotary(gain)
                recipes[f"{name}.weight"] = [vector(write_norm, outputs, one=int(small.plus_one))]
        elif isinstance(small, Route) and len(small.parameters()) == 1:
            outputs = leading_outputs(small.experts, large.experts)
            recipes[f"{small.name}.weight"] = [matrix(outputs, channels(small.dim, large.dim))]
        elif isinstance(small, Project):
            parts = projection_outputs(steps, i)
            inputs = projection_inputs(steps, i)
            weights = [matrix(part, inputs) for part in parts]
            recipes[f"{small.name}.weight"] = weights * (small.experts or 1)
            if small.bias:
                recipes[f"{small.name}.bias"] = [vector(write_bias, part) for part in parts]
    return recipes


def projection_outputs(steps: Sequence[Pair], i: int) -> list[Outputs]:
    """Return the rows of the parts of projection i, by the step that reads them."""
    small, large = steps[i]
    if small.row_parallel:  # its result is added to the residual stream
        return [leading_outputs(small.outputs, large.outputs)]
    reader = next(step for step, _ in steps[i:] if isinstance(step, (Rotate, *GATES)))
    if isinstance(reader, GATES):
        neurons = (small.outputs // 2, large.outputs // 2)
        return [leading_outputs(*neurons, mute=True), leading_outputs(*neurons)]
    heads = Heads.of(steps)
    is_normed = any(isinstance(step, HeadNorm) for step, _ in steps)
    return [heads.queries(1.0 if is_normed else heads.gain), heads.keys(), heads.values()]


def projection_inputs(steps: Sequence[Pair], i: int) -> Inputs:
    """Return the columns of projection i, by the step whose result it reads."""
    small, large = steps[i]
    writers = (step for step, _ in reversed(steps[:i]) if isinstance(step, (Norm, Attend, *GATES)))
    writer = next(writers)
    if isinstance(writer, Attend):
        return Heads.of(steps).attended()
    if isinstance(writer, GATES):
        return leading_inputs(small.inputs, large.inputs, small.inputs)
    return channels(small.inputs, large.inputs)
