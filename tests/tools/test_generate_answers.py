"""Answers of the target: which prompts are used, the mixture, resuming after a kill, and mistakes."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch

from files.tokenizer import Tokenizer
from run.generate import generate
from run.options import DEMO
from run.parsing import one_line_errors
from scripts.train import generate_answers as answer
from scripts.train import train_eagle
from scripts.train.generate_answers import AnswerConfig, Filter, headers
from scripts.train.workers import FEW, Workers

MODULE = '''
class Tree:
    def grow(self, levels):
        """Add levels
to the tree, \f whose text has less indentation.
        """
        return levels

    async def cut(self):
        "Remove everything."

def plain(x):
    return x
'''
TASKS = [[f"Write about {i}.", "Shorter?"] for i in range(6)]
LONG = [
    [f"Summarize: {i} " + "and on " * 200] for i in range(6)
]  # longer than other prompts may be
load = cache(answer.load)
EVAL = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen."


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Few prompts of each kind, for the demo, whose own prompts are made up: it would not write any."""
    monkeypatch.setattr(answer.task_prompts, "modules", lambda: [MODULE])
    (tmp_path / "given.jsonl").write_text(
        "".join(json.dumps({"turns": [f"What is {i}?"]}) + "\n" for i in range(9))
    )
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": ["What is 3?", EVAL]}))
    tokenizer, real = Tokenizer.load(answer.Path(DEMO)), answer.decoded

    def decoded(engine, streams, prompts, longest):
        if streams[0][1] == 0:
            return real(engine, streams, prompts, longest)
        end = list(tokenizer.eos_ids)  # every fifth prompt is cut, every seventh the same
        return [
            tokenizer.encode(f"Own {n % 7 and n}?", bos=False) + (end if n % 5 else [])
            for n, _ in streams
        ]

    monkeypatch.setattr(answer, "decoded", decoded)
    monkeypatch.setattr(answer.task_prompts, "tasks", lambda: TASKS)
    monkeypatch.setattr(answer.task_prompts, "long_texts", lambda most_words: LONG)
    monkeypatch.setattr(answer, "load", load)
    return tmp_path


def config_for(folder, out="out", **changes) -> AnswerConfig:
    return AnswerConfig(
        **{
            "checkpoint": DEMO, "chat": "vicuna", "out": str(folder / out), "prompts": str(folder / "given.jsonl"),
            "eval": str(folder / "eval.jsonl"), "tokens": 150, "answer_tokens": 6, "batch_size": 4, "quant": "none",
            "dtype": "float32", "device": "cpu", "compile": False,
        }
        | changes
    )  # fmt: skip


def rows_of(config, name="answers.jsonl") -> list[dict]:
    return [json.loads(line) for line in (answer.Path(config.out) / name).read_text().splitlines()]


# ------------------------------------------------------------------------------------------ prompts


def test_headers_are_whole_and_dedented():
    found = list(headers([MODULE]))
    assert sorted(found) == [
        'async def cut(self):\n    "Remove everything."',
        'def grow(self, levels):\n    """Add levels\nto the tree, \f whose text has less indentation.\n    """',
    ]


def test_what_an_evaluation_prompt_shares_thirteen_words_with_is_dropped():
    filter = Filter.against([EVAL, "What is a Tree?"])
    words = EVAL.upper().replace(" ", ", ").split()
    assert filter.touches("so: " + " ".join(words[1:]) + " and on")
    assert not filter.touches("so: " + " ".join(words[2:]) + " and on")
    assert filter.touches("what is a tree") and not filter.touches("what is a tree for")
    texts = ("What is a tree", "Short", "short!", "Long", "?!")
    fates = [filter.accepts("own", [text], text != "Long") for text in texts]
    assert fates == [False, True, False, False, False]
    dropped = "1 like an evaluation prompt, 2 too long or empty, 1 twice"
    assert filter.line("own") == f"own: 5 prompts, 1 used; dropped: {dropped}"


# --------------------------------------------------------------------------------------------- runs


def killed(config, monkeypatch, torn: int) -> None:
    """Run, killed behind every third batch that is written. torn: bytes that are missing then from the last line."""
    append, calls = answer.Run._append, Counter()

    def cut(self, name, rows):
        append(self, name, rows)
        calls["all"] += 1
        if calls["all"] % 3 == 0:
            path = self.out / name
            path.write_bytes(path.read_bytes()[: -torn or None])
            calls["kills"] += 1
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(answer.Run, "_append", cut)
        while True:
            with suppress(KeyboardInterrupt):
                answer.answer(config)
                break
    assert calls["kills"] >= 2


