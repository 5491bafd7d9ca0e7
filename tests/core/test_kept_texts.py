"""Texts of past requests: their order, their file, and that drafts from them change no token."""

from __future__ import annotations

import gc
import json
import stat
from dataclasses import replace

import pytest
import torch

from draft_tree import DecodedTokens, DynamicTree
from drafters import RootOnly
from drafts import ngram_draft
from drafts.kept_texts import MOST_BYTES, RUN, PastTexts
from drafts.ngram_draft import Ngram, NgramDrafter
from drafts.presets import PresetPolicy
from drafts.recycling_draft import empty_matrix
from eagle_draft import EagleDrafter
from helpers import (
    PROMPTS,
    decode,
    engine_for,
    golden_head,
    golden_run,
    golden_target,
    refused,
)
from reference import TORCH
from run import generate
from run.generate import load
from run.observer import Observer, PresetMethod
from run.options import DEMO
from run.session import Session
from run.warm_up import _prefill_each_width

VOCABULARY = "ab" * 32
SIZE = 9


def texts_of(kept: PastTexts) -> list[list[int]]:
    """The texts as they lie in the buffer."""
    texts: list[list[int]] = [[]]
    for token in kept.tokens.tolist():
        if token >= 0:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return texts[:-1]


def test_the_least_recently_used_text_makes_way():
    kept = PastTexts(capacity=40)
    runs = [list(range(begin, begin + RUN + 2)) for begin in (100, 200, 300)]
    for run in runs:
        kept.add(run)
    assert texts_of(kept) == runs and kept.tokens[-1] == -1
    prompt = [*runs[1], 7, *runs[0][:RUN]]  # begins as the second text, and repeats the first one
    kept.add(prompt, begin=len(runs[1]))
    # the first text was used; the second is a part of the new one; the third has no room
    assert texts_of(kept) == [runs[0], prompt]
    kept.add([1, 2])
    assert texts_of(kept) == [runs[0], prompt, [1, 2]]
    kept.add([1, 2])
    assert texts_of(kept) == [runs[0], prompt, [1, 2]], "no text twice"
    kept.add(runs[0][: RUN - 1], begin=0)  # too short a run
    assert texts_of(kept) == [prompt, [1, 2], runs[0][: RUN - 1]]
    kept.add(list(range(60)))
    assert texts_of(kept) == [list(range(21, 60))], "the end of a text that is too long"
    assert texts_of(kept) == [text.tokens for text in kept.texts]


# ---------------------------------------------------------------------------------- the same tokens


def check_warm(kind: str, temperature: float, batch: int) -> None:
    """Vanilla's tokens with an empty store and with these very texts in it, which takes fewer cycles.

    kind: lookup, or a head's tree with its candidates
    """
    options = {"max_new_tokens": 30, "ignore_eos": True, "temperature": temperature, "seed": 5}
    options["batch_size"] = batch
    want = golden_run(RootOnly(), *PROMPTS[:batch], **options).history
    kept = PastTexts()
    method = lookup(kept).method()
    if kind == "grafted":
        tree, ngram = DynamicTree(3, 4, 24), Ngram(6, 2, kept=kept)
        drafter = EagleDrafter(golden_head(), golden_target(), tree, graft=ngram)
        method = PresetMethod((drafter,), policy=PresetPolicy(kept))
    engine = engine_for(golden_target(), method.presets[-1], method, **options)
    cycles = []
    for _ in range(3):  # with a text that helps, one that does not, and in used buffers
        session = decode(engine, *PROMPTS[:batch])
        assert session.history == want
        cycles.append(len(session.stats.live_sequences))
    assert sorted(text.tokens for text in kept.texts) == sorted(want)
    assert 2 * max(cycles[1:]) < cycles[0], cycles


def lookup(kept: PastTexts) -> NgramDrafter:
    return NgramDrafter(Ngram(kept=kept))


@pytest.mark.parametrize("kind, temperature, batch", [
    ("lookup", 0.0, 1), ("lookup", 0.0, 2), ("lookup", 1.0, 1), ("lookup", 1.0, 2), ("grafted", 1.0, 2),
])  # fmt: skip
def test_kept_texts_change_no_token(kind, temperature, batch):
    check_warm(kind, temperature, batch)


@pytest.mark.usefixtures("traced")
def test_a_traced_lookup_reads_the_buffer(monkeypatch):
    """Texts change between requests, and nothing is traced again."""
    monkeypatch.setattr("backends.library._cpp_available", [False])
    ngram = Ngram(2, 2, 2, kept=PastTexts(capacity=64))
    text = DecodedTokens(torch.tensor([PROMPTS[0], PROMPTS[1][:7]]), torch.tensor([3, 6]))
    TORCH.complete()
    step = torch.compile(ngram_draft.lookup, fullgraph=True, dynamic=False)
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kept in (PROMPTS[0], PROMPTS[1]):
            traced = step(text, ngram)
            eager = ngram_draft.lookup(text, ngram)
            assert all(torch.equal(mine, plain) for mine, plain in zip(traced, eager))
            found.append((traced[1] > 0).any(1).tolist())
            ngram.kept.add(kept)
    assert found == [[False, False], [True, False]]


# ------------------------------------------------------------------------------------------ the file


def opened(file, vocabulary: str = VOCABULARY) -> PastTexts:
    kept = PastTexts(successors=empty_matrix(SIZE, "cpu"))
    kept.keep_in(file, vocabulary, SIZE)
    return kept


