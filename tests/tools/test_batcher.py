"""The places of the server's batch: which prompt takes which, which cached tokens stay, and texts, which do not change.

Also the text of one answer: half a character at its end, and what may begin a stop string.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from files.tokenizer import StreamDecoder  # noqa: E402
from helpers import OPERATORS, fresh, slow  # noqa: E402
from run.engine import Engine  # noqa: E402
from run.library import generate  # noqa: E402
from run.load import load  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
from run.scheduler import Request  # noqa: E402
from server.batcher import Batcher, Delta, Job  # noqa: E402

SYSTEM = [(7 * i + i * i) % 250 + 4 for i in range(400)]  # a prompt of more than one chunk
GREEDY = Sampling()
OPTIONS = {"checkpoint": DEMO, "device": "cpu", "ignore_eos": True, "batch_size": 4}


class Client:
    """Jobs of a batcher whose steps the test runs itself."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.batcher = Batcher(engine, 64)
        self.scheduler = self.batcher.scheduler
        self.session = self.scheduler.session
        self.told: dict[Job, list[Delta]] = {}

    def ask(self, prompt: list[int], rule: Sampling = GREEDY) -> Job:
        pieces: list[Delta] = []
        served = {"choice": 0, "likeliest": None, "tell": pieces.append}
        job = Job(prompt, rule, 7, 12, decoder=self.engine.tokenizer.stream(True), **served)
        self.told[job] = pieces
        self.batcher.submit([job])
        return job

    def step(self) -> None:
        assert self.batcher._schedule()
        self.batcher._step()

    def finish(self) -> None:
        while self.batcher.new or self.batcher.jobs:
            self.step()

    @property
    def cached(self) -> int:
        """Count the tokens of all prompts that were not read again."""
        return sum(job.cached for job in self.told)

    def text(self, job: Job) -> str:
        return "".join(piece.text for piece in self.told[job])

    def place(self, prompt: list[int]) -> int:
        """Decode a prompt to its end. Returns: the place that it took."""
        job = self.ask(prompt)
        self.step()
        place = job.place
        self.finish()
        return place


@cache
def loaded(**options) -> Engine:
    return load(**OPTIONS, **options)


@cache
def own(prompt: tuple[int, ...], rule: Sampling = GREEDY, **options) -> str:
    """The text of `generate` without a draft, in buffers that hold nothing."""
    engine = loaded(draft="none", **options)
    one = replace(fresh(engine), config=replace(engine.config, batch_size=1))
    return generate(one, [[*prompt]], seed=7, max_new_tokens=12, **rule._asdict()).text[0]


@pytest.fixture
def client() -> Client:
    return Client(loaded(draft="none"))


def prompts(*ends: int) -> list[list[int]]:
    """Prompts that begin alike."""
    return [[*SYSTEM[:20], end, 9] for end in ends]


def test_a_conversation_goes_on_in_its_place(client):
    assert [client.place(prompt) for prompt in prompts(10, 11, 12, 13)] == [0, 1, 2, 3]
    # the next turns, in another order
    for place in (2, 0, 3):
        turn = [*client.session.history[place], 30, 31]
        assert client.place(turn) == place
        assert client.session.history[place][: len(turn)] == turn
    assert client.cached > 3 * 20


def test_answers_to_one_prompt_read_it_once(client):
    """Of four that come at once, three wait until the first has read it."""
    jobs = [client.ask([*SYSTEM, number]) for number in (10, 11, 12, 13)]
    client.step()
    assert sum(job is not None for job in client.scheduler.running) == 1
    client.step()
    client.step()
    assert None not in client.scheduler.running, "all at once then"
    client.finish()
    assert client.cached == 3 * (len(SYSTEM) - 1)
    for job in jobs:
        assert client.text(job) == own(tuple(job.prompt))


def test_a_reader_that_leaves_makes_way(client):
    """The answer that waits for its prompt goes on with the part that was read."""
    leaves = client.ask([*SYSTEM, 10])
    stays = client.ask([*SYSTEM, 11])
    client.step()
    leaves.left = True
    client.step()
    assert stays in client.scheduler.running
    client.finish()
    assert client.text(stays) == own(tuple(stays.prompt)) and client.cached == 254


DRAFTS = {"none": {"draft": "none"}, "dynamic": {"tree": "dynamic"}, "auto": {"tree": "auto"}}
IN_INT8 = {"compile": True, "quant": "int8"}


@pytest.mark.parametrize("draft, rule, options", [
    ("none", GREEDY, {}), ("dynamic", Sampling(1.0), {}), ("auto", GREEDY, {}),
    *(pytest.param(draft, Sampling(1.0), IN_INT8, marks=OPERATORS) for draft in ("dynamic", "auto")),
    *slow([("none", Sampling(1.0), {}), ("dynamic", GREEDY, {}), ("auto", Sampling(1.0), {})]),
], ids=str)  # fmt: skip
def test_texts_do_not_change(draft, rule, options):
    """Two turns of six conversations with one system prompt, side by side in four places."""
    engine = loaded(**DRAFTS[draft], **options)
    client = Client(engine)
    turns = [[*SYSTEM[:120], number, 9] for number in range(10, 16)]
    for turn in range(2):
        jobs = [client.ask(prompt, rule) for prompt in turns]
        client.finish()
        for number, job in enumerate(jobs):
            assert client.text(job) == own(tuple(job.prompt), rule, **options), (turn, number)
            answer = engine.tokenizer.encode(client.text(job), bos=False)
            turns[number] = [*job.prompt, *answer, 40 + turn, 9]
    assert client.cached > 0.6 * sum(len(job.prompt) for job in client.told)


# ------------------------------------------------------------------------------ the text of an answer


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
    ("abcabd.", ["abd"], ["", "", "abc", "", "", "", "", ""]), ("aab", ["ab"], ["", "a", "", ""]), ("abc", ["bd"], ["a", "", "bc", ""]),
    ("xyz", ["z", "yz"], ["x", "", "", ""]), ("ab!", [], ["a", "b", "!", ""]), ("ab", ["abc"], ["", "", "ab"]),
])  # fmt: skip
def test_text_that_may_begin_a_stop_is_held_back(text, stops, want):
    """What each letter adds, and the end: a text that ends otherwise gets the part that was held back."""
    letters = SimpleNamespace(push=lambda ids: "".join(map(chr, ids)))
    request = request_of(letters, stops)
    told = []
    for letter in [*text, ""]:
        known = len(request.text)
        if letter and not request.stopped:
            assert request.push(ord(letter)) == letter
        if not letter:
            request.close("")
        told.append(request.text[known:])
    assert told == want
    assert request.stopped == any(stop in text for stop in stops)
