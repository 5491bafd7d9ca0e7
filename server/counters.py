"""Counters of serve.py, in Prometheus' text form.

The batcher's thread writes them; a page may be a step behind.
Source: Prometheus' exposition formats, text format 0.0.4.
"""

from __future__ import annotations

import math
from collections import Counter

from run.stats import Stats

# upper bounds of the time to the first token (s)
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PREFIX = "gpt_eagle_"


class Counters:
    """Everything that has been served since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0  # of prompts, that were not read again
        self.tokens = 0  # of answers
        self.passes = 0  # of the target, for each sequence
        self.accepted = 0  # drafted tokens
        self.ended: Counter[str] = Counter()  # answers by the reason of their end
        self.waits: Counter[float] = Counter()  # first tokens by the least bound above their time
        self.wait_s = 0.0  # sum of the times to the first tokens

    def first_token(self, seconds: float) -> None:
        """Count an answer's first token. seconds: since the answer was asked for"""
        self.wait_s += seconds
        self.waits[next((bound for bound in BOUNDS if seconds <= bound), float("inf"))] += 1

    def step(self, stats: Stats) -> None:
        """Count the cycles of a step."""
        self.passes += len(stats.accept_lengths)
        self.accepted += sum(stats.accept_lengths)

    @property
    def tau(self) -> float:
        """Tokens per pass of the target, the bonus included; NaN before the first."""
        if not self.passes:
            return float("nan")
        return 1 + self.accepted / self.passes

    def page(self, running: int, waiting: int) -> str:
        """Return the text. running, waiting: answers"""
        lines = [
            *_metric("prompt_tokens_total", "counter", "tokens of prompts", self.prompt_tokens),
            *_metric("cached_tokens_total", "counter", "of these, not read", self.cached_tokens),
            *_metric("generated_tokens_total", "counter", "tokens of answers", self.tokens),
            *_metric("passes_total", "counter", "passes of the target, by sequence", self.passes),
            *_metric("accepted_tokens_total", "counter", "accepted drafted tokens", self.accepted),
            *_metric("tau", "gauge", "tokens per pass, since the start", self.tau),
            *_metric("answers_running", "gauge", "answers being decoded", running),
            *_metric("answers_waiting", "gauge", "answers that wait for their turn", waiting),
            *_head("answers_total", "counter", "answers that ended"),
        ]
        for reason in ("stop", "length", "left"):
            lines.append(f'{PREFIX}answers_total{{reason="{reason}"}} {self.ended[reason]}')
        return "\n".join((*lines, *self._histogram(), ""))

    def _histogram(self) -> list[str]:
        name = "time_to_first_token_seconds"
        lines = _head(name, "histogram", "from a request to the first token of an answer")
        total = 0
        for bound in (*BOUNDS, float("inf")):
            total += self.waits[bound]
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f'{PREFIX}{name}_bucket{{le="{shown}"}} {total}')
        return [*lines, f"{PREFIX}{name}_sum {self.wait_s}", f"{PREFIX}{name}_count {total}"]


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]


def _metric(name: str, kind: str, text: str, value: float) -> list[str]:
    shown = "NaN" if math.isnan(value) else str(value)
    return [*_head(name, kind, text), f"{PREFIX}{name} {shown}"]
