"""Count the tokens per target pass that drafting without a head would reach on recorded answers.

    python scripts/bench/record_answers.py --records DIR --checkpoint F.gguf --chat --tasks edit
    python scripts/bench/count_sources.py --records DIR --json counts.jsonl

`replay` decodes a recorded answer with a union of sources (sources.py): propose a tree, accept what
the answer says, update. No model runs, so Token Recycling learns the successors of decided tokens
only, not those of rejected nodes; with `--live F.gguf` the model reads every proposed tree.
A tree of N nodes counts the root. tau is tokens per pass, as in papers.py: the sum over answers.
Not here: the time of a proposal, and of a pass over N rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from sampling import NoiseKey, gumbel
from scripts.bench.measure import Log
from scripts.bench.record_answers import Reader, Record, RecordConfig, engine_of
from scripts.bench.sources import (
    PRIOR,
    Lookahead,
    Lookup,
    Recycling,
    Rest,
    Row,
    Source,
    Store,
    Suffix,
    Tree,
    Union,
)

SIX = ("gsm8k", "humaneval", "mt_bench", "alpaca", "cnn_dm", "natural_questions")


class Noise:
    """The noise of one answer's draws."""

    def __init__(self, record: Record):
        zero = torch.zeros(1, dtype=torch.int64)
        self.key = NoiseKey(torch.zeros(2, dtype=torch.int64), zero + record.number, zero)
        self.vocab = record.vocab
        self.draws: dict[int, np.ndarray] = {}
        self.next = 0  # draw of the root's successor

    def of(self, depth: int, token: int) -> float:
        """Return the noise of a token behind a node of some depth."""
        draw = self.next + depth
        if draw not in self.draws:
            row = gumbel(self.key, torch.tensor([draw]), 1, self.vocab)
            self.draws[draw] = row[0, 0].numpy()
        return float(self.draws[draw][token])


class Counted(NamedTuple):
    """Tokens and passes of decoding; an answer's first token is not counted."""

    tokens: int
    passes: int
    cost: float  # of all passes; of one: that of a pass over its nodes, or 1


def node_rows(reader: Reader, text: list[int], tree: Tree) -> list[Row]:
    """Let the target read a tree. Returns: the successors of all nodes but the root."""
    size = len(tree.tokens)
    depths = [0] * size
    seen = np.eye(size, dtype=bool)
    for node, children in enumerate(tree.children):
        for child in children.values():
            depths[child] = depths[node] + 1
            seen[child] |= seen[node]
    top, logp = reader.read(text, tree.tokens[1:], depths[1:], seen[1:, 1:])
    first = len(top) - size + 1
    lines = zip(tree.tokens[1:], top[first:].tolist(), logp[first:].tolist())
    return [Row(*line, []) for line in lines]


class Rules(NamedTuple):
    """Variants of a replay."""

    noise: Noise | None = None  # of the record, where trees read it
    reads_prompt: bool = False  # the successors of the prompt's tokens are known, too
    reader: Reader | None = None  # of the target, to read the proposed nodes
    # of passes, by nodes: one of these sizes is picked for each pass; none: always the largest
    costs: dict[int, float] = {}


PLAIN = Rules()


def replay(record: Record, union: Union, nodes: int, rules: Rules = PLAIN) -> Counted:
    """Decode a recorded answer with trees of at most `nodes` nodes."""
    tokens = record.tokens.tolist()
    root = record.start
    last = len(tokens) - 1
    first = 0 if rules.reads_prompt else root - 1
    union.begin()
    union.update(tokens[: root + 1], record.rows(first, root))
    passes = 0
    cost = 0.0
    expected = PRIOR  # accepted nodes
    accepted = PRIOR
    while root < last:
        if rules.noise is not None:
            rules.noise.next = root + 1 - record.start
        tree = union.propose(tokens[: root + 1], nodes, rules.noise)
        size = nodes
        if rules.costs:
            values = np.array(tree.values) * accepted / expected
            rate = (root - record.start + PRIOR) / (cost + PRIOR)
            size = best_size(values, rules.costs, rate)
        length = union.accept(tree, tokens[root + 1 :], size)
        expected += sum(tree.values[1:size])
        accepted += length
        count = min(length + 1, last - root)
        rows = record.rows(root, root + count)
        if rules.reader is not None:
            rows = [*node_rows(rules.reader, tokens[: root + 1], tree), *rows]
        union.update(tokens[root + 1 : root + 1 + count], rows)
        root += count
        passes += 1
        cost += rules.costs.get(size, 1.0)
    return Counted(last - record.start, passes, cost)


