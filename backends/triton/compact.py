"""CUDA kernel, in Triton: move an accepted path's slots next to the prefix, in all layers at once.

1. One launch serves every key and value buffer. The kernel reads their addresses
   (`KVCache.addresses`), the prefix length and the path from device memory: captured graphs serve
   every accepted path.
2. A block takes one head of one sequence in one buffer. It holds all slots that it moves in
   registers and writes them after a barrier, because a slot may be both a source and a target.
3. Slots are moved as 32-bit words, so one kernel serves all dtypes. A slot that stays is not read.

Trade-off: the compiler cannot see the memory behind an address, so the operator also takes the
buffers, which keeps their reads and writes in order; test_capture.py shows that compiled steps pass
the buffers themselves, never copies.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class CompactPlan(NamedTuple):
    """The tile in which a block of threads holds its slots."""

    words: int  # of 32 bits, in a slot
    width: int  # words, padded to a power of two
    steps: int  # slots, padded likewise
    warps: int


def plan_compact(steps: int, row_bytes: int) -> CompactPlan:
    """Choose the tile for a path of `steps` slots: up to 2 KiB a warp, 16 registers of a thread."""
    assert row_bytes % 4 == 0, row_bytes  # RoPE pairs the elements of a slot
    words = row_bytes // 4
    width = triton.next_power_of_2(words)
    padded = triton.next_power_of_2(steps)
    warps = min(max(padded * width * 4 // 2048, 1), 16)
    return CompactPlan(words, width, padded, warps)


@triton.jit(do_not_specialize=["S", "steps"])
def compact_kernel(
    addresses_ptr,
    start_ptr,
    path_ptr,
    S,
    steps,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Move the slots of one head of one sequence in one buffer.

    addresses: [buffers] int64, each of [B, heads, S, WORDS] words
    start: [B] int64; path: [B, steps] int64
    Writes: the slots among start .. start + steps - 1 for which the path names another one.
    """
    head = tl.program_id(0)
    b = tl.program_id(1)
    buffer = tl.program_id(2)
    t = tl.arange(0, STEPS)
    offset = tl.load(path_ptr + b * steps + t, mask=t < steps, other=0)  # [STEPS] int64
    # node 0, counted over the slots of all sequences and heads
    first = (b * tl.num_programs(0) + head).to(tl.int64) * S + tl.load(start_ptr + b)
    address = tl.load(addresses_ptr + buffer).to(tl.pointer_type(tl.int32))
    w = tl.arange(0, WIDTH)
    words_ptr = tl.multiple_of(address, 16) + first * WORDS + w[None, :]
    moves = ((t < steps) & (offset != t))[:, None] & (w < WORDS)[None, :]  # [STEPS, WIDTH]
    rows = tl.load(words_ptr + offset[:, None] * WORDS, mask=moves)
    tl.debug_barrier()  # or a warp would write what another has not read yet
    tl.store(words_ptr + t[:, None] * WORDS, rows, mask=moves)


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    """Compute `reference.compact`. Allocates nothing and never waits."""
    B, heads, S, E = buffers[0].shape
    for x in buffers:
        assert x.is_contiguous() and x.shape == buffers[0].shape and x.data_ptr() % 16 == 0
    cut = plan_compact(path.shape[1], E * buffers[0].element_size())
    compact_kernel[heads, B, len(buffers)](
        addresses,
        start.contiguous(),
        path.contiguous(),
        S,
        path.shape[1],
        WORDS=cut.words,
        WIDTH=cut.width,
        STEPS=cut.steps,
        num_warps=cut.warps,
    )
