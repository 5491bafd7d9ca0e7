"""Requests as clients send them: fields that a template reads, values that change nothing, and refusals by name.

Prompts are compared with transformers' own rendering of the same messages.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece as spm

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
import transformers  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers import models  # noqa: E402

from drafts.grammar import Grammar, schema_of  # noqa: E402
from run.generate import encode, load  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
from server.batcher import Refusal  # noqa: E402
from server.bodies import Chat, Completion  # noqa: E402
from server.options import ServeConfig  # noqa: E402
from server.parameters import RequestReader  # noqa: E402
from server.recommended import with_recommended_sampling  # noqa: E402
from server.responses import Responses  # noqa: E402

TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]
{%- if m.name is defined %} ({{ m.name }}){% endif %}
{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.weight is defined %} x{{ m.weight }}{% endif %} {{ m.content }}
{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant] {{ reasoning_effort | default('') }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
USER = {"role": "user", "content": "What time is it?"}
NOW = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("template")
    for file in Path(DEMO).iterdir():
        (root / file.name).symlink_to(file.resolve())
    (root / "chat_template.jinja").write_text(TEMPLATE)
    return root


@pytest.fixture(scope="module")
def reader(folder) -> RequestReader:
    config = ServeConfig(checkpoint=str(folder), device="cpu", chat="", draft="none", batch_size=1)
    return RequestReader(load(config), config, "demo")


@pytest.fixture(scope="module")
def rendered(reader):
    """The ids of the prompt that transformers renders."""
    tokenizer = reader.engine.tokenizer
    backend = transformers.PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()))

    def render(messages, tools=None, **variables) -> list[int]:
        text = backend.apply_chat_template(
            messages,
            tools=tools,
            chat_template=TEMPLATE,
            add_generation_prompt=True,
            tokenize=False,
            **variables,
        )
        return tokenizer.encode(text, bos=False, special=True)

    return render


def prompt(reader, messages, **body) -> list[int]:
    return reader.read(Chat, {"messages": messages, **body}).prompts[0]


def refused(reader, **body) -> str:
    """The message of a refusal."""
    with pytest.raises(Refusal) as error:
        reader.read(Chat, {"messages": [USER], **body})
    return str(error.value)


# ----------------------------------------------------------------------------- prompts of templates

NOON = {"role": "assistant", "content": "Noon."}
SUN = {"role": "assistant", "content": None, "reasoning_content": "The sun."}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12:30"}
OFFICIAL = openai.types.chat.ChatCompletionMessage(role="assistant", content="Noon.").model_dump()
FIELDS = [{**USER, "name": "Ann"}, NOON | {"reasoning_content": "The sun."}, {**USER, "weight": 2}]


def calls(arguments: object) -> dict:
    """An assistant's message with a call; arguments: ... for none"""
    function = {"name": "now"} | ({} if arguments is ... else {"arguments": arguments})
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


