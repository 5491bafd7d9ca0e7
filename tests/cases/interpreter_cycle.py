"""The Triton kernels of the decode cycle, run by Triton's interpreter on the CPU; test_interpreter.py runs this file.

As interpreter_products.py, in fp32 and in a process of their own; compaction, which moves bits, in every dtype.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

import backends.attention
import backends.triton.attention
import backends.triton.compact
import backends.triton.ngram
import backends.triton.noise
import backends.triton.rotary
import backends.triton.topk
import backends.triton.tree
import interpreted  # noqa: F401
import reference
from backends.triton.launch import SPLIT_TOKENS, Device
from draft_tree import Children, DecodedTokens, Level, Scores
from drafts.block_draft import slide
from drafts.ngram_draft import Ngram, lookup
from helpers import slow, with_head_norms
from kv_cache import KVCache
from model import ModelConfig
from models.operators import sliding
from reference import rope_angles
from windows import KINDS, expected, random_step

DEVICE = Device(132, 232448, 90)
TILE = backends.triton.attention.plan_attention(16, torch.float32).tile
HEADS = {
    "mha": (4, 4),
    "gqa": (6, 2),
    "mqa": (7, 1),
    "wide": (20, 1),
}  # wide: a token has two blocks


def inputs(heads, starts, rows, window, E=32, spare=5):
    """Arguments of the operator. Slots that are never read hold NaN."""
    H, kv_heads = HEADS[heads]
    B, S = len(starts), max(starts) + window + spare
    q = torch.randn(B, rows, H, E)
    k, v = (torch.randn(B, kv_heads, S, E) for _ in range(2))
    for b, start in enumerate(starts):
        k[b, :, start + window :] = v[b, :, start + window :] = float("nan")
    mask = torch.rand(B, rows, window) < 0.4
    mask |= torch.arange(window) == torch.arange(rows)[:, None]  # a row sees itself
    return q, k, v, torch.tensor(starts), mask


def attend(q, k, v, start, mask, first=None, scale=0.0, paths=None, sinks=None):
    done = torch.zeros(128, dtype=torch.int32)
    window = (start, mask, first, paths)
    y = backends.triton.attention.tree_attention(q, k, v, window, scale, DEVICE, done, sinks)
    assert not done.any()  # as the next launch expects it
    return y


def check(q, k, v, start, mask):
    got, clean = attend(q, k, v, start, mask), (t.nan_to_num() for t in (k, v))
    torch.testing.assert_close(
        got, reference.attention(q, *clean, start, mask), atol=2e-6, rtol=2e-6
    )


pytestmark = pytest.mark.usefixtures("poisoned")


# ---------------------------------------------------------------------------------------- attention


LENGTHS = [37, 300, 256, 0]  # in one chunk, in two, at the edge of one, and an empty prefix
SHAPES = [(1, 1), (1, 12), (7, 7), (10, 50)]  # rows, window


@pytest.mark.parametrize("heads,starts,rows,window,E", [
    ("gqa", [37, 300], 10, 50, 32), ("mqa", LENGTHS, 7, 7, 32), ("mqa", LENGTHS, 1, 1, 32), ("gqa", [270, 33], 7, 9, 24),
    ("wide", [37], 5, 7, 16),
    *slow([
        *((heads, LENGTHS, *shape, 32) for heads in HEADS for shape in SHAPES),
        *(("gqa", [270, 33], 7, 9, E) for E in (16, 64, 80, 128)),
        *(("gqa", [290], rows, rows, 16) for rows in (64, 65, 70)),  # several tiles; split up to 64 rows
        ("mqa", [4095, 4096, 4700, 8300], 2, 200, 16),  # chunks double where there would be too many
    ]),
])  # fmt: skip
def test_attention(heads, starts, rows, window, E):
    check(*inputs(heads, starts, rows, window, E))


@pytest.mark.parametrize("heads,starts,rows,window", [
    ("mqa", [37, 300], 1, 1), ("wide", [37], 5, 7),
    *slow([("gqa", LENGTHS, 10, 50), ("gqa", [290], SPLIT_TOKENS + 1, SPLIT_TOKENS + 1)]),
])  # fmt: skip
def test_sinks(heads, starts, rows, window):
    """A sink far above all scores, some among them, and one that counts for nothing."""
    q, k, v, start, mask = inputs(heads, starts, rows, window)
    sinks = torch.linspace(-3, 9, q.shape[2])
    sinks[0] = -200
    clean = [t.nan_to_num() for t in (k, v)]
    want = reference.attention(q, *clean, start, mask, sinks=sinks)
    got = attend(q, k, v, start, mask, sinks=sinks)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    E = q.shape[3]
    without = attend(q, k, v, start, mask)
    assert torch.equal(got[..., :E], without[..., :E]) and not torch.equal(
        got[..., E:], without[..., E:]
    )


def test_a_chunk_that_a_row_does_not_see():
    """The window reaches into a chunk of its own, where the first row sees nothing."""
    q, k, v, start, mask = inputs("mha", [250], 20, 20)
    mask[:, 0] = torch.arange(20) == 0
    check(q, k, v, start, mask)


@pytest.mark.slow
def test_q_and_masks_by_strides():
    """A mask that is shared by the batch has stride 0; others may be transposed."""
    q, k, v, start, mask = inputs("gqa", [270, 3], 7, 7)
    check(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, start, mask)
    for mask in (
        torch.ones(7, 7).tril().bool().expand(2, 7, 7),
        torch.ones(2, 7, 7).triu().bool().transpose(1, 2),
    ):
        check(q, k, v, start, mask)


@pytest.mark.parametrize(
    "heads,start",
    [("mqa", 250), *slow([("mha", 0), ("gqa", 30), ("gqa", 500), ("gqa", 4090), ("gqa", 4150)])],
)
def test_a_chain_has_the_bits_of_vanilla_decoding(in_order, heads, start):
    """Its rows, one at a time, with the prefix grown up to them; in a batch; and with a window that nobody uses."""
    q, k, v, _, _ = inputs(heads, [start], 12, 12, 16)
    causal = torch.ones(12, 12).tril().bool()[None]
    chain = attend(q, k, v, torch.tensor([start]), causal)
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    for t in (0, 6, 11):
        assert torch.equal(
            attend(q[:, t : t + 1], k, v, torch.tensor([start + t]), one), chain[:, t : t + 1]
        ), t
    wide = torch.nn.functional.pad(causal, (0, 5))
    k, v = k.nan_to_num(), v.nan_to_num()
    assert torch.equal(attend(q, k, v, torch.tensor([start]), wide), chain)
    others = [torch.cat((torch.randn_like(x), x)) for x in (q, k, v)]
    starts = torch.tensor([start // 2, start])
    assert torch.equal(attend(*others, starts, causal.expand(2, -1, -1))[1:], chain)


@pytest.mark.slow  # 4 s each; the test above has a chain of 12 tokens
@pytest.mark.parametrize("start", [250, 0, 4080])
def test_a_path_of_any_depth_has_the_bits_of_vanilla_decoding(in_order, start):
    """Of a chain with as many tokens as a tree may have: the last lies behind three tiles of the window."""
    q, k, v, _, _ = inputs("mqa", [start], SPLIT_TOKENS, SPLIT_TOKENS, 16)
    causal = torch.ones(1, SPLIT_TOKENS, SPLIT_TOKENS).tril().bool()
    chain = attend(q, k, v, torch.tensor([start]), causal)
    for t in (33, SPLIT_TOKENS - 1):
        alone = attend(q[:, [t]], k, v, torch.tensor([start + t]), causal[:, :1, :1])
        assert torch.equal(alone, chain[:, [t]]), t


@pytest.mark.parametrize("heads,start", [("mqa", 250), *slow([("mha", 3), ("gqa", 127)])])
def test_a_tree_has_the_bits_of_vanilla_decoding(in_order, heads, start):
    """Nodes of three branches, each alone behind its ancestors, which lie where they are accepted."""
    parents = [-1, 0, 0, 0, 1, 1, 3, 4, 6, 7, 8, 10]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else []), node])
    q, k, v, _, _ = inputs(heads, [start], 12, 12, 16)
    mask = torch.zeros(1, 12, 12, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    tree = attend(q, k, v, torch.tensor([start]), mask)
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    for node in (2, 9, 11):
        accepted = [x.clone() for x in (k, v)]
        slots = start + torch.tensor(paths[node])
        for old, new in zip((k, v), accepted):
            new[:, :, start : start + len(slots)] = old[:, :, slots]
        end = torch.tensor([start + len(slots) - 1])
        assert torch.equal(attend(q[:, [node]], *accepted, end, one), tree[:, [node]]), node


def test_path_table():
    """Of random masks, by strides, and of rows that see all; places behind a path hold anything."""
    for B, T, W in ((1, 1, 1), (2, 7, 7), (1, 10, 50), (2, 3, 70)):
        mask = torch.rand(B, W, T).transpose(1, 2) < 0.4
        mask[:, :, 0] = True
        mask[:, -1] = True
        got = backends.triton.attention.path_table(mask)
        want = torch.ops.gpt_eagle.path_table(mask)
        assert got.dtype == want.dtype and got.shape == want.shape
        behind = torch.arange(1 + W) > want[:, :, :1]
        assert torch.equal(got.masked_fill(behind, 0), want.masked_fill(behind, 0))


@pytest.mark.parametrize("kind,starts,heads,E,size", [
    ("tree", [60], "mqa", 16, 20), ("chunk", [37], "mha", 16, 16), ("token", [600], "mqa", 256, 300),
    *slow([
        ("tree", [60, 0], "mqa", 16, 40), ("tree", [60, 0], "gqa", 16, 40), ("tree", [300, 0], "gqa", 16, 280),
        *((kind, [300, 0], "gqa", 24, size) for kind in KINDS for size in (1, 2, 5, 16, 1000)),
        ("chain", [4700, 8300], "mqa", 16, 512), ("tree", [37], "gqa", 256, 16),
    ]),
])  # fmt: skip
def test_sliding_windows(in_order, kind, starts, heads, E, size):
    """A row sees the last tokens of its path, and has the bits of its token alone; no slot before them is read."""
    step = random_step(kind, starts, HEADS[heads], E)
    window = sliding(step.window, size)
    tile = 64 if kind == "chunk" else TILE  # is read whole
    for b in range(len(starts)):
        hidden = int(window.first[b].min()) // tile * tile
        step.k[b, :, :hidden] = step.v[b, :, :hidden] = float("nan")
    operands = window.start, window.mask, window.first
    for scale in (0.0, 0.1):
        y = attend(step.q, step.k, step.v, *operands, scale)
        want = expected(step, size, scale or E**-0.5).float()
        torch.testing.assert_close(y, want, atol=2e-6, rtol=2e-6)
    if kind == "chunk":
        return  # many tokens are not decoded one by one
    paths = backends.triton.attention.path_table(step.window.mask)  # of layers without windows
    assert torch.equal(attend(step.q, step.k, step.v, *operands, 0.1, paths), y)
    for b, paths in enumerate(step.paths):
        for t in {0, len(paths) - 1}:
            assert torch.equal(attend(*step.alone(b, t, size), 0.1)[0, 0], y[b, t]), (b, t)


@pytest.mark.parametrize("causal, from_root", [
    (False, False), *slow([(False, True), (True, False), (True, True)]),
])  # fmt: skip
def test_windows_of_blocks(in_order, causal, from_root):
    """Positions of a block that see each other; no slot before their windows is read."""
    step = random_step("chain", [300, 5], HEADS["gqa"], 16)
    config = SimpleNamespace(sliding_causal=causal, window_from_root=from_root)
    for size in (280, 4):  # the slots before a window stay unread
        window = slide(step.window, size, config)
        operands = window.start, window.mask, window.first
        want = reference.attention(step.q, step.k.nan_to_num(), step.v.nan_to_num(), *operands)
        hidden = int(window.first[0].min()) // TILE * TILE
        step.k[0, :, :hidden] = step.v[0, :, :hidden] = float("nan")
        y = attend(step.q, step.k, step.v, *operands)
        torch.testing.assert_close(y, want, atol=2e-6, rtol=2e-6)


# ------------------------------------------------------------------------------------------- rotary


@pytest.mark.parametrize("heads,E,normed", [
    ("mha", 16, True), ("gqa", 80, False), ("mqa", 128, True), ("gqa", 16, True),
    *slow(case for case in itertools.product(HEADS, (16, 80, 128), (False, True))),
])  # fmt: skip
def test_rotary_cache(heads, E, normed):
    """Two rows of the batch, in slots that lie apart; everything else in the cache stays."""
    (H, kv_heads), (B, T, S) = HEADS[heads], (2, 3, 11)
    qkv = torch.randn(B, T, H + 2 * kv_heads, E)
    norms = (*(1 + torch.randn(2, E) / 4), 0.1) if normed else None
    slots = torch.tensor([[0, 5, 2], [10, 1, 4]])
    rope = rope_angles(torch.rand(E // 2), torch.randint(0, 4000, (B, T)))
    cache = torch.randn(2, B, kv_heads, S, E)
    ours, theirs = (tuple(cache.clone()) for _ in range(2))
    given = norms or (None, None, 0.0)
    got = backends.triton.rotary.rotary_cache(qkv, rope, *ours, slots, given)
    want = reference.rotary_cache(with_head_norms(qkv, kv_heads, norms), rope, *theirs, slots)
    torch.testing.assert_close([got, *ours], [want, *theirs], atol=1e-6, rtol=1e-6)
    assert torch.equal(ours[1], theirs[1])  # values are moved as they are


# -------------------------------------------------------------------------------------------- top-k


def best(scores, k):
    """By value, then by index: a stable sort, and the logarithm of the sum in fp64."""
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], index[..., :k], scores.double().logsumexp(-1, keepdim=True).float()


def check_topk(scores, k):
    got, want = backends.triton.topk.topk_logsumexp(scores, k), best(scores, k)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    torch.testing.assert_close(got[2], want[2], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("greedy", [None, torch.tensor([False, True, False])], ids=str)
@pytest.mark.parametrize("domain", [0, 2])
def test_gumbel_noise(greedy, domain):
    """Of keys and draws at the edges of 32 bits; the last block is not full."""
    keys = (torch.tensor([[7, 1], [2**32 - 1, 5], [0, 0]]), torch.tensor([3, 4, 2**31]))
    rest = (torch.tensor([0, 1, 2]), greedy, torch.tensor([0, 9, 2**30 - 3]), 3, 1501, domain)
    got = backends.triton.noise.gumbel(*keys, *rest)
    want = reference.gumbel(*keys, *rest)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    assert greedy is None or not got[1].any()


@pytest.mark.parametrize(
    "V,k", [(16, 16), (2047, 16), (2049, 10), (4097, 1), *slow([(16, 1), (2048, 10), (32000, 10)])]
)
def test_topk(V, k):
    check_topk(torch.randn(2, 2, V) * 10, k)


def test_ties_go_to_the_lowest_index():
    check_topk(torch.randint(-2, 3, (2, 2500)).float(), 16)
    zeros = torch.zeros(1, 4100)
    zeros[:, ::2] = -0.0
    assert backends.triton.topk.topk_logsumexp(zeros, 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_infinite_scores():
    """Scores cut by top-p are minus infinity: here all but a few, and in the last row all."""
    scores = torch.full((3, 5000), float("-inf"))
    scores[0, [7, 3000, 4999]] = torch.tensor([-1e30, 2.0, -3.0])
    scores[1, 4000] = 1e30
    check_topk(scores, 10)
    check_topk(torch.tensor([[1.0, float("inf"), 2.0]]), 2)


@pytest.mark.slow
def test_scores_by_strides_and_the_largest_k():
    check_topk(torch.randn(90, 2).T, backends.triton.topk.MOST)


# ---------------------------------------------------------------------------------- levels of trees


def check_level(logits, k, count, places=None, ids=None, sharpness=1.5):
    """Scores close to torch's; all that follows from them as torch has it, bit by bit."""
    (B, R, _), W, spare = logits.shape, count + 3, 2
    found = Scores(logits, sharpness, ids)
    seen = torch.rand(B, R, W) < 0.3
    # the values of the root are 0
    tokens, scores, *none = backends.triton.topk.grow_level(
        found, torch.zeros(B, R), seen, Level(k, 0)
    )
    ranked, columns, total = best(sharpness * logits, k)
    assert not any(x.numel() for x in none)
    assert torch.equal(tokens, (columns if ids is None else ids[columns]).flatten(1))
    torch.testing.assert_close(
        scores, (ranked - total).clamp(max=0).flatten(1), atol=2e-5, rtol=2e-6
    )
    values = -torch.rand(B, R).round(decimals=1)
    level = Level(k, count, first_slot=spare, fixed_children=places)
    children = Children(*(x.view(B, R, k) for x in (tokens, scores)))
    got = backends.triton.topk.grow_level(found, values, seen, level)
    assert all(map(torch.equal, got, reference.grow_level(children, values, seen, level)))


