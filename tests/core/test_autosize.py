"""Which tree runs: choices on simulated machines, and that switching between trees, idling included, changes no token
and compiles nothing anew."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import math
import os
import random
import shutil
import stat
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from decode import PREFILL_CHUNK, Cycle
from draft_tree import DraftTree, DynamicTree
from drafters import RootOnly
from drafts import auto_trees, remembered
from drafts.auto_trees import with_smaller_trees
from drafts.autosize import (
    HOLD,
    IDLE_HOLD,
    MISS,
    NODE,
    Autosizer,
    AutoTrees,
    CostModel,
    TreeShape,
    accepted_of,
    cost_of,
    shape_of,
    trained_miss,
)
from drafts.deferred import MAX_KEPT
from drafts.model_draft import ModelDrafter
from drafts.ngram_draft import Ngram, NgramDrafter
from drafts.remembered import file_of, recall, remember
from eagle_draft import EagleDrafter
from helpers import (
    PROMPTS,
    Scripted,
    copy_operators,
    decode,
    engine_for,
    fresh,
    golden_head,
    golden_target,
    noisy_copy,
    pairwise,
    record,
)
from run.engine import Engine
from run.generate import generate, load, main, summary
from run.options import DEMO
from run.session import Session
from run.warm_up import TIMED_BEHIND, time_cycles

ROOT = Path(__file__).parents[2]
LARGEST = DynamicTree(depth=4, topk=5, size=20)


# of heads of versions 1 and 2, and of version 3
TARGETS = ("models/target_llama_mha", "models/target_llama31_gqa8")
HEADS = ("models/head_eagle12_mha", "models/head_eagle3")


def drafter_of(kind: str, largest: DynamicTree = LARGEST, noise: float = 0.02, lookup=None):
    third = kind == "eagle 3"
    target = golden_target(TARGETS[third])
    if kind == "model":
        return with_smaller_trees(ModelDrafter(noisy_copy(target, noise), target, largest), target)
    drafter = EagleDrafter(golden_head(HEADS[third], target), target, largest)
    return with_smaller_trees(drafter, target, lookup)


# ------------------------------------------------------------------------------- simulated machines

SHAPES = [
    TreeShape(0, 0, 1), TreeShape(3, 1, 4), TreeShape(6, 1, 7), TreeShape(5, 4, 16),
    TreeShape(6, 10, 60),
]  # fmt: skip
MACHINES = {  # seconds of a cycle, mean accepted tokens
    "verification is free": ([1.0, 1.1, 1.2, 1.25, 1.4], [0, 2.0, 2.8, 3.4, 4.4]),
    "every node costs": ([1.0, 1.4, 2.0, 3.5, 8.0], [0, 2.0, 2.8, 3.4, 4.4]),
    "a slow draft": ([1.0, 2.2, 3.9, 4.1, 5.0], [0, 1.0, 1.2, 1.6, 2.0]),
    "a head that loses": ([1.0, 1.35, 1.6, 2.0, 4.5], [0, 0.25, 0.3, 0.5, 0.7]),
    "a broken head": ([1.0, 1.3, 1.6, 2.0, 3.3], [0, 0.01, 0.01, 0.02, 0.05]),
}
VANILLA_IS_BEST = ("a slow draft", "a head that loses", "a broken head")


def timed_sizer(costs: list[float], shapes=SHAPES) -> Autosizer:
    """Cycles were timed before the first, as on CUDA."""
    weights = [8.0] * len(costs)
    known = replace(
        CostModel.fresh(shapes), costs=[cost / costs[0] for cost in costs], seen=weights
    )
    return Autosizer(shapes, known, NODE["none"])


def learned(sizer: Autosizer) -> Autosizer:
    """The next process of the same machine."""
    known = sizer.known
    value = asdict(known) | {"costs": [cost / known.costs[0] for cost in known.costs]}
    return Autosizer(
        sizer.shapes, CostModel.parse(json.loads(json.dumps(value)), sizer.shapes), sizer.node
    )


def run_machine(name, cycles, sizer, pace=lambda i: 1.0, noise=0.1, seed=0):
    """Let a sizer decode on a machine with noise. Returns: tokens per second, relative to every preset alone."""
    rng = random.Random(seed)
    costs, means = MACHINES[name]
    tokens = seconds = 0.0
    for i in range(cycles):
        preset = sizer.next(len(costs) - 1)
        accepted = sum(rng.random() < means[preset] / 6 for _ in range(6))
        spent = costs[preset] * pace(i) * (1 + noise * rng.random() + 3 * (rng.random() < 0.02))
        sizer.observe(preset, accepted, spent)
        tokens += accepted + 1
        seconds += spent
    average = (1 + noise / 2 + 0.06) * sum(map(pace, range(cycles))) / cycles
    return [tokens / seconds / ((1 + m) / c / average) for c, m in zip(costs, means)]


# of the first process: its first cost of a further node, relative to the machine's own
STARTS = {"as it is": 1.0, "half": 0.5, "twice": 2.0}


def first_sizer(name: str, error: float = 1.0, miss: float | None = None) -> Autosizer:
    """Nothing is known but a rule of thumb for costs, wrong by a factor."""
    costs, _ = MACHINES[name]
    node = (costs[3] - 1) / (SHAPES[3].size - 1)
    return Autosizer(SHAPES, CostModel.fresh(SHAPES, miss), error * node)


@pytest.mark.parametrize("start", [*STARTS, "timed"])
@pytest.mark.parametrize("name", MACHINES)
def test_it_finds_the_fastest_preset(name, start):
    timed = start == "timed"
    sizer = timed_sizer(MACHINES[name][0]) if timed else first_sizer(name, STARTS[start])
    shares = run_machine(name, 3000, sizer)
    assert min(shares) > 0.95, shares
    rates = [(1 + mean) / cost for cost, mean in zip(*MACHINES[name])]
    assert rates[sizer.best] > 0.97 * max(rates)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", VANILLA_IS_BEST)
def test_where_drafting_never_pays_little_is_lost(name, start):
    """The first process, long; then the next, short."""
    sizer = first_sizer(name, STARTS[start])
    assert run_machine(name, 4000, sizer)[0] > 0.97
    shares = [run_machine(name, 50, learned(sizer), seed=seed)[0] for seed in range(20)]
    assert statistics.median(shares) > 0.97


@pytest.mark.parametrize("name", MACHINES)
def test_the_first_answer_of_a_later_process_is_as_fast(name):
    """50 tokens, and the 2,000 after them; on a machine that is slower by half than it was."""
    sizer, shares = first_sizer(name), []
    run_machine(name, 300, sizer)
    for seed in range(20):
        later = learned(sizer)
        cycles = round(50 / (1 + MACHINES[name][1][later.best]))
        slow = {"sizer": later, "pace": lambda i: 1.5}
        first = run_machine(name, cycles, seed=seed, **slow)[0]
        shares.append(first / run_machine(name, 800, seed=seed + 100, **slow)[0])
    assert statistics.mean(shares) > 0.95 and statistics.median(shares) > 0.95, shares
    later = learned(sizer)
    if name not in VANILLA_IS_BEST:
        assert later.next(4) > 0 and not later.rests_while_reading, "from the first cycle on"


@pytest.mark.parametrize("name", ["verification is free", "every node costs"])
def test_a_memory_of_a_loaded_machine_does_not_last(name, monkeypatch):
    """Trees cost four times as much there, and none ran; the next process tries them, the one after has them."""
    (plain, *trees), means = MACHINES[name]
    monkeypatch.setitem(MACHINES, "loaded", ([plain, *(4 * cost for cost in trees)], means))
    first, second, third = [], [], []
    for seed in range(12):
        sizer = first_sizer(name)
        run_machine("loaded", 400, sizer, seed=seed)
        assert sizer.best == 0
        for shares in (first, second, third):
            sizer = learned(sizer)
            shares.append(min(run_machine(name, 100, sizer, seed=seed)))
    found = [statistics.mean(shares) for shares in (first, second, third)]
    assert found[0] > 0.6 and found[2] > 0.75, found


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["verification is free", "every node costs"])
def test_without_memory_trees_run_within_the_first_answer(name, start):
    """Of about 50 tokens: the first cycles set the pace, then a probe says what trees bring."""
    costs, means = MACHINES[name]
    shares = [
        run_machine(name, 20, first_sizer(name, STARTS[start]), seed=seed)[0] for seed in range(20)
    ]
    best = max((1 + mean) / cost for cost, mean in zip(costs, means))
    assert statistics.mean(shares) > 0.7 * best, "times vanilla"


# chain 3, chain 5, 5/4/16, 6/8/32, 6/10/60 of the trained head (benchmarks/RESULTS.md)
@pytest.mark.parametrize("measured", [
    (3.20, 4.30, 5.06, 5.95, 6.28), (3.35, 4.62, 5.35, 6.27, 6.46), (2.37, 2.64, 3.61, 4.22, 4.57),
], ids=["stand-in", "demo", "sampled"])  # fmt: skip
def test_what_larger_trees_bring_is_guessed_from_a_chain(measured):
    shapes = [(3, 1, 4), (5, 1, 6), (5, 4, 16), (6, 8, 32), (6, 10, 60)]
    chain = TreeShape(5, 1, 6)
    every = [m / 1000 for m in range(1001)]
    miss = min(every, key=lambda m: abs(accepted_of(chain, m) - measured[1] + 1))
    guessed = [1 + accepted_of(TreeShape(*shape), miss) for shape in shapes]
    assert guessed == pytest.approx(measured, rel=0.08)
    assert accepted_of(TreeShape(0, 0, 1), miss) == 0


@pytest.mark.parametrize(
    "costs",  # chain 3, 5/3/8, 6/4/16 on SmolLM2, Zen 3 with AVX2, relative to none (benchmarks/RESULTS.md)
    [(1.38, 2.04, 3.25), (2.37, 4.17, 7.06), (2.74, 4.78, 8.07), (2.28, 4.25, 7.17)],
    ids=["bf16", "int8", "int4", "bf16, 4 rows"],
)
def test_what_larger_trees_cost_is_guessed_from_a_node(costs):
    shapes = [TreeShape(3, 1, 4), TreeShape(5, 3, 8), TreeShape(6, 4, 16)]
    node = statistics.mean((cost - 1) / (shape.size - 1) for cost, shape in zip(costs, shapes))
    assert [cost_of(shape, node) for shape in shapes] == pytest.approx(costs, rel=0.12)
    assert cost_of(TreeShape(0, 0, 1), node) == 1


def test_a_first_process_runs_vanilla_then_a_probe():
    """Vanilla sets the pace that others are measured by; then the smallest tree is tried, whatever it may cost."""
    for error in STARTS.values():
        sizer = first_sizer("every node costs", error)
        for _ in range(HOLD):
            assert sizer.next(4) == 0
            sizer.observe(0, 0.0, 1.0)
        assert sizer.next(4) > 0


def test_a_batch_that_shrinks_does_not_try_trees_anew():
    """Every number of sequences has a sizer, and the account of what trees have lost goes along."""

    def tried(goes_on: bool) -> int:
        costs, means = MACHINES["a slow draft"]
        sizer = None
        trees = 0
        for _ in range(10):  # numbers of sequences
            before = sizer
            sizer = first_sizer("a slow draft")
            if goes_on and before:
                sizer.go_on_from(before)
            for _ in range(20):
                preset = sizer.next(4)
                trees += preset > 0
                sizer.observe(preset, means[preset], costs[preset], 8)
        return trees

    assert 0 < tried(True) <= tried(False) / 3


def test_what_a_drafter_reads_after_a_rest_counts_as_lost():
    sizer = first_sizer("every node costs")
    for _ in range(HOLD):
        sizer.observe(sizer.next(4), 0.0, 2.0)
    assert sizer.next(4) > 0
    before = sizer.ahead
    sizer.charge(3.0)
    assert sizer.ahead == before - 1.5, "cycles without a tree"
    sizer.left = 0
    assert sizer.next(4) == 0


def test_decisions_are_rare_while_no_tree_runs_and_frequent_while_one_does():
    """After each pass over the weights the policy's code has to come from memory again."""
    shapes = [TreeShape(0, 0, 1), TreeShape(1, 1, 2)]  # the second from a lookup

    class Counted(Autosizer):
        decisions = 0

        def _decide(self) -> None:
            self.decisions += 1
            super()._decide()

    for found, most in (([0.0, 0.0], 120 // IDLE_HOLD + 2), ([0.0, 0.9], 120 // HOLD + 2)):
        sizer = Counted(shapes, CostModel.fresh(shapes), 0.1, lookups=1)
        for _ in range(120):
            preset = sizer.next(1, found)
            assert preset == (found[1] > 0)
            sizer.observe(preset, found[preset], 1 + 0.1 * preset)
        assert most - 3 <= sizer.decisions <= most
        assert sizer.known.seen[preset] > 8, "every cycle is learnt from"


TEXTS = {  # of a machine so many cycles, and whether a tree is best in the end
    "good at first": [("every node costs", 500, True), ("a broken head", 40, False)],
    "useless at first": [
        ("a broken head", 40, False), ("a broken head", 960, False), ("verification is free", 500, True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("later", [False, True], ids=["same process", "later process"])
@pytest.mark.parametrize("texts", TEXTS)
def test_it_follows_the_text(texts, later):
    """A head that was good on earlier texts is left alone within a few cycles; one that was useless is used again."""
    sizer, paid = first_sizer(TEXTS[texts][0][0]), None
    for name, cycles, pays in TEXTS[texts]:
        if later and paid is not None:
            sizer = learned(sizer)
            assert (sizer.best > 0) == paid
        run_machine(name, cycles, sizer)
        paid = sizer.best > 0
        assert paid == pays


def test_a_cycle_without_a_tree_was_measured_too_slow():
    """As on SmolLM2, when the machine's memory got faster after loading: drafting went on at a loss of a quarter."""
    errors = (1.4, 1.2, 1.1, 1.0, 1.0)
    costs = [cost * error for cost, error in zip(MACHINES["a head that loses"][0], errors)]
    shares = run_machine("a head that loses", 600, timed_sizer(costs))
    assert shares[0] > 0.9, shares


def ratios_of(sizer: Autosizer) -> list[float]:
    return [sizer.cost(preset) / sizer.cost(0) for preset in range(len(sizer.shapes))]


def test_a_machine_that_slows_down_changes_nothing():
    steady, drifting = (first_sizer("every node costs") for _ in range(2))
    run_machine("every node costs", 2000, steady, noise=0.0)
    run_machine("every node costs", 2000, drifting, pace=lambda i: 1 + (i // 300) % 3, noise=0.0)
    assert steady.best == drifting.best
    assert ratios_of(drifting)[:3] == pytest.approx(ratios_of(steady)[:3], rel=0.3)


def test_ratios_do_not_depend_on_the_order():
    """Each preset for some cycles, upwards or downwards."""
    costs, means = MACHINES["every node costs"]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        sizer = first_sizer("every node costs", 2.0)
        for preset in order * 3:
            for _ in range(6):
                sizer.next(4)
                sizer.observe(preset, means[preset], 0.01 * costs[preset])
        assert ratios_of(sizer) == pytest.approx(costs, rel=0.08), order


LOOKUP = [TreeShape(0, 0, 1), TreeShape(10, 2, 21)]


def test_only_what_makes_sense_is_run():
    """With `limit` 0 the root alone is verified, and no probe is spent on it."""
    sizer = Autosizer(LOOKUP, CostModel.fresh(LOOKUP), 0.01)
    assert [sizer.next(0) for _ in range(20)] == [0] * 20
    assert [sizer.next(1) for _ in range(HOLD + 1)] == [0] * HOLD + [1]
    for limit in (0, 1) * 10:  # where a tree makes sense again, it runs at once
        preset = sizer.next(limit)
        sizer.observe(preset, 4.0 * preset, [1.0, 1.2][preset])
        assert preset == limit


def test_cycles_without_a_choice_are_learned_from():
    sizer = timed_sizer([1.0, 1.2], LOOKUP)
    for seconds in [1.0] * 10 + [3.0] * 1000:
        assert sizer.next(0) == 0
        sizer.observe(0, 0.0, seconds)
    assert sizer.pace * sizer.cost(0) == pytest.approx(3, rel=0.01)


def test_shapes():
    drafter = drafter_of("eagle", DynamicTree())
    shapes = [tuple(shape_of(preset)) for preset in drafter.presets]
    smaller = [tuple(shape) for shape in auto_trees.SHAPES]
    assert shapes == [(0, 0, 1), *smaller, (6, 10, 60)]
    lookups = [tuple(shape_of(preset)) for preset in NgramDrafter(Ngram()).presets]
    assert lookups == [(0, 0, 1), (1, 1, 2), (3, 3, 4), (7, 4, 8), (10, 4, 16)]


# ------------------------------------------------------------------------------------------- memory


@pytest.fixture
def trees(tmp_path, monkeypatch) -> Path:
    """The folder where things are remembered."""
    folder = tmp_path / "gpt-eagle" / "trees"
    monkeypatch.setattr(remembered, "folder", lambda: folder)
    return folder


def demo(checkpoint: str = DEMO, **options) -> Engine:
    return load(checkpoint=checkpoint, max_new_tokens=24, device="cpu", **options)


def told() -> list[list[int]]:
    """The tokens that an engine decodes, which is dropped then, and so saves what it has learnt."""
    tokens = generate(demo(), ["def read_lines(path):"]).tokens
    gc.collect()
    return tokens


def test_a_later_engine_starts_where_the_last_one_left_off(trees):
    engine = demo()
    assert engine.policy.sizer.next(99) == 0
    del engine
    gc.collect()
    assert not trees.exists(), "one that decodes nothing writes nothing"
    engine = demo()
    tokens = generate(engine, ["def read_lines(path):"]).tokens
    known = engine.policy.sizer.known
    del engine
    gc.collect()
    (file,) = trees.glob("[!.]*")
    assert stat.S_IMODE(trees.stat().st_mode) == stat.S_IMODE(trees.parent.stat().st_mode) == 0o700
    assert file.stat().st_size < 8000
    again = demo()
    rates = again.policy.lookup.rates
    assert rates.sum() > 0, "of the lookup beside the head"
    state = Session(again).state.drafter_state
    assert torch.equal(state.lookup_state.outcomes[0], rates)
    recalled = again.policy.sizer.known
    assert recalled.costs == pytest.approx([cost / known.costs[0] for cost in known.costs])
    assert recalled.miss == known.miss and max(recalled.seen) <= 8
    del again, state
    gc.collect()
    before = file.stat().st_mtime_ns
    assert told() == tokens
    assert file.stat().st_mtime_ns > before and len(list(trees.glob("[!.]*"))) == 1


def test_the_end_of_a_process_saves_and_a_second_process_reads(trees, tmp_path, capsys):
    command = [sys.executable, "generate.py", "--checkpoint", DEMO, "--max_new_tokens", "30"]
    copy_operators(tmp_path)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0 and len(ended.stderr.splitlines()) == 1, ended.stderr
    (file,) = trees.glob("[!.]*")
    engine = demo()
    shapes = [shape_of(preset) for preset in engine.presets]
    known = CostModel.parse(recall(file), shapes, engine.policy.lookup.rates)
    main(command[2:])
    assert capsys.readouterr().out == ended.stdout
    assert known and list(trees.glob("[!.]*")) == [file]


def test_what_a_key_depends_on(trees, short_demo, tmp_path):
    """Each of these has a file of its own; the same once more has the same."""
    short = partial(demo, str(short_demo))
    engine = short()
    keys = [file_of(engine)]
    assert keys[0] == file_of(short()) and keys[0].parent == trees
    for options in (
        {"quant": "int8"}, {"quant": "int4"}, {"quant_draft": "int4"}, {"dtype": "float32"},
        {"batch_size": 2}, {"temperature": 0.5}, {"tree_size": 12}, {"draft": "ngram"},
    ):  # fmt: skip
        keys.append(file_of(short(**options)))
    assert file_of(short(seed=5)) == keys[0]
    assert file_of(short(temperature=0.9)) == keys[6], "how hot does not matter"
    for name in ("checkpoint", "head"):  # the same weights elsewhere, and changed there
        copy = tmp_path / name
        shutil.copytree(engine.option(name), copy)
        chosen = {name: value for name, value in engine.resolved.items() if name != "head"}
        config = replace(engine.config, head=engine.option("head"))
        config = replace(config, **{name: str(copy)})
        other = replace(engine, config=config, resolved=chosen)
        keys.append(file_of(other))
        os.utime(copy / "model.safetensors", (1, 1))
        keys.append(file_of(other))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(file_of(engine))
    finally:
        torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backends.library.tiles_in_use", lambda: "another unit")
        keys.append(file_of(engine))
        patch.undo()
        for library in ("operators of another version", ""):
            patch.setattr("backends.cpp.build.loaded", lambda name=library: name)
            keys.append(file_of(engine))
        patch.setattr("backends.cpp.build.processor", lambda: "another")
        keys.append(file_of(engine))
    assert len(set(keys)) == len(keys)


def test_where_it_is(monkeypatch, tmp_path):
    assert remembered.folder() is None and file_of(demo()) is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remembered.folder() == tmp_path / "gpt-eagle" / "trees"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert remembered.folder() == tmp_path / "home" / ".cache" / "gpt-eagle" / "trees"


BAD = [None, True, "1", [], {}, math.nan, math.inf, -math.inf, -1, 1e300, 10**400, 0.3j, [[1]]]


def test_garbage_is_as_if_it_were_not_there():
    """Every value of every field, and of every entry of a list, replaced by what it cannot be; too few, and too many."""
    value = {"costs": [1.0, 2.0, 3.0, 4.0, 5.0], "seen": [3.0] * 5}
    value |= {"miss": 0.3, "miss_weight": 50.0, "rates": [12.0, 24.0, 0.5, 1.0]}
    rates = torch.zeros(2, 2)
    known = CostModel.parse(value, SHAPES, rates)
    assert known.costs == value["costs"] and known.seen == [3.0] * 5 and known.miss_weight == 8
    assert known.rates == [4.0, 8.0, 0.5, 1.0], "as much as 8 tried candidates at most"
    assert (
        CostModel.parse(value, SHAPES) is None
        and CostModel.parse(value, SHAPES, torch.zeros(2)) is None
    )
    wrong = [*BAD, value | {"costs": [0.0] * 5}]
    for name, right in value.items():
        wrong.append({k: v for k, v in value.items() if k != name})
        wrong += [value | {name: bad} for bad in BAD]
        if isinstance(right, list):
            ends = [right[:-1], [*right, 1.0]]
            inside = [[*right[:2], bad, *right[3:]] for bad in BAD]
            wrong += [value | {name: bad} for bad in ends + inside]
    for each in wrong:
        assert CostModel.parse(each, SHAPES, rates) is None, each


def test_garbage_in_the_file(trees, capsys):
    """An engine starts, and a run with it writes a good file again."""
    tokens = told()
    (file,) = trees.glob("[!.]*")
    content = file.read_bytes()
    cut = content[: len(content) // 2]
    for case in (b"", b"[", b"[" * 5000, b"\xff\xfe", b"9" * 5000, cut, content * 200, b"\0"):
        file.write_bytes(case)
        assert recall(file) is None, case[:9]
    assert told() == tokens
    assert recall(file) and capsys.readouterr().err == ""


def test_files_that_are_none(trees, tmp_path):
    """A queue would be waited for, a link may lead anywhere, a folder is no file."""
    trees.mkdir(parents=True, mode=0o700)
    (tmp_path / "b.json").write_text("1")
    os.mkfifo(trees / "queue")
    (trees / "link").symlink_to(tmp_path / "b.json")
    (trees / "folder").mkdir()
    for name in ("nothing", "queue", "link", "folder", "nowhere/file"):
        assert recall(trees / name) is None, name


def test_a_folder_of_another_user_is_left_alone(trees, monkeypatch, capsys):
    trees.mkdir(parents=True, mode=0o700)
    file = trees / "a.json"
    file.write_text("[1]")
    assert recall(file) == [1]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert recall(file) is None
    remember(file, [2])
    error = capsys.readouterr().err
    assert error.startswith("note: ") and error.count("\n") == 1 and "another user" in error
    monkeypatch.undo()
    assert file.read_text() == "[1]"
    trees.chmod(0o777)
    assert recall(file) is None


def test_a_folder_that_takes_nothing_costs_a_line(trees, monkeypatch, capsys):
    """The disk is full, or a file stands where the folder would. The existing file stays whole."""
    file = trees / "a.json"
    remember(file, [1])

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        remember(file, [2])
    remember(file / "trees" / "a.json", [2])
    errors = capsys.readouterr().err.splitlines()
    assert all(line.startswith("note: --tree auto cannot write to") for line in errors)
    assert len(errors) == 2 and "the disk is full" in errors[0]
    assert recall(file) == [1] and list(trees.glob("[!.]*")) == [file]
    monkeypatch.setattr(remembered, "folder", lambda: file)
    told()
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_head_was_trained_to_counts_at_first(tmp_path, trees):
    """A chain of levels that are reached and accepted: 1 + .8 + .4 tokens are tried, .8 + .4 + .1 accepted."""

    def miss(value) -> float | None:
        (tmp_path / "training.json").write_text(json.dumps(value))
        return trained_miss(str(tmp_path))

    curve = {"stages": [{"curve": [{"alpha": [0.1]}, {"alpha": [0.8, 0.5, 0.25], "tau": 2.3}]}]}
    assert miss(curve) == pytest.approx(1 - 1.3 / 2.2)
    assert miss(curve["stages"][0]) == miss(curve), "of one run, as train_eagle.py writes it"
    best = curve["stages"][0] | {"best": {"alpha": [0.5]}}
    assert miss(best) == miss({"stages": [{}, best]}) == pytest.approx(0.5)
    wrong = [[], None, 3, "ab", ["a"], [[1]], [math.nan], [2.0], [-1.0], [10**400, 1.5], {"a": 1}]
    for alpha in wrong:
        assert miss({"stages": [{"curve": [{"alpha": alpha}]}]}) is None, alpha
    for other in ([], {}, {"stages": []}, {"stages": [{}]}, {"stages": {"a": 1}}, 3, None):
        assert miss(other) is None
    (tmp_path / "training.json").write_bytes(b"\xff{")
    assert trained_miss(str(tmp_path)) is None
    assert trained_miss(str(tmp_path / "nothing")) is None and trained_miss("") is None
    known = demo().policy.sizer.known
    assert known.miss == pytest.approx(trained_miss(demo().option("head"))) and known.miss < 0.2
    assert demo(draft="ngram").policy.sizer.known.miss == MISS


# -------------------------------------------------------------------------- switching between trees


class Script(Scripted):
    """Presets in a given order, over and over; learns nothing."""

    prefill_tree = -1

    def __init__(self, order: list[int]):
        super().__init__()
        self.order, self.ran, self.every = itertools.cycle(order), [], []

    def pick(self, limit: int) -> int:
        self.ran.append(min(next(self.order), limit))
        self.every.append(self.expected)
        return self.ran[-1]

    def pick_reading(self, limit: int) -> int:
        return limit if self.prefill_tree < 0 else self.prefill_tree


ORDERS = {"mixed": [3, 0, 2, 0, 1, 0, 3, 2], "long rests": [3] + [0] * 35 + [2, 1] + [0] * 5}


@pairwise(
    kind=["eagle", "model"], temperature=[0.0, 1.0], batch=[1, 2], captured=[False, True],
    order=list(ORDERS),
)  # fmt: skip
def test_switching_changes_no_token(kind, temperature, batch, captured, order):
    options = {"max_new_tokens": 50 if order == "long rests" else 24, "batch_size": batch}
    options |= {"ignore_eos": True, "temperature": temperature, "seed": 3}
    plain = decode(engine_for(golden_target(), RootOnly(), **options), *PROMPTS[:batch])
    engine = engine_for(golden_target(), drafter_of(kind), **options)
    names = ["none", "chain 1", "chain 3", "dynamic 4/5/20"]
    assert [p.name for p in engine.presets] == names
    for host_lag in (0, 1):
        script = Script(ORDERS[order])
        scripted = replace(fresh(engine, captured), policy=script)
        session = Session(scripted, [(i, 0) for i in range(batch)], host_lag)
        list(session.decode_turn(PROMPTS[:batch]))
        assert session.history == plain.history
        assert set(script.ran) == {0, 1, 2, 3}
        again = [h[:20] for h in session.history]  # a second turn over the same buffers
        list(session.decode_turn(again))
        assert [h[:20] for h in session.history] == again


@pairwise(kind=["eagle", "eagle 3"], temperature=[0.0, 1.0], batch=[1, 2], captured=[False, True])
def test_lookups_beside_a_head_change_no_token(kind, temperature, batch, captured):
    """Every preset in turn, the lookup's trees among them, over prompts that repeat themselves."""
    target = golden_target(TARGETS[kind == "eagle 3"])
    options = {"max_new_tokens": 40, "ignore_eos": True, "batch_size": batch, "seed": 3}
    options["temperature"] = temperature
    prompts = [prompt * 3 for prompt in PROMPTS[:batch]]
    plain = decode(engine_for(target, RootOnly(), **options), *prompts)
    drafter = drafter_of(kind, lookup=NgramDrafter(Ngram(4, 2)))
    names = ["none", "tree of 2", "tree of 4", "tree of 8", "tree of 9", "chain 1", "chain 3"]
    assert [p.name for p in drafter.presets] == [*names, "dynamic 4/5/20"]
    script = Script([5, 1, 2, 0, 3, 4, 7, 2, 6, 1])
    engine = replace(fresh(engine_for(target, drafter, **options), captured), policy=script)
    session = decode(engine, *prompts)
    assert session.history == plain.history
    assert {1, 2, 3, 5, 7} <= set(script.ran)
    assert all(len(each) == 5 for each in script.every)
    assert max(map(max, script.every)) > 0
    assert min(session.state.drafter_state.own.length) > 0, "the head has read"


def test_cycles_are_timed_with_rows_that_decode(monkeypatch):
    """Rows that are done would see no text, and trees would seem cheaper than they are."""
    engine, seen = engine_for(golden_target(), drafter_of("eagle"), max_new_tokens=80), []
    launch = Session._launch

    def launched(session, preset):
        state = session.state
        read = int(state.drafter_state.own.length.min())  # of the head
        seen.append((bool(state.done.any()), int(state.pos.min()), read))
        return launch(session, preset)

    monkeypatch.setattr(Session, "_launch", launched)
    assert len(time_cycles(engine)) == 4 and len(seen) >= 12
    behind = min(TIMED_BEHIND, engine.context // 2)
    assert seen[0][1] == seen[0][2] == behind > 0 and not any(done for done, *_ in seen[:3])


def next_tree(engine: Engine, session: Session) -> DraftTree:
    """The tree that the drafter would propose now, with its largest preset."""
    session.policy.before_step(session.view, len(engine.presets) - 1)
    tree, _ = Cycle(engine, engine.drafter, session.mode).draft(
        session.buffers.cache, session.state
    )
    return tree


REST = [[0], [0] * 5, [2, 2, 0, 0, 0], [1] * 3 + [0] * MAX_KEPT, [0, 0, 2]]
RESTING = [*itertools.product(("eagle", "eagle 3", "model"), REST), ("model", [0] * 70)]


@pytest.mark.parametrize("kind, order", RESTING, ids=str)
def test_while_idle_no_row_is_lost(kind, order):
    """The tree drafted after cycles without one is that of a session which has just read the whole text: in a row that
    was there from the start, in one that came later, and in the next turn. A head has room for some cycles only."""
    drafter = drafter_of(kind, noise=1e-4)  # a draft model whose last node is often accepted
    options = {"max_new_tokens": 400, "ignore_eos": True, "batch_size": 2}
    engine = engine_for(golden_target(TARGETS[kind == "eagle 3"]), drafter, **options)
    session = Session(replace(engine, policy=Script(order)), [(0, 0)])
    session.admit(0, PROMPTS[0])
    while len(session.stats.presets) < len(order):
        session.step()
        if len(session.stats.presets) == 1 and not session.busy(1):
            session.admit(1, PROMPTS[1], (1, 0))
    assert [preset for preset, _ in session.stats.presets] == order
    assert session.state.drafter_state.count.max() <= MAX_KEPT
    assert (session.policy.waiting > 0) == (order[-1] == 0 and len(order) > 1)
    for added in ([], [3, 4, 5]):
        if added:
            next(session.decode_turn([history + added for history in session.history]))
        if not all(session.live):  # the second row's prompt came last
            session.step()
        other = Session(engine)
        next(other.decode_turn([history[:-1] for history in session.history]))
        assert other.history == session.history
        tree, want = next_tree(engine, session), next_tree(engine, other)
        assert torch.equal(tree.tokens, want.tokens) and torch.equal(tree.parents, want.parents)
        torch.testing.assert_close(tree.values, want.values, rtol=1e-4, atol=1e-4)


def resting_session(new: int, prefill_tree: int = -1, batch: int = 2) -> Session:
    """A session of an EAGLE-3 head that rests. prefill_tree: preset that reads prompts; -1: the largest"""
    options = {"max_new_tokens": new, "ignore_eos": True, "batch_size": batch}
    engine = engine_for(golden_target(TARGETS[1]), drafter_of("eagle 3"), **options)
    script = Script([0])
    script.prefill_tree = prefill_tree
    return Session(replace(engine, policy=script))


def caught_up(monkeypatch, session: Session):
    """Let the head catch up. Returns: what it was given."""
    calls = record(monkeypatch, EagleDrafter, "extend")
    session.policy.before_step(session.view, len(session.engine.presets) - 1)
    ((_, _, rows),) = [call.args for call in calls]
    return rows


def check_rows(session: Session, rows, row: int, seq: int = 0, end: int = -1) -> None:
    """Row `row` of what a head was given is the last part of a sequence up to token `end`, the root, which is in no row."""
    engine, history = session.engine, torch.tensor(session.history[seq])
    end %= len(history)
    count, positions = int(rows.count[row]), torch.arange(len(history))[None]
    features = engine.target(history[None], positions, aux_layers=engine.drafter.aux_layers)[0]
    assert torch.equal(rows.tokens[row, : count + 1], history[end - count : end + 1])
    want = features[end - count : end]
    torch.testing.assert_close(rows.features[row, :count], want, rtol=1e-4, atol=1e-4)


def test_after_a_long_rest_a_head_reads_the_last_rows(monkeypatch):
    """Not in a row that is done: its answer is over, and its next prompt leaves a gap."""
    session = resting_session(80)
    session.admit(0, PROMPTS[0], max_new_tokens=MAX_KEPT + 5)
    session.admit(1, PROMPTS[1])
    while len(session.stats.presets) < 2 * MAX_KEPT + 5:
        session.step()
    rows = caught_up(monkeypatch, session)
    assert rows.count.tolist() == [MAX_KEPT] and session.live == [False, True]
    check_rows(session, rows, 0, 1)
    state = session.state.drafter_state
    read = [len(PROMPTS[0]), len(PROMPTS[1]) + MAX_KEPT]
    assert state.own.length.tolist() == read and state.count.tolist() == [MAX_KEPT + 4, 0]
    # the root, these, and the row before the root again
    session.admit(1, [*session.history[1], 3, 4, 5])
    session.step()
    length = session.state.drafter_state.own.length.tolist()
    assert length == [read[0], read[1] + 5], "the gap stays"


@pytest.mark.parametrize("then", [0, -1], ids=["rests on", "wakes within the prompt"])
def test_a_prompt_that_comes_at_rest_is_left_out(monkeypatch, then):
    """The head reads only the last rows of the whole text.

    A head that wakes within the prompt reads the chunks that are left.
    """
    prompt = [(7 * i) % 89 + 3 for i in range(PREFILL_CHUNK + 44)]
    session = resting_session(8, prefill_tree=0, batch=1)
    calls = record(monkeypatch, EagleDrafter, "extend")
    session.admit(0, prompt, (0, 0))
    session.step()
    assert len(session.history[0]) == PREFILL_CHUNK and not calls
    session.policy.prefill_tree = then
    while len(session.stats.presets) < 3:
        session.step()
    session.policy.before_step(session.view, len(session.engine.presets) - 1)
    given = [call.args[2] for call in calls if call.args[2].count > 0]
    assert [int(rows.count) for rows in given] == ([MAX_KEPT] if then == 0 else [44, 3])
    assert given[-1].features.shape[1] == int(given[-1].count), "on a CPU only the rows that wait"
    for rows, end in zip(given, [-1] if then == 0 else [len(prompt), -1]):
        check_rows(session, rows, 0, end=end)
    list(session.decode_turn([session.history[0]]))
    vanilla = engine_for(session.engine.target, RootOnly(), max_new_tokens=8, ignore_eos=True)
    assert session.history[0][: len(prompt) + 8] == decode(vanilla, prompt).history[0]


def test_what_was_left_out_stays_out(monkeypatch):
    """Two rows, at rest, in two turns: the head has read nothing, and is given the last rows of the second prompts."""
    session = resting_session(5, prefill_tree=0)
    list(session.decode_turn([[*PROMPTS[0]] * 4, [*PROMPTS[1]] * 3]))
    ends = [range(3, 23), range(3, 8)]
    next(session.decode_turn([[*old, *end] for old, end in zip(session.history, ends)]))
    assert session.state.drafter_state.own.length.tolist() == [0, 0] and all(session.live)
    rows = caught_up(monkeypatch, session)
    # of the second turn: its tokens, the root and the row before them
    assert rows.count.tolist() == [MAX_KEPT, 7]
    for row in (0, 1):
        check_rows(session, rows, row, row)
    assert session.state.drafter_state.own.length.tolist() == [MAX_KEPT, 7]


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


def test_lookup_whose_matches_are_wrong_is_given_up():
    """A text that repeats, and a target that does not go on as before: matches everywhere, and none is right."""
    engine = engine_for(
        golden_target(), NgramDrafter(Ngram(8, 2, 2, 1)), temperature=1.0, max_new_tokens=150
    )

    class Steady(Autosizer):
        """However busy this machine is."""

        def observe(self, preset: int, accepted: float, seconds: float, sequences: int = 1) -> None:
            super().observe(preset, accepted, 1 + 0.3 * preset, sequences)

    shapes = [shape_of(preset) for preset in engine.presets]
    sizer = Steady(shapes, CostModel.fresh(shapes), 0.3, lookups=len(shapes) - 1)
    policy = AutoTrees(engine.drafter)
    policy.sizer = sizer
    session = decode(replace(engine, policy=policy), PROMPTS[1] * 6)
    state = session.state.drafter_state
    tried = state.outcomes[..., 1].sum()
    assert state.outcomes[..., 0].sum() < 0.3 * tried > 10, "the case is what it is meant to be"
    ran = [preset for preset, _ in session.stats.presets]
    assert len(ran) > 5 * sum(preset > 0 for preset in ran)
