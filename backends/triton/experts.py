"""CUDA kernels, in Triton: every row times the weight of its own expert, in 16 bits, int8 or int4.

1. `lists_kernel` lists the rows of every expert (sorted token ids), once for both products of a
   layer. A row's place is a count of smaller keys, expert first, without sorting or atomics.
2. An expert's rows are cut into tiles of 16, 32 or 64, at most `most_tiles` for P rows. That many
   blocks are launched, those of an expert side by side, so that they share its weight in the cache.
   A block finds its tile in the lists; one without a tile returns at once.
3. The loop over K is that of qmatmul.py; rows are read and results written through the list.

Trade-off: one kernel serves a single token (a tile per chosen expert), a tree and a prompt, so that
a row's bits do not depend on the rows beside it (`plan_experts`). Source of tiles of one expert
each: MegaBlocks (arXiv 2211.15841). Not here: SiLU, the sum over a token's experts (model.py).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.triton.layout import form_of, inputs_of_block
from backends.triton.qmatmul import (
    Device,
    ProductPlan,
    busy_with,
    choose_splits,
    fit,
    float_product,
    inputs_of_k_block,
    padded_to,
    quantized_product,
    sizes_of,
    sum_kernel,
    tile_height,
    words_of,
)

LISTED = 64  # places that a block of threads lists


@cache
def plan_experts(
    P: int,
    N: int,
    K: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    device: Device,
    experts: int,
    scales: str = "",
) -> ProductPlan:
    """Choose tiles, splits and stages for P rows.

    The host must not read the routing, so the tile's height follows from the average rows of an
    expert. `splits` and the order of every sum are the same for all P: a row's result does not
    depend on the other rows of its expert, on their number, or on its place among them. As in
    qmatmul.py, this assumes a property of the hardware that test_gpu.py found on an H200.

    Trade-off: splits are right for a single token with two experts of 8, or 8 of 128. A prompt
    reads an expert's weight once per 64 of its rows, mostly from the cache, and unpacks it as
    often; beyond about 256 tokens with 8 experts a product over unpacked weights would be faster.

    bits, group, scales: as in `Form`
    """
    blocks = triton.cdiv(K, inputs_of_block(bits))
    hit = max(2, experts // 16) * N
    splits = choose_splits(hit, blocks, device.processors, busy=busy_with(scales))
    tokens = tile_height(triton.cdiv(P, experts), 4, 16)
    return fit(tokens, splits, bits, group, dtype, device, scales)


def most_tiles(P: int, experts: int, tokens: int) -> int:
    """Return the largest number of tiles of `tokens` rows that P rows can make.

    There are most tiles when as many experts as possible have one row beyond their full tiles.
    """
    hit = min(P, experts)
    return hit + (P - hit) // tokens


# ------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["P"])
def lists_kernel(expert_ptr, lists_ptr, P, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """List the rows of every expert.

    expert: [P] int64
    lists: [EXPERTS + 1 + P] int32, as `backends.experts.expert_lists` describes. Writes: lists.
    """
    # first the experts' beginnings, then the rows
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = j - (EXPERTS + 1)
    is_row = (row >= 0) & (row < P)
    key = tl.load(expert_ptr + row, mask=is_row, other=0).to(tl.int32) * P + row
    key = tl.where(is_row, key, j * P)  # no more than those of the expert's rows, above all before
    before = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, P, BLOCK):
        other = start + tl.arange(0, BLOCK)
        keys = tl.load(expert_ptr + other, mask=other < P, other=EXPERTS).to(tl.int32) * P + other
        before += tl.sum((keys[None, :] < key[:, None]).to(tl.int32), 1)
    place = tl.where(is_row, EXPERTS + 1 + before, j)
    tl.store(lists_ptr + place, tl.where(is_row, row, before), mask=j < EXPERTS + 1 + P)


@triton.jit
def _tile(lists_ptr, tile, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Find a tile in the lists.

    Returns: its expert, the place at which its rows begin, and the place at which its expert's
    end; without such a tile the expert is EXPERTS or more.
    """
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))
    begin = tl.load(lists_ptr + tl.minimum(e, EXPERTS))
    end = tl.load(lists_ptr + tl.minimum(e + 1, EXPERTS))
    tiles = tl.cdiv(end - begin, TOKENS)
    passed = tl.cumsum(tiles, 0) <= tile  # experts whose tiles all come before
    expert = tl.sum(passed.to(tl.int32), 0)
    within = tile - tl.sum(tl.where(passed, tiles, 0), 0)
    at = tl.load(lists_ptr + tl.minimum(expert, EXPERTS)) + within * TOKENS
    return expert, at, tl.load(lists_ptr + tl.minimum(expert + 1, EXPERTS))


