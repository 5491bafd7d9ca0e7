"""CUDA kernel, in Triton: the rows of an accepted path move next to the prefix, in all layers at once.

1. One launch serves every key and value buffer. The kernel reads their addresses (`KVCache.addresses`), the prefix's
   length and the path from device memory: captured graphs serve whatever is accepted.
2. A block of threads takes one head of one row of the batch in one buffer. It holds all rows that it moves in
   registers and writes them behind a barrier: rows may move to where others come from.
3. Rows are moved as 32-bit words: one kernel for all dtypes. A row that stays is not touched.

Trade-off: the compiler cannot see what lies behind an address, so the operator names the buffers as well, which keeps
their reads and writes in order; test_capture.py shows that compiled steps pass the buffers themselves, never copies.
Not run on a GPU yet.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class CompactPlan(NamedTuple):
    """How a block of threads holds its rows."""

    words: int  # of 32 bits, in a row
    width: int  # words, padded to a power of two
    steps: int  # rows, padded likewise
    warps: int


def plan_compact(steps: int, row_bytes: int) -> CompactPlan:
    """Choose for a path of `steps` slots: up to 2 KiB a warp, 16 registers of a thread."""
    assert row_bytes % 4 == 0, row_bytes  # RoPE pairs the elements of a row
    width, padded = triton.next_power_of_2(row_bytes // 4), triton.next_power_of_2(steps)
    return CompactPlan(row_bytes // 4, width, padded, min(max(padded * width * 4 // 2048, 1), 16))


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
    """The rows of one head, of one row of the batch, in one buffer.

    addresses: [buffers] int64, each of [B, heads, S, WORDS] words; start: [B] int64; path: [B, steps] int64
    Writes: slots start .. start + steps - 1, where the path names another.
    """
    head, b, buffer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tl.arange(0, STEPS)
    offset = tl.load(path_ptr + b * steps + t, mask=t < steps, other=0)  # [STEPS] int64
    first = (b * tl.num_programs(0) + head).to(tl.int64) * S + tl.load(
        start_ptr + b
    )  # slot of node 0, of all slots
    address = tl.load(addresses_ptr + buffer).to(tl.pointer_type(tl.int32))
    w = tl.arange(0, WIDTH)
    words_ptr = tl.multiple_of(address, 16) + first * WORDS + w[None, :]
    moves = ((t < steps) & (offset != t))[:, None] & (w < WORDS)[None, :]  # [STEPS, WIDTH]
    rows = tl.load(words_ptr + offset[:, None] * WORDS, mask=moves)
    tl.debug_barrier()  # or a warp would write what another has not read yet
    tl.store(words_ptr + t[:, None] * WORDS, rows, mask=moves)


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    """`ops.compact.compact`. Allocates nothing and never waits."""
    B, heads, S, E = buffers[0].shape
    assert all(
        x.is_contiguous() and x.shape == buffers[0].shape and x.data_ptr() % 16 == 0
        for x in buffers
    )
    cut = plan_compact(path.shape[1], E * buffers[0].element_size())
    compact_kernel[heads, B, len(buffers)](
        addresses, start.contiguous(), path.contiguous(), S, path.shape[1],
        WORDS=cut.words, WIDTH=cut.width, STEPS=cut.steps, num_warps=cut.warps,
    )  # fmt: skip
