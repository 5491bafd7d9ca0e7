"""Codes and scales in strips of 32 outputs, as a CPU reads them (cpu/weight_layout.h)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRIP = 32  # outputs whose weights are interleaved; as in cpu/weight_layout.h


def pack_strips(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Lay out a weight.

    codes: [N, K] int8; of 4 bits -8 .. 7
    scale: [N] fp32; or [N, K/G] bfloat16, or int32 from `backends.weight.join_zeros`; G: 32, 64 or
        128
    Returns: [bytes] uint8. Each strip and group holds 32 scales, then its codes; scales of whole
    outputs lie behind all strips.
    """
    rows = _whole_strips(codes)
    scales = _whole_strips(scale.view(len(scale), -1))
    scales = scales.view(-1, STRIP, scales.shape[1]).transpose(1, 2).contiguous()
    of_strips = scales.view(torch.uint8)  # [strips, K/G or 1, bytes]
    packed = _pack_nibbles(rows) if bits == 4 else _pack_bytes(rows)  # [strips, bytes]
    if scale.dim() == 1:
        return torch.cat((packed.flatten(), of_strips.flatten()))
    groups = packed.view(*of_strips.shape[:2], -1)
    return torch.cat((of_strips, groups), 2).flatten()


def unpack_strips(
    packed: Tensor, n: int, k: int, group: int, scale: torch.dtype, bits: int
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales that `pack_strips` laid out. group: 0: one scale per output"""
    strips = -(-n // STRIP)
    of_strips = STRIP * (k // group if group else 1) * scale.itemsize  # bytes
    if group:
        groups = packed.view(strips, k // group, -1)
        header = of_strips // (k // group)
        of_scales, codes = groups.split((header, groups.shape[2] - header), 2)
        codes = codes.reshape(strips, -1)
    else:
        codes, of_scales = packed.split((strips * STRIP * k, strips * of_strips))
        codes = codes.view(strips, -1)
    scales = of_scales.contiguous().view(scale).view(strips, -1, STRIP)
    scales = scales.transpose(1, 2).reshape(strips * STRIP, -1)[:n].contiguous()
    rows = (_unpack_nibbles if bits == 4 else _unpack_bytes)(codes)[:n].contiguous()
    return rows, scales if group else scales.flatten()


def _whole_strips(t: Tensor) -> Tensor:
    """Pad the outputs with zeros to whole strips."""
    return F.pad(t, (0, 0, 0, -t.shape[0] % STRIP))


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes of 4 bits, [N, K] -> [strips, bytes].

    For every 4 values of k there is a byte per output i < 16 and k: output i in the low nibble,
    output i + 16 in the high one, both with 8 added.
    """
    # [strip, half, output, step, 4]
    nibbles = (codes + 8).to(torch.uint8).view(-1, 2, STRIP // 2, codes.shape[1] // 4, 4)
    both = nibbles[:, 0] | nibbles[:, 1] << 4  # [strip, 16, step, 4]
    return both.transpose(1, 2).flatten(1)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    both = packed.view(len(packed), -1, STRIP // 2, 4)  # [strip, step, 16, 4]
    halves = torch.stack((both & 15, both >> 4), 1)  # [strip, half, step, 16, 4]
    codes = halves.transpose(2, 3).reshape(len(packed) * STRIP, -1)
    return codes.to(torch.int8) - 8


def _pack_bytes(codes: Tensor) -> Tensor:
    """Pack codes of 8 bits, [N, K] -> [strips, bytes]: [K / 4, 32, 4], with 128 added."""
    shifted = codes.view(torch.uint8) ^ 128  # as + 128, modulo 256
    fours = shifted.view(torch.int32).view(-1, STRIP, codes.shape[1] // 4)
    return fours.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def _unpack_bytes(packed: Tensor) -> Tensor:
    fours = packed.view(len(packed), -1, STRIP, 4)  # [strip, step, 32, 4]
    shifted = fours.transpose(1, 2).reshape(len(packed) * STRIP, -1)
    return (shifted.to(torch.int16) - 128).to(torch.int8)
