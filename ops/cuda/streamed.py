"""Products of qmatmul.py by a kernel in CUDA C++, streamed.cu, compiled by NVRTC.

The same layouts and epilogues, with the first weights in shared memory before earlier kernels have
finished. GPT_EAGLE_PRODUCTS=streamed takes it for products that it serves; the others, and those
with more work behind them (epilogues.py), stay in Triton. NVRTC comes with PyTorch for CUDA; no
nvcc nor a compiler of the host is needed. The driver is called through ctypes, since PyTorch's own
launches know no dependent ones. Not run on a GPU yet, so not the default.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from ops.cuda import qmatmul
from ops.cuda.launch import Device, device_of
from ops.cuda.qmatmul import (
    Launch,
    ProductPlan,
    bits_and_group,
    has_zeros,
    run_product,
    sizes_of,
)

__all__ = ["device_of"]  # as of qmatmul.py

SOURCE = Path(__file__).with_suffix(".cu")
NAME = b"streamed_product"
OPTIONS = (b"--std=c++17",)  # of the compiler
VERSIONS = (13, 12)  # of NVRTC, beside a PyTorch without CUDA
COLUMNS = 64  # as in layout.py
# of the CUDA driver's interface
MOST_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_SHARE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
MAY_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
HALVES = (torch.bfloat16, torch.float16)
Constants = tuple[tuple[str, int], ...]  # of streamed.cu, by name


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its kind, and a union of 64 bytes."""

    _fields_ = [("kind", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


# --------------------------------------------------------------------------------------------- plan


@cache
def plan_streamed(
    M: int, N: int, K: int, bits: int, group: int, device: Device, epilogue: str
) -> ProductPlan:
    """Choose tiles, splits and stages for M rows. The splits are qmatmul.py's, for any M."""
    splits = qmatmul.plan_product(M, N, K, bits, group, torch.bfloat16, device, epilogue).splits
    tokens = 8 if M <= 8 else qmatmul.tile_height(M, 16, 32)
    heights = (64,)
    if tokens >= 32 and triton.cdiv(N, 128) * splits >= device.processors:
        heights = (128, 64)  # a load of x then serves two tiles of outputs
    # four blocks to a processor hide each other's waits, and leave room for the next kernel's
    for blocks, least in ((4, 3), (2, 2), (1, 2)):
        for rows, stages in product(heights, range(8, least - 1, -1)):
            cut = ProductPlan(tokens, rows, splits, stages, 4)
            if blocks * shared_bytes(cut, bits, group) <= device.shared_bytes:
                return cut
    raise ValueError(f"{tokens} rows of a matmul do not fit this GPU's shared memory")


def shared_bytes(cut: ProductPlan, bits: int, group: int) -> int:
    """Return the shared memory of a block, as streamed.cu divides it."""
    weights = cut.rows * 2 * COLUMNS
    scales = cut.rows * 4 * (128 // group if group else 0)
    x = cut.tokens * (2 * (16 // bits) * COLUMNS + 64)
    return cut.stages * (weights + scales + x) + 4 * cut.tokens


# ---------------------------------------------------------------------------------------- compiling


@cache
def nvrtc() -> ctypes.CDLL:
    """Load NVRTC, from the packages that PyTorch for CUDA brings, or the system's.

    Raises: ValueError where there is none.
    """
    packages = importlib.util.find_spec("nvidia")
    folders = packages.submodule_search_locations if packages else []
    # a driver may not load what a newer one than PyTorch's compiles
    versions = [torch.version.cuda.partition(".")[0]] if torch.version.cuda else VERSIONS
    names = [f"libnvrtc.so.{version}" for version in versions]
    found = [Path(folder).glob(f"*/lib/{name}") for name in names for folder in folders]
    for file in [*map(str, chain.from_iterable(found)), *names]:
        try:
            return ctypes.CDLL(file)
        except OSError:
            continue
    raise ValueError(
        f"GPT_EAGLE_PRODUCTS=streamed needs NVRTC, and {' or '.join(names)} is not found; "
        "pip install nvidia-cuda-nvrtc"
    )


def constants_of(
    cut: ProductPlan, bits: int, group: int, epilogue: str, half: bool, overlaps: bool
) -> Constants:
    """Return the constants of streamed.cu. half: x is fp16; else it is bf16"""
    return (
        ("BITS", bits),
        ("GROUP", group),
        ("TOKENS", cut.tokens),
        ("ROWS", cut.rows),
        ("WARPS", cut.warps),
        ("STAGES", cut.stages),
        ("GATED", int(epilogue == "swiglu")),
        ("FP32", int(epilogue == "fp32" or cut.splits > 1)),
        ("HALF", int(half)),
        ("OVERLAPS", int(overlaps)),
    )


def compile_cubin(constants: Constants, capability: int) -> bytes:
    """Compile streamed.cu. Raises: RuntimeError with the compiler's log."""
    lib = nvrtc()
    program = ctypes.c_void_p()
    options = [
        f"--gpu-architecture=sm_{capability}".encode(),
        *OPTIONS,
        *(f"-D{name}={value}".encode() for name, value in constants),
    ]
    source = SOURCE.read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    try:
        flags = (ctypes.c_char_p * len(options))(*options)
        failed = lib.nvrtcCompileProgram(program, len(options), flags)
        if failed:
            log = _text_of(lib, program, "ProgramLog").decode()
            raise RuntimeError(f"{SOURCE.name} does not compile for sm_{capability}: {log}")
        return _text_of(lib, program, "CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, text)
    return text.raw


# ---------------------------------------------------------------------------------------- launching


@cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises: RuntimeError with its name and number."""
    failed = getattr(driver(), name)(*arguments)
    if failed:
        raise RuntimeError(f"{name} fails with CUDA error {failed}")


@cache
def kernel_of(constants: Constants, bytes_of_shared: int, index: int) -> ctypes.c_void_p:
    """Compile and load a kernel, on the current device, which has this index."""
    module = ctypes.c_void_p()
    kernel = ctypes.c_void_p()
    cubin = compile_cubin(constants, device_of(index).capability)
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, NAME)
    call("cuFuncSetAttribute", kernel, MOST_SHARED_BYTES, bytes_of_shared)
    call("cuFuncSetAttribute", kernel, SHARED_SHARE, 100)
    return kernel


def launch(
    kernel: ctypes.c_void_p, grid: tuple[int, ...], threads: int, bytes_of_shared: int,
    overlaps: bool, stream: int, arguments: list[Any],
) -> None:  # fmt: skip
    """Launch a kernel on a stream. arguments: of ctypes' types"""
    may_overlap = Attribute(MAY_OVERLAP)
    may_overlap.value[0] = 1
    config = LaunchConfig(
        grid,
        (threads, 1, 1),
        bytes_of_shared,
        stream,
        ctypes.pointer(may_overlap),
        int(overlaps),
    )
    places = [ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in arguments]
    of_kernel = (ctypes.c_void_p * len(places))(*places)
    call("cuLaunchKernelEx", ctypes.byref(config), kernel, of_kernel, None)


# ------------------------------------------------------------------------------------------ product


def serves(x: Tensor, packed: Tensor, scale: Tensor | None, device: Device) -> bool:
    """Check that streamed.cu has this product: 16 bits, rows of whole 16 bytes, no zero points."""
    if x.dtype not in HALVES or device.capability < 80 or not x.numel() or has_zeros(scale):
        return False
    if scale is None and packed.dtype != x.dtype:
        return False
    return x.shape[-1] % 8 == 0 and packed.data_ptr() % 16 == 0


def launch_streamed(operands: Launch) -> None:
    """Launch the kernel of streamed.cu on the current stream. Writes: operands.out."""
    x, packed, scale, squares, out, M, N, K, F, cut, device, epilogue = operands
    assert epilogue in ("none", "fp32", "swiglu"), epilogue
    if x.data_ptr() % 16:
        x = x.clone()
    bits, group = bits_and_group(scale)
    half = x.dtype == torch.float16
    constants = constants_of(cut, bits, group, epilogue, half, device.overlaps)
    in_shared = shared_bytes(cut, bits, group)
    tensors = (x, packed, scale, squares, out)
    parts = 0 if squares is None else len(squares)
    launch(
        kernel_of(constants, in_shared, x.device.index),
        (triton.cdiv(M, cut.tokens), triton.cdiv(N, cut.rows), cut.splits),
        32 * cut.warps,
        in_shared,
        device.overlaps,
        torch.cuda.current_stream(x.device).cuda_stream,
        [
            *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors),
            *(ctypes.c_int(size) for size in (M, N, K, parts, F)),
        ],
    )


def matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    device: Device,
    epilogue: str = "none",
    squares: Tensor | None = None,
) -> Tensor:
    """Compute what `qmatmul.matmul` computes, or leave it to it."""
    if not serves(x, packed, scale, device):
        return qmatmul.matmul(x, packed, scale, device, epilogue, squares)
    bits, group = bits_and_group(scale)
    N, K = sizes_of(packed, bits)
    M = x.numel() // x.shape[-1]
    cut = plan_streamed(M, N, K, bits, group, device, epilogue)
    return run_product(x, packed, scale, cut, device, epilogue, squares, launch_streamed)
