"""The JSON of completions and chats: events of a stream, which make up a whole answer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from files.thinking import Thinking
from files.tokenizer import Tokenizer
from run.drafted import Spans
from server.batcher import Delta, Drafts, Refusal, Scored
from server.parameters import RequestParams
from server.tool_calls import Finder, mark_in

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class Part(NamedTuple):
    """The parts of an answer that a piece of its text adds."""

    thought: str
    content: str
    calls: list[dict]  # of tools, as clients read them
    skipped: int  # characters before the content that are none of it


class Splitter:
    """Takes the text of one answer of a chat apart, as it comes."""

    def __init__(self, asked: RequestParams):
        self.thinking = Thinking(asked.thinks)
        self.finder = Finder(asked.tools) if asked.tools else None
        self.tells = asked.body.include_reasoning
        self.held = ""  # thinking that may end with a call

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self.finder.count if self.finder else 0

    def push(self, piece: Delta) -> Part:
        """Add a piece. Returns: the parts that have become certain."""
        read = self.thinking.read
        thought, content = self.thinking.push(piece.text, piece.reason is not None)
        calls: list[dict] = []
        if self.finder:
            thought, content = self._call_in_thinking(piece, thought, content)
        skipped = self.thinking.read - read - len(content)
        if self.finder:
            content, calls = self.finder.push(content, piece.reason)
        return Part(thought if self.tells else "", content, calls, skipped)

    def _call_in_thinking(self, piece: Delta, thought: str, content: str) -> tuple[str, str]:
        """Return thinking and content, where a call that ends open thinking is content.

        Thinking is held back from the beginning of a call on. One that goes on is a draft.
        """
        held = self.held + thought
        begin, is_call = mark_in(held, self.finder.form.tags)
        inside = self.thinking.inside
        if inside and piece.reason is None:
            self.held = held[begin:]
            return held[:begin], content
        self.held = ""
        if inside and is_call and piece.reason == "stop":
            return held[:begin].rstrip(), held[begin:]
        return held, content


class Reply:
    """The JSON of completions."""

    kind = "text_completion"  # of a whole answer
    chunk = "text_completion"  # of an event
    id = "cmpl"

    def __init__(self, asked: RequestParams, model: str, tokenizer: Tokenizer):
        self.asked = asked
        self.tokenizer = tokenizer
        self.choices: list[dict[str, Any]] = [{} for _ in range(asked.choices)]  # so far
        self.untold = [Drafts()] * asked.choices  # of pieces without an event of their own
        self.spans = [Spans() for _ in self.choices]  # of the texts that are not told yet
        self.drafts = Drafts()  # of all pieces
        self.used: dict[str, Any] = {}  # at the end
        self.base = {
            "id": f"{self.id}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": model,
            "seed": asked.seed,
        } | ({"dropped": asked.dropped} if asked.dropped else {})

    def begin(self) -> str:
        """Return the first events."""
        return ""

    def piece(self, piece: Delta) -> str:
        """Return the event of a piece; "" in a whole answer, and where its text is held back."""
        number = piece.choice
        drafts = self.untold[number].and_more(piece.drafts._replace(spans=()))
        for span in piece.drafts.spans:
            self.spans[number].add(*span)
        self.count(piece)
        text, spans = self.told(piece)
        told = any(text.values()) or piece.reason or piece.scored
        self.untold[number] = Drafts() if told else drafts
        if not told:
            return ""
        drafted = self._drafted(drafts._replace(spans=tuple(spans)))
        return self.add(self.choice(piece) | text, drafted=drafted)

    def count(self, piece: Delta) -> None:
        """Add up how the tokens of an answer were drafted."""
        self.drafts = self.drafts.and_more(piece.drafts._replace(spans=(), trees=()))

    def told(self, piece: Delta) -> tuple[dict[str, Any], list[tuple]]:
        """Return the fields of a piece's text, and the spans of it."""
        return {"text": piece.text}, self.spans[piece.choice].take(len(piece.text))

    def end(self, tokens: Iterable[int], cached: int) -> str:
        """Return the last events.

        tokens: of each choice; cached: tokens of the prompts that were not read again
        """
        self.used = self.usage(tokens, cached)
        usage = self.event([], self.used) if self.asked.body.stream_options.include_usage else ""
        return usage + "data: [DONE]\n\n"

    def fault(self, error: Refusal) -> str:
        """Return the event of an error, which ends a stream."""
        return f"data: {json.dumps(error.body)}\n\n"

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once it has ended."""
        told = {"usage": self.used, "metrics": self.metrics}
        return self.base | {"object": self.kind, "choices": self.choices} | told

    def add(self, choice: dict[str, Any], **more: Any) -> str:
        """Add fields to a choice of a whole answer, or return their event in a stream.

        more: fields of an event alone
        """
        if self.asked.body.stream:
            return self.event([choice | more])
        number = choice["index"]
        self.choices[number] = sum_of(self.choices[number], choice)
        return ""

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        """Return one event of a stream."""
        event = self.base | {"object": self.chunk, "choices": choices}
        if self.asked.body.stream_options.include_usage:
            event |= {"usage": usage}
        if usage:
            event |= {"metrics": self.metrics}
        return f"data: {json.dumps(event)}\n\n"

    def usage(self, tokens: Iterable[int], cached: int) -> dict[str, Any]:
        """Count tokens. Arguments: as of `end`."""
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
            "prompt_tokens_details": {"cached_tokens": cached},
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
        longest = max(lengths, default=-1)
        told = {
            "mean_acceptance_length": 1 + accepted / len(lengths) if lengths else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [lengths.count(length) for length in range(longest + 1)],
            "num_spec_steps": len(lengths),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }
        return {"speculative_decoding": told}

    def choice(self, piece: Delta) -> dict[str, Any]:
        """Return the fields of a piece beside its text."""
        logprobs = None if self.asked.body.likeliest is None else self.logprobs(piece.scored)
        choice = {"index": piece.choice, "finish_reason": piece.reason, "logprobs": logprobs}
        return choice | ({"cut_by": piece.cut_by} if piece.cut_by else {})

    def logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        tokens = [self._name(token.id) for token in scored]
        return {
            "tokens": tokens,
            "token_logprobs": [token.logprob and max(token.logprob.own, LEAST) for token in scored],
            "top_logprobs": [self._likeliest(token) for token in scored],
            "text_offset": [token.start for token in scored],
        }

    def _likeliest(self, token: Scored) -> dict[str, float] | None:
        """Return the likeliest tokens and the decided one, by their texts."""
        if token.logprob is None:
            return None
        pairs = [*token.logprob.top, (token.id, token.logprob.own)]
        return {self._name(id): max(logprob, LEAST) for id, logprob in pairs}

    def _name(self, id: int) -> str:
        """Return a token's text; bytes that are no characters of their own are escaped."""
        return self.tokenizer.name(id).decode("utf-8", "backslashreplace")

    def _drafted(self, drafts: Drafts) -> dict[str, Any]:
        """Return how the tokens of an event were drafted; spans where its text is complete."""
        told = drafts._asdict()
        del told["lengths"]
        spans = told.pop("spans")
        trees = told.pop("trees")
        wants_trees = self.asked.body.trees
        if wants_trees:
            told["trees"] = [
                [[parent, self._name(token), accepted] for parent, token, accepted in tree]
                for tree in trees
            ]
        if not self.asked.tools:
            told["spans"] = spans if wants_trees else [span[:2] for span in spans]
        return told


