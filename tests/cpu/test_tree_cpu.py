"""The C++ operators of a cycle against their plain references, bit for bit: trees, acceptance, rows, lookup.

On random operands and at the edges: one node, all rejected, all accepted, ends and limits inside a path, finished rows,
ties, scores that are cut away, token 0. Wrong operands are refused before anything is read or written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from backends.library import has_cpu_operators
from decode import REPORT, DecodeState
from draft_tree import Candidates, DecodedTokens, Frontier, Level, Scores
from drafters import DrafterUpdate
from drafts.kept_texts import PastTexts
from drafts.ngram_draft import Ngram, NgramDrafter, lookup, match_lengths
from drafts.ngram_estimates import RATES, Rates
from helpers import no_candidates, not_refused
from reference import TORCH, build_tree, choose, joined
from runtime import replace_fields

pytestmark = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")
INF, CPP = float("inf"), torch.ops.gpt_eagle
OURS = choose(torch.device("cpu"))


def plain_frontier(scores, front, level):
    """`expand_frontier` in PyTorch, but for the best children: equal ones come in the order of their indices."""

    def grow(scores, values, seen, level):
        return reference.grow_level(scores.best(level.k, OURS.topk), values, seen, level)

    return reference.expand_frontier(scores, front, level, grow)


def leaves(record) -> list[Tensor]:
    """The tensors of nested records, in their order."""
    if isinstance(record, Tensor):
        return [record]
    return [x for part in record if part is not None for x in leaves(part)]


def assert_equal(ours, theirs) -> None:
    """Nested records of the same tensors: shapes, types and bits."""
    ours, theirs = leaves(ours), leaves(theirs)
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    assert [torch.equal(x, y) for x, y in zip(ours, theirs)] == [True] * len(ours)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def assert_refused(operator: Callable, good: dict[str, Any], **wrong: list) -> None:
    """Whatever one of the operands is replaced by is refused. good: operands by name, in their order"""
    cases = {
        f"{name} {n}": tuple((good | {name: value}).values())
        for name, values in wrong.items()
        for n, value in enumerate(values)
    }
    assert wrong.keys() <= good.keys() and not_refused(operator, cases) == []


# ---------------------------------------------------------------------------------- expand_frontier


def logits_of(kind: str, *shape: int) -> Tensor:
    """Scores: random, with many ties, all equal, or mostly cut away."""
    z = torch.randn(shape) * 3
    if kind == "ties":
        return z.round()
    if kind == "equal":
        return torch.zeros(shape)
    if kind == "cut":
        z[..., 2:][torch.rand(z[..., 2:].shape) < 0.9] = -INF  # two of a row stay
    return z


def front_of(batch: int, rows: int, slots: int) -> Frontier:
    """A frontier, some of whose nodes are none; ties among their values."""
    values = -whole(4, batch, rows) / 2
    values[torch.rand(batch, rows) < 0.2] = -INF
    index, tokens, depths = (whole(high, batch, rows) for high in (90, 50, 3))
    return Frontier(index, tokens, depths, values, torch.rand(batch, rows, slots) < 0.5)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "cut"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("vocab", [4, 97, 5000])
def test_expand_frontier(vocab, batch, kind):
    """With and without a draft vocabulary, noise, sharpness; the root's and others; by value and place; the last.

    The nodes of a level have scores of their own, or share them (`scored` 1).
    """
    torch.manual_seed(vocab)
    noise, slots = torch.randn(batch, 3, vocab), 7
    few = whole(vocab, 4).unique() if vocab > 4 else torch.arange(4)
    fronts = ((None, 1), (1, 1), (3, 3), (3, 1))
    for ids, noisy, (rows, scored) in itertools.product((None, few), (False, True), fronts):
        width = vocab if ids is None else len(ids)
        front, above = (None, 1) if rows is None else (front_of(batch, rows, slots), rows)
        k = min(width, 3)
        found = Scores(logits_of(kind, batch, scored, width), random.choice((1.0, 0.5, 1.7)), ids)
        if noisy:
            found = found._replace(noise=noise, level=2, temperature=0.3 + torch.rand(batch))
        last_and_first = torch.tensor([[above * k - 1, 0]])
        for count, places in ((2, None), (above * k, None), (2, last_and_first), (0, None)):
            count = min(count, above * k, slots - 2)
            places = None if places is None else places[:, :count]
            inputs = found, front, Level(k, count, 11, 2, slots, places)
            ours, theirs = OURS.expand_frontier(*inputs), plain_frontier(*inputs)
            assert_equal(ours[0], theirs[0])
            if count:
                assert_equal(ours[1], theirs[1])
            else:
                assert theirs[1] is None and all(x.numel() == 0 for x in leaves(ours[1]))


def test_children_that_are_cut_away_are_no_candidates():
    """A row that is sure of one token has one child; the others' value is -inf, and none is chosen before others."""
    z = torch.full((1, 2, 6), -INF)
    z[0, 0, 4], z[0, 1, 0], z[0, 1, 5] = 1.0, 2.0, 2.0
    three = (torch.tensor([[3, 4]]) for _ in range(3))
    front = Frontier(*three, torch.zeros(1, 2), torch.zeros(1, 2, 4).bool())
    inputs = Scores(z), front, Level(3, 4, 5, 0, 4)
    level, chosen = OURS.expand_frontier(*inputs)
    assert_equal((level, chosen), plain_frontier(*inputs))
    assert level.tokens[0, [0, 3, 4]].tolist() == [4, 0, 5] and level.values[0, 0] == 0
    assert level.values[0, [1, 2, 5]].tolist() == [-INF] * 3
    assert chosen.index.tolist() == [[5, 8, 9, 6]]


