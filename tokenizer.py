"""Tokenizers behind one small class, streaming detokenization, and the chat templates.

How it works:
1. `Tokenizer.load` takes `tokenizer.model` (sentencepiece) where there is one, else `tokenizer.json` (byte-level
   or sentencepiece-style BPE, through the optional package `tokenizers`).
2. `encode` gives Hugging Face's ids. Control tokens written in the text (`</s>`, `<|eot_id|>`) are parsed with
   `special=True` only, which is for rendered chats: a plain prompt can never inject one.
3. Every token stands for a fixed string of bytes, so decoding is joining bytes and reading them as UTF-8, and
   streaming is the same with an incremental UTF-8 decoder: exact, and O(1) per token.
4. A chat template is four strings around the turns; the model's own is recognised by its markers.

After a control token in the text, a `tokenizer.model` that adds a dummy prefix space adds another one, as the
official EAGLE runs and transformers 4 do, unless the checkpoint's config says `"legacy": false`.
Source of the templates: the evaluation scripts of the official EAGLE and FastChat's conversation templates.
Trade-off: templates are fixed strings, not Jinja: nothing from a checkpoint is executed, but only these four.
Not here: `lstrip` / `rstrip` of added tokens with sentencepiece, `clean_up_tokenization_spaces`.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sentencepiece import SentencePieceProcessor

from model import read_json

# protobuf merges an appended message into the model: normalizer_spec.add_dummy_prefix = false
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Added(NamedTuple):
    """A token that is cut out of the text before the rest is tokenized."""

    id: int
    control: bool  # parsed only with special=True, and no part of the decoded text


class Tokenizer:
    """Text to token ids and back. Subclasses give `_encode(text, special) -> ids` and `_piece(id) -> bytes`."""

    def __init__(self, added: dict[str, Added], vocab_size: int, config: dict, strips_space: bool):
        """Find the special tokens.

        config: `tokenizer_config.json`, completed with the vocabulary file's own defaults
        strips_space: whether encode puts a space before the text, which decode takes away again
        """
        self._added = added
        self._hidden = frozenset(token.id for token in added.values() if token.control)
        self.vocab_size = max([vocab_size, *(token.id + 1 for token in added.values())])  # ids in all
        self.bos_id = self.id_of(_token_text(config, "bos_token"))
        eos = self.id_of(_token_text(config, "eos_token"))
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.adds_bos: bool = bool(config["add_bos_token"]) and self.bos_id is not None
        self.strips_space = strips_space

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory.

        Raises: ValueError when there is none, it is corrupt, of an unknown kind, or needs a missing package.
        """
        model, fast = path / "tokenizer.model", path / "tokenizer.json"
        # null means "the default" in this file
        config = {k: v for k, v in _optional_json(path / "tokenizer_config.json").items() if v is not None}
        if model.is_file():
            try:
                sp = SentencePieceProcessor(model_proto=model.read_bytes())
                return SentencePieceTokenizer(sp, config, _added_tokens(path, config))
            except RuntimeError as error:
                reason = f"{model} is not a sentencepiece model ({error})"
                if not fast.is_file():
                    raise ValueError(f"{reason}; download it again, or use --prompt_ids") from None
                print(f"{reason}; using {fast.name}", file=sys.stderr)
        if fast.is_file():
            return JsonTokenizer(fast, config)
        raise ValueError(
            f"{path} has neither {model.name} nor {fast.name}; add the tokenizer's files, or use --prompt_ids"
        )

    def encode(self, text: str, bos: bool = True, special: bool = False) -> list[int]:
        """Tokenize `text`.

        bos: begin with the BOS token if this model uses one and the text does not begin with it already
        special: parse control tokens written in the text; for rendered chats only
        """
        ids = self._encode(text, special)
        if bos and self.adds_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], continuation: bool = False) -> str:
        """The text of `ids`: control tokens left out, U+FFFD for bytes that are not UTF-8.

        continuation: keep a leading space, which belongs between the text before and this one
        """
        stream = self.stream(continuation)
        return stream.push(ids) + stream.flush()

    def stream(self, continuation: bool = False) -> StreamDecoder:
        """A decoder that takes the ids in parts."""
        return StreamDecoder(self, continuation)

    def piece(self, id: int) -> bytes:
        """The bytes of one token; none for control tokens and for ids beyond the vocabulary (padded LM heads)."""
        return b"" if id in self._hidden else self._piece(id)

    def token_bytes(self) -> list[bytes]:
        """What every id stands for, control tokens by their names: equal lists are equal vocabularies."""
        names = {token.id: text.encode() for text, token in self._added.items()}
        return [names[i] if i in names else self._piece(i) for i in range(self.vocab_size)]

    def id_of(self, token: str | None) -> int | None:
        """The id of a control or added token."""
        return self._added[token].id if token in self._added else None


def has_tokenizer(path: Path) -> bool:
    """Whether a directory holds a tokenizer's file."""
    return (path / "tokenizer.model").is_file() or (path / "tokenizer.json").is_file()


