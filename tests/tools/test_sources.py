"""Sources of drafted tokens: counts that were made by hand, and those of the real lookup."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drafters import LargestTree
from generate import Batch, load
from options import DEMO
from scripts.bench import count_sources, record_answers
from scripts.bench.count_sources import Noise, Past, Rules, best_size, node_rows, replay, table
from scripts.bench.record_answers import GRAM, WINDOW, Reader, Record, sort_suffixes, window_mask
from scripts.bench.sources import (
    Candidate,
    Lookahead,
    Lookup,
    Recycling,
    Rest,
    Source,
    Store,
    Suffix,
    Tree,
    Union,
)


def text(prompt: list[int], answer: list[int], grams: list | None = None) -> Record:
    """A record in which the likeliest successor of every token is the next one."""
    tokens = np.array(prompt + answer)
    top = np.append(tokens[1:], 0)[:, None]
    grams = np.zeros((len(tokens), 0, 4), int) if grams is None else np.array(grams)
    return Record("a", 0.0, 0, len(prompt), tokens, top, top * 0.0, 100, grams)


LOOP = text([1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4, 9])
ONCE = text([7], [1, 2, 3, 4, 9])
OTHER = text([5], [1, 2, 3, 4, 9])


def passes(record: Record, source: Source, nodes: int, **options) -> int:
    counted = replay(record, Union([source]), nodes, Rules(**options))
    assert counted.tokens == len(record.tokens) - record.start - 1
    return counted.passes


@pytest.mark.parametrize("source", [Lookup(), Suffix()])
def test_a_loop_is_copied_as_far_as_the_tree_reaches(source):
    # the answer's first token is given; 8 follow, 2 a pass with one drafted token, 4 with three
    assert passes(LOOP, source, 2) == 4
    assert passes(LOOP, source, 4) == 2
    assert passes(LOOP, source, 8) == 1


def test_recycling_knows_the_tokens_that_were_read():
    # 4 -> 1 is known from the prompt's end. Nothing follows 1, 2 and 3 yet: a pass each. Behind the
    # second 4: 1, 2, 3 and the bonus 4; then 1 is wrong, and the bonus is 9
    assert passes(LOOP, Recycling(), 4) == 5
    # 2, 3, 4 and the bonus 1; 2, 3, 4 and the bonus 9
    assert passes(LOOP, Recycling(), 4, reads_prompt=True) == 2


def test_kept_texts_answer_the_first_time():
    past = Past.of([OTHER])
    assert passes(ONCE, Suffix(), 4) == 4  # nothing repeats
    assert passes(ONCE, Store(past.texts), 4) == 1  # 2, 3, 4 and the bonus 9
    assert passes(ONCE, Store(past.texts), 3) == 2  # 2, 3, bonus 4; bonus 9 as 9 ends the text
    assert passes(ONCE, Recycling(past.rows), 4) == 1


def test_rest_needs_two_equal_tokens():
    corpus = np.array([1, 2, 3, 4, 9, -1], np.int32)
    order = sort_suffixes(corpus)
    assert order.tolist() == [5, 0, 1, 2, 3, 4]
    # 7, 1 is not in the corpus: a pass for 2; behind 1, 2 come 3, 4 and 9
    assert passes(ONCE, Rest(corpus, order), 4) == 2


def test_suffixes_are_sorted_beyond_their_first_token():
    corpus = np.array([2, 1, 2, 1, 1, 2, 0, 2, 1], np.int32)
    assert sort_suffixes(corpus).tolist() == sorted(range(9), key=lambda i: corpus[i:].tolist())


def test_lookahead_drafts_the_window_of_the_passes_that_ran():
    none = [[0, 0, 0, 0]]
    grams = [none, [[2, 3, 4, 9]], none, none, none, none]
    # the first pass leaves 2, 3, 4, 9 behind the root 1, and decides 2; 3, 4 and 9 follow
    assert passes(text([7], [1, 2, 3, 4, 9], grams), Lookahead(), 4) == 2
    late = [none, none, [[2, 3, 4, 9]], none, none, none]
    assert passes(text([7], [1, 2, 3, 4, 9], late), Lookahead(), 4) == 4


class Fixed(Source):
    """Always the same token."""

    def __init__(self, token: int, prior: float):
        self.made = [Candidate(token, (token,), prior, ())]

    def start(self, context):
        return ()

    def candidates(self, state):
        return self.made


def test_the_size_of_a_tree_is_picked_by_its_cost():
    # a chain that is never wrong: 4 nodes give 4 tokens for 1.5, and 2 nodes 2 for 1.2
    costs = {1: 1.0, 2: 1.2, 4: 1.5}
    assert best_size(np.array([1.0, 1.0, 1.0, 1.0]), costs, 1.0) == 4
    # .1 more token is not worth .2 passes of a token each, and is worth them at .4 a pass
    assert best_size(np.array([1.0, 0.1, 0.0, 0.0]), costs, 1.0) == 1
    assert best_size(np.array([1.0, 0.1, 0.0, 0.0]), costs, 0.4) == 2
    counted = replay(LOOP, Union([Fixed(50, 0.001)]), 4, Rules(costs=costs))
    assert counted == (8, 8, 8.0)


def test_a_union_shares_equal_prefixes():
    union = Union([Fixed(3, 0.5), Fixed(3, 0.4), Fixed(6, 0.45)])
    tree = union.propose([1], 5)
    assert tree.tokens[:3] == [1, 3, 6]
    assert len(tree.children[0]) == 2
    assert tree.values[1:3] == pytest.approx([0.5, 0.45])


def test_a_union_learns_the_better_source():
    union = Union([Fixed(3, 0.5), Fixed(6, 0.45)])
    assert union.propose([1], 2).tokens == [1, 3]
    for _ in range(3):
        tree = union.propose([1], 2)
        union.accept(tree, [6])
    # 3: 1.5 of 6 outcomes, the prior's three included; 6: 1.35 + 3 of 6, nearly: outcomes fade
    assert union.propose([1], 2).tokens == [1, 6]
    assert union.rate(tree.offers[0][6], None) == pytest.approx(4.35 / 6, abs=0.01)


def test_noise_tells_which_candidate_wins():
    generator = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.2])
    gumbel = generator.gumbel(size=(40000, 3))
    wins = (np.log(p) + gumbel).argmax(1) == 1
    union = Union([])
    offered = [Candidate(1, ("a",), 0.3, None)]
    estimate = np.array([union.rate(offered, g) for g in gumbel[:, 1]])
    for low, high in ((-2, 0), (0, 1), (1, 2), (2, 9)):
        some = (gumbel[:, 1] > low) & (gumbel[:, 1] <= high)
        assert wins[some].mean() == pytest.approx(estimate[some].mean(), abs=0.02)


@pytest.fixture(scope="module")
def engine():
    options = {"checkpoint": DEMO, "draft": "ngram", "device": "cpu", "dtype": "float32"}
    options |= {"ngram_max": 3}
    loaded = load(**options, max_new_tokens=48, ignore_eos=True)
    return replace(loaded, tree_policy=LargestTree())  # the tree always, whatever its speed


def test_lookup_counts_as_the_decoder_does(engine):
    """The largest tree of --draft ngram: 16 nodes, of up to four continuations of ten tokens."""
    batch = Batch(engine, ["def read_lines(path):\n    with open(path) as file:\n"])
    batch.run(batch.streams)
    turn = batch.entries[0]
    counted = replay(text(turn.prompt, turn.new), Union([Lookup(branches=4)]), 16)
    assert counted[:2] == (batch.stats.tokens, len(batch.stats.accept_lengths))
    assert counted.passes < counted.tokens


def test_a_reader_reads_nodes_as_if_they_were_the_text(engine):
    ids = engine.tokenizer.encode("def read_lines(path):\n    with")
    whole, _ = Reader(engine, 64).read_text([*ids, 40, 50])
    reader = Reader(engine, 64)
    reader.read_text(ids[:-2])
    # below the root: 40, 41; below 40: 50
    tree = Tree([ids[-1], 40, 41, 50], [{40: 1, 41: 2}, {50: 3}, {}, {}], [], [])
    rows = node_rows(reader, ids, tree)
    assert [row.token for row in rows] == [40, 41, 50]
    assert rows[0].successors == whole[-2].tolist()
    assert rows[2].successors == whole[-1].tolist()
    again = reader.read([*ids, 40], [50], [1], np.ones((1, 1), bool))[0]
    assert again.tolist() == whole[-2:].tolist()  # the nodes were not kept


def test_a_window_sees_its_columns_past():
    seen = window_mask()
    assert seen.shape == (WINDOW * (GRAM - 1) - 1,) * 2
    third = 2 * WINDOW + 3 - 1  # level 2, column 3; the root is no node
    expected = [0, 1, 2, WINDOW + 3 - 1, third]  # columns 1 to 3 of level 0, then its own column
    assert np.flatnonzero(seen[third]).tolist() == expected


def test_records_and_counts_from_the_command_line(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "records"
    folder.mkdir()
    common = ["--records", str(folder), "--limit", "2"]
    recorded = ["--checkpoint", str(DEMO), "--tasks", "copy", "--max_new_tokens", "8"]
    for extra in ([], ["--windows"]):
        monkeypatch.setattr("sys.argv", ["record_answers.py", *common, *recorded, *extra])
        record_answers.main()
    made = Record.load(folder / "copy-T0-0.npz")
    assert made.grams.shape == (len(made.tokens), WINDOW, GRAM)
    greedy = made.top[made.start - 1 : -1, 0]
    assert greedy.tolist() == made.tokens[made.start :].tolist()
    counts = str(tmp_path / "counts.jsonl")
    monkeypatch.setattr(
        "sys.argv", ["count_sources.py", *common, "--nodes", "4,8", "--json", counts]
    )
    count_sources.main()
    assert "| union, kept |" in capsys.readouterr().out


def test_the_noise_is_that_of_the_recorded_draws(tmp_path, monkeypatch):
    flags = ["--checkpoint", str(DEMO), "--tasks", "copy", "--limit", "1", "--temperature", "1"]
    argv = ["record_answers.py", "--records", str(tmp_path), *flags, "--max_new_tokens", "24"]
    monkeypatch.setattr("sys.argv", argv)
    record_answers.main()
    made = Record.load(tmp_path / "copy-T1-0.npz")
    noise = Noise(made)
    checked = 0
    for place in range(made.start, len(made.tokens) - 1):
        noise.next = place + 1 - made.start
        scores = [noise.of(0, int(t)) + p for t, p in zip(made.top[place], made.logp[place])]
        chosen = made.tokens[place + 1]
        if chosen in made.top[place]:
            assert made.top[place][np.argmax(scores)] == chosen
            checked += 1
    assert checked > 5  # of 23


def test_a_table_sums_over_answers():
    row = {"method": "m", "nodes": 4, "task": "gsm8k", "number": 0, "tokens": 6, "passes": 2}
    rows = [row | {"cost": 2.0}, row | {"number": 1, "passes": 4, "cost": 4.0}]
    assert list(table(rows))[-1] == "| m | 2.00 | 2.00 |"
    rows[1]["cost"] = 6.0  # dearer passes
    lines = list(table(rows))
    assert lines[0].startswith("| speedup, 4 nodes |")
    assert lines[-1] == "| m | 1.50 | 1.50 |"


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ([], "run record_answers.py"),
        (["--nodes", "4,x"], "as 4,8"),
        (["--costs", "4"], "as 1:1"),
        (["--methods", "oracle"], "use of lookup; suffix"),
    ],
)
def test_mistakes_get_one_line(flags, remedy, tmp_path, monkeypatch, capsys):
    if flags:
        np.savez(tmp_path / "a-T0-0.npz", **LOOP._asdict())
    monkeypatch.setattr("sys.argv", ["count_sources.py", "--records", str(tmp_path), *flags])
    with pytest.raises(SystemExit) as ended:
        count_sources.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert remedy in error
    assert "\n" not in error
