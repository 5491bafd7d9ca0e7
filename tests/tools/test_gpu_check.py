"""Parts of the GPU scripts that need no GPU: their messages, and the table of measurements."""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import command_line
import ops.experts
import options
from scripts.bench import measure
from scripts.bench import papers as bench
from scripts.bench import peers as bench_peers
from scripts.gpu import check as gpu_check
from scripts.gpu import kernels as kernel_bench
from scripts.gpu import probe as gpu_probe
from scripts.gpu import sweep as gpu_sweep


def timed(form, layer, M, time_us, share):
    return {"format": form, "layer": layer, "M": M, "time_us": time_us, "share": share}


def test_the_table_shows_what_was_measured_and_what_failed(monkeypatch):
    monkeypatch.setattr(kernel_bench, "LAYERS", {"wo": (256, 512), "w2": (128, 1024)})
    rows = [timed("int4", layer, M, us, share) for layer, M, us, share in
            [("wo", 1, 10.0, 0.8), ("w2", 1, 30.0, 0.4), ("wo", 32, 15.0, 0.5), ("w2", 32, 35.0, 0.3)]]  # fmt: skip
    rows[0] |= {"correct": True, "same_bits": False}
    rows += [
        timed("int8", "wo", 1, 20.0, 0.9),
        {"format": "int8", "layer": "w2", "error": "OutOfMemoryError: no"},
    ]
    table = kernel_bench.summary(rows)
    assert (
        "| layer | rows | int8 | int4 |\n" in table
        and "| wo | 1 | 20.0 us, 90% | 10.0 us, 80% |" in table
    )
    assert "| w2 | 1 | failed | 30.0 us, 40% |" in table
    assert "int4, all layers: 1 rows 50%, 1.00 x; 32 rows 36%, 1.25 x" in table
    assert "int8, all layers: not measured" in table
    assert "wrong, or rows depend on others: int4 wo\n" in table
    assert table.endswith("failed: int8 w2 : OutOfMemoryError: no")


