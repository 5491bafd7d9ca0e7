"""The server, driven by the official client: a row a request, answered as `generate` answers its prompt.

1. Whole, streamed, beside others, as a response and with other drafts, an answer is one and the same.
2. Keys, hosts, origins, addresses, clients that leave, and the server's end.
Forms of calls and thinking are in test_replies.py, refusals in test_requests.py.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
from starlette.testclient import TestClient  # noqa: E402

from drafts.grammar import Grammar  # noqa: E402
from helpers import fresh, slow  # noqa: E402
from run.library import generate  # noqa: E402
from run.load import load  # noqa: E402
from run.options import DEMO, ROOT, Sampling  # noqa: E402
from run.parsing import parse_given  # noqa: E402
from sampling import SamplingMode  # noqa: E402
from served import (  # noqa: E402
    ARGV,
    ASKED,
    CHAT,
    COMPLETION,
    NAMED,
    PROMPT,
    RESPONSE,
    TOOLS,
    WEATHER,
    Running,
    demo_with,
    of_schema,
    rows,
    template_of,
    wait_for,
)
from server import app as serve  # noqa: E402
from server import parameters, transport  # noqa: E402
from server.call_forms import form_of  # noqa: E402
from server.tool_calls import Tools  # noqa: E402

SERVE = str(ROOT / "scripts" / "serve.py")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server whose chat template knows tools."""
    folder = demo_with(tmp_path_factory.mktemp("served"), template_of("qwen2.5"))
    running = Running("--checkpoint", str(folder), "--chat")
    yield running
    running.close()


# ------------------------------------------------------------------------------------ the rows


class Row(NamedTuple):
    """A request, and the rest that `generate` needs to answer it."""

    name: str
    kind: str
    body: dict = {}
    taken: list[dict] | None = None  # the messages as the template takes them; None: as they are
    grammar: Any = None  # that the answer follows
    begun: str = ""  # the end of the prompt behind the template


TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
IN_PARTS = [*TURNS[:3], {"role": "user", "content": [{"type": "text", "text": "Bye"}]}]
SUN = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
ARGUMENTS = {"city": {"name": "Rome"}, "days": 2}


def calling(arguments: Any) -> dict:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": [1, 20, 300]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
RULES = [
    {}, {"temperature": 0}, {"temperature": 0.5}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02}, {"top_k": 10**6, "min_p": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logit_bias": {"10": 4}, "typical_p": 0.9, "dry_multiplier": 0.8},
]  # fmt: skip
TWO = [PROMPT, "import "]
ROWS = [
    *[Row(f"{kind} {rule}", kind, rule) for rule in RULES for kind in (COMPLETION, CHAT)],
    Row("a large seed", COMPLETION, {"seed": 2**40 + 3}),
    Row("prompts and choices", COMPLETION, {"prompt": TWO, "n": 2}),
    Row("equal choices", COMPLETION, {"prompt": TWO, "n": 3, "temperature": 0}),
    Row("token ids", COMPLETION, {"prompt": [[5, 17, 300], [40]]}),
    Row("stop strings", COMPLETION, {"stop": ["e", "zz"], "max_tokens": 60, "n": 2}),
    Row("a schema", COMPLETION, {"response_format": of_schema(SCHEMA), "max_tokens": 60}, grammar=SCHEMA),
    Row("an array", COMPLETION, {"response_format": of_schema(LIST), "max_tokens": 60}, grammar=LIST),
    Row("any object", CHAT, {"response_format": {"type": "json_object"}}, grammar={"type": "object"}),
    Row("a schema in a chat", CHAT, {"response_format": of_schema(SCHEMA), "max_tokens": 60, "n": 3}, grammar=SCHEMA),
    Row("text", CHAT, {"response_format": {"type": "text"}}),
    Row("turns", CHAT, {"messages": IN_PARTS, "max_tokens": None, "max_completion_tokens": 20}, TURNS),
    Row("a begun answer", CHAT, {"messages": [*ASKED, {"role": "assistant", "content": "def f("}], "continue_final_message": True}, ASKED, begun="def f("),
    Row("tools", CHAT, {"tools": TOOLS}), Row("no tools", CHAT, {"tools": []}),
    Row("tools that are not to be called", CHAT, {"tools": TOOLS, "tool_choice": "none"}),
    Row("behind a call", CHAT, {"messages": [*ASKED, calling(json.dumps(ARGUMENTS)), SUN], "tools": TOOLS}, [*ASKED, calling(ARGUMENTS), SUN | {"name": "weather"}]),
    Row("a forced call", CHAT, {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 80, "n": 2}, grammar="weather", begun="<tool_call>\n"),
    Row("a call that is cut", CHAT, {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 6}, grammar="weather", begun="<tool_call>\n"),
]  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
EVERY = pytest.mark.parametrize("row", ROWS, ids=[*BY_NAME])


