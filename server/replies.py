"""The JSON of completions and chats: an event for each part of an answer, or one for all parts.

1. `Answer` takes what a step adds (`Delta`) apart into thinking, text and calls, once they are
   certain. A whole answer is the sum of its parts.
2. A writer tells a part: `Reply` for completions, `ChatReply` for chats, and one for responses
   (server/responses.py).
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from files.thinking import Thinking
from files.tokenizer import Tokenizer
from run.drafted import Spans
from server.batcher import Delta, Drafts, Refusal, Scored
from server.parameters import RequestParams
from server.tool_calls import Finder, mark_in

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class Answer:
    """One answer: its parts, as they become certain."""

    def __init__(self, asked: RequestParams, choice: int, tokenizer: Tokenizer):
        self.whole = Delta(choice, "")  # the parts so far
        self.untold = Delta(choice, "")  # drafts without a text that is certain
        self.spans = Spans()  # of the text that is not certain yet
        self.thinking = Thinking(asked.thinks) if asked.chat else None
        self.finder = Finder(asked.tools) if asked.tools else None
        self.tells_thinking = asked.chat and asked.body.include_reasoning
        self.held = ""  # thinking that may end with a call
        # control tokens that have a text: that of thinking and calls, never a client's
        self.words = [tokenizer.name(id).decode() for id in asked.shown]

    def add(self, piece: Delta) -> Delta | None:
        """Add what a step brings. Returns: the part that has become certain; None: nothing has."""
        for span in piece.drafts.spans:
            self.spans.add(*span)
        part = self._split(piece) if self.thinking else piece
        drafts = part.drafts._replace(spans=(), trees=())
        self.whole = self.whole.and_more(part._replace(drafts=drafts))
        drafts = part.drafts._replace(spans=tuple(self.spans.take(len(part.text))))
        part = self.untold.and_more(part._replace(drafts=drafts))
        is_told = part.text or part.thought or part.calls or part.scored or part.reason
        self.untold = Delta(piece.choice, "") if is_told else part
        return part if is_told else None

    def _split(self, piece: Delta) -> Delta:
        """Take the text of a piece apart, as far as it is certain."""
        read = self.thinking.read
        thought, text = self.thinking.push(piece.text, piece.reason is not None)
        calls: list[dict] = []
        skipped = self.thinking.read - read - len(text)
        if self.finder:
            thought, text = self._call_in_thinking(piece.reason, thought, text)
            text, calls = self.finder.push(text, piece.reason)
        self.spans.take(skipped)  # the others are those of the text alone
        for word in self.words:
            thought = thought.replace(word, "")
            text = text.replace(word, "")
        thought = thought if self.tells_thinking else ""
        return piece._replace(text=text, thought=thought, calls=calls)

    def _call_in_thinking(self, reason: str | None, thought: str, text: str) -> tuple[str, str]:
        """Return thinking and text, where a call that ends open thinking is text.

        Thinking is held back from the beginning of a call on. One that goes on is a draft.
        """
        held = self.held + thought
        begin, is_call = mark_in(held, self.finder.form.tags)
        begin = len(held[:begin].rstrip())
        inside = self.thinking.inside
        if inside and reason is None:
            self.held = held[begin:]
            return held[:begin], text
        self.held = ""
        if inside and is_call and reason == "stop":
            return held[:begin], held[begin:]
        return held, text


class Reply:
    """The JSON of completions."""

    kind = "text_completion"  # of a whole answer
    chunk = "text_completion"  # of an event
    id = "cmpl"

    def __init__(self, asked: RequestParams, model: str, tokenizer: Tokenizer):
        self.asked = asked
        self.tokenizer = tokenizer
        self.answers = [Answer(asked, number, tokenizer) for number in range(asked.choices)]
        self.cached = 0  # tokens of the prompts that were not read again
        self.base = {
            "id": f"{self.id}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": model,
            "seed": asked.seed,
        } | ({"dropped": asked.dropped} if asked.dropped else {})

    def begin(self) -> str:
        """Return the first events of a stream."""
        return ""

    def piece(self, piece: Delta) -> str:
        """Add what a step brings. Returns: its events; "" where its text is held back."""
        part = self.answers[piece.choice].add(piece)
        if part is None or not self.asked.body.stream:
            return ""
        return self.event([self.choice(part) | {"drafted": self._drafted(part.drafts)}])

    def end(self) -> str:
        """Return the last events of a stream."""
        usage = ""
        if self.asked.body.stream_options.include_usage:
            usage = self.event([], {"usage": self.usage, "metrics": self.metrics})
        return usage + "data: [DONE]\n\n"

    def fault(self, error: Refusal) -> str:
        """Return the event of an error, which ends a stream."""
        return f"data: {json.dumps(error.body)}\n\n"

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once it has ended."""
        choices = [self.choice(answer.whole, is_whole=True) for answer in self.answers]
        told = {"choices": choices, "usage": self.usage, "metrics": self.metrics}
        return self.base | {"object": self.kind} | told

    def event(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> str:
        """Return one event of a stream."""
        event = self.base | {"object": self.chunk, "choices": choices}
        if self.asked.body.stream_options.include_usage:
            event["usage"] = None
        return f"data: {json.dumps(event | (more or {}))}\n\n"

    def choice(self, part: Delta, is_whole: bool = False) -> dict[str, Any]:
        """Return the JSON of a part of an answer, or of the whole."""
        has_calls = self.answers[part.choice].whole.calls
        reason = "tool_calls" if has_calls and part.reason == "stop" else part.reason
        logprobs = None if self.asked.body.likeliest is None else self.logprobs(part.scored)
        choice = {"index": part.choice, "finish_reason": reason, "logprobs": logprobs}
        cut_by = {"cut_by": part.cut_by} if part.cut_by else {}
        return choice | cut_by | self.text(part, is_whole)

    def text(self, part: Delta, is_whole: bool) -> dict[str, Any]:
        """Return the fields of a part's text."""
        return {"text": part.text}

    @property
    def drafts(self) -> Drafts:
        """How the tokens of all answers were drafted."""
        drafts = Drafts()
        for answer in self.answers:
            drafts = drafts.and_more(answer.whole.drafts)
        return drafts

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        prompt = sum(map(len, self.asked.prompts))
        new = sum(answer.whole.tokens for answer in self.answers)
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
        drafts = self.drafts
        lengths = drafts.lengths
        accepted = sum(lengths)
        drafted = accepted + drafts.rejected
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

    def logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        tops = []
        for token in scored:
            pairs = [*token.logprob.top, (token.id, token.logprob.own)]
            tops.append({self._name(id): max(logprob, LEAST) for id, logprob in pairs})
        return {
            "tokens": [self._name(token.id) for token in scored],
            "token_logprobs": [max(token.logprob.own, LEAST) for token in scored],
            "top_logprobs": tops,
            "text_offset": [token.start for token in scored],
        }

    def _name(self, id: int) -> str:
        """Return a token's text; bytes that are no characters of their own are escaped."""
        return self.tokenizer.name(id).decode("utf-8", "backslashreplace")

    def _drafted(self, drafts: Drafts) -> dict[str, Any]:
        """Return how the tokens of an event were drafted; spans where its text is complete."""
        told = {
            name: getattr(drafts, name) for name in ("tokens", "accepted", "rejected", "passes")
        }
        has_trees = self.asked.body.trees
        if has_trees:
            told["trees"] = [
                [[parent, self._name(token), accepted] for parent, token, accepted in tree]
                for tree in drafts.trees
            ]
        if not self.asked.tools:
            told["spans"] = drafts.spans if has_trees else [span[:2] for span in drafts.spans]
        return told


class ChatReply(Reply):
    """The JSON of chats."""

    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    id = "chatcmpl"

    def begin(self) -> str:
        """Return the first events of a stream, one for each choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        role |= {"finish_reason": None, "logprobs": None}
        return "".join(self.event([{"index": i} | role]) for i in range(len(self.answers)))

    def text(self, part: Delta, is_whole: bool) -> dict[str, Any]:
        """Return the fields of a part's text."""
        has_tools = self.asked.tools is not None
        message: dict[str, Any] = {"role": "assistant"} if is_whole else {}
        if part.thought:
            message["reasoning_content"] = part.thought
        if is_whole:
            message["content"] = part.text or (None if has_tools else "")
        elif part.text or (part.reason and not has_tools):
            message["content"] = part.text
        if part.calls and is_whole:
            message["tool_calls"] = part.calls
        elif part.calls:
            first = len(self.answers[part.choice].whole.calls) - len(part.calls)
            calls = [{"index": i} | call for i, call in enumerate(part.calls, first)]
            message["tool_calls"] = calls
        return {"message" if is_whole else "delta": message}

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
