"""The Triton kernels without a GPU: compiled ahead of time, and piece by piece.

test_interpreter.py runs them in the interpreter. Checks that need a GPU (bits of 16-bit products, graphs) are in test_gpu.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")

import backends.triton.layout  # noqa: E402
from backends.triton.launch import TARGETS  # noqa: E402
from backends.triton.layout import BLOCK_FORMS  # noqa: E402
from backends.triton.qmatmul import (  # noqa: E402
    MAX_SPLITS,
    choose_splits,
    minus_zero,
    plan_product,
    sum_kernel,
    unpack_asm,
)
from compiled_kernels import (  # noqa: E402
    Case,
    cases,
    compile_for,
    disorder_of,
    form_named,
    product_source,
    resources,
    source,
)
from helpers import check_product_fits, slow  # noqa: E402

# ----------------------------------------------------------------------------------------- compiled


def test_no_kernel_returns_none():
    """Triton 3.6, which torch 2.11 brings, cannot compile that. Newer ones can."""
    for file in Path(backends.triton.layout.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in str(
                [ast.unparse(decorator) for decorator in function.decorator_list]
            ):
                returned = [x for x in ast.walk(function) if isinstance(x, ast.Return) and x.value]
                assert "None" not in map(ast.unparse, (x.value for x in returned)), function.name


# test_compiled_all takes every combination
@pytest.mark.parametrize("case", [
    Case("80", "int8", "bf16", 32),
    Case("90", "int4-128-zeros", "bf16", 16, epilogue="swiglu"),
    Case("100", "int4-32", "bf16", 64),  # the one that was a trap with 64 tokens to a block
    Case("100", "int4-128", "fp32", 16),  # the one that Triton rounded to TF32
    Case("80", "Q4_K", "bf16", 64, epilogue="rotary"),  # spilled with 32 tokens to a block
    *slow([  # of formats that test_compiled_all leaves out
        Case("86", "int4-32-zeros", "bf16", 16, epilogue="add"),  # spilled a word
        Case("80", "int4-128-zeros", "bf16", 64),  # the case with most shared memory
        Case("90", "int4-32-zeros", "fp16", 64),
    ]),
])  # fmt: skip
def test_compiled(_fresh_cache, case):
    check_product_fits(case)


def test_races_are_noticed(_fresh_cache):
    """In a product that hands parts from block to block."""
    added, _ = product_source(Case("90", "int4-128", "bf16", 16, epilogue="add"))
    ptx = compile_for("90", added).asm["ptx"]
    assert disorder_of(ptx) == ""
    head, atom, tail = ptx.partition("atom.global")
    bare = "".join(head.rsplit("bar.sync", 1))  # without the last barrier in front
    for text, found in {
        ptx.replace("acq_rel", "relaxed"): "atom.global.gpu.relaxed.add",
        bare + atom + tail: "no barrier before atom",
        head + atom + tail.replace("bar.sync", "nop", 1): "no barrier behind atom",
        ptx.replace("ld.global.cg", "ld.global"): "nothing is read past the L1 cache",
    }.items():
        assert disorder_of(text).startswith(found), found


@pytest.mark.slow
@pytest.mark.parametrize("N", [4096, 4095])
def test_compiled_all(_fresh_cache, N):
    for case in cases(N):
        check_product_fits(case)


@pytest.mark.parametrize("target", ["90", *slow(["80", "86", "89"])])
def test_the_sum_of_splits_compiles(_fresh_cache, target):
    constants = {"SPLITS": MAX_SPLITS, "BLOCK": 512}
    found = resources(target, source(sum_kernel, "bf16", constants))
    assert (found.stack_bytes, found.local_accesses) == (0, 0), found


# --------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_plan_of_a_7b_model(bits):
    """On 132 processors: w-qkv, w-o, w2 and the LM head. As many splits as the bandwidth takes, and no more."""
    shapes = [(12288, 4096, False), (4096, 4096, False), (4096, 11008, False), (32000, 4096, True)]
    got = tuple(choose_splits(N, K * bits // 1024, 132, summed) for N, K, summed in shapes)
    assert got == (1, 4, 4, 1)


def test_every_split_has_a_block():
    for blocks in (1, 2, 3, 5, 16, 43, 400):
        for N in (1, 64, 1000, 4096, 128256):
            for processors in (1, 82, 132):
                splits = choose_splits(N, blocks, processors)
                edges = [i * blocks // splits for i in range(splits + 1)]  # as the kernel cuts
                assert splits <= MAX_SPLITS and all(a < b for a, b in zip(edges, edges[1:]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["float", "int8", "int4-128", "int4-64", "int4-32", *BLOCK_FORMS])
def test_splits_do_not_depend_on_the_number_of_rows(target, form):
    bits, group, scales = form_named(form)
    for dtype in (torch.bfloat16, torch.float32):
        cuts = [
            plan_product(M, 4096, 11008, bits, group, dtype, TARGETS[target], "rotary", scales)
            for M in (1, 16, 17, 32, 33, 64, 65, 256)
        ]
        assert len({cut.splits for cut in cuts}) == 1
        assert all(cut.stages >= 2 and cut.tokens in (16, 32, 64) for cut in cuts)


# ----------------------------------------------------------------------------------------- assembly


def emulate(code: str, words: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """Run the few PTX instructions that unpack_asm uses. words, more: [n] int64, 32 bits each, $1 ...; Returns: $0."""
    registers = {f"${number}": operand for number, operand in enumerate((words, *more), 1)}

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.full_like(words, int(name, 0))

    def halves(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # [n] int64 -> [2, n] dtype
        return torch.stack((bits & 0xFFFF, bits >> 16)).to(torch.uint16).view(dtype)

    for instruction in code.strip("{} ").split(";"):
        kind, *names = re.findall(r"[\w.$]+", instruction) or [""]
        if kind in ("", ".reg"):
            continue
        target, *args = names
        a, *rest = map(value, args)
        if kind == "mov.b32":
            registers[target] = a
        elif kind == "shr.u32":
            registers[target] = a >> rest[0]
        elif kind == "shl.b32":
            registers[target] = (a << rest[0]) & 0xFFFFFFFF
        elif kind == "lop3.b32":
            assert args[3] == "0xea"  # the truth table of (a & b) | c
            registers[target] = (a & rest[0]) | rest[1]
        else:
            assert kind in ("fma.rn.f16x2", "fma.rn.bf16x2")
            dtype = torch.float16 if "bf" not in kind else torch.bfloat16
            x, y, z = (halves(v, dtype).double() for v in (a, *rest))
            low, high = (x * y + z).to(dtype).view(torch.uint16).to(torch.int64)
            registers[target] = low | high << 16
    return registers["$0"]


@pytest.mark.parametrize("zero", range(-8, 9))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_assembly_subtracts_zero_points(dtype, zero):
    every, half = torch.arange(2**16), dtype == torch.float16
    minus = minus_zero(half) & 0xFFFFFFFF | (8 + zero) * 0x10001
    for plane in range(4):
        result = emulate(
            unpack_asm(4, plane, half, "zeros"), every | every << 16, torch.full_like(every, minus)
        )
        want = (every >> 4 * plane & 15).double() - 8 - zero
        for bits in (result & 0xFFFF, result >> 16):
            assert torch.equal(bits.to(torch.uint16).view(dtype).double(), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", ["fp16", "fp16-minima"])
@pytest.mark.parametrize("bits", [5, 6])
def test_the_assembly_unpacks_high_bits(bits, scales, dtype):
    """Every word beside random high bits, in both halves of a register."""
    every = torch.arange(2**16)
    high = torch.randint(256, (2**16,), generator=torch.Generator().manual_seed(0))
    zero = 0 if scales == "fp16-minima" else 2 ** (bits - 1)
    for plane in range(4):
        for shift in (0, 4) if bits == 5 else (0,):
            code = unpack_asm(bits, plane, dtype == torch.float16, scales, shift)
            result = emulate(code, every | every.flip(0) << 16, high | high.flip(0) << 16)
            above = high >> (shift + (bits - 4) * plane) & (2 ** (bits - 4) - 1)
            want = ((every >> 4 * plane & 15) + 16 * above).double() - zero
            for half, expected in ((result & 0xFFFF, want), (result >> 16, want.flip(0))):
                assert torch.equal(half.to(torch.uint16).view(dtype).double(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_assembly_unpacks_every_word(bits, dtype):
    every = torch.arange(2**16)
    other = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    packed = every.to(torch.uint16).view(torch.int16).view(-1, 1, backends.triton.layout.COLUMNS)
    unpack = (
        backends.triton.layout.unpack_int4_planes
        if bits == 4
        else backends.triton.layout.unpack_int8_planes
    )
    codes = unpack(packed, 1, packed.numel() * 16 // bits).view(
        -1, 16 // bits, backends.triton.layout.COLUMNS
    )
    for plane in range(16 // bits):
        want = codes[:, plane].flatten().double()  # of word i
        code = unpack_asm(bits, plane, dtype == torch.float16, "bf16" if bits == 4 else "")
        result = emulate(code, every | other << 16)
        for half, expected in ((result & 0xFFFF, want), (result >> 16, want[other])):
            assert torch.equal(half.to(torch.uint16).view(dtype).double(), expected)
