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

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sampling
from draft_tree import Accepted, DraftTree, Text, accept, accept_fused, replace_fields
from drafters import LARGEST, Confirmed, Drafter, Root
from kv_cache import KVCache, Window, causal_window
from model import Block, Transformer, call
from ops.library import has_cpu_operators, on_cpp_device
from ops.topk import best
from ops.tree import place_rows
from options import GenerateConfig
from runtime import Clock, LargestTree, compiled, copy_into
from sampling import NoiseKey, Sampling
from tree_shapes import MAX_NODES

NODE_STRIDE = MAX_NODES  # rows of fresh noise reserved per draw
PREFILL_CHUNK = 256  # tokens per prefill pass


class DecodeState(NamedTuple):
    """B sequences being decoded. The steps replace it; `tokens` and the caches are written in place."""

    tokens: (
        Tensor  # [B, S + 1] int64; tokens[b, pos[b]] is the root; the last column takes what is cut
    )
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


def pick_tokens(
    target: Transformer, features: Tensor, rule: Sampling, noise: Tensor | None, row: Tensor
) -> Tensor:
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
    pick_tokens: Callable[..., Tensor] = (
        pick_tokens  # what finds the target's own tokens (with ranks, `tp.pick_tokens`)
    )
    accept_rule: Callable[..., Accepted] | None = (
        None  # of acceptance, in place of `accept` (extras/residual.py)
    )
    eos_tensor: Tensor | None = (
        None  # [E] int64, tokens that end a row; -1, which is none, keeps it from being empty
    )
    cycles: tuple[
        Callable, ...
    ] = ()  # (cache, state) -> (state, outcome), one per preset of the drafter
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    tree_policy: Any = field(default_factory=LargestTree)
    pool: list[Any] = field(default_factory=list)  # buffers of sessions that are over
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
    engine = replace(
        engine, eos_tensor=ends, captured=compile and cuda, tree_policy=LargestTree(), pool=[]
    )
    cycles = [Cycle(engine, preset) for preset in engine.drafter.presets]
    if engine.captured:
        cycles = [cycle.compiled_by_layer() for cycle in cycles]
    return replace(engine, cycles=tuple(cycles))


# ----------------------------------------------------------------------------------------------- cycle


class Cycle:
    """One decode cycle, in which `drafter`, a preset of the engine's, proposes the tree."""

    def __init__(self, engine: Engine, drafter: Drafter):
        self.target, self.drafter, self.rule, self.eos_tensor = (
            engine.target,
            drafter,
            engine.config.sampling,
            engine.eos_tensor,
        )
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
        kinds = {
            type(block.ffn): compiled(call) for block in self.target.layers
        }  # no guard would tell them apart
        self.call = lambda part, *rows: (
            kinds[type(part.ffn)](part, *rows) if isinstance(part, Block) else begin(*rows)
        )
        self.in_place = True
        return self

    def __call__(self, cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
        """Run the steps, and tell the times between them. Writes: both caches, state.tokens; the state, if in place."""
        clock = Clock(state.pos.device)
        tree, noise = clock(self.draft, state)  # N nodes below the root
        state, rows, decision = clock(
            self.verify, cache, state, tree, noise
        )  # one pass of the target; its own path
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
            fresh = sampling.gumbel(
                state.key, state.draws * NODE_STRIDE, self.drafter.fresh_rows, V, sampling.DRAFT
            )
        return self.drafter.propose(
            state.drafter_state, Root(noise, fresh, Text(state.tokens, state.pos))
        ), noise

    def verify(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None
    ) -> tuple[DecodeState, Confirmed, Decision]:
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        # slots are not positions; what is done costs no attention to its text
        slots, begin, positions = place_rows(
            state.pos, tree.depths, self.drafter.size, done=state.done
        )
        window = Window(slots, begin, tree.mask)
        features = self.target(tree.tokens, positions, cache, window, self.call, self.aux_layers)
        return self.decide(cache, state, tree, noise, features)

    def decide(
        self,
        cache: KVCache,
        state: DecodeState,
        tree: DraftTree,
        noise: Tensor | None,
        features: Tensor,
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
        return self.write_back(
            state,
            replace_fields(state, drafter_state=self.drafter.extend(state.drafter_state, rows)),
        )


def advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, Confirmed, Decision]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root. Writes: state.tokens."""
    emitted = accepted.emitted  # [B, D+1]
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    inside = steps <= accepted.length[:, None]
    is_end = inside & (emitted[:, :, None] == cycle.eos_tensor).any(-1)
    before_end = (
        torch.where(is_end, steps, emitted.shape[1]).amin(1) + 1
    )  # tokens up to the first end
    count = torch.minimum(torch.minimum(accepted.length + 1, before_end), state.limit - state.pos)
    count = torch.where(state.done, 0, count)
    pos = state.pos + count
    kept = steps < count[:, None]
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(kept, state.pos[:, None] + 1 + steps, trash), emitted)
    done = state.done | (is_end & kept).any(1) | (pos >= state.limit)
    path = accepted.path[:, :, None].expand(-1, -1, features.shape[2])
    slots = tree.slots.gather(1, accepted.path) if tree.slots is not None else None
    rows = Confirmed(
        torch.cat((tree.tokens[:, :1], emitted), 1), features.gather(1, path), count, slots
    )
    preset = cycle.prefer(Text(state.tokens, pos))
    preset = torch.full_like(pos, LARGEST) if preset is None else preset
    decision = Decision(
        Report.pack(emitted, count, accepted.length, done, preset, state.pos), accepted.path
    )
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


def prefill_chunk(
    engine: Engine, cache: KVCache, state: DecodeState, start: Tensor, width: int
) -> DecodeState:
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
    features = engine.target(
        tokens, window.slots, cache, window, aux_layers=engine.drafter.aux_layers
    )
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    noise, first = None, torch.zeros_like(state.draws)[:, None]  # [B, 1], which row of the noise
    if rule.temperature > 0:
        noise = sampling.gumbel(
            state.key, state.draws, 1, engine.target.config.vocab_size
        )  # [B, 1, V]
    root = engine.pick_tokens(engine.target, features.gather(1, last), rule, noise, first)  # [B, 1]
    ends_here = (count > 0) & (start + count == state.pos)
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(ends_here, state.pos, trash)[:, None], root)
    span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
    taken = count * (ends_here | (engine.drafter.room == 0))  # rows wait behind whole prompts only
    rows = Confirmed(
        state.tokens.gather(1, span), features, taken
    )  # read again: by now the roots are in
    done = torch.where(
        ends_here, (root == engine.eos_tensor).any(1) | (state.pos >= state.limit), state.done
    )
    draft = engine.drafter.extend(state.drafter_state, rows)
    return replace_fields(state, draws=state.draws + ends_here, done=done, drafter_state=draft)


# --------------------------------------------------------------------------------------------- session
