"""Stand-ins: the same function in another shape, in fp64, bf16 and int4 codes; the same tokens; files on disk."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from decode import Engine
from eagle_draft import EagleHead, load_head
from extras.stand_in import (
    SHAPES,
    InflatedFiles,
    Placement,
    Shape,
    check_fit,
    inflate_head,
    inflate_target,
)
from generate import generate, load, main
from helpers import GOLDEN, block_inputs, record, slow
from hf import checkpoint
from hf.checkpoint import WeightFiles
from hf.config import read_config
from hf.heads import EagleConfig
from hf.weights import load_model, weight_names
from kv_cache import KVCache, causal_window
from model import ModelConfig, Router, Transformer
from ops.cpu.build import load_operators
from options import DEMO
from scripts.bench import inflate as script
from scripts.bench.measure import with_config

TARGET, HEAD = Path(DEMO), Path(DEMO + "-eagle")
GOLDEN_PAIR = (GOLDEN / "models/target_llama_mha", GOLDEN / "models/head_eagle12_mha")
MIXTRAL = (GOLDEN / "models/target_mixtral", GOLDEN / "models/head_eagle12_mixtral")
FOUR = "mixtral-tiny,n_experts=4,ffn_dim=192,vocab_size=128"  # the golden one has 4 experts
EXACT_MIXTRAL = (
    f"{FOUR},dim=256,n_layers=5,n_heads=8,n_kv_heads=4,head_dim=64"  # width and heads * 4 here too
)
EXACT = "tiny-0.5b,n_layers=10,ffn_dim=1792,vocab_size=4224"  # width * 4, heads * 4: powers of four
EXACT_SHORT = EXACT.replace("n_layers=10", "n_layers=4")
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
    shape: Shape, dtype: torch.dtype, pair: tuple[Path, Path], length: int = 48
) -> list[tuple[Tensor, Tensor]]:
    """The outputs of the small model and of its stand-in on `length` tokens, side by side."""
    small = small_pair(dtype, pair)
    ids = some_ids(small.target.config.vocab_size, length)
    return list(zip(outputs(small, ids), outputs(large_pair(shape, dtype, pair), ids)))


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


@pytest.mark.parametrize("kind", ["llama3", *slow(["linear"])])
def test_scaled_rope_commutes(monkeypatch, pairs, tmp_path, kind):
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    target, head = pairs["demo"]
    raw = json.loads((target / "config.json").read_text())
    extra = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}
    raw["rope_scaling"] = {"rope_type": kind, "factor": 4.0} | (extra if kind == "llama3" else {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(target / "model.safetensors")
    shape = Shape.parse("tiny-0.5b,dim=512,n_layers=2,ffn_dim=1600,vocab_size=4096")
    scaled, *_ = both(shape, torch.float64, (tmp_path, head))
    assert relative(*scaled) < 1e-12
    plain, *_ = both(shape, torch.float64, (target, head))
    assert relative(scaled[0], plain[0]) > 1e-3, "the scaling must matter here"


def in_fp64(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same operator on fp64 copies, rounded once at the end.

    The order of addition then changes a sum by 1e-15 of its terms, which a rounding to bf16 shows in one of 1e12 sums.
    """

    def exact(*operands: Tensor | None, **options) -> Tensor:
        wide = (x if x is None else x.double() for x in operands)
        return operator(*wide, **options).to(operands[0].dtype)

    return exact


@pytest.fixture
def exact_sums(monkeypatch):
    """Products that do not depend on the order in which a library or a processor adds their terms."""
    monkeypatch.setattr(F, "linear", in_fp64(F.linear))
    monkeypatch.setattr(F, "scaled_dot_product_attention", in_fp64(F.scaled_dot_product_attention))
    monkeypatch.setattr("ops.library._cpp_available", [False])


class InBf16(NamedTuple):
    """A small model and its stand-in in bf16."""

    small: Pair
    large: Pair
    ids: Tensor  # [1, T] int64
    equal: bool  # whether width and heads grow by powers of four: the scaled weights are exact

    def check(self, cached: bool) -> None:
        """Compare the outputs bit for bit."""
        for small, large in zip(
            outputs(self.small, self.ids, cached), outputs(self.large, self.ids, cached)
        ):
            assert torch.equal(small, large[..., : small.shape[-1]]) == self.equal
            assert relative(small, large) < 0.05


