"""Speedup, tau and n-alpha by task: every way to draft, beside other runtimes.

1. The target is loaded once per quantization; every contestant decodes a first group untimed.
2. All contestants decode the same prompts in turn, group by group, in an order that rotates. A
   speedup is taken between neighbours in time: decode tokens per second over those of `none`.
   Prefill and compilation are apart.
3. `--json` gets one line per task and method, once measured; table.py makes tables of it alone. The
   same command resumes a killed run at its unfinished task. A method that is refused or fails is
   named at the end; the others go on.

tau: emitted tokens per verification, bonus included. n-alpha (EAGLE-1 4.1): on chains, the share of
drafted tokens accepted after n accepted ones. Without `none` there is no speedup, and large batches
measure tau and n-alpha quickly.
Not here: who decodes (contestants.py, methods.py), and the meaning of the numbers
(benchmarks/README.md).
"""

from __future__ import annotations

import math
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from run.engine import Engine
from run.generate import encode, load
from run.methods import head_kinds
from run.options import pick_device
from run.stats import peak_memory_bytes
from scripts.bench.cases import SpeedOptions, is_peer, shown_path
from scripts.bench.common import (
    Log,
    Series,
    draft_options,
    environment,
    pass_bytes,
    read_bandwidth,
    with_config,
)
from scripts.bench.contestants import Contestant, Outcome, Peers, Run, ours
from scripts.bench.methods import Setting, method_config, methods_of
from scripts.bench.table import write_report
from scripts.bench.tasks import conversations

FORMS = {"gsm8k": "Question: {}\nAnswer:"}  # for base models, as in training; chats get the turns
CEILING_RUNS = 5


class Task(NamedTuple):
    """Prompts of one kind, those that fit."""

    name: str
    prompts: list[list[str]]
    left_out: int


def read_tasks(config: SpeedOptions) -> dict[str, list[list[str]]]:
    """Read conversations by task, `limit` of each. Raises: ValueError, as `conversations`."""
    tasks = {}
    for task, rows in conversations(config.tasks).items():
        form = FORMS.get(task, "{}") if config.chat is None else "{}"
        kept = rows[: config.limit or None]
        tasks[task] = [[form.format(turn) for turn in turns] for turns in kept]
        if config.peers:  # they decode first turns
            tasks[task] = [turns[:1] for turns in tasks[task]]
    return tasks


def fitting(engine: Engine, name: str, prompts: list[list[str]], new_tokens: int) -> Task:
    """Leave out prompts that are too long. Raises: ValueError when nothing is left."""
    longest = engine.context - new_tokens
    kept = [turns for turns in prompts if len(encode(engine, turns[:1], [])) <= longest]
    left_out = len(prompts) - len(kept)
    if not kept:
        raise ValueError(
            f"no prompt of {name} has at most {longest} tokens; raise the context "
            "(--options context=4096)"
        )
    if left_out:
        print(
            f"note: {left_out} prompts of {name} have more than {longest} tokens; they are left out"
        )
    return Task(name, kept, left_out)


# ---------------------------------------------------------------------------------------- measuring


def run_round(
    runs: dict[str, Run], contestants: dict[str, Contestant], number: int
) -> dict[str, Outcome]:
    """Decode the same group of prompts with every method, in an order that rotates."""
    names = list(runs)
    first = number % len(names)
    done = {name: runs[name](number) for name in names[first:] + names[:first]}
    for name in names:
        due = contestants[name].same_as
        if due in done:
            pairs = zip(done[name].texts, done[due].texts, strict=True)
            done[name].identical = tuple(mine == other for mine, other in pairs)
    return {name: done[name] for name in names}


def acceptance(rows: list[list[int]], depth: int) -> dict[str, Any]:
    """Return tau, and acceptance by depth. rows: accept lengths per prompt"""
    lengths = [length for row in rows for length in row]
    if not lengths:  # every prompt ended with its first token
        return {"tau": 0.0, "tau_error": 0.0, "histogram": [0] * (depth + 1), "by_depth": []}
    depth = max(depth, *lengths)  # drafters that choose between trees may have deeper ones
    tau = sum(lengths) / len(lengths) + 1
    # tau is a ratio of sums; its standard error over prompts comes from their linearised deviations
    off = [sum(row) + len(row) - tau * len(row) for row in rows]
    tried = [sum(a >= n for a in lengths) for n in range(depth)]
    return {
        "tau": tau,
        "tau_error": math.sqrt(sum(d * d for d in off)) / len(lengths),
        "histogram": [lengths.count(n) for n in range(depth + 1)],
        "by_depth": [sum(a > n for a in lengths) / t for n, t in enumerate(tried) if t],
    }


