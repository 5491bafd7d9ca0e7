"""The CUDA kernels as Triton compiles them without a GPU, for the tests of tests/cuda.

1. An operator runs on tensors without data; in place of a launch its kernel and arguments are noted.
2. The kernel is compiled ahead of time for the target, and read back with the disassembler that Triton
   brings: spills, shared memory, tensor cores.
Nothing is run, no time is measured. A new kernel is a row of `CALLS`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from backends.triton.launch import TARGETS
from backends.triton.layout import BLOCK_FORMS, Form, columns_of, halves_of, inputs_of_block
from backends.triton.operators import ON_CUDA

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHORT = {dtype: name for name, dtype in DTYPES.items()}
SHORT |= {torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.bool: "i1"}
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
    """One of the other kernels to compile (`CALLS`).

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


class Launch(NamedTuple):
    """A kernel as it would be launched."""

    kernel: triton.JITFunction
    types: dict[str, str]  # of its arguments
    constants: dict[str, object]
    aligned: list[str]  # arguments that are pointers to, or multiples of, 16
    options: dict[str, object]


class Resources(NamedTuple):
    """The resources of a multiprocessor that a compiled kernel needs."""

    stack_bytes: int  # of local memory, per thread
    local_accesses: int  # instructions that load from or store to local memory
    shared_bytes: int  # per block
    tensor_core: str  # instruction and count, or "none"
    disorder: str  # the first access that could race with another block, or ""


def form_named(name: str) -> Form:
    """Return a form by its name in `FORMATS`, or with zero points."""
    if name in BLOCK_FORMS:
        return BLOCK_FORMS[name]
    if name == "float":
        return Form(16)
    if name == "int8":
        return Form(8)
    return Form(4, int(name.split("-")[1]), "zeros" if name.endswith("zeros") else "bf16")


# --------------------------------------------------------------------------------- operands without data


def empty(*shape: int, dtype: torch.dtype | str = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=DTYPES.get(dtype, dtype), device="meta")


