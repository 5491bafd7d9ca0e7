"""How steps run: compiled, captured as CUDA graphs, timed from inside, their reports copied to the host late.

1. `compiled` wraps torch.compile for every step of the project that runs on CUDA.
2. A captured step (`Replay`) reads and writes buffers at fixed addresses, so its body ends by storing results where it
   found them. The first runs of a body are not captured: they compile and load what it needs, which fails inside a
   capture.
3. `HostCopy` starts a copy into pinned memory behind the cycle that was launched, and waits for that copy alone when it
   is read, a cycle later. The next replay may overwrite its source: the copy comes first in the stream.
4. `Clock` tells the times between steps, also inside of captured ones.

On other devices a `Replay` runs its body, so that the same path is tested without a GPU.
Trade-off: one graph per preset, instead of conditional nodes inside of one: switching is which graph is launched.
Not here: what a cycle does (decode.py); the C++ operators that --compile means on a CPU (ops/cpu/).
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ops.library import has_cpu_operators, has_triton

WARM_UPS = 2  # runs before a capture
OPTIONS = {
    "emulate_precision_casts": True,  # to bf16 where eager code does, or steps of different sizes give different bits
    "deterministic": True,  # no sizes of reductions that are chosen by timing: other sizes, other bits
}


def use(device: str) -> None:
    """Make a CUDA device the current one, whose bf16 products add partial sums in fp32."""
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = (
            products.allow_fp16_reduced_precision_reduction
        ) = False


class Replay:
    """A step over fixed buffers: captured as a CUDA graph once it is warm, elsewhere run as it is."""

    captures = True  # until a capture fails: its stream and its memory may stay as they were then

    def __init__(
        self, body: Callable[[], Any], device: torch.device, scratch: dict[str, Any] | None = None
    ):
        """scratch: memory that graphs share whose bodies return nothing, and which are dropped together"""
        self.body, self.device, self.runs, self.graph, self.result = body, device, 0, None, None
        self.scratch = {} if scratch is None else scratch

    def __call__(self) -> Any:
        """Run it. Returns: what the body returns; from a graph in the same tensors every time."""
        self.runs += 1
        if (
            self.device.type == "cuda"
            and Replay.captures
            and self.graph is None
            and self.runs > WARM_UPS
        ):
            self._capture()
        if self.graph is None:
            self.result = self.body()
        else:
            self.graph.replay()
        return self.result

    def _capture(self) -> None:
        """Record the body, which does not run. Where that fails, say why; it runs as it is from then on."""
        graph, nothing = (
            torch.cuda.CUDAGraph(),
            self.result is None,
        )  # which the warm-ups have returned
        pool = self.scratch if nothing else {}
        torch.cuda.synchronize(self.device)
        try:
            before = torch.cuda.stream(torch.cuda.current_stream(self.device))
            # `before` restores the stream, as the other context does not where the body has broken the capture
            with before, torch.cuda.graph(graph, capture_error_mode="thread_local", **pool):
                self.result = self.body()
            self.graph = graph
            if nothing:
                self.scratch.setdefault("pool", graph.pool())
        except (
            Exception
        ) as error:  # of the body; or of the end of a capture that the body's own error has broken
            Replay.captures, self.result = False, None
            error = error.__context__ or error
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            print(
                f"note: cycles are not captured and are slower, since a capture failed: {reason}",
                file=sys.stderr,
            )


def tree_leaves(record: Any) -> list[Tensor]:
    """The tensors of nested tuples, in order; None has none."""
    if isinstance(record, Tensor):
        return [record]
    return [leaf for part in record or () for leaf in tree_leaves(part)]


def copy_into(buffers: Any, values: Any) -> None:
    """Copy every tensor of `values` into its buffer. Writes: those that are not the buffer itself."""
    old, new = tree_leaves(buffers), tree_leaves(values)
    assert len(old) == len(new), (len(old), len(new))
    for buffer, value in zip(old, new):
        if buffer is not value:
            buffer.copy_(value)


def sequence_of(record: Any, row: int) -> Any:
    """One row of nested NamedTuples of tensors [B, ...], as views: [1, ...]. A cache says itself what its row is."""
    if hasattr(record, "row"):
        return record.row(row)
    if isinstance(record, Tensor):
        return record[row : row + 1]
    return type(record)(*(sequence_of(part, row) for part in record))


class HostCopy:
    """Small tensors on their way to the host."""

    def __init__(self, *tensors: Tensor):
        # pinned on CUDA, from a ring of blocks that the allocator reuses as soon as their copies are done
        self.host = [x.to("cpu", non_blocking=True) for x in tensors]
        self.arrived = torch.cuda.Event() if tensors[0].is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> list[list]:
        """Wait for the copies, not for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [x.tolist() for x in self.host]


