"""OpenAI's Responses (`/v1/responses`) as another form of a chat: its request, its answer.

1. `Responses` reads a request as that of a chat: `instructions` and `input` as messages, calls and
   their results as such, tools and formats in the chat's form.
2. `ResponseReply` writes the thinking, the text and the calls of a chat's answer as output items,
   in events. A whole answer is the last event's response.

Nothing is stored: `previous_response_id` is refused, and a client sends the whole conversation.
Tools that a server would run itself, as web_search, are left out, and the log names them.
Source: OpenAI's API reference, Responses; the client `openai` 3.57 reads what is written here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from pydantic import model_validator

from files.tokenizer import Tokenizer
from options import log_note
from server.batcher import Delta, Refusal
from server.bodies import SHOWN, Chat, in_log, need, without_nulls
from server.call_forms import new_id
from server.parameters import RequestParams
from server.replies import ChatReply, sum_of

LOGPROBS = "message.output_text.logprobs"  # in `include`, the only name that changes anything
# fields that an answer repeats
REPEATED = {
    "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tools": [],
    "tool_choice": "auto", "reasoning": None, "text": {"format": {"type": "text"}},
}  # fmt: skip
# kinds of output items: before an id, the name of events, the field that grows, further fields, and
# the part of the item that has the field; none: the item itself
ITEMS: dict[str, tuple[str, str, str, dict, dict]] = {
    "reasoning": ("rs", "reasoning_text", "text", {"summary": []}, {"type": "reasoning_text"}),
    "message": (
        "msg", "output_text", "text", {"role": "assistant"},
        {"type": "output_text", "annotations": []},
    ),
    "function_call": ("fc", "function_call_arguments", "arguments", {}, {}),
}  # fmt: skip
# names that change nothing here, or that `Responses` has read
READ = {"input", "instructions", "include", "reasoning", "text", "background"}


class Responses(Chat):
    """A request for a response, as one for a chat."""

    repeated: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, body: dict) -> dict:
        body = without_nulls(body)
        stored = body.keys() & {"previous_response_id", "conversation"}
        fault = "responses are not stored here; send the whole conversation as input"
        need(not stored, fault, "input")
        need(not body.get("background"), "background = true is not served; leave it out", "input")
        need("n" not in body, "a response is one answer; leave n out", "input")
        chat = {name: body[name] for name in body.keys() - READ}
        chat["repeated"] = {name: body.get(name, value) for name, value in REPEATED.items()}
        if "max_output_tokens" in chat:
            chat["max_tokens"] = chat.pop("max_output_tokens")
        chat["messages"] = _messages(body.get("input"))
        if body.get("instructions"):
            chat["messages"].insert(0, {"role": "system", "content": body["instructions"]})
        if LOGPROBS in _of_kind(body, "include", []) or "top_logprobs" in body:
            chat["logprobs"] = True
        if _of_kind(body, "reasoning", {}).get("effort"):
            chat["reasoning_effort"] = body["reasoning"]["effort"]
        form = _of_kind(body, "text", {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        if form:
            chat["response_format"] = form
        chat["tools"] = _tools(_of_kind(body, "tools", []))
        choice = chat.get("tool_choice")
        if isinstance(choice, dict) and "name" in choice:
            chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        return chat


def _of_kind(body: dict, name: str, default: Any) -> Any:
    """Return a field of the kind of its default."""
    value = body.get(name, default)
    kind = "a list" if isinstance(default, list) else "an object"
    need(isinstance(value, type(default)), f"{name} must be {kind}", "input")
    return value


def _tools(tools: list) -> list[dict]:
    """Return the functions among tools, in the form of chats."""
    functions = []
    others = set()
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            function = {name: held for name, held in tool.items() if name != "type"}
            functions.append({"type": "function", "function": function})
        else:
            others.add(str(kind))
    if others:
        log_note(f"tools that are left out, as they are no functions: {in_log(others)}")
    return functions


def _messages(items: Any) -> list[dict]:
    """Return the items of an input as messages, the parts of an answer in one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    are_items = isinstance(items, list) and items and all(isinstance(i, dict) for i in items)
    need(are_items, "input must be a text, or a list of at least one object", "input")
    messages: list[dict] = []
    for item in items:
        message = _message(item)
        last = messages[-1] if messages else {"role": ""}
        goes_on = "tool_calls" in message or "tool_calls" not in last
        if last["role"] == message["role"] == "assistant" and goes_on:
            messages[-1] = sum_of(last, message | {"role": ""})
        else:
            messages.append(message)
    return messages


def _message(item: dict) -> dict:
    """Return an item of an input as a message."""
    kind = item.get("type", "message")
    role = item.get("role")
    content = item.get("content")
    if kind == "message" and role != "assistant":
        return {"role": role, "content": content}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    answer: dict[str, Any] = {"role": "assistant", "content": []}
    if kind == "message":
        is_text = isinstance(content, (str, list))
        need(is_text, "a message must have a role and a text as its content", "input")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return answer | {"content": parts}
    if kind == "function_call":
        called = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": called}
        return answer | {"tool_calls": [call]}
    fault = f"input of type {str(kind)[:SHOWN]} is not served; leave it out"
    need(kind == "reasoning", fault, "input")
    return answer | {"reasoning_content": content or item.get("summary") or ""}


