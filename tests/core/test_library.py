"""The library for Python: forms of prompts, answers as objects, streams, notes, and what is refused."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import OPERATORS
from options import NOTES
from run.library import astream, generate, stream
from run.load import load
from run.options import DEMO, ROOT

PROMPT = "def read_lines(path):"
OTHER = "import os"
OPTIONS = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def engine():
    return load(DEMO, device="cpu", batch_size=2)


def ids_of(engine, text):
    return engine.tokenizer.encode(text, bos=True, special=True)


@pytest.mark.parametrize("form", ["text", "ids"])
def test_one_prompt_has_an_answer_and_a_list_has_a_list(engine, form):
    prompt = PROMPT if form == "text" else ids_of(engine, PROMPT)
    answer = generate(engine, prompt, **OPTIONS)
    several = generate(engine, [prompt, OTHER], **OPTIONS)
    assert several[0].tokens == answer.tokens and several.text[0] == answer.text
    assert (answer.finish_reason, answer.prompt_tokens) == ("length", len(ids_of(engine, PROMPT)))
    assert [each.index for each in several] == [(0, 0, 0), (1, 0, 0)]
    assert answer.stats["tokens"] == 24 and answer.logprobs is None
    samples = generate(engine, prompt, num_samples=2, **OPTIONS)
    assert len(samples) == 2 and samples[0].tokens == answer.tokens != samples[1].tokens


@pytest.mark.parametrize("draft", ["none", 0, 2, None])
def test_a_draft_of_a_call_changes_no_token(engine, draft):
    answer = generate(engine, PROMPT, draft=draft, **OPTIONS)
    assert answer.tokens == generate(engine, PROMPT, **OPTIONS).tokens
    assert (answer.stats["tau"] == 1) == (draft in ("none", 0))


def test_log_probabilities_of_an_answer(engine):
    """One of each token; greedily it is the likeliest one's."""
    for draft in ("none", None):
        answer = generate(engine, PROMPT, max_new_tokens=20, logprobs=2, draft=draft)
        assert len(answer.logprobs) == 20
        for token, scored in zip(answer.tokens, answer.logprobs):
            assert scored.top[0] == (token, scored.own) and len(scored.top) == 2
    stopped = generate(engine, PROMPT, max_new_tokens=20, logprobs=0, stop="file")
    assert len(stopped.logprobs) == len(stopped.tokens) < 20


def test_streams_are_the_answers_in_pieces(engine):
    """Of several prompts together; the last piece of each has its answer."""
    want = generate(engine, [PROMPT, OTHER, "x = 1"], **OPTIONS)
    pieces = list(stream(engine, [PROMPT, OTHER, "x = 1"], logprobs=0, **OPTIONS))
    for number, answer in enumerate(want):
        own = [piece for piece in pieces if piece.index[0] == number]
        assert "".join(own) == answer.text
        assert sum((piece.tokens for piece in own), []) == answer.tokens
        assert [piece.answer is None for piece in own] == [True] * (len(own) - 1) + [False]
        assert own[-1].answer.tokens == answer.tokens and len(own[-1].answer.logprobs) == 24


def test_an_event_loop_goes_on_and_may_leave_early(engine):
    async def run() -> list[tuple[str, int]]:
        seen, turns = [], 0

        async def beside():
            nonlocal turns
            while len(seen) < 3:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(beside())
        pieces = astream(engine, PROMPT, **OPTIONS)
        while len(seen) < 3:
            seen.append((await anext(pieces), turns))
        await pieces.aclose()
        await task
        return seen

    seen = asyncio.run(run())
    assert seen[0][1] < seen[1][1] < seen[2][1]
    whole = generate(engine, PROMPT, **OPTIONS).text
    assert whole.startswith("".join(piece for piece, _ in seen))


