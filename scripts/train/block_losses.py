"""Compute the losses of block drafters, one for each level, over blocks at random places of a text.

1. An anchor is a root: the block begins with its token, and mask tokens follow. It sees the keys
   and values of the target's hidden states before the anchor, and its own block. All blocks of a
   text run together, apart from each other.
2. Level i has the cross-entropy with the token i + 1 places behind the anchor. It counts while all
   tokens up to there are marked. The weights of the levels decay (train_block.py).
3. A Markov bias reads the true token before, and so does DFlash2's selector. Its choice among the
   best tokens of a level has a cross-entropy of its own, where the true token is among them.

Sources: DFlash (arXiv 2602.06036); JetSpec (arXiv 2606.18394); DSpark (arXiv 2607.05147), without
its losses on distributions and its confidence. DFlash2's own losses are not public: the selector's
is that of DSpine's refined scores, the part on tokens (SpecForge @64ab5ca).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from drafts.block_draft import UNSELECTED, BlockHead
from drafts.block_layers import Convolve
from model import Transformer
from scripts.train.acceptance import DraftedChains
from steps import Attend, Project, Rows, run_steps


def logits_of(head: BlockHead, target: Transformer, hidden: Tensor, before: Tensor) -> Tensor:
    """Score levels. hidden: [R, F]; before: [R] int64, the tokens before; -> [R, V] fp32"""
    z = target.lm_head(hidden).float()
    if not head.config.scores_pairs:
        return z
    rows = head.token_rows(before[:, None])  # [R, 1, rank]
    return head.score_pairs(z[:, None], hidden[:, None], rows, target.lm_head)[:, 0].float()


def pick_anchors(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose roots at random among the tokens before a marked one, each at most once.

    mask: [B, T] bool; count: A
    Returns: [B, A] int64, ascending; where a sequence has fewer, the others are unmarked.
    """
    rank = torch.rand(mask.shape, generator=generator, device=mask.device)[:, 1:]
    rank = torch.where(mask[:, 1:], rank, 2.0)
    return rank.argsort(1)[:, :count].sort(1).values


def attend(rows: Rows, seen: Tensor) -> Rows:
    """Attend from the blocks to the context and to themselves.

    rows: of context and blocks, behind `Rotate`; seen: [B, Q, T + Q] bool
    Returns: the rows of the blocks, [B, Q, H E].
    """
    q = rows.h[:, -seen.shape[1] :].transpose(1, 2)  # [B, H, Q, E]
    y = F.scaled_dot_product_attention(q, *rows.kv, attn_mask=seen[:, None], enable_gqa=True)
    return rows.put("h", y.transpose(1, 2).flatten(2))


def visible(anchors: Tensor, T: int, size: int, causal: bool) -> Tensor:
    """Return what each position of the blocks sees, [B, A size, T + A size] bool.

    anchors: [B, A]; T: tokens of the context; size: of a block
    """
    before = torch.arange(T, device=anchors.device) < anchors[:, :, None]  # [B, A, T]
    before = before.repeat_interleave(size, 1)
    Q = anchors.shape[1] * size
    q = torch.arange(Q, device=anchors.device)
    own = q[:, None] // size == q // size
    if causal:
        own &= q <= q[:, None]
    return torch.cat((before, own.expand(len(anchors), -1, -1)), 2)


def convolve(step: Convolve, layer: nn.Module, rows: Rows, size: int) -> Rows:
    """Run a convolution within each block. size: of a block"""
    h, kernel = (x.unflatten(1, (-1, size)).flatten(0, 1) for x in (rows.h, rows.get("kernel")))
    mixed = step.run(layer, Rows(h=h, named={"kernel": kernel})).h  # [B A, size, F]
    return rows.put("h", mixed.view_as(rows.h))


