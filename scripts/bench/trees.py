"""Decode without a tree, with each tree, and with the choice between them, in one process over one target.

    python scripts/bench/trees.py --inflate llama2-7b --quant int4 --json benchmarks/gpu.jsonl
    python scripts/bench/trees.py --inflate llama2-7b --quant_draft int4 --tree 6/8/32 --profile
    python scripts/bench/trees.py --inflate tiny-0.5b --threads 3 --temperature 1           # on a CPU
    python scripts/bench/trees.py --eagle heads/broken                                      # the demo itself

1. The target is loaded, or its stand-in built where it runs, and compiled once; vanilla decoding and the trees of one
   size are its presets, each held fixed; `auto` chooses among them. `--static` compiles EAGLE-1's tree as well.
   `--tree` compiles vanilla decoding, which keeps no head's cache then, and one tree only.
2. All methods run each prompt in turn, forwards and backwards. A row per method: tokens/s, how many times faster than
   vanilla it decoded a prompt (median and quartiles), tau, the time of a cycle, drafting and verifying apart, the share
   of sequences equal to vanilla's, and the time that reading the weights once would take at the measured bandwidth,
   relative to the verification's.
3. `at_tau_4.65` is a projection and no measurement: what this cycle would give at the tau that EAGLE-2's paper reports
   for a 7B model. A stand-in's own tau is that of the demo.
4. `--random_twin` has random weights in the same shape, to show that a stand-in's zeros save no time; vanilla only.
5. `--profile` lists the kernels of one cycle of each method: their time, and that between them (profile_cycle.py).
   `--replays` runs one cycle so often from the same state, and counts results that differ from the first in any bit.
A method that fails is written down with its error, and the others go on; the exit status is then 1.
"""

from __future__ import annotations

import re
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import check_ranges, one_line_errors, option, parse
from decode import Engine
from files import read_jsonl
from generate import Batch, load
from hf.config import resolve_draft
from options import DEMO, ROOT, pick_device
from runtime import WARM_UPS, tree_leaves
from scripts.bench import measure
from scripts.bench.profile_cycle import busy_us, one_replay, replay_table
from session import Session
from stats import Stats

PUBLISHED_TAU = 4.65  # EAGLE-2 (arXiv 2406.16858), T = 0, mean of its tasks: LLaMA2-Chat 7B 4.64, Vicuna 7B 4.68


