"""N-gram lookup: propose the tokens that followed the last few tokens earlier in the text.

1. `match_lengths` compares every place in the text with the end: the number of tokens up to that
   place that equal the last tokens.
2. The longest matches win; among equal ones, the latest. The tokens that followed are copied,
   several different continuations side by side. A copy that reaches the end of the text continues
   into itself, as in LZ77, so that a loop is drafted completely.
3. The continuations become a tree in which equal prefixes share nodes.

It needs no model and keeps no state. Without a match the preset without a tree runs. Such a cycle
costs vanilla's time and step 1, which runs at the end of verification.
Source: prompt lookup (Saxena 2023; transformers' `prompt_lookup_num_tokens` 10), here as a tree.
Trade-off: every cycle compares the full text, O(S) per token of the match, and keeps no index. One
pass over some thousand integers is cheaper than compiling a data-dependent lookup.
`TreeDrafter` can add the continuations to its own tree (`lookup`, --draft eagle+ngram).
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
    """Settings of the lookup."""

    tokens: int = 10  # L, tokens copied per continuation
    branches: int = 2  # K, different continuations at most
    max: int = 3  # longest match that is counted
    min: int = 1  # shortest match that is used

    def __post_init__(self):
        if self.min > self.max:
            raise ValueError(f"--ngram_min {self.min} is above --ngram_max {self.max}; lower it")
        if self.size > MAX_NODES:
            raise ValueError(
                f"--ngram_tokens {self.tokens} times --ngram_branches {self.branches} "
                f"must be below {MAX_NODES}, the nodes of a tree; lower one of them"
            )

    @staticmethod
    def from_config(config: GenerateConfig) -> Ngram:
        """Read the options.

        In a head's tree on a CPU, where trees are small, the defaults are fewer tokens.
        """
        tokens = 10
        branches = 2
        if config.draft == "eagle+ngram" and not config.device.startswith("cuda"):
            tokens = 4
            branches = 1
        return Ngram(
            config.ngram_tokens or tokens,
            config.ngram_branches or branches,
            config.ngram_max,
            config.ngram_min,
        )

    @property
    def size(self) -> int:
        """Nodes of the continuations, root included."""
        return self.tokens * self.branches + 1

    def resolved_options(self) -> dict[str, int]:
        """Return the settings by option name."""
        return {f"ngram_{name}": value for name, value in asdict(self).items()}

    def add(self, pool: Candidates, text: Text) -> Candidates:
        """Add the continuations to a pool.

        Each one ranks before the next, and all rank before candidates with values below -K.
        """
        tokens, found = lookup(text, self)
        if on_cpp_device(tokens):
            return Candidates(*torch.ops.gpt_eagle.add_chains(*pool, tokens, found))
        for k in range(self.branches):
            values = torch.where(found[:, k, None], -float(k), float("-inf"))  # [B, 1]
            pool = add_chain(pool, tokens[:, k], values.expand(-1, self.tokens))
        return pool


def match_lengths(text: Text, longest: int) -> Tensor:
    """Count for each place how many tokens up to and including it equal the last ones of the text.

    longest: upper bound of the count
    Returns: [B, S + 1] int64; 0 at the root itself and past it.
    """
    place = torch.arange(text.tokens.shape[1], device=text.pos.device)  # [S + 1]
    equal = place < text.pos[:, None]  # [B, S + 1], so far
    length = torch.zeros_like(text.tokens)
    for back in range(longest):
        last = text.tokens.gather(1, (text.pos - back).clamp(min=0)[:, None])  # [B, 1]
        same = text.tokens.roll(back, 1) == last
        equal = equal & same & (place >= back)  # excludes the tokens that roll wraps around
        length = length + equal
    return length


def lookup(text: Text, ngram: Ngram) -> tuple[Tensor, Tensor]:
    """Return the best continuations, pairwise different: longest match first, then the latest.

    Returns: tokens [B, K, L]; a mask of those that exist, [B, K] bool.
    """
    if on_cpp_device(text.pos):
        return torch.ops.gpt_eagle.lookup(*text, ngram.tokens, ngram.branches, ngram.min, ngram.max)
    S = text.tokens.shape[1]
    place = torch.arange(S, device=text.pos.device)
    steps = torch.arange(ngram.tokens, device=text.pos.device)
    length = match_lengths(text, ngram.max)
    score = torch.where(length >= ngram.min, length * S + place, -1)  # [B, S]
    # distance of the copy from its source
    period = (text.pos[:, None] - place).clamp(min=1)[:, :, None]  # [B, S, 1]
    source = (place[:, None] + 1 + steps % period).clamp(max=S - 1)  # [B, S, L]
    # continuation of each place
    copies = text.tokens.gather(1, source.flatten(1)).view_as(source)  # [B, S, L]
    chains = []
    found = []
    for _ in range(ngram.branches):
        best = score.argmax(1, keepdim=True)  # [B, 1]
        chain = copies.gather(1, best[:, :, None].expand(-1, -1, ngram.tokens))  # [B, 1, L]
        chains.append(chain)
        found.append(score.gather(1, best) >= 0)
        score = torch.where((copies == chain).all(-1), -1, score)
    return torch.cat(chains, 1), torch.cat(found, 1)


def add_chain(pool: Candidates, tokens: Tensor, values: Tensor) -> Candidates:
    """Add a chain below the root.

    A node that the pool contains already is reused and its value raised.

    tokens: [B, L] int64
    values: [B, L] fp32, not rising along the chain; -inf: no candidate
    Returns: the pool with L more candidates; reused ones are -inf. Siblings stay different, parents
    stay first.
    """
    above = torch.full_like(tokens[:, :1], -1)  # [B, 1], flat index of the node above
    for token, value in zip(tokens.split(1, 1), values.split(1, 1)):  # [B, 1]
        P = pool.tokens.shape[1]
        same = (pool.parents == above) & (pool.tokens == token)
        same = same & (pool.values > float("-inf"))  # [B, P], one at most
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
    """Proposes the continuations of a lookup, or nothing where matches are missing or useless."""

    timed = True
    smaller = (RootOnly(),)

    def __init__(self, ngram: Ngram):
        self.ngram = ngram
        self.depth = ngram.tokens
        self.width = ngram.branches
        self.size = ngram.size

    def prefer(self, text: Text) -> Tensor:
        """Allow preset 1, the tree, where the text has a match."""
        if on_cpp_device(text.pos):
            return torch.ops.gpt_eagle.has_match(*text, self.ngram.min, self.ngram.max)
        return (match_lengths(text, self.ngram.max) >= self.ngram.min).any(1).long()

    def resolved_options(self) -> dict[str, Any]:
        return self.ngram.resolved_options()

    def propose(self, state: tuple, root: Root) -> DraftTree:
        pool = self.ngram.add(Candidates.none(root.text.pos), root.text)
        *nodes, values, _, _ = rerank([pool], (), self.size - 1, self.depth, root.text)
        return DraftTree(*nodes, values=values)
