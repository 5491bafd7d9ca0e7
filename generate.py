"""Generate text with a LLaMA target and whatever drafts for it.

    python generate.py --compile --chat --prompt "What is the capital of France?"

From Python:
    engine = load(checkpoint="checkpoints/demo", compile=True)
    result = generate(engine, ["def read_lines(path):"])          # .text, .tokens, .finish_reason, .stats
    for piece in stream(engine, "def read_lines(path):"): print(piece, end="")

`load` reads the target, the drafter and the tokenizer and warms the steps; `generate` decodes any number of prompts
through `batch_size` rows; `stream` yields text as it is decided. The loop is in decode.py, options in options.py.
"""

from __future__ import annotations

import os
import signal


def end_quietly(*_: Any) -> None:
    """End on Ctrl-C where nothing can be lost, without a traceback."""
    os._exit(130)  # as a shell reports it


if __name__ == "__main__":
    signal.signal(signal.SIGINT, end_quietly)  # until the command runs

import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from command_line import one_line_errors, parse
from files import write_text
from options import GenerateConfig
from prompts import Conversation, check_ids, read_prompts

Command = tuple[GenerateConfig, list[Conversation]]


def read_command(argv: list[str] | None = None, check: Callable = GenerateConfig.check) -> Command:
    """Read the command line and the prompts that it names. Exits with status 2 on a mistake."""
    config = parse(GenerateConfig, "generate.py", "Generate text, exactly, with draft trees.", argv)
    with one_line_errors("generate.py"):
        check(config)
        prompts = [] if config.interactive else read_prompts(config)
    return config, prompts


# The imports below take seconds: --help and mistakes are answered before. torchrun's ranks answer together (tp.ranks).
COMMAND = None
if __name__ == "__main__" and os.environ.get("WORLD_SIZE", "1") == "1":
    COMMAND = read_command()

import torch

import ranks
from decode import Engine, with_cycles
from drafters import RootOnly
from hf.tokenizer import Tokenizer
from load import load, warm_up
from session import Session
from stats import Stats, environment, stats_line, summary


class Turn(NamedTuple):
    """One turn that was decoded."""

    index: tuple[int, int, int]  # (prompt, sample, turn)
    prompt: list[int]
    new: list[int]


Watcher = Callable[[list[list[int]]], Any]  # told the new tokens of every row, step by step
Teller = Callable[[list[Turn]], Any]  # told the turns of a conversation that is over


def nothing(news: list) -> None:
    """Is told, and does nothing."""


@dataclass
class Result:
    """One entry per prompt, sample and turn, in this order; `stats` of the whole run."""

    index: list[tuple[int, int, int]]  # (prompt, sample, turn)
    tokens: list[list[int]]  # new tokens only, the one that ended them included
    text: list[str]
    finish_reason: list[str]  # "stop", "length" or "context"
    prompt_tokens: list[int]
    stats: dict[str, Any]
    trace: list[dict]


# -------------------------------------------------------------------------------------------------- load


# ---------------------------------------------------------------------------------------------- generate


def encode(engine: Engine, turns: list[str], answers: list[str]) -> list[int]:
    """Token ids of a conversation whose last turn waits for its answer. Raises: ValueError without a tokenizer."""
    if engine.tokenizer is None:
        Tokenizer.load(Path(engine.config.checkpoint))  # says what is missing
    if engine.template is not None:
        return engine.template.encode(engine.tokenizer, turns, answers)
    text = "".join(part for pair in zip(turns, answers) for part in pair) + turns[-1]
    return engine.tokenizer.encode(text, bos=True)


def first_ids(engine: Engine, conversation: Conversation) -> list[int]:
    """Token ids of the first turn. Raises: ValueError for a prompt that cannot be decoded."""
    given = not conversation or isinstance(conversation[0], int)
    ids = conversation if given else encode(engine, conversation[:1], [])
    return check_ids(ids, engine.target.config.vocab_size, engine.context)


