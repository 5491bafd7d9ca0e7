"""Train a draft head for a model: one command, from nothing to a directory that `--head` takes.

    python scripts/train_head.py --checkpoint MODEL --out heads/mine --hours 2
    python generate.py --checkpoint MODEL --head heads/mine --chat

1. A measurement of a tenth of the hours at most gives the plan: the hours, disk and memory of
   every stage. Hours that cannot suffice are refused as soon as that is known.
2. Answers: the target answers prompts, also its own (train/generate_answers.py).
3. Features: its hidden states over these texts go to a file (train/feature_cache.py).
4. Training, over three steps of a chain: HASS, which has the layout of EAGLE-1, or EAGLE-3 where
   the hours suffice for a million tokens; then the sharpness (train/train_eagle.py). With
   `--kind dflash2` it is a block drafter (train/train_block.py).
5. Evaluation: a chain and trees beside vanilla decoding, by task (bench/papers.py). Then the model
   card, `README.md`, and `training.json` are written, and of an EAGLE-3 head GGUF files for
   llama.cpp (export_head.py).

Every stage ends by the clock, when its share of the hours is used, before a kill or after.
With `--tokens` in place of `--hours` no clock ends a stage. Where a stage brings far less than
planned, the program says so, and asks on a terminal whether to go on.
OUT/run.json holds the plan and the state, OUT/log.txt what was printed. After a kill the same
command goes on, also with more hours: with the next batch of answers or features, the last saved
step, the next round of a task.
Trade-off: the stages of a run have fixed shares of the time. HASS reuses the target's last feature
and learns from few tokens; EAGLE-3 overtakes it with many (benchmarks/TRAINING.md).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import hashlib
import io
import json
import math
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.fetch import fetched
from files.gguf_header import read_header
from files.io import is_gguf, read_json, read_text, write_text
from files.registry import check_architecture
from options import log_note, require
from run.options import DEFAULT, ROOT, pick_device
from run.parsing import one_line_errors, option, parse, processors


@dataclass(frozen=True)
class HeadConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(
        DEFAULT, "the target: a Hugging Face directory, quantized or not, or a GGUF file"
    )
    out: str = option("heads/mine", "directory to write; an unfinished run in it goes on")
    hours: float = option(
        2.0, "time for everything, on this machine; it can be raised when a run goes on", least=0
    )
    tokens: int = option(
        0,
        "answer tokens to train on, however long that takes; 0: as many as --hours allow",
        least=8000,  # plan.LEAST_TOKENS
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
    chat: str = option("", "chat template; empty: the checkpoint's own")
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0, most=processors())
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    @property
    def most_hours(self) -> float:
        """The hours that end the stages."""
        return math.inf if self.tokens else self.hours

    def answers(self, tokens: float | None = None) -> AnswerConfig:
        """Return the options of the answers; few are answered in small batches, of every kind."""
        if tokens is None:
            tokens = ANSWER_TOKENS
        return AnswerConfig(
            batch_size=min(48, math.ceil(tokens / BATCH_TOKENS)),
            checkpoint=self.checkpoint,
            out=str(Path(self.out, "answers")),
            prompts=self.prompts,
            given=self.given,
            chat=self.chat,
            tokens=tokens,
            device=self.device,
        )

    def training(self, recipe: str, **options: Any) -> train_eagle.TrainOptions:
        """Return the options of the training. recipe: one of RECIPES"""
        return KINDS[self.kind].options(
            checkpoint=self.checkpoint,
            out=self.out,
            data=str(Path(self.out, "answers", "answers.jsonl")),
            chat=self.chat,
            threads=self.threads,
            device=self.device,
            **RECIPES[recipe] | options,
        )


def check_place(out: Path) -> None:
    """Check that a directory holds a run, or nothing. Raises: ValueError."""
    if out.is_file():
        raise ValueError(f"--out: {out} is a file; name a directory")
    known = {"run.json", "log.txt"}  # the second alone: of a run that was killed before its plan
    names = {file.name for file in out.iterdir()} if out.is_dir() else known
    if names and names.isdisjoint(known):
        raise ValueError(
            f"--out: {out} holds something else than a run of train_head.py; name another directory"
        )


def read_command(argv: list[str] | None = None) -> HeadConfig:
    """Read the command line. Exit with status 2 on a mistake, also of the checkpoint's header."""
    config = parse(HeadConfig, "train_head.py", __doc__, argv)
    with one_line_errors("train_head.py"):
        has_one = not config.tokens or config.hours == HeadConfig.hours
        require(has_one, "--tokens: the hours follow from the tokens; drop --hours")
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
from tqdm import tqdm

