"""Triton's interpreter in the place of a GPU: on a CPU, every operator of CUDA runs its kernel there.

Plans of products are those of 16-bit activations, in tiles that measured plans have, too: fp32's are of no use.
Each call of a device function replaces the functions of the language again, a fourth of all time. Once is enough:
those that the kernels name are replaced by every launch, and those behind tl.sum and the like stay replaced.
"""

from contextlib import nullcontext

import torch
from triton.runtime.interpreter import InterpretedFunction, _patch_lang

import backends.triton.attention
import backends.triton.epilogues
import backends.triton.experts
import backends.triton.operators
import backends.triton.qmatmul
from backends.library import lib
from backends.triton.launch import Device
from reference import choose

DEVICE = Device(132, 232448, 90)
DONE = torch.zeros(4096, dtype=torch.int32)  # the counters of all launches
CUDA = choose(torch.device("cuda"))  # registers the operators
seen = set()


def call(function, *args, **named):
    """In the place of a device function's `__call__`."""
    if function not in seen:
        seen.add(function)
        _patch_lang(function.fn)
    return function.rewrite()(*args, **named)


def fit(tokens, splits, *_):
    """In the place of `qmatmul.fit`."""
    rows = 64 if tokens == 16 else 128
    return backends.triton.qmatmul.ProductPlan(tokens, rows, splits, stages=3, warps=4)


InterpretedFunction.__call__ = call
torch.cuda.device = lambda _: nullcontext()
for module in (backends.triton.qmatmul, backends.triton.experts):
    module.fit = fit
for module in (backends.triton.qmatmul, backends.triton.epilogues):
    module.device_of = lambda _: DEVICE
for module in (backends.triton.attention, backends.triton.epilogues):
    module.counters = lambda _: DONE
for name, kernel in backends.triton.operators.ON_CUDA.items():
    lib.impl(name, kernel, "CPU", allow_override=True)
