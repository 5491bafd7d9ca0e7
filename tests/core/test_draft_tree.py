"""Every tensor step on trees against plain Python on lists, on random trees and on the edges."""

import json
import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from draft_tree import EAGLE1_PATHS, MAX_NODES, Children, DynamicTree, StaticTree
from drafters import DraftInputs, TreeDrafter
from helpers import golden_case, order_of, text_with
from kv_cache import KVCache
from model import ModelConfig
from reference import (
    accept,
    build_tree,
    choose,
    compaction,
    joined,
    path_to,
)
from run.tree_paths import read_tree

INF = float("inf")


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


def select_nodes_reference(root, tokens, values, parents, size):
    """Returns: tokens, parents, valid per node. parents: flat index, -1 for the root."""
    best = sorted(range(len(tokens)), key=lambda i: (-values[i], i))[: size - 1]
    chosen = sorted(best)
    assert all(parents[i] < 0 or parents[i] in chosen for i in chosen)
    node = {-1: 0} | {flat: number for number, flat in enumerate(chosen, 1)}
    return (
        [root] + [tokens[i] for i in chosen],
        [0] + [node[parents[i]] for i in chosen],
        [True] + [values[i] > -INF for i in chosen],
    )


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


# ------------------------------------------------------------------------------------ dynamic trees


def random_scores(rng, shape, cut=0.0):
    """Scores with many ties and zeros, best first along the last dimension; a share `cut` of them -inf."""
    values = torch.tensor(
        rng.choices([0.0, -0.25, -0.5, -1.0, -3.0], k=torch.Size(shape).numel())
    ).view(shape)
    gone = torch.tensor([rng.random() < cut for _ in range(values.numel())]).view(shape)
    return values.masked_fill(gone, -INF).sort(dim=-1, descending=True).values


class Table(TreeDrafter):
    """Grows trees whose children are given."""

    def __init__(self, shape, children, run=lambda frontier, out: out, graft=None):
        """children: of (outputs, level), the `Children`; run: of (frontier, outputs), the outputs"""
        target = SimpleNamespace(
            config=SimpleNamespace(vocab_size=99), norm=SimpleNamespace(weight=torch.zeros(1))
        )
        super().__init__(target, shape)
        self.graft = graft
        self.found = children
        self.run = run

    def root_output(self, state, root):
        return torch.zeros(len(root.text.pos), 1, 1), torch.zeros_like(root.text.pos)

    def score_children(self, out, level, root):
        return self.found(out, level)

    def forward_nodes(self, state, frontier, out, positions, window):
        return self.run(frontier, out)


def grown(shape, root, tokens, scores):
    """Grow a tree whose children are given. tokens, scores: per level [B, R, k].

    Returns: the tree; the pool; the frontiers that ran.
    """
    pools, ran = [], []

    def run(frontier, out):
        ran.append(frontier)
        return out

    def add(levels, text, backend):
        pools.append(joined(levels))
        return levels

    def children(out, level):
        return Children(tokens[level], scores[level])

    table = Table(shape, children, run, SimpleNamespace(add=add))
    tree = table.propose((), DraftInputs(None, text_with(root)))
    return tree, pools[0], ran


def pool_size(depth, K):
    return K + (depth - 1) * K * K


def random_levels(rng, batch, depth, K, cut=0.0):
    """Children's tokens and scores, per level."""
    shapes = [(batch, 1 if level == 0 else K, K) for level in range(depth)]
    tokens = [
        torch.tensor([rng.randrange(50) for _ in range(torch.Size(s).numel())]).view(s)
        for s in shapes
    ]
    return tokens, [random_scores(rng, s, cut) for s in shapes]


class PlainPool(NamedTuple):
    """A row's candidates in plain Python, and the frontiers that run."""

    tokens: list[int]
    values: list[float]
    parents: list[int]
    ran: list[list[int]]  # tokens, per level
    seen: list[list[set[int]]]  # scratch slots of each node's ancestors and its own, per level


