"""The functions of a backend as a table: a row has a name, operands at sizes and edges, and how near a result must come.

test_functions.py runs every row by the C++ operators. A new function is tested by a row; a function without one fails there.
Operands are those of the definition in reference.py, drawn after `torch.manual_seed`. A last dict holds those with a name.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import reference
from decode import REPORT
from draft_tree import Candidates, DecodedTokens, Frontier, Level, Scores
from drafts.ngram_draft import Ngram, add_chain, lookup
from drafts.shaping import ShapedRule, Shaping
from helpers import no_candidates
from models.operators import sliding
from reference import TORCH, build_tree, encode_rows, joined
from run.options import Sampling
from runtime import replace_fields
from sampling import SamplingTensors
from windows import KINDS, random_step

INF = float("inf")
BATCH = 3  # sequences of `large`, and of nothing else that stands first in a shape
DTYPES = (torch.float32, torch.bfloat16)
# absolute and relative; a number of bf16 keeps 8 bits
NEAR = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 2e-2)}


class Row(NamedTuple):
    """A function of a backend."""

    name: str
    cases: Callable[[], Iterator[tuple]]  # operands
    large: Callable[[], tuple] | None = None  # operands of BATCH sequences, with work for threads
    near: dict[torch.dtype, tuple[float, float]] | None = None  # by a result's dtype; others: bits
    writes: tuple[int, ...] = ()  # operands that are written
    whole: tuple[int, ...] = ()  # operands that lie in one piece
    definition: Callable | None = None  # None: reference.py's, or another folder's
    agrees: Callable | None = None  # compares a result with the definition's; None: `assert_same`


def leaves(record: Any) -> list[Tensor]:
    """Return the tensors of nested records, in their order."""
    if isinstance(record, Tensor):
        return [record]
    if isinstance(record, dict):
        record = record.values()
    elif not isinstance(record, (tuple, list)):
        return []
    return [x for part in record for x in leaves(part)]


def mapped(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested records with every tensor changed."""
    if isinstance(record, Tensor):
        return change(record)
    if isinstance(record, dict):
        return {name: mapped(part, change) for name, part in record.items()}
    if not isinstance(record, (tuple, list)):
        return record
    parts = [mapped(part, change) for part in record]
    return type(record)(*parts) if hasattr(record, "_fields") else type(record)(parts)


def run(row: Row, function: Callable, operands: tuple) -> tuple[Any, list]:
    """Call a function with copies. Returns: its result; the operands that it writes."""
    given = list(mapped(operands, torch.clone))
    if row.name == "compact":  # the addresses of the copies
        addresses = [buffer.data_ptr() for buffer in given[0]]
        given[1] = torch.tensor(addresses, device=given[0][0].device)
    named = given.pop() if isinstance(given[-1], dict) else {}
    result = function(*given, **named)
    written = [given[i] for i in row.writes]
    if row.name == "advance":
        written[0] = written[0][:, :-1]  # the last column takes what is cut
    return result, written


def assert_same(
    got: Any, want: Any, near: dict[torch.dtype, tuple[float, float]] | None = None
) -> None:
    """Check shapes, types and numbers of nested records: bits, but for the types that `near` has."""
    got, want = leaves(got), leaves(want)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    for ours, theirs in zip(got, want):
        if near is not None and ours.dtype in near:
            atol, rtol = near[ours.dtype]
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol, equal_nan=True)
        else:
            assert torch.equal(ours, theirs)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


# ------------------------------------------------------------------------------------------- scores


def special_scores() -> Tensor:
    scores = torch.randn(2, 3, 4157) * 40
    scores[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-5, INF, -INF, float("nan")])
    return scores


def keys(prompts: list[int], samples: list[int], greedy: Tensor | None = None) -> tuple:
    seeds = torch.tensor([[7, 1], [2**32 - 1, 5], [0, 0]])[: len(prompts)]
    return seeds, torch.tensor(prompts), torch.tensor(samples), greedy


