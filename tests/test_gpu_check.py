"""What of the GPU scripts needs no GPU: their messages, and the table made of what was measured."""

import json
from types import SimpleNamespace

import pytest
import torch

import bench_trees
import generate
import gpu_check
import kernel_bench
import model
import ops.experts
import options


def timed(form, layer, M, time_us, share):
    return {"format": form, "layer": layer, "M": M, "time_us": time_us, "share": share}


def test_the_table_shows_what_was_measured_and_what_failed(monkeypatch):
    monkeypatch.setattr(kernel_bench, "LAYERS", {"wo": (256, 512), "w2": (128, 1024)})
    rows = [timed("int4", layer, M, us, share) for layer, M, us, share in
            [("wo", 1, 10.0, 0.8), ("w2", 1, 30.0, 0.4), ("wo", 32, 15.0, 0.5), ("w2", 32, 35.0, 0.3)]]  # fmt: skip
    rows[0] |= {"correct": True, "same_bits": False}
    rows += [timed("int8", "wo", 1, 20.0, 0.9), {"format": "int8", "layer": "w2", "error": "OutOfMemoryError: no"}]
    table = kernel_bench.summary(rows)
    assert "| wo | 1 | failed | failed | 20.0 us, 90% | 10.0 us, 80% |" in table
    assert "int4, all layers: 1 rows 50%, 1.00 x; 32 rows 36%, 1.25 x" in table
    assert "int8, all layers: not measured" in table
    assert "wrong, or rows depend on others: int4 wo\n" in table
    assert table.endswith("failed: int8 w2 : OutOfMemoryError: no")


@pytest.mark.parametrize("options,message", [
    ({"only": "tests,speed"}, "--only: there is no part speed; use tests, kernels, demo, models"),
    ({"out": "nowhere/gpu.jsonl"}, "--out: cannot write nowhere/gpu.jsonl; there is no directory nowhere"),
])  # fmt: skip
def test_mistakes(options, message):
    with pytest.raises(ValueError) as error:
        gpu_check.check(gpu_check.CheckConfig(**options))
    assert str(error.value) == message


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors that the benchmark would make on the GPU."""
    for name in ("rand", "randn", "randint", "tensor", "ones"):
        original = getattr(kernel_bench.torch, name)
        monkeypatch.setattr(
            kernel_bench.torch, name, lambda *a, original=original, **k: original(*a, **k | {"device": "cpu"})
        )
    monkeypatch.setattr(kernel_bench.torch.cuda, "synchronize", lambda: None)


def one_microsecond(calls, replays):
    """In the place of the clock."""
    results = [call() for call in calls]
    assert len(results) == 2 and results[0] is not results[1]
    return [1e-6] * replays


def test_the_other_kernels_agree_with_their_peers_and_make_a_table(on_cpu, monkeypatch):
    """With the CPU's operators in the place of ours, and a clock that says one microsecond."""
    small = {"HEADS": {"8b": (4, 1)}, "LENGTHS": (20,), "CAPACITY": 40, "VOCABULARIES": (500,)}
    for name, value in small.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    rows = []
    for form in ("attention", "topk"):
        config = kernel_bench.BenchConfig(format=form, rows="1,7", rotate_mb=0)
        for name, M, make in kernel_bench.contests(config):
            contest = make()
            ours, *peers = ([call() for call in calls] for calls in contest.methods.values())
            for peer in peers:
                torch.testing.assert_close(ours, peer, atol=2e-2, rtol=2e-2)
            assert contest.read_bytes == (4 * M * 500 if form == "topk" else 4 * 128 * (20 + M)), name
        rows += kernel_bench.measure_cycle(config, 1e12)
    assert all(row["correct"] for row in rows) and len(rows) == 2 * 3 + 2 * 2
    rows[0] |= {"correct": False}
    rows[-1] = {k: v for k, v in rows[-1].items() if k != "time_us"} | {"error": "OutOfMemoryError: no"}
    table = kernel_bench.cycle_summary(rows)
    assert "| attention 8b, 20 slots | 7 | 1.0 us, 1% | 1.0 us, 1% | 1.0 us, 1% |" in table
    assert "| top-10 of 500 | 1 | 1.0 us, 0% |  | 1.0 us, 0% |" in table
    assert "wrong: attention 8b, 20 slots 1\nfailed: top-10 of 500 10 torch: OutOfMemoryError: no" in table


def test_compaction_goes_on_along_the_cache_and_agrees_with_the_loop(on_cpu, monkeypatch):
    for name, value in {"CAPACITY": 96, "CACHE_LAYERS": 2, "CACHE_HEADS": (1, 3)}.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(kernel_bench.torch, "compile", lambda step, **_: step)
    monkeypatch.setattr(kernel_bench, "graph_times_s", lambda calls, replays: [len(calls) * 1e-6])
    rows = list(kernel_bench.measure_cycle(kernel_bench.BenchConfig(format="compact"), 1e9))
    assert [(row["method"], row["read_bytes"]) for row in rows] == [
        (method, 2 * 2 * 2 * heads * 6 * 256) for heads in (1, 3) for method in ("ours", "torch")
    ]
    assert all(row["correct"] and row["time_us"] == 2 for row in rows)  # two places in a cache of 96 slots
    assert "| compaction, 2 layers of 3 heads | 7 | 2.0 us, 1843% |  | 2.0 us, 1843% |" in kernel_bench.cycle_summary(
        rows
    )
    monkeypatch.setattr(model, "compact", lambda *_: None)
    assert not any(
        row["correct"] for row in kernel_bench.measure_cycle(kernel_bench.BenchConfig(format="compact"), 1e9)
    )


