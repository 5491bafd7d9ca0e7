"""Lookup against a plain search, texts that are kept for it, what a draft model runs, presets, and grafted trees.

That none of this changes the output is tested in test_lossless.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.weight import unpack
from draft_tree import EAGLE1_PATHS, DynamicTree, StaticTree
from drafters import DecodedTokens, RootOnly
from drafts import ngram_draft
from drafts.kept_texts import RUN, PastTexts
from drafts.model_draft import ModelDrafter, check_same_tokens
from drafts.ngram_draft import Ngram, NgramDrafter, lookup, match_lengths
from eagle_draft import EagleDrafter
from files.weights import load_model
from helpers import (
    GOLDEN,
    LOOP,
    PROMPTS,
    drafted_paths,
    engine_for,
    golden_head,
    golden_run,
    golden_target,
    noisy_copy,
    record,
)
from model import Transformer
from quantize import Quantization
from reference import TORCH
from run.heads import draft_lm_head
from run.options import DEMO
from run.session import Session

# ------------------------------------------------------------------------------------------- lookup


def text_of(*rows: list[int], room: int = 24) -> DecodedTokens:
    """Texts of different lengths side by side; the padding repeats their tokens, so that reading it is noticed."""
    tokens = torch.tensor([(row * room)[:room] for row in rows])
    return DecodedTokens(tokens, torch.tensor([len(row) - 1 for row in rows]))


def search(row: list[int], ngram: Ngram, kept: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The continuations, best first, found the plain way. kept: -1 stands behind every kept text"""
    row = [*kept, *row]
    root, scored = len(row) - 1, []
    for i in range(root):
        length = 0
        while length < min(ngram.max, i + 1) and row[i - length] == row[root - length] >= 0:
            length += 1
        if length >= ngram.min and row[i + 1] >= 0:
            scored.append((length, i))
    chains: dict[tuple[int, ...], None] = {}  # in their order, without repetitions
    for _, i in sorted(scored, reverse=True):
        copy = list(row)
        for step in range(ngram.tokens):
            copy.append(copy[i + 1 + step])
        chains[tuple(max(token, 0) for token in copy[len(row) :])] = None
    return list(chains)[: ngram.branches]


def found(text: DecodedTokens, ngram: Ngram, row: int = 0) -> list[tuple[int, ...]]:
    tokens, lengths = lookup(text, ngram)
    return [tuple(chain) for chain in tokens[row][lengths[row] > 0].tolist()]


@pytest.mark.parametrize(
    "ngram", [Ngram(), Ngram(4, 3, 3, 2), Ngram(1, 1, 1, 1), Ngram(6, 5, 2, 1)], ids=str
)
def test_lookup_equals_a_plain_search(ngram):
    generator = torch.Generator().manual_seed(0)
    matched = 0
    for vocab in (1, 2, 3, 20):
        for _ in range(40):
            lengths = torch.randint(1, 25, (2,), generator=generator).tolist()
            rows = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
            text = text_of(*rows)
            kept = PastTexts(capacity=12)
            for row in rows:
                kept.add(row[: int(lengths[0] / 2)] or row)
            searching = replace(ngram, kept=kept)
            for b, row in enumerate(rows):
                want = search(row, ngram)
                assert found(text, ngram, b) == want, row
                assert found(text, searching, b) == search(row, ngram, kept.tokens.tolist())
                assert bool((match_lengths(text, ngram.max)[b] >= ngram.min).any()) == bool(want)
                matched += bool(want)
    assert 100 < matched < 320, "both cases must have been met"


