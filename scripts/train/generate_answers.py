"""Let the target write answers to train a draft head with, and a third of the prompts.

1. Prompts are given questions (`prompts`), headers of the standard library's functions with their
   docstrings, tasks of many kinds and long texts (task_prompts.py), and texts that the model itself
   writes behind the opening of a user turn, at T = 1.
2. Duplicates, prompts that are too long, answers that loop, and prompts and answers that share 13
   words in a row with an evaluation prompt (or contain a shorter one) are dropped, and counted.
   The further turns of a given prompt follow, while answers are good and the text fits.
3. Half of the prompts, chosen by hash, are answered greedily, the others at T = 1; or, with
   `samples`, each prompt but the model's own greedily and several times at T = 1. A batch has
   one source and temperature, of the kind that is furthest behind, and prompts of similar length:
   any part of the file, from its start, is a mixture by equal tokens.
4. Answers are lines of `answers.jsonl`, the model's prompts of `prompts.jsonl`. Noise depends on
   the seed and the prompt alone, so a killed run goes on as if it had not been killed.
Source: Magpie (arXiv 2406.08464); EAGLE (arXiv 2401.15077), table 6, compares with a fixed set.
5. A batch is decoded without a scheduler: its prompts are read together, then cycles run with no
   word from the device but how many sequences are unfinished, now and then. One that repeats its
   last tokens is cut: a greedy loop has no end, and the batch would wait for it.

Trade-off: slots of the batch are not refilled. A batch runs until a sixteenth of its answers is
left; those are cut there.
Not here: the command (scripts/train_head.py).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from decode import PREFILL_CHUNK, Buffers, build_cycles, prefill_chunk
from files.chat import PROBE
from files.checkpoint import saved_quantization
from files.config import read_raw
from files.io import is_gguf, read_jsonl
from run.engine import Engine
from run.generate import load, text_of
from run.options import DEFAULT, ROOT, GenerateConfig
from run.stats import sequence_memory
from runtime import copy_into
from sampling import SamplingMode
from scripts.bench.measure import repeated
from scripts.train import task_prompts
from scripts.train.workers import Workers

GIVEN = "given"
CODE = "code"
TASKS = "tasks"
LONG = "long"
OWN = "own"
# tokens of a source's answers, relative to the others': long ones bring many of their prompts
SHARES = {GIVEN: 1.0, CODE: 1.0, TASKS: 1.0, LONG: 0.25, OWN: 1.0}
SOURCES = tuple(SHARES)
GRAM = 13  # words in a row that a prompt may not share with an evaluation prompt
OWN_TOKENS = 128  # longest prompt that the model writes; a longer one is dropped
SORTED_BATCHES = 4  # prompts of so many batches are sorted by length
LOOP_TOKENS = 64  # of the end of an answer, said once more: it is cut
LOOP = 0.5  # share of an answer's 8-grams that occurred before in it; more is a loop
LONG_SMALLER = 8  # a batch of long texts has so many times fewer prompts
TOKENS_OF_A_WORD = 2  # of long texts
LONGEST = 4096  # tokens of a long text with its answer
TAIL = 16  # a batch ends when only one sequence in so many is unfinished
LOOKS = 8  # cycles between two looks at how many are
ASK = "Complete this Python function:\n\n```python\n{}\n```"


@dataclass(frozen=True)
class AnswerConfig:
    """Options of a run."""

    checkpoint: str = DEFAULT  # the target
    out: str = "answers"  # directory of the files; an unfinished run in it goes on
    prompts: str = str(ROOT / "data/train/gsm8k_train_clean.jsonl")
    eval: str = str(ROOT / "data/eval")  # to keep clear of: JSONL files or directories of them
    given: float = 0.0  # share of the answer tokens for `prompts`; 0: by SHARES
    chat: str = ""  # chat template; empty: the checkpoint's own
    tokens: float = 3e6  # answer tokens in all
    answer_tokens: int = 400  # longest answer; one that is cut is marked so
    prompt_tokens: int = 300  # longest prompt, template and earlier turns included
    batch_size: int = 48  # sequences decoded together; of long texts an eighth
    quant: str = "int8"  # of 16-bit weights; quantized ones stay as they are
    dtype: str = ""  # empty: the checkpoint's
    compile: bool | None = None  # as `GenerateConfig.compile`
    # answers at T = 1 to each prompt but the model's own, besides a greedy one; 0: one answer
    samples: int = 0
    seed: int = 0  # of the sampling noise and of the order
    device: str = ""


# ------------------------------------------------------------------------------- prompts


class Prompt(NamedTuple):
    """One question, and the way to answer it."""

    source: str
    turns: list[str]
    ids: list[int]  # of the first turn, rendered
    greedy: bool
    sample: int = 0  # the number of this answer at T = 1

    @property
    def text(self) -> str:
        """The first turn, which identifies the prompt."""
        return self.turns[0]


def shares(given: float) -> dict[str, float]:
    """Return the tokens of each source's answers, relative to the others'.

    given: the share of the given prompts, which the others leave; 0: by SHARES
    """
    if not given:
        return SHARES
    others = sum(SHARES.values()) - SHARES[GIVEN]
    rest = {source: (1 - given) * share / others for source, share in SHARES.items()}
    return rest | {GIVEN: given}


def hashed(text: str) -> int:
    """Return 32 bits that depend on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def words_of(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return re.findall(r"\w+", text.lower())


def read_turns(path: Path, flag: str) -> list[list[str]]:
    """Read the turns of every row of a JSONL file. Raises: ValueError for a row that has none."""

    def check(row: dict) -> str:
        turns = row.get("turns")
        wrong = 'it must be like {"turns": ["text", ...]}'
        if not isinstance(turns, list) or not turns:
            return wrong
        return "" if all(isinstance(turn, str) and turn.strip() for turn in turns) else wrong

    return [row["turns"] for row in read_jsonl(path, flag, check)]


def eval_texts(named: str) -> list[str]:
    """Read every turn of the evaluation prompts. Raises: ValueError.

    named: JSONL files or directories, comma-separated
    """
    texts = []
    for path in map(Path, named.split(",")):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ValueError(
                f"--eval: {path} holds no .jsonl file; name files with evaluation prompts"
            )
        for file in files:
            for turns in read_turns(file, "--eval"):
                texts += turns
    return texts


def headers(modules: Iterable[str]) -> Iterator[str]:
    """Yield functions that have docstrings, from `def` to the docstring's end, dedented."""
    for text in modules:
        lines = text.split("\n")  # as the parser counts them
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and ast.get_docstring(node):
                head = lines[node.lineno - 1 : node.body[0].end_lineno]
                yield "\n".join(_without_indent(line, node.col_offset) for line in head)


def _without_indent(line: str, width: int) -> str:
    return line if line[:width].strip() else line[width:]  # a docstring may hold lines with less


@dataclass
class Filter:
    """A filter of prompts, which counts its decisions."""

    grams: set[tuple[str, ...]]  # of the evaluation prompts; shorter ones as a whole
    seen: set[tuple[str, ...]] = field(default_factory=set)
    counts: Counter = field(default_factory=Counter)  # by (source, fate)

    @staticmethod
    def against(texts: list[str]) -> Filter:
        """Make a filter that keeps clear of these texts."""
        return Filter({gram for text in texts for gram in Filter._grams(words_of(text))})

    @staticmethod
    def _grams(words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[i : i + GRAM]) for i in range(max(len(words) - GRAM + 1, 1))]

    def touches(self, text: str) -> bool:
        """Return whether a text shares 13 words in a row with an evaluation prompt.

        A text that is a shorter evaluation prompt counts as well.
        """
        return not self.grams.isdisjoint(self._grams(words_of(text)))

    def accepts(self, source: str, turns: list[str], fits: bool) -> bool:
        """Return whether a prompt is to be used. Writes: seen, counts.

        fits: false for a prompt that is too long or unfinished
        """
        words = tuple(words_of(turns[0]))
        if not fits or not words:
            fate = "too long or empty"
        elif words in self.seen:
            fate = "twice"
        elif any(map(self.touches, turns)):
            fate = "like an evaluation prompt"
        else:
            fate = "used"
        self.seen.add(words)
        self.counts[source, fate] += 1
        return fate == "used"

    def line(self, source: str) -> str:
        """Return the counts of a source as text."""
        fates = {fate: n for (name, fate), n in sorted(self.counts.items()) if name == source}
        total = sum(fates.values())
        used = fates.pop("used", 0)
        dropped = ", ".join(f"{n} {fate}" for fate, n in fates.items()) or "none"
        return f"{source}: {total} prompts, {used} used; dropped: {dropped}"


