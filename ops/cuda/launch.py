"""Programmatic dependent launch of the CUDA kernels.

Blocks of a kernel may start while the kernel before it still runs, so that their first work, such
as fetching weights into the L2 cache, costs nothing. Each block calls `after_others` before it
reads the result of another kernel and before it writes anything; all earlier kernels have finished
when the call returns. A kernel that is launched so and does not wait would let the next one start
too early.

Off before Hopper, from compute capability 12 on, where captures of such launches failed (sglang
18596), and with GPT_EAGLE_PDL=0 for comparison. Source: "programmatic dependent launch" in the CUDA
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

from ops import switches


class Device(NamedTuple):
    """The properties of a GPU on which launches depend."""

    processors: int  # streaming multiprocessors
    shared_bytes: int  # the most that one block may have; about as much as a multiprocessor has
    capability: int  # 10 * major + minor
    overlaps: bool = False  # a kernel may start before the one before it has finished
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
    overlaps = 9 <= properties.major < 12 and switches.is_on("PDL")
    return Device(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        10 * properties.major + properties.minor,
        overlaps,
        properties.name,
    )


def stop_overlaps() -> None:
    """Launch the kernels of this process without overlaps from now on."""
    os.environ["GPT_EAGLE_PDL"] = "0"
    device_of.cache_clear()


def overlap(device: Device) -> dict[str, Any]:
    """Return the options of a launch for kernels that take OVERLAPS."""
    if device.overlaps:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


def overlap_on(x: torch.Tensor) -> dict[str, Any]:
    """Return the options for the device of x; tests run kernels on a CPU."""
    return overlap(device_of(x.device.index)) if x.is_cuda else {"OVERLAPS": False}


@triton.jit
def after_others(OVERLAPS: tl.constexpr):
    """Let the next kernel's blocks start as soon as possible; wait until earlier kernels finish."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(pointers):
    """Prefetch lines of 128 bytes into the L2 cache. pointers: [n], one in each line."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(
        asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
