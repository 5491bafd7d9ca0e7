"""The losses of draft heads, unrolled over the steps of a chain; their draft vocabulary; a new head of version 3.

1. A head is unrolled over some steps: EAGLE's own loss is one step, EAGLE-3's training-time test has seven, HASS has
   eagle3 with heads of version 1. At step s, row t takes the token x_{t+1+s} and its own output of step s-1 (at step 0
   the target's features f_t, fused by version 3, with noise in version 1), and sits at position t+s.
2. It sees the keys of step 0 up to row t, and its own keys of the later steps: what the nodes of a chain see that is
   drafted from row t. So each later step adds a diagonal to the causal mask of step 0.
3. Every step has the cross-entropy with the target's distribution of x_{t+2+s} over the draft vocabulary, and in
   version 1 the SmoothL1 between its output and f_{t+1+s}. A row counts if x_{t+s} is marked; in version 3 also only if
   the target's best token is in the draft vocabulary.
4. The first layer is trained over inputs of equal scale (`scale_inputs`).
5. The draft vocabulary is made of the most frequent tokens among those that are trained on.

Sources: EAGLE (arXiv 2401.15077), section 4; EAGLE-3 (arXiv 2503.01840), section 3; HASS (arXiv 2408.15766), 3.2.
Weights, masks, positions and normalisers are the official code's of EAGLE-1 and EAGLE-3.
Difference: past the end of a sequence the official code's target is uniform, and a last marked row may learn it; here
rows without a truth do not count.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters import DraftVocab
from eagle_draft import Eagle3Head, EagleHead
from hf.heads import DRAFT_INPUTS, Eagle3, EagleConfig
from model import Attention, Linear, ModelConfig, Transformer
from ops.rotary import rope_angles, rotary
from quantize import QuantLinear
from scripts.train.acceptance import row_inputs

STEPS = {1: 1, 3: 7}  # steps that a version is unrolled over, officially
DECAY = 0.8  # of a step's weight, for each step before it


# ------------------------------------------------------------------------------------------------ loss


class Past(NamedTuple):
    """Keys and values of the steps so far, where decoding has a cache. A step appends to them."""

    k: tuple[list[Tensor], ...]  # n_layers x (a step each) [B, Hkv, 1, T, E]
    v: tuple[list[Tensor], ...]


def attend(
    attention: Attention,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    keys: list[Tensor],
    values: list[Tensor],
):
    """A step's attention: causal over the keys of step 0, and to the row's own keys of the later steps.

    x: [B, T, F]. Writes: appends to keys and values. Returns: [B, T, F].
    """
    T = x.shape[1]
    qkv = attention.wqkv(x).unflatten(-1, (-1, attention.head_dim))  # [B, T, H + 2 Hkv, E]
    q, k = rotary(qkv, rope, attention.heads, attention.kv_heads, attention.head_norms)
    keys.append(k.transpose(1, 2).unsqueeze(2))
    values.append(qkv[:, :, -attention.kv_heads :].transpose(1, 2).unsqueeze(2))
    q = (
        q.transpose(1, 2).unflatten(1, (attention.kv_heads, -1)) * attention.head_dim**-0.5
    )  # [B, Hkv, H / Hkv, T, E]
    later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    scores = [(q @ keys[0].mT).float().masked_fill(later, -torch.inf)]  # [B, Hkv, H / Hkv, T, T]
    scores += [(q * own).sum(-1, keepdim=True).float() for own in keys[1:]]
    share = torch.cat(scores, -1).softmax(-1).to(qkv.dtype)  # [B, Hkv, H / Hkv, T, T + s]
    y = share[..., :T] @ values[0]
    for i, own in enumerate(values[1:]):
        y = y + share[..., T + i, None] * own
    return attention.wo(y.flatten(1, 2).transpose(1, 2).flatten(2))


def unrolled_step(head: EagleHead, embedded: Tensor, hidden: Tensor, s: int, past: Past) -> Tensor:
    """Run step `s` of all rows. embedded, hidden: [B, T, F]. Writes: appends to `past`. Returns: outputs, [B, T, F]."""

    def block_of(
        block, x, h, after, rope, kv, window
    ):  # what Block.forward does, with the attention above
        x, h = block.ffn_norm.add(x, attend(block.attention, h, rope, *kv))
        return after.add(x, block.ffn(h))

    x, h = head.first(embedded, hidden)
    positions = torch.arange(s, s + x.shape[1], device=x.device).expand(x.shape[:2])
    return head.layers(
        x, rope_angles(head.rope_freq, positions), head.norm, past, None, block_of, h=h
    )


class Recipe(NamedTuple):
    """What the losses of a head are made with."""

    embedding: nn.Module  # the head's own, or the target's
    lm_head: nn.Module  # the same, with the rows of the draft vocabulary
    steps: int
    inputs: str = DRAFT_INPUTS  # what a row sees


def unrolled_losses(
    head: EagleHead,
    target: Transformer,
    batch: tuple[Tensor, Tensor, Tensor],
    recipe: Recipe,
    noise: Tensor | float,
) -> tuple[Tensor, ...]:
    """The losses of every step, sums over the rows that count: version 1 divides them by the number of rows that are
    marked, version 3 by all B T.

    batch: tokens [B, T]; mask [B, T] bool; target features, for version 3 with its aux_layers, [B, T, (1 + aux_layers) F]
    noise: [B, T, F], added to the features of version 1
    Returns: the cross-entropy of each step; in version 1 the SmoothL1 of each behind them.
    """
    tokens, mask, features = batch
    steps, T, eagle3 = recipe.steps, tokens.shape[1], head.config.eagle3 is not None
    vocab = head.vocab or DraftVocab(target.config.vocab_size)
    with torch.no_grad():  # past the end there is no truth, and nothing counts
        known = torch.ones_like(tokens, dtype=torch.bool)
        if eagle3:
            z = target.logits(features)  # [B, T, V]
            drafted = vocab.spread(
                torch.ones(vocab.kept, device=z.device)
            ).bool()  # [V], the official t2d
            known, z = drafted[z.argmax(-1)], vocab.columns(z)
        else:
            z = recipe.lm_head(features)  # [B, T, N]
        known = F.pad(known, (0, steps))  # [B, T + steps]
        p = F.pad(z.float().softmax(-1), (0, 0, 0, steps))  # [B, T + steps, N]
        truth = F.pad(features, (0, 0, 0, steps))
        mask, rows = F.pad(mask, (0, steps)), recipe.embedding(F.pad(tokens, (0, steps)))
    hidden, entropies, regressions = head.fuse(features) if eagle3 else features + noise, [], []
    past = Past(*(tuple([] for _ in head.layers) for _ in range(2)))
    for s in range(steps):
        here, ahead = slice(s, s + T), slice(1 + s, 1 + s + T)
        hidden = unrolled_step(
            head, *row_inputs(recipe.inputs, rows[:, ahead], hidden, rows[:, here]), s, past
        )
        log_q = recipe.lm_head(head.output_norm(hidden)).float().log_softmax(-1)  # [B, T, N]
        counts = mask[:, here] & known[:, ahead]
        total = tokens.numel() if eagle3 else counts.sum() + 1e-5
        entropies.append((-(p[:, ahead] * log_q).sum(-1) * counts).sum() / total)
        if not eagle3:
            far = F.smooth_l1_loss(hidden.float(), truth[:, ahead].float(), reduction="none").mean(
                -1
            )  # [B, T]
            regressions.append((far * counts).sum() / total)
    return (*entropies, *regressions)


# ------------------------------------------------------------------------------------- scales of inputs


class ScaledLinear(Linear):
    """A linear layer that divides its inputs by their scale first, and computes the same."""

    def __init__(self, plain: nn.Linear, scale: Tensor):
        """scale: [K] fp32, the root mean square of each input"""
        super().__init__(
            plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta"
        )
        self.weight, self.bias = nn.Parameter(plain.weight * scale), plain.bias
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return super().forward(x / self.scale)

    def plain(self) -> Linear:
        """The layer as decoding takes it."""
        plain = Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        plain.weight, plain.bias = nn.Parameter(self.weight / self.scale), self.bias
        return plain


@torch.no_grad()
def scale_inputs(head: EagleHead, embedded: Tensor, features: Tensor) -> None:
    """Train `fc` over inputs of equal scale. No output changes now, but each step changes all of them evenly.

    A target's features have channels far larger than its embeddings (SmolLM2's last ones: 2 and 0.14 as a root mean
    square, a single channel of its layers 1,000). Updates of one size would hardly use the token ahead.
    embedded: [B, T, F]; features: [B, T, (1 + aux_layers) F]; a batch. Writes: head.fc, until `plain_copy`.
    """
    if isinstance(head.fc, nn.Linear):
        seen: list[Tensor] = []
        hook = head.fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        head.first(embedded, head.fuse(features))
        hook.remove()
        head.fc = ScaledLinear(
            head.fc, seen[0].float().flatten(0, -2).square().mean(0).sqrt().clamp(min=1e-6)
        )


@torch.no_grad()
def plain_copy(head: EagleHead) -> EagleHead:
    """A copy whose `fc` is as decoding takes it."""
    head = copy.deepcopy(head)
    if isinstance(head.fc, ScaledLinear):
        head.fc = head.fc.plain()
    return head


# -------------------------------------------------------------------------------------------- new heads


def frequent_tokens(ids: Tensor, size: int, kept: int) -> DraftVocab | None:
    """The `kept` most frequent of the training tokens; of equally frequent ones the lowest. None: all `size` of them.

    ids: [M] int64, every token that is trained on
    """
    if kept >= size:
        return None
    order = ids.bincount(minlength=size).sort(descending=True, stable=True).indices
    return DraftVocab(size, order[:kept].sort().values)


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Layers of the target whose inputs a new head takes: the official eagle3, as far as the target has them."""
    return tuple(sorted({tap for tap in (2, layers // 2, layers - 3) if 0 <= tap <= layers}))


def new_head(
    model: ModelConfig, target: Transformer, vocab: DraftVocab | None, from_target: bool
) -> Eagle3Head:
    """A head of version 3 with layers of the shape `model`.

    from_target: start with `fc` near the identity on the last tap, and with the target's last norm and LM head
    """
    aux_layers, dim = default_aux_layers(target.config.n_layers), target.config.dim
    kept = vocab.kept if vocab else model.vocab_size
    head = Eagle3Head(
        EagleConfig(
            model, fc_bias=False, eagle3=Eagle3(aux_layers, dim, kept, lm_head="lm_head.weight")
        )
    )
    head.vocab = vocab
    if from_target:
        own = target.lm_head
        weight = own.dequantize() if isinstance(own, QuantLinear) else own.weight
        with torch.no_grad():
            head.fc.weight.normal_(std=0.02)
            head.fc.weight[:, -dim:] += torch.eye(dim)
            head.output_norm.weight.copy_(target.norm.weight)
            head.lm_head.weight.copy_(weight[vocab.ids.to(weight.device)] if vocab else weight)
    return head


def vocab_layout(head: EagleHead) -> dict[str, Tensor]:
    """How the official layout of version 3 names the tokens that a head drafts."""
    if head.vocab is None:
        return {}
    ids = head.vocab.ids.cpu()
    reached = torch.zeros(head.vocab.size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": reached}


def keys_of(head: Eagle3Head) -> dict:
    """What the official layout says of version 3 besides, in config.json."""
    eagle3 = head.config.eagle3
    keys = {
        "draft_vocab_size": eagle3.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers),
    }
    said = {
        "use_aux_hidden_state": (bool(eagle3.aux_layers), True), "norm_output": (eagle3.last_norm == "logits", True),
        "norm_before_residual": (eagle3.norm_before_residual, False), "fc_norm": (eagle3.fc_norm, False),
        "norm_before_fc": (eagle3.norm_before_fc, False),
        "target_hidden_size": (eagle3.target_dim, head.config.model.dim),
    }  # fmt: skip
    keys |= {key: value for key, (value, default) in said.items() if value != default}
    if not eagle3.aux_layers:
        del keys["eagle_aux_hidden_state_layer_ids"]
    return keys
