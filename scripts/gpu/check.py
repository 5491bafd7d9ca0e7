"""Run all checks that need a GPU, in one command on a bare machine: the most telling ones first.

    python scripts/gpu/check.py                # environment, trees, smoke, kernels: 9 minutes
    python scripts/gpu/check.py --only sanitizers,tests,formats        # further ones, one call each
    python scripts/gpu/check.py --dry_run      # on a CPU: print all commands, run some, small
    python scripts/gpu/check.py --pack DIR     # copy the files that this needs, below 30 MB
README.md beside this file has three commands for ten minutes in all.

environment  Versions, our kernels on small shapes, one compiled step, one capture, boundaries,
             bandwidth (probe.py). Where the kernels fail, GPT_EAGLE_PDL=0 holds from there on.
int4, bf16   A stand-in of 7B, in bf16 with an int4 head: vanilla and one tree, repeated cycles
             compared (scripts/bench/papers.py).
profile      Every kernel of one cycle of these in int4, with its time and the gap before it;
             without dependent launch, with which kernels overlap.
smoke        40 of the tests marked `gpu`, in 8 processes; captured cycles first.
kernels      Our int4 products (kernels.py).
sweep        The plans of our products and of attention, timed: a table that decoding, and all later
             steps, load (sweep.py).
sanitizers   Our kernels under compute-sanitizer.
tests        The other tests marked `gpu`.
formats      The other formats and kernels of kernels.py, and the vendor's product in bf16.
streamed     Our products in CUDA C++ in place of Triton's: kernels.py, a tree in int4 and bf16.
models       Several trees with 1,000 replays of each, and auto; 8B, random twins, int8, Mixtral
             where its demo is, 7B in int4 with batches of 1, 4 and 16 (scripts/bench/peers.py).
demo         The bundled demo, with every tree, format and lookup.
tp           The demo and a 7B on two GPUs, with graphs that hold NCCL's collectives.

Each step is a process with a time limit, which grows by the time that earlier ones left over. A
step that fails, hangs or comes too late is named, the next one starts, and the exit status is 1.
The folder --out ($OUT where that is set, else gpu_check) gets `results.jsonl`, a row per
measurement and per step; `log.txt`, all output; `rows.json`, of the step `rows`; `summary.txt`.
Written for torch 2.11 with Triton 3.6 and for 2.13 with 3.7; not run on a GPU yet.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from ops.cuda.plans import FOLDER
from options import ROOT
from runtime import set_cuda_device
from scripts.bench import measure
from scripts.bench.profile_cycle import LOOK
from scripts.gpu import kernels as kernel_bench

LEAST_S = 5  # a step with less time than this is not begun
SMALL_KERNELS = "small_kernels"
CUDA_PROGRAMS = "/usr/local/cuda/bin"  # compute-sanitizer among them; often not on the PATH
TABLE = "NVIDIA*.json"  # of plans, that the sweep writes to the folder
COMPILED = "triton_cache"  # a folder of kernels that were compiled beforehand
# beginnings and ends of files that are not packed, since no step reads them
STAYS = ("checkpoints/SmolLM2", "data/train/", "benchmarks/", "tests/core/", "tests/cpu/")
STAYS += ("tests/files/", "tests/tools/", "tests/golden/eagle", "tests/golden/train_eagle12/")
PICTURES = (".png", ".svg")
PACK_BYTES = 30e6  # of the copy that travels, at most
DEATH_S = 10  # to wait for a killed process; one that a driver holds may never end


class Step(NamedTuple):
    """One process of a part."""

    name: str
    command: str  # as in a shell; {out} is the folder
    share_s: float  # of the time; as long again where earlier steps left it
    on_cpu: str | None = None  # flags that --dry_run adds; None: it is not run without a GPU
    needs: str = ""  # a program or a folder of the project without which the step is left out
    gpus: int = 1  # it is left out where there are fewer


def probe(name: str, share_s: float, on_cpu: str | None = None) -> Step:
    """Make a step that runs one probe of probe.py."""
    command = "python scripts/gpu/probe.py --device cuda --json {out}/results.jsonl --probe"
    return Step(name, f"{command} {name}", share_s, on_cpu)


def sanitized(tool: str, share_s: float) -> Step:
    """Make a step that runs small kernels under a tool of compute-sanitizer."""
    # every tensor in memory of its own, or an access past its end would hit another one
    command = "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9"
    kernels = probe(SMALL_KERNELS, 0).command
    return Step(tool, f"{command} --tool {tool} {kernels}", share_s, needs="compute-sanitizer")


def tests(marks: str, share_s: float) -> Step:
    """Make a step that runs the tests with some marks, in the order of their file's SMOKE."""
    # 8 processes that compile; each with processes of its own for that would be too many
    command = (
        "env TORCHINDUCTOR_COMPILE_THREADS=1 python -m pytest -v -n 8 --maxprocesses 8 "
        f"--dist load --maxschedchunk 1 -m '{marks}' tests/cuda/test_gpu.py"
    )
    return Step("pytest", command, share_s, "-n 1")


