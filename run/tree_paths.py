"""Draft trees as options, beyond those of draft_tree.py: a request's bound, Medusa's tree."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from draft_tree import NUMBERS, parse_tree


class DraftLimit(NamedTuple):
    """The largest tree that may draft for a request; by default any."""

    tokens: float = math.inf  # drafted ones of a cycle
    depth: float = math.inf
    width: float = math.inf  # children of a node

    def allows(self, tree: Any) -> bool:
        """Return whether a tree is not larger. tree: has size, depth and width, as a `Drafter`"""
        fits = tree.size - 1 <= self.tokens and tree.depth <= self.depth
        return fits and tree.width <= self.width

    @classmethod
    def parse(cls, value: Any) -> DraftLimit | None:
        """Read a number of drafted tokens, or a tree as `--tree` has it; None: it is neither."""
        if value is None or type(value) is bool:
            return cls(tokens=0) if value is False else cls()
        if type(value) is int and value >= 0:
            return cls(tokens=value)
        shape = value.partition(":")[0] if isinstance(value, str) else ""
        if shape not in ("chain", "dynamic"):  # others may be names of files
            return None
        try:
            tree = parse_tree(value)
        except ValueError:
            return None
        depth, width, size = (tree.get(name, math.inf) for name in NUMBERS)
        return cls(size - 1, depth, 1 if shape == "chain" else width)


ANY_TREE = DraftLimit()

# Medusa's and Hydra's tree for 7B models, of the same name: 63 drafted nodes, as many as fit.
# Source: the official code of arXiv 2401.10774 and 2402.05109.
MEDUSA_MC_SIM_7B = (
    "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 "
    "50 60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 "
    "060 070 100 101 200 0000 0001"
)
MEDUSA_PATHS = tuple(tuple(map(int, path)) for path in MEDUSA_MC_SIM_7B.split())
