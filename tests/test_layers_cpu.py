"""Layers in one call compute what the modules compute, bit for bit whatever else is in the step."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ops.attention
from draft_tree import StaticTree
from drafters import RootOnly
from eagle_draft import Eagle3Head, EagleDrafter, EagleHead
from helpers import decode, engine_for
from hf.heads import Eagle3, EagleConfig
from model import (
    ExpertLinear,
    KVCache,
    Layers,
    Linear,
    ModelConfig,
    NoNorm,
    Router,
    Transformer,
    Window,
    causal_window,
    rope_angles,
)
from ops.cpu.layers import FusedLayers
from quantize import FORMATS, Int4Linear, QuantExperts
from sampling import Sampling

COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
pytestmark = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")

CONFIG = ModelConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=50)
BIASED = ModelConfig(64, 2, 4, 4, 32, 160, 50, qkv_bias=True, o_bias=True, mlp_bias=True)
MIXTURE = ModelConfig(64, 3, 4, 2, 16, 96, 50, n_experts=5, experts_per_token=2)
QWEN3 = replace(CONFIG, qk_norm=True, norm_eps=1e-6)
QWEN3_MOE = replace(
    QWEN3, n_experts=12, experts_per_token=3, expert_dim=32, norm_topk=False, dense_layers=(1,), expert_names="qwen"
)
BF16 = torch.bfloat16


def rounded(weight: Tensor, quant: str) -> tuple[Tensor, ...]:
    """Codes and scales; with "zeros", fp16 scales, and zero points that shift the codes back and forth."""
    if quant != "zeros":
        return FORMATS[quant].encode(weight, 32)
    codes, scale = Int4Linear.encode(weight, 32)
    zero = torch.arange(scale.numel(), dtype=torch.int8).view(scale.shape) % 5 - 2
    return (codes + zero.repeat_interleave(32, 1)).clamp(-8, 7), scale.half(), zero


def fill(module: torch.nn.Module, quant: str | None) -> torch.nn.Module:
    """Random weights, in bf16 or quantized: int8, int4, or "zeros", int4 with zero points."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread + (parameter.dim() == 1)
    module = module.to(BF16).requires_grad_(False).eval()
    if quant:
        kind = FORMATS.get(quant, Int4Linear)
        for name, linear in list(module.named_modules()):
            if type(linear) is Linear:
                (codes, scale, *zero), bias = rounded(linear.weight, quant), linear.bias
                module.set_submodule(name, kind(codes, scale, None if bias is None else bias.data, False, *zero))
            elif type(linear) is ExpertLinear:
                parts = (rounded(weight, quant) for weight in linear.weight)
                module.set_submodule(name, QuantExperts(kind, parts, len(linear.weight)))
    for router in (m for m in module.modules() if isinstance(m, Router)):
        router.weight.data *= 16  # so that no roundings decide between experts
    return module


def model(config: ModelConfig = CONFIG, quant: str | None = None) -> Transformer:
    return fill(Transformer(config), quant)


def fuse(*all_layers: Layers) -> None:
    """What an engine does that compiles."""
    for layers in all_layers:
        assert FusedLayers.fits(layers)
        layers.fused = FusedLayers(layers)


def empty_cache(config: ModelConfig, batch: int) -> KVCache:
    return KVCache.empty(config, batch, 64, BF16, "cpu")


def tree_window(start: list[int]) -> Window:
    """Five nodes: the root, two children, and two below the second."""
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]).bool()
    begin = torch.tensor(start)
    return Window(begin[:, None] + torch.arange(5), begin, mask.expand(len(start), 5, 5))


