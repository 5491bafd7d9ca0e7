"""Requests of one scheduler: their places, their ends, and that none changes another one's tokens."""

from __future__ import annotations

import pytest
from test_lossless import assert_same, make

import decode as loop
from helpers import engine_for, golden_target, record
from run.engine import Engine
from run.generate import generate, load
from run.options import DEMO, Sampling
from run.scheduler import Request, Scheduler
from run.session import Session

OPTIONS = {"max_new_tokens": 16, "ignore_eos": True, "batch_size": 2}
PROMPTS = [[5, 17, 3, 40], [9, 33, 2, 71, 54, 90], [12, 80, 3], [61, 5, 17, 9, 8], [44, 2]]
LONG = [(7 * i + i * i) % 97 for i in range(400)]  # more than a prefill chunk, and worth a wait
RULE = {"sampling": Sampling(1.0), "seed": 7}


def requests_of(engine: Engine, prompts: list[list[int]], **fields) -> list[Request]:
    return [
        Request.of(engine, prompt, noise_id=(number, 0), **RULE | fields)
        for number, prompt in enumerate(prompts)
    ]


def answered(scheduler: Scheduler, requests: list[Request]) -> list[Request]:
    for pieces in scheduler.run(requests):
        assert all(piece.request in requests for piece in pieces)
    return requests


def check_alone(number: int, request: Request) -> None:
    """The tokens are those of vanilla decoding in a session of its own."""
    engine = engine_for(golden_target(), make("none"), **OPTIONS, temperature=1.0, seed=7)
    (want,) = answered(Scheduler(engine), [requests_of(engine, PROMPTS)[number]])
    assert len(request.tokens) == OPTIONS["max_new_tokens"]
    assert_same(engine, request.prompt, request.tokens, want.tokens, (number, 0))


@pytest.mark.parametrize("drafter", ["none", "dynamic", "ngram"])
def test_requests_of_which_some_are_cancelled(drafter):
    """One that waits, one that is decoded, one twice; their places go to others."""
    engine = engine_for(golden_target(), make(drafter), **OPTIONS)
    scheduler = Scheduler(engine)
    requests = requests_of(engine, PROMPTS)
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
        check_alone(number, requests[number])


def test_ctrl_c_leaves_a_scheduler_that_goes_on(monkeypatch):
    """Wherever it comes, in the admission of a request or in a step."""
    engine = engine_for(golden_target(), make("dynamic"), **OPTIONS)
    scheduler = Scheduler(engine)
    for name in ("configure", "admit", "step"):
        stopped = Request.of(engine, PROMPTS[0], **RULE)

        def interrupt(*inputs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Session, name, interrupt)
            answered(scheduler, [stopped])
        scheduler.cancel(stopped)
        assert not scheduler.busy and not any(scheduler.running)
    for number, request in enumerate(answered(scheduler, requests_of(engine, PROMPTS))):
        check_alone(number, request)


def test_a_request_gets_the_place_that_it_asks_for():
    """The next turn of a conversation goes before the requests that wait, and its noise goes on."""
    engine = engine_for(golden_target(), make("dynamic"), **OPTIONS)
    scheduler = Scheduler(engine)
    first, *others = requests_of(engine, PROMPTS)
    for request in (first, *others):
        scheduler.submit(request)
    while not first.reason:
        scheduler.step()
    draws = int(scheduler.session.state.draws[first.place])
    turn = [*first.prompt, *first.tokens, 3, 4]
    following = Request.of(engine, turn, place=first.place, noise_id=None, **RULE)
    scheduler.submit(following)
    scheduler.step()
    assert following in scheduler.running and following.cached > len(first.prompt)
    while not following.reason:
        scheduler.step()
    place = first.place
    assert draws == 16 and int(scheduler.session.state.draws[place]) == 32


def test_samples_of_one_prompt_read_it_once(monkeypatch):
    """The second waits for the first; a request that came with the same beginning copies it, too."""
    engine = engine_for(golden_target(), make("none"), **OPTIONS)
    chunks = record(monkeypatch, loop.Cycle, "read_prompt")
    together = generate(engine, [LONG], num_samples=2, temperature=1.0)
    assert [call.args[4] for call in chunks] == [256, 144, 1]
    one = engine_for(golden_target(), make("none"), **OPTIONS | {"batch_size": 1})
    apart = generate(one, [LONG], num_samples=2, temperature=1.0)
    assert together.tokens[0] != together.tokens[1]
    for sample in range(2):
        key = (0, sample)
        assert_same(one, LONG, together.tokens[sample], apart.tokens[sample], key)


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_stop_string_comes_before_a_grammar_that_ends(draft):
    """Also where the drafter has both in one cycle."""
    pytest.importorskip("llguidance")
    from drafts.grammar import Grammar

    engine = load(checkpoint=DEMO, device="cpu", draft=draft)
    dead = Grammar(engine, 'start: "abc" X\nX: /[a-z]+/ & /[0-9]+/')
    ids = engine.tokenizer.encode("def f(x):")
    ends = []
    for stops in ((), ("bc",)):
        (request,) = answered(Scheduler(engine), [Request.of(engine, ids, guide=dead, stops=stops)])
        ends.append((request.text, request.reason, bool(request.fault)))
    assert ends == [("abc", "grammar", True), ("a", "stop", False)]
