"""Properties of the Triton kernels on two machines: Triton's interpreter (test_interpreter.py), and a GPU (test_gpu.py).

A row of a test is one of a GPU, or of the interpreter, whose shapes are small and whose activations are fp32: it
computes nonsense in bf16, and has no inline assembly, which is tested apart.
"""

from __future__ import annotations

import os
import random as seeded
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import backends.epilogues
import backends.linear
import backends.planes
import reference
import windows
from backends.epilogues import LazyMatmul, UnnormalizedRows
from backends.triton.launch import SPLIT_TOKENS
from backends.triton.layout import BLOCK_FORMS, SUPER
from draft_tree import Children, Level
from functions import ROWS, Row, assert_same, best_by_sorting, leaves, mapped, run
from helpers import quantized, quantized_experts, share_that_differs, slow, with_head_norms
from models.operators import sliding
from reference import TORCH, choose

HERE = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if HERE else "cuda"
if HERE:
    from interpreted import DONE
OURS = choose(torch.device("cuda"))
OPERATORS = torch.ops.gpt_eagle
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
# relative error of the norm: rounding the result to bf16 or fp16 alone gives 1.7e-3 or 2e-4; so do the probabilities
ERRORS = {BF16: 4e-3, FP16: 5e-4, FP32: 1e-5}
ATTENTION_ERRORS = {BF16: 6e-3, FP16: 8e-4, FP32: 1e-5}
FORMATS = ["float", "int4-128", "int4-64", "int4-32", "int4-64-zeros", "int8", *BLOCK_FORMS]


def rows(names: str, gpu: Iterable, here: Iterable, slowly: Iterable = (), smoke: Iterable = ()):
    """Parametrize a test by the rows of this machine. slowly: further ones of the interpreter; smoke: of a GPU"""
    smoke = list(smoke)
    if HERE:
        here = list(here)
        chosen = [pytest.param(*row) for row in here]
        chosen += slow(row for row in slowly if row not in here)
    else:
        chosen = [pytest.param(*row, marks=[pytest.mark.smoke] * (row in smoke)) for row in gpu]
        assert sum(bool(row.marks) for row in chosen) == len(smoke), smoke
    return pytest.mark.parametrize(names, chosen, ids=str)


@pytest.fixture(autouse=True)
def _counters_are_zeros(poisoned):
    """Behind every launch, in the interpreter."""
    yield
    assert not HERE or not DONE.any()


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture a call on a GPU. Returns: its graph and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def check_close(got: Tensor, want: Tensor, dtype: torch.dtype, case: Any, errors: dict = ERRORS):
    """Compare a result with its reference in fp32."""
    assert got.dtype == dtype and got.shape == want.shape
    error = (got.float() - want).norm() / want.norm()
    assert error < errors[dtype], (case, float(error))


# ----------------------------------------------------------------------------- rows of cases/functions.py

# a function of a row -> how many of its cases
CASES = {
    "gumbel": 5, "best": 4, "topk": 4, "select_nodes": 12, "compact": 15, "rms_norm": 2, "attention": 2,
    "ngram_match": 5,
}  # fmt: skip
OF_TABLE = [row for row in ROWS if row.name in CASES]