class LargestTree:
    """Chooses the preset that the next cycle runs: the largest. extras/autosize.py has one that learns."""

    prefill_tree = -1  # the preset that takes in prompts

    def next(self, limit: int) -> int:
        """Choose. limit: the largest preset that makes sense now."""
        return limit

    def observe(self, preset: int, accepted: float, seconds: float, rows: int) -> None:
        """Learn from a cycle. accepted: mean length over its rows, the bonus not counted; rows: that decoded"""

    def table(self, ran: list[tuple[int, float]]) -> list[dict[str, Any]]:
        """What the presets did, for the record; nothing where there is no choice. ran: `Stats.presets`."""
        return []


# --------------------------------------------------------------------------------------------- compiling


def compiled(step: Callable) -> Callable:
    """Compile a step, `fullgraph=True`, for the shapes that it first meets."""

    def body(*inputs: Any) -> Any:
        return step(*inputs)

    # a code object of its own: Dynamo counts compilations per code object and stops at a limit, which many engines in
    # one process would reach together
    code = body.__code__.replace(
        co_name=f"{getattr(step, '__name__', type(step).__name__)}_{next(_compiled)}"
    )
    own = FunctionType(code, body.__globals__, code.co_name, None, body.__closure__)
    return torch.compile(
        own, fullgraph=True, dynamic=False, options=OPTIONS | {"guard_filter_fn": _guards_of_modes}
    )


_compiled = itertools.count()


def why_not_compiled(device: str) -> str:
    """Try the compiler on a small step. Returns: why --compile does not work here, or the empty string."""
    if device.startswith("cpu"):  # where it means the C++ operators
        return "" if has_cpu_operators() else "it needs the CPU operators"
    try:
        torch.compile(_probe, fullgraph=True, options=OPTIONS)(torch.ones(2, device=device))
    except (
        Exception
    ) as error:  # whatever a missing or broken compiler raises, it is told and not hidden
        return next(iter(str(error).strip().splitlines()), type(error).__name__)[:120]
    return ""


def say_what_compiles(number: int, presets: Sequence[Any]) -> None:
    """Show on a terminal what is being waited for."""
    if sys.stderr.isatty():
        text = (
            f"compiling {number + 1} of {len(presets)}: {presets[number].name}"
            if number < len(presets)
            else ""
        )
        print(f"\r{text:<60}", end="" if text else "\r", file=sys.stderr, flush=True)


def time_presets(
    time_cycle: Callable[[int], float], presets: Sequence[Any], say: Callable | None
) -> list[float]:
    """Run some cycles of every preset. say: told the number of each, with all of them, and at last how many there are.

    Returns: the time of one (s); the first two after a change do not count.
    """
    times: list[float] = []
    for preset in range(len(presets)):
        if say:
            say(preset, presets)
        times.append(statistics.mean([time_cycle(preset) for _ in range(4)][2:]))
    if say:
        say(len(times), presets)
    return times


def _probe(x: Tensor) -> Tensor:
    return x * 2 + 1


def _guards_of_modes(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards a compiled step keeps: modes such as autocast, which a caller may change.

    Modules, options and the shapes of buffers are an engine's own and stay as they are. Checking modules took 0.3 ms a
    step at 8 layers, and tensors 0.1 ms a cycle; what was compiled asserts the sizes of its arguments anyway.
    """
    return [guard.guard_type == "GLOBAL_STATE" for guard in guards]


# ------------------------------------------------------------------------------------------------- clock


class Clock:
    """Tells the times between the steps of a cycle: by the device's clock on CUDA, else by the host's."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times = [device_time(device)]  # before, between and behind the steps (ns)

    def __call__(self, step: Callable, *inputs: Any) -> Any:
        """Run a step. Returns: what it returns."""
        result = step(*inputs)
        self.times.append(device_time(self.device))
        return result


def device_time(device: torch.device) -> Tensor | int:
    """The time when a device gets here, in ns; only differences mean something.

    On CUDA a kernel reads it, so that captured graphs tell the time too; without Triton it is 0 there.
    """
    if device.type != "cuda":
        return time.perf_counter_ns()
    now = torch.zeros((), dtype=torch.int64, device=device)
    if has_triton():
        import ops.cuda.clock

        with torch.cuda.device(device):
            ops.cuda.clock.read(now)
    return now
