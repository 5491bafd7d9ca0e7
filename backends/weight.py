"""The weight of a linear layer: one record for all formats and devices.

1. `LAYOUTS` is the table of the ways in which a weight lies in memory: numbers, strips of codes for
   a CPU (cpu/weight_layout.h), planes of codes for CUDA (cuda/layout.py).
2. A `Weight` holds the data of a layer, or of a stack of experts. It says the layout, outputs and
   group of its parts, which lie one below the other: those of a GGUF file may be of several types.
3. A backend multiplies rows by it, x W^T (`Backend.matmul`, `Backend.experts_matmul`). On a CPU
   the operator `matmul` (cpu/matmul.cpp) rounds rows to 8 bits beside codes, outliers to 15 (with K
   types 13), with a scale per row and block of K, and all dot products are in integers. On CUDA the
   operators `w4a16` and `w8a16` (cuda/qmatmul.py) keep 16 bits of a row. A row's result does not
   depend on the other rows, bit for bit. The references here are plain.

Not here: numbers of 16 bits alone (linear.py, experts.py), rounding (formats.py), the layer
(linear.py in the root).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backends import switches
from backends.cpp.layout import pack_strips, unpack_strips
from backends.library import cuda_products, lib
from backends.linear import empty_product
from backends.triton import int4
from backends.triton.layout import (
    BLOCK_FORMS,
    COLUMNS,
    Form,
    columns_of,
    decode_blocks,
    form_of,
    halves_of,
    inputs_of_block,
    pack_block_codes,
    pack_block_scales,
    pack_int4_planes,
    pack_int8_planes,
    pack_scales,
    unpack_block_codes,
    unpack_block_scales,
    unpack_int4_planes,
    unpack_int8_planes,
    unpack_scales,
)

OUTLIER = 4  # root mean squares of a row above which a magnitude does not set its block's scale
FARTHEST = 128  # an outlier's code is at most this many times 127
FARTHEST_OF_SUPER = 32  # the same beside K types, so that integer sums of a block fit 32 bits
# values of K per activation scale, where the weights' group has no fp32 scale
BLOCK8 = 128
GROUPS = (32, 64, 128)  # inputs that share a scale, where they are not all
ZERO_BITS = 511  # of a word of `join_zeros`
ROWS_AT_ONCE = 2**11  # whose numbers are decoded together

lib.define("w4a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor")
lib.define("w8a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor")
lib.define(
    "read_planes(Tensor packed, Tensor scale, Tensor ids, int K, ScalarType dtype) -> Tensor"
)
lib.define("w4a16_fragments(Tensor x, Tensor units, str epilogue) -> Tensor")
lib.define(
    "blocks_a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor"
)


class Layout(NamedTuple):
    """A way in which codes and scales lie in memory: a row of `LAYOUTS`."""

    format: str  # of `backends.formats.FORMATS`; "blocks": of a GGUF file; "none": numbers
    id: int | None  # in cpu/weight_layout.h; None: the operator of a CPU does not know it
    device: str = "cpu"
    scales: tuple[torch.dtype, ...] = ()  # that it takes
    # (codes [N, K], scale) -> data, and scales where they lie apart
    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    # (data, scale, part, K) -> codes, scale
    unpack: Callable[[Tensor, Tensor | None, Part, int], tuple[Tensor, Tensor]] | None = None
    decode: Callable[[Tensor, Tensor], Tensor] | None = None  # (codes, scale) -> [N, K] fp32
    # (x [M, K], codes, scale) -> x W^T, [M, N] fp32, plainly; None: by the numbers of the weight
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    kernel: Callable[..., Tensor] | None = None  # on CUDA: `w4a16`, `w8a16` or `blocks_a16`
    form: Form | None = None  # of GGUF's types on CUDA


class Part(NamedTuple):
    """Some outputs of a layer, of one layout."""

    layout: str  # a name in `LAYOUTS`
    outputs: int
    group: int = 0  # inputs that share a scale, where the layout leaves it open

    def bytes(self, inputs: int) -> int:
        """Return the size of its strips, or rows of bfloat16, on a CPU with the operators."""
        id = LAYOUTS[self.layout].id
        return torch.ops.gpt_eagle.weight_bytes(id, self.outputs, inputs, self.group)


class Weight(NamedTuple):
    """The packed weight of a linear layer, [N, K], or of a stack of experts, [E, N, K]."""

    # strips: [bytes] uint8; planes: as cuda/layout.py packs them, E in front; planes of several
    # parts, and their scales, follow each other, flat
    data: Tensor
    parts: tuple[Part, ...]  # one below the other, the same for every expert
    inputs: int  # K
    table: Tensor | None = None  # of strips: the parts, as cpu/weight_layout.h reads them
    scale: Tensor | None = None  # of data without scales; E in front
    experts: int = 0  # E; 0: one weight

    @property
    def outputs(self) -> int:
        """N."""
        return sum(part.outputs for part in self.parts)

    @property
    def format(self) -> str:
        """The format of its codes: a key of `backends.formats.FORMATS`, or "blocks"."""
        formats = {LAYOUTS[part.layout].format for part in self.parts}
        return max(formats - {"none"}, default="none")

    @property
    def group_size(self) -> int:
        """The inputs that share a scale; 0: one scale per output, or a GGUF file's own."""
        return self.parts[0].group

    def expert(self, number: int) -> Weight:
        """Return the weight of one expert of a stack."""
        return expert(self, number)

    def numbers(self) -> Tensor:
        """Return the numbers of the weight, [N, K] or [E, N, K] fp32."""
        return numbers(self)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows plainly, [M, K] -> [M, N] fp32, by the reference of the layout."""
        layout = LAYOUTS[self.parts[0].layout]
        if layout.multiply is None or len(self.parts) > 1:
            return F.linear(rows.float(), numbers(self))
        return layout.multiply(rows, *unpack(self))


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


# ------------------------------------------------------------------------------------------ record


def layout_of(format: str, device: str, scale: torch.dtype) -> str:
    """Return the name of the layout of a format's codes, by the type of their scales."""
    for name, layout in LAYOUTS.items():
        if (layout.format, layout.device) == (format, device) and scale in layout.scales:
            return name
    raise ValueError(
        f"the format {format} has no layout for scales in {scale} on {device}; add a row to "
        "LAYOUTS (backends/weight.py), or use another --device"
    )


