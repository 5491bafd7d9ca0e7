"""Attribute the time of a decode cycle to its parts, from a profile of a few dozen cycles.

    python scripts/bench/profile_cycle.py --compile --tree chain --tree_depth 5
    python scripts/bench/profile_cycle.py --compile --inflate tiny-0.5b --quant int4 --json out.json

Takes every option of generate.py that says what is decoded and how; decodes the first prompt only.

1. The same cycles run in turn without and with the profiler, round after round. The wall time of a
   cycle is the median over all cycles without it. The time of an operator is a median, too.
2. The outermost operators and compiled kernels of a cycle are attributed by their names, products
   by their step: those of `verify` are the target's, the others the drafter's. A compiled kernel
   fuses several operators; the first rule of `COMPILED` decides. In eager code noise and tree look
   alike.
3. The rest of the wall time is Python and dispatch: the loop on the host, and operators' wrappers.
   The profiler's own cost per operator (about a microsecond) counts as the operator's.
4. On CUDA the lines are kernels, and the rest of the wall time is idle. The number of kernels per
   cycle and the gaps between them follow. Set EAGLE_PDL=0: with dependent launch kernels overlap.

`look_closer` lists the kernels of a single cycle in their order, and repeats it, for papers.py.
Not here: speed (papers.py); `generate.py --profile FILE` writes the same trace for a viewer.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import Engine
from files import write_text
from generate import first_ids, load
from options import DEMO, GenerateConfig
from prompts import read_prompts
from runtime import WARM_UPS, tensors_of
from scripts.bench.measure import Series, draft_options, environment, shown_path
from session import Session

LOOK = "one cycle of "  # begins the lines that sum up `look_closer`
DUMMIES = 20  # kernels
CYCLE = "profile_cycle"  # name of a cycle in the trace
STEP = "profile_step "  # before the name of a step in the trace
TARGET = "products of the target"
DRAFT = "products of the drafter"
PRODUCTS = "products"
PYTHON = "Python and dispatch"
IDLE = "no kernel runs"
CHOICE = "choice, acceptance, compaction"
TREE = "building the tree"
LAYERS = "norms, rotary, SiLU, cache writes"
VOCABULARY = "top-k and logsumexp of the vocabulary"
NOISE = "noise"
OTHER = "other operators"
# patterns of names, the first that matches decides: of operators and of handwritten kernels ...
OPERATORS = {
    "attention": r"attention|flash",
    PRODUCTS: r"::(mm|addmm|matmul|\w*linear\w*)$|mkldnn|w[48]a(8|16)|int[48]pack_mm|gemm|gemv"
    r"|cutlass|nvjet|splitK|matmul_kernel|_product|sum_kernel|experts_|lists_kernel",
    VOCABULARY: r"topk|logsumexp|grow_level|next_level|(block|row|level)_kernel",
    LAYERS: r"rotary|angles|silu|rms_norm|add_norm|add_unscaled|gpt_eagle::(add|norm|route|merge)$"
    r"|rsqrt|embedding",
    CHOICE: r"gpt_eagle::(best|cut|accept|advance)$|argmax|index_put|(move|keep)_rows"
    r"|compact_kernel",
    TREE: r"sort|::bmm|gather|scatter|best_nodes|relate|rerank|lookup|add_chains",
    NOISE: r"gumbel|log1p|bitwise_xor",
    OTHER: r"",
}
# ... and of compiled kernels, whose names hold all fused operators and those that take the results
COMPILED = {
    NOISE: r"log1p|bitwise_xor",
    VOCABULARY: r"logsumexp|topk|grow_level",
    LAYERS: r"rsqrt|silu|cos_|embedding",
    CHOICE: r"argmax|index_put",
    TREE: r"sort|gather|scatter|eye|floor_divide|bmm|gt_sub_sum|best_nodes|relate",
    OTHER: r"",
}
LINES = (TARGET, DRAFT, PRODUCTS, "attention", VOCABULARY, LAYERS, CHOICE, TREE, NOISE, OTHER)
# events that only wrap others: their own time is Python
WRAPPERS = r"gpt_eagle::(model|head_step|head_extend)$"


@dataclass(frozen=True)
class ProfileConfig(GenerateConfig):
    """Options of decoding and profiling."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the target model")
    cycles: int = option(32, "decode cycles per round", least=1)
    rounds: int = option(5, "times that these cycles run without and with the profiler", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)

    def check(self) -> None:
        """Check the options. Raises: ValueError for a combination that cannot work."""
        super().check()
        for name in ("compare", "interactive", "trace", "profile"):
            if getattr(self, name):
                raise ValueError(f"--{name} does nothing here; drop it, or run generate.py")


# ------------------------------------------------------------------------------------------- cycles


class Round(NamedTuple):
    """The cycles of a round."""

    wall_s: list[float]  # of every cycle
    tokens: int
    profiler: Any = None


