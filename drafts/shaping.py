"""Cuts, biases and penalties: requests change the distribution by more than the flat files do.

Where a sequence has such parameters, a `ShapedCycle` runs. The order of everything is: biases,
penalties and masks (penalties.py), temperature, top-n-sigma, top-k, typical-p, top-p, min-p, XTC.
`cut_shaped` does all cuts in one pass (cuts.py).
- top-n-sigma keeps the scores within some standard deviations of the best (arXiv 2411.07641).
- typical-p keeps the tokens of the most usual information (arXiv 2202.00666).
- XTC drops, at some of the draws, all but the least likely of the likely tokens (p-e-w,
  text-generation-webui 6335). Its draws have noise of their own.
Drafters know the cuts but XTC. They do not know the penalties, which costs some accepted tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import sampling
from decode import DecodeState
from draft_tree import DecodedTokens, DraftTree
from drafts.noise import XTC, uniforms
from drafts.penalties import may_be, rescore
from files.tokenizer import Tokenizer
from options import require
from reference import TORCH, Backend
from run.clock import TimedCycle
from run.engine import SHAPED
from run.options import MOST_BAD_WORDS, MOST_BIASES, Sampling, parse_biases, parse_ids
from runtime import replace_fields
from sampling import SamplingTensors

LONGEST_WORD = 16  # tokens of one of `bad_words`
ALL = 2**31  # tokens
# names of `Sampling`: the cuts, which greedy sequences do not have; other numbers; counts of tokens
CUTS = ("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold")
NUMBERS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
)  # fmt: skip
COUNTS = ("repeat_last_n", "dry_penalty_last_n", "dry_allowed_length", "min_tokens")


class Shaped(NamedTuple):
    """The further parameters of B sequences, by the names of `Sampling`."""

    # [B] fp32
    top_n_sigma: Tensor  # infinity keeps all
    typical_p: Tensor
    xtc_probability: Tensor
    xtc_threshold: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    dry_multiplier: Tensor
    dry_base: Tensor
    # [B] int64
    repeat_last_n: Tensor
    dry_penalty_last_n: Tensor
    dry_allowed_length: Tensor
    min_tokens: Tensor
    answer: Tensor  # index of the answer's first token in the text

    bias_ids: Tensor  # [B, MOST_BIASES] int64; the rest is token 0
    bias: Tensor  # [B, MOST_BIASES] fp32; the rest is 0
    breakers: Tensor  # [B, V] bool, tokens at which repeats end
    allowed: Tensor  # [B, V] bool
    # [B, 2 * MOST_BAD_WORDS, LONGEST_WORD] int64, aligned at their ends; -1: no token
    bad_words: Tensor


class Shaping:
    """Makes the further parameters for the tokens of a model."""

    def __init__(
        self,
        vocab: int,
        device: torch.device | str = "cpu",
        tokenizer: Tokenizer | None = None,
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

    def rows(self, each: Sequence[Sampling]) -> Shaped:
        """Make the parameters of B sequences."""
        drawn = [own if own.temperature else Sampling(1.0) for own in each]
        none = {name: Sampling._field_defaults[name] for name in NUMBERS[:3]}
        penalised = [own if own.repeat_last_n else replace_fields(own, **none) for own in each]
        made = {name: torch.tensor([float(getattr(own, name)) for own in drawn]) for name in CUTS}
        made["top_n_sigma"].masked_fill_(made["top_n_sigma"] <= 0, math.inf)
        for name in NUMBERS:
            made[name] = torch.tensor([float(getattr(own, name)) for own in penalised])
        for name in COUNTS:  # -1: all
            made[name] = torch.tensor([getattr(own, name) % ALL for own in each])
        made["answer"] = torch.zeros(len(each), dtype=torch.long)
        of_tokens = zip(*map(self._of_tokens, each))
        for name, rows in zip(Shaped._fields[len(made) :], of_tokens):
            made[name] = torch.stack(rows)
        return Shaped(**{name: made[name].to(self.device) for name in Shaped._fields})

    def _of_tokens(self, own: Sampling) -> tuple[Tensor, ...]:
        """Make the last fields of one sequence, which name tokens."""
        ids = torch.zeros(MOST_BIASES, dtype=torch.long)
        bias = torch.zeros(MOST_BIASES)
        biases = parse_biases(own.logit_bias)
        ids[: len(biases)] = torch.tensor(list(biases), dtype=torch.long)
        bias[: len(biases)] = torch.tensor(list(biases.values()), dtype=torch.float32)
        breakers = self.breakers_of(own.dry_sequence_breakers if own.dry_multiplier > 0 else ())
        listed = parse_ids(own.allowed_token_ids)
        allowed = torch.full((self.vocab,), not listed)
        allowed[listed] = True
        words = torch.full((2 * MOST_BAD_WORDS, LONGEST_WORD), -1)
        for row, word in zip(words, self.words_of(own.bad_words)):
            row[-len(word) :] = torch.tensor(word)
        return ids, bias, breakers, allowed, words

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


class ShapedRule(SamplingTensors):
    """The rule of sequences with further parameters (`Shaped`)."""

    __slots__ = ()

    def cut(self, logits: Tensor, backend: Backend = TORCH, xtc: Tensor | None = None) -> Tensor:
        """Apply the temperature and all cuts, as `SamplingTensors.cut`.

        xtc: [B, N] fp32, of `xtc_at`; None: it never acts
        """
        own = (self.temperature, self.top_k, self.top_p, self.margin)
        further = (self.further.top_n_sigma, self.further.typical_p)
        return backend.cut_shaped(logits, *own, *further, xtc)

    def xtc_at(self, draws: Tensor) -> Tensor:
        """Return the threshold of XTC at every draw, [B, N] fp32; infinity where it does not act.

        draws: [B, N] int64
        """
        threshold = torch.full(draws.shape, float("inf"), device=draws.device)  # [B, N]
        probability = self.further.xtc_probability
        if may_be(probability > 0):
            acts = uniforms(self, draws, 1, XTC)[:, :, 0] < probability[:, None]
            threshold = torch.where(acts, self.further.xtc_threshold[:, None], threshold)
        return threshold


class ShapedCycle(TimedCycle):
    """A cycle that knows all parameters, in the mode above those of the flat files."""

    def __init__(self, engine, drafter, mode: int):
        super().__init__(engine, drafter, mode)
        self.is_shaped = mode == SHAPED and engine.shaping is not None
        self.ends_of_text = engine.shaping.ends if self.is_shaped else None  # [V] bool

    def noise(self, state: DecodeState, rows: int) -> tuple[SamplingTensors | None, Tensor | None]:
        """Do as `Cycle.noise`. Without noise the choice is the best of the changed scores."""
        if not self.is_shaped:
            return super().noise(state, rows)
        rule = ShapedRule(*state.sampling)
        if not may_be(~rule.greedy):
            return None, None
        vocab = self.target.config.vocab_size
        return rule, sampling.gumbel(rule, state.draws, rows, vocab, backend=self.backend)

    def choose(
        self,
        state: DecodeState,
        text: DecodedTokens,
        tree: DraftTree,
        noise: Tensor | None,
        features: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Do as `Cycle.choose`."""
        if not self.is_shaped:
            return super().choose(state, text, tree, noise, features)
        rule = ShapedRule(*state.sampling)
        scores = rescore(self.scores(tree, features), rule.further, self.ends_of_text, text, tree)
        z = scores
        if noise is not None:
            z = rule.cut(scores, self.backend, rule.xtc_at(state.draws[:, None] + tree.depths))
        return self.backend.best(z, noise, tree.depths), scores
