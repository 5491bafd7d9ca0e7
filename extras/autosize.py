"""`--tree auto`: which of a drafter's presets the next cycle runs, for the most tokens per second.

1. Every cycle that runs updates two fading means of its preset: accepted tokens, and seconds. The seconds begin as
   timed before the first prompt, and are relative to the machine's pace, which all presets share.
2. It also updates how often the drafter misses a token. A rule of thumb derives a prior for every tree size from that
   (`accepted_of`), so that what one preset shows counts for those that have not run for long.
3. The preset of the highest rate runs; at the very first the smallest, which is what drafting must not be slower than.
   A probe of the smallest, or of the next larger or smaller one, whichever costs little and is little known, takes its
   place for a few cycles whenever a budget, a small share of the time, covers what it is expected to lose. The smallest
   is bound by reading weights and large trees by arithmetic, so a machine's drift changes their ratio.

Trade-off: one choice for all rows of a batch, on the host. A choice costs time and never changes a token.
Not here: the compiled cycles of the presets (decode.py), and a drafter at rest (deferred.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from draft_tree import DynamicTree, StaticTree
from drafters import LARGEST, Drafter, TreeDrafter
from extras.deferred import Deferred, Idle
from model import Transformer

FADE = 1 - 1 / 128  # weight that a value keeps from cycle to cycle; what is accepted fades by each row
PACE_GAIN = 1 / 16  # share of a cycle's deviation that is put down to the machine's pace
TIMED_WEIGHT = 2  # of the seconds timed before the first prompt (cycles)
PRIOR_WEIGHT = 16  # of the rule of thumb (cycles of a row)
MISS, MISS_WEIGHT = 0.25, 2  # share of tokens missed at first, about as published for EAGLE-1; its weight (tokens)
UNSHAPED = 2.0  # accepted tokens of a tree without a shape before its first cycle; its weight is 1 cycle
HOLD = 3  # cycles for which a decision holds
SHARE = 0.007  # of the time that probes may lose
LEAST_LOSS = 0.02  # share of its time that a probe counts as losing at least


class TreeShape(NamedTuple):
    """A tree that grows best first: a chain has top-k 1, the root alone depth 0."""

    depth: int  # D, drafted levels
    topk: int  # K, children kept per node, and nodes expanded per level
    size: int  # N, nodes, root included


# what is chosen from besides the largest tree and none; CUDA pads to 16, 32 or 64 nodes, a CPU to none
SHAPES = (TreeShape(3, 1, 4), TreeShape(5, 3, 8), TreeShape(5, 4, 16), TreeShape(6, 8, 32))


def with_smaller_trees(drafter: TreeDrafter, target: Transformer) -> Deferred:
    """The same with presets: its tree is the largest, none the smallest, and the host chooses."""
    tree = drafter.tree
    fit = [s for s in SHAPES if s.depth <= tree.depth and s.topk <= tree.width and s.size < tree.size]
    trees = [StaticTree.chain(s.depth) if s.topk == 1 else DynamicTree(*s) for s in fit]
    smaller = [Deferred(drafter.with_tree(tree), target) for tree in trees]
    return Deferred(drafter, target, [Idle(drafter, target), *smaller])


def shape_of(preset: Drafter) -> TreeShape | None:
    """A preset's tree; None where it grows otherwise (n-gram lookup)."""
    if preset.depth == 0:
        return TreeShape(0, 0, 1)
    tree = preset.drafter.tree if isinstance(preset, Deferred) else None
    return TreeShape(tree.depth, tree.width, tree.size) if tree else None


def timed(drafter: Drafter, time_cycles: Callable[[], list[float]], seconds: float, rests: bool) -> Autosizer:
    """Time the presets' cycles once, and more often as `seconds` allow.

    time_cycles: the seconds of a cycle of each
    rests: whether prompts may be left out; False where their passes are captured, each way in a graph of its own
    """
    began, rounds = time.perf_counter(), []
    while not rounds or (len(rounds) < 9 and (time.perf_counter() - began) * (1 + 1 / len(rounds)) < seconds):
        rounds.append(time_cycles())
    costs = [statistics.median(times) for times in zip(*rounds)]
    shapes, names = zip(*((shape_of(preset), preset.name) for preset in drafter.presets))
    return Autosizer(shapes, costs, names, rests and drafter.presets[0].room == LARGEST)


# ------------------------------------------------------------------------------------------------ choice


def accepted_of(shape: TreeShape, miss: float) -> float:
    """Estimate a tree's accepted tokens, the bonus not counted. miss: share of tokens that a chain's levels miss

    A rule of thumb: with k children per node, misses fall by the cube root of k. It is within 8 % of all that was
    measured on the demo and the stand-ins of 0.5B, greedy and sampled (benchmarks/LOG.md).
    """
    hit = 1 - min(miss, 1.0) * max(shape.topk, 1) ** (-1 / 3)
    return sum(hit**level for level in range(1, shape.depth + 1))


