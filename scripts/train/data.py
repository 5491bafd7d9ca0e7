"""Read the texts that a head learns from, mark what counts in them, and cut them into batches.

1. Rows are dialogues (`turns` and `answers`, as generate_answers.py writes them, or ShareGPT's
   `conversations`), or texts (`text`). The loss counts the answers of dialogues and all of a text.
2. Five in a hundred, by the hash of their first turn, are held out to evaluate with.
3. Examples are laid end to end in a random order and split: nothing is padding, and a position may
   see the end of the example before its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from files.chat import CHAT_TEMPLATES, ChatTemplate
from files.io import read_jsonl
from files.tokenizer import Tokenizer
from run.session import common_prefix
from scripts.train.train_options import TrainOptions

HELD_OUT = 0.05  # of the dialogues


def held_out(name: str) -> bool:
    """Return whether a document is held out, by the hash of its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < HELD_OUT * 2**32


class Dialogue(NamedTuple):
    """Turns and their answers; a text is a single answer without a turn."""

    turns: list[str]
    answers: list[str]
    ended: bool = True  # the last answer is complete, and the end of sequence follows it
    answer_ids: list[int] | None = None  # the only answer as the target wrote it, its end included

    @property
    def name(self) -> str:
        """The text by which it is held out, or not."""
        return self.turns[0] if self.turns else self.answers[0][:200]


class Example(NamedTuple):
    """One sequence; `mask` marks the tokens to train on (those of answers, or all)."""

    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool

    @staticmethod
    def of(ids: list[int], mask: list[bool]) -> Example:
        return Example(torch.tensor(ids), torch.tensor(mask))


def read_dialogues(file: Path) -> list[Dialogue]:
    """Read the dialogues of a JSONL file, but for those without an answer.

    Raises: ValueError for another form.
    """
    dialogues = []
    for number, row in enumerate(read_jsonl(file, "--data"), 1):
        try:
            dialogues.append(_dialogue(row))
        except (KeyError, TypeError):
            form = "`turns` and `answers`, `conversations`, or `text`"
            raise ValueError(f"--data: {file} row {number} must have {form}") from None
    kept = [d for d in dialogues if d.answers and all(d.turns) and all(d.answers)]
    left_out = len(dialogues) - len(kept)
    print(f"{file}: {len(kept)} dialogues or texts, {left_out} left out for want of an answer")
    return kept


def _dialogue(row: dict) -> Dialogue:
    if "text" in row:
        return Dialogue([], [row["text"]])
    if "conversations" in row:
        turns, answers = _sharegpt(row["conversations"])
    else:
        turns, answers = row["turns"], row["answers"]
    pairs = min(len(turns), len(answers))
    ids = row.get("answer_ids") if len(turns) == 1 else None
    # without white space around answers, which some templates drop and others keep
    answers = [answer.strip() for answer in answers[:pairs]]
    return Dialogue(turns[:pairs], answers, row.get("ended", True), ids)


def _sharegpt(messages: list[dict]) -> tuple[list[str], list[str]]:
    """Pair human and model, from the first human message to where the alternation breaks."""
    human = [message["from"] in ("human", "user") for message in messages]
    start = human.index(True) if True in human else len(human)
    turns = []
    answers = []
    for i in range(start, len(messages) - 1, 2):
        if not human[i] or human[i + 1]:
            break
        turns.append(messages[i]["value"])
        answers.append(messages[i + 1]["value"])
    return turns, answers


