"""`--set results=FILE.jsonl`: one line per finished conversation; the next run decodes the rest.

A line holds `run`, `prompt` and `sample` (numbers from 0), `id` or `question_id` where the prompt's
row has it, its `turns`, and per turn `tokens`, `text`, `finish_reason` and `prompt_tokens`, as in
`--json`. `run` is a digest of everything that decides
the tokens: the conversation, its numbers, the checkpoint's path, the kind of device, and the
options except those that change only the speed. A line that was cut by a kill is written again.
The file is locked: a second run is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from files.io import parse_json, read_text
from options import log_note
from run.engine import Engine
from run.options import Sampling
from run.prompts import Conversation, PromptRow, read_grammar

# start of every line
BEGIN = '{"run": "'
# options that decide the tokens with accept=exact
DECIDES = (
    "inflate", "chat", "system", *Sampling._fields, "seed", "ignore_eos", "max_new_tokens", "stop",
    "quant", "group_size", "dtype", "accept", "grammar",
)  # fmt: skip
# With the residual rule every option of the drafter decides them too. These never do; of the
# device only its kind does (`_facts`).
DECIDES_NOTHING = (
    "batch_size", "compare", "compile", "device", "interactive", "json",
    "num_samples", "profile", "prompt", "prompt_file", "prompt_ids", "results", "show_drafts",
    "threads", "trace", "verbose",
)  # fmt: skip


class Results:
    """The file and its content."""

    def __init__(self, engine: Engine, conversations: Sequence[Conversation]):
        """Read the results of an earlier run.

        Raises: ValueError for a file of other options or prompts, for one that another run writes,
        and where --json or --trace would hold only a part of the results.
        """
        config = engine.config
        self.path = Path(config.results)
        self.facts = json.dumps(_facts(engine), sort_keys=True)
        self.conversations = conversations
        self.done: set[tuple[int, int]] = set()  # (prompt, sample)
        self.samples = config.num_samples
        self._append("")  # report at once that the file cannot be written
        self.lock = self.path.open("a")  # held while the file is open
        try:
            self._lock()
            self._read()
            for name in ("json", "trace"):
                if getattr(config, name) and self.done:
                    raise ValueError(
                        f"{name} would hold only what this run decodes; "
                        "drop it, or name another file for results"
                    )
        except ValueError:
            self.lock.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"--set results: another run writes {self.path}; wait for it, or name another file"
            ) from None

    def _read(self) -> None:
        """Collect the finished conversations. Writes: the file, without a cut last line."""
        text = read_text(self.path)
        complete, _, rest = text.rpartition("\n")
        lines = complete.split("\n") if complete else []
        for number, line in enumerate(lines, 1):
            self.done.add(self._key(line, f"--set results: {self.path} line {number}"))
        if not rest.startswith(BEGIN[: len(rest)]):
            raise ValueError(
                f"--set results: {self.path} ends with what no run has written; name another file"
            )
        if rest:
            os.truncate(self.path, len(text.encode()) - len(rest.encode()))
        if text:
            total = len(self.conversations) * self.samples
            done = sum(sample < self.samples for _, sample in self.done)
            log_note(f"{done} of {total} results are in {self.path} already")

    def _digest(self, prompt: int, sample: int) -> str:
        parts = json.dumps([self.facts, self.conversations[prompt], prompt, sample])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def _key(self, line: str, where: str) -> tuple[int, int]:
        """Return a line's prompt and sample. where: its place, for the message"""
        entry = parse_json(line, where)
        if isinstance(entry, dict) and {"run", "prompt", "sample"} <= entry.keys():
            key = (entry["prompt"], entry["sample"])
            valid = all(type(number) is int and number >= 0 for number in key)
            valid = valid and key[0] < len(self.conversations)
            if valid and entry["run"] == self._digest(*key):
                return key
        raise ValueError(f"{where} is no result of these prompts and options; name another file")

    def add(self, turns: list[dict[str, Any]]) -> None:
        """Append a finished conversation.

        turns: `index` and the fields of the line, per turn
        Raises: ValueError where the file cannot be written.
        """
        prompt, sample = turns[0]["index"][:2]
        line = {"run": self._digest(prompt, sample), "prompt": prompt, "sample": sample}
        conversation = self.conversations[prompt]
        if isinstance(conversation, PromptRow):
            line |= conversation.keys
        if isinstance(conversation[0], str):
            line["turns"] = conversation
        line |= {name: [turn[name] for turn in turns] for name in turns[0] if name != "index"}
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ValueError(
                f"--set results: cannot write {self.path}: {error.strerror}; name another file"
            ) from None


def _facts(engine: Engine) -> dict[str, Any]:
    """Return the options and other values that decide the tokens."""
    config = {name: engine.option(name) for name in asdict(engine.config)}
    names = set(DECIDES)
    if config["accept"] != "exact":
        names = config.keys() - set(DECIDES_NOTHING)
    facts = {name: config[name] for name in names}
    facts["checkpoint"] = os.path.realpath(config["checkpoint"])
    facts["grammar"] = read_grammar(engine.config)
    facts["context"] = engine.context
    facts["device"] = engine.device.type  # kinds of device round differently
    return facts
