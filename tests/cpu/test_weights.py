"""Products of the C++ operators with every layout of weights, and what packs, unpacks and reads them.

A row of FORMATS is a layout; the properties are the same for all. bf16 equals its reference bit for bit. The others have
bounds: u = 2^-24 is fp32's unit roundoff, B the groups of k, t_b the terms of a sum over them.
- Operator and reference add the same B integers times scales (and minima), in different orders and roundings: they differ by
  at most (2 B + 8) u sum |t_b|; plain loops round twice as often.
- Rounding a block of activations to codes moves each by at most half a step, s / 2 with s = largest / 127 of those that are
  no outliers: the product with the numbers differs by at most sum_b s_b / 2 sum |w|.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_builds import OTHERS, built
from torch import Tensor

import backends.cpp.build
import backends.weight
import quantize
from backends.blocks import Blocks, Numbers
from backends.library import tiles_in_use
from backends.linear import linear_bf16_reference, linear_tiles_reference
from backends.strips import part_bytes
from backends.weight import (
    BLOCK8,
    HALF,
    Embedding,
    blocks_reference,
    decode_codes,
    join_zeros,
    rounding_of_blocks,
)
from helpers import (
    BLOCK_KINDS,
    layer_of,
    packed_blocks,
    random_blocks,
    set_halves,
    slow,
    weight_of_blocks,
)
from quantize import round_activations, stack
from reference import choose
from run.heads import rows_of

MISSING = backends.cpp.build.load_operators()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the operators cannot be built: {MISSING}")
CHOSEN = tiles_in_use()
OPERATORS = torch.ops.gpt_eagle
U = 2.0**-24
ROWS = (1, 5, 26, 60, 64)  # plain decoding, a chain, EAGLE-1's tree, EAGLE-2's, the largest
INTEGERS = [
    ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128), ("int8", 64), ("int4", 64, "zeros"), ("int8", 64, "zeros"),
]  # fmt: skip
FORMATS = ["bf16", *INTEGERS, *BLOCK_KINDS]
CODED = FORMATS[1:]
EVERY = pytest.mark.parametrize("format", FORMATS, ids=str)
EVERY_CODED = pytest.mark.parametrize("format", CODED, ids=str)
EVERY_BLOCK = pytest.mark.parametrize("name", BLOCK_KINDS)
N, K = 77, 768  # two strips and a part of one; a panel and a half
# int8 is multiplied in 16 bits by a build for AVX2 alone, and never on tiles
NATIVE = os.environ.get("GPT_EAGLE_MARCH", "") in ("", "native")
IN_8_BITS = NATIVE and {"avx512_vnni", "avx_vnni"} & set(backends.cpp.build.processor().split())
FUSED = (
    os.environ.get("GPT_EAGLE_MARCH") != "x86-64"
)  # the build adds products without rounding them


@pytest.fixture(autouse=True)
def _no_tiles():
    """Multiply as on a processor without AMX, where a test does not say otherwise."""
    before = tiles_in_use()
    OPERATORS.use_tiles("none")
    yield
    OPERATORS.use_tiles(before)


@contextmanager
def tiles(name: str):
    """Multiply on a unit, and without tiles before and afterwards."""
    if name == "hardware" and CHOSEN != "hardware":
        pytest.skip("this machine has no AMX tiles, or they are not in use")
    assert OPERATORS.use_tiles(name)
    _, before, _ = OPERATORS.tiles()
    try:
        yield
        _, configured, released = OPERATORS.tiles()
        assert (configured > before) == (name == "emulation") and configured == released
    finally:
        OPERATORS.use_tiles("none")


@contextmanager
def threads(count: int):
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


UNITS = pytest.mark.parametrize("unit", ["emulation", "hardware"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(k: int, count: int = 64) -> Tensor:
    """Return activations with outliers, as hidden states have them; some rows have none."""
    x = random(count, k, seed=1)
    x[::3, ::97] *= 30
    return x


# ----------------------------------------------------------------------------------------- the layouts


class Case:
    """A weight in a layout: its bytes, its numbers, its product three times, and the bounds between them, [M, N]."""

    data: Tensor
    table: Tensor | None = None
    weight: Tensor  # the numbers, [N, K] fp32

    def product(
        self, x: Tensor, wide: bool = True, march: str = "", bias: Tensor | None = None
    ) -> Tensor:
        operators = getattr(torch.ops, built(march)) if march else OPERATORS
        return operators.matmul(x, self.data, self.table, bias, len(self.weight), wide)

    def reference(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def rounding(self, x: Tensor) -> Tensor:
        """Return the most that operator and reference may differ by."""
        raise NotImplementedError

    def code_error(self, x: Tensor) -> Tensor:
        """Return the most that rounding the activations may change."""
        steps = (0.5 + 2**-8) * rounding_steps(x, self.block, self.farthest)
        sizes = F.pad(self.weight.double().abs(), (0, -x.shape[1] % self.block))
        return steps.double() @ sizes.unflatten(1, (-1, self.block)).sum(-1).T

    block, farthest = 0, quantize.FARTHEST


def rounding_steps(x: Tensor, block: int, farthest: float) -> Tensor:
    """Return the steps of the codes of activations, [M, B]: codes of 8 bits are multiples of 128."""
    codes, scales = round_activations(x, block, farthest)
    return (scales * torch.where((codes % 128 == 0).all(-1, keepdim=True), 128, 1)).squeeze(-1)


class Floats(Case):
    """bf16."""

    def __init__(self, weight: Tensor):
        self.data = weight.bfloat16()
        self.weight = self.data.float()

    def reference(self, x: Tensor) -> Tensor:
        of_unit = linear_bf16_reference if tiles_in_use() == "none" else linear_tiles_reference
        return of_unit(x.bfloat16(), self.data)

    def rounding(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), len(self.weight))

    def code_error(self, x: Tensor) -> Tensor:  # a rounding of each number, and of each product
        return (2**-8 + x.shape[1] * U) * (x.double().abs() @ self.weight.double().abs().T)


class Integers(Case):
    """int4 and int8."""

    def __init__(self, kind: tuple, codes: Tensor, scale: Tensor):
        self.kind, self.codes, self.scale = kind, codes, scale
        self.block = kind[1] or BLOCK8
        self.half = HALF[quantize.FORMATS[kind[0]].format]
        self.weight = decode_codes(codes, scale, self.half)
        packed = quantize.pack(kind[0], codes, scale)
        self.data, self.table = packed.data, packed.table

    def reference(self, x: Tensor) -> Tensor:
        if self.kind[1]:
            return backends.weight.grouped_reference(x, self.codes, self.scale, self.half)
        return backends.weight.w8a8_reference(x, self.codes, self.scale)

    def blocks(self, t: Tensor) -> Tensor:  # [R, K] -> [R, B, block]
        return F.pad(t, (0, -t.shape[1] % self.block)).unflatten(1, (-1, self.block))

    def rounding(self, x: Tensor) -> Tensor:
        x = x.float()
        sizes = torch.einsum("mbk,nbk->mn", self.blocks(x).abs(), self.blocks(self.weight).abs())
        # u times |terms|, which are at most those of |x| + half a step
        return (2 * -(-x.shape[1] // self.block) + 6) * U * (sizes + self.code_error(x))

    def code_variance(self, x: Tensor) -> Tensor:
        """Return the variance that rounding the activations adds to an output, [M, N]."""
        steps = rounding_steps(x, self.block, self.farthest)
        return steps**2 / 12 @ (self.blocks(self.weight) ** 2).sum(-1).T


class OfBlocks(Case):
    """A type of GGUF."""

    def __init__(self, blocks: Blocks):
        self.blocks, self.kind = blocks, BLOCK_KINDS[blocks.name]
        self.block, self.farthest = rounding_of_blocks(self.kind.elements)
        self.data, self.table = packed_blocks(blocks)
        content = blocks.content.numpy()
        self.weight = widened(blocks.name, content)
        self.sizes = self.term(content, self.kind.least_at).abs()
        if self.kind.least_at is not None:
            self.sizes += self.term(content, self.kind.scale_at).abs()

    def term(self, content: np.ndarray, zero_at: int | None) -> Tensor:
        """Return the weights with scales or minima of 0."""
        raw = content.reshape(len(content), -1, self.kind.size).copy()
        if zero_at is not None:
            set_halves(raw, zero_at, 0)
        return widened(self.blocks.name, raw.reshape(len(content), -1))

    def reference(self, x: Tensor) -> Tensor:
        return blocks_reference(x, self.weight, self.kind.elements)

    def rounding(self, x: Tensor) -> Tensor:
        codes, scales = round_activations(x, self.block, self.farthest)
        sizes = (codes.abs() * scales).flatten(1).double() @ self.sizes.double().T
        return (2 * x.shape[1] // self.kind.group + 8) * U * sizes


def widened(name: str, content: np.ndarray) -> Tensor:
    """Return the numbers of blocks, [N, K] fp32, by the package gguf."""
    return torch.from_numpy(gguf.dequantize(content, gguf.GGMLQuantizationType[name]).copy())


def case_of(format: str | tuple, n: int = N, k: int = K, seed: int = 0) -> Case:
    """Return a layer with random weights of a format; with zeros, random zero points and fp16 scales."""
    if format in BLOCK_KINDS:
        return OfBlocks(random_blocks(format, n, k, seed))
    weight = random(n, k, seed=seed) * k**-0.5
    if format == "bf16":
        return Floats(weight)
    codes, scale = quantize.FORMATS["int4" if format[2:] else format[0]].encode(weight, format[1])
    if format[2:]:
        half, generator = 8, torch.Generator().manual_seed(0)
        if format[0] == "int8":
            half, scale = 127, scale / 16
            codes = torch.randint(-128, 128, codes.shape, generator=generator, dtype=torch.int8)
        zero = torch.randint(-half, half + 1, scale.shape, generator=generator, dtype=torch.int8)
        scale = join_zeros(scale.half() * 1.001, zero, half=half + half % 2)
    return Integers(format, codes, scale)


def width(format: str | tuple) -> int:
    """Return a K that has panels and a ragged end; of int8 10 blocks and 20 values, of bf16 an odd one."""
    if format in BLOCK_KINDS:
        return K
    return 1301 if format == "bf16" else 1408 if format[1] else 1300


def assert_within(got: Tensor, want: Tensor, most: Tensor) -> None:
    over = (got - want).abs() - most
    off = f"{int((over > 0).sum())} of {over.numel()} outputs are off, by up to {over.max():.2e}"
    assert (over <= 0).all(), off


# --------------------------------------------------------------------------------- the same for all

# K of linear layers of models from the demo to LLaMA 70B
REAL = (256, 2816, 4096, 11008, *slow([512, 768, 1536, 5120, 8192, 13824, 14336, 16384, 28672]))


@pytest.mark.parametrize("k", REAL)
@EVERY
def test_products(format, k):
    """Within the bounds of the reference and of the exact product, which is unbiased."""
    case, x = case_of(format, k=k), rows(k)
    want, exact = case.reference(x), x.double() @ case.weight.double().T
    rounding, codes = case.rounding(x), case.code_error(x)
    for count in ROWS:
        got = case.product(x[:count])
        assert got.shape == (count, N) and got.dtype == torch.float32
        assert_within(got, want[:count], rounding[:count])
        assert_within(got, exact[:count], (rounding + codes)[:count])
    if isinstance(case, Integers):
        error = case.product(x) - exact
        assert error.square().mean() < 1.2**2 * case.code_variance(x).mean()


@pytest.mark.parametrize("n", [1, 31, 32, 33, 40, 64, 97])
@EVERY
def test_outputs(format, n):
    """Any number of them, and of inputs where there are no groups; packing is undone; narrow ones are rounded."""
    k = {"bf16": n, ("int8", 0): 4 * n}.get(format, 256)
    case, x = case_of(format, n, k), random(3, k)
    assert_within(case.product(x), case.reference(x), case.rounding(x))
    narrow = x.bfloat16()
    bias = random(n, seed=3).bfloat16()
    assert torch.equal(case.product(narrow, False), case.product(narrow).bfloat16())
    with_bias = case.product(narrow, bias=bias)
    assert torch.equal(with_bias, case.product(narrow) + bias)
    assert (
        torch.equal(case.product(narrow, False, bias=bias), with_bias.bfloat16())
        or format != "bf16"
    )
    if isinstance(case, Integers):
        packed = quantize.pack(format[0], case.codes, case.scale)
        codes, scale = backends.weight.unpack(packed)
        assert torch.equal(scale, case.scale) and torch.equal(codes, case.codes)
        numbers = packed.numbers()
        assert torch.equal(numbers, case.weight)


def beside_strange_rows(row: Tensor) -> Tensor:
    """Return the row first and last, with numbers that are none and huge ones between. row: [K]"""
    return torch.stack((row, torch.full_like(row, float("nan")), torch.full_like(row, 1e30), row))


def check_rows_alone(product: Callable[[Tensor, bool], Tensor], x: Tensor, most: int = 64) -> None:
    """Bit for bit, for every number of rows and every place, next to numbers that are none too."""
    for wide in (False, True):
        alone = torch.cat([product(row[None], wide) for row in x])  # [M, N]
        assert alone.dtype == (torch.float32 if wide else x.dtype)
        for count in range(1, most + 1):
            assert torch.equal(product(x[:count], wide), alone[:count])
            assert torch.equal(product(x[-count:], wide), alone[-count:])
    assert torch.equal(product(x.repeat(5, 1), True), alone.repeat(5, 1))
    mixed = product(beside_strange_rows(x[5]), True)
    assert torch.equal(mixed[[0, 3]], alone[5:6].expand(2, -1))
    assert torch.equal(product(x.float(), True), alone)  # fp32 holds every bf16 number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@EVERY
def test_a_row_does_not_depend_on_the_others(format, dtype):
    case = case_of(format, k=width(format))
    check_rows_alone(case.product, rows(width(format)).to(dtype))


@EVERY
def test_leading_dimensions_and_strides(format):
    case, x = case_of(format, 33, 256), random(3, 4, 512)[..., :256]
    want = case.product(x.reshape(12, -1).contiguous()).view(3, 4, 33)
    assert torch.equal(case.product(x), want)
    assert torch.equal(case.product(x.transpose(0, 1)), want.transpose(0, 1))
    assert torch.equal(case.product(x[0, 0]), want[0, 0])
    assert case.product(x[:0]).shape == (0, 4, 33)


@EVERY
def test_threads_do_not_matter(format):
    case, x = case_of(format, 1000, 512), random(60, 512)
    ids = torch.arange(1000).repeat(2)
    want = case.product(x)
    assert_within(want, case.reference(x), case.rounding(x))  # of many strips
    for count in (2, 3):
        with threads(count):
            assert torch.equal(case.product(x), want)
            if format not in BLOCK_KINDS:
                continue
            assert torch.equal(packed_blocks(case.blocks)[0], case.data)
            out = torch.empty(2000, 512)
            OPERATORS.read_rows(case.data, case.table, ids, out)
            assert torch.equal(out, case.weight[ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@EVERY_CODED
def test_numbers_at_the_edges(format, dtype):
    """Zeros, NaN, infinities, huge and tiny rows."""
    case, x = case_of(format, 33, 256), random(8, 256, seed=1).to(dtype)
    x[0], x[1, 7], x[2, 200], x[3, 100] = 0, float("nan"), float("inf"), -float("inf")
    x[4] *= 1e30
    x[5] *= 1e-38  # below what the codes distinguish from 0
    x[6] *= 1e-25
    y = case.product(x)
    assert (y[0] == 0).all() and y[5].abs().max() < 1e-30
    assert y[1:4].isnan().all(), "NaN and infinity are never turned into numbers"
    for row, size in ((4, 1e30), (6, 1e-25), (7, 1.0)):
        of_row = x[row : row + 1].float() / size
        most = (case.code_error(of_row) + case.rounding(of_row)) * (1 + 1e-6)
        assert_within(y[row : row + 1] / size, of_row.double() @ case.weight.double().T, most)
    clean = [0, 4, 5, 6, 7]
    assert torch.equal(y[clean], case.product(x[clean].contiguous()))


@EVERY
def test_a_wrong_code_is_seen(format):
    """One of 256 x 77 codes off by one step breaks the bound against the reference."""
    case, x = case_of(format, k=256), random(5, 256)
    if format == "bf16":
        case.data = case.data.clone()
        case.data.view(torch.int16)[70, 200] ^= 1
        case.reference = case_of(format, k=256).reference
    elif format in BLOCK_KINDS:
        case.blocks.content[70, 60 if case.kind.elements == 256 else 10] ^= 1
        case.data, _ = packed_blocks(case.blocks)
    else:
        case.codes[70, 200] += 1 if case.codes[70, 200] < 7 else -1
    with pytest.raises(AssertionError, match="outputs are off"):
        assert_within(case.product(x), case.reference(x), case.rounding(x))


@pytest.mark.parametrize("march", OTHERS)
@EVERY
def test_builds_agree(format, march):
    """AVX-512 and AVX2 do the same fused steps: the same bits, of bf16 always. Plain loops round twice as often."""
    case, x = case_of(format, k=width(format)), rows(width(format))
    for given in (x, x.bfloat16()):
        want = case.product(given)
        alone = torch.cat([case.product(row[None], True, march) for row in given])
        check_rows_alone(lambda x, wide: case.product(x, wide, march), given)
        if (march == "x86-64-v3") == FUSED or format == "bf16":
            assert torch.equal(alone, want)
        else:
            assert_within(alone, case.reference(given.float()), 2 * case.rounding(given.float()))
    if format in BLOCK_KINDS:
        operators = getattr(torch.ops, built(march))
        out = torch.empty_like(case.data)
        operators.pack_blocks(case.blocks.content, case.kind.type_id, None, out)
        assert torch.equal(out, case.data)
        numbers = torch.empty(N, K)
        operators.read_rows(out, case.table, torch.arange(N), numbers)
        assert torch.equal(numbers, case.weight)


EXPERT = torch.tensor([3, 0, 3, 3, 1, 0, 3, 1, 1] * 6)  # 2 has none; 3 has enough rows for tiles


@pytest.mark.parametrize("unit", ["none", "emulation"])
@EVERY
def test_experts(format, unit):
    """Every row has its own expert's product and bias, bit for bit; an idle expert is not read; others are refused."""
    n, k = 48, 301 if format == "bf16" else 256
    each = [case_of(format, n, k, seed) for seed in range(4)]
    data = torch.stack([case.data for case in each])
    data[2] = 255 if data.dtype == torch.uint8 else float("nan")
    x, bias = random(len(EXPERT), k, seed=1).bfloat16(), random(4, n).bfloat16()
    OPERATORS.use_tiles(unit)
    for wide, biases in ((False, None), (True, None), (True, bias)):
        y = OPERATORS.matmul(x, data, each[0].table, biases, n, wide, EXPERT)
        for row, e in enumerate(EXPERT.tolist()):
            own = each[e].product(x[row : row + 1], wide, bias=None if biases is None else bias[e])
            assert torch.equal(y[row], own[0])
    for bad in (4, -1):
        with pytest.raises(RuntimeError, match=f"there is no expert {bad}"):
            OPERATORS.matmul(
                x, data, each[0].table, None, n, True, torch.where(EXPERT == 1, bad, EXPERT)
            )


