"""Train a draft head for a model: one command, from nothing to a directory that `--head` takes.

    python scripts/train_head.py --checkpoint MODEL --out heads/mine --hours 2
    python generate.py --checkpoint MODEL --head heads/mine --chat

1. A step of training is measured. After a minute of answers the program says what the hours bring,
   and refuses hours that cannot suffice.
2. Answers: the target answers prompts, also its own (train/generate_answers.py), until the time
   that is left is what training on them takes, with the evaluation behind it.
3. Training, over three steps of a chain: HASS, which has the layout of EAGLE-1, or EAGLE-3 for a
   million tokens and more; then the sharpness (train/train_eagle.py). With `--kind dflash2` it is
   a block drafter (train/train_block.py). It ends by the clock.
4. Evaluation: a chain and trees beside vanilla decoding, by task (measure.py speed). Then the model
   card, `README.md`, and `training.json` are written, and of an EAGLE-3 head GGUF files for
   llama.cpp (export_head.py).

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
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.fetch import fetched
from files.gguf_header import read_header
from files.io import is_gguf, read_json, read_text, write_text
from files.lock import folder_lock
from files.registry import check_architecture
from options import log_note, require
from run.options import DEFAULT, ROOT, pick_device
from run.parsing import one_line_errors, option, parse, processors
from scripts.train.train_options import TrainOptions


@dataclass(frozen=True)
class HeadConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(
        DEFAULT, "the target: a Hugging Face directory, quantized or not, or a GGUF file"
    )
    out: str = option("heads/mine", "directory to write; an unfinished run in it goes on")
    hours: float = option(
        2.0, "time for everything, on this machine; it can be changed when a run goes on", least=0
    )
    tokens: int = option(
        0,
        "answer tokens to train on, however long that takes; 0: as many as --hours allow",
        least=8000,  # LEAST_TOKENS
    )
    prompts: str = option(
        str(ROOT / "data/train/gsm8k_train_clean.jsonl"),
        "JSONL files of `turns`, comma-separated; the model's own and functions come besides",
    )
    given: float = option(
        0.0,
        "share of the answer tokens for --prompts, up to 1, for a head of one purpose; "
        "0: as much as for each other kind of prompts",
        least=0,
        most=1,
    )
    kind: str = option(
        "eagle",
        "of the head: eagle (HASS or EAGLE-3, by the number of tokens), or dflash2, which drafts "
        "all levels in one pass",
        ("eagle", "dflash2"),
    )
    init: str = option("", "directory of an EAGLE-3 head to go on with; empty: a new head")
    answers: int = option(48, "answers decoded together; a GPU has room for hundreds", least=1)
    batch_size: int = option(4, "sequences of a training step; a GPU has room for 32", least=1)
    chat: str = option("", "chat template; empty: the checkpoint's own")
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0, most=processors())
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    @property
    def seconds(self) -> float:
        """The time for everything."""
        return math.inf if self.tokens else 3600 * self.hours

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes that may be taken, each for more tokens than the one before."""
        return ("EAGLE-3",) if self.init else KINDS[self.kind].recipes

    def answering(self) -> AnswerConfig:
        """Return the options of the answers; few are decoded in small batches, of every kind."""
        fitting = math.ceil(self.tokens / BATCH_TOKENS) or self.answers
        return AnswerConfig(
            batch_size=min(self.answers, fitting),
            checkpoint=self.checkpoint,
            out=str(Path(self.out, "answers")),
            prompts=self.prompts,
            given=self.given,
            chat=self.chat,
            device=self.device,
        )

    def training(self, recipe: str, **options: Any) -> TrainOptions:
        """Return the options of the training. recipe: one of RECIPES"""
        if self.init:
            options = options | {"init": self.init, "draft_vocab": 0}
        return KINDS[self.kind].options(
            checkpoint=self.checkpoint,
            out=self.out,
            data=str(Path(self.out, "answers", "answers.jsonl")),
            batch_size=self.batch_size,
            chat=self.chat,
            threads=self.threads,
            device=self.device,
            **RECIPES[recipe] | options,
        )


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
        new = not config.init or config.kind == "eagle"
        require(new, f"--init goes on with an EAGLE-3 head, not with --kind {config.kind}")
        from files.chat import chat_template  # these need packages that --help does not
        from files.tokenizer import Tokenizer

        path = fetched(config.checkpoint)
        check_architecture(path)
        tokenizer = Tokenizer.load(path)
        chat_template(path, tokenizer, config.chat).stop_ids(tokenizer)
        check_place(Path(config.out))
    return config


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = read_command() if __name__ == "__main__" else None

