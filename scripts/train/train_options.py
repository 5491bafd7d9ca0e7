"""The options of train_head.py, and of training a head of any kind. --help needs no torch.

Not here: the options of a kind of head (train_eagle.py, train_block.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from files.io import check_output
from options import require
from run.options import DEFAULT, DEMO, ROOT
from run.parsing import option, processors

DTYPE_NAMES = ("float32", "bfloat16", "float16")
LEAST_TOKENS = 8000  # of answers; fewer may hold out no prompt
QUESTIONS = str(ROOT / "data/train/gsm8k_train_clean.jsonl")  # with answers of the data set


def resume_file(out: Path, resume: bool) -> Path:
    """Return the file of a run's state. Raises: ValueError when there is nothing to resume."""
    file = out / "resume.pt"
    if resume and not file.is_file():
        raise ValueError(
            f"--resume: {out} holds no unfinished run; leave --resume out to start one"
        )
    return file


@dataclass
class TrainOptions:
    """Options of training a head of any kind."""

    checkpoint: str = option(DEMO, "the target")
    out: str = option(
        "checkpoints/head",
        "directory to write, official layout; holds the resume state while training",
    )
    data: str = option(QUESTIONS, "comma-separated JSONL files")
    chat: str = option("", "chat template of dialogue data; empty: the checkpoint's own")
    resume: bool = option(False, "go on from the last saved step")
    steps: int = option(20000, "training steps", least=1)
    batch_size: int = option(4, "sequences per step", least=1)
    seq_len: int = option(
        2048, "tokens per sequence; examples are laid end to end and split", least=2
    )
    optimizer: str = option(
        "adamw", "adamw as in the paper, or muon for the matrices", ("adamw", "muon")
    )
    lr: float = option(3e-5, "peak learning rate of AdamW")
    muon_lr: float = option(4e-3, "peak learning rate of Muon")
    warmup: int = option(2000, "steps")
    features: str = option(
        "", "folder that keeps the target's features, also for later runs on the same data"
    )
    dtype: str = option("bfloat16", "autocast of training and weights of the file", DTYPE_NAMES)
    eval_every: int = option(500, "steps", least=1)
    eval_prompts: int = option(64, "held-out prompts for alpha and tau", least=1)
    patience: int = option(
        0, "evaluations without a higher held-out tau that end the training; 0: any", least=0
    )
    seed: int = option(0, "of initialisation, order and noise")
    minutes: float = option(
        0.0,
        "minutes behind the first step, evaluations included, that end the training; --steps is "
        "then the length of the schedule. 0: --steps end it",
        least=0,
    )
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0, most=processors())
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    version = 1  # features are kept as for EAGLE-1, without the target's best tokens
    is_trained = False  # the head at the start, whose tau counts then

    def check(self) -> None:
        """Check the options, and the files that they name, before anything is loaded.

        Raises: ValueError for a wrong combination, a missing file, or nothing to resume.
        """
        resume_file(Path(self.out), self.resume)
        for name in self.data.split(","):
            require(Path(name).is_file(), f"--data: there is no file {name}; name another")
        if self.features and not Path(self.features).is_dir():
            check_output(Path(self.features), "--features")


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
        least=LEAST_TOKENS,
    )
    prompts: str = option(
        QUESTIONS,
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
    answers_from: str = option(
        "",
        "OpenAI-compatible servers that write the answers, comma-separated, as "
        "http://localhost:8000/v1; OPENAI_API_KEY is their key. Empty: this program does",
    )
    answer_model: str = option("", "the name of --checkpoint on the servers of --answers_from")
    batch_size: int = option(4, "sequences of a training step; a GPU has room for 32", least=1)
    chat: str = option("", "chat template; empty: the checkpoint's own")
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0, most=processors())
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    @property
    def seconds(self) -> float:
        """The time for everything."""
        return math.inf if self.tokens else 3600 * self.hours

    @property
    def draft(self) -> str:
        """The name of the head's kind in generate.py."""
        return "block" if self.kind == "dflash2" else "eagle"
