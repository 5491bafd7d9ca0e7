"""Stand-ins: the same function in another shape, in fp64, bf16 and int4; the same tokens; files on disk."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from eagle_draft import EagleHead, load_head
from extras.stand_in import (
    SHAPES,
    InflatedFiles,
    Shape,
    inflate_head,
    inflate_target,
)
from generate import generate, load, main
from helpers import GOLDEN, slow
from hf.checkpoint import WeightFiles
from hf.config import read_config
from hf.heads import EagleConfig
from hf.weights import load_model, weight_names
from kv_cache import KVCache, causal_window
from model import ModelConfig, Transformer
from ops.cpu.build import load_operators
from options import DEMO
from scripts.bench import inflate as script

TARGET, HEAD = Path(DEMO), Path(DEMO + "-eagle")
GOLDEN_PAIR = (GOLDEN / "models/target_llama_mha", GOLDEN / "models/head_eagle12_mha")
MIXTRAL = (GOLDEN / "models/target_mixtral", GOLDEN / "models/head_eagle12_mixtral")
FOUR = "mixtral-tiny,n_experts=4,ffn_dim=192,vocab_size=128"  # the golden one has 4 experts
EXACT_MIXTRAL = (
    f"{FOUR},dim=256,n_layers=5,n_heads=8,n_kv_heads=4,head_dim=64"  # width and heads * 4 here too
)
EXACT = "tiny-0.5b,n_layers=10,ffn_dim=1792,vocab_size=4224"  # width * 4, heads * 4: powers of four
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def pairs(short_demo) -> dict[str, tuple[Path, Path]]:
    """Targets and their heads."""
    short = (short_demo, short_demo.with_name("demo-eagle"))
    whole = (TARGET, HEAD)
    return {"demo": short, "whole demo": whole, "golden": GOLDEN_PAIR, "mixtral": MIXTRAL}


def make_head(shape: Shape, dtype: torch.dtype, path: Path = HEAD, **options) -> InflatedFiles:
    return inflate_head(path, EagleConfig.from_dir(path).model, shape, dtype, **options)


class Pair(NamedTuple):
    """A target and its head."""

    target: Transformer
    head: EagleHead


def small_pair(dtype: torch.dtype, pair: tuple[Path, Path]) -> Pair:
    """The small model and its head."""
    target = load_model(pair[0], dtype)
    return Pair(target, load_head(pair[1], target))


def large_pair(shape: Shape, dtype: torch.dtype, pair: tuple[Path, Path]) -> Pair:
    """Their stand-ins."""
    target = load_model(pair[0], dtype, source=inflate_target(pair[0], shape, dtype))
    return Pair(target, load_head(pair[1], target, source=make_head(shape, dtype, pair[1])))


def outputs(models: Pair, ids: Tensor, cached: bool = False) -> list[Tensor]:
    """Logits of the target, of the head on its features, and of the head on its own prediction: 3 x [1, T, V].

    cached: each pass goes through a cache, as in decoding
    """
    (target, head), dtype = models, models.target.embedding.weight.dtype

    def run(model: Transformer | EagleHead, config: ModelConfig, *inputs: Tensor) -> Tensor:
        rows = inputs[0].shape[1]
        window = causal_window(torch.zeros(1, dtype=torch.long), rows)
        cache = (KVCache.empty(config, 1, rows, dtype, "cpu"), window) if cached else ()
        return model(*inputs, window.slots, *cache)

    with torch.no_grad():
        features = run(target, target.config, ids)
        embedded = target.embedding(ids[:, 1:])
        first = run(head, head.config.model, embedded, features[:, :-1])
        second = run(head, head.config.model, embedded, first)
        return [target.logits(x) for x in (features, first, second)]


def both(
    shape: Shape,
    dtype: torch.dtype,
    pair: tuple[Path, Path],
    length: int = 48,
    cached: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """The outputs of the small model and of its stand-in on `length` tokens, side by side."""
    small = small_pair(dtype, pair)
    ids = some_ids(small.target.config.vocab_size, length)
    large = large_pair(shape, dtype, pair)
    return list(zip(outputs(small, ids, cached), outputs(large, ids, cached)))


def some_ids(vocab: int, length: int = 48) -> Tensor:
    return torch.randint(
        0, vocab, (1, length), generator=torch.Generator().manual_seed(1)
    )  # [1, T]


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference on the small vocabulary, in units of the largest logit."""
    return float((a - b[..., : a.shape[-1]]).abs().max() / a.abs().max())


