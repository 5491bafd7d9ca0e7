"""Penalties and the rarer cuts against llama.cpp. Whole texts by their definition: test_requests.py."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from draft_tree import DecodedTokens
from drafts.penalties import rescore
from drafts.shaping import Shaping
from helpers import shaped_cut
from reference import TORCH, build_tree, choose
from run.options import Sampling

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
