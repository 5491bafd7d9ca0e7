"""Tables and plots of a benchmark, made from its log alone (the JSON lines of papers.py).

1. `tables`: Markdown; a table per temperature, batch size and quantization; a row per task and method, and the mean
   over tasks as in the papers. Spreads are quartiles over prompts, errors of tau standard errors over prompts.
2. `plots`: speedup by task; accepted lengths; acceptance by depth; calibration of the draft's confidence (EAGLE-2
   Figure 6); where a cycle's time goes. Panels are temperatures, batch sizes and quantizations; all but the first
   plot add up tasks.

Not here: measuring.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from files import replace_file, write_text

ALPHAS = 5  # 0-alpha to 4-alpha, as in EAGLE-1
COLUMNS = (
    "task", "method", "speedup", "tau", "0..4-alpha", "tokens/s", "ms draft", "verify", "rest", "of ceiling",
    "identical", "repeated 8-grams", "prompts",
)  # fmt: skip
COLORS = (
    "#4d4d4d",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#f0e442",
)  # Okabe and Ito
PARTS = {"draft": "#88ccee", "verify": "#332288", "rest": "#dddddd"}  # others than the methods have
BRIEF = (
    "task",
    "method",
    "quant",
    "temperature",
    "batch_size",
    "tau",
    "tau_error",
    "tokens_per_s",
    "speedup",
)


class Panel(NamedTuple):
    """What was measured under one setting."""

    title: str
    rows: list[dict[str, Any]]

    @property
    def tasks(self) -> list[str]:
        """In the order of the log."""
        return list(dict.fromkeys(row["task"] for row in self.rows))

    @property
    def methods(self) -> dict[str, list[dict]]:
        """Rows by method."""
        names = dict.fromkeys(row["method"] for row in self.rows)
        return {name: [row for row in self.rows if row["method"] == name] for name in names}


def panels(rows: list[dict]) -> list[Panel]:
    """Rows by quantization, temperature and batch size."""
    keys = dict.fromkeys((row["quant"], row["temperature"], row["batch_size"]) for row in rows)
    return [
        Panel(
            f"T = {t:g}, B = {b}, quantization {q}",
            [
                row
                for row in rows
                if (row["quant"], row["temperature"], row["batch_size"]) == (q, t, b)
            ],
        )
        for q, t, b in keys
    ]


# ----------------------------------------------------------------------------------------------- tables


def tables(rows: list[dict]) -> Iterator[str]:
    """Markdown, line by line."""
    for machine in {json.dumps(row["environment"] | row["config"]): row for row in rows}.values():
        ceiling = machine["ceiling_bytes_per_s"][0] / 1e9
        facts = (
            machine["environment"] | {"read bandwidth": f"{ceiling:.1f} GB/s"} | machine["config"]
        )
        yield ", ".join(
            f"{name} {value}" for name, value in facts.items() if value not in ("", None, False)
        )
    for panel in panels(rows):
        yield f"\n### {panel.title}\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|" + "---|" * len(COLUMNS)
        for task in panel.tasks:
            yield from (
                f"| {' | '.join(cells(row))} |" for row in panel.rows if row["task"] == task
            )
        for method, mine in panel.methods.items() if len(panel.tasks) > 1 else ():
            speedups = [row["speedup"] for row in mine if row["speedup"]]
            tau = mean([row["tau"] for row in mine])
            faster = f"{mean(speedups):.2f}" if speedups else ""
            empty = " | ".join([""] * (len(COLUMNS) - 4))
            yield f"| **mean** | {method} | {faster} | {tau:.2f} | {empty} |"
        peak = max(row["peak_memory_bytes"] for row in panel.rows) / 1e9
        compiling = ", ".join(
            f"{name} {mine[0]['compile_s']:.1f} s" for name, mine in panel.methods.items()
        )
        compiled = all(row["compiled"] for row in panel.rows)
        how = f"Compiled ({compiling}, not counted above)" if compiled else "Not compiled"
        yield f"\n{how}; peak memory of the process {peak:.2f} GB."


def cells(row: dict) -> list[str]:
    """One row of a table."""
    alphas = " ".join(f"{a:.2f}".lstrip("0") for a in (row["n_alpha"] or [])[:ALPHAS])
    share = row["verify_of_ceiling"]
    return [
        row["task"], row["method"], spread(row, "speedup", 2), f"{row['tau']:.2f} ± {row['tau_error']:.2f}", alphas,
        spread(row, "tokens_per_s", 1), *(f"{row[f'{part}_ms']:.2f}" for part in PARTS),
        f"{100 * share:.0f} %" if share else "",
        "" if row["identical"] is None else f"{100 * row['identical']:.0f} %", f"{row['repeated']:.2f}",
        f"{row['prompts']}" + (f" ({row['left_out']} left out)" if row["left_out"] else ""),
    ]  # fmt: skip


def spread(row: dict, name: str, digits: int) -> str:
    """`median (quartile-quartile)`, or nothing where it was not measured."""
    if row[name] is None:
        return ""
    median, low, high = (f"{x:.{digits}f}" for x in (row[name], *row[f"{name}_quartiles"]))
    return f"{median} ({low}-{high})"


def mean(values: list[float]) -> float:
    """Plain mean."""
    return sum(values) / len(values)


# ------------------------------------------------------------------------------------------------ plots


def draw_speedup(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """Speedup by task, with quartiles."""
    methods = {name: mine for name, mine in panel.methods.items() if name != "none"}
    width = 0.8 / max(len(methods), 1)
    for i, (name, mine) in enumerate(methods.items()):
        rows = [row for row in mine if row["speedup"]]
        x = [panel.tasks.index(row["task"]) + (i - (len(methods) - 1) / 2) * width for row in rows]
        y = [row["speedup"] for row in rows]
        off = [
            [abs(row["speedup"] - row["speedup_quartiles"][side]) for row in rows]
            for side in (0, 1)
        ]
        axis.bar(
            x,
            y,
            width * 0.92,
            yerr=off,
            color=colors[name],
            label=name,
            ecolor="#333333",
            capsize=2,
        )
    axis.axhline(1, color="#333333", lw=1, ls="--")
    axis.set_xticks(range(len(panel.tasks)), panel.tasks)
    axis.set(ylabel="speedup over vanilla decoding")


def total_histogram(rows: list[dict]) -> list[int]:
    """Verifications by accepted length, over tasks."""
    longest = max(len(row["histogram"]) for row in rows)
    return [
        sum(row["histogram"][n] for row in rows if n < len(row["histogram"]))
        for n in range(longest)
    ]


def draw_lengths(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """How often how much was accepted."""
    for name, mine in panel.methods.items():
        counts = total_histogram(mine)
        share = [c / max(sum(counts), 1) for c in counts]
        if name != "none":
            axis.plot(range(len(counts)), share, "o-", color=colors[name], label=name)
    axis.set(
        xlabel="accepted tokens, bonus not counted", ylabel="share of verifications", ylim=(0, None)
    )
    axis.xaxis.get_major_locator().set_params(integer=True)


def draw_depth(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """How likely the next level is accepted once one was."""
    for name, mine in panel.methods.items():
        counts = total_histogram(mine)
        reached = [sum(counts[n:]) for n in range(len(counts))]
        rate = [after / before for before, after in zip(reached, reached[1:]) if before]
        if rate:
            axis.plot(range(1, len(rate) + 1), rate, "o-", color=colors[name], label=name)
    axis.set(xlabel="depth", ylabel="accepted, if the level above was", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def draw_calibration(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """Confidence against acceptance; areas show how many nodes a point stands for."""
    axis.plot((0, 1), (0, 1), color="#333333", lw=1, ls="--")
    for name, mine in panel.methods.items():
        bins = [
            [sum(column) for column in zip(*same)]
            for same in zip(*(row["calibration"] for row in mine))
        ]
        bins = [(n, hits, confidence) for n, hits, confidence in bins if n]
        if bins:
            x, y = [c / n for n, _, c in bins], [hits / n for n, hits, _ in bins]
            most = max(n for n, _, _ in bins)
            axis.plot(x, y, color=colors[name], lw=1, label=name)
            axis.scatter(
                x, y, [12 + 120 * n / most for n, _, _ in bins], color=colors[name], alpha=0.6, lw=0
            )
    axis.set(xlabel="confidence of the draft", ylabel="acceptance rate", xlim=(0, 1), ylim=(0, 1))


def draw_times(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """Milliseconds of a cycle, over tasks."""
    names = list(panel.methods)
    cycles = [sum(row["cycles"] for row in panel.methods[name]) for name in names]
    left = [0.0] * len(names)
    for part, color in PARTS.items():
        total = [
            sum(row[f"{part}_ms"] * row["cycles"] for row in panel.methods[name]) for name in names
        ]
        ms = [t / max(c, 1) for t, c in zip(total, cycles)]
        axis.barh(names, ms, left=left, color=color, label=part, height=0.6)
        left = [a + b for a, b in zip(left, ms)]
    for i, total in enumerate(left):
        axis.annotate(
            f"{total:.1f}", (total, i), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axis.set(xlabel="ms per cycle", xlim=(0, 1.12 * max(left, default=1) or 1))
    axis.invert_yaxis()


DRAWINGS: dict[str, Callable[[Any, Panel, dict[str, str]], None]] = {
    "speedup": draw_speedup,
    "accepted-lengths": draw_lengths,
    "acceptance-by-depth": draw_depth,
    "calibration": draw_calibration,
    "time": draw_times,
}


def plots(rows: list[dict], folder: Path) -> None:
    """Draw everything. Writes: one PNG per drawing in `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    methods = dict.fromkeys(row["method"] for row in rows if row["method"] != "none")
    colors = {"none": COLORS[0]} | {
        m: COLORS[1 + i % (len(COLORS) - 1)] for i, m in enumerate(methods)
    }
    every = panels(rows)
    for name, draw in DRAWINGS.items():
        size = (max(6.5, 1.3 * len(every[0].tasks) + 2) if name == "speedup" else 6.5, 4.2)
        columns = min(len(every), 2)
        lines = -(-len(every) // columns)
        figure, axes = plt.subplots(
            lines,
            columns,
            figsize=(size[0] * columns, size[1] * lines),
            squeeze=False,
            layout="constrained",
        )
        for axis, panel in zip(axes.flat, every):
            draw(axis, panel, colors)
            axis.set_title(panel.title, fontsize=10)
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
        for axis in axes.flat[len(every) :]:
            axis.set_visible(False)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        labels = [re.sub(r"=[^:]*/", "=", label) for label in labels]  # names without their folders
        longest = 0.6 + 0.08 * max(map(len, labels), default=0)  # inches
        fit = max(1, min(3, int(size[0] * columns / longest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=fit, frameon=False)
        replace_file(
            folder / f"{name}.png", lambda path: figure.savefig(path, dpi=110, format="png")
        )  # noqa: B023
        plt.close(figure)


def write_report(rows: list[dict], table: str, folder: str) -> None:
    """Print the tables and, last, one JSON object. Writes: the tables to `table`, plots to `folder`, where named.

    Raises: ValueError when nothing was measured.
    """
    if not rows:
        raise ValueError("the log holds no measurement; run papers.py with --json first")
    text = "\n".join(tables(rows))
    print(text)
    if table:
        write_text(table, text)
    if folder:
        plots(rows, Path(folder))
    print(json.dumps({"rows": [{name: row[name] for name in BRIEF} for row in rows]}))
