"""Tensor parallelism: ranks on CPUs decode what one device decodes.

fp32: the rule of test_lossless.py, against one device. Other formats round differently when they are split: ranks with
a draft decode the same tokens as without, and their features and scores are close to one device's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from test_lossless import assert_same

from families import FAMILIES
from files import memory
from files.checkpoint import Codes, TensorSource
from files.config import config_from, open_source, read_config
from files.rank import Rank
from files.rounding import quantize_directory
from files.weights import export_weights, load_model
from helpers import GOLDEN, PROMPTS
from model import Transformer, weight_names
from quantize import Quantization
from run import generate, library, ranks, tp
from run.engine import Engine
from run.options import DEMO, GenerateConfig
from run.parsing import one_line_errors
from tp_cases import features

ROOT = Path(tp.__file__).parents[1]
MODELS = {  # target and head
    "llama": (GOLDEN / "models/target_llama_mha", GOLDEN / "models/head_eagle12_mha"),
    "gqa": (GOLDEN / "models/target_llama31_gqa8", GOLDEN / "models/head_eagle3"),
    "mixtral": (GOLDEN / "models/target_mixtral", GOLDEN / "models/head_eagle12_mixtral"),
    "demo": (DEMO, f"{DEMO}-eagle"),
}
TINY = {  # every layer with a bias; two KV heads
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97, "attention_bias": True,
    "mlp_bias": True, "torch_dtype": "float32",
}  # fmt: skip
MIXTURE = TINY | {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
ON_RANKS = [name for name, family in FAMILIES.items() if not family.one_rank]


def write_tiny(path: Path, raw: dict) -> str:
    """Returns: the directory of a model of random weights. Writes: it."""
    torch.manual_seed(0)
    config = config_from(raw, raw["architectures"][0])
    model = Transformer(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.15)
    path.mkdir()
    tensors = export_weights(model, weight_names(config), config, torch.float32)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def options_of(model: str, draft: str, **options) -> dict:
    """Options of a case. draft: eagle, which is a dynamic tree, ngram or none"""
    checkpoint, head = map(str, MODELS.get(model, (model, "")))
    base = {"checkpoint": checkpoint, "draft": draft, "max_new_tokens": 12, "ignore_eos": True}
    base |= {"seed": 7, "context": 256, "prompts": PROMPTS}
    if draft == "eagle":
        base |= {"head": head, "tree_topk": 10, "tree_size": 60}
    return base | options


def run_ranks(
    cases: dict[int, dict[str, dict]], folder: Path, limit_s: int = 120
) -> dict[int, dict[str, dict]]:
    """The results of tp_cases.py for cases, by number of ranks and name."""
    files = folder / "cases.json", folder / "out.json"
    files[0].write_text(json.dumps(cases))
    command = [sys.executable, ROOT / "tests/cases/tp_cases.py", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    return {int(world): found for world, found in json.loads(files[1].read_text()).items()}


def one_device(options: dict) -> Engine:
    """An engine that decodes a case without ranks and without a draft."""
    drafting = ("prompts", "head", "compile")
    kept = {k: v for k, v in options.items() if k not in drafting and "tree" not in k}
    return generate.load(**kept | {"draft": "none", "draft_checkpoint": "", "device": "cpu"})


def tau_of(found: dict) -> float:
    return sum(found["accepted"]) / len(found["accepted"]) + 1


def check_equal(options: dict, found: dict) -> None:
    """In fp32: ranks against one device without a draft."""
    engine = one_device(options)
    want = library.generate(engine, options["prompts"]).tokens
    for row, (prompt, tokens) in enumerate(zip(options["prompts"], found["tokens"], strict=True)):
        assert_same(engine, prompt, tokens, want[row], (row, 0))
    check_close(options, found, 1e-5, engine)


def check_close(options: dict, found: dict, most: float, engine: Engine | None = None) -> float:
    """Features and scores of the ranks, the same on all of them, against one device's. most: of their norm"""
    # tokens, accepted lengths, features and scores, bit for bit
    assert found["agree"], "every rank has the same"
    want = features(engine or one_device(options), options["prompts"][0])
    far = float((torch.tensor(found["features"]) - want).norm() / want.norm())
    assert far <= most, far  # a router's near tie may move a row
    return far


# ----------------------------------------------------------------------------------- ranks, quickly


