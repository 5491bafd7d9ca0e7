"""Growing a draft tree level by level, with anything that can score the token after every node.

How it works:
1. `Grower.begin` gives the root's output and where scratch begins in the drafter's cache.
2. Level by level, `step` runs the drafter over the nodes that are to have children, in scratch slots above the rows
   that were confirmed; `logits` scores the tokens after them.
3. A node's children are the top-k of its scores. When sampling, the scores carry the noise by which the target
   itself will choose at that draw, so the likeliest child is the one that the noise favours.
   A child adds log softmax(c * scores) to its path's value; c, the sharpness, is fitted per head.
4. Static trees keep the children that their shape names; dynamic ones expand the best nodes and re-rank all.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858).
Trade-off: the levels are unrolled into one graph per tree, which compiles longer and launches once.
Not here: what scores a token (eagle_draft.py, model_draft.py), and the tensor steps themselves (draft_tree.py).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import draft_tree
import kernels
import sampling
from autosize import TreeShape
from config import GenerateConfig
from draft_tree import DraftTree, StaticTree
from draft_vocab import DraftVocab
from drafters import Drafter, Root, RootOnly
from model import Transformer, Window
from ngram_draft import Ngram, graft

# What `--tree auto` chooses from, besides the largest tree and none. CUDA pads to 16, 32 or 64 nodes, a CPU to none.
# Each is nested in the next, so that a larger one tells what a smaller one would have brought.
AUTO_SHAPES = (TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(5, 4, 16), TreeShape(6, 8, 32))
HOLD = 256  # cycles without a tree that a drafter may sit out before it has to take them in


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the drafter is confident, then re-ranked. The papers' size is the default."""

    depth: int = 6  # D, drafted levels
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    expand_by: str = "value"  # or "confidence" (ablation)
    rerank: bool = True  # False keeps the first levels whole (ablation)
    graft: Ngram | None = None  # continuations looked up in the text take the place of the worst nodes

    def __post_init__(self):
        pool = draft_tree.pool_size(self.depth, self.topk)
        if self.size - 1 > pool:
            raise ValueError(
                f"a tree of {self.size} nodes needs {self.size - 1} candidates; depth {self.depth} and top-k "
                f"{self.topk} give {pool} (K + (D-1) K^2); lower --tree_size or raise --tree_topk"
            )
        if self.graft and self.graft.size >= self.size:
            raise ValueError(
                f"{self.graft.size - 1} looked-up tokens leave no room in a tree of {self.size} nodes; "
                "lower --ngram_tokens or raise --tree_size"
            )


