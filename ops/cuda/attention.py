"""CUDA kernels, in Triton: attention of a few rows (a draft tree, a chain, a single token) over a long static cache.

1. A block of threads takes up to 64 or 128 rows of one key head: the new tokens times the query heads that share it,
   so that a key is read once for all of them.
2. The cache is cut into chunks of slots, each a block of threads (split-K). The prefix's length is read from device
   memory, so that one captured graph serves every length; blocks of chunks that are not in use return at once.
3. A chunk is read 32 or 64 slots at a time, with the running softmax of FlashAttention (arXiv 2205.14135). Slots below
   the prefix's end need no mask. Slots beyond the window are not read: they may hold anything.
4. Each chunk writes fp32 sums with their maximum and weight; a second kernel adds them in the order of the chunks: no
   atomics, equal runs give equal bits. What else a row's bits depend on is said at `plan_attention`.

Trade-off: see `plan_attention`. Not run on a GPU yet. Not here: writing the cache, sliding windows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.products import Device

CHUNK = 256  # slots of a split, while there are at most
SPLITS = 16  # of them below the prefix's end; beyond, chunks double
SPLIT_TOKENS = 64  # more than that are not split
COMBINED = 4  # rows that a block of threads combines


class AttentionPlan(NamedTuple):
    """How a block of threads works. Only `rows` and `warps` depend on the number of rows."""

    rows: int  # tokens x query heads of a group
    keys: int  # slots at a time
    stages: int  # of the software pipeline
    warps: int


@cache
def plan_attention(rows: int, E: int, dtype: torch.dtype, device: Device) -> AttentionPlan:
    """Choose the tile for `rows` rows per key head of width E; no spills up to E = 128.

    A row's bits depend on the slots that it sees and what they hold; not on the number of rows, their masks, the batch,
    or the prefix's end: blocks and chunks lie at fixed slots, hidden slots add exact zeros, and sums that a compiler
    could contract in two ways are written as fused multiply-adds. So a chain is verified with the sums of vanilla
    decoding. This does not hold for branches of a tree, whose ancestors lie in other slots than after compaction; nor
    across a prefix of 4096 * 2^i slots, where chunks double; nor between up to 64 tokens and more, which are not split.
    It assumes that tensor cores add zero products exactly, in the same way for both tile heights (test_gpu.py).

    Trade-off: for that, a single token fills one row of 64, and chunks do not grow with the batch, whose sums can be
    more bytes than the keys. CHUNK and SPLITS are estimates for an H100. fp32 has no tensor cores: for tests.
    """
    if dtype == torch.float32:
        return AttentionPlan(16, 32, 1, 8 if E > 64 else 4)
    hopper, width = device.capability >= 90, max(16, triton.next_power_of_2(E))
    tile = 128 if hopper and rows > 64 else 64  # 16 rows a warp in both, so that a row's sums are those of one warp
    keys = 64 if width == E and (hopper or E <= 64) else 32  # more would spill
    stage = keys * width * 4  # bytes of keys and values
    for limit in (device.shared_bytes // 2, device.shared_bytes):  # two blocks hide each other's waits
        # Hopper's tensor cores read a stage from shared memory; the others hold it, and share probabilities
        if 2 * tile * width + 2 * stage + (stage if hopper else 2 * tile * keys) <= limit:
            return AttentionPlan(tile, keys, 3, tile // 16)
    return AttentionPlan(tile, keys, 2, tile // 16)


def splits_of(T: int, S: int, W: int) -> int:
    """How many chunks a cache of S slots, with W of them in the window, can be cut into."""
    if T > SPLIT_TOKENS:
        return 1
    return min(triton.cdiv(S, CHUNK), SPLITS + triton.cdiv(W, CHUNK))


def constants_of(E: int) -> dict[str, int]:
    """What both kernels are compiled for. WIDTH: E padded to a power of two."""
    return {"E": E, "WIDTH": max(16, triton.next_power_of_2(E)), "CHUNK": CHUNK, "SPLITS": SPLITS}


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _chunk(start, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Slots of a chunk when the prefix ends at `start`."""
    chunk = tl.full((), CHUNK, tl.int32)
    while start >= chunk * SPLITS:
        chunk *= 2
    return chunk


