"""CUDA kernels, in Triton: the k best of a long row, and its logsumexp, without sorting the row.

1. A score and its index become one int64: the score's bits, mapped so that integers order as floats do, above the
   complement of the index. So equal scores compare by index, lowest first, and no two keys are equal.
2. A block of threads takes 2048 scores of a row: k times the maximum of its keys, which is then removed; and the
   block's maximum and sum of exponentials. Everything is read once.
3. One block per row does the same with the candidates of all its blocks, at most k from each.

Sums are added in a fixed order: no atomics, equal runs give equal bits. -0 equals 0, NaN is above everything, as in
torch.topk. Trade-off: the work grows with k, which is at most 64: for the 10 or 16 children of a node it is less than
that of a sort or a radix select. Source of the two stages: Milakov and Gimelshein (arXiv 1805.02867). Not run on a GPU
yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # scores per block of threads
MOST = 64  # the largest k; the children of a node are fewer


class TopkPlan(NamedTuple):
    """How the candidates of a row are taken."""

    blocks: int  # of the row
    width: int  # blocks, padded to a power of two
    candidates: int  # at most k per block, padded to a power of two
    warps: int


def plan_topk(V: int, k: int) -> TopkPlan:
    """Choose for rows of V scores."""
    blocks = triton.cdiv(V, BLOCK)
    candidates = triton.next_power_of_2(blocks * k)
    return TopkPlan(blocks, triton.next_power_of_2(blocks), candidates, 4 if candidates <= 4096 else 8)


# --------------------------------------------------------------------------------------------- kernels

LAST = tl.constexpr(-(2**63))  # a key below every score's


@triton.jit
def _keys(scores, index):
    """Order scores, and equal ones by index: [n] fp32, [n] int32 -> [n] int64."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats grow with their magnitude
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _exp_shifted(scores, top):
    """exp(scores - top), or exp(scores) where the maximum is infinite and the difference would be no number."""
    return tl.exp(scores - tl.where(tl.abs(top) == float("inf"), 0.0, top))


@triton.jit(do_not_specialize=["V", "k"])
def block_kernel(scores_ptr, keys_ptr, stats_ptr, V, k, BLOCK: tl.constexpr):
    """The k best keys of a block of a row, best first, and its maximum and sum of exponentials.

    scores: [rows, V] fp32; keys: [rows, blocks, k] int64; stats: [rows, blocks, 2] fp32. Writes: keys, stats.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
    place = row * tl.num_programs(0) + block
    top = tl.max(scores, 0)
    tl.store(stats_ptr + 2 * place, top)
    tl.store(stats_ptr + 2 * place + 1, tl.sum(_exp_shifted(scores, top), 0))
    keys = tl.where(i < V, _keys(scores, i), LAST)
    for rank in range(k):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + place * k + rank, best)
        keys = tl.where(keys == best, LAST, keys)


@triton.jit(do_not_specialize=["blocks", "k"])
def row_kernel(
    keys_ptr, stats_ptr, values_ptr, index_ptr, total_ptr, blocks, k, CANDIDATES: tl.constexpr, BLOCKS: tl.constexpr
):
    """The k best of a row's candidates, and the logarithm of its sum.

    keys: [rows, blocks, k] int64; stats: [rows, blocks, 2] fp32
    values: [rows, k] fp32; index: [rows, k] int64; total: [rows] fp32. Writes: values, index, total.
    """
    row = tl.program_id(0)
    i = tl.arange(0, BLOCKS)
    stats = stats_ptr + 2 * (row * blocks + i)
    tops = tl.load(stats, mask=i < blocks, other=float("-inf"))
    sums = tl.load(stats + 1, mask=i < blocks, other=0.0)
    top = tl.max(tops, 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(total_ptr + row, shift + tl.log(tl.sum(sums * _exp_shifted(tops, top), 0)))
    c = tl.arange(0, CANDIDATES)
    keys = tl.load(keys_ptr + row * blocks * k + c, mask=c < blocks * k, other=LAST)
    for rank in range(k):
        best = tl.max(keys, 0)
        ordered = (best >> 32).to(tl.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        tl.store(values_ptr + row * k + rank, bits.to(tl.float32, bitcast=True))
        tl.store(index_ptr + row * k + rank, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        keys = tl.where(keys == best, LAST, keys)


# ---------------------------------------------------------------------------------------------- launch


def topk_logsumexp(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.rows.topk_logsumexp` for k up to MOST. Allocates results and candidates, and nothing else; never waits."""
    V = scores.shape[-1]
    rows, cut = scores.numel() // V, plan_topk(V, k)
    options = {"device": scores.device}
    keys = torch.empty(rows, cut.blocks, k, dtype=torch.int64, **options)
    stats = torch.empty(rows, cut.blocks, 2, dtype=torch.float32, **options)
    values = torch.empty(*scores.shape[:-1], k, dtype=torch.float32, **options)
    index = torch.empty(*scores.shape[:-1], k, dtype=torch.int64, **options)
    total = torch.empty(*scores.shape[:-1], 1, dtype=torch.float32, **options)
    block_kernel[cut.blocks, rows](scores.contiguous(), keys, stats, V, k, BLOCK=BLOCK, num_warps=4)
    row_kernel[(rows,)](
        keys, stats, values, index, total, cut.blocks, k,
        CANDIDATES=cut.candidates, BLOCKS=cut.width, num_warps=cut.warps,
    )  # fmt: skip
    return values, index, total
