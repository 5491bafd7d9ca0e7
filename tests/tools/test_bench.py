"""The benchmarks on the bundled demo: contents of logs, resuming, reports, peers, and mistakes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from files.weights import load_model
from helpers import GOLDEN, golden_case, refused, slow
from quantize import BLOCKS, Quantization
from run.generate import generate, load
from run.options import DEMO, ROOT
from run.session import Session
from scripts.bench import linear, passes, plot_speed, random_file
from scripts.bench import papers as bench
from scripts.bench import peers as bench_peers
from scripts.bench.llama_peer import LlamaCpp, check_drafted, write_gguf
from scripts.bench.measure import Outcome, Series, pass_bytes
from scripts.bench.papers import BenchConfig, Setting, acceptance, calibration, method_config
from scripts.bench.peers import FORMATS, LOOKUP, TokenClock
from scripts.bench.replays import compare_replays
from scripts.bench.report import DRAWINGS, explained
from scripts.bench.row_log import Log
from scripts.bench.tasks import EVAL, MBPP, UNRESOLVED, conversations
from tiny_models import IDS, by_passes

METHODS = "none,eagle:chain:tree_depth=3,eagle:dynamic"
TASKS = [
    {"id": "a-1", "task": "a", "turns": ["def read_lines(path):"]},
    {"id": "a-2", "task": "a", "turns": ["import os\n", "class Tree:"]},
    {"id": "a-3", "task": "a", "turns": ["for line in file:"]},
    {"id": "b-1", "task": "b", "turns": ["Question: What is 2 + 2?\nAnswer:"]},
]


@pytest.fixture(autouse=True)
def ceiling(monkeypatch):
    """A fixed bandwidth: measuring it takes seconds and a gigabyte."""
    fixed = lambda device, runs: Series(1e10, 1e10, 1e10)  # noqa: E731
    monkeypatch.setattr(bench, "read_bandwidth", fixed)
    monkeypatch.setattr(bench_peers, "read_bandwidth", fixed)


def write_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_in(folder: Path, **options) -> BenchConfig:
    """A small benchmark in fp32, where vanilla's tokens are everybody's."""
    plain = {"methods": METHODS, "dtype": "float32", "device": "cpu", "max_new_tokens": 8}
    plain["tasks"] = write_lines(folder / "tasks.jsonl", TASKS)
    plain |= {"traced": 2, "json": str(folder / "log.jsonl")}
    return BenchConfig(**(plain | options))


def command(monkeypatch, program, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", [program.__name__, *argv])
    program.main()


def failure(capsys, monkeypatch, program, *argv: str) -> str:
    return refused(capsys, command, monkeypatch, program, *argv)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A log of two tasks and three methods, and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "read_bandwidth", lambda device, runs: Series(1e10, 1e10, 1e10))
        bench.run(config_in(folder))
    return folder


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------ the log


def test_one_line_per_task_and_method(measured):
    rows = rows_of(measured)
    assert [(r["task"], r["method"]) for r in rows] == [
        (t, m) for t in "ab" for m in METHODS.split(",")
    ]
    assert not list(measured.glob("*.tmp"))
    for row in rows:
        plain, chain = row["method"] == "none", "chain" in row["method"]
        assert row["identical"] == 1.0 and row["speedup"] > 0 and row["tokens_per_s"] > 0
        assert row["tau"] == 1 if plain else row["tau"] > 1.5
        assert row["speedup"] == 1 if plain else row["speedup"] != 1
        assert (row["n_alpha"] is not None) == chain
        assert sum(row["histogram"]) == row["cycles"]
        assert row["tau"] == pytest.approx(
            1 + sum(n * c for n, c in enumerate(row["histogram"])) / row["cycles"]
        )
        assert min(row["draft_ms"], row["verify_ms"], row["rest_ms"]) >= 0
        split = row["draft_ms"] + row["verify_ms"] + row["rest_ms"]
        assert split * row["cycles"] / 1e3 == pytest.approx(row["decode_s"])
        nodes = [n for n, _, _ in row["calibration"]]
        assert sum(nodes) == 0 if plain else sum(nodes) >= 3
        assert row["config"]["checkpoint"] == "checkpoints/demo" and row["environment"]["threads"]
        assert row["prompts"] == (3 if row["task"] == "a" else 1) and row["runs"] == row["prompts"]


def test_tau_is_that_of_generate(measured):
    """But for tokens behind the end of an answer, which the papers' tau counts."""
    engine = load(checkpoint=DEMO, dtype="float32", device="cpu", max_new_tokens=8, tree="dynamic")
    stats = generate(engine, [row["turns"] for row in TASKS[:3]]).stats
    row = next(r for r in rows_of(measured) if r["task"] == "a" and r["method"] == "eagle:dynamic")
    accepted = sum(stats["accept_lengths"]) / stats["cycles"]
    assert row["tau"] == pytest.approx(1 + accepted) and row["cycles"] == stats["cycles"]
    assert stats["tau"] <= row["tau"]


