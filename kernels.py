"""Operators with a hand-chosen implementation per device, each beside a plain PyTorch reference.

All are registered with `torch.library`, so that they capture under `fullgraph=True`.

`tree_attention`: attention of T new rows over a static cache, of which only the used part is read.
The used length changes every cycle; it stays data and never becomes a shape of the compiled graph.
On CPU the operator reads the length (free there); attention_cpu.cpp gives a row the same bits whatever the tree around
it, PyTorch's SDPA serves other dtypes and machines without a compiler. On CUDA, where reading it would stop the host,
kernels read it from device memory (attention_triton.py); without Triton the whole capacity is masked there.

`linear`: x W^T. On a CPU in bf16 it is linear_cpu.cpp, which gives a row the same bits in every company; anywhere else,
and where gradients are wanted, it is PyTorch's.

`rotary`: the rotary embedding. On CPU C++ (fused_cpu.cpp); elsewhere plain tensor operations, which the compiler fuses
well on CUDA.

`topk_logsumexp`: the best few of a row of scores, and its normalizer (topk_triton.py on CUDA, fused_cpu.cpp on CPU).

`compact`: moves of rows within the buffers of a cache, on CUDA one launch for all layers (compact_triton.py).

`w4a16`, `w8a16`: products with int4 and int8 weights, on CUDA only. Their layout is made and undone here, in plain
tensor operations; the kernels are in kernels_triton.py, which is imported by the first call on a GPU. With lists of
the rows of every expert they take stacks of weights, as `experts_linear` does.

`experts_linear`: every row times the weight of its own expert, again with the data-dependent part inside: which
experts are hit, and by how many rows, never becomes a shape.
On CPU rows are grouped by expert, which is as good for one token as for a tree or a prompt: every weight that is
needed is read once where it lies, idle experts cost nothing. On CUDA, where the host may not look, `route` has a kernel
list the rows of every expert, once for both products of a layer, and experts_triton.py works through the lists; without
Triton every row meets every expert there.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
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
_lib.define("w4a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists=None) -> Tensor")
_lib.define("w8a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists=None) -> Tensor")

# --------------------------------------------------------------------------------------------- Triton


@cache
def _has_triton() -> bool:
    """Whether there is Triton; says once what it means that there is none."""
    if importlib.util.find_spec("triton") is not None:
        return True
    print(
        "note: without Triton attention, top-k and experts are slow, and steps not timed; pip install triton",
        file=sys.stderr,
    )
    return False


# ---------------------------------------------------------------------------------------- C++ on a CPU


@torch.compiler.assume_constant_result  # decided while a step is captured
def _cpu_operators() -> bool:
    return not kernels_cpu.load_operators()


def _served_in_cpp(x: Tensor) -> bool:
    """Whether our C++ takes x. Callers name its operators themselves: a layer of Python costs 6 us a call."""
    known = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32)
    return known and not x.requires_grad and _cpu_operators()  # the operators have no gradients


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
    if not _has_triton():
        return _tree_attention_masked(q, k, v, start, mask)
    import attention_triton

    with torch.cuda.device(q.device):
        return attention_triton.tree_attention(q, k, v, start, mask, _triton_kernels().device_of(q.device.index))


_lib.impl("tree_attention", _tree_attention_torch, "CPU")
_lib.impl("tree_attention", _tree_attention_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::tree_attention", lib=_lib)
def _(q, k, v, start, mask):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


# ------------------------------------------------------------------------------------- linear layers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Multiply rows by a weight, x W^T, and add a bias.

    x: [..., K]; weight: [N, K]; bias: [N]
    wide: the result in fp32; where the product is PyTorch's, it was rounded to x's dtype before
    Returns: [..., N] in x's dtype, or fp32.
    """
    if has_own_product(x, weight):
        return torch.ops.gpt_eagle.linear_bf16(x, weight, bias, wide)
    y = F.linear(x, weight, bias)  # in the open, for the compiler
    return y.float() if wide else y