def speed(name: str, rounds: list[dict[str, Outcome]]) -> dict[str, Any]:
    """Return tokens per second, speedup over `none` in the same round, and times per cycle."""
    mine = [outcomes[name] for outcomes in rounds]
    plain = [outcomes["none"].rate if "none" in outcomes else 0.0 for outcomes in rounds]
    ratios = [one.rate / p for one, p in zip(mine, plain) if one.rate and p]
    rate = Series.quartiles([one.rate for one in mine if one.rate] or [0.0])
    ratio = Series.quartiles(ratios) if ratios else None
    total = {
        key: sum(getattr(one, key) for one in mine)
        for key in ("decode_s", "draft_s", "verify_s", "prefill_s", "tokens", "cycles")
    }
    total["cycles"] = max(total["cycles"], 1)
    rest_s = total["decode_s"] - total["draft_s"] - total["verify_s"]
    return {
        "tokens_per_s": rate.median,
        "tokens_per_s_quartiles": rate[1:],
        "speedup": ratio.median if ratio else None,
        "speedup_quartiles": ratio[1:] if ratio else None,
        "first_ms": statistics.median(one.prefill_s for one in mine) * 1e3,
        "draft_ms": total["draft_s"] / total["cycles"] * 1e3,
        "verify_ms": total["verify_s"] / total["cycles"] * 1e3,
        "rest_ms": rest_s / total["cycles"] * 1e3,
        **total,
        "runs": len(mine),
    }


def summary(
    name: str, contestant: Contestant, rounds: list[dict[str, Outcome]], ceiling: float
) -> dict[str, Any]:
    """Return the measured part of a line of the log. ceiling: bytes per second"""
    mine = [outcomes[name] for outcomes in rounds]
    lengths = [row for one in mine for row in one.accept_lengths]
    same = [x for one in mine for x in one.identical]
    row = acceptance(lengths, 0) | speed(name, rounds)
    row |= {
        "n_alpha": None,
        "identical": sum(same) / len(same) if same else None,
        "repeated": statistics.mean(x for one in mine for x in one.repeated),
        "verify_of_ceiling": None,
        "compiled": False,
        "compile_s": 0.0,
        "peak_memory_bytes": peak_memory_bytes("cpu"),
    }
    engine = contestant.engine
    if engine is None:
        return row
    row |= acceptance(lengths, engine.drafter.depth)
    if engine.option("draft") in (*head_kinds(), "model") and engine.drafter.width == 1:
        row["n_alpha"] = row["by_depth"]  # on chains
    if row["verify_ms"]:
        pass_s = row["verify_ms"] / 1e3
        row["verify_of_ceiling"] = pass_bytes(engine.target, 0) / pass_s / ceiling
    return row | {
        "draft": draft_options(engine),
        "nodes": engine.drafter.size,
        "compiled": bool(engine.option("compile")),
        "compile_s": engine.compile_s,
        "load_s": engine.load_s,
        "peak_memory_bytes": peak_memory_bytes(engine.device.type),
        "failed_captures": failed_captures(engine),
    }


def failed_captures(engine: Engine) -> int:
    """Count the steps of finished sessions whose capture as a graph failed."""
    replays = [step for buffers in engine.free for step in buffers.replays.values()]
    return sum(step.capture_failed for step in replays)


# --------------------------------------------------------------------------------------- the matrix


class Unit(NamedTuple):
    """A task under a setting, and the methods that the log lacks there."""

    setting: Setting
    task: str
    lacking: list[str]

    def key(self, method: str) -> dict[str, Any]:
        """Return the fields that identify a line of the log."""
        return {"task": self.task, "method": method} | self.setting._asdict()


