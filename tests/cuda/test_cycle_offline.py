"""The CUDA path without a GPU: the code of a whole cycle is counted and compiled.

It needs an environment of its own, which any run of `python scripts/gpu/cycle_offline.py` makes. Slow: minutes for a GPU.
Checks that need a GPU are in test_gpu.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.gpu.cycle_offline import ENVIRONMENT, emit, is_reduction
from scripts.gpu.fake_cuda import GPUS

pytestmark = pytest.mark.slow

LAUNCHES = {  # at most, on an H100: of a layer, of a drafted level, of a cycle of 32 layers
    "bf16/vanilla": (5, 0, 178),
    "bf16/chain": (5, 11, 238),
    "bf16/26": (5, 10, 251),
    "bf16/60": (5, 10, 251),
    "bf16+int4/26": (5, 10, 251),
    "int4/vanilla": (5, 0, 178),
    "int4/26": (5, 10, 251),
    "int4/60": (5, 10, 251),
    "int4/26/gqa": (5, 10, 251),
    "int4/26/qwen3": (5, 10, 251),
    "bf16/ngram": (5, 0, 214),
    "bf16+int4/auto": (5, 10, 251),
    "bf16/26/sampled": (5, 21, 321),
    "int4/26/rows": (5, 10, 251),
    "bf16/26/eagle3": (5, 13, 271),
    "bf16/26/mixtral": (15, 10, 571),
    "int4/26/mixtral": (16, 10, 603),
    "int4/5/medusa": (5, 0, 213),
    "bf16/5/hydra": (5, 0, 223),
    "bf16/26/block": (5, 0, 221),
    "bf16/recycling": (5, 0, 191),
    "bf16/lookahead": (5, 0, 191),
}
CASES_OF = {
    "90": list(LAUNCHES),
    "80": ["int4/60", "bf16/vanilla", "bf16/60", "bf16/26/sampled"],
    "89": ["int4/60", "bf16/vanilla", "bf16/60"],
    "100": ["int4/60", "bf16/vanilla", "bf16/60"],
}  # by GPU
OLDEST_PASSED = 60  # tests, at least


@pytest.fixture(scope="session")
def python():
    """The environment's Python. Skips where it was not made."""
    program = ENVIRONMENT / "bin" / "python"
    if not program.exists():
        pytest.skip(
            f"{ENVIRONMENT} is not there; make it with python scripts/gpu/cycle_offline.py --cases int4/26"
        )
    return program


@pytest.fixture(scope="session")
def found(tmp_path_factory, worker_id, python):
    """The results of cycle_offline.py for a GPU. The first worker that asks runs it for all."""
    filelock = pytest.importorskip("filelock", reason="needs filelock, which torch brings")
    alone = worker_id == "master"
    folder = tmp_path_factory.mktemp("offline") if alone else tmp_path_factory.getbasetemp().parent

    def find(gpu: str) -> dict:
        file = folder / f"offline-{gpu}.json"
        with filelock.FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(emit(python, gpu, CASES_OF[gpu])))
        return json.loads(file.read_text())

    return find


@pytest.mark.parametrize("gpu", GPUS)
def test_everything_compiles(found, gpu):
    kernels = found(gpu)["kernels"]
    assert not [
        row for row in kernels if "error" in row or row["shared_bytes"] > GPUS[gpu].shared_bytes
    ]
    assert {row["whose"] for row in kernels} == {"own", "inductor"}


@pytest.mark.parametrize("gpu", GPUS)
def test_our_kernels_keep_everything_in_registers(found, gpu):
    assert not [
        row for row in found(gpu)["kernels"] if row["whose"] == "own" and row.get("stack_bytes")
    ]


@pytest.mark.parametrize("gpu", GPUS)
def test_no_temporary_of_the_size_of_a_cache(found, gpu):
    for name, case in found(gpu)["cases"].items():
        for step, facts in case["steps"].items():
            assert facts["largest_temporary_bytes"] < case["cache_buffer_bytes"] / 2, (name, step)


@pytest.mark.parametrize("gpu", GPUS)
def test_no_sum_is_chosen_by_timing(found, gpu):
    """Among several configurations inductor takes the fastest: sums in another order, from run to run."""
    assert not [
        row["name"]
        for row in found(gpu)["kernels"]
        if is_reduction(row) and row["configurations"] > 1
    ]


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches(found, case):
    facts = found("90")["cases"][case]
    counted = (facts["per_layer"], facts["per_level"], facts["per_cycle"])
    assert all(n <= most for n, most in zip(counted, LAUNCHES[case])), counted
    assert counted[0] >= 4, "a layer has four products: the count is wrong"


def test_products_of_16_bits_are_ours(found):
    """As they run, with gradients enabled: none of cuBLAS's is left in a cycle, not even the LM head's."""
    for name, case in found("90")["cases"].items():
        for step in case["steps"].values():
            assert not {"mm_dtype", "mm", "addmm", "bmm"} & set(step["order"]), name
        assert "matmul_kernel" in case["steps"]["decide"]["order"], name


def test_the_best_token_of_a_row_is_found_by_many_blocks(found):
    """Where nothing is drawn. Inductor's argmax has one block a row, which reads all of the vocabulary."""
    for name, case in found("90")["cases"].items():
        order = case["steps"]["decide"]["order"]
        assert ("block_kernel" in order) != name.endswith("/sampled"), name


def test_prompts_and_deferred_tokens_are_read_without_waiting(found):
    """A prefill pass, which is captured, needs nothing on the host, or fake tensors would have raised."""
    for name, case in found("90")["cases"].items():
        assert set(case["prefill"]) == {"64", "256"} and min(case["prefill"].values()) > 60, name
        assert (case["catch_up"] > 0) == name.endswith("/auto"), name


def test_norms_of_queries_and_keys_cost_no_launch(found):
    normed, plain = (found("90")["cases"][case] for case in ("int4/26/qwen3", "int4/26/gqa"))
    for part in ("per_layer", "per_level", "per_cycle"):
        assert normed[part] == plain[part]
    assert normed["steps"]["call_block"]["order"] == plain["steps"]["call_block"]["order"]


def test_compiled_steps_on_the_oldest_torch(python):
    """Run on the oldest version that the requirements allow, torch 2.11.

    Its compiler has limits that later ones do not have.
    """
    files = ["core/test_capture.py", "cpu/test_layers_cpu.py", "core/test_autosize.py"]
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        *(f"tests/{f}" for f in files),
    ]
    options = {"capture_output": True, "text": True, "cwd": Path(__file__).parents[2]}
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options)
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0 and int(passed[1]) >= OLDEST_PASSED, (
        result.stdout[-5000:] + result.stderr[-2000:]
    )
