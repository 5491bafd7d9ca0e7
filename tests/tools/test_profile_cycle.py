"""The profile of a cycle: where events are counted, that the parts add up, and mistakes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import generate
import options
from scripts.bench import profile_cycle
from scripts.bench.profile_cycle import CYCLE, PYTHON, STEP, ProfileConfig

CUDA = torch.autograd.DeviceType.CUDA


def event(name, start, end, *children, device=torch.autograd.DeviceType.CPU):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    made = SimpleNamespace(
        name=name, time_range=span, cpu_children=children, cpu_parent=None, device_type=device
    )
    for child in children:
        child.cpu_parent = made
    return made


def test_products_belong_to_the_step_they_run_in_and_wrappers_to_nobody():
    draft = event(STEP + "draft", 0, 10, event("gpt_eagle::w4a8", 1, 8), event("aten::fill_", 8, 9))
    inside = event("gpt_eagle::linear", 11, 16), event("gpt_eagle::attention", 16, 18)
    verify = event(STEP + "verify", 10, 20, event("gpt_eagle::model", 11, 19, *inside))
    product = event("aten::mm", 30, 50, event("aten::empty", 31, 40))
    extend = event(STEP + "extend", 20, 90, product)
    cycle = event(CYCLE, 0, 100, draft, verify, extend, event("aten::mm", 91, 94))
    parts = profile_cycle.host_parts([cycle, verify, product])
    want = {
        "products": 3,
        profile_cycle.TARGET: 5,
        profile_cycle.DRAFT: 27,
        "attention": 2,
        "other operators": 1,
    }
    assert {line: round(1e6 * seconds) for line, seconds in parts.items()} == want


def test_an_operator_that_was_interrupted_once_does_not_count():
    cycles = [
        event(CYCLE, 0, 999, event("aten::mm", 0, 5), event("aten::mm", 5, 5 + us))
        for us in (20, 900, 22)
    ]
    parts = profile_cycle.host_parts(cycles + [event(CYCLE, 0, 9) for _ in range(3)])
    assert round(1e6 * parts["products"], 1) == (5 + 22) / 2


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gpt_eagle::attention", "attention"),
        ("gpt_eagle::topk", "top-k and logsumexp of the vocabulary"),
        ("gpt_eagle::next_level", "top-k and logsumexp of the vocabulary"),
        ("gpt_eagle::rerank", "building the tree"),
        ("gpt_eagle::accept", "choice, acceptance, compaction"),
        ("gpt_eagle::advance", "choice, acceptance, compaction"),
        ("gpt_eagle::gumbel", "noise"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_7", "norms, rotary, SiLU, cache writes"),
        ("triton_poi_fused_mul_silu_split_w4a8_3", "norms, rotary, SiLU, cache writes"),
        (
            "triton_poi_fused_add_cat_cos_index_put_mul_sin_tree_attention_1",
            "norms, rotary, SiLU, cache writes",
        ),
        ("gpt_eagle::rotary", "norms, rotary, SiLU, cache writes"),
        ("add_norm_kernel", "norms, rotary, SiLU, cache writes"),
        ("gpt_eagle::norm", "norms, rotary, SiLU, cache writes"),
        ("triton_poi_fused_add_bitwise_and_bitwise_xor_log1p_neg_0", "noise"),
        ("aten::bmm", "building the tree"),
        ("gpt_eagle::move_rows", "choice, acceptance, compaction"),
        ("compact_kernel", "choice, acceptance, compaction"),
        ("experts_kernel", "products"),
        ("lists_kernel", "products"),
        ("triton_poi_fused_add_argmax_index_put_4", "choice, acceptance, compaction"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("aten::fill_", "other operators"),
    ],
)
def test_names(name, part):
    assert profile_cycle.part_of(name, "") == part


def test_kernels_of_a_device_overlap_and_leave_gaps():
    spans = [(0, 10), (8, 12), (9, 11), (20, 25), (25, 26)]
    found = profile_cycle.device_kernels(
        [event(CYCLE, 0, 30), *(event("matmul_kernel", *span, device=CUDA) for span in spans)]
    )
    assert found.count == 5 and [round(1e6 * gap) for gap in found.gaps_s] == [8]
    assert round(1e6 * found.busy_s) == 18 and round(1e6 * found.parts["products"]) == 22


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
    engine = SimpleNamespace(device=torch.device("cuda"))
    Replayed.records = [("a", 110, 120), ("b", 121, 125), ("a", 210, 220), ("b", 223, 225)]
    assert profile_cycle.one_replay(engine, [1]) == [("a", 10, 0.0), ("b", 2, 3)]
    assert ran == ["dummies", "cycle", "wait", "cycle", "wait"] and Replayed.devices == ["cuda"]
    for lost in range(4):
        Replayed.records = [("a", 110, 120), ("b", 121, 125), ("a", 210, 220), ("b", 223, 225)]
        del Replayed.records[lost]
        with pytest.raises(AssertionError, match="lost records, or two cycles differ: 3 kernels"):
            profile_cycle.one_replay(engine, [1])


def test_the_parts_add_up(tmp_path, capsys):
    out = tmp_path / "where.json"
    profile_cycle.run(
        ProfileConfig(
            cycles=3,
            rounds=2,
            tree="dynamic",
            tree_size=16,
            temperature=1.0,
            device="cpu",
            json=str(out),
        )
    )
    found = json.loads(out.read_text())
    assert (
        sum(found["parts_ms"].values()) == pytest.approx(found["wall_ms"][0])
        and found["parts_ms"][PYTHON] >= 0
    )
    lines = (
        profile_cycle.TARGET,
        profile_cycle.DRAFT,
        "attention",
        profile_cycle.NOISE,
        profile_cycle.TREE,
    )
    assert all(found["parts_ms"][line] > 0 for line in lines)
    assert found["config"]["tree"] == "dynamic" and found["tokens_per_cycle"] > 1
    assert f"| cycle | {found['wall_ms'][0]:.3f} | 100.0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cycles": 0}, "--cycles must be at least 1; it is 0"),
        ({"compare": True}, "--compare does nothing here; drop it, or run generate.py"),
        ({"cycles": 500}, "--cycles 500 may decode 3500 tokens"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        profile_cycle.run(ProfileConfig(device="cpu", **options))


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
