"""Drafters propose the tree that the target verifies.

A drafter reads the tokens that the target has confirmed (`extend`) and proposes a tree (`propose`),
both as steps with static shapes over a state of its own, a NamedTuple of tensors. Here:
- `Drafter`, the protocol of the loop, and `RootOnly`, which proposes nothing: vanilla decoding;
- `TreeDrafter`, which grows static or dynamic trees from the scores of the token after a node.

Drafters of trees of several sizes over one state are presets; the host picks one for a cycle.
To add a drafter: subclass one, write a `load_method` that returns its `DraftMethod`
(run/observer.py), and add its module to `DRAFTERS` (drafts/methods.py).
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draft_tree import (
    MAX_NODES,
    Candidates,
    Children,
    DecodedTokens,
    DrafterUpdate,
    DraftTree,
    DynamicTree,
    Frontier,
    Level,
    Scores,
    StaticTree,
)
from kv_cache import KVCache, Window
from model import Transformer
from options import require
from reference import TORCH, Backend, use_backend
from runtime import replace_fields
from sampling import SamplingTensors


class DraftInputs(NamedTuple):
    """The text that a tree continues, and the noise and the rule of the target's choice."""

    noise: Tensor | None  # [B, D+1, V] fp32 Gumbel noise of the coming draws; None when greedy
    text: DecodedTokens
    sampling: SamplingTensors | None = None  # the rule; None when all are greedy
    draws: Tensor | None = None  # [B] int64, tokens drawn in each conversation so far
    # masks the children of nodes, and follows the nodes that run; None: all tokens may follow
    guide: Any = None
    cache: KVCache | None = None  # the target's; slots below the root's hold the text


class Drafter:
    """The protocol of the loop. The defaults are those of a drafter without a state."""

    depth: int  # D, a bound on the drafted levels
    size: int  # N, nodes of its tree, root included
    width: int  # a bound on the children of a node
    aux_layers: tuple[int, ...] = ()  # target layers whose inputs are appended to the features
    layers: nn.ModuleList | None = None  # its transformer layers
    backend: Backend = TORCH  # as the target's
    source: str = ""  # of its drafts, for a person; "": that of the way to draft
    noise_rows: int = 0  # of `DraftInputs.noise`, where it makes further ones; 0: one a depth

    def use(self, backend: Backend) -> None:
        """Run the functions of a backend. Writes: `backend`, also of modules and drafters in it."""
        self.backend = backend
        for part in vars(self).values():
            if isinstance(part, nn.Module):
                use_backend(part, backend)

    def fuse(self, enable: bool) -> None:
        """Run its passes in one C++ call each, where the model allows that."""

    def init(self, batch: int, slots: int) -> Any:
        """Make an empty state for `batch` sequences with `slots` target positions each."""
        return ()

    def extend(self, state: Any, update: DrafterUpdate) -> Any:
        """Read confirmed tokens. Writes: the drafter's own cache."""
        return state

    def rewind(self, state: Any, length: Tensor) -> Any:
        """Forget all but the first `length` tokens, [B]. One at least follows before a tree."""
        return state

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        """Propose a tree below the root. Writes: scratch slots of the drafter's cache."""
        raise NotImplementedError


class RootOnly(Drafter):
    """Proposes nothing, so that every verification decides one token."""

    name = "none"  # as of a tree, while a start compiles it
    depth = 0
    size = 1
    width = 0

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        return self.backend.root_tree(inputs.text)


# ------------------------------------------------------------------------------------ grown trees


class DraftState(NamedTuple):
    """The text as a drafter with weights has read it: slots below `length` are confirmed tokens."""

    cache: Any  # its layers' `KVCache`; (): it has none, or reads the target's
    length: Tensor  # [B] int64, confirmed tokens
    hidden: Tensor  # [B, 1, F], output or feature of the last confirmed token

    @staticmethod
    def empty(batch: int, like: Tensor, config: Any = None, slots: int = 0) -> DraftState:
        """Make a state before any token. like: a weight, [F]; config: of layers with a cache"""
        place = (like.dtype, str(like.device))
        cache = KVCache.empty(config, batch, slots, *place) if config else ()
        length = torch.zeros(batch, dtype=torch.long, device=like.device)
        return DraftState(cache, length, like.new_zeros(batch, 1, len(like)))


