"""Operators with a hand-chosen implementation per device, each beside a plain PyTorch reference.

`tree_attention`: attention of T new rows over a static cache, of which only the used part is read.
It is registered with `torch.library`, so that it captures under `fullgraph=True` while the used length,
which changes every cycle, stays data and never becomes a shape of the compiled graph.
On CPU the operator reads the length (free there) and slices the cache. On CUDA, where reading it would stop
the host, it masks the whole capacity; a kernel that reads the length from device memory belongs here.

`experts_linear`: every row times the weight of its own expert, again with the data-dependent part inside: which
experts are hit, and by how many rows, never becomes a shape.
On CPU rows are grouped by expert, which is as good for one token as for a tree or a prompt: every weight that is
needed is read once where it lies, idle experts cost nothing. On CUDA every row meets every expert, so that shapes stay
static; a kernel over groups of rows, which passes over idle experts, belongs here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_lib = torch.library.Library("gpt_eagle", "DEF")
_lib.define("tree_attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask) -> Tensor")


def tree_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Attend from T new rows to a prefix and to a masked window behind it.

    q: [B, T, H, E]
    k, v: [B, Hkv, S, E], the cache; the rows' own keys and values are already in it
    start: [B] int64, slots below it are visible to all rows
    mask: [B, T, W] bool, which of the slots start .. start+W-1 each row sees; at least one per row
    Returns: [B, T, H * E] in q's dtype.
    """
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


def _tree_attention_cpu(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    longest = int(start.max())
    used = longest + mask.shape[2]
    k, v = k[:, :, :used], v[:, :, :used]
    if q.shape[0] == 1:
        if mask.shape[1:] == (1, 1):  # one row that sees everything: no mask at all
            return _attend(q, k, v, None)
        return _attend(q, k, v, F.pad(mask, (longest, 0), value=True))
    return _attend(q, k, v, visible_slots(start, mask, used))


def _tree_attention_cuda(q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    return _attend(q, k, v, visible_slots(start, mask, k.shape[2]))


_lib.impl("tree_attention", _tree_attention_cpu, "CPU")
_lib.impl("tree_attention", _tree_attention_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::tree_attention", lib=_lib)
def _(q, k, v, start, mask):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


# ------------------------------------------------------------------------------------------------ experts

_lib.define("experts_linear(Tensor x, Tensor weight, Tensor expert) -> Tensor")
_lib.define("experts_gradient(Tensor x, Tensor grad, Tensor expert, int experts) -> Tensor")


def experts_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Multiply every row with the weight of its expert. Differentiable in x and weight.

    x: [P, K]
    weight: [E, N, K], one matrix per expert
    expert: [P] int64, of each row
    Returns: [P, N] in x's dtype.
    """
    return torch.ops.gpt_eagle.experts_linear(x, weight, expert)


def experts_linear_reference(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """The same in the plainest way: every row through every expert."""
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
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in rows_by_expert(expert):
        y[rows] = F.linear(x[rows], weight[e])
    return y


def _experts_gradient_cpu(x: Tensor, grad: Tensor, expert: Tensor, experts: int) -> Tensor:
    y = x.new_zeros(experts, grad.shape[1], x.shape[1])
    for e, rows in rows_by_expert(expert):
        y[e] = grad[rows].T @ x[rows]
    return y


_lib.impl("experts_linear", _experts_linear_cpu, "CPU")
_lib.impl("experts_linear", experts_linear_reference, "CUDA")
_lib.impl("experts_gradient", _experts_gradient_cpu, "CPU")
_lib.impl("experts_gradient", experts_gradient_reference, "CUDA")


@torch.library.register_fake("gpt_eagle::experts_linear", lib=_lib)
def _(x, weight, expert):
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.register_fake("gpt_eagle::experts_gradient", lib=_lib)
def _(x, grad, expert, experts):
    return x.new_empty(experts, grad.shape[1], x.shape[1])


def _experts_setup(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _experts_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, expert = ctx.saved_tensors
    by_weight = torch.ops.gpt_eagle.experts_gradient(x, grad, expert, weight.shape[0])
    return experts_linear(grad, weight.transpose(1, 2), expert), by_weight, None


torch.library.register_autograd("gpt_eagle::experts_linear", _experts_backward, setup_context=_experts_setup, lib=_lib)
for _device in ("cpu", "cuda"):
    torch.library.register_autocast("gpt_eagle::experts_linear", _device, torch.bfloat16, lib=_lib)
