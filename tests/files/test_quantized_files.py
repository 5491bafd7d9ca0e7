"""Checkpoints that others quantized: decoded weights, tokens generated with them, refused files.

compressed-tensors writes its own files here, and its converters decode those of AWQ and of FP8 in blocks. GPTQ and AWQ
files are written here as GPTQModel 7.7 and AutoAWQ 0.2.9 lay them out: their packers, cut out of the sources, were
compared with these once by hand; as packages they are no requirement of the tests.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from files.checkpoint import WeightFiles
from files.config import read_config
from files.gptq_awq import QuantizedFiles
from files.weights import CheckpointLoader, export_weights, load_model
from files.writing import write_checkpoint
from helpers import GOLDEN, OPERATORS, refused, slow
from model import Transformer, weight_names
from quantize import Linear, Quantization, Storage
from random_model import watch_loading
from run import quantize as run_quantize
from run.generate import generate, load, main
from run.options import DEMO

Parts = dict[str, Tensor]  # tensors by what they are called behind a layer's name


class Layout(NamedTuple):
    """A kind of file."""

    config: dict  # `quantization_config`
    # [N, K] fp32 -> the parts; the weight that they encode, [N, K] fp32
    write: Callable[[Tensor], tuple[Parts, Tensor]]


# ------------------------------------------------------------------------------------------ writers


def rounded(
    weight: Tensor, group: int, symmetric: bool, bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] and zero points [N, K / G] in 0..15 or 255, and fp16 scales, by the extremes of a group."""
    groups = weight.unflatten(1, (-1, group))
    most = 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (groups.abs().amax(-1) / (most / 2) if symmetric else (high - low) / most).half()
    middle = torch.full_like(low, 2 ** (bits - 1))
    zero = middle if symmetric else (-low / scale.float()).round().clamp(0, most)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), scale, zero.int()


