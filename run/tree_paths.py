"""Draft trees as options: `--tree`, sizes and rank paths, checked without torch.

A rank path names a node of a static tree: (0, 2) is the third best child of the best child of the
root. The shapes that are made of them are in draft_tree.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from files.io import parse_json, read_named

MAX_NODES = 64  # ancestor bits of a node fit one int64
# shapes of --tree, and how many of the numbers LEVELS,CHILDREN,NODES each may have behind it
SHAPES = {"auto": 3, "dynamic": 3, "chain": 1, "static": 0}
NUMBERS = ("tree_depth", "tree_topk", "tree_size")


def parse_tree(text: str) -> dict[str, Any]:
    """Return the options that a value of `--tree` stands for, by name.

    A number that is left out has its default. A text that names no shape is the path of a file.

    Raises: ValueError for another form.
    """
    shape, colon, rest = text.partition(":")
    numbers = rest.split(",") if colon else []
    valid = not colon or any(numbers)
    valid = valid and all(re.fullmatch(r"[0-9]{0,9}", number) for number in numbers)
    if valid and len(numbers) <= SHAPES.get(shape, -1):
        options = {name: int(number) for name, number in zip(NUMBERS, numbers) if number}
        return {"tree": shape} | options
    if text == "":
        return {"tree": ""}
    if shape not in SHAPES and Path(text).exists():
        return {"tree_file": text}
    raise ValueError(
        "--tree takes auto, chain, dynamic, static, numbers behind the first three, as chain:3 or "
        f"dynamic:6,8,32 (LEVELS,CHILDREN,NODES), or a JSON file; {text} is none of them"
    )


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


def candidates(depth: int, topk: int) -> int:
    """Count the candidates of a dynamic tree, K + (D - 1) K^2."""
    return topk + (depth - 1) * topk**2


def check_candidates(depth: int, topk: int, size: int) -> None:
    """Check that a dynamic tree has enough candidates. Raises: ValueError."""
    count = candidates(depth, topk)
    if size - 1 > count:
        raise ValueError(
            f"a tree of {size} nodes needs {size - 1} candidates; "
            f"depth {depth} and top-k {topk} give {count} (K + (D-1) K^2); "
            "lower NODES of --tree or raise its CHILDREN"
        )


def chain_paths(depth: int) -> tuple[tuple[int, ...], ...]:
    """Return the rank paths of a chain of `depth` drafted tokens."""
    return tuple((0,) * d for d in range(1, depth + 1))


# EAGLE-1's tree for 7B models (`mc_sim_7b_63`): 25 drafted nodes, widths 4, 8, 8, 3, 2.
# Source: arXiv 2401.15077.
MC_SIM_7B = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
EAGLE1_PATHS = tuple(tuple(map(int, path)) for path in MC_SIM_7B.split())

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
    raw = parse_json(read_named(file, "--tree"), f"--tree: {file}")
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
