"""Formats, quantized layers, directories and the command line. A saved model equals the model that
loading with the same options makes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import files.rounding
import quantize
from backends.cpp import build
from backends.weight import grouped_reference, pack_codes, unpack
from eagle_draft import load_head
from files import writing
from files.checkpoint import (
    WeightFiles,
    saved_quantization,
)
from files.io import read_json
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import COMPILER, GOLDEN, OPERATORS, layer_of, refused, rounded
from options import FORMAT_NAMES
from quantize import FORMATS, GROUPS, Int4, Int8, Linear, Quantization, fit_group, stack
from run import quantize as run_quantize
from run.generate import generate, load, main
from run.heads import draft_lm_head, rows_of
from run.options import DEMO, GROUP_SIZES

ROOT = Path(quantize.__file__).parent
TARGET = GOLDEN / "models/target_llama_mha"  # fp32; dim 64, ffn 160, V 97
HEAD = GOLDEN / "models/head_eagle12_mha"
QUANTS = [Quantization("int8"), *(Quantization("int4", size) for size in GROUPS)]
SMALL = [Quantization("int8"), Quantization("int4", 32)]  # formats that fit the golden pair


def name_of(quant) -> str:
    return f"{quant.format}-{quant.group_size}" if isinstance(quant, Quantization) else str(quant)


def each(quants):
    return pytest.mark.parametrize("quant", quants, ids=name_of)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(module: torch.nn.Module) -> dict[str, Tensor]:
    return dict(module.state_dict())


def assert_same_bits(a: torch.nn.Module, b: torch.nn.Module) -> None:
    ours, theirs = state(a), state(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


# ------------------------------------------------------------------------------------------ formats


def errors(weight: Tensor, group: int, codes: Tensor, scale: Tensor) -> Tensor:
    """Squared error of each group, [N, K / group], in double."""
    wide = (codes.double().unflatten(1, (-1, group)) * scale.double()[..., None]).flatten(1)
    return (weight.double() - wide).square().unflatten(1, (-1, group)).sum(-1)


def plain_errors(weight: Tensor, group: int) -> Tensor:
    """The errors of plain rounding, by the largest of a group."""
    groups = weight.unflatten(1, (-1, group))
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1)
    return errors(weight, group, codes, scale)


WEIGHTS = {
    "normal": random(400, 256),
    "signs": random(64, 256).sign(),  # plain rounding has no error here
    # one value that a group's range is cut for
    "huge": random(64, 256) + 1000 * (torch.arange(256) % 32 == 7),
    "one-sided": -random(64, 256).abs(),
    "heavy": random(64, 256) ** 5,
    "tiny": random(64, 256) * 1e-12,
    "constant": torch.full((3, 256), 0.3),
}


def test_every_format_is_named():
    """options.py and run/options.py import no torch, so that they have names and sizes apart."""
    assert tuple(FORMATS) == FORMAT_NAMES
    assert GROUP_SIZES == GROUPS


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("group", GROUPS)
def test_int4_search_is_never_worse_than_plain_rounding(kind, group):
    """Refitting makes the scale the best of its codes, so that rounding it to bf16 (by at most 2^-8 of itself) adds
    at most 2^-16 of the group's sum of squares; 1e-6 is for fp32. On normal numbers it is much better."""
    weight = WEIGHTS[kind]
    plain = plain_errors(weight, group)
    found = errors(weight, group, *Int4.encode(weight, group))
    squares = weight.square().unflatten(1, (-1, group)).sum(-1)
    assert (found <= plain + (2**-16 + 1e-6) * squares).all()
    assert kind != "normal" or found.sum() < 0.75 * plain.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each(QUANTS)
def test_codes_stay_in_range_and_use_it(quant, dtype):
    form = FORMATS[quant.format]
    low, high = (-127, 127) if quant.format == "int8" else (-8, 7)
    for kind, weight in WEIGHTS.items():
        codes, scale = form.encode(weight.to(dtype), quant.group_size)
        assert codes.dtype == torch.int8 and codes.min() >= low and codes.max() <= high
        assert kind != "normal" or (codes.min() == low and codes.max() == high)
        grouped = quant.group_size > 0
        assert scale.isfinite().all() and scale.dtype == (torch.float32, torch.bfloat16)[grouped]


def test_int8_keeps_the_largest_magnitude_and_rounds_to_the_nearest():
    weight = random(40, 256) * torch.logspace(-12, 6, 40)[:, None]
    codes, scale = Int8.encode(weight, 0)
    assert torch.equal(codes.abs().amax(1), torch.full((40,), 127, dtype=torch.int8))
    error = (quantize.decode(codes, scale) - weight).abs()
    assert (error <= (0.5 + 1e-4) * scale[:, None]).all()


