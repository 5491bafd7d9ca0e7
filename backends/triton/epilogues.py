"""CUDA kernels, in Triton: products with the work behind them, for backends/epilogues.py.

1. A block computes its tile of a product (qmatmul.py), and writes fp32 partial sums.
2. The last block of those that share outputs, all splits of a tile or all tiles of a head, adds
   the parts, first split first, and does the work that follows: residual sum and norm, or norms of
   heads, rotation and cache. Counters tell it, as in attention.py; equal runs give equal bits.
3. Sums over features are pairwise, in an order that the code fixes: a compiler's own order depends
   on the tile, and so on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.triton.attention import counters, is_last
from backends.triton.launch import PART, Device, device_of
from backends.triton.layout import form_of
from backends.triton.norm import warps_of
from backends.triton.qmatmul import (
    ProductPlan,
    divided_by_rms,
    padded_to,
    pairwise_sum,
    parts_of,
    plan_of,
    product_tile,
    sizes_of,
)
from backends.triton.rotary import constants_of, rotate_heads

# `backends.epilogues.LazyMatmul`: x, the sums of squares by which to divide or None, weight, scales
Product = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


class Gpu(NamedTuple):
    """A device, and the counters that launches share which follow each other."""

    device: Device
    done: Tensor  # [n] int32, zeros


def gpu_of(x: Tensor) -> Gpu:
    """Return the device of a tensor."""
    return Gpu(device_of(x.device.index), counters(x.device.index))


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def store_part(parts_ptr, total, t, n, split, M, N):
    """Write partial sums, [ROWS, TOKENS]. parts: [SPLITS, M, N] fp32"""
    at = (split * M + t[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(parts_ptr + at, total, mask=(t[None, :] < M) & (n[:, None] < N))


@triton.jit
def add_parts(pointers, size, mask, SPLITS: tl.constexpr):
    """Add values of all splits that other blocks wrote, `size` apart, first split first."""
    total = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        at = pointers + split * tl.cast(size, tl.int64)
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def sums_of_squares(x):
    """Add the squares of rows, in pairs as in `pairwise_sum`: [R, C] fp32 -> [R]."""
    left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return pairwise_sum(tl.fma(left, left, right * right))


@triton.jit(do_not_specialize=["M"])
def add_product_kernel(
    x_ptr, packed_ptr, scale_ptr, parts_ptr, done_ptr, stream_ptr, weight_ptr, sum_ptr, y_ptr,
    squares_ptr, M, N, K, stride, eps, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add a tile of a product to the residual stream; begin the norm behind it.

    x, packed, scale: as for `product_tile`; parts: [SPLITS, M, N] fp32
    done: [tiles] int32, zeros before and after
    stream: [M, N] with a stride of its rows; weight: [N], or None without a norm
    Writes: sum, [M, N]; y and squares as in `backends.epilogues.UnnormalizedRows`; parts.
    """
    split = tl.program_id(2)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)
    total = product_tile(
        x_ptr, packed_ptr, scale_ptr, t, row, split, M, N, K, BITS, GROUP, SCALES, SPLITS, STAGES
    )
    store_part(parts_ptr, total, t, n, split, M, N)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if not is_last(done_ptr + tile, SPLITS):
        return
    inside = (t[:, None] < M) & (n[None, :] < N)
    at = t[:, None].to(tl.int64) * N + n[None, :]  # [TOKENS, ROWS]
    total = add_parts(parts_ptr + at, M * N, inside, SPLITS)
    dtype = sum_ptr.dtype.element_ty
    from_stream = stream_ptr + t[:, None].to(tl.int64) * stride + n[None, :]
    total = (tl.load(from_stream, mask=inside, other=0.0).to(tl.float32) + total).to(dtype)
    tl.store(sum_ptr + at, total, mask=inside)
    if weight_ptr is not None:
        total = total.to(tl.float32)
        weight = tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (total * weight[None, :]).to(dtype), mask=inside)
        PARTS: tl.constexpr = ROWS // 64
        squares = sums_of_squares(tl.reshape(total, (TOKENS * PARTS, 64)))
        part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
        squares = tl.reshape(squares, (TOKENS, PARTS)) + tl.where(part == 0, eps * N, 0.0)[None, :]
        to = squares_ptr + part[None, :] * M + t[:, None]
        tl.store(to, squares, mask=(t[:, None] < M) & (part[None, :] < tl.cdiv(N, 64)))