def test_a_model_with_a_broken_tokenizer(engine, tmp_path):
    """As the error advises: with prompt_ids, ids go in, and ids come out."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(DEMO).absolute() / name)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match="use --prompt_ids"):
        load(tmp_path, device="cpu")
    bare = load(tmp_path, device="cpu", prompt_ids="5,6")
    found = [generate(each, [[5, 6]], max_new_tokens=4).tokens for each in (bare, engine)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda engine: load(DEMO, prompt="x", json="-"), "json, prompt: .*leave it out"),
        (lambda engine: load(DEMO, max_tokens=3), "did you mean max_new_tokens"),
        (lambda engine: generate(engine, PROMPT, draft="eagle"), "draft must be"),
        (lambda engine: generate(engine, PROMPT, logprobs=True), "logprobs must be"),
        (lambda engine: generate(engine, PROMPT, kv="int8"), "cannot change after load"),
        (lambda engine: stream(engine, [[]]), "the prompt is empty"),
        (lambda engine: stream(engine, [3.5]), "a prompt is a text"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(engine, call, fault):
    with pytest.raises(ValueError, match=fault):
        call(engine)


OUTSIDE = """
import torch
from drafters import Drafter
from reference import build_tree
from run.observer import DraftMethod

class Twice(Drafter):
    depth, size, width = 1, 2, 1

    def propose(self, state, inputs):
        tokens = inputs.text.root[:, None].expand(-1, 2).contiguous()
        return build_tree(tokens, torch.zeros_like(tokens), torch.ones_like(tokens).bool(), 1)

def twice(target, config, tokenizer):
    return DraftMethod((Twice(),))
"""


def test_a_drafter_outside_of_this_tree_changes_no_token(engine, tmp_path, monkeypatch):
    (tmp_path / "my_drafts.py").write_text(OUTSIDE)
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    own = load(DEMO, device="cpu", draft="my_drafts:twice")
    answer = generate(own, PROMPT, **OPTIONS)
    assert answer.tokens == generate(engine, PROMPT, **OPTIONS).tokens
    assert own.presets[0].size == 2 and answer.stats["drafted_by"] == ["my_drafts:twice"]
    for draft, fault in (("my_drafts:other", "no attribute"), ("nothing_here:f", "No module")):
        with pytest.raises(ValueError, match=f"--draft {draft}: .*{fault}.*MODULE:FUNCTION"):
            load(DEMO, device="cpu", draft=draft)
    with pytest.raises(ValueError, match="draft must be one of none, .*, MODULE:FUNCTION; it is"):
        load(DEMO, device="cpu", draft="eagel")


def test_an_engine_shows_one_line_and_what_is_normal_is_no_warning(caplog, monkeypatch):
    monkeypatch.setattr(NOTES, "propagate", True)  # which a command of this process has changed
    with caplog.at_level(logging.INFO, logger="gpt_eagle"):
        engine = load(DEMO, device="cpu", batch_size=2)
    assert repr(engine) == f"Engine({DEMO}, cpu, draft {DEMO}-eagle)"
    levels = {record.levelname for record in caplog.records if "sequences take" in record.message}
    assert levels == {"INFO"}


NOTE = "attention in float16 is PyTorch's: slower, and a draft may change a token where the best two are nearly equal"
NOTE += "; use --dtype bfloat16"
CALLER = """
import logging
from run.load import load
options = {"checkpoint": "checkpoints/demo", "draft": "none", "device": "cpu", "dtype": "float16"}
load(**options)
logging.getLogger("gpt_eagle").setLevel(logging.ERROR)
load(**options)
logging.getLogger("gpt_eagle").setLevel(logging.INFO)
logging.basicConfig(format="%(name)s %(levelname)s %(module)s %(message)s")
load(**options)
"""


@OPERATORS
def test_a_caller_sees_notes_silences_them_and_takes_them_into_a_log():
    command = [sys.executable, "-c", CALLER]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if NOTE in line]
    assert told == [NOTE, f"gpt_eagle WARNING load {NOTE}"]
