"""Checks that need a CUDA device: its operators, their bits, and token identity.

pytest -m smoke -n 8 --maxprocesses 8 tests/cuda/test_gpu.py     # the most telling ones, in a minute or so
pytest -m gpu -n 8 --maxprocesses 8 tests/cuda/test_gpu.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import backends.epilogues
import backends.experts
import backends.linear
import backends.triton.functions
import backends.weight
import draft_tree
import lost_device
import reference
import sampling
import windows
from backends.epilogues import LazyMatmul, UnnormalizedRows
from backends.triton.layout import BLOCK_FORMS, SUPER
from decode import build_cycles
from draft_tree import EAGLE1_PATHS, DynamicTree, StaticTree
from drafter_files import write_drafter
from drafters import RootOnly
from drafts.by_value import ByValue, beside
from drafts.noise import uniforms
from eagle_draft import EagleDrafter, load_head
from files.config import read_config
from files.weights import load_model
from helpers import (
    GOLDEN,
    Mixture,
    decode,
    quantized,
    quantized_experts,
    rounded,
    share_that_differs,
    with_head_norms,
)
from kv_cache import KVCache
from model import ModelConfig, RotaryEmbeddings, Transformer
from models.operators import sliding
from reference import choose, use_backend
from run.engine import Engine
from run.generate import generate, load
from run.options import DEMO, GenerateConfig
from run.session import Session
from run.warm_up import warm_up
from runtime import WARM_UPS
from scripts.train import train_eagle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]
OURS = choose(torch.device("cuda"))
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
SMALL = {  # keys of config.json: of every family below
    "vocab_size": 32, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {  # by model_type: steps that no golden model has
    "qwen3_5_text": {  # states, an output gate
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {  # sinks, windows, a clamped gate of experts with biases
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
        "num_local_experts": 6, "num_experts_per_tok": 2,
    },
    "gemma4_text": {  # heads of 512, a shared cache, embeddings by layer
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "global_head_dim": 512,
        "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "qwen2_moe": {  # a shared expert
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "glm4_moe": {  # experts by sigmoids, half of a head turned
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "use_qk_norm": True,
    },
    "glm4": {},  # half of a head turned, four norms a layer
}  # fmt: skip
TREES = {"chain": StaticTree.chain(5), "static": StaticTree(EAGLE1_PATHS), "dynamic": DynamicTree()}
# of a test, among several processes; the longest compile a dozen kernels or three steps
LIMIT_S = 180
SMOKE = """
test_captured_cycles_equal_vanilla_and_never_wait[1-0.0]
test_captured_cycles_equal_vanilla_and_never_wait[2-1.0]
test_four_rows_that_come_and_go[True-0.0]
test_trees_equal_vanilla[llama_mha-dynamic-0.0-True]
test_trees_equal_vanilla[llama_mha-chain-1.0-False]
test_the_demo_with_grouped_queries_equals_vanilla[0.0-]
test_the_demo_with_grouped_queries_equals_vanilla[1.0-penalties]
test_a_tree_over_every_kind_of_layer_equals_vanilla[qwen3_5_text-torch.bfloat16-1.0]
test_a_tree_over_every_kind_of_layer_equals_vanilla[gpt_oss-torch.bfloat16-1.0]
test_a_tree_over_every_kind_of_layer_equals_vanilla[gemma4_text-torch.bfloat16-1.0]
test_a_tree_over_every_kind_of_layer_equals_vanilla[lfm2-torch.bfloat16-1.0]
test_tree_attention[128-torch.bfloat16-(32, 32)]
test_tree_attention[128-torch.bfloat16-(32, 8)]
test_a_tree_has_the_bits_of_vanilla_decoding[chain-torch.bfloat16-(32, 32)-250]
test_a_tree_has_the_bits_of_vanilla_decoding[tree-3-torch.bfloat16-(32, 32)-250]
test_a_tree_has_the_bits_of_vanilla_decoding[tree-60-torch.bfloat16-(32, 8)-4080]
test_sliding_windows[tree-256-torch.bfloat16-(8, 4)-512]
test_captured_attention_reads_the_length_from_the_device[60]
test_compaction[torch.bfloat16-32-128]
test_compiled_and_captured_compaction
test_topk_logsumexp[128256-10]
test_quantized_product[int4-128-torch.bfloat16-70-384]
test_quantized_product[int4-128-torch.bfloat16-4096-11008]
test_quantized_product[int4-32-torch.bfloat16-4095-1024]
test_quantized_product[int8-torch.bfloat16-4095-1024]
test_quantized_product[float-torch.bfloat16-4096-11008]
test_a_row_has_the_same_bits_beside_any_others[float-torch.bfloat16-4096-4096]
test_a_layers_kernels_one_after_the_other[float-26]
test_a_row_has_the_same_bits_beside_any_others[int4-128-torch.bfloat16-4096-4096]
test_a_row_has_the_same_bits_beside_any_others[int4-128-torch.bfloat16-4096-11008]
test_a_row_has_the_same_bits_beside_any_others[int8-torch.bfloat16-4096-4096]
test_a_layers_kernels_one_after_the_other[int4-128-26]
test_a_layers_kernels_one_after_the_other[Q4_K-26]
test_rotary_cache[heads1-True]
test_a_compiled_product[int4-128]
test_eight_of_128_experts[int4-128]
test_product_with_experts[float-torch.bfloat16-1023-1024]
test_captured_experts_follow_the_routing[int4-60]
test_gumbel_noise[49152]
""".strip().splitlines()  # conftest.py marks and orders them: whole decodings, which take longest, first


@pytest.fixture(autouse=True)
def _device_watched():
    with lost_device.watched(torch.cuda.synchronize, LIMIT_S):
        yield


# relative error of the norm: rounding the result to bf16 or fp16 alone gives 1.7e-3 or 2e-4; so do the probabilities
ATTENTION_ERRORS = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}


def attention_inputs(heads, starts, rows, window, dtype, E=128, spare=7):
    """Arguments of tree_attention on the GPU; beyond the window the cache is not a number."""
    H, kv_heads = heads
    torch.manual_seed(0)
    B, S = len(starts), max(starts) + window + spare
    q = torch.randn(B, rows, H, E, device="cuda").to(dtype)
    k, v = (torch.randn(B, kv_heads, S, E, device="cuda").to(dtype) for _ in range(2))
    for b, start in enumerate(starts):
        k[b, :, start + window :] = v[b, :, start + window :] = float("nan")
    mask = torch.rand(B, rows, window, device="cuda") < 0.4
    mask |= (
        torch.arange(window, device="cuda") == torch.arange(rows, device="cuda")[:, None]
    )  # a row sees itself
    return q, k, v, torch.tensor(starts, device="cuda"), mask


@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (28, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", ATTENTION_ERRORS, ids=str)
@pytest.mark.parametrize("E", [16, 64, 80, 128, 256])
def test_tree_attention(poisoned, E, dtype, heads):
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows, window in ((1, 1), (7, 7), (10, 50), (60, 60), (64, 64), (256, 256)):
        for starts in ([0], [300, 17], [255, 256, 4096]):
            q, k, v, start, mask = attention_inputs(heads, starts, rows, window, dtype, E)
            got = OURS.attention(q, k, v, start, mask)
            clean = (t.nan_to_num().float() for t in (k, v))
            want = reference.attention(q.float(), *clean, start, mask)
            assert got.dtype == dtype and got.shape == want.shape
            error = (got.float() - want).norm() / want.norm()
            assert error < ATTENTION_ERRORS[dtype], (rows, starts, float(error))


def random_paths_of_nodes(nodes, back, seed):
    """The path of every node of a tree, each below one of the last `back` before it; 1: a chain."""
    generator = torch.Generator().manual_seed(seed)
    paths = [[0]]
    for node in range(1, nodes):
        parent = torch.randint(max(0, node - back), node, (1,), generator=generator).item()
        paths.append([*paths[parent], node])
    return paths


def mask_of(paths):
    mask = torch.zeros(1, len(paths), len(paths), dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    return mask.cuda()


def alone(q, k, v, start, path):
    """Attention of a node behind its ancestors, which lie where they are accepted; others are not numbers."""
    accepted = [x.clone() for x in (k, v)]
    for old, new in zip((k, v), accepted):
        new[:, :, start:] = float("nan")
        new[:, :, start : start + len(path)] = old[:, :, [start + node for node in path]]
    end = torch.tensor([start + len(path) - 1], device="cuda")
    one = torch.ones(1, 1, 1, dtype=torch.bool, device="cuda")
    return OURS.attention(q[:, [path[-1]]], *accepted, end, one)


@pytest.mark.parametrize("start", [0, 50, 250, 1000, 3000, 4080])  # chunks double at 4,096
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (28, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", ATTENTION_ERRORS, ids=str)
@pytest.mark.parametrize(
    "back", [1, 3, 60], ids=lambda back: "chain" if back == 1 else f"tree-{back}"
)
def test_a_tree_has_the_bits_of_vanilla_decoding(back, dtype, heads, start):
    """A row has the bits that the docstring of `plan_attention` states.

    Cases: single rows, other numbers of rows, a batch, an unused window, a table of paths.
    """
    q, k, v, _, _ = attention_inputs(heads, [start], 60, 60, dtype)
    paths = random_paths_of_nodes(60, back, start)
    mask = mask_of(paths)
    at = torch.tensor([start], device="cuda")
    tree = OURS.attention(q, k, v, at, mask)
    for node in (0, 1, 5, 8, 20, 30, 31, 45, 58, 59):
        got = alone(q, k, v, start, paths[node])
        assert torch.equal(got, tree[:, [node]]), (node, len(paths[node]))
    for rows in (2, 6, 16, 17, 33, 59):  # the first nodes are a tree, too
        part = OURS.attention(q[:, :rows], k, v, at, mask[:, :rows, :rows])
        assert torch.equal(part, tree[:, :rows]), rows
    assert torch.equal(OURS.attention(q, k, v, at, mask, paths=OURS.path_table(mask)), tree)
    k, v = k.nan_to_num(), v.nan_to_num()
    wide = torch.nn.functional.pad(mask, (0, 4))
    assert torch.equal(OURS.attention(q, k, v, at, wide), tree)
    q, k, v = (torch.cat((torch.randn_like(x), x)) for x in (q, k, v))
    starts = torch.tensor([start // 2, start], device="cuda")
    masks = torch.cat((torch.ones_like(mask), mask))
    assert torch.equal(OURS.attention(q, k, v, starts, masks)[1:], tree)


@pytest.mark.parametrize("size", [5, 40, 512])
@pytest.mark.parametrize("heads", [(8, 4), (16, 2)], ids=str)
@pytest.mark.parametrize("dtype", ATTENTION_ERRORS, ids=str)
@pytest.mark.parametrize("E", [128, 256])
@pytest.mark.parametrize("kind", ["token", "chain", "tree", "level", "chunk"])
def test_sliding_windows(poisoned, kind, E, dtype, heads, size):
    """As Gemma 3's; a row of a tree has the bits of its token alone, and no block reads what no row sees."""
    for starts in ([0], [300, 700], [4700]):
        step = windows.random_step(kind, starts, heads, E)
        step = step._replace(**{name: getattr(step, name).to(dtype) for name in "qkv"})
        want = windows.expected(step, size, E**-0.5).cuda()
        window = sliding(step.window, size)
        for b in range(len(starts)):
            hidden = int(window.first[b].min()) // 64 * 64  # tiles are read whole
            step.k[b, :, :hidden] = step.v[b, :, :hidden] = float("nan")
        operands = [
            x.cuda() for x in (step.q, step.k, step.v, window.start, window.mask, window.first)
        ]
        got = OURS.attention(*operands)
        error = (got - want).norm() / want.norm()
        assert error < ATTENTION_ERRORS[dtype], (starts, float(error))
        if kind == "chunk":
            continue  # many tokens are not decoded one by one
        paths = OURS.path_table(step.window.mask.cuda())  # of layers without windows
        assert torch.equal(OURS.attention(*operands, paths=paths), got)
        for b, of_rows in enumerate(step.paths):
            for t in {0, len(of_rows) // 2, len(of_rows) - 1}:
                single = OURS.attention(*(x.cuda() for x in step.alone(b, t, size)))
                assert torch.equal(single[0, 0], got[b, t]), (starts, b, t)


@pytest.mark.parametrize("rows", [1, 60])
def test_captured_attention_reads_the_length_from_the_device(rows):
    """One graph for all lengths; and ten equal results for each."""
    q, k, v, start, mask = attention_inputs((32, 8), [2000], rows, 60, torch.bfloat16, spare=0)
    want = {}
    for length in (0, 100, 777, 2000):
        start.fill_(length)
        want[length] = OURS.attention(q, k, v, start, mask)
    paths = OURS.path_table  # in the graph, as a step has it
    graph, y = captured(lambda: OURS.attention(q, k, v, start, mask, paths=paths(mask)))
    for length in (*want, *reversed(want)) * 5:
        y.fill_(float("nan"))
        start.fill_(length)
        graph.replay()
        assert torch.equal(y, want[length])


def filled_cache(kv_heads, E, batch, slots, dtype, layers=3):
    """A cache of random rows on the GPU."""
    config = ModelConfig(64, layers, kv_heads, kv_heads, E, 64, 9)
    cache = KVCache.empty(config, batch, slots, dtype, "cuda")
    for buffer in (*cache.k, *cache.v):
        buffer.normal_()
    return cache


def compact_by_reference(cache, start, path):
    """The contents of the buffers after compaction. The cache itself stays as it is."""
    want = [b.clone() for b in (*cache.k, *cache.v)]
    reference.compact(want, torch.empty(0), start, path)
    return want


def same_buffers(cache, want):
    return all(
        torch.equal(ours, theirs) for ours, theirs in zip((*cache.k, *cache.v), want, strict=True)
    )


def random_paths(batch, steps, nodes):
    """Ascending node numbers from the root, then rows that stay, as after `compaction`; every row of another length."""
    paths = torch.arange(steps, device="cuda").repeat(batch, 1)
    for row in range(batch):
        accepted = steps - 1 - row * (steps - 1) // batch
        paths[row, 1 : accepted + 1] = (
            1 + torch.randperm(nodes - 1, device="cuda")[:accepted].sort().values
        )
    return paths


@pytest.mark.parametrize("kv_heads,E", [(1, 16), (8, 128), (32, 128), (5, 80), (2, 256)])
@pytest.mark.parametrize("dtype", ATTENTION_ERRORS, ids=str)
def test_compaction(dtype, kv_heads, E):
    """Bit for bit, ten times over: a warp that writes before another has read would show in some of them."""
    torch.manual_seed(0)
    for batch in (1, 2):
        cache = filled_cache(kv_heads, E, batch, 700, dtype)
        for steps in (1, 2, 7, 33, 64) * 10:
            start = torch.randint(700 - 64, (batch,), device="cuda")
            path = random_paths(batch, steps, 64)
            want = compact_by_reference(cache, start, path)
            backends.triton.functions.compact([*cache.k, *cache.v], cache.addresses, start, path)
            assert same_buffers(cache, want), (batch, steps)


def test_compiled_and_captured_compaction():
    """One launch for all layers; the path and the length are read from the device, and no buffer is copied."""
    cache = filled_cache(8, 128, 2, 300, torch.bfloat16, layers=32)
    start = torch.zeros(2, dtype=torch.long, device="cuda")
    path = torch.arange(7, device="cuda").repeat(2, 1)
    compact = partial(cache.compact, backend=OURS)
    step = torch.compile(compact, fullgraph=True, dynamic=False)
    for _ in range(2):
        step(start, path)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(start, path)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    launched = [event.key for event in profile.key_averages() if event.device_type == cuda]
    assert launched == ["compact_kernel"], launched
    graph, _ = captured(lambda: step(start, path))
    for starts in ([0, 236], [7, 100], [100, 7]):
        start.copy_(torch.tensor(starts))
        path.copy_(random_paths(2, 7, 60))
        want = compact_by_reference(cache, start, path)
        graph.replay()
        assert same_buffers(cache, want)


@pytest.mark.parametrize("k", [1, 10, 16, 64, 65])
@pytest.mark.parametrize("V", [100, 2048, 32000, 128256])
def test_topk_logsumexp(poisoned, V, k):
    torch.manual_seed(0)
    scores = torch.randn(2, 10, V, device="cuda") * 10
    scores[1] = scores[1].round()  # ties
    scores[0, 3, 20:] = float("-inf")  # as after top-p
    scores[0, 4] = float("-inf")
    values, index, total = backends.triton.functions.topk(scores, k)
    want, order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, want[..., :k])
    if k <= 64:
        assert torch.equal(index, order[..., :k])
    assert torch.equal(scores.gather(-1, index), values)
    torch.testing.assert_close(
        total, scores.double().logsumexp(-1, keepdim=True).float(), atol=1e-4, rtol=1e-6
    )
    assert torch.equal(backends.triton.functions.best(scores, None, None), order[..., 0])


