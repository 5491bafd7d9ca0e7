"""The operator library `torch.ops.gpt_eagle`, and which of its implementations this machine can run.

An operator has a file beside this one, with a plain PyTorch reference and an implementation per device: C++ in `cpu/`
for CPUs, Triton in `cuda/` for CUDA. Elsewhere are the passes of a model and of a draft head (cpu/layers.py; their
references are model.py and eagle_draft.py), `gumbel` and `cut` (sampling.py), `accept` (draft_tree.py), `advance`
(decode.py), `widen_blocks` (hf/gguf.py), and those of extras/. All are registered with `torch.library`, so that a step
that uses them compiles with `fullgraph=True`.
"""

from __future__ import annotations

import importlib.util
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
    """Whether there is Triton; says once what it means that there is none."""
    if importlib.util.find_spec("triton") is not None:
        return True
    print(
        "note: without Triton attention, top-k and experts are slow, and steps not timed; pip install triton",
        file=sys.stderr,
    )
    return False


@cache
def triton_products() -> ModuleType:
    """Import the Triton products. Raises: ValueError where there is no Triton."""
    try:
        import ops.cuda.quantized as products
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "int4 and int8 on CUDA need Triton, and it is not installed; pip install triton"
        ) from None
    return products


_cpp_available: list[
    bool
] = []  # whether the C++ operators are, once somebody has asked; a step that is traced only reads it


def has_cpu_operators() -> bool:
    """Whether the C++ operators are there; the first call builds them, and says once why it cannot."""
    if not _cpp_available:
        _cpp_available.append(not build.load_operators())
    return _cpp_available[0]


def cpu_operators_are_loaded() -> bool:
    """Whether the C++ operators are there already; this builds nothing."""
    return _cpp_available == [True]


@contextmanager
def single_torch_thread(whether: bool = True) -> Iterator[None]:
    """Run PyTorch's own loops on one thread, those of the C++ operators on as many as before.

    After each of its loops PyTorch's threads (OpenMP's) spin for milliseconds, on cores that the operators' need.
    whether: or do nothing
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
    """Whether x is where the C++ operators are."""
    return x.device.type == "cpu" and has_cpu_operators()


def uses_cpp(x: Tensor) -> bool:
    """Whether our C++ takes x. Callers name its operators themselves: a layer of Python costs 6 us a call."""
    known = (
        x.dtype in (torch.bfloat16, torch.float32) and not x.requires_grad
    )  # the operators have no gradients
    return known and on_cpp_device(x)