@pytest.mark.parametrize("options,message", [
    ({"only": "tests,speed"}, "--only: there is no part speed; use environment, int4, profile, bf16, smoke, kernels, sanitizers, sweep, tests, formats"),
    ({"out": __file__, "dry_run": True}, f"--out: cannot write {__file__}: File exists; name a folder"),
    ({"minutes": 0}, "--minutes must be above 0; it is 0"),
    ({}, "this machine or this torch has no CUDA device; run it on one that has, or add --dry_run"),
])  # fmt: skip
def test_mistakes(options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as error:
        gpu_check.check(gpu_check.CheckConfig(**options))
    assert str(error.value).startswith(message)


def test_a_gpu_that_is_too_old_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    with pytest.raises(ValueError, match="has compute capability 7.0, and the kernels need 8.0"):
        gpu_check.check(gpu_check.CheckConfig(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


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


def test_the_other_kernels_agree_with_their_peers_and_make_a_table(on_cpu, monkeypatch):
    """With the CPU's operators in the place of ours, and a clock that says one microsecond."""
    small = {"HEADS": {"8b": (4, 1)}, "CAPACITY": 40, "VOCABULARIES": (500,)}
    for name, value in small.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    rows = []
    for form in ("attention", "topk"):
        config = kernel_bench.BenchConfig(format=form, rows="1,7", lengths="20", rotate_mb=0)
        for name, M, make in kernel_bench.contests(config):
            contest = make()
            ours, *peers = ([call() for call in calls] for calls in contest.methods.values())
            for peer in peers:
                torch.testing.assert_close(ours, peer, atol=2e-2, rtol=2e-2)
            assert contest.read_bytes == (4 * M * 500 if form == "topk" else 4 * 128 * (20 + M)), (
                name
            )
        rows += kernel_bench.measure_cycle(config, 1e12)
    assert all(row["correct"] for row in rows) and len(rows) == 2 * 3 + 2 * 2
    rows[0] |= {"correct": False}
    rows[-1] = {k: v for k, v in rows[-1].items() if k != "time_us"} | {
        "error": "OutOfMemoryError: no"
    }
    table = kernel_bench.cycle_summary(rows)
    assert "| attention 8b, 20 slots | 7 | 1.0 us, 1% | 1.0 us, 1% | 1.0 us, 1% |" in table
    assert "| top-10 of 500 | 1 | 1.0 us, 0% |  | 1.0 us, 0% |" in table
    assert (
        "wrong: attention 8b, 20 slots 1\nfailed: top-10 of 500 10 torch: OutOfMemoryError: no"
        in table
    )


def test_compaction_goes_on_along_the_cache_and_agrees_with_the_loop(on_cpu, monkeypatch):
    for name, value in {"CAPACITY": 96, "CACHE_LAYERS": 2, "CACHE_HEADS": (1, 3)}.items():
        monkeypatch.setattr(kernel_bench, name, value)
    monkeypatch.setattr(kernel_bench.torch, "compile", lambda step, **_: step)
    monkeypatch.setattr(kernel_bench, "graph_times_s", lambda calls, replays: [len(calls) * 1e-6])
    rows = list(kernel_bench.measure_cycle(kernel_bench.BenchConfig(format="compact"), 1e9))
    assert [(row["method"], row["read_bytes"]) for row in rows] == [
        (method, 2 * 2 * 2 * heads * 6 * 256) for heads in (1, 3) for method in ("ours", "torch")
    ]
    assert all(
        row["correct"] and row["time_us"] == 2 for row in rows
    )  # two places in a cache of 96 slots
    assert (
        "| compaction, 2 layers of 3 heads | 7 | 2.0 us, 1843% |  | 2.0 us, 1843% |"
        in kernel_bench.cycle_summary(rows)
    )
    monkeypatch.setattr("kv_cache.compact", lambda *_: None)
    assert not any(
        row["correct"]
        for row in kernel_bench.measure_cycle(kernel_bench.BenchConfig(format="compact"), 1e9)
    )


def test_experts_agree_with_every_expert_and_report_the_bytes_of_those_that_are_hit(
    on_cpu, monkeypatch
):
    """With references in the place of our operators: on the CPU a routing is the experts themselves."""

    def grouped(reference):
        def product(x, packed, scale, expert):
            y = x.new_empty(len(x), packed.shape[2])
            for e, rows in ops.experts.rows_by_expert(expert):
                y[rows] = reference(x[rows], packed[e], scale[e])
            return y

        return product, reference

    monkeypatch.setattr(
        kernel_bench, "PRODUCTS", {f: grouped(r) for f, (_, r) in kernel_bench.PRODUCTS.items()}
    )
    monkeypatch.setattr(kernel_bench, "EXPERT_LAYERS", {"w2": (64, 512)})
    monkeypatch.setattr(kernel_bench, "EXPERT_TOKENS", (1, 7))
    monkeypatch.setattr(kernel_bench, "graph_times_s", one_microsecond)
    config = kernel_bench.BenchConfig(format="experts", rotate_mb=0)
    rows = list(kernel_bench.measure_cycle(config, 1e12))
    assert len(rows) == 2 * 4 and all(row["correct"] for row in rows)
    one = {
        "bf16": 2 * 64 * 512,
        "int8": 64 * 512 + 4 * 64,
        "int4": 64 * 512 // 2 + 2 * 64 * 512 // 128,
    }
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
    expected = {"bf16": 2 * N * K, "cublas": 2 * N * K, "int8": N * K + 4 * N, "int4": N * K // 2 + N * K // 128 * 2,
                "tinygemm": N * K // 2 + N * K // 128 * 4}  # fmt: skip
    got = {
        form: kernel_bench.make_layer(form, N, K, 128).weight_bytes for form in kernel_bench.FORMATS
    }
    assert got == expected


# ------------------------------------------------------------------------------------ the whole run


def step(name, code, share_s=60.0, **other):
    return gpu_check.Step(name, f"python -c {shlex.quote(code)}", share_s, "", **other)


def checked(out, only, **options):
    """Run a dry run. Returns: its exit status and the rows."""
    status = 0
    try:
        gpu_check.check(gpu_check.CheckConfig(out=str(out), only=only, dry_run=True, **options))
    except SystemExit as end:
        status = end.code
    return status, [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


WRITE = "open('{out}/results.jsonl', 'a').write('{{\"text\": \"a number\"}}' + chr(10)"
HANG = """
import pathlib, subprocess, sys, time
print("before", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("{out}", "pid").write_text(str(child.pid))
time.sleep(60)
"""


def test_a_part_that_fails_or_hangs_is_named_and_the_next_one_starts(monkeypatch, tmp_path):
    """Every way to end: earlier measurements are kept, and no process is left."""
    parts = {
        "one": (
            step("hangs", HANG, 2),
            step(
                "dies", f"{WRITE} + '{{{{\"to'); import os; os.abort()"
            ),  # in the middle of a line
            step("fails", "print('no device'); raise SystemExit(3)"),
            step("needs", "", needs="no-such-program"),
            gpu_check.Step("gpu", "python -c 1/0", 60.0),
        ),
        "two": (step("works", f"{WRITE})"),),
    }
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.1)
    began = time.monotonic()
    status, rows = checked(tmp_path, "one,two")
    assert status == 1 and time.monotonic() - began < 30
    ended = {
        row["step"]: row["wrong"] or row["left_out"] or "well" for row in rows if "step" in row
    }
    assert ended == {
        "hangs": "killed after 4 s", "dies": "died of SIGABRT", "fails": "exit status 3", "works": "well",
        "needs": "left out: there is no no-such-program", "gpu": "left out: it needs a GPU",
    }  # fmt: skip
    assert [row for row in rows if "step" not in row] == 2 * [{"text": "a number"}]
    child = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    assert not child.exists() or not child.read_bytes()  # gone, or dead and not yet cleared away
    assert "before\n$" in (tmp_path / "log.txt").read_text()
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert "    no device" in summary
    assert summary[-1] == "FAILED: one hangs, one dies, one fails"
    assert (
        summary[-3].split() == ["two", "works", "0", "s", "well"] and summary[-2] == "    a number"
    )
    assert (
        checked(tmp_path, "two")[0] == 0
        and "all went well" in (tmp_path / "summary.txt").read_text()
    )


def test_a_hang_takes_no_time_that_is_another_s(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])
    run = gpu_check.Check(gpu_check.CheckConfig(out=str(tmp_path)), ["int4"])
    steps = [step for part in gpu_check.FIRST.values() for step in part]
    assert sum(step.share_s for step in steps) <= 540
    for number, each in enumerate(steps):  # all hang
        limit = run.limit_s(each, steps[number + 1 :])
        assert each.share_s <= limit <= 2 * each.share_s
        now[0] += limit
    assert now[0] <= 540
    now[0] = 400.0  # limits include time that earlier steps left; never more than remains
    assert run.limit_s(steps[0]._replace(share_s=100), []) == 140
    assert run.limit_s(steps[0]._replace(share_s=50), [steps[0]._replace(share_s=60)]) == 80
    assert run.limit_s(steps[0]._replace(share_s=300), [steps[0]]) == 140


@pytest.mark.parametrize(
    "count,reason", [(1, "left out: it needs 2 GPUs, and there are 1"), (2, "")]
)
def test_ranks_need_gpus(monkeypatch, tmp_path, count, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    run = gpu_check.Check(gpu_check.CheckConfig(out=str(tmp_path)), ["tp"])
    assert {run._left_out(each) for each in gpu_check.PARTS["tp"]} == {reason}


def test_what_comes_too_late_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "PARTS", {"one": (step("late", "1/0"),)})
    status, (row,) = checked(tmp_path, "one", minutes=0.05)
    assert status == 1 and row["wrong"] == "not begun, since 0.05 minutes are over"
    assert not (tmp_path / "log.txt").exists()


CONFIGS = {
    "papers.py": bench.BenchConfig, "kernels.py": kernel_bench.BenchConfig,
    "probe.py": gpu_probe.ProbeConfig, "generate.py": options.GenerateConfig,
    "peers.py": bench_peers.PeersConfig, "sweep.py": gpu_sweep.SweepConfig,
}  # fmt: skip


def check_methods(config):
    """Every method is one that generate.py takes. Nothing is loaded: files that are missing here do not matter."""
    there = replace(config, checkpoint=options.DEMO)
    for setting in bench.settings_of(there):
        for method in there.methods.split(","):
            bench.method_config(method, setting, there)


def test_the_dry_run_walks_every_part(monkeypatch, tmp_path, capsys):
    """Every command is one that its program takes, as it runs on a GPU and as it runs here."""
    monkeypatch.chdir(gpu_check.ROOT)
    ran = []
    monkeypatch.setattr(gpu_check, "run", lambda command, log, limit_s: ran.append(command) or "")
    status, rows = checked(tmp_path, "", minutes=60)
    steps = [(part, step) for part, steps in gpu_check.PARTS.items() for step in steps]
    assert status == 0 and [(row["part"], row["step"]) for row in rows] == [
        (p, s.name) for p, s in steps
    ]
    assert len(ran) == sum(step.on_cpu is not None for _, step in steps) > 5
    commands = [gpu_check.command_of(step, tmp_path, False) for _, step in steps]
    said = capsys.readouterr().out
    assert all(shlex.join(command) in said for command in commands)
    for command in commands + ran:
        program, *flags = command[command.index(sys.executable) + 1 :]
        if program == "-m" and flags[0] == "pytest":
            continue
        if program == "-m":
            assert flags[:3] == ["torch.distributed.run", "--nproc_per_node", "2"]
            program, *flags = flags[3:]
        config = command_line.parse(CONFIGS[Path(program).name], program, "", flags)
        if hasattr(config, "check"):
            config.check()
        if program.endswith("peers.py"):
            prompts = [text for texts in bench_peers.read_tasks(config).values() for text in texts]
            assert all(
                bench_peers.groups_of(prompts, size * config.prompts_per_row)
                for size in config.sizes
            )
        own = {
            "generate.py": "",
            "scripts/bench/peers.py": str(tmp_path / "rows.json"),
            "scripts/bench/papers.py": str(tmp_path / "papers.jsonl"),
        }
        if program.endswith("papers.py"):
            check_methods(config)
        assert config.json == own.get(program, str(tmp_path / "results.jsonl"))
        assert "cuda" in flags or program.endswith(("kernels.py", "sweep.py"))


def test_few_files_come_back(monkeypatch, tmp_path):
    """A machine that is lent may give back no more than eight, whichever parts ran."""
    monkeypatch.setattr(gpu_check, "run", lambda command, log, limit_s: log.touch() or "")
    checked(tmp_path, ",".join(gpu_check.PARTS), minutes=60)
    written = {file.name for file in tmp_path.iterdir()}
    named = {
        word.removeprefix("{out}/")
        for steps in gpu_check.PARTS.values()
        for step in steps
        for word in step.command.split()
        if word.startswith("{out}/") and word != "{out}/papers.jsonl"  # taken up after each step
    }
    assert written == {"log.txt", "results.jsonl", "summary.txt"}
    assert len(written | named) <= 8 and named == {"results.jsonl", "rows.json"}


def test_where_our_kernels_fail_later_steps_run_without_dependent_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_PDL", "1")
    show = "import os; print('one cycle of', os.environ['EAGLE_PDL'])"
    for failing, pdl in (("other", "1"), ("small_kernels", "0")):
        parts = {"p": (step(failing, "raise SystemExit(1)"), step("later", show))}
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        assert checked(tmp_path, "p")[0] == 1
        summary = (tmp_path / "summary.txt").read_text()
        assert f"    one cycle of {pdl}\n" in summary
        assert ("later steps run without dependent launch" in summary) == (pdl == "0")


def test_programs_of_cuda_need_not_be_on_the_path(monkeypatch, tmp_path):
    program = tmp_path / "compute-something"
    program.write_text("#!/bin/sh\necho one cycle of it")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(gpu_check, "CUDA_PROGRAMS", str(tmp_path))
    one = gpu_check.Step("one", "env A=1 compute-something", 60.0, "", needs="compute-something")
    monkeypatch.setattr(gpu_check, "PARTS", {"p": (one,)})
    assert checked(tmp_path / "out", "p")[0] == 0
    assert "    one cycle of it\n" in (tmp_path / "out" / "summary.txt").read_text()


def check_compiled(folder, monkeypatch):
    """Our kernels have travelled, and Triton finds them where they are now."""
    cache = pytest.importorskip("triton.runtime.cache", reason="kernels need Triton")
    names = ["__grp__matmul_kernel.json", "matmul_kernel.cubin", "matmul_kernel.json"]
    assert sorted(file.name for file in folder.rglob("*.*")) == names
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    gpu_check.use_compiled(folder.with_name("nothing"))
    assert not os.environ["TRITON_CACHE_DIR"]
    gpu_check.use_compiled(folder)
    found = cache.FileCacheManager("KEY-matmul_kernel").get_group("matmul_kernel.json")
    assert set(found.values()) == {str(folder / "KEY-matmul_kernel" / name) for name in names[1:]}


def test_a_table_of_plans_is_loaded_by_later_steps(monkeypatch, tmp_path):
    """That of the sweep, and no older one that lies in the folder of another part's results."""
    folder = tmp_path / "measured"
    monkeypatch.setattr(gpu_check, "FOLDER", folder)
    write = "open('{out}/NVIDIA-X.json', 'w').write('a table')"
    for part, copied in (("other", []), ("sweep", ["NVIDIA-X.json"])):
        monkeypatch.setattr(gpu_check, "PARTS", {part: (step("one", write),)})
        assert checked(tmp_path / "out", part)[0] == 0
        assert [file.name for file in folder.glob("*")] == copied


def test_three_commands_take_ten_minutes():
    """Those of the README: known parts, whose shares fit the minutes of each."""
    text = (gpu_check.ROOT / "scripts/gpu/README.md").read_text()
    commands = [
        line for line in text.splitlines() if line.startswith("python") and "--only" in line
    ]
    total = 0.0
    for line in commands:
        flags = shlex.split(line, comments=True)[2:]
        config = command_line.parse(gpu_check.CheckConfig, "check.py", "", flags)
        steps = [one for part in config.only.split(",") for one in gpu_check.PARTS[part]]
        assert sum(one.share_s for one in steps) <= 60 * config.minutes, line
        total += config.minutes
    assert len(commands) == 3 and total <= 10


def test_a_pack_that_is_too_large_is_not_made(tmp_path, monkeypatch):
    """The tracked files leave 4 MB for compiled kernels; more of them are refused."""
    cache = tmp_path / "cache" / "KEY"
    cache.mkdir(parents=True)
    kernel = cache / "matmul_kernel.cubin"
    kernel.touch()
    os.truncate(kernel, int(4e6))
    copied = []
    monkeypatch.setattr(gpu_check.shutil, "copy", lambda source, to: copied.append(to))
    try:
        gpu_check.pack(tmp_path / "pack", str(cache.parent))
    except ValueError as error:
        if "git checkout" in str(error):
            pytest.skip("needs the project's git checkout; this is a copy")
        raise
    assert tmp_path / "pack" / gpu_check.COMPILED / "KEY" / kernel.name in copied
    os.truncate(kernel, int(16e6))
    copied.clear()
    with pytest.raises(ValueError, match=r"16.0 of them compiled kernels, and 30 may travel"):
        gpu_check.pack(tmp_path / "another", str(cache.parent))
    assert not copied


def test_the_pack_is_small_and_has_what_the_steps_need(tmp_path, monkeypatch):
    folder = tmp_path / "pack"
    cache = tmp_path / "cache"
    for name in ("matmul_kernel", "triton_poi_fused_0"):  # of ours, of inductor's
        key = cache / f"KEY-{name}"
        key.mkdir(parents=True)
        for end in ("cubin", "json", "ptx"):
            (key / f"{name}.{end}").write_text("{}")
        paths = {f"{name}.cubin": f"/elsewhere/{name}.cubin"}
        (key / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))
    command = [sys.executable, "scripts/gpu/check.py", "--pack", str(folder)]
    command += ["--compiled", str(cache)]

    def run(*words, cwd):
        return subprocess.run(words, cwd=cwd, text=True, stdout=-1, stderr=-2)

    done = run(*command, cwd=gpu_check.ROOT)
    if "needs the project's git checkout" in done.stdout:
        pytest.skip("needs the project's git checkout; this is a copy")
    assert done.returncode == 0, done.stdout
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert 15e6 < sum(file.stat().st_size for file in files) < gpu_check.PACK_BYTES
    check_compiled(folder / gpu_check.COMPILED, monkeypatch)
    for steps in gpu_check.PARTS.values():
        for word in " ".join(step.command for step in steps).replace("=", " ").split():
            if "/" in word and "{out}" not in word and (gpu_check.ROOT / word).exists():
                assert (folder / word).exists(), word
    flags = ("-q", "-n0", "--collect-only", "-m", "smoke", "tests/cuda/test_gpu.py")
    collected = run(sys.executable, "-m", "pytest", *flags, cwd=folder)
    assert collected.returncode == 0 and "40/" in collected.stdout, collected.stdout
    again = run(*command, cwd=gpu_check.ROOT)
    assert (
        again.returncode == 2
        and again.stdout.count("\n") == 1
        and "is there already" in again.stdout
    )


@pytest.mark.slow  # 3 minutes: compiles steps of the demo, twice
def test_a_real_dry_run(tmp_path):
    command = [sys.executable, "scripts/gpu/check.py", "--dry_run", "--minutes", "60"]
    done = subprocess.run(
        command, cwd=gpu_check.ROOT, env=os.environ | {"OUT": str(tmp_path)}, text=True, stdout=-1
    )
    assert done.returncode == 0 and done.stdout.endswith("all went well\n"), done.stdout
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"results.jsonl", "rows.json", "summary.txt", "log.txt"}
    import test_gpu

    assert (
        f"{len(test_gpu.SMOKE)} skipped, 0 failed" in done.stdout
        and "tree_depth=6:tree_topk=8:tree_size=32: " in done.stdout
    )


# ---------------------------------------------------------------------------------------- summaries


def test_rows_in_a_few_words():
    row = {
        "task": "python",
        "method": "none",
        "tokens_per_s": 351.4,
        "speedup": 1.0,
        "tau": 1,
        "draft_ms": 0.04,
        "verify_ms": 2.9,
        "rest_ms": 0.1,
        "verify_of_ceiling": 0.81,
        "identical": None,
        "compile_s": 12.3,
    }
    assert gpu_check.told(row) == (
        "python none 351 tokens/s, tau 1.00, draft 0.04 verify 2.90 rest 0.10 ms, 100% of vanilla's rate, 81% of ceiling; "
        "compiled in 12 s"
    )
    others = [timed("int4", "wo", 1, 1.0, 1.0), {"part": "kernels", "kernel": "a"}, {}]
    assert not any(map(gpu_check.told, others)) and gpu_check.told({"text": "x"}) == "x"


def test_the_lines_of_papers_go_to_the_one_log(monkeypatch, tmp_path):
    """Also its rounds, where it is killed; and the lines that sum up a profile, into the summary."""
    write = "import pathlib; out = pathlib.Path('{out}')"
    for name in gpu_check.PAPERS_LOGS:
        write += f"; (out / '{name}').write_text('{{{{\"task\": \"{name}\"}}}}\\n')"
    one = step(
        "one", f"print('one cycle of none: 5 kernels'); print('end'); {write}; raise SystemExit(1)"
    )
    parts = {"p": (one, step("two", "print('fine')"))}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    status, rows = checked(tmp_path, "p")
    assert status == 1 and [(row.get("by"), row.get("task")) for row in rows] == [
        *(("one", name) for name in gpu_check.PAPERS_LOGS), (None, None), (None, None),
    ]  # fmt: skip
    assert not list(tmp_path.glob("papers*"))
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.count("    one cycle of none: 5 kernels") == 1


def test_kernels_in_a_few_words(monkeypatch):
    monkeypatch.setattr(kernel_bench, "LAYERS", {"wo": (256, 512)})
    rows = [timed("int4", "wo", M, us, 0.5) for M, us in ((1, 10.0), (32, 15.0))]
    assert gpu_check.told_of_kernels(rows) == [
        "all layers: 1 rows 50%, 1.00 x; 32 rows 50%, 1.50 x"
    ]
    others = [{"kernel": "a", "M": M, "method": method, "time_us": us}
              for M in (1, 2) for method, us in (("ours", 10.0), ("cut", 20.0 * M), ("masked", 90.0))]  # fmt: skip
    others.append({"kernel": "b", "M": 1, "method": "ours", "error": "E"})
    assert gpu_check.told_of_kernels(others) == [
        "2 shapes, 0.25 to 0.50 of the time of torch's fastest"
    ]


# -------------------------------------------------------------------------------------------- tests

LOSING = """
import time
import pytest
import lost_device
lost = []

def use():
    assert not lost, "an illegal memory access was encountered"

@pytest.fixture(autouse=True)
def _watched():
    with lost_device.watched(use, 1):
        yield

@pytest.mark.parametrize("number", range(12))
def test_it(number):
    if number == 3:
        lost.append(number)
        assert False, "here it went"
    if number == 7:
        time.sleep(60)
    assert not lost
"""


@pytest.mark.slow  # workers that start anew: 4 s
def test_a_worker_ends_with_its_device_or_a_test_that_hangs_and_the_others_go_on(tmp_path):
    (tmp_path / "test_losing.py").write_text(LOSING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        "2",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "test_losing.py"], cwd=tmp_path, text=True, stdout=-1, stderr=-2, timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "cases")},
    )  # fmt: skip
    told = gpu_check.told_of_tests(done.stdout)
    assert told.startswith("10 tests passed, 0 skipped, 2 failed: "), done.stdout
    assert {"test_it[3]", "test_it[7]"} == set(told.partition(": ")[2].split(", "))
    assert "here it went" in done.stdout and done.stdout.count("crashed while running") >= 2


