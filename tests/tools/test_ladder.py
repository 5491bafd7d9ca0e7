"""The programs of a call on a GPU machine, walked on a CPU: the ladder, its table, and the parts."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from backends.library import set_plain
from helpers import refused
from run.options import ROOT
from scripts.bench import plot_speed
from scripts.bench.row_log import Log
from scripts.gpu import attempts, beside, ladder, probe, table


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    """Every test starts and ends with all of our operators."""
    yield
    set_plain(())


def climb(file, *flags):
    """Run the ladder in this process. Returns: its exit status and the rows of its log."""
    with pytest.MonkeyPatch.context() as patch:
        command = ["ladder.py", "--dry_run", "--json", str(file), *flags]
        patch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            ladder.main()
    return end.value.code or 0, [json.loads(line) for line in file.read_text().splitlines()]


def test_a_dry_run_climbs_every_rung_and_hides_no_failure(tmp_path, monkeypatch, capsys):
    """One rung fails by all methods; it is recorded with its tracebacks, and the others are measured."""
    chosen = []
    real = ladder.set_rung

    def set_rung(rung, plain):
        chosen.append(rung)
        assert plain == {"norm"}
        if rung == ladder.RUNGS["compiled"]:
            raise RuntimeError("no compiler\nat all")
        real(rung, plain)

    monkeypatch.setattr(ladder, "set_rung", set_rung)
    log = tmp_path / "ladder.jsonl"
    status, rows = climb(log, "--plain", "norm")
    assert status == attempts.FAILED
    ended = [row for row in rows if "begun" not in row]
    assert [row["group"] for row in ended[::3]] == ladder.NAMES
    assert [row["name"] for row in ended[:3]] == ["vanilla", "tree", "chain"]
    assert chosen == [rung for rung in ladder.RUNGS.values() for _ in range(3)]
    failed = [row for row in ended if "error" in row]
    assert [row["group"] for row in failed] == ["compiled"] * 3
    assert failed[0]["error"] == "RuntimeError: no compiler"
    assert "in set_rung" in failed[0]["traceback"]
    rates = [row for row in ended if "tokens_per_s" in row]
    assert len(rates) == 3 * 5
    assert all(len(row["tokens"][0]) == 8 and not row["fault"] for row in rates)
    assert {len(row["tokens"]) for row in rates} == {1} and rates[1]["tau"] > rates[0]["tau"] == 1
    # the same command has nothing left to do, and loads nothing
    monkeypatch.setattr(ladder, "Climb", None)
    assert climb(log, "--plain", "norm")[0] == attempts.FAILED
    printed = "\n".join(table.table(tmp_path))
    assert "| none | 0 | 1 | captured, PyTorch alone | vanilla | " in printed
    assert "FAILED none, T = 0, batch of 1, compiled, chain: RuntimeError: no compiler" in printed
    assert "HUNG" not in printed


def test_the_gap_is_that_of_the_first_different_token(tmp_path):
    """Scores of the target itself, behind the tokens of the other decoding."""
    config = ladder.LadderConfig(device="cpu", inflate="none", dry_run=True, tokens=4)
    given = attempts.Attempts(Log("", ""), {}, 60, int)
    climbing = ladder.Climb(config, given)
    engine = climbing.loaded("vanilla")
    mine, other = [[5, 6, 7]], [[5, 9, 7]]
    assert ladder.widest_gap(engine, climbing.prompts, mine, mine) is None
    ids = ladder.first_ids(engine, climbing.prompts) + [5]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        features = engine.target(tokens, torch.arange(len(ids))[None])[:, -1:]
        best = engine.target.logits(features).flatten().sort(descending=True).values
    gap = ladder.widest_gap(engine, climbing.prompts, mine, other)
    assert gap == pytest.approx(float(best[0] - best[1])) and gap > 0


# ------------------------------------------------------------------------------ attempts

LOSING = """
import sys
from scripts.bench.row_log import Log
from scripts.gpu.attempts import Attempts
lost = []
def use():
    assert not lost, "an illegal memory access was encountered"
tries = Attempts(Log(sys.argv[1], "--json"), {"part": "p"}, 60, use)
for group in tries.left(["one", "two", "three"]):
    tries.run(group, "a", lambda: lost.append(1) if group == "two" else {"text": group})
    tries.run(group, "b", lambda: {"text": group})
