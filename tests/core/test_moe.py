"""Mixtures of experts: the operator, the router, quantized experts, loading and its mistakes, the small demo.

Logits against Hugging Face, the cache and trees are test_model.py's; whole decoding is test_lossless.py's and
test_golden.py's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounterWithBackend

import helpers
from backends.experts import experts_linear
from draft_tree import DynamicTree
from drafters import RootOnly
from drafts.ngram_draft import Ngram, NgramDrafter
from eagle_draft import EagleDrafter
from files.checkpoint import WeightFiles
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import (
    COMPILER,
    OPERATORS,
    Mixture,
    decode,
    engine_for,
    golden_head,
    golden_target,
    rounded,
    slow,
)
from model import ModelConfig, RotaryEmbeddings, Transformer
from quantize import FORMATS, Linear, Quantization
from random_model import watch_loading
from reference import TORCH, choose, use_backend
from run import quantize as run_quantize
from run.generate import main
from scripts.train import train_eagle, training
from tiny_models import SIZES, random_model

OURS = partial(choose, torch.device("cpu"))
CONFIG = ModelConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=97, n_experts=4,
    experts_per_token=2,
)  # fmt: skip
ROWS = {  # how rows may be spread over eight experts
    "one row": [5],
    "one token": [6, 1],
    "one expert": [3] * 15,
    "tree": [(7 * i + i // 3) % 8 for i in range(120)],
    "uneven": [2] * 40 + [7] + [0] * 9,
}


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(experts=8, n=48, k=64, dtype=torch.float32):
    """A stack of random weights, [E, N, K]."""
    return (noise(experts, n, k) / k**0.5).to(dtype)


def inputs(expert, k=64, dtype=torch.float32):
    """Random rows and the expert of each."""
    return noise(len(expert), k, seed=1, dtype=dtype), torch.tensor(expert)


def by_rows(x, weight, expert):
    """A third way, one row at a time."""
    return torch.stack([weight[e] @ row for row, e in zip(x, expert)])


# ----------------------------------------------------------------------------------------- operator


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_meets_its_expert(rows, dtype, atol):
    (x, expert), weight = inputs(ROWS[rows], dtype=dtype), weights(dtype=dtype)
    want = by_rows(x.float(), weight.float(), expert)
    for product in (OURS(dtype).experts_linear, experts_linear, TORCH.experts_linear):
        y = product(x, weight, expert)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), want, atol=atol, rtol=0)


def test_idle_experts_are_not_read():
    (x, expert), weight = inputs([2, 5, 2]), weights()
    want = experts_linear(x, weight, expert)
    weight[[0, 1, 3, 4, 6, 7]] = float("nan")
    assert torch.equal(experts_linear(x, weight, expert), want)
    assert TORCH.experts_linear(x, weight, expert).isfinite().all()  # computed, but not chosen


def test_registration():
    x, expert = inputs(ROWS["tree"])
    operator = torch.ops.gpt_eagle.experts_linear.default
    args = (x, weights(), expert)
    torch.library.opcheck(
        operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert experts_linear(*args).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[COMPILER, pytest.mark.slow])]
)
@pytest.mark.parametrize("format", ["float", "int4", *slow(["int8"])])  # int8 is traced as int4 is
def test_one_graph_for_every_routing(monkeypatch, backend, format):
    """Which experts are hit is data: it may not become a shape, or a guard, of the graph."""
    monkeypatch.setattr("backends.library._cpp_available", [False])
    layer = feed_forward(format)
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    step = torch.compile(layer.forward, backend=counter, fullgraph=True, dynamic=False)
    x = noise(2, 7, 64, seed=2)
    hit = set()
    for scale in (1.0, 0.0, -1.0):  # at 0 all experts tie: the first two for every token
        with torch.no_grad():
            torch.testing.assert_close(step(x * scale), layer(x * scale), atol=1e-5, rtol=1e-5)
            hit.add(len(layer.router(x * scale)[0].unique()))
    assert counter.frame_count == 1 and len(hit) > 1


# --------------------------------------------------------------------------------- layer and router


def feed_forward(format="float", dtype=torch.float32, chosen=2):
    """A random layer, its experts in a format. chosen: of each token"""
    torch.manual_seed(0)
    layer = Mixture(dataclasses.replace(CONFIG, experts_per_token=chosen))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    layer = layer.to(dtype).requires_grad_(False)
    if format != "float":
        layer.w13, layer.w2 = (rounded(format, e.weight, group=32) for e in (layer.w13, layer.w2))
    use_backend(layer, OURS(dtype))
    return layer


def test_the_layer_is_what_the_paper_says():
    """Source: Mixtral 2.1: y = sum of Softmax(TopK(x W_g)) SwiGLU_i(x), a token at a time."""
    layer = feed_forward()
    x = noise(2, 5, 64, seed=3)
    y = layer(x)
    for b, t in ((b, t) for b in range(2) for t in range(5)):
        best = (layer.router.weight @ x[b, t]).topk(2)
        want = torch.zeros(64)
        for share, e in zip(best.values.softmax(0), best.indices):
            gate, up = (layer.w13.weight[e] @ x[b, t]).chunk(2)
            want += share * (layer.w2.weight[e] @ (F.silu(gate) * up))
        torch.testing.assert_close(y[b, t], want, atol=1e-5, rtol=0)


def test_equal_experts_are_taken_in_their_order():
    router = feed_forward().router
    router.weight[:] = router.weight[3]
    router.weight[0] *= -1
    x = noise(1, 50, 64, seed=4)
    expert, share = router(x)
    first = (x @ router.weight[3] > 0)[..., None]
    assert torch.equal(expert, torch.where(first, torch.tensor([1, 2]), torch.tensor([0, 1])))
    assert torch.equal(share[first[..., 0]], torch.full((int(first.sum()), 2), 0.5))


@OPERATORS
def test_a_token_may_have_one_expert():
    """Its number is a strided column of those of all experts."""
    layer = feed_forward(dtype=torch.bfloat16, chosen=1)
    x = noise(2, 5, 64, seed=3, dtype=torch.bfloat16)
    fast = layer(x)
    use_backend(layer, TORCH)
    torch.testing.assert_close(fast, layer(x), atol=0.02, rtol=0.02)


def test_the_router_ranks_in_fp32():
    """In bf16 these two experts tie, and the wrong one would come first."""
    router = feed_forward(dtype=torch.bfloat16).router
    router.weight[:] = 0
    router.weight[1:3, :2] = torch.tensor([[1.0, 0.0], [1.0, 2**-9]])
    expert, _ = router(torch.ones(1, 1, 64, dtype=torch.bfloat16))
    assert expert[0, 0].tolist() == [2, 1]


# ---------------------------------------------------------------------------------------- quantized


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ["one row", "uneven"])
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_experts(format, rows, dtype):
    """A stack computes what its definition says; test_weights.py has the bits of each expert, in every layout."""
    (x, expert), weight = inputs(ROWS[rows], dtype=dtype), weights(n=70)
    stack = rounded(format, weight, group=32)
    y = stack(x, expert)
    without = TORCH.experts_matmul(x, stack.record, expert)
    assert y.dtype == without.dtype == dtype
    torch.testing.assert_close(without, y, atol=1e-5, rtol=max(1e-5, torch.finfo(dtype).eps))
    exact = by_rows(x.float(), stack.dequantize(), expert)
    torch.testing.assert_close(without.float(), exact, atol=4e-2, rtol=0)
    alone = [rounded(format, each, group=32).dequantize() for each in weight]
    assert torch.equal(stack.dequantize(), torch.stack(alone))


# ------------------------------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A random Mixtral as Hugging Face saves it, in several shards."""
    sizes = {
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 128,
    }
    model = random_model("Mixtral", SIZES | sizes)
    directory = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A random Qwen3-MoE as Hugging Face saves it: many small experts, and a dense layer between.

    With few tokens, a draft that is no better than chance is right now and then.
    """
    sizes = {
        "vocab_size": 24, "moe_intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 16, "num_experts": 16,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [1], "max_position_embeddings": 128,
    }  # fmt: skip
    model = random_model("Qwen3Moe", SIZES | sizes)
    directory = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def mixture(request):
    """The directory of a parameter's name."""
    return request.getfixturevalue(request.param)


