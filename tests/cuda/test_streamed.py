"""The product in CUDA C++ without a GPU: its source runs on a processor (cuda_on_cpu.h), and compiles by NVRTC."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which is to be had for Linux")


import ops.cuda.layout as layout  # noqa: E402
from ops.cpu.build import compiler  # noqa: E402
from ops.cuda import quantized, streamed  # noqa: E402
from ops.cuda.launch import Device  # noqa: E402
from ops.cuda.quantized import ProductPlan, bits_and_group, sizes_of  # noqa: E402
from ops.library import cuda_products  # noqa: E402
from ops.quantized import w4a16_reference, w8a16_reference  # noqa: E402

HERE = Path(__file__).parent
H100 = Device(132, 232448, 90, True, "an H100")
DEVICES = [Device(108, 166912, 80), Device(128, 101376, 89), H100, Device(148, 232448, 100, True)]
FORMATS = [(4, 32), (4, 64), (4, 128), (8, 0), (16, 0)]


def compile_for_cpu(folder, constants, source=None):
    """Return the function `run` of streamed_on_cpu.cpp. source: of streamed.cu, if changed"""
    program = (HERE / "streamed_on_cpu.cpp").read_text()
    file = streamed.SOURCE
    if source:
        file = folder / "changed.cu"
        file.write_text(source)
    library = folder / f"{len(list(folder.iterdir()))}.so"
    named = [f"-D{name}={value}" for name, value in constants]
    flags = [
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-div-by-zero",
        "-Wno-unused-function",
    ]
    program = program.replace("../../ops/cuda/streamed.cu", str(file))
    command = [compiler(), *flags, *named, f"-I{HERE}", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=program.encode(), check=True)
    return ctypes.CDLL(str(library)).run


def run(function, x, packed, scale, cut, epilogue="none", squares=None):
    """Compute a product as `streamed.matmul`, on the CPU. Returns: it, and copies of x that came too early."""
    bits, _ = bits_and_group(scale)
    N, K = sizes_of(packed, bits)
    F = x.shape[-1]
    x = quantized.padded_to(x, K)
    M = len(x)
    gated = epilogue == "swiglu"
    dtype = torch.float32 if epilogue == "fp32" or cut.splits > 1 else x.dtype
    shape = (cut.splits, M, N) if cut.splits > 1 else (M, N // 2 if gated else N)
    y = torch.full(shape, float("nan"), dtype=dtype)
    tensors = (x, packed, scale, squares, y)
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    sizes = (M, N, K, 0 if squares is None else len(squares), F, cut.splits)
    faults = function(*pointers, (ctypes.c_int * 6)(*sizes))
    return y, faults


def weights_of(bits, group, N, K, dtype):
    """Random weights. Returns: packed, scale, and the function that multiplies by them in fp32."""
    generator = torch.Generator().manual_seed(bits + group)
    if bits == 16:
        w = torch.randn(N, K, generator=generator).to(dtype)
        return w, None, lambda x: x.float() @ w.float().T
    if bits == 8:
        codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
        packed = layout.pack_int8_planes(codes)
        scale = torch.rand(N, generator=generator) * 0.02
        return packed, scale, lambda x: w8a16_reference(x.float(), packed, scale)
    codes = torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8)
    packed = layout.pack_int4_planes(codes)
    scale = (torch.rand(N, -(-K // group), generator=generator) * 0.2).bfloat16()
    scale = layout.pack_scales(scale, group)
    return packed, scale, lambda x: w4a16_reference(x.float(), packed, scale)


CASES = [  # bits, group, epilogue, dtype, N, K, splits
    (4, 128, "none", torch.bfloat16, 200, 896, 1),
    (4, 64, "swiglu", torch.bfloat16, 144, 576, 1),
    (4, 32, "fp32", torch.float16, 72, 512, 1),
    (8, 0, "none", torch.float16, 130, 1160, 3),
    (16, 0, "swiglu", torch.bfloat16, 272, 328, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_it_is_the_product(case, tmp_path):
    """Against the references in fp32; a row has the same bits among 1, 30 and 64, and x is read late."""
    bits, group, epilogue, dtype, N, K, splits = case
    packed, scale, multiply = weights_of(bits, group, N, K, dtype)
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    squares = None
    want = multiply(x)
    if epilogue == "swiglu":
        squares = torch.rand(-(-K // 64), 64, generator=torch.Generator().manual_seed(2)) * 64
        want = want * torch.rsqrt(squares.sum(0) / K)[:, None]
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    rows = {}
    for M in (1, 30, 64):
        cut = streamed.plan_streamed(M, N, K, bits, group, H100, epilogue)
        cut = cut._replace(splits=splits, stages=min(cut.stages, 3))
        constants = streamed.constants_of(cut, bits, group, epilogue, dtype == torch.float16, True)
        function = compile_for_cpu(tmp_path, constants)
        of_rows = None if squares is None else squares[:, :M].contiguous()
        y, faults = run(function, x[:M], packed, scale, cut, epilogue, of_rows)
        assert faults == 0
        rows[M] = y.sum(0) if splits > 1 else y
    for M, y in rows.items():
        assert torch.equal(y, rows[64][:M]), M
    error = (rows[64].float() - want).norm() / want.norm()
    assert error < (1e-5 if epilogue == "fp32" or splits > 1 else 4e-3), error


def test_what_it_catches(tmp_path):
    """A wait that is too short, a barrier that is missing, and x read before earlier kernels have finished."""
    packed, scale, multiply = weights_of(4, 128, 64, 2048, torch.bfloat16)
    x = torch.randn(5, 2048).bfloat16()
    cut = ProductPlan(8, 64, 1, 3, 4)
    constants = streamed.constants_of(cut, 4, 128, "fp32", False, True)
    source = streamed.SOURCE.read_text()
    changes = {
        "whole": ("", ""),
        "wait": ("wait_for_copies<STAGES - 2>()", "wait_for_copies<STAGES - 1>()"),
        "barrier": ("__syncthreads();", ";"),
        "early": ("    after_others();\n", ""),
    }
    found = {}
    for name, (old, new) in changes.items():
        assert old in source
        function = compile_for_cpu(tmp_path, constants, source.replace(old, new))
        y, faults = run(function, x, packed, scale, cut, "fp32")
        found[name] = (bool(torch.allclose(y, multiply(x), rtol=1e-4, atol=1e-2)), faults > 0)
    assert found == {
        "whole": (True, False), "wait": (False, False), "barrier": (False, False),
        "early": (True, True),
    }  # fmt: skip


# --------------------------------------------------------------------------------------- on the host


class Driver:
    """The CUDA driver's functions, which note their arguments."""

    def __init__(self, fails=""):
        self.fails = fails
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 719 if name == self.fails else 0

        return call


