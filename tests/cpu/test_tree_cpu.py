"""The C++ operators of a cycle against their plain references, bit for bit: trees, acceptance, rows, lookup.

On random operands and at the edges: one node, all rejected, all accepted, ends and limits inside a path, finished rows,
ties, scores that are cut away, token 0. Wrong operands are refused before anything is read or written.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decode import DecodeState, advance, advance_fused, timed_report
from draft_tree import Accepted, DecodedTokens, accept, accept_fused, build_tree
from drafters import DrafterUpdate, RootOnly
from extras.deferred import MAX_KEPT, DeferredState, Idle
from extras.kept_texts import KeptTexts
from extras.ngram_draft import Ngram, NgramDrafter, lookup, match_lengths
from extras.ngram_estimates import DEPTHS
from helpers import no_candidates, not_refused
from kv_cache import causal_window, place_tokens
from ops.library import has_cpu_operators
from ops.tree import (
    Candidates,
    Frontier,
    Level,
    Scores,
    next_level,
    next_level_reference,
    rerank,
    rerank_reference,
)  # fmt: skip
from runtime import replace_fields

pytestmark = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")
INF, CPP = float("inf"), torch.ops.gpt_eagle


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


# --------------------------------------------------------------------------------------- next_level


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
    index, tokens = whole(90, batch, rows), whole(50, batch, rows)
    return Frontier(
        index, tokens, whole(3, batch, rows), values, torch.rand(batch, rows, slots) < 0.5
    )


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "cut"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("vocab", [4, 97, 5000])
def test_next_level(vocab, batch, kind):
    """With and without a draft vocabulary, noise, sharpness; the root's and others; by value, step and place; the last.

    The nodes of a level have scores of their own, or share them (`scored` 1).
    """
    torch.manual_seed(vocab)
    noise, slots = torch.randn(batch, 3, vocab), 7
    few = whole(vocab, 4).unique() if vocab > 4 else torch.arange(4)
    fronts = ((None, 1), (1, 1), (3, 3), (3, 1))
    for (ids, noisy, (rows, scored)), by_value in itertools.product(
        itertools.product((None, few), (False, True), fronts), (True, False)
    ):
        width = vocab if ids is None else len(ids)
        front, above = (None, 1) if rows is None else (front_of(batch, rows, slots), rows)
        k = min(width, 3)
        found = Scores(logits_of(kind, batch, scored, width), random.choice((1.0, 0.5, 1.7)), ids)
        if noisy:
            found = found._replace(noise=noise, level=2, temperature=0.3 + torch.rand(batch))
        for count, places in (
            (2, None),
            (above * k, None),
            (2, torch.tensor([[above * k - 1, 0]])),
            (0, None),
        ):
            count = min(count, above * k, slots - 2)
            places = None if places is None else places[:, :count]
            inputs = found, front, Level(k, count, 11, 2, slots, places, by_value)
            ours, theirs = next_level(*inputs), next_level_reference(*inputs)
            assert_equal(ours[0], theirs[0])
            if count:
                assert_equal(ours[1], theirs[1])
            else:
                assert theirs[1] is None and all(x.numel() == 0 for x in leaves(ours[1]))


def test_children_that_are_cut_away_are_no_candidates():
    """A row that is sure of one token has one child; the others' value is -inf, and none is chosen before others."""
    z = torch.full((1, 2, 6), -INF)
    z[0, 0, 4], z[0, 1, 0], z[0, 1, 5] = 1.0, 2.0, 2.0
    front = Frontier(
        *(torch.tensor([[3, 4]]) for _ in range(3)),
        torch.zeros(1, 2),
        torch.zeros(1, 2, 4).bool(),
    )
    inputs = Scores(z), front, Level(3, 4, 5, 0, 4)
    level, chosen = next_level(*inputs)
    assert_equal((level, chosen), next_level_reference(*inputs))
    assert (
        level.tokens[0, 0] == 4
        and level.tokens[0, 3:5].tolist() == [0, 5]
        and level.values[0, 0] == 0
    )
    assert level.values[0, [1, 2, 5]].tolist() == [-INF] * 3 and chosen.index.tolist() == [
        [5, 8, 9, 6]
    ]


