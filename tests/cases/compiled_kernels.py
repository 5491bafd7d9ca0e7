"""The CUDA kernels as Triton compiles them without a GPU, for the tests of tests/cuda.

Each kernel is compiled ahead of time with the plan of its launcher for the target, and read back
with the disassembler that Triton brings: spills, shared memory, tensor cores. Nothing is
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

import backends.triton.attention
import backends.triton.compact
import backends.triton.epilogues
import backends.triton.experts
import backends.triton.ngram
import backends.triton.noise
import backends.triton.norm
import backends.triton.prompt_attention
import backends.triton.qmatmul
import backends.triton.rotary
import backends.triton.topk
import backends.triton.tree
from backends.triton.experts import plan_experts
from backends.triton.launch import SPLIT_TOKENS, TARGETS
from backends.triton.layout import BLOCK_FORMS, Form
from backends.triton.prompt_attention import plan_prompt
from backends.triton.qmatmul import ProductPlan, plan_product

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("float", "int4-128", "int4-64", "int4-32", "int8", *BLOCK_FORMS)  # float: as x
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

    sliding_attention has windows, attention_with_sinks sinks. normed_rotary has norms of queries and keys. block and row are top-k;
    level, best_nodes and link_nodes grow and choose trees.
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
    options: dict[str, object] = {}  # others of the launch


class Resources(NamedTuple):
    """The resources of a multiprocessor that a compiled kernel needs."""

    stack_bytes: int  # of local memory, per thread
    local_accesses: int  # instructions that load from or store to local memory
    shared_bytes: int  # per block
    tensor_core: str  # instruction and count, or "none"
    disorder: str  # the first access that could race with another block, or ""


# types of the kernels' arguments; other pointers are to the type of x, other numbers are i32
TYPES = {
    "*i64": "start first slots addresses path chosen above number parents depths expert keys index tokens ranked order",
    "*i32": "done lists paths",
    "*i16": "packed",
    "*i1": "mask seen sees",
    "*fp32": "squares parts stats cos sin values scores total best",
}  # fmt: skip
TYPE_OF = {f"{name}_ptr": kind for kind, names in TYPES.items() for name in names.split()}
TYPE_OF |= {"eps": "fp32", "sharpness": "fp32"}


def source(
    kernel: triton.JITFunction,
    dtype: str,
    constants: dict[str, object],
    warps: int = 4,
    multiples: tuple[str, ...] = (),
    **types: str,
) -> Source:
    """Return a kernel with the types of its arguments. types: where they are others"""
    names = [name for name in kernel.arg_names if name not in constants]
    usual = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in names}
    known = {name: kind for name, kind in (TYPE_OF | types).items() if name in usual}
    return Source(kernel, usual | known, constants, warps, multiples)


def form_named(name: str) -> Form:
    """Return a form by its name in `FORMATS`, or with zero points."""
    if name in BLOCK_FORMS:
        return BLOCK_FORMS[name]
    if name == "float":
        return Form(16)
    if name == "int8":
        return Form(8)
    return Form(4, int(name.split("-")[1]), "zeros" if name.endswith("zeros") else "bf16")


def product_source(case: Case) -> tuple[Source, ProductPlan]:
    """Return a product with the plan of its launcher for the target."""
    bits, group, scales = form_named(case.form)
    shape = (case.M, case.N, case.K, bits, group, DTYPES[case.dtype], TARGETS[case.target])
    if case.experts:
        plan = plan_experts(*shape, case.experts, scales)
    else:
        plan = plan_product(*shape, case.epilogue, scales)
    constants = {
        "BITS": bits,
        "GROUP": group,
        "SCALES": scales,
        "SPLITS": plan.splits,
        "TOKENS": plan.tokens,
        "ROWS": plan.rows,
        "STAGES": plan.stages,
    }
    types = {"packed_ptr": f"*{case.dtype}" if bits == 16 else "*i16"}
    types["weight_ptr"] = types["packed_ptr"] if case.experts else f"*{case.dtype}"
    types["scale_ptr"] = {"": "*fp32", "zeros": "*fp32", "bf16": "*i32"}.get(scales, "*fp16")
    if plan.splits > 1 and case.epilogue in ("none", "swiglu"):
        types["y_ptr"] = "*fp32"
    if bits == 16:
        constants["scale_ptr"] = None
    kernel, more = _epilogue(case)
    multiples = ("N", "K") if case.N % 16 == 0 else ("K",)
    return source(kernel, case.dtype, constants | more, plan.warps, multiples, **types), plan


def _epilogue(case: Case) -> tuple[triton.JITFunction, dict[str, object]]:
    """Return the kernel of a product with its epilogue, and its constants."""
    parts = {"PARTS": triton.next_power_of_2(case.K // 64)}
    if case.experts:
        return backends.triton.experts.experts_kernel, {"EXPERTS": case.experts}
    if case.epilogue == "add":
        return backends.triton.epilogues.add_product_kernel, {}
    if case.epilogue == "rotary":  # of heads of 128, normed: the most work
        heads = backends.triton.rotary.constants_of(case.N // 128 - 16, 8, 128)
        return backends.triton.epilogues.rotary_product_kernel, parts | heads
    gated = case.epilogue == "swiglu"
    absent = parts if gated else {"squares_ptr": None, "PARTS": 0}
    return backends.triton.qmatmul.matmul_kernel, {"GATED": gated} | absent


def _attention(case: CycleCase) -> Source:
    """Return attention of a tree or a token, or of a prompt, with the plan of its launcher."""
    constants: dict[str, object] = {"H": case.heads, "KV_HEADS": case.kv_heads}
    if case.kernel != "sliding_attention":
        constants["first_ptr"] = None
    if case.kernel != "attention_with_sinks":
        constants["sinks_ptr"] = None
    if case.T > SPLIT_TOKENS:
        plan = plan_prompt(case.E, DTYPES[case.dtype], TARGETS[case.target])
        tile = {"ROWS": plan.rows, "KEYS": plan.keys, "STAGES": plan.stages}
        constants |= backends.triton.prompt_attention.constants_of(case.E) | tile
        return source(
            backends.triton.prompt_attention.prompt_kernel, case.dtype, constants, plan.warps
        )
    if case.T == 1:
        constants["paths_ptr"] = None
    plan = backends.triton.attention.plan_attention(case.E, DTYPES[case.dtype])
    others, options = backends.triton.attention.launch_of(plan, case.E)
    found = source(backends.triton.attention.attention_kernel, case.dtype, constants | others)
    return found._replace(options=options)


def _paths(case: CycleCase) -> Source:
    constants = {"start_ptr": None, "first_ptr": None, "WINDOW": SPLIT_TOKENS}
    return source(backends.triton.attention.paths_kernel, case.dtype, constants, 1)


def _add_norm(case: CycleCase) -> Source:
    width = case.heads * case.E
    kernel = backends.triton.norm.add_norm_kernel
    if case.kernel == "add_unscaled":
        kernel = backends.triton.epilogues.add_unscaled_kernel
    constants = {"WIDTH": triton.next_power_of_2(width)}
    return source(kernel, case.dtype, constants, backends.triton.norm.warps_of(width), ("F",))


def _rotary(case: CycleCase) -> Source:
    constants = backends.triton.rotary.constants_of(case.heads, case.kv_heads, case.E)
    constants |= {"HEADS": backends.triton.rotary.HEADS}
    if case.kernel == "rotary":
        constants |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr"))
    return source(backends.triton.rotary.rotary_cache_kernel, case.dtype, constants)


def _compact(case: CycleCase) -> Source:
    plan = backends.triton.compact.plan_compact(case.T, case.E * DTYPES[case.dtype].itemsize)
    constants = {"WORDS": plan.words, "WIDTH": plan.width, "STEPS": plan.steps}
    return source(backends.triton.compact.compact_kernel, case.dtype, constants, plan.warps)


def _best_nodes(case: CycleCase) -> Source:  # of a pool of case.V candidates
    constants = {"POOL": triton.next_power_of_2(case.V)}
    return source(backends.triton.tree.best_nodes_kernel, case.dtype, constants)


def _link_nodes(case: CycleCase) -> Source:  # of case.T nodes
    constants = backends.triton.tree.tiles_of_tree(case.V, case.T, 6)
    return source(backends.triton.tree.link_nodes_kernel, case.dtype, constants, 8)


def _match(case: CycleCase) -> Source:
    constants = backends.triton.ngram.constants_of(10, 4, 1, 6)
    types = dict.fromkeys(("text_ptr", "pos_ptr", "kept_ptr", "chains_ptr", "lengths_ptr"), "*i64")
    kernel = backends.triton.ngram.match_kernel
    return source(
        kernel, case.dtype, constants, backends.triton.ngram.WARPS, **types | {"keys_ptr": "*i32"}
    )


def _lists(case: CycleCase) -> Source:
    constants = {"EXPERTS": case.experts, "BLOCK": backends.triton.experts.LISTED}
    return source(backends.triton.experts.lists_kernel, case.dtype, constants)


def _block(case: CycleCase) -> Source:
    return source(
        backends.triton.topk.block_kernel, case.dtype, {"BLOCK": backends.triton.topk.BLOCK}
    )


def _row(case: CycleCase) -> Source:
    blocks = triton.cdiv(case.V, backends.triton.topk.BLOCK)
    constants = {"BLOCKS": triton.next_power_of_2(blocks)}
    return source(backends.triton.topk.row_kernel, case.dtype, constants, 1)


def _level(case: CycleCase) -> Source:  # the best of a dynamic tree of 6 levels
    blocks = triton.cdiv(case.V, backends.triton.topk.BLOCK)
    constants = {"ids_ptr": None, "places_ptr": None}
    constants |= backends.triton.topk.tiles_of_level(case.k, blocks, case.k, case.k, 5 * case.k)
    return source(backends.triton.topk.level_kernel, case.dtype, constants, above_ptr="*fp32")


def _noise(case: CycleCase) -> Source:
    words = dict.fromkeys(("seed_ptr", "prompt_ptr", "sample_ptr", "first_ptr"), "*i64")
    constants = {"DOMAIN": 0, "WORDS": backends.triton.noise.WORDS}
    types = words | {"greedy_ptr": "*i1", "noise_ptr": "*fp32"}
    return source(backends.triton.noise.gumbel_kernel, case.dtype, constants, **types)


CYCLE_SOURCES: dict[str, Callable[[CycleCase], Source]] = {
    "attention": _attention,
    "sliding_attention": _attention,
    "attention_with_sinks": _attention,
    "paths": _paths,
    "add_norm": _add_norm,
    "add_unscaled": _add_norm,
    "rotary": _rotary,
    "normed_rotary": _rotary,
    "compact": _compact,
    "lists": _lists,
    "noise": _noise,
    "block": _block,
    "row": _row,
    "level": _level,
    "best_nodes": _best_nodes,
    "link_nodes": _link_nodes,
    "match": _match,
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
    options = {"num_warps": source.warps} | source.options
    return triton.compile(ast, target=GPUTarget("cuda", int(target), 32), options=options)


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
    """List the products of every target, format, type and number of rows. N: outputs

    In fp32, which a GGUF file's blocks never meet on a device, their minima spill.
    """
    epilogues = ("none", "swiglu", "add", "rotary") if N % 128 == 0 else ("none", "add")
    return [
        Case(target, form, dtype, M, N, epilogue=epilogue)
        for dtype, form, target, M, epilogue in product(
            DTYPES, FORMATS, TARGETS, (16, 32, 64), epilogues
        )
        if dtype != "fp32" or form not in BLOCK_FORMS
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
        for kernel in ("block", "row", "level", "lists", "match"):
            found.append(CycleCase(target, kernel, "fp32"))
        for kernel in ("best_nodes", "link_nodes"):
            found.append(CycleCase(target, kernel, "fp32", V=510))
    return found
