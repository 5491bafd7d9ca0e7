"""GGUF files written here, of every type and architecture, against Hugging Face's models and
tokenizers; refused files.

The files are written as llama.cpp's converter does: rows of q and k permuted, dimensions reversed, its names.
"""

import json
import random
import re
import struct
import unicodedata
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece as spm
import torch
import transformers
from test_hub import write_ollama
from test_tokenizer import LINES, TEXTS, train_sp
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

import helpers
import run.generate as program
import tiny_models
from files.config import read_config, read_raw
from files.fetch import title_of
from files.gguf import STORED, TYPES, GgufFile
from files.gguf_header import chat_template_text, read_header
from files.texts import template_text
from files.tokenizer import Tokenizer
from files.weights import export_weights, load_model
from helpers import OPERATORS, slow
from model import weight_names
from run import quantize as run_quantize
from run.generate import generate, load
from run.options import GenerateConfig
from run.resolved import resolve_draft
from tiny_models import Kind, assert_same_logits, gguf_name, read_by_transformers, refused, write

ROOT = Path(program.__file__).parent
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
CASES = {
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


# ------------------------------------------------------------------------------------------ writing


def hf_model(family="Llama", **options):
    more = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return tiny_models.random_model(family, tiny_models.SIZES | more | options)


def permuted(weight, heads):
    """The permutation of q and k by llama.cpp's converter."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model, older=False) -> dict[str, np.ndarray]:
    """older: of a mixture, a tensor per expert."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    llama = not config.model_type.startswith("qwen")

    def convert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        part = name.split(".")[-2]
        if part != "experts":
            return {name: permuted(value, heads[part]) if llama and part in heads else value}
        names = [name]  # [E, 2 F, D] gate and up, or [E, D, F] down
        if "down" not in name:
            names = [name.replace("gate_up", kind) for kind in ("gate", "up")]
        stacks = value.chunk(len(names), 1)
        return {f"{part}.weight": stack for part, stack in zip(names, stacks)}

    tensors = tiny_models.gguf_tensors(model, convert=convert)
    if not older:
        return tensors
    each = {}
    for name, value in tensors.items():
        if "_exps" in name:
            each |= {name.replace("_exps", f".{e}"): matrix for e, matrix in enumerate(value)}
        else:
            each[name] = value
    return each


def metadata_of(model) -> dict:
    kind = model.config.model_type
    name = kind.replace("_", "") if kind.startswith("qwen") else "llama"
    further = {}
    if kind == "qwen3_moe":
        further["expert_feed_forward_length"] = model.config.moe_intermediate_size
    return tiny_models.metadata_of(model, name, further)


def write_model(path, model, kinds="F32", extra=None, **options) -> Path:
    tensors = gguf_tensors(model, **options)
    if model.config.rope_parameters["rope_type"] == "llama3":
        plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        tensors["rope_freqs.weight"] = factors.astype(np.float32)
    return write(path, metadata_of(model) | (extra or {}), tensors, kinds)


def widened(model, kind):
    """The model with the weights that a file of this type holds."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                coded = gguf.quantize(p.numpy(), Kind[kind])
                numbers = np.array(gguf.dequantize(coded, Kind[kind]))
                p.copy_(torch.from_numpy(numbers).view(p.shape))
    return model


# ------------------------------------------------------------------------------------------ tensors


@pytest.mark.parametrize("case", CASES)
def test_architectures(tmp_path, case):
    family, options = CASES[case]
    reference = hf_model(family, **options)
    path = write_model(tmp_path / "m.gguf", reference, older=case.startswith("older"))
    model = load_model(path)
    assert_same_logits(model, reference)
    assert model.config.tie_embeddings == (case == "tied") and model.config.dtype == "float32"
    tiny_models.assert_same_config(path, reference, {"norm_eps", "rope_theta", "rope_scaling"})
    names = weight_names(model.config)
    weights = export_weights(load_model(tmp_path / "hf"), names, model.config, torch.float32)
    for name, value in weights.items():
        assert torch.equal(GgufFile(path).read(name), value), name


@pytest.mark.parametrize("missing", ["attn_output", "attn_q", "ffn_(up|gate)", "attn_v.*1"])
def test_biases_of_some_layers(tmp_path, capsys, missing):
    """As in llama.cpp, each bias is taken where it is there: a LLaMA made of a Qwen has no bias of o."""
    reference = hf_model(attention_bias=True, mlp_bias=True)
    lacks = [
        name for name in reference.state_dict()
        if name.endswith(".bias") and re.search(missing, gguf_name(name))
        or missing == "attn_v.*1" and name == "model.layers.1.self_attn.v_proj.bias"
    ]  # fmt: skip
    tensors = gguf_tensors(reference)
    for name in lacks:
        del tensors[gguf_name(name)]
        reference.state_dict()[name].zero_()
    path = write(tmp_path / "m.gguf", metadata_of(reference), tensors)
    assert lacks and read_config(path).qkv_bias and read_config(path).o_bias
    assert_same_logits(load_model(path), reference)
    assert f"{len(lacks)} missing bias(es) are zero: {sorted(lacks)[0]}" in capsys.readouterr().err
    coded = write(tmp_path / "q.gguf", metadata_of(reference), tensors, "Q8_0")
    engine = load(checkpoint=str(coded), device="cpu", prompt_ids="5")  # in blocks
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


def test_large_tensors_are_made_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("files.gguf.cpu_operators_are_loaded", lambda: False)
    monkeypatch.setattr("files.gguf.PIECE", 96 * 32)  # neither rows nor tensors end with a piece
    reference = hf_model()
    path = write_model(tmp_path / "m.gguf", reference, "Q4_1")
    assert_same_logits(load_model(path, torch.float32), widened(reference, "Q4_1"))


def test_other_quantities_of_rope_freqs(tmp_path):
    reference = hf_model()
    tensors = gguf_tensors(reference) | {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write(tmp_path / "m.gguf", metadata_of(reference), tensors)
    assert_same_logits(load_model(path), reference)
    tensors["rope_freqs.weight"][3] = 2
    path = write(tmp_path / "n.gguf", metadata_of(reference), tensors)
    says = "rope_freqs.weight is not LLaMA-3.1's scaling; use the original model"
    with pytest.raises(ValueError, match=says):
        load_model(path)


# --------------------------------------------------------------------------------------- tokenizers

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Qwen3.5's tokenizer.json
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def split_by(*patterns, digits=False):
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    if digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=False)])


# Mistral-Nemo's, DeepSeek-LLM's and DeepSeek-Coder's tokenizer.json
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
# the o200k vocabulary's own, in gpt-oss' tokenizer.json
GPT4O = r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""  # fmt: skip
CASED = "".join(  # the letters with two cases, which the file lists, but for Georgian ones
    re.escape(chr(i))
    for i in range(0x10000)
    if unicodedata.category(chr(i)) in ("Lu", "Ll", "Lt") and not 0x10D0 <= i <= 0x10FF
)
DEEPSEEK = (r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+")  # fmt: skip


SPLITS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": split_by(LLAMA3),
    "qwen2": split_by(QWEN2),
    "qwen35": split_by(QWEN35),
    "glm4": split_by(LLAMA3),
    "lfm2": split_by(LLAMA3),
    "tekken": split_by(TEKKEN),
    "gpt-4o": split_by(GPT4O),
    "deepseek-llm": split_by(*DEEPSEEK, digits=True),
    "deepseek-coder": split_by(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK[-1], digits=True),
}
MORE = [
    *LINES, "12345 678 ½²³ ٣٤٥", "  5 6\n\n 7", "It's WE'LL I'm", "e\u0301 é ﬁ", "a\r\n\r\nb \t c",
    "x" * 40, "camelCaseWord HTTPServer ÀÉî Straße",
    "Ελληνικά Русский ქართული ᲥᲐᲠᲗᲣᲚᲘ ᏣᎳᎩ Ａｂｃ ﬁn ªº ǅ ʔa", "你好，世界！“quoted” 한국어 ひらがな /path/to\n ",
]  # fmt: skip


def train_bpe(name) -> Backend:
    tok = Backend(models.BPE(ignore_merges=name in ("llama-bpe", "lfm2", "tekken")))
    tok.pre_tokenizer, tok.decoder = SPLITS[name], decoders.ByteLevel()
    if name in ("qwen2", "qwen35"):
        tok.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": CONTROLS, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, **options)
    tok.train_from_iterator(MORE * 4, trainer)
    tok.add_tokens([AddedToken("工具 tool", normalized=False)])
    return tok


def bpe_metadata(tok: Backend, pre: str | None) -> dict:
    ids = sorted((i, token) for token, i in tok.get_vocab().items())
    added = {i: token.special for i, token in tok.get_added_tokens_decoder().items()}
    merges = json.loads(tok.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for _, token in ids],
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[added.get(i)] for i, _ in ids],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | ({"tokenizer.ggml.pre": pre} if pre else {})


BPE_METADATA = bpe_metadata(train_bpe("gpt-2"), "gpt-2")
NAME = {"general.architecture": "llama"}


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_bpe(tmp_path, name):
    original = train_bpe(name)
    tok = Tokenizer.load(write(tmp_path / "t.gguf", NAME | bpe_metadata(original, name), {}))
    for text in [*TEXTS, *MORE, "a工具 toolb", "<|im_start|>user\nhi<|im_end|>"]:
        for special in (False, True):
            original.encode_special_tokens = not special
            ids = original.encode(text, add_special_tokens=False).ids
            assert tok.encode(text, bos=False, special=special) == ids, text
        assert tok.decode(ids) == original.decode(ids), text
    assert tok.adds_bos == (name in ("llama-bpe", "lfm2", "tekken"))
    assert (tok.bos_id, tok.eos_ids) == (1, (2,))


def test_bos_and_eos(tmp_path):
    ids = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5}
    keys = {"tokenizer.ggml.add_bos_token": True} | ids
    path = write_model(tmp_path / "m.gguf", hf_model(), extra=BPE_METADATA | keys)
    tok = Tokenizer.load(path)
    assert tok.encode("a")[0] == 1 and tok.encode("<|im_start|>a", special=True).count(1) == 1
    assert tok.eos_ids == (0,) and read_raw(path)["eos_token_id"] == [0, 5, 2]  # 2 is <|im_end|>
    assert read_config(path).eos_ids == (0, 5, 2)
    assert tok.special == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    keys = {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2}
    tok = Tokenizer.load(write(tmp_path / "n.gguf", NAME | BPE_METADATA | keys, {}))
    assert tok.special["unk_token"] == "<|endoftext|>" and tok.special["pad_token"] == "<|im_end|>"
    keys["tokenizer.ggml.padding_token_id"] = 10**6  # nothing but a template asks for it
    tok = Tokenizer.load(write(tmp_path / "n.gguf", NAME | BPE_METADATA | keys, {}))
    assert "unk_token" in tok.special and "pad_token" not in tok.special


# texts of added tokens: those in llama.cpp's special_eog_ids, and others
# at commit 00ad355, by family
ENDS = {
    "llama 2, mistral": (["</s>"], ["<s>", "<unk>", "[INST]"]),
    "llama 3": (
        ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        ["<|begin_of_text|>", "<|start_header_id|>", "<|finetune_right_pad_id|>"],
    ),
    "qwen": (
        ["<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ["<|im_start|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<tool_call>", "</think>"],
    ),
    "deepseek": (["<｜end▁of▁sentence｜>"], ["<|EOT|>", "<｜begin▁of▁sentence｜>", "<｜fim▁hole｜>"]),
    "code llama": (["_<EOT>", "<EOT>", "<PAD>"], ["▁<PRE>", "▁<SUF>", "▁<MID>"]),
    "granite": (["<|end_of_text|>", "<fim_pad>", "<reponame>"], ["<|start_of_role|>", "<fim_prefix>"]),
    "phi": (["<|endoftext|>", "<|end|>"], ["<|user|>", "<|assistant|>"]),
    "gemma": (["<eos>", "<end_of_turn>"], ["<bos>", "<start_of_turn>"]),
    "gemma 4": (["<eos>", "<turn|>", "<|tool_response>"], ["</s>", "<|turn>"]),
    "harmony": (["<|return|>", "<|call|>"], ["<|end|>", "<|start|>", "<|message|>"]),
    "solar": (["<|flush|>", "<|calls|>"], ["<|end|>"]),
    "kimi": (["[EOS]", "[EOT]", "[PAD]"], ["[BOS]"]),
    "smol": (["<|endoftext|>", "<|im_end|>", "<end_of_utterance>"], ["<repo_name>", "<file_sep>"]),
    "others": (["[e~[", "<fim-pad>", "<|fim_repo|>", "<fim-repo>", "<REPO>"], ["<|eos|>", "<END>"]),
}  # fmt: skip


# the types of their ends in turn: normal, control, user-defined, unused
@pytest.mark.parametrize("family, kind", [*zip(ENDS, cycle([1, 3, 4, 5]))])
def test_ends_of_a_text(tmp_path, family, kind):
    ends, others = ENDS[family]
    plain = [BPE_METADATA[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type")]
    plain = [list(values[3:]) for values in plain]  # without its own control tokens
    count = len(plain[0])
    metadata = BPE_METADATA | {
        "tokenizer.ggml.tokens": plain[0] + ends + others,
        "tokenizer.ggml.token_type": plain[1] + [kind] * len(ends) + [3] * len(others),
        "tokenizer.ggml.bos_token_id": count + len(ends),
        "tokenizer.ggml.eos_token_id": count,
    }
    path = write_model(tmp_path / "m.gguf", hf_model(), extra=metadata)
    ids = list(range(count, count + len(ends)))
    assert sorted(read_config(path).eos_ids) == ids
    tok = Tokenizer.load(path)
    for id, text in zip(ids, ends):  # they are read in chats, and never shown
        assert tok.encode(text, bos=False, special=True) == [id]
        assert tok.encode(text, bos=False) != [id] and tok.decode([id]) == ""


@pytest.mark.parametrize(
    "keys",
    [
        {"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]},
        {"attention.sliding_window": 0, "rope.scaling.factor": 0.0, "expert_count": 0},
    ],
    ids=["a size of each layer", "zeros that mean none"],
)
def test_values_that_change_nothing(tmp_path, keys):
    reference = hf_model()
    extra = {f"llama.{key}": value for key, value in keys.items()}
    path = write_model(tmp_path / "m.gguf", reference, extra=extra)
    assert read_config(path) == read_config(write_model(tmp_path / "n.gguf", reference))
    assert_same_logits(load_model(path), reference)


def test_special_ids_beyond_the_vocabulary(capsys, tmp_path):
    keys = {f"tokenizer.ggml.{kind}_token_id": 10**6 for kind in ("bos", "eos", "eot", "eom")}
    path = write_model(tmp_path / "m.gguf", hf_model(), extra=BPE_METADATA | keys)
    tok = Tokenizer.load(path)
    count = len(BPE_METADATA["tokenizer.ggml.tokens"])
    said = f"note: {path}: bos_token_id 1000000 is not one of the {count} tokens; it is ignored\n"
    assert capsys.readouterr().err == said + said.replace("bos", "eos")
    assert (tok.bos_id, tok.eos_ids, tok.adds_bos) == (None, (), False)
    assert read_config(path).eos_ids == (0, 2)


@pytest.mark.parametrize("strange", [0, 7, -1])
def test_a_strange_type_of_token_is_a_normal_one(tmp_path, strange):
    types = [strange if kind == 1 else kind for kind in BPE_METADATA["tokenizer.ggml.token_type"]]
    changes = {"tokenizer.ggml.token_type": types}
    plain = Tokenizer.load(write(tmp_path / "m.gguf", NAME | BPE_METADATA, {}))
    ours = Tokenizer.load(write(tmp_path / "n.gguf", NAME | BPE_METADATA | changes, {}))
    for text in TEXTS:
        assert ours.encode(text, special=True) == plain.encode(text, special=True)


@pytest.mark.parametrize("pre", [None, "default", "gpt-2"])
def test_a_file_that_names_no_pre_tokenizer(capsys, tmp_path, pre):
    metadata = NAME | bpe_metadata(train_bpe("gpt-2"), pre)
    path = write(tmp_path / "t.gguf", metadata, {})
    assert Tokenizer.load(path).encode(MORE[-1]) == train_bpe("gpt-2").encode(MORE[-1]).ids
    note = f"note: {path} names no pre-tokenizer; GPT-2's is taken\n"
    assert capsys.readouterr().err == ("" if pre == "gpt-2" else note)


def test_texts_that_are_not_utf8(tmp_path):
    """Of a description and of tokens: llama.cpp loads such files, and so do we."""
    metadata = bpe_metadata(train_bpe("gpt-2"), "gpt-2")
    strange = b"M\xfcller"
    tokens = [*metadata["tokenizer.ggml.tokens"], strange.decode("latin-1")]
    types = [*metadata["tokenizer.ggml.token_type"], 1]
    further = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    described = {"general.description": strange.decode("latin-1")}
    path = write(tmp_path / "t.gguf", NAME | metadata | further | described, {})
    content = path.read_bytes()
    encoded = strange.decode("latin-1").encode()
    for count in (1, 1):  # the description and the token, with their lengths
        content = content.replace(struct.pack("<Q", len(encoded)) + encoded, struct.pack("<Q", len(strange)) + strange, count)  # fmt: skip
    assert encoded not in content
    path.write_bytes(content)
    plain = Tokenizer.load(write(tmp_path / "p.gguf", NAME | metadata, {}))
    ours = Tokenizer.load(path)
    assert ours.vocab_size == plain.vocab_size + 1
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path, prefix):
    train_sp(tmp_path, add_dummy_prefix=prefix, user_defined_symbols=["<tool>"])
    sp = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    types = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 4 if sp.id_to_piece(i) == "<tool>" else 1
        for i in range(len(sp))
    ]  # fmt: skip
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(len(sp))],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in range(len(sp))],
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    if prefix:  # the default
        del metadata["tokenizer.ggml.add_space_prefix"]
    (tmp_path / "added_tokens.json").write_text("{}")
    added = {str(types.index(4)): {"content": "<tool>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (tmp_path / "gguf").mkdir()
    ours = Tokenizer.load(write(tmp_path / "gguf" / "t.gguf", NAME | metadata, {}))
    original = Tokenizer.load(tmp_path)
    for text in [*TEXTS, *MORE, "a<tool> b", "</s>a <s> b"]:
        for special in (False, True):
            ids = original.encode(text, special=special)
            assert ours.encode(text, special=special) == ids, text
            for continued in (False, True):
                assert ours.decode(ids, continued) == original.decode(ids, continued)
    for text in sentencepiece_texts():
        assert ours.encode(text, bos=False) == sp.encode(text), text
        assert ours.encode(text, special=True) == original.encode(text, special=True), text
        assert ours.decode(sp.encode(text)) == sp.decode(sp.encode(text)), text
    assert ours.token_bytes() == original.token_bytes() and ours.adds_bos
    assert ours.strips_space == original.strips_space == prefix
    if prefix:
        fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="t.gguf")
        for text in [t for t in TEXTS if t.strip() and "▁" not in t and not t.startswith(" ")]:
            assert ours.encode(text) == fast(text).input_ids, text


def sentencepiece_texts(count=1000) -> list[str]:
    """Deterministic texts: words, spaces at every place, the mark of a space itself, and the names of control tokens."""
    parts = [
        " ", "  ", "   ", "\t", "\n", "▁", "▁▁", "<s>", "</s>", "<unk>", "<0x0A>", "def", "f(x)",
        "return", "hello", "é", "e\u0301",
    ]  # fmt: skip
    parts += ["中文", "🙂", "12", "3.14", "\u00a0", "\u3000", "\u200b", "It's"]
    rng = random.Random(0)
    return ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(count)]


SPOILT_TOKENIZERS = {
    "pre": ({"tokenizer.ggml.pre": "jais"}, "the pre-tokenizer jais is not one of gpt-2, .*; use --prompt_ids"),
    "kind": ({"tokenizer.ggml.model": "bert"}, "the tokenizer bert is not one of gpt2, gemma4, llama"),
    "no tokens": ({"tokenizer.ggml.tokens": "x"}, "tokenizer.ggml.tokens must be a list, not 'x'"),
    "numbers": ({"tokenizer.ggml.tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must be a list of texts"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, "the tokenizer's merges are broken"),
    "strange merges": ({"tokenizer.ggml.merges": ["qqq zzz"]}, "the tokenizer's merges are broken"),
    "types": ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type must be a whole number for every token"),
    "scores": ({"tokenizer.ggml.model": "llama"}, "the metadata tokenizer.ggml.scores is missing"),
    "no unknown": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0] * len(BPE_METADATA["tokenizer.ggml.tokens"])},
        "holds no sentencepiece model .*; use --prompt_ids",
    ),
    "short scores": ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]}, "must be a number per token"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT_TOKENIZERS)
def test_tokenizers_that_are_refused(tmp_path, how):
    spoilt, says = SPOILT_TOKENIZERS[how]
    with pytest.raises(ValueError, match=says) as error:
        Tokenizer.load(write(tmp_path / "t.gguf", NAME | BPE_METADATA | spoilt, {}))
    assert "\n" not in str(error.value) and "t.gguf" in str(error.value)


def test_chat_template(tmp_path):
    path = write(tmp_path / "t.gguf", NAME | {"tokenizer.chat_template": "{{ messages }}"}, {})
    assert chat_template_text(path) == "{{ messages }}"
    named = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    path = write(tmp_path / "v.gguf", NAME | named, {})
    assert (template_text(path), template_text(path, "tool_use")) == ("a", "b")
    assert template_text(path, "rag") is None
    assert chat_template_text(write(tmp_path / "u.gguf", NAME, {})) is None


# ---------------------------------------------------------------------------------------- bad files


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
FOREIGN = {
    "empty": (b"", "it is empty"),
    "magic": (b"PK\x03\x04" + bytes(100), "it does not begin with GGUF"),
    "short": (b"GGUF\x03", "it ends within its header"),
    "version": (b"GGUF" + struct.pack("<IQQ", 7, 0, 0), "version 7 is not 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version of a big-endian file"),
    "many tensors": (header(tensors=HUGE), f"a count of {HUGE}"),
    "many keys": (header(keys=HUGE), f"a count of {HUGE}"),
    "long key": (header(struct.pack("<Q", HUGE), keys=1), f"a text of {HUGE} bytes"),
    "long text": (header(text("a"), struct.pack("<IQ", 8, HUGE), keys=1), f"a text of {HUGE} bytes"),
    "long list": (header(text("a"), struct.pack("<IIQ", 9, 4, HUGE), keys=1), f"a count of {HUGE}"),
    "nested": (header(text("a"), struct.pack("<IIQ", 9, 9, 1), keys=1), "a list has the type 9"),
    "kind": (header(text("a"), struct.pack("<I", 77), keys=1), "a value has the type 77"),
    "twice": (header(*[text("a") + struct.pack("<II", 4, 1)] * 2, keys=2), "it has a twice"),
    "utf-8": (header(struct.pack("<Q", 2) + b"\xff\xfe", struct.pack("<II", 4, 1), keys=1), "the metadata general.architecture is missing"),
    "dimensions": (header(text("t"), struct.pack("<I", 2**31), tensors=1), "t has 2147483648 dimensions"),
    "alignment": (header(text("general.alignment"), struct.pack("<II", 4, 0), keys=1), "must be a power of two; it is 0"),
    "no architecture": (header(), "the metadata general.architecture is missing"),
}  # fmt: skip


@pytest.mark.parametrize("how", FOREIGN)
def test_foreign_files(capsys, tmp_path, how):
    content, says = FOREIGN[how]
    (tmp_path / "m.gguf").write_bytes(content)
    err = refused(capsys, "--checkpoint", str(tmp_path / "m.gguf"))
    assert says in err and "m.gguf" in err, err


@pytest.mark.parametrize("share", [0.02, 0.3, 0.8, 0.999])
def test_truncated_files(capsys, whole, tmp_path, share):
    content = whole[0].read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(len(content) * share)])
    err = refused(capsys, "--checkpoint", str(tmp_path / "m.gguf"))
    assert "download it again" in err and "m.gguf" in err, err


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


NAN = float("nan")
METADATA = {
    "adapter": ({"general.type": "adapter"}, "is an adapter .LoRA. and no model; merge it"),
    "architecture": ({"general.architecture": "gemma2"}, "the architecture gemma2 is not supported; supported are llama, qwen2, qwen2moe, qwen3"),
    "missing": ({"llama.block_count": None}, "the metadata llama.block_count is missing"),
    "text": ({"llama.block_count": "two"}, "the metadata llama.block_count must be a whole number, not 'two'"),
    "list": ({"llama.embedding_length": [64, 64]}, r"llama.embedding_length must be a whole number, not \[64, 64\]"),
    "many layers": ({"llama.block_count": 2**32 - 1}, "llama.block_count must be 1 to 1048576; it is 4294967295"),
    "more layers": ({"llama.block_count": 500}, "the file has fewer layers than block_count"),
    "one more layer": ({"llama.block_count": 3}, "9 missing weight"),
    "wide": ({"llama.embedding_length": 2**20}, r"token_embd.weight must be \[tokens, embedding_length\]"),
    "ffn": ({"llama.feed_forward_length": 2**20}, "has shape .* asks for"),
    "heads": ({"llama.attention.head_count": 0}, "head_count must be 1 to 1048576; it is 0"),
    "kv heads": ({"llama.attention.head_count_kv": 3}, "head_count_kv must divide head_count"),
    "odd heads": ({"llama.attention.head_count": 3, "llama.attention.head_count_kv": 3}, "has shape .* asks for"),
    "experts": ({"llama.expert_count": 2**20}, "expert_count must be at most 1024"),
    "experts missing": ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "missing weight"),
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
    "narrow heads": (
        {f"llama.{k}": v for k, v in {
            "attention.head_count": 64, "attention.head_count_kv": 32, "attention.key_length": 1,
            "attention.value_length": 1, "rope.dimension_count": 1,
        }.items()},
        "key_length must be even; convert",
    ),
    "no heads' width": ({"llama.attention.head_count": 2**20, "llama.attention.key_length": None}, "key_length must be even"),
    "wide heads": ({"llama.attention.key_length": 2**20}, "head_count times key_length must be at most 1048576"),
    "window": ({"llama.attention.sliding_window": -4}, "sliding_window must be 1 to 16777216; it is -4"),
    "context": ({"llama.context_length": 0}, "context_length must be 1 to 16777216; it is 0"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon must be a finite number above 0; it is -1.0"),
    "base": ({"llama.rope.freq_base": NAN}, "rope.freq_base must be a finite number above 0; it is nan"),
    "factor": ({"llama.rope.scaling.factor": -3.0}, "rope.scaling.factor must be a finite number above 0; it is -3.0"),
    "parts": ({"split.count": 3}, "is part 1 of 3, and m-00002-of-00003.gguf is not beside it; download every part"),
    "eos": ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id must be a whole number, not '2'"),
}  # fmt: skip


@pytest.mark.parametrize("how", METADATA)
def test_metadata_that_is_refused(capsys, whole, tmp_path, how):
    spoilt, says = METADATA[how]
    keys = metadata_of(whole[1]) | BPE_METADATA | spoilt
    keys = {key: value for key, value in keys.items() if value is not None}
    path = write(tmp_path / "m.gguf", keys, gguf_tensors(whole[1]))
    err = refused(capsys, "--checkpoint", str(path))
    assert re.search(says, err) and "m.gguf" in err, err


UP = "blk.1.ffn_up"
REFUSED_TENSORS = [  # the tensor, a function of its content or None: left out, what the line says
    ("", lambda w: (Kind.I8, np.zeros(w.shape, np.int8)), f"{UP}.weight has the type I8, which is not one of F32, F16, BF16, I64, Q8_0"),
    ("", lambda w: (Kind.IQ4_NL, np.zeros((96, 36), np.uint8)), f"{UP}.weight has the type IQ4_NL"),
    ("model.layers.0.other.weight", lambda w: w, "1 unexpected weight(s): model.layers.0.other.weight"),
    ("", None, "m.gguf: 1 missing weight(s): model.layers.1.mlp.up_proj.weight; use another file"),
    (f"{UP}_exps.weight", lambda w: w[:, 0], f"{UP}_exps.weight has the shape [96]; experts are a stack of at most 1024 matrices"),
    ("", lambda w: w[None], "has shape [96, 64] + [1, 96, 64]"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, says", REFUSED_TENSORS, ids=range(len(REFUSED_TENSORS)))
def test_tensors_that_are_refused(capsys, whole, tmp_path, name, change, says):
    tensors, usual = gguf_tensors(whole[1]), f"{UP}.weight"
    tensors[name or usual] = change and change(tensors[usual])
    tensors = {key: value for key, value in tensors.items() if value is not None}
    path = write(tmp_path / "m.gguf", metadata_of(whole[1]), tensors)
    assert says in refused(capsys, "--checkpoint", str(path))


def test_shapes_and_types_that_are_refused(capsys, whole, tmp_path):
    content, name = whole[0].read_bytes(), text(f"{UP}.weight")
    at = content.index(name) + len(name) + 4
    for fields, says in (
        ((HUGE, 96, 8), "is truncated"), ((63, 96, 8), "is no multiple of 32"),
        ((0, 96, 8), "is no multiple of"), ((64, 96, 99), f"{UP}.weight has the type 99"),
    ):  # fmt: skip
        path = tmp_path / "m.gguf"
        path.write_bytes(content[:at] + struct.pack("<QQI", *fields) + content[at + 20 :])
        assert says in refused(capsys, "--checkpoint", str(path))


def test_a_missing_file(capsys, tmp_path):
    path = str(tmp_path / "no.gguf")
    said = f"cannot read {path}: No such file or directory; check the path"
    assert said in refused(capsys, "--checkpoint", path)


def test_a_model_is_no_head_and_no_source_of_codes(capsys, whole, tmp_path):
    path = str(whole[0])
    err = refused(capsys, "--checkpoint", path, "--eagle", path)
    assert f"{path} holds a model, and no head; use --draft model --draft_checkpoint" in err
    for argv in ([path], ["--checkpoint", path, "--out", str(tmp_path / "out")]):
        said = f"{path} is a GGUF file, which runs in its own bits as it is: python generate.py"
        assert said in helpers.refused(capsys, run_quantize.main, argv)


# --------------------------------------------------------------------------------------- end to end


def test_a_bundled_head_has_the_files_stem(whole, tmp_path):
    path = tmp_path / "model.Q4_0.gguf"
    path.write_bytes(whole[0].read_bytes())
    assert resolve_draft(GenerateConfig(checkpoint=str(path)), path).draft == "none"
    head = tmp_path / "model.Q4_0-eagle"
    head.mkdir()
    (head / "config.json").write_text("{}")
    config = resolve_draft(GenerateConfig(checkpoint=str(path)), path)
    assert (config.draft, config.head) == ("eagle", str(head))


def test_a_folder_with_one_file_stands_for_it(whole, tmp_path, capsys):
    """As hubs' programs make them; the part that reads pictures is no model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.Q8_0.gguf").write_bytes(whole[0].read_bytes())
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "config.json").write_text('{"model_type": "llama"}')  # as some hubs' folders have it
    options = {"device": "cpu", "dtype": "float32", "ignore_eos": True, "max_new_tokens": 8}
    want = generate(load(checkpoint=str(whole[0]), **options), [[5, 17, 3]]).tokens
    engine = load(checkpoint=str(folder), **options)
    assert generate(engine, [[5, 17, 3]]).tokens == want
    assert engine.config.checkpoint == str(folder / "model.Q8_0.gguf")
    draft = {"draft": "model", "draft_checkpoint": str(folder)}
    assert generate(load(checkpoint=str(folder), **draft, **options), [[5, 17, 3]]).tokens == want
    capsys.readouterr()
    (folder / "other.gguf").write_bytes(b"GGUF")
    said = refused(capsys, "--checkpoint", str(folder))
    assert "; name one of model.Q8_0.gguf, other.gguf" in said
    (folder / "config.json").unlink()
    said = refused(capsys, "--checkpoint", str(folder))
    assert "name one of its GGUF files: model.Q8_0.gguf, other.gguf" in said


