"""Calls in the forms of the models of 2026: learned from a template, found in a text, forced, and taken back."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
from llguidance import LLMatcher, grammar_from  # noqa: E402
from test_thinking import ask, served  # noqa: E402, F401 (a fixture)
from test_tokenizer import build_json, write  # noqa: E402
from test_tool_calls import ASKED, in_parts, tool  # noqa: E402

from drafts.grammar import _vocabulary  # noqa: E402
from files.chat import ChatTemplate, chat_template  # noqa: E402
from files.thinking import behind_thinking, without_opening  # noqa: E402
from files.tokenizer import Tokenizer  # noqa: E402
from server.bodies import Chat  # noqa: E402
from server.call_forms import NOTHING, Form, form_of  # noqa: E402
from server.parameters import RequestReader  # noqa: E402
from server.tool_calls import Tools, as_taken  # noqa: E402

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
TOOLS = [tool("write", parameters=WRITE), tool("write_all"), tool("now")]
SCHEMAS = {"write": WRITE, "write_all": NOTHING, "now": NOTHING}
TEXT = '\n  def f(x):\n    return "it\'s", "</a>", {x}  # 5 < 6\n'
ARGUMENTS = {
    "path": "12",
    "text": TEXT,
    "mode": "new",
    "lines": 3,
    "force": True,
    "where": {"row": 2},
}


def model(tmp_path, name: str) -> tuple[ChatTemplate, Form]:
    path = build_json(tmp_path, CONTROLS, bos=False)
    write(path, "tokenizer_config.json", {})
    write(path, "chat_template.jinja", TEMPLATES[name])
    tokenizer = Tokenizer.load(path)
    template = chat_template(path, tokenizer)
    return template, form_of(template, tokenizer)


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
        text[: text.rindex(end) + len(end)] if end else text.partition("</s>")[0]
    )


def found(
    form: Form, text: str, size: int | None = None, reason: str = "length"
) -> tuple[str, list]:
    tools = Tools(TOOLS, SCHEMAS, [], True, form)
    content, calls = in_parts(tools, text, size or len(text), reason)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_writes_what_its_template_shows(name, tmp_path):
    """Whole, in parts of any size and cut anywhere: no text is lost, and arguments come back."""
    template, form = model(tmp_path, name)
    assert form.several == (name != "harmony")
    assert form.takes_text == (name == "deepseek") and form.drops == (name == "lfm2")
    shown = {
        "harmony": CONTROLS[2:4],
        "mistral": CONTROLS[1:2],
        "lfm2": CONTROLS[4:],
        "lfm2.5": CONTROLS[4:],
    }
    assert {*shown.get(name, ())} <= form.controls.keys()
    calls = [("write", ARGUMENTS), ("now", {})][: 1 + form.several]
    text = f"I look.{answer_of(template, form, *calls)}"
    for size in (len(text), 1, 2, 3, 7):
        assert found(form, text, size) == ("I look.", calls), size
    one = f"I look.{answer_of(template, form, ('write', ARGUMENTS))}"
    whole = [found(form, one[:cut], 99) for cut in range(len(one) + 1)]
    ends = [cut for cut, (_, calls) in enumerate(whole) if calls]
    assert ends == list(range(ends[0], len(one) + 1)) and ends[0] >= len(one) - len(form.closing)
    assert all(whole[cut] == (one[:cut], []) for cut in range(ends[0]))
    assert all(whole[cut] == ("I look.", calls[:1]) for cut in ends)
    for other in ("writes", "wri", "writ_all", "x"):
        unknown = one.replace("write", other)
        assert found(form, unknown) == found(form, unknown, 1) == (unknown, [])


NOW = ("now", {})
PATH = ("write", {"path": "a\n"})
BETWEEN = "<|channel|>commentary to=functions."
CASES = [  # what models write beside their templates, and what is no call
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
    ("harmony", f"{BETWEEN}now<|channel|>commentary json<|message|>", "", [NOW]), ("harmony", "to=now<|message|>{}", None, []),
    ("harmony", f"{BETWEEN}nowhere<|message|>{{}}", None, []), ("harmony", f"{BETWEEN}now<|message|>none", None, []),
    ("mistral", "So:[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]now{}", "So:[TOOL_CALLS]now{}", [NOW]),
    ("gemma", '<|tool_call>call:write{path:"a\n",where:{<|"|>row<|"|>:[1,{a:null}]},lines:2.5}<tool_call|>', "",
     [("write", {"path": "a\n", "where": {"row": [1, {"a": None}]}, "lines": 2.5})]),
    ("gemma", "<|tool_call>call:write{path:a b,lines:2]}<tool_call|>", None, []),
    ("gemma", "<|tool_call>call:write{where:" + "[" * 1500, None, []),
    ("lfm2", "<|tool_call_start|>[write(path='it\\'s', text=\"a\\nb\", lines=-1, force=True, where={\"row\": null}), now()]<|tool_call_end|>So.", "So.",
     [("write", {"path": "it's", "text": "a\nb", "lines": -1, "force": True, "where": {"row": None}}), NOW]),
    ("lfm2", "<|tool_call_start|>[now(), other()]<|tool_call_end|>", None, []),
]  # fmt: skip


def test_what_models_write_beside_their_templates(tmp_path):
    forms = {name: model(tmp_path, name)[1] for name in TEMPLATES}
    for name, text, content, calls in CASES:
        for size in (len(text), 1, 3) if len(text) < 1000 else (999, 2000):
            told = found(forms[name], text, size, "stop")  # by the model itself
            assert told == (text if content is None else content, calls), (text, size)


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
            assert in_parts(tools, text, 3) == ("", [("write", json.dumps(arguments))])
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
