"""REST: propose the continuations that a datastore of texts has for the last tokens.

The tokens behind the longest matches (datastore.py) are counted as a trie. Its most frequent nodes
are the tree; the end of a text ends a continuation. `--tree auto` picks among trees of several
sizes, and none, by their measured speed; `--tree dynamic` verifies one, by default of 64 nodes.

Source: REST (arXiv 2311.08252) 3; the sizes are the official code's. Not as there: of many places
an even sample is counted, and a match of one token counts, too.
Trade-off: the search runs on the host, so --draft rest takes a CPU only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_tree import MAX_NODES, DraftTree
from drafters import DraftInputs
from drafts.autosize import AutoTrees
from drafts.datastore import LENGTH, LONGEST, Datastore, vocabulary_of
from drafts.presets import PresetDrafter
from model import Transformer
from options import require
from reference import build_tree
from run.draft_method import DraftMethod
from run.observer import Observer, PresetMethod
from run.options import GenerateConfig

SIZES = (2, 4, 8, 16)  # nodes of the trees of --tree auto, root included


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
        policy = AutoTrees() if self.smaller else Observer()
        return PresetMethod(self.presets, self.resolved_options(), policy=policy)

    def resolved_options(self) -> dict[str, Any]:
        return {"tree_size": self.size, "tree_depth": self.depth}

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        text = inputs.text
        N = self.size
        if N == 1:
            return self.backend.root_tree(text)
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
    require(config.datastore, "--draft rest needs its texts; add --set datastore=FILE")
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
    largest = config.tree_size or SIZES[-1]
    drafter = RestDrafter(store, largest)
    sizes = (1, *(size for size in SIZES if size < largest))
    drafter.smaller = tuple(RestDrafter(store, size) for size in sizes)
    return drafter
