"""Trees against plain Python on lists: masks, acceptance, compaction; and files of static trees.

How trees grow is compared with plain searches in test_token_heads.py, with official traces in test_golden.py.
"""

import json
import random

import pytest
import torch

from draft_tree import MAX_NODES, StaticTree
from kv_cache import KVCache
from model import ModelConfig
from reference import (
    accept,
    build_tree,
    choose,
    compaction,
    path_to,
)
from run.tree_paths import read_tree

# ------------------------------------------------------------------------------------- plain Python


def ancestors(parents, node):
    """The node and all above it, root first."""
    return [*ancestors(parents, parents[node]), node] if node else [0]


def accept_reference(tokens, parents, valid, choice):
    """Returns: path, emitted."""
    accepted = {0}
    for node in range(1, len(tokens)):
        if parents[node] in accepted and valid[node] and tokens[node] == choice[parents[node]]:
            accepted.add(node)
    deepest = max(accepted, key=lambda node: (len(ancestors(parents, node)), -node))
    path = ancestors(parents, deepest)
    return path, [choice[node] for node in path]


def random_trees(rng, batch, size, vocab):
    """Lists of tokens, parents, valid and choices; few tokens, so that many match."""
    parents = [[0] + [rng.randrange(node) for node in range(1, size)] for _ in range(batch)]
    tokens, choice = (
        [[rng.randrange(vocab) for _ in range(size)] for _ in range(batch)] for _ in range(2)
    )
    valid = [[True] + [rng.random() < 0.85 for _ in range(1, size)] for _ in range(batch)]
    return tokens, parents, valid, choice


def accepted_by_both(tree, choice, depth):
    """The path accepted by plain operators. The C++ operator, where built, gives the same bits."""
    accepted = accept(tree, choice, depth)
    ours = choose(torch.device("cpu")).accept(tree, choice, depth)
    assert all(map(torch.equal, ours, accepted))
    return accepted


# ---------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("size", [1, 2, 3, 9, 26, 64])
def test_build_tree_and_paths(size):
    """Of random trees, and of a chain as long as a tree may be."""
    rng = random.Random(size)
    tokens, parents, valid, _ = random_trees(rng, 20, size, 5)
    parents[0] = [0, *range(size - 1)]
    tree = build_tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid), size - 1)
    assert [x.tolist() for x in (tree.tokens, tree.valid, tree.parents)] == [tokens, valid, parents]
    for node in range(size):
        path, length = path_to(tree, torch.full((20,), node), size - 1)
        for b, row in enumerate(parents):
            line = ancestors(row, node)
            assert tree.mask[b, node].nonzero().flatten().tolist() == sorted(line)
            assert tree.depths[b, node] == length[b] == len(line) - 1
            assert path[b].tolist() == line + [0] * (size - len(line))


# --------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("size, vocab", [(1, 3), (2, 2), (7, 2), (12, 3), (26, 2), (64, 3)])
def test_accept(size, vocab):
    rng = random.Random(size)
    tokens, parents, valid, choice = random_trees(rng, 60, size, vocab)
    depth = size  # deeper than any path
    tree = build_tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid), depth)
    accepted = accepted_by_both(tree, torch.tensor(choice), depth)
    lengths = set()
    for b in range(60):
        path, emitted = accept_reference(tokens[b], parents[b], valid[b], choice[b])
        end = len(path)
        assert accepted.length[b] == end - 1
        assert accepted.path[b].tolist() == path + [0] * (depth + 1 - end)
        assert accepted.emitted[b, :end].tolist() == emitted
        lengths.add(end)
    assert len(lengths) > 2 or size < 7  # the trees were not all rejected


# --------------------------------------------------------------------------------------- compaction


def test_compaction():
    """The accepted nodes' slots move below each other, and no other slot changes; one row fills the cache exactly."""
    rng = random.Random(4)
    config = ModelConfig(8, 2, 2, 2, 4, 8, vocab_size=8)
    size, slots, starts, lasts = 9, 24, [0, 3, 15, 7, 11], [0, 8, 8, 4, 7]
    parents = [[0] + [max(0, node - rng.randint(1, 3)) for node in range(1, size)] for _ in starts]
    above = torch.tensor(parents)
    tree = build_tree(above, above, above >= 0, size)
    path, length = path_to(tree, torch.tensor(lasts), size - 1)
    assert length[0] == 0 and length.max() > 2 and (path[1:, 1:] > torch.arange(1, size)).any()
    cache = KVCache.empty(config, len(starts), slots, torch.float32, "cpu")
    for buffer in (*cache.k, *cache.v):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0)))
    before = [b.clone() for b in (*cache.k, *cache.v)]
    cache.compact(torch.tensor(starts), compaction(path, length))
    for old, new in zip(before, (*cache.k, *cache.v)):
        for b, start in enumerate(starts):
            want = old[b].clone()
            for depth, node in enumerate(ancestors(parents[b], lasts[b])):
                want[:, start + depth] = old[b, :, start + node]
            assert torch.equal(new[b], want), b


# ------------------------------------------------------------------------------------- static trees


def saved(folder, text):
    file = folder / "tree.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_tree_file(tmp_path):
    paths = [[0, 1], [0], [1], [0, 1, 0]]
    tree = StaticTree(read_tree(saved(tmp_path, json.dumps(paths))))
    assert sorted(tree.paths) == sorted(map(tuple, paths))
    wide = [[rank] for rank in range(MAX_NODES - 1)]
    assert StaticTree(read_tree(saved(tmp_path, json.dumps(wide)))).size == 64


NO_PATHS = ["[]", "{}", "[0, 1]", "[[]]", "[[0], [-1]]", "[[0], [1.0]]", "[[0], [true]]", '[[0], ["1"]]']  # fmt: skip


@pytest.mark.parametrize("text, message", [
    *((text, "must be a list of rank paths") for text in NO_PATHS),
    ("[[0], [1]", "tree.json is not valid JSON"), (b"\xff\xfe[[0]]", "tree.json is not UTF-8 text"),
    ("[[0], [1, 0]]", r"has the path \[1, 0\] without its parent \[1\]; add it"), ("[[0], [1], [0]]", "lists a path twice"),
    (json.dumps([[rank] for rank in range(64)]), "at most 63 paths fit a tree; .* has 64"),
])  # fmt: skip
def test_tree_file_errors(tmp_path, text, message):
    with pytest.raises(ValueError, match="--tree: .*" + message):
        read_tree(saved(tmp_path, text))
