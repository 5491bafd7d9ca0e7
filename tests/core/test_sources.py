"""Drafters without a model: their trees, pass by pass, against the published rules in plain Python.

That they change no token is tested in test_lossless.py, too.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from drafters import LargestTree, RootOnly
from extras.lookahead_draft import LookaheadDrafter
from extras.recycling_draft import RANKS, RecyclingDrafter, empty_matrix
from generate import load
from helpers import compiled_as_on_cuda, decode, engine_for, golden_target
from options import DEMO
from session import Session
from tree_shapes import StaticTree, recycling_paths

PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
LOOP = [5, 17, 3, 40, 8, 5, 17, 3, 40, 8, 5, 17, 3]
VOCAB = 97


def successors(ids: list[int], k: int) -> list[int]:
    """The target's likeliest tokens after a text, best first."""
    tokens = torch.tensor([ids])
    features = golden_target()(tokens, torch.arange(len(ids))[None])[:, -1:]
    return golden_target().logits(features)[0, 0].topk(k).indices.tolist()


def path_of(line: dict, node: int) -> list[int]:
    """The tokens from the root's child to a node, 0 being the root."""
    if node == 0:
        return []
    return [*path_of(line, line["parents"][node - 1]), line["draft_tokens"][node - 1]]


# ------------------------------------------------------------------------------------ recycling


def recycler(size: int = 12) -> RecyclingDrafter:
    return RecyclingDrafter(StaticTree(recycling_paths(size)), empty_matrix(VOCAB, "cpu"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recycled_trees_are_those_of_the_rule(temperature):
    """The matrix as a dictionary, the tree by a walk from the root for every path."""
    options = {"max_new_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": 3}
    engine = engine_for(golden_target(), recycler(), **options)
    matrix: dict[int, list[int]] = {}
    paths = sorted(recycling_paths(12), key=lambda path: (len(path), path))
    drafted = []
    for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0]):
        session = decode(engine, prompt)
        for line in session.trace:
            text = session.history[0][: line["pos"] + 1]
            walked = {(): text[-1]}
            for node, path in enumerate(paths, 1):
                row = matrix.get(walked.get(path[:-1]))
                token = line["draft_tokens"][node - 1]
                if row is not None:
                    walked[path] = row[path[-1]]
                assert token == walked.get(path, 0)
            new: dict[int, list[int]] = {}
            for node, path in enumerate([(), *paths]):
                if path in walked:
                    new.setdefault(walked[path], successors(text + path_of(line, node), RANKS))
            matrix |= new
            drafted.append(len(walked) - 1)
    assert 0 in drafted and 11 in drafted, "roots that are new, and trees that are full"
    assert sum(session.stats.accept_lengths) > 3


def test_the_published_tree():
    paths = recycling_paths(81)
    assert len(paths) == 80 and [sum(len(p) == d for p in paths) for d in range(1, 7)] == [
        8, 21, 25, 15, 8, 3,
    ]  # fmt: skip
    assert recycling_paths(4) == ((0,), (1,), (0, 0)) and recycling_paths(1) == ()
    for size in (2, 16, 64):
        cut = set(recycling_paths(size))
        assert len(cut) == size - 1 and all(path[:-1] in cut for path in cut if len(path) > 1)


def test_what_a_request_has_taught_serves_the_next():
    engine = engine_for(golden_target(), recycler(), max_new_tokens=20, ignore_eos=True)
    passes = []
    for _ in range(2):
        session = decode(engine, PROMPTS[0])
        passes.append(len(session.stats.accept_lengths))
    assert passes[1] < passes[0]


# ------------------------------------------------------------------------------------ lookahead


def looker() -> LookaheadDrafter:
    return LookaheadDrafter((3, 4, 2))


@pytest.mark.parametrize("sizes", [(3, 4, 2), (4, 2, 3), (1, 3, 1)], ids=str)
def test_windows_and_guesses_are_those_of_the_rule(sizes):
    """Lists of tokens; the pool is a dictionary of the last G n-grams by their first token."""
    W, N, G = sizes
    engine = engine_for(
        golden_target(), LookaheadDrafter(sizes), max_new_tokens=40, ignore_eos=True
    )
    session = decode(engine, LOOP)
    began = session.history[0][: session.trace[0]["pos"] + 1]
    start = [began[i * 7919 % len(began)] for i in range(W * (N - 1))]
    rows = [start[i * W :][:W] for i in range(N - 1)]
    pool: dict[int, list[tuple[int, ...]]] = {}
    guessed = 0
    for number, line in enumerate(session.trace):
        text = session.history[0][: line["pos"] + 1]
        guesses = pool.get(text[-1], [])[::-1]
        guessed += len(guesses)
        drafted = [*line["draft_tokens"]]
        for g, ngram in enumerate(guesses):
            last = (g + 1) * (N - 1)
            assert tuple(path_of(line, last)) == ngram
        window = drafted[G * (N - 1) :]
        assert window == [token for row in rows for token in row][1:]
        new = []
        for i in range(W):
            path = rows[0][1 : i + 1] + [row[i] for row in rows[1:]]
            if path:
                node = G * (N - 1) + i if N == 2 else len(drafted) - W + i + 1
                assert path_of(line, node) == path
            new += successors(text + path, 1)
        rows[0][0] = text[-1]
        for i in range(W if number >= N - 2 else 0):
            first, *others = [row[i] for row in rows] + [new[i]]
            known = pool.setdefault(first, [])
            if tuple(others) in known:
                known.remove(tuple(others))
            known.append(tuple(others))
            del known[:-G]
        rows = [*rows[1:], new]
    assert guessed > 3
    assert sum(session.stats.accept_lengths) > 0


