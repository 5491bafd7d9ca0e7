"""Tools of chats: the syntax that a template shows, calls found in a text, forced ones, and the conversation behind them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
from test_chat import CHECKPOINTS, template_of  # noqa: E402
from test_serve import Running  # noqa: E402
from test_tokenizer import CONTROLS, build_json, write  # noqa: E402

from files.chat import CHAT_TEMPLATES, chat_template  # noqa: E402
from files.tokenizer import Tokenizer  # noqa: E402
from helpers import fresh  # noqa: E402
from run.generate import generate  # noqa: E402
from run.options import DEMO  # noqa: E402
from server import app as serve  # noqa: E402
from server.bodies import Chat  # noqa: E402
from server.call_forms import NOTHING, Form, form_of  # noqa: E402
from server.tool_calls import Finder, Tools, one_call_each  # noqa: E402

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


# --------------------------------------------------------------------------------- of the template


@pytest.mark.parametrize("name, syntax", [
    ("qwen2.5", ("<tool_call>\n", "arguments", "\n</tool_call>")), ("llama3.1", ("", "parameters", "")),
    ("mistral-v0.3", ("[TOOL_CALLS] [", "arguments", "]")), ("smollm2", None),
])  # fmt: skip
def test_a_template_shows_how_calls_are_written(name, syntax, tmp_path):
    special, _ = CHECKPOINTS[name]
    names = dict.fromkeys([*special.values(), "<|im_start|>", "[TOOL_CALLS]", *CONTROLS])
    path = build_json(tmp_path, list(names), bos=False)
    write(path, "tokenizer_config.json", special)
    write(path, "chat_template.jinja", template_of(name))
    tokenizer = Tokenizer.load(path)
    template = chat_template(path, tokenizer)
    if syntax is None:
        with pytest.raises(
            ValueError, match="the model's chat template knows no tools; leave them out"
        ):
            form_of(template, tokenizer)
        return
    found = form_of(template, tokenizer)
    assert (found.opening, found.key, found.closing) == syntax
    assert found.several == (name != "llama3.1")  # which raises for two
    control = ["[TOOL_CALLS]"] if name.startswith("mistral") else []
    assert found.controls == {name: tokenizer.id_of(name) for name in control}
    ids = tokenizer.encode(found.opening + "{", bos=False, special=True)
    stream = tokenizer.stream(True, frozenset(found.controls.values()))
    assert stream.push(ids) == found.opening + "{"


OPENS = template_of("qwen2.5").replace(
    "assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}"
)
# as Qwen3-Thinking's, which writes a thinking into the last answer alone
CLOSES = OPENS.replace(
    "{{- '<|im_start|>' + message.role }}",
    "{{- '<|im_start|>' + message.role }}{% if loop.last %}{{ '\\n<think>\\n\\n</think>\\n' }}{% endif %}",
)  # fmt: skip


def folder_of(tmp_path, template: str) -> Path:
    special, _ = CHECKPOINTS["qwen2.5"]
    path = build_json(tmp_path, [*special.values(), "<|im_start|>"], bos=False)
    write(path, "tokenizer_config.json", special)
    return write(path, "chat_template.jinja", template)


# as Qwen3's with enable_thinking = false: the prompt ends with an empty thinking
EMPTY = OPENS.replace("<think>\\n'", "<think>\\n\\n</think>\\n\\n'")


@pytest.mark.parametrize("text", [OPENS, CLOSES, EMPTY])
def test_calls_of_a_template_that_opens_the_thinking(text, tmp_path):
    """As QwQ's: earlier answers are written without the tag that ends the prompt."""
    assert text.count("<think>") == (2 if text == CLOSES else 1)
    path = folder_of(tmp_path, text)
    tokenizer = Tokenizer.load(path)
    template = chat_template(path, tokenizer)
    prompt = template.render_messages(ASKED, TOOLS)
    assert prompt.rpartition("<think>")[0].endswith("<|im_start|>assistant\n")
    assert form_of(template, tokenizer) == QWEN


def test_a_template_that_drops_the_second_call_takes_one(tmp_path):
    text = template_of("qwen2.5").replace(
        "in message.tool_calls %}", "in message.tool_calls[:1] %}"
    )
    path = folder_of(tmp_path, text)
    tokenizer = Tokenizer.load(path)
    found = form_of(chat_template(path, tokenizer), tokenizer)
    assert found == replace(QWEN, several=False)


def called(*ids: str, content: str = "") -> dict:
    calls = [{"id": id, "type": "function", "function": {"name": "now", "arguments": {}}} for id in ids]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": calls}


def told(id: str) -> dict:
    return {"role": "tool", "tool_call_id": id, "name": "now", "content": f"told {id}"}


def test_one_call_in_a_message_before_its_result():
    one = [*ASKED, called("a"), told("a"), *ASKED]
    assert one_call_each(one) == one
    both = [*ASKED, called("a", "b", content="Both."), told("b"), told("a"), *ASKED]
    assert one_call_each(both) == [*ASKED, called("a", content="Both."), told("a"), called("b"), told("b"), *ASKED]  # fmt: skip
    again = [*both, called("a", "b")]  # the ids of an earlier turn, and no results
    assert one_call_each(again) == [*one_call_each(both), called("a"), called("b")]
    other = [called("a"), called("b", "c"), told("a"), told("c")]
    assert one_call_each(other) == [called("a"), called("b"), called("c"), told("c"), told("a")]


