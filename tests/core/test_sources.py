"""Drafters without a model: their trees, pass by pass, against the published rules in plain Python.

That they change no token is tested in test_lossless.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from draft_tree import StaticTree
from drafters import DecodedTokens, DraftInputs, RootOnly
from drafts.lookahead_draft import LookaheadDrafter
from drafts.recycling_draft import RANKS, RecyclingDrafter, empty_matrix, recycling_paths
from drafts.rest_draft import Datastore, RestDrafter
from helpers import (
    LOOP,
    PROMPTS,
    compiled_as_on_cuda,
    decode,
    drafted_paths,
    engine_for,
    golden_run,
    golden_target,
    token_paths,
)
from run import generate
from run.load import load
from run.options import DEMO
from scripts import build_datastore
from scripts.build_datastore import BuildConfig

VOCAB = 97


def successors(ids: list[int], k: int) -> list[int]:
    """The target's likeliest tokens after a text, best first."""
    tokens = torch.tensor([ids])
    features = golden_target()(tokens, torch.arange(len(ids))[None])[:, -1:]
    return golden_target().logits(features)[0, 0].topk(k).indices.tolist()


# ------------------------------------------------------------------------------------ recycling


def recycler(size: int = 12) -> RecyclingDrafter:
    return RecyclingDrafter(StaticTree(recycling_paths(size)), empty_matrix(VOCAB, "cpu"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recycled_trees_are_those_of_the_rule(temperature):
    """The matrix as a dictionary, the tree by a walk from the root for every path."""
    options = {"max_new_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": 3}
    drafter = recycler()
    matrix: dict[int, list[int]] = {}
    paths = sorted(recycling_paths(12), key=lambda path: (len(path), path))
    drafted = []
    for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0]):
        session = golden_run(drafter, prompt, **options)
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
            drafts = [(), *drafted_paths(line)]
            for path, draft in zip([(), *paths], drafts):
                if path in walked:
                    new.setdefault(walked[path], successors([*text, *draft], RANKS))
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


# ------------------------------------------------------------------------------------ lookahead


def looker() -> LookaheadDrafter:
    return LookaheadDrafter((3, 4, 2))


@pytest.mark.parametrize("sizes", [(3, 4, 2), (4, 2, 3), (1, 3, 1)], ids=str)
def test_windows_and_guesses_are_those_of_the_rule(sizes):
    """Lists of tokens; the pool is a dictionary of the last G n-grams by their first token."""
    W, N, G = sizes
    session = golden_run(LookaheadDrafter(sizes), LOOP, max_new_tokens=40)
    began = session.history[0][: session.trace[0]["pos"] + 1]
    start = [began[i * 7919 % len(began)] for i in range(W * (N - 1))]
    rows = [start[i * W :][:W] for i in range(N - 1)]
    pool: dict[int, list[tuple[int, ...]]] = {}
    guessed = 0
    for number, line in enumerate(session.trace):
        text = session.history[0][: line["pos"] + 1]
        guesses = pool.get(text[-1], [])[::-1]
        guessed += len(guesses)
        drafted = line["draft_tokens"]
        drafts = [(), *drafted_paths(line)]
        assert drafts[N - 1 :: N - 1][: len(guesses)] == guesses
        window = drafted[G * (N - 1) :]
        assert window == [token for row in rows for token in row][1:]
        new = []
        for i in range(W):
            path = rows[0][1 : i + 1] + [row[i] for row in rows[1:]]
            if path:
                node = G * (N - 1) + i if N == 2 else len(drafted) - W + i + 1
                assert [*drafts[node]] == path
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


# ------------------------------------------------------------------------------------------ REST


def store_of(file: Path, texts: list[list[int]], size: int = VOCAB) -> Datastore:
    tokens = np.array([token for text in texts for token in [*text, -1]], np.int32)
    Datastore.write(file, tokens, "v")
    return Datastore(file, "v", size)


