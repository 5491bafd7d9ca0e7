"""Time passes of a whole model over 1 to 1,200 tokens, on units of AMX tiles or caches in turn.

    python scripts/bench/passes.py --checkpoint checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/bench/passes.py --checkpoint DIR --dtype bfloat16 --rows 16,1200 --units none
    python scripts/bench/passes.py --units none --kv int8 --cached 8192 --rows 1,6,16

1. The model is loaded as generate.py loads it, and its cache holds `--cached` tokens.
2. A pass reads the tokens behind them and computes the logits of every one; where there are more
   than 64, as of a prompt, those of the last one only.
3. A round measures all numbers of rows, in an order that rotates; units and caches follow each
   other, so that a pair has the same conditions. The table shows least and median times, and the
   median of pairs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from base.parsing import one_line_errors, option, parse
from options import DEFAULT, GenerateConfig


@dataclass(frozen=True)
class PassesConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEFAULT, "a Hugging Face directory or a GGUF file")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    quant: str = option("none", "round the weights while loading", ("none", "int8", "int4"))
    rows: str = option("1,8,16,32,1200", "numbers of tokens, separated by commas")
    units: str = option("none,hardware", "units of AMX tiles, the first one to compare with")
    kv: str = option("", "time passes over a cache in this format, too", ("int8",))
    cached: int = option(128, "tokens in the cache", least=1)
    rounds: int = option(9, "measurements of each", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        if not all(rows.isdigit() and int(rows) for rows in self.rows.split(",")):
            raise ValueError(f"--rows must be numbers like 1,16,1200; it is {self.rows!r}")
        unknown = sorted(set(self.units.split(",")) - set(UNITS))
        if unknown:
            raise ValueError(f"--units must be among {', '.join(UNITS)}; {unknown[0]!r} is not")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(PassesConfig, "passes.py", __doc__) if __name__ == "__main__" else None

import torch

from kv_cache import KVCache, causal_window
from load import load
from model import Transformer
from scripts.bench.measure import environment

MOST_LOGITS = 64  # rows whose logits are all computed
UNITS = ("none", "hardware", "emulation")


def filled_cache(target: Transformer, dtype: torch.dtype, cached: int, rows: int) -> KVCache:
    """Return a cache of `cached` tokens, whose memory is in use, with room for `rows` more."""
    cache = KVCache.empty(target.config, 1, cached + rows, dtype, "cpu")
    for buffer in (*cache.k, *cache.v):
        buffer.fill_(1)
    for state in filter(None, cache.states):
        state.length.fill_(cached)
    return cache


def seconds_of_pass(target: Transformer, cache: KVCache, rows: int, cached: int) -> float:
    """Time a pass over `rows` tokens behind the cached ones. Writes: `cache`."""
    window = causal_window(torch.tensor([cached]), rows, backend=target.backend)
    tokens = torch.arange(rows)[None] % 1000  # [1, rows]
    began = time.perf_counter()
    hidden = target(tokens, window.slots, cache, window)  # [1, rows, F]
    target.logits(hidden if rows <= MOST_LOGITS else hidden[:, -1:])
    return time.perf_counter() - began


@torch.inference_mode()
def bench(config: PassesConfig) -> None:
    """Measure and print everything."""
    config.check()
    model = {"checkpoint": config.checkpoint, "dtype": config.dtype, "quant": config.quant}
    engine = load(GenerateConfig(**model, draft="none", device="cpu", threads=config.threads))
    units = config.units.split(",")
    for unit in units:
        if not torch.ops.gpt_eagle.use_tiles(unit):
            raise ValueError(f"--units {unit}: this machine has no AMX tiles; leave it out")
    print(", ".join(f"{key} {value}" for key, value in environment("cpu").items()))
    rows = [int(number) for number in config.rows.split(",")]
    target = engine.target
    dtypes = {"16 bits": torch.bfloat16} | ({config.kv: torch.int8} if config.kv else {})
    caches = {
        name: filled_cache(target, dtype, config.cached, max(rows))
        for name, dtype in dtypes.items()
    }
    ways = [(unit, cache) for unit in units for cache in caches]
    taken: dict[tuple, list[float]] = {(n, *way): [] for n in rows for way in ways}
    order = list(taken)
    for number in range(-1, config.rounds):
        shift = number * len(ways) % len(order)  # so that neighbours change
        for n, unit, cache in order[shift:] + order[:shift]:
            torch.ops.gpt_eagle.use_tiles(unit)
            seconds = seconds_of_pass(target, caches[cache], n, config.cached)
            if number >= 0:  # the first round warms up
                taken[n, unit, cache].append(seconds)
    print("\n| rows | unit | cache | least ms | median ms | over the first | over the first rows |")
    print("|---|---|---|---|---|---|---|")
    for (n, unit, cache), seconds in taken.items():
        pairs = median(a / b for a, b in zip(seconds, taken[(n, *ways[0])]))
        of_first = median(a / b for a, b in zip(seconds, taken[rows[0], unit, cache]))
        times = f"{min(seconds) * 1e3:.2f} | {median(seconds) * 1e3:.2f}"
        print(f"| {n} | {unit} | {cache} | {times} | {pairs:.2f} | {of_first:.2f} |")


def main() -> None:
    """Run the command line."""
    config = COMMAND or parse(PassesConfig, "passes.py", __doc__)
    with one_line_errors("passes.py"):
        bench(config)


if __name__ == "__main__":
    main()