class ChatReply(Reply):
    """The JSON of chats."""

    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    id = "chatcmpl"

    def __init__(self, asked: RequestParams, model: str, tokenizer: Tokenizer):
        super().__init__(asked, model, tokenizer)
        self.splitters = [Splitter(asked) for _ in self.choices]

    def begin(self) -> str:
        """Return the first events, one for each choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        role |= {"finish_reason": None, "logprobs": None}
        return "".join(self.add({"index": i} | role) for i in range(len(self.choices)))

    def told(self, piece: Delta) -> tuple[dict[str, Any], list[tuple]]:
        """Return the fields of a piece's text, and the spans of its content."""
        splitter = self.splitters[piece.choice]
        first = splitter.calls
        part = splitter.push(piece)
        delta: dict[str, Any] = {}
        if part.thought:
            delta["reasoning_content"] = part.thought
        if part.content or (piece.reason and not self.asked.tools):
            delta["content"] = part.content
        if part.calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(part.calls, first)]
        self.spans[piece.choice].take(part.skipped)
        return {"delta": delta}, self.spans[piece.choice].take(len(part.content))

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once it has ended."""
        for choice in self.choices:
            message = choice["message"] = choice.pop("delta")
            if self.asked.tools:
                message["content"] = message["content"] or None
            for call in message.get("tool_calls", ()):
                del call["index"]
        return super().whole()

    def choice(self, piece: Delta) -> dict[str, Any]:
        """Return the fields of a piece beside its text, which is read."""
        choice = super().choice(piece)
        if piece.reason == "stop" and self.splitters[piece.choice].calls:
            choice["finish_reason"] = "tool_calls"
        return choice

    def logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        content = []
        for token in scored:
            top = [self._entry(*pair) for pair in token.logprob.top]
            content.append(self._entry(token.id, token.logprob.own) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        data = list(self.tokenizer.name(id))
        return {"token": self._name(id), "logprob": max(logprob, LEAST), "bytes": data}


def sum_of(whole: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with the fields of a further event: texts and lists grow, others change."""
    found = whole | more
    for name in whole.keys() & more.keys():
        if isinstance(more[name], dict):
            found[name] = sum_of(whole[name] or {}, more[name])
        elif isinstance(more[name], (str, list)) and whole[name]:
            found[name] = whole[name] + more[name]
    return found