@pytest.mark.parametrize("threads", [2, 3])
def test_a_level_does_not_depend_on_threads_and_other_rows(threads):
    torch.manual_seed(0)
    temperature = torch.tensor([0.9, 0.3, 1.0])
    found = Scores(torch.randn(3, 5, 9000), 1.2, None, torch.randn(3, 2, 9000), 1, temperature)
    front, level = front_of(3, 5, 9), Level(4, 5, 2, 3, 9)
    want = next_level(found, front, level)
    torch.set_num_threads(threads)
    try:
        assert_equal(next_level(found, front, level), want)
    finally:
        torch.set_num_threads(1)
    one = lambda x: x[1:2]  # noqa: E731
    alone = found._replace(
        logits=one(found.logits), noise=one(found.noise), temperature=one(temperature)
    )
    ours = next_level(alone, Frontier(*map(one, front)), level)
    assert_equal(ours, [one(x) for x in leaves(want)])


def test_wrong_levels():
    z, noise, ids = torch.zeros(2, 2, 5), torch.zeros(2, 3, 9), torch.arange(5)
    index, values, seen = torch.zeros(2, 2).long(), torch.zeros(2, 2), torch.zeros(2, 2, 6).bool()
    names = ("logits", "sharpness", "ids", "noise", "level", "temperature", "index", "values", "seen", "places", "k",
             "count", "at", "by_value")  # fmt: skip
    good = (
        z, 1.0, ids, noise, 0, torch.ones(2), index, values, seen, torch.tensor([[0, 5]]), 3, 2,
        (4, 0, 6), True,
    )  # fmt: skip
    assert len(CPP.next_level(*good)) == 8
    wrong = {
        "logits": [z[0], z.double(), torch.zeros(2, 2, 2)],
        "ids": [ids[:4], torch.arange(6), ids + 5, ids - 1, ids.int(), None],
        "noise": [noise[:1], noise[0], noise.double(), noise[..., :4]],
        "level": [3, -1],
        "temperature": [torch.ones(1), torch.ones(2).double(), None],
        "index": [index[:1], index[:, :1], index.int()],
        "values": [values[:1], values[:, :1], values.double()],
        "seen": [seen[:1], seen[:, :1], seen[..., :5], seen.int()],
        "places": [torch.tensor([[0]]), torch.tensor([[0, 6]]), torch.tensor([[-1, 0]]), torch.tensor([[0.0, 1.0]])],
        "k": [0, -1, 6],
        "count": [7, -1],
        "at": [(4, 0), (4, 0, 7), (4, 0, -1)],
    }  # fmt: skip
    cases = {
        f"{name} {n}": tuple(value if name == own else x for own, x in zip(names, good))
        for name, values in wrong.items()
        for n, value in enumerate(values)
    }
    assert not_refused(CPP.next_level, cases) == []


