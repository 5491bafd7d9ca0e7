"""A session's clock, threads and compiler. A backend may have others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def with_times(report: Tensor, times: list[Any]) -> Tensor:
    """Append the times of a cycle's steps, by `run.clock.TIMES`, [B, D+9] int64."""
    columns = [torch.as_tensor(time).expand(len(report), 1) for time in times]
    return torch.cat((report, *columns), 1)


@contextmanager
def single_thread() -> Iterator[None]:
    """Leave the cores to a backend's own threads, if it has any: here it has none."""
    yield


def device_time(device: torch.device) -> Tensor | int:
    """Read the clock in ns, after the work that was launched; only differences count.

    A number of the host's clock; on CUDA, where a step that is captured cannot read that, 0.
    """
    if device.type == "cuda":
        return torch.zeros((), dtype=torch.int64, device=device)
    return time.perf_counter_ns()


def why_not_compiled(device: torch.device) -> str:
    """Return why nothing makes steps of this device faster, or "". On CUDA torch.compile does."""
    return "" if device.type == "cuda" else "it needs the CPU operators"
