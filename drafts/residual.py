"""`accept=residual`: the papers' acceptance rule, exact in distribution and not token by token.

A drafted token x is accepted with probability min(1, p(x) / q(x)). After a rejection p becomes
norm(max(0, p - q)). On a chain this is standard speculative sampling.
Source: EAGLE-1 (arXiv 2401.15077), Algorithm 1.

The rule takes its uniforms as a tensor, so that recorded runs can be replayed. The uniforms and the
noise of the bonus token belong to the request (sampling.py): the same seed and tree give the same
tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from decode import DecodeState
from draft_tree import MAX_NODES, Accepted, Children, DraftTree, DynamicTree
from drafters import DraftInputs, DraftVocab, TreeDrafter
from drafts.noise import ACCEPT, DRAFT, uniforms
from reference import compaction, path_to
from run.clock import TimedCycle
from runtime import replace_fields


class ResidualCycle(TimedCycle):
    """A cycle that accepts by the papers' rule."""

    def accept_path(
        self, state: DecodeState, tree: DraftTree, noise: Tensor, features: Tensor
    ) -> tuple[Accepted, None]:
        """Accept a path, as `Cycle.accept_path`. noise: [B, D+1, V]"""
        depth = self.drafter.depth
        rule = state.sampling.needed(self.mode)
        p = rule.cut(self.target.logits(features), self.backend).softmax(-1)
        draws = state.draws[:, None]  # [B, 1]
        uniform = uniforms(state.sampling, draws, tree.tokens.shape[1], ACCEPT)[:, 0]
        node, rest = residual_accept(tree, p, uniform, depth, self.drafter.width)
        path, length = path_to(tree, node, depth)
        last = length[:, None]  # [B, 1]
        at_end = noise.gather(1, last[:, :, None].expand(-1, 1, noise.shape[2]))[:, 0]  # [B, V]
        bonus = (rest.log() + at_end).argmax(-1, keepdim=True)  # [B, 1]
        emitted = tree.tokens.gather(1, path).roll(-1, dims=1).scatter(1, last, bonus)  # [B, D+1]
        return Accepted(path, length, emitted, compaction(path, length)), None


# ---------------------------------------------------------------------------------------- children


class SampledChildren:
    """Draws the children of every node without replacement from q, with noise of its own.

    A dynamic tree that pruned them by their own q would be lossy.
    """

    def __init__(self, drafter: TreeDrafter):
        """Plan the draws for the tree of a drafter. Raises: ValueError for a dynamic tree."""
        tree = drafter.tree
        if isinstance(tree, DynamicTree):
            raise ValueError(
                "the children of a dynamic tree cannot be sampled: dropping some by their "
                "probability would change the output; use a static tree"
            )
        self.rows = [1, *tree.widths]  # nodes of each level that have children

    def draw(self, drafter: TreeDrafter, out: Tensor, level: int, inputs: DraftInputs) -> Children:
        """Draw the children of a level's nodes; `extra` is q. out: [B, R, F]."""
        rows = self.rows[level]
        first = sum(self.rows[:level])  # rows of noise of earlier levels
        z = drafter.logits(out, level).expand(-1, rows, -1)  # [B, R, Vd]
        log_q = inputs.sampling.cut(z, drafter.backend).log_softmax(-1)
        own = inputs.draws * MAX_NODES + first  # rows of noise that nothing else reads
        size = drafter.vocab.size
        noise = (inputs.sampling, own, rows, size, DRAFT, drafter.backend)
        fresh = sampling.gumbel(*noise)
        fresh = drafter.vocab.columns(fresh)  # [B, R, Vd]
        columns = (log_q + fresh).topk(drafter.tree.plan[level].k, dim=-1).indices
        tokens = drafter.vocab.tokens(columns)
        return Children(tokens, log_q.gather(2, columns), spread(drafter.vocab, log_q.exp()))

    def attach(self, tree: DraftTree, scored: list[Any]) -> DraftTree:
        """Add the distributions that children were drawn from: those of the nodes that ran.

        scored: of each level, from `draw`, or scores where all sequences are greedy
        Returns: a tree whose `extra` is [B, R, V]; `ran_index` has the row of each node.
        """
        if not isinstance(scored[0], Children):
            return tree
        return replace_fields(tree, extra=torch.cat([children.extra for children in scored], 1))


