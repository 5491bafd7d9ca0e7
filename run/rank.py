"""The functions of several ranks, loaded only where torchrun has started several."""

from __future__ import annotations

from collections.abc import Callable

from files.rank import this_rank
from options import load_part


def of_ranks(name: str, alone: Callable) -> Callable:
    """Return a function of run/ranks.py or run/tp.py; `alone` in a process of its own.

    Raises: ValueError where the environment has only a part of torchrun's settings.
    """
    return load_part("ranks", name) if this_rank().world_size > 1 else alone
