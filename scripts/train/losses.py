"""Compute the losses of draft heads, unrolled over the steps of a chain; make heads of version 3.

1. EAGLE's own loss has one step, EAGLE-3's training-time test seven; HASS has several with heads of
   version 1. At step s, row t takes the token x_{t+1+s} and its own output of step s-1 (at step 0
   the target's features f_t, fused by version 3, with noise in version 1), at position t+s.
2. A row sees the keys of step 0 up to row t, and its own keys of the later steps, like the nodes of
   a chain from row t. So each later step adds a diagonal to the causal mask of step 0.
3. Every step has the cross-entropy with the target's distribution of x_{t+2+s} over the draft
   vocabulary, and in version 1 the SmoothL1 between its output and f_{t+1+s}. A row counts if
   x_{t+s} is marked; in version 3 also only if the draft vocabulary has the target's best token.

Sources: EAGLE (arXiv 2401.15077), section 4; EAGLE-3 (arXiv 2503.01840), section 3; HASS (arXiv
2408.15766), 3.2. Weights, masks, positions and normalisers are the official code's of EAGLE-1 and
EAGLE-3. Difference: rows past the end of a sequence do not count here. The official target is
uniform there, and a last marked row may learn it.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from drafts.residual import spread
from eagle_draft import EagleConfig, EagleHead
from files.eagle_variants import Eagle3Variant, VariantHead
from model import ModelConfig, Transformer
from quantize import Linear
from steps import Attend, Rows, run_steps

STEPS = {1: 1, 3: 7}  # steps that a version is unrolled over, officially
DECAY = 0.8  # of a step's weight, for each step before it


# ------------------------------------------------------------------------------- loss


class Past(NamedTuple):
    """Keys and values of the steps so far, in place of a cache. A step appends to them."""

    k: tuple[list[Tensor], ...]  # n_layers x (a step each) [B, Hkv, 1, T, E]
    v: tuple[list[Tensor], ...]


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
    past = Past(tuple([] for _ in head.layers), tuple([] for _ in head.layers))
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


# ----------------------------------------------------------------------------- scales of inputs


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


# ------------------------------------------------------------------------------- new heads


def frequent_tokens(ids: Tensor, size: int, kept: int) -> DraftVocab | None:
    """Return the `kept` most frequent of the training tokens, of equally frequent ones the lowest.

    ids: [M] int64, every token that is trained on
    Returns: None for all `size` of them.
    """
    if kept >= size:
        return None
    order = ids.bincount(minlength=size).sort(descending=True, stable=True).indices
    return DraftVocab(size, order[:kept].sort().values)


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the aux layers of a new head: the official ones, as far as the target has them.

    The head takes the inputs of these layers of the target.
    """
    official = (2, layers // 2, layers - 3)
    return tuple(sorted({layer for layer in official if 0 <= layer <= layers}))


def new_head(
    model: ModelConfig, target: Transformer, vocab: DraftVocab | None, from_target: bool
) -> VariantHead:
    """Make a head of version 3 with layers of the shape `model`.

    from_target: start with `fc` near the identity on the last aux hidden states, and with the
        target's last norm and LM head
    """
    aux_layers = default_aux_layers(target.config.n_layers)
    dim = target.config.dim
    kept = vocab.drafted if vocab else model.vocab_size
    eagle3 = Eagle3Variant(aux_layers, dim, kept, lm_head="lm_head.weight")
    head = VariantHead(EagleConfig(model, fc_bias=False, eagle3=eagle3))
    head.vocab = vocab
    if from_target:
        own = target.lm_head
        weight = own.dequantize()
        with torch.no_grad():
            head.fc.weight.normal_(std=0.02)
            head.fc.weight[:, -dim:] += torch.eye(dim)
            head.output_norm.weight.copy_(target.norm.weight)
            head.lm_head.weight.copy_(weight[vocab.ids.to(weight.device)] if vocab else weight)
    return head


def vocab_layout(head: EagleHead) -> dict[str, Tensor]:
    """Return the tensors that name the draft vocabulary in the official layout of version 3."""
    if head.vocab is None:
        return {}
    ids = head.vocab.ids.cpu()
    reached = torch.zeros(head.vocab.size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": reached}


def keys_of(head: VariantHead) -> dict:
    """Return the further keys of version 3 in the official config.json."""
    eagle3 = head.config.eagle3
    keys = {
        "draft_vocab_size": eagle3.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers),
    }
    optional = {  # key: value, default
        "use_aux_hidden_state": (bool(eagle3.aux_layers), True),
        "norm_output": (eagle3.last_norm == "logits", True),
        "norm_before_residual": (eagle3.norm_before_residual, False),
        "fc_norm": (eagle3.fc_norm, False),
        "norm_before_fc": (eagle3.norm_before_fc, False),
        "target_hidden_size": (eagle3.target_dim, head.config.model.dim),
    }
    keys |= {key: value for key, (value, default) in optional.items() if value != default}
    if not eagle3.aux_layers:
        del keys["eagle_aux_hidden_state_layer_ids"]
    return keys
