"""Lookahead decoding: propose n-grams that the target itself has made up while decoding.

1. Window. Beside the text the target guesses W places at once, in N - 1 rows: a pass over the last
   row gives the row after it, and the rows move up by one (Jacobi iteration). Token i of a row
   continues token i of the row above, and the first row is one text behind the root. So the window
   is a part of the tree, with the mask and positions of any other: its first row is a chain below
   the root, and each further row hangs below the row above. Its nodes are never accepted.
2. Pool. Column i and the new token below it are an n-gram of N tokens; a ring keeps the last POOL.
3. Guesses. The last G different n-grams that begin with the root, as chains of N - 1 nodes.

A tree has (W + G) (N - 1) nodes, root included. It needs no model.
Source: Lookahead decoding (arXiv 2402.02057) 3; the window moves one place a pass, as in the
official code. Not as there: the window begins full, of tokens of the text, instead of row by row,
and adds nothing to the pool until its rows are the target's; prompts add no n-grams.
Trade-off: the window's rows cost a pass as much as drafted ones, so it pays where many rows are
cheap. All cycles run it, and there is no smaller tree to choose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_tree import MAX_NODES, DraftTree
from drafters import Drafter, DrafterUpdate, DraftInputs
from drafts.recycling_draft import FixedShape
from model import Transformer
from options import require
from run.observer import DraftMethod
from run.options import GenerateConfig
from runtime import replace_fields

POOL = 4096  # n-grams
SIZES = (5, 4, 5)  # W, N and G ; 15, 5, 15 in the paper, for an A100
STRIDE = 7919  # between the places of the tokens that a window begins with; a prime


class Lookahead(NamedTuple):
    """The windows and the pools of B sequences."""

    window: Tensor  # [B, N-1, W] int64, oldest row first; the root stands for its first token
    pool: Tensor  # [B, POOL, N] int64, a ring of n-grams; -1: none yet
    passes: Tensor  # [B] int64, that the window has seen


class LookaheadDrafter(Drafter):
    """Proposes the latest n-grams that begin with the root, and the window beside them."""

    def __init__(self, sizes: tuple[int, int, int], device: torch.device | str = "cpu"):
        """sizes: W, N, G. Raises: ValueError."""
        W, N, G = sizes
        self.sizes = sizes
        self.size = (W + G) * (N - 1)
        name = f"Lookahead with {W}-{N}-{G}"
        require(W > 0 and N > 1 and G > 0, f"{name} must be W > 0, N > 1 and G > 0; correct it")
        fault = f"{name} makes (W + G) (N - 1) = {self.size} nodes, and a tree has {MAX_NODES}"
        require(self.size <= MAX_NODES, f"{fault}; lower one of them")
        self.depth = max(N - 1, W + N - 3)
        self.width = G + 2  # the chains of guesses, the first row, and the second one
        guessed = range(1, 1 + G * (N - 1))  # node numbers
        first = [0, *range(guessed.stop, guessed.stop + W - 1)]  # row of the window
        others = range(guessed.stop + W - 1, self.size)
        row_of = [*first, *others]  # the window's nodes, row by row
        parents = [0] * self.size
        for i, node in enumerate(guessed):
            parents[node] = node - 1 if i % (N - 1) else 0
        for before, node in zip(first, first[1:]):
            parents[node] = before
        for above, node in zip(row_of, others):
            parents[node] = above
        self.last_row = torch.tensor(row_of[-W:], device=device)
        self.shape = FixedShape(parents, self.depth, device)

    def resolved_options(self) -> dict[str, Any]:
        return {"lookahead": "-".join(map(str, self.sizes)), "tree_size": self.size}

    def method(self) -> DraftMethod:
        return DraftMethod((self,), self.resolved_options())

    def init(self, batch: int, slots: int) -> Lookahead:
        W, N, _ = self.sizes
        window = self.last_row.new_zeros(batch, N - 1, W)
        pool = window.new_full((batch, POOL, N), -1)
        return Lookahead(window, pool, window.new_zeros(batch))

    def rewind(self, state: Lookahead, length: Tensor) -> Lookahead:
        """Begin with an empty pool, as every request does."""
        empty = torch.full_like(state.pool, -1)
        return replace_fields(state, pool=empty, passes=torch.zeros_like(state.passes))

    def extend(self, state: Lookahead, update: DrafterUpdate) -> Lookahead:
        """Move the window by one row, and add its n-grams to the pool."""
        W, N, _ = self.sizes
        window, pool, passes = state
        if update.tree is None or update.tree.extra is not None:
            # a prompt, or a tree under a grammar, which has no nodes of the window
            tokens, pos = update.text
            step = torch.arange((N - 1) * W, device=pos.device) * STRIDE
            start = tokens.gather(1, step % (pos[:, None] + 1)).view_as(window)
            return replace_fields(state, window=start)
        new = self.backend.best(update.scores, None, None)[:, self.last_row]  # [B, W]
        began = update.tokens[:, :1]  # [B, 1], the root that was verified
        first = torch.cat((began, window[:, 0, 1:]), 1)
        ngrams = torch.stack((first, *window[:, 1:].unbind(1), new), 2)  # [B, W, N]
        place = passes[:, None] * W + torch.arange(W, device=passes.device)
        place = (place % POOL)[:, :, None].expand_as(ngrams)
        own = (passes >= N - 2)[:, None, None]  # the rows below the first are the target's
        pool = pool.scatter(1, place, torch.where(own, ngrams, -1))
        window = torch.cat((window[:, 1:], new[:, None]), 1)
        return Lookahead(window, pool, passes + 1)

    def propose(self, state: Lookahead, inputs: DraftInputs) -> DraftTree:
        W, N, G = self.sizes
        window, pool, passes = state
        last = inputs.text.root[:, None]  # [B, 1]
        place = torch.arange(POOL, device=last.device)
        age = (place - passes[:, None] * W) % POOL  # the latest has the largest
        score = torch.where(pool[:, :, 0] == last, age, -1)  # [B, POOL]
        parts = [last]
        valid = [torch.ones_like(last, dtype=torch.bool)]
        for _ in range(G):
            best = score.argmax(1, keepdim=True)  # [B, 1]
            ngram = pool.gather(1, best[:, :, None].expand(-1, -1, N))  # [B, 1, N]
            parts.append(ngram[:, 0, 1:].clamp(min=0))
            valid.append((score.gather(1, best) >= 0).expand(-1, N - 1))
            score = torch.where((pool == ngram).all(2), -1, score)
        parts.append(window.flatten(1)[:, 1:])
        tokens = torch.cat(parts, 1)  # [B, N]
        valid.append(torch.zeros_like(parts[-1], dtype=torch.bool))
        return self.shape.tree(tokens, torch.cat(valid, 1))


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Make `--draft lookahead`. Raises: ValueError for sizes that do not fit."""
    return LookaheadDrafter(SIZES, target.norm.weight.device).method()
