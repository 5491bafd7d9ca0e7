"""Layouts of quantized weights on CUDA: 16-bit words in blocks of K, for cuda/qmatmul.py.

Codes of 4 and 8 bits lie in planes. Those of 5 and 6 bits have their low halves there, and one byte
behind them for 4 or 8 high bits of a row and block. The types of a GGUF file keep the file's scales
and minima: the float16 numbers of a group of 32, or the pair of a superblock of 256 and the
integers of its groups. In fp32, or 16 bits for each group, a K type would take 6 bits instead of
4.6: the products of a superblock's scale and integers have 17 bits, which only fp32 holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 64  # words per packed row and block; a block of K is 64 words of 16 / bits weights
SUPER = 256  # weights of a superblock of GGUF's K types, a block of K
INTEGER_BYTES = 16  # of the groups of a superblock: scales, or scales and minima in turn


class Form(NamedTuple):
    """A form in which the kernels read weights."""

    bits: int  # of a code; 16: numbers
    group: int = 0  # inputs that share a scale; 0: all
    # "": of outputs, or none; "bf16", "zeros": from `pack_scales`; "fp16": of groups; "super": of a
    # superblock, and integers of groups; "fp16-minima", "super-minima": minima beside both
    scales: str = ""


BLOCK_FORMS = {  # of GGUF's types
    "Q4_0": Form(4, 32, "fp16"),
    "Q4_1": Form(4, 32, "fp16-minima"),
    "Q5_0": Form(5, 32, "fp16"),
    "Q5_1": Form(5, 32, "fp16-minima"),
    "Q8_0": Form(8, 32, "fp16"),
    "Q4_K": Form(4, 32, "super-minima"),
    "Q5_K": Form(5, 32, "super-minima"),
    "Q6_K": Form(6, 16, "super"),
}


def inputs_of_block(bits: int) -> int:
    """Return the weights of a row in a block of K."""
    return COLUMNS * (16 // bits if bits in (8, 16) else 4)


def columns_of(bits: int) -> int:
    """Return the words of a row and block of K: planes, and high bits behind them."""
    return COLUMNS + (16 * (bits - 4) if bits in (5, 6) else 0)


def halves_of(form: Form) -> int:
    """Return the float16 numbers of scales per row and block of K, as GGUF's types have them."""
    if form.scales.startswith("super"):
        return 2 + INTEGER_BYTES // 2
    return inputs_of_block(form.bits) // form.group * (2 if form.scales == "fp16-minima" else 1)


def form_of(packed: Tensor, scale: Tensor | None) -> Form:
    """Return the form of a weight of `matmul_kernel`, from the shapes and types of its operands.

    packed: [N, K] numbers, or [blocks, N, words] int16; scale: None, [N] or [blocks, N, numbers]
    """
    if scale is None:
        return Form(16)
    if scale.dim() == 1:
        return Form(8)
    if scale.dtype != torch.float16:
        return Form(4, group_of(scale), "bf16" if scale.dtype == torch.int32 else "zeros")
    shape = (packed.shape[-1], scale.shape[-1])
    (form,) = [f for f in BLOCK_FORMS.values() if (columns_of(f.bits), halves_of(f)) == shape]
    return form


