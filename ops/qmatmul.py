"""Products with quantized weights, x W^T: a function per format and device, for any row count.

CPU (`grouped`, `w8a8`, `blocks`; cpu/quantized.cpp): activations are rounded to 8 bits too,
outliers to 15 (with K types 13), with a scale per row and block of K, and all dot products are in
integers. A row's result does not depend on the other rows, bit for bit. Without a C++ compiler the
references below compute the first two, slowly; blocks are widened then.
CUDA (`w4a16`, `w8a16`; cuda/qmatmul.py): activations keep 16 bits. Where PyTorch replaces the
products, the references unpack the weight in every call.

`PRODUCTS` holds, per format and kind of device, the functions that pack, unpack and multiply
weights. With a routing (`ops.experts.route`), x is [P, K], weights are stacked, and row i is
multiplied by the weight of its own expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.cpu.layout import (
    pack_int4_strips,
    pack_int8_groups,
    pack_int8_strips,
    unpack_int4_strips,
    unpack_int8_groups,
    unpack_int8_strips,
)
from ops.cuda.layout import (
    COLUMNS,
    pack_int4_planes,
    pack_int8_planes,
    pack_scales,
    unpack_int4_planes,
    unpack_int8_planes,
    unpack_scales,
)
from ops.experts import expert_of, rows_by_expert
from ops.library import cuda_products, has_cpu_operators, is_plain, lib
from ops.linear import empty_product

OUTLIER = 4  # root mean squares of a row above which a magnitude does not set its block's scale
FARTHEST = 128  # an outlier's code is at most this many times 127
FARTHEST_OF_SUPER = 32  # the same beside K types, so that integer sums of a block fit 32 bits
BLOCK8 = 128  # values of K per activation scale of w8a8 and of K types; others take their group
ZERO_BITS = 511  # of a word of `join_zeros`

lib.define("w4a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor")
lib.define("w8a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists, str epilogue) -> Tensor")


class Product(NamedTuple):
    """The product of one format on one kind of device."""

    # (codes, scale) -> (packed, scale), in the operator's layout
    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    # (packed, scale, N, K) -> (codes, scale)
    unpack: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
    # (x [..., K], packed, scale, n, fp32_out, routing=None) -> x W^T, [..., n]; fp32_out: in fp32
    multiply: Callable[..., Tensor]


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


def _family(routing: Tensor | None) -> str:
    return "products" if routing is None else "experts"


# --------------------------------------------------------------------------------------------- CPU


def _w4a8(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, fp32_out: bool, expert: Tensor | None = None
) -> Tensor:
    if not has_cpu_operators(_family(expert)):

        def reference(rows: Tensor, w: Tensor, s: Tensor) -> Tensor:
            return grouped_reference(rows, *unpack_int4_strips(w, n))

        return _multiply_plainly(reference, x, packed, scale, n, fp32_out, expert)
    y = torch.ops.gpt_eagle.grouped(_readable(x), packed, n, fp32_out, expert)
    return y if fp32_out else y.to(x.dtype)


def _w8a8(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, fp32_out: bool, expert: Tensor | None = None
) -> Tensor:
    if not has_cpu_operators(_family(expert)):

        def reference(rows: Tensor, w: Tensor, s: Tensor) -> Tensor:
            if not s.numel():
                return grouped_reference(rows, *unpack_int8_groups(w, n), half=128)
            return w8a8_reference(rows, unpack_int8_strips(w, n), s)

        return _multiply_plainly(reference, x, packed, scale, n, fp32_out, expert)
    if not scale.numel():
        y = torch.ops.gpt_eagle.grouped(_readable(x), packed, n, fp32_out, expert)
    else:
        y = torch.ops.gpt_eagle.w8a8(_readable(x), packed, scale, fp32_out, expert)
    return y if fp32_out else y.to(x.dtype)


def _pack_int8(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if scale.dim() == 1:
        return pack_int8_strips(codes), scale
    return pack_int8_groups(codes, scale), scale.new_empty(0)


def _unpack_int8(packed: Tensor, scale: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    if scale.numel():
        return unpack_int8_strips(packed, n), scale
    return unpack_int8_groups(packed, n)


def _blocks(
    x: Tensor, packed: Tensor, table: Tensor, n: int, fp32_out: bool, expert: Tensor | None = None
) -> Tensor:
    if is_plain(_family(expert)):  # since they were packed; from the start they would be widened

        def reference(rows: Tensor, w: Tensor, s: Tensor) -> Tensor:
            return F.linear(rows.float(), numbers_of(w, table, torch.arange(n), torch.float32))

        scale = table.expand(len(packed), -1)  # as of stacked weights
        return _multiply_plainly(reference, x, packed, scale, n, fp32_out, expert)
    y = torch.ops.gpt_eagle.blocks(_readable(x), packed, table, fp32_out, expert)
    return y if fp32_out else y.to(x.dtype)


def numbers_of(packed: Tensor, table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows of packed blocks as numbers; only C++ knows their layout.

    packed: [bytes] uint8; table: from `hf.gguf_blocks.table_of`; rows: [R] int64
    Returns: [R, K] of `dtype`.
    """
    out = torch.empty(len(rows), int(table[1]), dtype=dtype)
    torch.ops.gpt_eagle.block_rows(packed, table, rows, out)
    return out


