"""measure.py on the bundled demo: logs, resuming, tables, peers, operators, pictures, and mistakes."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from backends.attention import attention
from drafts import random_model
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import GOLDEN, OPERATORS, golden_case, refused
from quantize import Quantization
from run.load import load
from run.options import DEMO, ROOT, GenerateConfig
from run.parsing import parse
from run.stats import Stats
from scripts import measure as program
from scripts.bench import contestants, fidelity, operators, pictures, start
from scripts.bench import speed as bench
from scripts.bench.cases import FORMATS, SpeedOptions
from scripts.bench.common import Log, Series, pass_bytes, read_bandwidth
from scripts.bench.contestants import Outcome, TokenClock
from scripts.bench.llama_peer import LlamaCpp, write_gguf
from scripts.bench.methods import Setting, method_config, methods_of, of_kind
from scripts.bench.table import explained
from scripts.bench.tasks import MBPP, conversations

METHODS = "none,eagle:chain:tree_depth=3,eagle:dynamic"
TASKS = [
    {"id": "a-1", "task": "a", "turns": ["def read_lines(path):"]},
    {"id": "a-2", "task": "a", "turns": ["import os\n", "class Tree:"]},
    {"id": "a-3", "task": "a", "turns": ["for line in file:"]},
    {"id": "b-1", "task": "b", "turns": ["Question: What is 2 + 2?\nAnswer:"]},
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True, scope="module")
def ceiling():
    """A fixed bandwidth: measuring it takes seconds and a gigabyte."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (bench, operators):
            patch.setattr(module, "read_bandwidth", lambda device, runs: Series.of([1e10]))
        yield


def test_the_bandwidth_is_measured_in_a_process_of_its_own():
    assert read_bandwidth("cpu", 2, 2**20).median > 1e6
    with pytest.raises(ValueError, match="bandwidth of nothing cannot be measured"):
        read_bandwidth("nothing", 1, 2**20)


def write_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def config_in(folder: Path, **options) -> SpeedOptions:
    """A small benchmark in fp32, where vanilla's tokens are everybody's."""
    plain = {"methods": METHODS, "dtype": "float32", "device": "cpu", "max_new_tokens": 8}
    plain |= {"checkpoint": DEMO, "json": str(folder / "log.jsonl")}
    plain["tasks"] = write_lines(folder / "tasks.jsonl", TASKS)
    return SpeedOptions(**(plain | options))


