"""N-gram lookup: propose the tokens that followed the last few tokens earlier in the text.

1. `match_lengths` compares every place in the text, and in kept texts of earlier requests
   (kept_texts.py), with the end: the number of tokens up to that place that equal the last tokens.
2. The longest matches win; among equal ones, the latest. The tokens that followed are copied,
   several different continuations side by side. A copy that reaches the end of the text continues
   into itself, as in LZ77, so that a loop is drafted completely.
3. The continuations become a tree in which equal prefixes share nodes.
4. How probable its nodes are is learnt from the tokens that the target decides
   (ngram_estimates.py). `NgramDrafter` has trees of several sizes, with expected tokens before they
   run, so that the tree policy picks a size, or none, for every pass (by_value.py).

It needs no model. A cycle without a tree costs vanilla's time and these steps, at its end.
Source: prompt lookup (Saxena 2023; transformers' `prompt_lookup_num_tokens` 10), here as a tree.
Trade-off: every cycle compares the full text, O(S) per token of the match, and keeps no index. One
pass over some thousand integers is cheaper than compiling a data-dependent lookup (on a CPU 3 us
for 4,000 tokens).
`TreeDrafter` can add the continuations to its own tree (`graft`, --draft eagle+ngram).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draft_tree import MAX_NODES, Candidates, DecodedTokens, DraftTree
from drafters import DrafterUpdate, DraftInputs, TreeDrafter
from drafts.by_value import ByValue, PresetDrafter, beside
from drafts.kept_texts import texts_for
from drafts.ngram_estimates import DEPTHS, RATES, Lookup, estimate, learn
from model import Transformer
from options import require
from reference import TORCH, Backend, joined
from run import heads
from run.observer import DraftMethod
from run.options import GenerateConfig
from run.resolved import tree_options
from runtime import replace_fields

# nodes of the trees, root included; CUDA pads to 16, 32 or 64 nodes, a CPU does not pad
SIZES = {"cpu": (2, 4, 8, 16), "cuda": (16, 32)}


@dataclass(frozen=True)
class Ngram:
    """Settings of the lookup."""

    tokens: int = 10  # L, tokens copied per continuation
    branches: int = 4  # K, different continuations at most
    max: int = 6  # M, longest match that is counted
    min: int = 1  # shortest match that is used
    kept: Any = field(default=None, repr=False)  # drafts.kept_texts.PastTexts, searched, too

    def __post_init__(self):
        assert 1 <= self.min <= self.max and self.size <= MAX_NODES, self

    @staticmethod
    def from_config(config: GenerateConfig, kept: Any = None) -> Ngram:
        """Read the options. kept: texts to search, too

        In a head's tree on a CPU, where trees are small, the defaults are fewer tokens.
        """
        if config.draft == "eagle+ngram" and not config.device.startswith("cuda"):
            return Ngram(tokens=4, branches=1, kept=kept)
        return Ngram(kept=kept)

    @property
    def size(self) -> int:
        """Nodes of the continuations, root included."""
        return self.tokens * self.branches + 1

    def resolved_options(self) -> dict[str, int]:
        """Return the settings by option name."""
        names = ("tokens", "branches", "max", "min")
        return {f"ngram_{name}": getattr(self, name) for name in names}

    def graft_on(self, drafter: TreeDrafter) -> TreeDrafter:
        """Let the continuations replace the worst nodes of a drafter's trees. Returns: it, changed.

        Raises: ValueError where its trees have no room for them.
        """
        fault = f"{self.size - 1} looked-up tokens do not fit a tree of {drafter.size} nodes"
        require(self.size < drafter.size, f"{fault}; raise NODES of --tree")
        drafter.graft = self
        drafter.depth = max(drafter.depth, self.tokens)
        drafter.width += self.branches
        return drafter

    def add(
        self, levels: list[Candidates], text: DecodedTokens, backend: Backend = TORCH
    ) -> list[Candidates]:
        """Add the continuations to the candidates of a tree.

        Each one ranks before the next, and all rank before candidates with values below -K.
        """
        pool = joined(levels)
        tokens, lengths = lookup(text, self, backend)
        if backend.add_chains is not None:
            return [Candidates(*backend.add_chains(*pool, tokens, lengths))]
        for k in range(self.branches):
            values = torch.where(lengths[:, k, None] > 0, -float(k), float("-inf"))  # [B, 1]
            pool = add_chain(pool, tokens[:, k], values.expand(-1, self.tokens))
        return [pool]


def match_lengths(text: DecodedTokens, longest: int) -> Tensor:
    """Count for each place how many tokens up to and including it equal the last ones of the text.

    longest: upper bound of the count
    Returns: [B, S + 1] int64; 0 at the root itself and past it.
    """
    place = torch.arange(text.tokens.shape[1], device=text.pos.device)  # [S + 1]
    equal = place < text.pos[:, None]  # [B, S + 1], so far
    length = torch.zeros_like(text.tokens)
    for back in range(longest):
        last = text.tokens.gather(1, (text.pos - back).clamp(min=0)[:, None])  # [B, 1]
        same = (text.tokens.roll(back, 1) == last) & (last >= 0)  # -1 is no token
        equal = equal & same & (place >= back)  # excludes the tokens that roll wraps around
        length = length + equal
    return length


def lookup(text: DecodedTokens, ngram: Ngram, backend: Backend = TORCH) -> tuple[Tensor, Tensor]:
    """Return the best continuations, pairwise different: longest match first, then the latest.

    Kept texts lie before the text, with -1 behind each, which a copy takes as 0.
    Returns: tokens [B, K, L]; the tokens that match, [B, K] int64, 0 for no continuation, in a kept
        text M more.
    """
    if backend.ngram_match is not None:
        kept = ngram.kept
        if kept is not None:  # a captured step reads one address
            kept = kept.tokens if text.pos.is_cuda else kept.searched
        sizes = (ngram.tokens, ngram.branches, ngram.min, ngram.max)
        return backend.ngram_match(*text, kept, *sizes)
    before = 0
    if ngram.kept is not None:
        kept = ngram.kept.tokens
        before = len(kept)
        joined = torch.cat((kept.expand(len(text.pos), -1), text.tokens), 1)
        text = DecodedTokens(joined, text.pos + before)
    S = text.tokens.shape[1]
    place = torch.arange(S, device=text.pos.device)
    steps = torch.arange(ngram.tokens, device=text.pos.device)
    length = match_lengths(text, ngram.max)
    # distance of the copy from its source
    period = (text.pos[:, None] - place).clamp(min=1)[:, :, None]  # [B, S, 1]
    source = (place[:, None] + 1 + steps % period).clamp(max=S - 1)  # [B, S, L]
    # continuation of each place
    copies = text.tokens.gather(1, source.flatten(1)).view_as(source)  # [B, S, L]
    matches = (length >= ngram.min) & (copies[:, :, 0] >= 0)
    score = torch.where(matches, length * S + place, -1)  # [B, S]
    copies = copies.clamp(min=0)
    chains = []
    matched = []
    for _ in range(ngram.branches):
        best = score.argmax(1, keepdim=True)  # [B, 1]
        chain = copies.gather(1, best[:, :, None].expand(-1, -1, ngram.tokens))  # [B, 1, L]
        chains.append(chain)
        length = score.gather(1, best).clamp(min=0) // S
        matched.append(length + (length > 0) * (best < before) * ngram.max)
        score = torch.where((copies == chain).all(-1), -1, score)
    return torch.cat(chains, 1), torch.cat(matched, 1)


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
        is_known = same.any(1, keepdim=True)
        here = (same * torch.arange(P, device=tokens.device)).sum(1, keepdim=True)  # [B, 1]
        raised = torch.where(same, torch.maximum(pool.values, value), pool.values)
        pool = Candidates(
            torch.cat((pool.tokens, token), 1),
            torch.cat((raised, value.masked_fill(is_known, float("-inf"))), 1),
            torch.cat((pool.parents, above), 1),
        )
        above = torch.where(is_known, here, P)
    return pool


class NgramDrafter(PresetDrafter):
    """Proposes the likeliest continuations of a lookup, in trees of several sizes."""

    def __init__(self, ngram: Ngram, device: torch.device | str = "cpu", sizes: Sequence[int] = ()):
        """sizes: nodes of the trees, root included, ascending; by default those for the device"""
        self.ngram = ngram
        self.kept = ngram.kept
        self.device = torch.device(device)
        self.rates = torch.zeros(2 * ngram.max, ngram.branches, DEPTHS, 2, device=self.device)
        usual = sizes or SIZES[self.device.type]
        self.sizes = tuple(size for size in usual if size < ngram.size)
        if len(self.sizes) < len(usual):
            self.sizes += (ngram.size,)
        self._set_size(self.sizes[-1])
        self.smaller = tuple(self._with_size(size) for size in (1, *self.sizes[:-1]))

    def _set_size(self, size: int) -> None:
        self.size = size
        self.depth = min(self.ngram.tokens, size - 1)
        self.width = min(self.ngram.branches, size - 1)

    def _with_size(self, size: int) -> NgramDrafter:
        """Make a preset; with a size of 1 it proposes nothing."""
        other = copy(self)
        other._set_size(size)
        return other

    def method(self) -> DraftMethod:
        return DraftMethod(self.presets, self.resolved_options(), policy=ByValue(self))

    def resolved_options(self) -> dict[str, Any]:
        return self.ngram.resolved_options()

    def init(self, batch: int, slots: int) -> Lookup:
        ngram = self.ngram
        tokens = torch.zeros(batch, ngram.size - 1, dtype=torch.long, device=self.device)
        lengths = tokens.new_zeros(batch, ngram.branches)
        outcomes = self.rates.repeat(batch, 1, 1, 1, 1)
        expected = outcomes.new_zeros(batch, 1 + len(self.sizes))
        values = torch.full_like(tokens, float("-inf"), dtype=torch.float32)
        root = torch.full_like(tokens[:, 0], -1)
        parents = torch.full_like(tokens, -1)
        return Lookup(tokens, values, parents, lengths, root, outcomes, expected)

    def extend(self, state: Lookup, update: DrafterUpdate) -> Lookup:
        """Learn from the decided tokens, and look up what may follow.

        Writes: on a CPU, the state.
        """
        text = update.text
        sizes = (1, *self.sizes)
        if self.backend.ngram_draft is not None:
            kept = None if self.kept is None else self.kept.searched
            limits = (self.ngram.min, self.ngram.max)
            self.backend.ngram_draft(*text, kept, *state, *limits, sizes, RATES)
            return state
        outcomes = learn(state, text)
        chains, lengths = lookup(text, self.ngram, self.backend)
        tokens = chains.flatten(1)
        guesses = estimate(tokens, lengths, outcomes, sizes)
        return Lookup(tokens, *guesses[:2], lengths, text.pos.clone(), outcomes, guesses[2])

    def rewind(self, state: Lookup, length: Tensor) -> Lookup:
        return replace_fields(state, root=torch.full_like(state.root, -1))

    def propose_nodes(self, state: Lookup, inputs: DraftInputs) -> DraftTree:
        pool = Candidates(*state[:3])
        return self.backend.select_nodes([pool], (), self.size - 1, self.depth, inputs.text)


def with_trees(method: DraftMethod, target: Transformer, config: GenerateConfig) -> DraftMethod:
    """Return a method that grows a tree as one whose trees are by value, or none.

    On one CPU a head's method also has trees of a lookup.
    """
    kept = texts_for(config, target)
    lookup = None if kept is None else NgramDrafter(Ngram(kept=kept))
    return beside(method.presets[-1], lookup).method()


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Make `--draft ngram`, or a head whose trees take looked-up tokens, too.

    Raises: ValueError for options or files of the head that do not fit.
    """
    kept = texts_for(config, target)
    ngram = Ngram.from_config(config, kept)
    if config.draft == "ngram":
        return NgramDrafter(ngram, target.norm.weight.device).method()
    drafter = heads.load_method(target, config, tokenizer).presets[-1]
    ngram.graft_on(drafter)
    return DraftMethod((drafter,), tree_options(drafter), policy=ByValue(kept=kept, chooses=False))
