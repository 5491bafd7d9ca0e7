"""The scripts on a mixture of experts: which experts trees touch, and a benchmark of a Mixtral."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import plot_experts
import pytest
import torch
from scripts.bench.plot_experts import Routes, independent, replay

from draft_tree import DynamicTree, StaticTree
from eagle_draft import EagleDrafter
from helpers import engine_for, golden_head, golden_target, record
from hf.weights import load_model
from model import ModelConfig, Router, Transformer
from options import DEMO
from sampling import Sampling
from scripts.bench import papers as bench
from scripts.bench.measure import Series, pass_bytes
from scripts.bench.papers import BenchConfig
from scripts.train import train_demo, train_eagle
from session import Session


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random Mixtral of 8 experts and a random head for it, with the demo's tokenizer."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("pair") / "moe"
    out.mkdir()
    config = train_demo.TrainConfig(out=str(out), moe=True, dim=64, n_layers=2, ffn_dim=64, device="cpu")
    model = Transformer(config.model())
    train_demo.init_weights(model)
    train_demo.save_checkpoint(model, config, {"curve": []})
    shutil.copyfile(Path(DEMO, "tokenizer.model"), out / "tokenizer.model")
    settings = train_eagle.TrainConfig(checkpoint=str(out), out=f"{out}-eagle", init="feature")
    Path(settings.out).mkdir()
    train_eagle.save_head(train_eagle.make_head(settings, model, []), settings, {"curve": []})
    return out


# -------------------------------------------------------------------------------------- experts touched


@pytest.mark.parametrize("tree", [DynamicTree(depth=6, topk=10, size=20), StaticTree.chain(19)], ids=["tree", "chain"])
def test_a_replay_finds_the_routes_of_the_decoding(tree, monkeypatch):
    target = golden_target("models/target_mixtral")
    head = golden_head("models/head_eagle12_mixtral", target)
    engine = engine_for(target, EagleDrafter(head, target, tree, Sampling()), max_new_tokens=30, ignore_eos=True)
    prompt = [5, 17, 3, 40, 8, 22, 61]
    with monkeypatch.context() as patch:
        calls = record(patch, Router, "forward")
        session = Session(engine, [(0, 0)])
        list(session.run([prompt]))
    passes = [call.result[0][0] for call in calls if call.args[1].shape[1] == 20]  # verifications, layer by layer
    want = [torch.stack(passes[i : i + 2]) for i in range(0, len(passes), 2)][: len(session.trace)]
    assert len(want) > 4
    found = list(replay(target, session.history[0], session.trace))[::-1]
    assert len(found) == len(want)
    assert all(torch.equal(routes.expert, expert) for routes, expert in zip(found, want))


def test_what_is_counted():
    expert = torch.tensor([[[0, 1], [1, 0], [0, 1]], [[0, 1], [2, 3], [0, 7]]])
    assert Routes(expert, torch.zeros(2, 3)).touched().tolist() == [2, 5]
    assert [round(independent(m, 8, 2), 1) for m in (1, 2, 4, 6, 8, 16)] == [2, 3.5, 5.5, 6.6, 7.2, 7.9]


def test_the_margin_is_that_of_the_last_choice():
    target = golden_target("models/target_mixtral")
    ids = [5, 17, 3, 40]
    (routes,) = replay(target, ids, [{"pos": 3, "root": 40, "draft_tokens": [9], "parents": [0]}])
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch, Router, "logits")
        target(torch.tensor([[*ids, 9]]), torch.arange(5)[None])
    best = torch.stack([call.result[0, 3:] for call in calls]).sort(descending=True).values  # [L, N, E]
    torch.testing.assert_close(routes.margin, best[..., 1] - best[..., 2], atol=1e-5, rtol=0)


def test_a_pass_reads_the_experts_that_are_touched(pair):
    target = load_model(pair)
    experts = 8 * 3 * 64 * 64 * 2 * 2  # in two layers, in bf16
    assert pass_bytes(target, 0, 8.0) - pass_bytes(target, 0) == 0.75 * experts
    assert pass_bytes(target, 0, 5.0) - pass_bytes(target, 0, 4.0) == experts / 8
    everything = sum(x.nbytes for x in (*target.parameters(), *target.buffers()))
    assert pass_bytes(target, 0, 8.0) == everything - 4095 * 64 * 2


def test_dense_layers_route_nothing():
    config = ModelConfig(64, 3, 4, 2, 16, 96, 50, n_experts=8, experts_per_token=2, expert_dim=32, dense_layers=(1,))
    target = Transformer(config).requires_grad_(False)
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    (routes,) = replay(target, [5, 17, 3, 40], [{"pos": 3, "root": 40, "draft_tokens": [9], "parents": [0]}])
    assert routes.expert.shape == (2, 2, 2) and routes.margin.shape == (2, 2)
    assert pass_bytes(target, 0, 8.0) - pass_bytes(target, 0, 7.0) == 2 * 3 * 32 * 64 * 4


def plot(monkeypatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_experts.py", *argv])
    plot_experts.main()


def test_numbers_and_a_picture(pair, monkeypatch, tmp_path, capsys):
    files = ("--json", str(tmp_path / "e.json"), "--out", str(tmp_path / "e.png"))
    sizes = ("--dynamic", "4,12", "--chains", "2", "--limit", "1", "--max_new_tokens", "6", "--dtype", "float32")
    plot(monkeypatch, "--checkpoint", str(pair), *sizes, *files)
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "e.json").read_text())
    rows = record["rows"]
    assert [(row["tree"], row["nodes"]) for row in rows] == [("dynamic", 4), ("dynamic", 12), ("chain", 2)]
    assert record["experts"] == 8 and record["prompts"] == 4
    for row in rows:
        assert 2 <= row["quartiles"][0] <= row["quartiles"][1] <= min(8, 2 * row["nodes"])
        assert row["touched"] == pytest.approx(sum(row["by_layer"]) / 2) and len(row["by_layer"]) == 2
        assert row["most"] == pytest.approx(row["tau"] / row["pass_bytes"]) and row["pass_bytes"] > 1
        assert row["tree"] + " | " + str(row["nodes"]) in shown
        shares = list(row["margins_below"].values())
        assert shares == sorted(shares) and 0 < shares[-1] <= 1
    assert rows[0]["touched"] < rows[1]["touched"]
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("argv, says", [
    (["--checkpoint", DEMO, "--dynamic", "4"], "is dense; name a mixture of experts"),
    (["--dynamic", "1"], "--dynamic must be numbers from 2 to 64, as 4,8,16; it has '1'"),
    (["--dynamic", "", "--chains", "x"], "--chains must be numbers"),
    (["--dynamic", "", "--chains", ""], "nothing to draft"),
    (["--out", "nowhere/e.png"], "--out: cannot write nowhere/e.png"),
    (["--limit", "-1"], "--limit must be at least 0; it is -1"),
    (["--checkpoint", "nowhere"], "no such directory: nowhere"),
    (["--eagle", DEMO], "use the head made for this target"),
])  # fmt: skip
def test_mistakes_are_one_line(pair, monkeypatch, capsys, argv, says):
    with pytest.raises(SystemExit) as stop:
        plot(monkeypatch, *(["--checkpoint", str(pair)] if "--checkpoint" not in argv else []), *argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and says in err, err


# -------------------------------------------------------------------------------------------- benchmark


def test_a_benchmark_of_a_mixture(pair, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "read_bandwidth", lambda device, runs: Series(1e10, 1e10, 1e10))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "a-1", "task": "a", "turns": ["def read_lines(path):"]}))
    options = {"checkpoint": str(pair), "tasks": str(tasks), "max_new_tokens": 12, "device": "cpu", "traced": 1}
    methods = "none,eagle:chain:tree_depth=3,eagle:static,eagle:dynamic"
    config = BenchConfig(methods=methods, quant="none,int8", json=str(tmp_path / "log.jsonl"), **options)
    rows = bench.run(replace(config, dtype="float32"))
    assert [(row["quant"], row["method"]) for row in rows] == [
        (q, m) for q in ("none", "int8") for m in methods.split(",")
    ]
    assert all(row["identical"] == 1.0 for row in rows if row["quant"] == "none")
    assert all(0 <= row["identical"] <= 1 for row in rows)
    target = load_model(pair, torch.float32)
    for row in rows[:4]:  # at least the experts of one token are read
        assert row["verify_of_ceiling"] == pytest.approx(pass_bytes(target, 0) / (row["verify_ms"] / 1e3) / 1e10)
    bench.write_report(rows, str(tmp_path / "table.md"), str(tmp_path / "plots"))
    assert "identical" in (tmp_path / "table.md").read_text() and (tmp_path / "plots/time.png").is_file()
