"""Everything that awaits a GPU, in one command on a bare machine: correctness first, then numbers.

    python scripts/gpu_check.py --out benchmarks/gpu.jsonl

1. The tests marked `gpu`: operators against their references, the noise, token identity with vanilla decoding.
2. The bundled demo, compiled: vanilla, chain, static and dynamic trees in fp32 and bf16, greedy and sampled: tau,
   tokens/s, draft and verify time, the share of sequences identical with vanilla.
One JSON line is appended after every row, so that a run that is cut off loses nothing.
Not here: models of real size, and kernels that do not exist yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from generate import compare, environment, load  # noqa: E402

PROMPTS = [row["turns"] for row in map(json.loads, (ROOT / "data/eval/demo.jsonl").read_text().splitlines())]


def rows(limit: int, max_new_tokens: int):
    """Yield one measurement after another."""
    for dtype in ("float32", "bfloat16"):
        for temperature in (0.0, 1.0):
            for tree in ("chain", "static", "dynamic"):
                engine = load(
                    device="cuda", dtype=dtype, temperature=temperature, tree=tree, compile=True,
                    max_new_tokens=max_new_tokens, ignore_eos=True,
                )  # fmt: skip
                result, outcome = compare(engine, PROMPTS[:limit])
                stats = {k: v for k, v in result.stats.items() if k != "accept_lengths"}
                yield {"dtype": dtype, "temperature": temperature, "tree": tree} | stats | outcome | environment(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/gpu.jsonl", help="JSON lines are appended here")
    parser.add_argument("--limit", type=int, default=10, help="prompts per row")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check.py: this machine or this torch has no CUDA device; run it on one that has", file=sys.stderr)
        sys.exit(2)
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py"], cwd=ROOT)
    with open(arguments.out, "a", encoding="utf-8") as file:
        file.write(json.dumps({"tests_exit_status": tests.returncode, "date": time.strftime("%Y-%m-%d")}) + "\n")
        for row in rows(arguments.limit, arguments.max_new_tokens):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