# ------------------------------------------------------------------------------- the run


class Run:
    """The waiting prompts, the counts of the answers, and the files of both."""

    def __init__(self, config: AnswerConfig, given: dict[str, list[list[str]]], filter: Filter):
        """Read the files of an earlier run, and load the target. Raises: ValueError.

        given: the turns of the prompts, by source
        """
        self.config = config
        self.filter = filter
        self.out = Path(config.out)
        path = Path(config.checkpoint)
        quantized = is_gguf(path) or saved_quantization(read_raw(path)) is not None
        options = GenerateConfig(
            checkpoint=config.checkpoint,
            draft="none",
            chat=config.chat,
            quant="none" if quantized else config.quant,
            dtype=config.dtype,
            compile=config.compile,
            device=config.device,
            seed=config.seed,
            context=config.prompt_tokens + config.answer_tokens,
        )
        one = load(options)
        sampled = _of_batch(one, 1.0, config.batch_size, one.context)
        greedy = _of_batch(one, 0.0, config.batch_size, one.context)
        self.engines = {False: sampled, True: greedy}  # by greedy
        self.long_tokens = _long_tokens(config, sampled)
        self.long_engines = {}  # as `engines`; made when they are needed
        template = one.template
        self.encoders = Workers(lambda turns: template.encode(one.tokenizer, turns, []))
        self.opening = sampled.template.render(list(PROBE[:1]), []).partition(PROBE[0])[0]
        self.tokens: Counter = Counter()  # answer tokens by (source, greedy)
        self.cut: Counter = Counter()  # answers that were cut, by source
        self.waiting: dict[tuple[str, bool], deque[Prompt]] = {
            (source, greedy): deque() for source in SOURCES for greedy in (False, True)
        }
        # prompts that an earlier run has answered: text, greedy, sample
        self.done: set[tuple[str, bool, int]] = set()
        self.writes = True  # the model goes on writing prompts
        keys = {"source", "temperature", "turns", "answers", "ended", "answer_ids"}
        for row in self._read("answers.jsonl", keys):
            self._count(row)
            self.done.add((row["turns"][0], row["temperature"] == 0, row.get("sample", 0)))
        size = config.batch_size
        for source, prompts in given.items():
            self._add(
                source, [(turns, True) for turns in prompts], SORTED_BATCHES * self.size(source)
            )
        rows = self._read("prompts.jsonl", {"turns", "ended"})
        own = [(row["turns"], row["ended"]) for row in rows]
        for first in range(0, len(own), size):  # as they were written
            self._add(OWN, own[first : first + size], size)
        self.attempts = len(own)  # prompts that the model has written

    def _read(self, name: str, keys: set[str]) -> list[dict]:
        """Read rows with these keys. Writes: the file, without a torn last line."""
        path = self.out / name
        data = path.read_bytes() if path.is_file() else b""
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(path, end)
        if not end:
            return []
        wrong = f"its keys must be {', '.join(sorted(keys))}"
        return read_jsonl(path, "--out", lambda row: "" if keys <= row.keys() else wrong)

    def _append(self, name: str, rows: list[dict]) -> None:
        with open(self.out / name, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _count(self, row: dict) -> None:
        fate = "empty or like an evaluation prompt"
        if not row["answers"] and repeated(row["answer_ids"]) > LOOP:
            fate = "looping"
        if row["answers"]:
            fate = "used"
            self.tokens[row["source"], row["temperature"] == 0] += len(row["answer_ids"])
        self.filter.counts["answers", fate] += 1
        self.cut[row["source"]] += not row["ended"]

    def _add(self, source: str, prompts: list[tuple[list[str], bool]], group: int) -> int:
        """Queue the good prompts that are not answered.

        prompts: turns, and true for those that ended; group: prompts in a row to sort by length
        Returns: the number of good ones.
        """
        good = []
        encoded = self.encoders.map([turns[:1] for turns, _ in prompts])
        for (turns, ended), ids in zip(prompts, encoded):
            if self.filter.accepts(source, turns, ended and len(ids) <= self.longest(source)):
                good += self._answers_of(source, turns, ids)
        if source != OWN:  # those are written in the order of their noise
            good.sort(key=lambda p: hashed(f"order {self.config.seed} {p.text}"))
        for first in range(0, len(good), group):
            for p in sorted(good[first : first + group], key=lambda p: len(p.ids)):
                if (p.text, p.greedy, p.sample) not in self.done:
                    self.waiting[source, p.greedy].append(p)
        return len(good)

    def _answers_of(self, source: str, turns: list[str], ids: list[int]) -> list[Prompt]:
        """List the ways to answer a prompt."""
        if self.config.samples and source != OWN:
            sampled = [Prompt(source, turns, ids, False, i) for i in range(self.config.samples)]
            return [Prompt(source, turns, ids, True), *sampled]
        greedy = hashed(f"greedy {turns[0]}") < 2**31  # half of them
        return [Prompt(source, turns, ids, greedy)]

    def size(self, source: str) -> int:
        """Return the number of sequences in a batch."""
        size = self.config.batch_size
        return max(size // LONG_SMALLER, 1) if source == LONG else size

    def longest(self, source: str) -> int:
        """Return the tokens of the longest prompt."""
        return self.long_tokens if source == LONG else self.config.prompt_tokens

    def engine(self, source: str, greedy: bool) -> Engine:
        """Return the engine for a batch. Writes: long_engines."""
        if source != LONG:
            return self.engines[greedy]
        if greedy not in self.long_engines:
            plain = self.engines[greedy]
            context = self.long_tokens + self.config.answer_tokens
            temperature = plain.config.temperature
            self.long_engines[greedy] = _of_batch(plain, temperature, self.size(LONG), context)
        return self.long_engines[greedy]

    def total(self) -> int:
        """Return the number of answer tokens so far."""
        return sum(self.tokens.values())

    def step(self) -> bool:
        """Answer a batch of the kind that is furthest behind. Writes: both files.

        Returns: false when no prompt is left.
        """
        by_source = shares(self.config.given)
        share = {}  # of the kinds that have prompts
        for source, greedy in self.waiting:
            has_prompts = self.waiting[source, greedy] or (source == OWN and self.writes)
            if has_prompts and by_source[source]:
                share[source, greedy] = by_source[source]
        if not share:
            return False

        def behind(kind: tuple[str, bool]) -> float:  # with half of its next batch
            batch = self.size(kind[0]) * self.config.answer_tokens / 2
            return (self.tokens[kind] + batch / 2) / share[kind]

        source, greedy = min(share, key=behind)
        queue = self.waiting[source, greedy]
        size = self.size(source)
        while source == OWN and self.writes and len(queue) < size:
            self._write_prompts()
        batch = [queue.popleft() for _ in range(min(size, len(queue)))]
        if batch:
            self._answer(batch)
        return True

    def _write_prompts(self) -> None:
        """Let the model write a batch of prompts, until none of a batch is good.

        Writes: prompts.jsonl, `waiting`, `writes`.
        """
        engine = self.engines[False]
        size = self.config.batch_size
        ids = engine.tokenizer.encode(self.opening, bos=engine.template.bos, special=True)
        streams = [(self.attempts + i, 1) for i in range(size)]
        prompts = []
        for new in decoded(engine, streams, [ids] * size, OWN_TOKENS):
            prompts.append((text_of(engine, new).strip(), new[-1] in engine.eos_ids))
        self._append(
            "prompts.jsonl", [{"turns": [text], "ended": ended} for text, ended in prompts]
        )
        self.attempts += size
        self.writes = self._add(OWN, [([text], ended) for text, ended in prompts], size) > 0
        if not self.writes:
            print(
                f"note: none of {size} prompts that the model wrote was good; it writes no more",
                flush=True,
            )

    def _answer(self, batch: list[Prompt]) -> None:
        """Answer the turns of a batch of prompts. Writes: answers.jsonl."""
        engine = self.engine(batch[0].source, batch[0].greedy)
        rows = [
            {
                "source": p.source,
                "temperature": engine.config.temperature,
                "sample": p.sample,
                "turns": [],
                "answers": [],
                "ended": True,
                "answer_ids": [],  # of all answers
            }
            for p in batch
        ]
        live = [(p, row, p.ids) for p, row in zip(batch, rows)]
        while live:
            streams = []
            for p, row, _ in live:
                row["turns"] = p.turns[: len(row["answers"]) + 1]
                streams.append((hashed("\n".join(row["turns"])), p.sample))
            ids = [ids for _, _, ids in live]
            new_tokens = decoded(engine, streams, ids, self.config.answer_tokens)
            further = [
                (p, row, self._next_ids(p, row))
                for (p, row, _), new in zip(live, new_tokens)
                if self._take(row, engine, new)
            ]
            live = [(p, row, ids) for p, row, ids in further if ids]
        for row in rows:
            self._count(row)
        self._append("answers.jsonl", rows)

    def _take(self, row: dict, engine: Engine, new: list[int]) -> bool:
        """Add an answer to a row if it is good. Returns: whether a further turn may follow."""
        answer = text_of(engine, new)
        good = answer.strip() and repeated(new) <= LOOP and not self.filter.touches(answer)
        if good:
            row["answers"].append(answer)
        elif row["answers"]:  # the conversation is what came before
            row["turns"] = row["turns"][:-1]
            return False
        row["answer_ids"] = row["answer_ids"] + new
        row["ended"] = new[-1] in engine.eos_ids
        return bool(good and row["ended"])

    def _next_ids(self, p: Prompt, row: dict) -> list[int]:
        """Return the tokens up to the next answer; none for the last turn, or if it is too long."""
        engine = self.engine(p.source, p.greedy)
        answers = row["answers"]
        if len(answers) == len(p.turns):
            return []
        ids = engine.template.encode(engine.tokenizer, p.turns[: len(answers) + 1], answers)
        return ids if len(ids) <= self.longest(p.source) else []

    def lines(self) -> str:
        """Return the counts of every kind as text."""
        cut = ", ".join(f"{self.cut[source]} {source}" for source in SOURCES)
        kinds = (*SOURCES, "answers")
        return "\n".join([*map(self.filter.line, kinds), f"answers that were cut: {cut}"])


def _long_tokens(config: AnswerConfig, engine: Engine) -> int:
    """Return the tokens of the longest prompt of a long text."""
    context = min(engine.target.config.max_context, LONGEST)
    return max(context - config.answer_tokens, config.prompt_tokens)


def _of_batch(engine: Engine, temperature: float, size: int, context: int) -> Engine:
    """Return an engine for batches, without its cycles' captures, which the first batch makes."""
    config = replace(engine.config, temperature=temperature, batch_size=size)
    return build_cycles(replace(engine, config=config, context=context))


def decoded(
    engine: Engine, streams: list[tuple[int, int]], prompts: list[list[int]], longest: int
) -> list[list[int]]:
    """Decode a batch, but for its tail.

    streams: the key of each sequence's noise
    Returns: the new tokens of every sequence.
    """
    if not engine.free:
        sequence_memory(engine)
    buffers = engine.free.pop() if engine.free else Buffers(engine)
    state = buffers.state
    live = len(prompts)
    params = [engine.config.sampling] * engine.config.batch_size
    sampling = engine.sampling_tensors(params, engine.config.seed)
    buffers.reset(engine, sampling)
    keys = torch.tensor(streams, device=engine.device)
    state.sampling.prompt[:live], state.sampling.sample[:live] = keys.unbind(1)
    tokens = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
    state.tokens[:live, : tokens.shape[1]] = tokens.to(engine.device)
    lengths = torch.tensor([len(ids) for ids in prompts], device=engine.device)
    state.pos[:live] = lengths
    state.limit[:live] = (lengths + longest).clamp(max=engine.context) - 1
    state.done[:live] = False
    mode = SamplingMode.needed_by(engine.config.sampling)
    with torch.no_grad():
        for begin in range(0, tokens.shape[1], PREFILL_CHUNK):
            width = min(PREFILL_CHUNK, tokens.shape[1] - begin)
            start = torch.full_like(state.pos, begin)
            new, _ = prefill_chunk(engine, buffers.cache, buffers.state, mode, start, width)
            copy_into(state, new)
        cycle = engine.cycles[mode][0]

        def run_cycle() -> None:
            new, *_ = cycle(buffers.cache, state)
            copy_into(state, new)

        for number in range(longest):
            if number % LOOKS == 0:
                if number >= 2 * LOOP_TOKENS:  # so many were written
                    state.done.logical_or_(is_looping(state.tokens, state.pos))
                if int((~state.done).sum()) <= live // TAIL:
                    break
            engine.run_step(buffers, "answers", run_cycle)
    engine.free.append(buffers)
    ends = (state.pos[:live] + 1).tolist()
    rows = state.tokens[:live].tolist()
    return [row[len(ids) : end] for row, ids, end in zip(rows, prompts, ends)]


def is_looping(tokens: Tensor, pos: Tensor) -> Tensor:
    """Return whether the last LOOP_TOKENS tokens of a sequence are the same a little earlier.

    tokens: [B, S] int64; pos: [B] int64, index of the last token
    Returns: [B] bool.
    """
    back = torch.arange(2 * LOOP_TOKENS, device=pos.device)
    latest = tokens.gather(1, (pos[:, None] - back).clamp(min=0))  # [B, 2 LOOP_TOKENS]
    ends = latest.unfold(1, LOOP_TOKENS, 1)  # [B, LOOP_TOKENS + 1, LOOP_TOKENS], by the period
    return (ends[:, 1:] == ends[:, :1]).all(2).any(1)


def open_run(config: AnswerConfig) -> Run:
    """Read the prompts and what is answered already, and load the target.

    Raises: ValueError for files that cannot be read, and for prompts of which none can be used.
    """
    given = []
    for file in config.prompts.split(","):
        given += read_turns(Path(file), "--prompts")
    code = [[ASK.format(header)] for header in headers(task_prompts.modules())]
    long = task_prompts.long_texts(LONGEST // TOKENS_OF_A_WORD)
    prompts = {GIVEN: given, CODE: code, TASKS: [*task_prompts.tasks()], LONG: [*long]}
    filter = Filter.against(eval_texts(config.eval))
    run = Run(config, prompts, filter)
    if not filter.counts[GIVEN, "used"]:
        raise ValueError(
            f"--prompts: nothing in {config.prompts} can be used ({filter.line(GIVEN)}; at most "
            f"{config.prompt_tokens} tokens); name another file"
        )
    return run


def by_tokens(run: Run) -> float:
    """Return the share of the answer tokens that are there."""
    return run.total() / run.config.tokens


def answer(config: AnswerConfig, over: Callable[[Run], float] = by_tokens) -> Run:
    """Write answers until there are enough or no prompt is left. Writes: `config.out`.

    over: called at first and after every batch; returns the share of the work that is over
    """
    Path(config.out).mkdir(parents=True, exist_ok=True)
    run = open_run(config)
    share = over(run)
    with tqdm(initial=run.total(), unit="token", desc="answers", disable=None) as bar:
        while share < 1 and run.step():
            share = over(run)
            bar.total = int(run.total() / share)
            bar.update(run.total() - bar.n)
    print(run.lines(), flush=True)
    return run
