"""The default model: a real instruct model answers, stops by itself, and drafting changes no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drafts.by_value import ByValue
from files.io import is_gguf
from helpers import slow
from run.generate import Batch, compare
from run.library import generate
from run.load import load
from run.options import DEFAULT, GenerateConfig

pytestmark = pytest.mark.smollm2
# of France and Italy the model is nearly undecided: rounding decides between two answers
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."
ESSAY = "Write an essay on rivers and lakes."


def test_it_is_the_default(smollm2):
    assert GenerateConfig().checkpoint == DEFAULT == str(smollm2) and is_gguf(Path(DEFAULT))


@pytest.mark.parametrize("dtype", ["", *slow(["bfloat16"])])
def test_a_conversation(smollm2, dtype):
    """It answers, ends its turn by itself, and the second turn sees the first."""
    engine = load(chat="", max_new_tokens=60, dtype=dtype)
    assert engine.option("quant") == ("none" if dtype else "blocks")
    assert dtype or engine.option("group_size") == 0, "the file's own groups"
    first = generate(engine, [QUESTION])
    assert first.text == [ANSWER] and first.finish_reason == ["stop"]
    assert engine.tokenizer.piece(first.tokens[0][-1]) == b""  # <|im_end|>
    turns = generate(engine, [[QUESTION, "And what is its largest river?"]])
    assert turns.text[0] == first.text[0] and turns.prompt_tokens[1] > turns.prompt_tokens[0] + len(
        first.tokens[0]
    )


@pytest.mark.parametrize("quant, temperature", [
    ("none", 1.0), *slow([("none", 0.0), ("int8", 0.0), ("int4", 0.0)]),
])  # fmt: skip
def test_drafting_changes_no_token(smollm2, quant, temperature):
    """20 prompts of every kind: benchmarks/RESULTS.md."""
    engine = load(
        chat="",
        quant=quant,
        temperature=temperature,
        draft="ngram",
        max_new_tokens=12,
        compile=True,
    )
    engine = replace(engine, policy=ByValue())  # drafts, whether it pays or not
    drafted, outcome = compare(Batch(engine, [[QUESTION], [ESSAY]]))
    assert outcome["identical"] == 1.0 and drafted.stats["cycles"] > 0
    assert max(drafted.stats["accept_lengths"]) > 0
