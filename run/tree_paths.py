"""Draft trees as options beyond draft_tree.py's: a request's bound, a file's, Medusa's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from draft_tree import MAX_NODES, NUMBERS, parse_tree


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


def read_tree(file: Path) -> tuple[tuple[int, ...], ...]:
    """Read a JSON list of rank paths. Raises: ValueError with the fault of the list."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--tree: cannot read {file}: {error.strerror}; name a file") from None
    except UnicodeDecodeError:
        raise ValueError(f"--tree: {file} is not UTF-8 text; name another file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--tree: {file} is not valid JSON: {error}; correct it") from None
    if not isinstance(raw, list) or not raw or not all(map(_is_path, raw)):
        raise ValueError(
            f"--tree: {file} must be a list of rank paths; write it as [[0], [1], [0, 0]]"
        )
    paths = {tuple(path) for path in raw}
    for path in sorted(paths):
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(
                f"--tree: {file} has the path {list(path)} "
                f"without its parent {list(path[:-1])}; add it"
            )
    if len(paths) != len(raw):
        raise ValueError(f"--tree: {file} lists a path twice")
    if len(paths) + 1 > MAX_NODES:
        raise ValueError(
            f"--tree: at most {MAX_NODES - 1} paths fit a tree; {file} has {len(paths)}"
        )
    return tuple(paths)


def _is_path(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(rank) is int and rank >= 0 for rank in value)
