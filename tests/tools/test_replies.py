"""Texts of models and the answers that clients get: a row a text, in the forms of calls and thinking of published templates.

1. A form is learned from a template, and the calls that the template writes are read again.
2. Whole and streamed, cut into parts of any size, chats and responses get the same parts of a text.
3. A server takes its own thinking and calls back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
from llguidance import LLMatcher, grammar_from  # noqa: E402
from openai.lib.streaming._deltas import accumulate_delta  # noqa: E402
from openai.types import chat, responses  # noqa: E402
from test_tokenizer import build_json, write  # noqa: E402

from drafts.grammar import _vocabulary  # noqa: E402
from files.chat import chat_template  # noqa: E402
from files.jinja import ChatTemplate  # noqa: E402
from files.thinking import (  # noqa: E402
    TAGS,
    Tags,
    Thinking,
    behind_thinking,
    closed,
    hidden_tags,
    without_opening,
)
from files.tokenizer import Tokenizer  # noqa: E402
from run.library import generate  # noqa: E402
from run.load import load  # noqa: E402
from run.options import Sampling  # noqa: E402
from served import (  # noqa: E402
    ASKED,
    CHAT,
    OPENS,
    TOOLS,
    WEATHER,
    Running,
    demo_with,
    of_schema,
    rows,
    template_of,
    tool,
)
from server.batcher import Delta, Drafts  # noqa: E402
from server.bodies import Chat, Completion  # noqa: E402
from server.call_forms import NOTHING, Form, form_of  # noqa: E402
from server.parameters import RequestParams, RequestReader  # noqa: E402
from server.replies import ChatReply, Reply  # noqa: E402
from server.responses import ResponseReply, Responses  # noqa: E402
from server.tool_calls import Tools, as_taken, one_call_each  # noqa: E402

PUBLISHED = ("qwen2.5", "llama3.1", "mistral-v0.3")
# parts of published templates that write calls
EXCERPTS = ("xml", "glm", "minimax", "harmony", "mistral", "deepseek", "gemma", "lfm2.5", "lfm2")
FORMS = (*PUBLISHED, *EXCERPTS)
CONTROLS = ["<s>", "[TOOL_CALLS]", "[ARGS]", "<|message|>", "<|constrain|>", "<|tool_call_start|>"]
SHOWN = {  # control tokens in a form
    "harmony": {"<|message|>"}, "mistral": {"[TOOL_CALLS]", "[ARGS]"}, "mistral-v0.3": {"[TOOL_CALLS]"},
    "lfm2": {"<|tool_call_start|>"}, "lfm2.5": {"<|tool_call_start|>"},
}  # fmt: skip
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
GIVEN = [tool("write", parameters=WRITE), tool("write_all"), tool("now"), tool("weather")]
SCHEMAS = {"write": WRITE, "write_all": NOTHING, "now": NOTHING, "weather": WEATHER}
TEXT = '\n  def f(x):\n    return "it\'s", "</a>", {x}  # 5 < 6\n'
SOME = {"path": "", "where": {"row": 1}}
ARGUMENTS = {"path": "12", "text": TEXT, "mode": "new", "lines": 3, "force": True, "where": {"row": 2}}  # fmt: skip


# --------------------------------------------------------------------------------- of the template


class Learned(NamedTuple):
    """A template, a tokenizer that has its control tokens, and the form of its calls."""

    template: ChatTemplate
    tokenizer: Tokenizer

    @property
    def form(self) -> Form:
        return form_of(*self)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Callable[[str], Learned]:
    """Load a template by its name, or a text like one."""

    @cache
    def load_template(name: str) -> Learned:
        path = build_json(tmp_path_factory.mktemp("template"), CONTROLS, bos=False)
        write(path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
        text = name
        if name in FORMS:
            text = template_of(name if name in PUBLISHED else f"calls/{name}")
        write(path, "chat_template.jinja", text)
        tokenizer = Tokenizer.load(path)
        return Learned(chat_template(path, tokenizer), tokenizer)

    return load_template


QWEN = template_of("qwen2.5")
UNKNOWN = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[f(x)]{% endif %}{% endfor %}{{ tools }}"  # fmt: skip
CASES = [  # a template, and whether it takes several calls, or why it has no form
    (OPENS, True), (QWEN, True),
    # as Qwen3-Thinking's, which writes a thinking into the last answer alone
    (OPENS.replace("{{- '<|im_start|>' + message.role }}",
                   "{{- '<|im_start|>' + message.role }}{% if loop.last %}{{ '\\n<think>\\n\\n</think>\\n' }}{% endif %}"), True),
    # as Qwen3's with enable_thinking = false: the prompt ends with an empty thinking
    (OPENS.replace("<think>\\n'", "<think>\\n\\n</think>\\n\\n'"), True),
    (QWEN.replace("in message.tool_calls %}", "in message.tool_calls[:1] %}"), False),
    (template_of("smollm2"), "knows no tools; leave them out"), (UNKNOWN, "in a form that is not known here; leave"),
]  # fmt: skip


@rows("text, several", CASES)
def test_a_template_shows_how_calls_are_written(learned, text, several):
    """Also one that opens the thinking or drops the second call; one without a known form is refused."""
    if isinstance(several, str):
        with pytest.raises(ValueError, match=several):
            assert learned(text).form
    else:
        want = replace(learned("qwen2.5").form, several=several)
        assert learned(text).form == want and want.tags == ["<tool_call>"]


def test_the_template_for_tools_is_used_where_there_is_one(tmp_path):
    """As in Hermes' tokenizer_config.json."""
    both = {"default": template_of("smollm2"), "tool_use": QWEN}
    listed = [{"name": name, "template": text} for name, text in both.items()]
    path = build_json(tmp_path, CONTROLS, bos=False)
    write(path, "tokenizer_config.json", {"bos_token": "<s>", "chat_template": listed})
    template = chat_template(path, Tokenizer.load(path))
    assert "SmolLM" in template.render_messages(ASKED)
    assert "<tools>" in template.render_messages(ASKED, TOOLS)


