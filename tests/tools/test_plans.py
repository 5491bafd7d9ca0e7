"""Tables of plans: a sweep writes them, and a device loads the one of its name."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="plans need Triton, which is to be had for Linux")

import backends.triton.plans  # noqa: E402
from backends.triton.launch import TARGETS  # noqa: E402
from backends.triton.plans import file_name, measured_on, to_json  # noqa: E402
from backends.triton.qmatmul import plan_product, tile_height  # noqa: E402
from run.parsing import one_line_errors  # noqa: E402
from scripts.bench import plans  # noqa: E402
from scripts.bench.cases import PlansOptions  # noqa: E402

DEVICE = TARGETS["90"]._replace(name="NVIDIA H100 80GB HBM3")
SHAPES = plans.shapes_of()


def time_of(plan, rows):
    """Fastest where nothing is as estimated: 3 splits, narrow blocks for few rows, most stages."""
    return abs(plan.splits - 3) * 100 + (plan.rows if rows < 64 else -plan.rows) - plan.stages


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tables."""
    monkeypatch.setattr(backends.triton.plans, "FOLDER", tmp_path)
    measured_on.cache_clear()
    plan_product.cache_clear()
    yield tmp_path
    measured_on.cache_clear()
    plan_product.cache_clear()


def test_a_table_holds_for_devices_of_its_name(folder):
    """At every number of rows, on which the splits do not depend."""
    chosen = {shape.key: plans.choose(shape, DEVICE, time_of) for shape in SHAPES}
    (folder / file_name(DEVICE.name)).write_text(to_json(DEVICE.name, chosen))
    for shape in SHAPES:
        bits, group = plans.FORMATS[shape.form]
        sizes = (shape.N, shape.K, bits, group)
        for M in (1, 16, 17, 32, 33, 64, 65, 256):
            height = tile_height(M, 16, 32)
            got = plan_product(M, *sizes, torch.bfloat16, DEVICE, shape.epilogue)
            entry = chosen[shape.key]
            assert got == plans.plan_of(height, entry.tiles[height], entry.splits)
            other = plan_product(M, *sizes, torch.bfloat16, TARGETS["90"], shape.epilogue)
            assert other == shape.estimate(height, DEVICE)
            assert other.splits != got.splits or shape.epilogue == "swiglu"
            wide = plan_product(M, *sizes, torch.float32, DEVICE, shape.epilogue)
            assert wide == plan_product(M, *sizes, torch.float32, TARGETS["90"], shape.epilogue)
    zeros = plan_product(1, 4096, 4096, 4, 128, torch.bfloat16, DEVICE, "split_k", "zeros")
    assert zeros.splits == 4, "weights with zero points were not measured"
    small = plan_product(1, 960, 576, 16, 0, torch.bfloat16, DEVICE, "none")
    assert small == plan_product(1, 960, 576, 16, 0, torch.bfloat16, TARGETS["90"], "none")


@pytest.mark.parametrize("change", [
    {"splits": 9}, {"splits": "3"}, {"tiles": {"16": [64, 3]}}, {"tiles": None},
    {"tiles": dict.fromkeys(("16", "32", "64"), [96, 3])},
    {"tiles": dict.fromkeys(("16", "32", "64"), [64, 9])},
])  # fmt: skip
def test_a_table_that_cannot_be_used(folder, capsys, change):
    shape = SHAPES[0]
    rows = json.loads(to_json("x", {shape.key: plans.choose(shape, DEVICE, time_of)}))
    rows["products"][shape.key].update(change)
    (folder / "x.json").write_text(json.dumps(rows))
    with pytest.raises(SystemExit) as raised, one_line_errors("generate.py"):
        measured_on("x")
    error = capsys.readouterr().err
    assert raised.value.code == 2 and error.count("\n") == 1
    assert "x.json has no plans that can be used" in error and "measure.py plans" in error


def test_the_whole_sweep_writes_what_it_has_so_far(folder, monkeypatch):
    """By a clock that says 1 us, and stops before the last matmul."""

    def timer(shape, device):
        return lambda plan, rows: 1 / 0 if shape == SHAPES[-1] else 1.0

    monkeypatch.setattr(plans, "Timer", timer)
    monkeypatch.setattr(plans, "device_of", lambda index: DEVICE)
    for name, value in (("is_available", True), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(ZeroDivisionError):
        plans.run(PlansOptions(out=str(folder / file_name(DEVICE.name))))
    assert [*measured_on(DEVICE.name)] == [shape.key for shape in SHAPES[:-1]]
