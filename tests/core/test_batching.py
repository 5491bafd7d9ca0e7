"""Rows of a session: passes that they share and do not share, and the memory of their caches.

Texts of rows that take one request after the other: test_requests.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from drafters import RootOnly
from files.memory import check_memory
from helpers import (
    engine_for,
    golden_run,
    golden_target,
    record,
)
from run.load import load
from run.options import DEMO, GenerateConfig
from run.session import Session
from run.stats import sequence_memory
from steps import Attend

DEMO_IN_BF16 = {"checkpoint": DEMO, "device": "cpu", "seed": 5}
# 16 to 60 tokens
IDS = [[(7 * i + i * i * k) % 97 for i in range(5 + 11 * k % 60)] for k in range(1, 8)]


def test_long_prompts_let_the_others_decode(monkeypatch):
    """At most about a chunk of prompts runs in a step, also where no row decodes."""
    monkeypatch.setattr("decode.PREFILL_CHUNK", 8)
    options = {"max_new_tokens": 60, "ignore_eos": True, "batch_size": 3}
    session = Session(engine_for(golden_target(), RootOnly(), **options))
    session.admit(0, list(range(20)))
    assert [[len(x) for x in session.step()] for _ in range(3)] == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]
    session.admit(1, list(range(20)))
    session.admit(2, [1, 2, 3])
    lengths = [[len(x) for x in session.step()] for _ in range(4)]
    assert lengths == [[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("busy, ran", [([0, 2], [0, 1, 2]), ([1], [1]), ([1, 2], [1, 2])])
def test_a_cycle_runs_from_the_first_busy_row_to_the_last(busy, ran, monkeypatch):
    """A row between them that is done reads none of its text."""
    session = golden_run(RootOnly(), *IDS[:3], max_new_tokens=3)
    for row in busy:
        session.admit(row, IDS[3 + row])
    session.step()
    calls = record(monkeypatch, Attend, "run")
    session.step()
    _, _, rows = calls[0].args
    starts = [len(IDS[3 + row]) if row in busy else 0 for row in ran]
    assert rows.windows[0].start.tolist() == starts


# -------------------------------------------------------------------------------------------- files


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "p.jsonl"
    rows = [{"id": f"f/{i}", "turns": [f"def f{i}("]} for i in range(8)]
    rows += [{"question_id": 81, "turns": ["def f():", "return"], "reference": []}]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


# ------------------------------------------------------------------------------------------- memory


def test_memory_says_how_many_rows_fit(monkeypatch, capsys):
    monkeypatch.setattr("files.memory.free_bytes", lambda device: 10**9)
    said = check_memory({"caches": 3 * 10**8}, "cpu", "lower it", 3)
    assert said == "3 sequences take 0.90 GB of memory; 3 would fit"
    said = r"caches 1.2 GB = 1.2 GB .* 1.0 GB are free, 0.2 GB are missing, enough for 3 of the 4 sequences; lower"
    with pytest.raises(ValueError, match=said):
        check_memory({"caches": 3 * 10**8}, "cpu", "lower it", 4)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options, context", [
    ({}, 1024), ({"batch_size": 2}, 512), ({"batch_size": 2, "compare": True}, 256),
    ({"kv": "int8"}, 1792),  # 1030 * 64 / 34, in whole steps of 256
    ({"context": 77}, 77),
], ids=str)  # fmt: skip
def test_the_default_context_goes_as_far_as_half_of_the_memory(
    monkeypatch, caplog, options, context
):
    """Of all caches together; 8 bits hold more tokens, and one line says that it is not the model's."""
    config = load(**DEMO_IN_BF16, draft="none").target.config
    token = 2 * 2 * config.n_kv_heads * config.head_dim * config.n_layers  # bytes
    monkeypatch.setattr("run.load.free_bytes", lambda device: 2 * token * 1030)
    caplog.clear()
    engine = load(GenerateConfig(**DEMO_IN_BF16, draft="none", **options))
    assert engine.context == min(context, config.max_context)
    said = [r.getMessage() for r in caplog.records if "the context is" in r.getMessage()]
    assert len(said) == (engine.context < config.max_context and "context" not in options)
    for line in said:
        assert line.startswith(f"the context is {context} tokens, whose cache takes half")
    monkeypatch.setattr("run.load.free_bytes", lambda device: 10**15)
    assert load(**DEMO_IN_BF16, draft="none").context == config.max_context


@pytest.mark.parametrize("spare", [0, -1])
def test_a_context_that_does_not_fit_is_refused_with_one_that_would(monkeypatch, spare):
    engine = load(**DEMO_IN_BF16, draft="none", context=512)
    plans = []
    with monkeypatch.context() as patch:
        patch.setattr("run.stats.check_memory", lambda plan, *rest: plans.append(plan))
        sequence_memory(engine)
    slot = plans[0]["the caches"] // engine.slots
    free = sum(plans[0].values()) - (100 + spare) * slot + spare
    for module in ("run.stats", "files.memory"):
        monkeypatch.setattr(f"{module}.free_bytes", lambda device: free)
    said = r"are missing; lower .*--context \(412 tokens would fit\)"
    with pytest.raises(ValueError, match=said):
        sequence_memory(engine)
    sequence_memory(replace(engine, context=412))
