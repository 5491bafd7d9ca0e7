"""The decode cycle: every method proposes a draft tree, and decoding is the verification of a tree.

    tokens [B, S+1] --root--> draft --DraftTree [B, N]--> verify --Accepted [B, D+1]--> extend
                                |                           |                             |
                    drafter's scratch slots      target's slots pos .. pos+N-1    drafter's KV cache

A `Cycle` has three steps, each tensors to tensors with static shapes:
1. draft: the drafter proposes a tree below the root, the token decided last.
2. verify: the target runs over the whole tree in one pass. The deepest path that agrees with the
   target's own tokens is accepted, the bonus token added, the cache compacted, the root advanced.
3. extend: the drafter reads the confirmed tokens with the target's features.
Vanilla decoding is the cycle whose tree is only its root. There is a cycle for each preset of a
drafter and each mode of sampling. On CUDA a cycle is captured as one graph: no step waits for the
host. With --compile its steps are compiled first (`fullgraph=True`). On a CPU they call C++
operators.
Not here: the host's side (run/scheduler.py, run/session.py), compiling and capturing (runtime.py),
loading (run/load.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import sampling
from draft_tree import Accepted, DecodedTokens, DraftTree
from drafters import Drafter, DrafterUpdate, DraftInputs, DraftMethod
from kv_cache import KVCache, Window, causal_window
from model import Transformer, run_eagerly
from options import require
from reference import choose, use_backend
from run.observer import REPORT, Observer
from run.options import GenerateConfig, Sampling
from run.tree_paths import DraftLimit
from runtime import StepClock, compiled, copy_into, replace_fields
from sampling import SamplingMode, SamplingTensors

PREFILL_CHUNK = 256  # tokens per prefill pass


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


def pick_tokens(
    target: Transformer,
    features: Tensor,
    rule: SamplingTensors | None,
    noise: Tensor | None,
    draw: Tensor,
    allowed: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Pick the target's own token after every feature. Returns: [B, N] int64, and no extra.

    features: [B, N, F]; noise: [B, R, V] fp32, of R draws; rule and noise: None when all are greedy
    draw: [B, N] int64, the row of the noise that belongs to each feature
    allowed: [B, N, V] bool, tokens that may follow each feature; None: all
    """
    scores = target.logits(features)
    return sampling.choose(scores, rule, noise, draw, allowed, target.backend), None


