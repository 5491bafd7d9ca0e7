"""Answers of the target: which prompts are used, the mixture, resuming after a kill, and mistakes."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from files.tokenizer import Tokenizer
from run.library import generate
from run.options import DEMO
from run.scheduler import Piece
from scripts.train import answer_servers, data, prompts
from scripts.train import generate_answers as answer
from scripts.train.generate_answers import Filter
from scripts.train.train_options import HeadConfig

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
EVAL = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen."
PROMPTS = {
    "given": [[f"What is {i}?"] for i in range(9)],
    "tasks": [[f"Write about {i}.", "Shorter?"] for i in range(6)],
    "long": [[f"Summarize: {i} " + "and on " * 100] for i in range(6)],
}


@cache
def load(options):
    return REAL_LOAD(replace(options, dtype="float32", compile=False))


REAL_LOAD = answer.load
TOKENIZER = Tokenizer.load(answer.Path(DEMO))
END = list(TOKENIZER.eos_ids)


def words(text: str) -> list[int]:
    return TOKENIZER.encode(text, bos=False)


class MadeUp:
    """A scheduler that makes up the answers: of a prompt's text, by `texts`, or twenty words."""

    texts: dict[str, list[int]] = {}

    def __init__(self, engine):
        self.engine = engine
        self.requests = []

    def submit(self, request):
        self.requests.append(request)

    def close(self):
        """Nothing is kept."""

    def step(self) -> list[Piece]:
        requests, self.requests = self.requests, []
        for request in requests:
            text = TOKENIZER.decode(request.prompt)
            found = next((ids for key, ids in self.texts.items() if key in text), None)
            number, is_own = request.noise_id
            if is_own:  # every fifth prompt is cut, every seventh the same
                found = words(f"Own {number % 7 and number}?") + (END if number % 5 else [])
            request.tokens += (
                words(" ".join(f"a{i}" for i in range(20))) if found is None else found
            )
            request.reason = "stop"
        return [Piece(request, request.tokens, [], "") for request in requests]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Few prompts of each kind, and none of the model's own: the demo would not write any."""
    for source in ("given", "tasks"):
        rows = "".join(json.dumps({"turns": turns}) + "\n" for turns in PROMPTS[source])
        (tmp_path / f"{source}.jsonl").write_text(rows)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.jsonl").write_text(json.dumps({"turns": ["What is 3?", EVAL]}))
    (tmp_path / "out" / "answers").mkdir(parents=True)
    monkeypatch.setattr(prompts, "modules", lambda: [MODULE])
    monkeypatch.setattr(prompts, "TASK_FILE", tmp_path / "tasks.jsonl")
    monkeypatch.setattr(prompts, "long_texts", lambda most_words: PROMPTS["long"])
    monkeypatch.setattr(answer, "load", load)
    monkeypatch.setattr(answer, "SHARES", answer.SHARES | {"own": 0.0})
    monkeypatch.setattr(answer, "EVAL", tmp_path / "eval")
    monkeypatch.setattr(answer, "ANSWER_TOKENS", 6)
    monkeypatch.setattr(answer, "QUANT", "none")
    return tmp_path


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(answer, "Scheduler", MadeUp)
    monkeypatch.setattr(answer, "SHARES", answer.SHARES | {"own": 1.0})
    monkeypatch.setattr(MadeUp, "texts", {})
    monkeypatch.setattr(answer, "repeated", lambda ids: float(50 < len(ids) < 100))


def config_for(folder, out="out", **changes) -> HeadConfig:
    own = {"checkpoint": DEMO, "chat": "vicuna", "out": str(folder / out), "device": "cpu"}
    return HeadConfig(**own | {"prompts": str(folder / "given.jsonl"), "answers": 4} | changes)


