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
from runtime import CompiledStep, compiled

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
    step.waits, step.on_first_run = False, [begun.set]
    assert step(torch.ones(2)).tolist() == [2, 2] and step(torch.ones(2)).tolist() == [2, 2]
    assert begun.wait(10) and not step.on_first_run and "compiled" not in step.__dict__
    step.waits = True
    assert step(torch.ones(2)).tolist() == [2, 2] and "compiled" in step.__dict__


def test_compiling_for_another_device_builds_no_cpu_operators(monkeypatch):
    """A machine with a GPU may have no C++ compiler, and need none."""
    monkeypatch.setattr("ops.library._there", [])
    monkeypatch.setattr("ops.cpu.build.load_operators", lambda: pytest.fail("built the CPU operators"))
    assert callable(compiled(lambda x: x))


# ------------------------------------------------------------------------------------------- decoding


@OPERATORS
@pytest.mark.usefixtures("traced")
def test_compiled_cycles_take_over_and_change_nothing():
    """Of every preset of --tree auto: none, a chain, a tree."""
    options = {"checkpoint": DEMO, "temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}
    options |= {"tree_depth": 3, "tree_topk": 3, "tree_size": 8}
    wanted = generate(load(**options), [PROMPT]).tokens
    engine = load(wait=False, compile=True, **options)
    assert len(engine.cycles) == 3 and not any(cycle.waits for cycle in engine.cycles)
    first = generate(engine, [PROMPT])
    assert first.tokens == wanted and first.stats["eager_cycles"] > 0 and first.stats["compile_s"] == 0
    ends = time.monotonic() + 400
    while not all(cycle.waits for cycle in engine.cycles) and time.monotonic() < ends:
        assert generate(engine, [PROMPT]).tokens == wanted
    last = generate(engine, [PROMPT])
    assert last.tokens == wanted and last.stats["eager_cycles"] == 0 and all(cycle.waits for cycle in engine.cycles)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"accept": "residual", "temperature": 1.0, "tree": "chain"}],
    ids=["other bits", "other rule"],
)
def test_who_waits_all_the_same(options):
    """Where an eager cycle and a compiled one may differ by a bit."""
    engine = load(**{"wait": False, "compile": True, "checkpoint": DEMO, "tree": "chain", "tree_depth": 1} | options)
    assert all(cycle.waits for cycle in engine.cycles) and engine.compile_s > 0


def broken(device):
    raise RuntimeError("a bug in the compiler\nwith details")


@OPERATORS
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("reason", "says"),
    [(lambda device: "no compiler in this test", "no compiler in this test"),
     (broken, "RuntimeError: a bug in the compiler")],
    ids=["none", "broken"],
)  # fmt: skip
def test_without_a_compiler_it_says_so_and_goes_on(monkeypatch, capsys, reason, says):
    monkeypatch.setattr("runtime.why_not_compiled", reason)
    engine = load(wait=False, compile=True, checkpoint=DEMO, tree="chain", max_new_tokens=20)
    assert len(generate(engine, [PROMPT]).tokens[0]) == 20
    ends, said = time.monotonic() + 30, ""
    while says not in said and time.monotonic() < ends:
        said += capsys.readouterr().err
        time.sleep(0.05)
    assert f"note: torch.compile does not work here ({says}); running eagerly\n" in said
    assert not any(cycle.waits for cycle in engine.cycles)


@OPERATORS
def test_eager_and_compiled_cycles_give_the_same_bits():
    """Really compiled: features, and what the draft head made of them, after many cycles; the tokens are vanilla's."""
    options = {"checkpoint": DEMO, "tree": "chain", "tree_depth": 2, "temperature": 0.7, "ignore_eos": True}
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
    plain = {"checkpoint": DEMO, "draft": "none", "temperature": 0.7, "ignore_eos": True}
    assert generate(load(max_new_tokens=80, **plain), [PROMPT]).tokens == tokens
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
import atexit, os, sys
from runtime import background, ends_at_once
folder, thread, *ends = sys.argv[1:]
for number, end in enumerate(ends):  # processes of their own, which import torch only once
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    break
else:
    sys.exit()
atexit.register(print, "the interpreter's own end")
def endless():
    while True: sum(range(1000))
with ends_at_once():
    if thread: background(endless)
    print("said")
    exec(end)
"""
ENDS = {  # status, and what is said on stderr
    "pass": (0, ""), "sys.exit(2)": (2, ""), "sys.exit()": (0, ""), "sys.exit(130)": (130, ""),
    "sys.exit('text')": (1, "text\n"), "[][1]": (1, "IndexError"), "raise KeyboardInterrupt": (1, "KeyboardInterrupt"),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.parametrize(("thread", "ends"), [("a thread", ENDS), ("", ["sys.exit(2)"])], ids=["a thread", "none"])
def test_a_process_ends_at_once(tmp_path, thread, ends):
    """With a thread at work; without, as always."""
    done = run("-c", ENDING, str(tmp_path), thread, *ends)
    assert done.returncode == 0 and done.stdout.split() == [str(ENDS[end][0]) for end in ends], done.stderr
    for number, end in enumerate(ends):
        says = ENDS[end][1]
        out, err = ((tmp_path / f"{number}.{name}").read_text() for name in ("out", "err"))
        assert out == "said\n" + ("" if thread else "the interpreter's own end\n"), end
        assert says in err and (says or not err), end


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
    for _ in range(20): torch.ops.gpt_eagle.linear_bf16(x, w, None, False)
    began = time.perf_counter()
    for _ in range(200): y = torch.ops.gpt_eagle.linear_bf16(x, w, None, False)
    return time.perf_counter() - began, y
rounds = [(seconds(1), seconds(4)) for _ in range(5)]
assert all(torch.equal(a[1], b[1]) for a, b in rounds)
print(min(b[0] for a, b in rounds) / min(a[0] for a, b in rounds))
"""
    done = run("-c", program, OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 8  # a team of four on one processor takes hundreds of times as long


def workers() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


@OPERATORS
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs a system that lists a process's threads")
def test_loops_of_several_callers():
    """One caller's loop runs on all threads, the others' meanwhile on their own; all are right."""
    shapes = [(9, 128, 8192), (1, 256, 9000), (17, 64, 8500)]
    inputs = [(torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()) for m, k, n in shapes]
    wanted = [torch.ops.gpt_eagle.linear_bf16(x, w, None, False) for x, w in inputs]
    before, wrong = torch.get_num_threads(), []

    def work(turn):
        for i in range(200):
            (x, w), want = inputs[(i + turn) % 3], wanted[(i + turn) % 3]
            if not torch.equal(torch.ops.gpt_eagle.linear_bf16(x, w, None, False), want):
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
