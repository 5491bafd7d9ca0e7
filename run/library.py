"""The library for Python: `load` is in run/load.py, and this is what one does with its engine.

    engine = load("checkpoints/demo")
    answer = generate(engine, "def f():")  # .text, .tokens, .finish_reason, .stats
    for piece in stream(engine, "def f():"): print(piece, end="")

An installed package has these functions as `gpt_eagle.load`, `.generate`, `.stream`, `.astream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

from options import load_part, require
from run.engine import Engine
from run.generate import Answer, Answers, Batch, need_tokenizer
from run.prompts import Conversation, with_options
from run.scheduler import Piece

Prompt = str | Conversation | list[dict]  # a text, turns, token ids, or messages


class Text(str):
    """A piece of an answer's text. No piece ends within a character."""

    index: tuple[int, int, int]  # of its answer
    tokens: list[int]  # that came with it; a piece may be "" and have some
    answer: Answer | None  # which this piece ends; before, None

    @classmethod
    def of(cls, batch: Batch, piece: Piece) -> Text:
        """Make the piece of a step."""
        text = cls(piece.text)
        text.index = piece.request.index
        text.tokens = piece.tokens
        text.answer = batch.answer(piece.request) if piece.request.reason else None
        return text


def is_one_prompt(prompts: Any) -> bool:
    """Return whether it is a prompt, not a list of some: a text, messages, or token ids."""
    if isinstance(prompts, str) or not prompts:
        return isinstance(prompts, str)
    first = prompts[0]
    return isinstance(first, dict) or type(first) is int


def make_batch(
    engine: Engine,
    prompts: list,
    grammar: Any = None,
    logprobs: int | None = None,
    draft: int | str | None = None,
    **options: Any,
) -> Batch:
    """Check the prompts and the options of a call. Raises: ValueError for one that cannot be."""
    prompts = [encode_messages(engine, prompt) for prompt in prompts]
    draft_limit = engine.draft_limit(0 if draft == "none" else draft)
    fault = f"logprobs must be a number of tokens, 0 to 20; it is {logprobs!r}"
    require(logprobs is None or (type(logprobs) is int and 0 <= logprobs <= 20), fault)
    config, draws = with_options(engine, options, len(prompts))
    guides = []
    if grammar is not None:
        guides = load_part("extension", "grammar").compile_grammars(engine, grammar, len(prompts))
    return Batch(replace(engine, config=config), prompts, draws, guides, draft_limit, logprobs)


def encode_messages(engine: Engine, prompt: Any) -> Any:
    """Return the token ids of messages, {"role": ..., "content": ...}; other prompts as they are.

    Raises: ValueError without a chat template, and for messages that it has no place for.
    """
    messages = list(prompt) if isinstance(prompt, (list, tuple)) else []
    if not messages or not all(isinstance(each, dict) for each in messages):
        return prompt
    fault = "messages need a chat template; load with chat=NAME, or give texts"
    require(engine.template is not None, fault)
    return engine.template.encode_messages(engine.tokenizer, messages)


def generate(engine: Engine, prompts: Prompt | list[Prompt], **options: Any) -> Answer | Answers:
    """Decode prompts, `num_samples` times each, `batch_size` sequences at a time.

    A finished sequence makes way for the next one.
    prompts: one, whose answer is returned: a text, messages or token ids; or a list of such
        prompts, and of conversations, which are lists of texts
    options:
        `max_new_tokens`, `num_samples`, `stop` (a text or several), `seed`, and the fields of
            `options.Sampling`, where they differ from the engine's; of the last two, a list gives
            each prompt its own
        `grammar`: a text in Lark or GBNF, or a JSON schema (a dict); a list gives each its own
        `logprobs`: log-probabilities of the tokens, with as many of the likeliest ones beside each
        `draft`: drafted tokens of a cycle at most; 0 or "none" for none; the text is the same
    Returns: the answer; of a list of prompts, or with `num_samples`, a list of all answers.
    Raises: ValueError for a prompt, a value or a grammar that cannot be used.
    """
    one = is_one_prompt(prompts)
    batch = make_batch(engine, [prompts] if one else prompts, **options)
    batch.decode_all(batch.streams)
    answers = batch.result()
    return answers[0] if one and len(answers) == 1 else answers


def stream(engine: Engine, prompts: Prompt | list[Prompt], **options: Any) -> Iterator[Text]:
    """Decode as `generate` does, and yield the texts of all answers as they are decided.

    The last piece of an answer has it as `answer`; `index` tells the answers of several apart.
    Raises: as `generate`, at the call.
    """
    batch = make_batch(engine, [prompts] if is_one_prompt(prompts) else prompts, **options)
    need_tokenizer(engine)
    return pieces_of(batch)


def pieces_of(batch: Batch) -> Iterator[Text]:
    """Decode a batch, and yield its texts."""
    with closing(batch.steps(batch.streams)) as steps:
        for pieces in steps:
            for piece in pieces:
                yield Text.of(batch, piece)


async def astream(
    engine: Engine, prompts: Prompt | list[Prompt], **options: Any
) -> AsyncIterator[Text]:
    """Decode as `stream` does, in a thread of its own, so that the event loop goes on."""
    pieces = stream(engine, prompts, **options)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        try:
            while (piece := await loop.run_in_executor(thread, next, pieces, None)) is not None:
                yield piece
        finally:  # behind the step that may still run
            thread.submit(pieces.close)
