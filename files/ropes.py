"""RoPE scaling beside LLaMA's: YaRN, and the kind that turns a part of the pairs alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model import Rope


def proportional(freq: Tensor, rope: Rope) -> Tensor:
    """Turn the first pairs alone. freq: [E/2]"""
    scaling = rope.scaling
    turns = torch.arange(len(freq), device=freq.device) < scaling["pairs"]
    return freq / scaling["factor"] * turns


def yarn(freq: Tensor, rope: Rope) -> Tensor:
    """Slow long waves down. Source: arXiv 2309.00071, 3.2; bounds as transformers rounds them."""
    low, high = _yarn_bounds(rope, rope.scaling)
    place = torch.arange(len(freq), device=freq.device)
    blend = 1 - ((place - low) / (high - low or 0.001)).clamp(0, 1)
    # 0: long wave, slowed down; 1: short wave, kept
    return blend * freq + (1 - blend) * freq / rope.scaling["factor"]


def _yarn_bounds(rope: Rope, scaling: dict) -> tuple[float, float]:
    """Return where waves make `beta_fast` and `beta_slow` turns within the original context."""
    original = scaling["original_max_position_embeddings"]
    base = 2 * math.log(rope.theta)
    low = rope.width * math.log(original / (2 * math.pi * scaling["beta_fast"])) / base
    high = rope.width * math.log(original / (2 * math.pi * scaling["beta_slow"])) / base
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    return max(float(low), 0.0), min(float(high), rope.width - 1.0)
