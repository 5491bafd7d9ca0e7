"""The int4 matmul of decoding in CUDA C++ (int4.cu): its weights, its plan and its launch.

1. `pack_fragments` lays out codes and scales once, as the registers of `mma.m16n8k16` take them.
2. `plan_int4` chooses how x and the rings of weights share a multiprocessor's memory. A row's bits
   depend neither on the plan nor on the other rows.
3. A kernel is compiled for its device and options by NVRTC at its first call (nvrtc.py), kept on
   the disk, and launched so that it begins before the kernel in front has ended (driver.py).

It has never run on a device: `GPT_EAGLE_INT4=cuda` asks for it, and Triton's (qmatmul.py) is the
default.
Not here: experts, biases, rows in other types than bfloat16, layers of odd sizes (`takes`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.triton.driver import Kernel
from backends.triton.launch import Device, device_of
from backends.triton.nvrtc import cubin_of
from options import log_note

# as in int4.cu
WARPS = 16
OUTPUTS = 32  # of a block at a time
INPUTS = 128  # of a chunk
PAD = 64  # bytes between rows of x in shared memory
HEIGHTS = (8, 16, 32)  # rows of x, at most
EPILOGUES = ("none", "fp32", "swiglu")
MOST_STAGES = 3  # of a prototype twice as many were slower (benchmarks/results/2026-11-28-h200)
RESERVED = 1024  # bytes of shared memory that CUDA keeps for each block
OLDEST = 80  # capability: `cp.async` and `mma` in bfloat16
DEPENDENT = 90  # capability: dependent launch

FRAGMENT = (0, 2, 1, 3)  # the order in memory of a lane's four neighbours in K
# bytes of 16 outputs and a group: (group, whether there are zero points)
UNITS = {
    8 * group + 32 * (1 + zeros): (group, zeros) for group in (32, 64, 128) for zeros in (0, 1)
}


# ---------------------------------------------------------------------------------------- weights


def pack_fragments(codes: Tensor, scale: Tensor) -> Tensor:
    """Lay out int4 weights for `multiply`.

    A unit is 16 outputs by a group of K: its codes, 32 of K after 32 of K, then its scales. Lane
    4 g + t of a warp has 8 bytes of each 32, for k = 8 t .. 8 t + 7, the first four first, in the
    order `FRAGMENT`; a byte has the code of output g below that of output g + 8. Scales of outputs
    g and g + 8 are neighbours.

    codes: [N, K] int8, -8..7, of sizes that the kernel `takes`
    scale: [N, K/G] bfloat16, or int32 from `backends.weight.join_zeros`; G: 32, 64 or 128
    Returns: [N / 16, K / G, bytes] uint8, of a size in `UNITS`.
    """
    N, K = codes.shape
    groups = scale.shape[1]
    fields = (codes + 8).to(torch.uint8).view(N // 16, 2, 8, K // 32, 4, 2, 4)
    pairs = fields[:, 0] | fields[:, 1] << 4  # [tiles, g, K / 32, t, half, 4]
    lanes = pairs[..., list(FRAGMENT)].transpose(1, 2)  # [tiles, K / 32, g, t, half, 4]
    by_group = scale.view(N // 16, 2, 8, groups).permute(0, 3, 2, 1)  # [tiles, groups, g, 2]
    scales = by_group.contiguous().view(torch.uint8)
    return torch.cat((lanes.reshape(N // 16, groups, -1), scales.flatten(2)), -1)


def unpack_fragments(units: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `pack_fragments`. Returns: codes and scales."""
    tiles, groups, unit = units.shape
    group, zeros = UNITS[unit]
    lanes = units[..., : 8 * group].reshape(tiles, -1, 8, 4, 2, 4)
    pairs = lanes.transpose(1, 2)[..., list(FRAGMENT)]  # which is its own inverse
    fields = torch.stack((pairs & 15, pairs >> 4), 1)  # [tiles, 2, g, K / 32, t, half, 4]
    codes = (fields.to(torch.int8) - 8).reshape(16 * tiles, groups * group)
    words = units[..., 8 * group :].contiguous().view(torch.int32 if zeros else torch.bfloat16)
    scale = words.view(tiles, groups, 8, 2).permute(0, 3, 2, 1)
    return codes, scale.reshape(16 * tiles, groups)


# ------------------------------------------------------------------------------------------- plan


class Int4Plan(NamedTuple):
    """How a block works; none of it changes a result's bits."""

    rows: int  # of x, at most: of `HEIGHTS`
    blocks: int  # that share a multiprocessor
    stages: int  # of each warp's ring
    resident: bool  # x lies in shared memory
    shared_bytes: int


# the first that fits is taken: most rows, blocks, whether x is resident, stages at least
WAYS = ((8, 2, True, 2), (16, 1, True, 2), (32, 1, False, 1))


