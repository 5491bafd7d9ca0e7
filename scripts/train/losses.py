"""Compute the losses of draft heads: unrolled over the steps of a chain, or over blocks.

EAGLE: one step is EAGLE's own loss, seven are EAGLE-3's training-time test; HASS has several with
heads of version 1.
1. At step s, row t takes the token x_{t+1+s} and its own output of step s-1 (at step 0 the target's
   features f_t, fused by version 3, with noise in version 1), at position t+s.
2. A row sees the keys of step 0 up to row t, and its own keys of the later steps, like the nodes of
   a chain from row t. So each later step adds a diagonal to the causal mask of step 0.
3. Every step has the cross-entropy with the target's distribution of x_{t+2+s} over the draft
   vocabulary, and in version 1 the SmoothL1 between its output and f_{t+1+s}. A row counts if
   x_{t+s} is marked; in version 3 also only if the draft vocabulary has the target's best token.

Block drafters: blocks at random places of a text, all together and apart from each other.
1. An anchor is a root: the block begins with its token, and mask tokens follow. It sees the keys
   and values of the target's hidden states before the anchor, and its own block.
2. Level i has the cross-entropy with the token i + 1 places behind the anchor. It counts while all
   tokens up to there are marked.
3. A Markov bias reads the true token before, and so does DFlash2's selector. Its choice among the
   best tokens of a level has a cross-entropy of its own, where the true token is among them.

Sources: EAGLE (arXiv 2401.15077), section 4; EAGLE-3 (arXiv 2503.01840), section 3; HASS (arXiv
2408.15766), 3.2: weights, masks, positions and normalisers are the official code's. Difference:
rows past the end of a sequence do not count, where the official target is uniform. DFlash (arXiv
2602.06036); JetSpec (arXiv 2606.18394); DSpark (arXiv 2607.05147), without its losses on
distributions and its confidence. DFlash2's own losses are not public: the selector's is that of
DSpine's refined scores, the part on tokens (SpecForge @64ab5ca).
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from drafts.block_draft import UNSELECTED, BlockHead
from drafts.block_layers import Convolve
from drafts.residual import spread
from eagle_draft import EagleHead
from model import Transformer
from quantize import Linear
from steps import Attend, Project, Rows, run_steps

STEPS = {1: 1, 3: 7}  # steps that a version is unrolled over, officially
DECAY = 0.8  # of a step's weight, for each step before it


# ------------------------------------------------------------------------------- EAGLE


class Past(NamedTuple):
    """Keys and values of the steps so far, in place of a cache. A step appends to them."""

    k: tuple[list[Tensor], ...]  # n_layers x (a step each) [B, Hkv, 1, T, E]
    v: tuple[list[Tensor], ...]

    @staticmethod
    def empty(head: EagleHead) -> Past:
        """Return that before step 0."""
        return Past(tuple([] for _ in head.layers), tuple([] for _ in head.layers))


def attend(rows: Rows, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend causally over the keys of step 0, and to the row's own keys of the later steps.

    rows: behind `Rotate`; queries in h, own keys and values in kv
    Writes: appends to keys and values. Returns: [B, T, H E].
    """
    T = rows.h.shape[1]
    k, v = rows.kv  # [B, Hkv, T, E]
    keys.append(k.unsqueeze(2))
    values.append(v.unsqueeze(2))
    q = rows.h.transpose(1, 2).unflatten(1, (k.shape[1], -1))  # [B, Hkv, H / Hkv, T, E]
    q = q * k.shape[3] ** -0.5
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ keys[0].mT).float().masked_fill(later, -torch.inf)]  # [B, Hkv, H / Hkv, T, T]
    scores += [(q * own).sum(-1, keepdim=True).float() for own in keys[1:]]
    share = torch.cat(scores, -1).softmax(-1).to(v.dtype)  # [B, Hkv, H / Hkv, T, T + s]
    y = share[..., :T] @ values[0]
    for i, own in enumerate(values[1:]):
        y = y + share[..., T + i, None] * own
    return y.flatten(1, 2).transpose(1, 2).flatten(2)


def unrolled_step(head: EagleHead, embedded: Tensor, hidden: Tensor, s: int, past: Past) -> Tensor:
    """Run step `s` of all rows. Writes: appends to `past`.

    embedded, hidden: [B, T, F]
    Returns: outputs, [B, T, F].
    """

    positions = torch.arange(s, s + hidden.shape[1], device=hidden.device)
    positions = positions.expand(hidden.shape[:2])
    read = {"embedded": embedded, "features": hidden}
    rows = Rows(ropes=head.ropes(positions), named=read)
    rows = run_steps(head.first, head, rows)
    for layer, keys, values in zip(head.layers, past.k, past.v):
        for step in layer.steps:
            if isinstance(step, Attend):
                rows = rows.put("h", attend(rows, keys, values))
            else:
                rows = step.run(layer, rows)
    return run_steps(head.last, head, rows).h


