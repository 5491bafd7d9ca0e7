"""Time passes of a whole model over 1 to 1,200 tokens, on units of AMX tiles or caches in turn.

    python scripts/bench/passes.py --checkpoint checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/bench/passes.py --checkpoint DIR --dtype bfloat16 --rows 16,1200 --units none
    python scripts/bench/passes.py --units none --kv int8 --cached 8192 --rows 1,6,16
    python scripts/bench/passes.py --checkpoint qwen3.5-0.8b --llama_cpp --units none \
        --rows 1,4,16,64,512

1. The model is loaded as generate.py loads it, and its cache holds `--cached` tokens.
2. A pass reads the tokens behind them and computes the logits of every one; where there are more
   than 64, as of a prompt, those of the last one only. States replay a token, as in each cycle.
3. A round measures all numbers of rows, in an order that rotates; units and caches follow each
   other, so that a pair has the same conditions. A measurement is some passes in a row, as in a
   text. The table shows least and median times, and the median of pairs.
4. `--llama_cpp` times llama.cpp on the same GGUF file in turn with ours, behind as many tokens or
   some more. A name of random_file.py instead of a file is a random model of that shape.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.io import is_gguf
from run.options import DEFAULT, GenerateConfig
from run.parsing import one_line_errors, option, parse

# of random_file.py
SHAPES = ("qwen3.5-0.8b", "lfm2-350m", "lfm2-1.2b", "gemma4-e2b", "gpt-oss-20b")


@dataclass(frozen=True)
class PassesConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(
        DEFAULT,
        f"a Hugging Face directory or a GGUF file; or of {', '.join(SHAPES)}: random",
    )
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    quant: str = option("none", "round the weights while loading", ("none", "int8", "int4"))
    rows: str = option("1,8,16,32,1200", "numbers of tokens, separated by commas")
    units: str = option("none,hardware", "units of AMX tiles, the first one to compare with")
    kv: str = option("", "time passes over a cache in this format, too", ("int8",))
    cached: int = option(128, "tokens in the cache", least=1)
    rounds: int = option(9, "measurements of each", least=1)
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    llama_cpp: bool = option(False, "time llama.cpp on the same GGUF file, too")

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        if not all(rows.isdigit() and int(rows) for rows in self.rows.split(",")):
            raise ValueError(f"--rows must be numbers like 1,16,1200; it is {self.rows!r}")
        unknown = sorted(set(self.units.split(",")) - set(UNITS))
        if unknown:
            raise ValueError(f"--units must be among {', '.join(UNITS)}; {unknown[0]!r} is not")
        is_file = self.checkpoint in SHAPES or is_gguf(Path(self.checkpoint))
        if self.llama_cpp and not is_file:
            raise ValueError(f"--llama_cpp needs a GGUF file; {self.checkpoint} is none")
        if self.llama_cpp and find_spec("llama_cpp") is None:
            packages = "pip install -r scripts/bench/requirements-peers.txt"
            raise ValueError(f"--llama_cpp needs the package llama_cpp; {packages}")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(PassesConfig, "passes.py", __doc__) if __name__ == "__main__" else None

import torch

from kv_cache import KVCache, causal_window
from model import Transformer
from run.load import load
from run.stats import peak_memory_bytes
from runtime import replace_fields
from scripts.bench import random_file
from scripts.bench.llama_peer import LlamaCpp
from scripts.bench.measure import environment

MOST_LOGITS = 64  # rows whose logits are all computed
UNITS = ("none", "hardware", "emulation")
PEER = ("llama.cpp", "16 bits")  # in the place of a unit and a cache
REST = 0.02  # seconds before a measurement, in which the threads of the one before go to sleep
IN_A_ROW = 6  # passes of a measurement, as in a text; of a prompt one


def filled_cache(target: Transformer, dtype: torch.dtype, cached: int, rows: int) -> KVCache:
    """Return a cache of `cached` tokens, whose memory is in use, with room for `rows` more."""
    cache = KVCache.empty(target.config, 1, cached + rows, dtype, "cpu")
    for buffer in (*cache.k, *cache.v):
        buffer.fill_(1)
    return cache


def seconds_of_pass(target: Transformer, cache: KVCache, rows: int, cached: int) -> float:
    """Time a pass over `rows` tokens behind the cached ones. Writes: `cache`."""
    window = causal_window(torch.tensor([cached]), rows, backend=target.backend)
    for state, _ in cache.states.recurrent() if cache.states else ():
        state.length.fill_(cached - 1)
    if rows > MOST_LOGITS:
        window = replace_fields(window, kept=torch.tensor([rows - 1]))
    tokens = torch.arange(rows)[None] % 1000  # [1, rows]
    began = time.perf_counter()
    hidden = target(tokens, window.slots, cache, window)  # [1, rows, F]
    target.logits(hidden if rows <= MOST_LOGITS else hidden[:, -1:])
    return time.perf_counter() - began


def peer_passes(file: Path, cached: int, most: int) -> Callable[[int], float]:
    """Load llama.cpp. Returns: a function that times a pass over some rows. most: of them"""
    context = cached + 2 * most
    peer = LlamaCpp(file, context, torch.get_num_threads(), max(cached, most))
    length = context

    def seconds(rows: int) -> float:
        nonlocal length
        if length + rows > context:
            peer.api.llama_memory_clear(peer.api.llama_get_memory(peer.context), True)
            peer.feed(list(range(cached)), 0)
            length = cached
        began = time.perf_counter()
        peer.feed([i % 1000 for i in range(rows)], length, every=rows <= MOST_LOGITS)
        length += rows
        return time.perf_counter() - began

    return seconds


def bench(config: PassesConfig) -> None:
    """Measure and print everything."""
    config.check()
    if config.checkpoint not in random_file.SHAPES:
        measure(config)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{config.checkpoint}.gguf"
        random_file.write(random_file.SHAPES[config.checkpoint](), file)
        measure(replace(config, checkpoint=str(file)))


@torch.inference_mode()
def measure(config: PassesConfig) -> None:
    """Measure and print the passes of a checkpoint."""
    model = {"checkpoint": config.checkpoint, "dtype": config.dtype, "quant": config.quant}
    ids = {"prompt_ids": "5"}  # a random file has no vocabulary
    engine = load(
        GenerateConfig(**model, **ids, draft="none", device="cpu", threads=config.threads)
    )
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
    peer = None
    if config.llama_cpp:
        seconds_of_pass(target, caches["16 bits"], max(rows), config.cached)
        own = peak_memory_bytes("cpu")
        peer = peer_passes(Path(config.checkpoint), config.cached, max(rows))
        ways.append(PEER)
    taken: dict[tuple, list[float]] = {(n, *way): [] for n in rows for way in ways}
    order = list(taken)
    for number in range(-1, config.rounds):
        shift = number * len(ways) % len(order)  # so that neighbours change
        for n, unit, cache in order[shift:] + order[:shift]:
            time.sleep(REST)
            count = IN_A_ROW if n <= MOST_LOGITS else 1
            if (unit, cache) == PEER:
                seconds = sum(peer(n) for _ in range(count))
            else:
                torch.ops.gpt_eagle.use_tiles(unit)
                operands = (target, caches[cache], n, config.cached)
                seconds = sum(seconds_of_pass(*operands) for _ in range(count))
            if number >= 0:  # the first round warms up
                taken[n, unit, cache].append(seconds / count)
    print("\n| rows | unit | cache | least ms | median ms | over the first | over the first rows |")
    print("|---|---|---|---|---|---|---|")
    for (n, unit, cache), seconds in taken.items():
        pairs = median(a / b for a, b in zip(seconds, taken[(n, *ways[0])]))
        of_first = median(a / b for a, b in zip(seconds, taken[rows[0], unit, cache]))
        times = f"{min(seconds) * 1e3:.2f} | {median(seconds) * 1e3:.2f}"
        print(f"| {n} | {unit} | {cache} | {times} | {pairs:.2f} | {of_first:.2f} |")
    if peer:
        both = peak_memory_bytes("cpu")
        print(f"peak memory: {own / 1e9:.2f} GB, with llama.cpp beside ours {both / 1e9:.2f} GB")


def main() -> None:
    """Run the command line."""
    config = COMMAND or parse(PassesConfig, "passes.py", __doc__)
    with one_line_errors("passes.py"):
        bench(config)


if __name__ == "__main__":
    main()
