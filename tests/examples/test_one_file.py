"""The one-file example decodes the project's own tokens, and stays one small file."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import sampling
from helpers import slow
from run.generate import generate, load

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "eagle_one_file.py"
MODELS = ROOT / "tests" / "golden" / "models"
PAIRS = {  # directories of a target and of a head
    "demo": (ROOT / "checkpoints" / "demo", ROOT / "checkpoints" / "demo-eagle"),
    "eagle12": (MODELS / "target_llama_mha", MODELS / "head_eagle12_mha"),
    "eagle3": (MODELS / "target_llama31_gqa8", MODELS / "head_eagle3"),
    "mixtral": (MODELS / "target_mixtral", MODELS / "head_eagle12_mixtral"),
}
PROMPTS = [[1, 5, 17, 23, 9], [1, 40, 41]]
NEW = 24


@cache
def example():
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("eagle_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(pair: str, drafts: bool = True, **options):
    """The example's engine of a pair, in fp32 on the CPU; without `drafts` no head."""
    target, head = PAIRS[pair]
    values = {name: default for name, default, _ in example().OPTIONS}
    values |= {"checkpoint": str(target), "head": str(head) if drafts else "", "context": 128}
    values |= {"dtype": "float32", "device": "cpu", "compile": False}
    return example().Engine(argparse.Namespace(**values | options))


def tree_engine(pair: str, **options):
    return engine(pair, depth=4, topk=6, nodes=24, **options)