def has_own_product(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is our own operator, whose rows do not depend on each other: bf16 on a CPU, no gradients."""
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return _has_cpu_operators()


@torch.compiler.assume_constant_result
def _has_cpu_operators() -> bool:
    return not kernels_cpu.load_operators()


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
    if not _has_triton():
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
    if _has_triton():
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


# ------------------------------------------------------------------------- int4 and int8 weights (CUDA)

COLUMNS = 64  # words of a packed row and block; a block of K is 64 words of 16 / bits weights


def _pack(fields: Tensor, bits: int) -> Tensor:
    """[N, K] int16, unsigned fields -> [blocks, N, COLUMNS] int16.

    Word c of block b holds in its bits i * bits and up the field of k = (b * planes + i) * COLUMNS + c.
    """
    planes = fields.view(fields.shape[0], -1, 16 // bits, COLUMNS)  # [N, blocks, planes, COLUMNS]
    words = sum(planes[:, :, i] << (bits * i) for i in range(16 // bits))  # [N, blocks, COLUMNS]
    return words.transpose(0, 1).contiguous()


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`: [blocks, N, COLUMNS] -> [N, padded K] int16."""
    planes = [(packed >> (bits * i)) & (2**bits - 1) for i in range(16 // bits)]
    return torch.stack(planes, 2).transpose(0, 1).flatten(1)  # [N, blocks, planes, COLUMNS] -> [N, padded K]


def _to_blocks(codes: Tensor, bits: int) -> Tensor:
    """Pad K with zeros to whole blocks: at most 255 columns."""
    return F.pad(codes, (0, -codes.shape[1] % (16 // bits * COLUMNS))).short()


def pack_int4(codes: Tensor) -> Tensor:
    """Lay int4 weights out for `w4a16`. codes: [N, K] int8, -8..7. Returns: [blocks, N, COLUMNS] int16."""
    return _pack(_to_blocks(codes, 4) + 8, 4)


def unpack_int4(packed: Tensor, N: int, K: int) -> Tensor:
    """The codes that `pack_int4` was given: [N, K] int8."""
    return (_unpack(packed, 4) - 8)[:N, :K].to(torch.int8)


def pack_int8(codes: Tensor) -> Tensor:
    """Lay int8 weights out for `w8a16`, as sign and magnitude.

    codes: [N, K] int8, -127..127: -128 has no place
    Returns: [blocks, N, COLUMNS] int16.
    """
    codes = _to_blocks(codes, 8)
    return _pack(torch.where(codes < 0, 128 - codes, codes), 8)  # bit 7 is the sign


def unpack_int8(packed: Tensor, N: int, K: int) -> Tensor:
    """The codes that `pack_int8` was given: [N, K] int8."""
    fields = _unpack(packed, 8)[:N, :K]
    return torch.where(fields < 128, fields, 128 - fields).to(torch.int8)


def pack_scale(scale: Tensor, group: int) -> Tensor:
    """Lay the scales of int4 groups out for `w4a16`: those of a row and block side by side, two to a word.

    scale: [N, K / group] bfloat16; group: 32, 64 or 128
    Returns: [blocks, N, 128 / group] int32; its last dimension tells the group.
    """
    per_block = 4 * COLUMNS // group
    padded = F.pad(scale, (0, -scale.shape[1] % per_block))  # [N, blocks * per_block]
    blocks = padded.view(scale.shape[0], -1, per_block).transpose(0, 1).contiguous()  # [blocks, N, per_block]
    return blocks.view(torch.int32)


def unpack_scale(packed: Tensor, K: int) -> Tensor:
    """The scales that `pack_scale` was given: [N, K / group] bfloat16."""
    group = 2 * COLUMNS // packed.shape[2]
    return packed.view(torch.bfloat16).transpose(0, 1).flatten(1)[:, : K // group]


def _check(x: Tensor, packed: Tensor, bits: int, scale_is_packed: bool) -> None:
    blocks = -(-x.shape[-1] * bits // (16 * COLUMNS))
    if packed.shape[-3] != blocks:
        rule = f"x of {x.shape[-1]} inputs needs int{bits} weights packed in {blocks} blocks of {16 * COLUMNS // bits}"
        raise ValueError(f"{rule}; these have {packed.shape[-3]}: pack the weights of this layer")
    if not scale_is_packed:
        raise ValueError(f"w{bits}a16 takes scales as {'pack_scale' if bits == 4 else '[N] float32'} lays them out")


def w4a16(x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None) -> Tensor:
    """Multiply rows by int4 weights, x W^T; dots of a group are taken over the codes, then scaled and added in fp32.

    x: [..., K] bfloat16, float16 or float32
    packed, scale: from `pack_int4` and `pack_scale`
    lists: from `expert_lists`; x is then [P, K], and packed and scale are stacks, [E, ...]
    Returns: [..., N] in x's dtype.
    Raises: ValueError for weights of another width, or scales in another layout.
    """
    _check(x, packed, 4, scale.dtype == torch.int32 and scale.shape[:-1] == packed.shape[:-1])
    return torch.ops.gpt_eagle.w4a16(x, packed, scale, lists)


def w8a16(x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None) -> Tensor:
    """Multiply rows by int8 weights, x W^T; the product is taken over the codes, then scaled in fp32.

    x: [..., K] bfloat16, float16 or float32
    packed: from `pack_int8`; scale: [N] float32
    lists: from `expert_lists`; x is then [P, K], and packed and scale are stacks, [E, ...]
    Returns: [..., N] in x's dtype.
    Raises: ValueError for weights of another width, or scales in another layout.
    """
    stacked = packed.shape[:-3] + packed.shape[-2:-1]
    _check(x, packed, 8, scale.dtype == torch.float32 and scale.shape == stacked)
    return torch.ops.gpt_eagle.w8a16(x, packed, scale, lists)


def w4a16_reference(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """The same in the plainest way: the weights in fp32."""
    K, N = x.shape[-1], packed.shape[1]
    group = 2 * COLUMNS // scale.shape[2]
    w = unpack_int4(packed, N, K) * unpack_scale(scale, K).float().repeat_interleave(group, 1)  # [N, K]
    return (x.float() @ w.T).to(x.dtype)


def w8a16_reference(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """The same in the plainest way: the weights in fp32."""
    w = unpack_int8(packed, packed.shape[1], x.shape[-1]) * scale[:, None]  # [N, K]
    return (x.float() @ w.T).to(x.dtype)


@cache
def _triton_kernels() -> ModuleType:
    """Import the kernels. Raises: ValueError where there is no Triton."""
    try:
        import kernels_triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("int4 and int8 on CUDA need Triton, and it is not installed; pip install triton") from None
    return kernels_triton


def _quantized_matmul_cuda(x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None) -> Tensor:
    triton_kernels = _triton_kernels()
    device = triton_kernels.device_of(x.device.index)
    with torch.cuda.device(x.device):
        if lists is None:
            return triton_kernels.matmul(x, packed, scale, device)
        import experts_triton

        return experts_triton.experts_product(x, packed, scale, lists, device)


def _quantized_matmul_fake(x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[-2])


for _name in ("w4a16", "w8a16"):
    _lib.impl(_name, _quantized_matmul_cuda, "CUDA")
    torch.library.register_fake(f"gpt_eagle::{_name}", _quantized_matmul_fake, lib=_lib)

# ------------------------------------------------------------------------------------------------ experts

_lib.define("expert_lists(Tensor expert, int experts) -> Tensor")
_lib.define("experts_linear(Tensor x, Tensor weight, Tensor routing) -> Tensor")
_lib.define("experts_gradient(Tensor x, Tensor grad, Tensor routing, int experts) -> Tensor")


def route(expert: Tensor, experts: int) -> Tensor:
    """What the products with experts take on this device: [P] int64 as it is on a CPU, its `expert_lists` on CUDA."""
    return expert_lists(expert, experts) if expert.is_cuda else expert


def expert_lists(expert: Tensor, experts: int) -> Tensor:
    """List the rows of every expert, each in order.

    expert: [P] int64, of each row
    Returns: [experts + 1 + P] int32: where in the rows each expert's begin, and where the last one's end; the rows.
    """
    return torch.ops.gpt_eagle.expert_lists(expert, experts)


def expert_lists_reference(expert: Tensor, experts: int) -> Tensor:
    """The same by torch's own operators."""
    begin = (expert[:, None] < torch.arange(experts + 1, device=expert.device)).sum(0)  # [experts + 1]
    return torch.cat((begin, expert.argsort(stable=True))).int()


def expert_of(lists: Tensor, experts: int) -> Tensor:
    """The expert of each row that `expert_lists` was given: [P] int64."""
    end, rows = lists[1 : experts + 1], lists[experts + 1 :].long()
    place = torch.arange(len(rows), device=lists.device, dtype=torch.int32)
    return torch.empty_like(rows).scatter(0, rows, torch.searchsorted(end, place, right=True))


def experts_linear(x: Tensor, weight: Tensor, routing: Tensor) -> Tensor:
    """Multiply every row with the weight of its expert. Differentiable in x and weight.

    x: [P, K]
    weight: [E, N, K], one matrix per expert
    routing: what `route` made of the rows' experts
    Returns: [P, N] in x's dtype.
    """
    return torch.ops.gpt_eagle.experts_linear(x, weight, routing)


def experts_linear_reference(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """The same in the plainest way: every row through every expert. expert: [P] int64."""
    every = torch.einsum("pk,enk->pen", x, weight)  # [P, E, N]
    return every[torch.arange(len(x), device=x.device), expert]  # [P, N]


def experts_gradient_reference(x: Tensor, grad: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The gradient of every expert's weight. grad: [P, N], of the result. Returns: [E, N, K]."""
    ours = F.one_hot(expert, experts).to(x.dtype)  # [P, E]
    return torch.einsum("pen,pk->enk", ours[:, :, None] * grad[:, None], x)


def rows_by_expert(expert: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The experts that are hit, in order, and the rows of each. Reads the data: not for steps that are captured."""
    for e in expert.unique().tolist():
        yield e, (expert == e).nonzero().flatten()


def _experts_linear_cpu(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    if weight.is_contiguous() and has_own_product(x, weight):  # not so in a backward pass
        return torch.ops.gpt_eagle.linear_bf16(x, weight, None, False, expert)
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in rows_by_expert(expert):
        y[rows] = F.linear(x[rows], weight[e])
    return y


def _experts_linear_cuda(x: Tensor, weight: Tensor, lists: Tensor) -> Tensor:
    if not _has_triton():
        return experts_linear_reference(x, weight, expert_of(lists, len(weight)))
    import experts_triton

    with torch.cuda.device(x.device):
        return experts_triton.experts_product(x, weight, None, lists, _triton_kernels().device_of(x.device.index))


def _expert_lists_cuda(expert: Tensor, experts: int) -> Tensor:
    if not _has_triton():
        return expert_lists_reference(expert, experts)
    import experts_triton

    with torch.cuda.device(expert.device):
        return experts_triton.expert_lists(expert, experts)


def _experts_gradient_cpu(x: Tensor, grad: Tensor, expert: Tensor, experts: int) -> Tensor:
    y = x.new_zeros(experts, grad.shape[1], x.shape[1])
    for e, rows in rows_by_expert(expert):
        y[e] = grad[rows].T @ x[rows]
    return y


def _experts_gradient_cuda(x: Tensor, grad: Tensor, lists: Tensor, experts: int) -> Tensor:
    return experts_gradient_reference(x, grad, expert_of(lists, experts), experts)


_lib.impl("expert_lists", expert_lists_reference, "CPU")
_lib.impl("expert_lists", _expert_lists_cuda, "CUDA")
_lib.impl("experts_linear", _experts_linear_cpu, "CPU")
_lib.impl("experts_linear", _experts_linear_cuda, "CUDA")
_lib.impl("experts_gradient", _experts_gradient_cpu, "CPU")
_lib.impl("experts_gradient", _experts_gradient_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::expert_lists", lib=_lib)
def _(expert, experts):
    return expert.new_empty(experts + 1 + expert.shape[0], dtype=torch.int32)


@torch.library.register_fake("gpt_eagle::experts_linear", lib=_lib)
def _(x, weight, routing):
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.register_fake("gpt_eagle::experts_gradient", lib=_lib)
def _(x, grad, routing, experts):
    return x.new_empty(experts, grad.shape[1], x.shape[1])


def _experts_setup(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _experts_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, routing = ctx.saved_tensors
    by_weight = torch.ops.gpt_eagle.experts_gradient(x, grad, routing, weight.shape[0])
    return experts_linear(grad, weight.transpose(1, 2), routing), by_weight, None


torch.library.register_autograd("gpt_eagle::experts_linear", _experts_backward, setup_context=_experts_setup, lib=_lib)
for _device in ("cpu", "cuda"):
    torch.library.register_autocast("gpt_eagle::experts_linear", _device, torch.bfloat16, lib=_lib)


# -------------------------------------------------------------------------------------------------- clock


def clock(device: torch.device) -> Tensor:
    """The time at which a device gets here: a scalar int64 tensor, in ns, on that device; only differences mean
    something. It is read by a kernel on CUDA, so that captured graphs tell the time too; without Triton it is 0 there.
    """
    if device.type != "cuda":
        return torch.tensor(time.perf_counter_ns())
    now = torch.zeros((), dtype=torch.int64, device=device)
    if _has_triton():
        import clock_triton

        with torch.cuda.device(device):
            clock_triton.read(now)
    return now
