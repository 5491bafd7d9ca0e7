"""Make an engine ready: capture its cycles on CUDA, compile them, and time its presets.

On a CPU an engine is ready when its weights are. On CUDA `warm_up` runs the cycles until they are
captured, and with --compile compiled. Progress is shown on a terminal. Where the compiler does not
work, a note says so, and the engine does without it.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from decode import PREFILL_WIDTHS, build_cycles
from files.io import StatusLine
from files.rank import this_rank
from options import load_part, log_note, one_line
from run.engine import Engine
from run.session import Session
from runtime import OPTIONS, WARM_UPS, copy_into

TIMED_BEHIND = 200  # tokens of prefix when cycles are timed, so that attention has work to do


def warm_up(engine: Engine) -> Engine:
    """Make the engine ready for its first prompt.

    On a CPU nothing is left to do. On CUDA the cycles run until they are captured, and with
    --compile compiled. Where that does not work, a note says so, and the engine does without it.
    """
    how = engine.option("compile")
    reason = why_not_compiled(engine.device) if how and engine.on_cuda else ""
    if reason:
        how = None
    chosen = engine.resolved | {"compile": how}
    if this_rank().world_size > 1:
        load_part("ranks", "check_same_on_all_ranks")(engine.config, **chosen)
    if reason:
        log_note(f"--compile does not work here ({reason}); running without it")
        return warm_up(build_cycles(replace(engine, resolved=chosen)))
    compile_s = 0.0
    if engine.captured:
        began = time.perf_counter()
        status = StatusLine()
        with status:
            for _ in range(1 + WARM_UPS):
                _prefill_each_width(engine)
                for number, preset in enumerate(engine.presets):
                    told = f"[compiling {number + 1} of {len(engine.presets)}: {preset.name}]"
                    status.show(told)
                    time_cycle(engine, number)
        compile_s = time.perf_counter() - began
    policy = engine.policy.on_engine_ready(engine, partial(time_cycle, engine))
    return replace(engine, compile_s=compile_s, policy=policy)


def _prefill_each_width(engine: Engine) -> None:
    """Decode one token after a prompt of every prefill width, in every sequence of the batch."""
    engine = replace(engine, config=replace(engine.config, max_new_tokens=1))
    for width in PREFILL_WIDTHS:
        prompt = [0] * min(width, engine.context - 1)
        with closing(Session(engine)) as session:
            for _ in session.decode_turn([prompt] * engine.config.batch_size):
                pass


class CycleTimes(NamedTuple):
    """Seconds of a cycle, and of its steps."""

    seconds: float
    draft_s: float
    verify_s: float


def time_cycle(engine: Engine, preset: int, sequences: int = 0) -> CycleTimes:
    """Time cycles of a preset, with sequences that decode after `TIMED_BEHIND` tokens.

    sequences: 0: as many as the engine has
    Returns: the least of each time. Slow cycles run less often.
    """
    with closing(Session(engine)) as session:
        state = session.state
        state.pos.fill_(min(TIMED_BEHIND, engine.context // 2))
        state.limit.fill_(engine.context - 1)
        state.done.fill_(False)
        states = session.buffers.cache.states
        for recurrent, _ in states.recurrent() if states else ():
            recurrent.length.copy_(state.pos)  # as if they were behind the prefix, too
        rewound = engine.drafter.rewind(state.drafter_state, state.pos)
        copy_into(state.drafter_state, rewound)
        for seq in range(sequences or engine.batch_size):
            session.live[seq] = True
        began = time.perf_counter()
        times = []
        first = WARM_UPS if engine.captured else 0  # cycles that do not count
        while len(times) <= first or (len(times) < 6 and time.perf_counter() - began < 0.1):
            result = session.time_cycle(preset)
            drafted = (result.times["drafted"] - result.times["began"]) / 1e9
            verified = (result.times["verified"] - result.times["drafted"]) / 1e9
            times.append(CycleTimes(result.seconds, drafted, verified))
        return CycleTimes(*map(min, zip(*times[first:])))


def why_not_compiled(device: torch.device) -> str:
    """Try the compiler on a small step. Returns: the reason why it does not work, or ""."""
    try:
        torch.compile(_probe, fullgraph=True, options=OPTIONS)(torch.ones(2, device=device))
    except Exception as error:  # a missing or broken compiler may raise anything
        return one_line(error, 120)
    return ""


def _probe(x: Tensor) -> Tensor:
    return x * 2 + 1
