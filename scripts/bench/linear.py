"""Time one linear layer for 1 to 64 rows in every weight format, beside the read bandwidth.

1. Every contestant rotates through 200 MB of its own weights, so that it reads memory, not a cache.
   They lie in huge pages, as a model's do.
2. All contestants run in turn at every number of rows; tables show medians over the rounds.
3. With several units of AMX tiles, each cell of the last table is the median over rounds of the
   time over that of the first unit.

torch-bf16 is `F.linear`, the rest is backends/cpp/matmul.cpp; Q2_K to Q8_0 are types of a GGUF
file. Not here: CUDA (kernels.py), whole models (passes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.blocks import Blocks
from backends.cpp import build
from backends.cpp.pages import HugePages
from backends.strips import part_bytes, table_of
from backends.weight import Weight
from files.gguf import TYPES
from quantize import FORMATS
from reference import choose
from scripts.bench.cases import FILE_TYPES, FLOAT, ROUNDED, LinearOptions
from scripts.bench.common import Report, read_bandwidth, times_by_rows

ROTATED_BYTES = 200_000_000
NUMBERS = {kind.name: number for number, kind in TYPES.items()}  # of GGUF's types


def empty_blocks(kind: str, n: int, k: int) -> Weight:
    """Return packed blocks of zeros: the time does not depend on the numbers."""
    number = NUMBERS[kind]
    row = k // TYPES[number].elements * TYPES[number].size
    blocks = Blocks(kind, torch.zeros(n, row, dtype=torch.uint8), number, k)
    size = part_bytes(blocks.part, k)
    packed = torch.empty(size, dtype=torch.uint8)
    blocks.pack(packed, Path(kind))
    return Weight(packed, (blocks.part,), k, table_of((blocks.part,), k, [size]))


class LayerCopies:
    """Several copies of one layer in one format, used in turn."""

    def __init__(self, kind: str, n: int, k: int):
        """n, k: outputs and inputs"""
        self.turn = 0
        weight = torch.randn(n, k, dtype=torch.bfloat16)
        backend = choose(weight.device)
        if kind in FLOAT:
            self.apply: Callable[..., Tensor] = F.linear if kind == "torch-bf16" else backend.linear
            data = weight
        else:
            if kind in FILE_TYPES:
                packed = empty_blocks(kind, n, k)
            else:
                packed = FORMATS[kind.partition("-")[0]].round(weight, ROUNDED[kind])
            self.apply = lambda x, data: backend.matmul(x, packed._replace(data=data))
            data = packed.data
        self.bytes = data.nbytes
        pages = HugePages()
        self.weights = [
            pages.empty(data.shape, data.dtype).copy_(data)
            for _ in range(max(3, -(-ROTATED_BYTES // self.bytes)))
        ]

    def seconds(self, x: Tensor, unit: str) -> float:
        """Time one call, on weights that no cache holds. unit: of AMX tiles; "": the one in use"""
        if unit:
            torch.ops.gpt_eagle.use_tiles(unit)
        self.turn = (self.turn + 1) % len(self.weights)
        began = time.perf_counter()
        self.apply(x, self.weights[self.turn])
        return time.perf_counter() - began


def measure_shape(shape: str, config: LinearOptions, report: Report) -> None:
    """Measure and print one shape."""
    n, k = map(int, shape.split("x"))
    rows = [int(m) for m in config.rows.split(",")]
    units = config.units.split(",")
    inputs = {m: torch.randn(m, k, dtype=torch.bfloat16) for m in rows}
    runs = {}
    beside = {}
    read_bytes = {}
    for kind in config.kinds.split(","):
        copies = LayerCopies(kind, n, k)
        for unit in units:
            name = f"{kind} {unit}".strip()
            beside[name] = f"{kind} {units[0]}".strip()
            read_bytes[name] = copies.bytes
            runs |= {(name, m): partial(copies.seconds, x, unit) for m, x in inputs.items()}
    times_by_rows(report, shape, runs, config.rounds, beside, read_bytes)


def check_units(units: str) -> None:
    """Check that this machine has units of tiles. Raises: ValueError."""
    for unit in filter(None, units.split(",")):
        if not torch.ops.gpt_eagle.use_tiles(unit):
            raise ValueError(f"--units {unit}: this machine has no AMX tiles; leave it out")


def run(config: LinearOptions) -> None:
    """Measure and print everything."""
    missing = build.load_operators()
    if missing:
        raise ValueError(
            f"the operators cannot be built here ({missing}); there is nothing to compare"
        )
    check_units(config.units)
    report = Report(config.json, threads=config.threads)
    ceiling = read_bandwidth("cpu", 5)
    print(f"bf16 activations, random weights, reads {ceiling.text(1e-9, 1)} GB/s", flush=True)
    for shape in config.shapes.split(","):
        measure_shape(shape, config, report)
