"""Programs for a GPU where there is none: kernels.py, probe.py, and which tests are smoke."""

import json
import sys
from pathlib import Path

import pytest
import torch

import backends.experts
from scripts.bench import measure
from scripts.gpu import families, table
from scripts.gpu import kernels as kernel_bench
from scripts.gpu import probe as gpu_probe


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors that the benchmark would make on the GPU."""
    for name in ("rand", "randn", "randint", "tensor", "ones"):
        original = getattr(kernel_bench.torch, name)
        monkeypatch.setattr(
            kernel_bench.torch,
            name,
            lambda *a, original=original, **k: original(*a, **k | {"device": "cpu"}),
        )
    monkeypatch.setattr(kernel_bench.torch.cuda, "synchronize", lambda: None)


def one_microsecond(calls, replays):
    """In the place of the clock."""
    results = [call() for call in calls]
    assert len(results) == 2 and results[0] is not results[1]
    return [1e-6] * replays


def test_the_other_kernels_agree_with_their_peers(on_cpu, monkeypatch):
    """With the CPU's operators in the place of ours, and a clock that says one microsecond."""
    small = {"HEADS": {"8b": (4, 1)}, "CAPACITY": 40, "VOCABULARIES": (500,)}
    for name, value in small.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    rows = []
    for form in ("attention", "topk"):
        config = kernel_bench.KernelsConfig(format=form, rows="1,7", lengths="20", rotate_mb=0)
        for name, M, make in kernel_bench.contests(config):
            contest = make()
            ours, *peers = ([call() for call in calls] for calls in contest.methods.values())
            for peer in peers:
                torch.testing.assert_close(ours, peer, atol=2e-2, rtol=2e-2)
            assert contest.read_bytes == (4 * M * 500 if form == "topk" else 4 * 128 * (20 + M)), (
                name
            )
        rows += kernel_bench.measure(config, 1e12)
    assert all(row["correct"] for row in rows) and len(rows) == 2 * 2 + 2 * 2


def row_by_row(reference):
    """A matmul on the CPU in which no row depends on another."""
    return lambda x, *weights: torch.cat([reference(row.float(), *weights) for row in x.split(1)])