def gumbel_cases() -> Iterator[tuple]:
    """At the edges of 32 bits and of blocks, and of the last draw that there is; keys that sequences share."""
    first = torch.tensor([7, 2**30 - 3])
    for vocab, domain in itertools.product((1, 7, 64, 65, 1501), (0, 1, 2)):
        yield *keys([0, 2**31], [5, 1]), first, 3, vocab, domain
    yield *keys([3, 4], [1, 2], torch.tensor([False, True])), first, 2, 70, 0
    seed, prompt, strided = torch.tensor([1, 2]), torch.tensor([7]), torch.tensor([0, 9, 5])[::2]
    yield seed, prompt.expand(2), strided, None, first, 2, 40, 0
    yield seed, prompt, torch.tensor([5]), None, first, 2, 40, 0
    yield *keys([3], [0]), torch.tensor([100]), 100, 50000, 0  # of these draws one is 19.2


def same_winners(operands: tuple, got: Tensor, want: Tensor) -> None:
    """The likeliest winners of millions are as exact as the others."""
    assert_same(got, want, {torch.float32: (2e-6, 1e-6)})
    if want.numel() > 10**6:
        assert want.max() > 15 and torch.equal(got.argmax(-1), want.argmax(-1))
        torch.testing.assert_close(got.amax(-1), want.amax(-1), atol=0, rtol=1e-6)


def rules(each: list[Sampling], shaped: bool = False, draws: Tensor | None = None) -> tuple:
    """Return the operands of `cut`, or of `cut_shaped`, behind the scores."""
    params = SamplingTensors.from_params(each, seed=3)
    own = params.temperature, params.top_k, params.top_p, params.margin
    if not shaped:
        return own
    rule = ShapedRule(*params[:8], Shaping(1).rows(each))
    return *own, rule.further.top_n_sigma, rule.further.typical_p, rule.xtc_at(draws)


def uneven_scores(spread: float, batch: int = 2, vocab: int = 4099) -> Tensor:
    """Return scores with equal ones, and in one row a third that is cut away."""
    scores = (torch.randn(batch, 3, vocab) * spread).round(decimals=2)
    scores[0, 1, ::3] = -INF
    return scores


CUTS = [  # top_k, top_p, min_p; the first cuts nothing away
    (0, 1.0), (0, 0.5), (0, 0.9), (0, 0.999), (1, 1.0), (5, 1.0), (40, 0.8), (10**6, 0.95), (3000, 1.0), (2500, 0.99),
    (0, 1e-9), (0, 1.0, 0.01), (40, 1.0, 0.2), (0, 1.0, 1.0), (40, 1.0, 1.0),
]  # fmt: skip


def cut_cases() -> Iterator[tuple]:
    for rule, spread in itertools.product(CUTS, (0.0, 0.3, 4.0, 60.0)):
        each = [Sampling(0.7, *rule), Sampling(1.3, *rule)]
        yield uneven_scores(spread), *rules(each)
    for own in (Sampling(1.0, 7), Sampling(1.0, 0, 0.25)):  # equal ones go by their number
        yield torch.zeros(1, 1, 100), *rules([own])
    yield uneven_scores(4.0), torch.tensor([0.7, 1.3]), None, None, None


def within_rounding(operands: tuple, got: Tensor, want: Tensor) -> None:
    """Equal values stay, and tokens differ only where the mass before them is within rounding of top-p."""
    scores, temperature, top_k, top_p, *_ = operands
    stays, stayed = got.isfinite(), want.isfinite()
    assert torch.equal(got[stays & stayed], want[stays & stayed])
    assert stays.any(-1).all(), "other tokens stay"
    if top_k is None:
        assert torch.equal(stays, stayed)
        return
    z = scores / temperature[:, None, None]
    ranked, index = z.double().sort(dim=-1, descending=True, stable=True)
    places = torch.arange(z.shape[-1])
    most = top_k[:, None, None]
    ranked = ranked.masked_fill((places >= most) & (most > 0), -INF)
    p = ranked.softmax(-1)
    before = (p.cumsum(-1) - p).gather(-1, index.argsort(-1))
    off = (before - top_p[:, None, None]).abs()
    off = off.masked_fill((top_p == 1)[:, None, None], INF)  # nothing is added up
    assert (off[stays != stayed] < 1e-4).all(), "other tokens stay"


