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
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from options import require
from server.call_forms import NOTHING, Form, new_id

MOST_TOOLS = 128  # as OpenAI's
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
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


def read_tools(body: dict, find_form: Callable[[], Form]) -> Tools | None:
    """Read the tools of a request.

    find_form: called where there are tools; may raise ValueError
    Returns: None without any, and where none may be called. Raises: ValueError.
    """
    tools = body.get("tools", [])
    choice = body.get("tool_choice", "auto" if tools else "none")
    several = body.get("parallel_tool_calls", True)
    require(type(several) is bool, "parallel_tool_calls must be true or false")
    fits = isinstance(tools, list) and len(tools) <= MOST_TOOLS
    require(fits, f"tools must be a list of at most {MOST_TOOLS}")
    schemas = dict(map(_schema_of, tools))
    require(len(schemas) == len(tools), "two tools have the same name; rename one")
    forced = list(schemas)
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function")
        forced = [named.get("name") if isinstance(named, dict) else None]
        require(forced[0] in list(schemas), "tool_choice must name one of the tools")
    else:
        fault = f"tool_choice must be one of {', '.join(CHOICES)}, or a function by its name"
        require(choice in CHOICES, fault)
        fault = "tool_choice required needs tools; give them, or leave it out"
        require(choice != "required" or tools, fault)
    if choice == "none" or not tools:
        return None
    form = find_form()
    several = several and form.several
    return Tools(tools, schemas, [] if choice == "auto" else forced, several, form)


def _schema_of(tool: Any) -> tuple[str, dict]:
    """Return a tool's name and the schema of its arguments. Raises: ValueError."""
    function = tool.get("function") if isinstance(tool, dict) else None
    fits = isinstance(function, dict) and tool.get("type") == "function"
    require(fits, 'a tool must be {"type": "function", "function": {"name": ...}}')
    name = function.get("name")
    fits = isinstance(name, str) and NAME.fullmatch(name)
    require(fits, "a tool's name must have 1 to 64 letters, digits, _ or -")
    schema = function.get("parameters")
    if schema is None:
        return name, NOTHING
    fits = isinstance(schema, dict) and schema.get("type", "object") == "object"
    require(fits, f"the parameters of {name} must be a JSON schema of type object")
    return name, schema


def read_message(message: dict, content: str, earlier: Iterable[dict]) -> dict:
    """Return a message with calls, or of a call's result, as templates take it.

    content: its text; earlier: the messages before it
    Raises: ValueError.
    """
    if message["role"] == "tool":
        id = message.get("tool_call_id")
        calls = [call for each in earlier for call in each.get("tool_calls", ())]
        names = [call["function"]["name"] for call in calls if call["id"] == id]
        require(names, "a tool message must have the tool_call_id of a call before it")
        return message | {"name": names[-1], "content": content}
    calls = message["tool_calls"]
    require(message["role"] == "assistant", "tool_calls belong to an assistant message")
    require(isinstance(calls, list) and calls, "tool_calls must be a list of at least one call")
    if message.get("reasoning_content") and not content:
        # its name in the templates of gpt-oss and LFM2.5; gpt-oss takes one text before a call
        message = {"thinking": message["reasoning_content"]} | message
    return message | {"content": content, "tool_calls": list(map(_call, calls))}


def _call(call: Any) -> dict:
    """Return an earlier call, its arguments as an object, empty where there are none.

    Raises: ValueError.
    """
    function = call.get("function") if isinstance(call, dict) else None
    fits = isinstance(function, dict) and isinstance(call.get("id"), str)
    fault = "a call must have an id, and a function with its name and arguments, a JSON object"
    require(fits and isinstance(function.get("name"), str), fault)
    arguments = _arguments(function.get("arguments"))
    require(arguments is not None, fault)
    called = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": called}


def _arguments(value: Any) -> dict | None:
    """Return arguments as an object, in the forms that models and clients write; None: not any.

    A text is JSON, perhaps with line breaks as they are. Null, an empty text and an empty list, the
    empty object of some languages, are no arguments.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value.strip() or "{}", strict=False)
        except (ValueError, RecursionError):
            return None
    if value is None or value == []:
        return {}
    return value if isinstance(value, dict) else None


def one_call_each(messages: list[dict]) -> list[dict]:
    """Return a conversation with one call in a message, each before its result.

    messages: as `read_message` returns them
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


class Finder:
    """Takes the calls out of the text of one answer."""

    def __init__(self, tools: Tools):
        self.tools = tools
        self.form = tools.form
        self.count = 0  # calls so far
        self.held = ""  # text that may belong to a call
        begins = tools.forced or not self.form.tags
        self.stage = self._call if begins else self._content

    def push(self, text: str, last: bool) -> tuple[str, list[dict]]:
        """Add text. last: nothing follows. Returns: content; calls, as clients read them."""
        self.held += text
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
        known = self.form.marks
        marks = [held.find(mark) for mark in known if mark in held]
        begin = len(held)
        if marks:
            begin = len(held[: min(marks)].rstrip())
            self.stage = self._call
        elif not last:
            begun = [n for mark in known for n in range(1, len(mark)) if held.endswith(mark[:n])]
            begin = len(held[: begin - max(begun, default=0)].rstrip())
        self.held = held[begin:]
        return held[:begin]

    def _call(self, last: bool, calls: list[dict]) -> str:
        """Read calls, once they are whole. Returns: text that is none. Writes: calls."""
        held = self.held
        try:
            found, end = self.form.read(held, self.tools.schemas)
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
        if not any(end.startswith(rest) for end in self.form.ends):
            self.held = rest
            self.stage = self._call if rest[0] in self.form.follows else self._content
        elif last:
            self.held = ""
        return ""

    def _checked(self, name: Any, arguments: Any) -> dict:
        """Return a call, as clients read it. Raises: ValueError for one of no given tool."""
        require(name in list(self.tools.schemas), "no tool that is given")
        arguments = _arguments(arguments)
        require(arguments is not None, "no arguments")
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except TypeError:  # of Python's literals, as a set
            raise ValueError("no JSON") from None
        text.encode()  # raises for half a character
        return {"id": new_id(), "type": "function", "function": {"name": name, "arguments": text}}
