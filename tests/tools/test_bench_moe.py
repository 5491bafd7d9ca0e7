"""A benchmark of a mixture of experts: every method, and the experts that a pass reads at least."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import write_random_llama
from hf.weights import load_model
from options import DEMO
from scripts.bench import papers as bench
from scripts.bench.measure import Series, pass_bytes
from scripts.bench.papers import BenchConfig
from scripts.train import train_eagle


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random Mixtral of 8 experts and a random head for it, with the demo's tokenizer."""
    out = tmp_path_factory.mktemp("pair") / "moe"
    out.mkdir()
    model = write_random_llama(out, n_experts=8, experts_per_token=2)
    shutil.copyfile(Path(DEMO, "tokenizer.model"), out / "tokenizer.model")
    settings = train_eagle.TrainConfig(checkpoint=str(out), out=f"{out}-eagle", init="feature")
    Path(settings.out).mkdir()
    train_eagle.save_head(train_eagle.make_head(settings, model, []), settings, {"curve": []})
    return out


def test_a_benchmark_of_a_mixture(pair, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "read_bandwidth", lambda device, runs: Series(1e10, 1e10, 1e10))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "a-1", "task": "a", "turns": ["def read_lines(path):"]}))
    options = {
        "checkpoint": str(pair),
        "tasks": str(tasks),
        "max_new_tokens": 12,
        "device": "cpu",
        "traced": 1,
    }
    methods = "none,eagle:chain:tree_depth=3,eagle:dynamic"
    config = BenchConfig(
        methods=methods, quant="none,int8", json=str(tmp_path / "log.jsonl"), **options
    )
    rows = bench.run(replace(config, dtype="float32"))
    assert [(row["quant"], row["method"]) for row in rows] == [
        (q, m) for q in ("none", "int8") for m in methods.split(",")
    ]
    assert all(row["identical"] == 1.0 for row in rows if row["quant"] == "none")
    assert all(0 <= row["identical"] <= 1 for row in rows)
    target = load_model(pair, torch.float32)
    for row in rows[:3]:  # at least the experts of one token are read
        assert row["verify_of_ceiling"] == pytest.approx(
            pass_bytes(target, 0) / (row["verify_ms"] / 1e3) / 1e10
        )
    bench.write_report(rows, str(tmp_path / "table.md"), str(tmp_path / "plots"))
    assert (
        "identical" in (tmp_path / "table.md").read_text()
        and (tmp_path / "plots/calibration.png").is_file()
    )