import torch

from files.config import read_raw
from run.methods import head_kinds
from scripts import export_head
from scripts.bench.cases import SpeedOptions, shown_path
from scripts.bench.speed import measure as measure_speed
from scripts.bench.table import BRIEF, tables
from scripts.train import train_block, train_eagle, training
from scripts.train.feature_cache import check_room, weights_hash
from scripts.train.generate_answers import AnswerConfig, answer, read_turns

OF_EAGLE = {"seq_len": 512, "optimizer": "muon", "eval_prompts": 24, "patience": 2}
OF_BLOCK = OF_EAGLE | {"selector_rank": 64, "block_size": 6, "layers": 1, "decay": 3.0, "lr": 3e-3}
OF_EAGLE |= {"unroll": 3, "draft_vocab": 8192}
RECIPES = {  # by measurement (benchmarks/TRAINING.md)
    "HASS": OF_EAGLE | {"init": "feature", "token_weight": 1.0, "lr": 3e-3, "muon_lr": 4e-3},
    "EAGLE-3": OF_EAGLE | {"version": 3, "lr": 2e-3, "muon_lr": 2e-3},
    "DFlash2": OF_BLOCK,
}


class Kind(NamedTuple):
    """A value of --kind."""

    recipes: tuple[str, ...]  # each is for more tokens than the one before
    options: type[TrainOptions]
    method: training.Recipe
    draft: str  # its name in generate.py


KINDS = {
    "eagle": Kind(("HASS", "EAGLE-3"), train_eagle.TrainConfig, train_eagle.EAGLE, "eagle"),
    "dflash2": Kind(("DFlash2",), train_block.BlockTrainConfig, train_block.BLOCK, "block"),
}
STAGES = ("measuring", "answers", "training", "evaluation")
EAGLE_3_TOKENS = 1_000_000  # trained on; fewer are for HASS
EPOCHS = 3  # as the bundled head (benchmarks/TRAINING.md)
TEXT_PER_ANSWER = 1.5  # tokens trained on, prompts included, per answer token
LEAST_TOKENS = 8000  # of answers; fewer may hold out no prompt
EVALUATION = 0.15  # of the time
COMPILING_S = 60.0  # of the losses, on two cores
SAY_S = 60.0  # between lines about the answers; the first says what the hours bring
SURE_S = 300.0  # of answers, until their rate counts: at first, prompts are read
SAVE_S = 10.0  # between writes of the state
TASKS = "gsm8k,humaneval,mt_bench"
PROMPTS = 20  # of a task, at most
VERSION = 6  # of run.json
# answer tokens for each sequence of a batch: so prompts of every source are answered, whatever the
# budget (an answer has about 200)
BATCH_TOKENS = 2000
STEPS = 1000  # units of the schedule of training, which goes by the clock
METHODS = "none,ngram,{0}:chain:tree_depth=5,{0}:dynamic,{0}:auto"


# ------------------------------------------------------------------------------- the run


