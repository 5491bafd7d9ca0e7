"""`--tree auto`: trees by value. A level is drafted, a node verified, while it is worth its cost.

1. Costs are measured once per machine, model and number of sequences, and kept in a file: seconds
   of a pass over N rows, of a drafted level, and of the rest of a cycle. Decoding corrects them.
2. A second is worth the tokens that this decode has brought per second so far.
3. While a tree grows (`Growth`), the host reads the drafter's confidence in every path. A level is
   drafted while the tokens that its nodes are expected to add are worth more than it costs. Of the
   scored nodes the best are verified, as many as make tokens less costs the most; none is vanilla.
4. Acceptance by depth and rank, all that is learnt about texts, corrects the confidence. It begins
   as the head's training has recorded it.
5. Captured cycles, and drafters without confidence, have trees of fixed sizes (presets), whose
   expected tokens follow from the acceptance; a lookup knows its own (`Lookup.expected`).
6. While no tree pays, a drafter whose trees grow by value rests: it reads prompts alone, and is
   tried again now and then, behind a pass over the last tokens that it missed.

Source: CaDDTree (arXiv 2606.01813); llama.cpp's --draft-p-min cuts a draft by confidence alone.
The choice never changes a token. Not here: growing (drafters.py), cycles of presets (decode.py).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import sampling
from decode import CycleResult, DecodeState
from draft_tree import (
    Candidates,
    DraftTree,
    DynamicTree,
    Frontier,
    Level,
    StaticTree,
    candidates,
)
from drafters import Drafter, DrafterUpdate, DraftInputs, RootOnly, TreeDrafter
from drafts.ngram_estimates import Lookup
from files.io import StatusLine, read_json, replace_file
from files.machine import describe_cpu
from files.rank import this_rank
from options import log_note, private_folder
from reference import Backend
from run.engine import Engine
from run.methods import source_of
from run.observer import DraftMethod, Observer, View
from run.resolved import tree_options
from runtime import copy_into, replace_fields

GAIN = 1 / 16  # of decaying factors: they follow a machine within 0.1 s, in cycles of 5 ms
MEMORY = 32  # tokens that acceptance follows, the record too: it varies by 0.1 between prompts
HIT = 0.75  # share of tokens that a chain of a head without a record hits: EAGLE-1 (2401.15077)
TRIALS = 4  # trees of a trial, with which every session begins
REST = 64  # cycles of rest between trials, times the sequences: each adds to a trial's cost
ROUNDS = 3  # of measurements: a slow moment of a shared machine lasts less than two (4 ms slices)
STEADY = 1.25  # slowest over fastest vanilla cycle; beyond, other programs were measured, too

# trees of captured cycles, levels, children, nodes: CUDA pads to 16, 32 or 64 nodes
SHAPES = ((3, 1, 4), (5, 3, 8), (5, 4, 16), (6, 8, 32))


# ------------------------------------------------------------------------------------------- costs


def by_rows(points: Sequence[Sequence[float]], most: int) -> list[float]:
    """Interpolate measurements of rows and seconds: return the seconds of 0 to `most` rows."""
    rows = sorted({int(n) for n, _ in points})
    least = [min(s for n, s in points if n == each) for each in rows]
    least = [*accumulate(least, max)]  # more rows take no less time, but for noise
    if len(rows) > 1 and most > rows[-1]:
        slope = (least[-1] - least[-2]) / (rows[-1] - rows[-2])
        least.append(least[-1] + slope * (most - rows[-1]))
        rows.append(most)
    return np.interp(range(most + 1), rows, least).tolist()


class Costs:
    """Seconds of a cycle's parts on one machine, as `measure` returns them, corrected later."""

    def __init__(self, measured: dict[str, list], presets: Sequence[Drafter], batch: int):
        """Raises: ValueError, LookupError, TypeError for other values."""
        most = batch * max(preset.size for preset in presets)
        self.verify = by_rows(measured["verify"], most)  # a pass of the target, by rows in all
        self.level = by_rows(measured["level"], most)  # a drafted level behind the first, likewise
        self.rest = [float(seconds) for seconds in measured["rest"]]  # all else, by preset
        # seconds of cycles over those above, without a tree and with one: fading means, in which
        # the measurements count as a trial
        self.ratios = [1.0, 1.0]
        self.weights = [float(TRIALS)] * 2  # cycles in them
        every = (*self.verify, *self.level, *self.rest)
        if (
            len(self.rest) != len(presets)
            or min(self.rest) <= 0
            or not all(0 <= seconds < 1e6 for seconds in every)
        ):
            raise ValueError("these are no costs of such presets")

    @property
    def factor(self) -> float:
        """By which trees cost more than was measured, where cycles without one cost as much."""
        return self.ratios[1] / self.ratios[0]

    def learn(self, has_tree: bool, ratio: float) -> None:
        """Learn from a cycle. ratio: of its seconds to the costs above. Writes: ratios, weights."""
        self.weights[has_tree] = min(self.weights[has_tree] + 1, 1 / GAIN)
        error = min(ratio, 2.0) - self.ratios[has_tree]  # a slow outlier counts as twice
        self.ratios[has_tree] += error / self.weights[has_tree]


