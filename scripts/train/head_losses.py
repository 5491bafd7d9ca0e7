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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from extras.hydra_draft import HydraHeads
from extras.medusa_draft import MedusaHeads
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


def lm_heads_of(heads: MedusaHeads | HydraHeads, target: Transformer) -> list[nn.Module]:
    """Return the LM head of every level: its own, or the target's."""
    return list(heads.lm_heads) or [target.lm_head] * heads.config.heads


def level_losses(
    method: str,
    heads: MedusaHeads | HydraHeads,
    target: Transformer,
    batch: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Return the mean cross-entropy of every level (nats).

    batch: tokens [B, T]; mask [B, T] bool; target features [B, T, F]
    """
    tokens, mask, features = batch
    lm_heads = lm_heads_of(heads, target)
    losses = []
    for i, x in enumerate(LEVELS[method](heads, target, tokens, features)):
        counts = mask[:, 2 + i :]  # [B, T - 2 - i]
        z = lm_heads[i](x[counts]).float()  # [M, V]
        truth = tokens[:, 2 + i :][counts]  # [M]
        if method == "hydra":
            with torch.no_grad():
                truth = target.lm_head(features[:, 1 + i : -1][counts]).float().softmax(-1)
        total = F.cross_entropy(z, truth, reduction="sum")
        losses.append(total / counts.sum().clamp(min=1))
    return tuple(losses)


@torch.no_grad()
def draft_levels(
    method: str,
    heads: MedusaHeads | HydraHeads,
    target: Transformer,
    tokens: Tensor,
) -> Drafted:
    """Draft chains from every position of a sequence, as `acceptance.chains`.

    The heads read the true tokens: a step counts only behind steps that drafted them.
    tokens: [1, T], written by the target
    """
    T = tokens.shape[1]
    features = target(tokens, torch.arange(T, device=tokens.device)[None])
    inputs = features.to(next(heads.parameters()).dtype)
    lm_heads = lm_heads_of(heads, target)
    ok = []
    logits = []
    R = max(T - 1 - heads.config.heads, 0)  # starts with a truth for the entire chain
    for i, x in enumerate(LEVELS[method](heads, target, tokens, inputs)):
        z = lm_heads[i](x[0, :R].to(features.dtype)).float()  # [R, V]
        logits.append(z)
        ok.append(z.argmax(-1) == tokens[0, 2 + i : 2 + i + R])
    return Drafted(torch.stack(ok, 1), logits, features, DraftVocab(target.config.vocab_size))
