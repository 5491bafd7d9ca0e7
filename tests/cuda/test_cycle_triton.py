"""The Triton kernels of the decode cycle without a GPU: compiled ahead of time, and their plans.

test_interpreter.py runs them in the interpreter. Checks that need a GPU (bits of 16-bit sums, graphs) are in test_gpu.py.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")

import backends.triton.attention  # noqa: E402
import backends.triton.topk  # noqa: E402
import backends.triton.tree  # noqa: E402
from backends.triton.launch import SPLIT_TOKENS, TARGETS  # noqa: E402
from compiled_kernels import (  # noqa: E402
    CycleCase,
    compile_for,
    cycle_cases,
    cycle_source,
    disassemble,
    resources,
)
from helpers import slow  # noqa: E402

pytestmark = pytest.mark.usefixtures("_fresh_cache")


def check(case: CycleCase) -> None:
    """A kernel fits its target, keeps everything in registers, and attends on tensor cores unless in fp32.

    Trees and tokens do by mma.m16n8k16 everywhere, which adds their keys in order.
    """
    found = resources(case.target, cycle_source(case))
    assert (found.stack_bytes, found.local_accesses, found.disorder) == (0, 0, ""), (case, found)
    assert found.shared_bytes <= TARGETS[case.target].shared_bytes, (case, found)
    instruction = "none"
    if "attention" in case.kernel and case.dtype != "fp32":
        instruction = "HMMA"
        if case.T > SPLIT_TOKENS:
            instruction = {"90": "HGMMA", "100": "UTCHMMA"}.get(case.target, "HMMA")
    assert found.tensor_core.split()[0] == instruction, found


# one of each kernel; the slow ones are shapes that test_compiled_all has not
@pytest.mark.parametrize("case", [
    CycleCase("90", "attention_with_sinks", E=64, kv_heads=8),
    CycleCase("90", "paths"),
    CycleCase("90", "add_norm", "fp16"),
    CycleCase("90", "normed_rotary", "fp16", E=80),  # Qwen3's
    CycleCase("90", "add_unscaled"),
    CycleCase("90", "row", k=backends.triton.topk.MOST, V=256 * 1024),  # the largest that is thought of
    CycleCase("90", "level", k=backends.triton.topk.MOST, V=256 * 1024),
    CycleCase("80", "best_nodes", V=510),
    CycleCase("90", "link_nodes", V=510, T=64),
    CycleCase("90", "lists"),  # of experts
    CycleCase("80", "match"),
    CycleCase("90", "match"),
    CycleCase("80", "noise"),
    *slow([
        CycleCase("90", "attention", kv_heads=8),
        CycleCase("80", "attention", heads=28, kv_heads=4),  # groups of 7, Qwen2's
        CycleCase("90", "attention", heads=28, kv_heads=4),
        CycleCase("80", "attention", "fp16", E=80),
        CycleCase("90", "attention", "fp16", E=80),  # a width that is padded
        *[CycleCase("89", "attention", E=512, heads=8, kv_heads=2, T=T) for T in (1, 60, 256)],  # Gemma 4's
        CycleCase("90", "compact", "fp32", E=256, T=64),  # the most
        CycleCase("80", "compact", E=16, T=1),
        CycleCase("90", "best_nodes", V=backends.triton.tree.MOST),
    ]),
])  # fmt: skip
def test_compiled(case):
    check(case)


@pytest.mark.parametrize("target,dtype,E,T", [
    ("80", "bf16", 128, 7),
    *slow([
        ("90", "fp32", 256, 7), ("80", "fp32", 256, 7), ("86", "bf16", 128, 7), ("89", "fp32", 256, 7), ("90", "bf16", 128, 7),
        ("80", "fp16", 80, 33), ("90", "fp16", 80, 33),
    ]),
])  # fmt: skip
def test_a_path_is_read_before_any_of_it_is_written(target, dtype, E, T):
    """By all warps of a block: a barrier stands between the last load and the first store; both move 16 bytes."""
    case = CycleCase(target, "compact", dtype, E, T=T)
    check(case)
    _, code = disassemble(compile_for(target, cycle_source(case)))
    found = re.findall(r"\b(LDG|STG|BAR)\b\S*?(\.128)?\s", code)
    names = [name for name, _ in found]
    barrier = names.index("BAR", len(names) - names[::-1].index("LDG"))
    assert names.index("STG") > barrier, names
    moved = len(names[barrier + 1 :])
    assert moved >= 4 and all(
        found[i] == ("STG", ".128") for i in range(barrier + 1, len(found))
    ), found
    assert found.count(("LDG", ".128")) == moved, found


@pytest.mark.parametrize("target,dtype,T", [
    ("90", "bf16", 32),
    *slow([(target, "fp16", T) for target in TARGETS for T in (1, 64)]),
    *slow([("90", "bf16", 1), ("90", "fp32", 1), ("90", "fp32", 60)]),
])  # fmt: skip
def test_attention_adds_as_it_is_written(target, dtype, T):
    """What the bits of `plan_attention` rest on, in the code for the device.

    Every product and sum is rounded by itself, so that no later compiler can contract it; tensor cores add 16 keys at a
    time, by one instruction; nothing is copied through the L1 cache, nor asynchronously, behind the counter of blocks.
    """
    ptx = compile_for(target, cycle_source(CycleCase(target, "attention", dtype, T=T))).asm["ptx"]
    assert re.search(r"\bmul\.rn\.f32", ptx)
    assert not re.findall(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32\S*", ptx)
    products = set(re.findall(r"(?:wgmma|tcgen05|w?mma)\.[\w.:]+", ptx))
    form = {"bf16": "bf16.bf16", "fp16": "f16.f16"}.get(dtype)
    assert products == ({f"mma.sync.aligned.m16n8k16.row.col.f32.{form}.f32"} if form else set())
    assert "cp.async.ca" not in ptx
    assert "cp.async" not in ptx[ptx.rindex("atom.global") :]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("E", [64, 128, 256])
@pytest.mark.parametrize("T", [1, 60, 256])
def test_layers_with_windows_fit(target, E, T):
    """Those of a prompt spill few registers, once a block: 48 bytes are the most, on an A100."""
    for kernel in ("attention", "sliding_attention") if E == 256 else ("sliding_attention",):
        case = CycleCase(target, kernel, E=E, heads=4, kv_heads=1, T=T)
        found = resources(case.target, cycle_source(case))
        assert found.shared_bytes <= TARGETS[case.target].shared_bytes, (case, found)
        assert found.stack_bytes <= (64 if T > SPLIT_TOKENS else 0), (case, found)
        assert not found.disorder, (case, found)
        assert found.tensor_core != "none"


@pytest.mark.slow
def test_compiled_all():
    for case in cycle_cases():
        check(case)


# -------------------------------------------------------------------------------------------- plans


def test_every_slot_has_a_block():
    """As many chunks are launched as the longest prefix takes: 16 of 256 slots, 8 of 512, 8 of 1,024 ..."""
    CHUNK = backends.triton.attention.CHUNK
    ends = [CHUNK * i for i in range(1, 17)]
    for doubled in range(1, 6):
        ends += [ends[-1] + (CHUNK << doubled) * i for i in range(1, 9)]
    for S in (1, 100, 256, 257, 1000, 4095, 4096, 4097, 5000, 8192, 8193, 40000, 131072):
        want = next(n for n, end in enumerate(ends, 1) if end >= S)
        assert backends.triton.attention.splits_of(S) == want, S


def test_no_chunk_is_cut_within_a_tile():
    for E, dtype in itertools.product((16, 64, 80, 128, 256), (torch.bfloat16, torch.float32)):
        assert (
            backends.triton.attention.CHUNK
            % backends.triton.attention.plan_attention(E, dtype).tile
            == 0
        )


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 40])
def test_every_token_has_a_block_that_gathers_its_path(group):
    """As many blocks are launched as the tokens take whose rows lie in one block, some of them in part."""
    ROWS = backends.triton.attention.ROWS
    for T, tokens in itertools.product((1, 2, 5, 33, SPLIT_TOKENS), (1, 2, 4)):
        spans = [
            min(first + ROWS, T * group) - 1 for first in range(0, T * group, ROWS)
        ]  # last rows
        needed = max(
            triton.cdiv(last // group - first // group + 1, tokens)
            for first, last in zip(range(0, T * group, ROWS), spans)
        )
        assert needed <= backends.triton.attention.gathering_blocks(T, group, tokens) <= needed + 1


def test_the_rows_of_a_level_fit_a_tile():
    for V, R, rows in ((2049, 10, 16), (32000, 10, 16), (256 * 1024, 64, 16), (10**7, 64, 1)):
        blocks = triton.cdiv(V, backends.triton.topk.BLOCK)
        tiles = backends.triton.topk.tiles_of_level(R, blocks, 10, 7, 50)
        assert (tiles["ROWS"], tiles["FRONT"], tiles["SLOTS"]) == (rows, 8, 64)
        assert tiles["BLOCKS"] >= blocks
