"""Speedup, tau and n-alpha by task: every way to draft, beside other runtimes.

1. The target is loaded once per quantization; every contestant decodes a first group untimed.
2. All contestants decode the same prompts in turn, group by group, in an order that rotates. A
   speedup is taken between neighbours in time: decode tokens per second over those of `none`.
   Prefill and compilation are apart.
3. `--json` gets one line per task and method, once measured; table.py makes tables of it alone. The
   same command resumes a killed run: a task that lacks a line is measured anew. A method that is
   refused or fails is named at the end; the others go on.

tau: emitted tokens per verification, bonus included. n-alpha (EAGLE-1 4.1): on chains, the share of
drafted tokens accepted after n accepted ones. Without `none` there is no speedup, and large batches
measure tau and n-alpha quickly.
Not here: who decodes (contestants.py, methods.py), and the meaning of the numbers
(benchmarks/README.md).
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from files.fetch import with_files
from files.io import write_text
from files.texts import template_name
from options import log_note, require
from run.engine import Engine
from run.generate import encode
from run.load import load
from run.methods import head_kinds
from run.options import GenerateConfig, pick_device
from run.stats import Stats, peak_memory_bytes, told
from scripts.bench.cases import BenchOptions, SpeedOptions, check_peer, is_peer
from scripts.bench.common import Log, Series, environment, pass_bytes, read_bandwidth
from scripts.bench.contestants import Contestant, Outcome, Peers, Run, ours, with_config
from scripts.bench.methods import (
    DEFAULT_DRAFT,
    Setting,
    command,
    method_config,
    methods_of,
)
from scripts.bench.pictures import means, of_log, read_rows, table
from scripts.bench.table import write_report
from scripts.bench.tasks import conversations

FORMS = {"gsm8k": "Question: {}\nAnswer:"}  # for base models, as in training; chats get the turns
CEILING_RUNS = 5
TOTALS = ("decode_s", "draft_s", "verify_s", "prefill_s", "tokens")  # of a line, over its rounds
KEYS = ("task", "method", *Setting._fields)  # of a line of the log


def read_tasks(config: SpeedOptions) -> dict[str, list[list[str]]]:
    """Read conversations by task, `limit` of each. Raises: ValueError, as `conversations`."""
    tasks = {}
    for task, rows in conversations(config.tasks).items():
        form = FORMS.get(task, "{}") if config.chat is None else "{}"
        most = 1 if config.peers else None  # turns; other runtimes decode the first ones
        kept = rows[: config.limit or None]
        tasks[task] = [[form.format(turn) for turn in turns[:most]] for turns in kept]
    return tasks


def fitting(engine: Engine, name: str, prompts: list[list[str]], new: int) -> list[list[str]]:
    """Leave out prompts that are too long. new: tokens of an answer

    Raises: ValueError when nothing is left.
    """
    longest = engine.context - new
    kept = [turns for turns in prompts if len(encode(engine, turns[:1], [])) <= longest]
    remedy = "raise the context (--options context=4096)"
    require(bool(kept), f"no prompt of {name} has at most {longest} tokens; {remedy}")
    if len(kept) < len(prompts):
        left_out = f"{len(prompts) - len(kept)} prompts of {name} have more than {longest} tokens"
        print(f"note: {left_out}; they are left out")
    return kept


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
    stats = Stats()
    for one in mine:
        stats.add(one.stats)
    cycles = max(len(stats.live_sequences), 1)
    rest_s = stats.decode_s - stats.draft_s - stats.verify_s
    return {
        "tokens_per_s": rate.median,
        "tokens_per_s_quartiles": rate[1:],
        "speedup": ratio.median if ratio else None,
        "speedup_quartiles": ratio[1:] if ratio else None,
        "first_ms": statistics.median(one.stats.prefill_s for one in mine) * 1e3,
        "draft_ms": stats.draft_s / cycles * 1e3,
        "verify_ms": stats.verify_s / cycles * 1e3,
        "rest_ms": rest_s / cycles * 1e3,
        **{name: getattr(stats, name) for name in TOTALS},
        "cycles": cycles,
        "runs": len(mine),
    }


def summary(
    name: str, contestant: Contestant, rounds: list[dict[str, Outcome]], ceiling: float
) -> dict[str, Any]:
    """Return the measured part of a line of the log. ceiling: bytes per second"""
    mine = [outcomes[name] for outcomes in rounds]
    engine = contestant.engine
    lengths = [row for one in mine for row in one.accept_lengths]
    same = [x for one in mine for x in one.identical]
    row = speed(name, rounds) | acceptance(lengths, engine.drafter.depth if engine else 0)
    row |= {
        "n_alpha": None,
        "identical": sum(same) / len(same) if same else None,
        "repeated": statistics.mean(x for one in mine for x in one.repeated),
        "verify_of_ceiling": None,
        "compiled": False,
        "compile_s": 0.0,
        "peak_memory_bytes": peak_memory_bytes(engine.device.type if engine else "cpu"),
    }
    if engine is None:
        return row
    if engine.option("draft") in (*head_kinds(), "model") and engine.drafter.width == 1:
        row["n_alpha"] = row["by_depth"]  # on chains
    if row["verify_ms"]:
        row["verify_of_ceiling"] = pass_bytes(engine.target) / (row["verify_ms"] / 1e3) / ceiling
    return row | {
        "resolved": engine.resolved,
        "nodes": engine.drafter.size,
        "compiled": bool(engine.option("compile")),
        "compile_s": engine.compile_s,
        "load_s": engine.load_s,
    }


# --------------------------------------------------------------------------------------- the matrix


def settings_of(config: SpeedOptions) -> list[Setting]:
    """Return the matrix of settings. Raises: ValueError for a value that is no number."""
    try:
        temperatures = [float(t) for t in config.temperatures.split(",")]
    except ValueError:
        given = f"it is {config.temperatures!r}"
        raise ValueError(f"--temperatures must be a list of numbers, as 0,1; {given}") from None
    sizes = [int(b) for b in config.batch_sizes.split(",")]
    return [Setting(q, t, b) for q in config.quant.split(",") for t in temperatures for b in sizes]


def fault_of(row: dict[str, Any]) -> str:
    """Return the fault of a row of a log of this case, or ""."""
    known = "ceiling_bytes_per_s" in row and "first_ms" in row
    return "" if known else "it is no line of measure.py speed; name another file"


class Bench:
    """A run of this program.

    over: of a task's number, asked before each of its rounds; true ends the task, after one round
    """

    def __init__(self, config: SpeedOptions, over: Callable[[int], bool]):
        """Read the tasks and the log, and check the methods. Raises: ValueError."""
        self.config = config
        self.over = over
        self.tasks = read_tasks(config)
        self.methods = {setting: methods_of(config, setting) for setting in settings_of(config)}
        for setting, methods in self.methods.items():  # before anything is measured
            for method in methods:
                if not is_peer(method):
                    method_config(method, setting, config)
        self.log = Log(config.json, "--json", fault_of)
        for row in self.log.rows:
            for name, value in config.fixed.items():
                was = f"--{name} {row['config'].get(name)}, here {value}"
                fault = f"--json: {config.json} was measured with {was}; name another file"
                require(row["config"].get(name) == value, fault)
        self.failed: dict[str, str] = {}  # the reason, by method
        self.ceiling = 0.0  # bytes per second

    def lacking(self, setting: Setting, task: str) -> list[str]:
        """Return the methods that have no line of a task in the log."""
        known = [tuple(row[key] for key in KEYS) for row in self.log.rows]
        return [m for m in self.methods[setting] if (task, m, *setting) not in known]

    def attempt(self, method: str, work: Callable[[], Any]) -> Any:
        """Return the result of some work, or None where it fails: the other methods go on."""
        try:
            return work()
        except ValueError as error:  # refused, for example as its files do not fit the model
            self.failed[method] = str(error)
        except Exception as error:  # of a compiler or a device: a method that fails is a result
            traceback.print_exception(error)
            reason = str(error).strip().partition("\n")[0][:200]
            self.failed[method] = f"{type(error).__name__}: {reason} (the traceback is above)"
        return None

    def contestants(self, setting: Setting, target: Engine, folder: Path) -> dict[str, Contestant]:
        """Return the contestants of a setting; one that fails is noted and left out."""
        peers = Peers(self.config, target, setting.batch_size, folder)

        def make(name: str) -> Contestant:
            if is_peer(name):
                return peers.make(name)
            chosen = method_config(name, setting, self.config)
            # beside peers it ignores an end of sequence, as they do
            ignore_eos = chosen.ignore_eos or bool(self.config.peers)
            return ours(with_config(target, replace(chosen, ignore_eos=ignore_eos)))

        made = {name: self.attempt(name, partial(make, name)) for name in self.methods[setting]}
        return {name: contestant for name, contestant in made.items() if contestant}

    def measure(self, units: list[tuple[Setting, str]]) -> None:
        """Measure tasks under settings: one target per quantization. Writes: the log."""
        config = self.config
        machine = environment(config.device)
        ceiling = read_bandwidth(config.device, CEILING_RUNS)
        self.ceiling = ceiling.median
        print(told(machine))
        print(f"read bandwidth {ceiling.text(1, 1e-9)} GB/s: the ceiling", flush=True)
        facts = {"config": config.fixed, "environment": machine, "ceiling_bytes_per_s": ceiling}
        target = None
        loaded = None  # quantization of the target
        with tempfile.TemporaryDirectory() as folder, tqdm(unit="round", disable=None) as bar:
            for setting in dict.fromkeys(setting for setting, _ in units):
                if loaded != setting.quant:
                    target = None  # freed before the next one is loaded
                    plain = method_config("none", setting, config)
                    target = load(replace(plain, compile=False))
                    loaded = setting.quant
                contestants = self.contestants(setting, target, Path(folder))
                for task in [task for own, task in units if own == setting]:
                    bar.set_postfix_str(f"{task}, {setting}")
                    rows = self.measure_task(setting, task, contestants, target, bar)
                    self.log.add([row | facts for row in rows])
                torch.compiler.reset()  # else the next setting's steps would first try these graphs

    def measure_task(
        self,
        setting: Setting,
        task: str,
        contestants: dict[str, Contestant],
        target: Engine,
        bar: tqdm,
    ) -> list[dict[str, Any]]:
        """Measure a task. Returns: the rows that the log lacks. Writes: contestants that fail go"""
        prompts = fitting(target, task, self.tasks[task], self.config.max_new_tokens)
        size = setting.batch_size
        runs = {}
        for name in [*contestants]:
            run = self.attempt(name, partial(warmed, contestants[name], prompts, size))
            if run is None:
                del contestants[name]
            else:
                runs[name] = run
        rounds: list[dict[str, Outcome]] = []
        for number in [*range(-(-len(prompts) // size))] * self.config.rounds:
            if not runs or (self.over([*self.tasks].index(task)) and rounds):
                break
            rounds.append(run_round(runs, contestants, number))
            bar.update()
        key = {"task": task} | setting._asdict()
        key |= {
            "prompts": min(len(prompts), len(rounds) * size),
            "left_out": len(self.tasks[task]) - len(prompts),
        }
        return [
            key | {"method": name} | summary(name, contestants[name], rounds, self.ceiling)
            for name in self.lacking(setting, task)
            if name in runs
        ]


def warmed(contestant: Contestant, prompts: list[list[str]], size: int) -> Run:
    """Return the run of a contestant over prompts, after one that is not timed."""
    contestant.start(prompts[:size])(0)
    return contestant.start(prompts)


def measure(config: SpeedOptions, over: Callable[[int], bool] = lambda task: False) -> list[dict]:
    """Measure the lines that the log lacks. Returns: all of its rows. over: of `Bench`

    Raises: ValueError, also for methods that failed.
    """
    config = replace(config, device=pick_device(config.device))
    if config.threads:
        torch.set_num_threads(config.threads)
    bench = Bench(config, over)
    pairs = [(setting, task) for setting in bench.methods for task in bench.tasks]
    units = [pair for pair in pairs if bench.lacking(*pair)]
    rows = bench.log.rows
    if rows:
        lacking = sum(len(bench.lacking(*pair)) for pair in units)
        print(f"{config.json} holds {len(rows)} lines; {lacking} are to be measured")
    if units:
        bench.measure(units)
    if bench.failed:
        if rows:
            write_report(rows)
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in bench.failed.items()))
    return rows


def with_names_fetched(config: SpeedOptions) -> SpeedOptions:
    """Return options that name files where they name models, and the published head of one."""
    named = with_files(GenerateConfig(checkpoint=config.checkpoint, head=config.head))
    return replace(config, checkpoint=named.checkpoint, head=named.head)


def bench(config: BenchOptions) -> None:
    """Measure a model's rates and print their table. Writes: the file of --json, if one is named.

    Raises: ValueError, also where a contestant failed.
    """
    named = with_files(GenerateConfig(checkpoint=config.checkpoint))
    config = replace(config, checkpoint=named.checkpoint)
    methods = ["none", DEFAULT_DRAFT]
    try:
        check_peer(config.peer)
        methods.insert(0, config.peer)
    except ValueError as error:
        log_note(f"without llama.cpp: {error}", logging.INFO)
    options = {name: value for name, value in asdict(config).items() if name != "json"}
    chat = template_name(Path(config.checkpoint), named)
    rows = measure(SpeedOptions(**options, head=named.head, chat=chat, methods=",".join(methods)))
    form = config.dtype or "its bits"
    if config.quant != "none":
        form = config.quant
    made = []
    for row in means([of_log(row) for row in rows]):
        engine = row["engine"].partition(":")[0]  # of llama.cpp each format is one column
        made.append(row | {"format": form, "engine": engine})
    if config.json:
        file = Path(config.json)
        known = read_rows(file) if file.is_file() else []
        write_text(config.json, json.dumps(known + made, indent=1))
    print(table(made))


def recommended(config: SpeedOptions, rows: list[dict]) -> str:
    """Return the method of a log with the most tokens per second, and its command."""

    def rate(row: dict) -> float:
        mine = [other for other in rows if other["method"] == row["method"]]
        return sum(x["tokens"] for x in mine) / max(sum(x["decode_s"] for x in mine), 1e-9)

    best = max((row for row in rows if not is_peer(row["method"])), key=rate)
    setting = Setting(*(best[key] for key in Setting._fields))
    return f"recommended, {best['method']}:\n    {command(best['method'], setting, config)}"


def run(config: SpeedOptions) -> None:
    """Measure, or read a log, and print the tables."""
    if config.report:
        write_report(Log(config.report, "--report", fault_of).rows)
        return
    config = with_names_fetched(config)
    rows = measure(config)
    write_report(rows, recommended(config, rows) if config.methods == "all" else "")