assert "torch" not in sys.modules
tries.finish()
"""


def test_a_lost_device_ends_its_group_only(tmp_path):
    log = tmp_path / "log.jsonl"
    code = LOSING.replace("lost.append(1) if", "lost.append(1) or {} if")
    command = [sys.executable, "-c", code, str(log)]
    statuses = [subprocess.run(command, cwd=ROOT, capture_output=True).returncode for _ in range(2)]
    assert statuses == [attempts.LOST, attempts.FAILED]
    rows = Log(str(log), "").rows
    assert [row["group"] for row in rows if "text" in row] == ["one", "one", "three", "three"]
    assert [row["group"] for row in rows if row.get("lost")] == ["two"]


HANGING = """
import sys
import time
from scripts.bench.row_log import Log
from scripts.gpu.attempts import Attempts
tries = Attempts(Log(sys.argv[1], "--json"), {"part": "p"}, 1, int)
def hangs():
    time.sleep(60)
for group in tries.left(["one", "two"]):
    tries.run(group, "a", hangs if group == "one" else dict)
tries.finish()
"""


def test_a_hang_is_cut_and_the_same_command_goes_on_behind_it(tmp_path):
    command = [sys.executable, "-c", HANGING, str(tmp_path / "ladder.jsonl")]
    first, second = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    ]
    assert first.returncode not in (0, 2, attempts.FAILED)
    assert "Timeout" in first.stderr and "in hangs" in first.stderr
    assert second.returncode == attempts.FAILED and "'group': 'two'" in second.stdout
    assert "HUNG or died: one, a; its stacks are in log.txt" in table.table(tmp_path)


def test_a_family_of_kernels_that_fails_hides_no_other(tmp_path, monkeypatch):
    """And the ladder's call learns which ones PyTorch has to replace."""

    def wrong(device):
        return 0.5

    def broken(device):
        raise RuntimeError("no image")

    checks = {"norm": wrong, "topk": lambda device: 0.0, "tree": broken}
    monkeypatch.setattr("scripts.gpu.families.CHECKS", checks)
    monkeypatch.setattr(probe, "CHECKS", checks)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(probe, "pick_device", lambda device: "cuda")
    with pytest.raises(SystemExit) as end:
        probe.probe(probe.ProbeConfig("families", json=str(tmp_path / "probes.jsonl")))
    assert end.value.code == attempts.FAILED
    assert table.wrong_families(tmp_path) == ["norm", "tree"]
    printed = "\n".join(table.table(tmp_path))
    assert "family topk: right" in printed and "the relative error is 0.5" in printed


def test_one_run_makes_the_rows_of_readme(tmp_path):
    """Those without a fault, at T = 0, of the highest rung, beside others in the same groups."""
    base = {
        "quant": "int4",
        "group_size": 0,
        "inflate": "llama2-7b",
        "temperature": 0.0,
        "batch_size": 1,
    }
    base |= {"group": "captured", "tau": 6.0, "fault": ""}
    ladder_rows = [
        base | {"name": "vanilla", "tokens_per_s": 400.0, "cycle_ms": 2.5},
        base | {"name": "vanilla", "tokens_per_s": 500.0, "cycle_ms": 2.0, "group": "compiled"},
        base | {"name": "vanilla", "tokens_per_s": 700.0, "cycle_ms": 1.4, "temperature": 1.0},
        base | {"name": "tree", "tokens_per_s": 1500.0, "cycle_ms": 4.0},
        base | {"name": "chain", "tokens_per_s": 900.0, "cycle_ms": 3.0, "fault": "differs"},
        base | {"name": "vanilla", "tokens_per_s": 300.0, "cycle_ms": 3.3, "group_size": 32},
    ]  # fmt: skip
    beside_rows = [
        {"shape": "llama2-7b", "name": name, "tokens_per_s": rate}
        for name, rate in (("transformers", 39.0), ("gptfast-int4", 294.0), ("gptfast-int4-128", 310.0))
    ]  # fmt: skip
    facts = {"group": "facts", "date": "2026-11-28", "nvidia_smi": "NVIDIA H200, 580.1"}
    for name, rows in (("probes", [facts]), ("ladder", ladder_rows), ("beside", beside_rows)):
        Log(str(tmp_path / f"{name}.jsonl"), name).add(rows)
    kl = [{"row": "--quant int4", "kl": 0.03}]
    (tmp_path / "fidelity.json").write_text(json.dumps({"fidelity": kl}))
    table.write_speed(tmp_path, str(tmp_path / "gpu.json"), "1a2b3c4")
    rows = plot_speed.read_rows(tmp_path / "gpu.json")
    assert {(row["machine"], row["date"], row["commit"]) for row in rows} == {
        ("NVIDIA H200", "2026-11-28", "1a2b3c4")
    }
    rates = {(row["format"], row["engine"]): (row["tokens_per_s"], row.get("tau")) for row in rows}
    wide = "int4, groups of 128 (KL 0.0300)"
    assert rates == {
        ("bf16", "transformers"): (39.0, None),
        (wide, "gpt-fast"): (310.0, None),
        (wide, "gpt-eagle, no draft"): (500.0, None),
        (wide, "gpt-eagle, tree of 32"): (1500.0, 6.0),
        (wide, "gpt-eagle, tree of 32 at EAGLE-2's tau"): (1162.5, 4.65),
        ("int4, groups of 32", "gpt-fast"): (294.0, None),
        ("int4, groups of 32", "gpt-eagle, no draft"): (300.0, None),
    }


