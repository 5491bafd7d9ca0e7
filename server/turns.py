"""The turns of a conversation that leave room for an answer: a terminal's rule, for the page.

A client of the API is refused where its messages do not fit the context. The page asks first how
many of the oldest ones it has to leave out (`/v1/fit`).
"""

from __future__ import annotations

from typing import Any

from run.prompts import answer_room
from server.batcher import Refusal
from server.parameters import RequestParams, RequestReader


def dropped_messages(reader: RequestReader, body: dict[str, Any], chat: bool) -> int:
    """Count the oldest messages to leave out, so that there is room for an answer.

    body: a request with `messages`, a system message first or none
    chat: whether there is a chat template; else the texts make up one prompt
    Raises: Refusal where even the last turn is refused.
    """
    options = dict(body) if isinstance(body, dict) else {}
    messages = options.pop("messages", None)
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise Refusal(400, "messages must be a list of objects", "messages")
    system = [each for each in messages[:1] if each.get("role") == "system"]
    turns = messages[len(system) :]

    def read(begin: int) -> RequestParams:
        source: dict[str, Any] = {"messages": system + turns[begin:]}
        if not chat:
            source = {"prompt": "".join(str(each.get("content")) for each in turns[begin:])}
        return reader.read(options | source, chat)

    context = reader.engine.context
    *begins, last = [i for i, each in enumerate(turns) if each.get("role") == "user"] or [0]
    for begin in begins:
        try:
            asked = read(begin)
        except Refusal:
            continue
        if len(asked.prompts[0]) + answer_room(asked.most, context) <= context:
            return begin
    read(last)
    return last
