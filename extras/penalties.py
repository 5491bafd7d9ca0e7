"""Biases of tokens, and penalties of those that the text has already; exact with draft trees.

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

Everything is tensor operations of fixed shape, so that a CUDA cycle stays captured. Drafters do not
know of it: it costs some accepted tokens. Not here: refusals of values (options.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from decode import Rescorer
from draft_tree import DecodedTokens, DraftTree
from hf.tokenizer import Tokenizer
from options import MOST_BIASES, Sampling, parse_biases
from sampling import SamplingTensors

MOST_REPEATED = 32  # tokens; by the usual base such a repeat costs 2 * 10**7
MOST_PENALTY = 1e9  # below fp32's range, so that a token that alone may follow still does


class Rows(NamedTuple):
    """The parameters of B sequences."""

    bias_ids: Tensor  # [B, MOST_BIASES] int64; the rest is token 0
    bias: Tensor  # [B, MOST_BIASES] fp32; the rest is 0
    repetition: Tensor  # [B] fp32, 1 changes nothing
    presence: Tensor  # [B] fp32
    frequency: Tensor  # [B] fp32
    looked_at: Tensor  # [B] int64, tokens that these look back at
    multiplier: Tensor  # [B] fp32, 0 changes nothing
    base: Tensor  # [B] fp32
    allowed_length: Tensor  # [B] int64
    dry_looked_at: Tensor  # [B] int64
    breakers: Tensor  # [B, V] bool, tokens at which repeats end


class Penalties(Rescorer):
    """Biases and penalties for the tokens of a model."""

    def __init__(self, vocab: int, device: torch.device, tokenizer: Tokenizer | None):
        """vocab: V; without a tokenizer no token has a text"""
        self.vocab = vocab
        self.device = device
        self.tokenizer = tokenizer
        self.breakers_of = lru_cache(maxsize=8)(self._breakers)

    def rows(self, each: Sequence[Sampling]) -> Rows:
        ids = torch.zeros(len(each), MOST_BIASES, dtype=torch.long)
        bias = torch.zeros(len(each), MOST_BIASES)
        for row, own in enumerate(each):
            biases = parse_biases(own.logit_bias)
            ids[row, : len(biases)] = torch.tensor(list(biases), dtype=torch.long)
            bias[row, : len(biases)] = torch.tensor(list(biases.values()), dtype=torch.float32)

        def numbers(*values: float) -> Tensor:
            return torch.tensor(values, dtype=torch.float32)

        def tokens(*counts: int) -> Tensor:  # -1: all
            return torch.tensor([count if count >= 0 else 2**31 for count in counts])

        made = Rows(
            ids,
            bias,
            numbers(*(own.repetition_penalty for own in each)),
            numbers(*(own.presence_penalty for own in each)),
            numbers(*(own.frequency_penalty for own in each)),
            tokens(*(own.repeat_last_n for own in each)),
            numbers(*(own.dry_multiplier for own in each)),
            numbers(*(own.dry_base for own in each)),
            tokens(*(own.dry_allowed_length for own in each)),
            tokens(*(own.dry_penalty_last_n for own in each)),
            torch.stack([self.breakers_of(self._texts_of(own)) for own in each]),
        )
        return Rows(*(column.to(self.device) for column in made))

    @staticmethod
    def _texts_of(own: Sampling) -> tuple[str, ...]:
        return own.dry_sequence_breakers if own.dry_multiplier > 0 else ()

    def _breakers(self, texts: tuple[str, ...]) -> Tensor:
        """Return the tokens that have one of some texts in them, [V] bool."""
        found = torch.zeros(self.vocab, dtype=torch.bool)
        if texts and self.tokenizer is not None:
            pattern = re.compile(b"|".join(re.escape(text.encode()) for text in texts))
            for id, piece in enumerate(self.tokenizer.token_bytes()[: self.vocab]):
                found[id] = pattern.search(piece) is not None
        return found

    def rescore(
        self, scores: Tensor, rule: SamplingTensors, text: DecodedTokens, tree: DraftTree
    ) -> Tensor:
        rows: Rows = rule.penalties
        nodes = scores.shape[1]
        ids = texts_of_nodes(text, tree)  # [B, N, T]
        biased = rows.bias_ids[:, None].expand(-1, nodes, -1)
        bias = rows.bias[:, None].expand(-1, nodes, -1)
        scores = scores.scatter_add(2, biased, bias)
        if may_be(rows.repetition != 1, rows.presence != 0, rows.frequency != 0):
            first = rule.answer[:, None] - text.pos[:, None] - tree.depths  # [B, N]
            scores = penalise_repeated(scores, ids, ids.shape[2] - 1 + first, rows)
        if may_be(rows.multiplier > 0):
            scores = penalise_prolonged(scores, ids, rows)
        return scores


def on_host(x: Tensor) -> bool:
    """Return whether the values of a tensor are known without a wait for the device.

    Where they are not, a step does everything that some value may need.
    """
    return not (x.is_cuda or torch.compiler.is_compiling())


def may_be(*conditions: Tensor) -> bool:
    """Return whether any of some conditions may hold for any sequence."""
    return not on_host(conditions[0]) or any(bool(each.any()) for each in conditions)


def texts_of_nodes(text: DecodedTokens, tree: DraftTree) -> Tensor:
    """Return the tokens up to every node, aligned at their ends, [B, N, T] int64; -1: none."""
    count = tree.tokens.shape[1]
    decided = text.tokens.shape[1]
    if on_host(text.pos):
        decided = int(text.pos.max()) + 1
    by_depth = tree.depths[:, None].expand(-1, count, -1)  # [B, N, N]
    path = (tree.tokens[:, None] * tree.mask).to(torch.long)
    path = torch.zeros_like(path).scatter_add(2, by_depth, path)  # its token of every depth
    back = torch.arange(2 - decided - count, 1, device=path.device)  # [T]
    depth = tree.depths[:, :, None] + back  # [B, N, T]
    place = text.pos[:, None, None] + depth
    index = place.clamp(0, text.tokens.shape[1] - 1)
    earlier = text.tokens[:, None].expand(-1, count, -1).gather(2, index)
    drafted = path.gather(2, depth.clamp(min=0))
    return torch.where(depth > 0, drafted, earlier).masked_fill(place < 0, -1)


def penalise_repeated(scores: Tensor, ids: Tensor, answer: Tensor, rows: Rows) -> Tensor:
    """Apply the penalties of tokens that are there already.

    scores: [B, N, V] fp32; ids: [B, N, T], of `texts_of_nodes`
    answer: [B, N] int64, the column of the answer's first token
    """
    column = torch.arange(ids.shape[2], device=ids.device)  # [T]
    seen = (ids >= 0) & (column >= ids.shape[2] - rows.looked_at[:, None, None])
    answered = seen & (column >= answer[:, :, None])
    tokens = ids.clamp(min=0)

    def counted(which: Tensor) -> Tensor:  # [B, N, T], how often each token is there
        counts = torch.zeros_like(scores).scatter_add(2, tokens, which.to(scores.dtype))
        return counts.gather(2, tokens)

    own = scores.gather(2, tokens)
    factor = rows.repetition[:, None, None]
    changed = torch.where(own > 0, own / factor, own * factor)
    own = torch.where(counted(seen) > 0, changed, own)
    times = counted(answered)
    own = own - times * rows.frequency[:, None, None]
    own = own - (times > 0) * rows.presence[:, None, None]
    return scores.scatter(2, tokens, own)  # equal tokens have equal scores


def penalise_prolonged(scores: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """Apply DRY. scores: [B, N, V] fp32; ids: [B, N, T], of `texts_of_nodes`"""
    width = ids.shape[2]
    column = torch.arange(width, device=ids.device)
    inside = (ids >= 0) & (column >= width - rows.dry_looked_at[:, None, None])
    tokens = ids.clamp(min=0)
    breaks = rows.breakers.gather(1, tokens.flatten(1)).view_as(tokens)
    readable = inside & ~breaks
    earlier = ids.masked_fill(~readable, -1)
    last = ids.masked_fill(~readable, -2)  # no match
    # the longest repeat that each token prolongs; the last column is of no token
    longest = scores.new_zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.int32)
    matches = inside
    for back in range(1, min(MOST_REPEATED, width - 1) + 1):
        before = pad(earlier[..., :-back], (back, 0), value=-1)
        matches = matches & (before == last[..., width - back : width - back + 1])
        if on_host(ids) and not bool(matches.any()):
            break
        longest = longest.scatter(2, tokens.masked_fill(~matches, scores.shape[2]), back)
    beyond = longest.gather(2, tokens) - rows.allowed_length[:, None, None]
    penalty = rows.multiplier[:, None, None] * rows.base[:, None, None] ** beyond.clamp(min=0)
    own = scores.gather(2, tokens)
    changed = own - penalty.clamp(max=MOST_PENALTY)
    return scores.scatter(2, tokens, torch.where(beyond >= 0, changed, own))
