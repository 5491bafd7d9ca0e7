"""Gates, caps and windows that LLaMA and Mixtral lack, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_cache import Window


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Bound scores smoothly between -cap and cap. scores: fp32. Source: Gemma 2 (2408.00118)."""
    return cap * torch.tanh(scores / cap)


def geglu(y: Tensor) -> Tensor:
    """Multiply the GELU of the first half of every row, by its tanh form, by the second half.

    y: [..., 2 F]. Returns: [..., F]. Sources: arXiv 2002.05202, 1606.08415.
    """
    gate, up = y.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(y: Tensor, alpha: float, limit: float) -> Tensor:
    """Multiply a SiLU of the first half of every row by one plus the second half, both bounded.

    y: [..., 2 F]; alpha: of the sigmoid's argument
    limit: the first half is at most so large, the second half's magnitudes are
    Returns: [..., F]. Source: gpt-oss (arXiv 2508.10925).
    """
    gate, up = y.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def sliding(window: Window, size: int) -> Window:
    """Return the window of a layer that sees the last `size` tokens of a path, its own included.

    window: of a layer that sees them all: the visible slots of a row are its ancestors and itself,
        in the order of the path
    """
    counts = window.mask.cumsum(2)  # [B, T, W], tokens of the path up to each slot
    seen = counts[:, :, -1:]  # [B, T, 1]
    mask = window.mask & (seen - counts < size)  # [B, T, W]
    first = (window.start[:, None] + seen[:, :, 0] - size).clamp(min=0)  # [B, T]
    return Window(window.slots, window.start, mask, first, window.paths)
