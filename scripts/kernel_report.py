"""What the CUDA kernels become, compiled without a GPU: registers, spills, shared memory, tensor-core instructions.

    python scripts/kernel_report.py --targets 80,86,89,90 --formats int4-128,int8 --dtypes bf16

Each kernel is compiled ahead of time as `kernels_triton.plan` would cut it on the target, and read back with the
disassembler that Triton brings. `per weight`: instructions of all threads in the main loop, per weight. As a measure:
an H100 issues about 4.9 in the time it reads an int4 weight at 3 TB/s, and 9.7 for an int8 one.
Prints a Markdown table. Nothing is run, and no time is measured.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import fail, option, parse, run_or_fail  # noqa: E402

try:
    import triton
except ModuleNotFoundError:
    fail("kernel_report.py", "Triton is not installed; pip install triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel  # noqa: E402

from kernels_triton import Device, Plan, matmul_kernel, plan  # noqa: E402

# multiprocessors and shared memory of a block: CUDA C++ programming guide, table of compute capabilities
TARGETS = {
    "80": Device(108, 163 * 1024, 80),  # A100
    "86": Device(82, 99 * 1024, 86),  # RTX 3090
    "89": Device(128, 99 * 1024, 89),  # RTX 4090
    "90": Device(132, 227 * 1024, 90),  # H100
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("int4-128", "int4-64", "int4-32", "int8")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class ReportConfig:
    targets: str = option(",".join(TARGETS), "compute capabilities")
    formats: str = option(",".join(FORMATS), "weight formats")
    dtypes: str = option("bf16", "of activations: bf16, fp16, fp32")
    N: int = option(4096, "outputs of the layer")
    K: int = option(4096, "inputs of the layer")


class Case(NamedTuple):
    """One kernel to compile."""

    target: str
    form: str
    dtype: str
    M: int
    N: int = 4096
    K: int = 4096


class Resources(NamedTuple):
    """What a compiled kernel takes of a multiprocessor."""

    registers: int  # per thread
    stack_bytes: int  # of local memory, per thread
    local_accesses: int  # instructions that load from or store to local memory
    shared_bytes: int  # per block
    tensor_core: str  # instruction and count, or "none"
    per_weight: float  # instructions in the main loop


def compile_case(case: Case) -> tuple[CompiledKernel, Plan]:
    """Compile for the target, as the launcher would on it."""
    bits, group = (8, 0) if case.form == "int8" else (4, int(case.form.removeprefix("int4-")))
    cut = plan(case.M, case.N, case.K, bits, group, DTYPES[case.dtype], TARGETS[case.target])
    constants = {
        "BITS": bits, "GROUP": group, "SPLITS": cut.splits,
        "TOKENS": cut.tokens, "ROWS": cut.rows, "STAGES": cut.stages,
    }  # fmt: skip
    types = {
        "x_ptr": f"*{case.dtype}", "packed_ptr": "*i16", "scale_ptr": "*fp32" if bits == 8 else "*i32",
        "y_ptr": "*fp32" if cut.splits > 1 else f"*{case.dtype}", "M": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    aligned = [name for name in types if name.endswith("_ptr") or name == "K" or (name == "N" and case.N % 16 == 0)]
    source = ASTSource(
        fn=matmul_kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(matmul_kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": cut.warps}
    return triton.compile(source, target=GPUTarget("cuda", int(case.target), 32), options=options), cut


def disassemble(kernel: CompiledKernel) -> tuple[str, str]:
    """Returns: the resource usage and the machine code, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        commands = ([TOOLS / "cuobjdump", "-res-usage", file.name], [TOOLS / "nvdisasm", "-c", file.name])
        usage, code = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    return usage, code


def main_loop(code: str) -> list[str]:
    """The instructions of the longest loop: from a label to the last branch back to it."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    longest: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction[1])
            if branch and branch[1] in labels:
                longest = max(longest, instructions[labels[branch[1]] :], key=len)
    return longest


def resources(case: Case) -> tuple[Resources, Plan]:
    """Compile and read back."""
    kernel, cut = compile_case(case)
    usage, code = disassemble(kernel)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in ("HGMMA", "HMMA", "LDL", "STL")}
    tensor_core = " ".join(f"{name} {counts[name]}" for name in ("HGMMA", "HMMA") if counts[name])
    weights = cut.rows * 1024 // (8 if case.form == "int8" else 4)  # of an iteration
    per_weight = len(main_loop(code)) * 32 * cut.warps / weights
    local = counts["LDL"] + counts["STL"]
    return Resources(registers, stack, local, kernel.metadata.shared, tensor_core or "none", per_weight), cut


def cases(config: ReportConfig) -> list[Case]:
    """Every combination that was asked for. Raises: ValueError for an unknown one."""
    chosen = []
    for flag, known in (("targets", TARGETS), ("formats", FORMATS), ("dtypes", DTYPES)):
        chosen.append(getattr(config, flag).split(","))
        for name in chosen[-1]:
            if name not in known:
                raise ValueError(f"--{flag}: {name} is not known; use {', '.join(known)}")
    if config.N < 1 or config.K < 1:
        raise ValueError(f"--N and --K must be at least 1; they are {config.N} and {config.K}")
    targets, forms, dtypes = chosen
    return [Case(t, f, d, M, config.N, config.K) for d in dtypes for f in forms for t in targets for M in (16, 32, 64)]


def report(config: ReportConfig) -> None:
    """Print the table."""
    print(f"# Triton {triton.__version__}, N {config.N}, K {config.K}; nothing was run\n")
    print("| target | weights | x | tokens x rows | splits | stages | registers | spilled bytes | shared KiB (limit) |"
          " tensor cores | per weight |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in tqdm(cases(config), unit="kernel"):
        found, cut = resources(case)
        limit = TARGETS[case.target].shared_bytes // 1024
        cells = [
            f"sm_{case.target}", case.form, case.dtype, f"{cut.tokens} x {cut.rows}", cut.splits, cut.stages,
            found.registers, found.stack_bytes, f"{found.shared_bytes / 1024:.0f} ({limit})", found.tensor_core,
            f"{found.per_weight:.2f}",
        ]  # fmt: skip
        tqdm.write(f"| {' | '.join(map(str, cells))} |", file=sys.stdout)


def main() -> None:
    config = parse(ReportConfig, "kernel_report.py", __doc__)
    run_or_fail("kernel_report.py", lambda: report(config))


if __name__ == "__main__":
    main()
