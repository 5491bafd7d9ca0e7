"""Log-probabilities of decided tokens, for the sequences that ask for them.

They are the target's own, its fp32 log-softmax before temperature, top-k and top-p. The LM head
runs once more, over the accepted path alone: a cycle stays as it is, and no one else pays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode import CycleResult
from draft_tree import DrafterUpdate
from files.machine import single_torch_thread
from model import Transformer
from run.observer import Observer, View


class Logprob(NamedTuple):
    """The log-probability of a decided token, and the likeliest tokens at its place."""

    own: float
    top: list[tuple[int, float]]  # (token, log-probability), best first


def scored(
    target: Transformer, features: Tensor, tokens: Tensor, likeliest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Score decided tokens.

    features: [W, R, F], of the target, before each token
    tokens: [W, R] int64; padding is scored, too
    Returns: [W, R] fp32, their log-probabilities; [W, R, likeliest], the likeliest tokens at their
        places, and the log-probabilities of these.
    """
    with single_torch_thread(target.program is not None):
        logits = target.logits(features)  # [W, R, V] fp32
        top, ids, total = target.backend.topk(logits, max(1, likeliest))
        own = logits.gather(2, tokens[:, :, None]) - total  # [W, R, 1]
        return own.squeeze(2), ids, top - total


def entries(own: list[float], ids: list, top: list, likeliest: int) -> list[Logprob]:
    """Return the log-probabilities of a sequence. own, ids, top: of `scored`, as lists"""
    best = [list(zip(*both))[:likeliest] for both in zip(ids, top)]
    return [Logprob(*entry) for entry in zip(own, best)]


class Logprobs(Observer):
    """Scores the tokens of a session's sequences, for those that `want` it."""

    def __init__(self, target: Transformer):
        self.target = target
        self.wanted: dict[int, int] = {}  # sequences, and how many likeliest tokens with each token
        self.scored: dict[int, list[Logprob]] = {}  # not taken yet

    def want(self, seq: int, likeliest: int | None) -> None:
        """Score an idle sequence from now on. likeliest: tokens beside each; None: no longer"""
        self.wanted.pop(seq, None)
        self.scored.pop(seq, None)
        if likeliest is not None:
            self.wanted[seq] = likeliest

    def take(self, seq: int) -> list[Logprob]:
        """Return the log-probabilities of the tokens since the last call, in their order."""
        return self.scored.pop(seq, [])

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        seqs = [seq for seq in self.wanted if view.live[seq]]
        if not seqs:
            return ()
        most = max(self.wanted[seq] for seq in seqs)
        rows = [seq - view.rows.start for seq in seqs]  # of the cycle
        tokens = update.tokens[rows, 1:]
        return (torch.tensor(seqs), *scored(self.target, update.features[rows], tokens, most))

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        for seq, *columns in zip(*copied):
            if seq in result.taken:
                logprobs = entries(*columns, self.wanted[seq])
                self.scored.setdefault(seq, []).extend(logprobs[: len(result.taken[seq])])

    def after_prompt(self, seq: int, features: Tensor, root: int) -> None:
        if seq in self.wanted:
            token = features.new_full((1, 1), root, dtype=torch.long)
            likeliest = self.wanted[seq]
            columns = [x.tolist()[0] for x in scored(self.target, features, token, likeliest)]
            self.scored.setdefault(seq, []).extend(entries(*columns, likeliest))
