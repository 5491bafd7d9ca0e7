"""Weights that stay in a GGUF file's own blocks: nothing is widened, nothing rounded again.

A block holds 32 or 256 weights of one output: codes of 2 to 8 bits, scales and, for some types,
minima. `Blocks.pack` lays the blocks of a weight out in strips (ops/cpu/blocks.cpp) in one pass
over the mapped file. Codes of 2 and 3 bits take 4. The parts of a layer, as query, key and value,
may be of different types.

Trade-off: activations are rounded, in blocks of 32 or 128, to 8 bits as in llama.cpp, outliers
to 15 or 13.
Not here: several ranks, machines without a C++ compiler. There, blocks are widened (hf/gguf.py),
and on CUDA too, but for Q4_0, which int4 holds exactly (`int4_codes`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from base.io import is_gguf
from base.rank import this_rank
from hf.checkpoint import Codes, is_mxfp4, read_model_config
from ops.library import has_cpu_operators
from ops.weight import LAYOUTS, Part
from options import GenerateConfig

NAMES = {layout.id: name for name, layout in LAYOUTS.items() if layout.format == "blocks"}
Q4_0 = 2  # of GGUF
Q4_0_BYTES = 18  # of a block
MXFP4 = 39  # of GGUF


def keeps_blocks(config: GenerateConfig, path: Path) -> bool:
    """Return whether a checkpoint's weights stay in the file's own blocks, or their codes on CUDA.

    config: `dtype` as the user gave it
    Returns: True for a GGUF file or a directory in MXFP4 on one device, unless dtype is given.
    """
    as_stored = not config.dtype and not config.inflate and _has_blocks(path)
    if not as_stored or this_rank().world_size > 1:
        return False
    on_cpu = config.device == "cpu" and has_cpu_operators("products")
    return on_cpu or config.device.startswith("cuda")


def _has_blocks(path: Path) -> bool:
    """Return whether a checkpoint is one whose weights may be in blocks."""
    if is_gguf(path):
        return True
    return (path / "config.json").is_file() and is_mxfp4(read_model_config(path))


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

    def pack(self, out: Tensor, path: Path) -> None:
        """Lay the blocks out in strips.

        Raises: ValueError for a scale that is NaN or infinite.
        Writes: out, [bytes] uint8.
        """
        if not torch.ops.gpt_eagle.pack_blocks(self.content, self.type_id, self.order, out):
            raise ValueError(bad_scale(self, path))


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


def int4_codes(blocks: Blocks, path: Path) -> Codes:
    """Return the codes and scales of a weight in Q4_0, which int4 holds exactly.

    Raises: ValueError for a scale that is NaN or infinite.
    """
    assert blocks.type_id == Q4_0, blocks.type_id
    content = blocks.content
    if blocks.order is not None:
        content = content[blocks.order]
    each = content.view(len(content), -1, Q4_0_BYTES)  # [N, K/32, scale and 16 bytes]
    scale = each[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if not scale.isfinite().all():
        raise ValueError(bad_scale(blocks, path))
    halves = each[..., 2:]
    codes = torch.cat((halves & 15, halves >> 4), -1).flatten(1)  # [N, K]
    return Codes(codes.sub_(8).view(torch.int8), scale)


def bad_scale(blocks: Blocks, path: Path) -> str:
    """Return the line about a scale that is no number."""
    return f"{path}: {blocks.name} has a scale that is NaN or infinite; download it again"
