"""Prompts: read from the options or a file, checked as token ids, and how each is decoded.

No torch is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from files.io import LocalError, parse_json, parse_jsonl, read_named
from options import DEMO, one_line, parse_prompt_ids, require
from run.options import DEFAULT, SAMPLING, GenerateConfig, Sampling
from run.parsing import SEVERAL, by_names

PROMPTS = ((DEFAULT, "What is the capital of Italy?"), (DEMO, "def read_lines(path):"))
Conversation = list[str] | list[int]  # turns of text, or the token ids of a single prompt
OF_A_PROMPT = {*SAMPLING, "seed"}
# options that are lists of texts themselves
LISTS = {f.name for f in fields(GenerateConfig) if f.type == SEVERAL}
OF_A_CALL = {"max_new_tokens", "num_samples", "stop", *OF_A_PROMPT}


class PromptRow(list[str]):
    """The turns of a row of a file, and the keys that tell the row apart."""

    def __init__(self, turns: list[str], keys: dict[str, Any]):
        super().__init__(turns)
        self.keys = keys


def read_prompts(config: GenerateConfig) -> list[Conversation]:
    """Read the conversations to decode.

    Raises: ValueError for a file that cannot be read or holds no prompt.
    """
    if config.prompt_ids is not None:
        return [parse_prompt_ids(config.prompt_ids)]
    if config.prompt == "-":
        text = sys.stdin.read()
        require(text.strip() != "", "--prompt -: standard input is empty; give it some text")
        return [[text.removesuffix("\n")]]
    if config.prompt is not None:
        return [[config.prompt]]
    if not config.prompt_file:
        return [[_default_prompt(config.checkpoint)]]
    return prompts_of_file(Path(config.prompt_file), "--prompt_file")


def read_grammar(config: GenerateConfig) -> str | dict | None:
    """Read the file of --grammar: a text in Lark or GBNF, or a JSON schema; None without one.

    Raises: ValueError for a file that cannot be read, and where llguidance is not installed.
    """
    if not config.grammar:
        return None
    path = Path(config.grammar)
    is_pipe = path.exists() and not path.is_file()
    require(not is_pipe, f"--grammar is read more than once, and {path} is no file; name a file")
    text = read_named(path, "--grammar")
    installed = importlib.util.find_spec("llguidance") is not None
    require(installed, "--grammar needs llguidance; run: pip install llguidance")
    if not config.has_schema:
        _check_grammar(text)
        return text
    schema = parse_json(text, f"--grammar {config.grammar}")
    fault = f"--grammar {config.grammar} must hold a JSON schema, which is an object; correct it"
    require(isinstance(schema, dict), fault)
    _check_grammar(schema)
    return schema


def _check_grammar(source: str | dict) -> None:
    """Check a grammar in Lark or GBNF, or a schema; keys that are not served are said later."""
    from llguidance import LLMatcher, grammar_from

    try:
        if isinstance(source, str):
            grammar = grammar_from("grammar", source)
        else:
            schema = json.dumps(source)
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": True})
        fault = LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        fault = str(error)
    require(not fault, f"the grammar is refused: {one_line(fault)}; correct it")


def _default_prompt(checkpoint: str) -> str:
    for path, prompt in PROMPTS:
        if os.path.realpath(path) == os.path.realpath(checkpoint):
            return prompt
    raise ValueError(
        "no prompt; give one with --prompt, --prompt_file, --interactive or --prompt_ids=IDS"
    )


def prompts_of_file(path: Path, flag: str) -> list[Conversation]:
    """Read the conversations of a file: JSONL with `turns`, or a text, which is one prompt.

    A file is JSONL by its suffix, or by its first key.

    flag: names the file in the message
    Raises: ValueError for a file that cannot be read or holds no prompt.
    """
    text = sys.stdin.read() if str(path) == "-" else read_named(path, flag)
    if path.suffix.lower() == ".jsonl" or re.match(r'\s*\{\s*"turns"', text):
        form = '{"turns": ["text", ...]}'
        rows = []
        for number, record in enumerate(parse_jsonl(text, f"{flag}: {path}"), 1):
            require(
                _are_turns(record.get("turns")),
                f"{flag}: {path} row {number} has no list of texts; write it as {form}",
            )
            keys = {name: record[name] for name in ("id", "question_id") if name in record}
            rows.append(PromptRow(record["turns"], keys))
        return rows
    if not text.strip():
        raise ValueError(f"{flag}: {path} is empty; give it some text")
    return [[text]]


def _are_turns(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, str) and turn for turn in value)


def as_conversation(prompt: str | Conversation) -> Conversation:
    """Return a text as its turns. Raises: ValueError for anything but texts or token ids."""
    items = [prompt] if isinstance(prompt, str) else prompt
    is_list = isinstance(items, Iterable)
    is_list = is_list and not isinstance(items, dict)
    items = list(items) if is_list else []
    texts = all(isinstance(item, str) for item in items)
    if not is_list or not (texts or all(type(item) is int for item in items)):
        raise ValueError(
            f"a prompt is a text, a list of texts or a list of token ids; one is {prompt!r}"
        )
    return items


class ContextOverflow(LocalError):
    """The error for a prompt that is longer than the context."""


def check_ids(ids: list[int], model: Any, context: int) -> list[int]:
    """Read the token ids of a prompt.

    model: `hf.config.ModelConfig`
    Returns: the ids.
    Raises: ValueError for a prompt that is empty, out of range or does not fit.
    """
    if not ids:
        raise ValueError("the prompt is empty; give it at least one token")
    for token in ids:
        if not 0 <= token < model.vocab_size:
            known = f"0..{model.vocab_size - 1}"
            raise ValueError(f"token ids must be in {known}; the prompt has {token}")
    if len(ids) >= context:
        remedy = "shorten it"
        if context < model.max_context:
            remedy = f"shorten it or raise --context, up to {model.max_context}"
        raise ContextOverflow(
            f"the prompt has {len(ids)} tokens, the context holds {context} "
            f"with at least one new token; {remedy}",
            # words by which langchain, litellm and others know to shorten a conversation
            f"This model's maximum context length is {context} tokens with at least one new token, "
            f"and the prompt has {len(ids)}; shorten it",
        )
    return ids


def answer_room(most: int, context: int) -> int:
    """Return the tokens that a chat's oldest turns make room for. most: tokens of an answer"""
    return min(most, context // 2)


def with_options(
    engine: Any, options: dict[str, Any], count: int
) -> tuple[GenerateConfig, list[tuple[Sampling, int]]]:
    """Apply the options of a call to those of an engine, a `decode.Engine`.

    options: of OF_A_CALL; those of OF_A_PROMPT are a value for all prompts or a list with one each
    count: prompts of the call
    Returns: the config of the call; the parameters and the seed of each prompt.
    Raises: ValueError for an option that is not of a call, or a value that cannot be.
    """
    options = by_names(GenerateConfig, options)
    names = ", ".join(sorted(options.keys() - OF_A_CALL))
    require(not names, f"{names} cannot change after load(); load another engine")
    several = {name: value for name, value in options.items() if _is_for_each(name, value)}
    for name, values in several.items():
        require(name in OF_A_PROMPT, f"{name} is one number for all prompts; it is {values!r}")
        fault = f"{name} has {len(values)} values, and there are {count} prompts; give one for each"
        require(len(values) == count, fault)
    config = replace(
        engine.config, **{name: options[name] for name in options.keys() - several.keys()}
    )
    owns = []  # config of each prompt
    for number in range(count):
        each = {name: values[number] for name, values in several.items()}
        own = replace(config, **by_names(GenerateConfig, each))
        own.check_request()
        engine.check_sampling(own.sampling)
        owns.append(own)
    return config, [(own.sampling, own.seed) for own in owns]


def _is_for_each(name: str, value: Any) -> bool:
    """Return whether the value of an option is a list with one for each prompt.

    Of an option that is a list of texts itself, it is a list of such lists.
    """
    lists = (list, tuple)
    if name in LISTS:
        return isinstance(value, lists) and any(isinstance(each, lists) for each in value)
    return isinstance(value, lists)


def for_one_answer(engine: Any, options: dict[str, Any]) -> Any:
    """Return an engine, a `decode.Engine`, with the options of a call for one prompt as its own.

    Raises: as `with_options`.
    """
    config, [(sampling, seed)] = with_options(engine, options, 1)
    return replace(engine, config=replace(config, **sampling._asdict(), seed=seed))
