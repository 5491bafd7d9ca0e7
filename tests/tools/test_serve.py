"""The server, driven by the official client: its answers, its refusals, and the release of rows."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
openai = pytest.importorskip("openai")
from starlette.testclient import TestClient  # noqa: E402

from drafts.grammar import Grammar  # noqa: E402
from files.tokenizer import StreamDecoder  # noqa: E402
from helpers import fresh  # noqa: E402
from run.generate import encode, generate, load  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
from run.parsing import parse, parse_given  # noqa: E402
from run.scheduler import Request  # noqa: E402
from sampling import SamplingMode  # noqa: E402
from server import app as serve  # noqa: E402
from server import parameters, transport  # noqa: E402

PROMPT = "def read_lines(path):"
TREE = ["--tree", "auto:4,4,12"]
SERVE = str(Path(__file__).resolve().parents[2] / "scripts" / "serve.py")
ARGV = f"--checkpoint {DEMO} --device cpu --temperature 1 --chat vicuna --max_body 20000".split()
ARGV += ["--compile", *TREE]
ARGV += ["--batch_size", "3", "--max_new_tokens", "400", "--max_waiting", "12", "--port", "0"]


class Running:
    """A server in a thread, and clients of it."""

    def __init__(self, *argv: str):
        config = parse(serve.ServeConfig, "serve.py", "", [*ARGV, *argv])
        config.check()
        self.socket = serve.listen(config)
        self.server = serve.Server(serve.load_engine(config), config)
        self.engine = self.server.engine
        self.batcher = self.server.batcher
        self.port = self.socket.getsockname()[1]
        self.uvicorn = serve.Listener(self.server.app(), self.batcher)
        self.status = None  # with which the process would exit
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0
        )
        wait_for(lambda: self.uvicorn.started)

    def run(self):
        try:
            self.uvicorn.run(sockets=[self.socket])
        except SystemExit as error:
            self.status = error.code

    def complete(self, prompt=PROMPT, **options):
        return self.client.completions.create(
            model="demo", prompt=prompt, **{"max_tokens": 24, **options}
        )

    def own(self, prompts, seed: int, **options):
        """The result of `generate` for the same prompts."""
        config = replace(self.engine.config, batch_size=1)
        engine = replace(fresh(self.engine), template=None, config=config)
        return generate(engine, prompts, seed=seed, **{"max_new_tokens": 24, **options})

    def raw(self, body: bytes, path="/v1/completions", method="POST", kind="application/json"):
        """Status and JSON of a request by hand."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        found = json.loads(response.read())
        connection.close()
        return response.status, found

    def close(self):
        self.uvicorn.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.batcher.is_alive()


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running():
    running = Running()
    yield running
    running.close()


def test_models(running):
    assert [model.id for model in running.client.models.list()] == ["demo"]
    assert running.client.models.retrieve("demo").object == "model"


def test_a_completion_is_what_generate_makes_of_it(running):
    found, want = running.complete(seed=2**40 + 3), running.own([PROMPT], 2**40 + 3)
    assert found.object == "text_completion" and found.model == "demo"
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == (want.text[0], want.finish_reason[0])
    usage = found.usage
    assert usage.prompt_tokens == want.prompt_tokens[0]
    assert usage.completion_tokens == len(want.tokens[0])
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    texts = {running.complete().choices[0].text for _ in range(4)}
    assert len(texts) > 1, "without a seed one is drawn"


RULES = [
    {"temperature": 0},
    {"temperature": 0.5},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logit_bias": {"10": 4}, "typical_p": 0.9, "dry_multiplier": 0.8},
    {"top_k": 10**6, "min_p": 0},
    {},
]


def as_sent(rule: dict) -> dict:
    """The options of a request; the client sends those that it does not know as they are."""
    known = ("temperature", "top_p", "frequency_penalty", "logit_bias")
    own = {name: value for name, value in rule.items() if name not in known}
    return {name: rule[name] for name in rule.keys() - own.keys()} | {"extra_body": own}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_request_has_its_own_parameters(running, rule):
    """Whole, streamed and in a chat, as the official client sends them."""
    want = running.own([PROMPT], 11, **rule).text[0]
    assert running.complete(seed=11, **as_sent(rule)).choices[0].text == want
    events = running.complete(seed=11, stream=True, **as_sent(rule))
    assert "".join(event.choices[0].text for event in events) == want
    messages = [{"role": "user", "content": "Hello"}]
    found = running.client.chat.completions.create(
        model="demo", messages=messages, seed=4, max_tokens=12, **as_sent(rule)
    )
    ids = encode(running.engine, ["Hello"], [])
    chat = generate(fresh(running.engine), [ids], seed=4, max_new_tokens=12, **rule)
    assert found.choices[0].message.content == chat.text[0]