# ------------------------------------------------------------------------------------------- rerank


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
def test_rerank(sizes, widths, batch, ties):
    """The best, the first, or others of every row; a tree of the root alone, and of all candidates."""
    torch.manual_seed(len(sizes))
    for _ in range(5):
        levels, ran = pool_of(batch, sizes, widths, ties)
        total, text = sum(sizes), text_of(batch)
        first = torch.arange(total - total // 2)[None]
        for nodes in {0, 1, total // 2, min(total, 59), total}:
            assert_equal(
                rerank(levels, ran, nodes, 6, text), rerank_reference(levels, ran, nodes, 6, text)
            )
        for nodes in (first, first.expand(batch, -1), first.repeat(batch, 1), first[:, :0]):
            assert_equal(
                rerank(levels, ran, nodes, 6, text), rerank_reference(levels, ran, nodes, 6, text)
            )


def test_rerank_of_rows_that_choose_different_nodes():
    levels, ran = (
        [Candidates(torch.tensor([[4, 5], [6, 0]]), torch.zeros(2, 2), torch.full((2, 2), -1))],
        [],
    )
    nodes, text = (
        torch.tensor([[1], [0]]),
        DecodedTokens(torch.tensor([[0, 9], [8, 7]]), torch.tensor([0, 1])),
    )
    ours = rerank(levels, ran, nodes, 1, text)
    assert_equal(ours, rerank_reference(levels, ran, nodes, 1, text))
    assert ours.tokens.tolist() == [[0, 5], [7, 6]]


def test_wrong_nodes():
    levels = [
        (whole(9, 2, 3), torch.zeros(2, 3), torch.full((2, 3), -1)),
        (whole(9, 2, 2), torch.zeros(2, 2), whole(3, 2, 2)),
    ]
    text, pos, ran = whole(9, 2, 4), torch.tensor([1, 3]), [torch.tensor([[0, 1], [2, 0]])]
    names = ("tokens", "values", "parents", "ran", "nodes", "count", "text", "pos")
    good = (
        *(list(column) for column in zip(*levels)), ran, torch.tensor([[0, 1, 2, 4]]), 4, text, pos,
    )  # fmt: skip
    assert len(CPP.rerank(*good)) == 7
    tokens, values, parents = good[:3]
    wrong = {
        "tokens": [tokens[:1], [tokens[0], tokens[1][:1]], [tokens[0][:, :2], tokens[1]], [x.int() for x in tokens]],
        "values": [values[:1], [values[0][:1], values[1]], [values[0], torch.zeros(2, 3)], [x.double() for x in values]],
        "parents": [parents[:1], [parents[0], parents[1][:, :1]], [parents[0], parents[1] + 9], [parents[0] - 1, parents[1]],
                    [parents[0] + 2, parents[1]]],
        "ran": [[ran[0] + 3], [ran[0] - 2], [ran[0][:1]], [ran[0].int()]],
        "nodes": [torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2, 5]]), torch.tensor([[-1, 0, 1, 2]]),
                  torch.tensor([[0, 1, 2, 4]] * 3), torch.tensor([[0.0, 1, 2, 4]])],
        "count": [5, -1, 6],
        "text": [text[:1], text[:, :3], text.int()],
        "pos": [pos + 1, pos - 2, pos[:1], pos.int()],
    }  # fmt: skip
    cases = {
        f"{name} {n}": tuple(value if name == own else x for own, x in zip(names, good))
        for name, values in wrong.items()
        for n, value in enumerate(values)
    }
    cases["count 6, the best"] = (*good[:4], None, 6, text, pos)
    assert not_refused(CPP.rerank, cases) == []


# ------------------------------------------------------------------------------- accept and advance


def tree_of(batch: int, size: int, vocab: int = 3):
    parents = torch.tensor(
        [[0, *(random.randrange(node) for node in range(1, size))] for _ in range(batch)]
    )
    valid = torch.rand(batch, size) < 0.9
    return build_tree(whole(vocab, batch, size), parents, valid | (torch.arange(size) == 0), size)


def test_accept_takes_any_strides():
    """Of choices and of trees; the lists of `test_draft_tree.py` are whole."""
    random.seed(0), torch.manual_seed(0)
    tree, choice = tree_of(3, 9), whole(3, 9, 3).T
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tree[:5]]
    accepted = accept(tree, choice, 9)
    assert accepted.length.max() > 1
    assert_equal(accept_fused(type(tree)(*strided), choice, 9), accepted)


def test_wrong_acceptance():
    tree = build_tree(
        torch.arange(8).view(2, 4), torch.tensor([[0, 0, 1, 2]] * 2), torch.ones(2, 4).bool(), 3
    )
    tokens, parents, depths, mask, valid = good = tree[:5]
    choice = torch.arange(1, 9).view(2, 4)
    assert CPP.accept(*good, choice, 3)[1].tolist() == [3, 3]
    cases = {
        "depth 2": (*good, choice, 2), "depth -1": (*good, choice, -1),
        "few choices": (*good, choice[:1], 3), "narrow choices": (*good, choice[:, :3], 3),
        "other choices": (*good, choice.int(), 3),
        "few parents": (tokens, parents[:1], depths, mask, valid, choice, 3),
        "parent 4": (tokens, torch.tensor([[0, 4, 1, 2]] * 2), depths, mask, valid, choice, 3),
        "parent -1": (tokens, torch.tensor([[0, -1, 1, 2]] * 2), depths, mask, valid, choice, 3),
        "parent behind": (tokens, torch.tensor([[0, 2, 1, 2]] * 2), depths, mask, valid, choice, 3),
        "few depths": (tokens, parents, depths[:, :3], mask, valid, choice, 3),
        "depth 9": (tokens, parents, torch.tensor([[0, 9, 2, 3]] * 2), mask, valid, choice, 3),
        "few valid": (tokens, parents, depths, mask, valid[:1], choice, 3),
        "other valid": (tokens, parents, depths, mask, valid.int(), choice, 3),
    }  # fmt: skip
    assert not_refused(CPP.accept, cases) == []