class Bench(NamedTuple):
    """A run of this program."""

    config: SpeedOptions
    tasks: dict[str, list[list[str]]]
    log: Log
    machine: dict[str, Any]
    ceiling: Series  # bytes per second
    failed: dict[str, str]  # the reason, by method
    over: Callable[[int], bool]  # as in `measure`

    def attempt(self, method: str, work: Callable[[], Any]) -> Any:
        """Return the result of some work, or None where it fails: the other methods go on."""
        try:
            return work()
        except ValueError as error:  # refused, for example as its files do not fit the model
            self.failed[method] = str(error)
            return None
        except Exception as error:  # of a compiler or a device: a method that fails is a result
            traceback.print_exception(error)
            reason = str(error).strip().partition("\n")[0][:200]
            self.failed[method] = f"{type(error).__name__}: {reason} (the traceback is above)"
            return None

    def methods(self, unit: Unit) -> list[str]:
        """Return the methods that run for a unit: the lacking ones, and those they are beside."""
        beside = set(unit.lacking) | {"none"}
        # a peer's drafts are held against its own plain decoding
        beside |= {method.rpartition(":")[0] for method in unit.lacking if is_peer(method)}
        return [method for method in methods_of(self.config, unit.setting) if method in beside]


def settings_of(config: SpeedOptions) -> list[Setting]:
    """Return the matrix of settings. Raises: ValueError for a value that is no number."""
    try:
        temperatures = [float(t) for t in config.temperatures.split(",")]
    except ValueError:
        given = f"it is {config.temperatures!r}"
        raise ValueError(f"--temperatures must be a list of numbers, as 0,1; {given}") from None
    sizes = [int(b) for b in config.batch_sizes.split(",")]
    return [Setting(q, t, b) for q in config.quant.split(",") for t in temperatures for b in sizes]


def open_log(path: str, flag: str) -> Log:
    """Open a log of this case. Raises: ValueError for another file."""
    log = Log(path, flag)
    for number, row in enumerate(log.rows, 1):
        if "ceiling_bytes_per_s" not in row or "first_ms" not in row:
            raise ValueError(
                f"{flag}: {path} line {number} is no line of measure.py speed; name another file"
            )
    return log


def units_to_do(config: SpeedOptions, tasks: dict[str, list[list[str]]], log: Log) -> list[Unit]:
    """Return the units that the log lacks. Raises: ValueError for a log of other options."""
    for row in log.rows:
        for name, value in config.fixed.items():
            if row["config"].get(name) != value:
                was = f"--{name} {row['config'].get(name)}, here {value}"
                raise ValueError(
                    f"--json: {config.json} was measured with {was}; name another file"
                )
    known = {tuple(row[key] for key in ("task", "method", *Setting._fields)) for row in log.rows}
    units = []
    for setting in settings_of(config):
        for task in tasks:
            wanted = methods_of(config, setting)
            lacking = [m for m in wanted if (task, m, *setting) not in known]
            if lacking:
                units.append(Unit(setting, task, lacking))
    return units


