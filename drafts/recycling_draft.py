"""Token Recycling: propose the tokens that the target has found likely after the same token before.

1. A matrix has the last known RANKS likeliest successors of every token. They come from the scores
   of every node that is verified, those of rejected nodes too, which are computed anyway.
2. A tree of fixed shape grows from the root, level by level: child r of a node is successor r of
   its token. Where a token has never been verified, its children are no nodes.
3. The matrix belongs to the model: it serves all sequences of a batch and later requests. A further
   request changes the speed and never a token.

It needs no model and no search. `--tree auto` picks among trees of several sizes, and none, by
their measured speed; `--tree static` verifies one, by default the paper's 80 nodes cut to 64.
Source: Token Recycling (arXiv 2408.08696). Not as there: prompts teach nothing, because our prefill
scores only their last token; where a token has several nodes, the first one counts.
Trade-off: the choice is by the last token alone, so most nodes are rejected. It pays where 60 rows
cost little more than one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_tree import MAX_NODES, DraftTree, StaticTree
from drafters import DrafterUpdate, DraftInputs
from drafts.by_value import ByValue, PresetDrafter, with_smaller
from model import Transformer
from reference import ancestors
from run.observer import DraftMethod, Observer
from run.options import GenerateConfig

RANKS = 8  # successors kept per token
# nodes of the trees of --tree auto, root included; CUDA pads to 16, 32 or 64 nodes
SIZES = {"cpu": (2, 4, 8, 16), "cuda": (16, 32, 64)}


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


class FixedShape:
    """The parents of a tree that has the same shape in every cycle."""

    def __init__(self, parents: list[int], depth: int, device: torch.device | str):
        """parents: node numbers, the root's 0; depth: a bound on that of any node"""
        self.parents = torch.tensor([parents], device=device)  # [1, N]
        self.depths, self.mask = ancestors(self.parents, depth)

    def tree(self, tokens: Tensor, valid: Tensor) -> DraftTree:
        """Return the tree of some tokens, [B, N] as `valid`."""
        B = len(tokens)
        related = (x.expand(B, *x.shape[1:]) for x in (self.parents, self.depths, self.mask))
        return DraftTree(tokens, *related, valid)


class RecyclingDrafter(PresetDrafter):
    """Proposes a static tree over the matrix of successors."""

    def __init__(self, tree: StaticTree, matrix: Tensor):
        """matrix: [V + 1, RANKS] int64, from `empty_matrix`"""
        self.matrix = matrix
        self.tree = tree
        self.paths = tree.paths
        self.depth = tree.depth
        self.size = tree.size
        self.width = tree.width
        device = matrix.device
        places = {path: place for level in tree.levels for place, path in enumerate(level)}
        order = [path for level in tree.levels for path in level]
        parents = [order.index(path[:-1]) for path in order]
        self.shape = FixedShape(parents, tree.depth, device)
        # per level below the root: the places of the parents in the level above, and the ranks
        self.steps = [
            (
                torch.tensor([places[path[:-1]] for path in level], device=device),
                torch.tensor([path[-1] for path in level], device=device),
            )
            for level in tree.levels[1:]
        ]

    def method(self) -> DraftMethod:
        policy = ByValue() if self.smaller else Observer()
        return DraftMethod(self.presets, self.resolved_options(), policy)

    def extend(self, state: Any, update: DrafterUpdate) -> Any:
        """Keep the successors of the verified nodes. Writes: the matrix."""
        tree = update.tree
        if tree is None:  # of a prompt
            return state
        real = tree.valid & (update.count > 0)[:, None]  # a finished sequence has none
        tokens = torch.where(real, tree.tokens, -1).flatten()  # [B N]
        own = tokens >= 0
        if len(tokens) > 1:  # of the nodes of one token, the first
            number = torch.arange(len(tokens), device=tokens.device)
            own &= (tokens[:, None] == tokens).int().argmax(1) == number
        likeliest = self.backend.topk(update.scores, RANKS)[1].flatten(0, 1)  # [B N, RANKS]
        best = torch.where(own[:, None], likeliest, -1)
        self.matrix[torch.where(own, tokens, len(self.matrix) - 1)] = best
        return state

    def propose_nodes(self, state: Any, inputs: DraftInputs) -> DraftTree:
        level = inputs.text.root[:, None]  # [B, 1]
        levels = [level]
        for parents, ranks in self.steps:
            level = self.matrix[level[:, parents], ranks]  # [B, R]; row -1 is the last, of no token
            levels.append(level)
        tokens = torch.cat(levels, 1)  # [B, N]
        return self.shape.tree(tokens.clamp(min=0), tokens >= 0)


def empty_matrix(vocab_size: int, device: torch.device | str) -> Tensor:
    """Return a matrix without successors. The row behind the tokens' takes padding and stays so."""
    return torch.full((vocab_size + 1, RANKS), -1, dtype=torch.long, device=device)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Make `--draft recycling`. Raises: ValueError for a tree that does not fit."""
    matrix = empty_matrix(target.config.vocab_size, target.norm.weight.device)
    return drafter_of(config, matrix).method()


def drafter_of(config: GenerateConfig, matrix: Tensor) -> RecyclingDrafter:
    """Make the drafter of the options over a matrix. Raises: ValueError for a tree."""
    if config.tree_shape == "static":
        tree = StaticTree(recycling_paths(config.tree_size or MAX_NODES))
        if config.tree_file:
            tree = config.draft_tree
        if tree.width > RANKS:
            raise ValueError(
                f"--draft recycling stores {RANKS} successors of a token, and the file of --tree "
                f"has the rank {tree.width - 1}; lower it"
            )
        return RecyclingDrafter(tree, matrix)

    def make(size: int) -> RecyclingDrafter:
        return RecyclingDrafter(StaticTree(recycling_paths(size)), matrix)

    return with_smaller(make, SIZES[matrix.device.type], config.tree_size)
