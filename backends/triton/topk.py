"""CUDA kernels, in Triton: the k best and the logsumexp of long rows; a level of a draft tree.

1. A score and its index form one int64 key: the score's bits, mapped so that integers order as
   floats do, above the complement of the index. Equal scores compare by index, lowest first.
2. A block takes 2048 scores of a row: k times the maximum of its keys, which is then removed; and
   the block's maximum and sum of exponentials. Every score is read once.
3. One block per row does the same with the candidates of all its blocks, at most k from each.
4. For a level of a draft tree one block does so with all rows of a tree. It adds the children's
   log-probabilities to their paths' values, and takes the best as the next frontier.

Sums are added in a fixed order, without atomics: equal runs give equal bits. -0 equals 0, NaN is
above everything, as in torch.topk. Trade-off: the work grows with k, at most 64; for the 10 or 16
children of a node it is less than that of a sort or a radix select. Source of the two stages:
Milakov and Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # scores per block of threads
MOST = 64  # the largest k; the children of a node are fewer
# numbers in a tile of a level, at most: the best keys of all blocks of some rows take 32 registers
TILE = 2048


# ------------------------------------------------------------------------------------------ kernels

LAST = tl.constexpr(-(2**63))  # a key below every score's


@triton.jit
def _keys(scores, index):
    """Return keys that order scores, and equal ones by index: [n] fp32, [n] int32 -> [n] int64."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats grow with their magnitude
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _score(key):
    """Return the score of a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    """Return the index of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _exp_shifted(scores, top):
    """Return exp(scores - top), or exp(scores) where top is infinite and the difference NaN."""
    return tl.exp(scores - tl.where(tl.abs(top) == float("inf"), 0.0, top))


@triton.jit(do_not_specialize=["V", "k"])
def block_kernel(scores_ptr, keys_ptr, stats_ptr, V, k, sharpness, BLOCK: tl.constexpr):
    """Find the k best keys of a block of a row, best first, its maximum and sum of exponentials.

    scores: [rows, V] fp32; they are multiplied by the sharpness
    keys: [rows, blocks, k] int64; stats: [rows, blocks, 2] fp32
    Writes: keys, stats.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + row.to(tl.int64) * V + i, mask=i < V, other=0.0)
    scores = tl.where(i < V, sharpness * scores, float("-inf"))
    place = row * tl.num_programs(0) + block
    top = tl.max(scores, 0)
    tl.store(stats_ptr + 2 * place, top)
    tl.store(stats_ptr + 2 * place + 1, tl.sum(_exp_shifted(scores, top), 0))
    keys = tl.where(i < V, _keys(scores, i), LAST)
    for rank in range(k):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + place * k + rank, best)
        keys = tl.where(keys == best, LAST, keys)


@triton.jit
def _logsumexp(stats, there):
    """Return the logsumexp of rows, [ROWS].

    stats: [ROWS, BLOCKS] pointers, one per block; there: [ROWS, BLOCKS] bool, False for padding
    """
    tops = tl.load(stats, mask=there, other=float("-inf"))
    sums = tl.load(stats + 1, mask=there, other=0.0)
    top = tl.max(tops, 1)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return shift + tl.log(tl.sum(sums * _exp_shifted(tops, top[:, None]), 1))


@triton.jit(do_not_specialize=["blocks", "k"])
def row_kernel(
    keys_ptr,
    stats_ptr,
    values_ptr,
    index_ptr,
    total_ptr,
    blocks,
    k,
    BLOCKS: tl.constexpr,
):
    """Find the k best of a row's candidates, and its logsumexp.

    keys: [rows, blocks, k] int64; stats: [rows, blocks, 2] fp32
    values: [rows, k] fp32; index: [rows, k] int64; total: [rows] fp32
    Writes: values, index, total.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    i = tl.arange(0, BLOCKS)[None]
    place = row[:, None] * blocks + i
    there = i < blocks
    tl.store(total_ptr + row, _logsumexp(stats_ptr + 2 * place, there))
    next = tl.zeros([1, BLOCKS], tl.int32)  # of each block
    for rank in range(k):
        keys = tl.load(keys_ptr + place * k + next, mask=there & (next < k), other=LAST)
        best = tl.max(keys, 1)
        next += keys == best[:, None]
        tl.store(values_ptr + row * k + rank, _score(best))
        tl.store(index_ptr + row * k + rank, _index(best))