# ----------------------------------------------------------------------------------- on AMX tiles

ON_TILES = (1, 3, 8, 16, 17, 33)  # rows


@UNITS
@EVERY_CODED
def test_integer_sums_on_tiles_are_those_of_other_processors(format, unit):
    in_16_bits = format == "Q8_0" or format[0] == "int8"
    if in_16_bits and not IN_8_BITS:
        pytest.skip("int8 has 16 bits here")
    k = K if format in BLOCK_KINDS else 1408 if format[1] else 1280  # panels, and a part of one
    case, x = case_of(format, k=k), rows(k, 33)
    x[5], x[7] = float("nan"), 1e30
    want = [case.product(x[:count]).nan_to_num(7) for count in ON_TILES]
    for count in (1, 3):
        with threads(count), tiles(unit):
            for number, y in zip(ON_TILES, want):
                assert torch.equal(case.product(x[:number]).nan_to_num(7), y), number


# less than a tile of outputs, tiles that overlap, strips; K: part of a step, a step, with rests, odd
@UNITS
@pytest.mark.parametrize("shape", [
    (1, 1), (3, 2), (15, 64), (17, 32), (40, 96), (77, 301), (130, 640), (600, 1090)
], ids=str)  # fmt: skip
def test_bf16_on_tiles_has_the_bits_of_its_reference(shape, unit):
    """Many rows take several strips and several passes."""
    case, x = Floats(random(*shape) * shape[1] ** -0.5), random(280, shape[1], seed=1).bfloat16()
    other = case.reference(x[:33])
    with tiles(unit):
        want = case.reference(x[:33])
        for count in ON_TILES:
            assert torch.equal(case.product(x[:count]), want[:count])
        for count in (70, 280):
            assert torch.equal(case.product(x[:count])[:33], want)
        if shape[1] in (301, 640):
            check_rows_alone(case.product, x[:33], 33)
            with threads(3):
                assert torch.equal(case.product(x[:33]), want)
    assert shape[1] < 96 or not torch.equal(want, other), "the order of sums is not seen"


