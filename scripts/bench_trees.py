"""Decode without a tree, with each tree, and with the choice between them, in one process over one target.

    python scripts/bench_trees.py --inflate llama2-7b --quant int4 --json benchmarks/gpu.jsonl
    python scripts/bench_trees.py --inflate tiny-0.5b --threads 3 --temperature 1           # on a CPU
    python scripts/bench_trees.py --eagle heads/broken                                      # the demo itself

1. The target is loaded, or its stand-in built where it runs, and compiled once; vanilla decoding and the trees of one
   size are its presets, each held fixed; `auto` chooses among them. `--static` compiles EAGLE-1's tree as well.
2. All methods run each prompt in turn, forwards and backwards. A row per method: tokens/s, how many times faster than
   vanilla it decoded a prompt (median and quartiles), tau, the time of a cycle, drafting and verifying apart, the share
   of sequences equal to vanilla's, and the time that reading the weights once would take at the measured bandwidth,
   relative to the verification's.
3. `at_tau_4.65` is a projection and no measurement: what this cycle would give at the tau that EAGLE-2's paper reports
   for a 7B model. A stand-in's own tau is that of the demo.
4. `--random_twin` has random weights in the same shape, to show that a stand-in's zeros save no time; vanilla only.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import _path
import measure
from decode import Engine
from generate import Batch, load
from options import DEMO, one_line_errors, option, parse, pick_device, read_jsonl
from stats import Stats

PUBLISHED_TAU = 4.65  # EAGLE-2 (arXiv 2406.16858), T = 0, mean of its tasks: LLaMA2-Chat 7B 4.64, Vicuna 7B 4.68


@dataclass
class TreesConfig:
    checkpoint: str = option(DEMO, "the small model, with its head beside it")
    eagle: str = option("", "the head, where it does not lie beside the checkpoint")
    inflate: str = option("", "shape of the stand-in; empty: the checkpoint as it is")
    quant: str = option("none", "none, int8 or int4", ("none", "int8", "int4"))
    static: bool = option(False, "also EAGLE-1's static tree")
    random_twin: bool = option(False, "random weights instead; vanilla only")
    prompts: str = option(str(_path.ROOT / "data" / "eval" / "demo.jsonl"), "JSONL with `turns`")
    limit: int = option(5, "prompts", least=1)
    max_new_tokens: int = option(128, "tokens per prompt", least=2)
    temperature: float = option(0.0, "0 is greedy")
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    json: str = option("", "JSON lines are appended here, one per method")


class Always(NamedTuple):
    """Chooses one preset, or the largest below it that makes sense."""

    preset: int

    def next(self, limit: int) -> int:
        return min(self.preset, limit)

    def observe(self, preset: int, accepted: float, seconds: float) -> None:
        pass


def methods_of(engine: Engine, config: TreesConfig) -> dict[str, Engine]:
    """Every preset held fixed, the choice between them, and the static tree, over the same target."""
    if config.random_twin:
        return {"vanilla": engine}
    names = [preset.name for preset in engine.drafter.presets]
    fixed = {name: replace(engine, chooser=Always(number)) for number, name in enumerate(names)}
    methods = {"vanilla": fixed.pop("none"), **fixed, "auto": engine}
    if config.static:
        methods["static"] = measure.with_config(engine, replace(engine.config, tree="static"))
    return methods


def row_of(engine: Engine, method: str, done: Batch, vanilla: list[list[int]], bandwidth: float) -> dict[str, Any]:
    """What one method measured, over all prompts."""
    stats = done.stats
    cycles = len(stats.live_rows)
    cached = statistics.mean(len(e.prompt) + len(e.new) / 2 for e in done.entries)
    least_s = measure.pass_bytes(engine.target, cached) / bandwidth
    tokens = [entry.new for entry in done.entries]
    row = {
        "method": method,
        "tokens_per_s": stats.tokens / stats.decode_s,
        "tau": sum(stats.accept_lengths) / len(stats.accept_lengths) + 1,
        "cycle_ms": 1e3 * stats.decode_s / cycles,
        "draft_ms": 1e3 * stats.draft_s / cycles,
        "verify_ms": 1e3 * stats.verify_s / cycles,
        "of_ceiling": least_s / (stats.verify_s / cycles),
        "identical": sum(a == b for a, b in zip(tokens, vanilla)) / len(tokens),
        "at_tau_4.65": PUBLISHED_TAU * cycles / stats.decode_s if method != "vanilla" else None,
    }
    if method == "auto":
        row["tree_auto"] = engine.chooser.table(stats.presets)
    return row


def bench(config: TreesConfig) -> None:
    """Decode in turn, print and append the rows."""
    log = measure.Log(config.json, "--json")
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    bandwidth = measure.read_bandwidth(device, 5).median
    prompts = [row["turns"] for row in read_jsonl(Path(config.prompts), "--prompts")][: config.limit]
    engine = load(
        checkpoint=config.checkpoint, inflate=config.inflate, random_twin=config.random_twin, quant=config.quant,
        draft="none" if config.random_twin else "eagle", eagle=config.eagle, dtype="bfloat16", device=device,
        compile=True, temperature=config.temperature, max_new_tokens=config.max_new_tokens, ignore_eos=True,
    )  # fmt: skip
    facts = {"part": "models"} | asdict(config)
    facts |= {name: measure.shown_path(facts[name]) for name in ("checkpoint", "eagle", "prompts", "json")}
    facts |= {"stand_in": engine.target.config.stand_in, "bandwidth_bytes_per_s": bandwidth}
    facts |= {"load_s": engine.load_s, "compile_s": engine.compile_s} | measure.environment(device)
    print(f"# {facts}", flush=True)
    methods = {name: (each, Batch(each, prompts)) for name, each in methods_of(engine, config).items()}
    for name, (_, done) in methods.items():  # a round that does not count: the first of everything is slow
        if name != "auto":  # whose first choices count
            done.run(done.groups[0])
            done.stats, done.entries, done.trace = Stats(), [], []
    seconds = {name: [] for name in methods}  # per token, of each prompt
    for number in tqdm(range(len(prompts)), unit="prompt", mininterval=5):
        for name, (_, done) in list(methods.items())[:: 1 if number % 2 else -1]:
            before = replace(done.stats)
            done.run(done.groups[number])
            seconds[name].append((done.stats.decode_s - before.decode_s) / (done.stats.tokens - before.tokens))
    vanilla = [entry.new for entry in methods["vanilla"][1].entries]
    for name, (each, done) in methods.items():
        row = row_of(each, name, done, vanilla, bandwidth)
        ratios = [plain / ours for plain, ours in zip(seconds["vanilla"], seconds[name])]
        row["speedup"] = measure.Series.quartiles(ratios)
        log.add([facts | row])
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def main() -> None:
    config = parse(TreesConfig, "bench_trees.py", __doc__)
    with one_line_errors("bench_trees.py"):
        bench(config)


if __name__ == "__main__":
    main()