OFF = {"enable_thinking": False}
PROMPTS = [  # the fields of a request; the messages and variables that the template gets
    ({"messages": [FIELDS[0], FIELDS[1] | {"refusal": None}, FIELDS[2]]}, FIELDS, {}),
    ({"messages": [USER], "chat_template_kwargs": OFF | {"unused": [1]}, "reasoning_effort": "low"},
     [USER], OFF | {"unused": [1], "reasoning_effort": "low"}),
    ({"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}, [USER], {"reasoning_effort": "high"}),
    # by the names of DashScope and of ollama; chat_template_kwargs has the last word
    *[({"messages": [USER], name: value}, [USER], {"enable_thinking": value}) for name in ("enable_thinking", "think") for value in (True, False)],
    *[({"messages": [USER], name: True, "chat_template_kwargs": OFF}, [USER], OFF) for name in ("enable_thinking", "think")],
    # system messages at the start are one
    ({"messages": [*({"role": role, "content": role} for role in ("system", "developer")), USER]}, [{"role": "system", "content": "system\n\ndeveloper"}, USER], {}),
    # parts of a message, a refusal among them; fields that hold nothing, as the official client sends them
    ({"messages": [USER, NOON | {"content": [{"type": "text", "text": "No"}, {"type": "refusal", "refusal": "on."}]}, USER]}, [USER, NOON, USER], {}),
    ({"messages": [USER, OFFICIAL, USER]}, [USER, NOON, USER], {}), ({"messages": [USER, SUN, USER]}, [USER, SUN | {"content": ""}, USER], {}),
    *[({"messages": [USER, NOON | {"tool_calls": none}, USER]}, [USER, NOON, USER], {}) for none in ([], None)],
    # calls without arguments
    *[({"messages": [USER, calls(arguments) | {"content": None}, RESULT], "tools": [NOW]}, [USER, calls({}), RESULT | {"name": "now"}], {"tools": [NOW]})
      for arguments in ("", " \n", "{}", "null", "[]", None, {}, ...)],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_a_prompt_is_what_transformers_renders(reader, rendered, number):
    body, messages, variables = PROMPTS[number]
    found = prompt(reader, **body)
    assert found == rendered(messages, **variables)
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    assert number or found != rendered(plain), "the fields are seen"


def test_a_program_names_control_tokens_and_a_user_does_not(reader):
    text = "def f(</s>x"
    (completed,) = reader.read(Completion, {"prompt": text}).prompts
    own = spm.SentencePieceProcessor(model_file=str(Path(DEMO) / "tokenizer.model"))
    assert completed == [own.bos_id(), *own.encode("def f("), own.eos_id(), *own.encode("x")]
    plain = replace(reader.engine, template=None)
    assert encode(plain, [text], []) == completed  # of --chat none
    said = prompt(reader, [{"role": "system", "content": f"Be {text}"}, {**USER, "content": text}])
    assert own.eos_id() not in said and reader.engine.tokenizer.decode(said).count("</s>") == 2


def test_the_oldest_turns_are_left_out_where_asked(reader):
    """As far as an answer needs room; of a completion, tokens. What is left is what they are alone."""
    answer = NOON | {"content": "y = 2\n" * 60}
    system = {"role": "system", "content": "Be brief."}
    turns = [{**USER, "content": "x = 1\n" * 60}, answer] * 12 + [USER]

    def fit(messages, **body):
        return reader.read(Chat, {"messages": messages, "truncation": "auto", **body})

    assert fit([USER], max_tokens=2000).dropped == 0
    found = fit([system, *turns], max_tokens=2000)
    assert 0 < found.dropped < 24 and found.dropped % 2 == 0
    assert found.prompts[0] == prompt(reader, [system, *turns[found.dropped :]])
    assert fit([system, *turns], max_tokens=10).dropped < found.dropped, "a short answer needs less"
    long = {**USER, "content": "x = 1\n" * 9000}
    for body in ({}, {"truncation": "auto"}):
        assert "maximum context length" in refused(reader, messages=[*turns, long], **body)
    ids = [3 + i % 90 for i in range(reader.engine.context + 50)]
    found = reader.read(Completion, {"prompt": ids, "truncation": "auto", "max_tokens": 10})
    assert found.dropped == 60 and found.prompts == [ids[60:]]


def test_messages_to_a_client_name_no_file_and_no_option(folder, reader):
    """They have neither: of a template that fails, a system message, tools, a schema, the context."""
    text = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}{% if m.role == 'tool' or 'bad' in m.content %}{{ raise_exception('no such words') }}{% endif %}")  # fmt: skip
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(text)
    config = replace(reader.config, system=None)
    strict = RequestReader(load(config), config, "demo")
    plain = RequestReader(replace(reader.engine, config=replace(config, chat="none")), config, "d")
    mistral = replace(config, chat="mistral")
    fixed = RequestReader(load(mistral), mistral, "demo")
    system = {"role": "system", "content": "bad"}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "banana"}}}
    for own, body in (
        (strict, {"messages": [{**USER, "content": "bad"}]}),
        (strict, {"messages": [system, USER]}),
        (strict, {"messages": [USER], "tools": [NOW]}),
        (strict, {"messages": [USER], "response_format": schema}),
        (fixed, {"messages": [system, USER]}),
        (fixed, {"messages": [USER], "tools": [NOW]}),
        (fixed, {"messages": [USER, calls({}), RESULT]}),
        (plain, {"messages": [USER]}),
    ):
        said = refused(own, **body)
        assert str(folder) not in said and "--" not in said, said


