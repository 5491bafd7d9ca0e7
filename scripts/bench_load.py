"""How much slower decoding gets while other processes want the processors too.

    python scripts/bench_load.py --quant int4

How it works:
1. Cycles are timed alone, then beside 1, 2, ... processes that never wait: niced by 19, and with the same priority.
2. Alone and beside take turns, `--rounds` times; a ratio is taken between neighbours.

A fair share: beside as many processes of the same priority as there are processors, half the speed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import _path  # noqa: F401  (finds the project)
from generate import load
from measure import Series, environment
from options import DEFAULT, one_line_errors, option, parse
from session import Session

BUSY = [sys.executable, "-c", "while True: pass"]


@dataclass(frozen=True)
class LoadConfig:
    checkpoint: str = option(DEFAULT, "the target")
    quant: str = option("none", "round the target's weights while loading", ("none", "int8", "int4"))
    draft: str = option("none", "who drafts", ("none", "ngram", "eagle"))
    rounds: int = option(5, "times that alone and beside take turns", least=3)
    seconds: float = option(1.0, "of decoding, each time")


def cycle_seconds(session: Session, seconds: float) -> float:
    """Decode for a while. Returns: the mean time of a cycle, as a user sees it (s)."""
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        session.time_cycle(0)
        count += 1
    return (time.perf_counter() - began) / count


def beside(session: Session, seconds: float, processes: int, nice: int) -> float:
    """The same beside processes that never wait."""
    busy = [subprocess.Popen(BUSY, preexec_fn=lambda: os.nice(nice)) for _ in range(processes)]
    try:
        time.sleep(0.3)
        return cycle_seconds(session, seconds)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def bench(config: LoadConfig) -> None:
    """Measure and print."""
    tree = "chain" if config.draft == "eagle" else ""
    engine = load(checkpoint=config.checkpoint, quant=config.quant, draft=config.draft, tree=tree, compile=True)
    session = Session(engine, [(0, 0)])
    next(session.run([[5] * 100]))
    cycle_seconds(session, 0.5)
    print(", ".join(f"{key} {value}" for key, value in environment("cpu").items()))
    print(f"{config.checkpoint}, quant {config.quant}, draft {config.draft}, compiled\n")
    print("| beside | cycle, ms | alone, ms | times slower |\n|---|---|---|---|")
    for nice, name in ((19, "niced by 19"), (0, "same priority")):
        for processes in range(1, (os.cpu_count() or 1) + 1):
            pairs = [
                (beside(session, config.seconds, processes, nice), cycle_seconds(session, config.seconds))
                for _ in range(config.rounds)
            ]
            crowd, alone = (Series.of(list(column)) for column in zip(*pairs))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"| {processes} {name} | {crowd.text(1e3, 2)} | {alone.text(1e3, 2)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    with one_line_errors("bench_load.py"):
        bench(parse(LoadConfig, "bench_load.py", __doc__))
