"""Let the target write answers to train a draft head with, and a third of the prompts.

1. Prompts are given questions (`prompts`), headers of the standard library's functions with their
   docstrings, tasks of many kinds and long texts (task_prompts.py), and texts that the model itself
   writes behind the opening of a user turn, at T = 1.
2. Duplicates, prompts that are too long, answers that loop, and prompts and answers that share 13
   words in a row with an evaluation prompt (or contain a shorter one) are dropped, and counted.
   The further turns of a given prompt follow, while answers are good and the text fits.
3. Half of the prompts, chosen by hash, are answered greedily, the others at T = 1.
4. The scheduler decodes them side by side: a free place takes the next prompt of the source that
   is furthest behind, so any part of the file, from its start, is a mixture by equal tokens.
5. Finished answers are lines of `answers.jsonl`. Noise depends on the seed and the prompt alone. A
   killed run goes on with the prompts that have no line.
Sources: Magpie (arXiv 2406.08464); EAGLE (arXiv 2401.15077), table 6, compares with a fixed set.
Not here: the command (scripts/train_head.py).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from decode import build_cycles
from files.chat import PROBE
from files.checkpoint import saved_quantization
from files.config import read_raw
from files.io import is_gguf, read_jsonl
from run.generate import load, text_of
from run.options import DEFAULT, ROOT, GenerateConfig
from run.scheduler import Request, Scheduler
from scripts.bench.common import repeated
from scripts.train import task_prompts

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
LOOP_TOKENS = 64  # of the end of an answer, said once more: it is cut
LOOKS = 32  # tokens between two looks for that
LOOP = 0.5  # share of an answer's 8-grams that occurred before in it; more is a loop
LONG_FEWER = 8  # as many long texts are decoded together as others, divided by this
TOKENS_OF_A_WORD = 2  # of long texts
LONGEST = 4096  # tokens of a long text with its answer
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
    answer_tokens: int = 400  # longest answer; one that is cut is marked so
    prompt_tokens: int = 300  # longest prompt, template and earlier turns included
    batch_size: int = 48  # sequences decoded together; of long texts an eighth
    quant: str = "int8"  # of 16-bit weights; quantized ones stay as they are
    seed: int = 0  # of the sampling noise and of the order
    device: str = ""


# ------------------------------------------------------------------------------- prompts


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


@dataclass(eq=False)
class PendingDialogue:
    """A prompt of one or more turns, and its answers so far."""

    source: str
    turns: list[str]  # none yet where the model is to write the first
    number: int = 0  # of a prompt of the model's own
    answers: list[str] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)  # of all answers
    ended: bool = True  # the last answer is complete

    @property
    def temperature(self) -> float:
        """The temperature of its answers: 0 for half of all, by hash."""
        return float(hashed(f"greedy {self.turns[0]}") >= 2**31)

    @property
    def asked(self) -> list[str]:
        """The turns up to the one that waits for an answer."""
        return self.turns[: len(self.answers) + 1]

    def row(self) -> dict[str, Any]:
        """Return the line of the file."""
        return {
            "source": self.source,
            "number": self.number,
            "temperature": self.temperature,
            "turns": self.turns[: len(self.answers) or 1],
            "answers": self.answers,
            "ended": self.ended,
            "answer_ids": self.answer_ids,
        }


class Run:
    """The waiting prompts, the answers that are being decoded, their counts, and the file."""

    def __init__(self, config: AnswerConfig, given: dict[str, list[list[str]]], filter: Filter):
        """Read the file of an earlier run, and load the target. Raises: ValueError.

        given: the turns of the prompts, by source
        """
        self.config = config
        self.filter = filter
        self.file = Path(config.out, "answers.jsonl")
        self.shares = shares(config.given)
        self.engine = load(_options(config))
        context = min(self.engine.target.config.max_context, LONGEST)
        self.long_tokens = max(context - config.answer_tokens, config.prompt_tokens)
        self.schedulers: dict[bool, Scheduler] = {False: Scheduler(self.engine)}  # by long
        template = self.engine.template
        opening = template.render(list(PROBE[:1]), []).partition(PROBE[0])[0]
        self.opening = self.engine.tokenizer.encode(opening, bos=template.bos, special=True)
        self.tokens: Counter = Counter()  # answer tokens by source
        self.cut: Counter = Counter()  # answers that were cut, by source
        self.done: set[str] = set()  # first turns with a line
        self.attempts = 0  # prompts that the model has written
        self.misses = 0  # of those, the last ones in a row that were not used
        for row in self._read():
            self._count(row)
            self.done.add(row["turns"][0])
            if row["source"] == OWN:
                self.filter.accepts(OWN, row["turns"], True)
                self.attempts = max(self.attempts, row["number"])
        self.waiting = {source: iter(self._mixed(prompts)) for source, prompts in given.items()}
        self.exhausted: set[str] = set()  # sources without a further prompt
        self.decoding: dict[Request, PendingDialogue] = {}

    def _mixed(self, prompts: list[list[str]]) -> list[list[str]]:
        """Return prompts in an order that depends on their texts and the seed alone."""
        return sorted(prompts, key=lambda turns: hashed(f"order {self.config.seed} {turns[0]}"))

    def _read(self) -> list[dict]:
        """Read the rows. Writes: the file, without a torn last line."""
        data = self.file.read_bytes() if self.file.is_file() else b""
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(self.file, end)
        if not end:
            return []
        keys = PendingDialogue(OWN, [""]).row().keys()
        wrong = f"its keys must be {', '.join(keys)}"
        return read_jsonl(self.file, "--out", lambda row: "" if keys <= row.keys() else wrong)

    def _write(self, dialogue: PendingDialogue) -> None:
        """Write a finished dialogue. Writes: the file, the counts."""
        row = dialogue.row()
        self._count(row)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _count(self, row: dict) -> None:
        fate = "empty or like an evaluation prompt"
        if not row["answers"] and repeated(row["answer_ids"]) > LOOP:
            fate = "looping"
        if row["answers"]:
            fate = "used"
            self.tokens[row["source"]] += len(row["answer_ids"])
        self.filter.counts["answers", fate] += 1
        self.cut[row["source"]] += not row["ended"]

    def total(self) -> int:
        """Return the number of answer tokens so far, of unfinished answers too."""
        unfinished = sum(len(request.tokens) for request, d in self.decoding.items() if d.turns)
        return sum(self.tokens.values()) + unfinished

    def step(self) -> bool:
        """Fill the free places, and decode a step. Writes: the file.

        Returns: whether there was anything left to decode.
        """
        source = self._furthest_behind()
        while source:
            self._start(source)
            source = self._furthest_behind()
        if not self.decoding:
            return False
        for scheduler in self.schedulers.values():
            for piece in scheduler.step():
                request = piece.request
                if not request.reason and is_looping(request.tokens):
                    scheduler.cancel(request)
                    self._take(request)
                elif request.reason:
                    self._take(request)
        return True

    def stop(self) -> None:
        """Take the unfinished answers as they are, cut. Writes: the file."""
        for request, dialogue in self.decoding.items():
            if request.tokens and dialogue.turns:
                self._add_answer(dialogue, request.tokens)
                self._write(dialogue)
        self.decoding.clear()
        for scheduler in self.schedulers.values():
            scheduler.close()

    # --------------------------------------------------------------------------- prompts

    def size(self, is_long: bool) -> int:
        """Return the number of sequences decoded together."""
        size = self.config.batch_size
        return max(size // LONG_FEWER, 1) if is_long else size

    def longest(self, source: str) -> int:
        """Return the tokens of the longest prompt."""
        return self.long_tokens if source == LONG else self.config.prompt_tokens

    def _has_place(self, source: str) -> bool:
        is_long = source == LONG
        taken = sum((d.source == LONG) == is_long for d in self.decoding.values())
        return taken < self.size(is_long)

    def _furthest_behind(self) -> str:
        """Return the source whose prompt is next; "" where no place is free or none is left."""
        if self.misses >= self.config.batch_size and OWN not in self.exhausted:
            self.exhausted.add(OWN)
            print(f"note: none of {self.misses} prompts that the model wrote was good", flush=True)
        expected = Counter(dialogue.source for dialogue in self.decoding.values())

        def behind(source: str) -> float:
            coming = expected[source] * self.config.answer_tokens / 2
            return (self.tokens[source] + coming) / self.shares[source]

        left = [s for s in SOURCES if self.shares[s] and s not in self.exhausted]
        left = [s for s in left if s != LONG or self._has_place(LONG)]
        source = min(left, key=behind, default="")
        return source if source and self._has_place(source) else ""

    def _start(self, source: str) -> None:
        """Begin with the next prompt of a source. Writes: `exhausted`, if there is none."""
        if source == OWN:
            self.attempts += 1
            self._ask(PendingDialogue(OWN, [], self.attempts))
            return
        for turns in self.waiting.get(source, ()):
            fits = len(self._encoded(turns[:1], [])) <= self.longest(source)
            if self.filter.accepts(source, turns, fits) and turns[0] not in self.done:
                self._ask(PendingDialogue(source, turns))
                return
        self.exhausted.add(source)

    def _encoded(self, turns: list[str], answers: list[str]) -> list[int]:
        return self.engine.template.encode(self.engine.tokenizer, turns, answers)

    def _scheduler(self, is_long: bool) -> Scheduler:
        """Return the scheduler of long texts, or of the others. Writes: `schedulers`."""
        if is_long not in self.schedulers:
            config = replace(self.engine.config, batch_size=self.size(is_long))
            context = self.long_tokens + self.config.answer_tokens
            engine = build_cycles(replace(self.engine, config=config, context=context))
            self.schedulers[is_long] = Scheduler(engine)
        return self.schedulers[is_long]

    # --------------------------------------------------------------------------- answers

    def _ask(self, dialogue: PendingDialogue) -> None:
        """Queue the next turn of a dialogue; of the model's own, first that it writes it."""
        sampling = self.engine.config.sampling
        if dialogue.turns:
            ids = self._encoded(dialogue.asked, dialogue.answers)
            noise_id = (hashed("\n".join(dialogue.asked)), 0)
            sampling = sampling._replace(temperature=dialogue.temperature)
            limit = self.config.answer_tokens
        else:
            ids = self.opening
            noise_id = (dialogue.number, 1)
            limit = OWN_TOKENS
        request = Request(ids, sampling, self.config.seed, limit, noise_id)
        self.decoding[request] = dialogue
        self._scheduler(dialogue.source == LONG).submit(request)

    def _take(self, request: Request) -> None:
        """Take a finished text, and go on with its dialogue. Writes: the file."""
        dialogue = self.decoding.pop(request)
        if dialogue.turns:
            goes_on = self._add_answer(dialogue, request.tokens)
        else:
            text = text_of(self.engine, request.tokens).strip()
            goes_on = self.filter.accepts(OWN, [text], self._has_ended(request.tokens))
            self.misses = 0 if goes_on else self.misses + 1
            dialogue.turns = [text]
            if not goes_on:
                return
        if goes_on:
            self._ask(dialogue)
        else:
            self._write(dialogue)

    def _has_ended(self, tokens: list[int]) -> bool:
        return tokens[-1] in self.engine.eos_ids

    def _add_answer(self, dialogue: PendingDialogue, new: list[int]) -> bool:
        """Add an answer to a dialogue if it is good. Returns: whether a further turn follows."""
        answer = text_of(self.engine, new)
        good = answer.strip() and repeated(new) <= LOOP and not self.filter.touches(answer)
        if dialogue.answers and not good:
            return False  # the dialogue is what came before
        dialogue.answer_ids += new
        dialogue.ended = self._has_ended(new)
        if not good:
            return False
        dialogue.answers.append(answer)
        if not dialogue.ended or len(dialogue.answers) == len(dialogue.turns):
            return False
        ids = self._encoded(dialogue.asked, dialogue.answers)
        return len(ids) <= self.longest(dialogue.source)

    def lines(self) -> str:
        """Return the counts of every kind as text."""
        cut = ", ".join(f"{self.cut[source]} {source}" for source in SOURCES)
        kinds = (*SOURCES, "answers")
        return "\n".join([*map(self.filter.line, kinds), f"answers that were cut: {cut}"])