def decoded(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    groups = codes.float().unflatten(1, (scale.shape[1], -1))
    if zero is not None:
        groups = groups - zero.float()[..., None]
    return (groups * scale.float()[..., None]).flatten(1)


def pack(values: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """[R, C] in 0..15 -> [R, C / 8] int32; `order`: which of 8 columns is stored first. Of 8 bits: 4 a number."""
    each = 32 // bits
    packed = torch.zeros(len(values), values.shape[1] // each, dtype=torch.int64)
    for column in range(packed.shape[1]):
        for place, which in enumerate(order[:each]):
            packed[:, column] |= values[:, each * column + which].long() << bits * place
    return packed.to(torch.int32)  # wraps around


def gptq(
    weight: Tensor, group: int, symmetric: bool, version: int, bits: int
) -> tuple[Parts, Tensor]:
    """As GPTQModel 7.7 packs (pack_original), and for version 1 lessens (convert_gptq_v2_to_v1_format_module)."""
    inputs = weight.shape[1]
    codes, scale, zero = rounded(weight, group if group > 0 else inputs, symmetric, bits)
    ones = 0x11111111 if bits == 4 else 0x01010101
    qzeros = pack(zero.T, bits=bits) - (ones if version == 1 else 0)
    groups = torch.arange(inputs, dtype=torch.int32) // (inputs // scale.shape[1])
    parts = {
        "qweight": pack(codes, bits=bits).T, "qzeros": qzeros, "scales": scale.T, "g_idx": groups,
    }  # fmt: skip
    return parts, decoded(codes, scale, zero)


def awq(weight: Tensor, group: int) -> tuple[Parts, Tensor]:
    """As AutoAWQ 0.2.9 packs (WQLinear_GEMM.from_linear), decoded by compressed-tensors."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    codes, scale, zero = rounded(weight, group, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros, scales = pack(codes.T, order), pack(zero.T, order), scale.T.contiguous()
    library = AutoAWQConverter(group_size=group)
    decoded_by_it = decoded(*library._convert_gemm_module(qweight, scales, qzeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}, decoded_by_it


def compressed(weight: Tensor, format: str, args: dict) -> tuple[Parts, Tensor]:
    """Written and decoded by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    library = BaseCompressor.get_value_from_registry(format)
    if args["strategy"] == "tensor":
        low, high = weight.amin()[None], weight.amax()[None]
    elif args["strategy"] == "block":
        blocks = [rows.split(128, 1) for rows in weight.split(128)]
        low, high = (
            torch.tensor([[float(f(t)) for t in row] for row in blocks])
            for f in (torch.min, torch.max)
        )
    else:
        groups = weight.unflatten(1, (-1, args.get("group_size") or weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
    scale, zero = calculate_qparams(low, high, scheme.weights)
    scale = scale.bfloat16()
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    parts = library.compress(given, scheme)
    wide = library.decompress(parts | {"weight_scale": scale.float()}, scheme)  # in fp32
    return parts, wide["weight"]


def fp8(weight: Tensor, block: int | None, dtype: torch.dtype) -> tuple[Parts, Tensor]:
    """As Qwen3's FP8 files are; None: AutoFP8's, with a scale per tensor. Blocks are decoded by compressed-tensors."""
    from compressed_tensors.entrypoints.convert.converters import fp8block_dequantizer

    if block is None:
        scale = weight.abs().amax() / 448
        parts = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        return parts | {"input_scale": torch.tensor(2.0)}, parts["weight"].float() * scale
    strips = [[t.abs().amax() / 448 for t in rows.split(block, 1)] for rows in weight.split(block)]
    scale = torch.tensor(strips).to(dtype)
    wide = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    wide = wide[: len(weight), : weight.shape[1]]
    parts = {"weight": (weight / wide).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    library = fp8block_dequantizer.FP8BlockDequantizer([], [], (block, block), torch.float32)
    return parts, library._create_dequantized_weight(parts["weight"], scale)


def of_gptq(group: int, symmetric: bool = True, version: int = 1, bits: int = 4, **more) -> Layout:
    said = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": False,
    }  # fmt: skip
    said["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    write = partial(gptq, group=group, symmetric=symmetric, version=version, bits=bits)
    return Layout(said | more, write)


def of_awq(group: int, **more) -> Layout:
    said = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": "gemm",
    }  # fmt: skip
    return Layout(said | {"modules_to_not_convert": None} | more, partial(awq, group=group))


def of_compressed(
    format: str, strategy: str, bits: int = 4, type: str = "int", symmetric: bool = True, **more
) -> Layout:
    args = {"num_bits": bits, "type": type, "symmetric": symmetric, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": args | {"actorder": None}, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    said |= {"config_groups": {"group_0": group}, "kv_cache_scheme": None}
    return Layout(said, partial(compressed, format=format, args=args))


def of_fp8(block: int | None, dtype: torch.dtype = torch.bfloat16) -> Layout:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block:
        said["weight_block_size"] = [block, block]
    return Layout(said, partial(fp8, block=block, dtype=dtype))


PACKED, FLOAT = "pack-quantized", "float-quantized"
LAYOUTS = {
    "gptq": of_gptq(128), "gptq-32": of_gptq(32), "gptq-256": of_gptq(256),
    "gptq-channel": of_gptq(-1), "gptq-v2": of_gptq(64, version=2),
    "gptq-zeros": of_gptq(64, symmetric=False),
    "gptq-v2-zeros": of_gptq(128, symmetric=False, version=2), "gptq-8": of_gptq(128, bits=8),
    "gptq-8-channel": of_gptq(-1, bits=8), "gptq-8-zeros": of_gptq(64, symmetric=False, bits=8),
    "gptq-8-v2-zeros": of_gptq(-1, symmetric=False, version=2, bits=8), "awq": of_awq(128),
    "awq-64": of_awq(64), "packed-32": of_compressed(PACKED, "group", group_size=32),
    "packed-64": of_compressed(PACKED, "group", group_size=64),
    "packed-128": of_compressed(PACKED, "group", group_size=128),
    "packed-channel": of_compressed(PACKED, "channel"),
    "packed-zeros": of_compressed(PACKED, "group", group_size=64, symmetric=False),
    "packed-channel-zeros": of_compressed(PACKED, "channel", symmetric=False),
    "packed-8": of_compressed(PACKED, "channel", 8),
    "packed-8-groups": of_compressed(PACKED, "group", 8, group_size=32),
    "packed-8-zeros": of_compressed(PACKED, "group", 8, group_size=64, symmetric=False),
    "int8": of_compressed("int-quantized", "channel", 8),
    "int8-groups": of_compressed("int-quantized", "group", 8, group_size=128),
    "float-tensor": of_compressed(FLOAT, "tensor", 8, "float"),
    "float-channel": of_compressed(FLOAT, "channel", 8, "float"),
    "float-block": of_compressed(FLOAT, "block", 8, "float", block_structure=[128, 128]),
    "fp8": of_fp8(128), "fp8-fp32": of_fp8(128, torch.float32), "fp8-tensor": of_fp8(None),
}  # fmt: skip
ZEROS = [name for name in LAYOUTS if "zeros" in name or "awq" in name]
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def write_model(
    folder: Path, layout: Layout, source: Path = Path(DEMO), keep: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Write a quantized copy of a float model. keep: parts of names of layers that stay as they are.

    Returns: the weights that the library decodes, by name.
    """
    folder.mkdir(exist_ok=True)
    tensors, weights = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        stays = any(part in layer for part in keep)
        if layer.endswith(("_proj", ".w1", ".w2", ".w3")) and not stays:
            parts, weights[name] = layout.write(tensor.float())
            tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    shutil.copyfile(source / "config.json", folder / "config.json")
    change_config(folder, quantization_config=layout.config)
    return weights


def change_config(folder: Path, **changes) -> dict:
    """Change keys of config.json; None leaves one out. Returns: what the file says then."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    raw = {name: value for name, value in raw.items() if value is not None}
    file.write_text(json.dumps(raw))
    return raw


def add_tensors(folder: Path, **tensors: Tensor) -> None:
    """Write further tensors into a directory, or others of the same names."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


# --------------------------------------------------------------------------------------- one weight


def read_one(folder: Path, layout: Layout, parts: Parts) -> QuantizedFiles:
    tensors = {f"a.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": layout.config}))
    return QuantizedFiles(WeightFiles(folder))


@each_layout
def test_a_weight_is_decoded_as_its_library_decodes_it(tmp_path, name):
    layout = LAYOUTS[name]
    outputs, inputs = (200, 320) if name in ("fp8", "fp8-fp32", "float-block") else (40, 256)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight[0].abs_()  # a zero point of 0 in version 1 of GPTQ borrows from its neighbours
    weight[1] = -weight[1].abs()
    parts, expected = layout.write(weight)
    files = read_one(tmp_path, layout, parts)
    codes, scale, zero = files.quantized["a.weight"]()
    assert not files.readers and codes.dtype == torch.int8 and (zero is not None) == (name in ZEROS)
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


# fp32; dim 64, ffn 160, V 97
PAIR = (GOLDEN / "models/target_llama_mha", GOLDEN / "models/head_eagle12_mha")
CPU = {"device": "cpu", "draft": "none"}
WHOLE = {  # one of each layout, of those that fit the golden models
    "gptq": of_gptq(32),
    "gptq-v2-zeros": of_gptq(-1, symmetric=False, version=2),
    "awq": of_awq(32),
    "packed": of_compressed(PACKED, "channel"),
    "packed-zeros": of_compressed(PACKED, "group", group_size=32, symmetric=False),
    "packed-8": of_compressed(PACKED, "channel", 8),
    "gptq-8": of_gptq(32, bits=8),
    "packed-8-zeros": of_compressed(PACKED, "group", 8, group_size=32, symmetric=False),
    "int8": of_compressed("int-quantized", "channel", 8),
    "float": of_compressed(FLOAT, "channel", 8, "float"),
    "fp8": of_fp8(128),
}
DECODED = ("gptq", "packed-zeros", "gptq-8", "fp8")  # one of each format that layers have then
each_whole = pytest.mark.parametrize("name", WHOLE)


def quantized_layers(model: torch.nn.Module) -> dict[str, Linear]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    return {name: layer for name, layer in layers.items() if layer.packed}


def check_layers(
    model: torch.nn.Module, names: dict[str, tuple[str, ...]], weights: dict[str, Tensor]
) -> None:
    """The layers hold the weights that the library decoded, and no other layer is quantized.

    FP8 is rounded once more, to 127 steps of the largest magnitude of an output.
    """
    layers = quantized_layers(model)
    assert {part for layer in layers for part in names[f"{layer}.weight"]} == set(weights)
    for name, layer in layers.items():
        expected = torch.cat([weights[part] for part in names[f"{name}.weight"]])
        found = layer.dequantize().flatten(0, -2)
        most = 0.5001 * expected.abs().amax(1, keepdim=True) / 127
        assert torch.equal(found, expected) or ((found - expected).abs() <= most).all(), name


@each_whole
def test_layers_hold_what_the_library_decodes_and_multiply_with_it(tmp_path, capsys, name):
    weights = write_model(tmp_path / "m", WHOLE[name], PAIR[0])
    model = load_model(tmp_path / "m")
    names = weight_names(model.config)
    check_layers(model, names, weights)
    rounds = name in ("float", "fp8")
    notes = [line for line in capsys.readouterr().err.splitlines() if "FP8" in line]
    assert len(notes) == rounds
    assert all(note.endswith("they become int8 with a scale per output") for note in notes)
    layer = model.layers[0].w13
    exact = torch.cat([weights[part] for part in names["layers.0.w13.weight"]])
    assert rounds or torch.equal(layer.dequantize(), exact)
    assert not model.lm_head.packed
    assert model.lm_head.weight.dtype == torch.float32
    x = torch.randn(5, exact.shape[1], generator=torch.Generator().manual_seed(0))
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


# every layout is read exactly (above); layers of one format decode alike
@pytest.mark.parametrize("name", [*DECODED, *slow(sorted(WHOLE.keys() - set(DECODED)))])
def test_trees_and_lookup_say_what_vanilla_says(tmp_path, capsys, name):
    write_model(tmp_path / "m", WHOLE[name], PAIR[0])
    options = {"checkpoint": str(tmp_path / "m"), "max_new_tokens": 16, "ignore_eos": True}
    tree = {"eagle": str(PAIR[1]), "tree_depth": 3, "tree_topk": 4, "tree_size": 12}
    prompts = [[9, 33, 2, 71, 9, 33, 2]]
    vanilla = load(**options, **CPU)
    expected = generate(vanilla, prompts).tokens
    quant = "int4" if "8" not in name and name != "float" else "int8"
    assert vanilla.option("quant") == quant
    assert vanilla.option("group_size") == (0 if quant == "int8" else 32)
    for draft in ({"draft": "eagle", "quant_draft": "none", **tree}, {"draft": "ngram"}):
        result = generate(load(**options, **CPU | draft), prompts)
        assert result.tokens == expected and result.stats["cycles"] > 0


def test_a_draft_model_may_be_such_a_file(tmp_path):
    write_model(tmp_path / "m", WHOLE["awq"], PAIR[0])
    options = {"checkpoint": str(PAIR[0]), "max_new_tokens": 20, "device": "cpu"}
    expected = generate(load(**options, draft="none"), [[5, 17, 3]]).tokens
    engine = load(**options, draft="model", draft_checkpoint=str(tmp_path / "m"))
    assert engine.option("quant_draft") == "int4"
    assert engine.drafter.model.layers[0].w2.format == "int4"
    result = generate(engine, [[5, 17, 3]])
    assert result.tokens == expected and result.stats["tau"] > 1.5


@pytest.mark.parametrize("name, fits", [("gptq-8", False), ("int8", True), ("gptq", True)])
def test_int8_that_cuda_cannot_hold_is_widened(originals, capsys, name, fits):
    """Its product has a scale per output. Groups become numbers."""
    files = QuantizedFiles(WeightFiles(originals(name)))
    part = "model.layers.1.mlp.down_proj.weight"
    want = files.quantized[part]().numbers()
    with torch.device("meta"):
        model = Transformer(read_config(originals(name)))
    names = weight_names(model.config)
    for device in ("cpu", "cuda"):
        loading = CheckpointLoader(
            files, Storage(torch.float32, device, Quantization("int8", saved=True))
        )
        packed = loading.choose_packed(model, names)
        assert ("layers.1.w2.weight" in packed) == (fits or device == "cpu")
    assert ("int8 on CUDA has no groups of inputs; 21 weight(s)" in capsys.readouterr().err) != fits
    assert fits or torch.equal(files.read(part), want)


@OPERATORS
@pytest.mark.parametrize("keep", [(), ("layers.0.", "layers.3.mlp", "o_proj")], ids=["all", "some"])
def test_all_layers_in_one_call(tmp_path, keep):
    """As with --compile on a CPU in bf16; some of them stay in 16 bits."""
    weights = write_model(tmp_path / "m", LAYOUTS["packed-zeros" if keep else "gptq"], keep=keep)
    assert len(weights) == (8 * 7 - 7 - 3 - 7 if keep else 8 * 7)
    options = {
        "checkpoint": str(tmp_path / "m"), "max_new_tokens": 16, "device": "cpu", "draft": "none",
    }  # fmt: skip
    prompt, engine = [[1, 293, 401, 5, 77]], load(**options)
    expected = generate(engine, prompt).tokens
    engine = load(**options, compile=True)
    assert engine.target.program is not None
    assert generate(engine, prompt).tokens == expected and len(expected[0]) == 16
    check_layers(engine.target, weight_names(engine.target.config), weights)


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


def test_zeros_where_a_model_has_no_bias_are_no_mistake(tmp_path):
    """As AutoGPTQ wrote them (AutoGPTQ issue 555)."""
    out = tmp_path / "m"
    write_model(out, WHOLE["gptq"], PAIR[0])
    before, name = load_model(out), "model.layers.0.mlp.up_proj.bias"
    add_tensors(out, **{name: torch.zeros(160)})
    assert torch.equal(before.layers[0].w13.data, load_model(out).layers[0].w13.data)
    add_tensors(out, **{name: torch.ones(160)})
    with pytest.raises(ValueError, match="1 unexpected weight.*up_proj.bias"):
        load_model(out)


def test_what_is_missing_in_a_config_is_read_elsewhere(tmp_path):
    """The version under its other name, and without `sym` the zero points of the file."""
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    for version, symmetric in ((1, True), (2, True), (2, False)):
        layout = of_gptq(64, symmetric, version)
        config = layout.config | {"format": f"gptq_v{version}".removesuffix("_v1")}
        del config["checkpoint_format"], config["sym"]
        parts, expected = layout.write(weight)
        files = read_one(tmp_path, Layout(config, None), parts)
        assert torch.equal(decoded(*files.quantized["a.weight"]()), expected)
    layout = of_awq(64, version=None, format="GEMM")
    assert read_one(tmp_path, layout, layout.write(weight)[0]).stored.method == "awq"


def test_groups_of_layers_may_differ_in_how_they_were_made(originals, tmp_path):
    def observed(config: dict, tensors: dict) -> None:
        one = config["config_groups"]["group_0"]
        weights = one["weights"] | {"observer": "mse", "actorder": "static"}
        config["config_groups"]["group_1"] = one | {"weights": weights}

    out = shutil.copytree(originals("packed"), tmp_path / "m")
    spoil(out, observed)
    ours, theirs = (load_model(path).layers[0].w2 for path in (out, originals("packed")))
    assert torch.equal(ours.data, theirs.data)


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
    on_cpu, on_cuda = (planned_bytes(monkeypatch, originals(name), d) for d in ("cpu", "cuda"))
    model = load_model(originals(name), dtype=torch.bfloat16)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    small = ("ropes.0", "table")  # of a few bytes
    taken = sum(tensor.nbytes for name, tensor in held.items() if not name.endswith(small))
    assert taken <= on_cpu <= 1.02 * taken
    with torch.device("meta"):
        model = Transformer(read_config(originals(name)))
    numbers = sum(2 * parameter.numel() for parameter in model.parameters())
    assert on_cuda == (numbers if wide else on_cpu) and on_cpu < numbers


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_they_run_in_bfloat16(tmp_path, name):
    """benchmarks/QUANTIZED_FILES.md advises bfloat16 for a CPU. The config.json of these models says float16."""
    write_model(tmp_path / "m", LAYOUTS[name])
    change_config(tmp_path / "m", torch_dtype="float16")
    options = {"checkpoint": str(tmp_path / "m"), "max_new_tokens": 4, **CPU}
    half, other = load(**options), load(**options, dtype="bfloat16")
    assert (half.option("dtype"), other.option("dtype")) == ("float16", "bfloat16")
    assert other.option("quant") == "int4"
    ids, positions = torch.tensor([[1, 293, 401, 5, 77]]), torch.arange(5)[None]
    with torch.inference_mode():
        want, got = (e.target.logits(e.target(ids, positions)) for e in (half, other))
    error = (got - want).square().mean().sqrt() / want.std()
    # activations fall to other codes of 8 bits; unrelated scores would give 1.4
    assert error < 0.06, error
    assert generate(other, [ids[0].tolist()]).tokens[0]


def test_an_lm_head_in_codes(originals, tmp_path):
    """It is loaded where it is a weight of its own, and never dropped."""
    out = shutil.copytree(originals("int8"), tmp_path / "m")
    codes, scale = torch.ones(97, 64, dtype=torch.int8), torch.full((97, 1), 0.5)
    add_tensors(out, **{"lm_head.weight": codes, "lm_head.weight_scale": scale})
    assert (load_model(out).lm_head.dequantize() == 0.5).all()
    change_config(out, tie_word_embeddings=True)
    says = "m: tie_word_embeddings is true, and lm_head.weight is quantized.*; set tie"
    with pytest.raises(ValueError, match=says):
        load_model(out)


def test_a_head_of_others_is_refused_with_its_path(originals, tmp_path, capsys):
    out = shutil.copytree(PAIR[1], tmp_path / "head")
    change_config(out, quantization_config=WHOLE["gptq"].config)
    line = failure(capsys, "--checkpoint", str(PAIR[0]), "--eagle", str(out))
    assert f"{out}: config.json says gptq, and no weight has qweight and scales" in line


def test_scales_of_caches_and_activations_are_not_read(tmp_path, capsys):
    out = tmp_path / "m"
    write_model(out, WHOLE["float"], PAIR[0])
    before = load_model(out)
    more = ("self_attn.k_scale", "self_attn.v_proj.output_scale", "mlp.up_proj.input_scale")
    add_tensors(out, **{f"model.layers.1.{name}": torch.ones(1) for name in more})
    assert "not used" not in capsys.readouterr().err
    assert torch.equal(before.layers[1].w13.data, load_model(out).layers[1].w13.data)
    said = "; scales of activations and of the cache are not used\n"
    assert capsys.readouterr().err.count(said) == 1


# ---------------------------------------------------------------------------------------- bad files

UP, DOWN = "model.layers.1.mlp.up_proj.", "model.layers.1.mlp.down_proj."


def spoil(folder: Path, edit: Callable[[dict, dict], None]) -> None:
    """Change the config and the tensors of a directory."""
    file = folder / "config.json"
    raw, tensors = json.loads(file.read_text()), load_file(folder / "model.safetensors")
    edit(raw["quantization_config"], tensors)
    file.write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")


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


BAD = {  # layout, what is done to it, what the line says
    "method": ("gptq", said(quant_method="bitsandbytes"), "quantized with bitsandbytes are not supported, only gptq, awq"),
    "no method": ("gptq", said(quant_method=None), "the key 'quant_method' is missing"),
    "3 bits": ("gptq", said(bits=3), "bits must be 4 or 8; it is 3"),
    "8 bits": ("gptq", said(bits=8), r"proj.scales must be .* of shape \[1, 64\]; it is float16 \[2, 64\]: .*use the config"),
    "no bits": ("gptq", said(bits=None), "the key 'bits' is missing"),
    "unnamed": ("gptq", unnamed, "quantized with bitsandbytes are not supported, only gptq, awq"),
    "marlin": ("gptq", said(checkpoint_format="marlin"), "checkpoint_format must be gptq or gptq_v2; it is .marlin"),
    "marlin layout": ("gptq", said(is_marlin_format=True), "is_marlin_format must be False; it is True"),
    "two versions": ("gptq", said(format="gptq_v2"), "checkpoint_format and format must be equal; they are gptq and gptq_v2"),
    "dynamic": ("gptq", said(dynamic={"-:lm_head": {}, "+:.*mlp.*": {"bits": 8}}), "dynamic must be left out, as layers in several formats are not supported; .*mlp"),
    "group": ("gptq", said(group_size=48), "group_size must be a multiple of 32, or -1, .*; it is 48"),
    "other group": ("gptq", said(group_size=-1), r"q_proj.scales must be .* of shape \[1, 64\]; it is float16 \[2, 64\]: .* use the config"),
    "larger group": ("gptq", said(group_size=96), "the group size 96 does not divide the 64 inputs"),
    "unfit group": ("gptq", said(group_size=64), r"scales must be float16 or bfloat16 of shape \[1, 64\]; it is float16 \[2, 64\]"),
    "not symmetric": ("gptq-v2-zeros", said(sym=True), "q_proj.weight: .* symmetric, and this weight has zero points"),
    "order": ("gptq", with_(UP + "g_idx", lambda t: t.flip(0)), "up_proj.g_idx permutes the inputs .act-order.*--quant int4"),
    "no scales": ("gptq", without(UP + "scales"), "the weight model.layers.1.mlp.up_proj.scales is missing"),
    "no zeros": ("awq", without(UP + "qzeros"), "the weight model.layers.1.mlp.up_proj.qzeros is missing"),
    "no layer": ("awq", without(*(UP + p for p in ("qweight", "qzeros", "scales"))), "1 missing weight.s.: model.layers.1.mlp.up_proj.weight;"),
    "short": ("gptq", with_(UP + "scales", lambda t: t[:-1]), r"up_proj.scales must be float16 or bfloat16 of shape \[2, 160\]; it is float16 \[1, 160\]"),
    "wide scales": ("gptq", with_(UP + "scales", lambda t: t.float()), "up_proj.scales must be float16 or bfloat16"),
    "shape": ("gptq", with_(DOWN + "qweight", lambda t: t[:-4]), "down_proj.scales must be .* of shape .4, 64.; it is float16 .5, 64."),
    "bytes": ("gptq", with_(UP + "qweight", lambda t: t.view(torch.int16)), "up_proj.qweight must be int32"),
    "nan": ("gptq", with_(UP + "scales", with_nan), "up_proj.scales holds NaN or infinite values; download it again"),
    "infinite": ("fp8", with_(UP + "weight_scale_inv", lambda t: t / 0), "up_proj.weight_scale_inv holds NaN or infinite"),
    "gemv": ("awq", said(version="gemv"), "version must be gemm; it is .gemv"),
    "nvfp4": ("packed", said(format="nvfp4-pack-quantized"), "format must be one of pack-quantized .*; it is nvfp4-pack-quantized"),
    "sparse": ("packed", said(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config must be left out, or of the format dense; it is .*sparse-24"),
    "schemes": ("packed", two_schemes, "config_groups must be one scheme; it holds 2"),
    "packed 3": ("packed", weights_said(num_bits=3), "format must be one of .*; it is pack-quantized of int with 3 bits"),
    "packed group": ("packed", weights_said(strategy="tensor_group", group_size=32), "the strategy of pack-quantized of int with 4 bits must be group or channel; it is tensor_group"),
    "no group": ("packed", weights_said(strategy="group"), "the key 'group_size' is missing"),
    "8 groups": ("int8", weights_said(strategy="group", group_size=128), "the group size 128 does not divide the 64 inputs of .*; use the config made for these"),
    "8 scales": ("packed-8-zeros", with_(UP + "weight_scale", lambda t: t.float()), r"up_proj.weight_scale must be float16 or bfloat16 of shape \[160, 2\]"),
    "8 zeros": ("int8", weights_said(symmetric=False), "int-quantized of int with 8 bits must be symmetric"),
    "said shape": ("packed", with_(UP + "weight_shape", lambda t: t + 8), r"up_proj.weight_shape says \[168, 72\], and weight_packed holds \[160, 64\]"),
    "no fp8 scale": ("fp8", without(UP + "weight_scale_inv"), "up_proj.weight is float8_e4m3fn and has no scale"),
    "e5m2": ("fp8", with_(UP + "weight", lambda t: t.float().to(torch.float8_e5m2)), "up_proj.weight must be float8_e4m3fn of shape"),
    "block": ("fp8", said(weight_block_size=[64, 64]), r"gate_proj.weight_scale_inv must be .* of shape \[3, 1\]; it is bfloat16 \[2, 1\]"),
    "no block": ("fp8", said(weight_block_size=[128]), "weight_block_size must be two whole numbers"),
    "awq of gptq": ("gptq", said(quant_method="awq"), r"21 unexpected weight.s.: .*g_idx"),
    "gptq of awq": ("awq", said(quant_method="gptq", sym=False), r"q_proj.qzeros must be .* of shape \[16, 1\]|q_proj.scales must be int|q_proj.scales must be .* of shape"),
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Good directories of every layout, each written once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("original") / name
            write_model(made[name], WHOLE[name], PAIR[0])
        return made[name]

    return get


def failure(capsys, *argv: str) -> str:
    options = ["--prompt_ids", "5,17", "--device", "cpu", "--max_new_tokens", "2"]
    return refused(capsys, main, [*argv, *options])


@pytest.mark.parametrize("how", BAD)
def test_what_is_wrong_or_not_served_is_one_line(originals, tmp_path, capsys, how):
    name, edit, says = BAD[how]
    out = shutil.copytree(originals(name), tmp_path / "m")
    spoil(out, edit)
    line = failure(capsys, "--checkpoint", str(out))
    assert re.search(says, line) and str(out) in line, line


def test_quant_of_such_a_file(originals, capsys):
    path = str(originals("gptq"))
    line = failure(capsys, "--checkpoint", path, "--quant", "int8")
    assert "is quantized already (int4); drop --quant" in line
    with pytest.raises(SystemExit):
        run_quantize.main(["--checkpoint", path, "--out", path + "-int4"])
    assert "is quantized already; give the original" in capsys.readouterr().err


def test_older_files_say_it_under_another_key(originals, tmp_path):
    out = shutil.copytree(originals("packed"), tmp_path / "m")
    change_config(out, compression_config=WHOLE["packed"].config, quantization_config=None)
    assert load(checkpoint=str(out), **CPU).option("quant") == "int4"


@pytest.mark.parametrize("name, file", [("gptq", "quantize_config"), ("awq", "quant_config")])
def test_older_files_say_it_in_a_file_of_its_own(originals, tmp_path, name, file):
    """AutoGPTQ and AutoAWQ wrote nothing into config.json, and AutoGPTQ named the weights itself."""
    out = shutil.copytree(originals(name), tmp_path / "m")
    change_config(out, quantization_config=None)
    recipe = {key: v for key, v in WHOLE[name].config.items() if key != "quant_method"}
    (out / f"{file}.json").write_text(json.dumps(recipe))
    (out / "model.safetensors").rename(out / "gptq_model-4bit-128g.safetensors")
    engines = [load(checkpoint=str(path), **CPU) for path in (originals(name), out)]
    assert engines[1].option("quant") == "int4"
    tokens = [generate(engine, [[5, 6, 7]], max_new_tokens=8).tokens for engine in engines]
    assert tokens[0] == tokens[1]


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
    names = ("plain", "gptq", "awq", "packed-128", "int8", "fp8")
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
