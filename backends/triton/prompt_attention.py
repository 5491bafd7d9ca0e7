"""CUDA kernel, in Triton: attention of many tokens, of a prompt, over a long static cache.

1. A block has up to 128 rows of one key head, which are the new tokens times the query heads that
   share it, and reads all slots that they see, by the mask.
2. Slots are read 16 to 64 at a time, with the running softmax of FlashAttention (arXiv 2205.14135).
3. In a layer with a sliding window, a block reads no slot before the `first` of all its rows.

Draft trees, chains and single tokens are in attention.py, with sums in another order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.triton.launch import Device

LOG2_E = 1.4426950408889634


class PromptPlan(NamedTuple):
    """The tile of a block of threads."""

    rows: int  # tokens x query heads of a group
    keys: int  # slots at a time
    stages: int  # of the software pipeline
    warps: int


@cache
def plan_prompt(E: int, dtype: torch.dtype, device: Device) -> PromptPlan:
    """Choose the tile for heads of width E; hardly any spills.

    fp32 has no tensor cores and serves tests only.
    """
    if dtype == torch.float32:
        wide = E > 64
        warps = 8 if wide else 4  # four spill
        return PromptPlan(16, 16 if wide else 32, 1, warps)
    hopper = device.capability >= 90
    width = max(16, triton.next_power_of_2(E))
    # a higher tile reads the keys less often; on Blackwell 128 spill
    tile = 128 if device.capability == 90 else 64
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
            return PromptPlan(tile, keys, 3, warps)
    return PromptPlan(tile, keys, 2, warps)


def constants_of(E: int, scale: float = 0.0) -> dict[str, int | float]:
    """Return a kernel's constants that follow from E and from the scale of the scores.

    scale: 0: E ** -0.5. SCALE has log2(e) in it: exponentials are to the base 2
    WIDTH: E padded to a power of two
    """
    factor = LOG2_E * scale if scale else LOG2_E / E**0.5
    return {"E": E, "WIDTH": max(16, triton.next_power_of_2(E)), "SCALE": factor}


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def rows_of(own, head, T, column, H: tl.constexpr, KV_HEADS: tl.constexpr, E: tl.constexpr):
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


@triton.jit
def weight_of_sinks(sinks_ptr, heads, top):
    """Return the weights of the sinks of rows. heads: [R] int32; top: [R] fp32, scaled maxima"""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(tl.fma(tl.load(sinks_ptr + heads).to(tl.float32), LOG2_E, -top))


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
    q, k_ptr, v_ptr, column, mask_ptr, first_ptr, t, start, W, mask_t, mask_w,
    SCALE: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to all slots that each row sees, KEYS at a time.

    q: [ROWS, WIDTH]; k, v: pointers to slot 0 of the key head
    column: [WIDTH] bool, False for padding; t: [ROWS] int32, tokens
    first: of each token the first place that it sees, or None: 0
    Returns: top and weight, [ROWS] fp32, and total, [ROWS, WIDTH] fp32, as in `_add`.
    """
    n = tl.arange(0, KEYS)
    e = tl.arange(0, q.shape[1])
    keys_ptr = k_ptr + n[None, :] * E + e[:, None]  # [WIDTH, KEYS]
    values_ptr = v_ptr + n[:, None] * E + e[None, :]  # [KEYS, WIDTH]
    first = 0
    low = first_ptr  # a row's first place, or None
    if first_ptr is not None:
        low = tl.load(first_ptr + t).to(tl.int32)
        first = tl.min(low, 0) // KEYS * KEYS
    shared = tl.maximum(start // KEYS * KEYS, first)  # no mask hides the blocks below
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
    for at in tl.range(shared, start + W, KEYS, num_stages=1):
        inside = at + n < start + W
        k = tl.load(keys_ptr + at * E, mask=inside[None, :] & column[:, None], other=0.0)
        v = tl.load(values_ptr + at * E, mask=inside[:, None] & column[None, :], other=0.0)
        visible = _visible(mask_ptr, t, at + n - start, W, mask_t, mask_w)
        if low is not None:
            visible &= (at + n)[None, :] >= low[:, None]
        scores = tl.where(visible, tl.dot(q, k, input_precision="ieee"), float("-inf"))
        top, weight, total = _add(scores, v, top, weight, total, SCALE)
    return top, weight, total


@triton.jit(do_not_specialize=["T", "S", "W", "mask_b", "mask_t", "mask_w"])
def prompt_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, mask_ptr, first_ptr, sinks_ptr, y_ptr, T, S, W, mask_b, mask_t,
    mask_w, H: tl.constexpr, KV_HEADS: tl.constexpr, SCALE: tl.constexpr, E: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS rows of a key head to all slots that they see.

    q, y: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]; start: [B] int64; mask: [B, T, W] bool, strided
    first: [B, T] int64, or None; sinks: [H], or None
    Writes: y.
    """
    b = tl.program_id(1) // KV_HEADS
    start = tl.load(start_ptr + b).to(tl.int32)
    before = b.to(tl.int64) * T * H * E  # of earlier sequences
    base = tl.program_id(1).to(tl.int64) * S * E
    e = tl.arange(0, WIDTH)
    column = (e < E) | (WIDTH == E)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, _, spots, cells, real = rows_of(own, tl.program_id(1) % KV_HEADS, T, column, H, KV_HEADS, E)
    if first_ptr is not None:
        first_ptr += b * T
    q = tl.load(q_ptr + before + cells, mask=real, other=0.0)
    top, weight, total = _attend(
        q, k_ptr + base, v_ptr + base, column, mask_ptr + b.to(tl.int64) * mask_b, first_ptr, t,
        start, W, mask_t, mask_w, SCALE, E, KEYS, STAGES,
    )  # fmt: skip
    if sinks_ptr is not None:
        weight += weight_of_sinks(sinks_ptr, spots % H, top)
    y = total / weight[:, None]
    tl.store(y_ptr + before + cells, y.to(y_ptr.dtype.element_ty), mask=real)


# ------------------------------------------------------------------------------------------- launch


def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[Tensor, Tensor, Tensor | None],
    scale: float,
    device: Device,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `backends.attention.tree_attention` of many tokens. Allocates its result; never
    waits.

    window: start, mask and first
    """
    B, T, H, E = q.shape
    _, kv_heads, S, _ = k.shape
    start, mask, first = window
    plan = plan_prompt(E, q.dtype, device)
    blocks = triton.cdiv(T * H // kv_heads, plan.rows)
    y = torch.empty(B, T, H * E, dtype=q.dtype, device=q.device)
    tile = {"ROWS": plan.rows, "KEYS": plan.keys, "STAGES": plan.stages, "num_warps": plan.warps}
    heads = {"H": H, "KV_HEADS": kv_heads}
    prompt_kernel[blocks, B * kv_heads](
        q.contiguous(), k, v, start, mask, None if first is None else first.contiguous(), sinks, y,
        T, S, mask.shape[2], *mask.stride(), **constants_of(E, scale), **heads, **tile,
    )  # fmt: skip
    return y
