"""The tables of measure.py speed in Markdown, made of its log alone.

`tables`: one per temperature, batch size and quantization; a row per task and method, and the mean
over tasks as in the papers; a line that explains each method's speedup. Spreads are quartiles over
prompts, errors of tau standard errors over prompts.
Not here: measuring; pictures (pictures.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from run.stats import explain, told
from scripts.bench.cases import is_peer
from scripts.bench.common import Series, grouped, markdown

ALPHAS = 5  # 0-alpha to 4-alpha, as in EAGLE-1
COLUMNS = (
    "task", "method", "speedup", "tau", "0..4-alpha", "tokens/s", "first ms", "ms draft", "verify",
    "rest", "of ceiling", "identical", "repeated 8-grams", "prompts",
)  # fmt: skip
SUMS = ("tokens", "cycles", "decode_s", "draft_s", "verify_s")  # that explain a speedup
BRIEF = (  # columns that the training.json of a head keeps
    "task", "method", "quant", "temperature", "batch_size", "tau", "tau_error", "tokens_per_s",
    "speedup",
)  # fmt: skip


def tables(rows: list[dict]) -> Iterator[str]:
    """Yield Markdown, line by line."""
    for machine in {json.dumps(row["environment"] | row["config"]): row for row in rows}.values():
        ceiling = {"read bandwidth": f"{machine['ceiling_bytes_per_s'][0] / 1e9:.1f} GB/s"}
        # both may name the device; the processor's name says more
        yield told(machine["config"] | machine["environment"] | ceiling)
    for (quant, t, size), mine in grouped(rows, "quant", "temperature", "batch_size").items():
        yield f"\n### T = {t:g}, B = {size}, quantization {quant}\n"
        yield from panel(mine)


def panel(rows: list[dict]) -> Iterator[str]:
    """Yield the table of one setting, and the lines below it."""
    tasks = grouped(rows, "task")
    methods = {name: mine for (name,), mine in grouped(rows, "method").items()}
    shown = [cells(row) for mine in tasks.values() for row in mine]
    if len(tasks) > 1:
        shown += [mean_row(method, mine) for method, mine in methods.items()]
    yield markdown(COLUMNS, shown)
    for name, mine in methods.items():
        if name != "none" and "none" in methods and not is_peer(name):
            yield f"\n{name}: {explained(mine, methods['none'])}"
    how = "Not compiled"
    if all(row["compiled"] for row in rows):
        compiling = (f"{name} {mine[0]['compile_s']:.1f} s" for name, mine in methods.items())
        how = f"Compiled ({', '.join(compiling)}, not counted above)"
    peak = max(row["peak_memory_bytes"] for row in rows) / 1e9
    yield f"\n{how}; peak memory of the process {peak:.2f} GB."


def explained(rows: list[dict], plain: list[dict]) -> str:
    """Return the line of `stats.explain` over the tasks. plain: the rows of `none`"""
    tasks = {row["task"] for row in rows} & {row["task"] for row in plain}
    mine, none = (
        {key: sum(row[key] for row in each if row["task"] in tasks) for key in SUMS}
        for each in (rows, plain)
    )
    if not mine["cycles"] or not none["cycles"] or not mine["decode_s"]:
        return "nothing was decoded"
    mine["tokens_per_s"] = mine["tokens"] / mine["decode_s"]
    return explain(mine, none["decode_s"] / none["cycles"], none["tokens"] / none["cycles"])


def mean_row(method: str, rows: list[dict]) -> list[str]:
    """Return the row of a method's means over tasks."""
    speedups = [row["speedup"] for row in rows if row["speedup"]]
    tau = sum(row["tau"] for row in rows) / len(rows)
    faster = f"{sum(speedups) / len(speedups):.2f}" if speedups else ""
    return ["**mean**", method, faster, f"{tau:.2f}", *[""] * (len(COLUMNS) - 4)]


def cells(row: dict) -> list[str]:
    """Return one row of a table."""
    share = row["verify_of_ceiling"]
    identical = row["identical"]
    left_out = f" ({row['left_out']} left out)" if row["left_out"] else ""
    return [
        row["task"],
        row["method"],
        spread(row, "speedup", 2),
        f"{row['tau']:.2f} ± {row['tau_error']:.2f}",
        " ".join(f"{a:.2f}".lstrip("0") for a in (row["n_alpha"] or [])[:ALPHAS]),
        spread(row, "tokens_per_s", 1),
        f"{row['first_ms']:.0f}",
        *(f"{row[name]:.2f}" for name in ("draft_ms", "verify_ms", "rest_ms")),
        f"{100 * share:.0f} %" if share else "",
        "" if identical is None else f"{100 * identical:.0f} %",
        f"{row['repeated']:.2f}",
        f"{row['prompts']}{left_out}",
    ]


def spread(row: dict, name: str, digits: int) -> str:
    """Format `median (quartile-quartile)`, or nothing where it was not measured."""
    if row[name] is None:
        return ""
    return Series(row[name], *row[f"{name}_quartiles"]).text(digits)


def write_report(rows: list[dict], further: str = "") -> None:
    """Print the tables and further lines.

    Raises: ValueError when nothing was measured.
    """
    if not rows:
        raise ValueError("the log holds no measurement; run measure.py speed with --json first")
    print("\n".join(tables(rows)))
    if further:
        print(f"\n{further}")
