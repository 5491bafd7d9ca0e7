"""Time a start: from the command to the first text and to the end, beside llama.cpp.

1. Every start is a process of its own, with its standard output in a pipe. The first byte there is
   the first text. An answer is cut at a short and a long length.
2. Rounds run the contestants in turn. A first start fills generate.py's caches. `--cold` empties
   them before it and prints it: the CPU operators (`XDG_CACHE_HOME`) and torch's compiled code.
3. llama.cpp is its Python binding on the same file. It renders the chat by the file's own template,
   decodes greedily, and prints like generate.py: a text, then tokens and seconds.
4. A start that fails, or whose text differs from its contestant's first one, is an error. Texts of
   two contestants may part, as their roundings differ; the table shows where.

tokens/s is of decoding alone, as each contestant counts it. The model must be downloaded.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any, NamedTuple

from options import require
from run.options import ROOT
from run.session import common_prefix
from scripts.bench.cases import StartOptions
from scripts.bench.common import Report, Series, in_turn, pivot

PROMPT = "Write a long story about a lighthouse keeper."
# fields of a start, their titles and digits
COLUMNS = (("first_s", "first text s", 2), ("end_s", "end s", 2), ("tokens_per_s", "tokens/s", 1))
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
    if text and first is None:
        first = time.perf_counter()
        began = model.n_tokens
    print(text, end="", flush=True)
rate = (model.n_tokens - began) / (time.perf_counter() - first)
print(f"\\n{model.n_tokens} tokens, {rate:.1f} tokens/s", file=sys.stderr)
"""


class Start(NamedTuple):
    """Times and output of a process."""

    first_s: float  # from the command to its first text
    end_s: float  # and to its end
    text: str
    tokens: int
    tokens_per_s: float  # of decoding


def start(command: list[str], caches: str) -> Start:
    """Run one process. Raises: ValueError when it fails, or says no speed."""
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
        ) as process:
            while data := os.read(process.stdout.fileno(), 1 << 16):
                first = first or time.perf_counter() - began
                output += data
        end = time.perf_counter() - began
        errors.seek(0)
        notes = errors.read().decode(errors="replace").strip()
    said = SPEED.search(notes)
    fault = f"{shlex.join(command)[:80]} ended with {process.returncode}: {notes[-200:]}"
    require(process.returncode == 0 and said is not None, fault)
    return Start(first or end, end, output.decode().rstrip("\n"), int(said[1]), float(said[2]))


def contestants(config: StartOptions) -> dict[str, list[str]]:
    """Return the commands by their names in the table."""
    commands = {}
    for length in config.lengths.split(","):
        ours = [
            sys.executable,
            "generate.py",
            "--checkpoint",
            config.checkpoint,
            "--prompt",
            PROMPT,
        ]
        commands[f"{length}, gpt-eagle"] = [*ours, "--max_new_tokens", length]
        if config.llama_cpp:
            arguments = [config.checkpoint, PROMPT, length, str(config.threads)]
            commands[f"{length}, llama.cpp"] = [sys.executable, "-c", LLAMA, *arguments]
    return commands


def run(config: StartOptions) -> None:
    """Measure and print. Raises: ValueError for another text than a contestant's first one."""
    report = Report(config.json)
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as empty:
        caches = empty if config.cold else ""

        def checked(name: str, command: list[str]) -> Start:
            made = start(command, caches)
            if name not in texts and caches:
                times = f"first text {made.first_s:.1f} s, end {made.end_s:.1f} s"
                print(f"first start, {name}: {times}", flush=True)
            fault = f"{name}: a start gave another text than the first one"
            require(texts.setdefault(name, made.text) == made.text, fault)
            return made

        commands = contestants(config)
        runs = {name: partial(checked, name, command) for name, command in commands.items()}
        starts = in_turn(runs, config.rounds, "starts")  # the first round fills caches
    cells = {}
    for name, made in starts.items():
        row: dict[str, Any] = {"name": name, "tokens": made[0].tokens}
        cells[name, "tokens"] = str(made[0].tokens)
        for column, title, digits in COLUMNS:
            row[column] = Series.of([getattr(one, column) for one in made])
            cells[name, title] = row[column].text(digits)
        report.add(row)
        ours = texts[f"{name.partition(',')[0]}, gpt-eagle"]
        same = common_prefix(texts[name], ours)
        cells[name, "text is ours"] = "whole" if texts[name] == ours else f"for {same} characters"
    print(f"second starts, median (range) of {config.rounds}:\n")
    print(pivot("tokens at most", cells))
