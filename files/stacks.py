"""Directories that hold the experts of a layer in one tensor, as numbers or in MXFP4 (gpt-oss).

1. `StackedFiles` gives every expert's matrices the names that other mixtures have. The rows of
   gate and up take turns in a stack; numbers are stored as inputs by outputs, blocks the other way.
2. A weight in MXFP4 is two tensors: blocks of 32 codes of 4 bits, and a power of two for each.
   `keep_blocks` leaves it in its bits, in the order of GGUF's type of that name, so that the layers
   of backends/blocks.py take it. Otherwise it becomes numbers when it is read.

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

from files.checkpoint import STACK, TensorSource, plain_config
from files.machine import blocks, cpu_operators_are_loaded

MXFP4 = 39  # of GGUF's types
# a stack -> the matrices of an expert whose rows take turns in it
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
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


class StackedFiles(TensorSource):
    """The tensors of such a directory, with a name for every expert's."""

    def __init__(self, files: TensorSource):
        """Name the experts' tensors. Raises: ValueError for a stack of another shape."""
        self.path = files.path
        self.files = files
        self.config = plain_config(files.config)
        self.readers = {}
        self.quantized = {}
        for name, read in files.readers.items():
            stack = STACK.fullmatch(name)
            if stack is None:  # a sink is a tensor of its layer, without a module of its own
                self.readers[f"{name}.weight" if name.endswith(".sinks") else name] = read
            elif stack[3] != "_scales":  # which are read with their blocks
                self.readers |= self._of_experts(name, stack)
                if stack[3] == "_blocks":
                    self.block_types = "MXFP4"

    def keep_blocks(self) -> None:
        """Leave the weights in MXFP4 to `quantized`, as `Mxfp4`.

        Writes: readers, quantized.
        """
        for name, read in list(self.readers.items()):
            if isinstance(read, partial) and read.func == self._numbers:
                del self.readers[name]
                self.quantized[name] = partial(self._mxfp4, *read.args)

    def type_of(self, name: str) -> str:
        """Return the type of the blocks of a tensor that has a reader; "": it has none."""
        read = self.readers.get(name)
        in_blocks = isinstance(read, partial) and read.func == self._numbers
        return "MXFP4" if in_blocks else ""

    def mostly_has(self, bits: int) -> bool:
        """Return whether more than half of the weights have at most so many bits: the experts."""
        return bool(self.block_types) and bits >= 4

    def _of_experts(self, name: str, stack: re.Match) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the names of the experts' tensors in one, each with its reader."""
        begin, matrices, part = stack.groups()
        held = self.files.readers[name]()
        dims = {"": 3, "_bias": 2, "_blocks": 4}[part]
        if held.dim() != dims:
            raise ValueError(
                f"{self.path}: {name} has the shape {list(held.shape)}; a stack of experts has "
                f"{dims} dimensions; use another checkpoint"
            )
        read = {"": self._matrix, "_bias": self._bias, "_blocks": self._numbers}[part]
        leaf = "bias" if part == "_bias" else "weight"
        names = MATRICES[matrices]
        for expert in range(len(held)):
            for turn, matrix in enumerate(names):
                rows = slice(turn, None, len(names))
                yield f"{begin}.{expert}.{matrix}.{leaf}", partial(read, name, expert, rows)

    def _matrix(self, name: str, expert: int, rows: slice) -> Tensor:  # -> [N, K]
        return self.files.read(name)[expert, :, rows].T

    def _bias(self, name: str, expert: int, rows: slice) -> Tensor:  # -> [N]
        return self.files.read(name)[expert, rows]

    def _mxfp4(self, name: str, expert: int, rows: slice) -> Mxfp4:
        """Raises: ValueError for blocks or scales of another shape or type."""
        codes = self.files.read(name)
        powers = self.files.read(name.removesuffix("_blocks") + "_scales")
        fits = codes.shape[3:] == (GROUP // 2,) and powers.shape == codes.shape[:3]
        if not fits or {codes.dtype, powers.dtype} != {torch.uint8}:
            raise ValueError(
                f"{self.path}: {name} and its scales are no MXFP4: {codes.dtype} "
                f"{list(codes.shape)} and {powers.dtype} {list(powers.shape)}; download it again"
            )
        return Mxfp4(name, codes[expert, rows], powers[expert, rows])

    def _numbers(self, name: str, expert: int, rows: slice) -> Tensor:
        """Return the numbers of a weight, [N, K] fp32. Raises: as `_mxfp4`; for a power of 255."""
        weight = self._mxfp4(name, expert, rows)
        content = weight.content()
        each = content.unflatten(1, (-1, 1 + GROUP // 2))  # [N, K / 32, 17]
        if (each[..., 0] == 255).any():
            raise ValueError(
                f"{self.path}: {name} has a scale that is NaN or infinite; download it again"
            )
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
