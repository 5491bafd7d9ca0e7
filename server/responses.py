"""OpenAI's Responses (`/v1/responses`) as another form of a chat: its request, its answer.

1. `Responses` reads a request as that of a chat: `instructions` and `input` as messages, calls and
   their results as such, formats in the chat's form.
2. `ResponseReply` writes the thinking, the text and the calls of a chat's answer as output items,
   in events. A whole answer is the last event's response.

Nothing is stored: `previous_response_id` is refused, and a client sends the whole conversation.
Source: OpenAI's API reference, Responses; the client `openai` 3.57 reads what is written here.
"""

from __future__ import annotations

import json
import time
from typing import Any

from pydantic import model_validator

from files.tokenizer import Tokenizer
from server.batcher import Delta, Refusal
from server.bodies import SHOWN, Chat, need, without_nulls
from server.call_forms import new_id
from server.parameters import RequestParams
from server.replies import ChatReply

LOGPROBS = "message.output_text.logprobs"  # in `include`, the only name that changes anything
STORED = {"previous_response_id", "conversation"}  # fields of what a server has stored
# fields that an answer repeats
REPEATED = {
    "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tools": [],
    "tool_choice": "auto", "reasoning": None, "text": {"format": {"type": "text"}},
}  # fmt: skip
# names that `Responses` has read
READ = {"input", "instructions", "include", "reasoning", "text", "background", "max_output_tokens"}
# items of an input that hold a text of the model, and where; others are left out
ANSWERS = {"message": "content", "reasoning": "reasoning_content"}
CALLS = ("function_call", "custom_tool_call")
# of items with a text: before an id, fields of the item, the type of its part, fields of the part
TEXTS: dict[str, tuple[str, dict, str, dict]] = {
    "reasoning": ("rs", {"summary": []}, "reasoning_text", {}),
    "message": ("msg", {"role": "assistant"}, "output_text", {"annotations": []}),
}


