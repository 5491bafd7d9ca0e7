"""Pictures and tables of measurements: rates as bars, and two answers that race.

`bars` reads a JSON list of rows: model, format, engine, tokens_per_s, machine, date and commit;
also, where several tasks were measured, task, tau and identical (a share). Or it reads a log of
`measure.py speed`, of which these rows are made. Rows of one model, format and machine are a group
of bars, in the order of the file; a bar is the mean over the tasks, ours are green. The Markdown
table has a line per group and task and a column per engine.

`race` decodes a prompt in turn with drafts and without, and notes every piece of text with the
seconds since the request. Of several rounds the one of median length is kept, for each side. The
picture, an SVG without a script, plays the times on two clocks, slowed down by a whole number that
it names. Where a viewer plays no animation, both texts stand there whole.
"""

from __future__ import annotations

import html
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from drafts.by_value import ByValue
from files.io import write_text
from options import require
from run.engine import Engine
from run.library import stream
from run.load import load, without_draft
from run.stats import told
from scripts.bench.cases import BarsOptions, RaceOptions, is_peer
from scripts.bench.common import Log, environment, grouped, in_turn, markdown

OURS = "gpt-eagle"  # engines of this project begin with it
GROUP = ("model", "format", "machine")  # columns of rows that are one group of bars
# of the bars, in pixels
LABEL = 230  # width of the engines' names
BAR = 480  # width of the longest bar
LINE = 22  # height of a bar with its gap
HEAD = 30  # height of a group's title
# of the race: its sides, and seconds
TITLES = ("without drafts", "with drafts (the default)")
PLAYED_S = 7.0  # length of the slower answer in the picture, about
PAUSE_S = 3.0  # at the end, before it begins anew
TICKS = 80  # steps of a clock
COLUMNS = 50  # characters of a line
# a word with the spaces behind it, cut where it is longer than a line
WORD = re.compile(rf"\n|\S{{1,{COLUMNS}}}[^\S\n]*|[^\S\n]+")
# of the race, in pixels
WIDE = 8.0  # of a character
HIGH = 19  # of a line
EDGE = 14
STYLE = """
text { font: 13.2px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre; }
.title, .clock { font-weight: bold; }
.small { font-size: 11px; fill: #59636e; }
.ground { fill: #ffffff; stroke: #d1d9e0; }
.ours { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .small { fill: #9198a1; }
  .ground { fill: #0d1117; stroke: #3d444d; }
  .ours { fill: #3fb950; }
}
"""

SpeedRow = dict[str, Any]


def svg(width: int, height: int, parts: list[str], style: str = "") -> str:
    """Return a picture."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}{style}>', *parts, "</svg>"])


def read_measured(path: Path, draw: Callable[[Any], str], named: str) -> Any:
    """Read a JSON file. draw: raises for another content; named: the right one

    Raises: ValueError that says what to name.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        draw(found)
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read {path} ({reason}); name {named}") from None
    return found


# --------------------------------------------------------------------------------------------- bars


