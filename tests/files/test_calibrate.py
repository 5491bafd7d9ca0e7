"""Calibration on bundled text, and rounding with error feedback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantize
from files.calibrate import (
    CODE_AND_PROSE,
    WIDTH,
    Recorder,
    calibration_text,
    encode_calibrated,
    moments_of,
    second_moments,
)
from files.checkpoint import WeightFiles
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import GOLDEN
from quantize import Int4, Linear, Quantization
from run.load import load
from run.options import DEMO

TARGET = GOLDEN / "models/target_llama_mha"  # fp32, no tokenizer
INT4 = Quantization("int4", 32)


def correlated(k: int, rows: int = 512) -> Tensor:
    """Inputs of some common factors and two large ones, [rows, k]."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=g) @ torch.randn(8, k, generator=g)
    x += torch.randn(rows, k, generator=g)
    x[:, 5] *= 30
    x[:, k - 2] *= 10
    return x


def moments_between(x: Tensor) -> list[Tensor]:
    return [part.T @ part for part in x.split(WIDTH, 1)]


def squares(error: Tensor, x: Tensor) -> Tensor:
    return (x @ error.T).square().sum()


@pytest.mark.parametrize("group, k", [(32, 128), (64, WIDTH + 128), (128, 128)])
def test_feedback_makes_outputs_closer(group, k):
    """Of an input's error, the inputs behind it in the same WIDTH make up for a part."""
    weight, x = torch.randn(40, k, generator=torch.Generator().manual_seed(0)), correlated(k)
    codes, scale = encode_calibrated(weight, group, moments_between(x))
    assert codes.dtype == torch.int8 and codes.min() >= -8 and codes.max() <= 7
    assert scale.shape == (40, k // group) and scale.dtype == torch.bfloat16
    plain = quantize.decode(*Int4.encode(weight, group)) - weight
    assert squares(quantize.decode(codes, scale) - weight, x) < 0.3 * squares(plain, x)


def test_moments_are_those_of_the_model():
    """Those that a pass over the complete model sees, of each token divided by its size."""
    model = load_model(TARGET)
    ids = torch.randint(0, 97, (6, 12), generator=torch.Generator().manual_seed(0))
    found = dict(second_moments(model, ids))
    assert all(not isinstance(module, Recorder) for module in model.modules())
    linear = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    assert list(found) == list(linear)
    seen: dict[str, Tensor] = {}
    for name, layer in linear.items():
        layer.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0]}))
    with torch.inference_mode():
        model.logits(model(ids, torch.arange(12).expand(6, -1)))
    for name, x in seen.items():
        rows = x.flatten(0, 1) / x.flatten(0, 1).square().mean(1, keepdim=True).sqrt()
        torch.testing.assert_close(found[name][0], rows.T @ rows, rtol=1e-3, atol=1e-3)


def test_the_text_is_of_several_kinds_and_always_the_same():
    ids = calibration_text(Path(DEMO))
    assert ids.shape == (32, 256) and len(ids.unique()) > 800
    text = CODE_AND_PROSE.read_bytes()
    told = "weights in caches are made of it: a new text needs a new VERSION (files/rounding.py)"
    assert hashlib.sha256(text).hexdigest()[:8] == "5ec1a480", told


def calibrated(path: Path, out: Path) -> Path:
    """Write a model in int4, by the moments of its inputs."""
    quantize_directory(path, out, INT4, moments=moments_of(path))
    return out


def test_on_load_the_cache_holds_the_weights(short_demo, tmp_path, monkeypatch, capsys):
    """Those of the files that are there: others with the same name are calibrated anew."""
    path = shutil.copytree(short_demo, tmp_path / "demo")
    saved = load_model(calibrated(path, tmp_path / "saved"))
    cache = tmp_path / "quantized"
    monkeypatch.setattr("files.rounding.cache_folder", lambda: tmp_path)
    options = {"checkpoint": str(path), "quant": "int4", "group_size": 32, "draft": "none"}
    first = load(**options, device="cpu")
    assert "weights in int4 are stored in" in capsys.readouterr().err
    (kept,) = cache.glob("[!.]*")
    again = load(**options, device="cpu")
    assert "kept in" not in capsys.readouterr().err and list(cache.glob("[!.]*")) == [kept]
    for engine in (first, again):
        state = engine.target.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in saved.state_dict().items())
        assert (engine.config.quant, engine.config.group_size) == ("int4", 32)
    os.utime(path / "model.safetensors", (1, 1))
    monkeypatch.setattr("files.rounding.moments_of", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(**options, device="cpu")


def tied_demo(folder: Path) -> Path:
    """The demo, with its embedding as LM head, and three layers."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": True, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        if name.startswith(("model.layers", "lm_head")) and ".layers.0." not in name:
            del weights[name]
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_tied_head_is_calibrated_too(tmp_path):
    """It is written apart, and the embedding stays as it was."""
    path = tied_demo(tmp_path / "in")
    stored = WeightFiles(calibrated(path, tmp_path / "out"))
    assert stored.config["tie_word_embeddings"] is False
    original = WeightFiles(path).read("model.embed_tokens.weight")
    assert torch.equal(stored.read("model.embed_tokens.weight"), original)
    assert "lm_head.weight_scale" in stored.readers
    model = load_model(tmp_path / "out")
    assert model.lm_head.format == "int4"
    error = (model.lm_head.dequantize() - original.float()).square().mean()
    assert error < 0.02 * original.float().square().mean()


def test_without_a_tokenizer_one_line_says_so(tmp_path, capsys):
    calibrated(TARGET, tmp_path / "out")
    said = capsys.readouterr().err
    assert said.count("has no tokenizer, so that int4 is rounded without calibration") == 1
    quantize_directory(TARGET, tmp_path / "plain", INT4)
    ours = load_model(tmp_path / "out").state_dict()
    theirs = load_model(tmp_path / "plain").state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def changed(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """Change a weight of a layer."""
    weights = load_file(path / "model.safetensors")
    weights[f"model.layers.0.mlp.{name}"] = change(weights[f"model.layers.0.mlp.{name}"])
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize("quant", [INT4, Quantization("int8")], ids=lambda quant: quant.format)
def test_weights_that_are_no_numbers_are_named(tmp_path, quant):
    path = tied_demo(tmp_path / "in")
    changed(path, "down_proj.weight", lambda w: w.index_fill(1, torch.tensor([5]), float("nan")))
    says = r"model\.layers\.0\.mlp\.down_proj\.weight has weights that are NaN or infinite"
    with pytest.raises(ValueError, match=says):
        quantize_directory(path, tmp_path / "plain", quant)
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_directory(path, tmp_path / "out", quant, moments=moments_of(path))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_layer_without_inputs_is_named(tmp_path, capsys):
    """Its gate is closed on all of the text: down has nothing to go by."""
    path = changed(tied_demo(tmp_path / "in"), "up_proj.weight", torch.zeros_like)
    assert load_model(calibrated(path, tmp_path / "out"))
    line = "the inputs of model.layers.0.mlp.down_proj.weight are all zero on the calibration text"
    assert capsys.readouterr().err.count(line) == 1
