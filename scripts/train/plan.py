"""Plan a run of scripts/train_head.py: measure every stage on a few tokens, and divide the hours.

The evaluation gets its share first. The rest pays for answer tokens: decoding them, their features,
and three epochs of training. So the tokens follow from the rates of this machine. Training is
measured on one batch, not compiled, which is the slower way.
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
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode import Engine, build_cycles
from scripts.bench.measure import run_rows
from scripts.train import train_eagle
from scripts.train.feature_cache import best_tokens
from scripts.train.generate_answers import AnswerConfig, Run, open_run
from stats import peak_memory_bytes

STAGES = ("answers", "features", "training", "evaluation")
EPOCHS = 3  # as the bundled head (benchmarks/TRAINING.md)
TEXT_PER_ANSWER = 1.5  # tokens trained on, prompts included, per answer token
LEAST_TOKENS = 8000  # of answers; fewer may hold out no prompt
SHARE = 0.15  # of the hours, for the evaluation at most
# a prompt of each task has four turns in all; all methods take 6 to 8 times as long as vanilla
EVALUATION_TOKENS = 4 * 7 * 128
LOADING_S = 20.0  # of an evaluation: the model, and the bandwidth
COMPILING_S = 60.0  # of the losses, on two cores
PROMPTS = 20  # of a task, at most
PROBE_TOKENS = 32  # decoded to measure a rate
PROBE_S = 15.0  # of measuring a batch of features, or a step
ANSWER_TOKENS = 200  # of an answer, over which the time of its prompt is spread
ROW_BYTES = 15  # of an answer token in its file, as text and as a number
HEAD_BYTES = 18  # of a head's parameter: 2 in its file, 12 to resume from, 4 in the best so far


class Costs(NamedTuple):
    """The speed and the size of the stages."""

    opening_s: float  # of the answers: the model, and the prompts
    answer_rate: float  # tokens per second of a batch
    single_rate: float  # of one sequence
    batch_tokens: int  # of a batch of training
    feature_s: float  # per batch
    step_s: float
    feature_bytes: int  # per batch
    head_bytes: int
    answer_memory: int  # bytes
    training_memory: int


def measure(answers: AnswerConfig, training: train_eagle.TrainConfig) -> Costs:
    """Measure every stage. Raises: ValueError for prompts of which none can be used."""
    began = time.perf_counter()
    run = open_run(answers)
    opening_s = time.perf_counter() - began
    answer_rate, single_rate = _answer_rates(run)
    del run
    answer_memory = peak_memory_bytes(training.device)
    training = replace(training, steps=1)
    target = train_eagle.load_target(training)
    shape = (training.batch_size, training.seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocab_size, shape, generator=generator)
    example = train_eagle.Example(tokens.flatten(), torch.ones(tokens.numel(), dtype=torch.bool))
    with redirect_stdout(io.StringIO()):  # it describes the vocabulary of random tokens
        head = train_eagle.make_head(training, target, [example])
    positions = torch.arange(shape[1], device=training.device).expand(shape)

    @torch.no_grad()
    def look() -> tuple[Tensor, Tensor | None]:
        with train_eagle.autocast(training):
            features = target(tokens.to(training.device), positions, aux_layers=head.aux_layers)
            return features, best_tokens(target, features) if training.version == 3 else None

    features, best = look()
    known = SimpleNamespace(of=lambda tokens, number: features, best=lambda *_: best)
    losses = train_eagle.losses_of(training, head, target, compiled=False)
    made = train_eagle.Ready(target, [example], [], head, known, losses, train_eagle.eagle_method())
    steps = train_eagle.Steps(training, made)
    batch = next(train_eagle.batches(made.examples, training, 0))
    steps.run(0, 0, batch)
    return Costs(
        opening_s,
        answer_rate,
        single_rate,
        tokens.numel(),
        median_s(look),
        median_s(lambda: steps.run(0, 0, batch)),
        feature_bytes=features.numel() * 2 + (0 if best is None else best.numel() * 4),
        head_bytes=HEAD_BYTES * train_eagle.count_parameters(head),
        answer_memory=answer_memory,
        training_memory=peak_memory_bytes(training.device),
    )


def median_s(work: Callable[[], Any]) -> float:
    """Return the median time of some work, done five times, or until it has taken PROBE_S."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < PROBE_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _answer_rates(run: Run) -> tuple[float, float]:
    """Return the tokens per second of a batch, and of one sequence."""
    engine = run.engines[False]
    prompts = [prompt.ids for queue in run.waiting.values() for prompt in queue]
    single = build_cycles(replace(engine, config=replace(engine.config, batch_size=1)))
    return _rate(engine, prompts[: run.config.batch_size]), _rate(single, prompts[:1])


