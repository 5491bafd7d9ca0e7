"""Lines that break at words (run/terminal.py)."""

from __future__ import annotations

import re

import pytest

from run.terminal import Wrapped

WIDTH = 21
TEXT = "The quick brown fox jumps over the lazy dog and supercalifragilisticexpialidocious words"


def screen_of(shown: str) -> list[str]:
    """The rows of a terminal. Checks that no letter comes to its last column."""
    rows = [""]
    column = 0
    for part in re.finditer(r"\x1b\[(\d+)D|\x1b\[K|\x1b\[\d*m|\n|.", shown):
        if part[1]:
            column -= int(part[1])
            assert column >= 0
        elif part[0] == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif part[0] == "\n":
            rows.append("")
            column = 0
        elif not part[0].startswith("\x1b"):
            rows[-1] += part[0]
            column = len(rows[-1])
            assert column < WIDTH
    return rows


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 11, 200])
def test_lines_break_between_words(monkeypatch, length):
    """However the text is cut into pieces, the screen is the same, and so are the words."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    wrapped = Wrapped()
    pieces = [TEXT[i : i + length] for i in range(0, len(TEXT), length)]
    rows = screen_of("".join(map(wrapped.push, pieces)))
    assert [row.rstrip() for row in rows] == [
        "The quick brown fox",
        "jumps over the lazy",
        "dog and",
        "supercalifragilistic",
        "expialidocious words",
    ]


def test_a_text_that_fits_stays_as_it_is(monkeypatch):
    """Letters of two columns count as such; those without a column take none."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = "fits\n\n    as it is\n\ttab\n中文字字字字字字字字\ne\u0301e\u0301 16 letters, too\n"
    assert Wrapped().push(text) == text
    assert Wrapped().push("ab 中文字字字字字字字") == "ab \n中文字字字字字字字"
