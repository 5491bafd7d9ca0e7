"""The choice of the unit of matmuls on AMX tiles (tiles.py); test_weights.py tests their results.

The hardware is tested where it is in use. GPT_EAGLE_TILES=hardware tests it where the check at the start fails.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from test_weights import UNITS, Floats, _no_tiles, random, threads, tiles
from torch import Tensor

import backends.cpp.build
from backends.cpp.build import choose_tiles
from backends.cpp.tiles import Operands, fault_of_hardware, matmuls
from backends.library import tiles_in_use

MISSING = backends.cpp.build.load_operators()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the operators cannot be built: {MISSING}")
NO_TILES = _no_tiles  # a fixture of all tests here, too


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
