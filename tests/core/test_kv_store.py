"""Caches of texts in a folder: what is read back decodes to the same tokens, and only what belongs there is read."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from test_lossless import make

from helpers import engine_for, golden_target, slow
from run import kv_store
from run.kv_store import KVStore, digest_of
from run.load import load
from run.options import DEMO, Sampling
from run.scheduler import Request, Scheduler

TEXT = [(7 * i + i * i) % 90 for i in range(300)]
OTHER = [(5 * i + 3) % 90 for i in range(200)]
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True, "batch_size": 2}


def ask(scheduler: Scheduler, prompt: list[int]) -> Request:
    request = Request(prompt, Sampling(1.0), 7, 12)
    list(scheduler.run([request]))
    return request


def keep(scheduler: Scheduler) -> None:
    for place in range(2):
        scheduler.store.put(scheduler.session, place)


@pytest.mark.parametrize(
    "name", ["none", "dynamic", *slow(["auto:dynamic", "model:chain", "ngram"])]
)
def test_a_restart_changes_no_token(name, tmp_path):
    """Of a text that is read back only the end is read; what is decoded then is the same."""

    def engine():
        return engine_for(golden_target(), make(name), **OPTIONS)

    first = Scheduler(engine(), store=KVStore(engine(), tmp_path))
    begun = ask(first, TEXT)
    following = TEXT + begun.tokens + [5, 6, 7]
    want = ask(Scheduler(engine()), following)
    keep(first)
    again = Scheduler(engine(), store=KVStore(engine(), tmp_path))
    found = ask(again, following)
    assert found.tokens == want.tokens and found.cached >= len(TEXT) + 10
    assert want.cached == 0 and ask(again, OTHER).cached == 0


def test_a_text_that_loses_its_place_comes_back(tmp_path):
    engine = engine_for(golden_target(), make("none"), **OPTIONS)
    scheduler = Scheduler(engine, store=KVStore(engine, tmp_path))
    for prompt in (TEXT, OTHER, OTHER[::-1]):
        ask(scheduler, prompt)
    assert len(list(tmp_path.iterdir())) == 1 and ask(scheduler, TEXT).cached >= len(TEXT) - 1
    keep(scheduler)
    longer = ask(scheduler, TEXT + [1, 2, 3])
    keep(scheduler)
    texts = [entry.tokens for entry in scheduler.store.entries]
    assert sum(text[: len(TEXT)] == TEXT for text in texts) <= 2 and longer.tokens


def test_old_texts_make_room(tmp_path, monkeypatch):
    engine = engine_for(golden_target(), make("none"), **OPTIONS)
    scheduler = Scheduler(engine, store=KVStore(engine, tmp_path))
    ask(scheduler, TEXT)
    keep(scheduler)
    (entry,) = scheduler.store.entries
    monkeypatch.setattr(kv_store, "CAPACITY", int(1.2 * entry.size))
    ask(scheduler, OTHER)
    keep(scheduler)
    assert [each.tokens[:200] for each in scheduler.store.entries] == [OTHER]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_kept_is_noted_and_decoding_goes_on(tmp_path, monkeypatch, capfd):
    """A text beyond all room, which costs no other one its file, and a file that cannot go."""
    engine = engine_for(golden_target(), make("none"), **OPTIONS)
    scheduler = Scheduler(engine, store=KVStore(engine, tmp_path))
    ask(scheduler, OTHER)
    keep(scheduler)
    (kept,) = scheduler.store.entries
    monkeypatch.setattr(kv_store, "CAPACITY", kept.size)
    ask(scheduler, TEXT)
    keep(scheduler)
    assert scheduler.store.entries == [kept] and kept.file.exists()
    kept.file.unlink()
    kept.file.mkdir()  # unlink raises
    ask(scheduler, OTHER[::-1])
    keep(scheduler)
    said = capfd.readouterr().err
    assert "is larger than the store" in said and said.count("cannot write") >= 2


def test_another_model_or_a_broken_file_is_refused(tmp_path, monkeypatch):
    engine = engine_for(golden_target(), make("none"), **OPTIONS)
    scheduler = Scheduler(engine, store=KVStore(engine, tmp_path))
    ask(scheduler, TEXT)
    keep(scheduler)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0, "clients' texts are their owner's alone"
    demo = load(checkpoint=DEMO, device="cpu", draft="none")
    shorter = replace(demo, context=demo.context - 1)
    digests = [digest_of(each) for each in (engine, demo, shorter)]
    scaled = replace(engine.target.config, rope_theta=1e6)  # as when config.json was edited
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "config", scaled)
        digests.append(digest_of(engine))
    assert len(set(digests)) == 4
    with pytest.raises(ValueError, match="is a store of another model, or other options"):
        KVStore(demo, tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="is no file of a store; delete it"):
        KVStore(engine, tmp_path)
    file.write_bytes(whole)
    store = KVStore(engine, tmp_path)
    save_file({k: v[:1] for k, v in load_file(file).items()}, file)  # after its header was read
    again = Scheduler(engine_for(golden_target(), make("none"), **OPTIONS), store=store)
    assert ask(again, TEXT).cached == 0
    with pytest.raises(ValueError, match="name a folder"):
        KVStore(engine, file)
    os.chmod(tmp_path, 0o700)
