"""Time one operator: a linear layer in every weight format, and on CUDA attention of trees.

1. Every contestant rotates through 200 MB of its own data, so that it reads memory, not a cache:
   copies of a weight, which on a CPU lie in huge pages as a model's do, or the caches of 32 layers.
2. On a CPU a measurement is one call; on CUDA the calls over all copies are a captured graph, as in
   a cycle, and a measurement is some replays of it, without a gap between them.
3. All contestants run in turn at every number of rows; tables show medians over the rounds. With
   several units of AMX tiles, each cell of the last table is the median of ratios to the first one.

torch-bf16 is `F.linear`, the rest are matmuls of backends/; Q2_K to Q8_0 are types of a GGUF file.
Not here: whether results are right (tests/cpu, tests/cuda), whole models (passes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import backends.attention
from backends.blocks import Blocks, packed
from backends.cpp import build
from backends.cpp.pages import HugePages
from files.gguf import TYPES
from options import require
from quantize import FORMATS
from reference import choose
from run.options import pick_device
from scripts.bench.cases import FILE_TYPES, ROUNDED, AttentionOptions, LinearOptions
from scripts.bench.common import Report, read_bandwidth, seconds_of, times_by_rows

ROTATED_BYTES = 200_000_000
NUMBERS = {kind.name: number for number, kind in TYPES.items()}  # of GGUF's types
HEADS = {"7b": (32, 32), "8b": (32, 8)}  # query and key heads, of width 128
CAPACITY = 4096 + 256
CACHE_LAYERS = 32
REPLAYS = 10  # of a graph in a measurement

Call = Callable[[], Any]


class Rotated:
    """Calls of one operator over different data, timed so that no cache holds them."""

    def __init__(self, calls: list[Call], device: str):
        self.calls = calls
        self.device = device
        self.turn = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def seconds(self, unit: str = "") -> float:
        """Time one call. unit: of AMX tiles; "": the one in use"""
        if self.device != "cpu":
            self.graph = self.graph or captured(self.calls)
            self.graph.replay()  # the GPU is busy while the timed ones are launched
            return seconds_of(self.replay, self.device) / (REPLAYS * len(self.calls))
        if unit:
            torch.ops.gpt_eagle.use_tiles(unit)
        self.turn = (self.turn + 1) % len(self.calls)
        return seconds_of(self.calls[self.turn], self.device)

    def replay(self) -> None:
        """Replay the graph, one time behind the other."""
        for _ in range(REPLAYS):
            self.graph.replay()


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """Return a graph of all calls, replayed once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:  # compile, and let libraries set up
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def copies_of(read_bytes: int) -> int:
    """Return the number of copies that together exceed the caches."""
    return max(3, -(-ROTATED_BYTES // read_bytes))


# ---------------------------------------------------------------------------------- a linear layer


def weight_of(kind: str, n: int, k: int, device: str) -> Any:
    """Make a weight in a format: a tensor in 16 bits, or the device's record. n, k: outputs, inputs

    Blocks of a file are zeros: the time does not depend on the numbers.
    """
    if kind in FILE_TYPES:
        number = NUMBERS[kind]
        row = k // TYPES[number].elements * TYPES[number].size
        content = torch.zeros(n, row, dtype=torch.uint8)
        return packed([[Blocks(kind, content, number, k)]], False, device, None, Path(kind))
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    if kind not in ROUNDED:
        return weight
    return FORMATS[kind.partition("-")[0]].round(weight, ROUNDED[kind])


def copy_of(weight: Any, pages: HugePages | None = None) -> Any:
    """Return a copy of a weight. pages: for its large tensor"""
    if not isinstance(weight, Tensor):
        scale = None if weight.scale is None else weight.scale.clone()
        return weight._replace(data=copy_of(weight.data, pages), scale=scale)
    if pages is None:
        return weight.clone()
    return pages.empty(weight.shape, weight.dtype).copy_(weight)


def bytes_of(weight: Any) -> int:
    """Return the bytes that a matmul reads of a weight."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    return weight.data.nbytes + (0 if weight.scale is None else weight.scale.nbytes)


def layer_calls(kind: str, weights: list[Any], x: Tensor) -> list[Call]:
    """Return the matmul of some rows by each of the weights."""
    backend = choose(x.device)
    multiply: Callable[..., Tensor] = backend.matmul
    if isinstance(weights[0], Tensor):
        multiply = F.linear if kind == "torch-bf16" else backend.linear
    return [partial(multiply, x, weight) for weight in weights]


def measure_shape(shape: str, config: LinearOptions, device: str, report: Report) -> None:
    """Measure and print one shape."""
    n, k = map(int, shape.split("x"))
    rows = [int(m) for m in config.rows.split(",")]
    units = config.units.split(",")
    inputs = {m: torch.randn(m, k, dtype=torch.bfloat16, device=device) for m in rows}
    runs = {}
    beside = {}
    read_bytes = {}
    pages = HugePages() if device == "cpu" else None
    for kind in config.kinds.split(","):
        first = weight_of(kind, n, k, device)
        weights = [copy_of(first, pages) for _ in range(copies_of(bytes_of(first)))]
        for unit in units:
            name = f"{kind} {unit}".strip()
            beside[name] = f"{kind} {units[0]}".strip()
            for m, x in inputs.items():
                rotated = Rotated(layer_calls(kind, weights, x), device)
                runs[name, m] = partial(rotated.seconds, unit)
                read_bytes[name, m] = bytes_of(first)
    times_by_rows(report, shape, runs, config.rounds, beside, read_bytes)


def check_units(units: str) -> None:
    """Check that this machine has units of tiles. Raises: ValueError."""
    for unit in filter(None, units.split(",")):
        fault = f"--units {unit}: this machine has no AMX tiles; leave it out"
        require(bool(torch.ops.gpt_eagle.use_tiles(unit)), fault)


def linear(config: LinearOptions) -> None:
    """Measure and print a linear layer."""
    device = pick_device(config.device)
    if device == "cpu":
        missing = build.load_operators()
        fault = f"the operators cannot be built here ({missing}); there is nothing to compare"
        require(not missing, fault)
        check_units(config.units)
    report = Report(config.json, device, config.threads)
    ceiling = read_bandwidth(device, 5)
    print(f"bf16 activations, random weights, reads {ceiling.text(1, 1e-9)} GB/s", flush=True)
    for shape in config.shapes.split(","):
        measure_shape(shape, config, device, report)


# --------------------------------------------------------------------------------------- attention


def tree_mask(T: int) -> Tensor:
    """Return the mask of a chain, or from 16 rows on of a tree: [1, T, T] bool.

    A node of the tree hangs below one of the last 6 before it that are less than 7 deep.
    """
    random = Random(0)
    paths = [[0]]
    for node in range(1, T):
        parents = [path for path in paths[-6:] if len(path) < 8]
        above = random.choice(parents or paths[:1]) if T >= 16 else paths[-1]
        paths.append([*above, node])
    rows = [[node in path for node in range(T)] for path in paths]
    return torch.tensor([rows])


def attention_calls(heads: int, caches: list[Tensor], length: int, T: int) -> dict[str, list[Call]]:
    """Return the calls of attention of a tree of T rows over `length` slots, layer by layer.

    caches: keys and values of every layer, [2, 1, Hkv, S, E]
    Ours makes the table of paths in the first layer. Torch's is over the slots in use, with a mask
    made beforehand, which no captured graph could do.
    """
    used = length + T
    device = caches[0].device
    q = torch.randn(1, T, heads, 128, dtype=torch.bfloat16, device=device)
    start = torch.tensor([length], device=device)
    mask = tree_mask(T).to(device)
    visible = F.pad(mask, (length, 0), value=True)  # [1, T, used]
    backend = choose(q.device)
    paths = backend.path_table(mask)

    def first(k: Tensor, v: Tensor) -> Tensor:
        return backend.attention(q, k, v, start, mask, paths=backend.path_table(mask))

    def other(k: Tensor, v: Tensor) -> Tensor:
        return backend.attention(q, k, v, start, mask, paths=paths)

    def cut(k: Tensor, v: Tensor) -> Tensor:
        return backends.attention._attend(q, k[:, :, :used], v[:, :, :used], visible, 0.0)

    ours = [partial(first, *caches[0]), *(partial(other, *cache) for cache in caches[1:])]
    return {"ours": ours, "torch": [partial(cut, *cache) for cache in caches]}


def layers_of(kv_heads: int, device: str) -> list[Tensor]:
    """Make the keys and values of all layers."""
    size = (2, 1, kv_heads, CAPACITY, 128)
    options = {"dtype": torch.bfloat16, "device": device}
    return [torch.randn(*size, **options) for _ in range(CACHE_LAYERS)]


def attention(config: AttentionOptions) -> None:
    """Measure and print attention of trees. Raises: ValueError without a GPU."""
    require_cuda()
    report = Report(config.json, "cuda")
    print(f"bf16, reads {read_bandwidth('cuda', 5).text(1, 1e-9)} GB/s", flush=True)
    rows = [int(T) for T in config.rows.split(",")]
    for name, (heads, kv_heads) in HEADS.items():
        caches = layers_of(kv_heads, "cuda")
        for length in map(int, config.lengths.split(",")):
            runs = {}
            read_bytes = {}
            for T in rows:
                for method, calls in attention_calls(heads, caches, length, T).items():
                    runs[method, T] = Rotated(calls, "cuda").seconds
                    read_bytes[method, T] = 2 * 2 * kv_heads * (length + T) * 128
            title = f"attention {name}, {length} slots"
            beside = dict.fromkeys(("ours", "torch"), "ours")
            times_by_rows(report, title, runs, config.rounds, beside, read_bytes)


def require_cuda() -> None:
    """Check that there is a GPU. Raises: ValueError."""
    require(
        torch.cuda.is_available(),
        "this machine or this torch has no CUDA device; run it on one that has",
    )
