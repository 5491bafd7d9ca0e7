"""Attention of T new tokens over a static cache, of which only the used part is read.

The used length changes every cycle; it stays data and never becomes a shape of the compiled graph.
On a CPU the operator reads the length, which is free there (cpu/attention.cpp); a token's result
does not depend on the draft tree around it. PyTorch's SDPA serves other dtypes and machines without
a compiler. On CUDA, where reading the length would stop the host, kernels read it from device
memory, and a token's result does not depend on the tree either (cuda/attention.py); without Triton
the whole capacity is masked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import cuda_products, has_triton, is_plain, lib, uses_cpp

lib.define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask, Tensor? first=None, "
    "float scale=0.0) -> Tensor"
)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    """Attend from T new tokens to a prefix and to a masked window behind it.

    q: [B, T, H, E], in the cache's dtype; on a CPU also in fp32 over a cache in bf16
    k, v: [B, Hkv, S, E], the cache; the tokens' own keys and values are already in it
    start: [B] int64, slots below it are visible to all tokens; start + W <= S
    mask: [B, T, W] bool, the slots among start .. start+W-1 that each token sees, at least one
    first: [B, T] int64, slots below it are hidden from a token and not read; 0 <= first < start + W
        and, of a token that sees only a part of its path, the place of that part (kv_cache.sliding)
    scale: of the scores; 0: E ** -0.5
    Returns: [B, T, H * E] in q's dtype.
    """
    if uses_cpp(q, "attention") and q.shape[3] % 16 == 0:
        return torch.ops.gpt_eagle.attention(q, k, v, start, mask, first, scale)
    if is_plain("attention"):
        return tree_attention_reference(q, k, v, start, mask, first, scale)
    return torch.ops.gpt_eagle.tree_attention(q, k, v, start, mask, first, scale)


def visible_slots(start: Tensor, mask: Tensor, first: Tensor | None, slots: int) -> Tensor:
    """Return the slots of the cache that each token sees: [B, T, slots] bool."""
    T, W = mask.shape[1:]
    offset = torch.arange(slots, device=start.device) - start[:, None]  # [B, slots]
    inside = ((offset >= 0) & (offset < W))[:, None]  # [B, 1, slots]
    index = offset.clamp(0, W - 1)[:, None].expand(-1, T, -1)  # [B, T, slots]
    visible = (offset < 0)[:, None] | (inside & mask.gather(2, index))
    if first is None:
        return visible
    return visible & (torch.arange(slots, device=start.device) >= first[:, :, None])


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    """Compute `tree_attention` plainly: every slot is read, softmax in fp32."""
    B, T, H, E = q.shape
    group = H // k.shape[1]
    k = k.repeat_interleave(group, dim=1).float()  # [B, H, S, E]
    v = v.repeat_interleave(group, dim=1).float()  # [B, H, S, E]
    scores = q.transpose(1, 2).float() @ k.transpose(2, 3) * (scale or E**-0.5)  # [B, H, T, S]
    hidden = ~visible_slots(start, mask, first, k.shape[2])[:, None]  # [B, 1, T, S]
    y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v  # [B, H, T, E]
    return y.transpose(1, 2).reshape(B, T, H * E).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Run SDPA with the query heads of a group folded into rows, so that no key is copied per head.

    visible: [B, T, S] bool, or None for all.
    """
    B, T, H, E = q.shape
    kv_heads = k.shape[1]
    group = H // kv_heads
    rows = q.transpose(1, 2).reshape(B, kv_heads, group * T, E)  # head-major within a group
    if visible is not None:
        visible = visible[:, None].repeat(1, 1, group, 1)  # [B, 1, group * T, S]
    y = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=scale or None)
    return y.reshape(B, H, T, E).transpose(1, 2).reshape(B, T, H * E)  # of [B, Hkv, group * T, E]


def _tree_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    if q.dtype != k.dtype:
        return _tree_attention_torch(q.to(k.dtype), k, v, start, mask, first, scale).to(q.dtype)
    longest = int(start.max())
    used = longest + mask.shape[2]
    lowest = 0 if first is None else int(first.min())
    k = k[:, :, lowest:used]
    v = v[:, :, lowest:used]
    if q.shape[0] == 1 and first is None:
        if mask.shape[1:] == (1, 1):  # one token that sees everything: no mask at all
            return _attend(q, k, v, None, scale)
        return _attend(q, k, v, F.pad(mask, (longest, 0), value=True), scale)
    visible = visible_slots(start, mask, first, used)[:, :, lowest:]
    return _attend(q, k, v, visible, scale)


def _tree_attention_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    return _attend(q, k, v, visible_slots(start, mask, first, k.shape[2]), scale)


def _tree_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    if not has_triton("attention"):
        return _tree_attention_masked(q, k, v, start, mask, first, scale)
    import ops.cuda.attention

    with torch.cuda.device(q.device):
        device = cuda_products().device_of(q.device.index)
        done = ops.cuda.attention.counters(q.device.index)
        window = (start, mask, first)
        return ops.cuda.attention.tree_attention(q, k, v, window, scale, device, done)


lib.impl("tree_attention", _tree_attention_torch, "CPU")
lib.impl("tree_attention", _tree_attention_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::tree_attention", lib=lib)
def _(q, k, v, start, mask, first=None, scale=0.0):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])
