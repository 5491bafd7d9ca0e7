"""Our own formats: encoders, directories, the draft's LM head, the command line. A saved model is the one that loading makes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantize
from backends.weight import pack_codes, unpack
from eagle_draft import load_head
from files import rounding, writing
from files.checkpoint import WeightFiles
from files.io import read_json
from files.weights import load_model
from helpers import GOLDEN, OPERATORS, refused, rounded
from quantize import FORMATS, GROUPS, Int8, Linear, Quantization, fit_group
from run import quantize as run_quantize
from run.generate import main
from run.library import generate
from run.load import load
from run.options import DEMO

TARGET = GOLDEN / "models/target_llama_mha"  # fp32; dim 64, ffn 160, V 97
HEAD = GOLDEN / "models/head_eagle12_mha"
QUANTS = {"int8": Quantization("int8")} | {f"int4-{g}": Quantization("int4", g) for g in GROUPS}
INT8, INT4 = Quantization("int8"), Quantization("int4", 32)  # formats that fit the golden pair
EACH = pytest.mark.parametrize("name", QUANTS)
ENCODED = QUANTS | {f"int8-{group}": Quantization("int8", group) for group in GROUPS}
SMALL = pytest.mark.parametrize("quant", [INT8, INT4], ids=lambda quant: quant.format)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(a: torch.nn.Module, b: torch.nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


# ------------------------------------------------------------------------------------------ encoders

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


def errors(weight: Tensor, group: int, codes: Tensor, scale: Tensor) -> Tensor:
    """Squared error of each group, [N, K / group], in double."""
    wide = (codes.double().unflatten(1, (-1, group)) * scale.double()[..., None]).flatten(1)
    return (weight.double() - wide).square().unflatten(1, (-1, group)).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ENCODED)
def test_codes_and_scales(name, kind, dtype):
    """Of int8 half a step is the bound. The search of int4 is never worse than plain rounding.

    It refits the scale to its codes, so that rounding that to bf16 (by at most 2^-8 of itself) adds at most 2^-16 of
    the group's sum of squares; 1e-6 is for fp32. On normal numbers it is much better.
    """
    quant, weight = ENCODED[name], WEIGHTS[kind].to(dtype).float()
    codes, scale = FORMATS[quant.format].encode(weight.to(dtype), quant.group_size)
    most = 127 if quant.format == "int8" else 8
    assert codes.dtype == torch.int8 and codes.min() >= -most and codes.max() <= min(most, 127)
    assert kind != "normal" or codes.min() == -most
    group = quant.group_size or weight.shape[1]
    assert scale.isfinite().all() and scale.numel() == weight.numel() // group
    assert scale.dtype == (torch.bfloat16 if quant.group_size else torch.float32)
    groups = weight.unflatten(1, (-1, group))
    if quant.format == "int8":
        steps = scale.float().view(len(weight), -1, 1)
        error = (quantize.decode(codes, scale) - weight).abs().unflatten(1, (-1, group))
        # of a scale in bf16 the largest of a group may need code 127.25
        assert (error <= (0.5 + 1e-3) * steps).all()
        assert (
            dtype == torch.float16 or (codes.unflatten(1, (-1, group)).abs().amax(-1) >= 126).all()
        )
        return
    plain_scale = groups.abs().amax(-1) / 7
    plain_codes = (groups / plain_scale[..., None]).round().nan_to_num().clamp(-8, 7).flatten(1)
    plain = errors(weight, group, plain_codes, plain_scale)
    found = errors(weight, group, codes, scale)
    assert (found <= plain + (2**-16 + 1e-6) * groups.square().sum(-1)).all()
    assert kind != "normal" or found.sum() < 0.75 * plain.sum() and codes.max() == 7


@EACH
def test_rows_of_zeros_and_of_no_numbers(name):
    """Zeros stay zeros, and a weight that is no number spoils its own output alone."""
    quant, weight = QUANTS[name], random(40, 256)
    weight[5], weight[:, 128:] = 0, 0  # a row, and whole groups
    wide = quantize.decode(*FORMATS[quant.format].encode(weight, quant.group_size))
    assert (wide[5] == 0).all() and (wide[:, 128:] == 0).all() and (wide[6, :128] != 0).any()
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight[3, 17] = bad
        y = rounded(quant.format, weight, None, quant.group_size)(random(2, 256))
        assert y[:, 3].isnan().all() and y[:, :3].isfinite().all() and y[:, 4:].isfinite().all()


# -------------------------------------------------------------------------------------------- layers


@pytest.fixture(params=[pytest.param("operators", marks=OPERATORS), "references"])
def products(request, monkeypatch):
    """The products of this machine, and those where nothing can be built."""
    if request.param == "references":
        monkeypatch.setattr("backends.library._cpp_available", [False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EACH
def test_a_layer_multiplies_with_its_dequantized_weight(products, name, dtype):
    quant, bias = QUANTS[name], random(40, seed=2).to(dtype)
    x = random(2, 13, 256, seed=1).to(dtype)
    layer = rounded(quant.format, random(40, 256) / 16, bias, quant.group_size)
    want = F.linear(x.float(), layer.dequantize(), bias.float())
    got = layer(x)
    assert got.dtype == dtype and got.shape == (2, 13, 40)
    assert (got - want).abs().max() < 0.03 * want.std()  # inputs are rounded to int8


@pytest.mark.parametrize("count", [3, 5, 1])
def test_groups_that_cannot_be_packed(count):
    says = f"a multiple of 32 inputs; {count} scales of 144 inputs make none"
    with pytest.raises(ValueError, match=says):
        pack_codes("int4", torch.zeros(3, 144, dtype=torch.int8), torch.ones(3, count).half())


# -------------------------------------------------------------------------------------- directories


def quantized(path: Path, out: Path, quant: Quantization) -> Path:
    rounding.quantize_directory(path, out, quant)
    return out


@pytest.mark.parametrize(
    "name, dtype", [*((name, None) for name in QUANTS), ("int4-32", torch.float32)], ids=str
)
def test_saved_and_on_load_are_the_same_bits(short_demo, tmp_path, name, dtype):
    quant, head = QUANTS[name], Path(DEMO + "-eagle")
    out = quantized(short_demo, tmp_path / "demo", quant)
    ours, theirs = load_model(out, dtype), load_model(short_demo, dtype, quant=quant)
    assert ours.embedding.weight.dtype == (dtype or torch.bfloat16)
    assert_same_bits(ours, theirs)
    saved_head = load_head(quantized(head, tmp_path / "head", quant), ours)
    assert_same_bits(saved_head, load_head(head, theirs, quant))
    linears = [m for m in ours.modules() if isinstance(m, Linear)]
    assert len(linears) == 2 * 4 + 1, "all of them, no more"
    assert {m.format for m in linears} == {quant.format}
    assert ours.lm_head.fp32_out and not ours.layers[0].w2.fp32_out
    # the files are as small as they should be
    bits = 4 + 16 / quant.group_size if quant.group_size else 8
    tensors = {n: read() for n, read in WeightFiles(short_demo).readers.items()}
    rounds = {n for n, tensor in tensors.items() if rounding.is_quantized(n, tensor)}
    most = sum(t.numel() * bits / 8 if n in rounds else t.nbytes for n, t in tensors.items())
    size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    assert abs(size - most) < 0.02 * size
    assert (out / "tokenizer.model").read_bytes() == Path(DEMO, "tokenizer.model").read_bytes()


Tensors = dict[str, Tensor]


def tied(weights: Tensors, config: dict) -> None:
    config["tie_word_embeddings"] = True
    del weights["lm_head.weight"]


def tied_and_repeated(weights: Tensors, config: dict) -> None:
    config["tie_word_embeddings"] = True
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def with_biases(weights: Tensors, config: dict) -> None:
    config["architectures"] = ["Qwen2ForCausalLM"]
    for name in [name for name in weights if re.search("[qkv]_proj.weight", name)]:
        weights[name.replace("weight", "bias")] = random(len(weights[name]), seed=len(weights))


LAYOUTS: dict[str, Callable[[Tensors, dict], None] | None] = {
    "single": None, "sharded": None, "bin": None, "tied": tied, "tied-repeated": tied_and_repeated, "biases": with_biases,
}  # fmt: skip


def golden_copy(folder: Path, layout: str) -> Path:
    """The golden target in another layout."""
    weights, config = load_file(TARGET / "model.safetensors"), read_json(TARGET / "config.json")
    if LAYOUTS[layout]:
        LAYOUTS[layout](weights, config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif layout == "sharded":
        names = sorted(weights)
        index = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
        for file in set(index.values()):
            save_file({n: weights[n] for n in names if index[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@SMALL
def test_every_layout_can_be_read(tmp_path, quant, layout):
    path = golden_copy(tmp_path / "in", layout)
    ours = load_model(quantized(path, tmp_path / "out", quant))
    assert_same_bits(ours, load_model(path, quant=quant))
    assert ours.lm_head.format == quant.format
    assert isinstance(ours.embedding, torch.nn.Embedding)
    if layout.startswith("tied"):
        kind = FORMATS[quant.format]
        want = quantize.decode(*kind.encode(ours.embedding.weight, ours.lm_head.group_size))
        assert ours.lm_head.group_size and torch.equal(ours.lm_head.dequantize(), want)
    elif layout == "biases":
        layer = ours.layers[1].wqkv
        names = [f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"]
        bias = torch.cat([load_file(path / "model.safetensors")[name] for name in names])
        assert torch.equal(layer.bias, bias) and not layer.bias.requires_grad
        assert torch.equal(layer(torch.zeros(1, 64))[0], bias)
    else:
        assert_same_bits(ours, load_model(TARGET, quant=quant))


@SMALL
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


def test_a_device_without_groups_of_int8_takes_a_scale_per_output(tmp_path):
    """As on CUDA: codes of ours are rounded again, others' in groups become numbers."""
    out = quantized(TARGET, tmp_path / "out", INT8)
    whole, layer = (load_model(out, device=device).layers[1].w2 for device in ("cpu", "cpu:0"))
    assert [part.layout for part in layer.packed.parts] == ["INT8_OUTPUT"]
    want = quantize.decode(*Int8.encode(whole.dequantize(), 0))
    assert torch.equal(layer.dequantize(), want)


