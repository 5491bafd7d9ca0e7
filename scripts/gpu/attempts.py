"""Try pieces of work one after the other, so that one that fails or hangs ends alone.

1. A group of attempts, a rung of a ladder for example, begins once: a log of JSON lines gets a row
   at the beginning of every attempt, and one at its end.
2. An exception is recorded with its traceback, and the next attempt begins.
3. Behind every attempt the device is used once. If it is lost, no later call in this process can
   succeed: the process ends with status LOST.
4. A hang ends the process with all stacks on standard error, also inside a driver's call, and so
   does SIGTERM, by which a part of a call ends at its limit.
5. The same command again leaves out the groups that have begun, so it goes on behind them.

This module imports no torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from scripts.bench.row_log import Log

LOST = 3  # exit status of a process whose device is lost
FAILED = 4  # exit status where all attempts have ended and some of them failed
LONGER = 3.0  # an attempt may take so many times as long as the longest one before it


class Attempts:
    """The attempts of one program."""

    def __init__(
        self, log: Log, label: dict[str, Any], limit_s: float, use_device: Callable[[], object]
    ):
        """label: fields of every row, which tell these attempts from others in the same log

        limit_s: for an attempt; on a slow machine more, by the time of those before it
        use_device: raises when the device is lost
        """
        self.log = log
        self.label = label
        self.limit_s = limit_s
        self.use_device = use_device

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of these attempts, of earlier processes too."""
        return [row for row in self.log.rows if self.label.items() <= row.items()]

    def left(self, groups: list[str]) -> list[str]:
        """Return the groups that have not begun."""
        begun = {row["group"] for row in self.rows}
        return [group for group in groups if group not in begun]

    def run(self, group: str, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Try some work. Returns: the row; it holds `error` if the work failed. Writes: the log."""
        row = self.label | {"group": group, "name": name}
        self._note(row | {"begun": True})
        began = time.monotonic()
        try:
            with self.watched():
                facts = work()
        except Exception as error:  # every failure belongs in the record
            text = "".join(traceback.format_exception(error))
            print(text, file=sys.stderr, flush=True)
            first_line = str(error).strip().partition("\n")[0]
            facts = {"error": f"{type(error).__name__}: {first_line[:300]}", "traceback": text}
        row = row | {"s": time.monotonic() - began} | facts
        self._note(row)
        try:
            self.use_device()
        except Exception as error:
            self._note(row | {"error": f"the device is lost: {str(error)[:200]}", "lost": True})
            os._exit(LOST)
        return row

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the process with all stacks where the work inside takes too long, or at SIGTERM."""
        longest_s = max((row.get("s", 0.0) for row in self.rows), default=0.0)
        limit_s = max(self.limit_s, LONGER * longest_s)
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
        faulthandler.register(signal.SIGTERM, file=sys.__stderr__, chain=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)

    def finish(self) -> NoReturn:
        """End the process: status FAILED where an attempt failed, hung, or found a fault."""
        ended = {(row["group"], row["name"]) for row in self.rows if "begun" not in row}
        hung = any((row["group"], row["name"]) not in ended for row in self.rows)
        wrong = any("error" in row or row.get("fault") for row in self.rows)
        sys.exit(FAILED if hung or wrong else 0)

    def _note(self, row: dict[str, Any]) -> None:
        self.log.add([row])
        shown = {k: v for k, v in row.items() if k not in ("tokens", "traceback")}
        print(shown, flush=True)
