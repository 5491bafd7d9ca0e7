"""Show the draft trees of a run as one HTML page: drafted and accepted tokens, cycle by cycle.

    python generate.py --prompt "def read_lines(path):" --set trace=trace.jsonl
    python scripts/bench/plot_trace.py trace.jsonl --out trace.html
    python scripts/bench/plot_trace.py trace.jsonl --out tree.svg --cycle 12

1. Every line of the trace is checked: parents before children, an accepted path that is a path.
2. Lines are grouped by sequence (prompt and sample). Token ids become text where the checkpoint has
   a tokenizer.
3. All data goes into plot_trace.html as JSON, so that the page needs no network and no server. It
   shows a bar per cycle, the text with the cycle's part marked, and the cycle's tree. Arrow keys
   walk through the cycles.
4. `--cycle` draws one tree as a picture, for pages that run no script; accepted nodes are filled.

Not here: times (a trace holds none; see papers.py), and the prompt (a trace has its length only).
"""

from __future__ import annotations

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import read_jsonl, write_text
from cli.parsing import one_line_errors, option, parse
from hf.tokenizer import Tokenizer
from options import DEMO

TEMPLATE = Path(__file__).with_suffix(".html")
PLACEHOLDER = "{{data}}"
# of a picture, in pixels
BOX = 110  # width of a node
COLUMN = 150  # from level to level
LINE = 32  # from leaf to leaf
LISTS = ("draft_tokens", "parents", "depths", "path", "emitted")


@dataclass(frozen=True)
class PlotConfig:
    """Options."""

    trace: str = option("", "what generate.py --set trace wrote", positional=True)
    out: str = option("", "page or picture to write; default: the trace's name with .html or .svg")
    cycle: int = option(
        0,
        "draw the tree of this line of the trace alone, counted from 1; 0: the whole page",
        least=0,
    )
    checkpoint: str = option(DEMO, "directory whose tokenizer wrote the tokens; none: show ids")


def trace_fault(row: dict) -> str:
    """Return the fault of a line of a trace, or ""."""
    lists = all(isinstance(row.get(name), list) for name in LISTS)
    if not lists or not all(isinstance(row.get(name), int) for name in ("row", "pos", "root")):
        return "it is no line of generate.py --set trace"
    nodes = len(row["draft_tokens"])
    values = row.get("values", [None] * nodes)
    if not nodes == len(row["parents"]) == len(row["depths"]) == len(values):
        return "draft_tokens, parents, depths and values must be equally long"
    if not all(0 <= parent < node for node, parent in enumerate(row["parents"], 1)):
        return "a node's parent must come before it"
    parents = [0, *row["parents"]]
    before = 0
    for node in row["path"]:
        if not 0 < node <= nodes or parents[node] != before:
            return "path must lead from the root from child to child"
        before = node
    if len(row["emitted"]) != len(row["path"]) + 1:
        return "emitted must hold the path's tokens and the bonus token"
    return ""


def labels(ids: set[int], tokenizer: Tokenizer | None) -> dict[int, str]:
    """Return the label of each token: its text, the bytes of a part of a character, or its id."""
    if tokenizer is None:
        return {id: str(id) for id in sorted(ids)}
    return {
        id: tokenizer.piece(id).decode("utf-8", "backslashreplace") or f"⟨{id}⟩"
        for id in sorted(ids)
    }


def token_ids(row: dict) -> set[int]:
    """Return the tokens of a line of a trace."""
    return {row["root"], *row["draft_tokens"], *row["emitted"]}


def cycle_of(row: dict, decoder: Any) -> dict[str, Any]:
    """Return the data of a cycle for the page. decoder: of the emitted tokens; None shows ids"""
    kept = ("pos", "root", "parents", "depths", "path", "emitted")
    cycle = {"tokens": row["draft_tokens"]} | {name: row[name] for name in kept}
    cycle["text"] = [decoder.push([id]) if decoder else f"{id} " for id in row["emitted"]]
    if "values" in row:
        cycle["values"] = [None if v is None else round(v, 3) for v in row["values"]]
    return cycle


def page(rows: list[dict], title: str, tokenizer: Tokenizer | None) -> str:
    """Return the page of all cycles."""
    ids = {id for row in rows for id in token_ids(row)}
    sequences = []
    for number in sorted({row["row"] for row in rows}):
        decoder = tokenizer.stream(continuation=True) if tokenizer else None
        mine = [row for row in rows if row["row"] == number]
        root = mine[0]["root"]
        start = decoder.push([root]) if decoder else f"{root} "
        cycles = [cycle_of(row, decoder) for row in mine]
        sequences.append({"row": number, "start": start, "cycles": cycles})
    document = {"title": title, "labels": labels(ids, tokenizer), "rows": sequences}
    data = json.dumps(document, separators=(",", ":"))
    # inside a script element only "<" could end or open anything
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, data.replace("<", "\\u003c"))


