"""Our Triton kernels as `ttsem` runs them: their IR on CPU tensors, in bf16 and fp16 with real roundings. test_cycle_offline.py
runs this file in an environment that has ttsem.

Every access must lie inside of a tensor. No two blocks of threads may touch one element if one of
them writes it. Elements that no kernel wrote hold NaN. The outputs of a kernel are compared with
its plain reference.
A new kernel gets a row in a table below, or a test of its own.

These things cannot be checked so:
- the order in which a tensor core adds, Triton's own lowering (layouts, pipelines, shared memory), and ptxas;
- barriers and races within a block of threads;
- whether an atomic counter is enough where one block reads what others wrote (`ttsem_plugin.ORDERED`);
- the compaction of a cache: it reads addresses from a table, which ttsem takes for a fault (`test_compaction`);
- long caches, which take minutes; times.
"""

import pytest
import torch

import interpreter_cycle
import ops.attention
import ops.cuda.attention
import ops.cuda.epilogues
import ops.cuda.experts
import ops.cuda.launch
import ops.cuda.norm
import ops.cuda.qmatmul
import ops.epilogues
import ops.norm
import ops.rotary
from helpers import quantized, quantized_experts
from interpreter_experts import ROUTINGS
from ops.cuda.qmatmul import Device
from ops.epilogues import Pending

DEVICE = Device(8, 232448, 90)  # an H100 with few processors: few splits
BF16, FP16 = torch.bfloat16, torch.float16
FORMATS = ("int4-128", "int4-64", "int4-32", "int8")
ZEROS = ("int4-128-zeros", "int4-64-zeros", "int4-32-zeros")  # with zero points
ROWS = (1, 5, 16, 17, 26, 32, 33, 60, 64, 70)
ROUNDED = {BF16: 2**-8, FP16: 2**-11}  # of a result, relative


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(
        ops.cuda.launch, "device_of", lambda index: DEVICE
    )  # tensors say that they are on CUDA


def close(got, want, dtype, sums=1e-3):
    """Equal but for the rounding of the result, and for the order of sums."""
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.float(), want.float(), rtol=2 * ROUNDED[dtype], atol=sums * want.abs().max().item()
    )


# ----------------------------------------------------------------------------------------- products

DEEP = {
    "int4-128": 3072,
    "int4-64": 3072,
    "int4-32": 3072,
    "int8": 1536,
}  # inputs that are cut into splits

PRODUCTS = [  # (format, outputs, inputs, rows, dtype of x); 135 and 640 are multiples of no tile
    *((form, 135, 640, rows, BF16) for form in FORMATS for rows in ROWS),
    *((form, 70, K, 5, BF16) for form, K in DEEP.items()),
    *((form, 64, 384, 5, FP16) for form in FORMATS + ZEROS),
    *((form, 135, 640, rows, BF16) for form in ZEROS for rows in (5, 26, 60)),
]


@pytest.mark.parametrize("form,N,K,rows,dtype", PRODUCTS)
def test_product(form, N, K, rows, dtype):
    weights, x = quantized(form, N, K), torch.randn(rows, K, dtype=dtype)
    close(
        ops.cuda.qmatmul.matmul(x, weights.packed, weights.scale, DEVICE),
        weights.reference(x),
        dtype,
    )


@pytest.mark.parametrize("form,K", DEEP.items())
def test_a_row_has_the_same_bits_beside_any_others(form, K):
    weights, x = quantized(form, 70, K), torch.randn(64, K, dtype=BF16)
    assert ops.cuda.qmatmul.choose_splits(70, len(weights.packed), DEVICE.processors) > 1
    whole = ops.cuda.qmatmul.matmul(x, weights.packed, weights.scale, DEVICE)
    for rows in (1, 5, 26):
        some = ops.cuda.qmatmul.matmul(x[-rows:].clone(), weights.packed, weights.scale, DEVICE)
        assert torch.equal(some, whole[-rows:]), rows


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 26, 60])
def test_what_follows_a_product(form, rows):
    """Sums of splits in front of a norm; scores in fp32; SwiGLU."""
    K = DEEP[form]
    weights, x = quantized(form, 70, K), torch.randn(rows, K, dtype=BF16)
    product = weights.reference(x.float())
    stream, scale = torch.randn(rows, 70, dtype=BF16), torch.rand(70, dtype=BF16)
    gpu = ops.cuda.epilogues.Gpu(DEVICE, torch.zeros(64, dtype=torch.int32))
    operands = (None, weights.packed, weights.scale)
    got = ops.cuda.epilogues.add_product(Pending(x, *operands), stream, scale, 1e-5, gpu)
    total, norm = ops.epilogues.add_norm_reference(stream, product, scale, 1e-5)
    close(got[0], total, BF16)
    close(got[1], norm.values, BF16, sums=1e-2)  # where x rounds the other way
    torch.testing.assert_close(got[2], norm.squares, rtol=1e-2, atol=1e-2)
    one = ops.cuda.epilogues.add_product(Pending(x[:1], *operands), stream[:1], scale, 1e-5, gpu)
    assert all(map(torch.equal, one, (got[0][:1], got[1][:1], got[2][:, :1])))
    assert not gpu.done.any()
    wide = ops.cuda.qmatmul.matmul(x, weights.packed, weights.scale, DEVICE, "fp32")
    torch.testing.assert_close(wide, product, rtol=1e-4, atol=1e-3 * product.abs().max().item())
    gated = ops.cuda.qmatmul.matmul(x, weights.packed, weights.scale, DEVICE, "swiglu")
    close(gated, ops.norm.swiglu(product), BF16)


