"""Drafters: who proposes the tree that the target verifies.

A drafter owns a state (a NamedTuple of tensors), fills it with the rows that the target has confirmed (`extend`) and
proposes a tree (`draft`). Both are pure steps with static shapes, compiled `fullgraph=True`. Whatever a drafter
proposes, the output stays the target's own.

A drafter may come in presets: trees of different sizes over one state, each compiled. After every cycle `prefer` says
which is the largest that makes sense for each row, and the host picks among those (autosize.py). A stale or a wrong
choice costs time and nothing else. A preset that proposes nothing need not keep the drafter's cache up to date: it
holds what it is handed, up to `hold` cycles, and `catch_up` takes that in before the next draft.

To add one: subclass `Drafter` and enter its loader in `DRAFTERS`.
Here: `RootOnly`, which proposes nothing; vanilla decoding is its verification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosize import ROOT, TreeShape
from draft_tree import DraftTree, root_tree

LARGEST = 1 << 30  # past the last preset of any drafter
CATCH_UP = 32  # rows that `Drafter.catch_up` takes in at once


class Text(NamedTuple):
    """Everything decided so far."""

    tokens: Tensor  # [B, S + 1] int64; entries past pos are padding
    pos: Tensor  # [B] int64, index of the root, the token decided last


class Rows(NamedTuple):
    """Rows that the target has computed and decided: feature f_j between the tokens x_j and x_{j+1}."""

    tokens: Tensor  # [B, R + 1] int64, x_j and the token after the last
    features: Tensor  # [B, R, F], f_j
    count: Tensor  # [B] int64, how many leading rows are real; the rest is padding
    slots: Tensor | None = None  # [B, R] int64, `DraftTree.slots` of the accepted path; None: rows of a prompt


class Root(NamedTuple):
    """Where a tree starts, and the noise that its levels will be judged by."""

    token: Tensor  # [B] int64
    noise: Tensor | None  # [B, D+1, V] fp32 Gumbel noise of the coming draws; None when greedy
    fresh: Tensor | None  # [B, fresh_rows, V] fp32 Gumbel noise that nothing else reads
    text: Text


class Drafter:
    """What the loop needs of a drafter. The defaults are those of one that keeps nothing."""

    depth: int  # D, drafted levels at most
    size: int  # N, nodes of its tree, root included
    width: int  # children of a node at most
    fresh_rows: int = 0  # rows of noise of its own that it samples children with (residual rule)
    sized: bool = False  # whether the host may choose among the presets by what they bring
    hold: int = 0  # cycles that preset 0 may put off `extend` for; 0: it does not

    @property
    def presets(self) -> tuple[Drafter, ...]:
        """Drafters over the same state, smallest tree first; none has a larger tree than this one."""
        return (self,)

    @property
    def shape(self) -> TreeShape | None:
        """Its tree, where smaller ones of the kind are nested in larger ones."""
        return None

    @property
    def name(self) -> str:
        """What its tree is called in a report."""
        return f"tree of {self.size}"

    def prefer(self, text: Text) -> Tensor:
        """The largest preset that makes sense for each row in the next cycle, or a number past the last: [B] int64."""
        return torch.full_like(text.pos, LARGEST)

    def facts(self) -> dict[str, Any]:
        """What the options came to, under their names, for the record."""
        return {}

    def init(self, batch: int, slots: int) -> Any:
        """An empty state for `batch` rows with `slots` target positions each."""
        return ()

    def extend(self, state: Any, rows: Rows) -> Any:
        """Take in confirmed rows. Writes: the drafter's own cache."""
        return state

    def catch_up(self, state: Any, text: Text) -> Any:
        """Take in the first `CATCH_UP` rows that preset 0 has put off. Writes: the drafter's own cache."""
        return state

    def rewind(self, state: Any, length: Tensor) -> Any:
        """Forget all but the first `length` rows ([B] int64); at least one row follows before the next draft."""
        return state

    def draft(self, state: Any, root: Root) -> DraftTree:
        """Propose a tree below the root. Writes: scratch slots of the drafter's cache."""
        raise NotImplementedError


class RootOnly(Drafter):
    """Proposes nothing, so that every verification decides one token."""

    depth, size, width = 0, 1, 0
    shape, name = ROOT, "none"

    def draft(self, state: Any, root: Root) -> DraftTree:
        return root_tree(root.token)


# `--draft NAME` -> a function of (target, config) that makes the drafter; filled by the files that own them
DRAFTERS: dict[str, Callable[..., Drafter]] = {"none": lambda target, config: RootOnly()}
