"""Trees by value: which nodes pay on simulated machines, costs that are kept, and that no choice changes a token."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draft_tree import DynamicTree
from drafters import RootOnly
from drafts import by_value
from drafts.by_value import (
    HIT,
    REST,
    TRIALS,
    Acceptance,
    ByValue,
    Costs,
    Pace,
    beside,
    trained_alpha,
)
from drafts.model_draft import ModelDrafter
from drafts.ngram_draft import Ngram, NgramDrafter
from eagle_draft import EagleDrafter
from helpers import (
    PROMPTS,
    Scripted,
    decode,
    engine_for,
    golden_head,
    golden_target,
    noisy_copy,
    pairwise,
)
from run.load import load
from run.options import DEMO
from run.session import Session
from run.stats import summary
from run.warm_up import CycleTimes, time_cycle

LARGEST = DynamicTree(depth=4, topk=5, size=20)
# of heads of versions 1 and 2, and of version 3
TARGETS = ("models/target_llama_mha", "models/target_llama31_gqa8")
HEADS = ("models/head_eagle12_mha", "models/head_eagle3")


def drafter_of(kind: str, lookup=None, grows: bool = True):
    third = kind == "eagle 3"
    target = golden_target(TARGETS[third])
    if kind == "model":
        return beside(ModelDrafter(noisy_copy(target, 0.02), target, LARGEST), grows=grows)
    drafter = EagleDrafter(golden_head(HEADS[third], target), target, LARGEST)
    return beside(drafter, lookup, grows)


def priced(engine, **seconds):
    """The engine with a policy that knows these costs: of a row beyond the first, of a level, and of the rest."""
    cost = {"row": 0.1, "level": 0.1, "rest": 0.1, "pass": 1.0} | seconds
    rows = (1, 64 * engine.batch_size)
    measured = {
        "verify": [(n, cost["pass"] + cost["row"] * (n - 1)) for n in rows],
        "level": [(1, cost["level"])],
        "rest": [1e-6] + [cost["rest"] or 1e-6] * (len(engine.presets) - 1),
    }
    policy = engine.policy.on_engine_ready(replace_accept(engine), None)
    policy.engine = engine
    policy.costs = Costs(measured, engine.presets, engine.batch_size)
    policy.acceptance = Acceptance([HIT])
    if policy.growth:
        policy.growth.costs, policy.growth.acceptance = policy.costs, policy.acceptance
    return replace(engine, policy=policy)


def replace_accept(engine):
    """An engine of whose presets nothing is measured."""
    return SimpleNamespace(config=SimpleNamespace(accept="residual"))


# ------------------------------------------------------------------------------------------ growth

ROOMS = {  # costs in passes of one row; levels and nodes that then pay for a head that is right in 3 of 4
    "all is free": ({"row": 0.0, "level": 0.0, "rest": 0.0}, (4, 19)),
    "rows cost as much as a pass": ({"row": 1.0}, (0, 0)),
    "a level costs as much as a pass": ({"row": 0.0, "level": 1.0}, (1, 5)),
}


class Sure:
    """Growth as `TreeDrafter` drives it, on the values of a head whose best children have these confidences."""

    def __init__(self, growth, confidence: float):
        self.growth, self.confidence = growth, confidence

    def grow(self, batch: int = 1) -> tuple[int, int]:
        """Returns: levels that were drafted, nodes that were chosen."""
        text = SimpleNamespace(pos=torch.zeros(batch, dtype=torch.long))
        growth = self.growth
        growth.begin(SimpleNamespace(noise=None, text=text), None)
        k = growth.tree.topk
        others = (1 - self.confidence) / k / 10
        shares = torch.tensor([self.confidence] + [others] * (k - 1)).log()
        above, levels = torch.zeros(batch, 1), 0
        while levels < growth.tree.depth:
            levels += 1
            values = (above[:, :, None] + shares).flatten(1)  # [B, X]
            order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
            if levels == growth.tree.depth:
                order = order[:, :0]
            best = values.gather(1, order)
            seen = best[:, :, None] > 0
            frontier = by_value.Frontier(order, order, order, best, seen)
            frontier = growth.cut(SimpleNamespace(values=values), frontier)
            if frontier is None:
                break
            above = frontier.values
        return levels, growth.count()


@pytest.mark.parametrize("room", ROOMS)
def test_what_pays_is_drafted_and_verified(room):
    seconds, (levels, nodes) = ROOMS[room]
    engine = priced(engine_for(golden_target(), drafter_of("eagle")), **seconds)
    growth = engine.policy.growth
    growth.rate, growth.live = 1.0, [True]
    drafted, chosen = Sure(growth, 0.75).grow()
    assert chosen == nodes and (drafted == max(levels, 1) or nodes == 0)


# -------------------------------------------------------------------------------------- acceptance


def test_acceptance_begins_with_the_record_and_follows_the_text():
    acceptance = Acceptance([0.8, 0.5])
    assert acceptance.rate(0, 0) == 0.8 and acceptance.rate(7, 0) == 0.5
    ranks = [acceptance.rate(0, rank) for rank in range(4)]
    assert ranks == sorted(ranks, reverse=True) and sum(ranks) < 1
    log = math.log
    for _ in range(
        300
    ):  # a head that is sure, and right half the time: at depth 0 by its second child
        for path in ([0, 1], [0, 2]):
            acceptance.learn([0, 0, 0], [True] * 3, [0.0, log(0.9), log(0.05)], path)
    assert acceptance.rate(0, 0) == pytest.approx(0.5, abs=0.05)
    assert acceptance.corrections[0][0] == pytest.approx(0.5 / 0.9, abs=0.05)
    assert acceptance.corrections[0][1] > 5 and acceptance.rate(1, 0) == 0.5
    tree = SimpleNamespace(paths=((0,), (1,), (0, 0)))
    expected = acceptance.rate(0, 0) * (1 + acceptance.rate(1, 0)) + acceptance.rate(0, 1)
    assert acceptance.expected(tree) == pytest.approx(expected)


def test_records_of_training(tmp_path):
    def alpha(value) -> list[float]:
        (tmp_path / "training.json").write_text(json.dumps(value))
        return trained_alpha(str(tmp_path))

    curve = {"stages": [{"curve": [{"alpha": [0.1]}, {"alpha": [0.8, 0.5, 0.25], "tau": 2.3}]}]}
    assert alpha(curve) == alpha(curve["stages"][0]) == [0.8, 0.5, 0.25]
    assert alpha(curve["stages"][0] | {"best": {"alpha": [0.5]}}) == [0.5]
    for wrong in ([], None, 3, "ab", ["a"], [[1]], [math.nan], [2.0], [-1.0], {"a": 1}):
        assert alpha({"stages": [{"curve": [{"alpha": wrong}]}]}) == [HIT], wrong
    for other in ([], {}, {"stages": []}, {"stages": [{}]}, {"stages": {"a": 1}}, 3, None):
        assert alpha(other) == [HIT]
    (tmp_path / "training.json").write_bytes(b"\xff{")
    assert trained_alpha(str(tmp_path)) == trained_alpha("") == [HIT]


# ------------------------------------------------------------------------------------------- costs


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """The folder where costs are kept."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpt-eagle" / "trees"


