"""Calls in the forms that published templates write: learned from a template, found in a text, forced, and taken back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
from llguidance import LLMatcher, grammar_from  # noqa: E402
from test_chat import CHECKPOINTS, template_of  # noqa: E402
from test_thinking import ask, served  # noqa: E402, F401 (a fixture)
from test_tokenizer import CONTROLS as BYTES  # noqa: E402
from test_tokenizer import build_json, write  # noqa: E402
from test_tool_calls import ASKED, OPENS, WEATHER, tool  # noqa: E402

from drafts.grammar import _vocabulary  # noqa: E402
from files.chat import chat_template  # noqa: E402
from files.jinja import ChatTemplate  # noqa: E402
from files.thinking import TAGS, behind_thinking, without_opening  # noqa: E402
from files.tokenizer import Tokenizer  # noqa: E402
from run.options import Sampling  # noqa: E402
from server.batcher import Delta  # noqa: E402
from server.bodies import Chat, Completion  # noqa: E402
from server.call_forms import NOTHING, Form, form_of  # noqa: E402
from server.parameters import RequestParams, RequestReader  # noqa: E402
from server.replies import ChatReply, Reply  # noqa: E402
from server.responses import ResponseReply, Responses  # noqa: E402
from server.tool_calls import Finder, Tools, as_taken, one_call_each  # noqa: E402

# What published templates write around calls; the rest of them is left out.
EACH_CALL = "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
XML = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content }}
        EACH_CALL
            {{- ('\\n\\n' if message.content else '') if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
"""
GLM = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n<think></think>' }}
        {%- if message.content.strip() %}{{- '\\n' + message.content.strip() }}{%- endif %}
        EACH_CALL
            {{- '\\n<tool_call>' + call.name + '\\n' }}
            {%- for key, value in call.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value | tojson if value is not string else value }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' }}