@pytest.mark.parametrize("k", [1, 10, 64, 65])
@pytest.mark.parametrize("V", [100, 32000, 128256])
def test_grow_level(poisoned, V, k):
    """A level and all that follows from its scores, which are those of a level below a root of value 0."""
    torch.manual_seed(0)
    B, R, W, count = 2, 10, 50, min(k, 10)
    logits = (torch.randn(B, R, V, device="cuda") * 10).round(decimals=1)  # ties
    ids, seen = torch.randperm(2 * V, device="cuda")[:V], torch.rand(B, R, W, device="cuda") < 0.3
    operator = torch.ops.gpt_eagle.grow_level
    zeros = torch.zeros(B, R, device="cuda")
    tokens, values, *_ = operator(logits, 1.25, ids, zeros, seen, None, k, 0, 0)
    scores, index = (1.25 * logits).sort(dim=-1, descending=True, stable=True)
    scores = scores[..., :k] - (1.25 * logits).logsumexp(-1, keepdim=True)
    assert k > 64 or torch.equal(tokens, ids[index[..., :k]].flatten(1))
    torch.testing.assert_close(values.view_as(scores), scores.clamp(max=0), atol=1e-4, rtol=1e-6)
    children = draft_tree.Children(tokens.view(B, R, k), values.view(B, R, k))
    values = -torch.rand(B, R, device="cuda").round(decimals=1)
    got = operator(logits, 1.25, ids, values, seen, None, k, count, 3)
    level = draft_tree.Level(k, count, first_slot=3)
    assert all(map(torch.equal, got, reference.grow_level(children, values, seen, level)))


