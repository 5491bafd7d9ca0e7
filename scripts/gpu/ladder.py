"""Measure a 7B-shaped stand-in on a GPU rung by rung, from PyTorch alone to all of our kernels.

    python3 scripts/gpu/ladder.py --quant int4 --json ladder.jsonl
    python3 scripts/gpu/ladder.py --dry_run             # on a CPU: all rungs, with the small demo

1. The target and the head are loaded once. A rung says which families of kernels PyTorch replaces,
   and whether steps are compiled and captured. On each rung vanilla, a tree and a chain decode the
   same prompts, twice; the second time counts.
2. A rung that fails, hangs or loses the device ends alone; the same command goes on behind it
   (attempts.py). Exit status 4: all rungs were tried, and one failed or has a fault.
3. A fault is a tree or a chain whose tokens are not vanilla's where all of our kernels run, since
   it has vanilla's bits by design. Other differences, from the first rung's vanilla or where
   PyTorch replaces a kernel, are faults where the best two scores are further apart than rounding
   explains (`TIE`).

The weights are random but for the demo inside: rates and times say something, texts do not.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from backends.switches import FAMILIES
from run.options import DEMO, GenerateConfig, pick_device
from run.parsing import one_line_errors, option, parse
from scripts.bench.row_log import Log
from scripts.gpu.attempts import Attempts

METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {"draft": "none"},
    "tree": {"draft": "eagle", "tree": "dynamic", "tree_depth": 6, "tree_topk": 8, "tree_size": 32},
    "chain": {"draft": "eagle", "tree": "chain", "tree_depth": 5},
    "lookup": {"draft": "ngram"},
}
USUAL = "vanilla,tree,chain"
PROMPTS = ["def read_lines(path):", "import os\n", "Question: What is 2 + 3?\nAnswer:"]
TIE = 0.05  # scores that are closer may change places by rounding in 16 bits


class Rung(NamedTuple):
    """A way to run the cycle on CUDA; on a CPU only `plain` has an effect."""

    plain: tuple[str, ...]  # families of our kernels that PyTorch replaces
    compiles: bool  # steps are compiled
    graphs: bool  # cycles are captured


BUT_PRODUCTS = tuple(family for family in FAMILIES if family != "products")
RUNGS: dict[str, Rung] = {
    "captured, PyTorch alone": Rung(FAMILIES, compiles=False, graphs=True),
    "captured, our products": Rung(BUT_PRODUCTS, compiles=False, graphs=True),
    "captured, without fused": Rung(("fused",), compiles=False, graphs=True),
    "captured": Rung((), compiles=False, graphs=True),
    "compiled, not captured": Rung((), compiles=True, graphs=False),
    "compiled": Rung((), compiles=True, graphs=True),
}
NAMES = [*RUNGS]


@dataclass(frozen=True)
class LadderConfig:
    """Options. Units and effects are in the help texts."""

    quant: str = option("none", "weights of the target", ("none", "int8", "int4"))
    group_size: int = option(0, "weights that share a scale in int4; 0: the default", least=0)
    quant_draft: str = option("", "of the head; default: as the target's", ("", "int8", "int4"))
    inflate: str = option("llama2-7b", "shape of the stand-in; none: the demo itself")
    numbered = "; ".join(f"{number} {name}" for number, name in enumerate(NAMES))
    rungs: str = option("", f"numbers, default all: {numbered}")
    plain: str = option("", f"families that PyTorch replaces on every rung: {', '.join(FAMILIES)}")
    methods: str = option(USUAL, f"of {', '.join(METHODS)}")
    temperature: float = option(0.0, "0 is greedy", least=0)
    batch_size: int = option(1, "prompts decoded together, in turn three different ones", least=1)
    tokens: int = option(128, "new ones of each prompt", least=1)
    seconds: float = option(75.0, "for one method of a rung, then the process is ended", least=1)
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    json: str = option("ladder.jsonl", "file to append to; the rungs in it are not climbed again")
    dry_run: bool = option(False, "on a CPU: the demo itself, one prompt, 8 tokens")

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        known = {str(number) for number in range(len(NAMES))}
        if self.rungs and not known.issuperset(self.rungs.split(",")):
            rule = f"--rungs takes numbers from 0 to {len(NAMES) - 1}, as 0,3"
            raise ValueError(f"{rule}; it is {self.rungs!r}")
        for family in filter(None, self.plain.split(",")):
            if family not in FAMILIES:
                raise ValueError(f"--plain: there is no {family}; use of {', '.join(FAMILIES)}")
        for method in self.methods.split(","):
            if method not in METHODS:
                raise ValueError(f"--methods: there is no {method!r}; use of {', '.join(METHODS)}")

    @property
    def chosen(self) -> list[str]:
        """The names of the rungs to climb."""
        if not self.rungs:
            return NAMES
        return [NAMES[int(number)] for number in self.rungs.split(",")]

    @property
    def options(self) -> dict[str, Any]:
        """The options of generate.py that all methods share."""
        shared = {"checkpoint": DEMO, "dtype": "bfloat16", "ignore_eos": True}
        if self.dry_run:
            shared["dtype"] = "float32"  # PyTorch's products in bf16 take seconds on most CPUs
        shared |= {"device": self.device, "quant": self.quant, "group_size": self.group_size}
        shared |= {"max_new_tokens": self.tokens}
        shared |= {"temperature": self.temperature, "batch_size": self.batch_size}
        if self.inflate != "none":
            shared["inflate"] = self.inflate
        return shared


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(LadderConfig, "ladder.py", __doc__) if __name__ == "__main__" else None

import torch

from backends.library import PLAIN, set_plain
from decode import build_cycles
from run.engine import Engine
from run.generate import Batch, first_ids, load
from run.load import with_draft
from run.warm_up import warm_up

Tokens = list[list[int]]  # new ones, of each prompt


# ------------------------------------------------------------------------------ one method


def set_rung(rung: Rung, plain: set[str]) -> None:
    """Choose the kernels. Writes: the switches; caches."""
    set_plain({*rung.plain, *plain})
    torch.compiler.reset()


def decode(engine: Engine, prompts: list[str]) -> dict[str, Any]:
    """Decode all prompts twice, the second time counted."""
    for _ in range(2):
        batch = Batch(engine, prompts)
        batch.decode_all(batch.streams)
    seen = batch.stats
    cycles = max(len(seen.live_sequences), 1)
    replays = [replay for buffers in engine.free for replay in buffers.replays.values()]
    return {
        "tokens_per_s": seen.tokens / seen.decode_s if seen.decode_s else 0.0,
        "tau": seen.tokens / cycles,
        "draft_ms": 1e3 * seen.draft_s / cycles,
        "verify_ms": 1e3 * seen.verify_s / cycles,
        "cycle_ms": 1e3 * seen.decode_s / cycles,
        "compile_s": engine.compile_s,
        "captured": sum(replay.graph is not None for replay in replays),
        "not_captured": sum(replay.graph is None for replay in replays),
        "tokens": [entry.tokens for entry in batch.entries],
    }


def first_difference(mine: list[int], other: list[int]) -> int | None:
    """Return the first place where tokens differ; None: nowhere."""
    return next((i for i, pair in enumerate(zip(mine, other)) if pair[0] != pair[1]), None)


@torch.no_grad()
def widest_gap(engine: Engine, prompts: list[str], mine: Tokens, other: Tokens) -> float | None:
    """Return how far apart the best two scores were where tokens differ first.

    Returns: the largest of all prompts; None where all tokens are equal.
    """
    gaps = []
    for prompt, a, b in zip(prompts, mine, other):
        place = first_difference(a, b)
        if place is None:
            continue
        ids = first_ids(engine, [prompt]) + b[:place]
        tokens = torch.tensor([ids], device=engine.target.norm.weight.device)  # [1, T]
        positions = torch.arange(len(ids), device=tokens.device)[None]
        features = engine.target(tokens, positions)[:, -1:]  # [1, 1, F]
        best = engine.target.logits(features).topk(2).values.flatten().tolist()
        gaps.append(best[0] - best[1])
    return max(gaps, default=None)


def fault_of(row: dict[str, Any], method: str, plain: set[str]) -> str:
    """Judge the differences of a row; "": none, or near ties."""
    gap = row["gap_to_vanilla"]
    if not plain and gap is not None:
        return f"the {method}'s tokens are not vanilla's; the best two scores were {gap:.3f} apart"
    for against in ("vanilla", "first"):
        gap = row[f"gap_to_{against}"]
        if gap is not None and gap > TIE:
            return f"differs from {against} where the best two scores are {gap:.3f} apart"
    return ""


# ------------------------------------------------------------------------------ the climb


class Climb:
    """A loaded target, and the tokens that later rows are compared with."""

    def __init__(self, config: LadderConfig, attempts: Attempts):
        """Load the target."""
        self.config = config
        self.attempts = attempts
        count = max(config.batch_size, 1 if config.dry_run else len(PROMPTS))
        self.prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
        self.plain = {*PLAIN, *filter(None, config.plain.split(","))}  # on every rung
        self.engines: dict[str, Engine] = {}  # without cycles, by method
        decoded = [row["tokens"] for row in attempts.rows if "tokens" in row]
        self.first: Tokens = decoded[0] if decoded else []
        began = time.monotonic()
        with attempts.watched():
            self.target = load(GenerateConfig(draft="none", compile=False, **config.options))
        print(f"loaded in {time.monotonic() - began:.1f} s", flush=True)

    def rung(self, name: str) -> None:
        """Try all methods on a rung."""
        vanilla: Tokens = []
        for method in self.config.methods.split(","):
            row = self.attempts.run(name, method, partial(self.measure, name, method, vanilla))
            if not vanilla:
                vanilla = row.get("tokens", [])
            gc.collect()  # closures of captured steps hold the caches
            if self.config.device != "cpu":
                torch.cuda.empty_cache()

    def measure(self, name: str, method: str, vanilla: Tokens) -> dict[str, Any]:
        """Decode by one method. vanilla: the rung's tokens; []: not decoded yet"""
        rung = RUNGS[name]
        set_plain(self.plain)
        engine = self.loaded(method)
        set_rung(rung, self.plain)
        if self.config.device != "cpu":
            how = {"compile": rung.compiles or None}
            engine = replace(engine, resolved=engine.resolved | how, captures=rung.graphs)
        engine = warm_up(build_cycles(engine))
        record = decode(engine, self.prompts)
        tokens = record["tokens"]
        self.first = self.first or tokens
        gap = partial(widest_gap, engine, self.prompts, tokens)
        record["gap_to_vanilla"] = gap(vanilla or tokens)
        record["gap_to_first"] = gap(self.first)
        record["fault"] = fault_of(record, method, {*rung.plain, *self.plain})
        return record

    def loaded(self, method: str) -> Engine:
        """Return the target with the drafter of a method, which is loaded once."""
        if method not in self.engines:
            drafting = dict(METHODS[method])
            if method != "vanilla" and self.config.quant_draft:
                drafting["quant_draft"] = self.config.quant_draft
            given = GenerateConfig(**self.config.options | drafting)
            device = str(self.target.device)
            self.engines[method] = with_draft(self.target, given, device)
        return self.engines[method]


def ladder(config: LadderConfig) -> None:
    """Climb. Exits with a status of attempts.py."""
    config.check()
    label = {"part": "ladder"}
    for name in ("quant", "group_size", "inflate", "temperature", "batch_size"):
        label[name] = getattr(config, name)
    use_device: Callable[[], object] = torch.cuda.synchronize
    if config.device == "cpu":
        use_device = int
    log = Log(config.json, "--json")
    attempts = Attempts(log, label, config.seconds, use_device)
    left = attempts.left(config.chosen)
    if left:
        climb = Climb(config, attempts)
        for name in left:
            climb.rung(name)
        set_plain(climb.plain)
    attempts.finish()


def main() -> None:
    config = COMMAND or parse(LadderConfig, "ladder.py", __doc__)
    with one_line_errors("ladder.py"):
        given = {"device": pick_device(config.device)}
        if config.dry_run:
            given = {"device": "cpu", "inflate": "none", "tokens": 8}
            torch.set_num_threads(1)  # threads of a small model wait for each other
        ladder(LadderConfig(**vars(config) | given))


if __name__ == "__main__":
    main()
