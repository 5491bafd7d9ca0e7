"""Log-probabilities of decided tokens, for the sequences that ask for them.

They are the target's own, its fp32 log-softmax before temperature, top-k and top-p. The LM head
runs once more, over the accepted path alone: a cycle stays as it is, and no one else pays.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from model import Transformer
from ops.library import single_torch_thread
from ops.topk import topk_logsumexp
from runtime import HostCopy


class Logprob(NamedTuple):
    """The log-probability of a decided token, and the likeliest tokens at its place."""

    own: float
    top: list[tuple[int, float]]  # (token, log-probability), best first


class Logprobs:
    """The log-probabilities of a step's tokens, on their way to the host."""

    def __init__(
        self, target: Transformer, features: Tensor, tokens: Tensor, wanted: dict[int, int]
    ):
        """Launch the passes.

        features: [B, R, F], of the target, before each token
        tokens: [B, R] int64, the decided tokens; padding is scored, too
        wanted: how many of the likeliest tokens each sequence gets
        """
        self.wanted = wanted
        seqs = list(wanted)
        with single_torch_thread(target.fused is not None):
            logits = target.logits(features[seqs])  # [W, R, V] fp32
            top, ids, total = topk_logsumexp(logits, max(1, *wanted.values()))
            own = logits.gather(2, tokens[seqs][:, :, None]) - total  # [W, R, 1]
            self.copy = HostCopy(own.squeeze(2), ids, top - total)

    def read(self) -> dict[int, list[Logprob]]:
        """Wait for the copy. Returns: by sequence, R entries each."""
        found = {}
        for (seq, count), own, ids, top in zip(self.wanted.items(), *self.copy.read()):
            best = [list(zip(*both))[:count] for both in zip(ids, top)]
            found[seq] = [Logprob(*entry) for entry in zip(own, best)]
        return found
