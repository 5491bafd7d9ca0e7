"""Measurements of a run: acceptance, tokens, seconds and memory.

`summary` makes the `stats` of `--json`, `stats_line` the last line of a run; `sequence_memory`
compares the needs of a session with the memory that is free.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from files.memory import check_memory, free_bytes
from files.rank import this_rank
from options import ROOT
from reference import row_width
from run.methods import source_of, told_sources
from run.parsing import VERSION
from steps import Rotate

CHEAP_CYCLE = 1.25  # vanilla passes; below, a free draft would gain less than a quarter
LEAST_VERIFY = 0.95  # vanilla passes; a pass over more rows costs no less, but for noise
LEAST_TOKENS = 50  # that an estimate of the speedup needs
LOOP = 0.5  # share of an answer's 8-grams that occurred before in it; more is a loop


@dataclass
class Stats:
    """Sums and lists over every sequence and cycle."""

    # per cycle and live sequence, bonus not counted
    accept_lengths: list[int] = field(default_factory=list)
    # per cycle, the sequences that these lengths belong to
    live_sequences: list[list[int]] = field(default_factory=list)
    tokens: int = 0  # decoded after prefill
    first_tokens: int = 0  # decided by prefill, one per answer
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # drafting and extending
    verify_s: float = 0.0
    # per cycle, the preset that ran and its seconds
    presets: list[tuple[int, float]] = field(default_factory=list)

    def add(self, other: Stats) -> None:
        """Add the measurements of another session."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def share_of_equal(expected: Any, result: Any) -> float:
    """Return the share of turns whose tokens are equal in two results (`generate.Result`).

    A turn that only one of them has is not equal: where tokens differ, a later turn may not fit.
    """
    vanilla = dict(zip(expected.index, expected.tokens, strict=True))
    drafted = dict(zip(result.index, result.tokens, strict=True))
    turns = vanilla.keys() | drafted.keys()
    return sum(vanilla.get(turn) == drafted.get(turn) for turn in turns) / len(turns)


