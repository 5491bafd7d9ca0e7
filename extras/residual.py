"""`--accept residual`: the papers' own rule of acceptance, exact in distribution instead of token by token.

A drafted token x is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(0, p - q)).
Source: EAGLE-1 (arXiv 2401.15077), Algorithm 1; on a chain it is standard speculative sampling.

The rule takes its uniforms as a tensor, so that recorded runs can be replayed. They and the noise of the bonus token
are the request's own (sampling.py): the same seed and tree give the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import sampling
from decode import Cycle, DecodeState
from draft_tree import Accepted, DraftTree, compaction, path_to


def accept_residual(
    tree: DraftTree, logits: Tensor, noise: Tensor, state: DecodeState, cycle: Cycle
) -> Accepted:
    """Accept by the papers' rule; `Engine.accept_rule`. logits: [B, N, V]; noise: [B, D+1, V]."""
    p = sampling.process(logits, cycle.rule).softmax(-1)  # [B, N, V]
    uniform = sampling.uniforms(
        state.key, state.draws[:, None], tree.tokens.shape[1], sampling.ACCEPT
    )[:, 0]
    node, rest = residual_accept(tree, p, uniform, cycle.drafter.depth, cycle.drafter.width)
    path, length = path_to(tree, node, cycle.drafter.depth)
    last = length[:, None]  # [B, 1]
    at_end = noise.gather(1, last[:, :, None].expand(-1, 1, noise.shape[2])).squeeze(1)  # [B, V]
    bonus = (rest.log() + at_end).argmax(-1, keepdim=True)  # [B, 1]
    emitted = tree.tokens.gather(1, path).roll(-1, dims=1).scatter(1, last, bonus)  # [B, D+1]
    return Accepted(path, length, emitted, compaction(path, length))


class Residual(NamedTuple):
    """Outcome of the residual rule."""

    node: Tensor  # [B] int64, the deepest accepted node
    p: Tensor  # [B, V] fp32, distribution of the token after it


def residual_accept(
    tree: DraftTree, p: Tensor, uniform: Tensor, depth: int, width: int
) -> Residual:
    """Multi-round rejection sampling down the tree.

    At each node its children are tried in node order: accept with min(1, p/q); after a rejection p becomes
    norm(max(0, p - q)) and q loses the rejected token. Where `tree.q` is None the children are distinct and
    certain (q = 1): accept with p, and a rejected token leaves p. One uniform is used per child tried.

    p: [B, N, V] fp32, the target's distribution after each node
    uniform: [B, U] fp32, consumed in order; U more than the number of children tried
    depth, width: bounds on the depth of the tree and on the children of a node
    Returns: where the walk ended and the distribution of the next token.
    Source: EAGLE-1 (arXiv 2401.15077) Algorithm 1; SpecInfer (arXiv 2305.09781).
    """
    numbers = torch.arange(tree.tokens.shape[1], device=p.device)  # [N]
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & (numbers > 0)  # [B, N, N]
    rank = (siblings & (numbers < numbers[:, None])).sum(
        -1
    )  # [B, N], place among the parent's children
    node = torch.zeros(p.shape[0], dtype=torch.long, device=p.device)  # [B]
    used = torch.zeros_like(node)
    walking = torch.ones_like(
        node, dtype=torch.bool
    )  # [B], a node that rejected all its children ends the walk
    current = p[:, 0]  # [B, V]
    for _ in range(depth):
        parent, moved = node, torch.zeros_like(node, dtype=torch.bool)
        proposal = _at(tree.q, parent) if tree.q is not None else None  # [B, V]
        for r in range(width):
            child_here = (
                (tree.parents == parent[:, None]) & (rank == r) & (numbers > 0) & tree.valid
            )  # [B, N]
            child = child_here.int().argmax(-1, keepdim=True)  # [B, 1]
            trying = child_here.any(-1) & walking & ~moved
            token = tree.tokens.gather(1, child)  # [B, 1]
            p_x = current.gather(1, token).squeeze(1)
            q_x = (
                proposal.gather(1, token).squeeze(1)
                if proposal is not None
                else torch.ones_like(p_x)
            )
            u = uniform.gather(1, used[:, None]).squeeze(1)
            used = used + trying
            taken = trying & (q_x > 0) & (u * q_x <= p_x)
            rejected = (trying & ~taken & (q_x > 0))[:, None]
            current = torch.where(rejected, _residual(current, proposal, token), current)
            if proposal is not None:  # a tried token leaves the proposal of its later siblings
                proposal = torch.where(
                    trying[:, None], _normalise(proposal.scatter(1, token, 0.0)), proposal
                )
            node = torch.where(taken, child.squeeze(1), node)
            moved = moved | taken
        current = torch.where(moved[:, None], _at(p, node), current)
        walking = moved
    return Residual(node, current)


def _at(x: Tensor, node: Tensor) -> Tensor:  # [B, N, V], [B] -> [B, V]
    return x.gather(1, node[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


def _residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """norm(max(0, p - q)), where q = None is all mass on `token`. p, q: [B, V]; token: [B, 1]."""
    rest = p.scatter(1, token, 0.0) if q is None else (p - q).clamp(min=0)
    # p = q leaves nothing; only rounding can reject then, and p is as good
    return torch.where(rest.sum(-1, keepdim=True) > 0, _normalise(rest), p)


def _normalise(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