def pack(format: str, codes: Tensor, scale: Tensor) -> Weight:
    """Lay out codes and scales for their device: nothing is rounded.

    codes: [N, K] int8
    scale: [N] float32, or in groups of 32, 64 or 128 [N, K/G] bfloat16 or the int32 of
    `join_zeros`, where the device has such a layout
    """
    outputs, inputs = codes.shape
    name = layout_of(format, codes.device.type, scale.dtype)
    group = inputs // scale.shape[1] if scale.dim() > 1 else 0
    data, scale = LAYOUTS[name].pack(codes, scale)
    parts = (Part(name, outputs, group),)
    table = None
    if LAYOUTS[name].id is not None:
        table = table_of(parts, inputs, [data.numel()])
    return Weight(data, parts, inputs, table, scale)


def unpack(weight: Weight) -> tuple[Tensor, Tensor]:
    """Return the codes and scales that `pack` laid out."""
    (part,) = weight.parts
    layout = LAYOUTS[part.layout]
    return layout.unpack(weight.data, weight.scale, part, weight.inputs)


def for_decoding(weight: Weight) -> Weight:
    """Return the weight of a layer as the kernel reads it that `GPT_EAGLE_INT4` asks for.

    A weight of other sizes, or of another format, is what it was.
    """
    part = weight.parts[0]
    if switches.int4_kernel() == "triton" or part.layout != "INT4_PLANES" or weight.experts:
        return weight
    if not int4.takes(weight.outputs, weight.inputs, weight.data.device.index):
        return weight
    units = int4.pack_fragments(*unpack(weight))
    part = Part("INT4_FRAGMENTS", part.outputs, part.group)
    return Weight(units, (part,), weight.inputs)


def stack(weights: Iterator[Weight], experts: int) -> Weight:
    """Stack the experts' weights, each computed in its turn, so that only one exists twice."""
    first = next(weights)
    data = first.data.new_empty(experts, *first.data.shape)
    scale = None
    if first.scale is not None:
        scale = first.scale.new_empty(experts, *first.scale.shape)
    for number in range(experts):
        weight = next(weights) if number else first
        assert weight.parts == first.parts, (weight.parts, first.parts)
        data[number] = weight.data
        if scale is not None:
            scale[number] = weight.scale
    return Weight(data, first.parts, first.inputs, first.table, scale, experts)


