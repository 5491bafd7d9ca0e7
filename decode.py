"""The decode cycle: every method proposes a draft tree, and decoding is the verification of a tree.

    tokens [B, S] --root--> draft --DraftTree [B, N]--> verify --Accepted [B, D+1]--> extend
                              |                           |                             |
                  drafter's scratch slots      target's slots pos .. pos+N-1    drafter's KV cache

A `Cycle` has three steps, each tensors to tensors with static shapes:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass. The deepest path that agrees with the
   target's own tokens is accepted, the bonus token added, the cache compacted, the root advanced.
3. extend: the drafter reads the accepted tokens with the target's features.
Vanilla decoding is the cycle whose tree is only its root. There is a cycle for each preset of a
drafter and each kind of sampling: sequences of one batch may be sampled differently, and where all
are greedy no noise is made. With --compile on CUDA, draft, extend, the target's blocks and the rest
of verify (`place`, `decide`) are compiled (`fullgraph=True`), and a cycle is captured as one graph,
as it also is where the compiler fails: no step waits for a result on the host.
On a CPU the steps call C++ operators.
Not here: the host's side (session.py), compiling and capturing (runtime.py), loading (load.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from cli.tree_paths import MAX_NODES
from draft_tree import Accepted, DraftTree, Text, accept, accept_fused, replace_fields
from drafters import LARGEST, Confirmed, Drafter, LargestTree, Root
from kv_cache import KVCache, Window, causal_window
from model import Block, Transformer, call
from ops import switches
from ops.library import has_cpu_operators, on_cpp_device
from ops.topk import best, topk_logsumexp
from ops.tree import place_tokens
from options import GenerateConfig
from runtime import Clock, compiled, copy_into
from sampling import Kind, NoiseKey, Rule

NODE_STRIDE = MAX_NODES  # rows of fresh noise reserved per draw
PREFILL_CHUNK = 256  # tokens per prefill pass


class DecodeState(NamedTuple):
    """B sequences being decoded. Steps replace it; `tokens` and the caches are written in place."""

    # [B, S + 1] int64; tokens[b, pos[b]] is the root; the last column takes tokens that are cut off
    tokens: Tensor
    pos: Tensor  # [B] int64, index of the root: decided, not yet cached
    draws: Tensor  # [B] int64, tokens drawn in this conversation so far
    done: Tensor  # [B] bool
    limit: Tensor  # [B] int64, index of the last token that may be decided
    key: NoiseKey
    rule: Rule
    drafter_state: Any


class Report(NamedTuple):
    """A cycle of one sequence, as the host reads it."""

    emitted: list[int]  # D+1 decided tokens (bonus last); entries past `length` are padding
    count: int  # tokens left of them after cuts; 0: the sequence was done before
    length: int  # accepted nodes
    done: int  # 1: the sequence is finished; 2 or 3: features on the accepted path are not finite
    preset: int  # the largest preset that makes sense next
    pos: int  # index of the root that was verified
    times: list[int]  # ns: before, between and behind the steps

    @staticmethod
    def pack(emitted: Tensor, *fields: Tensor) -> Tensor:
        """Pack everything but the times into one tensor.

        emitted: [B, D+1]; fields: [B] each, in the order of the record. Returns: [B, D+6] int64.
        """
        return torch.cat((emitted, torch.stack([x.long() for x in fields], 1)), 1)

    @staticmethod
    def timed(report: Tensor, times: list[Any]) -> Tensor:
        """Append the four times of a `Clock`, so that one copy takes all: [B, D+10] int64."""
        if on_cpp_device(report, "tree"):
            return torch.ops.gpt_eagle.with_times(report, times)
        columns = [torch.as_tensor(time).expand(len(report), 1) for time in times]
        return torch.cat((report, *columns), 1)

    @staticmethod
    def emitted_of(report: Tensor) -> Tensor:
        """Return the emitted tokens of a timed report, [B, D+1]."""
        return report[:, :-9]

    @staticmethod
    def unpack(packed: list[list[int]]) -> list[Report]:
        """Invert `pack` and `timed`: a report per sequence."""
        return [Report(values[:-9], *values[-9:-4], values[-4:]) for values in packed]


class Outcome(NamedTuple):
    """Everything that a cycle leaves for the host."""

    report: Tensor  # [B, D+6] int64, from `Report.pack`; at the end [B, D+10], from `Report.timed`
    tree: DraftTree
    path: Tensor  # [B, D+1] int64, accepted nodes, root first
    features: Tensor  # [B, D+1, F], the target's at these nodes; with aux layers [.., (1 + aux) F]
    expected: Tensor | None = None  # [B, 1 + lookups] fp32, from `Drafter.expected`


def pick_tokens(
    target: Transformer,
    features: Tensor,
    rule: Rule | None,
    noise: Tensor | None,
    draw: Tensor,
    allowed: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Pick the target's own token after every feature, [B, N] int64.

    features: [B, N, F]; noise: [B, R, V] fp32; rule and noise are None when all are greedy
    draw: [B, N] int64, the row of the noise that belongs to each feature
    allowed: [B, N, V] bool, tokens that a grammar allows; None: all
    scores: [B, N, V] fp32, the target's logits, where they are computed already
    """
    if scores is None:
        scores = target.logits(features)  # [B, N, V]
    if allowed is not None:
        scores = torch.where(allowed, scores, float("-inf"))
    if noise is not None:
        scores = sampling.process(scores, rule)
    return best(scores, noise, draw)


