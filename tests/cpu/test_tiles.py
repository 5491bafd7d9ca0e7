"""The choice of the unit of matmuls on AMX tiles (tiles.py); test_weights.py tests their results.

The hardware is tested where it is in use. GPT_EAGLE_TILES=hardware tests it where the check at the start fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_weights import UNITS, Floats, _no_tiles, random, threads, tiles
from torch import Tensor

import backends.cpp.build
from backends.cpp.build import choose_tiles, kind_of_tiles
from backends.cpp.tiles import Operands, fault_of_hardware, matmuls
from backends.library import tiles_in_use
from backends.linear import linear_bf16_reference, linear_tiles_reference

ROOT = Path(backends.cpp.build.__file__).parents[2]
MISSING = backends.cpp.build.load_operators()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the operators cannot be built: {MISSING}")
NO_TILES = _no_tiles  # a fixture of all tests here, too


# ----------------------------------------------------------------------------------- who may use them


def child(program: str, **environment: str) -> str:
    """Run a program that imports this file as t. Returns: its output."""
    env = (
        os.environ
        | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/cpu'}:{ROOT / 'tests/cases'}"}
        | environment
    )
    command = [sys.executable, "-c", f"import test_tiles as t, torch, os\n{program}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


REFERENCES = {"none": linear_bf16_reference, "emulation": linear_tiles_reference}


def products_are(unit: str) -> bool:
    """Return whether products in bf16 have the bits of a unit."""
    case, x = Floats(random(77, 301)), random(9, 301, seed=1).bfloat16()
    return torch.equal(case.product(x), REFERENCES[unit](x, case.data))


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
        "t.refuse_tiles(); print(torch.ops.gpt_eagle.use_tiles('hardware'), t.products_are('none'))"
    )
    if "no filter" in says:
        pytest.skip("this system allows no filters")
    assert says.split() == ["False", "True"]


@UNITS
def test_a_forked_child_multiplies_as_its_parent(unit):
    """Between two products on several threads: no configuration and no worker is there."""
    case, x = Floats(random(421, 1301)), random(9, 1301, seed=1).bfloat16()
    with tiles(unit):
        with threads(3):
            want = case.product(x)
        pid = os.fork()  # PyTorch's own threads do not survive one
        if not pid:
            signal.alarm(60)  # it ends, whatever happens
            os._exit(0 if torch.equal(case.product(x), want) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        with threads(3):
            assert torch.equal(case.product(x), want)


def test_the_unit_that_the_environment_names(monkeypatch):
    monkeypatch.delenv("GPT_EAGLE_TILES", raising=False)
    assert kind_of_tiles() == "auto"
    program = "print(t.tiles_in_use(), t.products_are('emulation'))"
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
