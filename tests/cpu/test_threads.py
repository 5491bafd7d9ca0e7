"""The C++ operators' loops on several threads: none is left out, none waits for a thread that gets no processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from backends.library import has_cpu_operators, single_torch_thread

pytestmark = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")
LISTS_THREADS = pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="needs a system that lists a process's threads"
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in a process of its own, in the folder of the project."""
    command, root = [sys.executable, *arguments], Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=root, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def workers() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


@LISTS_THREADS
def test_our_loops_keep_their_threads_where_others_have_one():
    """Nine, where there were fewer: workers are hired, and never leave. Afterwards everything is as it was."""
    x, weight = torch.randn(60, 512).bfloat16(), torch.randn(1000, 512).bfloat16()
    product = lambda: torch.ops.gpt_eagle.matmul(x, weight, None, None, len(weight), False)  # noqa: E731
    want = product()
    with single_torch_thread():
        assert torch.get_num_threads() == 1, "which the suite sets: there is nothing to keep"
    try:
        torch.set_num_threads(9)
        before = workers()
        with single_torch_thread(False):
            assert torch.get_num_threads() == 9
        with pytest.raises(KeyError), single_torch_thread():
            assert torch.get_num_threads() == 1
            assert torch.equal(product(), want)
            raise KeyError
        assert torch.get_num_threads() == 9 and workers() > before
        torch.set_num_threads(1)
        assert torch.equal(product(), want)
    finally:
        torch.set_num_threads(1)


@LISTS_THREADS
def test_loops_of_several_callers():
    """One caller's loop runs on all threads, the others' meanwhile on their own; all are right."""
    shapes = [(9, 128, 8192), (1, 256, 9000), (17, 64, 8500)]
    inputs = [(torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()) for m, k, n in shapes]
    wanted = [torch.ops.gpt_eagle.matmul(x, w, None, None, len(w), False) for x, w in inputs]
    before, wrong = torch.get_num_threads(), []

    def work(turn):
        for i in range(60):
            (x, w), want = inputs[(i + turn) % 3], wanted[(i + turn) % 3]
            if not torch.equal(torch.ops.gpt_eagle.matmul(x, w, None, None, len(w), False), want):
                wrong.append(1)

    torch.set_num_threads(4)
    try:
        work(0)
        assert workers() > 3  # the caller's three helpers are there
        callers = [threading.Thread(target=work, args=(turn,)) for turn in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong
