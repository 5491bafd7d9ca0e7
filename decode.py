"""The decode cycle and the one loop: decoding is the verification of draft trees.

    tokens [B, S+1] --root--> draft --DraftTree [B, N]--> verify --Accepted [B, D+1]--> extend
                                |                           |                             |
                    drafter's scratch slots      target's slots pos .. pos+N-1    drafter's KV cache

A `Cycle` has three steps, each tensors to tensors with static shapes:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass. The deepest path that agrees with the
   target's own tokens is accepted, the bonus token added, the cache compacted, the root advanced.
3. extend: the drafter reads the confirmed tokens with the target's features.
Vanilla decoding is the cycle whose tree is only its root. There is a cycle for each preset of a
drafter and each mode of sampling. A `Loop` decodes B sequences: every `step` launches a cycle,
reads the report of an earlier one, on CUDA one cycle late, and runs a chunk of the prompts. An
output is a function of (weights, prompt, its parameters, seed) alone.
Trade-off: prefill is not compiled, as matmuls take its time. Not here: compiling and capturing
(runtime.py); requests, texts, guides, observers (run/session.py, which extends `Loop`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from draft_tree import Accepted, DecodedTokens, DraftTree
from drafters import Drafter, DrafterUpdate, DraftInputs
from kv_cache import KVCache, Window, causal_window
from model import Transformer, run_eagerly
from options import Options, Sampling
from reference import choose, use_backend
from runtime import (
    HostCopy,
    Replay,
    compiled_by_layer,
    copy_into,
    replace_fields,
    sequence_of,
)
from sampling import SamplingMode, SamplingTensors

PREFILL_CHUNK = 256  # tokens per prefill pass
PREFILL_WIDTHS = (64, PREFILL_CHUNK)  # captured prefill passes are padded to one of these
REPORT = ("count", "length", "done", "pos")  # columns of a cycle's report, behind its tokens


class DecodeState(NamedTuple):
    """B sequences being decoded. Steps replace it; `tokens` and the caches are written in place."""

    # [B, S + 1] int64; tokens[b, pos[b]] is the root; the last column takes tokens that are cut off
    tokens: Tensor
    pos: Tensor  # [B] int64, index of the root: decided, not yet cached
    draws: Tensor  # [B] int64, tokens drawn in this conversation so far
    done: Tensor  # [B] bool
    limit: Tensor  # [B] int64, index of the last token that may be decided
    sampling: SamplingTensors
    drafter_state: Any


@dataclass(frozen=True)
class Engine:
    """Everything that decoding needs, loaded once."""

    target: Transformer
    presets: tuple[Drafter, ...]  # which share a state, smallest tree first
    context: int  # KV capacity in tokens
    eos_ids: tuple[int, ...] = ()
    config: Options = Options()
    # of `build_cycles`:
    ends: Tensor | None = None  # [E] int64, tokens that end a sequence, and -1: it is never empty
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    modes = tuple(SamplingMode)  # of sampling, which each have cycles of their own
    # by mode, then by preset: (cache, state) -> (state, update, report)
    cycles: tuple[tuple[Cycle, ...], ...] = ()
    free: list[Buffers] = field(default_factory=list)  # of loops that were closed

    @property
    def compile(self) -> bool | None:
        """True: torch.compile and captured graphs, on a CPU whole passes in C++; None: captured."""
        return False if self.config.plain else self.config.compile

    @property
    def drafter(self) -> Drafter:
        """The largest preset."""
        return self.presets[-1]

    @property
    def device(self) -> torch.device:
        """The device of everything."""
        return self.target.norm.weight.device

    @property
    def on_cuda(self) -> bool:
        """Return whether cycles may be compiled and captured."""
        return self.device.type == "cuda"

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the target's cache; drafters' caches have that of the weights."""
        return self.target.norm.weight.dtype

    @property
    def nodes(self) -> int:
        """The most nodes of a tree, or of a path, whichever is more."""
        return max(self.drafter.size, self.drafter.depth + 1)

    @property
    def slots(self) -> int:
        """Cache slots per sequence: the context, plus scratch for one tree or one prefill chunk."""
        return self.context + max(self.nodes, PREFILL_CHUNK)

    def sampling_tensors(self, each: Sequence[Sampling], seed: int) -> SamplingTensors:
        """Make the parameters of B sequences, all of one seed, as samples 0 of prompts 0."""
        return SamplingTensors.from_params(each, self.device, seed)

    def cycle(self, drafter: Drafter, mode: int) -> Cycle:
        """Make a cycle of a preset."""
        return Cycle(self, drafter, mode)

    def run_step(self, buffers: Buffers, key: Hashable, body: Callable[[], Any]) -> Any:
        """Run a step over the buffers; where cycles are captured, it is captured, and replayed.

        key: tells steps apart, in `Buffers.replays`; None: the step is not captured
        body: holds no loop, as the buffers keep it; returns the same tensors every time
        """
        if key is None or not self.captured:
            return body()
        if key not in buffers.replays:
            buffers.replays[key] = Replay(body, self.device, buffers.scratch)
        return buffers.replays[key]()