def marked_tokens(
    dialogue: Dialogue, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[list[int], list[bool]]:
    """Tokenize a dialogue and mark its answers; a text is marked whole.

    Returns: the fields of an `Example`.
    Raises: ValueError when the answer's ids are another tokenizer's.
    """
    turns, answers, ended, written = dialogue
    if written:  # the target does not always choose the tokens that its tokenizer would
        if tokenizer.decode(written).strip() != answers[0]:
            wrong = f"--data: answer_ids are not the tokens of the answer {answers[0][:40]!r}"
            raise ValueError(f"{wrong}; was it another --checkpoint that wrote them?")
        prompt = template.encode(tokenizer, turns, [])
        return prompt + written, [False] * len(prompt) + [True] * len(written)
    end = list(tokenizer.eos_ids[:1]) if ended else []
    if not turns:
        ids = tokenizer.encode(answers[0]) + end
        return ids, [True] * len(ids)

    turns = list(map(tokenizer.as_text, turns))  # as in a chat

    # up to turn t and, with an answer, to its end
    def encode(t: int, answer: str = "") -> list[int]:
        text = template.render(turns[: t + 1], answers[:t])
        if answer:
            text += template.reply + answer
        return tokenizer.encode(text, bos=template.bos, special=True)

    ids = encode(len(turns) - 1, answers[-1]) + end
    mask = [False] * len(ids)
    for t, answer in enumerate(answers):
        # the common prefix finds the answer's span even where a token straddles its border
        begin = common_prefix(encode(t), ids)
        stop = common_prefix(encode(t, answer), ids) + 1
        mask[begin:stop] = [True] * len(mask[begin:stop])
    return ids, mask


def load_data(
    config: TrainOptions, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[list[Example], list[list[int]]]:
    """Read the data. Returns: training examples, and held-out prompts for the evaluation."""
    dialogues = [d for file in config.data.split(",") for d in read_dialogues(Path(file))]
    if any(d.turns for d in dialogues) and template is None:
        raise ValueError(
            "--data: dialogues need a chat template; name one of "
            f"{', '.join(CHAT_TEMPLATES)} with --chat"
        )
    kept = [d for d in dialogues if not held_out(d.name)]
    by_name = {d.name: d for d in dialogues if held_out(d.name)}  # a prompt may have two answers
    # in an order without regard to the file's, whose parts may be of one kind
    order = sorted(by_name, key=lambda name: hashlib.sha256(name.encode()).digest())
    held = [by_name[name] for name in order[: config.eval_prompts]]
    if kept and not held:  # of a few dialogues, the hash may choose none
        held = [kept.pop()]
    bar = tqdm(kept, "tokenize", unit="dialogue", disable=None)
    examples = [Example.of(*marked_tokens(d, tokenizer, template)) for d in bar]
    prompts = []
    for d in held:
        if d.turns:
            prompts.append(template.encode(tokenizer, d.turns[:1], []))
        else:
            ids = tokenizer.encode(d.answers[0])
            prompts.append(ids[: len(ids) // 2 or 1])
    return examples, prompts


def laid_out(examples: list[Example], seed: int) -> tuple[Tensor, Tensor]:
    """Lay all examples end to end, in a random order. Returns: ids and mask, [M] each."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([examples[e].ids for e in order.tolist()])
    mask = torch.cat([examples[e].mask for e in order.tolist()])
    return ids, mask


class Batch(NamedTuple):
    """Sequences of a step."""

    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, the tokens that count
    number: int  # within its epoch


def batches(examples: list[Example], config: TrainOptions, skip: int = 0) -> Iterator[Batch]:
    """Yield shuffled batches without end.

    With `--features` every epoch has the same batches, in another order, whatever the seed.
    skip: batches to pass over, to resume
    Raises: ValueError for less data than one batch.
    """
    shape = (config.batch_size, config.seq_len)
    size = config.batch_size * config.seq_len
    epoch = 0
    while True:
        seed = config.seed * 1000 + epoch
        ids, mask = laid_out(examples, 0 if config.features else seed)
        if len(ids) < size:
            raise ValueError(
                f"the data hold {len(ids)} tokens, one batch needs {size}; "
                "lower --batch_size or --seq_len"
            )
        numbers = torch.arange(len(ids) // size)
        if config.features:
            numbers = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
        for number in numbers[skip:].tolist():
            part = slice(number * size, (number + 1) * size)
            yield Batch(ids[part].view(shape), mask[part].view(shape), number)
        skip = max(skip - len(numbers), 0)
        epoch += 1
