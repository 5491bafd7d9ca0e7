"""The loop: every method proposes a draft tree, and decoding is the verification of a tree.

A `Cycle` has three steps, each tensors to tensors with static shapes:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass; the deepest path that is the target's own choice is
   accepted, with the bonus token after it, and its keys and values move next to the prefix.
3. extend: the drafter takes in the rows that were accepted, with the target's features.
Vanilla decoding is the cycle whose tree is only its root. A drafter with presets has a cycle for each. With --compile
the steps are compiled `fullgraph=True` on CUDA, and few C++ operators on a CPU.

A `Session` has B rows. `admit` gives one a prompt while the others decode; every `step` launches a cycle, reads a
report, on CUDA one cycle late, so that the device never waits, and runs chunks of prompts, the last of which decides a
row's root. Rows that are done change no state. The output is a function of (weights, prompt, seed) alone.

Trade-off: prefill, bound by matrix products, is not compiled; on CUDA it is captured, in two widths per row, between
two cycles. Not here: compiling and capturing (runtime.py), loading, which prompt is next (generate.py).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from draft_tree import Accepted, DraftTree, Text, accept, accept_fused, replace_fields
from drafters import LARGEST, Confirmed, Drafter, Root
from model import Block, KVCache, Transformer, Window, call, causal_window
from ops.library import has_cpu_operators, on_cpp_device, single_torch_thread
from ops.rows import best
from ops.tree import place_rows
from options import GenerateConfig, common_prefix
from runtime import Clock, HostCopy, LargestTree, Replay, compiled, copy_into, sequence_of
from sampling import NoiseKey, Sampling
from stats import Stats, rows_memory, trace_row
from tree_shapes import MAX_NODES

NODE_STRIDE = MAX_NODES  # rows of fresh noise reserved per draw
PREFILL_CHUNK = 256  # tokens per prefill pass
PREFILL_WIDTHS = (64, PREFILL_CHUNK)  # to which passes are padded where they are captured


class DecodeState(NamedTuple):
    """B sequences being decoded. The steps replace it; `tokens` and the caches are written in place."""

    tokens: Tensor  # [B, S + 1] int64; tokens[b, pos[b]] is the root; the last column takes what is cut
    pos: Tensor  # [B] int64, index of the root: decided, not yet cached
    draws: Tensor  # [B] int64, tokens drawn in this conversation so far
    done: Tensor  # [B] bool
    limit: Tensor  # [B] int64, index of the last token that may be decided
    key: NoiseKey
    drafter_state: Any


class Decision(NamedTuple):
    """What a verification decided."""

    facts: Tensor  # [B, D+6] int64, from `Report.pack`
    path: Tensor  # [B, D+1] int64, accepted nodes, root first


class Report(NamedTuple):
    """What the host learns of a cycle and row."""

    emitted: list[int]  # D+1 decided tokens (bonus last); entries past `length` are padding
    count: int  # how many of them are left after cuts; 0: the row was done before
    length: int  # accepted nodes
    done: bool  # whether the row is done now
    preset: int  # the largest preset that makes sense next
    pos: int  # of the root that was verified
    times: list[int]  # ns, between the steps

    @staticmethod
    def pack(emitted: Tensor, *facts: Tensor) -> Tensor:
        """One tensor of all but the times. emitted: [B, D+1]; facts: [B] each. Returns: [B, D+6] int64."""
        return torch.cat((emitted, torch.stack([x.long() for x in facts], 1)), 1)

    @staticmethod
    def timed(facts: Tensor, times: list[Any]) -> Tensor:
        """With the four times of a `Clock`, so that one copy takes all: [B, D+10] int64."""
        if on_cpp_device(facts):
            return torch.ops.gpt_eagle.with_times(facts, times)
        return torch.cat((facts, *(torch.as_tensor(t).expand(len(facts), 1) for t in times)), 1)

    @staticmethod
    def rows(packed: list[list[int]]) -> list[Report]:
        """The inverse, a report per row."""
        return [Report(row[:-9], *row[-9:-4], row[-4:]) for row in packed]


def pick_tokens(target: Transformer, features: Tensor, rule: Sampling, noise: Tensor | None, row: Tensor) -> Tensor:
    """The target's own token after every feature, [B, N] int64.

    features: [B, N, F]; noise: [B, R, V] fp32, None when greedy; row: [B, N] int64, which row of it a feature has
    """
    scores = target.logits(features)  # [B, N, V]
    return best(scores if noise is None else sampling.process(scores, rule), noise, row)


class Outcome(NamedTuple):
    """What a cycle leaves for the host."""

    report: Tensor  # from `Report.timed`
    tree: DraftTree
    path: Tensor  # [B, D+1] int64, accepted nodes


@dataclass(frozen=True)
class Engine:
    """Everything that decoding needs, loaded once."""

    config: GenerateConfig
    target: Transformer
    drafter: Drafter
    context: int  # KV capacity in tokens
    eos_ids: tuple[int, ...]
    pick_tokens: Callable[..., Tensor] = pick_tokens  # what finds the target's own tokens (with ranks, `tp.pick_tokens`)
    accept_rule: Callable[..., Accepted] | None = None  # of acceptance, in place of `accept` (extras/residual.py)
    eos_tensor: Tensor | None = None  # [E] int64, tokens that end a row; -1, which is none, keeps it from being empty
    cycles: tuple[Callable, ...] = ()  # (cache, state) -> (state, outcome), one per preset of the drafter
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    tree_policy: Any = field(default_factory=LargestTree)
    pool: list[Buffers] = field(default_factory=list)  # buffers of sessions that are over
    tokenizer: Any = None  # hf.tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # hf.chat.ChatTemplate, with --chat
    load_s: float = 0.0
    compile_s: float = 0.0

    @property
    def slots(self) -> int:
        """Of a row's caches: a tree or a chunk of a prompt may lie behind the context."""
        return self.context + max(self.drafter.size, self.drafter.depth + 1, PREFILL_CHUNK)


