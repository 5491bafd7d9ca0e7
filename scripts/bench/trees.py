"""Decode without a tree, with each tree, and with the choice among them, over one target.

    python scripts/bench/trees.py --inflate llama2-7b --quant int4 --json benchmarks/gpu.jsonl
    python scripts/bench/trees.py --inflate llama2-7b --quant_draft int4 --tree 6/8/32 --profile
    python scripts/bench/trees.py --inflate tiny-0.5b --threads 3 --temperature 1  # on a CPU
    python scripts/bench/trees.py --eagle HEAD                                     # the demo itself

1. The target, or its stand-in, is loaded and compiled once. Vanilla decoding and the trees of each
   size are its presets, each held fixed; `auto` chooses among them. `--static` adds EAGLE-1's tree.
   `--tree` compiles vanilla decoding, then without a head's cache, and one tree only.
2. All methods run each prompt in turn, forwards and backwards. Fields of a method: tokens/s,
   speedup over vanilla per prompt (median and quartiles), tau, milliseconds of a cycle, of drafting
   and of verifying, the share of sequences equal to vanilla's, and the time of reading the weights
   once at the measured bandwidth over that of a verification (`of_ceiling`).
3. `at_tau_4.65` is a projection: tokens/s of this cycle at the tau of EAGLE-2's paper for a 7B
   model. A stand-in's own tau is that of the demo.
4. `--random_twin` has random weights in the same shape, to show that a stand-in's zeros save no
   time; vanilla only.
5. `--profile` lists the kernels of one cycle of each method and the gaps between them
   (profile_cycle.py). `--replays` repeats one cycle from the same state, and counts results that
   differ from the first in any bit.

A method that fails is logged with its error, and the others go on; the exit status is then 1.
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
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import check_ranges, one_line_errors, option, parse
from decode import Engine
from files import read_jsonl
from generate import Batch, load
from hf.config import resolve_draft
from options import DEMO, ROOT, pick_device
from runtime import tensors_of
from scripts.bench import measure
from scripts.bench.profile_cycle import busy_us, one_replay, replay_table, warm_session
from session import Session
from stats import Stats

# Source: EAGLE-2 (arXiv 2406.16858), T = 0, mean of its tasks: LLaMA2-Chat 7B 4.64, Vicuna 7B 4.68
PUBLISHED_TAU = 4.65


@dataclass
class TreesConfig:
    """Options. Units and effects are in the help texts."""

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
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    json: str = option("", "JSON lines are appended here, one per method")

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        check_ranges(self)
        if self.tree and not re.fullmatch(r"\d+/\d+/\d+", self.tree):
            raise ValueError(f"--tree must be depth/top-k/size, as 6/8/32; it is {self.tree}")
        for name in ("tree", "static", "quant_draft"):
            if self.random_twin and getattr(self, name):
                raise ValueError(f"--random_twin has no head; drop --{name}")


class Always(NamedTuple):
    """A tree policy: one preset, or the largest below it that makes sense."""

    preset: int
    prefill_tree: int = -1  # as `drafters.LargestTree`

    def next(self, limit: int) -> int:
        """Return the preset of the next cycle."""
        return min(self.preset, limit)

    def observe(self, preset: int, accepted: float, seconds: float, sequences: int) -> None:
        """Learn nothing from a cycle."""


def load_target(config: TreesConfig, device: str) -> Engine:
    """Load the target, with a head and trees of every size.

    With --tree it has no head; `makers` adds the one tree.
    """
    options = {"draft": "none"}
    if not config.random_twin and not config.tree:
        options = {"draft": "eagle", "eagle": config.eagle, "quant_draft": config.quant_draft}
    return load(
        checkpoint=config.checkpoint,
        inflate=config.inflate,
        random_twin=config.random_twin,
        quant=config.quant,
        dtype="bfloat16",
        device=device,
        compile=True,
        ignore_eos=True,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        **options,
    )


def makers(engine: Engine, config: TreesConfig) -> dict[str, Callable[[], Engine]]:
    """Return a maker of each method over the same target.

    The methods are every preset held fixed, the choice among them, and other trees.
    Raises: ValueError for a tree or a head that cannot be.
    """

    def tree(**options: Any) -> Callable[[], Engine]:
        head = {"draft": "eagle", "eagle": config.eagle, "quant_draft": config.quant_draft}
        chosen = replace(engine.config, **head, **options)
        chosen.check()  # at once: a user's mistake is no failure of a method
        return partial(measure.with_config, engine, resolve_draft(chosen, Path(chosen.checkpoint)))

    made: dict[str, Callable[[], Engine]] = {}
    presets = engine.drafter.presets
    if len(presets) == 1:
        made["vanilla"] = lambda: engine
    else:
        for number, preset in enumerate(presets):
            name = "vanilla" if preset.name == "none" else preset.name
            made[name] = partial(replace, engine, tree_policy=Always(number))
        made["auto"] = lambda: engine
    if config.tree:
        depth, topk, size = map(int, config.tree.split("/"))
        shape = {"tree": "dynamic", "tree_depth": depth, "tree_topk": topk, "tree_size": size}
        made[f"dynamic {config.tree}"] = tree(**shape)
    if config.static:
        made["static"] = tree(tree="static")
    return made


def different_replays(engine: Engine, ids: list[int], replays: int) -> int:
    """Repeat a cycle from one state. Returns: how many results differ from the first in any bit."""
    session, preset = warm_session(engine, ids)
    saved = [x.clone() for x in tensors_of(session.state)]
    first = [x.clone() for x in _replay(session, preset, saved)]
    different = torch.zeros((), dtype=torch.long, device=session.state.pos.device)
    for _ in range(replays):
        state = _replay(session, preset, saved)
        different += ~torch.stack([(x == y).all() for x, y in zip(state, first)]).all()
    return int(different)


def _replay(session: Session, preset: int, saved: list[Tensor]) -> list[Tensor]:
    """Run a cycle from a saved state. Returns: the new state."""
    for buffer, value in zip(tensors_of(session.state), saved):
        buffer.copy_(value)
    session.time_cycle(preset)
    return tensors_of(session.state)


def method_row(
    engine: Engine, method: str, done: Batch, vanilla: list[list[int]], bandwidth: float
) -> dict[str, Any]:
    """Return the measurements of one method, over all prompts."""
    stats = done.stats
    cycles = len(stats.live_sequences)
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
    """The log, printed and appended to row by row."""

    def __init__(self, config: TreesConfig):
        self.lines = measure.Log(config.json, "--json")
        self.well = True  # no method failed
        self.shared = {"part": "models"} | asdict(config)
        for name in ("checkpoint", "eagle", "prompts", "json"):
            self.shared[name] = measure.shown_path(self.shared[name])

    def add(self, row: dict[str, Any], **unprinted: Any) -> None:
        """Print and append a row."""
        self.lines.add([self.shared | row | unprinted])
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    def failed(self, method: str, error: Exception) -> None:
        """Log the failure of a method."""
        traceback.print_exception(error)
        message = str(error).strip().partition("\n")[0][:200]
        self.add({"method": method, "error": f"{type(error).__name__}: {message}"})
        self.well = False


def prepare(
    engine: Engine, config: TreesConfig, prompts: list[Any], log: Record
) -> dict[str, tuple[Engine, Batch]]:
    """Make the methods, one after the other, and warm them up with the first prompt.

    The warm-up is logged apart: the first of everything is slow.
    """
    methods: dict[str, tuple[Engine, Batch]] = {}
    for name, make in makers(engine, config).items():
        try:
            each = make()
            done = Batch(each, prompts)
            if name != "auto":  # its first choices count
                done.run(done.groups[0])
        except Exception as error:  # any failure belongs in the record
            log.failed(name, error)
            continue
        if done.stats.decode_s:
            ms = 1e3 * done.stats.decode_s / len(done.stats.live_sequences)
            log.add({"warm_up": name, "compile_s": each.compile_s, "cycle_ms": ms})
        done.stats = Stats()
        done.entries = []
        done.trace = []
        methods[name] = (each, done)
    return methods


def time_in_turn(methods: dict[str, tuple[Engine, Batch]], prompts: int) -> dict[str, list[float]]:
    """Decode every prompt with all methods in turn. Returns: seconds per token, by method."""
    seconds = {name: [] for name in methods}
    for number in tqdm(range(prompts), unit="prompt", mininterval=5):
        for name, (_, done) in list(methods.items())[:: 1 if number % 2 else -1]:
            before = replace(done.stats)
            done.run(done.groups[number])
            tokens = done.stats.tokens - before.tokens
            seconds[name].append((done.stats.decode_s - before.decode_s) / tokens)
    return seconds


def look_closer(methods: dict[str, tuple[Engine, Batch]], config: TreesConfig, log: Record) -> None:
    """List the kernels of a cycle of each method, and compare its replays, where requested."""
    for name, (engine, done) in methods.items():
        if name == "auto":  # runs the others' cycles
            continue
        ids = done.prompt_ids[0]
        try:
            if config.profile:
                ran = one_replay(engine, ids)
                print(f"\none replay, {name}\n{replay_table(ran)}\n", flush=True)
                gap = sum(span.gap_us for span in ran if span.gap_us > 0)
                row = {"replay": name, "kernels": len(ran), "busy_us": busy_us(ran), "gaps_us": gap}
                log.add(row, spans=ran)
            if config.replays:
                different = different_replays(engine, ids, config.replays)
                log.add({"replayed": name, "replays": config.replays, "different": different})
                log.well &= not different
        except Exception as error:  # any failure belongs in the record
            log.failed(name, error)


def bench(config: TreesConfig) -> None:
    """Decode in turn, print and append the rows. Exits with status 1 when a method failed."""
    config.check()
    log = Record(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    bandwidth = measure.read_bandwidth(device, 5).median
    rows = read_jsonl(Path(config.prompts), "--prompts")
    prompts = [row["turns"] for row in rows][: config.limit]
    engine = load_target(config, device)
    log.shared |= {
        "stand_in": engine.target.config.stand_in,
        "bandwidth_bytes_per_s": bandwidth,
        "load_s": engine.load_s,
        "compile_s": engine.compile_s,
        **measure.environment(device),
    }
    print(f"# {log.shared}", flush=True)
    methods = prepare(engine, config, prompts, log)
    if "vanilla" not in methods:  # nothing to compare with
        sys.exit(1)
    seconds = time_in_turn(methods, len(prompts))
    vanilla = [entry.new for entry in methods["vanilla"][1].entries]
    for name, (each, done) in methods.items():
        row = method_row(each, name, done, vanilla, bandwidth)
        ratios = [plain / ours for plain, ours in zip(seconds["vanilla"], seconds[name])]
        log.add(row | {"speedup": measure.Series.quartiles(ratios)})
    look_closer(methods, config, log)
    if not log.well:
        sys.exit(1)


def main() -> None:
    """Run the command line."""
    config = parse(TreesConfig, "trees.py", __doc__)
    with one_line_errors("trees.py"):
        bench(config)


if __name__ == "__main__":
    main()
