"""Every kind of refusal, in one table, as the official client reads it: status, parameter, words."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
from test_tool_calls import ASKED, NAMED, TOOLS, folder, running, tool  # noqa: E402, F401

COMPLETION = ("/completions", {"prompt": "a", "max_tokens": 1})
CHAT = ("/chat/completions", {"messages": ASKED, "max_tokens": 1})
RESPONSE = ("/responses", {"input": "a", "max_output_tokens": 1})
LEFT_OUT = object()  # a field that the request lacks
CALLED = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOLD = {"role": "tool", "tool_call_id": "a", "content": "x"}
CALLS = {"role": "assistant", "tool_calls": [CALLED]}
UNIQUE = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}


def of_schema(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# the endpoint, fields of the request; the parameter and the words of the refusal, with status 400
REFUSED = [
    (COMPLETION, {"prompt": LEFT_OUT}, "prompt", "prompt is missing"),
    (COMPLETION, {"prompt": []}, "prompt", "the prompt is empty"),
    *[(COMPLETION, {"prompt": bad}, "prompt", "prompt must be a text") for bad in ([1, "a"], {"a": 1}, [3.5])],
    (COMPLETION, {"prompt": [10**9]}, "prompt", "token ids must be in"),
    (COMPLETION, {"prompt": ["a"] * 16}, "n", "at most 15 answers"), (COMPLETION, {"n": 99}, "n", "at most 15 answers"),
    (COMPLETION, {"n": 0}, "n", "n should be greater than or equal to 1; it is 0"), (COMPLETION, {"n": "x"}, "n", 'valid integer; it is "x"'),
    (COMPLETION, {"max_tokens": 0}, "max_tokens", "max_tokens should be at least 1; it is 0"),
    (COMPLETION, {"max_tokens": -2}, "max_tokens", "greater than or equal to -1; it is -2"),
    (COMPLETION, {"max_tokens": 2**31}, "max_tokens", "less than or equal to 2147483647"),
    *[(COMPLETION, {name: bad}, name, f"{name} should be a valid boolean; it is {json.dumps(bad)}")
      for name, bad in (("draft", 0), ("stream", "yes"), ("trees", 1), ("do_sample", 1))],
    (COMPLETION, {"do_sample": True, "temperature": 0}, "do_sample", "needs a temperature above 0"),
    (COMPLETION, {"logprobs": 21}, "logprobs", "less than or equal to 20; it is 21"), (COMPLETION, {"logprobs": True}, "logprobs", "a valid integer"),
    (COMPLETION, {"seed": 1.5}, "seed", "seed should be a valid integer; it is 1.5"), (COMPLETION, {"seed": 2**64}, "seed", "less than or equal to"),
    *[(COMPLETION, {"temperature": bad}, "temperature", "temperature should be") for bad in (-1, "0.5", True, 10**400, 2.1)],
    (COMPLETION, {"top_p": 0}, "top_p", "top_p must be in (0, 1]; it is 0"), (COMPLETION, {"top_p": [1]}, "top_p", "must be a number"),
    (COMPLETION, {"min_p": 1.1}, "min_p", "min_p must be at most 1; it is 1.1"), (COMPLETION, {"top_k": 2.5}, "top_k", "valid integer"),
    (COMPLETION, {"top_k": -2}, "top_k", "greater than or equal to -1"), (COMPLETION, {"top_k": 2**31}, "top_k", "less than or equal"),
    (COMPLETION, {"stop": ["a"] * 257}, "stop", "at most 256 items"), (COMPLETION, {"stop": "a" * 257}, "stop", "at most 256 characters"),
    (COMPLETION, {"stop": [1]}, "stop", "stop.0 should be a valid string; it is 1"),
    (COMPLETION, {"stream_options": 1}, "stream_options", "valid dictionary"),
    (COMPLETION, {"stream_options": {"include_usage": 1}}, "stream_options", "stream_options.include_usage should be a valid boolean"),
    (COMPLETION, {"frequency_penalty": "0.5"}, "frequency_penalty", "frequency_penalty must be a number; it is '0.5'"),
    (COMPLETION, {"presence_penalty": 1e300}, "presence_penalty", "must be at most 100"), (COMPLETION, {"dry_base": 9}, "dry_base", "at most 4; it is 9"),
    (COMPLETION, {"repeat_last_n": 1.5}, "repeat_last_n", "must be a whole number; it is 1.5"),
    (COMPLETION, {"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty", "another name of repetition_penalty; give one"),
    (COMPLETION, {"typical_p": 0}, "typical_p", "typical_p must be in (0, 1]; it is 0"), (COMPLETION, {"min_tokens": -1}, "min_tokens", "at least 0"),
    *[(COMPLETION, {"logit_bias": bad}, "logit_bias", words) for bad, words in [
        ([[5, 1]], "must be an object"), ({"a": 1}, "'a' is no token id"), ({"5": 101}, "that of 5 is 101"), ({"5": True}, "that of 5 is True"),
        ({"999999": 1}, "one is 999999"), ({str(n): 1 for n in range(1025)}, "it names 1025")]],
    *[(COMPLETION, {"bad_words": bad}, "bad_words", words) for bad, words in [
        ([1], "must be texts"), (["a"] * 65, "may have 64 texts, not 65"), (["ab" * 99], "has 99 tokens; 16 are the most")]],
    (COMPLETION, {"allowed_token_ids": ["a"]}, "allowed_token_ids", "must be token ids"),
    (COMPLETION, {"allowed_token_ids": [281], "bad_words": ["self"]}, "allowed_token_ids", "leave one out"),
    (COMPLETION, {"dry_sequence_breakers": [1]}, "dry_sequence_breakers", "must be texts"),
    (COMPLETION, {"prompt": ["a", "b"], "draft_tokens": [0]}, "draft_tokens", "there are 2 prompts; give one for each"),
    *[(COMPLETION, {"draft_tokens": bad}, "draft_tokens", "draft_tokens") for bad in (-1, True, "chain:4", "9" * 10**4)],
    (COMPLETION, {"draft": False, "draft_tokens": 4}, "draft", "leave draft_tokens out"),
    *[(COMPLETION, {name: bad}, name, f"{name} = {json.dumps(bad)} is not served; leave it out") for name, bad in [
        ("suffix", "a"), ("echo", True), ("ignore_eos", True), ("guided_json", {"type": "object"}), ("mirostat", 2), ("n_probs", 5), ("functions", [1])]],
    *[(COMPLETION, {"response_format": bad}, "response_format", words) for bad, words in [
        (of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"), (of_schema({"enum": []}), "anyOf is empty"),
        (of_schema([]), "json_schema with its schema"), ({"type": "json_schema"}, "json_schema with its schema"),
        ({"type": "xml"}, "must be of type"), ("json", "must be of type"), ({"type": "text", "schema": {}}, "has no schema; leave that out")]],
    *[(CHAT, {"messages": bad}, "messages", words) for bad, words in [
        ([], "at least 1 item"), ("hi", "a valid list"), ([{"role": "user"}], "needs a text as its content"), ([1], "messages.0 should be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type image_url is not served; send text alone"),
        ([{"role": "assistant", "content": "a"}], "no message before the assistant's"), ([{"role": "judge", "content": "x"}], "'system', 'developer'"),
        ([*ASKED, TOLD], "the tool_call_id of a call before it"), ([*ASKED, CALLS | {"tool_calls": [1]}], "messages.1.tool_calls.0 should be"),
        ([CALLS | {"role": "user", "content": "a"}], "belong to an assistant message"),
        ([*ASKED, CALLS | {"tool_calls": [CALLED | {"function": {"name": "now", "arguments": "{"}}]}], "arguments should be a JSON object"),
        ([*ASKED, CALLS | {"tool_calls": [CALLED | {"id": LEFT_OUT}]}], "tool_calls.0.id is missing")]],
    (CHAT, {"logprobs": 1}, "logprobs", "a valid boolean"), (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    (CHAT, {"reasoning_effort": 3}, "reasoning_effort", "a valid string"), (CHAT, {"think": "no"}, "think", "a valid boolean"),
    (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs", "a valid dictionary"),
    *[(CHAT, {"chat_template_kwargs": {name: 1}}, "chat_template_kwargs", f"cannot set {name}; leave that out") for name in ("messages", "tools", "self")],
    (CHAT, {"continue_final_message": True}, "continue_final_message", "is the last one, and only there"),
    (CHAT, {"messages": [*ASKED, {"role": "assistant", "content": "a"}], "continue_final_message": False}, "continue_final_message", "must be true"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt", "must be true here"),
    *[(CHAT, {"tools": bad}, "tools", words) for bad, words in [
        (1, "a valid list"), ([1], "each of the tools must be an object"),
        ([tool("a b")], "tools.0.function.name"), ([tool("now")] * 2, "the same name"), ([tool("a", parameters={"type": "array"})], "a JSON schema of type object")]],
    *[(CHAT, {"tools": TOOLS, "tool_choice": bad}, "tools", words) for bad, words in [
        ("any", "tool_choice must be one of"), ({"type": "function"}, "must be one of"), (NAMED | {"function": {"name": "x"}}, "must name one of")]],
    (CHAT, {"tool_choice": "required"}, "tools", "needs tools"), (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls", "a valid boolean"),
    (CHAT, {"tools": [tool("a", parameters=UNIQUE)], "tool_choice": "required"}, "tools", "uniqueItems"),
    (CHAT, {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "cannot go with tools"),
    *[(RESPONSE, fields, "input", words) for fields, words in [
        ({"input": LEFT_OUT}, "input must be"), ({"input": []}, "a list of at least one"), ({"input": 7}, "input must be"),
        ({"previous_response_id": "r"}, "not stored here"), ({"background": True}, "background = true is not served"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "not stored here"), ({"input": [{"type": "computer_call"}]}, "nothing that is served: computer_call")]],
    (RESPONSE, {"n": 2}, "n", "leave n out"), (RESPONSE, {"tools": 4}, "tools", "a valid list"), (RESPONSE, {"text": 3}, "text", "must be an object"),
    (RESPONSE, {"input": [{"role": "assistant"}]}, "messages", "no message before"),
    (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages", "a part of type input_image is not served"),
    (RESPONSE, {"tool_choice": "required"}, "tools", "needs tools"),
]  # fmt: skip


def without(value: object) -> object:
    """A request without the fields that it lacks."""
    if isinstance(value, dict):
        return {name: without(held) for name, held in value.items() if held is not LEFT_OUT}
    return [without(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_request_is_refused(running, number):  # noqa: F811
    """In one line, with the parameter; no long value is repeated."""
    (path, body), fields, param, words = REFUSED[number]
    with pytest.raises(openai.BadRequestError) as refused:
        running.client.post(path, body=without(body | fields), cast_to=object)
    error = refused.value
    assert error.param == param and words in error.body["message"], error.body
    assert error.type == "invalid_request_error" and "--" not in error.body["message"]
    assert "\n" not in error.body["message"] and len(error.body["message"]) < 500


@pytest.mark.parametrize("data, status, words", [
    (b"", 400, "is not JSON"), (b"{", 400, "is not JSON"), (b"\xff", 400, "is not JSON"), (b"[1]", 400, "a JSON object"), (b"5", 400, "a JSON object"),
    (b"[" * 9000, 400, "is not JSON"), (b'{"prompt": NaN}', 400, "NaN is no number"), (b" " * 30000, 413, "more than 20000 bytes"),
    (b" " * 3_000_000, 413, "more than 20000 bytes"), (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature should be"),
    (rb'{"prompt": "\udfff"}', 400, "half a character"), (rb'{"prompt": "a", "\ud800": 1}', 400, "half a character"),
    (b'{"model": "gpt-4"}', 404, "there is no model 'gpt-4' here; this is demo"), (b'{"model": "%s"}' % (b"x" * 9000), 404, f"model '{'x' * 99} here"),
])  # fmt: skip
def test_data_that_is_no_request(running, data, status, words):  # noqa: F811
    for path in ("/v1/completions", "/v1/chat/completions"):
        got, found = running.raw(data, path)
        assert got == status and words in found["error"]["message"], found
        assert set(found["error"]) == {"message", "type", "param", "code"}


def test_other_paths_methods_and_kinds(running):  # noqa: F811
    assert running.raw(b"", "/v2")[0] == running.raw(b"", "/v1/models/x", "GET")[0] == 404
    status, found = running.raw(b"", method="GET")
    assert status == 405 and found["error"]["message"].startswith("GET /v1/completions")
    assert running.raw(b'{"prompt": "a"}', kind="text/plain")[0] == 415


def test_a_prompt_beyond_the_context_is_told_as_others_tell_it(running):  # noqa: F811
    """The code of OpenAI, by which langchain knows it, and vLLM's words, by which litellm does."""
    long = "a b " * 2500
    messages = [{"role": "user", "content": long}]
    for (path, _), body in ((COMPLETION, {"prompt": long}), (COMPLETION, {"prompt": [3] * 5000}), (CHAT, {"messages": messages, "stream": True})):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
            running.client.post(path, body=body, cast_to=object)
        assert error.value.code == "context_length_exceeded" and "--" not in str(error.value)