def test_batches_count_the_same_and_keep_prompts_apart(measured, tmp_path):
    (row,) = bench.run(config_in(tmp_path, methods="eagle:dynamic", batch_sizes="3", limit=3))[:1]
    alone = next(
        r for r in rows_of(measured) if r["task"] == "a" and r["method"] == "eagle:dynamic"
    )
    assert row["histogram"] == alone["histogram"]
    assert row["speedup"] is row["identical"] is None
    assert row["cycles"] < alone["cycles"] and row["runs"] == 1
    # each length went to its own prompt
    assert row["tau_error"] == pytest.approx(alone["tau_error"]) and row["tau_error"] > 0


def test_a_killed_run_goes_on_at_its_task(tmp_path, monkeypatch, capsys):
    config = config_in(tmp_path, methods="none,eagle:static", limit=3)
    real, seen = bench.run_round, []

    def killed(collectors, number):
        seen.append(number)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(collectors, number)

    monkeypatch.setattr(bench, "run_round", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(config)
    log = tmp_path / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    rows = bench.run(config)
    # the second method of the first task was torn, and needs the first one beside it
    assert seen == [0, 1, 2, 0, 0, 1, 2, 0]
    assert len(rows) == 4 and rows[0]["runs"] == 3
    assert "line 2 is torn" in capsys.readouterr().err
    bench.run(config)
    assert len(seen) == 8, "nothing is left to measure"
    assert "holds 4 lines; 0 are to be measured" in capsys.readouterr().out


def test_a_method_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    """And the replays of one cycle of each method are compared."""
    real = bench.with_config

    def broken(engine, config):
        if config.tree == "static":
            raise RuntimeError("it does not compile\nfor a long reason")
        if config.draft == "ngram":
            raise ValueError("the text has too many tokens")
        return real(engine, config)

    monkeypatch.setattr(bench, "with_config", broken)
    methods = "none,eagle:static,ngram,eagle:chain:tree_depth=2:quant_draft=int4"
    config = config_in(tmp_path, methods=methods, limit=1, replays=3)
    failed = r"^eagle:static: RuntimeError: it does not compile \(the traceback is above\); ngram: the text has"
    with pytest.raises(ValueError, match=failed):
        bench.run(config)
    done = [row["method"] for row in rows_of(tmp_path)]
    assert done == 2 * ["none", "eagle:chain:tree_depth=2:quant_draft=int4"]
    out = capsys.readouterr().out
    for method in done[:2]:
        assert f"one cycle of {method}: 0 of 3 replays differ" in out
    monkeypatch.setattr(bench, "with_config", real)
    assert len(bench.run(config)) == 8, "only what failed is measured again"


def test_replays_that_differ_are_counted(monkeypatch, capsys):
    engine = load(checkpoint=DEMO, draft="none", device="cpu", max_new_tokens=16)
    time_cycle, runs = Session.time_cycle, []

    def sometimes(session, preset):
        seconds = time_cycle(session, preset)
        runs.append(seconds)
        if len(runs) in (6, 8):  # of 3 to warm up, the first, and 5 replays
            session.state.tokens[0, -2] += 1
        return seconds

    monkeypatch.setattr(Session, "time_cycle", sometimes)
    with pytest.raises(AssertionError, match="2 of 5 replays differ"):
        compare_replays("none", engine, [5, 17, 3], 5)
    assert len(runs) == 9
    assert capsys.readouterr().out == "one cycle of none: 2 of 5 replays differ\n"


def test_logs_that_cannot_be_resumed(measured, tmp_path):
    log = str(measured / "log.jsonl")
    config = replace(config_in(tmp_path), json=log, tasks="demo", max_new_tokens=9)
    with pytest.raises(ValueError, match="with --max_new_tokens 8, here 9; name another file"):
        bench.run(config)
    with pytest.raises(ValueError, match="line 1 is no line of papers.py"):
        bench.open_log(write_lines(tmp_path / "other.jsonl", [{"x": 1}]), "--json")
    (tmp_path / "broken.jsonl").write_text('{"x": 1\n{"x": 2}\n')
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        Log(str(tmp_path / "broken.jsonl"), "--json")


# ----------------------------------------------------------------------------------------- counting


def test_acceptance_is_the_official_count():
    for run in golden_case("eagle1_chain5_mha_alpha")["runs"]:
        facts = acceptance([run["accept_lengths"]], 5)
        assert facts["tau"] == pytest.approx(run["tau_mean_tokens_per_cycle"])
        tried = [(a, n) for a, n in zip(run["alpha"], run["alpha_num"]) if n]
        assert facts["by_depth"] == pytest.approx([a / n for a, n in tried])


def test_a_pass_of_a_mixture_reads_the_experts_of_one_token():
    target = load_model(GOLDEN / "models/target_mixtral", torch.float32)  # two of four experts
    embedding = target.embedding.weight
    assert target.lm_head.weight is not embedding
    every = sum(x.nbytes for x in (*target.parameters(), *target.buffers()))
    experts = sum(each.w13.weight.nbytes + each.w2.weight.nbytes for each in target.layers)
    unread = experts / 2 + embedding[1:].nbytes
    assert pass_bytes(target, 0) == pytest.approx(every - unread)


def test_calibration_counts_nodes_below_accepted_ones():
    first, second, third = (math.log(p) for p in (0.62, 0.12, 0.33))
    values = [first, second, first + third, second + third, None]
    row = {"parents": [0, 0, 1, 2, 0], "path": [1, 3], "values": values}
    counted = {n: one for n, one in enumerate(calibration([row])) if one[0]}
    # node 4 hangs on a rejected node, node 5 is padding
    assert {n: one[:2] for n, one in counted.items()} == {12: [1, 1], 2: [1, 0], 6: [1, 1]}
    assert sum(one[2] for one in counted.values()) == pytest.approx(0.62 + 0.12 + 0.33)
    assert not any(n for n, *_ in calibration([row | {"values": [None] * 5}]))


def test_values_of_a_trace_fall_along_paths_and_agree_between_trees():
    options = {"checkpoint": DEMO, "dtype": "float32", "device": "cpu", "max_new_tokens": 8, "trace": "-"}  # fmt: skip
    ids = [5, 17, 300, 40]
    trace = generate(load(tree="static", **options), [ids]).trace
    wide = generate(load(tree="dynamic", **options), [ids]).trace[0]

    def below_the_root(row) -> dict[int, float]:
        nodes = zip(row["draft_tokens"], row["values"], row["parents"])
        return {token: value for token, value, parent in nodes if parent == 0}

    for row in trace:
        values = [0.0, *row["values"]]
        assert all(value <= values[parent] for parent, value in zip(row["parents"], row["values"]))
    first, other = below_the_root(trace[0]), below_the_root(wide)
    shared = first.keys() & other.keys()
    assert shared
    assert [first[t] for t in shared] == pytest.approx([other[t] for t in shared], abs=1e-4)


# ----------------------------------------------------------------------------- methods and mistakes


def test_methods_become_options():
    setting = Setting("none", 1.0, 4)
    config = BenchConfig(options="top_p=0.9,ignore_eos")
    got = method_config("eagle:static:residual", setting, config)
    assert (got.draft, got.tree, got.accept) == ("eagle", "static", "residual")
    assert (got.temperature, got.batch_size) == (1.0, 4)
    assert got.top_p == 0.9 and got.ignore_eos
    got = method_config("eagle:dynamic:topk:tree_size=30:ignore_eos", setting, config)
    assert (got.tree, got.children, got.tree_size, got.ignore_eos) == ("dynamic", "topk", 30, True)


def test_all_methods_are_those_whose_files_are_there(tmp_path, capsys):
    models = GOLDEN / "models"
    config = BenchConfig(checkpoint=str(models / "target_llama_mha"), methods="all")
    greedy = Setting("none", 0.0, 1)
    plain = bench.methods_of(config, greedy)
    assert plain[:1] == ["none"] and "ngram" in plain and not any("eagle" in m for m in plain)
    (tmp_path / "a").symlink_to(models / "head_eagle12_mha")
    (tmp_path / "b").symlink_to(models / "target_llama_mha")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.json").write_text('{"medusa_num_heads": 3}')
    (tmp_path / "broken").mkdir()
    config = replace(config, heads=str(tmp_path))
    trees = ("chain:tree_depth=3", "static", "dynamic")
    more = [f"eagle:{tree}:head={tmp_path / 'a'}" for tree in trees]
    more += [f"model:chain:tree_depth=3:draft_checkpoint={tmp_path / 'b'}"]
    more += [f"medusa:{tree}:head={tmp_path / 'c'}" for tree in trees]
    assert bench.methods_of(config, greedy) == plain + more
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"note: left out of --methods all: {tmp_path / 'broken'}"), said
    for method in more:
        assert method_config(method, greedy, config).draft == method.partition(":")[0]
    sampled = bench.methods_of(config, Setting("none", 1.0, 1))
    residual = f"model:chain:tree_depth=3:residual:draft_checkpoint={tmp_path / 'b'}"
    assert set(sampled) - {*plain, *more} == {residual}