# -------------------------------------------------------------------------------- the same function


@pytest.mark.parametrize("sizes, pair", [
    ("dim=512,n_layers=3,n_heads=8,n_kv_heads=4,head_dim=128", "demo"),
    ("dim=257,n_layers=2,n_heads=20,n_kv_heads=4,head_dim=32,vocab_size=4096", "demo"),  # the least width
    ("dim=300,n_layers=5,n_heads=12,n_kv_heads=4,head_dim=48,n_experts=4,experts_per_token=2", "mixtral"),
    *slow([
        ("dim=512,n_layers=2,n_heads=8,n_kv_heads=8,head_dim=64", "demo"),  # multi-head: KV heads twice
        ("dim=300,n_layers=5,n_heads=9,n_kv_heads=9,head_dim=96", "demo"),  # nothing divides anything
        ("dim=640,n_layers=3,n_heads=24,n_kv_heads=8,head_dim=32", "demo"),  # groups of 2 in groups of 3
        ("dim=512,n_layers=9,n_heads=24,n_kv_heads=8,head_dim=64,vocab_size=1000", "golden"),
    ]),
])  # fmt: skip
def test_fp64_outputs_are_the_small_models(monkeypatch, pairs, sizes, pair):
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # norms and RoPE compute in fp32 otherwise
    shape = Shape.parse(f"tiny-0.5b,ffn_dim=1600,vocab_size=4200,{sizes}")
    for small, large in both(shape, torch.float64, pairs[pair]):
        assert small.dtype == torch.float64
        assert relative(small, large) < 1e-12
        padding = large[..., small.shape[-1] :]
        assert padding.numel() == 0 or padding.max() < -400


DENSE = "tiny-0.5b,n_layers=3,ffn_dim=1664,vocab_size=4224"
BF16 = {  # sizes, models, tokens, whether the bits are equal
    "width x4, heads x4": (f"{DENSE},dim=1024", "demo", 200, True),
    "width x16, heads x4": (f"{DENSE},dim=4096,n_layers=2", "demo", 48, True),
    "width x2.5": (f"{DENSE},dim=640", "demo", 48, False),
    "heads x2": (f"{DENSE},head_dim=64", "demo", 48, False),
    "mixture": (EXACT_MIXTRAL, "mixtral", 300, True),
}


@pytest.mark.skipif(bool(load_operators()), reason=f"needs our CPU operators: {load_operators()}")
@pytest.mark.parametrize(
    "name",
    ["width x2.5", "mixture", *slow(["width x4, heads x4", "width x16, heads x4", "heads x2"])],
)
def test_bf16_bit_for_bit_at_powers_of_four(pairs, name):
    """linear.cpp and attention.cpp add a sum's terms in order, so that zeros between them change no bit."""
    sizes, pair, length, equal = BF16[name]
    shape = Shape.parse(sizes)
    for small, large in both(shape, torch.bfloat16, pairs[pair], length, cached=True):
        assert torch.equal(small, large[..., : small.shape[-1]]) == equal
        assert relative(small, large) < 0.05


