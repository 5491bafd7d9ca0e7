"""Shapes of draft trees as plain data: how many levels, nodes and children, and which ranks.

`DynamicTree` (EAGLE-2, arXiv 2406.16858) keeps the best by value, `StaticTree` (EAGLE-1, arXiv 2401.15077; chains) goes
by rank. `grow` in draft_tree.py makes trees of these shapes. Torch is imported where a shape makes tensors, so that
options are checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from files import parse_json, read_named

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_NODES = 64  # ancestor bits of a node fit one int64


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the drafter is confident, then re-ranked. The papers' size is the default."""

    depth: int = 6  # D, drafted levels
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    expand_by: str = "value"  # or "confidence": single steps instead of paths (EAGLE-2 Table 3)
    rerank: bool = True  # False keeps the first levels whole (EAGLE-2 Table 3)
    whole: Tensor | None = field(
        default=None, compare=False, repr=False
    )  # the nodes then; made by `on`

    def __post_init__(self):
        pool = self.topk + (self.depth - 1) * self.topk**2
        if self.size - 1 > pool:
            raise ValueError(
                f"a tree of {self.size} nodes needs {self.size - 1} candidates; depth {self.depth} and top-k "
                f"{self.topk} give {pool} (K + (D-1) K^2); lower --tree_size or raise --tree_topk"
            )

    @property
    def width(self) -> int:
        """Children of a node at most."""
        return self.topk

    @property
    def widths(self) -> list[int]:
        """Nodes that run, of every level below the root."""
        return [self.topk] * (self.depth - 1)

    @property
    def name(self) -> str:
        """What it is called in a report."""
        return f"dynamic {self.depth}/{self.topk}/{self.size}"

    def on(self, device: torch.device) -> DynamicTree:
        """The same with index tensors on a device: the nodes, where they are fixed."""
        if self.rerank:
            return self
        import torch

        return replace(self, whole=torch.arange(self.size - 1, device=device)[None])

    def ranks(self, level: int) -> int:
        """How many children a node of a level is asked for."""
        return self.topk

    @property
    def by_value(self) -> bool:
        """Whether the best paths are expanded, and not the best steps."""
        return self.expand_by == "value"

    def places_of(self, level: int) -> None:
        """Which candidates of a level get children, [1, R]; None: the best."""

    @property
    def nodes(self) -> Tensor | int:
        """Which candidates become nodes, [1, N-1] int64, ascending; a number: so many, the best."""
        return self.size - 1 if self.rerank else self.whole


# EAGLE-1's tree for 7B models (`mc_sim_7b_63`): 25 drafted nodes, widths 4, 8, 8, 3, 2. Source: arXiv 2401.15077.
MC_SIM_7B = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
EAGLE1_PATHS = tuple(tuple(map(int, path)) for path in MC_SIM_7B.split())


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape, as rank paths: (0, 2) is the third best child of the best child of the root.

    Nodes are numbered by (depth, path). Of every level only the nodes with children run. Members as in `DynamicTree`.
    """

    paths: tuple[tuple[int, ...], ...]
    places: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)  # made by `on`

    @staticmethod
    def chain(depth: int) -> StaticTree:
        """A chain of `depth` drafted tokens."""
        return StaticTree(tuple((0,) * d for d in range(1, depth + 1)))

    def __post_init__(self):
        """Sort the paths, root's () included: `levels`, by depth in node order; `inner`, those that have children."""
        parents, depth = {path[:-1] for path in self.paths}, max(map(len, self.paths))
        levels = [
            sorted(path for path in ((), *self.paths) if len(path) == d) for d in range(depth + 1)
        ]
        inner = [[path for path in level if path in parents] for level in levels[:-1]]
        facts = {"depth": depth, "size": len(self.paths) + 1, "levels": levels, "inner": inner}
        self.__dict__.update(facts)  # the dataclass is frozen

    @property
    def width(self) -> int:
        return max(map(self.ranks, range(self.depth)))

    @property
    def widths(self) -> list[int]:
        return [len(level) for level in self.inner[1:]]

    @property
    def name(self) -> str:
        return f"chain {self.depth}" if self.width == 1 else f"static {self.size}"

    def ranks(self, level: int) -> int:
        return 1 + max(path[-1] for path in self.levels[level + 1])

    def _place(self, path: tuple[int, ...]) -> int:
        """Where a path's candidate lies among those of its level."""
        level = len(path) - 1
        return self.inner[level].index(path[:-1]) * self.ranks(level) + path[-1]

    def on(self, device: torch.device) -> StaticTree:
        """The same with index tensors on a device: the candidates to expand of every level, and last the nodes."""
        import torch

        expanded = [[self._place(path) for path in level] for level in self.inner[1:]]
        begins = [0]
        for level, inner in enumerate(self.inner):
            begins.append(begins[-1] + len(inner) * self.ranks(level))
        nodes = [
            begins[len(path) - 1] + self._place(path) for level in self.levels[1:] for path in level
        ]
        return replace(
            self, places=tuple(torch.tensor([x], device=device) for x in (*expanded, nodes))
        )

    by_value = True  # their order does not matter

    def places_of(self, level: int) -> Tensor:
        return self.places[level]

    @property
    def nodes(self) -> Tensor:
        return self.places[-1]


def read_tree(file: Path) -> tuple[tuple[int, ...], ...]:
    """Read a JSON list of rank paths. Raises: ValueError that says what is wrong with it."""
    raw = parse_json(read_named(file, "--tree_file"), f"--tree_file: {file}")
    whole = isinstance(raw, list) and all(
        isinstance(p, list) and p and all(type(r) is int and r >= 0 for r in p) for p in raw
    )
    if not whole or not raw:
        raise ValueError(
            f"--tree_file: {file} must be a list of rank paths; write it as [[0], [1], [0, 0]]"
        )
    paths = {tuple(p) for p in raw}
    orphan = next((list(p) for p in sorted(paths) if len(p) > 1 and p[:-1] not in paths), None)
    if orphan is not None:
        raise ValueError(
            f"--tree_file: {file} has the path {orphan} without its parent {orphan[:-1]}; add it"
        )
    if len(paths) != len(raw):
        raise ValueError(f"--tree_file: {file} lists a path twice")
    if len(paths) + 1 > MAX_NODES:
        raise ValueError(
            f"--tree_file: at most {MAX_NODES - 1} paths fit a tree; {file} has {len(paths)}"
        )
    return tuple(paths)
