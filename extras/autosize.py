"""`--tree auto`: which of a drafter's presets the next cycle runs, for the most tokens per second.

1. Every cycle that runs updates two fading means of its preset: accepted tokens, and seconds relative to the machine's
   pace, which all presets share.
2. It also updates how often the drafter misses a token, and what a further node costs. Two rules of thumb derive priors
   for every tree size from these (`accepted_of`, `cost_of`), so that what one preset shows counts for those that have
   not run for long.
3. The preset of the highest rate runs. A probe of none, or of the next larger or smaller one, whichever costs little
   and is little known, takes its place for a few cycles whenever a budget, a small share of the time, covers what it is
   expected to lose. A pass without a tree is bound by reading weights and large trees by arithmetic, so a machine's
   drift changes their ratio.
4. A process starts from what earlier ones have learned (remembered.py). The first has only the rules of thumb, and the
   acceptance that the head's training has measured; it runs a few cycles without a tree, which set the pace.

Trade-off: one choice for all rows of a batch, on the host. A choice costs time and never changes a token.
Not here: the cycles of the presets (decode.py), and a drafter at rest (deferred.py).
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint import read_json
from decode import Engine
from draft_tree import DynamicTree, StaticTree
from drafters import LARGEST, Drafter, TreeDrafter
from extras.deferred import Deferred, Idle
from extras.remembered import file_of, recall, remember
from model import Transformer

FADE = (
    1 - 1 / 128
)  # weight that a value keeps from cycle to cycle; what is accepted fades by each row
PACE_GAIN = 1 / 16  # share of a cycle's deviation that is put down to the machine's pace, at least
PRIOR_WEIGHT = 16  # of the rule of thumb for accepted tokens (cycles of a row)
COST_WEIGHT = 0.5  # of the rule of thumb for costs (cycles)
RECALLED = 8  # what is remembered counts for at most (cycles, tokens); costs never fade below that
MISS, MISS_WEIGHT = (
    0.25,
    2,
)  # share of tokens missed at first, about as published for EAGLE-1; its weight (tokens)
NODE = {
    "none": 0.12,
    "int8": 0.3,
    "int4": 0.4,
}  # costs of a further node at first, by format, as on AVX2 (LOG.md)
HOLD = 3  # cycles for which a decision holds
FIRST_BUDGET = 3.0  # for the first probe of all (cycles without a tree)
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
    fit = [
        s for s in SHAPES if s.depth <= tree.depth and s.topk <= tree.width and s.size < tree.size
    ]
    trees = [StaticTree.chain(s.depth) if s.topk == 1 else DynamicTree(*s) for s in fit]
    smaller = [Deferred(drafter.with_tree(tree), target) for tree in trees]
    return Deferred(drafter, target, [Idle(drafter, target), *smaller])


def shape_of(preset: Drafter) -> TreeShape:
    """A preset's tree."""
    return TreeShape(preset.depth, preset.width, preset.size)


def sizer_of(engine: Engine, timed_s: Sequence[float] = ()) -> Autosizer:
    """Make what chooses among an engine's presets. timed_s: seconds of a cycle of each, where they were timed

    What it learns is written to the user's cache when it is dropped, or at the end of the process.
    """
    config, drafter, file = engine.config, engine.drafter, file_of(engine)
    shapes = [shape_of(preset) for preset in drafter.presets]
    known = known_of(recall(file), shapes) if file else None
    known = known or unknown(shapes, trained_miss(config.eagle))
    if timed_s:
        known.costs = [seconds / timed_s[0] for seconds in timed_s]
        known.seen = [RECALLED] * len(shapes)
    node, rows = NODE[config.quant], config.batch_size
    node *= rows / (1 + (rows - 1) * node)  # a cycle without a tree has a node per row
    # prompts that are captured have to be read: each way is a graph of its own
    may_skip_prompts = not engine.captured and drafter.presets[0].room == LARGEST
    sizer = Autosizer(
        shapes, known, node, [preset.name for preset in drafter.presets], may_skip_prompts
    )
    if file:
        weakref.finalize(sizer, _save, file, known, asdict(known))
    return sizer


# ------------------------------------------------------------------------------------------------ choice


def accepted_of(shape: TreeShape, miss: float) -> float:
    """Estimate a tree's accepted tokens, the bonus not counted. miss: share of tokens that a chain's levels miss

    A rule of thumb: with k children per node, misses fall by the cube root of k. It is within 8 % of all that was
    measured on the demo and the stand-ins of 0.5B, greedy and sampled (benchmarks/LOG.md).
    """
    hit = 1 - min(miss, 1.0) * max(shape.topk, 1) ** (-1 / 3)
    return sum(hit**level for level in range(1, shape.depth + 1))


