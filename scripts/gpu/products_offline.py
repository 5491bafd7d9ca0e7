"""Compile every variant of the products for CUDA, without a GPU, and list what each one takes.

    python3 scripts/gpu/products_offline.py --out products.jsonl

1. A variant is a kernel with its launcher's plan, as in tests/cases/compiled_kernels.py: each
   target, weight format, type, number of rows and epilogue, at widths that are multiples of 16 and
   at one that is not, with zero points, and at the widths of SmolLM2.
2. Each becomes a line of `--out`: registers, stack, shared memory, tensor-core instructions, and
   its fault, if it has one. A run that was ended goes on where it was; after a change of a kernel,
   name another file.
3. The end is a line for each target, and status 1 if a variant has a fault: a spill, more shared
   memory than the target has, an access that could race, or no tensor cores in 16 bits.

It took 46 minutes on one core. Not here: the other kernels of a cycle (cycle_offline.py).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cases")]

from command_line import one_line_errors, option, parse, require
from files import check_output, read_jsonl

if TYPE_CHECKING:
    from compiled_kernels import Case


@dataclass
class OfflineConfig:
    """Options of a run."""

    out: str = option("products.jsonl", "file of the variants, a line each; a run goes on with it")
    targets: str = option("80,86,89,90,100", "compute capabilities, without the point")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        from ops.cuda.launch import TARGETS

        for target in self.targets.split(","):
            require(target in TARGETS, f"--targets: {target} is none of {', '.join(TARGETS)}")
        check_output(Path(self.out), "--out")


def variants(targets: list[str]) -> list[Case]:
    """List the variants for some targets."""
    from compiled_kernels import FORMATS, Case, cases

    zeros = ("int4-128-zeros", "int4-64-zeros", "int4-32-zeros")
    found = cases(4096) + cases(4095)
    for target, form, dtype, M, epilogue in product(
        targets, zeros, ("bf16", "fp16"), (16, 32, 64), ("none", "swiglu", "add", "rotary")
    ):
        found.append(Case(target, form, dtype, M, epilogue=epilogue))
    for target, form, M in product(targets, FORMATS, (16, 64)):
        found.append(Case(target, form, "bf16", M, 3072, 576, epilogue="swiglu"))
        found.append(Case(target, form, "bf16", M, 576, 1536, epilogue="add"))
    return [case for case in found if case.target in targets]


def compiled(case: Case) -> dict:
    """Compile a variant. Returns: its line of the file."""
    from compiled_kernels import fault_of, product_source, resources

    source, cut = product_source(case)
    row = {"case": list(case), "plan": list(cut)}
    try:
        found = resources(case.target, source)
    except RuntimeError as error:  # of ptxas
        return row | {"registers": 0, "shared_bytes": 0, "fault": str(error)}
    return row | found._asdict() | {"fault": fault_of(case, found)}


def summary(rows: list[dict]) -> list[str]:
    """Return a line for each target, and one for each variant with a fault."""
    by_target = defaultdict(list)
    for row in rows:
        by_target[row["case"][0]].append(row)
    lines = []
    for target, own in sorted(by_target.items()):
        registers = max(row["registers"] for row in own)
        shared = max(row["shared_bytes"] for row in own)
        wrong = [row for row in own if row["fault"]]
        lines.append(
            f"sm_{target}: {len(own)} variants, at most {registers} registers and {shared:,} bytes "
            f"of shared memory; {len(wrong)} with a fault"
        )
        lines += [f"  {row['case']}: {row['fault']}" for row in wrong]
    return lines


def main() -> None:
    """Compile what is missing, and print the summary."""
    config = parse(OfflineConfig, "products_offline.py", __doc__)
    with one_line_errors("products_offline.py"):
        out = Path(config.out)
        rows = read_jsonl(out, "--out") if out.exists() else []
        done = {tuple(row["case"]) for row in rows}
        todo = [case for case in variants(config.targets.split(",")) if tuple(case) not in done]
        with out.open("a") as file:
            for case in tqdm(todo, unit="variant"):
                rows.append(compiled(case))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
        print("\n".join(summary(rows)))
        sys.exit(any(row["fault"] for row in rows))


if __name__ == "__main__":
    main()