def measure(engine: Engine, time_cycle: Callable, growth: Growth | None) -> tuple[dict, bool]:
    """Measure the costs of an engine's presets. time_cycle: of run/warm_up.py, for the engine

    Returns: the costs, and whether the machine kept its pace meanwhile.
    """
    batch = engine.batch_size
    presets = engine.presets
    last = len(presets) - 1
    plans: list[tuple] = [(number, None) for number in range(last + (growth is None))]
    levels = 1
    if growth:  # a tree by value has these levels, width and nodes
        levels = min(growth.tree.depth, 4)
        shapes = ((1, 1, 1), (1, 1, 3), (levels, 1, 7), (levels, growth.tree.topk, 15))
        plans += [(last, shape) for shape in shapes]
    times: dict[tuple, list] = {plan: [] for plan in plans}
    rows = {}
    began = time.perf_counter()
    status = StatusLine()
    with status:
        for plan in ROUNDS * plans:  # in turn, so that a slow moment meets all alike
            if times[plan] and time.perf_counter() - began > 1:  # a large model: one round
                break
            status.show(f"[measuring the costs of drafts: {len(rows) + 1} of {len(plans)}]")
            if growth:
                growth.forced = plan[1]
            times[plan].append(time_cycle(plan[0]))
            rows[plan] = batch * (1 + growth.nodes if plan[1] else presets[plan[0]].size)
    times[plans[0]].append(time_cycle(0))
    vanilla = [seconds for seconds, _, _ in times[plans[0]]]
    least = {plan: [*map(min, zip(*every))] for plan, every in times.items()}
    verify = [(rows[plan], verify_s) for plan, (_, _, verify_s) in least.items()]
    if batch > 1 and engine.has_parts:
        verify.append((presets[0].size, time_cycle(0, 1).verify_s))
    rest = [max(seconds - verify_s, 1e-6) for seconds, _, verify_s in least.values()]
    level = [(batch, 0.0)]
    if growth:
        growth.forced = None
        first, _, narrow, wide = (draft_s for _, draft_s, _ in [*least.values()][last:])
        further = [max(draft - first, 0.0) / max(levels - 1, 1) for draft in (narrow, wide)]
        level = [*zip((batch, batch * growth.tree.topk), further)]
    steady = max(vanilla) < STEADY * min(vanilla)
    return {"verify": verify, "level": level, "rest": rest[: last + 1]}, steady


# options that change the time of a cycle
OPTIONS = (
    "random", "draft", "quant", "group_size", "quant_draft", "dtype", "compile", "batch_size",
    "children", "kv",
)  # fmt: skip


def file_of(engine: Engine) -> Path | None:
    """Return the file of the costs of an engine's presets; None where none can be kept."""
    config = engine.config
    paths = (config.checkpoint, engine.option("head"), config.draft_checkpoint)
    identity = []  # of the models: values that change with their weights
    try:
        for real in (Path(os.path.realpath(path)) for path in paths if path):
            for file in sorted(real.iterdir()) if real.is_dir() else [real]:
                status = file.stat()
                identity.append((str(file), status.st_size, status.st_mtime_ns))
        folder = private_folder("trees")
    except OSError as error:
        log_note(f"--tree auto keeps no costs for the next start: {error.strerror}")
        return None
    options = [engine.option(name) for name in OPTIONS]
    names = [preset.name for preset in engine.presets]
    machine = (describe_cpu(), torch.get_num_threads(), config.temperature > 0)
    key = json.dumps([identity, options, names, machine])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def costs_of(engine: Engine, time_cycle: Callable, growth: Growth | None) -> Costs:
    """Return the costs of an engine's presets, which an earlier process may have measured.

    Captured cycles have just run, and are measured anew. Writes: a file with them.
    """
    file = None if engine.captured else file_of(engine)
    use = (engine.presets, engine.batch_size)
    if file is None:
        return Costs(measure(engine, time_cycle, growth)[0], *use)
    with suppress(OSError, ValueError, LookupError, TypeError):
        return Costs(read_json(file), *use)
    measured, steady = measure(engine, time_cycle, growth)
    if not steady:  # the next start measures again
        return Costs(measured, *use)
    text = json.dumps(measured) + "\n"
    try:
        replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        log_note(f"--tree auto cannot write {file}: {error.strerror}")
    return Costs(measured, *use)


