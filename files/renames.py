"""Give tensors the names that most models have: one for each matrix of each expert, as `weight`.

A model's file says which of these its files need (`rename` of models/). Each takes readers by name
and config.json, and returns readers by the new names; nothing is read but what is split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

Readers = dict[str, Callable[[], Tensor]]

# a stack of all experts' matrices -> the matrices of an expert, one below the other; those of
# gpt-oss, in stacks.py, lie in another order
STACKS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
GATE_ABOVE_UP = ".mlp.gate_up_proj.weight"


def split_gate_up(readers: Readers, raw: dict) -> Readers:
    """Name the gate and the matrix beside it, which a file holds in one tensor."""
    split: Readers = {}
    for name, read in readers.items():
        if not name.endswith(GATE_ABOVE_UP):
            split[name] = read
            continue
        for half, matrix in enumerate(("gate_proj", "up_proj")):
            split[name.replace("gate_up_proj", matrix)] = partial(_half, read, half)
    return split


def split_experts(readers: Readers, raw: dict) -> Readers:
    """Name each matrix of each expert, where a file holds those of all experts in one tensor."""
    split: Readers = {}
    for name, read in readers.items():
        matrices = next((STACKS[end] for end in STACKS if name.endswith(end)), None)
        if matrices is None or read().dim() != 3:
            split[name] = read
            continue
        layer, _, _ = name.rpartition(".")
        for expert in range(len(read())):
            for number, matrix in enumerate(matrices):
                of_one = partial(_matrix, read, expert, number, len(matrices))
                split[f"{layer}.{expert}.{matrix}.weight"] = of_one
    return split


def rename_ends(readers: Readers, ends: dict[str, str]) -> Readers:
    """Replace the ends of names: what has no module is named as the weight of one."""
    renamed: Readers = {}
    for name, read in readers.items():
        end = next((end for end in ends if name.endswith(end)), "")
        renamed[name.removesuffix(end) + ends.get(end, "")] = read
    return renamed


def _half(read: Callable[[], Tensor], half: int) -> Tensor:
    return read().chunk(2)[half]


def _matrix(read: Callable[[], Tensor], expert: int, number: int, count: int) -> Tensor:
    return read()[expert].chunk(count)[number]