# --------------------------------------------------------------------------- parameters of answers

SAMPLERS = {
    "presence_penalty": 0.5, "frequency_penalty": -1, "repeat_last_n": 64.0, "typical_p": 0.9, "top_n_sigma": 1.5, "xtc_probability": 0.5,
    "xtc_threshold": 0.2, "temperature": 1, "dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 9, "min_tokens": 5.0,
}  # fmt: skip
LISTS = {"logit_bias": {"5": 1}, "dry_sequence_breakers": [":"], "bad_words": ["def", "self."], "allowed_token_ids": [281.0, 337, 4026]}  # fmt: skip
AS_OPTIONS = {"logit_bias": '{"5": 1}', "dry_sequence_breakers": (":",), "bad_words": ("def", "self."), "allowed_token_ids": "281,337,4026"}  # fmt: skip
STOPS = [f"</tag{n}>" for n in range(40)]
# values that change nothing, as they hold nothing or are off
IDLE = {"frequency_penalty": 0.0, "presence_penalty": 0, "repeat_penalty": 1, "logit_bias": {}, "min_tokens": 0, "bad_words": [],
        "allowed_token_ids": None, "guided_json": None, "suffix": "", "top_k": -1, "stop": "", "add_bos_token": True}  # fmt: skip
READ = [  # the fields of a completion; what is read of it
    (IDLE, {"sampling": Sampling(), "stops": []}),
    (SAMPLERS | LISTS | {"repeat_penalty": 1.2}, {"sampling": Sampling(**SAMPLERS | AS_OPTIONS, repetition_penalty=1.2)}),
    ({"do_sample": False, "temperature": 0.7}, {"sampling": Sampling()}), ({"do_sample": True, "temperature": 0.7}, {"sampling": Sampling(0.7)}),
    ({"stop": STOPS}, {"stops": STOPS}), ({"stop": ["", "b", ""]}, {"stops": ["b"]}), ({"stop": "a"}, {"stops": ["a"]}),
    ({"prompt": ["def", [3, 4.0]], "add_special_tokens": False}, {"prompts": [[329], [3, 4]]}),
    ({"max_tokens": -1}, {"most": 2048}), ({"n_predict": 3}, {"most": 3}), ({"seed": -2}, {"seed": 2**64 - 2}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(READ)))
def test_parameters_by_the_names_of_openai_vllm_and_llama_cpp(reader, number):
    """Those that are missing are the server's own."""
    body, want = READ[number]
    found = reader.read(Completion, {"prompt": "def"} | body)
    assert {name: getattr(found, name) for name in want} == want


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_other_parameters_are_ignored_and_told_once(reader, kind, capsys):
    """Whatever their value, as they change nothing."""
    source = {"messages": [USER], "prompt": "a", "seed": 1}
    del source["prompt" if kind is Chat else "messages"]
    others = {"user": "u", "store": True, f"{kind.__name__}\n": {"a": [1]}, "cache_prompt": False}
    for _ in range(2):
        assert reader.read(kind, source | others)[1:] == reader.read(kind, source)[1:]
    told = f"note: ignored in requests: {kind.__name__}\\n, cache_prompt, store, user\n"
    assert capsys.readouterr().err == told
    other = RequestReader(reader.engine, replace(reader.config, repetition_penalty=1.3), "demo")
    assert other.read(kind, source).sampling.repetition_penalty == 1.3
    assert other.read(kind, source | {"repetition_penalty": 1}).sampling == Sampling()


# ------------------------------------------------------------------------------- requests of agents

RUN = {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
TOOL, FLAT = {"type": "function", "function": RUN}, {"type": "function", **RUN}
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}
OUT = {"type": "function_call_output", "call_id": "c1"}
ASKS = {"type": "function_call", "call_id": "c1", "name": "run", "arguments": ""}
SAYS = {"role": "user", "content": "x"}


def parts(*texts: str, kind: str = "text") -> list:
    return [{"type": kind, "text": text} for text in texts]


def answered(result: dict, **more) -> dict:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | more]}, {"role": "tool", "tool_call_id": "c1", **result}], "tools": [TOOL]}  # fmt: skip