def plain_pool(tokens, scores, K):
    """Every node of a frontier has K children; the K best of a level are the next frontier."""
    pool = PlainPool([], [], [], [], [])
    frontier, lines = [-1], {-1: set()}
    for level, (names, steps) in enumerate(zip(tokens, scores)):
        begin = len(pool.tokens)
        for parent, row, step in zip(frontier, names, steps):
            above = pool.values[parent] if parent >= 0 else 0.0
            pool.tokens.extend(row)
            pool.values.extend(above + score for score in step)
            pool.parents.extend([parent] * K)
        flat = range(begin, len(pool.tokens))
        frontier = sorted(flat, key=lambda i: (-pool.values[i], i))[:K]
        if level + 1 < len(tokens):
            for place, node in enumerate(frontier):
                lines[node] = lines[pool.parents[node]] | {level * K + place}
            pool.ran.append([pool.tokens[node] for node in frontier])
            pool.seen.append([lines[node] for node in frontier])
    return pool


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("depth, K", [(1, 4), (2, 1), (2, 3), (4, 4)])
def test_pool_and_rerank(depth, K, cut):
    """Candidates, the frontiers that run and what they see, and the best of all as a tree."""
    rng = random.Random(depth)
    tokens, scores = random_levels(rng, 40, depth, K, cut)
    plain = [
        plain_pool(*([x[b].tolist() for x in xs] for xs in (tokens, scores)), K) for b in range(40)
    ]
    roots = torch.arange(40)
    for size in {2, K + 1, pool_size(depth, K) // 2 + 1, pool_size(depth, K) + 1}:
        tree, pool, ran = grown(DynamicTree(depth, K, size), roots, tokens, scores)
        assert pool.tokens.shape[1] == pool_size(depth, K)
        assert [x.tolist() for x in pool] == [[row[i] for row in plain] for i in range(3)]
        for level, frontier in enumerate(ran):
            assert frontier.tokens.tolist() == [row.ran[level] for row in plain]
            seen = [[set(x.nonzero()[:, 0].tolist()) for x in row] for row in frontier.seen]
            assert seen == [row.seen[level] for row in plain]
        for b, row in enumerate(plain):
            want, parents, valid = select_nodes_reference(b, *row[:3], size)
            assert tree.tokens[b].tolist() == want
            assert tree.parents[b].tolist() == parents
            assert tree.valid[b].tolist() == valid
            assert tree.depths[b].tolist() == [len(ancestors(parents, n)) - 1 for n in range(size)]
            inner = [parents[n] for n in range(size) if valid[n]]
            assert all(valid[parent] for parent in inner), "invalid nodes have no valid child"
            every = [want[0], *(token for level in row.ran for token in level)]
            at = tree.ran_index[b].tolist()
            assert at[0] == 0
            assert all(every[place] == want[n] for n, place in enumerate(at) if place)
            assert all(at[parent] for parent in inner if parent), "who has children ran"


# ------------------------------------------------------------------------------------- static trees


def parents_of(tree):
    """Parent's node number per node, as the tree has it that grows."""
    rows = [1, *tree.widths]
    tokens = [
        torch.arange(rows[level] * tree.ranks(level)).view(1, rows[level], -1)
        for level in range(tree.depth)
    ]
    made, *_ = grown(tree, torch.tensor([99]), tokens, [-torch.ones(x.shape) for x in tokens])
    assert made.valid.all() and made.values[0].tolist() == [
        -float(len(path)) for path in order_of(tree)
    ]
    return made.parents[0].tolist()


def test_order_is_by_depth_then_path():
    tree = StaticTree(((1,), (0, 1), (0,), (1, 0), (2,), (0, 1, 3)))
    assert order_of(tree) == [(), (0,), (1,), (2,), (0, 1), (1, 0), (0, 1, 3)]
    assert parents_of(tree) == [0, 0, 0, 0, 1, 2, 4]
    assert (tree.depth, tree.size, tree.width, tree.widths) == (3, 7, 4, [2, 1])
    assert tree.inner == [[()], [(0,), (1,)], [(0, 1)]]
    assert [tree.ranks(d) for d in range(3)] == [3, 2, 4]


@pytest.mark.parametrize("name, tree", [
    ("eagle1_static26_mha", StaticTree(EAGLE1_PATHS)), ("eagle1_static26_mha_temp1", StaticTree(EAGLE1_PATHS)),
    ("eagle1_chain5_mha_alpha", StaticTree.chain(5)),
])  # fmt: skip
def test_official_static_trees(name, tree):
    official = golden_case(name)["static_tree"]
    assert parents_of(tree) == [0, *official["parents"][1:]]
    assert [len(p) for p in order_of(tree)] == official["tree_position_ids"]
    choices = sorted(official["tree_choices"], key=lambda p: (len(p), p))
    assert [list(p) for p in order_of(tree)[1:]] == choices


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
