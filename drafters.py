"""Drafters propose the tree that the target verifies.

A drafter owns a state (a NamedTuple of tensors), reads the tokens that the target has confirmed
(`extend`) and proposes a tree (`propose`). Both are pure steps with static shapes. The output stays
the target's own, whatever a drafter proposes. Here:
- `Drafter`, the protocol of the loop, and `RootOnly`, which proposes nothing: vanilla decoding;
- `TreeDrafter`, which grows static or dynamic trees from the scores of the token after a node.

A drafter may come in presets: trees of different sizes over one state, each compiled. After every
cycle `prefer` gives the largest preset that makes sense for each sequence, and the host picks one
up to it (`LargestTree`, extras/autosize.py), by the accepted tokens that each can expect, where the
drafter knows them before it drafts (`expected`). A wrong pick costs only time.
To add a drafter: subclass one of them; add a `case` that returns it to `make_drafter` (load.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from draft_tree import DraftTree, DynamicTree, StaticTree, Text, root_tree
from kv_cache import Window
from model import Layers, Transformer
from ops.tree import Candidates, Children, Frontier, Scores, next_level, place_tokens, rerank

LARGEST = 1 << 30  # past the last preset of any drafter


class Confirmed(NamedTuple):
    """Decided tokens and their features: f_j is the target's at x_j; x_{j+1} follows from it."""

    tokens: Tensor  # [B, R + 1] int64, x_j and the token after the last
    features: Tensor  # [B, R, F], f_j; with aux layers [B, R, (1 + aux) F]
    count: Tensor  # [B] int64, leading features that are real; the rest is padding
    # [B, R] int64, `DraftTree.places` of the accepted path; None: the drafter ran none of them
    slots: Tensor | None = None
    text: Text | None = None  # all decided tokens up to the new roots; None: not of a cycle
    # for a drafter with `successors`, behind a cycle: the verified tree; [B, N, k] int64, the
    # target's likeliest tokens after each node, best first
    tree: DraftTree | None = None
    successors: Tensor | None = None

    @property
    def nodes(self) -> Tensor:
        """The tokens of the verified tree, [B, N] int64; -1 where nothing was decided."""
        real = self.tree.valid & (self.count > 0)[:, None]  # a finished sequence has none
        return torch.where(real, self.tree.tokens, -1)


class Root(NamedTuple):
    """The start of a tree, and the noise of its draws."""

    noise: Tensor | None  # [B, D+1, V] fp32 Gumbel noise of the coming draws; None when greedy
    fresh: Tensor | None  # [B, fresh_rows, V] fp32 Gumbel noise that nothing else reads
    text: Text
    rule: sampling.Rule | None = None  # of the target's choice; None when all are greedy
    guide: Any = None  # extras.grammar.Walk, the tokens that grammars allow; None: all


class LargestTree:
    """A tree policy: the largest preset, always. extras/autosize.py has one that learns."""

    prefill_tree = -1  # the preset that reads prompts

    def next(self, limit: int, expected: Sequence[float] | None = None) -> int:
        """Pick the preset of the next cycle.

        limit: the largest that makes sense now
        expected: accepted tokens per sequence that each preset can expect, where that is known
        """
        if expected is None or len(expected) <= limit:
            return limit
        return max((preset for preset in range(limit + 1) if expected[preset] > 0), default=0)

    def observe(self, preset: int, accepted: float, seconds: float, sequences: int) -> None:
        """Learn from a cycle.

        accepted: mean length over the live sequences, the bonus not counted
        sequences: their number
        """

    def table(self, ran: list[tuple[int, float]]) -> list[dict[str, Any]]:
        """Summarize the presets, for the record; empty without a choice. ran: `Stats.presets`."""
        return []