@pytest.mark.parametrize("B,R,V,k", [
    (2, 5, 300, 6), (1, 2, 2049, 3),
    *slow([(2, 10, 300, 6), (1, 1, 300, 10), (1, 3, 4097, 3), (1, 2, 40, 17)]),
])  # fmt: skip
def test_levels(B, R, V, k):
    check_level(torch.randn(B, R, V) * 10, k, k)
    check_level(torch.randint(-2, 3, (B, R, V)).float(), k, min(R * k, 5))  # ties


@pytest.mark.slow
def test_levels_in_tiles(monkeypatch):
    monkeypatch.setattr(backends.triton.topk, "TILE", 32)
    check_level(torch.randn(2, 5, 2100), 3, 9)


def test_levels_of_what_is_cut_away():
    """Of the first row three tokens are left, of the second one."""
    logits = torch.full((2, 2, 2500), float("-inf"))
    logits[:, 0, [7, 2100, 2499]], logits[:, 1, 3] = torch.tensor([-3.0, 2.0, -3.0]), 1e30
    check_level(logits, 5, 6)


def test_levels_of_given_places_and_tokens():
    ids = torch.randperm(900)[:310]
    check_level(torch.randn(2, 3, 310).transpose(0, 1).contiguous().transpose(0, 1), 4, 5, ids=ids)
    check_level(torch.randn(2, 3, 310), 4, 5, places=torch.tensor([[0, 3, 4, 5, 11]]), ids=ids)