@cache
def wanted(running, name: str) -> Any:
    """The result of `generate` for the row of a name, in buffers that hold nothing."""
    row = BY_NAME[name]
    body = {"seed": 3, "max_tokens": 24} | row.body
    engine = replace(fresh(running.engine), config=replace(running.engine.config, batch_size=1))
    grammar = row.grammar
    if grammar == "weather":
        form = form_of(engine.template, engine.tokenizer)
        grammar = Tools(TOOLS, {"weather": WEATHER}, ["weather"], True, form).grammar()
    if row.kind == COMPLETION:
        prompts = body.get("prompt", [PROMPT])
    else:
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        messages = row.taken or body.get("messages", ASKED)
        text = engine.template.render_messages(messages, tools) + row.begun
        prompts = [engine.tokenizer.encode(text, bos=False, special=True)]
    options = {name: body[name] for name in body.keys() & {*Sampling._fields, "seed", "stop"}}
    most = body["max_tokens"] or body["max_completion_tokens"]
    options |= {"max_new_tokens": most, "num_samples": body.get("n", 1)}
    return generate(replace(engine, template=None), prompts, grammar=grammar, **options)


def said(answer: Any) -> list[tuple[str, str]]:
    """The text of each choice, or its call, and why it ended."""
    found = []
    for choice in answer.choices:
        text = choice.text if answer.object == "text_completion" else choice.message.content
        if choice.finish_reason == "tool_calls":
            (call,) = choice.message.tool_calls
            assert text is None and call.function.name == "weather" and call.type == "function"
            text = call.function.arguments
        found.append((text, choice.finish_reason))
    return found


def generated(row: Row, result: Any) -> list[tuple[str, str]]:
    """The same of a result of `generate`."""
    found = []
    for text, reason in zip(result.text, result.finish_reason):
        if row.grammar == "weather" and reason == "stop":
            text = json.dumps(json.loads(text)["arguments"])
            reason = "tool_calls"
        found.append((text, reason))
    return found


def in_parts(events: list, index: int) -> tuple[str, str]:
    """One choice of a stream, put together: its text, or its call, and why it ended."""
    text = ""
    reason = None
    for choice in [choice for event in events for choice in event.choices if choice.index == index]:
        part = choice if hasattr(choice, "text") else choice.delta
        new = part.text if hasattr(choice, "text") else part.content or ""
        for call in getattr(part, "tool_calls", None) or ():
            assert call.index == 0 and call.id and call.function.name == "weather"
            new += call.function.arguments
        drafted = getattr(choice, "drafted", None)
        if drafted and "spans" in drafted:
            assert sum(count for _, count in drafted["spans"]) == len(new)
            assert {source for source, _ in drafted["spans"]} <= {"", "head", "lookup"}
        text += new
        reason = choice.finish_reason or reason
    return text, reason


