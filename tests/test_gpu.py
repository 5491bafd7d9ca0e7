"""What only a CUDA device can show: the operators there, their bits, and token identity there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels
import sampling
from config import GenerateConfig
from decode import Engine, with_steps
from draft_tree import EAGLE1_PATHS, StaticTree
from drafters import RootOnly
from eagle_draft import DynamicTree, EagleDrafter, load_head
from generate import generate, load
from helpers import GOLDEN, decode, quantized
from model import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
TREES = {"chain": StaticTree.chain(5), "static": StaticTree(EAGLE1_PATHS), "dynamic": DynamicTree()}


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("rows", [1, 7, 60])
def test_tree_attention(rows, kv_heads):
    torch.manual_seed(0)
    B, H, E, S, W = 2, 8, 64, 512, 64
    q = torch.randn(B, rows, H, E, device="cuda")
    k, v = (torch.randn(B, kv_heads, S, E, device="cuda") for _ in range(2))
    start = torch.tensor([300, 17], device="cuda")
    mask = torch.rand(B, rows, W, device="cuda") < 0.5
    mask[:, :, 0] = True
    got, want = (f(q, k, v, start, mask) for f in (kernels.tree_attention, kernels.tree_attention_reference))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


FORMATS = ["int4-128", "int4-64", "int4-32", "int8"]
# relative error of a product's norm: rounding the result to bf16 or fp16 alone gives 1.7e-3 or 2e-4
ERRORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}


@pytest.fixture
def poisoned(monkeypatch):
    """What is not written is not a number."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, float("nan"), **options))


@pytest.mark.parametrize("N,K", [(70, 384), (4095, 1024), (4096, 11008)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_quantized_product(poisoned, form, dtype, N, K):
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = quantized(form, N, K, "cuda")
    for rows in (1, 5, 16, 26, 32, 60, 64, 65, 200):
        x = torch.randn(rows, K, device="cuda").to(dtype)
        got, want = weights.operator(x), weights.reference(x.float())
        assert got.dtype == dtype and got.shape == want.shape
        error = (got.float() - want).norm() / want.norm()
        assert error < ERRORS[dtype], (rows, float(error))


@pytest.mark.parametrize("N,K", [(4096, 4096), (12288, 4096), (4096, 11008)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others(form, dtype, N, K):
    """A verified tree and a lone token compute the same function, in 16 bits too."""
    weights = quantized(form, N, K, "cuda")
    x = torch.randn(200, K, device="cuda").to(dtype)
    whole = weights.operator(x)
    for rows in (1, 5, 16, 17, 26, 32, 33, 60, 64, 65):
        assert torch.equal(weights.operator(x[:rows]), whole[:rows]), rows
        assert torch.equal(weights.operator(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("rows", [1, 26, 60])
@pytest.mark.parametrize("form", ["int4-128", "int8"])
def test_a_captured_product_is_equal_100_times(form, rows):
    weights = quantized(form, 4096, 4096, "cuda")  # split: partial sums are added by a second kernel
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    want = weights.operator(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weights.operator(x)
    for _ in range(100):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)


@pytest.mark.parametrize("form", ["int4-128", "int8"])
def test_a_compiled_product(form):
    weights = quantized(form, 4096, 1024, "cuda")
    x = torch.randn(5, 1024, device="cuda").bfloat16()
    step = torch.compile(lambda x: weights.operator(x * 2) + 1, fullgraph=True)
    torch.testing.assert_close(step(x), weights.operator(x * 2) + 1)


def test_noise_is_the_same_on_both_devices():
    draws = torch.arange(5)[None]
    rows = []
    for device in ("cpu", "cuda"):
        one = torch.ones(1, dtype=torch.long, device=device)
        key = sampling.NoiseKey(torch.tensor([7, 1], device=device), one, one)
        rows.append(sampling.uniforms(key, draws.to(device), 1000).cpu())
    assert torch.equal(*rows)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_trees_equal_vanilla(tree, temperature, compiled):
    """fp32 on the golden models; near ties are reported by the assertion's message."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_model(GOLDEN / "models/target_llama_mha", torch.float32, "cuda")
    head = load_head(GOLDEN / "models/head_eagle12_mha", target)
    config = GenerateConfig(
        device="cuda", temperature=temperature, max_new_tokens=60, batch_size=2, ignore_eos=True, seed=7
    )
    vanilla = with_steps(Engine(config, target, RootOnly(), 256, ()))
    drafter = EagleDrafter(head, target, TREES[tree], config.sampling)
    drafted = with_steps(Engine(replace(config, compile=compiled), target, drafter, 256, ()))
    assert decode(drafted, *PROMPTS).history == decode(vanilla, *PROMPTS).history


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_demo_with_grouped_queries_equals_vanilla(temperature):
    """The demo has two query heads per key head; the golden models have one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {"device": "cuda", "dtype": "float32", "temperature": temperature, "max_new_tokens": 64}
    prompts = ["def read_lines(path):", "import os\n", "Question: What is 2 + 3?\nAnswer:"]
    plain = generate(load(draft="none", **options), prompts)
    for tree in ("chain", "dynamic"):
        assert generate(load(tree=tree, batch_size=2, **options), prompts).tokens == plain.tokens
