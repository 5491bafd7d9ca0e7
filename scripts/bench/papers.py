"""Reproduce the papers' tables for any target and head: speedup, tau, n-alpha and times, by task.

    python scripts/bench/papers.py --json bench.jsonl --plots plots
    python scripts/bench/papers.py --methods none,eagle:dynamic:topk --temperatures 0.6,1 \\
        --batch_sizes 1,4 --json bench.jsonl
    python scripts/bench/papers.py --report bench.jsonl --plots plots

1. A method is a drafter, then after colons a tree, a way to pick children, `residual`, or any field
   of GenerateConfig (run/options.py), also those that are no flags:
   `eagle:dynamic:topk:tree_size=30`. It becomes a command line, which is refused where generate.py
   would refuse it. `all` stands for every method whose files are at hand: those that need none, the
   bundled head, and the heads, draft models and datastores in the directory `--heads`.
2. The target is loaded once per quantization. The first prompts of a task are decoded untimed with
   a trace: a warm-up, and the calibration of the draft's confidence (EAGLE-2 Figure 6).
3. All methods decode the same prompts in turn, prompt group by prompt group, in an order that
   rotates. A speedup is taken between neighbours in time: decode tokens per second over those of
   `none`. Prefill and compilation are apart.
4. `--json` gets one line per task and method, once measured; report.py makes tables and plots of
   it alone. The same command resumes a killed run at its unfinished task.
5. `--replays` repeats one cycle of each method from the same state (replays.py). A method that
   is refused or fails is named at the end; the others go on.

tau: emitted tokens per verification, bonus included. n-alpha (EAGLE-1 4.1): on chains, the share of
drafted tokens accepted after n accepted ones. Without `none` there is no speedup, and large batches
measure tau and n-alpha quickly.
Not here: other runtimes (peers.py), and the meaning of the numbers (benchmarks/README.md).
"""

from __future__ import annotations

import math
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.head_kinds import gguf_head_kind, head_kind
from files.io import check_outputs, is_gguf
from options import log_note
from run.methods import MTP, head_kinds
from run.options import DEMO, GenerateConfig, pick_device
from run.parsing import SWITCHES, by_names, one_line_errors, option, parse, read_settings


@dataclass(frozen=True)
class BenchConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the target")
    eagle: str = option("", "the head of methods of its kind; default: the one next to the target")
    tasks: str = option(
        "demo,gsm8k,humaneval",
        "names in data/eval, or JSONL files of id, task and turns, or in a published layout "
        "(scripts/bench/tasks.py)",
    )
    limit: int = option(20, "prompts per task; 0: all", least=0)
    methods: str = option(
        "none,eagle:chain:tree_depth=5,eagle:static,eagle:dynamic", "who drafts, and how; see above"
    )
    heads: str = option("", "directory of heads, draft models and datastores, for --methods all")
    temperatures: str = option("0", "0 is greedy")
    batch_sizes: str = option("1", "sequences decoded together")
    quant: str = option("none", "weight formats of the target, each loaded in turn")
    options: str = option(
        "", "further options of generate.py for all methods, as top_p=0.9,context=1024,ignore_eos"
    )
    chat: str | None = option(
        None, "apply a chat template: the model's, or the one named", optional=True
    )
    max_new_tokens: int = option(128, "tokens per turn")
    traced: int = option(
        4,
        "prompts per task that are first decoded untimed, to warm up and for the calibration",
        least=1,
    )
    compile: bool | None = option(None, "on CUDA, compile the steps of a cycle")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    json: str = option(
        "", "write one line per task and method; what this file holds already is not measured again"
    )
    report: str = option("", "measure nothing; make tables and plots of such a file")
    plots: str = option("", "directory to write plots to")
    replays: int = option(
        0, "cycles of every method from one state, whose results are compared", least=0
    )

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        for name in ("tasks", "methods", "temperatures", "batch_sizes", "quant"):
            value = getattr(self, name)
            parts = value.split(",")
            if len(set(parts)) < len(parts) or "" in parts:
                raise ValueError(f"--{name} must be a list of different values; it is {value!r}")
        if self.heads and not (self.methods == "all" and Path(self.heads).is_dir()):
            raise ValueError(
                "--heads must be a directory, and goes with --methods all; it is "
                f"{self.heads}, and --methods is {self.methods}"
            )
        if self.report and self.json:
            raise ValueError("--report measures nothing; it cannot go with --json")
        check_outputs({"--json": self.json})

    @property
    def fixed(self) -> dict[str, Any]:
        """The options that all lines of a log share; the rest is the matrix."""
        options = {name: value for name, value in asdict(self).items() if name not in MATRIX}
        return options | {name: shown_path(options[name]) for name in ("checkpoint", "eagle")}


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(BenchConfig, "papers.py", __doc__) if __name__ == "__main__" else None