def two_passes(target: Transformer, batch: int) -> tuple[Tensor, KVCache]:
    """A prompt of seven tokens, then a tree behind six of them. Returns: the features of the tree; the cache."""
    cache = empty_cache(target.config, batch)
    tokens = torch.arange(7 * batch).view(batch, 7) % 50
    begin = torch.zeros(batch, dtype=torch.long)
    window = causal_window(begin, 7)
    target(tokens, window.slots, cache, window)
    tree = tree_window([6, 3][:batch])
    depths = torch.tensor([0, 1, 1, 2, 2])
    return target(tokens[:, :5] + 1, tree.start[:, None] + depths, cache, tree), cache


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("quant", [None, "int8", "int4", "zeros"])
@pytest.mark.parametrize("config", [CONFIG, BIASED, MIXTURE, QWEN3_MOE], ids=["grouped", "biased", "mixture", "mixed"])
def test_as_the_modules(config, quant, batch):
    target = model(config, quant)
    want, want_cache = two_passes(target, batch)
    fuse(target.layers)
    assert target.layers.fused.takes(want)
    got, got_cache = two_passes(target, batch)
    # the norms' sums run in another order: now and then a value falls to the other side when it is rounded to 8 bits
    assert (got - want).abs().max() <= 0.03 * want.abs().max()
    assert (got != want).float().mean() < 0.2
    for ours, theirs in zip((*got_cache.k, *got_cache.v), (*want_cache.k, *want_cache.v)):
        assert torch.equal(ours.any(-1), theirs.any(-1)), "the same slots are written"
        assert (ours - theirs).abs().max() <= 0.03 * theirs.abs().max()


@pytest.mark.parametrize("quant", [None, "int8", "int4", "zeros"])
@pytest.mark.parametrize("config", [CONFIG, QWEN3, MIXTURE, QWEN3_MOE], ids=["dense", "qwen3", "mixture", "mixed"])
def test_a_row_alone_has_the_same_bits(config, quant):
    target = model(config, quant)
    fuse(target.layers)
    tokens = (torch.arange(90) * 7 % 50)[None]
    whole = KVCache.empty(config, 1, 128, BF16, "cpu")
    window = causal_window(torch.tensor([0]), 90)  # enough rows for several threads and tiles
    features = target(tokens, window.slots, whole, window)
    cache = KVCache.empty(config, 1, 128, BF16, "cpu")
    for at in range(90):
        one = causal_window(torch.tensor([at]), 1)
        alone = target(tokens[:, at : at + 1], one.slots, cache, one)
        assert torch.equal(alone[:, 0], features[:, at]), at
    assert all(map(torch.equal, (*cache.k, *cache.v), (*whole.k, *whole.v)))


def test_of_equal_experts_the_first_are_asked():
    target = model(MIXTURE)
    for layer in target.layers:
        layer.ffn.router.weight.data[:] = 0
        layer.ffn.w2.weight.data[2:] = float("nan")  # the others
    fuse(target.layers)
    assert two_passes(target, 2)[0].isfinite().all()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "traced"])
def test_a_target_and_a_head_decode_by_them(compile, monkeypatch):
    """Both are fused where a step is compiled, and tree decoding gives vanilla's tokens; so it does without compiling.

    The bits of compiled code: `test_eager_and_compiled_cycles_give_the_same_bits`.
    """
    target = model()
    head = fill(EagleHead(EagleConfig(ModelConfig(64, 2, 4, 2, 16, 96, 50))), None)
    head.layers[1].attention_norm.weight.data *= 0.5
    prompt, options = [3, 1, 4, 1, 5], {"max_new_tokens": 24, "ignore_eos": True, "compile": compile}
    served, real = [], FusedLayers.__call__
    monkeypatch.setattr(FusedLayers, "__call__", lambda self, *rest: served.append(self) or real(self, *rest))

    def decoded(drafter):
        engine = engine_for(target, drafter, **options)
        assert (target.layers.fused is not None) == compile
        if not compile:
            fuse(target.layers, head.layers)
        return decode(engine, prompt).history

    drafter = EagleDrafter(head, target, StaticTree(((0,), (1,), (0, 0), (1, 0))), Sampling())
    assert decoded(RootOnly()) == decoded(drafter)
    assert {id(target.layers.fused), id(head.layers.fused)} <= set(map(id, served))