@triton.jit(do_not_specialize=["P"])
def experts_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    lists_ptr,
    y_ptr,
    P,
    N,
    K,
    EXPERTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a block of y^T = w x^T for a tile of rows and their expert's w, or of partial sums.

    x: [P, K]
    weight, with BITS 16: [EXPERTS, N, K] of x's dtype, and scale is not read; otherwise weight and
    scale are stacks of the operands of `matmul_kernel`, and K is a multiple of BLOCK
    lists: from `lists_kernel`
    Writes: y, [P, N], or [SPLITS, P, N] fp32.
    """
    BLOCK: tl.constexpr = inputs_of_k_block(BITS)
    expert, at, end = _tile(lists_ptr, tl.program_id(0), EXPERTS, TOKENS)
    if expert >= EXPERTS:
        return
    i = at + tl.arange(0, TOKENS)
    live = i < end
    t = tl.load(lists_ptr + EXPERTS + 1 + i, mask=live, other=0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)  # rows beyond N read the last one, and are not stored
    split = tl.program_id(2)
    blocks = tl.cdiv(K, BLOCK)
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS
    x_rows = x_ptr + t.to(tl.int64) * K
    before = expert.to(tl.int64) * N  # outputs of the experts before this one
    if BITS == 16:
        total = float_product(x_rows, live, weight_ptr + before * K, row, K, first, last, STAGES)
    else:
        weight_ptr += before * blocks * (64 + 16 * (BITS % 4))
        # numbers of 16 bits, or words
        each: tl.constexpr = 32 // scale_ptr.dtype.element_ty.primitive_bitwidth
        words: tl.constexpr = each * words_of(BITS, GROUP, SCALES)
        scale_ptr += before * (blocks * words if GROUP > 0 else 1)
        total = quantized_product(
            x_rows, live, weight_ptr, scale_ptr, row, N, first, last, BITS, GROUP, SCALES, STAGES
        )
    out = (split.to(tl.int64) * P + t[None, :]) * N + n[:, None]
    tl.store(y_ptr + out, total.to(y_ptr.dtype.element_ty), mask=live[None, :] & (n[:, None] < N))


# ------------------------------------------------------------------------------------------- launch


def expert_lists(expert: Tensor, experts: int) -> Tensor:
    """Compute `backends.experts.expert_lists`. Allocates its result, and nothing else; never
    waits.
    """
    lists = torch.empty(experts + 1 + len(expert), dtype=torch.int32, device=expert.device)
    lists_kernel[(triton.cdiv(len(lists), LISTED),)](
        expert.contiguous(), lists, len(expert), EXPERTS=experts, BLOCK=LISTED, num_warps=4
    )
    return lists


def run_experts(
    x: Tensor, weight: Tensor, scale: Tensor | None, lists: Tensor, cut: ProductPlan
) -> Tensor:
    """Run the product as `cut` plans it.

    Allocates its result and partial sums, and nothing else; never waits.
    """
    experts = weight.shape[0]
    form = form_of(weight[0], None if scale is None else scale[0])
    N, K = sizes_of(weight[0], form.bits)
    x = padded_to(x, K)
    P = len(x)
    y = torch.empty(P, N, dtype=x.dtype, device=x.device)
    out = y
    if cut.splits > 1:
        out = torch.empty(cut.splits, P, N, dtype=torch.float32, device=x.device)
    experts_kernel[most_tiles(P, experts, cut.tokens), triton.cdiv(N, cut.rows), cut.splits](
        x,
        weight.contiguous(),
        scale,
        lists,
        out,
        P,
        N,
        K,
        EXPERTS=experts,
        BITS=form.bits,
        GROUP=form.group,
        SCALES=form.scales,
        SPLITS=cut.splits,
        TOKENS=cut.tokens,
        ROWS=cut.rows,
        STAGES=cut.stages,
        num_warps=cut.warps,
    )
    if cut.splits > 1:
        grid = (triton.cdiv(P * N, 512),)
        sum_kernel[grid](out, y, P * N, SPLITS=cut.splits, BLOCK=512)
    return y


def experts_product(
    x: Tensor, weight: Tensor, scale: Tensor | None, lists: Tensor, device: Device
) -> Tensor:
    """Compute `backends.experts.experts_linear` (scale None), or `backends.planes.w4a16` and
    `w8a16`.
    """
    P, K = x.shape
    form = form_of(weight[0], None if scale is None else scale[0])
    sizes = (P, weight.shape[-2], K, form.bits, form.group)
    cut = plan_experts(*sizes, x.dtype, device, len(weight), form.scales)
    return run_experts(x, weight, scale, lists, cut)