class Job:
    """A run in its directory, and its clock."""

    def __init__(self, config: HeadConfig):
        """Read the state, or begin a run. Raises: ValueError where another run is in OUT."""
        self.config = config
        self.out = Path(config.out)
        self.file = self.out / "run.json"
        self.mark = time.perf_counter()
        self.saved_at = self.mark
        prompts = [read_turns(Path(p), "--prompts") for p in config.prompts.split(",")]
        identity = {
            "version": VERSION,
            "weights": weights_hash(Path(config.checkpoint)),
            "tokens": config.tokens,
            "kind": config.kind,
            "init": config.init,
            "chat": config.chat,
            "given": config.given,
            "batch_size": config.batch_size,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        }
        self.state = {"identity": identity, "done": [], "seconds": dict.fromkeys(STAGES, 0.0)}
        if self.file.is_file():
            self.state = read_json(self.file)
            self._check(identity)
        self.save()

    def _check(self, identity: dict[str, Any]) -> None:
        for name, value in identity.items():
            was = self.state["identity"].get(name)
            if value != was:
                raise ValueError(
                    f"--out: {self.out} holds another run ({name} was {str(was)[:80]!r}, not "
                    f"{str(value)[:80]!r}); use its options and weights, or name another directory"
                )

    def save(self) -> None:
        """Write the state."""
        self.saved_at = self.mark
        write_text(str(self.file), json.dumps(self.state, indent=1))

    def tick(self, stage: str, done: bool = False) -> float:
        """Count the time since the last tick to a stage. Writes: run.json, now and then.

        Returns: the seconds left for everything.
        """
        now = time.perf_counter()
        self.state["seconds"][stage] += now - self.mark
        self.mark = now
        if done:
            self.state["done"].append(stage)
        if done or now - self.saved_at >= SAVE_S:
            self.save()
        return self.config.seconds - sum(self.state["seconds"].values())

    def training_left_s(self, stage: str) -> float:
        """Count the time to a stage. Returns: the seconds until the evaluation."""
        return self.tick(stage) - EVALUATION * self.config.seconds

    def recipe_for(self, tokens: float) -> str:
        """Return the recipe for so many answer tokens."""
        is_few = tokens * TEXT_PER_ANSWER * EPOCHS < EAGLE_3_TOKENS
        return self.config.recipes[0 if is_few else -1]

    def token_s(self, recipe: str) -> float:
        """Return the seconds of training for an answer token: its features, and all epochs."""
        cost = training.StepCost(*self.state["costs"][recipe])
        return TEXT_PER_ANSWER / cost.tokens * (cost.feature_s + EPOCHS * cost.step_s)


def measure(job: Job) -> None:
    """Measure a step of every recipe. Writes: the state. Raises: ValueError for too few hours."""
    config = job.config
    job.state["costs"] = {
        recipe: training.step_cost(config.training(recipe), KINDS[config.kind].method)
        for recipe in config.recipes
    }
    if expected_tokens(job, job.training_left_s("measuring"), 0, math.inf) < LEAST_TOKENS:
        refuse(job, math.inf)
    job.tick("measuring", done=True)


def expected_tokens(job: Job, left_s: float, tokens: int, rate: float) -> int:
    """Return the answer tokens that the time suffices for, their training included.

    left_s: before the evaluation; tokens: so far; rate: per second
    """
    if job.config.tokens:
        return job.config.tokens
    for recipe in job.config.recipes:
        expected = (left_s - COMPILING_S + tokens / rate) / (1 / rate + job.token_s(recipe))
        if job.recipe_for(expected) == recipe:
            break
    return int(expected)


def refuse(job: Job, rate: float) -> NoReturn:
    """Refuse hours that cannot suffice. rate: answer tokens per second. Raises: ValueError."""
    hours = job.config.hours
    token_s = 1 / rate + job.token_s(job.config.recipes[0])
    least_s = job.state["seconds"]["measuring"] + COMPILING_S + LEAST_TOKENS * token_s
    least = math.ceil(least_s / (1 - EVALUATION) / 360) / 10
    raise ValueError(
        f"--hours {hours:g} is too short for {LEAST_TOKENS} answer tokens, which a head needs at "
        f"least; the same command goes on with --hours {max(least, hours + 0.1):.1f} or more"
    )


