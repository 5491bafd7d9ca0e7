"""Requests side by side, each with its own sampler, seed and grammar: the text of each by its definition.

A row of REQUESTS is a prompt and how it is answered. Its text is that of `plain_loop`: for every token a pass over the
whole text, scores that are rescored on Python's numbers, and a grammar's mask by a new matcher. Every drafter, format,
batch and way to run gives this text.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

llguidance = pytest.importorskip("llguidance")

import demo_drafts  # noqa: E402
from demo_drafts import DRAFTS, plain_loop  # noqa: E402
from drafts.grammar import STYLE, Grammar, _vocabulary  # noqa: E402
from helpers import Scripted, fresh, slow, trimmed_head  # noqa: E402
from run.generate import Answers  # noqa: E402
from run.library import generate  # noqa: E402
from run.options import DEMO, Sampling  # noqa: E402
from run.session import Session  # noqa: E402

LENGTH = 24
EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Berlin", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
LARK = 'start: "The answer is " WORD ("," " " WORD)* "."\nWORD: /[a-z]{2,8}/'


class Request(NamedTuple):
    prompt: str
    sampling: Sampling
    seed: int
    grammar: str | dict | None = None


PROMPT = "def person():\n    return "
OTHER = "import json\n"
LONG = "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n\n\n"
REQUESTS = [
    Request(PROMPT, Sampling(repetition_penalty=1.3), 0),
    Request(OTHER, Sampling(1.0, typical_p=0.8), 1),
    Request(OTHER, Sampling(0.7, 0, 0.95, 0.0, 2.0, repetition_penalty=1.4), 2),
    Request(PROMPT, Sampling(presence_penalty=1.5, frequency_penalty=0.5, repeat_last_n=9), 3),
    Request(OTHER, Sampling(), 4),
    Request(PROMPT, Sampling(dry_multiplier=0.9, dry_allowed_length=1, dry_penalty_last_n=40), 5),
    Request(OTHER, Sampling(dry_multiplier=0.9, dry_allowed_length=1, dry_sequence_breakers=(" ", "\n")), 5),
    Request(PROMPT, Sampling(1.0, xtc_probability=0.6, xtc_threshold=0.05), 6),
    Request(OTHER, Sampling(0.7, logit_bias='{"10": 5, "32": -100, "3": -20}', frequency_penalty=0.3), 7),
    Request(LONG, Sampling(1.0), 8),
    Request(LONG, Sampling(frequency_penalty=1.5), 8),
    Request(OTHER, Sampling(0.7, 40, 0.9, 0.02, 3.0, 0.9, 0.5, 0.1, 1.2, 0.2, 0.1, 20, 0.8), 9),
    Request(PROMPT, Sampling(bad_words=("0", "self,"), min_tokens=9, logit_bias=f'{{"{EOS}": 100}}'), 10),
    Request(OTHER, Sampling(1.0, allowed_token_ids=",".join(map(str, range(3, 999))), bad_words=("name", "def __")), 11),
    Request(PROMPT, Sampling(1.2, top_k=4), 2**40 + 3),
    Request(OTHER, Sampling(1.3, min_p=0.2), 5),
    Request(PROMPT, Sampling(1.4, top_p=0.6), 5),
    Request(OTHER, Sampling(1.4, top_k=40, top_p=0.7), 1),
    Request(PROMPT, Sampling(), 0, PERSON),
    Request(OTHER, Sampling(), 0, LARK),
    Request(PROMPT, Sampling(1.0), 3, PERSON),
    Request(OTHER, Sampling(0.9, 40, 0.9), 7, {"type": "object"}),
    # a token that alone may follow does, whatever its bias
    Request(PROMPT, Sampling(repetition_penalty=2.0, dry_multiplier=5.0, logit_bias='{"68": -100}'), 0, 'root ::= "aaaa" [a-c]*'),
]  # fmt: skip
PROMPTS = [each.prompt for each in REQUESTS]
engine_of = partial(demo_drafts.engine_of, max_new_tokens=LENGTH)


@pytest.fixture(scope="module", autouse=True)
def _head_of_some_tokens(tmp_path_factory):
    """A further drafter, whose head drafts 256 tokens."""
    path = tmp_path_factory.mktemp("heads") / "head"
    head = trimmed_head(DEMO + "-eagle", path, torch.arange(256) + 2)
    DRAFTS["vocab"] = {"tree": "dynamic", "head": head}
    yield
    del DRAFTS["vocab"]


# ----------------------------------------------------------------------------------- the definition


def rescored_plainly(tokenizer, ids: list[int], own: Sampling, scores, new: list[int]):
    """Biases, penalties and masks of scores [V], on Python's numbers, and by transformers."""
    z = scores.clone()
    for id, bias in json.loads(own.logit_bias or "{}").items():
        z[int(id)] += bias
    text = ids + new
    window = text[-own.repeat_last_n :] if own.repeat_last_n > 0 else text
    repetition = RepetitionPenaltyLogitsProcessor(own.repetition_penalty)
    z = repetition(torch.tensor([window]), z[None])[0]
    for token, count in Counter(window[max(len(window) - len(new), 0) :]).items():
        z[token] = z[token] - own.frequency_penalty * count - own.presence_penalty
    text = text[-own.dry_penalty_last_n :] if own.dry_penalty_last_n > 0 else text
    pieces = tokenizer.token_bytes()
    breaks = {id for id in text for end in own.dry_sequence_breakers if end.encode() in pieces[id]}
    longest: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length] not in breaks:
            length += 1
        longest[text[place]] = max(length, longest.get(text[place], 0))
    for token, length in longest.items():
        if own.dry_multiplier and length >= own.dry_allowed_length:
            z[token] -= own.dry_multiplier * own.dry_base ** (length - own.dry_allowed_length)
    for word in own.bad_words:
        for begin in ("", " "):
            *before, last = tokenizer.encode(begin + word, bos=False)
            if new[len(new) - len(before) :] == before:
                z[last] = float("-inf")
    if len(new) < own.min_tokens:
        z[EOS] = float("-inf")
    if own.allowed_token_ids:
        allowed = torch.tensor(list(map(int, own.allowed_token_ids.split(","))))
        z = torch.full_like(z, float("-inf")).scatter(0, allowed, z[allowed])
    return z


