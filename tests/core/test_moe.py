"""Mixtures of experts: the operator, the router, quantized experts, loading and its mistakes, the small demo.

Logits against Hugging Face, the cache and trees are test_model.py's; whole decoding is test_lossless.py's and
test_golden.py's.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounterWithBackend

import quantize
from draft_tree import DynamicTree, StaticTree
from drafters import RootOnly
from eagle_draft import EagleDrafter, load_head
from extras.ngram_draft import Ngram, NgramDrafter
from generate import main
from helpers import GOLDEN, decode, engine_for, golden_head, golden_target, slow
from hf.checkpoint import Quantization, WeightFiles
from hf.weights import load_model
from model import ExpertLinear, ModelConfig, MoEFeedForward, Transformer, rope_frequencies
from ops.cpu import build
from ops.experts import experts_linear, experts_linear_reference
from ops.qmatmul import grouped_reference
from quantize import FORMATS, QuantExperts, quantize_directory
from scripts.bench import inflate
from scripts.train import train_eagle, training

COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler"
)
OPERATORS = pytest.mark.skipif(bool(build.load_operators()), reason=build.load_operators() or "-")
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


def weights(experts=8, n=48, k=64, seed=0, dtype=torch.float32):
    """A stack of random weights, [E, N, K]."""
    return (torch.randn(experts, n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5).to(
        dtype
    )


def inputs(expert, k=64, seed=1, dtype=torch.float32):
    """Random rows and the expert of each."""
    return torch.randn(len(expert), k, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ), torch.tensor(expert)


def by_rows(x, weight, expert):
    """A third way, one row at a time."""
    return torch.stack([weight[e] @ row for row, e in zip(x, expert)])


# ----------------------------------------------------------------------------------------- operator


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_meets_its_expert(rows, dtype, atol):
    (x, expert), weight = inputs(ROWS[rows], dtype=dtype), weights(dtype=dtype)
    want = by_rows(x.float(), weight.float(), expert)
    for product in (experts_linear, experts_linear_reference):
        y = product(x, weight, expert)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), want, atol=atol, rtol=0)


def test_idle_experts_are_not_read():
    (x, expert), weight = inputs([2, 5, 2]), weights()
    want = experts_linear(x, weight, expert)
    weight[[0, 1, 3, 4, 6, 7]] = float("nan")
    assert torch.equal(experts_linear(x, weight, expert), want)
    assert experts_linear_reference(x, weight, expert).isfinite().all()  # computed, but not chosen


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
@pytest.mark.parametrize(
    "format",
    ["float", pytest.param("int8", marks=OPERATORS), pytest.param("int4", marks=OPERATORS)],
)
def test_one_graph_for_every_routing(backend, format):
    """Which experts are hit is data: it may not become a shape, or a guard, of the graph."""
    layer = feed_forward(format)
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    step = torch.compile(layer.forward, backend=counter, fullgraph=True, dynamic=False)
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2))
    hit = set()
    for scale in (1.0, 0.0, -1.0):  # at 0 all experts tie: the first two for every token
        with torch.no_grad():
            torch.testing.assert_close(step(x * scale), layer(x * scale), atol=1e-5, rtol=1e-5)
            hit.add(len(layer.router(x * scale)[0].unique()))
    assert counter.frame_count == 1 and len(hit) > 1


# --------------------------------------------------------------------------------- layer and router


def feed_forward(format="float", group_size=32, dtype=torch.float32):
    """A random layer, its experts in a format."""
    torch.manual_seed(0)
    layer = MoEFeedForward(CONFIG)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    layer = layer.to(dtype).requires_grad_(False)
    if format != "float":
        layer.w13, layer.w2 = (
            quantized(e.weight, format, group_size) for e in (layer.w13, layer.w2)
        )
    return layer


def quantized(weight, format, group_size=32):
    kind = FORMATS[format]
    return QuantExperts(kind, (kind.encode(w, group_size) for w in weight), len(weight))


def test_the_layer_is_what_the_paper_says():
    """Source: Mixtral 2.1: y = sum of Softmax(TopK(x W_g)) SwiGLU_i(x), a token at a time."""
    layer = feed_forward()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
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
    x = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(4))
    expert, share = router(x)
    first = (x @ router.weight[3] > 0)[..., None]
    assert torch.equal(expert, torch.where(first, torch.tensor([1, 2]), torch.tensor([0, 1])))
    assert torch.equal(share[first[..., 0]], torch.full((int(first.sum()), 2), 0.5))


def test_the_router_ranks_in_fp32():
    """In bf16 these two experts tie, and the wrong one would come first."""
    router = feed_forward(dtype=torch.bfloat16).router
    router.weight[:] = 0
    router.weight[1, :2], router.weight[2, :2] = (
        torch.tensor([1.0, 0.0]),
        torch.tensor([1.0, 2**-9]),
    )
    expert, _ = router(torch.ones(1, 1, 64, dtype=torch.bfloat16))
    assert expert[0, 0].tolist() == [2, 1]


@OPERATORS
@pytest.mark.parametrize(
    "format, dtype",
    [("float", torch.bfloat16), *itertools.product(FORMATS, (torch.float32, torch.bfloat16))],
    ids=str,
)
def test_a_token_does_not_depend_on_the_others(format, dtype):
    """Experts on our products give a token the same bits alone, in a tree and in a prompt."""
    layer = feed_forward(format, dtype=dtype)
    x = torch.randn(1, 60, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    expert, _ = layer.router(x)
    rows = x[0].repeat_interleave(2, 0)
    together = layer.w13(rows, expert.flatten())
    for i in range(120):
        assert torch.equal(layer.w13(rows[i : i + 1], expert.flatten()[i : i + 1])[0], together[i])


# ---------------------------------------------------------------------------------------- quantized


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_experts(format, rows, dtype):
    """Stacked experts compute what a layer of each computes, bit for bit, and that is what the reference says."""
    (x, expert), weight, kind = inputs(ROWS[rows], dtype=dtype), weights(n=70), FORMATS[format]
    stack, alone = quantized(weight, format), [kind.from_float(w, None, 32) for w in weight]
    y = stack(x, expert)
    assert y.dtype == dtype and torch.equal(
        y, torch.stack([alone[e](row[None])[0] for row, e in zip(x, expert)])
    )
    half = {"int4": 8, "int8": 128}[format]
    want = torch.stack(
        [
            grouped_reference(r[None].float(), *alone[e].codes_and_scale(), half)[0]
            for r, e in zip(x, expert)
        ]
    )
    atol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y.float(), want, atol=atol, rtol=0)
    assert torch.equal(stack.dequantize(), torch.stack([layer.dequantize() for layer in alone]))


@OPERATORS
@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_expert_is_an_error(format):
    stack, x = quantized(weights(), format), torch.randn(2, 64)
    for expert in ([0, 8], [-1, 0]):
        with pytest.raises(RuntimeError, match="no expert"):
            stack(x, torch.tensor(expert))
    with pytest.raises(RuntimeError, match="one int64 per row"):
        stack(x, torch.tensor([1]))


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", FORMATS)
def test_without_a_compiler(format, rows, dtype, monkeypatch):
    """The references serve one expert after the other, and compute what the operators compute."""
    (x, expert), weight = inputs(ROWS[rows], dtype=dtype), weights(n=70)
    stack = quantized(weight, format)
    want = stack(x, expert)
    monkeypatch.setattr("ops.library._cpp_available", [False])
    got = stack(x, expert)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=1e-5, rtol=max(1e-5, torch.finfo(dtype).eps))
    exact = by_rows(x.float(), stack.dequantize(), expert)
    torch.testing.assert_close(got.float(), exact, atol=4e-2, rtol=0)


# ------------------------------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A random Mixtral as Hugging Face saves it, in several shards."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    directory = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A random Qwen3-MoE as Hugging Face saves it: many small experts, and a dense layer between.

    With few tokens, a draft that is no better than chance is right now and then.
    """
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=24, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=True, mlp_only_layers=[1], max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.15)
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