def run_blocks(
    head: BlockHead, target: Transformer, batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Run the blocks at some anchors.

    batch: tokens [B, T]; target features [B, T, (1 + aux) F]; anchors [B, A]
    Returns: the inputs of the LM head, [B, A, D, F].
    """
    tokens, features, anchors = batch
    config = head.config
    size = config.block_size
    T = tokens.shape[1]
    context = head.hidden_norm(head.fc(features[..., config.model.dim :]))  # [B, T, F]
    places = anchors[:, :, None] + torch.arange(size, device=tokens.device)  # [B, A, size]
    steps = torch.arange(T, device=tokens.device).expand(len(tokens), -1)
    ropes = head.ropes(torch.cat((steps, places.flatten(1)), 1))
    seen = visible(anchors, T, size, config.causal)
    block = torch.full_like(places, config.mask_token)
    block[..., 0] = tokens.gather(1, anchors)
    with torch.no_grad():
        x = target.embedding(block.flatten(1)).to(context)  # [B, A size, F]

    rows = Rows(x, ropes=ropes)
    for layer in head.layers:
        for step in layer.steps:
            if isinstance(step, Attend):
                rows = attend(rows, seen)
            elif isinstance(step, Convolve):
                rows = convolve(step, layer, rows, size)
            elif isinstance(step, Project) and step.name == "wqkv":
                # keys and values are those of the context, too
                rows = step.run(layer, rows.put("h", torch.cat((context, rows.h), 1)))
            else:
                rows = step.run(layer, rows)
    hidden = run_steps(head.last, head, rows).h.unflatten(1, (-1, size))
    return hidden if config.predicts_next else hidden[:, :, 1:]


def block_losses(
    head: BlockHead, target: Transformer, batch: tuple[Tensor, Tensor, Tensor], anchors: Tensor
) -> tuple[Tensor, ...]:
    """Return the mean cross-entropy of every level (nats), over the anchors where it counts.

    batch: tokens [B, T]; mask [B, T] bool; target features [B, T, (1 + aux) F]
    anchors: [B, A]
    """
    tokens, mask, features = batch
    levels = head.config.levels
    hidden = run_blocks(head, target, (tokens, features, anchors))  # [B, A, D, F]
    places = anchors[:, :, None] + torch.arange(1, levels + 1, device=tokens.device)  # [B, A, D]
    inside = places < tokens.shape[1]
    places = places.clamp(max=tokens.shape[1] - 1).flatten(1)
    marked = mask.gather(1, places).view_as(inside) & inside
    truth = tokens.gather(1, places).view_as(inside)
    before = torch.cat((tokens.gather(1, anchors)[:, :, None], truth[..., :-1]), 2)
    counts = marked.long().cumprod(2).bool()
    losses = []
    for level in range(levels):
        rows = counts[..., level]  # only these reach the LM head
        h = hidden[:, :, level][rows]
        right = truth[..., level][rows]
        z = logits_of(head, target, h, before[..., level][rows])
        total = torch.zeros(())
        if head.config.selector_rank:
            total = F.cross_entropy(target.lm_head(h).float(), right, reduction="sum")
            kept = z.gather(1, right[:, None])[:, 0] > UNSELECTED
            z = z[kept]
            right = right[kept]
        total = total + F.cross_entropy(z, right, reduction="sum")
        losses.append(total / rows.sum().clamp(min=1))
    return tuple(losses)


def draft_blocks(head: BlockHead, target: Transformer, tokens: Tensor) -> DraftedChains:
    """Draft a chain from every position of a sequence, as `acceptance.chains`.

    A bias reads the true tokens: a level counts only behind levels that drafted them.
    tokens: [1, T]
    """
    T = tokens.shape[1]
    steps = torch.arange(T, device=tokens.device)
    features = target(tokens, steps[None], aux_layers=head.aux_layers)
    levels = head.config.levels
    roots = steps[1 : max(T - levels, 1)]  # [R]
    batch = (tokens, features.to(head.norm.weight.dtype), roots[None])
    hidden = run_blocks(head, target, batch)[0]  # [R, D, F]
    ok = []
    logits = []
    for level in range(levels):
        z = logits_of(head, target, hidden[:, level], tokens[0, roots + level])
        logits.append(z)
        ok.append(z.argmax(-1) == tokens[0, roots + level + 1])
    return DraftedChains(torch.stack(ok, 1), logits, features, DraftVocab(target.config.vocab_size))
