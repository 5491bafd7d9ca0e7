"""Matrix products with an implementation per device, each beside a plain PyTorch reference.

`linear`: x W^T. On a CPU in bf16 it is linear_cpu.cpp, which gives a row the same bits in every company; anywhere else,
and where gradients are wanted, it is PyTorch's.

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

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

_lib = torch.library.Library("gpt_eagle", "FRAGMENT")
_lib.define("w4a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists=None) -> Tensor")
_lib.define("w8a16(Tensor x, Tensor packed, Tensor scale, Tensor? lists=None) -> Tensor")

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
    return kernels.has_cpu_operators()


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


def _quantized_matmul_cuda(x: Tensor, packed: Tensor, scale: Tensor, lists: Tensor | None = None) -> Tensor:
    triton_kernels = kernels.triton_kernels()
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
    if not kernels.has_triton():
        return experts_linear_reference(x, weight, expert_of(lists, len(weight)))
    import experts_triton

    with torch.cuda.device(x.device):
        device = kernels.triton_kernels().device_of(x.device.index)
        return experts_triton.experts_product(x, weight, None, lists, device)


def _expert_lists_cuda(expert: Tensor, experts: int) -> Tensor:
    if not kernels.has_triton():
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
