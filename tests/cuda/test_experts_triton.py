"""Experts on CUDA without a GPU: compiled ahead of time, the operators' wiring, the plans.

test_interpreter.py runs them in the interpreter. Checks that need a GPU (bits of 16-bit products, graphs) are in test_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")

import backends.experts  # noqa: E402
import backends.triton.layout  # noqa: E402
from backends.triton.experts import most_tiles, plan_experts  # noqa: E402
from backends.triton.launch import TARGETS  # noqa: E402
from compiled_kernels import Case, expert_cases  # noqa: E402
from helpers import Mixture, Operators, check_product_fits, planes_of_cuda, slow  # noqa: E402
from model import ModelConfig  # noqa: E402
from quantize import FORMATS, Linear, stack  # noqa: E402
from reference import choose, use_backend  # noqa: E402
from run.heads import linear_of  # noqa: E402

# ----------------------------------------------------------------------------------------- compiled


# test_compiled_all takes every combination
@pytest.mark.parametrize("case", [
    Case("80", "int8", "bf16", 2, 4096, 14336, 8),
    Case("80", "int4-64-zeros", "bf16", 120, 4096, 14336, 8),
    Case("90", "int4-32", "bf16", 512, 4096, 14336, 60),  # a number of experts that is no power of two
    *slow([
        Case("90", "float", "bf16", 120, 4095, 14336, 8),  # N tells the compiler nothing
        Case("89", "float", "fp16", 512, 28672, 4096, 8),
        Case("86", "int4-32", "fp16", 512, 4096, 14336, 8),
        Case("90", "float", "fp32", 120, 4096, 14336, 8),
        Case("80", "int4-128", "fp32", 120, 4096, 14336, 8),
    ]),
])  # fmt: skip
def test_compiled(_fresh_cache, case):
    check_product_fits(case)


@pytest.mark.slow
def test_compiled_all(_fresh_cache):
    for case in expert_cases():
        check_product_fits(case)


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


# -------------------------------------------------------------------------------------------- plans


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
def test_splits_do_not_depend_on_the_number_of_rows(target, form):
    for dtype in (torch.bfloat16, torch.float32):
        for N, K, experts in ((28672, 4096, 8), (70, 96, 8), (2048, 768, 128)):
            facts = (N, K, *form, dtype, TARGETS[target], experts)
            cuts = [plan_experts(P, *facts) for P in (1, 2, 32, 33, 120, 129, 512, 4096)]
            assert len({cut.splits for cut in cuts}) == 1 and cuts[0].splits <= -(
                -K * form[0] // 1024
            )
            assert all(cut.stages >= 2 and cut.tokens in (16, 32, 64) for cut in cuts)