def test_the_template_for_tools_is_used_where_there_is_one(tmp_path):
    """As in Hermes' tokenizer_config.json."""
    special, _ = CHECKPOINTS["qwen2.5"]
    path = build_json(tmp_path, [*special.values(), "<|im_start|>"], bos=False)
    both = {"default": template_of("smollm2"), "tool_use": template_of("qwen2.5")}
    listed = [{"name": name, "template": text} for name, text in both.items()]
    write(path, "tokenizer_config.json", special | {"chat_template": listed})
    tokenizer = Tokenizer.load(path)
    template = chat_template(path, tokenizer)
    assert form_of(template, tokenizer).tags == ["<tool_call>"]
    assert "SmolLM" in template.render_messages(ASKED)
    assert "<tools>" in template.render_messages(ASKED, TOOLS)


def test_a_form_that_is_not_known_is_refused(tmp_path):
    path = build_json(tmp_path, list(CONTROLS), bos=False)
    write(path, "tokenizer_config.json", {})
    text = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[f(x)]{% endif %}{% endfor %}"
    )
    write(path, "chat_template.jinja", text + "{{ tools }}")
    tokenizer = Tokenizer.load(path)
    with pytest.raises(ValueError, match="in a form that is not known here; leave tools out"):
        form_of(chat_template(path, tokenizer), tokenizer)


# ------------------------------------------------------------------------------------- of the text

QWEN = Form(kind="object", opening="<tool_call>\n", key="arguments", closing="\n</tool_call>")
LLAMA = Form(kind="object", opening="", key="parameters", closing="")
MISTRAL = Form(kind="object", opening="[TOOL_CALLS] [", key="arguments", closing="]")
ONE = '{"name": "weather", "arguments": {"city": {"name": "Roma \\u00e9"}}}'
TWO = '{"name": "now", "arguments": {}}'
FLAT = '{"name": "now", "parameters": {"a": [1]}}'
FOUND = ("weather", '{"city": {"name": "Roma é"}}')
CASES = [
    (QWEN, f"<tool_call>\n{ONE}\n</tool_call>", "", [FOUND]),
    (QWEN, f"Let me see.\n<tool_call>{TWO}</tool_call>\n<tool_call>\n{ONE}\n</tool_call> ", "Let me see.", [("now", "{}"), FOUND]),
    (QWEN, f"<tool_call>\n{TWO}\n</tool_call>\nThat is all.", "That is all.", [("now", "{}")]),
    (QWEN, f"<tool_call>\n{TWO}\n</tool", "", [("now", "{}")]),
    (QWEN, "a < b <tool", "a < b <tool", []), (QWEN, " plain \n", " plain \n", []),
    (QWEN, "the mark <tool_call> alone, {1}", "the mark <tool_call> alone, {1}", []),
    (QWEN, f"<tool_call>\n{ONE[:-1]}", f"<tool_call>\n{ONE[:-1]}", []),
    (QWEN, '<tool_call>{"name": "other", "arguments": {}}', '<tool_call>{"name": "other", "arguments": {}}', []),
    (QWEN, '<tool_call>{"name": ["now"], "arguments": {}}', '<tool_call>{"name": ["now"], "arguments": {}}', []),
    (QWEN, '<tool_call>{"name": "now", "arguments": {"a": NaN}}', '<tool_call>{"name": "now", "arguments": {"a": NaN}}', []),
    (QWEN, "<tool_call>" + '{"a":' * 1500, "<tool_call>" + '{"a":' * 1500, []),
    (LLAMA, FLAT, "", [("now", '{"a": [1]}')]), (LLAMA, f"\n{FLAT}; {FLAT}", "", [("now", '{"a": [1]}')] * 2),
    (LLAMA, '{"a": 1} is JSON', '{"a": 1} is JSON', []), (LLAMA, f"I call {FLAT}", f"I call {FLAT}", []),
    (LLAMA, "  ", "  ", []), (LLAMA, "{", "{", []),
    (QWEN, f"```json\n{ONE}\n```", "", [FOUND]), (LLAMA, f"```\n{TWO}\n```\n", "", [("now", "{}")]),
    (QWEN, f"I will ask:\n\n```json\n{TWO}\n```\nand wait.", "I will ask:and wait.", [("now", "{}")]),
    (LLAMA, f"I will ask:\n```json\n[{FLAT}, {TWO}]\n``", "I will ask:", [("now", '{"a": [1]}'), ("now", "{}")]),
    (QWEN, f"<tool_call>\n```json\n{ONE}\n```\n</tool_call>", "", [FOUND]),
    (QWEN, "so:\n```python\nf({'a': 1})\n```\nend", "so:\n```python\nf({'a': 1})\n```\nend", []),
    (QWEN, '```json\n{"name": "other", "arguments": {}}\n```', '```json\n{"name": "other", "arguments": {}}\n```', []),
    (LLAMA, "a ``` b `` c", "a ``` b `` c", []), (MISTRAL, '```json\n{"name": "now"', '```json\n{"name": "now"', []),
    # arguments in other forms than an object
    *[(QWEN, f'<tool_call>\n{{"name": "now"{rest}}}\n</tool_call>', "", [("now", arguments)]) for rest, arguments in [
        ("", "{}"), (', "arguments": null', "{}"), (', "arguments": ""', "{}"), (', "arguments": []', "{}"), (', "type": "function", "id": "x"', "{}"),
        (', "arguments": "{\\"a\\": [1]}"', '{"a": [1]}'), (', "parameters": " "', "{}"), (', "arguments": {"a": "b\n\tc"}', '{"a": "b\\n\\tc"}'),
        (', "arguments": "{\\"a\\": \\"b\nc\\"}"', '{"a": "b\\nc"}')]],
    *[(QWEN, text, text, []) for rest in (', "arguments": "soon"', ', "arguments": 3', ', "arguments": "[1]"', ', "city": "Rome"', ', "arguments": [1]')
      for text in [f'<tool_call>\n{{"name": "now"{rest}}}\n</tool_call>']],
    (LLAMA, '{"name": "now"}', "", [("now", "{}")]), (LLAMA, '{"name": "now", "hour": 3}', '{"name": "now", "hour": 3}', []),
    (MISTRAL, f"[TOOL_CALLS] [{TWO}, {ONE}]", "", [("now", "{}"), FOUND]), (MISTRAL, "Yes [1]", "Yes [1]", []),
]  # fmt: skip


