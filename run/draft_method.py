"""A way to draft: presets of a drafter, and what the engine takes beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafters import Drafter, RootOnly
from model import Transformer


@dataclass(frozen=True)
class DraftMethod:
    """A way to draft, as its module's `load_method` returns it."""

    presets: tuple[Drafter, ...]  # which share a state, smallest tree first
    # the options that were used, under their names, for the record
    resolved: dict[str, Any] = field(default_factory=dict)


def method_of(drafter: Drafter) -> DraftMethod:
    """Return the way to draft with a drafter: its own (`method`), or the drafter alone."""
    own = getattr(drafter, "method", None)
    return own() if own else DraftMethod((drafter,))


def load_method(target: Transformer, config: Any, tokenizer: Any) -> DraftMethod:
    """Return `--draft none`."""
    return DraftMethod((RootOnly(),))