def papers(
    name: str, flags: str, share_s: float, on_cpu: str | None = None, needs: str = ""
) -> Step:
    """Make a step that runs papers.py."""
    return Step(name, f"{PAPERS} {flags}", share_s, on_cpu, needs)


def kernels(form: str, flags: str, share_s: float) -> Step:
    """Make a step that runs kernels.py over one format."""
    command = f"python scripts/gpu/kernels.py --format {form} --json {{out}}/results.jsonl {flags}"
    return Step(form, command, share_s)


def without_overlap(step: Step) -> Step:
    """Return the step without dependent launch."""
    return step._replace(command=f"env GPT_EAGLE_PDL=0 {step.command}")


def streamed(step: Step) -> Step:
    """Return the step with the products in CUDA C++."""
    return step._replace(command=f"env GPT_EAGLE_PRODUCTS=streamed {step.command}")


CPU = "--device cpu"
SMALL = "--device cpu --options ignore_eos --limit 1 --max_new_tokens 12"
TREE = "eagle:dynamic:tree_depth=6:tree_topk=8:tree_size=32"
PAPERS = (
    "python scripts/bench/papers.py --device cuda --dtype bfloat16 --compile --tasks demo "
    "--limit 3 --traced 1 --json {out}/papers.jsonl"
)
INT4_7B = f"--options inflate=llama2-7b,ignore_eos --quant int4 --methods none,{TREE}"
PAPERS_LOGS = ("papers.jsonl", "papers.jsonl.part")  # in the folder, until a step ends
LLAMA_7B = "--options inflate=llama2-7b,ignore_eos"
LLAMA_8B = "--options inflate=llama3-8b,ignore_eos"
MIXTRAL = (
    "--checkpoint checkpoints/demo-moe --options inflate=mixtral-8x7b,ignore_eos "
    f"--quant int4 --methods none,eagle:auto,{TREE}"
)
TWIN = "--options inflate=llama2-7b,random_twin,ignore_eos --methods none"
LOOKUP = (
    "python generate.py --checkpoint checkpoints/demo --device cuda --dtype bfloat16 --compile "
    "--compare --draft"
)
RANKS = (
    "python -m torch.distributed.run --nproc_per_node 2 generate.py --checkpoint checkpoints/demo "
    "--compile --compare"
)
ROWS = (
    "python scripts/bench/peers.py --device cuda --compile --formats int4 --methods none,eagle "
    "--options inflate=llama2-7b,context=1024 --peers none --limit 32 --prompts_per_row 2 "
    "--batch_sizes 1,4,16 --json {out}/rows.json"
)
FEW_ROWS = (
    "--device cpu --options context=512 --formats none --limit 4 --batch_sizes 2 --max_new_tokens 8"
)
SWEEP = "python scripts/gpu/sweep.py --seconds 105 --out {out} --json {out}/results.jsonl"
EAGLE3 = (
    "python generate.py --checkpoint tests/golden/models/target_llama31_gqa8 --device cuda "
    "--dtype bfloat16 --eagle tests/golden/models/head_eagle3"
)
# the shares sum up to less than nine minutes, so that no step can take another's time
FIRST = {
    "environment": (
        probe("facts", 15, CPU),
        probe(SMALL_KERNELS, 30),
        probe("compiling", 20, CPU),
        probe("capture", 10, CPU),
        probe("boundary", 10),
        probe("bandwidth", 10, CPU),
    ),
    "int4": (papers("int4", f"{INT4_7B} --replays 200", 100, f"{SMALL} --replays 2"),),
    "profile": (without_overlap(papers("profile", f"{INT4_7B} --repeats 1 --profile", 50, SMALL)),),
    "bf16": (papers("bf16", f"{LLAMA_7B} --methods none,{TREE}:quant_draft=int4", 90, SMALL),),
    "smoke": (tests("gpu and smoke", 150),),
    "kernels": (kernels("int4", "--rows 1,16,32,64", 35),),
}
TREES = f"none,eagle:auto,eagle:static,eagle:chain:tree_depth=5,{TREE}"
REST = {
    # behind plain runs, which have filled Triton's cache
    "sanitizers": (sanitized("memcheck", 60), sanitized("racecheck", 60)),
    "sweep": (Step("sweep", SWEEP, 150, "--dry_run"),),
    "tests": (tests("gpu and not smoke", 300),),
    "formats": (
        without_overlap(kernels("int4", "--rows 1,16,32,64", 35)),
        kernels("bf16", "--rows 1,16,32,64", 25),
        kernels("cublas", "--rows 1,16,32,64", 25),
        kernels("attention", "--rows 1,32 --lengths 512,4096", 30),
        kernels("int8", "", 40),
        kernels("tinygemm", "", 40),
        kernels("compact", "", 40),
        kernels("topk", "", 40),
        kernels("experts", "", 40),
    ),
    "streamed": (
        streamed(probe(SMALL_KERNELS, 30)._replace(name="streamed_kernels")),
        streamed(kernels("int4", "--rows 1,16,32,64", 35)),
        streamed(kernels("bf16", "--rows 1,16,32,64", 25)),
        streamed(papers("streamed-int4", f"{INT4_7B} --replays 200", 100)),
        streamed(papers("streamed-bf16", f"{LLAMA_7B} --methods none,{TREE}:quant_draft=int4", 90)),
    ),
    "models": (
        without_overlap(papers("no-overlap", INT4_7B, 80)),  # to compare with `int4`
        papers(
            "trees",
            f"{LLAMA_7B} --quant int4 --methods {TREES} --replays 1000",
            240,
            f"{SMALL} --replays 2",
        ),
        papers("8b", f"{LLAMA_8B} --quant int4 --methods none,{TREE}", 80),
        papers("twin-int4", f"{TWIN} --quant int4", 60),
        papers("twin-bf16", TWIN, 60),
        papers(
            "bf16-auto",
            f"{LLAMA_7B} --methods none,eagle:auto:quant_draft=int4,{TREE}:quant_draft=int4",
            240,
        ),
        papers("int8", f"{LLAMA_7B} --quant int8 --methods none,{TREE}", 80),
        papers("8b-bf16", f"{LLAMA_8B} --methods none,{TREE}:quant_draft=int4", 80),
        papers("mixtral", MIXTRAL, 240, needs="checkpoints/demo-moe-eagle"),
        Step("rows", ROWS, 180, FEW_ROWS),
    ),
    "demo": (
        *(
            papers(f"{q}-{t}", f"--quant {q} --temperatures {t} --methods {TREES}", 90)
            for q in ("none", "int8", "int4")
            for t in (0, 1)
        ),
        Step("eagle-3", f"{EAGLE3} --compile --compare --prompt_ids 5,17,3,40 --ignore_eos", 60),
        *(Step(source, f"{LOOKUP} {source}", 40) for source in ("ngram", "recycling", "lookahead")),
        Step("eagle+ngram", f"{LOOKUP} eagle+ngram", 60),
    ),
    "tp": tuple(
        Step(name, f"{RANKS} --device cuda {flags}", 90, gpus=2)
        for name, flags in (
            ("fp32", "--dtype float32"),
            ("int8", "--dtype bfloat16 --quant int8 --temperature 1"),
            ("7b-bf16", "--inflate llama2-7b --quant_draft int4"),
            ("7b-int4", "--inflate llama2-7b --quant int4"),
        )
    ),
}
PARTS = FIRST | REST