def test_experts_agree_with_every_expert_and_report_the_bytes_of_those_that_are_hit(on_cpu, monkeypatch):
    """With references in the place of our operators: on the CPU a routing is the experts themselves."""

    def grouped(reference):
        def product(x, packed, scale, expert):
            y = x.new_empty(len(x), packed.shape[2])
            for e, rows in ops.experts.rows_by_expert(expert):
                y[rows] = reference(x[rows], packed[e], scale[e])
            return y

        return product, reference

    monkeypatch.setattr(kernel_bench, "PRODUCTS", {f: grouped(r) for f, (_, r) in kernel_bench.PRODUCTS.items()})
    monkeypatch.setattr(kernel_bench, "EXPERT_LAYERS", {"w2": (64, 512)})
    monkeypatch.setattr(kernel_bench, "EXPERT_TOKENS", (1, 7))
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    config = kernel_bench.BenchConfig(format="experts", rotate_mb=0)
    rows = list(kernel_bench.measure_cycle(config, 1e12))
    assert len(rows) == 2 * 4 and all(row["correct"] for row in rows)
    one = {"bf16": 2 * 64 * 512, "int8": 64 * 512 + 4 * 64, "int4": 64 * 512 // 2 + 2 * 64 * 512 // 128}
    for row in rows:
        hit, rest = divmod(row["read_bytes"], one[row["kernel"].split()[1]])
        assert rest == 0 and (hit == 2 if row["M"] == 1 else 3 <= hit <= 8)
    for _, M, make in kernel_bench.contests(config)[:2]:
        ours, every = (calls[0]() for calls in make().methods.values())
        assert ours.shape == (2 * M, 64)
        torch.testing.assert_close(ours, every, atol=1, rtol=2e-2)
    assert "| experts bf16 w2 | 1 | 1.0 us," in kernel_bench.cycle_summary(rows)


def test_layers_of_every_format_report_their_bytes(on_cpu):
    """On the CPU, which has no such operators: only what is made, not what it does."""
    N, K = 64, 512
    expected = {"bf16": 2 * N * K, "int8": N * K + 4 * N, "int4": N * K // 2 + N * K // 128 * 2,
                "tinygemm": N * K // 2 + N * K // 128 * 4}  # fmt: skip
    got = {form: kernel_bench.make_layer(form, N, K, 128).weight_bytes for form in kernel_bench.FORMATS}
    assert got == expected


# ---------------------------------------------------------------------------------------------- models


def test_runs_of_models_stop_in_time_and_say_what_is_missing(monkeypatch, tmp_path):
    commands, now = [], iter(range(0, 100000, 150))
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda c: commands.append(c) or SimpleNamespace(returncode=0))
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: next(now))
    out = tmp_path / "gpu.jsonl"
    assert gpu_check.run_models(gpu_check.CheckConfig(out=str(out)))
    assert 1 < len(commands) < len(gpu_check.MODEL_RUNS)
    for command in commands:  # every flag is one that the script knows
        parsed = options.parse(bench_trees.TreesConfig, "bench_trees.py", "", [str(c) for c in command[2:]])
        assert parsed.device == "cuda" and parsed.json == str(out)
    left = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(left) == len(gpu_check.MODEL_RUNS) - len(commands)
    assert "9 minutes are over" in left[0]["reason"]


def test_every_method_is_measured_over_one_target(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_trees, "load", lambda **options: generate.load(**options | {"compile": False}))
    monkeypatch.setattr(bench_trees.measure, "read_bandwidth", lambda *_: bench_trees.measure.Series(1e10, 1e10, 1e10))
    out = tmp_path / "models.jsonl"
    shape = "tiny-0.5b,n_layers=8,ffn_dim=1792,vocab_size=4224"
    options = bench_trees.TreesConfig(
        inflate=shape, static=True, limit=2, max_new_tokens=24, device="cpu", json=str(out)
    )
    bench_trees.bench(options)
    rows = {row["method"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows)[0] == "vanilla" and {"auto", "static", "chain 3", "dynamic 6/10/60"} < set(rows)
    fixed = [row["tau"] for name, row in rows.items() if name not in ("vanilla", "auto")]
    assert (
        rows["vanilla"]["tau"] == 1 <= rows["auto"]["tau"] <= 1.1 * max(fixed)
    )  # which tree is fastest depends on who else computes here
    assert min(fixed) > 2
    for row in rows.values():
        assert row["stand_in"] and row["identical"] == 1 and row["of_ceiling"] > 0
        assert row["draft_ms"] + row["verify_ms"] <= row["cycle_ms"]
    assert sum(preset["cycles"] for preset in rows["auto"]["tree_auto"]) > 2
