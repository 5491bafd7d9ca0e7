"""Time one linear layer for 1 to 64 rows in every weight format, beside the read bandwidth.

1. Every contestant rotates through 200 MB of its own weights, so that it reads memory, not a cache.
   They lie in huge pages, as a model's do.
2. All contestants run in turn at every number of rows; tables show medians over the rounds.
3. With several units of AMX tiles, each cell of the last table is the median over rounds of the
   time over that of the first unit, and those above 1.0 are named.

torch-bf16 is `F.linear`, the rest is backends/cpp/matmul.cpp; Q2_K to Q8_0 are types of a GGUF
file. Not here: CUDA (kernels.py), whole models (passes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median

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
from scripts.bench.common import Log, Series, environment, in_turn, read_bandwidth
from scripts.bench.table import markdown

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


def measure_shape(shape: str, config: LinearOptions) -> list[dict]:
    """Measure one shape. Returns: a record per contestant and number of rows."""
    n, k = map(int, shape.split("x"))
    rows = [int(m) for m in config.rows.split(",")]
    units = config.units.split(",")
    copies = {kind: LayerCopies(kind, n, k) for kind in config.kinds.split(",")}
    inputs = {m: torch.randn(m, k, dtype=torch.bfloat16) for m in rows}
    runs = {
        (kind, unit, m): partial(copies[kind].seconds, inputs[m], unit)
        for kind in copies
        for m in rows
        for unit in units
    }
    taken = in_turn(runs, config.rounds, shape)
    records = []
    for (kind, unit, m), seconds in taken.items():
        series = Series.quartiles(seconds)
        records.append(
            {
                "shape": shape,
                "kind": kind,
                "unit": unit,
                "rows": m,
                "ms": series.median * 1e3,
                "quartiles_ms": [series.low * 1e3, series.high * 1e3],
                "of_first_unit": median(map(truediv, seconds, taken[kind, units[0], m])),
                "gb_per_s": copies[kind].bytes / series.median / 1e9,
                "of_one_row": series.median / median(taken[kind, unit, rows[0]]),
                "bytes": copies[kind].bytes,
            }
        )
    return records


def table(records: list[dict], value: Callable[[dict], str]) -> str:
    """Return a Markdown table: a row per contestant, a column per number of rows."""
    rows = dict.fromkeys(r["rows"] for r in records)
    lines = []
    for kind, unit in dict.fromkeys((r["kind"], r["unit"]) for r in records):
        cells = [value(r) for r in records if (r["kind"], r["unit"]) == (kind, unit)]
        lines.append([f"{kind} {unit}".strip(), *cells])
    return markdown([records[0]["shape"], *(f"M={m}" for m in rows)], lines)


def print_shape(records: list[dict]) -> None:
    """Print the tables of a shape."""
    print("\nms (times of the first number of rows)\n")
    print(table(records, lambda r: f"{r['ms']:.2f} ({r['of_one_row']:.2f})"))
    print("\nGB/s\n\n" + table(records, lambda r: f"{r['gb_per_s']:.1f}"), flush=True)
    first = records[0]["unit"]
    others = [r for r in records if r["unit"] != first]
    if not others:
        return
    slower = [r for r in others if round(r["of_first_unit"], 2) > 1.0]
    cells = [f"{r['kind']} at {r['rows']} rows ({r['of_first_unit']:.2f})" for r in slower]
    print(f"\nTime over that of unit {first}\n")
    print(table(others, lambda r: f"{r['of_first_unit']:.2f}"))
    print(f"\nslower than unit {first}: {', '.join(cells) or 'no cell'}", flush=True)


def check_units(units: str) -> None:
    """Check that this machine has units of tiles. Raises: ValueError."""
    for unit in filter(None, units.split(",")):
        if not torch.ops.gpt_eagle.use_tiles(unit):
            raise ValueError(f"--units {unit}: this machine has no AMX tiles; leave it out")


def run(config: LinearOptions) -> None:
    """Measure and print everything."""
    if config.threads:
        torch.set_num_threads(config.threads)
    missing = build.load_operators()
    if missing:
        raise ValueError(
            f"the operators cannot be built here ({missing}); there is nothing to compare"
        )
    check_units(config.units)
    machine = environment("cpu")
    log = Log(config.json, "--json")
    ceiling = read_bandwidth("cpu", 5)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"bf16 activations, random weights, reads {ceiling.text(1e-9, 1)} GB/s", flush=True)
    for shape in config.shapes.split(","):
        records = measure_shape(shape, config)
        print_shape(records)
        log.add([record | {"environment": machine} for record in records])
