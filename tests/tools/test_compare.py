"""scripts/compare.py on the demo: a line for every drafter, the recommended command, mistakes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from drafter_files import write_token_heads
from files.weights import load_model
from helpers import refused
from run.methods import head_kinds
from run.options import DEMO, GenerateConfig
from run.parsing import parse
from scripts import compare
from scripts.bench.measure import Series


@pytest.fixture(autouse=True)
def ceiling(monkeypatch):
    """A fixed bandwidth: measuring it takes seconds and a gigabyte."""
    monkeypatch.setattr(compare.papers, "read_bandwidth", lambda device, runs: Series.of([1e10]))


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "my prompts.jsonl"
    rows = [{"turns": ["def read_lines(path):"]}, {"turns": ["import os\n", "class Tree:"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines_of(capsys, *argv: str) -> list[str]:
    compare.main([*argv, "--max_new_tokens=8", "--device=cpu"])
    return capsys.readouterr().out.splitlines()


def test_every_drafter_at_hand_has_a_line(prompts, capsys):
    """The recommended command is one that generate.py takes, for the same prompts."""
    lines = lines_of(capsys, f"--checkpoint={DEMO}", f"--prompts={prompts}", "--temperature=0.7")
    first = next(i for i, line in enumerate(lines) if line.startswith("none: "))
    for method, line in zip((*compare.WITHOUT_HEAD, *compare.OF_KIND["eagle"]), lines[first:]):
        assert line.startswith(f"{method}: "), line
        if method != "none":
            assert " = tau " in line, line
            assert re.search(r" of a vanilla pass\); (bound by|noisy: )", line), line
            assert line.endswith("by prompt; 100 % of sequences identical"), line
    python, program, *argv = shlex.split(lines[-1])
    assert (python, program) == ("python", "generate.py")
    chosen = parse(GenerateConfig, "generate.py", "", argv)
    chosen.check()
    assert lines[-2].startswith(f"recommended, {chosen.draft}")
    assert chosen.checkpoint == DEMO and chosen.prompt_file == str(prompts)
    assert chosen.temperature == 0.7 and chosen.max_new_tokens == 8


def test_without_a_head_there_are_two(prompts, capsys, tmp_path):
    """A text file is one prompt, and a copy of the demo has no head beside it."""
    (tmp_path / "plain").symlink_to(DEMO)
    text = tmp_path / "prompt.txt"
    text.write_text("def f():\n    return 1\n\ndef g():\n")
    lines = lines_of(capsys, f"--checkpoint={tmp_path / 'plain'}", f"--prompts={text}")
    found = [line for line in lines if " of a vanilla pass)" in line]
    assert [line.partition(":")[0] for line in found] == ["ngram", "recycling"]


def test_heads_of_every_kind_are_compared(prompts, capsys, tmp_path):
    """EAGLE's and Medusa's in one run, each with the trees of its kind, under their folders' names."""
    target = load_model(Path(DEMO), torch.float32)
    (tmp_path / "medusa").mkdir()
    write_token_heads(tmp_path / "medusa", "medusa 2", target)
    folders = {"eagle": f"{DEMO}-eagle", "medusa": str(tmp_path / "medusa")}
    lines = lines_of(
        capsys,
        f"--checkpoint={DEMO}",
        f"--prompts={prompts}",
        f"--heads={','.join(folders.values())}",
    )
    found = [line for line in lines if " of a vanilla pass)" in line]
    want = [f"{m}:head={folder}" for kind, folder in folders.items() for m in compare.OF_KIND[kind]]
    assert len(found) == 2 + len(want), found
    for start, line in zip(want, found[2:]):
        assert line.startswith(start) and line.endswith("; 100 % of sequences identical"), line


def test_every_kind_of_head_has_methods():
    assert set(compare.OF_KIND) == set(head_kinds())
    for kind, methods in compare.OF_KIND.items():
        assert all(method.startswith(kind) for method in methods)


def test_the_fastest_is_recommended():
    rows = [
        {"method": method, "tokens": tokens, "decode_s": 2.0}
        for method, tokens in (("none", 20), ("ngram", 19), ("eagle:auto", 40), ("eagle", 40))
    ]
    assert compare.fastest(rows)["method"] == "eagle:auto"
    assert compare.fastest(rows[:2])["method"] == "none", "drafting does not pay"
    nothing = [{"method": "none", "tokens": 0, "decode_s": 0.0}]
    assert compare.fastest(nothing)["method"] == "none"


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "--prompts is missing; name a file with your prompts"),
        (["--prompts=none.jsonl"], "--prompts: cannot read none.jsonl"),
        (["--prompts={bad}"], "row 1 has no list of texts"),
        (["--prompts={good}", "--head=none"], "no such directory: none"),
        (["--prompts={good}", f"--heads={DEMO}-eagle,{DEMO}"], "holds a model, and no head"),
        (
            ["--prompts={good}", "--heads={folder}"],
            "a method is divided by : and ,; give it another",
        ),
        (["--prompts={good}", "--context=9"], "no prompt of prompts has at most"),
    ],
)
def test_mistakes_are_one_line(prompts, argv, message, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n')
    (tmp_path / "a:b").mkdir()
    given = [text.format(bad=bad, good=prompts, folder=tmp_path / "a:b") for text in argv]
    argv = [f"--checkpoint={DEMO}", "--device=cpu", "--max_new_tokens=8", *given]
    assert message in refused(capsys, compare.main, argv, prints=True)