def test_a_killed_run_goes_on_where_it_was(sources, monkeypatch, capsys):
    """Where the kill has torn a line, too: it is written again.

    The batches are others then; the answers and the model's own prompts are the same, each once.
    """
    whole, cut, torn = (config_for(sources, name) for name in ("out", "cut", "torn"))
    answer.answer(whole)
    said = capsys.readouterr().out.splitlines()
    killed(cut, monkeypatch, torn=0)
    for name in ("answers.jsonl", "prompts.jsonl"):
        assert rows_of(cut, name) == rows_of(whole, name)
    assert capsys.readouterr().out.splitlines()[-5:] == said[-5:], (
        "the counts include what was there"
    )
    before = rows_of(whole)
    answer.answer(whole)
    assert rows_of(whole) == before, "a finished run adds nothing"
    killed(torn, monkeypatch, torn=9)
    want, got = ({row["turns"][0]: row for row in rows_of(config)} for config in (whole, torn))
    assert len(got) == len(rows_of(torn)) and len(got.keys() & want.keys()) > 12
    assert all(got[text] == want[text] for text in got.keys() & want.keys())
    for one, other in zip(rows_of(torn, "prompts.jsonl"), rows_of(whole, "prompts.jsonl")):
        assert one == other


def test_an_answer_depends_on_its_prompt_alone(sources):
    """Not on the batch around it; greedy ones are generate's; another seed changes the others."""
    config = config_for(sources, tokens=60)
    run = answer.answer(config)
    answer.answer(replace(config, out=str(sources / "one"), batch_size=1))
    answer.answer(replace(config, out=str(sources / "seed"), seed=1))
    first, one, seed = (
        {r["turns"][0]: r for r in rows_of(replace(config, out=str(sources / n)))}
        for n in ("out", "one", "seed")
    )
    shared = first.keys() & one.keys()
    assert len(shared) >= 6 and all(first[text] == one[text] for text in shared)
    greedy = [text for text in first if first[text]["temperature"] == 0]
    assert 0 < len(greedy) < len(first)
    tokens = generate(run.engines[True], [[text] for text in greedy], max_new_tokens=6).tokens
    assert tokens == [first[text]["answer_ids"] for text in greedy]
    assert any(first[t] != seed[t] for t in first.keys() & seed.keys() if t not in greedy)
    assert all(first[t] == seed[t] for t in greedy if t in seed)


def test_an_end_that_is_said_once_more_is_a_loop():
    places = torch.arange(200)
    periods = torch.tensor([1, 3, 64, 65, 199])
    tokens = places % periods[:, None]  # [5, 200]
    broken = tokens[1:2].clone()
    broken[0, 150] = 9
    tokens = torch.cat((tokens, broken))
    found = answer.is_looping(tokens, torch.full((6,), 180))
    assert found.tolist() == [True, True, True, False, False, False]
    # what lies behind the last token does not count, nor does a loop of less than 64 tokens
    assert answer.is_looping(tokens[5:], torch.tensor([149])).item()
    assert not answer.is_looping(tokens[5:], torch.tensor([199])).item()