class DraftVocab(NamedTuple):
    """The tokens that a drafter scores: all, or those of the columns of its logits."""

    size: int  # V, tokens of the target
    ids: Tensor | None = None  # [Vd] int64, ascending, the token of each column; None: all, Vd = V

    @property
    def drafted(self) -> int:
        """Vd, tokens that can be drafted."""
        return self.size if self.ids is None else len(self.ids)

    def columns(self, x: Tensor) -> Tensor:
        """Select the entries of those tokens: [..., V] -> [..., Vd]."""
        return x if self.ids is None else x.index_select(-1, self.ids)

    def tokens(self, column: Tensor) -> Tensor:
        """Turn columns into token ids, int64 of any shape."""
        return column if self.ids is None else self.ids[column]


def planned(tree: DynamicTree | StaticTree, device: torch.device | str) -> DynamicTree | StaticTree:
    """Return a shape with its plan, and with its tensors on a device."""
    is_static = isinstance(tree, StaticTree)
    plan = []
    first_candidate = 0  # of a level's candidates among those of all levels
    first_slot = 0  # scratch slot of a level's first node that has children
    parents = 1
    for number, count in zip(range(tree.depth), (*tree.widths, 0)):
        fixed = None
        if is_static and count:
            places = [tree.place(path) for path in tree.inner[number + 1]]
            fixed = torch.tensor([places], device=device)
        k = tree.ranks(number) if is_static else tree.topk
        plan.append(Level(k, count, first_candidate, first_slot, sum(tree.widths), fixed))
        first_candidate += parents * k
        first_slot += count
        parents = count
    if not is_static:
        return replace(tree, plan=tuple(plan))
    nodes = []
    for level, paths in zip(plan, tree.levels[1:]):
        nodes += [level.first_candidate + tree.place(path) for path in paths]
    return replace(tree, plan=tuple(plan), nodes=torch.tensor([nodes], device=device))


