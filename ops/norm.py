"""RMSNorm, alone or after the residual sum, SwiGLU and GeGLU.

C++ on a CPU (cpu/layers.cpp), Triton on CUDA (cuda/norm.py); elsewhere plain operations, which the
compiler fuses with the operations around them. A row has the same bits in eager and in compiled
steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_triton, lib, needs_gradients, uses_cpp

# features whose squares are added first, in one block of threads (cuda/epilogues.py)
PART = 64

lib.define("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)")
lib.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")


def gain_of(weight: Tensor, plus_one: bool) -> Tensor:
    """Return the factors of a normed row, [F]; those that count from one are exact in fp32."""
    return 1 + weight.float() if plus_one else weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Divide every row by its root mean square, with fp32 statistics. Source: arXiv 1910.07467.

    x: [..., F], in the weight's dtype or fp32; weight: [F]; plus_one: it counts from one
    Returns: [..., F] in x's dtype.
    """
    is_bf16 = weight.dtype == torch.bfloat16
    gain = gain_of(weight, plus_one)
    if is_bf16 and not needs_gradients(x, weight) and uses_cpp(x, "norm"):
        return torch.ops.gpt_eagle.rms_norm(x, gain, eps)
    if x.is_cuda and x.dtype == weight.dtype and not needs_gradients(x, weight):
        return torch.ops.gpt_eagle.norm(x, gain, eps)
    return rms_norm_reference(x, gain, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` with torch's own operators."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(x.dtype) * weight).to(x.dtype)


def add(x: Tensor, delta: Tensor) -> Tensor:
    """Add a layer's output to the residual stream.

    x, delta: [..., F]
    """
    return (x + delta).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `add` and the `rms_norm` of its result; weight: [F]. Returns: both, [..., F] each."""
    served = weight.dtype in (x.dtype, torch.float32)
    if x.is_cuda and served and not needs_gradients(x, delta, weight):
        return torch.ops.gpt_eagle.add_norm(x, delta, weight, eps)
    x = add(x, delta)
    return x, rms_norm(x, weight, eps)


def add_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` with torch's own operators."""
    x = add(x, delta)
    return x, rms_norm_reference(x, weight, eps)


def swiglu(y: Tensor) -> Tensor:
    """Multiply the SiLU of the first half of every row by the second half.

    y: [..., 2 F]. Returns: [..., F]. Source: arXiv 2002.05202.
    """
    if not needs_gradients(y) and uses_cpp(y, "norm"):
        return torch.ops.gpt_eagle.swiglu(y)
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(y: Tensor) -> Tensor:
    """Multiply the GELU of the first half of every row, by its tanh form, by the second half.

    y: [..., 2 F]. Returns: [..., F]. Sources: arXiv 2002.05202, 1606.08415.
    """
    if not needs_gradients(y) and uses_cpp(y, "norm"):
        return torch.ops.gpt_eagle.geglu(y)
    gate, up = y.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _add_norm_cuda(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not has_triton("norm"):
        return add_norm_reference(x, delta, weight, eps)
    import ops.cuda.norm

    with torch.cuda.device(x.device):
        return ops.cuda.norm.add_norm(x, delta, weight, eps)


def _norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not has_triton("norm"):
        return rms_norm_reference(x, weight, eps)
    import ops.cuda.norm

    with torch.cuda.device(x.device):
        _, y = ops.cuda.norm.add_norm(x, None, weight, eps)
        return y


@torch.library.register_fake("gpt_eagle::norm", lib=lib)
def _(x, weight, eps):
    return torch.empty_like(x)


@torch.library.register_fake("gpt_eagle::add_norm", lib=lib)
def _(x, delta, weight, eps):
    return torch.empty_like(x), torch.empty_like(x)


lib.impl("norm", _norm_cuda, "CUDA")
lib.impl("add_norm", _add_norm_cuda, "CUDA")
