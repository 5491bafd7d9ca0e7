"""Tool calls of serve.py: `tools` and `tool_choice` in, `tool_calls` out.

1. The model's chat template writes the tools, earlier calls and their results into the prompt, and
   shows the form of a call (call_forms.py). Where it takes one call a message, an answer has one,
   and earlier ones are split.
2. With tool_choice "auto", `Finder` takes the calls out of the text as it comes. The rest of the
   text stays the content, as does a call that is not whole or not of a given tool. The thinking
   before it is none of its text.
3. With "required" or a named tool the opening of a call ends the prompt, and a grammar
   (drafts/grammar.py) forces the rest of it, with arguments that follow the tool's schema.

Trade-off: an event of a stream holds whole calls. With "auto" the arguments are the model's own:
`strict` changes nothing, and response_format cannot be had too.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from options import require
from server.bodies import NOTHING, Chat, arguments_of, without_nulls
from server.call_forms import Form, new_id

CHOICES = ("none", "auto", "required")


class Tools(NamedTuple):
    """The tools of a request."""

    given: list[dict]  # as the template takes them
    schemas: dict[str, dict]  # of the arguments, by the tool's name
    forced: list[str]  # tools of which one must be called
    several: bool  # an answer may have several calls
    form: Form

    def grammar(self) -> str:
        """Return the grammar of a forced call, in Lark. Raises: ValueError where there is none."""
        calls = {f"call_{number}": name for number, name in enumerate(self.forced)}
        rules = ["start: " + " | ".join(calls)]
        for call, name in calls.items():
            rules += self.form.rules(call, name, self.schemas[name])
        return "\n".join(rules)


def read_tools(asked: Chat, find_form: Callable[[], Form]) -> Tools | None:
    """Read the tools of a request.

    find_form: called where there are tools; may raise ValueError
    Returns: None without any, and where none may be called. Raises: ValueError.
    """
    functions = [without_nulls(tool["function"]) for tool in asked.tools]
    schemas = {each["name"]: each.get("parameters", NOTHING) for each in functions}
    require(len(schemas) == len(functions), "two tools have the same name; rename one")
    choice, allowed = _choice(asked.tool_choice or ("auto" if schemas else "none"))
    require(
        choice in CHOICES, f"tool_choice must be one of {', '.join(CHOICES)}, or name functions"
    )
    fault = "tool_choice must name one of the tools"
    require(allowed is None or {*allowed} <= schemas.keys(), fault)
    fault = "tool_choice required needs tools; give them, or leave it out"
    require(choice != "required" or schemas, fault)
    if allowed is not None:
        schemas = {name: schemas[name] for name in allowed}
    if choice == "none" or not schemas:
        return None
    form = find_form()
    several = asked.parallel_tool_calls and form.several
    forced = list(schemas) if choice == "required" else []
    return Tools(asked.tools, schemas, forced, several, form)


def _choice(asked: Any) -> tuple[Any, list[str] | None]:
    """Return `tool_choice` as a word, and the names of the functions that it allows; None: all.

    Functions are named in the form of chats or in that of Responses.
    """
    if not isinstance(asked, dict):
        return asked, None
    if asked.get("type") == "allowed_tools":
        inner = asked.get("allowed_tools", asked)
        named = inner.get("tools") if isinstance(inner, dict) else None
        require(isinstance(named, list), "tool_choice allowed_tools needs a list of tools")
        return inner.get("mode"), [name for each in named for name in _choice(each)[1] or ()]
    function = asked.get("function", asked)
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return "required", [function["name"]]
    return asked.get("type"), None


def one_call_each(messages: list[dict]) -> list[dict]:
    """Return a conversation with one call in a message, each before its result.

    messages: as `Chat.conversation` returns them
    """
    split: list[dict] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results = {}  # of its calls, by their ids
        while left and left[0]["role"] == "tool":
            result = left.popleft()
            results[result["tool_call_id"]] = result
        for call in calls:
            split.append(message | {"tool_calls": [call]})
            if call["id"] in results:
                split.append(results.pop(call["id"]))
            message = message | {"content": ""}  # before the first call alone
        split += results.values()
    return split


def as_taken(messages: list[dict], form: Form) -> list[dict]:
    """Return a conversation with its calls as the template takes them."""
    if not form.several:
        messages = one_call_each(messages)
    return [_taken(message, form) if "tool_calls" in message else message for message in messages]


def _taken(message: dict, form: Form) -> dict:
    """Return a message with calls as the template takes it."""
    calls = message["tool_calls"]
    if form.drops:
        return message | {"content": message["content"] + form.written(calls)}
    if not form.takes_text:
        return message
    texts = []
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        texts.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": texts}


def mark_in(text: str, marks: list[str]) -> tuple[int, bool]:
    """Return where the first mark begins, or may begin at the end; whether it is whole."""
    found = [text.find(mark) for mark in marks if mark in text]
    if found:
        return min(found), True
    begun = [n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return len(text) - max(begun, default=0), False


class Finder:
    """Takes the calls out of the text of one answer."""

    def __init__(self, tools: Tools):
        self.tools = tools
        self.form = tools.form
        self.count = 0  # calls so far
        self.held = ""  # text that may belong to a call
        self.ended = False  # by the model
        begins = tools.forced or not self.form.tags
        self.stage = self._call if begins else self._content

    def push(self, text: str, reason: str | None) -> tuple[str, list[dict]]:
        """Add text. Returns: content; calls, as clients read them.

        reason: why nothing follows, "stop" where the model itself ended; None: more may
        """
        self.held += text
        self.ended = reason == "stop"
        last = reason is not None
        content = ""
        calls: list[dict] = []
        stage = None
        while stage != self.stage:
            stage = self.stage
            content += stage(last, calls)
        return content, calls

    def _content(self, last: bool, calls: list[dict]) -> str:
        """Return the text before a mark, or before the beginning of one."""
        held = self.held
        begin, whole = mark_in(held, self.form.marks)
        if whole:
            self.stage = self._call
        elif last:
            begin = len(held)
        if whole or not last:
            begin = len(held[:begin].rstrip())
        self.held = held[begin:]
        return held[:begin]

    def _call(self, last: bool, calls: list[dict]) -> str:
        """Read calls, once they are whole. Returns: text that is none. Writes: calls."""
        held = self.held
        try:
            found, end = self.form.read(held, self.tools.schemas, self.ended)
            found = [self._checked(*call) for call in found]
        except (EOFError, ValueError, RecursionError) as error:
            if isinstance(error, EOFError) and not last:
                return ""
            self.stage = self._content
            text = held[: len(held) - len(held.lstrip()) + 1]  # the rest may begin with a mark
            self.held = held.removeprefix(text)
            return text
        self.held = held[end:]
        self.stage = self._behind
        if not self.tools.several:
            found = found[: 1 - self.count]
        calls += found
        self.count += len(found)
        return ""

    def _behind(self, last: bool, calls: list[dict]) -> str:
        """Drop the end of a call, and a separator."""
        rest = self.held[self.form.tail.match(self.held).end() :]
        if rest and not any(end.startswith(rest) for end in self.form.ends):
            self.held = rest
            another = self.form.kind == "object" and rest[0] in "{["  # without its opening
            self.stage = self._call if another else self._content
        elif last:
            self.held = ""
        return ""

    def _checked(self, name: Any, arguments: Any) -> dict:
        """Return a call, as clients read it. Raises: ValueError for one of no given tool."""
        known = list(self.tools.schemas)
        if name not in known:  # a model may write a namespace before it
            name = str(name).removeprefix("functions.").strip()
        require(name in known, "no tool that is given")
        try:
            text = json.dumps(arguments_of(arguments), ensure_ascii=False, allow_nan=False)
        except TypeError:  # of Python's literals, as a set
            raise ValueError("no JSON") from None
        text.encode()  # raises for half a character
        return {"id": new_id(), "type": "function", "function": {"name": name, "arguments": text}}
