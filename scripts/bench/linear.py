"""Time one linear layer for 1 to 64 tokens in every weight format, against the machine's ceiling.

    python scripts/bench/linear.py --json linear.json
    python scripts/bench/linear.py --shapes 4096x11008 --tokens 1,8,64 --rounds 5
    python scripts/bench/linear.py --units none,hardware  # do AMX tiles pay, and from which row?

1. The ceilings are the read bandwidth, and the multiply-adds per second of the same int8 and bf16
   instructions on registers alone. They are measured first and after every shape, and the highest
   count. The least time of a product is max(bytes / bandwidth, multiply-adds / peak).
2. Every contestant rotates through 200 MB of its own weights, so that it reads memory, not a cache.
   They lie in huge pages, as a model's do.
3. A round measures every contestant at every number of tokens once, in an order that rotates, so
   that drift hits all of them. The table shows medians; quartiles over rounds go into the JSON.
4. With several units, a round measures them one after the other. A unit is named with each cell in
   which it takes longer than the first one: the median over rounds of the ratio is above 1.0.

torch-bf16 is `F.linear`, the rest is backends/cpp/matmul.cpp; Q2_K to Q8_0 are types of a GGUF
file. Not here: CUDA (scripts/gpu/kernels.py), whole models (papers.py).
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.io import check_outputs, write_text
from run.parsing import one_line_errors, option, parse

FLOAT = ("torch-bf16", "bf16")  # the same weights, [N, K] bf16
ROUNDED = {  # name -> format, group size (0: an output's)
    "int8": ("int8", 0),
    "int4-32": ("int4", 32),
    "int4-64": ("int4", 64),
    "int4-128": ("int4", 128),
}
FILE_TYPES = {  # GGUF's numbers
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8,
    "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
}  # fmt: skip
KINDS = (*FLOAT, *ROUNDED, *FILE_TYPES)
USUAL = (*FLOAT, *ROUNDED, "Q4_1", "Q8_0", "Q4_K", "Q6_K")


@dataclass(frozen=True)
class LinearConfig:
    """Options. Units and effects are in the help texts."""

    shapes: str = option(
        "5632x2048,2048x5632,11008x4096,4096x11008", "outputs x inputs, separated by commas"
    )
    tokens: str = option("1,2,4,8,16,26,32,48,64", "rows of the input")
    kinds: str = option(",".join(USUAL), f"contestants, among {', '.join(KINDS)}")
    units: str = option(
        "", "units of AMX tiles to compare, as none,hardware; default: the one in use"
    )
    rounds: int = option(9, "measurements of each", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    json: str = option("", "write the results to this file")

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        check_outputs({"--json": self.json})
        for flag, value, known in (
            ("--kinds", self.kinds, KINDS),
            ("--units", self.units or "none", UNITS),
        ):
            unknown = set(value.split(",")) - set(known)
            if unknown:
                raise ValueError(
                    f"{flag} must be among {', '.join(known)}; {', '.join(sorted(unknown))} is not"
                )
        for shape in self.shapes.split(","):
            parts = shape.split("x")
            if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
                raise ValueError(f"--shapes are OUTPUTSxINPUTS; one is {shape!r}")
            for kind in self.kinds.split(","):
                group = group_of(kind)
                if int(parts[1]) % group:
                    raise ValueError(
                        f"--kinds {kind} needs inputs in multiples of {group}; --shapes has {shape}"
                    )
        if not all(p.isdigit() and int(p) for p in self.tokens.split(",")):
            raise ValueError(f"--tokens must be numbers like 1,8,64; it is {self.tokens!r}")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(LinearConfig, "linear.py", __doc__) if __name__ == "__main__" else None

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from backends.blocks import Blocks
from backends.cpp import build
from backends.cpp.pages import HugePages
from backends.strips import part_bytes, table_of
from backends.weight import Weight
from files.gguf import TYPES
from quantize import FORMATS
from reference import choose
from scripts.bench.measure import Series, environment, read_bandwidth

ROTATED_BYTES = 200_000_000
PEAK_ROUNDS = 1_000_000  # about 0.1 s
UNITS = ("none", "hardware", "emulation")  # of AMX tiles


def group_of(kind: str) -> int:
    """Return the inputs that share a scale, or a block; at least 32."""
    if kind in FILE_TYPES:
        return TYPES[FILE_TYPES[kind]].elements
    return max(32, ROUNDED.get(kind, ("", 0))[1])


def empty_blocks(kind: str, n: int, k: int) -> Weight:
    """Return packed blocks of zeros: the time does not depend on the numbers."""
    number = FILE_TYPES[kind]
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
                format, group = ROUNDED[kind]
                packed = FORMATS[format].round(weight, group)
            self.apply = lambda x, data: backend.matmul(x, packed._replace(data=data))
            data = packed.data
        self.bytes = data.nbytes
        pages = HugePages()
        self.weights = [
            pages.empty(data.shape, data.dtype).copy_(data)
            for _ in range(max(3, -(-ROTATED_BYTES // self.bytes)))
        ]

    def seconds(self, x: Tensor) -> float:
        """Time one call, on weights that no cache holds."""
        self.turn = (self.turn + 1) % len(self.weights)
        began = time.perf_counter()
        self.apply(x, self.weights[self.turn])
        return time.perf_counter() - began


class Ceiling(NamedTuple):
    """The limits of the machine at the time of a measurement."""

    bandwidth: Series  # bytes/s
    int8: float  # multiply-adds/s of all threads on registers
    bf16: float

    @staticmethod
    def measure() -> Ceiling:
        """Measure the bandwidth's median and range, and the best rates, each of five runs."""
        peaks = peak_loops()
        bandwidth = read_bandwidth("cpu", 5)
        int8, bf16 = (max(_rate(peak) for _ in range(5)) for peak in peaks)
        return Ceiling(bandwidth, int8, bf16)

    def __str__(self) -> str:
        peaks = f"{self.int8 / 1e12:.2f} T int8 and {self.bf16 / 1e12:.2f} T bf16 multiply-adds/s"
        return f"{self.bandwidth.text(1e-9, 1)} GB/s, {peaks}"

    def record(self) -> dict[str, float]:
        """Return the numbers for the JSON file."""
        return {
            "gb_per_s": self.bandwidth.median / 1e9,
            "int8_multiply_adds_per_s": self.int8,
            "bf16_multiply_adds_per_s": self.bf16,
        }


