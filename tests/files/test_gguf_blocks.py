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
from test_gguf_tokenizers import BPE_METADATA

import backends.block_planes
import backends.blocks
import backends.library
from backends.weight import Embedding
from files.gguf import GgufFile
from files.weights import export_weights, load_model
from gguf_models import IN_BLOCKS as CASES
from gguf_models import block_tensors, by_expert, gguf_tensors, hf_model, metadata_of
from heads import assert_vanillas_tokens
from helpers import BLOCK_KINDS, OPERATORS, PROMPTS, gguf_blocks, set_halves
from model import weight_names
from quantize import BLOCKS, Linear, Quantization
from run.load import load
from tiny_models import Kind, refused, write

pytestmark = OPERATORS
IN_BLOCKS = Quantization(BLOCKS, saved=True, every_type=True)
IDS = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(1))
LAYERS = {"embedding", "lm_head", "w13", "w2", "wo", "wqkv"}
OF_FLOATS = {"tied floats": {"embedding", "lm_head"}, "floats": {"embedding", "lm_head", "w2"}}
WIDENED = {  # layers that are numbers
    "cpu": OF_FLOATS | {"floats beside blocks": {"embedding"}},
    "cuda": OF_FLOATS | {
        "Q2_K": LAYERS, "Q3_K": LAYERS, "MXFP4": LAYERS,
        "many types": {"w13"},  # of which one half is in Q3_K
        "floats beside blocks": {"embedding", "w13", "wqkv"},
    },
}  # fmt: skip
SHARES = {  # the bytes of a layout over the file's, where these differ
    "cpu": {"Q2_K": 164 / 84, "Q3_K": 146 / 110, "Q4_K": 148 / 144, "Q5_K": 180 / 176},
    "cuda": {"Q4_K": 148 / 144, "Q5_K": 180 / 176, "Q6_K": 212 / 210},
}


@pytest.fixture(scope="module")
def block_file(tmp_path_factory):
    """A function: the path of the file of a case, written once. floats: in 16 bits"""
    folder = tmp_path_factory.mktemp("blocks")

    @functools.cache
    def path(case: str) -> Path:
        if case == "F16":
            model = hf_model()
            metadata, tensors = metadata_of(model), gguf_tensors(model)
        else:
            metadata, tensors = block_tensors(case)
        out = folder / f"{case.replace(' ', '_')}.gguf"
        return write(out, metadata | BPE_METADATA, tensors, "F16" if case == "F16" else "F32")

    return path


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.logits(model(IDS[None], torch.arange(len(IDS))[None]))[0].float()


