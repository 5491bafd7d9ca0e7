"""CUDA kernels, in Triton: attention of a draft tree, a chain or a token over a long static cache.

1. The places of a row's own path, from the first token of the text to the row's own, are cut into
   tiles of fixed size. A tile is reduced by itself, and tiles are merged in order. So a branch of a
   tree is added as vanilla decoding adds it, and has its bits.
2. Tiles in front of the window are the same slots for all rows. They are cut into chunks, one block
   each (split-K), for 16 rows of one key head: new tokens times the query heads that share it.
3. The last tiles of a row reach into the window. Blocks of their own gather them along the paths of
   some tokens at once, side by side: every row sees its own token's tile. `path_table` lists the
   paths, once for all layers. One token alone has no window, and needs neither.
4. The block that finishes last merges all that is there. The prefix length is read from device
   memory, so that one captured graph serves every length; blocks without work return.
5. In a layer with a sliding window, no block reads tiles before the `first` of all its rows.
6. A head's sink is the last part of a row's weight.

`plan_attention` has the contract and the trade-offs. Not here: writes to the cache; many tokens, of
a prompt (prompt_attention.py).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.triton.launch import SPLIT_TOKENS, Device
from backends.triton.prompt_attention import (
    constants_of,
    prompt_attention,
    rows_of,
    weight_of_sinks,
)

CHUNK = 256  # slots of a block; the fastest of 64, 128 and 256 on an H200
SPLITS = 16  # chunks of `CHUNK` slots; behind them half as many of twice the slots, and so on
ROWS = 16  # of a block: from 64 on, Hopper and Blackwell would add in another order
COUNTERS = 2**16  # blocks of rows of a launch, at most


class AttentionPlan(NamedTuple):
    """The tile of a block of threads."""

    tile: int  # places that are reduced by themselves
    tokens: int  # whose tiles a block gathers at once
    stages: int  # of the software pipeline
    warps: int
    registers: int  # of a thread, at most


@cache
def plan_attention(E: int, dtype: torch.dtype) -> AttentionPlan:
    """Choose the tile for heads of width E; the same for all numbers of rows and all devices.

    A row's bits depend on the keys and values that it sees, in the order of its path, and on
    nothing else: not on the number of rows, their masks, the batch, the prefix's end, the slots in
    which its ancestors lie, or the depth of the tree. This holds for up to SPLIT_TOKENS tokens, and
    not between those and more. It rests on this (test_gpu.py):

    - Tiles and chunks are limited by places, so they are the same for a tree and for one token. A
      tile that a row does not see changes no bit where it is merged: x * 1 + 0.
    - Every product is m16n8k16 on tensor cores, whose rows do not depend on each other. It adds 16
      keys at a time, in order; groups of 16 that a row does not see add exact zeros. Weights are
      products with ones, since the order of `tl.sum` follows the number of rows.
    - All other sums are explicit fused multiply-adds, and the compiler may not contract any other
      product with a sum, which it could do in one place and not in another.
    - Partial results are read past the L1 cache, which may hold older ones.

    A tile has 32 places. In a prototype on an H200 (27 November 2026, heads of 128), tiles of 64
    took 0.4 to 1.6 us a layer less for one token and 0.6 to 4 less for 6, and 1 to 8 more for a
    tree of 32 with 32 key heads, up to 1.8 times as much: a block gathers the paths of half as many
    tokens. With 8 key heads they took 0.5 to 3.4 less for the tree, most where the second of two
    tiles was empty; such a tile is not read here. fp32 has no tensor cores and serves tests only.
    """
    width = max(16, triton.next_power_of_2(E))
    if dtype == torch.float32:
        return AttentionPlan(16, 1, 1, 8 if width > 64 else 4, 255)
    if width > 256:  # of Gemma 4; never run. More would not fit a multiprocessor of 100 KB
        return AttentionPlan(32, 1, 1, 8, 255)
    if width > 128:
        return AttentionPlan(32, 2, 3, 4, 255)
    return AttentionPlan(32, 4, 5, 4, 168)  # with 70 KB three blocks fit a multiprocessor


def splits_of(S: int) -> int:
    """Return the number of chunks of a cache of S slots."""
    doubled = max(0, triton.cdiv(S, SPLITS * CHUNK) - 1).bit_length()
    return doubled * (SPLITS // 2) + triton.cdiv(S, CHUNK << doubled)


def gathering_blocks(T: int, group: int, tokens: int) -> int:
    """Return how many blocks gather the tiles of ROWS rows, at most. group: rows of a token"""
    spanned = triton.cdiv(ROWS - 1, group) + 1  # tokens whose rows may lie in a block
    return triton.cdiv(min(T, spanned), tokens)


# ------------------------------------------------------------------------------------ path of a row


@triton.jit(do_not_specialize=["T", "W", "mask_b", "mask_t", "mask_w"])
def paths_kernel(
    mask_ptr, start_ptr, first_ptr, paths_ptr, T, W, mask_b, mask_t, mask_w, WINDOW: tl.constexpr
):
    """List a row's path: the slots of the window that it sees, in order.

    mask: [B, T, W] bool, strided; start: [B] int64; first: [B, T] int64, or None for both
    Writes: paths, [B, T, 1 + W] int32: its length in the window, then offsets from `start`. Places
        that `first` hides are counted and not written; those behind the length are not written.
    """
    row = tl.program_id(0)
    b = row // T
    w = tl.arange(0, WINDOW)
    mask_ptr += b.to(tl.int64) * mask_b + (row % T) * mask_t
    seen = tl.load(mask_ptr + w * mask_w, mask=w < W, other=0).to(tl.int32)
    hidden = 0  # places of the window before those that are seen
    if first_ptr is not None:
        first = tl.load(first_ptr + row) - tl.load(start_ptr + b)
        hidden = tl.maximum(first.to(tl.int32), 0)
    paths_ptr += row * (1 + W)
    tl.store(paths_ptr, hidden + tl.sum(seen, 0))
    tl.store(paths_ptr + hidden + tl.cumsum(seen, 0), w, mask=seen > 0)


# -------------------------------------------------------------------------------- tiles and chunks


@triton.jit
def _chunk(c, end, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the places of chunk c, from one to another, none of them behind `end`."""
    HALF: tl.constexpr = SPLITS // 2
    doubled = tl.maximum(c // HALF - 1, 0)
    slots = tl.full((), CHUNK, tl.int32) << doubled
    first = (c - doubled * HALF) * slots
    return first, tl.minimum(first + slots, end)


@triton.jit
def _chunks_before(end, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of chunks that begin before a place."""
    HALF: tl.constexpr = SPLITS // 2
    most = tl.full((), CHUNK, tl.int32)
    used = 0
    while end > most * SPLITS:
        most *= 2
        used += HALF
    return used + tl.cdiv(end, most)


@triton.jit
def _chunk_of(place, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of the chunk in which a place lies."""
    return _chunks_before(place + 1, CHUNK, SPLITS) - 1


@triton.jit
def _nothing(shape: tl.constexpr):
    """Return the maximum, weight and total of rows that have seen nothing yet."""
    top = tl.full((shape[0],), float("-inf"), tl.float32)
    weight = tl.full((shape[0],), 0.0, tl.float32)
    return top, weight, tl.full(shape, 0.0, tl.float32)


@triton.jit
def _reduce(q, k, v, visible, SCALE: tl.constexpr):
    """Reduce a tile by itself. Keys that a row does not see add exact zeros.

    q: [ROWS, WIDTH]; k: [WIDTH, KEYS]; v: [KEYS, WIDTH]; visible: [ROWS or 1, KEYS] bool
    Returns: of each row the maximum of its scores, not scaled, the sum of its exponentials and the
        weighted sum of values: [ROWS], [ROWS], [ROWS, WIDTH] fp32.
    """
    scores = tl.where(visible, tl.dot(q, k, input_precision="ieee"), float("-inf"))
    top = tl.max(scores, 1)
    base = tl.where(top == float("-inf"), 0.0, top) * SCALE
    p = tl.exp2(tl.fma(scores, SCALE, -base[:, None])).to(v.dtype)
    ones = tl.full((v.shape[0], 16), 1.0, v.dtype)
    weight = tl.max(tl.dot(p, ones, input_precision="ieee"), 1)  # of 16 equal columns
    return top, weight, tl.dot(p, v, input_precision="ieee")


@triton.jit
def _merge(top, weight, total, next_top, next_weight, next_total, SCALE: tl.constexpr):
    """Add a tile or a chunk to all before it; one that a row does not see changes none of its bits.

    Maxima are scaled behind the subtraction: a scaled one could be contracted with it where it was
    computed, and not where it was read.
    """
    new = tl.maximum(top, next_top)
    base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    shrink = tl.exp2((top - base) * SCALE)
    share = tl.exp2((next_top - base) * SCALE)
    weight = tl.fma(weight, shrink, next_weight * share)
    total = tl.fma(total, shrink[:, None], next_total * share[:, None])
    return new, weight, total


@triton.jit
def _attend_chunk(
    q, k_ptr, v_ptr, column, low, first, last, SCALE: tl.constexpr, E: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the slots first .. last, a tile at a time.

    q: [ROWS, WIDTH]; k, v: pointers to slot 0 of the key head; column: [WIDTH] bool, False for
    padding; low: [ROWS] int32, the first place that each row sees, or None: 0
    Returns: maximum, weight and total, as in `_reduce`.
    """
    n = tl.arange(0, TILE)
    e = tl.arange(0, q.shape[1])
    keys_ptr = k_ptr + n[None, :] * E + e[:, None]  # [WIDTH, TILE]
    values_ptr = v_ptr + n[:, None] * E + e[None, :]  # [TILE, WIDTH]
    if low is not None:
        first = tl.maximum(first, tl.min(low, 0) // TILE * TILE)
    top, weight, total = _nothing(q.shape)
    for at in tl.range(first, last, TILE, num_stages=STAGES):
        inside = at + n < last
        k = tl.load(keys_ptr + at * E, mask=inside[None, :] & column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=inside[:, None] & column[None, :], other=0.0)
        visible = inside[None, :]
        if low is not None:
            visible &= (at + n)[None, :] >= low[:, None]
        next_top, next_weight, next_total = _reduce(q, k, v, visible, SCALE)
        top, weight, total = _merge(top, weight, total, next_top, next_weight, next_total, SCALE)
    return top, weight, total


@triton.jit
def _write(memory, part, rows, own, top, weight, total, E: tl.constexpr):
    """Write a part of the rows of which `own` is true.

    memory: parts, stats, and the rows of a part; rows: of `rows_of`
    """
    parts_ptr, stats_ptr, size = memory
    _, live, spots, cells, real = rows
    stats_ptr += 2 * part * size
    tl.store(stats_ptr + spots, top, mask=live & own)
    tl.store(stats_ptr + size + spots, weight, mask=live & own)
    tl.store(parts_ptr + part * size * E + cells, total, mask=real & own[:, None])


@triton.jit
def _read(memory, part, rows, own, E: tl.constexpr):
    """Read a part of the rows of which `own` is true, past the L1 cache; nothing of others."""
    parts_ptr, stats_ptr, size = memory
    _, live, spots, cells, real = rows
    stats_ptr += 2 * part * size
    parts_ptr += part * size * E
    own &= live
    top = tl.load(stats_ptr + spots, mask=own, other=float("-inf"), cache_modifier=".cg")
    weight = tl.load(stats_ptr + size + spots, mask=own, other=0.0, cache_modifier=".cg")
    total = tl.load(parts_ptr + cells, mask=real & own[:, None], other=0.0, cache_modifier=".cg")
    return top, weight, total


@triton.jit
def _attend_along_paths(
    q, k_ptr, v_ptr, column, paths_ptr, first_ptr, memory, rows, x, start, W, SCALE: tl.constexpr,
    E: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Attend from rows to the tiles behind the chunks, along the paths of TOKENS of their tokens.

    q: [ROWS, WIDTH]; k, v: pointers to slot 0 of the key head; column: [WIDTH] bool, False for
    padding; paths, first: pointers to token 0's; memory, rows: as in `_write`
    x: the number of the block among those of the rows; W: width of the window
    Writes: parts 0, 1 ... of the tokens' rows, as far as one of their paths reaches.
    """
    t, _, _, _, _ = rows
    e = tl.arange(0, q.shape[1])
    n = tl.arange(0, TOKENS * TILE)
    u0 = tl.min(t, 0) + x * TOKENS
    u = u0 + n // TILE  # the token that sees a column
    known = u <= tl.max(t, 0)
    own = (t >= u0) & (t < u0 + TOKENS)
    paths_ptr += u * (1 + W)
    end = start + tl.load(paths_ptr, mask=known, other=0)  # of the paths, as places
    begin = start // TILE * TILE
    first = begin
    low = first_ptr
    if first_ptr is not None:
        low = tl.load(first_ptr + u, mask=known, other=start).to(tl.int32)
        first = tl.maximum(begin, tl.min(low, 0) // TILE * TILE)
    for at in tl.range(first, tl.max(end, 0), TILE, num_stages=1):
        place = at + n % TILE
        inside = known & (place < end)
        if low is not None:
            inside &= place >= low
        ahead = tl.load(paths_ptr + 1 + place - start, mask=inside & (place >= start), other=0)
        slot = tl.where(place < start, place, start + ahead)
        k = tl.load(
            k_ptr + slot[None, :] * E + e[:, None],
            mask=inside[None, :] & column[:, None], other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_ptr + slot[:, None] * E + e[None, :],
            mask=inside[:, None] & column[None, :], other=0.0,
        )  # fmt: skip
        visible = inside[None, :] & (t[:, None] == u[None, :])
        top, weight, total = _reduce(q, k, v, visible, SCALE)
        _write(memory, (at - begin) // TILE, rows, own, top, weight, total, E)


# ------------------------------------------------------------------------------------ all of a row


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
def _merge_chunks(memory, rows, first, last, SCALE: tl.constexpr, E: tl.constexpr):
    """Merge the parts first .. last. Returns: maximum, weight and total."""
    _, live, _, _, real = rows
    top, weight, total = _nothing(real.shape)
    # not pipelined: copies of 4 bytes would go through L1. Unrolled: else a chain of waits
    for part in tl.range(first, last, num_stages=1, loop_unroll_factor=4):
        next_top, next_weight, next_total = _read(memory, part, rows, live, E)
        top, weight, total = _merge(top, weight, total, next_top, next_weight, next_total, SCALE)
    return top, weight, total


@triton.jit
def _merge_paths(
    top, weight, total, memory, rows, c, is_cut, tiles, start, end, low, SCALE: tl.constexpr,
    E: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the tiles along paths, and the chunk in which they begin, with all before it.

    top, weight, total: of the chunks before chunk c, in which the tiles begin
    is_cut: whether it has slots in front of them, and those were read; tiles: the part of chunk 0
    end, low: [ROWS] int32, behind each row's path, and the first place that it sees, or None: 0
    Returns: maximum, weight and total, as in `_reduce`.
    """
    _, live, _, _, real = rows
    c_top, c_weight, c_total = _read(memory, tiles + c, rows, live & is_cut, E)
    begin = start // TILE * TILE
    for at in tl.range(begin, tl.max(end, 0), TILE, num_stages=1):
        if _chunk_of(at, CHUNK, SPLITS) != c:
            c = _chunk_of(at, CHUNK, SPLITS)
            top, weight, total = _merge(top, weight, total, c_top, c_weight, c_total, SCALE)
            c_top, c_weight, c_total = _nothing(real.shape)
        seen = at < end
        if low is not None:
            seen &= at + TILE > low
        next_top, next_weight, next_total = _read(memory, (at - begin) // TILE, rows, seen, E)
        c_top, c_weight, c_total = _merge(
            c_top, c_weight, c_total, next_top, next_weight, next_total, SCALE
        )
    return _merge(top, weight, total, c_top, c_weight, c_total, SCALE)


@triton.jit
def _finish(y_ptr, rows, top, weight, total, sinks_ptr, SCALE: tl.constexpr, H: tl.constexpr):
    """Divide rows by their weights, of which a sink is the last part. Writes: y.

    sinks: of the heads, [H], or None
    """
    _, _, spots, cells, real = rows
    if sinks_ptr is not None:
        weight += weight_of_sinks(sinks_ptr, spots % H, top * SCALE)
    y = (total / weight[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + cells, y, mask=real)


@triton.jit
def _merge_all(
    memory, rows, paths_ptr, start, end, low, unread, used, tiles, W, SCALE: tl.constexpr,
    E: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge all parts of rows, in the order of their places.

    Returns: maximum, weight and total.
    end, unread, used: of `_work`; low, tiles: as in `_merge_paths`
    """
    if paths_ptr is None:
        top, weight, total = _merge_chunks(memory, rows, unread, used, SCALE, E)
    else:
        t, _, _, _, _ = rows
        c = _chunk_of(end, CHUNK, SPLITS)
        top, weight, total = _merge_chunks(memory, rows, tiles + unread, tiles + c, SCALE, E)
        is_cut = used > tl.maximum(c, unread)
        length = tl.load(paths_ptr + t * (1 + W))
        top, weight, total = _merge_paths(
            top, weight, total, memory, rows, c, is_cut, tiles, start, start + length, low, SCALE,
            E, TILE, CHUNK, SPLITS,
        )  # fmt: skip
    return top, weight, total


@triton.jit
def _work(
    start, t, low, paths_ptr, TILE: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Count what the blocks of some rows have to read. t: tokens; low: as in `_merge_paths`

    Returns: the place behind the last chunk; the number of chunks that no row sees, which come
    first; that of all chunks; and that of blocks with work, which read chunks, then paths.
    """
    end = start + 1  # of a token alone, itself included
    gathering = 0
    if paths_ptr is not None:
        end = start // TILE * TILE
        gathering = tl.cdiv(tl.max(t, 0) - tl.min(t, 0) + 1, TOKENS)
    used = _chunks_before(end, CHUNK, SPLITS)
    unread = 0
    if low is not None:
        unread = tl.minimum(_chunk_of(tl.min(low, 0), CHUNK, SPLITS), used)
    return end, unread, used, used - unread + gathering


@triton.jit(do_not_specialize=["T", "S", "W"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, paths_ptr, first_ptr, sinks_ptr, y_ptr, parts_ptr, stats_ptr,
    done_ptr, T, S, W, H: tl.constexpr, KV_HEADS: tl.constexpr, SCALE: tl.constexpr,
    E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows of a key head to a chunk, or along the paths of TOKENS tokens.

    q, y: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]; start: [B] int64; first: [B, T] int64, or None
    paths: [B, T, 1 + W] int32, of `paths_kernel`; None: T and W are 1, and the row sees itself
    done: [blocks of rows, B * KV_HEADS] int32, 0 before and after; sinks: [H], or None
    parts: [parts, B, T, H, E] fp32, not divided by their weights: tiles along paths, then chunks
    stats: [parts, 2, B, T, H] fp32, maximum and weight. Writes: y; used parts, stats
    """
    b = tl.program_id(1) // KV_HEADS
    start = tl.load(start_ptr + b).to(tl.int32)
    column = (tl.arange(0, WIDTH) < E) | (WIDTH == E)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = rows_of(own, tl.program_id(1) % KV_HEADS, T, column, H, KV_HEADS, E)
    t, live, _, cells, real = rows
    tiles = 0  # along paths, at most
    if paths_ptr is not None:
        paths_ptr += b.to(tl.int64) * T * (1 + W)
        tiles = tl.cdiv(W + TILE - 1, TILE)
    low = first_ptr  # the first place of its path that each row sees, or None
    if first_ptr is not None:
        first_ptr += b * T
        low = tl.load(first_ptr + t).to(tl.int32)
    end, unread, used, blocks = _work(start, t, low, paths_ptr, TILE, TOKENS, CHUNK, SPLITS)
    if tl.program_id(2) >= blocks:
        return
    before = b.to(tl.int64) * T * H  # rows of earlier sequences
    size = (tl.num_programs(1) // KV_HEADS * T * H).to(tl.int64)  # rows of a part
    memory = (parts_ptr + before * E, stats_ptr + before, size)
    base = tl.program_id(1).to(tl.int64) * S * E
    y_ptr += before * E
    q = tl.load(q_ptr + before * E + cells, mask=real, other=0.0)
    c = unread + tl.program_id(2)  # the block's chunk
    if c < used:
        first, last = _chunk(c, end, CHUNK, SPLITS)
        top, weight, total = _attend_chunk(
            q, k_ptr + base, v_ptr + base, column, low, first, last, SCALE, E, TILE, STAGES
        )
        if blocks == 1:  # so there are no paths
            _finish(y_ptr, rows, top, weight, total, sinks_ptr, SCALE, H)
        else:
            _write(memory, tiles + c, rows, live, top, weight, total, E)
    elif paths_ptr is not None:
        _attend_along_paths(
            q, k_ptr + base, v_ptr + base, column, paths_ptr, first_ptr, memory, rows, c - used,
            start, W, SCALE, E, TILE, TOKENS,
        )  # fmt: skip
    if (blocks == 1) & (c < used):
        return
    if is_last(done_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), blocks):
        top, weight, total = _merge_all(
            memory, rows, paths_ptr, start, end, low, unread, used, tiles, W, SCALE, E, TILE,
            CHUNK, SPLITS,
        )  # fmt: skip
        _finish(y_ptr, rows, top, weight, total, sinks_ptr, SCALE, H)


# ------------------------------------------------------------------------------------------- launch


@cache
def counters(index: int) -> Tensor:
    """Return zeros that all launches of a device share, one after the other: [COUNTERS] int32."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=f"cuda:{index}")


def path_table(mask: Tensor, start: Tensor | None = None, first: Tensor | None = None) -> Tensor:
    """Compute `backends.attention.path_table`."""
    B, T, W = mask.shape
    paths = torch.empty(B, T, 1 + W, dtype=torch.int32, device=mask.device)
    first = first if first is None else first.contiguous()
    window = max(SPLIT_TOKENS, triton.next_power_of_2(W))  # one kernel for all trees and chains
    paths_kernel[(B * T,)](
        mask, start, first, paths, T, W, *mask.stride(), WINDOW=window, num_warps=1
    )
    return paths


def launch_of(
    plan: AttentionPlan, E: int, scale: float = 0.0
) -> tuple[dict[str, int | float], dict[str, int | None]]:
    """Return constants of `attention_kernel`, all but the numbers of heads, and launch options."""
    tile = {"ROWS": ROWS, "TILE": plan.tile, "TOKENS": plan.tokens, "STAGES": plan.stages}
    constants = constants_of(E, scale) | tile | {"CHUNK": CHUNK, "SPLITS": SPLITS}
    options = {"num_warps": plan.warps, "maxnreg": plan.registers, "enable_fp_fusion": False}
    return constants, options


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    scale: float,
    device: Device,
    done: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `backends.attention.tree_attention`.

    Allocates its result, partial sums and a missing table of paths, and nothing else; never waits.

    window: start, mask, first and paths
    done: from `counters`; launches that share it must follow each other, as those of one stream do
    """
    B, T, H, E = q.shape
    _, kv_heads, S, _ = k.shape
    start, mask, first, paths = window
    W = mask.shape[2]
    # they are the cache's own buffers
    assert k.is_contiguous() and v.is_contiguous(), (k.stride(), v.stride())
    if T > SPLIT_TOKENS:
        return prompt_attention(q, k, v, (start, mask, first), scale, device, sinks)
    if paths is None and T * W > 1:
        paths = path_table(mask, start, first)
    plan = plan_attention(E, q.dtype)
    constants, options = launch_of(plan, E, scale)
    group = H // kv_heads
    blocks = triton.cdiv(T * group, ROWS)
    assert blocks * B * kv_heads <= len(done), (blocks, B, kv_heads)
    programs = splits_of(S)
    parts = programs
    if paths is not None:
        programs += gathering_blocks(T, group, plan.tokens)
        parts += triton.cdiv(W + plan.tile - 1, plan.tile)
    y = torch.empty(B, T, H * E, dtype=q.dtype, device=q.device)
    sums = torch.empty(parts, B, T, H, E, dtype=torch.float32, device=q.device)
    stats = torch.empty(parts, 2, B, T, H, dtype=torch.float32, device=q.device)
    first = first if first is None else first.contiguous()
    attention_kernel[blocks, B * kv_heads, programs](
        q.contiguous(), k, v, start, paths, first, sinks, y, sums, stats, done, T, S, W, H=H,
        KV_HEADS=kv_heads, **constants, **options,
    )  # fmt: skip
    return y
