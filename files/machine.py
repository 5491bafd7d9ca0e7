"""The folder backends/ answers these questions about the machine; defaults hold without it.

Without it there are no C++ operators, no huge pages and no packed blocks.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from options import part_or


def _no() -> bool:
    return False


@contextmanager
def _unchanged(whether: bool = True) -> Iterator[None]:
    yield


def huge_pages() -> Any:
    """Return new huge pages for weights, or None."""
    return part_or("machine", "huge_pages", lambda: None)()


def blocks() -> Any:
    """Return the module of weights that stay in a file's blocks; None: they become numbers."""
    return part_or("machine", "blocks", None)


# whether there are C++ operators (built, if need be); whether they are loaded
has_cpu_operators: Callable[..., bool] = part_or("machine", "has_cpu_operators", _no)
cpu_operators_are_loaded: Callable[[], bool] = part_or("machine", "cpu_operators_are_loaded", _no)
# a context in which PyTorch's own loops run on one thread
single_torch_thread: Callable[..., Any] = part_or("machine", "single_torch_thread", _unchanged)
# the layouts of codes with zero points; None: they become numbers
pack_codes: Callable[..., Any] | None = part_or("machine", "pack_codes", None)
# the processor and the unit of its matmuls, in a few words
describe_cpu: Callable[[], str] = part_or("machine", "describe_cpu", platform.processor)