def test_an_answer_up_to_the_context(running):
    ids = running.engine.tokenizer.encode(PROMPT, bos=True)
    context = running.engine.context
    prompt = (ids * context)[: context - 5]
    found = running.complete(prompt, max_tokens=context, temperature=0)
    cut = running.complete(prompt[:9], max_tokens=3, temperature=0).choices[0]
    assert (cut.finish_reason, cut.cut_by) == ("length", "max_tokens")
    assert found.usage.total_tokens <= context
    assert found.choices[0].finish_reason == "stop" or found.usage.total_tokens == context
    if found.choices[0].finish_reason == "length":
        assert found.choices[0].cut_by == "context"
    assert running.complete(max_tokens=401).usage.completion_tokens > 0


def test_several_prompts_and_choices(running):
    prompts = [PROMPT, "import "]
    want = running.own(prompts, 7, num_samples=2).text
    found = running.complete(prompts, seed=7, n=2).choices
    assert [(choice.index, choice.text) for choice in found] == list(enumerate(want))
    ids = [running.engine.tokenizer.encode(text, bos=True) for text in prompts]
    assert [choice.text for choice in running.complete(ids, seed=7).choices] == want[::2]
    assert running.complete(ids[0], seed=7).choices[0].text == want[0]


def test_a_stream_is_the_whole_in_parts(running):
    whole = running.complete(seed=5)
    events = list(running.complete(seed=5, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert not events[-1].choices and len(events) > 3
    assert events[-1].usage.total_tokens == whole.usage.total_tokens and events[0].usage is None
    assert len({event.id for event in events}) == 1
    *_, last = running.complete(seed=5, stream=True, stream_options={"include_usage": None})
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat(running):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    options = {"model": "demo", "messages": messages, "seed": 4, "max_completion_tokens": 20}
    found = running.client.chat.completions.create(**options)
    template = parameters.chat_template(
        parameters.fetched(DEMO), running.engine.tokenizer, "vicuna", "Be short."
    )
    ids = encode(replace(running.engine, template=template), ["Hello", "Bye"], ["Hi"])
    want = generate(fresh(running.engine), [ids], seed=4, max_new_tokens=20)
    message = found.choices[0].message
    assert (message.role, message.content) == ("assistant", want.text[0])
    assert found.usage.prompt_tokens == len(ids) and found.object == "chat.completion"
    events = list(running.client.chat.completions.create(**options, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert events[0].object == "chat.completion.chunk"
    assert "".join(event.choices[0].delta.content for event in events) == want.text[0]


@pytest.mark.parametrize("stops", [False, True])
def test_logprobs_of_a_completion(running, stops):
    """With the texts of tokens, their places, and the likeliest ones; they end where the text does."""
    options = {"seed": 5, "max_tokens": 60, "logprobs": 2, "n": 2}
    whole = running.complete(**options | {"logprobs": None})
    assert whole.choices[0].logprobs is None
    if stops:
        text = whole.choices[0].text
        options["stop"] = text[len(text) // 2 :][:4]
    found = running.complete(**options)
    events = [event.choices[0] for event in running.complete(**options, stream=True)]
    for choice in found.choices:
        scores = choice.logprobs
        starts = [sum(map(len, scores.tokens[:n])) for n in range(len(scores.tokens))]
        assert scores.text_offset == starts and starts[-1] < len(choice.text)
        assert "".join(scores.tokens)[: len(choice.text)] == choice.text
        for token, own, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs):
            assert own <= 0 and top[token] == own and 2 <= len(top) <= 3
            assert max(top.values()) == list(top.values())[0]
        own = [event for event in events if event.index == choice.index]
        joined = [token for event in own for token in event.logprobs.token_logprobs]
        assert joined == scores.token_logprobs
    if stops:
        assert found.choices[0].text == text[: text.index(options["stop"])]
        assert found.choices[0].finish_reason == "stop"
        events = running.complete(
            **options | {"stop": [options["stop"], "never said"]}, stream=True
        )
        parts = [event.choices[0].text for event in events if event.choices[0].index == 0]
        assert "".join(parts) == found.choices[0].text
    plain = running.complete(**options | {"logprobs": 0}).choices[0].logprobs
    assert plain.token_logprobs == found.choices[0].logprobs.token_logprobs
    assert [len(top) for top in plain.top_logprobs] == [1] * len(plain.tokens)


def test_logprobs_of_a_chat(running):
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": "demo", "messages": messages, "seed": 4, "max_tokens": 20, "logprobs": True}
    create = running.client.chat.completions.create
    choice = create(**options, top_logprobs=3).choices[0]
    data = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert data.decode() in (choice.message.content, " " + choice.message.content)
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.token.encode() == bytes(token.bytes)
        logprobs = [each.logprob for each in token.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True) and token.logprob <= logprobs[0]
    streamed = [event.choices[0].logprobs for event in create(**options, stream=True)]
    tokens = [token for each in streamed if each for token in each.content]
    assert [t.logprob for t in tokens] == [t.logprob for t in choice.logprobs.content]
    assert not any(token.top_logprobs for token in tokens)


def test_a_begun_answer_goes_on(running):
    """The prompt ends with the assistant's words, and the answer is what follows them."""
    ask = {"role": "user", "content": "Write a function."}
    tokenizer = running.engine.tokenizer
    ids = tokenizer.encode(
        tokenizer.decode(encode(running.engine, ["Write a function."], []), True) + "def f("
    )
    options = {
        "messages": [ask, {"role": "assistant", "content": "def f("}],
        "max_tokens": 12,
        "temperature": 0,
    }
    want = running.complete([ids], max_tokens=12, temperature=0).choices[0].text
    for named in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        found = running.client.chat.completions.create(model="demo", **options, extra_body=named)
        assert found.choices[0].message.content == want and found.usage.prompt_tokens == len(ids)


# ---------------------------------------------------------------------------------------- grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": [1, 20, 300]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}


def of_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def describe(running, **options):
    messages = [{"role": "user", "content": "Describe it."}]
    return running.client.chat.completions.create(model="demo", messages=messages, **options)


def test_many_clients_with_schemas_of_their_own_and_none(running):
    """Each gets the text that the same request gets alone."""
    asked = [(schema, seed) for seed in range(3) for schema in (SCHEMA, LIST, None)]

    def ask(schema, seed):
        form = {} if schema is None else {"extra_body": {"response_format": of_schema(schema)}}
        return running.complete(seed=seed, max_tokens=60, **form).choices[0]

    with ThreadPoolExecutor(6) as pool:
        choices = list(pool.map(lambda each: ask(*each), asked))
    for (schema, seed), choice in zip(asked, choices):
        own = running.own([PROMPT], seed, grammar=schema, max_new_tokens=60)
        assert (choice.text, choice.finish_reason) == (own.text[0], own.finish_reason[0])
        if schema is not None:
            jsonschema.validate(json.loads(choice.text), schema)


def test_formats_of_chats_streams_and_several_choices(running):
    answer = describe(running, response_format=of_schema(SCHEMA), n=3, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    parts = describe(running, response_format=of_schema(SCHEMA), seed=5, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == texts[0]
    anything = describe(running, response_format={"type": "json_object"}, seed=1, max_tokens=300)
    assert anything.choices[0].message.content.startswith("{")
    plain = describe(running, response_format={"type": "text"}, seed=5, max_tokens=20)
    same = describe(running, seed=5, max_tokens=20)
    assert plain.choices[0].message.content == same.choices[0].message.content


def test_a_grammar_that_ends_in_nothing_ends_one_request(running, monkeypatch):
    dead = Grammar(running.engine, 'start: "abc" X\nX: /[a-z]+/ & /[0-9]+/')
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "compile_grammars", lambda *inputs: [dead])
        with ThreadPoolExecutor(2) as pool:
            bad = pool.submit(describe, running, response_format=of_schema({"type": "null"}))
            good = pool.submit(running.complete, seed=3)
            with pytest.raises(openai.BadRequestError, match="allows neither a token nor the end"):
                bad.result()
            assert good.result().choices[0].text == running.own([PROMPT], 3).text[0]
    assert not running.batcher.jobs


# ------------------------------------------------------------------------------------- its requests


class Letters:
    """A decoder whose tokens are letters."""

    def push(self, ids):
        return "".join(map(chr, ids))


def request_of(decoder, stops: tuple[str, ...] = ()) -> Request:
    return Request([1], Sampling(), 0, 99, decoder=decoder, stops=stops, shows_half=False)


@pytest.mark.parametrize("text", ["a\u00e9", "\u20ac", "ok \U0001f600"])
@pytest.mark.parametrize("ends", [True, False])
def test_half_a_character_is_left_out(text, ends):
    """At the last token and at an end of sequence, which has no bytes."""
    letters = SimpleNamespace(piece=lambda id: bytes([id]) if id < 256 else b"", strips_space=False)
    *data, last = text.encode()
    for ids, want in ((data, text[:-1]), ([*data, last], text)):
        request = request_of(StreamDecoder(letters, True))
        for id in [*ids, 256] if ends else ids:
            request.push(id)
        request.close("stop" if ends else "length")
        assert request.text == want


@pytest.mark.parametrize("text, stops, want", [
    ("abcabd.", ["abd"], ["", "", "", "abc"]), ("aab", ["ab"], ["", "a", ""]), ("abc", ["bd"], ["a", "", "bc"]),
    ("xyz", ["z", "yz"], ["x", "", ""]), ("ab!", [], ["a", "b", "!"]), ("ab", ["abc"], ["", "", "ab"]),
])  # fmt: skip
def test_text_that_may_begin_a_stop_is_held_back(text, stops, want):
    """A text that ends otherwise gets the part that was held back."""
    request, told = request_of(Letters(), stops), []
    for letter in text:
        known = len(request.text)
        if not request.stopped:
            assert request.push(ord(letter)) == letter
            told.append(request.text[known:])
    stopped, known = request.stopped, len(request.text)
    request.close("")
    told.append(request.text[known:])
    assert [t for t in told if t] == [t for t in want if t]
    assert stopped == any(stop in text for stop in stops) and (not stopped or not told[-1])


def test_who_leaves_frees_the_row(running):
    """In the middle of a stream, and while waiting for a whole answer."""
    events = running.complete(max_tokens=400, stream=True, n=3)
    next(iter(events))
    assert None not in running.batcher.scheduler.running
    events.close()
    wait_for(lambda: not running.batcher.jobs)
    assert max(map(len, running.batcher.scheduler.session.history)) < 300, "long before the end"
    with pytest.raises(openai.APITimeoutError):
        running.client.with_options(timeout=0.2).completions.create(
            model="demo", prompt=PROMPT, max_tokens=400, n=3
        )
    wait_for(lambda: not running.batcher.jobs)


def test_a_seed_is_drawn_and_told(running):
    """Without one, and with -1, as front ends send it; the seed of an answer gives its text again."""
    drawn = [running.complete(**options) for options in ({}, {"seed": -1}, {"seed": -1})]
    assert len({answer.choices[0].text for answer in drawn}) == 3
    for answer in drawn:
        assert 0 <= answer.seed < 2**53  # whole in every client's numbers
        assert running.complete(seed=answer.seed).choices[0].text == answer.choices[0].text
    assert running.complete(seed=2**40).seed == 2**40
    events = list(running.complete(seed=-1, stream=True))
    (seed,) = {event.seed for event in events}
    text = "".join(event.choices[0].text for event in events)
    assert running.complete(seed=seed).choices[0].text == text


def test_too_many_are_refused(running):
    streams = [running.complete(max_tokens=400, stream=True, n=3) for _ in range(5)]
    try:
        with pytest.raises(openai.RateLimitError, match="answers wait already, 12 may"):
            running.complete()
    finally:
        for stream in streams:
            stream.close()
    wait_for(lambda: not running.batcher.jobs)
    assert running.complete(max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_equal_answers_are_decoded_once(running, stream, monkeypatch):
    """At temperature 0 n answers are copies; each counts."""
    jobs = []
    submit = running.batcher.submit
    monkeypatch.setattr(running.batcher, "submit", lambda new: (jobs.extend(new), submit(new)))
    options = {"temperature": 0, "stream": stream, "max_tokens": 9, "n": 3}
    found = running.complete([PROMPT, PROMPT[:9]], **options)
    texts = [""] * 6
    for event in found if stream else [found]:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4] == texts[5]
    assert sum(len(job.tokens) for job in jobs) <= 18 and len(jobs) == 2
    assert stream or found.usage.completion_tokens > 18


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
    assert kinds == {SamplingMode.GREEDY, SamplingMode.TRUNCATED}, (
        "the engine's own is warm already"
    )


@pytest.mark.parametrize("part", ["step", "admit"])
def test_a_server_that_fails_says_so_and_ends(part, monkeypatch, capfd):
    running = Running()
    assert running.raw(b"", "/health", "GET") == (200, {"status": "ok"})
    monkeypatch.setattr(running.batcher.scheduler.session, part, lambda *_: 1 / 0)
    with pytest.raises(
        openai.InternalServerError, match="the decoding thread failed; see the terminal"
    ):
        running.complete()
    with pytest.raises(serve.Refusal, match="the decoding thread failed") as refused:
        running.batcher.submit([])
    assert refused.value.status == 500 and "ZeroDivisionError" in capfd.readouterr().err
    with pytest.raises(serve.Refusal, match="decodes no answers") as refused:
        asyncio.run(running.server.health(None))
    assert refused.value.status == 503
    running.thread.join(60)
    assert running.status == 1
    running.close()


def test_who_does_not_go_on_is_dropped(running, monkeypatch):
    """One that sends half a body."""
    monkeypatch.setattr(transport, "READ_S", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        client.sendall(head + b"Content-Length: 99\r\n\r\n{")
        assert client.recv(12) == b"HTTP/1.1 408"
    assert running.complete(max_tokens=1).usage.completion_tokens == 1


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


KEY = {"Authorization": "Bearer secret"}
FOREIGN = {"Host": "llm.example.org"}


@pytest.mark.parametrize("options, path, headers, status", [
    # names of other machines, at a loopback address, against pages whose name is resolved to it
    *[({}, "/v1/models", {"Host": host}, 200) for host in ("localhost", "127.0.0.1:1", "[::1]:1", "LocalHost", "localhost.:1", "")],
    *[({}, "/v1/models", {"Host": host}, 400) for host in ("example.org", "localhost.example.org:80", "localhost@example.org")],
    # behind a proxy: a request with the key may name any host; a page has no key, and its name is an option
    *[({"api_key": "secret"}, path, FOREIGN | key, status) for path, key, status in (("/v1/models", KEY, 200), ("/v1/models", {}, 400), ("/", {}, 400))],
    *[({"allowed_hosts": names}, "/v1/models", FOREIGN, status) for names, status in (("a.org, LLM.example.org", 200), ("*", 200), ("example.org", 400))],
    ({"api_key": "secret", "allowed_hosts": "llm.example.org"}, "/", FOREIGN, 200),
    # keys
    *[({"api_key": "secret"}, "/v1/models", {"Authorization": brought}, status) for brought, status in (
        ("Bearer secret", 200), ("bearer secret", 200), ("BEARER \t secret ", 200), ("Bearer secrets", 401), ("Bearer secre", 401), ("Basic secret", 401), ("secret", 401), ("", 401))],
    ({}, "/v1/models/", {}, 200), ({}, "/v1/models/demo", {}, 200), ({}, "/v1/models/x", {}, 404),
    ({"api_key": "secret"}, "/", {}, 200), ({"api_key": "secret"}, "/health", {}, 200),
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


def client_of(running, **options: str) -> TestClient:
    """A client of a server's application with other options, without a socket."""
    other = object.__new__(serve.Server)
    other_config = replace(running.server.config, **options)
    vars(other).update(vars(running.server) | {"config": other_config})
    return TestClient(other.app())


def test_a_silent_stream_has_comments(running, monkeypatch):
    """As while a long prompt is read; the client skips them."""
    monkeypatch.setattr(serve, "SILENCE_S", 0.001)
    body = {"prompt": PROMPT, "stream": True, "seed": 3, "max_tokens": 24}
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    head = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), head)
    assert b"\n\n: still reading" in b"\n\n" + connection.getresponse().read()
    connection.close()
    events = running.complete(seed=3, stream=True)
    assert "".join(event.choices[0].text for event in events) == running.own([PROMPT], 3).text[0]


def test_addresses_of_this_machine():
    assert transport.is_loopback("::1") and not transport.is_loopback("0.0.0.0")


@pytest.mark.parametrize("host, remedy", [
    ("192.0.2.1", "an address of this machine"), ("no such host", "an address of this machine"), ("", "an address"),
    ("a" * 70, "an address of this machine"), ("127.0.0.1", "name another --port"),
])  # fmt: skip
def test_an_address_that_cannot_be_had_is_one_line(host, remedy, capsys):
    """Of another machine, or a port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as stop:
        port = taken.getsockname()[1] if remedy.endswith("--port") else 0
        argv = [*ARGV, "--host", host, "--port", str(port)]
        serve.main(*parse_given(serve.ServeConfig, "serve.py", "", argv))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and remedy in err


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6():
    with serve.listen(
        parse(serve.ServeConfig, "serve.py", "", ["--host", "::1", "--port", "0"])
    ) as found:
        assert found.family == socket.AF_INET6


def test_ctrl_c_ends_it(tmp_path):
    """Among answers that no load brings to their end before: 2,000 tokens each, more than fit."""
    server = subprocess.Popen(
        [sys.executable, SERVE, *ARGV, "--ignore_eos"],
        stderr=subprocess.PIPE,
        text=True,
    )
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
