"""How the CUDA kernels follow each other.

Programmatic dependent launch: blocks of a kernel may start while the one before it still runs, so that what they do
first, such as fetching weights into the second-level cache, costs nothing. Each block calls `after_others` before it
reads what another kernel wrote and before it writes anything; behind it, all earlier kernels are over. A kernel that is
launched so and does not wait would let the next one start too early.

Off before Hopper, and where EAGLE_PDL=0 says so, to compare. Source: "programmatic dependent launch" in the CUDA
programming guide. Not run on a GPU yet.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Device(NamedTuple):
    """What a launch needs to know of a GPU."""

    processors: int
    shared_bytes: int  # the most that one block may have; about what a multiprocessor has
    capability: int  # 10 * major + minor
    overlaps: bool = False  # whether a kernel may start before the one before it is over


@cache
def device_of(index: int) -> Device:
    """Ask a GPU."""
    facts = torch.cuda.get_device_properties(index)
    overlaps = facts.major >= 9 and os.environ.get("EAGLE_PDL", "1") != "0"
    return Device(
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,
        10 * facts.major + facts.minor,
        overlaps,
    )


def overlap(device: Device) -> dict[str, Any]:
    """Options of a launch whose kernel takes OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if device.overlaps else {"OVERLAPS": False}


def overlap_on(x: torch.Tensor) -> dict[str, Any]:
    """The same, for where x lies; tests run kernels on a CPU."""
    return overlap(device_of(x.device.index)) if x.is_cuda else {"OVERLAPS": False}


@triton.jit
def after_others(OVERLAPS: tl.constexpr):
    """Let the next kernel's blocks start as soon as there is room, and wait until the kernels before are over."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Bring lines of 128 bytes into the second-level cache, without waiting. pointers: [n], one in each line."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(
        asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
