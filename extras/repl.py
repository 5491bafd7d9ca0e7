"""`--interactive`: a conversation on the terminal.

When the history no longer fits the context, the oldest turns are dropped and a note is printed.
Ctrl-C ends an answer and not the conversation; the cached part of the answer stays. At the prompt a
second Ctrl-C, or the end of input, ends the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cli.prompts import check_ids
from decode import Engine
from session import Session
from stats import Stats, stats_line, summary


def chat(
    engine: Engine, encode: Callable[..., list[int]], stream_text: Callable[..., Iterator[str]]
) -> None:
    """Read turns and print answers until the end of input.

    encode: token ids of (engine, turns, answers)
    stream_text: the text of an answer as it is decided, of (session, ids)
    """
    session = Session(engine)
    turns: list[str] = []
    answers: list[str] = []
    leaving = False  # the last key was Ctrl-C
    while True:
        try:
            turn = input("> ")
        except (EOFError, KeyboardInterrupt) as error:
            print()
            if leaving or isinstance(error, EOFError):
                return
            leaving = True
            print("[Ctrl-C again, or Ctrl-D, ends the conversation]")
            continue
        leaving = False
        if not turn.strip():
            continue
        try:
            ids, dropped = _encode_history(engine, encode, [*turns, turn], answers)
        except ValueError as error:  # the conversation so far stays
            print(f"[{error}]")
            continue
        if dropped:
            full = f"the context of {engine.context} tokens is full"
            print(f"[{full}: {dropped} oldest turn(s) dropped]")
        turns = [*turns, turn][dropped:]
        answers = answers[dropped:]
        session.stats = Stats()
        answer = ""
        try:
            for piece in stream_text(session, ids):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ValueError as error:  # of the grammar
            print(f" [{error}]", end="")
        answers.append(answer)
        print(f"\n[{stats_line(summary(engine, session.stats))}]")


def _encode_history(
    engine: Engine, encode: Callable[..., list[int]], turns: list[str], answers: list[str]
) -> tuple[list[int], int]:
    """Encode the latest turns that leave room for an answer.

    Returns: token ids; the number of oldest turns that were dropped.
    Raises: ValueError where even the last turn does not fit.
    """
    reserve = min(engine.config.max_new_tokens, engine.context // 2)
    dropped = 0
    ids = encode(engine, turns, answers)
    while len(ids) + reserve > engine.context and len(turns) - dropped > 1:
        dropped += 1
        ids = encode(engine, turns[dropped:], answers[dropped:])
    check_ids(ids, engine.target.config.vocab_size, engine.context)
    return ids, dropped
