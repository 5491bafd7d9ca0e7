"""Plan a run of scripts/train_head.py: measure every stage on a few tokens, and divide the hours.

1. The least time of a run is known before anything is loaded: a token reads the weights once.
2. Each measurement makes that bound larger, and says it. Hours below it are refused at once.
3. All measurements together take a tenth of the hours at most; slow machines measure smaller ones.
4. The evaluation gets its share first. The rest pays for answer tokens: decoding them, their
   features, and three epochs of training. So the tokens follow from the rates of this machine.

Training is measured on one batch, not compiled, which is the slower way.
Trade-off: the plan is an estimate of a moment. The run takes the shares from it and holds them by
the clock, so a machine that gets faster or slower does more or less in the same time.
"""

from __future__ import annotations

import io
import math
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from decode import build_cycles
from files.config import read_config
from files.io import is_gguf
from model import Transformer
from run.engine import Engine
from run.stats import peak_memory_bytes
from scripts.bench.measure import pass_bytes, read_bandwidth, run_rows
from scripts.train import train_eagle
from scripts.train.feature_cache import best_tokens
from scripts.train.generate_answers import AnswerConfig, open_run

STAGES = ("answers", "features", "training", "evaluation")
EPOCHS = 3  # as the bundled head (benchmarks/TRAINING.md)
TEXT_PER_ANSWER = 1.5  # tokens trained on, prompts included, per answer token
LEAST_TOKENS = 8000  # of answers, also of --tokens; fewer may hold out no prompt
SHARE = 0.15  # of the hours, for the evaluation at most
MEASURING = 0.1  # of the hours, for the measurements at most
# a prompt of each task has four turns in all; all methods take 6 to 8 times as long as vanilla
EVALUATION_TOKENS = 4 * 7 * 128
LOADING_S = 20.0  # of an evaluation: the model, and the bandwidth
COMPILING_S = 60.0  # of the losses, on two cores
PROMPTS = 20  # of a task, at most
PROBE_TOKENS = 32  # decoded to measure a rate
PROBE_S = 5.0  # of repeating a batch of features, or a step
ANSWER_TOKENS = 200  # of an answer, over which the time of its prompt is spread
ROW_BYTES = 15  # of an answer token in its file, as text and as a number
HEAD_BYTES = 18  # of a head's parameter: 2 in its file, 12 to resume from, 4 in the best so far


class Costs(NamedTuple):
    """The speed and the size of the stages; parts that were not measured yet cost nothing."""

    single_rate: float  # tokens per second of one sequence
    opening_s: float = 0.0  # of the answers: the model, and the prompts
    answer_rate: float = math.inf  # tokens per second of a batch
    batch_tokens: int = 1  # of a batch of training
    feature_s: float = 0.0  # per batch
    step_s: float = 0.0
    feature_bytes: int = 0  # per batch
    head_bytes: int = 0
    answer_memory: int = 0  # bytes
    training_memory: int = 0


def reading_rate(checkpoint: Path, device: str) -> float:
    """Return the tokens per second of a sequence whose passes read the weights and do no more.

    Raises: ValueError for a config that is not served.
    """
    with torch.device("meta"):
        shapes = Transformer(read_config(checkpoint))
    total = sum(parameter.nbytes for parameter in shapes.parameters())
    share = pass_bytes(shapes, 0) / total  # of the weights, that a token reads
    files = [checkpoint]
    if not is_gguf(checkpoint):
        files = [*checkpoint.glob("*.safetensors")] or [*checkpoint.glob("*.bin")]
    file_bytes = sum(file.stat().st_size for file in files)
    return read_bandwidth(device, runs=2).high / (share * file_bytes)


def in_words(seconds: float) -> str:
    """Return a duration as text, rounded down: it is an estimate."""
    if seconds < 120:
        return f"{int(seconds)} seconds"
    if seconds < 7200:
        return f"{int(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"


