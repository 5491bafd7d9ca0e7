"""A text that comes in pieces, on a terminal: lines break between words.

`Wrapped` breaks also within a word that is shown already. Elsewhere a text stays as it is.
"""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Callable
from typing import IO

from files.io import is_terminal


class Wrapped:
    """Breaks lines between words. The text comes in pieces, and may have colours."""

    PARTS = re.compile(r"(?P<colour>\033\[[\d;]*m)|(?P<line>\n)|(?P<space>\s)|.")

    def __init__(self, most: int = 1 << 30):
        """most: columns of a line, also where the terminal is wider"""
        self.most = most
        self.column = 0
        self.word = ""  # the part of the last word that is shown, colours included
        self.word_columns = 0
        self.colour = ""  # the last one
        self.word_colour = ""  # the one in which the word began

    def push(self, text: str) -> str:
        """Return what to print for a piece of the text."""
        # the last column is left free: behind it a cursor does not move back as elsewhere
        width = max(min(shutil.get_terminal_size().columns, self.most) - 1, 1)
        shown = ""
        earlier = self.word_columns  # of the word, that are shown already
        start = None  # place in `shown` where the word begins; None: it began earlier
        for part in self.PARTS.finditer(text):
            piece = part[0]
            if part["colour"]:
                self.colour = piece
            elif part["line"]:
                self.column = 0
            elif part["space"]:
                self.column += 8 - self.column % 8 if piece == "\t" else 1
                if self.column > width:
                    piece = "\n"
                    self.column = 0
            else:
                columns = columns_of(piece)
                if not self.word_columns:
                    start = len(shown)
                    self.word = ""
                    self.word_colour = self.colour
                if self.column + columns > width:
                    moved = self.column > self.word_columns
                    if moved and start is None:
                        shown = f"\033[{earlier}D\033[K\n{self.word_colour}{self.word}"
                    elif moved:
                        shown = f"{shown[:start]}\n{shown[start:]}"
                    else:  # a word that is longer than a line
                        piece = "\n" + piece
                    self.column = self.word_columns if moved else 0
                self.column += columns
                self.word_columns += columns
            if part["line"] or part["space"]:
                self.word_columns = 0
            self.word += piece
            shown += piece
        return shown


def printer(file: IO[str], most: int = 1 << 30) -> Callable[[str], None]:
    """Return a function that prints a text piece by piece; on a terminal lines break at words.

    most: columns of a line
    """
    wrapped = Wrapped(most)
    breaks = is_terminal(file)

    def show(text: str) -> None:
        print(wrapped.push(text) if breaks else text, end="", file=file, flush=True)

    return show


def columns_of(letter: str) -> int:
    """Return the columns that a letter takes on a terminal."""
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