class StreamDecoder:
    """Incremental `Tokenizer.decode`: all pushes and the flush together give the same text exactly."""

    def __init__(self, tokenizer: Tokenizer, continuation: bool):
        self._piece = tokenizer.piece
        self._strip = tokenizer.strips_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take further ids. Returns: the characters they complete."""
        data = b"".join(map(self._piece, ids))
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Take the end. Returns: U+FFFD for a character left unfinished, else nothing."""
        return self._utf8.decode(b"", final=True)


class SentencePieceTokenizer(Tokenizer):
    """LLaMA-2, Vicuna, Mistral and the demo: `tokenizer.model`."""

    def __init__(self, sp: SentencePieceProcessor, config: dict, added: dict[str, Added]):
        controls = [i for i in range(len(sp)) if sp.is_control(i) or sp.is_unknown(i)]
        added = {sp.id_to_piece(i): Added(i, True) for i in controls} | added
        named = {"bos_token": sp.bos_id(), "eos_token": sp.eos_id()}
        defaults = {key: sp.id_to_piece(i) for key, i in named.items() if i >= 0}
        prefixed = sp.encode("a", out_type=str)[0].startswith("▁")
        super().__init__(added, len(sp), {**defaults, "add_bos_token": True, **config}, prefixed)
        self._sp = self._sp_inside = sp
        if not config.get("legacy", True):  # no dummy prefix but at the very start
            self._sp_inside = SentencePieceProcessor(model_proto=sp.serialized_model_proto() + NO_DUMMY_PREFIX)
        self._text_of = {token.id: text.encode() for text, token in added.items()}
        self._split = {
            special: _splitter([text for text, token in added.items() if special or not token.control])
            for special in (True, False)
        }

    def _encode(self, text: str, special: bool) -> list[int]:
        ids = []
        for n, part in enumerate(self._split[special].split(text)):  # plain, token, plain, ... plain
            if n % 2:
                ids.append(self._added[part].id)
            elif part:
                ids += (self._sp_inside if n else self._sp).encode(part)
        return ids

    def _piece(self, id: int) -> bytes:
        if id in self._text_of:
            return self._text_of[id]
        return _sentencepiece_bytes(self._sp.id_to_piece(id)) if 0 <= id < len(self._sp) else b""


class JsonTokenizer(Tokenizer):
    """LLaMA-3, Qwen-2 and whatever ships only `tokenizer.json`; the file alone says what is an added token."""

    def __init__(self, path: Path, config: dict):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(f"{path} needs the package tokenizers; run: pip install tokenizers") from None
        try:
            self._tok = tok = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more specific
            raise ValueError(f"{path} is corrupt ({error}); download it again") from None
        tok.no_truncation()  # the file may keep the limits of the last training run
        tok.no_padding()
        names = [_token_text(config, f"{kind}_token") for kind in ("bos", "eos", "unk", "pad")]
        tok.add_special_tokens([name for name in names if name and tok.token_to_id(name) is not None])
        added = {token.content: Added(i, token.special) for i, token in tok.get_added_tokens_decoder().items()}
        probe = tok.encode("a")  # with whatever the post-processor puts around a text
        has_bos = probe.special_tokens_mask[:1] == [1]
        defaults = {"bos_token": probe.tokens[0] if has_bos else None, "add_bos_token": has_bos}
        self._byte_level = _is_byte_level(tok, path)
        # the byte alphabet has no U+2581, so this is about sentencepiece's manner only
        prefixed = any(token.startswith("▁") for token in tok.encode("a", add_special_tokens=False).tokens[:1])
        super().__init__(added, tok.get_vocab_size(), {**defaults, **config}, prefixed)

    def _encode(self, text: str, special: bool) -> list[int]:
        self._tok.encode_special_tokens = not special  # true: a special token in the text is plain text
        return self._tok.encode(text, add_special_tokens=False).ids

    def _piece(self, id: int) -> bytes:
        token = self._tok.id_to_token(id) or ""
        if not self._byte_level:
            return _sentencepiece_bytes(token)
        if any(char not in BYTE_OF for char in token):  # an added token in plain text
            return token.encode()
        return bytes(BYTE_OF[char] for char in token)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte. Source: GPT-2's encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _is_byte_level(tok, path: Path) -> bool:
    """Whether tokens are written in the byte alphabet, and not as sentencepiece writes them."""
    state = json.loads(tok.decoder.__getstate__()) if tok.decoder else {}
    kinds = [part.get("type", "none") for part in state.get("decoders", [state])]
    if "ByteLevel" not in kinds and not {"ByteFallback", "Metaspace"} & set(kinds):
        known = "ByteLevel, ByteFallback or Metaspace"
        raise ValueError(f"{path}: the decoder must be {known}, not {' + '.join(kinds)}; use --prompt_ids")
    return "ByteLevel" in kinds


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _splitter(tokens: list[str]) -> re.Pattern:
    """A pattern whose `split` gives plain text and tokens in turn, the longest token first."""
    choices = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.compile(f"({choices or '(?!)'})")  # (?!) never matches


