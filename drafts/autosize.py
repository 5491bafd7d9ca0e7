"""`--tree auto`: choose the preset (tree size) of each cycle by expected tokens per second.

1. Each cycle updates two fading means of its preset: accepted tokens, and seconds relative to the
   machine's pace, which all presets share. It also updates the share of tokens that the drafter
   misses and the cost of a further node. Two rules of thumb (`accepted_of`, `cost_of`) derive
   priors for every tree size from these, so that one preset's cycles inform the others.
2. The preset of the highest rate runs; trees are tried one size after the other. A probe replaces
   it for a few cycles when a budget, a small share of the time, covers the probe's expected loss.
   Probes are the preset without a tree and the next larger and smaller ones. They follow drift: a
   pass without a tree is bound by reading weights and large trees by arithmetic, so a drifting
   machine changes the ratio of their times.
3. Presets behind the smallest may have trees from a lookup, whose expected tokens are known before
   they run (`Lookup.expected`). Such a tree runs instead where its tokens are worth more, over its
   time at the average rate.
4. The time that trees have won or lost against cycles without one is added up, with a small
   allowance; what a drafter reads after a rest counts as lost. While the sum is negative, no tree
   is grown, whatever is expected of it.
5. A process starts from the measurements of earlier ones (remembered.py). Where these say that no
   tree pays, costs count as little as the rule of thumb, and a probe comes early: the machine may
   have been loaded, which nothing else would show. The first process has the rules of thumb and the
   acceptance measured in the head's training; cycles without a tree set its pace.

Trade-off: one preset for the whole batch, chosen on the host. The choice never changes a token.
Cycles of other numbers of sequences have other costs, which are learnt apart; the rest goes along.
Not here: the cycles of the presets (decode.py), and a drafter at rest (deferred.py).
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode import CycleResult
from drafters import Drafter
from drafts.deferred import LazyDrafter, read_skipped
from drafts.presets import PresetPolicy, lookup_of
from drafts.remembered import file_of, recall, remember
from files.io import read_json
from files.rank import this_rank
from run.engine import Engine
from run.methods import source_of
from run.observer import View
from run.options import DEPTH

# weight that a mean keeps per cycle; the means of accepted tokens fade once per sequence
FADE = 1 - 1 / 128
# least share of a cycle's deviation that is attributed to the machine's pace
PACE_GAIN = 1 / 16
# weight of the rule of thumb for accepted tokens (cycles of one sequence)
PRIOR_WEIGHT = 16
# weight of the rule of thumb for costs (cycles)
COST_WEIGHT = 0.5
# greatest weight of remembered measurements (cycles, tokens); costs never fade below it
RECALLED = 8
# initial share of missed tokens, about as published for EAGLE-1
MISS = 0.25
# least share of hits that misses are learnt by
LEAST_HIT = 0.05
# weight of MISS (tokens)
MISS_WEIGHT = 2
# initial cost of a further node, by weight format, between those with AVX-512 and AVX2
# (benchmarks/RESULTS.md, a pass over n rows)
NODE = {"none": 0.1, "int8": 0.15, "int4": 0.25, "blocks": 0.18}
# further nodes of the tree whose cost counts as guessed
GUESSED_NODES = 3
# weight of a token per cost of 1, the rate of the first cycles
AVERAGE_WEIGHT = 3.0
# factor on the price of a lookup's tree, whose expected tokens were picked as the most of several
PREMIUM = 1.05
# cycles for which a decision holds; without a tree, while no lookup's runs either, it holds longer,
# since a pass over all weights leaves a CPU's caches without the policy's code and data
HOLD = 3
IDLE_HOLD = 12
# budget for the first probe of a process that begins without a tree (cycles without one)
FIRST_BUDGET = 3.0
# share of the time that probes may lose
SHARE = 0.003
# least share of its time that a probe is assumed to lose
LEAST_LOSS = 0.02
# time that trees may lose against cycles without one: at once (as a cost), and as a share
AHEAD = 1.0
AHEAD_SHARE = 0.01


class TreeShape(NamedTuple):
    """The size of a tree that grows best first. A chain has top-k 1, the root alone depth 0."""

    depth: int  # D, drafted levels
    topk: int  # K, children kept per node, and nodes expanded per level
    size: int  # N, nodes, root included


def shape_of(preset: Drafter) -> TreeShape:
    """Return the shape of a preset's tree."""
    return TreeShape(preset.depth, preset.width, preset.size)