@triton.jit
def _visible(mask_ptr, t, w, W, mask_t, mask_w):
    """Which slots of a block each row sees: [ROWS, KEYS].

    t: [ROWS] int32, tokens; w: [KEYS] int32, the slots' places in the window, negative below it
    """
    place = t[:, None] * mask_t + w[None, :] * mask_w  # 32 bits: addresses of 64 would take too many registers
    inside = ((w >= 0) & (w < W))[None, :]
    return (w < 0)[None, :] | tl.load(mask_ptr + place, mask=inside, other=0).to(tl.int1)


@triton.jit
def _add(scores, v, top, weight, total, SCALE: tl.constexpr):
    """Take a block of keys into the running softmax.

    scores: [ROWS, KEYS] fp32, q k^T, -inf where hidden; v: [KEYS, WIDTH]
    top, weight: [ROWS] fp32, the maximum so far and the sum of exponentials; total: [ROWS, WIDTH] fp32
    """
    new = tl.maximum(top, tl.max(scores, 1) * SCALE)
    base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    p = tl.exp2(tl.fma(scores, SCALE, -base[:, None]))
    shrink = tl.exp2(top - base)
    weight = tl.fma(weight, shrink, tl.sum(p, 1))
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return new, weight, total


@triton.jit(do_not_specialize=["T", "S", "W", "mask_b", "mask_t", "mask_w"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, mask_ptr, y_ptr, stats_ptr, T, S, W, mask_b, mask_t, mask_w,
    H: tl.constexpr, KV_HEADS: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a key head over one chunk, or over all slots.

    q: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]; start: [B] int64; mask: [B, T, W] bool, by its strides
    y: [B, T, H, E], or with SPLIT [chunks, B, T, H, E] fp32, not divided by its weight
    stats: with SPLIT, [2, chunks, B, T, H] fp32, maximum and weight
    Writes: y and stats, of chunks in use.
    """
    GROUP: tl.constexpr = H // KV_HEADS
    SCALE: tl.constexpr = 1.4426950408889634 / E**0.5  # exponentials are to the base 2
    b, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    start = tl.load(start_ptr + b).to(tl.int32)
    first, last = 0, start + W
    if SPLIT:
        chunk = _chunk(start, CHUNK, SPLITS)
        first = split * chunk
        last = tl.minimum(first + chunk, last)
        if first >= last:
            return
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = r // GROUP
    row = t * H + head * GROUP + r % GROUP  # of the T * H of its batch row
    before = b.to(tl.int64) * T * H  # rows of earlier batch rows
    e, n = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    column = (e < E) | (WIDTH == E)
    q = tl.load(q_ptr + before * E + row[:, None] * E + e[None, :], mask=(t < T)[:, None] & column[None, :], other=0.0)
    base = tl.program_id(1).to(tl.int64) * S * E
    keys_ptr = k_ptr + base + n[None, :] * E + e[:, None]  # [WIDTH, KEYS]
    values_ptr = v_ptr + base + n[:, None] * E + e[None, :]  # [KEYS, WIDTH]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.full((ROWS,), 0.0, tl.float32)
    total = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    mask_ptr += b.to(tl.int64) * mask_b
    seen = tl.minimum(tl.maximum(start // KEYS * KEYS, first), last)  # the end of the blocks that all rows see
    for at in tl.range(first, seen, KEYS, num_stages=STAGES):
        k = tl.load(keys_ptr + at * E, mask=column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=column[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, KEYS]
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    for at in tl.range(seen, last, KEYS, num_stages=1):
        inside = at + n < start + W
        k = tl.load(keys_ptr + at * E, mask=inside[None, :] & column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=inside[:, None] & column[None, :], other=0.0)
        visible = _visible(mask_ptr, tl.minimum(t, T - 1), at + n - start, W, mask_t, mask_w)
        scores = tl.where(visible, tl.dot(q, k, input_precision="ieee"), float("-inf"))
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    if SPLIT:
        size = (tl.num_programs(1) // KV_HEADS * T * H).to(tl.int64)  # rows of a chunk
        before += split * size
        tl.store(stats_ptr + before + row, top, mask=t < T)
        tl.store(stats_ptr + tl.num_programs(2) * size + before + row, weight, mask=t < T)
    else:
        total = total / weight[:, None]
    out = y_ptr + before * E + row[:, None] * E + e[None, :]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None] & column[None, :])


@triton.jit(do_not_specialize=["rows", "W"])
def combine_kernel(
    parts_ptr, stats_ptr, start_ptr, y_ptr, rows, W, E: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the chunks in use, first chunk first.

    parts, stats: from attention_kernel, of PARTS chunks and `rows` = T * H rows per batch row
    y: [B, T, H, E]. Writes: y.
    """
    b = tl.program_id(1)
    start = tl.load(start_ptr + b).to(tl.int32)
    used = tl.cdiv(start + W, _chunk(start, CHUNK, SPLITS))
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = b.to(tl.int64) * rows + r
    size = tl.num_programs(1).to(tl.int64) * rows
    e = tl.arange(0, WIDTH)
    inside = (r < rows)[:, None] & (e < E)[None, :]
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        top = tl.load(stats_ptr + i * size + row, mask=(r < rows) & (i < used), other=float("-inf"))
        highest = tl.maximum(highest, top)
    weight = tl.full((ROWS,), 0.0, tl.float32)
    total = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    for i in tl.static_range(PARTS):  # unrolled, so that all loads are under way at once
        live = (r < rows) & (i < used)
        share = tl.exp2(tl.load(stats_ptr + i * size + row, mask=live, other=float("-inf")) - highest)
        weight = tl.fma(tl.load(stats_ptr + (PARTS + i) * size + row, mask=live, other=0.0), share, weight)
        part_ptr = parts_ptr + (i * size + row)[:, None] * E + e[None, :]
        total = tl.fma(tl.load(part_ptr, mask=inside & (i < used), other=0.0), share[:, None], total)
    y = total / weight[:, None]
    tl.store(y_ptr + row[:, None] * E + e[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------- launch


def tree_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor, device: Device) -> Tensor:
    """`ops.attention.tree_attention`. Allocates its result and partial sums, and nothing else; never waits."""
    B, T, H, E = q.shape
    kv_heads, S, W = k.shape[1], k.shape[2], mask.shape[2]
    assert k.is_contiguous() and v.is_contiguous(), (k.stride(), v.stride())  # the cache's own buffers
    cut = plan_attention(T * H // kv_heads, E, q.dtype, device)
    splits = splits_of(T, S, W)
    y = torch.empty(B, T, H * E, dtype=q.dtype, device=q.device)
    constants = constants_of(E)
    parts, stats = y, y
    if splits > 1:
        parts = torch.empty(splits, B, T, H, E, dtype=torch.float32, device=q.device)
        stats = torch.empty(2, splits, B, T, H, dtype=torch.float32, device=q.device)
    attention_kernel[triton.cdiv(T * H // kv_heads, cut.rows), B * kv_heads, splits](
        q.contiguous(), k, v, start, mask, parts, stats, T, S, W, *mask.stride(), **constants, H=H, KV_HEADS=kv_heads,
        SPLIT=splits > 1, ROWS=cut.rows, KEYS=cut.keys, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[triton.cdiv(T * H, COMBINED), B](
            parts, stats, start, y, T * H, W, **constants, PARTS=splits, ROWS=COMBINED, num_warps=4
        )
    return y