def _readable(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x  # the operators read bf16 and fp32


def _multiply_plainly(
    reference: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    n: int,
    fp32_out: bool,
    expert: Tensor | None,
) -> Tensor:
    """Multiply by a reference, where every step is eager."""
    rows = x.reshape(-1, x.shape[-1])
    y = rows.new_empty(len(rows), n, dtype=torch.float32 if fp32_out else x.dtype)
    if expert is None:
        y.copy_(reference(rows, packed, scale))
    else:
        for e, hit in rows_by_expert(expert):
            y[hit] = reference(rows[hit], packed[e], scale[e]).to(y.dtype)
    return y.view(*x.shape[:-1], n)


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
    # divided as in cpu/quantized.cpp: with a plain number, 127 / unit is 127 * (1 / unit), which
    # rounds twice
    to_code = torch.where(unit > 1e-30, torch.full_like(unit, 127) / unit, 0)
    return (blocks * to_code).round(), unit / 127


def grouped_reference(x: Tensor, codes: Tensor, scale: Tensor, half: int = 8) -> Tensor:
    """Compute `grouped` plainly.

    x: [M, K]; codes, scale: as for `pack_int4_strips` or `pack_int8_groups`; half: of `split_zeros`
    Returns: [M, N] fp32.
    """
    activations, scales = round_activations(x, codes.shape[1] // scale.shape[1])
    weights, steps = split_zeros(codes, scale, half)
    # integers of up to 30 bits are exact in fp64
    sums = torch.einsum("mbk,nbk->mbn", activations.double(), weights.double()).float()
    return (sums * scales * steps.squeeze(-1).T).sum(1)


def w8a8_reference(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Compute `w8a8` plainly. x: [M, K]; codes: [N, K]; scale: [N] fp32. Returns: [M, N] fp32."""
    activations, scales = round_activations(x, BLOCK8)
    padded = F.pad(codes.float(), (0, -codes.shape[1] % BLOCK8))
    weights = padded.unflatten(1, (-1, BLOCK8))
    sums = torch.einsum("mbk,nbk->mbn", activations.double(), weights.double()).float()
    return (sums * scales).sum(1) * scale


def rounding_of_blocks(elements: int) -> tuple[int, int]:
    """Return `block` and `farthest` of `round_activations`, for file blocks of so many weights."""
    return (BLOCK8, FARTHEST_OF_SUPER) if elements == 256 else (elements, FARTHEST)


def blocks_reference(x: Tensor, weight: Tensor, elements: int) -> Tensor:
    """Compute `blocks` plainly, in fp64.

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
    epilogue: as for `ops.cuda.qmatmul.run_product`
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
    epilogue: as for `ops.cuda.qmatmul.run_product`
    Returns: [..., N] in x's dtype, or as the epilogue defines it.
    Raises: ValueError for weights of another width, or scales in another layout.
    """
    stacked = packed.shape[:-3] + packed.shape[-2:-1]
    _check(x, packed, 8, scale.dtype == torch.float32 and scale.shape == stacked)
    return torch.ops.gpt_eagle.w8a16(x, packed, scale, lists, epilogue)


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


def _quantized_matmul_plain(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    """Multiply by the references, on a device whose data the host does not read."""
    reference = w4a16_reference if scale.dim() == packed.dim() else w8a16_reference
    if lists is None:
        return reference(x, packed, scale, epilogue == "fp32")
    expert = expert_of(lists, len(packed))[:, None]  # [P, 1]
    y = empty_product(x, packed, epilogue)
    for e in range(len(packed)):  # every row by every expert
        y = torch.where(expert == e, reference(x, packed[e], scale[e]), y)
    return y


def _quantized_matmul_cuda(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    if is_plain(_family(lists)):
        return _quantized_matmul_plain(x, packed, scale, lists, epilogue)
    products = cuda_products()
    device = products.device_of(x.device.index)
    with torch.cuda.device(x.device):
        if lists is None:
            return products.matmul(x, packed, scale, device, epilogue)
        import ops.cuda.experts

        return ops.cuda.experts.experts_product(x, packed, scale, lists, device)


def _quantized_matmul_fake(
    x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None, epilogue: str
) -> Tensor:
    return empty_product(x, packed, epilogue)


for _name in ("w4a16", "w8a16"):
    lib.impl(_name, _quantized_matmul_cuda, "CUDA")
    torch.library.register_fake(f"gpt_eagle::{_name}", _quantized_matmul_fake, lib=lib)


# ------------------------------------------------------------------------------------------- table


def _on_cuda(product: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Return a CUDA product as fields of `Product`."""
    return {
        "multiply": lambda x, packed, scale, n, fp32_out, lists=None: product(
            x, packed, scale, lists, "fp32" if fp32_out else "none"
        ),
    }


PRODUCTS = {
    ("int4", "cpu"): Product(
        lambda codes, scale: (pack_int4_strips(codes, scale), scale.new_empty(0)),
        lambda packed, scale, n, k: unpack_int4_strips(packed, n),
        _w4a8,
    ),
    ("int8", "cpu"): Product(_pack_int8, _unpack_int8, _w8a8),
    ("blocks", "cpu"): Product(None, None, _blocks),  # hf/gguf_blocks.py packs them
    ("int4", "cuda"): Product(
        lambda codes, scale: (
            pack_int4_planes(codes),
            pack_scales(scale, codes.shape[1] // scale.shape[1]),
        ),
        lambda packed, scale, n, k: (unpack_int4_planes(packed, n, k), unpack_scales(scale, k)),
        **_on_cuda(w4a16),
    ),
    ("int8", "cuda"): Product(
        lambda codes, scale: (pack_int8_planes(codes), scale),
        lambda packed, scale, n, k: (unpack_int8_planes(packed, n, k), scale),
        **_on_cuda(w8a16),
    ),
}
