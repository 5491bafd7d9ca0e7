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
llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
import transformers  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers import models  # noqa: E402

from drafts.grammar import FORMATS, Grammar, schema_of, without_formats  # noqa: E402
from run.generate import encode, load  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
from server.batcher import Refusal  # noqa: E402
from server.bodies import Chat, Completion  # noqa: E402
from server.options import ServeConfig  # noqa: E402
from server.parameters import RequestReader  # noqa: E402
from server.recommended import with_recommended_sampling  # noqa: E402

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


def params(reader, kind, body: dict) -> tuple:
    """What a request asks of the engine."""
    return reader.read(kind, body)[1:]


def refused(reader, **body) -> str:
    """The message of a refusal."""
    with pytest.raises(Refusal) as error:
        reader.read(Chat, {"messages": [USER], **body})
    return str(error.value)


# ------------------------------------------------------------------------------ fields of templates


def test_fields_of_messages_reach_the_template(reader, rendered):
    messages = [
        {**USER, "name": "Ann"},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "The sun.", "refusal": None},
        {**USER, "weight": 2},
    ]
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    assert prompt(reader, messages) == rendered(messages) != prompt(reader, plain)
    assert prompt(reader, plain) == rendered(plain)


def test_variables_of_templates(reader, rendered):
    options = {"enable_thinking": False, "unused": [1]}
    found = prompt(reader, [USER], chat_template_kwargs=options, reasoning_effort="low")
    assert found == rendered([USER], reasoning_effort="low", **options)
    both = {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}
    assert prompt(reader, [USER], **both) == rendered([USER], reasoning_effort="high")


def test_a_fixed_template_has_no_variables(tmp_path):
    config = ServeConfig(checkpoint=DEMO, device="cpu", chat="vicuna", draft="none", batch_size=1)
    reader = RequestReader(load(config), config, "demo")
    said = "the chat template vicuna knows no enable_thinking; leave that out"
    assert refused(reader, chat_template_kwargs={"enable_thinking": False}) == said
    assert "knows no reasoning_effort" in refused(reader, reasoning_effort="low")


@pytest.mark.parametrize("arguments", ["", " \n", "{}", "null", "[]", None, {}, ...])
def test_arguments_of_a_call_without_any(reader, rendered, arguments):
    function = {"name": "now", "arguments": arguments}
    if arguments is ...:
        del function["arguments"]
    call = {"id": "c1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c1", "content": "12:30"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    whole = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}]
    want = rendered(
        [USER, asked | {"content": "", "tool_calls": whole}, result | {"name": "now"}], [NOW]
    )
    assert prompt(reader, [USER, asked, result], tools=[NOW]) == want
    function["arguments"] = "[1]"
    assert "a JSON object" in refused(reader, messages=[USER, asked, result], tools=[NOW])


def test_system_messages_at_the_start_are_one(reader, rendered):
    two = [{"role": role, "content": role} for role in ("system", "developer")]
    one = {"role": "system", "content": "system\n\ndeveloper"}
    assert prompt(reader, [*two, USER]) == rendered([one, USER])


def test_parts_of_a_message(reader, rendered):
    """A refusal among them, as the official client sends its own messages again."""
    parts = [{"type": "text", "text": "I can"}, {"type": "refusal", "refusal": "not."}]
    answer = {"role": "assistant", "content": "I cannot."}
    assert prompt(reader, [USER, answer | {"content": parts}, USER]) == rendered(
        [USER, answer, USER]
    )


def test_a_list_of_no_calls(reader, rendered):
    answer = {"role": "assistant", "content": "Noon."}
    want = rendered([USER, answer, USER])
    for calls in ([], None):
        assert prompt(reader, [USER, answer | {"tool_calls": calls}, USER]) == want
    only = {"role": "assistant", "content": None, "reasoning_content": "The sun."}
    assert prompt(reader, [USER, only, USER]) == rendered([USER, only | {"content": ""}, USER])