def calling(*ids: str, content: str = "") -> dict:
    calls = [{"id": id, "type": "function", "function": {"name": "now", "arguments": {}}} for id in ids]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(id: str) -> dict:
    return {"role": "tool", "tool_call_id": id, "name": "now", "content": f"told {id}"}


ONE_TURN = [*ASKED, calling("a"), result("a"), *ASKED]
SPLIT = [*ASKED, calling("a", content="Both."), result("a"), calling("b"), result("b")]


@pytest.mark.parametrize("messages, want", [
    (ONE_TURN, ONE_TURN), ([*ASKED, calling("a", "b", content="Both."), result("b"), result("a"), *ASKED], [*SPLIT, *ASKED]),
    ([*SPLIT, calling("a", "b")], [*SPLIT, calling("a"), calling("b")]),  # the ids of an earlier turn, and no results
    ([calling("a"), calling("b", "c"), result("a"), result("c")], [calling("a"), calling("b"), calling("c"), result("c"), result("a")]),
])  # fmt: skip
def test_one_call_in_a_message_before_its_result(messages, want):
    assert one_call_each(messages) == want


HEADERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


@pytest.mark.parametrize("controls, shown, text, end", [
    (["[THINK]", "[/THINK]"], 2, "[THINK]Two.[/THINK]Four.", ""), ([*HEADERS, "<|return|>"], 4, "{ANALYSIS}Two.{NEXT}{FINAL}Four.", "<|return|>"),
    (["<|end|>"], 0, "Four.", "<|end|>"),  # Phi-3's answers end with it
])  # fmt: skip
def test_tags_that_are_control_tokens_have_a_text(controls, shown, text, end, tmp_path):
    """As Magistral's and gpt-oss's: the decoder would drop them, and the thinking would be the answer."""
    text = text.format(ANALYSIS=ANALYSIS, NEXT=NEXT, FINAL=FINAL)
    tokenizer = Tokenizer.load(build_json(tmp_path, ["<s>", *controls]))
    found = hidden_tags(tokenizer)
    assert found == {tokenizer.id_of(name) for name in controls[:shown]}
    ids = tokenizer.encode(text + end, bos=False, special=True)
    assert tokenizer.stream(shown=found).push(ids) == text
    assert Thinking().push(text, True) == ("Two." if shown else "", "Four.")


# ------------------------------------------------------------------------------------- of the text


class Row(NamedTuple):
    """A text that a model writes in a form, and its parts, which clients of every kind get."""

    form: str  # "": without tools
    text: str
    content: str | None = ""  # None: all that is written, but for control words
    calls: list = []
    reason: str = "stop"  # by the model itself; "length": cut at max_tokens
    thought: str = ""
    several: bool = True
    opens: Tags | None = None  # of the thinking that the prompt opens


