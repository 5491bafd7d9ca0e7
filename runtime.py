"""Run steps: compiled, captured as CUDA graphs, their reports copied late.

1. `compiled` wraps torch.compile for the parts of a decode cycle.
2. A captured step (`Replay`) reads and writes buffers at fixed addresses, so its body ends by
   copying results into them. The first runs of a body are not captured: they compile and load
   modules, which fails inside a capture.
3. `HostCopy` starts a copy into pinned memory after the cycle that was launched, and waits for
   that copy alone, a cycle later. The next replay may overwrite its source: the copy comes first in
   the stream.

Elsewhere a `Replay` runs its body, so that the same path is tested without a GPU.
Trade-off: one graph per preset, instead of conditional nodes inside one: a switch picks a graph.
Not here: the cycle (decode.py); the C++ operators that run on a CPU (backends/cpp/).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from options import log_note, one_line, require

WARM_UPS = 2  # runs before a capture
OPTIONS = {
    # round to bf16 where eager code does, or steps of different sizes give different bits
    "emulate_precision_casts": True,
    # no sizes of reductions that are chosen by timing: other sizes, other bits
    "deterministic": True,
    # fewer launches: small kernels that do not depend on each other become one
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
}


def pick_device(name: str) -> str:
    """Check a device name, or choose one. Raises: ValueError when there is no such device."""
    if not name:
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = re.fullmatch(r"(cpu|cuda)(:\d+)?", name)
    require(known is not None, f"--device must be cpu or cuda; it is {name}")
    if name.startswith("cuda"):
        fault = f"--device {name}: this machine or this torch has no CUDA device; use cpu"
        require(torch.cuda.is_available(), fault)
        last = torch.cuda.device_count() - 1
        fault = f"--device {name}: the last CUDA device here is cuda:{last}; use it, or fewer ranks"
        require((torch.device(name).index or 0) <= last, fault)
    return name


class Replay:
    """A step over fixed buffers: a CUDA graph once it is warm, elsewhere run as it is.

    A step whose capture fails runs uncaptured. Other steps are captured all the same.
    """

    def __init__(
        self,
        body: Callable[[], Any],
        device: torch.device,
        scratch: dict[str, Any] | None = None,
    ):
        """scratch: memory shared by graphs that return nothing and are dropped together"""
        self.body = body
        self.device = device
        self.scratch = {} if scratch is None else scratch
        self.runs = 0
        self.captures = device.type == "cuda"
        self.capture_failed = False
        self.graph = None
        self.result = None

    def __call__(self) -> Any:
        """Run it. Returns: the body's result; from a graph in the same tensors every time."""
        self.runs += 1
        if self.captures and self.runs == WARM_UPS + 1:
            self._capture()
        if self.graph is None:
            self.result = self.body()
        else:
            self.graph.replay()
        return self.result

    def _capture(self) -> None:
        """Record the body without running it. If that fails, say why. Writes: the graph."""
        graph = torch.cuda.CUDAGraph()
        returns_nothing = self.result is None  # as the warm-ups have shown
        pool = self.scratch if returns_nothing else {}
        torch.cuda.synchronize(self.device)
        try:
            # `outer` restores the stream, as the inner context does not after a broken capture
            outer = torch.cuda.stream(torch.cuda.current_stream(self.device))
            with outer, torch.cuda.graph(graph, capture_error_mode="thread_local", **pool):
                self.result = self.body()
            self.graph = graph
            if returns_nothing:
                self.scratch.setdefault("pool", graph.pool())
        # of the body, or of the end of a capture that the body's own error has broken
        except Exception as error:
            self.result = None
            self.capture_failed = True
            self.scratch.clear()  # the broken capture may hold its pool
            note = "a step runs uncaptured, and slower, since its capture as a CUDA graph failed"
            log_note(f"{note}: {one_line(error.__context__ or error, 200)}")


