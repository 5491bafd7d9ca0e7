"""A datastore of texts: finds the places that match the last tokens of a text longest (REST).

A file from scripts/build_datastore.py, mapped into memory: the tokens of texts, -1 behind each, and
a suffix array of them read backwards, which sorts all places by the LONGEST tokens up to there. So
one binary search finds the longest match, and two more the range of all places that match as much.

A datastore may be larger than memory: a search reads some pages of it. Of more than MOST places an
even sample is returned.
Not here: the trees (rest_draft.py).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from files.untrusted import read_untrusted
from options import require

LONGEST = 16  # tokens of a match
LENGTH = 10  # tokens of a continuation
MOST = 1000  # continuations that are counted
REMEDY = "build it again with scripts/build_datastore.py"


class Datastore:
    """Texts and their suffix array, in a file."""

    def __init__(self, file: Path, vocabulary: str, size: int):
        """Open a file.

        vocabulary: `vocabulary_of` the target's tokenizer; size: V
        Raises: ValueError for a file that is no datastore of this vocabulary.
        """
        self.name = f"--set datastore: {file}"
        self.size = size
        require(file.is_file(), f"{self.name} is no file; {REMEDY}")
        with read_untrusted(file, REMEDY, "is no datastore, or is cut short"):
            content = safe_open(file, framework="pt")
            metadata = content.metadata() or {}
            self.tokens = content.get_tensor("tokens").numpy()  # [n] int32
            self.order = content.get_tensor("order").numpy()  # [n] int32, places
        right = self.tokens.dtype == self.order.dtype == np.int32
        right = right and self.tokens.ndim == 1 and self.tokens.shape == self.order.shape
        right = right and len(self.tokens) > 0 and self.tokens[-1] == -1
        require(right, f"{self.name} is no datastore; {REMEDY}")
        fault = f"{self.name} has texts of another tokenizer or vocabulary; {REMEDY}"
        require(metadata.get("vocabulary") == vocabulary, fault)

    def before(self, place: int, count: int = LONGEST) -> list[int]:
        """Return the tokens up to a place, the last one first."""
        return self.tokens[max(place + 1 - count, 0) : place + 1][::-1].tolist()

    def find(self, last: list[int]) -> np.ndarray:
        """Return the places of the longest match. last: the last tokens, the latest one first."""
        n = len(self.order)
        after = bisect_left(range(n), last, key=lambda i: self.before(int(self.order[i])))
        near = [self.before(int(self.order[i])) for i in (after - 1, after) if 0 <= i < n]
        longest = max(common(context, last) for context in near)
        if longest == 0:
            return self.order[:0]
        least = last[:longest]
        first = bisect_left(range(after), least, key=lambda i: self.before(int(self.order[i])))

        def begin(i: int) -> list[int]:
            return self.before(int(self.order[i]), longest)

        end = bisect_right(range(n), least, lo=first, key=begin)
        count = min(end - first, MOST)
        return self.order[first + np.arange(count) * (end - first) // count]

    def continuations(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens behind some places, [M, LENGTH]. Raises: ValueError."""
        n = len(self.tokens)
        fault = f"{self.name} is damaged; {REMEDY}"
        require(not len(places) or 0 <= places.min() <= places.max() < n, fault)
        behind = places[:, None] + np.arange(1, LENGTH + 1)
        tokens = self.tokens[np.minimum(behind, n - 1)]
        require(not tokens.size or -1 <= tokens.min() <= tokens.max() < self.size, fault)
        return tokens


def vocabulary_of(tokenizer: Any, size: int) -> str:
    """Return a digest of the tokens. tokenizer: None where only ids go in and out; size: V"""
    digest = hashlib.sha256(str(size).encode())
    for piece in tokenizer.token_bytes() if tokenizer else ():
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def common(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that two lists share."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
