"""Pretend that there is a GPU: enough for fake tensors, Dynamo, inductor and Triton to make code.

Call `install` before anything else uses CUDA, in a process that preloads the library of
fake_cuda.c. Nothing can be run on the device, and no memory exists there: tensors on it are fake
(FakeTensorMode).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Gpu(NamedTuple):
    """The properties of a GPU that code depends on.

    Source: CUDA C++ programming guide, table of compute capabilities.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared_bytes: int  # the most that one block may have
    memory_bytes: int

    def properties(self) -> SimpleNamespace:
        """Return the record of torch.cuda.get_device_properties."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            multi_processor_count=self.processors,
            warp_size=32,
            total_memory=self.memory_bytes,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_bytes,
            shared_memory_per_multiprocessor=self.shared_bytes + 1024,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=1536 if self.capability == (8, 9) else 2048,
            max_threads_per_block=1024,
            L2_cache_size=50 << 20,
            gcnArchName="",
        )


GPUS = {
    "80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10, 80 << 30),
    "89": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 << 10, 24 << 30),
    "90": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 80 << 30),
    "100": Gpu("NVIDIA B200", (10, 0), 148, 227 << 10, 180 << 30),
}


class _Guard(contextlib.ContextDecorator):
    """In place of torch.cuda.device, for the only one."""

    def __init__(self, *_: Any):
        self.idx = 0

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False


def install(gpu: Gpu) -> None:
    """Make torch and Triton find this GPU, for the life of the process."""
    from torch._dynamo.device_interface import CudaInterface

    answers = _answers(gpu)
    for owner in (torch.cuda, torch.cuda.random, CudaInterface, CudaInterface.Worker):
        for name, answer in answers.items():
            if hasattr(owner, name):
                fixed = _always(answer)
                setattr(owner, name, staticmethod(fixed) if isinstance(owner, type) else fixed)
    torch.cuda.device = torch.cuda._DeviceGuard = CudaInterface.device = _Guard
    torch.accelerator.is_available = lambda: False
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    make = torch.tensor

    # torch's fills memory of the device
    def tensor(data: Any, device: Any = "cpu", **options: Any) -> torch.Tensor:
        made = make(data, **options)
        on_cpu = torch.device(device or "cpu").type == "cpu"
        return made if on_cpu else torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor
    _install_triton(gpu)


def _always(value: Any) -> Callable:
    return lambda *_, **__: value


def _answers(gpu: Gpu) -> dict[str, Any]:
    """Return the results of torch's functions that query the device."""
    major, minor = gpu.capability
    return {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": False,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "empty_cache": None,
        "get_device_name": gpu.name,
        "get_device_capability": gpu.capability,
        "get_device_properties": gpu.properties(),
        "is_bf16_supported": True,
        "mem_get_info": (80 << 30, 80 << 30),
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "get_compute_capability": 10 * major + minor,
        "get_raw_stream": 0,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16).byte(),
        "set_rng_state": None,
    }


def _install_triton(gpu: Gpu) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)
    limits = {
        "max_shared_mem": gpu.shared_bytes,
        "multiprocessor_count": gpu.processors,
        "warpSize": 32,
    }

    class Driver:
        utils = SimpleNamespace(
            get_device_properties=lambda device: limits | {"max_num_regs": 65536}
        )
        is_active = staticmethod(lambda: True)
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        get_device_interface = staticmethod(lambda: torch.cuda)

    triton.runtime.driver.set_active(Driver())
