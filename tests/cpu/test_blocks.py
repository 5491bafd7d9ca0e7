"""Weights in the blocks of a GGUF file: numbers, packing, products, embeddings, wrong operands. The properties that
products of all formats share are tested here for those of test_kernels_cpu.py, too.

Numbers equal the package gguf's bit for bit. The product has a bound: u = 2^-24 is fp32's unit
roundoff, B the number of groups of k, t a row's rounded activations times the terms of the weights,
which are code times scale and, for some types, a minimum.
- The operator adds at most 2 B numbers, each a product of three factors, in fused steps. The
  reference adds weights of fp32, rounded twice, in fp64. They differ by at most
  (2 B + 8) u sum |t|. Plain loops round twice as often.
- Rounding a group of activations to codes moves each of them by at most half a step, s / 2 with
  s = largest / 127 of those that are no outliers: the exact product differs by at most
  sum s / 2 sum |w| more.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_builds import OTHERS
from test_kernels_cpu import (
    KINDS,
    U,
    assert_within,
    built,
    check_edges,
    check_leading_dimensions,
    check_product,
    check_rows_alone,
    check_variant,
    make_case,
    random,
    rounding_steps,
)
from torch import Tensor

import backends.cpp.build
from backends.blocks import Blocks, Numbers
from backends.library import tiles_in_use
from backends.strips import part_bytes
from backends.weight import Embedding, blocks_reference, rounding_of_blocks
from files.stacks import decode
from helpers import (
    BLOCK_KINDS,
    gguf_blocks,
    layer_of,
    packed_blocks,
    random_blocks,
    set_halves,
    weight_of_blocks,
)
from quantize import round_activations, stack
from run.heads import rows_of

MISSING = backends.cpp.build.load_operators()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the operators cannot be built: {MISSING}")
FILE = Path("m.gguf")
N = 77  # two strips and a part of one
K = 768  # a panel and a half
OPERATORS = torch.ops.gpt_eagle


def widened(name: str, content: np.ndarray) -> Tensor:
    """The numbers of blocks, [N, K] fp32, by the package gguf."""
    return torch.from_numpy(gguf.dequantize(content, gguf.GGMLQuantizationType[name]).copy())


class Case:
    """A layer with random blocks of one type: its numbers, and its product."""

    def __init__(self, name: str, n: int = N, k: int = K):
        self.kind = BLOCK_KINDS[name]
        self.block, self.farthest = rounding_of_blocks(self.kind.elements)
        self.blocks = random_blocks(name, n, k)
        self.packed, self.table = packed_blocks(self.blocks)
        content = self.blocks.content.numpy()
        self.weight = widened(name, content)
        self.sizes = self.term(name, content, self.kind.least_at).abs()
        if self.kind.least_at is not None:
            self.sizes += self.term(name, content, self.kind.scale_at).abs()

    def term(self, name: str, content: np.ndarray, zero_at: int | None) -> Tensor:
        """The weights with scales or minima of 0."""
        blocks = content.reshape(len(content), -1, self.kind.size).copy()
        if zero_at is not None:
            set_halves(blocks, zero_at, 0)
        return widened(name, blocks.reshape(len(content), -1))

    def operator(self, x: Tensor, wide: bool = True, namespace: str = "gpt_eagle") -> Tensor:
        matmul = getattr(torch.ops, namespace).matmul
        return matmul(x, self.packed, self.table, None, len(self.weight), wide)

    def reference(self, x: Tensor) -> Tensor:
        return blocks_reference(x, self.weight, self.kind.elements)

    def rounding(self, x: Tensor) -> Tensor:
        """Most that operator and reference may differ by, [M, N]."""
        codes, scales = round_activations(x, self.block, self.farthest)
        sizes = (codes.abs() * scales).flatten(1).double() @ self.sizes.double().T
        return (2 * x.shape[1] // self.kind.group + 8) * U * sizes

    def code_error(self, x: Tensor) -> Tensor:
        """Most that rounding the activations may change, [M, N]."""
        halves = (0.5 + 2**-8) * rounding_steps(x, self.block, self.farthest)  # [M, B]
        return halves.repeat_interleave(self.block, 1).double() @ self.weight.double().abs().T


FORMATS = [*KINDS, *BLOCK_KINDS]


def case_of(format: str | tuple, n: int = N, k: int = K):
    """A layer with random weights of any format."""
    return Case(format, n, k) if format in BLOCK_KINDS else make_case(format, n, k)


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_numbers_are_the_packages(name):
    """In fp32, and rounded once in bf16: of the file's blocks, and of packed ones in any order."""
    content = gguf_blocks(name, N, K)
    want = widened(name, content)
    assert 0.5 < want.std() < 2 and want.mean().abs() < 0.2  # of blocks as models have them
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    content = torch.from_numpy(content)
    type_id = BLOCK_KINDS[name].type_id
    straight = packed_blocks(Blocks(name, content, type_id, K))
    turned = packed_blocks(Blocks(name, content, type_id, K, order))
    ids = torch.tensor([0, 76, 5, 5, 31, 32, 64])
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(N, K, dtype=dtype)
        OPERATORS.widen_blocks(content.flatten(), type_id, out)
        assert torch.equal(out, want.to(dtype))
        for operands, rows in ((straight, want), (turned, want[order])):
            OPERATORS.read_rows(*operands, torch.arange(N), out)
            assert torch.equal(out, rows.to(dtype))
            some = torch.empty(len(ids), K, dtype=dtype)
            OPERATORS.read_rows(*operands, ids, some)
            assert torch.equal(some, rows[ids].to(dtype))


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_scales_that_are_no_numbers_are_refused(name):
    """In any block, and minima too; the largest finite ones are not."""
    kind = BLOCK_KINDS[name]
    for at in (kind.scale_at, kind.least_at):
        for value in (float("nan"), float("inf"), -float("inf"), 65504.0):
            if at is None:
                continue
            part = random_blocks(name, 40, 256)
            set_halves(part.content[37].view(-1, kind.size)[-1:].numpy(), at, value)
            out = torch.empty(part_bytes(part.part, 256), dtype=torch.uint8)
            if value == 65504.0:
                part.pack(out, FILE)
                continue
            says = f"^m.gguf: {name} has a scale that is NaN or infinite; download it again$"
            with pytest.raises(ValueError, match=says):
                part.pack(out, FILE)


