"""Decoding: one loop, in which every method is the verification of a draft tree.

A cycle has three steps, each tensors to tensors with static shapes, compiled `fullgraph=True`:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass; the deepest path that is the target's own choice is
   accepted, with the bonus token after it, and its keys and values move next to the prefix.
3. extend: the drafter takes in the rows that were accepted, with the target's features.

Vanilla decoding is the cycle whose tree is only its root. A drafter with presets has the steps of a cycle for each;
the report of a cycle says which ones suit the next, and the host picks (autosize.py). Rows that are done go through the
motions and decide nothing, so the host may read the report of a cycle late: on CUDA, where a compiled cycle is captured
as one graph (capture.py), it launches the next one first. The report is all that the host ever reads.
The output is a function of (weights, prompt, seed) alone; sampling.py says why.

Trade-off: prefill is not compiled. Its chunks are bound by matrix products, and static shapes would cost a short
prompt its padding.
Not here: options (config.py), loading and the command line (generate.py), what a run measured (stats.py).
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
import sampling
from autosize import Autosizer, Verdict
from capture import HostCopy, Replay, store
from config import GenerateConfig
from draft_tree import MAX_NODES, Accepted, DraftTree, accept, compaction, path_to
from drafters import Drafter, Root, Rows, Text
from model import KVCache, Transformer, Window, causal_window
from sampling import NoiseKey, Sampling
from stats import Stats

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
    path: Tensor  # [B, D+1] int64, accepted nodes
    # [B, D+6] int64: emitted tokens; their count after cuts (0: was done), accept length, done, preferred preset, pos
    report: Tensor


class Outcome(NamedTuple):
    """What a cycle leaves for the host."""

    report: Tensor  # [B, D+10] int64: `Verified.report`, and the times (ns) between the steps of the cycle, 4 of them
    tree: DraftTree
    path: Tensor  # [B, D+1] int64, accepted nodes


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
    catch_up: Callable[[DecodeState], DecodeState] | None = None  # for presets that put off `extend`
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    sizer: Autosizer | None = None  # picks the preset; None: the largest that is preferred
    pool: list[Workspace] = field(default_factory=list)  # buffers of sessions that are over
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
    drafter, config = engine.drafter, engine.config

    def catch_up(state: DecodeState) -> DecodeState:
        """Let the drafter take in what it has put off. Writes: its cache."""
        return state._replace(draft=drafter.catch_up(state.draft, Text(state.tokens, state.pos)))

    return replace(
        engine, steps=tuple(_make_steps(engine, preset) for preset in drafter.presets),
        catch_up=_compiled(catch_up) if config.compile else catch_up,
        captured=config.compile and config.device.startswith("cuda"), sizer=None, pool=[],
    )  # fmt: skip


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
        before = state.pos
        window = Window(before[:, None] + nodes, before, tree.mask)  # slots are not positions
        features, _ = target(tree.tokens, before[:, None] + tree.depths, cache, window)
        logits = target.logits(features)  # [B, N, V]
        if config.accept == "residual" and rule.temperature > 0:
            accepted = _accept_residual(tree, logits, noise, state, rule, drafter)
        else:
            at_node = noise.gather(1, tree.depths[:, :, None].expand(-1, -1, V)) if noise is not None else None
            accepted = accept(tree, sampling.choose(logits, rule, at_node), D)
        cache.compact(before, compaction(accepted))
        state, rows, report = _advance(state, tree, accepted, features, ends)
        preset = prefer(Text(state.tokens, state.pos))
        tail = torch.stack((preset, before), 1)  # [B, 2]
        return state, Verified(rows, accepted.path, torch.cat((report, tail), 1))

    def extend(state: DecodeState, rows: Rows) -> DecodeState:
        """Hand the confirmed rows to the drafter. Writes: its cache."""
        return state._replace(draft=drafter.extend(state.draft, rows))

    steps = (draft, verify, extend)
    return Steps(*map(_compiled, steps)) if config.compile else Steps(*steps)


def _compiled(step: FunctionType) -> Callable:
    # rounds to bf16 where eager code does, or the same row would get other bits in a step of another size
    options = {"emulate_precision_casts": True}
    return torch.compile(_own_code(step), fullgraph=True, dynamic=False, options=options)


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

    Returns: the state; the confirmed rows; the report's first D+4 columns.
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


def run_cycle(steps: Steps, cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
    """One cycle, with the times between its steps. Writes: both caches, state.tokens."""
    device = state.pos.device
    times = [kernels.clock(device)]
    tree, noise = steps.draft(state)
    times.append(kernels.clock(device))
    state, verified = steps.verify(cache, state, tree, noise)
    times.append(kernels.clock(device))
    state = steps.extend(state, verified.rows)
    times.append(kernels.clock(device))
    report = torch.cat((verified.report, torch.stack(times).expand(len(state.pos), -1)), 1)
    return state, Outcome(report, tree, verified.path)


# ---------------------------------------------------------------------------------------------- session


class Workspace:
    """The buffers of B sequences. They outlive their session, and where cycles are captured, at fixed addresses."""

    def __init__(self, engine: Engine):
        target, drafter, B = engine.target, engine.drafter, engine.config.batch_size
        weight = target.embedding.weight
        slots = engine.context + max(drafter.size, drafter.depth + 1, PREFILL_CHUNK)
        self.cache = KVCache.empty(target.config, B, slots, weight.dtype, str(weight.device))
        number = torch.zeros(B, dtype=torch.long, device=weight.device)
        self.state = DecodeState(
            tokens=torch.zeros(B, engine.context + 1, dtype=torch.long, device=weight.device),
            pos=number, draws=number.clone(), done=number == 0, limit=number.clone(),
            key=NoiseKey(number.new_zeros(2), number.clone(), number.clone()),
            draft=drafter.init(B, slots),
        )  # fmt: skip
        self.replays: dict[Any, Replay] = {}  # what was captured over these buffers

    def reset(self, engine: Engine, key: NoiseKey) -> None:
        """Make every row idle and empty."""
        zeros = torch.zeros_like(self.state.pos)
        self.state.tokens.zero_()
        draft = engine.drafter.rewind(self.state.draft, zeros)
        self.put(engine, DecodeState(self.state.tokens, zeros, zeros, zeros == 0, zeros, key, draft))

    def put(self, engine: Engine, state: DecodeState) -> None:
        """Keep a new state. Writes: the buffers in place, where cycles are captured."""
        if engine.captured:
            store(self.state, state)
        else:
            self.state = state

    def replay(self, name: Any, body: Callable[[], Any]) -> Any:
        """Run a step over these buffers, captured the first time. name: of the step; body: writes its results back"""
        if name not in self.replays:
            self.replays[name] = Replay(body, self.state.pos.device)
        return self.replays[name]()


class Cycle(NamedTuple):
    """A cycle that the host has launched and not read yet."""

    report: HostCopy
    preset: int
    trial: bool  # judged for the smaller presets too
    began: float  # host's clock (s)
    drawn: HostCopy | None  # the tree: tokens, parents, depths, accepted path, and values where it has them


class Session:
    """B conversations that share a cache. A row may be given turn after turn; what it has cached stays."""

    def __init__(self, engine: Engine, streams: list[tuple[int, int]], lag: int | None = None):
        """streams: (prompt, sample) per row, the key of its noise; further rows of the batch stay idle
        lag: cycles launched before the host reads the first of them; default 1 on CUDA, 0 elsewhere
        """
        self.engine, B = engine, engine.config.batch_size
        assert len(streams) <= B, (streams, B)
        self.work = engine.pool.pop() if engine.pool else Workspace(engine)
        weakref.finalize(self, engine.pool.append, self.work)
        device, streams = self.state.pos.device, streams + [(0, 0)] * (B - len(streams))
        self.lag = int(device.type == "cuda") if lag is None else lag
        seed = torch.tensor([engine.config.seed & sampling.MASK32, engine.config.seed >> 32], device=device)
        self.work.reset(engine, NoiseKey(seed, *(torch.tensor(column, device=device) for column in zip(*streams))))
        self.preset = 0  # the largest that suits the next cycle
        self.put_off = 0  # cycles whose rows the drafter has not taken in yet
        self.history: list[list[int]] = [[] for _ in range(B)]  # every token, prompts and roots included
        self.stats = Stats()
        self.trace: list[dict] = []

    @property
    def state(self) -> DecodeState:
        """Where the rows are, after every cycle that was launched."""
        return self.work.state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self.work.put(self.engine, state)

    def run(self, prompts: list[list[int] | None]) -> Iterator[list[list[int]]]:
        """Decode one turn. Yields the new tokens of every row, cycle by cycle; the first ones are the roots.

        prompts: per row the conversation so far, or None to leave the row idle, which empties it
        Writes: history, stats, trace.
        """
        prompts = prompts + [None] * (len(self.history) - len(prompts))
        began = time.perf_counter()
        roots, finished = self._prefill(prompts)
        self.stats.prefill_s += time.perf_counter() - began
        yield self._note(roots)
        began, pending = time.perf_counter(), deque()
        while not finished:
            pending.append(self._launch())
            if len(pending) > self.lag:
                new, finished = self._read(pending.popleft())
                self.stats.decode_s += time.perf_counter() - began
                began = time.perf_counter()
                yield self._note(new)
                if not self.lag:  # what the caller does with the tokens is decoding only where it goes on meanwhile
                    began = time.perf_counter()

    def _launch(self) -> Cycle:
        """Start the next cycle."""
        engine = self.engine
        preset, trial = engine.sizer.next(self.preset) if engine.sizer else (self.preset, False)
        if engine.drafter.hold:
            resting = preset == 0
            if self.put_off == engine.drafter.hold or (self.put_off and not resting):
                self.catch_up()
            self.put_off += resting
        began = time.perf_counter()
        outcome = self._cycle(preset)
        tree, drawn = outcome.tree, None
        if trial or engine.config.trace:
            values = () if tree.values is None else (tree.values,)
            drawn = HostCopy(tree.tokens, tree.parents, tree.depths, outcome.path, *values)
        return Cycle(HostCopy(outcome.report), preset, trial, began, drawn)

    def _cycle(self, preset: int) -> Outcome:
        engine, work = self.engine, self.work

        def body() -> Outcome:
            state, outcome = run_cycle(engine.steps[preset], work.cache, work.state)
            work.put(engine, state)
            return outcome

        return work.replay(preset, body) if engine.captured else body()

    def rehearse(self, preset: int) -> float:
        """Run a cycle of one preset, whatever it brings. Returns: its time (s)."""
        began = time.perf_counter()
        (report,) = HostCopy(self._cycle(preset).report).read()
        wall = time.perf_counter() - began
        return (report[0][-1] - report[0][-4]) / 1e9 if self.lag else wall

    def catch_up(self) -> None:
        """Let the drafter take in what it has put off. Writes: its part of the state."""
        engine, work = self.engine, self.work

        def body() -> None:
            work.put(engine, engine.catch_up(work.state))

        work.replay("catch up", body) if engine.captured else body()
        self.put_off = 0

    def _read(self, cycle: Cycle) -> tuple[list[list[int]], bool]:
        """Returns: the new tokens of every row; whether all rows are done. Writes: preset, stats, trace."""
        new, finished, wanted, live, lengths = [], True, 0, [], []
        (report,) = cycle.report.read()
        drawn = cycle.drawn.read() if cycle.drawn else None
        for row, (*emitted, count, length, done, preset, pos, _, _, _, _) in enumerate(report):
            new.append(emitted[:count])
            if not done:
                finished, wanted = False, max(wanted, preset)
            if count == 0:  # the row was done before this cycle
                continue
            live.append(row)
            lengths.append(length)
            self.stats.tokens += count
            if self.engine.config.trace:
                self.trace.append(_trace_row(drawn, row, pos, emitted[: length + 1]))
        self.stats.live_rows.append(live)
        self.stats.accept_lengths += lengths
        began, drafted, verified, ended = (t / 1e9 for t in report[0][-4:])
        self.stats.draft_s += drafted - began + ended - verified
        self.stats.verify_s += verified - drafted
        self.preset = min(wanted, len(self.engine.steps) - 1)
        if self.engine.sizer and live:
            seconds = ended - began if self.lag else time.perf_counter() - cycle.began
            self.stats.add_cycle(cycle.preset, seconds)
            self.engine.sizer.observe(cycle.preset, sum(lengths) / len(live), seconds)
            if cycle.trial:
                self.engine.sizer.judge(cycle.preset, [_verdict(drawn, row, n) for row, n in zip(live, lengths)])
        return new, finished

    def _note(self, new: list[list[int]]) -> list[list[int]]:
        for row, tokens in zip(self.history, new):
            row.extend(tokens)
        return new

    def _prefill(self, prompts: list[list[int] | None]) -> tuple[list[list[int]], bool]:
        """Cache the prompts and decide a root for each. Returns: the roots; whether all rows are done already."""
        if self.put_off:
            self.catch_up()
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
            state = prefill_chunk(engine, self.work.cache, state, begin + offset, width)
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


def _verdict(drawn: list, row: int, length: int) -> Verdict:
    _, parents, _, path, values = drawn
    return Verdict(values[row], parents[row], path[row][1 : length + 1])


def _trace_row(drawn: list, row: int, pos: int, emitted: list[int]) -> dict:
    """One line of `--trace`. `values` is there where the drafter gives its nodes one; padding has none (null)."""
    tokens, parents, depths, path, *values = (x[row] for x in drawn)
    length = len(emitted) - 1
    line = {
        "row": row,
        "pos": pos,
        "root": tokens[0],
        "draft_tokens": tokens[1:],
        "parents": parents[1:],
        "depths": depths[1:],
        "accept_length": length,
        "path": path[1 : length + 1],
        "emitted": emitted,
    }
    for each in values:
        line["values"] = [v if v > float("-inf") else None for v in each[1:]]
    return line