def with_cycles(engine: Engine) -> Engine:
    """Give the engine a cycle for every preset, compiled when the config says so.

    With --compile on a CPU, weights are taken as they are now: they may change in place afterwards, not be replaced.
    Writes: `fused` of the target and of the drafter; engines that share them must agree on --compile.
    """
    assert (engine.accept_rule is None) == (engine.config.accept == "exact"), engine.config.accept
    compile, cuda = engine.config.compile, engine.config.device.startswith("cuda")
    engine.target.fuse(compile and not cuda)
    engine.drafter.fuse(compile and not cuda)
    ends = [-1, *(() if engine.config.ignore_eos else engine.eos_ids)]
    ends = torch.tensor(ends, device=engine.target.embedding.weight.device)
    engine = replace(engine, eos_tensor=ends, captured=compile and cuda, tree_policy=LargestTree(), pool=[])
    cycles = [Cycle(engine, preset) for preset in engine.drafter.presets]
    if engine.captured:
        cycles = [cycle.compiled_by_layer() for cycle in cycles]
    return replace(engine, cycles=tuple(cycles))


# ----------------------------------------------------------------------------------------------- cycle


class Cycle:
    """One decode cycle, in which `drafter`, a preset of the engine's, proposes the tree."""

    def __init__(self, engine: Engine, drafter: Drafter):
        self.target, self.drafter, self.rule, self.eos_tensor = engine.target, drafter, engine.config.sampling, engine.eos_tensor
        self.prefer, self.aux_layers = engine.drafter.prefer, engine.drafter.aux_layers
        self.pick_tokens, self.accept_rule = engine.pick_tokens, engine.accept_rule
        device = engine.target.embedding.weight.device
        self.call, self.in_place = call, False
        fused = engine.config.compile and device.type == "cpu" and has_cpu_operators()
        self.accept, self.advance = (accept_fused, advance_fused) if fused else (accept, advance)

    def compiled_by_layer(self) -> Cycle:
        """Compile the steps, and one block of the target for all of its kind, instead of one graph of everything.

        It takes a fraction of the time and costs a call per block, which a captured cycle does not pay. As that cycle's
        state has to be where it was, the steps write it there.
        """
        for name in ("draft", "decide", "extend"):
            setattr(self, name, compiled(getattr(self, name)))
        begin = compiled(self.target.embed)
        kinds = {type(block.ffn): compiled(call) for block in self.target.layers}  # no guard would tell them apart
        self.call = lambda part, *rows: kinds[type(part.ffn)](part, *rows) if isinstance(part, Block) else begin(*rows)
        self.in_place = True
        return self

    def __call__(self, cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
        """Run the steps, and tell the times between them. Writes: both caches, state.tokens; the state, if in place."""
        clock = Clock(state.pos.device)
        tree, noise = clock(self.draft, state)  # N nodes below the root
        state, rows, decision = clock(self.verify, cache, state, tree, noise)  # one pass of the target; its own path
        state = clock(self.extend, state, rows)  # the drafter takes in what was accepted
        return state, Outcome(Report.timed(decision.facts, clock.times), tree, decision.path)

    def write_back(self, state: DecodeState, new: DecodeState) -> DecodeState:
        """The new state. Writes: the old one, if in place."""
        if not self.in_place:
            return new
        copy_into(state, new)
        return state

    def draft(self, state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        noise = fresh = None
        V = self.target.config.vocab_size
        if self.rule.temperature > 0:
            noise = sampling.gumbel(state.key, state.draws, self.drafter.depth + 1, V)
        if self.drafter.fresh_rows:
            fresh = sampling.gumbel(state.key, state.draws * NODE_STRIDE, self.drafter.fresh_rows, V, sampling.DRAFT)
        return self.drafter.propose(state.drafter_state, Root(noise, fresh, Text(state.tokens, state.pos))), noise

    def verify(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None
    ) -> tuple[DecodeState, Confirmed, Decision]:
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        # slots are not positions; what is done costs no attention to its text
        slots, begin, positions = place_rows(state.pos, tree.depths, self.drafter.size, done=state.done)
        window = Window(slots, begin, tree.mask)
        features = self.target(tree.tokens, positions, cache, window, self.call, self.aux_layers)
        return self.decide(cache, state, tree, noise, features)

    def decide(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None, features: Tensor
    ) -> tuple[DecodeState, Confirmed, Decision]:
        """Accept and compact. features: [B, N, F]. Writes: the cache, state.tokens; the state, if in place."""
        if self.accept_rule:
            accepted = self.accept_rule(tree, self.target.logits(features), noise, state, self)
        else:
            tokens = self.pick_tokens(self.target, features, self.rule, noise, tree.depths)
            accepted = self.accept(tree, tokens, self.drafter.depth)
        if self.drafter.width > 1:  # the rows of a chain lie where they belong
            cache.compact(state.pos, accepted.moves)
        new, rows, decision = self.advance(state, tree, accepted, features, self)
        return self.write_back(state, new), rows, decision

    def extend(self, state: DecodeState, rows: Confirmed) -> DecodeState:
        """Hand the confirmed rows to the drafter. Writes: its cache; the state, if in place."""
        return self.write_back(state, replace_fields(state, drafter_state=self.drafter.extend(state.drafter_state, rows)))


def advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, Confirmed, Decision]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root. Writes: state.tokens."""
    emitted = accepted.emitted  # [B, D+1]
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    inside = steps <= accepted.length[:, None]
    is_end = inside & (emitted[:, :, None] == cycle.eos_tensor).any(-1)
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
    rows = Confirmed(torch.cat((tree.tokens[:, :1], emitted), 1), features.gather(1, path), count, slots)
    preset = cycle.prefer(Text(state.tokens, pos))
    preset = torch.full_like(pos, LARGEST) if preset is None else preset
    decision = Decision(Report.pack(emitted, count, accepted.length, done, preset, state.pos), accepted.path)
    return replace_fields(state, pos=pos, draws=state.draws + count, done=done), rows, decision


def advance_fused(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, Confirmed, Decision]:
    """`advance` in one C++ call (ops/cpu/tree.cpp), on a CPU. Writes: state.tokens."""
    old = (state.tokens, state.pos, state.draws, state.done, state.limit)
    pos, draws, done, count, tokens, rows, facts = torch.ops.gpt_eagle.advance(
        *old, tree.tokens, *accepted[:3], cycle.eos_tensor, features, LARGEST
    )
    slots = tree.slots.gather(1, accepted.path) if tree.slots is not None else None
    preset = cycle.prefer(Text(state.tokens, pos))
    if preset is not None:
        facts[:, -2] = preset  # as `Report.pack` orders them
    new = replace_fields(state, pos=pos, draws=draws, done=done)
    return new, Confirmed(tokens, rows, count, slots), Decision(facts, accepted.path)


# --------------------------------------------------------------------------------------------- prefill


def prefill_chunk(engine: Engine, cache: KVCache, state: DecodeState, start: Tensor, width: int) -> DecodeState:
    """Run the target over `width` prompt tokens of every row and hand their features to the drafter.

    start: [B] int64, index of each row's first token in the chunk; rows that end earlier are padded
    A row whose prompt ends in this chunk gets its root: only that one feature goes through the LM head.
    Writes: both caches, state.tokens. Returns: the state; a row that got its root is done if nothing may follow.
    """
    rule = engine.config.sampling
    start = torch.minimum(start, state.pos)
    count = (state.pos - start).clamp(max=width)  # [B], real rows
    window = causal_window(start, width)
    tokens = state.tokens.gather(1, window.slots.clamp(max=state.tokens.shape[1] - 1))  # [B, T]
    features = engine.target(tokens, window.slots, cache, window, aux_layers=engine.drafter.aux_layers)
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    noise, first = None, torch.zeros_like(state.draws)[:, None]  # [B, 1], which row of the noise
    if rule.temperature > 0:
        noise = sampling.gumbel(state.key, state.draws, 1, engine.target.config.vocab_size)  # [B, 1, V]
    root = engine.pick_tokens(engine.target, features.gather(1, last), rule, noise, first)  # [B, 1]
    ends_here = (count > 0) & (start + count == state.pos)
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(ends_here, state.pos, trash)[:, None], root)
    span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
    taken = count * (ends_here | (engine.drafter.room == 0))  # rows wait behind whole prompts only
    rows = Confirmed(state.tokens.gather(1, span), features, taken)  # read again: by now the roots are in
    done = torch.where(ends_here, (root == engine.eos_tensor).any(1) | (state.pos >= state.limit), state.done)
    draft = engine.drafter.extend(state.drafter_state, rows)
    return replace_fields(state, draws=state.draws + ends_here, done=done, drafter_state=draft)


# --------------------------------------------------------------------------------------------- session


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
        self.replays, self.scratch = {}, {}  # by preset, or width and row, what was captured; where prefills compute

    def reset(self, engine: Engine, key: NoiseKey) -> None:
        """Make every row idle and empty. Writes: the state in place."""
        zeros = torch.zeros_like(self.state.pos)
        self.state.tokens.zero_()
        draft, self.waits = engine.drafter.rewind(self.state.drafter_state, zeros), 0
        copy_into(self.state, DecodeState(self.state.tokens, zeros, zeros, zeros == 0, zeros, key, draft))

    def prefill(self, engine: Engine, row: int, start: int, width: int) -> None:
        """`prefill_chunk` of one row alone, whatever the others do. Writes: its part of the buffers, in place."""
        if engine.captured:  # without a graph the host would be slower than a GPU
            width = next(w for w in PREFILL_WIDTHS if w >= width)
        self.start.fill_(start)
        self.catch_up(engine, reader := engine.tree_policy.prefill_tree)

        def body() -> None:
            state, own = sequence_of(self.state, row), replace(engine, drafter=engine.drafter.presets[reader])
            copy_into(state, prefill_chunk(own, self.cache.row(row), state, self.start, width))

        self._replay(engine, ("prefill", width, row, reader), body)

    def catch_up(self, engine: Engine, preset: int) -> None:
        """Before a step: hand the drafter the rows that wait, if the preset has no room for more. Writes: its state."""
        room = engine.drafter.presets[preset].room
        if self.waits and self.waits >= room:
            draft, text = self.state.drafter_state, Text(self.state.tokens, self.state.pos)
            self._replay(engine, "rows that wait", lambda: copy_into(draft, engine.drafter.catch_up(draft, text)))
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
    tree_trace: HostCopy | None  # for the trace: tokens, parents, depths, accepted path, and values where it has them


class Session:
    """B rows over one cache, each with its own conversation. What a row has cached stays until it is overwritten."""

    def __init__(self, engine: Engine, streams: Sequence[tuple[int, int]] = (), host_lag: int | None = None):
        """streams: (prompt, sample) per row, the key of its noise, until `admit` names another; (0, 0) for further rows
        host_lag: cycles launched before the host reads the first of them; default 1 on CUDA, 0 elsewhere
        """
        self.engine, B = engine, engine.config.batch_size
        assert len(streams) <= B, (streams, B)
        self.work = engine.pool.pop() if engine.pool else Buffers(engine)
        weakref.finalize(self, engine.pool.append, self.work)
        device, streams = self.state.pos.device, [*streams, *[(0, 0)] * (B - len(streams))]
        self.host_lag = int(device.type == "cuda") if host_lag is None else host_lag
        seed, columns = engine.config.seed, (torch.tensor(column, device=device) for column in zip(*streams))
        words = torch.tensor([seed & sampling.MASK32, seed >> 32], device=device).expand(B, 2)
        self.work.reset(engine, NoiseKey(words, *columns))
        self.preset, self.read_at = 0, 0.0  # the largest that makes sense next; when a report was last read (s)
        self.history: list[list[int]] = [[] for _ in range(B)]  # every token, prompts and roots included
        self.waiting: dict[int, list[int]] = {}  # prompts that are not cached whole, by row; history has what is
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

    def admit(self, row: int, prompt: list[int], stream: tuple[int, int] | None = None, most: int = 0) -> None:
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
        began = self.read_at if self.pending else time.perf_counter()  # only a device goes on while the caller works
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
                root = int(self.state.tokens[row, len(prompt)])  # waits for the chunk: its time counts as prefill
                if len(self.history[row]) == len(prompt):
                    new[row] = [root]
                    self.live[row], self.preset = not self.state.done[row], len(self.engine.cycles) - 1
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
        reports, tree_trace = Report.rows(packed), launched.tree_trace.read() if launched.tree_trace else None
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
        self.engine.tree_policy.observe(launched.preset, sum(lengths) / len(live), stats.presets[-1][1], len(live))