def state_of(batch: int, length: int, pos: Tensor, limit: Tensor, done: Tensor) -> DecodeState:
    return DecodeState(whole(9, batch, length), pos, pos + 100, done, limit, None, ())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_advance(dtype, size, batch):
    """Ends and limits before, inside, at the end of and behind the path, in rows that are done and that are not."""
    random.seed(size), torch.manual_seed(size)
    seen = {"ended": 0, "limited": 0, "done": 0, "whole": 0}
    for _ in range(4):
        for _ in range(20):
            tree = tree_of(batch, size)
            accepted = accept(tree, whole(3, batch, size), size)
            pos = whole(8, batch)
            limit, done = pos + 1 + whole(3 + (size < 3), batch), torch.rand(batch) < 0.3
            features = torch.randn(batch, size, 6).to(dtype)
            features[torch.rand(batch, size) < 0.1, 3] = float("inf")  # which `done` tells
            cycle = SimpleNamespace(
                drafter=SimpleNamespace(width=2, keeps_nodes=False),
                eos_tensor=torch.tensor([-1, *random.sample([0, 1, 2, 7], 2)]),
            )
            old = state_of(batch, 30, pos, limit, done)
            inputs = tree, accepted, features, cycle
            ours, theirs = (replace_fields(old, tokens=old.tokens.clone()) for _ in range(2))
            (ours, *rest), (theirs, *others) = (
                advance_fused(ours, *inputs),
                advance(theirs, *inputs),
            )
            assert torch.equal(rest[0].text.pos, others[0].text.pos)
            assert rest[0].text.tokens is ours.tokens and others[0].text.tokens is theirs.tokens
            rest[0], others[0] = (replace_fields(x[0], text=None) for x in (rest, others))
            assert_equal(rest, others)
            assert_equal(ours[1:5], theirs[1:5])
            assert torch.equal(ours.tokens[:, :-1], theirs.tokens[:, :-1]), (
                "the last column takes what is cut"
            )
            count = rest[0].count
            seen["done"] += int((done & (count == 0)).sum())
            seen["limited"] += int(
                (~done & (count < accepted.length + 1) & (ours.pos == limit)).sum()
            )
            seen["ended"] += int((~done & ours.done & (ours.pos < limit)).sum())
            seen["whole"] += int((~done & ~ours.done & (count == accepted.length + 1)).sum())
    assert min(seen.values()) > 1 or (size, seen["limited"]) == (1, 0), seen


def test_wrong_advances():
    state = state_of(2, 12, torch.tensor([3, 4]), torch.tensor([9, 9]), torch.zeros(2).bool())
    roots, path, length, emitted = (
        whole(9, 2, 4), torch.tensor([[0, 1, 3]] * 2), torch.tensor([2, 1]), whole(9, 2, 3),
    )  # fmt: skip
    names = (
        "tokens", "pos", "draws", "done", "limit", "roots", "path", "length", "emitted", "ends",
        "features",
    )  # fmt: skip
    good = (*state[:5], roots, path, length, emitted, torch.tensor([-1]), torch.zeros(2, 4, 6))
    assert CPP.advance(*good)[3].tolist() == [3, 2]
    wrong = {
        "tokens": [state.tokens[:1], state.tokens[:, :6], state.tokens.int()],
        "pos": [state.pos[:1], state.pos - 4, state.pos + 9, state.pos.int()],
        "draws": [state.draws[:1]],
        "done": [state.done[:1], state.done.int()],
        "limit": [state.limit[:1], state.limit.int()],
        "roots": [roots[:1], roots.int()],
        "path": [path + 1, path - 1, path[:1], path[:, :2], path.int()],
        "length": [length + 1, length - 2, length[:1], length.int()],
        "emitted": [emitted[:1], emitted[:, :2], emitted.int()],
        "ends": [torch.tensor([-1.0])],
        "features": [torch.zeros(1, 4, 6), torch.zeros(2, 3, 6), torch.zeros(2, 4)],
    }
    cases = {
        f"{name} {n}": tuple(value if name == own else x for own, x in zip(names, good))
        for name, values in wrong.items()
        for n, value in enumerate(values)
    }
    before = state.tokens.clone()
    assert not_refused(CPP.advance, cases) == []
    state.tokens.copy_(before)


