"""Drafting by looking up: what followed the last words the last time they were written is likely to follow again.

How it works:
1. `match_lengths` compares every place in the text with its end: how many tokens up to there equal the last ones.
2. The longest matches win, of equal ones the latest. What followed them is copied, several different continuations
   side by side. A copy that reaches the end of the text runs on into itself, as in LZ77: a loop is drafted whole.
3. The continuations become a tree in which equal beginnings share their nodes.

It needs no model and keeps no state. Where nothing matches, the preset without a tree runs: the cost of a cycle is
then vanilla's and that of step 1, which verification does on its way out.
Sources: prompt lookup (Saxena 2023; transformers' `prompt_lookup_num_tokens` 10), of which this is the tree.
Trade-off: the text is compared in full every cycle, O(S) per token of the match, instead of keeping an index of it:
one pass over some thousand integers is cheaper than any data-dependent lookup would be to compile.
`EagleDrafter` grafts the same continuation onto its own tree (`DynamicTree.graft`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import draft_tree
from config import GenerateConfig
from draft_tree import MAX_NODES, Candidates, DraftTree
from drafters import DRAFTERS, Drafter, Root, RootOnly, Text
from model import Transformer


@dataclass(frozen=True)
class Ngram:
    """What is looked up."""

    tokens: int = 10  # L, tokens copied per continuation
    branches: int = 2  # K, different continuations at most
    max: int = 3  # a match counts up to this many tokens
    min: int = 1  # and from this many on

    def __post_init__(self):
        if self.min > self.max:
            raise ValueError(f"--ngram_min {self.min} is above --ngram_max {self.max}; lower it")
        if self.size > MAX_NODES:
            raise ValueError(
                f"--ngram_tokens {self.tokens} times --ngram_branches {self.branches} must be below {MAX_NODES}, "
                "the nodes of a tree; lower one of them"
            )

    @staticmethod
    def from_config(config: GenerateConfig) -> Ngram:
        return Ngram(config.ngram_tokens, config.ngram_branches, config.ngram_max, config.ngram_min)

    @property
    def size(self) -> int:
        """Nodes of the continuations, root included."""
        return self.tokens * self.branches + 1

    def facts(self) -> dict[str, int]:
        """The options, under their names."""
        return {f"ngram_{name}": value for name, value in asdict(self).items()}


def match_lengths(text: Text, longest: int) -> Tensor:
    """How many tokens up to and including each place equal the last ones of the text, at most `longest`.

    Returns: [B, S + 1] int64; 0 at the root itself and past it.
    """
    place = torch.arange(text.tokens.shape[1], device=text.pos.device)  # [S + 1]
    equal = place < text.pos[:, None]  # [B, S + 1], so far
    length = torch.zeros_like(text.tokens)
    for back in range(longest):
        last = text.tokens.gather(1, (text.pos - back).clamp(min=0)[:, None])  # [B, 1]
        equal = equal & (text.tokens.roll(back, 1) == last) & (place >= back)  # what roll wraps around is cut
        length = length + equal
    return length


def lookup(text: Text, ngram: Ngram) -> tuple[Tensor, Tensor]:
    """The best continuations, pairwise different: longest match first, then the latest.

    Returns: tokens [B, K, L]; which of them are there, [B, K] bool.
    """
    S = text.tokens.shape[1]
    place = torch.arange(S, device=text.pos.device)
    steps = torch.arange(ngram.tokens, device=text.pos.device)
    length = match_lengths(text, ngram.max)
    score = torch.where(length >= ngram.min, length * S + place, -1)  # [B, S]
    period = (text.pos[:, None] - place).clamp(min=1)[:, :, None]  # [B, S, 1], distance of the copy from its source
    source = (place[:, None] + 1 + steps % period).clamp(max=S - 1)  # [B, S, L]
    copies = text.tokens.gather(1, source.flatten(1)).view_as(source)  # [B, S, L], what each place continues with
    chains, found = [], []
    for _ in range(ngram.branches):
        best = score.argmax(1, keepdim=True)  # [B, 1]
        chains.append(copies.gather(1, best[:, :, None].expand(-1, -1, ngram.tokens)))  # [B, 1, L]
        found.append(score.gather(1, best) >= 0)
        score = torch.where((copies == chains[-1]).all(-1), -1, score)
    return torch.cat(chains, 1), torch.cat(found, 1)


def graft(pool: Candidates, text: Text, ngram: Ngram) -> Candidates:
    """Add the continuations to a pool, each before the next, and all before whatever scores below -K."""
    tokens, found = lookup(text, ngram)
    for k in range(ngram.branches):
        values = torch.where(found[:, k, None], -float(k), float("-inf")).expand(-1, ngram.tokens)  # [B, L]
        pool = draft_tree.graft(pool, tokens[:, k], values)
    return pool


class NgramDrafter(Drafter):
    """Proposes the continuations that were looked up; nothing where nothing matches, or where matches are no use."""

    sized = True

    def __init__(self, ngram: Ngram):
        self.ngram = ngram
        self.depth, self.width, self.size = ngram.tokens, ngram.branches, ngram.size

    @property
    def presets(self) -> tuple[Drafter, ...]:
        return (RootOnly(), self)

    def prefer(self, text: Text) -> Tensor:
        """Preset 1, the tree, where something matches."""
        return (match_lengths(text, self.ngram.max) >= self.ngram.min).any(1).long()

    def facts(self) -> dict[str, Any]:
        return self.ngram.facts()

    def draft(self, state: tuple, root: Root) -> DraftTree:
        empty = root.token.new_zeros(len(root.token), 0)  # [B, 0]
        pool = graft(Candidates(empty, empty.float(), empty), root.text, self.ngram)
        return draft_tree.rerank(root.token, pool, self.size, self.depth)


def make_drafter(target: Transformer, config: GenerateConfig) -> NgramDrafter:
    """`--draft ngram`. Raises: ValueError for sizes that do not fit."""
    return NgramDrafter(Ngram.from_config(config))


DRAFTERS["ngram"] = make_drafter
