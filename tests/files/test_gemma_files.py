"""A real file of Gemma 3, and the tokenizer of Gemma 4's files. Tiny random ones: test_families.py.

The real file is the fixture `gemma3_file`. Its tokens below are those of transformers 5.24 on the
file's weights in fp32, and llama.cpp's (llama-cpp-python 0.3.36) up to the near ties noted there.
"""

from __future__ import annotations

import json

import pytest
import tokenizers

from families import GEMMA4
from files.config import read_config
from files.tokenizer import Tokenizer
from run.library import generate
from run.load import load
from tiny_models import write

SENTENCES = [
    "the cat sat on the mat, and the dog sat by the door", " two  spaces    and\n\n\nlines\t\t.",
    "def f(x):\n    return x  # \u00e9", "\u65e5\u672c \U0001f642", "a", "",
]  # fmt: skip


def test_the_tokenizer_of_gemma_4s_files(tmp_path):
    """BPE of the characters of a line; bytes stand for the rest. llama.cpp makes the same tokens of the texts."""
    special = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "<turn|>"]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, fuse_unk=True))
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    lines = tokenizers.Regex(r"\n+")
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Split(lines, "isolated")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=special)
    theirs.train_from_iterator([text for text in SENTENCES if text.isascii()] * 3, trainer)
    theirs = tokenizers.Tokenizer.from_str(theirs.to_str())
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3 if i < 3 else 6 if i < 259 else 1 for i in range(len(tokens))]
    keys = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.scores": [-1000.0] * len(tokens),
    }  # fmt: skip
    metadata, tensors = GEMMA4.file_of(GEMMA4.make(vocab_size=len(tokens)))
    path = write(tmp_path / "m.gguf", metadata | keys, tensors)
    ours = Tokenizer.load(path)
    for text in SENTENCES:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False) == ids, text
        assert ours.decode(ids) == text
    assert ours.adds_bos  # as in llama.cpp, which does not follow the first files
    assert ours.encode("a<turn|>", bos=True, special=True)[0::2][:2] == [2, tokens.index("<turn|>")]
    assert tokens.index("<turn|>") in read_config(path).eos_ids


# text -> its ids in llama.cpp
TEXTS = {
    " two  spaces    and\n\n\nlines\t\t.": [1156, 138, 35220, 140, 624, 109, 8721, 255969, 236761],
    "def f(x):\n    return x  # é": [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 138, 236865, 1559],
    "日本 🙂 \u200b\U00012345": [10956, 57235, 36504, 478, 384, 379, 371],
    "<start_of_turn>user</h1><eos>": [236820, 3041, 236779, 1340, 236779, 887, 236813, 2364, 191, 236820, 211827, 236813],
}  # fmt: skip
# prompt -> the best tokens in transformers, and how far the second lies behind each (logits)
REAL = {
    "def fibonacci(n):\n    ": (
        [584, 538, 1251, 236743, 236771, 236787, 107, 144, 2060, 236743, 236771, 107, 140, 36208, 538, 1251],
        [1.16, 4.09, 0.22, 4.18, 0.86, 0.57, 4.88, 6.46, 1.88, 2.5, 2.53, 2.9, 6.14, 0.32, 7.66, 4.19],
    ),
    "Once upon a time, in a land far away,": (
        [993, 11742, 496, 880, 7489, 3415, 236761, 1293, 691, 496, 880, 529, 1551, 33282, 236764, 532],
        [0.72, 0.84, 2.09, 0.33, 0.91, 0.09, 2.08, 1.13, 1.1, 1.91, 0.08, 1.62, 1.33, 2.6, 1.03, 0.94],
    ),
}  # fmt: skip
NEAR_TIE = 0.15  # logits: the file's own bits read activations in 8 bits


@pytest.mark.gemma3
def test_the_real_vocabulary(gemma3_file):
    """No space is put before a text; runs of spaces are tokens, and unknown characters are bytes."""
    tok = Tokenizer.load(gemma3_file)
    assert (tok.bos_id, tok.vocab_size) == (2, 262144)
    for text, ids in TEXTS.items():
        assert tok.encode(text, bos=False) == ids, text
        assert tok.decode(ids) == text
    chat = "<start_of_turn>user\nhi<end_of_turn>\n"
    assert tok.encode(chat, bos=False, special=True) == [105, 2364, 107, 2202, 106, 107]
    assert {1, 106} <= set(read_config(gemma3_file).eos_ids)


@pytest.mark.gemma3
def test_the_real_file(gemma3_file):
    engine = load(checkpoint=str(gemma3_file), draft="none", max_new_tokens=16)
    for prompt, (best, gaps) in REAL.items():
        tokens = generate(engine, [prompt]).tokens[0]
        same = next((i for i, pair in enumerate(zip(tokens, best)) if len(set(pair)) > 1), 16)
        assert same == 16 or gaps[same] < NEAR_TIE, (prompt, same, tokens)