def rows_of(config) -> list[dict]:
    text = (answer.Path(config.out) / "answers" / "answers.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def never(tokens: int) -> bool:
    return False


# ------------------------------------------------------------------------------------------ prompts


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


def test_bundled_prompts_are_of_many_kinds_and_lengths():
    """Without an evaluation prompt among them; long ones go up to the length that fits."""
    tasks = prompts.read_turns(prompts.TASK_FILE, "data")
    firsts = [turns[0] for turns in tasks]
    assert len(set(firsts)) == len(firsts) > 20 * 20
    assert len({first[:12] for first in firsts[:20]}) > 12, "the first ones are of different kinds"
    assert 0.2 < sum(len(turns) == 2 for turns in tasks) / len(tasks) < 0.6
    long = [turns[0] for turns in prompts.long_texts(300)]
    sizes = [len(text.split()) for text in long]
    assert len(set(long)) == len(long) > 100
    assert min(sizes[:8]) < 150 and max(sizes[:8]) > 290 and max(sizes) < 330
    filter = Filter.against(prompts.eval_texts(answer.EVAL))
    used = [filter.accepts("tasks", turns, True) for turns in [*tasks, *([t] for t in long)]]
    assert sum(used) / len(used) > 0.98


# --------------------------------------------------------------------------------------------- runs


def by_text(config) -> dict[str, dict]:
    rows = rows_of(config)
    found = {row["turns"][0]: row for row in rows}
    assert len(found) == len(rows), "each once"
    return found


def test_a_killed_run_goes_on_where_it_was(sources, monkeypatch):
    """Where the kill has torn a line, too: that prompt is answered again, as before."""
    whole, cut = config_for(sources, "whole"), config_for(sources, "cut")
    run = answer.answer(whole, never)
    write, kills = answer.Run._write, []

    def torn(self, dialogue):
        write(self, dialogue)
        if len(rows_of(cut)) % 5 == 4:
            kills.append(1)
            self.log.path.write_bytes(self.log.path.read_bytes()[:-9])
            raise KeyboardInterrupt

    monkeypatch.setattr(answer.Run, "_write", torn)
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            answer.answer(cut, never)
    monkeypatch.setattr(answer.Run, "_write", write)
    again = answer.answer(cut, never)
    assert len(kills) == 2 and by_text(cut) == by_text(whole) and len(by_text(cut)) > 20
    assert again.total() == run.total() and again.lines() == run.lines()
    assert run.lines().startswith("given: 9 prompts, 8 used; dropped: 1 like an evaluation prompt")
    assert {row["source"] for row in rows_of(whole)} == {"given", "code", "tasks", "long"}


def test_an_answer_depends_on_its_prompt_alone(sources, monkeypatch):
    """Not on the answers around it; greedy ones are generate's; another seed changes the others."""
    config = config_for(sources)
    run = answer.answer(config, never)
    one, seed = (replace(config, out=str(sources / name)) for name in ("one", "seed"))
    answer.answer(replace(one, answers=1), never)
    monkeypatch.setattr(answer, "SEED", 1)
    answer.answer(seed, never)
    first = by_text(config)
    assert by_text(one) == first
    greedy = [text for text in first if first[text]["temperature"] == 0]
    assert 0 < len(greedy) < len(first)
    changed = {text for text, row in by_text(seed).items() if row != first[text]}
    assert changed and changed.isdisjoint(greedy)
    short = [t for t in greedy if len(t) < 300 and len(first[t]["turns"]) == 1]
    plain = replace(run.engine, config=replace(run.engine.config, temperature=0.0))
    tokens = generate(plain, [[text] for text in short], max_new_tokens=6).tokens
    assert len(short) > 3 and tokens == [first[text]["answer_ids"] for text in short]


def test_the_end_takes_unfinished_answers_as_cut(sources):
    config = config_for(sources)
    run = answer.answer(config, lambda tokens: tokens >= 30)
    rows = rows_of(config)
    assert 30 <= run.total() == sum(len(row["answer_ids"]) for row in rows if row["answers"]) < 40
    assert any(len(row["answer_ids"]) < 6 and not row["ended"] for row in rows)


def test_an_end_that_is_said_once_more_is_a_loop():
    for period, loops in ((1, True), (3, True), (64, True), (65, False), (199, False)):
        tokens = [i % period for i in range(192)]
        assert answer.is_looping(tokens) == loops, period
        assert not answer.is_looping(tokens[:-1]), "the look is taken now and then"
        assert not answer.is_looping(tokens[:96]), "too short"
    tokens = [i % 3 for i in range(192)]
    tokens[150] = 9
    assert not answer.is_looping(tokens)


def test_conversations_go_on_while_answers_are_good(sources, made_up):
    """A turn is answered after the model's own answers, if these ended; one that loops is left out."""
    given = [[f"Tell {i}.", "More?", "Why?"] for i in range(4)] + [["Tell 9.", EVAL]]
    word = words("yes")
    MadeUp.texts = {"Tell 1.": word, "Tell 2.": word * 60 + END, "Tell 3.": word * 700 + END}
    MadeUp.texts["Tell 0."] = word + END
    config = config_for(sources, given=1.0)

    def begin():
        return answer.Run(config, {"given": given}, Filter.against([EVAL]))

    run = begin()
    while run.step():
        pass
    found = by_text(config)
    turns = {first: len(row["turns"]) for first, row in found.items()}
    assert turns == {"Tell 0.": 3, "Tell 1.": 1, "Tell 2.": 1, "Tell 3.": 1}, (
        "the eval one is dropped"
    )
    assert [found[f"Tell {i}."]["ended"] for i in range(4)] == [True, False, True, True]
    assert found["Tell 2."]["answers"] == [] and found["Tell 0."]["answers"] == ["yes"] * 3
    assert found["Tell 0."]["answer_ids"] == (word + END) * 3
    assert "answers: 4 prompts, 3 used; dropped: 1 looping" in run.lines()
    dialogues = data.read_dialogues(run.log.path)
    first = next(d for d in dialogues if d.turns[0] == "Tell 0.")
    _, marks = data.marked_tokens(first, TOKENIZER, run.engine.template)
    assert sum(marks) >= 3 * len(word), "all three answers are trained on"
    assert begin().total() == run.total()


def test_training_reads_the_answers_with_their_tokens(sources, made_up):
    """Also those to the model's own prompts, of which the cut and the equal ones are dropped."""
    config = config_for(sources)
    run = answer.answer(config, lambda tokens: tokens >= 3000)
    counts = run.filter.counts
    assert counts["own", "too long or empty"] > 0 and counts["own", "twice"] > 0
    rows = rows_of(config)
    assert {row["source"] for row in rows[:22]} == set(answer.SHARES)
    assert {row["temperature"] for row in rows[:12]} == {0.0, 1.0}
    own = [row["number"] for row in rows if row["source"] == "own"]
    assert len(own) == len(set(own)) > 5 and answer.Run(config, {}, Filter(set())).attempts == max(
        own
    )
    for d, row in zip(data.read_dialogues(run.log.path), rows):
        if len(d.turns) > 1:
            continue
        ids, mask = data.marked_tokens(d, TOKENIZER, run.engine.template)
        prompt = run.engine.template.encode(TOKENIZER, row["turns"], [])
        assert ids == prompt + row["answer_ids"]
        assert mask == [False] * len(prompt) + [True] * len(row["answer_ids"])
        with pytest.raises(ValueError, match="answer_ids are not the tokens of the answer"):
            wrong = d._replace(answer_ids=[7, 8, 9])
            data.marked_tokens(wrong, TOKENIZER, run.engine.template)


def test_prompts_of_which_none_can_be_used_are_refused(sources):
    (sources / "given.jsonl").write_text('{"turns": ["What is 3?"]}')
    with pytest.raises(ValueError, match=r"can be used \(given: 1 prompts, 0 used; dropped: 1"):
        answer.answer(config_for(sources), never)


# ------------------------------------------------------------------------------------------ servers


class Served(BaseHTTPRequestHandler):
    """Answer as vLLM does, with ids, or as llama-cpp-python, which reads and writes texts alone; twenty words."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *of):
        """Nothing is printed."""

    def do_GET(self):
        self.send({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, prompt = self.server, body["prompt"]
        if isinstance(prompt, list) == server.reads_text:
            return self.send({"error": "the other kind"}, 422)
        server.asked += body["max_tokens"] > 1
        if server.asked > server.most:
            return self.send({"error": "away"}, 503)
        ids = words(" ".join(f"a{i}" for i in range(20)))
        count = len(TOKENIZER.encode(prompt, special=True)) if server.reads_text else len(prompt)
        choice = {"text": TOKENIZER.decode(ids), "index": 0, "finish_reason": "stop"}
        usage = {"prompt_tokens": count, "completion_tokens": len(ids), "total_tokens": 0}
        if not server.reads_text:
            choice["token_ids"] = ids + END
        answer = {
            "id": "1",
            "object": "text_completion",
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        server.damage(answer)
        self.send(answer)

    def send(self, answer: dict, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def serve(sources, monkeypatch):
    """A function that starts a server, and the options of a run with those that were started."""
    monkeypatch.setattr(answer_servers, "PAUSES_S", (0, 0))
    monkeypatch.setattr(answer, "ANSWER_TOKENS", 120)
    running = []

    def start(reads_text=False, most=10**9, damage=lambda answer: None) -> HeadConfig:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
        server.reads_text, server.most, server.damage, server.asked = reads_text, most, damage, 0
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        urls = [f"http://127.0.0.1:{s.server_port}/v1" for s in running]
        return config_for(sources, answers_from=",".join(urls), answer_model="m")

    start.running = running
    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_two_servers_of_which_one_is_lost(serve):
    """Nothing is lost or twice, and a run goes on after the loss of both."""
    serve(most=9)
    config = serve(reads_text=True, most=9)
    with pytest.raises(ValueError, match="does not answer: .*; the same command goes on once"):
        answer.answer(config, never)
    first = by_text(config)
    assert 9 < len(first) < 18, "some have two turns"
    serve.running[1].most = 10**9
    run = answer.answer(config, never)
    found = by_text(config)
    assert first.items() <= found.items() and len(found) == run.filter.counts["answers", "used"]
    prompts = PROMPTS["given"] + PROMPTS["tasks"] + PROMPTS["long"]
    assert {turns[0] for turns in prompts} - found.keys() == {"What is 3?"}
    ids = words(" ".join(f"a{i}" for i in range(20))) + END
    assert all(row["answer_ids"] == ids * len(row["turns"]) for row in found.values())
    assert all(row["ended"] for row in found.values())
    assert serve.running[0].asked > 9, "it is asked again"
    assert "answers: " in run.lines() and "whose tokens" not in run.lines()


WRONG = [  # a damage of an answer, what it is counted as
    (lambda a: a.update(model="other"), "of another model"),
    (lambda a: a["usage"].update(prompt_tokens=3), "of another tokenizer"),
    (lambda a: a["choices"][0].update(finish_reason="abort"), "broken off"),
    (lambda a: a["usage"].update(completion_tokens=9), "whose tokens its text does not tell"),
]


@pytest.mark.parametrize("damage, said", WRONG)
def test_wrong_answers_of_a_server_are_counted(serve, damage, said):
    """Where they do not end, the run does."""
    config = serve(reads_text=True, damage=damage)
    with pytest.raises(ValueError, match=f"20 answers in a row were wrong, the last one {said}"):
        answer.answer(config, never)
    assert not answer.Path(config.out, "answers", "answers.jsonl").exists()
    answers = iter(range(10**9))
    serve.running[0].damage = lambda a: damage(a) if next(answers) == 5 else None
    run = answer.answer(config, never)
    assert f"dropped: 1 {said}" in run.lines() and len(by_text(config)) > 20


def test_empty_and_cut_answers_of_a_server_are_counted(serve):
    empty = {"text": "", "token_ids": None}

    def damage(served):
        cut = {"finish_reason": "length", "token_ids": words("a0")}
        served["choices"][0] |= empty if served["usage"]["prompt_tokens"] % 2 else cut
        served["usage"]["completion_tokens"] *= served["choices"][0]["text"] != ""

    run = answer.answer(serve(damage=damage), never)
    counts = run.filter.counts
    assert counts["answers", "empty or like an evaluation prompt"] > 3
    assert counts["answers", "used"] == sum(run.cut.values()) > 3


def test_a_server_that_is_not_there_or_has_another_model(serve):
    config = serve()
    with pytest.raises(ValueError, match="--answer_model: http.* serves m, and not n"):
        answer.answer(replace(config, answer_model="n"), never)
    with pytest.raises(ValueError, match="--answers_from: http://127.0.0.1:9/v1 does not answer"):
        answer.answer(replace(config, answers_from="http://127.0.0.1:9/v1"), never)
