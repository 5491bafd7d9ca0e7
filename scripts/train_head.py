"""Train a draft head for a model: one command, from nothing to a directory that `--head` takes.

    python scripts/train_head.py --checkpoint MODEL --out heads/mine --hours 2
    python generate.py --checkpoint MODEL --head heads/mine --chat

1. Answers take 30 % of the hours: the target answers prompts, also its own
   (train/generate_answers.py). After a minute the program says what the hours bring; hours that
   cannot suffice are refused.
2. Training takes 53 %, over three steps of a chain: HASS, which has the layout of EAGLE-1, or
   EAGLE-3 where there are answers enough; then the sharpness (train/train_eagle.py). With
   `--kind dflash2` it is a block drafter (train/train_block.py).
3. Evaluation takes the rest: a chain and trees beside vanilla decoding, by task (measure.py speed).
   Then the model card, `README.md`, and `training.json` are written, and of an EAGLE-3 head GGUF
   files for llama.cpp (export_head.py).

With `--tokens` in place of `--hours` no clock ends a stage. OUT/run.json holds the state. After a
kill the same command goes on, also with more hours: with the answers that are there, the last saved
step, the next round of a task.
Trade-off: HASS reuses the target's last feature and learns from few tokens; EAGLE-3 overtakes it
with many (benchmarks/TRAINING.md).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import hashlib
import json
import math
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.fetch import fetched
from files.gguf_header import read_header
from files.io import is_gguf, read_json, read_text, write_text
from files.lock import folder_lock
from files.registry import check_architecture
from options import log_note, require
from run.options import pick_device
from run.parsing import one_line_errors, parse
from scripts.train.prompts import read_turns
from scripts.train.train_options import LEAST_TOKENS, HeadConfig


def check_place(out: Path) -> None:
    """Check that a directory holds a run, or nothing. Raises: ValueError."""
    if out.is_file():
        raise ValueError(f"--out: {out} is a file; name a directory")
    names = {file.name for file in out.iterdir()} if out.is_dir() else set()
    if names and "run.json" not in names:
        raise ValueError(
            f"--out: {out} holds something else than a run of train_head.py; name another directory"
        )


def read_command(argv: list[str] | None = None) -> HeadConfig:
    """Read the command line. Exit with status 2 on a mistake, also of the checkpoint's header."""
    config = parse(HeadConfig, "train_head.py", __doc__, argv)
    with one_line_errors("train_head.py"):
        has_one = not config.tokens or config.hours == HeadConfig.hours
        require(has_one, "--tokens: the hours follow from the tokens; drop --hours")
        both = bool(config.answers_from) == bool(config.answer_model)
        require(both, "--answers_from and --answer_model belong together; give both or neither")
        new = not config.init or config.kind == "eagle"
        require(new, f"--init goes on with an EAGLE-3 head, not with --kind {config.kind}")
        from files.chat import chat_template  # these need packages that --help does not
        from files.tokenizer import Tokenizer

        path = fetched(config.checkpoint)
        check_architecture(path)
        tokenizer = Tokenizer.load(path)
        chat_template(path, tokenizer, config.chat).stop_ids(tokenizer)
        check_place(Path(config.out))
        for file in config.prompts.split(","):
            read_turns(Path(file), "--prompts")
    return config


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = read_command() if __name__ == "__main__" else None

import torch

from run.methods import head_kinds
from scripts import export_head
from scripts.bench.cases import SpeedOptions, shown_path
from scripts.bench.speed import measure as measure_speed
from scripts.bench.table import BRIEF, tables
from scripts.train import train_block, train_eagle, training
from scripts.train.data import weights_hash
from scripts.train.generate_answers import answer