def of_log(row: dict[str, Any]) -> SpeedRow:
    """Return the row of a line of a log of `speed`."""
    method = row["method"]
    shape = re.search(r"(?:inflate|random)=([^,]+)", row["config"]["options"])
    drafts = "no draft" if method == "none" else method
    found = {
        "model": f"random {shape[1]}" if shape else Path(row["config"]["checkpoint"]).name,
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
    if path.suffix == ".jsonl":
        return [of_log(row) for row in Log(str(path), str(path)).rows]
    return read_measured(path, lambda rows: table(rows) + bars_picture(rows), "a JSON list of rows")


def mean_rate(rows: list[SpeedRow]) -> float:
    """Return the mean of the rates, in tokens per second."""
    return statistics.mean(row["tokens_per_s"] for row in rows)


def means(rows: list[SpeedRow]) -> list[SpeedRow]:
    """Return a row in place of those of several tasks: means of rates, of tau and of shares."""
    merged = []
    for _, group in grouped(rows, *GROUP, "engine").items():
        measured = ("tokens_per_s", "tau", "identical")
        of_all = {
            name: statistics.mean(row[name] for row in group)
            for name in measured
            if all(name in row for row in group)
        }
        merged.append({name: group[0][name] for name in group[0] if name != "task"} | of_all)
    return merged


def bars_picture(rows: list[SpeedRow]) -> str:
    """Draw the groups below each other, as SVG."""
    bars = grouped(rows, *GROUP, "engine")
    longest = max(map(mean_rate, bars.values()))
    parts = []
    y = 0
    for (model, form, machine), group in grouped(rows, *GROUP).items():
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
            at = f'y="{y + 14}"'
            parts += [
                f'<text x="{LABEL - 8}" {at} text-anchor="end">{html.escape(name)}</text>',
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
                f'<text x="{LABEL + width + 6:.1f}" {at}>{rate:.0f}</text>',
            ]
            y += LINE
        y += LINE // 2
    width = LABEL + BAR + 60
    ground = f'<rect width="{width}" height="{y}" fill="#fff"/>'  # readable on dark pages
    return svg(width, y, [ground, *parts], ' font-family="sans-serif" font-size="13"')


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
    named = [{"task": ""} | row for row in rows]
    for (model, form, machine, task), group in grouped(named, *GROUP, "task").items():
        rates = {row["engine"]: cell(row) for row in group}
        sources = dict.fromkeys(f"{row['date']}, {row['commit']}" for row in group)
        of = ", ".join(filter(None, (model, form, task)))
        cells = [rates.get(engine, "") for engine in engines]
        lines.append([of, *cells, f"{machine}, {'; '.join(sources)}"])
    return markdown([title, *engines, "machine, date, commit"], lines)


def bars(config: BarsOptions) -> None:
    """Print the table; draw the picture, where one is named."""
    rows = read_rows(Path(config.file))
    if config.out:
        write_text(config.out, bars_picture(rows))
    print(table(rows))


# --------------------------------------------------------------------------------------------- race


class Side(NamedTuple):
    """An answer: its pieces, each with its seconds since the request, and its number of tokens."""

    pieces: list[tuple[float, str]]
    tokens: int

    @property
    def seconds(self) -> float:
        """The time of the last piece."""
        return self.pieces[-1][0]

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(text for _, text in self.pieces)

    @property
    def result(self) -> str:
        """The time and the rate."""
        return f"{self.seconds:.2f} s, {self.tokens / self.seconds:.0f} tokens/s"


def record(config: RaceOptions) -> dict[str, Any]:
    """Decode the prompt on both sides. Returns: what `race_picture` draws.

    Raises: ValueError where the texts differ, which no seed and no drafter may cause.
    """
    engine = load(checkpoint=config.checkpoint, max_new_tokens=config.max_new_tokens)
    fault = f"{config.checkpoint} has no chat template; name another --checkpoint"
    require(engine.template is not None, fault)
    if isinstance(engine.policy, ByValue):
        engine.policy.kept = None  # else an answer would be found in that of the run before
    engines = dict(zip(TITLES, (without_draft(engine), engine)))
    runs = {title: partial(answered, one, config.prompt) for title, one in engines.items()}
    taken = in_turn(runs, config.rounds, "race")
    sides = [sorted(done, key=lambda side: side.seconds)[len(done) // 2] for done in taken.values()]
    require(sides[0].text == sides[1].text, "the two texts differ")
    return {
        "prompt": config.prompt,
        "checkpoint": Path(config.checkpoint).name,
        "rounds": config.rounds,
        "environment": environment(engine.option("device")),
        "sides": [side._asdict() for side in sides],
    }


def answered(engine: Engine, prompt: str) -> Side:
    """Decode a prompt. Returns: the pieces by their arrival."""
    began = time.monotonic()
    pieces = []
    for text in stream(engine, [{"role": "user", "content": prompt}]):
        pieces.append((round(time.monotonic() - began, 4), text))
    whole = "".join(text for _, text in pieces)
    return Side(pieces, len(engine.tokenizer.encode(whole)))


def placed(side: Side) -> Iterator[tuple[float, int, int, str]]:
    """Yield the parts of words that came at once, as (seconds, line, column, text)."""
    times = [seconds for seconds, piece in side.pieces for _ in piece]  # by character
    line = column = 0
    for match in WORD.finditer(side.text):
        if match[0] == "\n":
            line, column = line + 1, 0
            continue
        if column and column + len(match[0].rstrip()) > COLUMNS:
            line, column = line + 1, 0
        for seconds, places in groupby(range(*match.span()), key=times.__getitem__):
            text = "".join(side.text[place] for place in places)
            yield seconds, line, column, text
            column += len(text)


def hidden_until(seconds: float) -> str:
    """Return the element that hides its parent from each start of the loop on."""
    end = f"loop.begin+{seconds:.3f}s"
    return f'<set attributeName="visibility" to="hidden" begin="loop.begin" end="{end}"/>'


def clock(side: Side, slower: int, x: int, y: int) -> Iterator[str]:
    """Yield the texts of a clock: one at a time while it runs, at last the whole time and rate."""
    at = f'<text class="clock" x="{x}" y="{y}" text-anchor="end"'
    for tick in range(TICKS):
        begin, end = (slower * side.seconds * i / TICKS for i in (tick, tick + 1))
        shown = f'begin="loop.begin+{begin:.3f}s" end="loop.begin+{end:.3f}s"'
        yield f'{at} visibility="hidden">{begin / slower:.2f} s<set attributeName="visibility" '
        yield f'to="visible" {shown}/></text>'
    yield f"{at}>{side.result}{hidden_until(slower * side.seconds)}</text>"


def race_picture(race: dict[str, Any]) -> str:
    """Return a race as an SVG that plays for ever."""
    sides = [Side(**side) for side in race["sides"]]
    slowest = max(side.seconds for side in sides)
    slower = max(1, round(PLAYED_S / slowest))
    lines = 1 + max(line for _, line, _, _ in placed(sides[0]))
    panel = int(COLUMNS * WIDE) + 2 * EDGE
    width = 2 * panel + 3 * EDGE
    top = 5 * EDGE
    height = top + HIGH * (lines + 1) + 3 * EDGE
    prompt = html.escape(race["prompt"])
    parts = [
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        '<rect width="0" height="0"><animate id="loop" attributeName="x" from="0" to="0" '
        f'begin="0s;loop.end" dur="{slower * slowest + PAUSE_S:.2f}s"/></rect>',
        f'<text x="{EDGE}" y="{2 * EDGE}" class="title">&gt; {prompt}</text>',
    ]
    for number, (side, title) in enumerate(zip(sides, TITLES)):
        x = EDGE + number * (panel + EDGE)
        ours = " ours" if number else ""
        parts.append(f'<text x="{x}" y="{top - EDGE}" class="title{ours}">{title}</text>')
        parts += clock(side, slower, x + panel - EDGE, top - EDGE)
        for seconds, line, column, text in placed(side):
            at = f'x="{x + column * WIDE:.1f}" y="{top + HIGH * (line + 1)}"'
            length = f'textLength="{len(text) * WIDE:.1f}"'
            hidden = hidden_until(slower * seconds)
            parts.append(f"<text {at} {length}>{html.escape(text)}{hidden}</text>")
    slowed = f"played {slower} times slower; " if slower > 1 else ""
    on = race["environment"]
    made = f"{slowed}one text; {race['checkpoint']}; {on['device']}; {on['date']}, {on['commit']}"
    parts.append(f'<text x="{EDGE}" y="{height - EDGE}" class="small">{html.escape(made)}</text>')
    return svg(width, height, parts)


def race(config: RaceOptions) -> None:
    """Record a race, or read one; draw it."""
    if config.recorded:
        recorded = read_measured(Path(config.recorded), race_picture, "what --json wrote")
    else:
        recorded = record(config)
    if config.json:
        write_text(config.json, json.dumps(recorded, indent=1))
    if config.out:
        write_text(config.out, race_picture(recorded))
    print(told({"model": recorded["checkpoint"]} | recorded["environment"]))
    for title, side in zip(TITLES, recorded["sides"]):
        print(f"{title}: {side['tokens']} tokens, {Side(**side).result}")