@EVERY
def test_an_answer_is_what_generate_makes_of_it(running, row):
    """Whole, and in parts: these say what was drafted, and their sums are those of the usage."""
    result = wanted(running, row.name)
    want = generated(row, result)
    answer = running.ask(row.kind, **row.body)
    assert said(answer) == want and answer.model == "demo"
    assert [choice.index for choice in answer.choices] == [*range(len(want))]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = running.ask(row.kind, **more, **row.body)
    assert [in_parts(events, i) for i in range(len(want))] == want
    for usage in (answer.usage, last.usage):
        assert usage.prompt_tokens == sum(result.prompt_tokens[:: row.body.get("n", 1)])
        assert usage.completion_tokens == sum(map(len, result.tokens))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert not last.choices and events[0].usage is None and len(events) >= 2
    assert len({(event.id, event.seed) for event in events}) == 1
    choices = [choice for event in events for choice in event.choices]
    assert row.kind == COMPLETION or choices[0].delta.role == "assistant"
    told = [choice.drafted for choice in choices if hasattr(choice, "drafted")]
    details = last.usage.completion_tokens_details
    assert sum(drafted["tokens"] for drafted in told) == last.usage.completion_tokens
    assert sum(drafted["accepted"] for drafted in told) == details.accepted_prediction_tokens
    assert sum(drafted["rejected"] for drafted in told) == details.rejected_prediction_tokens
    schema = WEATHER if row.grammar == "weather" else row.grammar
    for text, reason in want:
        if schema and reason != "length":
            jsonschema.validate(json.loads(text), schema)


BROKEN = (b"{", b"[1]", b'{"prompt": 1}', b'{"prompt": "a", "n": "x"}', b"\xff")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GROWTH = 16  # MiB that this process may grow by after a quarter of many requests