@pytest.mark.parametrize("form,bytes_each", [
    ("bf16", 2 * 64 * 512), ("int8", 64 * 512 + 4 * 64), ("int4", 64 * 512 // 2 + 2 * 64 * 512 // 128),
])  # fmt: skip
def test_matmuls_report_their_bytes_and_rows_that_depend_on_others(
    on_cpu, monkeypatch, form, bytes_each
):
    """With references in the place of our operators."""
    pairs = {f: (row_by_row(r), r) for f, (_, r) in kernel_bench.PRODUCTS.items()}
    monkeypatch.setattr(kernel_bench, "PRODUCTS", pairs)
    rounded = row_by_row(lambda x, w, *_: (x @ w.float().T).bfloat16())
    product = "halves_product"
    monkeypatch.setattr(kernel_bench, product, lambda x, w, _: rounded(x, w))
    monkeypatch.setattr(kernel_bench, "LAYERS", {"wo": (64, 512)})
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    config = kernel_bench.KernelsConfig(format=form, rows="1,7", rotate_mb=0)
    rows = list(kernel_bench.measure(config, 1e12))
    methods = ["ours", "torch"] if form == "bf16" else ["ours"]
    assert [(row["M"], row["method"]) for row in rows] == [(M, m) for M in (1, 7) for m in methods]
    assert all(row["correct"] and row["read_bytes"] == bytes_each for row in rows)
    printed = kernel_bench.summary(rows)
    assert f"| {form} wo | 7 | 1.0 us, " in printed and "wrong: none" in printed
    if form == "bf16":
        monkeypatch.setattr(kernel_bench, product, lambda x, w, _: rounded(x, w) + len(x))
        wrong = [row for row in kernel_bench.measure(config, 1e12) if row["M"] == 7]
        printed = kernel_bench.summary(wrong)
        assert "failed: bf16 wo 7 ours: AssertionError: a row's bits depend" in printed


def test_compaction_agrees_with_the_loop_or_is_wrong(on_cpu, monkeypatch):
    for name, value in {"CAPACITY": 96, "CACHE_LAYERS": 2, "CACHE_HEADS": (1, 3)}.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(kernel_bench.torch, "compile", lambda step, **_: step)
    monkeypatch.setattr(kernel_bench, "graph_times_s", lambda calls, replays: [len(calls) * 1e-6])
    config = kernel_bench.KernelsConfig(format="compact")
    rows = list(kernel_bench.measure(config, 1e9))
    assert [(row["method"], row["read_bytes"]) for row in rows] == [
        (method, 2 * 2 * 2 * heads * 6 * 256) for heads in (1, 3) for method in ("ours", "torch")
    ]
    # two places in a cache of 96 slots
    assert all(row["correct"] and row["time_us"] == 2 for row in rows)
    monkeypatch.setattr("backends.triton.functions.compact", lambda *_: None)
    assert not any(row["correct"] for row in kernel_bench.measure(config, 1e9))


def test_experts_agree_and_report_the_bytes_of_those_that_are_hit(on_cpu, monkeypatch):
    """With references in the place of our operators: on the CPU a routing is the experts themselves."""

    def grouped(reference):
        def product(x, packed, scale, expert):
            y = x.new_empty(len(x), packed.shape[2])
            for e, rows in backends.experts.rows_by_expert(expert):
                y[rows] = reference(x[rows], packed[e], scale[e])
            return y

        return product, reference

    monkeypatch.setattr(
        kernel_bench, "PRODUCTS", {f: grouped(r) for f, (_, r) in kernel_bench.PRODUCTS.items()}
    )
    monkeypatch.setattr(kernel_bench, "EXPERT_LAYERS", {"w2": (64, 512)})
    monkeypatch.setattr(kernel_bench, "EXPERT_TOKENS", (1, 7))
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    config = kernel_bench.KernelsConfig(format="experts", rotate_mb=0)
    rows = list(kernel_bench.measure(config, 1e12))
    assert len(rows) == 2 * 3 and all(row["correct"] for row in rows)
    one = {
        "bf16": 2 * 64 * 512,
        "int8": 64 * 512 + 4 * 64,
        "int4": 64 * 512 // 2 + 2 * 64 * 512 // 128,
    }
    for row in rows:
        hit, rest = divmod(row["read_bytes"], one[row["kernel"].split()[1]])
        assert rest == 0 and (hit == 2 if row["M"] == 1 else 3 <= hit <= 8)


# -------------------------------------------------------------------------------------------- tests


def test_about_thirty_tests_are_smoke():
    import test_gpu

    class Seen:
        def pytest_collection_finish(self, session):
            self.names = [item.name for item in session.items]

    file, seen = Path(test_gpu.__file__), Seen()
    flags = f"-c {file.parents[2] / 'pyproject.toml'} -n0 -q --collect-only -m smoke {file}".split()
    assert pytest.main(flags, plugins=[seen]) == 0
    assert 25 <= len(seen.names) <= 40 and seen.names == test_gpu.SMOKE
    assert seen.names[0].startswith("test_captured_cycles"), (
        "the longest first, or they end too late"
    )


# ----------------------------------------------------------------------------------------- ceilings


def test_probes_say_what_they_found(tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    command = ["probe.py", "--probe", "facts,capture", "--device", "cpu", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        gpu_probe.main()
    assert not end.value.code
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {row["name"]: row["text"] for row in rows if "text" in row}
    assert list(texts) == ["facts", "capture"] and torch.__version__ in texts["facts"]
    assert gpu_probe.lines_of("no-such-program") == ["no no-such-program (FileNotFoundError)"]
    monkeypatch.setattr(gpu_probe, "copy_into", lambda x, y: None)
    with pytest.raises(AssertionError):
        gpu_probe.capture("cpu")


@pytest.mark.parametrize("name", ["attention", "compact", "norm", "rotary", "topk", "tree"])
def test_a_family_agrees_with_its_reference(name, on_cpu, monkeypatch):
    """With the CPU's operators in the place of ours: the check itself is right, and can fail."""
    for constant, value in {"HEADS": {"8b": (4, 1)}, "CAPACITY": 96, "CACHE_LAYERS": 2}.items():
        monkeypatch.setattr(kernel_bench, constant, value)
    monkeypatch.setattr(kernel_bench.torch, "compile", lambda step, **_: step)
    assert families.check_family(name, "cpu")["relative_error"] < kernel_bench.TOLERANCE
    monkeypatch.setattr(kernel_bench, "relative_error", lambda got, want: 1.0)
    monkeypatch.setattr(families, "relative_error", lambda got, want: 1.0)
    monkeypatch.setattr("reference.link_nodes", lambda *_: [torch.zeros(1)])
    monkeypatch.setattr("backends.triton.functions.compact", lambda *_: None)
    with pytest.raises(AssertionError):
        families.check_family(name, "cpu")


def test_a_bandwidth_that_was_measured_is_handed_on(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(
            measure, "read_bandwidth", lambda *_: measure.Series.of([1e12, 3.35e12, 4e12])
        )
        patch.chdir(tmp_path)
        with pytest.raises(SystemExit):
            gpu_probe.probe(gpu_probe.ProbeConfig("bandwidth", "cpu", json="probes.jsonl"))
    assert table.bandwidth(tmp_path / "nothing") == ""
    monkeypatch.setattr(measure.subprocess, "run", None)
    monkeypatch.setenv("GPT_EAGLE_BANDWIDTH", table.bandwidth(tmp_path))
    assert measure.read_bandwidth("cuda", 5) == measure.Series.of([3.35e12])
    for wrong in ("fast", "-1", "nan", "inf"):
        monkeypatch.setenv("GPT_EAGLE_BANDWIDTH", wrong)
        with pytest.raises(
            ValueError, match=f"must be bytes per second, as 3.35e12; it is '{wrong}'"
        ):
            measure.read_bandwidth("cuda", 5)
