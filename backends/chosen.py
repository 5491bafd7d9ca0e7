"""The functions of reference.py that a device has here in a faster form: what `choose` asks for.

1. Attention and experts have a faster form in PyTorch, where nothing else is there.
2. cpp/functions.py has functions in C++, triton/functions.py in Triton. They are imported, by the
   table in __init__.py, where their operators, or Triton, are there.
3. `GPT_EAGLE_PLAIN` leaves families of functions to reference.py; some in C++ serve models of
   some dtypes only. What is trained keeps `reference.TORCH`: these have no gradients, and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backends.attention import attention, masked_attention
from backends.experts import experts_linear
from backends.library import (
    has_cpu_operators,
    has_triton,
    is_plain,
    refuse_gradients,
    why_not_compiled,
)
from options import load_part

BF16 = (torch.bfloat16,)
WIDENED = (torch.bfloat16, torch.float32)  # whose rows are fp32
LAYERS = ("attention", "experts", "fused", "norm", "products", "rotary")  # of whole passes
MERGED = ("fused", "norm", "products", "rotary")  # of launches with the work behind a matmul
# a function -> the families that leave it to PyTorch, any of them; none: it is always there
FAMILIES: dict[str, tuple[str, ...]] = {
    # scores
    **dict.fromkeys(("soft_cap", "gumbel", "cut", "cut_shaped", "best", "topk"), ("topk",)),
    # the tree
    "expand_frontier": ("topk", "tree"),
    **dict.fromkeys(("select_nodes", "root_tree", "accept"), ("tree",)),
    # the cycle and its cache
    **dict.fromkeys(("advance", "with_times", "place_tokens", "causal"), ("tree",)),
    "compact": ("compact",),
    # the model
    **dict.fromkeys(("rms_norm", "add_norm", "swiglu", "geglu", "clamped_swiglu"), ("norm",)),
    **dict.fromkeys(("rope_angles", "rotary", "rotary_cache"), ("rotary",)),
    **dict.fromkeys(("attention", "path_table", "delta_rule"), ("attention",)),
    # its linear layers
    **dict.fromkeys(("linear", "matmul", "router_logits"), ("products",)),
    **dict.fromkeys(("route", "experts_linear", "experts_matmul", "experts_bias"), ("experts",)),
    # lookups of drafts/
    **dict.fromkeys(("keep_rows", "ngram_match", "ngram_draft", "add_chains"), ("tree",)),
    # whole passes, and the machine
    **dict.fromkeys(("device_time", "why_not_compiled"), ()),
}
ON_CPU = FAMILIES | dict.fromkeys(("model_program", "head_program", "single_thread"), LAYERS)
ON_CUDA = FAMILIES | dict.fromkeys(("model_program", "head_program", "merges_steps"), MERGED)
# a function in C++ -> the dtypes of models that it serves; of others all
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("rms_norm", "linear", "router_logits", "experts_linear"), BF16),
    **dict.fromkeys(("model_program", "head_program", "single_thread"), BF16),
    **dict.fromkeys(("swiglu", "geglu", "clamped_swiglu", "delta_rule"), WIDENED),
    **dict.fromkeys(("rotary", "rotary_cache", "attention"), WIDENED),
    "rope_angles": (*WIDENED, torch.float16),
}


def on_cpu(dtype: torch.dtype) -> dict[str, Callable | Any]:
    """Return the functions of a CPU. Builds the C++ operators, if they are to be built.

    dtype: of the model's weights that are not quantized
    """
    functions = {"attention": attention, "experts_linear": experts_linear}
    functions["why_not_compiled"] = why_not_compiled
    if has_cpu_operators():
        own = vars(load_part("functions", "cpu"))
        refuse_gradients()
        serve = [name for name in ON_CPU if name in own and dtype in DTYPES.get(name, (dtype,))]
        functions |= {name: own[name] for name in serve}
    return _asked_for(functions, ON_CPU)


def on_cuda(dtype: torch.dtype) -> dict[str, Callable | Any]:
    """Return the functions of a GPU: kernels in Triton, for all dtypes."""
    functions = {"attention": masked_attention}
    if has_triton():
        own = vars(load_part("functions", "cuda"))
        refuse_gradients()
        functions |= {name: own[name] for name in ON_CUDA if name in own}
        functions["attention"] = attention
    return _asked_for(functions, ON_CUDA)


def _asked_for(
    functions: dict[str, Callable | Any], families: dict[str, tuple[str, ...]]
) -> dict[str, Callable | Any]:
    """Return the functions of families that PyTorch does not replace."""
    plain = [name for name in functions if families[name] and is_plain(*families[name])]
    return {name: function for name, function in functions.items() if name not in plain}
