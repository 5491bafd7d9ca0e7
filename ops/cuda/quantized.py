"""CUDA kernels, in Triton: a few rows of activations times int4 or int8 weights, y = x W^T.

From a single token to a tree of 64 the product is bound by reading the weights, if unpacking them keeps up.
1. Operands are swapped, y^T = W x^T: the weights are the long side of a tensor-core tile, unpacked in registers; the
   tokens, padded to 16, 32 or 64, are the short side. More than 64 tokens are more tiles.
2. layout.py stores 4 or 2 weights per 16-bit word, one per plane, so that a plane of a tile is 64 neighbours in K and
   two words are unpacked at once: a shift, a mask, an exact subtraction, of the group's zero point too.
3. Dot products of a scale group are taken over the codes, then scaled in fp32: nothing is rounded before.
4. Narrow layers cut K into splits, so that every multiprocessor has work. Each split writes fp32 partial sums, which
   are added in a fixed order: no atomics, equal runs give equal bits.
5. What comes behind a product is done where it costs no launch (`EPILOGUES`): partial sums are added by the norm that takes
   them (norm.py), and a block that has the gate and the up rows of the same outputs applies SwiGLU.
6. The first weights are fetched before the kernel in front is over (launch.py).

Trade-off: see `plan_product`. Not run on a GPU yet. Sources: Marlin (arXiv 2408.11743) for the layout, Kim et al.
(arXiv 2211.10017) for the subtraction. Not here: experts (experts.py), biases.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.launch import Device, after_others, device_of, fetch, overlap
from ops.cuda.layout import COLUMNS, group_of

__all__ = ["Device", "device_of"]  # for who has this module at hand

MAX_SPLITS = 8
EPILOGUES = ("none", "fp32", "split_k", "swiglu")  # of a result, see `run_product`


class ProductPlan(NamedTuple):
    """How a product is cut. Only `tokens` and what follows from it depends on the number of rows of x."""

    tokens: int  # rows of x per block
    rows: int  # rows of W per block
    splits: int  # of K
    stages: int  # of the software pipeline
    warps: int  # per block


# ------------------------------------------------------------------------------------------------ plan


def choose_splits(N: int, blocks: int, processors: int, summed: bool = True) -> int:
    """Into how many parts to cut K, for N outputs and `blocks` blocks of K.

    summed: by a kernel of its own

    The kernel lasts as long as its busiest processor. There a tile of 128 outputs costs the K-blocks it reads, and
    one more to fill its pipeline. Splits cost a K-block each to write partial sums, and a second kernel, worth about
    4 K-blocks. Both are estimates, for an H100: a K-block of a tile is 16 KiB, 0.7 us of a processor's share.
    """

    def cost(splits: int) -> int:
        tiles = triton.cdiv(triton.cdiv(N, 128) * splits, processors)  # of the busiest processor
        alone = splits == 1
        return tiles * (triton.cdiv(blocks, splits) + (1 if alone else 2)) + (
            0 if alone or not summed else 4
        )

    return min(range(1, min(MAX_SPLITS, blocks) + 1), key=cost)  # the fewest among equals


def shared_bytes(
    tokens: int, rows: int, stages: int, bits: int, device: Device, scales: int = 0
) -> int:
    """Shared memory of a block for 16-bit x: stages of words and of x, as Triton lays them out.

    bits: 16 for floats; scales: those of a row and block that the pipeline covers (bytes)
    """
    words, x = rows * (COLUMNS * 2 + scales), 16 // bits * COLUMNS * tokens * 2
    in_use = (
        x if device.capability >= 90 else 0
    )  # Hopper's tensor cores read x from here, the others from registers
    in_use += words if in_use and bits == 16 else 0  # and words that need no unpacking
    return (stages - 1) * (words + x) + in_use


@cache
def plan_product(
    M: int, N: int, K: int, bits: int, group: int, dtype: torch.dtype, device: Device, epilogue: str = "none",
    zeros: bool = False,
) -> ProductPlan:  # fmt: skip
    """Choose tiles, splits and stages for M rows. zeros: whether int4 has zero points

    `splits` and the order of every sum are the same for all M, so that a row's result does not depend on the rows
    beside it, nor on their number. This assumes that a tensor-core instruction adds its 16 products in the same way
    for 16, 32 and 64 tokens, which is not documented; test_gpu.py tests it.

    Trade-off: one fixed plan per shape instead of autotuning, so that the first call can be captured. Prefill reads the
    weights once per 64 rows; from a few hundred rows on, unpacking them for cuBLAS would be faster. fp32 has no tensor
    cores: for tests of identity.
    """
    splits = choose_splits(
        N, triton.cdiv(K, 16 // bits * COLUMNS), device.processors, epilogue != "split_k"
    )
    splits = 1 if epilogue == "swiglu" else splits  # a sum has no gate before it is whole
    return fit(16 if M <= 16 else 32 if M <= 32 else 64, splits, bits, group, dtype, device, zeros)


def fit(
    tokens: int, splits: int, bits: int, group: int, dtype: torch.dtype, device: Device, zeros: bool
) -> ProductPlan:
    """The plan for `tokens` rows of x per block, or fewer where they would not fit."""
    if dtype == torch.float32:  # slow in any case
        return ProductPlan(16, 64, splits, 2, 8)
    rows = 64 if tokens == 16 else 128  # wide blocks read x less often
    if group == 32 and device.capability < 90:
        tokens, rows = min(tokens, 32), 64  # more accumulators than that spill to memory
    scales = (
        8 * words_of(group, tl.float32) if zeros else 0
    )  # a word to unpack with, and the same to scale with
    for limit in (
        device.shared_bytes // 2,
        device.shared_bytes,
    ):  # two blocks hide each other's waits
        for stages in (4, 3):
            if shared_bytes(tokens, rows, stages, bits, device, scales) <= limit:
                return ProductPlan(tokens, rows, splits, stages, rows // 16)
    return ProductPlan(tokens, rows, splits, 2, rows // 16)


# ------------------------------------------------------------------------------------------- unpacking


@triton.constexpr_function
def unpack_asm(bits: int, plane: int, half: bool, zeros: bool = False) -> str:
    """PTX that turns two words into the weights of one plane: two halves (fp16) or bfloat16s, exact.

    OR-ing a field into the mantissa of 2^m (1024 in fp16, 128 in bf16) gives 2^m + field; the subtraction is exact.
    int4 fields are code + 8. int8 fields are a sign and a magnitude: bf16 has no room for more than 7 bits.
    zeros: what is added to an int4 field, `minus_zero`, is the second operand
    """
    kind, base, one, bias = (
        ("f16x2", 0x6400, 0x3C00, 0xE408) if half else ("bf16x2", 0x4300, 0x3F80, 0xC308)
    )
    base, one, bias = (
        f"0x{value * 0x10001:08x}" for value in (base, one, bias)
    )  # bias: -(2^m + 8)
    if bits == 4:
        field = f"shr.u32 w, $1, {4 * plane}; lop3.b32 w, w, 0x000f000f, {base}, 0xea;"  # (w & mask) | base
        bias = "$2" if zeros else bias
        return f"{{ .reg .b32 w, a, b; {field} mov.b32 a, {one}; mov.b32 b, {bias}; fma.rn.{kind} $0, w, a, b; }}"
    sign = f"shl.b32 s, $1, {8 - 8 * plane}; lop3.b32 s, s, 0x80008000, {base}, 0xea;"  # +-2^m
    field = (
        f"shr.u32 w, $1, {8 * plane}; lop3.b32 w, w, 0x007f007f, s, 0xea;"  # +-(2^m + magnitude)
    )
    minus = f"0x{(0xBC00 if half else 0xBF80) * 0x10001:08x}"
    return f"{{ .reg .b32 s, w, a; {sign} {field} mov.b32 a, {minus}; fma.rn.{kind} $0, s, a, w; }}"


@triton.constexpr_function
def minus_zero(half: bool) -> int:
    """What, as two halves (fp16) or bfloat16s, is -(2^m + field), if a field below 32 is OR-ed into both: an int32."""
    return (0xE400E400 if half else 0xC300C300) - 2**32


@triton.jit
def _unpack(words, zero, plane: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """The weights of one plane as `dtype`: [ROWS, WIDTH] int16 -> [ROWS, WIDTH].

    zero: [ROWS] int32, 8 + zero point of int4; None: 8, or int8
    """
    if dtype == tl.float32:
        field = (words.to(tl.int32) >> (BITS * plane)) & ((1 << BITS) - 1)
        if BITS == 8:
            return tl.where(field < 128, field, 128 - field).to(tl.float32)
        else:
            return (field - (8 if zero is None else zero[:, None])).to(tl.float32)
    else:
        code: tl.constexpr = unpack_asm(BITS, plane, dtype == tl.float16, zero is not None)
        if zero is None:
            bits = tl.inline_asm_elementwise(
                code, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        else:  # the second operand takes a register for each of the two words, with the same content
            minus = (zero * 0x10001 | minus_zero(dtype == tl.float16))[:, None]
            bits = tl.inline_asm_elementwise(
                code, "=r,r,r,r", [words, minus], dtype=tl.int16, is_pure=True, pack=2
            )
        return bits.to(dtype, bitcast=True)


# --------------------------------------------------------------------------------------------- kernels


@triton.constexpr_function
def words_of(group: int, dtype: tl.dtype) -> int:
    """Words of scales per row and K-block of int4, as `pack_scales` lays them out in this dtype; int8 has group 0."""
    return (256 if dtype == tl.float32 else 128) // group if group else 0


@triton.jit
def _scale_words(scale_ptr, block, row, N, WORDS: tl.constexpr):
    """The scales of a K-block, as `pack_scales` lays them out: a tuple of WORDS x [ROWS] int32."""
    words = ()
    for i in tl.static_range(WORDS):
        words = words + (
            tl.load(scale_ptr + (block * N + row) * WORDS + i).to(tl.int32, bitcast=True),
        )
    return words


@triton.jit
def _scale(words, group: tl.constexpr, ZEROS: tl.constexpr):
    """The scales of one group of the K-block: [ROWS] fp32."""
    if ZEROS:
        bits = words[group] & -32
    else:
        word = words[group // 2]
        bits = (
            word << 16 if group % 2 == 0 else word & -65536
        )  # a bf16 is the upper half of an fp32
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _zero(words, k: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """8 + the zero points of the K-block's group with weight k: [ROWS] int32; None where there are none."""
    if ZEROS:
        return words[k // GROUP] & 31
    else:
        return None


@triton.jit
def quantized_product(
    x_rows, live, packed_ptr, scale_ptr, row, N, first, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(codes * scale) x^T over the K-blocks first .. last: [ROWS, TOKENS] fp32.

    x_rows: [TOKENS] pointers to rows of x; live: [TOKENS] bool, the others count as zeros and are not read
    packed, scale: as for matmul_kernel; row: [ROWS] int32, of the N outputs
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    ROWS: tl.constexpr = row.shape[0]
    TOKENS: tl.constexpr = live.shape[0]
    PLANES: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 64  # of layout.py
    WIDTH: tl.constexpr = 32 if GROUP == 32 else COLUMNS  # a dot product must not span two groups
    BLOCK: tl.constexpr = PLANES * COLUMNS
    WORDS: tl.constexpr = words_of(GROUP, scale_ptr.dtype.element_ty)
    ZEROS: tl.constexpr = GROUP > 0 and WORDS * GROUP == BLOCK  # a group has a word
    c = tl.arange(0, WIDTH)
    stride = tl.cast(N, tl.int64) * COLUMNS  # between K-blocks of words
    words_ptr = packed_ptr + row[:, None] * COLUMNS + c[None, :]  # [ROWS, WIDTH]
    tokens_ptr = x_rows[None, :] + c[:, None]  # [WIDTH, TOKENS]
    total = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    scales = _scale_words(scale_ptr, first, row, N, WORDS)
    for block in tl.range(first, last, num_stages=STAGES):
        if ZEROS:  # words that a dot product needs are covered by the pipeline
            scales = _scale_words(scale_ptr, block, row, N, WORDS)
        else:  # the others are not: read a block ahead, or every block waits for memory
            following = _scale_words(scale_ptr, tl.minimum(block + 1, last - 1), row, N, WORDS)
        part = tl.full((ROWS, TOKENS), 0.0, tl.float32)
        for start in tl.static_range(0, COLUMNS, WIDTH):
            words = tl.load(words_ptr + block * stride + start, eviction_policy="evict_first")
            for plane in tl.static_range(PLANES):
                k = block * BLOCK + plane * COLUMNS + start
                x = tl.load(tokens_ptr + k, mask=live[None, :], other=0.0)
                w = _unpack(
                    words, _zero(scales, plane * COLUMNS + start, GROUP, ZEROS), plane, BITS, dtype
                )
                if GROUP == 0:
                    total = tl.dot(w, x, total, input_precision="ieee")
                else:
                    part = tl.dot(w, x, part, input_precision="ieee")
                    if (plane + 1) * COLUMNS % GROUP == 0:
                        total += (
                            part
                            * _scale(scales, (plane * COLUMNS + start) // GROUP, ZEROS)[:, None]
                        )
                        part = tl.full((ROWS, TOKENS), 0.0, tl.float32)
        if not ZEROS:
            scales = following
    if GROUP == 0:
        total *= tl.load(scale_ptr + row)[:, None]
    return total


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_ptr, packed_ptr, scale_ptr, y_ptr, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One block of y^T = (codes * scale) x^T, or of its partial sums over a split of K.

    x: [M, K], K a multiple of BLOCK; packed: [K / BLOCK, N, COLUMNS] int16
    scale: [K / BLOCK, N, WORDS] int32 or fp32, from `pack_scales`; or [N] fp32 when GROUP is 0
    y: [M, N], or [SPLITS, M, N] fp32; with GATED [M, N / 2], SwiGLU of the gate rows above and the up rows below.
    Writes: y.
    """
    split = tl.program_id(2)
    blocks = K // (16 // BITS * 64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)  # rows beyond N read the last one, and are not stored
    if GATED:  # a gate and its up row are neighbours
        row = row % 2 * (N // 2) + row // 2
    first, last = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    if OVERLAPS:
        for i in tl.static_range(STAGES):  # the lines that the pipeline reads first
            fetch(packed_ptr + (tl.minimum(first + i, last - 1) * N + row).to(tl.int64) * 64)
    after_others(OVERLAPS)
    x_rows = x_ptr + t.to(tl.int64) * K
    total = quantized_product(
        x_rows, t < M, packed_ptr, scale_ptr, row, N, first, last, BITS, GROUP, STAGES
    )
    if GATED:
        gate, up = tl.split(
            tl.permute(tl.reshape(total, (ROWS // 2, 2, TOKENS)), (0, 2, 1))
        )  # [ROWS / 2, TOKENS]
        total = gate * tl.sigmoid(gate) * up
        n = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        N = N // 2
    out = (split * M + t[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(
        y_ptr + out, total.to(y_ptr.dtype.element_ty), mask=(t[None, :] < M) & (n[:, None] < N)
    )


@triton.jit
def sum_kernel(
    parts_ptr, y_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Add the partial sums, first split first. parts: [SPLITS, size] fp32; y: [size]. Writes: y."""
    after_others(OVERLAPS)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * tl.cast(size, tl.int64) + i, mask=i < size, other=0.0)
    tl.store(y_ptr + i, total.to(y_ptr.dtype.element_ty), mask=i < size)


# ---------------------------------------------------------------------------------------------- launch


def has_zeros(scale: Tensor) -> bool:
    """Whether zero points are among these scales."""
    return scale.dim() == 3 and scale.dtype == torch.float32


def bits_and_group(scale: Tensor) -> tuple[int, int]:
    """What the shape of the scales tells: int4 has them by group, [blocks, N, words]; int8, [N], has group 0."""
    return (4, group_of(scale)) if scale.dim() == 3 else (8, 0)


def run_product(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    cut: ProductPlan,
    device: Device,
    epilogue: str = "none",
) -> Tensor:
    """The product, cut as told. Allocates its result and partial sums, and nothing else; never waits.

    epilogue: "none", [..., N] in x's dtype; "fp32", in fp32; "split_k", fp32 sums of the splits, [splits, ..., N];
    "swiglu", SwiGLU of outputs with gate above up, [..., N / 2] in x's dtype, where `cut` has one split
    """
    bits, group = bits_and_group(scale)
    K, N = packed.shape[0] * COLUMNS * 16 // bits, packed.shape[1]
    x = (
        F.pad(x, (0, K - x.shape[-1])) if x.shape[-1] < K else x.contiguous()
    )  # K padded like the weights
    M, rows, gated = x.numel() // K, x.shape[:-1], epilogue == "swiglu"
    assert not gated or cut.splits == 1, cut
    options = {
        "device": x.device,
        "dtype": torch.float32 if epilogue in ("fp32", "split_k") else x.dtype,
    }
    splits = (cut.splits,) if epilogue == "split_k" else ()
    y = torch.empty(*splits, *rows, N // 2 if gated else N, **options)
    apart = cut.splits > 1 and epilogue != "split_k"
    out = torch.empty(cut.splits, M, N, dtype=torch.float32, device=x.device) if apart else y
    matmul_kernel[triton.cdiv(M, cut.tokens), triton.cdiv(N, cut.rows), cut.splits](
        x, packed, scale, out, M, N, K, BITS=bits, GROUP=group, SPLITS=cut.splits, GATED=gated,
        TOKENS=cut.tokens, ROWS=cut.rows, STAGES=cut.stages, num_warps=cut.warps, **overlap(device),
    )  # fmt: skip
    if apart:
        grid = (triton.cdiv(M * N, 512),)
        sum_kernel[grid](out, y, M * N, SPLITS=cut.splits, BLOCK=512, **overlap(device))
    return y


def plan_of(x: Tensor, packed: Tensor, scale: Tensor, device: Device, epilogue: str) -> ProductPlan:
    """The plan of a product of these operands."""
    K, N = x.shape[-1], packed.shape[1]
    return plan_product(
        x.numel() // K, N, K, *bits_and_group(scale), x.dtype, device, epilogue, has_zeros(scale)
    )


def matmul(
    x: Tensor, packed: Tensor, scale: Tensor, device: Device, epilogue: str = "none"
) -> Tensor:
    """`ops.quantized.w4a16` or `w8a16`."""
    return run_product(
        x, packed, scale, plan_of(x, packed, scale, device, epilogue), device, epilogue
    )
