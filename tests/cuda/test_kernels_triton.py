"""The Triton kernels without a GPU: compiled ahead of time, piece by piece, their plans, and the operators' wiring.

test_interpreter.py runs them in the interpreter. Checks that need a GPU (bits of 16-bit sums, graphs) are in test_gpu.py.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")

import backends.experts  # noqa: E402
import backends.triton.layout  # noqa: E402
import backends.triton.topk  # noqa: E402
import backends.triton.tree  # noqa: E402
from backends.triton.attention import (  # noqa: E402
    CHUNK,
    ROWS,
    gathering_blocks,
    plan_attention,
    splits_of,
)
from backends.triton.experts import plan_experts  # noqa: E402
from backends.triton.launch import SPLIT_TOKENS, TARGETS  # noqa: E402
from backends.triton.layout import BLOCK_FORMS  # noqa: E402
from backends.triton.qmatmul import (  # noqa: E402
    MAX_SPLITS,
    choose_splits,
    minus_zero,
    plan_product,
    unpack_asm,
)
from compiled_kernels import (  # noqa: E402
    Case,
    CycleCase,
    cases,
    compile_for,
    cycle_cases,
    disassemble,
    expert_cases,
    form_named,
    launch,
    product_launches,
    resources,
)
from helpers import Mixture, Operators, planes_of_cuda, slow  # noqa: E402
from model import ModelConfig  # noqa: E402
from quantize import FORMATS, Linear, stack  # noqa: E402
from reference import choose, use_backend  # noqa: E402
from run.heads import linear_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("_fresh_cache")

# ----------------------------------------------------------------------------------------- compiled


def check(case: Case | CycleCase) -> None:
    """A kernel fits its target, keeps everything in registers, and multiplies on tensor cores unless in fp32.

    Trees and tokens attend by mma.m16n8k16 everywhere, which adds their keys in order.
    """
    found = resources(case.target, launch(case))
    assert (found.stack_bytes, found.local_accesses, found.disorder) == (0, 0, ""), (case, found)
    assert found.shared_bytes <= TARGETS[case.target].shared_bytes, (case, found)
    instruction = "none"
    if case.dtype != "fp32" and (isinstance(case, Case) or "attention" in case.kernel):
        of_tree = isinstance(case, CycleCase) and case.T <= SPLIT_TOKENS
        newer = {} if of_tree else {"90": "HGMMA", "100": "UTCHMMA"}
        instruction = newer.get(case.target, "HMMA")
    assert found.tensor_core.split()[0] == instruction, (case, found)


# one of each kernel; the slow ones are shapes and formats that test_compiled_all has not
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
    Case("80", "int8", "bf16", 32),
    Case("90", "int4-128-zeros", "bf16", 16, epilogue="swiglu"),
    Case("90", "int4-128", "bf16", 16, epilogue="add"),  # which hands parts from block to block
    Case("100", "int4-32", "bf16", 64),  # the one that was a trap with 64 tokens to a block
    Case("100", "int4-128", "fp32", 16),  # the one that Triton rounded to TF32
    Case("80", "Q4_K", "bf16", 64, epilogue="rotary"),  # spilled with 32 tokens to a block
    Case("80", "int8", "bf16", 2, 4096, 14336, 8),
    Case("80", "int4-64-zeros", "bf16", 120, 4096, 14336, 8),
    Case("90", "int4-32", "bf16", 512, 4096, 14336, 60),  # a number of experts that is no power of two
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
        Case("86", "int4-32-zeros", "bf16", 16, epilogue="add"),  # spilled a word
        Case("80", "int4-128-zeros", "bf16", 64),  # the case with most shared memory
        Case("90", "int4-32-zeros", "fp16", 64),
        Case("90", "float", "bf16", 120, 4095, 14336, 8),  # N tells the compiler nothing
        Case("89", "float", "fp16", 512, 28672, 4096, 8),
        Case("86", "int4-32", "fp16", 512, 4096, 14336, 8),
        Case("90", "float", "fp32", 120, 4096, 14336, 8),
        Case("80", "int4-128", "fp32", 120, 4096, 14336, 8),
    ]),
])  # fmt: skip
def test_compiled(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [cycle_cases, expert_cases, lambda: cases(4096), lambda: cases(4095)]
)
def test_compiled_all(every):
    for case in every():
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
    _, code = disassemble(compile_for(target, launch(case)))
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
    ptx = compile_for(target, launch(CycleCase(target, "attention", dtype, T=T))).asm["ptx"]
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
        found = resources(case.target, launch(case))
        assert found.shared_bytes <= TARGETS[case.target].shared_bytes, (case, found)
        assert found.stack_bytes <= (64 if T > SPLIT_TOKENS else 0), (case, found)
        assert not found.disorder, (case, found)
        assert found.tensor_core != "none"


@pytest.mark.parametrize("target", ["90", *slow(["80", "86", "89"])])
def test_the_sum_of_splits_compiles(target):
    product, sums = product_launches(Case(target, "int4-128", "bf16", 16, 64, 14336))
    assert sums.constants["SPLITS"] == MAX_SPLITS
    found = resources(target, sums)
    assert (found.stack_bytes, found.local_accesses) == (0, 0), found


# -------------------------------------------------------------------------------------------- plans


def test_every_slot_has_a_block():
    """As many chunks are launched as the longest prefix takes: 16 of 256 slots, 8 of 512, 8 of 1,024 ..."""
    ends = [CHUNK * i for i in range(1, 17)]
    for doubled in range(1, 6):
        ends += [ends[-1] + (CHUNK << doubled) * i for i in range(1, 9)]
    for S in (1, 100, 256, 257, 1000, 4095, 4096, 4097, 5000, 8192, 8193, 40000, 131072):
        want = next(n for n, end in enumerate(ends, 1) if end >= S)
        assert splits_of(S) == want, S
    for E, dtype in itertools.product((16, 64, 80, 128, 256), (torch.bfloat16, torch.float32)):
        assert CHUNK % plan_attention(E, dtype).tile == 0, "no chunk is cut within a tile"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 40])
def test_every_token_has_a_block_that_gathers_its_path(group):
    """As many blocks are launched as the tokens take whose rows lie in one block, some of them in part."""
    for T, tokens in itertools.product((1, 2, 5, 33, SPLIT_TOKENS), (1, 2, 4)):
        needed = 0
        for first in range(0, T * group, ROWS):
            last = min(first + ROWS, T * group) - 1
            needed = max(needed, triton.cdiv(last // group - first // group + 1, tokens))
        assert needed <= gathering_blocks(T, group, tokens) <= needed + 1


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
    """Nor, with experts, on that of pairs."""
    bits, group, scales = form_named(form)
    device = TARGETS[target]
    for dtype in (torch.bfloat16, torch.float32):
        of = (bits, group, dtype, device)
        plans = [
            [
                plan_product(M, 4096, 11008, *of, "rotary", scales)
                for M in (1, 16, 17, 32, 33, 64, 65, 256)
            ]
        ]
        for N, K, experts in ((28672, 4096, 8), (70, 256, 8), (2048, 768, 128)):
            pairs = (1, 2, 32, 33, 120, 129, 512, 4096)
            plans.append([plan_experts(P, N, K, *of, experts, scales) for P in pairs])
            assert plans[-1][0].splits <= -(-K * bits // 1024) or bits in (5, 6)
        for cuts in plans:
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


def summands(bits: int, scales: str, half: bool, high: torch.Tensor) -> list[tuple]:
    """Return a shift, the second operand and what it adds to a plane's field, [planes, n] or a number."""
    if scales == "zeros":
        minus = minus_zero(half) & 0xFFFFFFFF
        every = range(-8, 9)
        return [
            (0, torch.full_like(high, minus | (8 + zero) * 0x10001), -8 - zero) for zero in every
        ]
    if bits in (4, 8):
        return [(0, high, -8 if bits == 4 else 0)]
    zero = 0 if scales == "fp16-minima" else 2 ** (bits - 1)
    found = []
    for shift in (0, 4) if bits == 5 else (0,):
        planes = [
            high >> (shift + (bits - 4) * plane) & (2 ** (bits - 4) - 1) for plane in range(4)
        ]
        found.append((shift, high | high.flip(0) << 16, 16 * torch.stack(planes) - zero))
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits, scales", [
    (4, "bf16"), (8, ""), (4, "zeros"), (5, "fp16"), (5, "fp16-minima"), (6, "fp16"), (6, "fp16-minima"),
])  # fmt: skip
def test_the_assembly_unpacks_every_word(bits, scales, dtype):
    """In both halves of a register; beside every zero point, and random high bits."""
    every, half = torch.arange(2**16), dtype == torch.float16
    high = torch.randint(256, (2**16,), generator=torch.Generator().manual_seed(0))
    for shift, second, added in summands(bits, scales, half, high):
        for plane in range(2 if bits == 8 else 4):
            field = every >> 4 * plane & 15
            if bits == 8:
                field = ((every >> 8 * plane & 255) ^ 128) - 128  # two's complement
            want = field + (added[plane] if isinstance(added, torch.Tensor) else added)
            code = unpack_asm(bits, plane, half, scales, shift)
            result = emulate(code, every | every.flip(0) << 16, second)
            for found, expected in ((result & 0xFFFF, want), (result >> 16, want.flip(0))):
                numbers = found.to(torch.uint16).view(dtype).double()
                assert torch.equal(numbers, expected.double()), (plane, shift)


