"""PyTorch in place of our operators: the references run, nothing of ours does, tokens stay vanilla's.

The demo with two of its eight layers. In bf16 rows of PyTorch's own products and attention may depend on the rows
beside them, so tokens are compared in fp32.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import backends.attention
import backends.weight
import model
import reference
from backends.cpp.build import HERE
from backends.library import has_cpu_operators, has_triton, is_plain, set_plain
from backends.weight import Part, Weight
from helpers import (
    OPERATORS,
    quantized,
    quantized_experts,
)
from reference import TORCH
from run import library
from run.load import load

PROMPT = [5, 17, 3, 40, 8, 22, 61]
SOURCES = "\n".join(file.read_text(encoding="utf-8") for file in HERE.glob("*.cpp"))
IN_CPP = set(re.findall(r"m\.def\(\s*\"(\w+)\(", SOURCES))


@pytest.fixture(autouse=True)
def _as_before():
    yield
    set_plain(False)


class NoOperator(TorchDispatchMode):
    """Raises where a C++ operator is called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert func.namespace != "gpt_eagle" or name not in IN_CPP, f"{name} was called"
        return func(*args, **(kwargs or {}))


def tokens(checkpoint, **options) -> list[int]:
    """The tokens that follow PROMPT."""
    options = {"max_new_tokens": 12, "ignore_eos": True, "seed": 3, "context": 128} | options
    engine = load(checkpoint=str(checkpoint), device="cpu", **options)
    result = library.generate(engine, [PROMPT])
    return result.tokens[0]


@pytest.mark.parametrize("options", [
    {"tree": "chain", "dtype": "float32"}, {"tree": "dynamic", "quant": "int4", "temperature": 1.0, "top_k": 50},
    {"draft": "none", "quant": "int8", "temperature": 1.0}, {"tree": "auto"},
], ids=str)  # fmt: skip
def test_with_plain_nothing_is_built_or_called(short_demo, monkeypatch, options):
    """Not in loading either."""
    monkeypatch.setattr("backends.library._cpp_available", [])
    monkeypatch.setattr("backends.cpp.build.load_operators", lambda: pytest.fail("they were built"))
    with NoOperator():
        new = tokens(short_demo, plain=True, **options)
    assert len(new) == 12 and is_plain() and not has_triton() and not has_cpu_operators()


def edited(*inputs, **more):
    raise RuntimeError("it was edited")


# the module and the name of a reference, the options with which it runs
REFERENCES = [
    (model.Layer, "forward", {}),
    (backends.strips, "grouped_reference", {"quant": "int8"}),
    (backends.strips, "grouped_reference", {"quant": "int4"}),
    (reference, "gumbel", {"temperature": 1.0}),
    *((reference, name, {}) for name in (
        "attention", "compact", "rms_norm", "rotary", "best", "expand_frontier", "select_nodes", "advance", "accept",
    )),
]  # fmt: skip


@OPERATORS
@pytest.mark.parametrize("owner, name, options", REFERENCES)
def test_an_edited_reference_is_what_runs(short_demo, monkeypatch, owner, name, options):
    monkeypatch.setattr(owner, name, edited)
    set_plain()
    with pytest.raises(RuntimeError, match="it was edited"):
        tokens(short_demo, tree="dynamic", compile=True, max_new_tokens=4, **options)


@pytest.mark.parametrize("form", ["int8", "int4-64", "int4-128-zeros"])
def test_plain_matmuls_unpack_the_weights_of_cuda(form):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = quantized(form, 96, 256)
    layout = "INT4_PLANES" if weight.group else "INT8_PLANES"
    parts = (Part(layout, 96, weight.group),)
    record = Weight(weight.packed, parts, 256, scale=weight.scale)
    assert torch.equal(TORCH.matmul(x, record), weight.reference(x))
    wide = TORCH.matmul(x, record, fp32_out=True)
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), weight.reference(x))
    expert = torch.tensor([2, 0, 0, 3, 2])
    stack = quantized_experts(form, 4, 96, 256)
    record = Weight(stack.weight, parts, 256, scale=stack.scale, experts=4)
    got = TORCH.experts_matmul(x, record, expert)
    torch.testing.assert_close(got, stack.reference(x, expert))


@OPERATORS
@pytest.mark.parametrize("options, fused", [
    ({}, True), ({"compile": True}, True), ({"compile": False}, False), ({"plain": True}, False),
])  # fmt: skip
def test_on_a_cpu_whole_passes_run_in_cpp_by_default(short_demo, options, fused):
    engine = load(checkpoint=str(short_demo), device="cpu", context=128, **options)
    assert engine.option("compile") is fused
    assert (engine.target.program is not None) is fused
