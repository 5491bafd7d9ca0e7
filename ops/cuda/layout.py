"""Layouts of int4 and int8 weights on CUDA: 16-bit words in blocks of K, for cuda/qmatmul.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 64  # words per packed row and block; a block of K is 64 words of 16 / bits weights


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
    """Lay out int8 weights for `w8a16`, as sign and magnitude.

    codes: [N, K] int8, -127..127: -128 has no representation
    Returns: [blocks, N, COLUMNS] int16.
    """
    codes = _to_blocks(codes, 8)
    return _pack(torch.where(codes < 0, 128 - codes, codes), 8)  # bit 7 is the sign


def unpack_int8_planes(packed: Tensor, N: int, K: int) -> Tensor:
    """Invert `pack_int8_planes`. Returns: codes, [N, K] int8."""
    fields = _unpack(packed, 8)[:N, :K]
    return torch.where(fields < 128, fields, 128 - fields).to(torch.int8)


def pack_scales(scale: Tensor, group: int) -> Tensor:
    """Lay out the scales of int4 groups for `w4a16`, as words.

    The scales of a row and block lie side by side.
    scale: [N, K / group] bfloat16, or int32 from `ops.weight.join_zeros`; group: 32, 64 or 128
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