def picture(row: dict, names: dict[int, str]) -> str:
    """Draw one cycle's tree as SVG: the root left, levels to the right, the bonus behind the path.

    row: a line of the trace; names: labels of tokens, from `labels`
    """
    tokens = [row["root"], *row["draft_tokens"], row["emitted"][-1]]
    bonus = len(tokens) - 1
    parents = [-1, *row["parents"], (row["path"] or [0])[-1]]
    depths = [0, *row["depths"], len(row["path"]) + 1]
    values = [0.0, *row.get("values", [0.0] * len(row["draft_tokens"])), 0.0]
    kept = [node for node, value in enumerate(values) if value is not None]
    heights, leaves = _heights(parents, kept)
    spots = [(10 + COLUMN * depth, 10 + LINE * height) for depth, height in zip(depths, heights)]
    path = {0, *row["path"], bonus}
    lines = []
    boxes = []
    for node in kept:
        accepted = node in path
        if node:
            lines.append(_edge(spots[parents[node]], spots[node], accepted))
        style = 'fill="#f4f4f4" stroke="#bbb"'
        if node == bonus:
            style = 'fill="#fff" stroke="#2a7" stroke-dasharray="4 2"'
        elif accepted:
            style = 'fill="#cfe9d8" stroke="#2a7"'
        boxes.append(_node(spots[node], style, names[tokens[node]]))
    width = 20 + BOX + COLUMN * max(depths)
    height = 14 + LINE * leaves
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="monospace" font-size="12">'
    )
    return f"{head}{''.join(lines + boxes)}</svg>\n"


def _heights(parents: list[int], kept: list[int]) -> tuple[list[float], int]:
    """Place a leaf on the next line, a parent in the middle of its children.

    Returns: the height of each node, in lines; the number of leaves.
    """
    heights = [0.0] * len(parents)
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        children = [place(child) for child in kept if parents[child] == node]
        if children:
            heights[node] = (children[0] + children[-1]) / 2
        else:
            heights[node] = float(leaves)
            leaves += 1
        return heights[node]

    place(0)
    return heights, leaves


def _edge(start: tuple[float, float], end: tuple[float, float], accepted: bool) -> str:
    x0 = start[0] + BOX
    y0 = start[1] + 12
    x1 = end[0]
    y1 = end[1] + 12
    style = 'stroke="#2a7" stroke-width="2"' if accepted else 'stroke="#bbb" stroke-width="1"'
    curve = f"M{x0} {y0}C{x0 + 20} {y0} {x1 - 20} {y1} {x1} {y1}"
    return f'<path d="{curve}" fill="none" {style}/>'


def _node(spot: tuple[float, float], style: str, text: str) -> str:
    x, y = spot
    text = text.replace("\n", "⏎").replace(" ", "␣")[:14]
    # XML takes no control characters
    text = html.escape("".join(c if c.isprintable() else "�" for c in text))
    return (
        f'<rect x="{x}" y="{y}" width="{BOX}" height="24" rx="5" {style}/>'
        f'<text x="{x + BOX / 2}" y="{y + 16}" text-anchor="middle" fill="#222">{text}</text>'
    )


def plot(config: PlotConfig) -> None:
    """Read and check the trace, and write the page or the picture."""
    if not config.trace:
        raise ValueError("name the trace: plot_trace.py trace.jsonl")
    rows = read_jsonl(Path(config.trace), "trace", trace_fault)
    tokenizer = Tokenizer.load(Path(config.checkpoint)) if config.checkpoint != "none" else None
    out = config.out or str(Path(config.trace).with_suffix(".svg" if config.cycle else ".html"))
    if config.cycle > len(rows):
        raise ValueError(
            f"--cycle must be at most {len(rows)}, the lines of {config.trace}; got {config.cycle}"
        )
    if config.cycle:
        row = rows[config.cycle - 1]
        write_text(out, picture(row, labels(token_ids(row), tokenizer)))
        print(f"{out}: cycle {config.cycle} of {len(rows)}")
    else:
        write_text(out, page(rows, Path(config.trace).name, tokenizer))
        print(f"{out}: {len(rows)} cycles")


def main() -> None:
    """Run the command line."""
    config = parse(PlotConfig, "plot_trace.py", __doc__)
    with one_line_errors("plot_trace.py"):
        plot(config)


if __name__ == "__main__":
    main()
