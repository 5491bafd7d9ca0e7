"""Probe a GPU machine: has it all that the project needs, and how fast are its simplest operations?

    python3 scripts/gpu/probe.py --probe facts,capture,families --json probes.jsonl

facts      Versions, nvidia-smi, and a C compiler and Python.h for Triton's launchers.
capture    A step captured as a graph and replayed.
clock      The device's clock.
bandwidth  Bytes per second that a GPU reads (scripts/bench/measure.py).
families   Each family of our kernels on small shapes against its reference (families.py).

A probe that fails, hangs or loses the device ends alone; the same command goes on behind it, and
exit status 4 says that one failed (attempts.py). Each row of the log has `text` for a reader.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from run.options import pick_device
from run.parsing import one_line_errors, option, parse
from scripts.bench.row_log import Log
from scripts.gpu.attempts import Attempts

NAMES = ("facts", "capture", "clock", "bandwidth")  # of probes that are functions below


@dataclass(frozen=True)
class ProbeConfig:
    """Options. Units and effects are in the help texts."""

    probe: str = option("facts", f"a list of {', '.join(NAMES)}, families")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    seconds: float = option(60.0, "for one probe, then the process is ended", least=1)
    json: str = option("", "file to append to; the probes in it are not run again")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(ProbeConfig, "probe.py", __doc__) if __name__ == "__main__" else None

import torch
from torch import Tensor

from backends.library import has_triton
from reference import choose
from runtime import WARM_UPS, Replay, copy_into
from scripts.bench import measure
from scripts.gpu.families import CHECKS, check_family


def lines_of(*command: str) -> list[str]:
    """Run a program. Returns: its output; the reason where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"no {command[0]} ({type(error).__name__})"]
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines or [f"{command[0]}: exit status {done.returncode}"]


def facts(device: str) -> dict[str, Any]:
    """List the installed software. Nothing is refused, since the other probes find all failures."""
    query = (
        "--query-gpu=name,driver_version,memory.used,power.limit,clocks.sm,clocks.max.sm,clocks.mem"
    )
    header = Path(sysconfig.get_path("include"), "Python.h")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "gcc"
    facts = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if has_triton() else None,
        "cuda": torch.version.cuda,
        "processors": os.cpu_count(),
        "nvidia_smi": lines_of("nvidia-smi", query, "--format=csv,noheader")[0],
        "compiler": lines_of(compiler, "--version")[0],
        "python_h": header.exists(),
        "sanitizer": shutil.which("compute-sanitizer") is not None,
    }
    header_text = "is there" if facts["python_h"] else "is missing"
    facts["text"] = (
        f"{facts['nvidia_smi']}; Python {facts['python']}, torch {facts['torch']}, "
        f"Triton {facts['triton']}, {facts['compiler']}, Python.h {header_text}"
    )
    return facts


def capture(device: str) -> dict[str, Any]:
    """Replay a step over its own buffer."""
    x = torch.zeros(3, device=device)

    def step() -> Tensor:
        y = x + 1
        copy_into(x, y)
        return y

    replay = Replay(step, x.device)
    runs = WARM_UPS + 3
    for _ in range(runs):
        result = replay()
    assert torch.equal(x, torch.full_like(x, runs)) and torch.equal(result, x), (x, result)
    assert (replay.graph is not None) == x.is_cuda, "the step ran uncaptured"
    return {"text": "a captured step is right"}


def bandwidth(device: str) -> dict[str, Any]:
    """Read a large buffer."""
    read = measure.read_bandwidth(device, 5)
    return {"bytes_per_s": read.median, "text": f"reads {read.text(1e-9, 0)} GB/s"}


def clock(device: str) -> dict[str, Any]:
    """Read the device's clock twice."""
    clock = choose(torch.device(device)).device_time
    times = [int(clock(torch.device(device))) for _ in range(2)]
    assert 0 < times[0] < times[1], f"the device's clock went from {times[0]} to {times[1]} ns"
    return {"text": "the device's clock runs"}


PROBES = dict(zip(NAMES, (facts, capture, clock, bandwidth)))
FAMILY = "family "  # in front of its name, in the log


def probes_of(names: str, device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the probes of a list, with each family of kernels. Raises: ValueError."""
    probes: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in names.split(","):
        if name == "families":
            if device == "cpu":
                raise ValueError("--probe families checks kernels of CUDA; leave it out on a CPU")
            probes |= {FAMILY + each: partial(check_family, each, device) for each in CHECKS}
        elif name in PROBES:
            probes[name] = partial(PROBES[name], device)
        else:
            raise ValueError(f"--probe: there is no {name}; use {', '.join(PROBES)}, families")
    return probes


def probe(config: ProbeConfig) -> None:
    """Run the probes. Exits with a status of attempts.py."""
    device = pick_device(config.device)
    probes = probes_of(config.probe, device)
    use_device = int if device == "cpu" else torch.cuda.synchronize
    attempts = Attempts(Log(config.json, "--json"), {"part": "probe"}, config.seconds, use_device)
    for name in attempts.left(list(probes)):
        attempts.run(name, name, probes[name])
    attempts.finish()


def main() -> None:
    config = COMMAND or parse(ProbeConfig, "probe.py", __doc__)
    with one_line_errors("probe.py"):
        probe(config)


if __name__ == "__main__":
    main()