@pytest.mark.parametrize("threads", [2, 3])
def test_a_level_does_not_depend_on_threads_and_other_rows(threads):
    torch.manual_seed(0)
    temperature = torch.tensor([0.9, 0.3, 1.0])
    found = Scores(torch.randn(3, 5, 9000), 1.2, None, torch.randn(3, 2, 9000), 1, temperature)
    front, level = front_of(3, 5, 9), Level(4, 5, 2, 3, 9)
    want = OURS.expand_frontier(found, front, level)
    torch.set_num_threads(threads)
    try:
        assert_equal(OURS.expand_frontier(found, front, level), want)
    finally:
        torch.set_num_threads(1)
    one = lambda x: x[1:2]  # noqa: E731
    first = {"logits": one(found.logits), "noise": one(found.noise)}
    alone = found._replace(temperature=one(temperature), **first)
    ours = OURS.expand_frontier(alone, Frontier(*map(one, front)), level)
    assert_equal(ours, [one(x) for x in leaves(want)])


def test_wrong_levels():
    z, noise, ids = torch.zeros(2, 2, 5), torch.zeros(2, 3, 9), torch.arange(5)
    index, values, seen = torch.zeros(2, 2).long(), torch.zeros(2, 2), torch.zeros(2, 2, 6).bool()
    good = {
        "logits": z, "sharpness": 1.0, "ids": ids, "noise": noise, "level": 0,
        "temperature": torch.ones(2), "index": index, "values": values, "seen": seen,
        "k": 3, "count": 2, "first_candidate": 4, "first_slot": 0, "slots": 6,
        "fixed_children": torch.tensor([[0, 5]]),
    }  # fmt: skip
    fields = (*Scores._fields, "index", "values", "seen", *Level._fields)
    schema = CPP.expand_frontier.default._schema
    assert [x.name for x in schema.arguments] == [*fields], "the records' fields, in order"
    assert len(CPP.expand_frontier(*good.values())) == 8
    assert_refused(
        CPP.expand_frontier,
        good,
        logits=[z[0], z.double(), torch.zeros(2, 2, 2)],
        ids=[ids[:4], torch.arange(6), ids + 5, ids - 1, ids.int(), None],
        noise=[noise[:1], noise[0], noise.double(), noise[..., :4]],
        level=[3, -1],
        temperature=[torch.ones(1), torch.ones(2).double(), None],
        index=[index[:1], index[:, :1], index.int()],
        values=[values[:1], values[:, :1], values.double()],
        seen=[seen[:1], seen[:, :1], seen[..., :5], seen.int()],
        fixed_children=[torch.tensor([row]) for row in ([0], [0, 6], [-1, 0], [0.0, 1.0])],
        k=[0, -1, 6],
        count=[7, -1],
        slots=[7, -1],
    )


# ------------------------------------------------------------------------------------- select_nodes


def text_of(batch: int) -> DecodedTokens:
    return DecodedTokens(whole(50, batch, 9), whole(9, batch))


