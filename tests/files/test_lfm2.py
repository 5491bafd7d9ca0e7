"""LFM2 against transformers: tiny random models as directories and GGUF files; drafting over its states; refusals."""

from __future__ import annotations

import pytest
import torch
from test_qwen3_5 import TURNS, answer, read

import tiny_models
from drafters import RootOnly
from family_checks import (
    FORMS,
    assert_drafts_as_vanilla,
    assert_same_file,
    assert_same_greedy_text,
    assert_same_rows,
)
from files.config import read_config
from files.weights import load_model
from helpers import engine_for, slow
from run.session import Session
from run.tp import check_parts
from tiny_models import (
    IDS,
    NAMES,
    assert_names_of_package,
    assert_same_directory,
    assert_same_logits,
    gguf_tensors,
    metadata_of,
    of_experts,
    refused,
    refused_keys,
    saved,
    write,
)

KINDS = ["conv", "conv", "full_attention", "conv"]
SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 4, "max_position_embeddings": 512, "layer_types": KINDS, "block_multiple_of": 32, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "as it is": {},
    "attention first, untied": {"layer_types": KINDS[::-1], "tie_word_embeddings": False},
    "two tokens, its own width": {"conv_L_cache": 2, "block_auto_adjust_ff_dim": False},
    "four tokens, a wider feed-forward": {"conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3},
}
EXPERTS = {
    "kind": "Lfm2Moe", "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
}  # fmt: skip
CASES |= {
    "experts": EXPERTS,
    "experts, scaled": EXPERTS | {"num_dense_layers": 0, "routed_scaling_factor": 2.5},
}


def random_model(kind="Lfm2", **options):
    """A model, with corrections that change which experts are chosen."""

    def spread(name: str) -> tuple[float, float]:
        return float("norm" in name), 0.6 if "conv.conv" in name else 0.2

    model = tiny_models.random_model(kind, SIZES | options, spread)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("case", CASES)
def test_directories(tmp_path, case):
    assert_same_directory(tmp_path, random_model(**CASES[case]))


def test_the_keys_of_older_files(tmp_path):
    """Those of LFM2 of 2025 name the layers that are attention, and two keys otherwise."""
    reference = random_model()
    keys = {
        "layer_types": ..., "full_attn_idxs": [2], "intermediate_size": ..., "block_ff_dim": 96,
        "tie_word_embeddings": ..., "tie_embedding": True,
    }  # fmt: skip
    assert_same_logits(load_model(saved(reference, tmp_path, keys), torch.float32), reference)


GGUF_NAMES = NAMES | {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.gate_proj": "ffn_gate_exps", "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


def write_file(path, model, kinds="F32", further=None):
    c = model.config
    c.rms_norm_eps = c.norm_eps
    tensors = gguf_tensors(
        model, GGUF_NAMES, lambda name, v: of_experts(name, v[:, 0] if "conv.conv" in name else v)
    )
    width = len(tensors.get("blk.0.ffn_gate.weight", ())) or c.intermediate_size
    own = {
        "attention.head_count_kv": [2 * (kind != "conv") for kind in c.layer_types],
        "shortconv.l_cache": c.conv_L_cache, "feed_forward_length": width,
    }  # fmt: skip
    if c.model_type == "lfm2":
        return write(path, metadata_of(model, "lfm2", own | (further or {})), tensors, kinds)
    own |= {
        "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok, "expert_gating_func": 2,
        "expert_feed_forward_length": c.moe_intermediate_size, "leading_dense_block_count": c.num_dense_layers,
        "expert_weights_scale": c.routed_scaling_factor,
    }  # fmt: skip
    assert_names_of_package(tensors, "lfm2moe")
    return write(path, metadata_of(model, "lfm2moe", own), tensors, kinds)


@pytest.mark.parametrize("case", CASES)
def test_files(tmp_path, case):
    """llama.cpp (llama-cpp-python 0.3.36) reads a file that is written so, too."""
    reference = random_model(**CASES[case])
    path = write_file(tmp_path / "m.gguf", reference)
    assert_same_file(path, reference)


@pytest.mark.parametrize("options", [EXPERTS, *slow([{}])])
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, options):
    assert_same_greedy_text(tmp_path, random_model(**options))


def in_q8(name: str) -> str:
    return "F32" if "shortconv.conv" in name else "Q8_0"


MATRIX = [  # options, form, temperature
    ({}, "bfloat16", 1.0), ({}, "blocks", 1.0), (EXPERTS, "bfloat16", 1.0), (EXPERTS, "int8", 0.0),
    *slow([(options, form, t) for options in ({}, EXPERTS) for form in FORMS for t in (0.0, 1.0)]),
]  # fmt: skip


@pytest.mark.parametrize("options, form, temperature", MATRIX)
def test_no_drafter_changes_a_token(tmp_path, options, form, temperature):
    reference = random_model(**options)
    reference.save_pretrained(tmp_path)
    write_file(tmp_path / "m.gguf", reference, in_q8)
    assert_drafts_as_vanilla(FORMS[form](tmp_path), form != "float32", temperature)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("lfm2")
    random_model().save_pretrained(path)
    return load_model(path, torch.bfloat16)


def test_the_pass_in_cpp_has_the_rows_of_its_operators(target):
    assert_same_rows(target, in_cpp=True)


@pytest.mark.parametrize("turn", TURNS)
def test_a_further_turn_equals_a_fresh_one(target, turn):
    text = answer(target, RootOnly(), IDS.tolist())
    follow, stays = TURNS[turn]
    prompt = follow(text)
    session = Session(engine_for(target, RootOnly(), max_new_tokens=12, ignore_eos=True))
    read(session, 0, IDS.tolist())
    assert read(session, 0, prompt) == (answer(target, RootOnly(), prompt), stays)


BAD_KEYS = [
    ("layer_types", ["conv"] * 4, "layer_types must name full_attention at least once"),
    ("layer_types", ["conv"], "layer_types must name all 4 layers; it names 1"),
    ("layer_types", ["linear_attention"] * 4, "layer_types must be a list of conv and full_attention"),
    ("full_attn_idxs", [1], "full_attn_idxs must be the full_attention layers of layer_types, [2]; it is [1]"),
    ("conv_L_cache", 5, "conv_L_cache must be a whole number from 2 to 4"),
    ("conv_bias", True, "conv_bias must be false"),
    ("block_multiple_of", 128, "its config asks for"),
]  # fmt: skip


@pytest.mark.parametrize("key, value, says", BAD_KEYS)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, key, value, says):
    assert says in refused_keys(capsys, tmp_path, random_model(), **{key: value})


def test_a_file_that_contradicts_itself_is_one_line(capsys, tmp_path):
    heads = {"attention.head_count_kv": [0, 1, 2, 0]}
    path = write_file(tmp_path / "m.gguf", random_model(), further=heads)
    assert "head_count_kv must be 0 for convolutions" in refused(capsys, "--checkpoint", str(path))


def test_ranks_are_refused(tmp_path):
    random_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model with recurrent layers runs on one rank"):
        check_parts(read_config(tmp_path), 2, tmp_path)
