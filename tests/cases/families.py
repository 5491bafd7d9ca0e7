"""The architectures: a row each of FAMILIES, by which test_families.py and test_states.py compare, draft and refuse.

A row says how transformers makes a random model, which options are compared, what a GGUF file of it holds, and
which keys are refused. `plain` is enough for an architecture that LLaMA's sizes describe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import tiny_models
from tiny_models import (
    NAMES,
    assert_names_of_package,
    expert_keys,
    gguf_tensors,
    metadata_of,
    of_experts,
    write,
)

Refusal = tuple[str, dict]  # words of the error, and the keys of config.json that it is about


@dataclass(frozen=True)
class Rewritten:
    """A directory as another writer has it; its logits stay those of the model."""

    options: dict  # of transformers
    keys: Callable[[dict], dict] | dict  # a function of config.json, or changes; ... removes a key
    tensors: Callable[[dict], dict] = dict  # a function of the tensors
    note: str = ""  # words of the one line that loading prints


@dataclass(frozen=True)
class Family:
    make: Callable[..., Any]  # of transformers' options: a random model
    cases: dict[str, dict]  # a name -> transformers' options
    # of a model: the metadata and tensors of a GGUF file; None: test_gguf.py has the files
    file_of: Callable[[Any], tuple[dict, dict]] | None = None
    no_file: tuple[str, ...] = ()  # cases of which llama.cpp's files know nothing
    differs: tuple[str, ...] = ()  # fields of our config that a file has otherwise
    blocks: Callable[[str], str] = lambda name: "Q8_0"  # of a tensor: its type in a file in blocks
    greedy: tuple[str, ...] = (
        "as it is",
    )  # cases whose 64 tokens are compared; all but the first are slow
    # cases, forms and temperatures that are drafted for; the other pairs of them are slow
    runs: tuple[tuple[str, str, float], ...] = ()
    bad_keys: tuple[Refusal, ...] = ()
    # of a file: further metadata, names left out, words of the error
    bad_files: tuple[tuple[dict, tuple[str, ...], str], ...] = ()
    rewritten: dict[str, Rewritten] = field(default_factory=dict)
    in_fp32: dict[str, str] = field(
        default_factory=dict
    )  # of a layer, whatever the dtype: our name, theirs
    near: float = 0.0  # how far passes in C++ may lie from their steps
    one_rank: str = ""  # why ranks are refused
    bad_case: str = "as it is"  # the case whose keys are spoilt

    def of(self, case: str) -> Any:
        return self.make(**self.cases[case])

    def write(
        self, path: Path, model: Any, in_blocks: bool = False, further: dict | None = None, without: tuple = (),
    ) -> Path:  # fmt: skip
        """Write a GGUF file. further: metadata without the architecture's name; without: keys and tensors left out"""
        metadata, tensors = self.file_of(model)
        assert_names_of_package(metadata, tensors)
        own = metadata["general.architecture"]
        metadata |= {f"{own}.{key}": value for key, value in (further or {}).items()}
        return write(path, metadata, tensors, self.blocks if in_blocks else "F32", without)


def bad(says: str, **keys: Any) -> Refusal:
    return says, keys


def missing(*names: str) -> tuple:
    """Rows of files without a key or a tensor."""
    return tuple(
        ({}, (name,), "missing weight(s)" if name.endswith(("weight", "bias")) else f"{name} is missing")
        for name in names
    )  # fmt: skip


def numbers_in(*parts: str) -> Callable[[str], str]:
    """Blocks for all tensors but those with one of these parts in their names."""
    return lambda name: "F32" if any(part in name for part in parts) else "Q8_0"


def default_rope(theta: float = 1e4, **more: Any) -> dict:
    return {"rope_type": "default", "rope_theta": theta} | more


def turned(c: Any) -> dict:
    """The metadata of a RoPE that turns a part of a head. c: transformers' config"""
    share = c.rope_parameters["partial_rotary_factor"]
    return {"rope.dimension_count": int(c.head_dim * share)}


def spread_corrections(model: Any) -> Any:
    """A model with corrections that change which experts are chosen."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0, 0.2)
    return model


# --------------------------------------------------------------------------- LLaMA's form: no more than sizes

PLAIN = tiny_models.SIZES | {"num_hidden_layers": 3, "max_position_embeddings": 512}
# wavelengths of head_dim 12 and theta 1e4 are 6, 29, 135, ...: this keeps one, blends one and slows the others down
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}  # fmt: skip
QWEN3_MOE = {
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


def renamed(old: str, new: str, **more: torch.Tensor) -> Callable[[dict], dict]:
    """A function of tensors: other beginnings of their names, and further tensors with dots for __."""
    further = {name.replace("__", "."): tensor for name, tensor in more.items()}
    return lambda held: {n.replace(old, new, 1): v for n, v in held.items()} | further


def with_lm_head(held: dict) -> dict:
    return held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}


def plain(kind: str, cases: dict[str, dict], **more: Any) -> Family:
    """kind: as in the names of transformers' classes"""
    first = next(iter(cases))
    more = {"greedy": (first,), "bad_case": first} | more
    return Family(lambda **options: tiny_models.random_model(kind, PLAIN | options), cases, **more)