def pool_of(
    batch: int, sizes: list[int], widths: list[int], ties: bool
) -> tuple[list[Candidates], list[Tensor]]:
    """Levels of candidates, and which of each level ran; a value never exceeds the parent's."""
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


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "sizes, widths", [([1], []), ([3, 9, 9], [3, 3]), ([10, 100], [10]), ([1, 1, 1, 1], [1, 1, 1])]
)
def test_select_nodes(sizes, widths, batch, ties):
    """The best, the first, or others of every row; a tree of the root alone, and of all candidates."""
    torch.manual_seed(len(sizes))
    for _ in range(5):
        levels, ran = pool_of(batch, sizes, widths, ties)
        total, text = sum(sizes), text_of(batch)
        first = torch.arange(total - total // 2)[None]
        counts = {0, 1, total // 2, min(total, 59), total}
        chosen = (first, first.expand(batch, -1), first.repeat(batch, 1), first[:, :0])
        for nodes in (*counts, *chosen):
            inputs = levels, ran, nodes, 6, text
            assert_equal(OURS.select_nodes(*inputs), TORCH.select_nodes(*inputs))


def test_select_nodes_of_rows_that_choose_different_nodes():
    roots = torch.zeros(2, 2), torch.full((2, 2), -1)
    levels = [Candidates(torch.tensor([[4, 5], [6, 0]]), *roots)]
    text = DecodedTokens(torch.tensor([[0, 9], [8, 7]]), torch.tensor([0, 1]))
    inputs = levels, [], torch.tensor([[1], [0]]), 1, text
    ours = OURS.select_nodes(*inputs)
    assert_equal(ours, TORCH.select_nodes(*inputs))
    assert ours.tokens.tolist() == [[0, 5], [7, 6]]


# ------------------------------------------------------------------------------- accept and advance


def tree_of(batch: int, size: int, vocab: int = 3):
    rows = [[0, *map(random.randrange, range(1, size))] for _ in range(batch)]
    parents = torch.tensor(rows)
    valid = torch.rand(batch, size) < 0.9
    return build_tree(whole(vocab, batch, size), parents, valid | (torch.arange(size) == 0), size)


def test_accept_takes_any_strides():
    """Of choices and of trees; the lists of `test_draft_tree.py` are whole."""
    random.seed(0), torch.manual_seed(0)
    tree, choice = tree_of(3, 9), whole(3, 9, 3).T
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tree[:5]]
    accepted = TORCH.accept(tree, choice, 9)
    assert accepted.length.max() > 1
    assert_equal(OURS.accept(type(tree)(*strided), choice, 9), accepted)


def state_of(batch: int, length: int, pos: Tensor, limit: Tensor, done: Tensor) -> DecodeState:
    return DecodeState(whole(9, batch, length), pos, pos + 100, done, limit, None, ())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_advance(dtype, size, batch):
    """Ends and limits before, inside, at the end of and behind the path, in rows that are done and that are not."""
    random.seed(size), torch.manual_seed(size)
    seen = {"ended": 0, "limited": 0, "done": 0, "whole": 0}
    for _ in range(80):
        tree = tree_of(batch, size)
        accepted = TORCH.accept(tree, whole(3, batch, size), size)
        pos = whole(8, batch)
        limit, done = pos + 1 + whole(3 + (size < 3), batch), torch.rand(batch) < 0.3
        features = torch.randn(batch, size, 6).to(dtype)
        features[torch.rand(batch, size) < 0.1, 3] = float("inf")  # which `done` tells
        ends = torch.tensor([-1, *random.sample([0, 1, 2, 7], 2)])
        old = state_of(batch, 30, pos, limit, done)
        inputs = *old[1:5], tree.tokens, *accepted[:3], ends, features, REPORT
        written, expected = old.tokens.clone(), old.tokens.clone()
        found = OURS.advance(written, *inputs)
        assert_equal(found, TORCH.advance(expected, *inputs))
        new_pos, _, new_done, count, *_ = found
        assert torch.equal(written[:, :-1], expected[:, :-1]), "the last column takes what is cut"
        seen["done"] += int((done & (count == 0)).sum())
        seen["limited"] += int((~done & (count < accepted.length + 1) & (new_pos == limit)).sum())
        seen["ended"] += int((~done & new_done & (new_pos < limit)).sum())
        seen["whole"] += int((~done & ~new_done & (count == accepted.length + 1)).sum())
    assert min(seen.values()) > 1 or (size, seen["limited"]) == (1, 0), seen


def test_times_behind_a_report():
    facts, times = whole(9, 3, 7), [5, 2**40, 2**62, -1]
    ours = OURS.with_times(facts, times)
    assert_equal(ours, TORCH.with_times(facts, times))
    assert ours.tolist() == [row + times for row in facts.tolist()]
    good = {"facts": facts, "times": times}
    assert_refused(CPP.with_times, good, facts=[facts.int(), facts[0]])


# --------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("batch", [1, 3])
def test_places(batch):
    torch.manual_seed(batch)
    pos = whole(40, batch)
    strided = whole(5, 7, batch).T
    for depths, slot, done in itertools.product(
        (0, 3, whole(5, batch, 7), strided, torch.tensor([2]).expand(batch, 7)),
        (0, 4),
        (None, torch.rand(batch) < 0.5),
    ):
        inputs = pos, depths, 7, slot, done
        assert_equal(OURS.place_tokens(*inputs), TORCH.place_tokens(*inputs))
    assert_equal(OURS.place_tokens(pos, 0, 1), TORCH.place_tokens(pos, 0, 1))
    for start in (pos, pos.repeat_interleave(2)[::2]):
        for rows in (1, 7):
            for back in (0, 1, 30):  # no slot is below 0
                inputs = start, rows, back
                assert_equal(OURS.causal(*inputs), TORCH.causal(*inputs))


# ------------------------------------------------------------------------------------------- lookup


@pytest.mark.parametrize(
    "ngram", [Ngram(), Ngram(4, 3, 3, 2), Ngram(1, 1, 1, 1), Ngram(6, 5, 2, 1)], ids=str
)
@pytest.mark.parametrize("batch", [1, 3])
def test_lookup(batch, ngram):
    """Also where the root is the first or the last token of the buffer, and on pools with and without candidates."""
    torch.manual_seed(batch)
    for vocab, size in itertools.product((1, 2, 5), (1, 2, 20)):
        for kept in (None, [-1, 0, 1, 0, -1], whole(vocab + 1, 40) - 1):
            if kept is not None:  # -1 is no token: padding, and behind each text
                row = torch.tensor([*kept, -1])
                kept = SimpleNamespace(tokens=row, searched=row)
            text = DecodedTokens(whole(vocab, batch, size), whole(size, batch))
            ngram = replace(ngram, kept=kept)
            chains, lengths = lookup(text, ngram, OURS)
            assert_equal((chains, lengths), lookup(text, ngram))
            if kept is None:
                longest = match_lengths(text, ngram.max).amax(1)
                assert lengths[:, 0].tolist() == (longest * (longest >= ngram.min)).tolist()
            levels, _ = pool_of(batch, [3, 6], [2], True)
            siblings = torch.arange(9).expand(batch, 9).clone()  # that differ
            distinct = replace_fields(joined(levels), tokens=siblings)
            for pool in (no_candidates(batch), distinct):
                assert_equal(ngram.add([pool], text, OURS), ngram.add([pool], text))


@pytest.mark.parametrize(
    "rates", [RATES, Rates(0.7, 1.0, 0.8, 0.2, 3, 0.4)], ids=["usual", "other"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_became_of_lookups(monkeypatch, batch, rates):
    """Pass by pass, by random outcomes, with a store and without one."""
    monkeypatch.setattr("drafts.ngram_estimates.RATES", rates)
    monkeypatch.setattr("drafts.ngram_draft.RATES", rates)
    torch.manual_seed(batch)
    for vocab, size, (tokens, branches, longest) in itertools.product(
        (1, 2, 4), (3, 12, 40), ((1, 1, 1), (3, 4, 2), (10, 4, 6))
    ):
        for stored in (False, True):
            text, ngram = whole(vocab, batch, size), Ngram(tokens, branches, longest)
            check_passes(vocab, text, ngram, stored)


def check_passes(vocab: int, tokens: torch.Tensor, ngram: Ngram, stored: bool) -> None:
    """Both states start equal and stay so; some sequences decide nothing in a pass."""
    batch, size = tokens.shape
    drafters = []
    for _ in range(2):
        kept = PastTexts(capacity=30) if stored else None
        drafters.append(NgramDrafter(replace(ngram, kept=kept), sizes=(2, 4, 99)))
    drafters[0].use(OURS)
    states = [drafter.init(batch, size) for drafter in drafters]
    outcomes = 5 * torch.rand(states[0].outcomes.shape).sort(-1).values
    states = [replace_fields(state, outcomes=outcomes.clone()) for state in states]
    pos = torch.zeros(batch, dtype=torch.long)
    for _ in range(4):
        count = torch.minimum(whole(4, batch), size - 1 - pos)
        pos = pos + count
        confirmed = DrafterUpdate(None, None, count, text=DecodedTokens(tokens, pos))
        mine = drafters[0].extend(states[0], confirmed)
        assert mine is states[0], "it is written in place"
        states[1] = drafters[1].extend(states[1], confirmed)
        for name, own, plain in zip(mine._fields, mine, states[1]):
            if stored and name in ("tokens", "parents"):  # of candidates; others differ by padding
                own, plain = (x[mine.values > -INF] for x in (own, plain))
            assert torch.allclose(own, plain), name
        if stored:
            text = whole(vocab, 9).tolist()
            for drafter in drafters:
                drafter.kept.add(text)
