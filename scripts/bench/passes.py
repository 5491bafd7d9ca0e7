"""Time passes of a whole model over some rows, beside llama.cpp.

1. The model is loaded as generate.py loads it, and its cache holds `--cached` tokens.
2. A pass reads the rows behind them and computes the logits of every one; where there are more
   than 64, as of a prompt, those of the last one only. States replay a token, as in each cycle.
3. All run in turn. A measurement is some passes in a row, as in a text. Tables show median and
   least times, and medians of pairs.
4. llama.cpp reads a GGUF file of the same weights, behind as many tokens or some more.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kv_cache import KVCache, causal_window
from model import Transformer
from run.load import load
from run.options import GenerateConfig
from run.stats import peak_memory_bytes
from runtime import replace_fields
from scripts.bench.cases import PassesOptions
from scripts.bench.common import Report, seconds_of, times_by_rows
from scripts.bench.llama_peer import LlamaCpp, gguf_of

MOST_LOGITS = 64  # rows whose logits are all computed
REST_S = 0.02  # before a measurement, in which the threads of the one before go to sleep
IN_A_ROW = 6  # passes of a measurement, as in a text; of a prompt one


def filled_cache(target: Transformer, dtype: torch.dtype, cached: int, rows: int) -> KVCache:
    """Return a cache of `cached` tokens, whose memory is in use, with room for `rows` more."""
    cache = KVCache.empty(target.config, 1, cached + rows, dtype, "cpu")
    for buffer in (*cache.k, *cache.v):
        buffer.fill_(1)
    return cache


def seconds_of_pass(target: Transformer, cache: KVCache, cached: int, rows: int) -> float:
    """Time a pass over `rows` tokens behind the cached ones. Writes: `cache`."""
    window = causal_window(torch.tensor([cached]), rows, backend=target.backend)
    for state, _ in cache.states.recurrent() if cache.states else ():
        state.length.fill_(cached - 1)
    if rows > MOST_LOGITS:
        window = replace_fields(window, kept=torch.tensor([rows - 1]))
    tokens = torch.arange(rows)[None] % 1000  # [1, rows]

    def run() -> None:
        hidden = target(tokens, window.slots, cache, window)  # [1, rows, F]
        target.logits(hidden if rows <= MOST_LOGITS else hidden[:, -1:])

    return seconds_of(run, "cpu")


class PeerPasses:
    """Passes of llama.cpp behind some cached tokens, or some more: its states cannot be cut."""

    def __init__(self, file: Path, cached: int, most: int):
        """Load it. most: rows of a pass"""
        self.cached = cached
        self.context = cached + 2 * most
        self.peer = LlamaCpp(file, self.context, torch.get_num_threads(), max(cached, most))
        self.length = self.context  # tokens in its cache; as if it were full

    def seconds(self, rows: int) -> float:
        """Time a pass. Writes: the cache of llama.cpp."""
        if self.length + rows > self.context:
            self.peer.feed(list(range(self.cached)), 0)
            self.length = self.cached
        tokens = [i % 1000 for i in range(rows)]
        start = self.length
        self.length += rows
        every = rows <= MOST_LOGITS
        return seconds_of(lambda: self.peer.feed(tokens, start, every), "cpu")


def timed(seconds: Callable[[int], float], rows: int) -> float:
    """Return the seconds of a pass, the mean of some in a row."""
    time.sleep(REST_S)
    count = IN_A_ROW if rows <= MOST_LOGITS else 1
    return sum(seconds(rows) for _ in range(count)) / count


@torch.inference_mode()
def run(config: PassesOptions) -> None:
    """Measure and print the passes of a checkpoint."""
    model = {name: getattr(config, name) for name in ("checkpoint", "dtype", "quant", "kv")}
    engine = load(GenerateConfig(**model, draft="none", device="cpu", threads=config.threads))
    report = Report(config.json, **model)
    rows = [int(number) for number in config.rows.split(",")]
    cache = filled_cache(engine.target, engine.kv_dtype, config.cached, max(rows))
    seconds = partial(seconds_of_pass, engine.target, cache, config.cached)
    runs = {("gpt-eagle", n): partial(timed, seconds, n) for n in rows}
    memory = peak_memory_bytes("cpu")
    with tempfile.TemporaryDirectory() as folder:
        if config.llama_cpp:
            file = gguf_of(Path(config.checkpoint), config.llama_cpp, Path(folder))
            peer = PeerPasses(file, config.cached, max(rows))
            runs |= {("llama.cpp", n): partial(timed, peer.seconds, n) for n in rows}
        beside = dict.fromkeys(("gpt-eagle", "llama.cpp"), "gpt-eagle")
        times_by_rows(report, Path(config.checkpoint).name, runs, config.rounds, beside, {})
    both = f", with llama.cpp {peak_memory_bytes('cpu') / 1e9:.2f} GB" if config.llama_cpp else ""
    print(f"\npeak memory before the passes: {memory / 1e9:.2f} GB{both}")