@dataclass
class CheckConfig:
    out: str = option(os.environ.get("OUT") or "gpu_check", "folder of all that comes out")
    only: str = option("", f"parts to run; default: {', '.join(FIRST)}, with --dry_run all")
    minutes: float = option(9.0, "for the whole run")
    dry_run: bool = option(
        False, "say what would run, and run on a CPU what says something there, small"
    )
    pack: str = option("", "folder to make: a copy of the project's files without large ones")
    compiled: str = option("", "with --pack: Triton's cache, whose kernels travel too")


# ------------------------------------------------------------------------------- a process


def command_of(step: Step, out: Path, dry_run: bool) -> list[str]:
    """Return the words of a step's command."""
    words = [word.format(out=out) for word in shlex.split(step.command)]
    words = [sys.executable if word == "python" else word for word in words]
    if dry_run and step.on_cpu:
        words += shlex.split(step.on_cpu)
    return words


def run(command: list[str], log: Path, limit_s: float) -> str:
    """Run a process and end all that it started. Writes: appends to `log`.

    Returns: the reason of a failure, or "".
    """
    with open(log, "a", encoding="utf-8") as file:
        print(f"$ {shlex.join(command)}", file=file, flush=True)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=os.setpgrp,  # no session of its own: it shall end with ours
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(DEATH_S)
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


