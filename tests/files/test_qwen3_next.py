"""Qwen3-Next against transformers: tiny random models; drafting over its states; refusals. The rest is Qwen3.5's."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_qwen3_5 import EXPERTS, GGUF_NAMES, SIZES, randomize

from family_checks import FORMS, assert_drafts_as_vanilla, assert_same_file, assert_same_greedy_text
from helpers import slow
from tiny_models import (
    assert_names_of_package,
    assert_same_directory,
    expert_keys,
    gguf_tensors,
    metadata_of,
    of_experts,
    refused_keys,
    write,
)

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


NEXT_NAMES = GGUF_NAMES | {
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip


def file_of(model, old: bool = False) -> tuple[dict, dict]:
    """The metadata and the converter's tensors. old: with one for queries, keys, values and their gates"""
    c = model.config
    heads, width = c.linear_num_key_heads, c.linear_key_head_dim
    values = c.linear_num_value_heads // heads * c.linear_value_head_dim

    def convert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("in_proj_qkvz.weight") and not old:
            parts = value.unflatten(0, (heads, -1)).split((width, width, values, values), 1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            of_qkv = name.replace("qkvz", "qkv")
            return {of_qkv: torch.cat((q, k, v)), name.replace("qkvz", "z"): z}
        if name.endswith("A_log"):
            return {name: -value.exp()}
        if "conv1d" in name:
            return {name: value[:, 0]}
        from_one = "norm" in name and "linear_attn" not in name
        return of_experts(name, value + 1 if from_one else value)

    further = expert_keys(c) | {
        "rope.dimension_count": int(c.head_dim * c.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": 4, "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "ssm.state_size": width, "ssm.time_step_rank": c.linear_num_value_heads, "ssm.group_count": heads,
        "full_attention_interval": 4,
    }  # fmt: skip
    tensors = gguf_tensors(model, NEXT_NAMES, convert)
    assert_names_of_package(tensors, "qwen3next")
    return metadata_of(model, "qwen3next", further), tensors


@pytest.mark.parametrize("case, old", [*((case, False) for case in CASES), ("as it is", True)])
def test_files(tmp_path, case, old):
    """llama.cpp (llama-cpp-python 0.3.36) has these logits where values are as wide as keys; its cache is in fp16."""
    reference = random_model(**CASES[case])
    path = write(tmp_path / "m.gguf", *file_of(reference, old))
    assert_same_file(path, reference)


@pytest.mark.parametrize("case", ["as it is", *slow(["one head of keys, tied"])])
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, case):
    assert_same_greedy_text(tmp_path, random_model(**CASES[case]))


def in_q8(name: str) -> str:
    return "F32" if "conv1d" in name else "Q8_0"


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
@pytest.mark.parametrize("form", ["bfloat16", "blocks", *slow(["float32", "int8", "int4"])])
def test_no_drafter_changes_a_token(tmp_path, form, temperature):
    reference = random_model()
    reference.save_pretrained(tmp_path)
    write(tmp_path / "m.gguf", *file_of(reference), in_q8)
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
