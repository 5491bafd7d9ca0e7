"""Shared by the benchmarks: series, turns, the bandwidth ceiling, and the machine.

1. Contestants run in turn, round after round, so that drift of the machine hits all of them. Ratios
   are taken inside a round.
2. The ceiling is the read bandwidth of a buffer that no cache holds. A process of its own measures
   it, so that the buffer does not count in any peak memory. A GPU times it by events, since launch
   and synchronization would take a noticeable part of a reading.
3. `GPT_EAGLE_BANDWIDTH`, bytes per second, takes the place of that measurement: of several programs
   on one machine the first hands its result on.

Not here: the measurements themselves; logs (row_log.py).
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from backends.library import PLAIN, tiles_in_use
from decode import build_cycles
from drafts.presets import PresetPolicy
from model import Transformer
from run import stats
from run.engine import Engine
from run.load import with_draft
from run.options import ROOT, GenerateConfig
from run.scheduler import Request, Scheduler
from run.warm_up import warm_up
from steps import Project

CEILING_BYTES = {"cpu": 10**9, "cuda": 8 * 10**9}  # summed up for the bandwidth; no cache holds it

# options that loading resolves, beside those of the draft
OF_TARGET = (
    "compile", "context", "device", "draft", "dtype", "group_size", "head", "quant", "quant_draft",
)  # fmt: skip


class Series(NamedTuple):
    """The median of repeated measurements, and its spread."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Series:
        """Return median and range, for a few runs."""
        return Series(statistics.median(values), min(values), max(values))

    @staticmethod
    def quartiles(values: list[float]) -> Series:
        """Return median and quartiles, for many runs."""
        if len(values) < 2:
            return Series.of(values)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Series(median, low, high)

    def text(self, scale: float, digits: int) -> str:
        """Format as `median (low-high)`, scaled."""
        median, low, high = (f"{x * scale:.{digits}f}" for x in self)
        return f"{median} ({low}-{high})"


# -------------------------------------------------------------------------------------------- turns


def with_config(engine: Engine, config: GenerateConfig) -> Engine:
    """Return an engine over the same target with other options of drafting, sampling and batching.

    config: checked, with the engine's checkpoint, device and context, and dtype as it was given
    Returns: the engine, warmed up. Raises: ValueError for a draft that does not fit.
    """
    if engine.option("quant") != "none":  # as it was loaded
        config = replace(config, quant=engine.option("quant"))
    engine = with_draft(engine, config, str(engine.device))
    if isinstance(engine.policy, PresetPolicy):
        engine.policy.kept = None  # every prompt is the first request
    return warm_up(build_cycles(engine))


def draft_options(engine: Engine) -> dict[str, Any]:
    """Return the options of the draft as they were used, by name."""
    return {name: value for name, value in engine.resolved.items() if name not in OF_TARGET}


class Outcome(NamedTuple):
    """One run of a batch of prompts."""

    rows: list[list[int]]  # new tokens of each prompt
    first_s: float  # until the first new tokens are decided
    step_s: float  # per later token of the batch
    tau: float  # new tokens per pass and sequence, without those cut at the end


def run_rows(engine: Engine, prompts: list[list[int]]) -> Outcome:
    """Continue prompts with our runtime, side by side.

    The prompts are cached first: decoding beside another sequence's prefill would be timed with it.
    """
    requests = [Request.of(engine, ids, noise_id=(row, 0)) for row, ids in enumerate(prompts)]
    with closing(Scheduler(engine)) as scheduler:
        for _ in scheduler.run([Request.of(engine, ids, limit=1) for ids in prompts]):
            pass
        caching = scheduler.take_stats()
        for _ in scheduler.run(requests):
            pass
        seen = scheduler.take_stats()
    rows = [request.tokens for request in requests]
    assert seen.tokens == sum(len(row) - 1 for row in rows), (seen.tokens, rows)
    step_s = seen.decode_s / seen.tokens if seen.tokens else 0.0
    tau = seen.tokens / max(len(seen.accept_lengths), 1)
    return Outcome(rows, caching.prefill_s, step_s, tau)


def in_turn(
    contestants: dict[str, Callable[[], Any]], runs: int, title: str
) -> dict[str, list[Any]]:
    """Run all contestants once to warm up, then `runs` rounds, one after the other."""
    outcomes: dict[str, list[Any]] = {name: [] for name in contestants}
    bar = tqdm(total=(runs + 1) * len(contestants), desc=title, unit="run", disable=None)
    for _ in range(runs + 1):
        for name, run in contestants.items():
            outcomes[name].append(run())
            bar.update()
    bar.close()
    return {name: done[1:] for name, done in outcomes.items()}