from backends.cpp.build import folder_lock
from files.config import read_raw
from run.methods import head_kinds
from scripts import export_head
from scripts.bench import papers
from scripts.bench.measure import shown_path
from scripts.bench.report import BRIEF, tables
from scripts.train import train_block, train_eagle
from scripts.train.feature_cache import weights_hash
from scripts.train.generate_answers import AnswerConfig, Run, answer, by_tokens, read_turns
from scripts.train.plan import (
    EPOCHS,
    LEAST_TOKENS,
    PROMPTS,
    STAGES,
    TEXT_PER_ANSWER,
    Measurement,
    in_words,
    make_plan,
    plan_text,
)

ANSWER_TOKENS = AnswerConfig.tokens  # without a plan
COMMON = {
    "seq_len": 512, "batch_size": 4, "optimizer": "muon", "eval_prompts": 24, "patience": 2,
}  # fmt: skip
OF_EAGLE = COMMON | {"unroll": 3, "draft_vocab": 8192}
RECIPES = {  # by measurement (benchmarks/TRAINING.md)
    "HASS": OF_EAGLE | {"init": "feature", "token_weight": 1.0, "lr": 3e-3, "muon_lr": 4e-3},
    "EAGLE-3": OF_EAGLE | {"version": 3, "lr": 2e-3, "muon_lr": 2e-3},
    "DFlash2": COMMON
    | {"selector_rank": 64, "block_size": 6, "layers": 1, "decay": 3.0, "lr": 3e-3},
}


class Kind(NamedTuple):
    """A value of --kind."""

    recipes: tuple[str, ...]  # each is for more tokens than the one before
    options: type[train_eagle.TrainOptions]
    method: Callable[[], train_eagle.TrainingParts]
    draft: str  # its name in generate.py


KINDS = {
    "eagle": Kind(("HASS", "EAGLE-3"), train_eagle.TrainConfig, train_eagle.eagle_method, "eagle"),
    "dflash2": Kind(("DFlash2",), train_block.BlockTrainConfig, train_block.block_method, "block"),
}
EAGLE_3_TOKENS = 1_000_000  # trained on; fewer are for HASS
TASKS = "gsm8k,humaneval,mt_bench"
VERSION = 5  # of run.json
# answer tokens for each sequence of a batch: so a batch of each of the ten kinds of prompts is
# answered, whatever the budget (an answer has about 200)
BATCH_TOKENS = 2000
LINE_S = 60.0  # between lines about a stage
MISSED = 0.8  # of what was planned for a stage; less is said
ASK_S = 60.0  # to answer whether the run goes on; it does after that
STEPS = 1000  # units of the schedule of training, which goes by the clock
METHODS = "none,ngram,{0}:chain:tree_depth=5,{0}:dynamic,{0}:auto"


# ------------------------------------------------------------------------------- the run


