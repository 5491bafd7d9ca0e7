"""Requests of one scheduler: their places, their ends, and that none changes another one's tokens."""

from __future__ import annotations

import pytest
from test_requests import LENGTH, REQUESTS, wanted

import decode as loop
import demo_drafts
from drafts.grammar import Grammar
from helpers import record
from run.engine import Engine
from run.library import generate
from run.load import load
from run.options import DEMO
from run.scheduler import Request, Scheduler
from run.session import Session

LONG = [(7 * i + i * i) % 97 for i in range(400)]  # more than a prefill chunk, and worth a wait


def engine_of(draft: str):
    return demo_drafts.engine_of(draft, max_new_tokens=LENGTH, batch_size=2)


def requests_of(engine: Engine) -> list[Request]:
    """Some rows of the table of requests."""
    found = []
    for number in NUMBERS:
        prompt, own, seed, grammar = REQUESTS[number]
        guide = Grammar(engine, grammar) if grammar else None
        ids = engine.tokenizer.encode(prompt)
        rule = {"sampling": own, "seed": seed, "noise_id": (number, 0), "guide": guide}
        found.append(Request.of(engine, ids, **rule))
    return found


NUMBERS = [0, 2, 9, 17, 4]


def answered(scheduler: Scheduler, requests: list[Request]) -> list[Request]:
    for pieces in scheduler.run(requests):
        assert all(piece.request in requests for piece in pieces)
    return requests


def check(number: int, request: Request) -> None:
    """The tokens are those of the request's definition."""
    assert request.tokens == wanted("none")[NUMBERS[number]]


@pytest.mark.parametrize("draft", ["none", "dynamic", "ngram"])
def test_requests_of_which_some_are_cancelled(draft):
    """One that waits, one that is decoded, one twice; their places go to others."""
    scheduler = Scheduler(engine_of(draft))
    requests = requests_of(scheduler.engine)
    for request in requests:
        scheduler.submit(request)
    while not requests[0].tokens:
        scheduler.step()
    assert [request.place for request in requests] == [0, 1, -1, -1, -1]
    for _ in range(2):
        scheduler.cancel(requests[0])
        scheduler.cancel(requests[3])
    while scheduler.busy:
        scheduler.step()
    assert [bool(request.reason) for request in requests] == [False, True, True, False, True]
    assert requests[2].place == 0 and requests[3].place == -1
    for number in (1, 2, 4):
        check(number, requests[number])


def test_ctrl_c_leaves_a_scheduler_that_goes_on(monkeypatch):
    """Wherever it comes, in the admission of a request or in a step."""
    scheduler = Scheduler(engine_of("dynamic"))
    for name in ("configure", "admit", "step"):
        stopped = requests_of(scheduler.engine)[0]

        def interrupt(*inputs, **more):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Session, name, interrupt)
            answered(scheduler, [stopped])
        scheduler.cancel(stopped)
        assert not scheduler.busy and not any(scheduler.running)
    for number, request in enumerate(answered(scheduler, requests_of(scheduler.engine))):
        check(number, request)


def test_a_request_gets_the_place_that_it_asks_for():
    """The next turn of a conversation goes before the requests that wait, and its noise goes on."""
    scheduler = Scheduler(engine_of("dynamic"))
    first, *others = requests_of(scheduler.engine)
    for request in (first, *others):
        scheduler.submit(request)
    while not first.reason:
        scheduler.step()
    place = first.place
    before = int(scheduler.session.state.draws[place])
    turn = [*first.prompt, *first.tokens, 3, 4]
    following = Request.of(scheduler.engine, turn, place=place, noise_id=None)
    scheduler.submit(following)
    scheduler.step()
    assert following in scheduler.running and following.cached > len(first.prompt)
    while not following.reason:
        scheduler.step()
    after = int(scheduler.session.state.draws[place])
    assert (before, after) == (len(first.tokens), len(first.tokens + following.tokens))


def test_samples_of_one_prompt_read_it_once(monkeypatch):
    """The second waits for the first."""
    engine = engine_of("none")
    chunks = record(monkeypatch, loop.Cycle, "read_prompt")
    options = {"num_samples": 2, "temperature": 1.0}
    together = generate(engine, [LONG], **options).tokens
    assert [call.args[4] for call in chunks] == [256, 144, 1]
    one = demo_drafts.engine_of("none", max_new_tokens=LENGTH)
    assert together == generate(one, [LONG], **options).tokens and together[0] != together[1]


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_stop_string_comes_before_a_grammar_that_ends(draft):
    """Also where the drafter has both in one cycle."""
    engine = load(checkpoint=DEMO, device="cpu", draft=draft)
    dead = Grammar(engine, 'start: "abc" X\nX: /[a-z]+/ & /[0-9]+/')
    ids = engine.tokenizer.encode("def f(x):")
    ends = []
    for stops in ((), ("bc",)):
        (request,) = answered(Scheduler(engine), [Request.of(engine, ids, guide=dead, stops=stops)])
        ends.append((request.text, request.reason, bool(request.fault)))
    assert ends == [("abc", "grammar", True), ("a", "stop", False)]