# ---------------------------------------------------------------------------------- control tokens


def test_a_program_names_control_tokens_and_a_user_does_not(reader, rendered):
    tokenizer = reader.engine.tokenizer
    text = "def f(</s>x"
    completed = reader.read(Completion, {"prompt": text}).prompts[0]
    own = spm.SentencePieceProcessor(model_file=str(Path(DEMO) / "tokenizer.model"))
    assert completed == [own.bos_id(), *own.encode("def f("), own.eos_id(), *own.encode("x")]
    many = reader.read(Completion, {"prompt": [text, "a"]}).prompts
    assert many == [completed, tokenizer.encode("a")]
    engine = reader.engine
    plain = replace(engine, template=None)
    assert encode(plain, [text], []) == completed  # of --chat none
    said = [{"role": "system", "content": f"Be </s> {text}"}, {**USER, "content": text}]
    assert own.eos_id() not in prompt(reader, said)
    assert tokenizer.decode(prompt(reader, said)).count("</s>") == 3


def test_thinking_is_turned_off_at_the_top(reader, rendered):
    """By the names of DashScope and of ollama; chat_template_kwargs has the last word."""
    for name in ("enable_thinking", "think"):
        for value in (True, False):
            want = rendered([USER], enable_thinking=value)
            assert prompt(reader, [USER], **{name: value}) == want
        both = {name: True, "chat_template_kwargs": {"enable_thinking": False}}
        assert prompt(reader, [USER], **both) == rendered([USER], enable_thinking=False)


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
    long = {**USER, "content": "a b " * 9000}
    for own, body in (
        (strict, {"messages": [{**USER, "content": "bad"}]}),
        (strict, {"messages": [system, USER]}),
        (strict, {"messages": [USER], "tools": [NOW]}),
        (strict, {"messages": [USER], "response_format": schema}),
        (strict, {"messages": [long]}),
        (fixed, {"messages": [system, USER]}),
        (fixed, {"messages": [USER], "tools": [NOW]}),
        (plain, {"messages": [USER]}),
    ):
        said = refused(own, **body)
        assert str(folder) not in said and "--" not in said, said


# --------------------------------------------------------------------------- parameters of others


def test_values_that_are_off_by_default_act(reader):
    plain = reader.read(Completion, {"prompt": "a"}).prompts
    bare = reader.engine.tokenizer.encode("a", bos=False)
    for name in ("add_special_tokens", "add_bos_token"):
        assert reader.read(Completion, {"prompt": "a", name: False}).prompts == [bare]
        assert reader.read(Completion, {"prompt": "a", name: True}).prompts == plain
    for samples, temperature in ((False, 0), (True, 0.7)):
        asked = reader.read(Completion, {"prompt": "a", "do_sample": samples, "temperature": 0.7})
        assert asked.sampling.temperature == temperature


@pytest.mark.parametrize("chat", [True, False])
def test_other_parameters_are_ignored_and_told_once(reader, chat, capsys):
    """Whatever their value, as they change nothing; so are those that are served where they hold nothing."""
    source = {"messages": [USER], "seed": 1} if chat else {"prompt": "a", "seed": 1}
    kind = Chat if chat else Completion
    plain = params(reader, kind, source)
    off = {"frequency_penalty": 0.0, "presence_penalty": 0, "repeat_penalty": 1, "logit_bias": {"5": 0, "7": 0.0}, "min_tokens": 0}  # fmt: skip
    off |= {"bad_words": [], "allowed_token_ids": None, "guided_json": None, "suffix": "", "top_k": -1, "stop": ""}  # fmt: skip
    assert params(reader, kind, source | off) == plain and not capsys.readouterr().err
    others = {"user": "u", "store": True, f"chat_{chat}\n": {"a": [1]}, "cache_prompt": False}
    for _ in range(2):
        assert params(reader, kind, source | others) == plain
    assert (
        capsys.readouterr().err
        == f"note: ignored in requests: cache_prompt, chat_{chat}\\n, store, user\n"
    )


