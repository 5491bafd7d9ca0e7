"""What the CUDA kernels become, compiled without a GPU: registers, spills, shared memory, tensor-core instructions.

    python scripts/gpu/compiled_kernels.py --targets 80,86,89,90 --formats int4-128,int8 --dtypes bf16

Each kernel is compiled ahead of time as its launcher would cut it on the target, and read back with the
disassembler that Triton brings. `per weight`: instructions of all threads in the main loop, per weight. As a measure:
an H100 issues about 4.9 in the time it reads an int4 weight at 3 TB/s, and 9.7 for an int8 one.
A second table has the products with experts at the shapes of Mixtral-8x7B's w2 and Qwen3-30B-A3B's w13; `x` is bf16,
`float` weights too, and the number of pairs of a token and an expert is what chooses the tile.
A third has the other kernels of a decode cycle: tree attention for a lone token and for 60, per head width, the
compaction of a path, the top-k, and the lists of experts' rows; its last column is the number of instructions in the
longest loop.
Prints Markdown. Nothing is run, and no time is measured.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import fail, one_line_errors, option, parse

try:
    import triton
except ModuleNotFoundError:
    fail("compiled_kernels.py", "Triton is not installed; pip install triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import ops.cuda.attention
import ops.cuda.compact
import ops.cuda.experts
import ops.cuda.norm
import ops.cuda.quantized
import ops.cuda.rotary
import ops.cuda.topk
import ops.cuda.tree
from ops.cuda.experts import plan_experts
from ops.cuda.quantized import Device, ProductPlan, plan_product

# multiprocessors and shared memory of a block: CUDA C++ programming guide, table of compute capabilities
TARGETS = {
    "80": Device(108, 163 * 1024, 80),  # A100
    "86": Device(82, 99 * 1024, 86),  # RTX 3090
    "89": Device(128, 99 * 1024, 89),  # RTX 4090
    "90": Device(132, 227 * 1024, 90),  # H100
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("int4-128", "int4-64", "int4-32", "int8")
ZEROS = (
    "int4-128-zeros",
    "int4-64-zeros",
    "int4-32-zeros",
)  # with zero points: known, but not in the report of all
EXPERT_FORMATS = ("float", *FORMATS)  # float: as x
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
    experts: int = 0  # with experts, M rows are pairs of a token and an expert; 0: a plain layer
    gated: bool = False  # with SwiGLU behind it


class CycleCase(NamedTuple):
    """Another: attention, add_norm, rotary, normed_rotary (with norms of queries and keys), compact, lists, block, row
    (top-k), level, best_nodes, relate (trees)."""

    target: str
    kernel: str
    dtype: str = "bf16"
    E: int = 128
    heads: int = 32
    kv_heads: int = 32
    T: int = 60  # rows; of a path where it is compacted
    k: int = 10
    V: int = 128256
    experts: int = 8


class Source(NamedTuple):
    """A kernel and how it is launched."""

    kernel: triton.JITFunction
    types: dict[str, str]  # of its arguments
    constants: dict[str, object]
    warps: int
    multiples: tuple[str, ...] = ()  # arguments that are multiples of 16, besides pointers


class Resources(NamedTuple):
    """What a compiled kernel takes of a multiprocessor."""

    registers: int  # per thread
    stack_bytes: int  # of local memory, per thread
    local_accesses: int  # instructions that load from or store to local memory
    shared_bytes: int  # per block
    tensor_core: str  # instruction and count, or "none"
    loop: int  # instructions in the longest loop


def bits_and_group(form: str) -> tuple[int, int]:
    """Bits of a stored weight, and weights that share a scale or 0."""
    if form in ("float", "int8"):
        return (16 if form == "float" else 8), 0
    return 4, int(form.split("-")[1])


def product_source(case: Case) -> tuple[Source, ProductPlan]:
    """A product, as its launcher would cut it on the target."""
    bits, group = bits_and_group(case.form)
    facts = (case.M, case.N, case.K, bits, group, DTYPES[case.dtype], TARGETS[case.target])
    epilogue, zeros = "swiglu" if case.gated else "none", case.form.endswith("zeros")
    cut = (
        plan_experts(*facts, case.experts, zeros)
        if case.experts
        else plan_product(*facts, epilogue, zeros)
    )
    constants = {
        "BITS": bits, "GROUP": group, "SPLITS": cut.splits,
        "TOKENS": cut.tokens, "ROWS": cut.rows, "STAGES": cut.stages,
    }  # fmt: skip
    y = "*fp32" if cut.splits > 1 else f"*{case.dtype}"
    scale = {} if bits == 16 else {"scale_ptr": "*fp32" if bits == 8 or zeros else "*i32"}
    x, sizes = {"x_ptr": f"*{case.dtype}"}, {"N": "i32", "K": "i32"}
    multiples = ("N", "K") if case.N % 16 == 0 else ("K",)
    if not case.experts:
        types = x | {"packed_ptr": "*i16"} | scale | {"y_ptr": y, "M": "i32"} | sizes
        constants |= {"GATED": case.gated, "OVERLAPS": int(case.target) >= 90}
        return Source(ops.cuda.quantized.matmul_kernel, types, constants, cut.warps, multiples), cut
    weight = {"weight_ptr": f"*{case.dtype}" if bits == 16 else "*i16"}
    types = x | weight | scale | {"lists_ptr": "*i32", "y_ptr": y, "P": "i32"} | sizes
    constants |= {"EXPERTS": case.experts} | ({"scale_ptr": None} if bits == 16 else {})
    return Source(ops.cuda.experts.experts_kernel, types, constants, cut.warps, multiples), cut


def attention_source(case: CycleCase) -> tuple[Source, ops.cuda.attention.AttentionPlan]:
    """Attention over splits of a cache, as its launcher would cut it on the target."""
    rows = case.T * case.heads // case.kv_heads
    cut = ops.cuda.attention.plan_attention(rows, case.E, DTYPES[case.dtype], TARGETS[case.target])
    split = case.T <= ops.cuda.attention.SPLIT_TOKENS
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{case.dtype}")
    pointers |= {"start_ptr": "*i64", "mask_ptr": "*i1", "y_ptr": f"*{case.dtype}"}
    pointers |= dict.fromkeys(("parts_ptr", "stats_ptr"), "*fp32" if split else f"*{case.dtype}")
    types = (
        pointers
        | {"done_ptr": "*i32"}
        | dict.fromkeys(("T", "S", "W", "mask_b", "mask_t", "mask_w"), "i32")
    )
    constants = ops.cuda.attention.constants_of(case.E) | {
        "H": case.heads, "KV_HEADS": case.kv_heads, "SPLIT": split,
        "ROWS": cut.rows, "KEYS": cut.keys, "STAGES": cut.stages, "OVERLAPS": int(case.target) >= 90,
    }  # fmt: skip
    return Source(ops.cuda.attention.attention_kernel, types, constants, cut.warps), cut


def cycle_source(case: CycleCase) -> Source:
    """One of the kernels of a decode cycle, as its launcher would start it."""
    if case.kernel == "attention":
        return attention_source(case)[0]
    overlaps = {"OVERLAPS": int(case.target) >= 90}
    if case.kernel == "add_norm":
        width, dtype = case.heads * case.E, f"*{case.dtype}"
        types = {
            "x_ptr": dtype,
            "delta_ptr": "*fp32",
            "weight_ptr": dtype,
            "sum_ptr": dtype,
            "y_ptr": dtype,
        }
        constants = {
            "SPLITS": ops.cuda.quantized.MAX_SPLITS,
            "WIDTH": triton.next_power_of_2(width),
        } | overlaps
        types |= {"size": "i32", "F": "i32", "eps": "fp32"}
        return Source(
            ops.cuda.norm.add_norm_kernel, types, constants, ops.cuda.norm.warps_of(width), ("F",)
        )
    if case.kernel in ("rotary", "normed_rotary"):
        types = {
            "qkv_ptr": f"*{case.dtype}",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "slots_ptr": "*i64",
        }
        types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{case.dtype}") | {
            "eps": "fp32",
            "T": "i32",
            "S": "i32",
        }
        constants = ops.cuda.rotary.constants_of(case.heads, case.kv_heads, case.E) | overlaps
        weights, normed = ("q_norm_ptr", "k_norm_ptr"), case.kernel == "normed_rotary"
        types |= dict.fromkeys(weights, f"*{case.dtype}") if normed else {}
        constants |= {} if normed else dict.fromkeys(weights)
        return Source(ops.cuda.rotary.rotary_cache_kernel, types, constants, 4)
    if case.kernel == "compact":
        cut = ops.cuda.compact.plan_compact(case.T, case.E * DTYPES[case.dtype].itemsize)
        types = dict.fromkeys(("addresses_ptr", "start_ptr", "path_ptr"), "*i64") | {
            "S": "i32",
            "steps": "i32",
        }
        constants = {"WORDS": cut.words, "WIDTH": cut.width, "STEPS": cut.steps}
        return Source(ops.cuda.compact.compact_kernel, types, constants, cut.warps)
    if case.kernel == "best_nodes":  # of a pool of case.V candidates
        types = {"values_ptr": "*fp32", "chosen_ptr": "*i64", "P": "i32", "count": "i32"}
        return Source(
            ops.cuda.tree.best_nodes_kernel, types, {"POOL": triton.next_power_of_2(case.V)}, 4
        )
    if case.kernel == "relate":  # of case.T nodes
        names = ("chosen", "above", "number", "parents", "depths")
        types = dict.fromkeys((f"{name}_ptr" for name in names), "*i64") | {
            "mask_ptr": "*i1",
            "P": "i32",
            "N": "i32",
        }
        return Source(
            ops.cuda.tree.relate_kernel, types, ops.cuda.tree.tiles_of_tree(case.V, case.T, 6), 8
        )
    if case.kernel == "lists":
        constants = {"EXPERTS": case.experts, "BLOCK": ops.cuda.experts.LISTED}
        types = {"expert_ptr": "*i64", "lists_ptr": "*i32", "P": "i32"}
        return Source(ops.cuda.experts.lists_kernel, types, constants, 4)
    types = {"keys_ptr": "*i64", "stats_ptr": "*fp32"}
    if case.kernel == "block":
        types = {"scores_ptr": "*fp32"} | types | {"V": "i32", "k": "i32", "sharpness": "fp32"}
        return Source(
            ops.cuda.topk.block_kernel, types, {"BLOCK": ops.cuda.topk.BLOCK} | overlaps, 4
        )
    blocks = triton.cdiv(case.V, ops.cuda.topk.BLOCK)
    if case.kernel == "level":  # the best of a dynamic tree of 6 levels
        names = ("above", "seen", "tokens", "values", "ranked", "order", "best", "sees")
        kinds = ("*fp32", "*i1", "*i64", "*fp32", "*i64", "*i64", "*fp32", "*i1")
        types |= {f"{name}_ptr": kind for name, kind in zip(names, kinds)}
        types |= dict.fromkeys(("R", "blocks", "k", "count", "slot", "W"), "i32")
        constants = {"ids_ptr": None, "places_ptr": None, "BY_VALUE": True}
        constants |= (
            ops.cuda.topk.tiles_of_level(case.k, blocks, case.k, case.k, 5 * case.k) | overlaps
        )
        return Source(ops.cuda.topk.level_kernel, types, constants, 4)
    types |= {
        "values_ptr": "*fp32",
        "index_ptr": "*i64",
        "total_ptr": "*fp32",
        "blocks": "i32",
        "k": "i32",
    }
    return Source(
        ops.cuda.topk.row_kernel, types, {"BLOCKS": triton.next_power_of_2(blocks)} | overlaps, 1
    )


def compile_for(target: str, source: Source) -> CompiledKernel:
    """Compile ahead of time."""
    names = source.kernel.arg_names
    aligned = [name for name in source.types if name.endswith("_ptr")] + list(source.multiples)
    ast = ASTSource(
        fn=source.kernel,
        signature=source.types | dict.fromkeys(source.constants, "constexpr"),
        constexprs=source.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(
        ast, target=GPUTarget("cuda", int(target), 32), options={"num_warps": source.warps}
    )


def disassemble(kernel: CompiledKernel) -> tuple[str, str]:
    """Returns: the resource usage and the machine code, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        commands = (
            [TOOLS / "cuobjdump", "-res-usage", file.name],
            [TOOLS / "nvdisasm", "-c", file.name],
        )
        usage, code = (
            subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands
        )
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


