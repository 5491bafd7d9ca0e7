"""GGUF files of models, written as llama.cpp's converter does: the logits are transformers', and damaged files are refused in one line.

MODELS are files that are right, UNCHANGED changes that say the same, DAMAGES what is wrong. Tokenizers are in
test_gguf_tokenizers.py, files in blocks in test_gguf_blocks.py.
"""

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_gguf_tokenizers import BPE_METADATA
from test_hub import write_ollama

import helpers
import tiny_models
from files.config import read_config
from files.fetch import title_of
from files.gguf import STORED, TYPES, GgufFile
from files.tokenizer import Tokenizer
from files.weights import export_weights, load_model
from gguf_models import gguf_tensors, hf_model, metadata_of, permuted, write_model
from helpers import OPERATORS
from model import weight_names
from run import quantize as run_quantize
from run.library import generate
from run.load import load
from tiny_models import Kind, assert_same_logits, gguf_name, read_by_transformers, refused, write

IN_BLOCKS = [kind.name for kind in TYPES.values() if kind.name not in STORED]


def rope(kind: str, theta: float = 10000.0, **further) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **further}}


LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0}
MODELS = {
    "mha": ("Llama", {"num_key_value_heads": 4}),
    "gqa": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "head_dim": ("Llama", {"head_dim": 32}),
    "biases": ("Llama", {"attention_bias": True}),
    "linear": ("Llama", rope("linear", 5000.0, factor=2.5)),
    "llama3": ("Llama", rope("llama3", 500000.0, **LLAMA31)),
    "yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "yarn, betas": ("Qwen2", rope("yarn", factor=2.0, original_max_position_embeddings=64, **BETAS)),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "older mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3moe": ("Qwen3Moe", {"head_dim": 32, **QWEN3_MOE}),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_architectures(tmp_path, case):
    family, options = MODELS[case]
    reference = hf_model(family, **options)
    tensors = gguf_tensors(reference, older=case.startswith("older"))
    path = write(tmp_path / "m.gguf", metadata_of(reference), tensors)
    model = load_model(path)
    assert_same_logits(model, reference)
    assert model.config.tie_embeddings == (case == "tied") and model.config.dtype == "float32"
    tiny_models.assert_same_config(path, reference, {"norm_eps", "rope_theta", "rope_scaling"})
    names = weight_names(model.config)
    weights = export_weights(load_model(tmp_path / "hf"), names, model.config, torch.float32)
    for name, value in weights.items():
        assert torch.equal(GgufFile(path).read(name), value), name


Change = Callable[[object, dict, dict], None]  # of a model, and of its file's metadata and tensors


def without_biases(pattern: str) -> Change:
    def change(model, metadata: dict, tensors: dict) -> None:
        biases = {n: v for n, v in model.state_dict().items() if n.endswith(".bias")}
        for name in (name for name in biases if re.search(pattern, gguf_name(name))):
            del tensors[gguf_name(name)]
            biases[name].zero_()

    return change


def keys(**changes) -> Change:
    return lambda model, metadata, tensors: metadata.update({f"llama.{key}": v for key, v in changes.items()})  # fmt: skip


def plain_frequencies(model, metadata: dict, tensors: dict) -> None:
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)


