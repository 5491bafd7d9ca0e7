"""Products with experts: every row times the weight of its own expert.

The data-dependent part is inside the operators: the experts that are hit, and the number of rows of
each, never become a shape. On a CPU rows are grouped by expert, which is as good for one token as
for a tree or a prompt: every weight that is needed is read once where it lies, and idle experts
cost nothing. Here that is PyTorch's; in bf16 cpu/matmul.cpp does the same. On CUDA, where the host
must not read the routing, a kernel lists the rows of every expert, once for both products of a
layer, and cuda/experts.py works through the lists. The plain version is in reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.library import lib

lib.define("expert_lists(Tensor expert, int experts) -> Tensor")
lib.define("experts_linear(Tensor x, Tensor weight, Tensor routing) -> Tensor")


def expert_lists(expert: Tensor, experts: int) -> Tensor:
    """List the rows of every expert, each in order.

    expert: [P] int64, of each row
    Returns: [experts + 1 + P] int32: the place among the rows at which each expert's begin, the end
    of the last expert's, and the rows.
    """
    return torch.ops.gpt_eagle.expert_lists(expert, experts)


def expert_lists_reference(expert: Tensor, experts: int) -> Tensor:
    """Compute `expert_lists` with torch's own operators."""
    bounds = torch.arange(experts + 1, device=expert.device)
    begin = (expert[:, None] < bounds).sum(0)  # [experts + 1]
    return torch.cat((begin, expert.argsort(stable=True))).int()


def expert_of(lists: Tensor, experts: int) -> Tensor:
    """Return the expert of each row, from the result of `expert_lists`: [P] int64."""
    end = lists[1 : experts + 1]
    rows = lists[experts + 1 :].long()
    place = torch.arange(len(rows), device=lists.device, dtype=torch.int32)
    return torch.empty_like(rows).scatter(0, rows, torch.searchsorted(end, place, right=True))


def rows_by_expert(expert: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the experts that are hit, in order, each with its rows.

    This reads the data, so captured steps must not call it.
    """
    for e in expert.unique().tolist():
        yield e, (expert == e).nonzero().flatten()


def _experts_linear_cpu(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in rows_by_expert(expert):
        y[rows] = F.linear(x[rows].to(weight.dtype), weight[e]).to(x.dtype)
    return y


lib.impl("expert_lists", expert_lists_reference, "CPU")
lib.impl("experts_linear", _experts_linear_cpu, "CPU")


@torch.library.register_fake("gpt_eagle::expert_lists", lib=lib)
def _(expert, experts):
    return expert.new_empty(experts + 1 + expert.shape[0], dtype=torch.int32)


@torch.library.register_fake("gpt_eagle::experts_linear", lib=lib)
def _(x, weight, routing):
    return x.new_empty(x.shape[0], weight.shape[1])


# as `Backend.experts_linear` defines it; a routing is of lists on CUDA
experts_linear = torch.ops.gpt_eagle.experts_linear.default
