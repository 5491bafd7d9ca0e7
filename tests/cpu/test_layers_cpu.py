"""Passes of a model and of a draft head in one call compute what the modules compute, bit for bit."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backends.cpp.layers import FusedHead, FusedModel, missing_step, steps_of
from backends.weight import pack_codes
from draft_tree import Frontier, StaticTree
from drafters import DrafterUpdate, DraftVocab, RootOnly
from eagle_draft import EagleConfig, EagleDrafter
from files.eagle_variants import Eagle3Variant
from files.heads import make_head
from helpers import engine_for
from kv_cache import KVCache, Window, causal_window
from model import ModelConfig, Transformer, run_layers
from models.mixtures import with_head_norms
from quantize import FORMATS, Int4, Linear, stack
from reference import choose, use_backend
from run.tp import SumRanks
from steps import Router

COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
pytestmark = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")

CONFIG = ModelConfig(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=50
)
BIASED = ModelConfig(64, 2, 4, 4, 32, 160, 50, qkv_bias=True, o_bias=True, mlp_bias=True)
MIXTURE = ModelConfig(64, 3, 4, 2, 16, 96, 50, n_experts=5, experts_per_token=2)
QWEN3 = replace(with_head_norms(CONFIG), norm_eps=1e-6)
QWEN3_MOE = replace(
    QWEN3, n_experts=12, experts_per_token=3, expert_dim=32, norm_topk=False, dense_layers=(1,),
)  # fmt: skip
# heads of 48, no multiple of the sums that run side by side
CONFIGS = {"grouped": CONFIG, "biased": BIASED, "qwen3": QWEN3, "heads of 48": replace(QWEN3, head_dim=48), "mixture": MIXTURE,
           "mixed": QWEN3_MOE}  # fmt: skip
BF16 = torch.bfloat16


def rounded(weight: Tensor, quant: str) -> tuple[Tensor, ...]:
    """Codes and scales; with "zeros", fp16 scales, and zero points that shift the codes back and forth."""
    if quant != "zeros":
        return FORMATS[quant].encode(weight, 32)
    codes, scale = Int4.encode(weight, 32)
    zero = torch.arange(scale.numel(), dtype=torch.int8).view(scale.shape) % 5 - 2
    return (codes + zero.repeat_interleave(32, 1)).clamp(-8, 7), scale.half(), zero


def fill(module: torch.nn.Module, quant: str | None) -> torch.nn.Module:
    """Random weights, in bf16 or quantized: int8, int4, or "zeros", int4 with zero points."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        noise = torch.randn(parameter.shape, generator=generator) * spread
        # the frequencies, which are no parameter, stay in fp32
        parameter.data = (noise + (parameter.dim() == 1)).to(BF16)
    use_backend(module, choose(torch.device("cpu")))
    module = module.requires_grad_(False).eval()
    if quant:
        kind = FORMATS.get(quant, Int4)
        for linear in module.modules():
            if not isinstance(linear, Linear) or linear.fp32_out:
                continue
            if linear.experts:
                parts = (
                    pack_codes(kind.format, *rounded(weight, quant)) for weight in linear.weight
                )
                linear.pack(stack(parts, linear.experts))
            else:
                linear.pack(pack_codes(kind.format, *rounded(linear.weight, quant)))
    for router in (m for m in module.modules() if isinstance(m, Router)):
        router.weight.data *= 16  # so that no roundings decide between experts
    return module


def model(config: ModelConfig = CONFIG, quant: str | None = None) -> Transformer:
    return fill(Transformer(config), quant)


def fused(target: Transformer) -> Transformer:
    """The model, fused as in an engine with --compile."""
    target.fuse(True)
    assert isinstance(target.program, FusedModel)
    return target


def empty_cache(config: ModelConfig, batch: int, dtype: torch.dtype = BF16) -> KVCache:
    return KVCache.empty(config, batch, 64, dtype, "cpu")


