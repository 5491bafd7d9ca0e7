"""What scripts/train_eagle.py does for heads of version 3: training-time test, draft vocabulary, a new head.

1. The head is unrolled over STEPS steps. At step s, row t takes the token x_{t+1+s} and its own output of step s-1 (at
   step 0 the target's fused features f_t), and sits at position t+s.
2. It sees the keys of step 0 up to row t, and its own keys of the later steps: what the nodes of a chain see that is
   drafted from row t. So each later step adds a diagonal to the causal mask of step 0.
3. The loss of a step is the cross-entropy with the target's distribution of x_{t+2+s} over the draft vocabulary. A row
   counts if the target's best token is in the draft vocabulary and x_{t+s} is marked.
4. The draft vocabulary is made of the most frequent tokens among those that are trained on.

Sources: EAGLE-3 (arXiv 2503.01840), section 3; weights, masks, positions and normaliser are the official code's.
Difference: past the end of a sequence the official code's target is uniform, and a last marked row may learn it; here
rows without a truth do not count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _path  # noqa: F401  (finds the project)
from drafters import DraftVocab
from eagle_draft import Eagle3Head, EagleHead
from hf.heads import Eagle3, EagleConfig
from model import Attention, ModelConfig, Transformer
from ops.attention import rope_angles, rotary
from quantize import QuantLinear

STEPS = 7  # of training-time test
WEIGHTS = tuple(0.8**s for s in range(STEPS))  # of their losses


# ------------------------------------------------------------------------------------------------ loss


class Past(NamedTuple):
    """Keys and values of the steps so far, where decoding has a cache. A step appends to them."""

    k: tuple[list[Tensor], ...]  # n_layers x (a step each) [B, Hkv, 1, T, E]
    v: tuple[list[Tensor], ...]


def attend(attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]):
    """A step's attention: causal over the keys of step 0, and to the row's own keys of the later steps.

    x: [B, T, F]. Writes: appends to keys and values. Returns: [B, T, F].
    """
    T = x.shape[1]
    qkv = attention.wqkv(x).unflatten(-1, (-1, attention.head_dim))  # [B, T, H + 2 Hkv, E]
    q, k = rotary(qkv, rope, attention.heads, attention.kv_heads, attention.head_norms)
    keys.append(k.transpose(1, 2).unsqueeze(2))
    values.append(qkv[:, :, -attention.kv_heads :].transpose(1, 2).unsqueeze(2))
    q = q.transpose(1, 2).unflatten(1, (attention.kv_heads, -1)) * attention.head_dim**-0.5  # [B, Hkv, H / Hkv, T, E]
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

    def block_of(block, x, h, after, rope, kv, window):  # what Block.forward does, with the attention above
        x, h = block.ffn_norm.add(x, attend(block.attention, h, rope, *kv))
        return after.add(x, block.ffn(h))

    x, h = head.first(embedded, hidden)
    positions = torch.arange(s, s + x.shape[1], device=x.device).expand(x.shape[:2])
    return head.layers(x, rope_angles(head.rope_freq, positions), head.norm, past, None, block_of, h=h)


def unrolled_losses(
    head: EagleHead, target: Transformer, batch: tuple[Tensor, Tensor, Tensor], embedding: nn.Module, lm_head: nn.Module
) -> tuple[Tensor, ...]:
    """The loss of every step of training-time test, a sum over the rows that count divided by all B T rows.

    batch: tokens [B, T]; mask [B, T] bool; target features with the head's taps [B, T, (1 + taps) F]
    embedding, lm_head: the head's own, or the target's
    """
    tokens, mask, features = batch
    T, vocab = tokens.shape[1], head.vocab or DraftVocab(target.config.vocab_size)
    with torch.no_grad():
        z = target.logits(features)  # [B, T, V]
        drafted = vocab.spread(torch.ones(vocab.kept, device=z.device)).bool()  # [V], the official t2d
        # past the end there is no truth, and nothing counts
        known = F.pad(drafted[z.argmax(-1)], (0, STEPS))  # [B, T + STEPS]
        p = F.pad(vocab.columns(z).softmax(-1), (0, 0, 0, STEPS))  # [B, T + STEPS, N]
        mask, rows = F.pad(mask, (0, STEPS)), embedding(F.pad(tokens, (0, STEPS)))
    hidden, losses = head.fuse(features), []
    past = Past(*(tuple([] for _ in head.layers) for _ in range(2)))
    for s in range(STEPS):
        here, ahead = slice(s, s + T), slice(1 + s, 1 + s + T)
        hidden = unrolled_step(head, rows[:, ahead], hidden, s, past)  # [B, T, F]
        log_q = lm_head(head.output_norm(hidden)).float().log_softmax(-1)  # [B, T, N]
        entropy = -(p[:, ahead] * log_q).sum(-1)
        losses.append((entropy * (mask[:, here] & known[:, ahead])).sum() / tokens.numel())
    return tuple(losses)


# -------------------------------------------------------------------------------------------- new heads


def frequent_tokens(ids: Tensor, size: int, kept: int) -> DraftVocab | None:
    """The `kept` most frequent of the training tokens; of equally frequent ones the lowest. None: all `size` of them.

    ids: [M] int64, every token that is trained on
    """
    if kept >= size:
        return None
    order = ids.bincount(minlength=size).sort(descending=True, stable=True).indices
    return DraftVocab(size, order[:kept].sort().values)


def default_taps(layers: int) -> tuple[int, ...]:
    """Layers of the target whose inputs a new head takes: the official three, as far as the target has them."""
    return tuple(sorted({tap for tap in (2, layers // 2, layers - 3) if 0 <= tap <= layers}))


def new_head(model: ModelConfig, target: Transformer, vocab: DraftVocab | None, from_target: bool) -> Eagle3Head:
    """A head of version 3 with layers of the shape `model`.

    from_target: start with `fc` near the identity on the last tap, and with the target's last norm and LM head
    """
    taps, dim = default_taps(target.config.n_layers), target.config.dim
    kept = vocab.kept if vocab else model.vocab_size
    head = Eagle3Head(EagleConfig(model, fc_bias=False, three=Eagle3(taps, dim, kept, lm_head="lm_head.weight")))
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


def layout_of(head: Eagle3Head) -> tuple[dict, dict[str, Tensor]]:
    """What the official layout says of version 3: further keys of config.json, and further tensors."""
    three, vocab = head.config.three, head.vocab
    keys = {"draft_vocab_size": three.draft_vocab, "eagle_aux_hidden_state_layer_ids": list(three.taps)}
    said = {
        "use_aux_hidden_state": (bool(three.taps), True), "norm_output": (three.last_norm == "logits", True),
        "norm_before_residual": (three.norm_before_residual, False), "fc_norm": (three.fc_norm, False),
        "norm_before_fc": (three.norm_before_fc, False),
        "target_hidden_size": (three.target_dim, head.config.model.dim),
    }  # fmt: skip
    keys |= {key: value for key, (value, default) in said.items() if value != default}
    if not three.taps:
        del keys["eagle_aux_hidden_state_layer_ids"]
    if vocab is None:
        return keys, {}
    ids = vocab.ids.cpu()
    reached = torch.zeros(vocab.size, dtype=torch.bool).index_fill(0, ids, True)
    return keys, {"d2t": ids - torch.arange(len(ids)), "t2d": reached}
