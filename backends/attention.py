"""Attention of T new tokens over a static cache, of which only the used part is read: an operator.

The used length changes every cycle; it stays data and never becomes a shape of the compiled graph.
1. On a CPU the length is read, which is free there. C++ serves most models (cpu/attention.cpp), and
   a token's result does not depend on the draft tree around it. The operator is PyTorch's SDPA, for
   other dtypes and machines without a compiler.
2. On CUDA, where reading the length would stop the host, kernels read it from device memory, and a
   token's result does not depend on the tree either (triton/attention.py). Without Triton the
   whole capacity is masked (`masked_attention`).

What it computes is `attention` in reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.library import lib
from reference import decode_rows, visible_slots

lib.define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask, Tensor? first=None, "
    "float scale=0.0, Tensor? paths=None, Tensor? sinks=None) -> Tensor"
)
lib.define("path_table(Tensor mask) -> Tensor")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run SDPA with the query heads of a group folded into rows, so that no key is copied per head.

    visible: [B, T, S] bool, or None for all, which sinks do not allow
    """
    B, T, H, E = q.shape
    kv_heads = k.shape[1]
    group = H // kv_heads
    rows = q.transpose(1, 2).reshape(B, kv_heads, group * T, E)  # head-major within a group
    if visible is not None:
        visible = visible[:, None].repeat(1, 1, group, 1)  # [B, 1, group * T, S]
    if sinks is not None:
        of_rows = sinks.view(kv_heads, group).repeat_interleave(T, 1)  # [Hkv, group * T]
        k, v, visible = with_sinks(k, v, visible, of_rows.to(q.dtype))
    y = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=scale or None)
    return y.reshape(B, H, T, E).transpose(1, 2).reshape(B, T, H * E)  # of [B, Hkv, group * T, E]


def with_sinks(
    k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a slot whose score is a row's sink, and whose value is 0.

    k, v: [B, Hkv, S, E]; visible: bool, broadcasts to [B, heads, rows, S]
    sinks: [heads, rows] in the queries' dtype
    Returns: k, v and SDPA's mask, which is added to the scores, [B, heads, rows, S + 1].
    """
    shape = (len(k), *sinks.shape)
    mask = torch.zeros_like(visible, dtype=sinks.dtype).masked_fill(~visible, float("-inf"))
    mask = torch.cat((mask.expand(*shape, -1), sinks[..., None].expand(*shape, 1)), -1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), mask


def _tree_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
    paths: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if k.dtype not in (q.dtype, torch.int8):
        narrow = q.to(k.dtype)
        y = _tree_attention_torch(narrow, k, v, start, mask, first, scale, sinks=sinks)
        return y.to(q.dtype)
    longest = int(start.max())
    used = longest + mask.shape[2]
    lowest = 0 if first is None else int(first.min())
    k = decode_rows(k[:, :, lowest:used], q.shape[3], q.dtype)
    v = decode_rows(v[:, :, lowest:used], q.shape[3], q.dtype)
    if q.shape[0] == 1 and first is None and sinks is None:
        if mask.shape[1:] == (1, 1):  # one token that sees everything: no mask at all
            return _attend(q, k, v, None, scale)
        return _attend(q, k, v, F.pad(mask, (longest, 0), value=True), scale)
    visible = visible_slots(start, mask, first, used)[:, :, lowest:]
    return _attend(q, k, v, visible, scale, sinks)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    mask: Tensor,
    first: Tensor | None = None,
    scale: float = 0.0,
    paths: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention` over the whole capacity, where no kernel reads the length on CUDA."""
    return _attend(q, k, v, visible_slots(start, mask, first, k.shape[2]), scale, sinks)


def _path_table_torch(mask: Tensor) -> Tensor:
    """Compute `kv_cache.Window.paths`; places behind a path may hold anything."""
    length = mask.sum(2, keepdim=True)  # [B, T, 1]
    order = (~mask).int().argsort(dim=2, stable=True)  # [B, T, W], visible slots first
    return torch.cat((length, order), 2).int()


lib.impl("tree_attention", _tree_attention_torch, "CPU")
lib.impl("path_table", _path_table_torch, "CPU")


@torch.library.register_fake("gpt_eagle::tree_attention", lib=lib)
def _(q, k, v, start, mask, first=None, scale=0.0, paths=None, sinks=None):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


@torch.library.register_fake("gpt_eagle::path_table", lib=lib)
def _(mask):
    B, T, W = mask.shape
    return mask.new_empty(B, T, 1 + W, dtype=torch.int32)


attention = torch.ops.gpt_eagle.tree_attention.default
