"""The one-file example decodes the project's own tokens, and stays one small file."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from helpers import GOLDEN, slow
from run.library import generate
from run.load import load
from run.options import DEMO, ROOT

FILE = ROOT / "examples" / "eagle_one_file.py"
MODELS = GOLDEN / "models"
PAIRS = {  # directories of a target and of a head
    "demo": (Path(DEMO), Path(f"{DEMO}-eagle")),
    "eagle12": (MODELS / "target_llama_mha", MODELS / "head_eagle12_mha"),
    "eagle3": (MODELS / "target_llama31_gqa8", MODELS / "head_eagle3"),
    "mixtral": (MODELS / "target_mixtral", MODELS / "head_eagle12_mixtral"),
}
PROMPTS = [[1, 5, 17, 23, 9], [1, 40, 41]]
NEW = 24
TREES = {"dynamic": {"depth": 4, "topk": 6, "nodes": 24}, "chain": {"depth": 4, "topk": 1}, "none": {"head": ""}}  # fmt: skip


@cache
def example():
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("eagle_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(pair: str, tree: str = "dynamic", **options):
    """The example's engine of a pair, in fp32 on the CPU; with the tree `none` without a head."""
    target, head = PAIRS[pair]
    values = {name: default for name, default, _ in example().OPTIONS}
    values |= {"checkpoint": str(target), "head": str(head), "context": 128}
    values |= {"dtype": "float32", "device": "cpu", "compile": False}
    return example().Engine(argparse.Namespace(**values | TREES[tree] | options))


def decode(engine, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt; the tokens that each pass decided."""
    passes = [list(engine.generate(p, NEW, seed, index)) for index, p in enumerate(PROMPTS)]
    return [sum(paths, []) for paths in passes], [len(path) for paths in passes for path in paths]


def project(pair: str, tree: str = "dynamic", prompts: list = PROMPTS, new: int = NEW, **options):
    """The result of the project on the same prompts, with the same tree."""
    target, head = map(str, PAIRS[pair])
    given = {"checkpoint": target, "device": "cpu", "dtype": "float32", "context": 128}
    if tree == "none":
        given |= {"draft": "none"}
    else:
        given |= {"draft": "eagle", "head": head, "tree": tree, "tree_depth": 4}
    if tree == "dynamic":
        given |= {"tree_topk": 6, "tree_size": 24}
    return generate(load(**given | options, max_new_tokens=new, trace="-"), prompts)


@pytest.mark.parametrize("tree, temperature", [("dynamic", 1.0), ("dynamic", 0.0), ("chain", 0.0), ("none", 1.0), ("none", 0.0)])  # fmt: skip
@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_are_the_projects(pair, temperature, tree):
    """So are the passes, greedily: behind the first token, which only the project decides while it reads."""
    seed = 7 + (3 << 32)  # both words count
    result = project(pair, tree, temperature=temperature, seed=seed)
    own = engine(pair, tree, temperature=temperature)
    tokens, passes = decode(own, seed)
    assert tokens == result.tokens
    # nor may the head draft nonsense, or without the noise. Our first pass starts one token earlier, our last is cut
    assert sum(passes) / len(passes) > 0.75 * result.stats["tau"]
    assert tree != "none" or set(passes) == {1}
    for row, (prompt, new) in enumerate(zip(PROMPTS, result.tokens)):
        ours = [len(path) for path in own.generate(prompt + new[:1], NEW - 1, 0)]
        theirs = [line["accept_length"] + 1 for line in result.trace if line["row"] == row]
        assert temperature or ours[:-1] == theirs[:-1]  # the last path of ours is cut


@pytest.mark.parametrize("pair, bits", [("eagle12", 4), ("mixtral", 8)])
def test_quantized_drafts_change_no_token(pair, bits):
    vanilla, _ = decode(engine(pair, "none", bits=bits))
    drafted = engine(pair, bits=bits)
    tokens, passes = decode(drafted)
    assert tokens == vanilla
    assert sum(passes) / len(passes) > 1.1
    # the codes have the bits that were asked for, and lie near the weight
    name = "layers_0_self_attn_k_proj"
    target = drafted.target
    assert getattr(target, name).dtype == {8: torch.int8, 4: torch.uint8}[bits]
    weight = getattr(engine(pair).target, name)
    exact = torch.eye(weight.shape[1])
    error = (target.linear(name, exact).T - weight).norm() / weight.norm()
    assert {8: 1e-3, 4: 0.03}[bits] < error < {8: 0.03, 4: 0.15}[bits]


# ------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("tree, temperature", [("dynamic", 1.0), *slow([("none", 0.0)])])
def test_steps_are_traced_whole(traced, tree, temperature):
    """Draft and verify are one graph each, of static shapes. Nothing is written in C++: that is slow."""
    torch._dynamo.reset()
    counters.clear()
    small = {"depth": 2, "topk": 2, "nodes": 4, "temperature": temperature}
    compiled = engine("eagle12", tree, compile=True, **small)
    assert decode(compiled) == decode(engine("eagle12", tree, **small))
    assert counters["stats"]["unique_graphs"] == 2  # no pass compiles anew


# ---------------------------------------------------------------------------------------- command


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    """Run the example's main. Returns: exit status, standard output, standard error."""
    status = 0
    threads = torch.get_num_threads()
    try:
        example().main([*arguments, "--device", "cpu", "--dtype", "float32"])
    except SystemExit as end:
        status = end.code
    torch.set_num_threads(threads)
    return status, *capsys.readouterr()


def test_without_arguments_it_prints_the_demos_text():
    """From any folder, in some seconds of processor time; a pipe gets the text alone."""
    done = subprocess.run([sys.executable, FILE], capture_output=True, text=True, cwd="/")
    prompt = "def read_lines(path):"
    result = project("demo", "none", [prompt], 64, dtype="bfloat16")
    assert done.stdout == f"{prompt}{result.text[0]}\n"
    tau = float(re.search(r"64 tokens, \d+\.\d tokens/s, tau (\S+); without", done.stderr)[1])
    assert tau > 3
    assert re.search(r"the same tokens; a cycle takes [\d.]+ such passes\n$", done.stderr)


# ------------------------------------------------------------------------------------------- file


def test_it_is_one_small_file():
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 522
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    texts = {"tokenizers", "sentencepiece"}
    assert imported - set(sys.stdlib_module_names) == {"torch", "safetensors"} | texts