# ------------------------------------------------------------------------------- a summary


def told(row: dict[str, Any]) -> str:
    """Return a measured row in a few words; "" for one that a table shows better."""
    match row:
        case {"text": text}:
            return text
        case {"task": task, "method": method, "verify_ms": verify_ms}:
            named = {
                "of vanilla's rate": row["speedup"],
                "of ceiling": row["verify_of_ceiling"],
                "identical": row["identical"],
            }
            shares = [f"{share:.0%} {name}" for name, share in named.items() if share is not None]
            return (
                f"{task} {method} {row['tokens_per_s']:.0f} tokens/s, tau {row['tau']:.2f}, "
                f"draft {row['draft_ms']:.2f} verify {verify_ms:.2f} rest {row['rest_ms']:.2f} ms, "
                f"{', '.join(shares)}; compiled in {row['compile_s']:.0f} s"
            )
    return ""


def told_of_tests(log: str) -> str:
    """Count the tests that passed so far, and name those that failed.

    log: the output of pytest with -v and several processes
    """
    states: dict[str, str] = {}
    for state, name in re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (?:\S*::)?(.*?)\s*$", log, re.M):
        states[name] = "FAILED" if "FAILED" in (state, states.get(name)) else state
    counts = Counter(states.values())
    failed = [name for name, state in states.items() if state in ("FAILED", "ERROR")]
    text = f"{counts['PASSED']} tests passed, {counts['SKIPPED']} skipped, {len(failed)} failed"
    if failed:
        text += f": {', '.join(failed)}"
    return text


def told_of_kernels(rows: list[dict[str, Any]]) -> list[str]:
    """Summarize the rows of one call of kernels.py."""
    products = [row for row in rows if "layer" in row]
    timed = {(row["format"], row["layer"], row["M"]): row for row in products if "time_us" in row}
    forms = dict.fromkeys(row["format"] for row in products)
    texts = [f"all layers: {kernel_bench.totals(timed, form)}" for form in forms]
    times: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)  # by shape and method
    for row in rows:
        if "kernel" in row and "time_us" in row:
            times[row["kernel"], row["M"]][row["method"]] = row["time_us"]
    ratios = []
    for by_method in times.values():
        ours_us = by_method.pop("ours", None)
        fastest_us = min(by_method.values(), default=0.0)
        if ours_us is not None and fastest_us:
            ratios.append(ours_us / fastest_us)
    if ratios:
        texts.append(
            f"{len(ratios)} shapes, {min(ratios):.2f} to {max(ratios):.2f} of the time of "
            "torch's fastest"
        )
    return texts


# ------------------------------------------------------------------------------- parts


