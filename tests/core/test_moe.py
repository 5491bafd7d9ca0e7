"""Mixtures of experts: the router, one graph for every routing, and files of which a part is missing.

Logits and texts of whole models, their wrong configs and quantized files: test_families.py; the product and layouts
of stacks: test_functions.py and test_weights.py of tests/cpu.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import helpers
from helpers import Mixture, rounded
from model import ModelConfig
from reference import choose, use_backend
from run import quantize as run_quantize
from run.generate import main
from tiny_models import SIZES, random_model

OURS = partial(choose, torch.device("cpu"))
CONFIG = ModelConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=97, n_experts=4,
    experts_per_token=2,
)  # fmt: skip


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def feed_forward(format="float", dtype=torch.float32):
    """A random layer, its experts in a format."""
    torch.manual_seed(0)
    layer = Mixture(CONFIG)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    layer = layer.to(dtype).requires_grad_(False)
    if format != "float":
        layer.w13, layer.w2 = (rounded(format, e.weight, group=32) for e in (layer.w13, layer.w2))
    use_backend(layer, OURS(dtype))
    return layer


@pytest.mark.parametrize("format", ["float", "int4"])  # int8 is traced as int4 is
def test_one_graph_for_every_routing(monkeypatch, format):
    """Which experts are hit is data: it may not become a shape, or a guard, of the graph."""
    monkeypatch.setattr("backends.library._cpp_available", [False])
    layer = feed_forward(format)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    step = torch.compile(layer.forward, backend=counter, fullgraph=True, dynamic=False)
    x = noise(2, 7, 64, seed=2)
    hit = set()
    for scale in (1.0, 0.0, -1.0):  # at 0 all experts tie: the first two for every token
        with torch.no_grad():
            torch.testing.assert_close(step(x * scale), layer(x * scale), atol=1e-5, rtol=1e-5)
            hit.add(len(layer.router(x * scale)[0].unique()))
    assert counter.frame_count == 1 and len(hit) > 1


def test_the_router_ranks_in_fp32():
    """In bf16 these two experts tie, and the wrong one would come first."""
    router = feed_forward(dtype=torch.bfloat16).router
    router.weight[:] = 0
    router.weight[1:3, :2] = torch.tensor([[1.0, 0.0], [1.0, 2**-9]])
    expert, _ = router(torch.ones(1, 1, 64, dtype=torch.bfloat16))
    assert expert[0, 0].tolist() == [2, 1]


# ------------------------------------------------------------------------------------------- files

EXPERT = "model.layers.1.block_sparse_moe.experts.2."
INDEX = "model.safetensors.index.json"


@pytest.fixture
def mixtral(tmp_path):
    """A random Mixtral as Hugging Face saves it, in several shards."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "max_position_embeddings": 128}
    path = tmp_path / "mixtral"
    random_model("Mixtral", SIZES | sizes).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def index_of(path) -> dict[str, str]:
    return json.loads((path / INDEX).read_text())["weight_map"]


def told(capsys, program, *argv) -> str:
    return helpers.refused(capsys, program, [str(a) for a in argv])


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_one_line_and_status_2(mixtral, tmp_path, capsys, indexed):
    """Every command that reads a checkpoint names the file, or the first weight that no file has."""
    index, out = index_of(mixtral), tmp_path / "out"
    gone = sorted({file for name, file in index.items() if name.startswith(EXPERT)})
    for file in gone:
        (mixtral / file).unlink()
    rule = f"the index names {gone[0]}, which is missing"
    if not indexed:
        rule = min(name for name, file in index.items() if file in gone)
        kept = {name: file for name, file in index.items() if file not in gone}
        (mixtral / INDEX).write_text(json.dumps({"weight_map": kept}))
    assert rule in told(capsys, main, "--checkpoint", mixtral, "--prompt_ids", "1,2")
    if indexed:
        line = ("--checkpoint", mixtral, "--quant", "int8", "--out", out)
        assert rule in told(capsys, run_quantize.main, *line) and not out.exists()
