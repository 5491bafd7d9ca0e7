"""The rank of this process, as torchrun gives it in the environment. Imports no torch.

Not here: the other processes (run/ranks.py), which are loaded only where there are some.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from options import load_part


class Rank(NamedTuple):
    """The place of this process among the ranks."""

    rank: int = 0
    world_size: int = 1  # processes
    local: int = 0  # the rank on this machine


def is_alone() -> bool:
    """Return whether torchrun has started no other process."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def this_rank() -> Rank:
    """Return the rank that torchrun has given this process.

    Raises: ValueError where the environment has only a part of torchrun's settings.
    """
    if is_alone():
        return Rank()
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            rule = f"WORLD_SIZE is set in the environment, and {name} is {value!r}"
            raise ValueError(
                f"{rule}; start the ranks with torchrun --nproc_per_node N, or unset WORLD_SIZE"
            )
    return Rank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def of_ranks(name: str, alone: Callable) -> Callable:
    """Return a function of run/ranks.py or run/tp.py; `alone` in a process of its own.

    Raises: ValueError where the environment has only a part of torchrun's settings.
    """
    return load_part("ranks", name) if this_rank().world_size > 1 else alone