class Check:
    """A run over some parts."""

    def __init__(self, config: CheckConfig, parts: list[str]):
        self.config = config
        self.parts = parts
        self.out = Path(config.out).resolve()
        self.deadline = time.monotonic() + 60 * config.minutes
        self.lines: list[str] = []  # of the summary
        self.failed: list[str] = []  # steps

    def rows(self) -> measure.Log:
        """Read all rows so far, since other processes append to them, and may leave a torn one."""
        return measure.Log(str(self.out / "results.jsonl"), "--out")

    def take_papers(self, label: dict[str, Any]) -> None:
        """Move the lines of papers.py's own log to ours, and its rounds after a kill.

        Writes: the files.
        """
        for name in PAPERS_LOGS:
            log = measure.Log(str(self.out / name), "--out")
            self.rows().add([label | row for row in log.rows])
            log.clear()

    def limit_s(self, step: Step, later: list[Step]) -> float:
        """Return the limit of a step: its share, as long again where time is left, and no more."""
        left = self.deadline - time.monotonic()
        spare = left - sum(other.share_s for other in later)
        return min(max(step.share_s, min(2 * step.share_s, spare)), left)

    def step(self, part: str, step: Step, later: list[Step]) -> None:
        """Run a step, and record its end and its results.

        Writes: results.jsonl, log.txt, summary.txt; GPT_EAGLE_PDL, where our kernels fail; the
        table of plans that decoding loads, where there is one.
        """
        command = command_of(step, self.out, self.config.dry_run)
        log = self.out / "log.txt"
        began = time.monotonic()
        limit = self.limit_s(step, later)
        before = len(self.rows().rows)
        wrong = ""
        reason = self._left_out(step)
        if self.config.dry_run:
            state = reason or f"at most {limit:.0f} s"
            print(f"{part} {step.name}: {state}: {shlex.join(command)}", flush=True)
        if not reason:
            over = f"not begun, since {self.config.minutes:g} minutes are over"
            wrong = over if limit < LEAST_S else run(command, log, limit)
        seconds = time.monotonic() - began
        self.take_papers({"part": part, "by": step.name})
        results = self.rows()
        new = results.rows[before:]
        row = {"part": part, "step": step.name, "seconds": seconds}
        results.add([row | {"wrong": wrong, "left_out": reason}])
        if part == "sweep":
            for table in self.out.glob(TABLE):
                FOLDER.mkdir(exist_ok=True)
                shutil.copy(table, FOLDER)
        texts = self._texts(step, new, log, wrong)
        state = reason or "well"
        if wrong:
            state = f"FAILED, {wrong}"
            self.failed.append(f"{part} {step.name}")
            if step.name == SMALL_KERNELS:
                os.environ["GPT_EAGLE_PDL"] = "0"
                texts.append("later steps run without dependent launch")
        self.say("\n    ".join([f"{part:11} {step.name:11} {seconds:4.0f} s  {state}", *texts]))

    def _texts(self, step: Step, rows: list[dict[str, Any]], log: Path, wrong: str) -> list[str]:
        """Summarize the rows and the output of a step."""
        texts = [text for text in map(told, rows) if text] + told_of_kernels(rows)
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        last = f"\n{printed}".rpartition("\n$ ")[2].strip()  # of this step
        texts += [line for line in last.splitlines() if line.startswith((LOOK, "note: "))]
        if step.name == "pytest":
            texts.append(told_of_tests(last))
        elif wrong and last:
            texts.append(last.splitlines()[-1][:200])
        return texts

    def _left_out(self, step: Step) -> str:
        """Return the reason why a step cannot run here, or ""."""
        if step.needs and not shutil.which(step.needs) and not (ROOT / step.needs).exists():
            return f"left out: there is no {step.needs}"
        if self.config.dry_run:
            return "left out: it needs a GPU" if step.on_cpu is None else ""
        count = torch.cuda.device_count()
        if step.gpus > count:
            return f"left out: it needs {step.gpus} GPUs, and there are {count}"
        return ""

    def say(self, text: str) -> None:
        """Print a piece of the summary, and write all of it. Writes: summary.txt."""
        self.lines.append(text)
        print(text, flush=True)
        (self.out / "summary.txt").write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def run(self) -> None:
        """Run the parts."""
        steps = [(part, step) for part in self.parts for step in PARTS[part]]
        for name in PAPERS_LOGS:
            (self.out / name).unlink(missing_ok=True)
        (self.out / "log.txt").unlink(missing_ok=True)  # of an earlier run
        for number, (part, step) in enumerate(steps):
            later = [other for _, other in steps[number + 1 :] if not self._left_out(other)]
            self.step(part, step, later)
        self.say(f"FAILED: {', '.join(self.failed)}" if self.failed else "all went well")


