"""Evaluation tasks: conversations of data/eval, or of a file by path, in a published layout, too.

A row of a JSONL file (or of a JSON array) has one of these layouts:
    ours                  turns; id and task, if there are several
    MT-bench, Spec-Bench  question_id, category, turns
    SPEED-Bench           question_id, category, and turns, or messages of the user alone
    MATH-500              unique_id, problem
    MBPP                  task_id, prompt (or text), test_list
    LongBench             _id, dataset, context, input
A category, or a set of documents, is a task of its own.
Not here: data/README.md has their licences.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from files.io import read_jsonl
from options import require
from run.options import ROOT
from run.prompts import prompts_of_file

EVAL = ROOT / "data" / "eval"
# SPEED-Bench's rows of other data sets begin with this until its script has fetched them
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
UNPREPARED = (
    "this row of SPEED-Bench has no prompt yet; prepare the file with the script that its data "
    "card names"
)
FORM = 'a row must be like {"id": "a-1", "task": "a", "turns": ["text", ...]}'
MBPP = (  # the prompt of its README
    "You are an expert Python programmer, and here is your task: {} "
    "Your code should pass these tests:\n\n{}"
)


def _messages(row: dict) -> list:
    """Return the texts of SPEED-Bench's messages."""
    users = [message["content"] for message in row["messages"] if message["role"] == "user"]
    return users if len(users) == len(row["messages"]) else []


def _mbpp(row: dict) -> list[str]:
    text = row["prompt"] if "prompt" in row else row["text"]
    return [MBPP.format(text, "\n".join(row["test_list"]))]


# the keys of a layout, its task, and its turns
LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[dict], str], Callable[[dict], list]], ...] = (
    (("id", "task", "turns"), lambda row: row["task"], lambda row: row["turns"]),
    (("question_id", "category", "turns"), lambda row: row["category"], lambda row: row["turns"]),
    (("question_id", "category", "messages"), lambda row: row["category"], _messages),
    (("unique_id", "problem"), lambda row: "math500", lambda row: [row["problem"]]),
    (("task_id", "test_list"), lambda row: "mbpp", _mbpp),
    (
        ("_id", "dataset", "context", "input"),
        lambda row: row["dataset"],
        lambda row: [f"{row['context']}\n\n{row['input']}".strip()],
    ),
    (("turns",), lambda row: "", lambda row: row["turns"]),
)


def parsed(row: dict) -> tuple[str, list[str]]:
    """Return the task, "" without one, and the turns of a row.

    Raises: ValueError for one of no known layout.
    """
    layouts = [layout for layout in LAYOUTS if all(key in row for key in layout[0])]
    require(bool(layouts), FORM)
    _, task_of, turns_of = layouts[0]
    try:
        task = task_of(row)
        turns = turns_of(row)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(FORM) from None
    texts = isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)
    require(texts and bool(turns) and isinstance(task, str), FORM)
    require(not turns[0].startswith(UNRESOLVED), UNPREPARED)
    return task, turns


def row_fault(row: dict) -> str:
    """Return the fault of a row, or ""."""
    try:
        parsed(row)
    except ValueError as error:
        return str(error)
    return ""


def conversations(names: str) -> dict[str, list[list[str]]]:
    """Read conversations by task; those of rows without one are of their file's name.

    names: of data/eval, or files of a text or of JSON in a layout above, comma-separated
    Raises: ValueError that names the file and the line.
    """
    tasks: dict[str, list[list[str]]] = {}
    for name in names.split(","):
        file = Path(name) if Path(name).suffix else EVAL / f"{name}.jsonl"
        if not file.is_file():
            bundled = ", ".join(sorted(path.stem for path in EVAL.glob("*.jsonl")))
            raise ValueError(f"--tasks: there is no {name}; name a file, or one of {bundled}")
        if file.suffix not in (".jsonl", ".json"):
            tasks.setdefault(file.stem, []).extend(prompts_of_file(file, "--tasks"))
            continue
        for row in read_jsonl(file, "--tasks", row_fault):
            task, turns = parsed(row)
            tasks.setdefault(task or file.stem, []).append(turns)
    return tasks
