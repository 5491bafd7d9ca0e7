"""What a decode cycle launches on a GPU, and whether all of it compiles: found out without a GPU.

    python scripts/gpu/cycle_offline.py                       # an H100, every case of the table below
    python scripts/gpu/cycle_offline.py --gpus 80,89,90 --cases int4/60 --json FILE
    python scripts/gpu/cycle_offline.py --prepare             # environments for tests/cuda/test_cycle_offline.py, and no more

1. Makes an environment, once: the CUDA build of torch 2.11 with its Triton, in Python 3.12 if it is there (6 GB).
2. Builds fake_cuda.c, which answers in place of the CUDA runtime and the driver.
3. Runs emitted_steps.py in that environment, which says how code is made and counted.
4. Prints the tables: launches by case; by kernel for every step, with --steps; and what our own kernels take of a GPU.

A 7B model with the head of EAGLE-2 at a context of 4,096 slots; for bf16, int4 (groups of 128), and bf16 with an int4
head; with 8 heads of keys (gqa), and with norms of queries and keys besides (qwen3). Needs Linux, a C compiler and
about a minute per case. No time of a GPU is measured.
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

from command_line import one_line_errors, option, parse
from files import write_text
from scripts.gpu.fake_cuda import GPUS

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-eagle"
IMPORTED = ("numpy", "safetensors", "sentencepiece")  # by the project
TESTED = (
    "pytest",
    "pytest-xdist",
    "tokenizers",
    "gguf",
    "jinja2",
    "tqdm",
)  # and by the tests that run there
EMIT = ("torch==2.11.0", *IMPORTED, *TESTED)
TTSEM = ("ttsem[triton]==0.1.0", *IMPORTED)  # brings a torch, a Triton and pytest of its own
FORMATS = {"bf16": "none/none", "int4": "int4/int4", "bf16+int4": "none/int4"}  # target / head
TREES = {"vanilla": "vanilla", "chain": "chain-5", "26": "dynamic-6-8-26", "60": "dynamic-6-10-60"}
CASES = [
    f"{form}/{tree}"
    for form in FORMATS
    for tree in TREES
    if (form, tree) != ("bf16+int4", "vanilla")
]
CASES += ["int4/26/gqa", "int4/26/qwen3"]


@dataclass
class OfflineConfig:
    env: str = option("", f"folder of the environment; default: {CACHE / 'offline'}")
    prepare: bool = option(
        False, "make it, and beside it (ENV-ttsem) that of tests/cases/ttsem_cases.py, and end"
    )
    gpus: str = option("90", f"compute capabilities: {', '.join(GPUS)}")
    cases: str = option(",".join(CASES), "format and tree of each case, and gqa or qwen3")
    steps: bool = option(False, "also print every step, kernel by kernel")
    json: str = option("", "file to write: what was found for each GPU")


# ------------------------------------------------------------------------------------------ environment


def folders(env: str = "") -> tuple[Path, Path]:
    """Where the environments are: of this script, and of tests/cases/ttsem_cases.py."""
    folder = Path(env) if env else CACHE / "offline"
    return folder, folder.with_name(f"{folder.name}-ttsem")


def environment(folder: Path, packages: Iterable[str], oldest: tuple[int, int] = (3, 10)) -> Path:
    """Make a virtual environment, unless it is there. Returns: its Python.

    oldest: version of Python that the packages need
    Raises: ValueError where there is no such Python, or packages cannot be installed.
    """
    python = folder / "bin" / "python"
    if python.exists():
        return python
    if sys.platform != "linux":
        raise ValueError("the CUDA build of torch is for Linux; run this there")
    check = f"import sys; sys.exit(sys.version_info < {oldest})"
    bases = [base for base in (shutil.which("python3.12"), sys.executable) if base]
    bases = [
        base
        for base in bases
        if subprocess.run([base, "-c", check], capture_output=True).returncode == 0
    ]
    if not bases:
        raise ValueError(
            f"{folder} needs Python {'.'.join(map(str, oldest))}; put python3.12 on the PATH"
        )
    print(f"making {folder}: {' '.join(packages)}", file=sys.stderr, flush=True)
    made = folder.with_name(f"{folder.name}.part")  # the folder is whole, or not there at all
    shutil.rmtree(made, ignore_errors=True)
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    for command in ([bases[0], "-m", "venv", made], [made / "bin" / "python", *install]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"{folder} cannot be made: {reason}; see to that, and run this again")
    made.rename(folder)
    return python


def fake_driver(folder: Path) -> Path:
    """Build fake_cuda.c. Returns: the library. Raises: ValueError without a C compiler."""
    source, library = Path(__file__).with_name("fake_cuda.c"), folder / "libcuda.so.1"
    try:
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"fake_cuda.c needs a C compiler, cc: {error}; install one") from None
    return library


def emit(python: Path, gpu: str, cases: Iterable[str]) -> dict[str, Any]:
    """Write, count and compile for one GPU. Returns: what emitted_steps.py writes; cases under the names given."""
    parts = {case: case.split("/") for case in cases}
    names = {
        "/".join((FORMATS[form], TREES[tree], *model)): case
        for case, (form, tree, *model) in parts.items()
    }
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "found.json"
        caches = {
            "TRITON_CACHE_DIR": str(python.parents[1] / "triton-cache"),
            "TORCHINDUCTOR_CACHE_DIR": temporary,
        }
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        env = os.environ | caches | quiet | {"LD_PRELOAD": str(fake_driver(Path(temporary)))}
        command = [
            python,
            Path(__file__).with_name("emitted_steps.py"),
            "--gpu",
            gpu,
            "--json",
            out,
            *names,
        ]
        if subprocess.run(command, env=env).returncode:
            raise ValueError(
                f"{GPUS[gpu].name}: the steps could not be written; the reason is above"
            )
        found = json.loads(out.read_text())
    found["cases"] = {names[text]: row for text, row in found["cases"].items()}
    return found


# ----------------------------------------------------------------------------------------------- tables


def table(header: list[str], rows: Iterable[list[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def launches_table(cases: dict[str, dict]) -> str:
    """A line for each case."""
    names = ("draft", "decide", "extend")
    rows = []
    for case, found in cases.items():
        steps = [found["steps"].get(name, {"launches": 0})["launches"] for name in names]
        outside = sum(found["outside"].values())
        rows.append(
            [case, found["per_layer"], found["per_level"], *steps, outside, found["per_cycle"]]
        )
    return table(["launches", "a layer", "a drafted level", *names, "outside", "a cycle"], rows)


def steps_table(case: str, found: dict) -> str:
    """A line for each kernel of each step."""
    rows = [
        [f"{name} x {step['calls']}" if step["calls"] > 1 else name, kernel, n]
        for name, step in found["steps"].items()
        for kernel, n in step["kernels"].items()
    ]
    rows += [["outside", kernel, n] for kernel, n in found["outside"].items()]
    return table([f"{case}: step", "kernel", "launches"], rows)


def kernels_table(kernels: list[dict]) -> str:
    """A line for each of our own kernels, for each way that it is compiled."""
    columns = ("name", "warps", "registers", "stack_bytes", "shared_bytes")
    own = [row for row in kernels if row["whose"] == "own" and "error" not in row]
    return table(list(columns), sorted([row[c] for c in columns] for row in own))


def summary(gpu: str, found: dict[str, Any]) -> str:
    """What was found for one GPU, in words."""
    cases, kernels = found["cases"].values(), found["kernels"]
    steps = [step for case in cases for step in case["steps"].values()]
    inductors = [row for row in kernels if row["whose"] == "inductor"]
    reductions = [row for row in inductors if is_reduction(row)]
    many = sorted({row["name"] for row in reductions if row["configurations"] > 1})
    failed = [f"{row['name']}: {row['error']}" for row in kernels if "error" in row]
    largest, cache = (
        max(s["largest_temporary_bytes"] for s in steps),
        min(c["cache_buffer_bytes"] for c in cases),
    )
    written, compiled = (
        sum(s["dynamo_s"] + s["inductor_s"] for s in steps),
        sum(row["seconds"] for row in kernels),
    )
    lines = [
        f"sm_{gpu}: {len(inductors)} kernels of inductor's and {len(kernels) - len(inductors)} of ours compiled, "
        f"{len(failed)} of them failed",
        *failed,
        f"{len(many)} of {len(reductions)} reductions have several configurations, which are chosen by timing",
        *many,
        f"largest temporary of a step {largest / 1e6:.1f} MB; a buffer of the cache has {cache / 1e6:.1f} MB",
        f"steps written in {written:.0f} s, kernels compiled in {compiled:.0f} s (less where Triton's cache had them)",
    ]
    return "\n".join(lines)


def is_reduction(kernel: dict) -> bool:
    """Whether a kernel of inductor's adds or compares along an axis."""
    return kernel["name"].startswith(("triton_red", "triton_per"))