# ---------------------------------------------------------------------------------------- operators


def test_lists():
    """The lists of the operator's reference."""
    expert = torch.tensor([3, 0, 3, 3, 5, 0])
    lists = backends.experts.expert_lists(expert, 6)
    assert lists.tolist() == [0, 2, 2, 2, 5, 5, 6] + [1, 5, 0, 2, 3, 4]
    torch.library.opcheck(torch.ops.gpt_eagle.expert_lists.default, (expert, 6))


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Tensors on the CPU are packed as on CUDA."""
    planes_of_cuda(monkeypatch)


@pytest.mark.parametrize(
    "format,name", [("none", "experts_linear"), ("int8", "w8a16"), ("int4", "w4a16")]
)
def test_a_layer_lists_rows_once(as_on_cuda, format, name):
    """The operators that are called. Nothing waits for data: the tensors are fake and hold none."""
    config = ModelConfig(64, 1, 4, 2, 16, 96, 9, n_experts=4, experts_per_token=2)
    with FakeTensorMode(), torch.no_grad():
        layer = Mixture(config)
        if format != "none":
            for child in ("w13", "w2"):
                setattr(layer, child, stack_of(format, *getattr(layer, child).weight.shape, 32))
        use_backend(layer, choose(torch.device("cuda")))
        x = torch.empty(2, 7, 64)
        with Operators() as counting:
            y = layer(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert counting.calls["expert_lists"] == 1 and counting.calls[name] == 2
    assert not {"aten::_local_scalar_dense", "aten::nonzero"} & set(counting.calls)


def stack_of(format: str, experts: int, N: int, K: int, group: int) -> Linear:
    """Experts of no particular weights."""
    kind = FORMATS[format]
    group = group if format == "int4" else 0  # int8 has a scale per output on CUDA
    packed = (kind.round(torch.ones(N, K), group) for _ in range(experts))
    return linear_of(stack(packed, experts))
