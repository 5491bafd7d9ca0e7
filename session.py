"""Conversations being decoded: the loop over cycles.

1. `Workspace` holds the caches and the state of B rows; on CUDA cycles are captured over it, one graph per preset.
2. `Session.run` prefills the prompts of a turn, chunk by chunk, which decides a root for each row.
3. Then it launches cycles and reads their reports until every row is done: on CUDA one cycle late, so that the device
   never waits for the host. What the caller does with the tokens happens meanwhile.
4. Where the drafter has presets, each cycle runs the one that the sizer picks (autosize.py).

Trade-off: prefill is not compiled. Its chunks are bound by matrix products, and static shapes would cost a short
prompt its padding.
Not here: what a cycle does (decode.py), how it is captured and copied (capture.py), what a run measured (stats.py).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from autosize import Verdict
from capture import HostCopy, Replay, store
from decode import DecodeState, Engine, Outcome, end_ids
from drafters import CATCH_UP, Rows
from model import KVCache, causal_window
from sampling import NoiseKey
from stats import Stats

PREFILL_CHUNK = 256  # tokens per prefill pass


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
        if self.engine.sizer:
            self.engine.sizer.begin()
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
        began = time.perf_counter()
        if engine.drafter.hold:
            resting = preset == 0
            self.catch_up(engine.drafter.hold - 1 if resting else 0)
            self.put_off += resting
        outcome = self._cycle(preset)
        tree, drawn = outcome.tree, None
        if trial or engine.config.trace:
            values = () if tree.values is None else (tree.values,)
            drawn = HostCopy(tree.tokens, tree.parents, tree.depths, outcome.path, *values)
        return Cycle(HostCopy(outcome.report), preset, trial, began, drawn)

    def _cycle(self, preset: int) -> Outcome:
        engine, work = self.engine, self.work

        def body() -> Outcome:
            state, outcome = engine.cycles[preset](work.cache, work.state)
            work.put(engine, state)
            return outcome

        return work.replay(preset, body) if engine.captured else body()

    def rehearse(self, preset: int) -> float:
        """Run a cycle of one preset, whatever it brings. Returns: its time (s)."""
        self.put_off += bool(self.engine.drafter.hold) and preset == 0
        began = time.perf_counter()
        (report,) = HostCopy(self._cycle(preset).report).read()
        wall = time.perf_counter() - began
        return (report[0][-1] - report[0][-4]) / 1e9 if self.lag else wall

    def catch_up(self, most: int = 0) -> None:
        """Let the drafter take in what it has put off, until at most so many rows are left. Writes: its state."""
        engine, work = self.engine, self.work

        def body() -> None:
            work.put(engine, engine.catch_up(work.state))

        while self.put_off > most:
            work.replay("catch up", body) if engine.captured else body()
            self.put_off = max(self.put_off - CATCH_UP, 0)

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
        self.preset = min(wanted, len(self.engine.cycles) - 1)
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
        self.preset = len(engine.cycles) - 1
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
