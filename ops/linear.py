"""Linear layers with float weights, x W^T.

On a CPU in bf16 this is cpu/linear.cpp: a row's bits do not depend on the other rows of the batch.
Anywhere else, and where gradients are needed, it is PyTorch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_cpu_operators, needs_gradients


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    """Multiply rows by a weight, x W^T, and add a bias.

    x: [..., K]; weight: [N, K]; bias: [N]
    fp32_out: the result in fp32; rounded to x's dtype first where gradients are needed, where there
    is a bias, and without a GPU or our operators
    Returns: [..., N] in x's dtype, or fp32.
    """
    if has_linear_kernel(x, weight):
        return torch.ops.gpt_eagle.linear_bf16(x, weight, bias, fp32_out)
    halves = x.dtype == weight.dtype != torch.float32
    if fp32_out and bias is None and x.is_cuda and halves and not needs_gradients(x, weight):
        y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
        return y.unflatten(0, x.shape[:-1])
    y = F.linear(x, weight, bias)  # not an operator of ours, so that the compiler may fuse it
    return y.float() if fp32_out else y


def has_linear_kernel(x: Tensor, weight: Tensor) -> bool:
    """Check that `linear` is our own operator here: bf16 on a CPU, without gradients.

    The rows of its result do not depend on each other.
    """
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    return not needs_gradients(x, weight) and has_cpu_operators()


def linear_bf16_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `linear_bf16` plainly, bit for bit: of two values of k, the second is added first.

    x: [M, K] bf16; weight: [N, K] bf16. Returns: [M, N] fp32.
    """
    x = F.pad(x.float(), (0, x.shape[1] % 2))  # [M, K], K even
    weight = F.pad(weight.float(), (0, weight.shape[1] % 2))  # [N, K], K even
    y = x.new_zeros(len(x), len(weight))
    for k in range(0, x.shape[1], 2):
        y = y + x[:, k + 1, None] * weight[:, k + 1]  # a product of two bf16 is exact in fp32
        y = y + x[:, k, None] * weight[:, k]
    return y
