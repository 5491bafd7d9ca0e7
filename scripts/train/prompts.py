"""Collect prompts of many kinds for a target to answer, and keep clear of evaluation prompts.

1. Given: the files of --prompts. Tasks: data/train/tasks.jsonl, of twenty kinds, in turn: writing,
   roles, reasoning, sums, code, editing, extraction, science, humanities, translation and so on.
2. Code: functions of the standard library to complete, from their headers and docstrings.
3. Long: parts of the language reference that Python carries as `pydoc_data` (PSF licence), with a
   question or to summarize.
4. `Filter` drops duplicates, prompts that do not fit, and those that share 13 words in a row with
   an evaluation prompt (or contain a shorter one), and counts.
Trade-off: a template is poorer than a user's question. It costs nothing, and may be redistributed.
"""

from __future__ import annotations

import ast
import itertools
import pydoc_data.topics
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from files.io import read_jsonl
from run.options import ROOT

GIVEN = "given"
CODE = "code"
TASKS = "tasks"
LONG = "long"
OWN = "own"  # written by the model itself (generate_answers.py)
# tokens of a source's answers, relative to the others': long ones bring many of their prompts
SHARES = {GIVEN: 1.0, CODE: 1.0, TASKS: 1.0, LONG: 0.25, OWN: 1.0}
TASK_FILE = ROOT / "data/train/tasks.jsonl"
GRAM = 13  # words in a row that a prompt may not share with an evaluation prompt
ASK = "Complete this Python function:\n\n```python\n{}\n```"
QUESTIONS = (
    "Summarize: {}",
    "{}\n\nSummarize the text above in three sentences.",
    "Read this text and answer: what is it about, and what are its main rules?\n\n{}",
    "{}\n\nList the most important points of the text above.",
    "Explain the following text to a beginner:\n\n{}",
)
LENGTHS = (0.4, 1.0, 0.6, 0.8)  # of long texts, as shares of the longest


# ------------------------------------------------------------------------------- sources


def read_turns(path: Path, flag: str) -> list[list[str]]:
    """Read the turns of every row of a JSONL file. Raises: ValueError for a row that has none."""

    def check(row: dict) -> str:
        turns = row.get("turns")
        texts = turns if isinstance(turns, list) else []
        good = texts and all(isinstance(turn, str) and turn.strip() for turn in texts)
        return "" if good else 'it must be like {"turns": ["text", ...]}'

    return [row["turns"] for row in read_jsonl(path, flag, check)]


def eval_texts(folder: Path) -> list[str]:
    """Read every turn of the evaluation prompts. Raises: ValueError."""
    texts = []
    for file in sorted(folder.glob("*.jsonl")):
        for turns in read_turns(file, "data"):
            texts += turns
    return texts


def sources(files: str, most_words: int) -> dict[str, list[list[str]]]:
    """Return the turns of all prompts by source. Raises: ValueError for a file that is not read.

    files: given ones, comma-separated; most_words: of a long text
    """
    return {
        GIVEN: sum((read_turns(Path(file), "--prompts") for file in files.split(",")), []),
        CODE: [[ASK.format(header)] for text in modules() for header in headers(text)],
        TASKS: read_turns(TASK_FILE, "data"),
        LONG: [*long_texts(most_words)],
    }


def modules() -> Iterator[str]:
    """Yield the texts of Python's standard library, without its tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
    skip |= {"site-packages", "__pycache__", "lib2to3"}
    for file in sorted(root.rglob("*.py")):
        if skip & set(file.relative_to(root).parts):
            continue
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue


def headers(module: str) -> Iterator[str]:
    """Yield functions that have docstrings, from `def` to the docstring's end, dedented."""
    lines = module.split("\n")  # as the parser counts them
    for node in ast.walk(ast.parse(module)):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and ast.get_docstring(node):
            head = lines[node.lineno - 1 : node.body[0].end_lineno]
            # a docstring may hold lines with less indentation
            yield "\n".join(line.removeprefix(" " * node.col_offset) for line in head)


def long_texts(most_words: int) -> Iterator[list[str]]:
    """Yield parts of Python's language reference with a question, of several lengths in turn."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    words = [piece for text in texts for piece in re.findall(r"\S+\s*", text)]
    begin = 0
    for number in itertools.count():
        end = begin + round(most_words * LENGTHS[number % len(LENGTHS)])
        if end > len(words):
            return
        text = "".join(words[begin:end]).strip()
        yield [QUESTIONS[number % len(QUESTIONS)].format(text)]
        begin = end


# ------------------------------------------------------------------------------- the filter


def words_of(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Return the runs of GRAM words of a text; a shorter text is one as a whole."""
    words = words_of(text)
    return {tuple(words[i : i + GRAM]) for i in range(max(len(words) - GRAM + 1, 1))}


@dataclass
class Filter:
    """A filter of prompts, which counts its decisions."""

    grams: set[tuple[str, ...]]  # of the evaluation prompts
    seen: set[tuple[str, ...]] = field(default_factory=set)
    counts: Counter = field(default_factory=Counter)  # by (source, fate)

    @staticmethod
    def against(texts: list[str]) -> Filter:
        """Make a filter that keeps clear of these texts."""
        return Filter(set().union(*map(grams, texts)))

    def touches(self, text: str) -> bool:
        """Return whether a text shares 13 words in a row with an evaluation prompt.

        A text that is a shorter evaluation prompt counts as well.
        """
        return not self.grams.isdisjoint(grams(text))

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
