"""Estimate the time of one kernel on a GPU: int4 and int8 products and attention, by their plans.

A kernel's thread blocks run side by side in waves, as many on a multiprocessor as registers and
shared memory allow. They share DRAM, L2, and each multiprocessor's port to L2, issue slots and
tensor cores (`fluid`). A block of few warps has a pace of its own, which an idle neighbour does not
raise. All numbers are in `GPUS` and `Constants`, hopeful estimates for an H100 unless a line says
otherwise, and in `DOUBTS`; nothing was measured.
Source, called study: a reading of the CUDA code emitted at commit c495e77; launches counted, times
estimated. Not here: the launches of a cycle (time_model.py), fp32, prefill, experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from command_line import fail
from extras.stand_in import Shape
from model import ModelConfig

try:
    from ops.cuda.attention import CHUNK, SPLITS, plan_attention, splits_of
except ModuleNotFoundError:
    fail(
        "time_model.py",
        "the plans of the kernels need Triton, which is not installed; pip install triton",
    )
from ops.cuda.quantized import Device, plan_product, shared_bytes

# multiprocessors and shared memory of a block
# Source: CUDA C++ programming guide, table of compute capabilities
TARGETS = {
    "80": Device(108, 163 * 1024, 80),  # A100
    "86": Device(82, 99 * 1024, 86),  # RTX 3090
    "89": Device(128, 99 * 1024, 89),  # RTX 4090
    "90": Device(132, 227 * 1024, 90),  # H100
    "100": Device(148, 227 * 1024, 100),  # B200
}


@dataclass(frozen=True)
class Constants:
    """The constants of the model: the study's estimates for an H100, but for the first five.

    They are hopeful; `DOUBTS` has values that may be found instead.
    """

    bandwidth_tb_s: float  # of DRAM, read by our kernels
    l2_tb_s: float  # from L2 to the multiprocessors
    clock_ghz: float
    tensor_tflops: float  # bf16, dense, adding in fp32
    boundary_us: float = 1.2  # between two dependent launches of a graph
    pdl_boundary_us: float = 0.4  # the same with programmatic dependent launch
    pdl_saves_us: float = 1.5  # of a product whose first weights are fetched before the wait
    latency_us: float = 0.9  # of DRAM under load, that the stages of a pipeline hide
    ramp_us: float = 1.5  # until the first bytes of a kernel of ours arrive
    epilogue_us: float = 0.7  # from its last bytes to its end
    # for an instruction of one warp, with the waits for its tensor-core products: 0.65 us for a
    # step of an int4 product
    warp_clocks: float = 3.1
    partials_tb_s: float = 2.4  # writing or reading fp32 partial sums (fitted to the study's times)
    small_us: float = 1.4  # an elementwise kernel
    norm_us: float = 2.6  # RMSNorm
    # behind a product in its own launch: the counter, the parts read again, their work
    tail_us: float = 1.6
    rms_us: float = 0.4  # adding the squares of a row and dividing by their root, in a product
    combine_us: float = 0.43  # combining a chunk of attention, without its bytes: one by one
    accept_us: float = 10.0  # and compaction
    candidates_us: float = 4.0  # the best tokens of the vocabulary's parts
    level_us: float = 8.0  # growing a level from them: one block, top-k dependent rounds
    level_rerank_us: float = 12.0  # choosing the nodes to verify
    replay_us: float = 8.0  # from one graph's end to the next one's start
    # of an all-reduce of few bytes: NCCL among 4 GPUs of a machine; kernels of one shot: 7
    collective_us: float = 12.0
    # of NVLink, each way, in a ring: two thirds of an A100's 0.3 (data sheet)
    link_tb_s: float = 0.2


# a review of the study (2026-11-23), where it takes the constants above for too hopeful
DOUBTS = {
    "pdl_boundary_us": 0.9,
    "pdl_saves_us": 0.8,
    "warp_clocks": 3.8,
    "norm_us": 3.5,
    "tail_us": 2.4,
    "rms_us": 0.8,
    "small_us": 2.0,
    "level_us": 12.0,
}


class Gpu(NamedTuple):
    """A GPU: its plan parameters, and the constants of the model."""

    device: Device
    constants: Constants

    def doubted(self) -> Gpu:
        """Return it with the constants of `DOUBTS`, and 2.7 of an H100's 3.35 TB/s."""
        c = self.constants
        return Gpu(self.device, replace(c, bandwidth_tb_s=0.9 * c.bandwidth_tb_s, **DOUBTS))


def data_sheet(device: Device, dram_tb_s: float, *rest: float) -> Gpu:
    """Make a GPU from a data sheet.

    Attainable share of DRAM's bandwidth, from the study: 3.0 of an H100's 3.35 TB/s.
    """
    return Gpu(device, Constants(3.0 / 3.35 * dram_tb_s, *rest))


# DRAM, clock, tensor cores: NVIDIA's data sheets; an H100's clock, and the L2 of H100 and H200:
# study. L2 of the A100: as large a share of its 5,120 bytes a clock; of the others: rough guesses.
GPUS = {
    "h100": data_sheet(TARGETS["90"], 3.35, 5.6, 1.70, 989),  # SXM
    "h200": data_sheet(TARGETS["90"], 4.8, 5.6, 1.70, 989),
    "a100": data_sheet(TARGETS["80"], 2.04, 4.6, 1.41, 312),  # SXM, 80 GB
    "rtx3090": data_sheet(TARGETS["86"], 0.936, 2.0, 1.70, 71),
    "rtx4090": data_sheet(TARGETS["89"], 1.008, 4.0, 2.52, 165),
}
# of a thread, by bits of a weight and tokens of a block: compiled for sm_90 (4 and 8: study)
REGISTERS = {
    4: {16: 77, 32: 128, 64: 168},
    8: {16: 77, 32: 128, 64: 168},
    16: {16: 48, 32: 58, 64: 75},
}
# for a weight, likewise
INSTRUCTIONS = {
    4: {16: 2.8, 32: 2.95, 64: 3.13},
    8: {16: 3.5, 32: 3.7, 64: 4.0},
    16: {16: 2.5, 32: 2.5, 64: 2.6},
}