class TreeDrafter(Drafter):
    """Grows static or dynamic trees. Subclasses give `root_output`, `forward_nodes` and `logits`.

    A node's children are the top-k of its `Scores`, whose sharpness is fitted per head.
    """

    levels: int = MAX_NODES  # that it can draft
    one_pass: bool = False  # a draft is one pass, whatever the number of levels
    keeps_nodes: bool = False  # nodes that ran while drafting stay in its cache when accepted
    reach: int | None = None  # positions that it can read; None: all

    def __init__(
        self,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        children: str = "noise",
        sharpness: float = 1.0,
        vocab: DraftVocab | None = None,
    ):
        """Check the tree against the vocabulary. Raises: ValueError.

        children: how a batch that samples chooses them: "topk" of the drafter's logits; "noise",
            the top-k of logits + T * the shared noise; or "sampled", by `sampler`
        vocab: default: the target's
        """
        self.sharpness = sharpness
        self.children = children
        self.sampler: Any = None  # draws the children itself (drafts/residual.py)
        self.graft: Any = None  # adds candidates (drafts/ngram_draft.py)
        self.growth: Any = None  # decides, level by level, which nodes pay (drafts/by_value.py)
        self.vocab = vocab or DraftVocab(target.config.vocab_size)
        self.feature = target.norm.weight  # [F], of the target's features' width and dtype
        self.device = self.feature.device
        self._set_tree(planned(tree, self.device))
        fault = f"a node cannot have {tree.width} ranked children of {self.vocab.drafted} tokens"
        remedy = "lower the rank (CHILDREN of --tree)"
        require(tree.width <= self.vocab.drafted, f"{fault}; {remedy}")

    def _set_tree(self, tree: DynamicTree | StaticTree) -> None:
        """Set the tree, and the sizes that follow from it. Raises: ValueError."""
        self.tree = tree
        self.depth = tree.depth
        self.size = tree.size
        self.width = tree.width
        self.scratch = sum(tree.widths)  # slots that a draft needs above the root's

    def with_tree(self, tree: DynamicTree | StaticTree) -> TreeDrafter:
        """Make a preset with another, smaller tree."""
        other = copy(self)
        other._set_tree(planned(tree, self.device))
        return other

    @property
    def name(self) -> str:
        return self.tree.name

    def rewind(self, state: DraftState, length: Tensor) -> DraftState:
        return replace_fields(state, length=length)

    def root_output(self, state: Any, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        """Return the root's output, [B, 1, F], and the first scratch slot, of its children."""
        raise NotImplementedError

    def forward_nodes(
        self, state: Any, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        """Run over the nodes of one level. Writes: the cache at `window.slots`.

        out: [B, R', F], outputs of the level before; `frontier.parent` is each node's parent there
        positions: [B, R] int64
        Returns: their outputs, [B, R, F].
        """
        raise NotImplementedError

    def logits(self, out: Tensor, level: int) -> Tensor:
        """Score the token after each output: [B, R, F] -> [B, R, Vd] fp32, Vd tokens of `vocab`.

        level: of the children, from 0; scores that all nodes share may be returned once: [B, 1, Vd]
        """
        raise NotImplementedError

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        """Grow a tree: score the frontier's children, pick the next frontier, run it.

        Of all scored children the best, or those of the tree's shape, become nodes.
        Writes: scratch slots of the cache. Source: EAGLE-2 (arXiv 2406.16858) 4.
        """
        out, first_slot = self.root_output(state, inputs)  # [B, 1, F]
        scored: list[Scores | Children] = []
        levels: list[Candidates] = []
        expanded: list[Tensor] = []  # per level, the flat indices of the nodes that ran
        frontier = None  # the root
        growth = self.growth
        for number, level in enumerate(self.tree.plan if growth is None else growth.plan()):
            if self.sampler is not None and inputs.sampling is not None:
                scores = self.sampler.draw(self, out, number, inputs)
            else:
                scores = self.score_children(out, number, inputs)
            candidates, frontier = self.backend.expand_frontier(scores, frontier, level)
            scored.append(scores)
            levels.append(candidates)
            if growth is not None:
                frontier = growth.cut(candidates, frontier)
            if level.count and frontier is not None:
                expanded.append(frontier.index)
                if inputs.guide is not None:
                    frontier = inputs.guide.descend(frontier)
                places = (first_slot, number, frontier.index.shape[1], level.first_slot)
                slots, _, positions = self.backend.place_tokens(*places)
                window = Window(slots, first_slot, frontier.seen)
                out = self.forward_nodes(state, frontier, out, positions, window)  # [B, R, F]
        if self.graft:
            levels = self.graft.add(levels, inputs.text, self.backend)
        nodes = self.tree.nodes if growth is None else growth.count()
        tree = self.backend.select_nodes(levels, expanded, nodes, self.depth, inputs.text)
        return tree if self.sampler is None else self.sampler.attach(tree, scored)

    def score_children(self, out: Tensor, level: int, inputs: DraftInputs) -> Scores | Children:
        """Score the children of every output [B, R, F]. Level 0 is the root's."""
        z = self.logits(out, level)  # [B, R, Vd]
        if inputs.guide is not None:
            z = inputs.guide.mask(z, self.vocab)
        if self.children != "noise" or inputs.sampling is None:
            return Scores(z, self.sharpness, self.vocab.ids)
        z = inputs.sampling.cut(z, self.backend)
        rows = (inputs.noise, level) if self.growth is None else (self.growth.noise_at(level), 0)
        return Scores(z, self.sharpness, self.vocab.ids, *rows, inputs.sampling.temperature)
