"""The Triton kernels without a GPU: compiled ahead of time, piece by piece, their plans, and the operators' wiring.

test_interpreter.py runs them in the interpreter. Checks that need a GPU (bits of 16-bit sums, graphs) are in test_gpu.py.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")

import backends.experts  # noqa: E402
import backends.triton.attention  # noqa: E402
import backends.triton.layout  # noqa: E402
import backends.triton.topk  # noqa: E402
import backends.triton.tree  # noqa: E402
from backends.triton.experts import most_tiles, plan_experts  # noqa: E402
from backends.triton.launch import SPLIT_TOKENS, TARGETS  # noqa: E402
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
    CycleCase,
    cases,
    compile_for,
    cycle_cases,
    cycle_source,
    disassemble,
    disorder_of,
    expert_cases,
    fault_of,
    form_named,
    product_source,
    resources,
    source,
)
from helpers import Mixture, Operators, planes_of_cuda, slow  # noqa: E402
from model import ModelConfig  # noqa: E402
from quantize import FORMATS, Linear, stack  # noqa: E402
from reference import choose, use_backend  # noqa: E402
from run.heads import linear_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("_fresh_cache")

# ----------------------------------------------------------------------------------------- compiled


def check(case: Case | CycleCase) -> None:
    """A kernel fits its target, keeps everything in registers, and attends on tensor cores unless in fp32.

    Trees and tokens do by mma.m16n8k16 everywhere, which adds their keys in order.
    """
    if isinstance(case, Case):
        kernel, plan = product_source(case)
        found = resources(case.target, kernel)
        assert fault_of(case, found) == "", (case, plan, found)
        return
    found = resources(case.target, cycle_source(case))
    assert (found.stack_bytes, found.local_accesses, found.disorder) == (0, 0, ""), (case, found)
    assert found.shared_bytes <= TARGETS[case.target].shared_bytes, (case, found)
    instruction = "none"
    if "attention" in case.kernel and case.dtype != "fp32":
        instruction = "HMMA"
        if case.T > SPLIT_TOKENS:
            instruction = {"90": "HGMMA", "100": "UTCHMMA"}.get(case.target, "HMMA")
    assert found.tensor_core.split()[0] == instruction, found


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


def test_no_kernel_returns_none():
    """Triton 3.6, which torch 2.11 brings, cannot compile that. Newer ones can."""
    for file in Path(backends.triton.layout.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in str(
                [ast.unparse(decorator) for decorator in function.decorator_list]
            ):
                returned = [x for x in ast.walk(function) if isinstance(x, ast.Return) and x.value]
                assert "None" not in map(ast.unparse, (x.value for x in returned)), function.name


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


def test_races_are_noticed():
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


@pytest.mark.parametrize("target", ["90", *slow(["80", "86", "89"])])
def test_the_sum_of_splits_compiles(target):
    constants = {"SPLITS": MAX_SPLITS, "BLOCK": 512}
    found = resources(target, source(sum_kernel, "bf16", constants))
    assert (found.stack_bytes, found.local_accesses) == (0, 0), found


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


def spreads(rows: int, experts: int):
    """Every way to spread rows over experts."""
    if experts == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        for rest in spreads(rows - first, experts - 1):
            yield (first, *rest)


@pytest.mark.parametrize("experts", [1, 2, 3, 4])
def test_no_spread_makes_more_tiles(experts):
    """And some spread makes as many: no block of threads is launched for nothing always."""
    for rows in range(1, 14):
        for tokens in (2, 3, 4):
            tiles = max(sum(-(-n // tokens) for n in spread) for spread in spreads(rows, experts))
            assert most_tiles(rows, experts, tokens) == tiles, (rows, tokens)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", [(16, 0), (4, 128), (4, 64), (4, 32), (8, 0)], ids=str)
def test_splits_do_not_depend_on_the_number_of_pairs(target, form):
    for dtype in (torch.bfloat16, torch.float32):
        for N, K, experts in ((28672, 4096, 8), (70, 96, 8), (2048, 768, 128)):
            facts = (N, K, *form, dtype, TARGETS[target], experts)
            cuts = [plan_experts(P, *facts) for P in (1, 2, 32, 33, 120, 129, 512, 4096)]
            assert len({cut.splits for cut in cuts}) == 1 and cuts[0].splits <= -(
                -K * form[0] // 1024
            )
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


# ---------------------------------------------------------------------------------------- operators


def test_lists():
    """The lists of the operator's reference."""
    expert = torch.tensor([3, 0, 3, 3, 5, 0])
    lists = backends.experts.expert_lists(expert, 6)
    assert lists.tolist() == [0, 2, 2, 2, 5, 5, 6] + [1, 5, 0, 2, 3, 4]
    torch.library.opcheck(torch.ops.gpt_eagle.expert_lists.default, (expert, 6))


def test_a_cpu_takes_the_experts_as_they_are():
    expert = torch.tensor([3, 0])
    assert choose(expert.device).route(expert, 6) is expert


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Tensors on the CPU are packed as on CUDA."""
    planes_of_cuda(monkeypatch)


@pytest.mark.parametrize(
    "format,name", [("none", "experts_linear"), ("int8", "w8a16"), ("int4", "w4a16")]
)
def test_a_layer_lists_rows_once(as_on_cuda, format, name):
    """The operators that are called. Nothing waits for data: the tensors are fake and hold none."""
    config = ModelConfig(
        dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=9, n_experts=4,
        experts_per_token=2,
    )  # fmt: skip
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


@pytest.mark.parametrize(
    "format,bytes_each", [("int4", 64 * 512 // 2 + 2 * 64 * 512 // 128), ("int8", 64 * 516)]
)
def test_experts_are_packed_once(as_on_cuda, format, bytes_each):
    """Stacks hold half a byte or a byte per weight and the scales, and nothing else holds either."""
    layer = stack_of(format, 4, 64, 512, 128)
    held = [
        t for module in layer.modules() for t in (*module.buffers(False), *module.parameters(False))
    ]
    assert sum(t.nbytes for t in held) == 4 * bytes_each
    assert layer.data.shape == (
        4,
        2 if format == "int4" else 4,
        64,
        backends.triton.layout.COLUMNS,
    )  # [E, blocks, N, words]