@pytest.mark.parametrize("P,N", [(10, 8), (510, 60), (510, 64), (20000, 33)])
def test_nodes_of_a_tree(poisoned, P, N):
    torch.manual_seed(0)
    values = -torch.randint(0, 99, (2, P), device="cuda").float()
    values[1, 3:] = float("-inf")
    chosen = torch.ops.gpt_eagle.best_nodes(values, N - 1)
    assert torch.equal(chosen, reference.best_nodes(values, N - 1))
    above = (torch.rand(2, N - 1, device="cuda") * torch.arange(1, N, device="cuda")).long()
    nodes = torch.cat((torch.full((2, 1), -1, device="cuda"), chosen), 1).gather(1, above)
    parents = torch.randint(-1, P, (2, P), device="cuda").scatter(1, chosen, nodes)
    got = torch.ops.gpt_eagle.link_nodes(chosen, parents, N - 1)
    assert all(map(torch.equal, got, reference.link_nodes(chosen, parents, N - 1)))


FORMATS = ["float", "int4-128", "int4-64", "int4-32", "int4-64-zeros", "int8", *BLOCK_FORMS]
# relative error of a product's norm: rounding the result to bf16 or fp16 alone gives 1.7e-3 or 2e-4
ERRORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}


def check_product(got, want, dtype, case):
    """A product beside its reference in fp32."""
    assert got.dtype == dtype and got.shape == want.shape
    error = (got.float() - want).norm() / want.norm()
    assert error < ERRORS[dtype], (case, float(error))