def test_about_thirty_tests_are_smoke():
    import test_gpu

    class Seen:
        def pytest_collection_finish(self, session):
            self.names = [item.name for item in session.items]

    file, seen = Path(test_gpu.__file__), Seen()
    flags = [
        "-c",
        str(file.parents[2] / "pyproject.toml"),
        "-n0",
        "-q",
        "--collect-only",
        "-m",
        "smoke",
    ]
    assert pytest.main([*flags, str(file)], plugins=[seen]) == 0
    assert 25 <= len(seen.names) <= 40 and seen.names == test_gpu.SMOKE
    assert seen.names[0].startswith("test_captured_cycles"), (
        "the longest first, or they end too late"
    )


# ----------------------------------------------------------------------------------------- ceilings


def test_a_gpu_s_ceiling_is_timed_by_events_over_eight_gigabytes(monkeypatch):
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        record = lambda self: calls.append("record")  # noqa: E731
        synchronize = lambda self: calls.append("wait")  # noqa: E731
        elapsed_time = lambda first, last: 4.0  # noqa: E731  (ms)

    def ones(elements, device):
        return SimpleNamespace(nbytes=4 * elements, sum=lambda: calls.append(device))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure.torch, "ones", ones)
    assert measure._bandwidth("cuda:1", 2, torch.get_num_threads()) == [8e9 / 4e-3] * 2
    assert calls == ["record", "cuda:1", "record", "wait"] * 3


def test_probes_say_what_they_found(tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    for name in ("facts", "capture"):
        monkeypatch.setattr(
            sys, "argv", ["probe.py", "--probe", name, "--device", "cpu", "--json", str(out)]
        )
        gpu_probe.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["probe"] for row in rows] == ["facts", "capture"] and torch.__version__ in rows[0][
        "text"
    ]
    assert gpu_probe.lines_of("no-such-program") == ["no no-such-program (FileNotFoundError)"]
    monkeypatch.setattr(gpu_probe, "copy_into", lambda x, y: None)
    with pytest.raises(AssertionError):
        gpu_probe.capture("cpu")


def test_a_compiled_step_that_loses_the_fields_of_a_record_is_found(traced, monkeypatch):
    """As on torch 2.11, where NamedTuple._replace returned an empty record."""
    assert gpu_probe.compiling("cpu")["text"]
    monkeypatch.setattr(gpu_probe, "replace_fields", lambda pair, **_: pair)
    with pytest.raises(AssertionError):
        gpu_probe.compiling("cpu")
