"""Register the gradients of `experts_linear`, and its dtype under autocast, on import.

Only training needs them (train_demo.py); decoding never computes a gradient. The gradient of the
rows is a product with the transposed weights. The gradient of the weights is an operator of its
own, because the set of experts that are hit is data: a CPU loops over the experts and gives idle
ones zeros; CUDA, where the host may not look, takes the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.experts import expert_of, experts_linear, rows_by_expert
from ops.library import lib

lib.define("experts_gradient(Tensor x, Tensor grad, Tensor routing, int experts) -> Tensor")


def experts_gradient_reference(x: Tensor, grad: Tensor, expert: Tensor, experts: int) -> Tensor:
    """Return the gradient of every expert's weight, in the plainest way.

    x: [P, K]; grad: [P, N], of the product; expert: [P] int64, of each row
    Returns: [E, N, K].
    """
    routed = F.one_hot(expert, experts).to(x.dtype)  # [P, E]
    return torch.einsum("pen,pk->enk", routed[:, :, None] * grad[:, None], x)


def _experts_gradient_cpu(x: Tensor, grad: Tensor, expert: Tensor, experts: int) -> Tensor:
    y = x.new_zeros(experts, grad.shape[1], x.shape[1])
    for e, rows in rows_by_expert(expert):
        y[e] = grad[rows].T @ x[rows]
    return y


def _experts_gradient_cuda(x: Tensor, grad: Tensor, lists: Tensor, experts: int) -> Tensor:
    return experts_gradient_reference(x, grad, expert_of(lists, experts), experts)


lib.impl("experts_gradient", _experts_gradient_cpu, "CPU")
lib.impl("experts_gradient", _experts_gradient_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::experts_gradient", lib=lib)
def _(x, grad, routing, experts):
    return x.new_empty(experts, grad.shape[1], x.shape[1])


def _experts_setup(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _experts_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, routing = ctx.saved_tensors
    weight_grad = torch.ops.gpt_eagle.experts_gradient(x, grad, routing, weight.shape[0])
    return experts_linear(grad, weight.transpose(1, 2), routing), weight_grad, None


torch.library.register_autograd(
    "gpt_eagle::experts_linear", _experts_backward, setup_context=_experts_setup, lib=lib
)
for _device in ("cpu", "cuda"):
    torch.library.register_autocast("gpt_eagle::experts_linear", _device, torch.bfloat16, lib=lib)
