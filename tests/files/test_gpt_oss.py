"""gpt-oss against transformers: tiny random models as directories, in numbers and in MXFP4, and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from backends.library import has_cpu_operators
from family_checks import (
    FORMS,
    assert_drafts_as_vanilla,
    assert_same_file,
    assert_same_greedy_text,
    assert_same_rows,
)
from files.config import open_source, read_config
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import OPERATORS
from quantize import BLOCKS, Quantization
from run.generate import load
from tiny_models import (
    IDS,
    NAMES,
    Kind,
    assert_same_directory,
    assert_same_logits,
    by_passes,
    gguf_tensors,
    metadata_of,
    refused,
    refused_keys,
    write,
)

OPERATED = has_cpu_operators()  # whether there is a C++ compiler
WINDOW = 8  # tokens; prompts are longer
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32, "rope_theta": 150000.0,
}  # fmt: skip
SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW,
    "max_position_embeddings": 128, "rope_parameters": YARN,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
CASES = {
    "as it is": {},
    "one key head": {"num_key_value_heads": 1},
    "no biases in attention": {"attention_bias": False},
    "another bound": {"swiglu_limit": 0.5, "swiglu_alpha": 1.1},
    "one expert a token": {"num_experts_per_tok": 1},
    "every expert": {"num_experts_per_tok": 5},
    "whole bounds of YaRN": {"rope_parameters": YARN | {"truncate": True}},
    "another rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "layers in any order": {"layer_types": [KINDS[i % 3 == 0] for i in range(4)]},
    "no layer sees all": {"layer_types": KINDS[:1] * 4},
    "every layer sees all": {"layer_types": KINDS[1:] * 4},
    "one window": {"sliding_window": 1},
    "a window beyond the prompt": {"sliding_window": 64},
    "tied": {"tie_word_embeddings": True},
}  # fmt: skip


def random_model(**options):
    """A gpt-oss: its bound is reached, and sinks take a share."""
    return tiny_models.random_model(
        "GptOss", SIZES | options, lambda name: (float("norm" in name or "sinks" in name), 0.25)
    )


# --------------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    model = assert_same_directory(tmp_path, random_model(**CASES[case]))
    assert model.config.tie_embeddings == (case == "tied")
    assert model.config.max_context == 128  # a window is a layer's, and no shorter context


def test_64_greedy_tokens_are_those_of_transformers(tmp_path):
    assert_same_greedy_text(tmp_path, random_model())


def test_a_window_of_128_and_a_longer_context(tmp_path):
    options = {"sliding_window": 128, "max_position_embeddings": 512, "num_hidden_layers": 2}
    reference = random_model(**options)
    reference.save_pretrained(tmp_path)
    ids = torch.randint(3, 96, (300,), generator=torch.Generator().manual_seed(2))
    assert_same_logits(load_model(tmp_path, torch.float32), reference, ids, widths=(64,))


def test_missing_keys_have_transformers_defaults(tmp_path):
    """As the file of the 20B, which leaves out the bound and its factor."""
    keys = {
        "num_hidden_layers": 24, "num_local_experts": 32, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "max_position_embeddings": 131072,
        "rope_theta": 150000, "rope_scaling": {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096},
        "sliding_window": 128, "experts_per_token": 4, "rms_norm_eps": 1e-5, "eos_token_id": 200002,
    }  # fmt: skip
    raw = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **keys}
    raw |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = read_config(tmp_path)
    theirs = transformers.GptOssConfig(**keys)
    assert (ours.n_experts, ours.experts_per_token) == (32, theirs.num_experts_per_tok)
    assert (ours.alpha, ours.limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (ours.max_context, ours.rope_theta, ours.rope_scaling["factor"]) == (131072, 150000, 32)
    assert not ours.rope_scaling["truncate"] and ours.qkv_bias and ours.o_bias
    assert (ours.dtype, ours.norm_eps) == ("bfloat16", 1e-5)  # it names no dtype
    seen = [step.window for i in range(24) for step in ours.layer(i) if hasattr(step, "window")]
    assert seen == [128 * (kind == "sliding_attention") for kind in theirs.layer_types]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_on_load_and_on_disk_are_the_same(tmp_path, form):
    """A quantized directory has a tensor for every expert; routers keep their numbers."""
    random_model().to(torch.bfloat16).save_pretrained(tmp_path / "m")
    quant = Quantization(form, 32)
    quantize_directory(tmp_path / "m", tmp_path / "q", quant)
    models = [load_model(tmp_path / "q"), load_model(tmp_path / "m", quant=quant)]
    assert {model.layers[0].w13.format for model in models} == {form}
    assert models[0].layers[0].router.weight.dtype == torch.bfloat16
    for model in models:
        model.fuse(True)
    assert torch.equal(*(by_passes(model, IDS, 5) for model in models))


# --------------------------------------------------------------------------------------------- MXFP4


def write_mxfp4(path: Path, **options) -> Path:
    """Write a model with random codes and powers of two in the place of the experts' numbers."""
    random_model(**options).save_pretrained(path)
    held = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def random_bytes(low: int, high: int, *shape: int):
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = held.pop(name).shape
        held[f"{name}_blocks"] = random_bytes(0, 256, experts, outputs, inputs // 32, 16)
        held[f"{name}_scales"] = random_bytes(122, 126, experts, outputs, inputs // 32)
    save_file(held, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def dequantized(path: Path):
    """The same model, whose numbers are those that transformers makes of the codes."""
    read = transformers.GptOssForCausalLM.from_pretrained
    form = transformers.Mxfp4Config(dequantize=True)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return read(path, quantization_config=form, **options).eval()


IN_BLOCKS = Quantization(BLOCKS, saved=True)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


@pytest.mark.parametrize("operator", [pytest.param(True, marks=OPERATORS), False])
def test_mxfp4_as_numbers(mxfp4, monkeypatch, operator):
    monkeypatch.setattr("files.stacks.cpu_operators_are_loaded", lambda: operator)
    assert_same_logits(load_model(mxfp4, torch.float32), dequantized(mxfp4))


@OPERATORS
def test_mxfp4_in_its_bits(mxfp4):
    """No weight is changed, and the bits are the file's: 4.25 a weight."""
    model = load_model(mxfp4, torch.bfloat16, quant=IN_BLOCKS)
    reference = dequantized(mxfp4)
    for ours, theirs in zip(model.layers, reference.model.layers):
        stacked = theirs.mlp.experts.gate_up_proj.transpose(1, 2)  # [E, 2 I, K], rows in turn
        assert torch.equal(ours.w13.dequantize(), torch.cat((stacked[:, ::2], stacked[:, 1::2]), 1))
        assert torch.equal(ours.w2.dequantize(), theirs.mlp.experts.down_proj.transpose(1, 2))
        assert ours.w13.data.numel() * 8 == 4.25 * stacked.numel()
    with torch.no_grad():
        want = reference(IDS[None]).logits[0]
        for fuse in (False, True):
            model.fuse(fuse)
            error = (by_passes(model, IDS, 5) - want).square().mean().sqrt() / want.std()
            assert error < 0.08  # 0.054; with the experts in bfloat16 0.040


@OPERATORS
def test_the_command_keeps_the_bits(mxfp4, capsys):
    options = {"checkpoint": str(mxfp4), "draft": "none", "device": "cpu"}
    engine = load(**options)
    assert engine.target.layers[0].w13.format == engine.resolved["quant"] == BLOCKS
    assert "weights run as they are in the file (MXFP4)" in capsys.readouterr().err
    assert load(**options, dtype="float32").target.layers[0].w13.format == "none"
    assert "MXFP4 weights are converted to float32" in capsys.readouterr().err
    assert load(**options, quant="int4").target.layers[0].w13.format == BLOCKS
    assert "has no more bits than --quant int4" in capsys.readouterr().err


def spoil(path: Path, change) -> None:
    held = load_file(path / "model.safetensors")
    change(held, "model.layers.1.mlp.experts.down_proj")
    save_file(held, path / "model.safetensors", {"format": "pt"})


def no_number(held, name):
    held[f"{name}_scales"][3, 5, 1] = 255


def no_scales(held, name):
    del held[f"{name}_scales"]


def other_blocks(held, name):
    held[f"{name}_blocks"] = held[f"{name}_blocks"][..., :8].contiguous()


def few_scales(held, name):
    held[f"{name}_scales"] = held[f"{name}_scales"][:2].contiguous()


def scales_of_another_type(held, name):
    held[f"{name}_scales"] = held[f"{name}_scales"].float()


def flat(held, name):
    held[f"{name}_blocks"] = held[f"{name}_blocks"].flatten(2)


SPOILT = [
    (no_number, "has a scale that is NaN or infinite"),
    (no_scales, "down_proj_scales is missing"),
    (other_blocks, "its scales are no MXFP4"),
    (few_scales, "its scales are no MXFP4"),
    (scales_of_another_type, "its scales are no MXFP4"),
    (flat, "a stack of experts has 4 dimensions"),
]


@pytest.mark.parametrize("dtype", ["", "float32"])
@pytest.mark.parametrize("change, says", SPOILT)
def test_broken_mxfp4_is_one_line(capsys, tmp_path, change, says, dtype):
    spoil(write_mxfp4(tmp_path / "m"), change)
    capsys.readouterr()
    given = ("--dtype", f"{dtype}") if dtype else ()
    assert says in refused(capsys, "--checkpoint", str(tmp_path / "m"), *given)


# --------------------------------------------------------------------------------------- GGUF files

GGUF_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def apart(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The converter's stacks: gate and up apart, each as outputs by inputs."""
    experts, _, ending = name.rpartition(".")
    if not experts.endswith("experts"):
        return {name: value}
    bias = ending.endswith("_bias")
    kind = "bias" if bias else "weight"
    rows = value if bias else value.transpose(1, 2)
    if ending.startswith("down"):
        return {f"{experts}.down_proj.{kind}": rows}
    gate, up = rows[:, ::2], rows[:, 1::2]
    return {f"{experts}.gate_proj.{kind}": gate, f"{experts}.up_proj.{kind}": up}


def write_file(path: Path, model, kind: str = "F32", without=()) -> Path:
    """Write a model, with its experts in blocks of a kind; without: keys and tensors left out."""
    metadata = metadata_of(
        model, "gpt-oss", {"expert_feed_forward_length": model.config.intermediate_size}
    )
    tensors = gguf_tensors(model, GGUF_NAMES, apart)

    def kind_of(name: str) -> str:
        return kind if name.endswith("_exps.weight") else "F32"

    return write(path, metadata, tensors, kind_of, without)


IN_FILES = (
    "as it is",
    "one key head",
    "another rope",
    "every expert",
    "a window beyond the prompt",
)


@pytest.mark.parametrize("case", IN_FILES)
def test_files(tmp_path, case):
    reference = random_model(**CASES[case])
    assert_same_file(write_file(tmp_path / "m.gguf", reference), reference, "alpha")


@OPERATORS
def test_mxfp4_in_a_file_is_mxfp4_in_a_directory(tmp_path):
    """Both keep the same bits, in the same bytes."""
    reference = random_model()
    path = write_file(tmp_path / "m.gguf", reference, "MXFP4")
    ours = load_model(path, torch.bfloat16, quant=IN_BLOCKS)
    held = {}
    for name, value in reference.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            held[name] = value
            continue
        rows = value.transpose(1, 2).contiguous().numpy()
        each = torch.from_numpy(gguf.quantize(rows, Kind.MXFP4).reshape(*rows.shape[:2], -1, 17))
        codes = torch.cat((each[..., 1:] & 15, each[..., 1:] >> 4), -1)  # 32 codes in order
        held[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        held[f"{name}_scales"] = each[..., 0].contiguous()
    folder = write_mxfp4(tmp_path / "hf")
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    theirs = load_model(folder, torch.bfloat16, quant=IN_BLOCKS)
    for a, b in zip(ours.layers, theirs.layers):
        assert torch.equal(a.w13.data, b.w13.data) and torch.equal(a.w2.data, b.w2.data)
    assert torch.equal(by_passes(ours, IDS, 5), by_passes(theirs, IDS, 5))
    assert open_source(path).mostly_has(4)


WITHOUT = [
    "gpt-oss.expert_feed_forward_length", "gpt-oss.attention.sliding_window", "gpt-oss.expert_used_count",
    "blk.3.attn_sinks.weight", "blk.1.ffn_up_exps.bias", "blk.0.post_attention_norm.weight",
    "blk.2.ffn_gate_inp.bias",
]  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_a_file_with_a_key_or_tensor_missing_is_one_line(capsys, tmp_path, name):
    path = write_file(tmp_path / "m.gguf", random_model(), without=(name,))
    said = refused(capsys, "--checkpoint", str(path))
    assert "missing" in said and (name in said or "weight(s)" in said)


# ------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize(
    "form, temperature",
    [("float32", 1.0), ("bfloat16", 0.0), ("bfloat16", 1.0), pytest.param("blocks", 1.0, marks=OPERATORS)],
)  # fmt: skip
def test_no_drafter_changes_a_token(tmp_path, form, temperature):
    """Prompts and drafted paths cross the edges of the windows; passes are C++ where it serves the dtype."""
    reference = random_model(max_position_embeddings=512)
    reference.save_pretrained(tmp_path)
    write_file(tmp_path / "m.gguf", reference, "MXFP4")
    in_cpp = OPERATED and form != "float32"
    assert_drafts_as_vanilla(FORMS[form](tmp_path), in_cpp, temperature)


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_the_fast_way_gives_the_same_rows(tmp_path, form):
    """The C++ pass, where it serves the dtype, and PyTorch's steps."""
    random_model().save_pretrained(tmp_path)
    assert_same_rows(FORMS[form](tmp_path), OPERATED and form == "bfloat16", 2e-2)


# ----------------------------------------------------------------------------------------- bad input

BAD_KEYS = [
    ("sliding_window", 0, "sliding_window must be a whole number from 1"),
    ("layer_types", ["sliding_attention"], "layer_types must name all 4 layers; it names 1"),
    ("layer_types", ["linear_attention"] * 4, "layer_types must be a list of"),
    ("swiglu_limit", 0, "swiglu_limit must be a number above 0"),
    ("swiglu_alpha", "1.7", "swiglu_alpha must be a number above 0"),
    ("hidden_act", "gelu", "hidden_act must be silu or swish"),
    ("num_experts_per_tok", 6, "num_experts_per_tok must be 1 to num_local_experts (5)"),
    ("num_local_experts", 4, "the config says num_local_experts 4, and the weights hold 5"),
    ("rope_parameters", YARN | {"rope_type": "dynamic"}, "RoPE scaling must be one of"),
]


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_an_unknown_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})