def memory() -> float:
    """The resident memory of this process, in which the server runs (MiB)."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def is_served(running, number: int, want: dict[str, list]) -> bool:
    """Send a row, or break off as some clients do. Returns: whether the answer is as it must be"""
    row = ROWS[number % len(ROWS)]
    round = number // len(ROWS)
    if round % 5 == 0:
        return said(running.ask(row.kind, **row.body)) == want[row.name]
    if round % 5 == 1:
        events = [*running.ask(row.kind, stream=True, **row.body)]
        return [in_parts(events, i) for i in range(len(want[row.name]))] == want[row.name]
    if round % 5 == 2:  # leaves behind the first event
        with running.ask(row.kind, stream=True, **row.body | {"max_tokens": 400}) as events:
            return next(iter(events)).model == "demo"
    if round % 5 == 3:
        return running.raw(BROKEN[number % len(BROKEN)])[0] == 400
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")  # leaves in a body
    return True


@pytest.mark.parametrize("rounds", [1, *slow([25, 250])])  # thousands of requests take minutes
def test_many_clients_at_once(running, rounds):
    """Each gets the answer that it gets alone, beside clients that leave or send no JSON; memory stays flat."""
    want = {row.name: generated(row, wanted(running, row.name)) for row in ROWS}
    sizes = []
    with ThreadPoolExecutor(3) as pool:
        for part in range(rounds):
            numbers = range(part * len(ROWS), (part + 1) * len(ROWS))
            found = list(pool.map(lambda number: is_served(running, number, want), numbers))
            assert all(found), (part, [ROWS[i].name for i, fits in enumerate(found) if not fits])
            sizes.append(memory())
    assert rounds == 1 or sizes[-1] - sizes[rounds // 4] < GROWTH, sizes


FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
INPUT = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": json.dumps(ARGUMENTS)}  # fmt: skip
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
RESPONSES = [  # the fields of a response, those of the same chat
    ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, *ASKED]}),
    ({"input": INPUT, "temperature": 0.7}, {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.7}),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"text": FORMAT, "max_output_tokens": 60}, {"response_format": of_schema(SCHEMA), "max_tokens": 60}),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 80}, {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 80}),
    ({"input": [*ASKED, CALL, RESULT], "tools": FLAT}, {"messages": [*ASKED, calling(json.dumps(ARGUMENTS)), SUN], "tools": TOOLS}),
]  # fmt: skip


@rows("fields, chat", RESPONSES)
def test_a_response_is_the_chats_answer(running, fields, chat):
    """Whole, and as its last event has it; the client puts the items of the others together."""
    want = running.ask(CHAT, **chat)
    ((text, reason),) = said(want)
    whole = running.ask(RESPONSE, **fields)
    events = [*running.ask(RESPONSE, stream=True, **fields)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    for found in (whole, last.response):
        (item,) = found.output
        assert text == (item.arguments if item.type == "function_call" else found.output_text)
        ends = ("incomplete", "max_output_tokens") if reason == "length" else ("completed", None)
        why = found.incomplete_details and found.incomplete_details.reason
        assert (found.status, why) == ends and item.status == ends[0]
        assert found.usage.input_tokens == want.usage.prompt_tokens
        assert found.usage.output_tokens == want.usage.completion_tokens
        assert found.usage.total_tokens == want.usage.total_tokens
        if "include" in fields:
            scores = item.content[0].logprobs
            assert [t.logprob for t in scores] == [
                t.logprob for t in want.choices[0].logprobs.content
            ]
            assert {len(token.top_logprobs) for token in scores} == {2}
    assert whole.instructions == fields.get("instructions") and whole.object == "response"
    assert whole.temperature == fields.get("temperature", 1.0)
    grown = [event.delta for event in events if event.type.endswith(".delta")]
    assert "".join(grown) == text


# ------------------------------------------------------------------------------- log-probabilities


SCORED = [  # a kind, fields; the texts of tokens are the answer's
    *((COMPLETION, {"max_tokens": 60, "n": 2, **more}) for more in ({"logprobs": 2}, {"logprobs": 0}, {"logprobs": 2, "stop": ["e", "zz"]})),
    *((CHAT, {"max_tokens": 6, "logprobs": True, **more}) for more in ({}, {"top_logprobs": 3}, {"top_logprobs": 3, "tools": TOOLS, "tool_choice": NAMED})),
]  # fmt: skip


def scores_of(choice: Any) -> list[tuple[str, float, list[float]]]:
    """Of each token of a choice or an event: its text, its log-probability, those of the likeliest."""
    if choice.logprobs is None:
        return []
    if hasattr(choice.logprobs, "token_logprobs"):
        tops = [[*top.values()] for top in choice.logprobs.top_logprobs]
        return [*zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, tops)]
    tokens = choice.logprobs.content
    assert all(token.token.encode() == bytes(token.bytes) for token in tokens)
    return [(t.token, t.logprob, [each.logprob for each in t.top_logprobs]) for t in tokens]


@rows("kind, body", SCORED)
def test_log_probabilities(running, kind, body):
    """With the texts of tokens, their places, and the likeliest ones; they end where the text does."""
    most = body["logprobs"] if kind == COMPLETION else body.get("top_logprobs", 0)
    events = [event.choices[0] for event in running.ask(kind, stream=True, **body)]
    for choice in running.ask(kind, **body).choices:
        scores = scores_of(choice)
        text = choice.text if kind == COMPLETION else choice.message.content
        begins = "".join(token for token, *_ in scores)
        assert begins.strip().startswith(text.strip())  # a chat's text has no space before it
        for _, own, top in scores:
            assert own <= 0 and top[:most] == sorted(top[:most], reverse=True)
            assert most <= len(top) <= most + (kind == COMPLETION)
            assert not top or own <= top[0]
            assert kind == CHAT or own in top
        if kind == COMPLETION:
            starts = [sum(len(token) for token, *_ in scores[:n]) for n in range(len(scores))]
            assert choice.logprobs.text_offset == starts and starts[-1] < len(text)
        own = [event for event in events if event.index == choice.index]
        assert [score for event in own for score in scores_of(event)] == scores
    assert running.ask(kind, logprobs=False).choices[0].logprobs is None


# ------------------------------------------------------------------------------------------ drafts


@pytest.mark.parametrize("asked", [{}, {"draft": False}, *({"draft_tokens": n} for n in (0, 3, 7, 11.0))], ids=str)  # fmt: skip
def test_drafts_change_no_text(running, asked):
    """A request may say how many tokens a cycle drafts at most; the acceptance has vLLM's names."""
    most = 0 if "draft" in asked else asked.get("draft_tokens", 11)
    answer = running.ask(max_tokens=60, **asked)
    assert answer.choices[0].text == running.ask(max_tokens=60).choices[0].text
    told = answer.metrics["speculative_decoding"]
    steps = told["num_spec_steps"]
    histogram = told["acceptance_histogram"]
    accepted = sum(i * n for i, n in enumerate(histogram))
    assert sum(histogram) == steps and (steps == 0) == (most == 0)
    assert accepted == told["num_accepted_draft_tokens"] <= told["num_draft_tokens"] <= most * steps
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == accepted
    assert details.rejected_prediction_tokens == told["num_draft_tokens"] - accepted
    if steps:
        assert told["mean_acceptance_length"] == 1 + accepted / steps > 1
        assert told["draft_acceptance_rate"] == accepted / told["num_draft_tokens"]
    each = {"draft_tokens": [0, None]}
    both = running.ask(prompt=[PROMPT] * 2, max_tokens=60, **each)
    assert both.metrics["speculative_decoding"]["num_spec_steps"] > 0


