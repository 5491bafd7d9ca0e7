"""MTP layers: the layer of a checkpoint that predicts the token after the next one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from files.checkpoint import TensorSource
from files.config import open_source, read_config
from model import ModelConfig


class Mtp(NamedTuple):
    """A layer beside a model's own, which predicts the token after the next one.

    A projection of two rows side by side, the embedding of the next token and the feature, each
    behind a norm of its own; one layer of the model; a norm. Embedding and LM head are the model's.
    """

    model: ModelConfig  # whose only layer it is
    prefix: str  # beginning of the names of all its tensors
    layer: str  # that of the layer's; {}: the number of the MTP layer
    names: dict[str, str]  # fc, embedding_norm, hidden_norm, norm -> their names
    feature_first: bool = False  # the feature is left of the embedding
    first: int = 0  # number of the first MTP layer


def find_mtp(path: Path, files: TensorSource | None = None) -> Mtp | None:
    """Return the MTP layer that a checkpoint holds, by the names of its tensors, if it does.

    files: of the checkpoint, where they are open already
    """
    files = files or open_source(path)
    mtp = read_config(path, files.config).mtp
    held = mtp and any(name.startswith(mtp.prefix) for name in (*files.readers, *files.quantized))
    return mtp if held else None


def need_mtp(path: Path, files: TensorSource) -> Mtp:
    """Return the MTP layer of a checkpoint. Raises: ValueError where it has none."""
    mtp = find_mtp(path, files)
    if mtp is None:
        known = read_config(path, files.config).mtp
        seen = f"no tensor {known.prefix}*" if known else "its architecture has none that is read"
        raise ValueError(
            f"{path} holds no MTP layer ({seen}); drop --draft mtp, or use a checkpoint with it"
        )
    return mtp