def test_a_first_layer_without_a_norm():
    """As a draft head has it."""
    head = fill(EagleHead(EagleConfig(ModelConfig(64, 2, 4, 2, 16, 96, 50))), None)
    x, window = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(2)).to(BF16), tree_window([0])
    rope = rope_angles(head.rope_freq, window.slots)
    want = head.layers(x, rope, head.norm, empty_cache(head.config.model, 1), window)
    fuse(head.layers)
    got = head.layers(x, rope, head.norm, empty_cache(head.config.model, 1), window)
    assert (got - want).abs().max() <= 0.03 * want.abs().max() and (got != want).float().mean() < 0.2


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("config", [CONFIG, MIXTURE, QWEN3_MOE], ids=["dense", "mixture", "mixed"])
def test_taps_in_one_call_are_those_of_the_loop(config, quant):
    """Bit for bit, and a tap is the output of a model that ends there."""
    target, window = model(config, quant), causal_window(torch.tensor([0, 0]), 7)
    tokens, taps = torch.arange(14).view(2, 7), (0, 2, 3)  # 3: the last layer's output

    def run(layers: Layers, taps: tuple[int, ...] = taps) -> Tensor:
        cache, rope = empty_cache(replace(config, n_layers=len(layers)), 2), rope_angles(target.rope_freq, window.slots)
        return layers(target.embedding(tokens), rope, NoNorm(), cache, window, taps=taps)

    looped = run(target.layers)
    shorter = [run(Layers(list(target.layers)[:last]), ()) for last in (3, 2, 3)]
    assert torch.equal(looped, torch.cat((shorter[0], target.embedding(tokens), *shorter[1:]), -1))
    fuse(target.layers)
    assert torch.equal(run(target.layers), looped) and torch.equal(run(target.layers, ()), shorter[0])


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_a_first_attention_that_reads_twice_the_width(quant):
    """A head of version 3, in one call and in the loop."""
    three = Eagle3((0, 1), 64, 50, embedding="", lm_head="")
    head = fill(Eagle3Head(EagleConfig(ModelConfig(64, 2, 4, 2, 16, 96, 50), fc_bias=False, three=three)), quant)
    generator, window = torch.Generator().manual_seed(2), tree_window([0])
    embedded, hidden = (torch.randn(1, 5, 64, generator=generator).to(BF16) for _ in range(2))

    def run(*inputs: Tensor) -> Tensor:
        return head(*inputs, window.slots, empty_cache(head.config.model, 1), window)

    want = run(embedded, hidden)
    fuse(head.layers)
    assert torch.equal(run(embedded, hidden), want) and not torch.equal(run(hidden, embedded), want)


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_norms_of_queries_and_keys_are_those_of_the_loop(quant):
    """Bit for bit, in heads of 16 and of 48, which is no multiple of the sums that run side by side."""
    for config in (QWEN3, replace(QWEN3, head_dim=48)):
        target = model(config, quant)
        want, want_cache = two_passes(target, 2)
        plain = deepcopy(target)
        for layer in plain.layers:
            layer.attention.qk_norm = False
        assert not torch.equal(two_passes(plain, 2)[0], want)
        fuse(target.layers)
        got, got_cache = two_passes(target, 2)
        assert torch.equal(got, want)
        assert all(map(torch.equal, (*got_cache.k, *got_cache.v), (*want_cache.k, *want_cache.v)))


@pytest.mark.usefixtures("traced")
def test_an_engine_takes_the_weights_as_they_are_then():
    """Replaced ones are seen by the next engine that fuses them."""
    target, options = model(), {"max_new_tokens": 12, "ignore_eos": True, "compile": True}
    before = decode(engine_for(target, RootOnly(), **options), [3, 1, 4]).history
    target.layers[0].ffn.w2.weight = torch.nn.Parameter(-target.layers[0].ffn.w2.weight, requires_grad=False)
    after = decode(engine_for(target, RootOnly(), **options), [3, 1, 4]).history
    want = decode(engine_for(deepcopy(target), RootOnly(), **options), [3, 1, 4]).history
    assert before != after == want


