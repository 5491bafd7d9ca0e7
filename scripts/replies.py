"""The JSON of serve.py's answers, whole or in the events of a stream."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

from scripts.batcher import Piece
from scripts.parameters import Asked


class Reply:
    """The JSON of a response, whole or in events."""

    def __init__(self, asked: Asked, chat: bool, model: str):
        self.asked = asked
        self.chat = chat
        self.base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": model,
        }

    def usage(self, tokens: Iterable[int]) -> dict[str, int]:
        """Count tokens. tokens: of each choice"""
        prompt = sum(map(len, self.asked.prompts))
        new = sum(tokens)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(
        self, texts: list[str], reasons: list[str | None], tokens: list[int]
    ) -> dict[str, Any]:
        """Return all choices, with the usage."""
        choices = []
        for i, (text, reason) in enumerate(zip(texts, reasons)):
            message = {"role": "assistant", "content": text}
            choices.append(
                _choice(i, reason) | ({"message": message} if self.chat else {"text": text})
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": kind, "choices": choices, "usage": self.usage(tokens)}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return one event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        event = self.base | {"object": kind, "choices": choices}
        if self.asked.usage:
            event |= {"usage": usage}
        return f"data: {json.dumps(event)}\n\n"

    def piece(self, piece: Piece) -> str:
        """Return the event of a piece."""
        text = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self.event([_choice(piece.choice, piece.reason) | text])

    def begin(self, choice: int) -> str:
        """Return the first event of a chat's choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return self.event([_choice(choice, None) | role])


def _choice(index: int, reason: str | None) -> dict[str, Any]:
    return {"index": index, "finish_reason": reason, "logprobs": None}