class InTurn(LargestTree):
    """Every preset, one after the other."""

    def __init__(self):
        self.number = 0

    def next(self, limit: int, expected=None) -> int:
        self.number += 1
        return self.number % (limit + 1)


@pytest.mark.parametrize("draft", ["recycling", "lookahead"])
def test_every_size_gives_the_same_tokens(draft):
    """In blocks of bf16 with --compile, a batch of two, mixed presets."""
    options = {"checkpoint": DEMO, "device": "cpu", "max_new_tokens": 24, "ignore_eos": True}
    options |= {"compile": True, "batch_size": 2, "temperature": 0.7, "dtype": "bfloat16"}
    prompts = [[5, 17, 3], [40, 8, 22, 61]]
    runs = []
    for own in ("none", draft):
        engine = replace(load(**options, draft=own), tree_policy=InTurn())
        session = Session(engine, [(0, 0), (1, 0)])
        for _ in session.run(prompts):
            pass
        runs.append(session)
    assert runs[0].history == runs[1].history
    assert len({preset for preset, _ in runs[1].stats.presets}) == len(engine.drafter.presets)


@pytest.mark.slow  # ten to twenty seconds each
@pytest.mark.parametrize("make", [recycler, looker])
@pytest.mark.usefixtures("traced")
def test_traced_steps_give_the_same_tokens(monkeypatch, make):
    """Captured as on CUDA."""
    monkeypatch.setattr("ops.library._cpp_available", [False])
    torch._dynamo.reset()
    options = {"max_new_tokens": 16, "ignore_eos": True, "batch_size": 2, "temperature": 1.0}
    plain = decode(engine_for(golden_target(), RootOnly(), **options), *PROMPTS)
    compiled = compiled_as_on_cuda(engine_for(golden_target(), make(), **options))
    list(Session(compiled).run([[5, 17, 3], [3]]))
    with torch.compiler.set_stance("fail_on_recompile"):
        session = decode(compiled, *PROMPTS)
    assert session.history == plain.history and sum(session.stats.accept_lengths) > 0


FAULTS = [
    ({"draft": "recycling", "tree": "dynamic"}, "takes --tree auto or static; it is dynamic"),
    ({"draft": "recycling", "tree_depth": 3}, "--tree_depth does nothing with --draft recycling"),
    ({"draft": "recycling", "head": DEMO}, "--head does nothing with --draft recycling"),
    (
        {"draft": "recycling", "accept": "residual", "temperature": 1.0},
        "--accept belongs to heads, draft models and --draft ngram",
    ),
    ({"draft": "lookahead", "lookahead": "5,4"}, "is three numbers, W,N,G, as 5,4,5; it is 5,4"),
    ({"draft": "lookahead", "lookahead": "5,-4,5"}, "is three numbers, W,N,G, as 5,4,5; it is"),
    ({"draft": "lookahead", "lookahead": "15,5,15"}, "makes .* = 120 nodes, and a tree has 64"),
    ({"draft": "lookahead", "lookahead": "0,5,1"}, "must be W > 0, N > 1 and G > 0; correct it"),
    ({"draft": "lookahead", "tree_size": 9}, "--tree_size does nothing with --draft lookahead"),
    ({"draft": "recycling", "lookahead": "5,4,5"}, "--lookahead belongs to --draft lookahead"),
]


@pytest.mark.parametrize("options, fault", FAULTS, ids=str)
def test_mistakes_are_one_line(options, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        load(checkpoint=DEMO, device="cpu", **options)
    assert "\n" not in str(caught.value)


def test_a_rank_beyond_the_matrix(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[rank] for rank in range(RANKS + 1)]))
    with pytest.raises(ValueError, match="8 successors of a token, and --tree_file has the rank 8"):
        load(checkpoint=DEMO, device="cpu", draft="recycling", tree_file=str(file))
