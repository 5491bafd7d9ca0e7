"""PyTorch in place of families of operators: the references run, nothing of ours does, tokens stay vanilla's.

The demo with two of its eight layers. In bf16 rows of PyTorch's own products and attention may depend on the rows
beside them, so these two families are tried in fp32.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import backends.attention
import backends.weight
import model
import reference
from backends import switches
from backends.cpp.build import HERE
from backends.library import FAMILIES, PLAIN, has_cpu_operators, has_triton, is_plain, set_plain
from backends.weight import Part, Weight
from decode import build_cycles
from drafters import RootOnly
from helpers import (
    OPERATORS,
    engine_for,
    golden_target,
    quantized,
    quantized_experts,
)
from helpers import decode as decoded
from reference import TORCH, choose
from run import generate
from run.load import load
from run.options import ROOT, GenerateConfig

PROMPT = [5, 17, 3, 40, 8, 22, 61]
SOURCES = "\n".join(file.read_text(encoding="utf-8") for file in HERE.glob("*.cpp"))
IN_CPP = set(re.findall(r"m\.def\(\s*\"(\w+)\(", SOURCES))


@pytest.fixture(autouse=True)
def _as_before():
    before = set(PLAIN)
    yield
    set_plain(before)


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
    result = generate.generate(engine, [PROMPT])
    return result.tokens[0]


METHODS = {
    "vanilla": {"draft": "none"}, "chain": {"tree": "chain"}, "tree": {"tree": "dynamic"},
    "auto": {"tree": "auto"}, "lookup": {"draft": "ngram"},
}  # fmt: skip
FORMATS = {
    "bf16": {}, "fp32": {"dtype": "float32"}, "int8": {"quant": "int8"}, "int4": {"quant": "int4"},
}  # fmt: skip
EVERY = [
    ("vanilla", "int8", 1.0), ("chain", "fp32", 0.0), ("tree", "bf16", 0.0), ("tree", "int4", 1.0),
    ("auto", "bf16", 0.0), ("lookup", "bf16", 1.0),
]  # fmt: skip


@pytest.mark.parametrize("method, form, temperature", EVERY)
def test_with_all_families_nothing_is_built_or_called(
    short_demo, monkeypatch, method, form, temperature
):
    """Not in loading either."""
    monkeypatch.setattr("backends.library._cpp_available", [])
    monkeypatch.setattr("backends.cpp.build.load_operators", lambda: pytest.fail("they were built"))
    options = METHODS[method] | FORMATS[form] | ({"top_k": 50} if temperature else {})
    with NoOperator():
        new = tokens(short_demo, plain=True, temperature=temperature, **options)
    assert len(new) == 12 and set(FAMILIES) == PLAIN and not has_triton()


@OPERATORS
def test_a_called_operator_is_noticed(short_demo):
    with pytest.raises(AssertionError, match="was called"), NoOperator():
        tokens(short_demo)


@OPERATORS
@pytest.mark.parametrize("family", [*FAMILIES, "all"])
def test_tokens_are_vanillas_under_each_family(short_demo, family):
    options = {"compile": True, "temperature": 1.0, "quant": "int8"}
    if family in ("attention", "products", "all"):
        options["dtype"] = "float32"
    set_plain([family])
    want = tokens(short_demo, draft="none", **options)
    assert tokens(short_demo, tree="dynamic", **options) == want and len(set(want)) > 3


@OPERATORS
def test_new_cycles_have_the_families_of_their_time(short_demo):
    """In the target, the drafter and its head."""
    engine = load(checkpoint=str(short_demo), tree="dynamic", device="cpu", context=128)
    ours = choose(torch.device("cpu")).matmul
    assert ours is not reference.matmul
    for families, function in (([], ours), (["products"], reference.matmul)):
        set_plain(families)
        engine = build_cycles(engine)
        owners = [engine.drafter, engine.drafter.lm_head, *engine.drafter.head.modules()]
        owners += engine.target.modules()
        found = {owner.backend.matmul for owner in owners if hasattr(owner, "backend")}
        assert found == {function}, families


def edited(*inputs, **more):
    raise RuntimeError("it was edited")


# a family, the module and the name of a reference of it, the options with which it runs
REFERENCES = [
    ("attention", reference, "attention", {}),
    ("compact", reference, "compact", {}),
    ("fused", model.Layer, "forward", {}),
    ("norm", reference, "rms_norm", {}),
    ("products", backends.strips, "grouped_reference", {"quant": "int8"}),
    ("products", backends.strips, "grouped_reference", {"quant": "int4"}),
    ("rotary", reference, "rotary", {}),
    ("topk", reference, "best", {}),
    ("topk", reference, "gumbel", {"temperature": 1.0}),
    ("topk", reference, "expand_frontier", {}),
    ("tree", reference, "expand_frontier", {}),
    ("tree", reference, "select_nodes", {}),
    ("tree", reference, "advance", {}),
    ("tree", reference, "accept", {}),
]


@OPERATORS
@pytest.mark.parametrize("family, owner, name, options", REFERENCES)
def test_an_edited_reference_is_what_runs(short_demo, monkeypatch, family, owner, name, options):
    monkeypatch.setattr(owner, name, edited)
    set_plain([family])
    with pytest.raises(RuntimeError, match="it was edited"):
        tokens(short_demo, tree="dynamic", compile=True, max_new_tokens=4, **options)


@OPERATORS
def test_without_families_no_reference_runs(short_demo, monkeypatch):
    """So that the test above says something."""
    cases = ({"quant": "int8"}, {"quant": "int4", "temperature": 1.0})
    for options in cases:  # calibration, which runs once and is kept, runs references
        tokens(short_demo, max_new_tokens=4, **options)
    for _, owner, name, _ in REFERENCES:
        monkeypatch.setattr(owner, name, lambda *inputs: pytest.fail("a reference ran"))
    for options in cases:
        assert len(tokens(short_demo, tree="dynamic", compile=True, **options)) == 12


def test_an_edited_reference_of_experts_is_what_runs(monkeypatch):
    def history():
        engine = engine_for(golden_target("models/target_mixtral"), RootOnly(), max_new_tokens=4)
        return decoded(engine, PROMPT).history

    want = history()
    set_plain(["experts"])
    assert history() == want
    monkeypatch.setattr(reference, "experts_linear", edited)
    with pytest.raises(RuntimeError, match="it was edited"):
        history()


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


# ----------------------------------------------------------------------------------------- switches


def test_families():
    set_plain(["all"])
    assert set(FAMILIES) == PLAIN and is_plain("tree") and not has_cpu_operators()
    set_plain(["norm", "topk"])
    assert {"norm", "topk"} == PLAIN
    assert is_plain("norm") and is_plain("tree", "topk") and not is_plain("tree", "compact")
    with pytest.raises(
        ValueError, match="rotary, topk, tree, graphs or all, .* it has 'trees': correct"
    ):
        set_plain(["norm", "trees"])
    assert {"norm", "topk"} == PLAIN, "nothing changed"
    set_plain(())
    assert not PLAIN


def test_families_of_the_environment(monkeypatch):
    for value, want in (
        ("all", set(FAMILIES)),
        ("norm, topk, graphs,", {"norm", "topk"}),
        ("", set()),
    ):
        monkeypatch.setenv("GPT_EAGLE_PLAIN", value)
        assert switches.plain_families() == want


@pytest.mark.parametrize("name, value, message", [
    ("PLAIN", "norm,trees", "topk, tree, graphs or all, separated by commas; it has 'trees': correct"),
    ("TILES", "on", "GPT_EAGLE_TILES must be auto or none or hardware or emulation; it is 'on'"),
])  # fmt: skip
def test_a_wrong_switch_is_one_line_before_torch_is_imported(name, value, message):
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = 'generate.py';"
        "runpy.run_path('generate.py', run_name='__main__')"
    )
    env = os.environ | {f"GPT_EAGLE_{name}": value}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and message in run.stderr and len(run.stderr.splitlines()) == 1


def test_a_switch_for_cuda_is_told_on_a_cpu(short_demo, monkeypatch, capsys):
    monkeypatch.setenv("GPT_EAGLE_PLAIN", "graphs")
    tokens(short_demo, draft="none", max_new_tokens=2)
    note = "note: GPT_EAGLE_PLAIN: graphs are CUDA's, and the device is cpu; drop them"
    assert capsys.readouterr().err.count(note) == 1


def test_the_flag_end_to_end(short_demo, capsys):
    """In fp32, where products are PyTorch's anyway, the tokens are the same with and without."""
    options = "--device cpu --dtype float32 --json - --prompt_ids 5,17,3"
    argv = shlex.split(f"--checkpoint {short_demo} {options} --max_new_tokens 12")
    generate.main(argv)
    want = capsys.readouterr()
    generate.main([*argv, "--plain"])
    got = capsys.readouterr()
    texts = [text.out.split('"tokens": ')[1].split("]")[0] for text in (want, got)]
    assert texts[0] == texts[1]
    assert set(FAMILIES) == PLAIN and "--compile" not in got.err
    generate.main([*argv, "--compile"])
    told = "note: --compile does not work here (PyTorch replaces the CPU operators); running"
    assert told in capsys.readouterr().err


@OPERATORS
@pytest.mark.parametrize("options, fused", [
    ({}, True), ({"compile": True}, True), ({"compile": False}, False), ({"plain": True}, False),
])  # fmt: skip
def test_on_a_cpu_whole_passes_run_in_cpp_by_default(short_demo, options, fused):
    engine = load(checkpoint=str(short_demo), device="cpu", context=128, **options)
    assert engine.option("compile") is fused
    assert (engine.target.program is not None) is fused


def test_plain_and_compile_are_opposites(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--plain", "--compile", "--prompt", "x"])
    told = "--plain is the opposite of --compile; drop one of them"
    assert told in capsys.readouterr().err
    GenerateConfig(plain=True, compile=False).check()