def tree_window(start: list[int]) -> Window:
    """Five nodes: the root, two children, and two below the second."""
    seen = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4]]
    mask = torch.tensor([[column in row for column in range(5)] for row in seen])
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
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_as_the_modules(config, quant, batch):
    """Bit for bit, in the features and in the cache."""
    target = model(config, quant)
    want, want_cache = two_passes(target, batch)
    got, got_cache = two_passes(fused(target), batch)
    assert torch.equal(got, want)
    assert all(map(torch.equal, (*got_cache.k, *got_cache.v), (*want_cache.k, *want_cache.v)))


@pytest.mark.parametrize("config, quant, dtype", [
    *((config, quant, BF16) for config in (CONFIG, QWEN3, MIXTURE, QWEN3_MOE) for quant in (None, "int8", "int4", "zeros")),
    (CONFIG, None, torch.int8),
])  # fmt: skip
def test_a_row_alone_has_the_same_bits(config, quant, dtype):
    """And codes, in a cache of 8 bits."""
    target = fused(model(config, quant))
    tokens = (torch.arange(90) * 7 % 50)[None]
    whole = KVCache.empty(config, 1, 128, dtype, "cpu")
    window = causal_window(torch.tensor([0]), 90)  # enough rows for several threads and tiles
    features = target(tokens, window.slots, whole, window)
    cache = KVCache.empty(config, 1, 128, dtype, "cpu")
    for at in range(90):
        one = causal_window(torch.tensor([at]), 1)
        alone = target(tokens[:, at : at + 1], one.slots, cache, one)
        assert torch.equal(alone[:, 0], features[:, at]), at
    assert all(map(torch.equal, (*cache.k, *cache.v), (*whole.k, *whole.v)))


def test_of_equal_experts_the_first_are_asked():
    target = model(MIXTURE)
    for layer in target.layers:
        layer.router.weight.data[:] = 0
        layer.w2.weight.data[2:] = float("nan")  # the others
    assert two_passes(fused(target), 2)[0].isfinite().all()


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("config", [CONFIG, MIXTURE, QWEN3_MOE], ids=["dense", "mixture", "mixed"])
def test_aux_layers_in_one_call_are_those_of_the_loop(config, quant):
    """Bit for bit, and a tap is the output of a model that ends there."""
    target, window = model(config, quant), causal_window(torch.tensor([0, 0]), 7)
    tokens, aux_layers = torch.arange(14).view(2, 7), (0, 2, 3)  # 3: the last layer's output

    def run(aux_layers: tuple[int, ...]) -> Tensor:
        return target(tokens, window.slots, empty_cache(config, 2), window, aux_layers=aux_layers)

    def until(last: int) -> Tensor:
        cache = empty_cache(replace(config, n_layers=last), 2)
        rows = target.embed(tokens, window.slots, window)
        return run_layers(target.layers[:last], rows, cache)[0].stream.bfloat16()

    looped, plain = run(aux_layers), run(())
    assert torch.equal(looped, torch.cat((plain, target.embedding(tokens), until(2), until(3)), -1))
    fused(target)
    assert torch.equal(run(aux_layers), looped) and torch.equal(run(()), plain)


def test_weights_may_change_in_place():
    """And a copy holds none."""
    target = fused(model())
    before, _ = two_passes(target, 1)
    target.layers[1].w2.weight.data *= -1
    after, _ = two_passes(target, 1)
    copied = deepcopy(target)
    with pytest.raises(RuntimeError, match="prepare the layers of the copied model"):
        two_passes(copied, 1)
    assert not torch.equal(before, after) and torch.equal(after, two_passes(fused(copied), 1)[0])


def test_what_is_left_to_the_modules():
    odd = ModelConfig(64, 1, 4, 2, 12, 96, 50)  # attention takes heads of whole vectors
    assert missing_step(steps_of(fill(Transformer(odd), None)))
    for target in (fill(Transformer(odd), None), model().float()):
        engine_for(target, RootOnly(), compile=True)
        assert target.program is None
    target = model()
    target.layers[1].steps += (SumRanks(),)
    assert missing_step(steps_of(target))
    target = fused(model())
    tokens = torch.arange(7)[None]
    # without a cache, as in training, the modules run
    assert target(tokens, tokens).isfinite().all()
    target.fuse(False)
    assert target.program is None