def in_fp32(row: Row) -> list[tuple]:
    """Return cases of a row, none with a cache in 8 bits; of the interpreter as many as there is time for."""
    seeded.seed(0), torch.manual_seed(0)

    def fits(operands: tuple) -> bool:
        tensors = leaves(operands)
        coded = row.name != "compact" and any(x.dtype == torch.int8 for x in tensors)
        counts = [x for x in operands if isinstance(x, int)]
        few = sum(x.numel() for x in tensors) < 60_000 and 50_000 not in counts
        return not coded and (few or not HERE)

    def wide(x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x

    cases = [mapped(operands, wide) for operands in row.cases() if fits(operands)]
    return cases[:: max(1, len(cases) // CASES[row.name])][: CASES[row.name]] if HERE else cases


@pytest.mark.parametrize("row", OF_TABLE, ids=[row.name for row in OF_TABLE])
def test_a_function_is_its_definition(monkeypatch, row):
    if HERE:
        monkeypatch.setattr("backends.triton.ngram.BLOCK", 16)  # places in many tiles
        monkeypatch.setattr(
            "backends.triton.tree.MOST", 128
        )  # of nodes, numbered in several pieces
    cases = in_fp32(row)
    assert len(cases) > 1
    for operands in cases:
        want = run(row, row.definition or getattr(TORCH, row.name), operands)
        of_device = mapped(operands, lambda x: x.to(DEVICE))
        got = mapped(run(row, getattr(OURS, row.name), of_device), Tensor.cpu)
        sizes = [tuple(x.shape) for x in leaves(operands)]
        try:
            assert_same(got, want, {FP32: (5e-6, 5e-6)})
        except AssertionError as error:
            raise AssertionError(f"{row.name}, operands {sizes}") from error


# ----------------------------------------------------------------------------------------- products

COUNTS = (1, 5, 16, 26, 32, 60, 64, 65, 200)  # of rows of x
SMALL = {
    "int4-64": 5,
    "int4-32": 26,
    "int4-64-zeros": 70,
    "Q4_K": 26,
    "Q5_K": 1,
    "Q5_1": 26,
    "Q6_K": 33,
    "Q8_0": 5,
}


def whole_inputs(form: str, K: int) -> int:
    """Return the inputs, without those that are no whole superblock of a K type."""
    return K - K % SUPER if form.endswith("_K") else K


# in the interpreter N and K are multiples of no tile: 135 outputs, and a last block of K that is part full
@rows(
    "form, dtype, N, K, counts",
    gpu=[(*row, COUNTS) for shape in ((70, 384), (4095, 1024), (4096, 11008))
         for row in ((form, dtype, *shape) for form, dtype in product(FORMATS, DTYPES))],
    smoke=[("int4-128", BF16, 70, 384, COUNTS), ("int4-128", BF16, 4096, 11008, COUNTS), ("int4-32", BF16, 4095, 1024, COUNTS),
           ("int8", BF16, 4095, 1024, COUNTS), ("float", BF16, 4096, 11008, COUNTS)],
    here=[("int4-128", FP32, 135, 640, (1, 26, 70)), ("int8", FP32, 135, 640, (1, 26, 70)), ("float", FP32, 135, 640, (5, 70)),
          *((form, FP32, 135, 768, (count,)) for form, count in SMALL.items()), *((form, FP32, 135, 640, (5,)) for form in ("Q4_0", "Q4_1", "Q5_0")),
          *((form, FP32, 199, 512, (6,)) for form in FORMATS), ("int4-128", FP32, 1, 128, (6,)), ("Q4_K", FP32, 1, 256, (6,)),
          ("Q4_1", FP32, 70, 96, (6,)), *((form, FP32, 70, K, (6,)) for form in ("float", "int8") for K in (65, 200)),
          ("int4-128", FP32, 70, 9 * 256 - 128, (5,))],  # of 9 blocks, in uneven splits
    slowly=((form, FP32, 135, 768, (5, 16, 26, 60, 64, 70)) for form in FORMATS),
)  # fmt: skip
def test_product(poisoned, form, dtype, N, K, counts):
    torch.backends.cuda.matmul.allow_tf32 = False
    K = whole_inputs(form, K)
    weights = quantized(form, N, K, DEVICE)
    for count in counts:
        x = random(K, count, dtype=dtype).T  # not in one piece
        check_close(weights.operator(x), weights.reference(x.float()), dtype, count)


SHAPES = ((4096, 4096), (12288, 4096), (4096, 11008))


@rows(
    "form, dtype, N, K, most, counts",
    gpu=[(*row, 200, (1, 5, 16, 17, 26, 32, 33, 60, 64, 65)) for row in
         ((form, dtype, *shape) for form, dtype, shape in product(FORMATS, DTYPES, SHAPES))],
    smoke=[(form, BF16, 4096, K, 200, (1, 5, 16, 17, 26, 32, 33, 60, 64, 65)) for form, K in
           (("float", 4096), ("int4-128", 4096), ("int4-128", 11008), ("int8", 4096))],
    here=[(form, FP32, 40, 640, 64, (1, 16, 17, 33)) for form in ("float", "int4-64-zeros", "Q4_K")],
    slowly=[(form, FP32, 40, 640, 64, (1, 16, 17, 33)) for form in FORMATS],
)  # fmt: skip
def test_a_row_has_the_same_bits_beside_any_others(in_order, form, dtype, N, K, most, counts):
    """A verified tree and a single token compute the same function, in 16 bits too."""
    weights = quantized(form, N, whole_inputs(form, K), DEVICE)
    x = random(most, whole_inputs(form, K), dtype=dtype)
    whole = weights.operator(x)
    for count in counts:
        assert torch.equal(weights.operator(x[:count]), whole[:count]), count
        assert torch.equal(weights.operator(x[-count:]), whole[-count:]), count


READ = ("Q4_1", "Q5_K", "Q6_K", "Q8_0")  # with minima, with high bits, of bytes


@rows(
    "form, N, K", gpu=[(form, 4095, 1024) for form in BLOCK_FORMS],
    here=[(form, 70, 512) for form in READ], slowly=[(form, 70, 512) for form in BLOCK_FORMS],
)  # fmt: skip
def test_rows_of_a_packed_embedding(poisoned, form, N, K):
    """As numbers, bit for bit; any of them, in any order, more than once."""
    weights = quantized(form, N, K, DEVICE)
    ids = torch.tensor([0, N - 1, 7, 7, 33], device=DEVICE)
    want = weights.reference(torch.eye(K, device=DEVICE)).T[ids]
    for dtype in (FP32,) if HERE else DTYPES:
        for some in (ids, ids[:0]):
            got = backends.planes.read_rows(weights.packed, weights.scale, some, K, dtype)
            assert torch.equal(got, want[: len(some)].to(dtype)), dtype


# ------------------------------------------------------------------------------------------ experts

ROUTINGS = {  # how pairs of a token and an expert may be spread over eight experts
    "one row": [5],
    "one token": [6, 1],
    "two tokens": [0, 7, 7, 2],
    "one expert": [3] * 130,
    "tree": [(7 * i + i // 3) % 8 for i in range(120)],
    "idle ends": [4, 2, 2, 5, 4, 3] * 9,
    "uneven": [2] * 70 + [7] + [0] * 9,
    "prompt": [(5 * i + i // 7) % 8 for i in range(512)],
}
SOME = [("float", 384, "one row"), ("float", 384, "idle ends"), ("int8", 384, "one token"), ("int4-64-zeros", 128, "uneven"),
        ("float", 65, "tree"), ("int8", 200, "idle ends"), ("int4-32", 96, "two tokens"), ("Q5_1", 96, "one token"),
        ("Q4_K", 512, "two tokens"), ("int8", 512, "uneven")]  # fmt: skip


def expert_weights(form: str, N: int, K: int, dtype: torch.dtype, experts: int = 8) -> Any:
    """Random experts; float ones in the dtype of x."""
    weights = quantized_experts(form, experts, N, K, DEVICE)
    return weights if weights.parts else weights._replace(weight=weights.weight.to(dtype))


@rows(
    "form, dtype, N, K, routings",
    gpu=[(form, dtype, *shape, (*ROUTINGS,)) for form, dtype, shape in
         product(FORMATS, DTYPES, ((70, 384), (1023, 1024), (1024, 3584)))],
    smoke=[("float", BF16, 1023, 1024, (*ROUTINGS,))],
    here=[(form, FP32, 70, K, (routing,)) for form, K, routing in SOME],
    slowly=((form, FP32, 135, 512, (routing,)) for form, routing in product(FORMATS, ROUTINGS)),
)  # fmt: skip
def test_product_with_experts(poisoned, form, dtype, N, K, routings):
    torch.backends.cuda.matmul.allow_tf32 = False
    K = whole_inputs(form, K)
    weights = expert_weights(form, N, K, dtype)
    for name in routings:
        expert = torch.tensor(ROUTINGS[name], device=DEVICE)
        x = random(K, len(expert), dtype=dtype).T
        got = weights.operator(x, OURS.route(expert, 8))
        check_close(got, weights.reference(x.float(), expert), dtype, name)


@rows(
    "form, dtype, experts, each, counts",
    gpu=[(form, BF16, 128, 8, (1, 7, 60, 256)) for form in ("float", "int8", "int4-128", "int4-64-zeros")],
    smoke=[("int4-128", BF16, 128, 8, (1, 7, 60, 256))],
    here=[("int4-64", FP32, 1, 1, (50,)), ("int4-64", FP32, 20, 2, (25,))],
    slowly=[("int4-64", FP32, 3, 1, (50,)), ("int4-64", FP32, 128, 8, (7,))],
)  # fmt: skip
def test_any_number_of_experts(poisoned, form, dtype, experts, each, counts):
    """As mixtures of many small experts have them: most get no row, or a few; a token's bits depend on no other."""
    weights = expert_weights(form, 70, 384, dtype, experts)
    for tokens in counts:
        expert = torch.rand(tokens, experts, device=DEVICE).topk(each).indices.flatten()
        x = random(len(expert), 384, dtype=dtype)
        got = weights.operator(x, OURS.route(expert, experts))
        check_close(got, weights.reference(x.float(), expert), dtype, tokens)
        if not HERE:  # whose sums have another order for every tile
            alone = weights.operator(x[:each], OURS.route(expert[:each], experts))
            assert torch.equal(alone, got[:each]), tokens


@rows(
    "form, dtype, N, K, experts, pairs, counts",
    gpu=[(form, dtype, *shape, 8, 300, (1, 2, 5, 16, 32, 33, 120, 128, 129)) for form, dtype, shape in
         product(FORMATS, DTYPES, ((4096, 1792), (3584, 4096)))],
    here=[("int8", FP32, 33, 384, 4, 72, (1, 7, 40))],
    slowly=[(form, FP32, 33, 384, 4, 72, (1, 7, 40)) for form in ("float", "int4-32", "int4-64", "int4-128")],
)  # fmt: skip
def test_a_row_has_the_same_bits_beside_any_others_of_its_expert(
    in_order, form, dtype, N, K, experts, pairs, counts
):
    """Alone, in tiles of 16, 32 and 64 rows, at other places in them, and all with one expert."""
    weights = expert_weights(form, N, K, dtype, experts)
    expert = torch.randint(experts, (pairs,), device=DEVICE)
    x = random(pairs, K, dtype=dtype)
    whole = weights.operator(x, OURS.route(expert, experts))
    for count in counts:
        for part in (slice(count), slice(-count, None)):
            got = weights.operator(x[part], OURS.route(expert[part], experts))
            assert torch.equal(got, whole[part]), count
    order = torch.randperm(pairs, device=DEVICE)
    turned = weights.operator(x[order], OURS.route(expert[order], experts))
    assert torch.equal(turned, whole[order])
    for e in range(1 if HERE else experts):
        crowded = weights.operator(x, OURS.route(torch.full_like(expert, e), experts))
        assert torch.equal(crowded[expert == e], whole[expert == e]), e


# ---------------------------------------------------------------------------------------- attention

HEADS = ((32, 32), (32, 8), (28, 4), (8, 1))


def attention_inputs(
    heads: tuple[int, int], starts: list[int], count: int, window: int, dtype: torch.dtype, E: int, spare: int = 7
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return arguments of attention; beyond the window the cache is not a number."""
    H, kv_heads = heads
    torch.manual_seed(0)
    B, S = len(starts), max(starts) + window + spare
    q = random(B, count, H, E, dtype=dtype)
    k, v = (random(B, kv_heads, S, E, dtype=dtype) for _ in range(2))
    for b, start in enumerate(starts):
        k[b, :, start + window :] = v[b, :, start + window :] = float("nan")
    mask = torch.rand(B, count, window, device=DEVICE) < 0.4
    places = torch.arange(window, device=DEVICE)
    mask |= places == torch.arange(count, device=DEVICE)[:, None]  # a row sees itself
    return q, k, v, torch.tensor(starts, device=DEVICE), mask


STEPS = ((1, 1), (7, 7), (10, 50), (60, 60), (64, 64), (256, 256))  # rows, slots of the window
STARTS = ([0], [300, 17], [255, 256, 4096])
LENGTHS = [37, 300, 256, 0]  # in one chunk, in two, at the edge of one, and an empty prefix


@rows(
    "heads, E, dtype, steps, lengths",
    gpu=[(heads, E, dtype, STEPS, STARTS) for E, dtype, heads in product((16, 64, 80, 128, 256), DTYPES, HEADS)],
    smoke=[(heads, 128, BF16, STEPS, STARTS) for heads in ((32, 32), (32, 8))],
    here=[((7, 1), 16, FP32, ((7, 7),), (LENGTHS,)), ((6, 2), 24, FP32, ((7, 9),), ([270, 33],)), ((2, 1), 16, FP32, ((20, 20),), ([250],))],
    slowly=[*((heads, 32, FP32, ((1, 1), (1, 12), (7, 7), (10, 50)), (LENGTHS,)) for heads in ((4, 4), (6, 2), (7, 1), (20, 1))),
            *(((6, 2), E, FP32, ((7, 9),), ([270, 33],)) for E in (16, 64, 80, 128)),
            ((6, 2), 16, FP32, ((64, 64), (65, 65), (70, 70)), ([290],)),  # several tiles; split up to 64 rows
            ((7, 1), 16, FP32, ((2, 200),), ([4095, 4096, 4700, 8300],))],  # chunks double where there would be too many
)  # fmt: skip
def test_tree_attention(poisoned, heads, E, dtype, steps, lengths):
    torch.backends.cuda.matmul.allow_tf32 = False
    for (count, window), starts in product(steps, lengths):
        q, k, v, start, mask = attention_inputs(heads, starts, count, window, dtype, E)
        mask[:, 0, 1:] = False  # behind a chunk's edge the first row sees nothing
        clean = (x.nan_to_num().float() for x in (k, v))
        want = reference.attention(q.float(), *clean, start, mask)
        mask = mask.transpose(1, 2).contiguous().transpose(1, 2)  # by strides
        got = OURS.attention(q, k, v, start, mask)
        check_close(got, want, dtype, (count, starts), ATTENTION_ERRORS)


def random_paths_of_nodes(nodes: int, back: int, seed: int) -> list[list[int]]:
    """Return the path of every node of a tree, each below one of the last `back` before it; 1: a chain."""
    generator = torch.Generator().manual_seed(seed)
    paths = [[0]]
    for node in range(1, nodes):
        parent = torch.randint(max(0, node - back), node, (1,), generator=generator).item()
        paths.append([*paths[parent], node])
    return paths


def alone(q: Tensor, k: Tensor, v: Tensor, start: int, path: list[int]) -> Tensor:
    """Attend from a node behind its ancestors, which lie where they are accepted; others are not numbers."""
    accepted = [x.clone() for x in (k, v)]
    for old, new in zip((k, v), accepted):
        new[:, :, start:] = float("nan")
        new[:, :, start : start + len(path)] = old[:, :, [start + node for node in path]]
    end = torch.tensor([start + len(path) - 1], device=DEVICE)
    one = torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE)
    return OURS.attention(q[:, [path[-1]]], *accepted, end, one)


NODES = (0, 1, 5, 8, 20, 30, 31, 45, 58, 59)
PARTS = (2, 6, 16, 17, 33, 59)


# chunks double at 4,096
@rows(
    "back, dtype, heads, E, start, nodes, parts",
    gpu=[(back, dtype, heads, 128, start, NODES, PARTS) for back, dtype, heads, start in
         product((1, 3, 60), DTYPES, HEADS, (0, 50, 250, 1000, 3000, 4080))],
    smoke=[(back, BF16, heads, 128, start, NODES, PARTS) for back, heads, start in
           ((1, (32, 32), 250), (3, (32, 32), 250), (60, (32, 8), 4080))],
    here=[(3, FP32, (7, 1), 16, 250, (5, 11), (7,))],
    slowly=[*((1, FP32, heads, 16, start, (0, 5, 11), (7,)) for heads, start in
              (((4, 4), 0), ((6, 2), 30), ((6, 2), 500), ((6, 2), 4090), ((6, 2), 4150))),
            *((3, FP32, heads, 16, start, (2, 9, 11), (7,)) for heads, start in (((4, 4), 3), ((6, 2), 127))),
            # the last of a chain lies behind three tiles of the window
            *((1, FP32, (7, 1), 16, start, (33, SPLIT_TOKENS - 1), ()) for start in (250, 0, 4080))],
)  # fmt: skip
def test_a_tree_has_the_bits_of_vanilla_decoding(
    in_order, back, dtype, heads, E, start, nodes, parts
):
    """A row has the bits that the docstring of `plan_attention` states.

    Cases: single rows, other numbers of rows, a batch, an unused window, a table of paths.
    """
    size = nodes[-1] + 1
    q, k, v, at, mask = attention_inputs(heads, [start], size, size, dtype, E)
    paths = random_paths_of_nodes(size, back, start)
    mask.zero_()
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    tree = OURS.attention(q, k, v, at, mask)
    for node in nodes:
        got = alone(q, k, v, start, paths[node])
        assert torch.equal(got, tree[:, [node]]), (node, len(paths[node]))
    for count in parts:  # the first nodes are a tree, too
        part = OURS.attention(q[:, :count], k, v, at, mask[:, :count, :count])
        assert torch.equal(part, tree[:, :count]), count
    assert torch.equal(OURS.attention(q, k, v, at, mask, paths=OURS.path_table(mask)), tree)
    k, v = k.nan_to_num(), v.nan_to_num()
    wide = torch.nn.functional.pad(mask, (0, 4))
    assert torch.equal(OURS.attention(q, k, v, at, wide), tree)
    q, k, v = (torch.cat((torch.randn_like(x), x)) for x in (q, k, v))
    starts = torch.tensor([start // 2, start], device=DEVICE)
    masks = torch.cat((torch.ones_like(mask), mask))
    assert torch.equal(OURS.attention(q, k, v, starts, masks)[1:], tree)


@rows(
    "kind, E, dtype, heads, size, lengths",
    gpu=[(*row, ([0], [300, 700], [4700])) for row in
         product(windows.KINDS, (128, 256), DTYPES, ((8, 4), (16, 2)), (5, 40, 512))],
    smoke=[("tree", 256, BF16, (8, 4), 512, ([0], [300, 700], [4700]))],
    here=[("tree", 16, FP32, (7, 1), 20, ([60],)), ("chunk", 16, FP32, (4, 4), 16, ([37],)), ("token", 256, FP32, (7, 1), 300, ([600],))],
    slowly=[("tree", 16, FP32, (7, 1), 40, ([60, 0],)), ("tree", 16, FP32, (6, 2), 280, ([300, 0],)),
            *((kind, 24, FP32, (6, 2), size, ([300, 0],)) for kind, size in product(windows.KINDS, windows.SIZES)),
            ("chain", 16, FP32, (7, 1), 512, ([4700, 8300],)), ("tree", 256, FP32, (6, 2), 16, ([37],))],
)  # fmt: skip
def test_sliding_windows(poisoned, in_order, kind, E, dtype, heads, size, lengths):
    """As Gemma 3's; a row of a tree has the bits of its token alone, and no block reads what no row sees."""
    for starts in lengths:
        step = windows.random_step(kind, starts, heads, E)
        step = step._replace(**{name: getattr(step, name).to(dtype) for name in "qkv"})
        want = windows.expected(step, size, E**-0.5).float().to(DEVICE)
        window = sliding(step.window, size)
        for b in range(len(starts)):
            tile = 16 if HERE and kind != "chunk" else 64  # is read whole
            hidden = int(window.first[b].min()) // tile * tile
            step.k[b, :, :hidden] = step.v[b, :, :hidden] = float("nan")
        operands = (step.q, step.k, step.v, window.start, window.mask, window.first)
        operands = [x.to(DEVICE) for x in operands]
        got = OURS.attention(*operands)
        check_close(got, want, dtype, starts, ATTENTION_ERRORS)
        if kind == "chunk":
            continue  # many tokens are not decoded one by one
        paths = OURS.path_table(step.window.mask.to(DEVICE))  # of layers without windows
        assert torch.equal(OURS.attention(*operands, paths=paths), got)
        for b, of_rows in enumerate(step.paths):
            for t in {0, len(of_rows) // 2, len(of_rows) - 1}:
                single = OURS.attention(*(x.to(DEVICE) for x in step.alone(b, t, size)))
                assert torch.equal(single[0, 0], got[b, t]), (starts, b, t)


@rows(
    "heads, E, dtype, T, normed", gpu=[(heads, 128, BF16, 26, normed) for heads, normed in product(((32, 32), (32, 8)), (False, True))],
    smoke=[((32, 8), 128, BF16, 26, True)],
    here=[((4, 4), 16, FP32, 3, True), ((6, 2), 80, FP32, 3, False), ((7, 1), 128, FP32, 3, True)],
    slowly=[((6, 2), 16, FP32, 3, True), ((4, 4), 80, FP32, 3, True)],
)  # fmt: skip
def test_rotary_cache(heads, E, dtype, T, normed):
    """In slots that lie apart; everything else in the cache stays.

    In 16 bits hardly any value differs: each is rounded where the plain operations round it.
    """
    (H, kv_heads), B, S = heads, 2, 300
    qkv = random(B, T, H + 2 * kv_heads, E, dtype=dtype)
    slots = torch.randperm(S, device=DEVICE)[:T].expand(B, -1)
    positions = torch.randint(0, 4000, (B, T), device=DEVICE)
    rope = reference.rope_angles(torch.rand(E // 2, device=DEVICE), positions)
    norms = (*(1 + random(2, E) / 4).to(dtype), 1e-6 if dtype == BF16 else 0.1) if normed else None
    cache = random(2, B, kv_heads, S, E, dtype=dtype)
    ours, theirs = (tuple(cache.clone()) for _ in range(2))
    got = OURS.rotary_cache(qkv, rope, *ours, slots, norms)
    want = reference.rotary_cache(with_head_norms(qkv, kv_heads, norms), rope, *theirs, slots)
    # of the largest values: an ulp that the norm was rounded otherwise
    near = {"atol": 0.1 if normed else 0.02, "rtol": 1e-2}
    near = {"atol": 1e-6, "rtol": 1e-6} if dtype == FP32 else near
    torch.testing.assert_close([got, *ours], [want, *theirs], **near)
    assert dtype == FP32 or share_that_differs([got, ours[0]], [want, theirs[0]]) < 0.01
    assert torch.equal(ours[1], theirs[1])  # values are moved as they are


# -------------------------------------------------------------------------------------------- trees


def check_level(
    logits: Tensor, k: int, count: int, ids: Tensor | None = None, places: Tensor | None = None, sharpness: float = 1.5
) -> None:  # fmt: skip
    """Check a level's scores, near torch's, and all that follows from them, bit by bit."""
    (B, R, _), W, spare = logits.shape, count + 3, 2
    seen = torch.rand(B, R, W, device=DEVICE) < 0.3
    grow = OPERATORS.grow_level
    zeros = torch.zeros(B, R, device=DEVICE)  # the values of a root
    tokens, scores, *none = grow(logits, sharpness, ids, zeros, seen, None, k, 0, 0)
    ranked, columns, total = best_by_sorting(sharpness * logits, k)
    assert not any(x.numel() for x in none)
    # beyond 64 PyTorch chooses among equal ones
    assert k > 64 or torch.equal(tokens, (columns if ids is None else ids[columns]).flatten(1))
    want = (ranked - total).clamp(max=0).flatten(1)
    torch.testing.assert_close(scores, want, atol=1e-4, rtol=2e-6)
    values = -torch.rand(B, R, device=DEVICE).round(decimals=1)
    got = grow(logits, sharpness, ids, values, seen, places, k, count, spare)
    level = Level(k, count, first_slot=spare, fixed_children=places)
    children = Children(*(x.view(B, R, k) for x in (tokens, scores)))
    assert all(map(torch.equal, got, reference.grow_level(children, values, seen, level)))


@rows(
    "B, R, V, k, count", gpu=[(2, 10, V, k, min(k, 10)) for V, k in product((100, 32000, 128256), (1, 10, 64, 65))],
    here=[(2, 5, 300, 6, 5), (1, 2, 2049, 3, 3)],
    slowly=[(2, 10, 300, 6, 6), (1, 1, 300, 10, 10), (1, 3, 4097, 3, 5), (1, 2, 40, 17, 5)],
)  # fmt: skip
def test_grow_level(poisoned, B, R, V, k, count):
    """With ties, by tokens of their own."""
    check_level(random(B, R, V) * 10, k, count)
    ids = torch.randperm(2 * V, device=DEVICE)[:V]
    check_level((random(B, R, V) * 10).round(), k, count, ids, sharpness=1.25)


@rows(
    "P, N", gpu=[(10, 8), (510, 60), (510, 64), (20000, 33)], here=[(100, 33), (510, 64)]
)  # fmt: skip
def test_nodes_of_a_tree(poisoned, P, N):
    """A path through all nodes, and random ones; values that are cut away, and -0."""
    nodes = torch.arange(N - 1, device=DEVICE)
    chosen = torch.stack([torch.randperm(P)[: N - 1].sort().values for _ in range(2)]).to(DEVICE)
    named = torch.cat((torch.full((2, 1), -1, device=DEVICE), chosen), 1)
    for above in (nodes, (torch.rand(N - 1, device=DEVICE) * (nodes + 1)).long()):
        parents = torch.randint(-1, P, (2, P), device=DEVICE).scatter(1, chosen, named[:, above])
        got = OPERATORS.link_nodes(chosen, parents, N - 1)
        assert all(map(torch.equal, got, reference.link_nodes(chosen, parents, N - 1)))
    for values in (
        torch.full((2, P), float("-inf"), device=DEVICE),
        -torch.randint(0, 3, (2, P), device=DEVICE).float(),
    ):
        values[:, :: P // 4] *= 1e-45  # 0 or -0
        values[:, P // 2] = 2.0
        assert torch.equal(OPERATORS.best_nodes(values, N - 5), reference.best_nodes(values, N - 5))


# --------------------------------------------------------------------------- a layer's kernels in turn


class LayerShape(NamedTuple):
    """Of a layer."""

    inputs: int  # of the product in front of the residual sum
    width: int
    gates: int
    heads: tuple[int, int]
    E: int
    normed: bool  # its heads
    dtype: torch.dtype


class Layer:
    """A product in front of a residual sum and an unscaled norm, one behind it with SwiGLU, one that is rotated and
    cached, scores in fp32."""

    def __init__(self, form: str, count: int, of: LayerShape):
        self.form, self.dtype = form, of.dtype
        N = (of.heads[0] + 2 * of.heads[1]) * of.E
        shapes = {"wo": (of.width, of.inputs), "w13": (2 * of.gates, of.width)}
        shapes |= {"wqkv": (N, of.width), "head": (of.width, of.gates)}
        self.weights = {name: quantized(form, *shape, DEVICE) for name, shape in shapes.items()}
        self.x = random(1, count, of.inputs, dtype=of.dtype)
        self.stream = random(1, count, of.width, dtype=of.dtype)
        self.scale = torch.rand(of.width, device=DEVICE).to(of.dtype)
        self.slots = torch.arange(count, device=DEVICE)[None]
        freq = torch.rand(of.E // 2, device=DEVICE)
        self.rope = reference.rope_angles(freq, self.slots * 9)
        self.caches = random(2, 1, of.heads[1], count, of.E, dtype=of.dtype) * 0
        norms = (1 + random(2, of.E) / 4).to(of.dtype)
        self.norms = (*norms, 1e-5) if of.normed else None

    def product(self, name: str, x: Tensor | UnnormalizedRows) -> LazyMatmul:
        weights = self.weights[name]
        packed = weights.packed.to(self.dtype) if self.form == "float" else weights.packed
        given = x if isinstance(x, UnnormalizedRows) else (x, None)
        return LazyMatmul(*given, packed, weights.scale)

    def run(self, at: slice = slice(None)) -> tuple[Tensor, ...]:
        """Run the kernels on some rows. Writes: caches."""
        operands = self.product("wo", self.x[:, at]).operands()
        total, *norm = OPERATORS.add_product(*operands, self.stream[:, at], self.scale, 1e-5)
        gated = OURS.swiglu(self.product("w13", UnnormalizedRows(*norm)))
        angles = tuple(part[:, at] for part in self.rope)
        qkv = self.product("wqkv", UnnormalizedRows(*norm))
        q = OURS.rotary_cache(qkv, angles, *self.caches, self.slots[:, at], self.norms)
        wide = self.product("head", gated).operands()
        if self.form == "float":
            scores = backends.linear.halves_product(*wide[:2], "fp32")
        else:
            kernel = (
                backends.planes.w4a16 if self.form.startswith("int4") else backends.planes.w8a16
            )
            kernel = backends.planes.blocks_a16 if self.form in BLOCK_FORMS else kernel
            scores = kernel(*wide, epilogue="fp32")
        return total, norm[0], norm[1].T[None], gated, q, scores

    def expected(self, got: tuple[Tensor, ...]) -> list[Tensor]:
        """Return what follows from our norm and our gates, plainly; then the caches."""
        of_x = self.weights["wo"].reference(self.x.float())
        given = self.stream, of_x, self.scale, 1e-5
        total, norm = backends.epilogues.add_norm_reference(*given)
        ours = UnnormalizedRows(got[1], got[2][0].T)
        values = ours.values.float()
        gated = backends.epilogues.swiglu_reference(self.weights["w13"].reference(values), ours)
        theirs = torch.zeros_like(self.caches)
        y = self.weights["wqkv"].reference(values)
        rotated = (y, ours, self.rope, *theirs, self.slots, self.norms)
        q = backends.epilogues.rotary_cache_reference(*rotated)
        scores = self.weights["head"].reference(got[3].float())
        return [total, norm.values, norm.squares.T[None], gated, q, scores, *theirs]


WIDE = LayerShape(4096, 4096, 4096, (16, 8), 128, False, BF16)


@rows(
    "form, count, of", gpu=[(form, count, WIDE) for form, count in product(["float", "int4-128", "int8", *BLOCK_FORMS], (1, 26, 60))],
    smoke=[(form, 26, WIDE) for form in ("float", "int4-128", "Q4_K")],
    here=[("float", 26, LayerShape(200, 70, 67, (3, 1), 64, False, FP32)),  # two heads in a tile
          ("int4-128", 5, LayerShape(384, 128, 128, (2, 1), 128, True, FP32)),  # two tiles in a head
          ("int8", 40, LayerShape(384, 200, 67, (2, 1), 80, True, FP32)),  # tiles across heads
          ("Q8_0", 5, LayerShape(384, 96, 64, (2, 1), 64, True, FP32)), ("Q5_1", 1, LayerShape(96, 64, 96, (2, 1), 64, True, FP32))],
    slowly=[("float", 1, LayerShape(576, 576, 64, (9, 3), 64, False, FP32)), ("float", 40, LayerShape(64, 135, 64, (2, 1), 16, True, FP32)),
            ("int4-32-zeros", 60, LayerShape(384, 96, 64, (2, 1), 64, True, FP32)),
            ("int4-64", 5, LayerShape(384, 192, 64, (2, 1), 64, True, FP32))],
)  # fmt: skip
def test_a_layers_kernels_one_after_the_other(in_order, form, count, of):
    """Beside the references; each row of them alone; and a hundred replays with the same bits."""
    layer = Layer(form, count, of)
    got = layer.run()
    cached = layer.caches.clone()
    want = layer.expected(got)
    close = {"rtol": 1e-4, "atol": 1e-5} if HERE else {"rtol": 2e-2, "atol": 2e-2}
    for ours, theirs in zip((*got, *cached), want, strict=True):
        size = theirs.abs().max()
        torch.testing.assert_close(ours / size, theirs.to(ours.dtype) / size, **close)
    assert got[5].dtype == FP32 and (got[5] - want[5]).norm() < 1e-4 * want[5].norm()
    for at in {count // 2, count - 1}:
        row = slice(at, at + 1)
        assert all(torch.equal(one, whole[:, row]) for one, whole in zip(layer.run(row), got)), at
    assert torch.equal(layer.caches, cached)
    if HERE:
        return
    graph, replayed = captured(lambda: [layer.run() for _ in range(4)])
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, sum(replayed, ()), got * 4))
