"""Drafters that know the distribution of every level before the first token of a tree.

1. `level_scores` gives the scores of all levels in one pass: those of Medusa's heads, or of a
   block drafter's positions.
2. The growth loop then runs without passes: the nodes of a level have the same scores, so a path's
   value is the sum of its levels' log-probabilities. The best nodes are the best prefixes of the
   product of the distributions (DDTree, arXiv 2604.12989).
3. When sampling, a level's scores carry the noise of its draw, as in every `TreeDrafter`.

`last_of` and `tree_of` also serve heads that take turns, as Hydra's.
Not here: the passes (token_draft.py, block_draft.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_tree import DynamicTree, Frontier, StaticTree
from drafters import DraftInputs, TreeDrafter
from kv_cache import Window
from options import require
from run.options import DEPTH, GenerateConfig
from run.tree_paths import MEDUSA_PATHS


class LevelDrafter(TreeDrafter):
    """Grows trees from the scores of all levels. Subclasses give `level_scores`."""

    one_pass = True

    def level_scores(self, state: Any, inputs: DraftInputs) -> Tensor:
        """Score the tokens of every level: [B, D, Vd] fp32, level 0 that of the root's children.

        Writes: the drafter's own cache, if it has one.
        """
        raise NotImplementedError

    def root_output(self, state: Any, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        return self.level_scores(state, inputs), inputs.text.pos

    def forward_nodes(
        self, state: Any, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return out

    def logits(self, out: Tensor, level: int) -> Tensor:
        """Return a level's scores, which all its nodes share: [B, D, Vd] -> [B, 1, Vd]."""
        return out[:, level, None]


def last_of(rows: Tensor, count: Tensor, before: Tensor) -> Tensor:
    """Return the last real row of each sequence; where there is none, the one before.

    rows: [B, R, F]; count: [B] int64, real rows; before: [B, 1, F]
    """
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, rows.shape[2])
    return torch.where(count[:, None, None] > 0, rows.gather(1, last), before)


def tree_of(config: GenerateConfig, levels: int, path: Path) -> DynamicTree | StaticTree:
    """Return the tree of the options for a head that drafts so many levels.

    path: of the head, for the message
    With `--tree auto` it has all levels that its nodes can reach: they cost one pass together, and
    presets of fewer nodes are less deep.
    Raises: ValueError for a tree that is deeper.
    """
    by_default = not config.tree_depth and config.tree_shape != "static"
    if by_default:
        config = replace(config, tree_depth=min(DEPTH, levels))
    tree = config.draft_tree
    if by_default and config.tree_shape == "auto":
        tree = replace(tree, depth=max(tree.depth, min(levels, tree.size - 1)))
    if config.tree_shape == "static" and not config.tree_file:
        tree = StaticTree(tuple(path for path in MEDUSA_PATHS if len(path) <= levels))
    fault = f"{path} drafts {levels} levels, and the tree has {tree.depth}"
    require(tree.depth <= levels, f"{fault}; lower LEVELS of --tree, or cut its file")
    return tree
