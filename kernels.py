"""Operators with a hand-chosen implementation per device, each beside a plain PyTorch reference.

All are registered with `torch.library`, so that they capture under `fullgraph=True`.

`tree_attention`: attention of T new rows over a static cache, of which only the used part is read.
The used length changes every cycle; it stays data and never becomes a shape of the compiled graph.
On CPU the operator reads the length (free there); attention_cpu.cpp gives a row the same bits whatever the tree around
it, PyTorch's SDPA serves other dtypes and machines without a compiler. On CUDA, where reading it would stop the host,
kernels read it from device memory (attention_triton.py); without Triton the whole capacity is masked there.

`rotary`: the rotary embedding. On CPU C++ (fused_cpu.cpp); elsewhere plain tensor operations, which the compiler fuses
well on CUDA.

`topk_logsumexp`: the best few of a row of scores, and its normalizer (topk_triton.py on CUDA, fused_cpu.cpp on CPU).

`compact`: moves of rows within the buffers of a cache, on CUDA one launch for all layers (compact_triton.py), on CPU
C++ (fused_cpu.cpp).

Not here: matrix products (products.py).
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels_cpu

_lib = torch.library.Library("gpt_eagle", "DEF")
_lib.define("tree_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask) -> Tensor")
_lib.define("compact(Tensor(a!)[] buffers, Tensor addresses, Tensor start, Tensor path) -> ()")
_lib.define("topk_logsumexp(Tensor scores, int k) -> (Tensor, Tensor, Tensor)")

# --------------------------------------------------------------------------------------------- Triton


@cache
def has_triton() -> bool:
    """Whether there is Triton; says once what it means that there is none."""
    if importlib.util.find_spec("triton") is not None:
        return True
    print(
        "note: without Triton attention, top-k and experts are slow, and steps not timed; pip install triton",
        file=sys.stderr,
    )
    return False


@cache
def triton_kernels() -> ModuleType:
    """Import the kernels. Raises: ValueError where there is no Triton."""
    try:
        import kernels_triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("int4 and int8 on CUDA need Triton, and it is not installed; pip install triton") from None
    return kernels_triton


# ---------------------------------------------------------------------------------------- C++ on a CPU


@torch.compiler.assume_constant_result  # decided while a step is captured
def has_cpu_operators() -> bool:
    return not kernels_cpu.load_operators()


def _served_in_cpp(x: Tensor) -> bool:
    """Whether our C++ takes x. Callers name its operators themselves: a layer of Python costs 6 us a call."""
    known = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    return known and not x.requires_grad and has_cpu_operators()  # the operators have no gradients


# --------------------------------------------------------------------------------------------- rotary


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE by half-rotation, in fp32. x: [B, T, H, E]. Returns the same shape and dtype."""
    cos, sin = rope
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def rotary(qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of T rows.

    qkv: [B, T, H + 2 Hkv, E], heads of queries, keys and values side by side
    rope: cosines and sines, [B, T, 1, E] fp32 each
    Returns: the queries, [B, T, H, E]; the keys, [B, T, Hkv, E].
    """
    if _served_in_cpp(qkv):
        return torch.ops.gpt_eagle.rotary(qkv, *rope, heads, kv_heads)
    return rotary_reference(qkv, rope, heads, kv_heads)


def rotary_reference(qkv: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations."""
    q, k = qkv[:, :, : heads + kv_heads].split((heads, kv_heads), dim=2)
    return rotate(q, rope), rotate(k, rope)


# ------------------------------------------------------------------------------------------ attention


def tree_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Attend from T new rows to a prefix and to a masked window behind it.

    q: [B, T, H, E]
    k, v: [B, Hkv, S, E], the cache; the rows' own keys and values are already in it
    start: [B] int64, slots below it are visible to all rows; start + W <= S
    mask: [B, T, W] bool, which of the slots start .. start+W-1 each row sees; at least one per row
    Returns: [B, T, H * E] in q's dtype.
    """
    if _served_in_cpp(q) and q.shape[3] % 16 == 0:
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
    import attention_triton

    with torch.cuda.device(q.device):
        return attention_triton.tree_attention(q, k, v, start, mask, triton_kernels().device_of(q.device.index))


_lib.impl("tree_attention", _tree_attention_torch, "CPU")
_lib.impl("tree_attention", _tree_attention_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::tree_attention", lib=_lib)
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
        compact_reference(buffers, start, path)  # in the open: the compiler makes one loop nest of all moves


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
    import compact_triton

    with torch.cuda.device(start.device):
        compact_triton.compact(buffers, addresses, start, path)


_lib.impl("compact", _compact_cpu, "CPU")
_lib.impl("compact", _compact_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::compact", lib=_lib)
def _(buffers, addresses, start, path):
    return None


# ---------------------------------------------------------------------------------------------- top-k


def topk_logsumexp(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best of every row of scores, best first, and the logarithm of the row's sum of exponentials.

    scores: [..., V] float32
    Returns: their values and indices, both [..., k]; the logsumexp, [..., 1]. Equal values come in the order of
    their indices, except where torch.topk serves, which promises none.
    Raises: ValueError for scores of another dtype.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"topk_logsumexp takes float32 scores; these are {scores.dtype}: convert them")
    if scores.is_cuda:
        return torch.ops.gpt_eagle.topk_logsumexp(scores, k)
    if _served_in_cpp(scores):
        return torch.ops.gpt_eagle.topk(scores, k)
    return topk_logsumexp_reference(scores, k)  # in the open: the compiler fuses it with what made the scores


def topk_logsumexp_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's own operators."""
    return *scores.topk(k, dim=-1), scores.logsumexp(-1, keepdim=True)


def _topk_logsumexp_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if has_triton():
        import topk_triton

        if k <= topk_triton.MOST:
            with torch.cuda.device(scores.device):
                return topk_triton.topk_logsumexp(scores, k)
    return topk_logsumexp_reference(scores, k)


_lib.impl("topk_logsumexp", topk_logsumexp_reference, "CPU")
_lib.impl("topk_logsumexp", _topk_logsumexp_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::topk_logsumexp", lib=_lib)
def _(scores, k):
    shape = scores.shape[:-1]
    return scores.new_empty(*shape, k), scores.new_empty(*shape, k, dtype=torch.int64), scores.new_empty(*shape, 1)


# -------------------------------------------------------------------------------------------------- clock


def stamp(x: Tensor, after: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Tell when a device gets here. What is to come later takes the x that is returned.

    after: what else must be there already
    Returns: x; the time, a scalar int64 tensor, in ns, on that device; only differences mean something. It is read by a
    kernel on CUDA, so that captured graphs tell the time too; without Triton it is 0 there.
    """
    if x.is_cuda:
        return x, _clock_cuda(x.device)
    if has_cpu_operators():
        return torch.ops.gpt_eagle.stamp(x, list(after))
    return x, torch.tensor(time.perf_counter_ns())


def _clock_cuda(device: torch.device) -> Tensor:
    now = torch.zeros((), dtype=torch.int64, device=device)
    if has_triton():
        import clock_triton

        with torch.cuda.device(device):
            clock_triton.read(now)
    return now