DENSE = "tiny-0.5b,n_layers=3,ffn_dim=1664,vocab_size=4224"
BF16 = {  # sizes, models, tokens, whether the bits are equal
    "width x4, heads x4": (f"{DENSE},dim=1024", "demo", 200, True),
    "width x16, heads x4": (f"{DENSE},dim=4096,n_layers=2", "demo", 48, True),
    "width x2.5": (f"{DENSE},dim=640", "demo", 48, False),
    "heads x2": (f"{DENSE},head_dim=64", "demo", 48, False),
    "mixture": (EXACT_MIXTRAL, "mixtral", 300, True),
}


@pytest.fixture(
    scope="module",
    params=[
        "width x2.5",
        "mixture",
        *slow(["width x4, heads x4", "width x16, heads x4", "heads x2"]),
    ],
)
def in_bf16(request, pairs) -> InBf16:
    sizes, pair, length, equal = BF16[request.param]
    small = small_pair(torch.bfloat16, pairs[pair])
    large = large_pair(Shape.parse(sizes), torch.bfloat16, pairs[pair])
    return InBf16(small, large, some_ids(small.target.config.vocab_size, length), equal)


# A sum keeps its bits with zeros between its terms, if they are added one after the other, or exactly. The bf16 product
# of oneMKL in PyTorch's attention does neither on an Intel processor with AVX512-BF16 (it adds the odd element of a pair
# before the even one) or AMX (of 32 elements it adds the even ones and the odd ones apart). RoPE's places change pairs.


@pytest.mark.usefixtures("exact_sums")
def test_bf16_bit_for_bit_at_powers_of_four(in_bf16):
    in_bf16.check(cached=False)


@pytest.mark.skipif(bool(load_operators()), reason=f"needs our CPU operators: {load_operators()}")
def test_bf16_bit_for_bit_by_the_operators_that_decode(in_bf16):
    """On every processor, linear.cpp and attention.cpp add the terms of a sum in order, one by one or pair by pair."""
    in_bf16.check(cached=True)


def fp64_outputs(dtype: torch.dtype, pair: tuple[Path, Path], ids: Tensor) -> list[Tensor]:
    """Outputs of the small model with weights rounded to `dtype`, computed in fp64."""
    target, head = small_pair(dtype, pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)  # norms and RoPE compute in fp32 otherwise
        return outputs(Pair(target.double(), head.double()), ids)


@pytest.mark.parametrize(
    ("dtype", "most", "sizes", "pair"),
    [
        ("bfloat16", 0.05, EXACT_SHORT, "demo"),
        ("float32", 1e-5, EXACT_MIXTRAL, "mixtral"),  # in 16 bits, a rounding may change the route
        *slow([("float32", 1e-5, EXACT, "whole demo"), ("float16", 0.01, EXACT_SHORT, "demo")]),
    ],
)
def test_within_rounding_by_the_machines_products(pairs, dtype, most, sizes, pair):
    """The stand-in is no further from the exact logits than the small model is, up to the luck of the roundings.

    Its scaled weights are exact. So both round numbers of the same sizes in the same places, in whatever order they add.
    """
    dtype = getattr(torch, dtype)
    found = both(Shape.parse(sizes), dtype, pairs[pair])
    exact = fp64_outputs(dtype, pairs[pair], some_ids(found[0][0].shape[-1]))
    for (small, large), true in zip(found, exact):
        known = large[..., : small.shape[-1]]
        assert relative(small, large) < most
        assert large[..., small.shape[-1] :].max() < -200
        errors = [float((x - true).pow(2).mean().sqrt()) for x in (small, known)]
        assert errors[1] < 1.3 * errors[0], errors  # 0.9 to 1.05 times were measured


