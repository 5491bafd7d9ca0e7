"""Checkpoints that others quantized: decoded weights, tokens generated with them, refused files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from files.checkpoint import WeightFiles
from files.config import read_config
from files.gptq_awq import QuantizedFiles
from files.rounding import quantize_directory
from files.weights import export_weights, load_model
from files.writing import write_checkpoint
from helpers import GOLDEN, OPERATORS, refused
from model import Transformer, weight_names
from quantize import Linear, Quantization
from quantized_layouts import (
    LAYOUTS,
    WHOLE,
    Layout,
    Parts,
    add_tensors,
    change_config,
    decoded,
    write_model,
)
from random_model import watch_loading
from run import quantize as run_quantize
from run.generate import main
from run.options import DEMO

# --------------------------------------------------------------------------------------- one weight


def read_one(folder: Path, layout: Layout, parts: Parts) -> QuantizedFiles:
    tensors = {f"a.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": layout.config}))
    return QuantizedFiles(WeightFiles(folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_is_decoded_as_its_library_decodes_it(tmp_path, name):
    layout = LAYOUTS[name]
    outputs, inputs = (200, 320) if name in ("fp8", "fp8-fp32", "float-block") else (40, 256)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight[0].abs_()  # a zero point of 0 in version 1 of GPTQ borrows from its neighbours
    weight[1] = -weight[1].abs()
    parts, expected = layout.write(weight)
    files = read_one(tmp_path, layout, parts)
    codes, scale, zero = files.quantized["a.weight"]()
    assert not files.readers and codes.dtype == torch.int8
    assert (zero is not None) == ("zeros" in name or "awq" in name)
    if scale.dim() > 1:
        half = 8 if files.stored.format == "int4" else 128
        assert codes.min() == -half and codes.max() == half - 1
        assert scale.dtype == parts.get("scales", parts.get("weight_scale")).dtype
        found = decoded(codes, scale, zero)
    else:
        assert scale.dtype == torch.float32 and scale.shape == (outputs,)
        found = codes.float() * scale[:, None]
    if files.stored.format != "fp8":
        assert torch.equal(found, expected)
        return
    assert torch.equal(files.decoded("a"), expected)
    assert ((found - expected).abs() <= expected.abs().amax(1, keepdim=True) / 127 * 0.5001).all()


# ------------------------------------------------------------------------------------------- models

PAIR = (GOLDEN / "models/target_llama_mha", GOLDEN / "models/head_eagle12_mha")  # fp32; V 97
CPU = {"device": "cpu", "draft": "none"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A function: the directory of a layout and the weights that its library decodes, written once."""
    root = tmp_path_factory.mktemp("originals")

    @cache
    def of(name: str) -> tuple[Path, dict[str, Tensor]]:
        if name == "ours":
            quantize_directory(PAIR[0], root / name, Quantization("int4", 32))
            return root / name, {}
        return root / name, write_model(root / name, WHOLE[name], PAIR[0])

    return of


