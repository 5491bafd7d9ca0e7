"""CUDA kernel, in Triton: attention of a draft tree, a chain or one token over a long static cache.

1. The end of what a row sees, its last 33 to 96 slots, is the row's *tail*. Blocks of their own
   read it along the row's path: in the order of the slots that it will have if the path is
   accepted. So a branch of a tree adds its ancestors as vanilla decoding does, and has its bits.
2. The slots before the tails are cut into chunks, one block each (split-K), for up to 64 rows of
   one key head: the new tokens times the query heads that share it. The prefix length is read from
   device memory, so that one captured graph serves every length; blocks without work return.
3. A chunk is read 32 or 64 slots at a time, with the running softmax of FlashAttention (arXiv
   2205.14135).
4. Tails and chunks write fp32 sums with their maximum and weight. The block that finishes last adds
   them in a fixed order, so equal runs give equal bits. `plan_attention` has the trade-offs.
5. More than 64 tokens, of a prompt, are not split: a block reads all slots, by the mask.
6. In a layer with a sliding window, no block reads slots before the `first` of all its rows.

Not here: writes to the cache.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.cuda.launch import Device

CHUNK = 256  # slots of a block; the fastest of 64, 128 and 256 on an H200
SPLITS = 16  # chunks of `CHUNK` slots; behind them half as many of twice the slots, and so on
SPLIT_TOKENS = 64  # more tokens than these are not split
TAIL = 32  # slots that a tail has at least: as many as a path may have below its root
TAIL_ROWS = 2  # whose tails a block reads
COUNTERS = 2**16  # blocks of rows of a split launch, at most
LOG2_E = 1.4426950408889634


class AttentionPlan(NamedTuple):
    """The tile of a block of threads."""

    rows: int  # tokens x query heads of a group
    keys: int  # slots at a time
    stages: int  # of the software pipeline
    warps: int


@cache
def plan_attention(
    rows: int, E: int, dtype: torch.dtype, device: Device, split: bool = True
) -> AttentionPlan:
    """Choose the tile for `rows` rows per key head of width E; hardly any spills.

    split: the launch has chunks and tails; all of them have one plan, so one compiled kernel

    A row's bits depend on the keys and values that it sees, in the order of its path, and on
    nothing else: not on the number of rows, their masks, the batch, the prefix's end, or the slots
    in which its ancestors lie. Blocks and chunks lie at fixed slots, tails begin where the row's
    place in the text says, hidden slots add exact zeros, and sums of both loops over a chunk are
    written as fused multiply-adds, since a compiler could contract each loop in its own way. The
    sums of products in a tail are left to it: Triton 3.6 and 3.7 contract those of both rows alike.
    So trees and chains are verified with the sums of vanilla decoding. This does not hold for paths
    of more than TAIL tokens below the root, nor between up to 64 tokens and more, which are not
    split. It assumes that a row of a product on tensor cores does not depend on the other rows, and
    that zeros are added exactly (test_gpu.py).

    Trade-off: a tail is read for one row alone; a single token fills one row of 64; and chunks do
    not grow with the batch, whose sums can be more bytes than the keys. CHUNK is measured,
    SPLITS is an estimate. fp32 has no tensor cores and serves tests only.
    """
    if dtype == torch.float32:
        wide = E > 64
        warps = 8 if wide else 4  # four spill
        return AttentionPlan(16, 16 if wide else 32, 1, warps)
    hopper = device.capability >= 90
    width = max(16, triton.next_power_of_2(E))
    # a higher tile reads the keys of a prompt less often; on Blackwell 128 spill
    tile = 128 if device.capability == 90 and rows > 64 and not split else 64
    warps = tile // 16
    if width > 64 and device.capability == 80:
        warps = 8  # four spill
    keys = 64 if width == E <= 64 else 32  # more would spill
    if width > 128:  # more would spill 500 bytes; these 16 at most
        tile = 64 if hopper else 32
        warps = 8
        keys = 16
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


def splits_of(S: int) -> int:
    """Return the number of chunks of a cache of S slots."""
    doubled = max(0, triton.cdiv(S, SPLITS * CHUNK) - 1).bit_length()
    return doubled * (SPLITS // 2) + triton.cdiv(S, CHUNK << doubled)


def constants_of(E: int, W: int, split: bool, scale: float = 0.0) -> dict[str, int | float]:
    """Return a kernel's constants that follow from E and, in a split launch, from the window.

    scale: of the scores; 0: E ** -0.5. SCALE has log2(e) in it: exponentials are to the base 2
    WIDTH and WINDOW: E and W padded to powers of two; all trees and chains have one WINDOW
    """
    constants: dict[str, int | float] = {"E": E, "WIDTH": max(16, triton.next_power_of_2(E))}
    constants["SCALE"] = LOG2_E * scale if scale else LOG2_E / E**0.5
    if split:
        constants |= {"CHUNK": CHUNK, "SPLITS": SPLITS, "TAIL": TAIL, "TAIL_ROWS": TAIL_ROWS}
        constants["WINDOW"] = max(SPLIT_TOKENS, triton.next_power_of_2(W))
    return constants


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _chunk(c, end, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the slots of chunk c, from one to another, none of them behind `end`.

    A chunk lies at fixed slots, so that a row's bits do not depend on the prefix's end.
    """
    HALF: tl.constexpr = SPLITS // 2
    doubled = tl.maximum(c // HALF - 1, 0)
    slots = tl.full((), CHUNK, tl.int32) << doubled
    first = (c - doubled * HALF) * slots
    return first, tl.minimum(first + slots, end)


@triton.jit
def _chunks_before(end, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of chunks that begin before a slot."""
    HALF: tl.constexpr = SPLITS // 2
    most = tl.full((), CHUNK, tl.int32)
    used = 0
    while end > most * SPLITS:
        most *= 2
        used += HALF
    return used + tl.cdiv(end, most)


@triton.jit
def _tail_start(seen, start, KEYS: tl.constexpr, TAIL: tl.constexpr):
    """Return where the tail of rows begins that see `seen` slots; never in the window."""
    return tl.minimum(tl.maximum(seen - 1 - TAIL, 0), start) // KEYS * KEYS


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
    q, k_ptr, v_ptr, column, mask_ptr, first_ptr, t, start, W, first, last, mask_t, mask_w,
    SCALE: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Attend to the slots first .. last, KEYS at a time; with a TAIL, to those before a row's own.

    q: [ROWS, WIDTH]; k, v: pointers to slot 0 of the key head
    column: [WIDTH] bool, False for padding; t: [ROWS] int32, tokens
    first_ptr: pointer to token 0's first place, or None
    Returns: maximum and weight, [ROWS] fp32, and total, [ROWS, WIDTH] fp32, as in `_add`.
    """
    n = tl.arange(0, KEYS)
    e = tl.arange(0, q.shape[1])
    keys_ptr = k_ptr + n[None, :] * E + e[:, None]  # [WIDTH, KEYS]
    values_ptr = v_ptr + n[:, None] * E + e[None, :]  # [KEYS, WIDTH]
    shared = start // KEYS * KEYS  # all rows see the blocks below
    if TAIL:
        shared = _tail_start(start + 1, start, KEYS, TAIL)
    low = first_ptr  # a row's first place, or None
    if first_ptr is not None:
        low = tl.load(first_ptr + t).to(tl.int32)
        first = tl.maximum(first, tl.min(low, 0) // KEYS * KEYS)
    shared = tl.minimum(tl.maximum(shared, first), last)
    end = tl.full((q.shape[0],), 0, tl.int32)  # where each row's tail begins
    if TAIL and shared < last:
        w = tl.arange(0, WINDOW)
        seen = tl.load(
            mask_ptr + t[:, None] * mask_t + w[None, :] * mask_w, mask=(w < W)[None, :], other=0
        )
        seen = start + tl.sum(seen.to(tl.int32), 1)
        if low is not None:
            seen += tl.maximum(low - start, 0)  # of the path, hidden places of the window
        end = _tail_start(seen, start, KEYS, TAIL)
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    weight = tl.full((q.shape[0],), 0.0, tl.float32)
    total = tl.full(q.shape, 0.0, tl.float32)
    for at in tl.range(first, shared, KEYS, num_stages=STAGES):
        k = tl.load(keys_ptr + at * E, mask=column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=column[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, KEYS]
        if low is not None:
            scores = tl.where((at + n)[None, :] >= low[:, None], scores, float("-inf"))
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    for at in tl.range(shared, last, KEYS, num_stages=1):
        inside = at + n < start + W
        k = tl.load(keys_ptr + at * E, mask=inside[None, :] & column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=inside[:, None] & column[None, :], other=0.0)
        if TAIL:
            visible = (at + n)[None, :] < end[:, None]
        else:
            visible = _visible(mask_ptr, t, at + n - start, W, mask_t, mask_w)
        if low is not None:
            visible &= (at + n)[None, :] >= low[:, None]
        scores = tl.where(visible, tl.dot(q, k, input_precision="ieee"), float("-inf"))
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    return top, weight, total


@triton.jit
def _attend_tails(
    q, k_ptr, v_ptr, column, mask_ptr, first_ptr, u, live, start, W, mask_w, SCALE: tl.constexpr,
    E: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Attend from rows to their tails, each along its path.

    The slots of the window that a row sees are its path, in ascending order.

    q: [R, WIDTH] fp32; k, v: pointers to slot 0 of the key head; mask: [R, 1] pointers
    column: [WIDTH] bool, False for padding; live: [R] bool, False beyond the last row
    first: of each token the first place of its path that it sees, or None: 0; u: [R] int32, tokens
    Returns: maximum and weight, [R] fp32, and total, [R, WIDTH] fp32, as in `_add`.
    """
    e = tl.arange(0, q.shape[1])
    w = tl.arange(0, WINDOW)[None, :]
    low = first_ptr
    if first_ptr is not None:
        low = tl.load(first_ptr + u).to(tl.int32)
    seen = tl.load(mask_ptr + w * mask_w, mask=live[:, None] & (w < W), other=0).to(tl.int32)
    path = tl.cumsum(seen, 1)
    end = start + tl.sum(seen, 1)
    if low is not None:
        hidden = tl.maximum(low - start, 0)  # places of the window before those that are seen
        path += hidden[:, None]
        end += hidden
    path = tl.where(seen > 0, path, 0)  # [R, WINDOW], from 1; 0: not on the path
    end = tl.where(live, end, 0)
    begin = _tail_start(end, start, KEYS, TAIL)
    if low is not None:
        begin = tl.maximum(begin, low)
    top = tl.full(live.shape, float("-inf"), tl.float32)
    weight = tl.full(live.shape, 0.0, tl.float32)
    total = tl.full(q.shape, 0.0, tl.float32)
    first = tl.min(tl.where(live, begin, start), 0) // KEYS * KEYS
    for at in tl.range(first, tl.max(end, 0), KEYS, num_stages=1):
        place = at + tl.arange(0, KEYS)  # where the slots lie once the path is accepted
        here = path[:, None, :] == (place - start + 1)[None, :, None]  # [R, KEYS, WINDOW]
        ahead = tl.sum(tl.where(here, w[:, None, :], 0), 2)  # [R, KEYS]
        slot = tl.where(place < start, place, start + ahead)
        visible = (place >= begin[:, None]) & (place < end[:, None])
        real = visible[:, :, None] & column[None, None, :]
        cells = slot[:, :, None] * E + e[None, None, :]
        k = tl.load(k_ptr + cells, mask=real, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + cells, mask=real, other=0.0).to(tl.float32)
        scores = tl.where(visible, tl.sum(k * q[:, None, :], 2), float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1) * SCALE)
        base = tl.where(new == float("-inf"), 0.0, new)  # a row whose tail begins later
        p = tl.exp2(tl.fma(scores, SCALE, -base[:, None]))
        shrink = tl.exp2(top - base)
        weight = tl.fma(weight, shrink, tl.sum(p, 1))
        total = tl.fma(total, shrink[:, None], tl.sum(v * p[:, :, None], 1))
        top = new
    return top, weight, total


@triton.jit
def is_last(done_ptr, blocks):
    """Return whether all other blocks that share a counter have finished.

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
def _combine(parts_ptr, stats_ptr, size, unread, used, most, live, inside, E: tl.constexpr):
    """Add the parts in use, first part first: the tail, then the chunks that were read.

    parts: [ROWS, WIDTH] pointers, stats: [ROWS] pointers, of the first part; size: rows of a part
    unread: chunks before the first one that was read; used: parts that were written
    Returns: weight [ROWS] and total [ROWS, WIDTH].
    """
    highest = tl.full(live.shape, float("-inf"), tl.float32)
    for first in range(0, used, 4):  # four at a time: one by one they would be a chain of waits
        c = first + tl.arange(0, 4)[None, :]
        some = live[:, None] & (c < used)
        c = tl.where(c > 0, c + unread, 0)
        tops = tl.load(
            stats_ptr[:, None] + c * size, mask=some, other=float("-inf"), cache_modifier=".cg"
        )  # [ROWS, 4]
        highest = tl.maximum(highest, tl.max(tops, 1))
    weight = tl.full(live.shape, 0.0, tl.float32)
    total = tl.full(inside.shape, 0.0, tl.float32)
    for c in range(used):
        i = tl.where(c > 0, c + unread, 0)
        share = tl.exp2(
            tl.load(stats_ptr + i * size, mask=live, other=float("-inf"), cache_modifier=".cg")
            - highest
        )
        own = tl.load(stats_ptr + (most + i) * size, mask=live, other=0.0, cache_modifier=".cg")
        weight = tl.fma(own, share, weight)
        part = tl.load(parts_ptr + i * size * E, mask=inside, other=0.0, cache_modifier=".cg")
        total = tl.fma(part, share[:, None], total)
    return weight, total


@triton.jit
def _rows(own, head, T, column, H: tl.constexpr, KV_HEADS: tl.constexpr, E: tl.constexpr):
    """Find rows of a key head, numbered by `own`: [R] int32.

    Returns: their tokens [R], which are below T, their places in [T, H] and [T, H, E], and which
    of the latter are there: [R] int32, [R] bool, [R] int32, [R, WIDTH] int32, [R, WIDTH] bool.
    """
    GROUP: tl.constexpr = H // KV_HEADS
    token = own // GROUP
    live = token < T
    spots = token * H + head * GROUP + own % GROUP
    cells = spots[:, None] * E + tl.arange(0, column.shape[0])[None, :]
    return tl.minimum(token, T - 1), live, spots, cells, live[:, None] & column[None, :]


@triton.jit(do_not_specialize=["T", "S", "W", "mask_b", "mask_t", "mask_w"])
def prompt_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, mask_ptr, first_ptr, y_ptr, T, S, W, mask_b, mask_t, mask_w,
    H: tl.constexpr, KV_HEADS: tl.constexpr, SCALE: tl.constexpr, E: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows of a key head to all slots that they see.

    q, y: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]; start: [B] int64; mask: [B, T, W] bool, strided
    first: [B, T] int64, or None
    Writes: y.
    """
    b = tl.program_id(1) // KV_HEADS
    start = tl.load(start_ptr + b).to(tl.int32)
    before = b.to(tl.int64) * T * H * E  # of earlier sequences
    base = tl.program_id(1).to(tl.int64) * S * E
    e = tl.arange(0, WIDTH)
    column = (e < E) | (WIDTH == E)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, _, _, cells, real = _rows(own, tl.program_id(1) % KV_HEADS, T, column, H, KV_HEADS, E)
    if first_ptr is not None:
        first_ptr += b * T
    q = tl.load(q_ptr + before + cells, mask=real, other=0.0)
    _, weight, total = _attend(
        q, k_ptr + base, v_ptr + base, column, mask_ptr + b.to(tl.int64) * mask_b, first_ptr, t,
        start, W, 0, start + W, mask_t, mask_w, SCALE, E, KEYS, STAGES, 0, 0,
    )  # fmt: skip
    y = total / weight[:, None]
    tl.store(y_ptr + before + cells, y.to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def _part(
    start, rows, W, low, CHUNK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr, TAIL_ROWS: tl.constexpr,
):  # fmt: skip
    """Find the work of a block: the programs of the last axis are tails, then chunks.

    rows: of a key head; low: the first places that those of this block see, or None: 0
    Returns: the part that it writes, 0 for a tail, or -1: there is none; the number of parts; the
    slots of its chunk, from one to another; the number of chunks that nobody reads, which come
    first; of those that are read; and of blocks with work.
    """
    tails = tl.cdiv(tl.minimum(rows - tl.program_id(0) * ROWS, ROWS), TAIL_ROWS)
    most_tails = tl.cdiv(tl.minimum(rows, ROWS), TAIL_ROWS)  # of any block of rows
    end = _tail_start(start + W, start, KEYS, TAIL)
    part = tl.program_id(2) - most_tails + 1
    first, last = _chunk(part - 1, end, CHUNK, SPLITS)
    used = _chunks_before(end, CHUNK, SPLITS)
    unread = 0
    if low is not None:
        unread = tl.minimum(_chunks_before(tl.min(low, 0) + 1, CHUNK, SPLITS) - 1, used)
    if part <= 0:
        part = tl.where(tl.program_id(2) < tails, 0, -1)
    else:
        part = tl.where((first < end) & (part > unread), part, -1)
    most = tl.num_programs(2) - most_tails + 1
    return part, most, first, last, unread, used - unread, tails + used - unread


@triton.jit
def _write(parts_ptr, stats_ptr, of_weights, top, weight, total, live, real):
    """Write the results of rows, whose pointers are given."""
    tl.store(stats_ptr, top, mask=live)
    tl.store(stats_ptr + of_weights, weight, mask=live)
    tl.store(parts_ptr, total, mask=real)


@triton.jit(do_not_specialize=["T", "S", "W", "mask_b", "mask_t", "mask_w"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, mask_ptr, first_ptr, y_ptr, parts_ptr, stats_ptr, done_ptr,
    T, S, W, mask_b, mask_t, mask_w, H: tl.constexpr, KV_HEADS: tl.constexpr, SCALE: tl.constexpr,
    E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    TAIL: tl.constexpr, TAIL_ROWS: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows of a key head to a chunk, or from few of them to their tails.

    q, y: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]; start: [B] int64; mask: [B, T, W] bool, strided
    first: [B, T] int64, or None; done: [blocks of rows, B * KV_HEADS] int32, 0 before and after
    parts: [1 + chunks, B, T, H, E] fp32, not divided by their weights, tails first
    stats: [2, 1 + chunks, B, T, H] fp32, maximum and weight. Writes: y; used parts, stats
    """
    b = tl.program_id(1) // KV_HEADS
    start = tl.load(start_ptr + b).to(tl.int32)
    column = (tl.arange(0, WIDTH) < E) | (WIDTH == E)
    head = tl.program_id(1) % KV_HEADS
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, live, spots, cells, real = _rows(own, head, T, column, H, KV_HEADS, E)
    low = first_ptr  # the first place of its path that each row sees, or None
    if first_ptr is not None:
        first_ptr += b * T
        low = tl.load(first_ptr + t).to(tl.int32)
    part, most, first, last, unread, used, blocks = _part(
        start, T * H // KV_HEADS, W, low, CHUNK, SPLITS, ROWS, KEYS, TAIL, TAIL_ROWS
    )
    if part < 0:
        return
    before = b.to(tl.int64) * T * H  # rows of earlier sequences
    q_ptr += before * E
    parts_ptr += before * E
    stats_ptr += before
    mask_ptr += b.to(tl.int64) * mask_b
    base = tl.program_id(1).to(tl.int64) * S * E
    size = (tl.num_programs(1) // KV_HEADS * T * H).to(tl.int64)  # rows of a part
    if part == 0:
        few = tl.program_id(0) * ROWS + tl.program_id(2) * TAIL_ROWS + tl.arange(0, TAIL_ROWS)
        u, some, spot, cell, there = _rows(few, head, T, column, H, KV_HEADS, E)
        x = tl.load(q_ptr + cell, mask=there, other=0.0).to(tl.float32)
        high, share, sums = _attend_tails(
            x, k_ptr + base, v_ptr + base, column, mask_ptr + u[:, None] * mask_t, first_ptr, u,
            some, start, W, mask_w, SCALE, E, KEYS, WINDOW, TAIL,
        )  # fmt: skip
        _write(parts_ptr + cell, stats_ptr + spot, most * size, high, share, sums, some, there)
    else:
        q = tl.load(q_ptr + cells, mask=real, other=0.0)
        top, weight, total = _attend(
            q, k_ptr + base, v_ptr + base, column, mask_ptr, first_ptr, t, start, W, first, last,
            mask_t, mask_w, SCALE, E, KEYS, STAGES, WINDOW, TAIL,
        )  # fmt: skip
        stat = stats_ptr + part * size + spots
        ours = parts_ptr + part * size * E + cells
        _write(ours, stat, most * size, top, weight, total, live, real)
    if is_last(done_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), blocks):
        weights, totals = _combine(
            parts_ptr + cells, stats_ptr + spots, size, unread, 1 + used, most, live, real, E
        )
        y = (totals / weights[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + before * E + cells, y, mask=real)


# ------------------------------------------------------------------------------------------- launch


@cache
def counters(index: int) -> Tensor:
    """Return zeros that all launches of a device share, one after the other: [COUNTERS] int32."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=f"cuda:{index}")


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[Tensor, Tensor, Tensor | None],
    scale: float,
    device: Device,
    done: Tensor,
) -> Tensor:
    """Compute `ops.attention.tree_attention`.

    Allocates its result and partial sums, and nothing else; never waits.

    window: start, mask and first
    done: from `counters`; launches that share it must follow each other, as those of one stream do
    """
    B, T, H, E = q.shape
    _, kv_heads, S, _ = k.shape
    start, mask, first = window
    W = mask.shape[2]
    first = first if first is None else first.contiguous()
    # they are the cache's own buffers
    assert k.is_contiguous() and v.is_contiguous(), (k.stride(), v.stride())
    split = T <= SPLIT_TOKENS
    rows = T * H // kv_heads
    cut = plan_attention(rows, E, q.dtype, device, split)
    blocks = triton.cdiv(rows, cut.rows)
    y = torch.empty(B, T, H * E, dtype=q.dtype, device=q.device)
    tile = {"ROWS": cut.rows, "KEYS": cut.keys, "STAGES": cut.stages, "num_warps": cut.warps}
    heads = {"H": H, "KV_HEADS": kv_heads}
    sizes = (T, S, W, *mask.stride())
    given = (q.contiguous(), k, v, start, mask, first, y)
    constants = constants_of(E, W, split, scale)
    if not split:
        prompt_kernel[blocks, B * kv_heads](*given, *sizes, **constants, **heads, **tile)
        return y
    assert blocks * B * kv_heads <= len(done), (blocks, B, kv_heads)
    chunks = splits_of(S)
    parts = torch.empty(1 + chunks, B, T, H, E, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, 1 + chunks, B, T, H, dtype=torch.float32, device=q.device)
    programs = triton.cdiv(min(rows, cut.rows), TAIL_ROWS) + chunks
    attention_kernel[blocks, B * kv_heads, programs](
        *given, parts, stats, done, *sizes, **constants, **heads, **tile
    )
    return y