def codes(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Plain symmetric rounding. Returns codes [N, K] and scales [N, K / group]."""
    most = 2 ** (bits - 1) - 1
    groups = weight.double().unflatten(1, (-1, group))  # [N, K / group, group]
    scale = (groups.abs().amax(-1) / most).clamp_min(1e-12)
    return (groups / scale[..., None]).round().flatten(1), scale


def test_int4_outputs_are_the_int4_small_models(monkeypatch, pairs):
    """The whole model through plain int4, padding included."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    shape = Shape.parse(f"{DENSE},dim=512")
    path, _ = pairs["demo"]
    found = []
    for files, head_files in (
        (None, None),
        (inflate_target(path, shape, torch.float64), make_head(shape, torch.float64)),
    ):
        target = load_model(path, torch.float64, source=files)
        head = load_head(HEAD, target, source=head_files)
        for name, module in [*target.named_modules(), *head.named_modules()]:
            if isinstance(module, torch.nn.Linear):
                group = 32 if name.endswith("wo") and files is None else 128
                rounded, scale = codes(module.weight, 4, group)
                module.weight.data = (rounded.unflatten(1, (-1, group)) * scale[..., None]).flatten(
                    1
                )
        found.append(outputs(Pair(target, head), some_ids(4096)))
    for small, large in zip(*found):
        assert relative(small, large) < 1e-12 and large[..., 4096:].max() < -400


# --------------------------------------------------------------------------------------- the filler


def zero_share(weight: Tensor) -> float:
    return float((weight == 0).float().mean())


def test_filler_is_dense():
    shape, small = Shape.parse(EXACT), read_config(TARGET)
    files = inflate_target(TARGET, shape)
    live = (small.dim + 1) / shape.dim  # of a projection's columns
    real = {i * shape.n_layers // small.n_layers for i in range(small.n_layers)}
    inert = next(i for i in range(shape.n_layers) if i not in real)
    for part, most in (("v_proj", live), ("q_proj", 0), ("k_proj", 0), ("o_proj", 0)):
        assert zero_share(files.read(f"model.layers.{inert}.self_attn.{part}.weight")) < most + 0.01
        assert zero_share(files.read(f"model.layers.0.self_attn.{part}.weight")) < live + 0.01
    for part, most in (("gate_proj", live), ("up_proj", 0), ("down_proj", 0)):
        assert zero_share(files.read(f"model.layers.{inert}.mlp.{part}.weight")) < most + 0.01
    reached = small.ffn_dim / shape.ffn_dim
    assert zero_share(files.read("model.layers.0.mlp.down_proj.weight")) < reached + 0.01


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("path, shape, options", [
    (TARGET, EXACT, {"temperature": 1.0, "seed": 3, "tree": "dynamic"}),
    (MIXTRAL[0], EXACT_MIXTRAL, {"tree": "dynamic"}),
    *slow([
        (TARGET, EXACT, {"tree": "dynamic"}), (TARGET, EXACT, {"tree": "chain", "tree_depth": 4}),
        (MIXTRAL[0], EXACT_MIXTRAL, {"temperature": 1.0, "seed": 3, "tree": "static"}),
    ]),
])  # fmt: skip
def test_decoding_gives_the_same_tokens(path, shape, options):
    head = HEAD if path == TARGET else MIXTRAL[1]
    options |= {"checkpoint": str(path), "head": str(head), "dtype": "float32", "device": "cpu"}
    options |= {"max_new_tokens": 24, "ignore_eos": True}
    prompts = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90]]
    large = load(inflate=shape, **options)
    assert large.target.config.dim > read_config(path).dim and large.option("draft") == "eagle"
    a, b = generate(load(**options), prompts), generate(large, prompts)
    assert a.tokens == b.tokens and a.text == b.text and a.stats["tau"] > 1.3
    assert a.stats["accept_lengths"] == b.stats["accept_lengths"]
    assert b.stats["stand_in"] == f"a {shape}-shaped function of {path.name}"
    assert "stand_in" not in a.stats


