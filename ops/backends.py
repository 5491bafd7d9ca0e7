"""A backend: the functions of decoding as one device runs them, chosen once, while loading.

Three modules have the same functions: torch_backend.py in plain PyTorch, which says what each of
them computes and serves every device; cpu/backend.py in C++; cuda/backend.py in Triton. `choose`
takes each function from the device's module where that has it, else from PyTorch's. Attention,
which PyTorch has in a fast form, too, is plain only where that is asked for. The result is an
attribute of the modules of a model (`use_backend`) and of drafters, so that no call asks which code
runs. What is trained keeps `TORCH`: the others have no gradients.
Not here: products (linear.py, weight.py and experts.py beside this file), which still ask; whole
passes in C++ (cpu/layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ops import torch_backend
from ops.attention import attention
from ops.library import has_cpu_operators, has_triton


def of(*families: str, cpp: tuple[torch.dtype, ...] = ()) -> Any:
    """Declare a function of a backend.

    families: `GPT_EAGLE_PLAIN` takes it from PyTorch by one
    cpp: dtypes of models that C++ serves; (): all
    """
    return field(metadata={"families": families, "cpp": cpp})


BF16 = (torch.bfloat16,)
WIDENED = (torch.bfloat16, torch.float32)  # whose rows are fp32
# what serves a device without a function of its own, where plain PyTorch is not asked for
OTHERWISE = {"attention": attention}


@dataclass(frozen=True)
class Backend:
    """The functions, as torch_backend.py defines them."""

    # scores
    gumbel: Callable = of("topk")
    cut: Callable = of("topk")
    best: Callable = of("topk")
    topk: Callable = of("topk")
    # the tree
    expand_frontier: Callable = of("topk", "tree")
    select_nodes: Callable = of("tree")
    root_tree: Callable = of("tree")
    accept: Callable = of("tree")
    # the cycle and its cache
    advance: Callable = of("tree")
    with_times: Callable = of("tree")
    place_tokens: Callable = of("tree")
    causal: Callable = of("tree")
    compact: Callable = of("compact")
    # the model
    rms_norm: Callable = of("norm", cpp=BF16)
    add_norm: Callable = of("norm", cpp=BF16)
    swiglu: Callable = of("norm", cpp=WIDENED)
    geglu: Callable = of("norm", cpp=WIDENED)
    clamped_swiglu: Callable = of("norm", cpp=WIDENED)
    rope_angles: Callable = of("rotary", cpp=(*WIDENED, torch.float16))
    rotary: Callable = of("rotary", cpp=WIDENED)
    rotary_cache: Callable = of("rotary", cpp=WIDENED)
    attention: Callable = of("attention", cpp=WIDENED)
    # what attention reads in every layer, made once a step; None where it reads masks
    path_table: Callable | None = of("attention")
    # of the drafters in extras/, whose own plain versions run where there is None
    keep_rows: Callable | None = of("tree")
    ngram_match: Callable | None = of("tree")
    ngram_draft: Callable | None = of("tree")
    add_chains: Callable | None = of("tree")


def choose(
    device: torch.device, plain: Iterable[str] = (), dtype: torch.dtype = torch.bfloat16
) -> Backend:
    """Choose the functions for a device. Builds the C++ operators, if they are to be built.

    plain: families of which PyTorch's own run (ops/switches.py)
    dtype: of the model's weights that are not quantized
    """
    own = _module_of(device)
    replaced = set(plain)
    functions = {}
    for f in fields(Backend):
        function = getattr(torch_backend, f.name, None)
        if replaced.isdisjoint(f.metadata["families"]):
            function = OTHERWISE.get(f.name, function)
            if device.type != "cpu" or dtype in (f.metadata["cpp"] or (dtype,)):
                function = getattr(own, f.name, function)
        functions[f.name] = function
    return Backend(**functions)


def use_backend(module: nn.Module, backend: Backend) -> None:
    """Let a model run a backend's functions. Writes: `backend` of its modules that have one."""
    for each in module.modules():
        if hasattr(each, "backend"):
            each.backend = backend


def _module_of(device: torch.device) -> ModuleType | None:
    """Return the module of a device, if it has one; its import needs the operators, or Triton."""
    if device.type == "cpu" and has_cpu_operators():
        import ops.cpu.backend

        return ops.cpu.backend
    if device.type == "cuda" and has_triton():
        import ops.cuda.backend

        return ops.cuda.backend
    return None


TORCH = choose(torch.device("meta"))  # PyTorch's own functions, for any device
