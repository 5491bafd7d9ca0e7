"""Read the texts that a head learns from, cut them into batches, and compute the target's features.

1. Rows are dialogues (`turns` and `answers`, as generate_answers.py writes them, or messages: see
   FORMS), or texts (`text`). The loss counts the answers of dialogues and all of a text.
2. Five in a hundred, by the hash of their first turn, are held out to evaluate with.
3. Examples are laid end to end in a random order and split: nothing is padding, and a position may
   see the end of the example before its own.
4. With `--features` the target's features of each batch of an epoch are kept in a folder, a file
   each: for version 3 with the target's best token after each position, since the matmul with the
   whole LM head takes as long as the rest of a step for 0.5 billion parameters and 150,000 tokens.
   Later epochs, and later runs on the same data, read the files.
Trade-off: with a folder, later epochs have the batches of the first, in another order.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from files.chat import FIXED
from files.io import read_json, read_jsonl, replace_file, write_text
from files.jinja import ChatTemplate
from files.tokenizer import Tokenizer
from model import DTYPES, Transformer
from options import require
from run.session import common_prefix
from scripts.train.train_options import TrainOptions

HELD_OUT = 0.05  # of the dialogues
# ShareGPT writes `from` and `value`, SpecForge, speculators and others `role` and `content`
FORMS = (
    "texts: `turns` and `answers`, `conversations` or `messages` (of `from` and `value`, or `role` "
    "and `content`), or `text`; `ended` is true or false, `answer_ids` are whole numbers"
)
USERS = ("human", "user")
MODELS = ("gpt", "assistant", "model", "chatgpt", "bing", "bard")


def hashed(text: str) -> int:
    """Return 32 bits that depend on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def held_out(name: str) -> bool:
    """Return whether a document is held out, by the hash of its name alone."""
    return hashed(name) < HELD_OUT * 2**32


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

    Raises: ValueError for another form, with the number of the row.
    """
    dialogues = []
    for number, row in enumerate(read_jsonl(file, "--data"), 1):
        try:
            dialogues.append(_dialogue(row))
        except (KeyError, TypeError, UnicodeEncodeError):
            raise ValueError(f"--data: {file} row {number} must have {FORMS}") from None
    kept = [d for d in dialogues if d.answers and all(d.turns) and all(d.answers)]
    left_out = len(dialogues) - len(kept)
    print(f"{file}: {len(kept)} dialogues or texts, {left_out} left out for want of an answer")
    return kept


def _dialogue(row: dict) -> Dialogue:
    """Read a row. Raises: KeyError, TypeError or UnicodeEncodeError for another form."""
    row = _held(row)
    if "text" in row:
        return Dialogue([], [_text(row["text"])])
    if "turns" in row:
        turns = _list_of(object, row["turns"])
        answers = _list_of(object, row["answers"])
    else:
        turns, answers = _paired(row["messages" if "messages" in row else "conversations"])
    # without white space around answers, which some templates drop and others keep
    pairs = [(_text(turn), _text(answer).strip()) for turn, answer in zip(turns, answers)]
    ids = _list_of(int, row["answer_ids"]) if "answer_ids" in row and len(turns) == 1 else None
    (ended,) = _list_of(bool, [row.get("ended", True)])
    turns = [turn for turn, _ in pairs]
    return Dialogue(turns, [answer for _, answer in pairs], ended, ids)


def _held(row: dict) -> dict:
    """Return a row without what is null: a table's columns that the row does not use."""
    return {key: value for key, value in row.items() if value is not None}


def _list_of(kind: type, values: Any) -> list:
    """Return a list, whose values are of a kind. Raises: TypeError for another."""
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TypeError
    return values


def _text(content: str | list[dict]) -> str:
    """Return a text, or the texts of a message's parts.

    Raises: TypeError for another kind, UnicodeEncodeError for half a character.
    """
    if isinstance(content, list):
        return "".join(_text(part["text"]) for part in content)
    if not isinstance(content, str):
        raise TypeError
    content.encode()
    return content


def _paired(messages: list[dict]) -> tuple[list[Any], list[Any]]:
    """Pair user and model, from the first user's message to where the alternation breaks."""
    messages = list(map(_held, _list_of(dict, messages)))
    speakers = [message["role" if "role" in message else "from"] for message in messages]
    texts = [message["content" if "content" in message else "value"] for message in messages]
    start = next((i for i, name in enumerate(speakers) if name in USERS), len(speakers))
    turns = []
    answers = []
    for i in range(start, len(speakers) - 1, 2):
        if speakers[i] not in USERS or speakers[i + 1] not in MODELS:
            break
        turns.append(texts[i])
        answers.append(texts[i + 1])
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
        known = min(written) >= 0 and max(written) < tokenizer.vocab_size
        if not known or tokenizer.decode(written).strip() != answers[0]:
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


