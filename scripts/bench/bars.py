"""Print tokens per second as a Markdown table, and draw the same figures as bars.

1. The file is a JSON list of rows: model, format, engine, tokens_per_s, machine, date and commit;
   also, where several tasks were measured, task, tau and identical (a share). Or it is a log of
   `measure.py speed`, of which these rows are made.
2. The rows of one model, format and machine are a group of bars, in the order of the file; a bar is
   the mean over the tasks. All bars have one scale. Bars of this project are green, others grey.
3. `--out` names the picture, an SVG. The table has a line per group and task and a
   column per engine, and names machine, date and commit.
"""

from __future__ import annotations

import html
import json
import re
import statistics
from pathlib import Path
from typing import Any

from files.io import write_text
from scripts.bench.cases import BarsOptions, is_peer
from scripts.bench.common import Log, markdown

OURS = "gpt-eagle"  # engines of this project begin with it
# of the picture, in pixels
LABEL = 230  # width of the engines' names
BAR = 480  # width of the longest bar
LINE = 22  # height of a bar with its gap
HEAD = 30  # height of a group's title

SpeedRow = dict[str, Any]


def of_log(row: dict[str, Any]) -> SpeedRow:
    """Return the row of a line of a log of `speed`."""
    method = row["method"]
    shape = re.search(r"(?:inflate|random)=([^,]+)", row["config"]["options"])
    drafts = "no draft" if method == "none" else method
    found = {
        "model": shape[1] if shape else Path(row["config"]["checkpoint"]).name,
        "format": row["quant"],
        "engine": method if is_peer(method) else f"{OURS}, {drafts}",
        "machine": row["environment"]["device"],
    }
    same = {name: row[name] for name in ("task", "tokens_per_s", "tau")}
    if row["identical"] is not None:
        same["identical"] = row["identical"]
    return found | same | {name: row["environment"][name] for name in ("date", "commit")}


def read_rows(path: Path) -> list[SpeedRow]:
    """Read the rows. Raises: ValueError."""
    try:
        if path.suffix == ".jsonl":
            rows = [of_log(row) for row in Log(str(path), str(path)).rows]
        else:
            rows = json.loads(path.read_text(encoding="utf-8"))
        table(rows)
        picture(rows)
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read {path} ({reason}); name a JSON list of rows") from None
    return rows


def grouped(rows: list[SpeedRow], *names: str) -> dict[tuple[str, ...], list[SpeedRow]]:
    """Group rows by model, format, machine and further texts, in the order of the file."""
    groups: dict[tuple[str, ...], list[SpeedRow]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "format", "machine"))
        key += tuple(row.get(name, "") for name in names)
        groups.setdefault(key, []).append(row)
    return groups


def mean_rate(rows: list[SpeedRow]) -> float:
    """Return the mean of the rates, in tokens per second."""
    return statistics.mean(row["tokens_per_s"] for row in rows)


def picture(rows: list[SpeedRow]) -> str:
    """Draw the groups below each other, as SVG."""
    bars = grouped(rows, "engine")
    longest = max(map(mean_rate, bars.values()))
    parts = []
    y = 0
    for (model, form, machine), group in grouped(rows).items():
        tasks = len({row.get("task") for row in group})
        counted = f"tokens per second, mean of {tasks} tasks" if tasks > 1 else "tokens per second"
        title = html.escape(f"{model}, {form}, {machine}: {counted}")
        parts.append(f'<text x="8" y="{y + 20}" font-weight="bold">{title}</text>')
        y += HEAD
        for (*key, name), measured in bars.items():
            if key != [model, form, machine]:
                continue
            rate = mean_rate(measured)
            width = BAR * rate / longest
            color = "#2a7" if name.startswith(OURS) else "#bbb"
            engine = html.escape(name)
            at = f'y="{y + 14}"'
            parts += [
                f'<text x="{LABEL - 8}" {at} text-anchor="end">{engine}</text>',
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
                f'<text x="{LABEL + width + 6:.1f}" {at}>{rate:.0f}</text>',
            ]
            y += LINE
        y += LINE // 2
    width = LABEL + BAR + 60
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" font-family="sans-serif" font-size="13">'
    )
    ground = f'<rect width="{width}" height="{y}" fill="#fff"/>'  # readable on dark pages
    return "\n".join([head, ground, *parts, "</svg>"])


def cell(row: SpeedRow) -> str:
    """Return the rate of a row, its tokens a pass, and the share of identical outputs below 1."""
    text = f"{row['tokens_per_s']:.0f}"
    if "tau" in row:
        text += f", {row['tau']:.2f}"
    if row.get("identical", 1) < 1:
        text += f" ({100 * row['identical']:.0f} % identical)"
    return text


def table(rows: list[SpeedRow]) -> str:
    """Return the Markdown table of the groups."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    title = "tokens per second"
    if any("tau" in row for row in rows):
        title += ", tokens a pass"
    lines = []
    for (model, form, machine, task), group in grouped(rows, "task").items():
        rates = {row["engine"]: cell(row) for row in group}
        sources = dict.fromkeys(f"{row['date']}, {row['commit']}" for row in group)
        of = ", ".join(filter(None, (model, form, task)))
        cells = [rates.get(engine, "") for engine in engines]
        lines.append([of, *cells, f"{machine}, {'; '.join(sources)}"])
    return markdown([title, *engines, "machine, date, commit"], lines)


def run(config: BarsOptions) -> None:
    """Print the table; draw the picture, where one is named."""
    rows = read_rows(Path(config.file))
    if config.out:
        write_text(config.out, picture(rows))
    print(table(rows))
