"""Grammars: JSON schemas, Lark and GBNF, by the library llguidance; exact together with drafting.

The tokens that may follow a text are a function of the grammar and that text (`GrammarState`). So
every node of a draft tree has a mask of its own (guided_draft.py), and the target's choice, greedy
or with the shared noise, top-k and top-p, is taken under it: the answer is the same for every
drafter and tree. The end of sequence is allowed exactly where the grammar allows to stop.

JSON is written as `json.dumps` writes it: free white space would leave few tokens certain, and a
small model may never leave it. Where only one text can follow, its tokens are the tokenizer's own.
Trade-off: the host makes the masks, 0.1 ms each, between drafting and verifying; so on CUDA a cycle
with a grammar is not captured. Formats of strings that the library lacks are named in a note and
ignored, as JSON Schema has it. Not here: several ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from files.io import LocalError
from files.tokenizer import Tokenizer
from options import log_note, one_line, require
from run.engine import Engine

MOST_BYTES = 2**16  # of a grammar; a schema of twice that size takes 6 s to compile
NAMES_ALONE = 'Unimplemented keys: ["propertyNames"]'
# lenient: keys and formats that the library does not enforce are warnings
STYLE = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True,
}  # fmt: skip


class Grammar:
    """A compiled grammar."""

    def __init__(self, engine: Engine, source: str | dict):
        """Compile a grammar for an engine.

        source: a text in Lark or GBNF, or a JSON schema
        Raises: ValueError for a grammar that the library refuses, that is too large or allows
            nothing, and for an engine that cannot follow any.
        """
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError:
            fault = "a grammar needs llguidance"
            plain = f"{fault}, which is not installed here"
            raise LocalError(f"{fault}; run: pip install llguidance", plain) from None
        config = engine.config
        exact = config.accept == "exact" and not config.ignore_eos
        if not exact:
            fault = "a grammar cannot go with ignore_eos or accept=residual"
            raise LocalError(f"{fault}; drop that", fault)
        fault = "a grammar needs a model with a tokenizer and an end of sequence; use another"
        require(engine.tokenizer is not None and engine.eos_ids != (), fault)
        text = source if isinstance(source, str) else json.dumps(source)
        size = len(text.encode())
        fault = f"a grammar may have {MOST_BYTES} bytes, and this one has {size}; shorten it"
        require(size <= MOST_BYTES, fault)
        self.ends = engine.eos_ids
        self.vocab = engine.target.config.vocab_size  # V
        try:
            if isinstance(source, str):
                definition = grammar_from("grammar", text)
            else:
                definition = LLMatcher.grammar_from_json_schema(text, overrides=STYLE)
        except ValueError as error:
            raise ValueError(f"the grammar is refused: {one_line(error)}") from None
        vocabulary = _vocabulary(engine.tokenizer, self.vocab, self.ends)
        self.matcher = LLMatcher(vocabulary, definition, log_level=0)
        fault = self.matcher.get_error()
        require(not fault, f"the grammar is refused: {one_line(fault)}")
        for warning in self.matcher.get_grammar_warnings():
            harmless = warning.startswith("Unknown format") or warning == NAMES_ALONE
            require(harmless, f"the grammar is refused: {one_line(warning)}")
            log_note(f"a schema is not enforced in full: {one_line(warning)}"[:300])
        require(self.begin().place.bits.any(), "the grammar is refused: it allows no text")

    def begin(self) -> TextGuide:
        """Begin a text."""
        return TextGuide(GrammarState(self, self.matcher.deep_copy()))


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, vocab: int, ends: tuple[int, ...]) -> Any:
    """Make the library's tokenizer. vocab: V"""
    import llguidance

    source = tokenizer.json()
    if source is None:

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, bos=False)

        pieces = tokenizer.token_bytes()[:vocab]
        encode.tokens = pieces + [b""] * (vocab - len(pieces))
        encode.special_token_ids = [id for id in range(len(pieces)) if not tokenizer.piece(id)]
        encode.eos_token_id = ends[0]
        encode.bos_token_id = tokenizer.bos_id
        source = llguidance.TokenizerWrapper(encode)
    elif tokenizer.vocab_size > vocab:
        source = json.dumps(_without_further_tokens(json.loads(source), vocab))
    return llguidance.LLTokenizer(source, n_vocab=vocab, eos_token=list(ends))


