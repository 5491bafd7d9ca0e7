"""Sequences of one batch, each with its own temperature, top-k, top-p and seed: each gets the text that it gets alone."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from test_lossless import TREES, assert_same, make

import run.generate as program
import sampling
from drafters import RootOnly
from drafts.residual import sample_children
from eagle_draft import EagleDrafter
from helpers import compiled_as_on_cuda, engine_for, golden_head, golden_target, record, slow
from reference import TORCH, choose
from run.engine import Engine
from run.generate import generate
from run.options import DEMO, Sampling
from run.session import Session
from sampling import SamplingMode, SamplingTensors, gumbel

BACKENDS = (choose(torch.device("cpu")), TORCH)
OPTIONS = {"max_new_tokens": 24, "ignore_eos": True}
DRAFTERS = ("none", "dynamic", "chain", "ngram", "auto:dynamic", "eagle+ngram", "model:chain")


class Asked(NamedTuple):
    """A prompt and how it is sampled."""

    ids: list[int]
    sampling: Sampling
    seed: int


ASKED = [
    Asked([5, 17, 3, 40, 8, 22, 61], Sampling(), 0),
    Asked([9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45], Sampling(0.6, top_k=12), 2**40 + 3),
    Asked([12, 80, 3], Sampling(1.0, min_p=0.05), 5),
    Asked([61, 5, 17, 9], Sampling(0.8, top_p=0.7), 5),
    Asked([44], Sampling(1.0, top_k=40, top_p=0.9), 1),
    Asked([5, 17, 3, 40, 8, 22, 61], Sampling(1.0), 6),
    Asked([30, 31, 32, 33, 34], Sampling(), 9),
]


def per_prompt(asked: list[Asked]) -> dict[str, list]:
    """The options of `generate` for prompts that differ."""
    found = {
        name: [getattr(each.sampling, name) for each in asked]
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    return found | {"seed": [each.seed for each in asked]}


@cache
def alone(number: int) -> tuple[Engine, list[int]]:
    """Vanilla's engine with the parameters of one prompt, and its new tokens."""
    asked = ASKED[number]
    options = OPTIONS | asked.sampling._asdict() | {"seed": asked.seed}
    engine = engine_for(golden_target(), RootOnly(), **options)
    session = Session(engine, [(number, 0)])
    list(session.decode_turn([asked.ids]))
    return engine, session.history[0][len(asked.ids) :]


def check_alone(tokens: list[list[int]]) -> None:
    """Every answer is what vanilla decodes alone."""
    assert len(tokens) == len(ASKED)
    for number, new in enumerate(tokens):
        engine, want = alone(number)
        assert len(new) == OPTIONS["max_new_tokens"]
        assert_same(engine, ASKED[number].ids, new, want, (number, 0))


def decoded(engine: Engine) -> list[list[int]]:
    return generate(engine, [each.ids for each in ASKED], **per_prompt(ASKED)).tokens


def test_the_prompts_differ():
    texts = [tuple(alone(number)[1]) for number in range(len(ASKED))]
    assert len(set(texts)) == len(ASKED)


@pytest.mark.parametrize("drafter, batch", [
    ("none", 1), ("dynamic", 1), *((drafter, 3) for drafter in DRAFTERS),
    *slow((drafter, batch) for drafter in DRAFTERS for batch in (1, 2, 4)),
])  # fmt: skip
def test_a_mixed_batch_is_each_alone(drafter, batch):
    """Sequences come and go, so that greedy batches and sampled ones follow each other."""
    check_alone(decoded(engine_for(golden_target(), make(drafter), batch_size=batch, **OPTIONS)))


@pytest.mark.parametrize("loaded", [Sampling(1.0), Sampling(0.5, top_k=3)], ids=str)
def test_the_parameters_of_the_engine_do_not_matter(loaded):
    options = OPTIONS | loaded._asdict() | {"seed": 99}
    check_alone(decoded(engine_for(golden_target(), make("dynamic"), batch_size=3, **options)))


@pytest.mark.parametrize("drafter", ["none", "dynamic"])
def test_plain_operations_do_the_same(drafter, monkeypatch):
    """Without C++ operators, as on CUDA without its compiler."""
    monkeypatch.setattr("backends.library._cpp_available", [False])
    check_alone(decoded(engine_for(golden_target(), make(drafter), batch_size=3, **OPTIONS)))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("drafter", ["none", *slow(["chain", "dynamic"])])
def test_captured_cycles_do_the_same(drafter, monkeypatch):
    """The steps as on CUDA, over buffers that stay, with reports that come late."""
    monkeypatch.setattr("run.scheduler.Session", lambda engine: Session(engine, host_lag=1))
    engine = engine_for(golden_target(), make(drafter), batch_size=3, **OPTIONS)
    check_alone(decoded(compiled_as_on_cuda(engine)))


def test_where_all_are_greedy_nothing_is_sampled(monkeypatch):
    """Neither in an engine that was loaded to sample, nor beside a sequence that has ended."""
    engine = engine_for(golden_target(), make("dynamic"), batch_size=2, temperature=1.0, **OPTIONS)
    noise = record(monkeypatch, sampling, "gumbel")
    cuts = record(monkeypatch, sampling.SamplingTensors, "cut")
    generate(engine, [[5, 17, 3], [9, 33]], temperature=0)
    assert not noise and not cuts
    session = Session(engine)
    session.configure(0, Sampling(), 0)
    session.admit(0, [5, 17, 3], (0, 0))
    session.admit(1, [9, 33], (1, 0), max_new_tokens=2)
    while session.busy(1):
        session.step()
    sampled = len(noise)
    while session.busy(0):
        session.step()
    assert sampled > 0 and len(noise) == sampled