def test_quantized_demo_stays_the_demo():
    """Mean KL divergence from the bf16 demo on held-out text, in nats."""
    text = (Path(DEMO).parents[1] / "data/eval/demo.jsonl").read_text().splitlines()[0]
    exact = load(checkpoint=DEMO, draft="none", device="cpu", dtype="float32")
    ids = torch.tensor([exact.tokenizer.encode(json.loads(text)["turns"][0])[:200]])
    positions = torch.arange(ids.shape[1])[None]
    log_p = exact.target.logits(exact.target(ids, positions)).log_softmax(-1)
    for quant, most in zip(QUANTS.values(), (0.003, 0.08, 0.1, 0.12)):
        model = load_model(Path(DEMO), torch.float32, quant=quant)
        log_q = model.logits(model(ids, positions)).log_softmax(-1)
        divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        assert 0 < divergence < most, (quant, divergence)


# -------------------------------------------------------------------------------------------- draft

GOLDEN_PAIR = {"checkpoint": str(TARGET), "eagle": str(HEAD), "device": "cpu", "tree": "dynamic"}
OWN_LM_HEAD = [("none", "int4"), ("none", "int8"), ("int8", "int4")]  # target, draft
SHARED_LM_HEAD = [("int8", "none"), ("int4", "none"), ("int4", ""), ("none", "")]


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


