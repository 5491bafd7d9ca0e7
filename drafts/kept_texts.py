"""Texts of past requests, which a lookup searches beside the text so far (ngram_draft.py).

1. `add` puts the text of a finished request, prompt and answer, behind the texts before it. A text
   that it begins with makes way for it: an earlier turn of the conversation.
2. A text counts as used where a new answer repeats RUN of its tokens. The least recently used texts
   make way for new ones, so that all fit CAPACITY tokens. Later texts win among equal matches.
3. `tokens` has them in a buffer of fixed size and address, for all sequences of a batch. It changes
   between requests only: a decode cycle copies nothing to the device.
4. `keep_in` reads a file (draft_store) and replaces it when the process ends, readable by its
   owner alone. Of two processes the last one to end wins, and its file is complete. A missing or
   empty file is begun; any other that is no store of this vocabulary is refused.

Kept texts change the speed and never a token. Trade-off: a lookup scans all of them, 30 to 90 us a
cycle on a CPU for 16,384 tokens, where 65,536 took up to 360.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from files.io import folder_lock, parse_json, read_named, replace_file
from model import Transformer
from options import log_note, require
from run.methods import spec_of
from run.option_rules import STORE
from run.options import GenerateConfig

CAPACITY = 16384  # tokens, with a separator behind each text
RUN = 8  # tokens
MOST_BYTES = 2**25  # of a file: texts, and the successors of 256 thousand tokens


class PastText(NamedTuple):
    """A text."""

    tokens: list[int]
    runs: set[int]  # digests of its runs of RUN tokens

    @staticmethod
    def of(tokens: list[int], begin: int = 0) -> PastText:
        """Keep the runs of some tokens. begin: of the first run"""
        runs = zip(*(tokens[begin + i :] for i in range(RUN)))
        return PastText(tokens, set(map(hash, runs)))


class PastTexts:
    """The texts, from the least to the most recently used one."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        capacity: int = CAPACITY,
        successors: Tensor | None = None,
    ):
        """capacity: tokens and separators; successors: of `empty_matrix`, kept in the file, too"""
        self.texts: list[PastText] = []
        self.capacity = capacity
        # [C] int64, the texts at its end; -1 is no token: a separator, or padding in front
        self.tokens = torch.full((capacity,), -1, dtype=torch.long, device=device)
        self.searched = self.tokens[capacity:]  # without the padding
        self.successors = successors

    def add(self, text: list[int], begin: int = 0) -> None:
        """Keep a text. begin: where its answer begins. Writes: tokens."""
        answer = PastText.of(text, begin).runs
        text = text[-(self.capacity - 1) :]
        others = [kept for kept in self.texts if text[: len(kept.tokens)] != kept.tokens]
        others.sort(key=lambda kept: not answer.isdisjoint(kept.runs))  # stable: used ones last
        self._set([*others, PastText.of(text)])

    def _set(self, texts: list[PastText]) -> None:
        """Keep the last texts that fit. Writes: tokens."""
        place = self.capacity
        first = len(texts)
        while first and len(texts[first - 1].tokens) < place:
            first -= 1
            place -= len(texts[first].tokens) + 1
        self.texts = texts[first:]
        self.searched = self.tokens[place:]
        row = np.full(self.capacity, -1)
        for tokens, _ in self.texts:
            row[place : place + len(tokens)] = tokens
            place += len(tokens) + 1
        self.tokens.copy_(torch.from_numpy(row))

    def keep_in(self, file: Path, vocabulary: str, size: int) -> None:
        """Read a file, and replace it when this object is dropped or the process ends.

        vocabulary: a digest of the tokens; size: their number
        Raises: ValueError for a file that is no store of this vocabulary. Writes: tokens,
            successors.
        """
        if file.is_file() and file.stat().st_size:
            texts, successors = _read(file, vocabulary, size)
            self._set([PastText.of(tokens) for tokens in texts])
            if self.successors is not None:
                for token, *likeliest in successors:
                    known = torch.tensor(likeliest[: self.successors.shape[1]])
                    self.successors[token, : len(known)] = known
        before = (self.texts, _rows(self.successors))
        state = self.__dict__  # the object itself would never be dropped
        weakref.finalize(self, _write, file, vocabulary, before, state)


