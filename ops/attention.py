"""Attention over a static cache: the rotary embedding, attention of new rows, and moving rows within the cache.

`tree_attention`: T new rows over the cache, of which only the used part is read. The used length changes every cycle;
it stays data and never becomes a shape of the compiled graph. On a CPU the operator reads the length, which is free
there: cpu/attention.cpp, whose result for a row does not depend on the tree around it; PyTorch's SDPA serves other
dtypes and machines without a compiler. On CUDA, where reading it would stop the host, kernels read it from device
memory (cuda/attention.py); without Triton the whole capacity is masked.

`rotary_cache`: queries and keys are normed, where the model does that, and turned; keys and values go into the cache:
one launch on CUDA (cuda/rotary.py); elsewhere `rotary` (cpu/rows.cpp on a CPU, behind the norms) and two assignments.

`compact`: moves rows in all buffers of a cache: one launch on CUDA (cuda/compact.py), cpu/rows.cpp on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_cpu_operators, has_triton, lib, triton_products, uses_cpp
from ops.rows import rms_norm

HeadNorms = tuple[Tensor, Tensor, float]  # the norms of each query and of each key: weights, [E] each, and epsilon

lib.define("tree_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask) -> Tensor")
lib.define(
    "rotary_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor slots, "
    "Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor"
)
lib.define("compact(Tensor(a!)[] buffers, Tensor addresses, Tensor start, Tensor path) -> ()")

# --------------------------------------------------------------------------------------------- rotary


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
    qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of T rows, which are normed before, head by head, if there are norms.

    qkv: [B, T, H + 2 Hkv, E], heads of queries, keys and values side by side
    rope: cosines and sines, [B, T, 1, E] fp32 each
    Returns: the queries, [B, T, H, E]; the keys, [B, T, Hkv, E]. Source of the norms: Qwen3 (arXiv 2505.09388).
    """
    if norms is not None:
        of_q, of_k, eps = norms
        q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
        qkv = torch.cat((rms_norm(q, of_q, eps), rms_norm(k, of_k, eps)), dim=2)  # [B, T, H + Hkv, E]
    if uses_cpp(qkv):
        return torch.ops.gpt_eagle.rotary(qkv, *rope, heads, kv_heads)
    return rotary_reference(qkv, rope, heads, kv_heads)


