"""Read the tokenizer in a GGUF file's metadata, in the forms that files/tokenizer.py takes.

1. `read_bpe` makes a `tokenizers.Tokenizer` of byte-level BPE (`tokenizer.ggml.model` is gpt2). The
   file names the pattern that splits text into words (`tokenizer.ggml.pre`); `SPLITS` holds the
   patterns in the models' own tokenizer.json files. Gemma 4's (gemma4) is BPE of characters, where
   spaces are U+2581, lines are apart, and bytes stand for characters that have no token.
2. `read_sentencepiece` writes tokens and scores (`tokenizer.ggml.model` is llama) as a
   sentencepiece model.
3. `end_ids` lists the tokens that end a text: those that the metadata name, and those that
   llama.cpp knows by their texts (`ENDS`). They are control tokens, whatever type the file gives.

Sources: llama.cpp's list of vocabularies; sentencepiece_model.proto; the models' tokenizer.json.
Not here: other kinds (WordPiece, Unigram, RWKV), other names of splits.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from files.gguf_header import Metadata
from files.untrusted import read_untrusted
from options import log_note

SPACE = "\u2581"
# token_type, sentencepiece's numbers; llama.cpp takes others for normal tokens
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = LETTERS + r"|\p{N}{1,3}|" + REST
QWEN2 = LETTERS + r"|\p{N}|" + REST
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + SUFFIX
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + SUFFIX
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
CJK = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK)
# letters with an upper and a lower case, but not Georgian ones
CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}]]"
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK)


class Split(NamedTuple):
    """The way in which a text is cut into words."""

    patterns: tuple[str, ...] = ()  # applied one after the other; (): GPT-2's own
    digits: bool = False  # each digit is cut off
    whole: bool = False  # a word that is a token is not merged up to it, and BOS begins a text
    composed: bool = False  # the text is normalized first, to NFC


LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral", "midm-2.0")
SPLITS = {  # by tokenizer.ggml.pre
    **dict.fromkeys(("gpt-2", "a.x-4.0", "mellum", "trillion", "granite-docling"), Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), Split(digits=True)),
    **dict.fromkeys(LLAMA3_NAMES, Split((LLAMA3,), whole=True)),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), Split((QWEN2,), composed=True)),
    "megrez": Split((QWEN2,)),
    "seed-coder": Split((QWEN2.replace(r"]+[\r\n]*|", "]+|"),)),
    "qwen35": Split((QWEN35,), composed=True),
    "tekken": Split((TEKKEN,), whole=True),
    "gpt-4o": Split((GPT4O,)),
    "deepseek-llm": Split(DEEPSEEK_LLM, digits=True),
    "deepseek-coder": Split(DEEPSEEK_CODER, digits=True),
}
# texts of tokens that end a text. Source: special_eog_ids in llama.cpp's vocabulary
ENDS = frozenset(
    (
        "</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<turn|>", "<end_of_turn>",
        "<end_of_utterance>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>",
        "<|eom_id|>", "<|im_end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
        # behind the middle that a coder fills in: padding, another repository, another file
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
        "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    )
)  # fmt: skip


def end_ids(metadata: Metadata) -> list[int]:
    """Return the ids that end a text: those that the metadata name first, and those of `ENDS`."""
    tokens = metadata.read("tokenizer.ggml.tokens", list, [])
    ids = [special_id(metadata, kind) for kind in ("eos", "eot", "eom")]
    ends = _ends(tokens)
    ids += [i for i, token in enumerate(tokens) if token in ends]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _ends(tokens: list[str]) -> frozenset[str]:
    """Return the texts in `ENDS` that end a text of this vocabulary. Source: as `ENDS`."""
    ends = ENDS.intersection(tokens)
    if {"<|return|>", "<|call|>"} <= ends or {"<|calls|>", "<|flush|>"} <= ends:
        ends -= {"<|end|>"}  # it ends one of several messages there
    if "<|tool_response>" in ends:
        ends -= {"</s>"}
    return ends


def special_id(metadata: Metadata, kind: str) -> int | None:
    """Return the id that the metadata name for a kind, as eos; None where the file has no such
    token."""
    i = metadata.read(f"tokenizer.ggml.{kind}_token_id", int, None)
    tokens = metadata.read("tokenizer.ggml.tokens", list, [])
    if i is None or (tokens and not 0 <= i < len(tokens)):
        return None
    return i


def tokenizer_config(metadata: Metadata) -> dict:
    """Return the metadata as a tokenizer_config.json.

    An id beyond the vocabulary is noted and left out, as in llama.cpp.
    """
    tokens = metadata.read("tokenizer.ggml.tokens", list)
    config: dict = {"bos_token": None, "eos_token": None}
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = special_id(metadata, name)
        named = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None:
            config[f"{kind}_token"] = tokens[i]
        elif named is not None and kind in ("bos", "eos"):
            log_note(
                f"{metadata.path}: {kind}_token_id {named} is not one of the {len(tokens)} "
                "tokens; it is ignored"
            )
    # the defaults of llama.cpp; the first files of Gemma 4 say false, and it does not follow them
    model = metadata.get("tokenizer.ggml.model")
    split = SPLITS.get(metadata.get("tokenizer.ggml.pre"), Split())
    default = model == "llama" or split.whole
    told = metadata.read("tokenizer.ggml.add_bos_token", bool, default)
    config["add_bos_token"] = told or model == "gemma4"
    return config


def read_bpe(metadata: Metadata) -> Tokenizer:
    """Make the tokenizer.

    Raises: ValueError for an unknown split, bad lists.
    """
    of_bytes = metadata["tokenizer.ggml.model"] == "gpt2"
    split = _split(metadata) if of_bytes else Split()
    tokens, types = _tokens(metadata)
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        # as in LLaMA-3's file: a word that is a token is not merged up to it
        model = models.BPE(ids, merges, ignore_merges=split.whole, byte_fallback=not of_bytes)
    except Exception as error:  # the package raises nothing more specific
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{metadata.path}: the tokenizer's merges are broken ({reason}); use --prompt_ids"
        ) from None
    with read_untrusted(metadata.path, "use --prompt_ids"):
        tokenizer = Tokenizer(model)
        if of_bytes:
            tokenizer.pre_tokenizer = _pre_tokenizer(split)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            tokenizer.normalizer = normalizers.Replace(" ", SPACE)
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
            to_text = (decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse())
            tokenizer.decoder = decoders.Sequence(list(to_text))
        if split.composed:
            tokenizer.normalizer = normalizers.NFC()
        controls = []
        added = []
        for token, kind in zip(tokens, types):
            if token and kind == CONTROL:
                controls.append(AddedToken(token, special=True, normalized=False))
            if token and kind == USER_DEFINED:
                added.append(AddedToken(token, special=False, normalized=False))
        tokenizer.add_special_tokens(controls)
        tokenizer.add_tokens(added)
    return tokenizer


def _split(metadata: Metadata) -> Split:
    """Return the value of `SPLITS` for the file. Raises: ValueError for an unknown name."""
    name = metadata.read("tokenizer.ggml.pre", str, "default")
    if name == "default":
        log_note(f"{metadata.path} names no pre-tokenizer; GPT-2's is taken")
        name = "gpt-2"
    if name not in SPLITS:
        known = ", ".join(SPLITS)
        raise ValueError(
            f"{metadata.path}: the pre-tokenizer {name} is not one of {known}; use --prompt_ids"
        )
    return SPLITS[name]


def _pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    """Make the pre-tokenizer of a value of `SPLITS`."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    gpt2 = not split.patterns
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2))
    return pre_tokenizers.Sequence(steps)


