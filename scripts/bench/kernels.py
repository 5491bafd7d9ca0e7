"""Time the kernels of a decode cycle on a GPU with sizes of 7B models, and check their results.

`correct`: the result for random data against a plain reference; a matmul's is written into memory
that holds NaN, and a row has to come out the same alone and among others. The time is that of a
call in a captured graph: median and spread over replays, and the share of the ceiling, the bytes
per second that the GPU reads (common.py). The graph goes through at least 200 MB of
different data, so that no cache holds them, and with attention through the caches of 32 layers.
Beside it stands torch's time where torch has the same.
One JSON line is appended after every row; the table is printed at the end. A row that fails is
recorded with its error, and the rest goes on unless the device is lost; the exit status is then 1,
as for a wrong row.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import backends.attention
import backends.triton.functions
import backends.triton.layout
import reference
from backends.linear import halves_product
from backends.triton.layout import (
    BLOCK_FORMS,
    INTEGER_BYTES,
    Form,
    columns_of,
    halves_of,
    inputs_of_block,
)
from scripts.bench.cases import KernelsOptions
from scripts.bench.common import Report, pivot, read_bandwidth

GGUF = tuple(name.lower() for name in BLOCK_FORMS)  # types of a file, in their own bits
LAYERS = {
    "wqkv": (12288, 4096),
    "wo": (4096, 4096),
    "w13": (22016, 4096),
    "w2": (4096, 11008),
    "head": (32000, 4096),
}
PRODUCTS = {  # of a format: ours and its reference, of rows and weights
    "bf16": (lambda x, w: halves_product(x, w, "none"), lambda x, w: x @ w.float().T),
    "int4": (backends.planes.w4a16, backends.planes.w4a16_reference),
    "int8": (backends.planes.w8a16, backends.planes.w8a16_reference),
    **dict.fromkeys(GGUF, (backends.planes.blocks_a16, backends.planes.blocks_a16_reference)),
}
HEADS = {"7b": (32, 32), "8b": (32, 8)}  # query and key heads, of width 128
CAPACITY = 4096 + 256
CACHE_LAYERS = 32
GROUP = 128  # of int4 scales
ROTATE_BYTES = 200 * 10**6  # weights read before any is read again
REPLAYS = 20  # timed ones of a graph
# relative; rounding to bf16 alone gives 1.7e-3, and rounding probabilities as much again
TOLERANCE = 4e-3


def words(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random integers on the GPU."""
    bits = torch.iinfo(dtype)
    return torch.randint(bits.min, bits.max, shape, dtype=dtype, device="cuda")


