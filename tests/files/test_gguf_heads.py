"""GGUF files of EAGLE-3 heads: written and read back bit for bit, run in their blocks. Damaged ones are in test_heads.py.

The target is the bundled demo, 256 wide, so that every type's blocks divide the rows of a head.
"""

from __future__ import annotations

import errno
import functools
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from eagle_draft import load_head
from files.config import read_config
from files.heads import HeadFiles, head_files, make_head, read_head
from files.weights import load_model
from heads import Head, write
from helpers import BLOCK_KINDS, OPERATORS, gguf_blocks
from kv_cache import KVCache, causal_window
from quantize import BLOCKS, Quantization
from run.library import generate
from run.load import load
from run.options import DEMO
from scripts import export_head
from scripts.bench.llama_peer import write_gguf
from tiny_models import refused

TARGET = Path(DEMO)
DRAFTED = 512  # of 4096 tokens
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_act": "silu", "num_hidden_layers": 1,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "vocab_size": 4096, "rms_norm_eps": 2**-17, "rope_theta": 20000.0,
    "max_position_embeddings": 2048, "torch_dtype": "float16", "draft_vocab_size": DRAFTED,
    "draft_sharpness": 1.5, "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
FLAGS = {  # changes to CONFIG
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "normed inputs": {"norm_before_fc": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
SHAPES = {
    "fc": (256, 768), "norm": (256,), "lm_head": (DRAFTED, 256), "midlayer.input_layernorm": (256,),
    "midlayer.hidden_norm": (256,), "midlayer.post_attention_layernorm": (256,),
    "midlayer.self_attn.q_proj": (256, 512), "midlayer.self_attn.k_proj": (128, 512),
    "midlayer.self_attn.v_proj": (128, 512), "midlayer.self_attn.o_proj": (256, 256),
    "midlayer.mlp.gate_proj": (512, 256), "midlayer.mlp.up_proj": (512, 256),
    "midlayer.mlp.down_proj": (256, 512),
}  # fmt: skip
IDS = (torch.arange(DRAFTED) * 7 + 3).sort().values


def head(flags: str = "plain") -> Head:
    """Random numbers that 16 bits hold, and d2t."""
    random = torch.Generator().manual_seed(0)
    tensors = {"d2t": IDS - torch.arange(DRAFTED)}
    for name, shape in (SHAPES | {"input_norm": (768,)}).items():
        noise = torch.randn(shape, generator=random)
        value = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[1] ** -0.5
        if name != "input_norm" or flags == "normed inputs":
            tensors[f"{name}.weight"] = value.half()
    return Head(CONFIG | FLAGS[flags], tensors)


def export(source: Path, out: Path, *argv: str, target: Path = TARGET) -> None:
    export_head.main(["--checkpoint", str(target), "--head", str(source), "--out", str(out), *argv])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function: the GGUF file of FLAGS in a type, written once, beside its directory."""
    folder = tmp_path_factory.mktemp("heads")

    def of(flags: str = "plain", kind: str = "q8_0") -> Path:
        source = write(folder / flags.replace(" ", "_"), head(flags))
        out = folder / f"{source.name}.{kind}.gguf"
        if not out.is_file():
            # the first test that asks for the file may read its own output
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                export(source, out, "--type", kind)
        return out

    return of


def failure(capsys, source: Path, out: Path, *argv: str) -> str:
    """The line that an export ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        export(source, out, *argv)
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert stop.value.code == 2 and "Traceback" not in captured.err
    assert not list(out.parent.glob("*.tmp")), "something half-written is left"
    return error


def named(path: Path) -> HeadFiles:
    return HeadFiles(path, head_files(path, "none"))


def wide_head(path: Path, target):
    """The head with its blocks as numbers."""
    return load_head(path, target, source=head_files(path, "none"))


# ------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("flags", FLAGS)
def test_a_file_says_what_the_directory_says(files, flags):
    ours = named(files(flags, "f16"))
    theirs = named(files(flags, "f16").parent / flags.replace(" ", "_"))
    model = read_config(TARGET)
    config = read_head(ours, model)  # which the export has compared
    assert config.eagle3 == read_head(theirs, model).eagle3
    for name in ("d2t", *(n for parts in make_head(config).weight_names().values() for n in parts)):
        assert torch.equal(ours.read(name), theirs.read(name).to(ours.read(name).dtype)), name


@pytest.mark.parametrize("kind", export_head.FORMATS)
def test_numbers_are_those_of_the_package(files, tmp_path, kind):
    """And near the head's own: half a step of a block, and the rounding of its scales. A second export is the same file."""
    path, own = files(kind=kind), head().tensors
    ours = named(path)
    names = {export_head.gguf_name(name): name for name in own if name != "d2t"}
    bound = {"f16": 0, "q8_0": (0.5 + 127 * 2**-11) / 127}[kind]
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) < 2 or tensor.name.startswith(("blk.0.attn_q", "blk.0.attn_k")):
            continue
        assert tensor.tensor_type.name.lower() == kind
        value = ours.read(names[tensor.name]).float()
        package = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(value.numpy(), package.astype(np.float32)), tensor.name
        first = own[names[tensor.name]].float()
        off = (value - first).reshape(-1, 32).abs().amax(1)
        most = bound * first.reshape(-1, 32).abs().amax(1) * 1.001 + 1e-9
        assert (off <= most).all(), tensor.name
    export(path, tmp_path / path.name, "--type", kind)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert export_head.stored(torch.randn(4, 30), "q8_0")[1] == "F16", "no block divides 30"


# --------------------------------------------------------------------------------------- drafting

PROMPTS = [[5, 17, 3, 40, 8, 22, 61]]
DECODING = {"checkpoint": DEMO, "device": "cpu", "max_new_tokens": 24, "ignore_eos": True}


@functools.cache
def vanilla() -> list:
    return generate(load(draft="none", **DECODING), PROMPTS).tokens


def scores(head, features: torch.Tensor, tokens: torch.Tensor, target) -> torch.Tensor:
    """A pass over true features, then one over its last output. Returns: [T + 1, Vd]."""
    cache = KVCache.empty(head.config.model, 1, 32, features.dtype, "cpu")
    embedding = head.embedding or target.embedding
    out = head.project(features)
    scored = []
    for begin, ids in ((0, tokens), (tokens.shape[1], tokens[:, :1])):
        window = causal_window(torch.tensor([begin]), ids.shape[1])
        out = head(embedding(ids), out[:, -ids.shape[1] :], window.slots, cache, window)
        scored.append((head.lm_head or target.lm_head)(head.output_norm(out))[0].float())
    return torch.cat(scored)


@OPERATORS
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_every_type_drafts_in_its_own_bits(files, tmp_path, monkeypatch, kind):
    """Random blocks. The bound is that of test_gguf_blocks.py, for one layer and two passes."""

    def stored(weight: torch.Tensor, _: str) -> tuple[np.ndarray, str]:
        rows, inputs = weight.shape
        return gguf_blocks(kind, rows, inputs, inputs**-0.5, rows), kind

    source, path = files().parent / "plain", tmp_path / "head.gguf"
    monkeypatch.setattr(export_head, "stored", stored)
    export(source, path)
    engine = load(head=str(path), tree="chain", compile=True, **DECODING)
    head = engine.drafter.head
    layers = [head.fc, head.lm_head, *(getattr(head.layers[0], w) for w in ("w13", "w2"))]
    layers += [head.layers[0].wqkv, head.layers[0].wo]
    assert all(layer.format == BLOCKS for layer in layers)
    assert engine.drafter.lm_head is head.lm_head and head.program.in_cpp
    assert engine.option("draft") == "eagle" and engine.option("quant_draft") == BLOCKS
    assert generate(engine, PROMPTS).tokens == vanilla()
    target = engine.target
    wide = wide_head(path, target)
    random = torch.Generator().manual_seed(0)
    features = torch.randn(1, 6, 4 * 256, generator=random).to(target.norm.weight.dtype)
    with torch.inference_mode():
        inputs = (features, torch.arange(6)[None], target)
        off = scores(head, *inputs) - scores(wide, *inputs)
        assert off.std() < 0.05 * scores(wide, *inputs).std()


def test_int8_keeps_inputs_of_small_weights(tmp_path):
    """Training divides the weights of fc by the scales of its inputs. With a scale per output Qwen2.5-Coder's head lost
    its features: tau 1.34 for 1.54 unrounded.
    """
    weight = head().tensors["fc.weight"].float()
    weight[:, 256:] *= 0.01
    path = write(tmp_path / "head", head(), **{"fc.weight": weight})
    error = load_head(path, load_model(TARGET), Quantization("int8")).fc.dequantize() - weight
    assert error[:, 256:].norm() < 0.01 * weight[:, 256:].norm()


# --------------------------------------------------------------------------------------- other files


def test_a_model_is_no_head_and_a_head_no_model(capsys, files, tmp_path):
    model = tmp_path / "model.gguf"
    write_gguf(TARGET, model, "q8_0")
    capsys.readouterr()
    err = refused(capsys, "--checkpoint", DEMO, "--head", str(model))
    assert f"{model} holds a model, and no head; use --draft model" in err
    err = refused(capsys, "--checkpoint", str(files()))
    assert f"{files()} holds a draft head and no model" in err
    err = refused(capsys, "--checkpoint", DEMO, "--head", str(files()), "--draft", "medusa")
    assert "holds one of the kind eagle" in err


def test_mistakes_and_a_full_disk(capsys, files, tmp_path, monkeypatch):
    """What is there stays."""
    plain, out = files().parent / "plain", tmp_path / "head.gguf"
    out.write_text("mine")
    says = "is a head of version 1 or 2, and other runtimes are served version 3"
    assert says in failure(capsys, Path(f"{DEMO}-eagle"), tmp_path / "eagle1.gguf")
    assert "there is no directory" in failure(capsys, plain, tmp_path / "no" / "x.gguf")
    says = "--verifier belongs to --layout vllm; drop it"
    assert says in failure(capsys, plain, tmp_path / "x.gguf", "--verifier", "owner/name")
    assert "must end in .gguf" in failure(capsys, plain, tmp_path / "folder")
    assert "exists; give --overwrite to replace it" in failure(capsys, plain, out)

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
        said = failure(capsys, plain, out, "--overwrite")
    assert f"cannot write {out} (No space left on device); free some space" in said
    assert out.read_text() == "mine"
    export(plain, out, "--overwrite")
    assert out.read_bytes()[:4] == b"GGUF"
