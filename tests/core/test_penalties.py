"""Penalties, biases and the rarer cuts: against llama.cpp and transformers, and the same text for every drafter."""

from __future__ import annotations

import ctypes
import json
import os
import random
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import demo_drafts
from demo_drafts import DRAFTS, plain_loop
from draft_tree import DecodedTokens
from drafts.penalties import rescore
from drafts.shaping import Shaping
from files.tokenizer import Tokenizer
from helpers import compiled_as_on_cuda, fresh, shaped_cut, slow
from reference import TORCH, build_tree, choose
from run.generate import generate
from run.options import DEFAULT, Sampling

BACKENDS = (choose(torch.device("cpu")), TORCH)

# ------------------------------------------------------------------------ against llama.cpp


@pytest.fixture(scope="module")
def llama():
    return pytest.importorskip("llama_cpp")


def by_llama(llama, sampler, scores: torch.Tensor, ids: list[int] = ()) -> torch.Tensor:
    """Apply a sampler of llama.cpp to scores [V], behind tokens. Returns: them; -inf for tokens that it drops."""
    data = (llama.llama_token_data * len(scores))(
        *((i, x, 0) for i, x in enumerate(scores.tolist()))
    )
    array = llama.llama_token_data_array(data, len(scores), -1, False)
    for id in ids:
        llama.llama_sampler_accept(sampler, id)
    llama.llama_sampler_apply(sampler, ctypes.byref(array))
    llama.llama_sampler_free(sampler)
    left = torch.full_like(scores, float("-inf"))
    for each in array.data[: array.size]:
        left[each.id] = each.logit
    return left


def rescored(
    own: Sampling, texts: list[list[int]], prompt: int, vocab: int, tokenizer=None
) -> tuple:
    """Rescore random scores behind the texts of a tree: all begin with the first one, its root's.

    prompt: tokens of it that are no answer
    Returns: the scores, and the rescored ones, [N, V].
    """
    root = texts[0]
    nodes = [tuple(text[len(root) - 1 :]) for text in texts]
    parents = [nodes.index(node[:-1]) if len(node) > 1 else 0 for node in nodes]
    tokens = torch.tensor([[node[-1] for node in nodes]])
    tree = build_tree(tokens, torch.tensor([parents]), torch.ones_like(tokens).bool(), len(nodes))
    tokens = torch.zeros(1, 400, dtype=torch.long)
    tokens[0, : len(root)] = torch.tensor(root)
    tokens[0, len(root) :] = torch.arange(400 - len(root)) % vocab  # of no meaning
    text = DecodedTokens(tokens, torch.tensor([len(root) - 1]))
    shaping = Shaping(vocab, tokenizer=tokenizer)
    rows = shaping.rows([own])._replace(answer=torch.tensor([prompt]))
    scores = 3 * torch.randn(1, len(nodes), vocab, generator=torch.Generator().manual_seed(0))
    return scores[0], rescore(scores.clone(), rows, shaping.ends, text, tree)[0]


def tree_texts(seed: int, vocab: int, length: int, nodes: int) -> list[list[int]]:
    """The texts of a root and of random nodes below it; all tokens are of a few."""
    rng = random.Random(seed)
    texts = [[rng.randrange(vocab) for _ in range(length)]]
    while len(texts) < nodes:
        text = [*rng.choice(texts), rng.randrange(vocab)]
        if text not in texts:
            texts.append(text)
    return texts


@pytest.mark.parametrize("window", [-1, 1, 7, 64])
@pytest.mark.parametrize(
    "repeat, presence, frequency", [(1.3, 0.0, 0.0), (0.8, 0.5, -0.3), (1.0, 0.0, 0.7)]
)
def test_penalties_are_those_of_llama_cpp(llama, window, repeat, presence, frequency):
    """Which counts the prompt's tokens as the answer's, so that here all are."""
    vocab = 30
    penalties = {"repetition_penalty": repeat, "presence_penalty": presence}
    own = Sampling(**penalties, frequency_penalty=frequency, repeat_last_n=window)
    texts = tree_texts(1, vocab, 40, 12)
    scores, ours = rescored(own, texts, 0, vocab)
    for text, before, after in zip(texts, scores, ours):
        last = window if window >= 0 else len(text)
        sampler = llama.llama_sampler_init_penalties(vocab, last, repeat, frequency, presence)
        torch.testing.assert_close(
            after, by_llama(llama, sampler, before, text), rtol=1e-6, atol=1e-6
        )
    assert not torch.equal(scores, ours)


