"""The JSON of serve.py's answers, whole or in the events of a stream."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

from files.thinking import Thinking
from files.tokenizer import Tokenizer
from run.drafted import Spans
from server.batcher import Delta, Drafts, Refusal, Scored
from server.parameters import RequestParams
from server.tool_calls import Finder, mark_in

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class Reply:
    """The JSON of a response, whole or in events."""

    def __init__(self, asked: RequestParams, chat: bool, model: str, tokenizer: Tokenizer):
        self.asked = asked
        self.chat = chat
        self.tokenizer = tokenizer
        self.finders: list[Finder] = []  # one for each choice, where the request has tools
        if asked.tools:
            self.finders = [Finder(asked.tools) for _ in range(asked.samples)]
        self.thinkings: list[Thinking] = []  # one for each choice of a chat
        if chat:
            self.thinkings = [Thinking(asked.thinks) for _ in range(asked.samples)]
        self.drafted_calls = [""] * len(self.thinkings)  # thinking that may end with a call
        self.spans = [Spans() for _ in self.thinkings]  # of the text that is held back
        self.untold: dict[int, Drafts] = {}  # of pieces without an event of their own, by choice
        self.drafts = Drafts()  # of all pieces
        self.cached = 0  # tokens of the prompts that were not read again
        self.base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": model,
            "seed": asked.seed,
        }

    def usage(self, tokens: Iterable[int]) -> dict[str, Any]:
        """Count tokens. tokens: of each choice"""
        prompt = sum(map(len, self.asked.prompts))
        new = sum(tokens)
        details = {
            "accepted_prediction_tokens": self.drafts.accepted,
            "rejected_prediction_tokens": self.drafts.rejected,
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": details,
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """The acceptance of drafts, in the fields of vLLM (its pull request 48915).

        Passes without a draft do not count; of a tree each node is a draft token.
        """
        lengths = self.drafts.lengths
        accepted = sum(lengths)
        drafted = accepted + self.drafts.rejected
        told = {
            "mean_acceptance_length": 1 + accepted / len(lengths) if lengths else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [
                lengths.count(length) for length in range(max(lengths, default=-1) + 1)
            ],
            "num_spec_steps": len(lengths),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }
        return {"speculative_decoding": told}

    def whole(self, answers: list[Delta]) -> dict[str, Any]:
        """Return all choices, with the usage."""
        choices = []
        for answer in answers:
            self.drafts = self.drafts.and_more(answer.drafts)
            text = {"text": answer.text}
            if self.chat:
                text = {"message": self._message(answer)}
            choices.append(self._choice(answer) | text)  # behind the calls, which it counts
        kind = "chat.completion" if self.chat else "text_completion"
        usage = self.usage(answer.tokens for answer in answers)
        told = {"object": kind, "choices": choices, "usage": usage, "metrics": self.metrics}
        return self.base | told

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return one event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        event = self.base | {"object": kind, "choices": choices}
        if self.asked.usage:
            event |= {"usage": usage}
        if usage:
            event |= {"metrics": self.metrics}
        return f"data: {json.dumps(event)}\n\n"

    def piece(self, piece: Delta) -> str:
        """Return the event of a piece; "" where all its text is held back."""
        self.drafts = self.drafts.and_more(piece.drafts)
        text = {"text": piece.text}
        drafts = piece.drafts
        if self.chat:
            delta, spans = self._delta(piece)
            text = {"delta": delta}
            drafts = self.untold.pop(piece.choice, Drafts()).and_more(drafts._replace(spans=()))
            if not delta and not piece.reason and not piece.scored:
                self.untold[piece.choice] = drafts
                return ""
            drafts = drafts._replace(spans=spans)
        return self.event([self._choice(piece) | text | {"drafted": self._drafted(drafts)}])

    def _drafted(self, drafts: Drafts) -> dict[str, Any]:
        """Return how the tokens of an event were drafted; spans where its text is complete."""
        told = drafts._asdict()
        del told["lengths"]
        spans = told.pop("spans")
        trees = told.pop("trees")
        if self.asked.wants_trees:
            told["trees"] = [[self._node(node) for node in tree] for tree in trees]
        if not self.finders:
            told["spans"] = spans if self.asked.wants_trees else [span[:2] for span in spans]
        return told

    def _node(self, node: tuple[int, int, bool]) -> list:
        """Return a node of a tree, its token as a text."""
        parent, token, accepted = node
        return [parent, _text(self.tokenizer.name(token)), accepted]

    def _delta(self, piece: Delta) -> tuple[dict[str, Any], Iterable[tuple]]:
        """Return a piece's thinking, content and whole calls of tools; the spans of the content."""
        thinking = self.thinkings[piece.choice]
        spans = self.spans[piece.choice]
        for span in piece.drafts.spans:
            spans.add(*span)
        read = thinking.read
        thought, content = thinking.push(piece.text, piece.reason is not None)
        thought, content = self._call_in_thinking(piece, thought, content)
        spans.take(thinking.read - read - len(content))
        delta: dict[str, Any] = {}
        if thought and self.asked.tells_thinking:
            delta["reasoning_content"] = thought
        calls: list[dict] = []
        first = 0
        if self.finders:
            finder = self.finders[piece.choice]
            first = finder.count
            content, calls = finder.push(content, piece.reason)
        if content or (piece.reason and not self.finders):
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls, first)]
        return delta, spans.take(len(content))

    def _call_in_thinking(self, piece: Delta, thought: str, content: str) -> tuple[str, str]:
        """Return thinking and content, where a call that ends open thinking is content.

        Thinking is held back from the beginning of a call on. One that goes on is a draft.
        """
        if not self.finders:
            return thought, content
        held = self.drafted_calls[piece.choice] + thought
        begin, is_call = mark_in(held, self.finders[piece.choice].form.tags)
        self.drafted_calls[piece.choice] = held[begin:]
        if self.thinkings[piece.choice].inside and piece.reason is None:
            return held[:begin], content
        self.drafted_calls[piece.choice] = ""
        if is_call and piece.reason == "stop" and self.thinkings[piece.choice].inside:
            return held[:begin].rstrip(), held[begin:]
        return held, content

    def _message(self, answer: Delta) -> dict[str, Any]:
        """Return the message of a whole answer."""
        thought, content = self.thinkings[answer.choice].push(answer.text, True)
        thought, content = self._call_in_thinking(answer, thought, content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thought and self.asked.tells_thinking:
            message["reasoning_content"] = thought
        if self.finders:
            content, calls = self.finders[answer.choice].push(content, answer.reason)
            message["content"] = content or None
            if calls:
                message["tool_calls"] = calls
        return message

    def begin(self) -> str:
        """Return the first events of a stream: of a chat, one for each choice."""
        role = {"finish_reason": None, "logprobs": None}
        role |= {"delta": {"role": "assistant", "content": ""}}
        choices = range(self.asked.choices) if self.chat else ()
        return "".join(self.event([{"index": choice} | role]) for choice in choices)

    def end(self, tokens: Iterable[int]) -> str:
        """Return the last events of a stream. tokens: of each choice"""
        usage = self.event([], self.usage(tokens)) if self.asked.usage else ""
        return usage + "data: [DONE]\n\n"

    def fault(self, error: Refusal) -> str:
        """Return the event of an error, which ends a stream."""
        return f"data: {json.dumps(error.body)}\n\n"

    def _choice(self, piece: Delta) -> dict[str, Any]:
        logprobs = None
        if self.asked.likeliest is not None:
            logprobs = self._of_chat(piece) if self.chat else self._of_completion(piece)
        reason = piece.reason
        if reason == "stop" and self.finders and self.finders[piece.choice].count:
            reason = "tool_calls"
        choice = {"index": piece.choice, "finish_reason": reason, "logprobs": logprobs}
        if piece.cut_by:
            choice["cut_by"] = piece.cut_by
        return choice

    def _of_chat(self, piece: Delta) -> dict[str, Any]:
        content = []
        for token in piece.scored:
            top = [self._entry(*pair) for pair in token.logprob.top]
            content.append(self._entry(token.id, token.logprob.own) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.name(id)
        return {"token": _text(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    def _of_completion(self, piece: Delta) -> dict[str, Any]:
        scored = piece.scored
        return {
            "tokens": [_text(self.tokenizer.name(token.id)) for token in scored],
            "token_logprobs": [token.logprob and max(token.logprob.own, LEAST) for token in scored],
            "top_logprobs": [self._likeliest(token) for token in scored],
            "text_offset": [token.start for token in scored],
        }

    def _likeliest(self, token: Scored) -> dict[str, float] | None:
        """Return the likeliest tokens and the decided one, by their texts."""
        if token.logprob is None:
            return None
        pairs = [*token.logprob.top, (token.id, token.logprob.own)]
        return {_text(self.tokenizer.name(id)): max(logprob, LEAST) for id, logprob in pairs}


def joined(pieces: list[Delta]) -> Delta:
    """Join all pieces of an answer."""
    text = "".join(piece.text for piece in pieces)
    scored = [token for piece in pieces for token in piece.scored]
    drafts = Drafts()
    for piece in pieces:
        drafts = drafts.and_more(piece.drafts)
    return pieces[-1]._replace(text=text, scored=scored, drafts=drafts)


def _text(data: bytes) -> str:
    """Return a token's text; bytes that are no characters of their own are escaped."""
    return data.decode("utf-8", "backslashreplace")
