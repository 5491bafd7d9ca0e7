"""GLM-4.5, 4.6 and 4.7: mixtures of experts, with an MTP layer behind the model's own.

The first layers are dense. Experts are chosen by sigmoids with a correction (`SigmoidRouter`), and
all tokens share one. RoPE turns half of each head; the larger models norm queries and keys.

Sources: arXiv 2508.06471; the MTP layer by transformers' `MtpLayer`. Not here: groups of experts,
which no published one has; the Flash models, whose attention is another (MLA); pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from files.fields import FLAG, Rule, given, integer, key, positive, read_fields, translated
from files.gguf_names import LAYER, GgufLayout, same
from files.keys import EXPERTS, WIDTH, common_fields, read_swiglu_keys, rotary_dim
from files.mixtral import counts
from files.mtp import Mtp
from files.renames import split_experts
from model import Rope
from models.mixtures import Qwen
from models.steps import SigmoidRoute
from steps import Route

MTP_NAMES = {
    "fc": "eh_proj",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "norm": "shared_head.norm",
}


@dataclass(frozen=True)
class Glm4Moe(Qwen):
    """The settings of GLM-4.5 beside Qwen3's."""

    rotary_dim: int = 64  # partial_rotary_factor head_dim: elements of a head that RoPE turns
    share_scale: float = 1.0  # routed_scaling_factor

    gates_shared = False

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        shared = "mlp.shared_experts"
        return super().names | {
            "shared_w13": (f"{shared}.gate_proj", f"{shared}.up_proj"),
            "shared_w2": (f"{shared}.down_proj",),
        }

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (Rope(self.rotary_dim, self.rope_theta, self.rope_scaling),)

    @property
    def mtp(self) -> Mtp:
        number = self.n_layers  # that of the layer behind the model's own
        prefix = f"model.layers.{number}."
        names = {ours: prefix + theirs for ours, theirs in MTP_NAMES.items()}
        model = replace(self, n_layers=1, dense_layers=())
        return Mtp(model, prefix, "model.layers.{}.", names, first=number)

    def route(self) -> Route:
        sizes = (self.dim, self.n_experts, self.experts_per_token)
        return SigmoidRoute(*sizes, norm_topk=self.norm_topk, share_scale=self.share_scale)


# ------------------------------------------------------------------------------------- config.json

# what transformers takes where config.json leaves out a key
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
ONE = Rule("1: groups of experts are not supported", lambda v: v == 1)
SIGMOID = Rule("2, by sigmoids", lambda v: v == 2)


@dataclass(frozen=True)
class HFGlm4Moe:
    """The further keys of config.json, with transformers' defaults."""

    expert_dim: int = key(WIDTH, 1408, "moe_intermediate_size")
    n_routed_experts: int = key(EXPERTS, 128)
    n_shared_experts: int = key(integer(0, 64), 1)
    num_experts_per_tok: int = key(EXPERTS, 8)
    first_k_dense_replace: int = key(integer(0, 2**20), 1)
    share_scale: float = key(positive(1e3), 1.0, "routed_scaling_factor")
    norm_topk: bool = key(FLAG, True, "norm_topk_prob")
    n_group: int = key(ONE, 1)
    num_nextn_predict_layers: int = key(integer(0, 1), 1)
    qkv_bias: bool = key(FLAG, False, "attention_bias")
    qk_norm: bool = key(FLAG, False, "use_qk_norm")
    expert_gating_func: int = key(SIGMOID, 2)  # (ours) of a GGUF file


def read_config(raw: dict, architecture: str) -> Glm4Moe:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    raw = given(raw, DEFAULTS)
    own = read_fields(raw, HFGlm4Moe)
    fields = common_fields(read_swiglu_keys(raw))
    return Glm4Moe(
        **fields,
        **translated(own),
        **counts("n_routed_experts", own.n_routed_experts, own.num_experts_per_tok),
        shared_dim=own.n_shared_experts * own.expert_dim,
        dense_layers=tuple(range(min(own.first_k_dense_replace, fields["n_layers"]))),
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
    )


rename = split_experts


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a GGUF file holds. name: of a key in the file

    Raises: ValueError for a missing key.
    """
    head = metadata.size(name("attention.key_length"))
    return {
        "n_routed_experts": metadata.size(name("expert_count")),
        "n_shared_experts": metadata.size(name("expert_shared_count"), 0),
        "first_k_dense_replace": metadata.read(name("leading_dense_block_count"), int, 0),
        "routed_scaling_factor": metadata.positive(name("expert_weights_scale"), 1.0),
        "norm_topk_prob": metadata.read(name("expert_weights_norm"), bool, False),
        "n_group": metadata.size(name("expert_group_count"), 1),
        "expert_gating_func": metadata.read(name("expert_gating_func"), int, 2),
        "partial_rotary_factor": metadata.size(name("rope.dimension_count"), head) / head,
    }


GGUF = GgufLayout(
    layer={name: theirs for name, theirs in LAYER.items() if name != "ffn_norm"}
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    changed={"exp_probs_b.bias": ("mlp.gate.e_score_correction_bias", same)},
    nextn={
        "eh_proj": "eh_proj",
        "enorm": "enorm",
        "hnorm": "hnorm",
        "shared_head_norm": "shared_head.norm",
        "shared_head_head": "shared_head.head",
        "embed_tokens": "embed_tokens",
    },
    numbers_mtp=True,
    partial_rope=True,
    keys=gguf_keys,
)