@triton.jit
def _first(keys_ptr, size, count, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Return the indices of the `count` best of `size` keys: [COUNT] int64, 0 past them."""
    i = tl.arange(0, SIZE)
    f = tl.arange(0, COUNT)
    keys = tl.load(keys_ptr + i, mask=i < size, other=LAST)
    order = tl.zeros([COUNT], tl.int64)
    for rank in range(count):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, LAST, keys)
        order = tl.where(f == rank, _index(best), order)
    return order


@triton.jit(do_not_specialize=["R", "blocks", "k", "count", "slot", "W"])
def level_kernel(
    keys_ptr, stats_ptr, ids_ptr, above_ptr, seen_ptr, places_ptr, tokens_ptr, values_ptr,
    ranked_ptr, order_ptr, best_ptr, sees_ptr, R, blocks, k, count, slot, W,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHILDREN: tl.constexpr, FRONT: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Find the k best children of R nodes, the values of their paths, and the next frontier.

    keys: [B, R, blocks, k] int64; stats: [B, R, blocks, 2] fp32, from `block_kernel`
    ids: [V], places: [count] int64 or None; above: [B, R] fp32, node values; seen: [B, R, W] bool
    FRONT: count padded to a power of two, or 0. Writes: tokens, values, ranked: [B, R k];
    order, best, sees: [B, count] int64, fp32, and [B, count, W] bool, of the next frontier
    """
    tree = tl.program_id(0)
    begin = tree * R * k
    i = tl.arange(0, BLOCKS)[None]
    for first in range(0, R, ROWS):
        r = first + tl.arange(0, ROWS)
        here = r < R
        row = tree * R + r
        block = row[:, None] * blocks + i
        there = here[:, None] & (i < blocks)
        total = _logsumexp(stats_ptr + 2 * block, there)
        above = tl.load(above_ptr + row, mask=here, other=0.0)
        next = tl.zeros([ROWS, BLOCKS], tl.int32)  # of each block
        for rank in range(k):
            keys = tl.load(keys_ptr + block * k + next, mask=there & (next < k), other=LAST)
            best = tl.max(keys, 1)  # [ROWS]
            next += keys == best[:, None]
            # no value may exceed its parent's, not even by the rounding of the logarithm
            score = tl.minimum(_score(best) - total, 0.0, propagate_nan=tl.PropagateNan.ALL)
            value = above + score
            token = _index(best)
            if ids_ptr is not None:
                token = tl.load(ids_ptr + token, mask=here, other=0)
            place = r * k + rank
            tl.store(tokens_ptr + begin + place, token, mask=here)
            tl.store(values_ptr + begin + place, value, mask=here)
            if FRONT > 0:
                tl.store(ranked_ptr + begin + place, _keys(value, place), mask=here)
    if FRONT > 0:
        tl.debug_barrier()  # other threads have stored the values that are read now
        f = tl.arange(0, FRONT)
        if places_ptr is None:
            order = _first(ranked_ptr + begin, R * k, count, CHILDREN, FRONT)
        else:
            order = tl.load(places_ptr + f, mask=f < count, other=0)
        to = tree * count + f
        path_value = tl.load(values_ptr + begin + order, mask=f < count)
        tl.store(order_ptr + to, order, mask=f < count)
        tl.store(best_ptr + to, path_value, mask=f < count)
        seen = seen_ptr + (tree * R + order // k) * W
        for first in range(0, W, SLOTS):
            w = first + tl.arange(0, SLOTS)
            there = (f < count)[:, None] & (w < W)
            sees = tl.load(seen[:, None] + w, mask=there, other=0).to(tl.int1)
            sees = sees | (w == slot + f[:, None])  # its ancestors and itself
            tl.store(sees_ptr + to[:, None] * W + w, sees, mask=there)


# ------------------------------------------------------------------------------------------- launch


def _block_keys(scores: Tensor, k: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """Find the best keys of every block of rows of scores, and the blocks' statistics."""
    V = scores.shape[-1]
    rows = scores.numel() // V
    blocks = triton.cdiv(V, BLOCK)
    keys = torch.empty(rows, blocks, k, dtype=torch.int64, device=scores.device)
    stats = torch.empty(rows, blocks, 2, dtype=torch.float32, device=scores.device)
    block_kernel[blocks, rows](
        scores.contiguous(),
        keys,
        stats,
        V,
        k,
        sharpness,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return keys, stats


def topk_logsumexp(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.topk` for k up to MOST.

    Allocates results and candidates, and nothing else; never waits.
    """
    shape = scores.shape[:-1]
    device = scores.device
    values = torch.empty(*shape, k, dtype=torch.float32, device=device)
    index = torch.empty(*shape, k, dtype=torch.int64, device=device)
    total = torch.empty(*shape, 1, dtype=torch.float32, device=device)
    keys, stats = _block_keys(scores, k, 1.0)
    blocks = keys.shape[1]
    width = triton.next_power_of_2(blocks)
    row_kernel[(len(keys),)](
        keys, stats, values, index, total, blocks, k, BLOCKS=width, num_warps=1
    )
    return values, index, total


def tiles_of_level(R: int, blocks: int, k: int, count: int, W: int) -> dict[str, int]:
    """Return the sizes of tiles of `level_kernel`, powers of two."""
    padded = triton.next_power_of_2
    width = padded(blocks)
    front = padded(count) if count else 0
    return {
        "ROWS": min(padded(R), max(1, TILE // width)),
        "BLOCKS": width,
        "CHILDREN": padded(R * k),
        "FRONT": front,
        "SLOTS": min(padded(max(W, 1)), TILE // max(front, 1)),
    }


def grow_level(scores: Any, values: Tensor, seen: Tensor, level: Any) -> tuple[Tensor, ...]:
    """Compute `backends.tree.expand` for k up to MOST from the scores of all children.

    scores: `backends.tree.Scores` without noise, of R nodes; level: `backends.tree.Level`; values,
        seen: of the nodes
    Allocates results and candidates, and nothing else; never waits.
    """
    B, R, _ = scores.logits.shape
    k = level.k
    count = level.count
    W = seen.shape[2]
    device = scores.logits.device
    tokens = torch.empty(B, R * k, dtype=torch.int64, device=device)
    ranked = torch.empty(B, R * k, dtype=torch.int64, device=device)
    totals = torch.empty(B, R * k, dtype=torch.float32, device=device)
    order = torch.empty(B, count, dtype=torch.int64, device=device)
    best = torch.empty(B, count, dtype=torch.float32, device=device)
    sees = torch.empty(B, count, W, dtype=torch.bool, device=device)
    keys, stats = _block_keys(scores.logits, k, scores.sharpness)
    blocks = keys.shape[1]
    level_kernel[(B,)](
        keys,
        stats,
        scores.ids,
        values.contiguous(),
        seen.contiguous(),
        level.fixed_children,
        tokens,
        totals,
        ranked,
        order,
        best,
        sees,
        R,
        blocks,
        k,
        count,
        level.first_slot,
        W,
        **tiles_of_level(R, blocks, k, count, W),
        num_warps=4,
    )
    return tokens, totals, order, best, sees