# -------------------------------------------------------------------------------------- acceptance


def trained_alpha(head: str) -> list[float]:
    """Read the acceptance of a head by depth, on chains of held-out text; without a record, `HIT`.

    head: its directory; "" for none. Heads that were trained in several runs record `stages`.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):
        record = read_json(Path(head, "training.json"))
        run = record["stages"][-1] if "stages" in record else record
        row = run["best"] if "best" in run else run["curve"][-1]
        alpha = [float(share) for share in row["alpha"]]
        if alpha and all(0 < share <= 1 for share in alpha):
            return alpha
    return [HIT]


class Acceptance:
    """How often a node is accepted whose parent is, by depth and rank; older outcomes fade."""

    def __init__(self, alpha: Sequence[float], depth: int = 64, ranks: int = 64):
        """alpha: of the best child by depth; the last holds for all deeper ones

        Of the tokens that better ranks miss, a rank is given half of what the one before is.
        """
        self.best = [alpha[min(d, len(alpha) - 1)] for d in range(depth)]  # mean confidence
        hits = [[hit, *((1 - hit) / 2**k for k in range(2, ranks + 1))] for hit in self.best]
        self.corrections = [[1.0] * ranks for _ in hits]  # factors on the confidence
        # by depth and rank: tried, accepted, expected by confidence
        self.sums = [[[MEMORY, MEMORY * hit, MEMORY * hit] for hit in row] for row in hits]

    def rate(self, depth: int, rank: int) -> float:
        """Return the share that is accepted."""
        tried, accepted, _ = self.sums[depth][rank]
        return accepted / tried

    def learn(self, parents: list, valid: list, values: list | None, path: list) -> None:
        """Count the children of the accepted nodes of a tree. path: these nodes, root first"""
        for depth, node in enumerate(path):
            rank = 0
            for child in range(node + 1, len(parents)):
                if parents[child] != node or not valid[child]:
                    continue
                expected = self.rate(depth, rank)
                if values is not None:
                    expected = math.exp(values[child] - values[node])
                sums = self.sums[depth][rank]
                for place, new in enumerate((1.0, float(child in path), expected)):
                    sums[place] += new - sums[place] / MEMORY
                self.corrections[depth][rank] = sums[1] / sums[2]
                rank += 1

    def expected(self, preset: PresetDrafter) -> float:
        """Return the tokens that a tree of fixed shape can expect to be accepted."""
        rates = ([self.rate(depth, rank) for depth, rank in enumerate(p)] for p in preset.paths)
        return sum(map(math.prod, rates))


def likeliest(tree: Drafter) -> tuple[tuple[int, ...], ...]:
    """Return the rank paths of the likeliest nodes of a tree that grows, by `HIT`."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-HIT, (0,))]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < tree.size - 1:
        value, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < tree.depth:
            heapq.heappush(heap, (value * HIT, (*path, 0)))
        if path[-1] + 1 < tree.width:
            share = 0.5 if path[-1] else (1 - HIT) / 4 / HIT
            heapq.heappush(heap, (value * share, (*path[:-1], path[-1] + 1)))
    return tuple(paths)


# ------------------------------------------------------------------------------------------ growth


