"""Qwen3-Next: Qwen3.5 with experts, whose files have the recurrence's projections by heads of keys.

In GGUF files those of b and a lie so, in older ones all of them. Not here: its MTP layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from files.fields import YES, Rule, integer, key, read_fields
from files.renames import Readers, split_experts
from models.qwen3_5 import GGUF as QWEN35_GGUF
from models.qwen3_5 import WITH_EXPERTS, HFQwen35, Qwen35
from models.qwen3_5 import gguf_keys as qwen3_5_keys
from models.qwen3_5 import read_config as read_qwen3_5

NONE = Rule("an empty list", lambda v: v == [])


@dataclass(frozen=True)
class Qwen3Next(Qwen35):
    """The settings are Qwen3.5's."""

    mtp = None  # none is read


@dataclass(frozen=True)
class HFQwen3Next:
    """The further keys of config.json."""

    norm_topk_prob: bool = key(YES, True)
    decoder_sparse_step: int = key(integer(1, 1), 1)
    mlp_only_layers: list | None = key(NONE, None)


def read_config(raw: dict, architecture: str) -> Qwen3Next:
    """Translate config.json. Raises: ValueError for a missing key or a bad value."""
    read_fields(raw, HFQwen3Next)
    return Qwen3Next(**vars(read_qwen3_5(raw, WITH_EXPERTS)))


def rename(readers: Readers, raw: dict) -> Readers:
    """Name the matrices of experts, and the projections of a recurrence, one by one."""
    return split_projections(split_experts(readers, raw), raw)


def split_projections(readers: Readers, raw: dict) -> Readers:
    """Name the projections of a recurrence as Qwen3.5's files do. raw: config.json

    Raises: ValueError for a bad value.
    """
    sizes = read_fields(raw, HFQwen35)
    heads = sizes.key_heads
    shared = sizes.value_heads // heads  # heads of values by head of keys
    values = shared * sizes.value_dim
    keys = sizes.key_dim
    qkvz = partial(_rows, heads=heads, sizes=(keys, keys, values, values))
    ba = partial(_rows, heads=heads, sizes=(shared, shared))
    parts = {
        "in_proj_qkvz.": {"in_proj_qkv.": (qkvz, (0, 1, 2)), "in_proj_z.": (qkvz, (3,))},
        "in_proj_ba.": {"in_proj_b.": (ba, (0,)), "in_proj_a.": (ba, (1,))},
    }
    split = {}
    for name, read in readers.items():
        both = next((part for part in parts if part in name), None)
        if both is None:
            split[name] = read
            continue
        for part, (rows, which) in parts[both].items():
            split[name.replace(both, part)] = partial(rows, read, name, which)
    return split


def _rows(
    read: Callable[[], Tensor],
    name: str,
    which: tuple[int, ...],
    heads: int,
    sizes: tuple[int, ...],
) -> Tensor:
    """Return the rows of some parts, all heads of one before those of the next.

    sizes: of the parts of a head of keys, side by side. Raises: ValueError for another shape.
    """
    x = read()
    if len(x) != heads * sum(sizes):
        raise ValueError(
            f"{name} has {len(x)} rows, but its config asks for {heads * sum(sizes)}; use the "
            "config made for these weights"
        )
    parts = x.unflatten(0, (heads, -1)).split(sizes, 1)
    return torch.cat([parts[i].flatten(0, 1) for i in which])


# -------------------------------------------------------------------------------------------- GGUF


def gguf_keys(metadata: Any, name: Callable[[str], str]) -> dict[str, Any]:
    """Return Qwen3.5's keys, with heads of values in the order of their heads of keys."""
    return qwen3_5_keys(metadata, name) | {"tiled_heads": False}


GGUF = replace(
    QWEN35_GGUF,
    layer=QWEN35_GGUF.layer
    | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    split=split_projections,
    keys=gguf_keys,
)