MISSING = "{} missing bias(es) are zero: model.layers.{}_proj.bias"
UNCHANGED = {  # what is changed, the note
    "no bias of o": (without_biases("attn_output"), MISSING.format(2, "0.self_attn.o")),  # a LLaMA made of a Qwen
    "no bias of q": (without_biases("attn_q"), MISSING.format(2, "0.self_attn.q")),
    "no biases of up and gate": (without_biases("ffn_(up|gate)"), MISSING.format(4, "0.mlp.gate")),
    "no bias of v in a layer": (without_biases("1.attn_v"), MISSING.format(1, "1.self_attn.v")),
    "sizes of each layer": (keys(**{"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}), ""),
    "zeros that mean none": (keys(**{"attention.sliding_window": 0, "rope.scaling.factor": 0.0, "expert_count": 0}), ""),
    "frequencies of no scaling": (plain_frequencies, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_files_that_say_the_same_otherwise(tmp_path, capsys, name):
    change, note = UNCHANGED[name]
    reference = hf_model(attention_bias=True, mlp_bias=True)
    metadata, tensors = metadata_of(reference), gguf_tensors(reference)
    plain = read_config(write(tmp_path / "plain.gguf", metadata, tensors))
    change(reference, metadata, tensors)
    path = write(tmp_path / "m.gguf", metadata, tensors)
    assert read_config(path) == plain
    assert_same_logits(load_model(path), reference)
    assert note in capsys.readouterr().err
    coded = write(tmp_path / "q.gguf", metadata | BPE_METADATA, tensors, "Q8_0")
    engine = load(checkpoint=str(coded), device="cpu")  # in blocks
    assert len(generate(engine, [[5, 17, 3]], max_new_tokens=4).tokens[0]) > 0


@pytest.mark.parametrize(
    "family, kind",
    [("Llama", "BF16"), ("Llama", "Q4_1"), ("Qwen2", "Q8_0"), ("Mistral", "F16")],
)
def test_as_transformers_reads_it(tmp_path, family, kind):
    path = write_model(tmp_path / "m.gguf", hf_model(family), kind)
    assert_same_logits(load_model(path, torch.float32), read_by_transformers(path))
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    assert load_model(path).embedding.weight.dtype == dtype
    read = GgufFile(path).read("model.layers.1.mlp.down_proj.weight").dtype
    assert read == (dtype if kind in ("F16", "BF16") else torch.float32)


@pytest.mark.parametrize("operator", [pytest.param(True, marks=OPERATORS), False])
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_every_tensor_of_every_type_has_the_packages_bits(tmp_path, monkeypatch, kind, operator):
    """Blocks of any bytes, with scales that are infinite or no numbers too, and with turned rows."""
    monkeypatch.setattr("files.gguf.cpu_operators_are_loaded", lambda: operator)
    monkeypatch.setattr("files.gguf.RELEASED", 0)  # the file's pages, behind every tensor
    monkeypatch.setattr("files.gguf.PIECE", 96 * 32)  # neither rows nor tensors end with a piece
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    reference = hf_model(**(wide if block == 256 else {}))
    tensors, want = gguf_tensors(reference), {}
    for name, value in tensors.items():
        if value.ndim > 1:
            data = rng.integers(0, 256, (len(value), value.shape[1] // block * size), np.uint8)
            tensors[name], want[name] = (Kind[kind], data), gguf.dequantize(data, Kind[kind])
    files = GgufFile(write(tmp_path / "m.gguf", metadata_of(reference), tensors))
    heads = {"attn_q": 4, "attn_k": 2}
    for name, theirs in zip(files.readers, map(gguf_name, files.readers)):
        for dtype in (None, torch.bfloat16):
            got = files.read(name, dtype)
            matrix = theirs in want
            rounds = dtype and operator and matrix  # the package's fp32 `load_model` rounds
            assert got.dtype == (torch.bfloat16 if rounds else torch.float32), name
            turned = heads.get(theirs.split(".")[-2])
            got = permuted(got, turned) if turned else got
            numbers = torch.from_numpy(want[theirs] if matrix else tensors[theirs]).to(got.dtype)
            torch.testing.assert_close(got, numbers, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------- damages


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    model = hf_model()
    return write_model(
        tmp_path_factory.mktemp("gguf") / "m.gguf", model, "Q8_0", BPE_METADATA
    ), model


def header(*parts: bytes, tensors=0, keys=0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts) + bytes(64)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 2**60
UP = "blk.1.ffn_up"


def at_up(*fields: int) -> Callable[[bytes], bytes]:
    """Replace the sizes and the type of a tensor in the header."""

    def change(content: bytes) -> bytes:
        at = content.index(text(f"{UP}.weight")) + len(text(f"{UP}.weight")) + 4
        return content[:at] + struct.pack("<QQI", *fields) + content[at + 20 :]

    return change


CONTENTS = {  # the bytes of the file, or a function of those of a right one; what is said
    "empty": (b"", "it is empty"),
    "magic": (b"PK\x03\x04" + bytes(100), "it does not begin with GGUF"),
    "version": (b"GGUF" + struct.pack("<IQQ", 7, 0, 0), "version 7 is not 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version of a big-endian file"),
    "many tensors": (header(tensors=HUGE), f"a count of {HUGE}"),
    "long list": (header(text("a"), struct.pack("<IIQ", 9, 4, HUGE), keys=1), f"a count of {HUGE}"),
    "nested": (header(text("a"), struct.pack("<IIQ", 9, 9, 1), keys=1), "a list has the type 9"),
    "twice": (header(*[text("a") + struct.pack("<II", 4, 1)] * 2, keys=2), "it has a twice"),
    "utf-8": (header(struct.pack("<Q", 2) + b"\xff\xfe", struct.pack("<II", 4, 1), keys=1), "the metadata general.architecture is missing"),
    "dimensions": (header(text("t"), struct.pack("<I", 2**31), tensors=1), "t has 2147483648 dimensions"),
    "alignment": (header(text("general.alignment"), struct.pack("<II", 4, 0), keys=1), "must be a power of two; it is 0"),
    "no architecture": (header(), "the metadata general.architecture is missing"),
    "truncated header": (lambda whole: whole[: len(whole) // 50], "download it again"),
    "truncated": (lambda whole: whole[:-100], "is truncated: .* download it again"),
    "a huge tensor": (at_up(HUGE, 96, 8), "is truncated"),
    "part of a block": (at_up(63, 96, 8), "is no multiple of 32"),
    "an unknown type": (at_up(64, 96, 99), f"{UP}.weight has the type 99"),
}  # fmt: skip
METADATA = {  # changes of keys, None: left out; what is said
    "adapter": ({"general.type": "adapter"}, "is an adapter .LoRA. and no model; merge it"),
    "architecture": ({"general.architecture": "gemma2"}, "the architecture gemma2 is not supported; supported are llama, qwen2, qwen2moe, qwen3"),
    "missing": ({"llama.block_count": None}, "the metadata llama.block_count is missing"),
    "text": ({"llama.block_count": "two"}, "the metadata llama.block_count must be a whole number, not 'two'"),
    "many layers": ({"llama.block_count": 2**32 - 1}, "llama.block_count must be 1 to 1048576; it is 4294967295"),
    "kv heads": ({"llama.attention.head_count_kv": 3}, "head_count_kv must divide head_count"),
    "experts chosen": (
        {"llama.expert_count": 2, "llama.expert_used_count": 4},
        r"m.gguf: num_experts_per_tok must be 1 to num_local_experts \(2\); it is 4; use another file",
    ),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling must be none, linear, yarn or LLaMA-3's; the file says longrope"),
    "yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.yarn_log_multiplier": 0.1},
        "llama.rope.scaling.yarn_log_multiplier is not supported; use the original model",
    ),
    "kv heads by layer": ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs between layers, which is not"),
    "part of a head": ({"llama.rope.dimension_count": 8}, "the rotation of a part of a head is not supported"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon must be a finite number above 0; it is -1.0"),
    "parts": ({"split.count": 3}, "is part 1 of 3, and m-00002-of-00003.gguf is not beside it; download every part"),
}  # fmt: skip
TENSORS = {  # the tensor, a function of the numbers of ffn_up or None: left out; what is said
    "type": ("", lambda w: (Kind.I8, np.zeros(w.shape, np.int8)), f"{UP}.weight has the type I8, which is not one of F32, F16, BF16, I64, Q8_0"),
    "IQ": ("", lambda w: (Kind.IQ4_NL, np.zeros((96, 36), np.uint8)), f"{UP}.weight has the type IQ4_NL"),
    "unknown": ("model.layers.0.other.weight", lambda w: w, "1 unexpected weight.s.: model.layers.0.other.weight"),
    "missing": ("", None, "m.gguf: 1 missing weight.s.: model.layers.1.mlp.up_proj.weight; use another file"),
    "no stack": (f"{UP}_exps.weight", lambda w: w[:, 0], rf"{UP}_exps.weight has the shape \[96\]; experts are a stack of at most 1024 matrices"),
    "a stack": ("", lambda w: w[None], r"has shape \[96, 64\] \+ \[1, 96, 64\]"),
    "frequencies": ("rope_freqs.weight", lambda w: np.full(8, 2, np.float32), "rope_freqs.weight is not LLaMA-3.1's scaling; use the original model"),
}  # fmt: skip
DAMAGES = {"content": CONTENTS, "metadata": METADATA, "tensor": TENSORS}
ROWS = [(kind, name) for kind, rows in DAMAGES.items() for name in rows]


@pytest.mark.parametrize("kind, name", ROWS)
def test_damaged_files_are_refused_in_one_line(capsys, whole, tmp_path, kind, name):
    path = tmp_path / "m.gguf"
    *change, says = DAMAGES[kind][name]
    metadata, tensors = metadata_of(whole[1]) | BPE_METADATA, gguf_tensors(whole[1])
    if kind == "metadata":
        metadata |= change[0]
    if kind == "tensor":
        tensors[change[0] or f"{UP}.weight"] = change[1] and change[1](tensors[f"{UP}.weight"])
    left_out = [key for key, value in (metadata | tensors).items() if value is None]
    write(path, metadata, tensors, without=tuple(left_out))
    if kind == "content":
        path.write_bytes(change[0](whole[0].read_bytes()) if callable(change[0]) else change[0])
    said = refused(capsys, "--checkpoint", str(path))
    assert re.search(says, said) and "m.gguf" in said, said


def test_any_cut_of_the_header_is_one_line(whole, tmp_path):
    content, path = whole[0].read_bytes(), tmp_path / "m.gguf"
    rng = random.Random(0)
    for n in range(150):  # cuts, then bytes changed at random
        spoilt = bytearray(content if n % 2 else content[: rng.randrange(len(content))])
        for _ in range(4 if n % 2 else 0):
            spoilt[rng.randrange(2000)] = rng.randrange(256)
        path.write_bytes(spoilt)
        try:
            load_model(path), Tokenizer.load(path)
        except ValueError as error:
            assert "\n" not in str(error), error


def test_a_missing_file_and_the_wrong_use_of_one(capsys, whole, tmp_path):
    path, missing = str(whole[0]), str(tmp_path / "no.gguf")
    said = f"cannot read {missing}: No such file or directory; check the path"
    assert said in refused(capsys, "--checkpoint", missing)
    err = refused(capsys, "--checkpoint", path, "--eagle", path)
    assert f"{path} holds a model, and no head; use --draft model --draft_checkpoint" in err
    for argv in ([path], ["--checkpoint", path, "--out", str(tmp_path / "out")]):
        said = f"{path} is a GGUF file, which runs in its own bits as it is: python generate.py"
        assert said in helpers.refused(capsys, run_quantize.main, argv)


# ---------------------------------------------------------------------------------------- end to end

DECODING = {"device": "cpu", "ignore_eos": True, "max_new_tokens": 24}


def tokens_of(path: Path | str, **options) -> list:
    return generate(load(checkpoint=str(path), **options, **DECODING), [[5, 17, 3]]).tokens


def test_a_folder_with_one_file_stands_for_it(whole, tmp_path, capsys):
    """As hubs' programs make them; the part that reads pictures is no model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.Q8_0.gguf").write_bytes(whole[0].read_bytes())
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "config.json").write_text('{"model_type": "llama"}')  # as some hubs' folders have it
    want = tokens_of(whole[0])
    assert tokens_of(folder) == want
    assert tokens_of(folder, draft="model", draft_checkpoint=str(folder)) == want
    assert load(str(folder), device="cpu").config.checkpoint == str(folder / "model.Q8_0.gguf")
    (folder / "other.gguf").write_bytes(b"GGUF")
    names = "model.Q8_0.gguf, other.gguf"
    assert f"; name one of {names}" in refused(capsys, "--checkpoint", str(folder))
    (folder / "config.json").unlink()
    assert f"name one of its GGUF files: {names}" in refused(capsys, "--checkpoint", str(folder))


def test_ollamas_file_has_no_suffix(whole, tmp_path, monkeypatch):
    """By its path and by the model's name; its title is the one within the file."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    metadata = metadata_of(whole[1]) | BPE_METADATA | {"general.name": "Tiny One"}
    file = write(tmp_path / "t.gguf", metadata, gguf_tensors(whole[1]), "Q8_0")
    blob = tmp_path / "blobs" / write_ollama(tmp_path, "library/tiny/latest", file)
    want = tokens_of(whole[0])
    for name in ("ollama:tiny", str(blob)):
        assert tokens_of(name) == want
        path = load(checkpoint=name, device="cpu").config.checkpoint
        assert title_of(Path(path)) == "Tiny One"
    assert tokens_of(whole[0], draft="model", draft_checkpoint="ollama:tiny") == want


def test_a_file_in_parts_is_named_by_its_first(whole, tmp_path, capsys):
    """As llama-gguf-split writes it: the first part has the metadata, each has tensors of its own."""
    tensors = list(gguf_tensors(whole[1]).items())
    paths = [tmp_path / f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    metadata = metadata_of(whole[1]) | BPE_METADATA | {"split.count": 3}
    for number, path in enumerate(paths):
        write(path, metadata | {"split.no": number}, dict(tensors[number::3]), "Q8_0")
        metadata = {"general.architecture": "llama", "split.count": 3}
    assert tokens_of(paths[0]) == tokens_of(whole[0])
    says = "is part 2 of 3; name the first one, m-00001-of-00003.gguf"
    assert refused(capsys, "--checkpoint", str(paths[1])).endswith(says)
    content = paths[2].read_bytes()
    paths[2].write_bytes(content[:-5])
    assert "is truncated" in refused(capsys, "--checkpoint", str(paths[0]))
    paths[2].write_bytes(paths[1].read_bytes())
    assert "as another part has" in refused(capsys, "--checkpoint", str(paths[0]))
    paths[2].unlink()
    assert "m-00003-of-00003.gguf is not beside it" in refused(
        capsys, "--checkpoint", str(paths[0])
    )


@pytest.mark.slow  # transformers takes 20 s to widen the file
@pytest.mark.smollm2
def test_a_real_files_logits(smollm2):
    reference = read_by_transformers(smollm2)
    model = load_model(smollm2, torch.float32)
    state = reference.state_dict()
    names = weight_names(model.config)
    for name, value in export_weights(model, names, model.config, torch.float32).items():
        assert torch.equal(value, state[name]), name
    assert_same_logits(model, reference, widths=())
