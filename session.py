"""The host's side of decoding: B sequences over one cache, chunks of prompts, reports that are read late.

1. `Session.admit` gives a sequence a prompt while the others decode.
2. Every `step` launches a cycle and reads a report, on CUDA one cycle late, so that the device never waits.
3. Then it runs chunks of prompts; the last chunk of a prompt decides the root. Finished sequences change no state.

The output is a function of (weights, prompt, seed) alone.
Trade-off: prefill is bound by matrix products and not compiled; on CUDA it is captured, in two widths per sequence.
Not here: the cycle (decode.py), which prompt is next (generate.py).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

import sampling
from decode import PREFILL_CHUNK, DecodeState, Engine, Outcome, Report, prefill_chunk
from draft_tree import Text
from kv_cache import KVCache
from ops.library import single_torch_thread
from runtime import HostCopy, Replay, copy_into, sequence_of
from sampling import NoiseKey
from stats import Stats, rows_memory, trace_row

PREFILL_WIDTHS = (64, PREFILL_CHUNK)  # to which passes are padded where they are captured


class Buffers:
    """The buffers of B sequences. They outlive their session, and where cycles are captured, at fixed addresses."""

    def __init__(self, engine: Engine):
        target, drafter, B = engine.target, engine.drafter, engine.config.batch_size
        weight, slots = target.embedding.weight, engine.slots
        rows_memory(engine)  # or an error
        self.cache = KVCache.empty(target.config, B, slots, weight.dtype, str(weight.device))
        number = torch.zeros(B, dtype=torch.long, device=weight.device)
        self.state = DecodeState(
            tokens=torch.zeros(B, engine.context + 1, dtype=torch.long, device=weight.device),
            pos=number, draws=number.clone(), done=number == 0, limit=number.clone(),
            key=NoiseKey(number.new_zeros(B, 2), number.clone(), number.clone()),
            drafter_state=drafter.init(B, slots),
        )  # fmt: skip
        self.start = number[:1].clone()  # of a chunk of a prompt
        self.waits = 0  # steps since the drafter took in what waits
        self.replays, self.scratch = (
            {},
            {},
        )  # by preset, or width and row, what was captured; where prefills compute

    def reset(self, engine: Engine, key: NoiseKey) -> None:
        """Make every row idle and empty. Writes: the state in place."""
        zeros = torch.zeros_like(self.state.pos)
        self.state.tokens.zero_()
        draft, self.waits = engine.drafter.rewind(self.state.drafter_state, zeros), 0
        copy_into(
            self.state, DecodeState(self.state.tokens, zeros, zeros, zeros == 0, zeros, key, draft)
        )

    def prefill(self, engine: Engine, row: int, start: int, width: int) -> None:
        """`prefill_chunk` of one row alone, whatever the others do. Writes: its part of the buffers, in place."""
        if engine.captured:  # without a graph the host would be slower than a GPU
            width = next(w for w in PREFILL_WIDTHS if w >= width)
        self.start.fill_(start)
        self.catch_up(engine, reader := engine.tree_policy.prefill_tree)

        def body() -> None:
            state, own = (
                sequence_of(self.state, row),
                replace(engine, drafter=engine.drafter.presets[reader]),
            )
            copy_into(state, prefill_chunk(own, self.cache.row(row), state, self.start, width))

        self._replay(engine, ("prefill", width, row, reader), body)

    def catch_up(self, engine: Engine, preset: int) -> None:
        """Before a step: hand the drafter the rows that wait, if the preset has no room for more. Writes: its state."""
        room = engine.drafter.presets[preset].room
        if self.waits and self.waits >= room:
            draft, text = self.state.drafter_state, Text(self.state.tokens, self.state.pos)
            self._replay(
                engine,
                "rows that wait",
                lambda: copy_into(draft, engine.drafter.catch_up(draft, text)),
            )
            self.waits = 0
        self.waits += room > 0

    def replay(self, engine: Engine, preset: int) -> Outcome:
        """Run a cycle over these buffers, in place where cycles are captured."""

        def body() -> Outcome:
            state, outcome = engine.cycles[preset](self.cache, self.state)
            copy_into(self.state, state)
            return outcome

        return self._replay(engine, preset, body)

    def _replay(self, engine: Engine, key: Any, body: Callable[[], Any]) -> Any:
        if not engine.captured:
            with single_torch_thread(engine.target.fused is not None):
                return body()
        if key not in self.replays:
            self.replays[key] = Replay(body, self.state.pos.device, self.scratch)
        return self.replays[key]()


class InFlight(NamedTuple):
    """A cycle that the host has launched and not read yet."""

    report: HostCopy
    preset: int
    began: float  # host's clock (s)
    tree_trace: (
        HostCopy | None
    )  # for the trace: tokens, parents, depths, accepted path, and values where it has them


class Session:
    """B rows over one cache, each with its own conversation. What a row has cached stays until it is overwritten."""

    def __init__(
        self, engine: Engine, streams: Sequence[tuple[int, int]] = (), host_lag: int | None = None
    ):
        """streams: (prompt, sample) per row, the key of its noise, until `admit` names another; (0, 0) for further rows
        host_lag: cycles launched before the host reads the first of them; default 1 on CUDA, 0 elsewhere
        """
        self.engine, B = engine, engine.config.batch_size
        assert len(streams) <= B, (streams, B)
        self.work = engine.pool.pop() if engine.pool else Buffers(engine)
        weakref.finalize(self, engine.pool.append, self.work)
        device, streams = self.state.pos.device, [*streams, *[(0, 0)] * (B - len(streams))]
        self.host_lag = int(device.type == "cuda") if host_lag is None else host_lag
        seed, columns = (
            engine.config.seed,
            (torch.tensor(column, device=device) for column in zip(*streams)),
        )
        words = torch.tensor([seed & sampling.MASK32, seed >> 32], device=device).expand(B, 2)
        self.work.reset(engine, NoiseKey(words, *columns))
        self.preset, self.read_at = (
            0,
            0.0,
        )  # the largest that makes sense next; when a report was last read (s)
        self.history: list[list[int]] = [
            [] for _ in range(B)
        ]  # every token, prompts and roots included
        self.waiting: dict[
            int, list[int]
        ] = {}  # prompts that are not cached whole, by row; history has what is
        self.live = [False] * B  # rows that decode
        self.pending: deque[InFlight] = deque()  # cycles whose reports were not read
        self.stats, self.trace = Stats(), []

    @property
    def state(self) -> DecodeState:
        """Where the rows are, after every cycle that was launched."""
        return self.work.state

    def busy(self, row: int) -> bool:
        """Whether a row's turn goes on."""
        return self.live[row] or row in self.waiting

    def run(self, prompts: list[list[int] | None]) -> Iterator[list[list[int]]]:
        """Decode one turn. Yields the new tokens of every row, step by step; the first ones are the roots.

        prompts: per row the conversation so far, or None to leave the row idle
        """
        assert len(prompts) <= len(self.history), (len(prompts), len(self.history))
        for row, prompt in zip_longest(range(len(self.history)), prompts):
            self.admit(row, prompt) if prompt else self.release(row)
        while any(self.live) or self.waiting:
            yield self.step()

    def admit(
        self, row: int, prompt: list[int], stream: tuple[int, int] | None = None, most: int = 0
    ) -> None:
        """Give a row a turn: the coming steps cache its prompt and decode, beside the other rows.

        prompt: the conversation so far, below `engine.context` tokens; what the row has cached of it is not run again
        stream: (prompt, sample), the key of the noise of a new conversation; None: the row's own goes on, and its draws
        most: new tokens; 0: the engine's `max_new_tokens`
        """
        self.release(row)
        engine, state, length = self.engine, self.state, len(prompt)
        # the head's row below the common prefix pairs it with the token after it, so one row is done again;
        # the last token of a history (the root) is not cached
        begin = max(common_prefix(self.history[row][:-1], prompt) - 1, 0)
        self.history[row], self.waiting[row] = prompt[:begin], prompt
        self.work.catch_up(engine, engine.tree_policy.prefill_tree)
        state.tokens[row, :length] = torch.tensor(prompt, device=state.pos.device)
        state.pos[row] = length  # cycles that run meanwhile write their scratch behind the prompt
        state.limit[row] = min(length + (most or engine.config.max_new_tokens), engine.context) - 1
        draft = sequence_of(state.drafter_state, row)
        copy_into(draft, engine.drafter.rewind(draft, torch.full_like(state.pos[:1], begin)))
        if stream is not None:
            state.key.prompt[row], state.key.sample[row], state.draws[row] = *stream, 0

    def release(self, row: int) -> None:
        """End a row's turn, if it has one."""
        self.waiting.pop(row, None)
        self.live[row], self.state.done[row] = False, True
        if not any(self.live):
            self.pending.clear()

    def step(self) -> list[list[int]]:
        """Run a cycle of the rows that decode, and about a chunk of the prompts that wait.

        Returns: the new tokens of every row that were read. Writes: history, stats, trace.
        """
        new: list[list[int]] = [[] for _ in self.history]
        began = (
            self.read_at if self.pending else time.perf_counter()
        )  # only a device goes on while the caller works
        late = 0 if self.waiting else self.host_lag  # prompts are cached when no cycle is in flight
        while any(self.live) and len(self.pending) <= late:
            self.pending.append(self._launch())
        while len(self.pending) > late:
            self._read(self.pending.popleft(), new)
        self.read_at = time.perf_counter()
        self.stats.decode_s += self.read_at - began
        if self.waiting:
            self._prefill(new)
            self.stats.prefill_s += time.perf_counter() - self.read_at
        for row, tokens in enumerate(new):
            self.history[row] += tokens
        return new

    def _prefill(self, new: list[list[int]]) -> None:
        """Run about one chunk of the prompts that wait. Writes: roots, to `new`."""
        left = PREFILL_CHUNK  # tokens
        for row, prompt in list(self.waiting.items()):
            while left > 0 and row in self.waiting:
                begin = len(self.history[row])
                chunk = prompt[begin : begin + PREFILL_CHUNK]
                self.work.prefill(self.engine, row, begin, len(chunk))
                self.history[row] += chunk
                left -= len(chunk)
                root = int(
                    self.state.tokens[row, len(prompt)]
                )  # waits for the chunk: its time counts as prefill
                if len(self.history[row]) == len(prompt):
                    new[row] = [root]
                    self.live[row], self.preset = (
                        not self.state.done[row],
                        len(self.engine.cycles) - 1,
                    )
                    del self.waiting[row]

    def _launch(self, preset: int | None = None) -> InFlight:
        """Run a cycle of a preset, or of the one that the tree policy takes."""
        engine, work, began = self.engine, self.work, time.perf_counter()
        preset = engine.tree_policy.next(self.preset) if preset is None else preset
        work.catch_up(engine, preset)
        if engine.captured:
            outcome = work.replay(engine, preset)
        else:
            work.state, outcome = engine.cycles[preset](work.cache, work.state)
        tree_trace, tree = None, outcome.tree
        if engine.config.trace:
            values = () if tree.values is None else (tree.values,)
            tree_trace = HostCopy(tree.tokens, tree.parents, tree.depths, outcome.path, *values)
        return InFlight(HostCopy(outcome.report), preset, began, tree_trace)

    def time_cycle(self, preset: int) -> float:
        """Run a cycle of one preset, whatever it brings. Returns: its time (s)."""
        launched = self._launch(preset)
        (packed,) = launched.report.read()
        return self._seconds(launched, Report.rows(packed)[0])

    def _seconds(self, launched: InFlight, report: Report) -> float:
        """How long a cycle took: by the device's clock, if it has one, where it runs ahead of the host."""
        on_device = (report.times[-1] - report.times[0]) / 1e9
        return on_device if self.host_lag and on_device else time.perf_counter() - launched.began

    def _read(self, launched: InFlight, new: list[list[int]]) -> None:
        """Take in what a cycle decided. Writes: its tokens, to `new`; live, preset, stats, trace."""
        (packed,) = launched.report.read()
        reports, tree_trace = (
            Report.rows(packed),
            launched.tree_trace.read() if launched.tree_trace else None,
        )
        live = [row for row, report in enumerate(reports) if self.live[row] and report.count]
        if not live:  # a surplus cycle
            return
        for row in live:
            new[row] += reports[row].emitted[: reports[row].count]
            self.live[row] = not reports[row].done
        self.trace += [trace_row(tree_trace, row, reports[row]) for row in live if tree_trace]
        lengths = [reports[row].length for row in live]
        stats, (began, drafted, verified, ended) = self.stats, reports[0].times
        stats.live_rows.append(live)
        stats.accept_lengths += lengths
        stats.tokens += sum(reports[row].count for row in live)
        stats.draft_s += (drafted - began + ended - verified) / 1e9
        stats.verify_s += (verified - drafted) / 1e9
        wanted = max((reports[row].preset for row in live if self.live[row]), default=0)
        self.preset = min(wanted, len(self.engine.cycles) - 1)
        stats.presets.append((launched.preset, self._seconds(launched, reports[0])))
        self.engine.tree_policy.observe(
            launched.preset, sum(lengths) / len(live), stats.presets[-1][1], len(live)
        )


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
