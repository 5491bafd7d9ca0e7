"""The attention operator against its plain reference, over shapes, starts and what lies in slots nobody may see.

And the operator that compacts a cache, and the layout of int4 and int8 weights for CUDA; the kernels of these are
tested in test_cycle_triton.py, test_products_triton.py and test_gpu.py.
"""

import sys

import pytest
import torch

import backends.attention
import backends.library
import backends.triton.functions
import backends.triton.layout
import backends.weight
import draft_tree
import reference
from backends.weight import join_zeros, split_zeros
from helpers import quantized
from reference import TORCH, choose, visible_slots

OURS = choose(torch.device("cpu"))
E = 16  # head dim
# absolute, relative; bf16 keeps 8 bits
TOLERANCE = {torch.float32: (1e-5, 0), torch.bfloat16: (1e-2, 2e-2)}
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
STARTS = {1: [37], 2: [37, 11], 3: [5, 0, 37]}  # per batch size


def inputs(heads, starts, rows, window, spare=5, dtype=torch.float32, seed=0):
    """Random arguments of the operator. spare: slots beyond the longest row's window."""
    g = torch.Generator().manual_seed(seed)
    H, kv_heads = heads
    B, S = len(starts), max(starts) + window + spare
    q = torch.randn(B, rows, H, E, generator=g)
    k, v = (torch.randn(B, kv_heads, S, E, generator=g) for _ in range(2))
    mask = torch.rand(B, rows, window, generator=g) < 0.4
    mask |= torch.arange(window) == torch.arange(rows)[:, None]  # a row sees itself
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor(starts), mask


def check_registration(name: str, *args) -> None:
    """Schema, shapes and dtypes of the operator's stand-in under tracing agree with what it computes."""
    operator = getattr(torch.ops.gpt_eagle, name).default
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def close(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    atol, rtol = TOLERANCE[a.dtype]
    torch.testing.assert_close(a.float(), b.float(), atol=atol, rtol=rtol)


def by_loops(q, k, v, start, mask):
    """A third way, a row and a head at a time; no slot is touched that is not visible."""
    y = torch.empty(q.shape)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            window = torch.nonzero(mask[b, t]).flatten() + start[b]
            seen = torch.cat((torch.arange(int(start[b])), window))
            for h in range(q.shape[2]):
                group = h * k.shape[1] // q.shape[2]
                weights = (k[b, group, seen] @ q[b, t, h] / E**0.5).softmax(0)
                y[b, t, h] = weights @ v[b, group, seen]
    return y.flatten(2)


# ---------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("heads", HEADS)
def test_the_reference_is_attention_over_the_visible_slots(heads):
    args = inputs(HEADS[heads], STARTS[3], 7, 9)
    close(reference.attention(*args), by_loops(*args))


def test_visible_slots():
    start = torch.tensor([2, 0])
    mask = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 0]]]).bool()
    expected = [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]]
    assert visible_slots(start, mask, None, 5).int().tolist() == expected


# ----------------------------------------------------------------------------------------- operator