import torch
from tqdm import tqdm

from files.chat import NO_TEMPLATE
from files.checkpoint import WeightFiles
from files.fetch import fetched
from files.head_kinds import own_head
from files.mtp import find_mtp
from run.engine import Engine
from run.generate import Batch, Turn, encode, first_ids, load
from run.stats import Stats, peak_memory_bytes
from scripts.bench.measure import (
    Series,
    draft_options,
    environment,
    pass_bytes,
    read_bandwidth,
    repeated,
    shown_path,
    with_config,
)
from scripts.bench.replays import compare_replays
from scripts.bench.report import write_report
from scripts.bench.row_log import Log
from scripts.bench.tasks import conversations

FORMS = {"gsm8k": "Question: {}\nAnswer:"}  # for base models, as in training; chats get the turns
BINS = 20  # of confidence, in [0, 1]
CEILING_RUNS = 5
MATRIX = (
    "tasks",
    "methods",
    "heads",
    "temperatures",
    "batch_sizes",
    "quant",
    "json",
    "report",
    "plots",
    "replays",
)


class Setting(NamedTuple):
    """Options that all compared methods share."""

    quant: str
    temperature: float
    batch_size: int


class Task(NamedTuple):
    """Prompts of one kind, those that fit."""

    name: str
    prompts: list[list[str]]
    left_out: int


# -------------------------------------------------------------------------------- tasks and methods


def read_tasks(config: BenchConfig) -> dict[str, list[list[str]]]:
    """Read conversations by task, `limit` of each. Raises: ValueError, as `conversations`."""
    tasks = {}
    for task, rows in conversations(config.tasks).items():
        form = FORMS.get(task, "{}") if config.chat is None else "{}"
        kept = rows[: config.limit or None]
        tasks[task] = [[form.format(turn) for turn in turns] for turns in kept]
    return tasks


def fitting(engine: Engine, name: str, prompts: list[list[str]], config: BenchConfig) -> Task:
    """Leave out prompts that are too long. Raises: ValueError when nothing is left."""
    longest = engine.context - config.max_new_tokens
    kept = [turns for turns in prompts if len(encode(engine, turns[:1], [])) <= longest]
    left_out = len(prompts) - len(kept)
    if not kept:
        raise ValueError(
            f"no prompt of {name} has at most {longest} tokens; raise the context "
            "(of papers.py: --options context=4096)"
        )
    if left_out:
        print(
            f"note: {left_out} prompts of {name} have more than {longest} tokens; they are left out"
        )
    return Task(name, kept, left_out)


CHAIN = "chain:tree_depth=3"  # of every trained drafter: the same levels
# the trees of a kind of head; static ones are those of its papers, and a block has none
OF_KIND = {
    "eagle": (CHAIN, "static", "dynamic"),
    "medusa": (CHAIN, "static", "dynamic"),
    "hydra": (CHAIN, "static", "dynamic"),
    "block": (CHAIN, "dynamic"),
    "mtp": (CHAIN, "static", "dynamic"),
    "assistant": (CHAIN, "dynamic"),
}
OF_MODEL = f"model:{CHAIN}"


