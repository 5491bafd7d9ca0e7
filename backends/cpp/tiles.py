"""The check of AMX tiles (amx.h), where a processor has them: `build.choose_tiles` asks for it.

A few matmuls on the hardware must equal those on the emulation, the plain reference, bit for bit. A
forked child compares them, as a virtual machine may show tiles and end a program at their first
instruction.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from backends.cpp.layout import pack_strips

INPUTS = 512  # of the matmuls in integers
INT4 = 100  # the ids of layouts in weight_layout.h
INT8_OUTPUT = 104
LIMIT_S = 10  # of the child, which takes milliseconds; a lock that it inherited may stop it


def fault_of_hardware() -> str:
    """Compare matmuls on the hardware, which is allowed, with the emulation, in a forked child.

    Returns: the reason for which the hardware may not be used; the empty string if there is none.
    """
    operands = _operands()
    ends: tuple[int, ...] = ()
    try:
        ends = reader, writer = os.pipe()
        pid = os.fork()
    except OSError as error:
        for end in ends:
            os.close(end)
        return f"they cannot be checked ({error.strerror})"
    if not pid:
        try:
            signal.signal(signal.SIGILL, signal.SIG_DFL)  # without a report by faulthandler
            got, want = matmuls("hardware", operands), matmuls("emulation", operands)
            equal = all(map(torch.equal, got, want))
            os.write(writer, b"=" if equal else b"!")
        finally:
            os._exit(0)
    os.close(writer)
    answers = select.poll()
    answers.register(reader, select.POLLIN)
    answer = b""
    if answers.poll(LIMIT_S * 1000):
        answer = os.read(reader, 1)
    os.close(reader)
    with suppress(ProcessLookupError, ChildProcessError):  # where the program ignores SIGCHLD
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    faults = {b"=": "", b"!": "their results are not those of the emulation"}
    return faults.get(answer, "a process that used them died or hung")


class Operands(NamedTuple):
    """Rows, and weights of 40 outputs in every family of formats."""

    x: Tensor  # [48, 529] bfloat16; those of integers read the first INPUTS columns
    weight: Tensor  # [40, 529] bfloat16
    # packed, with their tables: int4 in groups of 32 and of 128, int8, Q4_K and Q6_K
    strips: list[tuple[Tensor, Tensor]]


class KType(NamedTuple):
    """A type of GGUF with integer scales, as weight_layout.h lays out 256 weights of 32 outputs."""

    number: int
    halves: int  # bytes of float16 numbers, at the begin of the header
    scales: int  # bytes of integer scales behind them
    signed: bool


Q4_K = KType(number=12, halves=128, scales=512, signed=False)  # scales of 6 bits and minima
Q6_K = KType(number=14, halves=64, scales=512, signed=True)


def _k_weight(kind: KType, n: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make packed blocks of random codes and scales. Returns: them, and their table."""
    blocks = partial(torch.ops.gpt_eagle.weight_bytes, kind.number, group=0)
    size = blocks(n=32, k=256)
    random = partial(torch.randint, dtype=torch.uint8, device="cpu", generator=generator)
    packed = random(256, (blocks(n=n, k=k) // size, size))
    codes = kind.halves + kind.scales  # where they begin
    if not kind.signed:
        packed[:, kind.halves : codes] &= 63
    numbers = torch.rand(len(packed), kind.halves // 2, generator=generator, device="cpu")
    packed[:, : kind.halves] = (numbers / 64).half().view(torch.uint8)
    return packed.flatten(), table(packed, n, k, kind.number)


def table(packed: Tensor, n: int, k: int, layout: int, group: int = 0) -> Tensor:
    """Return the table of a weight of one part (weight_layout.h)."""
    return torch.tensor([n, k, packed.numel(), layout, n, group, 0], device="cpu")


def _operands() -> Operands:
    """Make operands of 48 rows, which are three whole tiles, and of more outputs than a strip has.

    k of integers holds groups of all sizes; that of bf16 leaves a part of a step behind a panel.
    No tensor is so large that PyTorch would wake its threads.
    """
    generator = torch.Generator().manual_seed(0)
    # explicit, since a caller may have other defaults: "meta" while it builds a model
    normal = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    n, k, k_bf16 = 40, INPUTS, 529
    x = normal(48, k_bf16)
    weight = normal(n, k_bf16)
    codes = (50 * normal(n, k)).clamp(-128, 127).to(torch.int8)
    scales = normal(n, k // 32).bfloat16()
    strips = []
    for group in (32, 128):
        packed = pack_strips(codes >> 4, scales[:, : k // group], 4)
        strips.append((packed, table(packed, n, k, INT4, group)))
    packed = pack_strips(codes, scales[:, 0].float(), 8)
    strips.append((packed, table(packed, n, k, INT8_OUTPUT)))
    strips += [_k_weight(kind, n, k, generator) for kind in (Q4_K, Q6_K)]
    return Operands(x.bfloat16(), weight.bfloat16(), strips)


def matmuls(unit: str, of: Operands) -> list[Tensor]:
    """Multiply on a unit, in bf16 and in all families of integers. Writes: the unit in use."""
    operators = torch.ops.gpt_eagle
    operators.use_tiles(unit)
    n = len(of.weight)
    results = []
    for rows in (1, 33, 48):
        x = of.x[:rows]
        of_integers = x[:, :INPUTS].contiguous()
        results.append(operators.matmul(x, of.weight, None, None, n, True))
        for packed, table in of.strips:
            results.append(operators.matmul(of_integers, packed, table, None, n, True))
    return results
