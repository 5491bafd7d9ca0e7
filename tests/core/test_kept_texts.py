"""Texts of past requests: which are kept, and that a traced lookup reads them. Tokens: test_requests.py."""

from __future__ import annotations

import pytest
import torch

from draft_tree import DecodedTokens
from drafts import ngram_draft
from drafts.kept_texts import RUN, PastTexts
from drafts.ngram_draft import Ngram, NgramDrafter
from helpers import (
    PROMPTS,
    engine_for,
    golden_target,
)
from reference import TORCH
from run.session import Session


def texts_of(kept: PastTexts) -> list[list[int]]:
    """The texts as they lie in the buffer."""
    texts: list[list[int]] = [[]]
    for token in kept.tokens.tolist():
        if token >= 0:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return texts[:-1]


def test_the_least_recently_used_text_makes_way():
    kept = PastTexts(capacity=40)
    runs = [list(range(begin, begin + RUN + 2)) for begin in (100, 200, 300)]
    for run in runs:
        kept.add(run)
    assert texts_of(kept) == runs and kept.tokens[-1] == -1
    prompt = [*runs[1], 7, *runs[0][:RUN]]  # begins as the second text, and repeats the first one
    kept.add(prompt, begin=len(runs[1]))
    # the first text was used; the second is a part of the new one; the third has no room
    assert texts_of(kept) == [runs[0], prompt]
    kept.add([1, 2])
    assert texts_of(kept) == [runs[0], prompt, [1, 2]]
    kept.add([1, 2])
    assert texts_of(kept) == [runs[0], prompt, [1, 2]], "no text twice"
    kept.add(runs[0][: RUN - 1], begin=0)  # too short a run
    assert texts_of(kept) == [prompt, [1, 2], runs[0][: RUN - 1]]
    kept.add(list(range(60)))
    assert texts_of(kept) == [list(range(21, 60))], "the end of a text that is too long"
    assert texts_of(kept) == [text.tokens for text in kept.texts]


@pytest.mark.usefixtures("traced")
def test_a_traced_lookup_reads_the_buffer():
    """Texts change between requests, and nothing is traced again."""
    ngram = Ngram(2, 2, 2, kept=PastTexts(capacity=64))
    text = DecodedTokens(torch.tensor([PROMPTS[0], PROMPTS[1][:7]]), torch.tensor([3, 6]))
    TORCH.complete()
    step = torch.compile(ngram_draft.lookup, fullgraph=True, dynamic=False)
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kept in (PROMPTS[0], PROMPTS[1]):
            traced = step(text, ngram)
            eager = ngram_draft.lookup(text, ngram)
            assert all(torch.equal(mine, plain) for mine, plain in zip(traced, eager))
            found.append((traced[1] > 0).any(1).tolist())
            ngram.kept.add(kept)
    assert found == [[False, False], [True, False]]


def test_a_turn_that_is_ended_early_is_kept():
    """As a server ends one at a text that the client names."""
    kept = PastTexts()
    engine = engine_for(golden_target(), NgramDrafter(Ngram(kept=kept)), max_new_tokens=20)
    session = Session(engine)
    session.admit(0, PROMPTS[0], (0, 0))
    for _ in range(4):
        session.step()
    assert session.busy(0) and not kept.texts
    session.release(0)
    session.release(0)
    assert texts_of(kept) == [session.history[0]] and len(session.history[0]) > len(PROMPTS[0])