def spread(vocab: DraftVocab, q: Tensor) -> Tensor:
    """Spread probabilities over all tokens, 0 for those not drafted: [..., Vd] -> [..., V]."""
    if vocab.ids is None:
        return q
    return q.new_zeros(*q.shape[:-1], vocab.size).index_copy(-1, vocab.ids, q)


def sample_children(drafter: TreeDrafter) -> TreeDrafter:
    """Let a drafter draw its children from q. Raises: ValueError for a dynamic tree.

    Writes: the drafter.
    """
    drafter.children = "sampled"
    drafter.sampler = SampledChildren(drafter)
    return drafter


# -------------------------------------------------------------------------------------- acceptance


class Residual(NamedTuple):
    """Outcome of the residual rule."""

    node: Tensor  # [B] int64, the deepest accepted node
    p: Tensor  # [B, V] fp32, distribution of the token after it


def residual_accept(
    tree: DraftTree, p: Tensor, uniform: Tensor, depth: int, width: int
) -> Residual:
    """Apply multi-round rejection sampling down the tree.

    The children of a node are tried in node order: accept with min(1, p/q). After a rejection p
    becomes norm(max(0, p - q)), and q, a row of `tree.extra`, loses the rejected token. Without q
    children are distinct and certain (q = 1): accept with p, and a rejected token leaves p. Each
    child tried uses one uniform.

    p: [B, N, V] fp32, the target's distribution after each node
    uniform: [B, U] fp32, consumed in order; U is above the number of children tried
    depth, width: bounds on the depth of the tree and on the children of a node
    Returns: the last node of the walk and the distribution of the next token.
    Source: EAGLE-1 (arXiv 2401.15077) Algorithm 1; SpecInfer (arXiv 2305.09781).
    """
    numbers = torch.arange(tree.tokens.shape[1], device=p.device)  # [N]
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & (numbers > 0)  # [B, N, N]
    earlier = siblings & (numbers < numbers[:, None])  # [B, N, N]
    rank = earlier.sum(-1)  # [B, N], place among the parent's children
    node = torch.zeros(p.shape[0], dtype=torch.long, device=p.device)  # [B]
    used = torch.zeros_like(node)  # [B], uniforms
    # [B], False once a node has rejected all its children
    walking = torch.ones_like(node, dtype=torch.bool)
    current = p[:, 0]  # [B, V]
    for _ in range(depth):
        parent = node
        moved = torch.zeros_like(node, dtype=torch.bool)
        proposal = None
        if tree.extra is not None:
            proposal = _at(tree.extra, _pick(tree.ran_index, parent[:, None]))  # [B, V]
        for r in range(width):
            of_parent = (tree.parents == parent[:, None]) & (rank == r)  # [B, N]
            child_here = of_parent & (numbers > 0) & tree.valid  # [B, N]
            child = child_here.int().argmax(-1, keepdim=True)  # [B, 1]
            trying = child_here.any(-1) & walking & ~moved
            token = tree.tokens.gather(1, child)  # [B, 1]
            p_x = _pick(current, token)
            q_x = torch.ones_like(p_x) if proposal is None else _pick(proposal, token)
            u = _pick(uniform, used[:, None])
            used = used + trying
            taken = trying & (q_x > 0) & (u * q_x <= p_x)
            rejected = (trying & ~taken & (q_x > 0))[:, None]
            current = torch.where(rejected, _residual(current, proposal, token), current)
            if proposal is not None:  # a tried token leaves the proposal of its later siblings
                remaining = _normalise(proposal.scatter(1, token, 0.0))
                proposal = torch.where(trying[:, None], remaining, proposal)
            node = torch.where(taken, child.squeeze(1), node)
            moved = moved | taken
        current = torch.where(moved[:, None], _at(p, node), current)
        walking = moved
    return Residual(node, current)


def _pick(x: Tensor, column: Tensor) -> Tensor:  # [B, C], [B, 1] -> [B]
    return x.gather(1, column).squeeze(1)


def _at(x: Tensor, node: Tensor) -> Tensor:  # [B, N, V], [B] -> [B, V]
    return x.gather(1, node[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


def _residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """Return norm(max(0, p - q)), where q = None puts all mass on `token`.

    p, q: [B, V]
    token: [B, 1]
    """
    rest = p.scatter(1, token, 0.0) if q is None else (p - q).clamp(min=0)
    # p = q leaves no mass; only rounding can reject then, and p is as good
    return torch.where(rest.sum(-1, keepdim=True) > 0, _normalise(rest), p)


def _normalise(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
