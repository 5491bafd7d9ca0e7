"""The blocks of a GGUF file as CUDA's matmuls read them: planes of codes, which keep their bits.

`planes` unpacks the codes and scales once, for the layout of backends/triton/layout.py. Codes of 2
and 3 bits and layers with parts that are no blocks are widened, and without `keep_blocks` all but
`KEPT_BY_DEFAULT`. Not here: a CPU's layout, and who asks for which (blocks.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backends.blocks import NAMES, Blocks, bad_scale
from backends.planes import planes as join_planes
from backends.triton.layout import (
    BLOCK_FORMS,
    Form,
    columns_of,
    halves_of,
    inputs_of_block,
    pack_block_codes,
    pack_block_scales,
)
from backends.weight import Part, Weight

# Types that keep their bits on CUDA by default: one that did so before. The others wait for a
# device that times them, as a matmul of one row may take longer than in 16 bits. For 64 outputs and
# 256 inputs a warp issues (sm_90) 352 instructions in int4 with groups of 128, which takes 55.6 us
# for the four matmuls of a 7B layer on an H200, where reading 16 bits takes 94; Q4_0 453, Q8_0 580;
# Q5_0 604, Q4_1 646, Q4_K 671, Q5_1 809, Q6_K 819, Q5_K 834. In proportion these take 72, 92; 95 to
# 132 us. Memory of up to 2 TB/s takes 200 us for 16 bits, so that there all of them gain.
KEPT_BY_DEFAULT = ("Q4_0",)
ROWS_AT_ONCE = 2**11  # that are unpacked together on CUDA: the steps take several times their bytes
BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176,
    "Q6_K": 210,
}  # fmt: skip


def kept_types(every_type: bool) -> Collection[str]:
    """Return the types whose blocks can stay; every_type: not only by default"""
    return BLOCK_FORMS.keys() if every_type else KEPT_BY_DEFAULT


def size(name: str, outputs: int, inputs: int) -> int:
    """Return the size of a weight of a type in planes (bytes)."""
    form = BLOCK_FORMS[name]
    rows = -(-inputs // inputs_of_block(form.bits)) * outputs
    return 2 * rows * (columns_of(form.bits) + halves_of(form))


def joined(parts: Sequence[Blocks], device: str, path: Path) -> Weight:
    """Return weights, one below the other, as one. Raises: as `planes`."""
    return join_planes([planes(each, device, path) for each in parts])


def codes_of_blocks(name: str, content: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of blocks of a type, on any device.

    Source: dequantize_row_* of ggml (ggml-quants.c)
    name: of the type, a key of `BLOCK_FORMS`; content: [N, bytes of a row] uint8
    Returns: codes, [N, K] uint8, of Q8_0 the bits of int8; scales, as for `pack_block_scales`.
    """
    form = BLOCK_FORMS[name]
    each = content.unflatten(1, (-1, BLOCK_BYTES[name]))  # [N, blocks, bytes]
    if name == "Q6_K":
        low, high, integers, head = each.split((128, 64, 16, 2), -1)
        codes = _halves(low.unflatten(-1, (2, 64))) | _bits(high.unflatten(-1, (2, 32)), 2) << 4
        head = torch.cat((head, torch.zeros_like(head), integers), -1)
    elif form.scales == "super-minima":
        head, packed, fifth, halves = each.split((4, 12, 32 * (form.bits - 4), 128), -1)
        codes = _halves(halves.unflatten(-1, (4, 32)))
        if form.bits == 5:
            codes = codes | (_bits(fifth, 1) << 4).view(codes.shape)
        head = torch.cat((head, _integers(packed)), -1)
    else:
        of_scales = 4 if form.scales == "fp16-minima" else 2
        codes_bytes = 4 * form.bits
        head, codes = each.split((of_scales, codes_bytes), -1)
        if form.bits == 5:
            fifth, halves = codes.split((4, 16), -1)
            shifts = torch.arange(8, dtype=torch.uint8, device=content.device)
            codes = _halves(halves) | (fifth[..., None] >> shifts & 1).flatten(-2) << 4
        elif form.bits == 4:
            codes = _halves(codes)
    return codes.flatten(1), head.contiguous().view(torch.float16)


def _halves(bytes: Tensor) -> Tensor:
    """Return the low halves of bytes, then the high ones: [..., B] -> [..., 2 B]."""
    return torch.cat((bytes & 15, bytes >> 4), -1)


def _bits(bytes: Tensor, width: int) -> Tensor:
    """Return the fields of bytes, the lowest of all first: [..., B] -> [..., 8 B / width]."""
    fields = [bytes >> shift & (2**width - 1) for shift in range(0, 8, width)]
    return torch.cat(fields, -1)


def _integers(packed: Tensor) -> Tensor:
    """Return the 6-bit scales and minima of Q4_K and Q5_K in turn: [..., 12] -> [..., 16]."""
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return torch.stack((scales, minima), -1).flatten(-2)


def planes_of_blocks(name: str, content: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks of a type as CUDA's matmuls read them: codes and scales.

    name, content: as for `codes_of_blocks`
    """
    form = BLOCK_FORMS[name]
    codes, scale = codes_of_blocks(name, content)
    return pack_block_codes(codes, form.bits), pack_block_scales(scale, form)


def are_finite(scales: Tensor, form: Form) -> bool:
    """Return whether no scale or minimum of `pack_block_scales` is NaN or infinite."""
    numbers = scales[..., :2] if form.scales.startswith("super") else scales
    return bool(numbers.isfinite().all())


def planes(blocks: Blocks, device: str, path: Path) -> Weight:
    """Return a weight as CUDA's matmuls read it, some rows after the others.

    Raises: ValueError for a scale that is NaN or infinite.
    """
    name = NAMES[blocks.type_id]
    form = BLOCK_FORMS[name]
    outputs, inputs = blocks.shape
    rows = (-(-inputs // inputs_of_block(form.bits)), outputs)
    data = torch.empty(*rows, columns_of(form.bits), dtype=torch.int16, device=device)
    scale = torch.empty(*rows, halves_of(form), dtype=torch.float16, device=device)
    order = torch.arange(outputs) if blocks.order is None else blocks.order
    parts = zip(order.split(ROWS_AT_ONCE), *(x.split(ROWS_AT_ONCE, 1) for x in (data, scale)))
    for rows, to_data, to_scale in parts:
        some = blocks.content[rows].to(device)
        packed, scales = planes_of_blocks(name, some)
        if not are_finite(scales, form):
            raise ValueError(bad_scale(blocks.name, path))
        to_data.copy_(packed)
        to_scale.copy_(scales)
    return Weight(data, (Part(f"{name}_PLANES", outputs),), inputs, scale=scale)
