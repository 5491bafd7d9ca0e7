"""Qwen3-Next against transformers: tiny random models; drafting over its states; refusals. The rest is Qwen3.5's."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_qwen3_5 import EXPERTS, SIZES, randomize

from family_checks import FORMS, assert_drafts_as_vanilla, assert_same_greedy_text
from helpers import slow
from tiny_models import assert_same_directory, refused_keys

CASES = {
    "as it is": {},
    "one head of keys, tied": {"linear_num_key_heads": 1, "tie_word_embeddings": True},
    "as many heads of keys": {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
}


def random_model(**options):
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**SIZES | EXPERTS | options)
    of_kind = transformers.Qwen3NextForCausalLM
    model = of_kind._from_config(config, attn_implementation="eager")
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    assert_same_directory(tmp_path, random_model(**CASES[case]))


@pytest.mark.parametrize("case", ["as it is", *slow(["one head of keys, tied"])])
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, case):
    assert_same_greedy_text(tmp_path, random_model(**CASES[case]))


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
@pytest.mark.parametrize("form", ["bfloat16", *slow(["float32", "int8", "int4"])])
def test_no_drafter_changes_a_token(tmp_path, form, temperature):
    random_model().save_pretrained(tmp_path)
    assert_drafts_as_vanilla(FORMS[form](tmp_path), form != "float32", temperature)


BAD_KEYS = [
    ("norm_topk_prob", False, "norm_topk_prob must be true"),
    ("mlp_only_layers", [1], "mlp_only_layers must be an empty list"),
    ("layer_types", ["linear_attention"] * 4, "layer_types must name full_attention at least once"),
    ("linear_value_head_dim", 16, "in_proj_qkvz.weight has 320 rows, but its config asks for 192"),
]


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})
