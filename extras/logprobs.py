"""Log-probabilities of decided tokens, for the sequences that ask for them.

They are the target's own, its fp32 log-softmax before temperature, top-k and top-p. The LM head
runs once more, over the accepted path alone: a cycle stays as it is, and no one else pays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drafters import DrafterUpdate
from model import Transformer
from ops.library import single_torch_thread
from runtime import HostCopy
from session import CycleResult, Reader


class Logprob(NamedTuple):
    """The log-probability of a decided token, and the likeliest tokens at its place."""

    own: float
    top: list[tuple[int, float]]  # (token, log-probability), best first


class ScoredStep(NamedTuple):
    """The log-probabilities of a step's tokens, on their way to the host."""

    likeliest: dict[int, int]  # how many of the likeliest tokens each sequence gets
    copy: HostCopy

    @staticmethod
    def launch(
        target: Transformer, features: Tensor, tokens: Tensor, likeliest: dict[int, int]
    ) -> ScoredStep:
        """Launch the passes.

        features: [B, R, F], of the target, before each token
        tokens: [B, R] int64, the decided tokens; padding is scored, too
        """
        seqs = list(likeliest)
        with single_torch_thread(target.fused is not None):
            logits = target.logits(features[seqs])  # [W, R, V] fp32
            top, ids, total = target.backend.topk(logits, max(1, *likeliest.values()))
            own = logits.gather(2, tokens[seqs][:, :, None]) - total  # [W, R, 1]
            return ScoredStep(likeliest, HostCopy(own.squeeze(2), ids, top - total))

    def read(self) -> dict[int, list[Logprob]]:
        """Wait for the copy. Returns: by sequence, R entries each."""
        found = {}
        for (seq, count), own, ids, top in zip(self.likeliest.items(), *self.copy.read()):
            best = [list(zip(*both))[:count] for both in zip(ids, top)]
            found[seq] = [Logprob(*entry) for entry in zip(own, best)]
        return found


class Logprobs(Reader):
    """ScoredStep the tokens of a session's sequences, for those that `want` it."""

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

    def launched(self, update: DrafterUpdate, live: list[bool]) -> ScoredStep | None:
        wanted = {seq: count for seq, count in self.wanted.items() if live[seq]}
        if not wanted:
            return None
        return ScoredStep.launch(self.target, update.features, update.tokens[:, 1:], wanted)

    def read(self, copies: ScoredStep, result: CycleResult, taken: dict[int, list[int]]) -> None:
        for seq, scored in copies.read().items():
            if seq in taken:
                self.scored.setdefault(seq, []).extend(scored[: len(taken[seq])])

    def decided_root(self, seq: int, features: Tensor, root: int) -> None:
        if seq in self.wanted:
            token = features.new_full((1, 1), root, dtype=torch.long)
            scored = ScoredStep.launch(self.target, features, token, {0: self.wanted[seq]})
            self.scored.setdefault(seq, []).extend(scored.read()[0])