def methods_of(config: BenchConfig, setting: Setting) -> list[str]:
    """Return the methods of a setting.

    With `all`, a file or directory of `--heads` that no method can use is named and left out.
    Raises: ValueError where all of them are left out.
    """
    if config.methods != "all":
        return config.methods.split(",")
    of_files = (*head_kinds(), "model", "eagle+ngram", "rest")
    draft = next(f for f in fields(GenerateConfig) if f.name == "draft")
    methods = [one for one in draft.metadata["choices"] if one and one not in of_files]
    for kind in ("eagle", MTP):
        if has_head(config.checkpoint, kind):
            methods += [f"{kind}:{tree}" for tree in OF_KIND[kind]]
    if not config.heads:
        return methods
    of_heads = []
    for path in sorted(Path(config.heads).iterdir()):
        try:
            of_heads += methods_of_file(path, setting)
        except (ValueError, OSError) as error:
            note_once(f"left out of --methods all: {error}")
    if not of_heads:
        raise ValueError(f"--heads {config.heads} has no head, draft model or datastore to measure")
    return methods + of_heads


def has_head(checkpoint: str, kind: str) -> bool:
    """Return whether a head of a kind is beside a checkpoint, or an MTP layer in it.

    Raises: ValueError for a checkpoint that cannot be read.
    """
    path = fetched(checkpoint)
    if kind == MTP:
        return find_mtp(path) is not None
    return bool(own_head(path, kind))


@cache
def note_once(text: str) -> None:
    """Log a note, the first time only: the methods are listed for every setting."""
    log_note(text)


def methods_of_file(path: Path, setting: Setting) -> list[str]:
    """Return the methods of a head, a draft model or a datastore: a model also by the papers' rule.

    Raises: ValueError, OSError for what is none of these.
    """
    if path.is_file() and not is_gguf(path):
        return [f"rest:datastore={path}"]
    if is_gguf(path):
        kind = gguf_head_kind(path) or "model"
    else:
        kind = head_kind(path)
        # no model is whole without an embedding, and no head brings one under this name
        if kind == "eagle" and "model.embed_tokens.weight" in WeightFiles(path).readers:
            kind = "model"
    if kind == "model":
        rules = ("", ":residual") if setting.temperature else ("",)
        return [f"{OF_MODEL}{rule}:draft_checkpoint={path}" for rule in rules]
    return [f"{kind}:{tree}:{head_option(path)}" for tree in OF_KIND[kind]]


def head_option(path: Path) -> str:
    """Return the piece of a method that names a head.

    Raises: ValueError for a name that a method cannot hold.
    """
    if set(":,") & set(str(path)):
        raise ValueError(f"the head {path}: a method is divided by : and ,; give it another name")
    return f"head={path}"


def method_config(method: str, setting: Setting, config: BenchConfig) -> GenerateConfig:
    """Return the options of a method. Ends the program on a draft that is not there.

    Raises: ValueError for an option that is not there, and a combination that cannot work.
    """
    draft, *pieces = method.split(":")
    argv = [
        f"--checkpoint={config.checkpoint}",
        f"--device={config.device}",
        f"--max_new_tokens={config.max_new_tokens}",
        f"--draft={draft}",
        f"--temperature={setting.temperature}",
        f"--batch_size={setting.batch_size}",
    ]
    if config.dtype:
        argv.append(f"--dtype={config.dtype}")
    if setting.quant != "none":
        argv.append(f"--quant={setting.quant}")
    named = any(piece.startswith(("head=", "eagle=")) for piece in pieces)
    kind = draft.removesuffix("+ngram")
    if config.eagle and not named and kind == head_kind(Path(config.eagle)):
        argv.append(f"--head={config.eagle}")
    if config.compile:
        argv.append("--compile")
    argv.append(f"--chat={NO_TEMPLATE if config.chat is None else config.chat}")
    texts = [_setting(one) for one in config.options.split(",") if one]
    texts += [_piece(method, piece) for piece in pieces]
    chosen = parse(GenerateConfig, "papers.py", "", argv)
    given = by_names(GenerateConfig, read_settings(GenerateConfig, texts))
    chosen = replace(chosen, **given)
    chosen.check()
    return chosen


def _setting(text: str) -> str:
    """Return name=value for it, or for the name of an option that is true or false."""
    return text if "=" in text else f"{text}=true"