PLAIN_FAMILIES = {
    "LLaMA": plain("Llama", {
        "as it is": {},
        "every head of keys": {"num_key_value_heads": 4},
        "narrow heads": {"head_dim": 12},
        "LLaMA 3's rope": {"head_dim": 12, "rope_parameters": LLAMA3},
        "a linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
        "YaRN": {"head_dim": 12, "rope_parameters": YARN},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
    }, rewritten={
        "tables of the rope": Rewritten({}, {}, renamed("", "", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))),
        # which is no second matrix
        "tied, with the LM head": Rewritten({"tie_word_embeddings": True}, {}, with_lm_head),
    }, bad_keys=(
        bad("GPTNeoXForCausalLM", architectures=["GPTNeoXForCausalLM"]),
        bad("gpt_neox", architectures=None, model_type="gpt_neox"),
        bad("longrope", rope_parameters={"rope_type": "longrope", "factor": 2.0}),
        bad("dynamic", rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}),
        bad("factor", rope_parameters={"rope_type": "yarn"}),
        bad("beta_slow must be 1e-6 to beta_fast (0.5)", rope_parameters=YARN | {"beta_fast": 0.5}),
        bad("rope_theta must be above 1", rope_parameters=YARN | {"rope_theta": 1.0}),
        bad("gelu", hidden_act="gelu"),
        bad("float8_e4m3fn", dtype="float8_e4m3fn"),
        bad("hidden_size must be a multiple of num_attention_heads", hidden_size=66, head_dim=None),
        bad("gate_proj", intermediate_size=88),
    )),
    "Mistral": plain("Mistral", {"as it is": {"sliding_window": 512, "head_dim": 32}}),
    "Qwen2": plain("Qwen2", {"as it is": {}}),
    "Qwen3": plain("Qwen3", {
        "as it is": {"head_dim": 16},
        "tied, biases": {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True},
        "YaRN": {"head_dim": 16, "rope_parameters": YARN | {"truncate": False}},
    }),
    "Mixtral": plain(
        "Mixtral",
        {
            "as it is": {"num_local_experts": 4},
            "one of many": {"num_local_experts": 6, "num_experts_per_tok": 1},
        },
        runs=(("as it is", "bfloat16", 0.0), ("as it is", "int8", 1.0), ("one of many", "bfloat16", 1.0)),
        bad_keys=(
            bad("num_local_experts 8, and the weights hold 4; set it to 4 in config.json", num_local_experts=8),
            bad("1 to num_local_experts (4); it is 9", num_experts_per_tok=9),
        ),
    ),
    "Qwen3-MoE": plain(
        "Qwen3Moe",
        {
            "as it is": QWEN3_MOE,
            "shares as they are": QWEN3_MOE | {"norm_topk_prob": False, "tie_word_embeddings": True},
            "every second": QWEN3_MOE | {"decoder_sparse_step": 2},
            "first dense": QWEN3_MOE | {"mlp_only_layers": [0]},
            "all dense": QWEN3_MOE | {"decoder_sparse_step": 4},
        },
        runs=(("first dense", "bfloat16", 1.0), ("first dense", "int4", 0.0)),
        bad_case="first dense",
        bad_keys=(
            bad("mlp_only_layers must be below num_hidden_layers (3); one is 3; correct it", mlp_only_layers=[3]),
        ),
    ),
}  # fmt: skip

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
            "tie_word_embeddings": True, "rope_parameters": default_rope(1e5, partial_rotary_factor=0.25),
        },
        "all is turned, no biases": {
            "attention_bias": False, "rope_parameters": default_rope(partial_rotary_factor=1.0),
        },
    },
    # neighbours stay neighbours, and gate stays above up
    lambda model: (metadata_of(model, "glm4", turned(model.config)), gguf_tensors(model, GLM4_NAMES)),
    runs=(("as it is", "float32", 1.0), ("as it is", "bfloat16", 1.0), ("as it is", "blocks", 1.0)),
    bad_keys=(
        bad("hidden_act must be silu", hidden_act="gelu"),
        bad("leave an even number", rope_parameters={"partial_rotary_factor": 0.1}),
    ),
)  # fmt: skip

# --------------------------------------------------------------- SmolLM3, Phi-3, OLMo-2: LLaMA with one thing else


