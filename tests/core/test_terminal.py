"""Keys that are typed ahead, and lines that break at words (run/terminal.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from run.history import History
from run.terminal import Typed, Wrapped, first_typed


@pytest.mark.parametrize(
    "keys, typed, rest",
    [
        ("", Typed(""), ""),
        ("one\rtwo\r", Typed("one", entered=True), "two\r"),
        ("half", Typed("half"), ""),
        ("\x1b[200~a\rb\tc\r\n\x1b[201~", Typed("a\nb\tc\n"), ""),
        ("see \x1b[200~a\rb\x1b[201~ here\nmore", Typed("see a\nb here", entered=True), "more"),
        ("\x1b[200~never\rended", Typed("never\nended"), ""),
        ("helo\x7flo\x1b[D\x1bOA!\r", Typed("hello!", entered=True), ""),
        ("wrong\x15two words\x17one\r", Typed("two one", entered=True), ""),
        ("\x04rest", Typed("", end=True), "rest"),
        ("a\x04b\r", Typed("ab", entered=True), ""),
        ("\r", Typed("", entered=True), ""),
    ],
)
def test_a_turn_is_typed_ahead(keys, typed, rest):
    """A paste is one text, and the keys that edit a line do so."""
    assert first_typed(keys) == (typed, rest)


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


def test_a_word_that_moves_keeps_its_colour(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    wrapped = Wrapped()
    shown = "".join(map(wrapped.push, ["\x1b[32mfifteen letters wo", "rds\x1b[0m"]))
    assert shown == "\x1b[32mfifteen letters wo\x1b[2D\x1b[K\n\x1b[32mwords\x1b[0m"


def test_a_text_that_fits_stays_as_it_is(monkeypatch):
    """Letters of two columns count as such; those without a column take none."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = "fits\n\n    as it is\n\ttab\n中文字字字字字字字字\ne\u0301e\u0301 16 letters, too\n"
    assert Wrapped().push(text) == text
    assert Wrapped().push("ab 中文字字字字字字字") == "ab \n中文字字字字字字字"


def test_notes_are_narrower_than_a_wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert Wrapped(most=WIDTH).push(TEXT).splitlines()[0].rstrip() == "The quick brown fox"
    assert Wrapped().push(TEXT) == TEXT


def test_a_file_of_lines(monkeypatch, tmp_path):
    """A new one is its owner's alone; where none can be, a chat goes on; none is kept where none is wanted."""
    file = tmp_path / "new" / "history"
    monkeypatch.setenv("GPT_EAGLE_HISTORY", str(file))
    history = History()
    for line in ("one", "one", "", "two\nlines", "\udcff"):
        history.add(line)
    assert file.read_bytes() == b"one\n\xff\n" and file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("GPT_EAGLE_HISTORY", "/dev/null")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", lambda *_: pytest.fail("a device is everybody's"))
        assert not History().fault
    monkeypatch.setenv("GPT_EAGLE_HISTORY", str(file / "below"))
    history = History()
    history.add("three")
    assert history.fault and b"three" not in file.read_bytes()
    monkeypatch.setenv("GPT_EAGLE_HISTORY", "")
    assert History().path is None
