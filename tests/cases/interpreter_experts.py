"""The Triton kernels of experts, run by Triton's interpreter on the CPU; test_interpreter.py runs this file.

As interpreter_products.py, in fp32 and in a process of their own.
"""

import pytest
import torch

import backends.experts
import backends.triton.experts
import interpreted  # noqa: F401
from backends.library import lib
from backends.triton.qmatmul import Device, ProductPlan
from helpers import Mixture, planes_of_cuda, quantized_experts, rounded, slow
from model import ModelConfig
from reference import Backend, choose, use_backend

FORMATS = [
    "float",
    "int4-128",
    "int4-64",
    "int4-32",
    "int4-64-zeros",
    "int8",
    "Q4_K",
    "Q6_K",
    "Q5_1",
    "Q8_0",
]
DEVICE = Device(8, 232448, 90)  # few processors, few splits
ROUTINGS = {  # how rows may be spread over eight experts
    "one row": [5],
    "one token": [6, 1],
    "two tokens": [0, 7, 7, 2],
    "one expert": [3] * 40,
    "tree": [(7 * i + i // 3) % 8 for i in range(120)],
    "idle ends": [4, 2, 2, 5, 4, 3] * 9,
    "uneven": [2] * 70 + [7] + [0] * 9,
}


def product(x, weight, scale, lists=None, epilogue="none"):
    return backends.triton.experts.experts_product(x, weight, scale, lists, DEVICE)


for name in ("w4a16", "w8a16", "blocks_a16"):
    lib.impl(name, product, "CPU")
pytestmark = pytest.mark.usefixtures("poisoned")


def run(x, weights, expert, tokens=16, splits=1):
    """The product, cut as it would be for 16-bit activations."""
    lists = backends.triton.experts.expert_lists(expert, len(weights.weight))
    cut = ProductPlan(tokens, 64 if tokens == 16 else 128, splits, stages=3, warps=4)
    return backends.triton.experts.run_experts(x, weights.weight, weights.scale, lists, cut)


def check(x, weights, expert, **options):
    got, want = run(x, weights, expert, **options), weights.reference(x, expert)
    torch.testing.assert_close(got, want, atol=5e-4, rtol=2e-5)


# -------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("expert,experts", [
    *((expert, 8) for expert in [*ROUTINGS.values(), [1] * 63, [0, 7] * 100]),
    *(([i * i % experts for i in range(150)], experts) for experts in (1, 3, 60, 64, 128)),
])  # fmt: skip
def test_lists(expert, experts):
    expert = torch.tensor(expert)
    got = backends.triton.experts.expert_lists(expert, experts)
    want = backends.experts.expert_lists_reference(expert, experts)
    assert got.dtype == torch.int32 and torch.equal(got, want)


# ----------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("form,routing,K", [  # tiles are found in the same way for every format
    ("float", "one row", 384), ("float", "idle ends", 384), ("int8", "one token", 384), ("int4-64-zeros", "uneven", 128),
    ("float", "tree", 65), ("int8", "idle ends", 200), ("int4-32", "two tokens", 96), ("Q5_1", "one token", 96),
    ("Q4_K", "two tokens", 512),
    *slow((form, routing, 512) for form in FORMATS for routing in ROUTINGS),
])  # fmt: skip
def test_product(form, routing, K):
    """N and K are multiples of no tile, and tiles are part full."""
    expert = torch.tensor(ROUTINGS[routing])
    check(torch.randn(len(expert), K), quantized_experts(form, 8, 70, K), expert)


@pytest.mark.parametrize("form,tokens", [
    ("int8", 32),
    *slow((form, tokens) for form in ("float", "int4-128", "int4-32-zeros", "int8") for tokens in (16, 32, 64)),
])  # fmt: skip
def test_tiles_and_splits(form, tokens):
    expert = torch.tensor(ROUTINGS["uneven"])
    check(
        torch.randn(80, 512), quantized_experts(form, 8, 135, 512), expert, tokens=tokens, splits=3
    )