def repeated(tokens: list[int], n: int = 8) -> float:
    """Return the share of n-grams that have occurred before in the same output."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ---------------------------------------------------------------------- reports


def summary(engine: Any, stats: Stats) -> dict[str, Any]:
    """Return the `stats` object of `--json`. engine: `decode.Engine`.

    tokens: of the answers; the first of each is left out of all rates
    tau: tokens per cycle and sequence, without those cut at the end
    """
    cycles = len(stats.accept_lengths)
    rate = stats.tokens / stats.decode_s if stats.decode_s else 0.0
    report: dict[str, Any] = {}
    if engine.config.random:  # its numbers never go without its name
        report["random"] = engine.config.random
    ranks = this_rank().world_size
    if ranks > 1:
        report["ranks"] = ranks
    table = engine.policy.table(stats.presets)
    if table:
        report["tree_auto"] = table
    drafted = Counter(source_of(engine, preset) for preset, _ in stats.presets)
    return report | {
        "tokens": stats.tokens + stats.first_tokens,
        "tau": stats.tokens / cycles if cycles else 0.0,
        "accept_lengths": stats.accept_lengths,
        "cycles": cycles,
        "tokens_per_s": rate,
        "decode_s": stats.decode_s,
        "prefill_s": stats.prefill_s,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "drafted_by": [source for source, _ in drafted.most_common() if source],
        "estimate": _estimate(table, rate, cycles, len(stats.presets)),
        "compile_s": engine.compile_s,
        "load_s": engine.load_s,
        "peak_memory_bytes": peak_memory_bytes(engine.device.type),
    }


def stats_line(stats: dict[str, Any], cut: str = "", doubt: str = "") -> str:
    """Return the last lines of a run: the rate; with `--compare` more, and the speedup explained.

    cut: tells of answers that were cut, "" for none
    doubt: stands behind a speedup that is an estimate
    """
    tokens = stats["tokens"]
    line = f"{tokens} token{'' if tokens == 1 else 's'}"
    if stats["tokens_per_s"]:  # else prefill decided them, or nothing did
        line += f", {stats['tokens_per_s']:.1f} tokens/s"
        has_estimate = stats["drafted_by"] and stats["estimate"] and tokens >= LEAST_TOKENS
        if has_estimate and "speedup" not in stats:
            line += f", about {stats['estimate']:.1f}x of vanilla{doubt}"
        # lookups beside a head are a choice of --tree auto
        chosen = " (--tree auto)" if len(stats["drafted_by"]) > 1 else ""
        line += f"; tau {stats['tau']:.2f}, {told_sources(stats['drafted_by'])}{chosen}"
    if cut:
        line += f" [{cut}]"
    if "speedup" in stats:
        vanilla = f"{stats['vanilla_tokens_per_s']:.1f} tokens/s"
        line += f"; {stats['speedup']:.2f}x of vanilla ({vanilla})"
        if stats["identical"] is not None:
            line += f", {100 * stats['identical']:.0f} % of sequences identical"
    lines = [line]
    if "speedup" in stats:
        lines.append(_details(stats))
    if stats.get("speedup"):
        lines.append(explain(stats, 1 / stats["vanilla_tokens_per_s"]))
    name = ""
    if "random" in stats:
        name = f"random weights in the shape {stats['random']}, whose text means nothing: "
    return "\n".join(name + line for line in lines)


def _details(stats: dict[str, Any]) -> str:
    """Return the line of seconds, memory and trees."""
    compiled = ""
    if stats["compile_s"]:  # on CUDA
        compiled = f"compile {stats['compile_s']:.1f} s, "
    line = (
        f"decode {stats['decode_s']:.2f} s, tau {stats['tau']:.2f} ({stats['cycles']} cycles), "
        f"prefill {stats['prefill_s']:.2f} s, {compiled}load {stats['load_s']:.1f} s, "
        f"peak memory {stats['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    if "ranks" in stats:
        line += f" on rank 0 of {stats['ranks']}"
    if "tree_auto" in stats:
        line += f"; tree auto: {_most_used(stats['tree_auto'])}"
    return line


def _estimate(table: list[dict], rate: float, cycles: int, passes: int) -> float | None:
    """Return the rate over the one without drafting, as --tree auto estimates it.

    table: `tree_auto` of `summary`; rate: tokens per second; cycles: of each sequence; passes: of
    all sequences together. Returns: None where there is no estimate
    """
    if not table or not passes or not table[0]["predicted_ms"]:
        return None
    sequences = cycles / passes  # that a pass decodes
    return rate * table[0]["predicted_ms"] / 1e3 / sequences


def explain(drafted: dict[str, Any], vanilla_s: float, vanilla_tokens: float = 1.0) -> str:
    """Return the line that explains a speedup: tau over the cost of a cycle, and its bound.

    drafted: totals of a run, `tokens_per_s`, `cycles`, `decode_s`, `draft_s` and `verify_s`
    vanilla_s: seconds of a pass without a draft; vanilla_tokens: those that it emits
    tau: tokens of a drafted cycle over those of a vanilla pass, without tokens cut at the end
    """
    one = vanilla_s * drafted["cycles"]
    tau = drafted["tokens_per_s"] * drafted["decode_s"] / drafted["cycles"] / vanilla_tokens
    verify = drafted["verify_s"] / one
    draft = drafted["draft_s"] / one
    cycle = drafted["decode_s"] / one
    host = cycle - verify - draft
    rest = f" + host {host:.3f}" if host >= 0.0005 else ""
    bound = _bound(verify, draft, host)
    if verify + host < LEAST_VERIFY:
        bound = "noisy: the machine's speed changed between the two runs"
    elif drafted.get("drafted_by") == []:  # rows of benchmarks have no such key
        bound = "nothing was drafted"
    # three digits, so that the printed parts make up the printed speedup
    return (
        f"{tau / cycle:.2f} = tau {tau:.3f} / (verify {verify:.3f} + draft {draft:.3f}{rest} of a "
        f"vanilla pass); {bound}"
    )


def _bound(verify: float, draft: float, host: float) -> str:
    """Describe the bound of a speedup. verify, draft, host: cost of each, in vanilla passes"""
    if verify + draft + host <= CHEAP_CYCLE:
        return "bound by acceptance: a cycle costs hardly more than a vanilla pass"
    bounds = {
        "arithmetic: the rows of the tree cost more than the weights that they share": verify - 1,
        "memory: drafting reads the head's weights, or texts, at every level": draft,
        "the host: the time between the steps": host,
    }
    return f"bound by {max(bounds, key=bounds.__getitem__)}"


def _most_used(table: list[dict[str, Any]]) -> str:
    """Describe the preset that ran in most cycles. table: `tree_auto` of `summary`."""
    most = max(table, key=lambda preset: preset["cycles"])
    cycles = sum(preset["cycles"] for preset in table)
    times = "unused"
    if most["cycles"]:
        times = f"{most['measured_ms']:.1f} ms each, {most['predicted_ms']:.1f} predicted"
    name = most["tree"]
    if name == "none":
        name = "no draft"
    return f"{name} in {most['cycles']} of {cycles} cycles ({times})"


def environment(device: str) -> dict[str, Any]:
    """Return the machine, the versions and the day that a measurement depends on."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu_name()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


