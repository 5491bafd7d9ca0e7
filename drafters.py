"""Drafters: who proposes the tree that the target verifies.

A drafter owns a state (a NamedTuple of tensors), takes in the rows that the target has confirmed (`extend`) and
proposes a tree (`draft`). Both are pure steps with static shapes. Whatever a drafter proposes, the output stays the
target's own. Here:
- `Drafter`, what the loop needs, and `RootOnly`, which proposes nothing: vanilla decoding is its verification;
- `TreeDrafter`, which grows static or dynamic trees with anything that can score the token after a node.

A drafter may come in presets: trees of different sizes over one state, each compiled. After every cycle `prefer` says
which is the largest that makes sense for each row, and the host chooses among those. A wrong choice costs only time.
To add a drafter: subclass one of the two, and add a case to `make_drafter` (generate.py).
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

from torch import Tensor

import sampling
from draft_tree import (
    DraftTree,
    DynamicTree,
    Graft,
    Level,
    StaticTree,
    Text,
    grow,
    replace_fields,
    root_tree,
)
from kv_cache import Window
from model import Layers, Transformer
from ops.tree import Children, Scores, Shared, place_rows

LARGEST = 1 << 30  # past the last preset of any drafter


class Confirmed(NamedTuple):
    """Rows that the target has computed and decided: feature f_j between the tokens x_j and x_{j+1}."""

    tokens: Tensor  # [B, R + 1] int64, x_j and the token after the last
    features: Tensor  # [B, R, F], f_j; with the drafter's aux_layers [B, R, (1 + aux_layers) F]
    count: Tensor  # [B] int64, how many leading rows are real; the rest is padding
    slots: Tensor | None = (
        None  # [B, R] int64, `DraftTree.slots` of the accepted path; None: the drafter ran none
    )


class Root(NamedTuple):
    """Where a tree starts, and the noise that its levels will be judged by."""

    noise: Tensor | None  # [B, D+1, V] fp32 Gumbel noise of the coming draws; None when greedy
    fresh: Tensor | None  # [B, fresh_rows, V] fp32 Gumbel noise that nothing else reads
    text: Text


class Drafter:
    """What the loop needs of a drafter. The defaults are those of one that keeps nothing."""

    depth: int  # D, drafted levels at most
    size: int  # N, nodes of its tree, root included
    width: int  # children of a node at most
    fresh_rows: int = 0  # rows of noise of its own that it samples children with (residual rule)
    smaller: tuple[Drafter, ...] = ()  # further presets over the same state, smallest tree first
    layers: Layers | None = None  # its transformer layers
    timed: bool = False  # whether the host chooses among the presets by their measured speed
    aux_layers: tuple[
        int, ...
    ] = ()  # layers of the target whose inputs it wants behind the features, ascending
    room: int = 0  # steps whose rows `extend` may leave to `catch_up`, called before a tree; LARGEST: or may leave out

    @property
    def presets(self) -> tuple[Drafter, ...]:
        """All presets, smallest tree first; the last is this one."""
        return (*self.smaller, self)

    @property
    def name(self) -> str:
        """What its tree is called in a report."""
        return f"tree of {self.size}"

    def fuse(self, whether: bool) -> None:
        """Run its passes in one C++ call each, where that is served."""

    def prefer(self, text: Text) -> Tensor | None:
        """The largest preset that makes sense for each row in the next cycle, [B] int64; None: any does."""

    def resolved_options(self) -> dict[str, Any]:
        """What the options came to, under their names, for the record."""
        return {}

    def init(self, batch: int, slots: int) -> Any:
        """An empty state for `batch` rows with `slots` target positions each."""
        return ()

    def extend(self, state: Any, rows: Confirmed) -> Any:
        """Take in confirmed rows. Writes: the drafter's own cache."""
        return state

    def catch_up(self, state: Any, text: Text) -> Any:
        """Take in the rows that `extend` has left. Writes: the drafter's own cache."""
        return state

    def rewind(self, state: Any, length: Tensor) -> Any:
        """Forget all but the first `length` rows ([B] int64); at least one row follows before the next draft."""
        return state

    def propose(self, state: Any, root: Root) -> DraftTree:
        """Propose a tree below the root. Writes: scratch slots of the drafter's cache."""
        raise NotImplementedError


