"""Cycles that read the clock between their steps, also inside captured graphs."""

from __future__ import annotations

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
