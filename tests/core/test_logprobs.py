"""Log-probabilities of decided tokens: the target's own at temperature 1, the same with every drafter."""

from __future__ import annotations

import pytest
import torch
from test_lossless import make

from drafts.logprobs import Logprob, Logprobs
from helpers import engine_for, fresh, golden_target
from run.engine import Engine
from run.options import Sampling
from run.session import Session

DRAFTERS = ("none", "dynamic", "chain", "ngram", "auto:dynamic", "model:chain")
IDS = [5, 17, 3, 40, 8, 22, 61]
OTHER = [9, 33, 2, 71, 54]
RULES = {"greedy": Sampling(), "sampled": Sampling(0.8, top_k=20, top_p=0.9)}
OPTIONS = {"max_new_tokens": 24, "ignore_eos": True, "batch_size": 2}


def scored(
    engine: Engine, rule: Sampling, likeliest: int, host_lag: int = 0
) -> tuple[list[int], list[Logprob]]:
    """New tokens of one sequence and their log-probabilities, beside a sequence that asks for none."""
    session = Session(engine, host_lag=host_lag)
    logprobs = Logprobs(engine.target)
    session.observers.append(logprobs)
    for seq, prompt in enumerate((OTHER, IDS)):
        session.configure(seq, rule, 7)
        logprobs.want(seq, likeliest if seq else None)
        session.admit(seq, prompt, (seq, 0))
    tokens, found = [], []
    while session.busy(0) or session.busy(1):
        tokens += session.step()[1]
        assert logprobs.scored.keys() <= {1}
        found += logprobs.take(1)
        assert len(found) == len(tokens)
    return tokens, found


def check(engine: Engine, tokens: list[int], found: list[Logprob], likeliest: int) -> None:
    """The log-probabilities are the log-softmax of one pass over the whole text."""
    ids = torch.tensor([IDS + tokens])
    features = engine.target(ids, torch.arange(ids.shape[1])[None])
    want = engine.target.logits(features)[0, len(IDS) - 1 : -1].log_softmax(-1)  # [T, V]
    own = torch.tensor([each.own for each in found])
    torch.testing.assert_close(own, want.gather(1, ids[0, len(IDS) :, None])[:, 0], **CLOSE)
    for each, row in zip(found, want):
        assert len(each.top) == likeliest
        best = torch.tensor([logprob for _, logprob in each.top])
        torch.testing.assert_close(best, row.topk(likeliest).values, **CLOSE)
        at = torch.tensor([id for id, _ in each.top], dtype=torch.long)
        torch.testing.assert_close(best, row[at], **CLOSE)


CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_they_are_the_targets_own(drafter, rule):
    engine = engine_for(golden_target(), make(drafter), **OPTIONS)
    for likeliest in (0, 3):
        check(engine, *scored(engine, RULES[rule], likeliest), likeliest)


@pytest.mark.parametrize("drafter", ["none", "dynamic"])
def test_captured_cycles_do_the_same(drafter):
    """As on CUDA: the features lie in buffers that the next cycle overwrites, the report comes late."""
    engine = fresh(engine_for(golden_target(), make(drafter), **OPTIONS), captured=True)
    check(engine, *scored(engine, RULES["sampled"], 2, host_lag=1), 2)