@pytest.mark.parametrize(
    "allowed, base, window", [(1, 1.75, -1), (2, 1.75, -1), (3, 1.2, 20), (2, 1.0, 9)]
)
def test_dry_is_that_of_llama_cpp(llama, allowed, base, window):
    for vocab, length in ((2, 30), (3, 40), (5, 120), (40, 1)):
        settings = {"dry_base": base, "dry_allowed_length": allowed, "dry_penalty_last_n": window}
        texts = tree_texts(vocab, vocab, length, min(14, vocab**3))
        scores, ours = rescored(Sampling(dry_multiplier=0.8, **settings), texts, 0, vocab)
        for text, before, after in zip(texts, scores, ours):
            last = window if window >= 0 else len(text)
            sampler = llama.llama_sampler_init_dry(None, 0.8, base, allowed, last, None, 0)
            want = by_llama(llama, sampler, before, text)
            torch.testing.assert_close(after, want, rtol=1e-5, atol=1e-5)


CUTS = {
    "top_n_sigma": lambda llama, x: llama.llama_sampler_init_top_n_sigma(x),
    "typical_p": lambda llama, x: llama.llama_sampler_init_typical(x, 0),
    "xtc_threshold": lambda llama, x: llama.llama_sampler_init_xtc(1.0, x, 0, 0),
    "min_p": lambda llama, x: llama.llama_sampler_init_min_p(x, 0),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=["ours", "plain"])
@pytest.mark.parametrize("name, value", [
    ("top_n_sigma", 0.5), ("top_n_sigma", 2.0), ("typical_p", 0.2), ("typical_p", 0.7), ("typical_p", 0.95),
    ("xtc_threshold", 0.01), ("xtc_threshold", 0.1), ("xtc_threshold", 0.15), ("min_p", 0.1),
])  # fmt: skip
def test_cuts_are_those_of_llama_cpp(llama, backend, name, value):
    scores = 2 * torch.randn(6, 500, generator=torch.Generator().manual_seed(3))
    scores[1] *= 2
    scores[3:, :3] += 9
    scores[2, ::3] = float("-inf")
    own = Sampling(1.0, **{name: value})
    if name == "xtc_threshold":
        own = own._replace(xtc_probability=1.0)
    ours = shaped_cut(scores[None], [own], torch.arange(6)[None], backend)[0]
    for before, after in zip(scores, ours):
        finite = before.isfinite()  # llama.cpp gets the others not at all
        want = torch.full_like(before, float("-inf"))
        left = by_llama(llama, CUTS[name](llama, value), before[finite])
        want[finite] = left
        assert torch.equal(after, want)
    assert (ours != scores).any() and ours.isfinite().any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=["ours", "plain"])
def test_cuts_act_in_the_order_of_llama_cpp(llama, backend):
    """Each on what the ones before it leave; the temperature comes before all of them.

    llama.cpp's own chain has NaN behind a top-n-sigma that leaves fewer than top-k.
    """
    scores = 2 * torch.randn(40, 300, generator=torch.Generator().manual_seed(4))
    own = Sampling(0.7, 60, 0.8, 0.05, 2.5, 0.9, 1.0, 0.06)
    ours = shaped_cut(scores[None], [own], torch.arange(40)[None], backend)[0]
    init = "llama_sampler_init_"
    steps = (("top_n_sigma", 2.5), ("top_k", 60), ("typical", 0.9, 0), ("top_p", 0.8, 0), ("min_p", 0.05, 0), ("xtc", 1.0, 0.06, 0, 0))  # fmt: skip
    dropped = set()
    for before, after in zip(scores / 0.7, ours):
        left = before
        for name, *values in steps:
            known = int(left.isfinite().sum())
            one = by_llama(llama, getattr(llama, init + name)(*values), left[left.isfinite()])
            left = left.masked_scatter(left.isfinite(), one)
            if int(left.isfinite().sum()) < known:
                dropped.add(name)
        assert torch.equal(after, left)
    assert dropped == {name for name, *_ in steps}


