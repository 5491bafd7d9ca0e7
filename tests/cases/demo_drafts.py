"""The demo with every drafter, and its text by the definition: for every token a pass over the whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import sampling
from drafts.shaping import ShapedRule, Shaping
from helpers import InTurn
from kv_cache import KVCache, causal_window
from run.load import load
from run.options import DEMO, Sampling

DRAFTS = {
    "none": {"draft": "none"},
    "dynamic": {"tree": "dynamic"},
    "static": {"tree": "static"},
    "chain": {"tree": "chain", "tree_depth": 3},
    "auto": {"tree": "auto"},
    "ngram": {"draft": "ngram"},
    "eagle+ngram": {"draft": "eagle+ngram"},
    "recycling": {"draft": "recycling"},
    "lookahead": {"draft": "lookahead"},
    "model": {"draft": "model", "draft_checkpoint": DEMO, "tree_depth": 3},
    "model tree": {"draft": "model", "draft_checkpoint": DEMO, "tree": "dynamic"},
}


def engine_of(draft: str = "dynamic", **options):
    """The demo's engine. Presets of --tree auto run in turn."""
    engine = load(checkpoint=DEMO, device="cpu", **DRAFTS[draft] | options)
    return replace(engine, policy=InTurn()) if draft == "auto" else engine


def plain_loop(
    engine, prompt: str, own: Sampling, seed: int, number: int,
    rescored: Callable[[Tensor, list[int]], Tensor],
) -> list[int]:  # fmt: skip
    """The tokens of an answer up to the length that the engine was loaded with, or to its end.

    number: of the prompt
    rescored: a function of the scores [V] behind some new tokens, and of these
    """
    target = engine.target
    vocab = target.config.vocab_size
    ids = engine.tokenizer.encode(prompt)
    key = sampling.SamplingTensors.from_params([own], seed=seed)
    key = key._replace(prompt=torch.tensor([number]))
    ends = () if engine.config.ignore_eos else engine.eos_ids
    new: list[int] = []
    while len(new) < engine.config.max_new_tokens and not {*new[-1:]} & {*ends}:
        text = torch.tensor([ids + new])
        cache = KVCache.empty(target.config, 1, text.shape[1], target.norm.weight.dtype, "cpu")
        window = causal_window(torch.zeros(1, dtype=torch.long), text.shape[1])
        scores = target.logits(target(text, window.slots, cache, window)[:, -1:])
        z = rescored(scores[0, 0], new)[None, None]
        if own.temperature:
            draw = torch.tensor([len(new)])
            # the noise of XTC has the prompt's key, too
            further = Shaping(vocab, tokenizer=engine.tokenizer).rows([own])
            rule = ShapedRule(*key[:8], further)
            cut = rule.cut(z, xtc=rule.xtc_at(draw[:, None]))
            z = cut + sampling.gumbel(key, draw, 1, vocab)
        new.append(int(z.argmax()))
    return new