# ----------------------------------------------------------------------------------- nodes of trees


@pytest.mark.parametrize("B,P,count", [(1, 1, 1), (2, 10, 10), (2, 510, 59)])
def test_best_nodes(B, P, count):
    """Also with many equal ones, with few that are not cut away, and with none; -0 is 0."""
    for values in (
        torch.randn(B, P),
        -torch.randint(0, 3, (B, P)).float(),
        torch.full((B, P), float("-inf")),
    ):
        values[:, :: max(P // 4, 1)] *= 1e-45  # 0 or -0
        assert torch.equal(
            backends.triton.tree.best_nodes(values, count), reference.best_nodes(values, count)
        )
    values = torch.full((B, P), float("-inf"))
    values[:, P // 2] = 2.0
    assert torch.equal(
        backends.triton.tree.best_nodes(values, count), reference.best_nodes(values, count)
    )


@pytest.mark.parametrize("B,P,N", [(1, 1, 2), (2, 10, 8), (2, 100, 33), (1, 510, 64)])
@pytest.mark.parametrize("chain", [True, False])
def test_related_nodes(monkeypatch, B, P, N, chain):
    """Nodes chosen with all their parents: chains and random trees, numbered in several pieces."""
    monkeypatch.setattr(backends.triton.tree, "MOST", 128)
    chosen = torch.stack([torch.randperm(P)[: N - 1].sort().values for _ in range(B)])
    above = torch.arange(N - 1).expand(B, -1)
    if not chain:
        above = (torch.rand(B, N - 1) * torch.arange(1, N)).long()
    nodes = torch.cat((torch.full((B, 1), -1), chosen), 1)
    parents = torch.randint(-1, P, (B, P)).scatter(1, chosen, nodes.gather(1, above))
    got = backends.triton.tree.link_nodes(chosen, parents, N - 1)
    want = reference.link_nodes(chosen, parents, N - 1)
    assert all(map(torch.equal, got, want)) and (not chain or want[2].max() == N - 1)


# --------------------------------------------------------------------------------------- compaction


def filled_cache(kv_heads, E, batch, slots, dtype=torch.float32):
    """Three layers of random rows; some values are not numbers."""
    config = ModelConfig(64, 3, kv_heads, kv_heads, E, 64, 9)
    cache = KVCache.empty(config, batch, slots, dtype, "cpu")
    for buffer in (*cache.k, *cache.v):
        buffer.copy_(
            torch.randn(buffer.shape).masked_fill(torch.rand(buffer.shape) < 0.1, float("nan"))
        )
    return cache


def bits(buffers):
    return [b.view(torch.int16 if b.element_size() == 2 else torch.int32).clone() for b in buffers]


def check_compaction(cache, starts, paths):
    """Every slot of every buffer, bit for bit."""
    start, path, buffers = torch.as_tensor(starts), torch.as_tensor(paths), [*cache.k, *cache.v]
    want = bits(buffers)
    reference.compact(want, torch.empty(0), start, path)
    backends.triton.compact.compact(buffers, cache.addresses, start, path)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(bits(buffers), want, strict=True))


# rows past the accepted ones name themselves
PATHS = {
    "vanilla": [[0], [0], [0]],
    "chain": [[0, 1], [0, 1], [0, 1]],
    "overlapping": [[0, 2, 4, 6, 8], [0, 1, 3, 4, 8], [0, 4, 5, 6, 7]],
    "of all lengths": [[0, 3, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 5, 6, 7, 8]],
    "backwards and repeated": [[3, 2, 1, 0], [8, 8, 8, 8], [1, 2, 3, 0]],
    "long": [list(range(33)), [0, *range(2, 9), 8, *range(9, 33)], list(range(33))],
}


@pytest.mark.parametrize("name", PATHS)
def test_compaction(name):
    """Rows of different lengths, one of them exactly full."""
    check_compaction(filled_cache(2, 32, 3, 45), [7, 0, 12], PATHS[name])


HALF = torch.bfloat16
SINGLE = torch.float32


@pytest.mark.parametrize("kv_heads,E,dtype", [
    (1, 16, SINGLE), (4, 80, torch.float16), (3, 128, HALF), (2, 256, SINGLE),
    *slow([(1, 16, HALF), (4, 80, SINGLE), (3, 128, SINGLE), (2, 256, HALF), (2, 256, torch.float16)]),
])  # fmt: skip
def test_compaction_of_any_rows(kv_heads, E, dtype):
    check_compaction(
        filled_cache(kv_heads, E, 2, 30, dtype), [21, 4], [[0, 2, 5, 7, 8, 5], [0, 1, 3, 3, 4, 5]]
    )


def test_rows_that_stay_are_not_touched():
    """Not even where they would lie outside of the cache: here in the guards on both of its sides."""
    memory = torch.randn(3, 2, 4, 16)  # the buffer lies in the middle
    before, buffer = memory.clone(), memory[1:2]
    path = torch.tensor([[1, 1, 2, 3, 4, 5, 6]])
    backends.triton.compact.compact(
        [buffer], torch.tensor([buffer.data_ptr()]), torch.tensor([2]), path
    )
    before[1, :, 2] = before[1, :, 3]
    assert torch.equal(memory, before)


def test_paths_by_strides():
    path = torch.tensor(PATHS["overlapping"])[:, :3].T.contiguous().T
    check_compaction(filled_cache(2, 16, 3, 12), torch.tensor([5, 3, 1, 9, 2, 9])[::2], path)


# ------------------------------------------------------------------------------------------- lookup


@pytest.mark.parametrize("vocab,C", [(1, 0), (2, 30), (40, 30), *slow([(5, 0), (10**6, 0)])])
def test_lookup(monkeypatch, vocab, C):
    """Loops and texts without a match; roots at both ends; places in many tiles; separators, token 0, text behind roots."""
    monkeypatch.setattr(backends.triton.ngram, "BLOCK", 16)
    pos = torch.tensor([0, 16, 49])
    text = torch.randint(0, vocab, (len(pos), 50))
    kept = None
    if C:
        kept = SimpleNamespace(tokens=torch.randint(-1, vocab, (C,)))
        kept.tokens[-1] = -1
    for ngram in (Ngram(kept=kept), Ngram(3, 2, 4, 2, kept)):
        want = lookup(DecodedTokens(text, pos), ngram)
        sizes = (ngram.tokens, ngram.branches, ngram.min, ngram.max)
        got = backends.triton.ngram.ngram_match(text, pos, kept and kept.tokens, *sizes)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