def _pack(fields: Tensor, bits: int) -> Tensor:
    """Pack unsigned fields, [N, K] int16, into words, [blocks, N, COLUMNS] int16.

    Word c of block b holds in its bits i * bits and up the field of
    k = (b * planes + i) * COLUMNS + c.
    """
    planes = fields.view(fields.shape[0], -1, 16 // bits, COLUMNS)  # [N, blocks, planes, COLUMNS]
    words = sum(planes[:, :, i] << (bits * i) for i in range(16 // bits))  # [N, blocks, COLUMNS]
    return words.transpose(0, 1).contiguous()


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `_pack`: [blocks, N, COLUMNS] -> [N, padded K] int16."""
    planes = [(packed >> (bits * i)) & (2**bits - 1) for i in range(16 // bits)]
    fields = torch.stack(planes, 2).transpose(0, 1)  # [N, blocks, planes, COLUMNS]
    return fields.flatten(1)


def _to_blocks(codes: Tensor, bits: int) -> Tensor:
    """Pad K with zeros to whole blocks: at most 255 columns."""
    return F.pad(codes, (0, -codes.shape[1] % (16 // bits * COLUMNS))).short()


def pack_int4_planes(codes: Tensor) -> Tensor:
    """Lay out int4 weights for `w4a16`.

    codes: [N, K] int8, -8..7
    Returns: [blocks, N, COLUMNS] int16.
    """
    return _pack(_to_blocks(codes, 4) + 8, 4)


def unpack_int4_planes(packed: Tensor, N: int, K: int) -> Tensor:
    """Invert `pack_int4_planes`. Returns: codes, [N, K] int8."""
    return (_unpack(packed, 4) - 8)[:N, :K].to(torch.int8)


def pack_int8_planes(codes: Tensor) -> Tensor:
    """Lay out int8 weights for `w8a16`.

    codes: [N, K] int8
    Returns: [blocks, N, COLUMNS] int16.
    """
    return _pack(_to_blocks(codes, 8) & 255, 8)


def unpack_int8_planes(packed: Tensor, N: int, K: int) -> Tensor:
    """Invert `pack_int8_planes`. Returns: codes, [N, K] int8."""
    return _unpack(packed, 8)[:N, :K].to(torch.int8)


def pack_scales(scale: Tensor, group: int) -> Tensor:
    """Lay out the scales of int4 groups for `w4a16`, as words.

    The scales of a row and block lie side by side.
    scale: [N, K / group] bfloat16, or int32 from `backends.weight.join_zeros`; group: 32, 64 or 128
    Returns: [blocks, N, 128 / group] int32, two bfloat16 in a word; or [blocks, N, 256 / group]
    float32, whose bits are the words with a zero point. `group_of` returns the group.
    """
    per_block = 4 * COLUMNS // group
    padded = F.pad(scale, (0, -scale.shape[1] % per_block))  # [N, blocks * per_block]
    blocks = padded.view(scale.shape[0], -1, per_block)  # [N, blocks, per_block]
    blocks = blocks.transpose(0, 1).contiguous()  # [blocks, N, per_block]
    return blocks.view(torch.int32 if scale.dtype == torch.bfloat16 else torch.float32)


def unpack_scales(packed: Tensor, K: int) -> Tensor:
    """Invert `pack_scales`. Returns: [N, K / group] bfloat16 or int32."""
    scale = packed.view(torch.bfloat16 if packed.dtype == torch.int32 else torch.int32)
    return scale.transpose(0, 1).flatten(1)[:, : K // group_of(packed)]


def group_of(packed: Tensor) -> int:
    """Return the number of inputs that share a scale, from the result of `pack_scales`."""
    return (2 if packed.dtype == torch.int32 else 4) * COLUMNS // packed.shape[2]


# ------------------------------------------------------------------------------------ GGUF's types


def pack_block_codes(codes: Tensor, bits: int) -> Tensor:
    """Lay out the codes of a GGUF file's blocks.

    codes: [N, K] uint8, K a multiple of 32; bits: 4, 5, 6 or 8
    Returns: [blocks, N, `columns_of`] int16.
    """
    if bits == 8:
        return pack_int8_planes(codes.view(torch.int8))
    fields = _to_blocks(codes, 4)
    low = _pack(fields & 15, 4)
    if bits == 4:
        return low
    high = bits - 4
    planes = (fields >> 4).unflatten(1, (-1, 4, COLUMNS))  # [N, blocks, 4, COLUMNS]
    columns = sum(planes[:, :, i] << (high * i) for i in range(4))  # of 4 or 8 bits
    if high == 1:  # two columns share a byte
        columns = columns[..., : COLUMNS // 2] | columns[..., COLUMNS // 2 :] << 4
    words = columns.to(torch.uint8).view(torch.int16)  # [N, blocks, 16 * high]
    return torch.cat((low, words.transpose(0, 1)), -1)


def unpack_block_codes(packed: Tensor, bits: int, K: int) -> Tensor:
    """Invert `pack_block_codes`. Returns: [N, K] uint8."""
    if bits == 8:
        return unpack_int8_planes(packed, packed.shape[1], K).view(torch.uint8)
    fields = _unpack(packed[..., :COLUMNS], 4)
    if bits > 4:
        high = bits - 4
        columns = packed[..., COLUMNS:].contiguous().view(torch.uint8)  # [blocks, N, 32 * high]
        if high == 1:
            columns = torch.cat((columns & 15, columns >> 4), -1)
        planes = [(columns >> (high * i)) & (2**high - 1) for i in range(4)]
        fields = fields | torch.stack(planes, 2).transpose(0, 1).flatten(1).short() << 4
    return fields[:, :K].to(torch.uint8)


def pack_block_scales(scale: Tensor, form: Form) -> Tensor:
    """Lay out the scales of a GGUF file's blocks.

    scale: [N, K / 32, 1], of types with minima 2 in place of 1; or [N, K / SUPER, 10], where the
    last 8 are the bits of 16 integers; float16
    Returns: [blocks, N, `halves_of`] float16.
    """
    of_block = halves_of(form) // scale.shape[2]
    padded = F.pad(scale, (0, 0, 0, -scale.shape[1] % of_block))
    return padded.unflatten(1, (-1, of_block)).flatten(2).transpose(0, 1).contiguous()


def unpack_block_scales(packed: Tensor, form: Form, K: int) -> Tensor:
    """Invert `pack_block_scales`."""
    if form.scales.startswith("super"):
        return packed.transpose(0, 1)
    each = 2 if form.scales == "fp16-minima" else 1
    return packed.transpose(0, 1).flatten(1).unflatten(1, (-1, each))[:, : K // form.group]


def decode_blocks(codes: Tensor, scale: Tensor, form: Form) -> Tensor:
    """Return the numbers of a GGUF file's blocks, as ggml rounds them: [N, K] fp32.

    codes: [N, K] uint8; scale: as for `pack_block_scales`
    """
    if form.bits == 8:
        codes = codes.view(torch.int8)
    values = codes.float()
    if form.scales in ("fp16", "super") and form.bits < 8:
        values = values - 2 ** (form.bits - 1)  # the code of zero
    steps = scale[..., :1].float()
    minima = scale[..., 1:2].float()
    if form.scales.startswith("super"):
        integers = scale[..., 2:].contiguous().view(torch.uint8)  # [N, K / SUPER, 16]
        if form.scales == "super":
            steps = steps * integers.view(torch.int8)
        else:
            steps = steps * integers[..., ::2]
            minima = -minima * integers[..., 1::2]
    groups = values.unflatten(1, (-1, form.group)) * steps.flatten(1)[..., None]
    if form.scales.endswith("minima"):
        groups = groups + minima.flatten(1)[..., None]
    return groups.flatten(1)
