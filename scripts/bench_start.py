"""From the command to the first text: with empty caches, then again.

    python scripts/bench_start.py --options "--compile --chat --prompt Hi"

How it works:
1. generate.py runs in a process of its own, with its standard output in a pipe. The first byte there is the first text.
2. Every round begins with empty caches of its own: of our CPU operators (`XDG_CACHE_HOME`) and of torch's compiler.
   The second start of a round finds what the first one left.
3. A start whose text is not the first one's is an error.

The model must be there already. Not here: downloading, installing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import _path  # noqa: F401  (finds the project)
from measure import Series, environment
from options import one_line_errors, option, parse

ROOT = Path(__file__).parents[1]
QUESTION = '--compile --chat --prompt "What is the capital of France?"'


@dataclass(frozen=True)
class StartConfig:
    options: str = option(QUESTION, "of generate.py")
    rounds: int = option(3, "rounds, of two starts each", least=1)


def start(command: list[str], caches: Path) -> tuple[float, float, str]:
    """Run one process. Returns: seconds to the first text, and to the end; the text before the statistics."""
    own = {"XDG_CACHE_HOME": str(caches / "operators"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "compiler")}
    began, first, said = time.perf_counter(), 0.0, b""
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        while data := os.read(run.stdout.fileno(), 1 << 16):
            first = first or time.perf_counter() - began
            said += data
        errors = run.stderr.read().decode()
    if run.returncode:
        raise ValueError(f"generate.py ended with {run.returncode}: {errors.strip()[-200:]}")
    return first, time.perf_counter() - began, said.decode().rpartition("\n")[0].rpartition("\n")[0]


def bench(config: StartConfig) -> None:
    """Measure and print."""
    command = [sys.executable, "generate.py", *shlex.split(config.options)]
    print(", ".join(f"{key} {value}" for key, value in environment("cpu").items()))
    print(shlex.join(["python", *command[1:]]))
    rows: dict[str, list[tuple[float, float]]] = {"first start": [], "second start": []}
    texts = set()
    for _ in range(config.rounds):
        with tempfile.TemporaryDirectory() as caches:
            for name, row in rows.items():
                first, end, text = start(command, Path(caches))
                row.append((first, end))
                texts.add(text)
                print(f"{name}: first text after {first:.1f} s, end after {end:.1f} s", flush=True)
    if len(texts) > 1:
        raise ValueError(f"the starts gave {len(texts)} different texts")
    for name, row in rows.items():
        first, end = (Series.of(list(column)) for column in zip(*row))
        print(f"{name}: first text {first.text(1, 1)} s, end {end.text(1, 1)} s, median (range) of {len(row)}")


if __name__ == "__main__":
    with one_line_errors("bench_start.py"):
        bench(parse(StartConfig, "bench_start.py", __doc__))
