"""How fast a GPU multiplies 1 to 64 rows by the weights of a 7B model, in one format; and whether it is right.

    python scripts/gpu/kernels.py --format int4 --json benchmarks/gpu.jsonl
    python scripts/gpu/kernels.py --format attention --rows 1,60 --lengths 512,4096

1. The ceiling: a copy within the GPU's memory, bytes read and written.
2. For each layer of a LLaMA-2 7B block and its LM head: `correct`, the product of fresh random data against the fp32
   reference, written into memory that holds NaN; `same_bits`, whether a row comes out the same alone and among others.
3. For each number of rows: the time of a product within a captured graph that goes through at least 200 MB of
   different weights, so that no cache holds them; median and spread over replays; share of the ceiling.
Formats: int4 and int8 are ours; bf16 is the vendor's product (cuBLAS); tinygemm is torch._weight_int4pack_mm.
`attention`, `compact`, `topk` and `experts` are the other kernels of a decode cycle, measured in the same way.
- attention in bf16 with the heads of a 7B and an 8B model, against `masked`, torch's over the whole cache of 4,352
  slots, and `cut`, torch's over the slots in use, with its mask made beforehand, which no captured graph could do.
- the compaction of an accepted path, 6 rows that all move, in a cache of 32 layers with 8 and with 32 key heads in
  bf16; torch's is the compiled loop over the buffers. Calls take turns along the cache, so that no row is read twice.
- top-10 and logsumexp against torch's.
- the products of Mixtral-8x7B's experts for 1 to 60 tokens, each with two experts at random, in bf16, int8 and int4.
  The share is that of reading the experts that are hit; the time includes the lists of their rows, which a layer makes
  once for two products; torch's is every row with every expert, in bf16.
One JSON line is appended after every row. A row that fails is written down with its error, and the rest goes on
unless the device is lost; the exit status is then 1, and in the end when a row is wrong or has failed.
scripts/gpu/check.py runs this for all formats, and prints a table.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import ops.compact
import ops.topk

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

import ops.attention
import ops.cuda.layout
import ops.experts
import ops.quantized
from command_line import one_line_errors, option, parse
from kv_cache import KVCache
from model import ModelConfig

FORMATS = ("bf16", "tinygemm", "int8", "int4")
LAYERS = {
    "wqkv": (12288, 4096),
    "wo": (4096, 4096),
    "w13": (22016, 4096),
    "w2": (4096, 11008),
    "head": (32000, 4096),
}
PRODUCTS = {
    "int4": (ops.quantized.w4a16, ops.quantized.w4a16_reference),
    "int8": (ops.quantized.w8a16, ops.quantized.w8a16_reference),
}
CYCLE = ("attention", "compact", "topk", "experts")
HEADS = {"7b": (32, 32), "8b": (32, 8)}  # query and key heads, of width 128
CAPACITY = 4096 + 256
CACHE_LAYERS = 32
CACHE_HEADS = (8, 32)
PATH = (0, 2, 5, 11, 20, 33, 47)  # of a tree of 60; every row but the root's moves
VOCABULARIES = (32000, 128256)
EXPERTS, CHOSEN = 8, 2
EXPERT_LAYERS = {"w13": (28672, 4096), "w2": (4096, 14336)}  # gate above up, and down
EXPERT_FORMATS = ("bf16", "int8", "int4")
EXPERT_TOKENS = (1, 2, 4, 8, 32, 60)
COPY_BYTES = 2**30
TOLERANCE = (
    4e-3  # relative; rounding to bf16 alone gives 1.7e-3, and once more that of probabilities
)


@dataclass
class BenchConfig:
    format: str = option("int4", f"weights; or another kernel: {', '.join(CYCLE)}", FORMATS + CYCLE)
    group_size: int = option(128, "of int4 scales", None)
    rows: str = option("1,8,16,32,64", "rows of activations, ascending")
    lengths: str = option("128,512,2048,4096", "slots that attention reads in front of its rows")
    rotate_mb: int = option(200, "weights read before any is read again, in MB (1e6 bytes)")
    replays: int = option(20, "timed replays of the graph")
    json: str = option("", "file to append to")


class Layer(NamedTuple):
    """The weights of one layer and how to multiply by them."""

    product: Callable[[Tensor], Tensor]  # [M, K] bfloat16 -> [M, N]
    reference: Callable[[Tensor], Tensor] | None  # of ours
    weight_bytes: int


def words(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random integers on the GPU."""
    bits = torch.iinfo(dtype)
    return torch.randint(bits.min, bits.max, shape, dtype=dtype, device="cuda")


