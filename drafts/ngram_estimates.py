"""How probable looked-up continuations are, learnt from the tokens that the target decides.

Candidates of one key share a rate: the length of their match, the rank of their continuation and
their depth in it, the last depth for all deeper ones. `learn` counts which were accepted, whether
or not the tree had room for them; older outcomes fade. `estimate` multiplies the rates along every
path, so that the sum over a tree's nodes is the number of accepted tokens that it can expect. On a
CPU both are done by the C++ operator `ngram_draft`.
Counted on recorded answers, a size picked for every pass by such estimates is worth more than any
further source of candidates. Each sequence of a batch learns alone.
Not here: the search (ngram_draft.py), the choice of a size (by_value.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draft_tree import DecodedTokens

DEPTHS = 4  # depths whose outcomes are counted apart


class Rates(NamedTuple):
    """The constants of the estimates, which the C++ operator takes as they stand here."""

    fading: float = 0.998  # weight of an outcome after the next one
    prior: float = 3.0  # outcomes that a rate before any outcome is worth
    most: float = 0.995  # largest rate
    # rate before any outcome, of a chain's first token for every token that matches, and of others.
    # The first one is learnt from every cycle, so that little has to be hoped for
    first_hope: float = 0.1
    hoped_tokens: int = 6  # matching tokens that raise it
    later_hope: float = 0.6


RATES = Rates()


class Lookup(NamedTuple):
    """The continuations of the text so far, as candidates, and what became of earlier ones."""

    tokens: Tensor  # [B, K L] int64
    values: Tensor  # [B, K L] fp32, log of the probability of the path; -inf: no candidate
    parents: Tensor  # [B, K L] int64, as in `Candidates`
    lengths: Tensor  # [B, K] int64, tokens that match, in kept texts M / 2 more; 0: no continuation
    root: Tensor  # [B] int64, index in the text of the token before them; -1: none were looked up
    outcomes: Tensor  # [B, M, K, D, 2] fp32, accepted and tried, fading; D = DEPTHS
    expected: Tensor  # [B, presets] fp32, accepted tokens that the trees can expect


def learn(lookup: Lookup, text: DecodedTokens) -> Tensor:
    """Count the candidates that the decided tokens have accepted, and those that they have tried.

    A candidate is tried where the path to its parent is decided and no better one is equal.
    Returns: the new outcomes.
    """
    B, M, K, D, _ = lookup.outcomes.shape
    tokens = lookup.tokens.view(B, K, -1)
    L = tokens.shape[2]
    step = torch.arange(L, device=tokens.device)
    decided = torch.where(lookup.root < 0, 0, text.pos - lookup.root)[:, None] > step  # [B, L]
    place = (lookup.root[:, None] + 1 + step).clamp(0, text.tokens.shape[1] - 1)
    hit = tokens == text.tokens.gather(1, place)[:, None]  # [B, K, L]
    path = hit.long().cumprod(2).bool()
    above = path.roll(1, 2) | (step == 0)  # the path to the parent is decided
    own = (lookup.values > float("-inf")).view_as(hit)
    tried = above & own & decided[:, None]
    seen = torch.stack((tried & hit, tried), -1).float()  # [B, K, L, 2]
    deep = [seen[:, :, depth] for depth in range(min(D - 1, L))]
    deep.append(seen[:, :, D - 1 :].sum(2))
    deep += [torch.zeros_like(deep[0])] * (D - len(deep))
    by_depth = torch.stack(deep, 2)  # [B, K, D, 2]
    length = torch.arange(1, M + 1, device=tokens.device)[:, None]
    mine = (lookup.lengths.clamp(max=M)[:, None] == length)[..., None, None]  # [B, M, K, 1, 1]
    new = mine * by_depth[:, None]
    return lookup.outcomes * RATES.fading ** new[..., 1:] + new


def estimate(tokens: Tensor, lengths: Tensor, outcomes: Tensor, sizes: Sequence[int]) -> tuple:
    """Estimate how probable continuations are by the outcomes of earlier ones.

    tokens: [B, K L] int64; lengths: [B, K] int64; sizes: nodes of the trees, root included
    Returns: values, parents and expected, as in `Lookup`.
    """
    B, M, K, D, _ = outcomes.shape
    chains = tokens.view(B, K, -1)
    L = chains.shape[2]
    rank = torch.arange(K, device=tokens.device)
    step = torch.arange(L, device=tokens.device)
    there = lengths > 0
    same = (chains[:, :, None] == chains[:, None]).long().cumprod(3).bool()  # [B, K, K, L]
    same = same & (there[:, None, :, None] | (rank[:, None] == rank)[:, :, None])
    owner = same.long().argmax(2)  # [B, K, L], the first chain that begins so
    parents = torch.where(step > 0, (owner * L + step).roll(1, 2), -1)
    first = lengths.clamp(1, M)[:, None, :, None, None] - 1
    counted = outcomes.gather(1, first.expand(-1, -1, -1, D, 2))[:, 0]  # [B, K, D, 2]
    counted = counted[:, :, step.clamp(max=D - 1)]  # [B, K, L, 2]
    matched = (lengths - 1) % (M // 2) + 1
    of_first = RATES.first_hope * matched.clamp(max=RATES.hoped_tokens)[..., None]
    hope = torch.where(step == 0, of_first, RATES.later_hope)  # [B, K, L]
    prior = hope / (1 + rank[:, None])
    rate = (counted[..., 0] + RATES.prior * prior) / (counted[..., 1] + RATES.prior)
    own = (owner == rank[:, None]) & there[..., None]
    rate = rate.clamp(max=RATES.most)
    levels = []  # probability of the paths to a depth, [B, K]
    above = torch.ones_like(rate[:, :, 0])
    for depth in range(L):
        path = above * rate[:, :, depth]
        above = path.gather(1, owner[:, :, depth])
        levels.append(path)
    paths = torch.stack(levels, 2).masked_fill(~own, 0.0).flatten(1)
    best = paths.sort(1, descending=True).values.cumsum(1)
    best = torch.cat((best.new_zeros(B, 1), best), 1)
    expected = [best[:, min(size - 1, K * L)] for size in sizes]
    return paths.log(), parents.flatten(1), torch.stack(expected, 1)
