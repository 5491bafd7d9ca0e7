"""Time a start: from the command to the first text and to the end, beside llama.cpp.

    python scripts/bench/start.py --llama_python .venv-llama/bin/python

1. Every start is a process of its own, with its standard output in a pipe. The first byte there is
   the first text. An answer is cut at a short and a long length.
2. Rounds run the contestants in turn. A first start fills generate.py's caches. `--cold` empties
   them before it and prints it: the CPU operators (`XDG_CACHE_HOME`) and torch's compiled code.
3. llama.cpp is its Python binding, in a Python that has it (`pip install llama-cpp-python`), on the
   same file. It renders the chat by the file's own template, decodes greedily, and prints like
   generate.py: a text, then tokens and seconds.
4. A start that fails, or whose text differs from its contestant's first one, is an error. Texts of
   two contestants may part, as their roundings differ; the table shows the place.

tokens/s is of decoding alone, as each contestant counts it. The model must be downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from run.options import DEFAULT, ROOT
from run.parsing import one_line_errors, option, parse


@dataclass(frozen=True)
class StartConfig:
    """Options. Units and effects are in the help texts."""

    llama_python: str = option(
        "", "a Python that has llama-cpp-python; without one llama.cpp is left out"
    )
    threads: int = option(2, "threads of llama.cpp; generate.py takes all cores", least=1)
    rounds: int = option(3, "second starts of every contestant", least=1)
    cold: bool = option(False, "also print a first start with empty caches")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(StartConfig, "start.py", __doc__) if __name__ == "__main__" else None

from run.session import common_prefix
from scripts.bench.measure import Series, environment

PROMPT = "Write a long story about a lighthouse keeper."
LENGTHS = (50, 500)  # tokens, at which the answer is cut
SPEED = re.compile(r"(\d+) tokens, ([\d.]+) tokens/s")  # in the line that ends a run
# command line: model, prompt, tokens at most, threads
LLAMA = """
import sys, time
from llama_cpp import Llama
path, prompt, most, threads = sys.argv[1:]
threads = int(threads)
model = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
messages = [{"role": "user", "content": prompt}]
options = {"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": int(most)}
first = None
for part in model.create_chat_completion(messages, stream=True, **options):
    text = part["choices"][0]["delta"].get("content", "")
    if text:
        count = model.n_tokens
        if first is None:
            first = time.perf_counter()
            began = count
        print(text, end="", flush=True)
seconds = time.perf_counter() - first
print()
print(f"{count} tokens, {(count - began) / seconds:.1f} tokens/s", file=sys.stderr)
"""


class Start(NamedTuple):
    """Times and output of a process."""

    first_s: float  # from the command to its first text
    end_s: float  # and to its end
    text: str
    tokens: int
    tokens_per_s: float  # of decoding


def start(command: list[str], caches: str) -> Start:
    """Run one process. Raises: ValueError when it fails."""
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start finds the byte code of the first
    if caches:
        env |= {"XDG_CACHE_HOME": caches, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/compiler"}
    first = 0.0
    output = b""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors
        ) as run:
            while data := os.read(run.stdout.fileno(), 1 << 16):
                first = first or time.perf_counter() - began
                output += data
        end = time.perf_counter() - began
        errors.seek(0)
        notes = errors.read().decode(errors="replace").strip()
    if run.returncode:
        reason = notes[-200:]
        raise ValueError(f"{shlex.join(command)[:80]} ended with {run.returncode}: {reason}")
    tokens = 0
    speed = 0.0
    match = SPEED.search(notes)
    if match:
        tokens = int(match[1])
        speed = float(match[2])
    return Start(first or end, end, output.decode().rstrip("\n"), tokens, speed)


def contestants(config: StartConfig) -> dict[str, list[str]]:
    """Return the commands by their names in the table."""
    commands = {}
    for length in LENGTHS:
        ours = [sys.executable, "generate.py", "--chat", "--prompt", PROMPT]
        ours += ["--max_new_tokens", str(length)]
        commands[f"{length}, gpt-eagle"] = ours
        if config.llama_python:
            llama = os.path.abspath(config.llama_python)
            arguments = [DEFAULT, PROMPT, str(length), str(config.threads)]
            commands[f"{length}, llama.cpp"] = [llama, "-c", LLAMA, *arguments]
    return commands


def measured(config: StartConfig) -> dict[str, list[Start]]:
    """Run all contestants in turn. Raises: ValueError for one that fails or changes its text."""
    commands = contestants(config)
    starts: dict[str, list[Start]] = {name: [] for name in commands}
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as empty:
        caches = empty if config.cold else ""
        for number in range(config.rounds + 1):
            for name, command in commands.items():
                run = start(command, caches)
                if texts.setdefault(name, run.text) != run.text:
                    raise ValueError(
                        f"{name}: start {number + 1} gave another text than the first one"
                    )
                if number:  # the first fills caches
                    starts[name].append(run)
                elif config.cold:
                    times = f"first text {run.first_s:.1f} s, end {run.end_s:.1f} s"
                    print(f"first start, {name}: {times}", flush=True)
    return starts


def summary(name: str, runs: list[Start]) -> dict[str, Any]:
    """Print a contestant's line. Returns: it as a dict."""
    first = Series.of([run.first_s for run in runs])
    end = Series.of([run.end_s for run in runs])
    speed = Series.of([run.tokens_per_s for run in runs])
    tokens = runs[0].tokens
    times = f"first text {first.text(1, 2)} s, end {end.text(1, 2)} s"
    print(f"{name:24} {times}, {tokens} tokens at {speed.text(1, 1)}/s")
    row = {"name": name, "first_s": first, "end_s": end}
    return row | {"tokens": tokens, "tokens_per_s": speed}


def bench(config: StartConfig) -> None:
    """Measure and print."""
    machine = environment("cpu")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    starts = measured(config)
    print(f"second starts, median (range) of {config.rounds}:")
    rows = [summary(name, runs) for name, runs in starts.items()]
    for length in LENGTHS:
        texts = {
            name: runs[0].text for name, runs in starts.items() if name.startswith(f"{length},")
        }
        reference = texts[f"{length}, gpt-eagle"]
        for name, text in texts.items():
            same = common_prefix(text, reference)
            if text != reference:
                parts = f"{text[same:][:30]!r}, not {reference[same:][:30]!r}"
                print(f"{name}: another text from character {same} on: {parts}")
    print(json.dumps({"environment": machine, "rows": rows}))


def main() -> None:
    """Run the command line."""
    with one_line_errors("start.py"):
        bench(COMMAND or parse(StartConfig, "start.py", __doc__))


if __name__ == "__main__":
    main()
