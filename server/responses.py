"""OpenAI's Responses (`/v1/responses`) as another form of a chat: its request, its answer.

1. `as_chat` writes a request as that of a chat: `instructions` and `input` as messages, calls and
   their results as such, tools and formats in the chat's form. RequestReader checks what comes out.
2. `ResponseReply` renders the thinking, the text and the calls of a `Reply` as output items, in
   the events of a stream or at its end. A whole answer is the last event's response.

Nothing is stored: `previous_response_id` is refused, and a client sends the whole conversation.
Tools that a server would run itself, as web_search, are left out, and the log names them.
Source: OpenAI's API reference, Responses; the client `openai` 3.57 reads what is written here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from files.tokenizer import Tokenizer
from options import log_note, require
from server.batcher import Delta, Refusal
from server.bodies import SHOWN, in_log, text_of, without_nulls
from server.call_forms import new_id
from server.parameters import RequestParams, refusal
from server.replies import Reply

LOGPROBS = "message.output_text.logprobs"  # in `include`, the only name that changes anything
RENAMED = {"max_output_tokens": "max_tokens"}
# names that change nothing here, or that `as_chat` has read
READ = {"input", "instructions", "include", "reasoning", "text", "truncation", "background"}


def as_chat(body: Any) -> dict:
    """Return a request for a response as one for a chat. Raises: Refusal."""
    try:
        require(isinstance(body, dict), "the body must be a JSON object")
        return _as_chat(without_nulls(body))
    except ValueError as error:
        raise refusal(error, "input") from None


def _as_chat(body: dict) -> dict:
    fault = "responses are not stored here; send the whole conversation as input"
    require("previous_response_id" not in body and "conversation" not in body, fault)
    require(not body.get("background"), "background = true is not served; leave it out")
    require("n" not in body, "a response is one answer; leave n out")
    chat = {RENAMED.get(name, name): body[name] for name in body.keys() - READ}
    if body.get("instructions"):
        chat["messages"] = [{"role": "system", "content": body["instructions"]}]
    chat["messages"] = chat.get("messages", []) + _messages(body.get("input"))
    if LOGPROBS in _of_kind(body, "include", []) or "top_logprobs" in body:
        chat["logprobs"] = True
    if _of_kind(body, "reasoning", {}).get("effort"):
        chat["reasoning_effort"] = body["reasoning"]["effort"]
    form = _of_kind(body, "text", {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    if form:
        chat["response_format"] = form
    if "tools" in chat:
        chat["tools"] = _tools(_of_kind(body, "tools", []))
    choice = chat.get("tool_choice")
    if isinstance(choice, dict) and "name" in choice:
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    return chat


def _of_kind(body: dict, name: str, default: Any) -> Any:
    """Return a field of the kind of its default."""
    value = body.get(name, default)
    kind = "a list" if isinstance(default, list) else "an object"
    require(isinstance(value, type(default)), f"{name} must be {kind}")
    return value


def _tools(tools: list) -> list[dict]:
    """Return the functions among tools, in the form of chats."""
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    others = {str(kind) for kind in kinds if kind != "function"}
    if others:
        log_note(f"tools that are left out, as they are no functions: {in_log(others)}")
    functions = [tool for tool, kind in zip(tools, kinds) if kind == "function"]
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in functions
    ]


def _messages(items: Any) -> list[dict]:
    """Return the items of an input as messages, the parts of an answer in one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    require(isinstance(items, list) and items, "input must be a text, or a list of at least one")
    messages: list[dict] = []
    answer: dict | None = None  # the message that further parts of an answer go to
    for item in items:
        require(isinstance(item, dict), "an item of input must be an object")
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            answer = None
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            answer = None
            result = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
            messages.append({"role": "tool", **result})
        else:
            if answer is None or (kind != "function_call" and "tool_calls" in answer):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add_to(answer, item, kind)
    return messages


def _add_to(answer: dict, item: dict, kind: str) -> None:
    """Add an item of the assistant's to its message. Writes: answer."""
    if kind == "message":
        text = text_of(item.get("content"))
        require(isinstance(text, str), "a message must have a role and a text as its content")
        answer["content"] += text
    elif kind == "function_call":
        called = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": called}
        answer.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        answer["reasoning_content"] = text_of(item.get("content") or item.get("summary") or "")
    else:
        raise ValueError(f"input of type {str(kind)[:SHOWN]} is not served; leave it out")


