"""The rotary embedding of queries and keys, which are normed before where the model does that, and the cache's rows.

`rotary_cache` turns queries and keys; keys and values go into the cache: one launch on CUDA (cuda/rotary.py);
elsewhere `rotary` (cpu/rotary.cpp on a CPU, behind the norms) and two assignments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import has_triton, lib, triton_products, uses_cpp
from ops.norm import rms_norm

HeadNorms = tuple[
    Tensor, Tensor, float
]  # the norms of each query and of each key: weights, [E] each, and epsilon

lib.define(
    "rotary_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor slots, "
    "Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor"
)


def rope_angles(freq: Tensor, positions: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate`, times a factor. positions: [B, T] int64. Returns two [B, T, 1, E] fp32."""
    if freq.dtype == torch.float32 and uses_cpp(freq):
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
    """Rotate the queries and keys of T rows, which are normed before, head by head, if there are norms.

    qkv: [B, T, H + 2 Hkv, E], heads of queries, keys and values side by side
    rope: cosines and sines, [B, T, 1, E] fp32 each
    Returns: the queries, [B, T, H, E]; the keys, [B, T, Hkv, E]. Source of the norms: Qwen3 (arXiv 2505.09388).
    """
    if norms is not None:
        of_q, of_k, eps = norms
        q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
        qkv = torch.cat(
            (rms_norm(q, of_q, eps), rms_norm(k, of_k, eps)), dim=2
        )  # [B, T, H + Hkv, E]
    if uses_cpp(qkv):
        return torch.ops.gpt_eagle.rotary(qkv, *rope, heads, kv_heads)
    return rotary_reference(qkv, rope, heads, kv_heads)


def rotary_reference(
    qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations, without norms."""
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
    """`rotary` of T rows, whose keys and values go into the cache.

    k, v: [B, Hkv, S, E]; slots: [B, T] int64
    Writes: k, v at the slots. Returns: the queries, [B, T, H, E].
    """
    if qkv.is_cuda:
        return torch.ops.gpt_eagle.rotary_cache(
            qkv, *rope, k, v, slots, *(norms or (None, None, 0.0))
        )
    return rotary_cache_plainly(qkv, rope, k, v, slots, norms)


def rotary_cache_plainly(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """The same by `rotary`."""
    kv_heads = k.shape[1]
    queries, keys = rotary(
        qkv, rope, qkv.shape[2] - 2 * kv_heads, kv_heads, norms
    )  # [B, T, H, E], [B, T, Hkv, E]
    rows = torch.arange(len(qkv), device=qkv.device)[:, None]  # [B, 1]
    k[rows, :, slots] = keys
    v[rows, :, slots] = qkv[:, :, -kv_heads:]
    return queries


def _rotary_cache_cuda(qkv, cos, sin, k, v, slots, *norms) -> Tensor:
    if not has_triton():
        return rotary_cache_plainly(
            qkv, (cos, sin), k, v, slots, None if norms[0] is None else norms
        )
    import ops.cuda.rotary

    with torch.cuda.device(qkv.device):
        device = triton_products().device_of(qkv.device.index)
        return ops.cuda.rotary.rotary_cache(qkv, (cos, sin), k, v, slots, norms, device)


lib.impl("rotary_cache", _rotary_cache_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::rotary_cache", lib=lib)
def _(qkv, cos, sin, k, v, slots, *norms):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * k.shape[1], qkv.shape[3])
