"""Products with experts: every row times the weight of its own expert.

The data-dependent part is inside the operators: which experts are hit, and by how many rows, never becomes a shape.
On a CPU rows are grouped by expert, which is as good for one token as for a tree or a prompt: every weight that is
needed is read once where it lies, and idle experts cost nothing. On CUDA, where the host may not look, `route` has a
kernel list the rows of every expert, once for both products of a layer, and cuda/experts.py works through the lists;
without Triton every row meets every expert there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_triton, lib, triton_products
from ops.linear import has_linear_kernel

lib.define("expert_lists(Tensor expert, int experts) -> Tensor")
lib.define("experts_linear(Tensor x, Tensor weight, Tensor routing) -> Tensor")


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
    begin = (expert[:, None] < torch.arange(experts + 1, device=expert.device)).sum(
        0
    )  # [experts + 1]
    return torch.cat((begin, expert.argsort(stable=True))).int()


def expert_of(lists: Tensor, experts: int) -> Tensor:
    """The expert of each row that `expert_lists` was given: [P] int64."""
    end, rows = lists[1 : experts + 1], lists[experts + 1 :].long()
    place = torch.arange(len(rows), device=lists.device, dtype=torch.int32)
    return torch.empty_like(rows).scatter(0, rows, torch.searchsorted(end, place, right=True))


def experts_linear(x: Tensor, weight: Tensor, routing: Tensor) -> Tensor:
    """Multiply every row with the weight of its expert. Its gradients are in scripts/train/experts_gradient.py.

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


def rows_by_expert(expert: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The experts that are hit, in order, and the rows of each. Reads the data: not for steps that are captured."""
    for e in expert.unique().tolist():
        yield e, (expert == e).nonzero().flatten()


def _experts_linear_cpu(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    if weight.is_contiguous() and has_linear_kernel(x, weight):  # not so in a backward pass
        return torch.ops.gpt_eagle.linear_bf16(x, weight, None, False, expert)
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in rows_by_expert(expert):
        y[rows] = F.linear(x[rows], weight[e])
    return y


def _experts_linear_cuda(x: Tensor, weight: Tensor, lists: Tensor) -> Tensor:
    if not has_triton():
        return experts_linear_reference(x, weight, expert_of(lists, len(weight)))
    import ops.cuda.experts

    with torch.cuda.device(x.device):
        device = triton_products().device_of(x.device.index)
        return ops.cuda.experts.experts_product(x, weight, None, lists, device)


def _expert_lists_cuda(expert: Tensor, experts: int) -> Tensor:
    if not has_triton():
        return expert_lists_reference(expert, experts)
    import ops.cuda.experts

    with torch.cuda.device(expert.device):
        return ops.cuda.experts.expert_lists(expert, experts)


lib.impl("expert_lists", expert_lists_reference, "CPU")
lib.impl("expert_lists", _expert_lists_cuda, "CUDA")
lib.impl("experts_linear", _experts_linear_cpu, "CPU")
lib.impl("experts_linear", _experts_linear_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::expert_lists", lib=lib)
def _(expert, experts):
    return expert.new_empty(experts + 1 + expert.shape[0], dtype=torch.int32)


@torch.library.register_fake("gpt_eagle::experts_linear", lib=lib)
def _(x, weight, routing):
    return x.new_empty(x.shape[0], weight.shape[1])
