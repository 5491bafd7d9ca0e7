"""CUDA kernel, in Triton: norm and rotate queries and keys, and write keys and values to the cache.

One block of threads per token and eight heads of queries, keys or values. A norm is over one head,
so blocks do not depend on each other. Results are rounded where `rms_norm` rounds them.
epilogues.py does the same behind a product; this kernel serves products that are not ours, and
biases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.triton.qmatmul import pairwise_sum

HEADS = 8  # of a block


@triton.jit
def weigh(normed, q_norm_ptr, k_norm_ptr, e, inside, is_query):
    """Multiply half of each head, [R, HALF] fp32, by the norm's weights at e [HALF].

    The result is rounded before and after.
    """
    dtype = q_norm_ptr.dtype.element_ty
    of_query = tl.load(q_norm_ptr + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_norm_ptr + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = normed.to(dtype).to(tl.float32) * tl.where(is_query, of_query, of_key)
    return y.to(dtype).to(tl.float32)


@triton.jit
def rotate_heads(
    left, right, row, head, live, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr,
    k_norm_ptr, eps, T, S, H: tl.constexpr, KV_HEADS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store R heads. The rest is as for `rotary_cache_kernel`.

    left, right: [R, HALF] fp32, the halves of the heads; row, head: [R] int32, token and head
    live: [R] bool, the heads that exist
    Writes: q; k and v at the slots.
    """
    dtype = q_ptr.dtype.element_ty
    left = left.to(dtype).to(tl.float32)
    right = right.to(dtype).to(tl.float32)
    e = tl.arange(0, left.shape[1])
    inside = e < E // 2
    turned = (head < H + KV_HEADS)[:, None]
    if q_norm_ptr is not None:
        squares = pairwise_sum(tl.fma(left, left, right * right))
        scale = tl.rsqrt(squares / E + eps)[:, None]
        is_query = (head < H)[:, None]
        first = weigh(left * scale, q_norm_ptr, k_norm_ptr, e, inside, is_query)
        second = weigh(right * scale, q_norm_ptr, k_norm_ptr, e + E // 2, inside, is_query)
        left = tl.where(turned, first, left)
        right = tl.where(turned, second, right)
    row = row.to(tl.int64)
    angle = row[:, None] * E + e[None, :]
    read = live[:, None] & inside[None, :]
    cos = tl.load(cos_ptr + angle, mask=read, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=read, other=0.0)
    # a compiler could contract these in two ways
    first = tl.where(turned, tl.fma(left, cos, -(right * sin)), left).to(dtype)
    second = tl.where(turned, tl.fma(right, cos, left * sin), right).to(dtype)
    is_q = (head < H)[:, None] & read
    to = q_ptr + (row * H + head)[:, None] * E + e[None, :]
    tl.store(to, first, mask=is_q)
    tl.store(to + E // 2, second, mask=is_q)
    slot = row // T * KV_HEADS * S + tl.load(slots_ptr + row, mask=live, other=0)
    key = tl.minimum(tl.maximum(head - H, 0), KV_HEADS - 1).to(tl.int64)
    is_k = ((head >= H) & (head < H + KV_HEADS))[:, None] & read
    to = k_ptr + (slot + key * S)[:, None] * E + e[None, :]
    tl.store(to, first, mask=is_k)
    tl.store(to + E // 2, second, mask=is_k)
    value = tl.minimum(tl.maximum(head - H - KV_HEADS, 0), KV_HEADS - 1).to(tl.int64)
    is_v = (head >= H + KV_HEADS)[:, None] & read
    to = v_ptr + (slot + value * S)[:, None] * E + e[None, :]
    tl.store(to, first, mask=is_v)
    tl.store(to + E // 2, second, mask=is_v)


@triton.jit(do_not_specialize=["T", "S"])
def rotary_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, eps, T, S,
    H: tl.constexpr, KV_HEADS: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store HEADS heads of a token. HALF: E / 2 padded to a power of two.

    qkv: [B, T, H + 2 KV_HEADS, E]; cos, sin: [B, T, E] fp32; slots: [B, T] int64
    q: [B, T, H, E]; k, v: [B, KV_HEADS, S, E]
    q_norm, k_norm: [E] in q's dtype; None: no norms
    Writes: q; k and v at the slots.
    """
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = tl.program_id(0) + tl.zeros([HEADS], tl.int32)
    e = tl.arange(0, HALF)
    live = head < H + 2 * KV_HEADS
    read = live[:, None] & (e < E // 2)[None, :]
    at = (row.to(tl.int64) * (H + 2 * KV_HEADS) + head)[:, None] * E + e[None, :]
    left = tl.load(qkv_ptr + at, mask=read, other=0.0).to(tl.float32)
    right = tl.load(qkv_ptr + at + E // 2, mask=read, other=0.0).to(tl.float32)
    rotate_heads(
        left, right, row, head, live, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr,
        k_norm_ptr, eps, T, S, H, KV_HEADS, E,
    )  # fmt: skip


def constants_of(heads: int, kv_heads: int, E: int) -> dict[str, int]:
    """Return the constants that follow from the model. heads: of queries."""
    return {
        "H": heads,
        "KV_HEADS": kv_heads,
        "E": E,
        "HALF": triton.next_power_of_2(E // 2),
    }


def rotary_cache(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: tuple,
) -> Tensor:
    """Compute `rotary_cache` of reference.py.

    It allocates its result, and nothing else, and never waits.

    norms: two weights and epsilon, or (None, None, 0.0)
    """
    B, T, heads, E = qkv.shape
    _, kv_heads, S, _ = k.shape
    # they are the cache's own buffers
    assert k.is_contiguous() and v.is_contiguous(), (k.stride(), v.stride())
    for weight in norms[:2]:
        if weight is not None:
            assert weight.dtype == k.dtype and weight.is_contiguous(), (k.dtype, norms)
    q = torch.empty(B, T, heads - 2 * kv_heads, E, dtype=k.dtype, device=qkv.device)
    cos, sin = rope
    rotary_cache_kernel[B * T, triton.cdiv(heads, HEADS)](
        qkv.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        slots.contiguous(),
        q,
        k,
        v,
        *norms,
        T,
        S,
        **constants_of(heads - 2 * kv_heads, kv_heads, E),
        HEADS=HEADS,
        num_warps=4,
    )
    return q
