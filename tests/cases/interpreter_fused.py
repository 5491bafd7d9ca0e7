"""Products with the work behind them, run by Triton's interpreter on the CPU; test_interpreter.py runs this file.

As interpreter_products.py. Widths and heads are those of small models and shares of others: SmolLM2-135M (576 wide,
heads of 64), Qwen3 (heads of 128, normed), widths that no block divides.
"""

import pytest
import torch

import backends.epilogues
import backends.triton.epilogues
import interpreted  # noqa: F401
import reference
from backends.epilogues import LazyMatmul, UnnormalizedRows
from backends.triton.epilogues import Gpu
from backends.triton.qmatmul import Device, ProductPlan
from helpers import quantized, slow
from reference import rope_angles
from scripts.bench import plans

pytestmark = pytest.mark.usefixtures("poisoned")
CLOSE = {"atol": 5e-4, "rtol": 5e-5}


@pytest.fixture
def gpu():
    """Its counters are zeros behind every launch."""
    found = Gpu(Device(132, 232448, 90), torch.zeros(64, dtype=torch.int32))
    yield found
    assert not found.done.any()


def cut(rows: int, splits: int) -> ProductPlan:
    """The tiles that 16-bit activations have."""
    tokens = backends.triton.qmatmul.tile_height(rows, 16, 32)
    return ProductPlan(tokens, 64 if tokens == 16 else 128, splits, 3, 4)


def norm_of(rows: int, F: int) -> UnnormalizedRows:
    return backends.epilogues.unnormalized_reference(
        torch.randn(rows, F), torch.rand(F) + 0.5, 1e-5
    )


@pytest.mark.parametrize("form,rows,N,splits", [
    ("float", 26, 70, 2), ("int4-128", 1, 135, 1), ("int8", 70, 64, 3), ("Q5_0", 5, 70, 2),
    *slow([("float", 1, 576, 2), ("int4-64", 5, 200, 2), ("int4-32-zeros", 60, 135, 2), ("Q4_1", 60, 135, 2)]),
])  # fmt: skip
def test_a_product_is_added_in_front_of_a_norm(gpu, form, rows, N, splits):
    weights = quantized(form, N, 384)
    x, stream, weight = torch.randn(rows, 384), torch.randn(rows, N), torch.rand(N)
    product = LazyMatmul(x, None, weights.packed, weights.scale)
    plan = cut(rows, splits)
    total, *norm = backends.triton.epilogues.add_product(product, stream, weight, 1e-5, gpu, plan)
    want, wanted = backends.epilogues.add_norm_reference(stream, weights.reference(x), weight, 1e-5)
    torch.testing.assert_close([total, *norm], [want, *wanted], **CLOSE)
    plainly = (norm[0].double() / UnnormalizedRows(*norm).rms()).float()
    torch.testing.assert_close(plainly, reference.rms_norm(want, weight, 1e-5), **CLOSE)
    bias = torch.randn(N)
    other, *none = backends.triton.epilogues.add_product(product, bias, None, 0.0, gpu, plan)
    torch.testing.assert_close(other, bias + weights.reference(x), **CLOSE)
    assert not any(x.numel() for x in none)


@pytest.mark.parametrize("F", [70, 576])
def test_the_first_norm(F):
    x, delta, weight = torch.randn(3, F), torch.randn(F, 3).T, torch.rand(F)
    for given in (None, delta):
        total, *norm = backends.triton.epilogues.add_unscaled(x, given, weight, 1e-5)
        want = x if given is None else x + given
        wanted = backends.epilogues.unnormalized_reference(want, weight, 1e-5)
        torch.testing.assert_close(norm, [*wanted], **CLOSE)
        assert torch.equal(total, want) if given is not None else not total.numel()


@pytest.mark.parametrize("form,rows", [("float", 26), ("int4-128", 1), ("Q5_1", 5)])
def test_swiglu_of_an_unscaled_norm(form, rows):
    weights = quantized(form, 2 * 67, 384)
    x = norm_of(rows, 384)
    operands = (x.values, weights.packed, weights.scale, cut(rows, 1))
    y = backends.triton.qmatmul.run_product(*operands, "swiglu", x.squares)
    want = backends.epilogues.swiglu_reference(weights.reference(x.values), x)
    torch.testing.assert_close(y, want, **CLOSE)


