"""What a run measured: acceptance, tokens, seconds, memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from decode import Engine


@dataclass
class Stats:
    """What happened, added up over every row and cycle."""

    accept_lengths: list[int] = field(default_factory=list)  # per cycle and live row, bonus not counted
    live_rows: list[list[int]] = field(default_factory=list)  # per cycle, the rows that these lengths belong to
    tokens: int = 0  # decoded after prefill
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # drafting and extending
    verify_s: float = 0.0
    # preset -> its cycles and their seconds, where the host chooses among several
    presets: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add_cycle(self, preset: int, seconds: float) -> None:
        """Count a cycle of a preset."""
        cycles, total = self.presets.get(preset, (0, 0.0))
        self.presets[preset] = (cycles + 1, total + seconds)

    def add(self, other: Stats) -> None:
        """Add what another session measured."""
        self.accept_lengths += other.accept_lengths
        self.live_rows += other.live_rows
        for name in ("tokens", "prefill_s", "decode_s", "draft_s", "verify_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for preset, (cycles, seconds) in other.presets.items():
            mine = self.presets.get(preset, (0, 0.0))
            self.presets[preset] = (mine[0] + cycles, mine[1] + seconds)

    def summary(self, engine: Engine) -> dict[str, Any]:
        """The `stats` object of `--json`. tau: emitted tokens per verification, bonus included."""
        lengths, stand_in = self.accept_lengths, engine.target.config.stand_in
        named = {"stand_in": stand_in} if stand_in else {}  # its numbers never go without its name
        if engine.sizer:
            named["tree_auto"] = [self._preset(engine, number) for number in range(len(engine.cycles))]
        return named | {
            "tau": sum(lengths) / len(lengths) + 1 if lengths else 0.0,
            "accept_lengths": lengths,
            "cycles": len(lengths),
            "tokens_per_s": self.tokens / self.decode_s if self.decode_s else 0.0,
            "decode_s": self.decode_s,
            "prefill_s": self.prefill_s,
            "compile_s": engine.compile_s,
            "load_s": engine.load_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "peak_memory_bytes": peak_memory_bytes(engine.config.device),
        }

    def _preset(self, engine: Engine, number: int) -> dict[str, Any]:
        """How often a preset ran, and the time of its cycle, as predicted before the first prompt and as measured."""
        cycles, seconds = self.presets.get(number, (0, 0.0))
        return {
            "tree": engine.drafter.presets[number].name,
            "cycles": cycles,
            "expected_tokens": engine.sizer.tokens(number),
            "predicted_ms": 1e3 * engine.sizer.predicted_s[number],
            "measured_ms": 1e3 * seconds / cycles if cycles else None,
        }


def peak_memory_bytes(device: str) -> int:
    """Peak device memory on CUDA, peak resident memory of the process elsewhere."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
