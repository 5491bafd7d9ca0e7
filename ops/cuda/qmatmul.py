"""CUDA kernels, in Triton: a few rows of activations times int4, int8 or 16-bit weights, y = x W^T.

From one token to a tree of 64 the product is bound by reading weights, if unpacking keeps up.
1. Operands are swapped, y^T = W x^T: weights are the long side of a tensor-core tile, unpacked in
   registers; tokens, padded to 16, 32 or 64, are the short side. More tokens are more tiles.
   16-bit weights lie as in the model, row by row.
2. layout.py stores 4 or 2 weights per 16-bit word, one per plane: a plane of a tile is 64
   neighbours in K. Two words are unpacked at once: a shift, a mask, an exact subtraction.
3. Dot products of a scale group are taken over the codes, then scaled in fp32, without rounding.
4. Narrow layers use split-K to occupy every multiprocessor. Splits write fp32 partial sums, added
   in a fixed order without atomics: equal runs give equal bits.
5. A block with the gate and up rows of the same outputs applies SwiGLU. Products with other work
   behind them are in epilogues.py.

Sources: Marlin (arXiv 2408.11743) for the layout, Kim et al. (arXiv 2211.10017) for the
subtraction. Not here: experts (experts.py), biases.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.launch import Device, device_of
from ops.cuda.layout import COLUMNS, group_of
from ops.cuda.plans import MAX_SPLITS, key_of, measured_on

__all__ = ["Device", "device_of"]  # for callers that import this module only

FUSED = ("add", "rotary")  # epilogues of epilogues.py, which add their own partial sums
EPILOGUES = ("none", "fp32", "swiglu", *FUSED)
# blocks of 64 outputs for each processor that use the bandwidth; so the plans have the splits that
# sweep.py chose on an H200, for all ten products in 4 and in 16 bits
BUSY = 1.45
SUM = 7  # how many times these a second kernel costs, in K-blocks: an estimate


class ProductPlan(NamedTuple):
    """The tiles of a product. Only `tokens` and its consequences depend on the rows of x."""

    tokens: int  # rows of x per block
    rows: int  # rows of W per block
    splits: int  # of K
    stages: int  # of the software pipeline
    warps: int  # per block


# --------------------------------------------------------------------------------------------- plan


def choose_splits(N: int, blocks: int, processors: int, summed: bool = True) -> int:
    """Choose the number of splits of K, for N outputs and `blocks` blocks of K.

    A block of threads takes its K-blocks one after the other, at a pace of its own. All together
    are no faster than memory, whose bandwidth is in use with `BUSY` blocks for each processor. More
    splits than that take are only more partial sums.

    summed: a kernel of its own adds the partial sums
    """
    tiles = triton.cdiv(N, 64)
    of_memory = tiles * blocks / (BUSY * processors)

    def cost(splits: int) -> float:
        """Return the time in K-blocks of a block of threads."""
        own = max(triton.cdiv(blocks, splits), of_memory)
        return own + SUM / BUSY if summed and splits > 1 else own

    return min(range(1, min(MAX_SPLITS, blocks) + 1), key=cost)  # the fewest among equals


@cache
def plan_product(
    M: int,
    N: int,
    K: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    device: Device,
    epilogue: str = "none",
    zeros: bool = False,
) -> ProductPlan:
    """Choose tiles, splits and stages for M rows.

    `splits` and the order of every sum are the same for all M, so that a row's result does not
    depend on the other rows, nor on their number. This assumes that a tensor-core instruction adds
    its 16 products in the same way for 16, 32 and 64 tokens, which is not documented; test_gpu.py
    found it so on an H200.

    Trade-off: one fixed plan per shape, measured (plans.py) or estimated, instead of autotuning, so
    that the first call can be captured. Prefill reads the weights once per 64 rows; from a few
    hundred rows on, unpacking them for cuBLAS would be faster. fp32 has no tensor cores: for tests
    of identity.

    zeros: int4 weights have zero points
    """
    tokens = tile_height(M, 16, 32)
    if dtype != torch.float32 and not zeros:
        measured = measured_on(device.name).get(key_of(N, K, bits, group, epilogue))
        if measured:
            tile = measured.tiles[tokens]
            return ProductPlan(tokens, tile.rows, measured.splits, tile.stages, tile.rows // 16)
    if epilogue == "swiglu":
        splits = 1  # partial sums cannot be gated
    else:
        blocks = triton.cdiv(K, 16 // bits * COLUMNS)
        splits = choose_splits(N, blocks, device.processors, epilogue not in FUSED)
    if N % 16:
        tokens = min(tokens, 32)  # places that are no multiples of 16 take more registers
    cut = fit(tokens, splits, bits, group, dtype, device, zeros)
    many_scales = 0 < group < 64 and device.capability < 90
    if epilogue == "rotary" and many_scales and dtype != torch.float32:
        return ProductPlan(*cut[:4], warps=8)  # four spill
    return cut


def tile_height(rows: int, low: int, middle: int) -> int:
    """Return the rows of x per block: 16 for up to `low` rows, 32 for up to `middle`, else 64."""
    if rows <= low:
        return 16
    if rows <= middle:
        return 32
    return 64


def fit(
    tokens: int, splits: int, bits: int, group: int, dtype: torch.dtype, device: Device, zeros: bool
) -> ProductPlan:
    """Return the plan for `tokens` rows of x per block, or fewer where they would not fit.

    Blocks of 64 rows of W, and these stages, were the fastest on an H200, or close to it: sweep.py
    chose 64 rows in 26 of 30 cases.
    """
    if dtype == torch.float32:  # slow in any case; other numbers of warps and stages spill
        if 0 < group < 64:
            return ProductPlan(16, 64, splits, 2, 4)
        return ProductPlan(16, 64, splits, 3, 8)
    older = device.capability < 90
    if (0 < group < 128 and device.capability != 90) or (zeros and not older):
        # more spill, or become a trap (groups of 32 on sm_100, Triton 3.6 and 3.7)
        tokens = min(tokens, 32)
    warps = 4
    if bits == 16 and older and tokens == 64:
        warps = 8  # four spill
    if zeros and group < 64 and older and (device.capability, tokens) != (80, 16):
        warps = 8  # four spill words; on sm_80, with 16 tokens, eight do
    # 16-bit weights are more bytes for the same work: more of them must be on their way
    return ProductPlan(tokens, 64, splits, 4 if bits == 16 else 3, warps)


# ---------------------------------------------------------------------------------------- unpacking


@triton.constexpr_function
def unpack_asm(bits: int, plane: int, half: bool, zeros: bool = False) -> str:
    """Return PTX that unpacks the weights of one plane from two words, exactly.

    The result is two halves (fp16) or bfloat16s. A field that is OR-ed into the mantissa of 2^m
    (1024 in fp16, 128 in bf16) gives 2^m + field; the subtraction is exact. int4 fields are
    code + 8. int8 fields are a sign and a magnitude, as a bf16 mantissa has 7 bits.
    zeros: the second operand is the summand of an int4 field, `minus_zero`
    """
    # every constant is in both halves of a word; base: 2^m; bias: -(2^m + 8)
    if half:
        kind = "f16x2"
        base = "0x64006400"
        one = "0x3c003c00"
        minus_one = "0xbc00bc00"
        bias = "0xe408e408"
    else:
        kind = "bf16x2"
        base = "0x43004300"
        one = "0x3f803f80"
        minus_one = "0xbf80bf80"
        bias = "0xc308c308"
    if bits == 4:
        # (w & mask) | base
        field = f"shr.u32 w, $1, {4 * plane}; lop3.b32 w, w, 0x000f000f, {base}, 0xea;"
        if zeros:
            bias = "$2"
        return (
            f"{{ .reg .b32 w, a, b; {field} mov.b32 a, {one}; mov.b32 b, {bias}; "
            f"fma.rn.{kind} $0, w, a, b; }}"
        )
    # +-2^m
    sign = f"shl.b32 s, $1, {8 - 8 * plane}; lop3.b32 s, s, 0x80008000, {base}, 0xea;"
    # +-(2^m + magnitude)
    field = f"shr.u32 w, $1, {8 * plane}; lop3.b32 w, w, 0x007f007f, s, 0xea;"
    return (
        f"{{ .reg .b32 s, w, a; {sign} {field} mov.b32 a, {minus_one}; "
        f"fma.rn.{kind} $0, s, a, w; }}"
    )


@triton.constexpr_function
def minus_zero(half: bool) -> int:
    """Return an int32 whose two halves (fp16) or bfloat16s are -2^m.

    A field below 32 that is OR-ed into both gives -(2^m + field).
    """
    return (0xE400E400 if half else 0xC300C300) - 2**32


@triton.jit
def _unpack(
    words, zero, plane: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr
):
    """Return the weights of one plane as `dtype`: [ROWS, WIDTH] int16 -> [ROWS, WIDTH].

    zero: [ROWS] int32, 8 + zero point of int4; without ZEROS it is 8
    """
    if dtype == tl.float32:
        field = (words.to(tl.int32) >> (BITS * plane)) & ((1 << BITS) - 1)
        if BITS == 8:
            return tl.where(field < 128, field, 128 - field).to(tl.float32)
        else:
            return (field - (zero[:, None] if ZEROS else 8)).to(tl.float32)
    else:
        code: tl.constexpr = unpack_asm(BITS, plane, dtype == tl.float16, ZEROS)
        if not ZEROS:
            bits = tl.inline_asm_elementwise(
                code, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            # the second operand takes a register for each of the two words, with the same content
            minus = (zero * 0x10001 | minus_zero(dtype == tl.float16))[:, None]
            bits = tl.inline_asm_elementwise(
                code, "=r,r,r,r", [words, minus], dtype=tl.int16, is_pure=True, pack=2
            )
        return bits.to(dtype, bitcast=True)


# ------------------------------------------------------------------------------------------ kernels


@triton.constexpr_function
def words_of(group: int, dtype: tl.dtype) -> int:
    """Return the words of scales per row and K-block, as `pack_scales` makes them in this dtype.

    group: of int4; 0: int8, without such words
    """
    if group == 0:
        return 0
    if dtype == tl.float32:
        return 256 // group
    return 128 // group


@triton.jit
def _scale_words(scale_ptr, block, row, N, WORDS: tl.constexpr):
    """Read the scales of a K-block, in words of `pack_scales`: a tuple of WORDS x [ROWS] int32."""
    words = ()
    for i in tl.static_range(WORDS):
        words = words + (
            tl.load(scale_ptr + (block * N + row) * WORDS + i).to(tl.int32, bitcast=True),
        )
    return words


@triton.jit
def _scale(words, group: tl.constexpr, ZEROS: tl.constexpr):
    """Return the scales of one group of the K-block: [ROWS] fp32."""
    if ZEROS:
        bits = words[group] & -32
    else:
        word = words[group // 2]
        # a bf16 is the upper half of an fp32
        bits = word << 16 if group % 2 == 0 else word & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _zero(words, k: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Return 8 + the zero points of the group with weight k, [ROWS] int32, or 8 without any."""
    if ZEROS:
        return words[k // GROUP] & 31
    else:
        return 8  # no None, which Triton 3.6 cannot return


@triton.jit
def _halves(x):
    """Return the upper and the lower rows of x, [R, C]: [R / 2, C] each."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def _dot(w, x, total):
    """Return total + w x, unrounded. w: [ROWS, WIDTH], unpacked; x: [WIDTH, TOKENS]"""
    if w.dtype == tl.float32:
        # For Blackwell Triton rounds fp32 operands to TF32 where one comes from 16-bit words and
        # has 64 rows or more, whatever precision was asked for: 32 at a time.
        upper, lower = _halves(w)
        first, second = _halves(total)
        first = tl.dot(upper, x, first, input_precision="ieee")
        second = tl.dot(lower, x, second, input_precision="ieee")
        return tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), total.shape)
    return tl.dot(w, x, total, input_precision="ieee")


@triton.jit
def quantized_product(
    x_rows, live, packed_ptr, scale_ptr, row, N, first, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute (codes * scale) x^T over the K-blocks first .. last: [ROWS, TOKENS] fp32.

    x_rows: [TOKENS] pointers to rows of x
    live: [TOKENS] bool, the others count as zeros and are not read
    packed, scale: as for `matmul_kernel`; row: [ROWS] int32, of the N outputs
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
        if ZEROS:  # the pipeline covers words that a dot product needs
            scales = _scale_words(scale_ptr, block, row, N, WORDS)
        else:  # it does not cover the others: read a block ahead, or every block waits for memory
            following = _scale_words(scale_ptr, tl.minimum(block + 1, last - 1), row, N, WORDS)
        part = tl.full((ROWS, TOKENS), 0.0, tl.float32)
        for start in tl.static_range(0, COLUMNS, WIDTH):
            words = tl.load(words_ptr + block * stride + start, eviction_policy="evict_first")
            for plane in tl.static_range(PLANES):
                k = block * BLOCK + plane * COLUMNS + start
                x = tl.load(tokens_ptr + k, mask=live[None, :], other=0.0)
                zero = _zero(scales, plane * COLUMNS + start, GROUP, ZEROS)
                w = _unpack(words, zero, plane, BITS, ZEROS, dtype)
                if GROUP == 0:
                    total = _dot(w, x, total)
                else:
                    part = _dot(w, x, part)
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


@triton.jit
def float_product(x_rows, live, weight_ptr, row, K, first, last, STAGES: tl.constexpr):
    """Compute w x^T over the K-blocks first .. last: [ROWS, TOKENS] fp32.

    weight: [N, K]; the rest as for `quantized_product`
    """
    COLUMNS: tl.constexpr = 64  # of layout.py
    c = tl.arange(0, COLUMNS)
    weights_ptr = weight_ptr + row[:, None].to(tl.int64) * K + c[None, :]  # [ROWS, COLUMNS]
    tokens_ptr = x_rows[None, :] + c[:, None]  # [COLUMNS, TOKENS]
    total = tl.full((row.shape[0], live.shape[0]), 0.0, tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * COLUMNS
        inside = c < K - k
        w = tl.load(weights_ptr + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(tokens_ptr + k, mask=inside[:, None] & live[None, :], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    return total


@triton.jit
def product_tile(
    x_ptr, packed_ptr, scale_ptr, t, row, split, M, N, K, BITS: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of (codes * scale) x^T over a split of K: [ROWS, TOKENS] fp32.

    x: [M, K], K a multiple of BLOCK; packed: [K / BLOCK, N, COLUMNS] int16
    scale: [K / BLOCK, N, WORDS] int32 or fp32, from `pack_scales`; or [N] fp32 when GROUP is 0
    With BITS 16 packed is the weight, [N, K] of x's dtype for any K, and scale is not read.
    t: [TOKENS] int32, rows of x; row: [ROWS] int32, of the weight
    """
    blocks = tl.cdiv(K, 16 // BITS * 64)
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS
    x_rows = x_ptr + t.to(tl.int64) * K
    if BITS == 16:
        total = float_product(x_rows, t < M, packed_ptr, row, K, first, last, STAGES)
    else:
        total = quantized_product(
            x_rows, t < M, packed_ptr, scale_ptr, row, N, first, last, BITS, GROUP, STAGES
        )
    return total


@triton.constexpr_function
def halvings(size: int) -> int:
    """Return how often a power of two can be halved."""
    return size.bit_length() - 1


@triton.jit
def pairwise_sum(x):
    """Add neighbours, then neighbouring sums, until one is left: [R, C] -> [R].

    The order does not depend on the number of rows, as that of tl.sum may.
    """
    for _ in tl.static_range(halvings(x.shape[1])):
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = left + right
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def divided_by_rms(total, squares_ptr, t, M, F, PARTS: tl.constexpr):
    """Divide columns by the root mean square of the rows of x: [ROWS, TOKENS] fp32.

    squares: [parts, M] fp32, sums of squares as in `ops.epilogues.UnnormalizedRows`; PARTS: padded
    to a power of two; F: features
    """
    part = tl.arange(0, PARTS)
    inside = (part[None, :] < tl.cdiv(F, 64)) & (t[:, None] < M)
    squares = tl.load(squares_ptr + part[None, :] * M + t[:, None], mask=inside, other=0.0)
    return total * tl.rsqrt(pairwise_sum(squares) / F)[None, :]


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_ptr, packed_ptr, scale_ptr, squares_ptr, y_ptr, M, N, K, F, BITS: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute a block of y^T = (codes * scale) x^T, or of its partial sums over a split of K.

    x, packed, scale: as for `product_tile`; squares, F, PARTS: as for `divided_by_rms`, or None
    y: [M, N], or [SPLITS, M, N] fp32; with GATED [M, N / 2], SwiGLU of the gate rows above and the
    up rows below
    Writes: y.
    """
    split = tl.program_id(2)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)  # rows beyond N read the last one, and are not stored
    if GATED:  # a gate and its up row are neighbours
        row = row % 2 * (N // 2) + row // 2
    total = product_tile(
        x_ptr, packed_ptr, scale_ptr, t, row, split, M, N, K, BITS, GROUP, SPLITS, STAGES
    )
    if squares_ptr is not None:
        total = divided_by_rms(total, squares_ptr, t, M, F, PARTS)
    if GATED:
        # [ROWS / 2, TOKENS] each
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS // 2, 2, TOKENS)), (0, 2, 1)))
        total = gate * tl.sigmoid(gate) * up
        n = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        N = N // 2
    out = (split * M + t[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(
        y_ptr + out, total.to(y_ptr.dtype.element_ty), mask=(t[None, :] < M) & (n[:, None] < N)
    )


@triton.jit
def sum_kernel(parts_ptr, y_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partial sums, first split first. parts: [SPLITS, size] fp32; y: [size]. Writes: y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * tl.cast(size, tl.int64) + i, mask=i < size, other=0.0)
    tl.store(y_ptr + i, total.to(y_ptr.dtype.element_ty), mask=i < size)


# ------------------------------------------------------------------------------------------- launch


def has_zeros(scale: Tensor | None) -> bool:
    """Return whether these scales have zero points."""
    return scale is not None and scale.dim() == 3 and scale.dtype == torch.float32


def bits_and_group(scale: Tensor | None) -> tuple[int, int]:
    """Return bits and group, from the shape of the scales.

    int4 has scales per group, [blocks, N, words]; int8 has [N], and its group is 0; so is that of
    floats, which have none.
    """
    if scale is None:
        return 16, 0
    if scale.dim() == 3:
        return 4, group_of(scale)
    return 8, 0


def sizes_of(packed: Tensor, bits: int) -> tuple[int, int]:
    """Return the outputs and the inputs, padded to whole blocks, of a weight of `matmul_kernel`."""
    if bits == 16:
        return packed.shape[0], packed.shape[1]
    return packed.shape[1], packed.shape[0] * COLUMNS * 16 // bits


def parts_of(squares: Tensor | None) -> int:
    """Return PARTS of `divided_by_rms`."""
    return triton.next_power_of_2(len(squares)) if squares is not None else 0


def run_product(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    cut: ProductPlan,
    epilogue: str = "none",
    squares: Tensor | None = None,
) -> Tensor:
    """Run the product as `cut` plans it.

    Allocates its result and partial sums, and nothing else; never waits.

    epilogue: "fp32": unrounded; "swiglu": of gate rows above up rows, where `cut` has one split
    squares: of `ops.epilogues.UnnormalizedRows`, where x are its values; for "swiglu" only
    Returns: [..., N] in x's dtype or fp32; [..., N / 2] with SwiGLU.
    """
    bits, group = bits_and_group(scale)
    N, K = sizes_of(packed, bits)
    F = x.shape[-1]  # inputs before they are padded
    assert packed.is_contiguous(), packed.stride()
    x = padded_to(x, K)
    M = x.numel() // K
    gated = epilogue == "swiglu"
    assert not gated or cut.splits == 1, cut
    assert squares is None or (gated and squares.is_contiguous()), epilogue
    width = N // 2 if gated else N
    dtype = torch.float32 if epilogue == "fp32" else x.dtype
    y = torch.empty(*x.shape[:-1], width, device=x.device, dtype=dtype)
    out = y
    if cut.splits > 1:
        out = torch.empty(cut.splits, M, N, dtype=torch.float32, device=x.device)
    matmul_kernel[triton.cdiv(M, cut.tokens), triton.cdiv(N, cut.rows), cut.splits](
        x,
        packed,
        scale,
        squares,
        out,
        M,
        N,
        K,
        F,
        BITS=bits,
        GROUP=group,
        SPLITS=cut.splits,
        GATED=gated,
        TOKENS=cut.tokens,
        ROWS=cut.rows,
        STAGES=cut.stages,
        PARTS=parts_of(squares),
        num_warps=cut.warps,
    )
    if cut.splits > 1:
        grid = (triton.cdiv(M * N, 512),)
        sum_kernel[grid](out, y, M * N, SPLITS=cut.splits, BLOCK=512)
    return y


def padded_to(x: Tensor, K: int) -> Tensor:
    """Pad the inputs with zeros to K, as the weights are."""
    missing = K - x.shape[-1]
    if missing > 0:
        return F.pad(x, (0, missing))
    return x.contiguous()


def plan_of(
    x: Tensor, packed: Tensor, scale: Tensor | None, device: Device, epilogue: str
) -> ProductPlan:
    """Return the plan for the product of these operands."""
    K = x.shape[-1]
    M = x.numel() // K
    bits, group = bits_and_group(scale)
    N, _ = sizes_of(packed, bits)
    return plan_product(M, N, K, bits, group, x.dtype, device, epilogue, has_zeros(scale))


def matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    device: Device,
    epilogue: str = "none",
    squares: Tensor | None = None,
) -> Tensor:
    """Compute `ops.weight.w4a16` or `w8a16`; without a scale `ops.linear.linear`.

    epilogue, squares: as for `run_product`
    """
    cut = plan_of(x, packed, scale, device, epilogue)
    return run_product(x, packed, scale, cut, epilogue, squares)