@pytest.mark.parametrize("asked", ["", "int4", "int8", "none"])
def test_a_saved_head_on_a_float_target(tmp_path, asked):
    head = quantized(HEAD, tmp_path / "head", INT4)
    engine = load(quant_draft=asked, **GOLDEN_PAIR | {"eagle": str(head)})
    assert engine.option("quant") == engine.target.lm_head.format == "none"
    form = asked or "int4"
    assert engine.option("quant_draft") == engine.drafter.head.fc.format == form
    saved = load_head(head, engine.target).fc.dequantize()
    error = (engine.drafter.head.fc.dequantize() - saved).abs().max()
    assert error <= (asked == "int8") * saved.abs().max() / 250


FITS = {(96, 64): 32, (576, 1536): 64, (128, 64): 64, (4096, 11008): 64, (256,): 64}
UNFIT = [
    (Quantization("int4"), {"a": 64, "b": 48}, "group size 32 does not divide in_features 48 of b; use --quant int8"),
    (Quantization("int4", 128), {"a": 576}, "group size 128 does not divide in_features 576 of a; use group_size=64"),
]  # fmt: skip


def test_an_open_group_size_is_64_if_that_fits(tmp_path):
    """Each model chooses its own, and the draft's copy of the LM head too."""
    for inputs, size in FITS.items():
        assert fit_group(Quantization("int4"), dict(zip("ab", inputs))).group_size == size, inputs
    for quant, inputs, says in UNFIT:
        with pytest.raises(ValueError, match=f"int4 {says}"):
            fit_group(quant, inputs)
    engine = load(quant="int4", **GOLDEN_PAIR)
    assert engine.drafter.lm_head is engine.target.lm_head  # with any group size
    assert_same_bits(engine.target, load_model(TARGET, quant=INT4))
    out = quantized(TARGET, tmp_path / "out", Quantization("int4"))
    assert_same_bits(load_model(out), engine.target)
    drafter = load(quant_draft="int4", **GOLDEN_PAIR).drafter
    assert (drafter.head.fc.group_size, drafter.lm_head.group_size) == (32, 64)


# ------------------------------------------------------------------------------------ command lines


def run(capsys, main, *argv: str) -> tuple[str, str]:
    main(list(argv))
    return capsys.readouterr()