class Job:
    """A run in its directory. Writes: run.json, at every change."""

    def __init__(self, config: HeadConfig):
        """Read the state, or begin a run. Raises: ValueError where another run is in OUT."""
        self.config = config
        self.out = Path(config.out)
        self.file = self.out / "run.json"
        self.mark = time.perf_counter()
        self.line_mark = self.mark  # of the last line about a stage
        prompts = [read_turns(Path(p), "--prompts") for p in config.prompts.split(",")]
        identity = {
            "version": VERSION,
            "weights": weights_hash(Path(config.checkpoint)),
            "tokens": config.tokens,
            "kind": config.kind,
            "chat": config.chat,
            "given": config.given,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        }
        self.state = {
            "identity": identity,
            "hours": config.hours,
            "done": [],
            "seconds": dict.fromkeys(("plan", *STAGES), 0.0),
        }
        if self.file.is_file():
            self.state = read_json(self.file)
            self._check(identity)
            if config.hours != self.state["hours"]:
                self._extend()

    def _check(self, identity: dict[str, Any]) -> None:
        for name, value in identity.items():
            was = self.state["identity"].get(name)
            if value == was:
                continue
            if name == "weights":
                raise ValueError(
                    f"--checkpoint: the weights of {self.config.checkpoint} changed since "
                    f"{self.out} was begun (sha256 {str(was)[:8]}, now {value[:8]}); restore "
                    "them, or name another --out"
                )
            raise ValueError(
                f"--out: {self.out} holds another run ({name} was {was!r}, not {value!r}); "
                "use its options, or name another directory"
            )

    def _extend(self) -> None:
        """Take the hours of this command, which are more. Writes: the state, not its file."""
        hours = self.state["hours"]
        if self.config.hours < hours:
            raise ValueError(
                f"--hours: {self.out} was begun with {hours:g}, which can be raised, not lowered; "
                f"give --hours {hours:g} or more, or name another --out"
            )
        if "training" in self.state["done"]:
            raise ValueError(
                f"--hours: the head in {self.out} is trained, with --hours {hours:g}; give these, "
                "or name another --out"
            )
        if "answers" not in self.state["done"]:
            self.state.pop("plan", None)  # the tokens follow from the hours
        self.state["hours"] = self.config.hours

    def save(self) -> None:
        """Write the state."""
        write_text(str(self.file), json.dumps(self.state, indent=1))

    def table(self) -> str:
        """Return the plan, and the time of the stages that are done."""
        taken_s = {stage: self.state["seconds"][stage] for stage in self.state["done"]}
        return plan_text(self.state["plan"], taken_s)

    def tick(self, stage: str, done: bool = False, so_far: str = "") -> float:
        """Count the time since the last tick to a stage, and say it now and then.

        so_far: what the stage has brought
        Returns: the time (s). Writes: run.json.
        """
        now = time.perf_counter()
        part_s = now - self.mark
        self.state["seconds"][stage] += part_s
        self.mark = now
        if done:
            self.state["done"].append(stage)
        elif stage in STAGES and now - self.line_mark >= LINE_S:
            self.line_mark = now
            spent = in_words(self.state["seconds"][stage])
            planned = in_words(self.state["plan"]["seconds"][stage])
            tqdm.write(f"{stage}: {spent} of about {planned}{so_far}")
        self.save()
        return part_s

    def allowed_s(self, stage: str) -> float:
        """Return the seconds of a stage: its planned share of the time that earlier ones left."""
        done = ("plan", *self.state["done"])
        used_s = sum(self.state["seconds"][name] for name in done)
        planned = self.state["plan"]["seconds"]
        share = planned[stage] / sum(planned[name] for name in STAGES if name not in done)
        return max(self.config.most_hours * 3600 - used_s, 0.0) * share

    def left_s(self, stage: str) -> float:
        """Count the time to a stage. Returns: the seconds left of it. Writes: run.json."""
        self.tick(stage)
        return self.allowed_s(stage) - self.state["seconds"][stage]

    def over(self, stage: str, share: float = 1.0, so_far: str = "") -> bool:
        """Count a part of a stage, and tell whether less than half of the next one fits.

        share: of the time of the stage; so_far: as for `tick`
        Writes: run.json.
        """
        part_s = self.tick(stage, so_far=so_far)
        return self.state["seconds"][stage] + part_s / 2 >= share * self.allowed_s(stage)

    def check_brought(self, stage: str, made: int, planned: int, unit: str) -> None:
        """Say where a stage brought far less than planned; on a terminal, offer to stop there.

        unit: of `made` and `planned`
        Raises: ValueError to stop.
        """
        if made >= MISSED * planned:
            return
        spent = in_words(self.state["seconds"][stage])
        print(f"note: {made} of the {planned} planned {unit} of {stage} are there after {spent}")
        if self.config.tokens or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        print("Enter: go on with these, as after a minute; n: stop, for more --hours", flush=True)
        ready = select.select([sys.stdin], [], [], ASK_S)[0]
        if ready and sys.stdin.readline().strip().lower().startswith("n"):
            raise ValueError(
                f"stopped; the same command with more than --hours {self.config.hours:g} goes on"
            )


def plan_of(config: HeadConfig, measured: Measurement) -> dict[str, Any]:
    """Measure the stages. Returns: the plan of the recipe that the hours suffice for."""
    kind = KINDS[config.kind]
    measured.answers(config.answers())
    for recipe in kind.recipes:
        measured.training(config.training(recipe), kind.method())
        plan = make_plan(measured.costs, config.hours, config.out, config.tokens)
        if plan["tokens"] * TEXT_PER_ANSWER * EPOCHS < EAGLE_3_TOKENS:
            break
    return plan | {"recipe": recipe}


def write_answers(job: Job) -> None:
    """Stage 1. Writes: OUT/answers."""

    def over(run: Run) -> float:
        tokens = run.total()
        is_over = job.over("answers", so_far=f", {tokens} of about {planned} tokens")
        if job.config.tokens:
            return by_tokens(run)
        if tokens < LEAST_TOKENS:
            return min(by_tokens(run), 0.99)
        return 1.0 if is_over else job.state["seconds"]["answers"] / job.allowed_s("answers")

    planned = job.state["plan"]["tokens"]
    run = answer(job.config.answers(planned), over)
    job.check_brought("answers", run.total(), planned, "tokens")
    job.state["tokens"] = run.total()
    job.state["data"] = run.lines()
    job.tick("answers", done=True)


