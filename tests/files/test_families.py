"""Architectures against transformers: every row of cases/families.py.

1. Logits of a directory, also as other writers have it, and of a GGUF file are transformers' own.
2. 64 greedy tokens are transformers' own.
3. No drafter changes a token, in any form of the weights.
4. A pass in C++ equals its steps.
5. A wrong key, a wrong file and ranks that are not served are one line.
States of recurrent layers: test_states.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import verified
from drafters import RootOnly
from families import (
    FAMILIES,
    PLAIN_FAMILIES,
    file_of_next,
    random_next,
)
from family_checks import FORMS, OPERATED, assert_drafts_as_vanilla, loaded
from files.config import config_from, read_config
from files.rounding import quantize_directory
from files.weights import export_weights, load_model
from helpers import decode, engine_for, slow
from model import weight_names
from quantize import FORMATS, Linear, Quantization
from run.options import ROOT
from run.tp import check_parts
from tiny_models import (
    GREEDY,
    IDS,
    assert_same_config,
    assert_same_logits,
    by_passes,
    read_by_transformers,
    refused,
    refused_keys,
    saved,
    write,
)


def each(field: str, names=FAMILIES) -> list[tuple]:
    """The families' names and the entries of a field, a row each; of a case or another name its key."""
    return [(name, entry) for name in names for entry in getattr(FAMILIES[name], field)]


def test_the_page_says_what_is_compared():
    """docs/VERIFIED.md has a row for each family, and names tests that are there; its maker's header says how to write it."""
    assert verified.SERVED.keys() == FAMILIES.keys(), (
        "a family needs a row of SERVED in tests/cases/verified.py"
    )
    assert verified.missing_tests() == []
    assert (ROOT / "docs/VERIFIED.md").read_text(encoding="utf-8") == verified.page()


# -------------------------------------------------------------------------------- logits and texts


@pytest.mark.parametrize("name, case", each("cases"))
def test_directories(tmp_path, name, case):
    reference = FAMILIES[name].of(case)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    assert_same_logits(model, reference)
    assert model.config.tie_embeddings == reference.config.tie_word_embeddings
    assert model.config.max_context == 512  # a window is a layer's, and no shorter context


@pytest.mark.parametrize("name, writer", each("rewritten"))
def test_directories_of_other_writers(tmp_path, capsys, name, writer):
    family = FAMILIES[name]
    options, keys, tensors, note = vars(family.rewritten[writer]).values()
    reference = family.make(**options)
    saved(reference, tmp_path, keys, tensors)
    capsys.readouterr()
    model = load_model(tmp_path, torch.float32)
    said = capsys.readouterr().err
    assert note in said and said.count("\n") == bool(note)
    assert_same_logits(model, reference)


IN_FILES = [
    row
    for row in each("cases")
    if FAMILIES[row[0]].file_of and row[1] not in FAMILIES[row[0]].no_file
]


@pytest.mark.parametrize("name, case", IN_FILES)
def test_files(tmp_path, name, case):
    """llama.cpp (llama-cpp-python 0.3.36) reads files that are written so, too."""
    family = FAMILIES[name]
    reference = family.of(case)
    path = family.write(tmp_path / "m.gguf", reference)
    assert_same_logits(load_model(path), reference)
    assert_same_config(path, reference, {"norm_eps", *family.differs})  # norm_eps: fp32 in the file


def test_a_file_of_older_converters(tmp_path):
    reference = random_next()
    path = write(tmp_path / "m.gguf", *file_of_next(reference, old=True))
    assert_same_logits(load_model(path), reference)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_file_of_gemma_as_transformers_reads_it(tmp_path, in_blocks):
    path = FAMILIES["Gemma 3"].write(tmp_path / "m.gguf", FAMILIES["Gemma 3"].make(), in_blocks)
    reference = read_by_transformers(path)
    for layer in reference.model.layers:
        layer.self_attn.scaling = 32**-0.5  # it takes the width of Google's models, 256
    assert_same_logits(load_model(path, torch.float32), reference)