def captured(step):
    """Capture a call. Returns: its graph and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def superblocks(form: str, K: int) -> int:
    """The inputs, without those that are no whole superblock of a K type."""
    return K - K % SUPER if form.endswith("_K") else K


@pytest.mark.parametrize("N,K", [(70, 384), (4095, 1024), (4096, 11008)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_quantized_product(poisoned, form, dtype, N, K):
    torch.backends.cuda.matmul.allow_tf32 = False
    K = superblocks(form, K)
    weights = quantized(form, N, K, "cuda")
    for rows in (1, 5, 16, 26, 32, 60, 64, 65, 200):
        x = torch.randn(rows, K, device="cuda").to(dtype)
        check_product(weights.operator(x), weights.reference(x.float()), dtype, rows)


@pytest.mark.parametrize("N,K", [(4096, 4096), (12288, 4096), (4096, 11008)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others(form, dtype, N, K):
    """A verified tree and a single token compute the same function, in 16 bits too."""
    weights = quantized(form, N, K, "cuda")
    x = torch.randn(200, K, device="cuda").to(dtype)
    whole = weights.operator(x)
    for rows in (1, 5, 16, 17, 26, 32, 33, 60, 64, 65):
        assert torch.equal(weights.operator(x[:rows]), whole[:rows]), rows
        assert torch.equal(weights.operator(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_rows_of_a_packed_embedding(poisoned, form):
    weights = quantized(form, 4095, 1024, "cuda")
    ids = torch.tensor([0, 4094, 7, 7, 33], device="cuda")
    want = torch.ops.gpt_eagle.read_planes(
        weights.packed.cpu(), weights.scale.cpu(), ids.cpu(), 1024, torch.float32
    )
    for dtype in ERRORS:
        got = backends.planes.read_rows(weights.packed, weights.scale, ids, 1024, dtype)
        assert torch.equal(got.cpu(), want.to(dtype)), dtype


@pytest.mark.parametrize("form", ["float", "int4-128", "int8", "Q4_K"])
def test_a_compiled_product(form):
    weights = quantized(form, 4096, 1024, "cuda")
    x = torch.randn(5, 1024, device="cuda").bfloat16()
    step = torch.compile(lambda x: weights.operator(x * 2) + 1, fullgraph=True)
    torch.testing.assert_close(step(x), weights.operator(x * 2) + 1)


@pytest.mark.parametrize("rows", [1, 26, 60])
@pytest.mark.parametrize("form", ["float", "int4-128", "int8", *BLOCK_FORMS])
def test_a_layers_kernels_one_after_the_other(form, rows):
    """A product in front of a residual sum and an unscaled norm, one behind it with SwiGLU, one that is rotated and
    cached, scores in fp32: beside the references; each row of them alone; and a hundred replays with the same bits."""
    options, close = {"device": "cuda", "dtype": torch.bfloat16}, {"rtol": 2e-2, "atol": 2e-2}
    narrow, wide = quantized(form, 4096, 4096, "cuda"), quantized(form, 8192, 4096, "cuda")
    x, stream = torch.randn(2, 1, rows, 4096, **options)
    scale = torch.rand(4096, **options)
    slots = torch.arange(rows, device="cuda")[None]
    rope = reference.rope_angles(torch.rand(64, device="cuda"), slots * 9)
    caches = torch.zeros(2, 1, 8, rows, 128, **options)

    def product(x: torch.Tensor | UnnormalizedRows, weights) -> LazyMatmul:
        packed = weights.packed.bfloat16() if form == "float" else weights.packed
        given = x if isinstance(x, UnnormalizedRows) else (x, None)
        return LazyMatmul(*given, packed, weights.scale)

    def layer(at: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        operands = product(x[:, at], narrow).operands()
        total, *norm = torch.ops.gpt_eagle.add_product(*operands, stream[:, at], scale, 1e-5)
        gated = OURS.swiglu(product(UnnormalizedRows(*norm), wide))
        angles = tuple(part[:, at] for part in rope)
        qkv = product(UnnormalizedRows(*norm), narrow)  # of 16 + 2 x 8 heads
        q = OURS.rotary_cache(qkv, angles, *caches, slots[:, at])
        wide_x = product(gated, narrow).operands()
        if form == "float":
            scores = backends.linear.halves_product(*wide_x[:2], "fp32")
        else:
            w = backends.planes.w4a16 if form.startswith("int4") else backends.planes.w8a16
            w = backends.planes.blocks_a16 if form in BLOCK_FORMS else w
            scores = w(*wide_x, epilogue="fp32")
        return total, norm[0], norm[1].T[None], gated, q, scores

    got = layer()
    cached = caches.clone()
    product_of_x = narrow.reference(x.float())
    total, norm = backends.epilogues.add_norm_reference(stream, product_of_x, scale, 1e-5)
    ours = UnnormalizedRows(got[1], got[2][0].T)
    want = [total, norm.values, norm.squares.T[None]]
    want.append(backends.epilogues.swiglu_reference(wide.reference(ours.values.float()), ours))
    theirs = torch.zeros_like(cached)
    y = narrow.reference(ours.values.float())
    want.append(backends.epilogues.rotary_cache_reference(y, ours, rope, *theirs, slots))
    for mine, other in zip((*got[:5], *cached), (*want, *theirs), strict=True):
        size = other.abs().max()
        torch.testing.assert_close(mine / size, other.to(mine.dtype) / size, **close)
    scores = narrow.reference(got[3].float())
    assert got[5].dtype == torch.float32 and (got[5] - scores).norm() < 1e-4 * scores.norm()
    last = slice(rows - 1, rows)
    assert all(torch.equal(one, whole[:, last]) for one, whole in zip(layer(last), got))
    assert torch.equal(caches, cached)
    graph, replayed = captured(lambda: [layer() for _ in range(4)])
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, sum(replayed, ()), got * 4))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)])
def test_rotary_cache(heads, normed):
    """In 16 bits hardly any value differs: each is rounded where the plain operations round it."""
    (H, kv_heads), (B, T, S, E) = heads, (2, 26, 300, 128)
    qkv = torch.randn(B, T, H + 2 * kv_heads, E, device="cuda").bfloat16()
    slots = torch.randperm(S, device="cuda")[:T].expand(B, -1)
    positions = torch.randint(0, 4000, (B, T), device="cuda")
    rope = reference.rope_angles(torch.rand(E // 2, device="cuda"), positions)
    norms = (*(1 + torch.randn(2, E, device="cuda") / 4).bfloat16(), 1e-6) if normed else None
    cache = torch.randn(2, B, kv_heads, S, E, device="cuda").bfloat16()
    ours, theirs = (tuple(cache.clone()) for _ in range(2))
    got = OURS.rotary_cache(qkv, rope, *ours, slots, norms)
    want = reference.rotary_cache(with_head_norms(qkv, kv_heads, norms), rope, *theirs, slots)
    # of the largest values: an ulp that the norm was rounded otherwise
    near = 0.1 if normed else 0.02
    torch.testing.assert_close([got, *ours], [want, *theirs], atol=near, rtol=1e-2)
    assert share_that_differs([got, ours[0]], [want, theirs[0]]) < 0.01
    assert torch.equal(ours[1], theirs[1])  # values are moved as they are


# ------------------------------------------------------------------------------------------ experts

ROUTINGS = {  # how pairs of a token and an expert may be spread over eight experts
    "one token": [6, 1],
    "two tokens": [0, 7, 7, 2],
    "one expert": [3] * 130,
    "tree": [(7 * i + i // 3) % 8 for i in range(120)],
    "uneven": [2] * 70 + [7] + [0] * 9,
    "prompt": [(5 * i + i // 7) % 8 for i in range(512)],
}


def expert_weights(form, N, K, dtype, experts=8):
    """Random experts; float ones in the dtype of x."""
    weights = quantized_experts(form, experts, N, K, "cuda")
    return weights if weights.parts else weights._replace(weight=weights.weight.to(dtype))


@pytest.mark.parametrize("N,K", [(70, 384), (1023, 1024), (1024, 3584)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_product_with_experts(poisoned, form, dtype, N, K):
    torch.backends.cuda.matmul.allow_tf32 = False
    K = superblocks(form, K)
    weights = expert_weights(form, N, K, dtype)
    for name, spread in ROUTINGS.items():
        expert = torch.tensor(spread, device="cuda")
        x = torch.randn(len(expert), K, device="cuda").to(dtype)
        got = weights.operator(x, OURS.route(expert, 8))
        check_product(got, weights.reference(x.float(), expert), dtype, name)


@pytest.mark.parametrize("form", ["float", "int8", "int4-128", "int4-64-zeros"])
def test_eight_of_128_experts(poisoned, form):
    """As mixtures of many small experts have them: most get no row, or a few; a token's bits depend on no other."""
    weights = expert_weights(form, 70, 384, torch.bfloat16, 128)
    for tokens in (1, 7, 60, 256):
        expert = torch.rand(tokens, 128, device="cuda").topk(8).indices.flatten()
        x = torch.randn(len(expert), 384, device="cuda").bfloat16()
        got = weights.operator(x, OURS.route(expert, 128))
        check_product(got, weights.reference(x.float(), expert), torch.bfloat16, tokens)
        alone = weights.operator(x[:8], OURS.route(expert[:8], 128))
        assert torch.equal(alone, got[:8]), tokens