def of_interleaved(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the converter makes of queries and keys: each head's pairs of a rotation become neighbours."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return {name: value}
    heads = value.unflatten(0, (-1, 2, 8))  # of SIZES: 16 elements each
    return {name: heads.transpose(1, 2).flatten(0, 2)}


SMOLLM3 = plain("SmolLM3", {
    "as it is": {"num_hidden_layers": 4, "pad_token_id": 0, "rope_parameters": default_rope(2e6)},
    "other layers without positions": {"no_rope_layers": [0, 1, 1], "pad_token_id": 0, "tie_word_embeddings": True},
}, file_of=lambda model: (metadata_of(model, "smollm3"), gguf_tensors(model, convert=of_interleaved)),
    no_file=("other layers without positions",),
    runs=(("as it is", "float32", 1.0), ("as it is", "bfloat16", 1.0), ("as it is", "int8", 0.0)),
    bad_keys=(
        bad("no_rope_layers must name all 4 layers; it names 2", no_rope_layers=[1, 0]),
    ),
)  # fmt: skip

PHI3 = plain("Phi3", {
    "as it is": {"pad_token_id": 0, "sliding_window": 512},
    "a part of each head turned": {"pad_token_id": 0, "rope_parameters": default_rope(partial_rotary_factor=0.5)},
}, file_of=lambda model: (
    metadata_of(model, "phi3", {"rope.dimension_count": int(16 * model.config.rope_parameters.get("partial_rotary_factor", 1))}),
    gguf_tensors(model, NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
), runs=(("as it is", "float32", 1.0), ("a part of each head turned", "bfloat16", 1.0), ("as it is", "int4", 0.0)),
    one_rank="a model with fused projections runs on one rank",
    bad_keys=(
        bad("longrope", rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        bad("leave an even number", rope_parameters=default_rope(partial_rotary_factor=0.1)),
    ),
)  # fmt: skip

BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OLMO2 = plain("Olmo2", {
    "as it is": {"num_key_value_heads": 4, "pad_token_id": 0},
    "fewer keys": {"num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": True},
}, file_of=lambda model: (metadata_of(model, "olmo2"), gguf_tensors(model, NAMES | BEHIND)),
    runs=(("as it is", "float32", 1.0), ("as it is", "bfloat16", 1.0), ("fewer keys", "float32", 0.0)),
    one_rank="a model that norms all heads together runs on one rank",
    bad_keys=(bad("its config asks for", num_key_value_heads=1),),
)  # fmt: skip


def file_of_olmo3(model: Any) -> tuple[dict, dict]:
    """As the converter writes it: OLMo-2's architecture, and windows."""
    c = model.config
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    c.rope_parameters, ropes = c.rope_parameters["full_attention"], c.rope_parameters
    keys = {
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": slides,
    }
    metadata = metadata_of(model, "olmo2", keys)
    c.rope_parameters = ropes
    return metadata, gguf_tensors(model, NAMES | BEHIND)


OLMO3 = plain("Olmo3", {
    "as it is": {"num_hidden_layers": 4, "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": 8},
    "every second, YaRN": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5, "num_key_value_heads": 4,
        "pad_token_id": 0, "rope_parameters": {"full_attention": YARN, "sliding_attention": default_rope()},
    },
    "fewer keys": {"num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": True, "sliding_window": 8},
}, file_of=file_of_olmo3, differs=("rope_scaling",),
    runs=(("as it is", "float32", 1.0), ("every second, YaRN", "bfloat16", 1.0), ("fewer keys", "float32", 0.0)),
    one_rank="a model that norms all heads together runs on one rank",
    bad_keys=(
        bad("layer_types must name all 4 layers", layer_types=["full_attention"]),
        bad("rope_parameters must hold an object full_attention", rope_parameters=default_rope()),
    ),
)  # fmt: skip

# a model whose factors all count
FACTORS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 3.0, "pad_token_id": 0,
}  # fmt: skip
HYBRID = FACTORS | {
    "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "position_embedding_type": "rope",
    "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_head": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip


def of_factors(model: Any) -> tuple[dict, dict]:
    c = model.config
    scales = {"embedding_scale": c.embedding_multiplier, "residual_scale": c.residual_multiplier,
              "attention.scale": c.attention_multiplier, "logit_scale": c.logits_scaling}  # fmt: skip
    return metadata_of(model, "granite", scales), gguf_tensors(model, convert=of_interleaved)


GRANITE = plain("Granite", {
    "as it is": FACTORS,
    "no factors, tied": {"tie_word_embeddings": True, "pad_token_id": 0},
    "biases": FACTORS | {"attention_bias": True, "mlp_bias": True},
}, file_of=of_factors, no_file=("biases",), differs=("query_scale", "embedding_scale"),
    runs=(("as it is", "float32", 1.0), ("as it is", "bfloat16", 1.0), ("as it is", "int8", 0.0)),
    bad_keys=(bad("residual_multiplier must be a number above 0", residual_multiplier=0),),
)  # fmt: skip
GRANITE4 = plain("GraniteMoeHybrid", {"as it is": HYBRID},
    runs=(("as it is", "bfloat16", 0.0),), one_rank="a model with fused projections runs on one rank",
    bad_keys=(
        bad("num_local_experts must be 0", num_local_experts=4),
        bad("layer_types must be a list of attention", layer_types=["mamba", "full_attention", "full_attention"]),
        bad("position_embedding_type must be rope", position_embedding_type="nope"),
    ),
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


def metadata_of_glm(model: Any, further: dict | None = None) -> dict:
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
            "rope_parameters": default_rope(1e5, partial_rotary_factor=0.25),
        },
    },
    lambda model: (metadata_of_glm(model), gguf_tensors(model, GLM_NAMES, of_experts)),
    runs=(("with norms of queries and keys, biases", "bfloat16", 1.0),),
    in_fp32={"1.router.e_score_correction_bias": "1.mlp.gate.e_score_correction_bias"},
    bad_keys=(
        bad("n_group must be 1: groups of experts are not supported; it is 2", n_group=2),
        bad("num_nextn_predict_layers must be a whole number from 0 to 1", num_nextn_predict_layers=2),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------------------------- Qwen2-MoE

QWEN_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
QWEN2_MOE_SIZES = tiny_models.SIZES | QWEN_EXPERTS | {
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
    no_file=("shares add up to 1, no biases", "tied, a layer without experts"),
    runs=(("as it is", "bfloat16", 1.0), ("as it is", "int4", 1.0)),
    bad_keys=(
        bad("its config asks for", shared_expert_intermediate_size=32),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ Qwen3.5

QWEN35_SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 4, "head_dim": 32, "max_position_embeddings": 512, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
LINEAR_OR_FULL = ["linear_attention", "full_attention"]
QWEN35_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip


def randomize_qwen(model: Any) -> Any:
    """Random weights; norms count from one, but those of states."""
    with torch.no_grad():
        for name, p in model.float().named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-2.0, 2.0)
            else:
                from_one = "norm" in name and "linear_attn" not in name
                center = 1.0 if "linear_attn.norm" in name else 0.0
                p.normal_(center, 0.4 if from_one or p.dim() == 1 else 0.1)
    return model.eval()


def random_qwen35(**options: Any) -> Any:
    torch.manual_seed(0)
    kind = "Qwen3_5Moe" if "num_experts" in options else "Qwen3_5"
    config = getattr(transformers, f"{kind}TextConfig")(**QWEN35_SIZES | options)
    of_kind = getattr(transformers, f"{kind}ForCausalLM")
    return randomize_qwen(of_kind._from_config(config, attn_implementation="eager"))


def tiled(x: torch.Tensor, keys: int, width: int, dim: int = 0) -> torch.Tensor:
    """Heads of values, of `width` numbers each, in the converter's order: the first of every head of keys first."""
    parts = x.unflatten(dim, (keys, -1, width)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2)


def state_keys(c: Any) -> dict:
    """The metadata of a Qwen's states. c: transformers' config"""
    return turned(c) | {
        "ssm.conv_kernel": 4, "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "ssm.state_size": c.linear_key_head_dim, "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.group_count": c.linear_num_key_heads, "full_attention_interval": 4,
    }  # fmt: skip


def file_of_qwen35(model: Any, further: dict | None = None) -> tuple[dict, dict]:
    """The metadata and the converter's tensors: value heads in its order, norms with one added, -exp(A_log).

    The names are those of the package gguf.
    """
    c = model.config
    keys, width = c.linear_num_key_heads, c.linear_value_head_dim
    both = 2 * keys * c.linear_key_head_dim
    changes = {
        "in_proj_qkv.weight": lambda v: torch.cat((v[:both], tiled(v[both:], keys, width))),
        "conv1d.weight": lambda v: torch.cat((v[:both, 0], tiled(v[both:, 0], keys, width))),
        "in_proj_z.weight": lambda v: tiled(v, keys, width),
        "in_proj_b.weight": lambda v: tiled(v, keys, 1),
        "in_proj_a.weight": lambda v: tiled(v, keys, 1),
        "out_proj.weight": lambda v: tiled(v, keys, width, 1),
        "A_log": lambda v: tiled(-v.exp(), keys, 1),
        "dt_bias": lambda v: tiled(v, keys, 1),
        "norm.weight": lambda v: v,
    }

    def convert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        _, of_state, own = name.partition(".linear_attn.")
        if of_state:
            return {name: changes[own](value)}
        return of_experts(name, value + 1 if "norm" in name else value)

    own = state_keys(c) | {"rope.dimension_sections": [2, 1, 1, 0]}
    architecture = "qwen35"
    if hasattr(c, "num_experts"):
        architecture = "qwen35moe"
        own |= expert_keys(c)
        c.intermediate_size = c.moe_intermediate_size
    metadata = metadata_of(model, architecture, own | (further or {}))
    if hasattr(c, "num_experts"):  # as in published files
        del metadata["qwen35moe.feed_forward_length"]
    tensors = gguf_tensors(model, QWEN35_NAMES, convert)
    return metadata, tensors


def with_pictures(raw: dict) -> dict:
    """config.json of a model whose text part this is."""
    names = {"qwen3_5_text": ("Qwen3_5", "qwen3_5"), "gemma3_text": ("Gemma3", "gemma3")}
    kind, model_type = names[raw["model_type"]]
    whole = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": model_type}
    return whole | {"text_config": raw}


def stacked_experts(held: dict) -> dict:
    """The experts of a layer in one tensor, as in the published files; transformers writes them one by one, or so."""
    model = random_qwen35(**QWEN_EXPERTS)
    assert model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 64, 64)
    return model.state_dict()


QWEN35 = Family(
    random_qwen35,
    {
        "as it is": {},
        "as many key heads": {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
        "one key head": {"linear_num_key_heads": 1, "linear_key_head_dim": 32},
        "every second layer": {"layer_types": LINEAR_OR_FULL * 2},
        "attention first": {"layer_types": LINEAR_OR_FULL[::-1] * 2},
        "tied": {"tie_word_embeddings": True},
        "half of a head is turned": {"rope_parameters": default_rope(1e5, partial_rotary_factor=0.5)},
        "all of a head is turned": {"rope_parameters": default_rope(1e5, partial_rotary_factor=1.0)},
        "experts": QWEN_EXPERTS,
        "one expert of many": QWEN_EXPERTS | {"num_experts_per_tok": 1, "tie_word_embeddings": True},
    },
    file_of_qwen35,
    no_file=("every second layer", "attention first"),
    differs=("tiled_heads",),
    blocks=numbers_in("conv1d"),
    runs=(
        ("as it is", "float32", 0.0), ("as it is", "bfloat16", 0.0), ("as it is", "blocks", 1.0), ("as it is", "int8", 1.0),
        ("experts", "bfloat16", 1.0), ("experts", "blocks", 0.0), ("experts", "int4", 1.0),
    ),
    rewritten={
        "the text part of a model with pictures and an MTP layer": Rewritten(
            {}, with_pictures, note="1 weight(s) of other parts are not used: model.visual.merger.weight",
            tensors=renamed("model.", "model.language_model.", mtp__fc__weight=torch.zeros(64, 128),
                            model__visual__merger__weight=torch.zeros(4)),
        ),
        "experts in one tensor a layer": Rewritten(QWEN_EXPERTS, {}, stacked_experts),
        "layers by their interval": Rewritten(
            {"layer_types": LINEAR_OR_FULL * 2}, {"layer_types": ..., "full_attention_interval": 2},
        ),
    },
    in_fp32={"0.decay.A_log": "0.linear_attn.A_log", "0.decay.dt_bias": "0.linear_attn.dt_bias"},
    one_rank="a model with recurrent layers runs on one rank",
    bad_keys=(
        bad("hidden_act must be silu", hidden_act="gelu"),
        bad("layer_types must name full_attention at least once", layer_types=["linear_attention"] * 4),
        bad("full_attention_interval (2) and layer_types must name the same layers", full_attention_interval=2),
        bad("linear_conv_kernel_dim must be a whole number from 4 to 4", linear_conv_kernel_dim=3),
        bad("linear_num_key_heads (3) must divide linear_num_value_heads (4)", linear_num_key_heads=3),
        bad("attn_output_gate must be true", attn_output_gate=False),
        bad("leave an even number", rope_parameters={"partial_rotary_factor": 0.1}),
    ),
    bad_files=(
        ({"nextn_predict_layers": 4}, (), "nextn_predict_layers must be from 0 to below block_count"),
        ({"ssm.time_step_rank": 3}, (), "ssm.time_step_rank must divide ssm.inner_size"),
        ({"ssm.conv_kernel": 3}, (), "linear_conv_kernel_dim must be"),
    ),
)  # fmt: skip

# --------------------------------------------------------------------------------------- Qwen3-Next

NEXT_NAMES = QWEN35_NAMES | {
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip


def random_next(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**QWEN35_SIZES | QWEN_EXPERTS | options)
    of_kind = transformers.Qwen3NextForCausalLM
    return randomize_qwen(of_kind._from_config(config, attn_implementation="eager"))


def file_of_next(model: Any, old: bool = False) -> tuple[dict, dict]:
    """The metadata and the converter's tensors.

    old: with one for queries, keys, values and their gates; the shared expert's gate is a vector
    """
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
        if name.endswith("shared_expert_gate.weight") and old:
            return {name: value[0]}
        from_one = "norm" in name and "linear_attn" not in name
        return of_experts(name, value + 1 if from_one else value)

    tensors = gguf_tensors(model, NEXT_NAMES, convert)
    return metadata_of(model, "qwen3next", expert_keys(c) | state_keys(c)), tensors


QWEN3_NEXT = Family(
    random_next,
    {
        "as it is": {},
        "one head of keys, tied": {"linear_num_key_heads": 1, "tie_word_embeddings": True},
        "as many heads of keys": {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
    },
    file_of_next,
    blocks=numbers_in("conv1d"),
    greedy=("as it is", "one head of keys, tied"),
    runs=(("as it is", "bfloat16", 1.0), ("as it is", "blocks", 1.0)),
    one_rank="a model with recurrent layers runs on one rank",
    bad_keys=(
        bad("norm_topk_prob must be true", norm_topk_prob=False),
        bad("mlp_only_layers must be an empty list", mlp_only_layers=[1]),
        bad("layer_types must name full_attention at least once", layer_types=["linear_attention"] * 4),
        bad("in_proj_qkvz.weight has 320 rows, but its config asks for 192", linear_value_head_dim=16),
    ),
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


def random_lfm2(kind: str = "Lfm2", **options: Any) -> Any:
    def spread(name: str) -> tuple[float, float]:
        return float("norm" in name), 0.6 if "conv.conv" in name else 0.2

    return spread_corrections(tiny_models.random_model(kind, LFM2_SIZES | options, spread))


def file_of_lfm2(model: Any) -> tuple[dict, dict]:
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
        return metadata_of(model, "lfm2", own), tensors
    own |= {
        "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok, "expert_gating_func": 2,
        "expert_feed_forward_length": c.moe_intermediate_size, "leading_dense_block_count": c.num_dense_layers,
        "expert_weights_scale": c.routed_scaling_factor,
    }  # fmt: skip
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
    blocks=numbers_in("shortconv.conv"),
    greedy=("experts", "as it is"),
    runs=(
        ("as it is", "bfloat16", 1.0), ("as it is", "blocks", 1.0), ("experts", "bfloat16", 1.0), ("experts", "int8", 1.0),
    ),
    rewritten={
        "the keys of 2025": Rewritten({}, {
            "layer_types": ..., "full_attn_idxs": [2], "intermediate_size": ..., "block_ff_dim": 96,
            "tie_word_embeddings": ..., "tie_embedding": True,
        }),
    },
    one_rank="a model with recurrent layers runs on one rank",
    bad_keys=(
        bad("layer_types must name full_attention at least once", layer_types=["conv"] * 4),
        bad("full_attn_idxs must be the full_attention layers of layer_types, [2]; it is [1]", full_attn_idxs=[1]),
        bad("conv_L_cache must be a whole number from 2 to 4", conv_L_cache=5),
        bad("conv_bias must be false", conv_bias=True),
    ),
    bad_files=(
        ({"attention.head_count_kv": [0, 1, 2, 0]}, (), "head_count_kv must be 0 for convolutions"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ gpt-oss

SLIDING_OR_FULL = ["sliding_attention", "full_attention"]
OSS_YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32, "rope_theta": 150000.0,
}  # fmt: skip
OSS_SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8,
    "max_position_embeddings": 512, "rope_parameters": OSS_YARN,
}  # fmt: skip
OSS_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def random_oss(**options: Any) -> Any:
    """A gpt-oss: its bound is reached, and sinks take a share."""
    return tiny_models.random_model(
        "GptOss", OSS_SIZES | options, lambda name: (float("norm" in name or "sinks" in name), 0.25)
    )


def oss_experts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
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


def file_of_oss(model: Any) -> tuple[dict, dict]:
    width = {"expert_feed_forward_length": model.config.intermediate_size}
    return metadata_of(model, "gpt-oss", width), gguf_tensors(model, OSS_NAMES, oss_experts)


GPT_OSS = Family(
    random_oss,
    {
        "as it is": {},
        "one key head": {"num_key_value_heads": 1},
        "no biases in attention": {"attention_bias": False},
        "another bound": {"swiglu_limit": 0.5, "swiglu_alpha": 1.1},
        "one expert a token": {"num_experts_per_tok": 1},
        "every expert": {"num_experts_per_tok": 5},
        "whole bounds of YaRN": {"rope_parameters": OSS_YARN | {"truncate": True}},
        "another rope": {"rope_parameters": default_rope(5000.0)},
        "layers in any order": {"layer_types": [SLIDING_OR_FULL[i % 3 == 0] for i in range(4)]},
        "no layer sees all": {"layer_types": SLIDING_OR_FULL[:1] * 4},
        "every layer sees all": {"layer_types": SLIDING_OR_FULL[1:] * 4},
        "one window": {"sliding_window": 1},
        "a window beyond the prompt": {"sliding_window": 64},
        "tied": {"tie_word_embeddings": True},
    },
    file_of_oss,
    no_file=(
        "no biases in attention", "another bound", "whole bounds of YaRN", "layers in any order", "no layer sees all",
        "every layer sees all", "tied",
    ),
    differs=("alpha",),
    blocks=lambda name: "MXFP4" if name.endswith("_exps.weight") else "F32",
    runs=(
        ("as it is", "float32", 1.0), ("as it is", "bfloat16", 0.0), ("as it is", "bfloat16", 1.0), ("as it is", "blocks", 1.0),
    ),
    near=2e-2,
    bad_keys=(
        bad("hidden_act must be silu or swish", hidden_act="gelu"),
        bad("RoPE scaling must be one of", rope_parameters=OSS_YARN | {"rope_type": "dynamic"}),
    ),
    bad_files=missing(
        "gpt-oss.expert_feed_forward_length", "gpt-oss.attention.sliding_window", "gpt-oss.expert_used_count",
        "blk.3.attn_sinks.weight", "blk.1.ffn_up_exps.bias", "blk.0.post_attention_norm.weight", "blk.2.ffn_gate_inp.bias",
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ Gemma 3

GEMMA3_SIZES = tiny_models.SIZES | {
    "num_hidden_layers": 7, "head_dim": 32, "max_position_embeddings": 512, "sliding_window": 8,
    "query_pre_attn_scalar": 32,
}  # fmt: skip
GEMMA3_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
LINEAR_8 = {"rope_type": "linear", "factor": 8.0}


def ropes(local: float = 10_000.0, theta: float = 1_000_000.0, **scaling: Any) -> dict:
    """The keys of both rotary embeddings; scaling: of the layers without a window."""
    return {
        "full_attention": default_rope(theta) | scaling,
        "sliding_attention": default_rope(local),
    }


def random_gemma3(**options: Any) -> Any:
    """A Gemma 3; its norms' weights count from one."""
    return tiny_models.random_model(
        "Gemma3", GEMMA3_SIZES | options, lambda name: (0.0, 0.4 if "norm" in name else 0.15)
    )


def file_of_gemma3(model: Any) -> tuple[dict, dict]:
    """The converter adds one to the weights of norms."""

    def from_one(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: value + 1 if "norm" in name else value}

    return metadata_of(model, "gemma3"), gguf_tensors(model, GEMMA3_NAMES, from_one)


def older_keys(**changes: Any) -> Callable[[dict], dict]:
    """A function of config.json that gives the keys of Google's first files; a change to ... removes a key."""

    def older(raw: dict) -> dict:
        both = raw.pop("rope_parameters")
        del raw["layer_types"]
        raw |= {
            "rope_theta": both["full_attention"]["rope_theta"],
            "rope_local_base_freq": both["sliding_attention"]["rope_theta"],
            "rope_scaling": None,
            "sliding_window_pattern": 6,
        }
        return raw | changes

    return older


OF_VISION = {
    "multi_modal_projector__weight": torch.zeros(4),
    "vision_tower__weight": torch.zeros(4),
}
VISION_NOTE = (
    "2 weight(s) of other parts are not used: multi_modal_projector.weight, vision_tower.weight"
)
GEMMA3 = Family(
    random_gemma3,
    {
        "as it is": {},
        "one key head": {"num_key_value_heads": 1},
        "another query scale": {"query_pre_attn_scalar": 20},
        "scaled rope": {"rope_parameters": ropes(**LINEAR_8)},
        "other bases": {"rope_parameters": ropes(500.0, 9000.0)},
        "a scaled window": {"rope_parameters": ropes() | {"sliding_attention": {**LINEAR_8, "rope_theta": 1e4}}},
        "every third layer": {"sliding_window_pattern": 3},
        "layers in any order": {"layer_types": [SLIDING_OR_FULL[i % 3 == 0] for i in range(7)]},
        "no layer sees all": {"layer_types": SLIDING_OR_FULL[:1] * 7},
        "every layer sees all": {"layer_types": SLIDING_OR_FULL[1:] * 7},
        "one window": {"sliding_window": 1},
        "a window beyond the prompt": {"sliding_window": 64},
        "untied": {"tie_word_embeddings": False},
        "biases": {"attention_bias": True},
    },
    file_of_gemma3,
    no_file=(
        "another query scale", "other bases", "a scaled window", "every third layer", "layers in any order",
        "no layer sees all", "every layer sees all", "biases",
    ),
    differs=("rounds_scale",),  # as llama.cpp
    runs=(("as it is", "float32", 1.0), ("as it is", "bfloat16", 0.0), ("as it is", "bfloat16", 1.0)),
    near=2e-2,
    rewritten={
        "older keys": Rewritten({}, older_keys()),
        "older keys, scaled": Rewritten(
            {"rope_parameters": ropes(**LINEAR_8)}, older_keys(rope_scaling={"factor": 8.0, "rope_type": "linear"}),
        ),
        "older keys, other bases": Rewritten(
            {"rope_parameters": ropes(300.0, 5000.0), "sliding_window_pattern": 2}, older_keys(sliding_window_pattern=2),
        ),
        "a key of transformers' own": Rewritten(
            {}, older_keys(sliding_window_pattern=..., _sliding_window_pattern=6),
        ),
        "a dtype that the weights say": Rewritten({}, {"dtype": "auto"}),
        "the text part of a model with pictures": Rewritten(
            {}, with_pictures, renamed("model.", "model.language_model.", **OF_VISION), VISION_NOTE,
        ),
        "as in Google's files": Rewritten(
            {}, with_pictures, renamed("model.", "language_model.model.", **OF_VISION), VISION_NOTE,
        ),
    },
    bad_keys=(
        bad("hidden_activation must be gelu_pytorch_tanh", hidden_activation="relu"),
        bad("attn_logit_softcapping must be null", attn_logit_softcapping=50.0),
        bad("final_logit_softcapping must be null", final_logit_softcapping=30.0),
        bad("use_bidirectional_attention must be false", use_bidirectional_attention=True),
        bad("sliding_window must be at most max_position_embeddings (512); it is 513", sliding_window=513),
        bad("layer_types must name all 7 layers; it names 1", layer_types=["sliding_attention"]),
        bad("RoPE scaling must be one of", rope_parameters=ropes(rope_type="dynamic")),
        bad("rope_parameters must hold", rope_parameters={"rope_type": "default"}),
    ),
    bad_files=(
        *missing(
            "gemma3.embedding_length", "gemma3.block_count", "gemma3.context_length", "gemma3.feed_forward_length",
            "gemma3.attention.head_count", "gemma3.attention.sliding_window", "blk.3.post_ffw_norm.weight",
            "blk.0.attn_q_norm.weight", "output_norm.weight",
        ),
        ({"attention.sliding_window": 513}, (), "must be at most"),
        ({"final_logit_softcapping": 30.0}, (), "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, (), "attn_logit_softcapping"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ Gemma 4

GEMMA4_SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "max_position_embeddings": 512, "sliding_window": 8,
    "layer_types": SLIDING_OR_FULL * 3, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "final_logit_softcapping": 3.0,
}  # fmt: skip
SMALL = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 4}
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_NAMES = NAMES | {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale.weight", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip


def random_gemma4(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**GEMMA4_SIZES | options)
    return randomized_gemma4(transformers.Gemma4ForCausalLM, config)


def randomized_gemma4(kind: Any, config: Any) -> Any:
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in [*model.float().named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar") or p is not None and "scale" in name and p.dim() == 1:
                p.uniform_(0.5, 1.5)
            elif not name.endswith(("inv_freq", "embed_scale", "token_ordering")):
                p.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def file_of_gemma4(model: Any) -> tuple[dict, dict]:
    c = model.config
    c.allow_global_per_layer_attribute_access = True
    slides = [kind == SLIDING_OR_FULL[0] for kind in c.layer_types]
    wide = [1 + (c.use_double_wide_mlp and i >= 6 - c.num_kv_shared_layers) for i in range(6)]
    of_layers = [c.per_layer_config[i] for i in range(6)]
    own = {
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
        "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
        "attention.sliding_window_pattern": slides, "attention.shared_kv_layers": c.num_kv_shared_layers,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input, "rope.freq_base_swa": 10000.0,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in of_layers],
    }  # fmt: skip
    if c.use_double_wide_mlp:
        own["feed_forward_length"] = [c.intermediate_size * factor for factor in wide]
    if c.final_logit_softcapping:
        own["final_logit_softcapping"] = c.final_logit_softcapping
    if c.enable_moe_block:
        own |= {
            "expert_count": c.num_experts, "expert_used_count": c.top_k_experts,
            "expert_feed_forward_length": c.moe_intermediate_size,
        }  # fmt: skip
    tensors = gguf_tensors(model, GEMMA4_NAMES)
    tensors["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    return metadata_of(model, "gemma4", own), tensors


def gemma4_blocks(name: str) -> str:
    """Rows of 16 numbers have no whole block."""
    return "F32" if "proj.weight" in name and "blk." in name else "Q8_0"


def unread_tensors(held: dict) -> dict:
    """With keys that nothing reads, since another layer's cache serves."""
    return held | {"model.layers.5.self_attn.k_proj.weight": torch.zeros(64, 64)}


E2B = SMALL | {"use_double_wide_mlp": True}
GEMMA4 = Family(
    random_gemma4,
    {
        "E2B": E2B,
        "E4B": SMALL | {"num_kv_shared_layers": 2},
        "31B": KEYS_AS_VALUES,
        "26B-A4B": GEMMA4_EXPERTS | KEYS_AS_VALUES,
        "layers that share, in another order": SMALL | {"num_kv_shared_layers": 3},
        "untied, without a bound": {"tie_word_embeddings": False, "final_logit_softcapping": None},
    },
    file_of_gemma4,
    differs=("rounds_scale",),
    blocks=gemma4_blocks,
    greedy=("E2B", "31B", "26B-A4B"),
    runs=(
        ("E2B", "bfloat16", 1.0), ("31B", "int8", 1.0), ("26B-A4B", "int4", 1.0), ("E2B", "blocks", 1.0),
    ),
    rewritten={
        # they name the heads of the layers that see all
        "published files": Rewritten(
            E2B, {"per_layer_config": ..., "global_head_dim": 32, "num_global_key_value_heads": None}, unread_tensors,
        ),
    },
    one_rank="a model with heads of two widths runs on one rank",
    bad_case="E2B",
    bad_keys=(
        bad("layer_types must name all 6 layers; it names 1", layer_types=["sliding_attention"]),
        bad("layer_types must end with full_attention", layer_types=SLIDING_OR_FULL[::-1] * 3),
        bad("num_kv_shared_layers must leave layers of each kind", num_kv_shared_layers=6),
        bad("one form of heads for all full_attention layers", per_layer_config={"1": {"head_dim": 32}}),
        bad("must leave sliding_attention layers", per_layer_config={str(i): {"head_dim": 48} for i in range(6)}),
        bad("the heads of keys must divide num_attention_heads (3)", num_attention_heads=3),
        bad("use_bidirectional_attention must be vision", use_bidirectional_attention="all"),
        bad("enable_moe_block needs the key 'num_experts'", enable_moe_block=True),
        bad("at most 1", rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}),
        bad("architecture Gemma4AssistantForCausalLM is not supported", architectures=["Gemma4AssistantForCausalLM"]),
    ),
    bad_files=(
        ({"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, (), "and one for all layers of a kind"),
        ({"attention.sliding_window_pattern": [True] * 6}, (), "layer_types must end with full_attention"),
        ({"attention.sliding_window_pattern": [True]}, (), "sliding_window_pattern must name all 6 layers; it names 1"),
        ({"attention.shared_kv_layers": 6, "feed_forward_length": 96}, (), "num_kv_shared_layers must leave layers"),
        ({}, ("gemma4.attention.key_length_swa",), "attention.key_length_swa is missing"),
        ({}, ("blk.4.layer_output_scale.weight",), "1 missing weight(s)"),
    ),
)  # fmt: skip

FAMILIES = PLAIN_FAMILIES | {
    "SmolLM3": SMOLLM3, "Phi-3": PHI3, "OLMo-2": OLMO2, "OLMo-3": OLMO3, "Granite 3": GRANITE, "Granite 4": GRANITE4, "GLM-4": GLM4, "GLM-4.5": GLM4_MOE, "Qwen2-MoE": QWEN2_MOE, "Qwen3.5": QWEN35, "Qwen3-Next": QWEN3_NEXT, "LFM2": LFM2,
    "gpt-oss": GPT_OSS, "Gemma 3": GEMMA3, "Gemma 4": GEMMA4,
}  # fmt: skip