class Answers:
    """The progress of the answers by the clock."""

    def __init__(self, job: Job):
        self.job = job
        self.begin: tuple[int, float] | None = None  # tokens and seconds of the first look
        self.said_s = 0.0  # when the last line was said

    def are_over(self, tokens: int) -> bool:
        """Return whether the answers end; say what the time brings now and then. tokens: so far

        Raises: ValueError for hours that cannot suffice.
        """
        job = self.job
        left_s = job.training_left_s("answers")
        now_s = job.state["seconds"]["answers"]
        if self.begin is None:
            self.begin = (tokens, now_s)
            self.said_s = now_s
        spent_s = now_s - self.begin[1]
        rate = max(tokens - self.begin[0], 1) / max(spent_s, 1e-9)
        if now_s - self.said_s >= SAY_S:
            self.said_s = now_s
            expected = self._say(tokens, rate, left_s)
            if expected < LEAST_TOKENS and spent_s >= SURE_S:
                refuse(job, rate)
        if job.config.tokens:
            return tokens >= job.config.tokens
        if tokens < LEAST_TOKENS:
            if left_s <= COMPILING_S:
                refuse(job, rate)
            return False
        return left_s <= COMPILING_S + tokens * job.token_s(job.recipe_for(tokens))

    def _say(self, tokens: int, rate: float, left_s: float) -> int:
        """Say what the time brings. Returns: the expected tokens. Raises: ValueError: no room."""
        job = self.job
        expected = expected_tokens(job, left_s, tokens, rate)
        recipe = job.recipe_for(expected)
        cost = training.StepCost(*job.state["costs"][recipe])
        batches = math.ceil(TEXT_PER_ANSWER * expected / cost.tokens)
        check_room(job.out / "features.bin", batches * cost.feature_bytes)
        hours = (COMPILING_S + expected * job.token_s(recipe)) / 3600
        print(
            f"{tokens} answer tokens, {rate:.1f} per second; expected: {expected}, and {hours:.2f} "
            f"hours of training by {recipe}",
            flush=True,
        )
        return expected


def write_answers(job: Job) -> None:
    """Stage 1. Writes: OUT/answers."""
    run = answer(job.config.answering(), Answers(job).are_over)
    job.state["tokens"] = run.total()
    job.state["data"] = run.lines()
    job.state["recipe"] = job.recipe_for(run.total())
    job.tick("answers", done=True)


