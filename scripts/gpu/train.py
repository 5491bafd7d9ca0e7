"""Train a model's EAGLE-3 head on a GPU that is lent for minutes, all by one clock.

    python3 scripts/gpu/train.py --seconds 540 --out results      # the bundled head goes on

1. A process beside this one does two steps of the training, so that the compiler has done its work
   when training begins, and so that its faults are told in the first minute.
2. The target answers prompts in large batches (../train/generate_answers.py), for its share of the
   time: questions, functions and tasks greedily and several times at T = 1, and its own prompts.
3. An EAGLE-3 head learns from the answers (../train/train_eagle.py) until the seconds are over. It
   is written whenever its held-out tau is the highest so far.

OUT/rates.json tells tokens and seconds of both stages. The same command goes on where it was, also
behind a kill; what was written is used.
Not here: what travels to the machine and back (train.sh).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.io import write_text
from options import log_note
from run.options import DEFAULT, ROOT, pick_device
from run.parsing import one_line_errors, option, parse
from scripts.train.train_options import QUESTIONS

ENDING_S = 8.0  # of the last files
STEPS = 1000  # units of the schedule of training, which goes by the clock


@dataclass(frozen=True)
class LentConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEFAULT, "the target")
    head: str = option(
        str(ROOT / "checkpoints/SmolLM2-135M-Instruct.Q4_1-eagle"),
        "the EAGLE-3 head that training begins with, or random",
    )
    out: str = option("lent", "directory to write; an unfinished run in it goes on")
    seconds: float = option(540.0, "time for everything", least=1)
    answering: float = option(0.45, "share of the time for answers", least=0, most=1)
    chat: str = option("", "chat template; empty: the checkpoint's own")
    answers: int = option(768, "answers decoded together", least=1)
    samples: int = option(3, "answers at T = 1 to each given prompt", least=0)
    batch_size: int = option(32, "sequences of a training step", least=1)
    seq_len: int = option(512, "tokens of a sequence", least=2)
    unroll: int = option(5, "steps of a chain that the loss has", least=1)
    lr: float = option(2e-3, "peak learning rate of AdamW")
    muon_lr: float = option(2e-3, "peak learning rate of Muon")
    eval_prompts: int = option(48, "held-out prompts", least=1)
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    def training(self, out: Path, **options: object) -> train_eagle.TrainConfig:
        """Return the options of the training. out: the head's directory"""
        usual = {
            "data": str(Path(self.out, "answers", "answers.jsonl")),
            "steps": STEPS,
            "warmup": STEPS // 50,
            "eval_every": STEPS // 5,
            "eval_prompts": self.eval_prompts,
        }
        return train_eagle.TrainConfig(
            checkpoint=self.checkpoint,
            out=str(out),
            chat=self.chat,
            version=3,
            init=self.head,
            unroll=self.unroll,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            optimizer="muon",
            lr=self.lr,
            muon_lr=self.muon_lr,
            device=self.device,
            **usual | options,
        )


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(LentConfig, "train.py", __doc__) if __name__ == "__main__" else None

import torch

from scripts.train import train_eagle
from scripts.train.generate_answers import AnswerConfig, Run, answer


def rehearse(config: LentConfig) -> subprocess.Popen:
    """Begin two steps of the same training on other data, in a process beside this one."""
    few = {"data": QUESTIONS, "steps": 2, "warmup": 1, "eval_every": 2}
    training = config.training(Path(config.out, "rehearsal"), **few, eval_prompts=2)
    changed = {
        f.name: getattr(training, f.name)
        for f in fields(training)
        if getattr(training, f.name) != f.default
    }
    flags = [f"--{name}={value}" for name, value in changed.items()]
    program = str(ROOT / "scripts/train/train_eagle.py")
    return subprocess.Popen([sys.executable, program, *flags])


def write_answers(config: LentConfig, seconds: float) -> dict[str, float]:
    """Answer prompts for some time. Writes: OUT/answers. Returns: tokens and seconds."""
    began = time.monotonic()
    begun_with: list[int] = []

    def over(run: Run) -> float:
        begun_with.append(run.total())
        spent_s = time.monotonic() - began
        print(f"{spent_s:6.1f} s: {run.total()} answer tokens", flush=True)
        return max(spent_s / seconds, 1e-6)

    answers = AnswerConfig(
        checkpoint=config.checkpoint,
        out=str(Path(config.out, "answers")),
        chat=config.chat,
        batch_size=config.answers,
        samples=config.samples,
        device=config.device,
    )
    run = answer(answers, over)
    written = run.total() - begun_with[0]
    return {"answer_tokens": written, "answer_s": time.monotonic() - began}


def train(config: LentConfig, left_s: Callable[[], float]) -> dict[str, float]:
    """Train on the answers until no time is left. Writes: OUT/head. Returns: tokens and seconds."""
    began = time.monotonic()
    head = Path(config.out, "head")
    training = config.training(head, resume=(head / "resume.pt").is_file())
    made = train_eagle.ready(training)
    prepared_s = time.monotonic() - began
    print(f"{prepared_s:.1f} s until training; {left_s():.0f} s left", flush=True)
    if left_s() <= 0:
        log_note("no time is left to train; the answers are there: give more --seconds")
        return {"prepared_s": prepared_s}
    train_eagle.train(training, made, left_s)
    info = json.loads((head / "training.json").read_text())
    steps = info["curve"][-1]["step"]
    tokens = steps * config.batch_size * config.seq_len
    seconds = time.monotonic() - began - prepared_s
    return {"prepared_s": prepared_s, "trained_tokens": tokens, "train_s": seconds}


def run(config: LentConfig) -> None:
    """Do both stages. Writes: OUT."""
    began = time.monotonic()
    config = replace(config, device=pick_device(config.device))
    Path(config.out).mkdir(parents=True, exist_ok=True)

    def left_s() -> float:
        return config.seconds - ENDING_S - (time.monotonic() - began)

    rehearsal = rehearse(config)
    try:
        rates = write_answers(config, config.answering * config.seconds)
    finally:
        if rehearsal.poll() is None:
            rehearsal.kill()
    print(f"the rehearsal ended with status {rehearsal.wait()}", flush=True)
    gc.collect()  # the engines of the answers
    if config.device.startswith("cuda"):
        torch.cuda.empty_cache()
        rates["device"] = torch.cuda.get_device_name()
    write_text(str(Path(config.out, "rates.json")), json.dumps(rates, indent=1))
    rates |= train(config, left_s)
    write_text(str(Path(config.out, "rates.json")), json.dumps(rates, indent=1))
    print(json.dumps(rates), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    config = COMMAND or parse(LentConfig, "train.py", __doc__, argv)
    with one_line_errors("train.py"):
        run(config)


if __name__ == "__main__":
    main()