class Names:
    """A tokenizer, as far as answers without log-probabilities need one."""

    def __init__(self, controls: dict[str, int]):
        self.name = {id: name.encode() for name, id in controls.items()}.get

    def encode(self, text: str, bos: bool) -> str:
        return text


WRITERS = {Completion: (Reply, "prompt"), Chat: (ChatReply, "messages"), Responses: (ResponseReply, "input")}  # fmt: skip


def told(kind: type, form: Form | None, row: Row, parts: list[str]) -> tuple[list[dict], dict]:
    """Return the events of a stream and the whole answer, of a text that comes in parts."""
    writer, name = WRITERS[kind]
    value = ASKED if kind is Chat else "a"
    asked = kind.model_validate({name: value, "stream": True})
    tools = (
        Tools(GIVEN, SCHEMAS, [], row.several, form) if form and kind is not Completion else None
    )
    controls = form.controls if form else {}
    shown = frozenset(controls.values())
    params = RequestParams(asked, [[1]], Sampling(), 0, 9, [], None, tools, [], row.opens, shown, 0)
    reply = writer(params, "demo", Names(controls))
    events = reply.begin()
    for number, part in enumerate(parts, 1):
        drafts = Drafts(1, spans=(("head", len(part), 0),))
        reason = row.reason if number == len(parts) else None
        events += reply.piece(Delta(0, part, reason, number, drafts=drafts))
    events += reply.end()
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    return [*map(json.loads, lines)], reply.whole()


def named(functions: list[dict]) -> list[tuple[str, dict]]:
    return [(call["name"], json.loads(call["arguments"])) for call in functions]


def of_chat(message: dict, reason: str) -> tuple:
    calls = message.get("tool_calls") or []
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in calls)
    functions = named([call["function"] for call in calls])
    return message.get("reasoning_content", ""), message.get("content") or "", functions, reason


def check_chat(form: Form | None, row: Row, parts: list[str], want: tuple) -> None:
    """By the official client's types, and its own sum of the parts of a stream."""
    events, whole = told(Chat, form, row, parts)
    chat.ChatCompletion.model_validate(whole)
    (choice,) = whole["choices"]
    assert of_chat(choice["message"], choice["finish_reason"]) == want, (row, parts)
    message: dict = {}
    for event in events:
        chat.ChatCompletionChunk.model_validate(event)
        (choice,) = event["choices"]
        message = accumulate_delta(message, choice["delta"])
        spans = choice.get("drafted", {}).get("spans")
        count = len(choice["delta"].get("content") or "")
        assert spans is None or sum(span[1] for span in spans) == count
    assert of_chat(message, choice["finish_reason"]) == want, (row, parts)