@pytest.mark.parametrize("rows", [1, 2, 7, 60])
@pytest.mark.parametrize("batch", STARTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_operator(heads, batch, rows, dtype):
    for window in (rows, rows + 13):  # beyond the rows: scratch slots of a draft head
        args = inputs(HEADS[heads], STARTS[batch], rows, window, dtype=dtype)
        close(OURS.attention(*args), reference.attention(*args))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("batch", STARTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sinks_are_a_further_key_without_a_value(heads, batch, rows, dtype):
    """In the reference, in SDPA, in C++ and where the whole cache is masked, as on CUDA."""
    args = inputs(HEADS[heads], STARTS[batch], rows, rows + 3, dtype=dtype)
    q, k, v, start, mask = args
    sinks = torch.linspace(-2, 9, q.shape[2]).to(dtype)  # above every score, and below most
    scores = (
        torch.einsum(
            "bthe,bhse->bhts", q.float(), k.float().repeat_interleave(q.shape[2] // k.shape[1], 1)
        )
        / 4
    )
    seen = visible_slots(start, mask, None, k.shape[2])[:, None]
    shares = scores.exp() * seen
    shares = shares / (shares.sum(-1, keepdim=True) + sinks.float().exp()[:, None, None])
    want = torch.einsum(
        "bhts,bhse->bthe", shares, v.float().repeat_interleave(q.shape[2] // v.shape[1], 1)
    )
    want = want.flatten(2).to(dtype)
    for attend in (
        reference.attention,
        OURS.attention,
        backends.attention.attention,
        backends.attention.masked_attention,
    ):
        close(attend(*args, sinks=sinks), want)
    without = torch.full_like(sinks, -float("inf"))
    assert torch.equal(OURS.attention(*args, sinks=without), OURS.attention(*args))


@pytest.mark.parametrize("starts", [[0], [0, 0], [1], [64, 64]])
@pytest.mark.parametrize("rows", [1, 7])
def test_first_rows_and_a_full_cache(starts, rows):
    args = inputs(HEADS["gqa"], starts, rows, rows, spare=0)
    assert args[1].shape[2] == max(starts) + rows
    close(OURS.attention(*args), reference.attention(*args))


@pytest.mark.parametrize("rows,window", [(1, 1), (1, 12), (7, 7), (7, 20)])
@pytest.mark.parametrize("heads", HEADS)
def test_hidden_slots_do_not_matter(heads, rows, window):
    """Values left behind by a shorter row of the batch, or by an earlier draft, never count.

    They are finite; behind the windows of all rows nothing need be a number.
    """
    q, k, v, start, mask = inputs(HEADS[heads], [5, 0, 37], rows, window, spare=9)
    expected = reference.attention(q, k, v, start, mask)
    seen = visible_slots(start, mask, None, k.shape[2]).any(1)  # [B, S]
    assert not seen.all()
    for cache in (k, v):
        cache.copy_(torch.where(seen[:, None, :, None], cache, 1e4))
        cache[:, :, 37 + window :] = float("nan")  # beyond every row
    close(OURS.attention(q, k, v, start, mask), expected)


def test_the_rule_without_triton_on_this_device():
    """On CUDA without Triton the whole capacity is masked: the same function, but unused slots must be finite."""
    for batch, starts in STARTS.items():
        args = inputs(HEADS["gqa"], starts, 7, 9, seed=batch)
        close(backends.attention.masked_attention(*args), reference.attention(*args))


# ------------------------------------------------------------------------------------------ capture


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_registration(dtype):
    for heads, *shape in (("gqa", [5, 0], 7, 9), ("mha", [3], 1, 1), ("gqa", [3], 1, 4)):
        args = inputs(HEADS[heads], *shape, dtype=dtype)
        check_registration("tree_attention", *args)
        check_registration("path_table", args[4])


def test_without_triton_the_cache_is_masked_and_said_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    backends.library._triton_is_installed.cache_clear()
    args = inputs(HEADS["gqa"], STARTS[2], 7, 9)
    for _ in range(2):
        close(backends.attention.masked_attention(*args), reference.attention(*args))
    of_cuda = vars(choose(torch.device("cuda")))
    differ = {name for name, function in of_cuda.items() if function is not getattr(TORCH, name)}
    assert differ == {"attention"}
    backends.library._triton_is_installed.cache_clear()
    assert capsys.readouterr().err.count("pip install triton") == 1


# --------------------------------------------------------------------------------------- compaction


def caches(kv_heads=2, slots=20, layers=2):
    """Buffers of two rows, and where they lie."""
    buffers = [torch.randn(2, kv_heads, slots, E) for _ in range(2 * layers)]
    return buffers, torch.tensor([b.data_ptr() for b in buffers])


@pytest.mark.parametrize(
    "path", [[[0], [0]], [[0, 2, 4, 3], [0, 1, 3, 5]], [[3, 2, 1, 0], [1, 2, 3, 0]]], ids=str
)
def test_compaction_reads_every_row_before_it_writes_any(path):
    buffers, addresses = caches()
    before, start = [b.clone() for b in buffers], torch.tensor([3, 14])
    torch.ops.gpt_eagle.compact(buffers, addresses, start, torch.tensor(path))
    for b, offsets in enumerate(path):
        for step, offset in enumerate(offsets):
            for ours, old in zip(buffers, before):
                assert torch.equal(ours[b, :, start[b] + step], old[b, :, start[b] + offset])
        past = start[b] + len(offsets)
        for ours, old in zip(buffers, before):
            assert torch.equal(ours[b, :, : start[b]], old[b, :, : start[b]])
            assert torch.equal(ours[b, :, past:], old[b, :, past:])


def test_compaction_registration():
    args = (*caches(), torch.tensor([3, 14]), torch.tensor([[0, 2, 4], [0, 1, 3]]))
    torch.library.opcheck(
        torch.ops.gpt_eagle.compact.default,
        args,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


# -------------------------------------------------------------------------------------------- top-k


def test_topk_is_that_of_torch():
    scores = torch.randn(2, 3, 500) * 10
    values, index, total = choose(scores.device).topk(scores, 7)
    want = scores.topk(7, dim=-1)
    assert torch.equal(values, want.values) and torch.equal(index, want.indices)
    torch.testing.assert_close(total, scores.logsumexp(-1, keepdim=True), atol=1e-6, rtol=2e-7)


@pytest.mark.parametrize("shape", [(50,), (2, 3, 50)])
def test_topk_registration(shape):
    check_registration("topk_logsumexp", torch.randn(shape), 5)


# -------------------------------------------------------------------------------------- draft trees


def level_inputs(count, ids=None, places=None):
    """Arguments of the operator: 3 nodes with 4 children of 40 each, in 2 rows."""
    seen = torch.rand(2, 3, 9) < 0.4
    return torch.randn(2, 3, 40), 1.5, ids, -torch.rand(2, 3), seen, places, 4, count, 2


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("places", [None, torch.tensor([[0, 3, 4, 5, 11]])])
def test_level_registration(count, places):
    """As on CUDA where there is no Triton; nothing that is returned is an argument."""
    args = level_inputs(count, torch.randperm(90)[:40], places)
    check_registration("grow_level", *args)
    logits, sharpness, ids, values, seen, places, k, count, slot = args
    level = draft_tree.Level(k, count, first_slot=slot, fixed_children=places)
    children = draft_tree.Scores(logits, sharpness, ids).best(k, reference.topk)
    want = reference.grow_level(children, values, seen, level)
    got = torch.ops.gpt_eagle.grow_level(*args)
    assert all(map(torch.equal, got, want)) and got[2].shape[1] == count


def test_node_registration():
    chosen = torch.stack([torch.randperm(30)[:7].sort().values for _ in range(2)])
    check_registration("best_nodes", torch.randn(2, 30), 7)
    check_registration("link_nodes", chosen, torch.full((2, 30), -1), 5)


# --------------------------------------------------------------------- int4 and int8 weights (CUDA)

SHAPES = [(1, 1), (3, 256), (5, 257), (64, 512), (70, 1000)]


@pytest.mark.parametrize("N,K", SHAPES)
def test_packed_weights_come_back(N, K):
    g = torch.Generator().manual_seed(0)
    for top, bottom, pack, unpack in (
        (7, -8, backends.triton.layout.pack_int4_planes, backends.triton.layout.unpack_int4_planes),
        (
            127,
            -127,
            backends.triton.layout.pack_int8_planes,
            backends.triton.layout.unpack_int8_planes,
        ),
    ):
        codes = torch.randint(bottom, top + 1, (N, K), generator=g, dtype=torch.int8)
        codes.view(-1)[0], codes.view(-1)[-1] = bottom, top
        packed = pack(codes)
        assert packed.dtype == torch.int16 and packed.is_contiguous()
        assert torch.equal(unpack(packed, N, K), codes) and unpack(packed, N, K).dtype == torch.int8
        planes = 2 if top == 127 else 4
        block = planes * backends.triton.layout.COLUMNS
        assert packed.numel() * planes < N * (K + block), "less than a block of padding"


@pytest.mark.parametrize("group", [32, 64, 128])
def test_packed_scales_come_back(group):
    for N, K in ((1, group), (5, 3 * group), (70, 8 * group)):
        scale = torch.rand(N, K // group)
        with_zeros = join_zeros(scale.half(), torch.randint_like(scale, -8, 9).to(torch.int8))
        for kept, words in ((scale.bfloat16(), 128 // group), (with_zeros, 256 // group)):
            packed = backends.triton.layout.pack_scales(kept, group)
            assert packed.shape == (-(-K // 256), N, words)
            assert backends.triton.layout.group_of(packed) == group
            back = backends.triton.layout.unpack_scales(packed, K)
            assert back.dtype == kept.dtype and torch.equal(back, kept)


def test_a_scale_and_a_zero_point_in_a_word():
    """Every fp16 and bf16 there is, with every zero point."""
    every = torch.arange(2**16).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        scale = every.view(dtype)[:, None]
        for value in range(-8, 9):
            zero = torch.full(scale.shape, value, dtype=torch.int8)
            groups, steps = split_zeros(torch.zeros_like(zero), join_zeros(scale, zero))
            want = scale.float()[..., None]
            torch.testing.assert_close(steps, want, atol=0, rtol=0, equal_nan=True)
            assert (groups == -value).all()
        assert (split_zeros(torch.zeros_like(zero), join_zeros(scale, None))[0] == 0).all()


def test_the_layout_is_the_documented_one():
    codes = torch.zeros(3, 600, dtype=torch.int8)
    codes[2, 256 + 2 * 64 + 5] = -3  # block 1, plane 2, column 5
    word = int(backends.triton.layout.pack_int4_planes(codes)[1, 2, 5]) & 0xFFFF
    assert word == 0x8588  # codes + 8 in nibbles: 8 for 0, 5 for -3
    codes[2, 4 * 128 + 64 + 7] = -3  # int8: block 4, plane 1, column 7
    word = int(backends.triton.layout.pack_int8_planes(codes)[4, 2, 7]) & 0xFFFF
    assert word == 0xFD00  # two's complement


def test_high_bits_lie_behind_the_planes():
    codes = torch.zeros(3, 512, dtype=torch.uint8)
    k = 256 + 2 * 64 + 37  # block 1, plane 2, column 37
    codes[2, k] = 0b11_0101
    row = backends.triton.layout.pack_block_codes(codes, 6)[1, 2]
    assert row.shape == (64 + 32,) and row[37] == 0b0101 << 8
    assert row[64:].view(torch.uint8).nonzero().tolist() == [[37]]
    assert row[64:].view(torch.uint8)[37] == 0b11 << 4
    codes[2, k] = 0b1_0101
    row = backends.triton.layout.pack_block_codes(codes, 5)[1, 2]
    assert row.shape == (64 + 16,) and row[37] == 0b0101 << 8
    assert row[64:].view(torch.uint8).nonzero().tolist() == [[37 - 32]]
    assert row[64:].view(torch.uint8)[37 - 32] == 1 << (4 + 2)


@pytest.mark.parametrize("form", ["int4-128", "int4-32", "int4-64-zeros", "int8"])
def test_the_references_are_products_with_the_weights(form):
    N, K = 6, 384
    weights = quantized(form, N, K)
    if form == "int8":
        codes = backends.triton.layout.unpack_int8_planes(weights.packed, N, K)
        w = codes.double() * weights.scale.double()[:, None]
    else:
        codes = backends.triton.layout.unpack_int4_planes(weights.packed, N, K)
        scale = backends.triton.layout.unpack_scales(weights.scale, K)
        zero = (scale & 31) - 8 if scale.dtype == torch.int32 else torch.zeros_like(scale)
        scale = (scale - zero - 8).view(torch.float32) if scale.dtype == torch.int32 else scale
        groups = torch.arange(K) // weights.group
        w = (codes.double() - zero[:, groups]) * scale[:, groups].double()
    x = torch.randn(2, 5, K, generator=torch.Generator().manual_seed(0))
    got = weights.reference(x).double()
    torch.testing.assert_close(got, x.double() @ w.T, atol=1e-4, rtol=1e-5)
    assert weights.reference(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["int4-64", "int4-64-zeros", "int8", "Q4_K"])
def test_shapes_under_tracing(form):
    weights = quantized(form, 70, 256)
    weights = weights._replace(packed=weights.packed.to("meta"), scale=weights.scale.to("meta"))
    y = weights.operator(torch.empty(2, 3, 256, dtype=torch.bfloat16, device="meta"))
    assert y.shape == (2, 3, 70) and y.dtype == torch.bfloat16


def test_weights_of_another_layer_or_format_are_refused():
    int4, int8 = (quantized(form, 70, 512) for form in ("int4-128", "int8"))
    says = "x of 640 inputs needs int4 weights packed in 3 blocks of 256; these have 2"
    with pytest.raises(ValueError, match=says):
        int4.operator(torch.randn(1, 640))
    with pytest.raises(ValueError, match="w4a16 takes scales as pack_scale"):
        backends.planes.w4a16(torch.randn(1, 512), int4.packed, torch.ones(70, 4))
    with pytest.raises(ValueError, match=r"w8a16 takes scales as \[N\] float32"):
        backends.planes.w8a16(torch.randn(1, 512), int8.packed, torch.ones(70, 1))