@pytest.mark.parametrize("experts", [1, 20, *slow([3, 128])])
def test_any_number_of_experts(experts):
    """With many of them, most have a row or none."""
    expert = torch.randint(experts, (50,))
    check(torch.randn(50, 128), quantized_experts("int4-64", experts, 64, 128), expert)


IDLE = ("float", "int8", "int4-128", "Q4_K")


@pytest.mark.parametrize("form", [*IDLE, *slow(form for form in FORMATS if form not in IDLE)])
def test_idle_experts_are_not_read(form):
    """A scale or a weight that is not a number would show; a word would not, so it has another value."""
    weights, expert = quantized_experts(form, 8, 70, 256), torch.tensor([2, 5, 2])
    x = torch.randn(3, 256)
    want = run(x, weights, expert)
    for e in (0, 1, 3, 4, 6, 7):
        weights.weight[e] = float("nan") if form == "float" else 0x7777
        if weights.scale is not None:
            weights.scale[e] = (
                -1 if weights.scale.dtype == torch.int32 else float("nan")
            )  # -1: two bf16 that are none
    assert torch.equal(run(x, weights, expert), want)


@pytest.mark.parametrize("form,splits", [
    ("float", 1), ("int8", 3),
    *slow([("int8", 1), ("float", 3), ("int4-32", 3), ("int4-128", 3), ("int4-64", 3)]),
])  # fmt: skip
def test_a_row_has_the_same_bits_beside_any_others(in_order, form, splits):
    """Alone, among others, in another place and behind others of its expert, in tiles of every height."""
    weights, expert = quantized_experts(form, 4, 33, 384), torch.randint(4, (40,))
    x = torch.randn(40, 384)
    whole = run(x, weights, expert, splits=splits)
    torch.testing.assert_close(whole, weights.reference(x, expert), atol=5e-4, rtol=2e-5)
    for rows in (1, 7):
        alone = run(x[-rows:].clone(), weights, expert[-rows:], splits=splits)
        assert torch.equal(alone, whole[-rows:]), rows
    order = torch.randperm(40)
    for tokens in (32, 64):
        turned = run(x[order], weights, expert[order], tokens, splits)
        assert torch.equal(turned, whole[order]), tokens
    of_one = run(x, weights, torch.full((40,), int(expert[0])), 64, splits)
    assert torch.equal(of_one[0], whole[0])


def test_x_and_weights_by_strides():
    """Rows that are not contiguous, and the transposed weights of a gradient."""
    expert = torch.tensor(ROUTINGS["two tokens"])
    weights = quantized_experts("float", 8, 70, 96)
    check(torch.randn(96, 4).T, weights, expert)
    check(torch.randn(4, 70), weights._replace(weight=weights.weight.transpose(1, 2)), expert)


# ------------------------------------------------------------------------------------------ a layer


@pytest.mark.parametrize("format", ["none", "int8", "int4"])
def test_a_layer(monkeypatch, format):
    """A mixture as on CUDA: packed for it, the lists made once, and every row's sum as with plain weights."""
    config = ModelConfig(
        dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=9, n_experts=4,
        experts_per_token=2,
    )  # fmt: skip
    plain = Mixture(config).requires_grad_(False)
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    ours, made = Mixture(config).requires_grad_(False), []
    ours.load_state_dict(plain.state_dict())
    if format != "none":
        planes_of_cuda(monkeypatch)
        group = 32 if format == "int4" else 0  # int8 has a scale per output on CUDA
        for name in ("w13", "w2"):
            layer = rounded(format, getattr(plain, name).weight, group=group)
            setattr(ours, name, layer)
            getattr(plain, name).weight[:] = layer.dequantize()
    x = torch.randn(2, 7, 64)
    want = plain(x)

    def route(expert, experts):
        made.append(backends.triton.experts.expert_lists(expert, experts))
        return made[-1]

    cuda = choose(torch.device("cuda"))
    floats = lambda x, weight, lists: product(x, weight, None, lists)  # noqa: E731
    use_backend(ours, Backend(vars(cuda) | {"route": route, "experts_linear": floats}))
    torch.testing.assert_close(ours(x), want, atol=1e-5, rtol=1e-5)
    assert len(made) == 1
