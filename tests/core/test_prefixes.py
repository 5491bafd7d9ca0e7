"""Cached beginnings of prompts that one sequence takes over from another: the tokens stay."""

from __future__ import annotations

from functools import cache
from itertools import cycle

import pytest
from test_lossless import make

import demo_drafts
import helpers
from demo_drafts import DRAFTS
from helpers import OPERATORS, engine_for, golden_target, slow
from run.engine import Engine
from run.options import Sampling
from run.session import Session

SHARED = [(7 * i + i * i) % 97 for i in range(270)]  # more than a prefill chunk
FIRST = [*SHARED, 5, 17, 3]
SECOND = [*SHARED, 9, 33]
RULES = {"greedy": Sampling(), "sampled": Sampling(1.0)}
LONG = 40  # new tokens of the sequence that goes on while others copy from it
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True, "batch_size": 3}


def engine_of(draft: str, **options) -> Engine:
    """The demo in int8, weights and cache, where no margin is needed."""
    return demo_drafts.engine_of(draft, quant="int8", kv="int8", compile=True, **OPTIONS | options)


def decode(session: Session, seq: int, prompt: list[int], rule: Sampling, **options) -> list[int]:
    """The new tokens of one prompt; a sequence's number is that of its noise."""
    session.configure(seq, rule, 7)
    session.admit(seq, prompt, (seq, 0), **options)
    while session.busy(seq):
        session.step()
    return session.history[seq][len(prompt) :]


def copied(engine: Engine, rule: Sampling, host_lag: int = 0) -> list[list[int]]:
    """Copies from a finished sequence, from one that decodes, and onto one that had another text."""
    session = Session(engine, host_lag=host_lag)
    found = [decode(session, 0, FIRST, rule), decode(session, 1, SECOND, rule, source=0)]
    session.configure(2, rule, 7)
    session.admit(2, FIRST, (2, 0), max_new_tokens=LONG, source=1)
    while len(session.history[2]) < len(FIRST) + 3:
        session.step()
    found.append(decode(session, 0, SECOND, rule, source=2))  # the source goes on meanwhile
    found.append(decode(session, 1, [*SHARED[:40], 1, 2, 3], rule, source=2))
    while session.busy(2):
        session.step()
    return [*found, session.history[2][len(FIRST) :]]


ASKED = [(0, FIRST), (1, SECOND), (0, SECOND), (1, [*SHARED[:40], 1, 2, 3]), (2, FIRST)]


def fresh(engine: Engine, rule: Sampling) -> list[list[int]]:
    """The tokens of `copied`, each of a session of its own."""
    most = [*[OPTIONS["max_new_tokens"]] * 4, LONG]
    return [
        decode(Session(engine), *asked, rule, max_new_tokens=length)
        for asked, length in zip(ASKED, most)
    ]


@cache
def wanted(rule: str) -> list[list[int]]:
    """The tokens of fresh sessions without a drafter."""
    return fresh(engine_of("none"), RULES[rule])


TURNS = [*zip(DRAFTS, cycle(RULES))]
OTHERS = [*zip(DRAFTS, cycle([*RULES][::-1]))]


@OPERATORS
@pytest.mark.parametrize("draft, rule", [*TURNS, *slow(OTHERS)])
def test_a_copied_prefix_changes_no_token(draft, rule):
    assert copied(engine_of(draft), RULES[rule]) == wanted(rule)


@OPERATORS
@pytest.mark.parametrize("draft", ["none", "dynamic"])
def test_buffers_that_stay(draft):
    """As on CUDA: reports come late, cycles run over fixed buffers."""
    captured = helpers.fresh(engine_of(draft), captured=True)
    assert copied(captured, RULES["sampled"], host_lag=1) == wanted("sampled")


@pytest.mark.parametrize("drafter", ["dynamic", "model:chain"])
def test_the_drafters_state_is_copied_too(drafter):
    """A copy drafts as well as a sequence that has read everything."""
    engine = engine_for(golden_target(), make(drafter), **OPTIONS)
    session = Session(engine)
    decode(session, 0, FIRST, Sampling())
    before = len(session.stats.accept_lengths)
    decode(session, 1, SECOND, Sampling(), source=0)
    fresh = Session(engine)
    decode(fresh, 1, SECOND, Sampling())
    assert session.stats.accept_lengths[before:] == fresh.stats.accept_lengths
    assert max(fresh.stats.accept_lengths) > 0
