"""Tools of chats through a server: forced calls, the model's own, and the conversation behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
from test_chat import template_of  # noqa: E402
from test_serve import Running  # noqa: E402

from helpers import fresh  # noqa: E402
from run.generate import generate  # noqa: E402
from run.options import DEMO  # noqa: E402
from server.call_forms import form_of  # noqa: E402
from server.tool_calls import Tools  # noqa: E402

CITY = {"type": "object", "properties": {"name": {"enum": ["Rome", "Oslo"]}}, "required": ["name"]}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": CITY | {"additionalProperties": False}},
}


def tool(name: str, **more) -> dict:
    return {"type": "function", "function": {"name": name, "description": "A tool.", **more}}


TOOLS = [tool("weather", parameters=WEATHER), tool("now")]
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


# a template that opens the thinking
OPENS = template_of("qwen2.5").replace(
    "assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo and its head, with a chat template that knows tools."""
    root = tmp_path_factory.mktemp("tools")
    for name in ("demo", "demo-eagle"):
        (root / name).mkdir()
        for file in (Path(DEMO).parent / name).iterdir():
            (root / name / file.name).symlink_to(file)
    (root / "demo" / "chat_template.jinja").write_text(template_of("qwen2.5"))
    return root / "demo"


@pytest.fixture(scope="module")
def running(folder):
    running = Running("--checkpoint", str(folder), "--chat")
    yield running
    running.close()


def ask(running, messages=ASKED, **options):
    options = {"seed": 3, "max_tokens": 80, **options}
    return running.client.chat.completions.create(model="demo", messages=messages, **options)


def test_forced_calls(running):
    """The text is that of `generate` under the call's grammar; the arguments follow the schema."""
    answer = ask(running, tools=TOOLS, tool_choice=NAMED, n=2)
    engine = fresh(running.engine)
    text = engine.template.render_messages(ASKED, TOOLS) + "<tool_call>\n"
    ids = engine.tokenizer.encode(text, bos=False, special=True)
    form = form_of(engine.template, engine.tokenizer)
    grammar = Tools(TOOLS, {"weather": WEATHER}, ["weather"], True, form).grammar()
    want = generate(engine, [ids], seed=3, max_new_tokens=80, grammar=grammar, num_samples=2)
    assert answer.usage.prompt_tokens == len(ids)
    for choice, own in zip(answer.choices, want.text):
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert json.loads(own) == {"name": "weather", "arguments": arguments}
        assert call.function.name == "weather" and call.type == "function"
        jsonschema.validate(arguments, WEATHER)
    parts = list(ask(running, tools=TOOLS, tool_choice=NAMED, stream=True))
    (delta,) = [part.choices[0].delta for part in parts if part.choices[0].delta.tool_calls]
    assert delta.tool_calls[0].index == 0 and delta.tool_calls[0].id
    first = answer.choices[0].message.tool_calls[0].function
    assert delta.tool_calls[0].function.arguments == first.arguments
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    either = ask(running, tools=TOOLS, tool_choice="required", n=5).choices
    names = {choice.message.tool_calls[0].function.name for choice in either}
    assert names == {"weather", "now"}


def test_a_call_that_is_cut_is_text(running):
    answer = ask(running, tools=TOOLS, tool_choice=NAMED, max_tokens=6, logprobs=True).choices[0]
    assert answer.finish_reason == "length" and answer.message.tool_calls is None
    assert answer.message.content.startswith('{"name"') and len(answer.logprobs.content) == 6
    parts = ask(running, tools=TOOLS, tool_choice=NAMED, max_tokens=6, logprobs=True, stream=True)
    choices = [part.choices[0] for part in parts]
    assert "".join(each.delta.content or "" for each in choices) == answer.message.content
    assert sum(len(each.logprobs.content) for each in choices if each.logprobs) == 6


def test_a_conversation_goes_on_behind_a_call(running):
    """The result's message and the call's are in the prompt, as the template writes them."""
    first = ask(running, tools=TOOLS, tool_choice=NAMED).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    messages = [*ASKED, first.model_dump(exclude_none=True), result]
    answer = ask(running, messages, tools=TOOLS, max_tokens=20)
    arguments = json.loads(call.function.arguments)
    called = {"id": call.id, "function": {"name": "weather", "arguments": arguments}}
    said = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [called]}]
    said.append({"role": "tool", "content": "sun"})
    engine = fresh(running.engine)
    text = engine.template.render_messages(said, TOOLS)
    assert "<tool_response>\nsun\n</tool_response>" in text and call.function.arguments in text
    ids = engine.tokenizer.encode(text, bos=False, special=True)
    want = generate(engine, [ids], seed=3, max_new_tokens=20).text[0]
    assert answer.choices[0].message.content == want


def test_tools_that_are_not_to_be_called_change_nothing(running):
    plain = ask(running, max_tokens=12).choices[0].message.content
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        found = ask(running, max_tokens=12, **options).choices[0].message
        assert found.content == plain and found.tool_calls is None
