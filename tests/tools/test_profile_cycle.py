"""The kernels of a cycle that `papers.py --profile` lists, and the cycles that `--replays` compares."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import generate
import options
from scripts.bench import profile_cycle
from scripts.bench.profile_cycle import CYCLE

CUDA = torch.autograd.DeviceType.CUDA


def event(name, start, end, *children, device=torch.autograd.DeviceType.CPU):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    made = SimpleNamespace(
        name=name, time_range=span, cpu_children=children, cpu_parent=None, device_type=device
    )
    for child in children:
        child.cpu_parent = made
    return made


def test_kernels_in_their_order_with_the_gaps_before_them():
    spans = {"mm": (30, 40), "late": (41, 42), "early": (35, 39), f"{CYCLE} 1": (0, 99)}
    events = [event(name, *span, device=CUDA) for name, span in spans.items()]
    events += [event("aten::mm", 0, 9), event(CYCLE, 20, 45)]
    # of a dummy before the cycle, and of another clock
    events += [event("dummy", *span, device=CUDA) for span in ((5, 6), (1e11, 1e11 + 1), (-9, -8))]
    ran = profile_cycle.spans(events, "cuda:0")
    assert ran == [
        ("mm", 10, 0.0),
        ("early", 4, -5),
        ("late", 1, 1),
    ]  # the second began 5 us before the first ended
    assert profile_cycle.busy_us(ran) == 11
    table = profile_cycle.replay_table([*ran, profile_cycle.Span("late", 3, 2)])
    assert "| late | 2 | 4.0 | 2.00 | 3.0 |\n" in table and table.endswith(
        "    2.00     3.00  late"
    )
    on_cpu = event(
        CYCLE,
        0,
        9,
        event("gpt_eagle::model", 0, 9, event("aten::mm", 1, 3, event("aten::empty", 2, 3))),
    )
    assert profile_cycle.spans([on_cpu], "cpu") == [("aten::mm", 2, 0.0)]


class Replayed:
    """In the place of a GPU's profile: two cycles, of which some records may be lost."""

    devices = []
    records = []

    def __init__(self, device):
        self.devices.append(device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def events(self):
        cycles = [event(CYCLE, 100, 150), event(CYCLE, 200, 250)]
        dummies = [event("dummy", 10, 11, device=CUDA)]
        return cycles + dummies + [event(*record, device=CUDA) for record in self.records]


def test_the_profile_of_a_cycle_is_whole_or_fails(monkeypatch):
    """Dummies take the first records, and two cycles must agree: a kernel that is missing is noticed."""
    ran = []
    session = SimpleNamespace(time_cycle=lambda preset: ran.append("cycle"))
    monkeypatch.setattr(profile_cycle, "warm_session", lambda engine, ids: (session, 0))
    monkeypatch.setattr(profile_cycle, "profiler_of", Replayed)
    monkeypatch.setattr(profile_cycle, "run_dummies", lambda: ran.append("dummies"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("wait"))
    engine = SimpleNamespace(config=SimpleNamespace(device="cuda"))
    Replayed.records = [("a", 110, 120), ("b", 121, 125), ("a", 210, 220), ("b", 223, 225)]
    assert profile_cycle.one_replay(engine, [1]) == [("a", 10, 0.0), ("b", 2, 3)]
    assert ran == ["dummies", "cycle", "wait", "cycle", "wait"] and Replayed.devices == ["cuda"]
    for lost in range(4):
        Replayed.records = [("a", 110, 120), ("b", 121, 125), ("a", 210, 220), ("b", 223, 225)]
        del Replayed.records[lost]
        with pytest.raises(AssertionError, match="lost records, or two cycles differ: 3 kernels"):
            profile_cycle.one_replay(engine, [1])


def test_replays_that_differ_are_counted(monkeypatch, capsys):
    engine = generate.load(checkpoint=options.DEMO, draft="none", device="cpu", max_new_tokens=16)
    time_cycle, runs = profile_cycle.Session.time_cycle, []

    def sometimes(session, preset):
        seconds = time_cycle(session, preset)
        runs.append(seconds)
        if len(runs) in (6, 8):  # of 3 to warm up, the first, and 5 replays
            session.state.tokens[0, -2] += 1
        return seconds

    monkeypatch.setattr(profile_cycle.Session, "time_cycle", sometimes)
    with pytest.raises(AssertionError, match="2 of 5 replays differ"):
        profile_cycle.look_closer("none", engine, [5, 17, 3], False, 5)
    assert len(runs) == 9
    assert capsys.readouterr().out == "one cycle of none: 2 of 5 replays differ\n"
