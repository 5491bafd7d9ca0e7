"""The layouts of all devices share these: zero points, groups, plain matmuls, embeddings.

strips.py has the layouts of a CPU, planes.py those of CUDA; `Weight` stands in the place of
`quantize.Codes`. On a CPU rows beside codes are rounded to 8 bits, outliers to 15 (with K types
13), with a scale per row and block of K, and all dot products are in integers. On CUDA a row keeps
16 bits. A row's result does not depend on the other rows, bit for bit. The references here are
plain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantize import (
    FARTHEST,
    GROUPS,
    Linear,
    held,
    hold,
    multiply_groups,
    pack,
    round_activations,
)

FARTHEST_OF_SUPER = 32  # beside K types, so that integer sums of a block fit 32 bits
# values of K per activation scale, where the weights' group has no fp32 scale
BLOCK8 = 128
ZERO_BITS = 511  # of a word of `join_zeros`
HALF = {"int4": 8, "int8": 128}  # of the number of codes


# ------------------------------------------------------------------------------------------ records


class Layout:
    """How codes and scales lie in memory; here, as they are. Subclasses are the layouts."""

    def __init__(self, name: str, format: str):
        """format: of `FORMATS`"""
        self.name = name
        self.format = format

    def pack(self, codes: Tensor, scale: Tensor) -> Weight:
        """Lay out codes and scales: nothing is rounded. Arguments: as for `quantize.pack`."""
        group = codes.shape[1] // scale.shape[1] if scale.dim() > 1 else 0
        part = Part(self.name, len(codes), group)
        return Weight(codes, (part,), codes.shape[1], scale=scale)

    def unpack(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return the codes and scales that `pack` laid out."""
        return weight.data, weight.scale

    def numbers(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a weight, [N, K]."""
        raise NotImplementedError

    def multiply(self, rows: Tensor, weight: Weight) -> Tensor:
        """Multiply rows by a weight plainly, [M, K] -> [M, N] fp32: by its numbers."""
        return F.linear(rows.float(), weight.numbers())

    def take(self, weight: Weight, ids: Tensor) -> Weight | Tensor:
        """Return some outputs, in codes and scales, or where they cannot be, as bfloat16."""
        codes, scale = self.unpack(weight)
        return pack(self.format, codes[ids], scale[ids])


LAYOUTS: dict[str, Layout] = {}  # by their names; the modules of the devices fill it


class Part(NamedTuple):
    """Some outputs of a layer, of one layout."""

    layout: str  # a name in `LAYOUTS`
    outputs: int
    group: int = 0  # inputs that share a scale, where the layout leaves it open


class Weight(NamedTuple):
    """The packed weight of a linear layer, [N, K], or of a stack of experts, [E, N, K]."""

    data: Tensor  # as the layout has it, E in front
    parts: tuple[Part, ...]  # one below the other, the same for every expert
    inputs: int  # K
    table: Tensor | None = None  # of a CPU's strips: the parts, as C++ reads them
    scale: Tensor | None = None  # of data without scales, E in front
    experts: int = 0  # E; 0: one weight

    stacked = ("data", "scale")  # the fields with E in front, as in `quantize.Codes`

    @property
    def layout(self) -> Layout:
        """The layout of the first part."""
        return LAYOUTS[self.parts[0].layout]

    @property
    def outputs(self) -> int:
        """N."""
        return sum(part.outputs for part in self.parts)

    @property
    def format(self) -> str:
        """The format of its codes: a key of `FORMATS`, or "blocks" of a GGUF file."""
        formats = {LAYOUTS[part.layout].format for part in self.parts}
        return max(formats - {"none"}, default="none")

    @property
    def group_size(self) -> int:
        """The inputs that share a scale; 0: one scale per output, or a GGUF file's own."""
        return self.parts[0].group

    def expert(self, number: int) -> Weight:
        """Return the weight of one expert of a stack."""
        scale = None if self.scale is None else self.scale[number]
        return Weight(self.data[number], self.parts, self.inputs, self.table, scale)

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers of the weight, [N, K] or [E, N, K]."""
        if self.experts:
            return torch.stack([self.expert(e).numbers(dtype) for e in range(self.experts)])
        return self.layout.numbers(self, dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows plainly, [M, K] -> [M, N] fp32."""
        return self.layout.multiply(rows, self)

    def take(self, ids: Tensor) -> Weight | Tensor:
        """Return some of the outputs, [R] int64; where their codes cannot be, as bfloat16."""
        return self.layout.take(self, ids)

    @property
    def in_cpp(self) -> bool:
        """Return whether the C++ operators of a CPU multiply by it."""
        return self.table is not None

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Return the data, and its table on a CPU or its scales, for fused passes."""
        return self.data, self.scale if self.table is None else self.table


def operands_of(layer: Linear) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weight, its table on a CPU or its scales, and the bias, for fused passes."""
    weight = layer.record.operands() if layer.packed else (layer.weight, None)
    return *weight, layer.bias


# ------------------------------------------------------------------------------------- zero points


def join_zeros(scale: Tensor, zero: Tensor | None, half: int = 8) -> Tensor:
    """Put the scale and the zero point of a group into one word, without rounding either.

    A bfloat16 or float16 scale ends in 13 zero bits as fp32; half + zero takes the last nine, and
    in int4 the last five.
    scale: [N, K/G] bfloat16 or float16
    zero: [N, K/G] int8 in -half .. half; None: all zero
    half: of the number of codes: 8 for int4, 128 for int8
    Returns: [N, K/G] int32.
    """
    assert scale.dtype in (torch.bfloat16, torch.float16), scale.dtype
    assert zero is None or (zero.shape == scale.shape and zero.int().abs().max() <= half), zero
    low_bits = half if zero is None else zero.int() + half
    return scale.float().view(torch.int32) | low_bits


def split_zeros(codes: Tensor, scale: Tensor, half: int = 8) -> tuple[Tensor, Tensor]:
    """Return the two factors of weights in groups.

    codes: [N, K] int8; scale: [N, K/G] bfloat16, or int32 from `join_zeros`; half: as there
    Returns: codes less their zero points, [N, K/G, G]; scales, [N, K/G, 1]; both fp32.
    """
    groups = codes.float().unflatten(1, (scale.shape[1], -1))
    words = scale[..., None]
    if scale.dtype != torch.int32:
        return groups, words.float()
    return groups + half - (words & ZERO_BITS), (words & ~ZERO_BITS).view(torch.float32)


def decode_codes(codes: Tensor, scale: Tensor, half: int) -> Tensor:
    """Return the weight of codes and scales, [N, K] fp32.

    scale: [N], or as for `split_zeros`
    """
    if scale.dim() == 1:
        return codes.float() * scale[:, None]
    groups, steps = split_zeros(codes, scale, half)
    return (groups * steps).flatten(1)


def pack_codes(format: str, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Weight:
    """Lay out the weight (codes - zero) * scale for its device: nothing is rounded.

    codes: [N, K] int8
    scale: of int8 [N] float32; of int4, and on a CPU of int8, [N, K/G] bfloat16 or float16, or
        int32 from `join_zeros`; G: any multiple of 32, also K, which is a scale per output
    zero: [N, K/G] int8 in -half .. half, or None
    Raises: ValueError for other groups.
    """
    if scale.dim() > 1:
        scale = _in_groups(format, codes, scale, zero)
    return pack(format, codes, scale)


def _in_groups(format: str, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the scales of the layouts' groups, of which a file's group may make several."""
    group, rest = divmod(codes.shape[1], scale.shape[1])
    sizes = [size for size in GROUPS if group % size == 0 and not rest]
    if not sizes:
        raise ValueError(
            f"{format} groups must be of a multiple of {GROUPS[0]} inputs; "
            f"{scale.shape[1]} scales of {codes.shape[1]} inputs make none; use --quant int8"
        )
    is_plain = zero is None and scale.dtype == torch.bfloat16
    if not is_plain and scale.dtype != torch.int32:
        scale = join_zeros(scale, zero, HALF[format])
    return scale.repeat_interleave(group // sizes[-1], 1)


def unpack(weight: Weight) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a packed weight."""
    return weight.layout.unpack(weight)


class CodesLayout(Layout):
    """A layout of codes that a backend has, whose scales may be words with zero points."""

    def __init__(self, name: str, format: str):
        super().__init__(name, format)
        self.half = HALF[format]

    def numbers(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return decode_codes(*self.unpack(weight), self.half).to(dtype)


class Embedding(nn.Module):
    """An embedding that reads its rows from a packed weight, which a tied LM head shares."""

    def __init__(self, weight: Weight, dtype: torch.dtype = torch.float32):
        """Make an embedding whose rows are of `dtype`."""
        super().__init__()
        self.dtype = dtype
        self.packed = hold(self, weight)

    @property
    def record(self) -> Weight:
        """The packed weight."""
        return held(self, self.packed)

    def forward(self, tokens: Tensor) -> Tensor:  # [...] int64 -> [..., F]
        rows = self.record.layout.rows(self.record, tokens.flatten(), self.dtype)
        return rows.view(*tokens.shape, rows.shape[-1])


# -------------------------------------------------------------------------------------- references


def grouped_reference(x: Tensor, codes: Tensor, scale: Tensor, half: int = 8) -> Tensor:
    """Multiply by codes in groups plainly, as `matmul` does.

    x: [M, K]; codes, scale, half: as for `split_zeros`
    Returns: [M, N] fp32.
    """
    weights, steps = split_zeros(codes, scale, half)
    return multiply_groups(x, weights, steps.squeeze(-1))


def w8a8_reference(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply by int8 with a scale per output plainly, as `matmul` does.

    x: [M, K]; codes: [N, K]; scale: [N] fp32
    Returns: [M, N] fp32.
    """
    activations, scales = round_activations(x, BLOCK8)
    padded = F.pad(codes.float(), (0, -codes.shape[1] % BLOCK8))
    weights = padded.unflatten(1, (-1, BLOCK8))
    sums = torch.einsum("mbk,nbk->mbn", activations.double(), weights.double()).float()
    return (sums * scales).sum(1) * scale


def rounding_of_blocks(elements: int) -> tuple[int, int]:
    """Return `block` and `farthest` of `round_activations`, for file blocks of so many weights."""
    return (BLOCK8, FARTHEST_OF_SUPER) if elements == 256 else (elements, FARTHEST)


def blocks_reference(x: Tensor, weight: Tensor, elements: int) -> Tensor:
    """Multiply by GGUF blocks plainly, in fp64, as `matmul` does.

    x: [M, K]; weight: [N, K], the numbers of the blocks; elements: of a block in the file
    Returns: [M, N] fp64.
    """
    activations, scales = round_activations(x, *rounding_of_blocks(elements))
    rounded = (activations.double() * scales.double()).flatten(1)
    return rounded @ weight.double().T
