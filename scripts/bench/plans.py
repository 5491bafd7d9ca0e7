"""Time plans of our matmuls on a GPU; write the fastest, which decoding loads.

Each matmul of a layer, with the work behind it in the same launch (backends/triton/epilogues.py):
the splits first, one number for all rows, then the tile for 1, 32 and 64 rows (`choose`). A tile
whose result has other bits than the estimated one's is refused. Each plan takes about half a second
to compile, and is timed alone: medians in captured graphs over 200 MB of different weights, as in
operators.py. The table is written behind every matmul; in backends/triton/measured/, under the name
of the device, it holds for all later runs on such a GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.epilogues import PART, LazyMatmul
from backends.triton.attention import COUNTERS
from backends.triton.epilogues import Gpu, add_product, rotary_product
from backends.triton.launch import Device, device_of
from backends.triton.plans import (
    FOLDER,
    HEIGHTS,
    MAX_SPLITS,
    MeasuredProduct,
    Tile,
    file_name,
    key_of,
    to_json,
)
from backends.triton.qmatmul import ProductPlan, plan_product, run_product
from files.io import write_text
from runtime import tensors_of
from scripts.bench.cases import PlansOptions
from scripts.bench.operators import Rotated, bytes_of, copies_of, copy_of, require_cuda, weight_of

LAYERS = {  # of a 7B: outputs and inputs
    "wqkv": (12288, 4096),
    "wo": (4096, 4096),
    "w13": (22016, 4096),
    "w2": (4096, 11008),
    "head": (32000, 4096),
}
EPILOGUES = {"wqkv": "rotary", "wo": "add", "w13": "swiglu", "w2": "add", "head": "fp32"}
FORMATS = {"bf16": (16, 0), "int4-128": (4, 128)}  # bits and group
TIMES = 5  # that a plan is timed
ROWS_OF = {16: 1, 32: 32, 64: 64}  # rows of x that are timed, by the height of a tile
TILES = tuple(Tile(rows, stages) for rows in (64, 128) for stages in (3, 4, 6, 8))


class LayerShape(NamedTuple):
    """A product of a layer."""

    form: str  # of FORMATS
    layer: str
    N: int
    K: int

    @property
    def epilogue(self) -> str:
        return EPILOGUES[self.layer]

    @property
    def key(self) -> str:
        """The name in the table."""
        return key_of(self.N, self.K, *FORMATS[self.form], self.epilogue)

    def estimate(self, height: int, device: Device) -> ProductPlan:
        """Return the plan that holds without a table."""
        bits, group = FORMATS[self.form]
        sizes = (ROWS_OF[height], self.N, self.K, bits, group)
        return plan_product(*sizes, torch.bfloat16, device._replace(name=""), self.epilogue)

    def tiles(self, height: int, device: Device) -> list[Tile]:
        """List the tiles, the estimated one first. Some may not fit the device: they fail."""
        estimate = self.estimate(height, device)
        first = Tile(estimate.rows, estimate.stages)
        return [first, *(tile for tile in TILES if tile != first)]

    def splits(self, device: Device) -> list[int]:
        """List the numbers of splits, the estimated one first."""
        estimate = self.estimate(16, device).splits
        if self.epilogue == "swiglu":
            return [1]
        return [estimate, *(n for n in (1, 2, 3, 4, 6, MAX_SPLITS) if n != estimate)]


# microseconds of a product of some rows by a plan; infinite for one that fails
TimeOf = Callable[[ProductPlan, int], float]


def plan_of(height: int, tile: Tile, splits: int) -> ProductPlan:
    """Return the plan that plans.py makes of an entry of the table."""
    return ProductPlan(height, tile.rows, splits, tile.stages, tile.rows // 16)


def choose(shape: LayerShape, device: Device, time_of: TimeOf) -> MeasuredProduct:
    """Choose the splits by the times of 1 and 32 rows together, then each tile by its own time."""

    def time_of_splits(splits: int) -> float:
        plans = {h: shape.estimate(h, device)._replace(splits=splits) for h in (16, 32)}
        return sum(time_of(plan, ROWS_OF[height]) for height, plan in plans.items())

    splits = min(shape.splits(device), key=time_of_splits)
    chosen = {}
    for height in HEIGHTS:
        plans = {tile: plan_of(height, tile, splits) for tile in shape.tiles(height, device)}
        times = {tile: time_of(plan, ROWS_OF[height]) for tile, plan in plans.items()}
        chosen[height] = min(times, key=times.__getitem__)
    return MeasuredProduct(splits, chosen)


def shapes_of() -> list[LayerShape]:
    """List the products, format by format."""
    return [LayerShape(form, layer, *LAYERS[layer]) for form in FORMATS for layer in LAYERS]


# ------------------------------------------------------------------------------------- on a device


class Timer:
    """Times the products of a shape on this GPU."""

    def __init__(self, shape: LayerShape, device: Device, torch_device: str = "cuda"):
        """Make the weights: gigabytes."""
        self.shape = shape
        self.torch_device = torch_device
        # launches that are timed follow each other, as in one stream
        self.done = torch.zeros(COUNTERS, dtype=torch.int32, device=torch_device)
        self.gpu = Gpu(device, self.done)
        first = weight_of(shape.form, shape.N, shape.K, torch_device)
        count = copies_of(bytes_of(first))
        self.weights = [parts_of(copy_of(first)) for _ in range(count)]
        self.inputs: dict[int, Tensor] = {}  # by rows
        self.results: dict[tuple, list[Tensor]] = {}  # by rows and splits

    def __call__(self, plan: ProductPlan, rows: int) -> float:
        """Time a plan, and compare its result."""
        try:
            return self._time(plan, rows)
        except Exception as error:  # a plan that does not compile or launch is a result
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            print(f"{self.shape.key}, {rows} rows, {plan}: {reason}", flush=True)
            torch.cuda.synchronize()  # raises where the device is lost
            return float("inf")

    def _time(self, plan: ProductPlan, rows: int) -> float:
        call = self._call(plan, rows)
        calls = [partial(call, *weights) for weights in self.weights]
        rotated = Rotated(calls, self.torch_device)
        us = statistics.median(rotated.seconds() for _ in range(TIMES)) * 1e6
        result = tensors_of(calls[0]())
        first = self.results.setdefault((rows, plan.splits), result)
        if not all(map(torch.equal, first, result)):
            raise ValueError("its bits differ from those of the first plan with these splits")
        return us

    def _call(self, plan: ProductPlan, rows: int) -> Callable:
        """Return the product of some rows, as a layer runs it, as a function of the weights."""
        shape = self.shape
        options = {"device": self.torch_device, "dtype": torch.bfloat16}
        x = self.inputs.setdefault(rows, torch.randn(1, rows, shape.K, **options))
        fp32 = options | {"dtype": torch.float32}
        squares = torch.ones(math.ceil(shape.K / PART), rows, **fp32)  # the norm in front
        if shape.epilogue == "add":
            stream = torch.ones(1, rows, shape.N, **options)
            norm = torch.ones(shape.N, **options)
            return lambda weight, scale: add_product(
                LazyMatmul(x, None, weight, scale), stream, norm, 1e-5, self.gpu, plan
            )
        if shape.epilogue == "rotary":  # as many heads of keys as of queries
            rope = (torch.ones(1, rows, 1, 128, **fp32),) * 2
            cache = torch.zeros(2, 1, shape.N // 384, rows, 128, **options)
            slots = torch.arange(rows, device=self.torch_device)[None]
            given = (rope, *cache, slots, (None, None, 0.0), self.gpu, plan)
            return lambda weight, scale: rotary_product(
                LazyMatmul(x, squares, weight, scale), *given
            )
        given = (plan, shape.epilogue)
        if shape.epilogue == "swiglu":
            given += (squares,)
        return lambda weight, scale: run_product(x, weight, scale, *given)


def parts_of(weight: Any) -> tuple[Tensor, Tensor | None]:
    """Return words and scales, as `run_product` takes them."""
    if isinstance(weight, Tensor):
        return weight, None
    return weight.data, weight.scale


# ------------------------------------------------------------------------------------- the command


def run(config: PlansOptions) -> None:
    """Time, print, write the table."""
    require_cuda()
    device = device_of(torch.cuda.current_device())
    file = Path(config.out) if config.out else FOLDER / file_name(device.name)
    chosen_plans: dict[str, MeasuredProduct] = {}
    for shape in shapes_of():
        time_of = Timer(shape, device)
        chosen = choose(shape, device, time_of)
        print(f"{shape.key}: {chosen}", flush=True)
        if math.isfinite(time_of(plan_of(16, chosen.tiles[16], chosen.splits), ROWS_OF[16])):
            chosen_plans[shape.key] = chosen
        write_text(str(file), to_json(device.name, chosen_plans))
        del time_of  # gigabytes
    print(f"{file}: {len(chosen_plans)} matmuls")
