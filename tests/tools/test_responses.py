"""OpenAI's Responses, driven by the official client: the chat's answers as items, calls, streams, and refusals."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
from test_tool_calls import ASKED, TOOLS, WEATHER, folder, running  # noqa: E402, F401

QUESTION = ASKED[0]["content"]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
NAMED = {"type": "function", "name": "weather"}
OPTIONS = {"temperature": 0.7, "max_output_tokens": 40}
SEED = {"seed": 3}


def respond(running, input=QUESTION, **options):  # noqa: F811
    options = {"extra_body": SEED, **OPTIONS, **options}
    return running.client.responses.create(model="demo", input=input, **options)


def chat(running, messages=ASKED, **options):  # noqa: F811
    options = {"temperature": 0.7, "max_tokens": 40, "seed": 3, **options}
    return running.client.chat.completions.create(model="demo", messages=messages, **options)


def test_a_response_is_the_chat_s_answer(running):  # noqa: F811
    found = respond(running, instructions="Be brief.")
    want = chat(running, [{"role": "system", "content": "Be brief."}, *ASKED])
    assert found.output_text == want.choices[0].message.content
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert (found.object, found.temperature, found.instructions) == ("response", 0.7, "Be brief.")
    assert found.usage.input_tokens == want.usage.prompt_tokens
    assert found.usage.output_tokens == want.usage.completion_tokens == 40
    assert found.usage.input_tokens_details.cached_tokens >= 0
    assert want.usage.prompt_tokens_details.cached_tokens > 0, "the prompt was read before"
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert respond(running, parts).output_text == respond(running).output_text
    scored = respond(running, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = scored.output
    assert (
        len(item.content[0].logprobs) == 40 and len(item.content[0].logprobs[0].top_logprobs) == 2
    )


def test_a_stream_is_the_response(running):  # noqa: F811
    """The client's own helper puts the items together; the last event has them, too."""
    with running.client.responses.stream(
        model="demo", input=QUESTION, extra_body=SEED, **OPTIONS
    ) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else None
    want = respond(running)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == want.output_text and final is None
    last = events[-1].response
    assert events[-1].type == "response.incomplete" and last.output_text == text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (last.status, last.output[0].status) == ("incomplete", "incomplete")
    assert last.usage.output_tokens == 40


def test_calls_and_their_results(running):  # noqa: F811
    """A call is an item; with its result it goes back as the chat's messages do."""
    options = {"tools": FLAT, "tool_choice": NAMED, "max_output_tokens": 80}
    found = respond(running, **options)
    want = chat(running, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=80)  # fmt: skip
    (item,) = found.output
    function = want.choices[0].message.tool_calls[0].function
    assert (item.type, item.name, item.arguments) == (
        "function_call",
        "weather",
        function.arguments,
    )
    assert found.status == "completed" and found.tool_choice.name == "weather"
    with running.client.responses.stream(
        model="demo", input=QUESTION, temperature=0.7, extra_body=SEED, **options
    ) as stream:
        final = stream.get_final_response()
    assert final.output[0].arguments == item.arguments
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."}
    again = respond(running, [*ASKED, item.model_dump(exclude_none=True), result], tools=FLAT)
    called = want.choices[0].message.model_dump(exclude_none=True)
    id = called["tool_calls"][0]["id"]
    told = {"role": "tool", "tool_call_id": id, "content": "Sunny."}
    other = chat(running, [*ASKED, called, told], tools=TOOLS)
    assert again.output_text == other.choices[0].message.content
    assert again.usage.input_tokens == other.usage.prompt_tokens


def test_a_format(running):  # noqa: F811
    form = {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}
    found = respond(running, text={"format": form}, max_output_tokens=200)
    assert json.loads(found.output_text).keys() == {"city", "days"}
