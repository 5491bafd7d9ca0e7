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
GRAPHS = "graphs"  # named beside families: CUDA's cycles are not captured


def checked(families: Iterable[str]) -> set[str]:
    """Return the families, all of them for "all". Raises: ValueError for an unknown one."""
    given = set(families)
    unknown = sorted(given - {"all", GRAPHS, *FAMILIES})
    if unknown:
        raise ValueError(
            f"GPT_EAGLE_PLAIN takes {', '.join(FAMILIES)}, {GRAPHS} or all, separated by commas; "
            f"it has {', '.join(map(repr, unknown))}: correct or unset it"
        )
    return set(FAMILIES) if "all" in given else given - {GRAPHS}


def _named() -> set[str]:
    names = os.environ.get("GPT_EAGLE_PLAIN", "").split(",")
    return {name.strip() for name in names if name.strip()}


def plain_families() -> set[str]:
    """Return the families of GPT_EAGLE_PLAIN. Raises: ValueError for an unknown one."""
    return checked(_named())


def captures() -> bool:
    """Return whether cycles on CUDA are captured."""
    return GRAPHS not in _named()


def kind_of_tiles() -> str:
    """Return the unit of matmuls on AMX tiles that is asked for (backends/cpp/build.py).

    auto: hardware, where it is allowed and right; none, hardware, emulation: that one.
    Raises: ValueError for another name.
    """
    kinds = ("auto", "none", "hardware", "emulation")
    kind = os.environ.get("GPT_EAGLE_TILES") or kinds[0]
    if kind not in kinds:
        rule = f"GPT_EAGLE_TILES must be {' or '.join(kinds)}"
        raise ValueError(f"{rule}; it is {kind!r}: correct or unset it")
    return kind


def check() -> None:
    """Check all switches. Raises: ValueError for a value that none of them has."""
    plain_families()
    kind_of_tiles()
