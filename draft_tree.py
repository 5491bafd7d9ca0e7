"""Draft trees, and every tensor step on them.

A tree has N nodes with node 0 the root (the token decided last, not cached yet). Parents precede children,
so every relation follows from `parents` by a few rounds of boolean algebra: ancestors, depths, acceptance and
the accepted path need no list of leaves, no host and no data-dependent shape.

Dynamic trees (EAGLE-2, arXiv 2406.16858, section 4): `Candidates` collects every drafted token level by level,
`expand` picks the next frontier, `graft` adds a chain that was found elsewhere, `rerank` keeps the best nodes.
Static trees (EAGLE-1): `StaticTree`.

Padding is what `valid` says, never a token id. All scores are fp32.
Not here: who scores a token (drafters), and who decides it (sampling).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

MAX_NODES = 64  # ancestor bits of a node fit one int64


class DraftTree(NamedTuple):
    """N nodes per row; node 0 is the root."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node numbers; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i
    valid: Tensor  # [B, N] bool
    q: Tensor | None = None  # [B, N, V] fp32, distribution each node's children were sampled from (residual rule)
    values: Tensor | None = None  # [B, N] fp32, the draft's log-probability of each path; root 0; for the trace only
    # [B, N] int64, slot of each node's row in the drafter's own cache, counted from the root's; 0: it has none
    slots: Tensor | None = None


class Accepted(NamedTuple):
    """What a verification decided, padded to the deepest path that the tree allows."""

    path: Tensor  # [B, D+1] int64, accepted node of each depth (root first); entries past length are 0
    length: Tensor  # [B] int64, accepted nodes without the root
    emitted: Tensor  # [B, D+1] int64, length + 1 decided tokens (bonus last); entries past length are padding


def build_tree(tokens: Tensor, parents: Tensor, valid: Tensor, depth: int, q: Tensor | None = None) -> DraftTree:
    """Derive ancestors and depths from parents.

    tokens, parents, valid: [B, N]; parents precede children
    depth: a bound on the depth of any node
    """
    B, N = parents.shape
    eye = torch.eye(N, dtype=torch.bool, device=parents.device)
    reach = eye | (parents[:, :, None] == torch.arange(N, device=parents.device))  # [B, N, N]: self and parent
    hops = 1
    while hops < depth:  # squaring doubles the reach
        reach = torch.bmm(reach.float(), reach.float()) > 0
        hops *= 2
    depths = reach.sum(-1) - 1  # the root counts itself once
    return DraftTree(tokens, parents, depths, reach, valid, q)


def root_tree(root: Tensor) -> DraftTree:
    """The tree that is only its root: vanilla decoding. root: [B] int64."""
    tokens = root[:, None]
    zeros = torch.zeros_like(tokens)
    return build_tree(tokens, zeros, torch.ones_like(tokens, dtype=torch.bool), 0)


# ---------------------------------------------------------------------------------------- acceptance


def accept(tree: DraftTree, choice: Tensor, depth: int) -> Accepted:
    """Keep the deepest path on which every token is the target's own choice at its parent.

    choice: [B, N] int64, the target's token after each node
    depth: D, the deepest path the tree can hold
    Of equally deep paths the one with the lowest node numbers wins.
    """
    matches = tree.valid & (tree.tokens == choice.gather(1, tree.parents))
    matches[:, 0] = True
    accepted = ~(tree.mask & ~matches[:, None]).any(-1)  # [B, N]: the node and all its ancestors match
    N = accepted.shape[1]
    order = tree.depths * N + torch.arange(N - 1, -1, -1, device=choice.device)  # unique keys: no ties
    node = torch.where(accepted, order, -1).argmax(-1)  # [B]
    path, length = path_to(tree, node, depth)
    return Accepted(path, length, choice.gather(1, path))


