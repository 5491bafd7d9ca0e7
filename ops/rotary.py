"""RoPE of queries and keys, after their norms if the model has any, and the writes to the cache.

`rotary_cache` rotates queries and keys, and writes keys and values to the cache. It is one launch
on CUDA (cuda/rotary.py); elsewhere it is the norms, `rotary` (cpu/rotary.cpp on a CPU) and two
assignments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import has_triton, lib, uses_cpp
from ops.norm import rms_norm

# the norms of every query head and every key head: weights, [E] each, and epsilon
HeadNorms = tuple[Tensor, Tensor, float]

lib.define(
    "rotary_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor slots, "
    "Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor"
)


def rope_angles(freq: Tensor, positions: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines for `rotate`, times a factor.

    freq: [E/2]; positions: [B, T] int64
    Returns: two [B, T, 1, E] fp32.
    """
    if freq.dtype == torch.float32 and uses_cpp(freq, "rotary"):
        return torch.ops.gpt_eagle.angles(freq, positions, factor)
    angles = positions[..., None].float() * freq  # [B, T, E/2]
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # [B, T, 1, E]
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE by half-rotation, in fp32. x: [B, T, H, E]. Returns the same shape and dtype."""
    cos, sin = rope
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def rotary(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of T tokens; norm them before, head by head, if there are norms.

    qkv: [B, T, H + 2 Hkv, E], heads of queries, keys and values side by side
    rope: cosines and sines, [B, T, 1, E] fp32 each
    Returns: the queries, [B, T, H, E]; the keys, [B, T, Hkv, E].
    Source: Qwen3 (arXiv 2505.09388) for the norms.
    """
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
        q = rms_norm(q, q_weight, eps)
        k = rms_norm(k, k_weight, eps)
        qkv = torch.cat((q, k), dim=2)  # [B, T, H + Hkv, E]
    if uses_cpp(qkv, "rotary"):
        return torch.ops.gpt_eagle.rotary(qkv, *rope, heads, kv_heads)
    return rotary_reference(qkv, rope, heads, kv_heads)


def rotary_reference(
    qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Compute `rotary` without norms, with torch's own operators."""
    q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
    return rotate(q, rope), rotate(k, rope)


def rotary_cache(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Compute `rotary` for T tokens and write their keys and values to the cache.

    qkv: [B, T, H + 2 Hkv, E]
    k, v: [B, Hkv, S, E]; slots: [B, T] int64
    Writes: k, v at the slots.
    Returns: the queries, [B, T, H, E].
    """
    if qkv.is_cuda:
        norms = norms or (None, None, 0.0)
        return torch.ops.gpt_eagle.rotary_cache(qkv, *rope, k, v, slots, *norms)
    return rotary_cache_plainly(qkv, rope, k, v, slots, norms)


def rotary_cache_plainly(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Compute `rotary_cache` by `rotary` and two assignments."""
    kv_heads = k.shape[1]
    heads = qkv.shape[2] - 2 * kv_heads
    # [B, T, H, E] and [B, T, Hkv, E]
    queries, keys = rotary(qkv, rope, heads, kv_heads, norms)
    batch = torch.arange(len(qkv), device=qkv.device)[:, None]  # [B, 1]
    k[batch, :, slots] = keys.to(k.dtype)
    v[batch, :, slots] = qkv[:, :, -kv_heads:].to(v.dtype)
    return queries


def _rotary_cache_cuda(qkv, cos, sin, k, v, slots, *norms) -> Tensor:
    if not has_triton("rotary"):
        given = None if norms[0] is None else norms
        return rotary_cache_plainly(qkv, (cos, sin), k, v, slots, given)
    import ops.cuda.rotary

    with torch.cuda.device(qkv.device):
        return ops.cuda.rotary.rotary_cache(qkv, (cos, sin), k, v, slots, norms)


lib.impl("rotary_cache", _rotary_cache_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::rotary_cache", lib=lib)
def _(qkv, cos, sin, k, v, slots, *norms):
    B, T, heads, E = qkv.shape[-4:]
    return k.new_empty(B, T, heads - 2 * k.shape[1], E)
