"""GGUF files whose blocks run as they are: weights, logits, tokens with every drafter, wrong files.

The reference is the same file widened to fp32, which test_gguf.py holds against transformers.
Weights are equal, bit for bit. Logits differ, as activations are rounded to 8 bits before every
product: by half a step at most, s = largest / 127 of a block of 32 or 128. For normal numbers the
largest of 32 is 2.1 standard deviations, of 128 2.8, so the error of an activation is at most
2.8 / 127 / sqrt(12) = 0.6 % of it, and that of an output as much. Of the residual stream, two
layers make four such outputs of several products each, bf16 adds 0.2 % a rounding: below 3 % of the
logits' spread in all, and a wrong row, scale or order of rows gives 30 % and more.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_gguf import BPE_METADATA, NAN, gguf_tensors, hf_model, metadata_of
from test_tp import check_close, options_of, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import backends.block_planes
import backends.blocks
import backends.library
from backends.triton.layout import BLOCK_FORMS
from backends.weight import Embedding
from files.gguf import GgufFile
from files.weights import export_weights, keeps_blocks, load_model
from helpers import (
    BLOCK_KINDS,
    OPERATORS,
    PROMPTS,
    Operators,
    gguf_blocks,
    pairwise,
    set_halves,
    trimmed_head,
)
from kv_cache import KVCache, causal_window
from model import weight_names
from quantize import BLOCKS, Linear, Quantization
from reference import choose, use_backend
from run.generate import generate, load
from run.options import GenerateConfig
from tiny_models import Kind, refused, write

pytestmark = OPERATORS
IN_BLOCKS = Quantization(BLOCKS, saved=True, every_type=True)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_down_exps": "Q6_K", "output": "Q6_K"}
FALLBACK = {"attn_v": "Q5_0", "attn_q": "Q4_1", "ffn_up": "Q3_K", "token_embd": "Q8_0"}
CASES = {  # family, options, the type of most matrices, those of others by their name
    **{kind: ("Llama", {}, kind, {}) for kind in BLOCK_KINDS},
    "Q4_K_M": ("Llama", {}, "Q4_K", Q4_K_M | {"blk.1.attn_v": "Q4_K", "blk.1.ffn_down": "Q4_K"}),
    "tied": ("Llama", {"tie_word_embeddings": True}, "Q4_K", {"token_embd": "Q6_K"}),
    "biases": ("Qwen2", {}, "Q4_K", Q4_K_M),
    "many types": ("Llama", {"num_key_value_heads": 8}, "Q4_K", FALLBACK),
    "mixture": ("Mixtral", {"num_local_experts": 4}, "Q4_K", Q4_K_M),
    "int4": ("Mixtral", {"num_local_experts": 4}, "Q4_0", Q4_K_M),
    "tied floats": ("Llama", {"tie_word_embeddings": True}, "Q4_0", {"token_embd": "F16"}),
    "floats": ("Llama", {}, "Q4_0", {"token_embd": "F16", "output": "BF16", "ffn_down": "F32"}),
    "floats beside blocks": (
        "Llama",
        {},
        "Q8_0",
        {"token_embd": "F16", "attn_v": "F16", "attn_q": "BF16", "ffn_gate": "F32"},
    ),
}


def block_tensors(case: str) -> tuple[dict, dict]:
    """Metadata and tensors of a file with random blocks."""
    family, options, usual, others = CASES[case]
    model = hf_model(family, **SIZES | options)
    tensors = gguf_tensors(model)
    for number, (name, value) in enumerate(tensors.items()):
        kind = others.get(name.removesuffix(".weight"), others.get(name.split(".")[-2], usual))
        if value.ndim < 2 or "ffn_gate_inp" in name or kind == "F32":
            continue
        if kind == "F16":
            tensors[name] = (Kind.F16, value.astype(np.float16))
            continue
        if kind == "BF16":
            halves = torch.from_numpy(value).bfloat16().view(torch.int16).numpy()
            tensors[name] = (Kind.BF16, halves.view(np.uint8))
            continue
        inputs = value.shape[-1]
        blocks = gguf_blocks(kind, value.size // inputs, inputs, inputs**-0.5, number)
        tensors[name] = (Kind[kind], blocks.reshape(*value.shape[:-1], -1))
    return metadata_of(model) | BPE_METADATA, tensors


@pytest.fixture(scope="module")
def block_file(tmp_path_factory):
    """A function: the path of the file of a case, written once."""
    folder = tmp_path_factory.mktemp("blocks")
    return functools.cache(
        lambda case: write(folder / f"{case.replace(' ', '_')}.gguf", *block_tensors(case))
    )


LAYERS = {"embedding", "lm_head", "w13", "w2", "wo", "wqkv"}
WIDENED_ON_CUDA = {
    "Q2_K": LAYERS,
    "Q3_K": LAYERS,
    "MXFP4": LAYERS,
    "many types": {"w13"},  # of which one half is in Q3_K
    "tied floats": {"embedding", "lm_head"},
    "floats": {"embedding", "lm_head", "w2"},
    "floats beside blocks": {"embedding", "w13", "wqkv"},
}
IDS = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.logits(model(IDS[None], torch.arange(len(IDS))[None]))[0].float()


# ------------------------------------------------------------------------------ weights and logits


@pytest.mark.parametrize("case", CASES)
def test_weights_and_logits(block_file, case):
    path = block_file(case)
    kept = load_model(path, quant=IN_BLOCKS)
    wide = load_model(path, torch.float32)
    layers = dict(wide.named_modules())
    formats = set()
    for name, layer in kept.named_modules():
        if isinstance(layer, Linear):
            formats.add((layer.format, layer.experts > 0))
            numbers = layer.dequantize().float()
            want = layers[name].weight  # of which numbers beside blocks are rounded to bfloat16
            assert ((numbers == want) | (numbers == want.bfloat16().float())).all(), name
            if layer.bias is not None:
                assert torch.equal(layer.bias, layers[name].bias.bfloat16()), name
        if isinstance(layer, Embedding):
            formats.add("embedding")
            assert torch.equal(layer(IDS), wide.embedding.weight[IDS])
    assert (BLOCKS, False) in formats
    assert ((BLOCKS, True) in formats) == (case in ("mixture", "int4"))
    assert ("embedding" in formats) == ("floats" not in case)
    want = logits(wide)
    error = (logits(kept) - want).square().mean().sqrt() / want.std()
    assert want.std() > 0.3
    assert error < 0.03, error


def test_a_wrong_order_of_rows_is_seen(block_file, monkeypatch):
    """Queries and keys as llama.cpp's rotation has them break the bound."""
    path = block_file("many types")
    want = logits(load_model(path, torch.float32))
    blocks_of = GgufFile._blocks
    unturned = lambda self, name, part=None, heads=0: blocks_of(self, name, part)  # noqa: E731
    monkeypatch.setattr(GgufFile, "_blocks", unturned)
    error = (logits(load_model(path, quant=IN_BLOCKS)) - want).square().mean().sqrt() / want.std()
    assert error > 0.1