def path_to(tree: DraftTree, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The nodes from the root to `node`. node: [B]. Returns: path [B, D+1], zero-padded; length [B]."""
    length = tree.depths.gather(1, node[:, None]).squeeze(1)  # [B]
    index = node[:, None, None].expand(-1, 1, tree.mask.shape[2])
    on_path = tree.mask.gather(1, index)  # [B, 1, N]: the node's ancestors and itself
    levels = torch.arange(depth + 1, device=node.device)[:, None]  # [D+1, 1]
    hit = on_path & (tree.depths[:, None] == levels)  # [B, D+1, N], at most one per depth
    return hit.int().argmax(-1), length  # 0 where a depth has none


def compaction(accepted: Accepted) -> Tensor:
    """Slot offset that each depth's key and value come from: [B, D+1]. Rows past the path stay put."""
    steps = torch.arange(accepted.path.shape[1], device=accepted.path.device)
    return torch.where(steps <= accepted.length[:, None], accepted.path, steps)


# -------------------------------------------------------------------------------------- dynamic trees


class Candidates(NamedTuple):
    """The pool of drafted tokens, level by level; a level by parent's rank, then by child's rank."""

    tokens: Tensor  # [B, P] int64
    values: Tensor  # [B, P] fp32, sum of scores along the path; -inf: no candidate
    parents: Tensor  # [B, P] int64, flat index of the parent; -1 is the root


class Frontier(NamedTuple):
    """The K candidates that are expanded next, best first."""

    index: Tensor  # [B, K] int64, flat index in the pool
    tokens: Tensor  # [B, K] int64
    values: Tensor  # [B, K] fp32
    parent_rank: Tensor  # [B, K] int64, which member of the previous frontier each one descends from


def pool_size(depth: int, topk: int) -> int:
    """Candidates of a dynamic tree: K + (D - 1) K^2."""
    return topk + (depth - 1) * topk * topk


def first_level(tokens: Tensor, scores: Tensor) -> tuple[Candidates, Frontier]:
    """Start a pool with the root's K children. tokens, scores: [B, K], best first."""
    rank = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return Candidates(tokens, scores, torch.full_like(tokens, -1)), Frontier(rank, tokens, scores, rank)


def expand(
    pool: Candidates, frontier: Frontier, tokens: Tensor, scores: Tensor, by: str
) -> tuple[Candidates, Frontier]:
    """Add the children of the frontier to the pool and choose the next frontier.

    tokens, scores: [B, K, K], children of each frontier node and their scores, best first
    by: "value" expands the best paths (EAGLE-2), "confidence" the best single steps (its Table 3 ablation)
    """
    B, K, _ = tokens.shape
    values = (frontier.values[:, :, None] + scores).flatten(1)  # [B, K*K]
    flat = tokens.flatten(1)
    offset = pool.tokens.shape[1]
    grown = Candidates(
        torch.cat((pool.tokens, flat), 1),
        torch.cat((pool.values, values), 1),
        torch.cat((pool.parents, frontier.index.repeat_interleave(K, dim=1)), 1),
    )
    order = best_first(values if by == "value" else scores.flatten(1))[:, :K]  # [B, K]
    return grown, Frontier(offset + order, flat.gather(1, order), values.gather(1, order), order // K)


def best_first(values: Tensor) -> Tensor:
    """Indices by descending value; equal values keep their order, so a parent stays before its child. [B, P]."""
    return values.sort(dim=1, descending=True, stable=True).indices


def graft(pool: Candidates, tokens: Tensor, values: Tensor) -> Candidates:
    """Add a chain below the root. Where the pool has one of its nodes already, that is used and its value raised.

    tokens: [B, L] int64
    values: [B, L] fp32, not rising along the chain; -inf: no candidate
    Returns: the pool with L candidates more, -inf those that it had; siblings stay different, parents stay first.
    """
    above = torch.full_like(tokens[:, :1], -1)  # [B, 1], flat index of the node above
    for token, value in zip(tokens.split(1, 1), values.split(1, 1)):  # [B, 1]
        P = pool.tokens.shape[1]
        same = (pool.parents == above) & (pool.tokens == token) & (pool.values > float("-inf"))  # [B, P], one at most
        found = same.any(1, keepdim=True)
        here = (same * torch.arange(P, device=tokens.device)).sum(1, keepdim=True)  # [B, 1]
        raised = torch.where(same, torch.maximum(pool.values, value), pool.values)
        pool = Candidates(
            torch.cat((pool.tokens, token), 1),
            torch.cat((raised, value.masked_fill(found, float("-inf"))), 1),
            torch.cat((pool.parents, above), 1),
        )
        above = torch.where(found, here, P)
    return pool


def rerank(root: Tensor, pool: Candidates, size: int, depth: int, by_value: bool = True) -> DraftTree:
    """Keep the best `size` - 1 candidates of the pool below the root: `tree_of` what `best_nodes` chooses."""
    return tree_of(root, pool, best_nodes(pool, size, by_value), depth)


def best_nodes(pool: Candidates, size: int, by_value: bool) -> Tensor:
    """The `size` - 1 best candidates: [B, N-1] flat indices, ascending.

    by_value: False keeps the first levels whole instead (the no-re-rank ablation of EAGLE-2 Table 3)
    A value never exceeds its parent's and ties keep the parent first, so every kept node's parent is kept.
    """
    if by_value:
        return best_first(pool.values)[:, : size - 1].sort(dim=1).values
    return torch.arange(size - 1, device=pool.values.device).expand(pool.values.shape[0], -1)


def tree_of(root: Tensor, pool: Candidates, chosen: Tensor, depth: int) -> DraftTree:
    """The tree of the chosen candidates. root: [B] int64; chosen: [B, N-1] flat indices, ascending."""
    B, size = chosen.shape[0], chosen.shape[1] + 1
    # flat index + 1 -> node
    node = torch.zeros(B, pool.tokens.shape[1] + 1, dtype=torch.long, device=root.device)  # [B, P+1]
    numbers = torch.arange(1, size, device=root.device).expand_as(chosen)
    node = node.scatter(1, chosen + 1, numbers)
    parents = node.gather(1, pool.parents.gather(1, chosen) + 1)  # [B, N-1]
    tokens = torch.cat((root[:, None], pool.tokens.gather(1, chosen)), 1)
    values = torch.cat((pool.values.new_zeros(root.shape[0], 1), pool.values.gather(1, chosen)), 1)  # [B, N]
    parents = torch.cat((torch.zeros_like(root[:, None]), parents), 1)
    return build_tree(tokens, parents, values > float("-inf"), depth)._replace(values=values)


# --------------------------------------------------------------------------------------- static trees

# EAGLE-1's tree for 7B models (`mc_sim_7b_63`): 25 drafted nodes, widths 4, 8, 8, 3, 2. Source: arXiv 2401.15077.
EAGLE1_PATHS = tuple(
    tuple(map(int, path))
    for path in (
        [
            "0",
            "1",
            "2",
            "3",
            "00",
            "01",
            "02",
            "10",
            "11",
            "20",
            "21",
            "30",
            "000",
            "001",
            "002",
            "010",
            "011",
            "020",
            "021",
            "100",
            "0000",
            "0001",
            "0002",
            "00000",
            "00001",
        ]
    )
)


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape, as rank paths: (0, 2) is the third best child of the best child of the root.

    Nodes are numbered by (depth, path). Of every level only the nodes with children are expanded.
    """

    paths: tuple[tuple[int, ...], ...]

    @staticmethod
    def chain(depth: int) -> StaticTree:
        """A chain of `depth` drafted tokens."""
        return StaticTree(tuple((0,) * d for d in range(1, depth + 1)))

    @staticmethod
    def from_file(file: Path) -> StaticTree:
        """Read a JSON list of rank paths. Raises: ValueError that says what is wrong with it."""
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            raise ValueError(f"--tree_file: cannot read {file}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"--tree_file: {file} is not valid JSON: {error}") from None
        whole = isinstance(raw, list) and all(
            isinstance(p, list) and p and all(type(r) is int and r >= 0 for r in p) for p in raw
        )
        if not whole or not raw:
            raise ValueError(f"--tree_file: {file} must be a list of rank paths such as [[0], [1], [0, 0]]")
        paths = {tuple(p) for p in raw}
        orphan = next((list(p) for p in sorted(paths) if len(p) > 1 and p[:-1] not in paths), None)
        if orphan is not None:
            raise ValueError(f"--tree_file: {file} has the path {orphan} without its parent {orphan[:-1]}; add it")
        if len(paths) != len(raw):
            raise ValueError(f"--tree_file: {file} lists a path twice")
        if len(paths) + 1 > MAX_NODES:
            raise ValueError(f"--tree_file: at most {MAX_NODES - 1} paths fit a tree; {file} has {len(paths)}")
        return StaticTree(tuple(paths))

    @cached_property
    def order(self) -> list[tuple[int, ...]]:
        """Paths by node number, root first."""
        return [(), *sorted(self.paths, key=lambda p: (len(p), p))]

    @cached_property
    def parents(self) -> list[int]:
        """Parent's node number per node."""
        number = {path: i for i, path in enumerate(self.order)}
        return [number[path[:-1]] for path in self.order]

    @cached_property
    def depth(self) -> int:
        return len(self.order[-1])

    @property
    def size(self) -> int:
        return len(self.order)

    @cached_property
    def inner(self) -> list[list[int]]:
        """Per depth, the nodes that have children; they are the rows of a draft pass."""
        parents = set(self.parents[1:])
        return [[i for i, p in enumerate(self.order) if len(p) == d and i in parents] for d in range(self.depth)]

    def children(self, depth: int) -> list[tuple[int, int, int]]:
        """The nodes one level below `depth` as (node, row of its parent in inner[depth], rank)."""
        row = {node: r for r, node in enumerate(self.inner[depth])}
        return [(i, row[self.parents[i]], p[-1]) for i, p in enumerate(self.order) if len(p) == depth + 1]

    def ranks(self, depth: int) -> int:
        """How many ranked children a draft pass at `depth` must give."""
        return 1 + max(rank for _, _, rank in self.children(depth))
