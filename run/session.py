"""Sessions: the one loop (`decode.Loop`) with everything that the whole program adds to it.

- Observers watch (run/observer.py): the engine's own, its policy, picks the preset of every step.
- A guide masks the tokens of a sequence, as a grammar does (drafts/grammar.py).
- A sequence has parameters and a seed of its own, and a bound on its drafts.
- A prompt may begin with what another sequence has cached.
- A sequence whose numbers are not finite ends, and the others go on.
- `Stats` and the lines of `trace` are kept.

Not here: the loop and the cycle (decode.py); requests, texts and stop strings (run/scheduler.py).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from math import inf, isfinite
from typing import Any

from torch import Tensor

from decode import PREFILL_CHUNK, Cycle, DecodeState, Loop
from draft_tree import DrafterUpdate
from files.not_finite import is_finite, reason
from kv_cache import KVCache
from options import load_part
from run.clock import TimedResult
from run.engine import Engine, mode_for
from run.observer import Observer, View
from run.options import Sampling
from run.stats import Stats, sequence_memory
from runtime import (
    HostCopy,
    copy_into,
    replace_fields,
    sequence_of,
    sequences_of,
)


class Trace(Observer):
    """The lines of `trace`: one per cycle and sequence. The value of a padded node is null."""

    def __init__(self):
        self.lines: list[dict[str, Any]] = []

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        tree = update.tree
        traced = (tree.tokens, tree.parents, tree.depths, update.path)
        return traced if tree.values is None else (*traced, tree.values)

    def after_cycle(self, result: TimedResult, copied: list[list], view: View) -> None:
        for seq in result.taken:
            row = seq - result.first
            tokens, parents, depths, path, *values = (column[row] for column in copied)
            length = result.length[seq]
            line = {
                "row": seq,
                "pos": result.pos[seq],
                "root": tokens[0],
                "draft_tokens": tokens[1:],
                "parents": parents[1:],
                "depths": depths[1:],
                "accept_length": length,
                "path": path[1 : length + 1],
                "emitted": result.emitted[seq][: length + 1],
            }
            if values:
                drafted = values[0][1:]
                line["values"] = [value if isfinite(value) else None for value in drafted]
            self.lines.append(line)


class Session(Loop):
    """B sequences over one cache, each a conversation."""

    engine: Engine
    result_type = TimedResult

    def __init__(
        self,
        engine: Engine,
        noise_ids: Sequence[tuple[int, int]] = (),
        host_lag: int | None = None,
    ):
        """Take buffers of a session that was closed, or make them.

        noise_ids: (prompt, sample) per sequence, the key of its noise until `admit` names another;
            (0, 0) for further sequences
        host_lag: cycles that may stay unread while the host goes on; default: 1 on CUDA, else 0
        Raises: ValueError when memory does not suffice.
        """
        if not engine.free:
            sequence_memory(engine)
        super().__init__(engine)
        self.most_lag = self.host_lag if host_lag is None else host_lag
        # views of some sequences: the state that they belong to, of the cache, of the state
        self.parts: dict[range, tuple[DecodeState, KVCache, DecodeState]] = {}
        batch = engine.config.batch_size
        self.sampling = [engine.config.sampling] * batch
        assert len(noise_ids) <= batch, (noise_ids, batch)
        key = self.state.sampling
        for seq, (prompt, sample) in enumerate(noise_ids):
            key.prompt[seq], key.sample[seq] = prompt, sample
        self.draft_limits = [inf] * batch
        self.policy = engine.policy.for_session()
        self.observers = [self.policy]
        # `drafts.grammar.TextGuide`, which masks the tokens of a sequence; None: all may follow
        self.guides: list[Any] = [None] * batch
        self.guided: dict[Hashable, Any] = {}  # cycles under guides
        self.view = View(engine, self.buffers, self.history, self.live, self.draft_limits)
        self.answers = [0] * batch  # where the answer of each turn begins
        self.guide_errors: dict[int, str] = {}  # sequences that their guide has ended, and why
        # sequences that ended where numbers were not finite, and what is wrong
        self.nan_sequences: dict[int, str] = {}
        self.began_s = 0.0  # when the last cycle began: when its preset was picked
        self.read_at = 0.0  # when a report was last read (s)
        self.stats = Stats()
        self.trace: list[dict[str, Any]] = []
        if engine.published_tau:
            self.observers.append(load_part("watch", "published tau")(engine))
        if engine.config.trace:
            trace = Trace()
            self.trace = trace.lines
            self.observers.append(trace)

    @property
    def mode(self) -> int:
        """The mode of the next cycle."""
        return self.mode_of([seq for seq, decodes in enumerate(self.live) if decodes])

    def mode_of(self, seqs: Sequence[int]) -> int:
        """Return the highest mode that some sequences need; of none: that all need."""
        own = [self.sampling[seq] for seq in seqs] or self.sampling
        return max(map(mode_for, own))

    def prefill_progress(self) -> str:
        """Describe how far prompts are read; "" while none is."""
        read = sum(len(self.history[seq]) for seq in self.prefilling)
        of_all = sum(map(len, self.prefilling.values()))
        return f"[reading: {read} of {of_all} tokens]" if of_all else ""

    def cached(self, seq: int, prompt: list[int]) -> int:
        """Count the tokens of a prompt that a sequence has cached, from the first on."""
        return common_prefix(self.history[seq][:-1], prompt)  # its last token may be the root

    # -------------------------------------------------------------------------------------- turns

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

    def configure(self, seq: int, params: Sampling, seed: int, draft_limit: float = inf) -> None:
        """Set the parameters and the seed of an idle sequence; before, they are the engine's.

        draft_limit: drafted tokens of a cycle. It has the largest bound of the live sequences
        """
        self.sampling[seq] = params
        self.draft_limits[seq] = draft_limit
        row = sequence_of(self.state.sampling, seq)
        own = self.engine.sampling_tensors([params], seed)
        copy_into(row, replace_fields(own, prompt=row.prompt, sample=row.sample))

    def admit(
        self,
        seq: int,
        prompt: list[int],
        noise_id: tuple[int, int] | None = None,
        max_new_tokens: int = 0,
        source: int | None = None,
        guide: Any = None,
    ) -> None:
        """Start a turn of a sequence, as `Loop.admit`.

        source: a sequence, busy or not, whose cached part of the prompt is copied; None: the own
        guide: masks the tokens of the answer; None: the engine's, if any
        """
        self.release(seq)
        self.guide_errors.pop(seq, None)
        self.nan_sequences.pop(seq, None)
        guide = guide or self.engine.guide
        self.guides[seq] = guide.begin() if guide else None
        self.answers[seq] = len(prompt)
        if self.engine.shaping is not None:
            self.state.sampling.further.answer[seq] = len(prompt)
        self.pick_preset(reads_prompt=True)
        if source not in (None, seq):
            shared = self.cached(source, prompt)
            self.history[seq] = self.history[source][: shared + 1]
            both = (self.buffers.cache, self.state.drafter_state)
            copy_sequence(both, source, seq, shared)
        # the head pairs the last common feature with the next token: one token is run again
        begin = max(self.cached(seq, prompt) - 1, 0)
        states = self.buffers.cache.states
        if states:  # which may have to go on earlier
            begin = states.resume(seq, begin)
        super().admit(seq, prompt, noise_id, max_new_tokens, begin)

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

    def time_cycle(self, preset: int) -> TimedResult:
        """Run a cycle of one preset, whatever it yields. Returns: it, with its seconds."""
        self.began_s = time.perf_counter()
        self._prepare(preset)
        result = self._launch(preset)
        result.read()
        result.seconds = self._seconds(result)
        return result

    def _seconds(self, result: TimedResult) -> float:
        """Return the time of a cycle: by the device's clock, where the host runs ahead of it."""
        seconds = (result.times["ended"] - result.times["began"]) / 1e9
        if self.most_lag and seconds:
            return seconds
        return time.perf_counter() - result.began_s

    # ----------------------------------------------------------------------- what it adds to a step

    def _decode(self, new: list[list[int]]) -> None:
        began = time.perf_counter()
        if self.pending:  # the device worked while the caller did: that time counts, too
            began = self.read_at
        self.host_lag = 0 if self.is_guided() else self.most_lag
        super()._decode(new)
        self.read_at = time.perf_counter()
        self.stats.decode_s += self.read_at - began

    def _prefill(self, new: list[list[int]]) -> None:
        reading = list(self.prefilling)
        super()._prefill(new)
        self.stats.prefill_s += time.perf_counter() - self.read_at
        self.stats.first_tokens += sum(len(new[seq]) for seq in reading)

    def pick_preset(self, reads_prompt: bool = False) -> int:
        """Return the preset that the policy picks, which the observers have prepared."""
        self.began_s = time.perf_counter()
        preset = self.policy.next_preset(self.view, reads_prompt)
        self._prepare(preset)
        return preset

    def _prepare(self, preset: int) -> None:
        for observer in self.observers:
            observer.before_step(self.view, preset)

    def is_guided(self) -> bool:
        """Return whether any sequence that decodes has a guide, which must read every token."""
        return any(guide and decodes for guide, decodes in zip(self.guides, self.live))

    @property
    def rows(self) -> range:
        """The sequences that the next cycle runs."""
        return self.view.rows if any(self.live) else range(len(self.live))

    def part(self) -> tuple[int, KVCache, DecodeState]:
        """Return the sequences from the first that decodes to the last, as views where possible."""
        rows = self.rows
        if len(rows) == len(self.live):
            return super().part()
        known = self.parts.get(rows)
        if known is None or known[0] is not self.state:
            views = sequences_of(self.buffers.cache, rows), sequences_of(self.state, rows)
            known = self.parts[rows] = (self.state, *views)
        return rows.start, *known[1:]

    def pick_cycle(self, preset: int, reader: int | None = None) -> tuple[Cycle, Hashable]:
        """Return the cycle of a preset; one under guides is not captured: the host makes masks."""
        cycle, key = super().pick_cycle(preset, reader)
        rows = self.rows
        live = self.live[rows.start : rows.stop]
        guides = self.guides[rows.start : rows.stop]
        if reader is not None:
            left = len(self.prefilling[reader]) - len(self.history[reader])
            # the last chunk alone decides a token
            live = [left <= PREFILL_CHUNK]
            guides = [self.guides[reader]]
        guides = [guide if decides else None for guide, decides in zip(guides, live)]
        if not any(guides):
            return cycle, key
        if key not in self.guided:
            part = load_part("extension", "guided cycle")
            self.guided[key] = part(self.engine, preset, cycle.mode)
        self.guided[key].drafter.follow(guides, live)
        return self.guided[key], None

    def _launch(self, preset: int) -> TimedResult:
        """Launch a cycle, and copy what the observers ask for. Writes: result.further."""
        result = super()._launch(preset)
        result.began_s = self.began_s
        watch = [observer.host_tensors(result.update, self.view) for observer in self.observers]
        result.further = [HostCopy(*tensors) for tensors in watch]
        return result

    def accept_tokens(self, seq: int, tokens: list[int]) -> list[int]:
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

    def after_prompt(self, seq: int, root: int) -> bool:
        """Return whether a prompt's numbers are finite. The observers get its root."""
        if self.buffers.cache.states:
            self.buffers.cache.states.keep(seq)  # to which an admission may return
        features = self.buffers.root_features[seq : seq + 1]
        if not is_finite(features):
            self.broken(seq)
            return False
        for observer in self.observers:
            observer.after_prompt(seq, features, root)
        return True

    def after_cycle(self, result: TimedResult) -> None:
        result.seconds = self._seconds(result)
        times = result.times
        stats = self.stats
        stats.live_sequences.append(result.live)
        stats.accept_lengths += [result.length[seq] for seq in result.live]
        stats.tokens += sum(map(len, result.taken.values()))
        drafted = times["drafted"] - times["began"] + times["ended"] - times["verified"]
        stats.draft_s += drafted / 1e9
        stats.verify_s += (times["verified"] - times["drafted"]) / 1e9
        stats.presets.append((result.preset, result.seconds))
        for observer, further in zip(self.observers, result.further):
            observer.after_cycle(result, further.read(), self.view)

    def finished(self, seq: int) -> None:
        for observer in self.observers:
            observer.finished(self.history[seq], self.answers[seq])

    def broken(self, seq: int) -> None:
        """End a sequence whose numbers are not finite, and forget it.

        Writes: nan_sequences; the cache.
        """
        tokens = self.history[seq]
        self.live[seq] = False  # so `release` does not give observers its text
        self.release(seq)
        self.history[seq] = []
        # a mask does not hide NaN
        for view in prefix_of(self.buffers.cache, seq, len(tokens) + PREFILL_CHUNK):
            view.zero_()
        self.nan_sequences[seq] = reason(self.engine.target, tokens)


def copy_sequence(record: Any, source: int, seq: int, slots: int) -> None:
    """Copy one sequence of nested tuples of tensors and caches to another.

    slots: of each cache, from the first on
    Writes: the record.
    """
    for to, own in zip(prefix_of(record, seq, slots), prefix_of(record, source, slots)):
        to.copy_(own)


def prefix_of(record: Any, seq: int, slots: int) -> list[Tensor]:
    """View one sequence of nested tuples of tensors and caches, with its states.

    Where they are copied, `States.resume` knows which of the states serve.
    slots: as for `copy_sequence`
    """
    if isinstance(record, KVCache):
        buffers = record.states.buffers() if record.states else ()
        slots_of = [buffer[seq, :, :slots] for buffer in (*record.k, *record.v)]
        return slots_of + [buffer[seq] for buffer in buffers]
    if isinstance(record, Tensor):
        return [record[seq]]
    return [view for part in record or () for view in prefix_of(part, seq, slots)]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that two sequences share."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