@pytest.mark.slow  # reads the tokens of a vocabulary twice
def test_breakers_of_repeats_are_those_of_llama_cpp(llama):
    """By the default model's tokens, and by more than one character."""
    if not os.path.exists(DEFAULT):
        pytest.skip("needs the default model")
    tokenizer = Tokenizer.load(Path(DEFAULT))
    model = llama.Llama(DEFAULT, vocab_only=True, verbose=False)
    library_vocab = llama.llama_model_get_vocab(model.model)
    line = 'He said: "yes" * and no,\nand he said: "yes" * and no, and then he said: "yes" * and'
    ids = tokenizer.encode(line)
    vocab = tokenizer.vocab_size
    found = []
    for breakers in (("\n", ":", '"', "*"), (), (" and",), ("\n",)):
        own = Sampling(dry_multiplier=0.8, dry_sequence_breakers=breakers)
        scores, ours = rescored(own, [ids], 0, vocab, tokenizer)
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        fields = (0.8, 1.75, 2, len(ids), texts, len(breakers))
        sampler = llama.llama_sampler_init_dry(library_vocab, *fields)
        torch.testing.assert_close(ours[0], by_llama(llama, sampler, scores[0], ids))
        found.append(int((ours != scores).sum()))
    assert found[1] > 0 and len(set(found)) > 1


# --------------------------------------------------------------------- the text, by its definition

PROMPT = "def person():\n    return "
OTHER = "import json\n"
LENGTH = 24
EOS = 2
NO_BREAKERS = {"dry_sequence_breakers": ()}
CASES = [  # a prompt, how it is sampled, and a seed
    (PROMPT, Sampling(repetition_penalty=1.3), 0),
    (OTHER, Sampling(1.0, typical_p=0.8), 1),
    (OTHER, Sampling(0.7, 0, 0.95, 0.0, 2.0, repetition_penalty=1.4), 2),
    (PROMPT, Sampling(presence_penalty=1.5, frequency_penalty=0.5, repeat_last_n=9), 3),
    (OTHER, Sampling(), 4),
    (PROMPT, Sampling(dry_multiplier=0.9, dry_allowed_length=1, dry_penalty_last_n=40), 5),
    (PROMPT, Sampling(1.0, xtc_probability=0.6, xtc_threshold=0.05), 6),
    (OTHER, Sampling(0.7, logit_bias='{"10": 5, "32": -100, "3": -20}', frequency_penalty=0.3), 7),
    (PROMPT, Sampling(1.0), 8),
    (OTHER, Sampling(0.7, 40, 0.9, 0.02, 3.0, 0.9, 0.5, 0.1, 1.2, 0.2, 0.1, 20, 0.8), 9),
    (PROMPT, Sampling(bad_words=("0", "self,"), min_tokens=9, logit_bias=f'{{"{EOS}": 100}}'), 10),
    (OTHER, Sampling(1.0, allowed_token_ids=",".join(map(str, range(3, 999))), bad_words=("name", "def __")), 11),
]  # fmt: skip
engine_of = partial(demo_drafts.engine_of, max_new_tokens=LENGTH, ignore_eos=True)


