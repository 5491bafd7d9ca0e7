"""Layouts of int4 and int8 weights on a CPU: strips of 32 outputs (cpu/strips.h)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRIP = 32  # outputs whose weights are interleaved; as in cpu/strips.h


def _whole_strips(t: Tensor) -> Tensor:
    """Pad the outputs with zeros to whole strips."""
    return F.pad(t, (0, 0, 0, -t.shape[0] % STRIP))


def pack_int4_strips(codes: Tensor, scale: Tensor) -> Tensor:
    """Lay out int4 weights for `grouped`.

    codes: [N, K] int8 in -8 .. 7
    scale: [N, K/G] bf16, or int32 from `ops.qmatmul.join_zeros`; G: 32, 64 or 128
    Returns: [ceil(N/32), K/G, 64 or 128 + 16 G] uint8. Each strip and group holds 32 scales, then
    for every 4 values of k a byte per output i < 16 and k: output i in the low nibble, output
    i + 16 in the high one, both with 8 added. The last dimension implies the kind of scales, as
    16 G is a multiple of 512.
    """
    blocks = scale.shape[1]
    steps = codes.shape[1] // blocks // 4
    # [strip, half, output, block, step, 4]
    nibbles = _whole_strips(codes + 8).to(torch.uint8).view(-1, 2, STRIP // 2, blocks, steps, 4)
    both = nibbles[:, 0] | nibbles[:, 1] << 4  # [strip, 16, block, step, 4]
    both = both.permute(0, 2, 3, 1, 4)  # [strip, block, step, 16, 4]
    return _with_headers(scale, both)


def _with_headers(scale: Tensor, codes: Tensor) -> Tensor:
    """Put 32 scales before the codes of each strip and group."""
    scales = _whole_strips(scale).view(-1, STRIP, scale.shape[1])
    scales = scales.transpose(1, 2).contiguous()  # [strip, block, 32]
    parts = (scales.view(torch.uint8), codes.reshape(*scales.shape[:2], -1))
    return torch.cat(parts, 2).contiguous()


def _without_headers(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `_with_headers`. packed: [strips, K/G, bytes] uint8; 512 divides the codes' bytes."""
    header = packed.shape[2] % 512
    headers, codes = packed.split((header, packed.shape[2] - header), 2)
    kind = torch.bfloat16 if header == 2 * STRIP else torch.int32
    scales = headers.contiguous().view(kind).transpose(1, 2)  # [strip, 32, block]
    return scales.reshape(-1, packed.shape[1]), codes


def unpack_int4_strips(packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_int4_strips`. Returns: codes [N, K] int8; scale [N, K/G] bf16 or int32."""
    strips, blocks = packed.shape[:2]
    scale, both = _without_headers(packed)
    both = both.reshape(strips, blocks, -1, STRIP // 2, 4)  # [strip, block, step, 16, 4]
    halves = torch.stack((both & 15, both >> 4), 1)  # [strip, half, block, step, 16, 4]
    codes = halves.permute(0, 1, 4, 2, 3, 5).reshape(strips * STRIP, -1).to(torch.int8) - 8
    return codes[:n].contiguous(), scale[:n].contiguous()


def pack_int8_strips(codes: Tensor) -> Tensor:
    """Lay out int8 weights for `w8a8`.

    codes: [N, K] int8
    Returns: [ceil(N/32), K/4, 32, 4] uint8, with 128 added.
    """
    shifted = _whole_strips(codes).view(torch.uint8) ^ 128  # as + 128, modulo 256
    fours = shifted.view(torch.int32).view(-1, STRIP, codes.shape[1] // 4)
    return fours.transpose(1, 2).contiguous().view(torch.uint8).unflatten(-1, (STRIP, 4))


def unpack_int8_strips(packed: Tensor, n: int) -> Tensor:
    """Invert `pack_int8_strips`. Returns: codes [N, K] int8."""
    shifted = packed.transpose(1, 2).reshape(packed.shape[0] * STRIP, -1)
    return (shifted.to(torch.int16) - 128).to(torch.int8)[:n].contiguous()


def pack_int8_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """Lay out int8 weights in groups for `grouped`.

    codes: [N, K] int8; scale: as for `pack_int4_strips`
    Returns: [ceil(N/32), K/G, 64 or 128 + 32 G] int8: for each strip and group 32 scales, then the
    codes as in `pack_int8_strips`. The type tells them from int4.
    """
    return _with_headers(scale, pack_int8_strips(codes)).view(torch.int8)


def unpack_int8_groups(packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_int8_groups`. Returns: codes [N, K] int8; scale [N, K/G] bf16 or int32."""
    scale, codes = _without_headers(packed.view(torch.uint8))
    strips = codes.reshape(len(packed), -1, STRIP, 4)  # [strip, step, 32, 4]
    return unpack_int8_strips(strips, n), scale[:n].contiguous()
