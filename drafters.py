"""Drafters: who proposes the tree that the target verifies.

A drafter owns a state (a NamedTuple of tensors), fills it with the rows that the target has confirmed (`extend`) and
proposes a tree (`draft`). Both are pure steps with static shapes, compiled `fullgraph=True`. Whatever a drafter
proposes, the output stays the target's own.

To add one: write a class with the members of `Drafter` and enter its loader in `DRAFTERS`.
Here: `RootOnly`, which proposes nothing; vanilla decoding is its verification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from draft_tree import DraftTree, root_tree


class Rows(NamedTuple):
    """Rows that the target has computed and decided: feature f_j with the token x_{j+1} that follows it."""

    tokens: Tensor  # [B, R] int64, x_{j+1}
    features: Tensor  # [B, R, F], f_j
    count: Tensor  # [B] int64, how many leading rows are real; the rest is padding


class Root(NamedTuple):
    """Where a tree starts, and the noise that its levels will be judged by."""

    token: Tensor  # [B] int64
    noise: Tensor | None  # [B, D+1, V] fp32 Gumbel noise of the coming draws; None when greedy
    fresh: Tensor | None = None  # [B, fresh_rows, V] fp32 Gumbel noise that nothing else reads


class Drafter(Protocol):
    """What the loop needs of a drafter."""

    depth: int  # D, drafted levels at most
    size: int  # N, nodes of its tree, root included
    width: int  # children of a node at most
    fresh_rows: int  # rows of noise of its own that it samples children with (residual rule), else 0

    def facts(self) -> dict[str, Any]:
        """What the options came to, under their names, for the record."""

    def init(self, batch: int, slots: int) -> Any:
        """An empty state for `batch` rows with `slots` target positions each."""

    def extend(self, state: Any, rows: Rows) -> Any:
        """Take in confirmed rows. Writes: the drafter's own cache."""

    def rewind(self, state: Any, length: Tensor) -> Any:
        """Forget all but the first `length` rows ([B] int64); at least one row follows before the next draft."""

    def draft(self, state: Any, root: Root) -> DraftTree:
        """Propose a tree below the root. Writes: scratch slots of the drafter's cache."""


class RootOnly:
    """Proposes nothing, so that every verification decides one token."""

    depth, size, width, fresh_rows = 0, 1, 0, 0

    def facts(self) -> dict[str, Any]:
        return {}

    def init(self, batch: int, slots: int) -> tuple:
        return ()

    def extend(self, state: tuple, rows: Rows) -> tuple:
        return state

    def rewind(self, state: tuple, length: Tensor) -> tuple:
        return state

    def draft(self, state: tuple, root: Root) -> DraftTree:
        return root_tree(root.token)


# `--draft NAME` -> a function of (target, config) that makes the drafter; filled by the files that own them
DRAFTERS: dict[str, Callable[..., Drafter]] = {"none": lambda target, config: RootOnly()}
