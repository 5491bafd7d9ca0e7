"""Apply a function to many items in as many processes as there are CPUs.

The processes are forked, so that the function may be any object of this process, such as a
tokenizer's method; items and results are pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

FEW = 512  # items that take less time than forking does
CHUNK = 32  # items that a process gets at a time

_function: Callable | None = None  # of a forked process


class Workers:
    """A function, and the processes that run it; they are forked when they are first needed."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function
        self.processes: ProcessPoolExecutor | None = None

    def map(self, items: Sequence[Any]) -> Iterable[Any]:
        """Return the function's results, in order."""
        if len(items) < FEW:
            return map(self.function, items)
        if self.processes is None:
            self.processes = ProcessPoolExecutor(
                os.cpu_count(), get_context("fork"), _inherit, (self.function,)
            )
        return self.processes.map(_call, items, chunksize=CHUNK)


def _inherit(function: Callable) -> None:
    global _function
    _function = function


def _call(item: Any) -> Any:
    return _function(item)