def test_conversations_go_on_while_answers_are_good(sources, monkeypatch, capsys):
    """A turn is answered after the model's own answers, if these ended; one that loops is left out."""
    rows = [{"turns": [f"Tell {i}.", "More?", "Why?"]} for i in range(4)]
    rows.append({"turns": ["Tell 9.", EVAL]})
    (sources / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_for(sources, tokens=1e6)
    answer.Path(config.out).mkdir()
    engine = answer.Run(config, {}, Filter(set())).engines[False]
    asked = {"Tell 1.": "cut", "Tell 2.": "loop", "Tell 3.": "long"}
    asked = {
        tuple(engine.template.encode(engine.tokenizer, [text], [])): kind
        for text, kind in asked.items()
    }
    tokenizer = engine.tokenizer
    end = list(tokenizer.eos_ids)
    word = tokenizer.encode("yes", bos=False)

    def decoded(engine, streams, prompts, longest):
        kinds = [asked.get(tuple(ids), "good") for ids in prompts]
        seen.extend(prompts)
        answers = {"good": word + end, "cut": word, "loop": word * 60 + end}
        answers["long"] = word * 400 + end
        return [answers[kind] for kind in kinds]

    seen: list[list[int]] = []
    monkeypatch.setattr(answer, "decoded", decoded)
    monkeypatch.setattr(answer, "repeated", lambda ids: float(50 < len(ids) < 100))
    run = answer.Run(config, {"given": [row["turns"] for row in rows]}, Filter.against([EVAL]))
    run.writes = False
    while run.step():
        pass
    found = {row["turns"][0]: row for row in rows_of(config)}
    turns = {first: len(row["turns"]) for first, row in found.items()}
    assert turns == {"Tell 0.": 3, "Tell 1.": 1, "Tell 2.": 1, "Tell 3.": 1}, (
        "the eval prompt is dropped"
    )
    assert [found[f"Tell {i}."]["ended"] for i in range(4)] == [True, False, True, True]
    assert found["Tell 2."]["answers"] == [] and found["Tell 0."]["answers"] == ["yes"] * 3
    assert found["Tell 0."]["answer_ids"] == (word + end) * 3
    last = engine.template.encode(tokenizer, rows[0]["turns"], ["yes", "yes"])
    assert seen.count(last) == 1
    assert "answers: 4 prompts, 3 used; dropped: 1 looping" in run.lines()
    dialogues = train_eagle.read_dialogues(answer.Path(config.out) / "answers.jsonl")
    _, marks = train_eagle.marked_tokens(
        next(d for d in dialogues if d.turns[0] == "Tell 0."), tokenizer, engine.template
    )
    assert sum(marks) >= 3 * len(word), "all three answers are trained on"
    again = answer.Run(config, {"given": [row["turns"] for row in rows]}, Filter.against([EVAL]))
    assert again.lines() == run.lines() and again.total() == run.total()


def test_every_part_is_a_mixture_and_training_reads_it(sources, capsys):
    config = config_for(sources)
    run = answer.answer(config)
    out = capsys.readouterr().out
    assert "given: 9 prompts, 8 used; dropped: 1 like an evaluation prompt" in out
    assert "code: 2 prompts, 2 used; dropped: none" in out
    rows = rows_of(config)
    assert len({row["turns"][0] for row in rows}) == len(rows) and "What is 3?" not in str(rows)
    assert {row["source"] for row in rows[:22]} == set(answer.SOURCES)
    assert {row["temperature"] for row in rows[:12]} == {0.0, 1.0}
    own = rows_of(config, "prompts.jsonl")
    assert run.filter.counts["own", "too long or empty"] == sum(not row["ended"] for row in own) > 0
    assert run.filter.counts["own", "twice"] > 0
    used = [row for row in rows if row["answers"]]
    dialogues = train_eagle.read_dialogues(answer.Path(config.out) / "answers.jsonl")
    assert [d.ended for d in dialogues] == [row["ended"] for row in used] and not all(
        row["ended"] for row in used
    )
    engine = run.engines[False]
    for d, row in zip(dialogues, used):
        ids, mask = train_eagle.marked_tokens(d, engine.tokenizer, engine.template)
        assert [i for i, m in zip(ids, mask) if m] == row["answer_ids"]
        assert [i for i, m in zip(ids, mask) if not m] == engine.template.encode(
            engine.tokenizer, row["turns"], []
        )
    with pytest.raises(ValueError, match="answer_ids are not the tokens of the answer"):
        train_eagle.marked_tokens(
            d._replace(answer_ids=[7, 8, 9]), engine.tokenizer, engine.template
        )
    assert sum(len(row["answer_ids"]) for row in used) == run.total()


def test_samples_are_answers_to_the_same_prompts(sources):
    """One is greedy, the others differ from each other; a run that goes on adds the missing ones."""
    config = config_for(sources, samples=2, tokens=1e6)
    many = [[f"Name {i} towns?"] for i in range(6)]

    def answered(steps):
        run = answer.Run(config, {"given": many}, Filter(set()))
        run.writes = False
        while steps and run.step():
            steps -= 1
        return run

    answer.Path(config.out).mkdir()
    answered(2)
    run = answered(99)
    rows = rows_of(config)
    kinds = Counter((row["turns"][0], row["temperature"], row["sample"]) for row in rows)
    wanted = {(text, t, i) for [text] in many for t, i in ((0.0, 0), (1.0, 0), (1.0, 1))}
    assert set(kinds) == wanted and set(kinds.values()) == {1}
    hot = {(row["turns"][0], tuple(row["answer_ids"])) for row in rows if row["temperature"]}
    assert len(hot) > len(many), "samples differ"
    assert run.lines().startswith("given: 6 prompts, 6 used")


def test_workers_give_what_the_function_gives():
    """In order, in this process for few items, in others for many."""
    offset = 3
    workers = Workers(lambda x: (x + offset, os.getpid()))
    few, many = ([*workers.map(range(count))] for count in (9, 2 * FEW))
    assert [y for y, _ in few] == [*range(3, 12)] and {pid for _, pid in few} == {os.getpid()}
    assert [y for y, _ in many] == [*range(3, 2 * FEW + 3)]
    assert os.getpid() not in {pid for _, pid in many}


def run_of_long_answers(sources, monkeypatch, tokens, given=0.0):
    """A run with enough prompts of every source, whose answers have 200 tokens, to its end."""
    import scripts.train_head as train_head

    size = train_head.HeadConfig(checkpoint=DEMO).answers(tokens).batch_size
    options = {"tokens": tokens, "batch_size": size, "given": given, "answer_tokens": 400}
    config = config_for(sources, **options)
    many = {source: [[f"{source} {i}?"] for i in range(tokens // 40)] for source in answer.SOURCES}
    word = Tokenizer.load(answer.Path(DEMO)).encode("yes", bos=False)
    monkeypatch.setattr(answer, "decoded", lambda engine, streams, prompts, longest: [
        (word * 200)[:200] for _ in prompts
    ])  # fmt: skip
    monkeypatch.setattr(answer, "repeated", lambda ids: 0.0)
    answer.Path(config.out).mkdir()
    own = many.pop("own")
    run = answer.Run(config, many, Filter(set()))
    run._add("own", [(turns, True) for turns in own], size)
    run.writes = False
    while run.total() < tokens and run.step():
        pass
    by_source = {
        source: run.tokens[source, True] + run.tokens[source, False] for source in answer.SOURCES
    }
    return run, by_source


@pytest.mark.parametrize("given", [0.7, 1.0])
def test_given_prompts_take_the_share_that_is_asked_for(sources, monkeypatch, given):
    run, by_source = run_of_long_answers(sources, monkeypatch, 80_000, given)
    assert abs(by_source["given"] / run.total() - given) < 0.1
    assert (run.total() > by_source["given"]) == (given < 1)


def test_bundled_prompts_are_of_many_kinds_and_lengths():
    """Without an evaluation prompt among them; long ones go up to the length that fits."""
    tasks = [*answer.task_prompts.tasks()]
    firsts = [turns[0] for turns in tasks]
    kinds = len(answer.task_prompts.TEMPLATES)
    assert len(set(firsts)) == len(firsts) > 20 * 20
    starts = {first.split()[0] + first.split()[1] for first in firsts[:kinds]}
    assert len(starts) > 12, "the first ones are of different kinds"
    assert 0.2 < sum(len(turns) == 2 for turns in tasks) / len(tasks) < 0.6
    assert not any("{" in text for turns in tasks for text in turns)
    long = [turns[0] for turns in answer.task_prompts.long_texts(1000)]
    sizes = [len(text.split()) for text in long]
    assert len(set(long)) == len(long) > 100
    assert min(sizes[:8]) < 250 and max(sizes[:8]) > 980 and max(sizes) < 1030
    filter = Filter.against(answer.eval_texts(AnswerConfig.eval))
    used = [filter.accepts("tasks", turns, True) for turns in [*tasks, *([t] for t in long)]]
    assert sum(used) / len(used) > 0.98


# ----------------------------------------------------------------------------------------- mistakes


def written(name, text):
    def make(folder):
        (folder / name).write_text(text)
        return {}

    return make


MISTAKES = {
    "no prompts": (lambda folder: {"prompts": "none.jsonl"}, "--prompts: cannot read none.jsonl"),
    "a prompt without turns": (
        written("given.jsonl", '{"turns": ["a"]}\n{"q": 1}\n'),
        "given.jsonl line 2: it must be",
    ),
    "an empty turn": (written("given.jsonl", '{"turns": [" "]}'), "line 1: it must be like"),
    "not JSON": (written("given.jsonl", "{"), "line 1 is not valid JSON"),
    "no evaluation prompts": (written("eval.jsonl", ""), "--eval: "),
    "an evaluation row without turns": (
        written("eval.jsonl", '{"turns": []}'),
        "eval.jsonl line 1: it must be like",
    ),
    "an empty directory": (lambda folder: {"eval": str(folder / "out")}, "--eval: "),
    "no prompt to use": (
        written("given.jsonl", '{"turns": ["What is 3?"]}'),
        "can be used (given: 1 prompts, 0 used; dropped: 1 like an evaluation prompt; at most 300",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name, sources, monkeypatch, capsys):
    """Faults of files are found before the model is loaded."""
    make, expected = MISTAKES[name]
    if name != "no prompt to use":  # which needs the tokenizer
        monkeypatch.setattr(answer, "load", None)
    config = replace(config_for(sources), **make(sources))
    with pytest.raises(SystemExit) as stop, one_line_errors("train_head.py"):
        answer.answer(config)
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith("note: ")]  # of `load`
    assert stop.value.code == 2 and len(lines) == 1 and expected in lines[0], lines