# ------------------------------------------------------------------------------ weights and logits


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Blocks are packed as CUDA's matmuls read them, and multiplied by the reference."""
    monkeypatch.setattr(backends.blocks, "in_planes", lambda device: True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_weights_and_logits(request, block_file, case, device):
    """The numbers of ggml, bit for bit. As on CUDA, in fp32, the matmuls are exact but for the order of sums."""
    path = block_file(case)
    wide = load_model(path, torch.float32)
    if device == "cuda":
        request.getfixturevalue("as_on_cuda")
    kept = load_model(path, torch.float32 if device == "cuda" else None, quant=IN_BLOCKS)
    packed = set()
    for name, layer in kept.named_modules():
        kind = name.rpartition(".")[2]
        if isinstance(layer, Embedding):
            packed.add(kind)
            assert torch.equal(layer(IDS), wide.embedding.weight[IDS])
        if isinstance(layer, Linear):
            theirs = wide.get_submodule(name)
            same = layer.dequantize().float() == theirs.weight
            if device == "cpu":  # numbers beside blocks are rounded
                same |= layer.dequantize().float() == theirs.weight.bfloat16().float()
            assert same.all(), name
            assert layer.bias is None or torch.equal(layer.bias, theirs.bias.to(layer.bias.dtype))
            packed |= {kind} if layer.packed else set()
    assert packed == LAYERS - WIDENED[device].get(case, set())
    if "embedding" in packed:
        shares = kept.lm_head.data.data_ptr() == kept.embedding.data.data_ptr()
        assert shares == (case == "tied")
    if case in BLOCK_KINDS and packed:
        held = [value.nbytes for n, value in kept.named_buffers() if n.endswith(("data", "scale"))]
        of_file = [v[1].nbytes for v in block_tensors(case)[1].values() if isinstance(v, tuple)]
        assert sum(held) == round(sum(of_file) * SHARES[device].get(case, 1))
    want = logits(wide)
    error = (logits(kept) - want).square().mean().sqrt() / want.std()
    assert want.std() > 0.3
    assert error < (0.03 if device == "cpu" else 2e-5), error


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


# ---------------------------------------------------------------------------------------- options

NOTE = "weights run as they are in the file ({}); --dtype bfloat16 converts them"
NOT_AGAIN = "has no more bits than --quant {}: it is not rounded again"
DRAFT = {"draft": "model"}  # the file drafts for itself
OPTIONS = [  # file, options, the format of the target, of the draft model, a note
    ("many types", {}, "blocks", "", NOTE.format("Q3_K, Q4_1, Q4_K, Q5_0, Q8_0")),
    ("F16", {}, "none", "", "note: attention in float16 is PyTorch's"),
    ("Q4_K", {"dtype": "bfloat16"}, "none", "", "the file's Q4_K weights are converted to bfloat16"),
    ("many types", {"quant": "int4"}, "blocks", "", NOT_AGAIN.format("int4")),
    ("Q4_K", {"quant": "int4"}, "blocks", "", NOT_AGAIN.format("int4")),
    ("Q8_0", {"quant": "int4"}, "int4", "", "rounded a second time, to int4"),
    ("Q8_0", {"quant": "int8"}, "blocks", "", NOT_AGAIN.format("int8")),
    ("Q8_0", {"quant": "int8", "dtype": "float32"}, "int8", "", "rounded a second time"),
    ("Q4_K", DRAFT | {"quant_draft": "none"}, "blocks", "blocks", NOTE.format("Q4_K")),
    ("Q4_K", DRAFT | {"quant_draft": "int8"}, "blocks", "int8", "rounded a second time, to int8"),
    ("Q4_K", DRAFT | {"quant": "int8"}, "blocks", "blocks", NOT_AGAIN.format("int8")),
    ("Q4_K", DRAFT | {"quant": "int8", "quant_draft": "none"}, "blocks", "blocks", NOT_AGAIN.format("int8")),
]  # fmt: skip


def in_blocks(model) -> bool:
    return model.layers[0].wqkv.format == BLOCKS


@pytest.mark.parametrize("case, options, form, drafts, note", OPTIONS)
def test_the_bits_of_the_file_stay_where_nothing_else_is_asked(block_file, capsys, case, options, form, drafts, note):  # fmt: skip
    """Few bits are not rounded again; --quant_draft none means the file's own."""
    path = str(block_file(case))
    draft = {"draft_checkpoint": path} if drafts else {"draft": "none"}
    engine = load(checkpoint=path, device="cpu", **options | draft)
    assert engine.option("quant") == form and in_blocks(engine.target) == (form == "blocks")
    assert not drafts or engine.option("quant_draft") == drafts
    assert not drafts or in_blocks(engine.drafter.model) == (drafts == "blocks")
    said = capsys.readouterr().err
    assert note in said and ("run as they are in" in said) == (form == "blocks")


def widen(path, folder) -> None:
    """Write the numbers of a file as a directory of fp32."""
    wide = load_model(path, torch.float32)
    weights = export_weights(wide, weight_names(wide.config), wide.config, torch.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GgufFile(path).config))


@pytest.mark.parametrize("case", ["many types", "tied", "biases", "mixture"])
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