@UNITS
@pytest.mark.parametrize(
    ("x", "weight", "want"),
    [
        ([2.0**-130], [2.0**100], 0.0),  # an operand below 2^-126
        ([2.0**-100], [2.0**-27], 0.0),  # a product
        ([2.0**-100], [2.0**-26], 2.0**-126),
        ([2.0**-63, 0, 2.0**-63], [2.0**-63, 0, -(2.0**-63) * 0.75], 0.0),  # a sum of one chain
        ([2.0**-63, 2.0**-63], [2.0**-63, -(2.0**-63) * 1.5], 0.0),  # of both
        ([2.0**-63, *[0] * 31, 2.0**-63], [2.0**-63, *[0] * 31, -(2.0**-63) * 1.5], -0.0),  # of steps
        # fused: a product that is rounded or flushed first is lost
        ([2.0**-63, 0, 2.0**-64], [2.0**-62, 0, -(2.0**-64) * 1.5], 2.0**-125 - 1.5 * 2.0**-128),
    ],
)  # fmt: skip
def test_numbers_below_the_smallest_normal_one_are_zeros_on_tiles(unit, x, weight, want):
    with tiles(unit):
        y = Floats(torch.tensor([weight])).product(torch.tensor([x]).bfloat16())
    assert str(y.item()) == str(want)  # the sign, too


