"""`--results FILE.jsonl`: one line per conversation, written as it ends; the next run decodes what is missing.

A line holds `run`, `prompt` and `sample` (numbers from 0), and per turn `tokens`, `text`, `finish_reason` and
`prompt_tokens`, as in `--json`. `run` is a digest of all that decides the tokens: the conversation, its numbers, the
checkpoint's path, the kind of device, and the options but for those that only change how fast they come. A line that a
kill has cut is written again. The file is locked: a second run is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode import Engine
from files import parse_json, read_text
from prompts import Conversation

BEGIN = '{"run": "'
DECIDES = (
    "inflate", "random_twin", "chat", "system", "temperature", "top_k", "top_p", "seed", "ignore_eos", "max_new_tokens",
    "quant", "group_size", "dtype", "accept",
)  # fmt: skip
# with the residual rule all decides that says who drafts and how, but these; of the device only its kind, see `Results`
DECIDES_NOTHING = (
    "batch_size", "compare", "compile", "device", "interactive", "json", "num_samples", "profile", "prompt",
    "prompt_file", "prompt_ids", "results", "trace",
)  # fmt: skip


class Results:
    """The file, and what is in it."""

    def __init__(self, engine: Engine, conversations: Sequence[Conversation]):
        """Read what an earlier run has written.

        Raises: ValueError for a file of other options or prompts, for one that another run writes, and where --json or
        --trace would hold a part of the results only.
        """
        config, self.path = asdict(engine.config), Path(engine.config.results)
        names = DECIDES if config["accept"] == "exact" else config.keys() - set(DECIDES_NOTHING)
        facts = {name: config[name] for name in names}
        facts |= {"checkpoint": os.path.realpath(config["checkpoint"]), "context": engine.context}
        facts |= {"device": config["device"].partition(":")[0]}  # each rounds otherwise
        self.facts, self.conversations = json.dumps(facts, sort_keys=True), conversations
        self.done: set[tuple[int, int]] = set()  # (prompt, sample)
        self.samples = engine.config.num_samples
        self._append("")  # or say now that it cannot be written
        self.lock = self.path.open("a")  # held as long as it is open
        try:
            self._lock()
            self._read()
            part = next((name for name in ("json", "trace") if config[name] and self.done), "")
            if part:
                raise ValueError(
                    f"--{part} would hold only what this run decodes; drop it, or name another --results"
                )
        except ValueError:
            self.lock.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"--results: another run writes {self.path}; wait for it, or name another file"
            ) from None

    def _read(self) -> None:
        text = read_text(self.path)
        whole, _, rest = text.rpartition("\n")
        for number, line in enumerate(whole.split("\n") if whole else (), 1):
            self.done.add(self._key(line, f"--results: {self.path} line {number}"))
        if not rest.startswith(BEGIN[: len(rest)]):
            raise ValueError(
                f"--results: {self.path} ends with what no run has written; name another file"
            )
        if rest:
            os.truncate(self.path, len(text.encode()) - len(rest.encode()))
        if text:
            total, done = (
                len(self.conversations) * self.samples,
                sum(key[1] < self.samples for key in self.done),
            )
            print(f"note: {done} of {total} results are in {self.path} already", file=sys.stderr)

    def _digest(self, prompt: int, sample: int) -> str:
        mine = json.dumps([self.facts, self.conversations[prompt], prompt, sample])
        return hashlib.sha256(mine.encode()).hexdigest()[:16]

    def _key(self, line: str, where: str) -> tuple[int, int]:
        row = parse_json(line, where)
        known = isinstance(row, dict) and {"run", "prompt", "sample"} <= row.keys()
        key = (row["prompt"], row["sample"]) if known else ()
        ours = (
            known
            and all(type(n) is int and n >= 0 for n in key)
            and key[0] < len(self.conversations)
        )
        if not ours or row["run"] != self._digest(*key):
            raise ValueError(
                f"{where} is no result of these prompts and options; name another file"
            )
        return key

    def add(self, turns: list[dict[str, Any]]) -> None:
        """Append a conversation that is over. turns: `index` and what the line tells of each. Raises: ValueError."""
        key = turns[0]["index"][:2]
        line = {"run": self._digest(*key), "prompt": key[0], "sample": key[1]}
        line |= {name: [turn[name] for turn in turns] for name in turns[0] if name != "index"}
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ValueError(
                f"--results: cannot write {self.path}: {error.strerror}; name another file"
            ) from None
