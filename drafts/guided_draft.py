"""Draft trees under grammars: only allowed tokens, and forced ones whole.

1. While a drafter grows a tree, the scores of every node's children are masked (`GrammarWalk`).
   Where one token alone is allowed, the child is that token, also if the drafter has no score for
   it.
2. `Guided` cuts any drafter's tree to allowed tokens, and appends forced ones, which are as likely
   as their parents. Below the root a whole run of them is appended, up to 64 nodes: it costs no
   target pass of its own. Vanilla decoding appends none.
3. Each node keeps the mask that the target chooses its token under (`DraftTree.extra`).

Grammar states are those of grammar.py. Trade-off: nodes are chosen on the host, from the drafter's
values, and a tree has as many nodes as are allowed, so that shapes vary from cycle to cycle.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_tree import MAX_NODES, DraftTree, Frontier
from drafters import Drafter, DrafterUpdate, DraftInputs, DraftVocab, RootOnly
from drafts.shaping import ShapedCycle
from reference import build_tree
from run.engine import Engine
from runtime import replace_fields

# of drafts.grammar.GrammarState; None: any token may follow, or no node does
GrammarStates = list[Any]


def masks(places: list[GrammarStates], vocab: int, device: torch.device) -> Tensor:
    """Return the tokens that may follow each of [B, R] places, [B, R, V] bool."""
    return torch.from_numpy(_unpacked(places, vocab)).view(torch.bool).to(device)


def _unpacked(places: list[GrammarStates], vocab: int) -> np.ndarray:
    """Return 1 for the tokens that may follow each of [B, R] places, [B, R, V] uint8.

    A place that none may follow has them all: no choice there is taken.
    """
    bits = np.full((len(places), len(places[0]), (vocab + 31) // 32), 2**32 - 1, np.uint32)
    for row, own in zip(bits, places):
        for node, place in enumerate(own):
            if place is not None and place.bits.any():
                row[node] = place.bits
    return np.unpackbits(bits.view(np.uint8), axis=-1, count=vocab, bitorder="little")


class GrammarWalk:
    """The places of the nodes that a drafter has just run, level by level."""

    def __init__(self, roots: GrammarStates):
        self.places = [[root] for root in roots]

    def descend(self, frontier: Frontier) -> Frontier:
        """Go on to the next level. Returns: the frontier, with its forced tokens."""
        tokens = frontier.tokens.tolist()
        for b, above in enumerate(frontier.parent.tolist()):
            parents = [self.places[b][node] for node in above]
            self.places[b] = [None] * len(parents)
            for node, parent in enumerate(parents):
                if parent is not None:
                    if parent.only is not None:
                        tokens[b][node] = parent.only
                    self.places[b][node] = parent.after(tokens[b][node])
        return replace_fields(frontier, tokens=frontier.tokens.new_tensor(tokens))

    def mask(self, z: Tensor, vocab: DraftVocab) -> Tensor:
        """Mask the scores of the level's children, [B, R, Vd].

        Of a forced token's row the first column is left, whatever its token.
        """
        allowed = _unpacked(self.places, vocab.size)
        if vocab.ids is not None:
            allowed = allowed[..., vocab.ids.cpu().numpy()]  # [B, R, Vd]
        for b, own in enumerate(self.places):
            for node, place in enumerate(own):
                if place is not None and place.only is not None:
                    allowed[b, node] = 0
                    allowed[b, node, 0] = 1
        allowed[~allowed.any(-1)] = 1  # none is in the draft vocabulary
        return torch.where(torch.from_numpy(allowed).bool().to(z.device), z, float("-inf"))


class Node(NamedTuple):
    """A node of a tree under a grammar."""

    token: int
    parent: int  # its number
    depth: int
    value: float  # of its path
    drafted: list[int]  # the drafter's nodes that it stands for
    place: Any


class Guided(Drafter):
    """A preset of a drafter whose trees keep to grammars."""

    def __init__(self, whole: Drafter, drafter: Drafter, vocab: int):
        """Wrap a drafter.

        whole: the engine's drafter, of which `drafter` is a preset
        vocab: V
        """
        self.drafter = drafter
        self.backend = drafter.backend
        self.vocab = vocab
        # a draft model must have run the nodes that it keeps; vanilla decoding stays what it is
        self.keeps_nodes = getattr(whole, "keeps_nodes", False)
        self.appends = not self.keeps_nodes and not isinstance(whole, RootOnly)
        self.width = max(drafter.width, 2)  # accepted nodes may lie apart

    def follow(self, guides: Sequence[Any], live: Sequence[bool]) -> None:
        """Keep to the grammars of the sequences of the next cycle.

        guides: `drafts.grammar.TextGuide`, None without one
        Writes: the places of the sequences, and a tree's size, which has room for forced tokens.
        """
        self.roots = [guide.place if guide else None for guide in guides]
        self.live = live
        run = max(map(_forced, self.roots)) if self.appends else 0
        self.depth = max(self.drafter.depth, run)
        self.size = max(self.drafter.size, run + 1)

    def extend(self, state: Any, update: DrafterUpdate) -> Any:
        return self.drafter.extend(state, update)

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        """Propose a tree, at most `size` nodes. Writes: scratch slots of the drafter's cache."""
        tree = self.drafter.propose(state, replace_fields(inputs, guide=GrammarWalk(self.roots)))
        values = torch.zeros(tree.tokens.shape) if tree.values is None else tree.values
        lists = [part.tolist() for part in (tree.tokens, tree.parents, tree.valid, values)]
        rows = [self._choose(b, *row) for b, row in enumerate(zip(*lists))]
        longest = max(map(len, rows))
        valid = [[node < len(row) for node in range(longest)] for row in rows]
        padding = Node(0, 0, 1, 0.0, [0], None)
        rows = [row + [padding] * (longest - len(row)) for row in rows]

        def column(of: Callable[[Node], Any], like: Tensor) -> Tensor:  # [B, N]
            return like.new_tensor([[of(node) for node in row] for row in rows])

        tokens = column(lambda node: node.token, tree.tokens)
        parents = column(lambda node: node.parent, tree.tokens)
        drafted = None
        if self.keeps_nodes and tree.ran_index is not None:
            drafted = tree.ran_index.gather(1, column(lambda node: node.drafted[0], tree.tokens))
        places = [[node.place for node in row] for row in rows]
        return replace_fields(
            build_tree(tokens, parents, tree.valid.new_tensor(valid), self.depth),
            values=column(lambda node: node.value, values),
            ran_index=drafted,
            extra=masks(places, self.vocab, tokens.device),
        )

    def _choose(self, b: int, tokens: list, parents: list, valid: list, values: list) -> list[Node]:
        """Choose the nodes of a sequence, best first: parents precede children.

        tokens, parents, valid, values: of the drafter's nodes
        """
        below = defaultdict(list)  # children by node
        for i in range(1, len(tokens) if self.live[b] else 1):
            if valid[i]:
                below[parents[i]].append(i)
        number = count()  # of equal values the first
        heap = [(0.0, next(number), Node(tokens[0], 0, 0, 0.0, [0], self.roots[b]))]
        nodes: list[Node] = []
        while heap and len(nodes) < self.size:
            node = heapq.heappop(heap)[-1]
            nodes.append(node)
            if node.depth == self.depth or (node.place is None and self.roots[b] is not None):
                continue
            only = None if node.place is None else node.place.only
            by_token: dict[int, list[int]] = defaultdict(list)  # drafted children by token
            if self.appends and only is not None:
                by_token[only] = []
            for i in chain.from_iterable(below[drafted] for drafted in node.drafted):
                by_token[tokens[i] if only is None else only].append(i)
            for token, drafted in by_token.items():
                place = None
                if node.place is not None:
                    if not node.place.allows(token):
                        continue
                    place = node.place.after(token)
                value = node.value if only is not None else max(values[i] for i in drafted)
                child = Node(token, len(nodes) - 1, node.depth + 1, value, drafted, place)
                heapq.heappush(heap, (-value, next(number), child))
        return nodes


class GuidedCycle(ShapedCycle):
    """A cycle under grammars, of trees or of prompts that end."""

    drafter: Guided

    def __init__(self, engine: Engine, preset: int, mode: int):
        """Make the cycle of a preset of the engine's."""
        vocab = engine.target.config.vocab_size
        guided = Guided(engine.drafter, engine.presets[preset], vocab)
        super().__init__(engine, guided, mode)

    def scores(self, tree: DraftTree, features: Tensor) -> Tensor:
        """Score the tokens that may follow every node; the others have -inf."""
        allowed = tree.extra
        if allowed is None:  # the tree is the last token of a prompt
            roots = [[root] for root in self.drafter.roots]
            allowed = masks(roots, self.drafter.vocab, features.device)
        return torch.where(allowed, super().scores(tree, features), float("-inf"))


def _forced(place: Any) -> int:
    """Count the tokens, one behind the other, that alone are allowed."""
    length = 0
    while place is not None and place.only is not None and length < MAX_NODES - 1:
        place = place.after(place.only)
        length += 1
    return length
