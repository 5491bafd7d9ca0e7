"""Layers whose weights stay in a GGUF file's own blocks: nothing is widened, nothing rounded again.

A block holds 32 or 256 weights of one output: codes of 2 to 8 bits, scales and, for some types,
minima. `pack` lays the blocks of a weight out for the product (ops/cpu/quantized.cpp) in one pass
over the mapped file. Codes of 2 and 3 bits take 4. The parts of a layer, as query, key and value,
may be of different types.

Trade-off: activations are rounded, in blocks of 32 or 128, to 8 bits as in llama.cpp, outliers
to 15 or 13.
Not here: several ranks, machines without a C++ compiler. There, blocks are widened (hf/gguf.py),
and on CUDA too, but for Q4_0, which int4 holds exactly (`int4_codes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cli.io import is_gguf
from hf.checkpoint import BLOCKS, Codes
from linear import LMHead
from ops.library import has_cpu_operators
from ops.qmatmul import PRODUCTS, numbers_of
from options import GenerateConfig
from parallel.ranks import this_rank
from quantize import QuantLinear

Q4_0 = 2  # of GGUF
Q4_0_BYTES = 18  # of a block


def keeps_blocks(config: GenerateConfig, path: Path) -> bool:
    """Check whether a checkpoint's weights stay in the file's own blocks, or their codes on CUDA.

    config: `dtype` as the user gave it
    Returns: True for a GGUF file on one device, unless dtype is given.
    """
    as_stored = is_gguf(path) and not config.dtype and not config.inflate
    if not as_stored or this_rank().world_size > 1:
        return False
    on_cpu = config.device == "cpu" and has_cpu_operators("products")
    return on_cpu or config.device.startswith("cuda")


class Blocks(NamedTuple):
    """A weight of a file, in its blocks."""

    name: str  # in the file
    content: Tensor  # [N, bytes of a row] uint8, mapped
    type_id: int  # of GGUF
    inputs: int  # K
    order: Tensor | None = None  # [N] int64, the row in the file of each output; None: the same

    @property
    def outputs(self) -> int:
        """N."""
        return len(self.content)

    @property
    def packed_bytes(self) -> int:
        """The size of the packed weight."""
        return torch.ops.gpt_eagle.block_bytes(self.type_id, self.outputs, self.inputs)


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


def table_of(parts: Sequence[Blocks]) -> Tensor:
    """Return the table of a layer with these parts, one below the other, as strips.h reads it.

    Returns: [3 + 3 parts] int64: N, K, bytes; of each part its type, outputs and first byte.
    """
    rows = []
    first = 0
    for part in parts:
        rows += [part.type_id, part.outputs, first]
        first += part.packed_bytes
    outputs = sum(part.outputs for part in parts)
    return torch.tensor([outputs, parts[0].inputs, first, *rows])


def pack(parts: Sequence[Blocks], table: Tensor, out: Tensor, path: Path) -> None:
    """Lay out the parts of a layer for the product.

    table: from `table_of`
    Raises: ValueError for a scale that is NaN or infinite.
    Writes: out, [bytes] uint8.
    """
    for part, first in zip(parts, table[5::3].tolist()):
        strips = out[first : first + part.packed_bytes]
        if not torch.ops.gpt_eagle.pack_blocks(part.content, part.type_id, part.order, strips):
            raise ValueError(bad_scale(part, path))


class BlockLinear(QuantLinear):
    """A linear layer with packed blocks in place of its weight."""

    format = BLOCKS

    def __init__(
        self, packed: Tensor, table: Tensor, bias: Tensor | None = None, fp32_out: bool = False
    ):
        """Make a layer of packed blocks.

        packed: from `pack`; table: from `table_of`
        fp32_out: outputs in fp32 (LM heads), never rounded
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = table[:2].tolist()
        self.fp32_out = fp32_out
        self.group_size = 0
        self.product = PRODUCTS[self.format, "cpu"]
        self.register_buffer("packed", packed)
        self.register_buffer("scale", table)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None

    def dequantize(self) -> Tensor:
        """Return the weight, [N, K] fp32, as the file has it."""
        return numbers_of(self.packed, self.scale, torch.arange(self.out_features), torch.float32)

    def rows(self, ids: Tensor) -> LMHead:
        """Return an LM head with some of the outputs, widened to bfloat16. ids: [R] int64."""
        rows = LMHead(self.in_features, len(ids), bias=False, device="meta")
        weight = numbers_of(self.packed, self.scale, ids, torch.bfloat16)
        rows.weight = nn.Parameter(weight, requires_grad=False)
        return rows


class BlockExperts(nn.Module):
    """A linear layer per expert, with stacked packed blocks in place of their weights."""

    format = BLOCKS

    def __init__(self, packed: Tensor, table: Tensor):
        """packed: [E, bytes]; table: of each expert, as for `BlockLinear`."""
        super().__init__()
        self.out_features, self.in_features = table[:2].tolist()
        self.product = PRODUCTS[self.format, "cpu"]
        self.register_buffer("packed", packed)
        self.register_buffer("scale", table)

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """Multiply every row with its expert: [P, K], from `ops.experts.route` -> [P, N]."""
        return self.product.multiply(x, self.packed, self.scale, self.out_features, False, routing)

    def operands(self) -> tuple[Tensor, Tensor, None]:
        """Return packed blocks, their table and no bias, as ops/cpu/layers.py takes them."""
        return self.packed, self.scale, None


class BlockEmbedding(nn.Module):
    """An embedding that reads its rows from packed blocks, which a tied LM head shares."""

    def __init__(self, packed: Tensor, table: Tensor):
        """packed, table: as for `BlockLinear`."""
        super().__init__()
        self.register_buffer("packed", packed)
        self.register_buffer("table", table)

    def forward(self, tokens: Tensor) -> Tensor:  # [...] int64 -> [..., F] fp32
        rows = numbers_of(self.packed, self.table, tokens.flatten(), torch.float32)
        return rows.view(*tokens.shape, rows.shape[-1])
