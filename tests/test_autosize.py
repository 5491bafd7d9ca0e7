"""Which tree runs: choices on simulated machines, and that switching between trees, idling included, changes no token
and compiles nothing anew."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from decode import PREFILL_CHUNK, Cycle, Engine, Session
from draft_tree import DraftTree, DynamicTree
from drafters import RootOnly
from eagle_draft import EagleDrafter
from extras.autosize import HOLD, MISS, Autosizer, TreeShape, accepted_of, shape_of, with_smaller_trees
from extras.deferred import ROOM
from extras.model_draft import ModelDrafter
from extras.ngram_draft import Ngram, NgramDrafter
from generate import TIMED_BEHIND, load, summary, time_cycles, warm_up
from helpers import decode, engine_for, golden_head, golden_target, noisy_copy, record
from options import DEMO
from sampling import Sampling

PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
LARGEST = DynamicTree(depth=4, topk=5, size=20)


TARGETS = ("models/target_llama_mha", "models/target_llama31_gqa8")  # of heads of versions 1 and 2, and of version 3


def drafter_of(kind: str, rule: Sampling, largest: DynamicTree = LARGEST, noise: float = 0.02):
    target = golden_target(TARGETS[kind == "eagle 3"])
    if kind == "model":
        return with_smaller_trees(ModelDrafter(noisy_copy(target, noise), target, largest, rule), target)
    head = golden_head("models/head_eagle3" if kind == "eagle 3" else "models/head_eagle12_mha", target)
    return with_smaller_trees(EagleDrafter(head, target, largest, rule), target)


# ------------------------------------------------------------------------------------ simulated machines

SHAPES = [TreeShape(0, 0, 1), TreeShape(3, 1, 4), TreeShape(6, 1, 7), TreeShape(5, 4, 16), TreeShape(6, 10, 60)]
MACHINES = {  # seconds of a cycle, mean accepted tokens
    "verification is free": ([1.0, 1.1, 1.2, 1.25, 1.4], [0, 2.0, 2.8, 3.4, 4.4]),
    "every node costs": ([1.0, 1.4, 2.0, 3.5, 8.0], [0, 2.0, 2.8, 3.4, 4.4]),
    "a slow draft": ([1.0, 2.2, 3.9, 4.1, 5.0], [0, 1.0, 1.2, 1.6, 2.0]),
    "a head that loses": ([1.0, 1.35, 1.6, 2.0, 4.5], [0, 0.25, 0.3, 0.5, 0.7]),
    "a broken head": ([1.0, 1.3, 1.6, 2.0, 3.3], [0, 0.01, 0.01, 0.02, 0.05]),
}


def run_machine(name: str, cycles: int, pace=lambda i: 1.0, noise=0.1, shapes=SHAPES, errors=(1.0,) * 5):
    """Let a sizer decode on a machine with noise. errors: of the costs as timed before the first prompt, factors

    Returns: tokens per second, relative to every preset alone; the sizer
    """
    rng = random.Random(0)
    costs, means = MACHINES[name]
    sizer = Autosizer(shapes, [cost * error for cost, error in zip(costs, errors)])
    tokens = seconds = 0.0
    for i in range(cycles):
        preset = sizer.next(len(costs) - 1)
        accepted = sum(rng.random() < means[preset] / 6 for _ in range(6))
        spent = costs[preset] * pace(i) * (1 + noise * rng.random() + 3 * (rng.random() < 0.02))
        sizer.observe(preset, accepted, spent)
        tokens, seconds = tokens + accepted + 1, seconds + spent
    average = (1 + noise / 2 + 0.06) * sum(map(pace, range(cycles))) / cycles
    return [tokens / seconds / ((1 + m) / c / average) for c, m in zip(costs, means)], sizer


@pytest.mark.parametrize("shapes", [SHAPES, [None] * len(SHAPES)], ids=["trees", "without a shape"])
@pytest.mark.parametrize("name", MACHINES)
def test_it_finds_the_fastest_preset(name, shapes):
    shares, sizer = run_machine(name, 3000, shapes=shapes)
    assert min(shares) > 0.95, shares
    costs, means = MACHINES[name]
    best = max(range(len(costs)), key=lambda p: (1 + means[p]) / costs[p])
    assert (1 + means[sizer.best]) / costs[sizer.best] > 0.97 * (1 + means[best]) / costs[best]


@pytest.mark.parametrize(
    "measured",  # chain 3, chain 5, 5/4/16, 6/8/32, 6/10/60 of the trained head (benchmarks/LOG.md)
    [(3.20, 4.30, 5.06, 5.95, 6.28), (3.35, 4.62, 5.35, 6.27, 6.46), (2.37, 2.64, 3.61, 4.22, 4.57)],
    ids=["stand-in", "demo", "sampled"],
)
def test_what_larger_trees_bring_is_guessed_from_a_chain(measured):
    shapes = [(3, 1, 4), (5, 1, 6), (5, 4, 16), (6, 8, 32), (6, 10, 60)]
    miss = min((m / 1000 for m in range(1001)), key=lambda m: abs(accepted_of(TreeShape(5, 1, 6), m) - measured[1] + 1))
    guessed = [1 + accepted_of(TreeShape(*shape), miss) for shape in shapes]
    assert guessed == pytest.approx(measured, rel=0.08)
    assert accepted_of(TreeShape(0, 0, 1), miss) == 0


@pytest.mark.parametrize("name", MACHINES)
def test_what_runs_before_anything_is_known(name):
    """Once, vanilla for a few cycles: the pace that others are measured by. Then that is best which would be good if
    the head were as heads are."""
    costs, _ = MACHINES[name]
    sizer = Autosizer(SHAPES, costs)
    usual = [(1 + accepted_of(shape, MISS)) / cost for shape, cost in zip(SHAPES, costs)]
    best = usual.index(max(usual))
    for _ in range(HOLD):
        assert sizer.next(4) == 0
        sizer.observe(0, 0.0, costs[0])
    assert sizer.next(4) == best
    assert best > 0 or name == "a slow draft"


def test_a_broken_head_is_left_alone_within_a_few_cycles():
    _, sizer = run_machine("a broken head", 40)
    assert sizer.best == 0
    shares, sizer = run_machine("a broken head", 1000)
    assert sizer.best == 0
    assert shares[0] > 0.95, "vanilla"


def test_a_cycle_without_a_tree_was_timed_too_slow():
    """As on SmolLM2, when the machine's memory got faster after loading: drafting went on at a loss of a quarter."""
    shares, sizer = run_machine("a head that loses", 600, errors=(1.4, 1.2, 1.1, 1.0, 1.0))
    assert shares[0] > 0.9, shares


