"""The layouts of weights on CUDA, planes of codes (triton/layout.py), and the operators over them.

`w4a16`, `w8a16` and `blocks_a16` (triton/qmatmul.py) keep 16 bits of a row. The types of a GGUF
file have a layout each; a weight of several types is flat, its parts behind each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from backends.library import lib
from backends.linear import empty_product
from backends.triton.layout import (
    BLOCK_FORMS,
    COLUMNS,
    Form,
    columns_of,
    decode_blocks,
    form_of,
    halves_of,
    inputs_of_block,
    pack_int4_planes,
    pack_int8_planes,
    pack_scales,
    unpack_block_codes,
    unpack_block_scales,
    unpack_int4_planes,
    unpack_int8_planes,
    unpack_scales,
)
from backends.weight import LAYOUTS, CodesLayout, Layout, Part, Weight, split_zeros

ROWS_AT_ONCE = 2**11  # whose numbers are decoded together

lib.define("w4a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor")
lib.define("w8a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor")
lib.define(
    "read_planes(Tensor packed, Tensor scale, Tensor ids, int K, ScalarType dtype) -> Tensor"
)
lib.define(
    "blocks_a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor"
)


# --------------------------------------------------------------------------------------- operators


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


lib.impl("read_planes", _read_planes_plain, "CPU")


@torch.library.register_fake("gpt_eagle::read_planes", lib=lib)
def _(packed, scale, ids, K, dtype):
    return packed.new_empty(len(ids), K, dtype=dtype)


def _quantized_matmul_fake(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    return empty_product(x, packed, epilogue)


for _name in ("w4a16", "w8a16", "blocks_a16"):
    torch.library.register_fake(f"gpt_eagle::{_name}", _quantized_matmul_fake, lib=lib)


# ------------------------------------------------------------------------------------------- table


class Int4Planes(CodesLayout):
    """Codes of 4 bits in planes, for Triton."""

    kernel = staticmethod(w4a16)

    def __init__(self):
        super().__init__("INT4_PLANES", "int4")

    def pack(self, codes: Tensor, scale: Tensor) -> Weight:
        group = codes.shape[1] // scale.shape[1]
        parts = (Part(self.name, len(codes), group),)
        words = pack_scales(scale, group)
        return Weight(pack_int4_planes(codes), parts, codes.shape[1], scale=words)

    def unpack(self, weight: Weight) -> tuple[Tensor, Tensor]:
        codes = unpack_int4_planes(weight.data, weight.outputs, weight.inputs)
        return codes, unpack_scales(weight.scale, weight.inputs)


class Int8Planes(CodesLayout):
    """Codes of 8 bits in planes, with a scale per output."""

    kernel = staticmethod(w8a16)

    def __init__(self):
        super().__init__("INT8_PLANES", "int8")

    def pack(self, codes: Tensor, scale: Tensor) -> Weight:
        parts = (Part(self.name, len(codes)),)
        return Weight(pack_int8_planes(codes), parts, codes.shape[1], scale=scale)

    def unpack(self, weight: Weight) -> tuple[Tensor, Tensor]:
        codes = unpack_int8_planes(weight.data, weight.outputs, weight.inputs)
        return codes, weight.scale


class BlockPlanes(Layout):
    """Codes of a type of GGUF in planes, with the file's scales and minima."""

    kernel = staticmethod(blocks_a16)

    def __init__(self, type: str, form: Form):
        super().__init__(f"{type}_PLANES", "blocks")
        self.form = form

    def unpack(self, weight: Weight) -> tuple[Tensor, Tensor]:
        codes = unpack_block_codes(weight.data, self.form.bits, weight.inputs)
        return codes, unpack_block_scales(weight.scale, self.form, weight.inputs)

    def numbers(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return torch.cat([_numbers(part, dtype) for part in split_planes(weight)])

    def take(self, weight: Weight, ids: Tensor) -> Weight:
        (part,) = weight.parts
        parts = (Part(part.layout, len(ids)),)
        return Weight(weight.data[:, ids], parts, weight.inputs, scale=weight.scale[:, ids])

    def rows(self, weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Read rows of a weight of one part as numbers: [R] int64 -> [R, K] of `dtype`."""
        return read_rows(weight.data, weight.scale, ids, weight.inputs, dtype)


def _numbers(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Decode a weight of one part some rows at a time, as the steps take several times them."""
    layout = weight.layout
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.data.device)
    rows = torch.arange(weight.outputs, device=weight.data.device)
    for some, to in zip(rows.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE)):
        to.copy_(decode_blocks(*layout.unpack(layout.take(weight, some)), layout.form))
    return out


PLANES = {"int4": Int4Planes(), "int8": Int8Planes()}
SCALES = {"int4": (torch.bfloat16, torch.int32), "int8": (torch.float32,)}
OF_BLOCKS = [BlockPlanes(type, form) for type, form in BLOCK_FORMS.items()]
LAYOUTS.update({x.name: x for x in (*PLANES.values(), *OF_BLOCKS)})


def pack_on_cuda(codes: Tensor, scale: Tensor, format: str) -> Weight:
    """Lay out codes of a format. Raises: ValueError for scales of another type."""
    if scale.dtype not in SCALES.get(format, ()):
        raise ValueError(
            f"the format {format} has no layout for scales in {scale.dtype} on cuda; add one to "
            "PLANES (backends/planes.py), or use another --device"
        )
    return PLANES[format].pack(codes, scale)


# -------------------------------------------------------------------------------- parts of a layer


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
