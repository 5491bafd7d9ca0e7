"""Architectures against transformers: tiny random models as directories and GGUF files; drafting; refusals.

A family is a row of `FAMILIES`. Those with tests of their own are in files of their own: Qwen3.5, Gemma, gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from test_qwen3_5 import EXPERTS, TURNS, answer, randomize, read
from test_qwen3_5 import GGUF_NAMES as QWEN35_NAMES
from test_qwen3_5 import SIZES as QWEN35_SIZES

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
    expert_keys,
    gguf_tensors,
    metadata_of,
    of_experts,
    refused,
    refused_keys,
    saved,
    write,
)


class Family(NamedTuple):
    make: Callable[..., Any]  # of transformers' options: a random model
    cases: dict[str, dict]
    file_of: Callable[..., tuple[dict, dict]]  # of a model: the metadata and tensors of a GGUF file
    greedy: list  # cases whose text is compared
    runs: list  # cases and forms that draft
    bad_keys: list[tuple[str, Any, str]]
    in_fp32: str = "no part"  # a part of the names of tensors that a file in blocks has in fp32

    def write(self, path, model, kinds: str = "F32", **options):
        def kind_of(name: str) -> str:
            return "F32" if self.in_fp32 in name else kinds

        return write(path, *self.file_of(model, **options), kind_of)


def turned(c) -> dict:
    """The metadata of a RoPE that turns a part of a head. c: transformers' config"""
    share = c.rope_parameters["partial_rotary_factor"]
    return {"rope.dimension_count": int(c.head_dim * share)}


