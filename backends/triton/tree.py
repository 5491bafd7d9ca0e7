"""CUDA kernels, in Triton: choose the nodes of a draft tree among candidates, and link them.

1. `best_nodes` does not sort. It finds the key of the worst chosen candidate bit by bit, by
   counting the keys that are at least as good, then writes the places of those. Keys are those of
   topk.py, of which no two are equal.
2. `link_nodes` keeps a node's ancestors as the bits of an int64, so a tree has at most 64 nodes.
   Every round doubles their reach.

One block of threads handles a tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.triton.topk import LAST, _keys

MOST = 4096  # candidates that a block keeps in registers, 32 per thread


@triton.jit(do_not_specialize=["P", "count"])
def best_nodes_kernel(values_ptr, chosen_ptr, P, count, POOL: tl.constexpr):
    """Find the places of the `count` best of a row, ascending.

    values: [B, P] fp32
    Writes: chosen, [B, count] int64.
    """
    tree = tl.program_id(0)
    p = tl.arange(0, POOL)
    values = tl.load(values_ptr + tree * P + p, mask=p < P, other=0.0)
    keys = tl.where(p < P, _keys(values, p), LAST)
    least = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= count, tl.full([], 0, tl.int64), LAST)
    for bit in range(63):
        trial = least + (tl.full([], 1, tl.int64) << (62 - bit))
        least = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= count, trial, least)
    taken = keys >= least
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + tree * count + place, p.to(tl.int64), mask=taken)


@triton.jit(do_not_specialize=["P", "N"])
def link_nodes_kernel(
    chosen_ptr,
    above_ptr,
    number_ptr,
    parents_ptr,
    depths_ptr,
    mask_ptr,
    P,
    N,
    POOL: tl.constexpr,
    NODES: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Number the chosen candidates; find their parents, depths and ancestors.

    chosen: [B, N-1] int64; above: [B, P] int64, the candidates' parents or -1
    Writes: number, [B, P+1], parents and depths, [B, N], all int64; mask, [B, N, N] bool.
    """
    tree = tl.program_id(0)
    number_ptr += tree * (P + 1)
    for first in range(0, P + 1, POOL):
        p = first + tl.arange(0, POOL)
        tl.store(number_ptr + p, tl.zeros([POOL], tl.int64), mask=p <= P)
    tl.debug_barrier()  # all are 0 before some are numbered
    n = tl.arange(0, NODES)
    drafted = (n > 0) & (n < N)
    candidate = tl.load(chosen_ptr + tree * (N - 1) + n - 1, mask=drafted, other=0)
    tl.store(number_ptr + candidate + 1, n.to(tl.int64), mask=drafted)
    tl.debug_barrier()  # other threads have numbered the parents
    above = tl.load(above_ptr + tree * P + candidate, mask=drafted, other=-1)
    parent = tl.load(number_ptr + above + 1, mask=drafted, other=0)
    one = tl.full([NODES], 1, tl.int64)
    line = (one << n.to(tl.int64)) | (one << parent)
    ancestor = parent.to(tl.int32)  # itself and its parent
    for _ in tl.static_range(ROUNDS):
        line |= tl.gather(line, ancestor, 0)
        ancestor = tl.gather(ancestor, ancestor, 0)
    other = tl.arange(0, NODES)
    sees = (line[:, None] >> other[None].to(tl.int64)) & 1
    to = tree * N + n
    tl.store(parents_ptr + to, parent, mask=n < N)
    tl.store(depths_ptr + to, tl.sum(sees, 1) - 1, mask=n < N)
    tl.store(mask_ptr + to[:, None] * N + other, sees != 0, mask=(n < N)[:, None] & (other < N))


def best_nodes(values: Tensor, count: int) -> Tensor:
    """Compute `backends.tree.best_nodes` of up to MOST candidates. Never waits."""
    B, P = values.shape
    chosen = torch.empty(B, count, dtype=torch.int64, device=values.device)
    best_nodes_kernel[(B,)](
        values.contiguous(), chosen, P, count, POOL=triton.next_power_of_2(P), num_warps=4
    )
    return chosen


def link_nodes(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    """Compute `backends.tree.link_nodes`. Never waits."""
    B, P = parents.shape
    N = chosen.shape[1] + 1
    assert N <= 64, N
    device = chosen.device
    number = torch.empty(B, P + 1, dtype=torch.int64, device=device)
    above = torch.empty(B, N, dtype=torch.int64, device=device)
    depths = torch.empty(B, N, dtype=torch.int64, device=device)
    mask = torch.empty(B, N, N, dtype=torch.bool, device=device)
    link_nodes_kernel[(B,)](
        chosen.contiguous(),
        parents.contiguous(),
        number,
        above,
        depths,
        mask,
        P,
        N,
        **tiles_of_tree(P, N, depth),
        num_warps=8,
    )
    return number, above, depths, mask


def tiles_of_tree(P: int, N: int, depth: int) -> dict[str, int]:
    """Return the tiles of `link_nodes_kernel`, powers of two, and the rounds to the root."""
    pool = min(triton.next_power_of_2(P + 1), MOST)
    return {
        "POOL": pool,
        "NODES": triton.next_power_of_2(N),
        "ROUNDS": max(depth - 1, 0).bit_length(),
    }
