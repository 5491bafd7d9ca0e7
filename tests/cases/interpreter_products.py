"""The Triton kernels, run by Triton's interpreter on the CPU; test_interpreter.py runs this file.

Triton reads TRITON_INTERPRET when it is imported, so these cases need a process of their own. Activations are fp32:
the interpreter computes nonsense in bf16, and has no inline assembly (which is tested apart).
"""

import pytest
import torch

import backends.triton.layout
import backends.triton.norm
import backends.triton.qmatmul
import interpreted  # noqa: F401
import reference
from backends.epilogues import add_norm_plainly
from backends.triton.layout import BLOCK_FORMS
from backends.triton.qmatmul import Device, ProductPlan
from helpers import quantized, slow

DEVICE = Device(132, 232448, 90)
FORMATS = ["float", "int4-128", "int4-64", "int4-32", "int4-32-zeros", "int8", *BLOCK_FORMS]


def run(x, weights, splits=1, epilogue="none"):
    """The product, cut as it would be for 16-bit activations."""
    tokens = backends.triton.qmatmul.tile_height(x.shape[0], 16, 32)
    cut = ProductPlan(tokens, 64 if tokens == 16 else 128, splits, stages=3, warps=4)
    return backends.triton.qmatmul.run_product(x, weights.packed, weights.scale, cut, epilogue)


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("form,rows", [  # tiles are the same for every format, and for every group of int4
    *((form, rows) for form in ("int4-128", "int8") for rows in (1, 26, 70)),
    ("int4-64", 5), ("int4-32", 26), ("int4-64-zeros", 70), ("float", 5), ("float", 70),
    ("Q4_K", 26), ("Q5_K", 1), ("Q5_1", 26), ("Q6_K", 33), ("Q8_0", 5), ("Q4_0", 5), ("Q4_1", 5), ("Q5_0", 5),
    *slow((form, rows) for form in ("float", "int4-128", "int8", *BLOCK_FORMS) for rows in (5, 16, 60, 64)),
    *slow((form, rows) for form in ("int4-64", "int4-32", "int4-64-zeros") for rows in (5, 26, 70)),
])  # fmt: skip
def test_product(form, rows):
    """N and K are multiples of no tile: 135 outputs, and a last block of K that is part full.

    K types have superblocks of 256.
    """
    K = 768 if form.endswith("_K") else 640
    weights = quantized(form, 135, K)
    x = torch.randn(rows, K)
    torch.testing.assert_close(
        run(x, weights, splits=2), weights.reference(x), atol=2e-4, rtol=2e-5
    )