def test_a_machine_that_slows_down_changes_nothing():
    _, steady = run_machine("every node costs", 2000, noise=0.0)
    _, drifting = run_machine("every node costs", 2000, pace=lambda i: 1 + (i // 300) % 3, noise=0.0)
    assert steady.best == drifting.best
    assert drifting.costs == pytest.approx(steady.costs, rel=0.3)


@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_timed_in_another_mood_of_the_machine(factor):
    """What all presets have in common is no news of the one that happens to run: a broken head still ends at once."""
    costs, means = MACHINES["a broken head"]
    sizer, rng, trees = Autosizer(SHAPES, [factor * cost for cost in costs]), random.Random(0), 0
    for _ in range(60):
        preset = sizer.next(4)
        accepted = int(rng.random() < means[preset])
        sizer.observe(preset, accepted, costs[preset] * (1 + 0.05 * rng.random()))
        trees += preset > 0
    assert sizer.best == 0 and trees < 20  # of 60, probes included
    ratios = [estimate / cost for estimate, cost in zip(sizer.costs, costs)]
    assert max(ratios) < 1.05 * min(ratios)


def test_it_follows_the_text():
    """A head that is useless at first and good later is used later, within some hundred cycles."""
    sizer, rng = Autosizer(SHAPES, MACHINES["verification is free"][0]), random.Random(0)
    for i in range(1500):
        preset = sizer.next(4)
        accepted = 0 if i < 1000 or preset == 0 else rng.choice((2, 3))
        sizer.observe(preset, accepted, MACHINES["verification is free"][0][preset])
        if i == 999:
            assert sizer.best == 0
    assert sizer.best > 0


def test_only_what_makes_sense_is_run():
    """With `limit` 0 the root alone is verified, and no probe is spent on it."""
    sizer = Autosizer([TreeShape(0, 0, 1), None], [1.0, 1.2])
    assert [sizer.next(0) for _ in range(20)] == [0] * 20
    assert [sizer.next(1) for _ in range(HOLD + 1)] == [0] * HOLD + [1]
    for limit in (0, 1) * 10:  # where a tree makes sense again, it runs at once
        preset = sizer.next(limit)
        sizer.observe(preset, 4.0 * preset, [1.0, 1.2][preset])
        assert preset == limit


def test_cycles_without_a_choice_are_learned_from():
    sizer = Autosizer([TreeShape(0, 0, 1), None], [1.0, 1.2])
    for _ in range(1000):
        assert sizer.next(0) == 0
        sizer.observe(0, 0.0, 3.0)
    assert sizer.pace == pytest.approx(3, rel=0.01)


def test_shapes():
    drafter = drafter_of("eagle", Sampling(), DynamicTree())
    shapes = [tuple(shape_of(preset)) for preset in drafter.presets]
    assert shapes == [(0, 0, 1), (3, 1, 4), (5, 3, 8), (5, 4, 16), (6, 8, 32), (6, 10, 60)]
    assert [shape_of(preset) for preset in NgramDrafter(Ngram()).presets] == [TreeShape(0, 0, 1), None]


# ------------------------------------------------------------------------------- switching between trees


class Script:
    """Presets in a given order, over and over; learns nothing."""

    reader = -1

    def __init__(self, order: list[int]):
        self.order, self.ran = itertools.cycle(order), []

    def next(self, limit: int) -> int:
        self.ran.append(min(next(self.order), limit))
        return self.ran[-1]

    def observe(self, *args) -> None:
        pass


ORDERS = {"mixed": [2, 0, 1, 0, 0, 2, 1], "long rests": [2] + [0] * 35 + [1] + [0] * 5}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_switching_changes_no_token(kind, temperature, batch, captured, order):
    options = {"max_new_tokens": 80, "ignore_eos": True, "batch_size": batch, "temperature": temperature, "seed": 3}
    plain = decode(engine_for(golden_target(), RootOnly(), **options), *PROMPTS[:batch])
    engine = engine_for(golden_target(), drafter_of(kind, Sampling(temperature)), **options)
    assert [p.name for p in engine.drafter.presets] == ["none", "chain 3", "dynamic 4/5/20"]
    for lag in (0, 1):
        script = Script(ORDERS[order])
        session = Session(replace(engine, chooser=script, captured=captured), [(i, 0) for i in range(batch)], lag)
        list(session.run(PROMPTS[:batch]))
        assert session.history == plain.history
        assert set(script.ran) == {0, 1, 2}
        again = [h[:20] for h in session.history]  # a second turn over the same buffers
        list(session.run(again))
        assert [h[:20] for h in session.history] == again


def test_cycles_are_timed_with_rows_that_decode(monkeypatch):
    """Rows that are done would see no text, and trees would seem cheaper than they are."""
    engine, seen = engine_for(golden_target(), drafter_of("eagle", Sampling()), max_new_tokens=80), []
    session_rows = []  # of the head
    launch = Session._launch

    def launched(session, preset):
        seen.append((bool(session.state.done.any()), int(session.state.pos.min())))
        session_rows.append(session.state.draft.own.length.min())
        return launch(session, preset)

    monkeypatch.setattr(Session, "_launch", launched)
    assert len(time_cycles(engine)) == 3 and len(seen) >= 12
    assert int(session_rows[0]) == seen[0][1]
    assert not any(done for done, _ in seen[:3]) and seen[0][1] == min(TIMED_BEHIND, engine.context // 2) > 0


def next_tree(engine: Engine, session: Session) -> DraftTree:
    """What the drafter would propose now, with its largest tree."""
    session.work.take_in(engine, -1)
    tree, _ = Cycle(engine, engine.drafter.presets[-1]).draft(session.state)
    return tree


REST = [[0], [0] * 5, [2, 2, 0, 0, 0], [1] * 3 + [0] * ROOM, [0, 0, 2]]


@pytest.mark.parametrize("kind", ["eagle", "eagle 3", "model"])
@pytest.mark.parametrize("order", [*REST, [0] * 70], ids=str)
def test_while_idle_no_row_is_lost(kind, order):
    """The tree drafted after cycles without one is that of a session which has just read the whole text: in a row that
    was there from the start, in one that came later, and in the next turn. A head has room for some cycles only."""
    if kind != "model" and order not in REST:
        return
    drafter = drafter_of(kind, Sampling(), noise=1e-4)  # a draft model whose last node is often accepted
    options = {"max_new_tokens": 400, "ignore_eos": True, "batch_size": 2}
    engine = engine_for(golden_target(TARGETS[kind == "eagle 3"]), drafter, **options)
    session = Session(replace(engine, chooser=Script(order)), [(0, 0)])
    session.admit(0, PROMPTS[0])
    while len(session.stats.presets) < len(order):
        session.step()
        if len(session.stats.presets) == 1 and not session.busy(1):
            session.admit(1, PROMPTS[1], (1, 0))
    assert [preset for preset, _ in session.stats.presets] == order
    assert session.state.draft.count.max() <= ROOM and (session.work.waits > 0) == (order[-1] == 0 and len(order) > 1)
    for added in ([], [3, 4, 5]):
        if added:
            next(session.run([history + added for history in session.history]))
        if not all(session.live):  # the second row's prompt came last
            session.step()
        fresh = Session(engine)
        next(fresh.run([history[:-1] for history in session.history]))
        assert fresh.history == session.history
        tree, want = next_tree(engine, session), next_tree(engine, fresh)
        assert torch.equal(tree.tokens, want.tokens) and torch.equal(tree.parents, want.parents)
        torch.testing.assert_close(tree.values, want.values, rtol=1e-4, atol=1e-4)


def test_after_a_long_rest_a_head_reads_the_last_rows(monkeypatch):
    """Also in a row that was done before."""
    target = golden_target(TARGETS[1])
    engine = engine_for(target, drafter_of("eagle 3", Sampling()), max_new_tokens=80, ignore_eos=True, batch_size=2)
    session = Session(replace(engine, chooser=Script([0])))
    session.admit(0, PROMPTS[0], most=ROOM + 5)
    session.admit(1, PROMPTS[1])
    while len(session.stats.presets) < 2 * ROOM + 5:
        session.step()
    calls = record(monkeypatch, EagleDrafter, "extend")
    session.work.take_in(engine, -1)
    ((_, _, rows),) = [call.args for call in calls]
    assert rows.count.tolist() == [ROOM, ROOM] and session.live == [False, True]
    for row, history in enumerate(torch.tensor([ids]) for ids in session.history):
        features = target(history, torch.arange(history.shape[1])[None], taps=engine.drafter.taps)
        assert torch.equal(rows.tokens[row], history[0, -ROOM - 1 :])
        torch.testing.assert_close(rows.features[row], features[0, -ROOM - 1 : -1], rtol=1e-4, atol=1e-4)
    read = [len(prompt) + ROOM for prompt in PROMPTS]
    assert session.state.draft.own.length.tolist() == read and session.state.draft.count.tolist() == [0, 0]
    session.admit(1, [*session.history[1], 3, 4, 5])  # the root, these, and the row before the root again
    session.step()
    assert session.state.draft.own.length.tolist() == [read[0], read[1] + 5], "the gap stays"


@pytest.mark.parametrize("then", [0, -1], ids=["rests on", "wakes within the prompt"])
def test_a_prompt_that_comes_at_rest_is_left_out(monkeypatch, then):
    """But for the last rows of the whole; who wakes before that reads the chunks that are left."""
    target, prompt = golden_target(TARGETS[1]), [(7 * i) % 89 + 3 for i in range(PREFILL_CHUNK + 44)]
    options = {"max_new_tokens": 8, "ignore_eos": True}
    engine, script = engine_for(target, drafter_of("eagle 3", Sampling()), **options), Script([0])
    session, script.reader = Session(replace(engine, chooser=script)), 0
    calls = record(monkeypatch, EagleDrafter, "extend")
    session.admit(0, prompt, (0, 0))
    session.step()
    assert len(session.history[0]) == PREFILL_CHUNK and not calls
    script.reader = then
    while len(session.stats.presets) < 3:
        session.step()
    session.work.take_in(engine, -1)
    given = [call.args[2] for call in calls if call.args[2].count > 0]
    (history,) = torch.tensor(session.history)
    ends = [len(history) - 1] if then == 0 else [len(prompt), len(history) - 1]  # the root is in no row
    assert [int(rows.count) for rows in given] == ([ROOM] if then == 0 else [44, 3])
    features = target(history[None], torch.arange(len(history))[None], taps=engine.drafter.taps)[0]
    for rows, end in zip(given, ends):
        count = int(rows.count)
        assert torch.equal(rows.tokens[0, : count + 1], history[end - count : end + 1])
        torch.testing.assert_close(rows.features[0, :count], features[end - count : end], rtol=1e-4, atol=1e-4)
    list(session.run([session.history[0]]))
    plain = decode(engine_for(target, RootOnly(), **options), prompt)
    assert session.history[0][: len(prompt) + 8] == plain.history[0]


def test_what_was_left_out_stays_out(monkeypatch):
    """Two rows, at rest, in two turns: the head has read nothing, and is given the last rows of the second prompts."""
    target, script = golden_target(TARGETS[1]), Script([0])
    engine = engine_for(target, drafter_of("eagle 3", Sampling()), max_new_tokens=5, ignore_eos=True, batch_size=2)
    session, script.reader = Session(replace(engine, chooser=script)), 0
    list(session.run([[*PROMPTS[0]] * 4, [*PROMPTS[1]] * 3]))
    second = [history + [3 + i for i in range(20 - 15 * row)] for row, history in enumerate(session.history)]
    next(session.run(second))
    assert session.state.draft.own.length.tolist() == [0, 0] and session.live == [True, True]
    calls = record(monkeypatch, EagleDrafter, "extend")
    session.work.take_in(engine, -1)
    ((_, _, rows),) = [call.args for call in calls]
    assert rows.count.tolist() == [ROOM, 7], "of the second turn: its tokens, the root and the row before them"
    for row, history in enumerate(torch.tensor([ids]) for ids in session.history):
        count = int(rows.count[row])
        features = target(history, torch.arange(history.shape[1])[None], taps=engine.drafter.taps)
        assert torch.equal(rows.tokens[row, : count + 1], history[0, -count - 1 :])
        torch.testing.assert_close(rows.features[row, :count], features[0, -count - 1 : -1], rtol=1e-4, atol=1e-4)
    assert session.state.draft.own.length.tolist() == [ROOM, 7]


@pytest.mark.usefixtures("either")
def test_switching_compiles_nothing():
    """Once warm, no preset, prompt length or turn compiles a step again; over fixed buffers too, as on CUDA."""
    drafter = drafter_of("eagle", Sampling(), DynamicTree(depth=3, topk=3, size=8))
    options = {"compile": True, "max_new_tokens": 40, "ignore_eos": True}
    engine = warm_up(engine_for(golden_target(), drafter, **options))
    assert engine.config.compile
    plain = engine_for(golden_target(), RootOnly(), max_new_tokens=40, ignore_eos=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.compiler.set_stance("fail_on_recompile"):
        for captured, prompt in itertools.product((False, True), PROMPTS):
            scripted = replace(engine, captured=captured, chooser=Script([0, 1, 2]), pool=[])
            assert decode(scripted, prompt).history == decode(plain, prompt).history


def test_by_default_a_head_is_sized_and_says_so():
    engine = load(checkpoint=DEMO, max_new_tokens=64, device="cpu")
    assert engine.config.tree == "" and engine.drafter.facts()["tree"] == "auto"
    for _ in range(2):  # the second run counts its own cycles only
        session = Session(engine, [(0, 0)])
        list(session.run([engine.tokenizer.encode("def read_lines(path):", bos=True)]))
        stats = summary(engine, session.stats)
        rows = stats["tree_auto"]
        assert [row["tree"] for row in rows] == engine.drafter.facts()["trees"]
        assert sum(row["cycles"] for row in rows) == stats["cycles"]
        assert all(row["predicted_ms"] > 0 for row in rows)
        assert all((row["measured_ms"] is None) == (row["cycles"] == 0) for row in rows)


def test_lookup_whose_matches_are_wrong_is_given_up():
    """A text that repeats, and a target that does not go on as before: matches everywhere, and none is right."""
    engine = engine_for(golden_target(), NgramDrafter(Ngram(8, 2, 2, 1)), temperature=1.0, max_new_tokens=150)

    class Steady(Autosizer):
        """However busy this machine is."""

        def observe(self, preset: int, accepted: float, seconds: float, rows: int = 1) -> None:
            super().observe(preset, accepted, self.timed_s[preset], rows)

    sizer = Steady([shape_of(p) for p in engine.drafter.presets], [1.0, 1.6])
    session = Session(replace(engine, chooser=sizer), [(0, 0)])
    list(session.run([PROMPTS[1] * 6]))
    assert sizer.accepted[1] < 0.5, "the case is what it is meant to be"
    ran = [preset for preset, _ in session.stats.presets]
    assert ran.count(0) > 5 * ran.count(1)