def tensors_of(record: Any) -> list[Tensor]:
    """List the tensors of nested tuples, in order; None and numbers have none."""
    if isinstance(record, Tensor):
        return [record]
    if isinstance(record, int):
        return []
    return [leaf for part in record or () for leaf in tensors_of(part)]


def replace_fields(record: Any, **fields: Any) -> Any:
    """Copy a NamedTuple with other values in some fields.

    `_replace` does the same, but torch 2.11 compiles it to an empty tuple.
    """
    return type(record)(*[fields.get(name, value) for name, value in zip(record._fields, record)])


def copy_into(buffers: Any, values: Any) -> None:
    """Copy every tensor of `values` into its buffer, unless it is the buffer. Writes: buffers."""
    old = tensors_of(buffers)
    new = tensors_of(values)
    assert len(old) == len(new), (len(old), len(new))
    for buffer, value in zip(old, new):
        if buffer is not value:
            buffer.copy_(value)


def sequences_of(record: Any, rows: range) -> Any:
    """View some sequences of nested tuples of tensors and caches: [B, ...] -> [rows, ...]."""
    if hasattr(record, "sequences"):
        return record.sequences(rows)
    if isinstance(record, Tensor):
        return record[rows.start : rows.stop]
    return type(record)(*(sequences_of(part, rows) for part in record))


def sequence_of(record: Any, seq: int) -> Any:
    """View one sequence of nested tuples of tensors and caches: [B, ...] -> [1, ...]."""
    return sequences_of(record, range(seq, seq + 1))


class HostCopy:
    """Small tensors on their way to the host."""

    def __init__(self, *tensors: Tensor):
        # pinned on CUDA, from blocks that the allocator reuses as soon as their copies are done
        self.host = [x.to("cpu", non_blocking=True) for x in tensors]
        self.arrived = None
        if tensors and tensors[0].is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[list]:
        """Wait for the copies, not for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [x.tolist() for x in self.host]


# ---------------------------------------------------------------------------------------- compiling


def compiled(step: Callable) -> Callable:
    """Compile a step, `fullgraph=True`, for the shapes that it first meets."""

    def body(*inputs: Any) -> Any:
        return step(*inputs)

    # a code object of its own: Dynamo counts compilations per code object and stops at a limit,
    # which many engines in one process would reach together
    name = getattr(step, "__name__", type(step).__name__)
    code = body.__code__.replace(co_name=f"{name}_{next(_compiled)}")
    own = FunctionType(code, body.__globals__, code.co_name, None, body.__closure__)
    options = OPTIONS | {"guard_filter_fn": _guards_of_modes}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


_compiled = itertools.count()


def compiled_by_layer(cycle: Any) -> Any:
    """Compile the steps of a `decode.Cycle`, and one layer of each kind; all layers reuse it.

    One graph of everything takes many times as long to compile. In a captured cycle, a call per
    layer costs nothing. Writes: the cycle. Returns: it.
    """
    for name in ("draft", "place", "decide", "extend"):
        setattr(cycle, name, compiled(getattr(cycle, name)))
    target = cycle.target
    embed = compiled(target.embed)
    # by their steps: no guard would tell dense layers and mixtures apart
    by_steps = {layer.steps: compiled(cycle.run_part) for layer in target.parts}

    def run_part(part: Callable, *inputs: Any) -> Any:
        return embed(*inputs) if part == target.embed else by_steps[part.steps](part, *inputs)

    cycle.run_part = run_part
    cycle.in_place = True
    return cycle


def _guards_of_modes(guards: Sequence[Any]) -> list[bool]:
    """Keep Dynamo's guards of modes such as autocast, which a caller may change, and no others.

    Modules, options and the shapes of buffers are an engine's own and stay as they are. Checking
    modules took 0.3 ms a step at 8 layers, and tensors 0.1 ms a cycle. Compiled code asserts the
    sizes of its arguments anyway.
    """
    return [guard.guard_type == "GLOBAL_STATE" for guard in guards]
