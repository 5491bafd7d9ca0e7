"""REST: propose the continuations that a datastore of texts has for the last tokens.

1. A file from scripts/build_datastore.py is mapped into memory, and may be larger: the tokens of
   texts, -1 behind each, and a suffix array of them read backwards, which sorts all places by the
   LONGEST tokens up to there. So a binary search finds the longest match, and two more the range
   of all places that match as much. Of more than MOST places an even sample is counted.
2. The tokens behind these places are counted as a trie. Its most frequent nodes are the tree; the
   end of a text ends a continuation. `--tree auto` picks among trees of several sizes, and none, by
   their measured speed; `--tree dynamic` verifies one, by default of 64 nodes.

Source: REST (arXiv 2311.08252) 3; the sizes are the official code's. Not as there: the sample, and
a match of one token counts, too.
Trade-off: the search runs on the host, so --draft rest takes a CPU only.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from draft_tree import MAX_NODES, DraftTree
from drafters import DraftInputs
from drafts.by_value import ByValue, PresetDrafter, with_smaller
from files.io import show_progress
from files.untrusted import read_untrusted
from model import Transformer
from options import require
from reference import build_tree
from run.observer import DraftMethod, Observer
from run.options import GenerateConfig

LONGEST = 16  # tokens of a match
LENGTH = 10  # tokens of a continuation
MOST = 1000  # continuations that are counted
REMEDY = "build it again with scripts/build_datastore.py"
SIZES = (2, 4, 8, 16)  # nodes of the trees of --tree auto, root included


class Datastore:
    """Texts and their suffix array, in a file."""

    def __init__(self, file: Path, vocabulary: str, size: int):
        """Open a file.

        vocabulary: `vocabulary_of` the target's tokenizer; size: V
        Raises: ValueError for a file that is no datastore of this vocabulary.
        """
        self.name = f"--datastore: {file}"
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

    @staticmethod
    def write(file: Path, tokens: np.ndarray, vocabulary: str) -> None:
        """Write texts. tokens: [n] int32, -1 behind each text; vocabulary: as above"""
        arrays = {"tokens": tokens, "order": suffix_array(tokens)}
        save_file(arrays, file, {"vocabulary": vocabulary})

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


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Sort all places by the LONGEST tokens up to there, the latest token first, [n] int32.

    Where a text begins, it is as if smaller tokens went before. Equal places keep their order.
    """
    rank = tokens.astype(np.int64) + 2  # of the last `length` tokens; 0: none
    length = 1
    while length < LONGEST:
        show_progress(f"sorting by {2 * length} of {LONGEST} tokens", 2 * length == LONGEST)
        key = rank * (rank.max() + 1)
        key[length:] += rank[:-length]
        order = np.argsort(key, kind="stable")
        key = key[order]
        new = np.ones(len(key), np.int64)
        new[1:] = key[1:] != key[:-1]
        rank[order] = new.cumsum()
        length *= 2
    return order.astype(np.int32)


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


def best_prefixes(continuations: np.ndarray, count: int) -> tuple[list[int], list[int]]:
    """Return the most frequent prefixes of some continuations, as nodes below a root.

    continuations: [M, LENGTH], -1 behind the end of a text
    count: nodes at most. Of equal counts the shorter prefix comes first, then the smaller tokens.
    Returns: their tokens, and their parents, the root being 0; parents precede children.
    """
    inside = np.logical_and.accumulate(continuations >= 0, 1)
    rows = np.where(inside, continuations, -1)
    rows = rows[np.lexsort(rows.T[::-1])]
    new = np.ones(rows.shape, bool)  # a prefix begins here; below it are more rows with the same
    new[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], 1)
    begin = np.flatnonzero(new.T)  # of all prefixes, the shortest first
    tokens = rows.T.ravel()[begin]
    counts = np.diff(begin, append=new.size)
    number = new.T.ravel().cumsum()  # of the prefix of each row and length, from 1
    parents = np.where(begin < len(rows), 0, number[begin - len(rows)])
    counts[tokens < 0] = 0
    chosen = np.argsort(-counts, kind="stable")[:count]
    chosen = np.sort(chosen[counts[chosen] > 0])
    node = np.zeros(len(begin) + 1, np.int64)
    node[chosen + 1] = np.arange(1, len(chosen) + 1)
    return tokens[chosen].tolist(), node[parents[chosen]].tolist()


class RestDrafter(PresetDrafter):
    """Proposes the most frequent continuations of a datastore."""

    depth = LENGTH

    def __init__(self, store: Datastore, size: int):
        self.store = store
        self.size = size
        self.depth = min(LENGTH, size - 1)
        self.width = size - 1

    def method(self) -> DraftMethod:
        policy = ByValue() if self.smaller else Observer()
        return DraftMethod(self.presets, self.resolved_options(), policy=policy)

    def propose_nodes(self, state: Any, inputs: DraftInputs) -> DraftTree:
        text = inputs.text
        N = self.size
        tokens = torch.zeros(len(text.pos), N, dtype=torch.long)
        parents = torch.zeros_like(tokens)
        valid = torch.zeros_like(tokens, dtype=torch.bool)
        tokens[:, 0] = text.root
        valid[:, 0] = True
        for b, pos in enumerate(text.pos.tolist()):
            last = text.tokens[b, max(pos + 1 - LONGEST, 0) : pos + 1].flip(0).tolist()
            continuations = self.store.continuations(self.store.find(last))
            drafted, above = best_prefixes(continuations, N - 1)
            count = len(drafted)
            tokens[b, 1 : count + 1] = tokens.new_tensor(drafted)
            parents[b, 1 : count + 1] = tokens.new_tensor(above)
            valid[b, 1 : count + 1] = True
        return build_tree(tokens, parents, valid, self.depth)


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Make `--draft rest`. Raises: ValueError on CUDA, and for a file that is no datastore."""
    require(config.datastore, "--draft rest needs its texts; add --datastore FILE")
    on_cpu = config.device.startswith("cpu")
    require(on_cpu, "--draft rest searches on the host; use --device cpu, or another --draft")
    size = target.config.vocab_size
    drafter = drafter_of(
        config, Datastore(Path(config.datastore), vocabulary_of(tokenizer, size), size)
    )
    return drafter.method()


def drafter_of(config: GenerateConfig, store: Datastore) -> RestDrafter:
    """Make the drafter of the options over a datastore."""
    if config.tree_shape == "dynamic":
        return RestDrafter(store, config.tree_size or MAX_NODES)
    return with_smaller(partial(RestDrafter, store), SIZES, config.tree_size)