def _piece(method: str, piece: str) -> str:
    """Return a piece of a method as name=value, an option of GenerateConfig."""
    if "=" in piece:
        return piece
    for f in fields(GenerateConfig):
        if f.name in ("tree", "children", "accept") and piece in f.metadata["choices"]:
            return f"{f.name}={piece}"
        if f.type in SWITCHES and f.name == piece:
            return _setting(piece)
    raise ValueError(
        f"--methods: {method}: {piece} is no tree, no way to pick children and no option of "
        "generate.py; use for example eagle:dynamic:topk:tree_size=30"
    )


# ---------------------------------------------------------------------------------------- measuring


def calibration(trace: list[dict]) -> list[list[float]]:
    """Count acceptance by the draft's confidence in a token (EAGLE-2 Figure 6).

    Only nodes whose parent was accepted count; the confidence is exp(value - value of the parent).
    Returns: per bin of confidence: nodes, accepted ones, sum of confidence.
    """
    bins = [[0, 0, 0.0] for _ in range(BINS)]
    for row in trace:
        values = [0.0, *row.get("values", [])]
        accepted = {0, *row["path"]}
        for node, (parent, value) in enumerate(zip(row["parents"], values[1:]), 1):
            if value is not None and parent in accepted:
                confidence = math.exp(min(value - values[parent], 0.0))
                one = bins[min(int(confidence * BINS), BINS - 1)]
                one[0] += 1
                one[1] += node in accepted
                one[2] += confidence
    return bins


def traced(engine: Engine, prompts: list[list[str]]) -> list[list[float]]:
    """Decode prompts untimed, with a trace. Returns: their calibration."""
    batch = Batch(replace(engine, config=replace(engine.config, trace="-")), prompts)
    for group in batch.groups:
        batch.decode_all(group)
    return calibration(batch.trace)


def run_group(batch: Batch, number: int) -> tuple[dict[str, Any], list[Turn]]:
    """Decode one group of prompts. Returns: counts and times; the decoded turns."""
    stats = Stats()
    batch.stats = stats
    known = len(batch.entries)
    batch.decode_all(batch.groups[number])
    entries = batch.entries[known:]
    lengths: dict[int, list[int]] = {}  # accept lengths by sequence
    sequences = (seq for live in stats.live_sequences for seq in live)
    for seq, length in zip(sequences, stats.accept_lengths):
        lengths.setdefault(seq, []).append(length)
    outcome = {
        "tokens": stats.tokens,
        "decode_s": stats.decode_s,
        "prefill_s": stats.prefill_s,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "cycles": len(stats.live_sequences),
        "accept_lengths": list(lengths.values()),
        "repeated": [repeated(entry.tokens) for entry in entries],
    }
    return outcome, entries


def run_round(batches: dict[str, Batch], number: int) -> dict[str, dict[str, Any]]:
    """Decode the same group of prompts with every method, in an order that rotates.

    Returns: counts and times by method.
    """
    names = list(batches)
    first = number % len(names)
    done = {name: run_group(batches[name], number) for name in names[first:] + names[:first]}
    outcomes = {name: done[name][0] for name in names}
    for name in names:
        # the residual rule draws other tokens
        exact = "none" in done and batches[name].engine.config.accept == "exact"
        pairs = zip(done[name][1], done["none"][1]) if exact else ()
        outcomes[name]["identical"] = [mine.tokens == plain.tokens for mine, plain in pairs]
    return outcomes


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


def speed(name: str, rounds: list[dict]) -> dict[str, Any]:
    """Return tokens per second, speedup over `none` in the same round, and times per cycle."""
    mine = [outcomes[name] for outcomes in rounds]
    rates = [_rate(one) for one in mine]
    plain = [_rate(outcomes["none"]) if "none" in outcomes else 0.0 for outcomes in rounds]
    ratios = [r / p for r, p in zip(rates, plain) if r and p]
    rate = Series.quartiles([r for r in rates if r] or [0.0])
    speedup = {"speedup": None, "speedup_quartiles": None}
    if ratios:
        ratio = Series.quartiles(ratios)
        speedup = {"speedup": ratio.median, "speedup_quartiles": ratio[1:]}
    total = {
        key: sum(one[key] for one in mine)
        for key in ("decode_s", "draft_s", "verify_s", "prefill_s", "tokens")
    }
    cycles = max(sum(one["cycles"] for one in mine), 1)
    rest_s = total["decode_s"] - total["draft_s"] - total["verify_s"]
    return {
        "tokens_per_s": rate.median,
        "tokens_per_s_quartiles": rate[1:],
        **speedup,
        "draft_ms": total["draft_s"] / cycles * 1e3,
        "verify_ms": total["verify_s"] / cycles * 1e3,
        "rest_ms": rest_s / cycles * 1e3,
        **total,
        "cycles": cycles,
        "runs": len(mine),
    }