def shaped_cases() -> Iterator[tuple]:
    for spread in (0.3, 4.0):
        logits = uneven_scores(spread)
        likely = 0.9 * float(logits[0].softmax(-1).topk(2).values[:, 1].max())
        for own in (
            Sampling(1.0, typical_p=0.4),
            Sampling(0.7, 0, 0.99, 0.001, typical_p=0.97),
            Sampling(0.7, 50, typical_p=0.8),
            Sampling(1.0, 0, 0.6, top_n_sigma=2.0),
            Sampling(0.8, top_n_sigma=1.5),
            Sampling(1.0, xtc_probability=1.0, xtc_threshold=likely),
            Sampling(0.9, 900, 0.95, 0.01, 2.0, 0.9, 0.5, likely),
        ):
            draws = torch.arange(6).view(2, 3)
            yield logits, *rules([own, Sampling(1.0)], True, draws)


def but_for_two(operands: tuple, got: Tensor, want: Tensor) -> None:
    """The same tokens stay, but for one at each end of a row; a rule that cuts nothing leaves the scores."""
    stays, stayed = got.isfinite(), want.isfinite()
    assert torch.equal(got[stays & stayed], want[stays & stayed])
    adds_up = operands[3][0] < 1 or operands[5][0] < INF or operands[6][0] < 1
    assert (stays != stayed).sum(-1).max() <= 2 * adds_up
    assert torch.equal(got[1], operands[0][1])
    assert (stays.sum(-1)[0] < operands[0].isfinite().sum(-1)[0]).any()


def best_cases() -> Iterator[tuple]:
    for vocab in (1, 15, 1023, 1024, 1025, 5000):
        scores = torch.randn(2, 5, vocab).round(decimals=1)  # with equal ones
        yield scores, None, None
        yield scores, torch.randn(2, 3, vocab), whole(3, 2, 5)
    scores = torch.full((1, 3, 2000), -INF)  # all of the last row are cut away
    scores[0, 0, 1999], scores[0, 1, 1500], scores[0, 1, 3] = -5.0, 2.0, 2.0
    yield scores, None, None


def topk_cases() -> Iterator[tuple]:
    for vocab, k in (
        (1, 1),
        (16, 16),
        (63, 63),
        (64, 5),
        (65, 10),
        (2049, 10),
        (4096, 10),
        (4097, 1),
        (128256, 64),
    ):
        yield (torch.randn(2, 3, vocab) * 4).round(), k  # many ties
        yield torch.randn(3, vocab) * 10, k
    scores = torch.full((2, 5000), -INF)
    scores[1, 4000] = 3.0
    yield scores, 3
    zeros = torch.zeros(1, 4100)
    zeros[:, ::2] = -0.0
    yield zeros, 5