def test_the_query_scale_of_gemmas_27b(tmp_path):
    """It alone divides by another number than its heads' width: llama.cpp knows it by its 62 layers."""
    reference = FAMILIES["Gemma 3"].make(num_hidden_layers=62, query_pre_attn_scalar=16)
    path = FAMILIES["Gemma 3"].write(tmp_path / "m.gguf", reference)
    assert_same_config(path, reference, {"norm_eps", "rounds_scale"})
    assert read_config(path).query_scale == 0.25


def test_bfloat16_rounds_gemmas_embedding_scale_as_transformers_does(tmp_path):
    """8.0 is exact; the square root of 96 is not."""
    model = FAMILIES["Gemma 3"].make(hidden_size=96, dtype="bfloat16")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    scale = read_config(tmp_path).embedding_scale
    assert scale == torch.tensor(96**0.5).bfloat16().item() != 96**0.5


def test_a_window_of_128_and_a_longer_context(tmp_path):
    reference = FAMILIES["gpt-oss"].make(sliding_window=128, num_hidden_layers=2)
    reference.save_pretrained(tmp_path)
    ids = torch.randint(3, 96, (300,), generator=torch.Generator().manual_seed(2))
    assert_same_logits(load_model(tmp_path, torch.float32), reference, ids, widths=(64,))


@pytest.mark.parametrize(
    "name, case",
    [(name, family.greedy[0]) for name, family in FAMILIES.items()]
    + slow((name, case) for name, family in FAMILIES.items() for case in family.greedy[1:]),
)
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, name, case):
    reference = FAMILIES[name].of(case)
    reference.save_pretrained(tmp_path)
    target = load_model(tmp_path, torch.float32)
    ours = decode(engine_for(target, RootOnly(), max_new_tokens=64, ignore_eos=True), IDS.tolist())
    theirs = reference.generate(IDS[None], max_new_tokens=64, **GREEDY)
    assert ours.history[0] == theirs[0].tolist()


# ------------------------------------------------------------------------------------------ forms

RUNS = [(name, *run) for name, run in each("runs")]
RUNS += slow(
    row
    for name, family in FAMILIES.items()
    for case in dict.fromkeys(case for case, *_ in family.runs)
    for form in FORMS
    for row in [(name, case, form, 0.0), (name, case, form, 1.0)]
    if row not in RUNS and (family.file_of or form != "blocks")
)


@pytest.mark.parametrize("name, case, form, temperature", RUNS)
def test_no_drafter_changes_a_token(tmp_path, name, case, form, temperature):
    """Prompts and drafted paths cross the edges of the windows; passes are C++ where it serves the dtype."""
    target = loaded(tmp_path, name, case, form)
    assert_drafts_as_vanilla(target, OPERATED and form != "float32", temperature)


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_pass_in_cpp_equals_its_steps(tmp_path, name, form):
    """Of several widths; in fp32 PyTorch's steps are what runs."""
    family = FAMILIES[name]
    target = loaded(tmp_path, name, next(iter(family.cases)), form)
    for width in (1, 6, len(IDS)):
        target.fuse(False)
        want = by_passes(target, IDS, width)
        target.fuse(True)
        assert (target.program is not None) == (OPERATED and form == "bfloat16")
        torch.testing.assert_close(by_passes(target, IDS, width), want, atol=family.near, rtol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "Qwen3.5", "gpt-oss"])
def test_quantized_on_load_and_on_disk_are_the_same(tmp_path, name, form):
    """Routers and their numbers stay; a quantized directory has a tensor for every expert."""
    family = FAMILIES[name]
    case = {"Qwen3-MoE": "first dense", "Qwen3.5": "experts"}.get(name, "as it is")
    family.of(case).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    quant = Quantization(form, 32)
    quantize_directory(tmp_path / "m", tmp_path / "q", quant)
    models = [load_model(tmp_path / "q"), load_model(tmp_path / "m", quant=quant)]
    plain = load_model(tmp_path / "m")
    for part, module in plain.named_modules():
        ours, theirs = (model.get_submodule(part) for model in models)
        if isinstance(module, Linear) and theirs.packed:
            assert ours.format == theirs.format == form and torch.equal(ours.data, theirs.data)
            numbers = module.weight.float()
            error = (ours.dequantize().float() - numbers).std() / numbers.std()
            assert 1e-3 < error < {"int8": 0.02, "int4": 0.15}[form]
    assert torch.equal(models[0].layers[-1].router.weight, plain.layers[-1].router.weight)
    assert torch.equal(*(by_passes(model, IDS, 5) for model in models))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.in_fp32])
