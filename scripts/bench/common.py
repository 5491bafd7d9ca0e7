"""Shared by the cases of measure.py: turns, one clock, the machine, rows and tables.

1. Contestants run in turn, round after round, so that drift of the machine hits all of them. Ratios
   are taken inside a round.
2. Rows are appended to a file of JSON lines. A line that a kill tore is dropped, and measured
   again.
3. The ceiling is the read bandwidth of a buffer that no cache holds. A process of its own measures
   it, so that the buffer does not count in any peak memory.

Not here: the measurements themselves.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from backends.library import is_plain, tiles_in_use
from files.io import read_jsonl
from model import Transformer
from run import stats
from run.options import ROOT
from steps import Project

CEILING_BYTES = {"cpu": 10**9, "cuda": 8 * 10**9}  # summed up for the bandwidth; no cache holds it
TIMES = {  # tables of `times_by_rows`: the key that a row needs, and its cell
    "ms (least)": ("ms", "{ms:.4g} ({least_ms:.4g})"),
    "GB/s": ("gb_per_s", "{gb_per_s:.1f}"),
    "over the time of the fewest rows": ("over_rows", "{over_rows:.2f}"),
    "over the time of the first": ("over_first", "{over_first:.2f}"),
}


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

    def text(self, digits: int, scale: float = 1.0) -> str:
        """Format as `median (low-high)`, scaled."""
        median, low, high = (f"{x * scale:.{digits}f}" for x in self)
        return f"{median} ({low}-{high})"


# ----------------------------------------------------------------------------------- turns and time


def in_turn(
    contestants: dict[Any, Callable[[], Any]], rounds: int, title: str
) -> dict[Any, list[Any]]:
    """Run all contestants once to warm up, then in rounds, in an order that rotates.

    Returns: the results of the rounds, by contestant.
    """
    names = list(contestants)
    results: dict[Any, list[Any]] = {name: [] for name in names}
    bar = tqdm(total=(rounds + 1) * len(names), desc=title, unit="run", disable=None)
    for number in range(rounds + 1):
        first = number * 7 % len(names)  # so that neighbours change
        for name in names[first:] + names[:first]:
            result = contestants[name]()
            bar.update()
            if number:
                results[name].append(result)
    bar.close()
    return results


def seconds_of(work: Callable[[], Any], device: str) -> float:
    """Time some work. On a GPU two events of its stream do, without the host's launches."""
    if not device.startswith("cuda"):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3


def times_by_rows(
    report: Report,
    title: str,
    runs: dict[tuple[str, int], Callable[[], float]],
    rounds: int,
    beside: dict[str, str],
    read_bytes: dict[tuple[str, int], int],
) -> None:
    """Run contestants in turn at every number of rows. Writes: rows of the report; prints tables.

    runs: return seconds, by contestant and rows; beside: the contestant that one is compared with
    read_bytes: of a run, where a rate is asked for
    """
    taken = in_turn(runs, rounds, title)
    least_rows = min(rows for _, rows in runs)
    found = []
    for (name, rows), seconds in taken.items():
        series = Series.quartiles(seconds)
        row = {
            "of": title,
            "name": name,
            "rows": rows,
            "ms": series.median * 1e3,
            "quartiles_ms": [series.low * 1e3, series.high * 1e3],
            "least_ms": min(seconds) * 1e3,
            "over_rows": statistics.median(map(truediv, seconds, taken[name, least_rows])),
        }
        if (name, rows) in read_bytes:
            row["gb_per_s"] = read_bytes[name, rows] / series.median / 1e9
        if beside[name] != name:
            first = taken[beside[name], rows]
            row["over_first"] = statistics.median(map(truediv, seconds, first))
        found.append(row)
    report.add(*found)
    for what, (key, form) in TIMES.items():
        cells = {(r["name"], f"{r['rows']} rows"): form.format(**r) for r in found if key in r}
        if cells:
            print(f"\n{title}, {what}\n\n{pivot('', cells)}", flush=True)


# ------------------------------------------------------------------------------------------ machine


