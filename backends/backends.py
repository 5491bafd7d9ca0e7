"""A backend: the functions of decoding as one device runs them, chosen once, while loading.

Three modules have the same functions: reference.py in plain PyTorch, which says what each of
them computes and serves every device; cpu/backend.py in C++; cuda/backend.py in Triton. `choose`
takes each function from the device's module where that has it, else from PyTorch's. Attention and
experts, which PyTorch has in a fast form, too, are plain only where that is asked for. The result
is an attribute of the modules of a model (`use_backend`) and of drafters, so that no call asks
which code runs. What is trained keeps `TORCH`: the others have no gradients, and say so.
Not here: whole passes in C++ (cpu/layers.py), merged steps (backends/fusions.py); two fields say
which of them a backend has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import torch
from torch import nn

import reference
from backends.attention import attention
from backends.experts import experts_linear
from backends.library import PLAIN, has_cpu_operators, has_triton, refuse_gradients


def of(*families: str, cpp: tuple[torch.dtype, ...] = ()) -> Any:
    """Declare a function of a backend.

    families: `GPT_EAGLE_PLAIN` takes it from PyTorch by one
    cpp: dtypes of models that C++ serves; (): all
    """
    return field(metadata={"families": families, "cpp": cpp})


BF16 = (torch.bfloat16,)
WIDENED = (torch.bfloat16, torch.float32)  # whose rows are fp32
# PyTorch in a faster form: where plain PyTorch is not asked for, and a device has no own function
OTHERWISE = {"attention": attention}
ON_CPU = OTHERWISE | {"experts_linear": experts_linear}  # which reads the routing


@dataclass(frozen=True)
class Backend:
    """The functions, as reference.py defines them."""

    # scores
    soft_cap: Callable = of("topk")
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
    delta_rule: Callable = of("attention", cpp=WIDENED)
    short_conv: Callable = of("attention")
    # what attention reads in every layer, made once a step; None where it reads masks
    path_table: Callable | None = of("attention")
    # its linear layers
    linear: Callable = of("products", cpp=BF16)
    matmul: Callable = of("products")
    router_logits: Callable = of("products", cpp=BF16)
    route: Callable = of("experts")
    experts_linear: Callable = of("experts", cpp=BF16)
    experts_matmul: Callable = of("experts")
    experts_bias: Callable = of("experts")
    lazy_matmul: Callable = of("fused", "norm", "products", "rotary")
    # its layers
    merges_steps: bool = of("fused")
    runs_passes: bool = of("attention", "experts", "fused", "norm", "products", "rotary", cpp=BF16)
    # of the drafters in drafts/, whose own plain versions run where there is None
    keep_rows: Callable | None = of("tree")
    ngram_match: Callable | None = of("tree")
    ngram_draft: Callable | None = of("tree")
    add_chains: Callable | None = of("tree")


def choose(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, plain: Iterable[str] = PLAIN
) -> Backend:
    """Choose the functions for a device. Builds the C++ operators, if they are to be built.

    dtype: of the model's weights that are not quantized
    plain: families of which PyTorch's own run (backends/switches.py); default: the process's
    """
    own = _module_of(device)
    if own is not None:
        refuse_gradients()
    replaced = set(plain)
    otherwise = ON_CPU if device.type == "cpu" else OTHERWISE
    functions = {}
    for f in fields(Backend):
        function = getattr(reference, f.name, None)
        if replaced.isdisjoint(f.metadata["families"]):
            function = otherwise.get(f.name, function)
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
        import backends.cpp.backend

        return backends.cpp.backend
    if device.type == "cuda" and has_triton():
        import backends.triton.backend

        return backends.triton.backend
    return None


TORCH = choose(torch.device("meta"), plain=())  # PyTorch's own functions, for any device
