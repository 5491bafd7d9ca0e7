"""CUDA kernels, in Triton: a few rows of activations times quantized or 16-bit weights, y = x W^T.

From one token to a tree of 64 the product is bound by reading weights, if unpacking keeps up.
1. Operands are swapped, y^T = W x^T: weights are the long side of a tensor-core tile, unpacked in
   registers; tokens, padded to 16, 32 or 64, are the short side. More tokens are more tiles.
   16-bit weights lie as in the model, row by row.
2. layout.py stores 4 or 2 weights per 16-bit word, one per plane: a plane of a tile is 64
   neighbours in K. Two words are unpacked at once: a shift, a mask, an exact subtraction. High bits
   of GGUF's codes of 5 and 6 bits lie behind the words.
3. Dot products of a scale group are taken over the codes, then scaled in fp32, without rounding.
   Minima, times the sum of a group of x, which is a dot product with ones, are added to them.
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

from backends.triton.launch import Device, device_of
from backends.triton.layout import form_of, inputs_of_block
from backends.triton.plans import MAX_SPLITS, key_of, measured_on

__all__ = ["Device", "device_of"]  # for callers that import this module only

MEASURED = ("", "bf16")  # scales of the forms in plans.py
FUSED = ("add", "rotary")  # epilogues of epilogues.py, which add their own partial sums
EPILOGUES = ("none", "fp32", "swiglu", *FUSED)
# blocks of 64 outputs for each processor that use the bandwidth; so the plans have the splits that
# `measure.py plans` chose on an H200, for all ten products in 4 and in 16 bits
BUSY = 1.45
BUSY_GGUF = 3.0  # of GGUF's types, which take twice the instructions: an estimate
SUM = 7  # how many times these a second kernel costs, in K-blocks: an estimate


class ProductPlan(NamedTuple):
    """The tiles of a product. Only `tokens` and its consequences depend on the rows of x."""

    tokens: int  # rows of x per block
    rows: int  # rows of W per block
    splits: int  # of K
    stages: int  # of the software pipeline
    warps: int  # per block


# --------------------------------------------------------------------------------------------- plan


def choose_splits(
    N: int, blocks: int, processors: int, summed: bool = True, busy: float = BUSY
) -> int:
    """Choose the number of splits of K, for N outputs and `blocks` blocks of K.

    A block of threads takes its K-blocks one after the other, at a pace of its own. All together
    are no faster than memory, whose bandwidth is in use with `busy` blocks for each processor. More
    splits than that take are only more partial sums.

    summed: a kernel of its own adds the partial sums
    """
    tiles = triton.cdiv(N, 64)
    of_memory = tiles * blocks / (busy * processors)

    def cost(splits: int) -> float:
        """Return the time in K-blocks of a block of threads."""
        own = max(triton.cdiv(blocks, splits), of_memory)
        return own + SUM / busy if summed and splits > 1 else own

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
    scales: str = "",
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

    bits, group, scales: as in `Form`
    """
    tokens = tile_height(M, 16, 32)
    if dtype != torch.float32 and scales in MEASURED:
        measured = measured_on(device.name).get(key_of(N, K, bits, group, epilogue))
        if measured:
            tile = measured.tiles[tokens]
            return ProductPlan(tokens, tile.rows, measured.splits, tile.stages, tile.rows // 16)
    if epilogue == "swiglu":
        splits = 1  # partial sums cannot be gated
    else:
        blocks = triton.cdiv(K, inputs_of_block(bits))
        summed = epilogue not in FUSED
        splits = choose_splits(N, blocks, device.processors, summed, busy_with(scales))
    if N % 16:
        tokens = min(tokens, 32)  # places that are no multiples of 16 take more registers
    many_scales = 0 < group < 64 and device.capability < 90
    if epilogue == "rotary" and many_scales and scales.endswith("minima"):
        return fit(16, splits, bits, group, dtype, device, scales)  # more spill
    cut = fit(tokens, splits, bits, group, dtype, device, scales)
    if epilogue == "rotary" and many_scales and dtype != torch.float32:
        return ProductPlan(*cut[:4], warps=8)  # four spill
    return cut


def busy_with(scales: str) -> float:
    """Return the blocks for each processor that use the bandwidth. scales: as in `Form`"""
    return BUSY if scales in ("", "bf16", "zeros") else BUSY_GGUF


def tile_height(rows: int, low: int, middle: int) -> int:
    """Return the rows of x per block: 16 for up to `low` rows, 32 for up to `middle`, else 64."""
    if rows <= low:
        return 16
    if rows <= middle:
        return 32
    return 64


def fit(
    tokens: int, splits: int, bits: int, group: int, dtype: torch.dtype, device: Device, scales: str
) -> ProductPlan:
    """Return the plan for `tokens` rows of x per block, or fewer where they would not fit.

    Blocks of 64 rows of W, and these stages, were the fastest on an H200, or close to it:
    `measure.py plans` chose 64 rows in 26 of 30 cases.
    """
    if dtype == torch.float32:  # slow in any case; other numbers of warps and stages spill
        if 0 < group < 64:
            return ProductPlan(16, 64, splits, 2, 4)
        return ProductPlan(16, 64, splits, 3, 8)
    older = device.capability < 90
    zeros = scales == "zeros"
    minima = scales.endswith("minima")
    many_registers = zeros or minima or bits in (5, 6)
    if (0 < group < 128 and device.capability != 90) or (many_registers and not older):
        # more spill, or become a trap (groups of 32 on sm_100, Triton 3.6 and 3.7)
        tokens = min(tokens, 32)
    warps = 4
    if bits == 16 and older and tokens == 64:
        warps = 8  # four spill
    if zeros and group < 64 and older and (device.capability, tokens) != (80, 16):
        warps = 8  # four spill words; on sm_80, with 16 tokens, eight do
    # 16-bit weights are more bytes for the same work: more of them must be on their way. Minima of
    # 16 tokens spill with three stages on sm_100 (Triton 3.6)
    many_stages = bits == 16 or (minima and device.capability >= 100 and tokens == 16)
    return ProductPlan(tokens, 64, splits, 4 if many_stages else 3, warps)


# ---------------------------------------------------------------------------------------- unpacking


@triton.constexpr_function
def unpack_asm(bits: int, plane: int, half: bool, scales: str, shift: int = 0) -> str:
    """Return PTX that unpacks the weights of one plane from two words, exactly.

    The result is two halves (fp16) or bfloat16s. A field that is OR-ed into the mantissa of 2^m
    (1024 in fp16, 128 in bf16) gives 2^m + field; the subtraction is exact. A code of 8 bits is
    seven, less 128 if the eighth is set: that bit makes the subtrahend's 2^m 2^m + 128.
    scales: as in `Form`; with "zeros" the second operand is the summand of a field, `minus_zero`
    shift: of the high bits, the second operand, of codes of 5 and 6 bits
    """
    # every constant is in both halves of a word; base: 2^m
    kind = "f16x2" if half else "bf16x2"
    base = "0x64006400" if half else "0x43004300"
    one = "0x3c003c00" if half else "0x3f803f80"
    minus_base = 0xE400E400 if half else 0xC300C300
    bias = f"mov.b32 b, {minus_base + 0x10001 * code_of_zero(bits, scales):#x};"
    high = ""
    if bits == 8:
        field = f"shr.u32 s, $1, {8 * plane}; lop3.b32 w, s, 0x007f007f, {base}, 0xea;"
        bias = f"lop3.b32 b, s, 0x00800080, {minus_base:#x}, 0xea;"
    else:
        # (w & mask) | base
        field = f"shr.u32 w, $1, {4 * plane}; lop3.b32 w, w, 0x000f000f, {base}, 0xea;"
    if bits in (5, 6):
        lowest = shift + (bits - 4) * plane  # of the high bits; they belong at 4
        move = f"shl.b32 s, $2, {4 - lowest};" if lowest < 4 else f"shr.u32 s, $2, {lowest - 4};"
        mask = 0x100010 if bits == 5 else 0x300030
        high = f"{move} lop3.b32 w, s, {mask:#x}, w, 0xea;"
    if scales == "zeros":
        bias = "mov.b32 b, $2;"
    return (
        f"{{ .reg .b32 w, s, a, b; {field} {high} mov.b32 a, {one}; {bias} "
        f"fma.rn.{kind} $0, w, a, b; }}"
    )


@triton.constexpr_function
def code_of_zero(bits: int, scales: str) -> int:
    """Return the code, as stored, of the weight 0; of 8 bits and with minima 0."""
    return 0 if bits == 8 or scales.endswith("minima") else 2 ** (bits - 1)


@triton.constexpr_function
def minus_zero(half: bool) -> int:
    """Return an int32 whose two halves (fp16) or bfloat16s are -2^m.

    A field below 32 that is OR-ed into both gives -(2^m + field).
    """
    return (0xE400E400 if half else 0xC300C300) - 2**32


@triton.jit
def _unpack(
    words, high, zero, plane: tl.constexpr, start: tl.constexpr, BITS: tl.constexpr,
    SCALES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the weights of one plane as `dtype`: [ROWS, WIDTH] int16 -> [ROWS, WIDTH].

    high: [ROWS, WIDTH] int16, a byte each of high bits, of codes of 5 and 6 bits; with 5 those of
    the columns from `start` on, and of the columns 32 before or behind
    zero: [ROWS] int32, 8 + zero point of int4, with "zeros"
    """
    shift: tl.constexpr = 4 * (start // 32) if BITS == 5 else 0
    if dtype == tl.float32:
        LOW: tl.constexpr = 8 if BITS == 8 else 4
        field = (words.to(tl.int32) >> (LOW * plane)) & ((1 << LOW) - 1)
        if BITS == 5 or BITS == 6:
            above = high.to(tl.int32) >> (shift + (BITS - 4) * plane)
            field |= (above & ((1 << (BITS - 4)) - 1)) << 4
        if BITS == 8:
            field = (field ^ 128) - 128
        if SCALES == "zeros":
            field -= zero[:, None]
        else:
            field -= code_of_zero(BITS, SCALES)
        return field.to(tl.float32)
    else:
        code: tl.constexpr = unpack_asm(BITS, plane, dtype == tl.float16, SCALES, shift)
        if BITS == 5 or BITS == 6:
            bits = tl.inline_asm_elementwise(
                code, "=r,r,r", [words, high], dtype=tl.int16, is_pure=True, pack=2
            )
        elif SCALES != "zeros":
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
def words_of(bits: int, group: int, scales: str) -> int:
    """Return the words of scales per row and K-block; 0: one scale for each output.

    bits, group, scales: as in `Form`
    """
    if group == 0:
        return 0
    if scales.startswith("super"):
        return 5
    groups = (128 if bits == 8 else 256) // group
    return groups if scales in ("zeros", "fp16-minima") else groups // 2


@triton.constexpr_function
def inputs_of_k_block(bits: int) -> int:
    """Return `inputs_of_block`."""
    return 64 * (16 // bits if bits in (8, 16) else 4)


@triton.constexpr_function
def has_minima(scales: str) -> bool:
    """Return whether groups have minima beside these scales."""
    return scales.endswith("minima")


@triton.jit
def _codes(packed_ptr, block, row, N, start: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Read the columns of a K-block from `start` on, as `_unpack` takes them.

    Returns: words, [ROWS, WIDTH] int16; of codes of 5 and 6 bits high bits, else the words again.
    """
    HIGH: tl.constexpr = BITS % 4  # bits of a code that are not in its plane
    EACH: tl.constexpr = 64 + 16 * HIGH  # words of a row
    c = tl.arange(0, WIDTH)[None, :]
    stride = tl.cast(N, tl.int64) * EACH  # between K-blocks
    at = packed_ptr + row[:, None] * EACH + c + block * stride
    words = tl.load(at + start, eviction_policy="evict_first")
    if HIGH == 0:
        return words, words
    else:  # behind the words; with one bit, a byte has those of two columns, and is read twice
        first: tl.constexpr = 128 + (start if HIGH == 2 else 0)
        bytes_ptr = packed_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        at = bytes_ptr + row[:, None] * (2 * EACH) + c + block * (2 * stride)
        return words, tl.load(at + first, eviction_policy="evict_first").to(tl.int16)


@triton.jit
def _scale_words(scale_ptr, block, row, N, WORDS: tl.constexpr):
    """Read the scales of a K-block: a tuple of WORDS x [ROWS] int32."""
    words = ()
    words_ptr = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    for i in tl.static_range(WORDS):
        words = words + (tl.load(words_ptr + (block * N + row) * WORDS + i),)
    return words


@triton.jit
def _half(words, i: tl.constexpr):
    """Return a float16 number in words: [ROWS] fp32."""
    bits = (words[i // 2] >> (16 * (i % 2))).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _integer(words, i: tl.constexpr, SIGNED: tl.constexpr):
    """Return an integer of a superblock, behind the word of its float16 numbers: [ROWS] fp32."""
    word = words[1 + i // 4]
    if SIGNED:
        return ((word << (24 - 8 * (i % 4))) >> 24).to(tl.float32)
    else:
        return ((word >> (8 * (i % 4))) & 255).to(tl.float32)


@triton.jit
def _scale(words, group: tl.constexpr, SCALES: tl.constexpr):
    """Return the scales of one group of the K-block: [ROWS] fp32."""
    if SCALES == "zeros":
        scale = (words[group] & -32).to(tl.float32, bitcast=True)
    elif SCALES == "bf16":
        word = words[group // 2]
        # a bf16 is the upper half of an fp32
        bits = word << 16 if group % 2 == 0 else word & -65536
        scale = bits.to(tl.float32, bitcast=True)
    elif SCALES == "super":  # the products are exact
        scale = _half(words, 0) * _integer(words, group, True)
    elif SCALES == "super-minima":
        scale = _half(words, 0) * _integer(words, 2 * group, False)
    else:
        scale = _half(words, 2 * group if has_minima(SCALES) else group)
    return scale


@triton.jit
def _minimum(words, group: tl.constexpr, SCALES: tl.constexpr):
    """Return the minima of one group of the K-block: [ROWS] fp32."""
    if SCALES == "super-minima":
        minimum = -_half(words, 1) * _integer(words, 2 * group + 1, False)
    else:
        minimum = _half(words, 2 * group + 1)
    return minimum


@triton.jit
def _zero(words, k: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """Return 8 + the zero points of the group with weight k, [ROWS] int32, or 8 without any."""
    if SCALES == "zeros":
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
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute (codes * scale) x^T over the K-blocks first .. last: [ROWS, TOKENS] fp32.

    x_rows: [TOKENS] pointers to rows of x
    live: [TOKENS] bool, the others count as zeros and are not read
    packed, scale: as for `matmul_kernel`; row: [ROWS] int32, of the N outputs
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    ROWS: tl.constexpr = row.shape[0]
    TOKENS: tl.constexpr = live.shape[0]
    PLANES: tl.constexpr = 2 if BITS == 8 else 4
    COLUMNS: tl.constexpr = 64  # of layout.py
    # a dot product must not span two groups
    WIDTH: tl.constexpr = GROUP if GROUP > 0 and GROUP < COLUMNS else COLUMNS
    BLOCK: tl.constexpr = PLANES * COLUMNS
    WORDS: tl.constexpr = words_of(BITS, GROUP, SCALES)
    ZEROS: tl.constexpr = SCALES == "zeros"
    tokens_ptr = x_rows[None, :] + tl.arange(0, WIDTH)[:, None]  # [WIDTH, TOKENS]
    total = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    scales = _scale_words(scale_ptr, first, row, N, WORDS)
    for block in tl.range(first, last, num_stages=STAGES):
        if ZEROS:  # the pipeline covers words that a dot product needs
            scales = _scale_words(scale_ptr, block, row, N, WORDS)
        else:  # it does not cover the others: read a block ahead, or every block waits for memory
            following = _scale_words(scale_ptr, tl.minimum(block + 1, last - 1), row, N, WORDS)
        part = tl.full((ROWS, TOKENS), 0.0, tl.float32)
        for start in tl.static_range(0, COLUMNS, WIDTH):
            words, high = _codes(packed_ptr, block, row, N, start, WIDTH, BITS)
            for plane in tl.static_range(PLANES):
                k = block * BLOCK + plane * COLUMNS + start
                x = tl.load(tokens_ptr + k, mask=live[None, :], other=0.0)
                zero = _zero(scales, plane * COLUMNS + start, GROUP, SCALES)
                w = _unpack(words, high, zero, plane, start, BITS, SCALES, dtype)
                if GROUP == 0:
                    total = _dot(w, x, total)
                else:
                    part = _dot(w, x, part)
                    if (plane + 1) * COLUMNS % GROUP == 0:
                        scale = _scale(scales, (plane * COLUMNS + start) // GROUP, SCALES)
                        total += part * scale[:, None]
                        part = tl.full((ROWS, TOKENS), 0.0, tl.float32)
                        if has_minima(SCALES):  # a group is as wide as the dot product
                            least = _minimum(scales, (plane * COLUMNS + start) // GROUP, SCALES)
                            sums = _dot(tl.full((ROWS, WIDTH), 1.0, dtype), x, part)
                            total += sums * least[:, None]
        if not ZEROS:
            scales = following
    if GROUP == 0:
        total *= tl.load(scale_ptr + row)[:, None]
    return total


@triton.jit
def rows_kernel(
    packed_ptr, scale_ptr, ids_ptr, y_ptr, N, K, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Read the numbers of a row of a weight in a K-block.

    packed, scale: as for `product_tile`, with groups of 16 or 32; ids: [R] int64
    Writes: y, [R, K].
    """
    i = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(ids_ptr + i + tl.arange(0, 1)).to(tl.int32)
    scales = _scale_words(scale_ptr, block, row, N, words_of(BITS, GROUP, SCALES))
    PLANES: tl.constexpr = 2 if BITS == 8 else 4
    for start in tl.static_range(0, 64, GROUP):
        words, high = _codes(packed_ptr, block, row, N, start, GROUP, BITS)
        for plane in tl.static_range(PLANES):
            w = _unpack(words, high, 0, plane, start, BITS, SCALES, tl.float32)
            w *= _scale(scales, (plane * 64 + start) // GROUP, SCALES)[:, None]  # exact
            if has_minima(SCALES):
                w += _minimum(scales, (plane * 64 + start) // GROUP, SCALES)[:, None]
            k = block * (64 * PLANES) + plane * 64 + start + tl.arange(0, GROUP)[None, :]
            at = y_ptr + tl.cast(i, tl.int64) * K + k
            tl.store(at, w.to(y_ptr.dtype.element_ty), mask=k < K)


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
    SCALES: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a block of (codes * scale) x^T over a split of K: [ROWS, TOKENS] fp32.

    BITS, GROUP, SCALES: of a `Form`; x: [M, K], K a multiple of BLOCK
    packed: [K / BLOCK, N, EACH] int16; scale: [K / BLOCK, N, WORDS] words, as layout.py packs them,
    or [N] fp32 when GROUP is 0
    With BITS 16 packed is the weight, [N, K] of x's dtype for any K, and scale is not read.
    t: [TOKENS] int32, rows of x; row: [ROWS] int32, of the weight
    """
    blocks = tl.cdiv(K, inputs_of_k_block(BITS))
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS
    x_rows = x_ptr + t.to(tl.int64) * K
    if BITS == 16:
        total = float_product(x_rows, t < M, packed_ptr, row, K, first, last, STAGES)
    else:
        total = quantized_product(
            x_rows, t < M, packed_ptr, scale_ptr, row, N, first, last, BITS, GROUP, SCALES, STAGES
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

    squares: [parts, M] fp32, sums of squares as in `backends.epilogues.UnnormalizedRows`; PARTS:
    padded to a power of two; F: features
    """
    part = tl.arange(0, PARTS)
    inside = (part[None, :] < tl.cdiv(F, 64)) & (t[:, None] < M)
    squares = tl.load(squares_ptr + part[None, :] * M + t[:, None], mask=inside, other=0.0)
    return total * tl.rsqrt(pairwise_sum(squares) / F)[None, :]


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_ptr, packed_ptr, scale_ptr, squares_ptr, y_ptr, M, N, K, F, BITS: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
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
        x_ptr, packed_ptr, scale_ptr, t, row, split, M, N, K, BITS, GROUP, SCALES, SPLITS, STAGES
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


def sizes_of(packed: Tensor, bits: int) -> tuple[int, int]:
    """Return the outputs and the inputs, padded to whole blocks, of a weight of `matmul_kernel`."""
    if bits == 16:
        return packed.shape[0], packed.shape[1]
    return packed.shape[1], packed.shape[0] * inputs_of_block(bits)


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
    squares: of `backends.epilogues.UnnormalizedRows`, where x are its values; for "swiglu" only
    Returns: [..., N] in x's dtype or fp32; [..., N / 2] with SwiGLU.
    """
    form = form_of(packed, scale)
    N, K = sizes_of(packed, form.bits)
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
        BITS=form.bits,
        GROUP=form.group,
        SCALES=form.scales,
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


def read_rows(packed: Tensor, scale: Tensor, ids: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Compute `backends.planes.read_rows`. Allocates its result, and nothing else; never waits."""
    form = form_of(packed, scale)
    y = torch.empty(len(ids), K, dtype=dtype, device=ids.device)
    if len(ids):
        rows_kernel[len(ids), len(packed)](
            packed,
            scale,
            ids.contiguous(),
            y,
            packed.shape[1],
            K,
            BITS=form.bits,
            GROUP=form.group,
            SCALES=form.scales,
            num_warps=1,
        )
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
    form = form_of(packed, scale)
    N, _ = sizes_of(packed, form.bits)
    sizes = (M, N, K, form.bits, form.group)
    return plan_product(*sizes, x.dtype, device, epilogue, form.scales)


def matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    device: Device,
    epilogue: str = "none",
    squares: Tensor | None = None,
) -> Tensor:
    """Compute `backends.planes.w4a16` or `w8a16`; without a scale `backends.linear.linear`.

    epilogue, squares: as for `run_product`
    """
    cut = plan_of(x, packed, scale, device, epilogue)
    return run_product(x, packed, scale, cut, epilogue, squares)
