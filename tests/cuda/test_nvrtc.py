"""Sources in CUDA C++: compiled once (backends/triton/nvrtc.py), launched as asked (backends/triton/driver.py).

A CPU has neither NVRTC nor a driver: fakes record what they are given.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from backends.triton import driver, nvrtc

SOURCE = """
extern "C" __global__ void turn(const float* from, float* to, int n, float more) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from[(i + 1) % n] + more;
}
"""


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list:
    """Give a cache of its own and a compiler that records its options. Returns: the record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = []

    def compile_source(source, options):
        record.append(options)
        return f"code {len(record)}".encode()

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    return record


def test_a_source_is_compiled_once(compiled):
    assert nvrtc.cubin_of(SOURCE, "90a") == b"code 1"
    assert nvrtc.cubin_of(SOURCE, "90a") == b"code 1"
    assert len(compiled) == 1
    assert "-arch=sm_90a" in compiled[0]


@pytest.mark.parametrize("other", [("x", "90a"), (SOURCE, "80"), (SOURCE, "90a", ("-DROWS=8",))])
def test_code_of_another_source_architecture_or_option_is_not_taken(compiled, other):
    nvrtc.cubin_of(SOURCE, "90a")
    assert nvrtc.cubin_of(*other) == b"code 2"


def test_a_damaged_file_is_made_again(compiled, tmp_path):
    nvrtc.cubin_of(SOURCE, "90a")
    (file,) = (tmp_path / "gpt-eagle").iterdir()
    file.write_bytes(b"c0de" + file.read_bytes()[4:])
    assert nvrtc.cubin_of(SOURCE, "90a") == b"code 2"


def test_a_folder_that_others_may_write_to_is_refused(compiled, tmp_path):
    (tmp_path / "gpt-eagle").mkdir()
    (tmp_path / "gpt-eagle").chmod(0o777)
    with pytest.raises(RuntimeError, match="others may write to it"):
        nvrtc.cubin_of(SOURCE, "90a")


def test_a_torch_without_nvrtc_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(RuntimeError, match=r"no NVRTC \(libnvrtc.so.99"):
        nvrtc.nvrtc.__wrapped__()


class FakeDriver:
    """Records launches and limits of shared memory; answers `status` to the rest."""

    def __init__(self, status: int = 0):
        self.status = status
        self.limits = []
        self.launches = []

    def __getattr__(self, name: str):
        return lambda *given: self.status

    def cuGetErrorName(self, status, to):
        to._obj.value = b"CUDA_ERROR_OF_A_TEST"

    def cuFuncSetAttribute(self, function, attribute, value):
        self.limits.append((attribute, value))
        return self.status

    def cuLaunchKernelEx(self, config, function, addresses, extra):
        config = config._obj
        read = SimpleNamespace(
            sizes=(*config.grid, *config.block, config.shared_bytes),
            stream=config.stream,
            attributes={
                config.attributes[i].id: config.attributes[i].value[0]
                for i in range(config.attribute_count)
            },
            pointer=ctypes.c_void_p.from_address(addresses[0]).value,
            number=ctypes.c_int.from_address(addresses[1]).value,
            fraction=ctypes.c_float.from_address(addresses[2]).value,
        )
        self.launches.append(read)
        return self.status


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return fake


def test_a_launch_is_what_was_asked_for(fake):
    x = torch.ones(3)
    kernel = driver.Kernel(b"", "turn")
    kernel.launch(12, 64, x, -5, 0.25, shared_bytes=100, cluster=2, dependent=True)
    kernel.launch(12, 64, x, -5, 0.25)
    first, second = fake.launches
    assert first.sizes == (12, 1, 1, 64, 1, 1, 100)
    assert first.stream == 77
    assert (first.pointer, first.number, first.fraction) == (x.data_ptr(), -5, 0.25)
    assert first.attributes == {driver.CLUSTER: 2, driver.DEPENDENT: 1}
    assert second.attributes == {}


def test_the_limit_of_shared_memory_is_raised_when_needed(fake):
    kernel = driver.Kernel(b"", "turn")
    for size in (48 * 1024, 100_000, 90_000, 200_000):
        kernel.launch(1, 32, torch.ones(1), 0, 0.0, shared_bytes=size)
    raised = [limit for limit in fake.limits if limit[0] == driver.MOST_SHARED_BYTES]
    assert raised == [(driver.MOST_SHARED_BYTES, size) for size in (100_000, 200_000)]


def test_the_drivers_refusal_has_its_name(fake):
    kernel = driver.Kernel(b"", "turn")
    fake.status = 209
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OF_A_TEST"):
        kernel.launch(1, 32, torch.ones(1), 0, 0.0)


def test_records_of_the_driver_have_its_layout():
    """Compare with the sizes that a C compiler gives on a 64-bit machine."""
    assert ctypes.sizeof(driver._Attribute) == 72
    assert driver._Attribute.value.offset == 8
    assert ctypes.sizeof(driver._Config) == 56
    assert (driver._Config.stream.offset, driver._Config.attribute_count.offset) == (32, 48)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
)
def test_a_captured_chain_of_dependent_launches(monkeypatch, tmp_path):
    """Each block reads what another one of the kernel before wrote."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    major, minor = torch.cuda.get_device_capability()
    kernel = driver.Kernel(nvrtc.cubin_of(SOURCE, f"{major}{minor}"), "turn")
    n, launches = 1 << 16, 64
    start = torch.arange(n, dtype=torch.float32, device="cuda")
    buffers = [start.clone(), torch.empty_like(start)]

    def chain() -> None:
        buffers[0].copy_(start)
        for i in range(launches):
            given = (buffers[i % 2], buffers[(i + 1) % 2], n, 0.5)
            kernel.launch(n // 256, 256, *given, dependent=major >= 9)

    want = start.roll(-launches) + launches / 2
    chain()
    assert torch.equal(buffers[0], want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        buffers[0].fill_(0)
        graph.replay()
        assert torch.equal(buffers[0], want)
