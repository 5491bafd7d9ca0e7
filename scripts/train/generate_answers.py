"""Let the target write answers to train a draft head with, and a third of the prompts.

    python scripts/train/generate_answers.py --out answers --compile          # killed, the same command goes on where it was
    python scripts/train/train_eagle.py --data answers/answers.jsonl ...

How it works:
1. Prompts are given questions (`--prompts`), headers of the standard library's functions with their docstrings, and
   what the model itself writes behind the opening of a user turn, at T = 1 (Magpie).
2. Duplicates, prompts that are too long, and prompts and answers that share 13 words in a row with an evaluation prompt
   are dropped, and counted. An evaluation prompt of fewer words counts as a whole.
3. A share of the prompts, chosen by hash, is answered greedily, the others at T = 1.
4. Batches of one source and temperature are decoded, always of the kind that is furthest behind: any part of the
   file, from its start, is a mixture by equal tokens. Prompts of similar length share a batch.
5. Every answer is a line of `answers.jsonl`, every prompt of the model's own one of `prompts.jsonl`. Noise depends on
   the seed and the prompt alone, so a run that was killed goes on as if it had not been.

Source: Magpie (arXiv 2406.08464); EAGLE (arXiv 2401.15077), table 6, compares such data with a fixed set.
Trade-off: rows are not refilled. A batch runs until a sixteenth of its answers is left; those are cut there.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import Engine, with_cycles
from files import read_jsonl, write_text
from generate import finish_reason, load, text_of
from hf.chat import PROBE
from load import warm_up
from ops.cpu.build import alone
from options import DEFAULT, ROOT, GenerateConfig
from scripts.train import train_demo
from session import Session

GIVEN, CODE, OWN = SOURCES = ("given", "code", "own")
GRAM = 13  # words in a row that a prompt may not share with an evaluation prompt
OWN_TOKENS = 128  # longest prompt that the model writes; a longer one is dropped
SORTED_BATCHES = 4  # prompts of so many batches are sorted by length
TAIL = 16  # a batch ends when only one row in so many is unfinished
RATES = 15  # batches whose median rate is shown: a pause does not spoil it
ASK = "Complete this Python function:\n\n```python\n{}\n```"


@dataclass
class AnswerConfig:
    checkpoint: str = option(DEFAULT, "the target")
    out: str = option("answers", "directory to write; an unfinished run in it goes on")
    prompts: str = option(
        str(ROOT / "data/train/gsm8k_train_clean.jsonl"),
        "comma-separated JSONL files; the first of `turns`",
    )
    eval: str = option(
        str(ROOT / "data/eval"),
        "evaluation prompts to keep clear of: JSONL files or directories of them",
    )
    chat: str = option("", "chat template; empty: the checkpoint's own")
    tokens: float = option(3e6, "answer tokens in all")
    greedy: float = option(
        0.5, "share of the prompts that are answered at T = 0; the others at T = 1"
    )
    answer_tokens: int = option(400, "longest answer; one that is cut is marked so")
    prompt_tokens: int = option(300, "longest prompt, template included")
    batch_size: int = option(48, "sequences decoded together")
    quant: str = option("int8", "of the target's weights", ("none", "int8", "int4"))
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    compile: bool = option(False, "compile the steps of a cycle")
    seed: int = option(0, "of the sampling noise and of the order")
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")

    def check(self) -> None:
        """Raises: ValueError for a value that cannot work."""
        for name in ("answer_tokens", "prompt_tokens", "batch_size", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; it is {getattr(self, name)}")
        if not 0 <= self.greedy <= 1:
            raise ValueError(f"--greedy must be in [0, 1]; it is {self.greedy}")

    def identity(self) -> dict:
        """What an answer depends on besides its prompt."""
        names = ("chat", "greedy", "answer_tokens", "quant", "dtype", "seed")
        return {"checkpoint": Path(self.checkpoint).name} | {
            name: getattr(self, name) for name in names
        }


# ---------------------------------------------------------------------------------------------- prompts


class Prompt(NamedTuple):
    """One question, and how it is answered."""

    source: str
    text: str
    ids: list[int]  # rendered
    greedy: bool


def hashed(text: str) -> int:
    """32 bits that depend on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def words_of(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    return re.findall(r"\w+", text.lower())


def read_turns(path: Path, flag: str) -> list[list[str]]:
    """The turns of every row of a JSONL file. Raises: ValueError for a row that has none."""

    def check(row: dict) -> str:
        turns = row.get("turns")
        good = (
            isinstance(turns, list)
            and turns
            and all(isinstance(t, str) and t.strip() for t in turns)
        )
        return "" if good else 'it must be like {"turns": ["text", ...]}'

    return [row["turns"] for row in read_jsonl(path, flag, check)]


def eval_texts(named: str) -> list[str]:
    """Every turn of the evaluation prompts. named: JSONL files or directories, comma-separated. Raises: ValueError."""
    texts = []
    for path in map(Path, named.split(",")):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ValueError(
                f"--eval: {path} holds no .jsonl file; name files with evaluation prompts"
            )
        texts += [turn for file in files for turns in read_turns(file, "--eval") for turn in turns]
    return texts


def headers(modules: Iterable[str]) -> Iterator[str]:
    """The functions of Python modules that have a docstring: source from `def` to the docstring's end, dedented."""
    for text in modules:
        lines = text.split("\n")  # as the parser counts them
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
                node
            ):
                head = lines[node.lineno - 1 : node.body[0].end_lineno]
                yield "\n".join(_without_indent(line, node.col_offset) for line in head)