class Grower(Drafter):
    """Grows static or dynamic trees. Subclasses give `init`, `extend`, and the three methods below."""

    keeps_rows = False  # whether rows run while drafting stay in the cache when they are accepted: needs their slots
    smaller: tuple[Grower, ...] = ()  # presets with smaller trees

    def __init__(
        self,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        rule: sampling.Sampling,
        children: str = "noise",
        sharpness: float = 1.0,
        vocab: DraftVocab | None = None,
    ):
        """children: how they are picked when sampling. "topk": top-k of the drafter's logits; "noise": top-k of
        logits + T * the shared noise; "sampled": drawn without replacement from q with noise of their own.
        vocab: the tokens that it scores; None: the target's
        """
        if children == "sampled" and isinstance(tree, DynamicTree):
            raise ValueError("children of a dynamic tree cannot be sampled: pruning them by their own q is lossy")
        self.rule, self.sharpness = rule, sharpness
        self.children = children if rule.temperature > 0 else "topk"
        self.vocab = vocab or DraftVocab(target.config.vocab_size)
        self.device = target.embedding.weight.device
        self._plant(tree)
        if self.width > self.vocab.kept:
            raise ValueError(
                f"a node cannot have {self.width} ranked children of {self.vocab.kept} tokens; lower the rank "
                "(--tree_topk) or raise --draft_vocab"
            )

    def _plant(self, tree: DynamicTree | StaticTree) -> None:
        """Take on a tree."""
        self.tree, self.depth, self.size = tree, tree.depth, tree.size
        self.width = tree.topk if isinstance(tree, DynamicTree) else max(map(tree.ranks, range(tree.depth)))
        if isinstance(tree, StaticTree):
            self.plan = StaticPlan.of(tree, self.device)
            self.scratch = len(self.plan.inner) - 1  # slots that a draft needs above the root's row
        else:
            self.scratch = (tree.depth - 1) * tree.topk
            if tree.graft:
                self.depth, self.width = max(tree.depth, tree.graft.tokens), tree.topk + tree.graft.branches
        self.fresh_rows = len(self.plan.inner) if self.children == "sampled" else 0

    def sized_by_host(self) -> Grower:
        """The same with presets: its tree is the largest, none the smallest, and the host chooses."""
        largest = copy(self)
        largest.smaller = tuple(map(self._with, smaller_trees(self.tree)))
        largest.sized, largest.hold = True, HOLD
        return largest

    def _with(self, tree: DynamicTree | StaticTree) -> Grower:
        other = copy(self)
        other._plant(tree)
        return other

    @property
    def presets(self) -> tuple[Drafter, ...]:
        return (self.resting(), *self.smaller, self) if self.sized else (self,)

    def resting(self) -> Drafter:
        """A preset over the same state that proposes nothing, and puts off what it is handed."""
        return RootOnly()

    @property
    def shape(self) -> TreeShape | None:
        tree = self.tree
        if isinstance(tree, StaticTree):
            return TreeShape(tree.depth, 1, tree.size) if self.width == 1 else None
        nests = tree.expand_by == "value" and tree.rerank and tree.graft is None
        return TreeShape(tree.depth, tree.topk, tree.size) if nests else None

    @property
    def name(self) -> str:
        if isinstance(self.tree, StaticTree):
            return f"chain {self.depth}" if self.width == 1 else f"static {self.size}"
        return f"dynamic {self.tree.depth}/{self.tree.topk}/{self.tree.size}"

    def begin(self, state: Any, root: Root) -> tuple[Tensor, Tensor]:
        """The root's output, [B, 1, F], and the first scratch slot, which is the position of its children: [B]."""
        raise NotImplementedError

    def step(self, state: Any, tokens: Tensor, out: Tensor, positions: Tensor, window: Window) -> Tensor:
        """Run over nodes of one level. Writes: the cache at `window.slots`.

        tokens, positions: [B, R] int64; out: [B, R, F], outputs of their parents
        Returns: their outputs, [B, R, F].
        """
        raise NotImplementedError

    def logits(self, out: Tensor) -> Tensor:
        """Scores of the token after each output, of the tokens in `vocab`, here and below V of them: [B, R, V] fp32."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        tree, dynamic = self.tree, isinstance(self.tree, DynamicTree)
        shape = {"tree_topk": tree.topk, "tree_size": tree.size} if dynamic else {"tree_paths": tree.paths}
        name = "dynamic" if dynamic else "chain" if self.width == 1 else "static"
        drafted = {"children": self.children, "sharpness": self.sharpness}
        looked_up = tree.graft.facts() if dynamic and tree.graft else {}
        choice = {"tree": "auto", "trees": [preset.name for preset in self.presets]} if self.sized else {"tree": name}
        return choice | {"tree_depth": tree.depth} | shape | drafted | looked_up

    def draft(self, state: Any, root: Root) -> DraftTree:
        """Propose a tree. Writes: scratch slots of the cache."""
        root = root._replace(noise=self.vocab.columns(root.noise), fresh=self.vocab.columns(root.fresh))
        return self._dynamic(state, root) if isinstance(self.tree, DynamicTree) else self._static(state, root)

    def _scores(self, out: Tensor, noise: Tensor | None) -> Tensor:
        """Scores of every token after each node, in logit units. out: [B, R, F]; noise: [B, V] or None."""
        z = self.logits(out)  # [B, R, V]
        if self.children != "noise" or noise is None:
            return z
        return self.rule.temperature * (sampling.process(z, self.rule) + noise[:, None])

    def _children(self, out: Tensor, noise: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """The k best children of each node: tokens and log softmax(c * score), both [B, R, k], best first."""
        scores = self.sharpness * self._scores(out, noise)
        best, columns, total = kernels.topk_logsumexp(scores, k)
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return self.vocab.tokens(columns), (best - total).clamp(max=0)

    def _level(self, state: Any, free: Tensor, tokens: Tensor, out: Tensor, level: int, seen: Seen) -> Tensor:
        """Run the drafter over the drafted nodes of one level.

        free: [B]; tokens: [B, R]; out: [B, R, F], outputs of their parents; level: 1 for the root's children
        """
        slots = free[:, None] + seen.slot + torch.arange(tokens.shape[1], device=tokens.device)  # [B, R]
        positions = (free + level - 1)[:, None].expand_as(tokens)
        return self.step(state, tokens, out, positions, Window(slots, free, seen.mask))

    def _dynamic(self, state: Any, root: Root) -> DraftTree:
        tree, K = self.tree, self.tree.topk
        B, device = root.token.shape[0], root.token.device
        noise = root.noise.unbind(1) if root.noise is not None else [None] * tree.depth
        first, free = self.begin(state, root)
        tokens, scores = self._children(first, noise[0], K)  # [B, 1, K]
        pool, frontier = draft_tree.first_level(tokens[:, 0], scores[:, 0])
        out = first.expand(-1, K, -1)  # [B, K, F], what the frontier's parents gave
        lineage = torch.zeros(B, K, (tree.depth - 1) * K, dtype=torch.bool, device=device)  # [B, K, W]
        ran = []  # per level, [B, K] flat indices of the candidates that were run
        for level in range(1, tree.depth):
            slot = (level - 1) * K
            self_mask = F.pad(torch.eye(K, dtype=torch.bool, device=device), (slot, lineage.shape[2] - slot - K))
            lineage = lineage | self_mask  # a node sees its ancestors and itself
            ran.append(frontier.index)
            out = self._level(state, free, frontier.tokens, out, level, Seen(slot, lineage))
            tokens, scores = self._children(out, noise[level], K)  # [B, K, K]
            pool, frontier = draft_tree.expand(pool, frontier, tokens, scores, tree.expand_by)
            rank = frontier.parent_rank[:, :, None]
            out = out.gather(1, rank.expand(-1, -1, out.shape[2]))
            lineage = lineage.gather(1, rank.expand(-1, -1, lineage.shape[2]))
        if tree.graft:
            pool = graft(pool, root.text, tree.graft)
        chosen = draft_tree.best_nodes(pool, tree.size, tree.rerank)
        slots = _slots(pool, ran, chosen) if self.keeps_rows else None
        return draft_tree.tree_of(root.token, pool, chosen, self.depth)._replace(slots=slots)

    def _static(self, state: Any, root: Root) -> DraftTree:
        B, plan = root.token.shape[0], self.plan
        noise = root.noise.unbind(1) if root.noise is not None else [None] * self.depth
        tokens, scores, q = [root.token[:, None]], [torch.zeros(B, 1, device=root.token.device)], []
        (out, free), slot, row = self.begin(state, root), 0, 0
        for depth, level in enumerate(plan.levels):
            if depth > 0:
                seen, nodes = Seen(slot, level.mask.expand(B, -1, -1)), torch.cat(tokens, 1)[:, level.nodes]
                out = self._level(state, free, nodes, out[:, level.parent_rows], depth, seen)  # [B, R, F]
                slot += len(level.nodes)
            if self.children == "sampled":
                log_q = sampling.process(self.logits(out), self.rule).log_softmax(-1)  # [B, R, V]
                q.append(self.vocab.spread(log_q.exp()))
                columns = (log_q + root.fresh[:, row : row + len(level.nodes)]).topk(level.k, dim=-1).indices
                picked, best = self.vocab.tokens(columns), log_q.gather(2, columns)  # [B, R, k]
                row += len(level.nodes)
            else:
                picked, best = self._children(out, noise[depth], level.k)  # [B, R, k]
            tokens.append(picked.flatten(1)[:, level.picks])  # [B, children of this level]
            scores.append(best.flatten(1)[:, level.picks])
        every_q = None
        if q:  # leaves have no children, hence no q
            every_q = q[0].new_zeros(B, self.size, q[0].shape[2]).index_copy(1, plan.inner, torch.cat(q, 1))
        parents, score = plan.parents.expand(B, -1), torch.cat(scores, 1)  # [B, N]
        tree = draft_tree.build_tree(torch.cat(tokens, 1), parents, score > float("-inf"), self.depth, every_q)
        values = torch.where(tree.mask, score[:, None], 0).sum(-1)  # [B, N], summed along each path
        return tree._replace(values=values, slots=plan.slots.expand(B, -1) if self.keeps_rows else None)


class Seen(NamedTuple):
    """Where a level lies in scratch, and what it sees there."""

    slot: int  # first scratch slot of the level
    mask: Tensor  # [B, R, W] bool, scratch slots seen


def _slots(pool: draft_tree.Candidates, ran: list[Tensor], chosen: Tensor) -> Tensor:
    """`DraftTree.slots` of a dynamic tree: level by level, the frontiers lie behind the root's row."""
    root = torch.zeros_like(chosen[:, :1])
    if not ran:
        return F.pad(root, (0, chosen.shape[1]))  # [B, N]
    index = torch.cat(ran, 1)  # [B, (D-1) K]
    places = torch.arange(1, index.shape[1] + 1, device=index.device).expand_as(index)
    return torch.cat((root, torch.zeros_like(pool.tokens).scatter(1, index, places).gather(1, chosen)), 1)


