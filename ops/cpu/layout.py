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


def _scales(headers: Tensor, kind: torch.dtype) -> Tensor:
    """Return the scales of headers, [strips, K/G, bytes] uint8 -> [N, K/G] of `kind`."""
    scales = headers.contiguous().view(kind).transpose(1, 2)
    return scales.reshape(-1, headers.shape[1])


def unpack_int4_strips(packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_int4_strips`. Returns: codes [N, K] int8; scale [N, K/G] bf16 or int32."""
    strips, blocks, size = packed.shape
    scales, both = packed.split((size % 512, size - size % 512), 2)
    kind = torch.bfloat16 if size % 512 == 2 * STRIP else torch.int32
    scale = _scales(scales, kind)
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

    codes: [N, K] int8; scale: [N, K/G] int32 from `ops.qmatmul.join_zeros`; G: 32, 64 or 128
    Returns: [ceil(N/32), K/G, 128 + 32 G] int8: for each strip and group 32 scales, then the codes
    as in `pack_int8_strips`. The type tells them from int4.
    """
    return _with_headers(scale, pack_int8_strips(codes)).view(torch.int8)


def unpack_int8_groups(packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Invert `pack_int8_groups`. Returns: codes [N, K] int8; scale [N, K/G] int32."""
    size = packed.shape[2]
    scales, codes = packed.view(torch.uint8).split((4 * STRIP, size - 4 * STRIP), 2)
    strips = codes.reshape(len(packed), -1, STRIP, 4)  # [strip, step, 32, 4]
    return unpack_int8_strips(strips, n), _scales(scales, torch.int32)[:n].contiguous()
