"""Shapes of draft trees as plain data: levels, nodes, children and their ranks.

`DynamicTree` (EAGLE-2, arXiv 2406.16858) keeps the best nodes by value. `StaticTree` (EAGLE-1,
arXiv 2401.15077; chains) picks nodes by rank. `grow` in draft_tree.py makes trees of these shapes.
Torch is imported where a shape makes tensors, so that options are checked without it.
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


def candidates(depth: int, topk: int) -> int:
    """Count the candidates of a dynamic tree, K + (D - 1) K^2."""
    return topk + (depth - 1) * topk**2


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the drafter is confident, then re-ranked.

    The papers' size is the default.
    """

    depth: int = 6  # D, drafted levels
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    expand_by: str = "value"  # or "confidence": single steps instead of paths (EAGLE-2 Table 3)
    rerank: bool = True  # False keeps the first levels complete (EAGLE-2 Table 3)
    # [1, N-1] int64, the nodes without re-ranking; made by `on`
    fixed_nodes: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        pool = candidates(self.depth, self.topk)
        if self.size - 1 > pool:
            raise ValueError(
                f"a tree of {self.size} nodes needs {self.size - 1} candidates; "
                f"depth {self.depth} and top-k {self.topk} give {pool} (K + (D-1) K^2); "
                "lower --tree_size or raise --tree_topk"
            )

    @property
    def width(self) -> int:
        """The largest number of children of a node."""
        return self.topk

    @property
    def widths(self) -> list[int]:
        """The number of nodes that run, of every level below the root."""
        return [self.topk] * (self.depth - 1)

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"dynamic {self.depth}/{self.topk}/{self.size}"

    def on(self, device: torch.device) -> DynamicTree:
        """Return the shape with its index tensors on a device: the nodes, where they are fixed."""
        if self.rerank:
            return self
        import torch

        return replace(self, fixed_nodes=torch.arange(self.size - 1, device=device)[None])

    def ranks(self, level: int) -> int:
        """Return the number of children that are drafted for a node of a level."""
        return self.topk

    @property
    def by_value(self) -> bool:
        """True where the best paths are expanded, False for the best steps."""
        return self.expand_by == "value"

    def places_of(self, level: int) -> None:
        """Return the candidates of a level that get children, [1, R]; None: the best ones."""
        return None

    @property
    def nodes(self) -> Tensor | int:
        """The candidates that become nodes, [1, N-1] int64, ascending; a number: the best ones."""
        if self.rerank:
            return self.size - 1
        return self.fixed_nodes


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

# Token Recycling's tree, version 2.2.2: 80 drafted nodes, 8 ranks.
# Source: the official code of arXiv 2408.08696.
RECYCLING_222 = (
    "0 1 2 3 4 5 6 7 00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70 000 001 002 "
    "003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500 "
    "0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000 00000 00001 "
    "00002 00010 00020 00100 01000 10000 000000 000001 000100"
)


def recycling_paths(size: int) -> tuple[tuple[int, ...], ...]:
    """Cut Token Recycling's tree to its likeliest nodes: each rank has half the odds of the last.

    size: nodes, root included, at most MAX_NODES
    """
    paths = [tuple(map(int, path)) for path in RECYCLING_222.split()]
    paths.sort(key=lambda path: sum(path) + len(path))  # stable: parents precede children
    return tuple(paths[: size - 1])


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape, as rank paths.

    (0, 2) is the third best child of the best child of the root. Nodes are numbered by (depth,
    path). Of every level only the nodes with children run. Members are as in `DynamicTree`.
    """

    paths: tuple[tuple[int, ...], ...]
    places: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)  # made by `on`

    @staticmethod
    def chain(depth: int) -> StaticTree:
        """Return a chain of `depth` drafted tokens."""
        return StaticTree(tuple((0,) * d for d in range(1, depth + 1)))

    def __post_init__(self):
        """Set `depth`, `size`, `levels` and `inner`. The root's path () is included.

        levels: the paths of every depth, in node order; inner: those of them that have children
        """
        parents = {path[:-1] for path in self.paths}
        depth = max(map(len, self.paths), default=0)
        levels: list[list[tuple[int, ...]]] = [[] for _ in range(depth + 1)]
        for path in sorted(((), *self.paths)):
            levels[len(path)].append(path)
        inner = [[path for path in level if path in parents] for level in levels[:-1]]
        # the dataclass is frozen
        self.__dict__.update(depth=depth, size=len(self.paths) + 1, levels=levels, inner=inner)

    @property
    def width(self) -> int:
        return max(map(self.ranks, range(self.depth)), default=0)

    @property
    def widths(self) -> list[int]:
        return [len(level) for level in self.inner[1:]]

    @property
    def name(self) -> str:
        if self.width == 1:
            return f"chain {self.depth}"
        return f"static {self.size}"

    by_value = True  # a static tree has no order of candidates

    def on(self, device: torch.device) -> StaticTree:
        """Return the shape with its index tensors on a device.

        They are the candidates to expand of every level, and last the nodes.
        """
        import torch

        indices = [[self._place(path) for path in level] for level in self.inner[1:]]
        nodes = []
        begin = 0  # of a level's candidates among those of all levels
        for depth, level in enumerate(self.levels[1:]):
            nodes += [begin + self._place(path) for path in level]
            begin += len(self.inner[depth]) * self.ranks(depth)
        indices.append(nodes)
        return replace(self, places=tuple(torch.tensor([x], device=device) for x in indices))

    def _place(self, path: tuple[int, ...]) -> int:
        """Return the index of a path's candidate among those of its level."""
        level = len(path) - 1
        return self.inner[level].index(path[:-1]) * self.ranks(level) + path[-1]

    def ranks(self, level: int) -> int:
        return 1 + max(path[-1] for path in self.levels[level + 1])

    def places_of(self, level: int) -> Tensor:
        return self.places[level]

    @property
    def nodes(self) -> Tensor:
        return self.places[-1]


def read_tree(file: Path) -> tuple[tuple[int, ...], ...]:
    """Read a JSON list of rank paths. Raises: ValueError with the fault of the list."""
    raw = parse_json(read_named(file, "--tree_file"), f"--tree_file: {file}")
    if not isinstance(raw, list) or not raw or not all(map(_is_path, raw)):
        raise ValueError(
            f"--tree_file: {file} must be a list of rank paths; write it as [[0], [1], [0, 0]]"
        )
    paths = {tuple(path) for path in raw}
    for path in sorted(paths):
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(
                f"--tree_file: {file} has the path {list(path)} "
                f"without its parent {list(path[:-1])}; add it"
            )
    if len(paths) != len(raw):
        raise ValueError(f"--tree_file: {file} lists a path twice")
    if len(paths) + 1 > MAX_NODES:
        raise ValueError(
            f"--tree_file: at most {MAX_NODES - 1} paths fit a tree; {file} has {len(paths)}"
        )
    return tuple(paths)


def _is_path(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(rank) is int and rank >= 0 for rank in value)
