"""The one command that trains a head: kills in every stage, the hours by the clock, the card, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers import refused, write_random_llama
from run.library import generate
from run.load import load
from run.options import DEMO
from scripts import train_head
from scripts.bench import common
from scripts.bench import speed as bench_speed
from scripts.train import data, generate_answers, prompts, train_eagle, training
from scripts.train.generate_answers import Run

MODULE = '\ndef plain(x):\n    """Return it."""\n    return x\n'


def tiny_model(folder: Path) -> Path:
    """A random LLaMA of two layers with the demo's tokenizer."""
    (folder / "plain").mkdir()
    write_random_llama(folder / "plain")
    shutil.copy(Path(DEMO, "tokenizer.model"), folder / "plain")
    (folder / "plain" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    return folder / "plain"


class FakeTime:
    """Stand in for the module `time`; every reading takes some seconds."""

    def __init__(self, reading_s: float = 0.0):
        self.now = 0.0
        self.reading_s = reading_s

    def perf_counter(self) -> float:
        self.now += self.reading_s
        return self.now


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Everything of a run is small: few prompts, short answers, an epoch, one task; and a reading of the clock 30 s."""
    rows = [{"turns": [f"What is {i}?"]} for i in range(30)]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"id": i, "task": "tiny", "turns": [f"Say {i}."]} for i in range(2)]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    clock = FakeTime(30.0)
    common_options = train_head.COMMON | {"seq_len": 32, "eval_prompts": 2}
    ceiling = common.Series.of([1e9])
    for owner, name, value in (
        (torch, "compile", lambda f, **options: f),
        (prompts, "modules", lambda: [MODULE]),
        (prompts, "TASK_FILE", tmp_path / "tiny.jsonl"),
        (prompts, "long_texts", lambda words: []),
        (data, "held_out", lambda name: name.endswith("1?")),
        (training, "OWN_TOKENS", 24),
        (training, "time", clock),
        (generate_answers, "OWN_TOKENS", 4),  # the model ends none of its prompts
        (generate_answers, "ANSWER_TOKENS", 8),
        (generate_answers, "EVAL", tmp_path / "none"),
        (train_head, "COMMON", common_options),
        (train_head, "TASKS", str(tmp_path / "tiny.jsonl")),
        (train_head, "METHODS", "none,{}:chain:tree_depth=2"),
        (train_head, "LEAST_TOKENS", 50),
        (train_head, "time", clock),
        (bench_speed, "read_bandwidth", lambda device, runs: ceiling),
    ):
        monkeypatch.setattr(owner, name, value)
    for name in ("HASS", "EAGLE-3"):
        monkeypatch.setitem(train_head.RECIPES[name][1], "draft_vocab", 64)
    return tmp_path


def arguments(folder: Path, model: Path, **changes) -> list[str]:
    options = {
        "checkpoint": model, "out": folder / "head", "hours": 1, "chat": "vicuna", "device": "cpu",
        "prompts": folder / "given.jsonl", "answers": 4, "batch_size": 2,
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


def check_head(folder: Path, checkpoint: Path, draft: str = "eagle") -> None:
    """The directory is whole: `--head` takes it, and tokens are vanilla's."""
    info = json.loads((folder / "training.json").read_text())
    assert info["config"]["steps"] == info["curve"][-1]["step"] >= 10
    seconds = info["run"]["seconds"]
    assert seconds["training"] > 300 and sum(seconds.values()) < 3900, seconds
    assert [row["method"] for row in info["evaluation"]] == ["none", f"{draft}:chain:tree_depth=2"]
    card = (folder / "README.md").read_text()
    for text in ("licence: apache-2.0", "\ngiven: ", "| tiny |", "of a vanilla pass)"):
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
    checkpoint = tiny_model(small)
    kill_at(monkeypatch, Run, "_write", 5)
    kill_at(monkeypatch, data.Features, "of", 3)
    kill_at(monkeypatch, training.Training, "save", 2)
    kill_at(monkeypatch, bench_speed, "run_round", 1)
    kills = 0
    done = []
    while len(done) < len(train_head.STAGES):
        try:
            train_head.main(arguments(small, checkpoint))
        except SystemExit as stop:
            assert stop.code == 130
            kills += 1
        done = json.loads((small / "head" / "run.json").read_text())["done"]
    assert kills == 4 and done == list(train_head.STAGES)
    shown = capsys.readouterr().out
    assert shown.count("answers;") == 2 and shown.count("training;") == 3
    assert "answer tokens, " in shown and ", for HASS" in shown
    check_head(small / "head", checkpoint)
    train_head.main(arguments(small, checkpoint))
    assert "are spent" not in capsys.readouterr().out, "nothing is left to do"


def test_a_block_drafter(small):
    checkpoint = tiny_model(small)
    train_head.main(arguments(small, checkpoint, kind="dflash2"))
    check_head(small / "head", checkpoint, "block")
    keys = json.loads((small / "head" / "config.json").read_text())["dflash_config"]
    assert keys["selector_rank"] == 64 and keys["block_size"] == 6
    card = (small / "head" / "README.md").read_text()
    assert "- Training: DFlash2, " in card and "block:auto, the default," in card
    assert "of 64 tokens, " in card


def test_a_head_goes_on_by_tokens(small):
    """Their number is what is trained on, whatever the hours; an EAGLE-3 head is the start."""
    checkpoint = tiny_model(small)
    options = {"threads": 0, "batch_size": 2, "steps": 2, "eval_every": 2, "seq_len": 32}
    first = small / "first"
    text = "".join(f"{i} and so on, " for i in range(300))
    (small / "texts.jsonl").write_text((json.dumps({"text": text}) + "\n") * 2)
    config = train_eagle.TrainConfig(
        checkpoint=str(checkpoint), data=str(small / "texts.jsonl"), chat="vicuna", out=str(first),
        version=3, unroll=1, device="cpu", draft_vocab=64, eval_prompts=1, **options,
    )  # fmt: skip
    training.train(training.ready(config, train_eagle.EAGLE))
    argv = [a for a in arguments(small, checkpoint, init=first) if not a.startswith("--hours")]
    config = train_head.read_command([*argv, "--tokens=8000"])
    train_head.main(config=train_head.replace(config, tokens=150))
    state = json.loads((small / "head" / "run.json").read_text())
    info = json.loads((small / "head" / "training.json").read_text())
    assert 150 <= state["tokens"] < 150 + 4 * 8 and state["recipe"] == "EAGLE-3"
    assert [row["step"] for row in info["curve"]][0] == 0, "the start is evaluated, too"
    assert info["curve"][-1]["step"] == train_head.EPOCHS * state["batches"]


# ----------------------------------------------------------------------------------------- the hours


def job_of(small: Path, **options) -> train_head.Job:
    (small / "run").mkdir(exist_ok=True)
    paths = {"prompts": str(small / "given.jsonl"), "out": str(small / "run")}
    return train_head.Job(train_head.HeadConfig(checkpoint=str(small), **paths | options))


@pytest.mark.parametrize("hours, rate", [(1.0, 20.0), (4.0, 1.0), (4.0, 500.0)])
def test_answers_take_their_share_of_the_hours(small, monkeypatch, capsys, hours, rate):
    """And bring as many tokens as was said; a kill loses no time; hours may be changed."""
    monkeypatch.setattr(train_head, "time", FakeTime(10.0))
    job = job_of(small, hours=1.0)
    are_over = train_head.answers_are_over(job)
    looks = 0
    while not are_over(int(looks * 10 * rate)):
        looks += 1
        if looks % 50 == 7:
            job.save()
            job = job_of(small, hours=hours)
            are_over = train_head.answers_are_over(job)
    tokens = looks * 10 * rate
    assert job.tick("answers") == pytest.approx(0.3 * 3600 * hours, abs=30)
    said = [line for line in capsys.readouterr().out.splitlines() if "expected" in line]
    assert int(said[-1].split("expected: ")[1].split(",")[0]) == pytest.approx(tokens, rel=0.1)
    assert said[-1].endswith("EAGLE-3" if tokens >= 220_000 else "HASS")


def test_hours_that_cannot_suffice_are_refused(small, monkeypatch):
    """Once the rate of the answers is known, or where their time is over."""
    monkeypatch.setattr(train_head, "LEAST_TOKENS", 8000)
    monkeypatch.setattr(train_head, "time", FakeTime(10.0))
    for hours, least in ((0.5, r"7\.\d"), (0.02, r"1\d\.\d")):
        are_over = train_head.answers_are_over(job_of(small, hours=hours))
        message = rf"--hours {hours} is too short .* goes on with --hours {least} or more"
        with pytest.raises(ValueError, match=message):
            for look in range(40):
                are_over(look * 10)
        (small / "run" / "run.json").unlink()


def test_a_card_says_what_is_fastest():
    rows = [
        {"method": method, "task": task, "speedup": speedup}
        for task, speedups in (("a", (1.0, 1.4, 0.5)), ("b", (1.0, 0.8, None)))
        for method, speedup in zip(("none", "eagle:auto", "eagle:chain"), speedups)
    ]
    assert train_head.speed(rows) == (
        "eagle:auto has 1.10 of vanilla decoding here, the mean over the tasks; without the head, "
        "none has 1.00: the head adds less than the tasks differ by; give it more hours"
    )
    assert train_head.speed(rows[:1] + rows[2:3]).startswith("no method is faster")
    config = train_head.HeadConfig(checkpoint="model", out="mine")
    assert "--checkpoint model --head mine" in train_head.use(config, rows)
    slower = [{"method": "ngram", "task": task, "speedup": 1.05} for task in "ab"]
    sure = [{"method": "eagle:dynamic", "task": task, "speedup": 1.1} for task in "ab"]
    assert train_head.speed(sure + slower).endswith("without the head, ngram has 1.05")
    rows += [{"method": "ngram", "task": task, "speedup": 1.2} for task in "ab"]
    assert train_head.speed(rows) == (
        "ngram has 1.20 of vanilla decoding here, the mean over the tasks; with the head, "
        "eagle:auto has 1.10: it is not recommended"
    )
    assert "--draft ngram --chat" in train_head.use(config, rows)


# ----------------------------------------------------------------------------------- another run


def test_a_run_is_of_one_target_and_its_options(small, monkeypatch, capsys):
    checkpoint = tiny_model(small)
    argv = arguments(small, checkpoint)
    kill_at(monkeypatch, Run, "_write", 1)
    with pytest.raises(SystemExit):
        train_head.main(argv)
    given = (small / "given.jsonl").read_text()
    (small / "given.jsonl").write_text(json.dumps({"turns": ["Another?"]}))
    said = "holds another run ({} was"
    assert said.format("prompts") in refused(capsys, train_head.main, argv, prints=True)
    (small / "given.jsonl").write_text(given)
    with open(checkpoint / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert said.format("weights") in refused(capsys, train_head.main, argv, prints=True)
    other = arguments(small, checkpoint, kind="dflash2")
    assert "(kind was 'eagle', not 'dflash2')" in refused(
        capsys, train_head.main, other, prints=True
    )