def presets(*sizes: int) -> list:
    return [SimpleNamespace(size=size) for size in sizes]


def test_costs_are_measured_once(trees, monkeypatch):
    """The second engine reads the file; one with a file that is no such thing measures anew."""
    measured = []

    def measure(engine, *rest):
        measured.append(engine)
        costs = {
            "verify": [[1, 1.0], [4, 2.0]],
            "level": [[1, 0.1]],
            "rest": [0.1] * len(engine.presets),
        }
        return costs, len(measured) > 1

    monkeypatch.setattr(by_value, "measure", measure)
    load(checkpoint=DEMO, device="cpu")
    assert not [*trees.glob("*.json")], "other programs took a part of the time"
    for _ in range(2):
        costs = load(checkpoint=DEMO, device="cpu").policy.costs
    (file,) = trees.glob("*.json")
    assert len(measured) == 2 and costs.verify[2] == pytest.approx(4 / 3)
    for number, bad in enumerate(
        (b"", b"[", b"3", b"{}", b'{"verify": 1}', file.read_bytes()[:40]), 3
    ):
        file.write_bytes(bad)
        load(checkpoint=DEMO, device="cpu")
        assert len(measured) == number and json.loads(file.read_text())
    for options in (
        {"quant_draft": "int4"},
        {"batch_size": 2},
        {"temperature": 0.5},
        {"draft": "ngram"},
    ):
        load(checkpoint=DEMO, device="cpu", **options)
    assert len(list(trees.glob("*.json"))) == 5