SMALL = {"prompts": [[token % 96 for token in PROMPTS[0]]], "max_new_tokens": 8}


def quick_cases(folder: Path) -> dict[int, dict[str, dict]]:
    """The cases that every run of the suite decodes. Writes: models into the folder."""
    biases, mixture = (write_tiny(folder / raw["architectures"][0], raw) for raw in (TINY, MIXTURE))
    for name in ON_RANKS:
        FAMILIES[name].of(FAMILIES[name].bad_case).save_pretrained(folder / name)
    one = {"prompts": PROMPTS[:1]}
    fp32 = {"dtype": "float32", "temperature": 1.0}
    int8 = {"dtype": "bfloat16", "quant": "int8", **one}
    int4 = {"quant": "int4", **one}
    small = {"tree": "dynamic", "tree_depth": 2, "tree_topk": 2, "tree_size": 4}
    replaced = {"batch_size": 2, "prompts": [*PROMPTS, PROMPTS[0][::-1]]}
    return {
        2: {
            "llama": options_of("llama", "eagle", dtype="float32"),
            "biases": options_of(biases, "ngram", **one, **fp32, top_p=0.9),
            **{name: options_of(str(folder / name), "ngram", **SMALL, **fp32) for name in ON_RANKS},
            "gqa": options_of("gqa", "eagle", **one, **fp32),
            "int8": options_of("llama", "eagle", **int8),
            "int8 vanilla": options_of("llama", "none", **int8),
            "int4": options_of(mixture, "model", draft_checkpoint=mixture, **int4),
            "int4 vanilla": options_of(mixture, "none", **int4),
            "compiled fp32": options_of("llama", "eagle", dtype="float32", compile=True, **small),
            "eager": options_of("llama", "eagle", **int8, **small),
            "compiled": options_of("llama", "eagle", compile=True, **int8, **small),
        },
        4: {
            "other trees": options_of("llama", "eagle", tree="dynamic", **{"rank 1": {"tree_depth": 5}}),
            "mixtral": options_of("mixtral", "eagle", **replaced, **fp32),
            "large groups": options_of(mixture, "none", quant="int4"),
            "auto": options_of("llama", "eagle", tree="auto"),
            "interactive": options_of("llama", "none", interactive=True),
            "queue": options_of("llama", "none", prompt_file="/dev/null"),
        },
    }  # fmt: skip


