"""The CPU operators: against their references, row by row, for three processors, and at the edges.

Products with bf16 weights equal their reference bit for bit, on every processor. Those with int8 activations have
bounds: u = 2^-24 is fp32's unit roundoff, B the number of blocks of k, t_b the terms of a sum over blocks.
- Operator and reference add the same B integers times scales, in different orders and roundings: they differ by at
  most (2 B + 6) u sum |t_b|.
- Rounding a block of activations to codes moves each of them by at most half a step, s / 2 with s = largest / 127 of
  those that are no outliers: the product with the dequantized weight differs by at most sum_b s_b / 2 sum |w|, and by
  fp32 rounding.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_builds import OTHERS  # the same source for other processors
from torch import Tensor

import backends.attention
import backends.cpp.build
import backends.cpp.layout
import backends.experts
import backends.linear
import backends.weight
import quantize
import reference
from backends.epilogues import rotary_cache_plainly
from backends.library import tiles_in_use
from backends.weight import BLOCK8, HALF, decode_codes, join_zeros
from helpers import slow, with_head_norms
from quantize import FORMATS
from reference import TORCH, choose

U = 2.0**-24
ROWS = (1, 5, 26, 60, 64)  # plain decoding, a chain, EAGLE-1's tree, EAGLE-2's, the largest
KINDS = [
    ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128), ("int8", 64), ("int4", 64, "zeros"),
    ("int8", 64, "zeros"),
]  # fmt: skip
MISSING = backends.cpp.build.load_operators()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the operators cannot be built: {MISSING}")


@pytest.fixture(autouse=True)
def _no_tiles():
    """Multiply as on a processor without AMX; test_tiles.py tests the tiles."""
    before = tiles_in_use()
    torch.ops.gpt_eagle.use_tiles("none")
    yield
    torch.ops.gpt_eagle.use_tiles(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Codes and scales, and the same product three times: operator, reference, float."""

    def __init__(self, kind: tuple, codes: Tensor, scale: Tensor):
        form, self.group = FORMATS[kind[0]], kind[1]
        self.block = self.group or BLOCK8
        self.codes, self.scale = codes, scale
        self.weight = decode_codes(codes, scale, HALF[form.format])  # [N, K] fp32
        self.half = {"int4": 8, "int8": 128}[kind[0]]
        packed = quantize.pack(kind[0], codes, scale)
        self.packed, self.table = packed.data, packed.table

    def operator(self, x: Tensor, fp32_out: bool = False, namespace: str = "gpt_eagle") -> Tensor:
        matmul = getattr(torch.ops, namespace).matmul
        return matmul(x, self.packed, self.table, None, len(self.codes), fp32_out)

    def reference(self, x: Tensor) -> Tensor:
        if self.group:
            return backends.weight.grouped_reference(x, self.codes, self.scale, self.half)
        return backends.weight.w8a8_reference(x, self.codes, self.scale)

    def blocks(self, t: Tensor) -> Tensor:  # [R, K] -> [R, B, block]
        return F.pad(t, (0, -t.shape[1] % self.block)).unflatten(1, (-1, self.block))

    def rounding(self, x: Tensor) -> Tensor:
        """Most that operator and reference may differ by, [M, N]."""
        inputs, weights = self.blocks(x.float()).abs(), self.blocks(self.weight).abs()
        sizes = torch.einsum("mbk,nbk->mn", inputs, weights)
        # u times |terms|, which are at most those of |x| + half a step
        return (2 * -(-x.shape[1] // self.block) + 6) * U * (sizes + self.code_error(x))

    def code_error(self, x: Tensor) -> Tensor:
        """Most that rounding the activations may change, [M, N]."""
        steps = rounding_steps(x, self.block)
        return (0.5 + 2**-8) * steps @ self.blocks(self.weight).abs().sum(-1).T

    def code_variance(self, x: Tensor) -> Tensor:
        """The variance that rounding the activations adds to an output, [M, N]."""
        steps = rounding_steps(x, self.block)
        return steps**2 / 12 @ (self.blocks(self.weight) ** 2).sum(-1).T


def rounding_steps(x: Tensor, block: int, *farthest: int) -> Tensor:
    """The steps of the codes of activations, [M, B]: codes of 8 bits are multiples of 128."""
    codes, scales = quantize.round_activations(x, block, *farthest)
    return (scales * torch.where((codes % 128 == 0).all(-1, keepdim=True), 128, 1)).squeeze(-1)


def make_case(kind: tuple, n: int, k: int) -> Case:
    """A random weight, rounded; with zeros, random zero points and fp16 scales."""
    weight = random(n, k) * k**-0.5
    codes, scale = FORMATS["int4" if kind[2:] else kind[0]].encode(weight, kind[1])
    if kind[2:]:
        generator = torch.Generator().manual_seed(0)
        half = 8
        if kind[0] == "int8":
            half = 127
            codes = torch.randint(-128, 128, codes.shape, generator=generator, dtype=torch.int8)
            scale = scale / 16
        zero = torch.randint(-half, half + 1, scale.shape, generator=generator, dtype=torch.int8)
        scale = join_zeros(scale.half() * 1.001, zero, half=half + half % 2)
    return Case(kind, codes, scale)


def assert_within(got: Tensor, want: Tensor, most: Tensor) -> None:
    over = (got - want).abs() - most
    off = f"{int((over > 0).sum())} of {over.numel()} outputs are off, by up to {over.max():.2e}"
    assert (over <= 0).all(), off


def beside_strange_rows(row: Tensor) -> Tensor:
    """The row first and last, with numbers that are none and huge ones between. row: [K]"""
    return torch.stack((row, torch.full_like(row, float("nan")), torch.full_like(row, 1e30), row))


# -------------------------------------------------------------------------------------- real shapes
# (N, K) of every linear layer: query, key and value fused; gate and up fused; the head's fc beside its own layer,
# which has the target's shapes. N is cut to 64 outputs and a remainder, `test_an_output_does_not_depend_on_the_others`
# is the reason that this suffices; K is real.

MOST_ROWS = 64 + 13


def layers(dim: int, ffn: int, kv: int, vocab: int) -> list[tuple[int, int]]:
    attention, feed_forward = [(dim + 2 * kv, dim), (dim, dim)], [(2 * ffn, dim), (dim, ffn)]
    return [*attention, *feed_forward, (vocab, dim), (dim, 2 * dim)]


MODELS = {
    "llama2-7b": layers(4096, 11008, 4096, 32000), "llama3-8b": layers(4096, 14336, 1024, 128256),
    "llama2-13b": layers(5120, 13824, 5120, 32000), "llama2-70b": layers(8192, 28672, 1024, 32000),
    "llama3-70b": layers(8192, 28672, 1024, 128256), "demo": layers(256, 768, 128, 4096),
    "demo head": layers(256, 1536, 128, 4096),
}  # fmt: skip
CUT = sorted({(min(n, MOST_ROWS), k) for shapes in MODELS.values() for n, k in shapes})
FEW = CUT[::4]


def check_product(case: Any, x: Tensor) -> Tensor:
    """A product is within its bounds of the reference and of the exact one, which is returned."""
    want, exact = case.reference(x), x.double() @ case.weight.double().T
    rounding, codes = case.rounding(x), case.code_error(x)
    for rows in ROWS:
        got = case.operator(x[:rows], True)
        assert got.shape == (rows, len(case.weight)) and got.dtype == torch.float32
        assert_within(got, want[:rows], rounding[:rows])
        assert_within(got, exact[:rows], (rounding + codes)[:rows])
    return exact


@pytest.mark.parametrize(
    "shape", [*FEW, *slow((shape,) for shape in CUT if shape not in FEW)], ids=str
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_real_shapes(kind, shape):
    case, x = make_case(kind, *shape), random(64, shape[1], seed=1)
    x[:, ::97] *= 30  # outliers, as hidden states have them
    error = case.operator(x, True) - check_product(case, x)
    assert error.square().mean() < 1.2**2 * case.code_variance(x).mean()


@pytest.mark.parametrize("kind", [("int8", 0), ("int4", 128)], ids=str)
def test_an_output_does_not_depend_on_the_others(kind):
    """Strips are alike: those of a large layer give the bits that they give alone, the last one included."""
    case, x = make_case(kind, 4096 + 17, 256), random(26, 256)
    whole = case.operator(x)
    for first in (0, 64, 2048, 4096):
        rows = slice(first, first + 64)
        alone = Case(kind, case.codes[rows], case.scale[rows])
        assert torch.equal(alone.operator(x), whole[:, rows])


# --------------------------------------------------------------------------------------------- rows


def check_rows_alone(case: Any, x: Tensor) -> None:
    """Bit for bit, for every number of rows and every place, next to numbers that are none too. x: [64, K]"""
    for wide in (False, True):
        alone = torch.cat([case.operator(row[None], wide) for row in x])  # [64, N]
        assert alone.dtype == (torch.float32 if wide else x.dtype)
        for rows in range(1, 65):
            assert torch.equal(case.operator(x[:rows], wide), alone[:rows])
            assert torch.equal(case.operator(x[-rows:], wide), alone[-rows:])
    mixed = case.operator(beside_strange_rows(x[5]), True)
    assert torch.equal(mixed[[0, 3]], alone[5:6].expand(2, -1))
    assert torch.equal(case.operator(x.float(), True), alone)  # fp32 holds every bf16 number


def check_leading_dimensions(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Of a product with 33 outputs. x: [3, 4, K], not contiguous"""
    want = product(x.reshape(12, -1).contiguous()).view(3, 4, 33)
    assert torch.equal(product(x), want)
    assert torch.equal(product(x.transpose(0, 1)), want.transpose(0, 1))
    assert torch.equal(product(x[0, 0]), want[0, 0])
    assert product(x[:0]).shape == (0, 4, 33)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_narrow_outputs_are_the_wide_ones_rounded(kind):
    case, x = make_case(kind, 77, 256), random(26, 256).bfloat16()
    assert torch.equal(case.operator(x), case.operator(x, True).bfloat16())


# -------------------------------------------------------------------------------------------- edges


def check_edges(case: Any, dtype: torch.dtype) -> None:
    """Zeros, NaN, infinities, huge and tiny rows through a product with 256 inputs."""
    x = random(8, 256, seed=1).to(dtype)
    x[0] = 0
    x[1, 7] = float("nan")
    x[2, 200] = float("inf")
    x[3, 100] = -float("inf")
    x[4] *= 1e30
    x[5] *= 1e-38  # below what the codes distinguish from 0
    x[6] *= 1e-25
    y = case.operator(x, True)
    assert (y[0] == 0).all()
    assert y[1:4].isnan().all(), "NaN and infinity are never turned into numbers"
    assert y[5].abs().max() < 1e-30
    for row, size in ((4, 1e30), (6, 1e-25), (7, 1.0)):
        rows = x[row : row + 1].float() / size
        exact = rows.double() @ case.weight.double().T
        most = (case.code_error(rows) + case.rounding(rows)) * (1 + 1e-6)
        assert_within(y[row : row + 1] / size, exact, most)
    clean = [0, 4, 5, 6, 7]
    assert torch.equal(y[clean], case.operator(x[clean].contiguous(), True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_extreme_codes(kind):
    """Sums of the largest products, in every place, times 127.

    -8, with zeros -16; of 8 bits -127, in groups -128, with zeros -255.
    """
    most = -8 if kind[0] == "int4" else -128 if kind[1] else -127
    scale = torch.ones(33) if not kind[1] else torch.ones(33, 256 // kind[1]).bfloat16()
    codes = torch.full((33, 256), most, dtype=torch.int8)
    if kind[2:]:
        zero = min(-most, 127)
        zeros = torch.full_like(scale, zero, dtype=torch.int8)
        scale = join_zeros(scale, zeros, -most)
        most -= zero
    case = Case(kind, codes, scale)
    for sign in (1, -1):
        y = case.operator(torch.full((3, 256), sign * 127.0))
        assert (y == sign * 256 * 127 * most).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outliers_have_15_bits(kind):
    """Sums of the largest codes, and of outliers among small numbers; beside a row without outliers."""
    size = kind[1] or BLOCK8
    k = 32 * size
    scale = torch.ones(33) if not kind[1] else torch.ones(33, 32).bfloat16()
    codes = torch.full((33, k), -127 if kind[0] == "int8" else -8, dtype=torch.int8)
    most = int(codes[0, 0])
    if kind[2:]:
        zeros = torch.full_like(scale, -most, dtype=torch.int8)
        scale = join_zeros(scale, zeros, 128 if kind[0] == "int8" else 8)
        most *= 2
    case = Case(kind, codes, scale)
    x = torch.zeros(3, k)
    x[0, size : 2 * size] = 127
    x[1, size : 2 * size] = torch.where(torch.arange(size) % 2 == 0, 127, 63 / 128)
    x[2] = 1
    steps = rounding_steps(x, size)
    assert steps[1, 1] == 1 / 128 and (steps[2] == torch.tensor(1 / 127 / 128) * 128).all()
    y = case.operator(x)
    assert (y[0] == size * 127 * most).all()
    assert (y[1] == size / 2 * (127 + 63 / 128) * most).all()
    assert torch.equal(y[2:], case.operator(x[2:])) and torch.equal(y[:1], case.operator(x[:1]))


@pytest.mark.parametrize("k", [4, 8, 100, 124, 132, 260, 516])
def test_int8_of_any_length(k):
    case, x = make_case(("int8", 0), 33, k), random(9, k)
    assert_within(case.operator(x), case.reference(x), case.rounding(x))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 40, 64, 97])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packing_is_undone(kind, n):
    case = make_case(kind, n, 256)
    codes, scale = backends.weight.unpack(quantize.pack(kind[0], case.codes, case.scale))
    assert torch.equal(scale, case.scale)
    assert torch.equal(codes, case.codes)
    x = random(3, 256)
    assert_within(case.operator(x, fp32_out=True), case.reference(x), case.rounding(x))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operands_that_do_not_fit_are_refused(kind):
    """Never read past the end of a weight."""
    case = make_case(kind, 33, 256)
    for bad in (random(2, 512), random(2, 128), random(2, 256).half(), random(2, 256).double()):
        with pytest.raises(RuntimeError, match="activations must be|does not fit"):
            case.operator(bad)
    table = case.table
    for place, value, says in (
        (0, 34, "do not fit"), (1, 512, "do not fit"), (2, 64, "do not fit"), (3, 99, "no layout 99"),
        (4, 32, "do not fit"), (5, 16, "groups of layout"), (6, 64, "follow each other"),
    ):  # fmt: skip
        case.table = table.clone()
        case.table[place] = value
        with pytest.raises(RuntimeError, match=says):
            case.operator(random(2, 512 if place == 1 else 256))
    case.table = table
    case.packed = case.packed[:-1]
    with pytest.raises(RuntimeError, match="do not fit"):
        case.operator(random(2, 256))
    with pytest.raises(RuntimeError, match="weights of 33 outputs do not fit 32"):
        whole = make_case(kind, 33, 256)
        torch.ops.gpt_eagle.matmul(random(2, 256), whole.packed, whole.table, None, 32, True)


@functools.cache
def built(march: str) -> str:
    """Build and load the operators of another processor. Returns: their namespace."""
    namespace = "gpt_eagle_" + march.replace("-", "_")
    backends.cpp.build.register(namespace, backends.cpp.build.build(march))
    return namespace


FUSED = (
    os.environ.get("GPT_EAGLE_MARCH") != "x86-64"
)  # the build in use adds products without rounding them


def check_variant(case: Any, x: Tensor, march: str) -> None:
    """AVX-512 and AVX2 do the same fused steps: the same bits. Plain loops round twice as often. x: [64, K]"""
    for wide in (False, True):
        want = case.operator(x, wide)
        alone = torch.cat([case.operator(row[None], wide, built(march)) for row in x])
        assert alone.dtype == want.dtype
        for rows in range(1, 65):
            assert torch.equal(case.operator(x[:rows], wide, built(march)), alone[:rows])
        if (march == "x86-64-v3") == FUSED:
            assert torch.equal(alone, want)
        elif wide:
            assert_within(alone, case.reference(x.float()), 2 * case.rounding(x.float()))


# ------------------------------------------------------------------------------------- bf16 weights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, march: str = "native") -> Tensor:
    return operators(march).matmul(x, weight, None, bias, len(weight), True)


def weights_bf16(n: int, k: int) -> Tensor:
    return (random(n, k) * k**-0.5).bfloat16()


# one tile and strip and less than that, several, with rests; K: one value, a block, panels, with rests, odd
BF16_SHAPES = [(1, 1), (3, 2), (64, 128), (65, 129), (77, 1300), (130, 301), (40, 4096)]


@pytest.mark.parametrize("shape", BF16_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_bf16_product(shape):
    weight, bias = weights_bf16(*shape), random(shape[0]).bfloat16()
    x = random(70, shape[1], seed=1).bfloat16()
    y = linear(x, weight)
    assert torch.equal(y, backends.linear.linear_bf16_reference(x, weight))
    sizes = x.double().abs() @ weight.double().abs().T
    most = shape[1] * U * (1 + 1e-3) * sizes  # a rounding per product
    assert_within(y, x.double() @ weight.double().T, most)
    assert torch.equal(linear(x, weight, bias), y + bias)
    for b, want in ((None, y), (bias, y + bias)):  # narrow outputs are the wide ones rounded
        narrow = torch.ops.gpt_eagle.matmul(x, weight, None, b, len(weight), False)
        assert torch.equal(narrow, want.bfloat16())


@pytest.mark.parametrize("k", sorted({k for shapes in MODELS.values() for _, k in shapes}))
def test_bf16_product_of_real_width(k):
    weight, x = weights_bf16(MOST_ROWS, k), random(9, k, seed=1).bfloat16()
    x[:, ::97] *= 30
    y, exact = linear(x, weight), x.double() @ weight.double().T
    variance = (x.double() ** 2 @ weight.double().T ** 2).sum(-1, keepdim=True)
    assert_within(y, exact, 8 * k**0.5 * U * variance.sqrt())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("k", [1301, 2048])
def test_a_bf16_row_does_not_depend_on_the_others(k, threads):
    """Bit for bit, for every number of rows and every place among them, and every number of threads."""
    # more than one thread's worth of work
    check_bf16_rows_alone(weights_bf16(421, k), random(70, k, seed=1).bfloat16(), threads)


def check_bf16_rows_alone(weight: Tensor, x: Tensor, threads: int) -> None:
    alone = torch.cat([linear(row[None], weight) for row in x])  # [R, N], on one thread
    try:
        torch.set_num_threads(threads)
        for rows in range(1, len(x) + 1):
            assert torch.equal(linear(x[:rows], weight), alone[:rows])
            assert torch.equal(linear(x[-rows:], weight), alone[-rows:])
        assert torch.equal(linear(x.repeat(5, 1), weight), alone.repeat(5, 1))
        mixed = linear(beside_strange_rows(x[5]), weight)
        assert torch.equal(mixed[[0, 3]], alone[5:6].expand(2, -1))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("k", [255, 256])
def test_bf16_leading_dimensions_and_strides(k):
    weight, x = weights_bf16(33, k), random(3, 4, 512).bfloat16()
    check_leading_dimensions(lambda x: linear(x, weight), x[..., :k])


def check_bf16_experts() -> None:
    """Every row gets the bits that a plain layer of its expert's weights gives it; idle experts are not read."""
    weight = torch.stack([weights_bf16(70, 301) * (e + 1) for e in range(5)])
    bias, x = random(5, 70).bfloat16(), random(150, 301, seed=1).bfloat16()
    expert = torch.arange(150) * 7 % 5 % 4 + 1  # 1: twice the rows
    weight[0] = float("nan")
    product = torch.ops.gpt_eagle.matmul
    for wide in (False, True):
        for biases in (None, bias):
            y = product(x, weight, None, biases, 70, wide, expert)
            for e in range(1, 5):
                own, b = expert == e, None if biases is None else biases[e]
                assert torch.equal(y[own], product(x[own], weight[e], None, b, 70, wide))


def test_bf16_experts():
    check_bf16_experts()


def check_bf16_edges(reference: Callable[[Tensor, Tensor], Tensor]) -> None:
    """NaN and infinity stay in their row and output.

    Memory behind a row of odd length is not multiplied.
    """
    weight, x = weights_bf16(67, 301), random(8, 301, seed=1).bfloat16()
    weight[5, 0], weight[66, 300] = float("nan"), float("inf")  # beside the ends of rows 4 and 65
    x[0], x[1, 0], x[2, 300] = 0, float("nan"), float("inf")
    x[3] *= 1e30
    y, want = linear(x, weight), reference(x, weight)
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.nan_to_num(7), want.nan_to_num(7))
    assert (y[0, :5] == 0).all() and y[4:, 5].isnan().all() and y[4:, 66].isinf().all()
    assert y[1].isnan().all() and not y[2, :5].isfinite().any()


def test_bf16_numbers_at_the_edges():
    check_bf16_edges(backends.linear.linear_bf16_reference)
    largest = torch.full((1, 2), torch.finfo(torch.bfloat16).max).bfloat16()
    assert linear(largest, largest).item() == float("inf")


def test_bf16_operands_that_do_not_fit_are_refused():
    weight, x = weights_bf16(33, 64), random(2, 64).bfloat16()
    one = torch.zeros(2, dtype=torch.long)
    for args in (
        (x[:, :32], weight, None), (x.double(), weight, None), (x, weight.float(), None), (x, weight.T, None),
        (random(2, 33).bfloat16(), weight.T, None), (x, weight, torch.zeros(32).bfloat16()),
        (x, weight, torch.zeros(33)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="must be bfloat16|does not fit|in one piece"):
            linear(*args)
    for stack, expert, says in (
        (weight, one, "do not fit"), (weight[None], one[:1], "one int64 per row"),
        (weight[None], one + 1, "there is no expert 1"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=says):
            torch.ops.gpt_eagle.matmul(x, stack, None, None, 33, False, expert)


@pytest.mark.parametrize("march", OTHERS)
def test_bf16_variants_agree(march):
    """The same bits on every processor."""
    for n, k in ((77, 301), (130, 1300)):
        weight, x, bias = weights_bf16(n, k), random(70, k, seed=1).bfloat16(), random(n).bfloat16()
        want = linear(x, weight, bias)
        for rows in range(1, 71):
            assert torch.equal(linear(x[:rows], weight, bias, march), want[:rows])


# ----------------------------------------------------------------------------- which product serves


def test_linear_layers_of_the_backends(monkeypatch):
    weight, x, bias = weights_bf16(33, 64), random(5, 64).bfloat16(), random(33).bfloat16()
    backend = choose(x.device)
    ours = linear(x, weight, bias)
    assert torch.equal(backend.linear(x, weight, bias, fp32_out=True), ours)
    assert torch.equal(backend.linear(x, weight, bias), ours.bfloat16())
    assert torch.equal(backend.router_logits(x, weight), linear(x, weight))
    experts, routing = torch.stack((weight, weight * 2)), torch.tensor([0, 1, 0, 0, 1])
    chosen = backend.experts_linear(x, experts, routing)
    assert torch.equal(chosen[[0, 2, 3]], backend.linear(x[[0, 2, 3]], weight))
    monkeypatch.setattr("backends.library._cpp_available", [False])
    backend = choose(x.device)
    theirs = F.linear(x, weight, bias)
    assert torch.equal(backend.linear(x, weight, bias), theirs)
    assert torch.equal(backend.linear(x, weight, bias, fp32_out=True), theirs.float())
    torch.testing.assert_close(backend.experts_linear(x, experts, routing), chosen)
    torch.testing.assert_close(TORCH.experts_linear(x, experts, routing), chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_linear_in_other_dtypes_is_pytorchs(dtype):
    weight, x = random(33, 64).to(dtype), random(5, 64).to(dtype)
    backend = choose(x.device, dtype)
    assert backend.linear is TORCH.linear and backend.router_logits is TORCH.router_logits
    assert torch.equal(backend.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_has_gradients(compiled):
    """PyTorch's, where something learns: the input of a frozen layer, or the layer; autocast does the same."""
    product = TORCH.linear
    if compiled:
        product = torch.compile(product, fullgraph=True, backend="aot_eager")
    for learns in ("x", "weight", "both"):
        x, weight = random(5, 64).bfloat16(), weights_bf16(33, 64)
        x.requires_grad_(learns != "weight"), weight.requires_grad_(learns != "x")
        grads = []
        for linear_of in (product, lambda x, w, b, fp32_out: F.linear(x, w).float()):
            linear_of(x, weight, None, True).square().sum().backward()
            grads.append([t.grad for t in (x, weight)])
            x.grad = weight.grad = None
        for ours, theirs in zip(*grads):
            assert ours is theirs is None or torch.equal(ours, theirs)
    x, weight = random(5, 64), random(33, 64).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = product(x, weight)
        assert y.dtype == torch.bfloat16 and y.requires_grad
        assert torch.equal(y, F.linear(x, weight))


def test_operators_refuse_inputs_that_need_gradients():
    """In C++ and in Python, also in a list; they run where gradients are off."""
    x, weight = random(5, 64).bfloat16(), weights_bf16(33, 64)
    product = choose(x.device).linear
    want = product(x, weight)
    weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"gpt_eagle::matmul has no gradients.*use_backend\(mod"):
        product(x, weight)
    with torch.no_grad():
        assert torch.equal(product(x, weight), want)
    inputs = {"q": random(1, 1, 2, 16), "k": random(1, 2, 4, 16), "v": random(1, 2, 4, 16)}
    window = (torch.zeros(1, dtype=torch.long), torch.ones(1, 1, 1, dtype=torch.bool))
    for name in inputs:
        given = inputs | {name: inputs[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match="gpt_eagle::tree_attention has no gradients"):
            backends.attention.attention(*given.values(), *window)
    buffers = [random(1, 1, 4, 4), random(1, 1, 4, 4).requires_grad_() * 1]
    with pytest.raises(RuntimeError, match="gpt_eagle::move_rows has no gradients"):
        torch.ops.gpt_eagle.move_rows(buffers, window[0], torch.zeros(1, 1, dtype=torch.long))


def test_every_operator_refuses_inputs_that_need_gradients():
    for device in ("cuda", "cpu"):  # with those in Triton, where it is installed
        choose(torch.device(device))
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gpt_eagle::")]
    refuses = torch._C._dispatch_has_kernel_for_dispatch_key
    assert len(names) > 40 and not [name for name in names if not refuses(name, "Autograd")]


# ---------------------------------------------------------------------------------------- attention


def attention_inputs(dtype, rows=30, start=100, heads=(8, 4), width=80):
    """q, k, v, start and a mask in which every row sees itself and some of those before it."""
    H, kv_heads = heads
    q = random(1, rows, H, width, seed=0)
    k, v = (random(1, kv_heads, 160, width, seed=seed) for seed in (1, 2))
    mask = (random(1, rows, rows, seed=9) > 0.5).tril() | torch.eye(rows, dtype=torch.bool)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor([start]), mask


@pytest.mark.parametrize("width", [16, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_node_gets_the_bits_that_its_token_gets_alone(dtype, width):
    """A path is moved next to the prefix and decoded token by token, as in vanilla decoding."""
    q, k, v, start, mask = attention_inputs(dtype, width=width)
    tree = torch.ops.gpt_eagle.attention(q, k, v, start, mask)
    for node in range(mask.shape[1]):
        path = 100 + mask[0, node].nonzero().flatten()
        keys, values = k.clone(), v.clone()
        for cache in (keys, values):
            cache[:, :, 100 : 100 + len(path)] = cache[:, :, path]
        alone = torch.ones(1, 1, 1, dtype=torch.bool)
        args = (q[:, node : node + 1], keys, values, start + len(path) - 1, alone)
        assert torch.equal(torch.ops.gpt_eagle.attention(*args), tree[:, node : node + 1])


@pytest.mark.parametrize("march", OTHERS)
def test_attention_variants_agree(march):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        args = attention_inputs(dtype)
        got = operators(march).attention(*args)
        plain = reference.attention
        for theirs in (torch.ops.gpt_eagle.attention, plain):
            torch.testing.assert_close(got, theirs(*args), atol=tolerance, rtol=tolerance)


def test_attention_refuses_a_window_outside_the_cache():
    q, k, v, _, mask = attention_inputs(torch.float32)
    with pytest.raises(RuntimeError, match="the window must lie in the cache"):
        torch.ops.gpt_eagle.attention(q, k, v, torch.tensor([140]), mask)


# -------------------------------------------------------------------------------------------- top-k

ALL = ["native", *OTHERS]


def operators(march: str):
    return torch.ops.gpt_eagle if march == "native" else getattr(torch.ops, built(march))


@pytest.mark.parametrize("march", ALL)
@pytest.mark.parametrize(("V", "k"), [(1, 1), (63, 63), (64, 5), (65, 10), (4096, 10), (32001, 1)])
def test_topk_takes_the_best_and_of_equal_ones_the_first(V, k, march):
    scores = (random(3, V) * 4).round()  # many ties
    values, index, total = operators(march).topk(scores, k)
    want = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, want.values[:, :k]) and torch.equal(index, want.indices[:, :k])
    exact = scores.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(total.double(), exact, atol=1e-6, rtol=2e-7)


def test_topk_of_scores_that_are_cut_away():
    scores = torch.full((2, 200), float("-inf"))
    scores[1, 150] = 3.0
    values, index, total = torch.ops.gpt_eagle.topk(scores, 3)
    assert index.tolist() == [[0, 1, 2], [150, 0, 1]]
    assert total.flatten().tolist() == [float("-inf"), 3.0]
    assert values[1].tolist() == [3.0, float("-inf"), float("-inf")]
    with pytest.raises(RuntimeError, match="k must be 1 to 200; it is 201"):
        torch.ops.gpt_eagle.topk(scores, 201)


# ------------------------------------------------------------------------------------------- rotary


def rotary_inputs(dtype, width=80):
    """qkv and angles of two rows of a batch, then the numbers of heads."""
    positions = torch.arange(18).view(2, 9) * 37
    rope = TORCH.rope_angles(10000.0 ** -(torch.arange(0, width, 2) / width), positions)
    return random(2, 9, 8 + 2 * 4, width).to(dtype), rope, 8, 4


@pytest.mark.parametrize("march", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotary_has_the_bits_of_plain_operations(dtype, march):
    qkv, rope, *heads = rotary_inputs(dtype)
    want = TORCH.rotary(qkv, rope, *heads)
    strided = torch.cat((qkv, qkv), -1)[..., : qkv.shape[3]]
    for x in (qkv, strided):
        assert all(map(torch.equal, operators(march).rotary(x, *rope, *heads), want))


def test_rotary_keeps_its_gradient():
    qkv, rope, *heads = rotary_inputs(torch.float32)
    sum(y.sum() for y in TORCH.rotary(qkv.requires_grad_(), rope, *heads)).backward()
    assert qkv.grad[:, :, :12].abs().min() > 0 and not qkv.grad[:, :, 12:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotary_norms_each_head_first(dtype):
    qkv, rope, *_ = rotary_inputs(dtype)
    norms = (*((1 + random(80, seed=s) / 4).to(dtype) for s in (1, 2)), 0.1)
    normed = with_head_norms(qkv, 4, norms)
    slots = torch.arange(18).view(2, 9) % 9 + 3
    got, want = (torch.zeros(2, 2, 4, 16, 80, dtype=dtype) for _ in range(2))
    q = rotary_cache_plainly(qkv, rope, *got, slots, norms)
    assert torch.equal(q, TORCH.rotary_cache(normed, rope, *want, slots))
    assert torch.equal(got, want)


def test_rotary_refuses_heads_that_are_not_there():
    qkv, rope, *_ = rotary_inputs(torch.float32)
    with pytest.raises(RuntimeError, match=r"14 \+ 4 heads of 80 elements are not in 16 heads"):
        choose(torch.device("cpu")).rotary(qkv, rope, 14, 4)