"""
HARMONY = """\
{%- for tool in tools or [] %}{{- '// ' + tool.function.name + '\\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}{{- raise_exception('both') }}{%- endif %}
        {%- if message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' }}
"""
MISTRAL = """\
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content }}
        EACH_CALL
            {{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{%- macro written(value) -%}
    {%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean %}{{- 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}{{- pairs(value) }}{{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for item in value %}{{- written(item) }}{{- ',' if not loop.last }}{%- endfor %}
        {{- ']' }}
    {%- else %}{{- value }}
    {%- endif %}
{%- endmacro -%}
{%- macro pairs(values) -%}
    {%- for key, value in values | dictsort %}{{- key }}:{{- written(value) }}{{- ',' if not loop.last }}{%- endfor %}
{%- endmacro -%}
{%- for tool in tools or [] %}{{- '<|tool>declaration:' + tool.function.name + '<tool|>' }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_response>response:' + message.name + '{value:' + written(message.content) + '}<tool_response|>' }}
    {%- else %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        EACH_CALL
            {{- '<|tool_call>call:' + call.name + '{' + pairs(call.arguments) + '}<tool_call|>' }}
        {%- endfor %}
        {{- message.content }}
        {{- '<|tool_response>' if message.tool_calls else '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if messages[-1].role == 'user' %}{{- '<|turn>model\\n' }}{%- endif %}
"""
LFM2 = """\
{%- macro written(value) -%}
    {%- if value is string %}{{- "'" + value + "'" }}{%- elif value is mapping %}{{- value | tojson }}
    {%- else %}{{- value | string }}{%- endif %}
{%- endmacro -%}
{%- if tools %}{{- '<|im_start|>system\\nList of tools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}{{- '<|tool_call_start|>[' }}{%- endif %}
    EACH_CALL
        {{- call.name }}(
        {%- for key, value in call.arguments.items() %}{{- key }}={{- written(value) }}{{- ', ' if not loop.last }}{%- endfor %}
        {{- ')' + ('' if loop.last else ', ') }}
    {%- endfor %}
    {%- if message.tool_calls %}{{- ']<|tool_call_end|>' }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
MINIMAX = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
    {{- ']~b]' + message.role + '\n' + message.content }}
    {%- if message.tool_calls %}{{- '\n<minimax:tool_call>\n' }}{%- endif %}
    EACH_CALL
        {{- '<invoke name="' + call.name + '">\n' }}
        {%- for key, value in call.arguments.items() %}
            {{- '<parameter name="' + key + '">' }}{{- value | tojson if value is not string else value }}{{- '</parameter>\n' }}
        {%- endfor %}
        {{- '</invoke>\n' }}
    {%- endfor %}
    {%- if message.tool_calls %}{{- '</minimax:tool_call>' }}{%- endif %}
    {{- '[e~[\n' }}
{%- endfor %}
{{- ']~b]assistant\n' }}
"""
DEEPSEEK = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
    {{- '<｜' + message.role + '｜>' + message.content }}
    {%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- endif %}
    EACH_CALL
        {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\n```json\n' + call.arguments + '\n```<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {%- if message.tool_calls %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
    {{- '<｜end▁of▁sentence｜>' }}
{%- endfor %}
{{- '<｜assistant｜>' }}
"""
DROPS = """\
{%- if tools %}{{- '<|im_start|>system\\nList of tools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
TEMPLATES = {
    name: text.replace("EACH_CALL", EACH_CALL)
    for name, text in [
        ("xml", XML), ("glm", GLM), ("minimax", MINIMAX), ("harmony", HARMONY), ("mistral", MISTRAL),
        ("deepseek", DEEPSEEK), ("gemma", GEMMA), ("lfm2.5", LFM2), ("lfm2", DROPS)]
}  # fmt: skip
CONTROLS = ["<s>", "[ARGS]", "<|message|>", "<|constrain|>", "<|tool_call_start|>"]
SHOWN = {"harmony": CONTROLS[2:4], "mistral": CONTROLS[1:2], "lfm2": CONTROLS[4:], "lfm2.5": CONTROLS[4:]}  # fmt: skip
# as test_a_template_shows_how_calls_are_written finds them
OBJECTS = {
    "qwen2.5": Form(
        kind="object", opening="<tool_call>\n", key="arguments", closing="\n</tool_call>"
    ),
    "llama3.1": Form(kind="object", opening="", key="parameters", closing="", several=False),
    "mistral-v0.3": Form(kind="object", opening="[TOOL_CALLS] [", key="arguments", closing="]"),
}
WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": ["string", "null"]},
        "mode": {"$ref": "#/$defs/Mode"},
        "lines": {"type": "integer"},
        "force": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "where": {"type": "object", "properties": {"row": {"type": "integer"}}, "additionalProperties": False},
    },
    "required": ["path", "where"],
    "additionalProperties": False,
    "$defs": {"Mode": {"enum": ["new", "old"], "type": "string"}},
}  # fmt: skip
TOOLS = [tool("write", parameters=WRITE), tool("write_all"), tool("now"), tool("weather")]
SCHEMAS = {"write": WRITE, "write_all": NOTHING, "now": NOTHING, "weather": WEATHER}
TEXT = '\n  def f(x):\n    return "it\'s", "</a>", {x}  # 5 < 6\n'
ARGUMENTS = {
    "path": "12",
    "text": TEXT,
    "mode": "new",
    "lines": 3,
    "force": True,
    "where": {"row": 2},
}


# --------------------------------------------------------------------------------- of the template


def loaded(tmp_path, text: str, names: list[str], special: dict) -> tuple[ChatTemplate, Tokenizer]:
    """A template with a tokenizer that has some control tokens."""
    path = build_json(tmp_path, names, bos=False)
    write(path, "tokenizer_config.json", special)
    write(path, "chat_template.jinja", text)
    tokenizer = Tokenizer.load(path)
    return chat_template(path, tokenizer), tokenizer


def real(tmp_path, name: str, text: str = "") -> tuple[ChatTemplate, Tokenizer]:
    """A published template, or a text like it, with its control tokens."""
    special, _ = CHECKPOINTS[name]
    names = dict.fromkeys([*special.values(), "<|im_start|>", "[TOOL_CALLS]", *BYTES])
    return loaded(tmp_path, text or template_of(name), list(names), special)


def model(tmp_path, name: str) -> tuple[ChatTemplate, Form]:
    template, tokenizer = loaded(tmp_path, TEMPLATES[name], CONTROLS, {})
    return template, form_of(template, tokenizer)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_template_shows_how_calls_are_written(name, tmp_path):
    template, tokenizer = real(tmp_path, name)
    control = ["[TOOL_CALLS]"] if name.startswith("mistral") else []
    controls = {name: tokenizer.id_of(name) for name in control}
    found = form_of(template, tokenizer)
    assert found == replace(OBJECTS[name], controls=controls)
    ids = tokenizer.encode(found.opening + "{", bos=False, special=True)
    assert tokenizer.stream(True, frozenset(controls.values())).push(ids) == found.opening + "{"


UNKNOWN = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[f(x)]{% endif %}{% endfor %}{{ tools }}"  # fmt: skip


@pytest.mark.parametrize("text, fault", [("", "knows no tools; leave them out"), (UNKNOWN, "in a form that is not known here; leave")])  # fmt: skip
def test_a_template_without_a_known_form_is_refused(text, fault, tmp_path):
    with pytest.raises(ValueError, match=fault):
        form_of(*real(tmp_path, "smollm2", text))


# as Qwen3-Thinking's, which writes a thinking into the last answer alone
CLOSES = OPENS.replace(
    "{{- '<|im_start|>' + message.role }}",
    "{{- '<|im_start|>' + message.role }}{% if loop.last %}{{ '\\n<think>\\n\\n</think>\\n' }}{% endif %}",
)  # fmt: skip
# as Qwen3's with enable_thinking = false: the prompt ends with an empty thinking
EMPTY = OPENS.replace("<think>\\n'", "<think>\\n\\n</think>\\n\\n'")
ONE_CALL = template_of("qwen2.5").replace("in message.tool_calls %}", "in message.tool_calls[:1] %}")  # fmt: skip


@pytest.mark.parametrize("text", [OPENS, CLOSES, EMPTY, ONE_CALL])
def test_a_template_that_opens_the_thinking_or_drops_the_second_call(text, tmp_path):
    """As QwQ's: earlier answers are written without the tag that ends the prompt."""
    template, tokenizer = real(tmp_path, "qwen2.5", text)
    assert ("<think>" in template.render_messages(ASKED, TOOLS)) == (text != ONE_CALL)
    assert form_of(template, tokenizer) == replace(OBJECTS["qwen2.5"], several=text != ONE_CALL)


def test_the_template_for_tools_is_used_where_there_is_one(tmp_path):
    """As in Hermes' tokenizer_config.json."""
    special, _ = CHECKPOINTS["qwen2.5"]
    both = {"default": template_of("smollm2"), "tool_use": template_of("qwen2.5")}
    listed = [{"name": name, "template": text} for name, text in both.items()]
    path = build_json(tmp_path, [*special.values(), "<|im_start|>"], bos=False)
    write(path, "tokenizer_config.json", special | {"chat_template": listed})
    tokenizer = Tokenizer.load(path)
    template = chat_template(path, tokenizer)
    assert form_of(template, tokenizer).tags == ["<tool_call>"]
    assert "SmolLM" in template.render_messages(ASKED)
    assert "<tools>" in template.render_messages(ASKED, TOOLS)


def calling(*ids: str, content: str = "") -> dict:
    calls = [{"id": id, "type": "function", "function": {"name": "now", "arguments": {}}} for id in ids]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(id: str) -> dict:
    return {"role": "tool", "tool_call_id": id, "name": "now", "content": f"told {id}"}


def test_one_call_in_a_message_before_its_result():
    one = [*ASKED, calling("a"), result("a"), *ASKED]
    assert one_call_each(one) == one
    both = [*ASKED, calling("a", "b", content="Both."), result("b"), result("a"), *ASKED]
    assert one_call_each(both) == [*ASKED, calling("a", content="Both."), result("a"), calling("b"), result("b"), *ASKED]  # fmt: skip
    again = [*both, calling("a", "b")]  # the ids of an earlier turn, and no results
    assert one_call_each(again) == [*one_call_each(both), calling("a"), calling("b")]
    other = [calling("a"), calling("b", "c"), result("a"), result("c")]
    assert one_call_each(other) == [
        calling("a"),
        calling("b"),
        calling("c"),
        result("c"),
        result("a"),
    ]


# ------------------------------------------------------------------------------------- of the text


def called(form: Form, *calls: tuple[str, dict]) -> list[dict]:
    """An earlier message with calls, as the server gives it to the template."""
    made = [{"id": f"{i:09}", "function": {"name": name, "arguments": given}} for i, (name, given) in enumerate(calls)]  # fmt: skip
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": made}]
    return as_taken(messages, form)


def answer_of(template: ChatTemplate, form: Form, *calls: tuple[str, dict]) -> str:
    """What a model writes, that has learned from the template."""
    prompt = without_opening(template.render_messages(ASKED, TOOLS))
    text = template.render_messages(called(form, *calls), TOOLS).removeprefix(prompt)
    end = form.closing.rstrip()
    return behind_thinking(
        text[: text.rindex(end) + len(end)] if end else re.split("</s>|<.eot_id.>", text)[0]
    )


class Row(NamedTuple):
    """What a model writes in a form, and what clients of every kind get."""

    form: str
    text: str
    content: str | None = ""  # None: all that is written, but for control words
    calls: list = []
    reason: str = "stop"  # by the model itself; "length": cut at max_tokens
    thought: str = ""
    several: bool = True
    opens: bool = False  # the prompt opens the thinking


class Names:
    """A tokenizer, as far as answers without log-probabilities need one."""

    def __init__(self, form: Form):
        self.names = {id: name.encode() for name, id in form.controls.items()}
        self.name = self.names.get

    def encode(self, text: str, bos: bool) -> str:
        return text


def request(kind: type, form: Form, row: Row) -> RequestParams:
    body = {"messages": ASKED, "prompt": "a", "input": "a", "stream": True}
    names = {Chat: ["messages"], Responses: ["input"], Completion: ["prompt"]}[kind]
    asked = kind.model_validate({name: body[name] for name in [*names, "stream"]})
    tools = Tools(TOOLS, SCHEMAS, [], row.several, form) if kind is not Completion else None
    thinks = TAGS[0] if row.opens else None
    return RequestParams(
        asked,
        [[1]],
        Sampling(),
        0,
        9,
        [],
        None,
        tools,
        [],
        thinks,
        frozenset(form.controls.values()),
        0,
    )


def data(events: str) -> list[dict]:
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def named(calls: list[dict]) -> list[tuple[str, dict]]:
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def in_parts(text: str, form: Form, size: int) -> list[str]:
    """Cut a text, but for control words, which a decoder tells whole."""
    words = "|".join(map(re.escape, form.controls)) or "(?!)"
    return re.findall(rf"{words}|(?:(?!{words}).){{1,{size or 1}}}", text, re.DOTALL) or [""]


def told(kind: type, writer: type, form: Form, row: Row, parts: list[str]) -> list[tuple]:
    """What clients get of a text in parts: streamed, and whole."""
    reply = writer(request(kind, form, row), "demo", Names(form))
    events = reply.begin()
    for number, part in enumerate(parts, 1):
        events += reply.piece(Delta(0, part, row.reason if number == len(parts) else None, number))
    events += reply.end()
    return [READERS[writer](data(events), True), READERS[writer](reply.whole(), False)]


def of_completion(answer, streamed: bool) -> tuple:
    choices = [event["choices"][0] for event in answer] if streamed else answer["choices"]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def of_chat(answer, streamed: bool) -> tuple:
    choices = [event["choices"][0] for event in answer] if streamed else answer["choices"]
    messages = [choice["delta" if streamed else "message"] for choice in choices]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert not streamed or [call["index"] for call in calls] == [*range(len(calls))]
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in calls)
    thought = "".join(message.get("reasoning_content", "") for message in messages)
    content = "".join(message.get("content") or "" for message in messages)
    functions = named([call["function"] for call in calls])
    return thought, content, functions, choices[-1]["finish_reason"]


def of_response(answer, streamed: bool) -> tuple:
    if streamed:
        done = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
        assert done == answer[-1]["response"]["output"]
        grown = [event["delta"] for event in answer if event["type"].endswith("_text.delta")]
        answer = answer[-1]["response"]
    texts = {"reasoning": "", "message": ""}
    for item in answer["output"]:
        for part in item.get("content", ()):
            texts[item["type"]] += part["text"]
    assert not streamed or "".join(grown) == texts["reasoning"] + texts["message"]
    calls = named([item for item in answer["output"] if item["type"] == "function_call"])
    reason = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return *texts.values(), calls, reason


READERS = {Reply: of_completion, ChatReply: of_chat, ResponseReply: of_response}


def check(row: Row, form: Form, tokenizer: Tokenizer | None = None) -> None:
    """Streamed and whole, in parts of any size: a chat's answer and a response are one and the same."""
    content = row.content
    if content is None:
        content = row.text
        for word in form.controls:
            content = content.replace(word, "")
    reason = "tool_calls" if row.calls and row.reason == "stop" else row.reason
    want = (row.thought, content, row.calls, reason)
    sizes = (len(row.text), 1, 3) if len(row.text) < 1000 else (999, 2000)
    cuts = [in_parts(row.text, form, size) for size in sizes]
    if tokenizer:  # a token a part; control tokens of calls have a text
        stream = tokenizer.stream(True, frozenset(form.controls.values()))
        ids = tokenizer.encode(row.text, bos=False, special=True)
        cuts.append([stream.push([id]) for id in ids] or [""])
    for parts in cuts:
        for kind, writer in ((Chat, ChatReply), (Responses, ResponseReply)):
            for found in told(kind, writer, form, row, parts):
                assert found == want, (row, parts, writer)
        for found in told(Completion, Reply, form, row, parts):
            assert found == (row.text, row.reason)


@pytest.mark.parametrize("name", [*OBJECTS, *TEMPLATES])
def test_a_model_writes_what_its_template_shows(name, tmp_path):
    """Whole, two calls, none of its arguments, cut, unclosed, of no tool, with text before and behind."""
    is_real = name in OBJECTS
    template, tokenizer = (
        real(tmp_path, name) if is_real else loaded(tmp_path, TEMPLATES[name], CONTROLS, {})
    )
    form = form_of(template, tokenizer)
    assert form.several == (name not in ("harmony", "llama3.1"))
    assert form.takes_text == (name == "deepseek") and form.drops == (name == "lfm2")
    assert {*SHOWN.get(name, ())} <= form.controls.keys()
    write = ("write", ARGUMENTS)
    one = answer_of(template, form, write)
    before = "" if name == "llama3.1" else "I look."  # its calls have no mark
    rows = [
        Row(name, before + one, before, [write]),
        Row(name, before + one + "\nDone.", before + "Done.", [write]),
        Row(name, answer_of(template, form, NOW), "", [NOW]),
        *[Row(name, before + one.replace("write", other), None) for other in ("writes", "wri", "writ_all", "x")],
    ]  # fmt: skip
    if form.several:
        both = answer_of(template, form, write, NOW)
        rows += [Row(name, both, "", [write, NOW]), Row(name, both, "", [write], several=False)]
    ends = [cut for cut in range(len(one)) if calls_of(form, one[:cut])]
    ends.append(len(one))
    assert ends == [*range(ends[0], len(one) + 1)], "nothing is a call before the whole of it"
    assert ends[0] >= len(one) - len(form.closing)
    for cut in {1, len(one) // 3, len(one) // 2, ends[0] - 1}:
        rows.append(Row(name, before + one[:cut], None, reason="length"))
    rows.append(Row(name, before + one[: ends[0]], before, [write]))  # unclosed
    rows.append(Row(name, before + one[: ends[0]], before, [write], "length"))
    for row in rows:
        check(row, form, tokenizer)


def calls_of(form: Form, text: str) -> list:
    return told(Chat, ChatReply, form, Row("", text, reason="length"), [text])[1][2]


NOW = ("now", {})
PATH = ("write", {"path": "a\n"})
BETWEEN = "<|channel|>commentary to=functions."
ONE = '{"name": "weather", "arguments": {"city": {"name": "Roma \\u00e9"}}}'
TWO = '{"name": "now", "arguments": {}}'
FLAT = '{"name": "now", "parameters": {"a": [1]}}'
FOUND = ("weather", {"city": {"name": "Roma é"}})
LIST = ("now", {"a": [1]})
SLIPS = [  # rows of `Row`
    ("qwen2.5", f"<tool_call>\n{ONE}\n</tool_call>", "", [FOUND]), ("qwen2.5", f"<tool_call>\n{TWO}\n</tool", "", [NOW]),
    ("qwen2.5", f"Let me see.\n<tool_call>{TWO}</tool_call>\n<tool_call>\n{ONE}\n</tool_call> ", "Let me see.", [NOW, FOUND]),
    ("qwen2.5", f"<tool_call>\n{TWO}\n</tool_call>\nThat is all.", "That is all.", [NOW]),
    *[("qwen2.5", text, None, []) for text in (
        "a < b <tool", " plain \n", "the mark <tool_call> alone, {1}", f"<tool_call>\n{ONE[:-2]}", "<tool_call>" + '{"a":' * 1500,
        '<tool_call>{"name": "other", "arguments": {}}', '<tool_call>{"name": ["now"], "arguments": {}}', '<tool_call>{"name": "now", "arguments": {"a": NaN}}',
        "so:\n```python\nf({'a': 1})\n```\nend", '```json\n{"name": "other", "arguments": {}}\n```')],
    ("qwen2.5", f"```json\n{ONE}\n```", "", [FOUND]), ("qwen2.5", f"I will ask:\n\n```json\n{TWO}\n```\nand wait.", "I will ask:and wait.", [NOW]),
    ("qwen2.5", f"<tool_call>\n```json\n{ONE}\n```\n</tool_call>", "", [FOUND]),
    # arguments in other forms than an object
    *[("qwen2.5", f'<tool_call>\n{{"name": "now"{rest}}}\n</tool_call>', "", [("now", arguments)]) for rest, arguments in [
        ("", {}), (', "arguments": null', {}), (', "arguments": ""', {}), (', "arguments": []', {}), (', "type": "function", "id": "x"', {}),
        (', "arguments": "{\\"a\\": [1]}"', {"a": [1]}), (', "parameters": " "', {}), (', "arguments": {"a": "b\n\tc"}', {"a": "b\n\tc"}),
        (', "arguments": "{\\"a\\": \\"b\nc\\"}"', {"a": "b\nc"})]],
    *[("qwen2.5", f'<tool_call>\n{{"name": "now"{rest}}}\n</tool_call>', None, []) for rest in (
        ', "arguments": "soon"', ', "arguments": 3', ', "arguments": "[1]"', ', "city": "Rome"', ', "arguments": [1]')],
    ("llama3.1", FLAT, "", [LIST]), ("llama3.1", f"\n{FLAT}; {FLAT}", "", [LIST] * 2), ("llama3.1", f"```\n{TWO}\n```\n", "", [NOW]),
    ("llama3.1", f"I will ask:\n```json\n[{FLAT}, {TWO}]\n``", "I will ask:", [LIST, NOW]), ("llama3.1", '{"name": "now"}', "", [NOW]),
    *[("llama3.1", text, None, []) for text in ('{"a": 1} is JSON', f"I call {FLAT}", "  ", "{", "a ``` b `` c", '{"name": "now", "hour": 3}')],
    # a bracket too few or too many, ends that are missing
    ("qwen2.5", f"<tool_call>\n{ONE[:-1]}", "", [FOUND]), ("qwen2.5", f"<tool_call>\n{ONE[:-1]}\n</tool_call>\n<tool_call>\n{TWO}}}\n</tool_call>", "", [FOUND, NOW]),
    ("qwen2.5", f"<tool_call>\n{ONE[:-1]}", None, [], "length"), ("qwen2.5", f"<tool_call>\n{ONE[:-1]}\n<tool_call>\n{TWO}", f"<tool_call>\n{ONE[:-1]}", [NOW]),
    ("qwen2.5", "<tool_call>\n{'name': 'now', 'arguments': {'a': [1],}}\n</tool_call>", "", [LIST]), ("qwen2.5", f"<tool_call>{TWO.replace('now', 'functions.now')}", "", [NOW]),
    *[("xml", f"<tool_call>\n<function=write>\n<parameter=path>\na\n{end}", "", [("write", {"path": "a"})]) for end in ("</parameter>", "</parameter>\n</tool_call>", "</tool_call>")],
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n", None, []), ("xml", "<tool_call>\n<function=now>\n</tool_call>", "", [NOW]),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>", None, [], "length"),
    ("glm", "<tool_call>now", "", [NOW]), ("minimax", '<minimax:tool_call>\n<invoke name="now">\n</minimax:tool_call>', "", [NOW]),
    ("mistral", "[TOOL_CALLS]now", "", [NOW]), ("harmony", "so to=now", None, []),
    ("mistral-v0.3", f"[TOOL_CALLS] [{TWO}, {ONE}]", "", [NOW, FOUND]),
    *[("mistral-v0.3", text, None, []) for text in ("Yes [1]", '```json\n{"name": "no')],
    ("xml", "<function=now>\n</function>\n</tool_call> done", "done", [NOW]),
    ("xml", "<tool_call><function=write><parameter=path>a\n\n</parameter></function></tool_call>", "", [PATH]),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\n</parameter> is an end\n</parameter>\n</function>", "",
     [("write", {"path": "</parameter> is an end"})]),
    ("xml", "<tool_call>\n<function=write>\n<parameter=text>\nNone\n</parameter>\n<parameter=lines>\nthree\n</parameter>\n"
     "<parameter=force>\nnull\n</parameter>\n<parameter=where>\n{'row': None}\n</parameter>\n<parameter=more>\n5\n</parameter>\n</function>", "",
     [("write", {"text": None, "lines": "three", "force": None, "where": {"row": None}, "more": "5"})]),
    ("xml", "<tool_call>\n<function=write>\n<parameter=lines>\n{1, 2}\n</parameter>\n</function>", None, []),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=lines>\n3\n</parameter>\n</function>", "", [("write", {"path": "a", "lines": 3})]),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>", "", [("write", {"path": "a"})]),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\n<parameter=of>\n</parameter>\n</function>", "", [("write", {"path": "<parameter=of>"})]),
    ("xml", "a <tool_call> or a <function=f> of a text", None, []), ("xml", "<tool_call>\n<function=now>\nno", None, []),
    ("glm", "<tool_call>write<arg_key>path</arg_key><arg_value>a\n</arg_value></tool_call>\n\nNow.", "Now.", [PATH]),
    ("glm", "<tool_call>now\n</tool_call><tool_call>now</tool_call>", "", [NOW, NOW]),
    ("harmony", f"{BETWEEN}write <|constrain|>json<|message|>" '{"path": "a\n"}', "", [PATH]),
    ("harmony", "<|channel|>analysis to=functions.now<|message|>{}<|call|>", "", [NOW]),
    ("harmony", "<|channel|>commentary to=now <|constrain|>json<|message|>{}", "", [NOW]),
    ("harmony", f"{BETWEEN}now<|channel|>commentary json<|message|>", "", [NOW]), ("harmony", "to=now<|message|>{}", "", [NOW]),
    ("harmony", f"{BETWEEN}nowhere<|message|>{{}}", None, []), ("harmony", f"{BETWEEN}now<|message|>none", None, []),
    ("mistral", "So:[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]now{}", "So:", [NOW, NOW]),
    ("gemma", '<|tool_call>call:write{path:"a\n",where:{<|"|>row<|"|>:[1,{a:null}]},lines:2.5}<tool_call|>', "",
     [("write", {"path": "a\n", "where": {"row": [1, {"a": None}]}, "lines": 2.5})]),
    ("gemma", "<|tool_call>call:write{path:a b,lines:2]}<tool_call|>", None, []),
    ("gemma", "<|tool_call>call:write{where:" + "[" * 1500, None, []),
    ("lfm2", "<|tool_call_start|>[write(path='it\\'s', text=\"a\\nb\", lines=-1, force=True, where={\"row\": null}), now()]<|tool_call_end|>So.", "So.",
     [("write", {"path": "it's", "text": "a\nb", "lines": -1, "force": True, "where": {"row": None}}), NOW]),
    ("lfm2", "<|tool_call_start|>[now(), other()]<|tool_call_end|>", None, []),
]  # fmt: skip


CALL = f"<tool_call>\n{TWO}\n</tool_call>"
BESIDE_THINKING = [  # a text behind thinking that the prompt has opened
    Row("qwen2.5", f"Maybe {CALL}? No.\n</think>\n\nI look.\n{CALL}", "I look.", [NOW], thought=f"Maybe {CALL}? No."),
    # a call that ends open thinking, as Qwen3.5 writes some; one that a limit cuts off stays thinking
    Row("qwen2.5", f"I look: {CALL}", "", [NOW], thought="I look:"), Row("qwen2.5", f"{CALL}{CALL}", "", [NOW, NOW]),
    Row("qwen2.5", f"I look: {CALL[:20]}", "", thought=f"I look: {CALL[:20]}", reason="length"),
    Row("qwen2.5", f"So.</think>{CALL}", "", [NOW], thought="So."), Row("qwen2.5", "So.\n</think>\n\nYes.", "Yes.", thought="So."),
    Row("xml", "Hm.\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW], thought="Hm."),
]  # fmt: skip


def test_what_models_write(tmp_path):
    """Slips of form that have one meaning, and texts that have none."""
    forms = OBJECTS | {name: model(tmp_path, name)[1] for name in TEMPLATES}
    for row in SLIPS:
        check(Row(*row), forms[row[0]])
    for row in BESIDE_THINKING:
        check(row._replace(opens=True), forms[row.form])
        check(row._replace(text=f"<think>{row.text}"), forms[row.form])


def test_text_comes_as_soon_as_it_is_no_call():
    for name, parts, want in (
        ("qwen2.5", ("Hello", " <to", "p>", " x", f" <tool_call>{TWO}"), ["Hello", "", " <top>", " x", ""]),
        ("llama3.1", ("Hello ", "you"), ["Hello", " you"]),  # white space before a block goes with it
    ):  # fmt: skip
        finder = Finder(Tools(TOOLS, SCHEMAS, [], True, OBJECTS[name]))
        assert [finder.push(part, None)[0] for part in parts] == want


def test_the_grammar_of_a_forced_call(tmp_path):
    """It allows what the template writes, control tokens as such, and no other arguments."""
    some = {"path": "", "where": {"row": 1}}
    ill = [{"path": "a"}, some | {"mode": "x"}, some | {"lines": "three"}, some | {"more": "1"}]
    for name in TEMPLATES:
        template, form = model(tmp_path, name)
        tools = Tools(TOOLS, SCHEMAS, ["write", "now"], True, form)
        if form.kind == "pairs":
            with pytest.raises(ValueError, match="cannot be forced; use tool_choice auto"):
                tools.grammar()
            continue
        tokenizer = Tokenizer.load(tmp_path)
        vocabulary = _vocabulary(tokenizer, tokenizer.vocab_size, (0,))
        matcher = LLMatcher(vocabulary, grammar_from("grammar", tools.grammar()))
        for arguments in (ARGUMENTS, some, *ill):
            text = answer_of(template, form, ("write", arguments)).replace("True", "true")
            text = text[text.index("write") :]  # behind the opening
            if form.kind == "json":
                text = text.removesuffix(form.closing.rstrip())

            ids = tokenizer.encode(text, bos=False, special=True)
            taken = matcher.deep_copy()
            fits = taken.validate_tokens(ids) == len(ids)
            assert fits == (arguments not in ill), (name, arguments)
            assert not fits or (taken.consume_tokens(ids) and taken.is_accepting())


# ----------------------------------------------------------------------------------- of the server

THOUGHT = "The user asks for a file."
OPENING = "<tool_call>\n<function="
SENT = {"path": 'it\'s\n "1"'}
ANSWERS = {  # the answer, the end of a prompt that forces a call
    "xml": (
        f"{THOUGHT}\n</think>\n\nI look.\n\n{OPENING}write>\n<parameter=path>\n{SENT['path']}\n</parameter>\n</function>\n</tool_call>",
        f"assistant\n<think>\n\n</think>\n\n{OPENING}",
    ),
    "harmony": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{BETWEEN}write <|constrain|>json<|message|>{json.dumps(SENT)}",
        "<|start|>assistant to=functions.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_takes_its_own_call_back(name, served):  # noqa: F811
    """Streamed too; the thinking before the call goes back as well."""
    text, forced = ANSWERS[name]
    running = served(TEMPLATES[name], text)
    answer = ask(running, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.reasoning_content == THOUGHT
    (call,) = answer.message.tool_calls
    assert call.function.name == "write" and json.loads(call.function.arguments) == SENT
    deltas = [event.choices[0].delta for event in ask(running, tools=TOOLS, stream=True)]
    (same,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert same.function.arguments == call.function.arguments
    assert "".join(delta.content or "" for delta in deltas) == (answer.message.content or "")
    sent = answer.message.model_dump(exclude_none=True) | {"content": ""}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
    prompt = prompt_of(running, [*ASKED, sent, result])
    written = text.rpartition("I look.\n\n" if name == "xml" else "to=functions.")[2]
    assert written.replace(" <|constrain|>", "<|channel|>commentary ") in prompt
    assert THOUGHT in prompt and "Done." in prompt
    assert prompt_of(running, ASKED, tool_choice="required").endswith(forced)


def prompt_of(running, messages: list[dict], **options) -> str:
    reader = RequestReader(running.engine, running.server.config, "demo")
    asked = reader.read(Chat, {"messages": messages, "tools": TOOLS, **options})
    return running.engine.tokenizer.decode(asked.prompts[0])
