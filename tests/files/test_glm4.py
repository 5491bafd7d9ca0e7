"""GLM-4 against transformers: tiny random models as directories and GGUF files; drafting; refusals."""

from __future__ import annotations

import pytest

import tiny_models
from family_checks import (
    FORMS,
    assert_drafts_as_vanilla,
    assert_same_file,
    assert_same_greedy_text,
)
from helpers import slow
from tiny_models import (
    NAMES,
    assert_same_directory,
    gguf_tensors,
    metadata_of,
    refused_keys,
    write,
)

SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 3, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "as it is": {},
    "a quarter is turned, tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    },
    "all is turned, no biases": {
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


def random_model(**options):
    return tiny_models.random_model("Glm4", SIZES | options)


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    assert_same_directory(tmp_path, random_model(**CASES[case]))


GGUF_NAMES = NAMES | {
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip


def write_file(path, model, kinds="F32"):
    """As the converter does: neighbours stay neighbours, and gate stays above up."""
    turned = int(model.config.head_dim * model.config.rope_parameters["partial_rotary_factor"])
    metadata = metadata_of(model, "glm4", {"rope.dimension_count": turned})
    return write(path, metadata, gguf_tensors(model, GGUF_NAMES), kinds)


@pytest.mark.parametrize("case", [next(iter(CASES)), *slow([*CASES][1:])])
def test_files(tmp_path, case):
    """llama.cpp (llama-cpp-python 0.3.36) reads a file that is written so, too."""
    reference = random_model(**CASES[case])
    path = write_file(tmp_path / "m.gguf", reference)
    assert_same_file(path, reference)


def test_64_greedy_tokens_are_those_of_transformers(tmp_path):
    assert_same_greedy_text(tmp_path, random_model())


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "blocks", *slow(["int8", "int4"])])
def test_no_drafter_changes_a_token(tmp_path, form, temperature):
    reference = random_model()
    reference.save_pretrained(tmp_path)
    write_file(tmp_path / "m.gguf", reference, "Q8_0")
    assert_drafts_as_vanilla(FORMS[form](tmp_path), form != "float32", temperature)


BAD_KEYS = [
    ("hidden_act", "gelu", "hidden_act must be silu"),
    ("rope_parameters", {"partial_rotary_factor": 0.1}, "leave an even number"),
    ("layer_types", ["linear_attention"] * 3, "must be a list of sliding_attention and full_"),
    ("layer_types", ["full_attention"], "layer_types must name all 3 layers; it names 1"),
    ("attention_bias", "yes", "attention_bias must be true or false"),
    ("num_key_value_heads", 4, "its config asks for"),
]


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})
