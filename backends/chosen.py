"""The functions of reference.py that a device has here in a faster form: what `choose` asks for.

1. Attention and experts have a faster form in PyTorch, where nothing else is there.
2. cpp/functions.py has functions in C++, triton/functions.py in Triton. They are imported, by the
   table in __init__.py, where their operators, or Triton, are there.
3. With --plain all are reference.py's; some in C++ serve models of some dtypes only. What is
   trained keeps `reference.TORCH`: these have no gradients, and say so.
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
)
from options import load_part

BF16 = (torch.bfloat16,)
WIDENED = (torch.bfloat16, torch.float32)  # whose rows are fp32
# the functions that C++ and Triton may have. One that is taken out of them runs as defined, on
# each device: so the one at fault is found
NAMES = (
    # scores
    *("soft_cap", "gumbel", "cut", "cut_shaped", "best", "topk"),
    # the tree
    *("expand_frontier", "select_nodes", "root_tree", "accept"),
    # the cycle and its cache
    *("advance", "with_times", "place_tokens", "causal", "compact"),
    # the model
    *("rms_norm", "add_norm", "swiglu", "geglu", "clamped_swiglu"),
    *("rope_angles", "rotary", "rotary_cache", "attention", "path_table", "delta_rule"),
    # its linear layers
    *("linear", "matmul", "router_logits"),
    *("route", "experts_linear", "experts_matmul", "experts_bias"),
    # lookups of drafts/
    *("ngram_match", "ngram_draft", "add_chains"),
    # whole passes, and the machine
    *("model_program", "head_program", "merges_steps", "device_time"),
)
# a function in C++ -> the dtypes of models that it serves; of others all
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("rms_norm", "linear", "router_logits", "experts_linear"), BF16),
    **dict.fromkeys(("model_program", "head_program"), BF16),
    **dict.fromkeys(("swiglu", "geglu", "clamped_swiglu", "delta_rule"), WIDENED),
    **dict.fromkeys(("rotary", "rotary_cache", "attention"), WIDENED),
    "rope_angles": (*WIDENED, torch.float16),
}


def on_cpu(dtype: torch.dtype) -> dict[str, Callable | Any]:
    """Return the functions of a CPU. Builds the C++ operators, if they are to be built.

    dtype: of the model's weights that are not quantized
    """
    if is_plain():
        return {}
    functions = {"attention": attention, "experts_linear": experts_linear}
    if has_cpu_operators():
        own = vars(load_part("functions", "cpu"))
        refuse_gradients()
        serve = [name for name in NAMES if name in own and dtype in DTYPES.get(name, (dtype,))]
        functions |= {name: own[name] for name in serve}
    return functions


def on_cuda(dtype: torch.dtype) -> dict[str, Callable | Any]:
    """Return the functions of a GPU: kernels in Triton, for all dtypes."""
    if is_plain():
        return {}
    functions = {"attention": masked_attention}
    if has_triton():
        own = vars(load_part("functions", "cuda"))
        refuse_gradients()
        functions |= {name: own[name] for name in NAMES if name in own}
        functions["attention"] = attention
    return functions