def _options(config: AnswerConfig) -> GenerateConfig:
    """Return the options of decoding without a draft."""
    path = Path(config.checkpoint)
    quantized = is_gguf(path) or saved_quantization(read_raw(path)) is not None
    return GenerateConfig(
        checkpoint=config.checkpoint,
        draft="none",
        chat=config.chat,
        quant="none" if quantized else config.quant,
        device=config.device,
        temperature=1.0,
        batch_size=config.batch_size,
        context=config.prompt_tokens + config.answer_tokens,
    )


def is_looping(tokens: list[int]) -> bool:
    """Return whether the last LOOP_TOKENS tokens are the same a little earlier, now and then.

    A greedy loop has no end. The look is taken every LOOKS tokens.
    """
    if len(tokens) % LOOKS or len(tokens) < 2 * LOOP_TOKENS:
        return False
    end = tokens[-LOOP_TOKENS:]
    last = len(tokens) - LOOP_TOKENS  # where the end begins
    return any(
        tokens[last - period : last - period + LOOP_TOKENS] == end
        for period in range(1, LOOP_TOKENS + 1)
    )


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
    run = Run(config, prompts, Filter.against(eval_texts(config.eval)))
    run._start(GIVEN)
    if not run.filter.counts[GIVEN, "used"]:
        raise ValueError(
            f"--prompts: nothing in {config.prompts} can be used ({run.filter.line(GIVEN)}; at "
            f"most {config.prompt_tokens} tokens); name another file"
        )
    return run


def answer(config: AnswerConfig, is_over: Callable[[int], bool]) -> Run:
    """Write answers until there are enough or no prompt is left. Writes: `config.out`.

    is_over: of the number of answer tokens, asked before every step
    """
    Path(config.out).mkdir(parents=True, exist_ok=True)
    run = open_run(config)
    with tqdm(initial=run.total(), unit="token", desc="answers", disable=None) as bar:
        while not is_over(run.total()) and run.step():
            bar.update(run.total() - bar.n)
    run.stop()
    print(run.lines(), flush=True)
    return run