# ------------------------------------------------------------------------------- the largest codes


@pytest.mark.parametrize("format", INTEGERS, ids=str)
def test_extreme_codes(format):
    """Sums of the largest products, in every place; of outliers, which have 15 bits; and of outliers among small numbers.

    -8, with zeros -16; of 8 bits -127, in groups -128, with zeros -255.
    """
    size = format[1] or BLOCK8
    k = 32 * size
    most = -8 if format[0] == "int4" else -128 if format[1] else -127
    scale = torch.ones(33, k // size).bfloat16() if format[1] else torch.ones(33)
    codes = torch.full((33, k), most, dtype=torch.int8)
    if format[2:]:
        zero = min(-most, 127)
        scale = join_zeros(scale, torch.full_like(scale, zero, dtype=torch.int8), -most)
        most -= zero
    case = Integers(format, codes, scale)
    x = torch.zeros(5, k)
    x[0, size : 2 * size] = 127
    x[1, size : 2 * size] = torch.where(torch.arange(size) % 2 == 0, 127, 63 / 128)
    x[2] = 1
    x[3], x[4] = 127, -127
    steps = rounding_steps(x, size, quantize.FARTHEST)
    assert steps[1, 1] == 1 / 128 and (steps[2] == torch.tensor(1 / 127 / 128) * 128).all()
    y = case.product(x)
    assert (y[0] == size * 127 * most).all() and (y[1] == size / 2 * (127 + 63 / 128) * most).all()
    assert (y[3] == k * 127 * most).all() and torch.equal(y[4], -y[3])
    assert torch.equal(y[2:3], case.product(x[2:3])) and torch.equal(y[:1], case.product(x[:1]))


@pytest.mark.parametrize("build", ["native", "tiles", *OTHERS])
@pytest.mark.parametrize("name", [n for n, kind in BLOCK_KINDS.items() if kind.elements == 256])
def test_the_largest_sums_of_integer_scales_fit_32_bits(name, build):
    """The largest codes and scales, and a block of activations that holds nothing but outliers."""
    case = OfBlocks(random_blocks(name, N, 4096))
    raw = case.blocks.content.view(N, -1, case.kind.size)
    # the least codes and scales of Q3_K and Q6_K are the largest
    raw[:] = 0 if case.kind.least_at is None else 255
    if name == "Q6_K":
        raw[..., 192:208] = 0x80  # scales of -128
    for at in (case.kind.scale_at, case.kind.least_at):
        if at is not None:
            set_halves(raw.numpy(), at, 1)
    case = OfBlocks(case.blocks)
    case.sizes = 2 * case.weight.abs().amax() * torch.ones_like(case.weight)
    x = torch.zeros(17, 4096)
    x[:, 128:256] = 127
    x[1::2] *= -1
    x[2, 200] = 127 * 33
    OPERATORS.use_tiles("emulation" if build == "tiles" else "none")  # `_no_tiles` ends it
    y = case.product(x, march="" if build in ("native", "tiles") else build)
    assert_within(y, case.reference(x), 2 * case.rounding(x))


def test_bf16_numbers_at_the_edges():
    """NaN and infinity stay in their row and output; memory behind a row of odd length is not multiplied."""
    weight, x = random(67, 301) * 301**-0.5, random(8, 301, seed=1).bfloat16()
    weight[5, 0], weight[66, 300] = float("nan"), float("inf")  # beside the ends of rows 4 and 65
    x[0], x[1, 0], x[2, 300] = 0, float("nan"), float("inf")
    x[3] *= 1e30
    case = Floats(weight)
    for unit in ("none", "emulation"):
        OPERATORS.use_tiles(unit)
        y, want = case.product(x), case.reference(x)
        assert torch.equal(y.isnan(), want.isnan()) and torch.equal(
            y.nan_to_num(7), want.nan_to_num(7)
        )
        assert (y[0, :5] == 0).all() and y[4:, 5].isnan().all() and y[4:, 66].isinf().all()
        assert y[1].isnan().all() and not y[2, :5].isfinite().any()
    largest = torch.full((1, 2), torch.finfo(torch.bfloat16).max)
    assert Floats(largest).product(largest.bfloat16()).item() == float("inf")


# -------------------------------------------------------------------------------- blocks of a file

FILE = Path("m.gguf")


@EVERY_BLOCK
def test_numbers_are_the_packages(name):
    """In fp32, and rounded once in bf16: of the file's blocks, and of packed ones in any order."""
    content = random_blocks(name, N, K).content * 1
    want = widened(name, content.numpy())
    assert 0.5 < want.std() * K**0.5 < 2 and want.mean().abs() * K**0.5 < 0.2  # as models have them
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    type_id = BLOCK_KINDS[name].type_id
    straight = packed_blocks(Blocks(name, content, type_id, K))
    turned = packed_blocks(Blocks(name, content, type_id, K, order))
    ids = torch.tensor([0, 76, 5, 5, 31, 32, 64])
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(N, K, dtype=dtype)
        OPERATORS.widen_blocks(content.flatten(), type_id, out)
        assert torch.equal(out, want.to(dtype))
        for operands, numbers in ((straight, want), (turned, want[order])):
            for some in (torch.arange(N), ids):
                out = torch.empty(len(some), K, dtype=dtype)
                OPERATORS.read_rows(*operands, some, out)
                assert torch.equal(out, numbers[some].to(dtype))
    embedding = Embedding(weight_of_blocks(Blocks(name, content, type_id, K)))
    tokens = torch.tensor([[0, 76, 7], [7, 31, 32]])
    assert torch.equal(embedding(tokens), want[tokens]) and embedding(tokens[:, :0]).shape == (
        2,
        0,
        K,
    )


@EVERY_BLOCK
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


PARTS = [
    ("Q4_K", "Q6_K", "Q5_0"),
    ("bf16", "Q8_0", "Q4_K", "bf16"),
    ("Q4_0", "Q5_0", "Q5_1", "Q4_1"),
]


@pytest.mark.parametrize("outputs", [96, 40])
@pytest.mark.parametrize("names", PARTS, ids="-".join)
def test_parts_of_several_layouts(names, outputs):
    """A layer has the bits of a layer of each part, with a bias and in a stack too; a strip may end with a part."""
    parts, each, numbers = [], [], []
    for seed, name in enumerate(names):
        if name == "bf16":
            number = (random(outputs, 512, seed=seed + 7) / 20).bfloat16()
            part = Numbers(number)
            weight = number
        else:
            part = random_blocks(name, outputs, 512, seed)
            number = widened(name, part.content.numpy())
            weight = weight_of_blocks(part)
        parts.append(part)
        each.append(weight)
        numbers.append(number.float())
    bias = random(len(names) * outputs).bfloat16()
    layer = layer_of(weight_of_blocks(*parts), fp32_out=True)
    with_bias = layer_of(weight_of_blocks(*parts), bias, fp32_out=True)
    together = torch.cat(numbers)
    assert torch.equal(layer.dequantize(), together)
    ids = torch.tensor([0, outputs - 1, outputs, 2 * outputs, 3 * outputs - 1])
    assert torch.equal(rows_of(layer, ids).weight, together[ids].bfloat16())
    for x in (random(1, 512), random(2, 13, 512).bfloat16()):
        alone = torch.cat([layer_of(weight, fp32_out=True)(x) for weight in each], -1)
        assert torch.equal(layer(x), alone) and torch.equal(with_bias(x), alone + bias)
    half = random(3, 512).half()
    assert torch.equal(layer(half), layer(half.float()))
    experts = layer_of(stack(iter([weight_of_blocks(*parts)] * 3), 3))
    x = random(9, 512, seed=1)
    want = layer_of(weight_of_blocks(*parts))(x)
    assert torch.equal(experts(x, torch.tensor([2, 0, 2, 2, 0, 2, 2, 0, 0])), want)


# ------------------------------------------------------------------------- operands that do not fit

CASE = case_of("Q4_K", 40, 512)
SIZE = len(CASE.data)


def table_with(place: int, value: int) -> Tensor:
    table = CASE.table.clone()
    table[place] = value
    return table


FIELDS = ("outputs", "inputs", "bytes", "layout", "outputs of a part", "group", "first byte")
NO_BYTES = torch.zeros(0, dtype=torch.uint8)
TABLES = {  # packed blocks and tables that lie
    **{
        f"{name} {value}": (CASE.data, table_with(place, value))
        for place, name in enumerate(FIELDS)
        for value in (-1, 0, 1, 33, 256, 1024, 2**40, -(2**40), 2**62, 2**63 - 1)
        if (place, value) not in ((5, 0), (6, 0))
    },
    **{f"of {size} words": (CASE.data, CASE.table[:size]) for size in (3, 1, 0)},
    "long": (CASE.data, torch.cat((CASE.table, CASE.table[:2]))),
    "int32": (CASE.data, CASE.table.int()),
    "float": (CASE.data, CASE.table.double()),
    "strided": (CASE.data, CASE.table.repeat_interleave(2)[::2]),
    "twice": (CASE.data, torch.cat((CASE.table, CASE.table[3:]))),
    "a negative part": (CASE.data, torch.tensor([40, 512, SIZE, 12, -40, 0, 0, 12, 80, 0, 0])),
    "nothing": (NO_BYTES, torch.tensor([1, 0, 0, 12, 1, 0, 0])),
    "no outputs": (NO_BYTES, torch.tensor([0, 512, 0, 12, 0, 0, 0])),
    "a wide nothing": (NO_BYTES, torch.tensor([32, 2**62, 0, 12, 32, 0, 0])),
    "cut": (CASE.data[:-1], CASE.table),
    "cut to one": (CASE.data[:1], CASE.table),
    "too long": (torch.cat((CASE.data, CASE.data[:1])), CASE.table),
    "no dimension": (CASE.data[0], CASE.table),
    "signed": (CASE.data.view(torch.int8), CASE.table),
    "every second": (CASE.data.repeat_interleave(2)[::2], CASE.table),
}  # fmt: skip


def test_tables_that_lie_are_refused():
    """Never read past the end of a weight."""
    for how, lie in TABLES.items():
        for inputs in (512, 256, 0):
            for dtype in (torch.float32, torch.bfloat16):
                with pytest.raises((RuntimeError, IndexError)):
                    OPERATORS.matmul(torch.zeros(3, inputs, dtype=dtype), *lie, None, 40, True)
                    pytest.fail(f"{how} was multiplied")
            with pytest.raises((RuntimeError, IndexError)):
                OPERATORS.read_rows(*lie, torch.zeros(17).long(), torch.zeros(17, inputs))
                pytest.fail(f"{how} was read")


@EVERY
def test_operands_that_do_not_fit_are_refused(format):
    """Rows of another width or type, a bias of another size, a group of another layout, and other outputs."""
    case, one = case_of(format, 33, 256), torch.zeros(2, dtype=torch.long)
    good = {
        "x": random(2, 256),
        "data": case.data,
        "table": case.table,
        "bias": None,
        "outputs": 33,
    }
    good |= {"wide": True, "expert": None}
    rows = (random(2, 512), random(2, 128), random(2, 256).half(), random(2, 256).double())
    wrong = [({"x": x}, "activations must be|does not fit") for x in rows]
    for bias in (torch.zeros(32).bfloat16(), torch.zeros(33), torch.zeros(66).bfloat16()[::2]):
        wrong.append(({"bias": bias}, "bias must hold one bfloat16 per output"))
    for outputs in (32, 34):
        wrong.append(({"outputs": outputs}, f"weights of 33 outputs do not fit {outputs}"))
    wrong.append(({"expert": one}, "do not fit"))
    wrong.append(({"data": case.data[None], "expert": one[:1]}, "one int64 per row"))
    if format == "bf16":
        for weight in (case.weight, case.data.T, random(256, 33).bfloat16().T):
            wrong.append(({"data": weight}, "must be bfloat16|do(es)? not fit|in one piece"))
    else:
        lies = ((3, 99, "no layout 99"), (5, 16, "groups of layout"), (6, 64, "follow each other"))
        for place, value, says in lies:
            table = case.table.clone()
            table[place] = value
            wrong.append(({"table": table}, says))
    OPERATORS.matmul(*good.values())
    for change, says in wrong:
        with pytest.raises(RuntimeError, match=says):
            OPERATORS.matmul(*(good | change).values())


def test_rows_out_of_range_are_refused_with_threads():
    """A thread of the pool cannot raise: rows are checked before it starts."""
    for worst in (10**6, 40, -1):
        ids = torch.zeros(4000, dtype=torch.long)
        ids[::7] = worst
        with threads(3), pytest.raises(RuntimeError, match=f"a row must be 0 to 39; it is {worst}"):
            OPERATORS.read_rows(CASE.data, CASE.table, ids, torch.empty(4000, 512))


# ----------------------------------------------------------------------------- which product serves


def test_operators_refuse_inputs_that_need_gradients():
    """All of them, in C++ and in Python, also in a list; they run where gradients are off."""
    for device in ("cuda", "cpu"):  # with those in Triton, where it is installed
        choose(torch.device(device))
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gpt_eagle::")]
    refuses = torch._C._dispatch_has_kernel_for_dispatch_key
    assert len(names) > 40 and not [name for name in names if not refuses(name, "Autograd")]
    x, weight = random(5, 64).bfloat16(), random(33, 64).bfloat16()
    product = choose(x.device).linear
    want = product(x, weight)
    weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"gpt_eagle::matmul has no gradients.*use_backend\(mod"):
        product(x, weight)
    with torch.no_grad():
        assert torch.equal(product(x, weight), want)
    operands: list[Any] = [random(1, 1, 2, 16), random(1, 2, 4, 16), random(1, 2, 4, 16)]
    window = (torch.zeros(1, dtype=torch.long), torch.ones(1, 1, 1, dtype=torch.bool))
    for i in range(3):
        given = [x.clone().requires_grad_(i == n) for n, x in enumerate(operands)]
        with pytest.raises(RuntimeError, match="gpt_eagle::tree_attention has no gradients"):
            OPERATORS.tree_attention(*given, *window)
    buffers = [random(1, 1, 4, 4), random(1, 1, 4, 4).requires_grad_() * 1]
    with pytest.raises(RuntimeError, match="gpt_eagle::move_rows has no gradients"):
        OPERATORS.move_rows(buffers, window[0], torch.zeros(1, 1, dtype=torch.long))