def read_sentencepiece(metadata: Metadata) -> tuple[bytes, dict[str, tuple[int, bool]]]:
    """Return a serialized sentencepiece model, and its control and added tokens.

    Returns: the model; text -> (id, whether it is a control token)
    Raises: ValueError for another kind of tokenizer, or broken lists.
    """
    kind = metadata.read("tokenizer.ggml.model", str)
    if kind != "llama":
        raise ValueError(
            f"{metadata.path}: the tokenizer {kind} is not one of gpt2, gemma4, llama; "
            "use --prompt_ids"
        )
    tokens, types = _tokens(metadata)
    scores = metadata.read("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or set(map(type, scores)) != {float}:
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.scores must be a number per token; "
            "convert the model again"
        )
    pieces = map(_piece, map(str.encode, tokens), scores, types)
    added = {
        tokens[i]: (i, kind != USER_DEFINED)
        for i, kind in enumerate(types)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and tokens[i]
    }
    byte_fallback = _flag(35, int(BYTE in types))  # bytes stand for text without a token
    trainer = _flag(3, 2) + byte_fallback  # 2: BPE
    spaces = metadata.read("tokenizer.ggml.add_space_prefix", bool, True)
    shortens = metadata.read("tokenizer.ggml.remove_extra_whitespaces", bool, False)
    normalizer = _field(1, b"identity") + _flag(3, int(spaces)) + _flag(4, int(shortens))
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer), added


def _tokens(metadata: Metadata) -> tuple[list[str], list[int]]:
    """Return every token's text and type. A token that ends a text is a control token."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = metadata.read("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens) or set(map(type, types)) != {int}:
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.token_type must be a whole number for every token; "
            "convert the model again"
        )
    types = [kind if NORMAL <= kind <= BYTE else NORMAL for kind in types]
    for i in end_ids(metadata):
        types[i] = CONTROL
    return tokens, types


def _strings(metadata: Metadata, key: str) -> list[str]:
    values = metadata.read(key, list)
    if set(map(type, values)) != {str}:
        raise ValueError(
            f"{metadata.path}: the metadata {key} must be a list of texts; convert the model again"
        )
    return values


# --------------------------------------------------------------- protobuf: number, kind, value
FLOAT = struct.Struct("<f")


def _piece(token: bytes, score: float, kind: int) -> bytes:
    """Return the message of a token. Lengths below 128 take a byte, so most need no `_field`."""
    size = len(token)
    if size < 100:
        return b"\n%c\n%c%b\x15%b\x18%c" % (size + 9, size, token, FLOAT.pack(score), kind)
    return _field(1, _field(1, token) + b"\x15" + FLOAT.pack(score) + _flag(3, kind))


def _varint(value: int) -> bytes:
    if value <= 127:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)


def _field(number: int, content: bytes) -> bytes:
    """Return a message's field that is itself a message or a text."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _flag(number: int, value: int) -> bytes:
    """Return a message's field that is a whole number."""
    return _varint(number << 3) + _varint(value)