def test_costs_between_and_behind_measurements():
    costs = Costs(
        {"verify": [[1, 2.0], [4, 1.9], [8, 4.0]], "level": [[1, 0.1]], "rest": [0.1]},
        presets(12),
        1,
    )
    assert costs.verify[1] == costs.verify[4] == 2.0, "more rows take no less"
    assert costs.verify[6] == 3.0 and costs.verify[12] == 6.0
    for _ in range(200):  # cycles with a tree, and fewer without one, on a machine half as fast
        costs.learn(True, 3.0)
        costs.learn(False, 2.0)
    assert costs.factor == pytest.approx(1.0), "an outlier counts as twice"
    for _ in range(200):
        costs.learn(True, 1.0)
    assert costs.factor == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("batch", [1, 3])
def test_measuring_finds_the_parts_of_a_cycle(batch):
    """A machine whose cycle takes 1 s, 0.1 for every row, 0.2 for a level behind the first, and 0.5 for a draft."""
    engine = engine_for(golden_target(), drafter_of("eagle"), batch_size=batch)
    growth = engine.policy.growth

    def times(preset: int, sequences: int = 0) -> CycleTimes:
        rows, draft = (sequences or batch), 0.0
        if preset:
            levels, _, growth.nodes = growth.forced
            rows *= 1 + growth.nodes
            draft = 0.5 + 0.2 * (levels - 1)
        return CycleTimes(1 + 0.1 * rows + draft, draft, 1 + 0.1 * rows)

    measured, steady = by_value.measure(engine, times, growth)
    costs = Costs(measured, engine.presets, batch)
    assert steady
    assert costs.rest == pytest.approx([0, 0.5], abs=1e-5)
    assert costs.verify[20] == pytest.approx(3.0)
    assert costs.level[1] == pytest.approx(0.2)
    assert growth.forced is None
    slower = itertools.count(1)
    assert not by_value.measure(
        engine, lambda *of: times(*of)._replace(seconds=next(slower)), growth
    )[1]


def test_cycles_are_timed_with_rows_that_decode():
    engine = engine_for(golden_target(), drafter_of("eagle"), max_new_tokens=80)
    for preset in range(2):
        times = time_cycle(engine, preset)
        assert 0 < times.verify_s < times.seconds


# ------------------------------------------------------------------------------------------ policy


