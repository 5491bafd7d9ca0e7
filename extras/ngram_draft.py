"""Drafting by looking up: what followed the last words the last time they were written is likely to follow again.

How it works:
1. `match_lengths` compares every place in the text with its end: how many tokens up to there equal the last ones.
2. The longest matches win, of equal ones the latest. What followed them is copied, several different continuations
   side by side. A copy that reaches the end of the text runs on into itself, as in LZ77: a loop is drafted whole.
3. The continuations become a tree in which equal beginnings share their nodes.

It needs no model and keeps no state. Where nothing matches, the preset without a tree runs: the cost of a cycle is
then vanilla's plus step 1, which runs at the end of verification.
Sources: prompt lookup (Saxena 2023; transformers' `prompt_lookup_num_tokens` 10), of which this is the tree.
Trade-off: the text is compared in full every cycle, O(S) per token of the match, instead of keeping an index of it:
one pass over some thousand integers is cheaper than any data-dependent lookup would be to compile.
`TreeDrafter` takes the same continuations into its own tree (`lookup`, --draft eagle+ngram).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draft_tree import DraftTree, Text
from drafters import Drafter, Root, RootOnly
from ops.library import on_cpp_device
from ops.tree import Candidates, rerank
from options import GenerateConfig
from tree_shapes import MAX_NODES


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
        """The options; by default fewer tokens in a head's tree on a CPU, where trees are small."""
        few = config.draft == "eagle+ngram" and not config.device.startswith("cuda")
        tokens, branches = (
            config.ngram_tokens or (4 if few else 10),
            config.ngram_branches or (1 if few else 2),
        )
        return Ngram(tokens, branches, config.ngram_max, config.ngram_min)

    @property
    def size(self) -> int:
        """Nodes of the continuations, root included."""
        return self.tokens * self.branches + 1

    def resolved_options(self) -> dict[str, int]:
        """The options, under their names."""
        return {f"ngram_{name}": value for name, value in asdict(self).items()}

    def add(self, pool: Candidates, text: Text) -> Candidates:
        """Add the continuations to a pool, each before the next, and all before whatever scores below -K."""
        tokens, found = lookup(text, self)
        if on_cpp_device(tokens):
            return Candidates(*torch.ops.gpt_eagle.add_chains(*pool, tokens, found))
        for k in range(self.branches):
            values = torch.where(found[:, k, None], -float(k), float("-inf")).expand(
                -1, self.tokens
            )  # [B, L]
            pool = add_chain(pool, tokens[:, k], values)
        return pool


def match_lengths(text: Text, longest: int) -> Tensor:
    """How many tokens up to and including each place equal the last ones of the text, at most `longest`.

    Returns: [B, S + 1] int64; 0 at the root itself and past it.
    """
    place = torch.arange(text.tokens.shape[1], device=text.pos.device)  # [S + 1]
    equal = place < text.pos[:, None]  # [B, S + 1], so far
    length = torch.zeros_like(text.tokens)
    for back in range(longest):
        last = text.tokens.gather(1, (text.pos - back).clamp(min=0)[:, None])  # [B, 1]
        equal = (
            equal & (text.tokens.roll(back, 1) == last) & (place >= back)
        )  # what roll wraps around is cut
        length = length + equal
    return length


def lookup(text: Text, ngram: Ngram) -> tuple[Tensor, Tensor]:
    """The best continuations, pairwise different: longest match first, then the latest.

    Returns: tokens [B, K, L]; which of them are there, [B, K] bool.
    """
    if on_cpp_device(text.pos):
        return torch.ops.gpt_eagle.lookup(*text, ngram.tokens, ngram.branches, ngram.min, ngram.max)
    S = text.tokens.shape[1]
    place = torch.arange(S, device=text.pos.device)
    steps = torch.arange(ngram.tokens, device=text.pos.device)
    length = match_lengths(text, ngram.max)
    score = torch.where(length >= ngram.min, length * S + place, -1)  # [B, S]
    period = (text.pos[:, None] - place).clamp(min=1)[
        :, :, None
    ]  # [B, S, 1], distance of the copy from its source
    source = (place[:, None] + 1 + steps % period).clamp(max=S - 1)  # [B, S, L]
    copies = text.tokens.gather(1, source.flatten(1)).view_as(
        source
    )  # [B, S, L], what each place continues with
    chains, found = [], []
    for _ in range(ngram.branches):
        best = score.argmax(1, keepdim=True)  # [B, 1]
        chains.append(copies.gather(1, best[:, :, None].expand(-1, -1, ngram.tokens)))  # [B, 1, L]
        found.append(score.gather(1, best) >= 0)
        score = torch.where((copies == chains[-1]).all(-1), -1, score)
    return torch.cat(chains, 1), torch.cat(found, 1)


def add_chain(pool: Candidates, tokens: Tensor, values: Tensor) -> Candidates:
    """Add a chain below the root. Where the pool has one of its nodes already, that is used and its value raised.

    tokens: [B, L] int64
    values: [B, L] fp32, not rising along the chain; -inf: no candidate
    Returns: the pool with L candidates more, -inf those that it had; siblings stay different, parents stay first.
    """
    above = torch.full_like(tokens[:, :1], -1)  # [B, 1], flat index of the node above
    for token, value in zip(tokens.split(1, 1), values.split(1, 1)):  # [B, 1]
        P = pool.tokens.shape[1]
        same = (
            (pool.parents == above) & (pool.tokens == token) & (pool.values > float("-inf"))
        )  # [B, P], one at most
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


class NgramDrafter(Drafter):
    """Proposes the continuations that were looked up; nothing where nothing matches, or where matches are no use."""

    timed = True
    smaller = (RootOnly(),)

    def __init__(self, ngram: Ngram):
        self.ngram = ngram
        self.depth, self.width, self.size = ngram.tokens, ngram.branches, ngram.size

    def prefer(self, text: Text) -> Tensor:
        """Preset 1, the tree, where something matches."""
        if on_cpp_device(text.pos):
            return torch.ops.gpt_eagle.has_match(*text, self.ngram.min, self.ngram.max)
        return (match_lengths(text, self.ngram.max) >= self.ngram.min).any(1).long()

    def resolved_options(self) -> dict[str, Any]:
        return self.ngram.resolved_options()

    def propose(self, state: tuple, root: Root) -> DraftTree:
        pool = self.ngram.add(Candidates.none(root.text.pos), root.text)
        *nodes, values, _, _ = rerank([pool], (), self.size - 1, self.depth, root.text)
        return DraftTree(*nodes, values=values)