class Drafter:
    """The protocol of the loop. The defaults are those of a drafter without a state."""

    depth: int  # D, a bound on the drafted levels
    size: int  # N, nodes of its tree, root included
    width: int  # a bound on the children of a node
    fresh_rows: int = 0  # rows of noise of its own that it samples children with (residual rule)
    smaller: tuple[Drafter, ...] = ()  # further presets over the same state, smallest tree first
    layers: Layers | None = None  # its transformer layers
    timed: bool = False  # the host picks among the presets by their measured speed
    aux_layers: tuple[int, ...] = ()  # target layers whose inputs follow the features, ascending
    keeps_nodes: bool = False  # nodes that ran while drafting stay in its cache when accepted
    max_deferred: int = 0  # cycles whose tokens `extend` may leave unread until `catch_up`
    may_skip: bool = False  # it may defer for longer; the oldest tokens are then never read
    successors: int = 0  # k, the target's likeliest tokens after every node, which `extend` reads
    lookups: int = 0  # presets behind the smallest whose trees come from a lookup
    rates: Tensor | None = None  # [M, K, D, 2], the outcomes that its lookup starts from
    kept: Any = None  # extras.kept_texts.KeptTexts, which takes the text of every finished request

    @property
    def presets(self) -> tuple[Drafter, ...]:
        """All presets, smallest tree first; the last is this one."""
        return (*self.smaller, self)

    @property
    def name(self) -> str:
        """The name of its tree in a report."""
        return "none" if self.size == 1 else f"tree of {self.size}"

    def fuse(self, enable: bool) -> None:
        """Run its passes in one C++ call each, where the model allows that."""

    def prefer(self, text: Text) -> Tensor | None:
        """Give the largest preset that makes sense next, [B] int64; None: any does."""

    def expected(self, state: Any) -> Tensor | None:
        """Return the accepted tokens that the next trees can expect, [B, 1 + lookups] fp32.

        They are those of the smallest presets; None where only the trees themselves tell.
        """

    def outcomes(self, state: Any) -> Tensor | None:
        """Return what its lookup has learnt, [B, M, K, D, 2] fp32; None without one."""

    def resolved_options(self) -> dict[str, Any]:
        """Return the options that were used, under their names, for the record."""
        return {}

    def init(self, batch: int, slots: int) -> Any:
        """Make an empty state for `batch` sequences with `slots` target positions each."""
        return ()

    def extend(self, state: Any, confirmed: Confirmed) -> Any:
        """Read confirmed tokens. Writes: the drafter's own cache."""
        return state

    def catch_up(self, state: Any, text: Text) -> Any:
        """Read the tokens that `extend` has left. Writes: the drafter's own cache."""
        return state

    def rewind(self, state: Any, length: Tensor) -> Any:
        """Forget all but the first `length` tokens, [B] int64.

        At least one confirmed token follows before the next tree.
        """
        return state

    def propose(self, state: Any, root: Root) -> DraftTree:
        """Propose a tree below the root. Writes: scratch slots of the drafter's cache."""
        raise NotImplementedError


class RootOnly(Drafter):
    """Proposes nothing, so that every verification decides one token."""

    depth = 0
    size = 1
    width = 0

    def propose(self, state: Any, root: Root) -> DraftTree:
        return root_tree(root.text)


# ------------------------------------------------------------------------------------ grown trees


class DraftVocab(NamedTuple):
    """The tokens that a drafter scores: all, or those of the columns of its logits."""

    size: int  # V, tokens of the target
    ids: Tensor | None = None  # [Vd] int64, ascending, the token of each column; None: all, Vd = V

    @property
    def kept(self) -> int:
        """Vd, tokens that can be drafted."""
        return self.size if self.ids is None else len(self.ids)

    def columns(self, x: Tensor) -> Tensor:
        """Select the entries of those tokens: [..., V] -> [..., Vd]."""
        return x if self.ids is None else x.index_select(-1, self.ids)

    def tokens(self, column: Tensor) -> Tensor:
        """Turn columns into token ids, int64 of any shape."""
        return column if self.ids is None else self.ids[column]

    def spread(self, q: Tensor) -> Tensor:
        """Spread probabilities over all tokens, 0 for the others: [..., Vd] -> [..., V]."""
        if self.ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.size).index_copy(-1, self.ids, q)


