"""The options of training a draft head of any kind. No torch is imported: --help needs none.

Not here: the options of a kind of head (train_eagle.py, train_block.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from files.io import check_output
from options import require
from run.options import DEMO, ROOT
from run.parsing import option, processors

DTYPE_NAMES = ("float32", "bfloat16", "float16")
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
    weight_decay: float = option(0.01, "AdamW")
    clip: float = option(0.5, "gradient norm")
    features: str = option(
        "", "file that keeps the target's features, also for later runs on the same data"
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
        "minutes after the first step, evaluations included, that end the training; --steps is "
        "then the length of the schedule. With --resume: those left. 0: --steps end it",
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
        if self.features:
            check_output(Path(self.features), "--features")
