"""The report of a cycle, and observers: objects on the host that watch decoding.

    next_preset, before_step --> cycle --> host_tensors --> after_cycle ... finished

1. Before a cycle the engine's own observer, its policy, picks the preset that runs. Every observer
   may prepare it.
2. Behind a cycle an observer names tensors that the host shall read; later, on CUDA a cycle later,
   it gets them with the report.
3. When a turn ends it gets the text.

An observer changes the speed, or notes something; it never changes a token. It reads a `View`, not
the session. Guides, which mask tokens, are a protocol of their own (`decode.Guide`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from draft_tree import DrafterUpdate
from run.tree_paths import DraftLimit
from runtime import HostCopy

REPORT = ("count", "length", "done", "pos")  # columns of a cycle's report


class CycleResult:
    """A cycle that the host has launched, and its report, once `read`.

    The report is one tensor, [B, D+9] int64: D+1 decided tokens, then the columns named below, then
    the times (`decode.timed_report`; on a CPU `advance` in backends/cpp/tree.cpp).
    """

    EMITTED = slice(0, -8)
    COLUMNS = slice(-8, -4)  # `REPORT`
    TIMES = slice(-4, None)

    # per sequence up to the last that ran, once read; those before the first that ran are empty:
    emitted: list[list[int]]  # D+1 decided tokens (bonus last); entries past `length` are padding
    count: list[int]  # tokens left of them after cuts; 0: the sequence was done before
    length: list[int]  # accepted nodes
    # 1: the sequence is finished; 2, 3: numbers on the accepted path are not finite
    done: list[int]
    pos: list[int]  # index of the root that was verified
    times: list[int]  # of all: ns before, between and after the steps
    seconds: float  # of the cycle
    live: list[int]  # the sequences that decoded
    taken: dict[int, list[int]]  # their new tokens, of those whose numbers are finite

    def __init__(
        self,
        report: Tensor,
        preset: int,
        began: float,
        further: Sequence[tuple[Tensor, ...]] = (),
        rows: range | None = None,
    ):
        """Begin to copy the report.

        report: of `decode.timed_report`; preset: the one that ran; began: the host's clock (s)
        further: tensors of each observer, which are read with it
        rows: the sequences that ran; None: all
        """
        self.preset = preset
        self.rows = range(len(report)) if rows is None else rows
        self.began = began
        self.sizes = list(map(len, further))
        self.copy = HostCopy(report, *(tensor for own in further for tensor in own))

    def read(self, by_device: bool = False) -> CycleResult:
        """Wait for the copy, and set the fields.

        by_device: take the cycle's time from the device's clock, because the host runs ahead
        """
        report, *columns = self.copy.read()
        self.times = report[0][self.TIMES]
        report = [[0] * len(report[0])] * self.rows.start + report
        self.further = [[columns.pop(0) for _ in range(size)] for size in self.sizes]
        self.emitted = [row[self.EMITTED] for row in report]
        columns = zip(*(row[self.COLUMNS] for row in report))
        facts = dict(zip(REPORT, map(list, columns), strict=True))
        self.count = facts["count"]
        self.length = facts["length"]
        self.done = facts["done"]
        self.pos = facts["pos"]
        self.seconds = (self.times[-1] - self.times[0]) / 1e9
        if not (by_device and self.seconds):
            self.seconds = time.perf_counter() - self.began
        return self


class View:
    """The part of a session that observers may read, and the steps that they may run."""

    def __init__(
        self,
        engine: Any,
        history: list[list[int]],
        live: list[bool],
        draft_limits: list[DraftLimit],
        drafter_state: Callable[[], Any],
        run_step: Callable[[Hashable, Callable], Any],
    ):
        """engine: `decode.Engine`

        history: every token of each sequence; during prefill, the cached part
        live: whether each sequence decodes
        draft_limits: of the trees that each takes
        drafter_state: returns the state that the drafters share
        run_step: runs a function of the `DecodeState`, which it may write in place; the key tells
            steps apart
        """
        self.presets = engine.presets  # smallest tree first
        # whether a cycle may run a part of the sequences; CUDA's kernels know whole buffers alone
        self.has_parts = engine.device.type == "cpu" and not engine.captured
        self.history = history
        self.live = live
        self.draft_limits = draft_limits
        self._drafter_state = drafter_state
        self.run_step = run_step

    @property
    def drafter_state(self) -> Any:
        """The state that the drafters share, after all cycles that were launched."""
        return self._drafter_state()

    @property
    def rows(self) -> range:
        """The sequences that the next cycle runs: from the first that decodes to the last.

        On CUDA a cycle runs all. Where none decodes, a cycle will run one.
        """
        live = [seq for seq, decodes in enumerate(self.live) if decodes]
        if not self.has_parts:
            return range(len(self.live))
        return range(live[0], live[-1] + 1) if live else range(1)

    @property
    def limit(self) -> int:
        """The largest preset that a cycle may run."""
        limits = [limit for limit, live in zip(self.draft_limits, self.live) if live]
        for number in range(len(self.presets) - 1, 0, -1):
            if any(limit.allows(self.presets[number]) for limit in limits):
                return number
        return 0


class Observer:
    """Watches decoding. This one keeps nothing, and picks the largest preset.

    An engine has one, its policy, and a session the observer that `for_session` returns. A session
    may have further ones, which pick nothing.
    """

    def on_engine_ready(self, engine: Any, time_presets: Callable[[], list[float]]) -> Observer:
        """Return the observer of a warm engine.

        engine: `decode.Engine`; time_presets: returns the seconds of a cycle of each preset
        """
        return self

    def for_session(self) -> Observer:
        """Return the observer of a new session."""
        return self

    def next_preset(self, view: View, reads_prompt: bool) -> int:
        """Pick the preset of the next cycle, or of the next chunk of a prompt."""
        return len(view.presets) - 1 if reads_prompt else view.limit

    def before_step(self, view: View, preset: int) -> None:
        """Run what a preset needs before a step."""

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        """Return tensors that the host shall read after the cycle that was just launched.

        Those of the update have a row for each of `view.rows`.
        """
        return ()

    def after_prompt(self, seq: int, features: Tensor, root: int) -> None:
        """Take the root of a prompt. features: [1, 1, F], that it was chosen from"""

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        """Learn from a cycle. copied: the tensors of `host_tensors`, as lists"""

    def finished(self, text: list[int], begin: int) -> None:
        """Take the text of a turn that is over. begin: index of the answer's first token"""

    def table(self, ran: list[tuple[int, float]]) -> list[dict[str, Any]]:
        """Summarize the presets, for the record; empty without a choice. ran: `Stats.presets`."""
        return []
