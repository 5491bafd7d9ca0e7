"""Kernels of machine code that nvrtc.py made, launched by the CUDA driver on torch's stream.

A graph may capture a launch. A dependent one starts while the kernel in front of it ends
(programmatic dependent launch): it may read weights at once, and what that kernel wrote only behind
`griddepcontrol.wait`. Trade-off: ctypes takes some microseconds of the host for each launch, which
the replay of a graph does not, and nothing has to be built against torch.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from functools import cache

import torch
from torch import Tensor

# Source: the header of the CUDA driver API
MOST_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT (percent)
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@cache
def driver() -> ctypes.CDLL:
    """Load the driver, as torch has. Raises: OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, byref(name))
        raise RuntimeError(f"the CUDA driver says {(name.value or b'?').decode()} ({status})")


def _enter(device: int) -> None:
    """Give this thread the context of a device, which torch sets late in a thread of its own."""
    context = ctypes.c_void_p()
    _check(driver().cuCtxGetCurrent(byref(context)))
    if not context:
        _check(driver().cuDevicePrimaryCtxRetain(byref(context), device))
        _check(driver().cuCtxSetCurrent(context))


def _argument(value: Tensor | int | float | None) -> ctypes._SimpleCData:
    """Return what a kernel takes for a pointer, an int or a float; None is the null pointer."""
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


class Kernel:
    """A kernel of a source on the current device of torch."""

    def __init__(self, cubin: bytes, name: str):
        self.module = ctypes.c_void_p()
        self.function = ctypes.c_void_p()
        self.shared_bytes = 48 * 1024  # that a block may have without being asked for
        _enter(torch.cuda.current_device())
        _check(driver().cuModuleLoadData(byref(self.module), cubin))
        _check(driver().cuModuleGetFunction(byref(self.function), self.module, name.encode()))

    def _config(self, grid: int, threads: int, shared_bytes: int, cluster: int, dependent: bool):
        """Return the shape of a launch. Writes: the kernel's limit of shared memory."""
        if shared_bytes > self.shared_bytes:
            _check(driver().cuFuncSetAttribute(self.function, MOST_SHARED_BYTES, shared_bytes))
            # kernels that want other shares of the L1 cache cannot run beside each other
            _check(driver().cuFuncSetAttribute(self.function, CARVEOUT, 100))
            self.shared_bytes = shared_bytes
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count] = _Attribute(CLUSTER, (cluster, 1, 1))
            count += 1
        if dependent:
            attributes[count] = _Attribute(DEPENDENT, (1,))
            count += 1
        stream = torch.cuda.current_stream().cuda_stream
        return _Config((grid, 1, 1), (threads, 1, 1), shared_bytes, stream, attributes, count)

    def clusters_that_fit(self, threads: int, shared_bytes: int, cluster: int) -> int:
        """Return how many clusters of so many blocks the device runs at once."""
        count = ctypes.c_int()
        config = self._config(cluster, threads, shared_bytes, cluster, False)
        _check(driver().cuOccupancyMaxActiveClusters(byref(count), self.function, byref(config)))
        return count.value

    def launch(
        self,
        grid: int,
        threads: int,
        *arguments: Tensor | int | float | None,
        shared_bytes: int = 0,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """Put the kernel on torch's current stream; never waits.

        threads: per block; shared_bytes: dynamic ones; cluster: blocks of a cluster
        dependent: it may start before the kernel in front of it has ended
        Raises: RuntimeError where the driver refuses.
        """
        _enter(torch.cuda.current_device())
        values = [_argument(value) for value in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        config = self._config(grid, threads, shared_bytes, cluster, dependent)
        _check(driver().cuLaunchKernelEx(byref(config), self.function, addresses, None))
