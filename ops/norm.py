"""The root-mean-square norm: cpu/layers.cpp on a CPU in bfloat16, plain operations elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import served_in_cpp


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, with fp32 statistics. Source: arXiv 1910.07467.

    x: [..., F]; weight: [F]
    Returns: [..., F]. In C++ a row gets the same bits in eager and in compiled steps.
    """
    trained = torch.is_grad_enabled() and weight.requires_grad
    if x.dtype == weight.dtype == torch.bfloat16 and not trained and served_in_cpp(x):
        return torch.ops.gpt_eagle.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch's own operators."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