class Batch:
    """Conversations that take the rows of a session one after the other, and what comes out of them."""

    def __init__(self, engine: Engine, prompts: list[str | Conversation]):
        """Encode and check the first turns, before anything is decoded, so that nothing is lost."""
        self.engine, self.stats = engine, Stats()
        self.entries: list[Turn] = []
        self.trace: list[dict] = []
        self.conversations = [[p] if isinstance(p, str) else list(p) for p in prompts]
        self.first = [first_ids(engine, c) for c in self.conversations]
        samples, size = engine.config.num_samples, engine.config.batch_size
        self.streams = [(p, s) for p in range(len(prompts)) for s in range(samples)]
        self.groups = [
            self.streams[first : first + size] for first in range(0, len(self.streams), size)
        ]

    def run(
        self, streams: list[tuple[int, int]], watch: Watcher = nothing, tell: Teller = nothing
    ) -> None:
        """Decode some of `streams`, in order: where a conversation is over, the next one takes its row."""
        session, coming, over = Session(self.engine), iter(streams), []
        talks: list[list[Turn]] = [
            [] for _ in session.live
        ]  # per row, the turns of its conversation
        while True:
            for row, talk in enumerate(talks):
                if not session.busy(row) and not self._next_turn(session, row, talk):
                    if talk:
                        over += talk
                        tell(talk)
                    talks[row] = self._first_turn(session, row, next(coming, None))
            if not any(talks):
                break
            new = session.step()
            for row, talk in enumerate(talks):
                if new[row]:
                    talk[-1].new.extend(new[row])
            for line in session.trace:
                prompt, sample, _ = talks[line["row"]][0].index
                self.trace.append(line | {"row": prompt * self.engine.config.num_samples + sample})
            session.trace.clear()
            watch(new)
        self.entries += sorted(over)
        self.stats.add(session.stats)

    def _first_turn(self, session: Session, row: int, stream: tuple[int, int] | None) -> list[Turn]:
        """Give a row the first turn of a conversation, if there is one. Returns: its turns."""
        if stream is None:
            return []
        session.admit(row, self.first[stream[0]], stream)
        return [Turn((*stream, 0), self.first[stream[0]], [])]

    def _next_turn(self, session: Session, row: int, talk: list[Turn]) -> bool:
        """Give a row its conversation's next turn. Returns: whether there is one. A turn that does not fit ends it."""
        turns = self.conversations[talk[0].index[0]] if talk else []
        if len(talk) == len(turns) or isinstance(turns[0], int):  # ids are a single turn
            return False
        ids = encode(
            self.engine, turns[: len(talk) + 1], [text_of(self.engine, entry.new) for entry in talk]
        )
        prompt, sample, turn = talk[-1].index
        if len(ids) >= self.engine.context:
            where = f"turn {turn + 2} of prompt {prompt + 1}"
            print(
                f"note: {where} no longer fits the context of {self.engine.context} tokens",
                file=sys.stderr,
            )
            return False
        session.admit(row, ids)
        talk.append(Turn((prompt, sample, turn + 1), ids, []))
        return True

    def result(self) -> Result:
        """Everything so far."""
        rows = [facts(self.engine, entry) for entry in self.entries]
        columns = {f.name: [row[f.name] for row in rows] for f in fields(Result)[:5]}
        return Result(**columns, stats=summary(self.engine, self.stats), trace=self.trace)


def facts(engine: Engine, entry: Turn) -> dict[str, Any]:
    """What a `Result` tells of a turn, in its first five fields."""
    told = (
        entry.index,
        entry.new,
        text_of(engine, entry.new),
        finish_reason(engine, entry.new),
        len(entry.prompt),
    )
    return dict(zip([f.name for f in fields(Result)], told))


def text_of(engine: Engine, ids: list[int]) -> str:
    """The text of new tokens; a plain continuation keeps its leading space."""
    return (
        engine.tokenizer.decode(ids, continuation=engine.template is None)
        if engine.tokenizer
        else ""
    )


def generate(
    engine: Engine,
    prompts: list[str | Conversation],
    watch: Watcher = nothing,
    tell: Teller = nothing,
    **options: Any,
) -> Result:
    """Decode prompts, `num_samples` times each: `batch_size` rows, each of which takes the next when it has ended.

    prompts: texts, lists of turns, or lists of token ids
    options: `max_new_tokens`, `num_samples` or `seed`, where they differ from the engine's
    Raises: ValueError for a prompt that cannot be decoded.
    """
    if options:
        bad = options.keys() - {"max_new_tokens", "num_samples", "seed"}
        if bad:
            raise ValueError(
                f"{', '.join(sorted(bad))} cannot change after load(); load another engine"
            )
        GenerateConfig(**options).check()
        engine = replace(engine, config=replace(engine.config, **options))
    if isinstance(prompts, str):
        raise ValueError("generate() takes a list of prompts; put a single text into one: [text]")
    batch = Batch(engine, prompts)
    batch.run(batch.streams, watch, tell)
    return batch.result()


def compare(drafted: Batch, tell: Teller = nothing) -> tuple[Result, dict[str, Any]]:
    """Decode every group of a batch without and with drafting, in turn, in this process.

    Returns: the drafted result; `speedup`, `vanilla_tokens_per_s`, and `identical`, the share of equal sequences
    (None with the residual rule).
    """
    engine = drafted.engine
    config = replace(engine.config, accept="exact", trace="", compare=False)
    vanilla = replace(engine, drafter=RootOnly(), accept_rule=None, config=config)
    plain = Batch(warm_up(with_cycles(vanilla)), drafted.conversations)
    for number, group in enumerate(drafted.groups):
        for side in (plain, drafted) if number % 2 == 0 else (drafted, plain):
            side.run(group, tell=tell if side is drafted else nothing)
    a, b = plain.result(), drafted.result()
    same = [x == y for x, y in zip(a.tokens, b.tokens)]
    rate = a.stats["tokens_per_s"]
    speedup = b.stats["tokens_per_s"] / rate if rate else 0.0
    exact = (
        engine.config.accept == "exact"
    )  # the residual rule draws other tokens from the same distribution
    identical = sum(same) / len(same) if exact else None
    return b, {"speedup": speedup, "identical": identical, "vanilla_tokens_per_s": rate}