@pytest.fixture
def driver(monkeypatch):
    """A driver without a device, and cubins without a compiler."""
    fake = Driver()
    monkeypatch.setattr(streamed, "driver", lambda: fake)
    monkeypatch.setattr(streamed, "compile_cubin", lambda constants, capability: b"cubin")
    monkeypatch.setattr(streamed, "device_of", lambda index: H100)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77)
    )
    streamed.kernel_of.cache_clear()
    yield fake
    streamed.kernel_of.cache_clear()


def test_a_launch(driver, monkeypatch):
    """Grid, threads, shared memory, stream, attribute and arguments are what the driver reads."""
    sums = []

    class Sums:
        def __getitem__(self, grid):
            return lambda *operands, **options: sums.append((grid, operands, options))

    monkeypatch.setattr(quantized, "sum_kernel", Sums())
    packed, scale, _ = weights_of(8, 0, 200, 1160, torch.bfloat16)
    x = torch.zeros(3, 1160, dtype=torch.bfloat16)
    y = streamed.matmul(x, packed, scale, H100, "fp32")
    assert (y.shape, y.dtype) == ((3, 200), torch.float32)
    assert streamed.matmul(x, packed, scale, H100, "fp32").shape == y.shape  # not loaded again
    assert [grid for grid, *_ in sums] == [(2,), (2,)]
    names = [name for name, _ in driver.calls]
    loading = ["cuModuleLoadData", "cuModuleGetFunction"] + 2 * ["cuFuncSetAttribute"]
    assert names == [*loading, "cuLaunchKernelEx", "cuLaunchKernelEx"]
    of_shared = driver.calls[2][1]
    config, _, places, extra = driver.calls[4][1]
    launch = config._obj
    cut = streamed.plan_streamed(3, 200, 1280, 8, 0, H100, "fp32")
    assert of_shared[1:] == (8, launch.shared_bytes)
    assert (list(launch.grid), list(launch.block)) == ([1, 4, cut.splits], [128, 1, 1])
    assert launch.shared_bytes == streamed.shared_bytes(cut, 8, 0)
    assert (launch.stream, launch.attribute_count, extra) == (77, 1, None)
    assert (launch.attributes[0].kind, launch.attributes[0].value[0]) == (6, 1)
    assert ctypes.sizeof(streamed.Attribute) == 72 and ctypes.sizeof(streamed.LaunchConfig) == 56
    pointers = [ctypes.cast(place, ctypes.POINTER(ctypes.c_void_p))[0] for place in places[:5]]
    assert pointers[1:4] == [packed.data_ptr(), scale.data_ptr(), None]
    sizes = [ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] for place in places[5:]]
    assert sizes == [3, 200, 1280, 0, 1160]


