"""Our Triton kernels as `ttsem` runs them: their IR on CPU tensors, in bf16 and fp16 with real roundings. test_cuda_offline.py
runs this file in an environment that has ttsem.

Every access must lie inside of a tensor, no two blocks of threads may touch one element if one of them writes it, what
nobody wrote is not a number, and what a kernel computes is compared with its plain reference.
A new kernel gets a row in a table below, or a test of its own.

What cannot be judged so:
- the order in which a tensor core adds, Triton's own lowering (layouts, pipelines, shared memory), and ptxas;
- barriers and races within a block of threads; launches that overlap (launch control does nothing here);
- whether an atomic counter is enough where one block reads what others wrote (`ttsem_plugin.ORDERED`);
- the compaction of a cache: it reads addresses from a table, which ttsem takes for a fault (`test_compaction`);
- long caches, which take minutes; times.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

import interpreter_cycle
import ops.attention
import ops.cuda.attention
import ops.cuda.experts
import ops.cuda.products
from helpers import quantized, quantized_experts
from interpreter_experts import ROUTINGS
from ops.cuda.products import Device

DEVICE = Device(8, 232448, 90)  # an H100 with few processors: few splits
BF16, FP16 = torch.bfloat16, torch.float16
FORMATS = ("int4-128", "int4-64", "int4-32", "int8")
ROWS = (1, 5, 16, 17, 26, 32, 33, 60, 64, 70)
ROUNDED = {BF16: 2**-8, FP16: 2**-11}  # of a result, relative


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(got, want, dtype, sums=1e-3):
    """Equal but for the rounding of the result, and for the order of sums."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * ROUNDED[dtype], atol=sums * want.abs().max().item())


# ------------------------------------------------------------------------------------------ products

DEEP = {"int4-128": 3072, "int4-64": 3072, "int4-32": 3072, "int8": 1536}  # inputs that are cut into splits

PRODUCTS = [  # (format, outputs, inputs, rows, dtype of x); 135 and 640 are multiples of no tile
    *((form, 135, 640, rows, BF16) for form in FORMATS for rows in ROWS),
    *((form, 70, K, 5, BF16) for form, K in DEEP.items()),
    *((form, 64, 384, 5, FP16) for form in FORMATS),
]


@pytest.mark.parametrize("form,N,K,rows,dtype", PRODUCTS)
def test_product(form, N, K, rows, dtype):
    weights, x = quantized(form, N, K), torch.randn(rows, K, dtype=dtype)
    close(ops.cuda.products.matmul(x, weights.packed, weights.scale, DEVICE), weights.reference(x), dtype)


@pytest.mark.parametrize("form,K", DEEP.items())
def test_a_row_has_the_same_bits_beside_any_others(form, K):
    weights, x = quantized(form, 70, K), torch.randn(64, K, dtype=BF16)
    assert ops.cuda.products.choose_splits(70, len(weights.packed), DEVICE.processors) > 1
    whole = ops.cuda.products.matmul(x, weights.packed, weights.scale, DEVICE)
    for rows in (1, 5, 26):
        some = ops.cuda.products.matmul(x[-rows:].clone(), weights.packed, weights.scale, DEVICE)
        assert torch.equal(some, whole[-rows:]), rows


# ------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("routing", ["one row", "two tokens", "tree", "uneven"])
@pytest.mark.parametrize("form", ["float", *FORMATS])
def test_experts(form, routing):
    weights, expert = quantized_experts(form, 8, 70, 256), torch.tensor(ROUTINGS[routing])
    x = torch.randn(len(expert), 256, dtype=BF16)
    lists = ops.cuda.experts.expert_lists(expert, 8)
    weight = weights.weight.to(BF16) if form == "float" else weights.weight
    got = ops.cuda.experts.experts_product(x, weight, weights.scale, lists, DEVICE)
    close(got, weights._replace(weight=weight).reference(x, expert), BF16)


# ----------------------------------------------------------------------------------------- attention

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
    got = ops.cuda.attention.tree_attention(q, k, v, start, mask, DEVICE)
    want = ops.attention.tree_attention_reference(q, k.nan_to_num(), v.nan_to_num(), start, mask)
    close(got, want, dtype, sums=ROUNDED[dtype])  # probabilities are rounded too


# ----------------------------------------------------------------------------------- top-k, compaction


@pytest.mark.parametrize("V,k", [(16, 16), (2049, 10), (32000, 8)])
def test_topk(V, k):
    interpreter_cycle.check_topk(torch.randn(2, 2, V) * 10, k)


@pytest.mark.xfail(reason="ttsem knows no addresses but those of arguments", strict=True)
def test_compaction():
    cache = interpreter_cycle.filled_cache(2, 32, 1, 45, BF16)
    interpreter_cycle.check_compaction(cache, [7], [[0, 2, 4, 6, 8]])


# ----------------------------------------------------------------------- last block, launch control


@triton.jit
def last_block_kernel(x_ptr, parts_ptr, count_ptr, y_ptr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Sum x by blocks; the last block to come adds the blocks' sums. Writes: parts, count, y."""
    cuda.gdc_wait()
    i = tl.program_id(0)
    cuda.gdc_launch_dependents()
    tl.store(parts_ptr + i, tl.sum(tl.load(x_ptr + i * BLOCK + tl.arange(0, BLOCK)), 0))
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == PARTS - 1:
        tl.store(y_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, PARTS)), 0))


def test_a_counter_may_order_blocks():
    """A kernel that waits for the one before, and whose last block reads what the others wrote, with its line in
    `ttsem_plugin.ORDERED`."""
    x, parts, count, y = torch.randn(64), torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1)
    last_block_kernel[(4,)](x, parts, count, y, BLOCK=16, PARTS=4)
    torch.testing.assert_close(y[0], x.sum())
