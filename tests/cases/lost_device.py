"""Keep the tests of a GPU going when one of them loses the device or never ends.

An illegal access poisons its process: every later call of CUDA in it fails. Of several pytest processes (xdist) the one
that it happened to ends itself; the test is reported, and a fresh process takes its place.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def watched(use: Callable[[], object], limit_s: float) -> Iterator[None]:
    """Around a test. use: raises when the device is lost; limit_s: after which a process of several ends itself."""
    among_others = "PYTEST_XDIST_WORKER" in os.environ
    if among_others:
        faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        use()
    except Exception as error:  # of whatever kind: nothing runs here any more
        if among_others:
            os._exit(1)
        pytest.exit(f"the device is lost: {error}", returncode=1)
