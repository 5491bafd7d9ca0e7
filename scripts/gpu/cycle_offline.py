"""Count the launches of a decode cycle on a GPU, and check that all of it compiles, without a GPU.

    python3 scripts/gpu/cycle_offline.py                       # an H100, every case of `CASES`
    python3 scripts/gpu/cycle_offline.py --gpus 80,89,90,100 --cases int4/60 --json FILE

1. Makes an environment, once: the CUDA build of torch 2.11 with its Triton, in Python 3.12 if it is
   there (6 GB). Builds fake_cuda.c, which answers in place of the CUDA runtime and the driver.
2. Runs emitted_steps.py in that environment, which writes, counts and compiles the code.
3. Prints the launches by case; by kernel for every step, with --steps; our kernels' resources.
A 7B model with the head of EAGLE-2 at a context of 4,096 slots, in bf16, int4 (groups of 128), and
bf16 with an int4 head; with 8 heads of keys (gqa), norms of queries and keys (qwen3), 8 experts
(mixtral), a head of EAGLE-3 and half of the vocabulary (eagle3), five heads of Medusa or Hydra, a
block drafter of one layer (block), Token Recycling, Lookahead, a batch of 4 (rows), temperature,
top-k and top-p (sampled). As decoding runs: gradients enabled, prompts in chunks of both widths.
Needs Linux, a C compiler and about a minute per case. No time of a GPU is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import write_text
from cli.parsing import one_line_errors, option, parse
from scripts.gpu.fake_cuda import GPUS

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-eagle"
ENVIRONMENT = CACHE / "offline"
PACKAGES = ("torch==2.11.0", "numpy", "safetensors", "sentencepiece")  # of the project
TESTED = ("pytest", "pytest-xdist", "tokenizers", "gguf", "jinja2", "tqdm")  # by the tests there
FORMATS = {"bf16": "none/none", "int4": "int4/int4", "bf16+int4": "none/int4"}  # target / head
TREES = {
    "vanilla": "vanilla",
    "chain": "chain-5",
    "26": "dynamic-6-8-26",
    "60": "dynamic-6-10-60",
    "5": "dynamic-5-8-26",  # levels of Medusa's and Hydra's heads
    "auto": "auto-6-8-26",
    "ngram": "ngram",
    "recycling": "recycling",
    "lookahead": "lookahead",
}
CASES = [
    *("bf16/vanilla", "bf16/chain", "bf16/26", "bf16/60", "bf16/ngram", "bf16+int4/26"),
    *("bf16+int4/auto", "int4/vanilla", "int4/26", "int4/60", "int4/26/gqa", "int4/26/qwen3"),
    *("bf16/26/sampled", "int4/26/rows", "bf16/26/eagle3", "bf16/26/mixtral", "int4/26/mixtral"),
    *("int4/5/medusa", "bf16/5/hydra", "bf16/26/block", "bf16/recycling", "bf16/lookahead"),
]


@dataclass
class OfflineConfig:
    gpus: str = option("90", f"compute capabilities: {', '.join(GPUS)}")
    cases: str = option(",".join(CASES), "format and tree of each case, and what it changes")
    steps: bool = option(False, "also print every step, kernel by kernel")
    json: str = option("", "file to write: what was found for each GPU")


# ------------------------------------------------------------------------------- environment


def environment() -> Path:
    """Make the virtual environment, unless it is there. Returns: its Python.

    Raises: ValueError where packages cannot be installed.
    """
    folder = ENVIRONMENT
    python = folder / "bin" / "python"
    if python.exists():
        return python
    if sys.platform != "linux":
        raise ValueError("the CUDA build of torch is for Linux; run this there")
    base = shutil.which("python3.12") or sys.executable
    packages = (*PACKAGES, *TESTED)
    print(f"making {folder}: {' '.join(packages)}", file=sys.stderr, flush=True)
    part = folder.with_name(f"{folder.name}.part")  # the folder is complete, or not there at all
    shutil.rmtree(part, ignore_errors=True)
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    for command in ([base, "-m", "venv", part], [part / "bin" / "python", *install]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"{folder} cannot be made: {reason}; see to that, and run this again")
    part.rename(folder)
    return python


def fake_driver(folder: Path) -> Path:
    """Build fake_cuda.c. Returns: the library. Raises: ValueError without a C compiler."""
    source = Path(__file__).with_name("fake_cuda.c")
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"fake_cuda.c needs a C compiler, cc: {error}; install one") from None
    return library


def emit(python: Path, gpu: str, cases: Iterable[str]) -> dict[str, Any]:
    """Write, count and compile for one GPU.

    Returns: the report of emitted_steps.py; its cases have the names of `cases`.
    """
    names = {}  # of emitted_steps.py: ours
    for case in cases:
        form, tree, *model = case.split("/")
        names["/".join((FORMATS[form], TREES[tree], *model))] = case
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "found.json"
        caches = {
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR")
            or str(python.parents[1] / "triton-cache"),
            "TORCHINDUCTOR_CACHE_DIR": temporary,
        }
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        env = os.environ | caches | quiet | {"LD_PRELOAD": str(fake_driver(Path(temporary)))}
        program = Path(__file__).with_name("emitted_steps.py")
        command = [python, program, "--gpu", gpu, "--json", out, *names]
        if subprocess.run(command, env=env).returncode:
            raise ValueError(
                f"{GPUS[gpu].name}: the steps could not be written; the reason is above"
            )
        found = json.loads(out.read_text())
    found["cases"] = {names[text]: row for text, row in found["cases"].items()}
    return found


# ------------------------------------------------------------------------------- tables


def table(header: list[str], rows: Iterable[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def launches_table(cases: dict[str, dict]) -> str:
    """Return a table with a line for each case."""
    names = ("draft", "decide", "extend")
    rows = []
    for case, found in cases.items():
        steps = [found["steps"].get(name, {"launches": 0})["launches"] for name in names]
        outside = sum(found["outside"].values())
        parts = [found["per_layer"], found["per_level"], *steps, outside]
        rows.append([case, *parts, found["per_cycle"]])
    return table(["launches", "a layer", "a drafted level", *names, "outside", "a cycle"], rows)


def steps_table(case: str, found: dict) -> str:
    """Return a table with a line for each kernel of each step."""
    rows = []
    for name, step in found["steps"].items():
        label = f"{name} x {step['calls']}" if step["calls"] > 1 else name
        rows += [[label, kernel, n] for kernel, n in step["kernels"].items()]
    rows += [["outside", kernel, n] for kernel, n in found["outside"].items()]
    return table([f"{case}: step", "kernel", "launches"], rows)


def kernels_table(kernels: list[dict]) -> str:
    """Return a table with a line for each of our own kernels, for each way that it is compiled."""
    columns = ("name", "warps", "registers", "stack_bytes", "shared_bytes")
    own = [row for row in kernels if row["whose"] == "own" and "error" not in row]
    return table(list(columns), sorted([row[c] for c in columns] for row in own))


def summary(gpu: str, found: dict[str, Any]) -> str:
    """Return the results for one GPU, in words."""
    cases = found["cases"].values()
    kernels = found["kernels"]
    steps = [step for case in cases for step in case["steps"].values()]
    inductors = [row for row in kernels if row["whose"] == "inductor"]
    reductions = [row for row in inductors if is_reduction(row)]
    many = sorted({row["name"] for row in reductions if row["configurations"] > 1})
    failed = [f"{row['name']}: {row['error']}" for row in kernels if "error" in row]
    largest = max((step["largest_temporary_bytes"] for step in steps), default=0)
    cache = min(case["cache_buffer_bytes"] for case in cases)
    lines = [
        f"sm_{gpu}: {len(inductors)} kernels of inductor's and {len(kernels) - len(inductors)} of "
        f"ours compiled, {len(failed)} of them failed",
        *failed,
        f"{len(many)} of {len(reductions)} reductions have several configurations, "
        "which are chosen by timing",
        *many,
        f"largest temporary of a step {largest / 1e6:.1f} MB; "
        f"a buffer of the cache has {cache / 1e6:.1f} MB",
    ]
    return "\n".join(lines)


def is_reduction(kernel: dict) -> bool:
    """Return true for a kernel of inductor's that adds or compares along an axis."""
    return kernel["name"].startswith(("triton_red", "triton_per"))


def run(config: OfflineConfig) -> None:
    """Run the cases for every GPU, print the tables, write the file."""
    cases = config.cases.split(",")
    gpus = config.gpus.split(",")
    for flag, chosen, known in (("--cases", cases, CASES), ("--gpus", gpus, list(GPUS))):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{flag}: there is no {name}; use {', '.join(known)}")
    python = environment()
    found = {}
    for gpu in gpus:
        found[gpu] = emit(python, gpu, cases)
        tables = [launches_table(found[gpu]["cases"]), kernels_table(found[gpu]["kernels"])]
        if config.steps:
            tables += [steps_table(*case) for case in found[gpu]["cases"].items()]
        print("", f"## {GPUS[gpu].name}", *tables, summary(gpu, found[gpu]), sep="\n\n", flush=True)
        if config.json:
            write_text(config.json, json.dumps(found, indent=1))


def main() -> None:
    config = parse(OfflineConfig, "cycle_offline.py", __doc__)
    with one_line_errors("cycle_offline.py"):
        run(config)


if __name__ == "__main__":
    main()