COMMON = {"seq_len": 512, "optimizer": "muon", "eval_prompts": 24, "patience": 2}
CHAIN = {"unroll": 3, "draft_vocab": 8192}
BLOCK = {"selector_rank": 64, "block_size": 6, "layers": 1, "decay": 3.0, "lr": 3e-3}
AS_HASS = {"init": "feature", "token_weight": 1.0, "lr": 3e-3, "muon_lr": 4e-3}
RECIPES = {  # with its options, by measurement (benchmarks/TRAINING.md)
    "HASS": (train_eagle.EAGLE, CHAIN | AS_HASS),
    "EAGLE-3": (train_eagle.EAGLE, CHAIN | {"version": 3, "lr": 2e-3, "muon_lr": 2e-3}),
    "DFlash2": (train_block.BLOCK, BLOCK),
}
# of the hours, but for loading: about three epochs on a processor that multiplies in bf16
SHARES = {"answers": 0.3, "training": 0.53, "evaluation": 0.15}
EPOCHS = 3  # with --tokens, as the bundled head (benchmarks/TRAINING.md)
EAGLE_3_TOKENS = 220_000  # of answers, a million trained on in three epochs; fewer are for HASS
SAY_S = 60.0  # between lines about the answers; the first says what the hours bring
SURE_S = 300.0  # of answers, until their rate counts: at first, prompts are read
TASKS = "gsm8k,humaneval,mt_bench"
PROMPTS = 20  # of a task, at most
VERSION = 7  # of run.json
# answer tokens for each sequence of a batch: so prompts of every source are answered, whatever the
# budget (an answer has about 200)
BATCH_TOKENS = 2000
STEPS = 1000  # units of the schedule of training, which goes by the clock
METHODS = "none,ngram,recycling,{0}:chain:tree_depth=5,{0}:dynamic,{0}:auto"


# ------------------------------------------------------------------------------- the run


class Job:
    """A run in its directory, and its clock."""

    def __init__(self, config: HeadConfig):
        """Read the state, or begin a run. Raises: ValueError where another run is in OUT."""
        self.config = config
        self.out = Path(config.out)
        self.file = self.out / "run.json"
        self.mark = time.perf_counter()
        prompts = [read_turns(Path(p), "--prompts") for p in config.prompts.split(",")]
        same = ("tokens", "kind", "init", "chat", "given", "batch_size")
        identity = {name: getattr(config, name) for name in same} | {
            "version": VERSION,
            "weights": weights_hash(Path(config.checkpoint)),
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        }
        self.state = {"identity": identity, "done": [], "seconds": dict.fromkeys(SHARES, 0.0)}
        if self.file.is_file():
            self.state = read_json(self.file)
        for name, value in identity.items():
            was = self.state["identity"].get(name)
            require(
                value == was,
                f"--out: {self.out} holds another run ({name} was {str(was)[:80]!r}, not "
                f"{str(value)[:80]!r}); use its options and weights, or name another directory",
            )
        self.save()

    def save(self) -> None:
        """Write the state."""
        write_text(str(self.file), json.dumps(self.state, indent=1))

    def tick(self, stage: str) -> float:
        """Count the time since the last tick to a stage. Returns: its time so far (s)."""
        now = time.perf_counter()
        self.state["seconds"][stage] += now - self.mark
        self.mark = now
        return self.state["seconds"][stage]

    def share_s(self, stage: str) -> float:
        """Return the time that a stage may take (s)."""
        return SHARES[stage] * self.config.seconds

    def recipe_for(self, tokens: float) -> str:
        """Return the name of the recipe for so many answer tokens."""
        if self.config.kind == "dflash2":
            return "DFlash2"
        return "EAGLE-3" if self.config.init or tokens >= EAGLE_3_TOKENS else "HASS"


def answers_are_over(job: Job) -> Callable[[int], bool]:
    """Return a function that tells whether so many answer tokens end the answers.

    It says what the time brings now and then, and writes run.json. Raises: ValueError for hours
    that cannot suffice.
    """
    began_s = job.tick("answers")
    said_s = began_s
    begin: int | None = None  # tokens at the first look

    def are_over(tokens: int) -> bool:
        nonlocal begin, said_s
        begin = tokens if begin is None else begin
        spent_s = job.tick("answers")
        left_s = max(job.share_s("answers") - spent_s, 0.0)
        rate = max(tokens - begin, 1) / max(spent_s - began_s, 1e-9)
        expected = job.config.tokens or int(tokens + rate * left_s)
        if spent_s - said_s >= SAY_S:
            said_s = spent_s
            job.save()
            print(
                f"{tokens} answer tokens, {rate:.1f} per second; expected: {expected}, "
                f"for {job.recipe_for(expected)}",
                flush=True,
            )
        is_sure = spent_s - began_s >= SURE_S or not left_s
        if is_sure and expected < LEAST_TOKENS:
            hours = max(LEAST_TOKENS / rate / SHARES["answers"] / 3600, job.config.hours) + 0.1
            raise ValueError(
                f"--hours {job.config.hours:g} is too short for {LEAST_TOKENS} answer tokens, the "
                f"least for a head; the same command goes on with --hours {hours:.1f} or more"
            )
        return tokens >= expected if job.config.tokens else not left_s

    return are_over