@cache
def plan_int4(M: int, K: int, unit: int, device: Device) -> Int4Plan | None:
    """Choose the plan for M rows, or for the first ones of them where that many do not fit.

    Up to 8 rows, two blocks share a multiprocessor where they can: the next kernel's block reads
    its weights while this one's works. x stays in shared memory if that leaves two stages, so that
    it is read once.

    unit: bytes, of `UNITS`
    Returns: None where a device has too little memory.
    """
    wanted = next((height for height in HEIGHTS if height >= M), HEIGHTS[-1])
    stage_bytes = WARPS * OUTPUTS // 16 * INPUTS // UNITS[unit][0] * unit
    for height in reversed(HEIGHTS[: HEIGHTS.index(wanted) + 1]):
        rows = min(M, height)
        for most, blocks, resident, least in WAYS:
            if height > most or (blocks > 1 and device.capability < DEPENDENT):
                continue
            used_bytes = 4 * (WARPS * OUTPUTS * rows + height)  # of sums
            used_bytes += rows * (2 * K + PAD) - PAD if resident else 0
            room_bytes = (device.shared_bytes + RESERVED) // blocks - RESERVED
            stages = min((room_bytes - used_bytes) // stage_bytes, MOST_STAGES)
            if stages >= least:
                shared_bytes = used_bytes + stages * stage_bytes
                return Int4Plan(height, blocks, stages, resident, shared_bytes)
    return None


# ----------------------------------------------------------------------------------------- launch


def options_of(plan: Int4Plan, unit: int, epilogue: str) -> tuple[str, ...]:
    """Return the compiler's options for a kernel."""
    group, zeros = UNITS[unit]
    constants = {
        "ROWS": plan.rows,
        "GROUP": group,
        "ZEROS": zeros,
        "BLOCKS": plan.blocks,
        "STAGES": plan.stages,
        "RESIDENT": int(plan.resident),
        "EPILOGUE": EPILOGUES.index(epilogue),
    }
    return tuple(f"-D{name}={value}" for name, value in constants.items())


@cache
def _kernel(index: int, options: tuple[str, ...]) -> Kernel:
    """Load a kernel on a device. Raises: RuntimeError where it cannot be compiled."""
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    cubin = cubin_of(source, str(device_of(index).capability), options)
    with torch.cuda.device(index):
        return Kernel(cubin, "int4_matmul")


@cache
def runs_on(index: int) -> bool:
    """Return whether a device runs the kernel; print once the reason if it does not."""
    device = device_of(index)
    if device.capability < OLDEST:
        return _leave_to_triton(f"{device.name} has no matmul in bfloat16")
    unit = min(UNITS)
    try:
        _kernel(index, options_of(plan_int4(1, INPUTS, unit, device), unit, "none"))
    except (RuntimeError, OSError) as error:
        return _leave_to_triton(str(error))
    return True


def takes(N: int, K: int, index: int) -> bool:
    """Return whether a device's kernel takes a layer of N outputs and K inputs.

    It prints once why some layers, or all of them, are left to Triton's kernels.
    """
    if N % OUTPUTS or K % INPUTS:
        rule = f"{OUTPUTS} divides the outputs of a layer, and {INPUTS} its inputs"
        return _leave_to_triton(f"it takes layers only if {rule}")
    return runs_on(index)


@cache
def _leave_to_triton(reason: str) -> bool:
    """Print a reason once. Returns: False."""
    log_note(f"int4 in CUDA C++: {reason}; Triton's kernels multiply by the rest")
    return False


def is_fragments(packed: Tensor) -> bool:
    """Return whether a weight is from `pack_fragments`."""
    return packed.dtype == torch.uint8


def outputs_of(units: Tensor) -> int:
    """Return N."""
    return 16 * len(units)


def like(x: Tensor, units: Tensor, epilogue: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the type of a result."""
    width = outputs_of(units) // (2 if epilogue == "swiglu" else 1)
    return (*x.shape[:-1], width), torch.float32 if epilogue == "fp32" else x.dtype


def multiply(
    x: Tensor, units: Tensor, epilogue: str = "none", squares: Tensor | None = None
) -> Tensor:
    """Compute `backends.planes.w4a16_fragments`; a launch for as many rows as a block takes.

    Allocates its result, and nothing else; never waits.
    epilogue, squares: as for `backends.triton.qmatmul.run_product`
    Raises: ValueError for rows in another type than bfloat16.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"GPT_EAGLE_INT4=cuda multiplies rows in bfloat16; these are in {x.dtype}: use "
            "--dtype bfloat16, or unset it"
        )
    index = x.device.index
    device = device_of(index)
    K = x.shape[-1]
    N = outputs_of(units)
    shape, dtype = like(x, units, epilogue)
    y = torch.empty(*shape, dtype=dtype, device=x.device)
    rows = x.contiguous().view(-1, K)
    results = y.view(-1, shape[-1])
    first = 0
    with torch.cuda.device(index):
        while first < len(rows):
            plan = plan_int4(len(rows) - first, K, units.shape[2], device)
            some = slice(first, first + plan.rows)
            M = len(rows[some])
            _kernel(index, options_of(plan, units.shape[2], epilogue)).launch(
                min(N // OUTPUTS, device.processors),
                32 * WARPS,
                rows[some],
                units,
                None if squares is None else squares[:, some].contiguous(),
                results[some],
                M,
                N,
                K,
                shared_bytes=plan.shared_bytes,
                dependent=device.capability >= DEPENDENT,
            )
            first += M
    return y


def multiply_plainly(
    x: Tensor, units: Tensor, epilogue: str = "none", squares: Tensor | None = None
) -> Tensor:
    """Compute `multiply` plainly, with the weights in fp32."""
    codes, scale = unpack_fragments(units)
    groups = codes.float().unflatten(1, (scale.shape[1], -1))
    if scale.dtype == torch.int32:  # with zero points
        groups = groups + 8 - (scale & 31)[..., None]
        scale = (scale & ~31).view(torch.float32)
    y = x.float() @ (groups * scale.float()[..., None]).flatten(1).T
    if squares is not None:
        y = y * (squares.sum(0) / x.shape[-1]).rsqrt().view(*x.shape[:-1], 1)
    if epilogue == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if epilogue == "fp32" else y.to(x.dtype)
