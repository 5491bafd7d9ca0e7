"""Requests that are read or refused, a row each; prompts are those of transformers.

Tables: prompts of templates, parameters of answers, what agents and clients send, and refusals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece as spm

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
import transformers  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers import models  # noqa: E402

from drafts.grammar import Grammar  # noqa: E402
from run.generate import encode  # noqa: E402
from run.load import load  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
from served import CHAT, COMPLETION, Running, demo_with, of_schema, rows  # noqa: E402
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
{%- if m.role == 'tool' and 'bad' in m.content %}{{ raise_exception('no such words') }}{% endif %}
{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant] {{ reasoning_effort | default('') }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
USER = {"role": "user", "content": "What time is it?"}
NOW = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
LEAST = {Completion: {"prompt": "a"}, Chat: {"messages": [USER]}, Responses: {"input": "a"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return demo_with(tmp_path_factory.mktemp("template"), TEMPLATE)


@pytest.fixture(scope="module")
def running(folder):
    running = Running("--checkpoint", str(folder), "--chat")
    yield running
    running.close()


@pytest.fixture(scope="module")
def reader(running) -> RequestReader:
    """A reader whose own options are those that nobody has named."""
    config = replace(running.server.config, temperature=0.0, max_new_tokens=2048)
    return RequestReader(running.engine, config, "demo")


def prompt(reader, messages, **body) -> list[int]:
    return reader.read(Chat, {"messages": messages, **body}).prompts[0]


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
    ({"messages": [USER, NOON | {"content": None, "refusal": "Noon."}, USER]}, [USER, NOON | {"content": "Noon.", "refusal": "Noon."}, USER], {}),
    # the call of a custom tool
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "now", "input": "a"}}]}, RESULT]},
     [USER, calls({"input": "a"}), RESULT | {"name": "now"}], {}),
    ({"messages": [USER, OFFICIAL, USER]}, [USER, NOON, USER], {}), ({"messages": [USER, SUN, USER]}, [USER, SUN | {"content": ""}, USER], {}),
    *[({"messages": [USER, NOON | {"tool_calls": none}, USER]}, [USER, NOON, USER], {}) for none in ([], None)],
    # calls without arguments
    *[({"messages": [USER, calls(arguments) | {"content": None}, RESULT], "tools": [NOW]}, [USER, calls({}), RESULT | {"name": "now"}], {"tools": [NOW]})
      for arguments in ("", " \n", "{}", "null", "[]", None, {}, ...)],
]  # fmt: skip


@rows("body, messages, variables", PROMPTS)
def test_a_prompt_is_what_transformers_renders(reader, body, messages, variables):
    backend = transformers.PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()))
    options = {"chat_template": TEMPLATE, "add_generation_prompt": True, "tokenize": False}
    text = backend.apply_chat_template(messages, **options, **variables)
    assert prompt(reader, **body) == reader.engine.tokenizer.encode(text, bos=False, special=True)
    if messages is FIELDS:
        assert all(said in text for said in ("(Ann)", "<think>The sun.", "x2")), "fields are seen"


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
        with pytest.raises(Refusal, match="maximum context length"):
            prompt(reader, [*turns, long], **body)
    ids = [3 + i % 90 for i in range(reader.engine.context + 50)]
    found = reader.read(Completion, {"prompt": ids, "truncation": "auto", "max_tokens": 10})
    assert found.dropped == 60 and found.prompts == [ids[60:]]


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
    ({"logprobs": 0, "prompt": "def"}, {"prompts": [[1, 329]]}),
    # bounds that may be reached
    ({"n": 15, "temperature": 2, "logprobs": 20, "top_k": 2**31 - 1, "seed": 2**64 - 1, "max_tokens": 1}, {"most": 1}),
    ({"stop": ["a" * 256] * 256, "seed": -(2**63), "draft_tokens": 0}, {"draft_limits": [0]}),
]  # fmt: skip


@rows("body, want", READ)
def test_parameters_by_the_names_of_openai_vllm_and_llama_cpp(reader, body, want):
    """Those that are missing are the server's own."""
    found = reader.read(Completion, {"prompt": "def"} | body)
    assert {name: getattr(found, name) for name in want} == want
    penalised = RequestReader(reader.engine, replace(reader.config, repetition_penalty=1.3), "demo")
    sampling = penalised.read(Completion, {"prompt": "def"} | body).sampling
    named = {"repetition_penalty", "repeat_penalty"} & body.keys()
    assert sampling == (
        found.sampling if named else found.sampling._replace(repetition_penalty=1.3)
    )