def decode(engine, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt; the tokens that each pass decided."""
    passes = [list(engine.generate(p, NEW, seed, index)) for index, p in enumerate(PROMPTS)]
    return [sum(paths, []) for paths in passes], [len(path) for paths in passes for path in paths]


def project(pair: str, prompts: list = PROMPTS, new: int = NEW, **options):
    """The result of the project on the same prompts; with `draft` eagle on a dynamic tree as `tree_engine`'s."""
    target, head = map(str, PAIRS[pair])
    where = {"checkpoint": target, "device": "cpu", "dtype": "float32", "context": 128}
    if options["draft"] == "eagle":
        where |= {"head": head, "tree_depth": 4}
        if options.setdefault("tree", "dynamic") == "dynamic":
            where |= {"tree_topk": 6, "tree_size": 24}
    return generate(load(**where | options, max_new_tokens=new, trace="-"), prompts)


@pytest.mark.parametrize("tree, temperature", [("dynamic", 1.0), ("chain", 0.0)])
@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_are_the_projects(pair, temperature, tree):
    ours = {"topk": 6, "nodes": 24} if tree == "dynamic" else {"topk": 1}
    seed = 7 + (3 << 32)  # both words count
    result = project(pair, draft="eagle", temperature=temperature, seed=seed, tree=tree)
    tokens, passes = decode(engine(pair, temperature=temperature, depth=4, **ours), seed)
    assert tokens == result.tokens
    # nor may the head draft nonsense, or without the noise. Our first pass starts one token earlier, our last is cut
    assert sum(passes) / len(passes) > 0.75 * result.stats["tau"]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_draft_is_accepted_as_the_projects(pair):
    """Behind the first token, which only the project decides while it reads the prompt, the passes are the same."""
    result, own = project(pair, draft="eagle"), tree_engine(pair)
    for row, (prompt, new) in enumerate(zip(PROMPTS, result.tokens)):
        ours = [len(path) for path in own.generate(prompt + new[:1], NEW - 1, 0)]
        theirs = [line["accept_length"] + 1 for line in result.trace if line["row"] == row]
        assert len(ours) == len(theirs)
        assert ours[:-1] == theirs[:-1]  # the last path of ours is cut where the text ends


def test_without_a_head_it_decodes_plainly():
    for temperature in (0.0, 1.0):
        tokens, passes = decode(engine("eagle12", drafts=False, temperature=temperature))
        assert tokens == project("eagle12", draft="none", temperature=temperature).tokens
        assert set(passes) == {1}


@pytest.mark.parametrize("pair, bits", [("eagle12", 4), ("mixtral", 8)])
def test_quantized_drafts_change_no_token(pair, bits):
    vanilla, _ = decode(engine(pair, drafts=False, bits=bits))
    drafted = tree_engine(pair, bits=bits)
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


def test_a_tied_head_and_a_bin_file(tmp_path, monkeypatch):
    """A copy of a golden target whose LM head is its embedding."""
    source, head = PAIRS["eagle12"]
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(PAIRS, "tied", (tmp_path, head))
    tokens, _ = decode(engine("tied", drafts=False))
    assert tokens == project("tied", draft="none").tokens


# ------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("drafts, temperature", [(True, 1.0), *slow([(False, 0.0)])])
def test_steps_are_traced_whole(traced, drafts, temperature):
    """Draft and verify are one graph each, of static shapes. Nothing is written in C++: that is slow."""
    torch._dynamo.reset()
    counters.clear()
    small = {"depth": 2, "topk": 2, "nodes": 4, "temperature": temperature, "drafts": drafts}
    assert decode(engine("eagle12", compile=True, **small)) == decode(engine("eagle12", **small))
    assert counters["stats"]["unique_graphs"] == 2  # no pass compiles anew


SMALL = "--depth 2 --topk 2 --nodes 4 --context 32 --max_new_tokens 8 --device cpu --dtype float32"


@pytest.mark.slow  # Inductor writes and compiles C++ for two steps: 50 s of processor time
def test_compile_runs_on_a_cpu(tmp_path):
    target, head = PAIRS["eagle12"]
    command = f"{FILE} --checkpoint {target} --head {head} --prompt_ids 1,5,17,23,9 --temperature 1"
    command = [sys.executable, *command.split(), *SMALL.split()]
    eager = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    compiled = subprocess.run([*command, "--compile"], capture_output=True, text=True, check=True)
    assert compiled.stdout.splitlines()[0] == eager.splitlines()[0]
    assert len(eager.splitlines()[0].split(",")) == 6  # the last of them ends the text


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


def test_it_prints_ids_and_speed(capsys):
    target, head = map(str, PAIRS["eagle12"])
    status, out, err = run(
        "--checkpoint", target, "--head", head, "--prompt_ids", "1,5,17", "--max_new_tokens", "12", "--context", "64",
        capsys=capsys,
    )  # fmt: skip
    want = sum(engine("eagle12").generate([1, 5, 17], 12, 0), [])
    assert status == 0
    assert list(map(int, out.split(","))) == want
    assert err.startswith(f"{len(want)} tokens, ") and " tokens/s, tau " in err
    assert err.endswith("the same tokens\n")


def test_without_arguments_it_prints_the_demos_text():
    """From any folder, in some seconds of processor time; a pipe gets the text alone."""
    done = subprocess.run(
        [sys.executable, FILE], capture_output=True, text=True, cwd="/", check=True
    )
    result = project(
        "demo", draft="none", dtype="bfloat16", new=64, prompts=["def read_lines(path):"]
    )
    assert done.stdout == f"def read_lines(path):{result.text[0]}\n"
    tau = float(re.search(r"64 tokens, \d+\.\d tokens/s, tau (\S+); without", done.stderr)[1])
    assert tau > 3
    assert done.stderr.endswith(" tokens/s, the same tokens\n")


def test_accepted_drafts_are_in_reverse_video(monkeypatch):
    """All but the last token of a pass. The text is whole, spaces between words included."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = " ".join
    shown = example().shaded(["a"], [["b"], ["c", "d", "e"]], words)
    assert shown == "a\033[7m\033[0m b\033[7m c d\033[0m e"
    monkeypatch.setenv("NO_COLOR", "1")
    assert example().shaded(["a"], [["b"], ["c", "d", "e"]], words) == "a b c d e"


def test_text_needs_only_a_tokenizer(tmp_path, capsys):
    """With tokenizer.json and the package tokenizers, text goes in and comes out."""
    tokenizers = pytest.importorskip("tokenizers")
    target, _ = PAIRS["eagle12"]
    for file in target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    status, out, _ = run(
        "--checkpoint", str(tmp_path), "--prompt", "w1 w5 w17", "--head", "none", "--max_new_tokens", "6", "--context", "64", capsys=capsys
    )  # fmt: skip
    want = [1, 5, 17] + sum(engine("eagle12", drafts=False).generate([1, 5, 17], 6, 0), [])
    assert (status, out) == (0, " ".join(f"w{i}" for i in want) + "\n")


QUANTIZED = ROOT / "checkpoints" / "SmolLM2-135M-Instruct.Q4_1-eagle"
MISTAKES = {
    "no such checkpoint": ("--checkpoint nowhere", "nowhere/config.json"),
    "no such head": ("--head nowhere", "nowhere/config.json"),
    "a model for a head": (f"--head {PAIRS['demo'][0]}", "do not fit"),
    "another target's head": (f"--head {PAIRS['eagle3'][1]}", "do not fit"),
    "another kind of model": (f"--checkpoint {QUANTIZED}", "is of no LLaMA"),
    "a GGUF file": ("--checkpoint a.gguf", "is a GGUF file"),
    "prompt of one id": ("--prompt_ids 1", "2 to 2047 ids"),
    "prompt too long": ("--context 4 --prompt_ids 1,2,3,4,5", "2 to 3 ids"),
    "id too large": ("--prompt_ids 1,4096", "each below 4096"),
    "id no number": ("--prompt_ids 1,x", "'x'"),
    "tree larger than its pool": ("--depth 2 --topk 3 --nodes 14", "2 to 13"),
    "bits": ("--bits 5", "4, 8 or 16"),
    "text without a tokenizer": (
        f"--checkpoint {PAIRS['eagle12'][0]} --prompt hello",
        "tokenizer.json",
    ),
    "no number": ("--nodes many", "many"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, capsys):
    given, named = MISTAKES[mistake]
    arguments = ["--checkpoint", str(PAIRS["demo"][0]), "--prompt_ids", "1,2", *given.split()]
    status, out, err = run(*arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and named in err, err


# ------------------------------------------------------------------------------------------- file


def test_it_is_one_small_file():
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 520
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, f"{node.name} fits no screen"
    # tokenizers only where a prompt is text
    texts = {"tokenizers", "sentencepiece"}
    assert imported - set(sys.stdlib_module_names) == {"torch", "safetensors"} | texts
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any(name in ast.unparse(node) for node in top for name in texts)


def test_noise_is_the_projects():
    key = torch.tensor([7, 3, 2, 5])
    one = torch.tensor
    theirs = sampling.SamplingTensors(one([[7, 3]]), one([5]), one([2]))
    for first, rows, vocab in itertools.product((0, 1000), (1, 5), (1, 8, 97)):
        want = sampling.gumbel(theirs, one([first]), rows, vocab)[0]
        torch.testing.assert_close(example().gumbel(key, one([first]), rows, vocab), want)
