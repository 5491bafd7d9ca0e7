"""Measure how well a head drafts, quickly: chains from every position of a sequence at once.

1. The target has written the sequences itself, greedily, so the sequence is the truth of a chain.
2. The chains are the unrolled steps of the loss (losses.py), which take the drafted tokens in place
   of the true ones: the decode loop on chains, without verification (a test compares the two).
3. n-alpha, tau, and the sharpness of the head's scores come from these chains.

Source: EAGLE (arXiv 2401.15077), section 4.1 (n-alpha).
Not here: trees (scripts/measure.py speed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from drafts.residual import spread
from eagle_draft import EagleHead
from model import Transformer
from run.heads import draft_lm_head
from scripts.train.losses import Past, unrolled_step

ALPHAS = 5  # chain steps that are evaluated


class DraftedChains(NamedTuple):
    """Chains from R starts of a sequence, of S steps each."""

    ok: Tensor  # [R, S] bool, true where step s of start r drafts the target's token
    logits: list[Tensor]  # of every step, [R, N], N tokens of `vocab`
    features: Tensor  # [1, T, F], the target's of the whole sequence
    vocab: DraftVocab


@torch.no_grad()
def chains(head: EagleHead, target: Transformer, tokens: Tensor) -> DraftedChains:
    """Draft chains with an EAGLE head. tokens: [1, T], written by the target."""
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    features = target(tokens, steps[None], aux_layers=head.aux_layers)
    embedding = head.embedding or target.embedding
    vocab = head.vocab or DraftVocab(target.config.vocab_size)
    # of the draft vocabulary: all rows of a large one would take most of the time
    lm_head = head.lm_head or draft_lm_head(target, None, vocab.ids)
    dtype = head.layers[0].wo.weight.dtype  # may differ from the target's
    R = tokens.shape[1] - 1 - ALPHAS  # starts with a truth for the entire chain
    hidden = features[:, :R]
    if head.aux_layers:
        hidden = head.project(hidden.to(dtype))
    drafted = tokens[:, 1 : R + 1]
    past = Past.empty(head)
    ok = []
    logits = []
    for s in range(ALPHAS):
        embedded = embedding(drafted).to(dtype)
        y = unrolled_step(head, embedded, hidden.to(dtype), s, past)
        hidden = y.to(hidden.dtype)
        z = lm_head(head.output_norm(hidden))  # [1, R, N]
        drafted = vocab.tokens(z.argmax(-1))
        ok.append(drafted[0] == tokens[0, 2 + s : 2 + s + R])
        logits.append(z[0])
    return DraftedChains(torch.stack(ok, 1), logits, features, vocab)


Draft = Callable[[nn.Module, Transformer, Tensor], DraftedChains]  # as `chains`
Sequences = list[tuple[int, list[int]]]  # of the target: the length of a prompt, and all tokens


def drafted_chains(
    head: nn.Module, target: Transformer, sequences: Sequences, draft: Draft
) -> Iterator[tuple[int, DraftedChains]]:
    """Yield the chains of every sequence, behind the first start with tokens of the target."""
    for begin, ids in sequences:
        tokens = torch.tensor([ids], device=target.norm.weight.device)
        yield max(begin - 2, 0), draft(head, target, tokens)


@torch.no_grad()
def evaluate(
    head: nn.Module, target: Transformer, sequences: Sequences, draft: Draft = chains
) -> dict:
    """Measure chains on sequences of the target, over all start positions.

    Returns: alpha, n-alpha for n = 0, 1, ..; tau, mean accepted tokens + 1 of a chain.
    """
    counts = []
    lengths = []
    for first, drafted in drafted_chains(head, target, sequences, draft):
        accepted = drafted.ok[first:].long().cumprod(1).cpu()
        before = torch.cat((torch.ones(len(accepted), 1), accepted[:, :-1]), 1)
        counts.append(torch.stack((before.sum(0), accepted.sum(0))))
        lengths.append(accepted.sum(1).float())
    tried, hits = torch.stack(counts).sum(0)  # [S] each
    return {
        "alpha": (hits / tried.clamp(min=1)).tolist(),
        "tau": torch.cat(lengths).mean().item() + 1,
    }


@torch.no_grad()
def fit_sharpness(
    head: nn.Module, target: Transformer, sequences: Sequences, draft: Draft = chains
) -> float:
    """Fit c so that softmax(c * scores) is likeliest to hold the target's choice.

    The choices at T = 0 and at T = 1 count alike.
    """
    grid = torch.arange(1.0, 4.01, 0.125)
    device = target.norm.weight.device
    loss = torch.zeros(len(grid), device=device)
    generator = torch.Generator(device).manual_seed(0)
    for first, drafted in drafted_chains(head, target, sequences, draft):
        # distribution of the token that step 0 drafts
        truth = target.logits(drafted.features)[0, 1 : len(drafted.ok) + 1]  # [R, V]
        uniform = torch.rand(truth.shape, generator=generator, device=device)
        noise = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        vocab = drafted.vocab
        # [V], the column of a token; -1 for tokens that are never drafted
        column = spread(vocab, torch.arange(1.0, vocab.drafted + 1, device=device)).long() - 1
        for extra in (torch.zeros_like(noise), noise):
            choice = column[(truth + extra).argmax(-1)[first:]]
            scores = (drafted.logits[0] + vocab.columns(extra))[first:]
            for i, c in enumerate(grid):
                loss[i] += F.cross_entropy(c * scores, choice, reduction="sum", ignore_index=-1)
    return grid[loss.argmin()].item()