def read_data(config: TrainOptions) -> tuple[list[Dialogue], list[Dialogue]]:
    """Read the data. Returns: dialogues to train on, and those held out for the evaluation.

    Raises: ValueError for rows of another form, and for too few.
    """
    dialogues = [d for file in config.data.split(",") for d in read_dialogues(Path(file))]
    kept = [d for d in dialogues if not held_out(d.name)]
    by_name = {d.name: d for d in dialogues if held_out(d.name)}  # a prompt may have two answers
    # in an order without regard to the file's, whose parts may be of one kind
    held = [by_name[name] for name in sorted(by_name, key=hashed)[: config.eval_prompts]]
    if kept and not held:  # of a few dialogues, the hash may choose none
        held = [kept.pop()]
    require(kept, "--data: one dialogue is held out to evaluate with, and none is left; give more")
    return kept, held


def load_data(
    kept: list[Dialogue],
    held: list[Dialogue],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> tuple[list[Example], list[list[int]]]:
    """Tokenize the dialogues. Returns: training examples, and prompts of those held out.

    Of a text the first half is the prompt.
    """
    require(
        template or not any(d.turns for d in kept + held),
        f"--data: dialogues need a chat template; name one of {', '.join(FIXED)} with --chat",
    )
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


# ------------------------------------------------------------------------------- features


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the aux layers of a new head: the official ones, as far as the target has them.

    The head takes the inputs of these layers of the target.
    """
    official = (2, layers // 2, layers - 3)
    return tuple(sorted({layer for layer in official if 0 <= layer <= layers}))


class Features:
    """The target's features of every batch, with the head's aux layers, from the folder if any."""

    def __init__(
        self, config: TrainOptions, target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor
    ):
        """aux_layers: the head's; tokens: [M] int64, those of an epoch

        Raises: ValueError for features that cannot be kept, or a folder with those of other data.
        """
        dim = target.config.dim
        self.width = (1 + len(aux_layers)) * dim
        positions = torch.arange(config.seq_len, device=config.device)
        self.steps = positions.expand(config.batch_size, -1)
        self.batches = len(tokens) // self.steps.numel()  # of an epoch
        self.target = target
        self.ranks = config.version == 3  # the target's best tokens are asked for
        self.dtype = DTYPES[config.dtype]  # of the files
        self.folder = Path(config.features) if config.features else None
        if self.folder:
            aux_layers = aux_layers or default_aux_layers(target.config.n_layers)
            made_of = {
                "shape": [self.batches, *self.steps.shape, (1 + len(aux_layers)) * dim],
                "dtype": config.dtype,
                "aux_layers": list(aux_layers),
                "weights": weights_hash(Path(config.checkpoint)),
                "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            }
            self._open(made_of)
        self.aux_layers = aux_layers

    def _open(self, made_of: dict) -> None:
        """Make the folder, or check that it is of the same data and weights."""
        note = self.folder / "made_of.json"
        if not note.is_file():
            size = torch.Size(made_of["shape"]).numel() * self.dtype.itemsize
            check_room(self.folder, size)
            self.folder.mkdir(exist_ok=True)
            write_text(str(note), json.dumps(made_of))
            print(f"features: {made_of['shape']}, {size / 1e9:.2f} GB, in {self.folder}")
        elif read_json(note) != made_of:
            raise ValueError(
                f"--features: {self.folder} has features of other data or weights; "
                "name another folder"
            )

    @torch.no_grad()
    def of(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the features of a batch, and the target's best tokens. Writes: its file.

        Returns: features [B, T, (1 + aux_layers) F]; best [B, T] int64, None where no loss asks.
        """
        device = self.steps.device
        file = self.folder / f"{batch.number}.safetensors" if self.folder else None
        kept = load_file(file, str(device)) if file and file.is_file() else {}
        if self.ranks and "best" not in kept or not kept:
            # compiling takes minutes, and on a processor a batch as long as before (3.8 and 4.1 s)
            tokens = batch.tokens.to(device)
            kept["features"] = self.target(tokens, self.steps, aux_layers=self.aux_layers)
            if self.ranks:
                kept["best"] = best_tokens(self.target, kept["features"])
            if file:
                kept["features"] = kept["features"].to(self.dtype)
                replace_file(file, lambda path: save_file(kept, path))
        return kept["features"][..., : self.width], kept.get("best")


@torch.no_grad()
def best_tokens(target: Transformer, features: Tensor) -> Tensor:
    """Return the token with the target's largest logit, [B, T] int64.

    Sequence by sequence: the logits of a batch may take gigabytes.
    features: [B, T, F], or with aux hidden states behind them
    """
    return torch.stack([target.logits(row).argmax(-1) for row in features])


def weights_hash(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's config and weights."""
    files = [checkpoint]
    if checkpoint.is_dir():
        kinds = ("config.json", "*.safetensors", "*.bin")
        files = sorted(file for kind in kinds for file in checkpoint.glob(kind))
    total = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


def check_room(folder: Path, size: int) -> None:
    """Check that the disk has room for `size` bytes in a new folder. Raises: ValueError."""
    free = shutil.disk_usage(folder.parent).free
    if size > free - 1e9:
        raise ValueError(
            f"--features: {size / 1e9:.2f} GB do not fit beside {folder.parent}, "
            f"{free / 1e9:.2f} GB are free (1 GB stays free); name a folder on another disk"
        )
