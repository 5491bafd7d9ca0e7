"""Draw tokens per second as bars, and print the same figures as a Markdown table.

    python scripts/bench/plot_speed.py benchmarks/results/speed.json

1. The file is a JSON list of rows: model, format, engine, tokens_per_s, machine, date and commit.
2. The rows of one model, format and machine are a group of bars, in the order of the file. All bars
   have one scale. Bars of this project are green, those of others grey.
3. The picture is written beside the file as SVG. The table has a line per group and a column per
   engine, and names machine, date and commit.

Not here: the measurements (peers.py, papers.py).
"""

from __future__ import annotations

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import write_text
from cli.parsing import one_line_errors, option, parse, require

TEXTS = ("model", "format", "engine", "machine", "date", "commit")
OURS = "gpt-eagle"  # engines of this project begin with it
# of the picture, in pixels
LABEL = 230  # width of the engines' names
BAR = 480  # width of the longest bar
LINE = 22  # height of a bar with its gap
HEAD = 30  # height of a group's title

Row = dict[str, Any]


@dataclass(frozen=True)
class PlotConfig:
    """Options."""

    file: str = option("", "JSON list of rows", positional=True)
    out: str = option("", "picture to write; default: the file's name with .svg")


def read_rows(path: Path) -> list[Row]:
    """Read and check the rows. Raises: ValueError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}; name a JSON list of rows") from None
    require(isinstance(rows, list) and rows != [], f"{path} is no list of rows; see --help")
    for number, row in enumerate(rows, 1):
        has_texts = isinstance(row, dict) and all(isinstance(row.get(x), str) for x in TEXTS)
        require(has_texts, f"{path}: row {number} needs the texts {', '.join(TEXTS)}")
        rate = row.get("tokens_per_s")
        is_rate = type(rate) in (int, float) and 0 < rate < float("inf")
        require(is_rate, f"{path}: row {number}: tokens_per_s must be above 0; it is {rate}")
    return rows


def grouped(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Group rows by model, format and machine, in the order of the file."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["format"], row["machine"]), []).append(row)
    return groups


def picture(rows: list[Row]) -> str:
    """Draw the groups below each other, as SVG."""
    longest = max(row["tokens_per_s"] for row in rows)
    parts = []
    y = 0
    for (model, form, machine), group in grouped(rows).items():
        title = html.escape(f"{model}, {form}, {machine}: tokens per second")
        parts.append(f'<text x="8" y="{y + 20}" font-weight="bold">{title}</text>')
        y += HEAD
        for row in group:
            width = BAR * row["tokens_per_s"] / longest
            color = "#2a7" if row["engine"].startswith(OURS) else "#bbb"
            engine = html.escape(row["engine"])
            at = f'y="{y + 14}"'
            parts += [
                f'<text x="{LABEL - 8}" {at} text-anchor="end">{engine}</text>',
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
                f'<text x="{LABEL + width + 6:.1f}" {at}>{row["tokens_per_s"]:.0f}</text>',
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


def table(rows: list[Row]) -> str:
    """Return the Markdown table of the groups."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    lines = [
        f"| tokens per second | {' | '.join(engines)} | machine, date, commit |",
        "|" + "---|" * (len(engines) + 2),
    ]
    for (model, form, machine), group in grouped(rows).items():
        rates = {row["engine"]: f"{row['tokens_per_s']:.0f}" for row in group}
        cells = " | ".join(rates.get(engine, "") for engine in engines)
        sources = dict.fromkeys(f"{row['date']}, {row['commit']}" for row in group)
        lines.append(f"| {model}, {form} | {cells} | {machine}, {'; '.join(sources)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    config = parse(PlotConfig, "plot_speed.py", "Draw tokens per second as bars.", argv)
    with one_line_errors("plot_speed.py"):
        path = Path(config.file)
        rows = read_rows(path)
        write_text(config.out or str(path.with_suffix(".svg")), picture(rows))
        print(table(rows))


if __name__ == "__main__":
    main()