class LossOptions(NamedTuple):
    """The layers and options that the losses of a head need."""

    embedding: nn.Module  # the head's own, or the target's
    lm_head: nn.Module  # the same, with the rows of the draft vocabulary
    target_lm_head: nn.Module  # the target's, with these rows
    steps: int


def unrolled_losses(
    head: EagleHead,
    target: Transformer,
    batch: tuple[Tensor, Tensor, Tensor, Tensor | None],
    recipe: LossOptions,
    noise: Tensor | float,
) -> tuple[Tensor, ...]:
    """Return the losses of every step, sums over the rows that count.

    Version 1 divides the sums by the number of marked rows, version 3 by all B T.
    batch: tokens [B, T]; mask [B, T] bool; target features [B, T, (1 + aux_layers) F], with the aux
        layers of version 3; the target's best tokens [B, T] int64, in version 1 None
    noise: [B, T, F], added to the features of version 1
    Returns: the cross-entropy of each step; in version 1 the SmoothL1 of each behind them.
    """
    tokens, mask, features, best = batch
    steps = recipe.steps
    T = tokens.shape[1]
    eagle3 = head.config.eagle3 is not None
    vocab = head.vocab or DraftVocab(target.config.vocab_size)
    with torch.no_grad():  # past the end there is no truth, and nothing counts
        known = torch.ones_like(tokens, dtype=torch.bool)
        if eagle3:
            # [V], the official t2d
            drafted = spread(vocab, torch.ones(vocab.drafted, device=tokens.device)).bool()
            known = drafted[best]  # [B, T]
        z = recipe.target_lm_head(features[..., : target.config.dim])  # [B, T, N]
        known = F.pad(known, (0, steps))  # [B, T + steps]
        p = F.pad(z.float().softmax(-1), (0, 0, 0, steps))  # [B, T + steps, N]
        truth = F.pad(features, (0, 0, 0, steps))
        mask = F.pad(mask, (0, steps))
        rows = recipe.embedding(F.pad(tokens, (0, steps)))
    hidden = head.project(features) if eagle3 else features + noise
    entropies = []
    regressions = []
    past = Past.empty(head)
    for s in range(steps):
        here = slice(s, s + T)
        ahead = slice(1 + s, 1 + s + T)
        hidden = unrolled_step(head, rows[:, ahead], hidden, s, past)
        log_q = recipe.lm_head(head.output_norm(hidden)).float().log_softmax(-1)  # [B, T, N]
        counts = mask[:, here] & known[:, ahead]
        total = tokens.numel() if eagle3 else counts.sum() + 1e-5
        entropies.append((-(p[:, ahead] * log_q).sum(-1) * counts).sum() / total)
        if not eagle3:
            far = F.smooth_l1_loss(hidden.float(), truth[:, ahead].float(), reduction="none")
            regressions.append((far.mean(-1) * counts).sum() / total)
    return (*entropies, *regressions)


# ------------------------------------------------------------------------------- block drafters


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


def attend_blocks(rows: Rows, seen: Tensor) -> Rows:
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
                rows = attend_blocks(rows, seen)
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


# ------------------------------------------------------------------------------- scales of inputs


class ScaledLinear(Linear):
    """A linear layer that divides its inputs by their scale first, and computes the same."""

    def __init__(self, plain: Linear, scale: Tensor):
        """scale: [K] fp32, the root mean square of each input"""
        super().__init__(
            plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta"
        )
        self.weight = nn.Parameter(plain.weight * scale)
        self.bias = plain.bias
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return super().forward(x / self.scale)

    def plain(self) -> Linear:
        """Return the layer as decoding takes it."""
        plain = Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        plain.weight = nn.Parameter(self.weight / self.scale)
        plain.bias = self.bias
        return plain


def scale_of(x: Tensor) -> Tensor:
    """Return the root mean square of each channel: [..., F] -> [F]."""
    return x.float().flatten(0, -2).square().mean(0).sqrt().clamp(min=1e-6)


@torch.no_grad()
def scale_inputs(head: EagleHead, embedded: Tensor, features: Tensor) -> None:
    """Train `fc` over inputs of equal scale. Writes: head.fc, until `plain_copy`.

    No output changes now, but each training step changes all outputs evenly.
    A target's features have channels far larger than its embeddings (SmolLM2's last ones: 2 and
    0.14 as a root mean square, a single channel of its layers 1,000). Updates of one size would
    hardly use the token ahead.
    embedded: [B, T, F]; features: [B, T, (1 + aux_layers) F]; a batch
    """
    if "fc" in dict(head.named_children()):
        seen: list[Tensor] = []
        hook = head.fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        rows = Rows(named={"embedded": embedded, "features": head.project(features)})
        run_steps(head.first, head, rows)
        hook.remove()
        head.fc = ScaledLinear(head.fc, scale_of(seen[0]))


@torch.no_grad()
def plain_copy(head: nn.Module) -> nn.Module:
    """Return a copy with the layers as decoding takes them."""
    head = copy.deepcopy(head)
    for parent in [*head.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, ScaledLinear):
                setattr(parent, name, layer.plain())
    return head