# ------------------------------------------------------------------------------ the parts


def call(tmp_path, *command, **variables):
    """Run a command of bash on a CPU, and what it says where it ends well."""
    given = {"OUT": str(tmp_path / "out"), "DEVICE": "cpu", "PY": sys.executable}
    done = subprocess.run(
        ["bash", *command], cwd=ROOT, text=True, capture_output=True, env=os.environ | given | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_parts_end_in_time_are_tried_again_and_named(tmp_path):
    there = tmp_path / "there"
    tries = f"again tries 20 bash -c 'test -e {there} && exit 4; touch {there}; exit 1'"
    code = f"part slow 5 sleep 30; {tries}; part well 9 true; part wrong 9 false;"
    code = f"source scripts/gpu/call.sh; {code} LIMIT=1; part late 9 true; echo $FAULTS"
    lines = call(tmp_path, "-c", code).splitlines()
    assert re.fullmatch("== slow: [0-9]+ s, exit status 124", lines[0])
    assert [line.split(" s, ")[1] for line in lines[1:5]] == [
        f"exit status {status}" for status in (1, 4, 0, 1)
    ]
    assert lines[5].startswith("== late: not begun") and lines[6:] == ["slow tries wrong late"]
    assert (tmp_path / "out" / "summary.txt").read_text().count("== tries") == 2
    assert "$ sleep 30" in (tmp_path / "out" / "log.txt").read_text()


def test_the_call_names_programs_and_tests_that_are_there():
    found = re.findall(
        r"(?:scripts|tests)/\w+/\w+\.\w+", (ROOT / "scripts/gpu/call.sh").read_text()
    )
    assert len(found) > 5 and all((ROOT / word).is_file() for word in found), found


@pytest.mark.slow  # two minutes: all parts of the first call
def test_the_first_call_on_a_cpu(tmp_path):
    said = call(tmp_path, "scripts/gpu/call.sh", LIMIT="600", BF16="0,3,5", INT8="5")
    lines = said.splitlines()
    assert lines[-1].endswith("faults: none"), said
    rates = [line for line in lines if line.startswith(("| none", "| int"))]
    assert len(rates) == 3 * (3 + 2 + 1)


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("program,flags,message", [
    (ladder, ["--rungs", "0,9"], "ladder.py: --rungs takes numbers from 0 to 5, as 0,3; it is '0,9'"),
    (ladder, ["--plain", "norms"], "ladder.py: --plain: there is no norms; use of attention, compact"),
    (ladder, ["--methods", "medusa"], "ladder.py: --methods: there is no 'medusa'; use of vanilla, tree, chain, lookup"),
    (beside, ["--what", "vllm"], "beside.py: --what: there is no vllm; use of transformers"),
    (beside, ["--what", "gptfast-int4", "--gpt_fast", "nowhere"], "beside.py: --gpt_fast: nowhere has no model.py, quantize.py, generate.py, LICENSE; copy them"),
    (beside, [], "beside.py: --device cuda: there is no CUDA device; use --device cpu --small"),
    (probe, ["--probe", "facts,fast"], "probe.py: --probe: there is no fast; use facts, capture"),
    (probe, ["--probe", "families", "--device", "cpu"], "probe.py: --probe families checks kernels of CUDA"),
    (table, [".", "--speed", "gpu.json"], "table.py: --speed needs --commit, that of the run"),
    (table, [".", "--speed", "gpu.json", "--commit", "1a"], "table.py: . has no row of facts; begin"),
    (table, ["nowhere"], "table.py: there is no folder 'nowhere'; name that of the results"),
])  # fmt: skip
def test_mistakes_are_one_line(program, flags, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["program", *flags])
    assert refused(capsys, program.main).startswith(message)
