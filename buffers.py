"""The memory of B sequences, and the steps over it that outlive a session.

Captured cycles need fixed addresses, so buffers stay with the engine when a session ends. With
--compile on CUDA every step is captured once and replayed; elsewhere it is called.
Trade-off: prefill is bound by matrix products and not compiled; captured, it has two widths.
Not here: the host that reads the results (session.py), the steps themselves (decode.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decode import PREFILL_CHUNK, Cycle, DecodeState, Engine, Outcome, prefill_chunk
from draft_tree import Text
from drafters import Drafter
from kv_cache import KVCache
from ops.library import single_torch_thread
from options import Sampling
from runtime import Replay, copy_into, sequence_of
from sampling import Kind, NoiseKey, Rule
from stats import sequence_memory

PREFILL_WIDTHS = (64, PREFILL_CHUNK)  # captured prefill passes are padded to one of these


class Buffers:
    """KV cache, state and captured steps of B sequences; `engine.pool` keeps them."""

    def __init__(self, engine: Engine):
        """Allocate. Raises: ValueError when memory does not suffice."""
        sequence_memory(engine)
        batch = engine.config.batch_size
        weight = engine.target.norm.weight
        device = weight.device
        config = engine.target.config
        self.cache = KVCache.empty(config, batch, engine.slots, weight.dtype, str(device))
        number = torch.zeros(batch, dtype=torch.long, device=device)
        self.state = DecodeState(
            tokens=torch.zeros(batch, engine.context + 1, dtype=torch.long, device=device),
            pos=number,
            draws=number.clone(),
            done=number == 0,
            limit=number.clone(),
            key=NoiseKey(number.new_zeros(batch, 2), number.clone(), number.clone(), number.bool()),
            rule=Rule.of([Sampling()] * batch, device),
            drafter_state=engine.drafter.init(batch, engine.slots),
        )
        self.start = number[:1].clone()  # of a prefill chunk
        # [B, 1, F], the features that each root was chosen from
        self.before_roots = weight.new_zeros(batch, 1, engine.target.config.dim)
        self.deferred_cycles = 0  # cycles since the drafter caught up
        self.replays: dict[Any, Replay] = {}  # of cycles by kind and preset; of other steps
        self.scratch: dict[str, Any] = {}  # memory that captured prefills share

    def reset(self, engine: Engine, key: NoiseKey) -> None:
        """Make every sequence idle and empty. Writes: the state in place."""
        zeros = torch.zeros_like(self.state.pos)
        self.state.tokens.zero_()
        drafter_state = engine.drafter.rewind(self.state.drafter_state, zeros)
        done = zeros == 0
        rule = Rule.of([engine.config.sampling] * len(zeros), zeros.device)
        empty = DecodeState(self.state.tokens, zeros, zeros, done, zeros, key, rule, drafter_state)
        copy_into(self.state, empty)
        self.deferred_cycles = 0

    def prefill(
        self,
        engine: Engine,
        kind: Kind,
        seq: int,
        start: int,
        width: int,
        allowed: Tensor | None = None,
    ) -> None:
        """Run `prefill_chunk` for one sequence alone. Writes: its part of the buffers, in place."""
        if allowed is not None:
            engine = replace(engine, captured=False)
        if engine.captured:  # without a graph the host would be slower than a GPU
            width = next(w for w in PREFILL_WIDTHS if w >= width)
        self.start.fill_(start)
        preset = engine.tree_policy.prefill_tree
        self.catch_up(engine, preset)

        def body() -> None:
            state = sequence_of(self.state, seq)
            own = replace(engine, drafter=engine.drafter.presets[preset])
            cache = self.cache.sequence(seq)
            new, features = prefill_chunk(own, cache, state, kind, self.start, width, allowed)
            copy_into(state, new)
            self.before_roots[seq].copy_(features[0, :, : self.before_roots.shape[2]])

        self._replay(engine, ("prefill", width, seq, preset, kind), body)

    def catch_up(self, engine: Engine, preset: int) -> None:
        """Before a step: let the drafter catch up, if the preset may defer no more tokens.

        Writes: the drafter's state.
        """
        drafter = engine.drafter.presets[preset]
        due = self.deferred_cycles >= drafter.max_deferred and not drafter.may_skip
        if self.deferred_cycles and due:
            drafter_state = self.state.drafter_state
            text = Text(self.state.tokens, self.state.pos)

            def body() -> None:
                copy_into(drafter_state, engine.drafter.catch_up(drafter_state, text))

            self._replay(engine, "catch up", body)
            self.deferred_cycles = 0
        if drafter.max_deferred:
            self.deferred_cycles += 1

    def replay(self, engine: Engine, kind: Kind, preset: int) -> Outcome:
        """Run a cycle over these buffers, in place where cycles are captured."""

        def body() -> Outcome:
            state, outcome = engine.cycles[kind][preset](self.cache, self.state)
            copy_into(self.state, state)
            return outcome

        return self._replay(engine, (kind, preset), body)

    def guided(self, engine: Engine, kind: Kind, drafter: Drafter) -> Outcome:
        """Run a cycle of a drafter under grammars, in place.

        It is never captured: the host reads its tree, and makes the masks.
        """
        with single_torch_thread(engine.target.fused is not None):
            state, outcome = Cycle(engine, drafter, kind)(self.cache, self.state)
        copy_into(self.state, state)
        return outcome

    def _replay(self, engine: Engine, key: Any, body: Callable[[], Any]) -> Any:
        if not engine.captured:
            with single_torch_thread(engine.target.fused is not None):
                return body()
        if key not in self.replays:
            self.replays[key] = Replay(body, self.state.pos.device, self.scratch)
        return self.replays[key]()