def allowed_tokens(engine, source: str | dict, new: list[int]) -> torch.Tensor:
    """The tokens, [V] bool, that a grammar allows behind some, by a new matcher."""
    vocab = engine.target.config.vocab_size
    if isinstance(source, dict):
        definition = llguidance.LLMatcher.grammar_from_json_schema(source, overrides=STYLE)
    else:
        definition = llguidance.grammar_from("grammar", source)
    library = _vocabulary(engine.tokenizer, vocab, engine.eos_ids)
    matcher = llguidance.LLMatcher(library, definition, log_level=0)
    assert matcher.consume_tokens(new)
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    return ((bits[:, None] >> torch.arange(8)) & 1).flatten()[:vocab].bool()


@cache
def wanted(quant: str) -> list[list[int]]:
    engine = engine_of("none", quant=quant)
    found = []
    for number, (prompt, own, seed, grammar) in enumerate(REQUESTS):
        ids = engine.tokenizer.encode(prompt)

        def rescored(scores, new, own=own, ids=ids, grammar=grammar):
            z = rescored_plainly(engine.tokenizer, ids, own, scores, new)
            if grammar is None:
                return z
            return z.masked_fill(~allowed_tokens(engine, grammar, new), float("-inf"))

        found.append(plain_loop(engine, prompt, own, seed, number, rescored))
    return found


def decoded(engine) -> Answers:
    own = [each.sampling._asdict() for each in REQUESTS]
    options = {name: [each[name] for each in own] for name in own[0]}
    options["seed"] = [each.seed for each in REQUESTS]
    grammars = [each.grammar for each in REQUESTS]
    return generate(engine, PROMPTS, grammar=grammars, **options)


# --------------------------------------------------------------------------------------- properties


def test_every_rule_has_an_effect():
    """No request has the text that its temperature alone gives, and no two have one text."""
    options = {
        "temperature": [each.sampling.temperature for each in REQUESTS],
        "seed": [each.seed for each in REQUESTS],
    }
    bare = generate(engine_of("none"), PROMPTS, **options).tokens
    for each, text, other in zip(REQUESTS, wanted("none"), bare):
        alone = Sampling(each.sampling.temperature)
        assert (text == other) == (each.sampling == alone and each.grammar is None), each
    assert len(set(map(tuple, wanted("none")))) == len(REQUESTS)


@pytest.mark.parametrize("draft, quant, compile, batch", [
    ("none", "none", True, 1), ("dynamic", "none", False, 2), ("auto", "none", True, 3), ("eagle+ngram", "none", True, 4),
    ("model tree", "none", True, 3), ("lookahead", "none", True, 2), ("ngram", "none", True, 1),
    *slow((draft, quant, compile, batch) for draft in (*DRAFTS, "vocab") for quant in ("none", "int8", "int4")
          for compile in (False, True) for batch in (1, 3)),
])  # fmt: skip
def test_the_text_is_that_of_a_plain_loop(draft, quant, compile, batch):
    """Sequences come and go, so that greedy batches, sampled ones and grammars follow each other."""
    engine = engine_of(draft, quant=quant, compile=compile, batch_size=batch)
    assert decoded(engine).tokens == wanted(quant)


# a draft, whether cycles run over buffers that stay, as on CUDA, and cycles by which reports come late
WAYS = [("none", True, 1), ("dynamic", False, 0), ("auto", True, 1), ("model", False, 3)]
OTHERS = [
    each
    for each in itertools.product(("none", "dynamic", "auto", "model"), (False, True), (0, 3))
    if each not in WAYS
]


@pytest.fixture
def small_chunks(monkeypatch):
    """Prompts are read in several chunks."""
    monkeypatch.setattr("decode.PREFILL_CHUNK", 16)
    monkeypatch.setattr("decode.PREFILL_WIDTHS", (8, 16))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("draft, captured, host_lag", [*WAYS[:2], *slow(OTHERS)])