def whole(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def seen(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.bool)


def weight_of(case: Case) -> tuple[Tensor, Tensor | None]:
    """Return a weight, or a stack of them, and its scales."""
    form = form_named(case.form)
    stack = (case.experts,) if case.experts else ()
    if form.bits == 16:
        return empty(*stack, case.N, case.K, dtype=case.dtype), None
    rows = (*stack, triton.cdiv(case.K, inputs_of_block(form.bits)), case.N)
    packed = empty(*rows, columns_of(form.bits), dtype=torch.int16)
    if case.form == "int8":
        return packed, empty(*stack, case.N)
    if case.form in BLOCK_FORMS:
        return packed, empty(*rows, halves_of(form), dtype="fp16")
    if form.scales == "zeros":
        return packed, empty(*rows, 256 // form.group)
    return packed, empty(*rows, 128 // form.group, dtype=torch.int32)


def product_call(case: Case) -> tuple[str, tuple]:
    """Return the operator of a product and its operands."""
    M, N, K, dtype = case.M, case.N, case.K, case.dtype
    x, weight = empty(M, K, dtype=dtype), weight_of(case)
    squares = empty(triton.cdiv(K, 64), M)
    if case.epilogue == "swiglu":
        return "gated_product", (x, squares, *weight)
    if case.epilogue == "add":
        return "add_product", (x, *weight, empty(M, N, dtype=dtype), empty(N, dtype=dtype), 1e-5)
    if case.epilogue == "rotary":  # of heads of 128, normed: the most work
        rope = empty(2, 1, M, 1, 128)
        norms = *empty(2, 128, dtype=dtype), 1e-5
        cache = empty(2, 1, 8, 4096, 128, dtype=dtype)
        return "rotary_product", (x, squares, *weight, *rope, *cache, whole(1, M), *norms)
    lists = empty(case.experts + 1 + M, dtype=torch.int32) if case.experts else None
    return "w4a16", (x, *weight, lists, "none")


def attention_call(c: CycleCase) -> tuple[str, tuple]:
    q = empty(1, c.T, c.heads, c.E, dtype=c.dtype)
    cache = empty(2, 1, c.kv_heads, 4096, c.E, dtype=c.dtype)
    first = whole(1, c.T) if c.kernel == "sliding_attention" else None
    sinks = empty(c.heads, dtype=c.dtype) if c.kernel == "attention_with_sinks" else None
    return "tree_attention", (q, *cache, whole(1), seen(1, c.T, c.T), first, 0.0, None, sinks)


def norm_call(c: CycleCase) -> tuple[str, tuple]:
    width = c.heads * c.E
    return c.kernel, (*empty(2, 1, width, dtype=c.dtype), empty(width, dtype=c.dtype), 1e-5)


def rotary_call(c: CycleCase) -> tuple[str, tuple]:
    qkv = empty(1, c.T, c.heads + 2 * c.kv_heads, c.E, dtype=c.dtype)
    cache = empty(2, 1, c.kv_heads, 4096, c.E, dtype=c.dtype)
    norms = (None, None, 0.0) if c.kernel == "rotary" else (*empty(2, c.E, dtype=c.dtype), 1e-5)
    return "rotary_cache", (qkv, *empty(2, 1, c.T, 1, c.E), *cache, whole(1, c.T), *norms)


def level_call(c: CycleCase) -> tuple[str, tuple]:  # the best of a dynamic tree of 6 levels
    scores = empty(1, c.k, c.V, dtype=c.dtype)
    operands = (scores, 1.0, None, empty(1, c.k), seen(1, c.k, 5 * c.k), None, c.k, c.k, 0)
    return "grow_level", operands


CALLS = {  # a kernel -> its operator and operands
    **dict.fromkeys(("attention", "sliding_attention", "attention_with_sinks"), attention_call),
    **dict.fromkeys(("add_norm", "add_unscaled"), norm_call),
    **dict.fromkeys(("rotary", "normed_rotary"), rotary_call),
    "paths": lambda c: ("path_table", (seen(1, c.T, c.T),)),
    "compact": lambda c: ("compact", ([empty(1, c.kv_heads, 4096, c.E, dtype=c.dtype)], whole(1), whole(1), whole(1, c.T))),
    "lists": lambda c: ("expert_lists", (whole(480), c.experts)),
    "noise": lambda c: ("gumbel_noise", (whole(1, 2), whole(1), whole(1), seen(1), whole(1), 7, c.V, 0)),
    **dict.fromkeys(("block", "row"), lambda c: ("topk_logsumexp", (empty(10, c.V, dtype=c.dtype), c.k))),
    "level": level_call,
    "best_nodes": lambda c: ("best_nodes", (empty(1, c.V), c.T - 1)),  # of a pool of V candidates
    "link_nodes": lambda c: ("link_nodes", (whole(1, c.T - 1), whole(1, c.V), 6)),
    "match": lambda c: ("longest_matches", (whole(1, 4096), whole(1), whole(4096), 10, 4, 1, 6)),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ launches


def launch_of(kernel: triton.JITFunction, values: dict[str, Any]) -> Launch:
    """Return a launch by its arguments and options, specialized as Triton does it."""
    types, constants, aligned = {}, {}, []
    for param in kernel.params:
        value = values.pop(param.name)
        constant = param.is_constexpr or value is None
        if constant or (type(value) is int and value == 1 and not param.do_not_specialize):
            constants[param.name] = value
        elif isinstance(value, Tensor):
            types[param.name] = f"*{SHORT[value.dtype]}"
            aligned.append(param.name)
        else:
            types[param.name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0 and not param.do_not_specialize:
                aligned.append(param.name)
    return Launch(kernel, types, constants, aligned, values)


def launches(target: str, operator: str, operands: tuple) -> list[Launch]:
    """Return what an operator would launch on a target."""
    found: list[Launch] = []

    def run(kernel: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.append(launch_of(kernel, dict(zip(kernel.arg_names, args)) | named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", run)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        for module in ("qmatmul", "epilogues"):
            patch.setattr(f"backends.triton.{module}.device_of", lambda _: TARGETS[target])
        for module in ("attention", "epilogues"):
            patch.setattr(f"backends.triton.{module}.counters", lambda _: whole(2**16).int())
        ON_CUDA[operator](*operands)
    return found


def product_launches(case: Case) -> list[Launch]:
    """Return the launches of a product; the first is the product itself."""
    return launches(case.target, *product_call(case))


def launch(case: Case | CycleCase) -> Launch:
    """Return the launch of a case. What it needs stands before it, and sums of splits behind it."""
    if isinstance(case, Case):
        return product_launches(case)[0]
    found = launches(case.target, *CALLS[case.kernel](case))
    return found[0 if case.kernel == "block" else -1]


# ----------------------------------------------------------------------------------------- compiling


def compile_for(target: str, launch: Launch) -> CompiledKernel:
    """Compile a kernel ahead of time."""
    names = launch.kernel.arg_names
    ast = ASTSource(
        fn=launch.kernel,
        signature=launch.types | dict.fromkeys(launch.constants, "constexpr"),
        constexprs=launch.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    return triton.compile(ast, target=GPUTarget("cuda", int(target), 32), options=launch.options)


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


def resources(target: str, launch: Launch) -> Resources:
    """Compile a kernel and read its resources back."""
    kernel = compile_for(target, launch)
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
