"""Begin completions with their prompts (`echo`), as harnesses for likelihoods ask for them.

Where log-probabilities are asked for, the target reads a prompt alone, in a cache of its own. The
first token has no log-probability.

Trade-off: the prompt is read anew, and nothing else decodes meanwhile.
"""

from __future__ import annotations

import torch

from drafts.logprobs import Logprob, entries, scored
from files.machine import single_torch_thread
from kv_cache import KVCache, causal_window
from run.engine import Engine
from runtime import replace_fields
from server.batcher import Delta, Drafts, Scored
from server.parameters import RequestParams

CHUNK = 64  # tokens of a prompt that are read and scored at a time


def echoes(engine: Engine, asked: RequestParams) -> list[Delta]:
    """Return the prompts of a request as the first pieces of its answers, or as all of them.

    The decoding thread calls this.
    """
    pieces = []
    samples = asked.body.n
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
        piece = Delta(0, text, 0, None if asked.most else "length", tokens, drafts)
        pieces += [piece._replace(choice=number * samples + sample) for sample in range(samples)]
    return pieces


def prompt_logprobs(engine: Engine, ids: list[int], likeliest: int) -> list[Logprob | None]:
    """Return the log-probability of every token of a text; None of the first."""
    target = engine.target
    device = engine.device
    cache = KVCache.empty(target.config, 1, len(ids) + CHUNK, engine.kv_dtype, str(device))
    told: list[Logprob | None] = [None]
    for begin in range(0, len(ids) - 1, CHUNK):
        tokens = torch.tensor([ids[begin : begin + CHUNK]], device=device)  # [1, T]
        following = torch.tensor([ids[begin + 1 :][:CHUNK]], device=device)  # [1, T or T - 1]
        start = torch.tensor([begin], device=device)
        window = causal_window(start, tokens.shape[1], backend=target.backend)
        window = replace_fields(window, kept=torch.tensor([tokens.shape[1]], device=device))
        with single_torch_thread(target.program is not None):
            features = target(tokens, window.slots, cache, window)  # [1, T, F]
        columns = scored(target, features[:, : following.shape[1]], following, likeliest)
        told += entries(*(column.tolist()[0] for column in columns), likeliest)
    return told
