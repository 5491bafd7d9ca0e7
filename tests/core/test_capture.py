"""Cycles over fixed buffers. No cycle waits for its own results.

Tokens of captured cycles: test_requests.py on the CPU, test_gpu.py with real graphs.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import backends.attention
import backends.triton.functions
import run.clock
from decode import build_cycles
from draft_tree import DynamicTree
from drafters import RootOnly
from drafts.by_value import beside
from eagle_draft import EagleDrafter
from helpers import (
    compiled_as_on_cuda,
    decode,
    engine_for,
    fresh,
    golden_head,
    golden_target,
)
from run.load import set_cuda_device
from run.session import Session
from run.warm_up import warm_up
from runtime import Replay, copy_into, tensors_of

PROMPT = [5, 17, 3, 40, 8, 22, 61]
aten = torch.ops.aten
# operators whose result the host must have before it can go on
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2,
    aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.item,
}  # fmt: skip
# these wait where a mask says what
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index_put}


class NoWaiting(TorchDispatchMode):
    """Raises where a step needs the value of a tensor on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        masks = operator in INDEXING and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        assert operator not in WAITING and not masks, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


def sized_engine(temperature: float, version: int = 2, **options):
    """version: of the head; one of version 3 takes inputs of the target's layers."""
    target = golden_target(f"models/target_{'llama31_gqa8' if version == 3 else 'llama_mha'}")
    head = golden_head(f"models/head_eagle{'3' if version == 3 else '12_mha'}", target)
    drafter = EagleDrafter(head, target, DynamicTree(4, 5, 20))
    options = {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True, **options}
    return engine_for(target, beside(drafter, grows=False), **options)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_step_of_a_cycle_waits(temperature, version):
    engine = sized_engine(temperature, version)
    session = Session(engine, [(0, 0)])
    next(session.decode_turn([PROMPT]))
    session.prefilling[0] = PROMPT
    with NoWaiting():
        session._read_chunk(0, 0, 64)  # captured, too
        for cycle in engine.cycles[session.mode]:
            state, *_ = cycle(session.buffers.cache, session.state)
            copy_into(session.state, state)


def test_buffers_stay_where_they_are():
    """A session leaves its buffers to the next one; their addresses never change, and nothing of it is left."""
    engine = fresh(sized_engine(1.0), captured=True)
    first = Session(engine, [(0, 0)])
    list(first.decode_turn([PROMPT]))
    work, addresses = first.buffers, [x.data_ptr() for x in tensors_of(first.state)]
    assert len(set(addresses)) == len(addresses), "every buffer is its own"
    history, other = first.history, Session(engine, [(0, 0)])
    assert other.buffers is not work, "two sessions never share"
    first.close()
    again = Session(engine, [(0, 0)])
    assert again.buffers is work
    list(again.decode_turn([PROMPT]))
    list(other.decode_turn([PROMPT]))
    assert [x.data_ptr() for x in tensors_of(again.state)] == addresses
    assert again.history == other.history == history


@pytest.mark.usefixtures("traced")
def test_cudas_functions_of_a_cycle_are_traced_whole(monkeypatch):
    """Here its operators are the plain ones. No recompilation, and vanilla's tokens."""
    monkeypatch.setattr("backends.chosen.on_cpu", backends.chosen.on_cuda)
    monkeypatch.setattr("backends.triton.functions.device_time", run.clock.device_time)
    target = deepcopy(golden_target())
    options = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0, "top_k": 9}
    want = decode(engine_for(target, RootOnly(), **options), PROMPT).history
    drafter = EagleDrafter(golden_head(target=target), target, DynamicTree(3, 3, 9))
    engine = compiled_as_on_cuda(engine_for(target, drafter, **options))
    assert drafter.backend.select_nodes is backends.triton.functions.select_nodes
    assert decode(engine, PROMPT).history == want


class Broken:
    """In the place of `torch.cuda.graph`: a body's error invalidates the capture, so that its end fails, too."""

    def __init__(self, graph, **options):
        pass

    def __enter__(self):
        pass

    def __exit__(self, kind, *_):
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_step_whose_capture_fails_runs_uncaptured(monkeypatch, capsys):
    fakes = {"CUDAGraph": SimpleNamespace, "graph": Broken, "stream": nullcontext}
    fakes |= dict.fromkeys(("current_stream", "synchronize"), lambda device: None)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    runs = []

    def body():
        runs.append(None)
        if len(runs) == 3:
            raise ValueError("copies to the host\nmore")
        return len(runs)

    replay = Replay(body, torch.device("cuda"))
    assert [replay() for _ in range(5)] == [1, 2, 4, 5, 6] and replay.capture_failed
    note = "note: a step runs uncaptured, and slower, since its capture as a CUDA graph failed: copies to the host more"
    assert capsys.readouterr().err == f"{note}\n"


def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    rule = "--device cuda:1 has compute capability 7.5, and the kernels need 8.0 or later"
    with pytest.raises(ValueError, match=rule):
        set_cuda_device("cuda:1")


@pytest.mark.parametrize("compile", [True, None], ids=["broken", "by default"])
def test_without_the_compiler_cycles_are_captured_as_they_are(monkeypatch, capsys, compile):
    """On CUDA. Here the steps run on a CPU over fixed buffers, and nothing is compiled."""
    if compile:
        monkeypatch.setattr("run.warm_up.why_not_compiled", lambda device: "no gcc")
    else:
        monkeypatch.setattr(
            "run.warm_up.why_not_compiled", lambda device: pytest.fail("it was probed")
        )
    engine = sized_engine(1.0)
    want = decode(engine, PROMPT).history
    with monkeypatch.context() as patch:  # no step is compiled before the compiler is tried
        patch.setattr("runtime.compiled", lambda step: step)
        patch.setattr("decode.Engine.on_cuda", True)
        config = replace(engine.config, device="cuda", compile=compile)
        asked = build_cycles(replace(engine, config=config))
    if not compile:
        monkeypatch.setattr("runtime.compiled", lambda step: pytest.fail("a step was compiled"))
    monkeypatch.setattr("decode.Engine.on_cuda", True)
    warm = warm_up(asked)
    assert warm.captured and warm.option("compile") is None and warm.compile is None
    assert bool(asked.compile) == bool(compile)
    assert decode(warm, PROMPT).history == want
    note = "note: --compile does not work here (no gcc); running without it"
    assert capsys.readouterr().err.splitlines() == ([note] if compile else [])
