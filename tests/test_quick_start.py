"""Text before everything is compiled: steps that run as they are meanwhile, and a process that ends at once.

And loops on several threads: nothing is left out, and none waits for a thread that gets no processor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from generate import generate, load
from ops.library import has_cpu_operators
from options import DEMO
from runtime import CompiledStep

ROOT = Path(DEMO).parents[1]
PROMPT = "def read_lines(path):"
OPERATORS = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


# ---------------------------------------------------------------------------------------------- one step


@pytest.mark.usefixtures("traced")
def test_a_step_that_does_not_wait_runs_as_it_is():
    step, begun = CompiledStep(lambda x: x + 1), threading.Event()
    step.waits, step.behind = False, [begun.set]
    assert step(torch.ones(2)).tolist() == [2, 2] and step(torch.ones(2)).tolist() == [2, 2]
    assert begun.wait(10) and step.eager == 2 and not step.behind and "compiled" not in step.__dict__
    step.waits = True
    assert step(torch.ones(2)).tolist() == [2, 2] and step.eager == 2 and "compiled" in step.__dict__


# ------------------------------------------------------------------------------------------- decoding


@OPERATORS
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_compiled_cycles_take_over_and_change_nothing(temperature):
    """Of every preset of --tree auto."""
    options = {"checkpoint": DEMO, "temperature": temperature, "max_new_tokens": 60, "ignore_eos": True}
    wanted = generate(load(**options), [PROMPT]).tokens
    engine = load(wait=False, compile=True, **options)
    assert not any(cycle.waits for cycle in engine.cycles)
    first = generate(engine, [PROMPT])
    assert first.tokens == wanted and first.stats["eager_cycles"] > 0 and first.stats["compile_s"] == 0
    ends = time.monotonic() + 120
    while not all(cycle.waits for cycle in engine.cycles) and time.monotonic() < ends:
        assert generate(engine, [PROMPT]).tokens == wanted
    before = sum(cycle.eager for cycle in engine.cycles)
    assert generate(engine, [PROMPT]).tokens == wanted
    assert sum(cycle.eager for cycle in engine.cycles) == before and all(cycle.waits for cycle in engine.cycles)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"accept": "residual", "temperature": 1.0, "tree": "chain"}],
    ids=["other bits", "other rule"],
)
def test_who_waits_all_the_same(options):
    """Where an eager cycle and a compiled one may differ by a bit."""
    engine = load(wait=False, compile=True, checkpoint=DEMO, tree=options.pop("tree", "chain"), **options)
    assert all(cycle.waits for cycle in engine.cycles) and engine.compile_s > 0


@OPERATORS
@pytest.mark.usefixtures("traced")
def test_without_a_compiler_it_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr("generate.why_not_compiled", lambda device: "no compiler in this test")
    engine = load(wait=False, compile=True, checkpoint=DEMO, tree="chain", max_new_tokens=20)
    assert len(generate(engine, [PROMPT]).tokens[0]) == 20
    ends = time.monotonic() + 30
    said = ""
    while "no compiler in this test" not in said and time.monotonic() < ends:
        said += capsys.readouterr().err
        time.sleep(0.05)
    assert "note: torch.compile does not work here (no compiler in this test); running eagerly" in said
    assert not any(cycle.waits for cycle in engine.cycles)


@OPERATORS
def test_eager_and_compiled_cycles_give_the_same_bits():
    """Really compiled: features, and what the draft head made of them, after many cycles at T = 1."""
    options = {"checkpoint": DEMO, "tree": "chain", "tree_depth": 2, "temperature": 1.0, "ignore_eos": True}
    ends = []
    for compile in (False, True):
        engine = load(compile=compile, max_new_tokens=80, **options)
        if not compile:
            from decode import FusedLayers

            for layers in (engine.target.layers, engine.drafter.layers):
                layers.fused = FusedLayers(layers)
        result = generate(engine, [PROMPT])
        state = engine.pool[-1].state if engine.pool else None
        ends.append((result.tokens, result.stats["accept_lengths"], None if state is None else state.draft.hidden))
    (tokens, lengths, hidden), (others, other_lengths, other_hidden) = ends
    assert tokens == others and lengths == other_lengths
    assert hidden is not None and torch.equal(hidden, other_hidden)


@OPERATORS
def test_the_command_line_does_not_wait():
    """It ends while the compiler is at work, with the same text as without --compile."""
    options = ["--checkpoint", DEMO, "--prompt", PROMPT, "--max_new_tokens", "24", "--temperature", "0.8"]
    plain, quick = run("generate.py", *options), run("generate.py", "--compile", *options)
    assert plain.returncode == quick.returncode == 0, quick.stderr
    text = [done.stdout[: done.stdout.rindex("\n23 tokens")] for done in (plain, quick)]
    assert text[0] == text[1] and len(text[0]) > 20
    assert "before they were compiled" in quick.stdout and "Traceback" not in quick.stderr


ENDING = """
import sys, time
from runtime import behind, ends_at_once
def endless():
    while True: sum(range(1000))
with ends_at_once():
    behind(endless)
    print("said")
    {end}
"""


@pytest.mark.parametrize(
    ("end", "status"), [("pass", 0), ("sys.exit(2)", 2), ("sys.exit()", 0), ("sys.exit(130)", 130)]
)
def test_a_process_ends_at_once(end, status):
    done = run("-c", ENDING.format(end=end))
    assert (done.returncode, done.stdout, done.stderr) == (status, "said\n", "")


def test_our_own_bugs_keep_their_traceback():
    done = run("-c", ENDING.format(end="[][1]").replace("behind(endless)", ""))
    assert done.returncode == 1 and "IndexError" in done.stderr


# ----------------------------------------------------------------------------------------------- threads


@OPERATORS
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system where threads can be bound")
def test_no_loop_waits_for_a_thread_that_does_not_run():
    """More threads than processors: an OpenMP team would take a time slice for every loop."""
    program = """
import os, sys, time, torch
from ops.library import has_cpu_operators
assert has_cpu_operators()
x, w = torch.randn(4, 256).bfloat16(), torch.randn(4096, 256).bfloat16()
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
def seconds(threads):
    torch.set_num_threads(threads)
    for _ in range(50): torch.ops.gpt_eagle.linear_bf16(x, w, None, False)
    began = time.perf_counter()
    for _ in range(300): y = torch.ops.gpt_eagle.linear_bf16(x, w, None, False)
    return time.perf_counter() - began, y
(alone, want), (crowd, got) = seconds(1), seconds(4)
assert torch.equal(want, got)
print(crowd / alone)
"""
    done = run("-c", program, OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3


@OPERATORS
def test_loops_of_several_callers():
    """One caller's loop runs on all threads, the others' meanwhile on their own; all are right."""
    x, w = torch.randn(9, 128).bfloat16(), torch.randn(999, 128).bfloat16()
    want = torch.ops.gpt_eagle.linear_bf16(x, w, None, False)
    before, wrong = torch.get_num_threads(), []

    def work():
        for _ in range(300):
            if not torch.equal(torch.ops.gpt_eagle.linear_bf16(x, w, None, False), want):
                wrong.append(1)

    torch.set_num_threads(4)
    try:
        callers = [threading.Thread(target=work) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong
