"""Choosing tokens: temperature, top-k, top-p, counter-based noise, and the papers' residual rule.

The default rule is exact and drafter-invariant. The target's choice at draw t is argmax(log p + G_t), where the
Gumbel noise G_t is a pure function of (seed, prompt, sample, draw, token). By the Gumbel-max identity the choice
is an exact draw from p; because nothing of it depends on the draft, the same seed gives the same tokens for every
drafter and every tree. Drafts may read the same noise ahead of time (Daliri, Musco, Suresh 2024).

The generator is Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor operations: stateless, equal on CPU and
GPU, safe in a captured graph. One call gives four words, so four tokens share a counter.

The residual rule (EAGLE-1, arXiv 2401.15077, Algorithm 1; a chain is standard speculative sampling) is kept
beside it; it takes its uniforms as a tensor, so that recorded runs can be replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draft_tree import DraftTree
from ops.library import on_cpu_operators, served_in_cpp

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments per round

# Separate noise for separate uses; the number sits in the top bits of the draw word.
CHOICE, DRAFT, ACCEPT = 0, 1, 2
DOMAIN_SHIFT = 30  # leaves 2^30 draws per conversation


class NoiseKey(NamedTuple):
    """Which noise a row reads. Fixed by the request, never by the batch row."""

    seed: Tensor  # [2] int64, low and high 32 bits
    prompt: Tensor  # [B] int64, index of the prompt in the request
    sample: Tensor  # [B] int64, index of the sample of that prompt


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on broadcastable int64 words in [0, 2^32). Returns: four int64 words.

    Source: Salmon et al. 2011; agrees with the known answers of Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]  # wrap modulo 2^64
        high0, high1 = (p0 >> 32) & MASK32, (p1 >> 32) & MASK32  # the shift is arithmetic, hence the mask
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & MASK32, high0 ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniforms(key: NoiseKey, draws: Tensor, count: int, domain: int = CHOICE) -> Tensor:
    """Uniform numbers in (0, 1).

    draws: [B, R] int64, the draw each row of noise belongs to
    count: numbers per draw
    Returns: [B, R, count] fp32.
    """
    blocks = torch.arange((count + 3) // 4, device=draws.device)  # [C]
    word = draws[:, :, None] + (domain << DOMAIN_SHIFT)  # [B, R, 1]
    counter = (blocks, word, key.sample[:, None, None], key.prompt[:, None, None])
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, (key.seed[0:1], key.seed[1:2]))), dim=-1)
    bits = words.flatten(2)[:, :, :count]  # [B, R, count]
    # fp32 rounds the topmost values to 1, where the logarithms below would give infinity
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(key: NoiseKey, draws: Tensor, vocab: int, domain: int = CHOICE) -> Tensor:
    """Standard Gumbel noise, [B, R, vocab] fp32. draws: [B, R] int64."""
    if on_cpu_operators(draws):
        return torch.ops.gpt_eagle.gumbel(key.seed, key.prompt, key.sample, draws, vocab, domain)
    return -torch.log(-torch.log1p(-uniforms(key, draws, vocab, domain)))  # log1p keeps the upper tail fine


class Sampling(NamedTuple):
    """How the target's logits become a distribution."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens with at least this mass


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top-k, then top-p, in fp32. Ties at a cut go to the lower token id.

    logits: [..., V] fp32
    Returns: [..., V] fp32 logits divided by the temperature, -inf for tokens cut away.
    """
    z = logits / sampling.temperature
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return z
    if served_in_cpp(logits):
        return torch.ops.gpt_eagle.cut(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    ranked, index = z.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[..., sampling.top_k :] = False
    if sampling.top_p < 1:
        p = ranked.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= p.cumsum(-1) - p < sampling.top_p  # mass before the token; the first is always kept
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), float("-inf"))


def choose(logits: Tensor, sampling: Sampling, noise: Tensor | None = None, draw: Tensor | None = None) -> Tensor:
    """The target's own token after each node; ties go to the lowest id.

    logits: [B, N, V] fp32
    noise: [B, R, V], Gumbel noise of R draws; None when greedy; draw: [B, N] int64, which of them is each node's
    Returns: [B, N] int64.
    """
    if noise is not None and (sampling.top_k > 0 or sampling.top_p < 1):
        logits, sampling = process(logits, sampling), Sampling(1.0)
    if served_in_cpp(logits):
        return torch.ops.gpt_eagle.best(logits, sampling.temperature, noise, draw)
    if noise is None:
        return logits.argmax(-1)
    at_node = noise.gather(1, draw[:, :, None].expand(-1, -1, noise.shape[2]))  # [B, N, V]
    return (process(logits, sampling) + at_node).argmax(-1)


# ---------------------------------------------------------------------------------------- residual rule


class Residual(NamedTuple):
    """Outcome of the residual rule."""

    node: Tensor  # [B] int64, the deepest accepted node
    p: Tensor  # [B, V] fp32, distribution of the token after it


def residual_accept(tree: DraftTree, p: Tensor, uniform: Tensor, depth: int, width: int) -> Residual:
    """Multi-round rejection sampling down the tree.

    At each node its children are tried in node order: accept with min(1, p/q); after a rejection p becomes
    norm(max(0, p - q)) and q loses the rejected token. Where `tree.q` is None the children are distinct and
    certain (q = 1): accept with p, and a rejected token leaves p. One uniform is used per child tried.

    p: [B, N, V] fp32, the target's distribution after each node
    uniform: [B, U] fp32, consumed in order; U more than the number of children tried
    depth, width: bounds on the depth of the tree and on the children of a node
    Returns: where the walk ended and the distribution of the next token.
    Source: EAGLE-1 (arXiv 2401.15077) Algorithm 1; SpecInfer (arXiv 2305.09781).
    """
    numbers = torch.arange(tree.tokens.shape[1], device=p.device)  # [N]
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & (numbers > 0)  # [B, N, N]
    rank = (siblings & (numbers < numbers[:, None])).sum(-1)  # [B, N], place among the parent's children
    node = torch.zeros(p.shape[0], dtype=torch.long, device=p.device)  # [B]
    used = torch.zeros_like(node)
    walking = torch.ones_like(node, dtype=torch.bool)  # [B], a node that rejected all its children ends the walk
    current = p[:, 0]  # [B, V]
    for _ in range(depth):
        parent, moved = node, torch.zeros_like(node, dtype=torch.bool)
        proposal = _at(tree.q, parent) if tree.q is not None else None  # [B, V]
        for r in range(width):
            child_here = (tree.parents == parent[:, None]) & (rank == r) & (numbers > 0) & tree.valid  # [B, N]
            child = child_here.int().argmax(-1, keepdim=True)  # [B, 1]
            trying = child_here.any(-1) & walking & ~moved
            token = tree.tokens.gather(1, child)  # [B, 1]
            p_x = current.gather(1, token).squeeze(1)
            q_x = proposal.gather(1, token).squeeze(1) if proposal is not None else torch.ones_like(p_x)
            u = uniform.gather(1, used[:, None]).squeeze(1)
            used = used + trying
            taken = trying & (q_x > 0) & (u * q_x <= p_x)
            rejected = (trying & ~taken & (q_x > 0))[:, None]
            current = torch.where(rejected, _residual(current, proposal, token), current)
            if proposal is not None:  # a tried token leaves the proposal of its later siblings
                proposal = torch.where(trying[:, None], _normalise(proposal.scatter(1, token, 0.0)), proposal)
            node = torch.where(taken, child.squeeze(1), node)
            moved = moved | taken
        current = torch.where(moved[:, None], _at(p, node), current)
        walking = moved
    return Residual(node, current)


def _at(x: Tensor, node: Tensor) -> Tensor:  # [B, N, V], [B] -> [B, V]
    return x.gather(1, node[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


def _residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """norm(max(0, p - q)), where q = None is all mass on `token`. p, q: [B, V]; token: [B, 1]."""
    rest = p.scatter(1, token, 0.0) if q is None else (p - q).clamp(min=0)
    # p = q leaves nothing; only rounding can reject then, and p is as good
    return torch.where(rest.sum(-1, keepdim=True) > 0, _normalise(rest), p)


def _normalise(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