def cache_dtype(config: GenerateConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the target's cache. dtype: of its weights"""
    return torch.int8 if config.kv == "int8" else dtype


class Guide(Protocol):
    """Masks the tokens that may follow the text of one sequence, as a grammar does."""

    fault: str  # told where it allows nothing

    def take(self, tokens: list[int]) -> list[int]:
        """Go on behind decided tokens.

        Returns: those that are allowed: all, unless it allows nothing behind them.
        """

    def root_mask(self, device: torch.device) -> Tensor | None:
        """Return the tokens that may follow, [1, 1, V] bool; None: all."""

    def around(
        self, engine: Engine, preset: int, guides: list[Guide | None], live: list[bool]
    ) -> Drafter:
        """Return a preset of the engine whose trees keep to the guides of all sequences."""


class GuideSource(Protocol):
    """Something to write by, for any number of texts."""

    def begin(self) -> Guide:
        """Begin a text."""


class Rescorer(Protocol):
    """Changes the target's scores by the text before each node, as penalties of repeats do."""

    def check(self, own: Sampling) -> None:
        """Check that the tokens exist. Raises: ValueError."""

    def rows(self, each: Sequence[Sampling]) -> Any:
        """Make the parameters of B sequences, a tuple of tensors [B, ...]."""

    def rescore(
        self, scores: Tensor, rule: SamplingTensors, text: DecodedTokens, tree: DraftTree
    ) -> Tensor:
        """Return changed scores, [B, N, V] fp32, by tensor operations of fixed shape.

        scores: [B, N, V] fp32, of the token after each node; rule: with `rows` as its penalties
        text: all tokens up to the root
        Writes: scores.
        """


@dataclass(eq=False)
class Cycles:
    """The cycles of an engine, and the buffers that captured ones run over."""

    eos_tensor: Tensor | None = None  # [E] int64, eos_ids and -1, so that it is never empty
    captured: bool = False  # they run over fixed buffers; on CUDA as graphs
    compiled: bool = False  # torch.compile compiles the steps of captured ones
    # by `SamplingMode`, then by preset: (cache, state) -> (state, update, report)
    by_mode: tuple[tuple[Callable, ...], ...] = ()
    buffers: list[Any] = field(default_factory=list)  # session.Buffers of finished sessions


@dataclass(frozen=True)
class Engine:
    """Everything that decoding needs, loaded once."""

    config: GenerateConfig  # as the user asked
    target: Transformer
    presets: tuple[Drafter, ...]  # which share a state, smallest tree first
    context: int  # KV capacity in tokens
    eos_ids: tuple[int, ...]
    # -> (tokens [B, N], an extra that the drafter's `extend` reads, or None)
    pick_tokens: Callable[..., tuple[Tensor, Any]] = pick_tokens
    accept_rule: Callable[..., Accepted] | None = None  # replaces `accept` (drafts/residual.py)
    policy: Observer = Observer()  # picks the preset of every step
    resolved: dict[str, Any] = field(default_factory=dict)  # options by name, as loading chose them
    guide: GuideSource | None = None  # masks tokens, unless a request brings its own
    rescorer: Rescorer | None = None  # of requests whose parameters ask for it
    cycles: Cycles = field(default_factory=Cycles)
    tokenizer: Any = None  # files.tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # files.chat.ChatTemplate, with --chat
    load_s: float = 0.0
    compile_s: float = 0.0

    @property
    def captured(self) -> bool:
        """Return whether cycles run over fixed buffers; on CUDA as graphs."""
        return self.cycles.captured

    @property
    def drafter(self) -> Drafter:
        """The largest preset."""
        return self.presets[-1]

    def draft_limit(self, value: Any, name: str = "draft") -> DraftLimit:
        """Return the bound of a request on its drafts: a number of tokens, or a tree. None: none.

        name: of the request's option
        Raises: ValueError where it is neither, or no tree is as small.
        """
        limit = DraftLimit.parse(value)
        smallest = self.presets[0]
        least = smallest.size - 1
        why = ", as draft trees have one size here" if least else ""
        kinds = f"a whole number from {least} on, or a tree as chain:4 or dynamic:6,8,32"
        fault = f"{name} must be {kinds}{why}; it is {repr(value)[:50]}; leave it out"
        require(limit is not None and limit.allows(smallest), fault)
        return limit

    def check_sampling(self, own: Sampling) -> None:
        """Check that the tokens that are named exist. Raises: ValueError."""
        if self.rescorer is not None:
            self.rescorer.check(own)

    @property
    def device(self) -> torch.device:
        """The device of everything."""
        return self.target.norm.weight.device

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the target's cache; drafters' caches have that of the weights."""
        return cache_dtype(self.config, self.target.norm.weight.dtype)

    def option(self, name: str) -> Any:
        """Return the value of an option: as loading chose it, else as the user asked."""
        return self.resolved.get(name, getattr(self.config, name))

    def sampling_tensors(self, each: Sequence[Sampling], seed: int) -> SamplingTensors:
        """Make the parameters of B sequences, all of one seed, as samples 0 of prompts 0."""
        tensors = SamplingTensors.from_params(each, self.device, seed)
        if self.rescorer is None:
            return tensors
        return replace_fields(tensors, penalties=self.rescorer.rows(each))

    def with_method(self, method: DraftMethod) -> Engine:
        """Return an engine that drafts in another way. Its cycles are still to be made."""
        return replace(
            self,
            presets=method.presets,
            pick_tokens=method.pick_tokens or pick_tokens,
            policy=method.policy,
        )

    @property
    def nodes(self) -> int:
        """The most nodes of a tree, or of a path, whichever is more."""
        return max(self.drafter.size, self.drafter.depth + 1)

    @property
    def slots(self) -> int:
        """Cache slots per sequence: the context, plus scratch for one tree or one prefill chunk."""
        return self.context + max(self.nodes, PREFILL_CHUNK)


def build_cycles(engine: Engine) -> Engine:
    """Give the engine a cycle for every mode of sampling and preset, as `compile` says.

    On CUDA they are captured unless it is False, and compiled where it is True. On a CPU they call
    whole passes in C++ where it is True (`load` chooses that by default). There weights may later
    change in place, but not be replaced.
    Writes: `backend` and `program` of target and drafters; engines that share them must agree on
        `compile`.
    """
    compiles = engine.option("compile")
    assert (engine.accept_rule is None) == (engine.config.accept == "exact"), engine.config.accept
    cuda = engine.option("device").startswith("cuda")
    backend = choose(engine.device, engine.target.norm.weight.dtype)
    use_backend(engine.target, backend)
    for preset in engine.presets:
        preset.use(backend)
    fuses = cuda or compiles is True
    engine.target.fuse(fuses)
    engine.drafter.fuse(fuses)
    eos_ids = () if engine.config.ignore_eos else engine.eos_ids
    cycles = Cycles(
        eos_tensor=torch.tensor([-1, *eos_ids], device=engine.device),
        captured=cuda and compiles is not False,
        compiled=cuda and compiles is True,
    )
    engine = replace(engine, cycles=cycles)
    finish = Cycle.compiled_by_layer if cycles.compiled else lambda cycle: cycle
    cycles.by_mode = tuple(
        tuple(finish(Cycle(engine, preset, mode)) for preset in engine.presets)
        for mode in SamplingMode
    )
    return engine


def rule_of(
    rescorer: Rescorer | None,
    state: DecodeState,
    mode: SamplingMode,
    text: DecodedTokens,
    tree: DraftTree,
) -> SamplingTensors | None:
    """Return the rule of the tokens after the nodes of a tree; None when all are greedy.

    text: all tokens up to the root of the tree
    """
    rule = state.sampling.needed(mode)
    if mode < SamplingMode.SHAPED:
        return rule
    rescore = None
    if rescorer is not None:
        rescore = partial(rescorer.rescore, rule=rule, text=text, tree=tree)
    return rule.at_nodes(state.draws[:, None] + tree.depths, rescore)


# -------------------------------------------------------------------------------------------- cycle


class Cycle:
    """One decode cycle, in which `drafter`, a preset of the engine's, proposes the tree."""

    def __init__(self, engine: Engine, drafter: Drafter, mode: SamplingMode):
        """mode: the highest `SamplingMode` of the sequences that it decodes"""
        self.target = engine.target
        self.backend = engine.target.backend
        self.drafter = drafter
        self.mode = mode
        self.eos_tensor = engine.cycles.eos_tensor
        self.aux_layers = engine.drafter.aux_layers
        self.pick_tokens = engine.pick_tokens
        self.rescorer = engine.rescorer
        self.accept_rule = engine.accept_rule
        self.run_part = run_eagerly  # runs a part of the target
        self.in_place = engine.captured  # a new state is copied into the old one

    def compiled_by_layer(self) -> Cycle:
        """Compile the steps, and one layer of the target of each kind; all layers reuse it.

        One graph of everything takes many times as long to compile. In a captured cycle, a call per
        layer costs nothing.
        """
        for name in ("draft", "place", "decide", "extend"):
            setattr(self, name, compiled(getattr(self, name)))
        embed = compiled(self.target.embed)
        # by their steps: no guard would tell dense layers and mixtures apart
        layers = {layer.steps: compiled(run_eagerly) for layer in self.target.parts}

        def run_part(part: Callable, *inputs: Any) -> Any:
            if part == self.target.embed:
                return embed(*inputs)
            return layers[part.steps](part, *inputs)

        self.run_part = run_part
        self.in_place = True
        return self

    def __call__(
        self, cache: KVCache, state: DecodeState
    ) -> tuple[DecodeState, DrafterUpdate, Tensor]:
        """Run the three steps, timed. Writes: both caches, state.tokens; the state, if in place.

        Returns: the state, what the drafter has read, and the report for the host, [B, D+9] int64.
        """
        clock = StepClock(state.pos.device)
        draft, verify, extend = clock.timed(self.draft, self.verify, self.extend)
        tree, noise = draft(cache, state)
        state, update, report = verify(cache, state, tree, noise)
        state = extend(state, update)
        return state, update, self.backend.with_times(report, clock.times)

    def write_back(self, state: DecodeState, new: DecodeState) -> DecodeState:
        """Return the new state. Writes: the old one, if in place."""
        if not self.in_place:
            return new
        copy_into(state, new)
        return state

    def draft(self, cache: KVCache, state: DecodeState) -> tuple[DraftTree, Tensor | None]:
        """Propose a tree. Returns: the tree; Gumbel noise of the coming draws, [B, D+1, V]."""
        noise = None
        rule = state.sampling.needed(self.mode)
        if self.mode == SamplingMode.SHAPED and not sampling.may_be(~rule.greedy):
            rule = None  # the target's choice is the best of changed scores
        if rule is not None:
            vocab = self.target.config.vocab_size
            rows = self.drafter.depth + 1
            noise = sampling.gumbel(rule, state.draws, rows, vocab, backend=self.backend)
        text = DecodedTokens(state.tokens, state.pos)
        inputs = DraftInputs(noise, text, rule, state.draws, cache=cache)
        return self.drafter.propose(state.drafter_state, inputs), noise

    def verify(
        self, cache: KVCache, state: DecodeState, tree: DraftTree, noise: Tensor | None
    ) -> tuple[DecodeState, DrafterUpdate, Tensor]:
        """Run the target over the tree, accept, compact. Writes: the cache, state.tokens."""
        slots, start, positions = self.place(state, tree)
        window = Window(slots, start, tree.mask)
        features = self.target(
            tree.tokens, positions, cache, window, self.run_part, self.aux_layers
        )
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
        """Accept a path, compact. Writes: the cache, state.tokens; the state, if in place.

        features: [B, N, F]
        """
        extra = None
        if self.accept_rule:
            accepted = self.accept_rule(tree, self.target.logits(features), noise, state, self)
        else:
            text = DecodedTokens(state.tokens, state.pos)
            rule = rule_of(self.rescorer, state, self.mode, text, tree)
            inputs = (self.target, features, rule, noise, tree.depths, tree.allowed)
            tokens, extra = self.pick_tokens(*inputs)
            accepted = self.backend.accept(tree, tokens, self.drafter.depth)
        if self.drafter.width > 1:  # the accepted nodes of a chain are in place already
            cache.compact(state.pos, accepted.moves, self.backend)
        new, update, report = advance(state, tree, accepted, features, self)
        update = replace_fields(update, tree=tree, path=accepted.path, extra=extra)
        return self.write_back(state, new), update, report

    def extend(self, state: DecodeState, update: DrafterUpdate) -> DecodeState:
        """Hand the confirmed tokens to the drafter. Writes: its cache; the state, if in place."""
        drafter_state = self.drafter.extend(state.drafter_state, update)
        return self.write_back(state, replace_fields(state, drafter_state=drafter_state))


def advance(
    state: DecodeState, tree: DraftTree, accepted: Accepted, features: Tensor, cycle: Cycle
) -> tuple[DecodeState, DrafterUpdate, Tensor]:
    """Cut at the end of sequence and at the limit, write the tokens, move the root.

    Writes: state.tokens. Returns: the state, the update without its tree, the packed report.
    """
    old = (state.tokens, state.pos, state.draws, state.done, state.limit)
    decided = (accepted.path, accepted.length, accepted.emitted)
    pos, draws, done, count, tokens, path_features, report = cycle.backend.advance(
        *old, tree.tokens, *decided, cycle.eos_tensor, features, REPORT
    )
    text = DecodedTokens(state.tokens, pos)
    new = replace_fields(state, pos=pos, draws=draws, done=done)
    return new, DrafterUpdate(tokens, path_features, count, text), report


# ------------------------------------------------------------------------------------------ prefill


def prefill_chunk(
    engine: Engine,
    cache: KVCache,
    state: DecodeState,
    mode: SamplingMode,
    start: Tensor,
    width: int,
    allowed: Tensor | None = None,
) -> tuple[DecodeState, Tensor]:
    """Run the target over `width` prompt tokens of every sequence; the drafter reads the features.

    mode: the highest `SamplingMode` of the sequences
    start: [B] int64, index of each sequence's first token in the chunk; short prompts are padded
    allowed: [B, 1, V] bool, the tokens that may be a root; None: all
    A sequence whose prompt ends in this chunk gets its root; the LM head reads one feature of it.
    Writes: both caches, state.tokens.
    Returns: the state, in which a sequence is done if nothing may follow its root; the features
        that the roots were chosen from, [B, 1, F].
    """
    start = torch.minimum(start, state.pos)
    count = (state.pos - start).clamp(max=width)  # [B], tokens that are no padding
    backend = engine.target.backend
    window = causal_window(start, width, backend=backend)
    # all but the last, which the next turn of the sequence runs again
    window = replace_fields(window, kept=(count - 1).clamp(min=0))
    tokens = state.tokens.gather(1, window.slots.clamp(max=state.tokens.shape[1] - 1))  # [B, T]
    features = engine.target(
        tokens, window.slots, cache, window, aux_layers=engine.drafter.aux_layers
    )
    last = (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    draw = torch.zeros_like(state.draws)[:, None]  # [B, 1]
    before = DecodedTokens(state.tokens, (state.pos - 1).clamp(min=0))  # the prompt alone
    rule = rule_of(engine.rescorer, state, mode, before, backend.root_tree(before))
    noise = None
    if rule is not None:
        vocab = engine.target.config.vocab_size
        noise = sampling.gumbel(rule, state.draws, 1, vocab, backend=backend)  # [B, 1, V]
    before_root = features.gather(1, last)  # [B, 1, F]
    inputs = (engine.target, before_root, rule, noise, draw, allowed)
    root, _ = engine.pick_tokens(*inputs)  # [B, 1]
    ends_here = (count > 0) & (start + count == state.pos)
    trash = state.tokens.shape[1] - 1
    state.tokens.scatter_(1, torch.where(ends_here, state.pos, trash)[:, None], root)
    span = (start[:, None] + torch.arange(width + 1, device=start.device)).clamp(max=trash)
    text = DecodedTokens(state.tokens, state.pos)
    tokens = state.tokens.gather(1, span)  # with the new roots
    update = DrafterUpdate(tokens, features, count, text, at_root=ends_here)
    at_end = (root == engine.cycles.eos_tensor).any(1) | (state.pos >= state.limit)
    done = torch.where(ends_here, at_end, state.done)
    drafter_state = engine.drafter.extend(state.drafter_state, update)
    draws = state.draws + ends_here
    state = replace_fields(state, draws=draws, done=done, drafter_state=drafter_state)
    return state, before_root