class RootOnly(Drafter):
    """Proposes nothing, so that every verification decides one token."""

    depth, size, width = 0, 1, 0
    name = "none"

    def propose(self, state: Any, root: Root) -> DraftTree:
        return root_tree(root.text)


# ------------------------------------------------------------------------------------------ grown trees


class DraftVocab(NamedTuple):
    """Which tokens a drafter scores: all, or some, whose scores are the columns of its logits."""

    size: int  # V, tokens of the target
    ids: Tensor | None = (
        None  # [N] int64, ascending, the token of each column; None: every token, N = V
    )

    @property
    def kept(self) -> int:
        """N, tokens that can be drafted."""
        return self.size if self.ids is None else len(self.ids)

    def columns(self, x: Tensor) -> Tensor:
        """The entries of those tokens: [..., V] -> [..., N]."""
        return x if self.ids is None else x.index_select(-1, self.ids)

    def tokens(self, column: Tensor) -> Tensor:
        """Token ids of columns, int64 of any shape."""
        return column if self.ids is None else self.ids[column]

    def spread(self, q: Tensor) -> Tensor:
        """Probabilities of all tokens, 0 for those that cannot be drafted: [..., N] -> [..., V]."""
        if self.ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.size).index_copy(-1, self.ids, q)


class TreeDrafter(Drafter):
    """Grows static or dynamic trees. Subclasses give `init`, `extend`, and the three methods below.

    A node's children are the top-k of its scores. When sampling, the scores carry the noise by which the target itself
    will choose at that draw: the likeliest child is the one that the noise favours. A child adds log softmax(c scores)
    to its path's value; c, the sharpness, is fitted per head.
    """

    keeps_rows = (
        False  # whether rows that ran while drafting stay in the cache when they are accepted
    )

    def __init__(
        self, target: Transformer, tree: DynamicTree | StaticTree, rule: sampling.Sampling, children: str = "noise",
        sharpness: float = 1.0, vocab: DraftVocab | None = None, lookup: Any = None,
    ):  # fmt: skip
        """children: how they are picked when sampling. "topk": top-k of the drafter's logits; "noise": top-k of
        logits + T * the shared noise; "sampled": drawn without replacement from q with noise of their own.
        vocab: the tokens that it scores; None: the target's
        lookup: `extras.ngram_draft.Ngram`, whose continuations of the text take the place of the worst nodes
        """
        if children == "sampled" and isinstance(tree, DynamicTree):
            raise ValueError(
                "children of a dynamic tree cannot be sampled: pruning them by their own q is lossy"
            )
        self.rule, self.sharpness, self.lookup = rule, sharpness, lookup
        self.children = children if rule.temperature > 0 else "topk"
        self.vocab = vocab or DraftVocab(target.config.vocab_size)
        self.device = target.embedding.weight.device
        self._take(tree.on(self.device))
        if tree.width > self.vocab.kept:
            raise ValueError(
                f"a node cannot have {tree.width} ranked children of {self.vocab.kept} tokens; lower the rank "
                "(--tree_topk) or raise --draft_vocab"
            )

    def _take(self, tree: DynamicTree | StaticTree) -> None:
        """Use this tree."""
        self.tree, self.depth, self.size, self.width = tree, tree.depth, tree.size, tree.width
        self.scratch = sum(tree.widths)  # slots that a draft needs above the root's row
        self.fresh_rows = 1 + self.scratch if self.children == "sampled" else 0
        if self.lookup:
            self.depth, self.width = (
                max(self.depth, self.lookup.tokens),
                self.width + self.lookup.branches,
            )
            if self.lookup.size >= self.size:
                raise ValueError(
                    f"{self.lookup.size - 1} looked-up tokens leave no room in a tree of {self.size} nodes; "
                    "raise --tree_size"
                )

    def with_tree(self, tree: DynamicTree | StaticTree) -> TreeDrafter:
        """A preset with another, smaller tree."""
        other = copy(self)
        other._take(tree.on(self.device))
        return other

    @property
    def name(self) -> str:
        return self.tree.name

    def root_output(self, state: Any, root: Root) -> tuple[Tensor, Tensor]:
        """The root's output, [B, 1, F], and the first scratch slot, which is the position of its children: [B]."""
        raise NotImplementedError

    def forward_nodes(
        self, state: Any, level: Level, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        """Run over the nodes of one level. Writes: the cache at `window.slots`.

        out: [B, R', F], outputs of the level before, `level.parent` of which is each node's parent
        positions: [B, R] int64
        Returns: their outputs, [B, R, F].
        """
        raise NotImplementedError

    def logits(self, out: Tensor) -> Tensor:
        """Scores of the token after each output, of the tokens in `vocab`, here and below V of them: [B, R, V] fp32."""
        raise NotImplementedError

    def resolved_options(self) -> dict[str, Any]:
        tree, dynamic = self.tree, isinstance(self.tree, DynamicTree)
        choice = {"tree": "dynamic" if dynamic else "chain" if tree.width == 1 else "static"}
        shape = (
            {"tree_topk": tree.topk, "tree_size": tree.size}
            if dynamic
            else {"tree_paths": tree.paths}
        )
        shape |= {} if self.vocab.ids is None else {"draft_vocab": self.vocab.kept}
        looked_up = self.lookup.resolved_options() if self.lookup else {}
        return choice | shape | looked_up | {
            "tree_depth": tree.depth, "children": self.children, "sharpness": self.sharpness
        }  # fmt: skip

    def propose(self, state: Any, root: Root) -> DraftTree:
        """Propose a tree. Writes: scratch slots of the cache."""
        out, free = self.root_output(state, root)

        def children(out: Tensor, level: int, k: int) -> tuple[Children | Scores, Shared | None]:
            if self.children == "sampled":
                return self._sampled(out, level, k, root), None
            return self._scores(out, level, root)

        def run(level: Level, out: Tensor) -> Tensor:
            slots, _, positions = place_rows(
                free, level.depth - 1, level.tokens.shape[1], level.slot
            )
            return self.forward_nodes(state, level, out, positions, Window(slots, free, level.seen))

        graft = (
            Graft(self.lookup.tokens, lambda pool: self.lookup.add(pool, root.text))
            if self.lookup
            else None
        )
        tree, places = grow(self.tree, root.text, out, children, run, graft)
        return replace_fields(tree, slots=places) if self.keeps_rows else tree

    def _scores(self, out: Tensor, level: int, root: Root) -> tuple[Scores, Shared | None]:
        """What the children are the best by. out: [B, R, F]."""
        z = self.logits(out)  # [B, R, V]
        if self.children != "noise":
            return Scores(z, self.sharpness, self.vocab.ids), None
        scores = Scores(sampling.process(z, self.rule), self.sharpness, self.vocab.ids)
        return scores, Shared(root.noise, level, self.rule.temperature)

    def _sampled(self, out: Tensor, level: int, k: int, root: Root) -> Children:
        """Children drawn without replacement from q. out: [B, R, F]."""
        first = (
            1 + sum(self.tree.widths[: level - 1]) if level else 0
        )  # rows of noise that earlier levels took
        log_q = sampling.process(self.logits(out), self.rule).log_softmax(-1)  # [B, R, V]
        fresh = self.vocab.columns(root.fresh[:, first : first + out.shape[1]])
        columns = (log_q + fresh).topk(k, dim=-1).indices
        return Children(
            self.vocab.tokens(columns), log_q.gather(2, columns), self.vocab.spread(log_q.exp())
        )
