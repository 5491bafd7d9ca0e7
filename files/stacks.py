"""The experts of a layer in one tensor, as numbers or in MXFP4 (gpt-oss).

1. `name_experts` gives every expert's matrices the names that other mixtures have. The rows of
   gate and up take turns in a stack; numbers are stored as inputs by outputs, blocks the other way.
2. A weight in MXFP4 is two tensors: blocks of 32 codes of 4 bits, and a power of two for each. It
   may stay in its bits, in the order of GGUF's type of that name, so that the layers of
   backends/blocks.py take it. Otherwise it becomes numbers when it is read.

Source: MX formats (OCP Microscaling Formats 1.0); transformers' integrations/mxfp4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from files.checkpoint import InBlocks
from files.fields import NotSupported
from files.machine import blocks, cpu_operators_are_loaded
from files.renames import Readers

MXFP4 = 39  # of GGUF's types
STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")
# a stack -> the matrices of an expert whose rows take turns in it
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
DIMS = {"": 3, "_bias": 2, "_blocks": 4}  # of a stack, by the end of its name
GROUP = 32  # weights of a block
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of codes 0 to 7; 8 to 15 are the same, negative


class Mxfp4(NamedTuple):
    """A weight in MXFP4, in the two tensors of a directory."""

    name: str  # of the codes
    codes: Tensor  # [N, K / 32, 16] uint8, codes 2 i and 2 i + 1 of a block in a byte
    powers: Tensor  # [N, K / 32] uint8

    @property
    def inputs(self) -> int:
        """K."""
        return GROUP * self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return len(self.codes), self.inputs

    @property
    def part(self) -> Any:
        """The outputs and the layout of the packed weight."""
        return blocks().Part("MXFP4", len(self.codes))

    def bytes(self, device: str) -> int:
        """Return the size of the packed weight. device: a CPU, as CUDA has no matmul for it"""
        return blocks().part_bytes(self.part, self.inputs)

    def content(self) -> Tensor:
        """Return the weight in GGUF's order: a power of two, then codes i and i + 16 in a byte.

        Returns: [N, bytes of a row] uint8.
        """
        halves = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(2)  # [N, K / 32, 32]
        low, high = halves.split(GROUP // 2, -1)
        return torch.cat((self.powers[..., None], low | high << 4), -1).flatten(1)

    def as_blocks(self) -> Any:
        """Return the weight as a `backends.blocks.Blocks`."""
        return blocks().Blocks(self.name, self.content(), MXFP4, self.inputs)

    def pack(self, out: Tensor, path: Path) -> None:
        """Lay the blocks out in strips. Raises, writes: as `Blocks.pack`."""
        self.as_blocks().pack(out, path)


def name_experts(readers: Readers) -> Readers:
    """Name each matrix of each expert, where a file holds those of all experts in one tensor.

    Raises: ValueError for a stack of another shape or type.
    """
    named: Readers = {}
    for name, read in readers.items():
        stack = STACK.fullmatch(name)
        if stack is None:
            named[name] = read
        elif stack[3] != "_scales":  # which are read with their blocks
            named |= _of_experts(readers, name, *stack.groups())
    return named


def _of_experts(
    readers: Readers, name: str, begin: str, matrices: str, part: str
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield the names of the experts' tensors in one, each with its reader."""
    read = readers[name]
    held = read()
    if held.dim() != DIMS[part]:
        raise NotSupported(
            f"{name} has the shape {list(held.shape)}; a stack of experts has {DIMS[part]} "
            "dimensions"
        )
    scales = _scales(readers, name, held) if part == "_blocks" else None
    names = MATRICES[matrices]
    for expert in range(len(held)):
        for turn, matrix in enumerate(names):
            rows = slice(turn, None, len(names))
            weight = f"{begin}.{expert}.{matrix}.weight"
            if part == "_bias":
                yield f"{begin}.{expert}.{matrix}.bias", partial(_rows, read, expert, rows)
            elif scales:
                taken = partial(_mxfp4, name, read, scales, expert, rows)
                yield weight, InBlocks("MXFP4", partial(_numbers, taken), taken)
            else:
                yield weight, partial(_columns, read, expert, rows)


def _scales(readers: Readers, name: str, codes: Tensor) -> Callable[[], Tensor]:
    """Return the reader of the powers of two. codes: as the file holds them

    Raises: ValueError for blocks or scales of another shape or type.
    """
    scales = name.removesuffix("_blocks") + "_scales"
    if scales not in readers:
        raise NotSupported(f"the weight {scales} is missing")
    powers = readers[scales]()
    fits = codes.shape[3:] == (GROUP // 2,) and powers.shape == codes.shape[:3]
    if not fits or {codes.dtype, powers.dtype} != {torch.uint8}:
        raise NotSupported(
            f"{name} and its scales are no MXFP4: {codes.dtype} {list(codes.shape)} and "
            f"{powers.dtype} {list(powers.shape)}"
        )
    return readers[scales]


def _columns(read: Callable[[], Tensor], expert: int, rows: slice) -> Tensor:  # -> [N, K]
    return read()[expert, :, rows].T


def _rows(read: Callable[[], Tensor], expert: int, rows: slice) -> Tensor:
    return read()[expert, rows]


def _mxfp4(
    name: str,
    codes: Callable[[], Tensor],
    scales: Callable[[], Tensor],
    expert: int,
    rows: slice,
) -> Mxfp4:
    return Mxfp4(name, codes()[expert, rows], scales()[expert, rows])


def _numbers(taken: Callable[[], Mxfp4], dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers of a weight, [N, K] fp32. Raises: ValueError for a power of 255."""
    weight = taken()
    content = weight.content()
    each = content.unflatten(1, (-1, 1 + GROUP // 2))  # [N, K / 32, 17]
    if (each[..., 0] == 255).any():
        raise ValueError(f"{weight.name} has a scale that is NaN or infinite; download it again")
    if cpu_operators_are_loaded():
        value = torch.empty(weight.shape)
        torch.ops.gpt_eagle.widen_blocks(content.flatten(), MXFP4, value)
        return value
    return decode(each)


def decode(blocks: Tensor) -> Tensor:
    """Return the numbers of blocks in MXFP4, [N, K] fp32, plainly. blocks: [N, K / 32, 17] uint8"""
    power = blocks[..., :1].int()
    scale = torch.where(power == 0, 1 << 22, power << 23).view(torch.float32)  # 2 ** (power - 127)
    values = torch.tensor(VALUES)
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).int()
    return (torch.cat((values, -values))[codes] * scale).flatten(1)
