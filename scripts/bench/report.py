"""Tables and plots of a benchmark, from its log alone (the JSON lines of papers.py).

1. `tables`: Markdown; a table per temperature, batch size and quantization; a row per task and
   method, and the mean over tasks as in the papers; a line that explains each method's speedup.
   Spreads are quartiles over prompts, errors of tau standard errors over prompts.
2. `plots`: acceptance by depth; calibration of the draft's confidence (EAGLE-2 Figure 6). Panels
   are temperatures, batch sizes and quantizations. Plots add up tasks.

Not here: measuring.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from files.io import replace_file
from run.stats import explain

ALPHAS = 5  # 0-alpha to 4-alpha, as in EAGLE-1
COLUMNS = (
    "task", "method", "speedup", "tau", "0..4-alpha", "tokens/s", "ms draft", "verify", "rest",
    "of ceiling", "identical", "repeated 8-grams", "prompts",
)  # fmt: skip
COLORS = (  # of methods; Okabe and Ito
    "#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442",
)  # fmt: skip
PARTS = ("draft", "verify", "rest")  # of a cycle
BRIEF = (  # columns of the final JSON
    "task", "method", "quant", "temperature", "batch_size", "tau", "tau_error", "tokens_per_s",
    "speedup",
)  # fmt: skip


class Panel(NamedTuple):
    """The rows of one setting."""

    title: str
    rows: list[dict[str, Any]]

    @property
    def tasks(self) -> list[str]:
        """The tasks in the order of the log."""
        return list(dict.fromkeys(row["task"] for row in self.rows))

    @property
    def methods(self) -> dict[str, list[dict]]:
        """Rows by method."""
        names = dict.fromkeys(row["method"] for row in self.rows)
        return {name: [row for row in self.rows if row["method"] == name] for name in names}


def panels(rows: list[dict]) -> list[Panel]:
    """Group rows by quantization, temperature and batch size."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        setting = (row["quant"], row["temperature"], row["batch_size"])
        groups.setdefault(setting, []).append(row)
    return [
        Panel(f"T = {t:g}, B = {b}, quantization {q}", mine) for (q, t, b), mine in groups.items()
    ]


# ------------------------------------------------------------------------------------------- tables


def tables(rows: list[dict]) -> Iterator[str]:
    """Yield Markdown, line by line."""
    for machine in {json.dumps(row["environment"] | row["config"]): row for row in rows}.values():
        ceiling = {"read bandwidth": f"{machine['ceiling_bytes_per_s'][0] / 1e9:.1f} GB/s"}
        # both may name the device; the processor's name says more
        values = machine["config"] | machine["environment"] | ceiling
        yield ", ".join(
            f"{name} {value}" for name, value in values.items() if value not in ("", None, False)
        )
    for panel in panels(rows):
        yield f"\n### {panel.title}\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|" + "---|" * len(COLUMNS)
        for task in panel.tasks:
            yield from (
                f"| {' | '.join(cells(row))} |" for row in panel.rows if row["task"] == task
            )
        if len(panel.tasks) > 1:
            yield from (mean_row(method, mine) for method, mine in panel.methods.items())
        peak = max(row["peak_memory_bytes"] for row in panel.rows) / 1e9
        compiling = ", ".join(
            f"{name} {mine[0]['compile_s']:.1f} s" for name, mine in panel.methods.items()
        )
        for name, mine in panel.methods.items():
            if name != "none" and "none" in panel.methods:
                yield f"\n{name}: {explained(mine, panel.methods['none'])}"
        compiled = all(row["compiled"] for row in panel.rows)
        how = f"Compiled ({compiling}, not counted above)" if compiled else "Not compiled"
        yield f"\n{how}; peak memory of the process {peak:.2f} GB."


def explained(rows: list[dict], plain: list[dict]) -> str:
    """Return the line of `stats.explain` over the tasks. plain: the rows of `none`"""
    keys = ("tokens", "cycles", "decode_s", "draft_s", "verify_s")
    tasks = {row["task"] for row in rows} & {row["task"] for row in plain}
    mine = {key: sum(row[key] for row in rows if row["task"] in tasks) for key in keys}
    none = {key: sum(row[key] for row in plain if row["task"] in tasks) for key in keys}
    if not mine["cycles"] or not none["cycles"] or not mine["decode_s"]:
        return "nothing was decoded"
    mine["tokens_per_s"] = mine["tokens"] / mine["decode_s"]
    return explain(mine, none["decode_s"] / none["cycles"], none["tokens"] / none["cycles"])


def mean_row(method: str, rows: list[dict]) -> str:
    """Return the row of a method's means over tasks."""
    speedups = [row["speedup"] for row in rows if row["speedup"]]
    tau = sum(row["tau"] for row in rows) / len(rows)
    faster = f"{sum(speedups) / len(speedups):.2f}" if speedups else ""
    empty = " | ".join([""] * (len(COLUMNS) - 4))
    return f"| **mean** | {method} | {faster} | {tau:.2f} | {empty} |"


