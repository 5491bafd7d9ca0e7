"""The C++ operators' loops on several threads: none is left out, none waits for a thread that gets no processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends.library import has_cpu_operators, single_torch_thread
from drafts.residual import residual_accept
from reference import choose
from run.engine import Engine
from run.library import generate
from run.load import load
from run.options import GenerateConfig

DEMO = Path(__file__).parents[2] / "checkpoints" / "demo"

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


def test_eager_passes_beside_compiled_ones_leave_our_loops_the_cores():
    """Eager passes run prompts, and a head that wakes.

    Without --compile, PyTorch's loops keep their threads.
    """
    try:
        torch.set_num_threads(3)
        for fused, threads in ((object(), 1), (None, 3)):
            target = SimpleNamespace(program=fused, backend=choose(torch.device("cpu")))
            engine = Engine(target, (), 0, config=GenerateConfig())
            assert engine.run_step(None, "", torch.get_num_threads) == threads
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("compiled, threads", [(True, 1), (False, 3)])
def test_cycles_leave_our_loops_the_cores(monkeypatch, compiled, threads):
    """The residual rule is PyTorch's operators in the middle of a cycle."""
    seen = []

    def counted(*arguments):
        seen.append(torch.get_num_threads())
        return residual_accept(*arguments)

    monkeypatch.setattr("drafts.residual.residual_accept", counted)
    options = {"draft": "eagle", "tree": "chain", "accept": "residual", "temperature": 1.0}
    options |= {"checkpoint": str(DEMO), "head": f"{DEMO}-eagle", "device": "cpu"}
    try:
        torch.set_num_threads(3)
        engine = load(compile=compiled, **options)
        generate(engine, ["def f("], max_new_tokens=8)
        assert seen and set(seen) == {threads} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


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


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a system where threads can be bound"
)
def test_no_loop_waits_for_a_thread_that_does_not_run():
    """More threads than processors: an OpenMP team would take a time slice for every loop."""
    program = """
import os, sys, time, torch
from backends.library import has_cpu_operators
assert has_cpu_operators()
x, w = torch.randn(4, 256).bfloat16(), torch.randn(4096, 256).bfloat16()
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
def seconds(threads):
    torch.set_num_threads(threads)
    for _ in range(20): torch.ops.gpt_eagle.matmul(x, w, None, None, len(w), False)
    began = time.perf_counter()
    for _ in range(60): y = torch.ops.gpt_eagle.matmul(x, w, None, None, len(w), False)
    return time.perf_counter() - began, y
rounds = [(seconds(1), seconds(4)) for _ in range(3)]
assert all(torch.equal(a[1], b[1]) for a, b in rounds)
print(min(b[0] for a, b in rounds) / min(a[0] for a, b in rounds))
"""
    done = run("-c", program, OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 8  # a team of four on one processor takes hundreds of times as long


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