class TreeDrafter(Drafter):
    """Grows static or dynamic trees.

    Subclasses give `init`, `extend`, `rewind`, `root_output`, `forward_nodes` and `logits`, and set
    `layers` if they have a cache.

    A node's children are the top-k of its scores. When sampling, the scores carry the noise with
    which the target will sample at that draw: the likeliest child is the one favoured by the noise.
    A child adds log softmax(c scores) to its path's value; c, the sharpness, is fitted per head.
    """

    levels: int = LARGEST  # that it can draft

    def __init__(
        self,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        children: str = "noise",
        sharpness: float = 1.0,
        vocab: DraftVocab | None = None,
        graft: Any = None,
    ):
        """Check the tree against the vocabulary. Raises: ValueError.

        children: their choice in a batch that samples. "topk": top-k of the drafter's logits;
            "noise": top-k of logits + T * the shared noise; "sampled": `sampler` draws them
        vocab: default: the target's
        graft: `extras.ngram_draft.Ngram`, whose candidates replace the worst nodes
        """
        self.sharpness = sharpness
        self.graft = graft
        self.children = children
        self.sampler: Any = None  # draws the children itself (extras/residual.py)
        self.vocab = vocab or DraftVocab(target.config.vocab_size)
        self.device = target.norm.weight.device
        self._set_tree(tree.to(self.device))
        if tree.width > self.vocab.kept:
            raise ValueError(
                f"a node cannot have {tree.width} ranked children of {self.vocab.kept} tokens; "
                "lower the rank (--tree_topk) or raise --draft_vocab"
            )

    def _set_tree(self, tree: DynamicTree | StaticTree) -> None:
        """Set the tree, and the sizes that follow from it. Raises: ValueError."""
        self.tree = tree
        self.depth = tree.depth
        self.size = tree.size
        self.width = tree.width
        self.scratch = sum(tree.widths)  # slots that a draft needs above the root's
        if self.graft:
            self.graft.check_room(self.size)
            self.depth = max(self.depth, self.graft.tokens)
            self.width += self.graft.branches

    def with_tree(self, tree: DynamicTree | StaticTree) -> TreeDrafter:
        """Make a preset with another, smaller tree."""
        other = copy(self)
        other._set_tree(tree.to(self.device))
        return other

    @property
    def name(self) -> str:
        return self.tree.name

    def root_output(self, state: Any, root: Root) -> tuple[Tensor, Tensor]:
        """Return the root's output, [B, 1, F], and the first scratch slot, [B].

        That slot is also the position of the root's children.
        """
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

    def logits(self, out: Tensor) -> Tensor:
        """Score the token after each output: [B, R, F] -> [B, R, Vd] fp32, Vd tokens of `vocab`."""
        raise NotImplementedError

    def logits_of(self, out: Tensor, level: int) -> Tensor:
        """Score the children of a level's nodes, as `logits`. Level 0 is the root's.

        Scores that all nodes of a level share may be returned once: [B, 1, Vd].
        """
        return self.logits(out)

    def resolved_options(self) -> dict[str, Any]:
        tree = self.tree
        if isinstance(tree, DynamicTree):
            options = {"tree": "dynamic", "tree_topk": tree.topk, "tree_size": tree.size}
        elif tree.width == 1:
            options = {"tree": "chain", "tree_paths": tree.paths}
        else:
            options = {"tree": "static", "tree_paths": tree.paths}
        if self.vocab.ids is not None:
            options["draft_vocab"] = self.vocab.kept
        if self.graft:
            options.update(self.graft.resolved_options())
        options["tree_depth"] = tree.depth
        options["children"] = self.children
        options["sharpness"] = self.sharpness
        return options

    def propose(self, state: Any, root: Root) -> DraftTree:
        """Grow a tree: score the frontier's children, pick the next frontier, run it.

        All scored children are candidates; the best of them, or those of the tree's shape, become
        nodes at the end.
        Writes: scratch slots of the cache. Source: EAGLE-2 (arXiv 2406.16858) 4.
        """
        out, first_slot = self.root_output(state, root)  # [B, 1, F]
        found: list[Scores | Children] = []
        levels: list[Candidates] = []
        ran: list[Tensor] = []  # per level, the flat indices of the nodes that ran
        frontier = None  # the root
        for number, level in enumerate(self.tree.plan):
            if self.sampler is not None and root.rule is not None:
                scores = self.sampler.draw(self, out, number, root)
            else:
                scores = self.score_children(out, number, root)
            candidates, frontier = next_level(scores, frontier, level)
            found.append(scores)
            levels.append(candidates)
            if level.count:
                ran.append(frontier.index)
                if root.guide is not None:
                    frontier = root.guide.descend(frontier)
                slots, _, positions = place_tokens(first_slot, number, level.count, level.slot)
                window = Window(slots, first_slot, frontier.seen)
                out = self.forward_nodes(state, frontier, out, positions, window)  # [B, R, F]
        if self.graft:
            levels = [self.graft.add(Candidates.join(levels), root.text)]
        tree = rerank(levels, ran, self.tree.nodes, self.depth, root.text)
        if self.sampler is not None:
            tree = self.sampler.attach(tree, found, ran)
        return tree

    def score_children(self, out: Tensor, level: int, root: Root) -> Scores | Children:
        """Score the children of every output [B, R, F]. Level 0 is the root's."""
        z = self.logits_of(out, level)  # [B, R, Vd]
        if root.guide is not None:
            z = root.guide.mask(z, self.vocab)
        if self.children != "noise" or root.rule is None:
            return Scores(z, self.sharpness, self.vocab.ids)
        z = sampling.process(z, root.rule)
        noise = (root.noise, level, root.rule.temperature)
        return Scores(z, self.sharpness, self.vocab.ids, *noise)
