"""Linear layers with float weights, x W^T.

On a CPU in bf16 this is cpu/matmul_bf16.h, on CUDA in 16 bits cuda/qmatmul.py: a row's bits do not
depend on the other rows of the batch. Anywhere else, where gradients are needed, and for long
prompts on CUDA, it is PyTorch's.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import cuda_products, has_cpu_operators, is_plain, lib, needs_gradients

# tokens of a sequence whose product is ours on CUDA; many more are bound by arithmetic, and are
# left to cuBLAS
MOST_TOKENS = 64
CHAINS = 16  # sums of an output; as in cpu/matmul_bf16.h
HALVES = (torch.bfloat16, torch.float16)
WIDENED = (torch.bfloat16, torch.float32)  # dtypes of rows beside weights in bf16
# not `has_triton`, whose note is about products that are slow without it
HAS_TRITON = importlib.util.find_spec("triton") is not None

lib.define("linear_halves(Tensor x, Tensor weight, str epilogue) -> Tensor")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Tensor:
    """Multiply rows by a weight, x W^T, and add a bias.

    x: [..., K], in the weight's dtype, or in fp32, which is rounded to it
    weight: [N, K]; bias: [N]
    fp32_out: the result in fp32; rounded to the weight's dtype first where gradients are needed,
    where there is a bias on CUDA, and without a GPU or our operators
    Returns: [..., N] in x's dtype, or fp32.
    """
    if has_cuda_product(x, weight):
        if bias is None:
            return halves_product(x, weight, "fp32" if fp32_out else "none")
        if is_plain("fused"):
            y = (halves_product(x, weight, "fp32") + bias).to(x.dtype)
        else:  # of ops/epilogues.py
            y, *_ = torch.ops.gpt_eagle.add_product(x, weight, None, bias, None, 0.0)
        return y.float() if fp32_out else y
    if has_linear_kernel(x, weight):
        return torch.ops.gpt_eagle.matmul(x, weight, None, bias, len(weight), fp32_out)
    halves = x.dtype == weight.dtype != torch.float32
    if fp32_out and bias is None and x.is_cuda and halves and not needs_gradients(x, weight):
        y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
        return y.unflatten(0, x.shape[:-1])
    # not an operator of ours, so that the compiler may fuse it
    y = F.linear(x.to(weight.dtype), weight, bias)
    if x.dtype != weight.dtype:
        return y.to(x.dtype)
    return y.float() if fp32_out else y


def has_linear_kernel(x: Tensor, weight: Tensor, family: str = "products") -> bool:
    """Return whether `linear` is our own operator here: weights in bf16 on a CPU, no gradients.

    The rows of its result do not depend on each other.
    """
    if x.device.type != "cpu" or weight.dtype != torch.bfloat16 or x.dtype not in WIDENED:
        return False
    return not needs_gradients(x, weight) and has_cpu_operators(family)


def has_cuda_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether `halves_product` serves here: 16 bits, few tokens, CUDA, no gradients."""
    if not x.is_cuda or x.dtype != weight.dtype or x.dtype not in HALVES:
        return False
    if x.shape[-2] > MOST_TOKENS or not weight.is_contiguous() or needs_gradients(x, weight):
        return False
    return HAS_TRITON and not is_plain("products")


def halves_product(x: Tensor, weight: Tensor, epilogue: str) -> Tensor:
    """Multiply rows by 16-bit weights on CUDA, x W^T, added in fp32.

    A row has the same bits for every number of rows.

    x: [..., K] bfloat16 or float16; weight: [N, K] in x's dtype
    epilogue: as for `ops.cuda.qmatmul.run_product`
    Returns: [..., N] in x's dtype, or as the epilogue defines it.
    """
    return torch.ops.gpt_eagle.linear_halves(x, weight, epilogue)


def _linear_halves_cuda(x: Tensor, weight: Tensor, epilogue: str) -> Tensor:
    products = cuda_products()
    device = products.device_of(x.device.index)
    with torch.cuda.device(x.device):
        return products.matmul(x, weight, None, device, epilogue)


def empty_product(x: Tensor, weight: Tensor, epilogue: str) -> Tensor:
    """Allocate the result of a product on CUDA: of `halves_product`, or of quantized weights.

    weight: as for `ops.cuda.qmatmul.run_product`, or a stack of experts
    """
    width = weight.shape[-2]
    if epilogue == "swiglu":
        width //= 2
    dtype = torch.float32 if epilogue == "fp32" else x.dtype
    return x.new_empty(*x.shape[:-1], width, dtype=dtype)


@torch.library.register_fake("gpt_eagle::linear_halves", lib=lib)
def _(x, weight, epilogue):
    return empty_product(x, weight, epilogue)


lib.impl("linear_halves", _linear_halves_cuda, "CUDA")


def linear_bf16_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in bf16 plainly, bit for bit as a CPU does: an output has CHAINS sums.

    On AMX tiles it is `linear_tiles_reference`.
    x: [M, K] bf16; weight: [N, K] bf16. Returns: [M, N] fp32.
    """
    rest = -x.shape[1] % (2 * CHAINS)
    x = F.pad(x.float(), (0, rest)).view(len(x), 1, -1, CHAINS, 2)
    weight = F.pad(weight.float(), (0, rest)).view(1, len(weight), -1, CHAINS, 2)
    y = x.new_zeros(x.shape[0], weight.shape[1], CHAINS)
    for step in range(x.shape[2]):  # a product of two bf16 is exact in fp32
        y = y + x[:, :, step, :, 1] * weight[:, :, step, :, 1]
        y = y + x[:, :, step, :, 0] * weight[:, :, step, :, 0]
    while y.shape[-1] > 1:
        left, right = y.chunk(2, -1)
        y = left + right
    return y.squeeze(-1)


def linear_tiles_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in bf16 plainly, bit for bit as on AMX tiles (cpu/amx.h).

    Each 32 of k have a sum of the even and one of the odd; both are added, then added to the total.
    The unit takes numbers below 2^-126 as zeros, which this does not.
    x: [M, K] bf16; weight: [N, K] bf16. Returns: [M, N] fp32.
    """
    rest = -x.shape[1] % 32
    x = F.pad(x.float(), (0, rest)).view(len(x), 1, -1, 16, 2)
    weight = F.pad(weight.float(), (0, rest)).view(1, len(weight), -1, 16, 2)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for step in range(x.shape[2]):
        sums = torch.zeros_like(y)[..., None].repeat(1, 1, 2)  # [M, N, 2]: of even k, of odd k
        for pair in range(16):  # a product of two bf16 is exact in fp32
            sums = sums + x[:, :, step, pair] * weight[:, :, step, pair]
        y = y + (sums[..., 0] + sums[..., 1])
    return y