@triton.jit(do_not_specialize=["M", "T", "S"])
def rotary_product_kernel(
    x_ptr, packed_ptr, scale_ptr, squares_ptr, parts_ptr, done_ptr, cos_ptr, sin_ptr, slots_ptr,
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, M, N, K, F, eps, T, S, BITS: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr,
    KV_HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a product; norm, rotate and store each head that it completes.

    x, packed, scale: as for `product_tile`; squares, F, PARTS: as for `divided_by_rms`, or None
    parts: [SPLITS, M, N] fp32; done: [blocks of tokens, N / E] int32, zeros before and after
    The rest is as for `rotary_cache_kernel`.
    Writes: q; k and v at the slots; parts.
    """
    split = tl.program_id(2)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    begin = tl.program_id(1) * ROWS
    n = begin + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)
    total = product_tile(
        x_ptr, packed_ptr, scale_ptr, t, row, split, M, N, K, BITS, GROUP, SCALES, SPLITS, STAGES
    )
    if squares_ptr is not None:
        total = divided_by_rms(total, squares_ptr, t, M, F, PARTS)
    store_part(parts_ptr, total, t, n, split, M, N)
    e = tl.arange(0, HALF)
    SOME: tl.constexpr = ROWS // 8  # rows at a time: two for each warp, more would spill
    before = tl.program_id(0) * TOKENS  # rows of earlier blocks
    for head in range(begin // E, tl.cdiv(tl.minimum(begin + ROWS, N), E)):
        tiles = (head * E + E - 1) // ROWS - head * E // ROWS + 1  # that have outputs of the head
        if is_last(done_ptr + tl.program_id(0) * (N // E) + head, tiles * SPLITS):
            for first in range(before, tl.minimum(before + TOKENS, M), SOME):
                some = first + tl.arange(0, SOME)
                read = (some < M)[:, None] & (e < E // 2)[None, :]
                at = parts_ptr + some[:, None].to(tl.int64) * N + head * E + e[None, :]
                left = add_parts(at, M * N, read, SPLITS)
                right = add_parts(at + E // 2, M * N, read, SPLITS)
                heads = head + tl.zeros([SOME], tl.int32)
                rotate_heads(
                    left, right, some, heads, some < M, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_ptr,
                    v_ptr, q_norm_ptr, k_norm_ptr, eps, T, S, H, KV_HEADS, E,
                )  # fmt: skip


@triton.jit
def add_unscaled_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, squares_ptr, F, eps, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add a row of delta, if there is one, and begin the norm. WIDTH: F padded to 64 2^i

    x, delta: [M, F]; weight: [F]
    Writes: sum, with delta; y and squares as in `backends.epilogues.UnnormalizedRows`.
    """
    i = tl.arange(0, WIDTH)
    live = i < F
    at = tl.program_id(0).to(tl.int64) * F + i
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    if delta_ptr is not None:
        x = (x + tl.load(delta_ptr + at, mask=live, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + at, x, mask=live)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * weight).to(dtype), mask=live)
    part = tl.arange(0, WIDTH // 64)
    squares = sums_of_squares(tl.reshape(x, (WIDTH // 64, 64))) + tl.where(part == 0, eps * F, 0.0)
    to = squares_ptr + part * tl.num_programs(0) + tl.program_id(0)
    tl.store(to, squares, mask=part < tl.cdiv(F, 64))


# ------------------------------------------------------------------------------------------- launch


def add_unscaled(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backends.epilogues.add_norm` of a tensor, unscaled, or of nothing, with an empty
    sum.

    Allocates its results, and nothing else; never waits.
    """
    F = x.shape[-1]
    M = x.numel() // F
    x = x.contiguous()
    assert delta is None or delta.shape == x.shape, delta.shape
    options = {"dtype": x.dtype, "device": x.device}
    total = torch.empty(*(x.shape if delta is not None else (0,)), **options)
    y = torch.empty(*x.shape, **options)
    squares = torch.empty(triton.cdiv(F, PART), M, dtype=torch.float32, device=x.device)
    add_unscaled_kernel[(M,)](
        x,
        delta if delta is None else delta.contiguous(),
        weight,
        total,
        y,
        squares,
        F,
        eps,
        WIDTH=max(PART, triton.next_power_of_2(F)),
        num_warps=warps_of(F),
    )
    return total, y, squares


def tile_of(product: Product, cut: ProductPlan) -> dict[str, int]:
    """Return the constants of a kernel that follow from the product and its plan."""
    form = form_of(product[2], product[3])
    tile = {"BITS": form.bits, "GROUP": form.group, "SCALES": form.scales}
    tile |= {"SPLITS": cut.splits, "TOKENS": cut.tokens}
    return tile | {"ROWS": cut.rows, "STAGES": cut.stages}


def add_product(
    product: Product,
    stream: Tensor,
    weight: Tensor | None,
    eps: float,
    gpu: Gpu,
    cut: ProductPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backends.epilogues.add_product`, with empty tensors in place of a norm that is not
    there.

    Allocates its results and partial sums, and nothing else; never waits.
    cut: None: as planned
    """
    x, _, packed, scale = product
    cut = cut or plan_of(x, packed, scale, gpu.device, "add")
    N, K = sizes_of(packed, form_of(packed, scale).bits)
    M = x.numel() // x.shape[-1]
    tiles = (triton.cdiv(M, cut.tokens), triton.cdiv(N, cut.rows))
    assert tiles[0] * tiles[1] <= len(gpu.done), tiles
    assert packed.is_contiguous(), packed.stride()
    stream = stream.contiguous()
    options = {"dtype": x.dtype, "device": x.device}
    total = torch.empty(*x.shape[:-1], N, **options)
    y = torch.empty(*(total.shape if weight is not None else (0,)), **options)
    fp32 = {"dtype": torch.float32, "device": x.device}
    squares = torch.empty(*((triton.cdiv(N, PART), M) if weight is not None else (0,)), **fp32)
    add_product_kernel[tiles[0], tiles[1], cut.splits](
        padded_to(x, K),
        packed,
        scale,
        torch.empty(cut.splits, M, N, **fp32),
        gpu.done,
        stream,
        weight,
        total,
        y,
        squares,
        M,
        N,
        K,
        N if stream.dim() > 1 else 0,
        eps,
        **tile_of(product, cut),
        num_warps=cut.warps,
    )
    return total, y, squares


def rotary_product(
    product: Product,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: tuple,
    gpu: Gpu,
    cut: ProductPlan | None = None,
) -> Tensor:
    """Compute `backends.epilogues.rotary_product`.

    Allocates its result and partial sums, and nothing else; never waits.
    norms: two weights and epsilon, or (None, None, 0.0); cut: None: as planned
    """
    x, squares, packed, scale = product
    cut = cut or plan_of(x, packed, scale, gpu.device, "rotary")
    N, K = sizes_of(packed, form_of(packed, scale).bits)
    F = x.shape[-1]
    M = x.numel() // F
    _, kv_heads, S, E = k.shape
    heads = N // E - 2 * kv_heads
    assert k.is_contiguous() and v.is_contiguous(), (k.stride(), v.stride())
    assert packed.is_contiguous(), packed.stride()
    for weight in norms[:2]:
        assert weight is None or (weight.dtype == k.dtype and weight.is_contiguous()), norms
    tiles = (triton.cdiv(M, cut.tokens), triton.cdiv(N, cut.rows))
    assert tiles[0] * (N // E) <= len(gpu.done), tiles
    cos, sin = rope
    q = torch.empty(*slots.shape, heads, E, dtype=k.dtype, device=x.device)
    rotary_product_kernel[tiles[0], tiles[1], cut.splits](
        padded_to(x, K),
        packed,
        scale,
        squares,
        torch.empty(cut.splits, M, N, dtype=torch.float32, device=x.device),
        gpu.done,
        cos.contiguous(),
        sin.contiguous(),
        slots.contiguous(),
        q,
        k,
        v,
        *norms[:2],
        M,
        N,
        K,
        F,
        norms[2],
        slots.shape[1],
        S,
        **tile_of(product, cut),
        PARTS=parts_of(squares),
        **constants_of(heads, kv_heads, E),
        num_warps=cut.warps,
    )
    return q
