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

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draft_tree import DecodedTokens, DraftTree
from files.tokenizer import Tokenizer
from options import require
from run.options import MOST_BAD_WORDS, MOST_BIASES, Sampling, parse_biases, parse_ids
from sampling import may_be, on_host

LONGEST_WORD = 16  # tokens of one of `bad_words`
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
    allowed: Tensor  # [B, V] bool
    # [B, 2 * MOST_BAD_WORDS, LONGEST_WORD] int64, aligned at their ends; -1: no token
    bad_words: Tensor
    min_tokens: Tensor  # [B] int64


class Penalties:
    """Biases, penalties and masks for the tokens of a model."""

    def __init__(
        self,
        vocab: int,
        device: torch.device,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...] = (),
    ):
        """vocab: V; without a tokenizer no token has a text"""
        self.vocab = vocab
        self.device = device
        self.tokenizer = tokenizer
        self.ends = torch.zeros(vocab, dtype=torch.bool, device=device)  # [V]
        self.ends[[id for id in eos_ids if id < vocab]] = True  # a tokenizer may have more tokens
        self.breakers_of = lru_cache(maxsize=8)(self._breakers)
        self.words_of = lru_cache(maxsize=64)(self._words)

    def check(self, own: Sampling) -> None:
        """Check that the tokens that parameters name exist. Raises: ValueError."""
        for name, ids in (
            ("logit_bias", parse_biases(own.logit_bias)),
            ("allowed_token_ids", parse_ids(own.allowed_token_ids)),
        ):
            for token in ids:
                fault = f"{name}: token ids must be in 0..{self.vocab - 1}; one is {token}"
                require(token < self.vocab, fault)
        words = self.words_of(own.bad_words)
        longest = max(map(len, words), default=0)
        fault = f"one of bad_words has {longest} tokens; {LONGEST_WORD} are the most"
        require(longest <= LONGEST_WORD, fault)
        allowed = set(parse_ids(own.allowed_token_ids))
        single = {word[0] for word in words if len(word) == 1}
        fault = "bad_words has all of allowed_token_ids; leave one out"
        require(not allowed or not allowed <= single, fault)

    def rows(self, each: Sequence[Sampling]) -> Rows:
        """Make the parameters of B sequences."""
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
            numbers(*(own.repetition_penalty if own.repeat_last_n else 1 for own in each)),
            numbers(*(own.presence_penalty if own.repeat_last_n else 0 for own in each)),
            numbers(*(own.frequency_penalty if own.repeat_last_n else 0 for own in each)),
            tokens(*(own.repeat_last_n for own in each)),
            numbers(*(own.dry_multiplier for own in each)),
            numbers(*(own.dry_base for own in each)),
            tokens(*(own.dry_allowed_length for own in each)),
            tokens(*(own.dry_penalty_last_n for own in each)),
            torch.stack([self.breakers_of(self._texts_of(own)) for own in each]),
            torch.stack([self._allowed(own) for own in each]),
            torch.stack([self._bad_words(own) for own in each]),
            tokens(*(own.min_tokens for own in each)),
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

    def _words(self, texts: tuple[str, ...]) -> list[list[int]]:
        """Return the tokens of words, each at the beginning of a text and behind a space.

        Source: vLLM's `SamplingParams.update_from_tokenizer`.
        Raises: ValueError for a word without tokens, and where there is no tokenizer.
        """
        require(not texts or self.tokenizer is not None, "bad_words needs a tokenizer; drop it")
        words = []
        for text in texts:
            bare, spaced = (self.tokenizer.encode(s + text.lstrip(), bos=False) for s in ("", " "))
            require(bare != [], f"{text!r} of bad_words has no token; drop it")
            words.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                words.append(spaced)
        return words

    def _bad_words(self, own: Sampling) -> Tensor:
        padded = torch.full((2 * MOST_BAD_WORDS, LONGEST_WORD), -1)
        for row, word in zip(padded, self.words_of(own.bad_words)):
            row[-len(word) :] = torch.tensor(word)
        return padded

    def _allowed(self, own: Sampling) -> Tensor:
        ids = parse_ids(own.allowed_token_ids)
        allowed = torch.full((self.vocab,), not ids)
        allowed[ids] = True
        return allowed

    def rescore(
        self, scores: Tensor, rows: Rows, answer: Tensor, text: DecodedTokens, tree: DraftTree
    ) -> Tensor:
        """Return changed scores, [B, N, V] fp32, by tensor operations of fixed shape.

        scores: [B, N, V] fp32, of the token after each node
        answer: [B] int64, index of the answer's first token; text: all tokens up to the root
        Writes: scores.
        """
        if may_be(rows.bias != 0):
            nodes = scores.shape[1]
            biased = rows.bias_ids[:, None].expand(-1, nodes, -1)
            scores.scatter_add_(2, biased, rows.bias[:, None].expand(-1, nodes, -1))
        answered = text.pos[:, None] + tree.depths + 1 - answer[:, None]  # [B, N], tokens
        repeated = may_be(rows.repetition != 1, rows.presence != 0, rows.frequency != 0)
        prolonged = may_be(rows.multiplier > 0)
        bad = may_be(rows.bad_words >= 0)
        if repeated or prolonged or bad:
            texts = texts_of_nodes(text, tree, self.vocab)
            if repeated:
                penalise_repeated(scores, texts, answered, rows)
            if prolonged:
                penalise_prolonged(scores, texts, rows)
        if may_be(~rows.allowed):
            mask(scores, rows.allowed[:, None])
        if bad:
            mask(scores, complete_no_word(texts.ids, answered, rows.bad_words, self.vocab))
        too_short = answered < rows.min_tokens[:, None]  # [B, N]
        if may_be(too_short):
            mask(scores, ~(self.ends & too_short[:, :, None]))
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