@pytest.mark.parametrize("form,N,K", [
    *((form, 200, 384) for form in FORMATS if not form.endswith("_K")),
    *((form, 199, 512) for form in ("Q4_K", "Q5_K", "Q6_K")),
    ("int4-128", 1, 128), ("Q4_K", 1, 256), ("Q4_1", 70, 96),  # 3 blocks of the file
    *((form, 70, K) for form in ("float", "int8") for K in (65, 200)),  # widths of no whole group
])  # fmt: skip
def test_shapes(form, N, K):
    weights = quantized(form, N, K)
    x = torch.randn(2, 3, K).transpose(0, 1)  # neither two-dimensional nor contiguous
    plan = ProductPlan(16, 64, 1, 4, 4)
    y = backends.triton.qmatmul.run_product(x, weights.packed, weights.scale, plan)
    torch.testing.assert_close(y, weights.reference(x), atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("splits", [2, 8, *slow([1, 3])])
def test_splits_may_be_uneven(splits):
    weights = quantized("int4-128", 70, 8 * 256 + 128)  # 9 blocks
    x = torch.randn(5, 8 * 256 + 128)
    torch.testing.assert_close(run(x, weights, splits), weights.reference(x), atol=5e-4, rtol=2e-5)


@pytest.mark.parametrize("form,splits", [
    ("float", 3), ("int4-64-zeros", 3), ("Q4_K", 3),
    *slow([("int4-128", 1), ("int8", 3), ("Q6_K", 1), ("Q8_0", 3), ("int8", 1), ("int4-64", 3), ("int4-32", 3), ("Q4_1", 1), ("Q5_0", 3), ("Q5_1", 3), ("Q5_K", 3)]),
])  # fmt: skip
def test_a_row_has_the_same_bits_beside_any_others(in_order, form, splits):
    K = 768 if form.endswith("_K") else 640
    weights = quantized(form, 40, K)
    x = torch.randn(64, K)
    whole = run(x, weights, splits)
    torch.testing.assert_close(whole, weights.reference(x), atol=1e-3, rtol=2e-5)
    for rows in (1, 16, 17, 33):  # tiles of 16, of 32 and of 64 tokens
        assert torch.equal(run(x[-rows:].clone(), weights, splits), whole[-rows:]), rows


@pytest.mark.parametrize("form,splits", [("float", 3), ("int4-64", 3), *slow([("int8", 1)])])
def test_a_product_in_front_of_a_norm(form, splits):
    """135 outputs, which no block of threads divides; a row's norm does not depend on the others."""
    weights = quantized(form, 135, 896)
    x, stream, scale = torch.randn(5, 896), torch.randn(5, 135), torch.rand(135)
    delta = run(x, weights, splits)
    assert torch.equal(run(x, weights, splits, "fp32"), delta)  # fp32 in any case here
    total, y = backends.triton.norm.add_norm(stream, delta, scale, 1e-5)
    wanted = add_norm_plainly(stream, weights.reference(x), scale, 1e-5)
    torch.testing.assert_close((total, y), wanted, atol=5e-4, rtol=2e-5)
    alone = backends.triton.norm.add_norm(stream[2:3], delta[2:3], scale, 1e-5)
    assert torch.equal(alone[0], total[2:3]) and torch.equal(alone[1], y[2:3])
    assert torch.equal(backends.triton.norm.add_norm(total, None, scale, 1e-5)[1], y)


def test_a_norm_of_what_is_not_contiguous():
    x, scale = torch.randn(135, 5).T, torch.rand(135)
    total, y = backends.triton.norm.add_norm(x, x, scale, 1e-5)
    wanted = add_norm_plainly(x, x, scale, 1e-5)
    torch.testing.assert_close((total, y), wanted, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize("form,rows", [
    ("float", 26), ("int4-32", 70), ("int8", 26), ("int4-128", 1), ("Q5_1", 26),
    *slow((form, rows) for form in ("int4-128", "int4-32", "int8") for rows in (26, 60)),
])  # fmt: skip
def test_swiglu_behind_a_product(form, rows):
    weights = quantized(form, 2 * 67, 640)  # 67 gates above 67 ups
    x = torch.randn(rows, 640)
    y = run(x, weights, epilogue="swiglu")
    torch.testing.assert_close(y, reference.swiglu(weights.reference(x)), atol=1e-2, rtol=2e-4)


def test_the_whole_path():
    """Plan and format from the tensors alone, as the operators do it."""
    for form in ("float", "int4-32-zeros", "int8", "Q4_K"):
        weights = quantized(form, 135, 512)
        x = torch.randn(3, 512)
        y = backends.triton.qmatmul.matmul(x, weights.packed, weights.scale, DEVICE)
        torch.testing.assert_close(y, weights.reference(x), atol=5e-4, rtol=2e-5)


def test_the_lowest_code_of_eight_bits():
    """-128, which our own int8 never has, and files of others may."""
    codes = torch.full((64, 128), -128, dtype=torch.int8)
    packed = backends.triton.layout.pack_int8_planes(codes)
    cut = ProductPlan(16, 64, 1, 2, 4)
    y = backends.triton.qmatmul.run_product(torch.ones(2, 128), packed, torch.ones(64), cut)
    assert (y == -128 * 128).all()


READ = ("Q4_1", "Q5_K", "Q6_K", "Q8_0")  # with minima, with high bits, of bytes


@pytest.mark.parametrize("form", [*READ, *slow(form for form in BLOCK_FORMS if form not in READ)])
def test_rows_of_an_embedding(form):
    """As numbers, bit for bit; any of them, in any order, more than once."""
    K = 512 if form.endswith("_K") else 416
    weights = quantized(form, 70, K)
    ids = torch.tensor([3, 69, 0, 3])
    operator = torch.ops.gpt_eagle.read_planes  # plain on a CPU
    want = operator(weights.packed, weights.scale, ids, K, torch.float32)
    got = backends.triton.qmatmul.read_rows(weights.packed, weights.scale, ids, K, torch.float32)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, weights.reference(torch.eye(K)).T[ids])
    none = backends.triton.qmatmul.read_rows(
        weights.packed, weights.scale, ids[:0], K, torch.float32
    )
    assert none.shape == (0, K)
