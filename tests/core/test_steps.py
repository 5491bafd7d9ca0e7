"""Every list of steps, merged as on CUDA and by ranks; and the table of architectures.

The reference is each step's own PyTorch. Merged steps run here on a CPU, where they compute what their parts do;
test_families.py compares passes in C++ with the steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends.fusions import MergedHead, MergedModel
from eagle_draft import EagleConfig
from families import FAMILIES
from files import registry
from files.config import read_config
from files.eagle_variants import Eagle3Variant
from files.heads import make_head
from files.rank import Rank
from kv_cache import KVCache, Window, by_shape
from model import ModelConfig, Transformer
from models.steps import AddShared
from reference import choose, use_backend
from run.tp import SumRanks, cuts_of, with_sums
from steps import Project

LLAMA = ModelConfig(64, 3, 4, 2, 16, 96, 50)
MORE = {
    "LLaMA": ("biases",), "Qwen3-MoE": ("first dense",), "Gemma 4": ("26B-A4B",), "Qwen3.5": ("experts",), "LFM2": ("experts",),
}  # fmt: skip
# cases of cases/families.py: the first of every family, and some whose lists have other steps
MODELS = {
    f"{name}, {case}": (name, case)
    for name, family in FAMILIES.items()
    for case in (next(iter(family.cases)), *MORE.get(name, ()))
}
EAGLE3 = Eagle3Variant((0, 1), 64, 40)
HEADS = {
    "eagle": EagleConfig(replace(LLAMA, n_layers=2)),
    "eagle 3": EagleConfig(replace(LLAMA, n_layers=2), eagle3=EAGLE3),
    "eagle 3, normed": EagleConfig(
        replace(LLAMA, n_layers=2),
        eagle3=replace(EAGLE3, norm_before_fc=True, fc_norm=True, last_norm="fed"),
    ),
}
B, T, SLOTS = 2, 6, 40


def filled(module: nn.Module) -> nn.Module:
    """Random weights in bf16, with the backend of this machine."""
    generator = torch.Generator().manual_seed(1)
    use_backend(module, choose(torch.device("cpu")))
    for parameter in module.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        noise = torch.randn(parameter.shape, generator=generator) * spread
        parameter.data = (noise + (parameter.dim() == 1)).bfloat16()
    return module.requires_grad_(False).eval()


def tree_window() -> Window:
    """Six nodes: a root, two children, two below the second, one below the fourth."""
    seen = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [0, 2, 3, 5]]
    mask = torch.tensor([[column in row for column in range(T)] for row in seen])
    start = torch.tensor([9, 3])
    return Window(start[:, None] + torch.arange(T), start, mask.expand(B, T, T))


def empty_cache(config: ModelConfig) -> KVCache:
    """A cache with numbers in its prefix."""
    cache = KVCache.empty(config, B, SLOTS, torch.bfloat16, "cpu")
    generator = torch.Generator().manual_seed(2)
    for buffer in sum(by_shape(cache.k, cache.v), []):
        numbers = torch.randn(B, buffer.shape[1], 9, buffer.shape[3], generator=generator)
        buffer[:, :, :9] = numbers.bfloat16()
    return cache


def positions() -> Tensor:
    return tree_window().start[:, None] + torch.tensor([0, 1, 1, 2, 2, 3])


@cache
def config_of(name: str) -> ModelConfig:
    """The config that is read from the file of transformers' model."""
    family, case = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[family].of(case).save_pretrained(folder)
        return read_config(Path(folder))


def model_of(name: str) -> tuple[nn.Module, ModelConfig]:
    if name in MODELS:
        return filled(Transformer(config_of(name))), config_of(name)
    config = HEADS[name]
    return filled(make_head(config)), config.model


def passes(name: str) -> Iterator[Tensor]:
    """What a model or a head computes over a cache, by its own steps and then by merged ones."""
    model, config = model_of(name)
    if name in MODELS:
        tokens = torch.arange(B * T).view(B, T) % 50
        for program in (None, MergedModel(model)):
            model.program = program
            yield model(tokens, positions(), empty_cache(config), tree_window(), aux_layers=(0, 1))
        return
    generator = torch.Generator().manual_seed(3)
    embedded, features = torch.randn(2, B, T, 64, generator=generator).bfloat16().float()
    for forward in (model.forward, MergedHead(model, None).forward):
        yield forward(embedded, features, positions(), empty_cache(config), tree_window())


@pytest.mark.parametrize("name", [*MODELS, *HEADS])
def test_merged_steps_compute_what_their_parts_do(name):
    want, got = passes(name)
    if name.startswith(("Gemma 3", "Qwen3.5", "Qwen3-Next")):  # norms that take weights in fp32
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_add_up_what_they_share(name):
    """A sum for each sublayer, in front of what reads the stream; and each weight is split one way."""
    config = config_of(name)
    for i in range(config.n_layers):
        steps = with_sums(config.layer(i))
        sums = [i for i, step in enumerate(steps) if isinstance(step, SumRanks)]
        has_both = any(isinstance(step, AddShared) for step in steps)
        assert len(sums) == (3 if has_both else 2)
        rest = [step for step in steps if not isinstance(step, SumRanks)]
        assert rest == [*config.layer(i)]
    projections = [
        s for i in range(config.n_layers) for s in config.layer(i) if isinstance(s, Project)
    ]
    assert {0, 1} == {cut.dim for cut in cuts_of(config, Rank(0, 2, 0)).values()}
    assert {step.row_parallel for step in projections if step.name in ("wo", "w2")} == {True}


# ------------------------------------------------------------------------------------- the registry


def test_every_row_loads_and_describes_itself():
    for row in registry.rows():
        module = row.load()
        assert callable(module.read_config) and module.GGUF.layer, row
    assert registry.row_of(None, "qwen3").name == "Qwen3ForCausalLM"
    assert registry.row_of(["LlamaModel"], "llama").name == "LlamaForCausalLM"
    assert registry.row_of(["FooForCausalLM"], "llama") is None