def run_cycles(engine: Engine, ids: list[int], cycles: int, profiler: Any = None) -> Round:
    """Decode some cycles behind a prompt, the same for all sequences, in a session of its own."""
    cuda = engine.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    _, decoding = decode_prompt(engine, ids)
    wait()
    with profiler or nullcontext():
        if profiler and cuda:
            run_dummies()
        marks = [time.perf_counter()]
        tokens = 0
        for _ in range(cycles):
            with record_function(CYCLE):
                tokens += sum(map(len, next(decoding)))
            marks.append(time.perf_counter())
        wait()
    return Round([end - begin for begin, end in itertools.pairwise(marks)], tokens, profiler)


def decode_prompt(engine: Engine, ids: list[int]) -> tuple[Session, Iterator[list[list[int]]]]:
    """Cache a prompt in every sequence of a new session. Returns: session; its decoding."""
    batch = engine.config.batch_size
    session = Session(engine, [(0, sample) for sample in range(batch)])
    decoding = session.decode_turn([ids] * batch)
    next(decoding)
    while session.prefilling:  # chunks of the prompt
        next(decoding)
    return session, decoding


def rounds(engine: Engine, ids: list[int], config: ProfileConfig) -> Iterator[tuple[Round, Round]]:
    """Run the same cycles without and with the profiler, in turn.

    Raises: ValueError when the context is too short.
    """
    longest = config.cycles * (engine.drafter.depth + 1)
    if len(ids) + longest > engine.context:
        raise ValueError(
            f"--cycles {config.cycles} may decode {longest} tokens behind a prompt of {len(ids)}, "
            f"the context holds {engine.context}; lower --cycles or --tree_depth"
        )
    options = replace(engine.config, max_new_tokens=longest + 1, ignore_eos=True)
    plain = replace(engine, config=options)
    named = with_named_steps(plain)
    for _ in tqdm(range(config.rounds), unit="round"):
        without = run_cycles(plain, ids, config.cycles)
        yield without, run_cycles(named, ids, config.cycles, profiler_of(config.device))


# ------------------------------------------------------------------------------------------- shares


def part_of(name: str, step: str) -> str:
    """Return the line of the table for an operator or kernel. step: the one it runs in, or "" """
    rules = COMPILED if re.search(r"triton\w*_fused_", name) else OPERATORS
    part = next(part for part, names in rules.items() if re.search(names, name))
    if part == PRODUCTS and step:
        return TARGET if step == "verify" else DRAFT
    return part


def outermost(event: Any) -> Iterator[Any]:
    """Yield the operators below an event; steps and wrappers are replaced by their content."""
    for child in event.cpu_children:
        if child.name.startswith(STEP) or re.search(WRAPPERS, child.name):
            yield from outermost(child)
        else:
            yield child


def step_of(event: Any) -> str:
    """Return the step that an event belongs to, or ""."""
    while event is not None and not event.name.startswith(STEP):
        event = event.cpu_parent
    return event.name.removeprefix(STEP) if event is not None else ""


def with_named_steps(engine: Engine) -> Engine:
    """Return the engine with cycles that name their steps in a trace."""

    def named(name: str, step: Callable) -> Callable:
        def run(*inputs: Any) -> Any:
            with record_function(STEP + name):
                return step(*inputs)

        return run

    cycles = [tuple(map(copy, of_kind)) for of_kind in engine.cycles]
    for cycle in itertools.chain(*cycles):
        for name in ("draft", "verify", "extend"):
            setattr(cycle, name, named(name, getattr(cycle, name)))
    return replace(engine, cycles=tuple(cycles), buffer_pool=[])


def cycles_of(events: Iterable[Any]) -> list[Any]:
    """Return the outermost events of cycles."""
    return [event for event in events if event.name == CYCLE and event.cpu_parent is None]


def host_parts(events: Iterable[Any]) -> dict[str, float]:
    """Return the seconds per cycle of the operators by line.

    Every cycle runs the same operators. Each counts with its median over the cycles, so that one
    interruption has no effect.
    """
    # by line, name, and number among those of that name
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    cycles = cycles_of(events)
    for cycle in cycles:
        met: Counter = Counter()
        for child in outermost(cycle):
            name = child.name
            line = part_of(name, step_of(child))
            seconds[line, name, met[line, name]].append(child.time_range.elapsed_us() / 1e6)
            met[line, name] += 1
    total: dict[str, float] = defaultdict(float)
    for (line, _, _), values in seconds.items():
        total[line] += statistics.median(values) * len(values) / len(cycles)
    return dict(total)


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
        found = [e for e in kernels if not e.name.startswith((CYCLE, STEP))]
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


class Kernels(NamedTuple):
    """The device's side of some cycles."""

    parts: dict[str, float]  # seconds by line
    count: int
    busy_s: float  # at least one kernel runs
    gaps_s: list[float]  # between kernels


