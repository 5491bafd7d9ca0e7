"""Show the draft trees of a run as one HTML page: what was drafted, what the target accepted, and why it stopped there.

    python generate.py --checkpoint checkpoints/demo --prompt "def read_lines(path):" --trace trace.jsonl
    python scripts/bench/plot_trace.py trace.jsonl --out trace.html
    python scripts/bench/plot_trace.py trace.jsonl --out tree.svg --cycle 12

How it works:
1. Every line of the trace is checked: parents before children, an accepted path that is a path.
2. Lines are grouped by row (prompt and sample); token ids become text where the checkpoint has a tokenizer.
3. Everything goes into plot_trace.html as JSON, so that the page needs no network and no server. It shows a bar per
   cycle, the text with the cycle's part marked, and the cycle's tree: arrow keys walk through the cycles.
4. With `--cycle`, one tree as a picture instead, for pages that run no script: what the target accepted is filled.

Not here: times (a trace holds none; see papers.py), and the prompt, of which a trace knows the length only.
"""

from __future__ import annotations

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from files import read_jsonl, write_text
from hf.tokenizer import Tokenizer
from options import DEMO

TEMPLATE = Path(__file__).with_suffix(".html")
PLACEHOLDER = "{{data}}"
BOX, COLUMN, LINE = (
    110,
    150,
    32,
)  # of a picture: width of a node, from level to level, from leaf to leaf (pixels)
LISTS = ("draft_tokens", "parents", "depths", "path", "emitted")


@dataclass(frozen=True)
class PlotConfig:
    """Options."""

    trace: str = option("", "what generate.py --trace wrote", positional=True)
    out: str = option("", "page or picture to write; default: the trace's name with .html or .svg")
    cycle: int = option(
        0,
        "draw the tree of this line of the trace alone, counted from 1; 0: the whole page",
        least=0,
    )
    checkpoint: str = option(DEMO, "directory whose tokenizer wrote the tokens; none: show ids")


def trace_fault(row: dict) -> str:
    """What is wrong with a line of a trace; "" when nothing is."""
    whole = all(isinstance(row.get(name), list) for name in LISTS)
    if not whole or not all(isinstance(row.get(name), int) for name in ("row", "pos", "root")):
        return "it is no line of generate.py --trace"
    nodes = len(row["draft_tokens"])
    values = row.get("values", [None] * nodes)
    if not nodes == len(row["parents"]) == len(row["depths"]) == len(values):
        return "draft_tokens, parents, depths and values must be equally long"
    if not all(0 <= parent < node for node, parent in enumerate(row["parents"], 1)):
        return "a node's parent must come before it"
    parents = [0, *row["parents"]]
    if not all(
        0 < n <= nodes and parents[n] == before for before, n in zip([0, *row["path"]], row["path"])
    ):
        return "path must lead from the root from child to child"
    if len(row["emitted"]) != len(row["path"]) + 1:
        return "emitted must hold the path's tokens and the bonus token"
    return ""


def labels(ids: set[int], tokenizer: Tokenizer | None) -> dict[int, str]:
    """What a node shows: the token's text, its bytes where it is no whole character, its id where it has no text."""
    if tokenizer is None:
        return {id: str(id) for id in sorted(ids)}
    return {
        id: tokenizer.piece(id).decode("utf-8", "backslashreplace") or f"⟨{id}⟩"
        for id in sorted(ids)
    }


def cycle_of(row: dict, decoder: Any) -> dict[str, Any]:
    """What the page needs of a line. decoder: gives the emitted tokens' text, or None to show ids."""
    kept = ("pos", "root", "parents", "depths", "path", "emitted")
    cycle = {"tokens": row["draft_tokens"]} | {name: row[name] for name in kept}
    cycle["text"] = [decoder.push([id]) if decoder else f"{id} " for id in row["emitted"]]
    if "values" in row:
        cycle["values"] = [None if v is None else round(v, 3) for v in row["values"]]
    return cycle