def measure_unit(
    bench: Bench, unit: Unit, contestants: dict[str, Contestant], target: Engine, bar: tqdm
) -> None:
    """Measure a task, and log it.

    Writes: `contestants`, from which a method that fails is dropped.
    """
    config = bench.config
    task = fitting(target, unit.task, bench.tasks[unit.task], config.max_new_tokens)
    size = unit.setting.batch_size
    bar.set_postfix_str(f"{task.name}, T {unit.setting.temperature:g}, B {size}")
    runs = {}
    for name in [name for name in bench.methods(unit) if name in contestants]:
        warm = bench.attempt(name, partial(warmed, contestants[name], task.prompts, size))
        if warm is None:
            del contestants[name]
        else:
            runs[name] = warm
    if not runs:
        return
    groups = [*range(-(-len(task.prompts) // size))]
    rounds: list[dict[str, Outcome]] = []
    for number in groups * config.rounds:
        if bench.over(list(bench.tasks).index(unit.task)) and rounds:
            break
        rounds.append(run_round(runs, contestants, number))
        bar.update()
    lines = []
    for name in filter(runs.get, unit.lacking):
        context = {
            "prompts": min(len(task.prompts), len(rounds) * size),
            "left_out": task.left_out,
            "config": config.fixed,
            "environment": bench.machine,
            "ceiling_bytes_per_s": bench.ceiling,
        }
        measured = summary(name, contestants[name], rounds, bench.ceiling.median)
        lines.append(unit.key(name) | measured | context)
    bench.log.add(lines)


def warmed(contestant: Contestant, prompts: list[list[str]], size: int) -> Run:
    """Return the run of a contestant over prompts, after one that is not timed."""
    contestant.start(prompts[:size])(0)
    return contestant.start(prompts)


def measure_all(bench: Bench, units: list[Unit]) -> None:
    """Measure the units: one target per quantization, one set of contestants per setting."""
    sizes = {name: len(prompts) for name, prompts in bench.tasks.items()}
    rounds = sum(-(-sizes[unit.task] // unit.setting.batch_size) for unit in units)
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=rounds * bench.config.rounds, unit="round", disable=None) as bar,
    ):
        target = None
        loaded = None  # quantization of the target
        for setting in dict.fromkeys(unit.setting for unit in units):
            mine = [unit for unit in units if unit.setting == setting]
            if loaded != setting.quant:
                target = None  # freed before the next one is loaded
                plain = method_config("none", setting, bench.config)
                target = load(replace(plain, compile=False))
                loaded = setting.quant
            names = dict.fromkeys(name for unit in mine for name in bench.methods(unit))
            contestants = make_contestants(bench, setting, target, list(names), Path(folder), bar)
            for unit in mine:
                measure_unit(bench, unit, contestants, target, bar)
            torch.compiler.reset()  # else the next setting's steps would first try these graphs


def make_contestants(
    bench: Bench, setting: Setting, target: Engine, names: list[str], folder: Path, bar: tqdm
) -> dict[str, Contestant]:
    """Return the contestants of a setting; one that fails is noted and left out."""
    config = bench.config
    peers = Peers(config, target, setting.batch_size, folder)
    contestants = {}
    for name in names:
        bar.set_postfix_str(f"preparing {name}")
        if is_peer(name):
            make = partial(peers.make, name)
        else:
            make = partial(made_ours, name, setting, config, target)
        contestant = bench.attempt(name, make)
        if contestant is not None:
            contestants[name] = contestant
    return contestants


def made_ours(name: str, setting: Setting, config: SpeedOptions, target: Engine) -> Contestant:
    """Return our runtime with a method; beside peers it ignores an end of sequence, as they do."""
    chosen = method_config(name, setting, config)
    if config.peers:
        chosen = replace(chosen, ignore_eos=True)
    return ours(with_config(target, chosen))


def header_lines(bench: Bench) -> Iterator[str]:
    """Yield the conditions of the measurement."""
    config = bench.config
    yield ", ".join(f"{key} {value}" for key, value in bench.machine.items())
    dtype = config.dtype or "of the checkpoint"
    yield f"checkpoint {shown_path(config.checkpoint)}, dtype {dtype}, quantization {config.quant}"
    yield f"tasks {', '.join(bench.tasks)}; B = {config.batch_sizes}, T = {config.temperatures}"
    yield f"read bandwidth {bench.ceiling.text(1e-9, 1)} GB/s: the ceiling"


def measure(config: SpeedOptions, over: Callable[[int], bool] = lambda task: False) -> list[dict]:
    """Measure the lines that the log lacks. Returns: all of its rows.

    over: of a task's number, asked before each of its rounds; true ends the task, after one round
    Raises: ValueError, also for methods that failed.
    """
    config = replace(config, device=pick_device(config.device))
    if config.threads:
        torch.set_num_threads(config.threads)
    tasks = read_tasks(config)
    for setting in settings_of(config):  # every combination, before anything is measured
        for method in methods_of(config, setting):
            if not is_peer(method):
                method_config(method, setting, config)
    log = open_log(config.json, "--json")
    units = units_to_do(config, tasks, log)
    if log.rows:
        lacking = sum(len(unit.lacking) for unit in units)
        print(f"{config.json} holds {len(log.rows)} lines; {lacking} are to be measured")
    if units:
        machine = environment(config.device)
        ceiling = read_bandwidth(config.device, CEILING_RUNS)
        bench = Bench(config, tasks, log, machine, ceiling, {}, over)
        print("\n".join(header_lines(bench)), flush=True)
        measure_all(bench, units)
        if bench.failed:
            if log.rows:
                write_report(log.rows)
            reasons = "; ".join(f"{name}: {reason}" for name, reason in bench.failed.items())
            raise ValueError(reasons)
    return log.rows


def run(config: SpeedOptions) -> None:
    """Measure, or read a log, and print the tables."""
    write_report(open_log(config.report, "--report").rows if config.report else measure(config))
