"""Texts of past requests, which a lookup searches beside the text so far (ngram_draft.py).

1. `add` puts the text of a finished request, prompt and answer, behind the texts before it. A text
   that it begins with makes way for it: an earlier turn of the conversation.
2. A text counts as used where a new answer repeats RUN of its tokens. The least recently used texts
   make way for new ones, so that all fit CAPACITY tokens. Later texts win among equal matches.
3. `tokens` has them in a buffer of fixed size and address, for all sequences of a batch. It changes
   between requests only: a decode cycle copies nothing to the device.

Kept texts change the speed and never a token. Trade-off: a lookup scans all of them, 30 to 90 us a
cycle on a CPU for 16,384 tokens, where 65,536 took up to 360.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from model import Transformer
from run.methods import spec_of
from run.options import GenerateConfig

CAPACITY = 16384  # tokens, with a separator behind each text
RUN = 8  # tokens


class PastText(NamedTuple):
    """A text."""

    tokens: list[int]
    runs: set[int]  # digests of its runs of RUN tokens

    @staticmethod
    def of(tokens: list[int], begin: int = 0) -> PastText:
        """Keep the runs of some tokens. begin: of the first run"""
        runs = zip(*(tokens[begin + i :] for i in range(RUN)))
        return PastText(tokens, set(map(hash, runs)))


class PastTexts:
    """The texts, from the least to the most recently used one."""

    def __init__(self, device: torch.device | str = "cpu", capacity: int = CAPACITY):
        """capacity: tokens and separators"""
        self.texts: list[PastText] = []
        self.capacity = capacity
        # [C] int64, the texts at its end; -1 is no token: a separator, or padding in front
        self.tokens = torch.full((capacity,), -1, dtype=torch.long, device=device)
        self.searched = self.tokens[capacity:]  # without the padding

    def add(self, text: list[int], begin: int = 0) -> None:
        """Keep a text. begin: where its answer begins. Writes: tokens."""
        answer = PastText.of(text, begin).runs
        text = text[-(self.capacity - 1) :]
        others = [kept for kept in self.texts if text[: len(kept.tokens)] != kept.tokens]
        others.sort(key=lambda kept: not answer.isdisjoint(kept.runs))  # stable: used ones last
        self._set([*others, PastText.of(text)])

    def _set(self, texts: list[PastText]) -> None:
        """Keep the last texts that fit. Writes: tokens."""
        place = self.capacity
        first = len(texts)
        while first and len(texts[first - 1].tokens) < place:
            first -= 1
            place -= len(texts[first].tokens) + 1
        self.texts = texts[first:]
        self.searched = self.tokens[place:]
        row = np.full(self.capacity, -1)
        for tokens, _ in self.texts:
            row[place : place + len(tokens)] = tokens
            place += len(tokens) + 1
        self.tokens.copy_(torch.from_numpy(row))


def texts_for(config: GenerateConfig, target: Transformer) -> PastTexts | None:
    """Make what is kept of past requests; None where none is used."""
    spec = spec_of(config)
    beside = spec.head and config.tree_shape == "auto" and config.device == "cpu"
    # under the residual rule the drafts of past requests would change the tokens
    if config.accept != "exact" or not (spec.searches_text or beside):
        return None
    return PastTexts(target.norm.weight.device)
