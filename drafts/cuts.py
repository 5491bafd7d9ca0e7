"""All cuts of unlikely tokens in one pass: those of the flat files, top-n-sigma, typical-p and XTC.

A backend may have `cut_shaped` in a faster form; this is its definition. shaping.py says which
cuts these are, and where a sequence has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import precede, probabilities


def cut_shaped(
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    margin: Tensor,
    sigmas: Tensor,
    typical: Tensor,
    xtc: Tensor | None = None,
) -> Tensor:
    """Apply the temperature, then all cuts: `reference.cut` with further ones between.

    scores: [B, N, V] fp32; xtc: [B, N] fp32, from `shaping.ShapedRule.xtc_at`, None: it never acts;
        the others [B], as in `sampling.SamplingTensors` and `shaping.Shaped`
    """
    z = scores / temperature[:, None, None]
    z = z.masked_fill(z < least_of_sigmas(z, sigmas[:, None, None]), float("-inf"))
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(z.shape[-1], device=z.device)  # [V]
    most = top_k[:, None, None]  # [B, 1, 1]
    keep = (places < most) | (most == 0)
    keep = keep & are_typical(probabilities(ranked, keep), typical[:, None, None])
    keep = keep & precede(probabilities(ranked, keep), top_p[:, None, None])
    best = ranked.masked_fill(~keep, float("-inf")).amax(-1, keepdim=True)
    keep &= ranked >= best + margin[:, None, None]
    if xtc is not None:
        likely = keep & (probabilities(ranked, keep) >= xtc[:, :, None])
        # all but the least likely of them go
        keep &= ~likely | (likely.cumsum(-1) == likely.sum(-1, keepdim=True))
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), float("-inf"))


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
