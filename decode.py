"""Decoding: one loop, in which every method is the verification of a draft tree.

A cycle has three steps, each tensors to tensors with static shapes, compiled `fullgraph=True`:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass; the deepest path that is the target's own choice is
   accepted, with the bonus token after it, and its keys and values move next to the prefix.
3. extend: the drafter takes in the rows that were accepted, with the target's features.

Vanilla decoding is the cycle whose tree is only its root. A drafter with presets has the steps of a cycle for each;
the report of a cycle says which one suits the next. Rows that are done go through the motions and decide
nothing, so the host may read the outcome of a cycle late (a lag of one on CUDA).
The output is a function of (weights, prompt, seed) alone; sampling.py says why.

Trade-off: prefill is not compiled. Its chunks are bound by matrix products, and static shapes would cost a short
prompt its padding.
Not here: options (config.py), loading and the command line (generate.py).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from config import GenerateConfig
from draft_tree import MAX_NODES, Accepted, DraftTree, accept, compaction, path_to
from drafters import Drafter, Root, Rows, Text
from model import KVCache, Transformer, Window, causal_window
from sampling import NoiseKey, Sampling

PREFILL_CHUNK = 256  # tokens per prefill pass
NODE_STRIDE = MAX_NODES  # rows of fresh noise reserved per draw


class DecodeState(NamedTuple):
    """B sequences being decoded. The steps replace it; `tokens` and the caches are written in place."""

    tokens: Tensor  # [B, S + 1] int64; tokens[b, pos[b]] is the root; the last column takes what is cut
    pos: Tensor  # [B] int64, index of the root: decided, not yet cached
    draws: Tensor  # [B] int64, tokens drawn in this conversation so far
    done: Tensor  # [B] bool
    limit: Tensor  # [B] int64, index of the last token that may be decided
    key: NoiseKey
    draft: Any  # the drafter's own


class Verified(NamedTuple):
    """What a verification hands to the drafter and to the host."""

    rows: Rows  # confirmed rows, D+1 of them, for the drafter
    path: Tensor  # [B, D+1] int64, accepted nodes, for the trace
    # [B, D+5] int64: emitted tokens, their count after cuts (0: was done), accept length, done, preferred preset
    report: Tensor


class Steps(NamedTuple):
    """The compiled parts of a cycle, for one preset of the drafter."""

    draft: Callable[[DecodeState], tuple[DraftTree, Tensor | None]]
    verify: Callable[[KVCache, DecodeState, DraftTree, Tensor | None], tuple[DecodeState, Verified]]
    extend: Callable[[DecodeState, Rows], DecodeState]


@dataclass(frozen=True)
class Engine:
    """Everything that decoding needs, loaded once."""

    config: GenerateConfig
    target: Transformer
    drafter: Drafter
    context: int  # KV capacity in tokens
    eos_ids: tuple[int, ...]
    steps: tuple[Steps, ...] = ()  # one per preset of the drafter
    tokenizer: Any = None  # tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # tokenizer.ChatTemplate, with --chat
    load_s: float = 0.0
    compile_s: float = 0.0


# ----------------------------------------------------------------------------------------------- steps


def end_ids(engine: Engine) -> list[int]:
    """Token ids that end a row; -1, which is no token, keeps the list from being empty."""
    return [-1] if engine.config.ignore_eos else [*engine.eos_ids, -1]


def with_steps(engine: Engine) -> Engine:
    """Give the engine the steps of a cycle for every preset, compiled when the config says so."""
    return replace(engine, steps=tuple(_make_steps(engine, preset) for preset in engine.drafter.presets))


def _make_steps(engine: Engine, drafter: Drafter) -> Steps:
    """The steps of a cycle in which `drafter`, a preset of the engine's, proposes the tree."""
    target, config, rule, prefer = engine.target, engine.config, engine.config.sampling, engine.drafter.prefer
    D, N, V = drafter.depth, drafter.size, target.config.vocab_size
    device = target.embedding.weight.device
    ends = torch.tensor(end_ids(engine), device=device)
    levels = torch.arange(D + 1, device=device)
    nodes = torch.arange(N, device=device)
    fresh_rows = torch.arange(drafter.fresh_rows, device=device)

    def draft(state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        noise = fresh = None
        if rule.temperature > 0:
            noise = sampling.gumbel(state.key, state.draws[:, None] + levels, V)
        if drafter.fresh_rows:
            draws = state.draws[:, None] * NODE_STRIDE + fresh_rows
            fresh = sampling.gumbel(state.key, draws, V, sampling.DRAFT)
        root = state.tokens.gather(1, state.pos[:, None]).squeeze(1)
        return drafter.draft(state.draft, Root(root, noise, fresh, Text(state.tokens, state.pos))), noise

    def verify(cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None):
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        window = Window(state.pos[:, None] + nodes, state.pos, tree.mask)  # slots are not positions
        features, _ = target(tree.tokens, state.pos[:, None] + tree.depths, cache, window)
        logits = target.logits(features)  # [B, N, V]
        if config.accept == "residual" and rule.temperature > 0:
            accepted = _accept_residual(tree, logits, noise, state, rule, drafter)
        else:
            at_node = noise.gather(1, tree.depths[:, :, None].expand(-1, -1, V)) if noise is not None else None
            accepted = accept(tree, sampling.choose(logits, rule, at_node), D)
        cache.compact(state.pos, compaction(accepted))
        state, rows, report = _advance(state, tree, accepted, features, ends)
        preset = prefer(Text(state.tokens, state.pos))[:, None]
        return state, Verified(rows, accepted.path, torch.cat((report, preset), 1))

    def extend(state: DecodeState, rows: Rows) -> DecodeState:
        """Hand the confirmed rows to the drafter. Writes: its cache."""
        return state._replace(draft=drafter.extend(state.draft, rows))

    steps = (draft, verify, extend)
    if config.compile:
        # rounds to bf16 where eager code does, or the same row would get other bits in a step of another size
        options = {"emulate_precision_casts": True, "guard_filter_fn": _guards_of_arguments}
        # a dict each: torch.compile takes the filter out of the one it is given
        steps = (torch.compile(_own_code(s), fullgraph=True, dynamic=False, options=dict(options)) for s in steps)
    return Steps(*steps)


def _guards_of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards a compiled step keeps: shapes and dtypes of tensors, and modes such as autocast.

    The modules and options of an engine do not change, and checking all of them costs 0.3 ms a step at 8 layers.
    """
    kept = ("TENSOR_MATCH", "SHAPE_ENV", "GLOBAL_STATE")
    return [g.guard_type in kept and not g.orig_guard.source.is_unspecialized_nn_module() for g in guards]


def _own_code(step: FunctionType) -> FunctionType:
    """A copy with a code object of its own: Dynamo counts compilations per code object and stops at a limit,
    which many engines in one process would reach together."""
    code = step.__code__.replace(co_name=f"{step.__name__}_{next(_engines)}")
    return FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)


_engines = itertools.count()


def _accept_residual(
    tree: DraftTree, logits: Tensor, noise: Tensor, state: DecodeState, rule: Sampling, drafter: Drafter
) -> Accepted:
    p = sampling.process(logits, rule).softmax(-1)  # [B, N, V]
    uniform = sampling.uniforms(state.key, state.draws[:, None], tree.tokens.shape[1], sampling.ACCEPT)[:, 0]
    node, rest = sampling.residual_accept(tree, p, uniform, drafter.depth, drafter.width)
    path, length = path_to(tree, node, drafter.depth)
    last = length[:, None]  # [B, 1]
    at_end = noise.gather(1, last[:, :, None].expand(-1, 1, noise.shape[2])).squeeze(1)  # [B, V]
    bonus = (rest.log() + at_end).argmax(-1, keepdim=True)  # [B, 1]
    emitted = tree.tokens.gather(1, path).roll(-1, dims=1).scatter(1, last, bonus)  # [B, D+1]
    return Accepted(path, length, emitted)


def _advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, ends: Tensor
) -> tuple[DecodeState, Rows, Tensor]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root. Writes: state.tokens.

    Returns: the state; the confirmed rows; the report without its last column.
    """
    emitted = accepted.emitted  # [B, D+1]
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    inside = steps <= accepted.length[:, None]
    is_end = inside & (emitted[:, :, None] == ends).any(-1)
    before_end = torch.where(is_end, steps, emitted.shape[1]).amin(1) + 1  # tokens up to the first end
    count = torch.minimum(torch.minimum(accepted.length + 1, before_end), state.limit - state.pos)
    count = torch.where(state.done, 0, count)
    pos = state.pos + count
    kept = steps < count[:, None]
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(kept, state.pos[:, None] + 1 + steps, trash), emitted)
    done = state.done | (is_end & kept).any(1) | (pos >= state.limit)
    path = accepted.path[:, :, None].expand(-1, -1, features.shape[2])
    slots = tree.slots.gather(1, accepted.path) if tree.slots is not None else None
    rows = Rows(torch.cat((tree.tokens[:, :1], emitted), 1), features.gather(1, path), count, slots)
    report = torch.cat((emitted, torch.stack((count, accepted.length, done.long()), 1)), 1)  # [B, D+4]
    return state._replace(pos=pos, draws=state.draws + count, done=done), rows, report


