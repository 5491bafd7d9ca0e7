"""CUDA kernel, in Triton: add a layer's output to the residual stream, and compute the next norm.

One block of threads per row, for any number of rows, so that a row's bits depend on the row alone.
After our own products, epilogues.py does this without a launch of its own; `add_unscaled` begins
that for the first layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    F,
    eps,
    WIDTH: tl.constexpr,
):
    """Compute a row of x + delta, and of its norm.

    x: [M, F]; delta: [M, F]; None: neither a delta nor a sum
    weight: [F]; WIDTH: F padded to a power of two
    Writes: sum, y, [M, F] each.
    """
    i = tl.arange(0, WIDTH)
    live = i < F
    weight = tl.load(weight_ptr + i, mask=live, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * F + i
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    if delta_ptr is not None:
        x = (x.to(tl.float32) + tl.load(delta_ptr + at, mask=live, other=0.0)).to(dtype)
        tl.store(sum_ptr + at, x, mask=live)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / F + eps)
    y = (wide * scale).to(dtype).to(tl.float32) * weight
    tl.store(y_ptr + at, y.to(dtype), mask=live)


def warps_of(F: int) -> int:
    """Return the warps of a block, with 16 values per thread."""
    return min(16, max(1, triton.next_power_of_2(F) // 512))


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` of reference.py; without a delta the sum is x.

    Allocates its results, and nothing else; never waits.
    """
    F = x.shape[-1]
    x = x.contiguous()
    y = torch.empty_like(x)
    total = x
    if delta is not None:
        assert delta.shape == x.shape, delta.shape
        delta = delta.contiguous()
        total = torch.empty_like(x)
    add_norm_kernel[(x.numel() // F,)](
        x,
        delta,
        weight,
        total,
        y,
        F,
        eps,
        WIDTH=triton.next_power_of_2(F),
        num_warps=warps_of(F),
    )
    return total, y