def _added_tokens(path: Path, config: dict) -> dict[str, Added]:
    """What `tokenizer_config.json` and `added_tokens.json` add to a sentencepiece model."""
    added = _optional_json(path / "added_tokens.json")
    decoder = config.get("added_tokens_decoder", {})
    try:
        extra = {text: Added(int(i), True) for text, i in added.items()}
        extra |= {t["content"]: Added(int(i), t.get("special", True)) for i, t in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the added tokens are malformed ({error!r}); download it again") from None
    return {text: token for text, token in extra.items() if text}


def _optional_json(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _token_text(config: dict, key: str) -> str | None:
    value = config.get(key)
    return value.get("content") if isinstance(value, dict) else value


# -------------------------------------------------------------------------------------- chat templates


@dataclass(frozen=True)
class ChatTemplate:
    """The text around the turns of a conversation."""

    name: str
    start: str  # before the first turn
    ask: str  # after every turn
    reply: str  # before an earlier answer
    next: str  # between an earlier answer and the turn after it
    markers: tuple[str, ...]  # all of these in a checkpoint's own Jinja template tell that it is this one
    stops: tuple[str, ...] = ()  # tokens that end an answer besides EOS
    trim_turns: bool = False  # whether white space around a turn is dropped; around an answer it always is

    def render(self, turns: list[str], answers: list[str]) -> str:
        """The text of the prompt for the next answer. answers: one fewer than turns."""
        *earlier, last = (turn.strip() for turn in turns) if self.trim_turns else turns
        pairs = zip(earlier, answers, strict=True)
        past = "".join(turn + self.ask + self.reply + answer.strip() + self.next for turn, answer in pairs)
        return self.start + past + last + self.ask

    def encode(self, tokenizer: Tokenizer, turns: list[str], answers: list[str]) -> list[int]:
        """Token ids of the prompt for the next answer, BOS included; control tokens in a turn are parsed too."""
        return tokenizer.encode(self.render(turns, answers), special=True)

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer. Raises: ValueError when the tokenizer lacks one of the template's tokens."""
        for token in CONTROL.findall(self.start + self.ask + self.reply + self.next):
            if tokenizer.id_of(token) is None:
                raise ValueError(
                    f"the chat template {self.name} needs the control token {token}, which this tokenizer lacks; "
                    f"use another --chat: {', '.join(CHAT_TEMPLATES)}"
                )
        return tuple(dict.fromkeys((*tokenizer.eos_ids, *map(tokenizer.id_of, self.stops))))


CONTROL = re.compile(r"</?s>|<\|\w+\|>")  # the tokens that `encode` has to parse in the templates' text
# LLaMA-2's default, with the two spaces after "safe." of Meta's own code
SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being "
    "safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal "
    "content. Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering "
    "something not correct. If you don't know the answer to a question, please don't share false information."
)
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n".format
# LLaMA-3's text begins with its own BOS; for the others `encode` adds it
CHAT_TEMPLATES = {
    template.name: template
    for template in (  # in the order in which markers are looked for
        ChatTemplate(  # LLaMA-3.1's own also puts two lines with dates before the system message
            name="llama3",
            start=f"<|begin_of_text|>{HEADER('system')}{SYSTEM}<|eot_id|>{HEADER('user')}",
            ask=f"<|eot_id|>{HEADER('assistant')}", reply="", next=f"<|eot_id|>{HEADER('user')}",
            markers=("<|start_header_id|>",), stops=("<|eot_id|>",), trim_turns=True,
        ),
        ChatTemplate(
            name="llama2", start=f"[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\n",
            ask=" [/INST] ", reply="", next=" </s><s>[INST] ", markers=("<<SYS>>",),
        ),
        ChatTemplate(  # Mixtral's too
            name="mistral", start="[INST] ", ask=" [/INST]", reply=" ", next="</s>[INST] ", markers=("[INST]",),
        ),
        ChatTemplate(
            name="vicuna", start=f"{VICUNA_SYSTEM} USER: ",
            ask=" ASSISTANT:", reply=" ", next="</s>USER: ", markers=("USER:", "ASSISTANT:"),
        ),
    )
}  # fmt: skip


def chat_template(path: Path, name: str | None = None) -> ChatTemplate:
    """The chat template called `name`, or the one that the checkpoint in `path` uses.

    Raises: ValueError for an unknown name, or when the checkpoint's template is missing or none of ours.
    """
    names = ", ".join(CHAT_TEMPLATES)
    if name is not None and name not in CHAT_TEMPLATES:
        raise ValueError(f"--chat must be one of {names}; got {name}")
    if name is not None:
        return CHAT_TEMPLATES[name]
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        text = jinja.read_text(encoding="utf-8", errors="replace")
    else:  # one template, or a list of named ones
        text = str(_optional_json(path / "tokenizer_config.json").get("chat_template"))
    for template in CHAT_TEMPLATES.values():
        if all(marker in text for marker in template.markers):
            return template
    raise ValueError(f"{path} has no chat template that is known here; use --chat NAME with one of {names}")
