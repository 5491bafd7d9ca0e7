"""One line where a head accepts far less than was published of it: it may not fit its target.

1. Every cycle in which the head drafted counts: the levels of its tree, and the accepted ones.
2. A published tau stands for levels that are accepted with the probability 1 - 1 / tau each, as in
   a chain without end, so that short trees are compared with what they could bring.
3. Once `CYCLES` of them are there, the next end of an answer brings the line, where fewer than half
   of the levels that were due were accepted.

Source: the taus of files/HEADS.md, which are those of their authors' trees and texts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from decode import CycleResult
from draft_tree import DrafterUpdate
from options import log_note
from run.methods import source_of
from run.observer import Observer, View

CYCLES = 200
SHARE = 0.5  # of the levels that are due


class Watched(Observer):
    """Compares the acceptance of a session with a published tau."""

    def __init__(self, engine: Any):
        """engine: `run.engine.Engine`, with a published tau"""
        self.tau = engine.published_tau
        self.rate = 1 - 1 / self.tau
        presets = range(len(engine.presets))
        self.by_head = [source_of(engine, preset) == "head" for preset in presets]
        self.cycles = 0
        self.accepted = 0  # levels
        self.due = 0.0  # levels
        self.over = False  # whether they were compared

    def host_tensors(self, update: DrafterUpdate, view: View) -> tuple[Tensor, ...]:
        if self.over:
            return ()
        return ((update.tree.depths * update.tree.valid).amax(1),)  # [B]

    def after_cycle(self, result: CycleResult, copied: list[list], view: View) -> None:
        if not copied or not self.by_head[result.preset]:
            return
        for seq in result.taken:
            levels = copied[0][seq - result.first]
            if levels:
                self.cycles += 1
                self.accepted += result.length[seq]
                self.due += sum(self.rate**level for level in range(1, levels + 1))

    def finished(self, text: list[int], begin: int) -> None:
        if self.over or self.cycles < CYCLES:
            return
        self.over = True
        if self.accepted < SHARE * self.due:
            own, due = (1 + levels / self.cycles for levels in (self.accepted, self.due))
            published = f"published {self.tau:.1f}, which is {due:.1f} in trees like these"
            doubt = "does the head fit this model, its template, its bits?"
            log_note(f"tau {own:.1f}, {published}: {doubt}")
