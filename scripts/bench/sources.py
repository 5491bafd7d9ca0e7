"""Sources of drafted tokens that need no head, and the one tree that their union grows.

1. A `Source` reads decided tokens, and the target's likeliest successors of each, and says what may
   follow a path: `Lookup`, `Suffix`, `Store`, `Recycling`, `Rest`, `Lookahead`.
2. `Union` grows one tree from any number of sources, best prefix first. Its estimate of a node is
   the fading share of accepted candidates of the node's key: its source and, as the source
   has it, a rank, the length of a match, the share of a continuation.
3. `Union.accept` compares a tree with the target's tokens. All candidates of the accepted nodes
   teach it, those that the tree had no room for included.
At temperature above 0 a tree may read the target's noise (sampling.py), see `Union.rate`.
Plain Python, to count acceptance (count_sources.py); the time of a proposal means nothing here.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import numpy as np

TOP = 8  # candidates of a path at most
DEPTH = 24  # levels of a tree at most
FADING = 0.998  # weight of an outcome after the next one of its key
PRIOR = 3.0  # outcomes that the estimate before any outcome is worth
LENGTHS = (1, 2, 3, 5, 8, 16)  # bins of match lengths, upper ends
SHARES = (0.1, 0.25, 0.45, 0.6, 0.8, 0.95)  # bins of the share of a continuation

Key = tuple[str | int, ...]


class Row(NamedTuple):
    """A token that the target has read, and what its pass has left."""

    token: int
    successors: list[int]  # the likeliest ones, best first
    logp: list[float]
    grams: list[list[int]]  # n-grams of a Jacobi window behind it, if one ran


class Candidate(NamedTuple):
    """A token that a source expects behind a path."""

    token: int
    key: Key  # candidates of one key share an estimate of their acceptance
    prior: float  # that estimate before any outcome
    state: Any  # of the source, behind this token


class Tree(NamedTuple):
    """A proposed tree, best node first: parents precede children, the root is node 0."""

    tokens: list[int]
    children: list[dict[int, int]]  # node by token, per node
    values: list[float]  # estimated probability that the path to a node is accepted
    offers: list[dict[int, list[Candidate]]]  # by token, per node: all, those left out included


class Source:
    """A proposer of continuations."""

    def begin(self) -> None:
        """Start a text."""

    def update(self, tokens: list[int], rows: list[Row]) -> None:
        """Read decided tokens, and the likeliest successors of those that the target has read."""

    def start(self, context: list[int]) -> Any:
        """Return the state behind the text so far, None without candidates."""
        raise NotImplementedError

    def candidates(self, state: Any) -> list[Candidate]:
        """Return the tokens that may follow, pairwise different."""
        raise NotImplementedError


class Lookup(Source):
    """Prompt lookup by the rule of extras/ngram_draft.py."""

    def __init__(self, tokens: int = 10, branches: int = 6, longest: int = 3):
        self.tokens = tokens
        self.branches = branches
        self.longest = longest

    def start(self, context: list[int]) -> Any:
        text = np.array(context)
        last = len(text) - 1
        length = np.zeros(last, np.int64)
        equal = np.ones(last, bool)
        for back in range(min(self.longest, last)):
            same = np.zeros(last, bool)
            same[back:] = text[: last - back] == text[last - back]
            equal &= same
            length += equal
        places = np.flatnonzero(length)
        places = places[np.lexsort((-places, -length[places]))]  # the longest, then the latest
        chains: dict[tuple[int, ...], int] = {}
        for place in places:
            steps = np.arange(self.tokens) % (last - place)
            chain = tuple(text[place + 1 + steps].tolist())
            chains.setdefault(chain, int(length[place]))
            if len(chains) == self.branches:
                break
        state = [(chain, rank, match) for rank, (chain, match) in enumerate(chains.items())]
        return (0, state) if state else None

    def candidates(self, state: Any) -> list[Candidate]:
        depth, chains = state
        if depth == self.tokens:
            return []
        found: dict[int, list] = {}  # by next token
        for one in chains:
            found.setdefault(one[0][depth], []).append(one)
        out = []
        for token, those in found.items():
            _, rank, match = those[0]  # the best of them
            key = ("lookup", match, min(rank, 3), min(depth, 3))
            hope = 0.6 if depth else 0.1 * min(match, 6)
            prior = hope / (1 + rank)
            out.append(Candidate(token, key, prior, (depth + 1, those)))
        return out


class Suffix(Source):
    """The text so far, as a suffix automaton (Blumer et al. 1985) that counts what followed."""

    LINKS = 24  # suffixes of a place whose counts are raised; the longest ones
    SHORTER = 4  # suffixes of a path that give candidates; the longest ones

    def __init__(self, name: str = "suffix"):
        self.name = name
        self.begin()

    def begin(self) -> None:
        self.next: list[dict[int, int]] = [{}]  # by token, the state behind it
        self.link = [-1]  # the state of the longest suffix that has more places
        self.length = [0]  # tokens of the longest string of a state
        self.counts: list[dict[int, int]] = [{}]  # of the tokens that followed
        self.latest = [-1]  # the token that followed last
        self.last = 0  # the state of all tokens

    def update(self, tokens: list[int], rows: list[Row]) -> None:
        for token in tokens:
            self._extend(token)

    def _state(self, length: int, like: int = -1) -> int:
        """Add a state, a copy of another one if given."""
        copied = like >= 0
        self.next.append(dict(self.next[like]) if copied else {})
        self.link.append(self.link[like] if copied else 0)
        self.length.append(length)
        self.counts.append(dict(self.counts[like]) if copied else {})
        self.latest.append(self.latest[like] if copied else -1)
        return len(self.next) - 1

    def _extend(self, token: int) -> None:
        state = self.last
        for _ in range(self.LINKS):
            self.counts[state][token] = self.counts[state].get(token, 0) + 1
            self.latest[state] = token
            state = self.link[state]
            if state < 0:  # behind the empty string
                break
        new = self._state(self.length[self.last] + 1)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._longest(state, token)
        self.last = new

    def _longest(self, state: int, token: int) -> int:
        """Return the state of the longest suffix that occurred before, split off where needed."""
        old = self.next[state][token]
        if self.length[old] == self.length[state] + 1:
            return old
        copied = self._state(self.length[state] + 1, old)
        self.link[old] = copied
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = copied
            state = self.link[state]
        return copied

    def start(self, context: list[int]) -> Any:
        state = self.link[self.last]
        return (state, self.length[state]) if state > 0 else None

    def candidates(self, state: Any) -> list[Candidate]:
        place, match = state
        found: dict[int, Candidate] = {}
        for _ in range(self.SHORTER):
            if place <= 0:
                break
            counts = self.counts[place]
            total = sum(counts.values())
            for token in sorted(counts, key=counts.get, reverse=True)[:TOP]:
                after = self.next[place].get(token)
                if token not in found and token >= 0 and after is not None:
                    latest = self.latest[place] == token
                    made = suffix_candidate(self.name, token, match, counts[token] / total, total)
                    key = (*made.key, latest)
                    found[token] = made._replace(key=key, state=(after, match + 1))
            place = self.link[place]
            match = self.length[place] if place > 0 else 0
        return list(found.values())[:TOP]


class Store(Source):
    """Texts of other requests, in an automaton that a request reads and does not change."""

    def __init__(self, texts: Suffix):
        self.texts = texts

    def begin(self) -> None:
        self.place = 0
        self.match = 0  # tokens

    def update(self, tokens: list[int], rows: list[Row]) -> None:
        texts = self.texts
        for token in tokens:
            while self.place > 0 and token not in texts.next[self.place]:
                self.place = texts.link[self.place]
                self.match = texts.length[self.place]
            if token in texts.next[self.place]:
                self.place = texts.next[self.place][token]
                self.match += 1

    def start(self, context: list[int]) -> Any:
        return (self.place, self.match) if self.place > 0 else None

    def candidates(self, state: Any) -> list[Candidate]:
        return self.texts.candidates(state)


def suffix_candidate(name: str, token: int, match: int, share: float, total: int) -> Candidate:
    """Return a candidate that followed a match in a share of its places."""
    bins = (bisect_left(LENGTHS, match), bisect_left(SHARES, share), min(total, 3))
    prior = share * match / (match + 1) * total / (total + 0.5)
    return Candidate(token, (name, *bins), prior, None)


class Recycling(Source):
    """Token Recycling (arXiv 2408.08696): the last seen successors of every token.

    kept: rows of other requests, by token
    binned: candidates share an estimate by rank and probability, not by rank
    """

    def __init__(self, kept: dict[int, Row] | None = None, binned: bool = False):
        self.kept = kept or {}
        self.binned = binned

    def begin(self) -> None:
        self.rows = dict(self.kept)

    def update(self, tokens: list[int], rows: list[Row]) -> None:
        for row in rows:
            self.rows[row.token] = row

    def start(self, context: list[int]) -> Any:
        return (context[-1], 0)

    def candidates(self, state: Any) -> list[Candidate]:
        token, depth = state
        row = self.rows.get(token)
        if row is None:
            return []
        out = []
        for rank, (follower, log) in enumerate(zip(row.successors, row.logp)):
            key: Key = ("recycling", rank, min(depth, 2))
            prior = 0.4 / (1 + rank) ** 1.3
            if self.binned:
                key = ("binned", int(-2 * log), min(rank, 2), min(depth, 1))
                prior = 0.6 * math.exp(log)
            out.append(Candidate(follower, key, prior, (follower, depth + 1)))
        return out


class Rest(Source):
    """REST (arXiv 2311.08252): continuations in a fixed corpus, found by a suffix array."""

    LONGEST = 16  # tokens of a match
    SHORTEST = 2
    PLACES = 256  # read of a match

    def __init__(self, corpus: np.ndarray, order: np.ndarray):
        self.corpus = corpus
        self.order = order
        self.text = array("i", corpus.tolist())

    def start(self, context: list[int]) -> Any:
        low = self.SHORTEST - 1
        high = min(self.LONGEST, len(context))
        best = None
        while low < high:  # a match of some length holds one of every smaller length
            match = (low + high + 1) // 2
            first, behind = self._places(tuple(context[-match:]))
            if behind > first:
                low = match
                best = (first, behind)
            else:
                high = match - 1
        if best is None:
            return None
        step = -(-(best[1] - best[0]) // self.PLACES)
        return (self.order[best[0] : best[1] : step] + low, low)

    def _places(self, pattern: tuple[int, ...]) -> tuple[int, int]:
        """Return the range of `order` whose suffixes begin with a pattern."""

        def start_of(place: int) -> tuple[int, ...]:
            return tuple(self.text[place : place + len(pattern)])

        first = bisect_left(self.order, pattern, key=start_of)
        return first, bisect_right(self.order, pattern, first, key=start_of)

    def candidates(self, state: Any) -> list[Candidate]:
        places, match = state
        places = places[places < len(self.corpus)]
        tokens = self.corpus[places]
        out = []
        for token in np.unique(tokens[tokens >= 0]).tolist():
            those = places[tokens == token]
            made = suffix_candidate("rest", token, match, len(those) / len(places), len(places))
            out.append(made._replace(state=(those + 1, match + 1)))
        out.sort(key=lambda made: made.prior, reverse=True)
        return out[:TOP]


class Lookahead(Source):
    """Lookahead (arXiv 2402.02057): the n-grams of a Jacobi window, by first token."""

    GRAMS = 10  # of a first token: G; the latest ones

    def begin(self) -> None:
        self.pool: dict[int, list[list[int]]] = {}

    def update(self, tokens: list[int], rows: list[Row]) -> None:
        for row in rows:
            for first, *tail in row.grams:
                tails = [tail, *(t for t in self.pool.get(first, []) if t != tail)]
                self.pool[first] = tails[: self.GRAMS]

    def start(self, context: list[int]) -> Any:
        return (0, list(enumerate(self.pool.get(context[-1], []))))

    def candidates(self, state: Any) -> list[Candidate]:
        depth, tails = state
        found: dict[int, list] = {}
        for rank, tail in tails:
            if depth < len(tail):
                found.setdefault(tail[depth], []).append((rank, tail))
        out = []
        for token, those in found.items():
            rank = those[0][0]
            key = ("lookahead", min(rank, 3), depth)
            out.append(Candidate(token, key, 0.5 / (1 + rank), (depth + 1, those)))
        return out


class Noise(Protocol):
    """The target's noise of the coming draws."""

    def of(self, depth: int, token: int) -> float:
        """Return the Gumbel noise of a token behind a node of some depth."""