def between(*items: dict) -> dict:
    return {"input": [USER, *items, SAYS], "tools": [FLAT]}


def allows(mode: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [TOOL]}}


CODEX = {
    "instructions": "You", "tool_choice": "auto", "parallel_tool_calls": False, "store": False, "stream": True,
    "input": [{"type": "message", "role": role, "content": parts("x", kind="input_text")} for role in ("developer", "user", "user")],
    "tools": [FLAT, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, {"type": "local_shell"}, {"type": "web_search"}],
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
}  # fmt: skip
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": parts("s", kind="summary_text"), "content": None, "encrypted_content": "a"}  # fmt: skip
REQUESTS = [  # the kind, the fields; what the log names
    # tools and the choice of them
    *[(Chat, {"messages": [USER], "tools": [tool]}, "") for tool in (
        TOOL, {"function": RUN}, FLAT, {"function": {"name": "now"}}, {"function": {"name": "now", "parameters": None, "strict": None}},
        {"function": {"name": "now", "parameters": {}}}, {"function": {"name": "mcp.a:b/c"}}, {"function": {"name": "m" * 128}})],
    (Chat, {"messages": [USER], "tools": [TOOL, {"type": "custom", "custom": {"name": "a"}}]}, "custom (tools)"),
    (Chat, {"messages": [USER], "tools": [{"type": "web_search"}], "tool_choice": "auto"}, "web_search (tools)"),
    *[(Chat, {"messages": [USER], "tools": [TOOL], "tool_choice": choice}, "") for choice in (
        "auto", None, {"type": "auto"}, {"type": "required"}, allows("auto"), allows("required"))],
    (Responses, {"input": "a", "tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]}}, ""),
    # histories: calls, results, refusals, thinking, empty parts
    *[(Chat, answered(result), "") for result in ({"content": None}, {}, {"content": parts("a", "b")}, {"content": "", "name": "run"})],
    (Chat, answered({}, index=0), ""),
    *[(Chat, {"messages": [USER, {"role": "assistant", **more}, USER]}, "") for more in (
        {}, {"content": ""}, {"content": [{"type": "refusal", "refusal": "no"}]}, {"content": []}, {"content": [{"type": "thinking", "thinking": "a"}, *parts("b")]},
        {"content": "a", "refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": None, "reasoning": "r"})],
    (Chat, {"messages": [{"role": "system", "content": [{**part, "cache_control": {}} for part in parts("a", "b")]}, {"role": "user", "content": ["Hi"]}]}, ""),
    (Chat, {"messages": [USER], "store": False, "metadata": {}, "service_tier": "auto", "max_completion_tokens": 4, "max_tokens": 4}, "metadata, service_tier, store"),
    # Responses
    (Responses, CODEX, "custom (tools), local_shell (tools), prompt_cache_key, store, web_search (tools)"),
    *[(Responses, between(*items), "") for items in (
        [THOUGHT, ASKS, OUT | {"output": parts("a", kind="input_text")}], [ASKS, OUT], [{"role": "assistant", "content": []}],
        [{"type": "custom_tool_call", "call_id": "c2", "name": "a", "input": "b"}, {"type": "custom_tool_call_output", "call_id": "c2", "output": "c"}])],
    (Responses, between({"type": "web_search_call", "id": "ws"}), "web_search_call (input)"),
    (Responses, {"input": "a", "tools": None, "tool_choice": None, "previous_response_id": None, "background": False, "text": None, "top_logprobs": 0}, ""),
    # completions
    (Completion, {"prompt": "a", "suffix": None, "echo": False, "logprobs": False, "best_of": 1}, "best_of"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_what_agents_and_clients_send(reader, number, capsys):
    kind, fields, told = REQUESTS[number]
    reader.told.clear()
    reader.read(kind, fields)
    err = [line for line in capsys.readouterr().err.splitlines() if "ignored in requests" in line]
    assert err == ([f"note: ignored in requests: {told}"] if told else [])


# ------------------------------------------------------------------------------------- JSON schemas


def test_a_schema_in_json_object_is_enforced(reader):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert schema_of({"type": "json_object", "schema": schema}) == schema
    assert schema_of({"type": "json_object"}) == {"type": "object"}
    for asked, name in (
        ({"type": "json_object", "json_schema": {"schema": schema}}, "json_schema"),
        ({"type": "text", "schema": schema}, "schema"),
        ({"type": "json_schema", "schema": schema}, "schema"),
    ):
        with pytest.raises(ValueError, match=f"of type {asked['type']} has no {name}; leave that"):
            schema_of(asked)
    with pytest.raises(ValueError, match="must be of type text"):
        schema_of({"type": "json_object", "schema": "a"})


NAMES = {"format": {"enum": [{"format": "y"}]}}  # "format" as a name, and in a value
SCHEMAS = [  # a schema, a value that it allows, one that it does not, what the note names
    ({"properties": {"a": {"format": "color"}}, "required": ["a"]}, {"a": "red"}, {"b": 1}, "Unknown format: color"),
    ({"properties": {"a": {"format": "date"}}, "required": ["a"]}, {"a": "2026-11-26"}, {"a": "today"}, ""),
    ({"additionalProperties": {"type": "number"}, "propertyNames": {"type": "string"}}, {"a": 1, "b": 2}, {"a": "x"}, ...),
    ({"properties": {"format": {"$ref": "#/$defs/format"}}, "$defs": NAMES, "required": ["format"]}, {"format": {"format": "y"}}, {"format": "y"}, ""),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_what_a_schema_asks_beyond_the_library_is_ignored(number, capsys, reader):
    """And named in a line of the log; the rest is enforced."""
    rules, value, other, told = SCHEMAS[number]
    schema = {"type": "object", "additionalProperties": False, **rules}
    jsonschema.validate(value, schema)
    matcher = Grammar(reader.engine, schema).matcher
    err = capsys.readouterr().err
    assert told is ... or (told in err and err.count("\n") == (told != ""))
    tokenizer = reader.engine.tokenizer
    ids = tokenizer.encode(json.dumps(value), bos=False)
    assert matcher.deep_copy().try_consume_tokens(ids) == len(ids)
    wrong = tokenizer.encode(json.dumps(other), bos=False)
    assert matcher.deep_copy().try_consume_tokens(wrong) < len(wrong)


# ------------------------------------------------------------------------------------------ defaults


def test_the_sampling_that_a_model_recommends(folder, tmp_path, monkeypatch):
    """It is a request's, where neither the request nor the server's command names another."""
    config = ServeConfig(checkpoint=str(folder))
    assert config.temperature == 0 and with_recommended_sampling(config, set()) == config
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    config = replace(config, checkpoint=str(tmp_path))

    def recommend(**values) -> None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": None, **values}))

    for values, temperature in (({}, 0), ({"do_sample": True}, 1), ({"top_k": 20}, 1)):
        recommend(**values)
        assert with_recommended_sampling(config, set()).temperature == temperature
    for values in ({"do_sample": False, "temperature": 0.6}, {}):
        recommend(repetition_penalty=1.1, **values)
        own = with_recommended_sampling(config, set())
        assert own.sampling == Sampling(repetition_penalty=1.1)
    recommend(temperature=0.6, top_p=0.95)
    own = with_recommended_sampling(config, set())
    assert own.sampling == Sampling(temperature=0.6, top_p=0.95) and own.num_samples == 1
    typed = with_recommended_sampling(replace(config, temperature=0.8), {"temperature"})
    assert typed.sampling == Sampling(temperature=0.8, top_p=0.95)
    greedy = with_recommended_sampling(replace(config, temperature=0.0), {"temperature"})
    assert greedy.sampling == Sampling(temperature=0, top_p=1)
    recommend(top_p=7)
    with pytest.raises(ValueError, match="names a sampling that cannot be used: --top_p must be"):
        with_recommended_sampling(config, set())
    metadata = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
    }
    monkeypatch.setattr("server.recommended.is_gguf", lambda path: True)
    monkeypatch.setattr(
        "server.recommended.read_header", lambda path: SimpleNamespace(metadata=metadata)
    )
    assert with_recommended_sampling(config, set()).sampling == Sampling(
        temperature=0.7, top_k=20, repetition_penalty=1.1
    )
