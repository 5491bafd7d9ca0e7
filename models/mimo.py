"""MiMo-7B: Qwen2's layers, with an MTP layer beside them.

Sources: arXiv 2505.07608; `MiMoMTPLayers` of the model's own code. MiMo-V2 is another model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from files.gguf_names import GgufLayout
from files.mtp import Mtp
from models import qwen
from models.mixtures import Qwen

GGUF = GgufLayout()
MTP_NAMES = {
    "fc": "model.mtp_layers.0.input_proj",
    "embedding_norm": "model.mtp_layers.0.token_layernorm",
    "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
    "norm": "model.mtp_layers.0.final_layernorm",
}


@dataclass(frozen=True)
class MiMo(Qwen):
    """Qwen2's settings."""

    @property
    def mtp(self) -> Mtp:
        prefix = "model.mtp_layers."
        model = replace(self, n_layers=1)
        return Mtp(model, prefix, f"{prefix}{{}}.", MTP_NAMES, feature_first=True)


def read_config(raw: dict, architecture: str) -> MiMo:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    return MiMo(**asdict(qwen.read_config(raw, "Qwen2ForCausalLM")))
