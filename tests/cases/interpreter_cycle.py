"""The Triton kernels of the decode cycle, run by Triton's interpreter on the CPU; test_interpreter.py runs this file.

1. Rows of cases/functions.py by the functions of CUDA's backend, whose operators run their kernels here.
2. What the interpreter tells of the bits: those of a row alone, of chains and trees.
As interpreter_products.py, in fp32 and in a process of their own; compaction, which moves bits, in every dtype.
"""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import backends.attention
import backends.triton.attention
import backends.triton.compact
import backends.triton.ngram
import backends.triton.operators
import backends.triton.qmatmul
import backends.triton.rotary
import backends.triton.topk
import backends.triton.tree
import interpreted  # noqa: F401
import reference
from backends.library import lib
from backends.triton.launch import SPLIT_TOKENS, Device
from draft_tree import Children, Level, Scores
from drafts.block_draft import slide
from functions import ROWS, Row, assert_same, best_by_sorting, leaves, mapped, run
from helpers import slow, with_head_norms
from models.operators import sliding
from reference import TORCH, choose, rope_angles
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


# ----------------------------------------------------------------------------------- rows of the table

# a function of a row -> the operators that it runs, and how many of its cases
OPERATORS = {
    "gumbel": ("gumbel_noise", 10), "best": ("topk_logsumexp", 4), "topk": ("topk_logsumexp", 8),
    "select_nodes": ("best_nodes link_nodes", 12), "compact": ("compact", 15), "rms_norm": ("norm", 2),
    "attention": ("tree_attention", 6), "ngram_match": ("longest_matches", 10),
}  # fmt: skip
HERE = [row for row in ROWS if row.name in OPERATORS]
CUDA = choose(torch.device("cuda"), torch.float32)  # its plain operators are replaced
for names, _ in OPERATORS.values():
    for name in names.split():
        kernel = backends.triton.operators.ON_CUDA[name]
        lib.impl(name, kernel, "CPU", allow_override=True)
NEAR = {torch.float32: (5e-6, 5e-6)}


@pytest.fixture(autouse=True)
def _a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(backends.triton.qmatmul, "device_of", lambda _: DEVICE)
    monkeypatch.setattr(backends.triton.attention, "counters", lambda _: torch.zeros(128).int())
    monkeypatch.setattr(backends.triton.ngram, "BLOCK", 16)  # places in many tiles
    monkeypatch.setattr(backends.triton.tree, "MOST", 128)  # of nodes, numbered in several pieces


def in_fp32(row: Row) -> list[tuple]:
    """Return cases of a row, as many as there is time for: none with a cache in 8 bits, or of millions of numbers."""
    random.seed(0), torch.manual_seed(0)

    def fits(operands: tuple) -> bool:
        tensors = leaves(operands)
        coded = row.name != "compact" and any(x.dtype == torch.int8 for x in tensors)
        counts = [x for x in operands if isinstance(x, int)]
        return not coded and sum(x.numel() for x in tensors) < 60_000 and 50_000 not in counts

    cases = [
        mapped(x, lambda y: y.float() if y.is_floating_point() else y)
        for x in row.cases()
        if fits(x)
    ]
    count = OPERATORS[row.name][1]
    return cases[:: max(1, len(cases) // count)][:count]


@pytest.mark.parametrize("row", HERE, ids=[row.name for row in HERE])
def test_a_function_is_its_definition(row):
    cases = in_fp32(row)
    assert len(cases) >= min(2, OPERATORS[row.name][1])
    for operands in cases:
        got = run(row, getattr(CUDA, row.name), operands)
        want = run(row, row.definition or getattr(TORCH, row.name), operands)
        sizes = [tuple(x.shape) for x in leaves(operands)]
        try:
            assert_same(got, want, NEAR)
        except AssertionError as error:
            raise AssertionError(f"{row.name}, operands {sizes}") from error


# ---------------------------------------------------------------------------------------- attention


LENGTHS = [37, 300, 256, 0]  # in one chunk, in two, at the edge of one, and an empty prefix
SHAPES = [(1, 1), (1, 12), (7, 7), (10, 50)]  # rows, window


@pytest.mark.parametrize("heads,starts,rows,window,E", [
    ("mqa", LENGTHS, 7, 7, 16), ("gqa", [270, 33], 7, 9, 24),
    *slow([
        *((heads, LENGTHS, *shape, 32) for heads in HEADS for shape in SHAPES),
        *(("gqa", [270, 33], 7, 9, E) for E in (16, 64, 80, 128)),
        *(("gqa", [290], rows, rows, 16) for rows in (64, 65, 70)),  # several tiles; split up to 64 rows
        ("mqa", [4095, 4096, 4700, 8300], 2, 200, 16),  # chunks double where there would be too many
    ]),
])  # fmt: skip
def test_attention(heads, starts, rows, window, E):
    check(*inputs(heads, starts, rows, window, E))


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
    for t in (0, 11):
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
def test_windows_of_blocks(causal, from_root):
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
    ("mha", 16, True), ("gqa", 80, False), ("mqa", 128, True), *slow([("gqa", 16, True), ("mha", 80, True)]),
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
    ranked, columns, total = best_by_sorting(sharpness * logits, k)
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


# ---------------------------------------------------------------------------------- nodes, compaction


@pytest.mark.parametrize("P,N", [(100, 33), (510, 64)])
def test_chains_of_nodes(P, N):
    """A path through all nodes, which the table's trees do not have; values that are cut away, and -0."""
    chosen = torch.stack([torch.randperm(P)[: N - 1].sort().values for _ in range(2)])
    above = torch.cat((torch.full((2, 1), -1), chosen), 1)[:, :-1]
    parents = torch.randint(-1, P, (2, P)).scatter(1, chosen, above)
    got = backends.triton.tree.link_nodes(chosen, parents, N - 1)
    want = reference.link_nodes(chosen, parents, N - 1)
    assert all(map(torch.equal, got, want)) and want[2].max() == N - 1
    for values in (torch.full((2, P), float("-inf")), -torch.randint(0, 3, (2, P)).float()):
        values[:, :: P // 4] *= 1e-45  # 0 or -0
        values[:, P // 2] = 2.0
        got = backends.triton.tree.best_nodes(values, N - 5)
        assert torch.equal(got, reference.best_nodes(values, N - 5))


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