def peak_loops() -> list[Callable[[int], float]]:
    """Build and load peaks.cpp. Returns: its int8 and bf16 loops, of (rounds) -> multiply-adds."""
    command, link = build.commands("native")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "peaks.so")
        source = Path(__file__).with_name("peaks.cpp")
        subprocess.run(
            [*command, f"-I{build.HERE}", str(source), *link, "-o", str(library)], check=True
        )
        code = ctypes.CDLL(str(library))
    loops = [code.dot_peak, code.pair_peak]
    for loop in loops:
        loop.argtypes = [ctypes.c_int64]
        loop.restype = ctypes.c_double
    return loops


def _rate(peak: Callable[[int], float]) -> float:
    began = time.perf_counter()
    done = peak(PEAK_ROUNDS)
    return done / (time.perf_counter() - began)


def bench_shape(shape: str, config: LinearConfig) -> list[dict]:
    """Measure one shape. Returns: a record per contestant and number of tokens."""
    n, k = map(int, shape.split("x"))
    tokens = [int(m) for m in config.tokens.split(",")]
    contestants = {kind: LayerCopies(kind, n, k) for kind in config.kinds.split(",")}
    inputs = {m: torch.randn(m, k, dtype=torch.bfloat16) for m in tokens}
    units = config.units.split(",")
    taken: dict[tuple[str, str, int], list[float]] = {
        (kind, unit, m): [] for kind in contestants for m in tokens for unit in units
    }
    order = list(taken)
    for number in tqdm(range(-1, config.rounds), desc=shape, unit="round"):
        shift = number * 7 % len(order)  # so that neighbours change
        for kind, unit, m in order[shift:] + order[:shift]:
            if unit:
                torch.ops.gpt_eagle.use_tiles(unit)
            seconds = contestants[kind].seconds(inputs[m])
            if number >= 0:  # the first round warms up
                taken[kind, unit, m].append(seconds)
    records = []
    for (kind, unit, m), seconds in taken.items():
        series = Series.quartiles(seconds)
        of_first = series.median / Series.quartiles(taken[kind, unit, tokens[0]]).median
        records.append(
            {
                "shape": shape,
                "kind": kind,
                "unit": unit,
                "tokens": m,
                "ms": series.median * 1e3,
                "quartiles_ms": [series.low * 1e3, series.high * 1e3],
                "of_first_unit": median(map(truediv, seconds, taken[kind, units[0], m])),
                "gb_per_s": contestants[kind].bytes / series.median / 1e9,
                "of_m1": of_first,
                "bytes": contestants[kind].bytes,
                "multiply_adds": m * n * k,
            }
        )
    return records