def test_times_behind_a_report(plain):
    facts, times = whole(9, 3, 7), [5, 2**40, 2**62, -1]
    ours = timed_report(facts, times)
    assert_equal(ours, plain(timed_report, facts, times))
    assert ours.tolist() == [row + times for row in facts.tolist()]
    assert (
        not_refused(
            CPP.with_times, {"other facts": (facts.int(), times), "flat facts": (facts[0], times)}
        )
        == []
    )


# --------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("batch", [1, 3])
def test_places(plain, batch):
    torch.manual_seed(batch)
    pos = whole(40, batch)
    strided = whole(5, 7, batch).T
    for depths, slot, done in itertools.product(
        (0, 3, whole(5, batch, 7), strided, torch.tensor([2]).expand(batch, 7)),
        (0, 4),
        (None, torch.rand(batch) < 0.5),
    ):
        inputs = pos, depths, 7, slot, done
        assert_equal(place_tokens(*inputs), plain(place_tokens, *inputs))
    assert_equal(place_tokens(pos, 0, 1), plain(place_tokens, pos, 0, 1))
    for start in (pos, pos.repeat_interleave(2)[::2]):
        for rows in (1, 7):
            for back in (0, 1, 30):  # no slot is below 0
                assert_equal(
                    causal_window(start, rows, back), plain(causal_window, start, rows, back)
                )


def test_wrong_places():
    pos, depths, done = torch.tensor([3, 4]), whole(4, 2, 5), torch.zeros(2).bool()
    assert len(CPP.place_rows(pos, done, depths, 5, 0, 0)) == 3
    cases = {
        "few depths": (pos, done, depths[:1], 5, 0, 0), "narrow depths": (pos, done, depths[:, :4], 5, 0, 0),
        "flat depths": (pos, done, depths[0], 5, 0, 0), "other depths": (pos, done, depths.int(), 5, 0, 0),
        "few done": (pos, done[:1], depths, 5, 0, 0), "other done": (pos, done.int(), depths, 5, 0, 0),
        "other pos": (pos.int(), done, depths, 5, 0, 0), "no rows": (pos, done, None, -1, 0, 0),
    }  # fmt: skip
    assert not_refused(CPP.place_rows, cases) == []
    assert (
        not_refused(
            CPP.causal,
            {"other": (pos.int(), 3, 0), "none": (pos, -1, 0), "two dimensions": (depths, 3, 0)},
        )
        == []
    )