class Measurement:
    """The costs so far, the hours that a run takes at least with them, and the time to measure."""

    def __init__(self, checkpoint: Path, device: str, hours: float, tokens: int):
        """Measure what is known before loading. hours, tokens: of `make_plan`. Raises: ValueError.

        A run of `tokens` has any number of hours.
        """
        self.hours = hours
        self.tokens = tokens
        self.began = time.perf_counter()
        print("measuring for the plan", flush=True)
        single_rate = reading_rate(checkpoint, device)
        self.costs = Costs(single_rate)
        self.learn("reading the weights", single_rate=single_rate)

    @property
    def left_s(self) -> float:
        """The seconds left to measure."""
        return MEASURING * self.hours * 3600 - (time.perf_counter() - self.began)

    def learn(self, what: str, **costs: float) -> None:
        """Add costs, and say the least time of a run. Writes: costs.

        Raises: ValueError where that is more than the hours.
        """
        self.costs = self.costs._replace(**costs)
        least_s = least_seconds(self.costs, self.tokens)
        reason = f"a run takes at least {in_words(least_s)}"
        print(f"{what}: {reason}", flush=True)
        if least_s > self.hours * 3600:
            self._refuse(reason, least_s)

    def check_time(self) -> None:
        """Check that there is time for a further measurement. Raises: ValueError."""
        if self.left_s <= 0:
            spent_s = MEASURING * self.hours * 3600 - self.left_s
            reason = f"measuring has taken {spent_s:.0f} s, a tenth of it, and is not done"
            self._refuse(reason, spent_s / MEASURING)

    def _refuse(self, reason: str, least_s: float) -> NoReturn:
        if not self.costs.step_s:  # what was not measured yet may take as long again
            least_s *= 2
        hours = math.ceil(least_s / 360) / 10
        raise ValueError(
            f"--hours {self.hours:g} is too short: {reason}; give --hours {hours:g} or more"
        )

    def answers(self, config: AnswerConfig) -> None:
        """Measure the answers. Writes: costs. Raises: ValueError, also for unusable prompts."""
        began = time.perf_counter()
        run = open_run(config)
        opening_s = time.perf_counter() - began
        self.learn(f"the model was opened in {opening_s:.0f} s", opening_s=opening_s)
        self.check_time()
        engine = run.engines[False]
        prompts = [prompt.ids for queue in run.waiting.values() for prompt in queue]
        began = time.perf_counter()
        rate = _rate(engine, prompts[:1])
        rows_s = time.perf_counter() - began
        self.learn(f"one answer: {rate:.1f} tokens/s", single_rate=rate)
        self.check_time()
        rows = config.batch_size  # fewer where they would take more than a third of what is left
        if rows * rows_s > self.left_s / 3:
            rows = max(int(self.left_s / 3 / rows_s), 1)
        if rows > 1:
            rate = _rate(engine, prompts[:rows])
        self.learn(
            f"{rows} answers together: {rate:.1f} tokens/s",
            answer_rate=rate,
            answer_memory=peak_memory_bytes(config.device),
        )

    def training(self, config: train_eagle.TrainOptions, method: train_eagle.TrainingParts) -> None:
        """Measure the features and a step of a recipe, of one sequence where that takes a second.

        method: of the kind of head. Writes: costs. Raises: ValueError.
        """
        self.check_time()
        config = replace(config, steps=1)
        target = train_eagle.load_target(config)
        one = _Batch(replace(config, batch_size=1), target, method)
        before = peak_memory_bytes(config.device)
        found = one.costs()
        times = config.batch_size
        if found["feature_s"] + found["step_s"] < 1:
            found = _Batch(config, target, method).costs()
            times = 1
        memory = before + (peak_memory_bytes(config.device) - before) * times
        found = {name: value * times for name, value in found.items()}
        self.learn(
            f"features of {config.batch_size * config.seq_len} tokens: {found['feature_s']:.2f} s, "
            f"a step: {found['step_s']:.2f} s",
            **found,
            head_bytes=HEAD_BYTES * train_eagle.count_parameters(one.head),
            training_memory=memory,
        )


class _Batch:
    """A batch of training on random tokens."""

    def __init__(
        self,
        config: train_eagle.TrainOptions,
        target: Transformer,
        method: train_eagle.TrainingParts,
    ):
        self.config = config
        self.target = target
        self.method = method
        shape = (config.batch_size, config.seq_len)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(target.config.vocab_size, shape, generator=generator)
        self.positions = torch.arange(shape[1], device=config.device).expand(shape)
        mask = torch.ones(self.tokens.numel(), dtype=torch.bool)
        self.example = train_eagle.Example(self.tokens.flatten(), mask)
        with redirect_stdout(io.StringIO()):  # it describes the vocabulary of random tokens
            self.head = method.make_head(config, target, [self.example])

    @torch.no_grad()
    def look(self) -> tuple[Tensor, Tensor | None]:
        """Compute the features, and for EAGLE-3 the best tokens."""
        with train_eagle.autocast(self.config):
            tokens = self.tokens.to(self.config.device)
            features = self.target(tokens, self.positions, aux_layers=self.head.aux_layers)
            is_third = self.config.version == 3
            return features, best_tokens(self.target, features) if is_third else None

    def costs(self) -> dict[str, float]:
        """Measure the features and a step."""
        features, best = self.look()
        known = SimpleNamespace(of=lambda tokens, number: features, best=lambda *_: best)
        losses = self.method.losses_of(self.config, self.head, self.target)
        parts = (self.target, [self.example], [], self.head, known, losses, self.method)
        steps = train_eagle.Steps(self.config, train_eagle.Ready(*parts))
        batch = next(train_eagle.batches([self.example], self.config, 0))
        with torch.compiler.set_stance("force_eager"):
            step_s = median_s(lambda: steps.run(0, 0, batch))
        return {
            "batch_tokens": self.tokens.numel(),
            "feature_bytes": features.numel() * 2 + (0 if best is None else best.numel() * 4),
            "feature_s": median_s(self.look),
            "step_s": step_s,
        }


