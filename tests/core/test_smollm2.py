"""The default model: a real instruct model answers, and stops by itself."""

from __future__ import annotations

import pytest

from helpers import slow
from run.library import generate
from run.load import load

pytestmark = pytest.mark.smollm2
# of France and Italy the model is nearly undecided: rounding decides between two answers
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


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