def write_answers(job: Job) -> None:
    """Stage 1. Writes: OUT/answers."""
    config = job.config
    # few are decoded in small batches, of every kind
    fitting = math.ceil(config.tokens / BATCH_TOKENS) or config.answers
    few = replace(config, answers=min(config.answers, fitting))
    run = answer(few, answers_are_over(job))
    job.state["tokens"] = run.total()
    job.state["data"] = run.lines()
    job.state["recipe"] = job.recipe_for(run.total())


def train(job: Job) -> None:
    """Stage 2. Writes: OUT."""
    config = job.config
    recipe, options = RECIPES[job.state["recipe"]]
    options = COMMON | options
    if config.init:
        options |= {"init": config.init, "draft_vocab": 0}
    made = training.ready(
        recipe.options(
            checkpoint=config.checkpoint,
            out=config.out,
            data=str(job.out / "answers" / "answers.jsonl"),
            batch_size=config.batch_size,
            chat=config.chat,
            threads=config.threads,
            device=config.device,
            features=str(job.out / "features"),
            minutes=0.0 if config.tokens else job.share_s("training") / 60,
            **options,
        ),
        recipe,
    )
    job.state["batches"] = made.features.batches
    steps = EPOCHS * job.state["batches"] if config.tokens else STEPS
    made.config = replace(
        made.config,
        steps=steps,
        warmup=steps // 40,
        eval_every=max(steps // 5, 1),
        resume=(job.out / "resume.pt").is_file(),
    )
    training.train(made)
    shutil.rmtree(job.out / "features")


def evaluate(job: Job) -> None:
    """Stage 3. Writes: OUT/evaluation.jsonl, OUT/README.md, OUT/training.json."""
    config = job.config
    tasks = TASKS.split(",")
    bench = SpeedOptions(
        checkpoint=config.checkpoint,
        head=config.out,
        tasks=TASKS,
        methods=METHODS.format(config.draft),
        limit=PROMPTS,
        chat=config.chat,
        threads=config.threads,
        device=config.device,
        json=str(job.out / "evaluation.jsonl"),
    )
    bench.check()

    def is_over(task: int) -> bool:
        spent_s = job.tick("evaluation")
        job.save()
        return spent_s >= job.share_s("evaluation") * (task + 1) / len(tasks)

    rows = measure_speed(bench, is_over)
    job.tick("evaluation")
    info = read_json(job.out / "training.json")
    info["run"] = asdict(config) | job.state
    info["evaluation"] = [{name: row[name] for name in BRIEF} for row in rows]
    write_text(str(job.out / "training.json"), json.dumps(info, indent=1))
    write_text(str(job.out / "README.md"), card(job, info, rows))
    export(job)
    print("\n".join(tables(rows)))


def export(job: Job) -> None:
    """Write an EAGLE-3 head for llama.cpp. Writes: OUT/head-TYPE.gguf; a note where it cannot."""
    if job.state["recipe"] != "EAGLE-3":
        return
    try:
        head = export_head.read(job.out, Path(job.config.checkpoint))
        for kind in export_head.FORMATS:
            export_head.write_gguf(head, job.out / f"head-{kind}.gguf", kind)
    except ValueError as error:
        log_note(f"no GGUF files: {error}")


# ------------------------------------------------------------------------------- the model card


def licence(path: Path) -> str:
    """Return the licence that a checkpoint names, in its metadata or its README.md."""
    name = None
    if is_gguf(path):
        name = read_header(path).metadata.get("general.license")
    elif (path / "README.md").is_file():
        match = re.search(r"^license:\s*(\S+)", read_text(path / "README.md"), re.MULTILINE)
        name = match and match[1]
    return name or "unknown: its files name none"


def by_task(rows: list[dict]) -> dict[str, list[float]]:
    """Return the speedup of every method in each task."""
    speedups: dict[str, list[float]] = {}
    for row in rows:
        speedups.setdefault(row["method"], []).append(row["speedup"] or 1.0)
    return speedups


def ranked(rows: list[dict]) -> dict[str, float]:
    """Return the mean speedup of every method over the tasks, the fastest method first."""
    means = {method: statistics.mean(found) for method, found in by_task(rows).items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def has_head(method: str) -> bool:
    """Return whether a method drafts with a head."""
    return method.split(":")[0] in head_kinds()


def use(config: HeadConfig, rows: list[dict]) -> str:
    """Return the command with the head; where it was not the fastest, one without it."""
    best = next(iter(ranked(rows)))
    draft = f"--head {shown_path(config.out)}" if has_head(best) else f"--draft {best}"
    model = f"python generate.py --checkpoint {shown_path(config.checkpoint)}"
    return f"{model} {draft} --chat {config.chat}".strip()


def speed(rows: list[dict]) -> str:
    """Return the speedups of the fastest method and of its rival, with the head and without it.

    rows: of the evaluation
    """
    means = ranked(rows)
    best = next(iter(means))
    if best == "none":
        return "no method is faster than vanilla decoding here"
    text = f"{best} has {means[best]:.2f} of vanilla decoding here, the mean over the tasks"
    head = next(filter(has_head, means))
    if head != best:
        return f"{text}; with the head, {head} has {means[head]:.2f}: it is not recommended"
    other = next(method for method in means if not has_head(method))
    text += f"; without the head, {other} has {means[other]:.2f}"
    tasks = by_task(rows)
    gains = [with_it - without for with_it, without in zip(tasks[head], tasks[other])]
    if means[head] - means[other] < statistics.pstdev(gains):
        text += ": the head adds less than the tasks differ by; give it more hours"
    return text


def card(job: Job, info: dict[str, Any], rows: list[dict]) -> str:
    """Return the model card. info: of training.json; rows: of the evaluation"""
    config = job.config
    state = job.state
    name = Path(config.checkpoint).name
    steps = info["curve"][-1]["step"]
    best = info["best"]
    hours = ", ".join(f"{stage} {spent / 3600:.2f}" for stage, spent in state["seconds"].items())
    alphas = " ".join(f"{alpha:.3f}" for alpha in best["alpha"])
    table = "\n".join(tables(rows))
    asked = f"--tokens {config.tokens}" if config.tokens else f"--hours {config.hours:g}"
    batch = info["config"]["batch_size"] * info["config"]["seq_len"]
    epochs = steps / state["batches"]
    return f"""# A draft head for {name}

    {use(config, rows)}

Made by `scripts/train_head.py {asked}` of gpt-eagle.

- Target: {name}; SHA-256 of its config and weights: {state["identity"]["weights"]}.
- The target's licence: {licence(Path(config.checkpoint))}. The head is made of the
  target's answers and features, so its terms may hold for the head too.
- Speed: {speed(rows)};
  {config.draft}:auto, the default, also drafts by lookups in the text; ngram is lookups
  alone, recycling the target's own best tokens. The tables below have every task.
- Data: {state["tokens"]} tokens of the target's own answers to the prompts below.
- Training: {state["recipe"]}, {steps} steps of {batch} tokens, {epochs:.1f} epochs;
  {info["parameters"] / 1e6:.1f} million parameters.
- Hours: {hours}.
- Held-out prompts, greedy chains of five from every position: acceptance by depth {alphas}; tau
  {best["tau"]:.3f}, the highest, at step {best["step"]}. Decoding starts behind rejections, where
  tau is lower, as the tables below say;
  sharpness {read_json(job.out / "config.json")["draft_sharpness"]}.

## Prompts

Given: {", ".join(shown_path(file) for file in config.prompts.split(","))}.
Code: functions of Python's standard library to complete. Tasks: templates of many kinds. Long:
parts of Python's language reference, with a question. Own: written by the target itself.

```text
{state["data"]}
```

## Evaluation

{table}
"""


# ------------------------------------------------------------------------------- main


STAGES = {"answers": write_answers, "training": train, "evaluation": evaluate}


def run(config: HeadConfig) -> None:
    """Do the stages that are left. Writes: `config.out`."""
    path = fetched(config.checkpoint)
    config = replace(config, checkpoint=str(path), device=pick_device(config.device))
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    if config.threads:
        torch.set_num_threads(config.threads)
    with folder_lock(out, f"waiting for another process that writes to {out}"):
        job = Job(config)
        for stage, work in STAGES.items():
            if stage in job.state["done"]:
                continue
            spent = sum(job.state["seconds"].values()) / 3600
            print(f"\n{stage}; {spent:.2f} hours are spent", flush=True)
            work(job)
            job.tick(stage)
            job.state["done"].append(stage)
            job.save()
        rows = read_json(out / "training.json")["evaluation"]
        print(f"\n{speed(rows)}\n{use(config, rows)}")


def main(argv: list[str] | None = None, config: HeadConfig | None = None) -> None:
    """Run the command line. config: the result of `read_command`, where it is there already"""
    config = config or read_command(argv)
    with one_line_errors("train_head.py"):
        run(config)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(config=COMMAND)