class StaticLevel(NamedTuple):
    """One pass of a static draft, over the R nodes of a depth that have children."""

    nodes: Tensor  # [R] int64, node numbers
    parent_rows: Tensor  # [R] int64, row of each node's parent in the pass before
    mask: Tensor  # [1, R, W] bool, which inner nodes (scratch slots) each one sees
    picks: Tensor  # [C] int64, the children that the tree keeps, in node order, as row * k + rank
    k: int  # ranked children needed of each row


class StaticPlan(NamedTuple):
    """Index tensors of a static tree, made once."""

    levels: list[StaticLevel]
    inner: Tensor  # [sum R] int64, nodes with children
    parents: Tensor  # [1, N] int64
    slots: Tensor  # [1, N] int64, `DraftTree.slots`: inner nodes lie in a row behind the root's

    @staticmethod
    def of(tree: StaticTree, device: torch.device) -> StaticPlan:
        inner = [node for level in tree.inner for node in level]
        lineage = {0: {0}}
        for node in range(1, tree.size):
            lineage[node] = lineage[tree.parents[node]] | {node}
        levels = []
        for depth, nodes in enumerate(tree.inner):
            above = tree.inner[depth - 1] if depth else []
            k = tree.ranks(depth)
            levels.append(
                StaticLevel(
                    nodes=torch.tensor(nodes, device=device),
                    parent_rows=torch.tensor([above.index(tree.parents[n]) for n in nodes if depth], device=device),
                    mask=torch.tensor([[[a in lineage[n] for a in inner[1:]] for n in nodes]], device=device),
                    picks=torch.tensor([row * k + rank for _, row, rank in tree.children(depth)], device=device),
                    k=k,
                )
            )
        slots = [[inner.index(node) if node in inner else 0 for node in range(tree.size)]]
        return StaticPlan(levels, *(torch.tensor(x, device=device) for x in (inner, [tree.parents], slots)))