def check_response(form: Form | None, row: Row, parts: list[str], want: tuple) -> None:
    events, whole = told(Responses, form, row, parts)
    responses.Response.model_validate(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"] == events[-1]["response"]["output"]
    grown = [event["delta"] for event in events if event["type"].endswith("_text.delta")]
    texts = {"reasoning": "", "message": ""}
    in_order = ""
    for item in whole["output"]:
        for part in item.get("content", ()):
            texts[item["type"]] += part["text"]
            in_order += part["text"]
    assert "".join(grown) == in_order
    calls = named([item for item in whole["output"] if item["type"] == "function_call"])
    reason = "length" if whole["status"] == "incomplete" else "tool_calls" if calls else "stop"
    assert (*texts.values(), calls, reason) == want, (row, parts)


def in_parts(text: str, controls: list[str], size: int) -> list[str]:
    """Cut a text, but for control words, which a decoder tells whole."""
    words = "|".join(map(re.escape, controls)) or "(?!)"
    return re.findall(rf"{words}|(?:(?!{words}).){{1,{size or 1}}}", text, re.DOTALL) or [""]


def check(row: Row, form: Form | None, tokenizer: Tokenizer | None = None) -> None:
    """Streamed and whole, in parts of any size: a chat's answer and a response are one and the same."""
    controls = list(form.controls) if form else []
    content = row.content
    if content is None:
        content = row.text
        for word in controls:
            content = content.replace(word, "")
    reason = "tool_calls" if row.calls and row.reason == "stop" else row.reason
    want = (row.thought, content, row.calls, reason)
    sizes = (len(row.text), 1, 3) if len(row.text) < 1000 else (999, 2000)
    cuts = [in_parts(row.text, controls, size) for size in sizes]
    if tokenizer:  # a token a part; control tokens of calls have a text
        stream = tokenizer.stream(True, frozenset(form.controls.values()))
        ids = tokenizer.encode(row.text, bos=False, special=True)
        cuts.append([stream.push([id]) for id in ids] or [""])
    for parts in cuts:
        check_chat(form, row, parts, want)
        check_response(form, row, parts, want)
        events, whole = told(Completion, form, row, parts)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == whole["choices"][0]["text"] == row.text
        assert events[-1]["choices"][0]["finish_reason"] == row.reason


NOW = ("now", {})


def answer_of(template: ChatTemplate, form: Form, *calls: tuple[str, dict]) -> str:
    """The text of a model that has learned from the template."""
    made = [{"id": f"{i:09}", "function": {"name": name, "arguments": given}} for i, (name, given) in enumerate(calls)]  # fmt: skip
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": made}]
    prompt = without_opening(template.render_messages(ASKED, GIVEN))
    text = template.render_messages(as_taken(messages, form), GIVEN).removeprefix(prompt)
    end = form.closing.rstrip()
    if not end:
        return behind_thinking(re.split("</s>|<.eot_id.>", text)[0])
    return behind_thinking(text[: text.rindex(end) + len(end)])


@pytest.mark.parametrize("name", FORMS)
def test_a_model_writes_what_its_template_shows(learned, name):
    """Whole, two calls, none of its arguments, cut, unclosed, of no tool, with text before and behind."""
    template, tokenizer = learned(name)
    form = learned(name).form
    assert form.several == (name not in ("harmony", "llama3.1"))
    assert form.takes_text == (name == "deepseek") and form.drops == (name == "lfm2")
    assert form.controls.keys() - {"<|constrain|>"} == SHOWN.get(name, set())
    call = ("write", ARGUMENTS)
    one = answer_of(template, form, call)
    before = "" if name == "llama3.1" else "I look."  # its calls have no mark
    rows = [
        Row(name, before + one, before, [call]),
        Row(name, before + one + "\nDone.", before + "Done.", [call]),
        Row(name, answer_of(template, form, NOW), "", [NOW]),
        *[Row(name, before + one.replace("write", other), None) for other in ("writes", "wri", "writ_all", "x")],
    ]  # fmt: skip
    if form.several:
        both = answer_of(template, form, call, NOW)
        rows += [Row(name, both, "", [call, NOW]), Row(name, both, "", [call], several=False)]
    ends = [cut for cut in range(len(one)) if calls_of(form, one[:cut])]
    ends.append(len(one))
    assert ends == [*range(ends[0], len(one) + 1)], "nothing is a call before the whole of it"
    assert ends[0] >= len(one) - len(form.closing)
    for cut in {1, len(one) // 3, len(one) // 2, ends[0] - 1}:
        rows.append(Row(name, before + one[:cut], None, reason="length"))
    rows.append(Row(name, before + one[: ends[0]], before, [call]))  # unclosed
    rows.append(Row(name, before + one[: ends[0]], before, [call], "length"))
    for row in rows:
        check(row, form, tokenizer)


def calls_of(form: Form, text: str) -> list | None:
    _, whole = told(Chat, form, Row("", text, reason="length"), [text])
    return whole["choices"][0]["message"].get("tool_calls")


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
    ("xml", '<tool_call>\n<function=write>\n<parameter=where>\n{"row": null, "of": "a\nb"}\n</parameter>\n</function>', "", [("write", {"where": {"row": None, "of": "a\nb"}})]),
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


THINK = TAGS[0]
MISTRAL = TAGS[3]
ANALYSIS, NEXT, (FINAL, PREAMBLE) = TAGS[-1]  # of harmony
TO_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
THINKING = [  # the tags that the prompt opens, a text, the thinking in it, the rest
    (THINK, "Two and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (THINK, "\n So \n it is. </think>Four. ", "So \n it is.", "Four. "),
    (THINK, "<think>\nTwice.</think>Four", "Twice.", "Four"),  # the model opens it once more
    (THINK, "never closed </thin \n", "never closed </thin", ""), (THINK, "\n\n</think>\n\nFour", "", "Four"),
    (THINK, "a < b </think> c <think> d </think> e", "a < b", "c <think> d </think> e"), (THINK, "", "", ""),
    (THINK, "of the [/THINK] others\n</think>\n", "of the [/THINK] others", ""),
    (None, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (None, " \n[THINK]Two.[/THINK]Four.", "Two.", "Four."), (None, "<think>", "", ""),
    (None, "<thinking>Two</think></thinking> Four", "Two</think>", "Four"),
    (None, "Four. <think>no</think>", "", "Four. <think>no</think>"), (None, " \n <thin", "", " \n <thin"),
    (None, " plain \n", "", " plain \n"), (None, "</think> a", "", "</think> a"), (None, "", "", ""),
    (MISTRAL, "Two.[/THINK] <think>", "Two.", "<think>"), (None, f"{ANALYSIS}Two.{NEXT}{FINAL}Four.", "Two.", "Four."),
    (None, "<|channel>thought\n<channel|>Four.", "", "Four."), (None, f"{FINAL}Four.", "", "Four."), (None, f"{ANALYSIS}Two.<|end|>", "Two.<|end|>", ""), (None, FINAL[:9], "", FINAL[:9]),
    (None, f"{ANALYSIS}Two. {NEXT}{ANALYSIS}Two again.{NEXT}{TO_NOW}", "Two.\n\nTwo again.", TO_NOW), (None, TO_NOW, "", TO_NOW),
    (None, f"{PREAMBLE}I look.{NEXT}{ANALYSIS}So.{NEXT} to=functions.now<|message|>{{}}", "So.", "I look. to=functions.now<|message|>{}"),
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


@pytest.mark.parametrize("name", dict.fromkeys(row[0] for row in SLIPS))
def test_what_models_write(learned, name):
    """Slips of form that have one meaning, and texts that have none."""
    form = replace(learned(name).form, controls={})
    for row in [Row(*row) for row in SLIPS if row[0] == name]:
        check(row, form)
    for row in [row for row in BESIDE_THINKING if row.form == name]:
        check(row._replace(opens=THINK), form)
        check(row._replace(text=f"<think>{row.text}"), form)


@rows("tags, text, thought, rest", THINKING)
def test_thinking_is_taken_out(tags, text, thought, rest):
    check(Row("", text, rest, thought=thought, opens=tags), None)


@pytest.mark.parametrize("name", EXCERPTS)
def test_the_grammar_of_a_forced_call(learned, name):
    """It allows what the template writes, control tokens as such, and no other arguments."""
    template, tokenizer = learned(name)
    form = learned(name).form
    tools = Tools(GIVEN, SCHEMAS, ["write", "now"], True, form)
    if form.kind == "pairs":
        with pytest.raises(ValueError, match="cannot be forced; use tool_choice auto"):
            tools.grammar()
        return
    vocabulary = _vocabulary(tokenizer, tokenizer.vocab_size, (0,))
    matcher = LLMatcher(vocabulary, grammar_from("grammar", tools.grammar()))
    ill = [{"path": "a"}, SOME | {"mode": "x"}, SOME | {"lines": "three"}, SOME | {"more": "1"}]
    for arguments in (ARGUMENTS, SOME, *ill):
        text = answer_of(template, form, ("write", arguments)).replace("True", "true")
        text = text[text.index("write") :]  # behind the opening
        if form.kind == "json":
            text = text.removesuffix(form.closing.rstrip())
        ids = tokenizer.encode(text, bos=False, special=True)
        taken = matcher.deep_copy()
        fits = taken.validate_tokens(ids) == len(ids)
        assert fits == (arguments not in ill), arguments
        assert not fits or (taken.consume_tokens(ids) and taken.is_accepting())


# ----------------------------------------------------------------------------------- of the server

STEPS = " ".join(f"Step {n}: {n} and {n} is {n + n}." for n in range(30))
OPENING = "<tool_call>\n<function="
SENT = {"path": 'it\'s\n "1"'}
XML = f"{OPENING}write>\n<parameter=path>\n{SENT['path']}\n</parameter>\n</function>\n</tool_call>"
TO_WRITE = f"{BETWEEN}write <|constrain|>json<|message|>{json.dumps(SENT)}"


class Served(NamedTuple):
    """A template, the answer of its model, and the parts that clients get."""

    template: str
    answer: str
    content: str | None
    called: bool = False
    back: str = ""  # the call in the next prompt
    forced: str = ""  # the end of a prompt that forces a call


SERVED = {
    "opened": Served(OPENS, f"{STEPS}\n</think>\n\nFour: 4.", "Four: 4."),
    "by the model": Served(QWEN, f"<think>\n{STEPS}\n</think>\n\nFour: 4.", "Four: 4."),
    "xml": Served(template_of("calls/xml"), f"{STEPS}\n</think>\n\nI look.\n\n{XML}", "I look.", True, XML, f"assistant\n<think>\n\n</think>\n\n{OPENING}"),
    "harmony": Served(template_of("calls/harmony"), f"{ANALYSIS}{STEPS}<|end|><|start|>assistant{TO_WRITE}", None, True,
                      f"to=functions.write<|channel|>commentary json<|message|>{json.dumps(SENT)}", "<|start|>assistant to=functions."),
}  # fmt: skip


@pytest.fixture
def served(tmp_path):
    """Make a server of the demo: its template, and the text that it answers."""
    made = []

    def serve(template: str, answer: str) -> Running:
        options = ["--checkpoint", str(demo_with(tmp_path, template)), "--chat"]
        if answer:
            (tmp_path / "answer.lark").write_text(f"start: {json.dumps(answer)}")
            options += ["--grammar", str(tmp_path / "answer.lark")]
        made.append(Running(*options))
        return made[-1]

    yield serve
    for running in made:
        running.close()


def prompt_of(running: Running, messages: list[dict], **options: Any) -> str:
    reader = RequestReader(running.engine, running.server.config, "demo")
    asked = reader.read(Chat, {"messages": messages, "tools": GIVEN, **options})
    return running.engine.tokenizer.decode(asked.prompts[0])


@pytest.mark.parametrize("name", SERVED)
def test_a_server_tells_thinking_and_calls_apart(name, served):
    """Whole and streamed; what it has said goes back into the next prompt."""
    row = SERVED[name]
    running = served(row.template, row.answer)
    tools = {"tools": GIVEN} if row.called else {}
    options = {"max_tokens": 1000, **tools}
    choice = running.ask(CHAT, n=2, **options).choices[1]
    message = choice.message
    assert (message.content, message.reasoning_content) == (row.content, STEPS)
    without = running.ask(CHAT, include_reasoning=False, **options).choices[0].message
    assert without.content == row.content and not hasattr(without, "reasoning_content")
    usage = {"include_usage": True}
    *events, last = running.ask(CHAT, stream=True, stream_options=usage, **options)
    deltas = [event.choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == (row.content or "")
    thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == STEPS and len([each for each in thoughts if each]) > 1
    drafted = [event.choices[0].drafted for event in events[1:]]
    assert sum(each["tokens"] for each in drafted) == last.usage.completion_tokens
    if row.called:
        (call,) = message.tool_calls
        (same,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert choice.finish_reason == "tool_calls" and call.function.name == "write"
        assert json.loads(call.function.arguments) == SENT
        assert same.function.arguments == call.function.arguments
        sent = message.model_dump(exclude_none=True) | {"content": ""}
        told_back = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
        prompt = prompt_of(running, [*ASKED, sent, told_back])
        assert row.back in prompt and STEPS in prompt and "Done." in prompt
        assert prompt_of(running, ASKED, tool_choice="required").endswith(row.forced)


def test_an_answer_by_a_schema_has_no_thinking(served, tmp_path):
    """The prompt closes it: the grammar begins with the answer's first token; also that of a command."""
    running = served(OPENS, "")
    answer = running.ask(CHAT, response_format=of_schema({"enum": ["no"]}))
    assert json.loads(answer.choices[0].message.content) == "no"
    engine = running.engine
    text = closed(engine.template.render_messages(ASKED))
    assert text.endswith("<think>\n\n</think>\n\n")
    ids = engine.tokenizer.encode(text, bos=False, special=True)
    assert answer.usage.prompt_tokens == len(ids)
    call = running.ask(CHAT, tools=TOOLS, tool_choice="required", max_tokens=80).choices[0].message
    assert call.tool_calls[0].function.name in ("weather", "now")
    (tmp_path / "a.json").write_text('{"enum": ["no"]}')
    options = {"grammar": str(tmp_path / "a.json"), "device": "cpu"}
    own = load(checkpoint=str(tmp_path / "demo"), **options)
    assert own.template.thinks is None and generate(own, ["a"]).text == ['"no"']
    assert own.template.render(["a"], []).endswith("<think>\n\n</think>\n\n")