@pytest.mark.parametrize("N,K", [(4096, 1792), (3584, 4096)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others_of_its_expert(form, dtype, N, K):
    """Alone, in tiles of 16, 32 and 64 rows, at other places in them, and all with one expert."""
    weights = expert_weights(form, N, K, dtype)
    expert = torch.randint(8, (300,), device="cuda")
    x = torch.randn(300, K, device="cuda").to(dtype)
    whole = weights.operator(x, OURS.route(expert, 8))
    for rows in (1, 2, 5, 16, 32, 33, 120, 128, 129):
        for part in (slice(rows), slice(-rows, None)):
            got = weights.operator(x[part], OURS.route(expert[part], 8))
            assert torch.equal(got, whole[part]), rows
    order = torch.randperm(300, device="cuda")
    assert torch.equal(weights.operator(x[order], OURS.route(expert[order], 8)), whole[order])
    for e in range(8):
        crowded = weights.operator(x, OURS.route(torch.full_like(expert, e), 8))
        assert torch.equal(crowded[expert == e], whole[expert == e]), e


def expert_layer(format, dtype=torch.bfloat16):
    """A layer of eight random experts, on the GPU."""
    torch.manual_seed(0)
    config = ModelConfig(
        dim=512, n_layers=1, n_heads=8, n_kv_heads=8, head_dim=64, ffn_dim=896, vocab_size=9, n_experts=8,
        experts_per_token=2,
    )  # fmt: skip
    layer = Mixture(config).to("cuda", dtype).requires_grad_(False)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    if format != "none":
        for name in ("w13", "w2"):
            setattr(layer, name, rounded(format, getattr(layer, name).weight))
    use_backend(layer, OURS)
    return layer


@pytest.mark.parametrize("rows", [1, 2, 60, 256])
@pytest.mark.parametrize("format", ["none", "int8", "int4"])
def test_captured_experts_follow_the_routing(format, rows):
    """One graph for every routing; and equal results each time."""
    layer = expert_layer(format)
    inputs = [torch.randn(1, rows, 512, device="cuda").bfloat16() for _ in range(5)]
    inputs.append(inputs[0][:, :1].expand(1, rows, 512))  # all rows with the same two experts
    want = [layer(x) for x in inputs]
    x = inputs[0].clone()
    graph, y = captured(lambda: layer(x))
    for _ in range(10):
        for source, expected in zip(inputs, want):
            y.fill_(float("nan"))
            x.copy_(source)
            graph.replay()
            assert torch.equal(y, expected)


# ----------------------------------------------------------------------------------- whole decoding


def test_noise_is_the_same_on_both_devices():
    draws = torch.arange(5)[None]
    rows = []
    for device in ("cpu", "cuda"):
        one = torch.ones(1, dtype=torch.long, device=device)
        key = sampling.SamplingTensors(torch.tensor([7, 1], device=device), one, one)
        rows.append(uniforms(key, draws.to(device), 1000).cpu())
    assert torch.equal(*rows)


@pytest.mark.parametrize("vocab", [1501, 49152])
def test_gumbel_noise(vocab):
    """But for the last bits of two logarithms, as the CPU's; the same beside any other sequences."""
    keys = (torch.tensor([[7, 1], [2**32 - 1, 5], [0, 0]]), torch.tensor([3, 4, 2**31]))
    first = torch.tensor([0, 9, 2**30 - 3])
    rest = (torch.tensor([0, 1, 2]), torch.tensor([False, True, False]), first, 3, vocab, 0)
    want = reference.gumbel(*keys, *rest)
    on_device = [x.cuda() if isinstance(x, torch.Tensor) else x for x in (*keys, *rest)]
    got = OURS.gumbel(*on_device)
    torch.testing.assert_close(got.cpu(), want, atol=2e-6, rtol=2e-6)
    alone = [x[2:] if isinstance(x, torch.Tensor) else x for x in on_device]
    assert torch.equal(OURS.gumbel(*alone), got[2:])


def golden_config(temperature: float, **options) -> GenerateConfig:
    """Options on the golden models, whose prompts and answers are ids."""
    same = {"device": "cuda", "ignore_eos": True, "seed": 7, "compile": False}
    return GenerateConfig(temperature=temperature, **same | options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 2])
def test_captured_cycles_equal_vanilla_and_never_wait(batch, temperature):
    """Graphs of every preset, in turn; after the warm-up nothing in a cycle may stop the host."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_model(GOLDEN / "models/target_llama_mha", torch.float32, "cuda")
    head = load_head(GOLDEN / "models/head_eagle12_mha", target)
    config = golden_config(temperature, max_new_tokens=100, batch_size=batch)
    vanilla = build_cycles(Engine(target, (RootOnly(),), 256, config=config))
    drafter = beside(EagleDrafter(head, target, DynamicTree(4, 5, 20)))
    config = replace(config, compile=True)
    policy = ByValue()
    drafted = Engine(target, drafter.presets, 256, config=config, policy=policy)
    engine = warm_up(build_cycles(drafted))
    assert engine.captured and engine.policy.costs is not None
    want = decode(vanilla, *PROMPTS[:batch]).history
    for _ in range(2):
        session = Session(engine, [(i, 0) for i in range(batch)])
        decoding = session.decode_turn(list(PROMPTS[:batch]))
        next(decoding)
        for preset in range(len(engine.presets)):
            for _ in range(1 + WARM_UPS):
                session.time_cycle(preset)  # captured by now, whichever the tree policy preferred
        del session, decoding  # the next session takes over the buffers
        session = Session(engine, [(i, 0) for i in range(batch)])
        decoding = session.decode_turn(list(PROMPTS[:batch]))
        next(decoding)
        torch.cuda.set_sync_debug_mode("error")
        try:
            list(decoding)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert session.history == want
        assert all(replay.graph is not None for replay in session.buffers.replays.values())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("model", ["llama_mha", "mixtral"])
def test_trees_equal_vanilla(model, tree, temperature, compiled):
    """fp32 on the golden models; near ties are reported by the assertion's message."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_model(GOLDEN / f"models/target_{model}", torch.float32, "cuda")
    head = load_head(GOLDEN / f"models/head_eagle12_{model.removeprefix('llama_')}", target)
    config = golden_config(temperature, max_new_tokens=60, batch_size=2)
    vanilla = build_cycles(Engine(target, (RootOnly(),), 256, config=config))
    drafter = EagleDrafter(head, target, TREES[tree])
    drafted = build_cycles(
        Engine(target, (drafter,), 256, config=replace(config, compile=compiled))
    )
    assert decode(drafted, *PROMPTS).history == decode(vanilla, *PROMPTS).history


def random_target(family: str, dtype: torch.dtype) -> Transformer:
    """A model of the family with random weights, on the GPU."""
    target = Transformer(
        read_config(Path(family), SMALL | FAMILIES[family] | {"model_type": family})
    )
    draw = torch.Generator().manual_seed(0)
    for name, weight in target.named_parameters():
        weight.requires_grad_(False).normal_(float("norm" in name), 0.1, generator=draw)
    target = target.to("cuda", dtype).eval()
    target.ropes = RotaryEmbeddings(target.config.ropes, "cuda")  # which stay in fp32
    use_backend(target, choose(torch.device("cuda"), dtype))
    return target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_over_every_kind_of_layer_equals_vanilla(family, dtype, temperature):
    """The head is random, too: ten of 32 tokens a node are right now and then."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = random_target(family, dtype)
    torch.manual_seed(0)
    head = train_eagle.make_head(train_eagle.TrainConfig(init="feature"), target, [])
    head = head.to("cuda", dtype).requires_grad_(False)
    head.ropes = RotaryEmbeddings(head.config.model.ropes, "cuda")
    config = golden_config(temperature, max_new_tokens=60, batch_size=2)
    vanilla = build_cycles(Engine(target, (RootOnly(),), 256, config=config))
    drafter = EagleDrafter(head, target, DynamicTree(depth=3, topk=10, size=40))
    prompts = [[token % 32 for token in prompt] for prompt in PROMPTS]
    drafted = decode(build_cycles(Engine(target, (drafter,), 256, config=config)), *prompts)
    assert drafted.history == decode(vanilla, *prompts).history
    assert sum(drafted.stats.accept_lengths) > 5


def exact_options(temperature: float, new: int, checkpoint: str = DEMO) -> dict:
    """Options of `load` on the GPU, in fp32 without rounding to tf32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {"temperature": temperature, "max_new_tokens": new}
    return {"checkpoint": checkpoint, "device": "cuda", "dtype": "float32"} | sizes


@pytest.mark.parametrize(
    "rules", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}], ids=["", "penalties"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_demo_with_grouped_queries_equals_vanilla(temperature, rules):
    """The demo has two query heads per key head; the golden models have one."""
    options = exact_options(temperature, 64) | rules
    prompts = ["def read_lines(path):", "import os\n", "Question: What is 2 + 3?\nAnswer:"]
    plain = generate(load(draft="none", **options), prompts)
    for tree in ("chain", "dynamic"):
        assert generate(load(tree=tree, batch_size=2, **options), prompts).tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_ends_a_turn_as_in_vanilla(temperature):
    """Cycles that run already when the string is found change nothing in the next turn."""
    options = exact_options(temperature, 40) | {"stop": ["re", "s", "("]}
    prompts = [["def read_lines(path):", "def g(b):\n", "# "], ["class A:", "\n x"]]
    plain = generate(load(draft="none", **options), prompts)
    drafted = generate(load(tree="dynamic", **options), prompts)
    assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)
    assert "stop" in drafted.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra", "hydra++", "dflash", "jetspec"])
