"""Texts that are only read: embeddings, tokens, echoed prompts; and answers that a client has begun."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
from test_serve import PROMPT, Running  # noqa: E402

from server.prompt_pass import Pooling, pooling_of, prompt_features  # noqa: E402

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


def test_embeddings(running):
    """The last state by default, of length 1; the client asks for base64."""
    embed = running.client.embeddings.create
    found = embed(model="demo", input=[PROMPT, LONG])
    for text, row in zip((PROMPT, LONG), found.data):
        want = torch.nn.functional.normalize(states(running, text)[-1], dim=0)
        assert torch.cosine_similarity(torch.tensor(row.embedding), want, dim=0) > 0.999
        assert math.isclose(sum(x * x for x in row.embedding), 1, rel_tol=1e-5)
    plain = embed(model="demo", input=PROMPT, encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(found.data[0].embedding, abs=1e-6)
    assert plain.usage.total_tokens == len(running.engine.tokenizer.encode(PROMPT))
    for bad in ({"dimensions": 7}, {"input": []}, {"input": [[-1]]}, {"encoding_format": "int8"}):
        assert post(running, "/v1/embeddings", **{"input": "a", **bad})[0] == 400


def test_poolings(running, tmp_path):
    """By sentence-transformers' file; another one than the known is refused."""
    assert pooling_of(tmp_path) == Pooling("last", False)
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for name, kind in (("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")):
        modes = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_max_tokens"), False)
        file.write_text(json.dumps({"dim": 8} | modes | {f"pooling_mode_{name}": True}))
        assert pooling_of(tmp_path).kind == kind
    file.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ValueError, match="pools by .'pooling_mode_max_tokens'., and only mean"):
        pooling_of(tmp_path)
    features = prompt_features(running.engine, running.engine.tokenizer.encode(LONG))
    torch.testing.assert_close(features[0].float(), states(running, LONG), rtol=0, atol=0.1)


def test_tokens(running):
    """In llama.cpp's form and in vLLM's."""
    tokenizer = running.engine.tokenizer
    ids = tokenizer.encode("def f(x):", bos=False)
    assert post(running, "/tokenize", content="def f(x):") == (200, {"tokens": ids})
    _, told = post(running, "/tokenize", content="def f", with_pieces=True, add_special=True)
    assert [each["piece"] for each in told["tokens"]] == ["<s>", "def", " f"]
    _, told = post(running, "/tokenize", prompt="def f(x):", return_token_strs=True)
    assert told["tokens"] == [1, *ids] and told["token_strs"][:2] == ["<s>", "def"]
    assert (told["count"], told["max_model_len"]) == (1 + len(ids), running.engine.context)
    chat = [{"role": "user", "content": "Hello"}]
    _, told = post(running, "/tokenize", messages=chat)
    _, answer = post(running, "/v1/chat/completions", messages=chat, max_tokens=1)
    assert told["count"] == answer["usage"]["prompt_tokens"]
    assert post(running, "/detokenize", tokens=ids)[1] == {"content": "def f(x):", "prompt": "def f(x):"}  # fmt: skip
    for path, bad in (("/tokenize", {}), ("/tokenize", {"content": 5}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": "a"})):  # fmt: skip
        assert post(running, path, **bad)[0] == 400


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
    _, rest = post(running, "/tokenize", messages=[ask])
    text = tokenizer.decode(rest["tokens"], True) + "def f("
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
