"""GLM-4.5 against transformers: tiny random models as directories and GGUF files; drafting; refusals.

Its MTP layer is in test_mtp.py.
"""

from __future__ import annotations

import pytest
import torch

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
    "num_hidden_layers": 3, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "n_routed_experts": 6,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
}  # fmt: skip
CASES = {
    "as it is": {},
    "with norms of queries and keys, biases": {"use_qk_norm": True, "attention_bias": True},
    "two shared experts, shares as they are": {
        "n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip


def random_model(**options):
    """A model with corrections that change which experts are chosen."""
    model = tiny_models.random_model("Glm4Moe", SIZES | options)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    assert_same_directory(tmp_path, random_model(**CASES[case]))


GGUF_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip


def converted(name, value):
    """Gate and up of the experts are two stacks."""
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("gate_proj", "up_proj"), value.chunk(2, 1))
        return {name.replace("gate_up_proj", f"{half}.weight"): part for half, part in halves}
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: value}


def metadata(model, further=None):
    """As the converter writes it."""
    c = model.config
    share = c.rope_parameters["partial_rotary_factor"]
    keys = {
        "expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size, "expert_shared_count": c.n_shared_experts,
        "leading_dense_block_count": c.first_k_dense_replace, "expert_weights_scale": c.routed_scaling_factor,
        "expert_weights_norm": c.norm_topk_prob, "expert_gating_func": 2, "expert_group_count": 1,
        "rope.dimension_count": int(c.head_dim * share),
    }  # fmt: skip
    return metadata_of(model, "glm4moe", keys | (further or {}))


def write_file(path, model, kinds="F32"):
    return write(path, metadata(model), gguf_tensors(model, GGUF_NAMES, converted), kinds)


@pytest.mark.parametrize("case", [next(iter(CASES)), *slow([*CASES][1:])])
def test_files(tmp_path, case):
    """llama.cpp (llama-cpp-python 0.3.36) computes the same from a file that is written so."""
    reference = random_model(**CASES[case])
    assert_same_file(write_file(tmp_path / "m.gguf", reference), reference)


def test_64_greedy_tokens_are_those_of_transformers(tmp_path):
    assert_same_greedy_text(tmp_path, random_model())


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
@pytest.mark.parametrize("form", ["bfloat16", *slow(["blocks", "float32", "int8", "int4"])])
def test_no_drafter_changes_a_token(tmp_path, form, temperature):
    reference = random_model(use_qk_norm=True, attention_bias=True)
    reference.save_pretrained(tmp_path)
    write_file(tmp_path / "m.gguf", reference, "Q8_0")
    target = FORMS[form](tmp_path)
    assert target.layers[1].router.e_score_correction_bias.dtype == torch.float32  # as in the file
    assert_drafts_as_vanilla(target, form != "float32", temperature)


BAD_KEYS = [
    ("num_experts_per_tok", 7, "num_experts_per_tok must be 1 to n_routed_experts (6); it is 7"),
    ("n_group", 2, "n_group must be 1: groups of experts are not supported; it is 2"),
    ("num_nextn_predict_layers", 2, "num_nextn_predict_layers must be a whole number from 0 to 1"),
]


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})