@dataclass(frozen=True)
class Engine:
    """Everything that decoding needs, loaded once."""

    config: GenerateConfig
    target: Transformer
    drafter: Drafter
    context: int  # KV capacity in tokens
    eos_ids: tuple[int, ...]
    pick_tokens: Callable[..., Tensor] = pick_tokens  # with several ranks, `tp.pick_tokens`
    accept_rule: Callable[..., Accepted] | None = None  # replaces `accept` (extras/residual.py)
    eos_tensor: Tensor | None = None  # [E] int64, eos_ids and -1, so that it is never empty
    # by `Kind`, then by preset: (cache, state) -> (state, outcome)
    cycles: tuple[tuple[Callable, ...], ...] = ()
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    compiler_fails: bool = False  # the steps of captured cycles stay as they are
    tree_policy: Any = field(default_factory=LargestTree)
    pool: list[Any] = field(default_factory=list)  # buffers.Buffers of finished sessions
    tokenizer: Any = None  # hf.tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # hf.chat.ChatTemplate, with --chat
    grammar: Any = None  # extras.grammar.Grammar of --grammar, where a turn names no other
    load_s: float = 0.0
    compile_s: float = 0.0

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles the steps of captured cycles."""
        return self.captured and not self.compiler_fails and switches.is_on("INDUCTOR")

    @property
    def slots(self) -> int:
        """Cache slots per sequence: the context, plus scratch for one tree or one prefill chunk."""
        return self.context + max(self.drafter.size, self.drafter.depth + 1, PREFILL_CHUNK)

    def finish_reason(self, new: list[int]) -> str:
        """Return the reason why a sequence ended: "stop", "length" or "context"."""
        if new[-1] in self.eos_ids and not self.config.ignore_eos:
            return "stop"
        return "length" if len(new) >= self.config.max_new_tokens else "context"


def with_cycles(engine: Engine) -> Engine:
    """Give the engine a cycle for every kind of sampling and preset, compiled as the config says.

    With --compile on a CPU the weights are taken as they are now: later they may change in place,
    but not be replaced.
    Writes: `fused` of target and drafter; engines that share them must agree on --compile.
    """
    config = engine.config
    assert (engine.accept_rule is None) == (config.accept == "exact"), config.accept
    cuda = config.device.startswith("cuda")
    engine.target.fuse(config.compile and not cuda)
    engine.drafter.fuse(config.compile and not cuda)
    eos_ids = engine.eos_ids
    if config.ignore_eos:
        eos_ids = ()
    engine = replace(
        engine,
        eos_tensor=torch.tensor([-1, *eos_ids], device=engine.target.norm.weight.device),
        captured=config.compile and cuda,
        tree_policy=LargestTree(),
        pool=[],
    )
    made = Cycle.compiled_by_layer if engine.compiles else lambda cycle: cycle
    cycles = [
        tuple(made(Cycle(engine, preset, kind)) for preset in engine.drafter.presets)
        for kind in Kind
    ]
    return replace(engine, cycles=tuple(cycles))


# -------------------------------------------------------------------------------------------- cycle


class Cycle:
    """One decode cycle, in which `drafter`, a preset of the engine's, proposes the tree."""

    def __init__(self, engine: Engine, drafter: Drafter, kind: Kind):
        """kind: the latest of any sequence that it decodes"""
        self.target = engine.target
        self.drafter = drafter
        self.kind = kind
        self.eos_tensor = engine.eos_tensor
        self.prefer = engine.drafter.prefer
        self.expected = engine.drafter.expected
        self.aux_layers = engine.drafter.aux_layers
        self.pick_tokens = engine.pick_tokens
        self.accept_rule = engine.accept_rule
        self.call = call
        self.in_place = engine.captured
        self.accept = accept
        self.advance = advance
        on_cpu = engine.target.norm.weight.device.type == "cpu"
        if engine.config.compile and on_cpu and has_cpu_operators("tree"):
            self.accept = accept_fused
            self.advance = advance_fused

    def compiled_by_layer(self) -> Cycle:
        """Compile the steps, and one block of the target for all of its kind.

        One graph of everything would take many times as long to compile. A call per block costs
        nothing in a captured cycle. The state of a captured cycle has to stay where it was, so the
        steps write it there.
        """
        for name in ("draft", "place", "decide", "extend"):
            setattr(self, name, compiled(getattr(self, name)))
        embed = compiled(self.target.embed)
        blocks = {}  # by kind: no guard would tell dense blocks and mixtures apart
        for block in self.target.layers:
            blocks.setdefault(type(block.ffn), compiled(call))

        def run(part: Callable, *inputs: Any) -> Any:
            if isinstance(part, Block):
                return blocks[type(part.ffn)](part, *inputs)
            return embed(*inputs)

        self.call = run
        self.in_place = True
        return self

    def __call__(self, cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
        """Run the three steps, timed.

        Writes: both caches, state.tokens; the state, if in place.
        """
        clock = Clock(state.pos.device)
        draft, verify, extend = clock.timed(self.draft, self.verify, self.extend)
        tree, noise = draft(state)
        state, confirmed, outcome = verify(cache, state, tree, noise)
        state = extend(state, confirmed)
        report = Report.timed(outcome.report, clock.times)
        expected = self.expected(state.drafter_state)
        return state, replace_fields(outcome, report=report, expected=expected)

    def write_back(self, state: DecodeState, new: DecodeState) -> DecodeState:
        """Return the new state. Writes: the old one, if in place."""
        if not self.in_place:
            return new
        copy_into(state, new)
        return state

    def draft(self, state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        noise = None
        fresh = None
        V = self.target.config.vocab_size
        rule = state.rule.needed(self.kind)
        if rule is not None:
            noise = sampling.gumbel(state.key, state.draws, self.drafter.depth + 1, V)
        if rule is not None and self.drafter.fresh_rows:
            first = state.draws * NODE_STRIDE
            fresh = sampling.gumbel(state.key, first, self.drafter.fresh_rows, V, sampling.DRAFT)
        root = Root(noise, fresh, Text(state.tokens, state.pos), rule)
        return self.drafter.propose(state.drafter_state, root), noise

    def verify(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None
    ) -> tuple[DecodeState, Confirmed, Outcome]:
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        slots, start, positions = self.place(state, tree)
        window = Window(slots, start, tree.mask)
        features = self.target(tree.tokens, positions, cache, window, self.call, self.aux_layers)
        return self.decide(cache, state, tree, noise, features)

    def place(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots, the window's first slot and the positions of `place_tokens`."""
        # nodes of one depth share a position, not a slot; a finished sequence has an empty prefix
        return place_tokens(state.pos, tree.depths, tree.tokens.shape[1], done=state.done)

    def decide(
        self,
        cache: KVCache,
        state: DecodeState,
        tree: DraftTree,
        noise: Tensor | None,
        features: Tensor,
    ) -> tuple[DecodeState, Confirmed, Outcome]:
        """Accept a path and compact the cache. features: [B, N, F].

        Writes: the cache, state.tokens; the state, if in place.
        """
        scores = None
        if self.accept_rule or self.drafter.successors:
            scores = self.target.logits(features)
        if self.accept_rule:
            accepted = self.accept_rule(tree, scores, noise, state, self)
        else:
            rule = state.rule.needed(self.kind)
            inputs = (self.target, features, rule, noise, tree.depths, tree.allowed, scores)
            tokens = self.pick_tokens(*inputs)
            accepted = self.accept(tree, tokens, self.drafter.depth)
        if self.drafter.width > 1:  # the accepted nodes of a chain are in place already
            cache.compact(state.pos, accepted.moves)
        new, confirmed, outcome = self.advance(state, tree, accepted, features, self)
        if self.drafter.successors:
            if self.drafter.successors == 1:
                likeliest = best(scores)[:, :, None]
            else:
                likeliest = topk_logsumexp(scores, self.drafter.successors)[1]
            confirmed = replace_fields(confirmed, tree=tree, successors=likeliest)
        return self.write_back(state, new), confirmed, outcome

    def extend(self, state: DecodeState, confirmed: Confirmed) -> DecodeState:
        """Hand the confirmed tokens to the drafter. Writes: its cache; the state, if in place."""
        drafter_state = self.drafter.extend(state.drafter_state, confirmed)
        return self.write_back(state, replace_fields(state, drafter_state=drafter_state))


def advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, Confirmed, Outcome]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root.

    Writes: state.tokens.
    """
    emitted = accepted.emitted  # [B, D+1]
    width = emitted.shape[1]
    steps = torch.arange(width, device=emitted.device)
    inside = steps <= accepted.length[:, None]
    is_end = inside & (emitted[:, :, None] == cycle.eos_tensor).any(-1)
    to_end = torch.where(is_end, steps, width).amin(1) + 1  # [B], tokens up to the first end
    count = torch.minimum(torch.minimum(accepted.length + 1, to_end), state.limit - state.pos)
    count = torch.where(state.done, 0, count)
    pos = state.pos + count
    kept = steps < count[:, None]
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(kept, state.pos[:, None] + 1 + steps, trash), emitted)
    done = state.done | (is_end & kept).any(1) | (pos >= state.limit)
    path = accepted.path[:, :, None].expand(-1, -1, features.shape[2])
    tokens = torch.cat((tree.tokens[:, :1], emitted), 1)  # [B, D+2]
    slots = slots_of(tree, accepted, cycle)
    text = Text(state.tokens, pos)
    confirmed = Confirmed(tokens, features.gather(1, path), count, slots, text)
    preset = cycle.prefer(text)
    if preset is None:
        preset = torch.full_like(pos, LARGEST)
    broken = ~confirmed.features.sum((1, 2), dtype=torch.float32).isfinite()  # [B]
    report = Report.pack(emitted, count, accepted.length, done + 2 * broken, preset, state.pos)
    new = replace_fields(state, pos=pos, draws=state.draws + count, done=done)
    return new, confirmed, Outcome(report, tree, accepted.path, confirmed.features)


def advance_fused(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, Confirmed, Outcome]:
    """Run `advance` in one C++ call (ops/cpu/tree.cpp), on a CPU. Writes: state.tokens."""
    old = (state.tokens, state.pos, state.draws, state.done, state.limit)
    pos, draws, done, count, tokens, path_features, report = torch.ops.gpt_eagle.advance(
        *old, tree.tokens, *accepted[:3], cycle.eos_tensor, features, LARGEST
    )
    text = Text(state.tokens, pos)
    preset = cycle.prefer(text)
    if preset is not None:
        report[:, -2] = preset  # the order of `Report.pack`
    slots = slots_of(tree, accepted, cycle)
    confirmed = Confirmed(tokens, path_features, count, slots, text)
    new = replace_fields(state, pos=pos, draws=draws, done=done)
    return new, confirmed, Outcome(report, tree, accepted.path, confirmed.features)


def slots_of(tree: DraftTree, accepted: Accepted, cycle: Cycle) -> Tensor | None:
    """Return the accepted path's slots in the drafter's own cache, [B, D+1], if it keeps them."""
    if not cycle.drafter.keeps_nodes or cycle.drafter.width <= 1:  # a chain's are never read
        return tree.places if cycle.drafter.keeps_nodes else None
    return tree.places.gather(1, accepted.path)


# ------------------------------------------------------------------------------------------ prefill


def prefill_chunk(
    engine: Engine,
    cache: KVCache,
    state: DecodeState,
    kind: Kind,
    start: Tensor,
    width: int,
    allowed: Tensor | None = None,
) -> tuple[DecodeState, Tensor]:
    """Run the target over `width` prompt tokens of every sequence; the drafter reads the features.

    kind: of the sequences' sampling, the latest of any
    start: [B] int64, index of each sequence's first token in the chunk; shorter ones are padded
    allowed: [B, 1, V] bool, the tokens that may be a root; None: all
    A sequence whose prompt ends in this chunk gets its root: only that feature meets the LM head.
    Writes: both caches, state.tokens.
    Returns: the state; a sequence is done if nothing may follow its root. The features that such a
        root was chosen from, [B, 1, F].
    """
    rule = state.rule.needed(kind)
    start = torch.minimum(start, state.pos)
    count = (state.pos - start).clamp(max=width)  # [B], tokens that are no padding
    window = causal_window(start, width)
    tokens = state.tokens.gather(1, window.slots.clamp(max=state.tokens.shape[1] - 1))  # [B, T]
    features = engine.target(
        tokens, window.slots, cache, window, aux_layers=engine.drafter.aux_layers
    )
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    draw = torch.zeros_like(state.draws)[:, None]  # [B, 1]
    noise = None
    if rule is not None:
        vocab = engine.target.config.vocab_size
        noise = sampling.gumbel(state.key, state.draws, 1, vocab)  # [B, 1, V]
    before_root = features.gather(1, last)  # [B, 1, F]
    inputs = (engine.target, before_root, rule, noise, draw, allowed)
    root = engine.pick_tokens(*inputs)  # [B, 1]
    ends_here = (count > 0) & (start + count == state.pos)
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(ends_here, state.pos, trash)[:, None], root)
    span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
    # a drafter defers tokens only behind a prompt that this chunk completes
    taken = count * (ends_here | (engine.drafter.max_deferred == 0))
    text = Text(state.tokens, state.pos)
    tokens = state.tokens.gather(1, span)  # with the new roots
    confirmed = Confirmed(tokens, features, taken, text=text)
    at_end = (root == engine.eos_tensor).any(1) | (state.pos >= state.limit)
    done = torch.where(ends_here, at_end, state.done)
    drafter_state = engine.drafter.extend(state.drafter_state, confirmed)
    draws = state.draws + ends_here
    state = replace_fields(state, draws=draws, done=done, drafter_state=drafter_state)
    return state, before_root