def train(job: Job) -> None:
    """Stages 2 and 3. Writes: OUT."""
    features = job.out / "features.bin"
    config = job.config.training(job.state["plan"]["recipe"], features=str(features))
    made = train_eagle.ready(config, KINDS[job.config.kind].method())
    job.tick("training")  # else the time to open would count as a batch of features
    if "features" not in job.state["done"]:
        over = partial(job.over, "features")
        job.state["batches"] = train_eagle.fill_features(config, made, over)
        planned = len(made.features.kept)
        job.check_brought("features", job.state["batches"], planned, "batches")
        job.tick("features", done=True)
    by_clock = not job.config.tokens
    steps = STEPS if by_clock else EPOCHS * job.state["batches"]
    config = replace(
        config,
        steps=steps,
        warmup=steps // 40,
        eval_every=max(steps // 5, 1),
        epoch_batches=job.state["batches"],
        resume=(job.out / "resume.pt").is_file(),
    )
    left_s = partial(job.left_s, "training")
    train_eagle.train(config, made, left_s if by_clock else None)
    job.tick("training", done=True)


def evaluate(job: Job) -> None:
    """Stage 4. Writes: OUT/evaluation.jsonl, OUT/README.md, OUT/training.json."""
    config = job.config
    tasks = TASKS.split(",")
    bench = papers.BenchConfig(
        checkpoint=config.checkpoint,
        eagle=config.out,
        tasks=TASKS,
        methods=METHODS.format(KINDS[config.kind].draft),
        limit=PROMPTS,
        traced=1,
        chat=config.chat,
        threads=config.threads,
        device=config.device,
        json=str(job.out / "evaluation.jsonl"),
    )
    bench.check()
    rows = papers.run(bench, lambda task: job.over("evaluation", (task + 1) / len(tasks)))
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
    if job.state["plan"]["recipe"] != "EAGLE-3":
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
    hours = ", ".join(f"{stage} {state['seconds'][stage] / 3600:.2f}" for stage in STAGES)
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
- Training: {state["plan"]["recipe"]}, {last["step"]} steps of {batch} tokens, {epochs:.1f} epochs;
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


class Log(io.TextIOBase):
    """Standard output that is also written to a file."""

    def __init__(self, file: TextIO):
        self.file = file
        self.screen = sys.stdout

    def write(self, text: str) -> int:
        self.file.write(text)
        return self.screen.write(text)

    def flush(self) -> None:
        self.file.flush()
        self.screen.flush()


@contextmanager
def folder_of(out: Path) -> Iterator[None]:
    """Make the directory of a run, and log what is printed. Writes: OUT/log.txt.

    A run that ends before it has a plan leaves nothing.
    """
    check_place(out)
    is_new = not out.is_dir()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    try:
        with open(log, "a", encoding="utf-8") as file, redirect_stdout(Log(file)):
            yield
    finally:
        if not (out / "run.json").is_file():
            log.unlink(missing_ok=True)
            if is_new:
                with suppress(OSError):  # it is not empty
                    out.rmdir()


def run(config: HeadConfig) -> None:
    """Make the plan, and do the stages that are left. Writes: `config.out`."""
    path = fetched(config.checkpoint)
    config = replace(config, checkpoint=str(path), device=pick_device(config.device))
    read_raw(path)  # refused if it is no checkpoint
    out = Path(config.out)
    if config.threads:
        torch.set_num_threads(config.threads)
    with (
        folder_of(out),
        folder_lock(out, f"waiting for another process that writes to {out}"),
    ):
        begin = partial(Measurement, path, config.device, config.most_hours, config.tokens)
        measured = None
        if not (out / "run.json").is_file():
            measured = begin()  # refused before the weights are hashed, which may take a minute
        job = Job(config)
        if "plan" not in job.state:
            job.state["plan"] = plan_of(config, measured or begin())
            job.tick("plan")
        reason = ", by the number of tokens" if len(KINDS[config.kind].recipes) > 1 else ""
        print(f"{job.state['plan']['recipe']}{reason}")
        print(job.table(), flush=True)
        stages: dict[str, Callable[[Job], None]] = {
            "answers": write_answers,
            "training": train,
            "evaluation": evaluate,
        }
        left = [stage for stage in stages if stage not in job.state["done"]]
        for stage in left:
            spent = in_words(sum(job.state["seconds"].values()))
            print(f"\n{stage}; {spent} are spent", flush=True)
            stages[stage](job)
        for file in out.glob("features.bin*"):
            file.unlink()
        if left:
            print(f"\n{job.table()}")
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