TASK = '{"id": "y", "task": "a", "turns": ["t"]}\n'
MISTAKES = [
    (bench, "--heads nowhere", "--heads must be a directory, and goes with --methods all; it is"),
    (bench, "--heads EMPTY --methods all", "has no head, draft model or datastore to measure"),
    (bench, "--methods none,telepathy", "argument --draft: invalid choice: 'telepathy'"),
    (bench, "--methods eagle:ring", "--methods: eagle:ring: ring is no tree"),
    (bench, "--methods eagle:static:tree_size=9", "NODES of --tree (tree_size) belongs to --tree dynamic"),
    (bench, "--options speed=9", "there is no option speed"),
    (bench, "--temperatures warm", "must be lists of numbers"),
    (bench, "--tasks riddles", "there is no riddles; name a JSONL file, or one of copy, demo, edit, gsm8k"),
    (bench, "--methods none,none", "--methods must be a list of different values"),
    (bench, "--traced 0", "--traced must be at least 1; it is 0"),
    (bench, "--json nowhere/log.jsonl", "--json: cannot write nowhere/log.jsonl"),
    (bench, "--report nowhere.jsonl", "the log holds no measurement"),
    (bench, "--report a.jsonl --json b.jsonl", "--report measures nothing"),
    (bench_peers, "--options ignore_eos,inflate=llama2-7b --peers transformers", "--options inflate= makes a stand-in that transformers does not have"),
    (bench_peers, "--peers vllm", "there is no vllm"),
    (bench_peers, "--peers none --options context=80 --max_new_tokens 64", "the context has room for 16; raise it"),
    (bench_peers, "--batch_sizes 1,2", "transformers:lookup decodes one prompt at a time; use 1, or leave it out of --peers"),
    (bench_peers, "--peers none --batch_sizes 7", "prompts; 7 does not: change --limit"),
    (bench_peers, "--batch_sizes 1,x", "from 1 on, as 1,4; it is '1,x'"),
    (bench_peers, "--peers llama.cpp:f16", "needs the package llama_cpp; pip install -r scripts/bench/requirements-peers.txt"),
    (passes, "--units none,all", "--units must be among none, hardware, emulation; 'all' is not"),
    (passes, f"--checkpoint {DEMO} --llama_cpp", "--llama_cpp needs a GGUF file; "),
    (passes, "--rows 1,x", "--rows must be numbers like 1,16,1200; it is '1,x'"),
    (linear, "--units none,all", "--units must be among none, hardware, emulation; all is"),
    (linear, "--shapes 64x576 --kinds Q4_1,Q4_K", "--kinds Q4_K needs inputs in multiples of 256; --shapes has 64x576"),
    *((bench, f"--tasks {text}", message) for text, message in [
        ('{"id": "x", "task": "a", "turns": ["t"]', "line 3 is not valid JSON"),
        ('{"id": "x", "task": "a", "turns": []}', "line 3: a row must be like"),
        ('{"task": "a", "turns": ["t"]}', "line 3: a row must be like"),
        ('{"question_id": 1, "category": "a", "messages": [{"role": "system", "content": "t"}]}', "line 3: a row must be like"),
        ('{"task_id": 1, "test_list": ["assert f()"]}', "line 3: a row must be like"),
        (json.dumps({"question_id": 1, "category": "a", "turns": [UNRESOLVED]}), "has no prompt yet"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("program, argv, message", MISTAKES)
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, program, argv, message):
    """A row of JSON stands for a file that has it in line 3."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    (tmp_path / "empty").mkdir()
    flags = argv.replace("EMPTY", str(tmp_path / "empty")).split()
    if "{" in argv:
        (tmp_path / "tasks.jsonl").write_text(f"{TASK}\n{argv.partition(' ')[2]}\n{TASK}")
        flags = ["--tasks", str(tmp_path / "tasks.jsonl")]
    assert message in failure(capsys, monkeypatch, program, *flags)


PUBLISHED = [  # a row as its data card shows it, its task, its turns
    ({"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []}, "writing", ["a", "b"]),
    ({"question_id": "9f", "category": "coding", "sub_category": "x", "turns": ["a"], "source": "s",
      "src_id": "1", "difficulty": "easy", "multiturn": False}, "coding", ["a"]),
    ({"question_id": "9f", "category": "qa",
      "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "qa", ["a", "b"]),
    ({"problem": "What is $1+1$?", "solution": "...", "answer": "2", "subject": "Algebra", "level": 1,
      "unique_id": "test/algebra/1.json"}, "math500", ["What is $1+1$?"]),
    ({"task_id": 11, "text": "Add.", "code": "c", "test_list": ["t1", "t2"]}, "mbpp", [MBPP.format("Add.", "t1\nt2")]),
    ({"task_id": 11, "prompt": "Add.", "test_imports": [], "test_list": ["t1"]}, "mbpp", [MBPP.format("Add.", "t1")]),
    ({"_id": "1", "dataset": "qasper", "context": "A text.", "input": "Why?", "length": 3, "answers": ["x"]},
     "qasper", ["A text.\n\nWhy?"]),
]  # fmt: skip


def test_published_layouts_by_path(tmp_path):
    """MT-bench, SPEED-Bench (both files), MATH-500, MBPP (both files) and LongBench; an array too."""
    expected: dict[str, list[list[str]]] = {}
    for _, task, turns in PUBLISHED:
        expected.setdefault(task, []).append(turns)
    rows = [row for row, _, _ in PUBLISHED]
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert conversations(lines) == conversations(str(tmp_path / "rows.json")) == expected
    assert list(bench.read_tasks(BenchConfig(tasks=lines, limit=1)).values()) == [
        turns[:1] for turns in expected.values()
    ]


def test_bundled_tasks():
    """Every file is one task under its own name, and README.md has a line for it."""
    readme = (EVAL.parent / "README.md").read_text()
    for file in EVAL.glob("*.jsonl"):
        if file.stem != "demo":  # has two
            assert list(conversations(file.stem)) == [file.stem]
        assert f"eval/{file.name}" in readme
    assert conversations("mbpp")["mbpp"][0][0].startswith(MBPP[:40])
    longest = [len(turns[0]) for turns in conversations("long")["long"]]
    assert min(longest) > 4000 and all(len(turns) == 2 for turns in conversations("long")["long"])


def test_long_prompts_are_left_out_aloud(tmp_path, capsys):
    engine = load(checkpoint=DEMO, device="cpu", draft="none", max_new_tokens=12)
    task = bench.fitting(engine, "a", [["x"], ["x " * 3000]], config_in(tmp_path))
    assert (len(task.prompts), task.left_out) == (1, 1)
    assert "1 prompts of a have more than 2040 tokens; they are left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no prompt of a has at most 1 tokens; raise the context"):
        bench.fitting(engine, "a", [["a b c d"]], config_in(tmp_path, max_new_tokens=2047))


# ------------------------------------------------------------------------------------------- report


def test_a_speedup_is_explained_over_all_tasks():
    """Tasks that only one of both has do not count; a batch of two emits two tokens a pass."""

    def row(task, tokens, cycles, decode_s, draft_s, verify_s):
        times = {"decode_s": decode_s, "draft_s": draft_s, "verify_s": verify_s}
        return {"task": task, "tokens": tokens, "cycles": cycles} | times

    plain = [row("a", 80, 40, 4.0, 0.0, 4.0), row("b", 120, 60, 6.0, 0.0, 6.0)]
    drafted = [row("a", 80, 20, 3.0, 0.5, 2.0), row("b", 120, 30, 4.5, 0.5, 4.0)]
    drafted.append(row("c", 999, 1, 1.0, 0.5, 0.5))
    parts = "verify 1.200 + draft 0.200 + host 0.100 of a vanilla pass"
    expected = f"1.33 = tau 2.000 / ({parts}); bound by"
    assert explained(drafted, plain).startswith(expected)
    assert explained([row("d", 0, 1, 0.0, 0.0, 0.0)], plain) == "nothing was decoded"


def test_a_report_comes_from_the_log_alone(measured, tmp_path, capsys, monkeypatch):
    before = (measured / "log.jsonl").read_bytes()
    monkeypatch.setattr(bench, "run", None)  # nothing may be measured
    log, plots = str(measured / "log.jsonl"), tmp_path / "plots"
    command(monkeypatch, bench, "--report", log, "--plots", str(plots))
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])["rows"]
    assert [r["tau"] for r in summary] == [r["tau"] for r in rows_of(measured)]
    for row in rows_of(measured):
        (shown,) = (x for x in lines if x.startswith(f"| {row['task']} | {row['method']} |"))
        assert f" {row['tau']:.2f} ± " in shown and f"{row['speedup']:.2f} (" in shown
    files = sorted(plots.iterdir())
    assert [file.stem for file in files] == sorted(DRAWINGS)
    assert all(file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5000 for file in files)
    assert (measured / "log.jsonl").read_bytes() == before


# -------------------------------------------------------------------------------------------- peers


def test_transformers_beside_ours(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    file = str(tmp_path / "out.json")
    monkeypatch.setattr(bench_peers, "WIDTHS", (1, 4))
    monkeypatch.setattr(bench_peers, "LEAST_RUNS", 2)
    argv = f"--limit 2 --rounds 1 --max_new_tokens 6 --dtype float32 --widths --json {file}".split()
    command(monkeypatch, bench_peers, *argv, "--device", "cpu")
    result = json.loads(Path(file).read_text())
    names = ["ours none", "ours eagle:chain:tree_depth=5", "transformers", "transformers:lookup"]
    assert list(result["speed"]) == ["1"] and list(result["speed"]["1"]) == names
    for row in result["speed"]["1"].values():
        assert row["same"] == row["identical"] == 1.0, "greedy in fp32"
        assert row["tokens_per_s"][0] > 0 and row["tau"] >= 1
    assert {result["speed"]["1"][name]["tau"] for name in ("ours none", "transformers")} == {1.0}
    assert list(result["widths"]) == ["ours none", "transformers"]
    assert all(len(row) == len(bench_peers.WIDTHS) for row in result["widths"].values())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_identical_is_said_of_each_runtime():
    """A peer's drafts are held against its own plain decoding, also where that is not ours."""
    texts = {
        "ours none": [7, 8], "ours int8 none": [7, 9], "ours int8 ngram": [7, 9],
        "llama.cpp:file": [5, 8], "llama.cpp:file:lookup2": [5, 8], "llama.cpp:file:eagle3": [7, 8],
    }  # fmt: skip
    lone = {
        name: bench_peers.Contestant(lambda prompts, row=row: Outcome([row], 0.5, 0.1, 1.0), None)
        for name, row in texts.items()
    }  # fmt: skip
    rows = bench_peers.measure_speed(lone, [[[1]]], 1)
    found = {name: (row["identical"], row["same"]) for name, row in rows.items()}
    assert found == {
        "ours none": (1, 1), "ours int8 none": (1, 0.5), "ours int8 ngram": (1, 0.5),
        "llama.cpp:file": (1, 0), "llama.cpp:file:lookup2": (1, 0), "llama.cpp:file:eagle3": (0, 1),
    }  # fmt: skip


def test_token_clock_counts_what_comes_together():
    clock = TokenClock()
    clock.began = 1.0
    clock.puts = [(1.1, 7), (1.5, 1), (2.0, 3), (2.5, 2)]  # the first brings the prompt
    outcome = clock.outcome([[9] * 6], skip=1)
    assert outcome.first_s == pytest.approx(0.5)
    assert outcome.step_s == pytest.approx(1.0 / 5) and outcome.tau == 2.5
    clock.puts = [(1.1, 8), (1.5, 2), (2.0, 2), (2.5, 2)]  # two rows of one token each
    outcome = clock.outcome([[9] * 3] * 2, skip=1)
    assert outcome.step_s == pytest.approx(1.0 / 4) and outcome.tau == 1


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_written_gguf_is_the_model_it_was_made_of(tmp_path, kind):
    """Names, and rows of q and k that rotate neighbours: read by our own reader."""
    pytest.importorskip("gguf")
    write_gguf(Path(DEMO), tmp_path / "demo.gguf", kind)
    ids = torch.randint(3, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    logits = []
    for path in (Path(DEMO), tmp_path / "demo.gguf"):
        target = load_model(path, torch.float32)
        with torch.inference_mode():
            logits.append(target.logits(target(ids, torch.arange(24)[None])))
    error = (logits[0] - logits[1]).square().mean().sqrt()
    assert error < 0.05 * logits[0].std()


@pytest.mark.parametrize("kind", FORMATS)
def test_llama_cpp_computes_the_same_function(tmp_path, kind):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    ids = torch.randint(3, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    target = load_model(Path(DEMO), torch.float32)
    with torch.inference_mode():
        logits = target.logits(target(ids, torch.arange(24)[None]))[0]  # [T, V]
    write_gguf(Path(DEMO), tmp_path / "demo.gguf", kind)
    peer = LlamaCpp(tmp_path / "demo.gguf", 64, 1, 32)
    theirs = torch.from_numpy(peer.feed(ids[0].tolist(), 0, every=True).copy())
    bound = {"bf16": 0.02, "f16": 0.005, "q8_0": 0.05, "q4_0": 0.4}[kind]
    assert float((theirs - logits).square().mean().sqrt()) < bound * float(logits.std())
    again = torch.from_numpy(
        peer.feed(ids[0, 20:].tolist(), 20, every=True).copy()
    )  # rolls back, then repeats
    torch.testing.assert_close(again, theirs[20:], atol=0.1, rtol=0.05)
    prompt = ids[0, :6].tolist() * 2
    outcomes = [
        bench_peers.llama_cpp_peer(peer, how, 20, prompt).run([prompt]) for how in ("", LOOKUP)
    ]
    plain = outcomes[0].rows[0]
    assert [outcome.rows for outcome in outcomes] == [[plain]] * 2
    assert outcomes[0].tau == 1 < outcomes[1].tau, "lookups are verified in one pass"
    with pytest.raises(
        ValueError, match="part at token 4, whose logits differ by .* drafts are verified wrongly"
    ):
        check_drafted(peer, prompt, plain, [*plain[:3], int(theirs[0].argmin()), *plain[4:]])
    peer.close()


def test_bars_and_table_show_the_rates(tmp_path, monkeypatch, capsys):
    same = {"model": "m<1>", "format": "int8", "machine": "Zen 4", "date": "today", "commit": "abc"}
    rows = [
        same | {"engine": "llama.cpp", "tokens_per_s": 50},
        same | {"engine": "gpt-eagle, drafted", "tokens_per_s": 200.4},
        same | {"format": "bf16", "engine": "llama.cpp", "tokens_per_s": 25},
    ]
    file = tmp_path / "speed.json"
    file.write_text(json.dumps(rows))
    command(monkeypatch, plot_speed, str(file))
    assert not (tmp_path / "speed.svg").exists()
    command(monkeypatch, plot_speed, str(file), "--out", str(tmp_path / "speed.svg"))
    out = capsys.readouterr().out
    assert "| m<1>, int8 | 50 | 200 | Zen 4, today, abc |" in out
    svg = ElementTree.parse(tmp_path / "speed.svg").getroot()
    tag = "{http://www.w3.org/2000/svg}"
    _, *bars = svg.iter(f"{tag}rect")
    widths = [float(bar.get("width")) for bar in bars]
    assert widths == pytest.approx([480 * 50 / 200.4, 480, 480 * 25 / 200.4], abs=0.1)
    file.write_text(json.dumps([*rows, same | {"engine": "x", "tokens_per_s": 0}]))
    said = failure(capsys, monkeypatch, plot_speed, str(file))
    assert "row 4: tokens_per_s must be above 0; it is 0" in said


def test_the_pictures_and_the_table_of_the_readme_are_those_of_the_data():
    results = ROOT / "benchmarks" / "results"
    readme = (ROOT / "README.md").read_text()
    for name in ("gpu", "heads"):
        rows = plot_speed.read_rows(results / f"{name}.json")
        assert (results / f"{name}.svg").read_text() == plot_speed.picture(rows) + "\n"
        assert f"benchmarks/results/{name}.svg" in readme
    assert plot_speed.table(plot_speed.read_rows(results / "speed.json")) in readme


def test_one_layer_is_timed_on_several_units_of_tiles(monkeypatch, capsys):
    if linear.build.load_operators():
        pytest.skip("needs a C++ compiler, and this machine has none")
    monkeypatch.setattr(linear, "ROTATED_BYTES", 500_000)
    before = torch.ops.gpt_eagle.tiles()
    config = linear.LinearConfig("64x512", "1,16", "bf16,Q4_K", units="none,emulation", rounds=2)
    try:
        records = linear.bench_shape("64x512", config)
    finally:
        torch.ops.gpt_eagle.use_tiles(before[0])
    assert [(r["kind"], r["unit"], r["tokens"]) for r in records] == [
        (kind, unit, m)
        for kind in ("bf16", "Q4_K")
        for m in (1, 16)
        for unit in ("none", "emulation")
    ]
    assert all(r["ms"] > 0 and r["of_m1"] > 0 for r in records)
    for record, ratio in zip(records, (1.0, 1.004, 1.0, 0.9, 1.0, 1.3, 1.0, 1.0)):
        record["of_first_unit"] = ratio
    linear._print_units(records)
    assert capsys.readouterr().out.endswith("\nslower than unit none: Q4_K at 1 rows (1.30)\n")
    # with the warm-up: bf16 at both numbers of rows, Q4_K at 16, each once or more per call
    assert torch.ops.gpt_eagle.tiles()[1] - before[1] >= 3 * 3


def test_whole_passes_are_timed_on_units_of_tiles(monkeypatch, capsys):
    if linear.build.load_operators():
        pytest.skip("needs a C++ compiler, and this machine has none")
    unit, configured, _ = torch.ops.gpt_eagle.tiles()
    try:
        command(
            monkeypatch,
            passes,
            *f"--checkpoint {DEMO} --units none,emulation --rows 1,2 --rounds 1 --threads 1".split(),
        )
    finally:
        torch.ops.gpt_eagle.use_tiles(unit)
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert rows == [[f" {n} ", f" {unit} "] for n in (1, 2) for unit in ("none", "emulation")]
    assert torch.ops.gpt_eagle.tiles()[1] > configured


RANDOM = {
    "qwen35": (4, 256, 2, 1, 256, 96),
    "lfm2": (3, (1,), 256, 4, 2, 256),
    "gemma4": (4, 2, (1, 3), 96),
    "gpt_oss": (2, 96),
}


@pytest.mark.parametrize("family", ["qwen35", "lfm2", *slow(["gemma4", "gpt_oss"])])
def test_random_files_are_models_of_their_families(tmp_path, family):
    """The slow ones have the widths of published models; a shape gives their layers alone."""
    path = tmp_path / "m.gguf"
    random_file.write(getattr(random_file, family)(*RANDOM[family]), path)
    assert (*random_file.SHAPES,) == passes.SHAPES
    model = load_model(path, quant=Quantization(BLOCKS, saved=True))
    logits = by_passes(model, IDS, 29)
    assert logits.isfinite().all() and logits.std() > 0.1


def test_one_layer_is_timed_in_every_format(monkeypatch):
    monkeypatch.setattr(linear, "ROTATED_BYTES", 500_000)
    if linear.build.load_operators():
        pytest.skip("needs a C++ compiler, and this machine has none")
    x = torch.randn(2, 512, dtype=torch.bfloat16)
    for kind in linear.KINDS:
        contestant = linear.LayerCopies(kind, 64, 512)
        assert contestant.apply(x, contestant.weights[0]).shape == (2, 64), kind
        assert contestant.seconds(x) > 0
        assert contestant.bytes * len(contestant.weights) >= linear.ROTATED_BYTES
