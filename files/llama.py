"""LLaMA and models that differ from it in their biases or windows: Mistral.

Their list of steps and their weights' names are `ModelConfig`'s own (model.py).
"""

from __future__ import annotations

from files.gguf_names import GgufLayout
from files.keys import common_fields, read_swiglu_keys, within_window
from model import ModelConfig

# architecture -> (bias of q, k and v; bias of o); None: as the key `attention_bias` has it
BIASES = {
    "LlamaForCausalLM": (None, None),
    "MistralForCausalLM": (False, False),
}
GGUF = GgufLayout(interleaved=True)


def read_config(raw: dict, architecture: str) -> ModelConfig:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    hf = read_swiglu_keys(raw)
    fields = common_fields(hf)
    qkv_bias, o_bias = BIASES[architecture]
    return ModelConfig(
        **fields | {"max_context": within_window(hf, fields["max_context"], by_default=True)},
        qkv_bias=hf.attention_bias if qkv_bias is None else qkv_bias,
        o_bias=hf.attention_bias if o_bias is None else o_bias,
    )