class ResponseReply(ChatReply):
    """A response: output items, one open at a time, whose texts grow."""

    def __init__(self, asked: RequestParams, model: str, tokenizer: Tokenizer):
        super().__init__(asked, model, tokenizer)
        self.events = 0  # so far
        self.thoughts = ""
        self.output: list[dict[str, Any]] = []  # the last may be open
        self.response = {
            "id": f"resp_{new_id()}{new_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": self.output,
            "temperature": asked.sampling.temperature,
            "top_p": asked.sampling.top_p,
            "max_output_tokens": asked.most,
            "seed": asked.seed,
            "previous_response_id": None,
            "store": False,
            "truncation": asked.body.truncation,
            "usage": None,
            **asked.body.repeated,
        }

    def begin(self) -> str:
        """Return the first events."""
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event(kind, response=self.response) for kind in kinds)

    def piece(self, piece: Delta) -> str:
        """Return the events of a piece."""
        self.count(piece)
        part = self.splitters[0].push(piece)
        self.thoughts += part.thought
        events = ""
        if part.thought:
            events += self._grow("reasoning", part.thought)
        if part.content or (piece.reason and not self.output and not self.asked.tools):
            scored = [] if self.asked.body.likeliest is None else piece.scored
            logprobs = self.logprobs(scored)["content"]
            events += self._grow("message", part.content, logprobs=logprobs)
        for call in part.calls:
            called = {"call_id": call["id"], "name": call["function"]["name"]}
            events += self._close() + self._open("function_call", **called, arguments="")
            events += self._grow("function_call", call["function"]["arguments"]) + self._close()
        if piece.reason:
            self.response["status"] = "completed" if piece.reason == "stop" else "incomplete"
        return events

    def end(self, tokens: Iterable[int], cached: int) -> str:
        """Return the last events. Arguments: as of `Reply.end`. Writes: the response."""
        status = self.response["status"]
        events = self._close(status)
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        counts = self.usage(tokens, cached)
        thinking = {"reasoning_tokens": len(self.tokenizer.encode(self.thoughts, bos=False))}
        self.response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"] | thinking,
            "total_tokens": counts["total_tokens"],
        }
        self.response["metrics"] = self.metrics
        return events + self._event(f"response.{status}", response=self.response)

    def fault(self, error: Refusal) -> str:
        """Return the event of an error, which ends a stream."""
        told = error.body["error"]
        return self._event("error", **{name: told[name] for name in ("code", "message", "param")})

    def whole(self) -> dict[str, Any]:
        """Return the whole response, once it has ended."""
        return self.response

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self.events, **fields}
        self.events += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _of_item(self, kind: str, **fields: Any) -> str:
        """Return an event of the last item."""
        number = {"output_index": len(self.output) - 1, "item_id": self.output[-1]["id"]}
        return self._event(f"response.{kind}", **number, **fields)

    def _open(self, kind: str, **fields: Any) -> str:
        """Begin an item. Returns: the events"""
        prefix, *_ = ITEMS[kind]
        item = {"type": kind, "id": f"{prefix}_{new_id()}", "status": "in_progress", **fields}
        self.output.append(item)
        return self._of_item("output_item.added", item=item)

    def _grow(self, kind: str, text: str, **further: list) -> str:
        """Add text to the open item of a kind, which may have to be begun.

        further: lists that grow with the text
        Returns: the events
        """
        _, name, field, fields, part = ITEMS[kind]
        events = ""
        if not (self._is_open and self.output[-1]["type"] == kind):
            part = {**part, field: "", **dict.fromkeys(further, [])}
            events = self._close() + self._open(kind, **fields, content=[])
            events += self._of_item("content_part.added", content_index=0, part=part)
            self.output[-1]["content"].append(part)
        whole = (self.output[-1].get("content") or [self.output[-1]])[0]
        whole.update(sum_of(whole, {field: text, **further}))
        index = {"content_index": 0} if "content" in self.output[-1] else {}
        return events + self._of_item(f"{name}.delta", **index, delta=text, **further)

    def _close(self, status: str = "completed") -> str:
        """End the open item, if there is one. Returns: its events."""
        if not self._is_open:
            return ""
        item = self.output[-1]
        item["status"] = status
        _, name, field, *_ = ITEMS[item["type"]]
        if "content" not in item:
            events = self._of_item(f"{name}.done", **{key: item[key] for key in (field, "name")})
        for part in item.get("content", ()):
            done = {key: part[key] for key in (field, "logprobs") if key in part}
            events = self._of_item(f"{name}.done", content_index=0, **done)
            events += self._of_item("content_part.done", content_index=0, part=part)
        return events + self._of_item("output_item.done", item=item)

    @property
    def _is_open(self) -> bool:
        """Return whether the last item is open."""
        return bool(self.output) and self.output[-1]["status"] == "in_progress"