def random_packed(form: str, N: int, K: int, group: int) -> tuple[Tensor, Tensor]:
    """Random words and scales, as the operators of int4 or int8 take them."""
    scale = torch.rand(N, K // group, device="cuda") * 0.01
    packed = words(
        -(-K * (4 if form == "int4" else 8) // 1024), N, ops.cuda.layout.COLUMNS, dtype=torch.int16
    )
    return packed, ops.cuda.layout.pack_scales(
        scale.bfloat16(), group
    ) if form == "int4" else scale[:, 0].contiguous()


def make_layer(form: str, N: int, K: int, group: int) -> Layer:
    """Random weights on the GPU. Every word is a valid one, in all of the packed formats."""

    if form == "bf16":
        w = torch.randn(N, K, dtype=torch.bfloat16, device="cuda")
        return Layer(lambda x: F.linear(x, w), None, w.nbytes)
    if form == "tinygemm":
        scale = torch.rand(N, K // group, device="cuda") * 0.01
        w = words(N // 8, K // 128, 32, 4, dtype=torch.int32)  # inner_k_tiles = 8
        zeros = torch.stack((scale.T, scale.T), -1).bfloat16().contiguous()  # [K / group, N, 2]
        return Layer(
            lambda x: torch._weight_int4pack_mm(x, w, group, zeros), None, w.nbytes + zeros.nbytes
        )
    (packed, scale), (product, reference) = random_packed(form, N, K, group), PRODUCTS[form]
    return Layer(
        lambda x: product(x, packed, scale),
        lambda x: reference(x, packed, scale),
        packed.nbytes + scale.nbytes,
    )


def graph_times_s(calls: list[Callable[[], object]], replays: int) -> list[float]:
    """Seconds per call, one number for each replay of a graph of all calls."""
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


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy within the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / statistics.median(graph_times_s([lambda: target.copy_(source)] * 3, 10))


def check_layer(layer: Layer, K: int, rows: list[int]) -> dict:
    """Compare with the reference, and rows among others with rows alone."""
    if layer.reference is None:
        return {}
    x = torch.randn(rows[-1], K, dtype=torch.bfloat16, device="cuda")
    nan = lambda *size, **options: torch.full(size, float("nan"), **options)  # noqa: E731
    with mock.patch.object(torch, "empty", nan):
        whole = layer.product(x)
        parts = [layer.product(x[:M]) for M in rows]
    expected = layer.reference(x.float())  # [M, N]
    error = float((whole.float() - expected).norm() / expected.norm())
    same = all(torch.equal(part, whole[:M]) for part, M in zip(parts, rows))
    return {"relative_error": error, "correct": error < TOLERANCE, "same_bits": same}


def measure(config: BenchConfig, ceiling: float) -> Iterator[dict]:
    """Yield a row for each layer and number of rows; one that fails holds `error`."""
    rows = [int(M) for M in config.rows.split(",")]
    for name, (N, K) in tqdm(LAYERS.items(), unit="layer", desc=config.format):
        row = {"part": "kernels", "format": config.format, "layer": name, "N": N, "K": K}
        try:
            first = make_layer(config.format, N, K, config.group_size)
            row |= {"weight_bytes": first.weight_bytes} | check_layer(first, K, rows)
            copies = max(2, -(-config.rotate_mb * 10**6 // first.weight_bytes))
            layers = [first] + [
                make_layer(config.format, N, K, config.group_size) for _ in range(copies - 1)
            ]
        except Exception as error:  # whatever it is, it belongs in the record
            yield row | failure(error)
            torch.cuda.synchronize()  # raises where the device is lost
            continue
        for M in rows:
            yield row | {"M": M} | time_layers(layers, M, K, config.replays, ceiling)
            torch.cuda.synchronize()
        del layers, first


def failure(error: Exception) -> dict:
    """What to write down of an error: its kind and first line."""
    return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


def time_layers(layers: list[Layer], M: int, K: int, replays: int, ceiling: float) -> dict:
    """Time M rows, the layers in turn."""
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    calls = [lambda product=layer.product: product(x) for layer in layers]
    return time_calls(calls, layers[0].weight_bytes, replays, ceiling)


def time_calls(
    calls: list[Callable[[], object]], read_bytes: int, replays: int, ceiling: float
) -> dict:
    """Time calls that read `read_bytes` each."""
    try:
        times = graph_times_s(calls, replays)
    except Exception as error:  # whatever it is, it belongs in the record
        return failure(error)
    middle = statistics.median(times)
    share = read_bytes / middle / ceiling
    return {"time_us": middle * 1e6, "spread_us": (max(times) - min(times)) * 1e6, "share": share}


class Contest(NamedTuple):
    """One of the other kernels at one shape, beside its peers."""

    read_bytes: int  # that it must read; written ones too where it moves them
    methods: dict[
        str, list[Callable[[], object]]
    ]  # calls over different data; the first method is ours
    error: Callable[[], float]  # of ours against the reference, relative


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def attention_contest(name: str, length: int, T: int, rotate_bytes: int) -> Contest:
    """T rows over `length` slots and themselves, as a causal window."""
    heads, kv_heads = HEADS[name]
    used = length + T
    read_bytes = 2 * 2 * kv_heads * used * 128
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(1, T, heads, 128, **options)
    start = torch.tensor([length], device="cuda")
    mask = torch.ones(1, T, T, device="cuda").tril().bool()
    visible = F.pad(mask, (length, 0), value=True)  # [1, T, used]
    copies = max(2, -(-rotate_bytes // read_bytes))
    caches = [torch.randn(2, 1, kv_heads, CAPACITY, 128, **options) for _ in range(copies)]
    methods = {
        "ours": [
            lambda k=k, v=v: ops.attention.tree_attention(q, k, v, start, mask) for k, v in caches
        ],
        "masked": [
            lambda k=k, v=v: ops.attention._tree_attention_masked(q, k, v, start, mask)
            for k, v in caches
        ],
        "cut": [
            lambda k=k, v=v: ops.attention._attend(q, k[:, :, :used], v[:, :, :used], visible)
            for k, v in caches
        ],
    }

    def error() -> float:
        k, v = (t.clone() for t in caches[0])
        want = ops.attention.tree_attention_reference(q.float(), k, v, start, mask)
        k[:, :, used:] = v[:, :, used:] = float("nan")
        return relative_error(ops.attention.tree_attention(q, k, v, start, mask), want)

    return Contest(read_bytes, methods, error)


def compact_contest(kv_heads: int) -> Contest:
    """The rows of a path to their places, in all layers."""
    config = ModelConfig(128 * kv_heads, CACHE_LAYERS, kv_heads, kv_heads, 128, 1, 1)
    path = torch.tensor([PATH], device="cuda")
    starts = [
        torch.tensor([slot], device="cuda") for slot in range(0, CAPACITY - PATH[-1], PATH[-1] + 1)
    ]
    cache = KVCache.empty(config, 1, CAPACITY, torch.bfloat16, path.device.type)
    buffers = [*cache.k, *cache.v]
    for buffer in buffers:
        buffer.normal_()
    loop = torch.compile(ops.compact.compact_reference, fullgraph=True, dynamic=False)
    methods = {
        "ours": [lambda s=s: cache.compact(s, path) for s in starts],
        "torch": [lambda s=s: loop(buffers, s, path) for s in starts],
    }

    def error() -> float:
        want = [b.clone() for b in buffers]
        ops.compact.compact_reference(want, starts[1], path)
        cache.compact(starts[1], path)
        return float(not all(torch.equal(*pair) for pair in zip(buffers, want)))  # bits are moved

    return Contest(2 * 2 * CACHE_LAYERS * kv_heads * (len(PATH) - 1) * 128 * 2, methods, error)


def topk_contest(V: int, rows: int, rotate_bytes: int) -> Contest:
    """The 10 best and the logsumexp of every row."""
    read_bytes = 4 * rows * V
    copies = max(2, -(-rotate_bytes // read_bytes))
    scores = [torch.randn(1, rows, V, device="cuda") for _ in range(copies)]
    methods = {
        "ours": [lambda s=s: ops.topk.topk_logsumexp(s, 10) for s in scores],
        "torch": [lambda s=s: ops.topk.topk_logsumexp_reference(s, 10) for s in scores],
    }

    def error() -> float:
        values, index, total = ops.topk.topk_logsumexp(scores[0], 10)
        best, _, logsumexp = ops.topk.topk_logsumexp_reference(
            scores[0], 10
        )  # indices of ties may differ
        pairs = ((values, best), (scores[0].gather(-1, index), best), (total, logsumexp))
        return max(relative_error(*pair) for pair in pairs)

    return Contest(read_bytes, methods, error)


class Stack(NamedTuple):
    """The weights of a layer's experts, and how rows are multiplied by them."""

    product: Callable[[Tensor, Tensor], Tensor]  # [P, K] bfloat16, from ops.experts.route -> [P, N]
    reference: Callable[[Tensor, int], Tensor]  # [M, K] fp32, an expert -> [M, N]
    every: (
        Callable[[Tensor, Tensor], Tensor] | None
    )  # [P, K] bfloat16, [P] int64 -> [P, N], by torch
    expert_bytes: int


def make_stack(form: str, N: int, K: int, group: int) -> Stack:
    """Random weights of every expert. group: of int4 scales."""
    if form == "bf16":
        w = torch.randn(EXPERTS, N, K, dtype=torch.bfloat16, device="cuda")
        return Stack(
            lambda x, routing: ops.experts.experts_linear(x, w, routing), lambda x, e: x @ w[e].float().T,
            lambda x, expert: ops.experts.experts_linear_reference(x, w, expert), w[0].nbytes,
        )  # fmt: skip
    parts = [random_packed(form, N, K, group) for _ in range(EXPERTS)]
    packed, scale = (torch.stack(both) for both in zip(*parts))
    del parts  # gigabytes
    product, reference = PRODUCTS[form]
    return Stack(
        lambda x, routing: product(x, packed, scale, routing), lambda x, e: reference(x, packed[e], scale[e]),
        None, packed[0].nbytes + scale[0].nbytes,
    )  # fmt: skip


def experts_contest(form: str, layer: str, tokens: int, group: int, rotate_bytes: int) -> Contest:
    """Rows of `tokens` tokens, each with different experts chosen at random, through one of Mixtral's products."""
    N, K = EXPERT_LAYERS[layer]
    expert = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices.flatten()  # [P]
    x = torch.randn(len(expert), K, dtype=torch.bfloat16, device="cuda")
    first = make_stack(form, N, K, group)
    read_bytes = len(expert.unique()) * first.expert_bytes
    copies = max(2, -(-rotate_bytes // read_bytes))
    stacks = [first] + [make_stack(form, N, K, group) for _ in range(copies - 1)]
    methods = {
        "ours": [lambda s=s: s.product(x, ops.experts.route(expert, EXPERTS)) for s in stacks]
    }
    if first.every is not None:
        methods["torch"] = [lambda s=s: s.every(x, expert) for s in stacks]

    def error() -> float:
        want = x.new_empty(len(x), N, dtype=torch.float32)
        for e, rows in ops.experts.rows_by_expert(expert):
            want[rows] = first.reference(x[rows].float(), e)
        return relative_error(first.product(x, ops.experts.route(expert, EXPERTS)), want)

    return Contest(read_bytes, methods, error)


def contests(config: BenchConfig) -> list[tuple[str, int, Callable[[], Contest]]]:
    """Those that were asked for: name, rows, and what makes it when its turn comes."""
    rotate_bytes = config.rotate_mb * 10**6
    if config.format == "compact":
        name = f"compaction, {CACHE_LAYERS} layers of %d heads"
        return [(name % heads, len(PATH), partial(compact_contest, heads)) for heads in CACHE_HEADS]
    if config.format == "topk":
        return [
            (f"top-10 of {V}", M, partial(topk_contest, V, M, rotate_bytes))
            for V in VOCABULARIES
            for M in (1, 10)
        ]
    if config.format == "experts":
        return [
            (f"experts {form} {layer}", M, partial(experts_contest, form, layer, M, config.group_size, rotate_bytes))
            for form in EXPERT_FORMATS for layer in EXPERT_LAYERS for M in EXPERT_TOKENS
        ]  # fmt: skip
    return [
        (f"attention {name}, {length} slots", M, partial(attention_contest, name, length, M, rotate_bytes))
        for name in HEADS for length in map(int, config.lengths.split(",")) for M in map(int, config.rows.split(","))
    ]  # fmt: skip


def measure_cycle(config: BenchConfig, ceiling: float) -> Iterator[dict]:
    """Yield a row for each contest and method; one that fails holds `error`."""
    for name, M, make in tqdm(contests(config), unit="shape", desc=config.format):
        row = {"part": "kernels", "format": config.format, "kernel": name, "M": M}
        try:
            contest = make()
            error = contest.error()
        except Exception as error:  # whatever it is, it belongs in the record
            yield row | {"method": "ours"} | failure(error)
            torch.cuda.synchronize()  # raises where the device is lost
            continue
        row |= {
            "read_bytes": contest.read_bytes,
            "relative_error": error,
            "correct": error < TOLERANCE,
        }
        for method, calls in contest.methods.items():
            yield (
                row
                | {"method": method}
                | time_calls(calls, contest.read_bytes, config.replays, ceiling)
            )
            torch.cuda.synchronize()
        del contest, calls  # gigabytes of caches


def cycle_summary(rows: list[dict]) -> str:
    """A Markdown table of the other kernels, then what went wrong."""
    lines = [
        "| kernel | rows | ours | torch, whole cache | torch: cut, loop, top-k, all experts |",
        "|---|---|---|---|---|",
    ]
    cells = {
        (r["kernel"], r["M"], r["method"]): f"{r['time_us']:.1f} us, {r['share']:.0%}"
        for r in rows
        if "time_us" in r
    }
    for kernel, M in dict.fromkeys((r["kernel"], r["M"]) for r in rows):
        ours, masked = (cells.get((kernel, M, method), "") for method in ("ours", "masked"))
        peer = cells.get((kernel, M, "cut")) or cells.get((kernel, M, "torch"), "")
        lines.append(f"| {kernel} | {M} | {ours} | {masked} | {peer} |")
    wrong = {f"{r['kernel']} {r['M']}" for r in rows if not r.get("correct", True)}
    lines += [f"\nwrong: {', '.join(sorted(wrong)) or 'none'}"]
    return "\n".join(
        lines
        + [
            f"failed: {r['kernel']} {r['M']} {r['method']}: {r['error']}"
            for r in rows
            if "error" in r
        ]
    )


def totals(timed: dict[tuple[str, str, int], dict], form: str) -> str:
    """All layers of a format together: share of the ceiling, and time over that of the fewest rows."""
    parts, first_us = [], 0.0
    for M in sorted({M for name, _, M in timed if name == form}):
        rows = [timed[form, layer, M] for layer in LAYERS if (form, layer, M) in timed]
        if len(rows) == len(LAYERS):
            time_us = sum(row["time_us"] for row in rows)
            share = sum(row["share"] * row["time_us"] for row in rows) / time_us
            first_us = first_us or time_us
            parts.append(f"{M} rows {share:.0%}, {time_us / first_us:.2f} x")
    return "; ".join(parts) or "not measured"


def summary(rows: list[dict]) -> str:
    """A Markdown table of the formats: microseconds, and the share of the copy bandwidth; then what went wrong."""
    timed = {(r["format"], r["layer"], r["M"]): r for r in rows if "time_us" in r}
    forms = [form for form in FORMATS if any(row["format"] == form for row in rows)]
    lines = [f"| layer | rows | {' | '.join(forms)} |", f"|---|---|{'---|' * len(forms)}"]
    for layer in LAYERS:
        for M in sorted({M for _, name, M in timed if name == layer}):
            found = [timed.get((form, layer, M)) for form in forms]
            cells = [f"{r['time_us']:.1f} us, {r['share']:.0%}" if r else "failed" for r in found]
            lines.append(f"| {layer} | {M} | {' | '.join(cells)} |")
    lines += ["", *(f"{form}, all layers: {totals(timed, form)}" for form in forms)]
    wrong = [
        f"{r['format']} {r['layer']}"
        for r in rows
        if not r.get("correct", True) or not r.get("same_bits", True)
    ]
    failed = [
        f"{r['format']} {r['layer']} {r.get('M', '')}: {r['error']}" for r in rows if "error" in r
    ]
    lines += [f"\nwrong, or rows depend on others: {', '.join(sorted(set(wrong))) or 'none'}"]
    return "\n".join(lines + [f"failed: {line}" for line in failed])


def bench(config: BenchConfig) -> None:
    """Measure one format."""
    if not torch.cuda.is_available():
        raise ValueError("this machine or this torch has no CUDA device; run it on one that has")
    torch.backends.cuda.matmul.allow_tf32 = False
    ceiling = copy_bandwidth()
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceiling_bytes_per_s": ceiling,
    }
    print(
        f"# {facts['device']}, torch {torch.__version__}, copy {ceiling / 1e9:.0f} GB/s, {config.format}",
        flush=True,
    )
    well = True
    for row in (measure_cycle if config.format in CYCLE else measure)(config, ceiling):
        well &= row.get("correct", True) and row.get("same_bits", True) and "error" not in row
        if config.json:
            with open(config.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row | facts) + "\n")
        tqdm.write(
            json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}),
            sys.stdout,
        )
    if not well:
        sys.exit(1)


def main() -> None:
    config = parse(BenchConfig, "kernels.py", __doc__)
    with one_line_errors("kernels.py"):
        bench(config)


if __name__ == "__main__":
    main()
