"""The keyboard of a chat on a terminal: lines with keys to edit them, and keys typed ahead.

1. `ask` reads a turn by prompt_toolkit. Its history is a file of its owner alone.
2. `hold` reads keys at once while the program is busy, from before torch is imported on, and shows
   none of them. The next `ask` begins with them; a paste is one text, whatever its lines.
3. Ctrl-C among the held keys drops those before it and interrupts the program.

Loaded only where standard input and output are a terminal.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import termios
import threading
from contextlib import suppress
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output

from options import private_folder


class Lines(FileHistory):
    """The file of the lines. One that cannot be written any more is left alone."""

    def store_string(self, string: str) -> None:
        """Add a turn. Bytes that are no letters become question marks."""
        with suppress(OSError):
            super().store_string(string.encode(errors="replace").decode())


class Keyboard:
    """The keys of a terminal. They are held, or a prompt has them."""

    def __init__(self) -> None:
        self.fault = ""  # why lines are not kept
        self.dropped = 0  # lines before the last Ctrl-C
        self.input = create_input(sys.stdin)
        self.mode = self.input.raw_mode()
        self.output = create_output(sys.stdout)
        self.output.enable_cpr = False  # some terminals cannot say where their cursor is
        self.session: PromptSession = PromptSession(
            history=self._history(), input=self.input, output=self.output
        )
        self.held: list[KeyPress] = []
        self.reader: threading.Thread | None = None
        self.wake, self.waker = os.pipe()
        atexit.register(self.close)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def _history(self) -> History:
        try:
            path = private_folder() / "history"
            path.touch(0o600)
            path.open("a").close()
        except (OSError, RuntimeError) as error:
            self.fault = getattr(error, "strerror", "") or str(error)
            return InMemoryHistory()
        return Lines(path)

    def ask(self, prompt: str) -> str:
        """Read a turn, which begins with the held keys. Raises: EOFError, KeyboardInterrupt."""
        self._release()
        try:
            return self.session.prompt(prompt)
        finally:
            self.hold()

    def hold(self) -> None:
        """Take the keys from now on, unseen, Ctrl-D among them.

        The terminal stays so during a prompt, too: in a line mode between the two, it would take
        Ctrl-D itself, and nobody would get it.
        """
        self.mode.__enter__()
        self.output.enable_bracketed_paste()
        self.output.flush()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def close(self) -> None:
        """Leave the terminal as it was, and forget the keys: no shell shall get them."""
        if self.reader:
            self._release()
            self._restore()
            termios.tcflush(self.input.fileno(), termios.TCIFLUSH)

    def _release(self) -> None:
        os.write(self.waker, b".")
        self.reader.join()
        self.reader = None
        store_typeahead(self.input, self.held)
        self.held = []

    def _restore(self) -> None:
        self.mode.__exit__()
        with suppress(OSError):
            self.output.disable_bracketed_paste()
            self.output.flush()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self.input.fileno(), self.wake], [], [])
            if self.wake in ready:
                os.read(self.wake, 1)
                return
            for key in self.input.read_keys():
                self.held.append(key)
                if key.key == Keys.ControlC:
                    self._interrupt()
            if self.input.closed:  # the terminal has gone
                return

    def _interrupt(self) -> None:
        self.dropped = sum(map(lines_of, self.held))
        self.held = []
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # it ends the process
            self._restore()
        os.kill(os.getpid(), signal.SIGINT)


def lines_of(key: Any) -> int:
    """Return the lines that a key ends."""
    return len(key.data.splitlines()) if key.key == Keys.BracketedPaste else key.key == Keys.Enter
