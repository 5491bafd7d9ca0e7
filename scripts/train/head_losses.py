"""Compute the losses of Medusa's and Hydra's heads, one for each drafted level.

1. Level i takes the feature f_t and, in Hydra, the tokens x_{t+1} .. x_{t+1+i}; it scores
   x_{t+2+i}. All rows of a sequence are computed at once, from its true tokens.
2. Medusa-1: the cross-entropy with the token itself. Hydra++: with the target's distribution there
   (teacher loss). The target is frozen; a row counts if the token that it scores is marked.
3. With a draft vocabulary both are distributions over its tokens only, and a row whose token it
   lacks does not count in Medusa.

Only rows that count reach an LM head: its product is most of a step.
Sources: Medusa (arXiv 2401.10774), 2.2.1; Hydra (arXiv 2402.05109), 4.1; the official code of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from extras.hydra_draft import HydraHeads
from extras.medusa_draft import MedusaHeads
from hf.heads import rows_of
from model import Transformer
from scripts.train.acceptance import Drafted


def medusa_levels(
    heads: MedusaHeads, target: Transformer, tokens: Tensor, features: Tensor
) -> list[Tensor]:
    """Return the inputs of the LM heads, per level i [B, T - 2 - i, F].

    tokens: [B, T]; features: [B, T, F]
    """
    x = heads(features)  # [B, T, D, F]
    last = tokens.shape[1] - 2
    return [x[:, : last - i, i] for i in range(heads.config.heads)]


def hydra_levels(
    heads: HydraHeads, target: Transformer, tokens: Tensor, features: Tensor
) -> list[Tensor]:
    """Return the same for Hydra's heads."""
    if heads.prefix:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        features = heads.attend(features, positions, None, None)
    with torch.no_grad():
        embedded = target.embedding(tokens).to(features)
    levels = []
    for i in range(heads.config.heads):
        rows = tokens.shape[1] - 2 - i
        parts = [features[:, :rows]]
        parts += [embedded[:, j : j + rows] for j in range(1, i + 2)]
        levels.append(heads(torch.cat(parts, -1)))
    return levels


LEVELS = {"medusa": medusa_levels, "hydra": hydra_levels}


def columns_of(vocab: DraftVocab, device: torch.device) -> Tensor:
    """Return the column of each token, [V] int64; -1 for tokens that are never drafted."""
    return vocab.spread(torch.arange(1.0, vocab.drafted + 1, device=device)).long() - 1


class Scored(NamedTuple):
    """The LM heads of all levels, and the tokens that they score."""

    lm_heads: list[nn.Module]
    of_target: nn.Module
    vocab: DraftVocab
    columns: Tensor  # [V] int64, the column of a token; -1 for tokens that are never drafted

    @staticmethod
    def of(heads: MedusaHeads | HydraHeads, target: Transformer, vocab: DraftVocab) -> Scored:
        """vocab: of heads that score with the target's LM head; the others score all tokens"""
        rows = target.lm_head
        if vocab.ids is not None:
            rows = rows_of(rows, vocab.ids)
        columns = columns_of(vocab, target.norm.weight.device)
        own = list(heads.lm_heads) or [rows] * heads.config.heads
        return Scored(own, rows, vocab, columns)


def level_losses(
    method: str,
    heads: MedusaHeads | HydraHeads,
    target: Transformer,
    batch: tuple[Tensor, Tensor, Tensor],
    scored: Scored,
) -> tuple[Tensor, ...]:
    """Return the mean cross-entropy of every level (nats).

    batch: tokens [B, T]; mask [B, T] bool; target features [B, T, F]
    """
    tokens, mask, features = batch
    losses = []
    for i, x in enumerate(LEVELS[method](heads, target, tokens, features)):
        labels = scored.columns[tokens[:, 2 + i :]]  # [B, T - 2 - i]
        counts = mask[:, 2 + i :]
        if method == "medusa":
            counts = counts & (labels >= 0)
        z = scored.lm_heads[i](x[counts]).float()  # [M, Vd]
        truth = labels[counts]  # [M]
        if method == "hydra":
            with torch.no_grad():
                truth = scored.of_target(features[:, 1 + i : -1][counts]).float().softmax(-1)
        total = F.cross_entropy(z, truth, reduction="sum")
        losses.append(total / counts.sum().clamp(min=1))
    return tuple(losses)


@torch.no_grad()
def draft_levels(
    method: str,
    heads: MedusaHeads | HydraHeads,
    target: Transformer,
    tokens: Tensor,
    scored: Scored,
) -> Drafted:
    """Draft chains from every position of a sequence, as `acceptance.chains`.

    The heads read the true tokens: a step counts only behind steps that drafted them.
    tokens: [1, T], written by the target
    """
    T = tokens.shape[1]
    features = target(tokens, torch.arange(T, device=tokens.device)[None])
    inputs = features.to(next(heads.parameters()).dtype)
    ok = []
    logits = []
    R = max(T - 1 - heads.config.heads, 0)  # starts with a truth for the entire chain
    for i, x in enumerate(LEVELS[method](heads, target, tokens, inputs)):
        z = scored.lm_heads[i](x[0, :R].to(features.dtype)).float()  # [R, Vd]
        logits.append(z)
        ok.append(scored.vocab.tokens(z.argmax(-1)) == tokens[0, 2 + i : 2 + i + R])
    return Drafted(torch.stack(ok, 1), logits, features, scored.vocab)