def test_everything_printed_names_the_stand_in(pairs, capsys, tmp_path):
    argv = f"--checkpoint {pairs['demo'][0]} --max_new_tokens 8 --device cpu --tree dynamic".split()
    argv += ["--set", f"inflate={SMALL}", "--prompt", PROMPT]
    main([*argv, "--json", str(tmp_path / "out.json"), "--compare"])
    out, _ = capsys.readouterr()
    for line in out.splitlines()[-2:]:
        assert line.startswith(f"stand-in, a {SMALL}-shaped function of demo: ")
    assert json.loads((tmp_path / "out.json").read_text())["stats"]["stand_in"].startswith(
        "a tiny-0.5b"
    )


# -------------------------------------------------------------------------------------------- files


def inflate(*argv: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["inflate.py", *argv])
    script.main()


SMALL = "tiny-0.5b,dim=512,n_layers=3,ffn_dim=1664,vocab_size=4224"


def test_what_is_written_is_what_is_built(monkeypatch, pairs, tmp_path, capsys):
    out, (target, head) = tmp_path / "new" / "half", pairs["demo"]
    argv = ("--checkpoint", str(target), "--shape", SMALL, "--out", str(out))
    inflate(*argv, monkeypatch=monkeypatch)
    assert "function of demo" in capsys.readouterr().out
    shape = Shape.parse(SMALL)
    for path, files in (
        (out, inflate_target(target, shape)),
        (Path(f"{out}-eagle"), make_head(shape, torch.bfloat16, head)),
    ):
        disk = WeightFiles(path)
        assert set(disk.readers) == set(files.readers)
        assert all(torch.equal(disk.read(name), files.read(name)) for name in files.recipes)
        assert json.loads((path / "config.json").read_text()) == files.config
    assert sorted(p.name for p in out.parent.iterdir()) == ["half", "half-eagle"]
    options = {"max_new_tokens": 16, "device": "cpu", "dtype": "float32", "tree": "dynamic"}
    small, large = load(checkpoint=str(target), **options), load(checkpoint=str(out), **options)
    assert generate(large, [PROMPT]).text == generate(small, [PROMPT]).text


def failure(capsys, monkeypatch, *argv: str) -> str:
    """The one line that the script ends with, at status 2."""
    with pytest.raises(SystemExit) as stop:
        inflate(*argv, monkeypatch=monkeypatch)
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and error.startswith("inflate.py: ")
    return error


MISTAKES = [
    ("--shape tiny-0.5b,dim=256", "dim must be at least 257"),
    ("--shape tiny-0.5b,n_layers=7", "n_layers must be at least 8"),
    ("--shape tiny-0.5b,n_heads=4,n_kv_heads=4", "n_kv_heads must be at least 8"),
    ("--shape tiny-0.5b,n_heads=9,n_kv_heads=4", "n_kv_heads must divide n_heads; 4 does not divide 9"),
    ("--shape tiny-0.5b,head_dim=48", "head_dim must be a multiple of"),
    ("--shape tiny-0.5b,ffn_dim=1536", "ffn_dim must be at least 1537, for every neuron and one more"),
    ("--shape tiny-0.5b,vocab_size=4095", "vocab_size must be at least 4096"),
    ("--shape tiny-0.5b,dim=-5", "'dim=-5' must be like n_layers=9"),
    ("--shape tiny-0.5b,n_layers", "must be like n_layers=9"),
    ("--shape gpt-5", "gpt-5 is not a known shape; use one of"),
    ("--out=", "--out is missing"),
    ("--checkpoint nowhere", "no such directory: nowhere"),
    (f"--eagle {DEMO}", "fc.bias is missing; a LLaMA, a Mixtral, or an EAGLE-1 or EAGLE-2 head can be inflated"),
    ("--eagle_out OUT", "--eagle_out must not be the target's directory"),
    ("--shape mixtral-8x7b", "is a mixture of experts, and .*demo is dense: .* choose one of tiny-0.5b, "),
    (f"--checkpoint {MIXTRAL[0]} --shape llama2-7b", "is dense, and .*mixtral is a mixture .* choose one of mixtral-tiny, mixtral-8x7b"),
    (f"--checkpoint {MIXTRAL[0]} --shape mixtral-8x7b", "n_experts must be .*target_mixtral's 4, .* it is 8"),
    (f"--checkpoint {MIXTRAL[0]} --shape mixtral-8x7b,n_experts=4,experts_per_token=1", "experts_per_token must be .*'s 2, .* it is 1"),
    ("--checkpoint TORN", r"gate_proj.weight is \[.*\], config.json says \[.*\]; correct it"),
    ("--checkpoint YARN", "norms of queries and keys, or YaRN, which depend on head_dim; use another"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "says"), MISTAKES)
