"""The environment variables that switch families of operators and ways to run a cycle.

They serve to find what is at fault where something fails: docs/USAGE.md lists all of them.
No torch is imported, so that a mistake is reported before it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

# families of our operators, in C++ on a CPU, in Triton on CUDA; operators of no family read files
# and clocks, or communicate
FAMILIES = (
    "attention",  # over the cache
    "compact",  # moves of cache slots
    "experts",  # products of mixtures, and their routing
    "fused",  # on CUDA products with the work behind them; on a CPU whole passes of a model
    "norm",  # RMSNorm
    "products",  # of all other layers, in every format
    "rotary",  # RoPE and the writes to the cache
    "topk",  # scores: the best, the noise, the cuts of sampling
    "tree",  # drafts from scores and lookups, acceptance, slots, reports
)
CUDA_ONLY = ("GPT_EAGLE_GRAPHS",)


def checked(families: Iterable[str]) -> set[str]:
    """Return the families, all of them for "all". Raises: ValueError for an unknown one."""
    given = set(families)
    unknown = sorted(given - {"all", *FAMILIES})
    if unknown:
        raise ValueError(
            f"GPT_EAGLE_PLAIN takes {', '.join(FAMILIES)} or all, separated by commas; "
            f"it has {', '.join(map(repr, unknown))}: correct or unset it"
        )
    return set(FAMILIES) if "all" in given else given


def plain_families() -> set[str]:
    """Return the families of GPT_EAGLE_PLAIN. Raises: ValueError for an unknown one."""
    names = os.environ.get("GPT_EAGLE_PLAIN", "").split(",")
    return checked(name.strip() for name in names if name.strip())


def is_on(name: str) -> bool:
    """Read GPT_EAGLE_<name>, 0 or 1; by default 1. Raises: ValueError for another value."""
    return _one_of(f"GPT_EAGLE_{name}", ("1", "0")) == "1"


def captures() -> bool:
    """Return whether cycles on CUDA are captured. Raises: ValueError for a wrong switch."""
    return is_on("GRAPHS")


def kind_of_tiles() -> str:
    """Return the unit of matmuls on AMX tiles that is asked for (backends/cpp/tiles.py).

    auto: hardware, where it is allowed and right; none, hardware, emulation: that one.
    Raises: ValueError for another name.
    """
    return _one_of("GPT_EAGLE_TILES", ("auto", "none", "hardware", "emulation"))


def _one_of(name: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name) or choices[0]  # the default
    if value not in choices:
        raise ValueError(
            f"{name} must be {' or '.join(choices)}; it is {value!r}: correct or unset it"
        )
    return value


def check() -> None:
    """Check all switches. Raises: ValueError for a value that none of them has."""
    plain_families()
    is_on("GRAPHS")
    kind_of_tiles()


def without_effect(device: str) -> list[str]:
    """Return the names of variables that are set and change nothing on a device."""
    if device.startswith("cuda"):
        return []
    return [name for name in CUDA_ONLY if os.environ.get(name) not in (None, "", "1")]