def _rate(outcome: dict[str, Any]) -> float:
    """Return tokens per second; 0 where the first token was the last one."""
    return outcome["tokens"] / outcome["decode_s"] if outcome["decode_s"] else 0.0


def summary(name: str, engine: Engine, rounds: list[dict], ceiling: float) -> dict[str, Any]:
    """Return the measured part of a line of the log."""
    mine = [outcomes[name] for outcomes in rounds]
    lengths = [row for one in mine for row in one["accept_lengths"]]
    accepted = acceptance(lengths, engine.drafter.depth)
    timed = speed(name, rounds)
    same = [x for one in mine for x in one["identical"]]
    chain = engine.option("draft") in (*head_kinds(), "model") and engine.drafter.width == 1
    pass_s = timed["verify_ms"] / 1e3
    return {
        **accepted,
        **timed,
        "n_alpha": accepted["by_depth"] if chain else None,
        "identical": sum(same) / len(same) if same else None,
        "repeated": statistics.mean(x for one in mine for x in one["repeated"]),
        "verify_of_ceiling": pass_bytes(engine.target, 0) / pass_s / ceiling if pass_s else None,
        "draft": draft_options(engine),
        "nodes": engine.drafter.size,
        "compiled": bool(engine.option("compile")),
        "compile_s": engine.compile_s,
        "load_s": engine.load_s,
        "peak_memory_bytes": peak_memory_bytes(engine.device.type),
    }


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

    config: BenchConfig
    tasks: dict[str, list[list[str]]]
    log: Log
    machine: dict[str, Any]
    ceiling: Series  # bytes per second
    failed: dict[str, str]  # the reason, by method
    over: Callable[[int], bool]  # as in `run`

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
        """Return the methods that run for a unit: `none`, the reference, and the lacking ones."""
        plain = "none" in methods_of(self.config, unit.setting) and "none" not in unit.lacking
        return ["none", *unit.lacking] if plain else unit.lacking


def settings_of(config: BenchConfig) -> list[Setting]:
    """Return the matrix of settings. Raises: ValueError for a value that is no number."""
    try:
        temperatures = [float(t) for t in config.temperatures.split(",")]
        sizes = [int(b) for b in config.batch_sizes.split(",")]
    except ValueError:
        given = f"--temperatures {config.temperatures} and --batch_sizes {config.batch_sizes}"
        raise ValueError(f"{given} must be lists of numbers, as 0,1 and 1,4") from None
    return [Setting(q, t, b) for q in config.quant.split(",") for t in temperatures for b in sizes]


def open_log(path: str, flag: str) -> Log:
    """Open a log of this program. Raises: ValueError for another file."""
    log = Log(path, flag)
    for number, row in enumerate(log.rows, 1):
        if "ceiling_bytes_per_s" not in row or "calibration" not in row:
            raise ValueError(
                f"{flag}: {path} line {number} is no line of papers.py; name another file"
            )
    return log


def units_to_do(config: BenchConfig, tasks: dict[str, list[list[str]]], log: Log) -> list[Unit]:
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