def test_a_driver_that_fails(driver):
    packed, scale, _ = weights_of(8, 0, 200, 1160, torch.bfloat16)
    driver.fails = "cuLaunchKernelEx"
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx fails with CUDA error 719"):
        streamed.matmul(torch.zeros(1, 1160, dtype=torch.bfloat16), packed, scale, H100)


def test_what_is_left_to_triton(monkeypatch):
    """fp32, zero points, rows or weights that are no whole 16 bytes, other dtypes, no rows; an old GPU."""
    left = []
    monkeypatch.setattr(quantized, "matmul", lambda *arguments: left.append(arguments))
    packed, scale, _ = weights_of(4, 128, 64, 512, torch.bfloat16)
    streamed.matmul(torch.zeros(1, 512), packed, scale, H100)
    with_zeros = torch.zeros(2, 64, 2)  # [blocks, N, 256 / group]
    streamed.matmul(torch.zeros(1, 512).half(), packed, with_zeros, H100)
    x = torch.zeros(1, 512).half()
    w = torch.zeros(64 * 512 + 1).half()
    streamed.matmul(torch.zeros(1, 36).half(), torch.zeros(64, 36).half(), None, H100)
    streamed.matmul(x, w[1:].view(64, 512), None, H100)
    streamed.matmul(x, w[1:].view(64, 512).bfloat16(), None, H100)
    streamed.matmul(x[:0], packed, scale, H100)
    streamed.matmul(x, packed, scale, H100._replace(capability=75))
    assert len(left) == 7
    assert streamed.serves(x, packed, scale, H100)


def test_x_at_any_address(driver):
    """Copies of 16 bytes want their multiples; a view may begin anywhere."""
    packed, scale, _ = weights_of(4, 128, 8448, 512, torch.bfloat16)
    x = torch.zeros(513).bfloat16()[1:].view(1, 512)
    assert x.data_ptr() % 16
    streamed.matmul(x, packed, scale, H100)
    _, (_, _, places, _) = driver.calls[-1]
    assert ctypes.cast(places[0], ctypes.POINTER(ctypes.c_void_p))[0] % 16 == 0


def test_who_asks_for_it(monkeypatch):
    cuda_products.cache_clear()
    for name, module in (("streamed", streamed), ("triton", quantized)):
        monkeypatch.setenv("GPT_EAGLE_PRODUCTS", name)
        assert cuda_products() is module
        cuda_products.cache_clear()
    monkeypatch.setenv("GPT_EAGLE_PRODUCTS", "cublas")
    with pytest.raises(ValueError, match="must be triton or streamed; it is 'cublas'"):
        cuda_products()


# --------------------------------------------------------------------------------------- compiled


def every_kernel():
    """Yield (device, constants) of each kernel that plans of a 7B model's layers name."""
    seen = set()
    for device in DEVICES:
        for bits, group in FORMATS:
            for epilogue, N, K in (
                ("none", 4096, 11008),
                ("fp32", 32000, 4096),
                ("swiglu", 22016, 4096),
            ):
                for M in (1, 16, 32, 64):
                    cut = streamed.plan_streamed(M, N, K, bits, group, device, epilogue)
                    assert streamed.shared_bytes(cut, bits, group) <= device.shared_bytes
                    for half in (False, True):
                        kernel = (
                            device,
                            streamed.constants_of(
                                cut, bits, group, epilogue, half, device.overlaps
                            ),
                        )
                        if kernel not in seen:
                            seen.add(kernel)
                            yield kernel


def test_plans():
    """A plan fits; its splits are those of any number of rows."""
    assert len(list(every_kernel())) > 200
    for bits, group in FORMATS:
        splits = {
            streamed.plan_streamed(M, 4096, 11008, bits, group, H100, "none").splits
            for M in range(1, 65)
        }
        assert len(splits) == 1


@pytest.mark.slow
def test_every_kernel_compiles_without_spills(monkeypatch):
    """For sm_80, sm_89, sm_90 and sm_100, by NVRTC; no sum and no address goes to memory."""
    try:
        lib = streamed.nvrtc()
    except ValueError as error:
        pytest.skip(str(error))
    logs = []
    text_of = streamed._text_of

    def text_and_log(lib, program, what):
        logs.append(text_of(lib, program, "ProgramLog").decode())
        return text_of(lib, program, what)

    monkeypatch.setattr(streamed, "OPTIONS", (*streamed.OPTIONS, b"--ptxas-options=-v"))
    monkeypatch.setattr(streamed, "_text_of", text_and_log)
    for device, constants in every_kernel():
        assert streamed.compile_cubin(constants, device.capability)[:4] == b"\x7fELF"
        spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", logs[-1])
        assert spilled == ["0", "0", "0"], (device.capability, constants, logs[-1])
    assert lib
