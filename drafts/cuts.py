"""The cuts of a distribution that a request may ask for beyond top-k, top-p and min-p.

Top-n-sigma, typical-p and XTC stand among the others in one pass; shaping.py says in which order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import above_margin, in_top_k, masked, precede, probabilities


def cut_shaped(
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    margin: Tensor,
    sigmas: Tensor,
    typical: Tensor,
    xtc: Tensor | None,
) -> Tensor:
    """Compute `reference.cut` with all cuts.

    scores: [B, N, V] fp32; xtc: [B, N] fp32, as in `shaping.NodeShaping`, None: it never acts; the
        others [B], as in `sampling.SamplingTensors` and `shaping.ShapedRows`
    """
    z = scores / temperature[:, None, None]
    z = z.masked_fill(z < least_of_sigmas(z, sigmas[:, None, None]), float("-inf"))
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    keep = in_top_k(z, top_k)
    keep = keep & are_typical(probabilities(ranked, keep), typical[:, None, None])
    keep = keep & precede(probabilities(ranked, keep), top_p[:, None, None])
    keep = above_margin(ranked, keep, margin)
    if xtc is not None:
        likely = keep & (probabilities(ranked, keep) >= xtc[:, :, None])
        # all but the least likely of them go
        keep &= ~likely | (likely.cumsum(-1) == likely.sum(-1, keepdim=True))
    return masked(z, index, keep)


def least_of_sigmas(z: Tensor, sigmas: Tensor) -> Tensor:
    """Return the best score less some standard deviations of all finite ones, [..., 1].

    Source: top-n-sigma (arXiv 2411.07641).
    """
    finite = z.isfinite()
    count = finite.sum(-1, keepdim=True)
    x = z.masked_fill(~finite, 0.0).double()  # its sums do not depend on the other rows
    mean = x.sum(-1, keepdim=True) / count
    variance = ((x - mean).square() * finite).sum(-1, keepdim=True) / count
    return (z.amax(-1, keepdim=True) - sigmas * variance.sqrt()).float()


def are_typical(p: Tensor, mass: Tensor) -> Tensor:
    """Return which tokens are typical: their information is near the mean, [..., V] bool.

    Those nearest to it stay, as many as it takes to have the mass; of equal ones the first.
    Source: locally typical sampling (arXiv 2202.00666).
    """
    information = -p.log()
    entropy = (p.double() * information.where(p > 0, 0.0)).sum(-1, keepdim=True)
    distance = (information - entropy).abs().where(p > 0, float("inf"))
    order = distance.argsort(dim=-1, stable=True)
    stays = precede(p.gather(-1, order), mass)
    return torch.zeros_like(stays).scatter(-1, order, stays)


OPERATORS = {"cut_shaped": cut_shaped}  # of a backend
