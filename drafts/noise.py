"""Noise of further uses: drawn children, the residual rule, XTC. sampling.py has the choice's."""

from __future__ import annotations

from torch import Tensor

import reference
from sampling import CHOICE, SamplingTensors

# as `sampling.CHOICE`
DRAFT = 1
ACCEPT = 2
XTC = 3


def uniforms(key: SamplingTensors, draws: Tensor, count: int, domain: int = CHOICE) -> Tensor:
    """Return uniform numbers in (0, 1), [B, R, count] fp32.

    draws: [B, R] int64, the draw that each row of noise belongs to
    count: numbers per draw
    """
    return reference.uniforms(key.seed, key.prompt, key.sample, draws, count, domain)
