"""Architectures beside LLaMA and Mixtral, a file each. Without it only these two run."""

NEEDS = ("files",)
ADDS = {
    "operators": {"recurrent": "models.recurrent", "gates": "models.operators"},
}