def build_cycles(engine: Engine) -> Engine:
    """Give the engine a cycle for every mode of sampling and preset, as its `compile` says.

    On a CPU with whole passes weights may later change in place, but not be replaced.
    Writes: `backend` and `program` of target and drafters; engines that share them must agree on
        `compile`.
    """
    backend = choose(engine.device, engine.target.norm.weight.dtype)
    use_backend(engine.target, backend)
    for preset in engine.presets:
        preset.use(backend)
    fuses = engine.on_cuda or engine.compile is True
    engine.target.fuse(fuses)
    engine.drafter.fuse(fuses)
    captured = engine.on_cuda and engine.compile is not False
    eos_ids = () if engine.config.ignore_eos else engine.eos_ids
    ends = torch.tensor([-1, *eos_ids], device=engine.device)
    engine = replace(engine, ends=ends, captured=captured, free=[])
    cycles = tuple(
        tuple(engine.cycle(preset, mode) for preset in engine.presets) for mode in engine.modes
    )
    if captured and engine.compile is True:
        cycles = tuple(tuple(map(compiled_by_layer, each)) for each in cycles)
    return replace(engine, cycles=cycles)


# -------------------------------------------------------------------------------------------- cycle


class Cycle:
    """One decode cycle, in which `drafter`, a preset of the engine's, proposes the tree."""

    def __init__(self, engine: Engine, drafter: Drafter, mode: int):
        """mode: the highest `SamplingMode` of the sequences that it decodes"""
        self.target = engine.target
        self.backend = engine.target.backend
        self.drafter = drafter
        self.mode = mode
        # not the engine, which holds its cycles: both would wait for a garbage collection
        self.ends = engine.ends
        self.aux_layers = engine.drafter.aux_layers
        self.run_part = run_eagerly  # runs a part of the target
        self.in_place = engine.captured  # a new state is copied into the old one

    def __call__(
        self, cache: KVCache, state: DecodeState
    ) -> tuple[DecodeState, DrafterUpdate, Tensor]:
        """Run the three steps. Writes: both caches, state.tokens; the state, if in place.

        Returns: the state, what the drafter has read, and the report for the host, [B, D+5] int64.
        """
        tree, noise = self.draft(cache, state)
        state, update, report = self.verify(cache, state, tree, noise)
        return self.extend(state, update), update, report

    def write_back(self, state: DecodeState, new: DecodeState) -> DecodeState:
        """Return the new state. Writes: the old one, if in place."""
        if not self.in_place:
            return new
        copy_into(state, new)
        return state

    def draft(self, cache: KVCache, state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        rule, noise = self.noise(state, self.drafter.noise_rows or self.drafter.depth + 1)
        text = DecodedTokens(state.tokens, state.pos)
        inputs = DraftInputs(noise, text, rule, state.draws, cache=cache)
        tree = self.drafter.propose(state.drafter_state, inputs)
        return tree, noise if tree.noise is None else tree.noise

    def noise(self, state: DecodeState, rows: int) -> tuple[SamplingTensors | None, Tensor | None]:
        """Return the rule of drafts and the Gumbel noise of the coming draws, [B, rows, V].

        Both are None when all sequences are greedy.
        """
        rule = state.sampling.needed(self.mode)
        if rule is None:
            return None, None
        vocab = self.target.config.vocab_size
        return rule, sampling.gumbel(rule, state.draws, rows, vocab, backend=self.backend)

    def verify(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None
    ) -> tuple[DecodeState, DrafterUpdate, Tensor]:
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        slots, start, positions = self.place(state, tree)
        seen = (cache, Window(slots, start, tree.mask), self.run_part)
        features = self.target(tree.tokens, positions, *seen, self.aux_layers)  # [B, N, F]
        return self.decide(cache, state, tree, noise, features)

    def place(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes' slots, the window's first slot and the positions."""
        # nodes of one depth share a position, not a slot; a finished sequence has an empty prefix
        count = tree.tokens.shape[1]
        return self.backend.place_tokens(state.pos, tree.depths, count, done=state.done)

    def decide(
        self,
        cache: KVCache,
        state: DecodeState,
        tree: DraftTree,
        noise: Tensor | None,
        features: Tensor,
    ) -> tuple[DecodeState, DrafterUpdate, Tensor]:
        """Accept a path, compact, cut at the end of sequence and at the limit, move the root.

        Writes: the cache, state.tokens; the state, if in place.
        """
        accepted, scores = self.accept_path(state, tree, noise, features)
        if self.drafter.width > 1:  # the accepted nodes of a chain are in place already
            cache.compact(state.pos, accepted.moves, self.backend)
        old = (state.tokens, state.pos, state.draws, state.done, state.limit)
        decided = (accepted.path, accepted.length, accepted.emitted)
        moved = self.backend.advance(*old, tree.tokens, *decided, self.ends, features, REPORT)
        pos, draws, done, count, tokens, path_features, report = moved
        text = DecodedTokens(state.tokens, pos)
        decided = (tokens, path_features, count, text, tree, accepted.path)
        update = DrafterUpdate(*decided, scores=scores)
        new = replace_fields(state, pos=pos, draws=draws, done=done)
        return self.write_back(state, new), update, report

    def accept_path(
        self, state: DecodeState, tree: DraftTree, noise: Tensor | None, features: Tensor
    ) -> tuple[Accepted, Tensor | None]:
        """Accept the deepest path of the target's own tokens. Returns: it, and the scores."""
        text = DecodedTokens(state.tokens, state.pos)
        tokens, scores = self.choose(state, text, tree, noise, features)
        depth = min(self.drafter.depth, tokens.shape[1] - 1)
        return self.backend.accept(tree, tokens, depth), scores

    def choose(
        self,
        state: DecodeState,
        text: DecodedTokens,
        tree: DraftTree,
        noise: Tensor | None,
        features: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the target's own token after every node of a tree below a text.

        noise: [B, R, V] fp32, of the draws by depth, None when all are greedy; features: [B, N, F]
        Returns: [B, N] int64, and the scores that they were chosen by, [B, N, V].
        """
        scores = self.scores(tree, features)
        z = scores
        if noise is not None:
            z = state.sampling.needed(self.mode).cut(scores, self.backend)
        return self.backend.best(z, noise, tree.depths), scores

    def scores(self, tree: DraftTree, features: Tensor) -> Tensor:
        """Score the token after every node: [B, N, F] -> [B, N, V] fp32."""
        return self.target.logits(features)

    def extend(self, state: DecodeState, update: DrafterUpdate) -> DecodeState:
        """Hand the confirmed tokens to the drafter. Writes: its cache; the state, if in place."""
        drafter_state = self.drafter.extend(state.drafter_state, update)
        return self.write_back(state, replace_fields(state, drafter_state=drafter_state))

    def read_prompt(
        self, cache: KVCache, state: DecodeState, start: Tensor, width: int
    ) -> tuple[DecodeState, Tensor]:
        """Run the target over `width` prompt tokens of every sequence; the drafter reads them, too.

        start: [B] int64, index of each sequence's first token in the chunk; short prompts are
            padded
        A sequence whose prompt ends in this chunk gets its root; the LM head reads one feature of
        it. Writes: both caches, state.tokens.
        Returns: the state, in which a sequence is done if nothing may follow its root; the features
            that the roots were chosen from, [B, 1, F].
        """
        start = torch.minimum(start, state.pos)
        count = (state.pos - start).clamp(max=width)  # [B], tokens that are no padding
        window = causal_window(start, width, backend=self.backend)
        # all but the last, which the next turn of the sequence runs again
        window = replace_fields(window, kept=(count - 1).clamp(min=0))
        tokens = state.tokens.gather(1, window.slots.clamp(max=state.tokens.shape[1] - 1))  # [B, T]
        inputs = (tokens, window.slots, cache, window)
        features = self.target(*inputs, aux_layers=self.aux_layers)
        last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
        before_root = features.gather(1, last)  # [B, 1, F]
        before = DecodedTokens(state.tokens, (state.pos - 1).clamp(min=0))  # the prompt alone
        tree = self.backend.root_tree(before)
        _, noise = self.noise(state, 1)  # [B, 1, V]
        root, _ = self.choose(state, before, tree, noise, before_root)  # [B, 1]
        ends_here = (count > 0) & (start + count == state.pos)
        trash = state.tokens.shape[1] - 1
        state.tokens.scatter_(1, torch.where(ends_here, state.pos, trash)[:, None], root)
        span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
        text = DecodedTokens(state.tokens, state.pos)
        tokens = state.tokens.gather(1, span)  # with the new roots
        update = DrafterUpdate(tokens, features, count, text, at_root=ends_here)
        at_end = (root == self.ends).any(1) | (state.pos >= state.limit)
        done = torch.where(ends_here, at_end, state.done)
        drafter_state = self.drafter.extend(state.drafter_state, update)
        draws = state.draws + ends_here
        state = replace_fields(state, draws=draws, done=done, drafter_state=drafter_state)
        return state, before_root


# --------------------------------------------------------------------------------------------- loop


class CycleResult:
    """A cycle that was launched, and once it is read its report, in lists by sequence."""

    emitted: list[list[int]]  # D+1 decided tokens (bonus last); entries past `length` are padding
    count: list[int]  # tokens left of them after cuts; 0: the sequence was done before
    length: list[int]  # accepted nodes
    done: list[int]  # 1: the sequence is finished; 2, 3: numbers on the path are not finite
    pos: list[int]  # index of the root that was verified
    live: list[int]  # the sequences that decoded
    taken: dict[int, list[int]]  # their new tokens, of those whose numbers are finite

    columns = len(REPORT)  # of the report behind its tokens

    def __init__(self, report: Tensor, preset: int, update: DrafterUpdate, first: int = 0):
        """Begin to copy the report, int64: D+1 tokens, and the columns REPORT.

        update: what the drafter has read
        first: the first sequence that ran; those before it have zeros
        """
        self.preset = preset
        self.update = update
        self.first = first
        self.copy = HostCopy(report)

    def read(self) -> None:
        """Wait for the copy. Writes: the fields."""
        (rows,) = self.copy.read()
        width = len(rows[0]) - self.columns  # D+1
        self.rows = [[0] * len(rows[0])] * self.first + rows
        self.emitted = [row[:width] for row in self.rows]
        for column, name in enumerate(REPORT, width):
            setattr(self, name, [row[column] for row in self.rows])


class Buffers:
    """KV cache, state and captured steps of B sequences, at addresses that stay."""

    def __init__(self, engine: Engine):
        batch = engine.config.batch_size
        weight = engine.target.norm.weight
        config = engine.target.config
        room = (batch, engine.slots, engine.kv_dtype, str(weight.device))
        self.cache = KVCache.empty(config, *room, engine.nodes)
        pos = torch.zeros(batch, dtype=torch.long, device=weight.device)
        tokens = pos.new_zeros(batch, engine.context + 1)
        params = engine.sampling_tensors([engine.config.sampling] * batch, 0)
        drafter_state = engine.drafter.init(batch, engine.slots)
        numbers = (pos, pos.clone(), pos == 0, pos.clone())
        self.state = DecodeState(tokens, *numbers, params, drafter_state)
        self.start = pos[:1].clone()  # of a prefill chunk
        # [B, 1, F], the features that each root was chosen from
        self.root_features = weight.new_zeros(batch, 1, config.dim)
        self.replays: dict[Hashable, Replay] = {}  # of cycles by mode and preset; of other steps
        self.scratch: dict[str, Any] = {}  # memory that captured prefills share

    def reset(self, engine: Engine, params: SamplingTensors) -> None:
        """Make every sequence idle and empty. Writes: the state in place."""
        state = self.state
        for numbers in (state.tokens, state.pos, state.draws, state.limit):
            numbers.zero_()
        state.done.fill_(True)
        copy_into(state.sampling, params)
        copy_into(state.drafter_state, engine.drafter.rewind(state.drafter_state, state.pos))


class Loop:
    """B sequences over one cache, each a conversation. Cached tokens stay until overwritten.

    Its last methods are for subclasses: `pick_preset` runs before every step, `after_cycle` behind
    every cycle, `finished` when a turn ends.
    """

    result_type = CycleResult

    def __init__(self, engine: Engine):
        """Take buffers of a loop that was closed, or make them."""
        self.engine = engine
        self.buffers = engine.free.pop() if engine.free else Buffers(engine)
        self.host_lag = int(engine.on_cuda)  # cycles that may stay unread while the host goes on
        batch = engine.config.batch_size
        params = [engine.config.sampling] * batch
        self.buffers.reset(engine, engine.sampling_tensors(params, engine.config.seed))
        # every token of a sequence, prompt and roots included; during prefill, the cached part
        self.history: list[list[int]] = [[] for _ in range(batch)]
        self.prefilling: dict[int, list[int]] = {}  # prompts that are not fully cached, by sequence
        self.live = [False] * batch  # sequences that decode
        self.pending: deque[CycleResult] = deque()  # cycles whose reports were not read

    def close(self) -> None:
        """Leave the buffers, and what was captured over them, to the next loop."""
        self.engine.free.append(self.buffers)

    @property
    def state(self) -> DecodeState:
        """The state after all cycles that were launched."""
        return self.buffers.state

    def busy(self, seq: int) -> bool:
        """Return whether a sequence's turn goes on."""
        return self.live[seq] or seq in self.prefilling

    def admit(
        self,
        seq: int,
        prompt: list[int],
        noise_id: tuple[int, int] | None = None,
        max_new_tokens: int = 0,
        begin: int = 0,
    ) -> None:
        """Start a turn: the following `step` calls read its prompt in chunks, then decode it.

        prompt: the conversation so far, below `engine.context` tokens
        noise_id: (prompt, sample), the key of the noise of a new conversation; None: the sequence's
            own noise goes on, and its draws
        max_new_tokens: 0: the engine's; begin: tokens of the prompt that stay cached
        """
        self.release(seq)
        state = self.state
        length = len(prompt)
        self.history[seq] = prompt[:begin]
        self.prefilling[seq] = prompt
        state.tokens[seq, :length] = torch.tensor(prompt, device=state.pos.device)
        state.pos[seq] = length  # cycles that run meanwhile write their scratch behind the prompt
        limit = length + (max_new_tokens or self.engine.config.max_new_tokens)
        state.limit[seq] = min(limit, self.engine.context) - 1
        own = sequence_of(state.drafter_state, seq)
        copy_into(own, self.engine.drafter.rewind(own, torch.full_like(state.pos[:1], begin)))
        if noise_id is not None:
            state.sampling.prompt[seq], state.sampling.sample[seq] = noise_id
            state.draws[seq] = 0

    def release(self, seq: int) -> None:
        """End a sequence's turn, if it has one."""
        if self.live[seq]:
            self.finished(seq)
        self.prefilling.pop(seq, None)
        self.live[seq] = False
        self.state.done[seq] = True
        if not any(self.live):
            self.pending.clear()

    def step(self) -> list[list[int]]:
        """Run a cycle of the live sequences, and about one chunk of the prompts.

        Returns: the new tokens of every sequence that were read.
        """
        new: list[list[int]] = [[] for _ in self.history]
        self._decode(new)
        if self.prefilling:
            self._prefill(new)
        for seq, tokens in enumerate(new):
            self.history[seq] += tokens
            if tokens and not self.busy(seq):
                self.finished(seq)
        return new

    def _decode(self, new: list[list[int]]) -> None:
        """Launch a cycle, and read those that are due. Writes: their tokens, to `new`."""
        # prefill needs a state that no cycle changes
        lag = 0 if self.prefilling else self.host_lag
        while any(self.live) and len(self.pending) <= lag:
            self.pending.append(self._launch(self.pick_preset()))
        while len(self.pending) > lag:
            self._read(self.pending.popleft(), new)

    def _launch(self, preset: int) -> CycleResult:
        """Launch a cycle of a preset."""
        buffers = self.buffers
        first, cache, state = self.part()
        cycle, key = self.pick_cycle(preset)
        in_place = self.engine.captured or state is not buffers.state

        def body() -> tuple[DrafterUpdate, Tensor]:
            new, *outcome = cycle(cache, state)
            if in_place:
                copy_into(state, new)
            else:
                buffers.state = new
            return outcome

        update, report = self.engine.run_step(buffers, key, body)
        return self.result_type(report, preset, update, first)

    def _read(self, result: CycleResult, new: list[list[int]]) -> None:
        """Read a cycle. Writes: its tokens, to `new`; live."""
        result.read()
        result.live = [seq for seq, count in enumerate(result.count) if self.live[seq] and count]
        if not result.live:  # launched before the host knew that all were done
            return
        result.taken = {}
        for seq in result.live:
            if result.done[seq] >= 2:
                self.broken(seq)
                continue
            self.live[seq] = not result.done[seq]
            tokens = result.emitted[seq][: result.count[seq]]
            result.taken[seq] = self.accept_tokens(seq, tokens)
            new[seq] += result.taken[seq]
        self.after_cycle(result)

    def _prefill(self, new: list[list[int]]) -> None:
        """Run about one chunk of the prompts. Writes: roots, to `new`."""
        left = PREFILL_CHUNK  # tokens
        for seq, prompt in list(self.prefilling.items()):
            while left > 0 and seq in self.prefilling:
                begin = len(self.history[seq])
                chunk = prompt[begin : begin + PREFILL_CHUNK]
                self._read_chunk(seq, begin, len(chunk))
                self.history[seq] += chunk
                left -= len(chunk)
                # waits for the chunk, so that its time counts as prefill
                root = int(self.state.tokens[seq, len(prompt)])
                if len(self.history[seq]) == len(prompt) and self.after_prompt(seq, root):
                    self.live[seq] = not self.state.done[seq]
                    del self.prefilling[seq]
                    new[seq] = self.accept_tokens(seq, [root])

    def _read_chunk(self, seq: int, start: int, width: int) -> None:
        """Read a chunk of one sequence's prompt. Writes: its part of the buffers, in place."""
        buffers = self.buffers
        buffers.start.fill_(start)
        cycle, key = self.pick_cycle(self.pick_preset(reads_prompt=True), seq)
        if key is not None and self.engine.captured:  # without a graph the host is slower
            width = next(w for w in PREFILL_WIDTHS if w >= width)
            key = ("prefill", width, seq, *key)

        def body() -> None:
            state = sequence_of(buffers.state, seq)
            cache = sequence_of(buffers.cache, seq)
            new, features = cycle.read_prompt(cache, state, buffers.start, width)
            copy_into(state, new)
            buffers.root_features[seq].copy_(features[0, :, : buffers.root_features.shape[2]])

        self.engine.run_step(buffers, key, body)

    def pick_preset(self, reads_prompt: bool = False) -> int:
        """Pick the preset of the next cycle, or of the next chunk of a prompt: the largest tree."""
        return len(self.engine.presets) - 1

    def pick_cycle(self, preset: int, reader: int | None = None) -> tuple[Cycle, Hashable]:
        """Return the next cycle, and its key in `Buffers.replays`; None: it is not captured.

        reader: the sequence whose prompt is read; None: a tree is drafted
        """
        decoding = [seq for seq, decodes in enumerate(self.live) if decodes]
        mode = self.mode_of(decoding if reader is None else [reader])
        return self.engine.cycles[mode][preset], (mode, preset)

    def mode_of(self, seqs: Sequence[int]) -> int:
        """Return the mode that some sequences need."""
        return SamplingMode.needed_by(self.engine.config.sampling)

    def part(self) -> tuple[int, KVCache, DecodeState]:
        """Return the first sequence that the next cycle runs, and the cache and state of all."""
        return 0, self.buffers.cache, self.state

    def accept_tokens(self, seq: int, tokens: list[int]) -> list[int]:
        """Return the decided tokens that the text gets; where some are missing, it has ended."""
        return tokens

    def after_prompt(self, seq: int, root: int) -> bool:
        """Learn from a prompt that is read. Returns: whether its sequence decodes."""
        return True

    def after_cycle(self, result: CycleResult) -> None:
        """Learn from a cycle that was read."""

    def finished(self, seq: int) -> None:
        """Take the text of a turn that is over, `history[seq]`."""

    def broken(self, seq: int) -> None:
        """End a sequence whose numbers are not finite."""
        raise ValueError("the model's numbers are not finite; use another --dtype or checkpoint")
