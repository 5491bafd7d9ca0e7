"""Every trained drafter as a user loads it: a target and a head, files on disk, through `load`, beside vanilla.

Heads are new ones; those of Medusa and Hydra and draft models begin near the target's own scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

from decode import Engine
from drafter_files import MODEL, write_drafter
from generate import generate, load
from helpers import GOLDEN, pairwise

PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
KINDS = (
    "eagle", "eagle3", "medusa", "medusa 2", "hydra", "hydra shared", "hydra++", "dflash", "jetspec", "dspark", "model",
)  # fmt: skip
FORMATS = {"bf16": "none", "int8": "int8", "int4": "int4"}


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