def texts_for(
    config: GenerateConfig, target: Transformer, tokenizer: Any, successors: Tensor | None = None
) -> PastTexts | None:
    """Make what is kept of past requests, draft_store included; None where none is used.

    successors: as for `PastTexts`
    Raises: ValueError for draft_store with another drafter, and for a file that is no store.
    """
    spec = spec_of(config)
    beside = spec.head and config.tree_shape == "auto" and config.device == "cpu"
    # under the residual rule the drafts of past requests would change the tokens
    keeps = (spec.keeps_texts or beside) and config.accept == "exact"
    require(keeps or not config.draft_store, f"--set draft_store {STORE.text}")
    if not keeps:
        return None
    kept = PastTexts(target.norm.weight.device, successors=successors)
    if config.draft_store:
        size = target.config.vocab_size
        kept.keep_in(Path(config.draft_store), vocabulary_of(tokenizer, size), size)
    return kept


def vocabulary_of(tokenizer: Any, size: int) -> str:
    """Return a digest of the tokens. tokenizer: None where only ids go in and out; size: V"""
    digest = hashlib.sha256(str(size).encode())
    for piece in tokenizer.token_bytes() if tokenizer else ():
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def _read(file: Path, vocabulary: str, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Read a file. Raises: ValueError.

    Returns: texts; tokens, each with its successors behind it.
    """
    where = f"--set draft_store: {file}"
    other = "delete it or name another file"
    fault = f"{where} has more than the {MOST_BYTES} bytes of any store; {other}"
    require(file.stat().st_size <= MOST_BYTES, fault)
    content = read_named(file, "--set draft_store")
    try:
        value = parse_json(content, where)
    except ValueError:
        raise ValueError(f"{where} is no store of texts, or is cut short; {other}") from None
    valid = isinstance(value, dict) and value.keys() == {"vocabulary", "texts", "successors"}
    lists = (value["texts"], value["successors"]) if valid else ()
    for rows in lists:
        valid = valid and isinstance(rows, list)
        valid = valid and all(isinstance(row, list) and row for row in rows)
    require(valid, f"{where} is no store of texts; {other}")
    same = value["vocabulary"] == vocabulary
    require(same, f"{where} has texts of another tokenizer or vocabulary; name another file")
    tokens = [token for rows in lists for row in rows for token in row]
    valid = all(type(token) is int and 0 <= token < size for token in tokens)
    require(valid, f"{where} has a token that is not 0 to {size - 1}; {other}")
    return lists


def _rows(matrix: Tensor | None) -> list[list[int]]:
    """Return the tokens that have successors, each with these behind it. matrix: [V + 1, k]"""
    if matrix is None:
        return []
    known = (matrix[:, 0] >= 0).nonzero()  # [tokens with a successor, 1]
    rows = torch.cat((known, matrix[known[:, 0]]), 1).tolist()
    return [[token for token in row if token >= 0] for row in rows]


def _write(
    file: Path, vocabulary: str, before: tuple[list[PastText], list], state: dict[str, Any]
) -> None:
    """Replace a file if its content has changed. If that fails, print one line."""
    successors = _rows(state["successors"])
    if state["texts"] is before[0] and successors == before[1]:
        return
    texts = [kept.tokens for kept in state["texts"]]
    value = json.dumps({"vocabulary": vocabulary, "texts": texts, "successors": successors})

    def write(path: Path) -> None:
        path.write_text(value + "\n", encoding="utf-8")

    try:
        with folder_lock(file.parent):
            replace_file(file, write, private=True)
    except OSError as error:
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed by now
            reason = error.strerror or error
            log_note(f"--set draft_store: cannot write {file}: {reason}")
