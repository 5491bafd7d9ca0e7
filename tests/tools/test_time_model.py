"""The model of a GPU's time: it follows the kernels' plans, and takes measured numbers."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip(
    "triton", reason="the plans of the kernels need Triton, which is to be had for Linux"
)

from options import DEMO, ROOT  # noqa: E402
from scripts.gpu import time_model as gpu_model
from scripts.gpu import waves as gpu_waves
from scripts.gpu.time_model import ModelOptions, cases, cycle, times_ms, tokens_per_s  # noqa: E402

CYCLES = {  # launches, tokens/s of a 7B on an H100, doubted and hopeful, as first computed
    ("bf16", "vanilla"): (176, 173, 199),
    ("bf16", "chain 5"): (237, 620, 714),
    ("bf16", "dynamic 6/8/32"): (249, 586, 673),
    ("bf16+int4", "dynamic 6/10/60"): (249, 676, 780),
    ("int4", "vanilla"): (176, 459, 568),
    ("int4", "dynamic 6/10/60"): (249, 1113, 1285),
}


def one(form="int4", tree="dynamic 6/10/60", **options):
    (case,) = cases(ModelOptions(formats=form, trees=tree, **options))
    return case


@pytest.mark.parametrize("form,tree", CYCLES)
def test_cycles_of_a_7b(form, tree):
    case = one(form, tree)
    launches = sum(k.count for found in cycle(case).values() for k in found)
    speeds = [round(tokens_per_s(end, 4.65)) for end in (case.doubted, case)]
    assert (launches, *speeds) == CYCLES[form, tree]


def test_launches_follow_the_plans():
    def per_layer(form, rows):
        return sum(k.count for k in gpu_model.layer(one(form), rows, form, 1))

    assert [per_layer(form, 60) for form in ("bf16", "int8", "int4")] == [5, 5, 5]
    splits = {
        name: gpu_waves.product_us(60, *size, 4, one().gpu)[1]
        for name, size in gpu_model.matrices(one().shape).items()
    }
    assert {name for name, n in splits.items() if n > 1} == {"wo", "w2", "fc"}
    sums = {k.name.split()[1] for k in cycle(one(tp=2))["verify"] if k.name.startswith("sum ")}
    assert {"wo", "w2"} <= sums, "NCCL takes one sum"


def test_time_grows_with_what_is_read_and_nothing_beats_the_bandwidth():
    for gpu in gpu_waves.GPUS.values():
        for bits, byte in ((4, 0.5 + 2 / 128), (8, 1), (16, 2)):
            for rows in (1, 32, 60, 100):
                us, _ = gpu_waves.product_us(rows, 22016, 4096, bits, gpu)
                assert us > 22016 * 4096 * byte / gpu.constants.bandwidth_tb_s / 1e6
    attention = [
        gpu_waves.attention_us(32, slots, one().shape, one().gpu)[0]
        for slots in (128, 512, 2048, 4096, 16384)
    ]
    assert attention == sorted(attention) and attention[-1] > 2 * 2 * 4096 * 16384 / 3.0e6


def test_a_block_has_a_pace_of_its_own():
    """Where a few blocks read a product, DRAM and the other multiprocessors idle, and no step is faster for that."""
    gpu = one().gpu
    slower = gpu._replace(constants=replace(gpu.constants, warp_clocks=6.2))
    few, many = (
        [gpu_waves.product_us(1, rows, 4096, 4, each)[0] for each in (gpu, slower)]
        for rows in (256, 12288)
    )
    # 256 rows: a split of at most 16 K-blocks, 0.65 or 1.3 us each
    step_us = 2.8 * 16 * 256 / 32 * 3.1 / 1.7e3
    assert step_us == pytest.approx(0.65, rel=0.01)
    assert few[1] - few[0] >= step_us and many[1] > many[0]


def test_kernels_behind_others_than_ours_do_not_start_early():
    """They wait for the end of the compiler's, and fetch nothing before it."""

    def early(form, part):
        found = {}
        for k in cycle(one(form))[part]:
            found.setdefault(k.name.split()[0], set()).add(k.early)
        return {name for name, kinds in found.items() if True in kinds}

    ours = {"wqkv", "wo", "w13", "w2", "attention"}
    for form in ("bf16", "int4"):
        assert early(form, "verify") == ours | {"head", "norm", "candidates", "best"}
        assert early(form, "draft") == ours - {"wqkv"} | {"candidates", "level"}


