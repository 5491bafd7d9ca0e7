"""Choosing tokens: temperature, top-k, top-p, and counter-based noise.

The default rule is exact and drafter-invariant. The target's choice at draw t is
argmax(log p + G_t), where the Gumbel noise G_t is a pure function of (seed, prompt, sample, draw,
token). By the Gumbel-max identity the choice is an exact draw from p. Nothing of it depends on the
draft, so the same seed gives the same tokens for every drafter and every tree. Drafts may read the
same noise ahead of time (Daliri, Musco, Suresh 2024).

The generator is Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor operations: stateless, equal
on CPU and GPU, safe in a captured graph. One call gives four words, so four tokens share a counter.
On a CPU the noise, the cuts and the choice are C++ operators (ops/cpu/sampling.cpp,
ops/cpu/topk.cpp), beside the plain ones below. Not here: the papers' residual rule
(extras/residual.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.library import on_cpp_device, uses_cpp
from options import Sampling

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments per round

# Separate noise for separate uses; the number sits in the top bits of the draw word.
CHOICE = 0
DRAFT = 1
ACCEPT = 2
DOMAIN_SHIFT = 30  # leaves 2^30 draws per conversation


class NoiseKey(NamedTuple):
    """The key of a sequence's noise. Fixed by the request, never by the place in the batch."""

    seed: Tensor  # [B, 2] int64, low and high 32 bits; [2]: of all sequences
    prompt: Tensor  # [B] int64, index of the prompt in the request
    sample: Tensor  # [B] int64, index of the sample of that prompt


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Run Philox4x32-10 on broadcastable int64 words in [0, 2^32). Returns: four int64 words.

    Source: Salmon et al. 2011; agrees with the known answers of Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * PHILOX_MULTIPLIERS[0]  # wraps modulo 2^64
        p1 = c2 * PHILOX_MULTIPLIERS[1]
        high0 = (p0 >> 32) & MASK32  # the shift is arithmetic, hence the mask
        high1 = (p1 >> 32) & MASK32
        c0 = high1 ^ c1 ^ k0
        c1 = p1 & MASK32
        c2 = high0 ^ c3 ^ k1
        c3 = p0 & MASK32
        k0 = (k0 + PHILOX_WEYL[0]) & MASK32
        k1 = (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniforms(key: NoiseKey, draws: Tensor, count: int, domain: int = CHOICE) -> Tensor:
    """Return uniform numbers in (0, 1).

    draws: [B, R] int64, the draw that each row of noise belongs to
    count: numbers per draw
    Returns: [B, R, count] fp32.
    """
    blocks = torch.arange((count + 3) // 4, device=draws.device)  # [C]
    word = draws[:, :, None] + (domain << DOMAIN_SHIFT)  # [B, R, 1]
    counter = (blocks, word, key.sample[:, None, None], key.prompt[:, None, None])
    words = philox4x32(counter, key.seed[..., None, None].unbind(-3))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1)  # [B, R, C, 4]
    bits = words.flatten(2)[:, :, :count]  # [B, R, count]
    # fp32 rounds the topmost values to 1, where the logarithms below would give infinity
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(key: NoiseKey, first: Tensor, rows: int, vocab: int, domain: int = CHOICE) -> Tensor:
    """Return standard Gumbel noise of consecutive draws, [B, rows, vocab] fp32.

    first: [B] int64, the first draw of each sequence
    """
    if on_cpp_device(first):
        return torch.ops.gpt_eagle.gumbel(
            key.seed, key.prompt, key.sample, first, rows, vocab, domain
        )
    draws = first[:, None] + torch.arange(rows, device=first.device)  # [B, R]
    # log1p keeps the upper tail fine
    return -torch.log(-torch.log1p(-uniforms(key, draws, vocab, domain)))


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, then top-k, then top-p, in fp32. Ties at a cut go to the lower token id.

    logits: [..., V] fp32
    Returns: [..., V] fp32 logits divided by the temperature, -inf for tokens cut away.
    """
    if uses_cpp(logits):
        return torch.ops.gpt_eagle.cut(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    z = logits / sampling.temperature
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return z
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[..., sampling.top_k :] = False
    if sampling.top_p < 1:
        p = ranked.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= p.cumsum(-1) - p < sampling.top_p  # mass before the token; the first is always kept
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), float("-inf"))