def _without_indent(line: str, width: int) -> str:
    return line if line[:width].strip() else line[width:]  # a docstring may hold lines with less


@dataclass
class Filter:
    """Decides which prompts are used, and counts."""

    grams: set[tuple[str, ...]]  # of the evaluation prompts; shorter ones as a whole
    seen: set[tuple[str, ...]] = field(default_factory=set)
    counts: Counter = field(default_factory=Counter)  # by (source, what became of it)

    @staticmethod
    def against(texts: list[str]) -> Filter:
        """Keep clear of these texts."""
        return Filter({gram for text in texts for gram in Filter._grams(words_of(text))})

    @staticmethod
    def _grams(words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[i : i + GRAM]) for i in range(max(len(words) - GRAM + 1, 1))]

    def touches(self, text: str) -> bool:
        """Whether a text shares 13 words in a row with an evaluation prompt, or is a shorter one."""
        return not self.grams.isdisjoint(self._grams(words_of(text)))

    def accepts(self, source: str, text: str, fits: bool) -> bool:
        """Whether to use a prompt. fits: whether it is neither too long nor unfinished. Writes: seen, counts."""
        words = tuple(words_of(text))
        if not fits or not words:
            fate = "too long or empty"
        elif words in self.seen:
            fate = "twice"
        else:
            fate = "like an evaluation prompt" if self.touches(text) else "used"
        self.seen.add(words)
        self.counts[source, fate] += 1
        return fate == "used"

    def line(self, source: str) -> str:
        """What became of the prompts of a source."""
        found = {fate: n for (name, fate), n in sorted(self.counts.items()) if name == source}
        dropped = ", ".join(f"{n} {fate}" for fate, n in found.items() if fate != "used") or "none"
        return f"{source}: {sum(found.values())} prompts, {found.get('used', 0)} used; dropped: {dropped}"


# ------------------------------------------------------------------------------------------------- the run


