"""The operator library `torch.ops.gpt_eagle` and the implementations that this machine can run.

Functions of a cycle and of a layer are chosen once, while loading (chosen.py): C++ in `cpp/` for
CPUs, Triton in `triton/` for CUDA, plain PyTorch in reference.py. Elsewhere are whole passes of a
model and of a draft head (cpp/layers.py; their references are model.py and eagle_draft.py).
All are registered with `torch.library`. A step that uses those in Python and Triton compiles with
`fullgraph=True`; those in C++ are called as they are, as nothing is compiled on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from backends.cpp import build
from options import log_note

lib = torch.library.Library("gpt_eagle", "DEF")


def refuse_gradients() -> None:
    """Let operators raise where an input needs gradients: they have none, and would train wrongly.

    Those that exist when the C++ operators are loaded do so there (cpu/operators.cpp), at no cost
    while decoding; this is for the others. Writes: their kernels for autograd.
    """
    ours = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gpt_eagle::")]
    for name in ours:  # also those that other folders have defined
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"):
            operator = getattr(torch.ops.gpt_eagle, name.removeprefix("gpt_eagle::")).default
            lib.impl(operator, partial(_without_gradients, operator), "Autograd", with_keyset=True)


def _without_gradients(operator: Any, keys: Any, *inputs: Any, **named: Any) -> Any:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs, **named):
        raise RuntimeError(
            f"{operator.name()} has no gradients, and an input needs them; call "
            "use_backend(module, TORCH) (reference.py) for what learns, or torch.no_grad()"
        )
    return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs, **named)


# whether PyTorch replaces our operators: the definitions run, and none of ours is built or called
_plain: list[bool] = [False]


def is_plain() -> bool:
    """Return whether PyTorch replaces our operators. A traced step may call this."""
    return _plain[0]


def set_plain(plain: bool = True) -> None:
    """Replace our operators by PyTorch, or no longer. Writes: `_plain`.

    Engines that exist keep what they have compiled, captured or fused.
    """
    _plain[0] = plain


def has_triton() -> bool:
    """Return whether Triton's kernels run; print once the consequences if it is missing."""
    return not is_plain() and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    log_note(
        "Triton is missing: attention, top-k, experts and weights in int4 and int8 are slow, and "
        "steps are not timed; pip install triton"
    )
    return False


# Empty until the first call of `has_cpu_operators`, then its result. A traced step only reads it.
_cpp_available: list[bool] = []


def has_cpu_operators() -> bool:
    """Return whether the C++ operators are loaded, and PyTorch does not replace them.

    The first call builds them; if that fails, it prints the reason once.
    """
    if is_plain():
        return False
    if not _cpp_available:
        _cpp_available.append(not build.load_operators())
    return _cpp_available[0]


def cpu_operators_are_loaded() -> bool:
    """Return whether the C++ operators are loaded already, without building them."""
    return _cpp_available == [True] and not is_plain()


def tiles_in_use() -> str:
    """Return the unit of matmuls on AMX tiles: none, hardware or emulation (cpp/build.py)."""
    if build.loaded() and not is_plain():
        return torch.ops.gpt_eagle.tiles()[0]
    return "none"


def describe_cpu() -> str:
    """Return the library's name, or the processor, and the unit of matmuls on AMX tiles."""
    return f"{build.loaded() or build.processor()} {tiles_in_use()}"


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


def usual_topk_and_size(on_cuda: bool, quant: str, dtype: str) -> tuple[int, int]:
    """Return the top-k and the nodes that a dynamic tree has where no others are asked for.

    quant, dtype: the options (run/options.py)
    """
    if not on_cuda:
        if quant == "none" and dtype == "bfloat16" and tiles_in_use() != "none":
            # 32 rows take 1.4 times as long as one, measured for a matmul of 4096x4096
            return 8, 32
        # matmuls are bound by arithmetic at 16 rows in every format (benchmarks/RESULTS.md)
        return 4, 16
    # an estimate: from 33 rows on, unpacking takes longer than reading int4 weights, or GGUF blocks
    size = 32 if quant in ("int4", "blocks") else 60
    return 10, size
