"""Sliding windows: each row of a step sees exactly the last tokens of its own path, whatever the step is."""

from __future__ import annotations

import pytest
import torch

import backends.attention
import reference
from backends.library import has_cpu_operators
from kv_cache import Window, causal_window
from models.operators import sliding
from reference import choose
from windows import KINDS, SIZES, Step, expected, random_step

CASES = [((6, 2), 64), ((4, 4), 16), ((4, 1), 256)]  # heads, their width
STARTS = [[37, 11], [0], [300, 0, 3]]
OURS = choose(torch.device("cpu"))
NEEDS_CPP = pytest.mark.skipif(not has_cpu_operators(), reason="needs a C++ compiler")


def operands(step: Step, window: Window) -> tuple:
    return step.q, step.k, step.v, window.start, window.mask, window.first


def finite(step: Step) -> Step:
    return step._replace(k=step.k.nan_to_num(), v=step.v.nan_to_num())


# ------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_sees_the_last_tokens_of_its_path(kind, size):
    for starts in STARTS:
        step = random_step(kind, starts, (1, 1), 16)
        window = sliding(step.window, size)
        visible = reference.visible_slots(*operands(step, window)[3:], step.k.shape[2])
        for b, paths in enumerate(step.paths):
            seen = [row.nonzero().flatten().tolist() for row in visible[b]]
            assert seen == [path[-size:] for path in paths]


def test_a_window_wider_than_the_context_hides_nothing():
    window = causal_window(torch.tensor([7, 0]), 5)
    wide = sliding(window, 12)
    assert torch.equal(wide.mask, window.mask) and not wide.first.any()
    assert sliding(window, 11).first.tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_windows_are_traced_in_one_graph():
    traced = torch.compile(sliding, fullgraph=True, dynamic=False, backend="aot_eager")
    for kind in KINDS:
        window = random_step(kind, [37, 11], (1, 1), 16).window
        got, want = traced(window, 5), sliding(window, 5)
        for name in ("slots", "start", "mask", "first"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert got.paths is None


# ---------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads,E", CASES)
def test_attention_over_the_last_tokens(kind, heads, E):
    """By C++ where it is built, by PyTorch, over the whole capacity, and by the reference."""
    for starts in STARTS:
        step = finite(random_step(kind, starts, heads, E))
        for size in SIZES:
            for scale in (0.0, 0.1):
                want = expected(step, size, scale or E**-0.5).float()
                given = (*operands(step, sliding(step.window, size)), scale)
                for attend in (
                    OURS.attention,
                    torch.ops.gpt_eagle.tree_attention,
                    backends.attention.masked_attention,
                    reference.attention,
                ):
                    torch.testing.assert_close(attend(*given), want, atol=1e-5, rtol=1e-5)


@NEEDS_CPP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads,E", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_bits_that_its_token_gets_alone(kind, heads, E, dtype):
    for starts in STARTS:
        step = random_step(kind, starts, heads, E)
        step = step._replace(q=step.q.to(dtype), k=step.k.to(dtype), v=step.v.to(dtype))
        for size in SIZES:
            y = OURS.attention(*operands(step, sliding(step.window, size)))
            for b, paths in enumerate(step.paths):
                for t in {0, len(paths) // 2, len(paths) - 1}:
                    alone = OURS.attention(*step.alone(b, t, size))
                    assert torch.equal(alone[0, 0], y[b, t]), (starts, size, b, t)


@pytest.mark.parametrize(
    "attend", [pytest.param("attention", marks=NEEDS_CPP), "tree_attention"], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_before_all_windows_are_not_read(kind, attend):
    attend = getattr(torch.ops.gpt_eagle, attend)
    for starts in ([37], [300, 300]):
        step = finite(random_step(kind, starts, (6, 2), 64))
        given = operands(step, sliding(step.window, 5))
        want = attend(*given)
        hidden = int(given[-1].min())  # a place of the path, which lies in this slot or behind it
        assert hidden >= starts[0] - 4
        for cache in (step.k, step.v):
            cache[:, :, :hidden] = float("nan")
        assert torch.equal(attend(*given), want)


@NEEDS_CPP
def test_windows_outside_the_context_are_refused():
    step = random_step("chain", [37], (6, 2), 64)
    for first in (-1, 37 + 12):
        window = step.window._replace(first=torch.full((1, 12), first))
        with pytest.raises(RuntimeError, match=f"first must be 0 to 48; it is {first}"):
            torch.ops.gpt_eagle.attention(*operands(step, window))
    with pytest.raises(RuntimeError, match="first must be"):
        window = step.window._replace(first=torch.zeros(1, 11).long())
        torch.ops.gpt_eagle.attention(*operands(step, window))
