"""Tool calls of serve.py: `tools` and `tool_choice` in, `tool_calls` out.

1. The model's chat template writes the tools, earlier calls and their results into the prompt. A
   rendered probe shows the syntax of a call: JSON, behind a mark as <tool_call> or alone. Where
   the template takes one call a message, an answer has one, and earlier ones are split.
2. With tool_choice "auto", `Finder` takes the calls out of the text as it comes, those in a fenced
   block of JSON too, which models write instead. The rest of the text stays the content, as does a
   call that is not whole or not of a given tool. The thinking before it is none of its text.
3. With "required" or a named tool the mark ends the prompt, and a grammar (extras/grammar.py)
   forces the JSON of one call, with arguments that follow the tool's schema.

Trade-off: an event of a stream holds whole calls. With "auto" the arguments are the model's own:
`strict` changes nothing, and response_format cannot be had too.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from base.parsing import require
from hf.chat import ChatTemplate
from hf.thinking import behind_thinking, without_opening
from hf.tokenizer import Tokenizer

MOST_TOOLS = 128  # as OpenAI's
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PROBE = "probe_of_a_tool"
ANOTHER_PROBE = "probe_of_another_tool"
FENCE = "```"
KEYS = ("arguments", "parameters")  # of a call that is not in the template's form
OF_A_CALL = {"name", "type", "id"}  # the other keys of a call
CHOICES = ("none", "auto", "required")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class Syntax(NamedTuple):
    """The text of a call: `opening {"name": ..., key: ...} closing`."""

    opening: str
    key: str
    closing: str
    controls: frozenset[int]  # ids of the control tokens in opening and closing
    several: bool = True  # a message may have several calls

    @property
    def mark(self) -> str:
        """The text that announces calls; "" where there is none."""
        return self.opening.strip().rstrip("[").rstrip()

    @property
    def end(self) -> str:
        """The text behind a call, without the brackets of a list."""
        return self.closing.strip().lstrip("]").lstrip()


def syntax_of(template: ChatTemplate, tokenizer: Tokenizer) -> Syntax:
    """Return how a template writes calls. Raises: ValueError where it writes none."""
    function = {"name": PROBE, "description": "A probe.", "parameters": NOTHING}
    tools = [{"type": "function", "function": function}]
    id = new_id()
    call = {"name": PROBE, "arguments": {"x": 1}}
    calls = [{"id": id, "type": "function", "function": call}]
    asked = {"role": "user", "content": "A question."}
    answered = {"role": "assistant", "content": "The answer"}
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": id, "name": PROBE, "content": "A result."}
    # earlier answers are written without the thinking that the prompt may open
    prompt = without_opening(template.render_messages([asked], tools))
    require(PROBE in prompt, f"{template.title} knows no tools; leave them out")
    # behind the last message a template may write other things
    text = template.render_messages([asked, called, result], tools)
    fault = f"{template.title} writes tool calls in a form that is not known here; leave tools out"
    require(text.startswith(prompt), fault)
    opening, brace, _ = text.removeprefix(prompt).partition("{")
    opening = behind_thinking(opening)
    text = template.render_messages([asked, called], tools).removeprefix(prompt)
    written, end = _decoded(text, text.find(opening + brace) + len(opening))
    require(isinstance(written, dict) and written.get("name") == PROBE, fault)
    keys = [key for key, value in written.items() if value == call["arguments"]]
    require(keys, fault)
    turn_end = template.render_messages([asked, answered], tools).rpartition("The answer")[2]
    closing = text[end:].removesuffix(turn_end)
    ids = tokenizer.encode(opening + closing, bos=False, special=True)
    controls = frozenset(id for id in ids if not tokenizer.piece(id))
    more = calls[0] | {"id": new_id(), "function": call | {"name": ANOTHER_PROBE}}
    twice = called | {"tool_calls": [*calls, more]}
    results = [result, result | {"tool_call_id": more["id"], "name": ANOTHER_PROBE}]
    several = _writes_both(template, [asked, twice, *results], tools)
    return Syntax(opening, keys[0], closing, controls, several)


def _writes_both(template: ChatTemplate, messages: list[dict], tools: list[dict]) -> bool:
    """Return whether a template writes both calls of a message, and neither raises nor drops one.

    messages: with the calls of two tools in one message
    """
    try:
        template.render_messages(messages, tools)
        return ANOTHER_PROBE in template.render_messages(messages[:2], tools)
    except ValueError:
        return False


def new_id() -> str:
    """Return an id of a call. Mistral's template takes nine letters and digits."""
    return f"{random.getrandbits(36):09x}"