def penalise_repeated(scores: Tensor, texts: Texts, answered: Tensor, rows: Rows) -> None:
    """Apply the penalties of tokens that are there already. Writes: scores.

    scores: [B, N, V] fp32; texts: of the N nodes
    answered: [B, N] int64, tokens of the answer up to each node
    """
    ids = texts.ids
    width = ids.shape[2]
    column = torch.arange(width, device=ids.device)  # [T]
    seen = (ids >= 0) & (column >= width - rows.looked_at[:, None, None])
    counts = seen & (column >= width - answered[:, :, None])
    # columns whose tokens are not seen repeat the last one, whose token is
    tokens = torch.where(seen, ids, ids[..., -1:])
    places = torch.where(seen, texts.places, texts.places[..., -1:])
    times = pad(torch.zeros_like(ids), (0, 1)).scatter_add_(2, places, counts.long())
    times = times.gather(2, places)
    own = scores.gather(2, tokens)
    factor = rows.repetition[:, None, None]
    own = torch.where(own > 0, own / factor, own * factor)
    own = own - times * rows.frequency[:, None, None]
    own = own - (times > 0) * rows.presence[:, None, None]
    scores.scatter_(2, tokens, own)  # equal tokens have equal scores


def penalise_prolonged(scores: Tensor, texts: Texts, rows: Rows) -> None:
    """Apply DRY. Writes: scores, [B, N, V] fp32. texts: of the N nodes"""
    ids = texts.ids
    width = ids.shape[2]
    column = torch.arange(width, device=ids.device)
    inside = (ids >= 0) & (column >= width - rows.dry_looked_at[:, None, None])
    tokens = ids.clamp(min=0)
    breaks = rows.breakers.gather(1, tokens.flatten(1)).view_as(tokens)
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
    beyond = longest.gather(2, texts.places) - rows.allowed_length[:, None, None]
    penalty = rows.multiplier[:, None, None] * rows.base[:, None, None] ** beyond.clamp(min=0)
    own = scores.gather(2, tokens)
    changed = own - penalty.clamp(max=MOST_PENALTY)
    scores.scatter_(2, tokens, torch.where(beyond >= 0, changed, own))


def complete_no_word(ids: Tensor, answered: Tensor, words: Tensor, vocab: int) -> Tensor:
    """Return the tokens that complete no word behind each node, [B, N, V] bool.

    ids: [B, N, T], of `Texts`; answered: [B, N] int64, as of `penalise_repeated`
    words: [B, W, L] int64, of `Rows`; vocab: V
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