# -------------------------------------------------------------------------------------------- heads

HEAD = ModelConfig(64, 2, 4, 2, 16, 96, 50)


def of_eagle3(*aux_layers: int, bias: bool = False, width: int = 64, **flags) -> EagleConfig:
    return EagleConfig(HEAD, bias, eagle3=Eagle3Variant(aux_layers, width, 40, **flags))


HEADS = {  # every option of a head once off and once on, and together
    "2": EagleConfig(HEAD),
    "2 without a bias": EagleConfig(HEAD, fc_bias=False),
    "3": of_eagle3(0, 1),
    "3 of another width": of_eagle3(0, 2, 3, bias=True, width=96),
    "3 normed as a whole": of_eagle3(0, 1, norm_before_fc=True),
    "3 normed in parts": of_eagle3(0, 1, 2, width=96, fc_norm=True),
    "3 normed twice": of_eagle3(0, 1, norm_before_fc=True, fc_norm=True),
    "3 fed": of_eagle3(1, norm_before_residual=True, last_norm="fed"),
    "3 without a last norm": of_eagle3(0, 1, last_norm="none"),
    "3 with its own embedding": of_eagle3(0, 1, embedding="e", lm_head=""),
    "3 without aux_layers": of_eagle3(),
    "3 without aux_layers, normed": of_eagle3(norm_before_residual=True),
}


def drafter_of(config: EagleConfig, quant: str | None = None) -> EagleDrafter:
    head = fill(make_head(config), quant)
    if head.lm_head is not None:
        head.vocab = DraftVocab(50, torch.arange(5, 45))
    return EagleDrafter(head, model(), StaticTree(((0,), (1,), (0, 0))))


def passes_of(drafter: EagleDrafter, batch: int) -> list[Tensor]:
    """Rows that are confirmed, some and none, and two levels of nodes. Returns: all outputs, and the cache."""
    generator, config = torch.Generator().manual_seed(4), drafter.head.config
    eagle3 = config.eagle3
    width = 64 if eagle3 is None else eagle3.target_dim * (1 + len(eagle3.aux_layers))
    state, found = drafter.init(batch, 40), []
    for counts in ([5, 2, 4], [3, 0, 1], [0, 0, 0], [1, 3, 2]):
        tokens = torch.randint(50, (batch, 6), generator=generator)
        features = torch.randn(batch, 5, width, generator=generator).to(BF16)
        state = drafter.extend(state, DrafterUpdate(tokens, features, torch.tensor(counts[:batch])))
        found += [state.hidden, state.length]
    out, begin = state.hidden, 0
    for rows, parents in ((2, [0, 0]), (3, [1, 0, 1])):
        slots = state.length[:, None] + begin + torch.arange(rows)
        seen = torch.rand(batch, rows, 5, generator=generator) < 0.5
        seen[:, torch.arange(rows), begin + torch.arange(rows)] = True
        parent = torch.tensor(parents).expand(batch, rows).clone()
        parent[1:] = 0  # rows differ
        tokens = torch.randint(50, (batch, rows), generator=generator)
        level = Frontier(parent, tokens, parent, parent, seen)
        positions = state.length[:, None].expand(-1, rows) + (begin > 0)
        out = drafter.forward_nodes(state, level, out, positions, Window(slots, state.length, seen))
        found.append(out)
        begin += rows
    return [*found, *state.cache.k, *state.cache.v]


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_in_one_call(config, quant):
    """Every kind of head, bit for bit, in what it returns and in its cache."""
    drafter = drafter_of(config, quant)
    want = {batch: passes_of(drafter, batch) for batch in (1, 3)}
    drafter.fuse(True)
    assert isinstance(drafter.head.program, FusedHead)
    for batch, theirs in want.items():
        ours = passes_of(drafter, batch)
        assert [x.shape for x in ours] == [x.shape for x in theirs]
        assert [torch.equal(x, y) for x, y in zip(ours, theirs)] == [True] * len(ours)
    drafter.fuse(False)
    assert not drafter.head.program.in_cpp