def best_size(values: np.ndarray, costs: dict[int, float], rate: float) -> int:
    """Return the size of tree that gains most over spending its time as passes did on average.

    values: estimated acceptance of the nodes, best first; the root's does not count
    rate: tokens per cost so far
    """
    return max(costs, key=lambda nodes: values[1:nodes].sum() - rate * costs[nodes])


# ------------------------------------------------------------------------------------------- tables


class Past(NamedTuple):
    """Other requests, as sources keep them."""

    texts: Suffix
    rows: dict[int, Row]

    @staticmethod
    def of(records: list[Record]) -> Past:
        """Read other answers with their prompts."""
        texts = Suffix("store")
        rows = {}
        for number, record in enumerate(records):
            texts.update([-1 - number, *record.tokens.tolist()], [])  # no match goes across
            rows.update({row.token: row for row in record.rows(0, len(record.tokens))})
        return Past(texts, rows)


class Method(NamedTuple):
    """Sources to count together. A kept one has read other requests before."""

    name: str
    sources: Callable[[Past], list[Source]]
    reads_prompt: bool = False
    reads_noise: bool = False

    @property
    def kept(self) -> bool:
        """Whether acceptance that other requests taught it counts."""
        return "kept" in self.name


@dataclass(frozen=True)
class CountConfig:
    """Options. Units and effects are in the help texts."""

    records: str = option("", "directory of the answers, from record_answers.py")
    temperature: float = option(0.0, "of the answers", least=0)
    nodes: str = option("4,8,16,32,60", "sizes of the trees, root included")
    costs: str = option(
        "",
        "cost of a pass by nodes, as 1:1,4:1.3,8:1.75: sizes are picked pass by pass, and the "
        "table has speedups",
    )
    methods: str = option("", "rows of the table, separated by semicolons; default: all")
    limit: int = option(0, "prompts per task; 0: all", least=0)
    corpus: str = option("", "token ids for REST, from record_answers.py; default: no REST")
    live: str = option("", "the model, to read every proposed tree; default: no model runs")
    kept: int = option(50, "other requests that a kept store has read", least=1)
    json: str = option(
        "", "file of the counts, one for each temperature and costs; what it holds is not repeated"
    )

    @property
    def sizes(self) -> list[int]:
        """The sizes of trees. Raises: ValueError for a list that is none."""
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.nodes):
            raise ValueError(f"--nodes must be a list of sizes, as 4,8; it is {self.nodes}")
        return [int(n) for n in self.nodes.split(",")]

    @property
    def cost_of(self) -> dict[int, float]:
        """The cost of a pass by nodes, empty without costs. Raises: ValueError."""
        if not re.fullmatch(r"([1-9]\d*:\d+(\.\d+)?(,|$))*", self.costs):
            raise ValueError(f"--costs must be as 1:1,4:1.3,8:1.75; it is {self.costs}")
        pairs = [pair.split(":") for pair in self.costs.split(",") if pair]
        return {int(nodes): float(cost) for nodes, cost in pairs}


def methods_of(config: CountConfig) -> list[Method]:
    """Return the rows of the table."""
    sampled = config.temperature > 0
    fixed = []
    if config.corpus:
        with np.load(config.corpus) as saved:
            fixed = [Rest(saved["corpus"], saved["order"])]
    plain = lambda rows: Recycling(rows, binned=sampled)  # noqa: E731
    methods = [
        Method("lookup", lambda past: [Lookup()]),
        Method("suffix", lambda past: [Suffix()]),
        Method("recycling", lambda past: [Recycling()]),
        Method("recycling, prompt read", lambda past: [Recycling()], True),
        Method("union", lambda past: [Lookup(), Suffix(), plain({}), *fixed], True),
        Method("suffix, kept", lambda past: [Suffix(), Store(past.texts)]),
        Method("recycling, kept", lambda past: [Recycling(past.rows)]),
        Method(
            "union, kept",
            lambda past: [Lookup(), Suffix(), Store(past.texts), plain(past.rows), *fixed],
            True,
        ),
    ]
    if fixed:
        methods.insert(4, Method("REST", lambda past: fixed))
    if sampled:
        noisy = [m for m in methods if m.name in ("suffix", "union", "union, kept")]
        noisy.append(Method("recycling", lambda past: [Recycling(binned=True)], True))
        methods += [m._replace(name=f"{m.name}, noise", reads_noise=True) for m in noisy]
    else:
        methods.append(Method("lookahead", lambda past: [Lookahead()]))
    names = config.methods.split(";") if config.methods else [m.name for m in methods]
    unknown = set(names) - {m.name for m in methods}
    if unknown:
        known = "; ".join(m.name for m in methods)
        raise ValueError(f"--methods: there is no {unknown.pop()}; use of {known}")
    return [m for m in methods if m.name in names]


