"""The host's side of decoding: B sequences over one cache, prompts in chunks, late reports.

1. `Session.admit` gives a sequence a prompt while the others decode.
2. Every `step` launches a cycle and reads a report, on CUDA one cycle late, so that the device
   never waits for the host.
3. Then it runs chunks of prompts; the last chunk of a prompt decides the root.

Finished sequences run on, but neither their tokens nor their positions change. The output is a
function of (weights, prompt, its own parameters, seed) alone, whatever the other sequences'.
Not here: the memory of the sequences (buffers.py), the cycle (decode.py), the next prompt
(generate.py).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from buffers import Buffers
from decode import PREFILL_CHUNK, DecodeState, Engine, Report
from logprobs import Logprob, Logprobs
from not_finite import is_finite, reason
from ops.library import single_torch_thread
from options import Sampling
from runtime import HostCopy, copy_into, copy_sequence, sequence_of
from sampling import MASK32, Kind, NoiseKey, Rule
from stats import Stats, trace_row


class InFlight(NamedTuple):
    """A cycle that the host has launched and not read yet."""

    report: HostCopy
    preset: int
    began: float  # host's clock (s)
    # with --trace: tokens, parents, depths, accepted path, and values where the tree has them
    tree_trace: HostCopy | None
    logprobs: Logprobs | None


class Session:
    """B sequences over one cache, each a conversation. Cached tokens stay until overwritten."""

    def __init__(
        self,
        engine: Engine,
        noise_ids: Sequence[tuple[int, int]] = (),
        host_lag: int | None = None,
    ):
        """Take buffers from the engine's pool, or make them.

        noise_ids: (prompt, sample) per sequence, the key of its noise until `admit` names another;
            (0, 0) for further sequences
        host_lag: cycles that may stay unread while the host goes on; default 1 on CUDA, 0 elsewhere
        """
        batch = engine.config.batch_size
        assert len(noise_ids) <= batch, (noise_ids, batch)
        self.engine = engine
        self.buffers = engine.pool.pop() if engine.pool else Buffers(engine)
        weakref.finalize(self, engine.pool.append, self.buffers)
        device = self.state.pos.device
        if host_lag is None:
            host_lag = 1 if device.type == "cuda" else 0
        self.host_lag = host_lag
        padded = [*noise_ids, *[(0, 0)] * (batch - len(noise_ids))]
        prompts = torch.tensor([prompt for prompt, _ in padded], device=device)
        samples = torch.tensor([sample for _, sample in padded], device=device)
        seed = engine.config.seed
        words = torch.tensor([seed & MASK32, seed >> 32], device=device).expand(batch, 2)
        greedy = torch.full_like(prompts, engine.config.temperature == 0, dtype=torch.bool)
        self.buffers.reset(engine, NoiseKey(words, prompts, samples, greedy))
        self.sampling = [engine.config.sampling] * batch
        self.preset = 0  # the largest that makes sense next
        self.expected: list[float] | None = None  # accepted tokens per preset, where they are known
        self.read_at = 0.0  # when a report was last read (s)
        # every token of a sequence, prompt and roots included; during prefill, the cached part
        self.history: list[list[int]] = [[] for _ in range(batch)]
        self.prefilling: dict[int, list[int]] = {}  # prompts that are not fully cached, by sequence
        # sequences that get log-probabilities, and how many of the likeliest tokens with each
        self.wanted: dict[int, int] = {}
        self.logprobs: dict[int, list[Logprob]] = {}  # of the last step's new tokens
        self.live = [False] * batch  # sequences that decode
        self.answers = [0] * batch  # where the answer of each turn begins
        self.guides: list[Any] = [None] * batch  # extras.grammar.Guide of each turn with a grammar
        self.faults: dict[int, str] = {}  # sequences that ended where their grammar allows nothing
        self.broken: dict[int, str] = {}  # sequences that ended where numbers were not finite
        self.pending: deque[InFlight] = deque()  # cycles whose reports were not read
        self.stats = Stats()
        self.trace: list[dict[str, Any]] = []

    @property
    def state(self) -> DecodeState:
        """The state behind every cycle that was launched."""
        return self.buffers.state

    @property
    def kind(self) -> Kind:
        """The kind of the next cycle: the latest of the live sequences."""
        live = [own for own, decodes in zip(self.sampling, self.live) if decodes]
        return max(map(Kind.of, live or self.sampling))

    def busy(self, seq: int) -> bool:
        """Check whether a sequence's turn goes on."""
        return self.live[seq] or seq in self.prefilling

    def cached(self, seq: int, prompt: list[int]) -> int:
        """Count the tokens of a prompt that a sequence has cached, from the first on."""
        return common_prefix(self.history[seq][:-1], prompt)  # its last token may be the root

    def run(self, prompts: list[list[int] | None]) -> Iterator[list[list[int]]]:
        """Decode one turn. Yields the new tokens of every sequence, step by step, roots first.

        prompts: per sequence the conversation so far, or None to leave it idle
        """
        assert len(prompts) <= len(self.history), (len(prompts), len(self.history))
        for seq, prompt in zip_longest(range(len(self.history)), prompts):
            if prompt:
                self.admit(seq, prompt)
            else:
                self.release(seq)
        while any(self.live) or self.prefilling:
            yield self.step()
            self.raise_fault()

    def raise_fault(self) -> None:
        """Raise ValueError if a sequence ended by a fault."""
        for fault in (*self.faults.values(), *self.broken.values()):
            raise ValueError(fault)

    def configure(
        self, seq: int, sampling: Sampling, seed: int, likeliest: int | None = None
    ) -> None:
        """Set the parameters and the seed of an idle sequence; before, they are the engine's.

        likeliest: tokens that come with each token's log-probability; None: no log-probabilities
        """
        self.sampling[seq] = sampling
        self.wanted.pop(seq, None)
        if likeliest is not None:
            self.wanted[seq] = likeliest
        key = self.state.key
        rule = Rule.of([sampling], key.seed.device)
        key.seed[seq, 0] = seed & MASK32
        key.seed[seq, 1] = seed >> 32
        key.greedy[seq] = Kind.of(sampling) == Kind.GREEDY
        copy_into(sequence_of(self.state.rule, seq), rule)

    def admit(
        self,
        seq: int,
        prompt: list[int],
        noise_id: tuple[int, int] | None = None,
        max_new_tokens: int = 0,
        source: int | None = None,
        grammar: Any = None,
    ) -> None:
        """Give a sequence a turn: the coming steps cache its prompt and decode, beside the others.

        prompt: the conversation so far, below `engine.context` tokens; the cached part is kept
        noise_id: (prompt, sample), the key of the noise of a new conversation; None: the sequence's
            own noise goes on, and its draws
        max_new_tokens: 0: the engine's
        source: a sequence, busy or not, whose cached part of the prompt is copied; None: the own
        grammar: extras.grammar.Grammar of the answer; None: the engine's, if it has one
        """
        self.release(seq)
        self.faults.pop(seq, None)
        self.broken.pop(seq, None)
        engine = self.engine
        grammar = grammar or engine.grammar
        if grammar is not None:
            self.guides[seq] = grammar.guide()
        state = self.state
        length = len(prompt)
        self.answers[seq] = length
        self.buffers.catch_up(engine, engine.tree_policy.prefill_tree)
        if source not in (None, seq):
            shared = self.cached(source, prompt)
            self.history[seq] = self.history[source][: shared + 1]
            copy_sequence((self.buffers.cache, state.drafter_state), source, seq, shared)
        # the head pairs the last common feature with the token behind it: one token is run again
        begin = max(self.cached(seq, prompt) - 1, 0)
        self.history[seq] = prompt[:begin]
        self.prefilling[seq] = prompt
        state.tokens[seq, :length] = torch.tensor(prompt, device=state.pos.device)
        state.pos[seq] = length  # cycles that run meanwhile write their scratch behind the prompt
        limit = length + (max_new_tokens or engine.config.max_new_tokens)
        state.limit[seq] = min(limit, engine.context) - 1
        drafter_state = sequence_of(state.drafter_state, seq)
        kept = torch.full_like(state.pos[:1], begin)
        copy_into(drafter_state, engine.drafter.rewind(drafter_state, kept))
        if noise_id is not None:
            state.key.prompt[seq], state.key.sample[seq] = noise_id
            state.draws[seq] = 0

    def release(self, seq: int) -> None:
        """End a sequence's turn, if it has one. Writes: the drafter's kept texts."""
        if self.live[seq]:
            self._keep(seq)
        self.prefilling.pop(seq, None)
        self.live[seq] = False
        self.guides[seq] = None
        self.state.done[seq] = True
        if not any(self.live):
            self.pending.clear()

    def step(self) -> list[list[int]]:
        """Run a cycle of the live sequences, and about one chunk of the prompts.

        Returns: the new tokens of every sequence that were read. Writes: history, logprobs, stats,
            trace; the drafter's kept texts.
        """
        new: list[list[int]] = [[] for _ in self.history]
        self.logprobs = {seq: [] for seq in self.wanted}
        began = time.perf_counter()
        if self.pending:  # a device computes meanwhile: the time that the caller takes counts
            began = self.read_at
        lag = self.host_lag
        # prefill needs a state that nothing changes, and masks the tokens before
        if self.prefilling or any(self.guides):
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
                self._keep(seq)
        return new

    def _keep(self, seq: int) -> None:
        """Keep the text of a turn for later lookups, where the drafter has them."""
        kept = self.engine.drafter.kept
        if kept is not None:
            kept.add(self.history[seq], self.answers[seq])

    def _prefill(self, new: list[list[int]]) -> None:
        """Run about one chunk of the prompts. Writes: roots, to `new`."""
        left = PREFILL_CHUNK  # tokens
        for seq, prompt in list(self.prefilling.items()):
            while left > 0 and seq in self.prefilling:
                begin = len(self.history[seq])
                chunk = prompt[begin : begin + PREFILL_CHUNK]
                kind = Kind.of(self.sampling[seq])
                allowed = None
                # the last chunk alone decides a token
                if self.guides[seq] is not None and begin + len(chunk) == len(prompt):
                    allowed = self.guides[seq].mask(self.state.pos.device)
                self.buffers.prefill(self.engine, kind, seq, begin, len(chunk), allowed)
                self.history[seq] += chunk
                left -= len(chunk)
                # waits for the chunk, so that its time counts as prefill
                root = int(self.state.tokens[seq, len(prompt)])
                if len(self.history[seq]) == len(prompt):
                    if not is_finite(self.buffers.before_roots[seq]):
                        self._break(seq)
                        continue
                    if seq in self.wanted:
                        self._score_root(seq)
                    self.live[seq] = not self.state.done[seq]
                    self.preset = len(self.engine.drafter.presets) - 1
                    expected = self.engine.drafter.expected(self.state.drafter_state)
                    if expected is not None:
                        self._expect(expected.tolist())
                    del self.prefilling[seq]
                    new[seq] = self._allowed(seq, [root])

    def _break(self, seq: int) -> None:
        """End a sequence whose numbers are not finite, and forget it. Writes: broken; the cache."""
        tokens = self.history[seq]
        self.live[seq] = False  # its text is not kept
        self.release(seq)
        self.history[seq] = []
        for buffer in (*self.buffers.cache.k, *self.buffers.cache.v):
            buffer[seq, :, : len(tokens) + PREFILL_CHUNK] = 0  # a mask does not hide NaN
        self.broken[seq] = reason(self.engine.target, tokens)

    def _allowed(self, seq: int, tokens: list[int]) -> list[int]:
        """Return the decided tokens that the sequence's grammar allows.

        It allows all, or the sequence ends where nothing could follow.
        """
        guide = self.guides[seq]
        if guide is None:
            return tokens
        allowed = guide.take(tokens)
        if len(allowed) < len(tokens):
            self.release(seq)
            self.faults[seq] = "the grammar allows neither a token nor the end here; correct it"
        elif not self.live[seq]:
            self.guides[seq] = None
        return allowed

    def _score_root(self, seq: int) -> None:
        """Score the root of a prompt that was read. Writes: logprobs."""
        own = slice(seq, seq + 1)
        state = self.state
        root = state.tokens[own].gather(1, state.pos[own, None])  # [1, 1]
        features = self.buffers.before_roots[own]
        scored = Logprobs(self.engine.target, features, root, {0: self.wanted[seq]})
        self.logprobs[seq] += scored.read()[0]

    def _launch(self, preset: int | None = None) -> InFlight:
        """Run a cycle of a preset, by default of the one that the tree policy picks."""
        began = time.perf_counter()
        engine = self.engine
        buffers = self.buffers
        if preset is None:
            preset = engine.tree_policy.next(self.preset, self.expected)
        buffers.catch_up(engine, preset)
        guides = [own if decodes else None for own, decodes in zip(self.guides, self.live)]
        guide = next(filter(None, guides), None)
        if guide is not None:
            drafter = guide.around(engine.drafter, preset, guides, self.live)
            outcome = buffers.guided(engine, self.kind, drafter)
        elif engine.captured:
            outcome = buffers.replay(engine, self.kind, preset)
        else:
            cycle = engine.cycles[self.kind][preset]
            with single_torch_thread(engine.target.fused is not None):
                buffers.state, outcome = cycle(buffers.cache, buffers.state)
        tree_trace = None
        if engine.config.trace:
            tree = outcome.tree
            traced = [tree.tokens, tree.parents, tree.depths, outcome.path]
            if tree.values is not None:
                traced.append(tree.values)
            tree_trace = HostCopy(*traced)
        copied = [outcome.report]
        if outcome.expected is not None:
            copied.append(outcome.expected)
        logprobs = None
        wanted = {seq: count for seq, count in self.wanted.items() if self.live[seq]}
        if wanted:
            emitted = Report.emitted_of(outcome.report)
            logprobs = Logprobs(engine.target, outcome.features, emitted, wanted)
        return InFlight(HostCopy(*copied), preset, began, tree_trace, logprobs)

    def time_cycle(self, preset: int) -> float:
        """Run a cycle of one preset, whatever it yields. Returns: its time (s)."""
        launched = self._launch(preset)
        packed, *_ = launched.report.read()
        return self._seconds(launched, Report.unpack(packed)[0])

    def _seconds(self, launched: InFlight, report: Report) -> float:
        """Return a cycle's time (s): by the device's clock where it runs ahead of the host."""
        on_device = (report.times[-1] - report.times[0]) / 1e9
        if self.host_lag and on_device:
            return on_device
        return time.perf_counter() - launched.began

    def _read(self, launched: InFlight, new: list[list[int]]) -> None:
        """Read a cycle's report. Writes: its tokens, to `new`; live, preset, stats, trace."""
        packed, *expected = launched.report.read()
        reports = Report.unpack(packed)
        live = [seq for seq, report in enumerate(reports) if self.live[seq] and report.count]
        if not live:  # a surplus cycle
            return
        scored = launched.logprobs.read() if launched.logprobs else {}
        for seq in live:
            if reports[seq].done >= 2:
                self._break(seq)
                continue
            self.live[seq] = not reports[seq].done
            allowed = self._allowed(seq, reports[seq].emitted[: reports[seq].count])
            new[seq] += allowed
            if seq in scored:
                self.logprobs[seq] += scored[seq][: len(allowed)]
        if launched.tree_trace:
            tree_trace = launched.tree_trace.read()
            self.trace += [trace_row(tree_trace, seq, reports[seq]) for seq in live]
        lengths = [reports[seq].length for seq in live]
        began, drafted, verified, ended = reports[0].times
        seconds = self._seconds(launched, reports[0])
        stats = self.stats
        stats.live_sequences.append(live)
        stats.accept_lengths += lengths
        stats.tokens += sum(reports[seq].count for seq in live)
        stats.draft_s += (drafted - began + ended - verified) / 1e9
        stats.verify_s += (verified - drafted) / 1e9
        stats.presets.append((launched.preset, seconds))
        wanted = max((reports[seq].preset for seq in live if self.live[seq]), default=0)
        self.preset = min(wanted, len(self.engine.drafter.presets) - 1)
        if expected:
            self._expect(expected[0])
        accepted = sum(lengths) / len(live)
        self.engine.tree_policy.observe(launched.preset, accepted, seconds, len(live))

    def _expect(self, expected: list[list[float]]) -> None:
        """Set the tokens that the presets can expect: means over the sequences that decode."""
        rows = [row for row, decodes in zip(expected, self.live) if decodes]
        self.expected = [sum(column) / len(rows) for column in zip(*rows)] or None


def common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that two sequences share."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