def page(rows: list[dict], title: str, tokenizer: Tokenizer | None) -> str:
    """The whole page."""
    ids = {id for row in rows for id in (row["root"], *row["draft_tokens"], *row["emitted"])}
    sequences = []
    for number in sorted({row["row"] for row in rows}):
        decoder = tokenizer.stream(continuation=True) if tokenizer else None
        mine = [row for row in rows if row["row"] == number]
        start = decoder.push([mine[0]["root"]]) if decoder else f"{mine[0]['root']} "
        sequences.append(
            {"row": number, "start": start, "cycles": [cycle_of(row, decoder) for row in mine]}
        )
    data = json.dumps(
        {"title": title, "labels": labels(ids, tokenizer), "rows": sequences}, separators=(",", ":")
    )
    # inside a script element only "<" could end or open anything
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, data.replace("<", "\\u003c"))


def picture(row: dict, names: dict[int, str]) -> str:
    """One cycle's tree as SVG: the root left, a level to the right of the one before, the bonus token behind the path.

    row: a line of the trace; names: what tokens show, from `labels`
    """
    last = (row["path"] or [0])[-1]
    tokens = [row["root"], *row["draft_tokens"], row["emitted"][-1]]
    parents, depths = [-1, *row["parents"], last], [0, *row["depths"], len(row["path"]) + 1]
    values = [0.0, *row.get("values", [0.0] * len(row["draft_tokens"])), 0.0]
    kept = [value is not None for value in values]
    heights, leaves = [0.0] * len(tokens), 0

    def place(
        node: int,
    ) -> float:  # a leaf takes the next line, a parent the middle of its children
        nonlocal leaves
        children = [
            place(child) for child, parent in enumerate(parents) if parent == node and kept[child]
        ]
        leaves += not children
        heights[node] = (children[0] + children[-1]) / 2 if children else float(leaves - 1)
        return heights[node]

    place(0)
    spots = [(10 + COLUMN * depth, 10 + LINE * height) for depth, height in zip(depths, heights)]
    path, lines, boxes = {0, *row["path"], len(tokens) - 1}, [], []
    for node in (node for node in range(len(tokens)) if kept[node]):
        (x, y), on, (u, v) = spots[node], node in path, spots[parents[node]] if node else spots[0]
        if node:
            lines.append(
                f'<path d="M{u + BOX} {v + 12}C{u + BOX + 20} {v + 12} {x - 20} {y + 12} {x} {y + 12}" fill="none" '
                f'stroke="{"#2a7" if on else "#bbb"}" stroke-width="{2 if on else 1}"/>'
            )
        style = (
            'fill="#fff" stroke="#2a7" stroke-dasharray="4 2"' if node == len(tokens) - 1 else ""
        )
        style = style or ('fill="#cfe9d8" stroke="#2a7"' if on else 'fill="#f4f4f4" stroke="#bbb"')
        text = names[tokens[node]].replace("\n", "⏎").replace(" ", "␣")[:14]
        text = html.escape(
            "".join(c if c.isprintable() else "�" for c in text)
        )  # XML takes no control characters
        boxes.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="24" rx="5" {style}/>')
        boxes.append(
            f'<text x="{x + BOX / 2}" y="{y + 16}" text-anchor="middle" fill="#222">{text}</text>'
        )
    width, height = 20 + BOX + COLUMN * max(depths), 14 + LINE * leaves
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'{head} font-family="monospace" font-size="12">{"".join(lines + boxes)}</svg>\n'


def plot(config: PlotConfig) -> None:
    """Read, check, write."""
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
        write_text(
            out,
            picture(row, labels({row["root"], *row["draft_tokens"], *row["emitted"]}, tokenizer)),
        )
        print(f"{out}: cycle {config.cycle} of {len(rows)}")
        return
    write_text(out, page(rows, Path(config.trace).name, tokenizer))
    print(f"{out}: {len(rows)} cycles")


def main() -> None:
    """The command line."""
    config = parse(PlotConfig, "plot_trace.py", __doc__)
    with one_line_errors("plot_trace.py"):
        plot(config)


if __name__ == "__main__":
    main()