class Responses(Chat):
    """A request for a response, as one for a chat."""

    repeated: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, body: dict) -> dict:
        body = without_nulls(body)
        fault = "responses are not stored here; send the whole conversation as input"
        need(not body.keys() & STORED, fault, "input")
        need(not body.get("background"), "background = true is not served; leave it out", "input")
        need("n" not in body, "a response is one answer; leave n out", "n")
        chat = {name: body[name] for name in body.keys() - READ}
        chat["repeated"] = {name: body.get(name, value) for name, value in REPEATED.items()}
        chat["max_tokens"] = body.get("max_output_tokens", body.get("max_tokens"))
        chat["messages"], others = _messages(body.get("input"))
        chat["left_out"] = others
        if body.get("instructions"):
            chat["messages"].insert(0, {"role": "system", "content": body["instructions"]})
        if LOGPROBS in _of_kind(body, "include", []) or "top_logprobs" in body:
            chat["logprobs"] = True
        chat.setdefault("reasoning_effort", _of_kind(body, "reasoning", {}).get("effort"))
        form = _of_kind(body, "text", {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        chat.setdefault("response_format", form)
        return chat


def _of_kind(body: dict, name: str, default: Any) -> Any:
    """Return a field of the kind of its default."""
    value = body.get(name, default)
    kind = "a list" if isinstance(default, list) else "an object"
    need(isinstance(value, type(default)), f"{name} must be {kind}", name)
    return value


def _messages(items: Any) -> tuple[list[dict], set[str]]:
    """Return the items of an input as messages, the parts of an answer in one; other items."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], set()
    are_items = isinstance(items, list) and items and all(isinstance(i, dict) for i in items)
    need(are_items, "input must be a text, or a list of at least one object", "input")
    messages: list[dict] = []
    others = set()
    for item in items:
        message = _message(item)
        last = messages[-1] if messages else {"role": ""}
        if not message:
            others.add(f"{str(item['type'])[:SHOWN]} (input)")
        elif last["role"] == message["role"] == "assistant" and (
            "tool_calls" in message or "tool_calls" not in last
        ):
            for name in message.keys() - {"role"}:
                last[name] = last.get(name, []) + message[name]
        else:
            messages.append(message)
    need(messages != [], f"input has nothing that is served: {', '.join(others)}", "input")
    return messages, others


def _message(item: dict) -> dict:
    """Return an item of an input as a message, an answer's in lists; an empty one for others."""
    kind = item.get("type", "message")
    role = item.get("role")
    need(kind != "item_reference", "items are not stored here; send them as they came", "input")
    if kind == "message" and role != "assistant":
        return {"role": role, "content": item.get("content")}
    if str(kind).removesuffix("_output") in CALLS and str(kind).endswith("_output"):
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind in CALLS:
        arguments = item.get("arguments", {"input": item.get("input")} if "input" in item else None)
        called = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": called}
        return {"role": "assistant", "tool_calls": [call]}
    if kind not in ANSWERS:
        return {}
    content = item.get("content") or item.get("summary") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    need(isinstance(parts, list), f"an item of type {kind} must have a text", "input")
    return {"role": "assistant", ANSWERS[kind]: parts}


class ResponseReply(ChatReply):
    """A response: output items, one open at a time, whose texts grow."""

    def __init__(self, asked: RequestParams, model: str, tokenizer: Tokenizer):
        super().__init__(asked, model, tokenizer)
        self.events = 0  # so far
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
        """Add what a step brings. Returns: its events"""
        part = self.answers[0].add(piece)
        events = ""
        if part and part.thought:
            events += self._grow("reasoning", part.thought)
        if part and (part.text or (part.reason and not self.output and not self.asked.tools)):
            scored = [] if self.asked.body.likeliest is None else part.scored
            events += self._grow("message", part.text, logprobs=self.logprobs(scored)["content"])
        for call in part.calls if part else ():
            events += self._close() + self._call(call)
        return events

    def end(self) -> str:
        """Return the last events. Writes: the response."""
        answer = self.answers[0].whole
        status = "completed" if answer.reason == "stop" else "incomplete"
        events = self._close(status)
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        counts = self.usage
        thinking = {"reasoning_tokens": len(self.tokenizer.encode(answer.thought, bos=False))}
        # the second is required by the client's type; there is no cache that costs anything to fill
        cached = counts["prompt_tokens_details"] | {"cache_write_tokens": 0}
        self.response["status"] = status
        self.response["metrics"] = self.metrics
        self.response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"] | thinking,
            "total_tokens": counts["total_tokens"],
        }
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

    def _open(self, kind: str, prefix: str, **fields: Any) -> str:
        """Begin an item. Returns: the events"""
        item = {"type": kind, "id": f"{prefix}_{new_id()}", "status": "in_progress", **fields}
        self.output.append(item)
        return self._of_item("output_item.added", item=item)

    def _grow(self, kind: str, text: str, **more: list) -> str:
        """Add text to the open item of a kind, which may have to be begun.

        more: lists that grow with the text
        Returns: the events
        """
        prefix, fields, name, of_part = TEXTS[kind]
        events = ""
        if not (self._is_open and self.output[-1]["type"] == kind):
            part = {"type": name, "text": "", **of_part, **dict.fromkeys(more, [])}
            events = self._close() + self._open(kind, prefix, **fields, content=[])
            events += self._of_item("content_part.added", content_index=0, part=part)
            self.output[-1]["content"].append(part)
        part = self.output[-1]["content"][0]
        for field, grown in {"text": text, **more}.items():
            part[field] = part[field] + grown
        return events + self._of_item(f"{name}.delta", content_index=0, delta=text, **more)

    def _close(self, status: str = "completed") -> str:
        """End the open item, if there is one. Returns: its events."""
        if not self._is_open:
            return ""
        item = self.output[-1]
        item["status"] = status
        part = item["content"][0]
        done = {key: part[key] for key in ("text", "logprobs") if key in part}
        events = self._of_item(f"{part['type']}.done", content_index=0, **done)
        events += self._of_item("content_part.done", content_index=0, part=part)
        return events + self._of_item("output_item.done", item=item)

    def _call(self, call: dict) -> str:
        """Add the item of a call. Returns: its events"""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        events = self._open("function_call", "fc", call_id=call["id"], name=name, arguments="")
        kind = "function_call_arguments"
        events += self._of_item(f"{kind}.delta", delta=arguments)
        events += self._of_item(f"{kind}.done", arguments=arguments, name=name)
        self.output[-1] |= {"status": "completed", "arguments": arguments}
        return events + self._of_item("output_item.done", item=self.output[-1])

    @property
    def _is_open(self) -> bool:
        """Return whether the last item is open."""
        return bool(self.output) and self.output[-1]["status"] == "in_progress"