def rotary_reference(qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations, without norms."""
    q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
    return rotate(q, rope), rotate(k, rope)


def rotary_cache(
    qkv: Tensor, rope: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots: Tensor, norms: HeadNorms | None = None
) -> Tensor:
    """`rotary` of T rows, whose keys and values go into the cache.

    k, v: [B, Hkv, S, E]; slots: [B, T] int64
    Writes: k, v at the slots. Returns: the queries, [B, T, H, E].
    """
    if qkv.is_cuda:
        return torch.ops.gpt_eagle.rotary_cache(qkv, *rope, k, v, slots, *(norms or (None, None, 0.0)))
    return rotary_cache_plainly(qkv, rope, k, v, slots, norms)


def rotary_cache_plainly(
    qkv: Tensor, rope: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots: Tensor, norms: HeadNorms | None = None
) -> Tensor:
    """The same by `rotary`."""
    kv_heads = k.shape[1]
    queries, keys = rotary(qkv, rope, qkv.shape[2] - 2 * kv_heads, kv_heads, norms)  # [B, T, H, E], [B, T, Hkv, E]
    rows = torch.arange(len(qkv), device=qkv.device)[:, None]  # [B, 1]
    k[rows, :, slots] = keys
    v[rows, :, slots] = qkv[:, :, -kv_heads:]
    return queries


def _rotary_cache_cuda(qkv, cos, sin, k, v, slots, *norms) -> Tensor:
    if not has_triton():
        return rotary_cache_plainly(qkv, (cos, sin), k, v, slots, None if norms[0] is None else norms)
    import ops.cuda.rotary

    with torch.cuda.device(qkv.device):
        device = triton_products().device_of(qkv.device.index)
        return ops.cuda.rotary.rotary_cache(qkv, (cos, sin), k, v, slots, norms, device)


lib.impl("rotary_cache", _rotary_cache_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::rotary_cache", lib=lib)
def _(qkv, cos, sin, k, v, slots, *norms):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * k.shape[1], qkv.shape[3])


# ------------------------------------------------------------------------------------------ attention


def tree_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Attend from T new rows to a prefix and to a masked window behind it.

    q: [B, T, H, E]
    k, v: [B, Hkv, S, E], the cache; the rows' own keys and values are already in it
    start: [B] int64, slots below it are visible to all rows; start + W <= S
    mask: [B, T, W] bool, which of the slots start .. start+W-1 each row sees; at least one per row
    Returns: [B, T, H * E] in q's dtype.
    """
    if uses_cpp(q) and q.shape[3] % 16 == 0:
        return torch.ops.gpt_eagle.attention(q, k, v, start, mask)
    return torch.ops.gpt_eagle.tree_attention(q, k, v, start, mask)


def visible_slots(start: Tensor, mask: Tensor, slots: int) -> Tensor:
    """Spread prefix and window over the cache: [B, T, slots] bool."""
    T, W = mask.shape[1:]
    offset = torch.arange(slots, device=start.device) - start[:, None]  # [B, slots]
    inside = ((offset >= 0) & (offset < W))[:, None]  # [B, 1, slots]
    index = offset.clamp(0, W - 1)[:, None].expand(-1, T, -1)  # [B, T, slots]
    return (offset < 0)[:, None] | (inside & mask.gather(2, index))


def tree_attention_reference(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """The same in the plainest way: every slot is read, softmax in fp32."""
    B, T, H, E = q.shape
    group = H // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).float() for t in (k, v))  # [B, H, S, E]
    scores = q.transpose(1, 2).float() @ k.transpose(2, 3) * E**-0.5  # [B, H, T, S]
    hidden = ~visible_slots(start, mask, k.shape[2])[:, None]  # [B, 1, T, S]
    y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v  # [B, H, T, E]
    return y.transpose(1, 2).reshape(B, T, H * E).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """SDPA with the query heads of a group folded into rows, so that no key is copied per head.

    visible: [B, T, S] bool, or None for all.
    """
    B, T, H, E = q.shape
    kv_heads = k.shape[1]
    group = H // kv_heads
    rows = q.transpose(1, 2).reshape(B, kv_heads, group * T, E)  # head-major within a group
    if visible is not None:
        visible = visible[:, None].repeat(1, 1, group, 1)  # [B, 1, group * T, S]
    y = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible)  # [B, Hkv, group * T, E]
    return y.reshape(B, H, T, E).transpose(1, 2).reshape(B, T, H * E)


def _tree_attention_torch(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    longest = int(start.max())
    used = longest + mask.shape[2]
    k, v = k[:, :, :used], v[:, :, :used]
    if q.shape[0] == 1:
        if mask.shape[1:] == (1, 1):  # one row that sees everything: no mask at all
            return _attend(q, k, v, None)
        return _attend(q, k, v, F.pad(mask, (longest, 0), value=True))
    return _attend(q, k, v, visible_slots(start, mask, used))


def _tree_attention_masked(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    return _attend(q, k, v, visible_slots(start, mask, k.shape[2]))


def _tree_attention_cuda(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    if not has_triton():
        return _tree_attention_masked(q, k, v, start, mask)
    import ops.cuda.attention

    with torch.cuda.device(q.device):
        device, done = triton_products().device_of(q.device.index), ops.cuda.attention.counters(q.device.index)
        return ops.cuda.attention.tree_attention(q, k, v, start, mask, device, done)


lib.impl("tree_attention", _tree_attention_torch, "CPU")
lib.impl("tree_attention", _tree_attention_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::tree_attention", lib=lib)
def _(q, k, v, start, mask):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


# ----------------------------------------------------------------------------------------- compaction


def compact(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    """Move rows of all buffers to consecutive slots; every row is read before any is written.

    buffers: each [B, Hkv, S, E], contiguous; tensors of their own, of one shape and dtype
    addresses: [buffers] int64, where they lie
    start: [B] int64, slot of the first row
    path: [B, D+1] int64, offset from `start` that each row is taken from
    Writes: slots start .. start + D of every buffer.
    """
    if start.is_cuda:
        torch.ops.gpt_eagle.compact(buffers, addresses, start, path)
    elif has_cpu_operators():
        torch.ops.gpt_eagle.move_rows(buffers, start, path)
    else:
        compact_reference(buffers, start, path)  # plain operations: the compiler makes one loop nest of all moves


def compact_reference(buffers: list[Tensor], start: Tensor, path: Tensor) -> None:
    """The same by torch's own operators."""
    rows = torch.arange(path.shape[0], device=path.device)[:, None]  # [B, 1]
    target = start[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, D+1]
    source = start[:, None] + path
    for buffer in buffers:
        buffer[rows, :, target] = buffer[rows, :, source]  # [B, D+1, Hkv, E]


def _compact_cpu(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    compact_reference(buffers, start, path)


def _compact_cuda(buffers: list[Tensor], addresses: Tensor, start: Tensor, path: Tensor) -> None:
    if not has_triton():
        return compact_reference(buffers, start, path)
    import ops.cuda.compact

    with torch.cuda.device(start.device):
        ops.cuda.compact.compact(buffers, addresses, start, path)


lib.impl("compact", _compact_cpu, "CPU")
lib.impl("compact", _compact_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::compact", lib=lib)
def _(buffers, addresses, start, path):
    return None
