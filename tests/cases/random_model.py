"""Random models in Hugging Face layout, and the memory that loading takes, in a process of its own (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from files.weights import load_model
from quantize import Quantization
from run.options import ROOT

SAMPLE_S = 0.0005  # between two looks at the memory of a process that loads


def watch_loading(
    quant: str, folders: list[Path], small_blocks_bytes: int = 0
) -> list[tuple[int, int]]:
    """Load models one after the other in one process: the first of a kind makes what is only ever made once.

    quant: format that they are quantized to while loading, or none
    small_blocks_bytes: the allocator gives larger blocks back, as those of a real model are; 0: its own bound
    Returns: by how many bytes anonymous memory (not backed by files) grew at most, and the model's bytes, for each.
    """
    # one thread: two that wait for each other take 8 times the time where others work too
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if small_blocks_bytes:
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(small_blocks_bytes)}
    command = [sys.executable, __file__, quant, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def _load(quant: Quantization | None, folders: list[str]) -> None:
    """Writes: a line for each folder to standard output."""
    peak = 0

    def watch(loaded: threading.Event) -> None:
        nonlocal peak
        while not loaded.wait(SAMPLE_S):
            peak = max(peak, _anonymous_bytes())

    kept = []
    for folder in folders:
        before, loaded = _anonymous_bytes(), threading.Event()
        peak = before
        thread = threading.Thread(target=watch, args=(loaded,))
        thread.start()
        kept.append(load_model(Path(folder), quant=quant))
        loaded.set()
        thread.join()
        model_bytes = sum(tensor.nbytes for tensor in kept[-1].state_dict().values())
        print(max(peak, _anonymous_bytes()) - before, model_bytes)


if __name__ == "__main__":
    _load(Quantization.of(sys.argv[1], 0), sys.argv[2:])