@dataclass
class TreesConfig:
    checkpoint: str = option(DEMO, "the small model, with its head beside it")
    eagle: str = option("", "the head, where it does not lie beside the checkpoint")
    inflate: str = option("", "shape of the stand-in; empty: the checkpoint as it is")
    quant: str = option("none", "none, int8 or int4", ("none", "int8", "int4"))
    quant_draft: str = option(
        "", "the same for the head; default: as generate.py has it", ("none", "int8", "int4")
    )
    tree: str = option(
        "", "one dynamic tree: depth/top-k/size, as 6/8/32; empty: trees of every size, and auto"
    )
    static: bool = option(False, "also EAGLE-1's static tree")
    random_twin: bool = option(False, "random weights instead; vanilla only")
    prompts: str = option(str(ROOT / "data" / "eval" / "demo.jsonl"), "JSONL with `turns`")
    limit: int = option(5, "prompts", least=1)
    max_new_tokens: int = option(128, "tokens per prompt", least=2)
    temperature: float = option(0.0, "0 is greedy")
    profile: bool = option(False, "list the kernels of one cycle")
    replays: int = option(0, "cycles from one state whose results are compared", least=0)
    threads: int = option(0, "CPU threads; 0 tree_leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    json: str = option("", "JSON lines are appended here, one per method")

    def check(self) -> None:
        """Raises: ValueError for a value that cannot work."""
        check_ranges(self)
        if self.tree and not re.fullmatch(r"\d+/\d+/\d+", self.tree):
            raise ValueError(f"--tree must be depth/top-k/size, as 6/8/32; it is {self.tree}")
        for name in ("tree", "static", "quant_draft"):
            if self.random_twin and getattr(self, name):
                raise ValueError(f"--random_twin has no head; drop --{name}")


class Always(NamedTuple):
    """Chooses one preset, or the largest below it that makes sense."""

    preset: int
    reader: int = -1  # as `runtime.LargestTree`

    def next(self, limit: int) -> int:
        return min(self.preset, limit)

    def observe(self, preset: int, accepted: float, seconds: float, rows: int) -> None:
        pass


def load_target(config: TreesConfig, device: str) -> Engine:
    """Load, with a head and trees of every size; without where one tree is asked for, which `makers` adds."""
    plain = config.random_twin or bool(config.tree)
    head = {} if plain else {"eagle": config.eagle, "quant_draft": config.quant_draft}
    return load(
        checkpoint=config.checkpoint, inflate=config.inflate, random_twin=config.random_twin, quant=config.quant,
        draft="none" if plain else "eagle", dtype="bfloat16", device=device, compile=True, ignore_eos=True,
        temperature=config.temperature, max_new_tokens=config.max_new_tokens, **head,
    )  # fmt: skip


def makers(engine: Engine, config: TreesConfig) -> dict[str, Callable[[], Engine]]:
    """What makes each method, over the same target: every preset held fixed, the choice between them, other trees.

    Raises: ValueError for a tree or a head that cannot be.
    """

    def tree(**options: Any) -> Callable[[], Engine]:
        head = {"draft": "eagle", "eagle": config.eagle, "quant_draft": config.quant_draft}
        chosen = replace(engine.config, **head, **options)
        chosen.check()  # at once: a user's mistake is no failure of a method
        return partial(measure.with_config, engine, resolve_draft(chosen, Path(chosen.checkpoint)))

    presets = engine.drafter.presets
    if len(presets) == 1:
        made: dict[str, Callable[[], Engine]] = {"vanilla": lambda: engine}
    else:
        names = ["vanilla" if preset.name == "none" else preset.name for preset in presets]
        made = {
            name: partial(replace, engine, tree_policy=Always(number))
            for number, name in enumerate(names)
        }
        made["auto"] = lambda: engine
    if config.tree:
        depth, topk, size = map(int, config.tree.split("/"))
        shape = {"tree": "dynamic", "tree_depth": depth, "tree_topk": topk, "tree_size": size}
        made[f"dynamic {config.tree}"] = tree(**shape)
    if config.static:
        made["static"] = tree(tree="static")
    return made


def different_replays(engine: Engine, ids: list[int], replays: int) -> int:
    """Run a cycle again and again from one state. Returns: how often its results were not, bit for bit, the first's."""
    session = Session(engine, [(0, 0)])
    decoding = session.run([ids])
    next(decoding)
    while session.waiting:  # chunks of the prompt
        next(decoding)
    preset = engine.tree_policy.next(len(engine.cycles) - 1)
    for _ in range(1 + WARM_UPS):
        session.time_cycle(preset)
    saved, first = [x.clone() for x in tree_leaves(session.state)], []
    different = torch.zeros((), dtype=torch.long, device=session.state.pos.device)
    for _ in range(1 + replays):
        for buffer, value in zip(tree_leaves(session.state), saved):
            buffer.copy_(value)
        session.time_cycle(preset)
        state = tree_leaves(session.state)
        first = first or [x.clone() for x in state]
        different += ~torch.stack([(x == y).all() for x, y in zip(state, first)]).all()
    return int(different)


def sequence_of(
    engine: Engine, method: str, done: Batch, vanilla: list[list[int]], bandwidth: float
) -> dict[str, Any]:
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
        row["tree_auto"] = engine.tree_policy.table(stats.presets)
    return row


class Record:
    """The rows, which are printed and appended as they come."""

    def __init__(self, config: TreesConfig):
        self.lines, self.well = measure.Log(config.json, "--json"), True
        self.facts = {"part": "models"} | asdict(config)
        for name in ("checkpoint", "eagle", "prompts", "json"):
            self.facts[name] = measure.shown_path(self.facts[name])

    def add(self, row: dict[str, Any], **unprinted: Any) -> None:
        """Print and append a row."""
        self.lines.add([self.facts | row | unprinted])
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    def failed(self, method: str, error: Exception) -> None:
        """Note that a method failed."""
        traceback.print_exception(error)
        said = str(error).strip().partition("\n")[0][:200]
        self.add({"method": method, "error": f"{type(error).__name__}: {said}"})
        self.well = False


def prepare(
    engine: Engine, config: TreesConfig, prompts: list[Any], log: Record
) -> dict[str, tuple[Engine, Batch]]:
    """Make the methods, one after the other. A round that does not count is logged: the first of everything is slow."""
    methods: dict[str, tuple[Engine, Batch]] = {}
    for name, make in makers(engine, config).items():
        try:
            each = make()
            done = Batch(each, prompts)
            if name != "auto":  # whose first choices count
                done.run(done.groups[0])
        except Exception as error:  # whatever it is, it belongs in the record
            log.failed(name, error)
            continue
        if done.stats.decode_s:
            ms = 1e3 * done.stats.decode_s / len(done.stats.live_rows)
            log.add({"warm_up": name, "compile_s": each.compile_s, "cycle_ms": ms})
        done.stats, done.entries, done.trace = Stats(), [], []
        methods[name] = each, done
    return methods


def look_closer(methods: dict[str, tuple[Engine, Batch]], config: TreesConfig, log: Record) -> None:
    """List the kernels of a cycle of each method, and compare its results, where that is asked for."""
    for name, (engine, done) in methods.items():
        if name == "auto":  # runs the others' cycles
            continue
        try:
            if config.profile:
                ran = one_replay(engine, done.first[0])
                print(f"\none replay, {name}\n{replay_table(ran)}\n", flush=True)
                gap = sum(span.gap_us for span in ran if span.gap_us > 0)
                log.add(
                    {"replay": name, "kernels": len(ran), "busy_us": busy_us(ran), "gaps_us": gap},
                    spans=ran,
                )
            if config.replays:
                different = different_replays(engine, done.first[0], config.replays)
                log.add({"replayed": name, "replays": config.replays, "different": different})
                log.well &= not different
        except Exception as error:  # whatever it is, it belongs in the record
            log.failed(name, error)


def bench(config: TreesConfig) -> None:
    """Decode in turn, print and append the rows. Exits with status 1 when a method failed."""
    config.check()
    log = Record(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    bandwidth = measure.read_bandwidth(device, 5).median
    prompts = [row["turns"] for row in read_jsonl(Path(config.prompts), "--prompts")][
        : config.limit
    ]
    engine = load_target(config, device)
    log.facts |= {"stand_in": engine.target.config.stand_in, "bandwidth_bytes_per_s": bandwidth}
    log.facts |= {"load_s": engine.load_s, "compile_s": engine.compile_s} | measure.environment(
        device
    )
    print(f"# {log.facts}", flush=True)
    methods = prepare(engine, config, prompts, log)
    if "vanilla" not in methods:  # nothing to compare with
        sys.exit(1)
    seconds = {name: [] for name in methods}  # per token, of each prompt
    for number in tqdm(range(len(prompts)), unit="prompt", mininterval=5):
        for name, (_, done) in list(methods.items())[:: 1 if number % 2 else -1]:
            before = replace(done.stats)
            done.run(done.groups[number])
            seconds[name].append(
                (done.stats.decode_s - before.decode_s) / (done.stats.tokens - before.tokens)
            )
    vanilla = [entry.new for entry in methods["vanilla"][1].entries]
    for name, (each, done) in methods.items():
        row = sequence_of(each, name, done, vanilla, bandwidth)
        ratios = [plain / ours for plain, ours in zip(seconds["vanilla"], seconds[name])]
        log.add(row | {"speedup": measure.Series.quartiles(ratios)})
    look_closer(methods, config, log)
    if not log.well:
        sys.exit(1)


def main() -> None:
    config = parse(TreesConfig, "trees.py", __doc__)
    with one_line_errors("trees.py"):
        bench(config)


if __name__ == "__main__":
    main()
