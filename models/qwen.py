"""Qwen2 and Qwen3, dense or with experts: LLaMA's layer with biases, norms of queries and keys.

Their list of steps is in models/mixtures.py; all tokens share an expert of Qwen2-MoE.
Sources: arXiv 2407.10671, 2505.09388.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from files.fields import FLAG, key, read_fields, translated
from files.gguf_names import LAYER, GgufLayout
from files.keys import EXPERTS, LAYERS, WIDTH, common_fields, read_swiglu_keys, within_window
from files.mixtral import counts
from models.mixtures import Qwen, with_head_norms  # noqa: F401  (of heads with such norms)

# architecture -> (bias of q, k and v; bias of o); None: as the key `attention_bias` has it
BIASES = {
    "Qwen2ForCausalLM": (True, False),
    "Qwen2MoeForCausalLM": (True, False),
    "Qwen3ForCausalLM": (None, None),
    "Qwen3MoeForCausalLM": (None, None),
}


@dataclass(frozen=True)
class HFQwenExperts:
    """The further keys of the config.json of one with experts."""

    expert_dim: int = key(WIDTH, name="moe_intermediate_size")
    num_experts_per_tok: int = key(EXPERTS)
    num_experts: int | None = key(EXPERTS, None)
    num_local_experts: int | None = key(EXPERTS, None)  # the same as transformers 5 writes it
    norm_topk: bool = key(FLAG, False, "norm_topk_prob")
    decoder_sparse_step: int = key(WIDTH, 1)  # every so many layers one has experts
    mlp_only_layers: list | None = key(LAYERS, None)  # layers without experts besides


def read_config(raw: dict, architecture: str) -> Qwen:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    fields = common_fields(hf)
    qkv_bias, o_bias = BIASES[architecture]
    if "Moe" in architecture:
        fields |= mixture_fields(raw)
    if architecture == "Qwen2MoeForCausalLM":
        keys = read_fields(raw, HFSharedExpert)
        fields |= {"shared_dim": keys.shared_expert_intermediate_size}
        qkv_bias = keys.qkv_bias
    return Qwen(
        # missing, the key for windows means none, as in transformers
        **fields | {"max_context": within_window(hf, fields["max_context"], by_default=False)},
        qkv_bias=hf.attention_bias if qkv_bias is None else qkv_bias,
        o_bias=hf.attention_bias if o_bias is None else o_bias,
        qk_norm=architecture.startswith("Qwen3"),
    )


@dataclass(frozen=True)
class HFSharedExpert:
    """The further keys of a Qwen2-MoE's config.json."""

    shared_expert_intermediate_size: int = key(WIDTH)
    qkv_bias: bool = key(FLAG, True)


def mixture_fields(raw: dict) -> dict[str, Any]:
    """Read the keys of a mixture of experts, as fields of `Qwen`.

    files/weights.py checks the number of experts against the weights. The weights do not show how
    many experts process a token.

    Returns: no fields where no layer has experts.
    Raises: ValueError for impossible numbers or a missing key.
    """
    hf = read_fields(raw, HFQwenExperts)
    layers = raw["num_hidden_layers"]
    name = "num_experts"
    if hf.num_experts is None:
        name = "num_local_experts"
    experts = getattr(hf, name)
    if experts is None:
        raise ValueError("the key 'num_experts' is missing")
    without = set(hf.mlp_only_layers or ())
    if max(without, default=0) >= layers:
        raise ValueError(
            f"mlp_only_layers must be below num_hidden_layers ({layers}); one is {max(without)}"
        )
    dense = tuple(i for i in range(layers) if i in without or (i + 1) % hf.decoder_sparse_step)
    fields = counts(name, experts, hf.num_experts_per_tok)
    if len(dense) == layers:
        return {}
    return fields | translated(hf) | {"dense_layers": dense}


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the further keys of config.json that a Qwen2-MoE's GGUF file holds.

    As in llama.cpp, the shares of the chosen experts need not add up to 1.
    name: of a key in the file. Raises: ValueError for a missing key.
    """
    if metadata["general.architecture"] != "qwen2moe":
        return {}
    width = metadata.size(name("expert_shared_feed_forward_length"))
    return {"norm_topk_prob": False, "shared_expert_intermediate_size": width}


GGUF = GgufLayout(
    layer=LAYER
    | {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    changed={
        "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", lambda x: x.view(1, -1))
    },
    keys=gguf_keys,
)