def read_bandwidth(device: str, runs: int, size: int = 0) -> Series:
    """Measure the bytes per second of summing up a large buffer, in a process of its own.

    size: of the buffer (bytes); 0: `CEILING_BYTES`
    Raises: ValueError when that fails.
    """
    size = size or CEILING_BYTES[device.partition(":")[0]]
    numbers = (runs, torch.get_num_threads(), size)
    code = (
        "import sys; from scripts.bench import common; "
        "print(*common._bandwidth(sys.argv[1], *map(int, sys.argv[2:])))"
    )
    command = [sys.executable, "-c", code, device, *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"the bandwidth of {device} cannot be measured: {reason}")
    return Series.of([float(x) for x in done.stdout.split()])


def _bandwidth(device: str, runs: int, threads: int, size: int) -> list[float]:
    torch.set_num_threads(threads)
    buffer = torch.ones(size // 4, device=device)
    rates = [buffer.nbytes / seconds_of(buffer.sum, device) for _ in range(runs + 1)]
    return rates[1:]  # the first warms up


def pass_bytes(target: Transformer) -> float:
    """Return the bytes of weights that a pass reads at least.

    Of an untied embedding that is one row, and of a mixture the experts of one token.
    """
    c = target.config
    (embedding, *_) = tensors_of(target.embedding)  # a weight, or packed blocks
    tied = any(x is embedding for x in tensors_of(target.lm_head))
    skipped = 0 if tied else embedding.nbytes * (1 - 1 / c.vocab_size)
    for layer in target.layers if c.n_experts else ():
        stacks = [s.name for s in layer.steps if isinstance(s, Project) and s.experts]
        experts = sum(x.nbytes for name in stacks for x in tensors_of(getattr(layer, name)))
        skipped += (1 - c.experts_per_token / c.n_experts) * experts
    return sum(x.nbytes for x in tensors_of(target)) - skipped


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and the buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def environment(device: str) -> dict[str, Any]:
    """Return `stats.environment`, the unit of AMX tiles, and whether definitions run."""
    named = {}
    if not device.startswith("cuda") and tiles_in_use() != "none":
        named["tiles"] = tiles_in_use()
    if is_plain():
        named["plain"] = "all"
    return stats.environment(device) | named


# ---------------------------------------------------------------------------------- rows and tables


class Log:
    """A file of JSON lines, appended to as they are measured; `rows` holds its content."""

    def __init__(self, path: str, flag: str, check: Callable[[dict], str] = lambda row: ""):
        """path: "" keeps the rows in memory only; flag: the one that named the file

        check: returns the fault of a row; "" when it has none
        Raises: ValueError for a file that is no such log. Writes: the file, when its last line is
        torn.
        """
        self.path = Path(path) if path else None
        self.rows: list[dict] = []
        if self.path is None or not self.path.is_file():
            return
        whole, end, torn = self.path.read_bytes().rpartition(b"\n")
        if torn:
            print(f"note: the last line of {path} is torn; it is dropped", file=sys.stderr)
            os.truncate(self.path, len(whole + end))
        if whole:
            self.rows = read_jsonl(self.path, flag, check)

    def add(self, rows: list[dict]) -> None:
        """Append rows, in one write."""
        self.rows += rows
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())


class Report:
    """The rows of a measurement, each with the machine and further facts."""

    def __init__(self, json: str, device: str = "cpu", threads: int = 0, **further: Any):
        """Print the machine. json: the file of the rows; threads: of torch; 0: its default"""
        if threads:
            torch.set_num_threads(threads)
        self.log = Log(json, "--json")
        self.facts = {"environment": environment(device)} | further
        print(stats.told(self.facts["environment"]))

    def add(self, *rows: dict[str, Any]) -> None:
        """Append rows to the file."""
        self.log.add([row | self.facts for row in rows])


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Group rows by the values under some names, in their order."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table."""
    first, *lines = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len([*head]), *lines])


def pivot(title: str, cells: dict[tuple[str, str], str]) -> str:
    """Return a table of cells by the names of a row and a column; the title is over the rows."""
    columns = dict.fromkeys(column for _, column in cells)
    lines = [
        [row, *(cells.get((row, column), "") for column in columns)]
        for row in dict.fromkeys(row for row, _ in cells)
    ]
    return markdown([title, *columns], lines)
