"""Probe a GPU machine: has it all that the project needs, and how fast are its simplest operations?

    python scripts/gpu/probe.py --probe boundary

facts          Versions, nvidia-smi, and a C compiler and Python.h for Triton's launchers.
compiling      A compiled step that changes a record (torch 2.11 lost its fields).
capture        A step captured as a graph and replayed.
boundary       The time of an empty kernel in a graph of 500: the gap from one kernel to the next;
               with dependent launch, and so behind a fill or a copy, where it may have no effect.
bandwidth      Bytes per second that a GPU reads (scripts/bench/measure.py).
small_kernels  The device's clock; small cases of the project's kernels against their references.
               check.py runs them under compute-sanitizer, too, which is many times slower.
A failed check raises; the exit status is then 1. One JSON line is appended per probe, with `text`
for a reader.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

import ops.fused
import ops.norm
import ops.rotary
from command_line import one_line_errors, option, parse
from draft_tree import replace_fields
from ops.library import has_triton
from options import pick_device
from runtime import WARM_UPS, Replay, compiled, copy_into, device_time
from scripts.bench import measure
from scripts.gpu import kernels as kernel_bench

BOUNDARIES = 500  # kernels in the graph
SMALL = (256, 512)  # outputs and inputs of the products that are only checked


class Pair(NamedTuple):
    """A record that a step changes."""

    kept: Tensor
    replaced: Tensor


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
    found = {
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
    header_text = "is there" if found["python_h"] else "is missing"
    found["text"] = (
        f"{found['nvidia_smi']}; Python {found['python']}, torch {found['torch']}, "
        f"Triton {found['triton']}, {found['compiler']}, Python.h {header_text}"
    )
    return found


def compiling(device: str) -> dict[str, Any]:
    """Compile a step."""
    step = compiled(lambda pair: replace_fields(pair, replaced=pair.replaced * 2 + 1))
    x = torch.arange(5.0, device=device)
    kept, replaced = step(Pair(x, x))
    assert torch.equal(kept, x) and torch.equal(replaced, x * 2 + 1), (kept, replaced)
    return {"text": "a compiled step is right"}


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


def boundary(device: str) -> dict[str, Any]:
    """Time graphs of kernels that do nothing, and of the smallest of torch's."""
    import triton

    from ops.cuda.launch import after_others, device_of

    @triton.jit
    def empty_kernel(x):
        pass

    @triton.jit
    def dependent_kernel(x):
        after_others(True)

    x = torch.zeros(1, device=device)
    y = torch.zeros(1, device=device)
    plain = partial(empty_kernel[(1,)], x, num_warps=1)
    dependent = partial(dependent_kernel[(1,)], x, num_warps=1, launch_pdl=True)
    fill = partial(x.fill_, 1.0)
    graphs = {"empty": [plain], "fill": [fill]}
    if device_of(x.device.index).overlaps:
        copy = partial(x.copy_, y)
        graphs |= {"dependent": [dependent], "fill, dependent": [fill, dependent]}
        graphs |= {"copy, dependent": [copy, dependent], "fill, empty": [fill, plain]}
    found = {}
    for name, calls in graphs.items():
        times = kernel_bench.graph_times_s(calls * (BOUNDARIES // len(calls)), 20)
        found[name] = 1e6 * statistics.median(times)
    return found | {"text": ", ".join(f"{name} {us:.2f} us" for name, us in found.items())}


def bandwidth(device: str) -> dict[str, Any]:
    """Read a large buffer."""
    read = measure.read_bandwidth(device, 5)
    return {"bytes_per_s": read, "text": f"reads {read.text(1e-9, 0)} GB/s"}


def norm_error(device: str) -> float:
    """Return the largest relative error of the norm behind a residual sum."""
    x = torch.randn(7, 96, device=device)
    delta = torch.randn(7, 96, device=device)
    weight = torch.randn(96, device=device)
    got = ops.norm.add_norm(x, delta, weight, 1e-5)
    want = ops.norm.add_norm_reference(x, delta, weight, 1e-5)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want))


def fused_error(device: str) -> float:
    """Return the largest relative error of products with the work behind them (ops/fused.py)."""
    options = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(384, 384, **options) / 20
    x = torch.randn(1, 7, 384, **options)
    stream = torch.randn(1, 7, 384, **options)
    scale = torch.rand(384, **options)
    slots = torch.arange(7, device=device)[None]
    rope = ops.rotary.rope_angles(torch.rand(64, device=device), slots)
    ours, theirs = (tuple(torch.zeros(2, 1, 1, 9, 128, **options)) for _ in range(2))
    total, *found = torch.ops.gpt_eagle.add_product(x, weight, None, stream, scale, 1e-5)
    norm = ops.fused.Unscaled(*found)
    got = [total, ops.fused.swiglu(ops.fused.Pending(*norm, weight, None))]
    product = ops.fused.Pending(*norm, weight, None)
    got.append(ops.fused.rotary_cache(product, rope, *ours, slots, None))
    wide = weight.float()
    want = [ops.fused.add_norm_reference(stream, x.float() @ wide.T, scale, 1e-5)[0]]
    y = norm.values.float() @ wide.T
    want.append(ops.fused.swiglu_reference(y, norm))
    want.append(ops.fused.rotary_cache_reference(y, norm, rope, *theirs, slots))
    pairs = zip((*got, *ours), (*want, *theirs), strict=True)
    return max(kernel_bench.relative_error(a.float(), b.float()) for a, b in pairs)


def small_kernels(device: str) -> dict[str, Any]:
    """Check the clock, products, attention, compaction, top-k, norms and fused products."""
    times = [int(device_time(torch.device(device))) for _ in range(2)]
    assert 0 < times[0] < times[1], f"the device's clock went from {times[0]} to {times[1]} ns"
    for form in kernel_bench.PRODUCTS:
        layer = kernel_bench.make_layer(form, *SMALL, 128)
        checked = kernel_bench.check_layer(layer, SMALL[1], [1, 17, 33])
        assert checked["correct"] and checked["same_bits"], (form, checked)
    errors = {
        "attention": kernel_bench.attention_contest("8b", 40, 7, 0).error(),
        "compaction": kernel_bench.compact_contest(1).error(),
        "topk": kernel_bench.topk_contest(3000, 3, 0).error(),
        "norm": norm_error(device),
        "fused": fused_error(device),
    }
    wrong = {name: error for name, error in errors.items() if not error < kernel_bench.TOLERANCE}
    assert not wrong, wrong
    return errors | {"text": "small kernels are right"}


PROBES = {
    probe.__name__: probe
    for probe in (facts, compiling, capture, boundary, bandwidth, small_kernels)
}


@dataclass
class ProbeConfig:
    probe: str = option("facts", "what to look at", tuple(PROBES))
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    json: str = option("", "file to append to")


def main() -> None:
    config = parse(ProbeConfig, "probe.py", __doc__)
    with one_line_errors("probe.py"):
        log = measure.Log(config.json, "--json")
        device = pick_device(config.device)
        row = {"part": "environment", "probe": config.probe} | PROBES[config.probe](device)
        log.add([row])
        print(row, file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