def finish_reason(engine: Engine, new: list[int]) -> str:
    """Why a row ended: at an end of sequence, at `max_new_tokens`, or at the end of the context."""
    if new[-1] in engine.eos_ids and not engine.config.ignore_eos:
        return "stop"
    return "length" if len(new) >= engine.config.max_new_tokens else "context"


def stream(engine: Engine, prompt: str | list[int]) -> Iterator[str]:
    """Decode one prompt, a text or token ids, and yield its text as it is decided, never half a character."""
    if not isinstance(prompt, str) and not all(isinstance(i, int) for i in prompt):
        raise ValueError(
            "stream() takes one text or one list of token ids; use generate() for turns"
        )
    yield from stream_text(
        Session(engine), first_ids(engine, [prompt] if isinstance(prompt, str) else prompt)
    )


def stream_text(session: Session, ids: list[int]) -> Iterator[str]:
    """The text that follows token ids on the first row, as it is decided. Raises: ValueError without a tokenizer."""
    engine = session.engine
    if engine.tokenizer is None:
        Tokenizer.load(Path(engine.config.checkpoint))  # says what is missing
    decoder = engine.tokenizer.stream(continuation=engine.template is None)
    for new in session.run([ids]):
        yield decoder.push(new[0])
    yield decoder.flush()


def in_order(keys: Iterable[Any], take: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Returns: what hands (key, thing) to `take` as soon as the things of all keys before it have come."""
    coming, ready = deque(keys), {}

    def put(key: Any, thing: Any) -> None:
        ready[key] = thing
        while coming and coming[0] in ready:
            take(ready.pop(coming.popleft()))

    return put


# -------------------------------------------------------------------------------------------------- main


def run(engine: Engine, prompts: list[Conversation]) -> None:
    """Decode, print and write every conversation as it ends, and the files that were asked for."""
    config, batch = engine.config, Batch(engine, prompts)
    quiet = "-" in (config.json, config.trace, config.profile)
    one_turn = len(prompts) == config.num_samples == 1 and (
        isinstance(prompts[0][0], int) or len(prompts[0]) == 1
    )
    streams, results = batch.streams, None
    if config.results:
        from extras.results import Results

        results = Results(engine, prompts)
        streams = [stream for stream in streams if stream not in results.done]
    live = (
        one_turn and streams and not quiet and not config.compare and engine.tokenizer is not None
    )
    decoder = engine.tokenizer.stream(continuation=engine.template is None) if live else None
    gap = chain([""], repeat("\n"))  # between one and the next
    show = in_order(streams, lambda texts: print(next(gap) + "\n\n".join(texts), flush=True))

    def tell(talk: list[Turn]) -> None:
        turns = [facts(engine, entry) for entry in talk]
        if results:
            results.add(turns)
        if not quiet and not live:
            show(
                talk[0].index[:2],
                [turn["text"] if engine.tokenizer else str(turn["tokens"]) for turn in turns],
            )

    with torch.profiler.profile() if config.profile else nullcontext() as profiler:
        if config.compare:
            result, outcome = compare(batch, tell)
            result.stats |= outcome
        else:
            watch = lambda new: print(decoder.push(new[0]), end="", flush=True)  # noqa: E731
            batch.run(streams, watch if live else nothing, tell)
            result = batch.result()
    if live:
        print(decoder.flush())
    print(stats_line(result.stats), file=sys.stderr if quiet else sys.stdout)
    if config.profile:
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            write_text(config.profile, Path(folder, "trace.json").read_text())
    if config.trace:
        write_text(config.trace, "\n".join(json.dumps(row) for row in result.trace))
    if config.json:
        document = {k: v for k, v in asdict(result).items() if k != "trace"}
        ran = (
            asdict(config) | {"context": engine.context} | engine.drafter.resolved_options()
        )  # what the defaults came to
        write_text(
            config.json,
            json.dumps(document | {"config": ran, "environment": environment(config.device)}),
        )


def main(argv: list[str] | None = None, command: Command | None = None) -> None:
    """The command line. command: what `read_command` has returned already"""
    config, prompts = command or read_command(argv, ranks.check)
    with one_line_errors("generate.py"):
        engine = load(ranks.init_ranks(config, prompts))
        if not config.interactive:
            return run(engine, prompts)
        from extras.chat import chat

        chat(engine, encode, stream_text)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ranks.report_from_rank_0("generate.py"):
            main(command=COMMAND)
    finally:
        signal.signal(signal.SIGINT, end_quietly)