def rotated(gpu, weights, x, heads, E, norms, splits, rows=slice(None)):
    """The queries and the cache of a product: ours, and the reference's."""
    H, kv_heads = heads
    T = len(x.values)
    x = UnnormalizedRows(x.values[rows], x.squares[:, rows].contiguous())
    t = len(x.values)
    slots = torch.arange(T - 1, -1, -1)[None, rows]
    freq = torch.arange(E // 2) / E + 0.1
    rope = rope_angles(freq, torch.arange(T)[None, rows] * 7)
    ours, theirs = (tuple(torch.zeros(2, 1, kv_heads, T + 2, E)) for _ in range(2))
    product = LazyMatmul(x.values[None], x.squares, weights.packed, weights.scale)
    given = norms or (None, None, 0.0)
    q = backends.triton.epilogues.rotary_product(
        product, rope, *ours, slots, given, gpu, cut(t, splits)
    )
    y = weights.reference(x.values)[None]
    x = UnnormalizedRows(x.values[None], x.squares)
    return (q, *ours), (
        backends.epilogues.rotary_cache_reference(y, x, rope, *theirs, slots, norms),
        *theirs,
    )


@pytest.mark.parametrize("form,rows,heads,E,normed,splits", [
    ("float", 26, (3, 1), 64, False, 2),  # two heads in a tile
    ("int4-128", 5, (2, 1), 128, True, 2),  # two tiles in a head
    ("int8", 40, (2, 1), 80, True, 1),  # tiles across heads
    ("Q8_0", 5, (2, 1), 64, True, 2),
    *slow([("float", 1, (9, 3), 64, False, 2), ("float", 40, (2, 1), 16, True, 1)]),
])  # fmt: skip
def test_a_product_is_rotated_and_cached(gpu, form, rows, heads, E, normed, splits):
    weights = quantized(form, (heads[0] + 2 * heads[1]) * E, 384)
    norms = (*(1 + torch.randn(2, E) / 4), 1e-5) if normed else None
    got, want = rotated(gpu, weights, norm_of(rows, 384), heads, E, norms, splits)
    torch.testing.assert_close(got, want, **CLOSE)


def test_a_row_has_the_same_bits_at_every_number_of_rows(in_order, gpu):
    """Of all results, through a norm that was left unscaled; in tiles of every height."""
    weights = quantized("float", 3 * 128, 200)
    x = norm_of(64, 200)
    stream, weight = torch.randn(64, 3 * 128), torch.rand(3 * 128)
    norms = (*torch.rand(2, 128), 1e-5)

    def layer(rows):
        product = LazyMatmul(x.values[rows], None, weights.packed, weights.scale)
        some = stream[rows].contiguous()
        added = backends.triton.epilogues.add_product(
            product, some, weight, 1e-5, gpu, cut(len(some), 2)
        )
        got, _ = rotated(gpu, weights, x, (1, 1), 128, norms, 2, rows)
        return added, got

    (total, y, squares), (q, *_) = layer(slice(None))
    for first in (63, 40):
        rows = slice(first, None)
        added, (one, *_) = layer(rows)
        assert torch.equal(added[0], total[rows]) and torch.equal(added[1], y[rows])
        assert torch.equal(added[2], squares[:, rows]) and torch.equal(one, q[:, rows])


@pytest.mark.parametrize("layer,N", [("wqkv", 384), ("wo", 64), ("w13", 64), ("head", 64)])
def test_the_sweep_runs_each_product_as_a_layer_does(monkeypatch, capsys, layer, N):
    """All calls that would be timed, of every epilogue; and a plan that fails, which is noted."""
    ran = []

    class Once(plans.Rotated):
        def seconds(self, unit=""):
            ran.extend(call() for call in self.calls)
            return 2e-6

    monkeypatch.setattr(plans, "Rotated", Once)
    monkeypatch.setattr(plans, "TIMES", 1)
    monkeypatch.setattr(plans, "copies_of", lambda *_: 2)
    monkeypatch.setattr(plans, "COUNTERS", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shape = plans.LayerShape("bf16", layer, N, 64)
    timer = plans.Timer(shape, Device(132, 232448, 90), "cpu")
    plan = ProductPlan(16, 64, 1, 3, 4)
    assert timer(plan, 1) == 2.0 and len(ran) == 2
    assert not timer.done.any()
    assert timer(plan._replace(stages=2), 1) == 2.0, "the same bits"
    timer.results[1, 1][0].neg_()  # the interpreter has large numbers here
    assert timer(plan._replace(stages=4), 1) == float("inf")
    assert "its bits differ" in capsys.readouterr().out
    monkeypatch.setattr(plans, "Rotated", lambda *_: 1 / 0)
    assert timer(plan, 2) == float("inf") and "ZeroDivision" in capsys.readouterr().out
