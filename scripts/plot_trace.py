"""Show the draft trees of a run as one HTML page: what was drafted, what the target accepted, and why it stopped there.

    python generate.py --checkpoint checkpoints/demo --prompt "def read_lines(path):" --trace trace.jsonl
    python scripts/plot_trace.py trace.jsonl --out trace.html

How it works:
1. Every line of the trace is checked: parents before children, an accepted path that is a path.
2. Lines are grouped by row (prompt and sample); token ids become text where the checkpoint has a tokenizer.
3. Everything goes into plot_trace.html as JSON, so that the page needs no network and no server. It shows a bar per
   cycle, the text with the cycle's part marked, and the cycle's tree: arrow keys walk through the cycles.

Not here: times (a trace holds none; see bench.py), and the prompt, of which a trace knows the length only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _path  # noqa: F401  (finds the project)
from hf.tokenizer import Tokenizer
from options import DEMO, one_line_errors, option, parse, read_jsonl, write_text

TEMPLATE = Path(__file__).with_suffix(".html")
PLACEHOLDER = "{{data}}"
LISTS = ("draft_tokens", "parents", "depths", "path", "emitted")


@dataclass(frozen=True)
class PlotConfig:
    """Options."""

    trace: str = option("", "what generate.py --trace wrote", positional=True)
    out: str = option("", "page to write; default: the trace's name with .html")
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
    if not all(0 < n <= nodes and parents[n] == before for before, n in zip([0, *row["path"]], row["path"])):
        return "path must lead from the root from child to child"
    if len(row["emitted"]) != len(row["path"]) + 1:
        return "emitted must hold the path's tokens and the bonus token"
    return ""


def labels(ids: set[int], tokenizer: Tokenizer | None) -> dict[int, str]:
    """What a node shows: the token's text, its bytes where it is no whole character, its id where it has no text."""
    if tokenizer is None:
        return {id: str(id) for id in sorted(ids)}
    return {id: tokenizer.piece(id).decode("utf-8", "backslashreplace") or f"⟨{id}⟩" for id in sorted(ids)}


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
        sequences.append({"row": number, "start": start, "cycles": [cycle_of(row, decoder) for row in mine]})
    data = json.dumps({"title": title, "labels": labels(ids, tokenizer), "rows": sequences}, separators=(",", ":"))
    # inside a script element only "<" could end or open anything
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, data.replace("<", "\\u003c"))


def plot(config: PlotConfig) -> None:
    """Read, check, write."""
    if not config.trace:
        raise ValueError("name the trace: plot_trace.py trace.jsonl")
    rows = read_jsonl(Path(config.trace), "trace", trace_fault)
    tokenizer = Tokenizer.load(Path(config.checkpoint)) if config.checkpoint != "none" else None
    out = config.out or str(Path(config.trace).with_suffix(".html"))
    write_text(out, page(rows, Path(config.trace).name, tokenizer))
    print(f"{out}: {len(rows)} cycles")


def main() -> None:
    """The command line."""
    config = parse(PlotConfig, "plot_trace.py", __doc__)
    with one_line_errors("plot_trace.py"):
        plot(config)


if __name__ == "__main__":
    main()
