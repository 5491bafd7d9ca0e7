"""Draft trees as options beyond draft_tree.py's: a file's, Medusa's."""

from __future__ import annotations

from pathlib import Path

from draft_tree import MAX_NODES
from files.io import parse_json, read_named

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