MIXTURES = pytest.mark.parametrize("mixture", ["mixtral", "qwen"], indirect=True)


def changed(mixtral, out, config=None, leave_out=None, **tensors):
    """A copy in one file, with a changed config, without a tensor, or with other tensors."""
    files = WeightFiles(mixtral)
    content = {
        name: files.read(name).clone() for name in files.readers if name != leave_out
    } | tensors
    out.mkdir()
    save_file(content, out / "model.safetensors", {"format": "pt"})
    raw = json.loads((mixtral / "config.json").read_text()) | (config or {})
    (out / "config.json").write_text(json.dumps(raw))
    return out


EXPERT = "model.layers.1.block_sparse_moe.experts.2."


def refused(directory, **options):
    with pytest.raises(ValueError) as caught:
        load_model(directory, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_stacks_hold_gate_above_up(mixtral):
    model, files = load_model(mixtral), WeightFiles(mixtral)
    moe = "model.layers.1.block_sparse_moe."
    layer = model.layers[1]
    assert torch.equal(layer.router.weight, files.read(f"{moe}gate.weight"))
    for e in range(4):
        gate, up, down = (files.read(f"{moe}experts.{e}.{w}.weight") for w in ("w1", "w3", "w2"))
        assert torch.equal(layer.w13.weight[e], torch.cat((gate, up)))
        assert torch.equal(layer.w2.weight[e], down)


@MIXTURES
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_on_load_and_on_disk_are_the_same(mixture, tmp_path, format):
    quant = Quantization(format, 32)
    quantize_directory(mixture, tmp_path / "saved", quant)
    on_load, plain = load_model(mixture, quant=quant), load_model(mixture)
    saved = load_model(tmp_path / "saved")
    for i, (ours, theirs, full) in enumerate(zip(on_load.layers, saved.layers, plain.layers)):
        dense = not plain.config.has_experts(i)
        if not dense:  # a router stays what it is
            assert torch.equal(ours.router.weight, full.router.weight)
        for name in ("w13", "w2"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.format == format and (a.experts == 0) == dense
            assert torch.equal(a.data, b.data) and a.packed == b.packed
            error = (a.dequantize() - getattr(full, name).weight).std() / 0.15
            assert 1e-3 < error < {"int8": 0.02, "int4": 0.1}[format]


@MIXTURES
@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_model_is_its_rounded_weights(mixture, format):
    """Logits of a quantized mixture are those of the float model with rounded weights, but for the activations."""
    torch.manual_seed(6)
    tokens, positions = torch.randint(0, 24, (2, 20)), torch.arange(20).expand(2, -1)
    model, rounded = load_model(mixture, quant=Quantization(format, 32)), load_model(mixture)
    plain = copy.deepcopy(rounded)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.packed:
            rounded.get_submodule(name).weight.data = module.dequantize()
    logits = [m.logits(m(tokens, positions)).detach() for m in (model, rounded, plain)]
    near, far = ((logits[1] - other).abs().mean() for other in (logits[0], logits[2]))
    assert near < (0.5 if format == "int4" else 1.5) * far


def test_missing_experts_are_named(mixtral, tmp_path):
    name = EXPERT + "w3.weight"
    assert name in refused(changed(mixtral, tmp_path / "without", leave_out=name))
    assert name in refused(changed(mixtral, tmp_path / "narrow", **{name: torch.ones(96, 63)}))


def index_of(directory) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def without_a_shard(mixtral, out, also_in_index=False):
    """A copy without the files that hold `EXPERT`, which the index still names, or does not."""
    shutil.copytree(mixtral, out)
    index = index_of(out)
    gone = {file for name, file in index.items() if name.startswith(EXPERT)}
    for file in gone:
        (out / file).unlink()
    kept = {name: file for name, file in index.items() if not (also_in_index and file in gone)}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    return sorted(gone)[0]


def told(capsys, program, *argv) -> str:
    return helpers.refused(capsys, program, [str(a) for a in argv])


@pytest.mark.parametrize("mixture, change, words", [
    ("mixtral", {"num_local_experts": 8}, "num_local_experts 8, and the weights hold 4; set it to 4 in config.json"),
    ("mixtral", {"num_local_experts": 2}, "num_local_experts 2, and the weights hold 4; set it to 4 in config.json"),
    ("mixtral", {"num_local_experts": "4"}, "config.json: num_local_experts must be a whole number from 1 to 4096; it is '4'; correct it"),
    ("mixtral", {"num_experts_per_tok": None}, "config.json: the key 'num_experts_per_tok' is missing; correct it"),
    ("mixtral", {"num_experts_per_tok": 2.0}, "num_experts_per_tok must be a whole number from 1 to 4096; it is 2.0"),
    ("mixtral", {"num_experts_per_tok": 9}, "1 to num_local_experts (4); it is 9"),
    ("mixtral", {"num_experts_per_tok": 0}, "it is 0"),
    ("mixtral", {"intermediate_size": 80}, "[160, 64]"),
    ("mixtral", {"architectures": ["LlamaForCausalLM"]}, "model.layers.0.mlp.down_proj.weight"),
    ("qwen", {"num_local_experts": 8}, "the config says num_local_experts 8, and the weights hold 16; set it to 16 in config.json"),
    ("qwen", {"num_experts": 32}, "the config says num_experts 32, and the weights hold 16; set it to 16 in config.json"),
    ("qwen", {"num_local_experts": None}, "config.json: the key 'num_experts' is missing; correct it"),
    ("qwen", {"num_experts_per_tok": 17}, "num_experts_per_tok must be 1 to num_local_experts (16); it is 17; correct it"),
    ("qwen", {"moe_intermediate_size": None}, "the key 'moe_intermediate_size' is missing"),
    ("qwen", {"moe_intermediate_size": 48}, "experts.0.gate_proj.weight"),
    ("qwen", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1 to 1048576; it is 0; correct it"),
    ("qwen", {"decoder_sparse_step": 2}, "6 missing weight(s): model.layers.0.mlp.down_proj.weight"),
    ("qwen", {"mlp_only_layers": [3]}, "mlp_only_layers must be below num_hidden_layers (3); one is 3; correct it"),
    ("qwen", {"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layers, whole numbers from 0 on; it is [-1]"),
    ("qwen", {"mlp_only_layers": [2]}, "missing weight(s): model.layers.1.mlp.experts.0"),
    ("qwen", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false; it is 1"),
], indirect=["mixture"])  # fmt: skip
def test_a_wrong_config_is_one_line_and_status_2(mixture, tmp_path, capsys, change, words):
    out = changed(mixture, tmp_path / "bad", change)
    assert words in told(capsys, main, "--checkpoint", out, "--prompt_ids", "1,2")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_one_line_and_status_2(mixtral, tmp_path, capsys, indexed):
    """Every command that reads a checkpoint names the file, or the first weight that no file has."""
    bad, out = tmp_path / "bad", tmp_path / "out"
    missing = without_a_shard(mixtral, bad, also_in_index=not indexed)
    if not indexed:
        missing = min(set(index_of(mixtral)) - set(index_of(bad)))
    said = told(capsys, main, "--checkpoint", bad, "--prompt_ids", "1,2")
    if indexed:
        said += told(
            capsys, run_quantize.main, "--checkpoint", bad, "--quant", "int8", "--out", out
        )
    rule = f"the index names {missing}, which is missing" if indexed else missing
    assert said.count(rule) == 1 + indexed and not out.exists()


def test_files_count_and_not_the_index(mixtral, tmp_path):
    """An index that forgets an expert whose file it names for other tensors loses nothing."""
    out = shutil.copytree(mixtral, tmp_path / "whole")
    index = index_of(out)
    kept = {name: file for name, file in index.items() if not name.startswith(EXPERT + "w1")}
    assert set(kept.values()) == set(index.values())
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    got, want = (load_model(path).layers[1].w13.weight for path in (out, mixtral))
    assert torch.equal(got, want)


@OPERATORS
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.slow  # two processes each, 4 s; test_quantized_files.py has a fast one
@pytest.mark.parametrize("size", [(512, 4), (1024, 8)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_loading_quantized_needs_little_more_than_the_result(tmp_path, format, size):
    """Experts are rounded one by one, so that no layer is ever there in float. size: width and layers."""
    directories = []
    for name, dim, layers in (("small", 128, 1), ("large", *size)):
        config = transformers.MixtralConfig(
            vocab_size=200, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, dtype="bfloat16",
        )  # fmt: skip
        transformers.MixtralForCausalLM(config).bfloat16().save_pretrained(tmp_path / name)
        directories.append(tmp_path / name)
    small = 500_000 if size[0] == 512 else 0
    _, (peak_bytes, model_bytes) = watch_loading(format, directories, small)
    assert model_bytes > (30e6 if size[0] == 512 else 200e6)
    assert 0.9 <= peak_bytes / model_bytes <= 1.2


# ----------------------------------------------------------------------------------------- decoding


@OPERATORS
@pytest.mark.parametrize("compile", [False, True], ids=["modules", "one call"])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_many_small_experts_decode_exactly(qwen, format, compile):
    """No margin in bf16, in dense layers and in mixtures, by the modules and by the C++ call over all layers."""
    target = load_model(qwen, torch.bfloat16, quant=Quantization(format, 32) if format else None)
    head = train_eagle.make_head(train_eagle.TrainConfig(init="feature"), target, [])
    head = head.bfloat16().requires_grad_(False)
    head.ropes = RotaryEmbeddings(head.config.model.ropes)  # which stay in fp32
    prompts = [[(5 * i + 7 * j) % 24 for j in range(5 + i)] for i in range(2)]

    def decoded(drafter):
        options = {"max_new_tokens": 32, "ignore_eos": True, "batch_size": 2, "compile": compile}
        engine = engine_for(target, drafter, **options)
        assert (target.program is not None) == compile
        return decode(engine, *prompts)

    plain = decoded(RootOnly())
    eagle = EagleDrafter(head, target, DynamicTree(depth=2, topk=4, size=10))
    for drafter in (eagle, NgramDrafter(Ngram(tokens=4, branches=1))):
        drafted = decoded(drafter)
        assert drafted.history == plain.history
        assert sum(drafted.stats.accept_lengths) / len(drafted.stats.accept_lengths) > 0.15


def test_a_head_does_not_take_over_the_targets_experts():
    target = golden_target("models/target_mixtral")
    head = train_eagle.make_head(train_eagle.TrainConfig(), target, [])
    assert target.config.n_experts == 4 and head.config.model.n_experts == 0
    assert head.config.model.ffn_dim == target.config.ffn_dim
    loaded = golden_head("models/head_eagle12_mixtral", target)
    assert not any(getattr(module, "experts", 0) for module in loaded.modules())


# ----------------------------------------------------------------------------------------- training


def test_the_optimizers_take_every_parameter_once():
    model, config = Transformer(CONFIG), train_eagle.TrainConfig(device="cpu", optimizer="muon")
    optimizers = training.make_optimizers(model, config)
    taken = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(taken) == len(set(map(id, taken))) == len(list(model.parameters()))