class Autosizer:
    """Chooses among presets, numbered from the smallest tree, which may be the root alone."""

    def __init__(
        self,
        shapes: Sequence[TreeShape | None],
        costs_s: Sequence[float],
        names: Sequence[str] = (),
        rests: bool = False,
    ):
        """Per preset, shapes: as `shape_of` gives them; costs_s: seconds of a cycle as timed; names: for `table`

        rests: whether the smallest preset may leave out prompts
        """
        self.shapes, self.timed_s, self.names, self.rests = shapes, tuple(costs_s), names, rests
        self.accepted = [UNSHAPED if shape is None else 0.0 for shape in shapes]  # fading means
        self.weights = [float(shape is None) for shape in shapes]  # cycles of a row that these stand for
        self.miss, self.miss_weight = MISS, MISS_WEIGHT
        self.costs, self.pace = list(costs_s), 0.0  # seconds at pace 1; how many times slower the machine runs now
        self.ratios: Sequence[float] = ()  # to multiply the costs by
        self.budget, self.last, self.left = 0.0, -1, 0  # s; preset observed last; cycles until the next decision
        self.seen = [0.0] * len(shapes)  # cycles that the costs stand for
        self._decide()
        self.running = 0  # the smallest sets the pace

    def rescale(self, ratios: Sequence[float]) -> None:
        """Take it that each preset's cycles now take so many times as long. Another thread says so, `next` does it."""
        self.ratios = ratios

    def tokens(self, preset: int) -> float:
        """Expected tokens per row and cycle, the bonus included."""
        shape, mean, weight = self.shapes[preset], self.accepted[preset], self.weights[preset]
        prior = mean if shape is None else accepted_of(shape, self.miss)
        return 1 + (weight * mean + PRIOR_WEIGHT * prior) / (weight + PRIOR_WEIGHT)

    @property
    def reader(self) -> int:
        """The preset that takes in prompts: a drafter that rests need not read them."""
        return 0 if self.rests and self.best == 0 else -1

    def next(self, limit: int) -> int:
        """The preset of the next cycle. limit: the largest that makes sense now."""
        if self.ratios:
            self.timed_s = tuple(cost * ratio for cost, ratio in zip(self.timed_s, self.ratios))
            self.costs = [cost * ratio for cost, ratio in zip(self.costs, self.ratios)]
            self.ratios = ()
        if limit < len(self.shapes) - 1:
            return min(self.best, limit)
        if self.left == 0:
            self._decide()
        self.left -= 1
        return self.running

    def _decide(self) -> None:
        rates = [self.tokens(preset) / cost for preset, cost in enumerate(self.costs)]
        self.best = self.running = rates.index(max(rates))
        self.left = HOLD
        near = {0, self.best - 1, self.best + 1} - {self.best, -1, len(rates)}
        loss = {p: HOLD * self.costs[p] * max(1 - rates[p] / rates[self.best], LEAST_LOSS) for p in sorted(near)}
        # what costs little to try, and is little known
        probe = min(loss, key=lambda preset: loss[preset] * (1 + self.seen[preset]), default=self.best)
        if self.budget > loss.get(probe, 0.0):
            self.running, self.budget = probe, 0.0

    def observe(self, preset: int, accepted: float, seconds: float, rows: int = 1) -> None:
        """Learn from a cycle. accepted: mean length over its rows, the bonus not counted; rows: that decoded"""
        self.budget += SHARE * self.costs[preset]
        fade = FADE**rows
        self.weights, self.seen = [fade * weight for weight in self.weights], [FADE * weight for weight in self.seen]
        self.weights[preset] += rows
        self.seen[preset] += 1
        self.accepted[preset] += rows * (accepted - self.accepted[preset]) / self.weights[preset]
        if preset == self.last:  # the first cycle after a change is slow
            self.pace = self.pace or seconds / self.costs[preset]
            deviation = min(seconds / (self.pace * self.costs[preset]), 2.0) - 1  # one very slow cycle says little
            self.pace *= 1 + PACE_GAIN * deviation
            self.costs[preset] *= 1 + deviation / (self.seen[preset] + TIMED_WEIGHT)
        self.last = preset
        shape = self.shapes[preset]
        if shape and shape.depth:
            missed = min(shape.depth - accepted, 1.0)  # a row's path ends with the first token that is missed
            tried = accepted + missed
            self.miss_weight = fade * self.miss_weight + rows * tried
            self.miss += rows * (missed * shape.topk ** (1 / 3) - tried * self.miss) / self.miss_weight

    def table(self, ran: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Per preset: how often it ran, and the time of its cycle, as timed before the first prompt and as measured.

        ran: the preset and the seconds of each cycle
        """
        rows = []
        for preset, name in enumerate(self.names):
            seconds = [s for p, s in ran if p == preset]
            rows.append({
                "tree": name,
                "cycles": len(seconds),
                "expected_tokens": self.tokens(preset),
                "predicted_ms": 1e3 * self.timed_s[preset],
                "measured_ms": 1e3 * statistics.mean(seconds) if seconds else None,
            })  # fmt: skip
        return rows
