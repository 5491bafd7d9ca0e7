"""Distilling a draft model: the divergences in plain Python, training to files that draft, wrong options."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from drafters import RootOnly
from extras.model_draft import load_drafter
from helpers import GOLDEN, decode, engine_for, golden_target
from hf.checkpoint import Quantization
from hf.weights import load_model
from options import GenerateConfig
from quantize import quantize_directory
from scripts.train import distill, train_eagle
from scripts.train.acceptance import evaluate
from scripts.train.distill import DIVERGENCES, DistillConfig, divergence, method_of
from scripts.train.train_eagle import Example, ready, train

TARGET = GOLDEN / "models/target_llama_mha"


def plain(kind: str, p: list[float], q: list[float]) -> float:
    """A divergence of two distributions on Python numbers."""
    pairs = list(zip(p, q))
    if kind == "forward":
        return sum(a * math.log(a / b) for a, b in pairs)
    if kind == "reverse":
        return sum(b * math.log(b / a) for a, b in pairs)
    return 1 - sum(min(a, b) for a, b in pairs)  # the share that is rejected


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergences(kind):
    p, q = 2 * torch.randn(2, 20, 7, generator=torch.Generator().manual_seed(0))
    want = [plain(kind, a.softmax(0).tolist(), b.softmax(0).tolist()) for a, b in zip(p, q)]
    torch.testing.assert_close(divergence(kind, p, q), torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert divergence(kind, p, p).abs().max() < 1e-6


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Texts of the target's own."""
    options = {"batch_size": 8, "temperature": 0.7, "max_new_tokens": 50, "ignore_eos": True}
    engine = engine_for(golden_target(), RootOnly(), **options)
    return decode(engine, *[[5 + i, 17, 3] for i in range(8)]).history


def configured(out: Path, **options) -> DistillConfig:
    common = {
        "checkpoint": str(TARGET), "layers": 1, "steps": 16, "warmup": 2, "batch_size": 4, "seq_len": 48, "lr": 1e-2,
        "eval_every": 8, "dtype": "float32", "device": "cpu", "out": str(out),
    }  # fmt: skip
    return DistillConfig(**common | options)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_training_writes_a_draft_model(kind, texts, tmp_path, monkeypatch):
    """The loss falls, the files draft, alpha is that of the decode loop, and the tokens are vanilla's."""
    examples = [Example(ids, [i > 2 for i in range(len(ids))]) for ids in texts]
    monkeypatch.setattr(train_eagle, "prepare", lambda *_: (examples, [(3, texts[0])]))
    config = configured(tmp_path, divergence=kind)
    train(config, ready(config, method_of(config)))
    first, last = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert last["entropy 0"] < first["entropy 0"]
    target = golden_target()
    options = {"checkpoint": str(TARGET), "draft_checkpoint": str(tmp_path), "quant_draft": "none"}
    drafter = load_drafter(target, GenerateConfig(draft="model", tree="chain", **options))
    own = torch.tensor([texts[0]])
    model = distill.DraftModel(target, 1)
    model.load_state_dict({name: drafter.model.get_parameter(name) for name in model.state_dict()})
    steps = torch.arange(own.shape[1])[None]
    want = drafter.model.logits(drafter.model(own, steps))
    torch.testing.assert_close(model.logits(target, own), want)
    assert evaluate(model, target, [(3, texts[0])], distill.draft)["tau"] == last["tau"]
    for temperature in (0.0, 1.0):
        same = {"temperature": temperature, "max_new_tokens": 20, "ignore_eos": True}
        drafted = decode(engine_for(target, drafter, **same), texts[1][:4])
        assert (
            drafted.history == decode(engine_for(target, RootOnly(), **same), texts[1][:4]).history
        )


def test_as_many_layers_as_the_target_are_refused():
    count = golden_target().config.n_layers
    with pytest.raises(ValueError, match=f"--layers must be fewer than the target's {count}; it"):
        distill.DraftModel(golden_target(), count)


def test_a_quantized_target_is_refused(tmp_path):
    quantize_directory(TARGET, tmp_path / "int8", Quantization("int8"))
    with pytest.raises(
        ValueError, match="is quantized; distil from the floats that it was made of"
    ):
        distill.DraftModel(load_model(tmp_path / "int8"), 1)