@pytest.mark.parametrize("rows", [1, 5, MAX_KEPT, MAX_KEPT + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_wait(plain, dtype, rows):
    torch.manual_seed(rows)
    for _ in range(10):
        facts, count = (whole(60, 3), whole(9, 3)), whole(rows + 1, 3)
        features = torch.randn(rows, 3, 6).to(dtype).transpose(0, 1)
        kept = torch.randn(3, MAX_KEPT + 1, 6).to(dtype)
        new = DrafterUpdate(whole(9, 3, rows + 1), features, count)
        idle = SimpleNamespace(lookup=RootOnly())
        ours, theirs = (
            call(Idle.extend, idle, DeferredState((), kept.clone(), *map(torch.clone, facts)), new)
            for call in (lambda f, *x: f(*x), plain)
        )
        assert_equal(ours[2:], theirs[2:])
        assert torch.equal(ours.features[:, :MAX_KEPT], theirs.features[:, :MAX_KEPT]), (
            "one place is spare"
        )


def test_wrong_rows_that_wait():
    kept, features, facts = (
        torch.zeros(2, 5, 6),
        torch.zeros(2, 3, 6),
        (torch.tensor([0, 3]), torch.zeros(2).long()),
    )
    count, waiting = facts
    passed = waiting.clone()
    cases = {
        "count 4": (kept, waiting, passed, features, count + 1), "count -1": (kept, waiting, passed, features, count - 1),
        "few counts": (kept, waiting, passed, features, count[:1]),
        "few waiting": (kept, waiting[:1], passed, features, count),
        "waiting -1": (kept, waiting - 1, passed, features, count),
        "waiting in pieces": (kept, torch.zeros(4).long()[::2], passed, features, count),
        "few passed": (kept, waiting, passed[:1], features, count),
        "few kept": (kept[:1], waiting, passed, features, count), "no place": (kept[:, :1], waiting, passed, features, count),
        "narrow": (kept, waiting, passed, features[..., :5], count),
        "other type": (kept, waiting, passed, features.bfloat16(), count),
        "other counts": (kept, waiting, passed, features, count.int()),
    }  # fmt: skip
    assert not_refused(CPP.keep_rows, cases) == []
    waiting, passed = torch.tensor([4, 0]), torch.zeros(2).long()
    CPP.keep_rows(kept, waiting, passed, features, count)
    assert (waiting.tolist(), passed.tolist()) == ([4, 3], [3, 3])


# ------------------------------------------------------------------------------------------- lookup


@pytest.mark.parametrize(
    "ngram", [Ngram(), Ngram(4, 3, 3, 2), Ngram(1, 1, 1, 1), Ngram(6, 5, 2, 1)], ids=str
)
@pytest.mark.parametrize("batch", [1, 3])
def test_lookup(plain, batch, ngram):
    """Also where the root is the first or the last token of the buffer, and on pools with and without candidates."""
    torch.manual_seed(batch)
    for vocab, size in itertools.product((1, 2, 5), (1, 2, 20)):
        for kept in (None, [-1, 0, 1, 0, -1], whole(vocab + 1, 40) - 1):
            if kept is not None:  # -1 is no token: padding, and behind each text
                row = torch.tensor([*kept, -1])
                kept = SimpleNamespace(tokens=row, searched=row)
            text = DecodedTokens(whole(vocab, batch, size), whole(size, batch))
            ngram = replace(ngram, kept=kept)
            chains, lengths = lookup(text, ngram)
            assert_equal((chains, lengths), plain(lookup, text, ngram))
            if kept is None:
                longest = match_lengths(text, ngram.max).amax(1)
                assert lengths[:, 0].tolist() == (longest * (longest >= ngram.min)).tolist()
            levels, _ = pool_of(batch, [3, 6], [2], True)
            distinct = Candidates.join(levels)
            distinct = replace_fields(
                distinct, tokens=torch.arange(9).expand(batch, 9).clone()
            )  # siblings differ
            for pool in (no_candidates(batch), distinct):
                assert_equal(ngram.add(pool, text), plain(ngram.add, pool, text))


@pytest.mark.parametrize("batch", [1, 3])
def test_what_became_of_lookups(plain, batch):
    """Pass by pass, by random outcomes, with a store and without one."""
    torch.manual_seed(batch)
    for vocab, size, (tokens, branches, longest) in itertools.product(
        (1, 2, 4), (3, 12, 40), ((1, 1, 1), (3, 4, 2), (10, 4, 6))
    ):
        for stored in (False, True):
            check_passes(
                plain, vocab, whole(vocab, batch, size), Ngram(tokens, branches, longest), stored
            )


def check_passes(plain, vocab: int, tokens: torch.Tensor, ngram: Ngram, stored: bool) -> None:
    """Both states start equal and stay so; some sequences decide nothing in a pass."""
    batch, size = tokens.shape
    drafters = []
    for _ in range(2):
        kept = KeptTexts(capacity=30) if stored else None
        drafters.append(NgramDrafter(replace(ngram, kept=kept), sizes=(2, 4, 99)))
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
        states[1] = plain(drafters[1].extend, states[1], confirmed)
        for name, own, reference in zip(mine._fields, mine, states[1]):
            if stored and name in ("tokens", "parents"):  # of candidates; others differ by padding
                own, reference = (x[mine.values > -INF] for x in (own, reference))
            assert torch.allclose(own, reference), name
        if stored:
            text = whole(vocab, 9).tolist()
            for drafter in drafters:
                drafter.kept.add(text)


def test_wrong_lookups():
    text, pos = whole(5, 2, 8), torch.tensor([3, 7])
    good = (
        torch.zeros(2, 4).long(), torch.zeros(2, 4), torch.full((2, 4), -1), whole(5, 2, 2, 3),
        torch.ones(2, 2).long(),
    )  # fmt: skip
    texts = {
        "root 8": (text, pos + 1), "root -1": (text, pos - 4), "few roots": (text, pos[:1]), "few texts": (text[:1], pos),
        "other roots": (text, pos.int()), "other text": (text.int(), pos), "flat": (text[0], pos),
    }  # fmt: skip
    kept = torch.tensor([1, -1])
    cases = {name: (*case, kept, 3, 2, 1, 3) for name, case in texts.items()}
    cases |= {
        "no tokens": (text, pos, kept, -1, 2, 1, 3), "no chains": (text, pos, kept, 3, -1, 1, 3),
        "no match": (text, pos, kept, 3, 2, 0, 3), "no longest": (text, pos, kept, 3, 2, 2, 1),
        "no end": (text, pos, kept[:1], 3, 2, 1, 3), "rows": (text, pos, kept[None], 3, 2, 1, 3),
        "other texts": (text, pos, kept.int(), 3, 2, 1, 3),
    }  # fmt: skip
    assert not_refused(CPP.lookup, cases) == []
    assert CPP.add_chains(*good)[0].shape == (2, 10)
    wrong = [good[0][:1], good[0].int()], [good[1][:, :3], good[1].double()], [good[2][:1]], [good[3][0], good[3][:1]], [
        good[4][:1], good[4].int()
    ]  # fmt: skip
    cases = {
        f"operand {n}, {m}": tuple(value if n == own else x for own, x in enumerate(good))
        for n, values in enumerate(wrong)
        for m, value in enumerate(values)
    }
    assert not_refused(CPP.add_chains, cases) == []
    state = {
        "tokens": torch.zeros(2, 9).long(), "values": torch.zeros(2, 9), "parents": torch.zeros(2, 9).long(),
        "lengths": torch.zeros(2, 3).long(), "root": torch.full((2,), -1), "outcomes": torch.ones(2, 4, 3, DEPTHS, 2),
        "expected": torch.zeros(2, 2),
    }  # fmt: skip
    good = {"text": text, "pos": pos, "kept": kept} | state

    def operands(**changed) -> tuple:
        return (*(good | changed).values(), 1, 2, (1, 2))

    cases = {name: operands(text=case[0], pos=case[1]) for name, case in texts.items()}
    for name, value in state.items():
        cases[f"few {name}"] = operands(**{name: value[:1]})
        cases[f"other {name}"] = operands(**{name: value.to(torch.half)})
        if value.dim() > 1:
            cases[f"flat {name}"] = operands(**{name: value.flatten()})
    cases["no end"] = operands(kept=kept[:1])
    cases["other kept"] = operands(kept=kept.int())
    cases["no match"] = (*operands()[:-3], 0, 2, (1, 2))
    assert {len(case) for case in cases.values()} == {13}, "none is refused for its number"
    assert not_refused(CPP.look_up, cases) == []
    CPP.look_up(*operands())


def test_what_the_compiler_is_told():
    """Shapes, types and what is written, of every operator that a step may be traced with."""
    torch.manual_seed(0)
    levels, ran = pool_of(2, [3, 6], [2], False)
    columns, text = [list(column) for column in zip(*levels)], text_of(2)
    front = front_of(2, 2, 4)
    cases = {
        "next_level": (torch.randn(2, 2, 9), 1.0, None, torch.randn(2, 3, 9), 1, torch.ones(2), *front.for_cpp(),
                       None, 3, 2, (4, 2, 4), True),
        "gumbel": (whole(9, 2, 2), *text[1:], text[1], torch.tensor([True, False]), text[1], 3, 9, 0),
        "cut": (torch.randn(2, 3, 9), torch.ones(2), torch.tensor([0, 2]), torch.tensor([0.5, 1.0]), torch.tensor([0.0, 2.0])),
        "rerank": (*columns, ran, None, 4, *text),
        "place_rows": (text.pos, None, whole(3, 2, 4), 4, 0, 0),
        "causal": (text.pos, 3, 1),
        "keep_rows": (torch.zeros(2, 5, 6), torch.tensor([0, 9]), text.pos, torch.randn(2, 3, 6), torch.tensor([1, 3])),
        "lookup": (*text, torch.tensor([1, -1]), 3, 2, 1, 3),
        "look_up": (
            *text, torch.tensor([1, -1]), torch.zeros(2, 9).long(), torch.zeros(2, 9), torch.zeros(2, 9).long(),
            torch.zeros(2, 3).long(), torch.full((2,), -1), torch.ones(2, 4, 3, DEPTHS, 2), torch.zeros(2, 2), 1, 2, (1, 2),
        ),
        "add_chains": (*Candidates.join(levels), whole(9, 2, 2, 3), torch.ones(2, 2).long()),
    }  # fmt: skip
    for name, operands in cases.items():
        operator = getattr(CPP, name).default
        torch.library.opcheck(operator, operands, test_utils=("test_schema", "test_faketensor"))
    assert Accepted._fields == ("path", "length", "emitted", "moves")