def tools_of(form: Form, several: bool = True) -> Tools:
    return Tools([], {"weather": WEATHER, "now": NOTHING}, [], several, form)


def in_parts(
    tools: Tools, text: str, size: int, reason: str = "length"
) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in parts."""
    finder = Finder(tools)
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)] or [""]
    content, calls = "", []
    for number, part in enumerate(parts):
        more, found = finder.push(part, reason if number == len(parts) - 1 else None)
        content += more
        calls += [(call["function"]["name"], call["function"]["arguments"]) for call in found]
        assert all(call["type"] == "function" and len(call["id"]) == 9 for call in found)
    assert finder.count == len(calls)
    return content, calls


def test_calls_are_found_in_a_text():
    """Whole, and in parts of any size: no text is lost."""
    for form, text, content, calls in CASES:
        for size in (len(text), 1, 2, 7) if len(text) < 1000 else (len(text),):
            assert in_parts(tools_of(form), text, size) == (content, calls), (text, size)
        one = in_parts(tools_of(form, several=False), text, len(text))
        assert one == (content, calls[:1]), text


def test_text_comes_as_soon_as_it_is_no_call():
    finder = Finder(tools_of(QWEN))
    told = [
        finder.push(part, None)[0] for part in ("Hello", " <to", "p>", " x", f" <tool_call>{TWO}")
    ]
    assert told == ["Hello", "", " <top>", " x", ""] and finder.count == 1
    finder = Finder(tools_of(LLAMA))  # white space before a block goes with it
    assert [finder.push(part, None)[0] for part in ("Hello ", "you")] == ["Hello", " you"]


# ----------------------------------------------------------------------------------- of the server


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


def test_calls_of_the_models_own(folder, tmp_path):
    """The model's text is forced from outside, so that it calls; whole and streamed."""
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    file = tmp_path / "calls.lark"
    file.write_text(f"start: {json.dumps(f'I look.{chr(10)}{call}{chr(10)}{call}')}")
    running = Running("--checkpoint", str(folder), "--chat", "--grammar", str(file))
    answer = ask(running, tools=TOOLS, max_tokens=200).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "I look."
    assert [each.function.name for each in answer.message.tool_calls] == ["now", "now"]
    parts = [part.choices[0] for part in ask(running, tools=TOOLS, max_tokens=200, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == "I look."
    calls = [call for part in parts for call in part.delta.tool_calls or ()]
    assert [each.index for each in calls] == [0, 1] and parts[-1].finish_reason == "tool_calls"
    one = ask(running, tools=TOOLS, max_tokens=200, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1
    without = ask(running, tools=TOOLS, tool_choice="none", max_tokens=200).choices[0]
    assert without.finish_reason == "stop" and without.message.content.count(call) == 2
    running.close()


CALLED = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOLD = {"role": "tool", "tool_call_id": "a", "content": "x"}


def test_a_template_without_tools_is_named(running):
    template = CHAT_TEMPLATES["vicuna"]
    config = replace(running.engine.config, chat="vicuna")
    engine = replace(running.engine, template=template, config=config)
    reader = serve.RequestReader(engine, replace(running.server.config, chat="vicuna"), "demo")
    conversation = [*ASKED, {"role": "assistant", "tool_calls": [CALLED]}, TOLD]
    for body in ({"messages": ASKED, "tools": TOOLS}, {"messages": conversation}):
        with pytest.raises(serve.Refusal, match="chat template vicuna knows no tools") as refused:
            reader.read(Chat, body)
        assert refused.value.status == 400