@pytest.mark.parametrize("case, draft, temperature, form", [
    ("biases", "ngram", 1.0, "own bits"), ("floats", "ngram", 1.0, "own bits"), ("tied floats", "ngram", 0.0, "step by step"),
    ("many types", "model", 1.0, "own bits"), ("mixture", "model", 0.0, "step by step"), ("tied", "model", 1.0, "own bits"),
])  # fmt: skip
def test_drafting_changes_no_token(block_file, case, draft, temperature, form):
    """Without a margin: a row's result does not depend on the other rows, bit for bit. A model drafts for itself."""
    files = {"checkpoint": str(block_file(case)), "draft": draft}
    files |= (
        {"draft_checkpoint": files["checkpoint"], "tree": "dynamic"} if draft == "model" else {}
    )
    tau = 2 if draft == "model" else 0.9
    engine = assert_vanillas_tokens(files, PROMPTS, form, temperature, tau)
    assert engine.option("quant") == "blocks"
    assert (engine.target.program is not None) == (form == "own bits")


# --------------------------------------------------------------------------------------- damages


def spoil(tensors: dict, name: str, value: float, row: int = -1) -> None:
    """Put a scale into the last block of a row. Writes: tensors."""
    kind, content = tensors[name]
    of = BLOCK_KINDS[kind.name]
    blocks = content.copy().reshape(-1, content.shape[-1] // of.size, of.size)
    set_halves(blocks[row], of.scale_at, value)
    tensors[name] = (kind, blocks.reshape(content.shape))


K, CONTENT = "blk.1.attn_k.weight", np.zeros((256, 136), np.uint8)
NUMBERLESS = "{} has a scale that is NaN or infinite; download it again"
DAMAGES = [  # case, tensor, its change (a scale, or a function of its content), what is said
    ("Q4_K", "blk.1.ffn_up.weight", float("nan"), NUMBERLESS),
    ("many types", "blk.0.attn_v.weight", float("inf"), NUMBERLESS),
    ("Q6_K", "output.weight", -float("inf"), NUMBERLESS),
    ("tied", "token_embd.weight", float("nan"), NUMBERLESS),
    ("mixture", "blk.1.ffn_down_exps.weight", float("inf"), NUMBERLESS),
    ("Q8_0", "blk.0.attn_q.weight", float("nan"), NUMBERLESS),
    ("Q4_K", K, lambda kind, content: (Kind.IQ4_XS, CONTENT), "{} has the type IQ4_XS, which is not one of F32"),
    ("Q4_K", K, lambda kind, content: (kind, content[None]), "{} has shape [1, 64, 256], which is no matrix here; use another file"),
    ("Q4_K", K, lambda kind, content: (kind, content[:32]), "model.layers.1.self_attn.q_proj.weight + "),
    ("Q4_K", K, None, "1 missing weight(s): model.layers.1.self_attn.k_proj.weight; use another file"),
]  # fmt: skip


@pytest.mark.parametrize("case, name, change, says", DAMAGES)
def test_damaged_files_are_refused_in_one_line(
    capsys, tmp_path, block_file, case, name, change, says
):
    """As the model, and as the draft model."""
    metadata, tensors = block_tensors(case)
    if isinstance(change, float):
        spoil(tensors, name, change)
    else:
        tensors[name] = change and change(*tensors[name])
    left_out = () if tensors[name] else (name,)
    path = str(write(tmp_path / "m.gguf", metadata | BPE_METADATA, tensors, without=left_out))
    draft = ("--checkpoint", str(block_file(case)), "--draft", "model", "--draft_checkpoint")
    for options in (("--checkpoint",), draft):
        assert f"{path}: {says.format(name)}" in refused(capsys, *options, path)


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


def test_experts_of_several_types(capsys, tmp_path):
    """Older files have a tensor per expert."""
    metadata, tensors = block_tensors("mixture")
    tensors = by_expert(tensors)
    path = write(tmp_path / "m.gguf", metadata | BPE_METADATA, tensors)
    older = load_model(path, quant=IN_BLOCKS)
    assert older.layers[1].w13.format == BLOCKS
    other = gguf_blocks("Q5_K", 512, 256, 1 / 16)
    tensors["blk.1.ffn_up.2.weight"] = (Kind.Q5_K, other)
    err = refused(capsys, "--checkpoint", str(write(path, metadata | BPE_METADATA, tensors)))
    said = r"m.gguf: the experts of model.layers.1\S+ .*of several types; use --dtype"
    assert re.search(said, err), err
    assert load_model(path, torch.bfloat16)