def codes(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Plain symmetric rounding. Returns codes [N, K] and scales [N, K / group]."""
    most = 2 ** (bits - 1) - 1
    groups = weight.double().unflatten(1, (-1, group))  # [N, K / group, group]
    scale = (groups.abs().amax(-1) / most).clamp_min(1e-12)
    return (groups / scale[..., None]).round().flatten(1), scale


def same_codes(small: Tensor, large: Tensor, place: Placement, part: str, bits: int) -> bool:
    """Whether a layer's projection, small and large, rounds to the same codes. int8: a scale per row; int4: per 128."""
    d, e, E, heads = place.small.dim, place.small.head_dim, place.shape.head_dim, place.q_heads()
    if part == "o_proj":
        got, _ = codes(large, bits, E if bits == 4 else large.shape[1])
        got = got.unflatten(1, (-1, E))[:d, heads, :e].flatten(1)
        return torch.equal(got, codes(small, bits, e if bits == 4 else small.shape[1])[0])
    heads = {"k_proj": torch.arange(len(small) // e), "v_proj": torch.arange(len(small) // e)}.get(
        part, heads
    )
    places = torch.arange(e) if part == "v_proj" else place.rotary()
    rows = (heads[:, None] * E + places).flatten() if part[0] in "qkv" else torch.arange(len(small))
    got, want = (codes(w, bits, 128 if bits == 4 else w.shape[1]) for w in (large[rows], small))
    gain = math.sqrt(E / e) if part == "q_proj" else 1
    scales = torch.allclose(got[1][:, : want[1].shape[1]], gain * want[1], rtol=1e-15, atol=0)
    return scales and torch.equal(got[0][:, : small.shape[1]], want[0])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "sizes", ["dim=512,n_heads=8,head_dim=128", *slow(["dim=1024,head_dim=128"])]
)
def test_codes_are_the_small_models(bits, sizes):
    shape = Shape.parse(f"tiny-0.5b,n_layers=8,ffn_dim=1664,vocab_size=4224,{sizes}")
    # in bf16 the factor of q must be a power of two; 512 channels leave room for large filler
    for path, files, prefix in (
        (TARGET, inflate_target(TARGET, shape, torch.bfloat16), "model.layers.7."),
        (HEAD, make_head(shape, torch.bfloat16), "layers.0."),
    ):
        reader, place = WeightFiles(path), Placement(EagleConfig.from_dir(path).model, shape)
        for name in (n for n in files.recipes if n.startswith(prefix) and "proj" in n):
            assert same_codes(
                reader.read(name), files.read(name), place, name.split(".")[-2], bits
            ), name
        for name in {"lm_head.weight", "fc.weight"} & set(files.recipes):
            small, large = reader.read(name), files.read(name)
            group = 128 if bits == 4 else large.shape[1]
            got = (
                codes(large[: len(small)], bits, group)[0]
                .unflatten(1, (-1, shape.dim))[..., :256]
                .flatten(1)
            )
            assert torch.equal(got, codes(small, bits, 128 if bits == 4 else small.shape[1])[0]), (
                name
            )


@pytest.mark.parametrize("part", ["o_proj", "down_proj"])
def test_filler_stays_below_numbers_however_small(part):
    shape, small = Shape.parse(EXACT), read_config(TARGET)
    recipe = inflate_target(TARGET, shape).recipes
    size, make = next(
        (r.size, r.make)
        for name, r in recipe.items()
        if f"layers.0.mlp.{part}" in name or f"layers.0.self_attn.{part}" in name
    )
    torch.manual_seed(0)
    tiny = 1e-4 * torch.randn(
        small.dim, small.ffn_dim if part == "down_proj" else small.dim, dtype=torch.float64
    )
    out = torch.empty(size, dtype=torch.float64).uniform_(
        -((3 / size[1]) ** 0.5), (3 / size[1]) ** 0.5
    )
    make(out, tiny)
    assert torch.equal(out[: small.dim].abs().amax(1), tiny.abs().amax(1))
    assert (out[: small.dim] != 0).float().mean() > 0.5


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


def routes(target: Transformer, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The experts chosen by every layer's router, and the input of every layer.

    Shapes: n_layers x [T, J], n_layers x [1, T, F].
    """
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        calls = record(patch, Router, "forward")
        _, inputs = block_inputs(target, ids, torch.arange(ids.shape[1])[None])
    return [call.result[0][0] for call in calls], inputs


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_routes_as_the_small_one(dtype):
    """Layers 0 and 2 of 5 are the small ones. The others route by the last of them, and add nothing."""
    small = load_model(MIXTRAL[0], dtype)
    large = load_model(
        MIXTRAL[0], dtype, source=inflate_target(MIXTRAL[0], Shape.parse(EXACT_MIXTRAL), dtype)
    )
    ids = some_ids(97, 200)
    chosen, inputs = routes(small, ids)
    got, streams = routes(large, ids)
    assert len(chosen) == 2 and len(got) == 5
    assert torch.equal(got[0], chosen[0]) and torch.equal(got[2], chosen[1])
    with torch.no_grad():
        after = small.layers[0].ffn.router(small.layers[0].ffn_norm(inputs[1]))[0][
            0
        ]  # of what layer 0 made
    assert torch.equal(got[1], after) and torch.equal(got[3], got[4])
    for choice in got:
        assert torch.bincount(choice.flatten(), minlength=4).min() > 10, "every expert is used"
    assert torch.equal(streams[1], streams[2]) and torch.equal(streams[3], streams[4])
    assert not torch.equal(streams[0], streams[1]) and not torch.equal(streams[2], streams[3])


def test_channels_beyond_the_constant_are_exactly_zero():
    shape = Shape.parse(EXACT)
    target = load_model(TARGET, torch.bfloat16, source=inflate_target(TARGET, shape))
    ids = some_ids(4096)
    with torch.no_grad():
        features, inputs = block_inputs(target, ids, torch.arange(ids.shape[1])[None])
    constant = Placement(read_config(TARGET), shape).constant
    for x in (*inputs, features):
        assert not x[..., 257:].any()
    assert all((x[..., 256] == constant).all() for x in inputs)
    # never the largest of a row (int8 would round the others), never lost beside it
    share = features[..., 256] / features[..., :256].abs().amax(-1)
    assert share.min() > 1 / 64 and share.max() < 1
    unchanged = [torch.equal(inputs[i], inputs[i + 1]) for i in range(shape.n_layers - 1)]
    assert [i for i, same in enumerate(unchanged) if same] == [4], (
        "layers 4 and 9 of 10 add exactly nothing"
    )


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


def test_filler_of_experts_is_dense():
    files = inflate_target(MIXTRAL[0], Shape.parse(EXACT_MIXTRAL))
    live = (
        65 / 256
    )  # columns that something other than zero reaches, of 64 channels and the constant
    for layer, reached in ((1, 0), (2, 80 / 192)):  # one that adds nothing, and a real one
        for part, most in (("w1", live), ("w3", live), ("w2", reached)):
            experts = [
                files.read(f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}.weight")
                for e in range(4)
            ]
            assert max(map(zero_share, experts)) < most + 0.01, (layer, part)
            assert all(not torch.equal(experts[0], other) for other in experts[1:])
        assert zero_share(files.read(f"model.layers.{layer}.block_sparse_moe.gate.weight")) < 0.01


def test_tensors_are_the_same_every_time():
    files = inflate_target(TARGET, Shape.parse(EXACT))
    one, other = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (4, 9))
    assert torch.equal(files.read(one), files.read(one))
    assert not torch.equal(files.read(one)[:, 300:], files.read(other)[:, 300:])


# ----------------------------------------------------------------------------------------- decoding


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """The demo and its stand-in."""
    plain = {"checkpoint": DEMO, "device": "cpu", "dtype": "float32", "tree": "dynamic"}
    return [load(**plain), load(**plain, inflate=EXACT)]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 3, "tree": "dynamic"},
        *slow([{"tree": "dynamic"}, {"tree": "chain", "tree_depth": 4}]),
    ],
)
def test_decoding_gives_the_same_tokens(engines, options):
    small, large = (
        with_config(engine, replace(engine.config, max_new_tokens=20, **options))
        for engine in engines
    )
    assert large.target.config.dim == 1024 and large.option("draft") == "eagle"
    a, b = generate(small, [PROMPT]), generate(large, [PROMPT])
    assert a.tokens == b.tokens and a.text == b.text
    assert a.stats["accept_lengths"] == b.stats["accept_lengths"]
    assert b.stats["stand_in"] == f"a {EXACT}-shaped function of demo" and "stand_in" not in a.stats


@pytest.mark.parametrize(
    "options", [{"tree": "dynamic"}, *slow([{"temperature": 1.0, "seed": 3, "tree": "static"}])]
)
def test_a_mixture_decodes_the_same_tokens(options):
    options |= {
        "checkpoint": str(MIXTRAL[0]),
        "eagle": str(MIXTRAL[1]),
        "dtype": "float32",
        "device": "cpu",
    }
    options |= {"max_new_tokens": 24, "ignore_eos": True}
    prompts = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90]]
    a, b = (
        generate(load(**options), prompts),
        generate(load(inflate=EXACT_MIXTRAL, **options), prompts),
    )
    assert a.tokens == b.tokens and a.stats["tau"] > 1.3
    assert a.stats["accept_lengths"] == b.stats["accept_lengths"]
    assert b.stats["stand_in"] == f"a {EXACT_MIXTRAL}-shaped function of target_mixtral"


def test_everything_printed_names_the_stand_in(pairs, capsys, tmp_path):
    argv = [
        "--checkpoint",
        str(pairs["demo"][0]),
        "--set",
        f"inflate={SMALL}",
        "--prompt",
        PROMPT,
        "--max_new_tokens",
        "8",
        "--device",
        "cpu",
        "--tree",
        "dynamic",
    ]
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


def test_shards_are_bounded_and_complete(tmp_path):
    files = make_head(Shape.parse("tiny-0.5b,dim=512,ffn_dim=1664,vocab_size=4224"), torch.bfloat16)
    script.write(files, tmp_path / "head", shard_bytes=3_000_000)
    shards = sorted((tmp_path / "head").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(p.stat().st_size < 3_100_000 for p in shards)
    assert sum(len(load_file(p)) for p in shards) == len(files.recipes)


def failure(capsys, monkeypatch, *argv: str) -> str:
    """The one line that the script ends with, at status 2."""
    with pytest.raises(SystemExit) as stop:
        inflate(*argv, monkeypatch=monkeypatch)
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and error.startswith("inflate.py: ")
    return error


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--shape", "tiny-0.5b,dim=256"], "dim must be at least 257"),
        (["--shape", "tiny-0.5b,n_layers=7"], "n_layers must be at least 8"),
        (["--shape", "tiny-0.5b,n_heads=4,n_kv_heads=4"], "n_kv_heads must be at least 8"),
        (["--shape", "tiny-0.5b,n_heads=8,n_kv_heads=2"], "n_kv_heads must be at least 4"),
        (
            ["--shape", "tiny-0.5b,n_heads=9,n_kv_heads=4"],
            "n_kv_heads must divide n_heads; 4 does not divide 9",
        ),
        (["--shape", "tiny-0.5b,head_dim=48"], "head_dim must be a multiple of"),
        (
            ["--shape", "tiny-0.5b,ffn_dim=1536"],
            "ffn_dim must be at least 1537, for every neuron and one more",
        ),
        (["--shape", "tiny-0.5b,vocab_size=4095"], "vocab_size must be at least 4096"),
        (["--shape", "tiny-0.5b,dim=-5"], "'dim=-5' must be like n_layers=9"),
        (["--out", ""], "--out is missing"),
        (["--shape", "gpt-5"], "gpt-5 is not a known shape; use one of"),
        (["--checkpoint", "nowhere"], "no such directory: nowhere"),
        (
            ["--eagle", DEMO],
            "fc.bias is missing; a LLaMA, a Mixtral, or an EAGLE-1 or EAGLE-2 head can be inflated",
        ),
        (["--eagle_out", "OUT"], "--eagle_out must not be the target's directory"),
    ],
)
def test_bad_input(monkeypatch, capsys, tmp_path, argv, says):
    out = str(tmp_path / "out")
    argv = [out if a == "OUT" else a for a in argv]
    assert says in failure(capsys, monkeypatch, "--shape", "tiny-0.5b", "--out", out, *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("tiny-0.5b", 0.54),
        ("tiny-1b", 1.12),
        ("llama2-7b", 6.74),
        ("llama2-13b", 13.02),
        ("llama2-70b", 68.98),
    ]
    + [("llama3-8b", 8.03), ("llama3-70b", 70.55)],
)
def test_named_shapes_fit_the_demo(name, billions):
    files, head = inflate_target(TARGET, SHAPES[name]), make_head(SHAPES[name], torch.bfloat16)
    config = read_config(TARGET, files.config)
    assert set(files.recipes) == {
        theirs for parts in weight_names(config).values() for theirs in parts
    }
    assert sum(math.prod(r.size) for r in files.recipes.values()) / 1e9 == pytest.approx(
        billions, abs=0.006
    )
    assert head.recipes["fc.weight"].size == (config.dim, 2 * config.dim)
    norm = files.read("model.norm.weight")  # the constant's amplifier: finite in every dtype
    assert (
        norm.isfinite().all()
        and replace(files, dtype=torch.float16).read("model.norm.weight").isfinite().all()
    )


@pytest.mark.parametrize(("name", "billions"), [("mixtral-tiny", 2.985), ("mixtral-8x7b", 46.70)])
def test_named_mixtures_fit_eight_experts(tmp_path, name, billions):
    config = MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    files, head = (
        inflate_target(tmp_path, SHAPES[name]),
        make_head(SHAPES[name], torch.bfloat16, MIXTRAL[1]),
    )
    model = read_config(tmp_path, files.config)
    assert set(files.recipes) == {
        theirs for parts in weight_names(model).values() for theirs in parts
    }
    assert sum(math.prod(r.size) for r in files.recipes.values()) / 1e9 == pytest.approx(
        billions, abs=0.006
    )
    assert head.recipes["layers.0.mlp.down_proj.weight"].size == (model.dim, model.ffn_dim), (
        "a head's layer is dense"
    )
    assert math.log2(SHAPES[name].dim / 256) % 2 == 0 and SHAPES[name].head_dim == 4 * 32, (
        "exact for the demo's sizes"
    )


@pytest.mark.parametrize(
    ("path", "shape", "says"),
    [
        (
            TARGET,
            "mixtral-8x7b",
            r"is a mixture of experts, and .*demo is dense: .* choose one of tiny-0.5b, ",
        ),
        (
            MIXTRAL[0],
            "llama2-7b",
            r"is dense, and .*mixtral is a mixture .* choose one of mixtral-tiny, mixtral-8x7b",
        ),
        (MIXTRAL[0], "mixtral-8x7b", r"n_experts must be .*target_mixtral's 4, .* it is 8"),
        (
            MIXTRAL[0],
            "mixtral-8x7b,n_experts=4,experts_per_token=1",
            r"experts_per_token must be .*'s 2, .* it is 1",
        ),
    ],
)
def test_a_dense_model_and_a_mixture_do_not_become_each_other(
    monkeypatch, capsys, tmp_path, path, shape, says
):
    error = failure(
        capsys,
        monkeypatch,
        "--checkpoint",
        str(path),
        "--shape",
        shape,
        "--out",
        str(tmp_path / "o"),
    )
    assert re.search(says, error)
    with pytest.raises(SystemExit) as stop:
        main(["--checkpoint", str(path), "--set", f"inflate={shape}", "--set", "prompt_ids=1,2"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and re.search(says, err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [
        ("intermediate_size", 88, "gate_proj"),
        ("num_key_value_heads", 1, "k_proj"),
        ("vocab_size", 90, "embed_tokens"),
    ],
)
def test_a_config_that_contradicts_the_weights(monkeypatch, capsys, tmp_path, key, value, tensor):
    small = tmp_path / "small"
    shutil.copytree(GOLDEN_PAIR[0], small)
    raw = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(raw | {key: value}))
    error = failure(
        capsys,
        monkeypatch,
        "--checkpoint",
        str(small),
        "--shape",
        "tiny-0.5b",
        "--out",
        str(tmp_path / "out"),
    )
    assert re.search(rf"{tensor}.weight is \[.*\], config.json says \[.*\]; correct it", error), (
        error
    )
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


def test_what_depends_on_head_dim_is_not_inflated():
    small = read_config(TARGET)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for other in (replace(small, qk_norm=True), replace(small, rope_scaling=yarn)):
        with pytest.raises(
            ValueError,
            match="norms of queries and keys, or YaRN, which depend on head_dim; use another",
        ):
            check_fit(other, SHAPES["tiny-0.5b"], TARGET)
    check_fit(small, SHAPES["tiny-0.5b"], TARGET)


def test_shape_texts():
    assert Shape.parse("llama2-7b,n_layers=9") == replace(
        SHAPES["llama2-7b"], name="llama2-7b,n_layers=9", n_layers=9
    )
    for text in (
        "llama2-8b",
        "llama2-7b,n_layers",
        "llama2-7b,layers=3",
        "llama2-7b,dim=0",
        "llama2-7b,",
    ):
        with pytest.raises(ValueError, match="shape"):
            Shape.parse(text)


def test_the_default_model_is_not_inflated():
    with pytest.raises(
        ValueError,
        match="--set inflate takes a Hugging Face directory, as --checkpoint checkpoints/demo",
    ):
        load(inflate=EXACT)


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


def test_a_full_disk(monkeypatch, tmp_path):
    files = make_head(Shape.parse("tiny-0.5b,dim=512"), torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        with pytest.raises(ValueError, match=r"needs 0.0 GB, and .* has 0.0 GB free; make room"):
            script.write(files, tmp_path / "out")
    save, calls = checkpoint.save_file, []

    def full(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(*args)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ValueError, match="No space left on device.*free some space"):
        script.write(files, tmp_path / "out", shard_bytes=1_000_000)
    assert len(calls) == 2 and not list(tmp_path.iterdir())