def test_events_have_trees_where_they_are_asked_for(running):
    """Every cycle of the spans has one; the accepted nodes below the root are the answer."""
    events = [*running.ask(stream=True, max_tokens=60, trees=True)]
    told = [event.choices[0].drafted for event in events]
    trees = [tree for drafted in told for tree in drafted["trees"]]
    assert len(trees) == sum(drafted["passes"] for drafted in told)
    assert {cycle for drafted in told for *_, cycle in drafted["spans"]} <= {*range(-1, len(trees))}
    kept = [[text for _, text, accepted in tree if accepted][1:] for tree in trees]
    text = "".join(event.choices[0].text for event in events)
    found = trees[0][0][1] + "".join(map("".join, kept))  # the last cycle goes beyond the limit
    assert found.startswith(text) and max(map(len, trees)) > 4
    for tree in trees:
        assert tree[0][0] == -1 and all(parent < i for i, (parent, *_) in enumerate(tree))
    assert "trees" not in next(iter(running.ask(stream=True))).choices[0].drafted


# ----------------------------------------------------------------------------- the server's own part


def test_an_answer_up_to_the_context(running):
    context = running.engine.context
    ids = [5 + i % 90 for i in range(context - 5)]
    found = running.ask(prompt=ids, max_tokens=context, temperature=0)
    (choice,) = found.choices
    assert (choice.finish_reason, choice.cut_by) == ("length", "context")
    assert found.usage.total_tokens == context
    cut = running.ask(prompt=ids[:9], max_tokens=3, temperature=0).choices[0]
    assert (cut.finish_reason, cut.cut_by) == ("length", "max_tokens")


def test_a_seed_is_drawn_and_told(running):
    """Without one, and with -1, as front ends send it; the seed of an answer gives its text again."""
    drawn = [running.ask(seed=seed) for seed in (None, -1, -1)]
    assert len({answer.choices[0].text for answer in drawn}) == 3
    for answer in drawn:
        assert 0 <= answer.seed < 2**53  # whole in every client's numbers
        assert running.ask(seed=answer.seed).choices[0].text == answer.choices[0].text


def test_a_grammar_that_ends_in_nothing_ends_one_request(running, monkeypatch):
    dead = Grammar(running.engine, 'start: "abc" X\nX: /[a-z]+/ & /[0-9]+/')
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(parameters, "compile_grammars", lambda *inputs: [dead])
        bad = pool.submit(running.ask, response_format=of_schema({"type": "null"}))
        good = pool.submit(running.ask)
        with pytest.raises(openai.BadRequestError, match="allows neither a token nor the end"):
            bad.result()
    assert good.result().choices[0].text == running.ask().choices[0].text
    assert not running.batcher.jobs


def test_who_leaves_frees_the_row(running):
    """In the middle of a stream, and while waiting for a whole answer."""
    events = running.ask(max_tokens=400, stream=True, n=3)
    next(iter(events))
    assert None not in running.batcher.scheduler.running
    events.close()
    wait_for(lambda: not running.batcher.jobs)
    assert max(map(len, running.batcher.scheduler.session.history)) < 300, "long before the end"
    hasty = running.client.with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        hasty.completions.create(model="demo", prompt=PROMPT, max_tokens=400, n=3)
    wait_for(lambda: not running.batcher.jobs)


def test_too_many_are_refused(running):
    streams = [running.ask(max_tokens=400, stream=True, n=3) for _ in range(5)]
    try:
        with pytest.raises(openai.RateLimitError, match="answers wait already, 12 may"):
            running.ask()
    finally:
        for stream in streams:
            stream.close()
    wait_for(lambda: not running.batcher.jobs)
    assert running.ask(max_tokens=1).usage.completion_tokens == 1


