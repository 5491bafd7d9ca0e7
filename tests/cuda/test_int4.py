"""The int4 matmul in CUDA C++ (backends/triton/int4.cu) without a GPU: emulated on a CPU, and compiled by NVRTC.

emulator.h says what is emulated. What a device alone can show, values of its tensor cores and times, is in test_gpu.py and
scripts/gpu/kernels.py.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends import planes
from backends import weight as weights
from backends.triton import int4, nvrtc
from backends.triton.launch import PART, TARGETS, Device
from backends.weight import LAYOUTS
from helpers import slow
from quantize import Linear, stack

HERE = Path(__file__).parent
H100 = TARGETS["90"]
ROWS = (1, 2, 6, 8, 17, 32, 60)


class EmulatedKernel:
    """Stands for `backends.triton.driver.Kernel`."""

    def __init__(self, folder: Path, options: tuple[str, ...]):
        library = folder / f"{abs(hash(options))}.so"
        paths = ("-I", HERE, "-I", Path(int4.__file__).parent)
        quick = ("-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC")
        source = HERE / "emulated_int4.cpp"
        subprocess.run(["g++", *quick, *options, *paths, source, "-o", library], check=True)
        self.run = ctypes.CDLL(str(library)).run
        self.run.restype = ctypes.c_bool

    def launch(self, blocks, threads, *arguments, shared_bytes, dependent):
        assert shared_bytes <= H100.shared_bytes and dependent
        given = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        assert self.run(blocks, threads, shared_bytes, *given), "beyond the shared memory"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> dict:
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernel for a CPU")
    kernels = {}

    def kernel(index: int, options: tuple[str, ...]) -> EmulatedKernel:
        if options not in kernels:
            kernels[options] = EmulatedKernel(tmp_path_factory.mktemp("int4"), options)
        return kernels[options]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4, "_kernel", kernel)
        patch.setattr(torch.cuda, "device", lambda index: nullcontext())
        # few blocks, so that each goes on to other outputs, and its rings go round
        patch.setattr(int4, "device_of", lambda index: H100._replace(processors=2))
        yield kernels


def random_layer(N: int, K: int, group: int, zeros: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales."""
    chance = torch.Generator().manual_seed(N + K + group)
    codes = torch.randint(-8, 8, (N, K), generator=chance, dtype=torch.int8)
    scale = (torch.rand(N, K // group, generator=chance) * 0.01).bfloat16()
    if zeros:
        zero = torch.randint(-8, 9, scale.shape, generator=chance).to(torch.int8)
        scale = weights.join_zeros(scale, zero)
    return codes, scale


# ------------------------------------------------------------------------------------- arithmetic

SMALL = [
    (160, 4096, 128, False, "none", (1, 6)),  # x in shared memory; 6 rows: one block a processor
    (160, 1152, 32, True, "fp32", (1, 3)),  # 9 chunks for 16 warps
    (160, 4096, 64, False, "swiglu", (1, 17)),  # x from L2
]
# N is cut down: more outputs are more of the same
SHAPES = [
    (192, K, group, zeros, "swiglu" if zeros else "none", ROWS)
    for K in (4096, 11008, 14336, 2048, 1152, 16384)
    for group, zeros in ((128, False), (32, False), (64, True))
]


@pytest.mark.parametrize("N, K, group, zeros, epilogue, rows", [*SMALL, *slow(SHAPES)])
def test_the_kernel_equals_its_reference(emulated, N, K, group, zeros, epilogue, rows):
    """Values; and a row's bits do not depend on the number of rows."""
    codes, scale = random_layer(N, K, group, zeros)
    units = int4.pack_fragments(codes, scale)
    x = torch.randn(max(rows), K, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = int4.multiply_plainly(x, units, "fp32" if epilogue == "none" else epilogue)
    first = None
    for M in rows:
        got = int4.multiply(x[:M], units, epilogue)
        error = (got.float() - want[:M].float()).norm() / want[:M].float().norm()
        assert error < (1e-6 if epilogue == "fp32" else 4e-3), (M, error)
        first = got[0] if first is None else first
        assert torch.equal(got[0], first), M


def test_rows_before_their_norm_are_divided(emulated):
    codes, scale = random_layer(64, 4096, 128, False)
    units = int4.pack_fragments(codes, scale)
    x = torch.randn(6, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    squares = x.float().view(6, -1, PART).pow(2).sum(-1).T.contiguous() * 3
    got = int4.multiply(x, units, "none", squares)
    torch.testing.assert_close(got, int4.multiply_plainly(x, units, "none", squares))
    assert torch.equal(got[:1], int4.multiply(x[:1], units, "none", squares[:, :1]))


# ------------------------------------------------------------------------------- weights and plans


@pytest.mark.parametrize("group, zeros", int4.UNITS.values())
def test_weights_come_back(group, zeros):
    codes, scale = random_layer(64, 256, group, zeros)
    units = int4.pack_fragments(codes, scale)
    assert units.shape == (4, 256 // group, units.shape[2]) and units.shape[2] in int4.UNITS
    back = int4.unpack_fragments(units)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scale)
    x = torch.eye(256, dtype=torch.bfloat16)
    got = planes.w4a16_fragments(x, units, epilogue="fp32")
    torch.testing.assert_close(got, weights.decode_codes(codes, scale, 8).T)


@pytest.mark.parametrize("device", TARGETS.values(), ids=TARGETS)
def test_plans_fit_their_device(device: Device):
    for unit in int4.UNITS:
        for K in (128, 2048, 4096, 11008, 14336, 28672):
            for M in (1, 2, 8, 9, 17, 64):
                plan = int4.plan_int4(M, K, unit, device)
                blocks = plan.blocks * (plan.shared_bytes + int4.RESERVED)
                assert blocks <= device.shared_bytes + int4.RESERVED, (plan, M, K)
                assert plan.stages > 0 and plan.rows in int4.HEIGHTS


def test_layers_are_packed_for_the_kernel_that_is_asked_for(monkeypatch):
    """Those that it takes, while loading; of no layer unless `GPT_EAGLE_INT4` says so."""

    def layout_of(N: int, K: int, experts: int = 0) -> str:
        codes, scale = random_layer(N, K, 32, False)
        weight = LAYOUTS["INT4_PLANES"].pack(codes, scale)
        if experts:
            weight = stack(iter([weight] * experts), experts)
        layer = Linear.of(weight)
        numbers = weights.decode_codes(codes, scale, 8)
        assert torch.equal(
            layer.dequantize(), torch.stack([numbers] * experts) if experts else numbers
        )
        return layer.packed.parts[0].layout

    monkeypatch.setattr(int4, "runs_on", lambda index: True)
    assert layout_of(64, 256) == "INT4_PLANES"
    monkeypatch.setattr(planes, "int4_kernel", lambda: "cuda")  # which reads the variable once
    assert layout_of(64, 256) == "INT4_FRAGMENTS"
    assert (
        layout_of(48, 256) == layout_of(64, 192) == layout_of(64, 256, experts=2) == "INT4_PLANES"
    )
    monkeypatch.setattr(int4, "runs_on", lambda index: False)
    assert layout_of(64, 256) == "INT4_PLANES"


def test_a_device_that_cannot_says_why(monkeypatch, capsys):
    """Too old, or without NVRTC; then Triton's kernels run, as they do for other sizes."""
    int4._leave_to_triton.cache_clear()
    monkeypatch.setattr(int4, "device_of", lambda index: TARGETS["80"]._replace(capability=75))
    assert not int4.runs_on.__wrapped__(0)
    assert "has no matmul in bfloat16; Triton's kernels multiply" in capsys.readouterr().err

    def no_nvrtc(*given):
        raise RuntimeError("torch has brought no NVRTC")

    monkeypatch.setattr(int4, "device_of", lambda index: H100)
    monkeypatch.setattr(int4, "_kernel", no_nvrtc)
    assert not int4.runs_on.__wrapped__(0)
    assert "note: int4 in CUDA C++: torch has brought no NVRTC; T" in capsys.readouterr().err
    assert not int4.takes(48, 128, 0)
    assert "only if 32 divides the outputs of a layer, and 128" in capsys.readouterr().err


def test_rows_of_another_type_are_refused():
    units = int4.pack_fragments(*random_layer(32, 128, 128, False))
    with pytest.raises(ValueError, match="use --dtype bfloat16"):
        int4.multiply(torch.ones(1, 128), units)


# --------------------------------------------------------------------------------------- compiled


def kernels_of(target: str) -> dict[tuple[str, ...], None]:
    """Return the options of all kernels of a device, at layers of known models."""
    found = {}
    for unit in int4.UNITS:
        for K in (1152, 4096, 11008):
            for M in (1, 8, 16, 32):
                plan = int4.plan_int4(M, K, unit, TARGETS[target])
                for epilogue in ("none", "swiglu"):
                    found[int4.options_of(plan, unit, epilogue)] = None
    return found


@pytest.mark.parametrize("target", ["90", *slow(["80", "89", "100"])])
def test_it_compiles_without_spills(target):
    """By NVRTC, for the device and the plans of its own. A part, or all with the slow tests."""
    try:
        nvrtc.nvrtc()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC, which torch for CUDA brings: {error}")
    tools = pytest.importorskip("compiled_kernels", reason="needs Triton's disassembler").TOOLS
    source = Path(int4.__file__).with_suffix(".cu").read_text()
    every = list(kernels_of(target))
    for options in every[:2] if target == "90" else every:
        options = (f"-arch=sm_{target}", *nvrtc.FLAGS, *options)
        cubin = nvrtc.compile_source(source, options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [tools / "cuobjdump", "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in usage, (options, usage)
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        blocks = int(re.search(r"BLOCKS=(\d)", " ".join(options))[1])
        assert registers * blocks <= 128, (options, registers)
