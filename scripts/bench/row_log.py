"""A file of JSON lines that survives a kill: a torn line is dropped, and measured again.

This module imports no torch, so that programs whose own modules have the names of ours can use it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


class Log:
    """A file of JSON lines, appended to as they are measured; `rows` holds its content."""

    def __init__(self, path: str, flag: str):
        """path: "" keeps the rows in memory only; flag: the one that named the file

        Raises: ValueError for a file that is no such log. Writes: the file, when its last line is
        torn.
        """
        self.path = Path(path) if path else None
        self.rows = []
        if self.path is None or not self.path.exists():
            return
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError:  # not JSON, or not UTF-8
                if number < len(lines):
                    raise ValueError(
                        f"{flag}: {where} is not valid JSON; name another file"
                    ) from None
                print(f"note: {where} is torn; it is dropped and measured again", file=sys.stderr)
                os.truncate(self.path, sum(map(len, lines[:-1])))
                return
            if not isinstance(row, dict):
                raise ValueError(f"{flag}: {where} is no JSON object; name another file")
            self.rows.append(row)
        if lines and not lines[-1].endswith(b"\n"):
            self._write("\n")

    def add(self, rows: list[dict]) -> None:
        """Append rows, in one write."""
        self.rows += rows
        self._write("".join(json.dumps(row) + "\n" for row in rows))

    def _write(self, text: str) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
