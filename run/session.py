"""The host's side of decoding: B sequences over one cache, prompts in chunks, late reports.

1. `Session.admit` gives a sequence a prompt while the others decode.
2. Every `step` launches a cycle and reads a report, on CUDA one cycle late, so that the device
   never waits for the host.
3. Then it runs chunks of prompts; the last chunk of a prompt decides the root.

Of the sequences that are idle, a cycle leaves out those before the first that decodes and behind
the last (`View.rows`); on CUDA it runs all. The tokens and positions of idle ones never change.
The output is a function of (weights, prompt, its own parameters, seed) alone, whatever the other
sequences do.
Observers watch (run/observer.py): the engine's own, its policy, picks the preset of every step. A
guide masks the tokens of a sequence (`decode.Guide`).

Captured cycles need fixed addresses, so buffers stay with the cycles when a session ends. On
CUDA every step is captured once and replayed; elsewhere it is called.
Trade-off: prefill is not compiled, as matrix products take its time; where it is captured, chunks
are padded to one of two widths.
Not here: the cycle (decode.py); requests, texts and stop strings (run/scheduler.py).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from backends.library import single_torch_thread
from decode import PREFILL_CHUNK, Cycle, DecodeState, Engine, Guide, GuideSource, prefill_chunk
from draft_tree import DrafterUpdate
from kv_cache import KVCache
from run.observer import CycleResult, Observer, View
from run.options import Sampling
from run.stats import Stats, sequence_memory, trace_row
from run.tree_paths import ANY_TREE, DraftLimit
from runtime import (
    Replay,
    copy_into,
    copy_sequence,
    is_finite,
    prefix_of,
    replace_fields,
    sequence_of,
    sequences_of,
)
from sampling import SamplingMode, SamplingTensors

PREFILL_WIDTHS = (64, PREFILL_CHUNK)  # captured prefill passes are padded to one of these


class Trace(Observer):
    """The lines of `trace`: one per cycle and sequence."""

    def __init__(self):
        self.lines: list[dict[str, Any]] = []

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        tree = update.tree
        traced = (tree.tokens, tree.parents, tree.depths, update.path)
        return traced if tree.values is None else (*traced, tree.values)

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        self.lines += [trace_row(copied, seq, result) for seq in result.taken]


class Buffers:
    """KV cache, state and captured steps of B sequences; `Cycles.buffers` keeps them."""

    def __init__(self, engine: Engine):
        """Allocate. Raises: ValueError when memory does not suffice."""
        sequence_memory(engine)
        batch = engine.config.batch_size
        weight = engine.target.norm.weight
        device = weight.device
        config = engine.target.config
        room = (batch, engine.slots, engine.kv_dtype, str(device))
        self.cache = KVCache.empty(config, *room, engine.nodes)
        number = torch.zeros(batch, dtype=torch.long, device=device)
        self.state = DecodeState(
            tokens=torch.zeros(batch, engine.context + 1, dtype=torch.long, device=device),
            pos=number,
            draws=number.clone(),
            done=number == 0,
            limit=number.clone(),
            sampling=engine.sampling_tensors([Sampling()] * batch, 0),
            drafter_state=engine.drafter.init(batch, engine.slots),
        )
        self.start = number[:1].clone()  # of a prefill chunk
        # [B, 1, F], the features that each root was chosen from
        self.root_features = weight.new_zeros(batch, 1, config.dim)
        # views of some sequences: the state that they belong to, of the cache, of the state
        self.parts: dict[range, tuple[DecodeState, KVCache, DecodeState]] = {}
        self.replays: dict[Any, Replay] = {}  # of cycles by mode and preset; of other steps
        self.scratch: dict[str, Any] = {}  # memory that captured prefills share

    def part(self, rows: range) -> tuple[KVCache, DecodeState]:
        """Return the cache and the state of some sequences: views, or of all the buffers."""
        if len(rows) == len(self.state.pos):
            return self.cache, self.state
        if rows not in self.parts or self.parts[rows][0] is not self.state:
            views = sequences_of(self.cache, rows), sequences_of(self.state, rows)
            self.parts[rows] = (self.state, *views)
        return self.parts[rows][1:]

    def reset(self, engine: Engine, sampling: SamplingTensors) -> None:
        """Make every sequence idle and empty. Writes: the state in place."""
        zeros = torch.zeros_like(self.state.pos)
        self.state.tokens.zero_()
        drafter_state = engine.drafter.rewind(self.state.drafter_state, zeros)
        done = zeros == 0
        tokens = self.state.tokens
        empty = DecodeState(tokens, zeros, zeros, done, zeros, sampling, drafter_state)
        copy_into(self.state, empty)


def run_step(engine: Engine, buffers: Buffers, key: Hashable, body: Callable[[], Any]) -> Any:
    """Run a step over the buffers; where cycles are captured, it is captured, and replayed.

    key: tells steps apart, in `Buffers.replays`
    body: holds no session, since the buffers keep it; a captured one returns the same tensors
        every time, and writes the state in place
    """
    if not engine.captured:
        with single_torch_thread(engine.target.program is not None):
            return body()
    if key not in buffers.replays:
        buffers.replays[key] = Replay(body, engine.device, buffers.scratch)
    return buffers.replays[key]()


class Session:
    """B sequences over one cache, each a conversation. Cached tokens stay until overwritten."""

    def __init__(
        self,
        engine: Engine,
        noise_ids: Sequence[tuple[int, int]] = (),
        host_lag: int | None = None,
    ):
        """Take buffers of a finished session, or make them; dropped, it gives them back.

        noise_ids: (prompt, sample) per sequence, the key of its noise until `admit` names another;
            (0, 0) for further sequences
        host_lag: cycles that may stay unread while the host goes on; default 1 on CUDA, 0 elsewhere
        """
        batch = engine.config.batch_size
        assert len(noise_ids) <= batch, (noise_ids, batch)
        self.engine = engine
        unused = engine.cycles.buffers
        self.buffers = unused.pop() if unused else Buffers(engine)
        weakref.finalize(self, unused.append, self.buffers)
        device = self.state.pos.device
        if host_lag is None:
            host_lag = 1 if device.type == "cuda" else 0
        self.host_lag = host_lag
        padded = [*noise_ids, *[(0, 0)] * (batch - len(noise_ids))]
        params = [engine.config.sampling] * batch
        tensors = engine.sampling_tensors(params, engine.config.seed)
        prompts = torch.tensor([prompt for prompt, _ in padded], device=device)
        samples = torch.tensor([sample for _, sample in padded], device=device)
        self.buffers.reset(engine, replace_fields(tensors, prompt=prompts, sample=samples))
        self.sampling = params
        self.draft_limits = [ANY_TREE] * batch
        self.policy = engine.policy.for_session()
        self.observers = [self.policy]
        self.guides: list[Guide | None] = [None] * batch  # mask the tokens of each sequence
        self.read_at = 0.0  # when a report was last read (s)
        # every token of a sequence, prompt and roots included; during prefill, the cached part
        self.history: list[list[int]] = [[] for _ in range(batch)]
        self.prefilling: dict[int, list[int]] = {}  # prompts that are not fully cached, by sequence
        self.live = [False] * batch  # sequences that decode
        self.view = self._view()
        self.answers = [0] * batch  # where the answer of each turn begins
        self.guide_errors: dict[int, str] = {}  # sequences that their guide has ended, and why
        # sequences that ended where numbers were not finite, and what is wrong
        self.nan_sequences: dict[int, str] = {}
        self.pending: deque[CycleResult] = deque()  # cycles whose reports were not read
        self.stats = Stats()
        self.trace: list[dict[str, Any]] = []
        if engine.config.trace:
            trace = Trace()
            self.trace = trace.lines
            self.observers.append(trace)

    def _view(self) -> View:
        """Make the view of the observers, which holds no session: the buffers keep their steps."""
        buffers = self.buffers
        engine = self.engine

        def drafter_state() -> Any:
            return buffers.state.drafter_state

        def run(key: Hashable, body: Callable[[DecodeState], Any]) -> Any:
            return run_step(engine, buffers, key, lambda: body(buffers.state))

        return View(engine, self.history, self.live, self.draft_limits, drafter_state, run)

    @property
    def state(self) -> DecodeState:
        """The state after all cycles that were launched."""
        return self.buffers.state

    @property
    def mode(self) -> SamplingMode:
        """The mode of the next cycle: the highest of the live sequences."""
        live = [own for own, decodes in zip(self.sampling, self.live) if decodes]
        return max(map(SamplingMode.needed_by, live or self.sampling))

    def busy(self, seq: int) -> bool:
        """Return whether a sequence's turn goes on."""
        return self.live[seq] or seq in self.prefilling

    def prefill_progress(self) -> str:
        """Describe how far prompts are read; "" while none is."""
        read = sum(len(self.history[seq]) for seq in self.prefilling)
        of_all = sum(map(len, self.prefilling.values()))
        return f"[reading: {read} of {of_all} tokens]" if of_all else ""

    def cached(self, seq: int, prompt: list[int]) -> int:
        """Count the tokens of a prompt that a sequence has cached, from the first on."""
        return common_prefix(self.history[seq][:-1], prompt)  # its last token may be the root

    def prefix(self, seq: int, count: int) -> list[Tensor]:
        """Return everything that is cached of a sequence's first tokens, as views."""
        return prefix_of((self.buffers.cache, self.state.drafter_state), seq, count)

    def decode_turn(self, prompts: list[list[int] | None]) -> Iterator[list[list[int]]]:
        """Decode one turn. Yields the new tokens of every sequence, step by step, roots first.

        prompts: per sequence the conversation so far, or None to leave it idle
        Raises: ValueError if a sequence ended where its guide allows nothing.
        """
        assert len(prompts) <= len(self.history), (len(prompts), len(self.history))
        for seq, prompt in zip_longest(range(len(self.history)), prompts):
            if prompt:
                self.admit(seq, prompt)
            else:
                self.release(seq)
        while any(self.live) or self.prefilling:
            yield self.step()
            for fault in (*self.guide_errors.values(), *self.nan_sequences.values()):
                raise ValueError(fault)

    def configure(
        self, seq: int, params: Sampling, seed: int, draft_limit: DraftLimit = ANY_TREE
    ) -> None:
        """Set the parameters and the seed of an idle sequence; before, they are the engine's.

        draft_limit: of its trees. A cycle drafts as the live sequence that takes most, or its
            smallest preset
        """
        self.sampling[seq] = params
        self.draft_limits[seq] = draft_limit
        row = sequence_of(self.state.sampling, seq)
        own = self.engine.sampling_tensors([params], seed)
        kept = {name: getattr(row, name) for name in ("prompt", "sample", "answer")}
        copy_into(row, replace_fields(own, **kept))

    def admit(
        self,
        seq: int,
        prompt: list[int],
        noise_id: tuple[int, int] | None = None,
        max_new_tokens: int = 0,
        source: int | None = None,
        guide: GuideSource | None = None,
    ) -> None:
        """Start a turn of a sequence, beside the others.

        The following `step` calls read its prompt in chunks, then decode it.
        prompt: the conversation so far, below `engine.context` tokens; the cached part is kept
        noise_id: (prompt, sample), the key of the noise of a new conversation; None: the sequence's
            own noise goes on, and its draws
        max_new_tokens: 0: the engine's
        source: a sequence, busy or not, whose cached part of the prompt is copied; None: the own
        guide: masks the tokens of the answer (drafts/grammar.py); None: the engine's, if any
        """
        self.release(seq)
        self.guide_errors.pop(seq, None)
        self.nan_sequences.pop(seq, None)
        engine = self.engine
        guide = guide or engine.guide
        self.guides[seq] = guide.begin() if guide else None
        state = self.state
        length = len(prompt)
        self.answers[seq] = length
        self._pick_preset(reads_prompt=True)
        if source not in (None, seq):
            shared = self.cached(source, prompt)
            self.history[seq] = self.history[source][: shared + 1]
            copy_sequence((self.buffers.cache, state.drafter_state), source, seq, shared)
        # the head pairs the last common feature with the next token: one token is run again
        begin = self.buffers.cache.resume(seq, max(self.cached(seq, prompt) - 1, 0))
        self.history[seq] = prompt[:begin]
        self.prefilling[seq] = prompt
        state.tokens[seq, :length] = torch.tensor(prompt, device=state.pos.device)
        state.pos[seq] = length  # cycles that run meanwhile write their scratch behind the prompt
        state.sampling.answer[seq] = length
        limit = length + (max_new_tokens or engine.config.max_new_tokens)
        state.limit[seq] = min(limit, engine.context) - 1
        drafter_state = sequence_of(state.drafter_state, seq)
        cached = torch.full_like(state.pos[:1], begin)
        copy_into(drafter_state, engine.drafter.rewind(drafter_state, cached))
        if noise_id is not None:
            state.sampling.prompt[seq], state.sampling.sample[seq] = noise_id
            state.draws[seq] = 0

    def release(self, seq: int) -> None:
        """End a sequence's turn, if it has one; the observers get its text."""
        if self.live[seq]:
            self._finish(seq)
        self.prefilling.pop(seq, None)
        self.live[seq] = False
        self.state.done[seq] = True
        if not any(self.live):
            self.pending.clear()

    def truncate(self, seq: int, count: int) -> None:
        """End a sequence's turn, and drop the last `count` of the tokens that `step` returned.

        The draws of dropped tokens are taken back: the next turn is the same for every drafter.
        """
        kept = len(self.history[seq]) - count
        del self.history[seq][kept:]
        self.stats.tokens -= count
        self.guide_errors.pop(seq, None)  # of a token that is dropped
        self.release(seq)
        state = self.state
        state.draws[seq] += kept - 1 - state.pos[seq]  # cycles advance both by the same numbers

    def step(self) -> list[list[int]]:
        """Run a cycle of the live sequences, and about one chunk of the prompts.

        Returns: the new tokens of every sequence that were read.
        Writes: history, stats; the state of the observers.
        """
        new: list[list[int]] = [[] for _ in self.history]
        began = time.perf_counter()
        if self.pending:  # the device worked while the caller did: that time counts, too
            began = self.read_at
        lag = self.host_lag
        # prefill needs a state that no cycle changes, and a guide must have read every token
        if self.prefilling or self._is_guided():
            lag = 0
        while any(self.live) and len(self.pending) <= lag:
            self.pending.append(self._launch())
        while len(self.pending) > lag:
            self._read(self.pending.popleft(), new)
        self.read_at = time.perf_counter()
        self.stats.decode_s += self.read_at - began
        if self.prefilling:
            self._prefill(new)
            self.stats.prefill_s += time.perf_counter() - self.read_at
        for seq, tokens in enumerate(new):
            self.history[seq] += tokens
            if tokens and not self.busy(seq):
                self._finish(seq)
        return new

    def time_cycle(self, preset: int) -> float:
        """Run a cycle of one preset, whatever it yields. Returns: its time (s)."""
        return self._launch(preset).read(self.host_lag > 0).seconds

    def _pick_preset(self, preset: int | None = None, reads_prompt: bool = False) -> int:
        """Return the preset of the next step, which the observers have prepared. preset: given"""
        if preset is None:
            preset = self.policy.next_preset(self.view, reads_prompt)
        for observer in self.observers:
            observer.before_step(self.view, preset)
        return preset

    def _is_guided(self) -> bool:
        """Return whether any sequence that decodes has a guide."""
        return any(guide and decodes for guide, decodes in zip(self.guides, self.live))

    def _finish(self, seq: int) -> None:
        for observer in self.observers:
            observer.finished(self.history[seq], self.answers[seq])

    def _launch(self, preset: int | None = None) -> CycleResult:
        """Launch a cycle of a preset; None: of the one that the policy picks."""
        began = time.perf_counter()
        engine = self.engine
        buffers = self.buffers
        preset = self._pick_preset(preset)
        mode = self.mode
        cycle = engine.cycles.by_mode[mode][preset]
        rows = self.view.rows if any(self.live) else range(len(self.live))
        guided = self._is_guided()
        if guided:
            live = self.live[rows.start : rows.stop]
            guides = self.guides[rows.start : rows.stop]
            guides = [guide if decodes else None for guide, decodes in zip(guides, live)]
            around = next(filter(None, guides)).around
            cycle = Cycle(engine, around(engine, preset, guides, live), mode)
        cache, state = buffers.part(rows)
        in_place = engine.captured or state is not buffers.state

        def body() -> tuple[DrafterUpdate, Tensor]:
            new, *outcome = cycle(cache, state)
            if in_place:
                copy_into(state, new)
            else:
                buffers.state = new
            return outcome

        if engine.captured and guided:  # the host makes the masks, so the cycle is not captured
            update, report = body()
        else:
            update, report = run_step(engine, buffers, (mode, preset), body)
        further = [observer.host_tensors(update, self.view) for observer in self.observers]
        return CycleResult(report, preset, began, further, rows)

    def _read(self, result: CycleResult, new: list[list[int]]) -> None:
        """Read a cycle. Writes: its tokens, to `new`; live, stats."""
        result.read(self.host_lag > 0)
        live = [seq for seq, count in enumerate(result.count) if self.live[seq] and count]
        if not live:  # launched before the host knew that all were done
            return
        result.live = live
        result.taken = {}
        for seq in live:
            if result.done[seq] >= 2:
                self._break(seq)
                continue
            self.live[seq] = not result.done[seq]
            result.taken[seq] = self._allowed(seq, result.emitted[seq][: result.count[seq]])
            new[seq] += result.taken[seq]
        began, drafted, verified, ended = result.times
        stats = self.stats
        stats.live_sequences.append(live)
        stats.accept_lengths += [result.length[seq] for seq in live]
        stats.tokens += sum(map(len, result.taken.values()))
        stats.draft_s += (drafted - began + ended - verified) / 1e9
        stats.verify_s += (verified - drafted) / 1e9
        stats.presets.append((result.preset, result.seconds))
        for observer, copied in zip(self.observers, result.further):
            observer.after_cycle(result, copied, self.view)

    def _allowed(self, seq: int, tokens: list[int]) -> list[int]:
        """Return the decided tokens that the sequence's guide allows.

        It allows all, or the sequence ends where nothing could follow.
        """
        guide = self.guides[seq]
        if guide is None:
            return tokens
        allowed = guide.take(tokens)
        if len(allowed) < len(tokens):
            self.release(seq)
            self.guide_errors[seq] = guide.fault
        return allowed

    def _prefill(self, new: list[list[int]]) -> None:
        """Run about one chunk of the prompts. Writes: roots, to `new`."""
        left = PREFILL_CHUNK  # tokens
        for seq, prompt in list(self.prefilling.items()):
            while left > 0 and seq in self.prefilling:
                begin = len(self.history[seq])
                chunk = prompt[begin : begin + PREFILL_CHUNK]
                allowed = None
                guide = self.guides[seq]
                # the last chunk alone decides a token
                if guide is not None and begin + len(chunk) == len(prompt):
                    allowed = guide.root_mask(self.engine.device)
                self._read_chunk(seq, begin, len(chunk), allowed)
                self.history[seq] += chunk
                left -= len(chunk)
                # waits for the chunk, so that its time counts as prefill
                root = int(self.state.tokens[seq, len(prompt)])
                if len(self.history[seq]) == len(prompt):
                    self.buffers.cache.keep_states(seq)
                    features = self.buffers.root_features[seq : seq + 1]
                    if not is_finite(features):
                        self._break(seq)
                        continue
                    for observer in self.observers:
                        observer.after_prompt(seq, features, root)
                    self.live[seq] = not self.state.done[seq]
                    del self.prefilling[seq]
                    new[seq] = self._allowed(seq, [root])
                    self.stats.first_tokens += len(new[seq])

    def _break(self, seq: int) -> None:
        """End a sequence whose numbers are not finite, and forget it.

        Writes: nan_sequences; the cache.
        """
        from files.not_finite import reason

        tokens = self.history[seq]
        self.live[seq] = False  # so `release` does not give observers its text
        self.release(seq)
        self.history[seq] = []
        # a mask does not hide NaN
        self.buffers.cache.clear(seq, len(tokens) + PREFILL_CHUNK)
        self.nan_sequences[seq] = reason(self.engine.target, tokens)

    def _read_chunk(self, seq: int, start: int, width: int, allowed: Tensor | None) -> None:
        """Run `prefill_chunk` for one sequence alone. Writes: its part of the buffers, in place."""
        engine = self.engine
        buffers = self.buffers
        if allowed is None and engine.captured:  # without a graph the host is slower than a GPU
            width = next(w for w in PREFILL_WIDTHS if w >= width)
        buffers.start.fill_(start)
        preset = self._pick_preset(reads_prompt=True)
        mode = SamplingMode.needed_by(self.sampling[seq])
        own = replace(engine, presets=(engine.presets[preset],))

        def body() -> None:
            state = sequence_of(buffers.state, seq)
            cache = sequence_of(buffers.cache, seq)
            inputs = (own, cache, state, mode, buffers.start, width, allowed)
            new, features = prefill_chunk(*inputs)
            copy_into(state, new)
            buffers.root_features[seq].copy_(features[0, :, : buffers.root_features.shape[2]])

        if allowed is not None:
            with single_torch_thread(engine.target.program is not None):
                return body()
        run_step(engine, buffers, ("prefill", width, seq, preset, mode), body)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that two sequences share."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