def cost_of(shape: TreeShape, node: float) -> float:
    """Estimate what a cycle costs, relative to one without a tree. node: the same of a further node

    A rule of thumb, for processors: within 12 % of trees of 4 to 16 nodes on SmolLM2, in 16, 8 and 4 bits (LOG.md).
    """
    return 1 + node * (shape.size - 1)


def trained_miss(head: str) -> float | None:
    """The share of tokens that chains missed at the end of a draft head's training; None where none is told."""
    if not head:
        return None
    try:
        alpha = read_json(Path(head, "training.json"))["stages"][-1]["curve"][-1]["alpha"]
        reached = list(accumulate(alpha, mul))  # odds that a path gets so far
        miss = 1 - sum(reached) / (1 + sum(reached[:-1]))
    except (ValueError, LookupError, TypeError, ArithmeticError):
        return None
    return miss if reached and 0 <= miss <= 1 else None


# --------------------------------------------------------------------------------------------- knowledge


@dataclass
class Known:
    """Everything that is remembered: fading means, and what each stands for.

    Accepted tokens of a preset are a text's own; of the next text, the share of misses says as much.
    """

    costs: list[float]  # of a cycle at pace 1; in a file and at first, that without a tree is 1
    seen: list[float]  # cycles
    miss: float  # share of tokens that a chain's levels miss
    miss_weight: float  # tokens


def unknown(shapes: Sequence[TreeShape], miss: float | None = None) -> Known:
    """The start without memory. miss: as the head's training says"""
    count, trained = len(shapes), (MISS, MISS_WEIGHT) if miss is None else (miss, RECALLED)
    return Known([1.0] * count, [0.0] * count, *trained)


def known_of(value: Any, shapes: Sequence[TreeShape]) -> Known | None:
    """Read what was remembered of such presets; None where it cannot be that. value: any JSON value"""
    names = [field.name for field in fields(Known)]
    if not isinstance(value, dict) or not value.keys() >= set(names):
        return None
    known = Known(*(value[name] for name in names))
    lists = (known.costs, known.seen)
    if not all(isinstance(each, list) and len(each) == len(shapes) for each in lists):
        return None
    ranges = [(known.miss, 0, 2), (known.miss_weight, 0, 1e6)]
    ranges += [(cost, 0.01, 1e4) for cost in known.costs]
    ranges += [(weight, 0, 1e6) for weight in known.seen]
    if not all(type(x) in (int, float) and low <= x <= high for x, low, high in ranges):
        return None  # no NaN is in a range
    known.seen = [min(weight, RECALLED) for weight in known.seen]
    known.miss_weight = min(known.miss_weight, RECALLED)
    return known


def _save(file: Path, known: Known, before: dict[str, Any]) -> None:
    """Remember what was learned since `before`, if anything."""
    value = asdict(known)
    if value != before:
        remember(file, value | {"costs": [cost / known.costs[0] for cost in known.costs]})


# ------------------------------------------------------------------------------------------------ choice


