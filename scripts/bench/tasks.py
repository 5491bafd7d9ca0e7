"""Evaluation tasks: conversations of data/eval, or of a file by path, in a published layout, too.

A row of a JSONL file (or of a JSON array) has turns (ours, MT-bench, Spec-Bench, SPEED-Bench),
messages of the user alone (SPEED-Bench), a problem (MATH-500), a prompt or text and its test_list
(MBPP), or a context and an input (LongBench). Each task, category or dataset is a task of its own.
Not here: data/README.md has their licences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def turns_of(row: dict) -> tuple[str, Any]:
    """Return the task of a layout that names none, else "", and the turns, of any type."""
    if "turns" in row:
        return "", row["turns"]
    if "messages" in row:
        users = [message["content"] for message in row["messages"] if message["role"] == "user"]
        return "", users if len(users) == len(row["messages"]) else []
    if "problem" in row:
        return "math500", [row["problem"]]
    if "test_list" in row:
        text = row["prompt"] if "prompt" in row else row["text"]
        return "mbpp", [MBPP.format(text, "\n".join(row["test_list"]))]
    return "", [f"{row['context']}\n\n{row['input']}".strip()]


def parsed(row: dict) -> tuple[str, list[str]]:
    """Return the task, "" without one, and the turns of a row.

    Raises: ValueError for one of no known layout.
    """
    try:
        task, turns = turns_of(row)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(FORM) from None
    named = [row[key] for key in ("task", "category", "dataset") if key in row]
    task = named[0] if named else task
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
        bundled = ", ".join(sorted(path.stem for path in EVAL.glob("*.jsonl")))
        fault = f"--tasks: there is no {name}; name a file, or one of {bundled}"
        require(file.is_file(), fault)
        if file.suffix not in (".jsonl", ".json"):
            tasks.setdefault(file.stem, []).extend(prompts_of_file(file, "--tasks"))
            continue
        for row in read_jsonl(file, "--tasks", row_fault):
            task, turns = parsed(row)
            tasks.setdefault(task or file.stem, []).append(turns)
    return tasks
