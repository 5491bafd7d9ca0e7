"""The operator library `torch.ops.gpt_eagle` and the implementations that this machine can run.

An operator has a file beside this one, with a plain PyTorch reference and an implementation per
device: C++ in `cpu/` for CPUs, Triton in `cuda/` for CUDA. Elsewhere are the forward passes of a
model and of a draft head (cpu/layers.py; their references are model.py and eagle_draft.py),
`gumbel` and `cut` (sampling.py), `accept` (draft_tree.py), `causal` (kv_cache.py), `advance` and
`with_times` (decode.py), `widen_blocks` (hf/gguf.py), and those of extras/. All are registered with
`torch.library`, so that a step that uses them compiles with `fullgraph=True`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ops.cpu import build

lib = torch.library.Library("gpt_eagle", "DEF")


@cache
def has_triton() -> bool:
    """Check that Triton is installed; print once the consequences if it is not."""
    if importlib.util.find_spec("triton") is not None:
        return True
    print(
        "note: without Triton attention, top-k and experts are slow, and steps not timed; "
        "pip install triton",
        file=sys.stderr,
    )
    return False


@cache
def cuda_products() -> ModuleType:
    """Import the products on CUDA: Triton's, or with EAGLE_PRODUCTS=streamed those in CUDA C++.

    Raises: ValueError where there is no Triton, or for another name.
    """
    kind = os.environ.get("EAGLE_PRODUCTS", "triton")
    if kind not in ("triton", "streamed"):
        raise ValueError(f"EAGLE_PRODUCTS must be triton or streamed; it is {kind!r}")
    try:
        import ops.cuda.quantized as products

        if kind == "streamed":
            import ops.cuda.streamed as products
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "int4 and int8 on CUDA need Triton, and it is not installed; pip install triton"
        ) from None
    return products


# Empty until the first call of `has_cpu_operators`, then its result. A traced step only reads it.
_cpp_available: list[bool] = []


def has_cpu_operators() -> bool:
    """Check that the C++ operators are loaded.

    The first call builds them; if that fails, it prints the reason once.
    """
    if not _cpp_available:
        _cpp_available.append(not build.load_operators())
    return _cpp_available[0]


def cpu_operators_are_loaded() -> bool:
    """Check that the C++ operators are loaded already, without building them."""
    return _cpp_available == [True]


@contextmanager
def single_torch_thread(whether: bool = True) -> Iterator[None]:
    """Run PyTorch's own loops on one thread, and the C++ operators' on as many as before.

    After each loop PyTorch's threads (OpenMP's) spin for milliseconds, on cores that the threads of
    the C++ operators need.
    whether: False: do nothing
    """
    count = torch.get_num_threads()
    if not whether or count == 1:
        yield
        return
    try:
        torch.ops.gpt_eagle.own_threads(count)
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(count)
        torch.ops.gpt_eagle.own_threads(0)


def on_cpp_device(x: Tensor) -> bool:
    """Check that x is on the CPU and the C++ operators are loaded."""
    return x.device.type == "cpu" and has_cpu_operators()


def uses_cpp(x: Tensor) -> bool:
    """Check that the C++ operators take x.

    Callers name the operators themselves, because a layer of Python costs 6 us a call.
    """
    # the operators have no gradients
    supported = x.dtype in (torch.bfloat16, torch.float32) and not x.requires_grad
    return supported and on_cpp_device(x)


def needs_gradients(*inputs: Tensor) -> bool:
    """Check that gradients flow to one of the inputs: our operators have none."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