class Autosizer:
    """Chooses among presets, numbered from the smallest tree, which is the root alone."""

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        known: Known,
        node: float,
        names: Sequence[str] = (),
        may_skip_prompts: bool = False,
    ):
        """shapes, names: of the presets; known: what the choice starts from, which is kept up to date

        node: what a further node costs at first, relative to a cycle without a tree
        may_skip_prompts: whether the smallest preset may leave out prompts
        """
        self.shapes, self.known, self.node, self.names, self.may_skip_prompts = (
            shapes,
            known,
            node,
            names,
            may_skip_prompts,
        )
        self.accepted = [0.0] * len(shapes)  # fading means, the bonus not counted
        self.weights = [0.0] * len(shapes)  # cycles of a row that these stand for
        self.pace, self.cycles = (
            0.0,
            0,
        )  # seconds of a cycle that costs 1; cycles that it was measured by
        self.budget, self.last, self.left = (
            0.0,
            -1,
            0,
        )  # cost; preset observed last; cycles until the next decision
        self._decide()
        if known.seen[0] == 0:  # the pace is set without a tree
            self.budget = FIRST_BUDGET if self.best == 0 else 0.0
            self.running = 0

    def tokens(self, preset: int) -> float:
        """Expected tokens per row and cycle, the bonus included."""
        weight, prior = self.weights[preset], accepted_of(self.shapes[preset], self.known.miss)
        return 1 + (weight * self.accepted[preset] + PRIOR_WEIGHT * prior) / (weight + PRIOR_WEIGHT)

    def cost(self, preset: int) -> float:
        """Expected cost of a cycle: its seconds at pace 1."""
        known, seen = self.known, self.known.seen[preset]
        prior = known.costs[0]
        if preset > 0:
            prior *= cost_of(self.shapes[preset], self._node())
        return (seen * known.costs[preset] + COST_WEIGHT * prior) / (seen + COST_WEIGHT)

    def _node(self) -> float:
        """What a further node costs, relative to a cycle without a tree."""
        known, total, weight = self.known, COST_WEIGHT * self.node, COST_WEIGHT
        for preset, shape in enumerate(self.shapes[1:], 1):
            each = max(known.costs[preset] / known.costs[0] - 1, 0.0) / (shape.size - 1)
            total += known.seen[preset] * each
            weight += known.seen[preset]
        return total / weight

    @property
    def prefill_tree(self) -> int:
        """The preset that takes in prompts: a drafter that rests need not read them."""
        return 0 if self.may_skip_prompts and self.best == 0 else -1

    def next(self, limit: int) -> int:
        """The preset of the next cycle. limit: the largest that makes sense now."""
        if limit < len(self.shapes) - 1:
            return min(self.best, limit)
        if self.left == 0:
            self._decide()
        self.left -= 1
        return self.running

    def _decide(self) -> None:
        costs = [self.cost(preset) for preset in range(len(self.shapes))]
        rates = [self.tokens(preset) / cost for preset, cost in enumerate(costs)]
        self.best = self.running = rates.index(max(rates))
        self.left = HOLD
        near = {0, self.best - 1, self.best + 1} - {self.best, -1, len(rates)}
        loss = {
            p: HOLD * costs[p] * max(1 - rates[p] / rates[self.best], LEAST_LOSS)
            for p in sorted(near)
        }
        # what costs little to try, and is little known
        probe = min(
            loss, key=lambda preset: loss[preset] * (1 + self.known.seen[preset]), default=self.best
        )
        if self.budget > loss.get(probe, 0.0):
            self.running, self.budget = probe, 0.0

    def observe(self, preset: int, accepted: float, seconds: float, rows: int = 1) -> None:
        """Learn from a cycle. accepted: mean length over its rows, the bonus not counted; rows: that decoded"""
        known, cost = self.known, self.cost(preset)
        self.budget += SHARE * cost
        fade = FADE**rows
        self.weights = [fade * weight for weight in self.weights]
        known.seen = [max(FADE * seen, min(seen, RECALLED)) for seen in known.seen]
        self.weights[preset] += rows
        self.accepted[preset] += rows * (accepted - self.accepted[preset]) / self.weights[preset]
        self.pace = self.pace or seconds / cost
        if preset == self.last:  # the first cycle after a change is slow
            self._time(preset, seconds, cost)
        self.last = preset
        shape = self.shapes[preset]
        if shape.depth:
            missed = min(
                shape.depth - accepted, 1.0
            )  # a row's path ends with the first token that is missed
            tried = accepted + missed
            known.miss_weight = fade * known.miss_weight + rows * tried
            known.miss += (
                rows * (missed * shape.topk ** (1 / 3) - tried * known.miss) / known.miss_weight
            )

    def _time(self, preset: int, seconds: float, cost: float) -> None:
        """Learn from a cycle's time. cost: as expected"""
        known = self.known
        self.cycles += 1
        deviation = min(seconds / (self.pace * cost), 2.0) - 1  # one very slow cycle says little
        sure = known.seen[preset] / (
            known.seen[preset] + COST_WEIGHT
        )  # a time that was guessed tells no pace
        self.pace *= 1 + sure * max(PACE_GAIN, 1 / self.cycles) * deviation
        known.seen[preset] += 1
        known.costs[preset] += (cost * (1 + deviation) - known.costs[preset]) / known.seen[preset]

    def table(self, ran: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Per preset: how often it ran, and the time of its cycle, as expected now and as measured.

        ran: the preset and the seconds of each cycle
        """
        rows = []
        for preset, name in enumerate(self.names):
            seconds = [s for p, s in ran if p == preset]
            rows.append({
                "tree": name,
                "cycles": len(seconds),
                "expected_tokens": self.tokens(preset),
                "predicted_ms": 1e3 * self.pace * self.cost(preset) or None,  # before the first cycle
                "measured_ms": 1e3 * statistics.mean(seconds) if seconds else None,
            })  # fmt: skip
        return rows
