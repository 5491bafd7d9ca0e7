"""Cases of single kernels in Triton's interpreter alone; test_interpreter.py runs this file beside kernels.py."""

from types import SimpleNamespace

import pytest
import torch

import backends.attention
import backends.experts
import backends.triton.compact
import backends.triton.experts
import backends.triton.layout
import backends.triton.norm
import backends.triton.qmatmul
import reference
from backends.epilogues import add_norm_plainly, unnormalized_reference
from drafts.block_draft import slide
from helpers import quantized, quantized_experts, slow
from interpreted import CUDA
from kernels import OPERATORS, ROUTINGS, _counters_are_zeros, check_level  # noqa: F401
from windows import random_step

# ------------------------------------------------------------------------------------ single kernels


def test_path_table():
    """Of random masks, by strides, and of rows that see all; places behind a path hold anything."""
    for B, T, W in ((1, 1, 1), (2, 7, 7), (1, 10, 50), (2, 3, 70)):
        mask = torch.rand(B, W, T).transpose(1, 2) < 0.4
        mask[:, :, 0] = mask[:, -1] = True
        got = OPERATORS.path_table(mask)
        want = backends.attention._path_table_torch(mask)
        assert got.dtype == want.dtype and got.shape == want.shape
        behind = torch.arange(1 + W) > want[:, :, :1]
        assert torch.equal(got.masked_fill(behind, 0), want.masked_fill(behind, 0))


@pytest.mark.parametrize("causal, from_root", [
    (False, False), *slow([(False, True), (True, False), (True, True)]),
])  # fmt: skip
def test_windows_of_blocks(causal, from_root):
    """Positions of a block that see each other; no slot before their windows is read."""
    step = random_step("chain", [130, 5], (6, 2), 16)
    config = SimpleNamespace(sliding_causal=causal, window_from_root=from_root)
    for size in (110, 4):  # the slots before a window stay unread
        window = slide(step.window, size, config)
        operands = window.start, window.mask, window.first
        want = reference.attention(step.q, step.k.nan_to_num(), step.v.nan_to_num(), *operands)
        hidden = int(window.first[0].min()) // 64 * 64
        step.k[0, :, :hidden] = step.v[0, :, :hidden] = float("nan")
        y = CUDA.attention(step.q, step.k, step.v, *operands)
        torch.testing.assert_close(y, want, atol=2e-6, rtol=2e-6)


def test_levels_of_what_is_cut_away():
    """Of the first row three tokens are left, of the second one."""
    logits = torch.full((2, 2, 2500), float("-inf"))
    logits[:, 0, [7, 2100, 2499]], logits[:, 1, 3] = torch.tensor([-3.0, 2.0, -3.0]), 1e30
    check_level(logits, 5, 6)


def test_rows_that_stay_are_not_touched():
    """Not even where they would lie outside of the cache: here in the guards on both of its sides."""
    memory = torch.randn(3, 2, 4, 16)  # the buffer lies in the middle
    before, buffer = memory.clone(), memory[1:2]
    path = torch.tensor([[1, 1, 2, 3, 4, 5, 6]])
    address = torch.tensor([buffer.data_ptr()])
    backends.triton.compact.compact([buffer], address, torch.tensor([2]), path)
    before[1, :, 2] = before[1, :, 3]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("F", [70, 576])
def test_norms(F):
    """Unscaled ones, of a tensor and of a sum that is not in one piece, and whole ones, whose rows are their own."""
    x, delta, weight = torch.randn(3, F), torch.randn(F, 3).T, torch.rand(F)
    for given in (None, delta):
        total, *norm = OPERATORS.add_unscaled(x, given, weight, 1e-5)
        want = x if given is None else x + given
        wanted = unnormalized_reference(want, weight, 1e-5)
        torch.testing.assert_close(norm, [*wanted], atol=5e-4, rtol=5e-5)
        assert torch.equal(total, want) if given is not None else not total.numel()
    total, y = CUDA.add_norm(x, delta, weight, 1e-5)
    wanted = add_norm_plainly(x, delta, weight, 1e-5)
    torch.testing.assert_close((total, y), wanted, atol=1e-5, rtol=2e-5)
    alone = CUDA.add_norm(x[1:2], delta[1:2], weight, 1e-5)
    assert torch.equal(alone[0], total[1:2]) and torch.equal(alone[1], y[1:2])
    assert torch.equal(CUDA.rms_norm(total, weight, 1e-5), y)


def test_a_bias_is_added_to_a_product():
    """Without a norm behind it."""
    weights, x, bias = quantized("int4-64", 135, 384), torch.randn(5, 384), torch.randn(135)
    total, *none = OPERATORS.add_product(x, weights.packed, weights.scale, bias, None, 0.0)
    torch.testing.assert_close(total, bias + weights.reference(x), atol=5e-4, rtol=5e-5)
    assert not any(x.numel() for x in none)


def test_the_lowest_code_of_eight_bits():
    """-128, which our own int8 never has, and files of others may."""
    codes = torch.full((64, 128), -128, dtype=torch.int8)
    packed = backends.triton.layout.pack_int8_planes(codes)
    y = OPERATORS.w8a16(torch.ones(2, 128), packed, torch.ones(64), None, "none")
    assert (y == -128 * 128).all()


# ------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("expert, experts", [
    *((expert, 8) for expert in [*ROUTINGS.values(), [1] * 63, [0, 7] * 100]),
    *(([i * i % experts for i in range(150)], experts) for experts in (1, 3, 60, 64, 128)),
])  # fmt: skip
def test_lists(expert, experts):
    expert = torch.tensor(expert)
    got = OPERATORS.expert_lists(expert, experts)
    want = backends.experts.expert_lists_reference(expert, experts)
    assert got.dtype == torch.int32 and torch.equal(got, want)


FORMATS = ["float", "int8", "int4-128", "Q4_K"]
MORE = ["int4-64", "int4-32", "int4-64-zeros", "Q6_K", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("form", [*FORMATS, *slow(MORE)])
def test_idle_experts_are_not_read(form):
    """A scale or a weight that is not a number would show; a word would not, so it has another value."""
    weights, expert = quantized_experts(form, 8, 70, 256), torch.tensor([2, 5, 2])
    x, lists = torch.randn(3, 256), CUDA.route(expert, 8)
    want = weights.operator(x, lists).clone()
    idle = [0, 1, 3, 4, 6, 7]
    weights.weight[idle] = float("nan") if form == "float" else 0x7777
    if weights.scale is not None:  # -1: two bf16 that are none
        weights.scale[idle] = -1 if weights.scale.dtype == torch.int32 else float("nan")
    assert torch.equal(weights.operator(x, lists), want)