def random_packed(form: str, N: int, K: int, group: int) -> tuple[Tensor, Tensor]:
    """Return random words and scales, as the operator of a format takes them."""
    if form in GGUF:
        return random_blocks(BLOCK_FORMS[form.upper()], N, K)
    scale = torch.rand(N, K // group, device="cuda") * 0.01
    bits = 4 if form == "int4" else 8
    packed = words(-(-K * bits // 1024), N, backends.triton.layout.COLUMNS, dtype=torch.int16)
    if form == "int4":
        return packed, backends.triton.layout.pack_scales(scale.bfloat16(), group)
    return packed, scale[:, 0].contiguous()


def random_blocks(form: Form, N: int, K: int) -> tuple[Tensor, Tensor]:
    """Return random words and scales of a GGUF type; integers of groups are 6 bits."""
    blocks = -(-K // inputs_of_block(form.bits))
    packed = words(blocks, N, columns_of(form.bits), dtype=torch.int16)
    scale = (torch.rand(blocks, N, halves_of(form), device="cuda") * 0.01).half()
    if form.scales.startswith("super"):
        scale[..., 2:] = (words(blocks, N, INTEGER_BYTES // 2, dtype=torch.int16) & 0x3F3F).view(
            torch.float16
        )
    return packed, scale


def make_layer(form: str, N: int, K: int) -> list[Tensor]:
    """Make random weights on the GPU. Every word is a valid one, in all of the packed formats."""
    if form == "bf16":
        return [torch.randn(N, K, dtype=torch.bfloat16, device="cuda")]
    return [*random_packed(form, N, K, GROUP)]


def graph_times_s(calls: list[Callable[[], object]], replays: int = REPLAYS) -> list[float]:
    """Return seconds per call, one number for each replay of a graph of all calls."""
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
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 / len(calls) for a, b in zip(events, events[1:])]


def copies_of(read_bytes: int) -> int:
    """Return the number of copies that together exceed the caches."""
    return max(2, -(-ROTATE_BYTES // read_bytes))


def failure(error: Exception) -> dict:
    """Return the record of an error: its kind and first line."""
    return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


class Contest(NamedTuple):
    """A kernel at one shape, beside its peer."""

    read_bytes: int  # that it must read; written ones too where it moves them
    # calls over different data, of "ours" and of "torch"
    methods: dict[str, list[Callable[[], object]]]
    error: Callable[[], float]  # of ours against the reference, relative


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def product_contest(form: str, layer: str, M: int) -> Contest:
    """Compare a matmul of M rows with the weights of a layer; in bf16 with torch's."""
    N, K = LAYERS[layer]
    product, reference = PRODUCTS[form]
    first = make_layer(form, N, K)
    read_bytes = sum(part.nbytes for part in first)
    layers = [first, *(make_layer(form, N, K) for _ in range(copies_of(read_bytes) - 1))]
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    methods = {"ours": [partial(product, x, *weights) for weights in layers]}
    if form == "bf16":
        methods["torch"] = [partial(F.linear, x, *weights) for weights in layers]

    def nan(*size: int, **options: object) -> Tensor:
        return torch.full(size, float("nan"), **options)

    def error() -> float:
        with mock.patch.object(torch, "empty", nan):
            together = product(x, *first)
            alone = product(x[:1], *first)
        assert torch.equal(alone, together[:1]), "a row's bits depend on the other rows"
        return relative_error(together, reference(x.float(), *first))

    return Contest(read_bytes, methods, error)


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
    return torch.tensor([rows], device="cuda")


def attention_contest(name: str, length: int, T: int) -> Contest:
    """Compare attention of a tree of T rows over `length` slots, layer by layer, in bf16.

    Ours makes the table of paths in the first layer. The peer is torch's over the slots in use,
    with a mask made beforehand, which no captured graph could do.
    """
    heads, kv_heads = HEADS[name]
    used = length + T
    read_bytes = 2 * 2 * kv_heads * used * 128
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(1, T, heads, 128, **options)
    start = torch.tensor([length], device="cuda")
    mask = tree_mask(T)
    visible = F.pad(mask, (length, 0), value=True)  # [1, T, used]
    caches = [torch.randn(2, 1, kv_heads, CAPACITY, 128, **options) for _ in range(CACHE_LAYERS)]
    paths = backends.triton.functions.path_table(mask)

    def first(k: Tensor, v: Tensor) -> Tensor:
        made = backends.triton.functions.path_table(mask)
        return backends.attention.attention(q, k, v, start, mask, paths=made)

    def other(k: Tensor, v: Tensor) -> Tensor:
        return backends.attention.attention(q, k, v, start, mask, paths=paths)

    def cut(k: Tensor, v: Tensor) -> Tensor:
        return backends.attention._attend(q, k[:, :, :used], v[:, :, :used], visible, 0.0)

    methods = {
        "ours": [partial(first, *caches[0]), *(partial(other, *cache) for cache in caches[1:])],
        "torch": [partial(cut, *cache) for cache in caches],
    }

    def error() -> float:
        k, v = caches[0].clone()
        want = reference.attention(q.float(), k, v, start, mask)
        k[:, :, used:] = float("nan")
        v[:, :, used:] = float("nan")
        return relative_error(backends.attention.attention(q, k, v, start, mask), want)

    return Contest(read_bytes, methods, error)


def contests(config: KernelsOptions) -> list[tuple[str, int, Callable[[], Contest]]]:
    """List the contests of a format: name, rows, and a function that makes the contest."""
    rows = [int(M) for M in config.rows.split(",")]
    if config.format == "attention":
        lengths = map(int, config.lengths.split(","))
        shapes = {
            f"attention {heads}, {length} slots": partial(attention_contest, heads, length)
            for heads, length in itertools.product(HEADS, lengths)
        }
    else:
        shapes = {
            f"{config.format} {layer}": partial(product_contest, config.format, layer)
            for layer in LAYERS
        }
    return [(name, M, partial(make, M)) for name, make in shapes.items() for M in rows]


def measure(config: KernelsOptions, ceiling: float) -> Iterator[dict]:
    """Yield a row for each contest and method; one that fails holds `error`."""
    for name, M, make in tqdm(contests(config), unit="shape", desc=config.format):
        row = {"format": config.format, "kernel": name, "M": M, "method": "ours"}
        try:
            contest = make()
            error = contest.error()
            for method, calls in contest.methods.items():
                times = graph_times_s(calls)
                median = statistics.median(times)
                yield row | {
                    "method": method,
                    "read_bytes": contest.read_bytes,
                    "relative_error": error,
                    "correct": error < TOLERANCE,
                    "time_us": median * 1e6,
                    "spread_us": (max(times) - min(times)) * 1e6,
                    "share": contest.read_bytes / median / ceiling,
                }
            del contest, calls  # gigabytes
        except Exception as error:  # every failure belongs in the record
            yield row | failure(error)
        torch.cuda.synchronize()  # raises where the device is lost


def summary(rows: list[dict]) -> str:
    """Return a Markdown table, then the wrong and the failed rows.

    A cell has microseconds, bytes per second, and the share of the ceiling.
    """
    cells = {}
    for r in rows:
        cell = "failed"
        if "time_us" in r:
            rate = r["read_bytes"] / r["time_us"] / 1e3  # GB/s
            cell = f"{r['time_us']:.1f} us, {rate:.0f} GB/s, {r['share']:.0%}"
        cells[f"{r['kernel']}, {r['M']} rows", r["method"]] = cell
    wrong = {f"{r['kernel']} {r['M']}" for r in rows if not r.get("correct", True)}
    failed = [f"{r['kernel']} {r['M']}: {r['error']}" for r in rows if "error" in r]
    parts = [pivot("kernel", cells), f"wrong: {', '.join(sorted(wrong)) or 'none'}"]
    return "\n".join([*parts, *(f"failed: {each}" for each in failed)])


def run(config: KernelsOptions) -> None:
    """Measure one format. Ends with status 1 where a row failed or is wrong."""
    require_cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    ceiling = read_bandwidth("cuda", 5).median
    report = Report(config.json, "cuda", read_bytes_per_s=ceiling)
    try:
        for row in measure(config, ceiling):
            report.add(row)
            shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
            tqdm.write(json.dumps(shown), sys.stdout)
    finally:  # also where the device is lost
        print(summary(report.rows), flush=True)
    if any("error" in row or not row["correct"] for row in report.rows):
        sys.exit(1)


def require_cuda() -> None:
    """Check that there is a GPU. Raises: ValueError."""
    if not torch.cuda.is_available():
        raise ValueError("this machine or this torch has no CUDA device; run it on one that has")
