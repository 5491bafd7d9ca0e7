"""The tokenizer in a GGUF file's metadata, in the forms that hf/tokenizer.py takes.

1. `read_bpe` makes a `tokenizers.Tokenizer` of byte-level BPE (`tokenizer.ggml.model` is gpt2). The file names how text
   is split into words (`tokenizer.ggml.pre`); `SPLITS` holds what the models' own tokenizer.json files say there.
2. `read_sentencepiece` writes tokens and scores (`tokenizer.ggml.model` is llama) as a sentencepiece model.

Sources: llama.cpp's list of vocabularies; sentencepiece_model.proto; the models' tokenizer.json.
Not here: other kinds (WordPiece, Unigram, RWKV), other names of splits.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

from files import read_untrusted
from hf.gguf import Metadata

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # token_type, sentencepiece's numbers
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = LETTERS + r"|\p{N}{1,3}|" + REST
QWEN2 = LETTERS + r"|\p{N}|" + REST
SPLITS = {  # tokenizer.ggml.pre -> a pattern; "": GPT-2's own; "digits": the same after splitting off every digit
    "gpt-2": "", "smollm": "digits", "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3,
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
}  # fmt: skip


def tokenizer_config(metadata: Metadata) -> dict:
    """What a tokenizer_config.json would say. Raises: ValueError for ids beyond the vocabulary."""
    tokens, config = metadata.read("tokenizer.ggml.tokens", list), {}
    for kind in ("bos", "eos"):
        i = metadata.read(f"tokenizer.ggml.{kind}_token_id", int, None)
        if i is not None and not 0 <= i < len(tokens):
            raise ValueError(
                f"{metadata.path}: {kind}_token_id {i} is not one of the {len(tokens)} tokens"
            )
        config[f"{kind}_token"] = None if i is None else tokens[i]
    for kind, name in (
        ("unk", "unknown"),
        ("pad", "padding"),
    ):  # for chat templates; files may name ids beyond the end
        i = metadata.read(f"tokenizer.ggml.{name}_token_id", int, None)
        if i is not None and 0 <= i < len(tokens):
            config[f"{kind}_token"] = tokens[i]
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    default = spm or metadata.get("tokenizer.ggml.pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
    )  # as in llama.cpp
    config["add_bos_token"] = metadata.read("tokenizer.ggml.add_bos_token", bool, default)
    return config


def read_bpe(metadata: Metadata) -> Any:
    """A `tokenizers.Tokenizer`; the caller checks that the package is there.

    Raises: ValueError for an unknown split, bad lists.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    name = metadata.read("tokenizer.ggml.pre", str, "default")
    if name == "default":
        print(f"note: {metadata.path} names no pre-tokenizer; GPT-2's is taken", file=sys.stderr)
        name = "gpt-2"
    if name not in SPLITS:
        known = ", ".join(SPLITS)
        raise ValueError(
            f"{metadata.path}: the pre-tokenizer {name} is not one of {known}; use --prompt_ids"
        )
    split = SPLITS[name]
    tokens, types = _tokens(metadata)
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    try:
        # LLaMA-3's file says so: a word that is a token is not merged up to it
        model = models.BPE(
            {t: i for i, t in enumerate(tokens)}, merges, ignore_merges=split == LLAMA3
        )
    except Exception as error:  # the package raises nothing more specific
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{metadata.path}: the tokenizer's merges are broken ({reason}); use --prompt_ids"
        ) from None
    with read_untrusted(metadata.path, "use --prompt_ids"):
        tok = Tokenizer(model)
        bytes_only = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=split in ("", "digits")
        )
        first = {"": [], "digits": [pre_tokenizers.Digits(individual_digits=True)]}
        first = first[split] if split in first else [pre_tokenizers.Split(Regex(split), "isolated")]
        tok.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_only])
        tok.decoder = decoders.ByteLevel()
        if split == QWEN2:
            tok.normalizer = normalizers.NFC()
        for control in (True, False):
            kind = CONTROL if control else USER_DEFINED
            added = [
                AddedToken(t, special=control, normalized=False)
                for t, k in zip(tokens, types)
                if k == kind and t
            ]
            tok.add_special_tokens(added) if control else tok.add_tokens(added)
    return tok


def read_sentencepiece(metadata: Metadata) -> tuple[bytes, dict[str, int]]:
    """A serialized sentencepiece model, and the ids of the tokens that users added.

    Raises: ValueError for another kind of tokenizer, or broken lists.
    """
    kind = metadata.read("tokenizer.ggml.model", str)
    if kind != "llama":
        raise ValueError(
            f"{metadata.path}: the tokenizer {kind} is not one of gpt2, llama; use --prompt_ids"
        )
    tokens, types = _tokens(metadata)
    scores = metadata.read("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(type(s) is float for s in scores):
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.scores must be a number per token; convert the model again"
        )
    pieces = (
        _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _flag(3, kind))
        for text, score, kind in zip(tokens, scores, types)
    )
    trainer = _flag(3, 2) + _flag(
        35, int(BYTE in types)
    )  # BPE; whether bytes stand for what has no token
    spaces = metadata.read("tokenizer.ggml.add_space_prefix", bool, True)
    shortens = metadata.read("tokenizer.ggml.remove_extra_whitespaces", bool, False)
    normalizer = _field(1, b"identity") + _flag(3, int(spaces)) + _flag(4, int(shortens))
    added = {
        text: i
        for i, (text, kind) in enumerate(zip(tokens, types))
        if kind == USER_DEFINED and text
    }
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer), added


def _tokens(metadata: Metadata) -> tuple[list[str], list[int]]:
    """Every token's text and type."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = metadata.read("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens) or not all(type(t) is int and 1 <= t <= BYTE for t in types):
        rule = "tokenizer.ggml.token_type must be 1 to 6 for every token"
        raise ValueError(f"{metadata.path}: {rule}; convert the model again")
    return tokens, types


def _strings(metadata: Metadata, key: str) -> list[str]:
    values = metadata.read(key, list)
    if not values or not all(type(value) is str for value in values):
        raise ValueError(
            f"{metadata.path}: the metadata {key} must be a list of texts; convert the model again"
        )
    return values


# --------------------------------------------------------------------------- protobuf: number, kind, value


def _varint(value: int) -> bytes:
    low = bytes([value & 127 | (128 if value > 127 else 0)])
    return low + _varint(value >> 7) if value > 127 else low


def _field(number: int, content: bytes) -> bytes:
    """A message's field that is itself a message or a text."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _flag(number: int, value: int) -> bytes:
    """A message's field that is a whole number."""
    return _varint(number << 3) + _varint(value)