def test_a_file_keeps_texts_between_runs(tmp_path):
    file = tmp_path / "store"
    one = opened(file)
    two = opened(file)  # of another process
    one.add([1, 2])
    two.add([3, 4, 8])
    two.successors[5, :2] = torch.tensor([6, 7])
    del one
    assert json.loads(file.read_text())["texts"] == [[1, 2]]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    del two
    assert json.loads(file.read_text())["texts"] == [[3, 4, 8]], "the last one wins"
    before = file.read_bytes()
    again = opened(file)
    assert texts_of(again) == [[3, 4, 8]]
    assert again.successors[5].tolist() == [6, 7] + [-1] * 6 and again.successors.sum() == 13 - 78
    file.unlink()
    del again
    assert not file.exists(), "nothing has changed, so that nothing is written"
    file.write_bytes(b"")
    again = opened(file)  # an empty file is begun
    again.add([3, 4, 8])
    again.successors[5, :2] = torch.tensor([6, 7])
    del again
    assert file.read_bytes() == before


def test_a_store_that_cannot_be_written_is_a_note(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    kept = opened(folder / "store")
    kept.add([1])
    folder.rmdir()
    del kept
    note = capsys.readouterr().err
    assert note.startswith("note: --set draft_store: cannot write") and note.count("\n") == 1


GOOD = {"vocabulary": VOCABULARY, "texts": [[1, 2], [3]], "successors": [[4, 5]]}
WRONG = {
    "cut short": (json.dumps(GOOD)[:-5], "cut short"),
    "other text": ("def f(): pass", "is no store"),
    "a list": ("[]", "is no store"),
    "other keys": ('{"texts": []}', "is no store"),
    "a token alone": (json.dumps(GOOD | {"successors": [4, 5]}), "is no store"),
    "a successor beyond": (json.dumps(GOOD | {"successors": [[4, SIZE]]}), "not 0 to 8"),
    "an empty text": (json.dumps(GOOD | {"texts": [[]]}), "is no store"),
    "no list": (json.dumps(GOOD | {"texts": {"a": 1}}), "is no store"),
    "other vocabulary": (json.dumps(GOOD | {"vocabulary": "cd" * 32}), "of another tokenizer"),
    "a token beyond": (json.dumps(GOOD | {"texts": [[1, SIZE]]}), "not 0 to 8"),
    "a token below": (json.dumps(GOOD | {"texts": [[-1]]}), "not 0 to 8"),
    "no number": (json.dumps(GOOD | {"texts": [[True]]}), "not 0 to 8"),
    "too large": (" " * (MOST_BYTES + 1), "has more than the 33554432 bytes"),
    "no text": (b"\xff", "is not UTF-8"),
}


def test_files_that_are_no_store_are_refused_and_stay(tmp_path):
    for name, (content, fault) in WRONG.items():
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        before = file.read_bytes()
        with pytest.raises(ValueError, match=fault) as caught:
            opened(file)
        assert str(caught.value).startswith("--set draft_store: ") and "\n" not in str(caught.value)
        assert file.read_bytes() == before, name


COMMAND = ["--checkpoint", DEMO, "--device", "cpu", "--max_new_tokens", "24", "--prompt", "def f("]


@pytest.mark.parametrize("draft", [("ngram",), ("recycling", "--tree", "static")])
def test_a_store_on_the_command_line(draft, tmp_path, capsys):
    file = tmp_path / "store"
    told = []
    for _ in range(2):
        generate.main(
            [*COMMAND, "--set", "verbose=true", "--draft", *draft, "--set", f"draft_store={file}"]
        )
        gc.collect()
        told.append(capsys.readouterr())
    store = json.loads(file.read_text())
    (text,) = store["texts"]
    assert len(text) > 24 and bool(store["successors"]) == (draft[0] == "recycling")
    assert told[0].out == told[1].out
    taus = [each.err.rpartition("tau ")[2].split()[0] for each in told]
    first, second = map(float, taus)
    assert second > 1.5 * first


def test_stores_that_the_command_line_refuses(tmp_path, capsys):
    store = ("--set", f"draft_store={tmp_path / 'store'}")
    faults = {
        ("--draft", "none"): "draft_store belongs to lookups",
        ("--draft", "eagle", "--tree", "chain"): "use --draft ngram",
        ("--draft", "ngram", "--temperature", "1", "--set", "accept=residual"): "accept=exact",
        ("--draft", "ngram", "--set", f"draft_store={tmp_path}"): "is a directory",
        ("--draft", "ngram", "--set", "draft_store=-"): "name a file instead of -",
    }
    for flags, fault in faults.items():
        assert fault in refused(capsys, generate.main, [*COMMAND, *store, *flags]), flags


def test_warming_up_keeps_nothing():
    kept = PastTexts()
    drafter = lookup(kept)
    engine = engine_for(golden_target(), drafter, context=100)
    engine = replace(engine, policy=drafter.method().policy)  # cold
    _prefill_each_width(engine)
    assert not kept.texts
    warm = replace(engine, policy=engine.policy.on_engine_ready(engine, list))
    _prefill_each_width(warm)
    assert kept.texts


def test_a_turn_that_is_ended_early_is_kept():
    """As a server ends one at a text that the client names."""
    kept = PastTexts()
    engine = engine_for(golden_target(), lookup(kept), max_new_tokens=20)
    session = Session(engine)
    session.admit(0, PROMPTS[0], (0, 0))
    for _ in range(4):
        session.step()
    assert session.busy(0) and not kept.texts
    session.release(0)
    session.release(0)
    assert texts_of(kept) == [session.history[0]] and len(session.history[0]) > len(PROMPTS[0])


def test_without_a_file_texts_stay_in_memory():
    options = {"checkpoint": DEMO, "device": "cpu", "max_new_tokens": 4}
    assert load(**options).policy.kept is not None, "lookup beside the bundled head"
    assert type(load(**options, draft="eagle", tree="chain").policy) is Observer