class Quick(NamedTuple):
    """Cases, and the results of the ranks."""

    cases: dict[int, dict[str, dict]]
    found: dict[int, dict[str, dict]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Quick:
    """One process, which forks 2 ranks and then 4."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = quick_cases(folder)
    return Quick(cases, run_ranks(cases, folder))


@pytest.mark.parametrize("world,name,least", [
    (2, "llama", 1.5), (2, "gqa", 1), (2, "biases", 0), (2, "compiled fp32", 1), (4, "mixtral", 1.5),
    *((2, name, 0) for name in ON_RANKS),
])  # fmt: skip
def test_ranks_decode_what_one_device_does(quick, world, name, least):
    """With KV heads for each, with every bias, and with experts, two KV heads for four ranks, and rows that are sampled."""
    found = quick.found[world][name]
    check_equal(quick.cases[world][name], found)
    assert tau_of(found) > least


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_ranks_decode_the_same_with_a_draft(quick, form):
    """And nearly what one device does."""
    drafted, vanilla = quick.found[2][form], quick.found[2][f"{form} vanilla"]
    assert drafted["tokens"] == vanilla["tokens"] and sum(drafted["accepted"]) > 0
    for name in (form, f"{form} vanilla"):
        assert check_close(quick.cases[2][name], quick.found[2][name], 0.1) > 0


@pytest.mark.parametrize("world,name", [(2, "llama"), (2, "int4 vanilla"), (4, "mixtral")])
def test_a_rank_holds_its_share(quick, world, name):
    """Besides what all have: the embedding, norms and routers, and KV heads where they are fewer than ranks."""
    model = one_device(quick.cases[world][name]).target
    held = {name: t.nbytes for name, t in (*model.named_parameters(), *model.named_buffers())}
    on_all = ("embedding", "norm", "router", "ropes")
    common = sum(held[name] for name in held if any(part in name for part in on_all))
    config = model.config
    if world > config.n_kv_heads:  # here each is on every second rank
        wqkv = [w for name, w in model.named_parameters() if name.endswith("wqkv.weight")]
        common += config.n_kv_heads * config.head_dim * sum(w.nbytes // w.shape[0] for w in wqkv)
    share = (sum(held.values()) - common) / world + common
    assert max(quick.found[world][name]["bytes"]) < 1.1 * share < 0.9 * sum(held.values())


def test_what_ranks_refuse(quick):
    found = {name: case["error"] for name, case in quick.found[4].items() if "error" in case}
    assert found == {
        "large groups": "int4 group size 64 does not divide in_features 32 of layers.0.wo.weight; use group_size=32",
        "other trees": "all ranks need the same tree_depth; it is 6 on rank 0 and 5 on rank 1: start them alike",
        "queue": "--prompt_file /dev/null cannot go with torchrun: all ranks read it: use a file",
        "auto": "--tree auto cannot go with torchrun: it goes by the ranks' clocks, which differ: use --tree dynamic",
        "interactive": "--interactive cannot go with torchrun: there is one keyboard: use --prompt_file with turns",
    }


# ------------------------------------------------------------------------------------------- shares


def parts_of(path: str | Path, world: int) -> list[TensorSource]:
    files, config = open_source(Path(path)), read_config(Path(path))
    return [tp.share_of(files, config, Rank(rank, world, rank)) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("form", ["float", "int8", "int4"])
def test_shares_make_the_whole(tmp_path, form, world):
    """Rows below each other, columns side by side, biases and norms on every rank; scales go with their weights."""
    path = tmp_path / "m"
    write_tiny(path, TINY)
    if form != "float":
        quantize_directory(path, tmp_path / "saved", Quantization(form, 32))
        path = tmp_path / "saved"
    whole, parts = open_source(path), parts_of(path, world)
    assert parts[0].readers.keys() == whole.readers.keys()
    assert parts[0].quantized.keys() == whole.quantized.keys()
    tensors = {name: (whole.read(name), [p.read(name) for p in parts]) for name in whole.readers}
    for name, read in whole.quantized.items():
        columns = zip(Codes._fields, read(), zip(*(part.quantized[name]() for part in parts)))
        ends = {"codes": "", "scale": "_scale", "zero": "_zero"}
        for kind, full, each in columns:
            if full is not None:
                tensors[name + ends[kind]] = (full, each)
    assert all(parts[0].type_of(name) == whole.type_of(name) for name in whole.readers)
    config = read_config(path)
    cuts = tp.cuts_of(config, Rank(0, world, 0))
    for name, (want, got) in tensors.items():
        layer = name.split(".")[-2]
        dim = cuts[layer].dim if layer in cuts else None
        kept = dim is None or dim == 1 and want.dim() == 1
        if kept:
            assert all(torch.equal(each, want) for each in got), name
        else:
            few = layer in ("k_proj", "v_proj") and world == 4  # two KV heads for four ranks
            got = got[::2] if few else got
            assert torch.equal(torch.cat(list(got), dim), want), name
    part = tp.config_of_share(config, world)
    assert load_model(path, source=parts[-1], config=part).config.n_heads == config.n_heads // world


@pytest.mark.parametrize("changes,world,rule", [
    ({}, 3, "must divide 4 heads and weights of 128 and 256 inputs, and divide 2 KV heads or be a multiple of them; "
     "it is 3: make it 1 or 2 or 4"),
    ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "and divide 3 KV heads or be a multiple of them; it "
     "is 2: make it 1"),
    ({"intermediate_size": 90}, 4, "4 heads and weights of 90 and 128 inputs, and"),
])  # fmt: skip
def test_ranks_that_do_not_divide(tmp_path, changes, world, rule):
    config = config_from(TINY | changes, "LlamaForCausalLM")
    with pytest.raises(ValueError) as error:
        tp.check_parts(config, world, tmp_path)
    assert rule in str(error.value) and str(tmp_path) in str(error.value)


@pytest.fixture
def joined(monkeypatch):
    """This process is rank 0 of 2, which have joined."""
    for module in (ranks, tp):
        monkeypatch.setattr(module, "this_rank", lambda: Rank(0, 2, 0))
    monkeypatch.setattr(tp.dist, "is_initialized", lambda: True)


NARROW = {"num_attention_heads": 2, "head_dim": 64, "intermediate_size": 192}


@pytest.mark.parametrize("changes, saved, quant, rule", [
    (NARROW, None, "int4", "int4 group size 64 does not divide in_features 96 of layers.0.w2.*; use group_size=32$"),
    (NARROW, "int4", None, r"weight_scale has shape \[64, 3\], and 2 ranks do not divide 3; start fewer, or use"),
    # a file that is not what its config says
    ({"intermediate_size": 257}, None, None, r"gate_proj.* has shape \[257, 64\], and 2 ranks do not"),
])  # fmt: skip
def test_weights_that_ranks_do_not_divide(tmp_path, joined, changes, saved, quant, rule):
    path = Path(write_tiny(tmp_path / "m", TINY | changes))
    if saved:
        quantize_directory(path, tmp_path / "saved", Quantization(saved, 64))
        path = tmp_path / "saved"
    if changes is not NARROW:
        (path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ValueError, match=rule):
        tp.load_model(path, torch.float32, "cpu", Quantization(quant, 64) if quant else None, None)


@pytest.mark.parametrize("facts,rule", [
    ({"compile": False}, "compile; it is True on rank 0 and False on rank 1: start them alike"),
    ({"compile": True, "tree_paths": ((0,),)}, r"tree_paths; it is None on rank 0 and \(\(0,\),\) on rank 1"),
])  # fmt: skip
def test_ranks_that_are_not_alike(monkeypatch, joined, facts, rule):
    """The error names the difference. Only rank 0 writes files, so file names may differ."""
    asked = []

    def gather(out, mine):
        asked.append(mine)
        out[:] = [asked[0], mine]

    monkeypatch.setattr(tp.dist, "all_gather_object", gather)
    ranks.check_same_on_all_ranks(GenerateConfig(json="out.json"), compile=True)
    ranks.check_same_on_all_ranks(GenerateConfig(device="cuda:1"), compile=True)
    with pytest.raises(ValueError, match=f"^all ranks need the same {rule}"):
        ranks.check_same_on_all_ranks(GenerateConfig(), **facts)


@pytest.mark.parametrize(
    "limit,alone,each", [("3000000", 2_800_000, 550_000), ("max", 4_096_000, 1_024_000)]
)
def test_ranks_share_a_machines_memory(monkeypatch, tmp_path, limit, alone, each):
    """Ranks share the available memory. Of a container's limit, each has already used a part."""
    (tmp_path / "_proc_meminfo").write_text("MemAvailable: 4000 kB\nSwapFree: 0 kB\n")
    (tmp_path / "_sys_fs_cgroup_memory.max").write_text(limit)
    monkeypatch.setattr(memory, "Path", lambda *parts: tmp_path / "/".join(parts).replace("/", "_"))
    monkeypatch.setattr(memory, "resident_bytes", lambda: 200_000)
    assert memory.free_bytes("cpu") == alone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_bytes("cpu") == each


# ---------------------------------------------------------------------------------- the environment


@pytest.fixture
def rank_1(monkeypatch):
    """This process is rank 1 of 2, and there is nobody else."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, "211x1"):
        monkeypatch.setenv(name, value)


def test_an_environment_in_part(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as end:
        generate.main([])
    assert end.value.code == 2
    rule = "WORLD_SIZE is set in the environment, and RANK is ''; start the ranks with torchrun"
    assert capsys.readouterr().err.startswith(f"generate.py: {rule}")
    with pytest.raises(ValueError, match="unset WORLD_SIZE"):
        generate.load(checkpoint=DEMO, device="cpu")


def test_other_programs_refuse_torchrun(rank_1, monkeypatch):
    """Rank 0 says so, the others end without a word."""
    with pytest.raises(SystemExit) as end:
        generate.load(checkpoint=DEMO, device="cpu")
    assert end.value.code == 2
    monkeypatch.setenv("RANK", "0")
    for refused in (lambda: generate.load(checkpoint=DEMO, device="cpu"), ranks.refuse_torchrun):
        with pytest.raises(ValueError, match="start this program without it"):
            refused()


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_says_why(rank_1, monkeypatch, capsys, first):
    """A mistake, whichever rank finds it first. Other output of a silent rank is not shown."""
    monkeypatch.setattr(ranks, "_says_why", lambda here: first)
    with pytest.raises(SystemExit) as end, ranks.report_from_rank_0("generate.py"):
        print("a text")
        print("note: a note", file=sys.stderr)
        with one_line_errors("generate.py"):
            raise ValueError("a mistake")
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "generate.py: a mistake\n" if first else "")
    with pytest.raises(SystemExit) as end, ranks.report_from_rank_0("generate.py"):
        raise ranks.RankLost("another rank has ended")
    assert end.value.code == 1
    assert capsys.readouterr() == ("", "generate.py: another rank has ended\n" if first else "")
    with pytest.raises(KeyError if first else SystemExit), ranks.report_from_rank_0("generate.py"):
        raise KeyError("a bug, whose traceback only one rank shows")


# --------------------------------------------------------------------------------------------- slow


def test_ranks_with_compile_decode_the_same(quick):
    """On CPUs, in bf16: as ranks without it, bit for bit."""
    compiled, eager = (quick.found[2][name] for name in ("compiled", "eager"))
    assert compiled["tokens"] == eager["tokens"] and compiled["accepted"] == eager["accepted"]


def torchrun(*argv: str, program: str = "generate.py") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", program]
    return subprocess.run([*command, *argv], cwd=ROOT, capture_output=True, text=True, timeout=200)


def ours(done: subprocess.CompletedProcess) -> list[str]:
    """The lines that the ranks printed on standard error. torchrun's report follows them there."""
    return [line for line in done.stderr.splitlines() if line.startswith(("generate.py:", "note:"))]


CLI = ["--checkpoint", DEMO, "--device", "cpu", "--max_new_tokens", "24"]


@pytest.mark.slow  # torchrun starts three processes that import torch, here 7 times
def test_torchrun(tmp_path):
    """Text, files and mistakes come once; a rank that is lost ends the others soon."""
    out, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    done = torchrun(*CLI, "--json", str(out), "--trace", f"{trace}", "--compare")
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "generate.py", *CLI]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    text = alone.stdout.rstrip().rsplit("\n", 1)[0]
    said = done.stdout.removeprefix(text)
    assert said != done.stdout and "100 % of sequences identical" in said
    document = json.loads(out.read_text())
    assert len(document["tokens"][0]) == 24 and document["config"]["tree"] == "dynamic"
    note = "note: the tree is dynamic, as --tree auto goes by the ranks' clocks, which differ"
    assert ours(done) == [note]
    assert document["stats"]["ranks"] == 2
    assert len(trace.read_text().splitlines()) == document["stats"]["cycles"]
    wrong = ("--nope", "unrecognized arguments: --nope"), ("--eagle=nowhere", "nowhere")
    for flag, rule in wrong:
        done = torchrun(*CLI, flag)
        assert done.returncode == 1 and len(ours(done)) == 1 and rule in ours(done)[0], done.stderr
        assert "exitcode  : 2" in done.stderr and not done.stdout


