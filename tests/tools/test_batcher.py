"""The places of the server's batch: which prompt takes which, which cached tokens stay, and the texts, which do not change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("starlette")

from helpers import OPERATORS, fresh, slow  # noqa: E402
from run.generate import Engine, generate, load  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
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

    def ask(self, prompt: list[int], rule: Sampling = GREEDY, most: int = 12) -> Job:
        pieces: list[Delta] = []
        decoder = self.engine.tokenizer.stream(True)
        job = Job(
            prompt, rule, 7, most, decoder=decoder, choice=0, likeliest=None, tell=pieces.append
        )
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


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(**OPTIONS, draft="none")


def own(engine: Engine, prompt: list[int], rule: Sampling = GREEDY, most: int = 12) -> str:
    """The text of `generate`, in buffers that hold nothing."""
    one = replace(fresh(engine), config=replace(engine.config, batch_size=1))
    options = {**rule._asdict(), "seed": 7, "max_new_tokens": most}
    return generate(one, [prompt], **options).text[0]


def test_a_conversation_goes_on_in_its_place(engine):
    client = Client(engine)
    prompts = [[*SYSTEM[:20], number, 9] for number in range(10, 14)]
    assert [client.place(prompt) for prompt in prompts] == [0, 1, 2, 3]
    # the next turns, in another order
    for place in (2, 0, 3):
        turn = [*client.session.history[place], 30, 31]
        assert client.place(turn) == place
        assert client.session.history[place][: len(turn)] == turn
    assert client.cached > 3 * 20


def test_the_least_recently_used_place_is_taken(engine):
    client = Client(engine)
    first = [[*SYSTEM[:20], number] for number in range(10, 14)]
    for prompt in first:
        client.place(prompt)
    client.place([*client.session.history[0], 30])  # place 1 is the oldest now
    others = [[*SYSTEM[:20], number] for number in range(50, 53)]
    assert [client.place(prompt) for prompt in others] == [1, 2, 3]
    assert client.session.cached(0, first[0]) == len(first[0])
    assert client.session.cached(1, first[1]) == 20


def test_answers_to_one_prompt_read_it_once(engine):
    """Of four that come at once, three wait until the first has read it."""
    client = Client(engine)
    jobs = [client.ask([*SYSTEM, number]) for number in (10, 11, 12, 13)]
    client.step()
    assert sum(job is not None for job in client.scheduler.running) == 1
    client.step()
    client.step()
    assert None not in client.scheduler.running, "all at once then"
    client.finish()
    assert client.cached == 3 * (len(SYSTEM) - 1)
    for job in jobs:
        assert client.text(job) == own(engine, job.prompt)


def test_a_reader_that_leaves_makes_way(engine):
    """The answer that waits for its prompt goes on with the part that was read."""
    client = Client(engine)
    leaves = client.ask([*SYSTEM, 10])
    stays = client.ask([*SYSTEM, 11])
    client.step()
    leaves.left = True
    client.step()
    assert stays in client.scheduler.running
    client.finish()
    assert client.text(stays) == own(engine, stays.prompt)
    assert client.cached == 254


IN_INT8 = {"compile": True, "quant": "int8"}


@cache
def vanilla_text(prompt: tuple[int, ...], rule: Sampling, **options) -> str:
    return own(loaded(draft="none", **options), list(prompt), rule)


@cache
def loaded(**options) -> Engine:
    return load(**OPTIONS, **options)


def check_conversations(rule: Sampling, draft: dict, **options) -> None:
    """Two turns of six conversations with one system prompt, side by side in four places.

    Every text is the one without a draft, in buffers that hold nothing.
    """
    engine = loaded(**draft, **options)
    client = Client(engine)
    prompts = [[*SYSTEM[:120], number, 9] for number in range(10, 16)]
    for turn in range(2):
        jobs = [client.ask(prompt, rule) for prompt in prompts]
        client.finish()
        for number, job in enumerate(jobs):
            want = vanilla_text(tuple(job.prompt), rule, **options)
            assert client.text(job) == want, (turn, number)
            answer = engine.tokenizer.encode(client.text(job), bos=False)
            prompts[number] = [*job.prompt, *answer, 40 + turn, 9]
    assert client.cached > 0.6 * sum(len(job.prompt) for job in client.told)


@pytest.mark.parametrize("draft, rule", [
    ({"draft": "none"}, GREEDY), ({"tree": "dynamic"}, Sampling(1.0)), ({"tree": "auto"}, GREEDY),
    *slow([({"draft": "none"}, Sampling(1.0)), ({"tree": "dynamic"}, GREEDY), ({"tree": "auto"}, Sampling(1.0))]),
], ids=str)  # fmt: skip
def test_texts_do_not_change(draft, rule):
    check_conversations(rule, draft)


@OPERATORS
@pytest.mark.parametrize("draft", [{"tree": "dynamic"}, {"tree": "auto"}], ids=str)
def test_texts_do_not_change_in_int8(draft):
    check_conversations(Sampling(1.0), draft, **IN_INT8)
