"""Qwen2-MoE against transformers: tiny random models as directories and GGUF files; drafting; refusals."""

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
    expert_keys,
    gguf_tensors,
    metadata_of,
    of_experts,
    refused_keys,
    write,
)

SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": 0, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
CASES = {
    "as it is": {},
    "shares add up to 1, no biases": {"norm_topk_prob": True, "qkv_bias": False},
    "tied, a layer without experts": {"tie_word_embeddings": True, "mlp_only_layers": [1]},
}


def random_model(**options):
    return tiny_models.random_model("Qwen2Moe", SIZES | options)


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    assert_same_directory(tmp_path, random_model(**CASES[case]))


def write_file(path, model, kinds="F32"):
    metadata = metadata_of(model, "qwen2moe", expert_keys(model.config))
    return write(path, metadata, gguf_tensors(model, NAMES, of_experts), kinds)


def test_files(tmp_path):
    """llama.cpp (llama-cpp-python 0.3.36) reads a file that is written so, too."""
    reference = random_model()
    path = write_file(tmp_path / "m.gguf", reference)
    assert_same_file(path, reference)


def test_64_greedy_tokens_are_those_of_transformers(tmp_path):
    assert_same_greedy_text(tmp_path, random_model())


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
@pytest.mark.parametrize("form", ["bfloat16", "int4", *slow(["float32", "int8", "blocks"])])
def test_no_drafter_changes_a_token(tmp_path, form, temperature):
    reference = random_model()
    reference.save_pretrained(tmp_path)
    write_file(tmp_path / "m.gguf", reference, "Q8_0")
    assert_drafts_as_vanilla(FORMS[form](tmp_path), form != "float32", temperature)


BAD_KEYS = [
    ("num_experts_per_tok", 7, "num_experts_per_tok must be 1 to num_experts (6); it is 7"),
    ("shared_expert_intermediate_size", None, "'shared_expert_intermediate_size' is missing"),
    ("shared_expert_intermediate_size", 32, "its config asks for"),
    ("num_experts", 4, "the config says num_experts 4, and the weights hold 6"),
    ("mlp_only_layers", [3], "mlp_only_layers must be below num_hidden_layers (3)"),
]


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})
