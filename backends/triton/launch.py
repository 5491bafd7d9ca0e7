"""The properties of a GPU on which the launches of our kernels depend.

All kernels of this folder have run on an NVIDIA H200 (26 to 28 November 2026, torch 2.11, Triton
3.6), with the results of their references. For the GPUs of `TARGETS` they were compiled only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# tokens of a draft tree, at most; more are a prompt, whose attention is another kernel
SPLIT_TOKENS = 64
# features whose squares are added first, where a norm's division waits (backends/epilogues.py)
PART = 64


class Device(NamedTuple):
    """A GPU."""

    processors: int  # streaming multiprocessors
    shared_bytes: int  # the most that one block may have; about as much as a multiprocessor has
    capability: int  # 10 * major + minor
    name: str = ""  # for plans that were measured on it (plans.py)


# by capability: GPUs for which the kernels are planned and compiled without one
# Source: CUDA C++ programming guide, table of compute capabilities
TARGETS = {
    "80": Device(108, 163 * 1024, 80),  # A100
    "86": Device(82, 99 * 1024, 86),  # RTX 3090
    "89": Device(128, 99 * 1024, 89),  # RTX 4090
    "90": Device(132, 227 * 1024, 90),  # H100
    "100": Device(148, 227 * 1024, 100),  # B200
}


@cache
def device_of(index: int) -> Device:
    """Read the properties of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        10 * properties.major + properties.minor,
        properties.name,
    )
