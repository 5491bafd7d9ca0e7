"""The server under grammars: `response_format`, several clients at once, refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
from test_serve import PROMPT, Running  # noqa: E402

from drafts.grammar import Grammar  # noqa: E402
from server import parameters  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": [1, 20, 300]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}


@pytest.fixture(scope="module")
def running():
    running = Running()
    yield running
    running.close()


def of_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def chat(running, **options):
    messages = [{"role": "user", "content": "Describe it."}]
    return running.client.chat.completions.create(model="demo", messages=messages, **options)


def test_many_clients_with_schemas_of_their_own_and_none(running):
    """Each gets the text that the same request gets alone."""
    asked = [(schema, seed) for seed in range(4) for schema in (SCHEMA, LIST, None)]

    def ask(schema, seed):
        form = {} if schema is None else {"extra_body": {"response_format": of_schema(schema)}}
        return running.complete(seed=seed, max_tokens=60, **form).choices[0]

    with ThreadPoolExecutor(6) as pool:
        choices = list(pool.map(lambda each: ask(*each), asked))
    for (schema, seed), choice in zip(asked, choices):
        own = running.own([PROMPT], seed, grammar=schema, max_new_tokens=60)
        assert choice.text == own.text[0]
        assert choice.finish_reason == own.finish_reason[0]
        if schema is not None:
            jsonschema.validate(json.loads(choice.text), schema)


def test_chats_streams_and_several_choices(running):
    answer = chat(running, response_format=of_schema(SCHEMA), n=3, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    parts = chat(running, response_format=of_schema(SCHEMA), seed=5, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == texts[0]
    anything = chat(running, response_format={"type": "json_object"}, seed=1, max_tokens=300)
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)
    assert anything.choices[0].message.content.startswith("{")
    plain = chat(running, response_format={"type": "text"}, seed=5, max_tokens=20)
    assert plain.choices[0].message.content == chat(running, seed=5, max_tokens=20).choices[
        0
    ].message.content  # fmt: skip


def test_a_grammar_that_ends_in_nothing_ends_one_request(running, monkeypatch):
    dead = Grammar(running.engine, 'start: "abc" X\nX: /[a-z]+/ & /[0-9]+/')
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "compile_grammars", lambda *inputs: [dead])
        with ThreadPoolExecutor(2) as pool:
            bad = pool.submit(chat, running, response_format=of_schema({"type": "null"}))
            good = pool.submit(running.complete, seed=3)
            with pytest.raises(openai.BadRequestError, match="allows neither a token nor the end"):
                bad.result()
            assert good.result().choices[0].text == running.own([PROMPT], 3).text[0]
    assert not running.batcher.jobs
