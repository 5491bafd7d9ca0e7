"""`--interactive`: a conversation on the terminal.

When the history no longer fits, the oldest turns are dropped, and a line says so. Ctrl-C ends an answer, and not the
conversation; what was cached of it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decode import Engine
from prompts import check_ids
from session import Session
from stats import Stats, stats_line, summary


def chat(
    engine: Engine, encode: Callable[..., list[int]], stream_text: Callable[..., Iterator[str]]
) -> None:
    """Talk until the end of input.

    encode: token ids of (engine, turns, answers); stream_text: the text of an answer as it is decided, of (session, ids)
    """
    session, turns, answers = Session(engine), [], []
    reserve = min(engine.config.max_new_tokens, engine.context // 2)
    while True:
        try:
            turn = input("> ")
        except (EOFError, KeyboardInterrupt):
            return print()
        if not turn.strip():
            continue
        said, past = [*turns, turn], list(answers)
        try:
            ids = encode(engine, said, past)
            while len(ids) + reserve > engine.context and len(said) > 1:
                said, past = said[1:], past[1:]
                ids = encode(engine, said, past)
            check_ids(ids, engine.target.config.vocab_size, engine.context)
        except ValueError as error:  # the conversation so far stays
            print(f"[{error}]")
            continue
        dropped = len(turns) + 1 - len(said)
        if dropped:
            print(
                f"[the context of {engine.context} tokens is full: {dropped} oldest turn(s) dropped]"
            )
        turns, answers = said, past
        session.stats, answer = Stats(), ""
        try:
            for piece in stream_text(session, ids):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        answers.append(answer)
        print(f"\n[{stats_line(summary(engine, session.stats))}]")
