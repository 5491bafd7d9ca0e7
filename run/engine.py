"""The engine of the whole program: `decode.Engine` with the options that it was loaded by.

Not here: loading one (run/load.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import decode
from decode import Buffers
from drafters import Drafter
from files.machine import single_torch_thread
from options import load_part, require
from run.clock import TimedCycle
from run.observer import DraftMethod, Observer
from run.options import GenerateConfig, Sampling
from runtime import replace_fields
from sampling import SamplingMode, SamplingTensors

SHAPED = len(SamplingMode)  # the mode of further cuts, of biases and of penalties


@dataclass(frozen=True, kw_only=True, repr=False)
class Engine(decode.Engine):
    """Everything that the program needs, loaded once."""

    config: GenerateConfig  # as the user asked
    shaping: Any = None  # `drafts.shaping.Shaping`: cuts, biases and penalties
    policy: Observer = Observer()  # picks the preset of every step
    resolved: dict[str, Any] = field(default_factory=dict)  # options by name, as loading chose them
    guide: Any = None  # `drafts.grammar.Grammar`, unless a request brings its own
    tokenizer: Any = None  # files.tokenizer.Tokenizer, or None when only ids go in and out
    template: Any = None  # files.chat.ChatTemplate, with --chat
    published_tau: float = 0.0  # of the head; 0: none is known
    load_s: float = 0.0
    compile_s: float = 0.0

    def __repr__(self) -> str:
        draft = self.option("head") or self.option("draft")
        return f"Engine({self.config.checkpoint}, {self.device}, draft {draft})"

    @property
    def batch_size(self) -> int:
        """B, the sequences that are decoded together."""
        return self.config.batch_size

    @property
    def compile(self) -> bool | None:
        return self.option("compile")

    @property
    def modes(self) -> tuple[int, ...]:
        """The modes that sequences may need: without `shaping` none of them has its parameters."""
        return (*SamplingMode,) if self.shaping is None else (*SamplingMode, SHAPED)

    @property
    def kv_dtype(self) -> torch.dtype:
        return cache_dtype(self.config, super().kv_dtype)

    @property
    def has_parts(self) -> bool:
        """Return whether a cycle may run a part of the sequences. CUDA's kernels know no parts."""
        return self.device.type == "cpu" and not self.captured

    def rows(self, live: Sequence[bool]) -> range:
        """Return the sequences that the next cycle runs: from the first that decodes to the last.

        Where a cycle runs all, they are all. Where none decodes, a cycle will run one.
        """
        if not self.has_parts:
            return range(len(live))
        decoding = [seq for seq, decodes in enumerate(live) if decodes]
        return range(decoding[0], decoding[-1] + 1) if decoding else range(1)

    def sampling_tensors(self, each: Sequence[Sampling], seed: int) -> SamplingTensors:
        params = super().sampling_tensors(each, seed)
        further = self.shaping.rows(each) if self.shaping is not None else ()
        return replace_fields(params, further=further)

    def cycle(self, drafter: Drafter, mode: int) -> TimedCycle:
        """Make a cycle of a preset, which reads the clock and accepts as the options say."""
        kind = load_part("extension", "shaped cycle") if mode == SHAPED else TimedCycle
        if self.config.accept != "exact":
            kind = load_part("acceptance", self.config.accept)
        return kind(self, drafter, mode)

    def run_step(self, buffers: Buffers, key: Hashable, body: Callable[[], Any]) -> Any:
        """Run a step, as `decode.Engine`, beside which PyTorch leaves C++ operators the cores."""
        if self.captured or self.target.program is None:
            return super().run_step(buffers, key, body)
        with single_torch_thread():
            return super().run_step(buffers, key, body)

    def option(self, name: str) -> Any:
        """Return the value of an option: as loading chose it, else as the user asked."""
        return self.resolved.get(name, getattr(self.config, name))

    def draft_limit(self, most: Any, name: str = "draft") -> float:
        """Return the bound of a request on the drafted tokens of a cycle. None: there is none.

        name: of the request's option
        Raises: ValueError where it is no such number, or no tree is as small.
        """
        if most is None:
            return math.inf
        least = self.presets[0].size - 1
        why = ", as draft trees have one size here" if least else ""
        kinds = f"a whole number from {least} on"
        fault = f"{name} must be {kinds}{why}; it is {repr(most)[:50]}; leave it out"
        require(type(most) is int and most >= least, fault)
        return most

    def check_sampling(self, own: Sampling) -> None:
        """Check that the tokens that are named exist. Raises: ValueError."""
        if self.shaping is not None:
            self.shaping.check(own)

    def with_method(self, method: DraftMethod) -> Engine:
        """Return an engine that drafts in another way. Its cycles are still to be made."""
        return replace(self, presets=method.presets, policy=method.policy)


def mode_for(params: Sampling) -> int:
    """Return the mode that sampling with these parameters needs."""
    return SHAPED if params.is_shaped else SamplingMode.needed_by(params)


def cache_dtype(config: GenerateConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the target's cache. dtype: of its weights"""
    return torch.int8 if config.kv == "int8" else dtype