def test_a_tied_head_shares_the_embeddings_blocks(block_file):
    model = load_model(block_file("tied"), quant=IN_BLOCKS)
    assert model.lm_head.data.data_ptr() == model.embedding.data.data_ptr()
    untied = load_model(block_file("Q4_K"), quant=IN_BLOCKS)
    assert untied.lm_head.data.data_ptr() != untied.embedding.data.data_ptr()


@pytest.mark.parametrize("case", ["Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_memory(block_file, case):
    """Blocks take the file's bytes; scales of 6 bits take 8, and codes of 2 and 3 take 4."""
    model = load_model(block_file(case), quant=IN_BLOCKS)
    held = sum(value.nbytes for name, value in model.named_buffers() if name.endswith("data"))
    _, tensors = block_tensors(case)
    stored = sum(value[1].nbytes for value in tensors.values() if isinstance(value, tuple))
    share = {"Q2_K": 164 / 84, "Q3_K": 146 / 110, "Q4_K": 148 / 144, "Q5_K": 180 / 176}
    assert held == round(stored * share.get(case, 1))


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Blocks are packed as CUDA's matmuls read them, and multiplied by the reference."""
    monkeypatch.setattr(backends.blocks, "in_planes", lambda device: True)


@pytest.mark.parametrize("case", CASES)
def test_planes_of_cuda(block_file, as_on_cuda, case):
    """The numbers of ggml, bit for bit; in fp32 the matmuls are exact but for the order of sums."""
    path = block_file(case)
    wide = load_model(path, torch.float32)
    kept = load_model(path, torch.float32, quant=IN_BLOCKS)
    packed = set()
    for name, layer in kept.named_modules():
        if isinstance(layer, Linear):
            assert torch.equal(layer.dequantize(), wide.get_submodule(name).weight), name
            if layer.packed:
                packed.add(name.rpartition(".")[2])
        if isinstance(layer, Embedding):
            packed.add("embedding")
            assert torch.equal(layer(IDS), wide.embedding.weight[IDS])
    assert packed == LAYERS - WIDENED_ON_CUDA.get(case, set())
    want = logits(wide)
    torch.testing.assert_close(logits(kept), want, atol=2e-5 * float(want.std()), rtol=1e-5)


def test_a_scale_for_cuda_that_is_no_number(block_file):
    for case, at in (("Q4_0", 18), ("Q4_1", 22), ("Q4_K", 2), ("Q6_K", 208)):
        weight = GgufFile(block_file(case))._blocks("output.weight")
        content = weight.content.clone()
        content[3, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
        with pytest.raises(ValueError, match="a.gguf: output.weight has a scale that is NaN or"):
            backends.block_planes.planes(weight._replace(content=content), "cpu", Path("a.gguf"))


@pytest.mark.parametrize("case, kept", [("Q4_0", 6), ("Q8_0", 0), ("Q4_K", 0), ("int4", 3)])
def test_types_that_cuda_keeps_by_default(block_file, as_on_cuda, capsys, case, kept):
    """Those that cannot be slower than 16 bits; a line says what else is to be had."""
    model = load_model(block_file(case), quant=Quantization(BLOCKS, saved=True))
    held = {name.split(".")[-2] for name, _ in model.named_buffers() if name.endswith("data")}
    assert len(held) == kept
    said = "--keep_blocks, without dtype, keeps their bits" in capsys.readouterr().err
    assert said == (case != "Q4_0")


def test_memory_on_cuda(block_file):
    """A GPU holds the file's bytes, and 4 more in a superblock of a K type."""
    more = {"Q4_K": 148 / 144, "Q5_K": 180 / 176, "Q6_K": 212 / 210}
    for kind in BLOCK_FORMS:
        weight = GgufFile(block_file(kind))._blocks("blk.0.ffn_down.weight")
        packed = backends.block_planes.planes(weight, "cpu", Path("a.gguf"))
        held = packed.data.nbytes + packed.scale.nbytes
        assert held == weight.bytes("cuda") == round(weight.content.nbytes * more.get(kind, 1))


@pytest.mark.parametrize("case", ["many types", "mixture"])
def test_with_plain_products_blocks_are_numbers(block_file, case):
    """Widened from the start; packed ones, of a model that exists, in every call."""
    path = block_file(case)
    kept = load_model(path, quant=IN_BLOCKS)
    want = logits(load_model(path, torch.bfloat16))
    try:
        backends.library.set_plain()
        assert not keeps_blocks(GenerateConfig(checkpoint=str(path), device="cpu"), path)
        use_backend(kept, choose(torch.device("cpu")))
        got = logits(kept)
    finally:
        backends.library.set_plain(False)
        use_backend(kept, choose(torch.device("cpu")))
    assert (got - want).norm() < 0.02 * want.norm()
    assert not torch.equal(got, logits(kept)), "activations are not rounded to 8 bits"
    assert keeps_blocks(GenerateConfig(checkpoint=str(path), device="cpu"), path)


# ---------------------------------------------------------------------------------- the engine


def test_blocks_are_the_default(block_file, capsys):
    path = str(block_file("many types"))
    engine = load(checkpoint=path, device="cpu")
    kinds = "Q3_K, Q4_1, Q4_K, Q5_0, Q8_0"
    assert engine.option("quant") == "blocks" and engine.option("dtype") == "bfloat16"
    note = f"note: weights run as they are in the file ({kinds}); --dtype bfloat16 converts them\n"
    assert capsys.readouterr().err == note
    assert {layer.wqkv.format for layer in engine.target.layers} == {BLOCKS}


def test_a_file_without_blocks_has_no_note_on_them(tmp_path, capsys):
    model = hf_model()
    path = write(tmp_path / "m.gguf", metadata_of(model) | BPE_METADATA, gguf_tensors(model), "F16")
    engine = load(checkpoint=str(path), device="cpu")
    assert (engine.option("quant"), engine.option("dtype")) == ("none", "float16")
    assert capsys.readouterr().err.startswith("note: attention in float16 is PyTorch's")


@pytest.mark.parametrize(
    "world, dtype, kept", [(1, "", True), (2, "", False), (1, "bfloat16", False)]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_blocks_stay(block_file, monkeypatch, world, device, dtype, kept):
    """On one device without --dtype; several ranks widen."""
    for name, value in (("WORLD_SIZE", world), ("RANK", 0), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    path = block_file("Q4_K")
    config = GenerateConfig(checkpoint=str(path), device=device, dtype=dtype)
    assert keeps_blocks(config, path) == kept
    assert not keeps_blocks(config, path.parent)


@pytest.mark.slow  # two processes, 10 s
def test_ranks_widen(block_file, tmp_path):
    """Two ranks compute as one device does with --dtype, but for the order of sums in bf16."""
    options = options_of(str(block_file("Q4_K")), "ngram", temperature=1.0, context=128)
    found = run_ranks({2: {"blocks": options}}, tmp_path)[2]["blocks"]
    check_close(options | {"dtype": "bfloat16"}, found, 0.02)
    assert [len(tokens) for tokens in found["tokens"]] == [12] * len(options["prompts"])
    wide = load_model(block_file("Q4_K"), torch.bfloat16)
    assert max(found["bytes"]) > 0.4 * sum(p.nbytes for p in wide.parameters())


def widen(path, folder) -> None:
    """Write the numbers of a file as a directory of fp32."""
    wide = load_model(path, torch.float32)
    weights = export_weights(wide, weight_names(wide.config), wide.config, torch.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GgufFile(path).config))


@pytest.mark.parametrize("case", ["Q4_1", "many types", "tied", "biases", "mixture"])
def test_options_that_widen(block_file, tmp_path, case):
    """--dtype, with --quant too, computes with the numbers that a directory of them gives, bit for bit."""
    path = block_file(case)
    widen(path, tmp_path)
    for quant, dtype in (
        ("none", "bfloat16"), ("none", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16"),
    ):  # fmt: skip
        engine = load(checkpoint=str(path), device="cpu", quant=quant, dtype=dtype)
        assert engine.option("quant") == quant
        same = load_model(tmp_path, getattr(torch, dtype), quant=Quantization.of(quant, 0))
        want, got = same.state_dict(), engine.target.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items()), (quant, dtype)


# -------------------------------------------------------------------------------------- tokens

MODEL = "many types"
DECODING = {"device": "cpu", "max_new_tokens": 24, "ignore_eos": True, "seed": 7}


@pytest.fixture(scope="module")
def random_head(tmp_path_factory) -> str:
    """The directory of an EAGLE-2 head of random weights."""
    path = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    shapes = {f"layers.0.self_attn.{name}_proj.weight": (256, 256) for name in "qkvo"}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (256, 256) for name in ("gate", "up", "down")}
    shapes |= {"layers.0.post_attention_layernorm.weight": (256,), "embed_tokens.weight": (96, 256)}
    shapes |= {"fc.weight": (256, 512), "fc.bias": (256,)}
    tensors = {name: torch.randn(shape) / 16 for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 256, "intermediate_size": 256, "vocab_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def vanilla(block_file):
    """A function: the tokens without drafting at a temperature, of one prompt at a time."""

    @functools.cache
    def tokens(case: str, temperature: float) -> list[list[int]]:
        engine = load(checkpoint=str(block_file(case)), temperature=temperature, **DECODING)
        return generate(engine, PROMPTS).tokens

    return tokens


@pairwise(
    draft=["ngram", "eagle", "model"],
    temperature=[0.0, 1.0],
    batch=[1, 2],
    compile=[False, True],
    case=[MODEL, "mixture", "tied"],
    every=("draft", "temperature"),
)
def test_drafting_changes_no_token(
    block_file, random_head, vanilla, draft, temperature, batch, compile, case
):
    """Without a margin: a row's result does not depend on the other rows, bit for bit."""
    path = str(block_file(case))
    files = {"eagle": {"eagle": random_head}, "model": {"draft_checkpoint": path}}
    options = {"checkpoint": path, "draft": draft, **files.get(draft, {}), **DECODING}
    engine = load(temperature=temperature, batch_size=batch, compile=compile, **options)
    assert engine.option("quant") == "blocks" and (engine.target.program is not None) == compile
    result = generate(engine, PROMPTS)
    assert result.tokens == vanilla(case, temperature)
    if draft == "model":  # which drafts with the target's own numbers
        assert in_blocks(engine.drafter.model) and engine.option("quant_draft") == "blocks"
        assert result.stats["tau"] > 2
    assert result.stats["accept_lengths"], "cycles drafted"


@pytest.mark.parametrize("case", [MODEL, "mixture", "biases", "floats", "tied floats"])
def test_compiling_and_batches_change_no_token(block_file, vanilla, case):
    options = {"checkpoint": str(block_file(case)), "temperature": 1.0, **DECODING}
    for batch in (1, 2):
        engine = load(compile=True, batch_size=batch, **options)
        assert generate(engine, PROMPTS).tokens == vanilla(case, 1.0)


def test_a_trimmed_head_changes_no_token(block_file, random_head, vanilla, tmp_path):
    """Its rows of the target's LM head are widened."""
    head = trimmed_head(random_head, tmp_path / "head", torch.arange(48))
    engine = load(checkpoint=str(block_file(MODEL)), eagle=head, **DECODING)
    assert generate(engine, PROMPTS).tokens == vanilla(MODEL, 0.0)


def in_blocks(model) -> bool:
    return model.layers[0].wqkv.format == BLOCKS


@pairwise(
    pair=[
        ("file", "directory", "", "int8"),
        ("directory", "file", "", "blocks"),
        ("directory in fp32", "file", "", "blocks"),
        ("file", "file", "bfloat16", "none"),
        ("directory", "file", "bfloat16", "none"),
        ("file", "floats", "", "none"),
    ],
    temperature=[0.0, 1.0],
    compile=[False, True],
)
def test_a_file_beside_a_directory(block_file, tmp_path, pair, temperature, compile):
    """Either may be the draft. One that holds blocks keeps them, unless --dtype is given."""
    target, draft, dtype, form = pair
    widen(block_file(MODEL), tmp_path)
    if target == "directory in fp32":
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    file = block_file(MODEL)
    floats = tmp_path / "floats.gguf"
    model = hf_model("Llama", **SIZES)
    write(floats, metadata_of(model) | BPE_METADATA, gguf_tensors(model), "F16")
    paths = {"file": file, "floats": floats}
    options = {"checkpoint": str(paths.get(target, tmp_path)), "dtype": dtype, **DECODING}
    options |= {"temperature": temperature, "compile": compile}
    want = generate(load(**options), PROMPTS).tokens
    engine = load(**options, draft="model", draft_checkpoint=str(paths.get(draft, tmp_path)))
    assert engine.option("quant_draft") == form
    assert in_blocks(engine.drafter.model) == (form == "blocks")
    result = generate(engine, PROMPTS)
    assert result.tokens == want
    if draft != "floats":
        assert result.stats["tau"] > 2


def test_another_format_for_the_draft(block_file, capsys):
    """quant_draft=none means the file's own bits, as --quant none."""
    path = str(block_file("Q4_K"))
    options = {"checkpoint": path, "draft_checkpoint": path, "draft": "model", "device": "cpu"}
    for chosen, form in (
        ({"quant_draft": "none"}, "blocks"),
        ({"quant_draft": "int8"}, "int8"),
        ({"quant": "int8"}, "blocks"),
        ({"quant": "int8", "quant_draft": "none"}, "blocks"),
    ):
        engine = load(**options, **chosen)
        assert engine.option("quant") == "blocks"
        assert engine.option("quant_draft") == form
        assert in_blocks(engine.drafter.model) == (form == "blocks")
    assert "rounded a second time, to int8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quant", "kind", "kept"),
    [
        ("int4", MODEL, True),
        ("int4", "Q4_K", True),
        ("int4", "Q8_0", False),
        ("int8", "Q8_0", True),
    ],
)
def test_few_bits_are_not_rounded_again(block_file, capsys, quant, kind, kept):
    """--quant leaves a file whose weights have as few bits, unless it is to be widened first."""
    path = str(block_file(kind))
    engine = load(checkpoint=path, device="cpu", draft="none", quant=quant)
    said = capsys.readouterr().err
    assert in_blocks(engine.target) == kept
    assert engine.option("quant") == ("blocks" if kept else quant)
    line = f"note: {path} has no more bits than --quant {quant}: it is not rounded again\n"
    assert (line in said) == kept
    widened = load(checkpoint=path, device="cpu", draft="none", quant=quant, dtype="float32")
    assert widened.option("quant") == quant and "rounded a second time" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- wrong files


def spoil(tensors: dict, name: str, value: float, row: int = -1) -> None:
    """Put a scale into the last block of a row. Writes: tensors."""
    kind, content = tensors[name]
    of = BLOCK_KINDS[kind.name]
    blocks = content.copy().reshape(-1, content.shape[-1] // of.size, of.size)
    set_halves(blocks[row], of.scale_at, value)
    tensors[name] = (kind, blocks.reshape(content.shape))


PLACES = {  # a tensor of each kind, by the case that has it
    "Q4_K": "blk.1.ffn_up.weight", "many types": "blk.0.attn_v.weight", "Q6_K": "output.weight",
    "tied": "token_embd.weight", "mixture": "blk.1.ffn_down_exps.weight", "Q8_0": "blk.0.attn_q.weight",
}  # fmt: skip


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("case", PLACES)
def test_scales_that_are_no_numbers(capsys, tmp_path, case, value):
    name = PLACES[case]
    metadata, tensors = block_tensors(case)
    spoil(tensors, name, value)
    path = write(tmp_path / "m.gguf", metadata, tensors)
    said = f"{path}: {name} has a scale that is NaN or infinite; download it again"
    assert refused(capsys, "--checkpoint", str(path)).endswith(said)


def test_wrong_files_of_a_draft_model(capsys, block_file, tmp_path):
    target = block_file("Q4_K")
    path = tmp_path / "m.gguf"
    options = ("--checkpoint", str(target), "--draft", "model", "--draft_checkpoint", str(path))
    metadata, tensors = block_tensors("Q4_K")
    name = "blk.1.ffn_up.weight"
    spoil(tensors, name, NAN)
    write(path, metadata, tensors)
    said = f"{path}: {name} has a scale that is NaN or infinite; download it again"
    assert refused(capsys, *options).endswith(said)
    path.write_bytes(target.read_bytes()[:-1])
    assert re.search(r"m.gguf is truncated: \S+ ends at byte", refused(capsys, *options))


@pytest.mark.parametrize(
    "options",
    [(), ("--dtype", "float32"), ("--quant", "int8", "--dtype", "float32")],
    ids=str,
)
def test_a_file_that_shrinks_while_it_is_read(capsys, block_file, tmp_path, monkeypatch, options):
    """A lost page of a mapping would end the process (SIGBUS)."""
    path = tmp_path / "m.gguf"
    path.write_bytes(block_file("Q4_K").read_bytes())
    monkeypatch.setattr("files.weights.check_experts", lambda *_: os.truncate(path, 8192))
    err = refused(capsys, "--checkpoint", str(path), *options)
    said = r"m.gguf shrank while it was read: \S+\.weight ends at byte \d+ of 8192; download"
    assert re.search(f"{said} it again", err), err


@pytest.mark.parametrize("dtype", ["", "bfloat16", "float32"])
def test_pages_are_released_while_a_file_is_read(block_file, monkeypatch, dtype):
    """Behind every tensor or behind none, the weights are the same."""
    loaded = []
    for released in (2**40, 0):
        monkeypatch.setattr("files.gguf.RELEASED", released)
        engine = load(checkpoint=str(block_file("Q4_K")), device="cpu", dtype=dtype)
        loaded.append(engine.target.state_dict())
    never, always = loaded
    assert never.keys() == always.keys() and never
    assert all(torch.equal(never[name], always[name]) for name in never)


def test_tensors_that_are_refused(capsys, tmp_path):
    metadata, tensors = block_tensors("Q4_K")
    path, name = tmp_path / "m.gguf", "blk.1.attn_k.weight"
    kind, content = tensors[name]
    for changed, says in (
        ((Kind.IQ4_XS, np.zeros((256, 136), np.uint8)), f"m.gguf: {name} has the type IQ4_XS, which is not one of F32"),
        ((kind, content[None]), f"m.gguf: {name} has shape [1, 64, 256], which is no matrix here; use another file"),
        ((kind, content[:32]), "m.gguf: model.layers.1.self_attn.q_proj.weight + "),
        (None, "m.gguf: 1 missing weight(s): model.layers.1.self_attn.k_proj.weight; use another file"),
    ):  # fmt: skip
        held = tensors | {name: changed}
        held = {key: value for key, value in held.items() if value is not None}
        assert says in refused(capsys, "--checkpoint", str(write(path, metadata, held)))
    load(checkpoint=str(write(path, metadata, tensors)), device="cpu", dtype="bfloat16")
    assert "the file's Q4_K weights are converted to bfloat16" in capsys.readouterr().err


def test_experts_of_several_types(capsys, tmp_path):
    """Older files have a tensor per expert."""
    metadata, tensors = block_tensors("mixture")
    for name in [name for name in tensors if "_exps" in name]:
        kind, stack = tensors.pop(name)
        for expert, content in enumerate(stack):
            tensors[name.replace("_exps", f".{expert}")] = (kind, content)
    path = write(tmp_path / "m.gguf", metadata, tensors)
    older = load_model(path, quant=IN_BLOCKS)
    assert older.layers[1].w13.format == BLOCKS
    assert "run as they are in the file" in capsys.readouterr().err
    other = gguf_blocks("Q5_K", 512, 256, 1 / 16)
    tensors["blk.1.ffn_up.2.weight"] = (Kind.Q5_K, other)
    err = refused(capsys, "--checkpoint", str(write(path, metadata, tensors)))
    said = r"m.gguf: the experts of model.layers.1\S+ .*of several types; use --dtype"
    assert re.search(said, err), err
    assert load_model(path, torch.bfloat16)


@pytest.mark.parametrize("case", ["Q5_K", "Q4_K_M", "tied"])
def test_a_pass_of_a_model_on_cuda(block_file, as_on_cuda, case):
    """Fake tensors show which kernels run, and that no step waits for data.

    In the first layer of Q4_K_M the values are in another type than queries and keys: these are two
    launches, and the norm in front of them is whole.
    """
    model = load_model(block_file(case), torch.bfloat16, quant=IN_BLOCKS)
    with FakeTensorMode(), torch.no_grad():
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        backend = choose(torch.device("cuda"))
        use_backend(model, backend)
        model.fuse(True)
        cache = KVCache.empty(model.config, 1, 64, torch.bfloat16, "cpu")
        tokens = torch.zeros(1, 7, dtype=torch.long)
        window = causal_window(tokens[:, 0], 7, backend=backend)
        with Operators() as ran:
            scores = model.logits(model(tokens, tokens, cache, window))
    assert scores.shape == (1, 7, model.config.vocab_size) and scores.dtype == torch.float32
    layers = model.config.n_layers
    split = 1 if case == "Q4_K_M" else 0
    wanted = {
        "read_planes": 1,
        "rotary_product": layers - split,
        "rotary_cache": split,
        "gated_product": layers,
        "add_product": 2 * layers,
        "blocks_a16": 1 + 2 * split,
        "add_unscaled": 1 - split,
    }
    assert {name: ran.calls[name] for name in wanted} == wanted
    assert not {"aten::_local_scalar_dense", "aten::nonzero"} & set(ran.calls)