def read_records(config: CountConfig) -> list[Record]:
    """Read the answers of a temperature, mixed. Raises: ValueError without any."""
    files = sorted(Path(config.records).glob(f"*-T{config.temperature:g}-*.npz"))
    if not files:
        raise ValueError(f"--records: {config.records} has no answers; run record_answers.py")
    records = [Record.load(file) for file in files]
    Random(0).shuffle(records)
    return records


def count(config: CountConfig, log: Log) -> None:
    """Count what the log lacks. Writes: the log."""
    records = read_records(config)
    methods = methods_of(config)
    costs = config.cost_of
    sizes = [max(costs)] if costs else config.sizes
    done = {(row["method"], row["nodes"], row["task"], row["number"]) for row in log.rows}
    engine = (
        engine_of(RecordConfig(config.live, temperature=config.temperature))
        if config.live
        else None
    )
    outcomes: dict[tuple[str, int], dict] = {}  # learnt acceptance by method and nodes
    chosen = [r for r in records if not config.limit or r.number < config.limit]
    for record in tqdm(chosen, unit="answer"):
        others = [r for r in records if r is not record]
        past = Past.of(Random(record.number).sample(others, min(config.kept, len(others))))
        noise = Noise(record)
        made = []
        for method, nodes in product(methods, sizes):
            if (method.name, nodes, record.task, record.number) in done:
                continue
            union = Union(method.sources(past))
            if method.kept:
                union.outcomes = outcomes.setdefault((method.name, nodes), {})
            reader = None
            if engine is not None:
                reader = Reader(engine, len(record.tokens) + nodes)
                reader.read_text(record.tokens[: record.start].tolist())
            read = noise if method.reads_noise else None
            rules = Rules(read, method.reads_prompt, reader, costs)
            counted = replay(record, union, nodes, rules)
            where = {"task": record.task, "number": record.number}
            made.append({"method": method.name, "nodes": nodes} | where | counted._asdict())
        log.add(made)


def table(rows: list[dict]) -> Iterator[str]:
    """Yield a Markdown table: tau or speedup by method and task, a figure per size of the tree."""
    tasks = [t for t in ("edit", *SIX) if any(row["task"] == t for row in rows)]
    tasks += sorted({row["task"] for row in rows} - set(tasks))
    sizes = sorted({row["nodes"] for row in rows})
    six = [t for t in tasks if t in SIX]
    name = "tau" if all(row["cost"] == row["passes"] for row in rows) else "speedup"
    columns = [f"{name}, {' '.join(map(str, sizes))} nodes", *tasks, f"median of {len(six)}"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        cells = {t: [tau(mine, t, n) for n in sizes] for t in tasks}
        medians = [median(cells[t][i] for t in six) if six else 0.0 for i in range(len(sizes))]
        figures = [" ".join(f"{x:.2f}" for x in cell) for cell in [*cells.values(), medians]]
        yield f"| {method} | {' | '.join(figures)} |"


def tau(rows: list[dict], task: str, nodes: int) -> float:
    """Return tokens per pass over the answers of a task, or per cost of a pass."""
    mine = [row for row in rows if row["task"] == task and row["nodes"] == nodes]
    return sum(row["tokens"] for row in mine) / max(sum(row["cost"] for row in mine), 1)


def main() -> None:
    """Run the command line."""
    config = parse(CountConfig, "count_sources.py", __doc__)
    with one_line_errors("count_sources.py"):
        log = Log(config.json, "--json")
        count(config, log)
    print("\n".join(table(log.rows)))


if __name__ == "__main__":
    main()