def test_powers_of_two_that_are_no_numbers_are_refused():
    """255 in the byte of a block; all others are exact, subnormal ones too."""
    part = random_blocks("MXFP4", 256, 64)
    blocks = part.content.view(256, 2, 17)
    blocks[..., 0] = torch.arange(256).clamp(max=254)[:, None]
    out = torch.empty(256, 64)
    OPERATORS.widen_blocks(part.content.flatten(), part.type_id, out)
    assert torch.equal(out, widened("MXFP4", part.content.numpy()))
    assert torch.equal(decode(blocks), out)
    strips = torch.empty(part_bytes(part.part, 64), dtype=torch.uint8)
    part.pack(strips, FILE)
    blocks[37, 1, 0] = 255
    with pytest.raises(ValueError, match="MXFP4 has a scale that is NaN or infinite; download"):
        part.pack(strips, FILE)


# ----------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("k", [256, K, 2816])
@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_products(name, k):
    x = random(64, k, seed=1)
    x[:, ::97] *= 30  # outliers, as hidden states have them
    check_product(Case(name, k=k), x)


@pytest.mark.parametrize("build", ["native", "tiles", *OTHERS])
@pytest.mark.parametrize("name", [n for n, kind in BLOCK_KINDS.items() if kind.elements == 256])
def test_the_largest_sums_of_integer_scales_fit_32_bits(name, build):
    """The largest codes and scales, and a block of activations that holds nothing but outliers."""
    case = Case(name, k=4096)
    blocks = case.blocks.content.view(N, -1, case.kind.size)
    # the least codes and scales of Q3_K and Q6_K are the largest
    blocks[:] = 0 if case.kind.least_at is None else 255
    if name == "Q6_K":
        blocks[..., 192:208] = 0x80  # scales of -128
    for at in (case.kind.scale_at, case.kind.least_at):
        if at is not None:
            set_halves(blocks.numpy(), at, 1)
    case.packed, _ = packed_blocks(case.blocks)
    case.weight = widened(name, case.blocks.content.numpy())
    case.sizes = 2 * case.weight.abs().amax() * torch.ones_like(case.weight)
    x = torch.zeros(17, 4096)
    x[:, 128:256] = 127
    x[1::2] *= -1
    x[2, 200] = 127 * 33
    namespace = built(build) if build in OTHERS else "gpt_eagle"
    before = tiles_in_use()
    OPERATORS.use_tiles("emulation" if build == "tiles" else "none")
    y = case.operator(x, True, namespace)
    OPERATORS.use_tiles(before)
    assert_within(y, case.reference(x), 2 * case.rounding(x))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_wrong_code_is_seen(format):
    """One of 256 x 77 codes off by one step breaks the bound against the reference."""
    case, x = case_of(format, k=256), random(5, 256)
    if format in BLOCK_KINDS:
        case.blocks.content[70, 60 if case.kind.elements == 256 else 10] ^= 1
        case.packed, _ = packed_blocks(case.blocks)
    else:
        case.codes[70, 200] += 1 if case.codes[70, 200] < 7 else -1
    with pytest.raises(AssertionError, match="outputs are off"):
        assert_within(case.operator(x, True), case.reference(x), case.rounding(x))


