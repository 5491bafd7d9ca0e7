"""The one command that trains a head: kills in every stage, the plan, the budget by the clock, and mistakes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from files.rounding import quantize_directory
from helpers import refused, write_random_llama
from quantize import Quantization
from run.generate import generate, load
from run.options import DEMO
from scripts import train_head
from scripts.bench import measure as bench_measure
from scripts.train import generate_answers, plan, train_eagle
from scripts.train.generate_answers import AnswerConfig, Run
from scripts.train.plan import (
    LEAST_TOKENS,
    STAGES,
    Costs,
    Measurement,
    least_seconds,
    make_plan,
    plan_text,
)

MODULE = '\ndef plain(x):\n    """Return it."""\n    return x\n'
PLAN = {
    "tokens": 120, "prompts": 2, "seconds": dict.fromkeys(STAGES, 60.0), "disk": dict.fromkeys(STAGES, 10**6),
    "memory": dict.fromkeys(STAGES, 10**8),
}  # fmt: skip


def tiny_model(folder: Path, kind: str) -> Path:
    """A random LLaMA of two layers with the demo's tokenizer. kind: bfloat16, or int4 in its file"""
    (folder / "plain").mkdir()
    write_random_llama(folder / "plain")
    shutil.copy(Path(DEMO, "tokenizer.model"), folder / "plain")
    (folder / "plain" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    if kind == "bfloat16":
        return folder / "plain"
    quantize_directory(folder / "plain", folder / "rounded", Quantization("int4", 32))
    return folder / "rounded"


class FakeTime:
    """Stand in for the module `time`; every reading takes some seconds."""

    def __init__(self, reading_s: float = 0.0):
        self.now = 0.0
        self.reading_s = reading_s

    def perf_counter(self) -> float:
        self.now += self.reading_s
        return self.now


class Known(Measurement):
    """Costs that need no measurement, said as measured ones are."""

    def __init__(self, checkpoint: Path, device: str, hours: float, tokens: int):
        self.hours = hours
        self.tokens = tokens
        self.began = plan.time.perf_counter()
        self.costs = Costs(1e6)
        print("measuring for the plan")

    def answers(self, config: AnswerConfig) -> None:
        """Measure nothing."""

    def training(self, config, method) -> None:
        """Measure nothing."""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Everything of a run is small: few prompts, short answers, an epoch, one task."""
    rows = [{"turns": [f"What is {i}?"]} for i in range(30)]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"id": i, "task": "tiny", "turns": [f"Say {i}."]} for i in range(2)]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(generate_answers.task_prompts, "modules", lambda: [MODULE])
    for name in ("tasks", "long_texts"):
        monkeypatch.setattr(generate_answers.task_prompts, name, lambda *words: [])
    monkeypatch.setattr(train_eagle, "held_out", lambda name, share: name.endswith("1?"))
    monkeypatch.setattr(train_eagle, "OWN_TOKENS", 24)
    size = {"answer_tokens": 8, "batch_size": 4, "eval": str(tmp_path / "tiny.jsonl")}

    def answers(**options) -> AnswerConfig:
        return AnswerConfig(**options | size)

    monkeypatch.setattr(train_head, "AnswerConfig", answers)
    recipe = {"seq_len": 32, "batch_size": 2, "eval_prompts": 2}
    recipes = {name: each | recipe for name, each in train_head.RECIPES.items()}
    for each in (recipes["HASS"], recipes["EAGLE-3"]):
        each["draft_vocab"] = 64
    monkeypatch.setattr(train_head, "RECIPES", recipes)
    monkeypatch.setattr(train_head, "TASKS", str(tmp_path / "tiny.jsonl"))
    monkeypatch.setattr(train_head, "METHODS", "none,{}:chain:tree_depth=2")
    monkeypatch.setattr(train_head, "LEAST_TOKENS", 0)
    monkeypatch.setattr(train_head, "Measurement", Known)
    monkeypatch.setattr(train_head, "make_plan", lambda costs, hours, out, tokens: PLAN)
    monkeypatch.setattr(train_head, "time", FakeTime(60.0))  # 15 of them are a stage's share
    ceiling = bench_measure.Series.of([1e9])
    monkeypatch.setattr(train_head.papers, "read_bandwidth", lambda device, runs: ceiling)
    return tmp_path


def arguments(folder: Path, checkpoint: Path, out: str = "head", **changes) -> list[str]:
    options = {
        "checkpoint": checkpoint, "out": folder / out, "hours": 1, "chat": "vicuna", "device": "cpu",
        "prompts": folder / "given.jsonl",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in (options | changes).items()]


def kill_at(monkeypatch, owner, name: str, call: int) -> None:
    """Let a call of `owner.name` end the program after its work, once."""
    original = getattr(owner, name)
    calls = []

    def killed(*args, **options):
        result = original(*args, **options)
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, killed)


def check_head(folder: Path, checkpoint: Path, licence: str, draft: str = "eagle") -> None:
    """The directory is whole: `--head` takes it, and tokens are vanilla's."""
    info = json.loads((folder / "training.json").read_text())
    assert info["config"]["steps"] == info["curve"][-1]["step"] >= 10
    seconds = info["run"]["seconds"]
    assert seconds["training"] > 900 and sum(seconds.values()) < 3700, seconds
    assert [row["method"] for row in info["evaluation"]] == ["none", f"{draft}:chain:tree_depth=2"]
    card = (folder / "README.md").read_text()
    for text in (f"licence: {licence}", "given: 30 prompts", "| tiny |", "of a vanilla pass)"):
        assert text in card, text
    assert not (folder / "features.bin").exists()
    tokens = []
    for options in ({"head": str(folder), "tree": "chain:2"}, {"draft": "none"}):
        engine = load(checkpoint=str(checkpoint), max_new_tokens=16, device="cpu", **options)
        assert engine.option("draft") == options.get("draft", draft)
        tokens.append(generate(engine, ["What is 7?"]).tokens)
    assert tokens[0] == tokens[1]


def test_a_run_killed_in_every_stage(small, monkeypatch, capsys):
    """The command goes on, and the time before counts."""
    checkpoint = tiny_model(small, "bfloat16")
    kill_at(monkeypatch, Run, "_append", 2)
    kill_at(monkeypatch, train_eagle.Features, "of", 3)
    kill_at(monkeypatch, train_eagle, "save_head", 2)
    kill_at(monkeypatch, train_head.papers, "run_round", 1)
    kills = 0
    done = []
    while len(done) < len(STAGES):
        try:
            train_head.main(arguments(small, checkpoint))
        except SystemExit as stop:
            assert stop.code == 130
            kills += 1
        done = json.loads((small / "head" / "run.json").read_text())["done"]
    assert kills == 4 and done == list(STAGES)
    shown = capsys.readouterr().out
    assert shown.count("measuring for the plan") == 1
    assert "answers: 2 minutes of about 60 seconds, " in shown, "a line while a stage runs"
    assert (small / "head" / "log.txt").read_text() == shown
    check_head(small / "head", checkpoint, "apache-2.0")
    train_head.main(arguments(small, checkpoint))
    again = capsys.readouterr().out
    assert again.count("  done in ") == 4 and "are spent" not in again, "nothing is left to do"


@pytest.mark.slow
def test_a_quantized_target(small):
    """Its answers and features are those of its own weights."""
    checkpoint = tiny_model(small, "int4")
    train_head.main(arguments(small, checkpoint))
    check_head(small / "head", checkpoint, "unknown")  # a rounded copy has no README.md


def test_a_block_drafter(small, capsys):
    checkpoint = tiny_model(small, "bfloat16")
    train_head.main(arguments(small, checkpoint, kind="dflash2"))
    check_head(small / "head", checkpoint, "apache-2.0", "block")
    keys = json.loads((small / "head" / "config.json").read_text())["dflash_config"]
    assert keys["selector_rank"] == 64 and keys["block_size"] == 6
    card = (small / "head" / "README.md").read_text()
    assert "- Training: DFlash2, " in card and "block:auto, the default," in card
    assert "of 64 tokens, " in card
    capsys.readouterr()
    other = refused(capsys, train_head.main, arguments(small, checkpoint), prints=True)
    assert "holds another run (kind was 'dflash2', not 'eagle')" in other


# --------------------------------------------------------------------------------------------- plan

COSTS = Costs(
    opening_s=5.0, answer_rate=1000.0, single_rate=200.0, batch_tokens=2048, feature_s=1.0, step_s=2.0, feature_bytes=10**7,
    head_bytes=10**8, answer_memory=10**9, training_memory=3 * 10**9,
)  # fmt: skip


def test_the_plan_divides_the_hours(tmp_path):
    found = make_plan(COSTS, 2, str(tmp_path))
    # 20 s and 21 rounds of 17.92 s are left for the evaluation, less than 15 % of two hours
    assert found["prompts"] == 20 and found["seconds"]["evaluation"] == pytest.approx(396.32)
    # 5 s open, a minute compiles; a token costs 1 ms, and its share of a batch's 1 + 3 * 2 s
    assert found["tokens"] == int((7200 - 396.32 - 65) / (0.001 + 1.5 / 2048 * 7))
    assert sum(found["seconds"].values()) == pytest.approx(7200, rel=0.01)
    assert found["disk"]["features"] == -(-found["tokens"] * 1.5 // 2048) * 10**7
    lines = plan_text(found, {"answers": 1800.0}).splitlines()
    assert lines[1].endswith("done in 0.50") and lines[3].split()[0] == "training"
    assert "20 prompts of each task" in lines[-1] and "3.0" in lines[2]


def test_a_card_says_what_is_fastest():
    rows = [
        {"method": method, "task": task, "speedup": speedup}
        for task, speedups in (("a", (1.0, 1.4, 0.5)), ("b", (1.0, 0.8, None)))
        for method, speedup in zip(("none", "eagle:auto", "eagle:chain"), speedups)
    ]
    assert train_head.speed(rows) == (
        "eagle:auto has 1.10 of vanilla decoding here, medians of a 1.40, b 0.80"
    )
    assert train_head.speed(rows[:1] + rows[2:3]).startswith("no method is faster")
    config = train_head.HeadConfig(checkpoint="model", out="mine")
    assert "--checkpoint model --head mine" in train_head.use(config, rows)
    rows += [{"method": "ngram", "task": task, "speedup": 1.2} for task in "ab"]
    assert train_head.speed(rows) == (
        "ngram has 1.20 of vanilla decoding here, medians of a 1.20, b 1.20; with the head, "
        "eagle:auto has 1.10: it is not recommended"
    )
    assert "--draft ngram --chat" in train_head.use(config, rows)


def test_the_recipe_follows_from_the_tokens(small, monkeypatch):
    """HASS below a million tokens in three epochs; above it EAGLE-3, measured anew."""
    versions: list[int] = []
    monkeypatch.setattr(
        Known, "training", lambda _, config, method: versions.append(config.version)
    )
    config = train_head.HeadConfig(checkpoint=str(small), device="cpu")
    for tokens, want in ((200_000, ["HASS"]), (230_000, ["HASS", "EAGLE-3"])):
        versions.clear()
        monkeypatch.setattr(train_head, "make_plan", lambda *_, n=tokens: {"tokens": n})
        plan = train_head.plan_of(config, Known(small, "cpu", 2.0, 0))
        assert plan["recipe"] == want[-1] and versions == [1, 3][: len(want)]


def measurement(monkeypatch, checkpoint: Path, hours: float, tokens: int = 0) -> Measurement:
    """Begin a measurement on a machine that reads 4 GB/s."""
    monkeypatch.setenv("GPT_EAGLE_BANDWIDTH", "4e9")
    return Measurement(checkpoint, "cpu", hours, tokens)


def test_a_short_measurement(tmp_path, small, monkeypatch, capsys):
    """Every cost is measured, of a sequence or of a batch, and the least time only grows."""
    checkpoint = tiny_model(tmp_path, "bfloat16")
    config = train_head.HeadConfig(
        checkpoint=str(checkpoint), prompts=str(small / "given.jsonl"), chat="vicuna", device="cpu"
    )
    measured = measurement(monkeypatch, checkpoint, hours=2)
    monkeypatch.setattr(plan.time, "perf_counter", FakeTime(0.01).perf_counter)
    least_s = [least_seconds(measured.costs)]
    measured.answers(config.answers())
    least_s.append(least_seconds(measured.costs))
    measured.training(config.training("EAGLE-3", batch_size=4), train_eagle.eagle_method())
    found = measured.costs
    least_s.append(least_seconds(found))
    assert least_s == sorted(least_s) and least_s[0] < least_s[-1]
    assert found.batch_tokens == 4 * 32 and found.feature_bytes == 4 * 32 * (3 * 64 * 2 + 4)
    assert min(found) > 0 and found.training_memory >= found.answer_memory
    assert capsys.readouterr().out.count("a run takes at least") == 5
    # a slow machine measures one sequence, and no second time
    monkeypatch.setattr(plan.time, "perf_counter", FakeTime(2.0).perf_counter)
    measured.training(config.training("EAGLE-3", batch_size=4), train_eagle.eagle_method())
    assert measured.costs.batch_tokens == 4 * 32 and measured.costs.step_s == 4 * 2


def test_hours_that_cannot_suffice_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """By the bytes of the weights: 120 tokens/s here, and an evaluation of two rounds has 7,168."""
    path = tmp_path / "model"
    path.mkdir()
    write_random_llama(path)
    os.truncate(path / "model.safetensors", 66_000_000)  # larger on the disk than in the config
    with pytest.raises(ValueError, match="a run takes at least 9 minutes; give --hours 0.4 or"):
        measurement(monkeypatch, path, hours=0.1)


def test_measuring_takes_a_tenth_of_the_hours(tmp_path, monkeypatch):
    measured = measurement(monkeypatch, tiny_model(tmp_path, "bfloat16"), hours=0.1)
    measured.check_time()
    measured.began -= 40
    with pytest.raises(
        ValueError, match=r"measuring has taken 40 s, a tenth of it, .*--hours 0\.3"
    ):
        measured.check_time()


def test_tokens_in_place_of_hours(tmp_path, small, monkeypatch):
    """Their number is what is trained on, whatever the hours, and each of the steps is done."""
    known = next(f for f in fields(train_head.HeadConfig) if f.name == "tokens")
    assert known.metadata["least"] == LEAST_TOKENS
    found = make_plan(COSTS, 0.1, str(tmp_path), tokens=10**6)
    assert found["tokens"] == 10**6 and found["prompts"] == 20
    checkpoint = tiny_model(tmp_path, "bfloat16")
    config = train_head.HeadConfig(
        checkpoint=str(checkpoint), out=str(small / "head"), prompts=str(small / "given.jsonl"),
        chat="vicuna", device="cpu", tokens=150,
    )  # fmt: skip
    monkeypatch.setattr(train_head, "make_plan", lambda *_: PLAN | {"tokens": 150})
    kill_at(monkeypatch, train_head, "train", 1)
    with pytest.raises(SystemExit):
        train_head.main(config=config)
    state = json.loads((small / "head" / "run.json").read_text())
    curve = json.loads((small / "head" / "training.json").read_text())["curve"]
    assert 150 <= state["tokens"] < 150 + 4 * 8, "the batch that reaches the number is the last"
    assert curve[-1]["step"] == plan.EPOCHS * state["batches"]


# --------------------------------------------------------------------------------------- the budget


def parts_of(job: train_head.Job, stage: str, part_s: float) -> int:
    """Work on a stage by the fake clock until it is over. Returns: the number of parts."""
    count = 0
    while True:
        train_head.time.now += part_s
        count += 1
        if job.over(stage):
            job.tick(stage, done=True)
            return count


def job_of(folder: Path) -> train_head.Job:
    config = train_head.HeadConfig(
        checkpoint=str(folder),
        prompts=str(folder / "given.jsonl"),
        out=str(folder / "run"),
        hours=1.0,
    )
    job = train_head.Job(config)
    job.state["plan"] = PLAN | {"seconds": dict(zip(STAGES, (900, 450, 1800, 450)))}
    job.save()
    return job


@pytest.mark.parametrize("slower", [0.2, 1, 5])
def test_every_stage_takes_its_share_on_a_machine_of_any_speed(small, monkeypatch, slower):
    """Parts were planned with 30 s; a kill in each stage loses neither time nor the share."""
    monkeypatch.setattr(train_head, "time", FakeTime())
    (small / "run").mkdir()
    job = job_of(small)
    for stage, planned_s in job.state["plan"]["seconds"].items():
        train_head.time.now += 30 * slower
        job.over(stage)
        job = job_of(small)
        count = 1 + parts_of(job, stage, 30 * slower)
        assert count == pytest.approx(planned_s / 30 / slower, rel=0.1, abs=0.5)
    assert sum(job.state["seconds"].values()) == pytest.approx(3600, rel=0.05)


# ----------------------------------------------------------------------------------------- mistakes


def measured_costs(*words) -> Known:
    """Stand in for a measurement that found COSTS."""
    known = Known(*words)
    known.costs = COSTS
    return known


def refused_run(capsys, argv: list[str]) -> str:
    return refused(capsys, train_head.main, argv, prints=True)


def test_mistakes_are_one_line(small, monkeypatch, capsys):
    checkpoint = tiny_model(small, "bfloat16")
    argv = partial(arguments, small, checkpoint)
    assert "no such directory: nowhere" in refused_run(capsys, arguments(small, Path("nowhere")))
    assert "has no chat template; use --chat NAME" in refused_run(capsys, argv(chat=""))
    assert "cannot read none.jsonl" in refused_run(capsys, argv(prompts="none.jsonl"))
    assert "--given must be" in refused_run(capsys, argv(given=1.5))
    (small / "other").mkdir()
    (small / "other" / "config.json").touch()
    assert "holds something else than a run" in refused_run(capsys, argv("other"))
    assert "is a file; name a directory" in refused_run(capsys, argv("given.jsonl"))
    assert "drop --hours" in refused_run(capsys, [*argv(), "--tokens=9000"])
    monkeypatch.setattr(train_head, "make_plan", make_plan)
    monkeypatch.setattr(train_head, "Measurement", measured_costs)
    usage = plan.shutil.disk_usage(small)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage._replace(free=2 * 10**9))
    assert "give fewer --hours" in refused_run(capsys, argv(hours=20))
    assert "free" in refused_run(capsys, argv("new/folder", hours=20))
    assert not (small / "head").exists(), "a run that cannot be planned leaves nothing"


def test_no_prompt_that_can_be_used(small, monkeypatch, capsys):
    """It is said before anything is answered."""
    monkeypatch.setattr(Known, "answers", lambda _, answers: generate_answers.open_run(answers))
    (small / "given.jsonl").write_text(json.dumps({"turns": ["Say 1."]}))
    message = refused_run(capsys, arguments(small, tiny_model(small, "bfloat16")))
    assert "can be used (given: 1 prompts, 0 used; dropped: 1 like an evaluation" in message


def test_a_run_is_of_one_target_and_its_options(small, monkeypatch, capsys):
    checkpoint = tiny_model(small, "bfloat16")
    kill_at(monkeypatch, Run, "_append", 1)
    with pytest.raises(SystemExit):
        train_head.main(arguments(small, checkpoint))
    capsys.readouterr()
    lowered = refused_run(capsys, arguments(small, checkpoint, hours=0.5))
    assert "begun with 1, which can be raised, not lowered; give --hours 1 or more" in lowered
    (small / "given.jsonl").write_text(json.dumps({"turns": ["Another?"]}))
    assert "holds another run (prompts was" in refused_run(capsys, arguments(small, checkpoint))
    with open(checkpoint / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert "changed since" in refused_run(capsys, arguments(small, checkpoint))


def test_hours_can_be_raised_until_the_head_is_trained(small):
    """A new plan is made of them while answers are written; later the stages left share them."""
    (small / "run").mkdir()
    job = job_of(small)
    assert "plan" not in train_head.Job(replace(job.config, hours=2.0)).state
    job.tick("answers", done=True)
    longer = train_head.Job(replace(job.config, hours=2.0))
    assert longer.allowed_s("training") > 1.9 * job.allowed_s("training")
    longer.tick("training", done=True)
    with pytest.raises(ValueError, match="is trained, with --hours 2; give these"):
        train_head.Job(replace(job.config, hours=3.0))


@pytest.mark.parametrize("answer", ["\n", "n\n", None])
def test_a_missed_plan_is_said_and_a_terminal_may_stop(small, monkeypatch, capsys, answer):
    """None: no terminal, or none that answers. After a stop with more hours it goes on."""
    asked = []
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: answer is not None)
    monkeypatch.setattr(
        train_head.select, "select", lambda *_: asked.append(1) or [[answer], [], []]
    )
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer)
    (small / "run").mkdir()
    job = job_of(small)
    job.check_brought("answers", 9, 10, "tokens")
    assert not asked and not capsys.readouterr().out
    if answer == "n\n":
        with pytest.raises(ValueError, match="with more than --hours 1 goes on"):
            job.check_brought("answers", 7, 10, "tokens")
    else:
        job.check_brought("answers", 7, 10, "tokens")
    assert "note: 7 of the 10 planned tokens of answers are there" in capsys.readouterr().out
    assert len(asked) == (answer is not None)