def test_ollamas_file_has_no_suffix(whole, tmp_path, monkeypatch):
    """By its path and by the model's name; its title is the one within the file."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    metadata = metadata_of(whole[1]) | BPE_METADATA | {"general.name": "Tiny One"}
    file = write(tmp_path / "t.gguf", metadata, gguf_tensors(whole[1]), "Q8_0")
    blob = tmp_path / "blobs" / write_ollama(tmp_path, "library/tiny/latest", file)
    options = {"device": "cpu", "ignore_eos": True, "max_new_tokens": 24}
    want = generate(load(checkpoint=str(whole[0]), **options), [[5, 17, 3]]).tokens
    for name in ("ollama:tiny", str(blob)):
        engine = load(checkpoint=name, **options)
        assert generate(engine, [[5, 17, 3]]).tokens == want
        assert title_of(Path(engine.config.checkpoint)) == "Tiny One"
    engine = load(
        checkpoint=str(whole[0]), draft="model", draft_checkpoint="ollama:tiny", **options
    )
    assert generate(engine, [[5, 17, 3]]).tokens == want


def test_the_second_part_of_a_file(tmp_path, capsys):
    """It has no metadata of a model."""
    path = tmp_path / "m-00002-of-00003.gguf"
    write(path, {"general.architecture": "llama", "split.no": 1, "split.count": 3}, {})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"general.architecture", b"general.architectura"))
    said = refused(capsys, "--checkpoint", str(path))
    assert said.endswith("is part 2 of 3; name the first one, m-00001-of-00003.gguf")
    with pytest.raises(ValueError, match="part 2 of 3"):
        load(checkpoint=str(path), device="cpu")


def test_a_file_in_parts_is_named_by_its_first(whole, tmp_path, capsys):
    """As llama-gguf-split writes it: the first part has the metadata, each has tensors of its own."""
    tensors = list(gguf_tensors(whole[1]).items())
    paths = [tmp_path / f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    metadata = metadata_of(whole[1]) | BPE_METADATA | {"split.count": 3}
    for number, path in enumerate(paths):
        write(path, metadata | {"split.no": number}, dict(tensors[number::3]), "Q8_0")
        metadata = {"general.architecture": "llama", "split.count": 3}
    options = {"device": "cpu", "ignore_eos": True, "max_new_tokens": 24}
    want = generate(load(checkpoint=str(whole[0]), **options), [[5, 17, 3]]).tokens
    assert generate(load(checkpoint=str(paths[0]), **options), [[5, 17, 3]]).tokens == want
    capsys.readouterr()
    content = paths[2].read_bytes()
    paths[2].write_bytes(content[:-5])
    assert "is truncated" in refused(capsys, "--checkpoint", str(paths[0]))
    paths[2].write_bytes(paths[1].read_bytes())
    assert "as another part has" in refused(capsys, "--checkpoint", str(paths[0]))
    paths[2].unlink()
    assert "m-00003-of-00003.gguf is not beside it" in refused(
        capsys, "--checkpoint", str(paths[0])
    )


# -------------------------------------------------------------------------------------- a real file


def many_texts(count: int) -> list[str]:
    """Deterministic texts: pieces of code, spaces, emoji, Chinese, digits and control tokens, and real prompts."""
    rng, texts = random.Random(0), [*TEXTS, *MORE]
    for file in sorted((ROOT / "data" / "eval").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if len(texts) < count // 2:
                texts += json.loads(line).get("turns", [])[:1]
    parts = [
        "def f(x):\n", "\treturn x**2", "    ", "  ", " ", "\n\n", "\r\n", "\t", "# comment", "{'a': [1, 2]}", "!=", "->",
        "🙂", "👩‍👩‍👧", "🇩🇪", "中文", "你好，世界", "日本語のテキスト", "naïve", "Größe", "e\u0301", "ﷺ", "½", "²", "٣٤", "Ⅷ", "1234567890",
        "3.14", "0x1F", "1e-5", "2024-01-01", "hello", " world", "It's", " we'll", "I'M", "\u00a0", "\u3000", "\u200b",
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_code>", "<|im", "▁", "<0x0A>", "Ġ",
    ]  # fmt: skip
    while len(texts) < count:
        texts.append("".join(rng.choices(parts, k=rng.randint(1, 12))))
    return texts


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


@pytest.fixture(scope="module")
def real_truth(smollm2):
    """SmolLM2's tokenizer.json in words of the tokenizers library: single digits, then GPT-2's words."""
    metadata = read_header(smollm2).metadata
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    truth = Backend(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    truth.pre_tokenizer, truth.decoder = SPLITS["smollm"], decoders.ByteLevel()
    truth.add_special_tokens(tokens[:17])
    return truth


@pytest.mark.smollm2
@pytest.mark.parametrize("count", [300, *slow([2000])])
def test_a_real_files_tokenizer(smollm2, real_truth, count):
    """llama.cpp's expression splits as `real_truth` does."""
    ours = Tokenizer.load(smollm2)
    texts = many_texts(count)
    assert len(texts) == count
    for text in texts:
        ids = real_truth.encode(text).ids
        assert ours.encode(text, special=True) == ids, text
        assert ours.decode(ids) == real_truth.decode(ids), text
    assert ours.vocab_size == 49152 and not ours.adds_bos and ours.eos_ids == (2,)
    # as llama.cpp prints them for this model: <|im_end|>, <|endoftext|>, <reponame>
    assert sorted(read_config(smollm2).eos_ids) == [0, 2, 4]