def refused(directory, **options):
    with pytest.raises(ValueError) as caught:
        load_model(directory, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_stacks_hold_gate_above_up(mixtral):
    model, files = load_model(mixtral), WeightFiles(mixtral)
    moe = "model.layers.1.block_sparse_moe."
    layer = model.layers[1].ffn
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
    on_load, saved, plain = (
        load_model(mixture, quant=quant),
        load_model(tmp_path / "saved"),
        load_model(mixture),
    )
    for i, (ours, theirs, full) in enumerate(zip(on_load.layers, saved.layers, plain.layers)):
        dense = i in plain.config.dense_layers
        assert dense or torch.equal(
            ours.ffn.router.weight, full.ffn.router.weight
        )  # a router stays what it is
        for name in ("w13", "w2"):
            a, b = getattr(ours.ffn, name), getattr(theirs.ffn, name)
            assert isinstance(a, FORMATS[format] if dense else QuantExperts)
            assert torch.equal(a.packed, b.packed) and torch.equal(a.scale, b.scale)
            error = (a.dequantize() - getattr(full.ffn, name).weight).std() / 0.15
            assert 1e-3 < error < {"int8": 0.02, "int4": 0.1}[format]


@MIXTURES
@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_model_is_its_rounded_weights(mixture, format):
    """Logits of a quantized mixture are those of the float model with rounded weights, but for the activations."""
    tokens = torch.randint(0, 24, (2, 20), generator=torch.Generator().manual_seed(6))
    positions = torch.arange(20).expand(2, -1)
    model, rounded = load_model(mixture, quant=Quantization(format, 32)), load_model(mixture)
    plain = copy.deepcopy(rounded)
    for name, module in model.named_modules():
        if isinstance(module, (*FORMATS.values(), QuantExperts)):
            rounded.get_submodule(name).weight.data = module.dequantize()
    logits = [m.logits(m(tokens, positions)).detach() for m in (model, rounded, plain)]
    near, far = ((logits[1] - other).abs().mean() for other in (logits[0], logits[2]))
    assert near < (0.5 if format == "int4" else 1.5) * far


def test_counts_that_the_weights_contradict(mixtral, tmp_path):
    for number, (change, *words) in enumerate((
        ({"num_local_experts": 8}, "num_local_experts 8", "hold 4"),
        ({"num_local_experts": 2}, "num_local_experts 2", "hold 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok", "1 to num_local_experts (4)", "it is 5"),
        ({"num_experts_per_tok": 0}, "it is 0"),
        ({"intermediate_size": 80}, "experts.0.w1.weight", "[160, 64]"),
    )):  # fmt: skip
        message = refused(changed(mixtral, tmp_path / str(number), change))
        assert all(word in message for word in words), message


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts_per_tok"])
def test_a_missing_count_is_named(mixtral, tmp_path, key):
    out = changed(mixtral, tmp_path / "m")
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != key}))
    assert key in refused(out)


