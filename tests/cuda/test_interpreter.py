"""The Triton kernels in Triton's interpreter: cases/kernels.py and interpreter_more.py, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, so they cannot run beside tests that compile.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import run_in_interpreter

pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")
CASES = [
    Path(__file__).parents[1] / "cases" / name for name in ("kernels.py", "interpreter_more.py")
]


def test_in_the_interpreter():
    """All cases but the slow ones."""
    run_in_interpreter(CASES, r"[12]\d\d passed")


@pytest.mark.slow
@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_in_the_interpreter_all(monkeypatch, file):
    """The cases left out above: more of the same branches."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-m slow")
    run_in_interpreter([file], r"\d passed")
