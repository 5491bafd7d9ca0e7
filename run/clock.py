"""A session's clock, and cycles that read it between their steps.

A backend may have other ones. Cycles read the clock inside captured graphs, too.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from decode import REPORT, Cycle, CycleResult, DecodeState
from draft_tree import DrafterUpdate
from kv_cache import KVCache

TIMES = ("began", "drafted", "verified", "ended")  # the last columns of a report (ns)


class TimedCycle(Cycle):
    """A cycle whose report ends with the times before, between and after its steps."""

    def __call__(
        self, cache: KVCache, state: DecodeState
    ) -> tuple[DecodeState, DrafterUpdate, Tensor]:
        """Run the three steps, timed. Returns: as `Cycle`; the report is [B, D+9] int64."""
        now = self.backend.device_time
        device = state.pos.device
        times = [now(device)]
        tree, noise = self.draft(cache, state)
        times.append(now(device))
        state, update, report = self.verify(cache, state, tree, noise)
        times.append(now(device))
        state = self.extend(state, update)
        times.append(now(device))
        return state, update, self.backend.with_times(report, times)


class TimedResult(CycleResult):
    """The result of a `TimedCycle`."""

    columns = len(REPORT) + len(TIMES)
    times: dict[str, int]  # before, between and after the steps (ns), by `TIMES`

    def read(self) -> None:
        super().read()
        self.times = dict(zip(TIMES, self.rows[-1][-len(TIMES) :], strict=True))


def with_times(report: Tensor, times: list[Any]) -> Tensor:
    """Append the times of a cycle's steps, by `TIMES`, [B, D+9] int64."""
    columns = [torch.as_tensor(time).expand(len(report), 1) for time in times]
    return torch.cat((report, *columns), 1)


def device_time(device: torch.device) -> Tensor | int:
    """Read the clock in ns, after the work that was launched; only differences count.

    A number of the host's clock; on CUDA, where a step that is captured cannot read that, 0.
    """
    if device.type == "cuda":
        return torch.zeros((), dtype=torch.int64, device=device)
    return time.perf_counter_ns()