def expert(weight: Weight, number: int) -> Weight:
    """Return the weight of one expert of a stack."""
    scale = None if weight.scale is None else weight.scale[number]
    return Weight(weight.data[number], weight.parts, weight.inputs, weight.table, scale)


def planes(weights: Sequence[Weight]) -> Weight:
    """Put weights of GGUF's types on CUDA one below the other; equal types are one part."""
    joined = []
    for _, equal in groupby(weights, lambda weight: weight.parts[0].layout):
        some = list(equal)
        first = some[0]
        if len(some) > 1:
            part = Part(first.parts[0].layout, sum(weight.outputs for weight in some))
            data = torch.cat([weight.data for weight in some], 1)
            scale = torch.cat([weight.scale for weight in some], 1)
            first = Weight(data, (part,), first.inputs, scale=scale)
        joined.append(first)
    if len(joined) == 1:
        return joined[0]
    data = torch.cat([weight.data.flatten() for weight in joined])
    scale = torch.cat([weight.scale.flatten() for weight in joined])
    parts = tuple(weight.parts[0] for weight in joined)
    return Weight(data, parts, joined[0].inputs, scale=scale)


def split_planes(weight: Weight) -> list[Weight]:
    """Return the weights of the parts on CUDA."""
    if len(weight.parts) == 1:
        return [weight]
    forms = [LAYOUTS[part.layout].form for part in weight.parts]
    blocks = [-(-weight.inputs // inputs_of_block(form.bits)) for form in forms]
    found = []
    first_word = 0
    first_scale = 0
    for part, form, count in zip(weight.parts, forms, blocks):
        rows = count * part.outputs
        words = weight.data[first_word:][: rows * columns_of(form.bits)]
        scales = weight.scale[first_scale:][: rows * halves_of(form)]
        shape = (count, part.outputs, -1)
        found.append(Weight(words.view(shape), (part,), weight.inputs, scale=scales.view(shape)))
        first_word += len(words)
        first_scale += len(scales)
    return found


def table_of(parts: Sequence[Part], inputs: int, sizes: Sequence[int]) -> Tensor:
    """Return the table of a weight in strips, [3 + 4 parts] int64 (cpu/weight_layout.h).

    sizes: of each part (bytes)
    """
    rows = []
    first = 0
    for part, size in zip(parts, sizes):
        rows += [LAYOUTS[part.layout].id, part.outputs, part.group, first]
        first += size
    return torch.tensor([sum(part.outputs for part in parts), inputs, first, *rows], device="cpu")


def numbers(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of a weight, [N, K] or [E, N, K]."""
    if weight.experts:
        return torch.stack([numbers(expert(weight, e), dtype) for e in range(weight.experts)])
    layout = LAYOUTS[weight.parts[0].layout]
    if layout.form is not None:
        return torch.cat([_numbers_of_planes(part, dtype) for part in split_planes(weight)])
    if layout.decode is None:
        return rows_of(weight, torch.arange(weight.outputs), dtype)
    return layout.decode(*unpack(weight)).to(dtype)


def _numbers_of_planes(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Decode some rows at a time, as the steps take several times their memory."""
    layout = LAYOUTS[weight.parts[0].layout]
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.data.device)
    rows = torch.arange(weight.outputs, device=weight.data.device)
    for some, to in zip(rows.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE)):
        to.copy_(layout.decode(*unpack(take(weight, some))))
    return out


def rows_of(weight: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows of a weight of a GGUF file as numbers, of one part on CUDA.

    rows: [R] int64
    Returns: [R, K] of `dtype`.
    """
    if LAYOUTS[weight.parts[0].layout].form is not None:
        return read_rows(weight.data, weight.scale, rows, weight.inputs, dtype)
    out = torch.empty(len(rows), weight.inputs, dtype=dtype)
    torch.ops.gpt_eagle.read_rows(weight.data, weight.table, rows, out)
    return out


def take(weight: Weight, ids: Tensor) -> Weight | Tensor:
    """Return some outputs of a weight: in their codes and scales, or as bfloat16, [R, K].

    ids: [R] int64
    """
    layout = LAYOUTS[weight.parts[0].layout]
    if layout.form is not None:
        (part,) = weight.parts
        parts = (Part(part.layout, len(ids)),)
        return Weight(weight.data[:, ids], parts, weight.inputs, scale=weight.scale[:, ids])
    if layout.decode is None:
        return rows_of(weight, ids, torch.bfloat16)
    codes, scale = unpack(weight)
    return pack(layout.format, codes[ids], scale[ids])


# -------------------------------------------------------------------------------------- references


def round_activations(x: Tensor, block: int, farthest: int = FARTHEST) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits block by block; outliers keep up to 15.

    x: [..., K]; farthest: an outlier's code is at most this many times 127, a power of 2
    Returns: codes [..., blocks, block] and scales [..., blocks, 1], both fp32; the last block is
    padded with zeros. Codes are -127 to 127, those of outliers up to 127 * `farthest`.
    """
    rms = x.float().pow(2).mean(-1, keepdim=True).sqrt()[..., None]  # [..., 1, 1]
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    magnitudes = blocks.abs()
    inlier = magnitudes.masked_fill(magnitudes > OUTLIER * rms, 0).amax(-1, keepdim=True)
    unit = torch.maximum(inlier, magnitudes.amax(-1, keepdim=True) / farthest)  # has the code 127
    # divided as in cpu/activations.h: with a plain number, 127 / unit is 127 * (1 / unit), which
    # rounds twice
    to_code = torch.where(unit > 1e-30, torch.full_like(unit, 127) / unit, 0)
    return (blocks * to_code).round(), unit / 127


def grouped_reference(x: Tensor, codes: Tensor, scale: Tensor, half: int = 8) -> Tensor:
    """Multiply by codes in groups plainly, as `matmul` does.

    x: [M, K]; codes, scale: as for `pack_strips`; half: of `split_zeros`
    Returns: [M, N] fp32.
    """
    activations, scales = round_activations(x, codes.shape[1] // scale.shape[1])
    weights, steps = split_zeros(codes, scale, half)
    # integers of up to 30 bits are exact in fp64
    sums = torch.einsum("mbk,nbk->mbn", activations.double(), weights.double()).float()
    return (sums * scales * steps.squeeze(-1).T).sum(1)


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


# -------------------------------------------------------------------------------------------- CUDA


def _check(x: Tensor, packed: Tensor, bits: int, scale_is_packed: bool) -> None:
    blocks = -(-x.shape[-1] * bits // (16 * COLUMNS))
    if packed.shape[-3] != blocks:
        raise ValueError(
            f"x of {x.shape[-1]} inputs needs int{bits} weights packed in {blocks} blocks of "
            f"{16 * COLUMNS // bits}; these have {packed.shape[-3]}: pack the weights of this layer"
        )
    if not scale_is_packed:
        layout = "pack_scales" if bits == 4 else "[N] float32"
        raise ValueError(f"w{bits}a16 takes scales as {layout} lays them out")


def w4a16(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None, epilogue: str = "none"
) -> Tensor:
    """Multiply rows by int4 weights, x W^T.

    Dot products of a group are taken over the codes, then scaled and added in fp32.

    x: [..., K] bfloat16, float16 or float32
    packed, scale: from `pack_int4_planes` and `pack_scales`
    lists: from `expert_lists`; x is then [P, K], packed and scale are stacks, [E, ...], and the
    epilogue is "none"
    epilogue: as for `backends.triton.qmatmul.run_product`
    Returns: [..., N] in x's dtype, or as the epilogue defines it.
    Raises: ValueError for weights of another width, or scales in another layout.
    """
    packed_dtype = scale.dtype in (torch.int32, torch.float32)
    _check(x, packed, 4, packed_dtype and scale.shape[:-1] == packed.shape[:-1])
    return torch.ops.gpt_eagle.w4a16(x, packed, scale, lists, epilogue)


def w4a16_fragments(
    x: Tensor, units: Tensor, scale: None = None, lists: None = None, epilogue: str = "none"
) -> Tensor:
    """Multiply rows by int4 weights in the layout of the kernel in CUDA C++, as `w4a16`.

    x: [..., K] bfloat16; units: from `backends.triton.int4.pack_fragments`
    scale, lists: None: the units have their scales, and are of no expert
    """
    assert scale is None and lists is None
    return torch.ops.gpt_eagle.w4a16_fragments(x, units, epilogue)


def w8a16(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None, epilogue: str = "none"
) -> Tensor:
    """Multiply rows by int8 weights, x W^T.

    The product is taken over the codes, then scaled in fp32.

    x: [..., K] bfloat16, float16 or float32
    packed: from `pack_int8_planes`; scale: [N] float32
    lists: from `expert_lists`; x is then [P, K], packed and scale are stacks, [E, ...], and the
    epilogue is "none"
    epilogue: as for `backends.triton.qmatmul.run_product`
    Returns: [..., N] in x's dtype, or as the epilogue defines it.
    Raises: ValueError for weights of another width, or scales in another layout.
    """
    stacked = packed.shape[:-3] + packed.shape[-2:-1]
    _check(x, packed, 8, scale.dtype == torch.float32 and scale.shape == stacked)
    return torch.ops.gpt_eagle.w8a16(x, packed, scale, lists, epilogue)


def blocks_a16(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None, epilogue: str = "none"
) -> Tensor:
    """Multiply rows by weights of a GGUF file's type in their own codes and scales, x W^T.

    Dot products of a group are taken over the codes, then scaled and added in fp32.

    x: [..., K] bfloat16, float16 or float32
    packed, scale: from `pack_block_codes` and `pack_block_scales`
    lists, epilogue: as for `w4a16`
    Returns: [..., N] in x's dtype, or as the epilogue defines it.
    Raises: ValueError for weights of another width.
    """
    form = form_of(packed, scale)
    blocks = -(-x.shape[-1] // inputs_of_block(form.bits))
    if packed.shape[-3] != blocks:
        raise ValueError(
            f"x of {x.shape[-1]} inputs needs weights packed in {blocks} blocks of "
            f"{inputs_of_block(form.bits)}; these have {packed.shape[-3]}: pack the weights of "
            "this layer"
        )
    return torch.ops.gpt_eagle.blocks_a16(x, packed, scale, lists, epilogue)


def blocks_a16_reference(
    x: Tensor, packed: Tensor, scale: Tensor, fp32_out: bool = False
) -> Tensor:
    """Compute `blocks_a16` plainly, with the weights in fp32."""
    form = form_of(packed, scale)
    K = x.shape[-1]
    codes = unpack_block_codes(packed, form.bits, K)
    y = x.float() @ decode_blocks(codes, unpack_block_scales(scale, form, K), form).T
    return y if fp32_out else y.to(x.dtype)


def w4a16_reference(x: Tensor, packed: Tensor, scale: Tensor, fp32_out: bool = False) -> Tensor:
    """Compute `w4a16` plainly, with the weights in fp32."""
    K = x.shape[-1]
    N = packed.shape[1]
    weights, steps = split_zeros(unpack_int4_planes(packed, N, K), unpack_scales(scale, K))
    y = x.float() @ (weights * steps).flatten(1).T
    return y if fp32_out else y.to(x.dtype)


def w8a16_reference(x: Tensor, packed: Tensor, scale: Tensor, fp32_out: bool = False) -> Tensor:
    """Compute `w8a16` plainly, with the weights in fp32."""
    w = unpack_int8_planes(packed, packed.shape[1], x.shape[-1]) * scale[:, None]  # [N, K]
    y = x.float() @ w.T
    return y if fp32_out else y.to(x.dtype)


def read_rows(packed: Tensor, scale: Tensor, ids: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Read rows of a weight of a GGUF file's type on CUDA as numbers.

    packed, scale: as for `blocks_a16`; ids: [R] int64; K: inputs
    Returns: [R, K] of `dtype`, rounded from fp32.
    """
    return torch.ops.gpt_eagle.read_planes(packed, scale, ids, K, dtype)


def _read_planes_plain(
    packed: Tensor, scale: Tensor, ids: Tensor, K: int, dtype: torch.dtype
) -> Tensor:
    form = form_of(packed, scale)
    codes = unpack_block_codes(packed[:, ids], form.bits, K)
    return decode_blocks(codes, unpack_block_scales(scale[:, ids], form, K), form).to(dtype)


def _read_planes_cuda(
    packed: Tensor, scale: Tensor, ids: Tensor, K: int, dtype: torch.dtype
) -> Tensor:
    with torch.cuda.device(packed.device):
        return cuda_products().read_rows(packed, scale, ids, K, dtype)


lib.impl("read_planes", _read_planes_plain, "CPU")
lib.impl("read_planes", _read_planes_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::read_planes", lib=lib)
def _(packed, scale, ids, K, dtype):
    return packed.new_empty(len(ids), K, dtype=dtype)


def _quantized_matmul_cuda(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    products = cuda_products()
    device = products.device_of(x.device.index)
    with torch.cuda.device(x.device):
        if lists is None:
            return products.matmul(x, packed, scale, device, epilogue)
        import backends.triton.experts

        return backends.triton.experts.experts_product(x, packed, scale, lists, device)


def _quantized_matmul_fake(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    return empty_product(x, packed, epilogue)


def _fragments_cuda(x: Tensor, units: Tensor, epilogue: str) -> Tensor:
    with torch.cuda.device(x.device):
        return int4.multiply(x, units, epilogue)


lib.impl("w4a16_fragments", int4.multiply_plainly, "CPU")
lib.impl("w4a16_fragments", _fragments_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::w4a16_fragments", lib=lib)
def _(x, units, epilogue):
    shape, dtype = int4.like(x, units, epilogue)
    return x.new_empty(shape, dtype=dtype)


for _name in ("w4a16", "w8a16", "blocks_a16"):
    lib.impl(_name, _quantized_matmul_cuda, "CUDA")
    torch.library.register_fake(f"gpt_eagle::{_name}", _quantized_matmul_fake, lib=lib)


# ------------------------------------------------------------------------------------------- table


def _strips(format: str, id: int, scale: torch.dtype, half: int) -> Layout:
    """Return the layout of codes in strips on a CPU, with scales of one type."""

    def reference(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        if scale.dim() == 1:
            return w8a8_reference(x, codes, scale)
        return grouped_reference(x, codes, scale, half)

    bits = 4 if format == "int4" else 8
    return Layout(
        format,
        id,
        scales=(scale,),
        pack=lambda codes, scale: (pack_strips(codes, scale, bits), None),
        unpack=lambda data, _, part, inputs: unpack_strips(
            data, part.outputs, inputs, part.group, scale, bits
        ),
        decode=partial(decode_codes, half=half),
        multiply=reference,
    )


LAYOUTS: dict[str, Layout] = {
    "BF16": Layout("none", 30),  # rows beside other parts
    "INT4": _strips("int4", 100, torch.bfloat16, 8),
    "INT4_WORDS": _strips("int4", 101, torch.int32, 8),
    "INT8": _strips("int8", 102, torch.bfloat16, 128),
    "INT8_WORDS": _strips("int8", 103, torch.int32, 128),
    "INT8_OUTPUT": _strips("int8", 104, torch.float32, 128),
    "INT4_PLANES": Layout(
        "int4",
        None,
        "cuda",
        (torch.bfloat16, torch.int32),
        lambda codes, scale: (
            pack_int4_planes(codes),
            pack_scales(scale, codes.shape[1] // scale.shape[1]),
        ),
        lambda data, scale, part, k: (
            unpack_int4_planes(data, part.outputs, k),
            unpack_scales(scale, k),
        ),
        partial(decode_codes, half=8),
        kernel=w4a16,
    ),
    "INT4_FRAGMENTS": Layout(  # of `for_decoding`
        "int4",
        None,
        "cuda",
        unpack=lambda data, scale, part, k: int4.unpack_fragments(data),
        decode=partial(decode_codes, half=8),
        kernel=w4a16_fragments,
    ),
    "INT8_PLANES": Layout(
        "int8",
        None,
        "cuda",
        (torch.float32,),
        lambda codes, scale: (pack_int8_planes(codes), scale),
        lambda data, scale, part, k: (unpack_int8_planes(data, part.outputs, k), scale),
        partial(decode_codes, half=128),
        kernel=w8a16,
    ),
}
for _name, _form in BLOCK_FORMS.items():
    LAYOUTS[f"{_name}_PLANES"] = Layout(
        "blocks",
        None,
        "cuda",
        pack=lambda codes, scale, form=_form: (
            pack_block_codes(codes, form.bits),
            pack_block_scales(scale, form),
        ),
        unpack=lambda data, scale, part, k, form=_form: (
            unpack_block_codes(data, form.bits, k),
            unpack_block_scales(scale, form, k),
        ),
        decode=partial(decode_blocks, form=_form),
        kernel=blocks_a16,
        form=_form,
    )
# the types of GGUF, by their numbers in a file
for _id, _name in {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 39: "MXFP4",
}.items():  # fmt: skip
    LAYOUTS[_name] = Layout("blocks", _id)