def rescored_plainly(tokenizer, ids: list[int], own: Sampling, scores, new: list[int]):
    """Biases, penalties and masks of scores [V], on Python's numbers, and by transformers."""
    z = scores.clone()
    for id, bias in json.loads(own.logit_bias or "{}").items():
        z[int(id)] += bias
    text = ids + new
    window = text[-own.repeat_last_n :] if own.repeat_last_n > 0 else text
    repetition = RepetitionPenaltyLogitsProcessor(own.repetition_penalty)
    z = repetition(torch.tensor([window]), z[None])[0]
    for token, count in Counter(window[len(window) - min(len(new), len(window)) :]).items():
        z[token] = z[token] - own.frequency_penalty * count - own.presence_penalty
    text = text[-own.dry_penalty_last_n :] if own.dry_penalty_last_n > 0 else text
    longest: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length]:
            length += 1
        longest[text[place]] = max(length, longest.get(text[place], 0))
    for token, length in longest.items():
        if own.dry_multiplier and length >= own.dry_allowed_length:
            z[token] -= own.dry_multiplier * own.dry_base ** (length - own.dry_allowed_length)
    for word in own.bad_words:
        for begin in ("", " "):
            *before, last = tokenizer.encode(begin + word, bos=False)
            if new[len(new) - len(before) :] == before:
                z[last] = float("-inf")
    if len(new) < own.min_tokens:
        z[EOS] = float("-inf")
    if own.allowed_token_ids:
        allowed = torch.tensor(list(map(int, own.allowed_token_ids.split(","))))
        z = torch.full_like(z, float("-inf")).scatter(0, allowed, z[allowed])
    return z


@cache
def wanted(quant: str) -> list[list[int]]:
    engine = engine_of("none", quant=quant)
    found = []
    for number, (prompt, own, seed) in enumerate(CASES):
        ids = engine.tokenizer.encode(prompt)
        rescored = partial(rescored_plainly, engine.tokenizer, ids, own)
        found.append(plain_loop(engine, prompt, own, seed, number, rescored))
    return found


def decoded(engine) -> list[list[int]]:
    own = [each._asdict() for _, each, _ in CASES]
    options = {name: [each[name] for each in own] for name in own[0]} | NO_BREAKERS
    seeds = [seed for *_, seed in CASES]
    return generate(engine, [prompt for prompt, *_ in CASES], seed=seeds, **options).tokens


def test_every_rule_has_an_effect():
    """No case has the text that its temperature alone gives."""
    temperatures = [own.temperature for _, own, _ in CASES]
    seeds = [seed for *_, seed in CASES]
    prompts = [prompt for prompt, *_ in CASES]
    bare = generate(engine_of("none"), prompts, temperature=temperatures, seed=seeds).tokens
    for (_, own, _), text, other in zip(CASES, wanted("none"), bare):
        assert (text == other) == (own == Sampling(own.temperature)), own


@pytest.mark.parametrize("draft, quant, compile, batch", [
    ("none", "none", True, 1), ("dynamic", "none", False, 2), ("auto", "none", True, 3),
    *slow((draft, quant, compile, batch) for draft in DRAFTS for quant in ("none", "int8", "int4")
          for compile in (False, True) for batch in (1, 3)),
])  # fmt: skip
def test_the_text_is_that_of_a_plain_loop(draft, quant, compile, batch):
    """Of every sampler, side by side with the others, greedy and sampled."""
    engine = engine_of(draft, quant=quant, compile=compile, batch_size=batch)
    assert decoded(engine) == wanted(quant)


def test_captured_cycles_do_the_same():
    """Over buffers that stay, as on CUDA; the cases behind one another, so that modes change."""
    assert decoded(fresh(engine_of("auto", batch_size=2), captured=True)) == wanted("none")


@pytest.mark.slow  # half a minute to trace
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("draft", ["none", "dynamic"])
def test_steps_are_traced_whole(draft):
    """As --compile does on CUDA, where no step may look at a value."""
    assert decoded(compiled_as_on_cuda(engine_of(draft, batch_size=3, compile=False))) == wanted(
        "none"
    )


def test_a_grammar_goes_with_penalties():
    """A token that alone may follow does, whatever its bias."""
    pytest.importorskip("llguidance")
    asked = {"grammar": 'root ::= "aaaa" [a-c]*'}
    asked |= {"logit_bias": {"68": -100}, "repetition_penalty": 2.0, "dry_multiplier": 5.0}
    want = generate(engine_of("none", ignore_eos=False), [PROMPT], **asked)
    assert want.text[0].startswith("aaaa")
    for draft in ("dynamic", "ngram"):
        engine = engine_of(draft, ignore_eos=False)
        assert generate(engine, [PROMPT], **asked).tokens == want.tokens