def test_mistakes_are_one_line(monkeypatch, capsys, tmp_path_factory, tmp_path, argv, says):
    """TORN: a config.json that contradicts the weights; YARN: a model that cannot be inflated."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    changes = {"TORN": {"intermediate_size": 88}, "YARN": {"rope_scaling": yarn}}
    for name, change in changes.items():
        if name in argv:
            copy = shutil.copytree(GOLDEN_PAIR[0], tmp_path_factory.mktemp("models") / name)
            raw = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps(raw | change))
            argv = argv.replace(name, str(copy))
    out = str(tmp_path / "out")
    given = ["--shape", "tiny-0.5b", "--out", out, *argv.replace("OUT", out).split()]
    assert re.search(says, failure(capsys, monkeypatch, *given))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def eight_experts(tmp_path_factory) -> Path:
    """A random mixture of 8 experts, as the named ones have."""
    path = tmp_path_factory.mktemp("mixture")
    config = MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("name", "billions"), [
    ("tiny-0.5b", 0.54), ("tiny-1b", 1.12), ("llama2-7b", 6.74), ("llama2-13b", 13.02), ("llama2-70b", 68.98),
    ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("mixtral-tiny", 2.985), ("mixtral-8x7b", 46.70),
])  # fmt: skip
def test_named_shapes_have_their_tensors(eight_experts, name, billions):
    shape, is_mixture = SHAPES[name], name.startswith("mixtral")
    target, head = (eight_experts, MIXTRAL[1]) if is_mixture else (TARGET, HEAD)
    files, head_files = inflate_target(target, shape), make_head(shape, torch.bfloat16, head)
    config = read_config(target, files.config)
    theirs = {name for parts in weight_names(config).values() for name in parts}
    assert set(files.recipes) == theirs
    parameters = sum(math.prod(recipe.size) for recipe in files.recipes.values())
    assert parameters / 1e9 == pytest.approx(billions, abs=0.006)
    # a head's layer is dense
    width = head_files.recipes["layers.0.mlp.down_proj.weight"].size
    assert width == (config.dim, config.ffn_dim)
    for dtype in (torch.float32, torch.float16):  # the constant's amplifier is finite
        norm = replace(files, dtype=dtype).read("model.norm.weight")
        assert norm.isfinite().all()
    if is_mixture:  # exact for the demo's sizes
        assert math.log2(shape.dim / 256) % 2 == 0 and shape.head_dim == 4 * 32


def test_what_is_there_is_kept(monkeypatch, capsys, tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    assert "exists; give --overwrite" in failure(
        capsys, monkeypatch, "--shape", "tiny-0.5b", "--out", str(other)
    )
    assert "replaces stand-ins only" in failure(
        capsys, monkeypatch, "--shape", "tiny-0.5b", "--out", str(other), "--overwrite"
    )
    assert "replaces stand-ins only" in failure(
        capsys, monkeypatch, "--shape", "tiny-0.5b", "--out", DEMO, "--overwrite"
    )
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    files = make_head(Shape.parse("tiny-0.5b,dim=512"), torch.bfloat16)
    script.write(files, out)
    with pytest.raises(ValueError, match="exists"):
        script.write(files, out)
    script.write(replace(files, dtype=torch.float16), out, overwrite=True)
    assert WeightFiles(out).read("fc.weight").dtype == torch.float16
    with pytest.raises(ValueError, match="is a stand-in itself"):
        make_head(Shape.parse("llama2-7b"), torch.bfloat16, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]