def _rate(engine: Engine, prompts: list[list[int]]) -> float:
    """Return the tokens per second of answers of ANSWER_TOKENS, with the time of their prompts."""
    short = replace(engine, config=replace(engine.config, max_new_tokens=PROBE_TOKENS))
    seen = run_rows(short, prompts)
    return 1 / (seen.first_s / (len(prompts) * ANSWER_TOKENS) + seen.step_s)


def make_plan(costs: Costs, hours: float, out: str) -> dict[str, Any]:
    """Divide the hours between the stages. out: the directory of the files

    Returns: `tokens` of answers, `prompts` of a task, and by stage `seconds`, `disk` and `memory`
    (bytes). Raises: ValueError for too few hours, or too little space on the disk.
    """
    seconds = hours * 3600
    round_s = EVALUATION_TOKENS / costs.single_rate
    text = TEXT_PER_ANSWER / costs.batch_tokens  # batches per answer token
    token_s = 1 / costs.answer_rate + text * (costs.feature_s + EPOCHS * costs.step_s)
    one_s = LOADING_S + 2 * round_s  # a prompt of each task, after an untimed one
    fixed_s = costs.opening_s + COMPILING_S
    least_s = max(one_s / SHARE, (fixed_s + LEAST_TOKENS * token_s) / (1 - SHARE))
    if seconds < least_s:
        raise ValueError(
            f"--hours {hours:g} is too short: here one evaluation takes {one_s:.0f} s, and "
            f"{LEAST_TOKENS} answer tokens with their training {LEAST_TOKENS * token_s:.0f} s; "
            f"give --hours {math.ceil(least_s / 36) / 100:.2f} or more"
        )
    prompts = min(int((seconds * SHARE - LOADING_S) / round_s) - 1, PROMPTS)
    evaluation_s = LOADING_S + (1 + prompts) * round_s
    tokens = int((seconds - evaluation_s - fixed_s) / token_s)
    batches = math.ceil(text * tokens)
    disk = (ROW_BYTES * tokens, batches * costs.feature_bytes, costs.head_bytes, 10**6)
    free = shutil.disk_usage(out).free
    if sum(disk) > free - 1e9:
        raise ValueError(
            f"--out: {sum(disk) / 1e9:.2f} GB are needed, {disk[1] / 1e9:.2f} GB of them for the "
            f"features; the disk of {out} has {free / 1e9:.2f} GB free (1 GB stays free); name a "
            "directory on another disk, or give fewer --hours"
        )
    needed_s = (
        costs.opening_s + tokens / costs.answer_rate,
        batches * costs.feature_s,
        COMPILING_S + EPOCHS * batches * costs.step_s,
        evaluation_s,
    )
    memory = (costs.answer_memory, costs.training_memory, costs.training_memory)
    return {
        "tokens": tokens,
        "prompts": prompts,
        "seconds": dict(zip(STAGES, needed_s)),
        "disk": dict(zip(STAGES, disk)),
        "memory": dict(zip(STAGES, (*memory, costs.answer_memory))),
    }


def plan_text(plan: dict[str, Any], taken_s: dict[str, float]) -> str:
    """Return the plan as a table in text. taken_s: the seconds of each stage that is done"""
    lines = [f"{'stage':<12}{'hours':>7}{'disk, GB':>10}{'memory, GB':>12}"]
    for stage in STAGES:
        hours = plan["seconds"][stage] / 3600
        disk = plan["disk"][stage] / 1e9
        line = f"{stage:<12}{hours:>7.3f}{disk:>10.3f}{plan['memory'][stage] / 1e9:>12.2f}"
        if stage in taken_s:
            line += f"  done in {taken_s[stage] / 3600:.3f}"
        lines.append(line)
    lines.append(f"about {plan['tokens']} answer tokens, {plan['prompts']} prompts of each task")
    return "\n".join(lines)