@pytest.mark.parametrize("lookup", [None, NgramDrafter(Ngram(4, 2))])
def test_where_no_tree_pays_trials_are_rare(lookup):
    """Rows that cost as much as passes, and a head that reads as long as a pass takes."""
    options = {"max_new_tokens": 400, "ignore_eos": True}
    drafter = drafter_of("eagle", lookup)
    engine = priced(engine_for(golden_target(), drafter, **options), row=1.0, rest=1.0)
    engine.policy.after_cycle = lambda *args: None  # whatever this machine's clock says
    session = decode(engine, PROMPTS[0])
    last = len(engine.presets) - 1
    tried = sum(preset == last for preset, _ in session.stats.presets)
    cycles = len(session.stats.presets)
    assert tried == TRIALS * (1 + cycles // (REST + TRIALS))


@pytest.mark.parametrize("grows", [False, True])
def test_where_trees_are_free_they_run(grows):
    options = {"max_new_tokens": 40, "ignore_eos": True}
    drafter = drafter_of("eagle", grows=grows)
    engine = priced(engine_for(golden_target(), drafter, **options), row=0.0, level=0.0, rest=0.0)
    engine.policy.after_cycle = lambda *args: None
    engine.policy.paces[1] = Pace(16.0, 16.0, gain=1.0)  # as the first trees have shown
    session = decode(engine, PROMPTS[0])
    assert {preset for preset, _ in session.stats.presets} == {len(engine.presets) - 1}


def test_by_default_a_head_is_sized_and_says_so():
    engine = load(checkpoint=DEMO, max_new_tokens=64, device="cpu")
    assert engine.config.tree == "" and engine.resolved["tree"] == "auto"
    for _ in range(2):  # the second run counts its own cycles only
        session = Session(engine, [(0, 0)])
        list(session.decode_turn([engine.tokenizer.encode("def read_lines(path):", bos=True)]))
        stats = summary(engine, session.stats)
        rows = stats["tree_auto"]
        assert [row["tree"] for row in rows] == engine.resolved["trees"]
        assert sum(row["cycles"] for row in rows) == stats["cycles"]
        assert all(row["predicted_ms"] > 0 for row in rows)
        assert all((row["measured_ms"] is None) == (row["cycles"] == 0) for row in rows)


# ------------------------------------------------------------------------------------------ tokens


class Script(Scripted):
    """Presets in a given order, over and over; learns nothing."""

    def __init__(self, order: list[int]):
        super().__init__()
        self.order, self.ran, self.every = itertools.cycle(order), [], []

    def pick(self, limit: int) -> int:
        self.ran.append(min(next(self.order), limit))
        self.every.append(self.expected)
        return self.ran[-1]


@pairwise(
    kind=["eagle", "eagle 3", "model"], temperature=[0.0, 1.0], batch=[1, 3], grows=[False, True],
    row=[0.0, 0.2, 1.0], children=["noise", "topk"],
)  # fmt: skip
def test_trees_by_value_change_no_token(kind, temperature, batch, grows, row, children):
    """Over several turns, with trees of every size, and rests."""
    options = {"max_new_tokens": 40, "batch_size": batch, "temperature": temperature, "seed": 3}
    options |= {"ignore_eos": True}
    target = golden_target(TARGETS[kind == "eagle 3"])
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
    drafter = drafter_of(kind, grows=grows)
    for preset in drafter.presets:
        if hasattr(preset.grower, "children"):
            preset.grower.children = children
    plain = decode(engine_for(target, RootOnly(), **options), *prompts)
    engine = priced(engine_for(target, drafter, **options), row=row)
    session = decode(engine, *prompts)
    assert session.history == plain.history
    sizes = {len(line["parents"]) for line in session.trace}
    assert sizes and (row or max(sizes) > 0)


@pytest.mark.parametrize("rest", [30, REST])
@pytest.mark.parametrize("kind", ["eagle", "eagle 3", "model"])
def test_a_drafter_reads_what_it_missed(kind, rest):
    """After a rest its cache is that of one that has read all."""
    target = golden_target(TARGETS[kind == "eagle 3"])
    engine = engine_for(target, drafter_of(kind), max_new_tokens=120, ignore_eos=True)
    session = Session(replace(engine, policy=Script([0] * rest + [1])), [(0, 0)])
    decoding = session.decode_turn([PROMPTS[0]])
    for _ in range(rest + 3):
        next(decoding)
    length = int(session.state.drafter_state.own.length[0])
    other = Session(replace(engine, policy=Script([1])), [(0, 0)])
    next(other.decode_turn([session.history[0][: length + 1]]))
    caches = [s.state.drafter_state.own.cache.k[0][0, :, : length - 1] for s in (session, other)]
    assert length > len(PROMPTS[0]) + rest
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)


def test_a_prompt_that_is_being_read_was_not_missed():
    """A drafter wakes between the chunks of another sequence's prompt: it reads them once."""
    engine = engine_for(golden_target(), drafter_of("eagle"), batch_size=2, ignore_eos=True)
    session = Session(replace(engine, policy=Script([0] * 6 + [1, 1])), [(0, 0), (1, 0)])
    session.admit(0, PROMPTS[0])
    for _ in range(6):  # reads the prompt, then rests
        session.step()
    prompt = PROMPTS[1] * 30  # two chunks
    session.admit(1, prompt)
    for _ in range(3):
        session.step()
    assert session.live[1] and session.state.drafter_state.own.length[1] >= len(prompt)
    for history, length in zip(session.history, session.state.drafter_state.own.length):
        assert len(history) - 2 <= length < len(history)


def test_no_clock_decides_without_costs():
    """With several ranks, and under the residual rule, the largest preset of which something is expected runs."""
    policy = ByValue(NgramDrafter(Ngram()))
    for expected, limit, want in (
        (None, 4, 4),
        ([0, 0, 0.5, 0, 0], 4, 2),
        ([0] * 5, 4, 0),
        ([0, 1, 1, 1, 1], 2, 2),
    ):
        policy.expected = expected
        assert policy.pick(limit) == want
