"""The records of a draft tree, which grows level by level.

A frontier is the nodes of a level that get children. A backend's `expand_frontier` scores its
children and picks the next one, `select_nodes` picks the nodes of the tree, and `accept` the path
that the target agrees with (backends/backends.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """The plan of one level of a tree, which its shape makes once (draft_tree.py)."""

    k: int  # children per node of the frontier
    count: int  # R', the level's candidates that have children themselves; 0 on the last level
    first_candidate: int = 0  # flat index of the level's first candidate
    first_slot: int = 0  # scratch slot of the first node that has children; the others follow
    slots: int = 0  # W, scratch slots of the whole tree
    # [1, R'] int64, into the level's candidates; None: the best ones
    fixed_children: Tensor | None = None

    def for_cpp(self) -> tuple[Any, ...]:
        """Return the operands of `expand_frontier` in C++: all fields, in order."""
        return tuple(self)


class Children(NamedTuple):
    """The best children of R nodes, best first; [B, 1, k]: of all nodes of the level."""

    tokens: Tensor  # [B, R, k] int64
    scores: Tensor  # [B, R, k] fp32, log-probabilities
    extra: Any = None  # of the drafter, for an acceptance rule of its own


class Scores(NamedTuple):
    """The scores of all children of R nodes; a child adds log softmax(c z) to its path's value.

    With noise, logits are z / T, and z + T G takes z's place: the target will choose by it.
    """

    logits: Tensor  # [B, R, V] fp32, z or z / T; or [B, 1, V], which all R nodes share
    sharpness: float = 1.0  # c
    ids: Tensor | None = None  # [V] int64, the token of each column; None: its number
    noise: Tensor | None = None  # [B, D+1, all tokens] fp32 Gumbel noise, G
    level: int = 0  # row of the noise
    temperature: Tensor | None = None  # [B] fp32, T

    def for_cpp(self) -> tuple[Any, ...]:
        """Return the operands of `expand_frontier` in C++: all fields, in order."""
        return tuple(self)

    def with_noise(self) -> Tensor:
        """Return z, or z + T G: [B, R, V]."""
        if self.noise is None:
            return self.logits
        noise = self.noise[:, self.level, None]  # [B, 1, all tokens]
        if self.ids is not None:
            noise = noise.index_select(-1, self.ids)
        return self.temperature[:, None, None] * (self.logits + noise)

    def best(self, k: int, topk: Callable) -> Children:
        """Return the k best children of every node. topk: of a backend"""
        # [B, R, k] twice, [B, R, 1]
        best, columns, total = topk(self.sharpness * self.with_noise(), k)
        tokens = columns
        if self.ids is not None:
            tokens = self.ids[columns]
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return Children(tokens, (best - total).clamp(max=0))


class Candidates(NamedTuple):
    """All scored children of a level or of a tree: by level, then by parent, the best first."""

    tokens: Tensor  # [B, P] int64
    values: Tensor  # [B, P] fp32, sum of the scores along the path; -inf: no candidate
    parents: Tensor  # [B, P] int64, flat index of the parent; -1 is the root

    @staticmethod
    def join(levels: Sequence[Candidates]) -> Candidates:
        """Concatenate the candidates of several levels."""
        return Candidates(
            torch.cat([level.tokens for level in levels], 1),
            torch.cat([level.values for level in levels], 1),
            torch.cat([level.parents for level in levels], 1),
        )


class Frontier(NamedTuple):
    """The nodes of a level that have children."""

    index: Tensor  # [B, R] int64, flat indices among the candidates of all levels
    tokens: Tensor  # [B, R] int64
    parent: Tensor  # [B, R] int64, their parents' places in the frontier before
    values: Tensor  # [B, R] fp32, sum of the scores along the path
    seen: Tensor  # [B, R, W] bool, the scratch slots that each sees: its ancestors' and its own

    def for_cpp(self) -> tuple[Tensor, ...]:
        """Return the operands of `expand_frontier` in C++."""
        return self.index, self.values, self.seen


class DraftTree(NamedTuple):
    """N nodes per sequence; node 0 is the root. Parents precede children."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node numbers; the root is its own parent
    depths: Tensor  # [B, N] int64, root 0
    mask: Tensor  # [B, N, N] bool, mask[i, j]: j is i or an ancestor of i
    valid: Tensor  # [B, N] bool
    values: Tensor | None = None  # [B, N] fp32, the draft's log-probability of each path; root 0
    # [B, N] int64, each node's index among the root and the nodes that the drafter ran;
    # 0: the root, or a node that did not run
    ran_index: Tensor | None = None
    allowed: Tensor | None = None  # [B, N, V] bool, tokens that may follow each node; None: all
    extra: Any = None  # of the drafter, for an acceptance rule of its own

    def for_cpp(self) -> tuple[Tensor, ...]:
        """Return the operands of `accept` in C++."""
        return self.tokens, self.parents, self.depths, self.valid


class Accepted(NamedTuple):
    """The accepted path, padded to the deepest one that the tree allows."""

    path: Tensor  # [B, D+1] int64, accepted node of each depth, root first; 0 past length
    length: Tensor  # [B] int64, accepted nodes without the root
    emitted: Tensor  # [B, D+1] int64, length + 1 decided tokens (bonus last), then padding
    # [B, D+1] int64, slot offset that each depth's key and value come from
    moves: Tensor