def _without_further_tokens(content: dict, vocab: int) -> dict:
    """Return the content of a tokenizer.json without the tokens that the model lacks.

    The model never decides for them, and no forced text may be spelled with one.
    """
    model = content["model"]
    tokens = model["vocab"]
    if isinstance(tokens, dict):
        tokens = {token: i for token, i in tokens.items() if i < vocab}
    else:  # Unigram's list of pairs
        tokens = tokens[:vocab]
    model = model | {"vocab": tokens}
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        kept = [pair for pair in pairs if {*pair, "".join(pair)} <= tokens.keys()]
        model = model | {"merges": kept}
    added = [token for token in content["added_tokens"] if token["id"] < vocab]
    return content | {"model": model, "added_tokens": added, "post_processor": None}


def schema_of(asked: Any) -> dict | None:
    """Return the JSON schema that OpenAI's `response_format` asks for; None for plain text.

    Raises: ValueError for another format.
    """
    kind = asked.get("type") if isinstance(asked, dict) else None
    fault = "response_format must be of type text, json_object, or json_schema with its schema"
    require(kind in ("text", "json_object", "json_schema"), fault)
    own = {"text": {"type"}, "json_object": {"type", "schema"}}.get(kind, {"type", kind})
    more = sorted(name for name in asked.keys() - own if asked[name] is not None)
    require(not more, f"response_format of type {kind} has no {', '.join(more)}; leave that out")
    if kind == "text":
        return None
    named = asked.get("json_schema") if kind == "json_schema" else asked
    schema = named.get("schema") if isinstance(named, dict) else None
    if schema is None and kind == "json_object":
        schema = {"type": "object"}
    require(isinstance(schema, dict), fault)
    return schema


class GrammarState:
    """A text that a grammar allows: its mask, and the places behind it, made when asked for."""

    def __init__(self, grammar: Grammar, matcher: Any, run: Sequence[int] = ()):
        """Stand behind a text.

        matcher: has read the text; run: the forced tokens that follow it, if they are known
        """
        self.grammar = grammar
        self.matcher = matcher
        self.run = run or matcher.compute_ff_tokens()
        self.next: dict[int, GrammarState | None] = {}

    @cached_property
    def bits(self) -> np.ndarray:
        """The tokens that may follow, [ceil(V / 32)] uint32; none where the text cannot go on."""
        bits = np.zeros((self.grammar.vocab + 31) // 32, np.uint32)
        if self.run:
            bits[self.run[0] >> 5] = 1 << (self.run[0] & 31)
            return bits
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.matcher.is_error():  # the library would end the text
            bits[:] = 0
        return bits

    @cached_property
    def only(self) -> int | None:
        """The token that alone may follow."""
        if self.run:
            return self.run[0]
        words = self.bits.nonzero()[0]
        word = int(self.bits[words[0]]) if len(words) == 1 else 0
        if word.bit_count() != 1:
            return None
        return 32 * int(words[0]) + word.bit_length() - 1

    def allows(self, token: int) -> bool:
        """Return whether a token may follow."""
        return bool(self.bits[token >> 5] >> (token & 31) & 1)

    def after(self, token: int) -> GrammarState | None:
        """Return the place behind a token; None where it is not allowed, or ends the text."""
        if token not in self.next:
            self.next[token] = None
            if self.allows(token) and token not in self.grammar.ends:
                matcher = self.matcher.deep_copy()
                matcher.consume_token(token)
                self.next[token] = GrammarState(self.grammar, matcher, self.run[1:])
        return self.next[token]


class TextGuide:
    """The place of one text."""

    fault = "the grammar allows neither a token nor the end here; correct it"

    def __init__(self, place: GrammarState):
        self.place: GrammarState | None = place  # None: at the end

    def take(self, tokens: list[int]) -> list[int]:
        """Go on behind decided tokens.

        Returns: those that are allowed: all, unless the grammar allows nothing behind them.
        """
        for number, token in enumerate(tokens):
            if self.place is None or not self.place.allows(token):
                return tokens[:number]
            self.place = self.place.after(token)
        return tokens


def compile_grammars(engine: Engine, grammar: Any, count: int) -> list[Any]:
    """Compile the grammars of some prompts.

    grammar: None, a text in Lark or GBNF, or a JSON schema (a dict); a list gives each its own
    count: prompts
    Returns: a `Grammar` or None per prompt. Raises: ValueError.
    """
    each = grammar if isinstance(grammar, list) else [grammar]
    fault = f"grammar has {len(each)} values, and there are {count} prompts; give one for each"
    require(len(each) == count or each is not grammar, fault)
    compiled = []
    for source in each:
        compiled.append(None if source is None else Grammar(engine, source))
    return compiled if each is grammar else compiled * count
