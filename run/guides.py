"""Guides, which mask the tokens that may follow a text, as a grammar does (drafts/grammar.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decode import Engine
from drafters import Drafter


class Guide(Protocol):
    """Masks the tokens that may follow the text of one sequence."""

    fault: str  # told where it allows nothing

    def take(self, tokens: list[int]) -> list[int]:
        """Go on behind decided tokens.

        Returns: those that are allowed: all, unless it allows nothing behind them.
        """

    def root_mask(self, device: torch.device) -> Tensor | None:
        """Return the tokens that may follow, [1, 1, V] bool; None: all."""

    def around(self, engine: Engine, preset: int) -> GuidedDrafter:
        """Return a preset of the engine whose trees keep to guides."""


class GuidedDrafter(Drafter):
    """A drafter of trees under guides, for one cycle after the other."""

    def follow(self, guides: Sequence[Guide | None], live: Sequence[bool]) -> None:
        """Keep to the guides of the sequences of the next cycle. Writes: the drafter.

        guides: None for a sequence without one; live: whether each decodes
        """


class GuideSource(Protocol):
    """Something to write by, for any number of texts."""

    def begin(self) -> Guide:
        """Begin a text."""