def command(monkeypatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py", *argv])
    program.main()


@pytest.fixture(scope="module")
def measured(tmp_path_factory, ceiling):
    """A log of two tasks and three methods, and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    bench.measure(config_in(folder))
    return folder


# ------------------------------------------------------------------------------------------- speed


def test_one_line_per_task_and_method(measured, capsys, monkeypatch):
    """And the tables come from the log alone."""
    rows = rows_of(measured / "log.jsonl")
    names = [(task, method) for task in "ab" for method in METHODS.split(",")]
    assert [(r["task"], r["method"]) for r in rows] == names
    for row in rows:
        plain, chain = row["method"] == "none", "chain" in row["method"]
        assert row["identical"] == 1.0 and row["tokens_per_s"] > 0
        assert row["tau"] == 1 if plain else row["tau"] > 1.5
        assert row["speedup"] == 1 if plain else row["speedup"] not in (0, 1)
        assert (row["n_alpha"] is not None) == chain
        assert sum(row["histogram"]) == row["cycles"]
        accepted = sum(n * c for n, c in enumerate(row["histogram"]))
        assert row["tau"] == pytest.approx(1 + accepted / row["cycles"])
        split = row["draft_ms"] + row["verify_ms"] + row["rest_ms"]
        assert split * row["cycles"] / 1e3 == pytest.approx(row["decode_s"])
        assert row["config"]["checkpoint"] == "checkpoints/demo" and row["environment"]["threads"]
        assert row["prompts"] == (3 if row["task"] == "a" else 1) and row["runs"] == row["prompts"]
    monkeypatch.setattr(bench, "measure", None)  # nothing may be measured
    command(monkeypatch, "speed", "--report", str(measured / "log.jsonl"))
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("{") for line in lines), "a terminal shows tables alone"
    for row in rows:
        (shown,) = (x for x in lines if x.startswith(f"| {row['task']} | {row['method']} |"))
        assert f" {row['tau']:.2f} ± " in shown and f"{row['speedup']:.2f} (" in shown


def test_a_method_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    real = bench.with_config

    def broken(engine, config):
        if config.tree == "static":
            raise RuntimeError("it does not compile\nfor a long reason")
        if config.draft == "ngram":
            raise ValueError("the text has too many tokens")
        return real(engine, config)

    monkeypatch.setattr(bench, "with_config", broken)
    config = config_in(tmp_path, methods="none,eagle:static,ngram", limit=1)
    failed = r"^eagle:static: RuntimeError: it does not compile \(the traceback is above\); ngram: the text has"
    with pytest.raises(ValueError, match=failed):
        bench.measure(config)
    assert [row["method"] for row in rows_of(tmp_path / "log.jsonl")] == 2 * ["none"]
    monkeypatch.setattr(bench, "with_config", real)
    assert len(bench.measure(config)) == 6, "only what failed is measured again"


def test_logs_that_cannot_be_resumed(measured, tmp_path):
    log = str(measured / "log.jsonl")
    config = replace(config_in(tmp_path), json=log, tasks="demo", max_new_tokens=9)
    with pytest.raises(ValueError, match="with --max_new_tokens 8, here 9; name another file"):
        bench.measure(config)
    with pytest.raises(ValueError, match="line 1: it is no line of measure.py speed"):
        Log(write_lines(tmp_path / "other.jsonl", [{"x": 1}]), "--json", bench.fault_of)
    (tmp_path / "broken.jsonl").write_text('{"x": 1\n{"x": 2}\n')
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        Log(str(tmp_path / "broken.jsonl"), "--json")


def test_acceptance_is_the_official_count():
    for run in golden_case("eagle1_chain5_mha_alpha")["runs"]:
        facts = bench.acceptance([run["accept_lengths"]], 5)
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
    assert pass_bytes(target) == pytest.approx(every - unread)


def test_a_speedup_is_explained_over_all_tasks():
    """Tasks that only one of both has do not count; a batch of two emits two tokens a pass."""

    def row(task, tokens, cycles, decode_s, draft_s, verify_s):
        times = {"decode_s": decode_s, "draft_s": draft_s, "verify_s": verify_s}
        return {"task": task, "tokens": tokens, "cycles": cycles} | times

    plain = [row("a", 80, 40, 4.0, 0.0, 4.0), row("b", 120, 60, 6.0, 0.0, 6.0)]
    drafted = [row("a", 80, 20, 3.0, 0.5, 2.0), row("b", 120, 30, 4.5, 0.5, 4.0)]
    drafted.append(row("c", 999, 1, 1.0, 0.5, 0.5))
    parts = "verify 1.200 + draft 0.200 + host 0.100 of a vanilla pass"
    assert explained(drafted, plain).startswith(f"1.33 = tau 2.000 / ({parts}); bound by")
    assert explained([row("d", 0, 1, 0.0, 0.0, 0.0)], plain) == "nothing was decoded"


# ---------------------------------------------------------------------------------- methods and tasks


def test_all_methods_are_those_whose_files_are_there(tmp_path, capsys):
    models = GOLDEN / "models"
    config = SpeedOptions(checkpoint=str(models / "target_llama_mha"), methods="all")
    greedy = Setting("none", 0.0, 1)
    plain = methods_of(config, greedy)
    assert plain[:1] == ["none"] and "ngram" in plain and not any("eagle" in m for m in plain)
    (tmp_path / "a").symlink_to(models / "head_eagle12_mha")
    (tmp_path / "b").symlink_to(models / "target_llama_mha")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.json").write_text('{"medusa_num_heads": 3}')
    (tmp_path / "broken").mkdir()
    config = replace(config, heads=str(tmp_path))
    more = of_kind("eagle", f"head={tmp_path / 'a'}")
    more += [f"model:chain:tree_depth=3:draft_checkpoint={tmp_path / 'b'}"]
    more += of_kind("medusa", f"head={tmp_path / 'c'}")
    assert methods_of(config, greedy) == plain + more
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"note: left out of --methods all: {tmp_path / 'broken'}"), said
    named = replace(config, heads=",".join(str(tmp_path / name) for name in "abc"))
    assert methods_of(named, greedy) == plain + more
    for method in more:
        assert method_config(method, greedy, config).draft == method.partition(":")[0]
    sampled = methods_of(config, Setting("none", 1.0, 1))
    residual = f"model:chain:tree_depth=3:residual:draft_checkpoint={tmp_path / 'b'}"
    assert set(sampled) - {*plain, *more} == {residual}


def test_every_drafter_is_measured_and_the_fastest_recommended(tmp_path, monkeypatch, capsys):
    """The recommended command is one that generate.py takes, for the same prompts."""
    prompts = tmp_path / "my prompts.txt"
    prompts.write_text("def read_lines(path):")
    flags = ["--checkpoint", DEMO, "--tasks", str(prompts), "--methods", "all", "--device", "cpu"]
    command(monkeypatch, "speed", *flags, "--max_new_tokens", "8", "--temperatures", "0.7")
    *lines, method, line = capsys.readouterr().out.splitlines()
    shown = {row.split(" | ")[1] for row in lines if row.startswith("| my prompts | ")}
    assert shown >= {"none", "ngram", "recycling", *of_kind("eagle")}
    best = method.removeprefix("recommended, ").removesuffix(":")
    assert best in shown
    python, generator, *argv = shlex.split(line)
    assert (python, generator) == ("python", "generate.py")
    chosen = parse(GenerateConfig, "generate.py", "", argv)
    chosen.check()
    assert chosen.draft == best.partition(":")[0] and chosen.prompt_file == str(prompts)
    assert chosen.checkpoint == DEMO and chosen.temperature == 0.7 and chosen.max_new_tokens == 8


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
    ({"turns": ["a", "b"]}, "rows", ["a", "b"]),
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
    first = [turns[:1] for turns in expected.values()]
    assert list(bench.read_tasks(SpeedOptions(tasks=lines, limit=1)).values()) == first


def test_long_prompts_are_left_out_aloud(capsys):
    engine = load(checkpoint=DEMO, device="cpu", draft="none", max_new_tokens=12)
    assert bench.fitting(engine, "a", [["x"], ["x " * 3000]], 8) == [["x"]]
    assert "1 prompts of a have more than 2040 tokens; they are left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no prompt of a has at most 1 tokens; raise the context"):
        bench.fitting(engine, "a", [["a b c d"]], 2047)


# -------------------------------------------------------------------------------------------- peers


def test_transformers_beside_ours(tmp_path):
    pytest.importorskip("transformers")
    methods = "none,eagle:chain:tree_depth=2,transformers"
    config = config_in(tmp_path, methods=methods, limit=1, max_new_tokens=6)
    rows = bench.measure(config)
    assert [row["method"] for row in rows[:3]] == methods.split(",")
    for row in rows:
        assert row["identical"] == 1.0 and row["tokens_per_s"] > 0 and row["tau"] >= 1
        assert row["speedup"] > 0 and row["first_ms"] > 0
    assert {row["tau"] for row in rows if row["method"] in ("none", "transformers")} == {1.0}


SMALL = dict(zip(random_model.SIZES, (64, 2, 2, 2, 96, 40)))  # fewer tokens than prompts have


OF_GPT_FAST = {  # as little of its files as the contestant calls
    "model": """
import torch
class ModelArgs(dict): pass
class Transformer(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.emb = torch.nn.Embedding(sizes["vocab_size"], sizes["dim"])
        self.register_buffer("codes", torch.empty(4, 4, dtype=torch.int32))
    def setup_caches(self, max_batch_size, max_seq_length):
        self.room = max_seq_length
""",
    "quantize": """
class WeightOnlyInt4QuantHandler:
    def __init__(self, model, group):
        assert group == 32 and model.sizes["n_layer"] == 2
        self.convert_for_runtime = lambda: model
""",
    "generate": """
import torch, tokenizer
def generate(model, prompt, new, batch, **options):
    assert model.room == 512 >= len(prompt) + new and model.emb(prompt).dtype == torch.bfloat16
    return torch.zeros(batch, len(prompt) + new), {}
""",
}


def test_gpt_fast_is_driven_as_its_own_benchmark_does(tmp_path, monkeypatch):
    """Prompts of ids beyond its vocabulary, too; the modules of this project keep their names."""
    for name, text in OF_GPT_FAST.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(contestants, "raw_config", lambda shape: SMALL)
    monkeypatch.setattr(contestants, "GPT_FAST_FOLDER", tmp_path)
    ours = sys.modules["model"]
    run = contestants.run_gpt_fast(SpeedOptions(device="cpu", max_new_tokens=10))
    for prompt in ([3, 900, 7], [1] * 400):
        outcome = run([prompt])
        assert outcome.stats.tokens == 8 and outcome.accept_lengths == [[0] * 8]
        assert outcome.stats.prefill_s > 0 and outcome.texts == [[]]
    assert sys.modules["model"] is ours and "tokenizer" not in sys.modules


def test_identical_is_said_of_each_runtime():
    """A peer's drafts are held against its own plain decoding, also where that is not ours."""
    runs = {  # the text, the method whose text it must be, what is said
        "none": ([7, 8], "none", (True,)), "ngram": ([7, 8], "none", (True,)), "eagle:residual": ([7, 5], "", ()),
        "llama.cpp:file": ([5, 8], "llama.cpp:file", (True,)), "llama.cpp:file:lookup2": ([7, 8], "llama.cpp:file", (False,)),
        "gpt-fast:int4": ([], "", ()),
    }  # fmt: skip

    def run(text):
        return lambda number: Outcome(Stats(), [text])

    made = {name: contestants.Contestant(None, due) for name, (_, due, _) in runs.items()}
    done = bench.run_round({name: run(text) for name, (text, *_) in runs.items()}, made, 3)
    found = {name: one.identical for name, one in done.items()}
    assert found == {name: said for name, (*_, said) in runs.items()}


def test_token_clock_counts_what_comes_together():
    clock = TokenClock()
    clock.began = 1.0
    clock.puts = [(1.1, 7), (1.5, 1), (2.0, 3), (2.5, 2)]  # the first brings the prompt
    outcome = clock.outcome([[9] * 6], skip=1)
    assert outcome.stats.prefill_s == pytest.approx(0.5) and outcome.accept_lengths == [[2, 1]]
    assert outcome.rate == pytest.approx(5) and len(outcome.stats.live_sequences) == 2
    clock.puts = [(1.1, 8), (1.5, 2), (2.0, 2), (2.5, 2)]  # two rows of one token each
    outcome = clock.outcome([[9] * 3] * 2, skip=1)
    assert outcome.rate == pytest.approx(4) and outcome.accept_lengths == [[0, 0]] * 2


@pytest.mark.parametrize("kind", FORMATS)
def test_a_written_gguf_is_the_model_it_was_made_of(tmp_path, kind):
    """Names, and rows of q and k that rotate neighbours: read by our own reader, and by llama.cpp."""
    pytest.importorskip("gguf")
    write_gguf(Path(DEMO), tmp_path / "demo.gguf", kind)
    ids = torch.randint(3, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    logits = []
    for path in (Path(DEMO), tmp_path / "demo.gguf"):
        target = load_model(path, torch.float32)
        with torch.inference_mode():
            logits.append(target.logits(target(ids, torch.arange(24)[None]))[0])  # [T, V]
    bound = {"bf16": 0.02, "f16": 0.005, "q8_0": 0.05, "q4_0": 0.4}[kind] * float(logits[0].std())
    assert float((logits[0] - logits[1]).square().mean().sqrt()) < bound
    pytest.importorskip("llama_cpp")
    peer = LlamaCpp(tmp_path / "demo.gguf", 64, 1, 32)
    theirs = torch.from_numpy(peer.feed(ids[0].tolist(), 0, every=True).copy())
    assert float((theirs - logits[0]).square().mean().sqrt()) < bound
    peer.close()


# ------------------------------------------------------------------------------------------- fidelity


def test_rows_lie_as_far_from_fp32_as_their_formats(tmp_path, monkeypatch, capsys):
    loaded = fidelity.load
    monkeypatch.setattr(fidelity, "load", lambda **given: loaded(**given | {"compile": False}))
    quantize_directory(Path(DEMO), tmp_path / "other", Quantization("int8"))
    (tmp_path / "a.txt").write_text("def read_lines(path):\n    return open(path)\n" * 40)
    flags = ("--text", str(tmp_path / "a.txt"), "--also", str(tmp_path / "other"))
    flags += ("--checkpoint", DEMO, "--json", str(tmp_path / "found.jsonl"))
    command(monkeypatch, "fidelity", *flags)
    rows = {r["row"]: r for r in rows_of(tmp_path / "found.jsonl")}
    own = [rows[name] for name in ("bfloat16", "--quant int8", "--quant int4")]
    assert 0 < own[0]["kl"] < own[1]["kl"] < own[2]["kl"] < 0.5
    assert all(row["rms"] > 0 and 0.6 < row["best"] <= 1 and row["ppl"] > 1 for row in own)
    assert rows["other"] == rows["--quant int8"] | {"row": "other"}
    in_8_bits = rows["bfloat16, --kv int8"]
    assert own[0]["kl"] < in_8_bits["kl"] < own[2]["kl"], "the cache alone is rounded"
    assert len(rows) == 5 and "| other | " in capsys.readouterr().out


def test_equal_logits_a_perplexity_by_hand_and_right_answers():
    logits = torch.randn(5, 7)
    found = fidelity.compare_logits([logits], [logits + 3.0], [[0, 1, 2, 3, 4]])
    loss = -sum(logits[i].log_softmax(-1)[i + 1] for i in range(4)) / 4
    assert (found["rms"], found["kl"]) == pytest.approx((0, 0), abs=1e-6)
    assert found["best"] == 1 and found["ppl"] == pytest.approx(float(loss.exp()))
    assert fidelity.is_right("It is PARIS, of course.", ["paris"])
    assert not fidelity.is_right("comparison", ["paris"]) and not fidelity.is_right("12", ["1"])


# --------------------------------------------------------------------------------- layers and passes


@OPERATORS
@pytest.mark.parametrize("case, flags, names", [
    ("linear", "--shapes 64x512 --kinds bf16,Q4_K --units none,emulation",
     ("bf16 none", "bf16 emulation", "Q4_K none", "Q4_K emulation")),
    ("passes", f"--checkpoint {DEMO} --kv int8", ("gpt-eagle",)),
])  # fmt: skip
def test_times_by_rows(case, flags, names, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operators, "ROTATED_BYTES", 500_000)
    unit, configured, _ = torch.ops.gpt_eagle.tiles()
    flags += f" --rows 1,16 --rounds 2 --threads 1 --json {tmp_path / 'rows'}"
    try:
        command(monkeypatch, case, *flags.split())
    finally:
        torch.ops.gpt_eagle.use_tiles(unit)
    rows = rows_of(tmp_path / "rows")
    assert {(r["name"], r["rows"]) for r in rows} == {(name, n) for name in names for n in (1, 16)}
    assert all(0 < r["least_ms"] <= r["ms"] for r in rows)
    assert all(r["over_rows"] == 1 for r in rows if r["rows"] == 1)
    printed = capsys.readouterr().out
    for name in names[1::2]:  # beside the first unit
        ratios = " | ".join(f"{r['over_first']:.2f}" for r in rows if r["name"] == name)
        assert f"\n| {name} | {ratios} |\n" in printed
    assert (torch.ops.gpt_eagle.tiles()[1] > configured) == ("units" in flags)


@OPERATORS
def test_attention_agrees_with_its_peer(monkeypatch):
    """With the CPU's operators in the place of ours."""
    backend = SimpleNamespace(attention=attention, path_table=torch.ops.gpt_eagle.path_table)
    small = {"CAPACITY": 40, "CACHE_LAYERS": 2, "choose": lambda device: backend}
    for name, value in small.items():
        monkeypatch.setattr(operators, name, value)
    caches = operators.layers_of(1, "cpu")
    for T in (1, 7, 20):
        calls = operators.attention_calls(4, caches, 20, T)
        ours, peer = ([call() for call in each] for each in calls.values())
        assert len(ours) == 2
        torch.testing.assert_close(ours, peer, atol=2e-2, rtol=2e-2)


def test_a_start_is_timed_and_another_text_is_an_error(tmp_path, monkeypatch, capsys):
    flags = f"--checkpoint {DEMO} --lengths 6 --rounds 1 --json {tmp_path / 'starts'}".split()
    command(monkeypatch, "start", *flags)
    (row,) = rows_of(tmp_path / "starts")
    assert row["name"] == "6, gpt-eagle" and row["tokens"] == 6 and row["tokens_per_s"][0] > 0
    assert 0 < row["first_s"][0] <= row["end_s"][0]
    printed = capsys.readouterr().out
    assert "| 6, gpt-eagle | 6 | " in printed and "| whole |" in printed
    made = iter("abcd")
    one = start.Start(1.0, 2.0, "", 4, 9.0)
    monkeypatch.setattr(start, "start", lambda *_: one._replace(text=next(made)))
    said = refused(capsys, command, monkeypatch, "start", *flags, prints=True)
    assert "gpt-eagle: a start gave another text than the first one" in said


# ------------------------------------------------------------------------------------------- pictures


def test_bars_and_table_show_the_rates(measured, tmp_path, monkeypatch, capsys):
    same = {"model": "m<1>", "format": "int8", "machine": "Zen 4", "date": "today", "commit": "abc"}
    rows = [
        same | {"engine": "llama.cpp", "tokens_per_s": 50},
        same | {"engine": "gpt-eagle, drafted", "tokens_per_s": 200.4},
        same | {"format": "bf16", "engine": "llama.cpp", "tokens_per_s": 25},
    ]
    file = tmp_path / "speed.json"
    file.write_text(json.dumps(rows))
    command(monkeypatch, "bars", str(file), "--out", str(tmp_path / "speed.svg"))
    assert "| m<1>, int8 | 50 | 200 | Zen 4, today, abc |" in capsys.readouterr().out
    _, *drawn = ElementTree.parse(tmp_path / "speed.svg").getroot().iter(f"{SVG}rect")
    widths = [float(bar.get("width")) for bar in drawn]
    assert widths == pytest.approx([480 * 50 / 200.4, 480, 480 * 25 / 200.4], abs=0.1)
    file.write_text(json.dumps([*rows, same | {"engine": "x"}]))
    said = refused(capsys, command, monkeypatch, "bars", str(file))
    assert "(KeyError: 'tokens_per_s'); name a JSON list of rows" in said
    command(monkeypatch, "bars", str(measured / "log.jsonl"))  # of a run
    out = capsys.readouterr().out
    assert "gpt-eagle, no draft | gpt-eagle, eagle:chain:tree_depth=3" in out
    assert "| demo, none, a | " in out
    line = rows_of(measured / "log.jsonl")[0]
    line["config"] |= {"options": "random=llama2-7b,ignore_eos"}
    assert pictures.of_log(line)["model"] == "random llama2-7b", "its rows never look real"


def test_one_word_makes_the_table_of_a_model(tmp_path, monkeypatch, capsys):
    """With llama.cpp where its package is; runs in other formats add rows, which `bars` reads."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    file = tmp_path / "speed.json"
    for form, flags in (("its bits", []), ("int8", ["--quant", "int8"])):
        command(monkeypatch, "bench", DEMO, "--max_new_tokens", "4", "--json", str(file), *flags)
        said = capsys.readouterr()
        machine, _, title, _, row = said.out.splitlines()
        assert "without llama.cpp: llama.cpp:" in said.err and "date" in machine
        assert title.startswith(
            "| tokens per second, tokens a pass | gpt-eagle, no draft | gpt-eagle, auto |"
        )
        assert row.startswith(f"| demo, {form} | ")
    command(monkeypatch, "bars", str(file))
    assert row in capsys.readouterr().out and len(pictures.read_rows(file)) == 4


def test_the_pictures_and_the_table_of_the_readme_are_those_of_the_data():
    results = ROOT / "benchmarks" / "results"
    readme = (ROOT / "README.md").read_text()
    for name, page in (("gpu", readme), ("heads", readme), ("speed", "")):
        rows = pictures.read_rows(results / f"{name}.json")
        if page:
            assert (results / f"{name}.svg").read_text() == pictures.bars_picture(rows) + "\n"
            assert f"benchmarks/results/{name}.svg" in page
        of_table = "benchmarks/RESULTS.md" if name == "heads" else "README.md"
        assert pictures.table(rows) in (ROOT / of_table).read_text()
    recorded = json.loads((results / "race.json").read_text())
    assert (ROOT / "docs/race.svg").read_text() == pictures.race_picture(recorded) + "\n"