def test_missing_experts_are_named(mixtral, tmp_path):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert name in refused(changed(mixtral, tmp_path / "without", leave_out=name))
    assert name in refused(changed(mixtral, tmp_path / "narrow", **{name: torch.ones(96, 63)}))
    copied = shutil.copytree(mixtral, tmp_path / "shard")
    shard = json.loads((copied / "model.safetensors.index.json").read_text())["weight_map"][name]
    (copied / shard).unlink()
    assert shard in refused(copied)


EXPERT = "model.layers.1.block_sparse_moe.experts.2."


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
    """The one line that a command ends with, at status 2."""
    with pytest.raises(SystemExit) as stop:
        program([str(a) for a in argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    return err


def run_inflate(argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["inflate.py", *argv])
        inflate.main()


def commands(directory, out):
    """Every command that reads a checkpoint."""
    yield main, ("--checkpoint", directory, "--set", "prompt_ids=1,2")
    shape = ("--shape", "mixtral-tiny,n_experts=4")
    yield run_inflate, ("--checkpoint", directory, *shape, "--out", out)


@pytest.mark.parametrize("change, words", [
    ({"num_local_experts": 8}, "num_local_experts 8, and the weights hold 4; set it to 4 in config.json"),
    ({"num_local_experts": 2}, "num_local_experts 2, and the weights hold 4; set it to 4 in config.json"),
    ({"num_local_experts": "4"}, "config.json: num_local_experts must be a whole number from 1 to 4096; it is '4'; correct it"),
    ({"num_experts_per_tok": None}, "config.json: the key 'num_experts_per_tok' is missing; correct it"),
    ({"num_experts_per_tok": 2.0}, "num_experts_per_tok must be a whole number from 1 to 4096; it is 2.0"),
    ({"num_experts_per_tok": 9}, "1 to num_local_experts (4); it is 9"),
    ({"num_experts_per_tok": 0}, "it is 0"),
    ({"architectures": ["LlamaForCausalLM"]}, "model.layers.0.mlp.down_proj.weight"),
])  # fmt: skip
def test_a_wrong_config_is_one_line_and_status_2(mixtral, tmp_path, capsys, change, words):
    out = changed(mixtral, tmp_path / "bad", change)
    assert words in told(capsys, main, "--checkpoint", out, "--set", "prompt_ids=1,2")


@pytest.mark.parametrize("change, words", [
    ({"num_local_experts": 8}, "the config says num_local_experts 8, and the weights hold 16; set it to 16 in config.json"),
    ({"num_experts": 32}, "the config says num_experts 32, and the weights hold 16; set it to 16 in config.json"),
    ({"num_local_experts": None}, "config.json: the key 'num_experts' is missing; correct it"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok must be 1 to num_local_experts (16); it is 17; correct it"),
    ({"moe_intermediate_size": None}, "the key 'moe_intermediate_size' is missing"),
    ({"moe_intermediate_size": 48}, "experts.0.gate_proj.weight"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1 to 1048576; it is 0; correct it"),
    ({"decoder_sparse_step": 2}, "6 missing weight(s): model.layers.0.mlp.down_proj.weight"),
    ({"mlp_only_layers": [3]}, "mlp_only_layers must be below num_hidden_layers (3); one is 3; correct it"),
    ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layers, whole numbers from 0 on; it is [-1]"),
    ({"mlp_only_layers": [2]}, "missing weight(s): model.layers.1.mlp.experts.0"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false; it is 1"),
])  # fmt: skip
def test_a_wrong_config_of_a_qwen_is_one_line_and_status_2(qwen, tmp_path, capsys, change, words):
    out = changed(qwen, tmp_path / "bad", change)
    assert words in told(capsys, main, "--checkpoint", out, "--set", "prompt_ids=1,2")


def test_a_missing_shard_is_one_line_and_status_2(mixtral, tmp_path, capsys):
    shard = without_a_shard(mixtral, tmp_path / "bad")
    for program, argv in commands(tmp_path / "bad", tmp_path / "out"):
        assert f"the index names {shard}, which is missing" in told(capsys, program, *argv)
    argv = ("--checkpoint", tmp_path / "bad", "--quant", "int8", "--out", tmp_path / "out")
    assert shard in told(capsys, quantize.main, *argv)
    assert not (tmp_path / "out").exists()


def test_an_index_without_an_expert_is_one_line_and_status_2(mixtral, tmp_path, capsys):
    without_a_shard(mixtral, tmp_path / "bad", also_in_index=True)
    missing = sorted(set(index_of(mixtral)) - set(index_of(tmp_path / "bad")))
    assert any(name.startswith(EXPERT) for name in missing)
    for program, argv in commands(tmp_path / "bad", tmp_path / "out"):
        assert missing[0] in told(capsys, program, *argv)


def test_files_count_and_not_the_index(mixtral, tmp_path):
    """An index that forgets an expert whose file it names for other tensors loses nothing."""
    out = shutil.copytree(mixtral, tmp_path / "whole")
    kept = {
        name: file for name, file in index_of(out).items() if not name.startswith(EXPERT + "w1")
    }
    assert set(kept.values()) == set(index_of(out).values())
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    assert torch.equal(
        load_model(out).layers[1].ffn.w13.weight, load_model(mixtral).layers[1].ffn.w13.weight
    )


def test_a_group_that_does_not_divide_an_experts_width(mixtral):
    message = refused(mixtral, quant=Quantization("int4", 64))
    assert "ffn.w2.weight" in message and "96" in message and "group_size=32" in message


WATCH = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hf.weights import load_model
from hf.checkpoint import Quantization

def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024

def watch():
    global peak
    while not done.wait(0.0005):
        peak = max(peak, anonymous())

kept = []
for folder in sys.argv[3:]:
    before, done = anonymous(), threading.Event()
    peak = before
    thread = threading.Thread(target=watch)
    thread.start()
    model = load_model(Path(folder), quant=Quantization.of(sys.argv[2], 0))
    done.set()
    thread.join()
    print(max(peak, anonymous()) - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
    kept.append(model)
"""


def watch_loading(
    quant: str, folders: list[Path], small_blocks_bytes: int = 0
) -> list[tuple[int, int]]:
    """Load models one after the other in one process: the first of a kind makes what is only ever made once.

    small_blocks_bytes: the allocator gives larger blocks back, as those of a real model are; 0: its own bound
    Returns: by how many bytes memory grew at most, and the model's bytes, for each folder.
    """
    root = str(Path(quantize.__file__).parent)
    # one thread: two that wait for each other take 8 times the time where others work too
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if small_blocks_bytes:
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(small_blocks_bytes)}
    command = [sys.executable, "-c", WATCH, root, quant, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


@OPERATORS
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc"
)
@pytest.mark.parametrize(
    "format, size",
    [("int8", (512, 4)), *slow([("int4", (512, 4)), ("int8", (1024, 8)), ("int4", (1024, 8))])],
    ids=str,
)
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
    print(
        f"{format}: {model_bytes / 1e6:.0f} MB kept, at most {peak_bytes / 1e6:.0f} MB while loading"
    )
    assert 0.9 <= peak_bytes / model_bytes <= 1.2


# ----------------------------------------------------------------------------------------- decoding


@OPERATORS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle_decodes_quantized_experts(temperature):
    """Rows of quantized layers do not depend on each other, so that trees and single tokens seldom disagree."""
    quant = Quantization("int8")
    target = load_model(GOLDEN / "models/target_mixtral", torch.float32, quant=quant)
    assert isinstance(target.layers[0].ffn.w2, QuantExperts)
    head = load_head(GOLDEN / "models/head_eagle12_mixtral", target, quant)
    drafter = EagleDrafter(head, target, DynamicTree(depth=6, topk=10, size=60))
    options = {
        "temperature": temperature,
        "seed": 7,
        "max_new_tokens": 40,
        "ignore_eos": True,
        "batch_size": 8,
    }
    prompts = [[(31 * i + 7 * j) % 97 for j in range(5 + i)] for i in range(8)]
    drafted, plain = (
        decode(engine_for(target, d, **options), *prompts) for d in (drafter, RootOnly())
    )
    same = sum(drafted.history[row] == plain.history[row] for row in range(8))
    assert same >= 6
    assert sum(drafted.stats.accept_lengths) / len(drafted.stats.accept_lengths) > 0.3


@OPERATORS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bf16_experts_decode_exactly(temperature):
    """No margin: routers, experts and attention give a row the same bits in a tree and alone."""
    target = load_model(GOLDEN / "models/target_mixtral", torch.bfloat16)
    head = load_head(GOLDEN / "models/head_eagle12_mixtral", target)
    options = {
        "temperature": temperature,
        "seed": 7,
        "max_new_tokens": 60,
        "ignore_eos": True,
        "batch_size": 4,
    }
    prompts = [[(31 * i + 7 * j) % 97 for j in range(5 + i)] for i in range(4)]
    plain = decode(engine_for(target, RootOnly(), **options), *prompts)
    for tree in (DynamicTree(depth=6, topk=10, size=60), StaticTree.chain(5)):
        drafted = decode(
            engine_for(target, EagleDrafter(head, target, tree), **options),
            *prompts,
        )
        assert drafted.history == plain.history
        assert sum(drafted.stats.accept_lengths) / len(drafted.stats.accept_lengths) > 0.15


@OPERATORS
@pytest.mark.parametrize("compile", [False, True], ids=["modules", "one call"])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_many_small_experts_decode_exactly(qwen, format, compile):
    """No margin in bf16, in dense layers and in mixtures, by the modules and by the C++ call over all layers."""
    target = load_model(qwen, torch.bfloat16, quant=Quantization(format, 32) if format else None)
    head = (
        train_eagle.make_head(train_eagle.TrainConfig(init="feature"), target, [])
        .bfloat16()
        .requires_grad_(False)
    )
    head.rope_freq = rope_frequencies(head.config.model)  # which stay in fp32
    prompts = [[(5 * i + 7 * j) % 24 for j in range(5 + i)] for i in range(2)]

    def decoded(drafter):
        options = {"max_new_tokens": 32, "ignore_eos": True, "batch_size": 2, "compile": compile}
        engine = engine_for(target, drafter, **options)
        assert (target.fused is not None) == compile
        return decode(engine, *prompts)

    plain = decoded(RootOnly())
    drafters = [EagleDrafter(head, target, DynamicTree(depth=2, topk=4, size=10))]
    drafters += [NgramDrafter(Ngram(tokens=4, branches=1))]
    for drafter in drafters:
        drafted = decoded(drafter)
        assert drafted.history == plain.history
        assert sum(drafted.stats.accept_lengths) / len(drafted.stats.accept_lengths) > 0.15


def test_a_head_does_not_take_over_the_targets_experts():
    target = golden_target("models/target_mixtral")
    head = train_eagle.make_head(train_eagle.TrainConfig(), target, [])
    assert target.config.n_experts == 4 and head.config.model.n_experts == 0
    assert head.config.model.ffn_dim == target.config.ffn_dim
    loaded = golden_head("models/head_eagle12_mixtral", target)
    assert not any(isinstance(module, ExpertLinear) for module in loaded.modules())


# ----------------------------------------------------------------------------------------- training


def test_the_optimizers_take_every_parameter_once():
    model, config = Transformer(CONFIG), train_eagle.TrainConfig(device="cpu", optimizer="muon")
    optimizers = training.make_optimizers(model, config, lambda name: name.startswith("layers."))
    taken = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(taken) == len(set(map(id, taken))) == len(list(model.parameters()))