def best_by_sorting(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k best by value, then by index, and the logarithm of the sum in fp64, rounded."""
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    total = scores.double().logsumexp(-1, keepdim=True).float()
    return values[..., :k], index[..., :k], total


# --------------------------------------------------------------------------------------------- trees


def logits_of(kind: str, *shape: int) -> Tensor:
    """Return scores: random, with many ties, all equal, or mostly cut away."""
    z = torch.randn(shape) * 3
    if kind == "ties":
        return z.round()
    if kind == "equal":
        return torch.zeros(shape)
    if kind == "cut":
        z[..., 2:][torch.rand(z[..., 2:].shape) < 0.9] = -INF  # two of a row stay
    return z


def front_of(batch: int, rows: int, slots: int) -> Frontier:
    """Return a frontier, some of whose nodes are none; ties among their values."""
    values = -whole(4, batch, rows) / 2
    values[torch.rand(batch, rows) < 0.2] = -INF
    index, tokens, depths = (whole(high, batch, rows) for high in (90, 50, 3))
    return Frontier(index, tokens, depths, values, torch.rand(batch, rows, slots) < 0.5)


def frontier_cases() -> Iterator[tuple]:
    """The root's and others, whose nodes have scores of their own or share them; by value, by place, and the last."""
    slots = 7
    kinds = ("random", "ties", "equal", "cut")
    fronts = ((None, 1), (1, 1), (3, 3), (3, 1))
    for kind, vocab, (rows, scored) in itertools.product(kinds, (4, 97, 5000), fronts):
        for noisy in (False, True):
            few = whole(vocab, 4).unique() if vocab > 4 else torch.arange(4)
            ids = random.choice((None, few))
            width = vocab if ids is None else len(ids)
            front, above = (None, 1) if rows is None else (front_of(2, rows, slots), rows)
            k = min(width, 3)
            found = Scores(logits_of(kind, 2, scored, width), random.choice((1.0, 0.5, 1.7)), ids)
            if noisy:
                noise = torch.randn(2, 3, vocab)
                found = found._replace(noise=noise, level=2, temperature=0.3 + torch.rand(2))
            last_and_first = torch.tensor([[above * k - 1, 0]])
            for count, places in ((2, None), (above * k, None), (2, last_and_first), (0, None)):
                count = min(count, above * k, slots - 2)
                places = None if places is None else places[:, :count]
                yield found, front, Level(k, count, 11, 2, slots, places)


def frontier_by_sorting(scores: Scores, front: Frontier | None, level: Level) -> tuple:
    """Return `expand_frontier` in PyTorch; of equal children the first come first, with the sums of C++."""
    topk = reference.choose(torch.device("cpu")).topk

    def grow(scores: Scores, values: Tensor, seen: Tensor, level: Level) -> tuple[Tensor, ...]:
        return reference.grow_level(scores.best(level.k, topk), values, seen, level)

    candidates, chosen = reference.expand_frontier(scores, front, level, grow)
    if chosen is None:  # of the last level C++ has an empty one
        none = candidates.tokens[:, :0]
        chosen = Frontier(
            none,
            none,
            none,
            candidates.values[:, :0],
            torch.empty(len(none), 0, level.slots).bool(),
        )
    return candidates, chosen


def no_child_is_likelier(operands: tuple, got: tuple, want: tuple) -> None:
    """No value exceeds its parent's, not even by rounding."""
    assert_same(got, want)
    scores, front, level = operands
    above = torch.zeros(len(scores.logits), 1) if front is None else front.values
    assert (got[0].values <= above.repeat_interleave(level.k, 1)).all()


def pool_of(
    batch: int, sizes: list[int], widths: list[int], ties: bool
) -> tuple[list[Candidates], list[Tensor]]:
    """Return levels of candidates, and which of each level ran; a value never exceeds the parent's."""
    levels, ran, begin = [], [], 0
    parents, above = torch.full((batch, 1), -1), torch.zeros(batch, 1)
    for size, width in zip(sizes, [*widths, 0]):
        pick = whole(parents.shape[1], batch, size).sort(1).values
        step = -whole(3, batch, size).float() if ties else -torch.rand(batch, size)
        step[torch.rand(batch, size) < 0.15] = -INF
        values = above.gather(1, pick) + step
        levels.append(Candidates(whole(50, batch, size), values, parents.gather(1, pick)))
        chosen = torch.stack([torch.randperm(size)[:width] for _ in range(batch)])
        ran += [begin + chosen] if width else []
        parents, above = begin + chosen, values.gather(1, chosen)
        begin += size
    return levels, ran


POOLS = [([1], []), ([3, 9, 9], [3, 3]), ([10, 100], [10]), ([1, 1, 1, 1], [1, 1, 1])]


def nodes_cases() -> Iterator[tuple]:
    """The best, the first, or others of every row; a tree of the root alone, and of all candidates."""
    for (sizes, widths), ties, _ in itertools.product(POOLS, (False, True), range(4)):
        levels, ran = pool_of(2, sizes, widths, ties)
        total = sum(sizes)
        text = DecodedTokens(whole(50, 2, 9), whole(9, 2))
        first = torch.arange(total - total // 2)[None]
        counts = {0, 1, total // 2, min(total, 59), total}
        for nodes in (*counts, first, first.expand(2, -1), first.repeat(2, 1), first[:, :0]):
            yield levels, ran, nodes, 6, text
    roots = torch.zeros(2, 2), torch.full((2, 2), -1)
    levels = [Candidates(torch.tensor([[4, 5], [6, 0]]), *roots)]
    text = DecodedTokens(torch.tensor([[0, 9], [8, 7]]), torch.tensor([0, 1]))
    yield levels, [], torch.tensor([[1], [0]]), 1, text  # rows that choose different nodes


def tree_of(batch: int, size: int, vocab: int = 3) -> reference.DraftTree:
    rows = [[0, *map(random.randrange, range(1, size))] for _ in range(batch)]
    valid = torch.rand(batch, size) < 0.9
    valid |= torch.arange(size) == 0
    return build_tree(whole(vocab, batch, size), torch.tensor(rows), valid, size)


def accept_cases() -> Iterator[tuple]:
    for size, _ in itertools.product((1, 2, 9, 12), range(12)):
        yield tree_of(2, size), whole(3, 2, size), size


def advance_operands(batch: int, size: int, dtype: torch.dtype) -> tuple:
    """Ends and limits before, inside, at the end of and behind the path, in rows that are done and that are not."""
    tree = tree_of(batch, size)
    accepted = TORCH.accept(tree, whole(3, batch, size), size)
    pos = whole(8, batch)
    limit, done = pos + 1 + whole(3 + (size < 3), batch), torch.rand(batch) < 0.3
    features = torch.randn(batch, size, 6).to(dtype)
    features[torch.rand(batch, size) < 0.1, 3] = INF  # which `done` tells
    ends = torch.tensor([-1, -1, *random.sample([0, 1, 2, 7], 2)])
    state = whole(9, batch, 30), pos, pos + 100, done, limit
    return *state, tree.tokens, *accepted[:3], ends, features, REPORT


def advance_cases() -> Iterator[tuple]:
    for dtype, size, _ in itertools.product((*DTYPES, torch.float16), (1, 2, 12), range(40)):
        yield advance_operands(2, size, dtype)


# --------------------------------------------------------------------------------------------- cycle


def places_cases() -> Iterator[tuple]:
    for batch in (1, 2):
        pos, strided = whole(40, batch), whole(5, 7, batch).T
        for depths, slot, done in itertools.product(
            (0, 3, whole(5, batch, 7), strided, torch.tensor([2]).expand(batch, 7)),
            (0, 4),
            (None, torch.tensor([True, False])[:batch]),
        ):
            yield pos, depths, 7, slot, done
        yield pos, 0, 1


def causal_cases() -> Iterator[tuple]:
    for batch, rows, back in itertools.product((1, 2), (1, 7), (0, 1, 30)):  # no slot is below 0
        yield whole(40, batch), rows, back


PATHS = {  # rows past the accepted ones name themselves
    "vanilla": [[0], [0]],
    "overlapping": [[0, 2, 4, 6, 8], [0, 1, 3, 4, 8]],
    "of all lengths": [[0, 3, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]],
    "backwards and repeated": [[3, 2, 1, 0], [8, 8, 8, 8]],
    "onto others": [[4, 4, 0], [0, 3, 5]],
}


def buffers_of(batch: int, slots: int, dtype: torch.dtype, E: int = 16) -> tuple:
    """Return the buffers of two layers, some of whose values are not numbers, and where they lie."""
    buffers = [torch.randn(batch, 2, slots, E).to(dtype) for _ in range(4)]
    for buffer in buffers:
        buffer[torch.rand(buffer.shape) < 0.1] = float("nan")
    buffers = [buffer.view(torch.int8) for buffer in buffers]  # NaN is compared as bits
    return buffers, torch.tensor([buffer.data_ptr() for buffer in buffers])


def compact_cases() -> Iterator[tuple]:
    """Rows of different lengths, one of them exactly full."""
    for path, dtype in itertools.product(PATHS.values(), (*DTYPES, torch.float16)):
        path = torch.tensor(path)
        yield *buffers_of(2, 20, dtype), torch.tensor([5, 19 - int(path.max())]), path


# --------------------------------------------------------------------------------------------- model


def hardly_differ(operands: tuple, got: Tensor, want: Tensor) -> None:
    """In bf16 nearly all numbers have the bits: they are rounded where the definition rounds; sums run in other orders."""
    assert_same(got, want, NEAR | {torch.bfloat16: (1e-3, 2**-6)})
    if got.dtype == torch.bfloat16:
        assert (got == want)[~want.isnan()].float().mean() > 0.99


def norm_cases() -> Iterator[tuple]:
    for width, eps in itertools.product((8, 576, 1000, 4096), (1e-5, 0.1)):
        yield torch.randn(2, 5, width).bfloat16(), torch.randn(width).bfloat16(), eps


def gate_cases() -> Iterator[tuple]:
    """Numbers of both signs, up to where a gate is closed, and some that are none."""
    for dtype in DTYPES:
        both = torch.linspace(-9, 9, 2 * 2 * 333).view(2, 666).to(dtype)
        both[:, ::7] = both[:, ::7].flip(0)
        both[0, 5] = both[1, 340] = float("nan")
        yield (both,)
        yield (torch.randn(2, 3, 128).to(dtype) * 30,)


def clamped_cases() -> Iterator[tuple]:
    for (both,) in gate_cases():
        yield both, 1.702, 7.0


def angle_cases() -> Iterator[tuple]:
    freq = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    positions = torch.tensor([[0, 1, 17], [4095, 131071, 8191]])
    yield freq, positions
    yield freq, positions, 1.3


def rotary_operands(batch: int, rows: int, dtype: torch.dtype, turned: int = 80) -> tuple:
    """Return qkv and angles, then the numbers of heads. turned: elements of a head, of 80"""
    positions = torch.arange(batch * rows).view(batch, rows) * 37
    rope = TORCH.rope_angles(10000.0 ** -(torch.arange(0, turned, 2) / turned), positions)
    # in the model both halves have the same angles; here a wrong half is seen
    rope = tuple(angles + torch.rand(turned) for angles in rope)
    return torch.randn(batch, rows, 8 + 2 * 4, 80).to(dtype), rope, 8, 4


def rotary_cases() -> Iterator[tuple]:
    for dtype, turned in itertools.product(DTYPES, (80, 40)):
        yield rotary_operands(2, 9, dtype, turned)


def rotary_cache_cases() -> Iterator[tuple]:
    """In slots that lie apart; everything else in the cache stays. In 8 bits too."""
    slots = torch.arange(18).view(2, 9) % 9 + 3
    for dtype, turned, coded in itertools.product(DTYPES, (80, 40), (False, True)):
        qkv, rope, *_ = rotary_operands(2, 9, dtype, turned)
        cache = torch.randn(2, 2, 4, 16, 80).to(dtype)
        k, v = (encode_rows(x, torch.int8) if coded else x for x in cache)
        yield qkv, rope, k, v, slots


HEADS = [
    ((6, 2), 64),
    ((4, 4), 16),
    ((4, 1), 80),
    ((40, 1), 32),
]  # the last: a token has two blocks
STARTS = [[37, 11], [0], [300, 0, 3]]


def attention_of(
    kind: str, starts: list[int], heads: tuple[int, int], E: int, dtype: torch.dtype, size: int
) -> tuple:
    """Return the operands of a step. dtype: of the cache, int8 in 8 bits; size: of a window, 0: none"""
    step = random_step(kind, starts, heads, E)
    window = sliding(step.window, size) if size else step.window
    # slots behind a window are in no sequence of the batch; those before it hold finite numbers
    q, k, v = step.q, step.k.nan_to_num(), step.v.nan_to_num()
    if dtype == torch.int8:
        k, v = encode_rows(k, dtype), encode_rows(v, dtype)
    else:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v, window.start, window.mask, window.first


def attention_cases() -> Iterator[tuple]:
    """Of every kind of step; prefixes that are empty and long; windows; sinks above every score and below most."""
    for kind, (heads, E), starts, dtype in itertools.product(
        KINDS, HEADS, STARTS, (*DTYPES, torch.int8)
    ):
        size = random.choice((0, 0, 1, 5, 16, 1000))
        sinks = torch.linspace(-2, 9, heads[0]) if random.random() < 0.4 else None
        scale = random.choice((0.0, 0.1))
        operands = attention_of(kind, starts, heads, E, dtype, size)
        if sinks is not None:
            sinks = sinks.to(operands[0].dtype)
        yield *operands, scale, {"sinks": sinks}


def products_cases() -> Iterator[tuple]:
    """Of bf16, within rounding; test_weights.py has the bits."""
    for n, k in ((33, 64), (5, 301)):
        yield torch.randn(7, k).bfloat16(), (torch.randn(n, k) * k**-0.5).bfloat16()


def biased_cases() -> Iterator[tuple]:
    for x, weight in products_cases():
        for bias, wide in itertools.product(
            (None, torch.randn(len(weight)).bfloat16()), (False, True)
        ):
            yield x, weight, bias, wide


def expert_cases() -> Iterator[tuple]:
    for x, weight in products_cases():
        yield x, torch.stack((weight, -weight)), torch.tensor([0, 1, 0, 0, 1, 1, 0])


# -------------------------------------------------------------------------------------------- lookup

NGRAMS = (Ngram(), Ngram(4, 3, 3, 2), Ngram(1, 1, 1, 1), Ngram(6, 5, 2, 1))


def match_cases() -> Iterator[tuple]:
    """Also where the root is the first or the last token of the buffer, with kept texts and without them."""
    for ngram, vocab, size in itertools.product(NGRAMS, (1, 2, 5), (1, 2, 20, 70)):
        for kept in (None, [-1, 0, 1, 0, -1], whole(vocab + 1, 40) - 1):
            row = None if kept is None else torch.tensor([*kept, -1])  # -1 is no token
            text = DecodedTokens(whole(vocab, 2, size), whole(size, 2))
            yield *text, row, ngram.tokens, ngram.branches, ngram.min, ngram.max


def match_plainly(
    tokens: Tensor, pos: Tensor, kept: Tensor | None, *sizes: int
) -> tuple[Tensor, Tensor]:
    given = None if kept is None else SimpleNamespace(tokens=kept, searched=kept)
    ngram = Ngram(sizes[0], sizes[1], max=sizes[3], min=sizes[2], kept=given)
    return lookup(DecodedTokens(tokens, pos), ngram)


def chain_cases() -> Iterator[tuple]:
    """Onto pools with and without candidates, some of which a chain repeats."""
    for ngram, vocab in itertools.product(NGRAMS, (1, 2, 5)):
        text = DecodedTokens(whole(vocab, 2, 20), whole(20, 2))
        levels, _ = pool_of(2, [3, 6], [2], True)
        siblings = torch.arange(9).expand(2, 9).clone()  # that differ
        for pool in (no_candidates(2), replace_fields(joined(levels), tokens=siblings)):
            yield *pool, *lookup(text, ngram)


def add_plainly(
    tokens: Tensor, values: Tensor, parents: Tensor, chains: Tensor, lengths: Tensor
) -> tuple:
    pool = Candidates(tokens, values, parents)
    for k in range(chains.shape[1]):
        of_chain = torch.where(lengths[:, k, None] > 0, -float(k), -INF)
        pool = add_chain(pool, chains[:, k], of_chain.expand(-1, chains.shape[2]))
    return tuple(pool)


ROWS = [
    # scores
    Row("soft_cap", lambda: iter([(special_scores(), 30.0)]),
        lambda: (torch.randn(BATCH, 2, 30000) * 40, 30.0), {torch.float32: (1e-5, 0)}),
    Row("gumbel", gumbel_cases, lambda: (*keys([4, 9, 1], [0, 1, 2]), torch.tensor([3, 5, 9]), 2, 5000, 0),
        agrees=same_winners),
    Row("cut", cut_cases, lambda: (uneven_scores(2.0, BATCH, 30000), *rules([Sampling(0.7, 40, 0.9), Sampling(1.0, 0, 0.8), Sampling()])),
        agrees=within_rounding),
    Row("cut_shaped", shaped_cases, lambda: (uneven_scores(2.0, BATCH, 30000),
        *rules([Sampling(0.7, typical_p=0.6), Sampling(1.0, top_n_sigma=1.0), Sampling(0.9, 50, typical_p=0.9)], True,
               torch.arange(9).view(BATCH, 3))), agrees=but_for_two),
    Row("best", best_cases, lambda: (torch.randn(BATCH, 9, 9000), torch.randn(BATCH, 2, 9000), whole(2, BATCH, 9))),
    Row("topk", topk_cases, lambda: (torch.randn(BATCH, 9, 9000), 7), {torch.float32: (1e-6, 3e-7)},
        definition=best_by_sorting),
    # trees
    Row("expand_frontier", frontier_cases, lambda: (
        Scores(torch.randn(BATCH, 5, 9000), 1.2, None, torch.randn(BATCH, 2, 9000), 1, torch.tensor([0.9, 0.3, 1.0])),
        front_of(BATCH, 5, 9), Level(4, 5, 2, 2, 9)), definition=frontier_by_sorting, agrees=no_child_is_likelier),
    Row("select_nodes", nodes_cases, lambda: (*pool_of(BATCH, [9, 80], [9], False), 40, 4,
        DecodedTokens(whole(50, BATCH, 9), whole(9, BATCH)))),
    Row("root_tree", lambda: iter([(DecodedTokens(whole(9, 2, 5), torch.tensor([4, 0])),)]),
        lambda: (DecodedTokens(whole(9, BATCH, 5), whole(5, BATCH)),),
        agrees=lambda _, got, want: assert_same(got[:5], want[:5])),  # without values
    Row("accept", accept_cases, lambda: (tree_of(BATCH, 30), whole(3, BATCH, 30), 30)),
    # the cycle
    Row("advance", advance_cases, lambda: advance_operands(BATCH, 12, torch.bfloat16), writes=(0,), whole=(0,)),
    Row("with_times", lambda: iter([(whole(9, 2, 7), [5, 2**40, 2**62, -1])]), lambda: (whole(9, BATCH, 7), [5, 2**40])),
    Row("place_tokens", places_cases, lambda: (whole(40, BATCH), whole(5, BATCH, 7), 7, 4, whole(2, BATCH).bool())),
    Row("causal", causal_cases, lambda: (whole(40, BATCH), 7, 9)),
    Row("compact", compact_cases, lambda: (*buffers_of(BATCH, 600, torch.float32, 64), whole(500, BATCH),
        whole(90, BATCH, 60)), writes=(0,), whole=(0,)),
    # the model
    Row("rms_norm", norm_cases, lambda: (torch.randn(BATCH, 30, 4096).bfloat16(), torch.randn(4096).bfloat16(), 1e-5),
        whole=(1,), agrees=hardly_differ),
    Row("swiglu", gate_cases, lambda: (torch.randn(BATCH, 30, 4096),), agrees=hardly_differ),
    Row("geglu", gate_cases, lambda: (torch.randn(BATCH, 30, 4096),), NEAR | {torch.bfloat16: (1e-3, 2e-2)}),
    Row("clamped_swiglu", clamped_cases, lambda: (torch.randn(BATCH, 30, 4096) * 5, 1.702, 7.0), NEAR),
    Row("rope_angles", angle_cases, lambda: (torch.rand(64), whole(9000, BATCH, 90), 1.3), {torch.float32: (1e-6, 0)}),
    Row("rotary", rotary_cases, lambda: rotary_operands(BATCH, 40, torch.bfloat16)),
    Row("rotary_cache", rotary_cache_cases, lambda: (*rotary_operands(BATCH, 40, torch.bfloat16)[:2],
        *torch.randn(2, BATCH, 4, 60, 80).bfloat16(), torch.arange(40).expand(BATCH, 40) + 5), writes=(2, 3), whole=(2, 3)),
    Row("attention", attention_cases, lambda: attention_of("tree", [300, 0, 70], (6, 2), 64, torch.bfloat16, 40), NEAR,
        whole=(1, 2)),
    # products, whose weights test_weights.py has in every layout
    Row("linear", biased_cases, lambda: (torch.randn(BATCH, 9, 301).bfloat16(), torch.randn(500, 301).bfloat16()), dict.fromkeys(DTYPES, NEAR[torch.bfloat16]), whole=(1,)),  # it rounds to bf16
    Row("router_logits", products_cases, lambda: (torch.randn(BATCH, 9, 301).bfloat16(), torch.randn(500, 301).bfloat16()), NEAR, whole=(1,)),
    Row("experts_linear", expert_cases, None, NEAR, whole=(1,)),
    # lookups
    Row("ngram_match", match_cases, lambda: (whole(3, BATCH, 200), whole(200, BATCH), None, 4, 5, 1, 4),
        definition=match_plainly),
    Row("add_chains", chain_cases, lambda: (*joined(pool_of(BATCH, [3, 6], [2], True)[0]), whole(3, BATCH, 4, 5), whole(2, BATCH, 4)),
        definition=add_plainly),
]  # fmt: skip