# ------------------------------------------------------------------------------------------------ stats


@dataclass
class Stats:
    """What happened, added up over every row and cycle."""

    accept_lengths: list[int] = field(default_factory=list)  # per cycle and live row, bonus not counted
    live_rows: list[list[int]] = field(default_factory=list)  # per cycle, the rows that these lengths belong to
    tokens: int = 0  # decoded after prefill
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # drafting and extending
    verify_s: float = 0.0

    def add(self, other: Stats) -> None:
        """Add what another session measured."""
        self.accept_lengths += other.accept_lengths
        self.live_rows += other.live_rows
        for name in ("tokens", "prefill_s", "decode_s", "draft_s", "verify_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self, engine: Engine) -> dict[str, Any]:
        """The `stats` object of `--json`. tau: emitted tokens per verification, bonus included."""
        lengths, stand_in = self.accept_lengths, engine.target.config.stand_in
        named = {"stand_in": stand_in} if stand_in else {}  # its numbers never go without its name
        return named | {
            "tau": sum(lengths) / len(lengths) + 1 if lengths else 0.0,
            "accept_lengths": lengths,
            "cycles": len(lengths),
            "tokens_per_s": self.tokens / self.decode_s if self.decode_s else 0.0,
            "decode_s": self.decode_s,
            "prefill_s": self.prefill_s,
            "compile_s": engine.compile_s,
            "load_s": engine.load_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "peak_memory_bytes": peak_memory_bytes(engine.config.device),
        }


def peak_memory_bytes(device: str) -> int:
    """Peak device memory on CUDA, peak resident memory of the process elsewhere."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stopwatch:
    """Adds up seconds per name; on CUDA by events, so that the host never waits inside a cycle."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        self.marks: list[tuple[str, Any]] = []
        self.mark("start")

    def mark(self, name: str) -> None:
        """End the stretch called `name`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def seconds(self, marks: int | None = None) -> dict[str, float]:
        """Seconds per name since the start, of the first `marks` stretches."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, begin), (name, end) in zip(self.marks, self.marks[1 : None if marks is None else marks + 1]):
            length = begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
            total[name] = total.get(name, 0.0) + length
        return total


# ---------------------------------------------------------------------------------------------- session


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, x: Tensor):
        self.host = x.to("cpu", non_blocking=True)  # into pinned memory, on CUDA
        self.arrived = torch.cuda.Event() if x.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> list:
        """Wait for the copy, not for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.tolist()


class Cycle(NamedTuple):
    """A cycle that the host has launched and not read yet. The last three are kept for the trace only."""

    report: HostCopy
    marks: int  # stretches of the stopwatch until its end
    pos: Tensor | None
    tree: DraftTree | None
    path: Tensor | None


class Session:
    """B conversations that share a cache. A row may be given turn after turn; what it has cached stays."""

    def __init__(self, engine: Engine, streams: list[tuple[int, int]], lag: int | None = None):
        """streams: (prompt, sample) per row, the key of its noise; further rows of the batch stay idle
        lag: cycles launched before the host reads the first of them; default 1 on CUDA, 0 elsewhere
        """
        self.engine = engine
        target, B, D = engine.target, engine.config.batch_size, engine.drafter.depth
        assert len(streams) <= B, (streams, B)
        weight = target.embedding.weight
        device, streams = weight.device, streams + [(0, 0)] * (B - len(streams))
        self.lag = int(weight.is_cuda) if lag is None else lag
        slots = engine.context + max(engine.drafter.size, D + 1, PREFILL_CHUNK)
        self.cache = KVCache.empty(target.config, B, slots, weight.dtype, str(device))
        seed = torch.tensor([engine.config.seed & sampling.MASK32, engine.config.seed >> 32], device=device)
        key = NoiseKey(seed, *(torch.tensor(column, device=device) for column in zip(*streams)))
        zeros = torch.zeros(B, dtype=torch.long, device=device)
        self.state = DecodeState(
            tokens=torch.zeros(B, engine.context + 1, dtype=torch.long, device=device),
            pos=zeros, draws=zeros, done=zeros == 0, limit=zeros, key=key,
            draft=engine.drafter.init(B, slots),
        )  # fmt: skip
        self.preset = 0  # which of the engine's steps the next cycle runs
        self.history: list[list[int]] = [[] for _ in range(B)]  # every token, prompts and roots included
        self.stats = Stats()
        self.trace: list[dict] = []

    def run(self, prompts: list[list[int] | None]) -> Iterator[list[list[int]]]:
        """Decode one turn. Yields the new tokens of every row, cycle by cycle; the first ones are the roots.

        prompts: per row the conversation so far, or None to leave the row idle, which empties it
        Writes: history, stats, trace.
        """
        prompts = prompts + [None] * (len(self.history) - len(prompts))
        clock = Stopwatch(self.engine.config.device)
        roots, finished = self._prefill(prompts)
        clock.mark("prefill")
        self.stats.prefill_s += clock.seconds()["prefill"]
        yield self._note(roots)
        if finished:
            return
        clock, pending = Stopwatch(self.engine.config.device), deque()
        while not finished:
            pending.append(self._cycle(clock))
            if len(pending) > self.lag:
                cycle = pending.popleft()
                new, finished = self._read(cycle)
                clock.mark("host")
                yield self._note(new)
                clock.mark("consumer")  # what the caller does with the tokens is not decoding
        seconds = clock.seconds(cycle.marks)  # without the surplus cycles that were launched late
        self.stats.draft_s += seconds["draft"]
        self.stats.verify_s += seconds["verify"]
        self.stats.decode_s += sum(seconds.values()) - seconds.get("consumer", 0.0)

    def _cycle(self, clock: Stopwatch) -> Cycle:
        steps, before = self.engine.steps[self.preset], self.state
        tree, noise = steps.draft(before)
        clock.mark("draft")
        state, verified = steps.verify(self.cache, before, tree, noise)
        clock.mark("verify")
        self.state = steps.extend(state, verified.rows)
        clock.mark("draft")
        kept = (before.pos, tree, verified.path) if self.engine.config.trace else (None, None, None)
        return Cycle(HostCopy(verified.report), len(clock.marks) - 1, *kept)

    def _read(self, cycle: Cycle) -> tuple[list[list[int]], bool]:
        """Returns: the new tokens of every row; whether all rows are done. Writes: preset, stats, trace."""
        new, finished, wanted, live = [], True, 0, []
        for row, (*emitted, count, length, done, preset) in enumerate(cycle.report.read()):
            new.append(emitted[:count])
            if not done:
                finished, wanted = False, max(wanted, preset)
            if count == 0:  # the row was done before this cycle
                continue
            live.append(row)
            self.stats.accept_lengths.append(length)
            self.stats.tokens += count
            if cycle.tree is not None:
                self.trace.append(_trace_row(cycle, row, emitted[: length + 1], length))
        self.stats.live_rows.append(live)
        self.preset = min(wanted, len(self.engine.steps) - 1)
        return new, finished

    def _note(self, new: list[list[int]]) -> list[list[int]]:
        for row, tokens in zip(self.history, new):
            row.extend(tokens)
        return new

    def _prefill(self, prompts: list[list[int] | None]) -> tuple[list[list[int]], bool]:
        """Cache the prompts and decide a root for each. Returns: the roots; whether all rows are done already."""
        engine, state, device = self.engine, self.state, self.state.pos.device
        # the head's row below the common prefix pairs it with the token after it, so one row is done again;
        # the last token of a history (the root) is not cached
        begins = [max(common_prefix(h[:-1], p or []) - 1, 0) for h, p in zip(self.history, prompts)]
        lengths = [len(p) if p else 0 for p in prompts]
        for row, prompt in enumerate(prompts):
            self.history[row] = list(prompt or [])  # an idle row's slots serve as scratch
            if prompt:
                state.tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
        begin, length = torch.tensor(begins, device=device), torch.tensor(lengths, device=device)
        limit = (length + engine.config.max_new_tokens - 1).clamp(max=engine.context - 1)
        state = state._replace(pos=length, limit=limit, draft=engine.drafter.rewind(state.draft, begin))
        longest = max(end - start for start, end in zip(begins, lengths))
        for offset in range(0, longest, PREFILL_CHUNK):
            width = min(PREFILL_CHUNK, longest - offset)
            state = prefill_chunk(engine, self.cache, state, begin + offset, width)
        roots = state.tokens.gather(1, length[:, None])  # [B, 1]
        ends = torch.tensor(end_ids(engine), device=device)
        done = (length == 0) | (roots == ends).any(1) | (length >= limit)
        self.state = state._replace(done=done, draws=state.draws + (length > 0))
        self.preset = len(engine.steps) - 1
        new = [[root] if prompt else [] for root, prompt in zip(roots.squeeze(1).tolist(), prompts)]
        return new, bool(done.all())


def prefill_chunk(engine: Engine, cache: KVCache, state: DecodeState, start: Tensor, width: int) -> DecodeState:
    """Run the target over `width` prompt tokens of every row and hand their features to the drafter.

    start: [B] int64, index of each row's first token in the chunk; rows that end earlier are padded
    A row whose prompt ends in this chunk gets its root: only that one feature goes through the LM head.
    Writes: both caches, state.tokens.
    """
    rule = engine.config.sampling
    start = torch.minimum(start, state.pos)
    count = (state.pos - start).clamp(max=width)  # [B], real rows
    window = causal_window(start, width)
    tokens = state.tokens.gather(1, window.slots.clamp(max=state.tokens.shape[1] - 1))  # [B, T]
    features, _ = engine.target(tokens, window.slots, cache, window)
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    logits = engine.target.logits(features.gather(1, last))  # [B, 1, V]
    noise = None
    if rule.temperature > 0:
        noise = sampling.gumbel(state.key, state.draws[:, None], logits.shape[2])
    root = sampling.choose(logits, rule, noise)  # [B, 1]
    ends_here = ((count > 0) & (start + count == state.pos))[:, None]
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(ends_here, state.pos[:, None], trash), root)
    span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
    rows = Rows(state.tokens.gather(1, span), features, count)  # read again: by now the roots are in
    return state._replace(draft=engine.drafter.extend(state.draft, rows))


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _trace_row(cycle: Cycle, row: int, emitted: list[int], length: int) -> dict:
    """One line of `--trace`. `values` is there where the drafter gives its nodes one; padding has none (null)."""
    tokens, parents, depths = (x[row].tolist() for x in cycle.tree[:3])
    line = {
        "row": row,
        "pos": int(cycle.pos[row]),
        "root": tokens[0],
        "draft_tokens": tokens[1:],
        "parents": parents[1:],
        "depths": depths[1:],
        "accept_length": length,
        "path": cycle.path[row, 1 : length + 1].tolist(),
        "emitted": emitted,
    }
    if cycle.tree.values is not None:
        line["values"] = [v if v > float("-inf") else None for v in cycle.tree.values[row, 1:].tolist()]
    return line
