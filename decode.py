"""A decode cycle: every method is the verification of a draft tree.

It has three steps, each tensors to tensors with static shapes, compiled `fullgraph=True`, on a CPU all three as one:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass; the deepest path that is the target's own choice is
   accepted, with the bonus token after it, and its keys and values move next to the prefix.
3. extend: the drafter takes in the rows that were accepted, with the target's features.

Vanilla decoding is the cycle whose tree is only its root. A drafter with presets has the steps of a cycle for each;
the report of a cycle says which ones suit the next. Rows that are done go through the motions and decide nothing, so
the host may read a report late; it is all that the host ever reads.
The output is a function of (weights, prompt, seed) alone; sampling.py says why.

Not here: the loop over cycles (session.py), options (config.py), loading and the command line (generate.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import kernels
import layers_cpu
import sampling
from autosize import Autosizer
from capture import leaves
from config import GenerateConfig
from draft_tree import MAX_NODES, Accepted, DraftTree, accept, compaction, path_to
from drafters import Drafter, Root, Rows, Text
from model import KVCache, Transformer, Window, call
from sampling import NoiseKey, Sampling

if TYPE_CHECKING:
    from session import Workspace

NODE_STRIDE = MAX_NODES  # rows of fresh noise reserved per draw


class DecodeState(NamedTuple):
    """B sequences being decoded. The steps replace it; `tokens` and the caches are written in place."""

    tokens: Tensor  # [B, S + 1] int64; tokens[b, pos[b]] is the root; the last column takes what is cut
    pos: Tensor  # [B] int64, index of the root: decided, not yet cached
    draws: Tensor  # [B] int64, tokens drawn in this conversation so far
    done: Tensor  # [B] bool
    limit: Tensor  # [B] int64, index of the last token that may be decided
    key: NoiseKey
    draft: Any  # the drafter's own


class Verified(NamedTuple):
    """What a verification hands to the drafter and to the host."""

    rows: Rows  # confirmed rows, D+1 of them, for the drafter
    path: Tensor  # [B, D+1] int64, accepted nodes
    # [B, D+6] int64: emitted tokens; their count after cuts (0: was done), accept length, done, preferred preset, pos
    report: Tensor


class Outcome(NamedTuple):
    """What a cycle leaves for the host."""

    report: Tensor  # [B, D+10] int64: `Verified.report`, and the times (ns) between the steps of the cycle, 4 of them
    tree: DraftTree
    path: Tensor  # [B, D+1] int64, accepted nodes


# a cycle from state to state; writes both caches and state.tokens
RunCycle = Callable[[KVCache, DecodeState], tuple[DecodeState, Outcome]]


class Steps(NamedTuple):
    """The parts of a cycle, for one preset of the drafter."""

    draft: Callable[[DecodeState], tuple[DraftTree, Tensor | None]]
    verify: Callable[[KVCache, DecodeState, DraftTree, Tensor | None], tuple[DecodeState, Verified]]
    extend: Callable[[DecodeState, Rows], DecodeState]


@dataclass(frozen=True)
class Engine:
    """Everything that decoding needs, loaded once."""

    config: GenerateConfig
    target: Transformer
    drafter: Drafter
    context: int  # KV capacity in tokens
    eos_ids: tuple[int, ...]
    cycles: tuple[RunCycle, ...] = ()  # one per preset of the drafter
    catch_up: Callable[[DecodeState], DecodeState] | None = None  # for presets that put off `extend`
    captured: bool = False  # cycles run over fixed buffers; on CUDA as graphs
    sizer: Autosizer | None = None  # picks the preset; None: the largest that is preferred
    pool: list[Workspace] = field(default_factory=list)  # buffers of sessions that are over
    tokenizer: Any = None  # tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # tokenizer.ChatTemplate, with --chat
    load_s: float = 0.0
    compile_s: float = 0.0


# ----------------------------------------------------------------------------------------------- steps


def end_ids(engine: Engine) -> list[int]:
    """Token ids that end a row; -1, which is no token, keeps the list from being empty."""
    return [-1] if engine.config.ignore_eos else [*engine.eos_ids, -1]


def with_cycles(engine: Engine) -> Engine:
    """Give the engine a cycle for every preset, compiled when the config says so.

    Weights are taken as they are now: they may change in place afterwards, and not be replaced.
    """
    drafter, config = engine.drafter, engine.config
    layers_cpu.keep(engine.target.layers)

    def catch_up(state: DecodeState) -> DecodeState:
        """Let the drafter take in what it has put off. Writes: its cache."""
        return state._replace(draft=drafter.catch_up(state.draft, Text(state.tokens, state.pos)))

    return replace(
        engine, cycles=tuple(_make_cycle(engine, preset) for preset in drafter.presets),
        catch_up=_compiled(catch_up) if config.compile else catch_up,
        captured=config.compile and config.device.startswith("cuda"), sizer=None, pool=[],
    )  # fmt: skip


def _make_cycle(engine: Engine, drafter: Drafter) -> RunCycle:
    compile, cuda = engine.config.compile, engine.config.device.startswith("cuda")
    steps = make_steps(engine, drafter, by_layer=compile and cuda)

    def cycle(cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
        return run_cycle(steps, cache, state)

    # one graph: every call of a compiled function costs a CPU 0.2 ms, most of it cache misses
    return _compiled(cycle) if compile and not cuda else cycle


def make_steps(engine: Engine, drafter: Drafter, by_layer: bool = False) -> Steps:
    """The steps of a cycle in which `drafter`, a preset of the engine's, proposes the tree.

    by_layer: compile them, with one layer of the target for all, instead of one graph of all. It takes a fraction of
    the time and costs a call per layer, which a captured cycle does not pay
    """
    target, config, rule, prefer = engine.target, engine.config, engine.config.sampling, engine.drafter.prefer
    D, N, V = drafter.depth, drafter.size, target.config.vocab_size
    device = target.embedding.weight.device
    ends = torch.tensor(end_ids(engine), device=device)
    levels = torch.arange(D + 1, device=device)
    nodes = torch.arange(N, device=device)
    fresh_rows = torch.arange(drafter.fresh_rows, device=device)
    run = _compiled(call) if by_layer else call

    def draft(state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        noise = fresh = None
        if rule.temperature > 0:
            noise = sampling.gumbel(state.key, state.draws[:, None] + levels, V)
        if drafter.fresh_rows:
            draws = state.draws[:, None] * NODE_STRIDE + fresh_rows
            fresh = sampling.gumbel(state.key, draws, V, sampling.DRAFT)
        root = state.tokens.gather(1, state.pos[:, None]).squeeze(1)
        return drafter.draft(state.draft, Root(root, noise, fresh, Text(state.tokens, state.pos))), noise

    def verify(cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None):
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        window = Window(state.pos[:, None] + nodes, state.pos, tree.mask)  # slots are not positions
        features, _ = target(tree.tokens, state.pos[:, None] + tree.depths, cache, window, run=run)
        return decide(cache, state, tree, noise, features)

    def decide(cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None, features: Tensor):
        """Accept and compact. features: [B, N, F], the target's. Writes: the cache, state.tokens."""
        before, logits = state.pos, target.logits(features)  # [B, N, V]
        if config.accept == "residual" and rule.temperature > 0:
            accepted = _accept_residual(tree, logits, noise, state, rule, drafter)
        else:
            at_node = noise.gather(1, tree.depths[:, :, None].expand(-1, -1, V)) if noise is not None else None
            accepted = accept(tree, sampling.choose(logits, rule, at_node), D)
        if drafter.width > 1:  # the rows of a chain lie where they belong
            cache.compact(before, compaction(accepted))
        state, rows, report = _advance(state, tree, accepted, features, ends)
        preset = prefer(Text(state.tokens, state.pos))
        tail = torch.stack((preset, before), 1)  # [B, 2]
        return state, Verified(rows, accepted.path, torch.cat((report, tail), 1))

    def extend(state: DecodeState, rows: Rows) -> DecodeState:
        """Hand the confirmed rows to the drafter. Writes: its cache."""
        return state._replace(draft=drafter.extend(state.draft, rows))

    if by_layer:
        decide = _compiled(decide)
        return Steps(_compiled(draft), verify, _compiled(extend))
    return Steps(draft, verify, extend)