def test_doubts_cost_time_and_measured_numbers_hold(tmp_path):
    for form in gpu_model.FORMATS:
        case = one(form)
        assert all(
            mine < doubted
            for mine, doubted in zip(times_ms(case).values(), times_ms(case.doubted).values())
        )
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"constants": {"norm_us": 1.0, "bandwidth_tb_s": 3.1}}))
    measured = one(measured=str(file))
    for end in (measured, measured.doubted):
        assert (end.gpu.constants.norm_us, end.gpu.constants.bandwidth_tb_s) == (1.0, 3.1)
    assert measured.doubted.gpu.constants.small_us > measured.gpu.constants.small_us


def test_dependent_launch_needs_sm_90():
    assert one(gpu="h100").pdl and not one(gpu="a100").pdl


def test_measured_numbers_replace_estimates(tmp_path, capsys):
    before = times_ms(one(gpu="a100"))["verify"]
    w13 = next(k.us for k in cycle(one(gpu="a100"))["verify"] if k.name == "w13 int4 64")
    file = tmp_path / "measured.json"
    file.write_text(
        json.dumps(
            {
                "constants": {"boundary_us": 2.2},
                "kernels_us": {"w13 int4 64": w13 + 10, "w13 int4 32": 1},
            }
        )
    )
    case = one(gpu="a100", measured=str(file))
    launches = sum(k.count for k in cycle(case)["verify"])
    assert times_ms(case)["verify"] == pytest.approx(before + launches * 1e-3 + 32 * 10e-3)
    gpu_model.run(
        ModelOptions(
            formats="int4",
            trees="dynamic 6/10/60",
            measured=str(file),
            kernels=True,
            gpu="a100",
        )
    )
    out = capsys.readouterr().out
    assert f"| verify | w13 int4 64 | 32 | {w13 + 10:.2f} |" in out
    assert out.endswith("note: measured kernels that none of these cycles has: w13 int4 32\n")


def test_what_is_printed_says_what_it_is_and_how_far_the_aims_are(capsys):
    gpu_model.run(ModelOptions(formats="bf16", trees="vanilla,chain 5"))
    first, *_, vanilla, chain = capsys.readouterr().out.splitlines()
    assert first.startswith("A model's times, nothing measured here: llama2-7b, h100")
    assert vanilla.startswith("| bf16 vanilla | 176 |") and vanilla.endswith(
        "| 173 - 199 | 165 - 195: 105% - 102% |"
    )
    assert chain.endswith("|  |")
    gpu_model.run(ModelOptions(shape=DEMO, formats="int8", trees="vanilla"))
    assert capsys.readouterr().out.endswith("|  |\n")  # no aim for another shape