def test_samplers_are_read_by_the_names_of_openai_vllm_and_llama_cpp(reader):
    """Those that are missing are the server's own."""
    own = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repeat_penalty": 1.2,
        "repeat_last_n": 64.0,
        "logit_bias": {"5": 1, "7": 0},
    }
    own |= {
        "typical_p": 0.9,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "temperature": 1,
    }
    own |= {
        "dry_multiplier": 0.8,
        "dry_base": 2,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 9,
        "dry_sequence_breakers": [":"],
        "min_tokens": 5.0,
        "bad_words": ["def", "self."],
        "allowed_token_ids": [281.0, 337, 4026],
    }
    got = reader.read(Completion, {"prompt": "a"} | own).sampling
    own["dry_sequence_breakers"], own["logit_bias"] = (":",), '{"5": 1}'
    own["bad_words"], own["allowed_token_ids"] = ("def", "self."), "281,337,4026"
    own["repetition_penalty"] = own.pop("repeat_penalty")
    assert got == Sampling()._replace(**own)
    plain = Sampling()
    config = replace(reader.config, repetition_penalty=1.3)
    other = RequestReader(reader.engine, config, "demo")
    assert other.read(Completion, {"prompt": "a"}).sampling.repetition_penalty == 1.3
    assert other.read(Completion, {"prompt": "a", "repetition_penalty": 1}).sampling == plain


def test_many_stop_strings(reader):
    stops = [f"</tag{n}>" for n in range(40)]
    assert reader.read(Completion, {"prompt": "a", "stop": stops}).stops == stops
    assert reader.read(Completion, {"prompt": "a", "stop": ["", "b", ""]}).stops == ["b"]
    assert reader.read(Completion, {"prompt": "a", "stop": ""}).stops == []


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


def test_formats_that_are_not_known_are_ignored(capsys, reader):
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "color"},
            "at": {"type": "string", "format": "date"},
            "more": {"anyOf": [{"type": "string", "format": "int32"}, {"const": {"format": "x"}}]},
        },
        "required": ["format", "at", "more"],
        "$defs": {"format": {"enum": [{"format": "y"}]}},
    }
    found = without_formats(schema)
    assert capsys.readouterr().err == (
        "note: the grammar does not enforce the format 'color', 'int32'\n"
    )
    assert found["properties"]["format"] == {"type": "string"}
    assert found["properties"]["at"] == {"type": "string", "format": "date"}
    assert found["properties"]["more"]["anyOf"] == [{"type": "string"}, {"const": {"format": "x"}}]
    assert found["$defs"] == schema["$defs"]
    value = {"format": "red", "at": "2026-11-26", "more": "4"}
    jsonschema.validate(value, schema)
    matcher = Grammar(reader.engine, schema).matcher
    tokenizer = reader.engine.tokenizer
    ids = tokenizer.encode(json.dumps(value), bos=False)
    assert matcher.deep_copy().try_consume_tokens(ids) == len(ids)
    wrong = tokenizer.encode(json.dumps(value | {"at": "today"}), bos=False)
    assert matcher.deep_copy().try_consume_tokens(wrong) < len(wrong)


def test_the_formats_are_the_librarys_own():
    every = [*FORMATS, "color", "iri", "uri-reference", "regex", "int32", "idn-email", "password"]
    known = set()
    for name in every:
        schema = json.dumps({"type": "string", "format": name})
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        if not llguidance.LLMatcher.validate_grammar(grammar):
            known.add(name)
    assert known == FORMATS


def test_the_official_client_accepts_its_own_messages_again(reader):
    """A message that the client parsed, with all its empty fields, goes back as it is."""
    message = openai.types.chat.ChatCompletionMessage(role="assistant", content="Noon.")
    plain = prompt(reader, [USER, {"role": "assistant", "content": "Noon."}, USER])
    assert prompt(reader, [USER, message.model_dump(), USER]) == plain


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
