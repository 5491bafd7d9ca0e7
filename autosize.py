"""`--tree auto`: choosing between trees while decoding, for the most tokens per second on this machine and this text.

How it works:
1. A drafter comes in presets (drafters.py). The cycle of each is timed before the first prompt, and on and on while
   decoding. Whatever slows the machine as a whole cancels, since only ratios decide.
2. Smaller trees are nested in larger ones: a tree that was verified says of every smaller shape which of its nodes
   that would have had (`nested`), so how much of the accepted path, and what the drafter's own scores promised of it.
   Every sixth tree is judged like this.
3. A preset is expected to give 1 + its mean accepted length; the promise, corrected by what promises have been worth,
   stands in where few cycles have been seen. For larger trees than are run a rule of thumb does (`accepted_of`), from
   how often the head seems to miss a token: at first as often as published.
4. The best rate wins. Smaller trees than the choice are judged as they go; the next larger one is tried for some cycles
   whenever a small share of the time, paid into an account, covers what that is expected to lose: often if it is close,
   rarely if it is hopeless. Vanilla is one of the presets: a poor head costs little.

A choice costs time and never changes a token. Prior art: Sequoia (arXiv 2402.12374) sizes its tree for the hardware,
from acceptance rates measured before.
Trade-off: one choice for all rows of a batch, on the host, from whole cycles: exact sums instead of a cost model.
Not here: what the presets are (grow.py and the drafters), and their compiled steps (decode.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 128  # cycles that a mean remembers
TRUST = 16  # cycles' worth of the drafter's promise
DOUBT = 4.0  # tokens that must have been promised before the promise is doubted by half
GAIN = 1.02  # a rival must promise this much more
SHARE = 0.01  # of the time that trials may lose
TRIAL = 3  # cycles in a row
SPACING = 6  # cycles between choices, but for the first ones
PACE = 8  # cycles after which the machine's pace counts as changed
OPTIMISM = 2.0  # accepted tokens expected of a tree without a shape
MISS = 0.25  # tokens that a head misses at first, of those that a chain asks it for: about as published for EAGLE-1


class TreeShape(NamedTuple):
    """A tree that grows best first: a chain has top-k 1, the root alone depth 0."""

    depth: int  # D, drafted levels
    topk: int  # K, children kept per node, and nodes expanded per level
    size: int  # N, nodes, root included


ROOT = TreeShape(0, 0, 1)


class Verdict(NamedTuple):
    """A verified tree, as far as its shape goes. Entry i is node i; node 0 is the root."""

    values: list[float]  # log-probability of each path, in the drafter's eyes; -inf: padding
    parents: list[int]
    path: list[int]  # accepted nodes, the root left out


def best_first(verdict: Verdict) -> list[int]:
    """The nodes of a tree but the root, in the order in which a tree of any size takes them."""
    values = verdict.values
    return sorted(range(1, len(values)), key=lambda i: -values[i])  # stable: of equal values the lower number


def nested(verdict: Verdict, order: list[int], shape: TreeShape) -> set[int]:
    """The nodes that a tree of a smaller shape would have had of those of a larger one, the root left out.

    order: `best_first(verdict)`
    Exact: a smaller tree's candidates are a subset of the larger one's, and what the larger one has pruned scores below
    whatever it kept.
    """
    values, parents, _ = verdict
    depth, children, expanded = {0: 0}, {0: 0}, [0] * (shape.depth + 1)
    kept: set[int] = set()
    for node in order:
        above = parents[node]
        if values[node] == -math.inf or len(kept) == shape.size - 1:
            break
        if above not in children or depth[above] == shape.depth or children[above] == shape.topk:
            continue
        children[above] += 1
        kept.add(node)
        depth[node] = depth[above] + 1
        if expanded[depth[node]] < shape.topk:  # one of its level's best: it may have children
            expanded[depth[node]] += 1
            children[node] = 0
    return kept


def accepted_of(shape: TreeShape, miss: float) -> float:
    """Tokens that a tree is expected to bring, the bonus not counted, of a head whose chain misses so many of them.

    A rule of thumb: with k children per node, misses fall by the cube root of k. It is within 8 % of all that was
    measured on the demo and the stand-ins of 0.5B, greedy and sampled (benchmarks/LOG.md).
    """
    hit = 1 - miss * max(shape.topk, 1) ** (-1 / 3)
    return sum(hit**level for level in range(1, shape.depth + 1))


def miss_of(shape: TreeShape, accepted: float) -> float:
    """The inverse of `accepted_of`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_of(shape, middle) > accepted else (low, middle)
    return high


class Mean:
    """A mean of what was seen lately. `seen` is how many values it stands for; it fades, and so makes room."""

    def __init__(self, value: float, seen: float = 0.0):
        self.value, self.seen = value, seen

    def fade(self, memory: int = MEMORY) -> None:
        """Let time pass: a value weighs 1/e after `memory` calls."""
        self.seen *= 1 - 1 / memory

    def add(self, value: float) -> None:
        """Take in one value."""
        self.seen += 1
        self.value += (value - self.value) / self.seen


