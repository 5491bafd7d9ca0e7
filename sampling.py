"""Choosing tokens: temperature, the cuts of unlikely tokens, and counter-based noise.

The default rule is exact and drafter-invariant. The target's choice at draw t is
argmax(log p + G_t), where the Gumbel noise G_t is a pure function of (seed, prompt, sample, draw,
token). By the Gumbel-max identity the choice is an exact draw from p. Nothing of it depends on the
draft, so the same seed gives the same tokens for every drafter and every tree. Drafts may read the
same noise ahead of time (Daliri, Musco, Suresh 2024).

The generator is Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor operations: stateless, equal
on CPU and GPU, safe in a captured graph. One call gives four words, so four tokens share a counter.
A greedy sequence's noise is 0 and its scores are the logits themselves, so that it may stand beside
others; where all are greedy, no step here runs.
The order is: temperature, top-k, top-p, min-p. It is llama.cpp's, but for the temperature, which
comes before the cuts as in vLLM and transformers.
Not here: how a device computes noise, cuts and choice (reference.py); other cuts, biases and
penalties (drafts/shaping.py); the papers' residual rule (drafts/residual.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from options import Sampling
from reference import MASK32, TORCH, Backend

# Separate noise for separate uses; the number sits in the top bits of the draw word. The others are
# in drafts/noise.py.
CHOICE = 0

# scores over a lower one may be infinite in fp32; noise decides between equal scores only at both
LEAST_TEMPERATURE = 1e-30
LEAST_TOP_P = 1e-30  # fp32 holds it


def on_host(x: Tensor) -> bool:
    """Return whether the values of a tensor are known without a wait for the device.

    Where they are not, a step does everything that some value may need.
    """
    return not (x.is_cuda or torch.compiler.is_compiling())


class SamplingMode(IntEnum):
    """How tokens are chosen. A higher mode also serves sequences of a lower one."""

    GREEDY = 0  # the argmax
    NOISY = 1  # temperature and noise before it
    TRUNCATED = 2  # top-k, top-p and min-p too

    @staticmethod
    def needed_by(params: Sampling) -> SamplingMode:
        """Return the mode that sampling with these parameters needs."""
        if params.temperature == 0:
            return SamplingMode.GREEDY
        if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
            return SamplingMode.NOISY
        return SamplingMode.TRUNCATED


class SamplingTensors(NamedTuple):
    """Keys of the noise and parameters of the choice, one row per sequence.

    The key is fixed by the request, never by the place in the batch. Greedy rows hold neutral
    values (temperature 1, nothing cut), so that they can share a batch.
    """

    seed: Tensor  # [B, 2] int64, low and high 32 bits; [2]: of all sequences
    prompt: Tensor  # [B] int64, index of the prompt in the request
    sample: Tensor  # [B] int64, index of the sample of that prompt
    # [B] bool, the greedy sequences, whose noise is 0; None: there are none
    greedy: Tensor | None = None
    temperature: Tensor | None = None  # [B] fp32
    # None where no sequence has any of these:
    top_k: Tensor | None = None  # [B] int64, 0 keeps all
    top_p: Tensor | None = None  # [B] fp32, 1 keeps all
    margin: Tensor | None = None  # [B] fp32, log of min-p; minus infinity keeps all
    further: Any = ()  # parameters of a folder (drafts/shaping.py), tensors [B, ...]

    @staticmethod
    def from_params(
        each: Sequence[Sampling], device: Any = "cpu", seed: int = 0
    ) -> SamplingTensors:
        """Make the tensors of B sequences, all of one seed, as samples 0 of prompts 0."""
        own = [s if s.temperature else Sampling(1.0) for s in each]
        zeros = torch.zeros(len(own), dtype=torch.long, device=device)
        words = torch.tensor([[seed & MASK32, seed >> 32]], device=device)

        def numbers(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float32, device=device)

        return SamplingTensors(
            words.repeat(len(own), 1),
            zeros,
            zeros.clone(),
            torch.tensor([s.temperature == 0 for s in each], device=device),
            numbers(max(s.temperature, LEAST_TEMPERATURE) for s in own),
            torch.tensor([s.top_k for s in own], device=device),
            numbers(max(s.top_p, LEAST_TOP_P) for s in own),
            numbers(math.log(s.min_p) if s.min_p > 0 else -math.inf for s in own),
        )

    def needed(self, mode: int) -> SamplingTensors | None:
        """Return the part that a step of a mode reads; None when all sequences are greedy."""
        if mode == SamplingMode.GREEDY:
            return None
        return SamplingTensors(*self[: 5 if mode == SamplingMode.NOISY else 8])

    def cut(self, logits: Tensor, backend: Backend = TORCH) -> Tensor:
        """Apply the temperature, then the cuts, in fp32.

        Of tokens that tie at the cut of top-k or top-p the lower ids stay.
        logits: [B, N, V] fp32
        Returns: [B, N, V] fp32 logits divided by the temperature, -inf for tokens cut away.
        """
        return backend.cut(logits, self.temperature, self.top_k, self.top_p, self.margin)


def gumbel(
    key: SamplingTensors,
    first: Tensor,
    rows: int,
    vocab: int,
    domain: int = CHOICE,
    backend: Backend = TORCH,
) -> Tensor:
    """Return standard Gumbel noise of consecutive draws, [B, rows, vocab] fp32.

    first: [B] int64, the first draw of each sequence
    """
    own = (key.seed, key.prompt, key.sample, key.greedy)
    return backend.gumbel(*own, first, rows, vocab, domain)
