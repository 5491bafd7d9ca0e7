"""Read a text without an answer: log-probabilities of its tokens, and an embedding.

The target reads the text alone, in chunks as prompts are read (run/session.py), in a cache of its
own.
- `prompt_logprobs`: the target's own log-probability of every token but the first.
- `embedding`: the hidden states behind the final norm, pooled as the model's files say (`Pooling`)
  and scaled to length 1, as OpenAI's embeddings are.

Trade-off: the text is read anew, and nothing else decodes meanwhile.
Not here: sentence-transformers' further layers (dense, whitening) and prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from decode import PREFILL_CHUNK
from drafts.logprobs import Logprob, entries, scored
from files.gguf_header import read_header
from files.io import is_gguf, read_json
from files.machine import single_torch_thread
from kv_cache import KVCache, causal_window
from options import require
from run.engine import Engine
from runtime import replace_fields

ROWS = 64  # of logits at a time
GGUF_POOLINGS = {0: "last", 1: "mean", 2: "cls", 3: "last"}  # 0: none, as of a model that writes
# keys of sentence-transformers' 1_Pooling/config.json
POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


class Pooling(NamedTuple):
    """How a model's files make one vector of a text."""

    kind: str = "last"  # of the tokens: their mean, the first ("cls") or the last one
    adds_eos: bool = False  # a text ends with the end of a sequence


def pooling_of(path: Path) -> Pooling:
    """Read a checkpoint's pooling; that of a model without one is its last token.

    Raises: ValueError for a pooling that is not known.
    """
    if is_gguf(path):
        metadata = read_header(path).metadata
        named = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
        adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
        kind = GGUF_POOLINGS.get(named, "")
    else:
        file = path / "1_Pooling" / "config.json"
        modes = read_json(file) if file.exists() else {"pooling_mode_lasttoken": True}
        named = [name for name, holds in modes.items() if name.startswith("pooling_") and holds]
        settings = path / "tokenizer_config.json"
        adds_eos = settings.exists() and read_json(settings).get("add_eos_token", False)
        kind = POOLINGS.get(named[0], "") if len(named) == 1 else ""
    known = "mean, cls and last are known"
    require(kind != "", f"the model pools by {named}, and only {known}; use another model")
    return Pooling(kind, bool(adds_eos))


def prompt_features(engine: Engine, ids: list[int]) -> Tensor:
    """Return the hidden states of a text behind the final norm, [1, T, F]."""
    target = engine.target
    device = engine.device
    room = (1, len(ids) + PREFILL_CHUNK, engine.kv_dtype, str(device))
    cache = KVCache.empty(target.config, *room)
    parts = []
    with single_torch_thread(target.program is not None):
        for begin in range(0, len(ids), PREFILL_CHUNK):
            tokens = torch.tensor([ids[begin : begin + PREFILL_CHUNK]], device=device)
            start = torch.tensor([begin], device=device)
            width = tokens.shape[1]
            window = causal_window(start, width, backend=target.backend)
            window = replace_fields(window, kept=torch.tensor([width], device=device))
            parts.append(target(tokens, window.slots, cache, window))
    return torch.cat(parts, 1)


def prompt_logprobs(engine: Engine, ids: list[int], likeliest: int) -> list[Logprob | None]:
    """Return the log-probability of every token of a text; None of the first."""
    features = prompt_features(engine, ids)
    told: list[Logprob | None] = [None]
    for begin in range(0, len(ids) - 1, ROWS):
        tokens = torch.tensor([ids[begin + 1 :][:ROWS]], device=features.device)
        before = features[:, begin : begin + tokens.shape[1]]
        columns = scored(engine.target, before, tokens, likeliest)
        told += entries(*(column.tolist()[0] for column in columns), likeliest)
    return told


def embedding(engine: Engine, ids: list[int], kind: str) -> list[float]:
    """Return the vector of a text, of length 1. kind: of `Pooling`"""
    states = prompt_features(engine, ids)[0].float()  # [T, F]
    one = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[kind]
    return torch.nn.functional.normalize(one, dim=0).tolist()
