"""The JSON of serve.py's answers, whole or in the events of a stream."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

from hf.tokenizer import Tokenizer
from scripts.batcher import Piece, Scored
from scripts.parameters import Asked

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class Reply:
    """The JSON of a response, whole or in events."""

    def __init__(self, asked: Asked, chat: bool, model: str, tokenizer: Tokenizer):
        self.asked = asked
        self.chat = chat
        self.tokenizer = tokenizer
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

    def whole(self, answers: list[Piece]) -> dict[str, Any]:
        """Return all choices, with the usage."""
        choices = []
        for answer in answers:
            text = {"text": answer.text}
            if self.chat:
                text = {"message": {"role": "assistant", "content": answer.text}}
            choices.append(self._choice(answer) | text)
        kind = "chat.completion" if self.chat else "text_completion"
        usage = self.usage(answer.tokens for answer in answers)
        return self.base | {"object": kind, "choices": choices, "usage": usage}

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
        return self.event([self._choice(piece) | text])

    def begin(self, choice: int) -> str:
        """Return the first event of a chat's choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return self.event([{"index": choice, "finish_reason": None, "logprobs": None} | role])

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.asked.likeliest is not None:
            logprobs = self._of_chat(piece) if self.chat else self._of_completion(piece)
        return {"index": piece.choice, "finish_reason": piece.reason, "logprobs": logprobs}

    def _of_chat(self, piece: Piece) -> dict[str, Any]:
        content = []
        for token in piece.scored:
            top = [self._entry(*pair) for pair in token.logprob.top]
            content.append(self._entry(token.id, token.logprob.own) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.name(id)
        return {"token": _text(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    def _of_completion(self, piece: Piece) -> dict[str, Any]:
        scored = piece.scored
        return {
            "tokens": [_text(self.tokenizer.name(token.id)) for token in scored],
            "token_logprobs": [max(token.logprob.own, LEAST) for token in scored],
            "top_logprobs": [self._likeliest(token) for token in scored],
            "text_offset": [token.start for token in scored],
        }

    def _likeliest(self, token: Scored) -> dict[str, float]:
        """Return the likeliest tokens and the decided one, by their texts."""
        pairs = [*token.logprob.top, (token.id, token.logprob.own)]
        return {_text(self.tokenizer.name(id)): max(logprob, LEAST) for id, logprob in pairs}


def joined(pieces: list[Piece]) -> Piece:
    """Join all pieces of an answer."""
    text = "".join(piece.text for piece in pieces)
    scored = [token for piece in pieces for token in piece.scored]
    return pieces[-1]._replace(text=text, scored=scored)


def _text(data: bytes) -> str:
    """Return a token's text; bytes that are no characters of their own are escaped."""
    return data.decode("utf-8", "backslashreplace")
