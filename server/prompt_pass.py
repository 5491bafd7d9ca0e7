"""Begin completions with their prompts (`echo`), as harnesses for likelihoods ask for them.

Where log-probabilities are asked for, the target reads a prompt alone, in chunks as prompts are
read (run/session.py), in a cache of its own. The first token has no log-probability.

Trade-off: the prompt is read anew, and nothing else decodes meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode import PREFILL_CHUNK
from drafts.logprobs import Logprob, entries, scored
from files.machine import single_torch_thread
from kv_cache import KVCache, causal_window
from run.engine import Engine
from runtime import replace_fields
from server.batcher import Delta, Drafts, Scored
from server.parameters import RequestParams

ROWS = 64  # of logits at a time


def echoes(engine: Engine, asked: RequestParams) -> list[Delta]:
    """Return the prompts of a request as the first pieces of its answers, or as all of them.

    The decoding thread calls this.
    """
    pieces = []
    reason = None if asked.most else "length"
    for number, ids in enumerate(asked.prompts):
        stream = engine.tokenizer.stream(True)
        logprobs: list[Logprob | None] = []
        if asked.body.likeliest is not None:
            logprobs = prompt_logprobs(engine, ids, asked.body.likeliest)
        text = ""
        tokens = []
        for id, logprob in zip(ids, logprobs):
            tokens.append(Scored(id, len(text), logprob))
            text += stream.push([id])
        text = engine.tokenizer.decode(ids, True)
        drafts = Drafts(spans=(("", len(text), -1),))
        for sample in range(asked.body.n):
            choice = number * asked.body.n + sample
            pieces.append(Delta(choice, text, 0, reason, tokens, drafts))
    return pieces


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
