"""Text to token ids and back, with one class for all kinds of tokenizers.

1. `Tokenizer.load` reads `tokenizer.json` (BPE, byte-level or in sentencepiece's form), or else
   `tokenizer.model`. Tokens that only the other files name are added. Of a GGUF file it reads the
   metadata (files/gguf_tokenizer.py). The package `tokenizers` splits off added tokens; pieces are
   sentencepiece's, as merges for `tokenizers` take seconds to derive from a large vocabulary.
2. `encode` gives the same ids as Hugging Face. With `special=True` it parses the names of control
   tokens in the text (`</s>`, `<|eot_id|>`), but for those in a part that `as_text` has returned: a
   user's words, which a chat template puts between its own tokens, cannot inject one.
3. Every token is a fixed string of bytes. `decode` joins them and reads UTF-8. A `StreamDecoder`
   gives the same text piece by piece, at constant cost per token.

Not here: chat templates (files/chat.py); `clean_up_tokenization_spaces`; `single_word` and
`normalized` of sentencepiece's added tokens.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from files.fields import FLAG, OBJECT, Rule, key, naming, read_fields
from files.io import is_gguf, read_json
from files.untrusted import read_untrusted
from options import load_part, log_note

# appended to a serialized model, this sets normalizer_spec.add_dummy_prefix to false: protobuf
# merges the two messages
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
# stands in the name of a control token that is text: a noncharacter of Unicode, which no text has
MARK = "\ufdd0"
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
# there is one text at a time; and no warning after a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
SPECIAL = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


TOKEN = Rule(
    "a text, or an object with the text as content",
    lambda v: type(v) is str or type(v) is dict and type(v.get("content")) in (str, type(None)),
)
TOKENS = Rule(
    "a list of texts, or an object with texts as values",
    lambda v: all(map(TOKEN.holds, v.values() if type(v) is dict else v)),
)


@dataclass(frozen=True)
class HFTokenizerConfig:
    """The keys of tokenizer_config.json that are read.

    null means the default of the vocabulary's file.
    """

    bos_token: str | dict | None = key(TOKEN, None)
    eos_token: str | dict | None = key(TOKEN, None)
    unk_token: str | dict | None = key(TOKEN, None)
    sep_token: str | dict | None = key(TOKEN, None)
    pad_token: str | dict | None = key(TOKEN, None)
    cls_token: str | dict | None = key(TOKEN, None)
    mask_token: str | dict | None = key(TOKEN, None)
    add_bos_token: bool | None = key(FLAG, None)
    add_prefix_space: bool | None = key(FLAG, None)
    legacy: bool | None = key(FLAG, None)
    added_tokens_decoder: dict | None = key(OBJECT, None)
    # further tokens that are control tokens, by their texts; the second as transformers 5 writes it
    additional_special_tokens: list | None = key(TOKENS, None)
    extra_special_tokens: list | dict | None = key(TOKENS, None)


class Added(NamedTuple):
    """A token that is split off before the rest of the text is tokenized."""

    id: int
    control: bool  # it is parsed only with special=True, and decodes to nothing
    lstrip: bool = False  # it takes the white space before it
    rstrip: bool = False  # and behind it


class Tokenizer:
    """Text to token ids and back.

    Subclasses give `_encode(text, special) -> ids` and `_piece(id) -> bytes`.
    """

    def __init__(self, added: dict[str, Added], vocab_size: int, config: dict, strips_space: bool):
        """Find the special tokens.

        config: `tokenizer_config.json`, with the vocabulary file's defaults for missing keys
        strips_space: encode puts a space before the text, and decode removes it
        """
        self._added = added
        self._hidden = frozenset(token.id for token in added.values() if token.control)
        controls = (text for text, token in added.items() if token.control)
        self._controls = sorted(controls, key=len, reverse=True)
        # ids in all
        self.vocab_size = max([vocab_size, *(token.id + 1 for token in added.values())])
        texts = {name: _text(config.get(name)) for name in SPECIAL}
        # chat templates' names -> texts
        self.special = {name: text for name, text in texts.items() if text}
        self.bos_id = self.id_of(texts["bos_token"])
        eos = self.id_of(texts["eos_token"])
        self.eos_ids: tuple[int, ...] = ()
        if eos is not None:
            self.eos_ids = (eos,)
        self.adds_bos: bool = bool(config["add_bos_token"]) and self.bos_id is not None
        self.strips_space = strips_space

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory or a GGUF file.

        Raises: ValueError when there is none, or it is corrupt, or of an unknown kind.
        """
        if is_gguf(path):
            return _of_gguf(path)
        model = path / "tokenizer.model"
        fast = path / "tokenizer.json"
        config = _read_config(path)
        if fast.is_file():
            try:
                return _of_json(fast, config)
            except ValueError as error:
                if not model.is_file():
                    raise
                log_note(f"{error}; {model.name} is used")
        if not model.is_file():
            raise ValueError(
                f"{path} has neither {model.name} nor {fast.name}; "
                "add the tokenizer's files, or use --prompt_ids"
            )
        fault = "is not a sentencepiece model"
        with read_untrusted(model, "download it again, or use --prompt_ids", fault):
            sp = _open_sentencepiece(model.read_bytes())
        added = _control_tokens(sp) | _added_tokens(path, config)
        return SentencePieceTokenizer(sp, config, added)

    def encode(self, text: str, bos: bool = True, special: bool = False) -> list[int]:
        """Tokenize `text`.

        bos: begin with the BOS token if the model uses one and the text has none at its start
        special: parse the names of control tokens, but for those that `as_text` has marked
        """
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(
                "the text has half a character (a surrogate code point), which UTF-8 lacks; "
                "remove it"
            )
        ids = self._encode(text, special)
        if bos and self.adds_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def as_text(self, text: str) -> str:
        """Return a text in which `encode` reads the names of control tokens as text.

        A chat template may put it anywhere, but in pieces.
        """
        for name in self._controls:  # the longest first, as one may begin like another
            if name in text:
                text = text.replace(name, name[0] + MARK + name[1:])
        return text

    def decode(self, ids: Iterable[int], continuation: bool = False) -> str:
        """Return the text of `ids`, without control tokens.

        Bytes that are not UTF-8 become U+FFFD.

        continuation: keep a leading space, because it separates this text from the text before
        """
        stream = self.stream(continuation)
        return stream.push(ids) + stream.flush()

    def stream(
        self,
        continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> StreamDecoder:
        """Return a decoder that takes the ids in parts. shown: control tokens that have a text"""
        return StreamDecoder(self, continuation, shown)

    def piece(self, id: int) -> bytes:
        """Return the bytes of one token.

        Control tokens and ids beyond the vocabulary (of padded LM heads) have none.
        """
        if id in self._hidden:
            return b""
        return self._piece(id)

    def name(self, id: int) -> bytes:
        """Return the bytes of one token, of a control token those of its name."""
        return self._piece(id)

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every id, of control tokens their names.

        Two tokenizers with equal lists have one vocabulary.
        """
        names = {token.id: text.encode() for text, token in self._added.items()}
        return [names[i] if i in names else self._piece(i) for i in range(self.vocab_size)]

    def json(self) -> str | None:
        """Return the content of a tokenizer.json; None for a sentencepiece model."""
        return None

    def id_of(self, token: str | None) -> int | None:
        """Return the id of a control or added token."""
        if token not in self._added:
            return None
        return self._added[token].id

    def ids_at_start(self, text: str) -> tuple[int, ...]:
        """Return the id of the longest control or added token at the start of `text`, if any."""
        tokens = [token for token in self._added if text.startswith(token)]
        if not tokens:
            return ()
        return (self._added[max(tokens, key=len)].id,)


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint. Raises: as `Tokenizer.load`."""
    return Tokenizer.load(path)


def has_tokenizer(path: Path) -> bool:
    """Return whether a checkpoint holds a tokenizer.

    A GGUF file always counts; `Tokenizer.load` raises the error where its tokenizer is missing.
    """
    if is_gguf(path):
        return True
    return (path / "tokenizer.model").is_file() or (path / "tokenizer.json").is_file()


def _read_config(path: Path) -> dict:
    """Read the keys of tokenizer_config.json that have a value.

    special_tokens_map.json has the names of special tokens in directories of transformers 3 and 4,
    and they hold where there is no added_tokens_decoder, as there.
    """
    file = path / "tokenizer_config.json"
    raw = optional_json(file)
    if "added_tokens_decoder" not in raw:
        raw |= optional_json(path / "special_tokens_map.json")
    with naming(file):
        hf = read_fields(raw, HFTokenizerConfig)
    return {name: value for name, value in vars(hf).items() if value is not None}


def _of_json(path: Path, config: dict) -> Tokenizer:
    """Read a tokenizer.json, with the tokens that the files beside it add. Raises: ValueError."""
    with read_untrusted(path, "download it again, or use --prompt_ids"):
        tok = Backend.from_file(str(path))
    added = sorted(_added_tokens(path.parent, config).items(), key=lambda item: item[1].id)
    for text, token in added:
        if tok.token_to_id(text) is not None:
            continue
        kind = AddedToken(text, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
        (tok.add_special_tokens if token.control else tok.add_tokens)([kind])
        if tok.token_to_id(text) != token.id:
            raise ValueError(
                f"{path.parent}: the token {text} has the id {token.id} beside {path.name}, which "
                f"has room for {tok.token_to_id(text)}; use --prompt_ids"
            )
    if "add_prefix_space" in config:
        with read_untrusted(path, "use --prompt_ids"):
            tok = _with_prefix_space(tok, config["add_prefix_space"])
    return JsonTokenizer(tok, config, path)


def _with_prefix_space(tok: Backend, wanted: bool) -> Backend:
    """Return the tokenizer with or without a space before each text.

    The key add_prefix_space overrides the file, as in transformers.
    """
    state = json.loads(tok.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        value = state[part] or {}
        steps = value.get("normalizers") or value.get("pretokenizers") or [value]
        for step in steps:
            if "add_prefix_space" in step:  # byte-level
                step["add_prefix_space"] = wanted
            if "prepend_scheme" in step and wanted != (step["prepend_scheme"] != "never"):
                step["prepend_scheme"] = "first" if wanted else "never"
            if step.get("type") == "Prepend" and not wanted:
                step["prepend"] = ""
    return Backend.from_str(json.dumps(state))


def _of_gguf(path: Path) -> Tokenizer:
    reader = load_part("reader", "gguf tokenizer")
    metadata = load_part("reader", "gguf header")(path).metadata
    config = reader.tokenizer_config(metadata)
    if metadata.get("tokenizer.ggml.model") in ("gpt2", "gemma4"):
        return JsonTokenizer(reader.read_bpe(metadata), config, path)
    model, added = reader.read_sentencepiece(metadata)
    with read_untrusted(path, "use --prompt_ids", "holds no sentencepiece model"):
        sp = SentencePieceProcessor(model_proto=model)
    return SentencePieceTokenizer(
        sp, config, {text: Added(*token) for text, token in added.items()}
    )


def _open_sentencepiece(content: bytes) -> SentencePieceProcessor:
    """Open a model and use it once, since a damaged one may fail later.

    Call it in `read_untrusted`.
    """
    sp = SentencePieceProcessor(model_proto=content)
    sp.id_to_piece(list(range(len(sp))))
    sp.encode("a", out_type=str)
    return sp


def _control_tokens(sp: SentencePieceProcessor) -> dict[str, Added]:
    """Return the tokens of a model that no text is made of."""
    ids = [i for i in range(len(sp)) if sp.is_control(i) or sp.is_unknown(i)]
    return {sp.id_to_piece(i): Added(i, True) for i in ids}


def load_tokenizer(path: Path, reads_text: bool, must_exist: bool) -> Tokenizer | None:
    """Read the tokenizer of a checkpoint.

    reads_text: it will be used to encode; if not, a tokenizer that cannot be read is only noted
    must_exist: a checkpoint without one is an error
    Returns: None where that is no error. Raises: as `Tokenizer.load`.
    """
    if not has_tokenizer(path) and not must_exist:
        return None
    try:
        return Tokenizer.load(path)
    except ValueError as error:
        if reads_text:
            raise
        log_note(f"no text will be shown ({error})")
        return None


class StopMatcher:
    """A text up to the stop string that is complete first. What may begin one is held back."""

    def __init__(self, stops: Iterable[str]):
        self.stops = tuple(stops)
        self.held = ""
        self.stopped = False

    def push(self, text: str, last: bool = False) -> str:
        """Add text. last: nothing follows. Returns: the text that is certain by now."""
        if not self.stops:
            return text
        if self.stopped:
            return ""
        self.held += text
        stops = [(self.held.find(stop), stop) for stop in self.stops if stop in self.held]
        self.stopped = bool(stops)
        if stops:  # the stop that is complete first, however the text came in pieces
            end, _ = min(stops, key=lambda place: (place[0] + len(place[1]), place[0]))
        else:
            end = len(self.held) - (0 if last else self._begun())
        text = self.held[:end]
        self.held = self.held[end:]
        return text

    def _begun(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        held = self.held
        lengths = [
            n
            for stop in self.stops
            for n in range(1, min(len(stop), len(held) + 1))
            if held.endswith(stop[:n])
        ]
        return max(lengths, default=0)


class StreamDecoder:
    """Incremental `Tokenizer.decode`.

    All pushes and the flush together give exactly the same text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        continuation: bool,
        shown: frozenset[int] = frozenset(),
    ):
        self._piece = tokenizer.piece
        if shown:
            self._piece = lambda id: tokenizer.name(id) if id in shown else tokenizer.piece(id)
        self._strip = tokenizer.strips_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Add ids. Returns: the characters that they complete."""
        data = b"".join(map(self._piece, ids))
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End the text. Returns: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer in `tokenizer.model`: LLaMA-2, Vicuna, Mistral, the demo.

    A model that puts a space before the text puts another one after each control token in the text,
    as transformers 4 and the official EAGLE do. `"legacy": false` in tokenizer_config.json turns
    this off.
    """

    def __init__(self, sp: SentencePieceProcessor, config: dict, added: dict[str, Added]):
        ids = {"bos_token": sp.bos_id(), "eos_token": sp.eos_id(), "unk_token": sp.unk_id()}
        defaults = {name: sp.id_to_piece(i) for name, i in ids.items() if i >= 0}
        first_only = not config.get("legacy", True)  # a space at the start of the text only
        prefixed = _is_prefixed(sp)
        self._sp = sp
        self._sp_inside = sp  # for text after a control token
        if prefixed and (first_only or not config.get("add_prefix_space", True)):
            model = sp.serialized_model_proto() + NO_DUMMY_PREFIX
            self._sp_inside = SentencePieceProcessor(model_proto=model)
            if not config.get("add_prefix_space", True):
                self._sp = self._sp_inside
                prefixed = False
        super().__init__(added, len(sp), {**defaults, "add_bos_token": True, **config}, prefixed)
        self._text_of = {token.id: text.encode() for text, token in added.items()}
        self._splitter = _splitter(added)
        tokens = self._splitter.get_added_tokens_decoder()
        self._ids = {i: added[token.content].id for i, token in tokens.items()}

    def _encode(self, text: str, special: bool) -> list[int]:
        self._splitter.encode_special_tokens = not special
        parts = self._splitter.encode(text, add_special_tokens=False)
        ids = []
        for part, (begin, end) in zip(parts.ids, parts.offsets):
            if part in self._ids:
                ids.append(self._ids[part])
                continue
            plain = text[begin:end].replace(MARK, "")
            if plain:
                ids += (self._sp_inside if ids else self._sp).encode(plain)
        return ids

    def _piece(self, id: int) -> bytes:
        if id in self._text_of:
            return self._text_of[id]
        if not 0 <= id < len(self._sp):
            return b""
        return _sentencepiece_bytes(self._sp.id_to_piece(id))


class JsonTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`: LLaMA-3, Qwen-2, and whatever has its file."""

    def __init__(self, tok: Backend, config: dict, path: Path):
        """Find the added tokens and the kind of `tok`. path: its file, for error messages"""
        self._tok = tok
        with read_untrusted(path, "use --prompt_ids"):
            tok.no_truncation()  # the file may hold the limits of the last training run
            tok.no_padding()
            _make_special(tok, _special_texts(config))
            decoder = tok.get_added_tokens_decoder()
            probe = tok.encode("a")  # with the tokens that the post-processor adds
            plain = tok.encode("a", add_special_tokens=False).tokens
        added = {token.content: Added(i, token.special) for i, token in decoder.items()}
        has_bos = probe.special_tokens_mask[:1] == [1]
        defaults = {"bos_token": probe.tokens[0] if has_bos else None, "add_bos_token": has_bos}
        self._byte_level = _is_byte_level(tok, path)
        # never true of byte-level BPE: its alphabet has no U+2581
        prefixed = any(token.startswith("▁") for token in plain[:1])
        super().__init__(added, tok.get_vocab_size(), {**defaults, **config}, prefixed)

    def _encode(self, text: str, special: bool) -> list[int]:
        # true: a special token in the text is tokenized as plain text
        self._tok.encode_special_tokens = not special
        # a batch, since only its call lets other threads run
        # a marked name is read in two parts, each of which is text
        batch = self._tok.encode_batch(text.split(MARK), add_special_tokens=False)
        return [id for part in batch for id in part.ids]

    def json(self) -> str:
        return self._tok.to_str()

    def _piece(self, id: int) -> bytes:
        token = self._tok.id_to_token(id) or ""
        if not self._byte_level:
            return _sentencepiece_bytes(token)
        if any(char not in BYTE_OF for char in token):
            return token.encode()  # an added token, which is stored as plain text
        return bytes(BYTE_OF[char] for char in token)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character of byte-level BPE. Source: GPT-2's encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + n): byte for n, byte in enumerate(others)}
    return alphabet


BYTE_OF = _byte_alphabet()


def _is_byte_level(tok: Backend, path: Path) -> bool:
    """Return whether tokens are stored in the byte alphabet (`BYTE_OF`).

    Otherwise they are stored as in sentencepiece.
    """
    state = {}
    if tok.decoder:
        state = json.loads(tok.decoder.__getstate__())
    kinds = [part.get("type", "none") for part in state.get("decoders", [state])]
    if "ByteLevel" not in kinds and not {"ByteFallback", "Metaspace"} & set(kinds):
        known = "ByteLevel, ByteFallback or Metaspace"
        raise ValueError(
            f"{path}: the decoder must be {known}, not {' + '.join(kinds)}; use --prompt_ids"
        )
    return "ByteLevel" in kinds


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = BYTE_PIECE.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()


def _splitter(added: dict[str, Added]) -> Backend:
    """Return a tokenizer that splits off added tokens; a text between is one part."""
    splitter = Backend(models.WordLevel({MARK: 0}, unk_token=MARK))
    kinds: dict[bool, list] = {True: [], False: []}  # by whether they are control tokens
    for text, token in added.items():
        strips = {"lstrip": token.lstrip, "rstrip": token.rstrip}
        kinds[token.control].append(AddedToken(text, normalized=False, **strips))
    splitter.add_special_tokens(kinds[True])  # each call compiles them all
    splitter.add_tokens(kinds[False])
    return splitter


def _is_prefixed(sp: SentencePieceProcessor) -> bool:
    """Return whether a model puts a space before a text."""
    return "".join(sp.encode("a", out_type=str)).startswith("▁")


def _added_tokens(path: Path, config: dict) -> dict[str, Added]:
    """Read the tokens that config files add to a vocabulary.

    The files are `tokenizer_config.json` and `added_tokens.json`, a list of texts: those that the
    configuration names are control tokens, as in transformers.
    """
    added = optional_json(path / "added_tokens.json")
    decoder = config.get("added_tokens_decoder", {})
    try:
        named = _special_texts(config)
        extra = {text: Added(int(i), text in named) for text, i in added.items()}
        for i, token in decoder.items():
            strips = (bool(token.get(side)) for side in ("lstrip", "rstrip"))
            extra[token["content"]] = Added(int(i), token.get("special", True), *strips)
        if not all(type(text) is str and 0 <= token.id < 2**24 for text, token in extra.items()):
            raise ValueError("a text and an id from 0 to 2^24 are needed")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the added tokens are malformed ({error!r}); download it again"
        ) from None
    return {text: token for text, token in extra.items() if text}


def optional_json(path: Path) -> dict:
    """Read a JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    return read_json(path)


def _text(token: str | dict | None) -> str | None:
    """Return the text of a token in a configuration file."""
    if isinstance(token, dict):
        return token.get("content")
    return token


def _special_texts(config: dict) -> list[str]:
    """Return the texts of all special tokens that a configuration names."""
    tokens = [config.get(name) for name in SPECIAL]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name, [])
        tokens += more.values() if isinstance(more, dict) else more
    return [text for text in map(_text, tokens) if text]


def _make_special(tok: Backend, texts: list[str]) -> None:
    """Make tokens of the vocabulary special; those that are added keep their other properties.

    Writes: tok.
    """
    added = {token.content: token for token in tok.get_added_tokens_decoder().values()}
    for text in texts:
        token = added.get(text, text)
        if tok.token_to_id(text) is None or getattr(token, "special", False):
            continue
        if token is not text:
            token.special = True
        tok.add_special_tokens([token])