def median_s(work: Callable[[], Any]) -> float:
    """Return the median time of some work, done six times, or until it has taken PROBE_S.

    The first time warms up, and does not count unless it is the only one.
    """
    times: list[float] = []
    while len(times) < 6 and sum(times) < PROBE_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:] or times)


def _rate(engine: Engine, prompts: list[list[int]]) -> float:
    """Return the tokens per second of answers of ANSWER_TOKENS, with the time of their prompts."""
    size = {"batch_size": len(prompts), "max_new_tokens": PROBE_TOKENS}
    short = build_cycles(replace(engine, config=replace(engine.config, **size)))
    seen = run_rows(short, prompts)
    return 1 / (seen.first_s / (len(prompts) * ANSWER_TOKENS) + seen.step_s)


def least_seconds(costs: Costs, tokens: int = 0) -> float:
    """Return the time of a run of so many tokens; 0: of the shortest, whose evaluation is small."""
    if tokens:
        return sum(seconds_of(costs, tokens, PROMPTS).values())
    needed_s = seconds_of(costs, LEAST_TOKENS, prompts=1)
    evaluation_s = needed_s.pop("evaluation")
    return max(evaluation_s / SHARE, sum(needed_s.values()) / (1 - SHARE))


def seconds_of(costs: Costs, tokens: int, prompts: int) -> dict[str, float]:
    """Return the time of each stage. tokens: of answers; prompts: of a task"""
    batches = TEXT_PER_ANSWER * tokens / costs.batch_tokens
    round_s = EVALUATION_TOKENS / costs.single_rate
    return {
        "answers": costs.opening_s + tokens / costs.answer_rate,
        "features": batches * costs.feature_s,
        "training": COMPILING_S + EPOCHS * batches * costs.step_s,
        "evaluation": LOADING_S + (1 + prompts) * round_s,  # after an untimed one
    }


def make_plan(costs: Costs, hours: float, out: str, tokens: int = 0) -> dict[str, Any]:
    """Divide the hours between the stages.

    out: the directory of the files; tokens: of answers, whatever the hours; 0: as many as fit
    Returns: `tokens` of answers, `prompts` of a task, and by stage `seconds`, `disk` and `memory`
    (bytes). Raises: ValueError for too little space on the disk.
    """
    prompts = PROMPTS
    if not tokens:
        seconds = hours * 3600
        round_s = EVALUATION_TOKENS / costs.single_rate
        prompts = min(int((seconds * SHARE - LOADING_S) / round_s) - 1, PROMPTS)
        fixed_s = sum(seconds_of(costs, 0, prompts).values())
        token_s = sum(seconds_of(costs, 1, prompts).values()) - fixed_s
        tokens = int((seconds - fixed_s) / token_s)
    batches = math.ceil(TEXT_PER_ANSWER * tokens / costs.batch_tokens)
    disk = (ROW_BYTES * tokens, batches * costs.feature_bytes, costs.head_bytes, 10**6)
    free = shutil.disk_usage(out).free
    if sum(disk) > free - 1e9:
        raise ValueError(
            f"--out: {sum(disk) / 1e9:.2f} GB are needed, {disk[1] / 1e9:.2f} GB of them for the "
            f"features; the disk of {out} has {free / 1e9:.2f} GB free (1 GB stays free); name a "
            "directory on another disk, or give fewer --hours"
        )
    memory = (costs.answer_memory, costs.training_memory, costs.training_memory)
    return {
        "tokens": tokens,
        "prompts": prompts,
        "seconds": seconds_of(costs, tokens, prompts),
        "disk": dict(zip(STAGES, disk)),
        "memory": dict(zip(STAGES, (*memory, costs.answer_memory))),
    }


def plan_text(plan: dict[str, Any], taken_s: dict[str, float]) -> str:
    """Return the plan as a table in text. taken_s: the seconds of each stage that is done"""
    lines = [f"{'stage':<12}{'hours':>7}{'disk, GB':>10}{'memory, GB':>12}"]
    for stage in STAGES:
        hours = plan["seconds"][stage] / 3600
        disk = plan["disk"][stage] / 1e9
        line = f"{stage:<12}{hours:>7.2f}{disk:>10.2f}{plan['memory'][stage] / 1e9:>12.1f}"
        if stage in taken_s:
            line += f"  done in {taken_s[stage] / 3600:.2f}"
        lines.append(line)
    lines.append(f"about {plan['tokens']} answer tokens, {plan['prompts']} prompts of each task")
    return "\n".join(lines)
