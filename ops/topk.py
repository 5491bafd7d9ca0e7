"""The argmax of every row of scores, with optional noise, and the k best with their logsumexp.

C++ on a CPU (cpu/topk.cpp), Triton on CUDA (cuda/topk.py); elsewhere plain operations, which the
compiler fuses with the operations around them. A row has the same bits in eager and in compiled
steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import has_triton, is_plain, lib, uses_cpp

lib.define("topk_logsumexp(Tensor scores, int k) -> (Tensor, Tensor, Tensor)")


def best(scores: Tensor, noise: Tensor | None = None, row: Tensor | None = None) -> Tensor:
    """Find the best token of every row of scores; of equal ones the lowest.

    scores: [B, N, V] fp32
    noise: [B, R, V] fp32, added to the scores; None: no noise
    row: [B, N] int64, the row of the noise for each node
    Returns: [B, N] int64.
    """
    if uses_cpp(scores, "topk"):
        return torch.ops.gpt_eagle.best(scores, noise, row)
    # in many blocks a row, where a reduction has one
    if scores.is_cuda and noise is None and not is_plain("topk"):
        _, index, _ = topk_logsumexp(scores, 1)
        return index.squeeze(-1)
    return best_reference(scores, noise, row)


def best_reference(
    scores: Tensor, noise: Tensor | None = None, row: Tensor | None = None
) -> Tensor:
    """Compute `best` with torch's own operators."""
    if noise is not None:
        index = row[:, :, None].expand(-1, -1, noise.shape[2])
        scores = scores + noise.gather(1, index)  # [B, N, V]
    return scores.argmax(-1)


def topk_logsumexp(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k best of every row of scores, best first, and the row's logsumexp.

    scores: [..., V] float32
    Returns: values and indices, both [..., k]; the logsumexp, [..., 1]. Equal values come in the
    order of their indices, except where torch.topk serves, which has no such rule.
    Raises: ValueError for scores of another dtype.
    """
    if scores.dtype != torch.float32:
        raise ValueError(
            f"topk_logsumexp takes float32 scores; these are {scores.dtype}: convert them"
        )
    if scores.is_cuda:
        return torch.ops.gpt_eagle.topk_logsumexp(scores, k)
    if uses_cpp(scores, "topk"):
        return torch.ops.gpt_eagle.topk(scores, k)
    # plain operations: the compiler fuses them with those that computed the scores
    return topk_logsumexp_reference(scores, k)


def topk_logsumexp_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `topk_logsumexp` with torch's own operators."""
    values, index = scores.topk(k, dim=-1)
    return values, index, scores.logsumexp(-1, keepdim=True)


def _topk_logsumexp_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if has_triton("topk"):
        import ops.cuda.topk

        if k <= ops.cuda.topk.MOST:
            with torch.cuda.device(scores.device):
                return ops.cuda.topk.topk_logsumexp(scores, k)
    return topk_logsumexp_reference(scores, k)


lib.impl("topk_logsumexp", topk_logsumexp_reference, "CPU")
lib.impl("topk_logsumexp", _topk_logsumexp_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::topk_logsumexp", lib=lib)
def _(scores, k):
    shape = scores.shape[:-1]
    return (
        scores.new_empty(*shape, k),
        scores.new_empty(*shape, k, dtype=torch.int64),
        scores.new_empty(*shape, 1),
    )
