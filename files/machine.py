"""What the folder backends/ knows of this machine, and what holds without that folder.

Without it there are no C++ operators, no huge pages, no packed blocks, and no switches of them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from options import part_or


def _no(*families: str) -> bool:
    return False


@contextmanager
def _unchanged(whether: bool = True) -> Iterator[None]:
    yield


def _no_pages() -> None:
    return None


# whether the C++ operators serve these families (built, if need be); whether they are loaded
has_cpu_operators: Callable[..., bool] = part_or("machine", "has_cpu_operators", _no)
cpu_operators_are_loaded: Callable[[], bool] = part_or("machine", "cpu_operators_are_loaded", _no)
# whether the definitions replace these families
is_plain: Callable[..., bool] = part_or("machine", "is_plain", _no)
# a context in which PyTorch's own loops run on one thread
single_torch_thread: Callable[..., Any] = part_or("machine", "single_torch_thread", _unchanged)
# new huge pages for weights, or None
huge_pages: Callable[[], Any] = part_or("machine", "huge_pages", _no_pages)
# the module of weights that stay in a file's blocks, and the layouts of codes with zero points;
# None: both become numbers
blocks: Any = part_or("machine", "blocks", None)
pack_codes: Callable[..., Any] | None = part_or("machine", "pack_codes", None)
# the processor and the unit of its matmuls, in a few words
describe_cpu: Callable[[], str] = part_or("machine", "describe_cpu", platform.processor)
