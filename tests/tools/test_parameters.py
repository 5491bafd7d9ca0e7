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
from server.parameters import (  # noqa: E402
    NEUTRAL,
    SERVED,
    WITHOUT_EFFECT,
    RequestReader,
    ServeConfig,
)
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
    return reader.read({"messages": messages, **body}, chat=True).prompts[0]


def refused(reader, chat=True, **body) -> str:
    """The message of a refusal."""
    body = {"messages": [USER], **body} if chat else {"prompt": "a", **body}
    with pytest.raises(Refusal) as error:
        reader.read(body, chat)
    assert error.value.status == 400 and "\n" not in str(error.value)
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
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        said = refused(reader, chat_template_kwargs={name: 1})
        assert said == f"chat_template_kwargs cannot set {name}; leave that out"
    assert "must be an object" in refused(reader, chat_template_kwargs=[1])
    assert "reasoning_effort must be a text" in refused(reader, reasoning_effort=3)
    assert "is not served" in refused(reader, chat=False, reasoning_effort="low")


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
    completed = reader.read({"prompt": text}, chat=False).prompts[0]
    own = spm.SentencePieceProcessor(model_file=str(Path(DEMO) / "tokenizer.model"))
    assert completed == [own.bos_id(), *own.encode("def f("), own.eos_id(), *own.encode("x")]
    many = reader.read({"prompt": [text, "a"]}, chat=False).prompts
    assert many == [completed, tokenizer.encode("a")]
    engine = reader.engine
    plain = replace(engine, template=None)
    assert encode(plain, [text], []) == completed  # of --chat none
    said = [{"role": "system", "content": f"Be </s> {text}"}, {**USER, "content": text}]
    assert own.eos_id() not in prompt(reader, said)
    assert tokenizer.decode(prompt(reader, said)).count("</s>") == 3
    config = replace(reader.config, control_tokens="all")
    free = RequestReader(engine, config, "demo")
    assert prompt(free, said) == rendered(said)
    config = replace(reader.config, control_tokens="none")
    none = RequestReader(engine, config, "demo")
    assert none.read({"prompt": text}, chat=False).prompts[0] == tokenizer.encode(text)
    assert encode(replace(plain, config=config), [text], []) == tokenizer.encode(text)
    assert own.eos_id() not in prompt(none, said)


def test_thinking_is_turned_off_at_the_top(reader, rendered):
    """By the names of DashScope and of ollama; chat_template_kwargs has the last word."""
    for name in ("enable_thinking", "think"):
        for value in (True, False):
            want = rendered([USER], enable_thinking=value)
            assert prompt(reader, [USER], **{name: value}) == want
        both = {name: True, "chat_template_kwargs": {"enable_thinking": False}}
        assert prompt(reader, [USER], **both) == rendered([USER], enable_thinking=False)
        assert f"{name} must be true or false" in refused(reader, **{name: "no"})
        assert "is not served" in refused(reader, chat=False, **{name: False})


def test_no_parameter_is_taken_and_ignored(reader):
    """False is no default of what is on by default: it acts, or is refused."""
    read = reader.read({"prompt": "a", "add_special_tokens": False}, False)
    assert read.prompts[0] == reader.engine.tokenizer.encode("a", bos=False)
    assert reader.read({"prompt": "a", "add_bos_token": False}, False).prompts == read.prompts
    plain = reader.read({"prompt": "a"}, False).prompts
    assert reader.read({"prompt": "a", "add_special_tokens": True}, False).prompts == plain
    assert prompt(reader, [USER], add_special_tokens=False, add_bos_token=True) == prompt(reader, [USER])  # fmt: skip
    assert "is not served" in refused(reader, add_special_tokens=True)
    greedy = reader.read({"prompt": "a", "do_sample": False, "temperature": 0.7}, False)
    assert greedy.sampling.temperature == 0
    drawn = reader.read({"prompt": "a", "do_sample": True, "temperature": 0.7}, False)
    assert drawn.sampling.temperature == 0.7
    said = refused(reader, chat=False, do_sample=True, temperature=0)
    assert said.startswith("do_sample = true needs a temperature above 0")
    for value in (False, "", [], {}, 0):
        said = refused(reader, some_new_name=value)
        assert said == f"some_new_name = {json.dumps(value)} is not served; leave it out"
    assert prompt(reader, [USER], some_new_name=None) == prompt(reader, [USER])


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


# ------------------------------------------------------------------------- values that change nothing

# neutral values of vLLM's, SGLang's, llama.cpp's and OpenAI's parameters, by their documentation
HARMLESS = {
    "service_tier": "auto", "prompt_cache_key": "session-1", "safety_identifier": "u1", "user": "u", "store": True,
    "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "a"}, "priority": 3, "cache_prompt": True,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "ignore_eos": False,
    "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "repeat_penalty": 1, "logit_bias": {},
    "best_of": 1, "echo": False, "suffix": "", "length_penalty": 1.0, "early_stopping": False, "use_beam_search": False,
    "include_stop_str_in_output": False, "stop_token_ids": [], "bad_words": [], "allowed_token_ids": None,
    "guided_json": None, "guided_regex": "", "structured_outputs": {}, "mirostat": 0, "mirostat_tau": 5.0,
    "typical_p": 1.0, "tfs_z": 1.0, "xtc_probability": 0, "dry_multiplier": 0.0, "n_probs": 0, "modalities": ["text"],
    "functions": [], "function_call": "none", "return_tokens_as_token_ids": False, "audio": None,
    "guidance_scale": 1.0, "ban_eos_token": False, "negative_prompt": "", "no_repeat_ngram_size": 0, "num_beams": 1,
    "mirostat_mode": 0, "separate_reasoning": True, "n_keep": 0, "ttl": 300,
}  # fmt: skip
HARMFUL = {
    "skip_special_tokens": False, "suffix": "a", "best_of": 2, "ignore_eos": True,
    "stop_token_ids": [5], "guided_json": {"type": "object"}, "mirostat": 2, "n_probs": 5, "modalities": ["audio"], "functions": [1], "anything": 1, "grammar": "a",
    "length_penalty": True, "detokenize": False, "use_beam_search": True,
}  # fmt: skip