class AutoTrees(PresetPolicy):
    """Picks presets by the clock; where none may decide, the largest that makes sense."""

    def __init__(self, lookup: Any = None, kept: Any = None, reach: int | None = None):
        """lookup: an `NgramDrafter`, whose trees follow the smallest preset; None: there is none"""
        super().__init__(kept, reach)
        self.lookup = lookup
        self.sizer: Autosizer | None = None  # of the next cycle
        # by the sequences of a cycle, which the costs of trees depend on; shared by sessions
        self.sizers: dict[int, Autosizer] = {}
        self.new_sizer: Callable[[int], Autosizer] | None = None
        self.waiting = 0  # cycles since the drafter caught up
        self.catching_up_s = 0.0  # of this cycle, on the host's clock

    def on_engine_ready(self, engine: Engine, time_presets: Callable[[], list[float]]) -> AutoTrees:
        """Learn from now on, and from what earlier processes have learnt.

        Only captured cycles are timed. Under the residual rule the tokens follow the tree, and the
        clocks of ranks differ: neither may depend on a time.
        """
        policy = super().on_engine_ready(engine, time_presets)
        if engine.config.accept == "exact" and this_rank().world_size == 1:
            times = time_presets() if engine.captured else ()
            policy.sizers = {}
            policy.new_sizer = partial(sizer_of, engine, times, self.lookup)
            policy._size_for(engine.config.batch_size if engine.captured else 1)
        return policy

    def _size_for(self, rows: int) -> None:
        """Go by the sizer for cycles of so many sequences. Writes: sizer, sizers."""
        if self.new_sizer is None:
            return
        if rows not in self.sizers:
            self.sizers[rows] = self.new_sizer(rows)
        before = self.sizer
        self.sizer = self.sizers[rows]
        if before not in (None, self.sizer):
            self.sizer.go_on_from(before)

    def next_preset(self, view: View, reads_prompt: bool) -> int:
        self._size_for(len(view.rows))
        return super().next_preset(view, reads_prompt)

    def for_session(self) -> AutoTrees:
        policy = super().for_session()
        policy.waiting = 0
        return policy

    def before_step(self, view: View, preset: int) -> None:
        began = time.perf_counter()
        waiting = read_skipped(view, preset, self.waiting)
        self.catching_up_s = 0.0
        if self.sizer and view.has_parts and waiting < self.waiting:  # it has read, on a CPU
            self.catching_up_s = time.perf_counter() - began
            self.sizer.charge(self.catching_up_s)
        self.waiting = waiting

    def pick_reading(self, limit: int) -> int:
        if self.sizer and self.sizer.rests_while_reading:
            return 0
        return limit

    def pick(self, limit: int) -> int:
        if self.sizer is None:
            return super().pick(limit)
        return self.sizer.next(limit, self.expected)

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        super().after_cycle(result, copied, view)
        if self.sizer:
            live = result.live
            accepted = sum(result.length[seq] for seq in live) / len(live)
            seconds = result.seconds - self.catching_up_s
            self.sizer.observe(result.preset, accepted, seconds, len(live))

    def table(self, ran: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        busiest = max(self.sizers.values(), key=lambda sizer: sizer.cycles, default=None)
        return busiest.table(ran) if busiest else []


def sizer_of(engine: Engine, timed_s: Sequence[float], lookup: Any, rows: int) -> Autosizer:
    """Build the sizer that chooses among an engine's presets.

    timed_s: seconds of one cycle of each preset, where they were timed
    lookup: an `NgramDrafter`, whose trees are the presets behind the smallest; or None
    rows: sequences of a cycle
    Writes: the user's cache, when the sizer is dropped or the process ends.
    """
    engine = replace(engine, config=replace(engine.config, batch_size=rows))
    file = file_of(engine)
    shapes = [shape_of(preset) for preset in engine.presets]
    rates = lookup.rates if lookup else None
    known = None
    if file:
        known = CostModel.parse(recall(file), shapes, rates)
    if known is None:
        known = CostModel.fresh(shapes, trained_miss(engine.option("head")))
    if timed_s:
        known.costs = [seconds / timed_s[0] for seconds in timed_s]
        known.seen = [RECALLED] * len(shapes)
    # rows cost little until their arithmetic takes as long as reading the weights, then all of it
    node = rows * NODE[engine.option("quant")]
    node /= math.hypot(1, node)
    # captured prefills read every prompt, because reading and skipping are two graphs
    smallest = engine.presets[0]
    may_skip_prompts = (
        not engine.captured and isinstance(smallest, LazyDrafter) and smallest.may_skip
    )
    names = [preset.name for preset in engine.presets]
    lookups = len(lookup.sizes) if lookup else 0
    sources = [source_of(engine, preset) for preset in range(len(names))]
    sizer = Autosizer(shapes, known, node, names, may_skip_prompts, lookups, sources)
    if known.rates:
        rates.copy_(torch.tensor(known.rates).view_as(rates))
    pool = engine.free
    for buffers in pool:  # of warm-ups
        state = lookup_of(buffers.state.drafter_state)
        if state is not None:
            state.outcomes.copy_(rates)
    if file:
        weakref.finalize(sizer, _save, file, known, asdict(known), rates, pool)
    return sizer


# -------------------------------------------------------------------------------- rules of thumb


def accepted_of(shape: TreeShape, miss: float) -> float:
    """Estimate the accepted tokens of a tree, the bonus not counted.

    miss: share of tokens that the levels of a chain miss

    With k children per node, a level's hits are those of a chain to the power k^-0.4. This rule of
    thumb is within 8 % of all measurements on the demo and the stand-ins of 0.5B, greedy and
    sampled (benchmarks/RESULTS.md, which tree pays).
    """
    hit = (1 - miss) ** _power(shape)
    return sum(hit**level for level in range(1, shape.depth + 1))


def _power(shape: TreeShape) -> float:
    """Return the power of a level's hits over those of a chain."""
    children = max(shape.topk, 1)
    if shape.depth > DEPTH:  # a deep tree has as many on few levels
        children = min(children, max((shape.size - 1) // shape.depth, 1))
    return children**-0.4


def cost_of(shape: TreeShape, node: float) -> float:
    """Estimate the cost of a cycle relative to one without a tree.

    node: cost of a further node, in the same unit

    This rule of thumb is within 40 % for trees of 4 to 16 nodes on SmolLM2, with AVX-512 and AVX2,
    in 16, 8 and 4 bits (benchmarks/RESULTS.md, a pass over n rows); a few measured cycles
    outweigh it.
    """
    return 1 + node * (shape.size - 1)


def trained_miss(head: str) -> float | None:
    """Read the share of tokens that chains of a trained draft head missed on held-out text.

    head: directory of the head; may be empty. Heads trained in several runs record `stages`.
    Returns: the share; None where the directory does not record it.
    """
    if not head:
        return None
    try:
        record = read_json(Path(head, "training.json"))
        run = record["stages"][-1] if "stages" in record else record
        row = run["best"] if "best" in run else run["curve"][-1]
        alpha = row["alpha"]
        reached = list(accumulate(alpha, mul))  # probability that a path reaches each level
        miss = 1 - sum(reached) / (1 + sum(reached[:-1]))
    except (ValueError, LookupError, TypeError, ArithmeticError):
        return None
    if not reached or not 0 <= miss <= 1:
        return None
    return miss


# --------------------------------------------------------------------------------------- knowledge


@dataclass
class CostModel:
    """Remembered measurements: fading means and their weights.

    The accepted tokens of a preset depend on the text and are not remembered. The share of misses
    predicts as much about the next text.
    """

    costs: list[float]  # of a cycle at pace 1; in a file and at first, that without a tree is 1
    seen: list[float]  # cycles behind each cost
    miss: float  # share of tokens that the levels of a chain miss
    miss_weight: float  # tokens behind `miss`
    # by length, rank and depth: accepted and tried candidates of a lookup; empty without one
    rates: list[float] = field(default_factory=list)

    @classmethod
    def fresh(cls, shapes: Sequence[TreeShape], miss: float | None = None) -> CostModel:
        """Return the start without memory.

        miss: measured in the head's training; None: a default
        """
        costs = [1.0] * len(shapes)
        seen = [0.0] * len(shapes)
        if miss is None:
            return cls(costs, seen, MISS, MISS_WEIGHT)
        return cls(costs, seen, miss, RECALLED)

    @classmethod
    def parse(
        cls, value: Any, shapes: Sequence[TreeShape], rates: Tensor | None = None
    ) -> CostModel | None:
        """Read remembered measurements, with their weights capped.

        value: any JSON value
        shapes: of the presets
        rates: of the lookup, in their shape; None without one
        Returns: the measurements; None where the value cannot be those of such presets.
        """
        names = [each.name for each in fields(cls)]
        if not isinstance(value, dict) or not value.keys() >= set(names):
            return None
        known = cls(*(value[name] for name in names))
        count = 0 if rates is None else rates.numel()
        sizes = ((known.costs, len(shapes)), (known.seen, len(shapes)), (known.rates, count))
        if not all(isinstance(each, list) and len(each) == size for each, size in sizes):
            return None
        ranges = [(known.miss, 0, 1), (known.miss_weight, 0, 1e6)]
        ranges += [(cost, 0.01, 1e4) for cost in known.costs]
        ranges += [(weight, 0, 1e6) for weight in known.seen + known.rates]
        if not all(type(x) in (int, float) and low <= x <= high for x, low, high in ranges):
            return None  # no NaN is in a range
        known.seen = [min(weight, RECALLED) for weight in known.seen]
        known.miss_weight = min(known.miss_weight, RECALLED)
        scales = [min(1.0, RECALLED / max(tried, RECALLED)) for tried in known.rates[1::2]]
        known.rates = [weight * scales[i // 2] for i, weight in enumerate(known.rates)]
        return known


def _save(
    file: Path, known: CostModel, before: dict[str, Any], rates: Tensor | None, pool: list[Any]
) -> None:
    """Remember the measurements if they differ from `before`.

    rates: that lookups started from; pool: of buffers
    """
    if rates is not None and pool:
        every = [lookup_of(buffers.state.drafter_state).outcomes for buffers in pool]
        learnt = torch.cat(every)  # [B of all buffers, M, K, D, 2]
        learnt = learnt[(learnt != rates).flatten(1).any(1)]  # of sequences that decoded
        if len(learnt):
            known.rates = learnt.mean(0).flatten().tolist()
    value = asdict(known)
    if value != before:
        remember(file, value | {"costs": [cost / known.costs[0] for cost in known.costs]})


# ------------------------------------------------------------------------------------------ policy


class Autosizer:
    """Chooses among presets, numbered from the smallest tree, which is the root alone."""

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        known: CostModel,
        node: float,
        names: Sequence[str] = (),
        may_skip_prompts: bool = False,
        lookups: int = 0,
        sources: Sequence[str] = (),
    ):
        """shapes, names, sources of drafts: of the presets

        known: the starting point, updated in place
        node: initial cost of a further node, relative to a cycle without a tree
        may_skip_prompts: True where the smallest preset may leave prompts unread
        lookups: presets behind the smallest whose accepted tokens are known before they run
        """
        self.lookups = range(1, 1 + lookups)
        self.grown = [preset for preset in range(len(shapes)) if preset not in self.lookups]
        self.shapes = shapes
        self.known = known
        self.node = node
        self.names = names
        self.sources = sources or names
        self.may_skip_prompts = may_skip_prompts
        self.accepted = [0.0] * len(shapes)  # fading means, the bonus not counted
        self.weights = [0.0] * len(shapes)  # cycles of one sequence behind each mean
        self.gained = AVERAGE_WEIGHT  # fading sums of tokens, and of the costs of their cycles
        self.spent = AVERAGE_WEIGHT
        self.pace = 0.0  # seconds of a cycle that costs 1
        self.cycles = 0  # cycles that the pace was measured by
        self.budget = 0.0  # cost that a probe may lose
        self.ahead = AHEAD  # cost that trees have won, this at most
        self.last = -1  # preset of the last observed cycle
        self.left = 0  # cycles until the next decision
        self.noted: list[tuple[int, float, float, int]] = []  # cycles, not learnt from yet
        self._decide()
        if self.best == 0:
            self.budget = FIRST_BUDGET * (known.seen[0] > 0)
            known.seen = [min(weight, COST_WEIGHT) for weight in known.seen]
        if known.seen[0] == 0:  # the pace is set without a tree
            self.running = 0
            self.left = HOLD
        self._price()

    def go_on_from(self, other: Autosizer) -> None:
        """Take what does not depend on the number of sequences from the sizer of the last cycles.

        A cost that was never measured follows from the other's, by the rule of thumb.
        Writes: means, sums, the costs and misses of `known`.
        """
        other._learn_noted()
        self._learn_noted()
        self.accepted = [*other.accepted]
        self.weights = [*other.weights]
        self.gained = other.gained
        self.spent = other.spent
        self.budget = other.budget
        self.ahead = other.ahead
        known = self.known
        theirs = other.known
        known.miss = theirs.miss
        known.miss_weight = theirs.miss_weight
        for preset, seen in enumerate(theirs.seen):
            if seen and preset and not known.seen[preset]:
                further = theirs.costs[preset] / theirs.costs[0] - 1
                known.costs[preset] = known.costs[0] * (1 + further * self.node / other.node)
                known.seen[preset] = min(seen, COST_WEIGHT)
        if self.pace:
            self.left = 0  # decide anew

    def charge(self, seconds: float) -> None:
        """Count time that only trees need as lost. Writes: ahead, budget."""
        if self.pace:
            self.ahead -= seconds / self.pace
            self.budget -= seconds / self.pace

    def tokens(self, preset: int) -> float:
        """Return the expected tokens per sequence and cycle, the bonus included."""
        weight = self.weights[preset]
        prior = accepted_of(self.shapes[preset], self.known.miss)
        return 1 + (weight * self.accepted[preset] + PRIOR_WEIGHT * prior) / (weight + PRIOR_WEIGHT)

    def cost(self, preset: int) -> float:
        """Return the expected cost of a cycle: its seconds at pace 1."""
        known = self.known
        seen = known.seen[preset]
        prior = known.costs[0] * cost_of(self.shapes[preset], self.nodes[preset in self.lookups])
        return (seen * known.costs[preset] + COST_WEIGHT * prior) / (seen + COST_WEIGHT)

    def _node(self, presets: Sequence[int]) -> float:
        """Return the cost of a further node of some presets, relative to a cycle without a tree.

        It is the least-squares slope of the measured costs, the first guess counted as one.
        """
        known = self.known
        weight = COST_WEIGHT * GUESSED_NODES**2
        total = weight * self.node
        for preset in presets:
            nodes = self.shapes[preset].size - 1
            further = max(known.costs[preset] / known.costs[0] - 1, 0.0)
            total += known.seen[preset] * nodes * further
            weight += known.seen[preset] * nodes**2
        return total / weight

    @property
    def rests_while_reading(self) -> bool:
        """Return whether a drafter at rest may leave prompts unread."""
        return self.may_skip_prompts and self.best == 0

    def next(self, limit: int, expected: Sequence[float] | None = None) -> int:
        """Return the preset of the next cycle.

        limit: the largest useful preset
        expected: accepted tokens per sequence that the smallest presets can expect, where they are
            known
        """
        if limit < len(self.shapes) - 1:
            return min(self.best, limit)
        if self.left == 0:
            self._learn_noted()
            self._decide()
            self._price()
        self.left -= 1
        if expected is None:
            return self.running
        pick = self.running
        most = self.gain
        for preset, price in self.prices:
            gain = expected[preset] - price
            if gain > most and expected[preset] > 0:
                pick = preset
                most = gain
        if pick:
            self.left = min(self.left, HOLD - 1)
        return pick

    def _price(self) -> None:
        """Set the running preset's gain and the lookups' prices, which hold until a decision.

        Both in tokens: a cycle's price is its time at the average rate, its gain is the accepted
        tokens beyond that.
        """
        worth = self.gained / self.spent
        running = self.running
        self.gain = self.tokens(running) - 1 - worth * self.costs[running]
        price = PREMIUM * worth
        self.prices = [(preset, price * self.costs[preset]) for preset in self.lookups]

    def _decide(self) -> None:
        """Set the best preset by expected rate, and the running one: the best or a probe.

        Writes: the costs, too.
        """
        grown = self.grown
        # cost of a further node: of grown trees, and of lookups
        self.nodes = (self._node(grown), self._node(self.lookups))
        self.costs = [self.cost(preset) for preset in range(len(self.shapes))]
        if self.ahead < 0:
            self.best = self.running = 0
            self.left = IDLE_HOLD
            return
        measured = [place for place, preset in enumerate(grown) if self.known.seen[preset]]
        new = max(measured, default=0) + 1  # the next larger tree than any that was measured
        costs = [self.costs[preset] for preset in grown[: new + 1]]
        rates = [self.tokens(preset) / cost for preset, cost in zip(grown, costs)]
        best = rates.index(max(rates))
        self.best = grown[best]
        self.running = self.best
        others = {0, best - 1, best + 1} - {best, -1, len(rates)}
        losses = {}
        for place in sorted(others):
            share = max(1 - rates[place] / rates[best], LEAST_LOSS)
            losses[place] = HOLD * costs[place] * share
        # prefer a probe that loses little and has run for few cycles
        probe = min(
            losses,
            key=lambda place: losses[place] * (1 + self.known.seen[grown[place]]),
            default=best,  # there is only one preset
        )
        if self.budget > losses.get(probe, 0.0):
            self.running = grown[probe]
            self.budget = 0.0
        self.left = HOLD if self.running else IDLE_HOLD

    def observe(self, preset: int, accepted: float, seconds: float, sequences: int = 1) -> None:
        """Note a cycle, which the next decision learns from.

        accepted: mean length over the decoding sequences, the bonus not counted
        sequences: their number
        """
        self.noted.append((preset, accepted, seconds, sequences))
        if len(self.noted) == IDLE_HOLD:
            self._learn_noted()

    def _learn_noted(self) -> None:
        for cycle in self.noted:
            self._learn(*cycle)
        self.noted.clear()

    def _learn(self, preset: int, accepted: float, seconds: float, sequences: int) -> None:
        known = self.known
        cost = self.costs[preset]
        self.budget += SHARE * cost
        self.ahead += AHEAD_SHARE * cost
        if preset:
            self.ahead += (1 + accepted) * self.costs[0] - cost
        self.ahead = min(self.ahead, AHEAD)
        self.gained = FADE * self.gained + 1 + accepted
        self.spent = FADE * self.spent + cost
        fade = FADE**sequences
        self.weights = [fade * weight for weight in self.weights]
        known.seen = [
            seen if seen <= RECALLED else max(FADE * seen, RECALLED) for seen in known.seen
        ]
        self.weights[preset] += sequences
        change = sequences * (accepted - self.accepted[preset])
        self.accepted[preset] += change / self.weights[preset]
        self.pace = self.pace or seconds / cost
        # the first cycle after a change is slow; with lookups there is one after nearly every cycle
        if preset == self.last or self.lookups:
            self._time(preset, seconds, cost)
            self.costs[preset] = self.cost(preset)
        self.last = preset
        shape = self.shapes[preset]
        if shape.depth and preset not in self.lookups:
            # a sequence's path ends with the first token that is missed; a grammar's forced tokens
            # may reach below the tree
            missed = min(max(shape.depth - accepted, 0.0), 1.0)
            tried = accepted + missed
            known.miss_weight = fade * known.miss_weight + sequences * tried
            power = _power(shape)
            hit = max(1 - known.miss, LEAST_HIT)
            deviation = missed - tried * (1 - hit**power)
            slope = power * hit ** (power - 1)  # misses at this width per miss of a chain
            known.miss += sequences * deviation / (slope * known.miss_weight)
            known.miss = min(max(known.miss, 0.0), 1.0)

    def _time(self, preset: int, seconds: float, cost: float) -> None:
        """Learn from a cycle's time. cost: the expected one"""
        known = self.known
        seen = known.seen[preset]
        self.cycles += 1
        deviation = min(seconds / (self.pace * cost), 2.0) - 1  # caps the effect of a slow outlier
        sure = seen / (seen + COST_WEIGHT)  # a guessed cost carries no information on the pace
        self.pace *= 1 + sure * max(PACE_GAIN, 1 / self.cycles) * deviation
        known.seen[preset] += 1
        known.costs[preset] += (cost * (1 + deviation) - known.costs[preset]) / known.seen[preset]

    def table(self, ran: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Report per preset its cycles, and the expected and measured time of one.

        ran: the preset and the seconds of each cycle
        """
        self._learn_noted()
        rows = []
        for preset, (name, source) in enumerate(zip(self.names, self.sources)):
            seconds = [time for number, time in ran if number == preset]
            predicted_ms = 1e3 * self.pace * self.cost(preset)
            rows.append(
                {
                    "tree": name,
                    "source": source,
                    "cycles": len(seconds),
                    "expected_tokens": self.tokens(preset),
                    "predicted_ms": predicted_ms or None,  # 0 before the first cycle
                    "measured_ms": 1e3 * statistics.mean(seconds) if seconds else None,
                }
            )
        return rows
