"""Tokenizers in GGUF files: they read as the tokenizers library and sentencepiece do, and broken ones are refused in one line."""

import json
import random
import re
import unicodedata
from itertools import cycle
from pathlib import Path

import pytest
import sentencepiece as spm
import transformers
from test_tokenizer import LINES, TEXTS, train_sp
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from files import gguf as gguf_file
from files import gguf_tokenizer, registry
from files.config import read_config, read_raw
from files.gguf_header import read_header
from files.tokenizer import Tokenizer
from gguf_models import hf_model, write_model
from helpers import slow
from tiny_models import names_in_files, without_leaf, write

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
    "seed-coder": split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
# tokenizer.ggml.pre of published files, by their architecture; "": a sentencepiece model, or Gemma 4's.
# Source: llama.cpp's converter (get_vocab_base_pre), August 2026; its readers make the ids of our tests
PUBLISHED = {
    "llama": "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 smollm starcoder refact minerva-7b gpt-2 mellum trillion "
             "granite-docling tekken deepseek-llm deepseek-coder seed-coder smaug-bpe megrez",
    "qwen2": "qwen2 deepseek-r1-qwen a.x-4.0", "qwen3": "qwen2 f2llmv2", "qwen35": "qwen35", "qwen35moe": "qwen35",
    **dict.fromkeys(("qwen2moe", "qwen3moe", "qwen3next"), "qwen2"),
    **dict.fromkeys(("lfm2", "lfm2moe"), "lfm2"), **dict.fromkeys(("gemma3", "gemma4"), ""),
    "glm4": "glm4 chatglm-bpe", "glm4moe": "glm4", "gpt-oss": "gpt-4o", "smollm3": "smaug-bpe", "phi3": "dbrx gpt-4o", "olmo2": "dbrx", "granite": "refact dbrx",
}  # fmt: skip
# names that the package lists, and that no published file of such a model has, or that are refused
UNREAD = {
    "blk.{bid}.attn_rot_embd",
    "blk.{bid}.attn_qkv",
    "dense_2",
    "rope_factors_long",
    "rope_factors_short",
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


def test_no_architecture_without_the_names_of_its_files():
    """Pre-tokenizers and tensors; the keys of files: families.py."""
    assert PUBLISHED.keys() == set(registry.gguf_names())
    assert {
        name for names in PUBLISHED.values() for name in names.split()
    } <= gguf_tokenizer.SPLITS.keys()
    for row in registry.rows():
        if row.gguf:
            layout = row.load().GGUF
            kinds = {*layout.layer, *layout.mixture, *map(without_leaf, layout.changed)}
            kinds |= {f"nextn.{kind}" for kind in layout.nextn}
            ours = {f"blk.{{bid}}.{kind}{of}" for kind in kinds for of in ("", "_exps")} | {
                *layout.beside
            }
            ours |= {*gguf_file.NAMES, "rope_freqs", f"blk.{{bid}}.{gguf_file.GATE_UP}_exps"}
            assert names_in_files(row.gguf) - UNREAD <= ours, row


def load(path: Path, metadata: dict, **changes) -> Tokenizer:
    """Write a file of the tokenizer alone and read it. changes: of its keys, by their last names"""
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.load(write(path / "t.gguf", NAME | metadata | changes, {}))


def test_bos_and_eos(tmp_path):
    ids = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5}
    keys = {"tokenizer.ggml.add_bos_token": True} | ids
    path = write_model(tmp_path / "m.gguf", hf_model(), extra=BPE_METADATA | keys)
    tok = Tokenizer.load(path)
    assert tok.encode("a")[0] == 1 and tok.encode("<|im_start|>a", special=True).count(1) == 1
    assert tok.eos_ids == (0,) and read_raw(path)["eos_token_id"] == [0, 5, 2]  # 2 is <|im_end|>
    assert read_config(path).eos_ids == (0, 5, 2)
    assert tok.special == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    tok = load(tmp_path, BPE_METADATA, unknown_token_id=0, padding_token_id=2)
    assert tok.special["unk_token"] == "<|endoftext|>" and tok.special["pad_token"] == "<|im_end|>"
    tok = load(tmp_path, BPE_METADATA, padding_token_id=10**6)  # a template alone asks for it
    assert "pad_token" not in tok.special


# texts of added tokens: those in llama.cpp's special_eog_ids, and others
# at commit 00ad355, by family
ENDS = {
    "llama 3": (
        ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], ["<|begin_of_text|>", "<|start_header_id|>", "<|finetune_right_pad_id|>"],
    ),
    "qwen": (["<|endoftext|>", "<|im_end|>", "<|fim_pad|>"], ["<|im_start|>", "<|fim_prefix|>", "<tool_call>", "</think>"]),
    "deepseek": (["<｜end▁of▁sentence｜>"], ["<|EOT|>", "<｜begin▁of▁sentence｜>"]),
    "phi": (["<|endoftext|>", "<|end|>"], ["<|user|>", "<|assistant|>"]),
    "gemma 4": (["<eos>", "<turn|>", "<|tool_response>"], ["</s>", "<|turn>"]),
    "harmony": (["<|return|>", "<|call|>"], ["<|end|>", "<|start|>", "<|message|>"]),
    "solar": (["<|flush|>", "<|calls|>"], ["<|end|>"]),
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


