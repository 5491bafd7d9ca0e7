"""The loop: every method proposes a draft tree, and decoding is the verification of a tree.

A `Cycle` has three steps, each tensors to tensors with static shapes, compiled `fullgraph=True`:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass; the deepest path that is the target's own choice is
   accepted, with the bonus token after it, and its keys and values move next to the prefix.
3. extend: the drafter takes in the rows that were accepted, with the target's features.
Vanilla decoding is the cycle whose tree is only its root. A drafter with presets has a cycle for each.

A `Session` prefills the prompts of a turn, which decides a root for each row, then launches cycles and reads their
reports until every row is done: on CUDA one cycle late, so that the device never waits for the host. Finished rows
still run, but change no state. The output is a function of (weights, prompt, seed) alone; sampling.py says why.

Trade-off: prefill is not compiled: it is bound by matrix products, and on CUDA captured in two widths. Not here: how a
step is compiled and captured (runtime.py), loading, the command line (generate.py).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from draft_tree import MAX_NODES, Accepted, DraftTree, accept, changed, compaction
from drafters import Drafter, Root, Rows, Text
from model import Block, KVCache, Transformer, Window, call, causal_window
from ops.cpu.layers import FusedLayers
from ops.rows import best
from options import GenerateConfig
from runtime import CompiledStep, HostCopy, Largest, Replay, compiled, leaves, mark, store
from sampling import NoiseKey
from stats import Stats, check_memory, trace_row

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
    draft: Any  # the drafter's own


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
    def timed(facts: Tensor, times: list[Tensor]) -> Tensor:
        """With the times, so that one copy takes all: [B, D+10] int64."""
        return torch.cat((facts, *(t.expand(len(facts), 1) for t in times)), 1)

    @staticmethod
    def rows(packed: list[list[int]]) -> list[Report]:
        """The inverse, a report per row."""
        return [Report(row[:-9], *row[-9:-4], row[-4:]) for row in packed]


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
    other_rule: Callable[..., Accepted] | None = None  # of acceptance, in place of `accept` (extras/residual.py)
    cycles: tuple[Callable, ...] = ()  # (cache, state) -> (state, outcome), one per preset of the drafter
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    chooser: Any = field(default_factory=Largest)
    pool: list[Workspace] = field(default_factory=list)  # buffers of sessions that are over
    tokenizer: Any = None  # hf.tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # hf.chat.ChatTemplate, with --chat
    load_s: float = 0.0
    compile_s: float = 0.0


def end_ids(engine: Engine) -> list[int]:
    """Token ids that end a row; -1, which is no token, keeps the list from being empty."""
    return [-1] if engine.config.ignore_eos else [*engine.eos_ids, -1]


def with_cycles(engine: Engine) -> Engine:
    """Give the engine a cycle for every preset, compiled when the config says so.

    With --compile on a CPU, weights are taken as they are now: they may change in place afterwards, not be replaced.
    Writes: `fused` of the layers, of the target and of the drafter; engines that share them must agree on --compile.
    """
    assert (engine.other_rule is None) == (engine.config.accept == "exact"), engine.config.accept
    compile, cuda = engine.config.compile, engine.config.device.startswith("cuda")
    for layers in filter(None, (engine.target.layers, engine.drafter.layers)):
        layers.fused = FusedLayers(layers) if compile and FusedLayers.fits(layers) else None
    cycles = [Cycle(engine, preset) for preset in engine.drafter.presets]
    if compile and cuda:
        cycles = [cycle.compiled_by_layer() for cycle in cycles]
    elif compile:  # one graph: every call of a compiled function costs a CPU 0.2 ms, most of it cache misses
        cycles = [CompiledStep(cycle) for cycle in cycles]
    return replace(engine, cycles=tuple(cycles), captured=compile and cuda, chooser=Largest(), pool=[])


# ----------------------------------------------------------------------------------------------- cycle


class Cycle:
    """One decode cycle, in which `drafter`, a preset of the engine's, proposes the tree."""

    def __init__(self, engine: Engine, drafter: Drafter):
        self.target, self.drafter, self.rule = engine.target, drafter, engine.config.sampling
        self.prefer, self.other_rule, self.taps = engine.drafter.prefer, engine.other_rule, engine.drafter.taps
        device = engine.target.embedding.weight.device
        self.ends = torch.tensor(end_ids(engine), device=device)
        self.levels = torch.arange(drafter.depth + 1, device=device)
        self.nodes = torch.arange(drafter.size, device=device)
        self.fresh_rows = torch.arange(drafter.fresh_rows, device=device)
        self.call, self.in_place = call, False

    def compiled_by_layer(self) -> Cycle:
        """Compile the steps, and one block of the target for all of its kind, instead of one graph of everything.

        It takes a fraction of the time and costs a call per block, which a captured cycle does not pay. As that cycle's
        state has to be where it was, the steps write it there.
        """
        for name in ("draft", "decide", "extend"):
            setattr(self, name, compiled(getattr(self, name)))
        begin = compiled(self.target.begin)
        kinds = {type(block.ffn): compiled(call) for block in self.target.layers}  # no guard would tell them apart
        self.call = lambda part, *rows: kinds[type(part.ffn)](part, *rows) if isinstance(part, Block) else begin(*rows)
        self.in_place = True
        return self

    def __call__(self, cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
        """Run the steps, and tell the times between them. Writes: both caches, state.tokens; the state, if in place."""
        state, began = mark(state, "pos")
        tree, noise = self.draft(state)  # N nodes below the root
        tree, drafted = mark(tree, "tokens")
        state, rows, decision = self.verify(cache, state, tree, noise)  # one pass of the target; its own path
        rows, verified = mark(rows, "tokens")
        state = self.extend(state, rows)  # the drafter takes in what was accepted
        decision, ended = mark(decision, "facts", after=leaves(state.draft))
        return state, Outcome(Report.timed(decision.facts, [began, drafted, verified, ended]), tree, decision.path)

    def keep(self, state: DecodeState, new: DecodeState) -> DecodeState:
        """The new state. Writes: the old one, if in place."""
        if not self.in_place:
            return new
        store(state, new)
        return state

    def draft(self, state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        noise = fresh = None
        V = self.target.config.vocab_size
        if self.rule.temperature > 0:
            noise = sampling.gumbel(state.key, state.draws[:, None] + self.levels, V)
        if self.drafter.fresh_rows:
            draws = state.draws[:, None] * NODE_STRIDE + self.fresh_rows
            fresh = sampling.gumbel(state.key, draws, V, sampling.DRAFT)
        token = state.tokens.gather(1, state.pos[:, None]).squeeze(1)
        return self.drafter.draft(state.draft, Root(token, noise, fresh, Text(state.tokens, state.pos))), noise

    def verify(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None
    ) -> tuple[DecodeState, Rows, Decision]:
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        window = Window(state.pos[:, None] + self.nodes, state.pos, tree.mask)  # slots are not positions
        features = self.target(tree.tokens, state.pos[:, None] + tree.depths, cache, window, self.call, self.taps)
        return self.decide(cache, state, tree, noise, features)

    def decide(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None, features: Tensor
    ) -> tuple[DecodeState, Rows, Decision]:
        """Accept and compact. features: [B, N, F]. Writes: the cache, state.tokens; the state, if in place."""
        logits = self.target.logits(features)  # [B, N, V]
        if self.other_rule:
            accepted = self.other_rule(tree, logits, noise, state, self)
        else:
            scores = logits if noise is None else sampling.process(logits, self.rule)
            accepted = accept(tree, best(scores, noise, tree.depths), self.drafter.depth)
        if self.drafter.width > 1:  # the rows of a chain lie where they belong
            cache.compact(state.pos, compaction(accepted))
        new, rows, decision = advance(state, tree, accepted, features, self)
        return self.keep(state, new), rows, decision

    def extend(self, state: DecodeState, rows: Rows) -> DecodeState:
        """Hand the confirmed rows to the drafter. Writes: its cache; the state, if in place."""
        return self.keep(state, changed(state, draft=self.drafter.extend(state.draft, rows)))


def advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, Rows, Decision]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root. Writes: state.tokens."""
    emitted = accepted.emitted  # [B, D+1]
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    inside = steps <= accepted.length[:, None]
    is_end = inside & (emitted[:, :, None] == cycle.ends).any(-1)
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
    preset = cycle.prefer(Text(state.tokens, pos))
    decision = Decision(Report.pack(emitted, count, accepted.length, done, preset, state.pos), accepted.path)
    return changed(state, pos=pos, draws=state.draws + count, done=done), rows, decision


# --------------------------------------------------------------------------------------------- prefill


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
    features = engine.target(tokens, window.slots, cache, window, taps=engine.drafter.taps)
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    logits = engine.target.logits(features.gather(1, last))  # [B, 1, V]
    noise, draws = None, state.draws[:, None]
    if rule.temperature > 0:
        logits, noise = sampling.process(logits, rule), sampling.gumbel(state.key, draws, logits.shape[2])  # [B, 1, V]
    root = best(logits, noise, torch.zeros_like(draws))  # [B, 1]
    ends_here = ((count > 0) & (start + count == state.pos))[:, None]
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(ends_here, state.pos[:, None], trash), root)
    span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
    rows = Rows(state.tokens.gather(1, span), features, count)  # read again: by now the roots are in
    return changed(state, draft=engine.drafter.extend(state.draft, rows))


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# --------------------------------------------------------------------------------------------- session


class Workspace:
    """The buffers of B sequences. They outlive their session, and where cycles are captured, at fixed addresses."""

    def __init__(self, engine: Engine):
        target, drafter, B = engine.target, engine.drafter, engine.config.batch_size
        weight = target.embedding.weight
        slots = engine.context + max(drafter.size, drafter.depth + 1, PREFILL_CHUNK)
        heads = [block.attention for block in (*target.layers, *(drafter.layers or ()))]
        caches = B * slots * weight.itemsize * sum(2 * each.kv_heads * each.head_dim for each in heads)
        scores = B * 4 * target.config.vocab_size * max(drafter.size, drafter.width)
        plan = {"the caches": caches, "scores of a tree": scores, "its candidates": B * 20 * drafter.width**2}
        check_memory(plan, str(weight.device), "lower --batch_size, --context or --tree_topk")
        self.cache = KVCache.empty(target.config, B, slots, weight.dtype, str(weight.device))
        number = torch.zeros(B, dtype=torch.long, device=weight.device)
        self.state = DecodeState(
            tokens=torch.zeros(B, engine.context + 1, dtype=torch.long, device=weight.device),
            pos=number, draws=number.clone(), done=number == 0, limit=number.clone(),
            key=NoiseKey(number.new_zeros(2), number.clone(), number.clone()),
            draft=drafter.init(B, slots),
        )  # fmt: skip
        self.start = number.clone()  # of a chunk of prompts
        self.replays: dict[Any, Replay] = {}  # by preset or width, what was captured over these buffers

    def reset(self, engine: Engine, key: NoiseKey) -> None:
        """Make every row idle and empty."""
        zeros = torch.zeros_like(self.state.pos)
        self.state.tokens.zero_()
        draft = engine.drafter.rewind(self.state.draft, zeros)
        self.put(engine, DecodeState(self.state.tokens, zeros, zeros, zeros == 0, zeros, key, draft))

    def put(self, engine: Engine, state: DecodeState) -> None:
        """Set the state. Writes: the buffers in place, where cycles are captured."""
        if engine.captured:
            store(self.state, state)
        else:
            self.state = state

    def prefill(self, engine: Engine, start: Tensor, width: int) -> None:
        """`prefill_chunk` over these buffers. Without a graph the host would be slower than a GPU."""
        if engine.captured:
            start, width = self.start.copy_(start), next(w for w in PREFILL_WIDTHS if w >= width)

        def body() -> None:
            self.put(engine, prefill_chunk(engine, self.cache, self.state, start, width))

        return self._replay(("prefill", width), body) if engine.captured else body()

    def replay(self, engine: Engine, preset: int) -> Outcome:
        """Run a cycle over these buffers, captured the first time."""

        def body() -> Outcome:
            state, outcome = engine.cycles[preset](self.cache, self.state)
            self.put(engine, state)
            return outcome

        return self._replay(preset, body)

    def _replay(self, key: Any, body: Callable[[], Any]) -> Any:
        if key not in self.replays:
            self.replays[key] = Replay(body, self.state.pos.device)
        return self.replays[key]()


class Launched(NamedTuple):
    """A cycle that the host has launched and not read yet."""

    report: HostCopy
    preset: int
    began: float  # host's clock (s)
    drawn: HostCopy | None  # for the trace: tokens, parents, depths, accepted path, and values where it has them


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
        self.preset = 0  # the largest that makes sense in the next cycle
        self.history: list[list[int]] = [[] for _ in range(B)]  # every token, prompts and roots included
        self.stats = Stats()
        self.trace: list[dict] = []

    @property
    def state(self) -> DecodeState:
        """Where the rows are, after every cycle that was launched."""
        return self.work.state

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
                self.stats.decode_s += (read := time.perf_counter()) - began
                yield self._note(new)
                began = read if self.lag else time.perf_counter()  # only a device goes on while the caller works

    def _launch(self, preset: int | None = None) -> Launched:
        """Run a cycle of a preset, or of the one that the chooser takes."""
        engine, work, began = self.engine, self.work, time.perf_counter()
        if preset is None:
            preset = engine.chooser.next(self.preset)
        cycle = engine.cycles[preset]
        self.stats.eager_cycles += isinstance(cycle, CompiledStep) and not cycle.waits
        if engine.captured:
            outcome = work.replay(engine, preset)
        else:
            work.state, outcome = cycle(work.cache, work.state)
        drawn, tree = None, outcome.tree
        if engine.config.trace:
            values = () if tree.values is None else (tree.values,)
            drawn = HostCopy(tree.tokens, tree.parents, tree.depths, outcome.path, *values)
        return Launched(HostCopy(outcome.report), preset, began, drawn)

    def time_cycle(self, preset: int) -> float:
        """Run a cycle of one preset, whatever it brings. Returns: its time (s)."""
        launched = self._launch(preset)
        (packed,) = launched.report.read()
        return self._seconds(launched, Report.rows(packed)[0])

    def _seconds(self, launched: Launched, report: Report) -> float:
        """How long a cycle took: by the device's clock, if it has one, where it runs ahead of the host."""
        on_device = (report.times[-1] - report.times[0]) / 1e9
        return on_device if self.lag and on_device else time.perf_counter() - launched.began

    def _read(self, launched: Launched) -> tuple[list[list[int]], bool]:
        """Returns: the new tokens of every row; whether all rows are done. Writes: preset, stats, trace."""
        (packed,) = launched.report.read()
        reports = Report.rows(packed)
        drawn = launched.drawn.read() if launched.drawn else None
        live = [row for row, report in enumerate(reports) if report.count]  # the others were done before this cycle
        if drawn:
            self.trace += [trace_row(drawn, row, reports[row]) for row in live]
        lengths = [reports[row].length for row in live]
        stats, (began, drafted, verified, ended) = self.stats, reports[0].times
        stats.live_rows.append(live)
        stats.accept_lengths += lengths
        stats.tokens += sum(report.count for report in reports)
        stats.draft_s += (drafted - began + ended - verified) / 1e9
        stats.verify_s += (verified - drafted) / 1e9
        wanted = [report.preset for report in reports if not report.done]
        self.preset = min(max(wanted, default=0), len(self.engine.cycles) - 1)
        if live:
            seconds = self._seconds(launched, reports[0])
            stats.presets.append((launched.preset, seconds))
            self.engine.chooser.observe(launched.preset, sum(lengths) / len(live), seconds)
        return [report.emitted[: report.count] for report in reports], not wanted

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
            self.history[row] = (prompt or [])[: begins[row]]  # what is cached, should Ctrl-C end this
            if prompt:
                state.tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
        begin, length = torch.tensor(begins, device=device), torch.tensor(lengths, device=device)
        limit = (length + engine.config.max_new_tokens - 1).clamp(max=engine.context - 1)
        rewound = engine.drafter.rewind(state.draft, begin)
        self.work.put(engine, changed(state, pos=length, limit=limit, draft=rewound))
        longest = max(end - start for start, end in zip(begins, lengths))
        for offset in range(0, longest, PREFILL_CHUNK):
            self.work.prefill(engine, begin + offset, min(PREFILL_CHUNK, longest - offset))
        state = self.state
        roots = state.tokens.gather(1, length[:, None])  # [B, 1]
        ends = torch.tensor(end_ids(engine), device=device)
        done = (length == 0) | (roots == ends).any(1) | (length >= limit)
        self.work.put(engine, changed(state, done=done, draws=state.draws + (length > 0)))
        self.preset, self.history = len(engine.cycles) - 1, [list(p or []) for p in prompts]  # idle rows are scratch
        new = [[root] if prompt else [] for root, prompt in zip(roots.squeeze(1).tolist(), prompts)]
        return new, bool(done.all())