def test_trained_drafters_equal_vanilla(kind, temperature, tmp_path):
    """Files on disk, compiled and captured, in fp32; Medusa and Hydra with LM heads of their own."""
    write_drafter(tmp_path / kind, kind)
    target = str(GOLDEN / "models/target_llama_mha")
    options = exact_options(temperature, 24, target) | {"ignore_eos": True}
    plain = generate(load(draft="none", **options), PROMPTS[:1])
    drafted = load(head=str(tmp_path / kind), tree="dynamic", compile=True, **options)
    assert generate(drafted, PROMPTS[:1]).tokens == plain.tokens


def golden_engines(config: GenerateConfig, context: int, **changes) -> tuple[Engine, Engine]:
    """Vanilla, and warm with a dynamic tree and some options changed, in fp32 on golden models."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_model(GOLDEN / "models/target_llama_mha", torch.float32, "cuda")
    head = load_head(GOLDEN / "models/head_eagle12_mha", target)
    vanilla = build_cycles(Engine(target, (RootOnly(),), context, config=config))
    drafter = EagleDrafter(head, target, DynamicTree(4, 5, 20))
    config = replace(config, **changes)
    return vanilla, warm_up(build_cycles(Engine(target, (drafter,), context, config=config)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_take_one_prompt_after_the_other(compiled, temperature):
    """Prompts of one pass and of several are cached by graphs of each row, while the other rows decode."""
    config = golden_config(temperature, max_new_tokens=30, draft="none")
    prompts = [[(7 * i + i * i * k) % 97 for i in range(5 + 137 * k % 400)] for k in range(1, 9)]
    vanilla, drafted = golden_engines(config, 512, compile=compiled, batch_size=3)
    want = generate(vanilla, prompts).tokens
    for _ in range(2):
        assert generate(drafted, prompts).tokens == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_four_rows_that_come_and_go(compiled, temperature):
    """As a server drives a session: one row is released in the middle of its text, others take the next prompt."""
    config = golden_config(temperature, max_new_tokens=40, draft="none")
    prompts = [[(7 * i + i * i * k) % 97 for i in range(5 + 37 * k % 60)] for k in range(1, 8)]
    vanilla, drafted = golden_engines(config, 256, compile=compiled, batch_size=4)
    want = generate(vanilla, prompts).tokens
    session = Session(drafted)
    said, coming, rows = [[] for _ in prompts], iter(range(len(prompts))), [-1] * 4
    for steps in range(200):
        if steps == 5:
            session.release(1)  # its prompt is 1
        for row in range(4):
            if not session.busy(row) and (number := next(coming, None)) is not None:
                rows[row] = number
                session.admit(row, prompts[number], (number, 0))
        for row, new in enumerate(session.step()):
            said[rows[row]] += new
    assert 0 < len(said[1]) < 40 and said[1] == want[1][: len(said[1])]
    assert said[0] == want[0] and said[2:] == want[2:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("compile", [[], ["--compile"]], ids=["captured", "compiled"])
def test_two_gpus_decode_what_one_does(tmp_path, compile):
    """The demo in fp32, sampled, with NCCL's collectives in the graphs."""
    runs = []
    for number, start in enumerate(([], ["-m", "torch.distributed.run", "--nproc_per_node", "2"])):
        out = tmp_path / f"{number}.json"
        command = [sys.executable, *start, "generate.py", "--checkpoint", DEMO, *compile]
        command += (
            f"--json {out} --device cuda --dtype float32 --temperature 1 --tree dynamic".split()
        )
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0 and "not captured" not in done.stderr, done.stderr
        runs.append(json.loads(out.read_text())["tokens"])
    assert runs[0] == runs[1]
