"""Linear layers with float weights, x W^T: the operator of CUDA, and references for tests.

Which code multiplies is the backend's (`Backend.linear`). On a CPU in bf16 it is cpu/matmul_bf16.h,
on CUDA in 16 bits cuda/qmatmul.py: a row's bits do not depend on the other rows of the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.library import lib

CHAINS = 16  # sums of an output; as in cpu/matmul_bf16.h
# tokens of a sequence whose matmul on CUDA is ours; many more are bound by arithmetic, and are left
# to cuBLAS
MOST_TOKENS = 64
HALVES = (torch.bfloat16, torch.float16)

lib.define("linear_halves(Tensor x, Tensor weight, str epilogue) -> Tensor")


def halves_product(x: Tensor, weight: Tensor, epilogue: str) -> Tensor:
    """Multiply rows by 16-bit weights on CUDA, x W^T, added in fp32.

    A row has the same bits for every number of rows.

    x: [..., K] bfloat16 or float16; weight: [N, K] in x's dtype
    epilogue: as for `backends.triton.qmatmul.run_product`
    Returns: [..., N] in x's dtype, or as the epilogue defines it.
    """
    return torch.ops.gpt_eagle.linear_halves(x, weight, epilogue)


def fits_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether `halves_product` takes these rows: few, in 16 bits."""
    halves = x.dtype == weight.dtype and x.dtype in HALVES
    return halves and x.shape[-2] <= MOST_TOKENS and weight.is_contiguous()


def empty_product(x: Tensor, weight: Tensor, epilogue: str) -> Tensor:
    """Allocate the result of a product on CUDA: of `halves_product`, or of quantized weights.

    weight: as for `backends.triton.qmatmul.run_product`, or a stack of experts
    """
    width = weight.shape[-2]
    if epilogue == "swiglu":
        width //= 2
    dtype = torch.float32 if epilogue == "fp32" else x.dtype
    return x.new_empty(*x.shape[:-1], width, dtype=dtype)


@torch.library.register_fake("gpt_eagle::linear_halves", lib=lib)
def _(x, weight, epilogue):
    return empty_product(x, weight, epilogue)


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
