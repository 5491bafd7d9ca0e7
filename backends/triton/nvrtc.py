"""CUDA C++ without a compiler on the machine: NVRTC, which torch brings, makes machine code of it.

The code is kept in the user's cache under a name made of all that it depends on, as the library of
backends/cpp/build.py; driver.py loads and launches it. A source includes nothing, for there may be
no headers, has `extern "C"` kernels, and takes its constants as options.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from ctypes import byref
from functools import cache
from pathlib import Path

import torch

from backends.cpp.build import check_own, is_whole
from options import cache_folder

FLAGS = ("-std=c++17", "-fmad=false")  # products are fused with sums where the source says it


@cache
def nvrtc() -> ctypes.CDLL:
    """Load the NVRTC of torch's CUDA. Raises: RuntimeError where there is none."""
    name = f"libnvrtc.so.{(torch.version.cuda or '?').partition('.')[0]}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    try:
        for library in packages.glob(f"*/lib/{name}"):
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # NVRTC looks for it by name, and not beside itself
            return ctypes.CDLL(str(library))
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"torch has brought no NVRTC ({error})") from None


def _check_nvrtc(status: int) -> None:
    if status:
        nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC failed: {nvrtc().nvrtcGetErrorString(status).decode()}")


def compile_source(source: str, options: tuple[str, ...]) -> bytes:
    """Compile CUDA C++ to machine code.

    options: of NVRTC, with `-arch=sm_..` among them
    Raises: RuntimeError with the compiler's first error line.
    """
    library = nvrtc()
    program = ctypes.c_void_p()
    code = source.encode()
    _check_nvrtc(library.nvrtcCreateProgram(byref(program), code, b"source.cu", 0, None, None))
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), array)
        if failed:
            log = _output(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
            lines = [line for line in log.decode().splitlines() if "error" in line]
            raise RuntimeError(f"NVRTC failed: {lines[0][:200] if lines else failed}")
        return _output(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _output(program: ctypes.c_void_p, size_of: Callable, read: Callable) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(size_of(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(read(program, buffer))
    return buffer.raw


def cubin_of(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Return the machine code of a source, from the cache if it is there.

    arch: as "90a"; options: further ones of NVRTC
    Raises: RuntimeError where it cannot be compiled, or the cache is not the user's own.
    """
    options = (f"-arch=sm_{arch}", *FLAGS, *options)
    parts = (torch.__version__, str(torch.version.cuda), *options, source)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder()
    file = folder / f"sm_{arch}-{key}.cubin"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(folder)
        if not is_whole(file):
            cubin = compile_source(source, options)
            whole = cubin + hashlib.sha256(cubin).digest()
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:  # its owner's
                made.write(whole)
            os.replace(made.name, file)
        return file.read_bytes()[:-32]
    except OSError as error:
        raise RuntimeError(f"cannot write {folder}: {error.strerror}") from None