def train(job: Job) -> None:
    """Stage 2. Writes: OUT."""
    method = KINDS[job.config.kind].method
    features = job.out / "features.bin"
    config = job.config.training(job.state["recipe"], features=str(features))
    made = training.ready(config, method)
    job.state["batches"] = made.features.batches
    steps = EPOCHS * job.state["batches"] if job.config.tokens else STEPS
    made.config = replace(
        config,
        steps=steps,
        warmup=steps // 40,
        eval_every=max(steps // 5, 1),
        resume=(job.out / "resume.pt").is_file(),
    )
    left_s = partial(job.training_left_s, "training")
    training.train(made, None if job.config.tokens else left_s)
    job.tick("training", done=True)


def evaluate(job: Job) -> None:
    """Stage 3. Writes: OUT/evaluation.jsonl, OUT/README.md, OUT/training.json."""
    config = job.config
    tasks = TASKS.split(",")
    bench = SpeedOptions(
        checkpoint=config.checkpoint,
        head=config.out,
        tasks=TASKS,
        methods=METHODS.format(KINDS[config.kind].draft),
        limit=PROMPTS,
        chat=config.chat,
        threads=config.threads,
        device=config.device,
        json=str(job.out / "evaluation.jsonl"),
    )
    bench.check()

    def is_over(task: int) -> bool:
        left_s = job.tick("evaluation")
        spent_s = job.state["seconds"]["evaluation"]
        return spent_s >= (left_s + spent_s) * (task + 1) / len(tasks)

    rows = measure_speed(bench, is_over)
    job.tick("evaluation")
    info = read_json(job.out / "training.json")
    info["run"] = asdict(config) | job.state
    info["evaluation"] = [{name: row[name] for name in BRIEF} for row in rows]
    write_text(str(job.out / "training.json"), json.dumps(info, indent=1))
    write_text(str(job.out / "README.md"), card(job, info, rows))
    export(job)
    job.tick("evaluation", done=True)
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


def by_method(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Return the speedup of every method by task, the fastest method first."""
    speedups: dict[str, dict[str, float]] = {}
    for row in rows:
        speedups.setdefault(row["method"], {})[row["task"]] = row["speedup"] or 1.0
    return dict(sorted(speedups.items(), key=lambda item: -mean(item[1])))


def has_head(method: str) -> bool:
    """Return whether a method drafts with a head."""
    return method.split(":")[0] in head_kinds()


def mean(tasks: dict[str, float]) -> float:
    """Return the mean of a method's speedups."""
    return sum(tasks.values()) / len(tasks)


def use(config: HeadConfig, rows: list[dict]) -> str:
    """Return the command with the head; where it was not the fastest, one without it."""
    chat = f"--chat {config.chat}".strip()
    best = next(iter(by_method(rows)))
    draft = f"--draft {best}"
    if has_head(best):
        draft = f"--head {shown_path(config.out)}"
    model = f"python generate.py --checkpoint {shown_path(config.checkpoint)}"
    return f"{model} {draft} {chat}"


def speed(rows: list[dict]) -> str:
    """Return the speedup of the fastest method, by task. rows: of the evaluation"""
    methods = by_method(rows)
    best = next(iter(methods))
    tasks = ", ".join(f"{task} {ratio:.2f}" for task, ratio in methods[best].items())
    text = f"{best} has {mean(methods[best]):.2f} of vanilla decoding here, medians of {tasks}"
    if best == "none":
        text = "no method is faster than vanilla decoding here"
    if not has_head(best):
        head = next(name for name in methods if has_head(name))
        text += f"; with the head, {head} has {mean(methods[head]):.2f}: it is not recommended"
    return text


def card(job: Job, info: dict[str, Any], rows: list[dict]) -> str:
    """Return the model card. info: of training.json; rows: of the evaluation"""
    config = job.config
    state = job.state
    name = Path(config.checkpoint).name
    last = info["curve"][-1]
    best = info["best"]
    hours = ", ".join(f"{stage} {spent / 3600:.2f}" for stage, spent in state["seconds"].items())
    alphas = " ".join(f"{alpha:.3f}" for alpha in best["alpha"])
    table = "\n".join(tables(rows))
    asked = f"--tokens {config.tokens}" if config.tokens else f"--hours {config.hours:g}"
    batch = info["config"]["batch_size"] * info["config"]["seq_len"]
    epochs = last["step"] / state["batches"]
    parameters = f"{info['parameters'] / 1e6:.1f} million parameters"
    return f"""# A draft head for {name}

    {use(config, rows)}

Made by `scripts/train_head.py {asked}` of gpt-eagle.

- Target: {name}; SHA-256 of its config and weights: {state["identity"]["weights"]}.
- The target's licence: {licence(Path(config.checkpoint))}. The head is made of the
  target's answers and features, so its terms may hold for the head too.
- Speed: {speed(rows)};
  {KINDS[config.kind].draft}:auto, the default, also drafts by lookups in the text; ngram is lookups
  alone, without the head. The tables below have every task.
- Data: {state["tokens"]} tokens of the target's own answers to the prompts below.
- Training: {state["recipe"]}, {last["step"]} steps of {batch} tokens, {epochs:.1f} epochs;
  {parameters}.
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


def run(config: HeadConfig) -> None:
    """Do the stages that are left. Writes: `config.out`."""
    path = fetched(config.checkpoint)
    config = replace(config, checkpoint=str(path), device=pick_device(config.device))
    read_raw(path)  # refused if it is no checkpoint
    out = Path(config.out)
    check_place(out)
    out.mkdir(parents=True, exist_ok=True)
    if config.threads:
        torch.set_num_threads(config.threads)
    with folder_lock(out, f"waiting for another process that writes to {out}"):
        job = Job(config)
        stages: dict[str, Callable[[Job], None]] = {
            "measuring": measure,
            "answers": write_answers,
            "training": train,
            "evaluation": evaluate,
        }
        for stage, work in stages.items():
            if stage in job.state["done"]:
                continue
            spent = sum(job.state["seconds"].values()) / 3600
            print(f"\n{stage}; {spent:.2f} hours are spent", flush=True)
            work(job)
        for file in out.glob("features.bin*"):
            file.unlink()
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