@pytest.mark.parametrize("kind", LEAST)
def test_other_parameters_are_ignored_and_told_once(reader, kind, capsys):
    """Whatever their value, as they change nothing."""
    source = LEAST[kind] | {"seed": 1}
    others = {"user": "u", "store": True, f"{kind.__name__}\n": {"a": [1]}, "cache_prompt": False}
    for _ in range(2):
        assert reader.read(kind, source | others)[1:] == reader.read(kind, source)[1:]
    told = f"note: ignored in requests: {kind.__name__}\\n, cache_prompt, store, user\n"
    assert capsys.readouterr().err == told


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


@rows("kind, fields, told", REQUESTS)
def test_what_agents_and_clients_send(reader, kind, fields, told, capsys):
    reader.told.clear()
    reader.read(kind, fields)
    err = [line for line in capsys.readouterr().err.splitlines() if "ignored in requests" in line]
    assert err == ([f"note: ignored in requests: {told}"] if told else [])


# -------------------------------------------------------------------------------------- refusals

TOLD = {"role": "tool", "tool_call_id": "c1", "content": "x"}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
UNIQUE = {"type": "array", "uniqueItems": True}
ALONE = {"role": "assistant", "content": "a"}


def typed(form: str, **more: Any) -> dict:
    return {"response_format": {"type": form, **more}}