def test_a_mistake_of_the_server_is_json(running, monkeypatch):
    monkeypatch.setattr(running.server.reader, "read", lambda *_: 1 / 0)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda *said, **_: None)
    status, found = running.raw(b'{"prompt": "a"}')
    assert (status, found["error"]["type"]) == (500, "server_error")


def test_cycles_of_all_kinds_are_warm_before_a_request():
    """As on CUDA, where a kind that is met late would be compiled then."""
    sampled = load(checkpoint=DEMO, device="cpu", draft="none", temperature=1.0)
    engine = fresh(sampled, captured=True)
    serve.warm_other_modes(engine)
    (buffers,) = engine.free
    kinds = {key[0] for key in buffers.replays if isinstance(key[0], SamplingMode)}
    assert kinds == {SamplingMode.GREEDY, SamplingMode.TRUNCATED}, "the engine's own is warm"


@pytest.mark.parametrize("part", ["step", "admit"])
def test_a_server_that_fails_says_so_and_ends(part, monkeypatch, capfd):
    running = Running()
    assert running.raw(b"", "/health", "GET") == (200, {"status": "ok"})
    monkeypatch.setattr(running.batcher.scheduler.session, part, lambda *_: 1 / 0)
    failed = "the decoding thread failed; see the terminal"
    with pytest.raises(openai.InternalServerError, match=failed):
        running.ask()
    with pytest.raises(serve.Refusal, match=failed) as refused:
        running.batcher.submit([])
    assert refused.value.status == 500 and "ZeroDivisionError" in capfd.readouterr().err
    with pytest.raises(serve.Refusal, match="decodes no answers") as refused:
        asyncio.run(running.server.health(None))
    assert refused.value.status == 503
    running.thread.join(60)
    assert running.status == 1
    running.close()