@pytest.mark.parametrize("group", GROUPS)
def test_int8_in_groups(group):
    """An outlier costs precision in its own group only, and a scale is rounded before its codes."""
    weight = WEIGHTS["huge"]
    codes, scale = Int8.encode(weight, group)
    assert scale.dtype == torch.bfloat16 and scale.shape == (64, 256 // group)
    wide = quantize.decode(codes, scale)
    error = (wide - weight).abs().unflatten(1, (-1, group))
    # the largest of a group may need code 127.25
    assert (error <= (0.5 + 1e-3) * scale.float()[..., None]).all()
    whole = quantize.decode(*Int8.encode(WEIGHTS["normal"], 0))
    parts = quantize.decode(*Int8.encode(WEIGHTS["normal"], group))
    errors = [(w - WEIGHTS["normal"]).square().mean() for w in (parts, whole)]
    assert errors[0] < 0.9 * errors[1]
    layer = layer_of(pack_codes("int8", codes, scale))
    assert torch.equal(layer.dequantize(), wide)
    assert layer.data.shape == (2 * 256 // group * 32 * (group + 2),)  # scales of 2 bytes


@each(QUANTS)
def test_zero_weights_stay_zero(quant):
    form, weight = FORMATS[quant.format], random(33, 256)
    weight[5], weight[:, 128:] = 0, 0  # a row, and whole groups
    wide = quantize.decode(*form.encode(weight, quant.group_size))
    assert (wide[5] == 0).all() and (wide[:, 128:] == 0).all() and (wide[6, :128] != 0).any()


@each(QUANTS)
def test_a_weight_that_is_no_number_stays_none(quant):
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight = random(40, 256)
        weight[3, 17] = bad
        layer = rounded(quant.format, weight, None, quant.group_size)
        y = layer(random(2, 256))
        assert y[:, 3].isnan().all() and y[:, :3].isfinite().all() and y[:, 4:].isfinite().all()


# ------------------------------------------------------------------------------------------- layers


def without_operators(monkeypatch) -> None:
    """As on a machine on which nothing can be built."""
    monkeypatch.setattr("backends.library._cpp_available", [False])


@pytest.fixture(params=[pytest.param("operators", marks=OPERATORS), "references"])
def products(request, monkeypatch):
    """The products of this machine, and those where nothing can be built."""
    if request.param == "references":
        without_operators(monkeypatch)
    return request.param


@pytest.mark.parametrize("n", [33, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each(QUANTS)
def test_a_layer_multiplies_with_its_dequantized_weight(products, quant, dtype, n):
    bias, x = random(n, seed=2).to(dtype), random(2, 13, 256, seed=1).to(dtype)
    for wide in (False, True):
        layer = rounded(quant.format, random(n, 256) / 16, bias, quant.group_size, wide)
        want = F.linear(x.float(), layer.dequantize(), bias.float())
        got = layer(x)
        assert got.dtype == (torch.float32 if wide else dtype) and got.shape == (2, 13, n)
        # inputs are rounded to int8; measured: up to 0.026
        assert (got - want).abs().max() < 0.03 * want.std()
        assert torch.equal(layer(x[1, 4]), got[1, 4]) or products == "references"


@pytest.mark.parametrize("quant", SMALL, ids=name_of)
@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[COMPILER, pytest.mark.slow])]
)
def test_captures_whole_and_gives_the_same_bits(monkeypatch, quant, backend):
    without_operators(monkeypatch)
    torch._dynamo.reset()
    for dtype in (torch.float32, torch.bfloat16):
        layer = rounded(quant.format, random(40, 64), None, quant.group_size)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for rows in (1, 26):
            x = random(1, rows, 64).to(dtype)
            assert torch.equal(compiled(x), layer(x))


# -------------------------------------------------------------------------------------- zero points

# inputs of a scale; as they are packed
GRIDS = [(32, 32), (64, 64), (128, 128), (256, 128), (96, 32), (576, 64)]
SCALES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def foreign(
    n: int, k: int, group: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales and zero points as others' files hold them, and the weight that they stand for, [n, k] fp32."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (n, k), generator=g, dtype=torch.int8)
    scale = (torch.randn(n, k // group, generator=g) / 64).to(dtype)
    scale[0, 0] = torch.finfo(dtype).smallest_normal / 4
    zero = torch.randint(-8, 9, scale.shape, generator=g, dtype=torch.int8)
    weight = (codes.view(n, -1, group).float() - zero[..., None]) * scale.float()[..., None]
    return codes, scale, zero, weight.view(n, k)


@SCALES
@pytest.mark.parametrize("group,packed", GRIDS)
def test_zero_points_and_scales_are_kept_exactly(products, group, packed, dtype):
    """In groups of every size, of all inputs too: the weight has the very bits, and so has a layer of some rows."""
    k = 2 * group if group < 256 else group
    codes, scale, zero, weight = foreign(97, k, group, dtype)
    layer = layer_of(pack_codes("int4", codes, scale, zero), random(97))
    assert layer.group_size == packed and torch.equal(layer.dequantize(), weight)
    again = pack_codes("int4", *unpack(layer.record))
    assert_same_bits(layer_of(again, layer.bias), layer)
    ids = torch.tensor([5, 96, 0])
    assert torch.equal(rows_of(layer, ids).dequantize(), weight[ids])
    x = random(26, k, seed=1)
    for dtype_of_x in (torch.float32, torch.bfloat16, torch.float16):
        some = x.to(dtype_of_x)
        y = layer(some)
        want = grouped_reference(some, *unpack(layer.record)).to(dtype_of_x) + layer.bias
        torch.testing.assert_close(y.float(), want, atol=1e-4, rtol=2 * torch.finfo(dtype_of_x).eps)
        exact = some.double() @ weight.double().T + layer.bias
        assert (y - exact).std() < 0.02 * exact.std()  # inputs are rounded to int8
        for rows in (1, 5) if products == "operators" else ():
            assert torch.equal(layer(some[:rows]), y[:rows])


@SCALES
@OPERATORS
def test_equal_zero_points_are_as_good_as_none(dtype):
    """0 has the bits of none; and a zero point of 1 those of codes that are one less."""
    codes, scale, _, _ = foreign(97, 256, 64, dtype)
    codes, x, zero = codes.clamp(max=6), random(5, 256), torch.zeros_like(scale, dtype=torch.int8)
    want = layer_of(pack_codes("int4", codes, scale))(x)
    assert torch.equal(layer_of(pack_codes("int4", codes, scale, zero))(x), want)
    assert torch.equal(layer_of(pack_codes("int4", codes + 1, scale, zero + 1))(x), want)


@SCALES
def test_experts_with_zero_points(products, dtype):
    parts = [foreign(40, 192, 64, dtype, seed) for seed in range(3)]
    layer = layer_of(stack((pack_codes("int4", *part[:3]) for part in parts), 3))
    assert torch.equal(layer.dequantize(), torch.stack([weight for *_, weight in parts]))
    x, expert = random(9, 192), torch.tensor([2, 0, 2, 2, 0, 2, 2, 0, 0])
    y = layer(x, expert)
    for e in (0, 2):
        alone = layer_of(pack_codes("int4", *parts[e][:3]))
        assert torch.equal(y[expert == e], alone(x[expert == e]))


def test_what_a_zero_point_costs():
    """Two bytes for each group and output, the scale's other half; without, a layer is as small as it was."""
    for group in GROUPS:
        codes, scale, zero, _ = foreign(96, 256, group, torch.float16)
        weights = (
            pack_codes("int4", codes, scale.bfloat16()),
            pack_codes("int4", codes, scale, zero),
        )
        sizes = [weight.data.nbytes for weight in weights]
        assert sizes[0] == codes.numel() // 2 + 2 * scale.numel()
        assert sizes[1] == sizes[0] + 2 * scale.numel()


@pytest.mark.parametrize("count", [3, 5, 1])
def test_groups_that_cannot_be_packed(count):
    says = f"a multiple of 32 inputs; {count} scales of 144 inputs make none"
    with pytest.raises(ValueError, match=says):
        pack_codes("int4", torch.zeros(3, 144, dtype=torch.int8), torch.ones(3, count).half())


# -------------------------------------------------------------------------------------- directories


def quantized(path: Path, out: Path, quant: Quantization) -> Path:
    quantize_directory(path, out, quant)
    return out


def saved_as(out: Path) -> Quantization:
    return saved_quantization(read_json(out / "config.json"), out)


@pytest.fixture(scope="module")
def saved(short_demo, tmp_path_factory):
    """A function: the short demo and its head, written in a format once."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def of(quant: Quantization) -> list[Path]:
        out = folder / name_of(quant)
        out.mkdir()
        paths = [Path(short_demo), Path(f"{short_demo}-eagle")]
        return [quantized(path, out / path.name, quant) for path in paths]

    return of


@pytest.mark.parametrize(
    "quant, dtype", [*((quant, None) for quant in QUANTS), (SMALL[1], torch.float32)], ids=name_of
)
def test_saved_and_on_load_are_the_same_bits(short_demo, saved, quant, dtype):
    target_path, head_path = saved(quant)
    ours, theirs = load_model(target_path, dtype), load_model(short_demo, dtype, quant=quant)
    assert ours.embedding.weight.dtype == (dtype or torch.bfloat16)
    assert_same_bits(ours, theirs)
    assert_same_bits(load_head(head_path, ours), load_head(Path(DEMO + "-eagle"), theirs, quant))
    linears = [m for m in ours.modules() if isinstance(m, Linear)]
    assert len(linears) == 2 * 4 + 1, "all of them, no more"
    assert {m.format for m in linears} == {quant.format}
    assert ours.lm_head.fp32_out and not ours.layers[0].w2.fp32_out
    ids = torch.arange(40)[None] + 100
    logits = ours.logits(ours(ids, torch.arange(40)[None]))
    assert logits.dtype == torch.float32


@each(QUANTS)
def test_saved_files_are_as_small_as_they_should_be(short_demo, saved, quant):
    bits = 4 + 16 / quant.group_size if quant.format == "int4" else 8
    raw = WeightFiles(short_demo)
    tensors = {name: raw.read(name) for name in raw.readers}
    rounds = {name: files.rounding.is_quantized(name, tensor) for name, tensor in tensors.items()}
    numel = sum(tensor.numel() for name, tensor in tensors.items() if rounds[name])
    rest = sum(tensor.nbytes for name, tensor in tensors.items() if not rounds[name])
    out = saved(quant)[0]
    size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    assert abs(size - rest - numel * bits / 8) < 0.02 * size
    tokenizers = [path / "tokenizer.model" for path in (out, Path(DEMO))]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def original() -> tuple[dict[str, Tensor], dict]:
    """Weights and config of the golden target."""
    return load_file(TARGET / "model.safetensors"), read_json(TARGET / "config.json")


def written(folder: Path, weights: dict[str, Tensor], config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def golden_copy(folder: Path, layout: str) -> Path:
    """The golden target in another layout."""
    weights, config = original()
    if layout.startswith("tied"):
        config["tie_word_embeddings"] = True
        del weights["lm_head.weight"]
        if layout == "tied-repeated":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    written(folder, weights, config)
    if layout == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    if layout == "sharded":
        names = sorted(weights)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, own in parts.items():
            save_file({n: weights[n] for n in own}, folder / file)
        index = {n: file for file, own in parts.items() for n in own}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    if layout in ("bin", "sharded"):
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_files_have_the_mode_that_the_user_wants(tmp_path, umask):
    before = os.umask(umask)
    try:
        quantize_directory(Path(f"{DEMO}-eagle"), tmp_path / "out", Quantization("int8"))
    finally:
        os.umask(before)
    files = list((tmp_path / "out").iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask} and len(files) == 2


@pytest.mark.parametrize("quant, layout", [
    (SMALL[1], "single"), (SMALL[0], "sharded"), (SMALL[0], "bin"), (SMALL[0], "tied"), (SMALL[1], "tied-repeated"),
], ids=name_of)  # fmt: skip
def test_every_layout_can_be_read(tmp_path, quant, layout):
    path = golden_copy(tmp_path / "in", layout)
    out = quantized(path, tmp_path / "out", quant)
    ours, theirs = load_model(out), load_model(path, quant=quant)
    assert_same_bits(ours, theirs)
    assert ours.lm_head.format == quant.format
    assert isinstance(ours.embedding, torch.nn.Embedding)
    if layout.startswith("tied"):
        kind = FORMATS[quant.format]
        want = quantize.decode(*kind.encode(ours.embedding.weight, ours.lm_head.group_size))
        assert ours.lm_head.group_size and torch.equal(ours.lm_head.dequantize(), want)
    else:
        assert_same_bits(ours, load_model(TARGET, quant=quant))


def test_a_device_without_groups_of_int8_takes_a_scale_per_output(tmp_path):
    """As on CUDA: codes of ours are rounded again, others' in groups become numbers."""
    out = quantized(TARGET, tmp_path / "out", Quantization("int8"))
    whole, layer = (load_model(out, device=device).layers[1].w2 for device in ("cpu", "cpu:0"))
    assert [part.layout for part in layer.packed.parts] == ["INT8_OUTPUT"]
    want = quantize.decode(*Int8.encode(whole.dequantize(), 0))
    assert torch.equal(layer.dequantize(), want)


@each(SMALL)
def test_transformers_reads_what_is_written(tmp_path, quant):
    """The package compressed-tensors decodes the numbers that our layers have, bit for bit."""
    out = quantized(TARGET, tmp_path / "out", quant)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model = load_model(out)
    ids = torch.tensor([[5, 17, 3, 40, 8]])
    with torch.no_grad():
        theirs(ids)  # which decodes the weights
    own = theirs.get_submodule("model.layers.1.mlp.down_proj").weight
    assert torch.equal(own, model.layers[1].w2.dequantize())
    assert torch.equal(theirs.lm_head.weight, model.lm_head.dequantize())


@each(SMALL)
def test_a_bias_is_kept(tmp_path, quant):
    weights, config = original()
    for part in "qkv":
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}.self_attn.{part}_proj."
            weights[name + "bias"] = random(len(weights[name + "weight"]), seed=layer)
    written(tmp_path / "in", weights, config | {"architectures": ["Qwen2ForCausalLM"]})
    ours = load_model(quantized(tmp_path / "in", tmp_path / "out", quant))
    assert_same_bits(ours, load_model(tmp_path / "in", quant=quant))
    bias = torch.cat([weights[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"])
    layer = ours.layers[1].wqkv
    assert torch.equal(layer.bias, bias) and not layer.bias.requires_grad
    zero = layer(torch.zeros(1, config["hidden_size"]))
    assert torch.equal(zero[0], bias)


def test_misaligned_files_give_the_same_bits(short_demo, tmp_path):
    """Sums must not depend on where a tensor lies: in a mapped file that is anywhere, in memory on 64 bytes."""
    torch.manual_seed(0)
    weights = load_file(short_demo / "model.safetensors")
    config = read_json(short_demo / "config.json") | {"torch_dtype": "float32"}
    weights = {n: w.float() + 1e-3 * torch.randn(w.shape) for n, w in weights.items()}
    files = WeightFiles(written(tmp_path / "in", weights, config))
    assert any(files.read(name).data_ptr() % 64 for name in files.readers), "else nothing is tested"
    for quant in QUANTS:
        out = quantized(tmp_path / "in", tmp_path / name_of(quant), quant)
        assert_same_bits(load_model(out), load_model(tmp_path / "in", quant=quant))


# -------------------------------------------------------------------------------------------- draft


OWN_LM_HEAD = [("none", "int4"), ("none", "int8"), ("int8", "int4")]  # target, draft
SHARED_LM_HEAD = [("int8", "none"), ("int4", "none"), ("int4", ""), ("none", "")]
GOLDEN_PAIR = {"checkpoint": str(TARGET), "eagle": str(HEAD), "device": "cpu", "tree": "dynamic"}


@pytest.mark.parametrize("target, draft", OWN_LM_HEAD + SHARED_LM_HEAD)
def test_the_drafts_lm_head(target, draft):
    own = (target, draft) in OWN_LM_HEAD
    options = {"group_size": 32} if "int4" in (target, draft) else {}
    engine = load(quant=target, quant_draft=draft, ignore_eos=True, **GOLDEN_PAIR, **options)
    drafter, draft = engine.drafter, draft or target
    assert engine.option("quant") == target and engine.option("quant_draft") == draft
    assert (drafter.lm_head is not engine.target.lm_head) == own
    assert drafter.head.fc.format == draft
    if own:
        assert drafter.lm_head.format == draft and drafter.lm_head.fp32_out
        original = load_model(TARGET).lm_head.weight
        if target == "int8":
            original = quantize.decode(*FORMATS["int8"].encode(original, 32))
        want = FORMATS[draft].encode(original, 32 if draft == "int4" else 0)
        assert all(map(torch.equal, unpack(drafter.lm_head.record), want))
    assert len(generate(engine, [[5, 17, 3]], max_new_tokens=8).tokens[0]) == 8


def test_a_saved_target_leaves_the_draft_its_group_size(tmp_path):
    """group_size of quant_draft=int4 is not replaced by what an int8 checkpoint does not have."""
    out = quantized(TARGET, tmp_path / "out", Quantization("int8"))
    options = GOLDEN_PAIR | {"checkpoint": str(out)}
    engine = load(quant_draft="int4", group_size=32, **options)
    assert engine.drafter.head.fc.group_size == 32
    assert engine.option("quant") == "int8"


def test_an_open_group_size_is_64_if_that_fits(tmp_path):
    """Each model chooses its own, and the draft's copy of the LM head too."""
    open_size = Quantization("int4")
    cases = {(96, 64): 32, (576, 1536): 64, (128, 64): 64, (4096, 11008): 64, (256,): 64}
    for inputs, size in cases.items():
        assert fit_group(open_size, dict(zip("ab", inputs))).group_size == size, inputs
    for quant, inputs, says in (
        (open_size, {"a": 64, "b": 48}, "group size 32 does not divide in_features 48 of b; use --quant int8"),
        (Quantization("int4", 128), {"a": 576}, "group size 128 does not divide in_features 576 of a; use group_size=64"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"int4 {says}"):
            fit_group(quant, inputs)
    engine = load(quant="int4", **GOLDEN_PAIR)
    assert {m.group_size for m in engine.target.modules() if isinstance(m, Linear)} == {32}
    assert engine.drafter.lm_head is engine.target.lm_head  # with any group size
    assert_same_bits(engine.target, load_model(TARGET, quant=Quantization("int4", 32)))
    out = quantized(TARGET, tmp_path / "out", open_size)
    assert saved_as(out).group_size == 32
    assert_same_bits(load_model(out), engine.target)
    engine = load(quant_draft="int4", **GOLDEN_PAIR)
    assert engine.drafter.head.fc.group_size == 32 and engine.drafter.lm_head.group_size == 64


def test_a_saved_head_on_a_float_target(tmp_path):
    head = quantized(HEAD, tmp_path / "head", Quantization("int4", 32))
    options = GOLDEN_PAIR | {"eagle": str(head)}
    engine = load(**options)
    assert (engine.option("quant"), engine.option("quant_draft")) == ("none", "int4")
    assert engine.drafter.lm_head.format == "int4" and engine.target.lm_head.format == "none"
    saved = engine.drafter.head.fc.dequantize()
    for asked in ("int4", "int8", "none"):
        fc = load(quant_draft=asked, **options).drafter.head.fc
        assert fc.format == asked
        weight = fc.dequantize()
        assert (weight - saved).abs().max() <= (asked == "int8") * saved.abs().max() / 250, asked


@each(QUANTS)
def test_some_rows_are_the_same_codes_and_products(products, quant):
    ids, bias = torch.tensor([3, 4, 90, 199, 0]), random(200, seed=2)
    whole = rounded(quant.format, random(200, 256).bfloat16(), bias, quant.group_size, wide=True)
    rows = rows_of(whole, ids)
    for some, all in zip(unpack(rows.record), unpack(whole.record)):
        assert some.dtype == all.dtype and torch.equal(some, all[ids])
    x = random(7, 256, seed=1).bfloat16()
    got, want = rows(x), whole(x)[:, ids]
    assert got.dtype == want.dtype == torch.float32
    near = 0 if products == "operators" else 1e-5
    torch.testing.assert_close(got, want, rtol=near, atol=near)


def test_lm_head_in_groups_of_another_size():
    """A draft's own group size is honoured where the target has the same format."""
    target = load_model(TARGET, quant=Quantization("int4", 32))
    own = target.lm_head
    assert own.group_size == 32 and draft_lm_head(target, Quantization("int4", 32)) is own
    copy = draft_lm_head(target, Quantization("int4", 64))
    assert copy.group_size == 64 and copy.fp32_out
    target = load_model(TARGET, quant=Quantization("int8"))
    assert target.lm_head.group_size == 32
    assert draft_lm_head(target, Quantization("int8")) is target.lm_head


def test_a_disk_too_small_for_the_codes(monkeypatch, tmp_path):
    """Known before anything is written, from the sizes that the files come to."""
    quantize_directory(Path(DEMO), tmp_path / "fits", Quantization("int4"))
    size = sum(f.stat().st_size for f in (tmp_path / "fits").glob("*.safetensors"))
    disk = SimpleNamespace(free=size - 200_000)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: disk)
    with pytest.raises(ValueError, match=r"needs 0.0 GB, and .* free; make room"):
        quantize_directory(Path(DEMO), tmp_path / "out", Quantization("int4"))
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]
    disk.free = size
    quantize_directory(Path(DEMO), tmp_path / "out", Quantization("int4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fits", "out"]


# ------------------------------------------------------------------------------------ command lines


def run(capsys, main, *argv: str) -> tuple[str, str]:
    main(list(argv))
    return capsys.readouterr()


def failure(capsys, main, *argv: str) -> str:
    return refused(capsys, main, list(argv))


def test_ctrl_c_while_torch_is_imported_is_no_traceback(tmp_path):
    """Whatever the command; some read their options before."""
    some = ["--checkpoint", DEMO]
    argv = {
        "quantize": [*some, "--out", str(tmp_path / "out")],
        "scripts/serve": [],
        "scripts/train_head": [*some, "--out", str(tmp_path / "out"), "--chat", "vicuna"],
    }
    imported = tmp_path / "imported"
    (tmp_path / "torch.py").write_text(f"open({str(imported)!r}, 'w'); import time; time.sleep(60)")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for script, options in argv.items():
        command = [sys.executable, str(ROOT / f"{script}.py"), *options]
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        while not imported.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "" and process.returncode == -signal.SIGINT
        imported.unlink()


def test_quantize_and_generate(capsys, short_demo, tmp_path):
    demo = str(short_demo)
    for end in ("", "-eagle"):
        argv = ("--checkpoint", demo + end, "--out", str(tmp_path / f"demo{end}"))
        out, err = run(capsys, run_quantize.main, *argv)
        told = f"--checkpoint MODEL --head {tmp_path / 'demo-eagle'}"
        if not end:
            told = f"--checkpoint {tmp_path / 'demo'} --head {demo}-eagle"
            advised = shlex.split(out.partition("run: python generate.py ")[2])
        assert f"python generate.py {told} --prompt" in out
        total = len(WeightFiles(Path(demo + end)).readers)
        assert err.endswith(f"int4: {total} of {total} tensors\n") and "\r" not in err
    ids = ["--max_new_tokens", "16", "--json", "-", "--device", "cpu", "--tree", "dynamic"]
    ids += ["--prompt", "def f(x):"]
    got, _ = run(capsys, main, "--checkpoint", str(tmp_path / "demo"), *ids)
    want, _ = run(capsys, main, "--checkpoint", demo, "--quant", "int4", *ids)
    got, want = json.loads(got), json.loads(want)
    assert got["tokens"] == want["tokens"]
    want = {"quant": "int4", "quant_draft": "int4", "group_size": 64, "draft": "eagle"}
    assert got["config"].items() >= want.items()
    shutil.rmtree(tmp_path / "demo-eagle")
    out, _ = run(capsys, main, *advised, "--max_new_tokens", "2", "--json", "-", "--device", "cpu")
    config = json.loads(out)["config"]
    assert (config["draft"], config["head"]) == ("eagle", f"{demo}-eagle"), "the source's head"


BASE = ("--checkpoint", str(TARGET))
QUANTIZE_MISTAKES = {
    "group": ([*BASE, "--out", "OUT", "--group_size", "128"], "int4 group size 128 does not divide in_features 64 of lm_head.weight; use group_size=32"),
    "group64": ([*BASE, "--out", "OUT", "--group_size", "64"], "group size 64 does not divide in_features 160 of .*down_proj.*use group_size=32"),
    "size": ([*BASE, "--out", "OUT", "--group_size", "48"], "--group_size must be one of 32, 64, 128; it is 48"),
    "format": ([*BASE, "--out", "OUT", "--quant", "int3"], "invalid choice: 'int3'"),
    "no checkpoint": (["--out", "OUT"], "--checkpoint and --out are needed"),
    "no out": ([*BASE], "--checkpoint and --out are needed"),
    "missing": (["--checkpoint", "OUT/x", "--out", "OUT"], "no such directory: .*/x"),
    "same": ([*BASE, "--out", str(TARGET), "--quant", "int8"], "--out holds the checkpoint itself"),
    "parent": (["--checkpoint", "OUT/a/b", "--out", "OUT/a", "--quant", "int8", "--overwrite"], "--out holds the checkpoint itself"),
    "device": ([*BASE, "--out", "OUT", "--device", "gpu"], "--device must be cpu or cuda; it is gpu"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", QUANTIZE_MISTAKES)
def test_mistakes_of_quantize(capsys, tmp_path, mistake):
    argv, says = QUANTIZE_MISTAKES[mistake]
    if mistake == "parent":
        shutil.copytree(TARGET, tmp_path / "out/a/b")
    before = sorted(tmp_path.rglob("*"))
    err = failure(
        capsys, run_quantize.main, *(a.replace("OUT", str(tmp_path / "out")) for a in argv)
    )
    assert re.search(says, err), err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    out = quantized(TARGET, tmp_path / "out", Quantization("int8"))
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    out.rename(tmp_path / "out.old.tmp")  # where the old model lies until the new one has its name

    def tensors():
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(ValueError, match="cannot write .*No space left"):
        writing.write_checkpoint(out, tensors(), {}, TARGET, overwrite=True)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_is_there_is_kept_unless_told_otherwise(capsys, tmp_path):
    out = quantized(TARGET, tmp_path / "out", Quantization("int8"))
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    argv = (*BASE, "--out", str(out), "--group_size", "32")
    assert "exists; give --overwrite" in failure(capsys, run_quantize.main, *argv)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    again = ("--checkpoint", str(out), "--out", f"{out}-2")
    assert "quantized already; give the original" in failure(capsys, run_quantize.main, *again)
    run(capsys, run_quantize.main, *argv, "--overwrite")
    assert saved_as(out).format == "int4"
    assert load_model(out).lm_head.format == "int4"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def spoil(out: Path, how: str) -> None:
    """Damage a quantized directory (int4, groups of 32)."""
    file, config = next(out.glob("*.safetensors")), out / "config.json"
    raw, q = read_json(config), "model.layers.1.self_attn.q_proj.weight"
    weights = load_file(file)
    if how == "scale":
        del weights[f"{q}_scale"]
    elif how == "columns":
        weights[f"{q}_packed"] = weights[f"{q}_packed"][:, :-1].contiguous()
    elif how == "not marked":
        del raw["quantization_config"]
    elif how == "of an earlier release":
        raw["quantization_config"] = {"quant_method": "gpt-eagle", "format": "int4"}
    save_file(weights, file)
    config.write_text(json.dumps(raw))
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])


SPOILT = {  # further cases are in test_quantized_files.py
    "truncated": "model.safetensors is corrupt, truncated",
    "scale": "the weight model.layers.1.self_attn.q_proj.weight_scale is missing; download it again",
    "columns": r"the group size 32 does not divide the 56 inputs of model.layers.1.self_attn.q_proj",
    "not marked": r"missing weight\(s\): lm_head.weight",
    "of an earlier release": "out: an earlier quantize.py wrote it, .*; run quantize.py once more on the original$",
}


@pytest.mark.parametrize("how", SPOILT)
def test_directories_that_cannot_be_loaded(capsys, tmp_path, how):
    out = quantized(TARGET, tmp_path / "out", Quantization("int4", 32))
    spoil(out, how)
    err = failure(capsys, main, "--checkpoint", str(out), "--prompt_ids", "5,17", "--device", "cpu")
    assert re.search(SPOILT[how], err), err


IDS = ("--prompt_ids", "5,17", "--device", "cpu")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--quant", "int4", "--group_size", "128"], "int4 group size 128 does not divide in_features 64 of lm_head.weight; use group_size=32"),
        (["--quant", "int4", "--group_size", "64"], "does not divide in_features 160 of layers.0.w2.weight; use group_size=32"),
        (["--quant", "int4", "--group_size", "16"], "--group_size must be one of"),
        (["--quant", "int2"], "invalid choice"),
        (["--quant_draft", "int4", "--group_size", "64", "--eagle", str(HEAD)], "64 does not divide in_features 160 of layers.0.w2"),
    ],
)  # fmt: skip
def test_mistakes_of_generate(capsys, argv, says):
    assert says in failure(capsys, main, *BASE, *IDS, *argv)


def test_a_kill_leaves_nothing_under_the_name(tmp_path):
    """Killed while the second of many shards is written, and run again."""
    out, part = tmp_path / "out", tmp_path / "out.tmp"
    many = (
        "import files.rounding as r; w = r.write_checkpoint; from run import quantize;"
        "r.write_checkpoint = lambda *a: w(*a, shard_bytes=10**5); quantize.main()"
    )
    argv = [sys.executable, "-c", many, "--checkpoint", DEMO, "--out", str(out)]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 60
        while not list(part.glob("*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
    assert list(part.glob("*.safetensors")), "it must have been killed in the middle"
    assert not out.exists()
    quantize_directory(Path(DEMO), out, Quantization("int8"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and load_model(out)


# -------------------------------------------------------------------------------------- no compiler


@OPERATORS
@pytest.mark.parametrize(
    "quant, environment",
    [*zip(SMALL, [{"CXX": "/nonexistent"}, {"CXX": "", "PATH": ""}])],
    ids=name_of,
)
def test_without_a_compiler_the_references_serve(tmp_path, capsys, monkeypatch, quant, environment):
    """One line says so, and the loop gives the tokens that the operators give."""
    argv = ["--checkpoint", str(TARGET), "--eagle", str(HEAD), "--quant", quant.format, "--json", "-", "--ignore_eos",
            "--prompt_ids", "5,17,3,40", "--max_new_tokens", "12", "--device", "cpu", "--tree", "dynamic"]  # fmt: skip
    argv += ["--group_size", "32"] if quant.format == "int4" else []
    want, _ = run(capsys, main, *argv)
    for name, value in (environment | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "load_operators", functools.cache(build._load.__wrapped__))
    monkeypatch.setattr("backends.library._cpp_available", [])
    got, said = run(capsys, main, *argv)
    notes = [line for line in said.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "no C++ compiler" in notes[0]
    assert "no C++ operators" in notes[0] and "slow on trees and in int8 and int4" in notes[0]
    tokens = [json.loads(out)["tokens"][0] for out in (got, want)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12


# ---------------------------------------------------------------------------------- quality, memory


def test_quantized_demo_stays_the_demo():
    """Mean KL divergence from the bf16 demo on held-out text, in nats."""
    text = (Path(DEMO).parents[1] / "data/eval/demo.jsonl").read_text().splitlines()[0]
    exact = load(checkpoint=DEMO, draft="none", device="cpu", dtype="float32")
    ids = torch.tensor([exact.tokenizer.encode(json.loads(text)["turns"][0])[:200]])
    positions = torch.arange(ids.shape[1])[None]
    log_p = exact.target.logits(exact.target(ids, positions)).log_softmax(-1)
    for quant, most in zip(QUANTS, (0.003, 0.08, 0.1, 0.12)):
        model = load_model(Path(DEMO), torch.float32, quant=quant)
        log_q = model.logits(model(ids, positions)).log_softmax(-1)
        divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        assert 0 < divergence < most, (name_of(quant), divergence)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_gpu_rounds_a_7b_layer_in_few_steps(form, monkeypatch):
    """The same codes, in fewer and larger parts: some 200 operators each, 350 of whose parts a layer of 7B has."""
    weight, kind, parts = torch.randn(300, 4096), FORMATS[form], []
    want, whole = kind.encode(weight, 128), kind.encode_groups
    counted = lambda part, *out: parts.append(len(part)) or whole(part, *out)  # noqa: E731
    monkeypatch.setattr(kind, "encode_groups", staticmethod(counted))
    monkeypatch.setitem(quantize.AT_ONCE, "cpu", quantize.AT_ONCE["cuda"])
    got = kind.encode(weight, 128)
    assert all(map(torch.equal, got, want)) and parts == [300]
    assert 11008 * 4096 / quantize.AT_ONCE["cuda"] < 3