# by field, values that it may not have: the message names the field, and shows the value or what may be there
VALUES: dict[type, dict[str, list]] = {
    Completion: {
        "prompt": [[], [1, "a"], {"a": 1}, [3.5], [10**9]], "n": [0, 99, "x"], "max_tokens": [0, -2, 2**31], "logprobs": [21, True],
        "draft": [0], "stream": ["yes"], "trees": [1], "do_sample": [1], "seed": [1.5, 2**64, -(2**63) - 1], "temperature": [-1, "0.5", True, 10**400, 2.1],
        "top_p": [0, [1]], "min_p": [1.1], "top_k": [2.5, -2, 2**31], "stop": [["a"] * 257, "a" * 257, [1]], "stream_options": [1, {"include_usage": 1}],
        "frequency_penalty": ["0.5"], "presence_penalty": [1e300], "dry_base": [9], "repeat_last_n": [1.5], "typical_p": [0], "min_tokens": [-1],
        "logit_bias": [[[5, 1]], {"a": 1}, {"5": 101}, {"5": True}, {"999999": 1}, {str(n): 1 for n in range(1025)}],
        "bad_words": [[1], ["a"] * 65, ["ab" * 99]], "allowed_token_ids": [["a"]], "dry_sequence_breakers": [[1]], "draft_tokens": [-1, True, "chain:4", "9" * 10**4],
        **{name: [value] for name, value in [("suffix", "a"), ("echo", True), ("ignore_eos", True), ("guided_json", {"a": 1}), ("mirostat", 2), ("n_probs", 5), ("functions", [1])]},
        "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}, of_schema([])], "truncation": ["oldest"],
    },
    Chat: {
        "messages": [[], "hi", [{"role": "user"}], [1], [{"role": "judge", "content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}],
                     [USER, CALLS | {"tool_calls": [1]}], [CALLS | {"role": "user", "content": "a"}], [USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "now", "arguments": "{"}}]}],
                     [USER, CALLS | {"tool_calls": [{"function": CALL["function"]}]}]],
        "logprobs": [1], "top_logprobs": [2, 21], "reasoning_effort": [3], "think": ["no"], "parallel_tool_calls": [1],
        "chat_template_kwargs": [[1], {"messages": 1}, {"tools": 1}, {"self": 1}], "continue_final_message": [True], "add_generation_prompt": [False],
        "tools": [1, [1], [{"function": {"name": "a b"}}], [{"function": {"name": "m" * 129}}], [TOOL] * 2, [{"function": {"name": "a", "parameters": {"type": "array"}}}]],
    },
    Responses: {"n": [2], "tools": [4], "text": [3], "input": [[], 7, [{"type": "computer_call"}]]},
}  # fmt: skip
# the kind, the fields; the parameter, the words of the rule and the remedy
REFUSED = [
    (Completion, {"prompt": None}, "prompt", "prompt is missing"), (Completion, {"prompt": []}, "prompt", "the prompt is empty"),
    (Completion, {"prompt": ["a"] * 16}, "n", "at most 15 answers .* 16 are asked for; lower n, or send fewer prompts"),
    (Completion, {"n": 0}, "n", "n should be greater than or equal to 1; it is 0"), (Completion, {"max_tokens": 0}, "max_tokens", "should be at least 1; it is 0"),
    (Completion, {"do_sample": True, "temperature": 0}, "do_sample", "needs a temperature above 0; raise it, or leave"),
    (Completion, {"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty", "another name of repetition_penalty; give one"),
    (Completion, {"allowed_token_ids": [281], "bad_words": ["self"]}, "allowed_token_ids", "leave one out"),
    (Completion, {"prompt": ["a", "b"], "draft_tokens": [0]}, "draft_tokens", "there are 2 prompts; give one for each"),
    (Completion, {"draft": False, "draft_tokens": 4}, "draft", "leave draft_tokens out"),
    (Completion, {"echo": True}, "echo", "echo = true is not served; leave it out"),
    *[(Completion, typed(form, **{name: {}}), "response_format", f"of type {form} has no {name}; leave that out")
      for form, name in (("json_object", "json_schema"), ("text", "schema"), ("json_schema", "schema"))],
    (Completion, typed("json_object", schema="a"), "response_format", "must be of type text"),
    (Completion, {"response_format": of_schema(UNIQUE)}, "response_format", "uniqueItems"), (Completion, {"response_format": of_schema({"enum": []})}, "response_format", "anyOf is empty"),
    (Chat, {"messages": [ALONE]}, "messages", "no message before the assistant's; send the user's, too"), (Chat, {"messages": [USER, TOLD]}, "messages", "the tool_call_id of a call before it"),
    (Chat, {"messages": [USER, ALONE], "continue_final_message": False}, "continue_final_message", "must be true"),
    (Chat, {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "cannot set tools; leave that out"),
    *[(Chat, {"tools": [TOOL], "tool_choice": bad}, "tools", words) for bad, words in [
        ("any", "must be one of"), ({"type": "function"}, "must be one of"), ({"type": "function", "function": {"name": "x"}}, "must name one of"), ({"type": "allowed_tools"}, "needs a list of tools")]],
    (Chat, {"tool_choice": "required"}, "tools", "needs tools; give them, or leave it out"), (Responses, {"tool_choice": "required"}, "tools", "needs tools"),
    (Chat, {"tools": [{"function": {"name": "a", "parameters": {"type": "object", "properties": {"x": UNIQUE}}}}], "tool_choice": "required"}, "tools", "uniqueItems"),
    (Chat, {"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format", "cannot go with tools; leave one out"),
    (Chat, {"messages": [USER, calls({}), TOLD | {"content": "bad"}]}, "messages", "no such words"),
    *[(Responses, fields, "input", words) for fields, words in [
        ({"input": None}, "input must be a text"), ({"previous_response_id": "r"}, "not stored here; send"), ({"conversation": "r"}, "not stored here"), ({"background": True}, "is not served"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "items are not stored here; send them as they came")]],
    (Responses, {"input": [{"role": "assistant"}]}, "messages", "no message before"),
    (Responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages", "a part of type input_image is not served; send text alone"),
]  # fmt: skip
WRONG = [(kind, {name: value}, name, name) for kind, named in VALUES.items() for name, values in named.items() for value in values]  # fmt: skip


@rows("kind, fields, param, words", REFUSED + WRONG)
def test_a_request_is_refused(reader, kind, fields, param, words):
    """In one line, with the parameter; no long value is repeated, and no option or file named."""
    body = {name: value for name, value in (LEAST[kind] | fields).items() if value is not None}
    with pytest.raises(Refusal, match=words) as refused:
        reader.read(kind, body)
    error = refused.value.body["error"]
    assert (refused.value.status, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error" and "--" not in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 500
    assert reader.config.checkpoint not in error["message"]


@pytest.mark.parametrize("chat, fields", [
    ("none", {}), ("mistral", {"messages": [{"role": "system", "content": "bad"}, USER]}), ("mistral", {"tools": [NOW]}),
    ("mistral", {"messages": [USER, calls({}), RESULT]}),
], ids=str)  # fmt: skip
def test_a_template_that_takes_less_names_no_option(running, chat, fields):
    """No template, a named one without tools or a system's message."""
    config = replace(running.server.config, chat=chat, checkpoint=DEMO)
    own = RequestReader(load(config), config, "demo")
    with pytest.raises(Refusal) as refused:
        own.read(Chat, {"messages": [USER]} | fields)
    assert DEMO not in str(refused.value) and "--" not in str(refused.value)


def test_the_official_client_reads_a_refusal(running):
    """Its kind, its parameter and its code, by which langchain and litellm know a long prompt."""
    with pytest.raises(openai.BadRequestError, match="n should be greater .* it is 0") as refused:
        running.ask(n=0)
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    long = {"messages": [{"role": "user", "content": "a b " * 2500}], "stream": True}
    for kind, body in ((COMPLETION, {"prompt": [3] * 5000}), (CHAT, long)):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            running.client.post(kind, body=body, cast_to=object)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("data, status, words", [
    (b"", 400, "is not JSON"), (b"{", 400, "is not JSON"), (b"\xff", 400, "is not JSON"), (b"[1]", 400, "a JSON object"), (b"5", 400, "a JSON object"),
    (b"[" * 9000, 400, "is not JSON"), (b'{"prompt": NaN}', 400, "NaN is no number"), (b" " * 20001, 413, "more than 20000 bytes"), (b" " * 20000, 400, "is not JSON"),
    (b" " * 3_000_000, 413, "more than 20000 bytes"), (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature should be"),
    (rb'{"prompt": "\udfff"}', 400, "half a character"), (rb'{"prompt": "a", "\ud800": 1}', 400, "half a character"),
    (b'{"model": "gpt-4"}', 404, "there is no model 'gpt-4' here; this is demo"), (b'{"model": "%s"}' % (b"x" * 9000), 404, f"model '{'x' * 99} here"),
])  # fmt: skip
def test_data_that_is_no_request(running, data, status, words):
    for kind in (COMPLETION, CHAT):
        got, found = running.raw(data, f"/v1{kind}")
        assert got == status and words in found["error"]["message"], found
        assert set(found["error"]) == {"message", "type", "param", "code"}


def test_other_paths_methods_and_kinds(running):
    assert running.raw(b"", "/v2")[0] == running.raw(b"", "/v1/models/x", "GET")[0] == 404
    status, found = running.raw(b"", method="GET")
    assert status == 405 and found["error"]["message"].startswith("GET /v1/completions")
    assert running.raw(b'{"prompt": "a"}', kind="text/plain")[0] == 415


# ------------------------------------------------------------------------------------- JSON schemas

NAMES = {"format": {"enum": [{"format": "y"}]}}  # "format" as a name, and in a value
SCHEMAS = [  # a schema, a value that it allows, one that it does not, what the note names
    ({"properties": {"a": {"format": "color"}}, "required": ["a"]}, {"a": "red"}, {"b": 1}, "Unknown format: color"),
    ({"properties": {"a": {"format": "date"}}, "required": ["a"]}, {"a": "2026-11-26"}, {"a": "today"}, ""),
    ({"additionalProperties": {"type": "number"}, "propertyNames": {"type": "string"}}, {"a": 1, "b": 2}, {"a": "x"}, ...),
    ({"properties": {"format": {"$ref": "#/$defs/format"}}, "$defs": NAMES, "required": ["format"]}, {"format": {"format": "y"}}, {"format": "y"}, ""),
]  # fmt: skip


@rows("rules, value, other, told", SCHEMAS)
def test_what_a_schema_asks_beyond_the_library_is_ignored(
    rules, value, other, told, capsys, reader
):
    """And named in a line of the log; the rest is enforced, as a schema or within json_object."""
    schema = {"type": "object", "additionalProperties": False, **rules}
    jsonschema.validate(value, schema)
    guide = reader.read(Completion, {"prompt": "a"} | typed("json_object", schema=schema)).guide
    matcher = Grammar(reader.engine, schema).matcher
    err = capsys.readouterr().err
    assert told is ... or (told in err and (err != "") == (told != ""))
    tokenizer = reader.engine.tokenizer
    ids = tokenizer.encode(json.dumps(value), bos=False)
    wrong = tokenizer.encode(json.dumps(other), bos=False)
    for own in (matcher, guide.matcher):
        assert own.deep_copy().try_consume_tokens(ids) == len(ids)
        assert own.deep_copy().try_consume_tokens(wrong) < len(wrong)


# ------------------------------------------------------------------------------------------ defaults

NUCLEUS = {"temperature": 0.6, "top_p": 0.95}
RECOMMENDED = [  # generation_config.json, or the metadata of GGUF; what the command names; the sampling
    ({}, {}, Sampling()), ({"do_sample": True}, {}, Sampling(1.0)), ({"top_k": 20}, {}, Sampling(1.0, top_k=20)),
    ({"repetition_penalty": 1.1}, {}, Sampling(repetition_penalty=1.1)),
    ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {}, Sampling(repetition_penalty=1.1)),
    (NUCLEUS, {}, Sampling(**NUCLEUS)), (NUCLEUS, {"temperature": 0.8}, Sampling(0.8, top_p=0.95)), (NUCLEUS, {"temperature": 0.0}, Sampling()),
    ({"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}, {}, Sampling(0.7, top_k=20, repetition_penalty=1.1)),
    ({"top_p": 7}, {}, "names a sampling that cannot be used: --top_p must be"),
]  # fmt: skip


@pytest.mark.parametrize("named, given, want", RECOMMENDED, ids=str)
def test_the_sampling_that_a_model_recommends(tmp_path, monkeypatch, named, given, want):
    """It is a request's, where neither the request nor the server's command names another."""
    folder = demo_with(tmp_path, TEMPLATE)
    if "general.sampling.temp" in named:
        header = SimpleNamespace(metadata=named)
        monkeypatch.setattr("server.recommended.is_gguf", lambda path: True)
        monkeypatch.setattr("server.recommended.read_header", lambda path: header)
    elif named:
        (folder / "generation_config.json").write_text(json.dumps({"top_k": None} | named))
    config = ServeConfig(checkpoint=str(folder), **given)
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            with_recommended_sampling(config, {*given})
    else:
        assert with_recommended_sampling(config, {*given}).sampling == want