RANK = """
import os, runpy, signal, sys
sys.path.insert(0, os.getcwd())
sys.argv[0], how = "generate.py", sys.argv.pop(1)
if os.environ["RANK"] == "1" and how == "file":
    sys.argv += ["--json", "/nowhere/out.json"]
if os.environ["RANK"] == "1" and how in ("kill", "bug"):
    import decode
    def decide(*_):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("a bug")
    decode.Cycle.decide = decide
runpy.run_path("generate.py", run_name="__main__")
"""


@pytest.mark.slow  # as above
@pytest.mark.parametrize("how,rule", [
    ("file", "--json: cannot write /nowhere/out.json; there is no directory /nowhere"),
    ("kill", "a collective failed; another rank has probably ended"),
    ("bug", ""),
])  # fmt: skip
def test_one_rank_fails(tmp_path, how, rule):
    (tmp_path / "rank.py").write_text(RANK)
    done = torchrun(how, *CLI, "--tree", "dynamic", program=str(tmp_path / "rank.py"))
    assert done.returncode == 1, done
    text = ""
    if how in ("kill", "bug"):  # rank 0 streams the tokens decided before it learns of it
        engine = generate.load(checkpoint=DEMO, max_new_tokens=24)
        text = library.generate(engine, ["def read_lines(path):"]).text[0]
    assert text.startswith(done.stdout) and len(done.stdout) <= len(text) // 2, done
    assert [rule in line for line in ours(done)] == ([True] if rule else []), done.stderr
    assert ("KeyError: 'a bug'" in done.stderr) == (how == "bug")