def _compiled(step: FunctionType) -> Callable:
    # rounds to bf16 where eager code does, or the same row would get other bits in a step of another size
    options = {"emulate_precision_casts": True, "guard_filter_fn": _guards_of_modes}
    return torch.compile(_own_code(step), fullgraph=True, dynamic=False, options=options)


def _guards_of_modes(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards a compiled step keeps: modes such as autocast, which a caller may change.

    Modules, options and the shapes of buffers are an engine's own and stay as they are. Checking modules took 0.3 ms a
    step at 8 layers, and tensors 0.1 ms a cycle; what was compiled asserts the sizes of its arguments anyway.
    """
    return [guard.guard_type == "GLOBAL_STATE" for guard in guards]


def _own_code(step: FunctionType) -> FunctionType:
    """A copy with a code object of its own: Dynamo counts compilations per code object and stops at a limit,
    which many engines in one process would reach together."""
    code = step.__code__.replace(co_name=f"{step.__name__}_{next(_engines)}")
    return FunctionType(code, step.__globals__, code.co_name, step.__defaults__, step.__closure__)


_engines = itertools.count()


def _accept_residual(
    tree: DraftTree, logits: Tensor, noise: Tensor, state: DecodeState, rule: Sampling, drafter: Drafter
) -> Accepted:
    p = sampling.process(logits, rule).softmax(-1)  # [B, N, V]
    uniform = sampling.uniforms(state.key, state.draws[:, None], tree.tokens.shape[1], sampling.ACCEPT)[:, 0]
    node, rest = sampling.residual_accept(tree, p, uniform, drafter.depth, drafter.width)
    path, length = path_to(tree, node, drafter.depth)
    last = length[:, None]  # [B, 1]
    at_end = noise.gather(1, last[:, :, None].expand(-1, 1, noise.shape[2])).squeeze(1)  # [B, V]
    bonus = (rest.log() + at_end).argmax(-1, keepdim=True)  # [B, 1]
    emitted = tree.tokens.gather(1, path).roll(-1, dims=1).scatter(1, last, bonus)  # [B, D+1]
    return Accepted(path, length, emitted)


def _advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, ends: Tensor
) -> tuple[DecodeState, Rows, Tensor]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root. Writes: state.tokens.

    Returns: the state; the confirmed rows; the report's first D+4 columns.
    """
    emitted = accepted.emitted  # [B, D+1]
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    inside = steps <= accepted.length[:, None]
    is_end = inside & (emitted[:, :, None] == ends).any(-1)
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
    report = torch.cat((emitted, torch.stack((count, accepted.length, done.long()), 1)), 1)  # [B, D+4]
    return state._replace(pos=pos, draws=state.draws + count, done=done), rows, report


def run_cycle(steps: Steps, cache: KVCache, state: DecodeState) -> tuple[DecodeState, Outcome]:
    """One cycle, with the times between its steps. Writes: both caches, state.tokens."""
    pos, began = kernels.stamp(state.pos)
    tree, noise = steps.draft(state._replace(pos=pos))
    tokens, drafted = kernels.stamp(tree.tokens)
    state, verified = steps.verify(cache, state, tree._replace(tokens=tokens), noise)
    tokens, checked = kernels.stamp(verified.rows.tokens)
    state = steps.extend(state, verified.rows._replace(tokens=tokens))
    report, ended = kernels.stamp(verified.report, leaves(state.draft))
    times = torch.stack((began, drafted, checked, ended)).expand(len(report), -1)
    return state, Outcome(torch.cat((report, times), 1), tree, verified.path)
