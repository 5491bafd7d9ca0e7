"""List the kernels of one decode cycle, and check that repeated cycles agree, for papers.py.

    python scripts/bench/papers.py --compile --profile --replays 1000 ...

1. A prompt is cached and cycles run until they are warm. Then the profiler records two cycles,
   which must have the same kernels. On a CPU the outermost operators stand for kernels.
2. The table has one row per kernel's name, the longest in all first. Behind it all kernels stand in
   their order, each with the gap before it.
3. `--replays` repeats a cycle from one state: every result must have the same bits.

Not here: speed (papers.py); a trace of whole runs for a viewer (`generate.py --set profile=FILE`).
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from decode import Engine
from runtime import WARM_UPS, tensors_of
from session import Session

LOOK = "one cycle of "  # begins the lines that sum up `look_closer`
DUMMIES = 20  # kernels
CYCLE = "profile_cycle"  # name of a cycle in the trace
# events that only wrap others
WRAPPERS = r"gpt_eagle::(model|head_step|head_extend)$"


def outermost(event: Any) -> Iterator[Any]:
    """Yield the operators below an event; wrappers are replaced by their content."""
    for child in event.cpu_children:
        if re.search(WRAPPERS, child.name):
            yield from outermost(child)
        else:
            yield child


def cycles_of(events: Iterable[Any]) -> list[Any]:
    """Return the outermost events of cycles."""
    return [event for event in events if event.name == CYCLE and event.cpu_parent is None]


class Span(NamedTuple):
    """A kernel that ran; on a CPU an operator."""

    name: str
    us: float
    gap_us: float  # since all before it had ended; below 0 when it began earlier


def spans(events: Iterable[Any], device: str) -> list[Span]:
    """Return the kernels of a trace in order; on a CPU the outermost operators of its cycles.

    Kernels count from the first cycle's begin on, and until a second behind the last one: those of
    `run_dummies` do not, nor do records whose times are from another clock.
    """
    events = list(events)
    cycles = cycles_of(events)
    if device.startswith("cuda"):
        kind = torch.autograd.DeviceType.CUDA
        begin = min(cycle.time_range.start for cycle in cycles)
        end = max(cycle.time_range.end for cycle in cycles) + 1e6  # us
        inside = [e for e in events if begin <= e.time_range.start <= end]
        kernels = [e for e in inside if e.device_type == kind]
        found = [e for e in kernels if not e.name.startswith(CYCLE)]
    else:
        found = [child for cycle in cycles for child in outermost(cycle)]
    times = sorted((e.time_range.start, e.time_range.end, e.name) for e in found)
    ran = []
    until = times[0][0] if times else 0
    for start, end, name in times:
        gap = start - until if ran else 0.0
        ran.append(Span(name, end - start, gap))
        until = max(until, end)
    return ran


def busy_us(ran: list[Span]) -> float:
    """Return how long at least one of the kernels ran."""
    return sum(max(0.0, us + min(gap, 0.0)) for _, us, gap in ran)


def warm_session(engine: Engine, ids: list[int]) -> tuple[Session, int]:
    """Cache a prompt and run cycles until they are warm. Returns: the session, its preset."""
    batch = engine.config.batch_size
    session = Session(engine, [(0, sample) for sample in range(batch)])
    decoding = session.decode_turn([ids] * batch)
    next(decoding)
    while session.prefilling:  # chunks of the prompt
        next(decoding)
    preset = session.policy.next_preset(session, reads_prompt=False)
    for _ in range(1 + WARM_UPS):
        session.time_cycle(preset)
    return session, preset


def profiler_of(device: str) -> profile:
    """Return a profiler of the host, which knows where cycles begin, and of a GPU."""
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def run_dummies() -> None:
    """Run kernels whose records may be lost, at the begin of a profile.

    In the k-th profile of a process the first k records are lost or have times of another clock
    (pytorch 192021, 175790).
    """
    x = torch.zeros(1, device="cuda")
    for _ in range(DUMMIES):
        x.add_(1)
    torch.cuda.synchronize()


def one_replay(engine: Engine, ids: list[int]) -> list[Span]:
    """Profile one cycle behind a prompt, warm, and captured where cycles are.

    Returns: its kernels, the copy to the host included. Two cycles must have the same ones, or
    records were lost.
    """
    cuda = engine.device.type == "cuda"
    session, preset = warm_session(engine, ids)
    with profiler_of(engine.device.type) as seen:
        if cuda:
            run_dummies()
        for _ in range(2):
            with record_function(CYCLE):
                session.time_cycle(preset)
            if cuda:
                torch.cuda.synchronize()
    ran = spans(seen.events(), engine.device.type)
    count = len(ran) // 2
    names = [span.name for span in ran]
    text = f"the profiler lost records, or two cycles differ: {len(ran)} kernels"
    assert ran and names[:count] == names[count:], text
    return [ran[count]._replace(gap_us=0.0), *ran[count + 1 :]]


def replay_table(ran: list[Span]) -> str:
    """Return the kernels by name, the longest in all first, and then one by one in their order."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in ran:
        by_name[span.name].append(span)
    lines = [
        "| kernel | times | us in all | median us | us before it in all |",
        "|---|---|---|---|---|",
    ]
    for name, found in sorted(by_name.items(), key=lambda item: -sum(span.us for span in item[1])):
        us = [span.us for span in found]
        before = sum(span.gap_us for span in found)
        median = statistics.median(us)
        lines.append(f"| {name[:80]} | {len(us)} | {sum(us):.1f} | {median:.2f} | {before:.1f} |")
    each = [f"{gap:8.2f} {us:8.2f}  {name[:120]}" for name, us, gap in ran]
    return "\n".join([*lines, "", "in order: us before it, us, kernel", *each])


def different_replays(engine: Engine, ids: list[int], replays: int) -> int:
    """Repeat a cycle from one state. Returns: how many results differ from the first in any bit."""
    session, preset = warm_session(engine, ids)
    saved = [x.clone() for x in tensors_of(session.state)]
    first = [x.clone() for x in _replay(session, preset, saved)]
    different = torch.zeros((), dtype=torch.long, device=session.state.pos.device)
    for _ in range(replays):
        state = _replay(session, preset, saved)
        different += ~torch.stack([(x == y).all() for x, y in zip(state, first)]).all()
    return int(different)


def _replay(session: Session, preset: int, saved: list[Tensor]) -> list[Tensor]:
    """Run a cycle from a saved state. Returns: the new state."""
    for buffer, value in zip(tensors_of(session.state), saved):
        buffer.copy_(value)
    session.time_cycle(preset)
    return tensors_of(session.state)


def look_closer(name: str, engine: Engine, ids: list[int], kernels: bool, replays: int) -> None:
    """Print the kernels of a cycle behind a prompt, and compare repeated cycles.

    A cycle that depends on more than its state is an error.
    """
    if kernels:
        ran = one_replay(engine, ids)
        gaps_us = sum(span.gap_us for span in ran if span.gap_us > 0)
        print(f"\n{replay_table(ran)}\n")
        print(
            f"{LOOK}{name}: {len(ran)} kernels, {busy_us(ran):.0f} us and {gaps_us:.0f} us between",
            flush=True,
        )
    if replays:
        different = different_replays(engine, ids, replays)
        text = f"{different} of {replays} replays differ"
        print(f"{LOOK}{name}: {text}", flush=True)
        assert not different, text