class Tools(NamedTuple):
    """The tools of a request."""

    given: list[dict]  # as the template takes them
    schemas: dict[str, dict]  # of the arguments, by the tool's name
    forced: list[str]  # tools of which one must be called
    several: bool  # an answer may have several calls
    syntax: Syntax

    def grammar(self) -> str:
        """Return the grammar of a forced call, in Lark."""
        from extras.grammar import STYLE, without_formats

        rules = ["start: " + " | ".join(f"call_{number}" for number in range(len(self.forced)))]
        for number, name in enumerate(self.forced):
            begin = json.dumps(f'{{"name": "{name}", "{self.syntax.key}": ')
            schema = without_formats(self.schemas[name])
            schema = json.dumps({"type": "object", **schema, "x-guidance": STYLE})
            rules.append(f'call_{number}: {begin} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: %json {schema}")
        return "\n".join(rules)


def read_tools(body: dict, find_syntax: Callable[[], Syntax]) -> Tools | None:
    """Read the tools of a request.

    find_syntax: called where there are tools; may raise ValueError
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
    syntax = find_syntax()
    several = several and syntax.several
    return Tools(tools, schemas, [] if choice == "auto" else forced, several, syntax)


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


class Finder:
    """Takes the calls out of the text of one answer."""

    def __init__(self, tools: Tools):
        mark = tools.syntax.mark
        end = re.escape(tools.syntax.end)
        self.tools = tools
        self.marks = [FENCE, mark] if mark else [FENCE]
        self.fenced = False  # the call that was read is in a block
        self.count = 0  # calls so far
        self.held = ""  # text that may belong to a call
        self.stage = self._call if tools.forced or not mark else self._content
        self.lead = re.compile(rf"\s*(?:{re.escape(mark)})?\s*({FENCE}\w*)?[\s\[]*")
        self.tail = re.compile(rf"[\s,;\]]*(?:{FENCE})?[\s,;\]]*(?:{end})?[\s,;\]]*")

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
        marks = [held.find(mark) for mark in self.marks if mark in held]
        begin = len(held)
        if marks:
            begin = len(held[: min(marks)].rstrip())
            self.stage = self._call
        elif not last:
            begun = [
                n for mark in self.marks for n in range(1, len(mark)) if held.endswith(mark[:n])
            ]
            begin = len(held[: begin - max(begun, default=0)].rstrip())
        self.held = held[begin:]
        return held[:begin]

    def _call(self, last: bool, calls: list[dict]) -> str:
        """Read a call, once it is whole. Returns: text that is none. Writes: calls."""
        held = self.held
        lead = self.lead.match(held)
        begin = lead.end()
        first = held[begin : begin + 1]
        value = None
        if first == "{":
            value, end = _decoded(held, begin)
        begun = first in ("", "{") or FENCE.startswith(held[begin:])
        if value is None and begun and not last:
            return ""
        call = self._checked(value)
        if call is None:
            end = begin + 1
            self.stage = self._content
        else:
            self.stage = self._behind
            self.fenced = self.fenced or lead[1] is not None
            if self.tools.several or not self.count:
                calls.append(call)
                self.count += 1
        self.held = held[end:]
        return held[:end] if call is None else ""

    def _behind(self, last: bool, calls: list[dict]) -> str:
        """Drop the end of a call, and a separator."""
        rest = self.held[self.tail.match(self.held).end() :]
        ends = [self.tools.syntax.end, FENCE] if self.fenced else [self.tools.syntax.end]
        if not any(end.startswith(rest) for end in ends):
            self.held = rest
            self.stage = self._call
            if rest[0] not in "{[":
                self.stage = self._content
                self.fenced = False
        elif last:
            self.held = ""
        return ""

    def _checked(self, value: Any) -> dict | None:
        """Return a call of a given tool, as clients read it; None for other JSON."""
        name = value.get("name") if isinstance(value, dict) else None
        if name not in list(self.tools.schemas):
            return None
        keys = [key for key in (self.tools.syntax.key, *KEYS) if key in value]
        if not keys and value.keys() - OF_A_CALL:
            return None  # another object with a name
        arguments = _arguments(value[keys[0]] if keys else None)
        if arguments is None:
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except ValueError:  # NaN, or half a character
            return None
        return {"id": new_id(), "type": "function", "function": {"name": name, "arguments": text}}


def _decoded(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value at a place and its end; None and the place where it is not whole.

    Line breaks within a text may be as they are: models that write files write them so.
    """
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin
