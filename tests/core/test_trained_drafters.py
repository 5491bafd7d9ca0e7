"""Every trained drafter as a user loads it: a target and a head, files on disk, through `load`, beside vanilla.

Heads are new ones; those of Medusa and Hydra and draft models begin near the target's own scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from decode import Engine
from extras.block_draft import BlockHead
from extras.hydra_draft import HydraHeads
from extras.medusa_draft import MedusaHeads
from generate import generate, load
from helpers import GOLDEN, golden_target, pairwise
from hf.block_heads import BlockConfig
from hf.token_heads import TokenHeads
from scripts.train import losses, train_eagle
from scripts.train.distill import DistillConfig, DraftModel, save
from scripts.train.train_block import write_files
from scripts.train.train_heads import start_as_identity, write_heads

MODEL = "models/target_llama_mha"  # 3 layers, width 64, vocabulary 97
PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
INFO = {"config": {}, "curve": []}
KINDS = (
    "eagle", "eagle3", "medusa", "medusa 2", "hydra", "hydra shared", "hydra++", "dflash", "jetspec", "dspark", "model",
)  # fmt: skip
FORMATS = {"bf16": "none", "int8": "int8", "int4": "int4"}


def write_token_heads(out: Path, kind: str) -> None:
    """Write heads of Medusa or Hydra, with LM heads of their own unless the kind says otherwise."""
    target = golden_target(MODEL)
    c = target.config
    prefix = replace(c, n_layers=1) if kind == "hydra++" else None
    made = MedusaHeads if kind.startswith("medusa") else HydraHeads
    own = kind in ("medusa", "hydra", "hydra++")
    heads = made(TokenHeads(3, 2, c.dim, c.vocab_size, own, prefix=prefix))
    start_as_identity(heads, target)
    write_heads(out, heads, c, "bfloat16")


def write_block_head(out: Path, kind: str) -> None:
    target = golden_target(MODEL)
    model = replace(target.config, n_layers=1, qk_norm=True)
    spark = kind == "dspark"
    config = BlockConfig(
        model, (1, 2), 4, 96, causal=kind == "jetspec", predicts_next=spark, markov_rank=32 * spark
    )
    write_files(BlockHead(config), out, "bfloat16", INFO)


def write_drafter(out: Path, kind: str) -> None:
    """Write the files of a drafter as the training programs do."""
    target = golden_target(MODEL)
    out.mkdir()
    torch.manual_seed(1)
    if kind == "model":
        config = DistillConfig(checkpoint=str(GOLDEN / MODEL), out=str(out), layers=1)
        save(DraftModel(target, 1), target, config, INFO)
    elif kind == "eagle3":
        model = replace(target.config, n_layers=1)
        head = losses.new_head(model, target, None, from_target=True)
        config = train_eagle.TrainConfig(out=str(out), version=3)
        train_eagle.save_head(head, config, INFO)
    elif kind in ("dflash", "jetspec", "dspark"):
        write_block_head(out, kind)
    else:
        write_token_heads(out, kind)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function of a kind of drafter that returns its folder."""
    root = tmp_path_factory.mktemp("drafters")

    @functools.cache
    def folder(kind: str) -> Path:
        if kind == "eagle":
            return GOLDEN / "models/head_eagle12_mha"
        write_drafter(root / kind, kind)
        return root / kind

    return folder


@dataclass(frozen=True)
class Case:
    """How the target is loaded and decodes."""

    form: str
    compiled: bool
    temperature: float
    batch: int


def engine(case: Case, **drafter: str) -> Engine:
    """Load a drafter beside the target, as the command line does."""
    return load(
        checkpoint=str(GOLDEN / MODEL), dtype="bfloat16", quant=FORMATS[case.form], device="cpu", compile=case.compiled,
        temperature=case.temperature, batch_size=case.batch, max_new_tokens=16, ignore_eos=True, **drafter,
    )  # fmt: skip


@functools.cache
def vanilla(case: Case) -> list[list[int]]:
    return generate(engine(case, draft="none"), PROMPTS[: case.batch]).tokens


@pairwise(
    every=("kind", "form", "compiled"),
    kind=KINDS,
    form=[*FORMATS],
    compiled=[False, True],
    temperature=[0.0, 1.0],
    batch=[1, 2],
)
def test_whole_engines_give_vanillas_tokens(folder_of, kind, form, compiled, temperature, batch):
    """In every format, with C++ operators and without; with the shared noise, heads hit at times."""
    case = Case(form, compiled, temperature, batch)
    own = str(folder_of(kind))
    drafter = {"head": own, "tree": "dynamic"}
    if kind == "model":
        drafter = {"draft": "model", "draft_checkpoint": own}
    found = generate(engine(case, **drafter), PROMPTS[:batch])
    assert found.tokens == vanilla(case)
    assert temperature == 0 or sum(found.stats["accept_lengths"]), "of 97 tokens some are right"