def resources(target: str, source: Source) -> Resources:
    """Compile and read back."""
    kernel = compile_for(target, source)
    usage, code = disassemble(kernel)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = {
        name: len(re.findall(rf"\b{name}\b", code)) for name in ("HGMMA", "HMMA", "LDL", "STL")
    }
    tensor_core = " ".join(f"{name} {counts[name]}" for name in ("HGMMA", "HMMA") if counts[name])
    local = counts["LDL"] + counts["STL"]
    return Resources(
        registers, stack, local, kernel.metadata.shared, tensor_core or "none", len(main_loop(code))
    )


def per_weight(case: Case, loop: int, cut: ProductPlan) -> float:
    """Instructions of all threads in the main loop of a product, per weight that it takes in."""
    return loop * 32 * cut.warps / (cut.rows * 1024 // bits_and_group(case.form)[0])


def cases(config: ReportConfig) -> list[Case]:
    """Every combination that was asked for. Raises: ValueError for an unknown one."""
    chosen = []
    for flag, known in (("targets", TARGETS), ("formats", FORMATS + ZEROS), ("dtypes", DTYPES)):
        chosen.append(getattr(config, flag).split(","))
        for name in chosen[-1]:
            if name not in known:
                raise ValueError(f"--{flag}: {name} is not known; use {', '.join(known)}")
    if config.N < 1 or config.K < 1:
        raise ValueError(f"--N and --K must be at least 1; they are {config.N} and {config.K}")
    targets, forms, dtypes = chosen
    return [
        Case(t, f, d, M, config.N, config.K, gated=gated)
        for d in dtypes for f in forms for t in targets for M in (16, 32, 64) for gated in (False, True)
        if not gated or config.N % 2 == 0
    ]  # fmt: skip


def expert_cases(config: ReportConfig) -> list[Case]:
    """Every tile of the products with experts: of a token or few, of a tree, of a prompt."""
    return [
        Case(target, form, "bf16", P, 4096, 14336, 8)
        for form in EXPERT_FORMATS for target in config.targets.split(",") for P in (2, 120, 512)
    ] + [  # Qwen3-30B-A3B's w13: a tree, and a prompt
        Case(target, form, "bf16", P, 1536, 2048, 128)
        for form in EXPERT_FORMATS for target in config.targets.split(",") for P in (480, 1024)
    ]  # fmt: skip


def cycle_cases(config: ReportConfig) -> list[CycleCase]:
    """The other kernels at the shapes of 7B models, with and without grouped queries, and of a small one."""
    shapes = [(128, 32, 32), (128, 32, 8), (64, 32, 4)]  # E, heads, key heads
    found = []
    for target in config.targets.split(","):
        for dtype in config.dtypes.split(","):
            found += [
                CycleCase(target, "attention", dtype, *shape, T)
                for shape in shapes
                for T in (1, 60, 256)
            ]
            found += [CycleCase(target, "add_norm", dtype), CycleCase(target, "rotary", dtype)]
            found += [CycleCase(target, "normed_rotary", dtype, kv_heads=8)]
            found += [
                CycleCase(target, "compact", dtype, E, T=T) for E in (128, 64) for T in (7, 64)
            ]
        found += [
            CycleCase(target, kernel, "fp32") for kernel in ("block", "row", "level", "lists")
        ]
        found += [CycleCase(target, kernel, "fp32", V=510) for kernel in ("best_nodes", "relate")]
    return found


def print_table(header: str, rows: Iterable[list]) -> None:
    """Print Markdown, line by line."""
    print(f"\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    for cells in rows:
        tqdm.write(f"| {' | '.join(map(str, cells))} |", file=sys.stdout)


def use(target: str, found: Resources) -> list:
    """What both tables say of a kernel."""
    limit = TARGETS[target].shared_bytes // 1024
    shared = f"{found.shared_bytes / 1024:.0f} ({limit})"
    return [found.registers, found.stack_bytes, shared, found.tensor_core]


def product_rows(chosen: list[Case]) -> Iterator[list]:
    """A table of products."""
    for case in tqdm(chosen, unit="kernel"):
        source, cut = product_source(case)
        found = resources(case.target, source)
        tile = [f"{cut.tokens} x {cut.rows}", cut.splits, cut.stages]
        weights = f"{per_weight(case, found.loop, cut):.2f}"
        yield [
            f"sm_{case.target}",
            case.form + ", SwiGLU" * case.gated,
            case.dtype,
            *tile,
            *use(case.target, found),
            weights,
        ]


def cycle_rows(config: ReportConfig) -> Iterator[list]:
    """The table of the other kernels."""
    for case in tqdm(cycle_cases(config), unit="kernel"):
        shape, tile = "", ""
        if case.kernel == "attention":
            cut = attention_source(case)[1]
            shape = f"{case.T} rows, {case.heads} / {case.kv_heads} heads of {case.E}"
            tile = f"{cut.rows} x {cut.keys}, {cut.stages} stages"
        if case.kernel == "compact":
            shape = f"{case.T} rows of {case.E}"
        found = resources(case.target, cycle_source(case))
        yield [
            f"sm_{case.target}",
            case.kernel,
            case.dtype,
            shape,
            tile,
            *use(case.target, found),
            found.loop,
        ]


def report(config: ReportConfig) -> None:
    """Print the tables."""
    print(f"# Triton {triton.__version__}, N {config.N}, K {config.K}; nothing was run")
    usage = "registers | spilled bytes | shared KiB (limit) | tensor cores"
    header = f"target | weights | x | tokens x rows | splits | stages | {usage} | per weight"
    print_table(header, product_rows(cases(config)))
    print("\nWith experts:")
    print_table(header, product_rows(expert_cases(config)))
    print_table(f"target | kernel | dtype | shape | tile | {usage} | loop", cycle_rows(config))


def main() -> None:
    config = parse(ReportConfig, "compiled_kernels.py", __doc__)
    with one_line_errors("compiled_kernels.py"):
        report(config)


if __name__ == "__main__":
    main()
