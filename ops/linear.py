"""Linear layers with float weights, x W^T.

On a CPU in bf16 this is cpu/linear.cpp, which gives a row the same bits whatever other rows are in the batch. Anywhere
else, and where gradients are wanted, it is PyTorch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_cpu_operators


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    """Multiply rows by a weight, x W^T, and add a bias.

    x: [..., K]; weight: [N, K]; bias: [N]
    fp32_out: the result in fp32; without a GPU or our operators, or for training, it was rounded to x's dtype before
    Returns: [..., N] in x's dtype, or fp32.
    """
    if has_linear_kernel(x, weight):
        return torch.ops.gpt_eagle.linear_bf16(x, weight, bias, fp32_out)
    halves = x.dtype == weight.dtype != torch.float32
    if fp32_out and bias is None and x.is_cuda and halves and not torch.is_grad_enabled():
        return torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(
            0, x.shape[:-1]
        )
    y = F.linear(x, weight, bias)  # not an operator of ours, so that the compiler may fuse it
    return y.float() if fp32_out else y


def has_linear_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is our own operator, whose rows do not depend on each other: bf16 on a CPU, no gradients."""
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return has_cpu_operators()


def linear_bf16_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_bf16` in plain operations, bit for bit: of two values of k, the second is added first.

    x: [M, K] bf16; weight: [N, K] bf16. Returns: [M, N] fp32.
    """
    x, weight = (
        F.pad(t.float(), (0, t.shape[1] % 2)) for t in (x, weight)
    )  # [M, K], [N, K], K even
    y = x.new_zeros(len(x), len(weight))
    for k in range(0, x.shape[1], 2):
        y = y + x[:, k + 1, None] * weight[:, k + 1]  # a product of two bf16 is exact in fp32
        y = y + x[:, k, None] * weight[:, k]
    return y
