"""Record a prompt's two answers, with drafts and without, and draw the race as a moving picture.

1. One model decodes the prompt in turn with drafts and without. Every piece of text is noted with
   the seconds since the request. Of several rounds the one of median length is kept, for each side.
2. The picture plays the recorded times on two clocks, slowed down by a whole number that it names.
   It is an SVG that needs no script: a piece is hidden until its time. Where a viewer plays no
   animation, both texts stand there whole.

Raises: ValueError where the two texts differ, which no seed and no drafter may cause.
Not here: the page's race of a visitor's own prompt (server/page.html).
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from drafts.presets import PresetPolicy
from files.io import write_text
from options import require
from run.engine import Engine
from run.generate import load, stream
from run.load import without_draft
from scripts.bench.cases import RaceOptions
from scripts.bench.common import environment, in_turn

TITLES = ("without drafts", "with drafts (the default)")
PLAYED_S = 7.0  # length of the slower answer in the picture, about
PAUSE_S = 3.0  # at the end, before it begins anew
TICKS = 80  # steps of a clock
# of the picture, in pixels
COLUMNS = 50  # characters of a line
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


def record(config: RaceOptions) -> dict[str, Any]:
    """Decode the prompt on both sides. Returns: what `picture` draws.

    Raises: ValueError where the texts differ.
    """
    engine = load(checkpoint=config.checkpoint, max_new_tokens=config.max_new_tokens)
    fault = f"{config.checkpoint} has no chat template; name another --checkpoint"
    require(engine.template is not None, fault)
    if isinstance(engine.policy, PresetPolicy):
        engine.policy.kept = None  # else an answer would be found in that of the run before
    engines = dict(zip(TITLES, (without_draft(engine), engine)))
    runs = {title: partial(answered, one, config.prompt) for title, one in engines.items()}
    taken = in_turn(runs, config.rounds, "race")
    sides = [sorted(done, key=lambda side: side.seconds)[len(done) // 2] for done in taken.values()]
    require(sides[0].text == sides[1].text, "the two texts differ")
    made_on = environment(engine.option("device"))
    return {
        "prompt": config.prompt,
        "checkpoint": Path(config.checkpoint).name,
        "machine": made_on["device"],
        "date": date.today().isoformat(),
        "rounds": config.rounds,
        "environment": made_on,
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


# ------------------------------------------------------------------------------- picture


def places(text: str) -> list[tuple[int, int]]:
    """Return the line and the column of every character, with lines broken between words."""
    line = column = 0
    found = []
    for i, character in enumerate(text):
        word = text[i:].split(" ", 1)[0].split("\n", 1)[0]
        is_full = column >= COLUMNS and character != " "
        begins_word = column > 0 and text[i - 1] in " \n"
        if is_full or (begins_word and column + len(word) > COLUMNS):
            line, column = line + 1, 0
        found.append((line, column))
        column += 1
        if character == "\n":
            line, column = line + 1, 0
    return found


def chunks(side: Side) -> Iterator[tuple[float, int, int, str]]:
    """Yield the parts of pieces that stand in one line, as (seconds, line, column, text)."""
    where = iter(places(side.text))
    for seconds, piece in side.pieces:
        part, at = "", (0, 0)
        for character in piece:
            place = next(where)
            if part and place[0] != at[0]:
                yield seconds, *at, part
                part = ""
            if not part:
                at = place
            part += character.replace("\n", " ")
        if part:
            yield seconds, *at, part


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
    rate = f"{side.seconds:.2f} s, {side.tokens / side.seconds:.0f} tokens/s"
    yield f"{at}>{rate}{hidden_until(slower * side.seconds)}</text>"


def picture(race: dict[str, Any]) -> str:
    """Return a race as an SVG that plays for ever."""
    sides = [Side(**side) for side in race["sides"]]
    slowest = max(side.seconds for side in sides)
    slower = max(1, round(PLAYED_S / slowest))
    lines = 1 + max(line for line, _ in places(sides[0].text))
    panel = int(COLUMNS * WIDE) + 2 * EDGE
    width = 2 * panel + 3 * EDGE
    top = 5 * EDGE
    height = top + HIGH * (lines + 1) + 3 * EDGE
    prompt = html.escape(race["prompt"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
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
        for seconds, line, column, text in chunks(side):
            at = f'x="{x + column * WIDE:.1f}" y="{top + HIGH * (line + 1)}"'
            length = f'textLength="{len(text) * WIDE:.1f}"'
            hidden = hidden_until(slower * seconds)
            parts.append(f"<text {at} {length}>{html.escape(text)}{hidden}</text>")
    slowed = f"played {slower} times slower; " if slower > 1 else ""
    made = f"{slowed}one text; {race['checkpoint']}; {race['machine']}; {race['date']}"
    parts.append(f'<text x="{EDGE}" y="{height - EDGE}" class="small">{html.escape(made)}</text>')
    return "\n".join([*parts, "</svg>"])


def read_race(path: Path) -> dict[str, Any]:
    """Read recorded times. Raises: ValueError for another file."""
    try:
        race = json.loads(path.read_text(encoding="utf-8"))
        picture(race)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {path}: {error}; name what --json wrote") from None
    return race


def run(config: RaceOptions) -> None:
    """Record a race, or read one; draw it."""
    race = read_race(Path(config.recorded)) if config.recorded else record(config)
    if config.json:
        write_text(config.json, json.dumps(race, indent=1))
    if config.out:
        write_text(config.out, picture(race))
    for title, side in zip(TITLES, (Side(**side) for side in race["sides"])):
        rate = side.tokens / side.seconds
        print(f"{title}: {side.tokens} tokens in {side.seconds:.2f} s, {rate:.0f} tokens/s")
