"""Stop strings: `--stop`, `stop=` of a call, and a stream. The server's are in test_serve.py."""

from __future__ import annotations

from functools import partial

import pytest

from files.tokenizer import StopMatcher
from run.library import generate, stream
from run.load import load
from run.options import DEMO
from run.session import Session

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def engines():
    options = {"checkpoint": DEMO, "device": "cpu", "max_new_tokens": 40}
    return load(**options, tree="dynamic"), load(**options, draft="none")


@pytest.mark.parametrize("lag", [0, 1])
def test_drafts_change_nothing_behind_a_stop(engines, lag, monkeypatch):
    """Nor in later turns, whose noise goes on behind the last token that is kept."""
    monkeypatch.setattr("run.scheduler.Session", partial(Session, host_lag=lag))
    prompts = [[PROMPT, "def g(b):\n", "# "], ["class A:", "\n x"], ["import"]]
    options = {"stop": ["re", "s", "("], "temperature": 1.0, "seed": [1, 2, 3]}
    found, want = (generate(engine, prompts, **options) for engine in engines)
    assert (found.tokens, found.text) == (want.tokens, want.text)
    assert found.finish_reason == want.finish_reason and "stop" in found.finish_reason
    assert not any(stop in text for text in found.text for stop in options["stop"])


def test_a_text_ends_before_its_stop(engines):
    """The tokens end with the one that completes it; the same in a stream."""
    engine = engines[0]
    whole = generate(engine, [PROMPT])
    stop = whole.text[0][50:54]
    found = generate(engine, [PROMPT], stop=stop)
    count = len(found.tokens[0])
    assert found.text[0] == whole.text[0][: whole.text[0].index(stop)]
    assert found.finish_reason == ["stop"] and found.tokens[0] == whole.tokens[0][:count]
    assert stop in engine.tokenizer.decode(found.tokens[0], continuation=True)
    assert stop not in engine.tokenizer.decode(found.tokens[0][:-1], continuation=True)
    assert round(found.stats["tokens_per_s"] * found.stats["decode_s"]) == count - 1
    assert "".join(stream(engine, PROMPT, stop=[stop, "never said"])) == found.text[0]


def test_the_stop_that_is_complete_first_ends_a_text_however_it_comes(engines):
    """A stop that lies inside another one: in a stream, with and without drafts, and in one piece."""
    whole = generate(engines[1], [PROMPT]).text[0]
    stops = [whole[30:42], whole[34:36]]
    want = whole[: whole.index(stops[1])]
    assert len(want) > 8
    for engine in engines:
        assert generate(engine, [PROMPT], stop=stops).text[0] == want
        assert "".join(stream(engine, PROMPT, stop=stops)) == want
    assert StopMatcher(stops).push(whole, last=True) == want