def run(config: OfflineConfig) -> None:
    """Run the cases for every GPU, print the tables, write the file."""
    cases, gpus = config.cases.split(","), config.gpus.split(",")
    for what, chosen, known in (("--cases", cases, CASES), ("--gpus", gpus, list(GPUS))):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{what}: there is no {name}; use {', '.join(known)}")
    folder, ttsem = folders(config.env)
    python, found = environment(folder, EMIT), {}
    if config.prepare:
        return print(
            f"{folder} and {environment(ttsem, TTSEM, oldest=(3, 12)).parents[1]} are there"
        )
    for gpu in gpus:
        found[gpu] = emit(python, gpu, cases)
        chosen = found[gpu]["cases"].items() if config.steps else ()
        tables = [launches_table(found[gpu]["cases"]), kernels_table(found[gpu]["kernels"])]
        tables += [steps_table(*case) for case in chosen]
        print("", f"## {GPUS[gpu].name}", *tables, summary(gpu, found[gpu]), sep="\n\n", flush=True)
        if config.json:
            write_text(config.json, json.dumps(found, indent=1))


def main() -> None:
    config = parse(OfflineConfig, "cycle_offline.py", __doc__)
    with one_line_errors("cycle_offline.py"):
        run(config)


if __name__ == "__main__":
    main()