class Run:
    """The prompts that wait, the answers that are there, and the files of both."""

    def __init__(self, config: AnswerConfig, texts: dict[str, list[str]], filter: Filter):
        """texts: prompts by source. Reads what an earlier run left in `config.out`. Raises: ValueError."""
        self.config, self.filter, self.out = config, filter, Path(config.out)
        options = GenerateConfig(
            checkpoint=config.checkpoint, draft="none", chat=config.chat, quant=config.quant, dtype=config.dtype,
            compile=config.compile, device=config.device, seed=config.seed, temperature=1.0,
            batch_size=config.batch_size, context=config.prompt_tokens + config.answer_tokens,
        )  # fmt: skip
        sampled = load(options)
        greedy = replace(sampled, config=replace(sampled.config, temperature=0.0))
        self.engines = {
            False: sampled,
            True: warm_up(with_cycles(greedy)) if config.greedy else greedy,
        }
        self.opening = sampled.template.render(list(PROBE[:1]), []).partition(PROBE[0])[0]
        self.tokens: Counter = Counter()  # answer tokens by (source, greedy)
        self.cut: Counter = Counter()  # answers that were cut, by source
        self.waiting: dict[tuple[str, bool], deque[Prompt]] = {
            (s, g): deque() for s in SOURCES for g in (False, True)
        }
        self.done: set[str] = set()  # prompts that an earlier run has answered
        self.writes = True  # whether the model writes prompts
        for row in self._read(
            "answers.jsonl", {"source", "temperature", "turns", "answers", "ended", "answer_ids"}
        ):
            self._count(row)
            self.done.add(row["turns"][0])
        for source, found in texts.items():
            self._add(source, [(text, True) for text in found], SORTED_BATCHES * config.batch_size)
        own = [
            (row["turns"][0], row["ended"])
            for row in self._read("prompts.jsonl", {"turns", "ended"})
        ]
        for first in range(0, len(own), config.batch_size):  # as they were written
            self._add(OWN, own[first : first + config.batch_size], config.batch_size)
        self.attempts = len(own)  # prompts that the model has written

    def _read(self, name: str, keys: set[str]) -> list[dict]:
        """The rows of a file, which have these keys. Writes: the file, without a last line that a kill has cut."""
        path = self.out / name
        data = path.read_bytes() if path.is_file() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        wrong = f"its keys must be {', '.join(sorted(keys))}"
        return (
            read_jsonl(path, "--out", lambda row: "" if keys <= row.keys() else wrong)
            if whole
            else []
        )

    def _append(self, name: str, rows: list[dict]) -> None:
        with open(self.out / name, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _count(self, row: dict) -> None:
        self.tokens[row["source"], row["temperature"] == 0] += (
            len(row["answer_ids"]) if row["answers"] else 0
        )
        self.filter.counts[
            "answers", "used" if row["answers"] else "empty or like an evaluation prompt"
        ] += 1
        self.cut[row["source"]] += not row["ended"]

    def _add(self, source: str, found: list[tuple[str, bool]], group: int) -> int:
        """Let the prompts wait that are good and not answered.

        found: text, and whether it is whole; group: prompts in a row that are sorted by length
        Returns: how many are good.
        """
        engine, good = self.engines[False], []
        for text, whole in found:
            ids = engine.template.encode(engine.tokenizer, [text], [])
            if self.filter.accepts(source, text, whole and len(ids) <= self.config.prompt_tokens):
                good.append(
                    Prompt(source, text, ids, hashed(f"greedy {text}") < self.config.greedy * 2**32)
                )
        if source != OWN:  # those are written in the order of their noise
            good.sort(key=lambda p: hashed(f"order {self.config.seed} {p.text}"))
        for first in range(0, len(good), group):
            for p in sorted(good[first : first + group], key=lambda p: len(p.ids)):
                if p.text not in self.done:
                    self.waiting[source, p.greedy].append(p)
        return len(good)

    def total(self) -> int:
        """Answer tokens so far."""
        return sum(self.tokens.values())

    def step(self) -> bool:
        """Answer a batch of the kind that is furthest behind. Returns: whether there was one. Writes: both files."""
        share = {True: self.config.greedy, False: 1 - self.config.greedy}
        kinds = [
            (s, g)
            for s, g in self.waiting
            if share[g] and (self.waiting[s, g] or (s == OWN and self.writes))
        ]
        if not kinds:
            return False
        source, greedy = min(kinds, key=lambda kind: self.tokens[kind] / share[kind[1]])
        queue, size = self.waiting[source, greedy], self.config.batch_size
        while source == OWN and self.writes and len(queue) < size:
            self._write_prompts()
        batch = [queue.popleft() for _ in range(min(size, len(queue)))]
        if batch:
            self._answer(batch)
        return True

    def _write_prompts(self) -> None:
        """Let the model write a batch of prompts. Writes: prompts.jsonl, waiting; `writes`, where none is good."""
        engine, size = self.engines[False], self.config.batch_size
        ids = engine.tokenizer.encode(self.opening, bos=engine.template.bos, special=True)
        streams = [(self.attempts + row, 1) for row in range(size)]
        rows = [
            {"turns": [text_of(engine, new).strip()], "ended": finish_reason(engine, new) == "stop"}
            for new in decoded(engine, streams, [ids] * size, OWN_TOKENS)
        ]
        self._append("prompts.jsonl", rows)
        self.attempts += size
        self.writes = self._add(OWN, [(row["turns"][0], row["ended"]) for row in rows], size) > 0
        if not self.writes:
            print(
                f"note: none of {size} prompts that the model wrote was good; it writes no more",
                flush=True,
            )

    def _answer(self, batch: list[Prompt]) -> None:
        engine = self.engines[batch[0].greedy]
        streams = [(hashed(p.text), 0) for p in batch]
        rows = []
        for p, new in zip(
            batch, decoded(engine, streams, [p.ids for p in batch], self.config.answer_tokens)
        ):
            answer = text_of(engine, new)
            good = answer.strip() and not self.filter.touches(answer)
            rows.append(
                {
                    "source": p.source, "temperature": engine.config.temperature, "turns": [p.text],
                    "answers": [answer] if good else [], "ended": finish_reason(engine, new) == "stop",
                    "answer_ids": new,
                }
            )  # fmt: skip
            self._count(rows[-1])
        self._append("answers.jsonl", rows)

    def lines(self) -> str:
        """What there is of every kind."""
        cut = ", ".join(f"{self.cut[source]} {source}" for source in SOURCES)
        kinds = (*SOURCES, "answers")
        return "\n".join([*map(self.filter.line, kinds), f"answers that were cut: {cut}"])

    def progress(self, rate: float) -> str:
        """One line. rate: tokens/s."""
        total = self.total()
        shares = [sum(self.tokens[s, g] for g in (False, True)) / max(total, 1) for s in SOURCES]
        greedy = sum(self.tokens[s, True] for s in SOURCES) / max(total, 1)
        left = max(self.config.tokens - total, 0) / max(rate, 1e-9) / 60
        mixture = ", ".join(
            f"{100 * share:.0f} % {source}" for share, source in zip(shares, SOURCES)
        )
        goal = f"{total} of {self.config.tokens:.0f} tokens"
        return f"{goal} ({mixture}; {100 * greedy:.0f} % greedy), {rate:.0f} tokens/s, {left:.0f} min left"


def decoded(
    engine: Engine, streams: list[tuple[int, int]], prompts: list[list[int]], longest: int
) -> list[list[int]]:
    """Decode a batch, but for its tail. streams: the key of each row's noise. Returns: the new tokens of every row."""
    short = replace(engine, config=replace(engine.config, max_new_tokens=longest))
    session = Session(short, streams)
    for new in session.run(prompts):
        if (
            sum(bool(each) or session.busy(row) for row, each in enumerate(new))
            <= len(prompts) // TAIL
        ):
            break
    return [session.history[row][len(prompt) :] for row, prompt in enumerate(prompts)]


def claim(config: AnswerConfig) -> None:
    """Say in `config.out` whose answers these are. Raises: ValueError when it holds another run's."""
    out, mine = Path(config.out), config.identity()
    file = out / "run.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: cannot make the directory {out} ({error.strerror}); name another"
        ) from None
    if file.is_file():
        theirs = next(iter(read_jsonl(file, "--out")))
        other = next((name for name in mine if mine[name] != theirs.get(name)), "")
        if other:
            was = f"{other} was {theirs.get(other)}, not {mine[other]}"
            raise ValueError(
                f"--out: {out} holds another run ({was}); use its options, or name another directory"
            )
    elif (out / "answers.jsonl").exists():
        raise ValueError(f"--out: {out} has answers.jsonl and no run.json; name another directory")
    else:
        write_text(str(file), json.dumps(mine))


def answer(config: AnswerConfig) -> Run:
    """Write answers until there are enough or no prompt is left. Writes: `config.out`."""
    config.check()
    given = [
        turns[0]
        for file in config.prompts.split(",")
        for turns in read_turns(Path(file), "--prompts")
    ]
    filter = Filter.against(eval_texts(config.eval))
    claim(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    with alone(Path(config.out), f"note: waiting for another process that writes to {config.out}"):
        code = [
            ASK.format(header)
            for part in train_demo.read_python().values()
            for header in headers(part)
        ]
        run, rates = Run(config, {GIVEN: given, CODE: code}, filter), deque(maxlen=RATES)
        print(run.lines(), flush=True)
        while (before := run.total()) < config.tokens:
            began = time.perf_counter()
            if not run.step():
                break
            rates.append((run.total() - before) / (time.perf_counter() - began))
            print(run.progress(statistics.median(rates)), flush=True)
    print(run.lines(), flush=True)
    return run


def main(argv: list[str] | None = None) -> None:
    config = parse(AnswerConfig, "generate_answers.py", __doc__, argv)
    with one_line_errors("generate_answers.py"):
        answer(config)


if __name__ == "__main__":
    main()
