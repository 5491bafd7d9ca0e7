"""Keep the lines of a chat for the next one's arrow keys and Ctrl-R, in a file of its owner alone.

A turn of several lines is not kept. `GPT_EAGLE_HISTORY` in the environment names another file; if
empty, nothing is read or written. Two chats at once add their lines to one file.
"""

from __future__ import annotations

import os
from pathlib import Path

from files.io import replace_file
from options import cache_folder

KEPT = 1000  # lines, at least, of a file that has grown long
TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}  # bytes that are no letters stay


class History:
    """The lines of readline and of the file."""

    def __init__(self) -> None:
        """Read the file into readline. A fault is in `fault`, and nothing is kept then."""
        self.path: Path | None = None
        self.fault = ""
        self.last = ""
        named = os.environ.get("GPT_EAGLE_HISTORY")
        if named == "":
            return
        try:
            self.path = Path(named) if named else cache_folder() / "history"
            self._read()
        except (OSError, RuntimeError) as error:
            self.path = None
            self.fault = getattr(error, "strerror", "") or str(error)

    def _read(self) -> None:
        import readline

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(0o600)
        if self.path.is_file():  # and no device, as /dev/null, which is everybody's
            self.path.chmod(0o600)
        lines = self.path.read_text(**TEXT).splitlines()
        for line in lines[-KEPT:]:
            readline.add_history(line)
        if len(lines) > 2 * KEPT:
            text = "\n".join(lines[-KEPT:]) + "\n"
            replace_file(self.path, lambda path: path.write_text(text, **TEXT))

    def add(self, line: str, recall: bool = False) -> None:
        """Keep a line. A file that cannot be written any more is left alone.

        recall: readline has not read the line, and takes it too
        """
        if recall and line:
            import readline

            readline.add_history(line)
        if self.path is None or line in ("", self.last) or len(line.splitlines()) != 1:
            return
        self.last = line
        try:
            with self.path.open("a", **TEXT) as file:
                file.write(f"{line}\n")
        except OSError:
            self.path = None