@pytest.mark.parametrize("chat", [True, False])
def test_values_that_change_nothing_pass(reader, chat):
    """A client's defaults pass, one by one and together; everything else is refused by its name."""
    source = {"messages": [USER]} if chat else {"prompt": "a"}
    plain = reader.read(source | {"seed": 1}, chat)
    for name, value in HARMLESS.items():
        assert reader.read(source | {"seed": 1, name: value}, chat) == plain, name
    assert reader.read(source | {"seed": 1} | HARMLESS, chat) == plain
    zeros = {"logit_bias": {"5": 0, "7": 0.0}}
    assert reader.read(source | {"seed": 1} | zeros, chat) == plain
    for name, value in HARMFUL.items():
        said = refused(reader, chat, **{name: value})
        why = ", as it cuts by" if name == "mirostat" else "; leave it out"
        assert said.startswith(f"{name} = {json.dumps(value)} is not served{why}")


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
    got = reader.read({"prompt": "a"} | own, False).sampling
    own["dry_sequence_breakers"], own["logit_bias"] = (":",), '{"5": 1}'
    own["bad_words"], own["allowed_token_ids"] = ("def", "self."), "281,337,4026"
    own["repetition_penalty"] = own.pop("repeat_penalty")
    assert got == Sampling()._replace(**own)
    plain = Sampling()
    config = replace(reader.config, repetition_penalty=1.3)
    other = RequestReader(reader.engine, config, "demo")
    assert other.read({"prompt": "a"}, False).sampling.repetition_penalty == 1.3
    assert other.read({"prompt": "a", "repetition_penalty": 1}, False).sampling == plain


@pytest.mark.parametrize("body, message", [
    ({"frequency_penalty": "0.5"}, "frequency_penalty must be a number; it is '0.5'"),
    ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.01; it is 0"),
    ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty is another name of repetition_penalty; give one of them"),
    ({"typical_p": 0}, "typical_p must be in (0, 1]; it is 0"), ({"xtc_probability": 1.5}, "xtc_probability must be at most 1; it is 1.5"),
    ({"repeat_last_n": 1.5}, "repeat_last_n must be a whole number; it is 1.5"), ({"dry_base": 9}, "dry_base must be at most 4; it is 9"),
    ({"presence_penalty": 1e300}, "presence_penalty must be at most 100; it is 1e+300"),
    ({"logit_bias": [[5, 1]]}, 'logit_bias must be an object, as {"15043": -100}'),
    ({"logit_bias": {"a": 1}}, "logit_bias must be {\"token id\": number, ...}; 'a' is no token id"),
    ({"logit_bias": {"5": 101}}, "a logit_bias must be from -100 to 100; that of 5 is 101"),
    ({"logit_bias": {"5": True}}, "a logit_bias must be from -100 to 100; that of 5 is True"),
    ({"logit_bias": {"999999": 1}}, "logit_bias: token ids must be in 0..4095; one is 999999"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias may name 1024 tokens; it names 1025"),
    ({"bad_words": [1]}, "bad_words must be texts that are not empty; it is (1,)"),
    ({"bad_words": ["a"] * 65}, "bad_words may have 64 texts, not 65"),
    ({"bad_words": ["ab" * 99]}, "one of bad_words has 99 tokens; 16 are the most"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be token ids, as 5,17,3; it is 'a'"),
    ({"allowed_token_ids": [4096]}, "allowed_token_ids: token ids must be in 0..4095; one is 4096"),
    ({"allowed_token_ids": [281], "bad_words": ["self"]}, "bad_words has all of allowed_token_ids; leave one out"),
    ({"min_tokens": -1}, "min_tokens must be at least 0; it is -1"),
    ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 2147483647; it is 0"),
    ({"max_tokens": -2, "echo": True}, "max_tokens must be a whole number from 0 to 2147483647; it is -2"),
    ({"prompt": ["a", "b"], "draft_tokens": [0]}, "draft_tokens has 1 values, and there are 2 prompts; give one for each"),
    ({"dry_sequence_breakers": [1]}, "dry_sequence_breakers must be texts that are not empty; it is (1,)"),
])  # fmt: skip
def test_samplers_that_cannot_be_are_refused_by_name(reader, body, message):
    assert refused(reader, False, **body) == message


@pytest.mark.parametrize("name", ["dry_base", "draft_tokens"])
def test_a_refusal_repeats_no_long_value(reader, name):
    assert len(refused(reader, False, **{name: "9" * 10**6})) < 400


def test_parameters_are_of_one_kind():
    assert not WITHOUT_EFFECT & (SERVED | NEUTRAL.keys()) and not SERVED & NEUTRAL.keys()


def test_many_stop_strings(reader):
    stops = [f"</tag{n}>" for n in range(40)]
    assert reader.read({"prompt": "a", "stop": stops}, False).stops == stops
    assert reader.read({"prompt": "a", "stop": ["", "b", ""]}, False).stops == ["b"]
    assert reader.read({"prompt": "a", "stop": ""}, False).stops == []


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
