"""Prompts: from the options or a file, and the checks on their token ids. This module imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from command_line import require
from files import read_jsonl, read_named
from options import DEFAULT, DEMO, GenerateConfig

PROMPTS = ((DEFAULT, "The capital of France is"), (DEMO, "def read_lines(path):"))
Conversation = list[str] | list[int]  # turns of text, or the token ids of a single prompt


def read_prompts(config: GenerateConfig) -> list[Conversation]:
    """The conversations to decode. Raises: ValueError for a file that cannot be read or holds no prompt."""
    if config.prompt_ids is not None:
        parts = config.prompt_ids.replace(" ", "").split(",")
        if not all(re.fullmatch(r"-?\d+", p) for p in parts):
            raise ValueError(
                f"--prompt_ids must be numbers like 5,17,3; it is {config.prompt_ids!r}"
            )
        return [[int(p) for p in parts]]
    if config.prompt is not None:
        return [[config.prompt]]
    if not config.prompt_file:
        named = os.path.realpath(config.checkpoint)
        text = next((text for path, text in PROMPTS if os.path.realpath(path) == named), None)
        require(
            text is not None,
            "no prompt; give one with --prompt, --prompt_file, --prompt_ids or --interactive",
        )
        return [[text]]
    return _prompts_of_file(Path(config.prompt_file))


def _prompts_of_file(path: Path) -> list[Conversation]:
    if path.suffix == ".jsonl":
        turns = [row.get("turns") for row in read_jsonl(path, "--prompt_file")]
        for number, each in enumerate(turns, 1):
            if (
                not isinstance(each, list)
                or not each
                or not all(isinstance(t, str) and t for t in each)
            ):
                form = '{"turns": ["text", ...]}'
                raise ValueError(
                    f"--prompt_file: {path} row {number} has no list of texts; write it as {form}"
                )
        return turns
    text = read_named(path, "--prompt_file")
    if not text.strip():
        raise ValueError(f"--prompt_file: {path} is empty; give it some text")
    return [[text]]


def check_ids(ids: list[int], vocab: int, context: int) -> list[int]:
    """Raises: ValueError for a prompt that is empty, out of range or does not fit."""
    if not ids:
        raise ValueError("the prompt is empty; give it at least one token")
    bad = next((i for i in ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise ValueError(f"token ids must be in 0..{vocab - 1}; the prompt has {bad}")
    if len(ids) >= context:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the context holds {context} with at least one new token; "
            "shorten it or raise --context"
        )
    return ids