def cells(row: dict) -> list[str]:
    """Return one row of a table."""
    alphas = " ".join(f"{a:.2f}".lstrip("0") for a in (row["n_alpha"] or [])[:ALPHAS])
    share = row["verify_of_ceiling"]
    identical = row["identical"]
    left_out = f" ({row['left_out']} left out)" if row["left_out"] else ""
    return [
        row["task"],
        row["method"],
        spread(row, "speedup", 2),
        f"{row['tau']:.2f} ± {row['tau_error']:.2f}",
        alphas,
        spread(row, "tokens_per_s", 1),
        *(f"{row[f'{part}_ms']:.2f}" for part in PARTS),
        f"{100 * share:.0f} %" if share else "",
        "" if identical is None else f"{100 * identical:.0f} %",
        f"{row['repeated']:.2f}",
        f"{row['prompts']}{left_out}",
    ]


def spread(row: dict, name: str, digits: int) -> str:
    """Format `median (quartile-quartile)`, or nothing where it was not measured."""
    if row[name] is None:
        return ""
    median, low, high = (f"{x:.{digits}f}" for x in (row[name], *row[f"{name}_quartiles"]))
    return f"{median} ({low}-{high})"


# -------------------------------------------------------------------------------------------- plots


def total_histogram(rows: list[dict]) -> list[int]:
    """Count verifications by accepted length, over tasks."""
    totals = [0] * max(len(row["histogram"]) for row in rows)
    for row in rows:
        for n, count in enumerate(row["histogram"]):
            totals[n] += count
    return totals


def draw_depth(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """Draw the acceptance rate of each level below an accepted one."""
    for name, mine in panel.methods.items():
        counts = total_histogram(mine)
        reached = [sum(counts[n:]) for n in range(len(counts))]
        rate = [after / before for before, after in zip(reached, reached[1:]) if before]
        if rate:
            axis.plot(range(1, len(rate) + 1), rate, "o-", color=colors[name], label=name)
    axis.set(xlabel="depth", ylabel="accepted, if the level above was", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def total_calibration(rows: list[dict]) -> list[list[float]]:
    """Add up bins of confidence over tasks. Returns: nodes, accepted ones, sum of confidence."""
    totals = [[0, 0, 0.0] for _ in rows[0]["calibration"]]
    for row in rows:
        for total, one in zip(totals, row["calibration"]):
            for i, value in enumerate(one):
                total[i] += value
    return totals


def draw_calibration(axis: Any, panel: Panel, colors: dict[str, str]) -> None:
    """Draw acceptance against confidence. The area of a point shows its number of nodes."""
    axis.plot((0, 1), (0, 1), color="#333333", lw=1, ls="--")
    for name, mine in panel.methods.items():
        bins = [one for one in total_calibration(mine) if one[0]]
        if bins:
            x = [confidence / n for n, _, confidence in bins]
            y = [accepted / n for n, accepted, _ in bins]
            most = max(n for n, _, _ in bins)
            areas = [12 + 120 * n / most for n, _, _ in bins]
            axis.plot(x, y, color=colors[name], lw=1, label=name)
            axis.scatter(x, y, areas, color=colors[name], alpha=0.6, lw=0)
    axis.set(xlabel="confidence of the draft", ylabel="acceptance rate", xlim=(0, 1), ylim=(0, 1))


DRAWINGS: dict[str, Callable[[Any, Panel, dict[str, str]], None]] = {
    "acceptance-by-depth": draw_depth,
    "calibration": draw_calibration,
}


def plots(rows: list[dict], folder: Path) -> None:
    """Draw everything. Writes: one PNG per drawing in `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    methods = dict.fromkeys(row["method"] for row in rows if row["method"] != "none")
    colors = {"none": COLORS[0]}
    for i, method in enumerate(methods):
        colors[method] = COLORS[1 + i % (len(COLORS) - 1)]
    every = panels(rows)
    columns = min(len(every), 2)
    lines = -(-len(every) // columns)
    for name, draw in DRAWINGS.items():
        size = (6.5 * columns, 4.2 * lines)  # inches
        figure, axes = plt.subplots(
            lines, columns, figsize=size, squeeze=False, layout="constrained"
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
        fit = max(1, min(3, int(6.5 * columns / longest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=fit, frameon=False)
        replace_file(folder / f"{name}.png", partial(figure.savefig, dpi=110, format="png"))
        plt.close(figure)


def write_report(rows: list[dict], folder: str) -> None:
    """Print the tables and, last, one JSON object. Raises: ValueError when nothing was measured.

    Writes: plots to `folder`, where named.
    """
    if not rows:
        raise ValueError("the log holds no measurement; run papers.py with --json first")
    print("\n".join(tables(rows)))
    if folder:
        plots(rows, Path(folder))
    print(json.dumps({"rows": [{name: row[name] for name in BRIEF} for row in rows]}))
