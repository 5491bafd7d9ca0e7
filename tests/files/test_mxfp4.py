"""Experts in MXFP4, as gpt-oss has them in directories and in GGUF files: their numbers, their bits, and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from families import random_oss
from files.weights import load_model
from helpers import OPERATORS
from quantize import BLOCKS, Quantization
from run.load import load
from tiny_models import IDS, assert_same_logits, by_passes, refused, saved

IN_BLOCKS = Quantization(BLOCKS, saved=True)
DOWN = "model.layers.1.mlp.experts.down_proj"


def write_mxfp4(path: Path, change: Callable[[dict], None] = lambda held: None) -> Path:
    """Write a model with random codes and powers of two in the place of the experts' numbers, and a change of these."""
    generator = torch.Generator().manual_seed(3)

    def random_bytes(low: int, high: int, *shape: int):
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    def coded(held: dict) -> dict:
        for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = held.pop(name).shape
            held[f"{name}_blocks"] = random_bytes(0, 256, experts, outputs, inputs // 32, 16)
            held[f"{name}_scales"] = random_bytes(122, 126, experts, outputs, inputs // 32)
        change(held)
        return held

    form = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return saved(random_oss(), path, {"quantization_config": form}, coded)


def dequantized(path: Path):
    """The same model, whose numbers are those that transformers makes of the codes."""
    read = transformers.GptOssForCausalLM.from_pretrained
    form = transformers.Mxfp4Config(dequantize=True)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return read(path, quantization_config=form, **options).eval()


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


@pytest.mark.parametrize("operator", [pytest.param(True, marks=OPERATORS), False])
def test_as_numbers(mxfp4, monkeypatch, operator):
    monkeypatch.setattr("files.stacks.cpu_operators_are_loaded", lambda: operator)
    assert_same_logits(load_model(mxfp4, torch.float32), dequantized(mxfp4))


@OPERATORS
@torch.no_grad()
def test_in_their_bits(mxfp4):
    """No weight is changed, and the bits are the file's: 4.25 a weight."""
    model = load_model(mxfp4, torch.bfloat16, quant=IN_BLOCKS)
    reference = dequantized(mxfp4)
    for ours, theirs in zip(model.layers, reference.model.layers):
        stacked = theirs.mlp.experts.gate_up_proj.transpose(1, 2)  # [E, 2 I, K], rows in turn
        assert torch.equal(ours.w13.dequantize(), torch.cat((stacked[:, ::2], stacked[:, 1::2]), 1))
        assert torch.equal(ours.w2.dequantize(), theirs.mlp.experts.down_proj.transpose(1, 2))
        assert ours.w13.data.numel() * 8 == 4.25 * stacked.numel()
    want = reference(IDS[None]).logits[0]
    for fuse in (False, True):
        model.fuse(fuse)
        error = (by_passes(model, IDS, 5) - want).square().mean().sqrt() / want.std()
        assert error < 0.08  # 0.054; with the experts in bfloat16 0.040


@OPERATORS
@pytest.mark.parametrize("options, form, says", [
    ({}, BLOCKS, "weights run as they are in the file (MXFP4)"),
    ({"dtype": "float32"}, "none", "MXFP4 weights are converted to float32"),
    ({"quant": "int4"}, BLOCKS, "has no more bits than --quant int4"),
], ids=str)  # fmt: skip
def test_the_command_keeps_the_bits(mxfp4, capsys, options, form, says):
    engine = load(checkpoint=str(mxfp4), draft="none", device="cpu", **options)
    assert engine.target.layers[0].w13.format == form
    assert says in capsys.readouterr().err


def put(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    """A function that changes one tensor of a stack."""

    def spoil(held: dict) -> None:
        held[DOWN + ending] = change(held[DOWN + ending]).contiguous()

    return spoil


def no_number(scales: torch.Tensor) -> torch.Tensor:
    scales[3, 5, 1] = 255
    return scales


SPOILT = {
    "no number": (put("_scales", no_number), "has a scale that is NaN or infinite"),
    "no scales": (lambda held: held.pop(f"{DOWN}_scales"), "down_proj_scales is missing"),
    "half of the codes": (put("_blocks", lambda x: x[..., :8]), "its scales are no MXFP4"),
    "few scales": (put("_scales", lambda x: x[:2]), "its scales are no MXFP4"),
    "floats as scales": (put("_scales", lambda x: x.float()), "its scales are no MXFP4"),
    "two dimensions": (
        put("_blocks", lambda x: x.flatten(2)),
        "a stack of experts has 4 dimensions",
    ),
}


@pytest.mark.parametrize("dtype", ["", "float32"])
@pytest.mark.parametrize("name", SPOILT)
def test_broken_ones_are_one_line(capsys, tmp_path, name, dtype):
    change, says = SPOILT[name]
    path = write_mxfp4(tmp_path / "m", change)
    capsys.readouterr()
    given = ("--dtype", dtype) if dtype else ()
    assert says in refused(capsys, "--checkpoint", str(path), *given)