def test_these_numbers_stay_in_fp32(tmp_path, name):
    """Published files have them so, beside weights in bfloat16."""
    model = loaded(tmp_path, name, "as it is", "bfloat16")
    held = load_file(tmp_path / "model.safetensors")
    for ours, theirs in FAMILIES[name].in_fp32.items():
        assert torch.equal(model.get_parameter(f"layers.{ours}"), held[f"model.layers.{theirs}"])


# ------------------------------------------------------------------------------------------- config


def old_form(raw: dict) -> dict:
    """config.json as transformers before version 5 wrote it."""
    raw = dict(raw)
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {**rope, "rope_type": kind}
    raw["torch_dtype"] = raw.pop("dtype")
    if raw["model_type"] == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")
    return raw


@pytest.mark.parametrize("name, case", each("cases", PLAIN_FAMILIES))
def test_both_forms_of_config_json_mean_the_same_and_exports_are_what_was_loaded(
    tmp_path, name, case
):
    FAMILIES[name].of(case).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    model = load_model(tmp_path)
    assert config_from(old_form(raw), raw["architectures"][0]) == model.config
    exported = export_weights(model, weight_names(model.config), model.config, torch.float32)
    held = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == held.keys()
    assert all(torch.equal(exported[key], value) for key, value in held.items())


# their defaults are those of every family, or they must be there
COMMON = {
    "eos_token_id", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "sliding_window", "vocab_size",
}  # fmt: skip
ALL_OWN = ("LFM2", "Gemma 3", "Gemma 4")  # whose published files leave these out, too
# changes of transformers' default config.json: its heads' width there, one form of heads a kind
CHANGES = {"GLM-4.5": {"head_dim": 128}, "Gemma 4": {"per_layer_config": ...},
           "Granite 4": {"layer_types": ["full_attention"] * 32, "num_local_experts": 0, "position_embedding_type": "rope"}}  # fmt: skip
KINDS = [(name, next(iter(family.cases))) for name, family in FAMILIES.items()]
KINDS += [("Qwen3.5", "experts"), ("LFM2", "experts")]


@pytest.mark.parametrize("name, case", KINDS)
def test_a_key_that_is_left_out_has_transformers_default_or_is_refused(name, case):
    """Each alone, and all that have a default at once."""
    model = FAMILIES[name].of(case)
    architecture = type(model).__name__
    raw = json.loads(type(model.config)().to_json_string(use_diff=False)) | CHANGES.get(name, {})
    raw = {key: value for key, value in raw.items() if value is not ...}
    want = config_from(raw, architecture)
    left = dict(raw)
    for key in raw.keys() - (() if name in ALL_OWN else COMMON):
        others = {other: value for other, value in raw.items() if other != key}
        try:
            assert config_from(others, architecture) == want, key
            del left[key]
        except ValueError as error:
            assert "is missing" in str(error)
    assert len(left) < len(raw) and config_from(left, architecture) == want


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name, row", each("bad_keys"), ids=str)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, name, row):
    says, keys = row
    family = FAMILIES[name]
    assert says in refused_keys(capsys, tmp_path, family.of(family.bad_case), **keys)


@pytest.mark.parametrize("name, row", each("bad_files"), ids=str)
def test_a_file_that_is_not_read_is_one_line(capsys, tmp_path, name, row):
    further, without, says = row
    family = FAMILIES[name]
    model = family.of(family.bad_case)
    path = family.write(tmp_path / "m.gguf", model, further=further, without=without)
    assert says in refused(capsys, "--checkpoint", str(path))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.one_rank])
def test_ranks_are_refused(tmp_path, name):
    family = FAMILIES[name]
    family.of(family.bad_case).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=family.one_rank):
        check_parts(read_config(tmp_path), 2, tmp_path)
