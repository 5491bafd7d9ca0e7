"""Where the time of a decode cycle goes: a table of milliseconds and shares, from a profile of a few dozen cycles.

    python scripts/bench/profile_cycle.py --compile --tree chain --tree_depth 5
    python scripts/bench/profile_cycle.py --compile --inflate tiny-0.5b --dtype bfloat16 --quant int4 --json where.json

Takes every option of generate.py that says what is decoded and how; of several prompts it decodes the first.

How it works:
1. The same cycles run in turn without and with the profiler, round after round. The wall time of a cycle is that of the
   rounds without it, the median over all cycles; so is the time of every operator.
2. The outermost operators and compiled kernels of a cycle are attributed by their names, and products by the step
   they run in: those of `verify` are the target's, the others the drafter's. A compiled kernel fuses several operators
   and counts where the first rule says (`COMPILED`). In eager code little tells noise and tree apart.
3. What is left of the wall time is Python and dispatch: the loop on the host, and what wraps operators. The profiler's
   own cost per operator (a microsecond or so) counts as the operator's.
4. On CUDA the lines are kernels, the rest of the wall time is idle: kernels per cycle and the gaps between them follow.

`one_replay` lists the kernels of a single cycle in their order, for trees.py.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import Engine
from files import write_text
from generate import first_ids, load
from options import DEMO, GenerateConfig
from prompts import read_prompts
from runtime import WARM_UPS
from scripts.bench.measure import Series, environment, shown_path
from session import Session

CYCLE, STEP = "profile_cycle", "profile_step "  # a cycle and, before its name, a step in the trace
TARGET, DRAFT, PRODUCTS = "products of the target", "products of the drafter", "products"
PYTHON, IDLE = "Python and dispatch", "no kernel runs"
CHOICE, TREE, LAYERS = (
    "choice, acceptance, compaction",
    "building the tree",
    "norms, rotary, SiLU, cache writes",
)
VOCABULARY, NOISE, OTHER = "top-k and logsumexp of the vocabulary", "noise", "other operators"
# patterns of names, the first that matches decides: of operators and of kernels that somebody wrote ...
OPERATORS = {
    "attention": r"attention|flash",
    PRODUCTS: r"::(mm|addmm|matmul|\w*linear\w*)$|mkldnn|w[48]a(8|16)|int[48]pack_mm|gemm|gemv|cutlass|nvjet|splitK"
    r"|matmul_kernel|sum_kernel|experts_|lists_kernel",
    VOCABULARY: r"topk|logsumexp|grow_level|next_level|(block|row|level)_kernel",
    LAYERS: r"rotary|angles|silu|rms_norm|add_norm|gpt_eagle::(add|norm|route|merge)$|rsqrt|embedding",
    CHOICE: r"gpt_eagle::(best|cut|accept|advance)$|argmax|index_put|(move|keep)_rows|compact_kernel",
    TREE: r"sort|::bmm|gather|scatter|best_nodes|relate|rerank|lookup|add_chains",
    NOISE: r"gumbel|log1p|bitwise_xor",
    OTHER: r"",
}
# ... and of compiled kernels, which are named after everything they fuse, and after what takes their results
COMPILED = {
    NOISE: r"log1p|bitwise_xor",
    VOCABULARY: r"logsumexp|topk|grow_level",
    LAYERS: r"rsqrt|silu|cos_|embedding",
    CHOICE: r"argmax|index_put",
    TREE: r"sort|gather|scatter|eye|floor_divide|bmm|gt_sub_sum|best_nodes|relate",
    OTHER: r"",
}
LINES = (TARGET, DRAFT, PRODUCTS, "attention", VOCABULARY, LAYERS, CHOICE, TREE, NOISE, OTHER)
# events that only wrap others: what they spend themselves is Python
WRAPPERS = r"gpt_eagle::(model|head_step|head_extend)$"


@dataclass(frozen=True)
class ProfileConfig(GenerateConfig):
    """What to decode, and how long."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the target model")
    cycles: int = option(32, "decode cycles per round", least=1)
    rounds: int = option(5, "times that these cycles run without and with the profiler", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default")

    def check(self) -> None:
        """Raises: ValueError for a value or a combination that cannot work."""
        super().check()
        for name in ("compare", "interactive", "trace", "profile"):
            if getattr(self, name):
                raise ValueError(f"--{name} does nothing here; drop it, or run generate.py")


# ---------------------------------------------------------------------------------------------- cycles


class Round(NamedTuple):
    """The cycles of a round."""

    wall_s: list[float]  # of every cycle
    tokens: int
    profiler: Any = None


def run_cycles(engine: Engine, ids: list[int], cycles: int, profiler: Any = None) -> Round:
    """Decode so many cycles behind a prompt, in a session of its own whose rows all have that prompt."""
    wait = torch.cuda.synchronize if engine.config.device.startswith("cuda") else lambda: None
    batch = engine.config.batch_size
    session = Session(engine, [(0, sample) for sample in range(batch)])
    decoded = session.run([ids] * batch)
    next(decoded)
    while session.waiting:  # chunks of the prompt
        next(decoded)
    wait()
    with profiler or nullcontext():
        marks, tokens = [time.perf_counter()], 0
        for _ in range(cycles):
            with record_function(CYCLE):
                tokens += sum(map(len, next(decoded)))
            marks.append(time.perf_counter())
        wait()
    return Round([end - begin for begin, end in itertools.pairwise(marks)], tokens, profiler)


def rounds(engine: Engine, ids: list[int], config: ProfileConfig) -> Iterator[tuple[Round, Round]]:
    """The same cycles without and with the profiler, in turn. Raises: ValueError when the context is too short."""
    longest = config.cycles * (engine.drafter.depth + 1)
    if len(ids) + longest > engine.context:
        raise ValueError(
            f"--cycles {config.cycles} may decode {longest} tokens behind a prompt of {len(ids)}, the context holds "
            f"{engine.context}; lower --cycles or --tree_depth"
        )
    plain = replace(
        engine, config=replace(engine.config, max_new_tokens=longest + 1, ignore_eos=True)
    )
    named = with_named_steps(plain)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * config.device.startswith("cuda")
    for _ in tqdm(range(config.rounds), unit="round"):
        yield (
            run_cycles(plain, ids, config.cycles),
            run_cycles(named, ids, config.cycles, profile(activities=activities)),
        )


# ---------------------------------------------------------------------------------------------- shares


def part_of(name: str, step: str) -> str:
    """The line of the table that an operator or kernel belongs to. step: the one it runs in, or ""."""
    rules = COMPILED if re.search(r"triton\w*_fused_", name) else OPERATORS
    part = next(part for part, names in rules.items() if re.search(names, name))
    if part == PRODUCTS and step:
        return TARGET if step == "verify" else DRAFT
    return part


def outermost(event: Any) -> Iterator[Any]:
    """The operators below an event; those inside of steps and wrappers in their place."""
    for child in event.cpu_children:
        if child.name.startswith(STEP) or re.search(WRAPPERS, child.name):
            yield from outermost(child)
        else:
            yield child


def step_of(event: Any) -> str:
    """The step that an event belongs to, or ""."""
    while event is not None and not event.name.startswith(STEP):
        event = event.cpu_parent
    return event.name.removeprefix(STEP) if event is not None else ""


def with_named_steps(engine: Engine) -> Engine:
    """The engine with cycles that name their steps in a trace."""

    def named(name: str, step: Callable) -> Callable:
        def run(*inputs: Any) -> Any:
            with record_function(STEP + name):
                return step(*inputs)

        return run

    cycles = [copy(cycle) for cycle in engine.cycles]
    for cycle in cycles:
        for name in ("draft", "verify", "extend"):
            setattr(cycle, name, named(name, getattr(cycle, name)))
    return replace(engine, cycles=tuple(cycles), pool=[])


def host_parts(events: Iterable[Any]) -> dict[str, float]:
    """Seconds per cycle of the operators by line.

    Every cycle runs the same operators; of each the median over the cycles counts, so that one interrupted stays one.
    """
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(
        list
    )  # line, name, which of that name
    cycles = [event for event in events if event.name == CYCLE and event.cpu_parent is None]
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
    """The kernels among the events of a trace, by their beginning; on a CPU the outermost operators of its cycles."""
    events = list(events)
    if device.startswith("cuda"):
        kind = torch.autograd.DeviceType.CUDA
        found = [e for e in events if e.device_type == kind and not e.name.startswith(CYCLE)]
    else:
        cycles = [event for event in events if event.name == CYCLE and event.cpu_parent is None]
        found = [child for cycle in cycles for child in outermost(cycle)]
    ran, until = [], None
    for start, end, name in sorted((e.time_range.start, e.time_range.end, e.name) for e in found):
        ran.append(Span(name, end - start, 0.0 if until is None else start - until))
        until = end if until is None else max(until, end)
    return ran


class Kernels(NamedTuple):
    """The device's side of some cycles."""

    parts: dict[str, float]  # seconds by line
    count: int
    busy_s: float  # at least one kernel runs
    gaps_s: list[float]  # between kernels


def device_kernels(events: Iterable[Any]) -> Kernels:
    """What ran on the device, from the events of a trace."""
    ran = spans(events, "cuda")
    parts: dict[str, float] = defaultdict(float)
    for name, us, _ in ran:
        parts[part_of(name, "")] += us / 1e6
    return Kernels(
        dict(parts), len(ran), busy_us(ran) / 1e6, [gap / 1e6 for _, _, gap in ran if gap > 0]
    )


def busy_us(ran: list[Span]) -> float:
    """How long at least one of them ran."""
    return sum(max(0.0, us + min(gap, 0.0)) for _, us, gap in ran)


def one_replay(engine: Engine, ids: list[int]) -> list[Span]:
    """The kernels of one cycle behind a prompt, its copy to the host included, warm and captured where cycles are."""
    batch, cuda = engine.config.batch_size, engine.config.device.startswith("cuda")
    session = Session(engine, [(0, sample) for sample in range(batch)])
    decoding = session.run([ids] * batch)
    next(decoding)
    while session.waiting:  # chunks of the prompt
        next(decoding)
    preset = engine.tree_policy.next(len(engine.cycles) - 1)
    for _ in range(1 + WARM_UPS):
        session.time_cycle(preset)
    for _ in range(2):  # the first profile in a process is slow
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            with record_function(CYCLE):
                session.time_cycle(preset)
            if cuda:
                torch.cuda.synchronize()
    ran = spans(seen.events(), engine.config.device)
    assert ran, "the profiler saw nothing"
    return ran


def replay_table(ran: list[Span]) -> str:
    """The kernels by their name, the longest in all first, and then one by one in their order."""
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
        lines.append(
            f"| {name[:80]} | {len(us)} | {sum(us):.1f} | {statistics.median(us):.2f} | {before:.1f} |"
        )
    each = [f"{gap:8.2f} {us:8.2f}  {name[:120]}" for name, us, gap in ran]
    return "\n".join([*lines, "", "in order: us before it, us, kernel", *each])


def summary(pairs: list[tuple[Round, Round]], config: ProfileConfig) -> dict[str, Any]:
    """Medians in milliseconds per cycle; the parts add up to the wall time."""
    profiles = [seen.profiler.events() for _, seen in pairs]
    wall = Series.quartiles([second for plain, _ in pairs for second in plain.wall_s])
    host = host_parts(event for events in profiles for event in events)
    device = (
        [device_kernels(events) for events in profiles] if config.device.startswith("cuda") else []
    )
    every = [{k: v / config.cycles for k, v in kernels.parts.items()} for kernels in device] or [
        host
    ]
    parts = {
        line: 1e3 * statistics.median(found.get(line, 0.0) for found in every) for line in LINES
    }
    parts = {line: ms for line, ms in parts.items() if ms > 0}
    parts[IDLE if device else PYTHON] = 1e3 * wall.median - sum(parts.values())
    found = {
        "wall_ms": [1e3 * x for x in wall],
        "profiled_wall_ms": 1e3
        * statistics.median(second for _, seen in pairs for second in seen.wall_s),
        "parts_ms": parts,
        "tokens_per_cycle": pairs[0][0].tokens / config.cycles,
    }
    if device:
        gaps = [gap for kernels in device for gap in kernels.gaps_s]
        found["kernels"] = {
            "per_cycle": statistics.median(kernels.count for kernels in device) / config.cycles,
            "busy_ms": 1e3
            * statistics.median(kernels.busy_s for kernels in device)
            / config.cycles,
            "gaps_ms": 1e3 * sum(gaps) / len(device) / config.cycles,
            "median_gap_us": 1e6 * statistics.median(gaps or [0.0]),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """The summary as text."""
    wall, low, high = found["wall_ms"]
    rows = [
        f"| {part} | {ms:.3f} | {100 * ms / wall:.1f} |" for part, ms in found["parts_ms"].items()
    ]
    text = "\n".join(
        ["| part of a cycle | ms | % |", "|---|---|---|", *rows, f"| cycle | {wall:.3f} | 100.0 |"]
    )
    text += (
        f"\n\nwall time of a cycle: median {wall:.3f} ms ({low:.3f}-{high:.3f}), {found['profiled_wall_ms']:.3f} while "
        f"profiled; {found['tokens_per_cycle']:.2f} tokens per cycle"
    )
    if "kernels" in found:
        k = found["kernels"]
        text += (
            f"\nkernels per cycle: {k['per_cycle']:.0f}, busy {k['busy_ms']:.3f} ms, gaps {k['gaps_ms']:.3f} ms, "
            f"median gap {k['median_gap_us']:.1f} us"
        )
    return text


# ------------------------------------------------------------------------------------------------ main


def run(config: ProfileConfig) -> None:
    """Profile and print."""
    config.check()
    if config.threads:
        torch.set_num_threads(config.threads)
    prompt = read_prompts(config)[0]
    engine = load(config)
    config = engine.config
    ids = first_ids(engine, prompt)
    pairs = list(rounds(engine, ids, config))
    found = summary(pairs, config)
    print(
        ", ".join(f"{key} {value}" for key, value in environment(config.device).items()),
        f"{config.dtype}, quant {config.quant}, T = {config.temperature}, B = {config.batch_size}, "
        + ", ".join(
            f"{key} {value}"
            for key, value in ({"draft": config.draft} | engine.drafter.resolved_options()).items()
        ),
        table(found),
        sep="\n\n",
        file=sys.stderr if config.json == "-" else sys.stdout,
    )
    if config.json:
        ran = asdict(config) | {"context": engine.context} | engine.drafter.resolved_options()
        ran |= {
            name: shown_path(ran[name])
            for name in ("checkpoint", "eagle", "draft_checkpoint", "json")
        }
        write_text(
            config.json,
            json.dumps(found | {"config": ran, "environment": environment(config.device)}),
        )


def main() -> None:
    config = parse(ProfileConfig, "profile_cycle.py", __doc__)
    with one_line_errors("profile_cycle.py"):
        run(config)


if __name__ == "__main__":
    main()