def pack(folder: Path, compiled: str) -> None:
    """Copy the files that git tracks to a new folder, but for the large ones that no step reads.

    compiled: folder of Triton's cache, of which the machine code travels too; "": none. It is found
        there by a Triton of the same version for the same version of Python, built by the same; the
        others compile.
    Raises: ValueError for a folder that is there, without git, for a cache that is not, and for
        more than `PACK_BYTES`.
    """
    if folder.exists():
        raise ValueError(f"--pack: {folder} is there already; name a new folder")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise ValueError("--pack needs the project's git checkout; run it in one")
    kernels = compiled_files(Path(compiled)) if compiled else {}
    if compiled and not kernels:
        raise ValueError(
            f"--compiled: {compiled} has no compiled kernels; name the folder triton-cache of the "
            "environment of scripts/gpu/cycle_offline.py, after it ran"
        )
    sources = {}
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file() and not name.startswith(STAYS) and not name.endswith(PICTURES):
            sources[name] = ROOT / name
    size = sum(file.stat().st_size for file in [*sources.values(), *kernels.values()])
    if size > PACK_BYTES:
        of_kernels = sum(file.stat().st_size for file in kernels.values())
        raise ValueError(
            f"--pack: {size / 1e6:.1f} MB, {of_kernels / 1e6:.1f} of them compiled kernels, and "
            f"{PACK_BYTES / 1e6:g} may travel; give --compiled the cache of fewer cases"
        )
    for name, file in (sources | kernels).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / name)
    print(f"{folder}: {size / 1e6:.1f} MB; run python scripts/gpu/check.py there")


def compiled_files(cache: Path) -> dict[str, Path]:
    """Return the files of our kernels in a cache of Triton's, by their names in a pack."""
    found = {}
    for kernel in sorted(cache.glob("*/*.cubin")):
        if not kernel.name.startswith("triton_"):  # inductor's, which are written anew in any case
            for file in (kernel, *kernel.parent.glob("*.json")):
                found[f"{COMPILED}/{kernel.parent.name}/{file.name}"] = file
    return found


def use_compiled(folder: Path) -> None:
    """Let Triton find kernels that have travelled. Writes: their lists of files; the environment.

    A list of Triton 3.6 names its files by their paths on the machine that compiled them.
    """
    if not folder.is_dir():
        return
    for listing in folder.glob("*/__grp__*.json"):
        names = [file.name for file in listing.parent.iterdir() if file != listing]
        paths = {name: str(listing.parent / name) for name in names}
        listing.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def check(config: CheckConfig) -> None:
    """Run the parts. Exits with status 1 when one did not go well."""
    parts = config.only.split(",") if config.only else [*(PARTS if config.dry_run else FIRST)]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--only: there is no part {part}; use {', '.join(PARTS)}")
    if config.minutes <= 0:
        raise ValueError(f"--minutes must be above 0; it is {config.minutes:g}")
    if not config.dry_run and not torch.cuda.is_available():
        raise ValueError(
            "this machine or this torch has no CUDA device; run it on one that has, "
            "or add --dry_run"
        )
    if not config.dry_run:
        set_cuda_device("cuda")
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: cannot write {config.out}: {error.strerror}; name a folder"
        ) from None
    os.environ["PATH"] += os.pathsep + CUDA_PROGRAMS
    use_compiled(ROOT / COMPILED)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending what was begun
    checked = Check(config, parts)
    checked.say(
        f"# {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {','.join(parts)}, "
        f"{config.minutes:g} minutes"
    )
    checked.run()
    if checked.failed:
        sys.exit(1)


def main() -> None:
    config = parse(CheckConfig, "check.py", __doc__)
    with one_line_errors("check.py"):
        if config.pack:
            pack(Path(config.pack), config.compiled)
        else:
            check(config)


if __name__ == "__main__":
    main()