def test_weights_may_change_in_place():
    target = model()
    fuse(target.layers)
    before, _ = two_passes(target, 1)
    target.layers[1].ffn.w2.weight.data *= -1
    after, _ = two_passes(target, 1)
    fresh = deepcopy(target)
    fuse(fresh.layers)
    assert not torch.equal(before, after) and torch.equal(after, two_passes(fresh, 1)[0])


def test_a_copy_holds_nothing():
    target = model()
    fuse(target.layers)
    with pytest.raises(RuntimeError, match="prepare the layers of the copied model"):
        two_passes(deepcopy(target), 1)


def test_what_is_left_to_the_modules():
    odd = ModelConfig(64, 1, 4, 2, 12, 96, 50)  # attention takes heads of whole vectors
    for target in (fill(Transformer(odd), None), model().float()):
        assert not FusedLayers.fits(target.layers)
        engine_for(target, RootOnly(), compile=True)
        assert target.layers.fused is None
    target = model()
    target.layers[1].attention.wo.format = "fp8"
    assert not FusedLayers.fits(target.layers)
    target = model()
    fuse(target.layers)
    assert target.layers.fused.takes(torch.zeros(1, 1, 64, dtype=BF16))
    assert not target.layers.fused.takes(torch.zeros(1, 1, 64))
    assert not target.layers.fused.takes(torch.zeros(1, 1, 64, dtype=BF16, requires_grad=True))


def test_wrong_operands():
    target = model()
    fuse(target.layers)
    x, window = torch.zeros(1, 5, 64, dtype=BF16), tree_window([0])
    rope = rope_angles(target.rope_freq, window.slots)
    for slot in (-1, 64):
        wrong = window._replace(slots=window.slots.clone().fill_(slot))
        with pytest.raises(RuntimeError, match="the cache has 64 slots"):
            target.layers(x, rope, target.norm, empty_cache(CONFIG, 1), wrong)
    with pytest.raises(RuntimeError, match="the cache is of 2 layers, not of 3"):
        target.layers(x, rope, target.norm, empty_cache(BIASED, 1), window)
    with pytest.raises(RuntimeError, match="an angle per row"):
        target.layers(
            x, rope_angles(target.rope_freq, window.slots[:, :2]), target.norm, empty_cache(CONFIG, 1), window
        )
    for taps in ((4,), (1, 0), (-1,)):
        with pytest.raises(RuntimeError, match="taps must ascend, from 0 to 3"):
            target.layers(x, rope, target.norm, empty_cache(CONFIG, 1), window, taps=taps)
    with pytest.raises(RuntimeError, match="13 tensors"):
        torch.ops.gpt_eagle.prepare_layers([x] * 13, 4, [96], 0, True, 1e-5)


# ------------------------------------------------------------------------------------------ compaction


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("path", [[0, 2, 5], [0, 1, 2], [4, 4, 0], [2, 1, 0]], ids=str)
def test_moved_rows(path, dtype):
    """Also onto rows that move themselves."""
    generator = torch.Generator().manual_seed(3)
    buffers = [torch.randn(2, 3, 20, 16, generator=generator).to(dtype) for _ in range(4)]
    want = [b.clone() for b in buffers]
    start, paths = torch.tensor([7, 14]), torch.tensor([path, [0, 3, 5]])
    ops.attention.compact_reference(want, start, paths)
    torch.ops.gpt_eagle.move_rows(buffers, start, paths)
    assert all(map(torch.equal, buffers, want))
    with pytest.raises(RuntimeError, match="no slot 20"):
        torch.ops.gpt_eagle.move_rows(buffers, torch.tensor([7, 20]), paths)