def prefixes(chains: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {chain[: n + 1] for chain in chains for n in range(len(chain))}


# --------------------------------------------------------------------------------------- kept texts


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


@pytest.mark.usefixtures("traced")
def test_a_traced_lookup_reads_the_buffer():
    """Texts change between requests, and nothing is traced again."""
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


def test_a_turn_that_is_ended_early_is_kept():
    """As a server ends one at a text that the client names."""
    kept = PastTexts()
    engine = engine_for(golden_target(), NgramDrafter(Ngram(kept=kept)), max_new_tokens=20)
    session = Session(engine)
    session.admit(0, PROMPTS[0], (0, 0))
    for _ in range(4):
        session.step()
    assert session.busy(0) and not kept.texts
    session.release(0)
    session.release(0)
    assert texts_of(kept) == [session.history[0]] and len(session.history[0]) > len(PROMPTS[0])


# ------------------------------------------------------------------------------------------ presets


@pytest.mark.parametrize("prompts", [PROMPTS[:1], [LOOP], [LOOP, PROMPTS[1]]], ids=len)
def test_where_nothing_matches_only_the_root_is_verified(prompts):
    """The size is picked from what the cycle before has left; a row with a match is enough for all rows."""
    ngram = Ngram(tokens=4, branches=1, min=2)
    session = golden_run(NgramDrafter(ngram, sizes=(5,)), *prompts, max_new_tokens=80)
    wanted = served = 0
    for line in session.trace:
        wants = bool(search(session.history[line["row"]][: line["pos"] + 1], ngram))
        assert len(line["draft_tokens"]) in (0, ngram.tokens)
        assert bool(line["draft_tokens"]) == wants or len(prompts) > 1 and not wants
        wanted, served = wanted + wants, served + bool(line["draft_tokens"])
    assert 0 < wanted <= served < len(session.trace), "both presets must have run"
    assert wanted < served or len(prompts) == 1, "a tree also ran for a row without a match"


# ------------------------------------------------------------------------------------- draft models


TREES = {
    "chain": StaticTree.chain(5),
    "static": StaticTree(EAGLE1_PATHS),
    "dynamic": DynamicTree(depth=4, topk=4, size=20),
    "one level": DynamicTree(depth=1, topk=4, size=5),
}


def short_draft(context: int, tree: str = "chain") -> ModelDrafter:
    """The golden target itself, but the draft model ends at `context` positions."""
    target = golden_target()
    draft = noisy_copy(target, 0.0)
    draft.config = replace(draft.config, max_context=context)
    return ModelDrafter(draft, target, TREES[tree])


@pytest.mark.parametrize("tree, batch", [("chain", 1), ("chain", 2), ("dynamic", 2)])
def test_past_the_draft_models_context_output_goes_on_and_it_rests(monkeypatch, tree, batch):
    drafter, options = short_draft(24, tree), {"max_new_tokens": 50}
    calls = record(monkeypatch, drafter.model, "forward")
    session = golden_run(drafter, *PROMPTS[:batch], **options)
    assert session.history == golden_run(RootOnly(), *PROMPTS[:batch], **options).history
    trace = session.trace
    ends = [line["pos"] + line["accept_length"] for line in trace if line["accept_length"]]
    assert max(ends) == 24, "all that may be drafted is accepted, and nothing past the context"
    assert {len(line["draft_tokens"]) for line in trace if line["pos"] >= 48} == {0}
    if batch == 1:
        drafting = sum(bool(line["draft_tokens"]) for line in trace)
        assert drafting == sum(line["pos"] < 24 for line in trace)
        assert len(calls) == 1 + 5 * drafting


def test_another_vocabulary_or_tokenizer(tmp_path):
    demo, other = Path(DEMO), tmp_path / "other"
    said = "vocab_size is 4096 in .*demo and 97 in .*mha, and one has no tokenizer; use a"
    with pytest.raises(ValueError, match=said):
        check_same_tokens(demo, GOLDEN / "models/target_llama_mha", 4096)
    other.mkdir()
    shutil.copy(demo / "config.json", other)
    check_same_tokens(demo, other, 4096)  # there is no tokenizer to compare with
    with pytest.raises(ValueError, match="vocab_size is 8192 in .*demo and 4096"):  # of --random
        check_same_tokens(demo, other, 8192)
    shutil.copy(demo / "tokenizer.model", other)
    check_same_tokens(demo, other, 4096)
    check_same_tokens(demo, other, 4224)  # the same tokens, and padding
    (other / "added_tokens.json").write_text('{"<other>": 4096}')
    said = "token 4096 is nothing in the tokenizer of .*demo and b'<other>' in that of "
    with pytest.raises(ValueError, match=said):
        check_same_tokens(demo, other, 4096)


def padded(target: Transformer, size: int) -> Transformer:
    """The target with another number of tokens: fewer, or more whose scores are high."""
    model = Transformer(replace(target.config, vocab_size=size))
    with torch.no_grad():
        for name, value in model.named_parameters():
            own = target.get_parameter(name)
            if len(own) != len(value):
                value.fill_(9.0)
            value[: len(own)] = own[: len(value)]
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize(
    "size, temperature, compile",
    [(64, 0.0, True), (64, 1.0, False), (128, 1.0, True), (128, 0.0, False)],
)
def test_lm_heads_of_other_sizes(size, temperature, compile):
    """The target's is of 97 tokens, and text has tokens that only it has."""
    target = golden_target()
    options = {"temperature": temperature, "max_new_tokens": 24, "seed": 3, "compile": compile}
    vanilla = golden_run(RootOnly(), *PROMPTS, **options)
    assert any(token >= 64 for row in vanilla.history for token in row)
    draft = padded(target, size)
    for tree in (StaticTree.chain(3), DynamicTree(depth=3, topk=3, size=8)):
        session = golden_run(ModelDrafter(draft, target, tree), *PROMPTS, **options)
        assert session.history == vanilla.history
        lengths = session.stats.accept_lengths
        # the draft is the target itself, where it has the tokens
        assert sum(lengths) > (len(lengths) if size > 97 else 0)
        drafted = [token for line in session.trace for token in line["draft_tokens"]]
        assert max(drafted) < min(size, 97)


FORMATS = [None, Quantization("int8"), Quantization("int4", 32)]  # that fit the golden target


@pytest.mark.parametrize("quant", FORMATS, ids=lambda q: q.format if q else "float")
@pytest.mark.parametrize("held", FORMATS, ids=lambda q: q.format if q else "float")
def test_trimming_and_rounding_combine(held, quant):
    """Trimmed and rounded, in whatever order: the codes are rows of the whole copy's."""
    target = load_model(GOLDEN / "models/target_llama_mha", quant=held)
    generator = torch.Generator().manual_seed(0)
    kept = torch.randperm(97, generator=generator)[:40].sort().values
    trimmed, whole = (draft_lm_head(target, quant, ids) for ids in (kept, None))
    whole = whole or target.lm_head
    x = torch.randn(5, 64, generator=generator)
    torch.testing.assert_close(
        trimmed(x), whole(x)[:, kept], atol=1e-6 * (not whole.packed), rtol=0
    )
    assert (trimmed.in_features, trimmed.out_features) == (64, 40) and trimmed.fp32_out
    if whole.packed:
        for some, all in zip(unpack(trimmed.record), unpack(whole.record)):
            assert torch.equal(some, all[kept])
    else:
        assert torch.equal(trimmed.weight, whole.weight[kept]) and not trimmed.weight.requires_grad


# ----------------------------------------------------------------------------------------- grafting


def grafted(ngram: Ngram | None) -> EagleDrafter:
    tree = DynamicTree(depth=4, topk=4, size=24)
    drafter = EagleDrafter(golden_head(), golden_target(), tree)
    return ngram.graft_on(drafter) if ngram else drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grafted_tree_keeps_its_size_and_holds_the_continuation(temperature):
    ngram = Ngram(tokens=6, branches=2, min=1)
    options = {"temperature": temperature, "max_new_tokens": 40}
    session = golden_run(grafted(ngram), LOOP, **options)
    plain = {line["pos"]: line for line in golden_run(grafted(None), LOOP, **options).trace}
    compared = matched = deeper = 0
    for line in session.trace:
        chains = search(session.history[0][: line["pos"] + 1], ngram)
        paths = drafted_paths(line)
        assert len(set(paths)) == 23, "no node twice"
        assert prefixes(chains) <= set(paths)
        matched += bool(chains)
        deeper += max(map(len, paths)) > 4
        if not chains and line["pos"] in plain:
            compared += 1
            assert paths == drafted_paths(plain[line["pos"]]), "all nodes are EAGLE's"
    assert matched and deeper
    assert compared or temperature == 0.0