def repeated(tokens: list[int], n: int = 8) -> float:
    """Return the share of n-grams that have occurred before in the same output."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ------------------------------------------------------------------------------------------ machine


def read_bandwidth(device: str, runs: int) -> Series:
    """Measure the bytes per second of summing up a large buffer, in a process of its own.

    Where GPT_EAGLE_BANDWIDTH is set, it is the result.
    Raises: ValueError when that fails, or for a GPT_EAGLE_BANDWIDTH that is no such number.
    """
    given = os.environ.get("GPT_EAGLE_BANDWIDTH", "")
    if given:
        return Series.of([known_bandwidth(given)])
    code = (
        "import sys; from scripts.bench import measure; "
        "print(*measure._bandwidth(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))"
    )
    command = [sys.executable, "-c", code, device, str(runs), str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"the bandwidth of {device} cannot be measured: {reason}")
    return Series.of([float(x) for x in done.stdout.split()])


def known_bandwidth(given: str) -> float:
    """Read GPT_EAGLE_BANDWIDTH. Raises: ValueError for what is no number of bytes per second."""
    rule = "GPT_EAGLE_BANDWIDTH must be bytes per second, as 3.35e12"
    try:
        bytes_per_s = float(given)
    except ValueError:
        raise ValueError(f"{rule}; it is {given!r}") from None
    if not 0 < bytes_per_s < float("inf"):
        raise ValueError(f"{rule}; it is {given!r}")
    return bytes_per_s


def _bandwidth(device: str, runs: int, threads: int) -> list[float]:
    torch.set_num_threads(threads)
    kind = device.partition(":")[0]
    buffer = torch.ones(CEILING_BYTES[kind] // 4, device=device)
    seconds_of = event_seconds if kind == "cuda" else host_seconds
    rates = [buffer.nbytes / seconds_of(buffer.sum) for _ in range(runs + 1)]
    return rates[1:]  # the first warms up


def host_seconds(work: Callable[[], Tensor]) -> float:
    """Time some work until its result, one number, is there."""
    began = time.perf_counter()
    work().item()
    return time.perf_counter() - began


def event_seconds(work: Callable[[], Any]) -> float:
    """Time some work on a GPU between two events of its stream, without the host's launches."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3


def pass_bytes(target: Transformer, cached: float) -> float:
    """Return the bytes that a pass reads at least.

    These are the keys and values and all weights, but of an untied embedding one row only, and of a
    mixture the experts of one token only.
    cached: tokens
    """
    c = target.config
    embedding = next(_tensors(target.embedding))  # a weight, or packed blocks
    tied = any(x is embedding for x in _tensors(target.lm_head))
    skipped = 0 if tied else embedding.nbytes * (1 - 1 / c.vocab_size)
    if c.n_experts:
        steps = [(layer, step) for layer in target.layers for step in layer.steps]
        experts = [(layer, s.name) for layer, s in steps if isinstance(s, Project) and s.experts]
        total = sum(_nbytes(getattr(layer, name)) for layer, name in experts)
        skipped += (1 - c.experts_per_token / c.n_experts) * total
    weights = _nbytes(target) - skipped
    return (
        weights + 2 * c.n_layers * c.n_kv_heads * c.head_dim * target.norm.weight.itemsize * cached
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _nbytes(module: nn.Module) -> int:
    return sum(x.nbytes for x in _tensors(module))


def environment(device: str, *packages: str) -> dict[str, Any]:
    """Return the machine and versions: `stats.environment`, CPU model, packages and commit.

    packages: importable names whose versions matter too
    """
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    versions = {name: __import__(name).__version__ for name in packages}
    named = {}
    if not device.startswith("cuda"):
        named["device"] = _cpu_name()
        if tiles_in_use() != "none":
            named["tiles"] = tiles_in_use()
    if PLAIN:
        named["plain"] = ",".join(sorted(PLAIN))
    return stats.environment(device) | named | versions | {"commit": commit or "unknown"}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    values = {}
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        values[key.strip()] = value.strip()
    if "model name" not in values:
        return platform.processor() or platform.machine()
    # clouds leave these numbers out of the name
    numbers = [f"{key} {values[key]}" for key in ("cpu family", "model") if key in values]
    return " ".join([values["model name"], *numbers])


def shown_path(path: str) -> str:
    """Return a path for a record: relative to the project where it lies inside."""
    if path and Path(path).resolve().is_relative_to(ROOT):
        return str(Path(path).resolve().relative_to(ROOT))
    return path