@cache
def fluid(
    steps: tuple[int, ...], dram: int, read: int, alone_us: float, fit: int, pace: float, gpu: Gpu
) -> float:
    """Return the microseconds of a kernel.

    steps: of every thread block, in the order of launch
    dram, read: bytes of a step, from DRAM and in all
    alone_us: a step's time when alone on a multiprocessor
    fit: blocks on a multiprocessor at a time
    pace: steps of a block in a microsecond, however idle the GPU is
    """
    c = gpu.constants
    queue = list(reversed(steps))
    active = []  # [multiprocessor, steps left] of every running block
    load = [0] * gpu.device.processors  # running blocks of every multiprocessor
    time = c.ramp_us
    while queue or active:
        while queue and min(load) < fit:
            place = load.index(min(load))
            active.append([place, queue.pop()])
            load[place] += 1
        rates = [min(1 / (alone_us * load[place]), pace) for place, _ in active]
        wanted = sum(rates) / 1e6  # steps a second / 1e12
        share = min(1.0, c.bandwidth_tb_s / (wanted * dram), c.l2_tb_s / (wanted * read))
        passed = min(left / (rate * share) for (_, left), rate in zip(active, rates, strict=True))
        time += passed
        for block, rate in zip(active, rates, strict=True):
            block[1] -= rate * share * passed
            load[block[0]] -= block[1] <= 1e-6
        active = [block for block in active if block[1] > 1e-6]
    return time + c.epilogue_us


def product_us(
    rows: int, N: int, K: int, bits: int, gpu: Gpu, epilogue: str = "none"
) -> tuple[float, int]:
    """Estimate an int4 (groups of 128), int8 or bf16 product, without the sum of its splits.

    epilogue: of the result, see `ops.cuda.quantized.run_product`
    Returns: microseconds, splits.
    """
    device, c = gpu
    step = 16 // bits * 64  # inputs
    group = 128 if bits == 4 else 0
    plan = plan_product(rows, N, K, bits, group, torch.bfloat16, device, epilogue)
    words = plan.rows * 64 * 2  # bytes
    if bits == 4:
        words += plan.rows * step // 64  # scales
    x = step * min(rows, plan.tokens) * 2  # bytes; rows beyond the last are not read
    port_clocks = (words + x) / 64  # 64 bytes a clock
    issue_clocks = INSTRUCTIONS[bits][plan.tokens] * plan.rows * step / 128  # 4 warps
    clocks = max(port_clocks, issue_clocks)
    tensor_us = 2 * plan.tokens * plan.rows * step * device.processors / c.tensor_tflops / 1e6
    alone_us = max(clocks / c.clock_ghz / 1e3, tensor_us)
    shared = shared_bytes(plan.tokens, plan.rows, plan.stages, bits, device) + 1024
    registers = REGISTERS[bits][plan.tokens] * plan.warps * 32
    fit = max(1, min(65536 // registers, device.shared_bytes // shared))
    blocks = math.ceil(K / step)
    tiles = math.ceil(N / plan.rows) * math.ceil(rows / plan.tokens)
    steps = []
    for i in range(plan.splits):
        steps += [(i + 1) * blocks // plan.splits - i * blocks // plan.splits] * tiles
    # of one warp, for a step
    instructions = INSTRUCTIONS[bits][plan.tokens] * plan.rows * step / 32 / plan.warps
    own_us = instructions * c.warp_clocks / c.clock_ghz / 1e3
    pace = min(1 / own_us, (plan.stages - 1) / c.latency_us)
    us = fluid(tuple(steps), words, words + x, alone_us, fit, pace, gpu)
    return us, plan.splits


def attention_us(rows: int, slots: int, shape: Shape | ModelConfig, gpu: Gpu) -> tuple[float, int]:
    """Estimate attention of `rows` tokens over `slots` and themselves, without its partial sums.

    In bf16. Returns: microseconds, chunks in use.
    """
    device, c = gpu
    end = slots + rows
    group = shape.n_heads // shape.n_kv_heads
    plan = plan_attention(rows * group, shape.head_dim, torch.bfloat16, device)
    chunk = CHUNK
    while slots >= chunk * SPLITS:
        chunk *= 2
    if splits_of(rows, end, rows) <= 1:
        chunk = end
    chunks = [math.ceil(min(chunk, end - first) / plan.keys) for first in range(0, end, chunk)]
    tiles = math.ceil(rows * group / plan.rows) * shape.n_kv_heads
    steps = []
    for count in chunks:
        steps += [count] * tiles
    stage = plan.keys * shape.head_dim * 4  # bytes
    fit = max(1, device.shared_bytes // (2 * plan.rows * shape.head_dim + 3 * stage + 1024))
    alone_us = stage / 64 / c.clock_ghz / 1e3
    us = fluid(tuple(steps), stage, stage, alone_us, fit, (plan.stages - 1) / c.latency_us, gpu)
    return us, len(chunks)
