"""Everything that awaits a GPU, in one command on a bare machine: correctness first, then numbers.

    python scripts/gpu_check.py --out benchmarks/gpu.jsonl
    python scripts/gpu_check.py --only kernels

tests    The tests marked `gpu`: operators against their references, the noise, token identity with vanilla decoding.
kernels  Products with int4 and int8 weights beside the vendor's in bf16 and torch's own int4, checked and timed at
         the shapes of a 7B model (scripts/kernel_bench.py, a process for each format), tree attention,
         compaction and top-k beside torch's, and the experts of a Mixtral layer; meant to take under 5 minutes.
demo     The bundled demo, compiled: vanilla, the three trees in fp32 and bf16, int8 and int4, lookup (`DEMO_RUNS`):
         tau, tokens/s, draft and verify time, the share of sequences identical with vanilla.
models   Stand-ins of real size, a process for each (`MODEL_RUNS`, scripts/bench_trees.py): vanilla, every tree, auto,
         with the share of the bandwidth roofline, the time split, tau and token identity. The most telling ones come
         first; what does not fit into --minutes is named and left out. Mixtral needs its demo (benchmarks/README.md).
One JSON line is appended after every row, so that a run that is cut off loses nothing. A part that fails does not
stop the others; the exit status is then 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import _path
import kernel_bench
from generate import compare, load
from measure import environment
from options import DEMO, one_line_errors, option, parse, read_jsonl

TREES = ({"tree": "chain"}, {"tree": "static"}, {"tree": "dynamic"})
DEMO_RUNS = [  # dtype, quant, temperature, who drafts
    *((dtype, "none", t, tree) for dtype in ("float32", "bfloat16") for t in (0.0, 1.0) for tree in TREES),
    *(("bfloat16", quant, t, {}) for quant in ("int8", "int4") for t in (0.0, 1.0)),
    *(("bfloat16", "none", 1.0, {"draft": draft}) for draft in ("ngram", "eagle+ngram")),
]

MODEL_RUNS = [  # flags of bench_trees.py
    "--inflate llama2-7b",
    "--inflate llama2-7b --quant int4 --static",
    "--inflate llama3-8b --quant int4",
    "--inflate llama2-7b --quant int4 --random_twin",
    "--inflate llama2-7b --random_twin",
    "--inflate llama2-7b --quant int8",
    "--inflate llama3-8b",
    "--inflate llama3-8b --quant int8",
    f"--inflate mixtral-8x7b --quant int4 --checkpoint {_path.ROOT / 'checkpoints' / 'demo-moe'}",
]


@dataclass
class CheckConfig:
    out: str = option("benchmarks/gpu.jsonl", "JSON lines are appended here")
    only: str = option("tests,kernels,demo,models", "parts to run")
    minutes: float = option(9.0, "after which no further process is started for a model")
    limit: int = option(10, "prompts per row of the demo")
    max_new_tokens: int = option(128, "tokens per prompt of the demo")


def append(config: CheckConfig, row: dict) -> None:
    """Write one JSON line."""
    with open(config.out, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def run_tests(config: CheckConfig) -> bool:
    """Run the tests. Returns: whether they passed."""
    command = [sys.executable, "-m", "pytest", "-n0", "-m", "gpu", "tests/test_gpu.py"]  # one process a device
    status = subprocess.run(command, cwd=_path.ROOT).returncode
    append(config, {"part": "tests", "exit_status": status})
    return status == 0


def run_kernels(config: CheckConfig) -> bool:
    """Measure each format in a process of its own, since a fault takes the device from its process."""
    out = Path(config.out).resolve()
    start = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    well = True
    for form in kernel_bench.FORMATS + kernel_bench.CYCLE:
        command = [sys.executable, _path.ROOT / "scripts" / "kernel_bench.py", "--format", form, "--json", out]
        status = subprocess.run(command).returncode
        append(config, {"part": "kernels", "format": form, "exit_status": status})
        well &= status == 0
    found = read_jsonl(out, "--out")[start:]
    products, others = ([row for row in found if key in row] for key in ("layer", "kernel"))
    print(kernel_bench.summary(products), kernel_bench.cycle_summary(others), sep="\n\n", flush=True)
    return well and not any("error" in row or not row.get("correct", True) for row in products + others)


def run_demo(config: CheckConfig) -> bool:
    """Decode with every tree. Returns: True; what differs from vanilla is in the rows."""
    prompts = [row["turns"] for row in read_jsonl(_path.ROOT / "data" / "eval" / "demo.jsonl", "prompts")]
    for dtype, quant, temperature, drafted in DEMO_RUNS:
        engine = load(
            checkpoint=DEMO, device="cuda", dtype=dtype, quant=quant, temperature=temperature, compile=True, **drafted,
            max_new_tokens=config.max_new_tokens, ignore_eos=True,
        )  # fmt: skip
        result, outcome = compare(engine, prompts[: config.limit])
        stats = {k: v for k, v in result.stats.items() if k != "accept_lengths"}
        row = {"part": "demo", "dtype": dtype, "quant": quant, "temperature": temperature}
        row |= {"draft": engine.config.draft} | engine.drafter.facts() | stats | outcome
        append(config, row | environment(engine.config.device))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return True


def run_models(config: CheckConfig) -> bool:
    """Decode with stand-ins of real size, while there is time. Returns: whether all that were begun went well."""
    well, began = True, time.monotonic()
    for flags in MODEL_RUNS:
        checkpoint = flags.partition("--checkpoint ")[2]
        missing = [name for name in (checkpoint, f"{checkpoint}-eagle") if checkpoint and not Path(name).is_dir()]
        if missing:
            reason = f"there is no {Path(missing[0]).name}"
        elif time.monotonic() - began > 60 * config.minutes:
            reason = f"{config.minutes:g} minutes are over"
        else:
            command = [sys.executable, _path.ROOT / "scripts" / "bench_trees.py", *flags.split(), "--json", config.out]
            well &= subprocess.run([*command, "--device", "cuda"]).returncode == 0
            continue
        print(f"note: left out, since {reason}: {flags}", flush=True)
        append(config, {"part": "models", "left_out": flags, "reason": reason})
    return well


PARTS = {"tests": run_tests, "kernels": run_kernels, "demo": run_demo, "models": run_models}


def check(config: CheckConfig) -> None:
    """Run the parts. Exits with status 1 when one did not go well."""
    parts = config.only.split(",")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--only: there is no part {part}; use {', '.join(PARTS)}")
    if not Path(config.out).parent.is_dir():
        raise ValueError(f"--out: cannot write {config.out}; there is no directory {Path(config.out).parent}")
    if not torch.cuda.is_available():
        raise ValueError("this machine or this torch has no CUDA device; run it on one that has")
    device, date = torch.cuda.get_device_name(), time.strftime("%Y-%m-%d")
    print(f"# {device}, torch {torch.__version__}, {date}", flush=True)
    append(config, {"device": device, "torch": torch.__version__, "date": date, "parts": parts})
    failed = [part for part in parts if not PARTS[part](config)]
    if failed:
        print(f"gpu_check.py: not all went well in: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


def main() -> None:
    config = parse(CheckConfig, "gpu_check.py", __doc__)
    with one_line_errors("gpu_check.py"):
        check(config)


if __name__ == "__main__":
    main()
