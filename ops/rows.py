"""Operators on rows: the norm of features; of scores the best, and the best few with the row's normalizer.

cpu/layers.cpp, cpu/choice.cpp and cpu/rows.cpp on a CPU, cuda/topk.py on CUDA, plain operations elsewhere. In C++ a
row gets the same bits in eager and in compiled steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import has_triton, lib, served_in_cpp, triton_products

lib.define("add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)")
lib.define("topk_logsumexp(Tensor scores, int k) -> (Tensor, Tensor, Tensor)")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, with fp32 statistics. Source: arXiv 1910.07467.

    x: [..., F]; weight: [F]
    Returns: [..., F].
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


def add(x: Tensor, delta: Tensor) -> Tensor:
    """Add a layer's output to the stream. x: [..., F]; delta: [..., F], or its partial sums, [S, ..., F] fp32."""
    return (x + delta.sum(0)).to(x.dtype) if delta.dim() > x.dim() else x + delta


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add`, and the `rms_norm` of that; weight: [F]. Returns both, [..., F] each."""
    if x.is_cuda and x.dtype == weight.dtype and not torch.is_grad_enabled():
        return torch.ops.gpt_eagle.add_norm(x, delta, weight, eps)
    x = add(x, delta)
    return x, rms_norm(x, weight, eps)


def add_norm_reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same by torch's own operators."""
    x = add(x, delta)
    return x, rms_norm_reference(x, weight, eps)


def swiglu(y: Tensor) -> Tensor:
    """SiLU of the first half of every row, times the second. y: [..., 2 F]. Source: arXiv 2002.05202."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def best(scores: Tensor, noise: Tensor | None = None, row: Tensor | None = None) -> Tensor:
    """Find the best token of every row of scores; of equal ones the lowest.

    scores: [B, N, V] fp32
    noise: [B, R, V] fp32, of which row [B, N] int64 is added to each node's scores; None: nothing is
    Returns: [B, N] int64.
    """
    if served_in_cpp(scores):
        return torch.ops.gpt_eagle.best(scores, noise, row)
    return best_reference(scores, noise, row)


def best_reference(scores: Tensor, noise: Tensor | None = None, row: Tensor | None = None) -> Tensor:
    """The same by torch's own operators."""
    if noise is not None:
        scores = scores + noise.gather(1, row[:, :, None].expand(-1, -1, noise.shape[2]))  # [B, N, V]
    return scores.argmax(-1)


def topk_logsumexp(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best of every row of scores, best first, and the logarithm of the row's sum of exponentials.

    scores: [..., V] float32
    Returns: their values and indices, both [..., k]; the logsumexp, [..., 1]. Equal values come in the order of
    their indices, except where torch.topk serves, which has no such rule.
    Raises: ValueError for scores of another dtype.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"topk_logsumexp takes float32 scores; these are {scores.dtype}: convert them")
    if scores.is_cuda:
        return torch.ops.gpt_eagle.topk_logsumexp(scores, k)
    if served_in_cpp(scores):
        return torch.ops.gpt_eagle.topk(scores, k)
    return topk_logsumexp_reference(scores, k)  # plain operations: the compiler fuses them with what made the scores


def topk_logsumexp_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's own operators."""
    return *scores.topk(k, dim=-1), scores.logsumexp(-1, keepdim=True)


def _topk_logsumexp_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if has_triton():
        import ops.cuda.topk

        if k <= ops.cuda.topk.MOST:
            with torch.cuda.device(scores.device):
                return ops.cuda.topk.topk_logsumexp(scores, k)
    return topk_logsumexp_reference(scores, k)


def _add_norm_cuda(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not has_triton():
        return add_norm_reference(x, delta, weight, eps)
    import ops.cuda.rows

    with torch.cuda.device(x.device):
        return ops.cuda.rows.add_norm(x, delta, weight, eps, triton_products().device_of(x.device.index))


@torch.library.register_fake("gpt_eagle::add_norm", lib=lib)
def _(x, delta, weight, eps):
    return torch.empty_like(x), torch.empty_like(x)


lib.impl("add_norm", _add_norm_cuda, "CUDA")
lib.impl("topk_logsumexp", topk_logsumexp_reference, "CPU")
lib.impl("topk_logsumexp", _topk_logsumexp_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::topk_logsumexp", lib=lib)
def _(scores, k):
    shape = scores.shape[:-1]
    return scores.new_empty(*shape, k), scores.new_empty(*shape, k, dtype=torch.int64), scores.new_empty(*shape, 1)