class Autosizer:
    """Which preset the next cycle runs. Presets are numbered from the smallest tree, which may be the root alone."""

    def __init__(self, shapes: Sequence[TreeShape | None], costs_s: Sequence[float]):
        """shapes: None for a tree that grows otherwise; costs_s: seconds of a cycle, per preset"""
        self.shapes, self.predicted_s = shapes, tuple(costs_s)
        self.costs = [Mean(cost, 2) for cost in costs_s]  # a warm-up is worth two cycles
        self.pace = Mean(1.0)  # how many times slower than timed the machine runs now
        self.accepted = [Mean(0.0) for _ in shapes]  # tokens per row and cycle, the bonus not counted
        self.promised = [Mean(0.0 if shape == ROOT else OPTIMISM) for shape in shapes]
        self.kept_promises = self.promises = DOUBT  # tokens, fading
        self.usual = self._usual(MISS)  # accepted tokens of every preset, by the rule of thumb
        self.choice = 0  # `rate` compares with it
        self.choice = max(range(len(shapes)), key=self.rate)
        self.account = costs_s[0]  # seconds that trials may lose
        self.rival, self.left = self.choice, 0  # what is on trial, and for how many cycles more
        self.age, self.last = -1, -1  # cycles so far without those on trial; the preset that was observed last
        self.unread: list[tuple[int, float, float]] = []  # what was observed since the last choice

    def tokens(self, preset: int) -> float:
        """Expected tokens per row and cycle."""
        mean, promised = self.accepted[preset], self.promised[preset]
        if self._judged(preset) and (preset > self.choice or not promised.seen):
            promise = self.usual[preset]
        else:
            promise = promised.value * self.kept_promises / self.promises
        return 1 + (mean.seen * mean.value + TRUST * promise) / (mean.seen + TRUST)

    def rate(self, preset: int) -> float:
        """Expected tokens per row and second, at the machine's usual pace."""
        return self.tokens(preset) / self.costs[preset].value

    def loss(self, preset: int) -> float:
        """Seconds that a trial of a rival is expected to lose."""
        return TRIAL * self.costs[preset].value * max(1 - self.rate(preset) / self.rate(self.choice), 0.02)

    def begin(self) -> None:
        """Another text begins. Where no tree runs nothing is judged, so one is tried."""
        self._learn()
        if self.age >= 0 and self.choice == 0 and len(self.shapes) > 1 and self.account > self.loss(1):
            self.rival, self.left = 1, 1

    def next(self, limit: int) -> tuple[int, bool]:
        """Choose. limit: the largest preset that makes sense now. Returns: the preset; whether to judge its tree."""
        if limit < len(self.shapes) - 1:
            return min(self.choice, limit), False
        if self.left:
            self.left -= 1
            return self.rival, self._judged(self.rival)
        self.age += 1
        if self.age > TRUST and self.age % SPACING:
            return self.choice, False  # learning and judging take 0.05 ms each
        self._learn()
        best = max(range(limit + 1), key=self.rate)
        if self.rate(best) > GAIN * self.rate(self.choice):
            self.choice = best
        rival = self.choice + 1
        if self.age <= TRUST or rival > limit or self.account < self.loss(rival):
            return self.choice, self._judged(self.choice)
        self.rival, self.left = rival, TRIAL - 1
        return rival, self._judged(rival)

    def _judged(self, preset: int) -> bool:
        return self.shapes[preset] not in (None, ROOT)

    def observe(self, preset: int, accepted: float, seconds: float) -> None:
        """Note a cycle, to learn from it when the next choice is due.

        accepted: mean length over its rows, the bonus not counted; seconds: on a CPU with what the drafter had to catch
        up first, on CUDA without
        """
        self.unread.append((preset, accepted, seconds))
        if len(self.unread) == MEMORY:  # where nothing is chosen for long, since no tree makes sense
            self._learn()

    def _learn(self) -> None:
        for cycle in self.unread:  # several at once, since the first one finds cold caches
            self._take_in(*cycle)
        self.unread.clear()

    def _take_in(self, preset: int, accepted: float, seconds: float) -> None:
        cost = self.costs[preset]
        if preset == self.last:  # the first cycle after a change is slow
            now = seconds / cost.value
            if self.pace.seen:
                now = min(now, 2 * self.pace.value)  # a hiccup is no change of pace
            self.pace.fade(PACE)
            self.pace.add(now)  # first, or a preset would be blamed for what slows all of them
            cost.fade()
            cost.add(now / self.pace.value * cost.value)
        self.last = preset
        for mean in self.accepted:  # with time, not with what is seen: text changes
            mean.fade()
        self.accepted[preset].add(accepted)
        if not self.shapes[preset]:  # nobody promises anything: what it has brought so far stands for it
            self.promised[preset].add(accepted)
        self.account += SHARE * cost.value
        if preset > self.choice:  # what the trial has really lost
            self.account -= seconds / self.pace.value - (1 + accepted) / self.rate(self.choice)

    def judge(self, preset: int, verdicts: Sequence[Verdict]) -> None:
        """Learn from a tree what every shape nested in the preset's would have accepted. verdicts: one per row."""
        ours, orders = self.shapes[preset], [best_first(verdict) for verdict in verdicts]
        for number, shape in enumerate(self.shapes):
            if not self._judged(number) or any(a > b for a, b in zip(shape, ours)):
                continue
            trees = [nested(v, order, shape) for v, order in zip(verdicts, orders)]
            promised = [sum(math.exp(v.values[i]) for i in kept) for v, kept in zip(verdicts, trees)]
            accepted = [sum(i in kept for i in v.path) for v, kept in zip(verdicts, trees)]
            self.promised[number].fade(PACE)
            self.promised[number].add(sum(promised) / len(verdicts))
            if number == preset:
                fade = 1 - len(verdicts) / MEMORY
                self.kept_promises = fade * self.kept_promises + sum(accepted)
                self.promises = fade * self.promises + sum(promised)
            else:  # its own acceptance is observed anyway
                self.accepted[number].add(sum(accepted) / len(verdicts))
        self.usual = self._usual(miss_of(ours, self.tokens(preset) - 1))

    def _usual(self, miss: float) -> list[float]:
        return [accepted_of(shape, miss) if shape else 0.0 for shape in self.shapes]