class Union:
    """Trees of several sources as one, ranked by the acceptance learnt per key.

    Equal prefixes share nodes, with the highest estimate.
    """

    def __init__(self, sources: list[Source]):
        self.sources = sources
        self.outcomes: dict[Key, list[float]] = {}  # accepted and tried, both fading

    def begin(self) -> None:
        for source in self.sources:
            source.begin()

    def update(self, tokens: list[int], rows: list[Row]) -> None:
        for source in self.sources:
            source.update(tokens, rows)

    def rate(self, offered: list[Candidate], gumbel: float | None) -> float:
        """Estimate the acceptance of a token behind its parent.

        gumbel: the target's own noise for it, if known: log p + G wins against the other tokens'
            largest, a Gumbel variable of location log(1 - p)
        """
        rate = 1e-5
        for one in offered:
            accepted, tried = self.outcomes.get(one.key, (0.0, 0.0))
            rate = max(rate, (accepted + PRIOR * one.prior) / (tried + PRIOR))
        rate = min(rate, 0.999)
        if gumbel is None:
            return rate
        return math.exp(max(-(1 - rate) / rate * math.exp(-gumbel), -50.0))

    def propose(self, context: list[int], nodes: int, noise: Noise | None = None) -> Tree:
        """Propose the best prefixes. nodes: the root included."""
        tree = Tree([context[-1]], [{}], [1.0], [])
        heap: list[tuple] = []

        def expand(node: int, depth: int, states: list[tuple[Source, Any]]) -> None:
            offers: dict[int, list[Candidate]] = {}
            behind: dict[int, list[tuple[Source, Any]]] = {}
            for source, state in states:
                for one in source.candidates(state):
                    offers.setdefault(one.token, []).append(one)
                    behind.setdefault(one.token, []).append((source, one.state))
            tree.offers.append(offers)
            if depth == DEPTH:
                return
            for rank, (token, offered) in enumerate(offers.items()):
                gumbel = None if noise is None else noise.of(depth, token)
                value = tree.values[node] * self.rate(offered, gumbel)
                heappush(heap, (-value, node, rank, token, depth + 1, behind[token]))

        starts = [(source, source.start(context)) for source in self.sources]
        expand(0, 0, [start for start in starts if start[1] is not None])
        while heap and len(tree.tokens) < nodes:
            value, parent, _, token, depth, states = heappop(heap)
            node = len(tree.tokens)
            tree.tokens.append(token)
            tree.children.append({})
            tree.values.append(-value)
            tree.children[parent][token] = node
            expand(node, depth, states)
        return tree

    def accept(self, tree: Tree, following: list[int], nodes: int = 1 << 30) -> int:
        """Return how many of the following tokens the first nodes hold on a path, and learn."""
        node = 0
        for length, token in enumerate(following):
            for offered in tree.offers[node].values():
                for one in offered:
                    self._learn(one.key, one.token == token)
            node = tree.children[node].get(token, nodes)
            if node >= nodes:
                return length
        return len(following)

    def _learn(self, key: Key, accepted: bool) -> None:
        outcome = self.outcomes.setdefault(key, [0.0, 0.0])
        outcome[0] = outcome[0] * FADING + accepted
        outcome[1] = outcome[1] * FADING + 1