def test_a_later_turn_keeps_the_parameters():
    """A conversation's own noise goes on; the next conversation of the place has others."""
    turns = ["def f(x):", " and then"]
    engine = program.load(checkpoint=DEMO, device="cpu", max_new_tokens=8, batch_size=2)
    options = {"temperature": [0.0, 1.0, 0.7], "seed": [1, 2, 3]}
    prompts = [turns, ["import ", " as"], turns]
    together = generate(engine, prompts, **options)
    for number in range(3):
        own = {name: values[number] for name, values in options.items()}
        single = generate(
            engine, [[prompt[0]] for prompt in prompts[:number]] + [prompts[number]], **own
        )
        assert single.tokens[-2:] == together.tokens[2 * number : 2 * number + 2]


def test_the_residual_rule_takes_parameters_too():
    """The text depends on the drafter there; with the same one it is the same alone."""
    drafter = sample_children(EagleDrafter(golden_head(), golden_target(), TREES["chain"]))
    options = {"accept": "residual", "temperature": 0.6, **OPTIONS}
    asked = ASKED[1:6]
    prompts = [each.ids for each in asked]
    one = engine_for(golden_target(), drafter, **options)
    want = generate(one, prompts, **per_prompt(asked)).tokens
    three = engine_for(golden_target(), drafter, batch_size=3, **options)
    assert generate(three, prompts, **per_prompt(asked)).tokens == want
    with pytest.raises(ValueError, match="--accept residual needs a temperature above 0"):
        generate(one, prompts, temperature=[1.0, 1.0, 0.0, 1.0, 1.0])


# ------------------------------------------------------------------------------------- the operators


@pytest.mark.parametrize("backend", BACKENDS, ids=["ours", "plain"])
def test_a_row_is_cut_by_its_own_parameters(backend):
    """To the bit, whatever the kind of the step and the other rows; a greedy one's scores stay as they are."""
    rules = [each.sampling for each in ASKED]
    logits = 4 * torch.randn(len(rules), 3, 997, generator=torch.Generator().manual_seed(0))
    together = SamplingTensors.from_params(rules).cut(logits, backend)
    for row, own in enumerate(rules):
        if own.temperature == 0:
            assert torch.equal(together[row], logits[row])
            continue
        rule = SamplingTensors.from_params([own]).needed(SamplingMode.needed_by(own))
        assert torch.equal(together[row : row + 1], rule.cut(logits[row : row + 1], backend))
    sampled = [
        row for row, own in enumerate(rules) if SamplingMode.needed_by(own) == SamplingMode.NOISY
    ]
    uncut = SamplingTensors.from_params(rules).needed(SamplingMode.NOISY).cut(logits, backend)
    assert torch.equal(uncut[sampled], together[sampled]) and sampled


@pytest.mark.parametrize("backend", BACKENDS, ids=["ours", "plain"])
def test_a_greedy_row_has_no_noise(backend):
    greedy = torch.tensor([False, True, False])
    seeds = torch.tensor([[1, 0], [2, 0], [3, 0]])
    key = SamplingTensors(seeds, torch.arange(3), torch.zeros(3, dtype=torch.long), greedy)
    first = torch.tensor([4, 5, 6])
    noise = gumbel(key, first, 2, 130, backend=backend)
    assert not noise[1].any()
    everywhere = gumbel(key._replace(greedy=None), first, 2, 130, backend=backend)
    assert torch.equal(noise[~greedy], everywhere[~greedy]) and everywhere[1].all()


def test_a_temperature_near_zero_is_greedy():
    """Scores stay finite, where dividing by it would overflow."""
    engine = engine_for(golden_target(), make("dynamic"), **OPTIONS)
    found = generate(engine, [ASKED[0].ids] * 3, temperature=[1e-300, 1e-38, 1e-9]).tokens
    assert found == [alone(0)[1]] * 3


def test_each_prompt_has_its_own_biases():
    engine = program.load(DEMO, device="cpu", draft="none", max_new_tokens=2, ignore_eos=True)
    biases = [{3: 100}, '{"4": 100}', {}]
    assert generate(engine, [[1]] * 3, logit_bias=biases).tokens[:2] == [[3, 3], [4, 4]]


# --------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize("options, message", [
    ({"temperature": -1}, "--temperature must be at least 0; it is -1"),
    ({"temperature": [0.0, "hot"]}, "--temperature must be a number; it is 'hot'"),
    ({"temperature": [0.0, float("nan")]}, "--temperature must be a number; it is nan"),
    ({"temperature": [0.0]}, "temperature has 1 values, and there are 2 prompts"),
    ({"top_k": [5, 2.5]}, "--top_k must be a whole number; it is 2.5"),
    ({"top_k": 2**31}, "--top_k must be at most"), ({"top_k": True}, "--top_k must be a whole number"),
    ({"top_p": [0.5, 0]}, r"--top_p must be in \(0, 1\]; it is 0"), ({"top_p": None}, "--top_p must be a number"),
    ({"seed": [1, -1]}, "--seed must be at least 0"), ({"seed": 2**64}, "--seed must be at most"),
    ({"logit_bias": [{3: 1}, 6]}, "logit_bias must be a text; it is 6"),
    ({"max_new_tokens": [1, 2]}, r"max_new_tokens is one number for all prompts; it is \[1, 2\]"),
    ({"min_p": [0, 1.5]}, "--min_p must be at most 1; it is 1.5"), ({"mirostat": 2}, "there is no option mirostat"),
])  # fmt: skip
def test_wrong_parameters_are_refused_by_name(options, message):
    engine = engine_for(golden_target(), RootOnly(), **OPTIONS)
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(engine, [[1], [2]], **options)
