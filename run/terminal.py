"""A person's terminal: keys that come while the program is busy, and lines that break at words.

1. `TypedAhead.hold` reads keys at once, from before torch is imported on, so that Ctrl-C is never
   stuck behind a long paste. Terminals put marks around a paste (bracketed paste).
2. `TypedAhead.take` returns what was typed up to Enter; a paste is one text, whatever its lines.
3. `Wrapped` breaks a text that comes in pieces, also within a word that is shown already.

Where standard input is no terminal, no key is held. Of keys that edit a line, those typed ahead
have backspace, Ctrl-U and Ctrl-W.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

try:
    import termios
except ImportError:  # Windows has none
    termios = None

MARKS_ON = "\033[?2004h"
MARKS_OFF = "\033[?2004l"
KEYS = re.compile(
    r"\033\[200~(?P<paste>.*?)(?:\033\[201~|$)"
    r"|(?P<other>\033\[[0-9;?]*[@-~]|\033O?.?)"  # arrows and the like
    r"|(?P<enter>[\r\n])"
    r"|(?P<control>[\x00-\x1f\x7f])"
    r"|(?P<text>[^\x00-\x1f\x7f]+)",
    re.DOTALL,
)
IDLE_S = 0.05  # a terminal that sends a paste pauses for less
PASTE_S = 1.0  # without a key, after which a paste whose end is missing counts as ended


class Typed(NamedTuple):
    """Keys that were typed ahead, as a text."""

    text: str
    entered: bool = False  # Enter ended it
    end: bool = False  # Ctrl-D on an empty line


def first_typed(keys: str) -> tuple[Typed, str]:
    """Return the text up to the first Enter, or all; and the keys behind it."""
    text = ""
    for key in KEYS.finditer(keys):
        if key["enter"]:
            return Typed(text, entered=True), keys[key.end() :]
        if key["control"] == "\x04" and not text:
            return Typed("", end=True), keys[key.end() :]
        if key["control"] in ("\x7f", "\x08"):
            text = text[:-1]
        elif key["control"] == "\x15":  # Ctrl-U
            text = ""
        elif key["control"] == "\x17":  # Ctrl-W
            text = re.sub(r"\S*\s*$", "", text)
        else:
            pasted = key["paste"] or ""
            text += (key["text"] or "") + pasted.replace("\r\n", "\n").replace("\r", "\n")
    return Typed(text), ""


def takes_marks() -> bool:
    """Return whether pastes can have marks: the terminal and readline must know them."""
    if os.environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        return False
    with suppress(ImportError):
        import readline

        return "libedit" not in (readline.__doc__ or "")
    return False


class TypedAhead:
    """The keys of standard input, where it is a terminal, while the program is busy."""

    def __init__(self) -> None:
        self.keys = bytearray()  # typed and not taken yet
        self.lock = threading.RLock()  # of the keys; a signal may come while it is held
        self.at = 0.0  # when the last one came (s)
        self.reader: threading.Thread | None = None  # while keys are held
        self.active = termios is not None and sys.stdin is not None and sys.stdin.isatty()
        if not self.active:
            return
        self.file = sys.stdin.fileno()
        self.before = termios.tcgetattr(self.file)
        self.marks = takes_marks()
        self.wake, self.waker = os.pipe()
        atexit.register(self.drop_and_restore)
        signal.signal(signal.SIGTERM, self._end_by)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while torch is imported
            signal.signal(signal.SIGINT, self._end_by)

    def hold(self) -> None:
        """Take the keys from now on, unseen, Ctrl-D among them."""
        if not self.active or self.reader:
            return
        mode = termios.tcgetattr(self.file)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[3] |= termios.NOFLSH  # Ctrl-C leaves the keys before it, which `drop` counts
        termios.tcsetattr(self.file, termios.TCSANOW, mode)
        if self.marks:
            print(MARKS_ON, end="", flush=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def release(self) -> None:
        """Leave the keys to others, once a paste that has begun is complete."""
        if not self.reader:
            return
        while self._within_paste() and time.monotonic() - self.at < PASTE_S:
            time.sleep(IDLE_S)
        os.write(self.waker, b".")
        self.reader.join()
        self.reader = None
        termios.tcsetattr(self.file, termios.TCSANOW, self.before)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Leave the keys to others meanwhile."""
        held = self.reader is not None
        self.release()
        try:
            yield
        finally:
            if held:
                self.hold()

    def take(self) -> Typed:
        """Return the first text that was typed ahead, up to Enter if that was typed."""
        with self.lock:
            typed, rest = first_typed(self.keys.decode(errors="surrogateescape"))
            self.keys[:] = rest.encode(errors="surrogateescape")
        return typed

    def drop(self) -> int:
        """Forget the keys, those that are still coming included. Returns: the lines they made."""
        if self.reader:
            while time.monotonic() - self.at < IDLE_S:
                time.sleep(IDLE_S)
        with self.lock:
            text = re.sub(rb"\033\[20[01]~", b"", self.keys)
            self.keys.clear()
        return len(text.splitlines())

    def drop_and_restore(self) -> None:
        """Forget the keys of a program that ends while it is busy: no shell shall get them."""
        if not self.reader:
            return
        self.drop()
        termios.tcflush(self.file, termios.TCIFLUSH)
        self.close()

    def close(self) -> None:
        """Leave the keys to others for good."""
        self.release()
        if self.active and self.marks:
            with suppress(OSError):
                print(MARKS_OFF, end="", flush=True)

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self.file, self.wake], [], [])
            if self.wake in ready:
                os.read(self.wake, 1)
                return
            keys = b""
            with suppress(OSError):
                keys = os.read(self.file, 1 << 16)
            if not keys:  # the terminal has gone
                return
            with self.lock:
                self.keys += keys
            self.at = time.monotonic()

    def _within_paste(self) -> bool:
        return self.keys.rfind(b"\033[200~") > self.keys.rfind(b"\033[201~")

    def _end_by(self, number: int, _: object) -> None:
        self.drop_and_restore()
        termios.tcsetattr(self.file, termios.TCSANOW, self.before)  # of readline's mode, too
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


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
    breaks = file.isatty() and os.environ.get("TERM") != "dumb"

    def show(text: str) -> None:
        print(wrapped.push(text) if breaks else text, end="", file=file, flush=True)

    return show


def columns_of(letter: str) -> int:
    """Return the columns that a letter takes on a terminal."""
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