def table(records: list[dict], value: Callable[[dict], str]) -> str:
    """Return a Markdown table: a row per contestant, a column per number of tokens."""
    tokens = list(dict.fromkeys(r["tokens"] for r in records))
    lines = [
        f"| {records[0]['shape']} | " + " | ".join(f"M={m}" for m in tokens) + " |",
        "|---" * (len(tokens) + 1) + "|",
    ]
    for kind, unit in dict.fromkeys((r["kind"], r["unit"]) for r in records):
        cells = [value(r) for r in records if (r["kind"], r["unit"]) == (kind, unit)]
        lines.append(f"| {f'{kind} {unit}'.strip()} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _print_shape(records: list[dict], ceilings: list[Ceiling]) -> None:
    """Add each record's share of the ceiling, and print the tables of a shape."""
    bandwidth = max(c.bandwidth.median for c in ceilings)
    int8 = max(c.int8 for c in ceilings)
    bf16 = max(c.bf16 for c in ceilings)
    for r in records:
        peak = bf16 if r["kind"] in FLOAT else int8
        r["of_ceiling"] = r["ms"] / 1e3 / max(r["bytes"] / bandwidth, r["multiply_adds"] / peak)
    title = "ms (times of M=1; times of the ceiling: max(bytes / bandwidth, multiply-adds / peak))"
    print(f"\n{title}\n")
    print(table(records, lambda r: f"{r['ms']:.2f} ({r['of_m1']:.2f}; {r['of_ceiling']:.2f})"))
    print("\nGB/s\n\n" + table(records, lambda r: f"{r['gb_per_s']:.1f}"), flush=True)
    _print_units(records)


def _print_units(records: list[dict]) -> None:
    """Print the time of every unit over that of the first one, and name the cells above 1.0."""
    first = records[0]["unit"]
    others = [r for r in records if r["unit"] != first]
    if not others:
        return
    slower = [r for r in others if round(r["of_first_unit"], 2) > 1.0]
    cells = [f"{r['kind']} at {r['tokens']} rows ({r['of_first_unit']:.2f})" for r in slower]
    print(f"\nTime over that of unit {first}\n")
    print(table(others, lambda r: f"{r['of_first_unit']:.2f}"))
    print(f"\nslower than unit {first}: {', '.join(cells) or 'no cell'}", flush=True)


def bench(config: LinearConfig) -> None:
    """Measure and print everything."""
    config.check()
    if config.threads:
        torch.set_num_threads(config.threads)
    missing = build.load_operators()
    if missing:
        raise ValueError(
            f"the operators cannot be built here ({missing}); there is nothing to compare"
        )
    machine = environment("cpu")
    for unit in config.units.split(","):
        if unit and not torch.ops.gpt_eagle.use_tiles(unit):
            raise ValueError(f"--units {unit}: this machine has no AMX tiles; leave it out")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"bf16 activations, random weights, {ROTATED_BYTES / 1e6:.0f} MB in turn, "
        f"{config.rounds} rounds",
        flush=True,
    )
    ceilings = [Ceiling.measure()]
    by_shape = []
    for shape in config.shapes.split(","):
        by_shape.append(bench_shape(shape, config))
        ceilings.append(Ceiling.measure())
    shown = "; ".join(map(str, ceilings))
    print(f"ceilings, measured {len(ceilings)} times, the highest count: {shown}")
    for records in by_shape:
        _print_shape(records, ceilings)
    if config.json:
        document = {
            "environment": machine,
            "ceilings": [ceiling.record() for ceiling in ceilings],
            "records": [record for records in by_shape for record in records],
        }
        write_text(config.json, json.dumps(document))


def main() -> None:
    """Run the command line."""
    config = COMMAND or parse(LinearConfig, "linear.py", __doc__)
    with one_line_errors("linear.py"):
        bench(config)


if __name__ == "__main__":
    main()