def spread_corrections(model):
    """A model with corrections that change which experts are chosen."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0, 0.2)
    return model


# -------------------------------------------------------------------------------------------- GLM-4

OF_GLM = tiny_models.SIZES | {
    "num_hidden_layers": 3, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
GLM4_NAMES = NAMES | {
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip
GLM4 = Family(
    lambda **options: tiny_models.random_model("Glm4", OF_GLM | options),
    {
        "as it is": {},
        "a quarter is turned, tied": {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        },
        "all is turned, no biases": {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    # neighbours stay neighbours, and gate stays above up
    lambda model: (metadata_of(model, "glm4", turned(model.config)), gguf_tensors(model, GLM4_NAMES)),
    ["as it is"],
    [("as it is", form) for form in ("float32", "bfloat16", "blocks")],
    [
        ("hidden_act", "gelu", "hidden_act must be silu"),
        ("rope_parameters", {"partial_rotary_factor": 0.1}, "leave an even number"),
        ("layer_types", ["linear_attention"] * 3, "must be a list of sliding_attention and full_"),
        ("layer_types", ["full_attention"], "layer_types must name all 3 layers; it names 1"),
        ("attention_bias", "yes", "attention_bias must be true or false"),
        ("num_key_value_heads", 4, "its config asks for"),
    ],
)  # fmt: skip

# ------------------------------------------------------------------------------------------ GLM-4.5

GLM_SIZES = OF_GLM | {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip


def metadata_of_glm(model, further: dict | None = None) -> dict:
    """As the converter writes it."""
    c = model.config
    keys = {
        "expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size, "expert_shared_count": c.n_shared_experts,
        "leading_dense_block_count": c.first_k_dense_replace, "expert_weights_scale": c.routed_scaling_factor,
        "expert_weights_norm": c.norm_topk_prob, "expert_gating_func": 2, "expert_group_count": 1,
    }  # fmt: skip
    return metadata_of(model, "glm4moe", keys | turned(c) | (further or {}))


GLM4_MOE = Family(
    lambda **options: spread_corrections(tiny_models.random_model("Glm4Moe", GLM_SIZES | options)),
    {
        "as it is": {},
        "with norms of queries and keys, biases": {"use_qk_norm": True, "attention_bias": True},
        "two shared experts, shares as they are": {
            "n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        },
    },
    lambda model: (metadata_of_glm(model), gguf_tensors(model, GLM_NAMES, of_experts)),
    ["as it is"],
    [("with norms of queries and keys, biases", "bfloat16")],
    [
        ("num_experts_per_tok", 7, "num_experts_per_tok must be 1 to n_routed_experts (6); it is 7"),
        ("n_group", 2, "n_group must be 1: groups of experts are not supported; it is 2"),
        ("num_nextn_predict_layers", 2, "num_nextn_predict_layers must be a whole number from 0 to 1"),
    ],
)  # fmt: skip

# ---------------------------------------------------------------------------------------- Qwen2-MoE

QWEN2_MOE_SIZES = tiny_models.SIZES | EXPERTS | {
    "num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
QWEN2_MOE = Family(
    lambda **options: tiny_models.random_model("Qwen2Moe", QWEN2_MOE_SIZES | options),
    {
        "as it is": {},
        "shares add up to 1, no biases": {"norm_topk_prob": True, "qkv_bias": False},
        "tied, a layer without experts": {"tie_word_embeddings": True, "mlp_only_layers": [1]},
    },
    lambda model: (
        metadata_of(model, "qwen2moe", expert_keys(model.config)), gguf_tensors(model, NAMES, of_experts),
    ),
    ["as it is"],
    [("as it is", "bfloat16"), ("as it is", "int4")],
    [
        ("num_experts_per_tok", 7, "num_experts_per_tok must be 1 to num_experts (6); it is 7"),
        ("shared_expert_intermediate_size", None, "'shared_expert_intermediate_size' is missing"),
        ("shared_expert_intermediate_size", 32, "its config asks for"),
        ("num_experts", 4, "the config says num_experts 4, and the weights hold 6"),
        ("mlp_only_layers", [3], "mlp_only_layers must be below num_hidden_layers (3)"),
    ],
)  # fmt: skip

# --------------------------------------------------------------------------------------- Qwen3-Next

NEXT_NAMES = QWEN35_NAMES | {
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip


def random_next(**options):
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**QWEN35_SIZES | EXPERTS | options)
    model = transformers.Qwen3NextForCausalLM._from_config(config, attn_implementation="eager")
    randomize(model)
    return model.eval()


def file_of_next(model, old: bool = False) -> tuple[dict, dict]:
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

    further = expert_keys(c) | turned(c) | {
        "ssm.conv_kernel": 4, "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "ssm.state_size": width, "ssm.time_step_rank": c.linear_num_value_heads, "ssm.group_count": heads,
        "full_attention_interval": 4,
    }  # fmt: skip
    tensors = gguf_tensors(model, NEXT_NAMES, convert)
    assert_names_of_package(tensors, "qwen3next")
    return metadata_of(model, "qwen3next", further), tensors


QWEN3_NEXT = Family(
    random_next,
    {
        "as it is": {},
        "one head of keys, tied": {"linear_num_key_heads": 1, "tie_word_embeddings": True},
        "as many heads of keys": {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
    },
    file_of_next,
    ["as it is", *slow(["one head of keys, tied"])],
    [("as it is", "bfloat16"), ("as it is", "blocks")],
    [
        ("norm_topk_prob", False, "norm_topk_prob must be true"),
        ("mlp_only_layers", [1], "mlp_only_layers must be an empty list"),
        ("layer_types", ["linear_attention"] * 4, "layer_types must name full_attention at least once"),
        ("linear_value_head_dim", 16, "in_proj_qkvz.weight has 320 rows, but its config asks for 192"),
    ],
    in_fp32="conv1d",
)  # fmt: skip

# --------------------------------------------------------------------------------------------- LFM2

LFM2_KINDS = ["conv", "conv", "full_attention", "conv"]
LFM2_SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 4, "max_position_embeddings": 512, "layer_types": LFM2_KINDS, "block_multiple_of": 32,
    "pad_token_id": 0,
}  # fmt: skip
LFM2_EXPERTS = {
    "kind": "Lfm2Moe", "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
}  # fmt: skip
LFM2_NAMES = NAMES | {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.gate_proj": "ffn_gate_exps", "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


def random_lfm2(kind="Lfm2", **options):
    def spread(name: str) -> tuple[float, float]:
        return float("norm" in name), 0.6 if "conv.conv" in name else 0.2

    return spread_corrections(tiny_models.random_model(kind, LFM2_SIZES | options, spread))


def file_of_lfm2(model, further: dict | None = None) -> tuple[dict, dict]:
    c = model.config
    c.rms_norm_eps = c.norm_eps
    tensors = gguf_tensors(
        model, LFM2_NAMES, lambda name, v: of_experts(name, v[:, 0] if "conv.conv" in name else v)
    )
    width = len(tensors.get("blk.0.ffn_gate.weight", ())) or c.intermediate_size
    own = {
        "attention.head_count_kv": [2 * (kind != "conv") for kind in c.layer_types],
        "shortconv.l_cache": c.conv_L_cache, "feed_forward_length": width,
    }  # fmt: skip
    if c.model_type == "lfm2":
        return metadata_of(model, "lfm2", own | (further or {})), tensors
    own |= {
        "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok, "expert_gating_func": 2,
        "expert_feed_forward_length": c.moe_intermediate_size, "leading_dense_block_count": c.num_dense_layers,
        "expert_weights_scale": c.routed_scaling_factor,
    }  # fmt: skip
    assert_names_of_package(tensors, "lfm2moe")
    return metadata_of(model, "lfm2moe", own), tensors


LFM2 = Family(
    random_lfm2,
    {
        "as it is": {},
        "attention first, untied": {"layer_types": LFM2_KINDS[::-1], "tie_word_embeddings": False},
        "two tokens, its own width": {"conv_L_cache": 2, "block_auto_adjust_ff_dim": False},
        "four tokens, a wider feed-forward": {"conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3},
        "experts": LFM2_EXPERTS,
        "experts, scaled": LFM2_EXPERTS | {"num_dense_layers": 0, "routed_scaling_factor": 2.5},
    },
    file_of_lfm2,
    ["experts", *slow(["as it is"])],
    [("as it is", "bfloat16"), ("as it is", "blocks"), ("experts", "bfloat16"), ("experts", "int8")],
    [
        ("layer_types", ["conv"] * 4, "layer_types must name full_attention at least once"),
        ("layer_types", ["conv"], "layer_types must name all 4 layers; it names 1"),
        ("layer_types", ["linear_attention"] * 4, "layer_types must be a list of conv and full_attention"),
        ("full_attn_idxs", [1], "full_attn_idxs must be the full_attention layers of layer_types, [2]; it is [1]"),
        ("conv_L_cache", 5, "conv_L_cache must be a whole number from 2 to 4"),
        ("conv_bias", True, "conv_bias must be false"),
        ("block_multiple_of", 128, "its config asks for"),
    ],
    in_fp32="shortconv.conv",
)  # fmt: skip

# ------------------------------------------------------------------------------------------- checks

FAMILIES = {
    "GLM-4": GLM4, "GLM-4.5": GLM4_MOE, "Qwen2-MoE": QWEN2_MOE, "Qwen3-Next": QWEN3_NEXT, "LFM2": LFM2,
}  # fmt: skip
EACH_CASE = [(name, case) for name, family in FAMILIES.items() for case in family.cases]
# of which llama.cpp's files know nothing
NO_FILE = ("tied, a layer without experts", "shares add up to 1, no biases")


@pytest.mark.parametrize("name, case", EACH_CASE)
def test_directories(tmp_path, name, case):
    family = FAMILIES[name]
    assert_same_directory(tmp_path, family.make(**family.cases[case]))


@pytest.mark.parametrize("name, case", [each for each in EACH_CASE if each[1] not in NO_FILE])
def test_files(tmp_path, name, case):
    """llama.cpp (llama-cpp-python 0.3.36) reads a file that is written so, too."""
    family = FAMILIES[name]
    reference = family.make(**family.cases[case])
    assert_same_file(family.write(tmp_path / "m.gguf", reference), reference)


def test_a_file_of_older_converters(tmp_path):
    reference = random_next()
    assert_same_file(QWEN3_NEXT.write(tmp_path / "m.gguf", reference, old=True), reference)


@pytest.mark.parametrize(
    "name, case", [(name, case) for name, family in FAMILIES.items() for case in family.greedy[:1]]
    + slow((name, case.values[0]) for name, family in FAMILIES.items() for case in family.greedy[1:])
)  # fmt: skip
def test_64_greedy_tokens_are_those_of_transformers(tmp_path, name, case):
    family = FAMILIES[name]
    assert_same_greedy_text(tmp_path, family.make(**family.cases[case]))


RUNS = [(name, *run, 1.0) for name, family in FAMILIES.items() for run in family.runs]
RUNS += slow(
    (name, case, form, temperature)
    for name, family in FAMILIES.items()
    for case in dict(family.runs)
    for form in FORMS
    for temperature in (0.0, 1.0)
    if (name, case, form, temperature) not in RUNS
)


@pytest.mark.parametrize("name, case, form, temperature", RUNS)
def test_no_drafter_changes_a_token(tmp_path, name, case, form, temperature):
    family = FAMILIES[name]
    reference = family.make(**family.cases[case])
    reference.save_pretrained(tmp_path)
    family.write(tmp_path / "m.gguf", reference, "Q8_0")
    target = FORMS[form](tmp_path)
    if name == "GLM-4.5":  # as in the file
        assert target.layers[1].router.e_score_correction_bias.dtype == torch.float32
    assert_drafts_as_vanilla(target, form != "float32", temperature)


@pytest.mark.parametrize(
    "name, key, value, says",
    [(name, *row) for name, family in FAMILIES.items() for row in family.bad_keys],
)
def test_a_key_with_a_bad_value_is_one_line(capsys, tmp_path, name, key, value, says):
    assert says in refused_keys(capsys, tmp_path, FAMILIES[name].make(), **{key: value})


# -------------------------------------------------------------------------------- LFM2, furthermore


def test_the_keys_of_older_files(tmp_path):
    """Those of LFM2 of 2025 name the layers that are attention, and two keys otherwise."""
    reference = random_lfm2()
    keys = {
        "layer_types": ..., "full_attn_idxs": [2], "intermediate_size": ..., "block_ff_dim": 96,
        "tie_word_embeddings": ..., "tie_embedding": True,
    }  # fmt: skip
    assert_same_logits(load_model(saved(reference, tmp_path, keys), torch.float32), reference)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("lfm2")
    random_lfm2().save_pretrained(path)
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


def test_a_file_that_contradicts_itself_is_one_line(capsys, tmp_path):
    heads = {"attention.head_count_kv": [0, 1, 2, 0]}
    path = LFM2.write(tmp_path / "m.gguf", random_lfm2(), further=heads)
    assert "head_count_kv must be 0 for convolutions" in refused(capsys, "--checkpoint", str(path))


def test_ranks_are_refused(tmp_path):
    random_lfm2().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model with recurrent layers runs on one rank"):
        check_parts(read_config(tmp_path), 2, tmp_path)
