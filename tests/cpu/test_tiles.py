"""Matmuls on AMX tiles (backends/cpp/amx.h), by emulation and on the hardware, and the choice of the unit (tiles.py).

The hardware is tested where it is in use. GPT_EAGLE_TILES=hardware tests it where the check at the start fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_kernels_cpu import (
    KINDS,
    _no_tiles,
    check_bf16_edges,
    check_bf16_experts,
    check_bf16_rows_alone,
    linear,
    make_case,
    random,
    weights_bf16,
)
from torch import Tensor

import backends.cpp.build
from backends.cpp.build import choose_tiles, kind_of_tiles
from backends.cpp.tiles import Operands, fault_of_hardware, matmuls
from backends.library import tiles_in_use
from backends.linear import linear_bf16_reference, linear_tiles_reference
from helpers import BLOCK_KINDS, packed_blocks, random_blocks

ROOT = Path(backends.cpp.build.__file__).parents[2]
MISSING = backends.cpp.build.load_operators()
CHOSEN = tiles_in_use()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the operators cannot be built: {MISSING}")
ROWS = (1, 3, 8, 16, 17, 33)
NO_TILES = _no_tiles  # a fixture of all tests here, too
# a build for AVX2 alone multiplies int8 in 16 bits, and never on tiles
NATIVE = os.environ.get("GPT_EAGLE_MARCH", "") in ("", "native")
IN_8_BITS = NATIVE and {"avx512_vnni", "avx_vnni"} & set(backends.cpp.build.processor().split())


@contextmanager
def tiles(name: str):
    """Multiply on a unit, and without tiles before and afterwards."""
    if name == "hardware" and CHOSEN != "hardware":
        pytest.skip("this machine has no AMX tiles, or they are not in use")
    operators = torch.ops.gpt_eagle
    assert operators.use_tiles(name)
    _, before, _ = operators.tiles()
    try:
        yield
        _, configured, released = operators.tiles()
        assert (configured > before) == (name == "emulation") and configured == released
    finally:
        operators.use_tiles("none")


@pytest.fixture(params=["emulation", "hardware"])
def unit(request):
    with tiles(request.param):
        yield


# --------------------------------------------------------------------------------------------- bf16

# less than a tile of outputs, tiles that overlap, strips; K: part of a step, a step, with rests, odd
SHAPES = [(1, 1), (3, 2), (15, 64), (17, 32), (40, 96), (77, 301), (130, 640)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_bf16_has_the_bits_of_its_reference(unit, shape):
    weight, bias = weights_bf16(*shape), random(shape[0]).bfloat16()
    x = random(33, shape[1], seed=1).bfloat16()
    want = linear_tiles_reference(x, weight)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], weight), want[:rows])
        assert torch.equal(linear(x[:rows], weight, bias), want[:rows] + bias)
    narrow = torch.ops.gpt_eagle.matmul(x, weight, None, bias, len(weight), False)
    assert torch.equal(narrow, (want + bias).bfloat16())
    if shape[1] >= 96:
        assert not torch.equal(want, linear_bf16_reference(x, weight)), (
            "the order of sums is not seen"
        )


def test_bf16_of_many_rows_passes_over_panels(unit):
    """More than 64 rows take several strips at a time, more than 256 several passes."""
    weight, x = weights_bf16(600, 1090), random(280, 1090, seed=1).bfloat16()
    alone = torch.cat([linear(row[None], weight) for row in x[-3:]])
    for rows in (3, 40, 70, 280):
        assert torch.equal(linear(x[-rows:], weight)[-3:], alone)
    assert torch.equal(alone, linear_tiles_reference(x[-3:], weight))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bf16_row_does_not_depend_on_the_others(unit, threads):
    check_bf16_rows_alone(weights_bf16(421, 1301), random(40, 1301, seed=1).bfloat16(), threads)


def test_bf16_experts_and_numbers_at_the_edges(unit):
    check_bf16_experts()
    check_bf16_edges(linear_tiles_reference)


@pytest.mark.parametrize(
    ("x", "weight", "want"),
    [
        ([2.0**-130], [2.0**100], 0.0),  # an operand below 2^-126
        ([2.0**-100], [2.0**-27], 0.0),  # a product
        ([2.0**-100], [2.0**-26], 2.0**-126),
        ([2.0**-63, 0, 2.0**-63], [2.0**-63, 0, -(2.0**-63) * 0.75], 0.0),  # a sum of one chain
        ([2.0**-63, 2.0**-63], [2.0**-63, -(2.0**-63) * 1.5], 0.0),  # of both
        (
            [2.0**-63, *[0] * 31, 2.0**-63],
            [2.0**-63, *[0] * 31, -(2.0**-63) * 1.5],
            -0.0,
        ),  # of steps
        # fused: a product that is rounded or flushed first is lost
        ([2.0**-63, 0, 2.0**-64], [2.0**-62, 0, -(2.0**-64) * 1.5], 2.0**-125 - 1.5 * 2.0**-128),
    ],
)
def test_numbers_below_the_smallest_normal_one_are_zeros(unit, x, weight, want):
    x, weight = torch.tensor([x]).bfloat16(), torch.tensor([weight]).bfloat16()
    assert str(linear(x, weight).item()) == str(want)  # the sign, too


# -------------------------------------------------------------------------------------------- integers


def same_bits(product: Callable[[Tensor], Tensor], x: Tensor, unit: str) -> None:
    """Check that a product on tiles has the bits of the kernels that other processors run."""
    x[:, ::97] *= 30  # outliers, as hidden states have them
    want = [product(x[:n]) for n in ROWS]
    with tiles(unit):
        for n, y in zip(ROWS, want):
            assert torch.equal(product(x[:n]), y), n


@pytest.mark.parametrize("unit", ["emulation", "hardware"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_integer_sums_are_those_of_other_processors(kind, unit):
    if kind[0] == "int8" and not IN_8_BITS:
        pytest.skip("int8 has 16 bits here")
    k = 1408 if kind[1] else 1280  # panels, and a part of one
    case = make_case(kind, 77, k)
    same_bits(lambda x: case.operator(x, True), random(33, k, seed=1), unit)


@pytest.mark.parametrize("unit", ["emulation", "hardware"])
@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_sums_of_gguf_blocks_are_those_of_other_processors(name, unit):
    if name == "Q8_0" and not IN_8_BITS:
        pytest.skip("int8 has 16 bits here")
    k = 768  # a panel and a half
    layer = packed_blocks(random_blocks(name, 77, k))
    matmul = torch.ops.gpt_eagle.matmul
    same_bits(lambda x: matmul(x, *layer, None, 77, True), random(33, k, seed=1), unit)


@pytest.mark.parametrize("threads", [1, 3])
def test_integer_rows_on_threads(threads):
    """Every number of rows about the first that pays, and rows without a number among them."""
    case, x = make_case(("int4", 64), 1000, 512), random(40, 512, seed=1)
    x[3], x[5] = float("nan"), 1e30
    want = torch.cat([case.operator(row[None], True) for row in x])
    try:
        torch.set_num_threads(threads)
        with tiles("emulation"):
            for rows in (*range(6, 19), 32, 40):
                y = case.operator(x[:rows], True)
                assert torch.equal(y.nan_to_num(7), want[:rows].nan_to_num(7))
    finally:
        torch.set_num_threads(1)


def test_int8_that_ends_within_a_block_needs_no_tiles():
    case, x = make_case(("int8", 0), 77, 1300), random(33, 1300)
    want = case.operator(x)
    assert torch.ops.gpt_eagle.use_tiles("emulation")  # `_no_tiles` ends it
    before = torch.ops.gpt_eagle.tiles()
    assert torch.equal(case.operator(x), want)
    assert torch.ops.gpt_eagle.tiles() == before


def test_integer_experts():
    """Some have many rows, some few, one none: its weights are not read."""
    kind, matmul = ("int4", 32), torch.ops.gpt_eagle.matmul
    case = make_case(kind, 77, 256)
    packed = torch.stack(
        [type(case)(kind, case.codes.roll(e, 1), case.scale).packed for e in range(4)]
    )
    packed[0] = 255
    x, expert = random(55, 256, seed=1), torch.tensor([1, 2, 1, 3, 1] * 11)
    with tiles("emulation"):
        y = matmul(x, packed, case.table, None, 77, True, expert)
    for e in (1, 2, 3):
        alone = matmul(x[expert == e], packed[e], case.table, None, 77, True)
        assert torch.equal(y[expert == e], alone)


# ------------------------------------------------------------------------------------------------ speed


@pytest.mark.parametrize("rows", [16, 24, 32])
@pytest.mark.parametrize(
    "kind", [("int8", 0), ("int4", 32), ("int4", 128), "Q4_1", "Q4_K", "Q6_K"], ids=str
)
def test_no_family_is_slower_on_the_hardware_than_without_tiles(kind, rows):
    """Least processor time of many matmuls of 2048x2048 in turn, as other programs may share the cores."""
    if CHOSEN != "hardware":
        pytest.skip("this machine has no AMX tiles, or they are not in use")
    if isinstance(kind, str):
        layer, matmul = packed_blocks(random_blocks(kind, 2048, 2048)), torch.ops.gpt_eagle.matmul
        product = lambda x: matmul(x, *layer, None, 2048, True)  # noqa: E731
    else:
        product = make_case(kind, 2048, 2048).operator
    x = random(rows, 2048)
    least = {"none": float("inf"), "hardware": float("inf")}
    for _ in range(80):
        for unit in least:
            torch.ops.gpt_eagle.use_tiles(unit)  # `_no_tiles` ends it
            began = time.thread_time()
            product(x)
            least[unit] = min(least[unit], time.thread_time() - began)
    assert least["hardware"] < 1.1 * least["none"], {
        unit: f"{s * 1e3:.2f} ms" for unit, s in least.items()
    }


# ----------------------------------------------------------------------------------- who may use them


def child(program: str, **environment: str) -> str:
    """Run a program that imports this file as t. Returns: its output."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/cpu'}"} | environment
    command = [sys.executable, "-c", f"import test_tiles as t, torch, os\n{program}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def products_are(reference) -> bool:
    weight, x = weights_bf16(77, 301), random(9, 301, seed=1).bfloat16()
    return torch.equal(linear(x, weight), reference(x, weight))


def refuse_tiles() -> None:
    """Let the system answer EPERM to arch_prctl, as a sandbox may."""
    import ctypes
    import struct

    load, jump, back, arch_prctl = 0x20, 0x15, 0x06, 158
    steps = (
        (load, 0, 0, 0),
        (jump, 0, 1, arch_prctl),
        (back, 0, 0, 0x50001),
        (back, 0, 0, 0x7FFF0000),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filtered = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filtered, 0, 0):
        print("no filter")


@pytest.mark.skipif(
    "amx_tile" not in backends.cpp.build.processor().split(), reason="this processor has no tiles"
)
def test_a_refused_permission_leaves_the_other_kernels():
    says = child(
        "t.refuse_tiles(); print(torch.ops.gpt_eagle.use_tiles('hardware'), t.products_are(t.linear_bf16_reference))"
    )
    if "no filter" in says:
        pytest.skip("this system allows no filters")
    assert says.split() == ["False", "True"]


def test_a_forked_child_multiplies_as_its_parent(unit):
    """Between two products on several threads: no configuration and no worker is there."""
    weight, x = weights_bf16(421, 1301), random(9, 1301, seed=1).bfloat16()
    try:
        torch.set_num_threads(3)
        want = linear(x, weight)
        torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
        pid = os.fork()
        if not pid:
            signal.alarm(60)  # it ends, whatever happens
            os._exit(0 if torch.equal(linear(x, weight), want) else 1)
        assert os.waitpid(pid, 0)[1] == 0 and torch.equal(linear(x, weight), want)
    finally:
        torch.set_num_threads(1)


def test_the_unit_that_the_environment_names(monkeypatch):
    monkeypatch.delenv("GPT_EAGLE_TILES", raising=False)
    assert kind_of_tiles() == "auto"
    program = "print(t.CHOSEN, t.products_are(t.linear_tiles_reference))"
    assert child(program, GPT_EAGLE_TILES="emulation", GPT_EAGLE_MARCH="") == "emulation True\n"
    with pytest.raises(RuntimeError, match="tiles are none, hardware or emulation"):
        torch.ops.gpt_eagle.use_tiles("software")


# -------------------------------------------------------------------------------- the unit by default


class Machine:
    """A processor whose tiles are the unit `tiles`; "dies" and "hangs" at the first instruction in a child, "refused"."""

    def __init__(self, monkeypatch, tiles: str):
        self.use_tiles, self.tiles, self.pid = torch.ops.gpt_eagle.use_tiles, tiles, os.getpid()
        monkeypatch.setattr(torch.ops.gpt_eagle, "use_tiles", self.use)
        monkeypatch.delenv("GPT_EAGLE_TILES", raising=False)

    def use(self, name: str) -> bool:
        if name != "hardware":
            return self.use_tiles(name)
        if self.tiles == "refused":
            return not self.use_tiles("none")
        if os.getpid() == self.pid:
            return self.use_tiles("emulation")
        if self.tiles == "dies":
            os.kill(os.getpid(), signal.SIGILL)
        if self.tiles == "hangs":
            time.sleep(60)
        return self.use_tiles(self.tiles)


@pytest.mark.parametrize(
    ("hardware", "unit", "says"),
    [
        ("emulation", "emulation", ""),
        ("none", "none", "their results are not those of the emulation"),
        ("dies", "none", "a process that used them died or hung"),
        ("hangs", "none", "a process that used them died or hung"),
        ("refused", "none", ""),
    ],
)
def test_tiles_are_used_where_they_are_right(monkeypatch, capfd, hardware, unit, says):
    Machine(monkeypatch, hardware)
    monkeypatch.setattr("backends.cpp.tiles.LIMIT_S", 0.5 if hardware == "hangs" else 60)
    with torch.device("meta"):  # as where a model is built
        choose_tiles()
    assert tiles_in_use() == unit
    if says:
        says = (
            f"note: AMX tiles: {says}, so other kernels run; GPT_EAGLE_TILES=none omits the check\n"
        )
    assert capfd.readouterr().err == says


@pytest.mark.parametrize("number", range(18))
def test_a_wrong_bit_of_every_kind_of_matmul_is_seen(monkeypatch, number):
    Machine(monkeypatch, "emulation")

    def wrong(unit: str, operands: Operands) -> list[Tensor]:
        results = matmuls(unit, operands)
        assert len(results) == 18 and all(each.std() > 1 for each in results)
        if unit == "hardware":
            results[number].view(torch.int32)[-1, -1] ^= 1
        return results

    monkeypatch.setattr("backends.cpp.tiles.matmuls", wrong)
    assert fault_of_hardware() == "their results are not those of the emulation"


def test_nothing_is_checked_where_it_could_change_nothing(monkeypatch, capsys):
    """Without tiles, or with a unit that the environment names."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a check"))
    for hardware, kind, unit in (
        ("refused", "", "none"), ("dies", "none", "none"), ("dies", "hardware", "emulation"),
    ):  # fmt: skip
        Machine(monkeypatch, hardware)
        monkeypatch.setenv("GPT_EAGLE_TILES", kind)
        choose_tiles()
        assert (tiles_in_use(), capsys.readouterr().err) == (unit, "")
    Machine(monkeypatch, "refused")
    monkeypatch.setenv("GPT_EAGLE_TILES", "hardware")
    choose_tiles()
    assert tiles_in_use() == "none"
    assert capsys.readouterr().err.startswith("note: GPT_EAGLE_TILES=hardware: AMX tiles are miss")


def test_without_another_process_tiles_are_not_used(monkeypatch, capsys):
    Machine(monkeypatch, "emulation")
    monkeypatch.setattr(os, "fork", lambda: os.close(-1))  # it fails
    before = os.listdir("/proc/self/fd")
    choose_tiles()
    assert tiles_in_use() == "none" and len(os.listdir("/proc/self/fd")) == len(before)
    assert "they cannot be checked (Bad file descriptor), so other" in capsys.readouterr().err