def measure_unit(bench: Bench, unit: Unit, engines: dict[str, Engine], bar: tqdm) -> None:
    """Measure a task, and log it.

    Writes: `engines`, from which a method that fails is dropped.
    """
    config = bench.config
    methods = [name for name in bench.methods(unit) if name in engines]
    if not methods:
        return
    task = fitting(engines[methods[0]], unit.task, bench.tasks[unit.task], config)
    bar.set_postfix_str(f"{task.name}, T {unit.setting.temperature:g}, B {unit.setting.batch_size}")
    prompts = task.prompts[: config.traced]
    calibrations = {}
    for name in methods:
        counted = bench.attempt(name, partial(traced, engines[name], prompts))
        if counted is None:
            del engines[name]
        else:
            calibrations[name] = counted
    batches = {name: Batch(engines[name], task.prompts) for name in calibrations}
    if not batches:
        return
    number_of_task = list(bench.tasks).index(unit.task)
    groups = next(iter(batches.values())).groups
    rounds: list[dict] = []
    for number in range(len(groups)):
        if bench.over(number_of_task) and rounds:
            break
        rounds.append(run_round(batches, number))
        bar.update()
    lines = []
    for name in filter(batches.get, unit.lacking):
        measured = summary(name, engines[name], rounds, bench.ceiling.median)
        context = {
            "calibration": calibrations[name],
            "prompts": sum(map(len, groups[: len(rounds)])),
            "left_out": task.left_out,
            "config": config.fixed,
            "environment": bench.machine,
            "ceiling_bytes_per_s": bench.ceiling,
            "failed_captures": failed_captures(engines[name]),
        }
        lines.append(unit.key(name) | measured | context)
    bench.log.add(lines)


def failed_captures(engine: Engine) -> int:
    """Count the steps of finished sessions whose capture as a graph failed."""
    replays = [step for buffers in engine.free for step in buffers.replays.values()]
    return sum(step.capture_failed for step in replays)


def measure(bench: Bench, units: list[Unit]) -> None:
    """Measure the units: one target per quantization, one set of engines per setting."""
    sizes = {name: len(prompts) for name, prompts in bench.tasks.items()}
    rounds = sum(-(-sizes[unit.task] // unit.setting.batch_size) for unit in units)
    with tqdm(total=rounds, unit="round", disable=None) as bar:  # an error's line comes below it
        _measure(bench, units, bar)


def _measure(bench: Bench, units: list[Unit], bar: tqdm) -> None:
    target = None
    loaded = None  # quantization of the target
    preparing = "compiling" if bench.config.compile else "preparing"
    for setting in dict.fromkeys(unit.setting for unit in units):
        mine = [unit for unit in units if unit.setting == setting]
        if loaded != setting.quant:
            target = None  # freed before the next one is loaded
            plain = method_config("none", setting, bench.config)
            target = load(replace(plain, compile=False))
            loaded = setting.quant
        engines: dict[str, Engine] = {}
        for name in dict.fromkeys(m for unit in mine for m in bench.methods(unit)):
            bar.set_postfix_str(f"{preparing} {name}")
            chosen = method_config(name, setting, bench.config)
            made = bench.attempt(name, partial(with_config, target, chosen))
            if made is not None:
                engines[name] = made
        for unit in mine:
            measure_unit(bench, unit, engines, bar)
        prompt = bench.tasks[mine[0].task][0]
        replays = bench.config.replays
        if replays:
            for name, engine in engines.items():
                compare = partial(compare_replays, name, engine, first_ids(engine, prompt))
                bench.attempt(name, partial(compare, replays))
        torch.compiler.reset()  # else the next setting's steps would first try these graphs


def header_lines(bench: Bench) -> Iterator[str]:
    """Yield the conditions of the measurement."""
    config = bench.config
    yield ", ".join(f"{key} {value}" for key, value in bench.machine.items())
    dtype = config.dtype or "of the checkpoint"
    yield f"checkpoint {shown_path(config.checkpoint)}, dtype {dtype}, quantization {config.quant}"
    yield f"tasks {', '.join(bench.tasks)}; B = {config.batch_sizes}, T = {config.temperatures}"
    yield f"read bandwidth {bench.ceiling.text(1e-9, 1)} GB/s: the ceiling"


def run(config: BenchConfig, over: Callable[[int], bool] = lambda task: False) -> list[dict]:
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
        measure(bench, units)
        if bench.failed:
            if log.rows:
                write_report(log.rows, config.plots)
            reasons = "; ".join(f"{name}: {reason}" for name, reason in bench.failed.items())
            raise ValueError(reasons)
    return log.rows


def main() -> None:
    """Run the command line."""
    config = COMMAND or parse(BenchConfig, "papers.py", __doc__)
    with one_line_errors("papers.py"):
        config.check()
        rows = open_log(config.report, "--report").rows if config.report else run(config)
        write_report(rows, config.plots)


if __name__ == "__main__":
    main()
