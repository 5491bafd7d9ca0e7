"""Choosing tokens: temperature, top-k, top-p, min-p, and counter-based noise.

The default rule is exact and drafter-invariant. The target's choice at draw t is
argmax(log p + G_t), where the Gumbel noise G_t is a pure function of (seed, prompt, sample, draw,
token). By the Gumbel-max identity the choice is an exact draw from p. Nothing of it depends on the
draft, so the same seed gives the same tokens for every drafter and every tree. Drafts may read the
same noise ahead of time (Daliri, Musco, Suresh 2024).

The generator is Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor operations: stateless, equal
on CPU and GPU, safe in a captured graph. One call gives four words, so four tokens share a counter.
Every sequence has its own parameters (`SamplingTensors`). A greedy one's noise is 0 and its scores
are the logits themselves, so that it may stand beside others; where all are greedy, no step here
runs.
On a CPU the noise, the cuts and the choice are C++ operators (ops/cpu/sampling.cpp,
ops/cpu/topk.cpp), beside the plain ones below. Not here: the papers' residual rule
(extras/residual.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.library import on_cpp_device, uses_cpp
from ops.topk import best
from options import Sampling

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments per round

# Separate noise for separate uses; the number sits in the top bits of the draw word.
CHOICE = 0
DRAFT = 1
ACCEPT = 2
DOMAIN_SHIFT = 30  # leaves 2^30 draws per conversation

# scores over a lower one may be infinite in fp32; noise decides between equal scores only at both
LEAST_TEMPERATURE = 1e-30
LEAST_TOP_P = 1e-30  # fp32 holds it


class SamplingMode(IntEnum):
    """How tokens are chosen. A higher mode also serves sequences of a lower one."""

    GREEDY = 0  # the argmax
    NOISY = 1  # temperature and noise before it
    TRUNCATED = 2  # top-k, top-p and min-p too

    @staticmethod
    def needed_by(params: Sampling) -> SamplingMode:
        """Return the mode that sampling with these parameters needs."""
        if params.temperature == 0:
            return SamplingMode.GREEDY
        if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
            return SamplingMode.NOISY
        return SamplingMode.TRUNCATED


class SamplingTensors(NamedTuple):
    """Keys of the noise and parameters of the choice, one row per sequence.

    The key is fixed by the request, never by the place in the batch. Greedy rows hold neutral
    values (temperature 1, nothing cut), so that they can share a batch.
    """

    seed: Tensor  # [B, 2] int64, low and high 32 bits; [2]: of all sequences
    prompt: Tensor  # [B] int64, index of the prompt in the request
    sample: Tensor  # [B] int64, index of the sample of that prompt
    # [B] bool, the greedy sequences, whose noise is 0; None: there are none
    greedy: Tensor | None = None
    temperature: Tensor | None = None  # [B] fp32
    # None where no sequence has any of these:
    top_k: Tensor | None = None  # [B] int64, 0 keeps all
    top_p: Tensor | None = None  # [B] fp32, 1 keeps all
    margin: Tensor | None = None  # [B] fp32, log of min-p; minus infinity keeps all

    @staticmethod
    def from_params(
        each: Sequence[Sampling], device: torch.device | str = "cpu", seed: int = 0
    ) -> SamplingTensors:
        """Make the tensors of B sequences, all of one seed, as samples 0 of prompts 0."""
        own = [s if s.temperature else Sampling(1.0) for s in each]
        temperature = [max(s.temperature, LEAST_TEMPERATURE) for s in own]
        top_p = [max(s.top_p, LEAST_TOP_P) for s in own]
        margin = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in own]
        words = torch.tensor([[seed & MASK32, seed >> 32]], device=device)
        return SamplingTensors(
            words.repeat(len(own), 1),
            torch.zeros(len(own), dtype=torch.long, device=device),
            torch.zeros(len(own), dtype=torch.long, device=device),
            torch.tensor([s.temperature == 0 for s in each], device=device),
            torch.tensor(temperature, dtype=torch.float32, device=device),
            torch.tensor([s.top_k for s in own], device=device),
            torch.tensor(top_p, dtype=torch.float32, device=device),
            torch.tensor(margin, dtype=torch.float32, device=device),
        )

    def needed(self, mode: SamplingMode) -> SamplingTensors | None:
        """Return the part that a step of a mode reads; None when all sequences are greedy."""
        if mode == SamplingMode.GREEDY:
            return None
        if mode == SamplingMode.NOISY:
            return SamplingTensors(*self[:5])
        return self

    def cuts(self) -> tuple[Tensor | None, ...]:
        """Return the fields that `process` reads, in the order of the C++ operator."""
        return self.temperature, self.top_k, self.top_p, self.margin


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


def uniforms(key: SamplingTensors, draws: Tensor, count: int, domain: int = CHOICE) -> Tensor:
    """Return uniform numbers in (0, 1).

    draws: [B, R] int64, the draw that each row of noise belongs to
    count: numbers per draw
    Returns: [B, R, count] fp32.
    """
    # masked, though it is small: the compiler takes an index, times a constant, for 32 bits wide
    blocks = torch.arange((count + 3) // 4, device=draws.device) & MASK32  # [C]
    word = draws[:, :, None] + (domain << DOMAIN_SHIFT)  # [B, R, 1]
    counter = (blocks, word, key.sample[:, None, None], key.prompt[:, None, None])
    words = philox4x32(counter, key.seed[..., None, None].unbind(-3))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1)  # [B, R, C, 4]
    bits = words.flatten(2)[:, :, :count]  # [B, R, count]
    # fp32 rounds the topmost values to 1, where the logarithms below would give infinity
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(
    key: SamplingTensors, first: Tensor, rows: int, vocab: int, domain: int = CHOICE
) -> Tensor:
    """Return standard Gumbel noise of consecutive draws, [B, rows, vocab] fp32.

    first: [B] int64, the first draw of each sequence
    """
    if on_cpp_device(first, "topk"):
        return torch.ops.gpt_eagle.gumbel(
            key.seed, key.prompt, key.sample, key.greedy, first, rows, vocab, domain
        )
    draws = first[:, None] + torch.arange(rows, device=first.device)  # [B, R]
    # log1p keeps the upper tail fine
    noise = -torch.log(-torch.log1p(-uniforms(key, draws, vocab, domain)))
    if key.greedy is None:
        return noise
    return noise.masked_fill(key.greedy[:, None, None], 0.0)


def process(logits: Tensor, rule: SamplingTensors) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p, in fp32.

    Of tokens that tie at the cut of top-k or top-p the lower ids stay.
    logits: [B, N, V] fp32
    Returns: [B, N, V] fp32 logits divided by the temperature, -inf for tokens cut away.
    """
    if uses_cpp(logits, "topk"):
        return torch.ops.gpt_eagle.cut(logits, *rule.cuts())
    z = logits / rule.temperature[:, None, None]
    if rule.top_k is None:
        return z
    top_k = rule.top_k[:, None, None]  # [B, 1, 1]
    top_p = rule.top_p[:, None, None]
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(z.shape[-1], device=z.device)  # [V]
    among_k = (places < top_k) | (top_k == 0)
    p = ranked.masked_fill(~among_k, float("-inf")).softmax(-1)
    total = cumsum_in_blocks(p) if p.is_cuda else p.cumsum(-1)
    before = total - p  # mass before the token; the first is always kept
    keep = among_k & ((before < top_p) | (top_p == 1))  # rounding may add up to more than 1
    keep &= ranked >= ranked[..., :1] + rule.margin[:, None, None]
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), float("-inf"))


def cumsum_in_blocks(p: Tensor, block: int = 256) -> Tensor:
    """Add up along the last axis, [..., V]: the compiler fails at long scans (torch 2.11)."""
    parts = F.pad(p, (0, -p.shape[-1] % block)).unflatten(-1, (-1, block)).cumsum(-1)
    ends = parts[..., -1]  # [..., V / block]
    before = ends.cumsum(-1) - ends
    return (parts + before[..., None]).flatten(-2)[..., : p.shape[-1]]


def choose(
    scores: Tensor,
    rule: SamplingTensors | None,
    noise: Tensor | None,
    draw: Tensor,
    allowed: Tensor | None = None,
) -> Tensor:
    """Choose the token after every node, [B, N] int64, as `decode.pick_tokens`.

    scores: [B, N, V] fp32
    """
    if allowed is not None:
        scores = torch.where(allowed, scores, float("-inf"))
    if noise is not None:
        scores = process(scores, rule)
    return best(scores, noise, draw)
