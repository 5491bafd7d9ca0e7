"""The CUDA kernels as Triton compiles them without a GPU, for the tests of tests/cuda.

Each kernel is compiled ahead of time with the plan of its launcher for the target, and read back
with the disassembler that Triton brings: registers, spills, shared memory, tensor cores. Nothing is
run, no time is measured.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import ops.cuda.attention
import ops.cuda.compact
import ops.cuda.epilogues
import ops.cuda.experts
import ops.cuda.norm
import ops.cuda.qmatmul
import ops.cuda.rotary
import ops.cuda.topk
import ops.cuda.tree
from ops.cuda.experts import plan_experts
from ops.cuda.launch import TARGETS
from ops.cuda.qmatmul import ProductPlan, plan_product

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("float", "int4-128", "int4-64", "int4-32", "int8")  # float: as x
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Case(NamedTuple):
    """One kernel to compile."""

    target: str
    form: str
    dtype: str
    M: int
    N: int = 4096
    K: int = 4096
    experts: int = 0  # with experts, M rows are pairs of a token and an expert; 0: a plain layer
    epilogue: str = "none"  # "swiglu", "add" and "rotary" have norms in front or behind


class CycleCase(NamedTuple):
    """One of the other kernels to compile (`CYCLE_SOURCES`).

    normed_rotary has norms of queries and keys. block and row are top-k; level, best_nodes and
    relate grow and choose trees.
    """

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
    """A kernel and the options of its launch."""

    kernel: triton.JITFunction
    types: dict[str, str]  # of its arguments
    constants: dict[str, object]
    warps: int
    multiples: tuple[str, ...] = ()  # arguments that are multiples of 16, besides pointers


class Resources(NamedTuple):
    """The resources of a multiprocessor that a compiled kernel needs."""

    registers: int  # per thread
    stack_bytes: int  # of local memory, per thread
    local_accesses: int  # instructions that load from or store to local memory
    shared_bytes: int  # per block
    tensor_core: str  # instruction and count, or "none"
    disorder: str  # the first access that could race with another block, or ""


def bits_and_group(form: str) -> tuple[int, int]:
    """Return the bits of a stored weight, and the number of weights that share a scale or 0."""
    if form == "float":
        return 16, 0
    if form == "int8":
        return 8, 0
    return 4, int(form.split("-")[1])


def product_source(case: Case) -> tuple[Source, ProductPlan]:
    """Return a product with the plan of its launcher for the target."""
    bits, group = bits_and_group(case.form)
    zeros = case.form.endswith("zeros")
    shape = (case.M, case.N, case.K, bits, group, DTYPES[case.dtype], TARGETS[case.target])
    if case.experts:
        plan = plan_experts(*shape, case.experts, zeros)
    else:
        plan = plan_product(*shape, case.epilogue, zeros)
    constants = {
        "BITS": bits,
        "GROUP": group,
        "SPLITS": plan.splits,
        "TOKENS": plan.tokens,
        "ROWS": plan.rows,
        "STAGES": plan.stages,
    }
    x = {"x_ptr": f"*{case.dtype}"}
    y = {"y_ptr": "*fp32" if plan.splits > 1 else f"*{case.dtype}"}
    scale = {}
    if bits < 16:
        scale["scale_ptr"] = "*fp32" if bits == 8 or zeros else "*i32"
    sizes = {"N": "i32", "K": "i32"}
    multiples = ("N", "K") if case.N % 16 == 0 else ("K",)
    if bits == 16:
        constants["scale_ptr"] = None
    weight_type = f"*{case.dtype}" if bits == 16 else "*i16"
    if not case.experts:
        weight = {"packed_ptr": weight_type}
        types = x | weight | scale | {"M": "i32"} | sizes
        kernel, more, further = _epilogue(case, y)
        return Source(kernel, types | more, constants | further, plan.warps, multiples), plan
    weight = {"weight_ptr": weight_type}
    types = x | weight | scale | {"lists_ptr": "*i32"} | y | {"P": "i32"} | sizes
    constants["EXPERTS"] = case.experts
    return Source(ops.cuda.experts.experts_kernel, types, constants, plan.warps, multiples), plan


def _epilogue(case: Case, y: dict[str, str]) -> tuple[triton.JITFunction, dict, dict]:
    """Return the kernel, the types and the constants of a product with its epilogue."""
    x = f"*{case.dtype}"
    squares = {"squares_ptr": "*fp32"}
    parts = {"PARTS": triton.next_power_of_2(case.K // 64)}
    if case.epilogue == "add":
        types = dict.fromkeys(("stream_ptr", "weight_ptr", "sum_ptr", "y_ptr"), x) | squares
        types |= {"parts_ptr": "*fp32", "done_ptr": "*i32", "stride": "i32", "eps": "fp32"}
        return ops.cuda.epilogues.add_product_kernel, types, {}
    if case.epilogue == "rotary":  # of heads of 128, normed: the most work
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr"), x) | squares
        types |= {"parts_ptr": "*fp32", "done_ptr": "*i32", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        types |= {"slots_ptr": "*i64", "eps": "fp32"} | dict.fromkeys(("F", "T", "S"), "i32")
        heads = ops.cuda.rotary.constants_of(case.N // 128 - 16, 8, 128)
        return ops.cuda.epilogues.rotary_product_kernel, types, parts | heads
    gated = case.epilogue == "swiglu"
    more = squares if gated else {}
    absent = parts if gated else {"squares_ptr": None, "PARTS": 0}
    types = y | {"F": "i32"} | more
    return ops.cuda.qmatmul.matmul_kernel, types, {"GATED": gated} | absent


def attention_source(case: CycleCase) -> tuple[Source, ops.cuda.attention.AttentionPlan]:
    """Return attention over splits of a cache, with the plan of its launcher for the target."""
    rows = case.T * case.heads // case.kv_heads
    split = case.T <= ops.cuda.attention.SPLIT_TOKENS
    sizes = (rows, case.E, DTYPES[case.dtype], TARGETS[case.target], split)
    plan = ops.cuda.attention.plan_attention(*sizes)
    x = f"*{case.dtype}"
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), x)
    types |= {"start_ptr": "*i64", "mask_ptr": "*i1", "y_ptr": x}
    if split:
        types |= {"parts_ptr": "*fp32", "stats_ptr": "*fp32", "done_ptr": "*i32"}
    types |= dict.fromkeys(("T", "S", "W", "mask_b", "mask_t", "mask_w"), "i32")
    chunk = ops.cuda.attention.CHUNK if split else None
    constants = ops.cuda.attention.constants_of(case.E, case.T, chunk) | {
        "H": case.heads,
        "KV_HEADS": case.kv_heads,
        "ROWS": plan.rows,
        "KEYS": plan.keys,
        "STAGES": plan.stages,
    }
    kernel = ops.cuda.attention.attention_kernel if split else ops.cuda.attention.prompt_kernel
    return Source(kernel, types, constants, plan.warps), plan


def _add_norm(case: CycleCase) -> Source:
    width = case.heads * case.E
    x = f"*{case.dtype}"
    types = dict.fromkeys(("x_ptr", "delta_ptr", "weight_ptr", "sum_ptr", "y_ptr"), x)
    types |= {"F": "i32", "eps": "fp32"}
    constants = {"WIDTH": triton.next_power_of_2(width)}
    kernel = ops.cuda.norm.add_norm_kernel
    if case.kernel == "add_unscaled":
        types["squares_ptr"] = "*fp32"
        kernel = ops.cuda.epilogues.add_unscaled_kernel
    return Source(kernel, types, constants, ops.cuda.norm.warps_of(width), ("F",))


def _rotary(case: CycleCase) -> Source:
    x = f"*{case.dtype}"
    types = {"qkv_ptr": x, "cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64"}
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), x)
    types |= {"eps": "fp32", "T": "i32", "S": "i32"}
    constants = ops.cuda.rotary.constants_of(case.heads, case.kv_heads, case.E)
    constants |= {"HEADS": ops.cuda.rotary.HEADS}
    weights = ("q_norm_ptr", "k_norm_ptr")
    if case.kernel == "normed_rotary":
        types |= dict.fromkeys(weights, x)
    else:
        constants |= dict.fromkeys(weights)
    return Source(ops.cuda.rotary.rotary_cache_kernel, types, constants, 4)


def _compact(case: CycleCase) -> Source:
    plan = ops.cuda.compact.plan_compact(case.T, case.E * DTYPES[case.dtype].itemsize)
    types = dict.fromkeys(("addresses_ptr", "start_ptr", "path_ptr"), "*i64")
    types |= {"S": "i32", "steps": "i32"}
    constants = {"WORDS": plan.words, "WIDTH": plan.width, "STEPS": plan.steps}
    return Source(ops.cuda.compact.compact_kernel, types, constants, plan.warps)


def _best_nodes(case: CycleCase) -> Source:  # of a pool of case.V candidates
    types = {"values_ptr": "*fp32", "chosen_ptr": "*i64", "P": "i32", "count": "i32"}
    constants = {"POOL": triton.next_power_of_2(case.V)}
    return Source(ops.cuda.tree.best_nodes_kernel, types, constants, 4)


def _relate(case: CycleCase) -> Source:  # of case.T nodes
    names = ("chosen_ptr", "above_ptr", "number_ptr", "parents_ptr", "depths_ptr")
    types = dict.fromkeys(names, "*i64") | {"mask_ptr": "*i1", "P": "i32", "N": "i32"}
    constants = ops.cuda.tree.tiles_of_tree(case.V, case.T, 6)
    return Source(ops.cuda.tree.relate_kernel, types, constants, 8)


def _lists(case: CycleCase) -> Source:
    types = {"expert_ptr": "*i64", "lists_ptr": "*i32", "P": "i32"}
    constants = {"EXPERTS": case.experts, "BLOCK": ops.cuda.experts.LISTED}
    return Source(ops.cuda.experts.lists_kernel, types, constants, 4)


def _block(case: CycleCase) -> Source:
    types = {"scores_ptr": "*fp32", "keys_ptr": "*i64", "stats_ptr": "*fp32"}
    types |= {"V": "i32", "k": "i32", "sharpness": "fp32"}
    constants = {"BLOCK": ops.cuda.topk.BLOCK}
    return Source(ops.cuda.topk.block_kernel, types, constants, 4)


def _row(case: CycleCase) -> Source:
    types = {"keys_ptr": "*i64", "stats_ptr": "*fp32", "values_ptr": "*fp32", "index_ptr": "*i64"}
    types |= {"total_ptr": "*fp32", "blocks": "i32", "k": "i32"}
    blocks = triton.cdiv(case.V, ops.cuda.topk.BLOCK)
    constants = {"BLOCKS": triton.next_power_of_2(blocks)}
    return Source(ops.cuda.topk.row_kernel, types, constants, 1)


def _level(case: CycleCase) -> Source:  # the best of a dynamic tree of 6 levels
    types = {"keys_ptr": "*i64", "stats_ptr": "*fp32", "above_ptr": "*fp32", "seen_ptr": "*i1"}
    types |= {"tokens_ptr": "*i64", "values_ptr": "*fp32", "ranked_ptr": "*i64"}
    types |= {"order_ptr": "*i64", "best_ptr": "*fp32", "sees_ptr": "*i1"}
    types |= dict.fromkeys(("R", "blocks", "k", "count", "slot", "W"), "i32")
    blocks = triton.cdiv(case.V, ops.cuda.topk.BLOCK)
    constants = {"ids_ptr": None, "places_ptr": None, "BY_VALUE": True}
    constants |= ops.cuda.topk.tiles_of_level(case.k, blocks, case.k, case.k, 5 * case.k)
    return Source(ops.cuda.topk.level_kernel, types, constants, 4)


CYCLE_SOURCES: dict[str, Callable[[CycleCase], Source]] = {
    "attention": lambda case: attention_source(case)[0],
    "add_norm": _add_norm,
    "add_unscaled": _add_norm,
    "rotary": _rotary,
    "normed_rotary": _rotary,
    "compact": _compact,
    "lists": _lists,
    "block": _block,
    "row": _row,
    "level": _level,
    "best_nodes": _best_nodes,
    "relate": _relate,
}


def cycle_source(case: CycleCase) -> Source:
    """Return a kernel of a decode cycle, with the plan of its launcher for the target."""
    return CYCLE_SOURCES[case.kernel](case)


def compile_for(target: str, source: Source) -> CompiledKernel:
    """Compile a kernel ahead of time."""
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
    """Disassemble a kernel. Returns: its resource usage and machine code, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        texts = []
        for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c")):
            command = [TOOLS / tool, flag, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            texts.append(done.stdout)
    usage, code = texts
    return usage, code


def disorder_of(ptx: str) -> str:
    """Return the first instruction of a kernel that could race, or "".

    Of one with a counter of blocks: one thread must add to it behind a barrier, with release and acquire, and
    others read what other blocks wrote behind a further barrier and past the L1 cache.
    """
    access = r"(?:ld|st|atom|red)\.global\S*|cp\.async\.c[ag]\S*|cp\.async\.bulk\S*"
    pattern = rf"{access}|bar\.sync|^\$L__BB\w+:|\bbra\b"
    found = re.findall(pattern, ptx, re.M)
    counted = [i for i, name in enumerate(found) if name.startswith("atom.global")]
    for at in counted:
        if ".exch" in found[at]:
            continue
        if ".gpu.acq_rel.add" not in found[at]:
            return found[at]
        between = [name for name in found[:at] if name[0] != "$" and name != "bra"]
        if between[-1] != "bar.sync":
            return f"no barrier before {found[at]}"
        behind = found[at + 1 :]
        if behind[0] != "bar.sync":
            return f"no barrier behind {found[at]}"
        if not any(name.startswith("ld.global.cg") for name in behind):
            return f"nothing is read past the L1 cache behind {found[at]}"
    return ""


def resources(target: str, source: Source) -> Resources:
    """Compile a kernel and read its resources back."""
    kernel = compile_for(target, source)
    usage, code = disassemble(kernel)

    def used(name: str) -> int:
        return int(re.search(rf"{name}:(\d+)", usage)[1])

    def count(name: str) -> int:
        return len(re.findall(rf"\b{name}\b", code))

    tensor_core = [f"{name} {count(name)}" for name in ("UTCHMMA", "HGMMA", "HMMA") if count(name)]
    return Resources(
        registers=used("REG"),
        stack_bytes=used("STACK"),
        local_accesses=count("LDL") + count("STL"),
        shared_bytes=kernel.metadata.shared,
        tensor_core=" ".join(tensor_core) or "none",
        disorder=disorder_of(kernel.asm["ptx"]),
    )


def fault_of(case: Case, found: Resources) -> str:
    """Return what is wrong with a compiled product: it spills, does not fit, could race, or does
    not multiply on tensor cores in 16 bits; "" for nothing.
    """
    if found.stack_bytes or found.local_accesses:
        return f"spills {found.stack_bytes} bytes, {found.local_accesses} accesses"
    if found.shared_bytes > TARGETS[case.target].shared_bytes:
        return f"takes {found.shared_bytes} bytes of shared memory"
    instruction = {"90": "HGMMA", "100": "UTCHMMA"}.get(case.target, "HMMA")
    if case.dtype == "fp32":
        instruction = "none"
    if found.tensor_core.split()[0] != instruction:
        return f"multiplies with {found.tensor_core}, not {instruction}"
    return found.disorder


def cases(N: int) -> list[Case]:
    """List the products of every target, format, type and number of rows. N: outputs"""
    epilogues = ("none", "swiglu", "add", "rotary") if N % 128 == 0 else ("none", "add")
    return [
        Case(target, form, dtype, M, N, epilogue=epilogue)
        for dtype, form, target, M, epilogue in product(
            DTYPES, FORMATS, TARGETS, (16, 32, 64), epilogues
        )
    ]


def expert_cases() -> list[Case]:
    """List every tile of the products with experts: of a token or few, of a tree, of a prompt."""
    found = []
    for form, target, P in product(FORMATS, TARGETS, (2, 120, 512)):  # Mixtral-8x7B's w2
        found.append(Case(target, form, "bf16", P, 4096, 14336, 8))
    for form, target, P in product(FORMATS, TARGETS, (480, 1024)):  # Qwen3-30B-A3B's w13
        found.append(Case(target, form, "bf16", P, 1536, 2048, 128))
    return found


def cycle_cases() -> list[CycleCase]:
    """List the other kernels at the shapes of 7B models and of a small one."""
    shapes = [(128, 32, 32), (128, 32, 8), (64, 32, 4)]  # E, heads, key heads
    found = []
    for target in TARGETS:
        for dtype in DTYPES:
            for shape, T in product(shapes, (1, 60, 256)):
                found.append(CycleCase(target, "attention", dtype, *shape, T))
            found.append(CycleCase(target, "add_norm", dtype))
            found.append(CycleCase(target, "add_unscaled", dtype))
            found.append(CycleCase(target, "rotary", dtype))
            found.append(CycleCase(target, "normed_rotary", dtype, kv_heads=8))
            for E, T in product((128, 64), (7, 64)):
                found.append(CycleCase(target, "compact", dtype, E, T=T))
        for kernel in ("block", "row", "level", "lists"):
            found.append(CycleCase(target, kernel, "fp32"))
        for kernel in ("best_nodes", "relate"):
            found.append(CycleCase(target, kernel, "fp32", V=510))
    return found