def rows_of_panels(format: str | tuple) -> Tensor:
    """64 rows, some with outliers. K has panels and a ragged end; int8: 10 blocks and 20 values."""
    k = K if format in BLOCK_KINDS else 1408 if format[1] else 1300
    x = random(64, k, seed=1)
    x[::3, ::97] *= 30
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_does_not_depend_on_the_others(format, dtype):
    x = rows_of_panels(format).to(dtype)
    check_rows_alone(case_of(format, k=x.shape[1]), x)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_leading_dimensions_and_strides(format):
    case = case_of(format, 33, 256)
    check_leading_dimensions(case.operator, random(3, 4, 512)[..., :256])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_threads_do_not_matter(format):
    case = case_of(format, 1000, 512)
    x = random(60, 512)
    ids = torch.arange(1000).repeat(2)
    want = case.operator(x), case.weight[ids]
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(case.operator(x), want[0])
            if format not in BLOCK_KINDS:
                continue
            assert torch.equal(packed_blocks(case.blocks)[0], case.packed)
            out = torch.empty(2000, 512)
            OPERATORS.read_rows(case.packed, case.table, ids, out)
            assert torch.equal(out, want[1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_at_the_edges(format, dtype):
    check_edges(case_of(format, 33, 256), dtype)


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_the_largest_codes(name):
    """Every bit of every code is set, every activation is 127 steps: no sum overflows."""
    case = Case(name, n=33, k=512)
    raw = np.full((33, 512 // case.kind.elements, case.kind.size), 255, np.uint8)
    for at in (case.kind.scale_at, case.kind.least_at):
        if at is not None:
            set_halves(raw, at, 2.0**-8)
    if case.kind.scale_at is None:
        raw[..., 0] = 120
    case.blocks = case.blocks._replace(content=torch.from_numpy(raw.reshape(33, -1)))
    case.weight = widened(name, raw.reshape(33, -1))
    case.packed, _ = packed_blocks(case.blocks)
    assert case.weight.abs().min() > 0
    for sign in (1, -1):
        x = torch.full((3, 512), sign * 127.0)
        assert torch.equal(case.operator(x).double(), case.reference(x))  # all sums are exact


@pytest.mark.parametrize("march", OTHERS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_variants_agree(format, march):
    x = rows_of_panels(format)
    case = case_of(format, k=x.shape[1])
    check_variant(case, x, march)
    if format not in BLOCK_KINDS:
        return check_variant(case, x.bfloat16(), march)
    operators = getattr(torch.ops, built(march))
    out = torch.empty_like(case.packed)
    operators.pack_blocks(case.blocks.content, case.kind.type_id, None, out)
    assert torch.equal(out, case.packed)
    numbers = torch.empty(N, K)
    operators.read_rows(out, case.table, torch.arange(N), numbers)
    assert torch.equal(numbers, case.weight)


# ------------------------------------------------------------------------------------------- layers

MIXED = ("Q4_K", "Q6_K", "Q5_0")


@pytest.mark.parametrize("outputs", [96, 40])
def test_parts_of_several_types(outputs):
    """A layer of three types has the bits of three layers; a strip may end with a part."""
    parts = [random_blocks(name, outputs, 512, seed) for seed, name in enumerate(MIXED)]
    bias = random(3 * outputs).bfloat16()
    weight = weight_of_blocks(*parts)
    layer = layer_of(weight, fp32_out=True)
    with_bias = layer_of(weight, bias)
    weights = [widened(part.name, part.content.numpy()) for part in parts]
    assert torch.equal(layer.dequantize(), torch.cat(weights))
    ids = torch.tensor([0, outputs - 1, outputs, 2 * outputs, 3 * outputs - 1])
    assert torch.equal(rows_of(layer, ids).weight, torch.cat(weights)[ids].bfloat16())
    for x in (random(1, 512), random(2, 13, 512).bfloat16()):
        alone = [layer_of(weight_of_blocks(part), fp32_out=True)(x) for part in parts]
        assert torch.equal(layer(x), torch.cat(alone, -1))
        want = torch.cat(alone, -1).to(x.dtype) + bias
        assert torch.equal(with_bias(x), want) and with_bias(x).dtype == want.dtype
    half = random(3, 512).half()
    assert torch.equal(layer(half), layer(half.float()))


@pytest.mark.parametrize("outputs", [96, 40])
def test_numbers_beside_blocks(outputs):
    """Parts in bfloat16, first and last, have the bits of layers of their own, with a bias too."""
    names = ("Q8_0", "Q4_K")
    blocks = [random_blocks(name, outputs, 512, seed) for seed, name in enumerate(names)]
    floats = [(random(outputs, 512, seed=seed) / 20).bfloat16() for seed in (7, 8)]
    parts = [Numbers(floats[0]), *blocks, Numbers(floats[1])]
    bias = random(4 * outputs).bfloat16()
    layer = layer_of(weight_of_blocks(*parts), bias, fp32_out=True)
    weights = [widened(part.name, part.content.numpy()) for part in blocks]
    whole = torch.cat((floats[0].float(), *weights, floats[1].float()))
    assert torch.equal(layer.dequantize(), whole)
    ids = torch.arange(4 * outputs).flip(0)
    assert torch.equal(rows_of(layer, ids).weight, whole[ids].bfloat16())
    each = [floats[0], *(weight_of_blocks(part) for part in blocks), floats[1]]
    for x in (random(1, 512), random(2, 13, 512).bfloat16()):
        biases = bias.split(outputs)
        alone = [layer_of(weight, b, fp32_out=True)(x) for weight, b in zip(each, biases)]
        assert torch.equal(layer(x), torch.cat(alone, -1))
    experts = layer_of(stack(iter([weight_of_blocks(*parts)] * 3), 3))
    x = random(9, 512, seed=1)
    want = layer_of(weight_of_blocks(*parts))(x)
    assert torch.equal(experts(x, torch.tensor([2, 0, 2, 2, 0, 2, 2, 0, 0])), want)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_experts(name):
    """Every row has its own expert's product, bit for bit; an expert may have none."""
    each = [
        weight_of_blocks(random_blocks(name, 48, 512, seed), random_blocks("Q8_0", 48, 512, seed))
        for seed in range(4)
    ]
    layer = layer_of(stack(iter(each), 4))
    x = random(9, 512, seed=1).bfloat16()
    expert = torch.tensor([3, 0, 3, 3, 1, 0, 3, 1, 1])  # 2 has none
    got = layer(x, expert)
    assert got.dtype == torch.bfloat16
    for row, number in enumerate(expert.tolist()):
        assert torch.equal(got[row], layer_of(each[number])(x[row]))
    for bad in (4, -1):
        with pytest.raises(RuntimeError, match=f"there is no expert {bad}"):
            layer(x, torch.where(expert == 1, bad, expert))


def test_embedding():
    part = random_blocks("Q6_K", 100, 256)
    embedding = Embedding(weight_of_blocks(part))
    tokens = torch.tensor([[0, 99, 7], [7, 31, 32]])
    got = embedding(tokens)
    assert torch.equal(got, widened("Q6_K", part.content.numpy())[tokens])
    assert embedding(tokens[:, :0]).shape == (2, 0, 256)


# ------------------------------------------------------------------------- operands that do not fit

CASE = Case("Q4_K", 40, 512)
SIZE = len(CASE.packed)


def table_with(place: int, value: int) -> Tensor:
    table = CASE.table.clone()
    table[place] = value
    return table


FIELDS = ("outputs", "inputs", "bytes", "layout", "outputs of a part", "group", "first byte")
NO_BYTES = torch.zeros(0, dtype=torch.uint8)
TABLES = {  # packed blocks and tables that lie
    **{
        f"{name} {value}": (CASE.packed, table_with(place, value))
        for place, name in enumerate(FIELDS)
        for value in (-1, 0, 1, 33, 256, 1024, 2**40, -(2**40), 2**62, 2**63 - 1)
        if (place, value) not in ((5, 0), (6, 0))
    },
    **{f"of {size} words": (CASE.packed, CASE.table[:size]) for size in (3, 1, 0)},
    "long": (CASE.packed, torch.cat((CASE.table, CASE.table[:2]))),
    "int32": (CASE.packed, CASE.table.int()),
    "float": (CASE.packed, CASE.table.double()),
    "strided": (CASE.packed, CASE.table.repeat_interleave(2)[::2]),
    "twice": (CASE.packed, torch.cat((CASE.table, CASE.table[3:]))),
    "a negative part": (CASE.packed, torch.tensor([40, 512, SIZE, 12, -40, 0, 0, 12, 80, 0, 0])),
    "nothing": (NO_BYTES, torch.tensor([1, 0, 0, 12, 1, 0, 0])),
    "no outputs": (NO_BYTES, torch.tensor([0, 512, 0, 12, 0, 0, 0])),
    "a wide nothing": (NO_BYTES, torch.tensor([32, 2**62, 0, 12, 32, 0, 0])),
    "cut": (CASE.packed[:-1], CASE.table),
    "cut to one": (CASE.packed[:1], CASE.table),
    "too long": (torch.cat((CASE.packed, CASE.packed[:1])), CASE.table),
    "no dimension": (CASE.packed[0], CASE.table),
    "signed": (CASE.packed.view(torch.int8), CASE.table),
    "every second": (CASE.packed.repeat_interleave(2)[::2], CASE.table),
}


@pytest.mark.parametrize("how", TABLES)
def test_tables_that_lie_are_refused(how):
    """Never read past the end of a weight."""
    for width in (512, 256, 0):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises((RuntimeError, IndexError)):
                x = torch.zeros(3, width, dtype=dtype)
                OPERATORS.matmul(x, *TABLES[how], None, 40, True)
        for rows in (0, 1, 4):
            with pytest.raises((RuntimeError, IndexError)):
                ids = torch.zeros(rows + 16, dtype=torch.long)
                OPERATORS.read_rows(*TABLES[how], ids, torch.zeros(rows + 16, width))


def test_rows_out_of_range_are_refused_with_threads():
    """A thread of the pool cannot raise: rows are checked before it starts."""
    ids = torch.zeros(4000, dtype=torch.long)
    ids[::7] = 10**6
    try:
        torch.set_num_threads(3)
        with pytest.raises(RuntimeError, match="a row must be 0 to 39; it is 1000000"):
            OPERATORS.read_rows(CASE.packed, CASE.table, ids, torch.empty(4000, 512))
    finally:
        torch.set_num_threads(1)