class ResponseReply(Reply):
    """A response: output items, one open at a time, whose texts grow."""

    def __init__(self, asked: RequestParams, body: dict, model: str, tokenizer: Tokenizer):
        """body: the request"""
        super().__init__(asked, True, model, tokenizer)
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
            "truncation": "disabled",
            "usage": None,
        }
        defaults = {
            "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tools": [],
            "tool_choice": "auto", "reasoning": None, "text": {"format": {"type": "text"}},
        }  # fmt: skip
        self.response |= {name: body.get(name, value) for name, value in defaults.items()}

    def whole(self, answers: list[Delta]) -> dict[str, Any]:
        """Return the response."""
        (answer,) = answers
        self.piece(answer)
        self.end([answer.tokens])
        return self.response

    def begin(self) -> str:
        """Return the first events of a stream."""
        return self._told("created", response=self.response) + self._told(
            "in_progress", response=self.response
        )

    def piece(self, piece: Delta) -> str:
        """Return the events of a piece."""
        self.drafts = self.drafts.and_more(piece.drafts)
        delta, _ = self._delta(piece)
        logprobs = [] if self.asked.likeliest is None else self._of_chat(piece)["content"]
        events = ""
        if delta.get("reasoning_content"):
            self.thoughts += delta["reasoning_content"]
            events += self._grow("reasoning", delta["reasoning_content"], [])
        if delta.get("content") or (piece.reason and not self.output and not self.asked.tools):
            events += self._grow("message", delta["content"], logprobs)
        for call in delta.get("tool_calls", ()):
            events += self._close() + self._call(call)
        if piece.reason:
            self.response["status"] = "completed" if piece.reason == "stop" else "incomplete"
        return events

    def end(self, tokens: Iterable[int]) -> str:
        """Return the last events of a stream. Writes: the response."""
        status = self.response["status"]
        events = self._close()
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        counts = self.usage(tokens)
        thinking = {"reasoning_tokens": len(self.tokenizer.encode(self.thoughts, bos=False))}
        self.response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"] | thinking,
            "total_tokens": counts["total_tokens"],
        }
        self.response["metrics"] = self.metrics
        return events + self._told(status, response=self.response)

    def fault(self, error: Refusal) -> str:
        """Return the event of an error, which ends a stream."""
        told = error.body["error"]
        return self._event("error", {name: told[name] for name in ("code", "message", "param")})

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        event = {"type": kind, "sequence_number": self.events, **fields}
        self.events += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _told(self, kind: str, **fields: Any) -> str:
        return self._event(f"response.{kind}", fields)

    def _of_item(self, kind: str, **fields: Any) -> str:
        """Return an event of the last item."""
        number = {"output_index": len(self.output) - 1, "item_id": self.output[-1]["id"]}
        return self._told(kind, **number, **fields)

    def _open(self, kind: str, **fields: Any) -> str:
        """Begin an item. Returns: its event."""
        name = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"type": kind, "id": f"{name}_{new_id()}", "status": "in_progress", **fields}
        self.output.append(item)
        return self._of_item("output_item.added", item=item)

    def _grow(self, kind: str, text: str, logprobs: list) -> str:
        """Add text to the open item of a kind, which may have to be begun. Returns: the events."""
        events = ""
        if not self._is_open(kind):
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            fields: dict[str, Any] = {"summary": []}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                fields = {"role": "assistant"}
            events = self._close() + self._open(kind, **fields, content=[])
            events += self._of_item("content_part.added", content_index=0, part=part)
            self.output[-1]["content"].append(part)
        part = self.output[-1]["content"][0]
        part["text"] += text
        further = {}
        if kind == "message":
            part["logprobs"] += logprobs
            further = {"logprobs": logprobs}
        return events + self._of_item(
            f"{part['type']}.delta", content_index=0, delta=text, **further
        )

    def _call(self, call: dict) -> str:
        """Add a call. Returns: its events."""
        called = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        events = self._open("function_call", **called)
        item = self.output[-1]
        item["arguments"] = call["function"]["arguments"]
        name = "function_call_arguments"
        events += self._of_item(f"{name}.delta", delta=item["arguments"])
        fields = {"arguments": item["arguments"], "name": item["name"]}
        return events + self._of_item(f"{name}.done", **fields) + self._close()

    def _close(self) -> str:
        """End the open item, if there is one. Returns: its events."""
        if not self._is_open():
            return ""
        item = self.output[-1]
        item["status"] = "completed"
        if self.response["status"] == "incomplete":
            item["status"] = "incomplete"
        events = ""
        for part in item.get("content", ()):
            further = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            done = {"content_index": 0, "text": part["text"], **further}
            events += self._of_item(f"{part['type']}.done", **done)
            events += self._of_item("content_part.done", content_index=0, part=part)
        return events + self._of_item("output_item.done", item=item)

    def _is_open(self, kind: str = "") -> bool:
        """Return whether the last item is open, and of a kind. kind: "" for any"""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return False
        return kind in ("", self.output[-1]["type"])