def check_layers(
    model: torch.nn.Module, names: dict[str, tuple[str, ...]], weights: dict[str, Tensor]
) -> None:
    """The layers hold the weights that the library decoded, and no other layer is quantized.

    FP8 is rounded once more, to 127 steps of the largest magnitude of an output.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear) and m.packed}
    assert {part for layer in layers for part in names[f"{layer}.weight"]} == set(weights)
    for name, layer in layers.items():
        expected = torch.cat([weights[part] for part in names[f"{name}.weight"]])
        found = layer.dequantize().flatten(0, -2)
        most = 0.5001 * expected.abs().amax(1, keepdim=True) / 127
        assert torch.equal(found, expected) or ((found - expected).abs() <= most).all(), name


@pytest.mark.parametrize("name", WHOLE)
def test_layers_hold_what_the_library_decodes_and_multiply_with_it(originals, capsys, name):
    path, weights = originals(name)
    capsys.readouterr()
    model = load_model(path)
    check_layers(model, weight_names(model.config), weights)
    notes = [line for line in capsys.readouterr().err.splitlines() if "FP8" in line]
    assert len(notes) == (name in ("float", "fp8"))
    assert all(note.endswith("they become int8 with a scale per output") for note in notes)
    assert not model.lm_head.packed
    assert model.lm_head.weight.dtype == torch.float32
    layer = model.layers[0].w13
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    # a CPU rounds activations to 127 steps of the largest of a block, here at most of the row
    most = x.abs().amax(1, keepdim=True) / 127 * 0.5001 * layer.dequantize().abs().sum(1)
    assert ((layer(x) - x @ layer.dequantize().T).abs() <= most + 1e-5).all()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    """A random Mixtral whose widths int4 can have."""
    folder = tmp_path_factory.mktemp("mixtral")
    shutil.copyfile(GOLDEN / "models/target_mixtral/config.json", folder / "config.json")
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    change_config(folder, **sizes, num_hidden_layers=1, num_local_experts=4)
    torch.manual_seed(0)
    config = read_config(folder)
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    weights = export_weights(model, weight_names(config), config, torch.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["gptq", "awq", "packed-8", "packed-8-zeros", "fp8"])
def test_experts_are_stacks(mixtral, tmp_path, name):
    weights = write_model(tmp_path / "m", WHOLE[name], mixtral)
    model = load_model(tmp_path / "m")
    check_layers(model, weight_names(model.config), weights)
    assert model.layers[0].w13.packed and model.layers[0].w13.experts
    assert model.layers[0].router.weight.dtype == torch.float32


# ------------------------------------------------------------------------ the same, said otherwise

Edit = Callable[[Path], None]


def recipe_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def recipe(**changes) -> Edit:
    """Change keys of the recipe; None: left out."""

    def edit(path: Path) -> None:
        config = recipe_of(path) | changes
        config = {key: value for key, value in config.items() if value is not None}
        change_config(path, quantization_config=config)

    return edit


def of_own_file(file: str) -> Edit:
    """AutoGPTQ and AutoAWQ wrote nothing into config.json, and AutoGPTQ named the weights itself."""

    def edit(path: Path) -> None:
        config = {key: v for key, v in recipe_of(path).items() if key != "quant_method"}
        (path / f"{file}.json").write_text(json.dumps(config))
        change_config(path, quantization_config=None)
        (path / "model.safetensors").rename(path / "gptq_model-4bit-128g.safetensors")

    return edit


def older_key(path: Path) -> None:
    change_config(path, compression_config=recipe_of(path), quantization_config=None)


def two_groups(path: Path) -> None:
    """They differ in how their scales were found."""
    one = recipe_of(path)["config_groups"]["group_0"]
    other = one | {"weights": one["weights"] | {"observer": "mse", "actorder": "static"}}
    recipe(config_groups={"group_0": one, "group_1": other})(path)


def zero_bias(path: Path) -> None:
    """As AutoGPTQ wrote it (AutoGPTQ issue 555)."""
    add_tensors(path, **{"model.layers.0.mlp.up_proj.bias": torch.zeros(160)})


def further_scales(path: Path) -> None:
    """Of the cache and of activations."""
    names = ("self_attn.k_scale", "self_attn.v_proj.output_scale", "mlp.up_proj.input_scale")
    add_tensors(path, **{f"model.layers.1.{name}": torch.ones(1) for name in names})


SCALES = "; scales of activations and of the cache are not used\n"
OTHERWISE = {  # layout, change, note
    "quantize_config.json": ("gptq", of_own_file("quantize_config"), ""),
    "quant_config.json": ("awq", of_own_file("quant_config"), ""),
    "version's other name": ("gptq", recipe(checkpoint_format=None, format="gptq"), ""),
    "version 2's other name": (
        "gptq-v2-zeros",
        recipe(checkpoint_format=None, format="gptq_v2"),
        "",
    ),
    "no sym": ("gptq", recipe(sym=None), ""),  # the zero points of the file say it
    "no sym, zeros": ("gptq-v2-zeros", recipe(sym=None), ""),
    "AWQ's other name": ("awq", recipe(version=None, format="GEMM"), ""),
    "compression_config": ("packed", older_key, ""),
    "two groups of layers": ("packed", two_groups, ""),
    "zero biases": ("gptq", zero_bias, ""),
    "further scales": ("float", further_scales, SCALES),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_files_say_otherwise_is_the_same_model(originals, tmp_path, capsys, name):
    layout, edit, note = OTHERWISE[name]
    path = shutil.copytree(originals(layout)[0], tmp_path / "m")
    edit(path)
    theirs = load_model(originals(layout)[0]).state_dict()
    capsys.readouterr()
    ours = load_model(path).state_dict()
    assert note in capsys.readouterr().err
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_layer_that_is_quantized_in_part_becomes_numbers(tmp_path, capsys):
    """q without k and v, which are one layer here; and an embedding, which is no linear layer."""
    out = tmp_path / "m"
    weights = write_model(out, WHOLE["int8"], PAIR[0], keep=("k_proj", "v_proj"))
    codes = torch.ones(97, 64, dtype=torch.int8)
    add_tensors(
        out,
        **{
            "model.embed_tokens.weight": codes,
            "model.embed_tokens.weight_scale": torch.full((97, 1), 0.5),
        },
    )
    model = load_model(out)
    assert "quantized in part become numbers; 4 weight(s): " in capsys.readouterr().err
    assert not model.layers[0].wqkv.packed and model.layers[0].w2.packed
    expected = weights["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(model.layers[0].wqkv.weight[: len(expected)], expected)
    assert (model.embedding.weight == 0.5).all()


def planned_bytes(monkeypatch, path: Path, device: str) -> int:
    """The memory that `load_model` asks for before it reads a weight."""

    def ask(plan, *rest):
        raise RuntimeError(sum(plan.values()))

    with monkeypatch.context() as patch, pytest.raises(RuntimeError) as asked:
        patch.setattr("files.weights.check_memory", ask)
        load_model(path, dtype=torch.bfloat16, device=device)
    return asked.value.args[0]


@pytest.mark.parametrize(
    "name, wide", [("gptq", False), ("awq", False), ("gptq-8", True), ("int8", False)]
)
def test_the_memory_that_is_asked_for_is_what_they_take(originals, monkeypatch, name, wide):
    """Scales in fp16 and zero points are words of 4 bytes, as many as the file has groups.

    On CUDA int8 in groups is widened; outputs of one scale, and int4, stay in codes.
    """
    path = originals(name)[0]
    on_cpu, on_cuda = (planned_bytes(monkeypatch, path, d) for d in ("cpu", "cuda"))
    model = load_model(path, dtype=torch.bfloat16)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    small = ("ropes.0", "table")  # of a few bytes
    taken = sum(tensor.nbytes for name, tensor in held.items() if not name.endswith(small))
    assert taken <= on_cpu <= 1.02 * taken
    with torch.device("meta"):
        model = Transformer(read_config(path))
    numbers = sum(2 * parameter.numel() for parameter in model.parameters())
    assert on_cuda == (numbers if wide else on_cpu) and on_cpu < numbers


# ----------------------------------------------------------------------------------------- damages

UP, DOWN = "model.layers.1.mlp.up_proj.", "model.layers.1.mlp.down_proj."


def said(**changes) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.update(changes)


def weights_said(**changes) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(changes)


def without(*names: str) -> Callable[[dict, dict], None]:
    return lambda config, tensors: [tensors.pop(name) for name in names]


def with_(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.update({name: value(tensors[name]).contiguous()})


def two_schemes(config: dict, tensors: dict) -> None:
    one = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = one | {"weights": one["weights"] | {"num_bits": 8}}


def unnamed(config: dict, tensors: dict) -> None:
    config.clear()
    config["load_in_4bit"] = True


def with_nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[3] = torch.nan
    return tensor


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
BAD = {  # layout, what is done to it, what the line says
    "method": ("gptq", said(quant_method="bitsandbytes"), "quantized with bitsandbytes are not supported, only gptq, awq"),
    "3 bits": ("gptq", said(bits=3), "bits must be 4 or 8; it is 3"),
    "unnamed": ("gptq", unnamed, "quantized with bitsandbytes are not supported, only gptq, awq"),
    "marlin": ("gptq", said(checkpoint_format="marlin"), "checkpoint_format must be gptq or gptq_v2; it is .marlin"),
    "two versions": ("gptq", said(format="gptq_v2"), "checkpoint_format and format must be equal; they are gptq and gptq_v2"),
    "dynamic": ("gptq", said(dynamic={"-:lm_head": {}, "+:.*mlp.*": {"bits": 8}}), "dynamic must be left out, as layers in several formats are not supported; .*mlp"),
    "group": ("gptq", said(group_size=48), "group_size must be a multiple of 32, or -1, .*; it is 48"),
    "not symmetric": ("gptq-v2-zeros", said(sym=True), "q_proj.weight: .* symmetric, and this weight has zero points"),
    "order": ("gptq", with_(UP + "g_idx", lambda t: t.flip(0)), "up_proj.g_idx permutes the inputs .act-order.*--quant int4"),
    "no layer": ("awq", without(*(UP + p for p in ("qweight", "qzeros", "scales"))), "1 missing weight.s.: model.layers.1.mlp.up_proj.weight;"),
    "short": ("gptq", with_(UP + "scales", lambda t: t[:-1]), r"up_proj.scales must be float16 or bfloat16 of shape \[2, 160\]; it is float16 \[1, 160\]"),
    "nan": ("gptq", with_(UP + "scales", with_nan), "up_proj.scales holds NaN or infinite values; download it again"),
    "gemv": ("awq", said(version="gemv"), "version must be gemm; it is .gemv"),
    "nvfp4": ("packed", said(format="nvfp4-pack-quantized"), "format must be one of pack-quantized .*; it is nvfp4-pack-quantized"),
    "sparse": ("packed", said(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config must be left out, or of the format dense; it is .*sparse-24"),
    "schemes": ("packed", two_schemes, "config_groups must be one scheme; it holds 2"),
    "packed 3": ("packed", weights_said(num_bits=3), "format must be one of .*; it is pack-quantized of int with 3 bits"),
    "packed group": ("packed", weights_said(strategy="tensor_group", group_size=32), "the strategy of pack-quantized of int with 4 bits must be group or channel; it is tensor_group"),
    "8 groups": ("int8", weights_said(strategy="group", group_size=128), "the group size 128 does not divide the 64 inputs of .*; use the config made for these"),
    "8 zeros": ("int8", weights_said(symmetric=False), "int-quantized of int with 8 bits must be symmetric"),
    "said shape": ("packed", with_(UP + "weight_shape", lambda t: t + 8), r"up_proj.weight_shape says \[168, 72\], and weight_packed holds \[160, 64\]"),
    "no fp8 scale": ("fp8", without(UP + "weight_scale_inv"), "up_proj.weight is float8_e4m3fn and has no scale"),
    "e5m2": ("fp8", with_(UP + "weight", lambda t: t.float().to(torch.float8_e5m2)), "up_proj.weight must be float8_e4m3fn of shape"),
    "block": ("fp8", said(weight_block_size=[64, 64]), r"gate_proj.weight_scale_inv must be .* of shape \[3, 1\]; it is bfloat16 \[2, 1\]"),
    "our scale": ("ours", without(f"{Q_PROJ}_scale"), f"the weight {Q_PROJ}_scale is missing; download it again"),
    "ours of before": ("ours", lambda config, tensors: config.update(quant_method="gpt-eagle"), "an earlier quantize.py wrote it, .*; run quantize.py once more on the original$"),
    "a bias": ("gptq", lambda config, tensors: tensors.update({UP + "bias": torch.ones(160)}), "1 unexpected weight.*up_proj.bias"),
}  # fmt: skip


def failure(capsys, *argv: str) -> str:
    options = ["--prompt_ids", "5,17", "--device", "cpu", "--max_new_tokens", "2"]
    return refused(capsys, main, [*argv, *options])


@pytest.mark.parametrize("how", BAD)
def test_what_is_wrong_or_not_served_is_one_line(originals, tmp_path, capsys, how):
    name, edit, says = BAD[how]
    out = shutil.copytree(originals(name)[0], tmp_path / "m")
    file = out / "config.json"
    raw, tensors = json.loads(file.read_text()), load_file(out / "model.safetensors")
    edit(raw["quantization_config"], tensors)
    file.write_text(json.dumps(raw))
    save_file(tensors, out / "model.safetensors")
    line = failure(capsys, "--checkpoint", str(out))
    assert re.search(says, line) and str(out) in line, line


def test_quant_of_such_a_file_and_a_head(originals, tmp_path, capsys):
    path = str(originals("gptq")[0])
    line = failure(capsys, "--checkpoint", path, "--quant", "int8")
    assert "is quantized already (int4); drop --quant" in line
    line = refused(capsys, run_quantize.main, ["--checkpoint", path, "--out", path + "-int4"])
    assert "is quantized already; give the original" in line
    head = shutil.copytree(PAIR[1], tmp_path / "head")
    change_config(head, quantization_config=WHOLE["gptq"].config)
    line = failure(capsys, "--checkpoint", str(PAIR[0]), "--eagle", str(head))
    assert f"{head}: config.json says gptq, and no weight has qweight and scales" in line


def test_an_lm_head_in_codes(originals, tmp_path):
    """It is loaded where it is a weight of its own, and never dropped."""
    out = shutil.copytree(originals("int8")[0], tmp_path / "m")
    codes, scale = torch.ones(97, 64, dtype=torch.int8), torch.full((97, 1), 0.5)
    add_tensors(out, **{"lm_head.weight": codes, "lm_head.weight_scale": scale})
    assert (load_model(out).lm_head.dequantize() == 0.5).all()
    change_config(out, tie_word_embeddings=True)
    says = "m: tie_word_embeddings is true, and lm_head.weight is quantized.*; set tie"
    with pytest.raises(ValueError, match=says):
        load_model(out)


# ------------------------------------------------------------------------------------------- memory


@cache
def random_parts(name: str, n: int, k: int) -> Parts:
    """A random weight as the layout has it, the same one for all layers of these sizes. name: plain for 16 bits"""
    weight = torch.randn(n, k) / 50
    return {"weight": weight.bfloat16()} if name == "plain" else LAYOUTS[name].write(weight)[0]


def write_random_model(
    folder: Path, name: str, dim: int, inner: int, layers: int, vocab: int
) -> int:
    """Returns: the bytes of its files. Writes: `folder`."""
    raw = json.loads((Path(DEMO) / "config.json").read_text())
    raw |= {"hidden_size": dim, "intermediate_size": inner, "num_hidden_layers": layers}
    raw |= {"num_attention_heads": dim // 64, "num_key_value_heads": dim // 256, "head_dim": 64}
    raw["vocab_size"] = vocab
    if name != "plain":
        raw["quantization_config"] = LAYOUTS[name].config
    attention = {f"self_attn.{part}": (dim, dim) for part in "qo"}
    attention |= {f"self_attn.{part}": (dim // 4, dim) for part in "kv"}
    feed_forward = {"mlp.gate": (inner, dim), "mlp.up": (inner, dim), "mlp.down": (dim, inner)}

    def tensors():
        for end in ("model.embed_tokens", "lm_head"):
            yield f"{end}.weight", torch.full((vocab, dim), 0.01).bfloat16()
        yield "model.norm.weight", torch.ones(dim).bfloat16()
        for i in range(layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{i}.{norm}.weight", torch.ones(dim).bfloat16()
            for layer, (n, k) in (attention | feed_forward).items():
                for part, value in random_parts(name, n, k).items():
                    own = value.clone(memory_format=torch.contiguous_format)
                    yield f"model.layers.{i}.{layer}_proj.{part}", own

    write_checkpoint(folder, tensors(), raw, Path(DEMO))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@OPERATORS
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc"
)
def test_loading_takes_little_more_memory_than_the_file_has(tmp_path):
    """Weights are unpacked and packed one by one."""
    names = ("plain", "gptq", "fp8")
    folders, files_bytes = [], []
    for name in names:
        write_random_model(tmp_path / f"{name} first", name, 256, 256, 1, 200)
        files_bytes.append(write_random_model(tmp_path / name, name, 512, 1024, 8, 2000))
        folders += [tmp_path / f"{name} first", tmp_path / name]
    grown = watch_loading("none", folders, 100_000)[1::2]
    for name, file_bytes, (peak_bytes, model_bytes) in zip(names, files_bytes, grown, strict=True):
        print(f"{name}: {file_bytes} bytes of files, {model_bytes} kept, at most {peak_bytes}")
        # a weight's codes and words have 2 MB, which a real file dwarfs
        assert 0.9 * model_bytes <= peak_bytes <= 1.25 * file_bytes + 2e6
