"""CUDA kernel, in Triton: attention of a draft tree, a chain or one token over a long static cache.

1. A block takes up to 64 or 128 rows of one key head: the new tokens times the query heads that
   share it, so that a key is read once for all of them.
2. The cache is cut into chunks of slots, one block each (split-K). The prefix length is read from
   device memory, so that one captured graph serves every length; blocks of unused chunks return.
3. A chunk is read 32 or 64 slots at a time, with the running softmax of FlashAttention (arXiv
   2205.14135). Slots below the prefix's end need no mask; slots beyond the window are not read.
4. Each chunk writes fp32 sums with their maximum and weight. The block that finishes last adds them
   in the order of the chunks, so equal runs give equal bits. `plan_attention` has the trade-offs.

Not here: writes to the cache, sliding windows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.launch import Device
from ops.cuda.plans import CHUNK, measured_on

SPLITS = 16  # chunks below the prefix's end, of `CHUNK` slots; beyond, chunks double
SPLIT_TOKENS = 64  # more tokens than these are not split
COUNTERS = 2**16  # blocks of rows of a split launch, at most


class AttentionPlan(NamedTuple):
    """The tile of a block of threads. Only `rows` and `warps` depend on the number of rows."""

    rows: int  # tokens x query heads of a group
    keys: int  # slots at a time
    stages: int  # of the software pipeline
    warps: int


@cache
def plan_attention(rows: int, E: int, dtype: torch.dtype, device: Device) -> AttentionPlan:
    """Choose the tile for `rows` rows per key head of width E; no spills up to E = 128.

    A row's bits depend on the slots that it sees and on their contents; not on the number of rows,
    their masks, the batch, or the prefix's end. Blocks and chunks lie at fixed slots, hidden slots
    add exact zeros, and sums that a compiler could contract in two ways are written as fused
    multiply-adds. So a chain is verified with the sums of vanilla decoding. This does not hold for
    branches of a tree, whose ancestors lie in other slots than after compaction; nor across a
    prefix of 16 CHUNK 2^i slots, where chunks double; nor between up to 64 tokens and more, which
    not split. It assumes that tensor cores add zero products exactly, in the same way for both tile
    heights, as test_gpu.py found on an H200.

    Trade-off: for that, a single token fills one row of 64, and chunks do not grow with the batch,
    whose sums can be more bytes than the keys. CHUNK is measured (plans.py), SPLITS is an
    estimate. fp32 has no tensor cores and serves tests only.
    """
    if dtype == torch.float32:
        wide = E > 64
        warps = 8 if wide and device.capability != 80 else 4  # the others spill
        return AttentionPlan(16, 16 if wide else 32, 1, warps)
    hopper = device.capability >= 90
    width = max(16, triton.next_power_of_2(E))
    # 16 rows a warp in both heights, so that a row's sums are the same; on Blackwell 128 spill
    tile = 128 if device.capability == 90 and rows > 64 else 64
    warps = tile // 16
    if width > 64 and device.capability == 80:
        warps = 8  # four spill
    keys = 64 if width == E <= 64 else 32  # more would spill
    stage = keys * width * 4  # bytes of keys and values
    # Hopper's tensor cores read a stage from shared memory; the others hold it in registers and
    # share the probabilities
    in_use = stage if hopper else 2 * tile * keys
    needed = 2 * tile * width + 2 * stage + in_use
    # half of the memory if possible: two blocks hide each other's waits
    for limit in (device.shared_bytes // 2, device.shared_bytes):
        if needed <= limit:
            return AttentionPlan(tile, keys, 3, warps)
    return AttentionPlan(tile, keys, 2, warps)


def splits_of(T: int, S: int, W: int, chunk: int = CHUNK) -> int:
    """Return the largest number of chunks of a cache of S slots, with W of them in the window."""
    if T > SPLIT_TOKENS:
        return 1
    return min(triton.cdiv(S, chunk), SPLITS + triton.cdiv(W, chunk))


def constants_of(E: int, chunk: int = CHUNK) -> dict[str, int]:
    """Return the kernel's constants that follow from E. WIDTH: E padded to a power of two."""
    return {"E": E, "WIDTH": max(16, triton.next_power_of_2(E)), "CHUNK": chunk, "SPLITS": SPLITS}


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _chunk(start, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the slots of a chunk when the prefix ends at `start`."""
    chunk = tl.full((), CHUNK, tl.int32)
    while start >= chunk * SPLITS:
        chunk *= 2
    return chunk


@triton.jit
def _visible(mask_ptr, t, w, W, mask_t, mask_w):
    """Return the slots of a block that each row sees: [ROWS, KEYS] bool.

    t: [ROWS] int32, tokens; w: [KEYS] int32, the slots' places in the window, negative below it
    """
    # 32 bits: addresses of 64 would take too many registers
    place = t[:, None] * mask_t + w[None, :] * mask_w
    inside = ((w >= 0) & (w < W))[None, :]
    return (w < 0)[None, :] | tl.load(mask_ptr + place, mask=inside, other=0).to(tl.int1)


@triton.jit
def _add(scores, v, top, weight, total, SCALE: tl.constexpr):
    """Add a block of keys to the running softmax.

    scores: [ROWS, KEYS] fp32, q k^T, -inf where hidden; v: [KEYS, WIDTH]
    top, weight: [ROWS] fp32, the maximum so far and the sum of exponentials
    total: [ROWS, WIDTH] fp32, the weighted sum of values
    """
    new = tl.maximum(top, tl.max(scores, 1) * SCALE)
    base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    p = tl.exp2(tl.fma(scores, SCALE, -base[:, None]))
    shrink = tl.exp2(top - base)
    weight = tl.fma(weight, shrink, tl.sum(p, 1))
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return new, weight, total


@triton.jit
def _attend(
    q,
    keys_ptr,
    values_ptr,
    column,
    mask_ptr,
    t,
    start,
    W,
    first,
    last,
    mask_t,
    mask_w,
    E: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to the slots first .. last, KEYS at a time; all rows see those below `start`.

    q: [ROWS, WIDTH]
    keys, values: pointers to the first KEYS slots, [WIDTH, KEYS] and [KEYS, WIDTH]
    column: [WIDTH] bool, False for padding; t: [ROWS] int32, tokens
    Returns: maximum and weight, [ROWS] fp32, and total, [ROWS, WIDTH] fp32, as in `_add`.
    """
    SCALE: tl.constexpr = 1.4426950408889634 / E**0.5  # exponentials are to the base 2
    n = tl.arange(0, KEYS)
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    weight = tl.full((q.shape[0],), 0.0, tl.float32)
    total = tl.full(q.shape, 0.0, tl.float32)
    # the end of the blocks that all rows see
    seen = tl.minimum(tl.maximum(start // KEYS * KEYS, first), last)
    for at in tl.range(first, seen, KEYS, num_stages=STAGES):
        k = tl.load(keys_ptr + at * E, mask=column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=column[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, KEYS]
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    for at in tl.range(seen, last, KEYS, num_stages=1):
        inside = at + n < start + W
        k = tl.load(keys_ptr + at * E, mask=inside[None, :] & column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=inside[:, None] & column[None, :], other=0.0)
        visible = _visible(mask_ptr, t, at + n - start, W, mask_t, mask_w)
        scores = tl.where(visible, tl.dot(q, k, input_precision="ieee"), float("-inf"))
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    return top, weight, total


@triton.jit
def is_last(done_ptr, blocks):
    """Check that all other blocks that share a counter have finished.

    Their results can be read then, past the L1 cache (".cg"), and the counter is 0 again. A block
    alone waits for its own threads only.
    """
    tl.debug_barrier()  # all threads of this block have written
    last = blocks == 1
    if blocks > 1:
        # one thread releases what the barrier has ordered before, and acquires for all others
        last = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == blocks - 1
        if last:  # the next user is a later launch, so this needs no order
            tl.atomic_xchg(done_ptr, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def _combine(parts_ptr, stats_ptr, size, used, live, inside, E: tl.constexpr):
    """Add the chunks in use, first chunk first.

    parts: [ROWS, WIDTH] pointers, stats: [ROWS] pointers, of the first chunk; size: rows of a chunk
    Returns: weight [ROWS] and total [ROWS, WIDTH].
    """
    highest = tl.full(live.shape, float("-inf"), tl.float32)
    for first in range(0, used, 4):  # four at a time: one by one they would be a chain of waits
        c = first + tl.arange(0, 4)[None, :]
        some = live[:, None] & (c < used)
        tops = tl.load(
            stats_ptr[:, None] + c * size, mask=some, other=float("-inf"), cache_modifier=".cg"
        )  # [ROWS, 4]
        highest = tl.maximum(highest, tl.max(tops, 1))
    weight = tl.full(live.shape, 0.0, tl.float32)
    total = tl.full(inside.shape, 0.0, tl.float32)
    for i in range(used):
        share = tl.exp2(
            tl.load(stats_ptr + i * size, mask=live, other=float("-inf"), cache_modifier=".cg")
            - highest
        )
        own = tl.load(
            stats_ptr + (tl.num_programs(2) + i) * size, mask=live, other=0.0, cache_modifier=".cg"
        )
        weight = tl.fma(own, share, weight)
        part = tl.load(parts_ptr + i * size * E, mask=inside, other=0.0, cache_modifier=".cg")
        total = tl.fma(part, share[:, None], total)
    return weight, total


@triton.jit(do_not_specialize=["T", "S", "W", "mask_b", "mask_t", "mask_w"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, mask_ptr, y_ptr, parts_ptr, stats_ptr, done_ptr,
    T, S, W, mask_b, mask_t, mask_w, H: tl.constexpr, KV_HEADS: tl.constexpr, E: tl.constexpr,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows of a key head to a chunk, or to all slots; the last block adds chunks.

    q, y: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]; start: [B] int64; mask: [B, T, W] bool, strided
    parts: with SPLIT, [chunks, B, T, H, E] fp32, not divided by their weights
    stats: [2, chunks, B, T, H] fp32, maximum and weight
    done: [blocks of rows, B * KV_HEADS] int32, zeros before and after. Writes: y; used parts, stats
    """
    GROUP: tl.constexpr = H // KV_HEADS
    b = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    start = tl.load(start_ptr + b).to(tl.int32)
    first = 0
    last = start + W
    used = 1
    if SPLIT:
        chunk = _chunk(start, CHUNK, SPLITS)
        used = tl.minimum(tl.cdiv(last, chunk), tl.num_programs(2))
        first = split * chunk
        last = tl.minimum(first + chunk, last)
        if first >= last:
            return
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = r // GROUP
    row = t * H + head * GROUP + r % GROUP  # of the T * H of its sequence
    before = b.to(tl.int64) * T * H  # rows of earlier sequences
    e = tl.arange(0, WIDTH)
    n = tl.arange(0, KEYS)
    column = (e < E) | (WIDTH == E)
    place = row[:, None] * E + e[None, :]
    inside = (t < T)[:, None] & column[None, :]
    q = tl.load(q_ptr + before * E + place, mask=inside, other=0.0)
    base = tl.program_id(1).to(tl.int64) * S * E
    keys_ptr = k_ptr + base + n[None, :] * E + e[:, None]  # [WIDTH, KEYS]
    values_ptr = v_ptr + base + n[:, None] * E + e[None, :]  # [KEYS, WIDTH]
    mask_ptr += b.to(tl.int64) * mask_b
    top, weight, total = _attend(
        q, keys_ptr, values_ptr, column, mask_ptr, tl.minimum(t, T - 1), start, W, first, last,
        mask_t, mask_w, E, KEYS, STAGES,
    )  # fmt: skip
    if SPLIT:
        size = (tl.num_programs(1) // KV_HEADS * T * H).to(tl.int64)  # rows of a chunk
        mine = split * size + before
        tl.store(stats_ptr + mine + row, top, mask=t < T)
        tl.store(stats_ptr + tl.num_programs(2) * size + mine + row, weight, mask=t < T)
        tl.store(parts_ptr + mine * E + place, total, mask=inside)
        if not is_last(done_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), used):
            return
        weight, total = _combine(
            parts_ptr + before * E + place, stats_ptr + before + row, size, used, t < T, inside, E
        )
    y = total / weight[:, None]
    tl.store(y_ptr + before * E + place, y.to(y_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------- launch


@cache
def counters(index: int) -> Tensor:
    """Return zeros that all launches of a device share, one after the other: [COUNTERS] int32."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=f"cuda:{index}")


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    device: Device,
    done: Tensor,
    chunk: int | None = None,
) -> Tensor:
    """Compute `ops.attention.tree_attention`.

    Allocates its result and partial sums, and nothing else; never waits.

    done: from `counters`; launches that share it must follow each other, as those of one stream do
    chunk: slots; None: as measured or estimated
    """
    B, T, H, E = q.shape
    _, kv_heads, S, _ = k.shape
    W = mask.shape[2]
    # they are the cache's own buffers
    assert k.is_contiguous() and v.is_contiguous(), (k.stride(), v.stride())
    cut = plan_attention(T * H // kv_heads, E, q.dtype, device)
    chunk = chunk or measured_on(device.name).chunk
    splits = splits_of(T, S, W, chunk)
    blocks = triton.cdiv(T * H // kv_heads, cut.rows)
    assert splits == 1 or blocks * B * kv_heads <= len(done), (blocks, B, kv_heads)
    y = torch.empty(B, T, H * E, dtype=q.dtype, device=q.device)
    parts = y  # not used without splits
    stats = y
    if splits > 1:
        parts = torch.empty(splits, B, T, H, E, dtype=torch.float32, device=q.device)
        stats = torch.empty(2, splits, B, T, H, dtype=torch.float32, device=q.device)
    attention_kernel[blocks, B * kv_heads, splits](
        q.contiguous(),
        k,
        v,
        start,
        mask,
        y,
        parts,
        stats,
        done,
        T,
        S,
        W,
        *mask.stride(),
        **constants_of(E, chunk),
        H=H,
        KV_HEADS=kv_heads,
        SPLIT=splits > 1,
        ROWS=cut.rows,
        KEYS=cut.keys,
        STAGES=cut.stages,
        num_warps=cut.warps,
    )
    return y
