"""Biases, masks, and penalties of tokens that the text has already; exact with draft trees.

A node's scores depend on the tokens of its own path alone, which continue the decided text. So the
target's choices are the same whatever is drafted. In this order, as in llama.cpp and vLLM:

1. `logit_bias` is added to the scores of its tokens.
2. `repetition_penalty` divides the score of every token of the text, or multiplies one below 0
   (CTRL, arXiv 1909.05858). `presence_penalty` is subtracted from the score of every token of the
   answer, `frequency_penalty` once for each time that it is there (OpenAI). They look back at
   `repeat_last_n` tokens.
3. DRY subtracts multiplier * base ^ (length - allowed length) from the score of a token that would
   prolong a repeat of that length (p-e-w, text-generation-webui 5677; llama.cpp). Repeats end at
   tokens with a sequence breaker in them. Longer ones count as `MOST_REPEATED`.
4. `allowed_token_ids` alone may follow; the last token of one of `bad_words` may not follow the
   others; before `min_tokens` tokens no answer ends (vLLM). A mask that would leave no token has
   no effect there, and grammars go before masks.

Everything is tensor operations of fixed shape, so that a CUDA cycle stays captured. Drafters do not
know of it: it costs some accepted tokens. Not here: refusals of other values (run/options.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draft_tree import DecodedTokens, DraftTree
from sampling import on_host

MOST_REPEATED = 32  # tokens; by the usual base such a repeat costs 2 * 10**7
MOST_PENALTY = 1e9  # below fp32's range, so that a token that alone may follow still does


def may_be(*conditions: Tensor) -> bool:
    """Return whether any of some conditions may hold for any sequence."""
    return not on_host(conditions[0]) or any(bool(each.any()) for each in conditions)


def rescore(
    scores: Tensor, shaped: Any, ends: Tensor, text: DecodedTokens, tree: DraftTree
) -> Tensor:
    """Return changed scores, [B, N, V] fp32, by tensor operations of fixed shape.

    scores: [B, N, V] fp32, of the token after each node
    shaped: `shaping.Shaped`; ends: [V] bool, tokens that end an answer
    text: all tokens up to the root
    Writes: scores.
    """
    if may_be(shaped.bias != 0):
        nodes = scores.shape[1]
        biased = shaped.bias_ids[:, None].expand(-1, nodes, -1)
        scores.scatter_add_(2, biased, shaped.bias[:, None].expand(-1, nodes, -1))
    answered = text.pos[:, None] + tree.depths + 1 - shaped.answer[:, None]  # [B, N], tokens
    penalties = (shaped.repetition_penalty != 1, shaped.presence_penalty, shaped.frequency_penalty)
    repeated = may_be(*penalties)
    prolonged = may_be(shaped.dry_multiplier > 0)
    bad = may_be(shaped.bad_words >= 0)
    if repeated or prolonged or bad:
        texts = texts_of_nodes(text, tree, scores.shape[2])
        if repeated:
            penalise_repeated(scores, texts, answered, shaped)
        if prolonged:
            penalise_prolonged(scores, texts, shaped)
    if may_be(~shaped.allowed):
        mask(scores, shaped.allowed[:, None])
    if bad:
        mask(scores, complete_no_word(texts.ids, answered, shaped.bad_words, scores.shape[2]))
    too_short = answered < shaped.min_tokens[:, None]  # [B, N]
    if may_be(too_short):
        mask(scores, ~(ends & too_short[:, :, None]))
    return scores


class Texts(NamedTuple):
    """The tokens up to every node of a tree, aligned at their ends."""

    ids: Tensor  # [B, N, T] int64; -1: none
    # [B, N, T] int64 up to T, one for each token, wherever it is: tables of counts need no V
    places: Tensor


def texts_of_nodes(text: DecodedTokens, tree: DraftTree, vocab: int) -> Texts:
    """Return the texts that end at the nodes. vocab: V"""
    count = tree.tokens.shape[1]
    decided = text.tokens.shape[1]
    if on_host(text.pos):
        decided = int(text.pos.max()) + 1
    every = torch.cat((text.tokens[:, :decided], tree.tokens), 1)  # [B, T + 1]
    index = torch.arange(decided + count, device=every.device).expand_as(every)
    latest = every.new_zeros(len(every), vocab).scatter_(1, every, index)  # [B, V]
    place = latest.gather(1, every)  # [B, T + 1]

    by_depth = tree.depths[:, None].expand(-1, count, -1)  # [B, N, N]
    path = tree.mask * index[:, None, decided:]
    path = torch.zeros_like(path).scatter_add(2, by_depth, path)  # its node of every depth
    back = torch.arange(2 - decided - count, 1, device=path.device)  # [T]
    depth = tree.depths[:, :, None] + back  # [B, N, T]
    earlier = text.pos[:, None, None] + depth
    source = torch.where(depth > 0, path.gather(2, depth.clamp(min=0)), earlier.clamp(min=0))
    ids = every[:, None].expand(-1, count, -1).gather(2, source).masked_fill(earlier < 0, -1)
    return Texts(ids, place[:, None].expand(-1, count, -1).gather(2, source))


def penalise_repeated(scores: Tensor, texts: Texts, answered: Tensor, shaped: Any) -> None:
    """Apply the penalties of tokens that are there already. Writes: scores.

    scores: [B, N, V] fp32; texts: of the N nodes
    answered: [B, N] int64, tokens of the answer up to each node
    """
    ids = texts.ids
    width = ids.shape[2]
    column = torch.arange(width, device=ids.device)  # [T]
    seen = (ids >= 0) & (column >= width - shaped.repeat_last_n[:, None, None])
    counts = seen & (column >= width - answered[:, :, None])
    # columns whose tokens are not seen repeat the last one, whose token is
    tokens = torch.where(seen, ids, ids[..., -1:])
    places = torch.where(seen, texts.places, texts.places[..., -1:])
    times = pad(torch.zeros_like(ids), (0, 1)).scatter_add_(2, places, counts.long())
    times = times.gather(2, places)
    own = scores.gather(2, tokens)
    factor = shaped.repetition_penalty[:, None, None]
    own = torch.where(own > 0, own / factor, own * factor)
    own = own - times * shaped.frequency_penalty[:, None, None]
    own = own - (times > 0) * shaped.presence_penalty[:, None, None]
    scores.scatter_(2, tokens, own)  # equal tokens have equal scores


def penalise_prolonged(scores: Tensor, texts: Texts, shaped: Any) -> None:
    """Apply DRY. Writes: scores, [B, N, V] fp32. texts: of the N nodes"""
    ids = texts.ids
    width = ids.shape[2]
    column = torch.arange(width, device=ids.device)
    inside = (ids >= 0) & (column >= width - shaped.dry_penalty_last_n[:, None, None])
    tokens = ids.clamp(min=0)
    breaks = shaped.breakers.gather(1, tokens.flatten(1)).view_as(tokens)
    readable = inside & ~breaks
    earlier = ids.masked_fill(~readable, -1)
    last = ids.masked_fill(~readable, -2)  # no match
    # the longest repeat that each token prolongs; the last place is of no token
    longest = pad(torch.zeros_like(ids), (0, 2))
    matches = inside
    for back in range(1, min(MOST_REPEATED, width - 1) + 1):
        before = pad(earlier[..., :-back], (back, 0), value=-1)
        matches = matches & (before == last[..., width - back : width - back + 1])
        if on_host(ids) and not bool(matches.any()):
            break
        longest.scatter_(2, texts.places.masked_fill(~matches, width + 1), back)
    beyond = longest.gather(2, texts.places) - shaped.dry_allowed_length[:, None, None]
    growth = shaped.dry_base[:, None, None] ** beyond.clamp(min=0)
    penalty = shaped.dry_multiplier[:, None, None] * growth
    own = scores.gather(2, tokens)
    changed = own - penalty.clamp(max=MOST_PENALTY)
    scores.scatter_(2, tokens, torch.where(beyond >= 0, changed, own))


def complete_no_word(ids: Tensor, answered: Tensor, words: Tensor, vocab: int) -> Tensor:
    """Return the tokens that complete no word behind each node, [B, N, V] bool.

    ids: [B, N, T], of `Texts`; answered: [B, N] int64, as of `penalise_repeated`
    words: [B, W, L] int64, of `Shaped`; vocab: V
    """
    before = words.shape[2] - 1  # tokens
    column = torch.arange(-before, 0, device=ids.device)
    ends = pad(ids, (before, 0), value=-2)[..., ids.shape[2] :]  # [B, N, L - 1]
    ends = ends.masked_fill(column < -answered[:, :, None], -2)
    begins = words[:, None, :, :-1]  # [B, 1, W, L - 1]
    begun = ((begins == ends[:, :, None]) | (begins < 0)).all(-1)  # [B, N, W]
    last = words[:, None, :, -1]  # [B, 1, W]; -1: no word
    token = torch.where(begun & (last >= 0), last, vocab)
    completes = torch.zeros(*ids.shape[:2], vocab + 1, dtype=torch.bool, device=ids.device)
    return ~completes.scatter_(2, token, True)[..., :vocab]


def mask(scores: Tensor, keep: Tensor) -> None:
    """Drop the tokens that are not to keep, unless none would be left. Writes: scores.

    scores: [B, N, V] fp32; keep: bool, of that shape or one that expands to it
    """
    some = (keep & (scores > float("-inf"))).any(-1, keepdim=True)  # [B, N, 1]
    scores.masked_fill_(~keep & some, float("-inf"))