class Growth:
    """Decides, while a tree grows, which nodes pay. Without a rate the whole tree grows."""

    def __init__(self, tree: DynamicTree):
        self.tree = tree
        self.costs: Costs | None = None
        self.acceptance = Acceptance([HIT])
        self.rate = 0.0  # tokens per second of all sequences: the worth of a second
        self.live: Sequence[bool] = ()  # of the sequences that run, those that decode
        self.limit = math.inf  # drafted tokens at most
        self.forced: tuple[int, int, int] | None = None  # levels, width, nodes: to be measured
        self.seconds = 0.0  # of the levels behind the first
        self.chosen = 2.0  # nodes of a tree, a fading mean

    def begin(self, inputs: DraftInputs, backend: Backend) -> None:
        """Begin a tree."""
        self.inputs = inputs
        self.backend = backend
        self.noise_rows = [] if inputs.noise is None else [*inputs.noise.split(1, 1)]
        batch = len(inputs.text.pos)
        self.above = [[(0.0, 1.0)]] * batch  # (-value, probability) of the frontier's nodes
        # (-value, probability, depth) of all scored nodes
        self.scored: list[list[tuple[float, float, int]]] = [[] for _ in range(batch)]
        self.seconds = 0.0  # of the levels behind the first
        self.depth = 0  # levels that were scored
        self.nodes = 0  # that were chosen

    def plan(self) -> Iterator[Level]:
        """Return the plans of the levels, each behind those that grew, for as long as any pays."""
        candidates = 0
        slots = 0
        for number, level in enumerate(self.tree.plan):
            width = len(self.above[0])
            count = min(level.count, level.k * width) if number + 1 < self.limit else 0
            places = {"first_candidate": candidates, "first_slot": slots}
            yield replace_fields(level, count=count, **places)
            candidates += level.k * width
            slots += len(self.above[0])
            if not self.goes_on:
                return

    def cut(self, candidates: Candidates, frontier: Frontier | None) -> Frontier | None:
        """Return the nodes of a frontier whose children pay; None where none do."""
        depth = self.depth
        self.depth += 1
        values = candidates.values.tolist()
        k = len(values[0]) // len(self.above[0])
        correction = self.acceptance.corrections[depth]
        begin = len(self.scored[0])
        for row, above, scored in zip(values, self.above, self.scored):
            for i, value in enumerate(row):
                parent, chance = above[i // k]
                own = math.exp(value + parent) * correction[i % k] if chance else 0.0
                scored.append((-value, chance * min(own, 1.0), depth + 1))
        self._learn_best(depth, begin)
        width = 0 if frontier is None else frontier.index.shape[1]
        self.goes_on = False
        if not width:
            return None
        nodes = zip(self.scored, frontier.index.tolist())
        self.above = [[scored[place][:2] for place in row] for scored, row in nodes]
        pays = self._count_paying(depth + 1, width)
        self.above = [row[:pays] for row in self.above]
        if pays < width:
            frontier = Frontier(*(part[:, :pays].contiguous() for part in frontier))
        self.goes_on = pays > 0
        return frontier if pays else None

    def _learn_best(self, depth: int, begin: int) -> None:
        """Learn how sure the drafter is of the best node of a level. begin: of its nodes"""
        best = self.acceptance.best
        for scored, above, decodes in zip(self.scored, self.above, self.live):
            if decodes and above[0][1]:
                most = max(chance for _, chance, _ in scored[begin:])
                best[depth] += GAIN * (min(most / above[0][1], 1.0) - best[depth])

    def _count_paying(self, depth: int, width: int) -> int:
        """Return how many nodes of the frontier pay for a level below. Writes: seconds."""
        if self.forced is not None:
            return min(self.forced[1], width) if depth < self.forced[0] else 0
        if not self.rate:
            return width
        batch = len(self.above)
        verify = self.costs.verify
        level = self.costs.level
        chosen = min(int(self.chosen), self.tree.size - 2)
        row = verify[batch * (chosen + 2)] - verify[batch * (chosen + 1)]
        rows = [row for row, decodes in zip(self.above, self.live) if decodes]
        tokens = 0.0
        gains = [0.0]
        for n in range(width):
            tokens += self.acceptance.best[depth] * sum(row[n][1] for row in rows)
            seconds = level[batch * (n + 1)] + (n + 1) * row
            gains.append(tokens - self.rate * self.costs.factor * seconds)
        pays = max(range(width + 1), key=gains.__getitem__)
        if pays:
            self.seconds += level[batch * pays]
        return pays

    def count(self) -> int:
        """Return how many of the scored nodes are verified, the best ones. Writes: gain."""
        most = int(min(self.tree.size - 1, len(self.scored[0]), self.limit))
        best = [sorted(row)[:most] for row in self.scored]
        self.nodes = most
        if self.forced is not None:
            self.nodes = min(most, self.forced[2])
        elif self.rate:
            batch = len(best)
            verify = self.costs.verify
            rate = self.rate * self.costs.factor
            rows = [row for row, decodes in zip(best, self.live) if decodes]
            tokens = accumulate((sum(row[n][1] for row in rows) for n in range(most)), initial=0.0)
            costs = [rate * verify[batch * (n + 1)] for n in range(most + 1)]
            gains = [added - cost for added, cost in zip(tokens, costs)]
            self.nodes = max(range(most + 1), key=gains.__getitem__)
            # tokens that the tree is expected to bring beyond its costs
            vanilla = self.rate * (verify[batch] + self.costs.rest[0])
            self.gain = gains[self.nodes] - rate * (self.seconds + self.costs.rest[-1]) + vanilla
            self.chosen += GAIN * (self.nodes - self.chosen)
        self.depth = max((node[2] for row in best for node in row[: self.nodes]), default=0)
        return self.nodes

    def noise_at(self, level: int) -> Tensor:
        """Return the noise of the draws of a level's nodes, [B, 1, V], which may be made now."""
        inputs = self.inputs
        while len(self.noise_rows) <= level:
            draws = inputs.draws + len(self.noise_rows)
            row = (inputs.sampling, draws, 1, inputs.noise.shape[2])
            self.noise_rows.append(sampling.gumbel(*row, backend=self.backend))
        return self.noise_rows[level]

    def noise(self) -> Tensor | None:
        """Return the noise of the draws at all depths of the tree, [B, R, V]."""
        if not self.noise_rows:
            return None
        if self.depth < self.inputs.noise.shape[1]:
            return self.inputs.noise
        self.noise_at(self.depth)
        return torch.cat(self.noise_rows, 1)


# ----------------------------------------------------------------------------------------- presets


class PresetDrafter(Drafter):
    """A drafter beside others over the same state, whose trees are smaller."""

    smaller: tuple[Drafter, ...] = ()  # smallest tree first
    paths: tuple[tuple[int, ...], ...] = ()  # rank paths of its tree

    @property
    def presets(self) -> tuple[Drafter, ...]:
        """All presets, smallest tree first; the last is this one."""
        return (*self.smaller, self)

    @property
    def name(self) -> str:
        """The name of its tree in a report."""
        return "none" if self.size == 1 else f"tree of {self.size}"

    def resolved_options(self) -> dict[str, Any]:
        """Return the settings by option name."""
        return {"tree_size": self.size, "tree_depth": self.depth}

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        if self.size == 1:
            return self.backend.root_tree(inputs.text)
        return self.propose_nodes(state, inputs)

    def propose_nodes(self, state: Any, inputs: DraftInputs) -> DraftTree:
        """Propose a tree of more nodes than the root."""
        raise NotImplementedError


def with_smaller(
    make: Callable[[int], PresetDrafter], usual: Sequence[int], size: int
) -> PresetDrafter:
    """Make a drafter with presets of the usual sizes below its own, and one without a tree.

    make: of a number of nodes, root included; size: 0: the largest usual one
    """
    size = size or usual[-1]
    drafter = make(size)
    drafter.smaller = tuple(make(each) for each in (1, *usual) if each < size)
    return drafter


class AutoState(NamedTuple):
    """The states of a drafter, and of the lookup beside it."""

    own: Any  # with its `length`, [B] int64, tokens that it has read
    lookup_state: Any = ()


class AutoPreset(PresetDrafter):
    """A drafter beside a lookup: one of them proposes the tree, or neither does."""

    def __init__(self, drafter: TreeDrafter, grower: Drafter, lookup: PresetDrafter | None):
        """grower: proposes the tree"""
        self.drafter = drafter
        self.grower = grower
        self.lookup = lookup or RootOnly()
        self.depth = grower.depth
        self.size = grower.size
        self.width = grower.width
        self.layers = drafter.layers
        self.aux_layers = drafter.aux_layers
        self.keeps_nodes = drafter.keeps_nodes
        self.growth: Growth | None = None
        self.rests = False  # the drafter does not read the tokens of its cycles
        self.source = "lookup" if isinstance(grower, PresetDrafter) else ""
        if isinstance(grower, TreeDrafter):
            self.growth = grower.growth
            self.noise_rows = 0 if grower.growth is None else 2  # as many as most trees need
            is_fixed = isinstance(grower.tree, StaticTree)
            self.paths = grower.tree.paths if is_fixed else likeliest(grower)

    @property
    def name(self) -> str:
        name = self.grower.name
        return name if self.growth is None else f"by value, up to {name}"

    def use(self, backend: Backend) -> None:
        super().use(backend)
        for inner in (self.drafter, self.grower, self.lookup):
            inner.use(backend)

    def fuse(self, enable: bool) -> None:
        self.drafter.fuse(enable)

    def method(self) -> DraftMethod:
        policy = ByValue(self.lookup, self.drafter.reach, self.growth)
        names = [preset.name for preset in self.presets]
        options = tree_options(self.drafter) | {"tree": "auto", "trees": names}
        return DraftMethod(self.presets, options, policy=policy)

    def init(self, batch: int, slots: int) -> AutoState:
        return AutoState(self.drafter.init(batch, slots), self.lookup.init(batch, slots))

    def extend(self, state: AutoState, update: DrafterUpdate) -> AutoState:
        own = state.own if self.rests else self.drafter.extend(state.own, update)
        return AutoState(own, self.lookup.extend(state.lookup_state, update))

    def rewind(self, state: AutoState, length: Tensor) -> AutoState:
        """Forget all but the first `length` tokens, of which it may have missed the last."""
        own = self.drafter.rewind(state.own, torch.minimum(length, state.own.length))
        return AutoState(own, self.lookup.rewind(state.lookup_state, length))

    def propose(self, state: AutoState, inputs: DraftInputs) -> DraftTree:
        if self.source:
            return self.grower.propose(state.lookup_state, inputs)
        if self.growth is None:
            return self.grower.propose(state.own, inputs)
        self.growth.begin(inputs, self.backend)
        tree = self.grower.propose(state.own, inputs)
        return replace_fields(tree, noise=self.growth.noise())

    def catch_up(self, features: Tensor, state: DecodeState) -> None:
        """Let the drafter read the tokens that it missed, or the last of them. Writes: its cache.

        features: [B, R, F], of the last R tokens of every sequence that has decided so many since
        """
        own = state.drafter_state.own
        most = features.shape[1]
        begin = torch.maximum(own.length, state.pos - most)
        # of a sequence that is done, or whose prompt is being read, none
        begin = torch.where(state.done, own.length, begin)
        count = torch.where(state.done, 0, state.pos - begin)
        steps = torch.arange(most + 1, device=count.device)
        at = (begin[:, None] + steps).clamp(max=state.tokens.shape[1] - 1)  # [B, R + 1]
        behind = (most - count)[:, None] + steps[:most]  # the columns of the missed tokens
        index = behind.clamp(max=most - 1)[:, :, None].expand_as(features)
        update = DrafterUpdate(state.tokens.gather(1, at), features.gather(1, index), count)
        copy_into(own, self.drafter.extend(self.drafter.rewind(own, begin), update))


def beside(
    drafter: TreeDrafter, lookup: PresetDrafter | None = None, grows: bool | None = None
) -> AutoPreset:
    """Return a drafter with presets: no tree, those of a lookup, and trees up to its own.

    grows: whether a tree grows by value; None: on a CPU, where the host need not wait for values
    """
    growers: list[Drafter] = [RootOnly(), *(lookup.presets[1:] if lookup else ())]
    largest = drafter.tree
    grower = drafter.with_tree(largest)
    if grows or (grows is None and drafter.device.type == "cpu"):
        grower.growth = Growth(largest)
    for depth, topk, size in () if grower.growth else SHAPES:
        if drafter.one_pass and topk > 1:  # levels are free
            depth = min(largest.depth, size - 1)
        depth = min(depth, drafter.levels)
        size = min(size, 1 + candidates(depth, topk))
        if depth <= largest.depth and topk <= largest.width and size < largest.size:
            tree = StaticTree.chain(depth) if topk == 1 else DynamicTree(depth, topk, size)
            growers.append(drafter.with_tree(tree))
    preset = AutoPreset(drafter, grower, lookup)
    preset.smaller = tuple(AutoPreset(drafter, each, lookup) for each in growers)
    preset.smaller[0].rests = grower.growth is not None
    return preset


# ------------------------------------------------------------------------------------------ policy


def lookup_of(drafter_state: Any) -> Lookup | None:
    """Return the state of the lookup in a drafter's state, if there is one."""
    state = getattr(drafter_state, "lookup_state", drafter_state)
    return state if isinstance(state, Lookup) else None


@dataclass
class Pace:
    """The tokens and seconds of cycles of one number of sequences."""

    tokens: float  # fading sums
    seconds: float
    # mean of the tokens that trees by value were expected to bring beyond their costs
    gain: float = 0.0
    weight: float = 0.0  # trees in that mean


class ByValue(Observer):
    """Picks presets, and keeps texts. Without costs the largest preset that makes sense runs."""

    def __init__(
        self,
        lookup: Any = None,
        reach: int | None = None,
        growth: Growth | None = None,
        kept: Any = None,
        chooses: bool = True,
    ):
        """Take what the drafters read.

        lookup: an `NgramDrafter` whose trees follow the first preset; another has none
        reach: positions that the drafter can read; None: all
        growth: of the last preset
        kept: `drafts.kept_texts.PastTexts`, which takes the text of every finished turn
        chooses: False: costs do not count
        """
        smaller = lookup.presets if isinstance(lookup, PresetDrafter) else ()
        self.lookups = range(1, len(smaller))
        self.kept = getattr(lookup, "kept", kept)
        self.reach = reach
        self.growth = growth
        self.chooses = chooses
        self.warm = False
        self.engine: Any = None
        self.costs: Costs | None = None
        self.expected: list[float] | None = None  # accepted tokens per preset, where known
        self.read_prompt = False  # since the last cycle
        # of cycles whose tokens the drafter has not read: the first sequence that ran, and features
        # of the tokens, [B', 1, F]
        self.missed: list[tuple[int, Tensor]] = []
        self.rested = 0  # cycles in which no tree paid
        self.trials = TRIALS  # trees that are drafted next, whether or not they pay
        self.paces: dict[int, Pace] = {}  # by sequences of a cycle

    def on_engine_ready(self, engine: Engine, time_cycle: Callable) -> ByValue:
        """Learn from now on; by costs where neither tokens nor ranks may depend on a time."""
        policy = copy(self)
        policy.warm = True
        policy.engine = engine
        if self.chooses and engine.config.accept == "exact" and this_rank().world_size == 1:
            policy.costs = costs_of(engine, time_cycle, self.growth)
            policy.acceptance = Acceptance(trained_alpha(engine.option("head")))
            policy.paces = {}
            if self.growth:
                self.growth.costs = policy.costs
                self.growth.acceptance = policy.acceptance
        return policy

    def for_session(self) -> ByValue:
        policy = copy(self)
        policy.expected = None
        policy.missed = []
        for pace in policy.paces.values():  # earlier texts count as one trial
            pace.weight = min(pace.weight, TRIALS)
        return policy

    def next_preset(self, view: View, reads_prompt: bool) -> int:
        if reads_prompt:
            self.read_prompt = True
            return len(view.presets) - 1
        if self.read_prompt:
            self.read_prompt = False
            lookup = lookup_of(view.drafter_state)
            if lookup is not None:
                self._expect(lookup.expected.tolist(), view)
        if not self._within_reach(view):
            return 0
        limit = view.limit
        if self.costs is not None:
            return self._pick_by_value(view, limit)
        return self.pick(len(view.presets) - 1 if self._may_grow(view) else limit)

    def _may_grow(self, view: View) -> bool:
        """Return whether a tree may grow by value. Writes: the growth's limit, and no rate."""
        if self.growth is None:
            return False
        limits = zip(view.draft_limits, view.live)
        self.growth.limit = max((most for most, decodes in limits if decodes), default=0)
        self.growth.rate = 0.0
        return self.growth.limit > 0

    def pick(self, limit: int) -> int:
        """Pick a preset without costs. limit: the largest that makes sense"""
        expected = self.expected
        if expected is None or len(expected) <= limit:
            return limit
        return max((preset for preset in range(limit + 1) if expected[preset] > 0), default=0)

    def _pick_by_value(self, view: View, limit: int) -> int:
        """Pick the preset that gains most beyond its costs. Writes: the growth's rate."""
        live = [view.live[seq] for seq in view.rows]
        pace = self._pace(len(live))
        rate = pace.tokens / pace.seconds
        last = len(view.presets) - 1
        vanilla = self._seconds(0, len(live))
        gains = {0: 0.0}  # tokens beyond those of vanilla, by preset
        for number in range(1, limit + (self.growth is None or limit < last)):
            if number not in self.lookups:
                tokens = self.acceptance.expected(view.presets[number])
            elif self.expected and self.expected[number]:
                tokens = self.expected[number]
            else:
                continue
            seconds = self._seconds(number, len(live)) - vanilla
            gains[number] = sum(live) * tokens - rate * seconds
        if self._may_grow(view):
            gains[last] = pace.gain
        picked = max(gains, key=gains.__getitem__)
        trees = [number for number in gains if number and number not in self.lookups]
        rests = bool(trees) and max(gains[number] for number in trees) <= 0
        self.rested = self.rested + 1 if rests and not self.trials else 0
        if self.rested > REST * len(live):
            self.rested = 0
            self.trials = TRIALS
            pace.weight = 0.0  # they alone count
        if self.trials and trees:
            self.trials -= 1
            picked = max(trees, key=gains.__getitem__)
        if self.growth and picked == last:
            self.growth.rate = rate
            self.growth.live = live
        return picked

    def _seconds(self, preset: int, batch: int) -> float:
        """Return the seconds that a cycle of a preset is expected to take."""
        size = self.engine.presets[preset].size
        levels = 0.0
        if self.growth and preset == len(self.costs.rest) - 1:  # a tree of about that size
            size = 1 + round(self.growth.chosen)
            levels = self.growth.seconds
        seconds = self.costs.verify[batch * size] + self.costs.rest[preset] + levels
        return seconds * (self.costs.factor if preset else 1.0)

    def _pace(self, batch: int) -> Pace:
        """Return the pace of cycles of so many sequences: at first, that of vanilla."""
        if batch in self.paces:
            return self.paces[batch]
        vanilla = self._seconds(0, batch)
        pace = Pace(batch / GAIN, vanilla / GAIN)
        self.paces[batch] = pace
        return pace

    def _within_reach(self, view: View) -> bool:
        if self.reach is None:
            return True
        decoding = [text for text, live in zip(view.history, view.live) if live]
        return any(len(text) <= self.reach for text in decoding) or not decoding

    def before_step(self, view: View, preset: int) -> None:
        if self.missed and preset:
            # zeros stand for the sequences that did not run
            whole = [
                pad(part, (0, 0, 0, 0, first, len(view.live) - first - len(part)))
                for first, part in self.missed
            ]  # [B, 1, F] each
            features = torch.cat(whole, 1)
            view.run_step(None, partial(view.presets[-1].catch_up, features))
            self.missed = []

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        lookup = lookup_of(view.drafter_state)
        tree = update.tree
        tensors = () if lookup is None else (lookup.expected,)
        if self.costs is not None and tree is not None and tree.tokens.shape[1] > 1:
            tensors += (tree.parents, tree.valid, update.path)
            tensors += () if tree.values is None else (tree.values,)
        return tensors

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        if lookup_of(view.drafter_state) is not None:
            self._expect(copied.pop(0), view)
        preset = result.preset
        drafter = view.presets[preset]
        if isinstance(drafter, AutoPreset) and drafter.rests:
            self.missed.append((result.first, result.update.features))
            del self.missed[:-REST]
        # at rest seldom: behind a pass over all weights the code here comes from memory
        if self.costs is None or (not preset and self.rested % 8):
            return
        batch = len(result.rows) - result.first
        growth = self.growth if preset == len(view.presets) - 1 else None
        most = len(self.costs.verify) - 1
        nodes = result.update.tree.tokens.shape[1]
        rows = min(batch * nodes, most)  # a grammar's forced tokens may be more
        seconds = self.costs.verify[rows] + self.costs.rest[preset]
        pace = self._pace(batch)
        if growth:
            seconds += growth.seconds
            pace.weight = min(pace.weight + 1, 1 / GAIN)
            pace.gain += (growth.gain - pace.gain) / pace.weight
        self.costs.learn(preset > 0, result.seconds / seconds)
        pace.tokens += sum(1 + result.length[seq] for seq in result.live) - GAIN * pace.tokens
        pace.seconds += seconds * (self.costs.factor if preset else 1.0) - GAIN * pace.seconds
        if nodes > 1 and preset and preset not in self.lookups:
            for seq in result.live:
                parents, valid, path, *values = (column[seq - result.first] for column in copied)
                own = path[: result.length[seq] + 1]
                self.acceptance.learn(parents, valid, values[0] if values else None, own)

    def _expect(self, expected: list[list[float]], view: View) -> None:
        """Set the tokens that the presets can expect: means over the sequences that decode."""
        rows = [row for row, decodes in zip(expected, view.live) if decodes]
        if len(rows) > 1:
            rows = [[sum(column) / len(rows) for column in zip(*rows)]]
        self.expected = rows[0] if rows else None

    def finished(self, text: list[int], begin: int) -> None:
        if self.kept is not None and self.warm:
            self.kept.add(text, begin)

    def table(self, ran: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Report per preset its cycles, and the expected and measured time of one.

        ran: the preset and the seconds of each cycle
        """
        rows = []
        for number, preset in enumerate(self.engine.presets if self.costs else ()):
            seconds = [spent for used, spent in ran if used == number]
            row = {"tree": preset.name, "source": source_of(self.engine, number)}
            row["cycles"] = len(seconds)
            row["predicted_ms"] = 1e3 * self._seconds(number, max(self.paces, default=1))
            row["measured_ms"] = 1e3 * statistics.mean(seconds) if seconds else None
            rows.append(row)
        return rows