def retrieved(texts: list[list[int]], last: list[int], count: int) -> list[tuple[int, ...]]:
    """The most frequent prefixes behind the longest match, found the plain way."""
    for length in range(min(16, len(last)), 0, -1):
        found = [
            text[i + 1 : i + 11]
            for text in texts
            for i in range(length - 1, len(text))
            if text[i + 1 - length : i + 1] == last[-length:]
        ]
        if found:
            counts = Counter(tuple(x[: n + 1]) for x in found for n in range(len(x)))
            order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
            return order[:count]
    return []


def test_retrieved_trees_are_those_of_the_rule(tmp_path):
    generator = np.random.default_rng(0)
    sizes = set()
    for vocab in (2, 3, 9, 40):
        texts = [generator.integers(vocab, size=n).tolist() for n in (1, 30, 90, 60)]
        store = store_of(tmp_path / f"{vocab}", texts)
        for size in (2, 9, 64):
            drafter = RestDrafter(store, size)
            first = generator.integers(vocab, size=3).tolist()
            rows = [first, texts[2][10:40], [vocab + 1], texts[3][-5:]]
            tokens = torch.tensor([(row * 40)[:40] for row in rows])
            text = DecodedTokens(tokens, torch.tensor([len(row) - 1 for row in rows]))
            tree = drafter.propose((), DraftInputs(None, text))
            for b, row in enumerate(rows):
                paths = token_paths(tree.tokens[b].tolist(), tree.parents[b].tolist())
                got = [path for path, valid in zip(paths, tree.valid[b, 1:]) if valid]
                want = retrieved(texts, row, size - 1)
                order = sorted(want, key=lambda path: (len(path), path))
                assert got == order, (vocab, size, row)
                sizes.add(len(got))
    assert {0, 1, 8, 63} <= sizes, "nothing found, and trees that are full"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A datastore of the demo's tokenizer, built by the command from a folder with other files."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "below").mkdir()
    code = Path(generate.__file__).read_text()[:9000]
    (folder / "below" / "a.py").write_text(code)
    (folder / "b.txt").write_text("def read_lines(path):\n    return 1\n")
    (folder / "c.bin").write_bytes(bytes(range(256)))
    (folder / "empty").write_text(" ")
    out = folder.with_name("demo.store")
    assert build_datastore.build(BuildConfig(str(folder), str(out), DEMO)) > 1000
    return out


def test_a_datastore_that_is_built(built, capsys):
    text = json.dumps(load(**REST, datastore=str(built)).drafter.resolved_options())
    assert json.loads(text) == {"tree_size": 16, "tree_depth": 10}
    fixed = load(**REST, datastore=str(built), tree="dynamic").drafter
    assert (fixed.size, fixed.smaller) == (64, ())


REST = {"checkpoint": DEMO, "device": "cpu", "draft": "rest"}


# ------------------------------------------------------------------------------------- all of them


def test_a_rank_beyond_the_matrix(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[rank] for rank in range(RANKS + 1)]))
    says = "8 successors of a token, and the file of --tree has the rank 8"
    with pytest.raises(ValueError, match=says):
        load(checkpoint=DEMO, device="cpu", draft="recycling", tree_file=str(file))


@pytest.mark.slow  # ten to twenty seconds each
@pytest.mark.parametrize("make", [recycler, looker])
@pytest.mark.usefixtures("traced")
def test_traced_steps_give_the_same_tokens(make):
    """Captured as on CUDA."""
    torch._dynamo.reset()
    options = {"max_new_tokens": 40, "ignore_eos": True, "batch_size": 2}
    plain = golden_run(RootOnly(), LOOP, PROMPTS[1], **options)
    compiled = compiled_as_on_cuda(engine_for(golden_target(), make(), **options))
    decode(compiled, [5, 17, 3], [3])
    with torch.compiler.set_stance("fail_on_recompile"):
        session = decode(compiled, LOOP, PROMPTS[1])
    assert session.history == plain.history and sum(session.stats.accept_lengths) > 0