def told(facts: dict[str, Any]) -> str:
    """Return facts on one line, those that are empty left out."""
    return ", ".join(
        f"{key} {value}" for key, value in facts.items() if value not in ("", None, False)
    )


def _commit() -> str:
    """Return the commit of a clone, the version of an installed package."""
    if not (ROOT / ".git").exists():
        return VERSION
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    values = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in values:
        return platform.processor() or platform.machine()
    # clouds leave these numbers out of the name
    numbers = [f"{key} {values[key]}" for key in ("cpu family", "model") if key in values]
    return " ".join([values["model name"], *numbers])


# ---------------------------------------------------------------------- memory


def peak_memory_bytes(device: str) -> int:
    """Return the peak device memory on CUDA, elsewhere the process's peak resident memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sequence_memory(engine: Any) -> str:
    """Check that memory is free for the sequences of a session. engine: `decode.Engine`.

    Returns: as `check_memory`. Raises: ValueError when it is not free.
    """
    target = engine.target
    drafter = engine.drafter
    weight = target.norm.weight
    target_slot = slot_bytes(target.layers, engine.kv_dtype)
    draft_slot = slot_bytes(drafter.layers or (), weight.dtype)
    target_cache = engine.slots * target_slot
    if target.config.state_shapes is not None:
        target_cache += target.config.state_shapes.bytes(engine.nodes)
    draft_cache = engine.slots * draft_slot
    # sets of scores over the vocabulary; sampling, which any call may ask for, adds the noise and
    # the adjusted scores
    scores = max(drafter.size, drafter.width) + drafter.size + drafter.depth + 1
    plan = {
        "the caches": target_cache + draft_cache,
        "scores of a tree": 4 * target.config.vocab_size * scores,
        "its candidates": 20 * drafter.width**2,
    }
    slot = target_slot + draft_slot
    if engine.config.compare:
        plan["those without a draft"] = target_cache
        slot += target_slot
    device = str(weight.device)
    sequences = engine.config.batch_size
    missing = sum(plan.values()) - free_bytes(device) // sequences  # bytes of each
    fits = max(engine.context - -(-missing // max(slot, 1)), 0)
    remedy = f"lower --batch_size, --context ({fits} tokens would fit) or CHILDREN of --tree"
    return check_memory(plan, device, remedy, sequences)


def slot_bytes(layers: Any, dtype: Any) -> int:
    """Return the bytes of a slot's keys and values, over all layers. dtype: of the cache"""
    steps = [step for layer in layers for step in layer.steps if isinstance(step, Rotate)]
    return dtype.itemsize * sum(2 * s.kv_heads * row_width(s.head_dim, dtype) for s in steps)