@pytest.mark.parametrize("form,rows,heads,E,normed", [
    ("int4-128", 26, (3, 1), 64, False), ("int8", 40, (2, 1), 80, True), ("int4-64", 5, (2, 1), 128, True),
])  # fmt: skip
def test_a_product_is_rotated_and_cached(monkeypatch, form, rows, heads, E, normed):
    """In bf16, with an unscaled norm in front."""
    # tensors say that they are on CUDA, and the plain reference would run the kernel there
    monkeypatch.setattr(ops.rotary, "rms_norm", ops.norm.rms_norm_reference)
    H, kv_heads = heads
    weights, K = quantized(form, (H + 2 * kv_heads) * E, 384), 384
    x = ops.epilogues.unscaled_reference(
        torch.randn(1, rows, K, dtype=BF16), torch.rand(K, dtype=BF16), 1e-5
    )
    norms = (*(1 + torch.randn(2, E) / 4).to(BF16), 1e-5) if normed else None
    slots = torch.arange(rows)[None]
    rope = ops.rotary.rope_angles(torch.rand(E // 2), slots * 7)
    ours, theirs = (tuple(torch.zeros(2, 1, kv_heads, rows, E, dtype=BF16)) for _ in range(2))
    gpu = ops.cuda.epilogues.Gpu(DEVICE, torch.zeros(64, dtype=torch.int32))
    product = Pending(*x, weights.packed, weights.scale)
    given = norms or (None, None, 0.0)
    got = ops.cuda.epilogues.rotary_product(product, rope, *ours, slots, given, gpu)
    y = weights.reference(x.values.float())
    want = ops.epilogues.rotary_cache_reference(y, x, rope, *theirs, slots, norms)
    for mine, other in zip((got, *ours), (want, *theirs), strict=True):
        close(mine, other, BF16, sums=2e-2)  # where an input of the rotation rounds the other way
    assert not gpu.done.any()


# ------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("routing", ["one row", "two tokens", "tree", "uneven"])
@pytest.mark.parametrize("form", ["float", *FORMATS, "int4-64-zeros"])
def test_experts(form, routing):
    weights, expert = quantized_experts(form, 8, 70, 256), torch.tensor(ROUTINGS[routing])
    x = torch.randn(len(expert), 256, dtype=BF16)
    lists = ops.cuda.experts.expert_lists(expert, 8)
    weight = weights.weight.to(BF16) if form == "float" else weights.weight
    got = ops.cuda.experts.experts_product(x, weight, weights.scale, lists, DEVICE)
    close(got, weights._replace(weight=weight).reference(x, expert), BF16)


# ---------------------------------------------------------------------------------------- attention

ATTENTION = [  # (heads, prefixes, rows, window, head width, dtype)
    ("mha", [37], 1, 1, 64, BF16),
    ("mha", [37, 300], 7, 7, 64, BF16),  # in one chunk, in two
    ("gqa", [256, 0], 10, 26, 128, BF16),  # at the edge of one, an empty prefix
    ("gqa", [270], 26, 26, 80, FP16),
    ("mqa", [300], 7, 12, 64, FP16),
]


@pytest.mark.parametrize("heads,starts,rows,window,E,dtype", ATTENTION)
def test_attention(heads, starts, rows, window, E, dtype):
    q, k, v, start, mask = interpreter_cycle.inputs(heads, starts, rows, window, E)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    done = torch.zeros(64, dtype=torch.int32)
    got = ops.cuda.attention.tree_attention(q, k, v, start, mask, DEVICE, done)
    assert not done.any()
    want = ops.attention.tree_attention_reference(q, k.nan_to_num(), v.nan_to_num(), start, mask)
    close(got, want, dtype, sums=ROUNDED[dtype])  # probabilities are rounded too


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "heads,E,dtype", [("mha", 64, BF16), ("gqa", 80, FP16), ("mqa", 128, BF16)]
)
def test_rotary_cache(heads, E, dtype, normed):
    interpreter_cycle.check_rotary(heads, E, normed, dtype, 2 * ROUNDED[dtype])


# ------------------------------------------------------------------------- top-k, trees, compaction


@pytest.mark.parametrize("V,k", [(16, 16), (2049, 10), (32000, 8)])
def test_topk(V, k):
    interpreter_cycle.check_topk(torch.randn(2, 2, V) * 10, k)


def test_level():
    interpreter_cycle.check_level(torch.randn(1, 5, 2100) * 10, 4, 7)


def test_nodes_of_a_tree(monkeypatch):
    interpreter_cycle.test_best_nodes(2, 100, 30)
    interpreter_cycle.test_related_nodes(monkeypatch, 2, 100, 30, False)


@pytest.mark.xfail(reason="ttsem knows no addresses but those of arguments", strict=True)
def test_compaction():
    cache = interpreter_cycle.filled_cache(2, 32, 1, 45, BF16)
    interpreter_cycle.check_compaction(cache, [7], [[0, 2, 4, 6, 8]])
