"""The layouts of weights on a CPU: strips of codes, and blocks of a GGUF file, with a table.

The operator `matmul` (cpp/matmul.cpp) multiplies by them; cpp/weight_layout.h has the same table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.cpp.layout import pack_strips, unpack_strips
from backends.weight import (
    LAYOUTS,
    CodesLayout,
    Layout,
    Part,
    Weight,
    grouped_reference,
    w8a8_reference,
)


class Strips(CodesLayout):
    """Codes in strips, with scales of one type."""

    def __init__(self, name: str, format: str, id: int, scale: torch.dtype):
        """id: in cpp/weight_layout.h"""
        super().__init__(name, format)
        self.id = id
        self.scale = scale
        self.bits = 4 if format == "int4" else 8

    def pack(self, codes: Tensor, scale: Tensor) -> Weight:
        outputs, inputs = codes.shape
        group = inputs // scale.shape[1] if scale.dim() > 1 else 0
        parts = (Part(self.name, outputs, group),)
        data = pack_strips(codes, scale, self.bits)
        return Weight(data, parts, inputs, table_of(parts, inputs, [data.numel()]))

    def unpack(self, weight: Weight) -> tuple[Tensor, Tensor]:
        (part,) = weight.parts
        sizes = (part.outputs, weight.inputs, part.group)
        return unpack_strips(weight.data, *sizes, self.scale, self.bits)

    def multiply(self, rows: Tensor, weight: Weight) -> Tensor:
        codes, scale = self.unpack(weight)
        if scale.dim() == 1:
            return w8a8_reference(rows, codes, scale)
        return grouped_reference(rows, codes, scale, self.half)


class FileBlocks(Layout):
    """Blocks of a type of GGUF, or rows of bfloat16 beside such. Files alone make them."""

    def __init__(self, name: str, format: str, id: int):
        """id: in cpp/weight_layout.h, and of GGUF's types in a file"""
        super().__init__(name, format)
        self.id = id

    def numbers(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return self.rows(weight, torch.arange(weight.outputs), dtype)

    def take(self, weight: Weight, ids: Tensor) -> Tensor:  # as the layout cannot be written
        return self.rows(weight, ids, torch.bfloat16)

    def rows(self, weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Read rows as numbers: [R] int64 -> [R, K] of `dtype`."""
        out = torch.empty(len(ids), weight.inputs, dtype=dtype)
        torch.ops.gpt_eagle.read_rows(weight.data, weight.table, ids, out)
        return out


STRIPS = (
    Strips("INT4", "int4", 100, torch.bfloat16),
    Strips("INT4_WORDS", "int4", 101, torch.int32),
    Strips("INT8", "int8", 102, torch.bfloat16),
    Strips("INT8_WORDS", "int8", 103, torch.int32),
    Strips("INT8_OUTPUT", "int8", 104, torch.float32),
)
GGUF_TYPES = {  # by their numbers in a file
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 39: "MXFP4",
}  # fmt: skip
BLOCKS = [FileBlocks(name, "blocks", id) for id, name in GGUF_TYPES.items()]
NUMBERS = FileBlocks("BF16", "none", 30)  # rows beside other parts
LAYOUTS.update({layout.name: layout for layout in (*STRIPS, *BLOCKS, NUMBERS)})


def pack_on_cpu(codes: Tensor, scale: Tensor, format: str) -> Weight:
    """Lay out codes of a format as their layout by the type of their scales has them."""
    found = [each for each in STRIPS if (each.format, each.scale) == (format, scale.dtype)]
    if not found:
        raise ValueError(
            f"the format {format} has no layout for scales in {scale.dtype} on a CPU; add a row to "
            "STRIPS (backends/strips.py), or use another --device"
        )
    return found[0].pack(codes, scale)


def part_bytes(part: Part, inputs: int) -> int:
    """Return the size of a part's strips, or rows of bfloat16, where the operators are loaded."""
    id = LAYOUTS[part.layout].id
    return torch.ops.gpt_eagle.weight_bytes(id, part.outputs, inputs, part.group)


def table_of(parts: Sequence[Part], inputs: int, sizes: Sequence[int]) -> Tensor:
    """Return the table of a weight in strips, [3 + 4 parts] int64 (cpu/weight_layout.h).

    sizes: of each part (bytes)
    """
    rows = []
    first = 0
    for part, size in zip(parts, sizes):
        rows += [LAYOUTS[part.layout].id, part.outputs, part.group, first]
        first += size
    return torch.tensor([sum(part.outputs for part in parts), inputs, first, *rows], device="cpu")