def device_kernels(events: Iterable[Any]) -> Kernels:
    """Summarize the kernels of a trace."""
    ran = spans(events, "cuda")
    parts: dict[str, float] = defaultdict(float)
    for name, us, _ in ran:
        parts[part_of(name, "")] += us / 1e6
    gaps = [gap / 1e6 for _, _, gap in ran if gap > 0]
    return Kernels(dict(parts), len(ran), busy_us(ran) / 1e6, gaps)


def busy_us(ran: list[Span]) -> float:
    """Return how long at least one of the kernels ran."""
    return sum(max(0.0, us + min(gap, 0.0)) for _, us, gap in ran)


def warm_session(engine: Engine, ids: list[int]) -> tuple[Session, int]:
    """Cache a prompt and run cycles until they are warm. Returns: the session, its preset."""
    session, _ = decode_prompt(engine, ids)
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


def summary(pairs: list[tuple[Round, Round]], config: ProfileConfig) -> dict[str, Any]:
    """Return medians in milliseconds per cycle; the parts add up to the wall time."""
    profiles = [seen.profiler.events() for _, seen in pairs]
    wall = Series.quartiles([second for plain, _ in pairs for second in plain.wall_s])
    profiled = statistics.median(second for _, seen in pairs for second in seen.wall_s)
    per_round = [host_parts(event for events in profiles for event in events)]
    device = []
    if config.device.startswith("cuda"):
        device = [device_kernels(events) for events in profiles]
        per_round = [{k: v / config.cycles for k, v in x.parts.items()} for x in device]
    parts = {}
    for line in LINES:
        ms = 1e3 * statistics.median(each.get(line, 0.0) for each in per_round)
        if ms > 0:
            parts[line] = ms
    parts[IDLE if device else PYTHON] = 1e3 * wall.median - sum(parts.values())
    found = {
        "wall_ms": [1e3 * x for x in wall],
        "profiled_wall_ms": 1e3 * profiled,
        "parts_ms": parts,
        "tokens_per_cycle": pairs[0][0].tokens / config.cycles,
    }
    if device:
        gaps = [gap for kernels in device for gap in kernels.gaps_s]
        busy = statistics.median(kernels.busy_s for kernels in device)
        found["kernels"] = {
            "per_cycle": statistics.median(kernels.count for kernels in device) / config.cycles,
            "busy_ms": 1e3 * busy / config.cycles,
            "gaps_ms": 1e3 * sum(gaps) / len(device) / config.cycles,
            "median_gap_us": 1e6 * statistics.median(gaps or [0.0]),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the summary as text."""
    wall, low, high = found["wall_ms"]
    lines = ["| part of a cycle | ms | % |", "|---|---|---|"]
    lines += [
        f"| {part} | {ms:.3f} | {100 * ms / wall:.1f} |" for part, ms in found["parts_ms"].items()
    ]
    lines += [
        f"| cycle | {wall:.3f} | 100.0 |",
        "",
        f"wall time of a cycle: median {wall:.3f} ms ({low:.3f}-{high:.3f}), "
        f"{found['profiled_wall_ms']:.3f} while profiled; "
        f"{found['tokens_per_cycle']:.2f} tokens per cycle",
    ]
    if "kernels" in found:
        k = found["kernels"]
        lines.append(
            f"kernels per cycle: {k['per_cycle']:.0f}, busy {k['busy_ms']:.3f} ms, "
            f"gaps {k['gaps_ms']:.3f} ms, median gap {k['median_gap_us']:.1f} us"
        )
    return "\n".join(lines)


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


# --------------------------------------------------------------------------------------------- main


def run(config: ProfileConfig) -> None:
    """Profile and print."""
    config.check()
    if config.threads:
        torch.set_num_threads(config.threads)
    prompt = read_prompts(config)[0]
    engine = load(config)
    chosen = {each.name: engine.option(each.name) for each in fields(engine.config)}
    config = replace(engine.config, **chosen)
    ids = first_ids(engine, prompt)
    found = summary(list(rounds(engine, ids, config)), config)
    machine = environment(config.device)
    drafter = draft_options(engine)
    shown = ", ".join(
        f"{key} {value}" for key, value in ({"draft": config.draft} | drafter).items()
    )
    print(
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        f"{config.dtype}, quant {config.quant}, T = {config.temperature}, "
        f"B = {config.batch_size}, {shown}",
        table(found),
        sep="\n\n",
        file=sys.stderr if config.json == "-" else sys.stdout,
    )
    if config.json:
        ran = asdict(config) | {"context": engine.context} | drafter
        for name in ("checkpoint", "head", "draft_checkpoint", "json"):
            ran[name] = shown_path(ran[name])
        write_text(config.json, json.dumps(found | {"config": ran, "environment": machine}))


def main() -> None:
    """Run the command line."""
    config = parse(ProfileConfig, "profile_cycle.py", __doc__)
    with one_line_errors("profile_cycle.py"):
        run(config)


if __name__ == "__main__":
    main()