def test_special_ids_beyond_the_vocabulary(capsys, tmp_path):
    keys = {f"tokenizer.ggml.{kind}_token_id": 10**6 for kind in ("bos", "eos", "eot", "eom")}
    path = write_model(tmp_path / "m.gguf", hf_model(), extra=BPE_METADATA | keys)
    tok = Tokenizer.load(path)
    count = len(BPE_METADATA["tokenizer.ggml.tokens"])
    said = f"note: {path}: bos_token_id 1000000 is not one of the {count} tokens; it is ignored\n"
    assert capsys.readouterr().err == said + said.replace("bos", "eos")
    assert (tok.bos_id, tok.eos_ids, tok.adds_bos) == (None, (), False)
    assert read_config(path).eos_ids == (0, 2)


TOKENS, TYPES = (BPE_METADATA[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))


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
    for text in random_texts(1000):
        assert ours.encode(text, bos=False) == sp.encode(text), text
        assert ours.encode(text, special=True) == original.encode(text, special=True), text
        assert ours.decode(sp.encode(text)) == sp.decode(sp.encode(text)), text
    assert ours.token_bytes() == original.token_bytes() and ours.adds_bos
    assert ours.strips_space == original.strips_space == prefix
    if prefix:
        fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="t.gguf")
        for text in [t for t in TEXTS if t.strip() and "▁" not in t and not t.startswith(" ")]:
            assert ours.encode(text) == fast(text).input_ids, text


def random_texts(count: int) -> list[str]:
    """Deterministic texts: pieces of code, spaces and their mark, emoji, Chinese, digits and the names of control tokens."""
    parts = [
        "def f(x):\n", "\treturn x**2", "    ", "  ", " ", "\n\n", "\r\n", "\t", "# comment", "{'a': [1, 2]}", "!=", "->",
        "🙂", "👩‍👩‍👧", "🇩🇪", "中文", "你好，世界", "日本語のテキスト", "naïve", "Größe", "e\u0301", "ﷺ", "½", "²", "٣٤", "Ⅷ", "1234567890",
        "3.14", "0x1F", "1e-5", "2024-01-01", "hello", " world", "It's", " we'll", "I'M", "\u00a0", "\u3000", "\u200b",
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_code>", "<|im", "▁", "▁▁", "<0x0A>", "Ġ",
        "<s>", "</s>", "<unk>",
    ]  # fmt: skip
    rng = random.Random(0)
    return ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(count)]


SPOILT_TOKENIZERS = {  # changes of keys, what is said
    "pre": ({"pre": "jais"}, "the pre-tokenizer jais is not one of gpt-2, .*; use --prompt_ids"),
    "kind": ({"model": "bert"}, "the tokenizer bert is not one of gpt2, gemma4, llama"),
    "no tokens": ({"tokens": "x"}, "tokenizer.ggml.tokens must be a list, not 'x'"),
    "numbers": ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must be a list of texts"),
    "merges": ({"merges": ["a b c"]}, "the tokenizer's merges are broken"),
    "strange merges": ({"merges": ["qqq zzz"]}, "the tokenizer's merges are broken"),
    "types": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type must be a whole number for every token"),
    "scores": ({"model": "llama"}, "the metadata tokenizer.ggml.scores is missing"),
    "no unknown": ({"model": "llama", "scores": [1.0] * len(TOKENS)}, "holds no sentencepiece model .*; use --prompt_ids"),
    "short scores": ({"model": "llama", "scores": [1.0]}, "must be a number per token"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT_TOKENIZERS)
def test_tokenizers_that_are_refused(tmp_path, how):
    changes, says = SPOILT_TOKENIZERS[how]
    with pytest.raises(ValueError, match=says) as error:
        load(tmp_path, BPE_METADATA, **changes)
    assert "\n" not in str(error.value) and "t.gguf" in str(error.value)


# -------------------------------------------------------------------------------------- a real file


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
    for text in [*TEXTS, *MORE, *random_texts(count)]:
        ids = real_truth.encode(text).ids
        assert ours.encode(text, special=True) == ids, text
        assert ours.decode(ids) == real_truth.decode(ids), text
    assert ours.vocab_size == 49152 and not ours.adds_bos and ours.eos_ids == (2,)
    # as llama.cpp prints them for this model: <|im_end|>, <|endoftext|>, <reponame>
    assert sorted(read_config(smollm2).eos_ids) == [0, 2, 4]