def test_quantize_and_generate(capsys, short_demo, tmp_path):
    demo, out = str(short_demo), str(tmp_path / "demo")
    said, err = run(capsys, run_quantize.main, "--checkpoint", demo, "--out", out)
    assert f"python generate.py --checkpoint {out} --head {demo}-eagle --prompt" in said
    total = len(WeightFiles(short_demo).readers)
    assert err.endswith(f"int4: {total} of {total} tensors\n") and "\r" not in err
    advised = shlex.split(said.partition("run: python generate.py ")[2])
    ids = ["--max_new_tokens", "8", "--json", "-", "--device", "cpu"]
    got = json.loads(run(capsys, main, *advised, *ids)[0])  # the source's head
    assert (got["config"]["draft"], got["config"]["head"]) == ("eagle", f"{demo}-eagle")
    argv = ("--checkpoint", f"{demo}-eagle", "--out", f"{out}-eagle")
    said, _ = run(capsys, run_quantize.main, *argv)
    assert f"python generate.py --checkpoint MODEL --head {out}-eagle --prompt" in said
    ids += ["--tree", "dynamic", "--prompt", "def f(x):"]
    got = json.loads(run(capsys, main, "--checkpoint", out, *ids)[0])
    want = json.loads(run(capsys, main, "--checkpoint", demo, "--quant", "int4", *ids)[0])
    assert got["tokens"] == want["tokens"]
    want = {"quant": "int4", "quant_draft": "int4", "group_size": 64, "draft": "eagle"}
    assert got["config"].items() >= want.items()


QUANTIZE = ["quantize", "--checkpoint", str(TARGET), "--out", "OUT"]
GENERATE = [
    "generate",
    "--checkpoint",
    str(TARGET),
    "--prompt_ids",
    "5,17",
    "--device",
    "cpu",
    "--group_size",
]
MISTAKES = [  # program and its arguments, what is said
    ([*QUANTIZE, "--group_size", "128"], "int4 group size 128 does not divide in_features 64 of lm_head.weight; use group_size=32"),
    (["quantize", "--out", "OUT"], "--checkpoint and --out are needed"),
    (["quantize", "--checkpoint", "OUT/x", "--out", "OUT"], "no such directory: .*/x"),
    ([*QUANTIZE[:3], "--out", str(TARGET), "--quant", "int8"], "--out holds the checkpoint itself"),
    (["quantize", "--checkpoint", "OUT/a/b", "--out", "OUT/a", "--overwrite"], "--out holds the checkpoint itself"),
    ([*GENERATE, "128", "--quant", "int4"], "int4 group size 128 does not divide in_features 64 of lm_head.weight; use group_size=32"),
    ([*GENERATE, "64", "--quant_draft", "int4", "--eagle", str(HEAD)], "64 does not divide in_features 160 of layers.0.w2"),
]  # fmt: skip


@pytest.mark.parametrize("line, says", MISTAKES)
def test_mistakes_are_one_line_and_nothing_is_written(capsys, tmp_path, line, says):
    if "OUT/a/b" in line:
        shutil.copytree(TARGET, tmp_path / "out/a/b")
    before = sorted(tmp_path.rglob("*"))
    program, *argv = (part.replace("OUT", str(tmp_path / "out")) for part in line)
    said = refused(capsys, {"quantize": run_quantize.main, "generate": main}[program], argv)
    assert re.search(says, said), said
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_there_is_kept_unless_told_otherwise(capsys, tmp_path):
    out = quantized(TARGET, tmp_path / "out", INT8)
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    argv = ["--checkpoint", str(TARGET), "--out", str(out), "--group_size", "32"]
    assert "exists; give --overwrite" in refused(capsys, run_quantize.main, argv)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    again = ["--checkpoint", str(out), "--out", f"{out}-2"]
    assert "quantized already; give the original" in refused(capsys, run_quantize.main, again)
    run(capsys, run_quantize.main, *argv, "--overwrite")
    assert load_model(out).lm_head.format == "int4"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# ------------------------------------------------------------------------------- disks and processes


def test_a_disk_too_small_for_the_codes(monkeypatch, tmp_path):
    """Known before anything is written, from the sizes that the files come to."""
    fits = quantized(Path(DEMO), tmp_path / "fits", Quantization("int4"))
    size = sum(f.stat().st_size for f in fits.glob("*.safetensors"))
    disk = SimpleNamespace(free=size - 200_000)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: disk)
    with pytest.raises(ValueError, match=r"needs 0.0 GB, and .* free; make room"):
        quantized(Path(DEMO), tmp_path / "out", Quantization("int4"))
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]
    disk.free = size
    assert quantized(Path(DEMO), tmp_path / "out", Quantization("int4")).is_dir()


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    out = quantized(TARGET, tmp_path / "out", INT8)
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    out.rename(tmp_path / "out.old.tmp")  # where the old model lies until the new one has its name

    def tensors():
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(ValueError, match="cannot write .*No space left"):
        writing.write_checkpoint(out, tensors(), {}, TARGET, overwrite=True)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
