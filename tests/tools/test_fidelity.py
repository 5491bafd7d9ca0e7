"""The fidelity of formats: rows on the demo, pieces of a text, others' directories, and mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from files.rounding import quantize_directory
from files.tokenizer import Tokenizer
from helpers import refused
from quantize import Quantization
from run.options import DEMO
from scripts.bench import fidelity


def command(monkeypatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--checkpoint", DEMO, *flags])
    fidelity.main()


def test_rows_lie_as_far_from_fp32_as_their_formats(tmp_path, monkeypatch, capsys):
    load = fidelity.load
    monkeypatch.setattr(fidelity, "load", lambda **options: load(**options | {"compile": False}))
    quantize_directory(Path(DEMO), tmp_path / "other", Quantization("int8"))
    (tmp_path / "a.txt").write_text("def read_lines(path):\n    return open(path)\n" * 40)
    flags = ("--text", str(tmp_path / "a.txt"), "--also", str(tmp_path / "other"))
    command(monkeypatch, *flags, "--json", str(tmp_path / "found.json"))
    rows = {r["row"]: r for r in json.loads((tmp_path / "found.json").read_text())["fidelity"]}
    own = [rows[name] for name in ("bfloat16", "--quant int8", "--quant int4")]
    assert 0 < own[0]["kl"] < own[1]["kl"] < own[2]["kl"] < 0.5
    assert all(row["rms"] > 0 and 0.6 < row["best"] <= 1 and row["ppl"] > 1 for row in own)
    assert rows["other"] == rows["--quant int8"] | {"row": "other"}
    in_8_bits = rows["bfloat16, --kv int8"]
    assert own[0]["kl"] < in_8_bits["kl"] < own[2]["kl"], "the cache alone is rounded"
    assert len(rows) == 5 and "| other | " in capsys.readouterr().out


def test_equal_logits_and_a_perplexity_by_hand():
    logits = torch.randn(5, 7)
    found = fidelity.compare_logits([logits], [logits + 3.0], [[0, 1, 2, 3, 4]])
    loss = -sum(logits[i].log_softmax(-1)[i + 1] for i in range(4)) / 4
    assert found.rms == pytest.approx(0, abs=1e-6) and found.kl == pytest.approx(0, abs=1e-6)
    assert found.best == 1 and found.ppl == pytest.approx(float(loss.exp()))


def test_right_answers_are_whole_words():
    assert fidelity.is_right("It is PARIS, of course.", ["paris"])
    assert not fidelity.is_right("comparison", ["paris"]) and not fidelity.is_right("12", ["1"])


def test_prompts_are_of_every_task_or_pieces_of_the_text(tmp_path):
    tokenizer = Tokenizer.load(Path(DEMO))
    prompts = fidelity.read_prompts(tokenizer, 2, "")
    assert len(prompts) == 2 * len(fidelity.TASKS)
    (tmp_path / "a.txt").write_text("x = 1\n" * 500)
    pieces = fidelity.read_prompts(tokenizer, 2, str(tmp_path / "a.txt"))
    assert [len(piece) for piece in pieces] == [fidelity.TOKENS] * 2


@pytest.mark.parametrize("flags, message", [
    (["--text", "nowhere.txt"], "--text: cannot read nowhere.txt (FileNotFoundError)"),
    (["--text", "short.txt"], "--text: short.txt has 2 tokens; give it 200 or more"),
    (["--also", "GOLDEN"], "has 97 tokens and checkpoints/demo has 4096; name a copy of it"),
    (["--json", "nowhere/x"], "--json: cannot write nowhere/x; there is no directory"),
])  # fmt: skip
def test_mistakes_are_one_line(flags, message, tmp_path, monkeypatch, capsys):
    golden = str(Path(__file__).parents[1] / "golden/models/target_llama_mha")
    (tmp_path / "short.txt").write_text("x")
    flags = [flag.replace("GOLDEN", golden).replace("short", f"{tmp_path}/short") for flag in flags]
    said = refused(capsys, command, monkeypatch, *flags, prints=True)
    assert message in said.replace(f"{tmp_path}/", "").replace(str(fidelity.ROOT) + "/", "")