def test_ranks_share_the_target_and_each_has_the_head(capsys, tmp_path):
    """Two all-reduces a layer, and a gather for every pass of the LM head, but not for a copy in another format."""
    whole, split, copy = (
        one(form, "dynamic 6/8/32", shape="llama2-70b", gpu="a100", tp=n)
        for form, n in (("bf16", 1), ("bf16", 4), ("bf16+int4", 4))
    )
    verified, drafted = gpu_model.weights_gb(whole)
    assert gpu_model.weights_gb(split)[0] == pytest.approx(verified / 4)
    assert drafted / 4 < gpu_model.weights_gb(split)[1] < drafted
    together = [{p: sum(k.count for k in ks if k.name.startswith(("all-reduce", "gather"))) for p, ks in cycle(c).items()}
                for c in (whole, split, copy)]  # fmt: skip
    assert [each["verify"] for each in together] == [0, 161, 161]
    assert [each["draft"] for each in together] == [0, 6, 0]
    (reduce,) = (k for k in cycle(split)["verify"] if k.name == "all-reduce 32")
    assert reduce.us == pytest.approx(12 + 32 * 8192 * 2 * 2 * 3 / 4 / 0.2e6)
    scores = {p: k.received for p, ks in cycle(split).items() for k in ks if k.name == "gather 32"}
    assert scores["verify"] == 32 * 16 * 3, "a token and its score, of three others"
    assert times_ms(split)["verify"] < times_ms(whole)["verify"] / 2
    gpu_model.run(
        ModelOptions(shape="llama2-70b", gpu="a100", tp=4, formats="int4", trees="vanilla")
    )
    out = capsys.readouterr().out
    assert (
        "llama2-70b, 4 x a100, 512 slots" in out
        and "| int4 vanilla | 8.86 | 0.00 | 42 | 161 | 4 | " in out
    )
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"kernels_us": {"all-reduce 1": 500}}))
    gpu_model.run(
        ModelOptions(
            shape="llama2-70b",
            gpu="a100",
            tp=4,
            formats="int4",
            trees="vanilla",
            measured=str(file),
        )
    )
    assert "| int4 vanilla | 8.86 | 0.00 | 42 | 161 | 4 | 80." in capsys.readouterr().out, (
        "as many bytes as before"
    )


@pytest.mark.parametrize("argv,says", [
    (["--gpu", "h1000"], "invalid choice: 'h1000'"),
    (["--formats", "int4,fp8"], "--formats: 'fp8' is no format; use bf16, bf16+int4, int8, int4"),
    (["--trees", "dynamic 6/8"], "--trees: dynamic 6/8 is no tree; write vanilla, chain 5 or dynamic 6/8/32"),
    (["--trees", "dynamic 1/2/9"], "a tree of 9 nodes needs 8 candidates"),
    (["--shape", "llama9-7b"], "llama9-7b is not a known shape; use one of"),
    (["--shape", "mixtral-8x7b"], "is a mixture of experts, which the model cannot do; use a dense one"),
    (["--tau", "0"], "--tau must be at least 1; it is 0.0"),
    (["--tp", "3"], "must divide 32 heads and 11008 columns of the feed-forward, and divide 32 KV heads or be a multiple "
     "of them; it is 3: make it 1 or 2 or 4 or 8 or 16 or 32"),
    (["--shape", "llama2-70b,n_kv_heads=6", "--tp", "4"], "and divide 6 KV heads or be a multiple of them; it is 4: "
     "make it 1 or 2"),
    (["--measured", "nowhere.json"], "--measured: there is no file nowhere.json"),
    (["--measured", {"constants": {"speed": 1}}], "speed is no constant of the model; they are bandwidth_tb_s"),
    (["--measured", {"kernel_us": {"norm": 2}}], 'must be {"constants": {..}, "kernels_us": {..}}'),
    (["--measured", {"kernels_us": {"norm": float("nan")}}], "norm must be a positive number; it is nan"),
    (["--measured", {"kernels_us": {"norm": "2"}}], "norm must be a positive number; it is '2'"),
])  # fmt: skip
def test_mistakes(argv, says, monkeypatch, tmp_path, capsys):
    if isinstance(argv[1], dict):
        file = tmp_path / "measured.json"
        file.write_text(json.dumps(argv[1]))
        argv = [argv[0], str(file)]
    monkeypatch.setattr(sys, "argv", ["time_model.py", *argv])
    with pytest.raises(SystemExit) as stop:
        gpu_model.main()
    (error,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and error.startswith("time_model.py: ") and says in error


def test_without_triton_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("scripts.gpu.waves", "ops.cuda.attention"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("scripts.gpu.waves")
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(
        "need Triton, which is not installed; pip install triton\n"
    )


def test_programs_without_triton():
    """Those that need it at once say so; the others begin."""
    program = """
import sys
sys.modules["triton"] = None
import scripts.gpu.check, scripts.gpu.probe
import scripts.gpu.sweep
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    says = "sweep.py: the kernels need Triton, which is not installed; pip install triton\n"
    assert (done.returncode, done.stderr) == (2, says)