def test_a_late_host_and_fixed_buffers_change_nothing(draft, captured, host_lag, monkeypatch):
    """Rows of other requests are replaced while cycles are in flight, and modes change."""
    monkeypatch.setattr("run.scheduler.Session", partial(Session, host_lag=host_lag))
    result = decoded(fresh(engine_of(draft, batch_size=3, trace="-"), captured))
    assert result.tokens == wanted("none")
    ran = {line["row"] for line in result.trace}
    assert ran == set(range(len(REQUESTS))), "lines tell the conversation, not the row it had"


class Random(Scripted):
    """Any preset at any time; prompts are read or left out."""

    def __init__(self):
        super().__init__()
        self.rng, self.ran = random.Random(1), []

    def pick(self, limit: int) -> int:
        self.ran.append(self.rng.choice((0, 0, 0, self.rng.randint(0, limit))))
        return self.ran[-1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("draft, captured, host_lag", [*WAYS[1:], *slow(OTHERS)])
def test_rows_are_released_at_random_and_given_away(draft, captured, host_lag):
    """Also while the report of a cycle is not read, and with a grammar."""
    engine = fresh(engine_of(draft, batch_size=3), captured)
    if len(engine.presets) > 1:
        engine = replace(engine, policy=Random())
    session = Session(engine, host_lag=host_lag)
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    rng, rows, found, unread = random.Random(0), [None] * 3, set(), 0
    for _ in range(200):
        for row, number in enumerate(rows):
            if number is not None and not session.busy(row):
                assert session.history[row][len(ids[number]) :] == wanted("none")[number]
                found.add(number)
            if not session.busy(row) or rng.random() < 0.04:
                rows[row] = number = rng.randrange(len(REQUESTS))
                session.release(row)
                unread += len(session.pending)
                _, own, seed, grammar = REQUESTS[number]
                session.configure(row, own, seed)
                guide = Grammar(engine, grammar) if grammar else None
                session.admit(row, ids[number], (number, 0), LENGTH, guide=guide)
        session.step()
    assert len(found) > 8 and (unread > 5) == (host_lag > 0)
    assert draft != "auto" or set(engine.policy.ran) == set(range(len(engine.presets)))


def test_a_later_turn_keeps_the_parameters():
    """A conversation's own noise goes on; the next conversation of the place has others."""
    turns = ["def f(x):", " and then"]
    engine = engine_of("none", max_new_tokens=8, batch_size=2)
    options = {"temperature": [0.0, 1.0, 0.7], "seed": [1, 2, 3]}
    prompts = [turns, ["import ", " as"], turns]
    together = generate(engine, prompts, **options)
    for number in range(3):
        own = {name: values[number] for name, values in options.items()}
        before = [[prompt[0]] for prompt in prompts[:number]]
        single = generate(engine, [*before, prompts[number]], **own)
        assert single.tokens[-2:] == together.tokens[2 * number : 2 * number + 2]


def test_the_residual_rule_takes_parameters_too():
    """The text depends on the drafter there; with the same one it is the same alone."""
    options = {"accept": "residual", "tree": "chain", "temperature": 0.6}
    asked = {"temperature": [0.6, 1.0, 0.8], "top_k": [12, 0, 40], "seed": [3, 5, 7]}
    want = generate(engine_of(**options), PROMPTS[:3], **asked).tokens
    assert generate(engine_of(**options, batch_size=3), PROMPTS[:3], **asked).tokens == want
    with pytest.raises(ValueError, match="--accept residual needs a temperature above 0"):
        generate(engine_of(**options), PROMPTS[:3], temperature=[1.0, 0.0, 1.0])


def test_a_temperature_near_zero_is_greedy():
    """Scores stay finite, where dividing by it would overflow."""
    temperatures = [0.0, 1e-300, 1e-38, 1e-9]
    found = generate(engine_of(), [OTHER] * 4, temperature=temperatures).tokens
    assert found == [found[0]] * 4


# -------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize("options, message", [
    ({"temperature": -1}, "--temperature must be at least 0; it is -1"),
    ({"temperature": [0.0, float("nan")]}, "--temperature must be a number; it is nan"),
    ({"temperature": [0.0]}, "temperature has 1 values, and there are 2 prompts"),
    ({"top_k": [5, 2.5]}, "--top_k must be a whole number; it is 2.5"),
    ({"top_p": [0.5, 0]}, r"--top_p must be in \(0, 1\]; it is 0"), ({"top_p": None}, "--top_p must be a number"),
    ({"seed": 2**64}, "--seed must be at most"),
    ({"max_new_tokens": [1, 2]}, r"max_new_tokens is one number for all prompts; it is \[1, 2\]"),
    ({"min_p": [0, 1.5]}, "--min_p must be at most 1; it is 1.5"), ({"mirostat": 2}, "there is no option mirostat"),
    ({"grammar": [LARK] * 3}, "grammar has 3 values, and there are 2 prompts"),
])  # fmt: skip
def test_wrong_parameters_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(engine_of("none"), [[1], [2]], **options)
