"""Echoed prompts with their log-probabilities, and answers that a client has begun."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
from test_serve import PROMPT, Running  # noqa: E402

from run.generate import encode  # noqa: E402
from server.prompt_pass import prompt_features  # noqa: E402

LONG = "x = 1\n" * 150  # of more than one chunk


@pytest.fixture(scope="module")
def running():
    running = Running("--temperature", "0")
    yield running
    running.close()


def post(running, path: str, **body) -> tuple[int, dict]:
    return running.raw(json.dumps(body).encode(), path)


def states(running, text: str) -> torch.Tensor:
    """The hidden states of a text in one pass without a cache, [T, F]."""
    engine = running.engine
    ids = torch.tensor([engine.tokenizer.encode(text, special=True)])
    return engine.target(ids, torch.arange(ids.shape[1])[None])[0].float()


def test_a_prompt_of_several_chunks_is_read_as_in_one_pass(running):
    features = prompt_features(running.engine, running.engine.tokenizer.encode(LONG))
    torch.testing.assert_close(features[0].float(), states(running, LONG), rtol=0, atol=0.1)


def test_an_echo_has_the_prompt_s_log_probabilities(running):
    """As a harness for likelihoods reads them: of the whole text, offsets and all."""
    plain = running.complete(max_tokens=6, logprobs=2).choices[0]
    options = {"echo": True, "max_tokens": 6, "logprobs": 2, "n": 2}
    both = running.complete([PROMPT, LONG], **options).choices
    found = both[0]
    assert found.text == both[1].text == PROMPT + plain.text and both[3].text.startswith(LONG)
    scored = found.logprobs
    count = len(running.engine.tokenizer.encode(PROMPT))
    assert scored.token_logprobs[count:] == pytest.approx(plain.logprobs.token_logprobs)
    assert scored.text_offset[count:] == [len(PROMPT) + at for at in plain.logprobs.text_offset]
    for token, at in list(zip(scored.tokens, scored.text_offset))[1:]:
        assert found.text[at:].startswith(token)
    ids = running.engine.tokenizer.encode(PROMPT)
    logits = running.engine.target.lm_head(states(running, PROMPT).to(torch.bfloat16))
    want = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
    assert scored.token_logprobs[1:count] == pytest.approx(want.tolist(), abs=0.1)
    alone = running.complete([PROMPT, LONG], **options | {"max_tokens": 0})
    assert [choice.text for choice in alone.choices[::2]] == [PROMPT, LONG]
    assert alone.choices[0].finish_reason == "length" and alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs == scored.token_logprobs[:count]
    stream = running.complete(stream=True, **options | {"n": 1, "logprobs": None})
    assert "".join(event.choices[0].text for event in stream) == PROMPT + plain.text


def test_a_begun_answer_goes_on(running):
    """The prompt ends with the assistant's words, and the answer is what follows them."""
    ask = {"role": "user", "content": "Write a function."}
    tokenizer = running.engine.tokenizer
    text = tokenizer.decode(encode(running.engine, [ask["content"]], []), True) + "def f("
    begun = {"role": "assistant", "content": "def f("}
    body = {"messages": [ask, begun], "max_tokens": 12}
    status, found = post(running, "/v1/chat/completions", **body)
    ids = tokenizer.encode(text)
    assert status == 200 and found["usage"]["prompt_tokens"] == len(ids)
    want = running.complete([ids], max_tokens=12, temperature=0).choices[0].text
    assert found["choices"][0]["message"]["content"] == want
    named = {"continue_final_message": True, "add_generation_prompt": False}
    assert post(running, "/v1/chat/completions", **body, **named)[1]["choices"] == found["choices"]
    for bad in ({"messages": [begun]}, {"messages": [ask], "continue_final_message": True}, body | {"continue_final_message": False}):  # fmt: skip
        assert post(running, "/v1/chat/completions", **bad)[0] == 400