def test_ctrl_c_ends_it():
    """Among answers that no load brings to their end before: 2,000 tokens each, more than fit."""
    command = [sys.executable, SERVE, *ARGV, "--ignore_eos"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = next(line for line in server.stderr if "http" in line)  # or it has ended
    port = int(line.partition("/v1")[0].rpartition(":")[2])
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    options = {"max_tokens": 2000, "n": 15, "stream": True}
    events = iter(client.completions.create(model="demo", prompt=PROMPT, **options))
    next(events)
    server.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        list(events)
    assert server.wait(120) == 130 and server.stderr.read() == ""


# ------------------------------------------------------------------------------------ who may ask

KEY = {"Authorization": "Bearer secret"}
FOREIGN = {"Host": "llm.example.org"}
LOCKED = {"api_key": "secret"}


@pytest.mark.parametrize("options, path, headers, status", [
    # names of other machines, at a loopback address, against pages whose name is resolved to it
    *[({}, "/v1/models", {"Host": host}, 200) for host in ("localhost", "127.0.0.1:1", "[::1]:1", "LocalHost", "localhost.:1", "")],
    *[({}, "/v1/models", {"Host": host}, 400) for host in ("example.org", "localhost.example.org:80", "localhost@example.org")],
    # behind a proxy: a request with the key may name any host; a page has no key, and its name is an option
    (LOCKED, "/v1/models", FOREIGN | KEY, 200), (LOCKED, "/v1/models", FOREIGN, 400), (LOCKED, "/", FOREIGN, 400),
    *[({"allowed_hosts": names}, "/v1/models", FOREIGN, status) for names, status in (("a.org, LLM.example.org", 200), ("*", 200), ("example.org", 400))],
    (LOCKED | {"allowed_hosts": "llm.example.org"}, "/", FOREIGN, 200),
    *[(LOCKED, "/v1/models", {"Authorization": brought}, status) for brought, status in (
        ("Bearer secret", 200), ("bearer secret", 200), ("BEARER \t secret ", 200), ("Bearer secrets", 401), ("Bearer secre", 401), ("Basic secret", 401), ("secret", 401), ("", 401))],
    ({}, "/v1/models/", {}, 200), ({}, "/v1/models/demo", {}, 200), ({}, "/v1/models/x", {}, 404),
    (LOCKED, "/", {}, 200), (LOCKED, "/health", {}, 200), ({"host": "0.0.0.0"}, "/v1/models", FOREIGN, 200),
])  # fmt: skip
def test_who_may_ask(running, options, path, headers, status):
    answer = client_of(running, **options).get(path, headers={"Host": "localhost", **headers})
    assert answer.status_code == status
    said = {400: "no name of this server", 401: "the key is missing or wrong"}.get(status)
    assert said is None or said in answer.json()["error"]["message"]


@pytest.mark.parametrize("origins", ["http://a.example", "http://b.org, http://a.example/"])
def test_origins(running, origins):
    client = client_of(running, cors=origins, api_key="secret")
    for origin, allowed in (("http://a.example", "http://a.example"), ("http://c.example", None)):
        question = {"Host": "localhost", "Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = client.options("/v1/chat/completions", headers=question)
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert (answer.status_code == 200) == bool(allowed)


def client_of(running, **options: str) -> TestClient:
    """A client of a server's application with other options, without a socket."""
    other = object.__new__(serve.Server)
    other_config = replace(running.server.config, **options)
    vars(other).update(vars(running.server) | {"config": other_config})
    return TestClient(other.app())


@pytest.mark.parametrize("option, value, found", [
    ("cors", "HTTP://A.example:80/, https://b.org:443,http://[::1]:3000", ["http://a.example", "https://b.org", "http://[::1]:3000"]),
    ("cors", "*", ["*"]), ("cors", "null, vscode-webview://abc", ["null", "vscode-webview://abc"]),
    *[("cors", value, None) for value in ("localhost:3000", "http://a.example/page", "http://*.example", "http://a b", "http://bücher.example")],
    ("allowed_hosts", "LLM.example.org:8080, [::1]:1", ["llm.example.org", "[::1]"]),
    *[("allowed_hosts", value, None) for value in ("http://a.org", "*.a.org", "::1", "a.org/x")],
])  # fmt: skip
def test_an_origin_or_host_that_can_never_match(option, value, found):
    """It is refused at the start, in a line with the rule; others are as browsers write them."""
    config = serve.ServeConfig(checkpoint=DEMO, **{option: value})
    if found is None:
        with pytest.raises(ValueError, match=f"--{option} must have .*, or \\* for a.*; it has"):
            config.check()
    else:
        config.check()
        assert (config.origins() if option == "cors" else config.hosts()) == found


def test_who_does_not_go_on_is_dropped(running, monkeypatch):
    """One that sends half a body."""
    monkeypatch.setattr(transport, "READ_S", 0.3)
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")
        assert client.recv(12) == b"HTTP/1.1 408"
    assert running.ask(max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("headers, status", [
    ({"Content-Type": "application/json"}, 413), ({"Content-Type": "text/plain"}, 413), ({"Host": "example.org"}, 400),
])  # fmt: skip
def test_a_long_body_is_read_before_it_is_refused(running, headers, status):
    """Each time, and the connection stays usable."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    for _ in range(2):
        connection.request("POST", "/v1/completions", b" " * 9_000_000, headers)
        answer = connection.getresponse()
        assert answer.status == status and json.loads(answer.read())["error"]
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.close()


def test_a_silent_stream_has_comments(running, monkeypatch):
    """As while a long prompt is read; the client skips them."""
    monkeypatch.setattr(serve, "SILENCE_S", 0.001)
    body = {"prompt": PROMPT, "stream": True, "seed": 3, "max_tokens": 24}
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    head = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), head)
    assert b"\n\n: still reading" in b"\n\n" + connection.getresponse().read()
    connection.close()
    text, _ = in_parts([*running.ask(stream=True)], 0)
    assert text == running.ask().choices[0].text


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "", "a" * 70, "127.0.0.1"])
def test_an_address_that_cannot_be_had_is_one_line(host, capsys):
    """Of another machine, or a port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as stop:
        port = taken.getsockname()[1] if host == "127.0.0.1" else 0
        argv = [*ARGV, "--host", host, "--port", str(port)]
        serve.main(*parse_given(serve.ServeConfig, "serve.py", "", argv))
    err = capsys.readouterr().err
    remedy = "name another --port" if port else "an address"
    assert stop.value.code == 2 and err.count("\n") == 1 and remedy in err
