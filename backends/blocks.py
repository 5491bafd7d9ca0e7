"""Weights that stay in a GGUF file's own blocks: nothing is widened, nothing rounded again.

A block holds 32 or 256 weights of one output: codes of 2 to 8 bits, scales and, for some types,
minima. `Blocks.pack` lays the blocks of a weight out in strips (backends/cpp/blocks.cpp) in one
pass over the mapped file. Codes of 2 and 3 bits take 4. The parts of a layer, as query, key and
value, may be of different types.

Trade-off: activations are rounded, in blocks of 32 or 128, to 8 bits as in llama.cpp, outliers to
15 or 13. On CUDA, where they are not, block_planes.py lays the blocks out.
Not here: several ranks, machines without a C++ compiler or Triton. There, blocks are widened
(files/gguf.py). The files are read in files/, which asks for this module (files/machine.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.library import has_cpu_operators, has_triton
from backends.strips import GGUF_TYPES, part_bytes, table_of
from backends.weight import Embedding as Embedding
from backends.weight import Part, Weight
from options import load_part
from quantize import stack

NAMES = GGUF_TYPES


def can_stay(device: str) -> bool:
    """Return whether a device has matmuls here that read blocks. Builds the C++ operators."""
    if in_planes(device):
        return device.startswith("cuda") and has_triton()
    return has_cpu_operators()


def kept_types(device: str, every_type: bool) -> Collection[str]:
    """Return the types whose blocks can stay on a device; every_type: not only by default"""
    if not in_planes(device):
        return GGUF_TYPES.values()
    return _planes().kept_types(every_type)


def in_planes(device: str) -> bool:
    """Return whether a device's matmuls read planes (block_planes.py)."""
    return device != "cpu"


def _planes() -> Any:
    """Return the module of CUDA's layouts."""
    return load_part("machine", "block planes")


class Blocks(NamedTuple):
    """A weight of a file, in its blocks."""

    name: str  # in the file
    content: Tensor  # [N, bytes of a row] uint8, mapped
    type_id: int  # of GGUF
    inputs: int  # K
    order: Tensor | None = None  # [N] int64, the row in the file of each output; None: the same

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return len(self.content), self.inputs

    @property
    def part(self) -> Part:
        """The outputs and the layout of the packed weight."""
        return Part(NAMES[self.type_id], len(self.content))

    def bytes(self, device: str) -> int:
        """Return the size of the packed weight on a device."""
        if not in_planes(device):
            return part_bytes(self.part, self.inputs)
        return _planes().size(NAMES[self.type_id], len(self.content), self.inputs)

    def pack(self, out: Tensor, path: Path) -> None:
        """Lay the blocks out in strips.

        Raises: ValueError for a scale that is NaN or infinite.
        Writes: out, [bytes] uint8.
        """
        if not torch.ops.gpt_eagle.pack_blocks(self.content, self.type_id, self.order, out):
            raise ValueError(bad_scale(self.name, path))


class Numbers(NamedTuple):
    """A weight of a file that is in no blocks, beside others of its layer that are."""

    values: Tensor  # [N, K]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return tuple(self.values.shape)

    @property
    def part(self) -> Part:
        """The outputs and the layout of the packed weight."""
        return Part("BF16", len(self.values))

    def pack(self, out: Tensor, path: Path) -> None:
        """Round the numbers to bfloat16. Writes: out, [bytes] uint8."""
        rows = out[: 2 * self.values.numel()].view(torch.bfloat16)
        rows.view(self.values.shape).copy_(self.values)


def bad_scale(name: str, path: Path) -> str:
    """Return the line about a scale that is no number. name: of the weight in the file"""
    return f"{path}: {name} has a scale that is NaN or infinite; download it again"


def packed(
    experts: Sequence[Sequence[Blocks | Numbers]],
    is_stack: bool,
    device: str,
    pages: Any,
    path: Path,
) -> Weight:
    """Pack a weight that stays in the file's blocks.

    experts: of each the parts, one below the other, of equal types
    is_stack: False: there is one
    pages: of huge pages, or None
    Raises: ValueError for a scale that is NaN or infinite.
    """
    inputs = experts[0][0].shape[1]
    if in_planes(device):
        weights = (_planes().joined(own, device, path) for own in experts)
        return stack(weights, len(experts)) if is_stack else next(weights)
    parts = tuple(source.part for source in experts[0])
    sizes = [part_bytes(part, inputs) for part in parts]
    shape = torch.Size((len(experts), sum(sizes)))
    data = pages.empty(shape, torch.uint8) if pages else torch.empty(shape, dtype=torch.uint8)
    for own, bytes in zip(experts, data):
        for source, out in zip(own, bytes.split(sizes)):
            source.pack(out, path)
    table = table_of(parts, inputs, sizes)
    if is_stack:
        return Weight(data, parts, inputs, table, experts=len(experts))
    return Weight(data[0], parts, inputs, table)