def smaller_trees(largest: DynamicTree) -> list[DynamicTree | StaticTree]:
    """The trees that `--tree auto` chooses from below the largest, by size."""
    fit = [s for s in AUTO_SHAPES if s.depth <= largest.depth and s.topk <= largest.topk and s.size < largest.size]
    return [StaticTree.chain(s.depth) if s.topk == 1 else DynamicTree(*s) for s in fit]


def tree_from(config: GenerateConfig) -> DynamicTree | StaticTree:
    """The tree that the options ask for; with `--tree auto` the largest."""
    if config.tree_shape == "chain":
        return StaticTree.chain(config.tree_depth)
    if config.tree_shape == "static":
        return StaticTree.from_file(Path(config.tree_file)) if config.tree_file else StaticTree(draft_tree.EAGLE1_PATHS)
    return DynamicTree(
        config.tree_depth, config.tree_topk, config.tree_size, config.expand_by, not config.no_rerank,
        Ngram.from_config(config) if config.draft.endswith("+ngram") else None,
    )  # fmt: skip


def children_from(config: GenerateConfig, tree: DynamicTree | StaticTree) -> str:
    """How children are picked: what the options say, else what the acceptance rule can take."""
    residual = "topk" if isinstance(tree, DynamicTree) else "sampled"
    return config.children or (residual if config.accept == "residual" else "noise")
